"""AWQ and SmoothQuant: scales of input channels by their definitions, and the errors with them."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import numpy_normal as normal
from tests.tiers import few

K, M = 64, 48


def with_outliers(n, k=K, seed=0):
    """Inputs as those of transformers: correlated, of different sizes, and a few much larger."""
    mix = np.eye(k, dtype=np.float32) + normal((k, k), seed + 1) / np.sqrt(np.float32(k))
    x = normal((n, k), seed) @ mix * np.exp(0.5 * normal((k,), seed + 2))
    x[:, :: k // 4] *= 20
    return x


def close(a, b, rtol=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def relative(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def dot(x, w):
    return x @ w


# --- the largest inputs ----------------------------------------------------------------------------


def maxima_of_scan(xs):
    """Scales of a weight that all steps of a loop use."""

    def steps(params, xs):
        def step(total, x):
            return total + (x @ params["l"]["w"]).sum(), None

        return jax.lax.scan(step, 0.0, xs)[0]

    return hki.input_maxima(steps, {"l": {"w": jnp.ones((xs.shape[-1], 2))}}, [xs])["l/w"]


def test_maxima_are_those_of_all_inputs():
    def model(x):
        """A weight that is used twice, and one within a checkpoint."""
        first = hk.Linear(4, name="first")
        h = jnp.tanh(first(x)) + first(-3 * x).sum(0)
        return hk.remat(hk.Linear(5, name="second"))(h), hk.Linear(2, name="third")(h).argmax(-1)

    t = hk.without_apply_rng(hk.transform(model))
    batches = normal((6, 3)), 3 * normal((4, 3), 1)
    params = t.init(jax.random.key(0), batches[0])
    got = hki.input_maxima(t.apply, params, batches)
    assert set(got) == {"first/w", "second/w"}  # there is no gradient of a choice
    np.testing.assert_array_equal(got["first/w"], 3 * np.abs(np.concatenate(batches)).max(0))

    def first(x):
        return x @ params["first"]["w"] + params["first"]["b"]

    h = np.concatenate([np.tanh(first(x)) + first(-3 * x).sum(0) for x in batches])
    close(got["second/w"], np.abs(h).max(0))


def test_maxima_of_many_uses_are_close():
    xs = normal((200, 3, 16))
    got, want = maxima_of_scan(xs), np.abs(xs).max((0, 1))
    assert (got <= want * (1 + 1e-6)).all() and (got > want / 2 ** (1 / 8)).all()


def test_maxima_of_unusual_inputs():
    x = np.array([[0.0, 1e-30, 2e-12, 3e30, -np.inf, np.nan, -1e-3]], np.float32)
    for uses in (1, 3):
        got = maxima_of_scan(np.stack([x] * uses))
        # Below 1e-38, a float32 that is not normal, XLA may take zero.
        np.testing.assert_allclose(got, np.abs(x[0]), rtol=1e-6)


# --- AWQ -------------------------------------------------------------------------------------------


def rounded_groups(w, group):
    """int4 by the largest magnitude of groups along the first axis, -8 not used."""
    blocks = w.reshape(-1, group, w.shape[-1])
    scale = np.abs(blocks).max(1, keepdims=True) / 7
    return (np.clip(np.round(blocks / scale), -8, 7) * scale).reshape(w.shape)


def awq_by_definition(w, x, group):
    """The least error of the product, and the weight, by the paper's search in double precision."""
    w, moments = w.astype(np.float64), x.T.astype(np.float64) @ x
    rms = np.sqrt(np.diag(moments))
    best = np.inf, None
    for alpha in np.arange(21) / 20:
        s = np.maximum((rms / rms.max()) ** alpha, 1e-4)
        s = s / np.sqrt(s.max() * s.min())
        s = 1 / np.asarray(jnp.asarray(1 / s, jnp.bfloat16), np.float64)  # as it is held
        found = rounded_groups(w * s[:, None], group) / s[:, None]
        error = np.trace((found - w).T @ moments @ (found - w))
        best = min(best, (error, found), key=lambda pair: pair[0])
    return best


def test_awq_is_that_of_the_paper():
    w, x = normal((K, M)), with_outliers(256)
    new = hki.quantize_with_inputs(
        {"l": {"w": w}}, {"l/w": x.T @ x}, method="awq", group_size=16, calibration="absmax"
    )["l"]["w"]
    assert isinstance(new, hki.ScaledMatrix) and isinstance(new.matrix, hki.QuantizedMatrix)
    error, want = awq_by_definition(w, x, 16)
    got = np.asarray(hki.materialize(new))
    close(np.linalg.norm(x @ (got - w)) ** 2, error, rtol=1e-3)
    # A value halfway between two codes, in single precision, may fall to the other side.
    assert np.isclose(got, want, rtol=1e-4).mean() > 0.99


