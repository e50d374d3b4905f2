"""`ImplicitArray`: shape and dtype, the pytree, printing, pickling, and misuse."""

import dataclasses
import pickle
import subprocess
import sys
import textwrap

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.cases import CASES, Diagonal, Nought, Outer

ALL = pytest.mark.parametrize("name", CASES)


@dataclasses.dataclass
class Scaled(hki.ImplicitArray, commute_ops=False, warn_on_materialize=False, core_ndim=0):
    """A multiple of any other array, with metadata and validation."""

    x: hki.ArrayValue
    factor: float = hki.aux_field(default=2.0)
    names: tuple[str, ...] = hki.aux_field(default=())

    def __post_init__(self):
        super().__post_init__()
        chex.assert_type(self.x, float)

    def materialize(self):
        return self.x * self.factor


class Kept(hki.ImplicitArray):
    """Shape and dtype by class."""

    default_shape = (2, 3)
    default_dtype = jnp.bfloat16

    def materialize(self):
        return jnp.ones(self.shape, self.dtype)


@dataclasses.dataclass
class Cast(hki.ImplicitArray):
    """A dtype that the constructor may be given, a shape that it may not."""

    x: jax.Array

    def compute_shape(self):
        return self.x.shape

    def materialize(self):
        return self.x.astype(self.dtype)


# --- shape and dtype -------------------------------------------------------------------------------


def test_materialize_is_all_that_a_subclass_has_to_write():
    class Plain(hki.ImplicitArray):
        def materialize(self):
            return jnp.zeros((2, 3))

    assert Plain().shape == (2, 3)
    assert Plain().dtype == jnp.float32
    with pytest.raises(TypeError, match="abstract"):
        type("Nothing", (hki.ImplicitArray,), {})()


def test_shape_and_dtype_are_inferred_from_materialize():
    w = Outer(jnp.ones(2), jnp.ones(3, jnp.bfloat16))
    assert w.shape == (2, 3)
    assert w.dtype == jnp.float32


def test_shape_and_dtype_from_compute_methods():
    assert Diagonal(jnp.ones(3, jnp.float16)).shape == (3, 3)
    assert Diagonal(jnp.ones(3, jnp.float16)).dtype == jnp.float16


def test_shape_and_dtype_by_class():
    assert (Kept().shape, Kept().dtype) == ((2, 3), jnp.bfloat16)


def test_what_the_constructor_is_given_comes_first():
    assert Kept(shape=(4,)).shape == (4,)
    assert Kept(dtype=jnp.float16).dtype == jnp.float16
    assert Cast(jnp.ones(3), dtype="bfloat16").dtype == jnp.bfloat16
    assert hki.materialize(Cast(jnp.ones(3), dtype=jnp.float16)).dtype == jnp.float16


def test_half_explicit_half_class_default():
    w = Nought(shape=[2, np.int64(5)])
    assert (w.shape, w.dtype) == ((2, 5), jnp.float32)
    assert all(type(n) is int for n in w.shape)


def test_a_shape_of_one_integer_and_of_none():
    assert Nought(shape=3).shape == (3,)
    assert Nought(shape=()).shape == ()


@pytest.mark.parametrize("shape", ["ab", (1.5j,), object()])
def test_a_wrong_shape_is_named(shape):
    with pytest.raises(TypeError, match="shape: expected a sequence of integers"):
        Nought(shape=shape)


def test_a_type_that_cannot_tell_its_shape_says_what_to_do():
    with pytest.raises(TypeError, match="Nought: its shape is not known.*shape=.*compute_shape"):
        Nought().shape  # noqa: B018


def test_materialize_that_breaks_its_promise_is_caught():
    class Liar(hki.ImplicitArray):
        def materialize(self):
            return jnp.zeros((3, 2))

    with pytest.raises(TypeError, match=r"Liar.materialize\(\) returned float32\[3, 2\].*int32\[2\]"):
        hki.materialize(Liar(shape=(2,), dtype=jnp.int32))


def test_shape_follows_the_leaves():
    w = Outer(jnp.ones(2), jnp.ones(3))
    w.u = jnp.ones(5)
    assert w.shape == (5, 3)
    assert jax.tree.map(lambda x: x[:1], w).shape == (1, 1)


