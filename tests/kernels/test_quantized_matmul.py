"""The native kernel and XLA's formulation, both against NumPy in float64."""

import functools
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantized.cpu import build
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.operands import rounded_rows
from haiku_implicit.quantized.products import reference
from tests import random_arrays
from tests.devices import run_on_devices
from tests.native_targets import TARGETS, with_compiler
from tests.tiers import few

pytestmark = pytest.mark.of_each

FORMATS = sorted(formats.FORMATS)

# Rows of activations: those that are decoded for in registers, one more, and some left over.
ROWS = (1, 2, 3, 8, 9, 40)

# Length and group size: groups that fill vectors, that do not, a scale per channel, one with padding.
LENGTHS = ((96, 32), (48, 8), (1312, None), (37, None))


def normal(shape, seed=1, dtype=jnp.float32):
    return random_arrays.normal(shape, seed, dtype)


@functools.partial(jax.jit, static_argnames=("name", "length", "group", "axis", "rows", "seed"))
def quantized(name, length=96, group=32, axis=-2, rows=37, seed=0):
    shape = (length, rows) if axis == -2 else (rows, length)
    return hki.QuantizedMatrix.quantize(normal(shape, seed), name, group, axis)


@pytest.fixture
def without_kernel(monkeypatch):
    """XLA's formulation, in blocks."""
    monkeypatch.setenv("HAIKU_IMPLICIT_NATIVE", "0")
    monkeypatch.setattr(reference, "_BLOCK", 512)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(params=["kernel", "no kernel"])
def path(request):
    if request.param == "no kernel":
        request.getfixturevalue("without_kernel")
    return request.param


product = hki.use_implicit_args(lambda w, x: x @ w)


def check(weights, rows=ROWS, dtype=jnp.float32):
    """Products of each weight with so many rows, in one program."""
    xs = [normal((max(rows), w.shape[0]), dtype=dtype) for w in weights]

    @jax.jit
    def run(weights, xs):
        out = [[product(w, x[:m]) for m in rows] for w, x in zip(weights, xs, strict=True)]
        return out, [hki.materialize(w) for w in weights]

    got, dense = run(weights, xs)
    for products, w, x in zip(got, dense, xs, strict=True):
        w, x = (np.asarray(y, np.float64) for y in (w, x))
        for m, y in zip(rows, products, strict=True):
            # Sums of n products in float32, in any order.
            scale = np.abs(x[:m]).max() * np.abs(w).max() * np.sqrt(w.shape[0])
            np.testing.assert_allclose(y, x[:m] @ w, rtol=1e-6, atol=1e-6 * scale)


def of_all_shapes(name, axis):
    step = formats.find(name).multiple
    return [quantized(name, n - n % step if g else n, g, axis) for n, g in LENGTHS]


@pytest.mark.every(6)
@pytest.mark.combinations
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, axis):
    assert build.available()
    check(of_all_shapes(name, axis))


@pytest.mark.parametrize("axis", few([-2, -1], -2))
@pytest.mark.slow
def test_formats_without_kernel(axis, without_kernel):
    assert not build.available()
    check([quantized(name, axis=axis) for name in FORMATS], rows=(1, 9))


@pytest.mark.slow
@pytest.mark.all_slow
@with_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_other_targets(target, monkeypatch):
    build.register(f"{build.PREFIX}{target}_", TARGETS[target])
    monkeypatch.setattr(build, "PREFIX", f"{build.PREFIX}{target}_")
    jax.clear_caches()
    for axis in (-2, -1):
        kinds = ("binary", "int2", "int3", "int6", "int8", "uint4", "uint8", "fp8_e4m3", "fp8_e5m2")
        check([w for name in kinds for w in of_all_shapes(name, axis)[::2]], rows=(1, 4, 9))
    x = normal((9, 96))
    for q in (quantized(name).with_activation("int8,groups") for name in ("int8", "uint4", "fp4")):
        want = rounded_rows(x, q) @ hki.materialize(q)
        np.testing.assert_allclose(product(q, x), want, rtol=1e-5, atol=1e-4)
    jax.clear_caches()