FORMATS = {
    "int4": dict(dtype="int4", group_size=16),
    "int4, mse": dict(dtype="int4", group_size=16, calibration="mse"),
    "uint4": dict(dtype="int4", group_size=16, zero_point=True),
    "nf4": dict(dtype="nf4", group_size=16, scale_dtype="bfloat16"),
    "int3 per channel": dict(dtype="int3"),
    "mxfp4": dict(dtype="mxfp4"),
    "padded": dict(dtype="int2"),
}


@pytest.mark.parametrize("name", few(FORMATS, "int4", "nf4"))
@pytest.mark.slow
def test_outputs_have_less_error(name, never_dense):
    """Than those of rounding alone by the same calibration; least of all where GPTQ rounds, too."""
    k = K - 2 if name == "padded" else K
    w, x, options = normal((k, M)), with_outliers(256, k), FORMATS[name]
    options = dict(calibration=None) | options

    def error(new):
        return relative(hki.use_implicit_args(dot)(x, new["l"]["w"]), x @ w)

    params, inputs = {"l": {"w": w}}, {"l/w": x.T @ x}
    rounded = error(hki.quantize_params(params, **options))
    awq, both = (
        error(hki.quantize_with_inputs(params, inputs, method=method, **options))
        for method in ("awq", "awq+gptq")
    )
    # Scaling does least for codes that are floating, as those of mxfp4.
    assert awq < 0.98 * rounded and both < 0.98 * awq


@pytest.mark.slow
def test_awq_of_half_precision(never_dense):
    """The dtype stays, and quantizing starts from values that were not rounded again."""
    w, x = jnp.asarray(normal((K, M)), jnp.bfloat16), with_outliers(256)
    wide = w.astype(jnp.float32)
    run = jax.jit(lambda w: hki.quantize_with_inputs({"w": w}, {"w": x.T @ x}, method="awq")["w"])
    new, same = run(w), run(wide)
    assert (new.dtype, new.matrix.dtype, same.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(new.matrix.codes, same.matrix.codes)
    got = hki.use_implicit_args(dot)(jnp.asarray(x, jnp.bfloat16), new)
    assert got.dtype == jnp.bfloat16
    assert relative(np.asarray(got, np.float32), x @ hki.materialize(same)) < 0.01  # 8 bits


@pytest.mark.slow
def test_awq_of_inputs_that_are_never_seen():
    w, x = normal((K, M)), with_outliers(32)
    x[:, 3] = 0
    for moments in (x.T @ x, np.zeros((K, K), np.float32)):
        for method in ("awq", "awq+gptq"):
            new = hki.quantize_with_inputs(
                {"l": {"w": w}}, {"l/w": jnp.asarray(moments)}, method=method, dtype="int8"
            )
            assert np.abs(hki.materialize(new)["l"]["w"] - w).max() < 0.3


# --- SmoothQuant -----------------------------------------------------------------------------------

W8A8 = dict(dtype="int8", activation="int8", calibration="absmax")


def rounded_rows(x):
    """Rows of int8 as activations are rounded, see `test_activations`."""
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127.5)
    return np.clip(np.round(x * (1 / scale)), -128, 127) * scale


def smooth(w, x, alpha=None, **options):
    method = "smoothquant" if alpha is None else f"smoothquant, {alpha}"
    inputs = {"l/w": jnp.abs(x).max(0)}
    new = hki.quantize_with_inputs({"l": {"w": w}}, inputs, method=method, **W8A8 | options)
    return new["l"]["w"]


@pytest.mark.parametrize("alpha", [None, 0.75])
def test_smoothquant_is_that_of_the_paper(alpha, never_dense):
    w, x = 0.1 * normal((K, M)), with_outliers(32)
    new = smooth(w, x, alpha)
    of_x, of_w = np.abs(x).max(0), np.abs(w).max(1)
    s = of_x ** (alpha or 0.5) / of_w ** (1 - (alpha or 0.5))
    held = 1 / np.asarray(new.scale, np.float32)
    np.testing.assert_allclose(held, s, rtol=2**-8)  # what bfloat16 rounds
    step = np.abs(w * held[:, None]).max(0) / 127
    quantized = np.round(w * held[:, None] / step) * step
    close(hki.materialize(new), quantized / held[:, None], rtol=1e-4)
    want = rounded_rows(x / held) @ quantized
    run = hki.use_implicit_args(dot)
    # A quotient that lies on a tie may round either way.
    tie = np.abs(x / held).max() / 127.5 * np.abs(quantized).max()
    for got in (run(x, new), jax.jit(run)(x, new)):
        assert np.abs(got - want).max() < tie + 1e-4
        assert np.median(np.abs(got - want)) < 1e-5
    np.testing.assert_allclose(jax.vmap(run, (0, None))(x, new), want, atol=tie + 1e-4)
    # Straight through the rounding: the gradient is that of the weight that is held.
    grad = jax.grad(lambda x: (run(x, new) * np.cos(np.arange(M))).sum())(x)
    close(grad, np.tile(quantized / held[:, None] @ np.cos(np.arange(M)), (32, 1)), rtol=1e-4)


