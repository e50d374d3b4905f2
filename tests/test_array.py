"""`ImplicitArray`: shape and dtype, the pytree, printing, pickling, and misuse."""

import dataclasses
import operator
import pickle
import subprocess
import sys
import textwrap
from typing import Any, ClassVar

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.core import array
from haiku_implicit.core.sharding import shard_specs
from tests.cases import CASES, Diagonal, Nought, Outer
from tests.random_arrays import normal
from tests.tiers import few

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


def plain(**attributes):
    """A new type of one field `x`, with more methods or attributes."""
    namespace = {"__annotations__": {"x": Any}, "materialize": lambda self: self.x, **attributes}
    return dataclasses.dataclass(type("Plain", (hki.ImplicitArray,), namespace))


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
    x = plain(**attributes)(jnp.ones((2, 3)), **explicit)
    for name in ("dtype", "shape") if dtype_first else ("shape", "dtype"):
        assert getattr(x, name) == right[name]
    assert isinstance(x.shape, tuple) and isinstance(x.dtype, np.dtype)
    assert (x.aval.shape, x.aval.dtype) == (SHAPE, DTYPE)
    assert (x.ndim, x.size, len(x), x.nbytes) == (1, 6, 6, 24)
    assert repr(x).startswith("Plain(float16[6]")
    # Explicit values survive flattening, and the others are computed again.
    again = jax.tree.map(lambda y: y, x)
    assert (again.shape, again.dtype) == (SHAPE, DTYPE)


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

    with pytest.raises(
        TypeError, match=r"Liar.materialize\(\) returned float32\[3, 2\].*int32\[2\]"
    ):
        hki.materialize(Liar(shape=(2,), dtype=jnp.int32))


def test_shape_follows_the_leaves():
    w = Outer(jnp.ones(2), jnp.ones(3))
    w.u = jnp.ones(5)
    assert w.shape == (5, 3)
    assert jax.tree.map(lambda x: x[:1], w).shape == (1, 1)


def test_setting_an_attribute_forgets_the_abstract_value():
    x = plain()(jnp.ones((2, 3)))
    assert x.aval.shape == (2, 3)
    x.x = jnp.zeros(5, jnp.int32)
    assert (x.shape, x.dtype, x.aval.shape) == ((5,), np.int32, (5,))
    z = Nought(shape=(2,))
    assert z.aval.shape == (2,)
    z.shape = (4, 4)
    z.dtype = jnp.int8
    assert (z.aval.shape, z.aval.dtype, z.shape, z.dtype) == ((4, 4), np.int8, (4, 4), np.int8)
    z.shape = None
    with pytest.raises(TypeError, match="shape is not known"):
        z.shape  # noqa: B018


def test_a_double_is_what_jax_makes_of_it():
    assert Nought(shape=(2,), dtype=np.float64).aval.dtype == jnp.float32
    assert Nought(shape=(2,), dtype=np.float64).dtype == jnp.float32
    assert hki.materialize(Nought(shape=(2,), dtype=np.float64)).dtype == jnp.float32


def test_a_double_is_a_double_in_x64_mode(x64):
    assert Nought(shape=(2,), dtype=np.float64).dtype == jnp.float64
    assert hki.materialize(Nought(shape=(2,), dtype=np.float64)).dtype == jnp.float64


@pytest.mark.every(3)
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


@pytest.mark.parametrize("keywords", [{}, {"eq": False}, {"repr": False}, {"frozen": False}])
def test_the_decorator_leaves_repr_equality_and_hash_alone(keywords):
    @dataclasses.dataclass(**keywords)
    class Own(hki.ImplicitArray):
        x: Any

        def materialize(self):
            return self.x

    a, b = Own(jnp.ones((2, 3))), Own(jnp.ones((2, 3)))
    assert repr(a) == "Own(float32[2,3], x=float32[2,3])"
    with pytest.raises(TypeError, match="as if it were a dense array"):
        a == b  # noqa: B015
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)


def test_a_class_that_is_not_a_dataclass_says_so():
    class Bare(hki.ImplicitArray):
        u: jax.Array
        v: "jax.Array"
        tag: str = hki.aux_field(default="")
        FACTOR: ClassVar[float] = 2.0

        def materialize(self):
            return self.u * self.v

    class WithInit(Bare):
        def __init__(self, u):
            self.u = u

    @dataclasses.dataclass
    class Child(Bare):
        w: Any = None

    message = r"fields u, v, tag of Bare .*@dataclasses\.dataclass.* ClassVar"
    for make in (
        lambda: Bare(jnp.ones(2), jnp.ones(2)),
        lambda: Bare(u=jnp.ones(2), v=jnp.ones(2)),
        lambda: Bare(),
        lambda: WithInit(jnp.ones(2)),
        lambda: Child(jnp.ones(2)),
    ):
        with pytest.raises(TypeError, match=message):
            make()


