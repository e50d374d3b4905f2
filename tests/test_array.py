"""`ImplicitArray` itself: a dataclass, a pytree, a shape and a dtype."""

import copy
import dataclasses
import pathlib
import pickle
import subprocess
import sys
import textwrap
from functools import partial
from typing import Any

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests.cases import CASES, Diagonal, Outer

ROOT = pathlib.Path(__file__).parents[1]


# --- types of the kinds that a user writes --------------------------------------------------------


class Zeros(hki.ImplicitArray):
    """The first example in qax's README, under our names: no decorator and no field."""

    default_dtype = jnp.float32

    def materialize(self):
        return jnp.zeros(self.shape, self.dtype)

    def __str__(self):
        return f"Zeros({self.shape}, {self.dtype})"


@dataclasses.dataclass
class Scaled(hki.ImplicitArray):
    """Children of each kind, and static fields."""

    x: hki.ArrayValue
    extra: Any = None
    label: str = hki.aux_field(default="none", metadata={"note": "kept"})
    power: int = hki.aux_field(default=1)

    def materialize(self):
        return self.x**self.power


def plain(**attributes):
    """A new type of one field `x`, with more methods or attributes."""
    namespace = {"__annotations__": {"x": Any}, "materialize": lambda self: self.x, **attributes}
    return dataclasses.dataclass(type("Plain", (hki.ImplicitArray,), namespace))


X = jnp.arange(6.0).reshape(2, 3)


# --- construction ----------------------------------------------------------------------------------


def test_without_the_decorator():
    z = Zeros(shape=(2, 3))
    assert (z.shape, z.dtype, z.ndim, z.size, z.nbytes, len(z)) == ((2, 3), np.float32, 2, 6, 0, 2)
    assert repr(z) == "Zeros(float32[2,3])" and str(z) == "Zeros((2, 3), float32)"
    assert Zeros(shape=(2,), dtype=jnp.int32).dtype == np.int32
    assert jax.tree.leaves(z) == []
    np.testing.assert_array_equal(hki.materialize(z), jnp.zeros((2, 3)))


@pytest.mark.parametrize("keywords", [{}, {"eq": False}, {"repr": False}, {"frozen": False}])
def test_the_decorator_leaves_repr_equality_and_hash_alone(keywords):
    @dataclasses.dataclass(**keywords)
    class Own(hki.ImplicitArray):
        x: Any

        def materialize(self):
            return self.x

    a, b = Own(X), Own(X)
    assert repr(a) == "Own(float32[2,3], x=float32[2,3])"
    assert a == a and a != b and len({a, b}) == 2


def test_a_type_may_have_its_own_repr_equality_and_hash():
    own = plain(
        __repr__=lambda self: "mine", __eq__=lambda self, y: True, __hash__=lambda self: 7
    )
    assert repr(own(X)) == "mine" and own(X) == own(2 * X) and hash(own(X)) == 7


def test_materialize_is_the_one_thing_to_write():
    @dataclasses.dataclass
    class Nothing(hki.ImplicitArray):
        x: Any

    with pytest.raises(TypeError, match="abstract.*materialize"):
        Nothing(X)
    with pytest.raises(TypeError):
        hki.ImplicitArray()


def test_class_keywords():
    class Own(Zeros, commute_ops=False, warn_on_materialize=False, core_ndim=2):
        pass

    class Child(Own):
        pass

    for cls in (Own, Child):
        assert not cls.commute_ops and not cls.warn_on_materialize and cls.core_ndim == 2
    assert Zeros.commute_ops and Zeros.warn_on_materialize and Zeros.core_ndim is None
    with pytest.raises(TypeError, match="no_such"):
        type("Bad", (Zeros,), {}, no_such=1)


def test_validation_with_chex_in_post_init():
    @dataclasses.dataclass
    class Checked(hki.ImplicitArray):
        x: Any

        def __post_init__(self):
            super().__post_init__()
            chex.assert_rank(self.x, 2)
            chex.assert_type(self.x, jnp.float32)

        def materialize(self):
            return self.x

    x = Checked(X)
    with pytest.raises(AssertionError):
        Checked(X[0])
    with pytest.raises(AssertionError):
        Checked(X.astype(jnp.int32))
    # JAX unflattens with placeholders, which must pass.
    structure = jax.tree.structure(x)
    for placeholder in (object(), None, 0, "x", True, jax.ShapeDtypeStruct((1,), jnp.int8)):
        assert structure.unflatten([placeholder]).x is placeholder
        repr(structure.unflatten([placeholder]))
    assert jax.tree.map(lambda _: None, x).x is None
    jax.vmap(lambda x: x, in_axes=Checked(X)._replace(x=0))(x)
    jax.jit(lambda x: x)(x)
    assert jax.eval_shape(lambda x: x, x).x.shape == (2, 3)