@pytest.mark.parametrize("options", [{}, dict(calibration="mse"), dict(group_size=16)])
@pytest.mark.slow
def test_smoothquant_has_less_error_than_dynamic_quantization(options, never_dense):
    w, x = 0.1 * normal((K, M)), with_outliers(256)
    plain = hki.quantize_params({"l": {"w": w}}, **W8A8 | options)["l"]["w"]
    run = hki.use_implicit_args(dot)
    assert relative(run(x, smooth(w, x, **options)), x @ w) < 0.6 * relative(run(x, plain), x @ w)


def test_smoothquant_of_channels_that_are_never_used():
    w, x = normal((K, M)), with_outliers(32)
    x[:, 3] = 0
    w[5] = 0
    new = smooth(w, x)
    assert new.scale[3] == new.scale[5] == 1
    got = hki.materialize(new)
    assert not got[5].any() and np.abs(got - w).max() < 0.3


# --- in a model ------------------------------------------------------------------------------------


def stacked(x):
    """Three layers of a transformer's feed-forward part, whose norms make channels of all sizes."""

    def layer(x):
        h = hk.LayerNorm(-1, True, True)(x)
        return x + hk.Linear(32, name="down")(jax.nn.gelu(hk.Linear(64, name="up")(h)))

    return hk.experimental.layer_stack(3)(layer)(x)


@pytest.mark.parametrize("method", few(["awq", "awq+gptq", "smoothquant"]))
def test_stacked_layers(method, never_dense):
    t = hk.without_apply_rng(hk.transform(stacked))
    x = normal((64, 32))
    params = t.init(jax.random.key(0), x)
    norm = next(name for name in params if "norm" in name)
    params[norm] = dict(params[norm], scale=np.exp(1.5 * normal((3, 32), 1)))
    collect, options = hki.input_moments, dict(dtype="int4", group_size=16)
    if method == "smoothquant":
        collect, options = hki.input_maxima, dict(dtype="int8", activation="int8")
    inputs = collect(t.apply, params, [x[:32], x[32:]])
    assert len(inputs) == 2
    apply, want = hki.transform_implicit(t).apply, t.apply(params, x)
    plain = apply(hki.quantize_params(params, calibration="mse", **options), x)
    new = hki.quantize_with_inputs(params, inputs, method=method, **options)
    # Each layer's scales are those that it has alone.
    path = next(path for path in inputs if "up" in path)
    module, name = path.rsplit("/", 1)
    alone = hki.quantize_with_inputs(
        {"l": {"w": params[module][name][1]}}, {"l/w": inputs[path][1]}, method=method, **options
    )["l"]["w"]
    close(hki.materialize(new)[module][name][1], hki.materialize(alone), rtol=1e-4)
    for run in (apply, jax.jit(apply)):
        assert relative(run(new, x), want) < 0.9 * relative(plain, want)
    grad = jax.grad(lambda x: apply(new, x).sum())(x)
    assert relative(grad, jax.grad(lambda x: t.apply(params, x).sum())(x)) < 0.2


def test_errors():
    params, inputs = {"l": {"w": jnp.ones((4, 2))}}, {"l/w": jnp.ones(4)}
    with pytest.raises(ValueError, match="method: expected one of gptq, awq, .*, got 'obq'"):
        hki.quantize_with_inputs(params, inputs, method="obq")
    for wrong in ("awq,0.5", "smoothquant,", "smoothquant,2"):
        with pytest.raises(ValueError, match=f"method: expected .*, got '{wrong}'"):
            hki.quantize_with_inputs(params, inputs, method=wrong, activation="int8")
    with pytest.raises(ValueError, match="expected activation='int8' or the like"):
        hki.quantize_with_inputs(params, inputs, method="smoothquant")
    with pytest.raises(
        ValueError, match=r"l/w: .*what input_maxima says, \[..., k\], got .*\[4, 4\]"
    ):
        hki.quantize_with_inputs(
            params, {"l/w": jnp.eye(4)}, method="smoothquant", activation="int8"
        )
    with pytest.raises(ValueError, match=r"l/w .*group_size"):
        hki.quantize_with_inputs(params, {"l/w": jnp.eye(4)}, method="awq", group_size=3)
