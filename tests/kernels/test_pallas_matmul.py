"""The GPU kernel against NumPy in float64: on a GPU, or in JAX's interpreter; and lowered for GPUs."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantized.cpu import native
from haiku_implicit.quantized.gpu import pallas, tiles
from haiku_implicit.quantized.numbers import formats
from tests import random_arrays
from tests.cuda import lowered_for_cuda
from tests.tiers import few

pytestmark = pytest.mark.of_each

FORMATS = sorted(name for name, fmt in formats.FORMATS.items() if len(fmt.planes) == 1)

product = hki.use_implicit_args(lambda w, x: x @ w)


def normal(shape, seed=1, dtype=jnp.float32):
    return random_arrays.normal(shape, seed, dtype)


def quantized(name, length=96, group=32, axis=-2, rows=37, seed=0, dtype=jnp.float32):
    """A weight of random bytes, none of which is an infinity or a NaN; with padding where needed."""
    fmt, random = formats.find(name), np.random.default_rng(seed)
    padding = -length % fmt.multiple if group is None else 0
    groups = 1 if group is None else length // group
    codes = random.integers(0, 256, (rows, fmt.stored(length + padding)), np.uint8)
    codes = (codes & 0xBB if fmt.is_float else codes).view(fmt.dtype)
    scale, offset = random.uniform(0.01, 0.1, (2, rows, groups)).astype(dtype)
    offset = offset if fmt.offset else None
    parts = codes, scale, offset
    return hki.QuantizedMatrix.from_parts(*parts, dtype=name, axis=axis, padding=padding)


@pytest.fixture
def kernel(monkeypatch):
    """Products have the GPU kernel; without a GPU, JAX interprets it on the CPU."""
    monkeypatch.setattr(pallas, "available", lambda: True)
    if not pallas.supported():
        interpreted = functools.partial(pallas.pallas_matmul, interpret=True)
        monkeypatch.setattr(native, "native_matmul", interpreted)
        monkeypatch.setattr(native, "applies", pallas.applies)
    with jax.default_matmul_precision("highest"):
        yield


def check(cases, dtype=jnp.float32, **tolerance):
    """Products of weights with so many rows of activations, in one program."""
    xs = [normal((m, w.shape[0]), dtype=dtype) for w, m in cases]

    @jax.jit
    def run(weights, xs):
        out = [product(w, x) for w, x in zip(weights, xs, strict=True)]
        return out, [hki.materialize(w) for w in weights]

    got, dense = run([w for w, _ in cases], xs)
    for w, x, y in zip(dense, xs, got, strict=True):
        w, x, y = (np.asarray(a, np.float64) for a in (w, x, y))
        # Sums of n products in float32, in any order.
        scale = np.abs(x).max() * np.abs(w).max() * np.sqrt(w.shape[0])
        np.testing.assert_allclose(y, x @ w, **dict(rtol=1e-6, atol=1e-6 * scale) | tolerance)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(FORMATS, "int2", "uint4", "fp8_e4m3"))
@pytest.mark.slow
def test_formats(name, kernel):
    """Groups of bytes that are not a power of two; a scale per channel, with padding."""
    per_channel = quantized(name, 37, None, rows=20)
    check([(quantized(name, 48, 24), 1), (per_channel, 3), (quantized(name, 48, 24, -1), 3)])


# What tiles and their masks depend on: rows of activations, length, group, rows of the matrix.
SHAPES = {
    "tiles that fit": (16, 256, 32, 64),
    "one row": (1, 256, 32, 64),
    "two rows, several steps": (2, 4096 + 48, 16, 5),
    "groups of a tile": (5, 512, 256, 64),
    "small groups": (3, 80, 8, 7),
    "many rows": (120, 96, 32, 130),
    "a split sum": (9, 1024, 64, 300),
    "a split sum, with less in the last part": (4, 1200, 48, 450),
}


@pytest.mark.every(2)
@pytest.mark.combinations
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, axis, kernel):
    m, length, group, rows = SHAPES[shape]
    w = quantized("uint4", length, group, axis, rows)
    splits = tiles.plan_of(m, 1, w, np.dtype("f4"), None).tile.splits
    assert splits > 1 or "split" not in shape
    check([(w, m)])


@pytest.mark.parametrize("dtype", few([jnp.bfloat16, jnp.float16], jnp.bfloat16))
def test_half_precision(dtype, kernel):
    """Values are rounded to the weight's dtype, as those of the dense weight are; so are results."""
    weights = [quantized("nf4", dtype=dtype), quantized("int8", axis=-1, dtype=dtype)]
    # Results are rounded: to 8 bits in bfloat16, to 11 in float16.
    half_step = float(jnp.finfo(dtype).eps) / 2
    check([(weights[0], 1), (weights[0], 5), (weights[1], 5)], dtype, rtol=1.1 * half_step)
    check([(weights[0], 3)])  # float32 activations


def test_stored_scales(kernel):
    weights = [hki.QuantizedMatrix.quantize(normal((64, 9)), name) for name in ("mxfp4", "nvfp4")]
    check([(w, 3) for w in weights])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("rows", [1, 9])
def test_all_codes_of_8_bit_floats(name, rows, kernel):
    codes = np.arange(256, dtype=np.uint8).view(formats.find(name).dtype)
    codes = np.repeat(codes[:, None], 16, axis=1)
    q = hki.QuantizedMatrix.from_parts(codes, np.full((256, 1), 0.5, np.float32), dtype=name)
    want = np.asarray(hki.materialize(q))[:1]
    x = np.zeros((rows, 16), np.float32)
    x[:, 0] = 1
    got = jax.jit(lambda q, x: product(q, x))(q, x)
    # The other terms are 0, or 0 * inf and 0 * NaN.
    expected = np.where(np.isinf(want), np.nan, want)
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