@pytest.mark.parametrize("keywords", [{}, {"kw_only": True}, {"slots": False}])
def test_chex_dataclass_mixes_with_implicit_arrays(keywords):
    @chex.dataclass
    class State:
        w: Any
        n: Any

    state = State(w=Outer(X[0], X[1]), n=jnp.ones(()))
    out = jax.jit(hki.use_implicit_args(lambda s: State(w=s.w * 2, n=s.n + s.w.sum())))(state)
    dense = hki.materialize(state.w)
    chex.assert_trees_all_close(hki.materialize(out.w), dense * 2)
    chex.assert_trees_all_close(out.n, 1 + dense.sum())


# --- shape and dtype -------------------------------------------------------------------------------

SHAPE, DTYPE = (6,), np.dtype(np.float16)


@pytest.mark.parametrize("dtype_first", [False, True])
@pytest.mark.parametrize("known", ["explicit", "compute", "default", "inferred"])
@pytest.mark.parametrize("also", [False, True], ids=["alone", "with all that come after"])
def test_where_shape_and_dtype_come_from(known, also, dtype_first):
    """Explicit, then computed, then the default, then what `materialize` gives."""
    order = ["explicit", "compute", "default", "inferred"]
    there = order[order.index(known) :] if also else [known]
    wrong = {"shape": (9, 9, 9), "dtype": jnp.int8}
    right = {"shape": SHAPE, "dtype": DTYPE}
    value = lambda name, source: (right if source == known else wrong)[name]  # noqa: E731
    attributes = {}
    for name in ("shape", "dtype"):
        if "compute" in there:
            attributes[f"compute_{name}"] = lambda self, name=name: value(name, "compute")
        if "default" in there:
            attributes[f"default_{name}"] = value(name, "default")
    shape, dtype = (right if known == "inferred" else wrong).values()
    attributes["materialize"] = lambda self: jnp.zeros(shape, dtype)
    explicit = right if "explicit" in there else {}
    x = plain(**attributes)(X, **explicit)
    for name in ("dtype", "shape") if dtype_first else ("shape", "dtype"):
        assert getattr(x, name) == right[name]
    assert isinstance(x.shape, tuple) and isinstance(x.dtype, np.dtype)
    assert (x.aval.shape, x.aval.dtype) == (SHAPE, DTYPE)
    assert (x.ndim, x.size, len(x), x.nbytes) == (1, 6, 6, 24)
    assert repr(x).startswith("Plain(float16[6]")
    # What is explicit survives flattening, and the rest is found anew.
    again = jax.tree.map(lambda y: y, x)
    assert (again.shape, again.dtype) == (SHAPE, DTYPE)


@pytest.mark.parametrize("given", [[2, 3], (2, 3), np.array([2, 3]), (np.int64(2), jnp.int32(3))])
def test_an_explicit_shape_becomes_a_tuple_of_int(given):
    shape = Zeros(shape=given).shape
    assert shape == (2, 3) and all(type(n) is int for n in shape)


def test_an_explicit_shape_of_one_number():
    assert Zeros(shape=3).shape == (3,) and Zeros(shape=()).shape == ()
    with pytest.raises(TypeError, match="without axes"):
        len(Zeros(shape=()))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_an_explicit_dtype_becomes_a_numpy_dtype(dtype):
    z = Zeros(shape=(2,), dtype=dtype)
    assert isinstance(z.dtype, np.dtype) and z.dtype == jnp.bfloat16
    assert repr(z) == "Zeros(bfloat16[2])"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"shape": "ab"}, "shape: expected a sequence of integers, got 'ab'"),
        ({"shape": (2, None)}, r"shape: expected a sequence of integers, got \(2, None\)"),
        ({"shape": (2,), "dtype": "no such dtype"}, "no such dtype"),
        ({"shape": (2,), "size": 3}, "size"),
    ],
)
def test_bad_shapes_and_dtypes(wrong, message):
    with pytest.raises(TypeError, match=message):
        Zeros(**wrong)


