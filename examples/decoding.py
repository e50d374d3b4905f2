"""Greedy decoding of a Haiku Llama that keeps its keys and values in Haiku's state."""

import functools
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from models import llama


def make_model(config: llama.LlamaConfig, length: int, cache: str) -> Any:
    """Returns a model with a cache: `init(rng, tokens)` and `apply(params, state, rng, tokens, only)`.

    `only` is the index of the token whose logits are computed, None for all tokens.
    """

    def plain(tokens: jax.Array, only: Any = None) -> jax.Array:
        return llama.Llama(config)(tokens, length, only)

    def quantized(tokens: jax.Array, only: Any = None) -> jax.Array:
        creator = hki.cache_creator(cache, targets=r".*_cache")
        with hk.custom_creator(creator, params=False, state=True):
            return plain(tokens, only)

    forward = plain if cache == "f32" else quantized
    return hki.transform_implicit(hk.transform_with_state(forward))


def empty_cache(model: Any) -> Any:
    """Returns the state before the first token, without initializing the parameters."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))[1]
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


class Decoder(NamedTuple):
    """Compiled functions that choose the most likely next token, and update the cache in place.

    Attributes:
      read: `(params, state, tokens [1, time])` to the next token `[1]` and the cache.
      write: `(params, state, token [1], count)` to the next `count` tokens and the cache. All tokens
        are one program: Python's overhead for a call takes a third of a step.
    """

    read: Any
    write: Any

    def generate(self, params: Any, state: Any, prompt: list[int], count: int) -> list[int]:
        """Returns the most likely next tokens, one after another."""
        state = jax.tree.map(jnp.copy, state)  # copied, because calls update it in place
        token, state = self.read(params, state, np.asarray([prompt], np.int32))
        others, _ = self.write(params, state, token, count - 1)
        return [int(token[0]), *map(int, others)]


def make_decoder(model: Any) -> Decoder:
    """Makes the functions for a model with a cache."""

    @functools.partial(jax.jit, donate_argnums=1)
    def read(params: Any, state: Any, tokens: jax.Array) -> Any:
        logits, state = model.apply(params, state, None, tokens, tokens.shape[1] - 1)
        return logits[:, 0].argmax(-1), state

    @functools.partial(jax.jit, donate_argnums=1, static_argnames="count")
    def write(params: Any, state: Any, token: jax.Array, count: int) -> Any:
        def step(carry: Any, _: None) -> Any:
            token, state = read(params, carry[1], carry[0][None])
            return (token, state), token[0]

        (_, state), tokens = jax.lax.scan(step, (token, state), length=count)
        return tokens, state

    return Decoder(read, write)