@pytest.mark.parametrize("name", ["int4", "uint4", "fp4", "nf4", "int2", "uint2", "int3"])
def test_one_row_of_any_magnitude(name):
    """It is multiplied as integers, unless it is very small or large."""
    w = quantized(name)
    x, dense = np.asarray(normal((1, 96)), np.float64), np.asarray(hki.materialize(w), np.float64)
    x[:, :32] *= 1e-4  # a group of its own
    scale, run = np.abs(x).max() * np.abs(dense).max() * np.sqrt(96), jax.jit(product)
    for factor in (1e-30, 1e-12, 1.0, 1e20, 1e30):
        got = np.asarray(run(w, (x * factor).astype(np.float32)), np.float64) / factor
        np.testing.assert_allclose(got, x @ dense, rtol=1e-6, atol=1e-6 * scale)
    small = run(w, np.where(np.arange(96) < 32, x, 0).astype(np.float32))
    np.testing.assert_allclose(small, x[:, :32] @ dense[:32], rtol=1e-6, atol=1e-10 * scale)
    ones = np.asarray(run(w, np.eye(96, dtype=np.float32)[40:41]))
    # (With AVX2, values of nf4 become integers of 23 bits: the largest is 2^22.)
    table = 2.0**-23 * np.abs(dense[32:64]).max() if name == "nf4" else 0
    np.testing.assert_allclose(ones[0], dense[40], rtol=1e-6, atol=table)
    for bad in (np.inf, np.nan):
        assert not np.isfinite(run(w, np.full((1, 96), bad, np.float32))).any()
    for of_w, of_x in ((1e-18, 1e-12), (1e10, 1e23)):  # (float32 has numbers from 1e-38 to 3e38)
        offset = None if w.offset is None else w.offset * np.float32(of_w)
        scaled = w._replace(scale=w.scale * np.float32(of_w), offset=offset)
        got = run(scaled, (x * of_x).astype(np.float32))
        got = np.asarray(got, np.float64) / of_w / of_x
        np.testing.assert_allclose(got, x @ dense, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("name", few(["int4", "uint4", "fp4", "int2", "uint2"], "uint4", "int2"))
def test_one_row_times_large_groups(name):
    """Activations beside each vector of codes have a scale of their own."""
    check([quantized(name, *shape) for shape in ((512, 128), (1024, 512), (600, None))], rows=(1,))
    w = quantized(name, 1024, 512)
    x, dense = np.asarray(normal((1, 1024)), np.float64), np.asarray(hki.materialize(w), np.float64)
    x *= np.where(np.arange(1024) // 64 % 3, 1, 1e-3)
    got = np.asarray(jax.jit(product)(w, x.astype(np.float32)), np.float64)
    np.testing.assert_allclose(got, x @ dense, rtol=1e-6, atol=1e-6 * np.abs(dense).max() * 32)
    one = jax.jit(product)(w, np.eye(1024, dtype=np.float32)[700:701])
    np.testing.assert_allclose(one[0], dense[700], rtol=1e-6)
    # Sums of equal activations, which offsets multiply, lose no digits.
    got = np.asarray(jax.jit(product)(w, np.full((1, 1024), 0.1, np.float32)), np.float64)
    scale = 0.1 * np.abs(dense).sum(0).max()
    np.testing.assert_allclose(got[0], float(np.float32(0.1)) * dense.sum(0), atol=1e-6 * scale)


@pytest.mark.parametrize("axis", [-2, -1])
def test_one_row_times_three_bits(axis):
    """Vectors have several groups, one, or (as floats) a part of one; some groups are left over."""
    shapes = [
        (96, 32),
        (192, 64),
        (320, 64),
        (384, 128),
        (768, 256),
        (1024, 512),
        (512, None),
        (48, 16),
    ]
    check([quantized("int3", *shape, axis=axis) for shape in shapes], rows=(1,))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**127])