def test_a_double_is_what_jax_makes_of_it():
    assert Nought(shape=(2,), dtype=np.float64).aval.dtype == jnp.float32
    assert Nought(shape=(2,), dtype=np.float64).dtype == jnp.float32
    assert hki.materialize(Nought(shape=(2,), dtype=np.float64)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert Nought(shape=(2,), dtype=np.float64).dtype == jnp.float64


@ALL
def test_attributes_of_an_array(name):
    w = CASES[name](0)
    dense = hki.materialize(w)
    assert (w.shape, w.dtype, w.ndim, w.size, len(w)) == (
        dense.shape, dense.dtype, dense.ndim, dense.size, 4
    )  # fmt: skip
    assert (w.aval.shape, w.aval.dtype) == (dense.aval.shape, dense.aval.dtype)
    assert (jnp.shape(dense), jnp.ndim(dense)) == (np.shape(w), np.ndim(w))


def test_nbytes_is_what_is_held():
    w = hki.LoRA(jnp.ones((8, 4)), jnp.ones((8, 2)), jnp.ones((2, 4)))
    assert w.nbytes == 4 * (32 + 16 + 8)
    assert Outer(jnp.ones(64), jnp.ones(64)).nbytes == 512
    assert Nought(shape=(100, 100)).nbytes == 0
    nested = hki.LoRA(Outer(jnp.ones(8), jnp.ones(4)), jnp.ones((8, 2)), jnp.ones((2, 4)))
    assert nested.nbytes == 4 * (8 + 4 + 16 + 8)


def test_len_of_a_scalar():
    with pytest.raises(TypeError, match="without axes"):
        len(Nought(shape=()))


# --- class keywords and fields -----------------------------------------------------------------------


def test_class_keywords_are_inherited_and_can_be_changed():
    @dataclasses.dataclass
    class Child(Scaled, commute_ops=True):
        pass

    assert (Scaled.commute_ops, Scaled.warn_on_materialize, Scaled.core_ndim) == (False, False, 0)
    assert (Child.commute_ops, Child.warn_on_materialize, Child.core_ndim) == (True, False, 0)
    assert (Outer.commute_ops, Outer.warn_on_materialize, Diagonal.core_ndim) == (True, True, None)


def test_aux_fields_are_part_of_the_structure():
    a, b, c = Scaled(jnp.ones(3)), Scaled(jnp.zeros(3)), Scaled(jnp.ones(3), factor=3.0)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.structure(a) != jax.tree.structure(c)
    assert len(jax.tree.leaves(a)) == 1
    assert hki.materialize(c).tolist() == [3.0, 3.0, 3.0]
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))


def test_a_changed_aux_field_retraces_a_jitted_function():
    count = []

    @jax.jit
    def f(w):
        count.append(1)
        return hki.materialize(w)

    for factor in (2.0, 2.0, 5.0):
        np.testing.assert_array_equal(f(Scaled(jnp.ones(2), factor)), factor)
    assert len(count) == 2


def test_explicit_shape_is_part_of_the_structure():
    assert jax.tree.structure(Nought(shape=(2,))) != jax.tree.structure(Nought(shape=(3,)))


def test_validation_in_post_init():
    with pytest.raises(AssertionError, match="float"):
        Scaled(jnp.arange(3))
    with pytest.raises(ValueError, match=r"LoRA: expected w \[..., n, m\].*got w \[3, 4\]"):
        hki.LoRA(jnp.ones((3, 4)), jnp.ones((4, 2)), jnp.ones((2, 4)))


def test_validation_does_not_run_when_jax_unflattens():
    leaves, treedef = jax.tree.flatten(hki.LoRA(jnp.ones((3, 4)), jnp.ones((3, 2)), jnp.ones((2, 4))))
    for placeholders in ([None] * 3, [object()] * 3, ["a", "b", "c"], leaves[::-1]):
        w = treedef.unflatten(placeholders)
        assert isinstance(w, hki.LoRA)
        assert isinstance(repr(w), str)
    assert jax.tree.map(lambda _: None, hki.LoRA(*leaves)).w is None
    shapes = jax.tree.map(jnp.shape, hki.LoRA(*leaves))
    assert (shapes.w, shapes.a, shapes.b) == ((3, 4), (3, 2), (2, 4))


def test_an_optional_field():
    @dataclasses.dataclass
    class Shifted(hki.ImplicitArray):
        x: jax.Array
        shift: jax.Array | None = None

        def materialize(self):
            return self.x if self.shift is None else self.x + self.shift

    assert len(jax.tree.leaves(Shifted(jnp.ones(2)))) == 1
    f = hki.use_implicit_args(lambda w: w + 1)
    with hki.materialization("allow"):
        np.testing.assert_array_equal(f(Shifted(jnp.ones(2))), 2)
        np.testing.assert_array_equal(f(Shifted(jnp.ones(2), jnp.ones(2))), 3)