# --- transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("axis", few([-2, -1], -2))
@pytest.mark.slow
def test_transformations(axis, kernel):
    q = quantized("uint4", 32, 16, axis, rows=24)
    stack = jax.tree.map(
        lambda *y: jnp.stack(y), *(quantized("uint4", 32, 16, axis, 24, s) for s in range(3))
    )
    x, xs = normal((5, q.shape[0])), normal((3, 5, q.shape[0]))

    def everything(of):
        f = of(lambda w, x: x @ w)
        by_x = jax.grad(lambda w, x: jnp.sin(f(w, x) / 8).sum(), argnums=1)
        return dict(
            vmap=(jax.vmap(f, (None, 0))(q, xs), jax.vmap(f, (0, None))(stack, x)),
            grad=by_x(q, x),
            vmap_grad=jax.vmap(by_x)(stack, xs),
            jvp=jax.jvp(lambda x: f(q, x), (x,), (x[::-1],)),
            scan=jax.lax.scan(lambda c, wx: (c, f(*wx)), 0, (stack, xs))[1],
        )

    got = jax.jit(lambda: everything(hki.use_implicit_args))()
    want = everything(lambda f: lambda w, *args: f(hki.materialize(w), *args))
    # Sums of 24 or 32 products of numbers up to about 30 (codes times activations), in another order.
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=2e-4)


# --- which path ----------------------------------------------------------------------------------


def lowered(f, *args):
    """The program for a GPU."""
    return lowered_for_cuda(lambda: jax.jit(lambda *args: f(*args)).trace(*args))


TARGET = "__gpu$xla.gpu.triton"


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("capability", [8.0, 9.0])
def test_lowered_for_gpus(axis, capability, monkeypatch):
    """Triton's dialect takes every kernel; nothing of a dense weight's shape is in the program."""
    monkeypatch.setattr(pallas, "available", lambda: True)
    monkeypatch.setattr(pallas, "capability", lambda: capability)
    cases = [
        *((quantized(name, 96, 32, axis), m) for name in FORMATS for m in (1, 3)),
        *((quantized(name, 96, 32, axis, dtype=jnp.bfloat16), 3) for name in FORMATS[::2]),
        (quantized("int8", 37, None, axis), 120),
        (quantized("int4", 1200, 48, axis, 450), 4),
    ]
    args = [(w, jnp.zeros((m, w.shape[0]), w.dtype)) for w, m in cases]
    text = lowered(lambda args: [product(w, x) for w, x in args], args)
    assert text.count(TARGET) == len({(w.format, w.dtype, w.shape, m) for w, m in cases})
    for w, _ in cases:
        for shape in (w.shape, w.shape[::-1]):
            for name in ("f32", "bf16"):
                assert "x".join(map(str, (*shape, name))) not in text


def test_one_program_for_all_platforms(monkeypatch):
    """The kernel is for this process's GPU, and not for exported programs."""
    q, x = quantized("int4"), normal((2, 96))
    monkeypatch.setattr(pallas, "supported", lambda: True)
    monkeypatch.delenv("HAIKU_IMPLICIT_PALLAS", raising=False)
    assert TARGET in lowered(product, q, x)
    exported = jax.export.export(jax.jit(product), platforms=("cpu", "cuda"))(q, x)
    assert TARGET not in exported.mlir_module()
    monkeypatch.setenv("HAIKU_IMPLICIT_PALLAS", "0")
    assert TARGET not in lowered(product, q, x)


def test_what_the_kernel_does_not_serve(x64, monkeypatch):
    monkeypatch.setattr(pallas, "available", lambda: True)
    q, x = quantized("int4"), normal((2, 96))
    cases = [
        (quantized("int3"), x, {}),
        (q, x.astype(jnp.float64), {}),
        (quantized("int4", dtype=np.float64), x, {}),
        (q, x, dict(precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)),
        (q._replace(rounded_to=np.dtype(jnp.bfloat16)), x, {}),
        (q, normal((0, 96)), {}),
        (q, normal((129, 96)), {}),
    ]
    assert TARGET in lowered(product, q, x)
    for w, x, options in cases:
        f = hki.use_implicit_args(lambda w, x, o=options: jnp.matmul(x, w, **o))
        assert TARGET not in lowered(f, w, x)


def test_precision():
    """As for XLA's products: float32 in full only where more than the default is asked for."""
    q, lax = quantized("int4"), jax.lax.Precision
    for given in (None, lax.DEFAULT, (lax.DEFAULT, lax.DEFAULT)):
        assert tiles.plan_of(3, 1, q, np.dtype("f4"), given).precision == lax.DEFAULT
    for given in (lax.HIGH, lax.HIGHEST, (lax.DEFAULT, lax.HIGHEST)):
        assert tiles.plan_of(3, 1, q, np.dtype("f4"), given).precision == lax.HIGHEST


@pytest.mark.parametrize("axis", [-2, -1])
def test_tiles(axis):
    """Tiles have sizes that Triton takes; a matrix product has sides of at least 16."""
    for name in FORMATS:
        for length, group in ((48, 24), (4096, 128), (4096, None), (40, 8), (16, None)):
            q = jax.eval_shape(functools.partial(quantized, name, length, group, axis, 100))
            for m in (1, 2, 3, 17, 64, 65, 1000):
                for dtype in (jnp.float32, jnp.bfloat16):
                    plan = tiles.plan_of(m, 1, q, np.dtype(dtype), None)
                    *sizes, splits, _, _ = plan.tile
                    assert all(n & (n - 1) == 0 for n in (*sizes, splits))
                    if not plan.one_row:
                        assert min(sizes[0], sizes[1], sizes[2] * sizes[3]) >= 16