def test_all_codes_of_8_bit_floats(name, scale):
    dtype = formats.find(name).dtype
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    q = hki.QuantizedMatrix.from_parts(codes[:, None], jnp.full((256, 1), scale), dtype=name)
    q = q._replace(codes=jnp.repeat(q.codes, 16, axis=1))
    want = np.asarray(hki.materialize(q))[:1]
    for rows in (1, 9):
        x = jnp.zeros((rows, 16)).at[:, 0].set(1)
        got = np.asarray(product(q, x))
        # The other terms are 0, or 0 * NaN. Where values are infinite they are 0 * inf, unless sums are
        # scaled, which only then become infinite.
        finite = ~np.isinf(want)[0]
        np.testing.assert_array_equal(
            got[:, finite], np.broadcast_to(want[:, finite], got[:, finite].shape)
        )
        assert not np.isfinite(got[:, ~finite]).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", few([jnp.bfloat16, jnp.float16], jnp.bfloat16))
def test_half_precision_weights(dtype):
    """The values are rounded to the weight's dtype, as those of the dense weight are."""
    weights = [
        hki.QuantizedMatrix.quantize(normal((96, 96), 0, dtype) * size, name, 32, axis)
        for name in ("int8", "int6", "nf4", "uint4", "fp8_e5m2")
        for axis in (-2, -1)
        for size in jnp.asarray([1.0, 1e-5], dtype)  # the smaller ones are subnormal in float16
    ]
    check(weights, rows=(1, 9))


# --- transformations -----------------------------------------------------------------------------


def dense_twin(f):
    return lambda w, *args: f(hki.materialize(w), *args)


@pytest.mark.every(4)
@pytest.mark.combinations
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("name", ["uint4", "int8", "nf4"])
def test_transformations(name, axis, path):
    q = quantized(name, 32, 16, axis, rows=48)
    stack = jax.tree.map(
        lambda *y: jnp.stack(y), *(quantized(name, 32, 16, axis, 48, s) for s in range(3))
    )
    x, xs = normal((5, q.shape[0])), normal((3, 5, q.shape[0]))

    def loss(w, x):
        return jnp.sin((x @ w) / 8).sum()

    def of_scales(f, scales, q, x):
        return f(q._replace(scale=scales[0], offset=scales[1]), x)

    def everything(of):
        f, g = of(lambda w, x: x @ w), of(loss)
        scales = (q.scale, q.offset)
        by_scales = lambda scales: of_scales(g, scales, q, x)  # noqa: E731
        by_x = jax.grad(g, argnums=1)
        moved = jax.tree.map(jnp.cos, scales)
        return dict(
            vmap=(
                jax.vmap(f, (None, 0))(q, xs),
                jax.vmap(f, (0, None))(stack, x),
                jax.vmap(f)(stack, xs),
            ),
            vmap_last=jax.vmap(f, (None, -1), -1)(q, jnp.moveaxis(xs, 0, -1)),
            scan=jax.lax.scan(lambda c, wx: (c, f(*wx)), 0, (stack, xs))[1],
            grad=(by_x(q, x), jax.grad(by_scales)(scales)),
            grad_vmap=jax.vmap(by_x)(stack, xs),
            vmap_grad_scales=jax.vmap(
                lambda w, x: jax.grad(lambda s: of_scales(g, s, w, x))((w.scale, w.offset))
            )(stack, xs),
            jvp=(
                jax.jvp(lambda x: f(q, x), (x,), (x[::-1],)),
                jax.jvp(by_scales, (scales,), (moved,)),
            ),
            hessian=jax.jvp(lambda x: by_x(q, x), (x,), (jnp.cos(x),)),
            of_scales_by_x=jax.grad(
                lambda x: sum(
                    jnp.sin(y / 64).sum()
                    for y in jax.tree.leaves(jax.grad(lambda s: of_scales(g, s, q, x))(scales))
                )
            )(x),
            remat=jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(f(q, x)).sum())(x))(x),
        )

    got = jax.jit(lambda: everything(hki.use_implicit_args))()
    want = jax.jit(lambda: everything(dense_twin))()
    # Sums of 32 to 48 products of numbers up to about 30 (codes times activations), in another order.
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=2e-4)


