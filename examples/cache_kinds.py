"""Runs `models/cached_attention.py` over a dense cache or a quantized one."""

from typing import Any

import haiku as hk
import jax

import haiku_implicit as hki
from models.cached_attention import CachedAttention, Sizes


def make_model(sizes: Sizes, kind: str, mesh: Any = None) -> Any:
    """Returns the model over a cache of one kind, as `init` and `apply`."""

    def plain(x: jax.Array, padding_mask: jax.Array) -> jax.Array:
        return CachedAttention(sizes, mesh, name="attention")(x, padding_mask)

    def quantized(x: jax.Array, padding_mask: jax.Array) -> jax.Array:
        creator = hki.cache_creator(kind, targets=r".*/cached_(key|value)")
        with hk.custom_creator(creator, params=False, state=True):
            return plain(x, padding_mask)

    forward = plain if kind == "dense" else quantized
    return hki.transform_implicit(hk.transform_with_state(forward))
