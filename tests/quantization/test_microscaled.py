"""Microscaled operands, and other widths than 8, 4 and 2 bits, against their definition in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule, conv_general_dilated, dot_general
from haiku_implicit.quantized.products import microscaled
from tests.tiers import few

MATRICES = (((1,), (0,)), ((), ()))
TILES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
CODES = {
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}


def normal(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(x, qtype, axis):
    """The values that Qwix rounds an array to, tile by tile of an axis (in float64)."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    tiles = x.reshape(*x.shape[:-1], -1, TILES[qtype])
    most = float(ml_dtypes.finfo(CODES[qtype]).max)
    scale = np.abs(tiles).max(-1, keepdims=True) / most
    if qtype == "nvfp4":
        scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        scale = 2 ** np.ceil(np.log2(scale))
    codes = np.clip(tiles / scale, -most, most).astype(CODES[qtype]).astype(np.float64)
    return np.moveaxis((codes * scale).reshape(x.shape), -1, axis)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * np.abs(want).max())


def product(rule):
    return lambda x, w: dot_general(x, w, MATRICES, rule=rule)


@pytest.mark.parametrize("qtype", TILES)
def test_products_are_their_definition(qtype):
    x, w, g = normal((32, 64), 0), normal((64, 48), 1), normal((32, 48), 2)
    if qtype != "nvfp4":
        g = np.concatenate([g, normal((32, 16), 3)], 1)
        w = np.concatenate([w, normal((64, 16), 4)], 1)
    rule = QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=qtype)

    @jax.jit
    def with_gradients(x, w, g):
        out, pullback = jax.vjp(product(rule), x, w)
        return out, *pullback(g)

    out, dx, dw = with_gradients(x, w, g)
    close(out, rounded(x, qtype, 1) @ rounded(w, qtype, 0))
    close(
        dx, rounded(g, qtype, 1) @ w.T.astype(np.float64)
    )  # residuals are not rounded, as in Qwix
    close(dw, x.T.astype(np.float64) @ rounded(g, qtype, 0))


@pytest.mark.slow
@pytest.mark.all_slow
@pytest.mark.parametrize("qtype", TILES)
def test_transformations_are_loops(qtype):
    rule = QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype="int8")
    xs, w = normal((3, 8, 32), 0), normal((32, 16), 1)
    multiply = product(rule)
    want = [rounded(x, qtype, 1) @ rounded(w, qtype, 0) for x in xs]
    close(jax.vmap(multiply, (0, None))(xs, w), np.stack(want))
    close(jax.lax.scan(lambda _, x: (None, multiply(x, w)), None, xs)[1], np.stack(want))
    close(multiply(xs[0], w), want[0])
    params = {"linear": {"w": jnp.asarray(w)}}
    weight = hki.quantized_training(params, [rule])["linear"]["w"]
    close(jax.jit(hki.use_implicit_args(jnp.matmul))(xs[0], weight), want[0])
    served = hki.convert_trained({"linear": {"w": weight}})["linear"]["w"]
    assert served.format == {"mxfp8": "fp8_e4m3"}.get(qtype, "fp4")
    np.testing.assert_array_equal(hki.materialize(served), rounded(w, qtype, 0).astype(np.float32))
    close(hki.use_implicit_args(jnp.matmul)(xs[0], served), want[0])


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_scales_in_e4m3_suit_numbers_of_any_size(size):
    """Qwix's own scales become zero, or end at 448; here they have a power of two as a factor."""
    x, w = normal((4, 32), 0), normal((32, 8), 1)
    multiply = jax.jit(product(QtRule(weight_qtype="nvfp4", act_qtype="nvfp4")))
    power = np.float32(2.0 ** np.round(np.log2(size)))
    close(multiply(x * power, w) / power, rounded(x, "nvfp4", 1) @ rounded(w, "nvfp4", 0))


@pytest.mark.slow
@pytest.mark.parametrize("qtype", TILES)
def test_what_is_not_finite_and_zeros(qtype):
    x, w = normal((3, 32), 0), normal((32, 4), 1)
    x[1, 5], x[2] = np.inf, 0
    out = product(QtRule(weight_qtype=qtype, act_qtype=qtype))(x, w)
    assert np.isnan(out[1]).all() and not np.asarray(out[2]).any() and np.isfinite(out[0]).all()