def test_activations_alone_are_more_rows():
    """A batch of activations makes one product, not one for each."""
    q = quantized("int4")
    batched = jax.make_jaxpr(jax.vmap(product, (None, 0)))(q, normal((6, 2, 96)))
    text = str(batched)
    assert text.count("quantized_matmul[") == 1 and "f32[6,2,37]" in text


def test_floating_codes_can_be_differentiated():
    q = quantized("fp8_e5m2")._replace(scale=jnp.ones((37, 3)))
    x = normal((2, 96))

    def loss(of, codes):
        return of(q._replace(codes=codes.astype(q.codes.dtype)), x).sum()

    codes = q.codes.astype(jnp.float32)
    got = jax.grad(lambda c: loss(product, c))(codes)
    want = jax.grad(lambda c: loss(dense_twin(lambda w, x: x @ w), c))(codes)
    np.testing.assert_allclose(got, want, rtol=0.3, atol=0.3)  # gradients of 2 bits of mantissa


def test_donation_and_stacked_axes():
    q = quantized("int4")
    x = normal((96, 96))
    want = x @ hki.materialize(q)
    step = jax.jit(lambda x, w: (product(w, x), x * 2), donate_argnums=0)
    np.testing.assert_allclose(step(x + 0, q)[0], want, rtol=1e-5, atol=1e-4)

    stack = jax.tree.map(lambda *y: jnp.stack(y), q, q._replace(scale=-q.scale))
    w = hki.materialize(stack)
    for spec in (
        "bmk,bkn->bmn",
        "mk,bkn->bmn",
        "mk,bkn->mbn",
        "bkm,bkn->nmb",
        "mbn,bkn->kmb",
        "kc,bkn->bnc",
    ):
        shapes = dict(b=2, m=3, k=96, n=37, c=4)
        x = normal([shapes[i] for i in spec.split(",")[0]])
        got = hki.use_implicit_args(lambda w, x, spec=spec: jnp.einsum(spec, x, w))(stack, x)
        np.testing.assert_allclose(got, jnp.einsum(spec, x, w), rtol=1e-5, atol=1e-4)


CACHES = dict(
    int8=("int8", None, False),
    int4=("int4", None, False),
    uint4=("uint4", 32, False),
    int8_groups=("int8", 16, False),
    fp8=("fp8_e4m3", None, False),
    int3=("int3", None, False),
    rounded_int8=("int8", None, True),
)


def attention(cache, q):
    """The two products of attention with keys or values `[batch, time, heads, depth]`."""
    scores = jnp.einsum("bqhd,bthd->bhqt", q, cache)
    return scores, jnp.einsum("bhqt,bthd->bqhd", scores, cache)


@pytest.mark.combinations
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.slow
def test_matrices_are_read_where_they_are(name, path):
    """Positions of one head are apart in a cache; its codes are not copied to be next to each other."""
    kind, group, rounds = CACHES[name]
    make = functools.partial(hki.QuantizedCache.quantize, dtype=kind, group_size=group, axis=-1)
    cache = jax.jit(make)(normal((2, 70, 3, 96))).with_activation("int8" if rounds else None)
    dense = jax.jit(hki.materialize)(cache)
    for rows in (1, 3, 9, 40):
        q = normal((2, rows, 3, 96))
        f = jax.jit(hki.use_implicit_args(attention))
        scores, out = f(cache, q)
        of_q = q if not rounds else rounded_rows(q, cache)
        want = jnp.einsum("bqhd,bthd->bhqt", of_q, dense)
        np.testing.assert_allclose(scores, want, rtol=1e-5, atol=1e-4)
        of_scores = scores if not rounds else rounded_rows(scores, cache)
        want = jnp.einsum("bhqt,bthd->bqhd", of_scores, dense)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-3)
        if path == "kernel":
            program = f.lower(cache, q).compile().as_text()
            assert not re.findall(r"= [su]8\[[^=]* (?:copy|transpose|fusion)\(", program)
    run = hki.use_implicit_args(attention)
    caches = cache, jax.tree.map(lambda leaf: leaf[::-1], cache)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    got = jax.vmap(run, (0, None))(stack, q)
    want = jax.tree.map(lambda *y: jnp.stack(y), *(run(one, q) for one in caches))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.combinations
