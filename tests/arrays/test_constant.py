"""`SymbolicConstant` and `Zeros` against their dense twins."""

import copy
import functools
import pickle

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import haiku_implicit as hki
from tests.random_arrays import normal
from tests.tiers import few

SHAPE = (3, 2)
FLOATS = [0.0, -0.0, 1.5, -0.75, np.nan, np.inf, -np.inf]
NUMBERS = {
    "float32": FLOATS,
    "bfloat16": FLOATS,
    "float16": [1.5, 6e4, np.nan, -np.inf],
    "float8_e4m3fn": [0.0, -1.5, np.nan],
    "complex64": [0j, 1.5 - 2j, complex(np.nan, 1), complex(np.inf, -0.0)],
    "int32": [0, 1, -3, -(2**31), 2**31 - 1],
    "int8": [0, 1, -7, -128, 127],
    "uint16": [0, 1, 2**16 - 1],
    "bool": [True, False],
}
FLOAT = ("float32", "bfloat16", "float16")
REAL = (*FLOAT, "float8_e4m3fn")
INT = ("int8", "uint16")
BITS = (*INT, "bool")


def constants(dtypes, shape=SHAPE):
    """Constants of these dtypes, and weakly typed ones where Python has numbers of the kind."""
    for dtype in dtypes:
        for value in NUMBERS[dtype]:
            yield hki.SymbolicConstant(value, shape=shape, dtype=dtype)
            if dtype in ("float32", "int32") and value in (1, 1.5, np.inf):
                yield hki.SymbolicConstant(value, shape=shape)


def dense(x):
    """The dense twin, made by JAX from the value."""
    if not isinstance(x, hki.SymbolicConstant):
        return x
    if x.weak_type:
        return jnp.full(x.shape, x.value.item())
    return jnp.full(x.shape, x.value, x.dtype)


