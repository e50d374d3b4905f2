"""Property-based: drawn arrays through drawn chains of operations, against the dense twin."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haiku_implicit as hki
from tests.cases import Diagonal, Nought, Outer
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")
# Each example compiles programs of its own; the first failure is what counts, not the smallest one.
SETTINGS = hypothesis.settings(
    max_examples=12,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
SIZES = st.integers(1, 4)
FLOATS = st.sampled_from([jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16])
# A few roundings of each dtype, of values of order one.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


def values(seed, shape, dtype=jnp.float32):
    """Small multiples of 1/4: exact in every floating dtype. (JAX would compile for each shape.)"""
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape) / 4, dtype)


# --- drawing an array ----------------------------------------------------------------------------------


@st.composite
def loras(draw, shape, dtype):
    *lead, n, m = shape
    rank = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 99))
    w = values(seed, shape, dtype)
    if draw(st.booleans()) and dtype == jnp.float32:
        w = draw(quantized(shape, dtype))
    factors = values(seed + 1, (*lead, n, rank), dtype), values(seed + 2, (*lead, rank, m), dtype)
    return hki.LoRA(w, *factors, alpha=draw(st.sampled_from([None, 1.0, 3.0])))


@st.composite
def quantized(draw, shape, dtype):
    name = draw(st.sampled_from(["int8", "int4", "nf4"]))
    axis = draw(st.sampled_from([-2, -1]))
    length = shape[axis]
    even = length % 2 == 0 or name == "int8"
    groups = [g for g in range(1, length + 1) if length % g == 0 and (g % 2 == 0 or name == "int8")]
    group = draw(st.sampled_from([None, *groups] if even else [None]))
    zero_point = name != "nf4" and draw(st.booleans())
    w = values(draw(st.integers(0, 99)), shape, dtype)
    # One program instead of one for each operation.
    return jax.jit(lambda w: hki.QuantizedMatrix.quantize(w, name, group, axis, zero_point))(w)


@st.composite
def outers(draw, shape, dtype):
    seed = draw(st.integers(0, 99))
    return Outer(values(seed, shape[:-1], dtype), values(seed + 1, (*shape[:-2], shape[-1]), dtype))


@st.composite
def zeros(draw, shape, dtype):
    return draw(st.sampled_from([hki.Zeros, Nought]))(shape=shape, dtype=dtype)


@st.composite
def constants(draw, shape, dtype):
    value = draw(st.sampled_from([1.0, -0.5, 2.0]))
    return hki.SymbolicConstant(value, shape=shape, dtype=dtype)


@st.composite
def diagonals(draw, shape, dtype):
    return Diagonal(values(draw(st.integers(0, 99)), shape[-1:], dtype))


KINDS = {
    "lora": loras, "quantized": quantized, "outer": outers, "zeros": zeros, "constant": constants,
    "diagonal": diagonals,
}  # fmt: skip


@st.composite
def arrays(draw, kind):
    """An implicit array of up to two batch axes."""
    shape = tuple(draw(st.lists(SIZES, min_size=2, max_size=4)))
    if kind == "diagonal":
        shape = shape[-1:] * 2
    return draw(KINDS[kind](shape, draw(FLOATS)))


# --- drawing an operation: a function of one array of a given shape ------------------------------------------


@st.composite
def transposes(draw, shape):
    order = tuple(draw(st.permutations(range(len(shape)))))
    return lambda w: lax.transpose(w, order)


@st.composite
def reshapes(draw, shape):
    """Some factorization of the size, often one that keeps the matrix."""
    if len(shape) > 1 and draw(st.booleans()):
        lead = draw(factorizations(math.prod(shape[:-2])))
        return lambda w: w.reshape(*lead, *shape[-2:])
    new = draw(factorizations(math.prod(shape)))
    return lambda w: w.reshape(new)


@st.composite
def factorizations(draw, size):
    factors = []
    while size > 1 and len(factors) < 3:
        factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
        factors.append(factor)
        size //= factor
    return (*factors, size) if draw(st.booleans()) or size > 1 else tuple(factors)


@st.composite
def slices(draw, shape):
    cuts = []
    for n in shape:
        whole = draw(st.booleans()) or n == 0
        start = 0 if whole else draw(st.integers(0, n - 1))
        stop = n if whole else draw(st.integers(start + 1, n))
        cuts.append((start, stop, 1 if whole else draw(st.sampled_from([1, 2]))))
    return lambda w: lax.slice(w, *zip(*cuts, strict=True)) if cuts else w


@st.composite
def dynamic_slices(draw, shape):
    sizes = [n if draw(st.booleans()) else draw(st.integers(min(n, 1), n)) for n in shape]
    starts = [draw(st.integers(-1, n + 1)) for n in shape]  # out of bounds: clamped
    return lambda w: lax.dynamic_slice(w, [jnp.asarray(s) for s in starts], sizes)


@st.composite
def takes(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    indices = draw(st.lists(st.integers(-shape[axis], shape[axis] - 1), min_size=1, max_size=3))
    mode = draw(st.sampled_from(["fill", "clip", "wrap"]))
    if mode == "fill" and draw(st.booleans()):
        indices = [*indices, shape[axis] + 3]  # NaN
    return lambda w: jnp.take(w, jnp.array(indices), axis=axis, mode=mode)


@st.composite
def broadcasts(draw, shape):
    """New axes anywhere, and axes of length one repeated."""
    new = draw(st.lists(st.integers(0, len(shape)), max_size=2))
    out, places = [], []
    for i in range(len(shape) + 1):
        out += [draw(SIZES) for place in new if place == i]
        if i < len(shape):
            places.append(len(out))
            out.append(draw(SIZES) if shape[i] == 1 else shape[i])
    return lambda w: lax.broadcast_in_dim(w, tuple(out), tuple(places))


@st.composite
def reverses(draw, shape):
    axes = draw(st.sets(st.integers(0, len(shape) - 1)))
    return lambda w: lax.rev(w, tuple(sorted(axes)))


@st.composite
def pads(draw, shape):
    config = [
        (draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in shape
    ]
    config = [c if draw(st.booleans()) else (0, 0, 0) for c in config]
    value = draw(st.sampled_from([0.0, 1.0]))
    return lambda w: lax.pad(w, jnp.asarray(value, w.dtype), config)


@st.composite
def concatenations(draw, shape):
    axis, n = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        return lambda w: lax.concatenate([w] * n, axis)
    return lambda w: lax.concatenate([w, jnp.ones(shape, w.dtype), w], axis)


@st.composite
def splits(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    cut = draw(st.integers(0, shape[axis]))
    which = draw(st.booleans())
    return lambda w: lax.split(w, (cut, shape[axis] - cut), axis)[which]


@st.composite
def reductions(draw, shape):
    axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1)))))
    # The largest and the smallest of nothing are errors.
    of_some = [] if 0 in shape else [jnp.max, jnp.min]
    fun = draw(st.sampled_from([jnp.sum, jnp.prod, jnp.mean, *of_some]))
    return lambda w: fun(w, axis=axes) if axes else w


@st.composite
def elementwise(draw, shape):
    c = values(draw(st.integers(0, 9)), shape)
    return draw(
        st.sampled_from(
            [
                lambda w: -w,
                lambda w: w * 2.0,
                lambda w: w + 1.0,
                lambda w: 3.0 - w,
                lambda w: w + c.astype(w.dtype),
                lambda w: c.astype(w.dtype) * w,
                lambda w: jnp.where(c > 0, w, 1.0),
                lambda w: jnp.where(c > 0, w, w),
                lambda w: jnp.maximum(w, 0),
                lambda w: w / 2.0,
                lambda w: w * w,
                lambda w: w + w,
                lambda w: jnp.tanh(w),
                lambda w: lax.stop_gradient(w),
                lambda w: jax.nn.relu(w),
                lambda w: w.astype(jnp.float32),
                lambda w: w.astype(jnp.bfloat16),
            ]
        )
    )


@st.composite
def orders(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    fun = draw(st.sampled_from([lax.cumsum, lax.cummax, functools.partial(lax.sort)]))
    if fun in (lax.cumsum, lax.cummax):
        return lambda w: fun(w, axis=axis, reverse=True)
    return lambda w: lax.sort(w, dimension=axis)


@st.composite
def dots(draw, shape):
    """`dot_general` with another array over any axes, in any order, on either side."""
    axes = draw(st.permutations(range(len(shape))))
    i, j = sorted(draw(st.integers(0, len(axes))) for _ in range(2))
    contract, batch = axes[:i], axes[i:j]
    shared = [*contract, *batch]
    sizes = [*(shape[a] for a in shared), *draw(st.lists(SIZES, max_size=2))]
    order = draw(st.permutations(range(len(sizes))))
    place = [order.index(k) for k in range(len(shared))]
    x = values(draw(st.integers(0, 9)), tuple(sizes[k] for k in order))
    mine, other = (contract, batch), (place[: len(contract)], place[len(contract) :])
    first = draw(st.booleans())

    def fun(w):
        y = x.astype(w.dtype)
        if first:
            return lax.dot_general(w, y, tuple(zip(mine, other, strict=True)))
        return lax.dot_general(y, w, tuple(zip(other, mine, strict=True)))

    return fun


OPERATIONS = [
    transposes, reshapes, slices, dynamic_slices, takes, broadcasts, reverses, pads, concatenations, splits,
    reductions, elementwise, orders, dots,
]  # fmt: skip


@st.composite
def programs(draw, w, most=3):
    """A chain of operations on an array like `w`."""
    chain, struct = [], jax.ShapeDtypeStruct(w.shape, w.dtype)
    for _ in range(draw(st.integers(1, most))):
        possible = OPERATIONS if struct.ndim else [reshapes, broadcasts, elementwise]
        step = draw(draw(st.sampled_from(possible))(struct.shape))
        chain.append(step)
        struct = jax.eval_shape(step, struct)
    return lambda w: functools.reduce(lambda y, step: step(y), chain, w)


# --- properties ------------------------------------------------------------------------------------------


def check(got, want):
    got = hki.materialize(got)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # The coarsest dtype on the way is not known here: half precision is what it may have been.
        rtol = TOLERANCE[a.dtype.name]
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=rtol * scale_of(b)
        )


def scale_of(x):
    x = np.abs(np.asarray(x, np.float64))
    return max(1.0, np.max(x, initial=0.0, where=np.isfinite(x)))


@pytest.mark.parametrize("kind", few(KINDS, "constant"))
def test_any_chain_of_operations(kind):
    @SETTINGS
    @hypothesis.given(st.data())
    def run(data):
        w = data.draw(arrays(kind))
        program = data.draw(programs(w))
        check(hki.use_implicit_args(program)(w), program(hki.materialize(w)))

    run()