# --- on a GPU ------------------------------------------------------------------------------------

PRODUCTS = {
    "matrices": (((32, 64), (64, 32)), MATRICES),
    "batches": (((3, 32, 64), (3, 64, 32)), (((2,), (1,)), ((0,), (0,)))),
    "two summed": (((64, 3, 32), (32, 64, 3)), (((0,), (1,)), ((1,), (2,)))),
    "many axes": (((32, 4, 64), (4, 64, 32)), (((1, 2), (0, 1)), ((), ()))),
}


def of_blocks(a, b, of_a, of_b):
    """`jax.nn.scaled_matmul` by its documentation."""
    pair = (a.dtype, of_a.dtype)
    assert pair in ((jnp.float8_e4m3fn, jnp.float8_e8m0fnu), (jnp.float4_e2m1fn, jnp.float8_e4m3fn))
    a, b = (
        x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), x.shape[-1] // s.shape[-1], -1)
        for x, s in ((a, of_a), (b, of_b))
    )
    return jnp.einsum("bmk,bnk->bmn", a, b, precision="highest")


def everywhere(qtype):
    both = dict(dlhs_residual_qtype=qtype, drhs_residual_qtype=qtype)
    return QtRule(weight_qtype=qtype, act_qtype=qtype, bwd_qtype=qtype, additional_qt_config=both)


