"""LoRA+ and LoRA-FA against PEFT's optimizers, step by step, in each form of a training loop."""

import functools
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit import adapters
from tests.random_arrays import numpy_normal
from tests.tiers import few

FILE = pathlib.Path(__file__).resolve().parents[1] / "data" / "peft_steps.npz"
RANKS = {"up": 2, "down": 3}


@functools.cache
def golden():
    with np.load(FILE) as file:
        return dict(file)


def block(x):
    return x + hk.Linear(6, name="down")(jnp.tanh(hk.Linear(8, name="up")(x)))


MODEL = hk.without_apply_rng(hk.transform(block))
APPLY = hki.transform_implicit(MODEL).apply


def loss(params):
    x, target = golden()["x"], golden()["target"]
    return ((APPLY(params, x) - target) ** 2).sum()


def scale_of(name, layer):
    return 3.0 / (RANKS[layer] ** 0.5 if "rslora" in name else RANKS[layer])


def peft_params(name, step):
    """The parameters of PEFT's model after some steps."""
    g, params = golden(), {}
    for layer, rank in RANKS.items():
        key = f"{name}/{layer}"
        a, b = (g[f"{key}.lora_{x}.default.weight"][step].T for x in "AB")
        w, bias = g[f"base/{layer}.weight"].T, g[f"base/{layer}.bias"]
        alpha = np.float32(scale_of(name, layer) * rank)
        if "dora" in name:
            lengths = g[f"{key}.lora_magnitude_vector.default.weight"][step]
            adapted = adapters.DoRA(w, a, b, lengths, alpha)
        else:
            adapted = hki.LoRA(w, a, b, alpha)
        params[layer] = {"w": adapted, "b": g.get(f"{key}.base_layer.bias", 5 * [bias])[step]}
    return jax.device_put(params)


def optimizer_of(name, dense):
    if name == "plus":
        return optax.chain(optax.adam(0.01), hki.scale_by_lora_plus(8.0))
    if name == "plus, dora":
        return optax.chain(optax.adamw(0.01, weight_decay=0.3), hki.scale_by_lora_plus(4.0))
    return hki.lora_fa(optax.adam(0.01, eps=1e-12), trainable_dense=dense)


def whole(name, params, dense):
    """`freeze_declared` around all parameters."""
    optimizer = optimizer_of(name, dense)
    if name.startswith("plus"):
        optimizer = hki.freeze_declared(optimizer, trainable_dense=dense)
    grad = hki.grad(loss, trainable_dense=dense)
    return optimizer, params, lambda p: grad(p), lambda p: p


def halves(name, params, dense):
    """`partition`."""
    trained, frozen = hki.partition(params, trainable_dense=dense)
    join = functools.partial(hki.combine, frozen=frozen)
    return optimizer_of(name, dense), trained, jax.grad(lambda t: loss(join(t))), join


def hidden(name, params, dense):
    """`freeze`."""
    tuned, trained = hki.freeze(MODEL, params, trainable_dense=dense)
    return (
        optimizer_of(name, True),
        trained,
        jax.grad(lambda t: loss(tuned.params(t))),
        tuned.params,
    )


PLUS = [(form, name) for form in (whole, halves, hidden) for name in ("plus", "plus, dora")]
FA = [(whole, "fa"), (whole, "fa, rslora")]


@pytest.mark.parametrize("form, name", few(PLUS + FA, (whole, "plus")))
def test_steps_are_those_of_peft(form, name):
    dense = name == "plus" and hki.BIASES
    optimizer, params, grad, join = form(name, peft_params(name, 0), dense)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(grad(params), state, params)
        return optax.apply_updates(params, updates), state

    moved = peft_params(name, 4)["up"]["w"].b - peft_params(name, 3)["up"]["w"].b
    assert np.abs(moved).min() > 1e-3
    for i in range(1, 5):
        params, state = step(params, state)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6),
            join(params),
            peft_params(name, i),
        )


