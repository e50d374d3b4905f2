"""Each format against its definition in NumPy, and its bytes."""

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import haiku_implicit as hki
from haiku_implicit.quantized.numbers import formats
from tests.random_arrays import numpy_normal as normal
from tests.tiers import few

quantize = hki.QuantizedMatrix.quantize


def dense(q):
    return np.asarray(hki.materialize(q))


def rms(q, w):
    return float(np.sqrt(np.mean((dense(q) - w) ** 2) / np.mean(w**2)))


# --- codes and bytes -------------------------------------------------------------------------------


def bits_of(codes, fmt, g):
    """The codes of one group of stored bytes, bit by bit: the definition of the packing."""
    out, start, below = np.zeros(g, int), 0, 0
    for bits in fmt.planes:
        size = g * bits // 8
        for i in range(g):
            byte = int(codes[start + i % size])
            out[i] |= (byte >> (i // size * bits) & (2**bits - 1)) << below
        start, below = start + size, below + bits
    return out


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [n for n, f in formats.FORMATS.items() if f.bits < 8])
def test_packing(name):
    fmt = formats.FORMATS[name]
    g = 3 * fmt.multiple
    codes = np.random.default_rng(0).integers(0, 2**fmt.bits, (2, 3, g)).astype(np.uint8)
    stored = jax.jit(formats.pack, static_argnums=1)(codes, fmt)
    assert stored.shape == (2, 3 * g * fmt.bits // 8)
    assert (formats.unpack(stored, 3, fmt) == codes).all()
    for row, bytes_of_row in zip(codes, np.asarray(stored), strict=True):
        for group, own in zip(row, np.split(bytes_of_row, 3), strict=True):
            assert (bits_of(own, fmt, g) == group).all()
    group, within = np.divmod(np.arange(3 * g), g)
    look_up = lambda row, *at: formats.codes_at(*at, g, fmt, lambda places: row[places])  # noqa: E731
    found = jax.jit(look_up)(stored[0], group, within)
    assert (found == codes[0].ravel()).all()


# Bits of codes and of scales for each weight of [1024, 768], groups along the 1024.
HELD = {
    ("int2", 64, None): 2 + 32 / 64,
    ("int3", 128, "bfloat16"): 3 + 16 / 128,
    ("int4", None, None): 4 + 32 / 1024,
    ("uint4", 32, "float16"): 4 + 2 * 16 / 32,
    ("int6", 16, "bfloat16"): 6 + 1,
    ("int7", 32, "float16"): 7 + 16 / 32,
    ("uint7", 16, None): 7 + 2 * 32 / 16,
    ("uint1", 64, "bfloat16"): 1 + 2 * 16 / 64,
    ("int8", None, "bfloat16"): 8 + 16 / 1024,
    ("binary", "tensor", None): 1 + 32 / (1024 * 768),
    ("ternary", (128, 128), None): 2 + 32 / 128**2,
    ("nf4", 64, None): 4.5,
    ("nf4", 64, "double"): 4 + 8 / 64 + 32 / (64 * 256),  # 4.127
    ("iq4_nl", 32, "float16"): 4.5,
    ("uint5", 32, "float16"): 5 + 2 * 16 / 32,
    ("uint4", 32, "double"): 4 + 2 * (8 / 32 + 32 / (32 * 256)),
    ("fp8", None, None): 8 + 32 / 1024,
    ("mxfp8", None, None): 8.25,
    ("mxfp4", None, None): 4.25,
    ("nvfp4", None, None): 4.5 + 32 / (1024 * 768),
    ("q4_0", None, None): 4.5,
    ("q2_k", None, None): 2.625,
    ("q3_k", None, None): 3.4375,
    ("q4_k", None, None): 4.5,
    ("q5_k", None, None): 5.5,
    ("q6_k", None, None): 6.5625,
    ("iq4_xs", None, None): 4.25,
    ("uint4", 16, "uint4,4"): 4 + 2 * (4 / 16 + 16 / 64),
}


@pytest.mark.parametrize("name, group_size, scale_dtype", HELD)
def test_the_bytes_held_are_the_nominal_bits(name, group_size, scale_dtype):
    w = normal((1024, 768))
    q = jax.eval_shape(lambda w: quantize(w, name, group_size, scale_dtype=scale_dtype), w)
    assert q.nbytes * 8 / w.size == HELD[name, group_size, scale_dtype]
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(q)) == q.nbytes


# --- values ----------------------------------------------------------------------------------------


def nearest_of(values, w):
    """The nearest of some values to each of w, and how far it is."""
    distance = np.abs(np.asarray(values)[:, None] - np.ravel(w))
    return np.asarray(values)[distance.argmin(0)].reshape(w.shape), distance.min(0).reshape(w.shape)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_codes_are_the_nearest(data):
    name = data.draw(st.sampled_from(sorted(formats.FORMATS)))
    fmt = formats.FORMATS[name]
    if fmt.is_float:
        every = np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float32)
        every = every[np.isfinite(every)]
    elif fmt.table is not None:
        every = np.asarray(fmt.table)
    else:
        every = np.arange(2**fmt.bits, dtype=np.float32) - fmt.bias
        every = every - (256 if name == "int8" else 0) * (every > 127)
    every = every[(every >= fmt.lowest) & (every <= fmt.largest)]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    w = (rng.uniform(-1.1, 1.1, size=32) * max(fmt.largest, -fmt.lowest)).astype(np.float32)
    codes = formats.nearest(jnp.asarray(w), fmt)
    assert codes.dtype == fmt.dtype
    got = np.asarray(formats.decode(codes, np.float32, fmt))
    want, distance = nearest_of(every, w)
    np.testing.assert_allclose(np.abs(got - w), distance, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("fp4", ml_dtypes.float4_e2m1fn),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_floating_codes_are_those_of_ml_dtypes(name, dtype):
    fmt = formats.FORMATS[name]
    # Every value, every middle between two (ties), and values between these.
    every = np.arange(2**fmt.bits, dtype=np.uint8).view(dtype).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    w = np.concatenate([every, middles, np.nextafter(middles, 9e9), np.nextafter(middles, -9e9)])
    w = w.astype(np.float32)
    got = formats.decode(formats.nearest(jnp.asarray(w), fmt), np.float32, fmt)
    np.testing.assert_array_equal(got, w.astype(dtype).astype(np.float32))


def test_microscaling_is_that_of_the_specification():
    """OCP MX 1.0, section 6.3: the shared exponent is that of the largest, less that of the format."""
    w = normal((96, 5)) * np.exp2(np.arange(5) * 7 - 14).astype(np.float32)
    for name, dtype, emax, largest in (
        ("mxfp4", ml_dtypes.float4_e2m1fn, 2, 6),
        ("mxfp8", ml_dtypes.float8_e4m3fn, 8, 448),
    ):
        q = quantize(w, name)
        blocks = w.T.reshape(5, 3, 32)
        exponent = np.floor(np.log2(np.abs(blocks).max(-1))) - emax
        assert q.scale.dtype == jnp.float8_e8m0fnu
        np.testing.assert_array_equal(np.asarray(q.scale, np.float32), np.exp2(exponent))
        scaled = np.clip(blocks / np.exp2(exponent)[..., None], -largest, largest)
        want = scaled.astype(dtype).astype(np.float32) * np.exp2(exponent)[..., None]
        np.testing.assert_array_equal(dense(q), want.reshape(5, 96).T)


def test_nvfp4_is_blocks_of_16_with_e4m3_scales_and_one_of_the_tensor():
    w = normal((64, 6))
    q = quantize(w, "nvfp4")
    blocks = w.T.reshape(6, 4, 16)
    largest = np.abs(blocks).max(-1) / 6
    of_tensor = largest.max() / np.float32(448)
    scale = (largest / of_tensor).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * of_tensor
    relative = np.clip(blocks / scale[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    want = relative.astype(np.float32) * scale[..., None]
    # The quotients by the scales may round differently, and fall on either side of a tie.
    close = np.isclose(dense(q), want.reshape(6, 64).T, rtol=1e-5)
    assert close.mean() > 0.99 and rms(q, w) == pytest.approx(0.095, abs=0.01)
    assert isinstance(q.scale, hki.QuantizedMatrix) and q.scale.format == "fp8_e4m3"


@pytest.mark.parametrize("group_size", [(2, 8), (6, 16), "tensor", None, 8])
def test_tiles_share_a_scale(group_size):
    w = normal((16, 6))
    q = quantize(w, "int4", group_size)
    rows, g = {"tensor": (6, 16), None: (1, 16), 8: (1, 8)}.get(group_size, group_size)
    blocks = w.T.reshape(6 // rows, rows, 16 // g, g)
    scale = np.abs(blocks).max((1, 3), keepdims=True) / 7
    assert q.scale.shape == (6 // rows, 16 // g)
    want = np.clip(np.round(blocks / scale), -8, 7) * scale
    np.testing.assert_allclose(dense(q), want.reshape(6, 16).T, rtol=1e-6)


# --- calibration -----------------------------------------------------------------------------------

EVERY = [*formats.FORMATS, *formats.RECIPES]
GGML = [name for name in formats.RECIPES if name.startswith(("q", "iq"))]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", few(EVERY, "int8", "uint4", "nvfp4"))
def test_a_search_for_the_least_error_is_no_worse(name):
    w = normal((256, 16)) ** 3  # long tails, as weights have them
    group = None if name in formats.RECIPES else 32
    best = rms(quantize(w, name, group, calibration="mse"), w)
    assert best <= rms(quantize(w, name, group), w) * (1 + 1e-6)
    # Scales of 8 bits of mantissa cost little; offsets of as many do.
    if name not in formats.RECIPES and not formats.FORMATS[name].offset:
        rounded = quantize(w, name, group, calibration="mse", scale_dtype="bfloat16")
        assert rms(rounded, w) <= best * 1.02


@pytest.mark.parametrize(
    "name, method, scale, offset",
    [
        ("int8", "absmax", lambda w: np.abs(w).max(0) / 127, None),
        ("ternary", None, lambda w: np.abs(w).mean(0), None),
        ("binary", None, lambda w: np.abs(w).mean(0) * 2, None),
        ("int8", "absmax,0.5", lambda w: np.abs(w).max(0) / 2 / 127, None),
        ("int4", "rms,2.5", lambda w: 2.5 * np.sqrt((w**2).mean(0)) / 7, None),
        ("int4", "percentile,90", lambda w: np.percentile(np.abs(w), 90, 0) / 7, None),
        ("int4", "fixed,-2,1.5", lambda w: np.full(5, 2 / 7), None),
        ("uint4", "fixed,0.5,3.5", lambda w: np.full(5, 3 / 15), lambda w: np.full(5, 0.5)),
        ("uint8", "minmax", lambda w: (w.max(0) - w.min(0)) / 255, lambda w: w.min(0)),
        ("uint8", "minmax,0.5", lambda w: (w.max(0) - w.min(0)) / 510, lambda w: w.min(0) / 2),
        (
            "uint4",
            "percentile,90",
            lambda w: np.diff(np.percentile(w, [10, 90], 0), axis=0)[0] / 15,
            lambda w: np.percentile(w, 10, 0),
        ),
    ],
)
def test_calibrations_by_their_definitions(name, method, scale, offset):
    w = normal((64, 5))
    q = quantize(w, name, calibration=method)
    np.testing.assert_allclose(q.scale[:, 0], scale(w), rtol=1e-4)
    if offset is not None:  # rounded to a multiple of the scale
        np.testing.assert_allclose(q.offset[:, 0], offset(w), atol=0.51 * float(q.scale.max()))


def test_hqq_is_no_worse_and_fits_heavy_tails():
    w = normal((128, 16)) ** 3
    assert rms(quantize(w, "uint4", 64, calibration="hqq"), w) < rms(quantize(w, "uint4", 64), w)


@pytest.mark.parametrize("name", few(EVERY, "int8", "uint4"))
def test_nothing_becomes_nan(name):
    """Zeros, constants, one element to a group, the smallest and the largest numbers."""
    w = np.zeros((256, 8), np.float32)
    w[:, 1], w[:, 2], w[3, 3] = 0.3, -0.3, -0.0
    w[:, 4], w[:, 5], w[:, 6] = 1e-44, 1e-38, np.linspace(-1e30, 1e30, 256)
    if name in GGML:  # scales in float16
        w[:, 4:6], w[:, 6] = 0, 1e-28 * w[:, 6]
    for method in (None, "mse", "rms", "percentile"):
        q = quantize(w, name, calibration=method)
        got = dense(q)
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got[:, 0], 0)
        if method in (None, "mse") and name not in ("mxfp8", "mxfp4", "nvfp4"):
            # A constant is exact, but for the rounding of the scale; one side of it without a zero.
            # (The table of iq4_nl reaches further down than up, and absmax takes positive scales.)
            last = 2 if name.startswith("iq4") and method is None else 3
            np.testing.assert_allclose(got[:, 1:last], w[:, 1:last], rtol=2e-3)
        assert (np.abs(got[:, 4]) < 1e-37).all()


def test_one_element_to_a_group_is_exact():
    w = normal((4, 4))
    for name in ("int8", "fp8"):
        np.testing.assert_allclose(dense(quantize(w, name, 1)), w, rtol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(calibration="best"), "calibration: expected one of absmax, .* got 'best'"),
        (dict(calibration="rms,a"), "calibration: expected numbers after 'rms', got 'rms,a'"),
        (dict(calibration="rms,inf"), "calibration: expected finite numbers after 'rms', got 'rms,inf'"),
        (dict(calibration="fixed,-inf,inf"), "calibration: expected finite numbers after 'fixed'"),
        (dict(calibration="rms,0"), "calibration: expected a positive factor after 'rms', got 0"),
        (dict(calibration="absmax,-1"), "calibration: expected a positive factor after 'absmax', got -1"),
        (dict(calibration="rms,1,2"), "calibration: expected 0 to 1 numbers after 'rms', got 'rms,1,2'"),
        (dict(calibration="mse,1"), "calibration: expected 0 numbers after 'mse', got 'mse,1'"),
        (dict(calibration="fixed,1"), "calibration: expected 2 numbers after 'fixed'"),
        (dict(calibration="fixed,2,1"), "expected 'fixed,LOW,HIGH', low first, got 2, 1"),
        (dict(calibration="percentile,5"), "percentile above 50 to 100, got 5"),
        (dict(calibration="hqq"), "'hqq' needs a format with an offset, got 'int4'"),
        (dict(scale_dtype="int8"), "scale_dtype: expected one of float32, .* got 'int8'"),
        (dict(scale_dtype="e4m3", zero_point=True), "scale_dtype: .* for a format with an offset"),
        (dict(scale_dtype=3), "scale_dtype: expected one of float32, .* got 3"),
        (dict(group_size=(8,)), r"group_size: expected a number, a pair \(rows, elements\), .* got \(8,\)"),
        (dict(group_size="row"), "group_size: expected a number, a pair .*, 'tensor' or None, got 'row'"),
        (dict(group_size=(4, 8)), r"group_size: expected a tile whose rows divide the 6 .* \(4, 8\)"),
        (dict(group_size=True), "group_size: expected a number, a pair .* got True"),
        (dict(dtype="int8", group_size=True), "group_size: expected a number, a pair .* got True"),
        (dict(dtype="int8", group_size=8.0), "group_size: expected a number, a pair .* got 8.0"),
        (dict(dtype="int8", group_size=(1, True)), r"group_size: expected .* got \(1, True\)"),
        (dict(dtype="int8", group_size=(True, 8)), r"group_size: expected .* got \(True, 8\)"),
        (dict(dtype="int8", axis=True), "axis: expected -2 or -1 .* got True"),
        (dict(dtype="mxfp4", group_size=16), "group_size: 'mxfp4' has 32, got 16; leave it out"),
        (dict(dtype="nvfp4", scale_dtype="e8m0"), "scale_dtype: 'nvfp4' has 'e4m3', got 'e8m0'"),
        (dict(dtype="mxfp4", zero_point=True), "with a zero point .*, got 'mxfp4'"),
    ],
)  # fmt: skip
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(normal((32, 6)), **{"dtype": "int4", **options})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [dict(dtype="mxfp4"), dict(dtype="int8", scale_dtype="e8m0")])
def test_what_is_not_finite_shows_in_powers_of_two(options, bad):
    w = normal((32, 3))
    w[4, 1] = bad  # an error where it is known (`test_quantized.py`), so it is traced here
    got = jax.jit(lambda w: hki.materialize(quantize(w, **options)))(w)
    np.testing.assert_array_equal(np.isnan(got).all(0), [False, True, False])


CALIBRATIONS = {
    "int8": ("absmax", "absmax,0.8", "rms", "percentile", "percentile,90", "fixed,-4,4", "mse"),
    "uint4": ("minmax", "minmax,0.8", "percentile", "fixed,-4,4", "mse", "hqq"),
    "ternary": ("absmean", "mse"),
    "nf4": ("absmax", "percentile,99", "fixed,-1,1"),
    "fp8_e4m3": ("absmax", "percentile,99", "fixed,-1,1"),
}


@pytest.mark.parametrize("bad", few([np.nan, np.inf, -np.inf], np.inf))
@pytest.mark.parametrize("name", few(CALIBRATIONS, "int8", "uint4"))
def test_what_is_not_finite_shows_in_its_own_group(name, bad):
    """For each calibration: a traced weight can't raise, and other groups don't change."""
    w = normal((32, 3))
    broken = w.copy()
    broken[4, 1] = bad

    @jax.jit
    def run(w):
        quantized = (quantize(w, name, 16, calibration=how) for how in CALIBRATIONS[name])
        return [hki.materialize(q) for q in quantized]

    for how, got, want in zip(CALIBRATIONS[name], run(broken), run(w), strict=True):
        assert not np.isfinite(got[:16, 1]).any(), how
        np.testing.assert_array_equal(got[16:], want[16:], err_msg=how)
        np.testing.assert_array_equal(got[:, ::2], want[:, ::2], err_msg=how)


def test_powers_of_two_do_not_clip_codes_up_to_one():
    """As the rule of the OCP specification, made for codes up to 1.75 times a power, would by half."""
    q = quantize(np.full((16, 2), 3.7, np.float32), "nf4", scale_dtype="e8m0")
    np.testing.assert_allclose(dense(q), 3.7, rtol=0.1)


def test_scales_that_do_not_fit_their_dtype():
    w = np.full((4, 4), 1e30, np.float32)
    for size, problem in ((1, "large"), (1e-36, "small"), (1e-40, "small")):
        with pytest.raises(
            ValueError, match=f"scales are too {problem} for 'float16'; use 'bfloat1"
        ):
            quantize(w * np.float32(size), "int8", scale_dtype="float16")
    small = w * np.float32(1e-33)  # of which the scale, 8e-6, is subnormal
    np.testing.assert_allclose(
        dense(quantize(small, "int8", scale_dtype="float16")), small, rtol=0.01
    )
    quantize(w * 0, "int8", scale_dtype="float16")


# --- the rules, on formats that are stored in other ways -------------------------------------------

OTHERS = {
    "planes": dict(dtype="int3", group_size=8),
    "bits, padded": dict(dtype="binary"),
    "6 bits": dict(dtype="int6", group_size=8, axis=-1),
    "7 bits": dict(dtype="int7", group_size=8),
    "tiles": dict(dtype="int4", group_size=(2, 8)),
    "tensor": dict(dtype="uint4", group_size="tensor", axis=-1),
    "tensor, padded": dict(dtype="int2", group_size="tensor"),
    "double": dict(dtype="nf4", group_size=8, scale_dtype="double"),
    "e8m0": dict(dtype="fp4", group_size=8, scale_dtype="e8m0"),
    "e4m3": dict(dtype="fp8", group_size=8, scale_dtype="e4m3"),
}


def uses(w, x):
    """Operations of models on a weight [24, 16]: each has a rule, for each way of storing."""
    rows = jnp.array([3, 0, 23])
    return dict(
        dot=x @ w,
        transposed=x[:, :16] @ w.T,
        halved=x @ (w * 0.5),
        negative=x @ -w,
        rows=w[rows],
        columns=jnp.take(w, rows % 16, axis=1),
        slices=(w[8:16], w[:, 8:16] @ jnp.ones(8)),
        one=jax.lax.dynamic_slice(w, (rows[0], 0), (2, 16)),
        both=jnp.concatenate(jnp.split(w, 2, axis=1), axis=1).T @ x.T,
    )


@pytest.mark.parametrize("name", few(OTHERS, "bits, padded", "tiles", "double"))
@pytest.mark.slow
def test_rules(name):
    q = quantize(normal((24, 16)), **OTHERS[name])
    x = normal((3, 24), 1)
    run = hki.use_implicit_args(uses)
    with hki.materialization("allow"), hki.materialization_report() as report:
        got = jax.jit(run)(q, x)
    allowed = {"slice", "split"} if q.num_groups == 1 or q.axis == -1 else set()
    assert {e.primitive for e, _ in report} <= allowed
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)  # noqa: E731
    jax.tree.map(close, got, jax.jit(uses)(hki.materialize(q), x))

    stack = jax.tree.map(lambda x: jnp.stack([x, x]), q)
    assert stack.shape == (2, 24, 16)
    layers = lambda w, x: jax.lax.scan(lambda c, w: (c, c @ w), x, w)[1]  # noqa: E731
    with hki.materialization("error"):
        got = jax.jit(hki.use_implicit_args(layers))(stack, x)
        by_x = jax.grad(hki.use_implicit_args(lambda x, w: jnp.sum(jnp.sin(x @ w))))(x, q)
        batched = jax.vmap(hki.use_implicit_args(lambda w: x @ w))(stack)
    close(got, layers(hki.materialize(stack), x))
    close(batched, x @ hki.materialize(stack))
    close(by_x, jax.grad(lambda x: jnp.sum(jnp.sin(x @ hki.materialize(q))))(x))