@pytest.mark.slow
@pytest.mark.all_slow
@pytest.mark.parametrize("qtype", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_blocks_are_the_operands(name, qtype, monkeypatch):
    shapes, numbers = PRODUCTS[name]
    x, w = (jnp.asarray(normal(shape, i) * 1e-3) for i, shape in enumerate(shapes))
    called = []

    def on_cuda(*operands, cuda, default):
        called.append(1)
        return cuda(*operands)

    @jax.jit
    def with_gradients(x, w):
        out, pullback = jax.vjp(
            lambda x, w: dot_general(x, w, numbers, rule=everywhere(qtype)), x, w
        )
        return out, *pullback(jnp.cos(1e6 * out))

    want = with_gradients(x, w)
    monkeypatch.setattr(jax.lax, "platform_dependent", on_cuda)
    monkeypatch.setattr(microscaled, "_scaled_matmul", of_blocks)
    jax.clear_caches()
    got = with_gradients(x, w)
    assert len(called) == 3
    for a, b in zip(got, want, strict=True):
        close(a, np.asarray(b))


@pytest.mark.slow
@pytest.mark.parametrize("qtype", few(["mxfp8", "nvfp4"], "nvfp4"))
@pytest.mark.parametrize("mapped", few(["neither", "lhs", "rhs", "both"], "lhs"))
def test_programs_for_cuda_have_the_call(mapped, qtype):
    lead = (0 if mapped in ("lhs", "both") else None, 0 if mapped in ("rhs", "both") else None)
    fun = product(everywhere(qtype))
    fun = fun if mapped == "neither" else jax.vmap(fun, lead)
    shapes = [((3,) if i == 0 else ()) + s for i, s in zip(lead, ((32, 64), (64, 32)), strict=True)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = jax.jit(jax.value_and_grad(lambda x, w: jnp.sin(fun(x, w)).sum(), (0, 1)))
    call = "__op$block_scaled_dot"
    checks = [export.DisabledSafetyCheck.custom_call(call)]
    program = export.export(grads, platforms=["cuda"], disabled_checks=checks)(*operands)
    assert call in program.mlir_module()
    assert call not in grads.lower(*operands).as_text()  # on the CPU


@pytest.mark.slow
@pytest.mark.parametrize("size, axes", [(3, (0, None)), (3, (None, 0)), (2, (0, 0))])
def test_mapped_calls_are_one_call(size, axes, monkeypatch):
    monkeypatch.setattr(jax.nn, "scaled_matmul", of_blocks)
    shapes = ((2, 4, 64), (2, 5, 64), (2, 4, 2), (2, 5, 2))
    dtypes = (jnp.float8_e4m3fn,) * 2 + (jnp.float8_e8m0fnu,) * 2
    mapped = axes * 2
    operands = [
        jnp.exp2(jnp.round(normal(((size,) if i == 0 else ()) + shape, n))).astype(dtype)
        for n, (shape, dtype, i) in enumerate(zip(shapes, dtypes, mapped, strict=True))
    ]
    got = jax.vmap(microscaled._scaled_matmul, mapped)(*operands)
    want = jax.vmap(of_blocks, mapped)(*operands)
    np.testing.assert_array_equal(got, want)


# --- integers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_activations_that_are_not_negative_in_uint8():
    x, w, g = np.abs(normal((5, 12), 0)), normal((12, 7), 1), normal((5, 7), 2)
    of_x = x.max(1, keepdims=True) * np.float32(1 / 255.5)
    of_w = np.abs(w).max(0, keepdims=True) * np.float32(1 / 127.5)
    codes = np.round(x * (1 / of_x)), np.round(w * (1 / of_w))
    codes = np.clip(codes[0], 0, 255), np.clip(codes[1], -128, 127)
    rule = QtRule(weight_qtype="int8", act_qtype="uint8")
    out, pullback = jax.vjp(product(rule), x, w)
    close(out, (codes[0] * of_x) @ (codes[1] * of_w))
    close(pullback(g)[0], g @ w.T)
    assert not np.asarray(product(rule)(-x, w)).any()  # as in Qwix
    with_zero = product(
        QtRule(weight_qtype="int8", act_qtype="uint8", act_calibration_method="minmax")
    )
    y = x - 1
    np.testing.assert_allclose(with_zero(y, w), y @ w, atol=0.03 * np.abs(y @ w).max())
    images, kernel = np.abs(normal((2, 9, 3), 3)), normal((3, 3, 4), 4)
    options = dict(window_strides=(1,), padding="SAME", dimension_numbers=("NHC", "HIO", "NHC"))
    convolved = conv_general_dilated(images, kernel, rule=rule, **options)
    want = jax.lax.conv_general_dilated(images, kernel, **options)
    np.testing.assert_allclose(convolved, want, atol=0.02 * np.abs(want).max())


def test_sums_of_uint8_do_not_overflow():
    x, w = np.ones((1, 40000), np.float32), np.ones((40000, 1), np.float32)
    rule = QtRule(weight_qtype="uint8", act_qtype="uint8", weight_calibration_method="fixed,0,1")
    np.testing.assert_allclose(product(rule)(x, w), [[40000]], rtol=1e-2)


@pytest.mark.slow
def test_seven_bits():
    x, w = normal((4, 64), 0), jnp.asarray(normal((64, 24), 1))
    q = hki.QuantizedMatrix.quantize(w, "int7", 16)
    scale = np.abs(np.asarray(w).reshape(4, 16, 24)).max(1, keepdims=True) / 63
    codes = np.round(np.asarray(w).reshape(4, 16, 24) / scale)
    dense = (codes * scale).reshape(64, 24)
    close(hki.materialize(q), dense)
    assert q.codes.nbytes * 8 == 7 * w.size
    multiply = hki.use_implicit_args(jnp.matmul)
    close(multiply(x, q), x @ dense)
    close(hki.use_implicit_args(lambda w: w[jnp.array([5, 0])])(q), dense[[5, 0]])
    trained = QtRule(weight_qtype="int7", act_qtype="int7", bwd_qtype="int7")
    out, pullback = jax.vjp(product(trained), x, w)
    np.testing.assert_allclose(out, x @ w, atol=0.1 * np.abs(x @ w).max())
    np.testing.assert_allclose(pullback(out)[0], out @ w.T, atol=0.1 * np.abs(out @ w.T).max())


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weight_qtype="mxfp8", tile_size=16), "tile_size: 'mxfp8' has tiles of 32, got 16"),
        (dict(weight_qtype="uint8"), "weight_qtype: 'uint8' has no negative codes"),
        (dict(weight_qtype="int8", bwd_qtype="uint4"), "bwd_qtype: 'uint4' has no negative codes"),
        (dict(weight_qtype="int1"), "weight_qtype: expected one of .*, got 'binary'"),
        (dict(weight_qtype="q4_0"), "weight_qtype: expected one of .* nvfp4, got 'q4_0'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        QtRule(**options)