def test_a_shape_that_nothing_tells():
    with pytest.raises(TypeError, match=r"Zeros: its shape is not known. Give shape= to the constr"):
        Zeros().shape  # noqa: B018

    class NoDtype(hki.ImplicitArray):
        def materialize(self):
            return jnp.zeros(self.shape, self.dtype)

    with pytest.raises(TypeError, match=r"its dtype is not known.*dtype=.*compute_dtype\(\) or"):
        NoDtype(shape=(2,)).dtype  # noqa: B018
    assert NoDtype(shape=(2,), dtype=jnp.int8).dtype == np.int8
    assert repr(Zeros()) == "Zeros(?)", "a repr never fails"


@pytest.mark.parametrize("given", [{"shape": (3, 2)}, {"dtype": jnp.float16}, {"shape": (2,)}])
def test_materialize_must_return_what_the_array_says_that_it_is(given):
    x = plain()(X, **given)
    said = rf"it is {x.dtype}\[{', '.join(map(str, x.shape))}\]"
    message = rf"Plain.materialize\(\) returned float32\[2, 3\], but the array says that {said}"
    for fun in (hki.materialize, hki.use_implicit_args(jnp.sin), jax.jit(hki.materialize)):
        with hki.materialization("allow"), pytest.raises(TypeError, match=message):
            fun(x)


def test_setting_an_attribute_forgets_the_abstract_value():
    x = plain()(X)
    assert x.aval.shape == (2, 3)
    x.x = jnp.zeros(5, jnp.int32)
    assert (x.shape, x.dtype, x.aval.shape) == ((5,), np.int32, (5,))
    z = Zeros(shape=(2,))
    assert z.aval.shape == (2,)
    z.shape = (4, 4)
    z.dtype = jnp.int8
    assert (z.aval.shape, z.aval.dtype, z.shape, z.dtype) == ((4, 4), np.int8, (4, 4), np.int8)
    z.shape = None
    with pytest.raises(TypeError, match="shape is not known"):
        z.shape  # noqa: B018


def test_the_shape_follows_the_leaves_under_transformations():
    x = plain()(jnp.zeros((4, 2, 3)))
    seen = []
    jax.vmap(lambda x: seen.append(x.shape))(x)
    jax.lax.scan(lambda c, x: (c, seen.append(x.shape)), 0, x)
    jax.jit(lambda x: seen.append(x.shape))(x)
    jax.eval_shape(lambda x: seen.append(x.shape), x)
    assert seen == [(2, 3), (2, 3), (4, 2, 3), (4, 2, 3)]


def test_nbytes_counts_every_leaf_and_size_does_not():
    w = hki.LoRA(jnp.zeros((8, 4), jnp.bfloat16), jnp.zeros((8, 2), jnp.bfloat16),
                 jnp.zeros((2, 4), jnp.bfloat16))  # fmt: skip
    assert (w.size, w.nbytes) == (32, 2 * (32 + 16 + 8))
    nested = w._replace(w=Zeros(shape=(8, 4), dtype=jnp.bfloat16))
    assert (nested.size, nested.nbytes) == (32, 2 * (16 + 8))
    assert Scaled(jnp.ones(3), extra={"a": np.ones(5, np.int8), "b": [jnp.int32(1)]}).nbytes == 21


# --- repr ------------------------------------------------------------------------------------------


def test_repr():
    w = Outer(jnp.zeros(3), jnp.zeros(2))
    assert repr(w) == "Outer(float32[3,2], u=float32[3], v=float32[2])"
    nested = Scaled(w, power=2)
    assert repr(nested) == f"Scaled(float32[3,2], x={w!r}, label='none', power=2)"
    shown = []
    jax.jit(lambda w: shown.append(repr(w)))(w)
    jax.vmap(lambda w: shown.append(repr(w)))(jax.tree.map(lambda x: x[None], w))
    assert shown == [repr(w)] * 2
    struct = jax.eval_shape(lambda w: w, w)
    assert repr(struct) == repr(w)
    assert "Outer(?" in repr(jax.tree.map(lambda _: object(), w))


# --- the pytree ------------------------------------------------------------------------------------