@pytest.mark.parametrize("which", [0, 1])
def test_derivatives_of_matrices_that_are_apart(which, path):
    cache = hki.QuantizedCache.quantize(normal((2, 24, 3, 32)), "uint4", 16, axis=-1)
    q, scales = normal((2, 5, 3, 32)), (cache.scale, cache.offset)

    def everything(of):
        def loss(q, scales):
            w = cache._replace(scale=scales[0], offset=scales[1])
            return jnp.sin(of(attention)(w, q)[which] / 8).sum()

        return jax.grad(loss, (0, 1))(q, scales), jax.jvp(loss, (q, scales), (q, scales))

    got, want = (
        jax.jit(lambda of=of: everything(of))() for of in (hki.use_implicit_args, dense_twin)
    )
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.combinations
@pytest.mark.parametrize("axis", [-2, -1])
def test_strict_promotion_of_a_model(axis, path):
    """A product and its derivatives mix dtypes of their own: that is no matter of the model."""
    q = hki.QuantizedMatrix.quantize(normal((32, 48), 0, jnp.bfloat16), "uint4", 16, axis)
    x = normal((3, 32), dtype=jnp.bfloat16)

    def everything(x, q):
        def loss(x, scale):
            return jnp.sin(product(q._replace(scale=scale), x)).sum()

        return product(q, x), jax.grad(loss, (0, 1))(x, q.scale)

    want = jax.jit(everything)(x, q)
    jax.clear_caches()
    with jax.numpy_dtype_promotion("strict"):
        got = jax.jit(everything)(x, q)
    chex.assert_trees_all_equal(got, want)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.combinations
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("name,rows", [("uint4", 1), ("uint4", 8), ("fp8_e4m3", 1)])
def test_memory(name, rows, axis, path):
    """What a product and its derivatives take is at most an eighth of the dense weight.

    Without the kernel XLA needs another quarter for codes that are floats: a copy of them, as bytes.
    """
    make = lambda: quantized(name, 1024, 32, axis, rows=1027)  # noqa: E731
    q = jax.eval_shape(make)
    most = 1 / 8 + (1 / 4 if path == "no kernel" and name.startswith("fp8") else 0)
    x = jax.ShapeDtypeStruct((rows, q.shape[0]), jnp.float32)
    by_x = jax.grad(lambda x, q: jnp.sin(product(q, x)).sum())
    for f in (lambda x, q: product(q, x), by_x):
        memory = jax.jit(f).lower(x, q).compile().memory_analysis()
        assert memory.temp_size_in_bytes <= q.size * 4 * most


# --- which path ----------------------------------------------------------------------------------


def lowered(f, *args):
    return jax.jit(f).lower(*args).as_text()


def test_one_program_for_all_platforms():
    q, x = quantized("int4"), normal((2, 96))
    assert (build.PREFIX in lowered(product, q, x)) == build.available()
    exported = jax.export.export(jax.jit(product), platforms=("cpu", "cuda"))(q, x)
    assert build.PREFIX not in exported.mlir_module()  # where it runs, there may be none
    np.testing.assert_allclose(exported.call(q, x), product(q, x), rtol=1e-5, atol=1e-4)


def test_what_the_kernel_does_not_serve(x64):
    q = quantized("int4")
    highest = jax.lax.DotAlgorithmPreset.F32_F32_F32
    cases = [
        (q, normal((2, 96)).astype(jnp.float64), {}),
        (
            hki.QuantizedMatrix.quantize(normal((96, 8), dtype=jnp.float64), "int4", 32),
            normal((2, 96)),
            {},
        ),
        (q, normal((2, 96)), dict(preferred_element_type=jnp.float64)),
        (q, normal((2, 96)), dict(precision=highest)),
        (q, normal((0, 96)), {}),
    ]
    for w, x, options in cases:
        f = lambda w, x, options=options: jnp.matmul(x, w, **options)  # noqa: E731
        implicit = hki.use_implicit_args(f)
        assert build.PREFIX not in lowered(implicit, w, x)
        want = f(hki.materialize(w), x)
        got = implicit(w, x)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