def test_a_field_may_hold_a_tree():
    @dataclasses.dataclass
    class Sum(hki.ImplicitArray):
        parts: dict[str, hki.ArrayValue]

        def materialize(self):
            return sum(self.parts.values())

    w = Sum({"a": jnp.ones((2, 2)), "b": Outer(jnp.ones(2), jnp.full(2, 3.0))})
    assert w.shape == (2, 2)
    np.testing.assert_array_equal(hki.materialize(w), 4)
    with hki.materialization("allow"):
        np.testing.assert_array_equal(hki.use_implicit_args(lambda w: w - 1)(w), 3)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(w)[0]]
    assert paths == [".parts['a']", ".parts['b'].u", ".parts['b'].v"]


# --- the pytree --------------------------------------------------------------------------------------


@ALL
def test_flatten_and_unflatten(name):
    w = CASES[name](0)
    leaves, treedef = jax.tree.flatten(w)
    again = treedef.unflatten(leaves)
    assert type(again) is type(w)
    assert (again.shape, again.dtype) == (w.shape, w.dtype)
    assert jax.tree.structure(again) == treedef
    chex.assert_trees_all_equal(hki.materialize(again), hki.materialize(w))


def test_leaves_have_named_keys():
    w = {"linear": hki.LoRA(Outer(jnp.ones(2), jnp.ones(2)), jnp.ones((2, 1)), jnp.ones((1, 2)))}
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(w)[0]]
    assert paths == ["['linear'].w.u", "['linear'].w.v", "['linear'].a", "['linear'].b"]


def test_tree_helpers_take_an_implicit_array_as_one_leaf():
    tree = {"w": Outer(jnp.ones(2), jnp.ones(3)), "b": jnp.zeros(3), "n": None}
    assert hki.tree_leaves_with_implicit(tree) == [tree["b"], tree["w"]]
    leaves, treedef = hki.tree_flatten_with_implicit(tree)
    assert treedef == hki.tree_structure_with_implicit(tree)
    assert treedef.unflatten(leaves)["w"] is tree["w"]
    shapes = hki.tree_map_with_implicit(lambda x, y: (x.shape, y), tree, {"w": 1, "b": 2, "n": None})
    assert shapes == {"w": ((2, 3), 1), "b": ((3,), 2), "n": None}


def test_materialize_of_a_tree():
    tree = {"w": [Outer(jnp.ones(2), jnp.ones(3)), 5, None], "f": len}
    dense = hki.materialize(tree)
    assert isinstance(dense["w"][0], jax.Array)
    assert dense["w"][1:] == [5, None] and dense["f"] is len


# --- printing, copying, pickling -----------------------------------------------------------------------


def test_repr():
    w = hki.LoRA(Outer(jnp.ones(2), jnp.ones(3)), jnp.ones((2, 1)), jnp.ones((1, 3)), alpha=4.0)
    assert repr(w) == (
        "LoRA(float32[2,3], w=Outer(float32[2,3], u=float32[2], v=float32[3]), a=float32[2,1], "
        "b=float32[1,3], alpha=4.0)"
    )
    assert repr(Nought(shape=(2,))) == "Nought(float32[2])"
    assert repr(Scaled(jnp.ones(2))) == "Scaled(float32[2], x=float32[2], factor=2.0, names=())"


def test_repr_in_a_trace_and_of_an_abstract_array():
    texts = []
    w = Outer(jnp.ones(2), jnp.ones(3))
    jax.eval_shape(lambda w: texts.append(repr(w)), w)
    texts.append(repr(jax.eval_shape(lambda: w)))
    assert texts == [repr(w)] * 2


def test_equality_and_hash_are_by_identity():
    w = Outer(jnp.ones(2), jnp.ones(3))
    assert w == w  # noqa: PLR0124
    assert w != Outer(jnp.ones(2), jnp.ones(3))
    assert {w: 1}[w] == 1


@ALL
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_pickles(name, module):
    w = CASES[name](0)
    w.aval  # a cached value is not pickled  # noqa: B018
    again = pickle.loads(module.dumps(w))
    assert jax.tree.structure(again) == jax.tree.structure(w)
    chex.assert_trees_all_equal(again, w)
    assert again.shape == w.shape
    assert "_aval" not in w.__getstate__()