def test_a_class_without_fields_of_its_own_needs_no_decorator():
    class Narrower(hki.LoRA):
        w: hki.QuantizedMatrix  # an inherited field
        default_dtype: Any = jnp.float32
        LIMIT: "ClassVar[int]" = 3

    w = Narrower(jnp.ones((3, 2)), jnp.ones((3, 1)), jnp.ones((1, 2)))
    np.testing.assert_array_equal(hki.materialize(w), 2 * np.ones((3, 2)))


def test_a_type_may_have_its_own_repr_equality_and_hash():
    own = plain(__repr__=lambda self: "mine", __eq__=lambda self, y: True, __hash__=lambda self: 7)
    assert repr(own(1)) == "mine" and own(1) == own(2) and hash(own(1)) == 7


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
    leaves, treedef = jax.tree.flatten(
        hki.LoRA(jnp.ones((3, 4)), jnp.ones((3, 2)), jnp.ones((2, 4)))
    )
    for placeholders in ([None] * 3, [object()] * 3, ["a", "b", "c"], leaves[::-1]):
        w = treedef.unflatten(placeholders)
        assert isinstance(w, hki.LoRA)
        assert isinstance(repr(w), str)
    assert jax.tree.map(lambda _: None, hki.LoRA(*leaves)).w is None
    shapes = jax.tree.map(jnp.shape, hki.LoRA(*leaves))
    assert (shapes.w, shapes.a, shapes.b) == ((3, 4), (3, 2), (2, 4))


def test_chex_dataclass_mixes_with_implicit_arrays(may_be_dense):
    @chex.dataclass
    class State:
        w: Any
        n: Any

    state = State(w=Outer(jnp.arange(3.0), jnp.ones(3)), n=jnp.ones(()))
    out = jax.jit(hki.use_implicit_args(lambda s: State(w=s.w * 2, n=s.n + s.w.sum())))(state)
    dense = hki.materialize(state.w)
    chex.assert_trees_all_close(hki.materialize(out.w), dense * 2)
    chex.assert_trees_all_close(out.n, 1 + dense.sum())


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
    shapes = hki.tree_map_with_implicit(
        lambda x, y: (x.shape, y), tree, {"w": 1, "b": 2, "n": None}
    )
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
        "b=float32[1,3], factor=float32[])"
    )
    assert repr(Nought(shape=(2,))) == "Nought(float32[2])"
    assert repr(Scaled(jnp.ones(2))) == "Scaled(float32[2], x=float32[2], factor=2.0, names=())"


def test_random_keys_are_arrays_too():
    @dataclasses.dataclass
    class Noise(hki.ImplicitArray):
        key: jax.Array = hki.frozen_field()

        def materialize(self):
            return jax.random.normal(self.key, (4,))

    w = Noise(jax.random.key(0))
    assert repr(w) == "Noise(float32[4], key=key<fry>[])" and w.nbytes == 8
    with hki.materialization("allow"):
        out = jax.jit(hki.use_implicit_args(lambda w: w + 0))(w)
    np.testing.assert_array_equal(out, w.materialize())


@dataclasses.dataclass
class Key(hki.ImplicitArray):
    """A random key that is made of its seed."""

    seed: jax.Array

    def materialize(self):
        return jax.random.key(self.seed)


@pytest.mark.parametrize("explicit", [{}, {"shape": (), "dtype": jax.random.key(0).dtype}])
def test_an_implicit_array_may_stand_for_random_keys(explicit, may_be_dense):
    key, dense = Key(jnp.uint32(3), **explicit), jax.random.key(3)
    assert (key.aval, key.dtype) == (dense.aval, dense.dtype)
    assert repr(key) == "Key(key<fry>[], seed=uint32[])"

    def noise(key):
        keys = jax.lax.scan(lambda c, _: tuple(jax.random.split(c)), key, None, length=3)[1]
        return jax.vmap(jax.random.normal)(keys) + jax.random.normal(key)

    with hki.materialization_report() as report:
        np.testing.assert_array_equal(hki.use_implicit_args(noise)(key), noise(dense))
    assert {e.nbytes for e, _ in report} == {8}
    np.testing.assert_array_equal(jax.jit(hki.use_implicit_args(noise))(key), noise(dense))


def test_repr_in_a_trace_and_of_an_abstract_array():
    texts = []
    w = Outer(jnp.ones(2), jnp.ones(3))
    jax.eval_shape(lambda w: texts.append(repr(w)), w)
    texts.append(repr(jax.eval_shape(lambda: w)))
    assert texts == [repr(w)] * 2


