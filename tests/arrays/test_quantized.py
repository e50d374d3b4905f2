"""Quantized weights: against plain NumPy definitions of the formats, and against the dense twin."""

import dataclasses
import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.core.sharding import shard_specs
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.products import reference
from tests import random_arrays
from tests.dense_twin import on_twins
from tests.tiers import few

N, M, K = 12, 6, 5  # all different, so that no axis can pass for another

# Format, group size, zero point.
KINDS = {
    "int8": ("int8", None, False),
    "int8 groups": ("int8", 3, False),
    "int8 zero point": ("int8", None, True),
    "int4 groups": ("int4", 2, False),
    "int4 zero point": ("int4", 6, True),
    "nf4 groups": ("nf4", 6, False),
}
kinds = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", ["int8", "int4 zero point", "nf4 groups"])
axes = pytest.mark.parametrize("axis", [-2, -1])


def normal(shape, seed=1, dtype=jnp.float32):
    return random_arrays.normal(shape, seed, dtype, scale=0.5)


@functools.partial(jax.jit, static_argnames=("kind", "axis", "shape", "seed", "dtype"))
def quantized(kind="int4 groups", axis=-2, shape=(N, M), seed=0, dtype=jnp.float32):
    name, group, zero_point = KINDS[kind]
    return hki.QuantizedMatrix.quantize(normal(shape, seed, dtype), name, group, axis, zero_point)


def close(got, want, tolerance=2e-5):
    # Sums of a few float32 terms in another order: rounding in the seventh digit, and more after
    # cancellation.
    got, want = hki.materialize(got), hki.materialize(want)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=tolerance, atol=tolerance)


def with_scales(q, scales):
    return q._replace(**scales)


def scales_of(q):
    return {"scale": q.scale} | ({} if q.offset is None else {"offset": q.offset})


def same_as_dense(f, q, *args, tolerance=2e-5, how=("grad", "vmap", "scan")):
    """`f(q, *args)` is `f(dense, *args)`: eager, jit, grad by arguments and scales, vmap, scan."""
    movable = [i for i, x in enumerate(args, 1) if jnp.issubdtype(x.dtype, jnp.floating)]

    def results(function, make):
        def run(scales, *args):
            return hki.materialize(function(make(with_scales(q, scales)), *args))

        def total(*args):
            leaves = jax.tree.leaves(run(*args))
            return sum(jnp.sin(y.astype(jnp.float32)).sum() for y in leaves)

        def everything(scales, *args):
            doubled = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), scales)
            stacked = [jnp.stack([x, x[..., ::-1] if x.ndim else x]) for x in args]
            out = {"jit": run(scales, *args)}
            if "grad" in how:
                out["grad"] = jax.grad(total, argnums=(0, *movable))(scales, *args)
            if "vmap" in how:
                by_scales = jax.vmap(run, (0, *[None] * len(args)))(doubled, *args)
                by_args = jax.vmap(run, (None, *[0] * len(args)))(scales, *stacked)
                out["vmap"] = by_scales, by_args, jax.vmap(run)(doubled, *stacked)
            if "scan" in how:
                out["scan"] = jax.lax.scan(lambda c, x: (c, run(*x)), 0, (doubled, *stacked))[1]
            return out

        return jax.jit(everything)(scales_of(q), *args)

    implicit = hki.use_implicit_args(f)
    with hki.materialization("error"):
        want = results(f, hki.materialize)
        close(implicit(q, *args), want["jit"], tolerance)
        close(results(implicit, lambda w: w), want, tolerance)


def inside(f, q, *args, **options):
    """As `same_as_dense`, with the transformation within the wrapped function, so that it meets the rules."""
    pair = jax.tree.map(lambda *x: jnp.stack(x), q, q._replace(scale=-q.scale))
    stacked = [jnp.stack([x, x[..., ::-1] if x.ndim else x]) for x in args]

    def run(q, pair, stacked):
        by_args = jax.vmap(f, in_axes=(None, *[0] * len(args)))(q, *stacked)
        layers = jax.lax.scan(lambda c, x: (c, f(*x)), 0, (pair, *stacked))[1]
        return jax.vmap(f)(pair, *stacked), by_args, layers

    with hki.materialization("error"):
        got = jax.jit(hki.use_implicit_args(run))(q, pair, stacked)
    close(got, run(hki.materialize(q), hki.materialize(pair), stacked), **options)


# --- the formats ---------------------------------------------------------------------------------