def test_keys_of_leaves():
    x = Scaled(Outer(X[0], X[1]), extra={"a": X, "b": [X, None]})
    found = jax.tree_util.tree_flatten_with_path({"p": x})[0]
    names = [jax.tree_util.keystr(path) for path, _ in found]
    assert names == ["['p'].x.u", "['p'].x.v", "['p'].extra['a']", "['p'].extra['b'][0]"]


def test_static_fields_are_part_of_the_structure():
    kinds = [
        Scaled(X),
        Scaled(X, label="other"),
        Scaled(X, power=2),
        Scaled(X, shape=(2, 3)),
        Scaled(X, dtype=jnp.float32),
        Scaled(X, extra=X),
        plain()(X),
    ]
    structures = [jax.tree.structure(x) for x in kinds]
    assert len(set(structures)) == len(kinds)
    assert jax.tree.structure(Scaled(2 * X)) == structures[0]
    assert hash(jax.tree.structure(Scaled(X, label="other"))) == hash(structures[1])
    traces = []
    fun = jax.jit(lambda x: traces.append(x.power))
    for x in (*kinds[:3], *kinds[:3]):
        fun(x)
    assert traces == [1, 1, 2]


def test_aux_field_keeps_what_dataclasses_field_takes():
    (label,) = [f for f in dataclasses.fields(Scaled) if f.name == "label"]
    assert label.default == "none" and label.metadata["note"] == "kept"
    with pytest.raises(TypeError, match="positional"):

        @dataclasses.dataclass
        class Own(hki.ImplicitArray):
            x: Any
            n: int = hki.aux_field(kw_only=True)

            def materialize(self):
                return self.x

        Own(X, 3)


@pytest.mark.parametrize("name", CASES)
def test_flattening_there_and_back(name):
    x = CASES[name]()
    leaves, structure = jax.tree.flatten(x)
    again = structure.unflatten(leaves)
    assert type(again) is type(x) and jax.tree.structure(again) == structure
    assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    assert (again.shape, again.dtype, repr(again)) == (x.shape, x.dtype, repr(x))
    with_path, same = jax.tree_util.tree_flatten_with_path(x)
    assert same == structure and [leaf for _, leaf in with_path] == leaves


@pytest.mark.parametrize("depth", [1, 2, 5, 20])
def test_nesting_to_any_depth(depth):
    x = Outer(X[0], X[1])
    for _ in range(depth):
        x = Scaled(x)
    dense = jnp.outer(X[0], X[1])
    assert x.shape == (3, 3) and x.nbytes == 24 and len(jax.tree.leaves(x)) == 2
    np.testing.assert_array_equal(hki.materialize(x), dense)
    with hki.materialization("allow"), hki.materialization_report() as report:
        np.testing.assert_allclose(
            jax.jit(hki.use_implicit_args(jnp.sin))(x), jnp.sin(dense), rtol=1e-6, atol=1e-7
        )
    assert report.count == 1, "what happens inside is part of the one event"
    grads = jax.grad(lambda x: hki.materialize(x).sum())(x)
    assert jax.tree.structure(grads) == jax.tree.structure(x)


# --- pickling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dumps", [pickle.dumps, cloudpickle.dumps, partial(pickle.dumps, protocol=2)],
    ids=["pickle", "cloudpickle", "protocol 2"],
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_pickling(name, dumps):
    x = CASES[name]()
    shape = x.shape  # the cached abstract value is not to be pickled with it
    again = pickle.loads(dumps({"w": x}))["w"]
    assert type(again) is type(x) and repr(again) == repr(x) and again.shape == shape
    assert jax.tree.structure(again) == jax.tree.structure(x)
    chex.assert_trees_all_equal(again, x)
    again = copy.deepcopy(x)
    chex.assert_trees_all_equal(again, x)
    assert copy.copy(x).shape == shape
    if dataclasses.fields(x)[2:]:
        assert dataclasses.replace(x).shape == shape


def test_structures_pickle():
    structure = jax.tree.structure({"w": Outer(X[0], X[1])})
    assert cloudpickle.loads(cloudpickle.dumps(jax.tree.map(lambda _: 0, Outer(X[0], X[1])))).u == 0
    assert structure == jax.tree.structure({"w": Outer(X[0], X[1])})


