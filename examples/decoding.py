"""Greedy decoding of a Haiku Llama that keeps its keys and values in Haiku's state."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from models import llama


def make_model(config: llama.LlamaConfig, length: int, cache: str) -> Any:
    """The model with a cache, as functions `init(rng, tokens)`, `apply(params, state, rng, tokens)`."""

    def plain(tokens: jax.Array) -> jax.Array:
        return llama.Llama(config)(tokens, cache_length=length)

    def quantized(tokens: jax.Array) -> jax.Array:
        creator = hki.cache_creator(cache, targets=r".*_cache")
        with hk.custom_creator(creator, params=False, state=True):
            return plain(tokens)

    forward = plain if cache == "f32" else quantized
    return hki.transform_implicit(hk.transform_with_state(forward))


def empty_cache(model: Any) -> Any:
    """The state before the first token, without initializing the parameters."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))[1]
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def make_step(model: Any) -> Any:
    """A compiled step: from tokens `[1, time]` the next one `[1]`, and the cache, updated in place."""

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        logits, state = model.apply(params, state, None, tokens)
        return logits[:, -1].argmax(-1), state

    return jax.jit(step, donate_argnums=1)


def generate(step: Any, params: Any, state: Any, prompt: list[int], count: int) -> list[int]:
    """The most likely next tokens, one after another."""
    state = jax.tree.map(jnp.copy, state)  # the given one is for the next call
    token, state = step(params, state, np.asarray([prompt], np.int32))
    tokens = [token]
    for _ in range(count - 1):
        token, state = step(params, state, token[None])
        tokens.append(token)
    return [int(t[0]) for t in tokens]