def test_cloudpickle_of_a_class_of_a_script():
    script = """
        import cloudpickle, dataclasses, sys
        import haiku_implicit as hki, jax, numpy as np
        @dataclasses.dataclass
        class Twice(hki.ImplicitArray):
            x: jax.Array
            times: int = hki.aux_field(default=2)
            def materialize(self):
                return self.x * self.times
        w = Twice(np.ones(3, np.float32), times=3)
        sys.stdout.buffer.write(cloudpickle.dumps(w))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=True
    )
    w = pickle.loads(run.stdout)
    assert (type(w).__name__, w.shape, w.times) == ("Twice", (3,), 3)
    with hki.materialization("allow"):
        np.testing.assert_array_equal(hki.use_implicit_args(lambda w: w + 1)(w), 4)


def test_replace_keeps_what_is_not_named():
    w = Scaled(jnp.ones(2), factor=3.0, names=("a",))
    new = w._replace(x=jnp.zeros(5))
    assert (new.shape, new.factor, new.names, w.shape) == ((5,), 3.0, ("a",), (2,))


# --- nesting -------------------------------------------------------------------------------------------


def test_nesting_to_any_depth(may_be_dense):
    w = dense = jnp.ones((3, 3))
    for i in range(4):
        w = hki.LoRA(Scaled(w), jnp.full((3, 1), i + 1.0), jnp.ones((1, 3)))
        dense = 2 * dense + i + 1
    assert w.shape == (3, 3)
    assert len(jax.tree.leaves(w)) == 9
    np.testing.assert_array_equal(hki.materialize(w), dense)
    np.testing.assert_allclose(hki.use_implicit_args(jnp.dot)(jnp.eye(3), w), dense)
    jitted = jax.jit(hki.use_implicit_args(lambda w: jnp.sin(w).T))
    np.testing.assert_allclose(jitted(w), jnp.sin(dense).T, rtol=1e-6)


# --- misuse --------------------------------------------------------------------------------------------

MISUSES = {
    "jnp.sin(w)": lambda w, x: jnp.sin(w),
    "x @ w": lambda w, x: x @ w,
    "w @ x": lambda w, x: w @ x,
    "x + w": lambda w, x: x + w,
    "w + x": lambda w, x: w + x,
    "jnp.dot(x, w)": lambda w, x: jnp.dot(x, w),
    "jnp.stack": lambda w, x: jnp.stack([w, w]),
    "jnp.asarray(w)": lambda w, x: jnp.asarray(w),
    "np.asarray(w)": lambda w, x: np.asarray(w),
    "np.sin(w)": lambda w, x: np.sin(w),
}


@pytest.mark.parametrize("text", MISUSES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_use_outside_a_wrapper_says_what_to_do(text, jit):
    w, x = Outer(jnp.ones(2), jnp.ones(2)), jnp.ones((2, 2))
    fun = jax.jit(MISUSES[text]) if jit else MISUSES[text]
    with pytest.raises(TypeError, match="use_implicit_args") as error:
        fun(w, x)
    assert "materialize" in str(error.value)


# --- from outside --------------------------------------------------------------------------------------


@ALL
def test_abstract_evaluation_from_outside(name):
    w = CASES[name](0)
    out = jax.eval_shape(lambda w: w, w)
    assert (type(out), out.shape, out.dtype) == (type(w), w.shape, w.dtype)
    jaxpr = jax.make_jaxpr(hki.materialize)(w)
    assert [(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.outvars] == [(w.shape, w.dtype)]
    dense = jax.eval_shape(hki.materialize, w)
    assert (dense.shape, dense.dtype) == (w.shape, w.dtype)


@ALL
def test_identity_under_transformations(name):
    case = CASES[name]
    w = case(0)
    chex.assert_trees_all_equal(hki.materialize(jax.jit(lambda w: w)(w)), hki.materialize(w))
    if jax.tree.leaves(w):
        stacked = case.stacked(0, 3)
        out = jax.vmap(lambda w: w)(stacked)
        chex.assert_trees_all_equal(out, stacked)
    chex.assert_trees_all_equal(jax.device_put(w), w)


@pytest.mark.parametrize("name", [n for n in CASES if type(CASES[n](0)).core_ndim is not None])
def test_with_leading_axis_undoes_itself(name):
    w = CASES[name](0, (3,))
    first = jax.tree.map(lambda x: x[0], w).with_leading_axis(None)
    assert first.shape == w.shape[1:]
    assert first.dtype == w.dtype
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), first).with_leading_axis(3)
    assert stacked.shape == w.shape


def test_a_type_without_batch_axes_says_so():
    assert Diagonal(jnp.ones(3)).with_leading_axis(2) is NotImplemented
    assert Nought(shape=(2,)).with_leading_axis(2) is NotImplemented
    nested = hki.LoRA(Diagonal(jnp.ones(3)), jnp.ones((3, 1)), jnp.ones((1, 3)))
    assert nested.with_leading_axis(2) is NotImplemented
