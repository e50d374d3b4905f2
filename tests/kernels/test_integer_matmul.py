"""Products of activations that are rounded to 8 bits: the kernel of integers, and XLA's formulation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantized.cpu import build

pytestmark = pytest.mark.of_each

FORMATS = ("int8", "uint8", "int4", "uint4", "fp4")

# Lengths and group sizes: several groups in a vector of codes, several vectors in a group, groups that
# fill a part of one, one group for all, with padding.
SHAPES = ((288, 32), (112, 16), (512, 256), (192, 96), (80, None), (37, None))

ROWS = (1, 2, 3, 8, 11)

product = hki.use_implicit_args(lambda w, x: x @ w)


def normal(shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantized(name, length=288, group=32, rows=37, dtype=jnp.float32, **options):
    w = jnp.asarray(normal((length, rows), 0), dtype)
    options = dict(activation="int8") | options
    # One program instead of one for each operation.
    return jax.jit(lambda w: hki.QuantizedMatrix.quantize(w, name, group, **options))(w)


def exact(w):
    """The values of codes and scales, not rounded to the weight's dtype."""
    return hki.materialize(w._replace(dtype=jnp.float32))


def rounded(x):
    """The nearest of 256 codes; half a step more than the largest one is the largest magnitude.

    No step is smaller than the root of the smallest normal number.
    """
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127.5)
    scale = np.maximum(scale, np.float32(2.0**-63))
    return np.clip(np.round(x * (1 / scale)), -128, 127).astype(np.float64) * scale


def rounded_parts(x, parts):
    """`rounded` for each of so many equal parts of a row."""
    return rounded(x.reshape(*x.shape[:-1], parts, -1)).reshape(x.shape)


def rounded_for(w, x):
    """The activations in products with a weight."""
    return rounded_parts(x, 1 if w.activation == "int8" or w.axis == -1 else w.scale.shape[-1])


def check(weights, rows=ROWS):
    """Products of each weight with so many rows of activations, in one program."""
    xs = [normal((max(rows), w.shape[0])) for w in weights]

    @jax.jit
    def run(weights, xs):
        out = [[product(w, x[:m]) for m in rows] for w, x in zip(weights, xs, strict=True)]
        return out, [exact(w) for w in weights]

    got, dense = run(weights, xs)
    for q, products, w, x in zip(weights, got, dense, xs, strict=True):
        want = rounded_for(q, x) @ np.asarray(w, np.float64)
        for m, y in zip(rows, products, strict=True):
            # Few sums are not exact: those of groups.
            np.testing.assert_allclose(y, want[:m], rtol=2e-6, atol=2e-6 * np.abs(want).max())


@pytest.fixture(params=["kernel", "no kernel"])
def path(request, monkeypatch):
    if request.param == "no kernel":
        monkeypatch.setenv("HAIKU_IMPLICIT_NATIVE", "0")
        jax.clear_caches()
    yield request.param
    if request.param == "no kernel":
        jax.clear_caches()


@pytest.mark.combinations
@pytest.mark.parametrize("activation", ["int8", "int8,groups"])
@pytest.mark.slow
def test_formats(activation, path):
    scales = "float32" if activation == "int8" else "float16"
    served = path == "kernel"
    cases = [(name, *shape) for name in FORMATS for shape in SHAPES][:: 1 if served else 4]
    options = dict(scale_dtype=scales, activation=activation)
    check([quantized(*case, **options) for case in cases], ROWS if served else (1, 11))


def test_the_kernel_of_integers_serves_them():
    x = jax.ShapeDtypeStruct((2, 288), jnp.bfloat16)
    for name in FORMATS:
        text = jax.jit(product).lower(quantized(name), x).as_text()
        assert (build.PREFIX + "IntegerMatmul" in text) == build.available()
    others = [
        quantized("nf4"),
        quantized("nf4", activation="int8,groups"),
        quantized("int4", axis=-1, group=37),
        quantized("int6"),
    ]
    for q in others:
        assert build.PREFIX + "IntegerMatmul" not in jax.jit(product).lower(q, x).as_text()
    check(others, rows=(1, 9))


def test_half_precision():
    """The products are of the codes and scales: they are not rounded to the weight's dtype."""
    q, x = quantized("int4", dtype=jnp.bfloat16), jnp.asarray(normal((3, 288)), jnp.bfloat16)
    got = product(q, x)
    assert got.dtype == jnp.bfloat16
    want = rounded(np.asarray(x, np.float32)) @ np.asarray(exact(q))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["int8", "uint4"])