def decoded(q):
    """Values by the definition, one code at a time."""
    codes, scale = np.asarray(q.codes), np.asarray(q.scale)
    four = q.format in ("int4", "uint4", "nf4")
    *lead, rows, stored = codes.shape
    groups = scale.shape[-1]
    g = stored * (2 if four else 1) // groups
    out = np.zeros((*lead, rows, groups * g))
    for at in np.ndindex(*lead, rows):
        for i in range(groups * g):
            group, j = divmod(i, g)
            if four:
                byte = int(codes[at][group * (g // 2) + j % (g // 2)])
                code = byte & 15 if j < g // 2 else byte >> 4
            else:
                code = int(codes[at][i])
            if q.format == "nf4":
                code = formats.NF4_TABLE[code]
            elif q.format == "int4":
                code -= 8
            out[at][i] = code * float(scale[at][group])
            out[at][i] += 0 if q.offset is None else float(q.offset[at][group])
    out = out[..., : out.shape[-1] - q.padding]
    return out if q.axis == -1 else np.swapaxes(out, -1, -2)


# Half the widest step between two values, in units of the scale. The end of the range may be off by
# the rounding of a zero point, and by that of the scale itself.
STEP = {"int8": 0.5, "uint8": 0.51, "int4": 0.5, "uint4": 0.501, "nf4": 0.1521}


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.data())
@pytest.mark.slow
def test_round_trip(data):
    name = data.draw(st.sampled_from(["int8", "int4", "nf4"]))
    zero_point = name != "nf4" and data.draw(st.booleans())
    batch = data.draw(st.sampled_from([(), (2,), (1, 2)]))
    n, m = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    axis = data.draw(st.sampled_from([-2, -1]))
    fmt = formats.find(name)
    group = data.draw(st.sampled_from([None, *formats.group_sizes((n, m)[axis], fmt)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    w = (rng.normal(size=(*batch, n, m)) + rng.integers(-3, 4)).astype(np.float32)

    options = dict(dtype=name, group_size=group, axis=axis, zero_point=zero_point)
    q = jax.jit(lambda w: hki.QuantizedMatrix.quantize(w, **options))(w)
    assert q.shape == w.shape and q.dtype == np.float32 and q.axis == axis
    assert q.padding == (group is None and fmt.bits == 4 and w.shape[axis] % 2)
    values = np.asarray(jax.jit(hki.materialize)(q))
    np.testing.assert_allclose(values, decoded(q), rtol=1e-5, atol=1e-6)
    assert q.codes.dtype == fmt.dtype or q.format.startswith("uint")
    assert q.nbytes == sum(x.nbytes for x in jax.tree.leaves(q))
    scale = np.repeat(q.scale, q.group_size, axis=-1)[..., : w.shape[axis]]
    scale = scale if axis == -1 else np.swapaxes(scale, -1, -2)
    assert (np.abs(values - w) <= STEP[q.format] * scale + 1e-5).all()
    if name == "int8" and not zero_point:
        assert q.codes.min() >= -127


def test_nibbles_in_the_order_of_ggml():
    w = jnp.arange(8.0)[None] - 7  # codes 0..7 of each group, where the scale is 1
    q = hki.QuantizedMatrix.quantize(w, "int4", 4, axis=-1, zero_point=True)
    first = q.codes[0, :2].tolist()
    codes = [b & 15 for b in first] + [b >> 4 for b in first]
    np.testing.assert_allclose(
        np.array(codes) * q.scale[0, 0] + q.offset[0, 0], w[0, :4], atol=0.21
    )
    np.testing.assert_allclose(hki.materialize(q), w, atol=0.21)
    ours = hki.QuantizedMatrix.from_parts(
        jnp.array([[0x1F, 0x80]], jnp.uint8), jnp.ones((1, 1)), dtype="int4", axis=-1
    )
    assert hki.materialize(ours).tolist() == [[7, -8, -7, 0]]


def test_codes_that_come_quantized():
    int8 = hki.QuantizedMatrix.from_parts(
        np.array([[-128, 127]], np.int8), np.full((1, 1), 0.5, np.float16), dtype=np.int8
    )
    assert int8.dtype == np.float16 and int8.shape == (2, 1)
    assert hki.materialize(int8).tolist() == [[-64], [63.5]]
    uint8 = hki.QuantizedMatrix.from_parts(
        np.array([[0, 255]], np.uint8), np.ones((1, 1), np.float32), np.full((1, 1), -128.0),
        dtype="uint8", axis=-1, out_dtype=jnp.bfloat16,
    )  # fmt: skip
    assert uint8.dtype == jnp.bfloat16
    assert hki.materialize(uint8).tolist() == [[-128, 127]]


@pytest.mark.combinations
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_zeros_and_constants(name, zero_point):
    if name == "nf4" and zero_point:
        return  # there is no such format
    w = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    w[:, 1], w[:, 2], w[2:4, 3], w[1, 4] = 0, 0.3, 0, -0.0
    q = hki.QuantizedMatrix.quantize(w, name, zero_point=zero_point)
    for values in (hki.materialize(q), jax.jit(hki.materialize)(q)):
        assert (np.asarray(values)[w == 0] == 0).all()
        np.testing.assert_allclose(values[:, 2], 0.3, rtol=1e-6)
    # The largest and the smallest numbers: no overflow and no division by zero on the way.
    # (A zero point adds to the range, and 15 or 255 scales are one more half scale than that.)
    big = 3e37 if name == "nf4" else 1e38 if zero_point else 3e38
    for extreme in (big, -big, 1e-45):
        w = np.array([[extreme], [0.0], [-extreme / 4]], np.float32)
        got = hki.materialize(hki.QuantizedMatrix.quantize(w, name, zero_point=zero_point))
        np.testing.assert_allclose(got, w, rtol=0, atol=abs(extreme) / 5 + 1e-44)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    w = normal((64, 4), dtype=dtype)
    q = hki.QuantizedMatrix.quantize(w, "int8", 32)
    assert q.dtype == dtype and q.scale.dtype == jnp.float32
    assert np.abs(hki.materialize(q) - w).max() < 0.02
    same_as_dense(lambda w, x: x @ w, q, normal((K, 64), dtype=dtype), tolerance=0.05)


def test_quantize_under_transformations():
    w = normal((3, N, M))
    make = lambda w: hki.QuantizedMatrix.quantize(w, "int4", 4, zero_point=True)  # noqa: E731
    want = make(w)
    chex.assert_trees_all_close(jax.jit(make)(w), want, rtol=1e-6)
    chex.assert_trees_all_close(jax.vmap(make)(w), want, rtol=1e-6)
    struct = jax.eval_shape(make, w)
    assert struct.shape == want.shape and struct.dtype == want.dtype and struct.padding == 0
    boxed = hki.use_implicit_args(lambda w: hki.box(make(w)))(w)
    assert isinstance(boxed, hki.QuantizedMatrix)
    chex.assert_trees_all_close(boxed, want, rtol=1e-6)


@pytest.mark.parametrize(
    "options", few([{}, dict(moments=np.eye(N, dtype=np.float32)), dict(scale_dtype="double")], {})
)
@pytest.mark.slow
def test_quantize_what_a_traced_function_closes_over(options):
    """It is not a tracer, and is checked; results of it are traced."""
    w, x = normal((N, M)), normal((5, N))
    broken = w.at[0, 0].set(jnp.inf)
    make = lambda w: hki.QuantizedMatrix.quantize(w, "int4", 4, **options)  # noqa: E731
    want = x @ hki.materialize(make(w))
    for transform in (jax.jit, jax.vmap, jax.checkpoint, lambda f: jax.jit(jax.vmap(f))):
        got = transform(lambda x: x @ hki.materialize(make(w)))(x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="it has infinite or NaN elements"):
            transform(lambda x: x @ hki.materialize(make(broken)))(x)


@pytest.mark.parametrize("kind", few(KINDS, "int8", "int4 zero point", "nf4 groups"))
def test_requantize(kind):
    q = quantized(kind)
    again = q.requantize(hki.materialize(q))
    assert (again.format, again.group_size, again.padding) == (q.format, q.group_size, q.padding)
    np.testing.assert_allclose(hki.materialize(again), hki.materialize(q), atol=0.1)
    with pytest.raises(ValueError, match=r"w: expected shape \[12, 6\], got \[6, 12\]"):
        q.requantize(jnp.ones((M, N)))


W = np.ones((6, 4), np.float32)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda q: q(W, "int9"), ValueError, "dtype: expected one of int8, .* nvfp4, .*, got 'int9'"),
        (lambda q: q(W, None), ValueError, "dtype: expected one of"),
        (lambda q: q(W, "nf4", zero_point=True), ValueError, "int8, int7, int6, int5, int4, int3, int2, binary with a zero point"),
        (lambda q: q(W, "int8", 4), ValueError, r"group_size: .*\[1, 2, 3, 6\].*length 6, got 4"),
        (lambda q: q(W, "int4", 3), ValueError, r"group_size: .*\[2, 6\].* multiples of 2, got 3"),
        (lambda q: q(W, "int4", 0), ValueError, r"group_size"),
        (lambda q: q(W, "int8", axis=2), ValueError, "axis: expected -2 or -1 .*got 2"),
        (lambda q: q(W, "int8", axis=1.0), ValueError, "axis: expected -2 or -1 .*got 1.0"),
        (lambda q: q(W, "int8", axis=-3), ValueError, "axis: expected -2 or -1"),
        (lambda q: q(W[0], "int8"), ValueError, r"matrix \[..., n, m\].*got shape \[4\]"),
        (lambda q: q(W[:0], "int8"), ValueError, r"n, m > 0"),
        (lambda q: q(W.astype(int), "int8"), TypeError, "w: expected a floating dtype, got int"),
        (lambda q: q(W * np.nan, "int8"), ValueError, r"w float32\[6, 4\]: it has infinite or NaN"),
    ],
)  # fmt: skip
def test_errors_of_quantize(call, error, message):
    with pytest.raises(error, match=message):
        call(hki.QuantizedMatrix.quantize)


def test_a_stack_of_no_matrices():
    q = hki.QuantizedMatrix.quantize(np.ones((0, 6, 4), np.float32), "int4", 2)
    assert hki.materialize(q).shape == (0, 6, 4)
    assert hki.use_implicit_args(jnp.matmul)(jnp.ones((0, 3, 6)), q).shape == (0, 3, 4)


def test_an_empty_part_of_the_groups(may_be_dense):
    q = hki.QuantizedMatrix.quantize(np.ones((4, 8), np.float32), "int8", 2, axis=-1)
    parts = hki.use_implicit_args(lambda w: (w[:, :0], *jnp.split(w, [0, 4], axis=1)))(q)
    assert [part.shape for part in parts] == [(4, 0), (4, 0), (4, 4), (4, 4)]


BYTES, SCALE = np.zeros((4, 6), np.uint8), np.ones((4, 3), np.float32)


@pytest.mark.parametrize(
    "codes,scale,options,message",
    [
        (BYTES.astype(np.int8), SCALE, {}, r"codes in uint8; got codes int8\[4, 6\]"),
        (BYTES, SCALE, {"dtype": "int8"}, r"codes in int8"),
        (BYTES, SCALE.astype(int), {}, "scale and offset floating"),
        (BYTES, SCALE[:3], {}, r"scale \(and offset\) \[..., rows, groups\]; got .*\[3, 3\]"),
        (BYTES, SCALE[0], {}, r"\[..., rows, groups\]"),
        (BYTES[0], SCALE[0], {}, r"\[..., rows, groups\]"),
        (BYTES, np.ones((4, 4), np.float32), {}, "groups that divide the codes, packed"),
        (BYTES, SCALE, {"offset": SCALE[:, :1]}, r"offset float32\[4, 1\]"),
        (BYTES, SCALE, {"padding": 1}, "padding: expected less than 2 codes, and that only with one group"),
        (BYTES, SCALE, {"axis": 3}, "axis: expected -2 or -1"),
        (BYTES, SCALE, {"dtype": "int9"}, "dtype: expected one of"),
        (BYTES, SCALE, {"out_dtype": np.int32}, "dtype: expected a floating dtype, got int32"),
    ],
)  # fmt: skip
def test_errors_of_from_parts(codes, scale, options, message):
    with pytest.raises(ValueError, match=message):
        hki.QuantizedMatrix.from_parts(codes, scale, **options)


# --- products ------------------------------------------------------------------------------------


@pytest.fixture(params=["native", "blocks"])
def in_blocks(request, monkeypatch):
    """Products with the native kernel, and as for big weights without it, in blocks that overlap."""
    if request.param == "native":
        yield
        return
    monkeypatch.setenv("HAIKU_IMPLICIT_NATIVE", "0")
    monkeypatch.setattr(reference, "_BLOCK", 1)
    monkeypatch.setattr(reference, "_DENSE", 1 / 4)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.combinations
@kinds
@axes
def test_matmul(kind, axis):
    how = ("grad", "vmap", "scan") if axis == -2 else ("grad",)
    same_as_dense(lambda w, x: x @ w, quantized(kind, axis), normal((K, N)), how=how)


@pytest.mark.combinations
@few_kinds
@pytest.mark.slow
def test_matmul_in_blocks(kind, in_blocks):
    same_as_dense(lambda w, x: x @ w, quantized(kind), normal((K, N)))


PRODUCTS = [
    (([1], [0]), ([], []), (K, N)),
    (([1], [1]), ([], []), (K, M)),
    (([0], [1]), ([], []), (M, K)),
    (([], []), ([], []), (K,)),
    (([0, 1], [1, 0]), ([], []), (M, N)),
    (([0], [0]), ([], []), (N,)),
    (([1], [0]), ([0], [1]), (M, N, K)),
    (([0], [1]), ([1], [0]), (M, N, K)),
    (([], []), ([0, 1], [1, 0]), (M, N)),
]


@pytest.mark.every(3)
@pytest.mark.combinations
@axes
def test_dot_general(axis, in_blocks):
    def products(w, *xs):
        for (contract, batch, _), x in zip(PRODUCTS, xs, strict=True):
            yield jax.lax.dot_general(x, w, (contract, batch))
            yield jax.lax.dot_general(w, x, (contract[::-1], batch[::-1]))

    q = quantized("int4 zero point" if axis == -2 else "int8 groups", axis)
    xs = [normal(shape, seed) for seed, (*_, shape) in enumerate(PRODUCTS)]
    same_as_dense(lambda w, *xs: list(products(w, *xs)), q, *xs, how=("grad",))


SPECS = "bkn,bnm->bkm kn,bnm->bkm bkm,bnm->bkn k,bnm->kbnm knb,bnm->km kbm,bnm->nbk".split()


@pytest.mark.every(2)
@pytest.mark.combinations
@axes
def test_dot_of_batched(axis, in_blocks):
    sizes = dict(b=3, k=K, n=N, m=M)
    xs = [normal([sizes[i] for i in spec.split(",")[0]]) for spec in SPECS]

    def products(w, *xs):
        return [jnp.einsum(spec, x, w) for spec, x in zip(SPECS, xs, strict=True)]

    same_as_dense(products, quantized("int4 zero point", axis, (3, N, M)), *xs, how=("grad",))


@pytest.mark.every(4)
@pytest.mark.combinations
@few_kinds
def test_products_within_transformations(kind, in_blocks):
    q, x = quantized(kind), normal((K, N))
    inside(lambda w, x: (x @ w, w @ x[:, :M].T), q, x)

    def derivatives(w, x):
        forward = jax.jvp(lambda x: x @ w, (x,), (x,))[1]
        return forward, jax.grad(lambda x: jnp.sin(x @ w).sum())(x)

    # The gradients of scales are sums of codes up to 127, some of which cancel.
    same_as_dense(derivatives, q, x, how=("grad",), tolerance=1e-4)


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8", "nvfp4", "int4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_tree_whose_floating_leaves_were_cast(name, dtype, never_dense):
    """As mixed precision does: 8-bit floats among the codes and scales are floating, too."""
    q = hki.QuantizedMatrix.quantize(normal((64, 6)), name)
    cast = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, q
    )
    x = jnp.asarray(normal((3, 64)), dtype)
    got = jax.jit(hki.use_implicit_args(jnp.dot))(x, cast)
    want = np.float32(x) @ np.float32(hki.materialize(q))
    np.testing.assert_allclose(np.float32(got), want, atol=0.03 * np.abs(want).max())


# Operations that read the codes, each in its way.
READERS = {
    "product": lambda w, x: x @ w,
    "product with the rows": lambda w, x: w @ x.T[:6],
    "rows": lambda w, x: w[jnp.array([3, 0])],
    "columns": lambda w, x: w[:, jnp.array([5, 1])],
    "slice": lambda w, x: w[:, 1:4],
    "transposed": lambda w, x: w.T @ x.T,
    "sum": lambda w, x: w.sum(0),
    "scaled": lambda w, x: (w * 2.0).T,
    "in a loop": lambda w, x: jax.lax.fori_loop(0, 2, lambda i, x: (x @ w) @ w.T / 64, x),
}


@pytest.mark.every(3)
@pytest.mark.combinations
@pytest.mark.parametrize(
    "name", ["int8", "int5", "int4", "nf4", "fp8_e4m3", "uint4", "q2_k", "mxfp4"]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("reader", READERS)
def test_a_tree_whose_leaves_were_all_cast(name, dtype, reader, may_be_dense):
    """`jax.tree.map(lambda x: x.astype(dtype), params)` casts codes, too; they are exact in these."""
    q = hki.QuantizedMatrix.quantize(normal((256, 6)), name)
    x = jnp.asarray(normal((3, 256)), jnp.float32)
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), q)
    rounded = lambda leaf: leaf.astype(dtype).astype(leaf.dtype)  # noqa: E731
    want = jax.tree.map(rounded, q)  # scales are rounded, and codes stay
    got = hki.use_implicit_args(READERS[reader])(cast, x)
    want = hki.use_implicit_args(READERS[reader])(want, x)
    got, want = (np.float32(hki.materialize(y)) for y in (got, want))
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("name", ["int8", "int4", "nf4", "q4_k"])
def test_codes_that_were_averaged(name, may_be_dense):
    """`optax.incremental_update` of all parameters; 0.1 and 0.9 of a code may be a little less than it."""
    q = hki.QuantizedMatrix.quantize(normal((256, 6)), name)
    averaged = optax.incremental_update(q, q, 0.1)
    assert averaged.codes.dtype == jnp.float32
    np.testing.assert_allclose(hki.materialize(averaged), hki.materialize(q), atol=2e-3)


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bool_, jnp.complex64, jnp.int4])
def test_codes_that_were_cast_to_less(name, dtype, may_be_dense):
    q = hki.QuantizedMatrix.quantize(normal((64, 6)), name)
    cast = q._replace(codes=q.codes.astype(dtype))
    x = jnp.asarray(normal((3, 64)), jnp.float32)
    message = f"codes of '{name}' are u?int8, and cannot be read as .* Cast dense values instead: hki.use_i"
    for read in (READERS["product"], READERS["rows"], READERS["sum"]):
        with pytest.raises(TypeError, match=message):
            hki.use_implicit_args(read)(cast, x)
    with pytest.raises(TypeError, match=message):
        hki.materialize(cast)


