"""With chex: types written as `chex.dataclass`, its assertions on trees with implicit arrays, its variants."""

import copy
import dataclasses
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import haiku_implicit as hki
from haiku_implicit.core.messages import expecting


@chex.dataclass
class Mapped(hki.ImplicitArray, core_ndim=2):
    """The matrix `u vᵀ`, as chex writes dataclasses: a mapping too, made by keyword."""

    u: chex.Array
    v: chex.Array
    name: str = hki.aux_field(default="mapped")

    def compute_shape(self):
        return (*self.u.shape, self.v.shape[-1])

    def compute_dtype(self):
        return self.u.dtype

    def materialize(self):
        return self.u[..., :, None] * self.v[..., None, :]


@chex.dataclass(mappable_dataclass=False)
class Plain(hki.ImplicitArray, core_ndim=2):
    """`Mapped` as a dataclass alone, and validated."""

    u: chex.Array
    v: chex.Array
    name: str = hki.aux_field(default="plain")

    def __post_init__(self):
        super().__post_init__()
        with expecting("Plain: expected u and v with one axis or more", ValueError):
            chex.assert_shape([self.u, self.v], (..., None))

    def compute_shape(self):
        return (*self.u.shape, self.v.shape[-1])

    def compute_dtype(self):
        return self.u.dtype

    def materialize(self):
        return self.u[..., :, None] * self.v[..., None, :]


@hki.binary_handler("dot_general")
def dot_with_outer(call, x: jax.Array, w: Mapped | Plain):
    """`x @ (u vᵀ)` as `(x @ u) vᵀ`, and `(u vᵀ) @ x` as `u (v @ x)`."""
    if w.ndim != 2 or len(call.contracted[1]) != 1 or call.batch[1]:
        return NotImplemented
    (of_x,), (of_w,) = call.contracted
    summed, kept = (w.u, w.v) if of_w == 0 else (w.v, w.u)
    t = jnp.tensordot(x, summed, (of_x, 0))
    return jnp.multiply.outer(*call.ordered(t, kept))


TYPES = pytest.mark.parametrize("kind", [Mapped, Plain])

U, V, X = jax.device_put(
    [np.float32([1, 2, 3]), np.float32([0.5, -1]), np.float32(range(12)).reshape(4, 3)]
)
W = np.outer(U, V)


def matmul(x, w):
    return x @ w


@pytest.fixture(params=["eager", "jit"])
def run(request):
    wrap = jax.jit if request.param == "jit" else lambda f: f
    return lambda fun, *args: wrap(hki.use_implicit_args(fun))(*args)


# --- types written as `chex.dataclass` ------------------------------------------------------------


@TYPES
def test_a_chex_dataclass_is_an_implicit_type(kind, run, never_dense):
    w = kind(u=U, v=V)
    assert (w.shape, w.dtype, w.size, w.core_ndim) == ((3, 2), jnp.float32, 6, 2)
    assert hki.materialize(w).tolist() == W.tolist()
    chex.assert_trees_all_close(run(matmul, X, w), X @ W, rtol=1e-6)
    chex.assert_trees_all_close(run(matmul, w, X[:2]), W @ X[:2], rtol=1e-6)
    kept = run(lambda w: w[None], w)
    assert type(kept) is kind and (kept.shape, kept.name) == ((1, 3, 2), w.name)


@TYPES
def test_static_fields_of_a_chex_dataclass_are_static(kind):
    w = kind(u=U, v=V, name="other")
    assert [path[0][0].name for path in jax.tree_util.tree_flatten_with_path(w)[0]] == ["u", "v"]
    assert jax.tree.structure(w) != jax.tree.structure(kind(u=U, v=V))
    assert jax.tree.map(lambda x: 2 * x, w).name == "other"


@TYPES
def test_copies_of_a_chex_dataclass(kind):
    w = kind(u=U, v=V)
    assert w.aval.shape == (3, 2)  # which is kept, and must not go into changed copies
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), w.replace(name="other")):
        assert type(other) is kind
        chex.assert_trees_all_equal(hki.materialize(other), hki.materialize(w))
    doubled = [w.replace(u=2 * U), dataclasses.replace(w, u=2 * U), w._replace(u=2 * U)]
    chex.assert_trees_all_equal(*[hki.materialize(x) for x in doubled], jnp.asarray(2 * W))
    assert w._replace(u=jnp.ones(5)).shape == (5, 2)