def assert_same(got, want, ulps=0):
    """Equal to the bit (NaNs of any kind), in shape and in dtype."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    got, want = np.asarray(hki.materialize(got)), np.asarray(want)
    if want.dtype.kind not in "iub":
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        got, want = got.astype(wide), want.astype(wide)
        for part in (np.real, np.imag):
            signs = [np.signbit(part(x)) & ~np.isnan(part(x)) for x in (got, want)]
            np.testing.assert_array_equal(*signs)
    if ulps:
        np.testing.assert_allclose(got, want, ulps * np.finfo(np.float32).eps)
    else:
        np.testing.assert_array_equal(got, want)


def check_fold(fun, rows, ulps=0):
    """`fun` of constants is constant(s), which abstract evaluation tells: those of the dense `fun`.

    Args:
      fun: a function of arrays.
      rows: tuples of constants, its operands.
      ulps: how far results may be off those of the code for vectors, in units of the last place of
        a float32. Where that is not 0, they are those of the code for one element, to the bit.
    """
    leaves = hki.tree_leaves_with_implicit
    interpreted = hki.use_implicit_args(lambda rows: [fun(*row) for row in rows])
    gots = [leaves(out) for out in jax.eval_shape(interpreted, rows)]
    stacked = [np.stack([np.full(x.shape, x.value) for x in xs]) for xs in zip(*rows, strict=True)]
    wants = [np.asarray(want) for want in jax.tree.leaves(jax.vmap(fun)(*stacked))]
    for i, (row, got) in enumerate(zip(rows, gots, strict=True)):
        avals = jax.tree.leaves(jax.eval_shape(fun, *(x.aval for x in row)))
        alone = jax.tree.leaves(fun(*(jnp.asarray(x.value) for x in row))) if ulps else avals
        for g, want, one, aval in zip(got, wants, alone, avals, strict=True):
            assert isinstance(g, hki.SymbolicConstant), g
            assert_same(g, want[i], ulps)
            if ulps:
                assert_same(g, np.full(g.shape, one))
            assert g.weak_type == aval.weak_type


# --- elementwise ---------------------------------------------------------------------------------

UNARY = {
    lax.neg: ("float32", "bfloat16", "complex64", *INT),
    lax.sign: ("float32", "bfloat16", "complex64", *INT),
    lax.abs: ("float32", "complex64", "int8"),
    lax.square: ("float32", "bfloat16", "complex64", *INT),
    **dict.fromkeys((lax.floor, lax.ceil, lax.round), ("float32", "float16")),
    lax.is_finite: REAL,
    **dict.fromkeys((lax.exp, lax.log, lax.tanh, lax.sqrt, lax.rsqrt), ("float32", "complex64")),
    **dict.fromkeys((lax.exp2, lax.expm1, lax.log1p, lax.logistic, lax.cbrt), ("float32",)),
    **dict.fromkeys((lax.sin, lax.cos, lax.tan, lax.asin, lax.acos, lax.atan), ("float32",)),
    **dict.fromkeys((lax.sinh, lax.cosh, lax.asinh, lax.acosh, lax.atanh), ("float32",)),
    **dict.fromkeys((lax.erf, lax.erfc, lax.erf_inv, lax.lgamma, lax.digamma), ("float32",)),
    **dict.fromkeys((lax.bessel_i0e, lax.bessel_i1e), ("float32",)),
    **dict.fromkeys((lax.real, lax.imag, lax.conj), ("complex64",)),
    lax.bitwise_not: BITS,
    **dict.fromkeys((lax.population_count, lax.clz), INT),
}
# XLA's code for vectors rounds the last bits of these otherwise than its code for one element.
LAST_BITS = {
    lax.atan: 1, lax.erfc: 1, "betainc": 2, lax.igamma: 4, lax.igammac: 8, lax.zeta: 4, lax.polygamma: 20,
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("fun", UNARY, ids=lambda f: f.__name__)
def test_unary(fun, never_dense):
    for dtype in UNARY[fun]:
        check_fold(fun, [(x,) for x in constants([dtype])], LAST_BITS.get(fun, 0))


BINARY = {
    **dict.fromkeys(
        (lax.add, lax.sub, lax.mul, lax.div), ("float32", "bfloat16", "complex64", *INT)
    ),
    **dict.fromkeys((lax.rem, lax.max, lax.min), ("float32", "int8")),
    **dict.fromkeys((lax.pow, lax.atan2, lax.nextafter), ("float32",)),
    **dict.fromkeys((lax.igamma, lax.igammac, lax.zeta, lax.polygamma), ("float32",)),
    lax.complex: ("float32",),
    **dict.fromkeys((lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor), BITS),
    **dict.fromkeys((lax.eq, lax.ne), ("float32", "complex64", "bool")),
    **dict.fromkeys((lax.lt, lax.le, lax.gt, lax.ge), ("float32", "uint16")),
    **dict.fromkeys(
        (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic), ("int32", "uint16")
    ),
}


SLOW_TO_COMPILE = (lax.igamma, lax.igammac, lax.zeta, lax.polygamma)


@pytest.mark.every(3)
@pytest.mark.parametrize("fun", BINARY, ids=lambda f: f.__name__)
def test_binary(fun, never_dense):
    for dtype in BINARY[fun]:
        xs = list(constants([dtype]))
        if fun in SLOW_TO_COMPILE:
            xs = [x for x in xs if not x.weak_type]
        check_fold(
            fun, list(zip(xs + xs, xs + xs[1:] + xs[:1], strict=True)), LAST_BITS.get(fun, 0)
        )


@pytest.mark.parametrize(
    "fun", [f for f in BINARY if f not in SLOW_TO_COMPILE], ids=lambda f: f.__name__
)
def test_binary_with_dense(fun, never_dense):
    """A constant acts on a dense operand as a scalar that JAX broadcasts, to the bit."""
    dtype = BINARY[fun][0]
    y = jnp.resize(jnp.array(NUMBERS[dtype], dtype), SHAPE)
    xs = list(constants([dtype]))

    def both(xs, y):
        return [f for x in xs for f in (fun(x, y), fun(y, x))]

    gots = jax.jit(hki.use_implicit_args(both))(xs, y)
    wants = jax.jit(lambda y: both([dense(x) for x in xs], y))(y)
    for got, want in zip(gots, wants, strict=True):
        assert_same(got, want)
        assert got.weak_type == want.weak_type


OTHERS = {
    "integer_pow": (lambda x: lax.integer_pow(x, 3), ("float32", "complex64", "int8")),
    "integer_pow negative": (lambda x: lax.integer_pow(x, -2), ("float32",)),
    "clamp": (lambda x: lax.clamp(jnp.zeros((), x.dtype), x, x), ("float32", "int32")),
    "clamp all": (lambda x: lax.clamp(x, x, x), ("float32", "int8")),
    "select_n": (lambda x: lax.select(x == x, x, x), ("float32", "bool")),
    "where": (lambda x: jnp.where(x > 0, x, x * 2), ("float32", "int32")),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 4), ("float32", "bfloat16")),
    "betainc": (lambda x: lax.betainc(x * x, x * x, lax.logistic(x)), ("float32",)),
    "to float16": (
        lambda x: lax.convert_element_type(x, jnp.float16),
        ("float32", "int32", "bool"),
    ),
    "to int8": (lambda x: lax.convert_element_type(x, jnp.int8), ("int32", "bool")),
    "to bool": (lambda x: x.astype(bool), ("float32", "int32", "bfloat16")),
    "to complex": (lambda x: lax.convert_element_type(x, jnp.complex64), ("float32", "int8")),
    "to fp8": (lambda x: x.astype(jnp.float8_e4m3fn), ("float32", "bfloat16")),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), ("float32",)),
    "literals": (lambda x: (2 - x * 3) / 4 + 1, ("float32", "int32", "bfloat16")),
    "literals of inner functions": (lambda x: jnp.clip(x, -1, 1), ("float32", "int32", "bfloat16")),
    "floor and remainder": (lambda x: x // 2 % 3, ("float32",)),
    "variance": (lambda x: jnp.var(x + 1, 0), ("float32",)),
    "softplus": (jax.nn.softplus, ("float32",)),
    "copy": (jnp.copy, ("float8_e4m3fn", "bool")),
    "stop_gradient": (lax.stop_gradient, ("float32",)),
    "relu": (jax.nn.relu, ("float32",)),
    "gelu": (jax.nn.gelu, ("float32",)),
    # reductions
    "max": (lambda x: jnp.max(x, 0), ("float32", "bfloat16", *BITS)),
    "min": (lambda x: jnp.min(x), ("float32", "float16", *INT)),
    "all": (lambda x: jnp.all(x, 1), ("bool", "int8", "float32")),
    "any": (lambda x: jnp.any(x, 1), ("bool", "int8")),
    "reduce_and": (lambda x: lax.reduce_and(x, (0,)), BITS),
    "reduce_or": (lambda x: lax.reduce_or(x, (0, 1)), BITS),
    "reduce_xor odd": (lambda x: lax.reduce_xor(x, (0,)), BITS),
    "reduce_xor even": (lambda x: lax.reduce_xor(x, (1,)), BITS),
    "reduce_xor both": (lambda x: lax.reduce_xor(x, (0, 1)), BITS),
    "argmax": (lambda x: jnp.argmax(x, 0), ("float32", *INT)),
    "argmin": (lambda x: lax.argmin(x, 1, jnp.uint16), ("float32", *INT)),
    "sum": (lambda x: jnp.sum(x, 0), ("float32", "bfloat16", "float16", "complex64", *INT, "bool")),
    "sum of one": (lambda x: jnp.sum(x[:1], 0), ("float32", "complex64", "int8")),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (0, 1)), INT),
    "prod": (lambda x: jnp.prod(x, 0), ("float32", "bfloat16", *INT, "bool")),
    "reduce_prod": (lambda x: lax.reduce_prod(x, (0, 1)), INT),
    "cummax": (lambda x: lax.cummax(x, 0), ("float32", "int8")),
    "cummin": (lambda x: lax.cummin(x, 1, reverse=True), ("float32", "int8")),
    "dot": (lambda x: x @ x.T, ("float32", "bfloat16", "int32", "int8")),
    "batched dot": (lambda x: jnp.einsum("ij,ij->i", x, x), ("float32", "int8")),
    "mean": (lambda x: x.mean(), ("float32",)),
    # shape
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, *SHAPE)), ("complex64", *REAL, "bool")),
    "reshape": (lambda x: x.reshape(6, 1), ("float32",)),
    "transpose": (lambda x: x.T, ("float32",)),
    "expand and squeeze": (lambda x: jnp.squeeze(x[None, :, None], 0), ("float32",)),
    "rev": (lambda x: lax.rev(x, (0,)), ("float32",)),
    "slice": (lambda x: x[1:, ::2], ("float32", "int8")),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 5), (2, 1)), ("float32",)),
    "dynamic_update_slice": (lambda x: lax.dynamic_update_slice(x, x[:1], (1, 0)), ("float32",)),
    "concatenate": (lambda x: jnp.concatenate([x, x[:1]]), ("float32", "bool")),
    "stack": (lambda x: jnp.stack([x, x], 1), ("float32",)),
    "tile": (lambda x: jnp.tile(x, (2, 2)), ("float32",)),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=1), ("float32",)),
    "pad": (lambda x: lax.pad(x, x[0, 0], ((1, 0, 2), (0, -1, 0))), ("float32",)),
    "crop": (lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((-1, 0, 0), (0, -1, 0))), ("float32",)),
    "split": (lambda x: lax.split(x, (1, 2)), ("float32", "int8")),
    "rows": (lambda x: x[jnp.array([2, 0])], ("float32", "bfloat16")),
    "clipped rows": (lambda x: jnp.take(x, jnp.array([9]), 0, mode="clip"), ("float32",)),
    "scatter": (lambda x: x.at[jnp.array([1])].set(x[:1]), ("float32",)),
    "scatter max": (lambda x: x.at[jnp.array([1])].max(x[:1]), ("float32", "int8")),
    "sort": (lambda x: lax.sort(x, dimension=0), ("float32", "int8")),
    "sort pairs": (lambda x: lax.sort((x, x * 2), dimension=0), ("float32", "int8")),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", OTHERS)
def test_fold(name, never_dense):
    fun, dtypes = OTHERS[name]
    for dtype in dtypes:
        check_fold(fun, [(x,) for x in constants([dtype])], LAST_BITS.get(name, 0))


@pytest.mark.parametrize("value", few([3, -0.0, np.inf, True], -0.0))
def test_what_is_not_constant(value, may_be_dense):
    """If the result is not a constant, or not known to be one, it is the dense array."""
    x = hki.SymbolicConstant(value, shape=(4, 3))
    funs = [
        lambda x: lax.cumsum(x * 2),
        lambda x: jnp.concatenate([x, x + 1]),
        lambda x: jnp.pad(x, 1, constant_values=7),
        lambda x: jnp.take(x, jnp.array([0, 9]), axis=0),
        lambda x: x.at[jnp.array([0, 9])].get(mode="fill", fill_value=0),
        lambda x: (x * 1).at[1].add(x[0] * 1),
        lambda x: lax.top_k(x, 2),
        lambda x: jnp.clip(x, -1, 1),
        lambda x: lax.bitcast_convert_type(x[0, 0].astype(jnp.float32), jnp.uint8),
        lambda x: lax.reduce_window(x * 1.0, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
        lambda x: jnp.sum(x.astype(jnp.float8_e5m2)),
        lambda x: lax.fori_loop(0, 3, lambda i, y: y + 1, x * 1.0),
        lambda x: lax.cond(x[0, 0] > 0, lambda y: y, lambda y: -y, x * 1.0),
        lambda x: jnp.linalg.norm(x * 1.0),
    ]
    got = jax.jit(hki.use_implicit_args(lambda x: [f(x) for f in funs]))(x)
    want = [f(dense(x)) for f in funs]
    jax.tree.map(assert_same, hki.materialize(got), want)


def test_parts_of_a_constant(never_dense):
    """Constants among dense operands of primitives that move elements."""
    x = jnp.arange(6.0).reshape(SHAPE)
    c = hki.SymbolicConstant(2.5, shape=(1, 2))
    one = hki.SymbolicConstant(1, shape=())
    funs = [
        lambda x, c, i: jnp.concatenate([x, c]),
        lambda x, c, i: lax.pad(x, c[0, 0], ((1, 1, 1), (0, 0, 0))),
        lambda x, c, i: lax.dynamic_update_slice(x, c, (1, 0)),
        lambda x, c, i: lax.dynamic_slice(c, (x[0, 0].astype(int), 0), (1, 1)),
        lambda x, c, i: jnp.where(x > 2, x, c),
        lambda x, c, i: lax.select_n(i, x, -x),
        lambda x, c, i: lax.select_n(x > 2, x, jnp.broadcast_to(c, x.shape)),
        lambda x, c, i: lax.clamp(c[0, 0], x, c[0, 1] + 1),
    ]
    got = jax.jit(hki.use_implicit_args(lambda *a: [f(*a) for f in funs]))(x, c, one)
    want = jax.jit(lambda x: [f(x, dense(c), dense(one)) for f in funs])(x)
    jax.tree.map(assert_same, hki.materialize(got), want)


shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@pytest.mark.slow
@settings(max_examples=8, derandomize=True)
@given(st.data(), shapes, st.sampled_from([-3, 0, 1, 1.5, -0.0, np.nan, np.inf]))
def test_any_shape(data, shape, value):
    """Reductions and changes of shape, of no elements too."""
    x = hki.SymbolicConstant(value, shape=shape)
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    starts = [data.draw(st.integers(0, n)) for n in shape]
    funs = [
        lambda x: lax.reduce_sum(x, axes),
        lambda x: lax.reduce_prod(x, axes),
        lambda x: lax.reduce_max(x, axes),
        lambda x: lax.reduce_min(x, axes),
        lambda x: lax.reduce_or(x > 0, axes),
        lambda x: lax.reduce_xor(x > 0, axes),
        lambda x: lax.transpose(x, order),
        lambda x: lax.slice(x, starts, shape),
        lambda x: lax.rev(x, axes),
        lambda x: lax.broadcast_in_dim(x, (2, *shape), range(1, len(shape) + 1)),
        lambda x: lax.reshape(x, (x.size,)),
        lambda x: jnp.tensordot(x, x, (axes, axes)),
        lambda x: lax.cummax(x, 0),
    ]
    with hki.materialization("error"):
        got = jax.eval_shape(hki.use_implicit_args(lambda x: [f(x) for f in funs]), x)
    want = jax.jit(lambda x: [f(x) for f in funs])(dense(x))
    for g, w in zip(got, want, strict=True):
        assert isinstance(g, hki.SymbolicConstant)
        assert_same(g, w, ulps=8)  # sums and powers are rounded once, not at each step


# --- the value as metadata -----------------------------------------------------------------------


def test_metadata():
    """Constants are equal as pytrees exactly where bits, dtypes, shapes and weak types are."""
    values = [0.0, -0.0, np.nan, np.inf, 1, True, 1.0, 1 + 0j, jnp.bfloat16(1), np.int8(1)]
    values += [jnp.float8_e4m3fn(1), jnp.int4(1), jnp.float32(1), np.uint64(1), jnp.array(2.5)]
    make = [functools.partial(hki.SymbolicConstant, v, shape=(2,)) for v in values]
    structures = [jax.tree.structure(f()) for f in make]
    for i, f in enumerate(make):
        x = f()
        assert [j for j, t in enumerate(structures) if t == jax.tree.structure(x)] == [i]
        assert hash(structures[i]) == hash(jax.tree.structure(f()))
        for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            assert jax.tree.structure(y) == structures[i] and repr(y) == repr(x)
        assert not jax.tree.leaves(x) and x.nbytes == 0
        want = jnp.full((2,), values[i])
        assert_same(x, want)
        assert hki.materialize(x).weak_type == x.weak_type == want.weak_type
        assert np.asarray(x.value).tobytes() == np.asarray(want)[0].tobytes()
    assert jax.tree.structure(hki.Zeros(shape=2)) == jax.tree.structure(hki.Zeros(shape=(2,)))


def test_repr():
    assert repr(hki.Zeros(shape=(2, 0), dtype=jnp.int8)) == "Zeros(int8[2,0])"
    assert repr(hki.SymbolicConstant(-0.0, shape=())) == "SymbolicConstant(float32[], value=-0.0)"


def test_errors():
    constant = hki.SymbolicConstant
    with pytest.raises(TypeError, match="value: expected a number that is known .* jnp.full"):
        jax.jit(lambda v: constant(v, shape=(2,)))(1.0)
    with pytest.raises(TypeError, match="value: expected a number that is known"):
        constant(hki.Zeros(shape=()), shape=(2,))
    with pytest.raises(ValueError, match=r"value: expected one number, got .* shape \(2,\)"):
        constant(jnp.ones(2), shape=(2,))
    for bad in ("one", None, object()):
        with pytest.raises(TypeError, match="value, dtype: expected a number"):
            constant(bad, shape=(2,))
    with pytest.raises(ValueError, match="value: .* does not fit"):
        constant(2**40, shape=(2,))
    with pytest.raises(TypeError, match="dtype: expected a dtype of numbers"):
        constant(jax.random.key(0), shape=(2,))
    with pytest.raises(TypeError, match="dtype"):
        hki.Zeros(shape=(2,), dtype="no such dtype")
    for bad in (-1, (2, -3), None):
        with pytest.raises(ValueError, match="shape: expected lengths of 0 or more"):
            hki.Zeros(shape=bad)
    with pytest.raises(TypeError, match="shape"):
        hki.Zeros(shape="ab")
    with pytest.raises(TypeError, match="use_implicit_args"):
        jnp.sin(hki.Zeros(shape=(2,)))


# --- zeros ---------------------------------------------------------------------------------------

X = jax.device_put(np.float32([[1, -0.0, np.nan], [np.inf, 2, -3]]))
Z = hki.Zeros(shape=(2, 3))
LORA = hki.LoRA(*(jax.device_put(np.ones(s, np.float32)) for s in ((2, 3), (2, 1), (1, 3))))
C = hki.SymbolicConstant(np.nan, shape=(2, 3), dtype="float32")
IMAGE = hki.Zeros(shape=(1, 5, 5, 2))
KERNEL = jax.device_put(np.ones((3, 3, 2, 4), np.float32))

ANNIHILATED = {
    "mul": (jnp.multiply, Z, X),
    "dot": (lambda x, y: x @ y.T, Z, X),
    "batched dot": (lambda x, y: jnp.einsum("ij,ik->ijk", x, y), Z, X),
    "wider dot": (lambda x, y: jnp.matmul(x, y.T, preferred_element_type=jnp.float32), Z, X),
    "mul of nan": (jnp.multiply, Z, C),
    "mul of lora": (jnp.multiply, Z, LORA),
    "dot of lora": (lambda x, y: x @ y.T, Z, LORA),
    "dot of zeros": (lambda x, y: x @ y.T, Z, Z),
}
ANNIHILATED_FIRST = {
    "conv": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        IMAGE,
        KERNEL,
    ),
    "divided": (jnp.divide, Z, X),
    "solve": (
        lambda b, a: lax.linalg.triangular_solve(a, b, left_side=True),
        Z,
        jax.device_put(np.eye(2, dtype=np.float32)),
    ),
    "neg": (lambda x, y: -x, Z, X),
    "sum": (lambda x, y: x.sum(0), Z, X),
    "mean": (lambda x, y: x.mean(), Z, X),
    "cumsum": (lambda x, y: jnp.cumsum(x, 0), Z, X),
    "cast": (lambda x, y: x.astype(jnp.bfloat16), Z, X),
    "complex": (lambda x, y: lax.complex(x, x), Z, X),
    "fft": (lambda x, y: jnp.fft.rfft(x), Z, X),
    "shapes": (lambda x, y: lax.pad(x.T.reshape(2, 1, 3)[:, 0], 0.0, [(1, 0, 1)] * 2)[None], Z, X),
    "stack": (lambda x, y: jnp.stack([x, x]), Z, X),
    "scatter": (lambda x, y: x.at[0].set(x[1]), Z, X),
    "copy": (lambda x, y: jnp.copy(x), Z, X),
    "add": (jnp.add, Z, Z),
    "sub": (jnp.subtract, Z, Z),
    "embedding": (lambda x, y: x[jnp.array([1, 0, 1])], Z, X),
    "lora": (lambda x, y: x @ y, Z, hki.Zeros(shape=(3, 4))),
}


@pytest.mark.parametrize("name", [*ANNIHILATED, *ANNIHILATED_FIRST])
def test_zeros_annihilate(name, never_dense):
    """The results are `Zeros` of the shape and dtype that the dense function has."""
    fun, *operands = {**ANNIHILATED, **ANNIHILATED_FIRST}[name]
    orders = [operands, operands[::-1]] if name in ANNIHILATED else [operands]
    for x, y in orders:
        got = jax.eval_shape(hki.use_implicit_args(fun), x, y)
        assert type(got) is hki.Zeros
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, y)]
        want = jax.eval_shape(fun, *avals)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
def test_sum_with_zeros(dtype, never_dense):
    """The other term itself: no operation is left in the program."""
    x, zeros = jnp.arange(6).reshape(2, 3).astype(dtype), hki.Zeros(shape=(2, 3), dtype=dtype)
    for fun in (lambda x, z: x + z, lambda x, z: z + x, lambda x, z: x - z):
        program = jax.make_jaxpr(hki.use_implicit_args(fun))(x, zeros)
        assert not program.eqns
        assert_same(hki.use_implicit_args(fun)(x, zeros), x)
    assert_same(hki.use_implicit_args(lambda x, z: z - x)(x, zeros), -x)
    if dtype == "int32":
        for fun in (jnp.bitwise_or, jnp.bitwise_xor):
            assert_same(hki.use_implicit_args(fun)(zeros, x), x)
        assert type(hki.use_implicit_args(jnp.bitwise_and)(x, zeros)) is hki.Zeros


def test_sum_of_zeros_and_others(never_dense):
    """Implicit terms keep their type, and a strong zero makes a weak term strong."""
    add = hki.use_implicit_args(jnp.add)
    assert type(add(LORA, Z)) is type(add(Z, LORA)) is hki.LoRA
    assert jax.tree.structure(add(C, Z)) == jax.tree.structure(C)
    weak = jnp.full((2, 3), 1.0)
    assert weak.weak_type and not add(weak, Z).weak_type and not add(Z, weak).weak_type
    assert not add(hki.SymbolicConstant(1.0, shape=(2, 3)), Z).weak_type
    scattered = hki.use_implicit_args(lambda x, z: x.at[jnp.array([0, 1])].add(z))
    assert_same(scattered(X, Z), X)


def test_zeros_as_a_number(never_dense):
    """A nonlinear function sees the number 0, and gives an ordinary constant."""
    for fun, want in [(jnp.exp, 1.0), (jnp.sin, 0.0), (jnp.square, 0.0), (jnp.cos, 1.0)]:
        got = hki.use_implicit_args(fun)(Z)
        assert type(got) is hki.SymbolicConstant and got.value == want
    assert np.isnan(hki.use_implicit_args(lambda z: z / z)(Z).value)
    with hki.materialization("allow"):
        solve = hki.use_implicit_args(lambda z: lax.linalg.triangular_solve(z, z, left_side=True))
        assert np.isnan(solve(hki.Zeros(shape=(2, 2)))).all()
    mixed = hki.use_implicit_args(lambda z: jnp.concatenate([z, jnp.sin(z)]))(Z)
    assert type(mixed) is hki.SymbolicConstant
    assert_same(hki.use_implicit_args(jnp.maximum)(X, Z), jnp.maximum(X, 0.0))


def test_zeros_within_lora(never_dense):
    """LoRA of no correction is the dot with `w` alone."""
    lora = hki.LoRA(jnp.arange(6.0).reshape(3, 2), hki.Zeros(shape=(3, 1)), jnp.ones((1, 2)), 2.0)
    x = jnp.arange(12.0).reshape(4, 3)
    f = jax.jit(hki.use_implicit_args(jnp.matmul))
    assert_same(f(x, lora), x @ lora.w)
    assert f.lower(x, lora).as_text().count("dot_general") == 1
    assert type(f(hki.Zeros(shape=(4, 3)), lora)) is hki.Zeros


def test_zero_biases_cost_nothing(never_dense, key):
    """No addition is left in the compiled program of an MLP whose biases are zeros."""
    mlp = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 8, 3])(x)))
    x = jax.random.normal(key, (4, 5))
    params = mlp.init(key, x)
    zeros = {name: {"w": p["w"], "b": hki.Zeros(shape=p["b"].shape)} for name, p in params.items()}
    apply = jax.jit(hki.use_implicit_args(mlp.apply))
    additions = [apply.lower(p, x).compile().as_text().count(" add(") for p in (params, zeros)]
    assert additions[0] >= 3 and additions[1] == 0
    assert_same(apply(zeros, x), jax.jit(mlp.apply)(params, x))


# --- transformations -----------------------------------------------------------------------------


def model(x, c, z):
    """Every way of a constant in one function: folded, broadcast, annihilated, added, as a bias."""
    return jnp.tanh(x @ jnp.full((3, 3), 0.5) + z) * jnp.exp(c) + c.sum(0) * z + jnp.minimum(x, c)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "how", ["eager", "jit", "vmap", "inner vmap", "scan", "inner scan", "remat"]
)
def test_transformations(how, never_dense):
    c, z = hki.SymbolicConstant(0.75, shape=(3,), dtype="float32"), hki.Zeros(shape=(3,))
    xs = normal((4, 3))

    def scan(f, xs, c, z):
        return lax.scan(lambda carry, x: (carry, f(x, *carry)), (c, z), xs)[1]

    def scan_xs(f, xs, c, z):
        many = [jnp.broadcast_to(v, (4, 3)) for v in (c, z)]
        return lax.scan(lambda carry, args: (carry, f(*args)), 0, (xs, *many))[1]

    wrapped = hki.use_implicit_args
    many = {
        "eager": (lambda xs, c, z: jnp.stack([wrapped(model)(x, c, z) for x in xs])),
        "jit": jax.jit(wrapped(jax.vmap(model, (0, None, None)))),
        "vmap": jax.vmap(wrapped(model), (0, None, None)),
        "inner vmap": wrapped(jax.vmap(model, (0, None, None))),
        "scan": lambda xs, c, z: lax.scan(lambda n, x: (n, wrapped(model)(x, c, z)), 0, xs)[1],
        "inner scan": wrapped(
            lambda xs, c, z: scan(model, xs, c, z) + scan_xs(model, xs, c, z) * 0
        ),
        "remat": jax.vmap(jax.checkpoint(wrapped(jax.checkpoint(model))), (0, None, None)),
    }[how]
    by_dense = jax.jit(jax.vmap(model, (0, None, None)))
    want = by_dense(xs, dense(c), dense(z))
    # XLA fuses multiplications and additions otherwise in another program.
    np.testing.assert_allclose(many(xs, c, z), want, rtol=1e-6)

    got = jax.grad(lambda xs: (many(xs, c, z) ** 2).sum())(xs)
    want = jax.jit(jax.grad(lambda xs: (by_dense(xs, dense(c), dense(z)) ** 2).sum()))(xs)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_loops(never_dense):
    """Constants are sliced and stacked along a leading axis by a scan, and may be carried."""

    def f(c):
        def body(carry, row):
            return carry * 1, (row * 2, carry)

        return lax.scan(body, c[0], c)

    x = hki.SymbolicConstant(3.0, shape=(5, 2), dtype="float32")
    carry, (rows, carries) = jax.jit(hki.use_implicit_args(f))(x)
    assert carry.shape == (2,) and carry.value == 3
    assert rows.shape == (5, 2) and rows.value == 6
    assert carries.shape == (5, 2) and carries.value == 3


def test_gradient_of_parameters_with_zeros(never_dense):
    """A parameter that is `Zeros` has a gradient without leaves."""
    params = {"w": jnp.ones((3, 2)), "b": hki.Zeros(shape=(2,))}

    def loss(params, x):
        return jnp.sum((x @ params["w"] + params["b"]) ** 2)

    x = jnp.arange(6.0).reshape(2, 3)
    got = jax.grad(hki.use_implicit_args(loss))(params, x)
    want = jax.grad(loss)(hki.materialize(params), x)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    np.testing.assert_array_equal(got["w"], want["w"])


def test_shard_map(never_dense):
    """Within `shard_map` the broadcast scalar varies over the mesh as the other operand does."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(
        lambda x, c, z: jnp.maximum(x * jnp.exp(c) + z, c),
        mesh=mesh,
        in_specs=(spec("i"), spec(), spec()),
        out_specs=spec("i"),
    )
    c, z = hki.SymbolicConstant(0.5, shape=(3,), dtype="float32"), hki.Zeros(shape=(3,))
    x = jnp.arange(3.0)
    assert_same(hki.use_implicit_args(f)(x, c, z), f(x, dense(c), dense(z)))


def test_boxed(never_dense):
    """A constant that is made within the function."""

    def f(x):
        return hki.box(hki.Zeros(shape=(3,))) + x, hki.box(hki.SymbolicConstant(2, shape=(2,)))

    total, constant = hki.use_implicit_args(f)(jnp.arange(3.0))
    assert_same(total, jnp.arange(3.0))
    assert constant.weak_type and constant.value == 2
    assert_same(f(jnp.arange(3.0))[1], jnp.full((2,), 2))


@pytest.mark.slow
def test_float64(never_dense):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        for dtype, value in (("float64", 1e300), ("int64", 2**62), ("uint64", 2**64 - 1)):
            x = hki.SymbolicConstant(value, shape=(3, 2), dtype=dtype)
            for fun in (jnp.sum, jnp.prod, lambda x: x * 3 + x, lambda x: x @ x.T, jnp.square):
                check_fold(fun, [(x,)])