def test_product_of_two_quantized():
    same_as_dense(lambda w, x: (w @ w.T) @ x, quantized(), normal((N, K)))


@pytest.mark.every(2)
def test_dtypes_of_products(in_blocks):
    q = quantized(shape=(64, 32))
    x = normal((K, 64), dtype=jnp.bfloat16)
    for options in ({}, {"preferred_element_type": jnp.float32}):
        f = hki.use_implicit_args(lambda w, x, options=options: jnp.matmul(x, w, **options))
        for w in (q, q._replace(dtype=jnp.bfloat16)):
            want = jnp.matmul(x, hki.materialize(w), **options)
            close(f(w, x), want, 0.03 if want.dtype == jnp.bfloat16 else 2e-5)
            wt = w._replace(axis=-1)  # contracts the rows: sums of blocks
            close(
                f(wt, x[:, :32]), jnp.matmul(x[:, :32], hki.materialize(wt), **options),
                0.03 if want.dtype == jnp.bfloat16 else 2e-5,
            )  # fmt: skip


@pytest.mark.combinations
@kinds
@pytest.mark.parametrize("axis", [-2, -1])
def test_no_dense_copy_of_a_big_weight(kind, axis):
    name, group, zero_point = KINDS[kind]
    # An odd number of rows, so that blocks leave something over.
    shape = (1536, 1031) if axis == -2 else (1031, 1536)
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    make = lambda w: hki.QuantizedMatrix.quantize(w, name, group, axis, zero_point)  # noqa: E731
    q = jax.eval_shape(make, struct)
    x = jax.ShapeDtypeStruct((4, shape[0]), jnp.float32)
    f = hki.use_implicit_args(lambda w, x: x @ w)
    grad = lambda w, x: jax.grad(lambda x: jnp.sin(f(w, x)).sum())(x)  # noqa: E731
    for function in (f, grad):
        memory = jax.jit(function).lower(q, x).compile().memory_analysis()
        assert memory.temp_size_in_bytes <= np.prod(shape) * 4 / 8