def test_cloudpickle_takes_a_class_of_main_to_another_process(tmp_path):
    write = """
        import dataclasses, sys, typing
        import cloudpickle, jax, jax.numpy as jnp
        import haiku_implicit as hki

        @dataclasses.dataclass
        class Row(hki.ImplicitArray, commute_ops=False):
            x: hki.ArrayValue
            times: int = hki.aux_field(default=2)

            def __post_init__(self):
                super().__post_init__()
                assert self.times > 0

            def materialize(self):
                return jnp.tile(self.x, (self.times, 1))

        class Bare(hki.ImplicitArray):
            default_dtype = jnp.float32

            def materialize(self):
                return jnp.zeros(self.shape, self.dtype)

        tree = {"row": Row(jnp.arange(3.0), times=3), "bare": Bare(shape=(2,))}
        assert tree["row"].shape == (3, 3)
        with open(sys.argv[1], "wb") as f:
            cloudpickle.dump(tree, f)
        """
    read = """
        import pickle, sys
        import jax, numpy as np
        import haiku_implicit as hki

        with open(sys.argv[1], "rb") as f:
            tree = pickle.load(f)
        row = tree["row"]
        assert repr(row) == "Row(float32[3,3], x=float32[3], times=3)", repr(row)
        assert not row.commute_ops and tree["bare"].shape == (2,)
        np.testing.assert_array_equal(hki.materialize(row), [[0, 1, 2]] * 3)
        leaves, structure = jax.tree.flatten(tree)
        assert structure.unflatten(leaves)["row"].times == 3
        with hki.materialization("allow"):
            out = hki.use_implicit_args(lambda t: t["row"].sum() + t["bare"].sum())(tree)
        assert out == 9, out
        """
    path = tmp_path / "tree.pkl"
    for script in (write, read):
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), path], check=True, cwd=ROOT, timeout=120
        )


# --- outside any wrapper -----------------------------------------------------------------------------

MISUSES = {
    "jnp.sin": lambda w: jnp.sin(w),
    "jnp.asarray": lambda w: jnp.asarray(w),
    "x @ w": lambda w: X @ w,
    "x + w": lambda w: X + w,
    "np.asarray": lambda w: np.asarray(w),
    "np.sin": lambda w: np.sin(w),
    "jnp.stack": lambda w: jnp.stack([w, w]),
    "lax.neg": lambda w: jax.lax.neg(w),
    "jit": lambda w: jax.jit(lambda w: jnp.cos(w))(w),
}


@pytest.mark.parametrize("name", MISUSES)
def test_an_implicit_array_handed_to_jax_unwrapped_says_what_to_do(name):
    with pytest.raises(TypeError, match=r"use_implicit_args.*transform_implicit.*materialize\(x\)") as e:
        MISUSES[name](Outer(X[0], X[1]))
    assert "Outer(float32[3,3]" in str(e.value)


@pytest.mark.parametrize(
    "operation",
    [
        lambda w: w @ X,
        lambda w: w + 1,
        lambda w: 2 * w,
        lambda w: w[0],
        lambda w: -w,
        lambda w: w.T,
        lambda w: w.reshape(-1),
        lambda w: w.astype(jnp.int32),
        lambda w: np.ones((3, 3)) * w,
        lambda w: w > 0,
        lambda w: [*w],
    ],
    ids="matmul add rmul getitem neg T reshape astype numpy gt iter".split(),
)
def test_an_operator_or_method_of_dense_arrays_says_what_to_do(operation):
    with pytest.raises((TypeError, AttributeError), match="use_implicit_args.*materialize"):
        operation(Outer(X[0], X[1]))


def test_a_missing_attribute_stays_an_attribute_error():
    w = Outer(X[0], X[1])
    assert not hasattr(w, "no_such_attribute") and not hasattr(w, "T")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        w.no_such_attribute  # noqa: B018


# --- qax's README, under our names -------------------------------------------------------------------


@hki.primitive_handler("add")
def my_add_handler(primitive, a: Zeros, b, **params):
    shape, dtype = jnp.broadcast_shapes(a.shape, b.shape), jnp.result_type(a.dtype, b.dtype)
    if isinstance(b, Zeros):
        return Zeros(shape=shape, dtype=dtype)
    return jnp.broadcast_to(b, shape).astype(dtype)


@hki.primitive_handler("mul")
def handle_mul(primitive, a: Zeros, b, **params):
    shape, dtype = jnp.broadcast_shapes(a.shape, b.shape), jnp.result_type(a.dtype, b.dtype)
    return Zeros(shape=shape, dtype=dtype)