# Relative errors on normal numbers, by format, group and `scale_dtype`. In the comments GGML's, of the
# same bits (or .01 less), by its own quantizer with all elements equally important.
LEAST_ERRORS = {
    ("uint4", 32, "float16"): 0.0689,  # Q4_1 .0700
    ("uint5", 32, "float16"): 0.0332,  # Q5_1 .0339
    ("uint3", 64, "float16"): 0.1640,
    ("uint2", 64, "float16"): 0.3195,
    ("nf4", 32, "float16"): 0.0753,
    ("int4", 32, "float16"): 0.0813,  # Q4_0 .0819
    ("int5", 32, "float16"): 0.0402,  # Q5_0 .0406
    ("iq4_nl", 32, "float16"): 0.0735,  # IQ4_NL .0750
    # Here scales are searched for among those that their codes can be.
    ("uint4", 32, "double"): 0.0693,  # Q4_K .0708
    ("uint5", 32, "double"): 0.0337,  # Q5_K .0354
    ("int6", 16, "double"): 0.0170,  # Q6_K .0174
    ("iq4_nl", 32, "double"): 0.0736,  # IQ4_XS .0756
    ("nvfp4", None, None): 0.0824,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, group, scale_dtype",
    few(LEAST_ERRORS, ("uint4", 32, "double"), ("nf4", 32, "float16"), ("int5", 32, "float16")),
)
def test_searches_find_scales_of_little_error(name, group, scale_dtype):
    w = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
    q = quantize(jnp.asarray(w), name, group, calibration="mse", scale_dtype=scale_dtype)
    error = np.linalg.norm(np.asarray(hki.materialize(q)) - w) / np.linalg.norm(w)
    assert error < LEAST_ERRORS[name, group, scale_dtype]