def test_nothing_dense_is_kept_for_the_backward_pass(in_blocks):
    q, x = quantized("int8", shape=(64, 48)), normal((4, 64))
    kernel = quantized("int8", shape=(3, 16, 16))

    def convolve(w, x):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    for f, w, y in [(lambda w, x: x @ w, q, x), (convolve, kernel, normal((1, 4, 16)))]:
        _, back = jax.vjp(hki.use_implicit_args(f), w, y)
        floats = [r for r in jax.tree.leaves(back) if jnp.issubdtype(r.dtype, np.floating)]
        assert max(r.size for r in floats) < w.size
        grads, _ = back(jnp.ones_like(f(hki.materialize(w), y)))
        assert grads.codes.dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    "kind,spatial,options",
    [
        ("int8", 1, {}),
        ("int4 groups", 1, {"window_strides": (2,), "padding": "VALID"}),
        pytest.param("int4 zero point", 2, {"rhs_dilation": (1, 2)}, marks=pytest.mark.slow),
        ("int8 groups", 2, {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}),
        ("nf4 groups", 2, {"feature_group_count": 2}),
        pytest.param("int8 zero point", 3, {}, marks=pytest.mark.slow),
    ],
)
def test_convolution(kind, spatial, options):
    groups = options.get("feature_group_count", 1)
    letters = "DHW"[3 - spatial :]
    options = {"window_strides": (1,) * spatial, "padding": "SAME", **options}
    numbers = ("N" + letters + "C", letters + "IO", "N" + letters + "C")

    def convolve(w, x):
        return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)

    q = quantized(kind, shape=(*(2,) * spatial, 6, 4))
    how = ("grad", "vmap", "scan") if spatial == 1 else ("grad",)
    same_as_dense(convolve, q, normal((1, *(3,) * spatial, 6 * groups)), how=how)