# --- building ------------------------------------------------------------------------------------

USE = """
import jax, numpy as np, haiku_implicit as hki
from haiku_implicit.quantized.cpu import build
build.FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared", "-w")  # the fastest to compile
q = hki.QuantizedMatrix.quantize(jax.random.normal(jax.random.key(0), (64, 8)), "int4", 32)
x = jax.random.normal(jax.random.key(1), (3, 64))
for _ in range(2):
    got = hki.use_implicit_args(lambda w, x: x @ w)(q, x)
    np.testing.assert_allclose(got, x @ hki.materialize(q), rtol=1e-5, atol=1e-5)
print("native" if build.available() else "xla")
"""


def start(**environment):
    """Another process, that multiplies with a quantized matrix."""
    return subprocess.Popen(
        [sys.executable, "-c", USE],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


FORK = """
import os, signal
import jax, jax.numpy as jnp, numpy as np
import haiku_implicit as hki

jax.config.update("jax_cpu_enable_async_dispatch", False)  # (XLA's own threads are not there either.)
q = hki.QuantizedMatrix.quantize(jnp.sin(jnp.arange(1024.0 * 1024)).reshape(1024, 1024), "int4", 32)
multiply = jax.jit(hki.use_implicit_args(jnp.dot))
x = jnp.cos(jnp.arange(4 * 1024.0)).reshape(4, 1024)
expected = np.asarray(multiply(x, q))
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a process that waits for threads that are not there
    os._exit(not np.array_equal(multiply(x, q), expected))
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@with_compiler
def test_process_that_fork_makes():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True)


@pytest.mark.slow
@with_compiler
def test_processes_that_start_at_once(tmp_path):
    """They build into an empty cache, which a failing compiler leaves as it is."""
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    failing = start(CXX="/bin/false", **cache)
    both = [start(**cache) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert out == "native\n", err
    folder = tmp_path / "haiku_implicit" / "kernels"
    assert [p.suffix for p in folder.iterdir()] == [".so"]
    assert folder.stat().st_mode & 0o777 == 0o700
    out, err = failing.communicate()
    assert out == "xla\n"
    logged = [line for line in err.splitlines() if "haiku_implicit" in line]
    assert len(logged) == 1 and "/bin/false" in logged[0]


# Functions under the names of the kernels' handlers: quick to compile.
TINY = "".join(
    f'extern "C" int {name}() {{ return {i}; }}' for i, name in enumerate(build.HANDLERS, 1)
)


class Builds:
    """A cache in a folder of its own, for a source that is quick to compile."""

    def __init__(self, folder, monkeypatch, caplog):
        self.folder, self.caplog = folder / "haiku_implicit" / "kernels", caplog
        source = folder / "tiny.cc"
        source.write_text(TINY)
        monkeypatch.setattr(build, "SOURCES", [source])
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        caplog.set_level("INFO", logger="absl")

    def __call__(self, flags=("-fPIC", "-shared")):
        """Loads the library, and returns whether it was compiled, and the warnings."""
        self.caplog.clear()
        assert build.library(flags).IntegerMatmul() == 2
        lines = [record.getMessage() for record in self.caplog.records]
        compiled = [line for line in lines if re.search(r"compiled .* in \d+\.\d seconds", line)]
        return bool(compiled), [line for line in lines if line not in compiled]

    def files(self):
        return sorted(self.folder.iterdir())


@pytest.fixture
def builds(tmp_path, monkeypatch, caplog):
    return Builds(tmp_path, monkeypatch, caplog)


@with_compiler
def test_cache(builds):
    """One library for each set of flags, of which those that were not used for longest are removed."""
    assert builds() == (True, [])
    assert builds() == (False, [])
    assert builds(("-fPIC", "-shared", "-g")) == (True, [])
    for i in range(20):  # of other versions, and what a killed process leaves behind
        path = builds.folder / f"quantized_matmul-{i:032}.{'tmp' if i % 2 else 'so'}"
        path.touch()
        os.utime(path, (i, i))
    other = builds.folder / "another's file"
    other.touch()
    assert builds(("-fPIC", "-shared", "-O1")) == (True, [])
    assert len(builds.files()) == 1 + 8 and other.exists()
    assert builds() == (False, [])
    assert builds(("-fPIC", "-shared", "-g")) == (False, [])


def put_in_place(path, what):
    """Something else where the library was, which stays as it is for processes that have loaded it."""
    content = path.read_bytes()
    path.unlink()
    if what == "a folder":
        path.mkdir()
        (path / "file").touch()
    elif what == "a dangling link":
        path.symlink_to(path.with_name("nothing"))
    elif what == "not readable":
        path.write_bytes(content[:100])
        path.chmod(0)
    elif what == "garbage":
        path.write_bytes(bytes(reversed(content)))
    elif what == "another library":
        path.symlink_to(sys.modules["_ctypes"].__file__)
    else:
        path.write_bytes(content[: int(what * len(content))])


@with_compiler
@pytest.mark.parametrize(
    "what",
    ["a folder", "a dangling link", "not readable", "garbage", "another library", 0, 0.5, 0.99],
)
def test_damaged_library(what, builds):
    """It is compiled anew, once."""
    builds()
    (before,) = builds.files()
    put_in_place(before, what)
    assert builds() == (True, [])
    assert builds() == (False, [])
    assert builds.files() == [before]


LOAD = """
import os, pathlib, sys
from haiku_implicit.quantized.cpu import build
build.SOURCES = [pathlib.Path(sys.argv[1])]
load = lambda: build.library(("-fPIC", "-shared")).IntegerMatmul()
load()
(path,) = (pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "haiku_implicit" / "kernels").iterdir()
content = path.read_bytes()
for parts in range(16):
    path.unlink()
    path.write_bytes(content[: len(content) * parts // 16])
    assert load() == 2
print("alive")
"""


@pytest.mark.slow
@with_compiler
def test_truncated_libraries_do_not_kill_the_process(tmp_path):
    (tmp_path / "tiny.cc").write_text(TINY)
    run = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "tiny.cc"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "alive\n", run.stderr


@with_compiler
@pytest.mark.parametrize("what", ["others can write", "a file", "no home", "full"])
def test_cache_that_cannot_be_used(what, builds, tmp_path, monkeypatch):
    """Each process compiles, and says why."""
    builds.folder.mkdir(parents=True, mode=0o700)
    if what == "others can write":
        builds.folder.chmod(0o777)
        message = rf"{builds.folder}: .* \(mode 0700\), got mode drwxrwxrwx"
    elif what == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tiny.cc"))
        message = "tiny.cc"
    elif what == "no home":
        for name in ("XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name)
        monkeypatch.setattr("pwd.getpwuid", dict().__getitem__)
        message = "home"
    else:
        monkeypatch.setattr(
            os, "replace", mock.Mock(side_effect=OSError("No space left on device"))
        )
        message = "No space left"
    for _ in range(2):
        compiled, warnings = builds()
        assert compiled and len(warnings) == 1 and re.search(message, warnings[0])
    assert not builds.files()


@pytest.mark.parametrize(
    "variable,value,message",
    [
        ("CXX", "/bin/false", "/bin/false: it failed"),
        ("CXX", "/bin/true", "No such file"),  # succeeds, and writes nothing
        ("CXX", "no-such-compiler", "no C\\+\\+ compiler \\(no-such-compiler\\); set CXX to one"),
        ("CXX", "/tmp", "no C\\+\\+ compiler \\(/tmp\\)"),
        ("CXX", 'g++ "', "CXX: expected a command, got 'g\\+\\+ \"' \\(No closing quotation\\)"),
        ("PATH", "", "no C\\+\\+ compiler \\(c\\+\\+, g\\+\\+, clang\\+\\+\\)"),
    ],
)
def test_no_compiler(variable, value, message, tmp_path, monkeypatch):
    """An error that `available` makes a line in the log; nothing is left in the cache."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    with pytest.raises((build.BuildError, OSError), match=message):
        build.register("never", build.FLAGS)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_threads_compile_once(monkeypatch):
    """The threads of a server that begin at once wait for the first of them."""
    threads, calls = 4, []
    together = threading.Barrier(threads)
    registered = functools.cache(build._registered.__wrapped__)

    def register(prefix, flags):
        calls.append(prefix)
        time.sleep(0.05)  # without a lock, the other threads begin during this time

    def first_use(_):
        together.wait()
        return build.available()

    monkeypatch.setattr(build, "_registered", registered)
    monkeypatch.setattr(build, "register", register)
    monkeypatch.setenv("HAIKU_IMPLICIT_NATIVE", "1")
    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(first_use, range(threads)))
    assert calls == [build.PREFIX]


# --- several devices -----------------------------------------------------------------------------

TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
from jax.sharding import NamedSharding, PartitionSpec as P
from haiku_implicit.core.sharding import shard_specs
from haiku_implicit.quantized.cpu import build

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
product = hki.use_implicit_args(lambda w, x: x @ w)
grad = hki.use_implicit_args(lambda w, x: jax.grad(lambda x: jnp.sin(x @ w).sum())(x))

def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)

for axis in (-2, -1):
    q = hki.QuantizedMatrix.quantize(jax.random.normal(jax.random.key(0), (128, 64)), "uint4", 32, axis)
    x = jax.random.normal(jax.random.key(1), (4, 128))
    w = hki.materialize(q)
    dense_grad = jax.grad(lambda x: jnp.sin(x @ w).sum())(x)
    for spec, x_spec in ((P(), P("i", None)), (P("i", None), P(None, "i")), (P(None, "i"), P())):
        placed = jax.tree.map(jax.device_put, q, jax.tree.map(
            lambda s: NamedSharding(mesh, s), shard_specs(q, spec, mesh)))
        at = jax.device_put(x, NamedSharding(mesh, x_spec))
        close(jax.jit(product)(placed, at), x @ w)
        close(jax.jit(grad)(placed, at), dense_grad)

    # In shard_map each device has the kernel.
    for spec, x_spec, out in ((P("i", None), P(None, "i"), P()), (P(None, "i"), P(), P(None, "i"))):
        def body(x, w):
            y = x @ w
            return jax.lax.psum(y, "i") if out == P() else y
        f = hki.use_implicit_args(jax.shard_map(body, mesh=mesh, in_specs=(x_spec, spec), out_specs=out))
        assert (build.PREFIX in jax.jit(f).lower(x, q).as_text()) == build.available()
        close(jax.jit(f)(x, q), x @ w)
        close(jax.jit(jax.grad(lambda x: jnp.sin(f(x, q)).sum()))(x), dense_grad)
    # Each device has some of the rows, and all of the matrix: gradients are summed over the devices once.
    f = hki.use_implicit_args(jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")))
    xs = jnp.stack([x[0], -2 * x[0]])
    with_scale = lambda f: lambda scale: f(xs, q._replace(scale=scale)).sum()
    close(jax.jit(jax.grad(with_scale(f)))(q.scale),
          jax.grad(with_scale(lambda x, q: x @ q.materialize()))(q.scale))
    stack = jax.tree.map(lambda y: jnp.stack([y, y]), q)
    close(jax.pmap(product)(stack, jnp.stack([x, -x])), jnp.stack([x @ w, -x @ w]))
print("done")
"""


@pytest.mark.slow
def test_two_devices():
    assert run_on_devices(TWO_DEVICES, 2) == "done"


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process")
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent():
    """A thread that compiles holds the lock; in a child nobody would release it."""
    with build._registering:
        child = os.fork()
        if child == 0:
            os._exit(0 if build._registering.acquire(blocking=False) else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