@pytest.mark.parametrize("name, zero_point", [("uint4", False), ("int2", True)])
def test_scales_and_offsets_in_codes(name, zero_point):
    w = jnp.asarray(np.random.default_rng(0).uniform(1, 3, (256, 24)), jnp.float32)
    found = [
        quantize(w, name, 32, zero_point=zero_point, scale_dtype=dtype)
        for dtype in ("double", None)
    ]
    coarse, fine = (np.asarray(hki.materialize(q)) for q in found)
    assert isinstance(found[0].offset, hki.QuantizedMatrix)
    step = 2 / (15 if name == "uint4" else 3)
    np.testing.assert_allclose(coarse, fine, atol=step)  # next to a tie, another code
    assert np.abs(coarse - w).max() < 0.51 * step + 0.03
    x = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)
    product = jax.jit(hki.use_implicit_args(jnp.matmul))(x, found[0])
    np.testing.assert_allclose(product, x @ coarse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2"])
def test_minmax_has_an_offset_wherever_it_is_said(dtype):
    w = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (16, 4)), jnp.float32)
    found = [
        hki.QuantizedMatrix.quantize(w, dtype, calibration="minmax"),
        hki.quantize_params({"a": {"w": w}}, dtype=dtype, calibration="minmax")["a"]["w"],
        hki.quantize_params({"a": {"w": w}}, rules=[
            hki.quantization.QuantRule(weight_qtype=dtype, weight_calibration_method="minmax")
        ])["a"]["w"],
    ]  # fmt: skip
    for q in found:
        assert q.format == f"u{dtype}"
        step = 1 / (2 ** int(dtype[3:]) - 1)  # of a range of one
        assert np.abs(np.asarray(hki.materialize(q) - w)).max() < 0.51 * step
    with pytest.raises(ValueError, match="calibration='minmax'.*got 'nf4'"):
        hki.QuantizedMatrix.quantize(w, "nf4", calibration="minmax")