def test_transposed_convolution():
    q = quantized("int8", shape=(3, 3, 4, 6))
    f = lambda w, x: jax.lax.conv_transpose(x, w, (2, 2), "SAME")  # noqa: E731
    same_as_dense(f, q, normal((1, 4, 4, 4)), how=("grad",))
    # The window turned around, and its channels exchanged: what a gradient does to a kernel.
    turned = lambda w, x: jax.grad(lambda x: jnp.sin(f(w, x)).sum())(x)  # noqa: E731
    same_as_dense(turned, q, normal((1, 4, 4, 4)), how=())


# --- rows ----------------------------------------------------------------------------------------

IDS = np.array([[3, 0], [N - 1, 3]])


def rows_of(w, ids):
    return [
        w[ids],
        w[ids[0]],
        w[ids[0, 0]],
        w[2],
        w[3:9:2],
        jnp.take(w, ids + 5, axis=0),
        jnp.take(w, ids + 5, axis=0, fill_value=3.0),
        jnp.take(w, ids - 5, axis=0, mode="clip"),
        jnp.take(w, ids[0, 0], axis=0),
        jnp.take(w, ids[1, 0] + 5, axis=0),
        jnp.take(w, ids % M, axis=1),
        jax.lax.dynamic_slice_in_dim(w, ids[0, 0] + 8, 3, axis=0),
        jax.lax.dynamic_slice_in_dim(w, ids[0, 0] - 2 * N, 3, axis=0),  # clamped to the first ones
    ]


