"""Optimizers whose moments are held in few bits: their state, and that they still train."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule
from tests.random_arrays import numpy_normal as normal
from tests.tiers import few

BLOCK = 64


@pytest.mark.every(2)
@pytest.mark.combinations
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "int4", "nf4"])
def test_blocks(dtype, squared, may_be_dense):
    x = normal((7, 33)) * np.exp(normal((7, 33), 1))
    x[2] = 0
    x = x**2 if squared else x  # without a negative number it is roots that are quantized
    make = lambda x: hki.QuantizedBlocks.quantize(x, dtype, BLOCK)  # noqa: E731
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


def test_each_block_by_itself(may_be_dense):
    """One of zeros, one of roots, one with signs; and a value that is not finite affects its block alone."""
    x = np.stack([np.zeros(BLOCK), np.exp(-np.arange(BLOCK) / 4), normal(BLOCK), normal(BLOCK)])
    x[3, 0] = np.nan
    got = np.asarray(hki.materialize(hki.QuantizedBlocks.quantize(np.float32(x), "int8", BLOCK)))
    assert (got[0] == 0).all() and (got[1] > 0).all() and np.isnan(got[3]).all()
    np.testing.assert_allclose(np.sqrt(got[1]), np.sqrt(x[1]), atol=1.01 / 255)
    np.testing.assert_allclose(got[2], x[2], atol=0.51 / 127 * np.abs(x[2]).max())


@pytest.mark.parametrize(
    "make", few([optax.adamw, optax.lion, optax.adafactor, optax.rmsprop], optax.lion)
)
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
    update, plain_update = jax.jit(ours.update), jax.jit(optimizer.update)
    for seed in range(3):
        grads = jax.tree.map(lambda p, seed=seed: 0.1 * p + normal(p.shape, seed), params)
        got, state = update(grads, state, params)
        want, plain = plain_update(grads, plain, params)
    np.testing.assert_allclose(got["b"], want["b"], rtol=1e-5)  # small ones are not quantized
    # The root of the mean square of the difference, relative to the updates.
    error = np.sqrt(np.mean((got["w"] - want["w"]) ** 2) / np.mean(np.square(want["w"])))
    # (Lion's updates are signs: those of momenta near zero flip.)
    assert error < (0.2 if make is optax.lion else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, most", few([("int8", 0.02), ("fp8_e4m3", 0.08), ("int4", 0.2)], ("int8", 0.02))
)
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


@pytest.mark.slow
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


class Attention(NamedTuple):
    """Parameters of which one is called as second moments are in some optimizers' states."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