@pytest.mark.parametrize("batch", [(), pytest.param((3,), marks=pytest.mark.slow)])
def test_lora_fa_follows_the_gradient_of_the_weight(batch):
    """One step moves the correction along the projection of the weight's gradient on the span of `a`."""
    g, a, b = (numpy_normal((*batch, *s), i) for i, s in enumerate([(7, 5), (7, 2), (2, 5)]))
    scale = np.linspace(1.5, 3.0, 3, dtype=np.float32)[: 3 if batch else 1].reshape(batch)
    w = hki.LoRA(*jax.device_put((np.zeros_like(g), a, b)), factor=scale)
    params = {"m": {"w": w}}
    of_b = scale[..., None, None] * np.einsum("...nr,...nm->...rm", a, g)
    grads = {"m": {"w": jax.tree.map(np.zeros_like, w)._replace(b=of_b)}}
    optimizer = hki.lora_fa(optax.sgd(1.0))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    update = updates["m"]["w"]
    assert isinstance(update.a, hki.Zeros)
    moved = scale[..., None, None] * np.einsum("...nr,...rm->...nm", a, update.b)
    want = -np.einsum("...nr,...rs,...sm->...nm", a, np.linalg.pinv(a), g)
    np.testing.assert_allclose(moved, want, atol=1e-5)
    if not batch:  # the trained half has no scale
        half, of_half = (hki.partition(tree)[0] for tree in (params, grads))
        optimizer = hki.lora_fa(optax.sgd(1.0), scale=1.5)
        updates, _ = optimizer.update(of_half, optimizer.init(half), half)
        np.testing.assert_allclose(updates["m"]["w"].b, update.b, rtol=1e-6)
        with pytest.raises(ValueError, match="m/w/b: .* do not hold the scale"):
            wrong = hki.lora_fa(optax.sgd(1.0))
            wrong.update(of_half, wrong.init(half), half)


@pytest.mark.parametrize(
    "columns, copied, n",
    [
        ((1, 1e-3), 0, 7),
        ((1, 1e-4), 0, 7),
        ((1, 1e-4), 0, 16384),
        ((1e-4, 1e-4), 0, 7),
        ((1e-2, 0), 0, 7),
        ((1, 1), 2, 7),
    ],
)
def test_lora_fa_with_small_columns(columns, copied, n):
    """PEFT's formula in float64 is the inverse of `aᵀ a + 1e-8`."""
    g, a = numpy_normal((n, 5), 0), numpy_normal((n, 2), 1) * np.float32(columns)
    a = np.repeat(a[:, :1], 2, 1) if copied else a
    w = hki.LoRA(*jax.device_put((np.zeros_like(g), a, np.zeros((2, 5), np.float32))))
    double = a.astype(np.float64)
    of_b = double.T @ g
    params, grads = {"w": w}, {"w": jax.tree.map(np.zeros_like, w)._replace(b=np.float32(of_b))}
    optimizer = hki.lora_fa(optax.sgd(1.0))
    found = optimizer.update(grads, optimizer.init(params), params)[0]["w"].b
    want = -np.linalg.inv(double.T @ double + 1e-8 * np.eye(2)) @ of_b
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_messages():
    params, plus, fa = (
        {"w": jnp.ones((2, 2))},
        hki.scale_by_lora_plus(),
        hki.lora_fa(optax.sgd(1.0)),
    )
    with pytest.raises(ValueError, match="scale_by_lora_plus finds no factor b"):
        plus.init(params)
    with pytest.raises(ValueError, match="lora_fa finds no factor a"):
        fa.init(params)
    with pytest.raises(ValueError, match="the update of lora_fa needs the parameters"):
        fa.update(params, (), None)
    with pytest.raises(ValueError, match="ratio: expected a positive number, got 0"):
        hki.scale_by_lora_plus(0)
