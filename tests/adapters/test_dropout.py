"""Dropout of what LoRA's corrections see."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.adapter_cases import normal
from tests.tiers import few

N, M, R, RATE = 12, 8, 2, 0.25


def lora(lead=(), base=None):
    w = normal((*lead, N, M)) if base is None else base
    return hki.LoRA(w, normal((*lead, N, R), 1), normal((*lead, R, M), 2), 3.0)


def dropped(w, seed=0, rate=RATE):
    return hki.with_dropout({"m": {"w": w}}, jax.random.key(seed), rate)["m"]["w"]


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def test_the_correction_alone_sees_it(never_dense):
    """Each input of the correction is 0 or 4/3 of itself: read from a correction that is the identity."""
    w = hki.LoRA(normal((N, N)), jnp.eye(N), jnp.eye(N))
    x = 1 + jnp.abs(normal((500, N), 3))
    seen = hki.use_implicit_args(jnp.matmul)(x, dropped(w)) - x @ w.w
    ratio = np.asarray(seen / x)
    np.testing.assert_allclose(ratio, np.where(ratio > 0.5, 4 / 3, 0), atol=1e-5)
    assert abs((ratio < 0.5).mean() - RATE) < 0.03
    other = hki.use_implicit_args(jnp.matmul)(x, dropped(w, 1)) - x @ w.w
    assert ((seen < 0.5) != (other < 0.5)).mean() > 0.2


def test_integers_are_scaled(never_dense):
    w, x = dropped(lora()), jnp.ones((3, N), jnp.int8)
    run = hki.use_implicit_args(jnp.matmul)
    close(run(x, w), run(x.astype(jnp.float32), w))
    eight = hki.use_implicit_args(
        lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.float32)
    )
    close(eight(x.astype(jnp.float8_e4m3fn), w), run(x.astype(jnp.float32), w))


BASES = ["dense", "int8", "nf4"]


@pytest.mark.parametrize("base", few(BASES, "int8"))
def test_the_expectation_is_without(base, never_dense):
    w = None if base == "dense" else hki.QuantizedMatrix.quantize(normal((N, M)), base)
    w, x = lora(base=w), normal((3, N), 3)
    run = hki.use_implicit_args(lambda w: (x @ w, w.T @ x.T))
    sample = jax.jit(jax.vmap(lambda key: run(hki.with_dropout({"w": w}, key, RATE)["w"])))
    # (The mean of 4000; a standard error is a hundredth of the deviation.)
    samples = sample(jax.random.split(jax.random.key(0), 4000))
    for got, want in zip(samples, run(w), strict=True):
        error = np.abs(got.mean(0) - want) / (got.std(0) / 4000**0.5)
        assert error.max() < 5


def test_gradients_are_those_of_the_mask(never_dense):
    """Against the same computed with a mask by hand."""
    w, x = lora(), normal((5, N), 3)
    key = dropped(w).delta.key
    mask = jax.random.bernoulli(key, 1 - RATE, x.shape)

    def by_hand(ab, x):
        low = jnp.where(mask, x / (1 - RATE), 0) @ ab[0] @ ab[1]
        return ((x @ w.w + 1.5 * low) ** 2).sum()

    def ours(ab, x):
        own = dropped(w._replace(a=ab[0], b=ab[1]))
        return (hki.use_implicit_args(jnp.matmul)(x, own) ** 2).sum()

    for f in (ours, jax.jit(ours), jax.checkpoint(ours)):
        got = jax.grad(f, (0, 1))((w.a, w.b), x)
        jax.tree.map(close, got, jax.grad(by_hand, (0, 1))((w.a, w.b), x))


def net(x):
    layers = hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(N, name="in")(x)))
    return hk.Linear(M, name="out")(layers(x))


@pytest.mark.slow
def test_a_model_in_training(never_dense):
    """Stacked layers have masks of their own, checkpoints the same ones, and a rate of 0 is free."""
    model = hk.without_apply_rng(hk.transform(net))
    x = normal((4, N), 3)
    params = hki.add_lora(model.init(jax.random.key(0), x), 0, rank=R, init="pissa")
    apply = hki.transform_implicit(model).apply
    trained, frozen = hki.partition(params, trainable_dense=False)

    def loss(trained, key, apply=apply, rate=RATE):
        params = hki.with_dropout(hki.combine(trained, frozen), key, rate)
        return (apply(params, x) ** 2).sum()

    key = jax.random.key(1)
    grads = jax.jit(jax.grad(loss))(trained, key)
    again = jax.grad(lambda t: loss(t, key, apply=jax.checkpoint(apply)))(trained)
    jax.tree.map(lambda a, b: close(a, b, 1e-5), grads, again)
    keys = next(
        w["w"].delta.key
        for w in hki.with_dropout(params, key, RATE).values()
        if w["w"].delta.key.shape
    )
    assert keys.shape == (3,) and len(np.unique(jax.random.key_data(keys), axis=0)) == 3
    assert hki.with_dropout(params, key, 0) is params
    assert loss(trained, key) != loss(trained, jax.random.key(2))


@pytest.mark.slow
def test_views_embeddings_and_kernels(may_be_dense):
    """Attention's weights are dropped out as matrices; look-ups see none; kernels see it, too."""
    w = hki.MatrixView.of(normal((N, 2, 4)), [-3], [-2, -1], lambda w: lora(base=w))
    x = normal((5, N), 3)
    got = hki.use_implicit_args(lambda w: jnp.einsum("ba,ahc->bhc", x, w))(dropped(w))
    key = dropped(w).matrix.delta.key
    seen = jnp.where(jax.random.bernoulli(key, 1 - RATE, x.shape), x / (1 - RATE), 0)
    delta = w.matrix.delta().reshape(N, 2, 4)
    close(
        got,
        jnp.einsum("ba,ahc->bhc", x, w.matrix.w.reshape(N, 2, 4)) + jnp.tensordot(seen, delta, 1),
    )
    table = lora()
    rows = hki.use_implicit_args(lambda w: w[jnp.array([1, 5])])
    close(rows(dropped(table)), rows(table))
    logits = hki.use_implicit_args(lambda w: normal((3, M), 4) @ w.T)
    assert np.abs(logits(dropped(table)) - logits(table)).max() > 1e-2
    halves = hki.use_implicit_args(lambda w: [x @ part for part in jnp.split(w, 2, -1)])
    apart = hki.use_implicit_args(lambda w: x @ w)(dropped(table))
    close(jnp.concatenate(halves(dropped(table)), -1), apart)
    kernel = lora((3,))
    conv = hki.use_implicit_args(
        lambda w: jax.lax.conv_general_dilated(
            normal((1, 5, N), 4), w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        )
    )
    assert np.abs(conv(dropped(kernel)) - conv(kernel)).max() > 1e-2
    experts = hki.use_implicit_args(lambda w: jax.lax.ragged_dot(x, w, jnp.array([2, 0, 3])))
    assert np.abs(experts(dropped(kernel)) - experts(kernel)).max() > 1e-2
    one_sample = jnp.stack([conv(dropped(kernel, i)) for i in range(3)])
    assert float(one_sample.std(0).min()) > 0


@pytest.mark.parametrize("rate", [1, -0.1])
def test_errors(rate):
    with pytest.raises(ValueError, match="rate: expected a number of at least 0 and less than 1"):
        hki.with_dropout({"m": {"w": lora()}}, jax.random.key(0), rate)


@pytest.mark.parametrize("transform", [hki.value_and_grad, hki.grad, hki.use_implicit_args])
def test_where_weights_are_ordinary_arrays_it_says_so(transform):
    """Without this error the loss would have no dropout, and nobody would know."""
    params = {"m": {"w": lora()}}
    message = r"with_dropout: expected parameters with LoRA, .* m/w float32\[12,8\].*hki.partition"
    with pytest.raises(ValueError, match=message):
        transform(lambda p: hki.with_dropout(p, jax.random.key(0), RATE)["m"]["w"].sum())(params)