# Optimizers whose states call signed averages `v` and `nu`, and sums of squares by other names.
NAMES = {
    "adan": optax.adan,
    "sm3": optax.sm3,
    "adadelta": optax.adadelta,
    "dadapt": lambda _: optax.contrib.dadapt_adamw(1.0),
    "adam": optax.adam,
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", NAMES)
def test_moments_of_any_name(name):
    params = Attention(*(normal((64, 64), seed) for seed in range(3)))
    optimizer = NAMES[name](1e-2)
    ours = hki.quantized_state(optimizer, "int8", BLOCK)
    state, plain = jax.jit(ours.init)(params), optimizer.init(params)
    for seed in range(3):
        grads = jax.tree.map(lambda p, seed=seed: 0.1 * p + normal(p.shape, seed), params)
        got, state = jax.jit(ours.update)(grads, state, params)
        want, plain = jax.jit(optimizer.update)(grads, plain, params)
    for a, b in zip(got, want, strict=True):
        assert np.sqrt(np.mean((a - b) ** 2) / np.mean(np.square(b))) < 0.03


def test_a_sequence_of_parameters_in_the_state_is_not_rounded():
    """Schedule-free optimizers step from `z`, of which one step is less than a code of 8 bits."""
    params = {"w": normal((64, 64))}
    optimizer = hki.quantized_state(optax.contrib.schedule_free_adamw(1e-4), "int8", BLOCK)
    state = optimizer.init(params)
    assert (
        sum(isinstance(x, hki.QuantizedBlocks) for x in hki.tree_leaves_with_implicit(state)) == 1
    )  # `nu`
    z = state.inner.z["w"]
    np.testing.assert_array_equal(z, params["w"])
    _, new = jax.jit(optimizer.update)(params, state, params)
    np.testing.assert_allclose(new.inner.z["w"], z - 1e-4 * np.sign(z), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["trained", "aware", "qlora"])
def test_moments_of_implicit_parameters(kind):
    params, rule = {"w": normal((64, 64))}, QtRule(weight_qtype="int8")
    make = {
        "trained": lambda: hki.quantized_training(params, [rule]),
        "aware": lambda: hki.quantization_aware(params, [rule]),
        "qlora": lambda: hki.add_lora(hki.quantize_params(params), 0, rank=64),
    }
    params = make[kind]()
    optimizer = hki.freeze_declared(hki.quantized_state(optax.adam(1e-2), "int8", BLOCK))
    state = optimizer.init(params)
    trained = sum(x.size for x in jax.tree.leaves(hki.partition(params)[0]))
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert held == 2 * (trained + 4 * trained // BLOCK) + 4
    grads = hki.grad(lambda p: jnp.sum(jnp.ones((1, 64)) @ p["w"]))(params)
    _, new = jax.jit(optimizer.update)(grads, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_gradients_that_are_not_finite():
    """Eagerly and compiled, they are not an error: an optimizer around this one skips such steps."""
    optimizer = hki.quantized_state(optax.adam(1e-2), "int8", BLOCK)
    params = {"w": normal((64, 64))}
    grads = {"w": jnp.asarray(params["w"]).at[0, 0].set(jnp.nan)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert np.isnan(updates["w"]).sum() == 1


FACTORED = {
    "adafactor": lambda rate: optax.adafactor(rate, min_dim_size_to_factor=16),
    "with momentum": lambda rate: optax.adafactor(rate, min_dim_size_to_factor=16, momentum=0.9),
    "sm3": optax.sm3,
    "adam": optax.adam,
    "masked": lambda rate: optax.masked(optax.adafactor(rate, min_dim_size_to_factor=16), True),
    "flat": lambda rate: optax.flatten(optax.adam(rate)),
}


@pytest.mark.parametrize("name", few(FACTORED, "sm3", "flat"))
@pytest.mark.slow
def test_statistics_smaller_than_their_parameter_stay_as_they_are(name):
    """Few bytes beside it, and each of their numbers counts for a whole row of it."""
    params = {
        "stack": normal((3, 4096, 16)),  # whose means are 3 times 4096
        "nested": {"matrix": normal((4096, 32))},
        "vector": normal(4096),  # whose moments have the shape of the means of rows of the matrix
    }
    sizes = {"stack": 3 * 4096 * 16, "matrix": 4096 * 32, "vector": 4096}
    state = hki.quantized_state(FACTORED[name](1e-2), "int8").init(params).inner
    is_blocks = lambda x: isinstance(x, hki.QuantizedBlocks)  # noqa: E731
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_blocks):
        (of, *_) = [size for key, size in sizes.items() if f"'{key}'" in str(path)] or [4096]
        assert is_blocks(x) == (x.size >= of), (path, x)


def test_moments_of_parameters_in_a_list():
    params = [normal((128, 128)), normal((64, 64)), normal((64, 64))]
    state = hki.quantized_state(optax.chain(optax.adam(1e-2), optax.trace(0.9)), "int8").init(
        params
    )
    held = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, hki.QuantizedBlocks))
    assert sum(isinstance(x, hki.QuantizedBlocks) for x in held) == 3 * len(params)


@pytest.mark.slow
def test_factored_statistics_train_as_without():
    """Inputs of very different sizes: a rounded mean spoils the steps of a whole row."""
    scale = np.exp(2 * normal(4096))
    scale /= np.sqrt(np.mean(scale**2))
    w = normal((4096, 16), 1) / 64

    def losses(optimizer):
        def step(carry, key):
            params, state = carry
            x = jax.random.normal(key, (32, 4096)) * scale
            value, grads = jax.value_and_grad(lambda v: jnp.mean((x @ (v - w)) ** 2))(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        start = jnp.asarray(normal((4096, 16), 2) / 64)
        keys = jax.random.split(jax.random.key(0), 100)
        return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), keys)[1])()

    optimizer = FACTORED["adafactor"](0.02)
    got, want = losses(hki.quantized_state(optimizer, "int4")), losses(optimizer)
    np.testing.assert_allclose(np.mean(got[-20:]), np.mean(want[-20:]), rtol=1e-3)


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
        (dict(dtype="int9"), "dtype: expected one of"),
        (
            dict(dtype="int3", block=12),
            "block: expected a multiple of 8 for codes of 'int3', got 12",
        ),
        (dict(block=0), "block: expected a positive number, got 0"),
        (dict(min_size=True), "min_size: expected a positive number, got True"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        hki.quantized_state(optax.adam(1e-3), **options)


@pytest.mark.slow
@pytest.mark.parametrize("block", [True, 0, -8, 8.0, 12])
def test_blocks_of_no_size(block):
    with pytest.raises(ValueError, match=f"block: expected a multiple of 8 .* got {block}"):
        hki.QuantizedBlocks.quantize(normal((64, 64)), "int3", block)