@dataclasses.dataclass
class LoraMatrix(hki.ImplicitArray):
    """`w + a bᵀ`."""

    w: hki.ArrayValue
    a: hki.ArrayValue
    b: hki.ArrayValue
    is_array_happy: bool = hki.aux_field(default=True)

    def __post_init__(self):
        super().__post_init__()
        assert self.w.ndim == self.a.ndim == self.b.ndim == 2
        assert self.a.shape[1] == self.b.shape[1]
        assert self.a.shape[0] == self.w.shape[0] and self.b.shape[0] == self.w.shape[1]
        assert self.a.dtype == self.b.dtype == self.w.dtype

    def materialize(self):
        return self.w + self.a @ self.b.T


@hki.primitive_handler("dot_general")
def lora_dot(primitive, x: jax.Array, w: LoraMatrix, *, dimension_numbers, **kwargs):
    contract, batch = dimension_numbers
    if len(w.shape) != 2 or contract != ((x.ndim - 1,), (0,)) or batch != ((), ()):
        return NotImplemented
    kwargs = {**kwargs, "dimension_numbers": dimension_numbers}
    result = hki.default_handler(primitive, x, w.w, **kwargs)
    xa = hki.default_handler(primitive, x, w.a, **kwargs)
    return result + hki.default_handler(primitive, xa, w.b.T, **kwargs)


def test_zeros_of_the_readme(never_dense):
    z = Zeros(shape=(2, 3))
    f = hki.use_implicit_args(lambda x, y: (x + y)[0, 0])
    with hki.materialization("allow"):  # of the broadcast that `ones(3)` needs nothing is implicit
        assert f(z, jnp.ones(3)) == 1
    g = jax.jit(hki.use_implicit_args(lambda x, y: (1 + x) * y))
    assert str(g(z, z)) == "Zeros((2, 3), float32)"


def test_lora_of_the_readme(never_dense):
    keys = jax.random.split(jax.random.key(0), 4)
    w, a, b, x = (jax.random.normal(k, s) for k, s in zip(keys, [(3, 5), (3, 2), (5, 2), (4, 3)]))
    lora = LoraMatrix(w, a, b)
    dense = w + a @ b.T
    f = hki.use_implicit_args(lambda w, x: x @ w)
    np.testing.assert_allclose(f(lora, x), x @ dense, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(f)(lora, x), x @ dense, rtol=1e-5)
    with hki.materialization("allow"):
        transposed = hki.use_implicit_args(lambda w, x: w.T @ x)(lora, x.T)
    np.testing.assert_allclose(transposed, dense.T @ x.T, rtol=1e-5)


def test_nested_arrays_of_the_readme(may_be_dense):
    w, x = jnp.ones((3, 5)), jnp.arange(3.0)
    lora = LoraMatrix(w, Zeros(shape=(3, 6)), Zeros(shape=(5, 6)))
    g = hki.use_implicit_args(lambda w, x: jnp.sum(x @ w))
    with hki.materialization_report() as report:
        assert g(lora, x) == g(w, x) == 15
    assert {e.primitive for e, _ in report} == {"dot_general", "transpose"}
    assert {e.type_name for e, _ in report} == {"Zeros"}


def test_training_of_the_readme(never_dense):
    keys = jax.random.split(jax.random.key(0), 3)
    w, a, x = (jax.random.normal(k, s) for k, s in zip(keys, [(3, 4), (3, 2), (8, 3)]))
    params = {"lin": {"w": LoraMatrix(w, a, jnp.zeros((4, 2))), "b": jnp.zeros(4)}}
    target = jnp.tanh(x @ w[:, ::-1])
    optimizer = hki.freeze_keys(optax.adam(3e-2), LoraMatrix, ["w"])

    @hki.use_implicit_args
    def loss_fn(params):
        return jnp.mean((x @ params["lin"]["w"] + params["lin"]["b"] - target) ** 2)

    @jax.jit
    def update(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return loss, hki.apply_updates(params, updates), state

    state = optimizer.init(params)
    losses = []
    for _ in range(20):
        loss, params, state = update(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0] and losses == sorted(losses, reverse=True)
    np.testing.assert_array_equal(params["lin"]["w"].w, w)
    assert (params["lin"]["w"].b != 0).all() and (params["lin"]["b"] != 0).all()