@TYPES
@pytest.mark.usefixtures("never_dense")
def test_transformations_of_a_chex_dataclass(kind):
    product = hki.use_implicit_args(matmul)
    w = kind(u=U, v=V)
    grads = jax.grad(lambda w: product(X, w).sum())(w)
    assert type(grads) is kind
    chex.assert_trees_all_close(grads.u, X.sum(0) * V.sum())
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), w)
    want = jnp.stack([X @ W, 4 * (X @ W)])
    chex.assert_trees_all_close(jax.vmap(product, (None, 0))(X, stacked), want, rtol=1e-6)
    body = hki.use_implicit_args(lambda ws: jax.lax.scan(lambda c, w: (c, X @ w), 0, ws)[1])
    chex.assert_trees_all_close(body(stacked), want, rtol=1e-6)


def test_the_mapping_that_chex_makes_of_a_dataclass():
    w = Mapped(u=U, v=V)
    assert (w["u"] is U) and set(w) >= {"u", "v", "name"}
    with pytest.raises(ValueError, match="positional"):
        Mapped(U, V)


def test_a_frozen_chex_dataclass_cannot_inherit():
    """As no dataclass can be frozen whose base is not; chex and Python say the same."""
    for frozen in (chex.dataclass(frozen=True), dataclasses.dataclass(frozen=True)):
        with pytest.raises(
            TypeError, match="cannot inherit frozen dataclass from a non-frozen one"
        ):
            frozen(type("Frozen", (hki.ImplicitArray,), {}))


# --- checks of constructors -----------------------------------------------------------------------


def test_what_chex_asserts_is_an_error_of_the_library():
    sentence = r"Plain: expected u and v with one axis or more \(chex.assert_shape: .*input 0 .*\)$"
    with pytest.raises(ValueError, match=sentence) as raised:
        Plain(u=jnp.float32(1), v=V)
    assert "\n" not in str(raised.value)
    with pytest.raises(
        TypeError, match=r"^no list \(chex.assert_trees_all_equal_structs: .*\)$"
    ) as e:
        with expecting("no list", TypeError):
            chex.assert_trees_all_equal_structs((1,), [1])
    assert "\n" not in str(e.value)
    with pytest.raises(KeyError), expecting("other errors are not touched"):
        raise KeyError("key")


def zeros(*shape, dtype=np.float32):
    return jax.device_put(np.zeros(shape, dtype))


LORA = dict(w=zeros(2, 3, 4), a=zeros(2, 3, 1), b=zeros(2, 1, 4))


@pytest.mark.parametrize(
    "make, bad, error, message",
    [
        (hki.LoRA, dict(LORA, b=zeros(2, 2, 4)), ValueError,
         r"LoRA: expected w .* got .* b \[2, 2, 4\] \(chex.assert_shape: .*expected \(2, 1, 4\)"),
        (hki.LoRA, dict(LORA, a=zeros(2, 3, 1, dtype=np.int32)), TypeError,
         r"LoRA: a must be of a floating dtype, got int32; .* \(chex.assert_type: "),
        (hki.ScaledMatrix, dict(matrix=zeros(2, 3), scale=zeros(3)), ValueError,
         r"ScaledMatrix: expected .*scale \[3\] \(chex.assert_shape: .*expected \(2\)"),
        (hki.SymbolicConstant, dict(value=zeros(2), shape=()), ValueError,
         r"value: expected one number, got .* \(chex.assert_rank: "),
    ],
)  # fmt: skip
def test_constructors_say_what_was_expected_and_what_chex_found(make, bad, error, message):
    with pytest.raises(error, match=message):
        make(**bad)


@pytest.mark.parametrize(
    "make", [lambda w, a, b: hki.LoRA(w, a, b), lambda w, a, _: hki.ScaledMatrix(w, a[..., 0])]
)
def test_constructors_check_tracers_and_implicit_fields(make):
    parts = list(LORA.values())
    made = [jax.jit(make)(*parts), jax.eval_shape(make, *parts)]
    made.append(make(hki.Zeros(shape=(2, 3, 4)), *parts[1:]))
    made.append(make(hki.QuantizedMatrix.quantize(jnp.ones((2, 3, 4)), "int8"), *parts[1:]))
    assert [w.shape for w in made] == [(2, 3, 4)] * 4
    wrong = jnp.zeros((2, 4, 4))
    for run in (jax.jit, jax.eval_shape):
        with pytest.raises(ValueError, match=r"expected .* \(chex.assert_shape: "):
            run(make, wrong, *parts[1:]) if run is jax.eval_shape else run(make)(wrong, *parts[1:])


