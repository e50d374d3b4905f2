"""Optimizers whose moments are held in few bits: what they hold, and that they still train."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki

BLOCK = 64


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "int4", "nf4"])
def test_blocks(dtype, squared, may_be_dense):
    x = normal((7, 33)) * np.exp(normal((7, 33), 1))
    x[2] = 0
    x = x**2 if squared else x
    make = lambda x: hki.QuantizedBlocks.quantize(x, dtype, BLOCK, squared)  # noqa: E731
    q = jax.jit(make)(x)
    got = np.asarray(hki.materialize(q))
    assert q.shape == x.shape and q.nbytes == 4 * (BLOCK * (4 if "4" in dtype[2:4] else 8) // 8 + 4)
    assert (got[2] == 0).all() and np.isfinite(got).all()
    # At most a step of the codes, in the roots where it is squared.
    root = (lambda v: np.sqrt(v)) if squared else (lambda v: v)
    flat = np.pad(root(x).ravel(), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    largest = np.repeat(np.abs(flat).max(-1), BLOCK)[: x.size].reshape(x.shape)
    step = {"int8": 1 / 127, "fp8_e4m3": 1 / 16, "int4": 1 / 7, "nf4": 0.31}[dtype]
    assert (np.abs(root(got) - root(x)) <= step * largest + 1e-7).all()
    if squared:
        assert (got[x > 0] > 0).all()
    else:
        np.testing.assert_allclose(hki.use_implicit_args(jnp.sum)(q), got.sum(), rtol=1e-4)


@pytest.mark.parametrize("make", [optax.adamw, optax.lion, optax.adafactor, optax.rmsprop])
def test_a_quarter_of_the_bytes_and_nothing_else_changes(make):
    params = {"w": normal((128, 128)), "b": normal((128,))}
    optimizer = make(1e-2)
    ours = hki.quantized_state(optimizer, "int8", BLOCK)
    state, plain = ours.init(params), optimizer.init(params)
    large = [x for x in jax.tree.leaves(plain) if x.size >= 4096]
    held = sum(x.nbytes for x in jax.tree.leaves(state)) - sum(
        x.nbytes for x in jax.tree.leaves(plain) if x.size < 4096
    )
    assert held == sum(x.size + 4 * x.size // BLOCK for x in large)
    update = jax.jit(ours.update)
    for seed in range(3):
        grads = jax.tree.map(lambda p, seed=seed: 0.1 * p + normal(p.shape, seed), params)
        got, state = update(grads, state, params)
        want, plain = optimizer.update(grads, plain, params)
    np.testing.assert_allclose(got["b"], want["b"], rtol=1e-5)  # small ones are not quantized
    # The root of the mean square of the difference, relative to the updates.
    error = np.sqrt(np.mean((got["w"] - want["w"]) ** 2) / np.mean(np.square(want["w"])))
    # (Lion's updates are signs: those of momenta near zero flip.)
    assert error < (0.2 if make is optax.lion else 0.03)


@pytest.mark.parametrize("dtype, most", [("int8", 0.02), ("fp8_e4m3", 0.08), ("int4", 0.2)])
def test_moving_averages_stay_where_they_belong(dtype, most, may_be_dense):
    """Rounding a second moment up at each step would make all of a block as large as its largest."""
    size, optimizer = jnp.exp(normal((64, 64))), optax.scale_by_adam()

    def second_moments(optimizer):
        def step(state, key):
            return optimizer.update(size * jax.random.normal(key, size.shape), state)[1], None

        keys = jax.random.split(jax.random.key(0), 400)
        return jax.lax.scan(step, optimizer.init(size), keys)[0]

    quantized = hki.quantized_state(optimizer, dtype, BLOCK)
    run = jax.jit(lambda: (second_moments(quantized).inner.nu, second_moments(optimizer).nu))
    got, want = (np.sqrt(hki.materialize(x)).reshape(-1, BLOCK) for x in run())
    difference = (got - want) / want.max(-1, keepdims=True)
    assert np.sqrt(np.mean(difference**2)) < most


def test_it_trains_as_without():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 64, 1])(x)))
    x = normal((256, 64))
    y = np.tanh(x @ normal((64, 1), 1) / 4) + np.sin(x[:, :1])
    params = model.init(jax.random.key(0), x)

    def loss(params):
        return jnp.mean((model.apply(params, x) - y) ** 2)

    def trained(optimizer):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, optimizer.init(params)), length=150)[1]

    adam = optax.adamw(3e-3)
    losses = jax.jit(lambda: [trained(adam), trained(hki.quantized_state(adam, "int8", 256))])()
    first, (dense, quantized) = float(losses[0][0]), (float(np.mean(x[-10:])) for x in losses)
    assert dense < 0.1 * first and abs(quantized - dense) < 0.02 * first


def test_with_what_is_frozen():
    params = {"w": hki.LoRA(normal((64, 64)), normal((64, 64), 1), normal((64, 64), 2))}
    optimizer = hki.freeze_declared(hki.quantized_state(optax.adam(1e-2), "int8"))
    state = optimizer.init(params)
    grads = hki.grad(lambda p: jnp.sum(jnp.ones((1, 64)) @ p["w"]))(params)
    updates, state = jax.jit(optimizer.update)(grads, state, params)
    new = hki.apply_updates(params, updates)["w"]
    np.testing.assert_array_equal(new.w, params["w"].w)
    np.testing.assert_allclose(np.abs(new.a - params["w"].a), 0.01, rtol=0.02)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dtype="uint8"), "dtype: expected a symmetric format, got 'uint8'"),
        (dict(dtype="int5"), "dtype: expected one of"),
        (dict(block=0), "block: expected a positive number, got 0"),
        (dict(min_size=True), "min_size: expected a positive number, got True"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        hki.quantized_state(optax.adam(1e-3), **options)