@pytest.mark.slow
def test_transformations(name, path):
    of_groups = name == "int8"
    q = quantized(name, 64, 16, 24, activation="int8,groups" if of_groups else "int8")
    rounded = functools.partial(rounded_parts, parts=4 if of_groups else 1)
    stack = jax.tree.map(lambda y: jnp.stack([y, y[::-1]]), q)
    w, ws = hki.materialize(q), hki.materialize(stack)
    x, xs, moved = normal((5, 64)), normal((2, 5, 64), 2), normal((5, 64), 3)
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-4)
    close(jax.vmap(product, (None, 0))(q, xs), rounded(xs) @ w)
    close(jax.vmap(product)(stack, xs), rounded(xs) @ ws)
    close(jax.vmap(product, (0, None))(stack, x), rounded(x) @ ws)
    _, scanned = jax.lax.scan(lambda c, wx: (c, product(*wx)), 0, (stack, xs))
    close(scanned, rounded(xs) @ ws)

    # By the activations rounding is passed straight through; by the scales it is a constant.
    def loss(w, x):
        return jnp.sin(product(w, x) / 8).sum()

    slope = np.cos(rounded(x) @ w / 8) / 8
    close(jax.grad(loss, 1)(q, x), slope @ w.T)
    close(
        jax.jit(jax.vmap(jax.grad(loss, 1), (None, 0)))(q, xs),
        np.cos(rounded(xs) @ w / 8) / 8 @ w.T,
    )
    close(jax.jvp(lambda x: product(q, x), (x,), (moved,)), (rounded(x) @ w, moved @ w))

    def of_scales(scales):
        return q._replace(scale=scales[0], offset=scales[1])

    scales = (q.scale, q.offset)
    by_w = rounded(x).T @ slope
    want = jax.vjp(lambda s: hki.materialize(of_scales(s)), scales)[1](
        jnp.asarray(by_w, jnp.float32)
    )
    close(jax.grad(lambda s: loss(of_scales(s), x))(scales), want[0])
    remat = jax.grad(lambda x: jax.checkpoint(lambda x: loss(q, x))(x))(x)
    close(remat, slope @ w.T)


@pytest.mark.combinations
@pytest.mark.parametrize("activation", ["int8", "int8,groups"])
@pytest.mark.parametrize("name", ["uint4", "int8"])
def test_all_magnitudes(name, activation, path):
    """Rows of every power of two in float32, from subnormal numbers on."""
    q = quantized(name, 64, 16, 24, activation=activation)
    exponents = np.arange(-149, 121)[:, None]
    x = np.ldexp(normal((len(exponents), 64)).astype(np.float64), exponents).astype(np.float32)
    want = rounded_for(q, x) @ np.asarray(exact(q), np.float64)
    few_rows = jax.jit(jax.lax.map, static_argnums=0)(
        lambda x: product(q, x), x.reshape(-1, 10, 64)
    )
    for got in (few_rows.reshape(want.shape), product(q, x)):
        off = np.abs(np.asarray(got, np.float64) - want).max(-1)
        np.testing.assert_array_less(off, 1e-5 * np.abs(want).max(-1) + 1e-42)


def test_extremes(path):
    """Zeros, subnormal and huge rows are exact; a value that is not finite makes only its own row NaN."""
    q = quantized("uint4", 64, 32, 24)
    x = normal((6, 64))
    x[0], x[1], x[2] = 0, x[1] * 1e-30, x[2] * 1e30
    x[3, 5], x[4, 5] = np.nan, np.inf
    for rows in (x, x[3:5]):
        got = np.asarray(product(q, rows), np.float64)
        finite = np.isfinite(rows).all(-1)
        want = rounded(rows[finite]) @ np.asarray(hki.materialize(q), np.float64)
        size = np.abs(want).max(-1, keepdims=True, initial=0)
        assert (np.abs(got[finite] - want) <= 1e-5 * size).all()
        assert np.isnan(got[~finite]).all()
    broken = q._replace(scale=q.scale.at[3, 1].set(jnp.inf))  # of one channel
    got = np.asarray(product(broken, x[5:]))
    assert not np.isfinite(got[:, 3]).any() and np.isfinite(np.delete(got, 3, 1)).all()


@pytest.mark.parametrize("rows", [1, 40])
def test_memory(rows, path):
    """No dense weight, and no unpacked codes of all of it."""
    q = jax.eval_shape(lambda: quantized("uint4", 1024, 32, 1027))
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    memory = jax.jit(product).lower(q, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= q.size * 4 / 8