OPERATORS = """
    lt le eq ne gt ge add sub mul matmul truediv floordiv mod pow and_ or_ xor lshift rshift
""".split()
FUNCTIONS = [
    *(bool, float, int, complex, iter, list, hash, sum, max, any, all, sorted, round, abs, divmod),
    *(operator.index, operator.not_, operator.neg, operator.pos, operator.invert),
    *(np.asarray, np.sum, np.isnan, jnp.asarray, jnp.sum),
]


@pytest.mark.parametrize("name", few(CASES, "zeros"))
def test_nothing_in_python_takes_an_implicit_array_for_a_number(name):
    """As a `jax.Array` has no truth and no hash, and is equal only element by element."""
    w = CASES[name](0)
    for other in (0, 1.5, True, np.float32(1), np.ones(3), jnp.ones(3), CASES[name](0)):
        for operation in (getattr(operator, name) for name in OPERATORS):
            for pair in [(w, other), (other, w)]:
                with pytest.raises(TypeError, match="as if it were a dense array"):
                    operation(*pair)
    for fun in FUNCTIONS:
        with pytest.raises(TypeError, match="as if it were|unhashable"):
            fun(*(w, 2) if fun is divmod else (w,))
    for fun in (lambda: w[0], lambda: 1 in w, lambda: w in [1], lambda: {"w": w} == {"w": 1}):
        with pytest.raises(TypeError, match="as if it were a dense array"):
            fun()


def test_an_implicit_array_is_nothing_else_than_itself():
    w = Outer(jnp.ones(2), jnp.ones(3))
    assert w != None and w != "w" and w != (1,)  # noqa: E711
    assert w in [w] and {"w": w} == {"w": w} and w not in (None, "all")
    assert jax.tree.structure({"w": w}) == jax.tree.structure(
        {"w": Outer(jnp.ones(2), jnp.ones(3))}
    )


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


@pytest.mark.slow
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


def test_what_dataclasses_replace_gives_back_can_be_sliced():
    """`dataclasses.replace` passes the inferred shape to the constructor, which must not pin it."""
    w = hki.LoRA(jnp.ones((3, 4, 5)), jnp.ones((3, 4, 2)), jnp.ones((3, 2, 5)))
    new = dataclasses.replace(w, alpha=4.0)
    out = jax.vmap(hki.use_implicit_args(lambda w, x: x @ w), (0, None))(new, jnp.ones((2, 4)))
    np.testing.assert_allclose(out, np.full((3, 2, 5), 4 + 2 * 4 * 2.0))


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
    "np.array_equal": lambda w, x: np.array_equal(w, x),
    "np.array_equiv": lambda w, x: np.array_equiv(x, w),
    "np.zeros(like=w)": lambda w, x: np.zeros(2, like=w),
    "w + 1": lambda w, x: w + 1,
    "1 - w": lambda w, x: 1 - w,
    "w @ w": lambda w, x: w @ w,
    "w / 2": lambda w, x: w / 2,
    "7 // w": lambda w, x: 7 // w,
    "2**w": lambda w, x: 2**w,
    "-w": lambda w, x: -w,
    "w > 0": lambda w, x: w > 0,
    "w[0]": lambda w, x: w[0],
    "*w": lambda w, x: [*w],
}


@pytest.mark.parametrize("text", MISUSES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_use_outside_a_wrapper_says_what_to_do(text, jit):
    w, x = Outer(jnp.ones(2), jnp.ones(2)), jnp.ones((2, 2))
    fun = jax.jit(MISUSES[text]) if jit else MISUSES[text]
    with pytest.raises(TypeError, match="use_implicit_args") as error:
        fun(w, x)
    assert "materialize" in str(error.value)


@pytest.mark.parametrize("name", ["T", "sum", "astype", "at"])
def test_attributes_of_arrays_say_what_to_do(name):
    with pytest.raises(AttributeError, match=rf"Outer has no '{name}'.*use_implicit_args"):
        getattr(Outer(jnp.ones(2), jnp.ones(2)), name)
    assert not hasattr(Outer(jnp.ones(2), jnp.ones(2)), "no_such_thing")


def test_lax_outside_a_wrapper_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        jax.lax.neg(Outer(jnp.ones(2), jnp.ones(2)))


def test_a_missing_attribute_stays_an_attribute_error():
    w = Outer(jnp.ones(2), jnp.ones(2))
    assert not hasattr(w, "no_such_attribute") and not hasattr(w, "T")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        w.no_such_attribute  # noqa: B018


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


@pytest.mark.every(3)
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


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].core_ndim is not None])
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


