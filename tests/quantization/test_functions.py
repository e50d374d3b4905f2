"""Quantized products against their definition in NumPy: codes, exact sums, scales, and gradients."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.quantization import (
    QtRule,
    conv_general_dilated,
    dot_general,
    einsum,
    ragged_dot,
)
from haiku_implicit.quantized.operands import noise

MATRICES = (((1,), (0,)), ((), ()))
# As one program, where JAX would compile each operation.
compiled_dot = jax.jit(
    lambda x, w, rule, **options: dot_general(x, w, MATRICES, rule=rule, **options),
    static_argnames=("rule", "preferred_element_type"),
)
INT8 = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
NAMES = ("out", "dlhs", "drhs")

# One rounding of the scales and one of each product, and sums of a few float32 terms.
close = functools.partial(np.testing.assert_allclose, rtol=3e-6, atol=3e-6)


def normal(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# --- the definition ------------------------------------------------------------------------------

BITS = {"int8": 8, "int4": 4, "int2": 2}
FLOATS = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def codes_of(x, qtype, axes):
    """Codes and scales: one scale for all elements along `axes`.

    The largest magnitude of integers lies on a tie between two codes: it is the arithmetic of float32
    that decides.
    """
    x = np.asarray(x, np.float32)
    bound = (
        float(ml_dtypes.finfo(FLOATS[qtype]).max)
        if qtype in FLOATS
        else 2.0 ** BITS[qtype] / 2 - 0.5
    )
    scale = np.abs(x).max(axes, keepdims=True) * np.float32(1 / bound)
    relative = x * (np.float32(1) / scale)
    if qtype in FLOATS:
        codes = np.clip(relative, -bound, bound).astype(FLOATS[qtype])
        return codes.astype(np.float64), scale
    codes = np.clip(np.round(relative), -np.ceil(bound), np.floor(bound))
    return codes.astype(np.float64), scale


def rounded(x, qtype, axes):
    if qtype is None:
        return np.asarray(x, np.float64)
    codes, scale = codes_of(x, qtype, axes)
    return codes * scale


def matmul_by_definition(x, w, c, rule):
    """The product of `[m, k]` and `[k, n]`, and the gradients of its sum with the cotangent `c`."""
    codes_w, scale_w = codes_of(w, rule.weight_qtype, 0)
    if rule.act_qtype is None:
        codes_x, scale_x = x.astype(np.float64), np.ones((len(x), 1), np.float32)
    else:
        codes_x, scale_x = codes_of(x, rule.act_qtype, 1)
    out = codes_x @ codes_w * scale_x * scale_w
    if rule.bwd_qtype is None:
        return out, c @ w.T.astype(np.float64), x.T.astype(np.float64) @ c
    # The quantized operands of the forward pass are used again. Their scales go to the gradient first.
    g, scale = codes_of(c * scale_w, rule.bwd_qtype, 1)
    dx = g @ codes_w.T * scale
    g, scale = codes_of(c * scale_x, rule.bwd_qtype, 0)
    return out, dx, codes_x.T @ g * scale


def with_gradients(fun, x, w, c, jit=True):
    """The result, and the gradients of its product with `c`: in one program, or step by step."""

    def both(x, w, c):
        out, pullback = jax.vjp(fun, x, w)
        return out, *pullback(c.astype(out.dtype))

    return (jax.jit(both) if jit else both)(*map(jnp.asarray, (x, w, c)))


def same(found, expected):
    for name, a, b in zip(NAMES, found, expected, strict=True):
        close(a, b, err_msg=name)


# --- dot_general ---------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "weight, act, bwd",
    [
        ("int8", "int8", "int8"),
        ("int8", "int8", "int4"),
        ("int8", "int8", None),
        ("int4", None, "int8"),
        ("int4", None, None),
        ("fp8_e4m3", "int8", "int8"),
        ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"),
        ("int2", "int8", "fp8_e5m2"),
    ],
)
def test_matmul_is_its_definition(weight, act, bwd):
    rule = QtRule(weight_qtype=weight, act_qtype=act, bwd_qtype=bwd)
    x, w, c = normal((5, 12), 0), normal((12, 7), 1), np.abs(normal((5, 7), 2))
    fun = lambda x, w: dot_general(x, w, MATRICES, rule=rule)  # noqa: E731
    expected = matmul_by_definition(x, w, c, rule)
    same(with_gradients(fun, x, w, c), expected)
    if (weight, bwd) == ("int8", "int8"):
        same(with_gradients(fun, x, w, c, jit=False), expected)


def test_integers_are_multiplied_as_integers_and_summed_exactly():
    closed = jax.make_jaxpr(lambda x, w: with_gradients(
        lambda x, w: dot_general(x, w, MATRICES, precision="highest", rule=INT8), x, w,
        jnp.ones((4, 4))))(jnp.ones((4, 4)), jnp.ones((4, 4)))  # fmt: skip
    dots = [line for line in str(closed).splitlines() if " = dot_general[" in line]
    assert len(dots) == 3 and all("i32[4,4] = dot_general" in line for line in dots)
    # A sum of 2 ** 16 products of 127 with 127 is more than float32 counts in ones.
    x = jnp.ones((1, 1 << 16)).at[0, 0].set(-1)
    out = compiled_dot(x, jnp.ones((1 << 16, 1)), rule=INT8)
    total = ((1 << 16) - 1) * 127 * 127 - 127 * 128
    close(out[0, 0], total / 127.5**2, rtol=1e-6)


@pytest.mark.parametrize(
    "numbers, shapes",
    [
        ((((2,), (1,)), ((0,), (0,))), ((3, 4, 6), (3, 6, 5))),
        ((((1,), (2,)), ((2,), (0,))), ((4, 6, 3), (3, 5, 6))),
        ((((0, 2), (1, 0)), ((), ())), ((2, 4, 3), (3, 2, 5))),
        ((((), ()), ((), ())), ((3,), (2,))),
        ((((0,), (0,)), ((), ())), ((6,), (6,))),
    ],
    ids=["batch", "batch elsewhere", "two summed axes", "outer", "inner"],
)
def test_axes_in_any_place(numbers, shapes):
    """As one matrix product for each index of the batch axes."""
    x, w = (normal(shape, seed) for seed, shape in enumerate(shapes))
    (x_sum, w_sum), (x_batch, w_batch) = numbers
    free = [[i for i in range(y.ndim) if i not in (*s, *b)]
            for y, s, b in ((x, x_sum, x_batch), (w, w_sum, w_batch))]  # fmt: skip
    c = np.abs(
        normal(jax.eval_shape(lambda x, w: jax.lax.dot_general(x, w, numbers), x, w).shape, 5)
    )
    orders = ((*x_batch, *free[0], *x_sum), (*w_batch, *w_sum, *free[1]))
    size = int(np.prod([x.shape[i] for i in x_sum], dtype=int))
    batch = [x.shape[i] for i in x_batch]
    xs = x.transpose(orders[0]).reshape(int(np.prod(batch, dtype=int)), -1, size)
    ws = w.transpose(orders[1]).reshape(len(xs), size, -1)
    cs = c.reshape(len(xs), xs.shape[1], ws.shape[2])
    parts = [matmul_by_definition(*xwc, INT8) for xwc in zip(xs, ws, cs, strict=True)]
    out, dx, dw = (np.stack(part) for part in zip(*parts, strict=True))
    dx, dw = (
        dy.reshape([y.shape[i] for i in order]).transpose(np.argsort(order))
        for dy, y, order in ((dx, x, orders[0]), (dw, w, orders[1]))
    )
    fun = functools.partial(dot_general, dimension_numbers=numbers, rule=INT8)
    same(with_gradients(fun, x, w, c), (out.reshape(c.shape), dx, dw))


@pytest.mark.combinations
@pytest.mark.parametrize("k, tile", [(12, 4), (12, 0.5), (256, 128), (256, 0.5)])
@pytest.mark.parametrize("weight, act", [("int8", "int8"), ("int4", None)])
def test_tiles_are_products_of_their_own(k, tile, weight, act):
    rule = QtRule(weight_qtype=weight, act_qtype=act, bwd_qtype="int8", tile_size=tile)
    x, w, c = normal((5, k), 0), normal((k, 7), 1), np.abs(normal((5, 7), 2))
    size = round(k * tile) if isinstance(tile, float) else tile
    out = sum(
        matmul_by_definition(x[:, i : i + size], w[i : i + size], c, rule)[0]
        for i in range(0, k, size)
    )
    # The scales of tiles lie along an axis that the backward pass has in its results: it uses the
    # operands as they were, and so it is the gradient alone that is rounded.
    dx = rounded(c, "int8", 1) @ w.T
    dw = x.T @ rounded(c, "int8", 0)
    fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule)
    found = with_gradients(fun, x, w, c)
    for a, b in zip(found, (out, dx, dw), strict=True):
        close(a, b, rtol=1e-5, atol=2e-5)  # sums of up to 256 terms in another order


def test_tiles_of_the_weights_gradient():
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int4",
                  bwd_weight_grad_tile_size=2)  # fmt: skip
    x, w, c = normal((6, 8), 0), normal((8, 5), 1), np.abs(normal((6, 5), 2))
    codes, scale = codes_of(x, "int8", 1)
    expected = sum(
        codes[i : i + 2].T @ rounded((c * scale)[i : i + 2], "int4", 0) for i in range(0, 6, 2)
    )
    fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule)
    close(with_gradients(fun, x, w, c)[2], expected)
    big = [np.tile(y, (64, 1)) for y in (x, c)]  # tiles of 128 rows: products of integers again
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int4",
                  bwd_weight_grad_tile_size=128)  # fmt: skip
    codes, scale = codes_of(big[0], "int8", 1)
    expected = sum(
        codes[i : i + 128].T @ rounded((big[1] * scale)[i : i + 128], "int4", 0)
        for i in range(0, 384, 128)
    )
    fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule)
    close(with_gradients(fun, big[0], w, big[1])[2], expected, rtol=2e-5)


def test_one_scale_for_all_channels():
    rule = QtRule(weight_qtype="int8", act_qtype="int8", disable_channelwise_axes=True)
    x, w = normal((5, 12), 0), normal((12, 7), 1)
    expected = rounded(x, "int8", (0, 1)) @ rounded(w, "int8", (0, 1))
    close(dot_general(x, w, MATRICES, rule=rule), expected)


@pytest.mark.parametrize(
    "method, largest",
    [
        ("absmax,0.5", lambda w: np.abs(w).max(0) * 0.5),
        ("rms,1.5", lambda w: np.sqrt((w * w).mean(0)) * 1.5),
        ("percentile,80", lambda w: np.percentile(np.abs(w), 80, axis=0)),
        ("fixed,-1.25,1.25", lambda w: np.full(w.shape[1], 1.25)),
        ("fixed,1.25", lambda w: np.full(w.shape[1], 1.25)),
    ],
)
def test_calibrations_clip_values_and_their_gradients(method, largest):
    rule = QtRule(weight_qtype="int8", weight_calibration_method=method)
    x, w, c = normal((5, 12), 0), normal((12, 7), 1), normal((5, 7), 2)
    scale = largest(w) / 127.5
    fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule)
    out, dx, dw = with_gradients(fun, x, w, c)
    close(out, x @ (np.clip(np.round(w / scale), -128, 127) * scale), rtol=1e-5, atol=1e-5)
    inside = np.abs(w) <= largest(w) * (1 + 1e-6)  # rounding of the limit itself
    assert 0 < inside.mean() < 1
    close(dw, np.where(inside, x.T @ c, 0), rtol=1e-5, atol=1e-5)
    close(dx, c @ w.T, rtol=1e-5, atol=1e-5)
    everywhere = {"disable_gradient_clipping": True}
    rule = QtRule(
        weight_qtype="int8", weight_calibration_method=method, additional_qt_config=everywhere
    )
    fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule)
    close(with_gradients(fun, x, w, c)[2], x.T @ c, rtol=1e-5, atol=1e-5)


def test_a_zero_point_on_either_side():
    rule = QtRule(weight_qtype="int8", act_qtype="int4", act_calibration_method="minmax",
                  weight_calibration_method="minmax", bwd_qtype="int8")  # fmt: skip
    x, w, c = normal((5, 12), 0) + 1, normal((12, 7), 1) - 1, np.abs(normal((5, 7), 2))

    def values(x, bits, axis):
        low = np.minimum(x.min(axis, keepdims=True), 0)
        high = np.maximum(x.max(axis, keepdims=True), 0)
        scale = (high - low) / (2**bits - 1)
        zero = np.round(-(2 ** (bits - 1)) - low / scale)
        codes = np.clip(np.round(x / scale + zero), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return (codes - zero) * scale

    xq, wq = values(x, 4, 1), values(w, 8, 0)
    expected = xq @ wq, rounded(c, "int8", 1) @ wq.T, xq.T @ rounded(c, "int8", 0)
    fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule)
    for a, b in zip(with_gradients(fun, x, w, c), expected, strict=True):
        close(a, b, rtol=1e-5, atol=2e-5)


def test_formats_of_a_table_are_multiplied_as_their_values():
    rule = QtRule(weight_qtype="nf4", act_qtype="int8", bwd_qtype="int8")
    x, w, c = normal((5, 12), 0), normal((12, 7), 1), np.abs(normal((5, 7), 2))
    wq = hki.materialize(hki.QuantizedMatrix.quantize(jnp.asarray(w), "nf4"))
    out, dx, _ = with_gradients(
        functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule), x, w, c
    )
    close(out, rounded(x, "int8", 1) @ np.asarray(wq, np.float64), rtol=1e-5, atol=1e-5)
    close(dx, rounded(c, "int8", 1) @ np.asarray(wq, np.float64).T, rtol=1e-5, atol=1e-5)


def test_overrides_say_what_the_backward_pass_sees():
    x, w, c = normal((5, 12), 0), normal((12, 7), 1), np.abs(normal((5, 7), 2))

    def gradient(**extra):
        rule = QtRule(weight_qtype="int4", act_qtype="int4", additional_qt_config=extra)
        fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule)
        return with_gradients(fun, x, w, c)[1]

    close(gradient(), c @ w.T, rtol=1e-5, atol=1e-5)
    straight_through = c @ rounded(w, "int4", 0).T
    close(gradient(use_original_residuals=False), straight_through, rtol=1e-5, atol=1e-5)
    by_rows = c @ rounded(w, "int2", 1).T
    close(gradient(dlhs_residual_qtype="int2"), by_rows, rtol=1e-5, atol=1e-5)


# --- what JAX's functions take -------------------------------------------------------------------


@pytest.mark.parametrize("weight, act", [("int8", "int8"), ("int8", None), ("fp8", "fp8")])
def test_result_dtypes_are_those_of_jax(weight, act):
    rule = QtRule(weight_qtype=weight, act_qtype=act, bwd_qtype=act)
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    for preferred in (None, jnp.float32):
        fun = functools.partial(
            dot_general, dimension_numbers=MATRICES, rule=rule, preferred_element_type=preferred
        )
        of_fun = functools.partial(with_gradients, fun)
        out, dx, dw = jax.eval_shape(of_fun, x, w, jnp.ones((2, 4)))
        assert out.dtype == (preferred or jnp.bfloat16)
        assert dx.dtype == dw.dtype == jnp.bfloat16
    mixed = compiled_dot(x, w.astype(jnp.float32), rule=rule)
    assert mixed.dtype == jnp.float32


def test_preferred_element_type_is_not_rounded_before():
    x, w = (
        y.astype(ml_dtypes.bfloat16).astype(np.float32)
        for y in (normal((4, 64), 0), normal((64, 4), 1))
    )
    exact = rounded(x, "int8", 1) @ rounded(w, "int8", 0)
    out = dot_general(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), MATRICES,
                      rule=INT8, preferred_element_type=jnp.float32)  # fmt: skip
    close(out, exact, rtol=1e-5, atol=1e-5)  # bfloat16 would be off by 0.2 %


def test_precision_is_that_of_dense_products():
    weight_only = QtRule(weight_qtype="int8")
    args = jnp.ones((2, 3)), jnp.ones((3, 4))
    for fun in (
        lambda x, w: dot_general(x, w, MATRICES, "highest", rule=weight_only),
        lambda x, w: einsum("ij,jk->ik", x, w, precision="highest", rule=weight_only),
    ):
        both = functools.partial(with_gradients, fun)
        text = str(jax.make_jaxpr(both)(*args, jnp.ones((2, 4))))
        assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 3


def test_out_sharding_is_that_of_the_result():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    use_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
    x, w, c = normal((4, 6), 0), normal((6, 8), 1), np.abs(normal((4, 8), 2))
    expected = matmul_by_definition(x, w, c, INT8)
    with use_mesh(mesh):
        put = lambda y, *spec: jax.device_put(y, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
        for spec in ((None, "i"), ("i", None), (None, None)):
            fun = functools.partial(
                dot_general, dimension_numbers=MATRICES, rule=INT8, out_sharding=P(*spec)
            )
            found = with_gradients(fun, put(x, None, "i"), put(w, "i", None), put(c, *spec))
            assert [y.sharding.spec for y in found] == [P(*spec), P(None, "i"), P("i", None)]
            same([np.asarray(y) for y in found], expected)


def test_vmap_and_scan_are_loops():
    xs, ws = normal((3, 5, 12), 0), normal((3, 12, 7), 1)
    cs = np.abs(normal((3, 5, 7), 2))
    one = lambda x, w, c: with_gradients(  # noqa: E731
        functools.partial(dot_general, dimension_numbers=MATRICES, rule=INT8), x, w, c
    )
    expected = [np.stack(y) for y in zip(*map(lambda *a: matmul_by_definition(*a, INT8), xs, ws, cs),
                                         strict=True)]  # fmt: skip
    same(jax.vmap(one)(xs, ws, cs), expected)
    same(jax.lax.scan(lambda _, xwc: (None, one(*xwc)), None, (xs, ws, cs))[1], expected)
    shared = jax.vmap(lambda x, c: one(x, jnp.asarray(ws[0]), c))(xs, cs)
    same(shared, [np.stack(y) for y in zip(*(matmul_by_definition(x, ws[0], c, INT8)
                                             for x, c in zip(xs, cs, strict=True)), strict=True)])  # fmt: skip


def test_what_is_not_floating_is_not_quantized():
    x = jnp.arange(6).reshape(2, 3)
    w = normal((3, 4), 0)
    out = dot_general(x, w, MATRICES, rule=INT8)
    close(out, np.asarray(x) @ rounded(w, "int8", 0), rtol=1e-5)
    dw = jax.grad(lambda w: dot_general(x, w, MATRICES, rule=INT8).sum())(jnp.asarray(w))
    close(dw, np.asarray(x).T @ np.full((2, 4), 127 / 127.5), rtol=1e-5)


def test_jax_says_what_is_wrong_with_shapes():
    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        dot_general(jnp.ones((2, 3)), jnp.ones((2, 3)), MATRICES, rule=INT8)
    tiled = QtRule(weight_qtype="int8", tile_size=5)
    with pytest.raises(ValueError, match="tile_size: expected one that divides .* 3, got 5"):
        dot_general(jnp.ones((2, 3)), jnp.ones((3, 2)), MATRICES, rule=tiled)
    unfit = QtRule(weight_qtype="fp8", weight_calibration_method="minmax")
    with pytest.raises(ValueError, match="need an integer format, got 'fp8_e4m3'; use 'absmax'"):
        dot_general(jnp.ones((2, 3)), jnp.ones((3, 2)), MATRICES, rule=unfit)
    with pytest.raises(ValueError, match="expected 'fixed,LOW,HIGH' with LOW <= 0 <= HIGH"):
        rule = QtRule(weight_qtype="int8", weight_calibration_method="fixed,1,2")
        dot_general(jnp.ones((2, 3)), jnp.ones((3, 2)), MATRICES, rule=rule)


# --- unusual values ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_small_and_zero_values(dtype):
    x = np.zeros((2, 4), dtype)
    x[1] = [1e-4, -2e-4, 3e-4, 0]
    w = np.eye(4, dtype=dtype)
    out = np.asarray(compiled_dot(x, w, rule=INT8, preferred_element_type=jnp.float32))
    assert (out[0] == 0).all()
    np.testing.assert_allclose(out[1], x[1].astype(np.float32), atol=3e-4 / 127)


METHODS = ("absmax", "absmax,0.8", "rms,3", "percentile,90", "minmax", "fixed,-1,1", "fixed,-1,2")


@pytest.mark.combinations
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, dict(tile_size=20), dict(act_qtype="fp8")])
def test_what_is_not_finite_shows_in_its_own_row(bad, method, options):
    if "act_qtype" in options and method in ("minmax", "fixed,-1,2"):
        method = "absmax"  # these are for integers
    options = dict(weight_qtype="int8", act_qtype="int8", act_calibration_method=method) | options
    x, w = normal((3, 40), 0), normal((40, 4), 1)
    product = jax.jit(lambda x, w: dot_general(x, w, MATRICES, rule=QtRule(**options)))
    want = np.asarray(product(x, w))
    x[1, 5] = bad
    out = np.asarray(product(x, w))
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_a_weight_shows_in_its_column(bad):
    """By a rule with a range that does not follow the weight."""
    rule = QtRule(weight_qtype="int8", act_qtype="int8", weight_calibration_method="fixed,-1,1")
    x, w = normal((3, 40), 0), normal((40, 4), 1)
    want = np.asarray(compiled_dot(x, w, rule=rule))
    w[3, 2] = bad
    out = np.asarray(compiled_dot(x, w, rule=rule))
    assert np.isnan(out[:, 2]).all()
    np.testing.assert_array_equal(np.delete(out, 2, 1), np.delete(want, 2, 1))


@pytest.mark.parametrize("axis", [0, 1])
def test_zeros_do_not_coarsen_the_gradients_of_others(axis):
    """Scales multiply the gradient before it is quantized, and some rows or columns are all zero."""
    x, w, c = normal((6, 5), 0), normal((5, 4), 1), normal((6, 4), 2)
    (x if axis == 0 else w.T)[1] = 0
    fun = lambda x, w: (c * dot_general(x, w, MATRICES, rule=INT8)).sum()  # noqa: E731
    dx, dw = jax.jit(jax.grad(fun, argnums=(0, 1)))(x, w)
    for got, want in ((dx, c @ w.T), (dw, x.T @ c)):
        np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max())  # some 8-bit terms


@pytest.mark.slow
def test_sums_that_int32_does_not_hold():
    k = 2**17 + 2**13
    x, rule = -jnp.ones((1, k)), QtRule(weight_qtype="int8", act_qtype="int8")
    np.testing.assert_allclose(dot_general(x, x.T, MATRICES, rule=rule), k, rtol=1e-2)
    q = hki.QuantizedMatrix.from_parts(
        np.full((2, k), -128, np.int8), np.ones((2, 1)), dtype="int8"
    )
    np.testing.assert_allclose(dot_general(x, q, MATRICES, rule=rule), k * 128, rtol=1e-2)


def test_empty_operands():
    for m, k, n in ((0, 3, 2), (2, 3, 0)):
        out, dx, dw = with_gradients(
            functools.partial(dot_general, dimension_numbers=MATRICES, rule=INT8),
            jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n)))  # fmt: skip
        assert (out.shape, dx.shape, dw.shape) == ((m, n), (m, k), (k, n))
        assert not dx.any() and not dw.any()


# --- stochastic rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
def test_stochastic_rounding_is_right_on_average(method):
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int2",
                  bwd_stochastic_rounding=method, channelwise_noise_axes=(0, 1))  # fmt: skip
    x, w, c = normal((4, 6), 0), normal((6, 5), 1), np.abs(normal((4, 5), 2)) + 1

    def gradients(key):
        fun = functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule, key=key)
        return with_gradients(fun, x, w, c)[1:]

    n = 2000
    dx, dw = jax.jit(jax.vmap(gradients))(jax.random.split(jax.random.key(0), n))
    codes, scale = codes_of(w, "int8", 0)
    # Of a code that is 1 or 2 by chance, the 2 is out of int2's range: it saturates.
    g, s = c * scale, np.abs(c * scale).max(1, keepdims=True) / 1.5
    expected = (np.minimum(g / s, 1) * s) @ codes.T
    assert np.abs(dx - expected).max() > 0.1 * np.abs(expected).max()
    error = np.abs(np.mean(dx, 0) - expected)
    assert (error < 5 * np.std(dx, 0) / np.sqrt(n) + 1e-3 * np.abs(expected).max()).all()
    np.testing.assert_array_equal(gradients(jax.random.key(3))[1], gradients(jax.random.key(3))[1])


def test_noise_is_what_it_says():
    key = jax.random.key(1)
    for method, axes, shape in (
        ("uniform", (0,), (100, 1, 1)),
        ("low_bit_uniform", (0, 2), (100, 1, 50)),
    ):
        found = np.asarray(noise(key, method, axes, (100, 3, 50)))
        assert found.shape == shape
        assert -0.5 <= found.min() < -0.4 and 0.4 < found.max() < 0.5
        assert abs(found.mean()) < 0.1
    steps = np.unique(np.asarray(noise(key, "low_bit_uniform", (0,), (100_000,))))
    np.testing.assert_array_equal(steps, (np.arange(256) + 0.5) / 256 - 0.5)


def test_stochastic_rounding_without_a_key_is_refused_where_it_is_differentiated():
    rule = QtRule(weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")
    fun = lambda w: dot_general(jnp.ones((2, 3)), w, MATRICES, rule=rule).sum()  # noqa: E731
    fun(jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="needs a random key in each step"):
        jax.grad(fun)(jnp.ones((3, 2)))


# --- einsum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True])
def test_einsum_of_two_is_one_product(swapped):
    rule = QtRule(weight_qtype="int4", act_qtype="int8", bwd_qtype="int8")
    x, w, c = normal((5, 12), 0), normal((12, 7), 1), np.abs(normal((5, 7), 2))
    if swapped:
        fun = lambda x, w: einsum("kn,mk->mn", w, x, rule=rule, weights=0)  # noqa: E731
    else:
        fun = functools.partial(einsum, "mk,kn->mn", rule=rule)
    same(with_gradients(fun, x, w, c), matmul_by_definition(x, w, c, rule))
    close(fun(x, w), matmul_by_definition(x, w, c, rule)[0])


def test_einsum_of_many():
    rule = QtRule(weight_qtype="int8", act_qtype="int4")
    x, v, w = normal((2, 40), 0), normal((40, 3), 1), normal((3, 30), 2)
    # JAX multiplies the first two first; their product is an activation.
    first = rounded(x, "int4", 1) @ rounded(v, "int8", 0)
    expected = rounded(first.astype(np.float32), "int4", 1) @ rounded(w, "int8", 0)
    found = einsum("bi,ij,jk->bk", x, v, w, rule=rule, weights=(1, 2))
    close(found, expected, rtol=1e-5, atol=1e-5)
    half = einsum("bi,ij,jk->bk", *(jnp.asarray(y, jnp.bfloat16) for y in (x, v, w)), rule=rule,
                  weights=(1, 2), preferred_element_type=jnp.float32)  # fmt: skip
    assert half.dtype == jnp.float32
    with pytest.raises(ValueError, match="weights: expected positions among 2 operands, got 2"):
        einsum("ij,jk->ik", v, w, rule=rule, weights=2)


@pytest.mark.slow
def test_einsum_draws_noise_for_each_product():
    rule = QtRule(weight_qtype="int8", bwd_qtype="int2", bwd_stochastic_rounding="uniform")
    x, v, w = (jnp.asarray(normal(s, i)) for i, s in enumerate([(4, 4), (4, 4), (4, 4)]))

    def fun(v, key):
        out = einsum("bi,ij,jk->bk", x, v, w, rule=rule, weights=(1, 2), key=key)
        return (out * normal(out.shape, 5)).sum()

    first, second = (jax.grad(fun)(v, jax.random.key(i)) for i in (0, 1))
    assert (first != second).any()


# --- ragged_dot ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight, act, bwd", [("int8", "int8", "int8"), ("int4", None, None),
                                              ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2")])  # fmt: skip
def test_ragged_dot_is_one_product_for_each_group(weight, act, bwd):
    rule = QtRule(weight_qtype=weight, act_qtype=act, bwd_qtype=bwd)
    x, w, c = normal((7, 6), 0), normal((3, 6, 5), 1), np.abs(normal((7, 5), 2))
    rows = [slice(0, 2), slice(2, 2), slice(2, 7)]
    codes, scale = codes_of(w, weight, (0, 1))  # which the groups share
    xc, xs = (x.astype(np.float64), np.ones((7, 1))) if act is None else codes_of(x, act, 1)
    gx, gw = c @ np.diag(np.ones(5)), c
    sx = sw = 1.0
    if bwd is not None:
        gx, sx = codes_of(c * scale[0], bwd, 1)
        gw, sw = codes_of((c * xs).astype(np.float32), bwd, 0)
    kept = (codes, xc) if bwd is not None else (w.astype(np.float64), x.astype(np.float64))
    out = np.concatenate([xc[r] @ codes[i] for i, r in enumerate(rows)]) * xs * scale[0]
    dx = np.concatenate([gx[r] @ kept[0][i].T for i, r in enumerate(rows)]) * sx
    dw = np.stack([kept[1][r].T @ gw[r] for r in rows]) * sw
    fun = functools.partial(ragged_dot, group_sizes=jnp.array([2, 0, 5]), rule=rule)
    found = with_gradients(fun, x, w, c)
    for a, b in zip(found, (out, dx, dw), strict=True):
        close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bwd", [None, "int8"])
def test_ragged_dot_of_a_stored_weight_with_scales_of_each_group(bwd):
    """Its integers are multiplied, and each row has the scales of its group; none for the last."""
    x, w, sizes = normal((8, 6), 0), normal((3, 6, 5), 1), np.array([2, 0, 5])
    stored = hki.QuantizedMatrix.quantize(w, "int8")
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd)
    fun = functools.partial(ragged_dot, rhs=stored, group_sizes=sizes, rule=rule)
    assert "preferred_element_type=int32" in str(jax.make_jaxpr(fun)(x))
    codes, scale = codes_of(x, "int8", 1)
    rows = [slice(0, 2), slice(2, 2), slice(2, 7)]
    dense = np.asarray(hki.materialize(stored), np.float64)
    products = [(codes * scale)[r] @ dense[i] for i, r in enumerate(rows)]
    c = np.cos(np.arange(40.0, dtype=np.float32)).reshape(8, 5)
    found, pull = jax.vjp(jax.jit(fun), x)
    close(found, np.concatenate([*products, np.zeros((1, 5))]), rtol=1e-5, atol=1e-5)
    gradient = np.concatenate([*(c[r] @ dense[i].T for i, r in enumerate(rows)), np.zeros((1, 6))])
    close(pull(c)[0], gradient, atol=1e-5 if bwd is None else 0.05 * np.abs(gradient).max())


# --- convolutions --------------------------------------------------------------------------------

CONVS = {
    "plain": dict(shapes=((2, 5, 4, 6), (3, 3, 6, 5)), window_strides=(1, 1), padding="SAME"),
    "strides": dict(
        shapes=((2, 6, 5, 6), (3, 2, 6, 4)), window_strides=(2, 1), padding=((1, 2), (0, 1))
    ),
    "dilations": dict(
        shapes=((2, 6, 5, 6), (2, 2, 6, 4)), window_strides=(1, 2), padding=((1, 0), (0, 2)),
        rhs_dilation=(2, 1), lhs_dilation=(1, 2),
    ),
    "feature groups": dict(
        shapes=((2, 5, 4, 6), (3, 3, 2, 9)), window_strides=(1, 1), padding="SAME",
        feature_group_count=3,
    ),
    "depthwise": dict(
        shapes=((2, 5, 4, 6), (3, 3, 1, 6)), window_strides=(1, 1), padding="SAME",
        feature_group_count=6,
    ),
    "batch groups": dict(
        shapes=((4, 5, 4, 6), (3, 3, 6, 8)), window_strides=(1, 1), padding="SAME",
        batch_group_count=2,
    ),
}  # fmt: skip
NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize("shared", [True, False])
def test_a_stored_kernel_has_scales_of_each_position(shared):
    """Where they are all the same, codes are multiplied, and the sums are exact."""
    x, w = normal((2, 6, 5, 4), 0), normal((3, 2, 4, 5), 1)
    stored = hki.QuantizedMatrix.quantize(w, "int8", activation="int8")
    if shared:
        largest = stored.scale.max((0, 1), keepdims=True)
        stored = stored._replace(scale=jnp.broadcast_to(largest, stored.scale.shape))
    fun = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 2), padding="SAME", dimension_numbers=NHWC
    )
    found = jax.jit(hki.use_implicit_args(fun))(x, stored)
    codes, scale = codes_of(x, "int8", (1, 2, 3))
    dense = np.asarray(hki.materialize(stored), np.float64)
    close(found, fun(jnp.asarray(codes * scale), jnp.asarray(dense)), rtol=1e-5, atol=1e-5)
    exact = fun(jnp.asarray(codes, jnp.float32), jnp.swapaxes(stored.codes, -1, -2) * 1.0)
    of_columns = jnp.swapaxes(stored.scale, -1, -2)[0, 0]
    same = np.mean(np.asarray(exact * scale.astype(np.float32) * of_columns) == found)
    assert same == 1 if shared else same < 0.5


@pytest.mark.parametrize(
    "name, bwd",
    [(name, "int8") for name in CONVS]
    + [("plain", None), ("batch groups", None), ("strides", "fp8_e5m2"), ("depthwise", "fp8_e5m2")],
)
@pytest.mark.slow
def test_convolutions_are_their_definition(name, bwd):
    """JAX's dense convolution, linear in each operand, of rounded values."""
    options = dict(CONVS[name], dimension_numbers=NHWC)
    shapes = options.pop("shapes")
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd)
    x, w = normal(shapes[0], 0), normal(shapes[1], 1)
    dense = functools.partial(jax.lax.conv_general_dilated, **options, precision="highest")
    c = np.abs(normal(jax.eval_shape(dense, x, w).shape, 2))
    x_axes = (0, 1, 2, 3) if "batch_group_count" in options else (1, 2, 3)
    (xc, xs), (wc, ws) = codes_of(x, "int8", x_axes), codes_of(w, "int8", (0, 1, 2))
    out = dense(np.float32(xc * xs), np.float32(wc * ws))
    if bwd is None:
        _, dx, dw = with_gradients(dense, x, w, c)
    else:
        g = rounded(c * ws.reshape(1, 1, 1, -1), bwd, x_axes)
        linear = jax.jit(lambda x, w, c: jax.vjp(dense, x, w)[1](c))
        dx = linear(np.float32(xc), np.float32(wc), np.float32(g))[0]
        g = rounded(c * xs, bwd, (0, 1, 2))
        dw = linear(np.float32(xc), np.float32(wc), np.float32(g))[1]
    fun = functools.partial(conv_general_dilated, **options, rule=rule)
    found = with_gradients(fun, x, w, c)
    for label, a, b in zip(NAMES, found, (out, dx, dw), strict=True):
        close(a, b, rtol=1e-5, atol=2e-5 * np.abs(b).max(), err_msg=label)


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("features, tile, groups", [(6, 2, 1), (256, 128, 1), (6, 1, 3)])
def test_tiles_of_convolutions_are_input_features(features, tile, groups):
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", tile_size=tile)
    x, w = normal((2, 5, features), 0), normal((3, features // groups, 6), 1)
    numbers = ("NWC", "WIO", "NWC")
    xt = x.reshape(2, 5, -1, tile)
    xt = rounded(xt, "int8", (1, 3)).reshape(x.shape)
    wt = rounded(w.reshape(3, -1, tile, 6), "int8", (0, 2)).reshape(w.shape)
    dense = functools.partial(jax.lax.conv_general_dilated, window_strides=(1,), padding="SAME",
                              dimension_numbers=numbers, feature_group_count=groups)  # fmt: skip
    quantized = functools.partial(conv_general_dilated, window_strides=(1,), padding="SAME", rule=rule,
                                  dimension_numbers=numbers, feature_group_count=groups)  # fmt: skip
    found = jax.jit(quantized)(x, w)
    close(found, dense(np.float32(xt), np.float32(wt)), rtol=1e-5, atol=5e-5)


@pytest.mark.slow
def test_convolutions_take_all_that_jax_does():
    x, w = jnp.ones((1, 2, 5, 5), jnp.bfloat16), jnp.ones((3, 2, 2, 2), jnp.bfloat16)
    out = conv_general_dilated(x, w, (1, 1), "VALID", preferred_element_type=jnp.float32, rule=INT8)
    assert out.dtype == jnp.float32 and out.shape == (1, 3, 4, 4)
    text = str(jax.make_jaxpr(lambda x, w: conv_general_dilated(
        x, w, (1, 1), "VALID", precision="highest", rule=QtRule(weight_qtype="int8")))(x, w))  # fmt: skip
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in text


# --- stored weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, group", [("int8", None), ("int4", 4), ("fp8_e4m3", None),
                                          ("nf4", None), ("uint4", 4), ("ternary", None),
                                          ("nvfp4", None)])  # fmt: skip
@pytest.mark.slow
def test_stored_matrices_are_taken_as_they_are(dtype, group):
    w = hki.QuantizedMatrix.quantize(jnp.asarray(normal((16, 7), 1)), dtype, group)
    x, c = normal((5, 16), 0), np.abs(normal((5, 7), 2))
    dense = np.asarray(hki.materialize(w), np.float64)
    rule = QtRule(weight_qtype="int2", act_qtype="int8")
    fun = lambda x: dot_general(x, w, MATRICES, rule=rule)  # noqa: E731
    out, pullback = jax.vjp(fun, jnp.asarray(x))
    close(out, rounded(x, "int8", 1) @ dense, rtol=1e-5, atol=1e-5)
    close(pullback(jnp.asarray(c))[0], c @ dense.T, rtol=1e-5, atol=1e-5)
