"""Attention over a cache in Haiku's state: against attention without one, dense and quantized."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cache_kinds
from haiku_implicit import layers
from models.cached_attention import CachedAttention, Sizes
from tests.random_arrays import normal
from tests.tiers import few

SIZES = Sizes(num_heads=4, num_kv_heads=2, head_dim=8, length=10)
BATCH, TIME, DIM = 2, 7, 12
PADDING = np.array([0, 3])


@pytest.fixture(scope="module")
def inputs():
    x = normal((BATCH, TIME, DIM))
    mask = jnp.asarray(np.arange(SIZES.length) >= PADDING[:, None])
    params, _ = cache_kinds.make_model(SIZES, "dense").init(jax.random.key(1), x, mask)
    return params, x, mask


def reference(params, x):
    """Each head, position and sequence by itself, in NumPy."""
    w = {name.rpartition("/")[2]: np.asarray(p["w"], np.float64) for name, p in params.items()}
    group = SIZES.num_heads // SIZES.num_kv_heads
    out = np.zeros((BATCH, TIME, SIZES.num_heads, SIZES.head_dim))
    for b, first in enumerate(PADDING):
        q, k, v = (np.asarray(x[b], np.float64) @ w[n] for n in ("query", "key", "value"))
        q, k, v = (y.reshape(TIME, -1, SIZES.head_dim) for y in (q, k, v))
        for t in range(first, TIME):
            for h in range(SIZES.num_heads):
                scores = k[first : t + 1, h // group] @ q[t, h] / SIZES.head_dim**0.5
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights @ v[first : t + 1, h // group] / weights.sum()
    return out.reshape(BATCH, TIME, -1) @ w["out"]


def in_steps(model, params, x, mask):
    _, state = model.init(jax.random.key(0), x[:, :1], mask)
    apply, out = jax.jit(model.apply), []
    for part in (x[:, :4], x[:, 4:5], x[:, 5:6], x[:, 6:]):
        y, state = apply(params, state, None, part, mask)
        out.append(y)
    return np.concatenate(out, axis=1)


# The tolerance is a part of the largest output.
CASES = [
    (kind, tolerance, in_mesh)
    for kind, tolerance in (("dense", 1e-5), ("int8", 0.02), ("int4", 0.3))
    for in_mesh in (False, True)
]


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("kind, tolerance, in_mesh", few(CASES, ("int8", 0.02, False)))
def test_outputs_are_those_of_attention(kind, tolerance, in_mesh, inputs, never_dense):
    params, x, mask = inputs
    mesh = layers.create_mesh((1, 1, 1, 1)) if in_mesh else None
    model = cache_kinds.make_model(SIZES, kind, mesh)
    got, want = in_steps(model, params, x, mask), reference(params, x)
    tokens = np.arange(TIME) >= PADDING[:, None]
    error = np.abs(got - want)[tokens].max() / np.abs(want[tokens]).max()
    assert error < tolerance
    assert kind == "dense" or error > 1e-4  # it is rounded


@pytest.mark.slow
def test_the_model_is_plain_haiku(inputs):
    params, x, mask = inputs
    plain = hk.transform_with_state(
        lambda x, mask: CachedAttention(SIZES, name="attention")(x, mask)
    )
    np.testing.assert_allclose(
        in_steps(plain, params, x, mask)[0], reference(params, x)[0], atol=1e-5
    )