@pytest.mark.every(2)
@pytest.mark.combinations
@kinds
@axes
def test_rows(kind, axis):
    q = quantized(kind, axis)
    want = rows_of(hki.materialize(q), IDS)
    look_up = hki.use_implicit_args(rows_of)
    with hki.materialization("error"):
        out = jax.jit(look_up)(q, IDS)
    assert all(isinstance(x, jax.Array) for x in out)
    # The very same numbers, as a lookup computes what `materialize` does.
    chex.assert_trees_all_close(out, want, rtol=1e-6)


@pytest.mark.combinations
@axes
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8])
def test_more_rows_than_indices_count_to(axis, dtype):
    """A table of 300 rows that bytes are looked up in."""
    q, ids = quantized("int8", axis, (300, 6)), jnp.array([[3, 127], [44, 0]], dtype)
    f = lambda w, ids: (jnp.take(w, ids, axis=0), jnp.take(w, ids[1, 0], axis=0))  # noqa: E731
    with hki.materialization("error"):
        out = jax.jit(hki.use_implicit_args(f))(q, ids)
    close(out, f(hki.materialize(q), ids), 1e-6)


@pytest.mark.combinations
@few_kinds
@axes
@pytest.mark.slow
def test_rows_under_transformations(kind, axis):
    q, ids = quantized(kind, axis), jnp.asarray(IDS)
    fine = lambda w, ids: jnp.take(w, ids, axis=0)  # noqa: E731
    same_as_dense(fine, q, ids)
    inside(fine, q, ids)
    if axis == -1:  # batched, it is a gather of several rows each
        inside(lambda w, ids: jax.lax.dynamic_slice_in_dim(w, ids[0, 0], 2), q, ids)
    same_as_dense(lambda w, ids: w[ids, 1], q, ids, how=("grad",))


@axes
def test_only_rows_are_dequantized(axis):
    q = quantized("int4 zero point", axis, (600, 24))
    for f in (
        lambda w: w[IDS],
        lambda w: w[5],
        lambda w: w[5:7],
        lambda w: jnp.take(w, IDS, axis=0),
    ):
        jaxpr = jax.make_jaxpr(hki.use_implicit_args(f))(q)
        assert max(size for _, size in floats_in(jaxpr.jaxpr)) <= q.scale.size


def floats_in(jaxpr):
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            if jnp.issubdtype(v.aval.dtype, jnp.floating):
                yield eqn.primitive.name, v.aval.size
        for p in eqn.params.values():
            if hasattr(p, "jaxpr"):
                yield from floats_in(p.jaxpr)


# --- operations whose results are quantized ------------------------------------------------------------------------


def stays(f, q, tolerance=1e-6):
    """All of `f(q)` is quantized, with the values of `f(dense)`."""
    want = on_twins(f)(q)
    with hki.materialization("error"):
        out = jax.jit(hki.use_implicit_args(f))(q)
    leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, hki.ImplicitArray))
    assert all(isinstance(x, hki.QuantizedMatrix) for x in leaves)
    close(jax.jit(hki.materialize)(out), want, tolerance)
    return out


@pytest.mark.combinations
@kinds
@axes
def test_elementwise(kind, axis):
    dtype = jnp.float16 if kind == "int8 groups" else jnp.float32
    q = quantized(kind, axis, dtype=dtype)
    tolerance = 1e-6 if dtype == jnp.float32 else 3e-3
    by_row = normal((M,) if axis == -2 else (N, 1), dtype=dtype)
    third = jnp.asarray(1 / 3, dtype)
    f = lambda w: (w * 0.3, 0.3 * w, w / 3, -w, w * third, w * by_row, w / by_row)  # noqa: E731
    for out in stays(f, q, tolerance):
        assert (out.codes == q.codes).all()