# --- assertions on trees --------------------------------------------------------------------------


def trees():
    """Trees of implicit arrays, each with another of the same kind and other values."""
    rows = jnp.arange(1.0, 13.0).reshape(3, 4)
    yield hki.LoRA(rows, jnp.ones((3, 2)), jnp.ones((2, 4))), lambda x: 2 * x
    yield hki.ScaledMatrix(rows, jnp.ones(3)), lambda x: 2 * x
    yield hki.QuantizedMatrix.quantize(rows, "int8"), lambda x: x + jnp.ones_like(x)
    yield Mapped(u=U, v=V), lambda x: 2 * x
    yield Plain(u=U, v=V), lambda x: 2 * x


@pytest.mark.parametrize("w, change", list(trees()), ids=lambda x: type(x).__name__)
def test_assertions_on_trees_with_implicit_arrays(w, change):
    tree, same = {"w": w, "b": jnp.ones(3)}, {"w": jax.tree.map(jnp.array, w), "b": jnp.ones(3)}
    other = {"w": jax.tree.map(change, w), "b": jnp.ones(3)}
    dense = {"w": hki.materialize(w), "b": jnp.ones(3)}
    for check in (
        chex.assert_trees_all_close,
        chex.assert_trees_all_equal,
        chex.assert_trees_all_equal_structs,
        chex.assert_trees_all_equal_shapes,
        chex.assert_trees_all_equal_dtypes,
        chex.assert_trees_all_equal_shapes_and_dtypes,
    ):
        check(tree, same)
        with pytest.raises(AssertionError):
            check(tree, dense)
    for check in (chex.assert_trees_all_close, chex.assert_trees_all_equal):
        with pytest.raises(AssertionError):
            check(tree, other)
    chex.assert_tree_all_finite(tree)
    chex.assert_tree_no_nones(tree["b"])
    chex.assert_shape(w, w.shape)
    chex.assert_rank(w, 2)
    chex.assert_type(w, jnp.floating)
    chex.assert_equal_shape([w, dense["w"]])
    with pytest.raises(AssertionError, match="chex|Chex"):
        chex.assert_shape(w, (*w.shape, 1))


def test_constants_are_compared_by_their_structure():
    """They have no leaves, the value is a part of the tree's structure."""
    one = [hki.SymbolicConstant(x, shape=(2,), dtype=jnp.float32) for x in (1.0, 1.0, 2.0)]
    chex.assert_trees_all_equal(*one[:2])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(one[0], one[2])


def test_max_traces_counts_traces_with_implicit_arrays():
    traced = []

    @jax.jit
    @chex.assert_max_traces(n=1)
    @hki.use_implicit_args
    def product(x, w):
        traced.append(w.shape)
        return x @ w

    lora = hki.LoRA(jnp.ones((3, 2)), jnp.ones((3, 1)), jnp.ones((1, 2)))
    for i in range(3):
        product(X, jax.tree.map(lambda y, i=i: y * i, lora))
    assert traced == [(3, 2)]
    with pytest.raises(AssertionError, match="traced > 1 times"):
        product(X, lora._replace(factor=jnp.ones(())))  # another structure, so another program


# --- variants -------------------------------------------------------------------------------------


class VariantsTest(chex.TestCase, parameterized.TestCase):
    """`chex.variants` of functions with implicit arguments and results."""

    def make(self):
        lora = hki.LoRA(jnp.asarray(W), jnp.ones((3, 1)), jnp.ones((1, 2)))
        return {"lora": lora, "mapped": Mapped(u=U, v=V)}

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_products(self):
        params = self.make()

        @self.variant
        @hki.use_implicit_args
        def model(x, params):
            return x @ params["lora"] + x @ params["mapped"]

        chex.assert_trees_all_close(model(X, params), X @ (2 * W + 1), rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_results(self):
        double = self.variant(hki.use_implicit_args(lambda params: params["lora"] * 2.0))
        got = double(self.make())
        self.assertIsInstance(got, hki.LoRA)
        chex.assert_trees_all_close(hki.materialize(got), jnp.asarray(2 * W + 2), rtol=1e-6)