def test_a_type_that_says_nothing_of_meshes_is_on_all_devices():
    mesh = jax.sharding.AbstractMesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    w = Outer(jnp.ones(2), jnp.ones(4))
    whole = shard_specs(w, jax.sharding.PartitionSpec(None), mesh)
    assert jax.tree.structure(whole) == jax.tree.structure(w)
    assert (whole.u, whole.v) == (jax.sharding.PartitionSpec(),) * 2
    assert shard_specs(w, jax.sharding.PartitionSpec(None, "i"), mesh) is NotImplemented


def test_a_part_without_its_arrays_names_them_and_no_others():
    lora = hki.LoRA(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
    trained, _ = hki.partition(lora)
    with pytest.raises(
        AttributeError, match=r"^LoRA: w is None, so that there is no shape.*combine"
    ):
        trained.shape  # noqa: B018
    _, frozen = hki.partition({"w": lora})
    for half, names in ((trained, "LoRA: w is"), (frozen["w"], "LoRA: a and b are")):
        for use in (jnp.sin, hki.use_implicit_args(jnp.sin)):
            with pytest.raises((ValueError, AttributeError), match=f"^{names} None.*combine"):
                use(half)
    # Nor is an error in a type's own method taken for that.
    with pytest.raises(AttributeError, match="no attribute 'y'"):
        plain(compute_shape=lambda self: self.y.shape)(jnp.ones(2)).shape  # noqa: B018


def test_static_metadata_by_name():
    inferred = Scaled(jnp.ones(2), 3.0, ("a",))
    assert array.static_items(inferred) == dict(shape=None, dtype=None, factor=3.0, names=("a",))
    given = Nought(shape=(2,), dtype=jnp.int32)
    assert array.static_items(given) == dict(shape=(2,), dtype=np.dtype("int32"))


# --- qax's README, under our names -------------------------------------------------------------------


class Zeros(hki.ImplicitArray):
    """The first example in qax's README, under our names: no decorator and no field."""

    default_dtype = jnp.float32

    def materialize(self):
        return jnp.zeros(self.shape, self.dtype)

    def __str__(self):
        return f"Zeros({self.shape}, {self.dtype})"


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
    w, a, b, x = (
        jax.random.normal(k, s) for k, s in zip(keys, [(3, 5), (3, 2), (5, 2), (4, 3)], strict=True)
    )
    lora = LoraMatrix(w, a, b)
    dense = w + a @ b.T
    f = hki.use_implicit_args(lambda w, x: x @ w)
    np.testing.assert_allclose(f(lora, x), x @ dense, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(f)(lora, x), x @ dense, rtol=1e-5)
    with hki.materialization("allow"):
        transposed = hki.use_implicit_args(lambda w, x: w.T @ x)(lora, x.T)
    np.testing.assert_allclose(transposed, dense.T @ x.T, rtol=1e-5)


@dataclasses.dataclass
class Pair(hki.ImplicitArray):
    """A sum of arrays, whose dense twins a user asks for; `first` alone is not a new array."""

    parts: tuple[hki.ArrayValue, ...]
    first: bool = hki.aux_field(default=False)

    def materialize(self):
        return self.parts[0] if self.first else self.parts[0] + jnp.sin(self.parts[1])


class Half(Pair):
    """A type that extends another's `materialize`."""

    def materialize(self):
        return super().materialize() / 2


@pytest.mark.slow
def test_materialize_of_nested_arrays_called_directly():
    """The fields of the method's array are dense, as where the library calls it."""
    w = normal((64, 16))
    zeros = hki.Zeros(shape=w.shape, dtype=w.dtype)
    double = hki.QuantizedMatrix.quantize(w, "int4", 16, scale_dtype="double")
    of_lora = hki.LoRA(hki.LoRA(double, w[:, :2], w[:2]), w[:, 2:4], w[2:4], alpha=3.0)
    for x in (
        double,
        hki.QuantizedMatrix.quantize(w, "nvfp4"),
        of_lora,
        hki.ScaledMatrix(double, jnp.arange(64.0)),
        Pair((zeros, w)),
        Pair((of_lora, zeros)),
        Pair((zeros, zeros), first=True),
        Half((Half((double, w)), of_lora)),
        Scaled(Scaled(Diagonal(w[0]))),
    ):
        want = hki.materialize(x)
        for got in (x.materialize(), jax.jit(lambda x: x.materialize())(x)):
            assert isinstance(got, jax.Array) and got.dtype == x.dtype
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


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
    w, a, x = (jax.random.normal(k, s) for k, s in zip(keys, [(3, 4), (3, 2), (8, 3)], strict=True))
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
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_array_equal(params["lin"]["w"].w, w)
    assert (params["lin"]["w"].b != 0).all() and (params["lin"]["b"] != 0).all()