def test_elementwise_that_is_dense(may_be_dense):
    q, x = quantized(), normal((N, M))
    f = lambda w: (w * x, w + x, 2 / w, w * (w + 0), w.astype(jnp.int32))  # noqa: E731
    out = jax.jit(hki.use_implicit_args(f))(q)
    assert all(isinstance(y, jax.Array) for y in out)
    close(out, jax.jit(f)(hki.materialize(q)))


@few_kinds
def test_cast(kind):
    q = quantized(kind)
    out, twice = stays(lambda w: (w.astype(jnp.bfloat16), w.astype(jnp.bfloat16) * 2), q, 0.01)
    chex.assert_trees_all_equal((out.codes, out.scale), (q.codes, q.scale))
    assert out.dtype == twice.dtype == jnp.bfloat16


@pytest.mark.every(3)
@pytest.mark.combinations
@few_kinds
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("through", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_cast_there_and_back_rounds(kind, axis, through, may_be_dense):
    """Also under jit, where XLA may leave out such a pair of casts; hence the eager dense twin."""
    q, x = quantized(kind, axis), normal((K, N))
    rounded = hki.materialize(q).astype(through).astype(jnp.float32)
    assert (rounded != hki.materialize(q)).any()

    def after(w):
        return w, w.T, -w, w[jnp.array([3, 1])], w[:, jnp.array([3, 1])], w[2], x @ w

    def f(w):
        return after(w.astype(through).astype(jnp.float32))

    for run in (hki.use_implicit_args(f), jax.jit(hki.use_implicit_args(f))):
        out = run(q)
        assert all(isinstance(w, hki.QuantizedMatrix) for w in out[:3])
        close(out, after(rounded))

    def product(w):
        return (x @ w.astype(through).astype(jnp.float32)).sum()

    got = jax.grad(lambda s: hki.use_implicit_args(product)(with_scales(q, s)))(scales_of(q))
    want = jax.grad(lambda s: product(hki.materialize(with_scales(q, s))))(scales_of(q))
    # Cotangents are rounded where the values were, once, and summed over a row.
    close(got, want, 0.15 if through == jnp.float8_e4m3fn else 0.02)


@pytest.mark.parametrize("again", [jnp.float16, jnp.bfloat16])
def test_rounded_twice(again, may_be_dense):
    """Operations after a cast there and back are exact, or dense."""
    q = quantized()

    def f(w):
        w = w.astype(jnp.bfloat16).astype(jnp.float32)
        return 0.3 * w, w / 3, w.astype(again), jnp.concatenate([w, w], axis=1)

    out = hki.use_implicit_args(f)(q)
    kept = [isinstance(w, hki.QuantizedMatrix) for w in out]
    assert kept == [False, False, again == jnp.bfloat16, True]
    close(out, f(hki.materialize(q)), 1e-7)


@pytest.mark.combinations
@pytest.mark.parametrize("kind", ["int8", "int8 groups", "int4 groups", "int4 zero point"])
@axes
def test_axes_of_the_matrix(kind, axis):
    one, q = quantized(kind, axis), quantized(kind, axis, (2, 3, N, M))
    rows = -3 - axis

    def rearranged(w):
        out = [w.T, *jnp.split(w, [2, 3], axis=rows), jnp.concatenate([w, -w, w], axis=rows)]
        out += [jnp.concatenate([w, 2 * w], axis=axis)]
        if kind == "int8" or one.num_groups > 1:  # between groups, or of a scale per channel
            at = one.group_size if one.num_groups > 1 else 1
            out += jnp.split(w, [at], axis=axis)
        if axis == -2:
            # Indexing is a gather here in older versions of JAX.
            out += [
                jax.lax.slice(w, (0, 1), (N, 5), (1, 2)),
                jax.lax.dynamic_slice_in_dim(w, 1, 3, axis=1),
            ]
        elif one.num_groups > 1:
            out += [w[:, one.group_size :]]
        return out

    out = stays(rearranged, one)
    assert (out[0].codes == one.codes).all()
    stays(lambda w: (jnp.transpose(w, (1, 0, 3, 2)), jnp.transpose(w, (1, 0, 2, 3))), q)
    if axis == -2:
        stays(lambda w: jax.lax.slice(w, (1, 0, 0, 2), (2, 3, N, 3)), q)


@pytest.mark.combinations
@axes
@pytest.mark.parametrize("name", ["int4", "nf4"])
def test_an_odd_length_is_padded(name, axis):
    q = hki.QuantizedMatrix.quantize(normal((3, 7, 5)), name, axis=axis)
    assert (
        q.padding == 1
        and q.shape == (3, 7, 5)
        and q.codes.shape[-1] == ((7 if axis == -2 else 5) + 1) // 2
    )
    same_as_dense(
        lambda w, x: jnp.einsum("bkn,bnm->bkm", x, w), q, normal((3, 2, 7)), how=("grad",)
    )
    ids = np.array([[4, 0], [6, 3]])
    f = lambda w: (w[0][ids], w[1, 2], w[0, 1:3], jnp.take(w[2], ids % 5, axis=1))  # noqa: E731
    with hki.materialization("error"):
        close(jax.jit(hki.use_implicit_args(f))(q), jax.jit(f)(hki.materialize(q)), 1e-6)
    rows = -3 - axis
    stays(
        lambda w: (w[::-1].mT, jnp.concatenate([w, w], axis=rows), *jnp.split(w, [2], axis=rows)), q
    )
    assert (
        shard_specs(q, P(*[None] * (3 + axis), "i"), AbstractMesh((5,), ("i",))) is NotImplemented
    )


@pytest.mark.slow
def test_axes_that_become_dense(may_be_dense):
    q = quantized("int4 groups", -1, (N, M))
    others = [
        quantized("int4 groups", -1, seed=1),
        quantized("int4 groups", -2),
        quantized("nf4 groups", -1),
    ]

    def f(w):
        return (
            w[:, 1:4],
            w[:, ::2],
            jnp.split(w, [1], axis=1)[1],
            w.reshape(N * M),
            w[::-1],
            w.reshape(2, N // 2, M),
            jax.lax.dynamic_slice_in_dim(w, jnp.int32(1), 3, axis=1),
        )

    close(hki.use_implicit_args(f)(q), f(hki.materialize(q)))
    for other in others:
        g = lambda a, b: jnp.concatenate([a, b], axis=0)  # noqa: E731
        close(hki.use_implicit_args(g)(q, other), g(hki.materialize(q), hki.materialize(other)))


@pytest.mark.combinations
@few_kinds
@axes
@pytest.mark.parametrize("offset_dims", [(0, 1), (0, 2), (1, 2)])
def test_matrices_gathered_into_any_axes(kind, axis, offset_dims, may_be_dense):
    """Of a stack; one is out of bounds. They stay quantized where their axes come last."""
    q, ids = quantized(kind, axis, (3, N, M)), jnp.array([[2], [0], [7]])
    numbers = jax.lax.GatherDimensionNumbers(offset_dims, (0,), (0,))
    f = lambda w, ids: jax.lax.gather(w, ids, numbers, (1, N, M), mode="fill")  # noqa: E731
    out = jax.jit(hki.use_implicit_args(f))(q, ids)
    assert isinstance(out, hki.QuantizedMatrix) == (offset_dims == (1, 2))
    close(out, f(hki.materialize(q), ids), 1e-6)


# --- shards --------------------------------------------------------------------------------------


@pytest.mark.combinations
@pytest.mark.parametrize("kind", ["int8", "int4 zero point", "int8 groups"])
@pytest.mark.parametrize("spec", [P("i"), P(None, "i"), P(None, None, "i"), P(), P("i", None, "j")])
@axes
def test_partition_spec(kind, axis, spec):
    mesh = AbstractMesh((2, 3), ("i", "j"))
    q = quantized(kind, axis, (2, N, M))
    specs = shard_specs(q, spec, mesh)
    if specs is NotImplemented:
        assert q.group_size > 6 and q.codes.dtype == np.uint8 or (M, N)[axis + 1] == M
        return

    def shard(at, x, spec):
        for axis, name in enumerate(spec):
            if name is not None:
                x = np.split(x, mesh.shape[name], axis=axis)[at[name]]
        return x

    whole, leaves = np.asarray(hki.materialize(q)), jax.tree.map(np.asarray, q)
    for i, j in ((0, 0), (1, 2)):
        at = dict(i=i, j=j)
        cut = functools.partial(shard, at)
        part = jax.tree.map(cut, leaves, specs, is_leaf=lambda x: isinstance(x, P))
        close(hki.materialize(jax.tree.map(jnp.asarray, part)), jnp.asarray(cut(whole, spec)), 1e-6)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    q, x = quantized("int4 zero point"), normal((K, N))
    for spec in (P("i", None), P(None, "i"), P(None, None)):
        reduced = spec[0] is not None

        def body(x, w, reduced=reduced):
            return jax.lax.psum(x @ w, "i") if reduced else x @ w

        specs = dict(in_specs=(P(None, spec[0]), spec), out_specs=P(None, spec[1]))
        f = jax.shard_map(body, mesh=mesh, **specs)
        with hki.materialization("error"):
            close(hki.use_implicit_args(f)(x, q), x @ hki.materialize(q))


@pytest.mark.parametrize("spec", [P(), P("i"), P(None, "i")])
def test_placement(spec):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, spec)
    device = jax.devices()[0]

    def f(w):
        constrained = jax.lax.with_sharding_constraint(w, sharding)
        return constrained, jax.device_put(w, sharding), *jax.device_put((w, w), device)

    for out in stays(f, quantized("int4 zero point")):
        assert out.format == "uint4"


def test_replacing_the_format_by_an_unknown_one():
    """`dataclasses.replace` hands on the inferred shape, which is computed by the format."""
    q = hki.QuantizedMatrix.quantize(jnp.ones((4, 2)), "int8")
    with pytest.raises(ValueError, match="dtype: expected one of int8, .*got 'int9'"):
        dataclasses.replace(q, format="int9")


REPEATED = {
    "loop": lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w * 0.5, w),
    "loop with rows": lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w * jnp.full((1, 8), 0.5), w),
    "branch": lambda w: jax.lax.cond(w.sum() > 0, lambda w: w, lambda w: -w, w),
}


@pytest.mark.combinations
@pytest.mark.parametrize("fun", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("scaled", [False, True])
def test_what_a_loop_or_a_branch_rescales_stays_quantized(fun, scaled, never_dense):
    w = hki.QuantizedMatrix.quantize(random_arrays.normal((16, 8)), "int4", 8)
    w = hki.ScaledMatrix(w, jnp.linspace(0.5, 1.0, 16)) if scaled else w
    run = hki.use_implicit_args(lambda w: fun(w))
    for out in (run(w), jax.jit(run)(w)):
        assert type(out) is type(w)
        np.testing.assert_allclose(hki.materialize(out), fun(hki.materialize(w)), rtol=1e-6)
