"""Attention over a cache of keys and values, with grouped heads, causal and padding masks.

It uses only Haiku and JAX. The cache follows EasyDeL's
``BaseJAXAttentionModule._concatenate_to_cache``: keys, values and an index in the state of the module,
written at the index. With a mesh, ``jax.shard_map`` writes single tokens and attends to them: each
device has a part of the batch, of the positions and of the heads.
"""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

DATA = ("dp", "fsdp")
CACHE_SPEC = P(DATA, "sp", "tp", None)
MASKED = -1e30  # finite, as all positions of a device may be masked


class Sizes(NamedTuple):
    """The sizes of the attention; ``num_heads`` is a multiple of ``num_kv_heads``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    length: int


class CachedAttention(hk.Module):
    """Attention of new positions to all positions so far, which Haiku's state remembers."""

    def __init__(self, sizes: Sizes, mesh: Mesh | None = None, name: str | None = None):
        """
        Args:
            sizes: The sizes of heads and cache.
            mesh: With the axes dp, fsdp, tp and sp, over which single tokens are computed.
        """
        super().__init__(name=name)
        self.sizes = sizes
        self.mesh = mesh

    def __call__(self, x: jax.Array, padding_mask: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``.

        Args:
            x: The next positions of the sequence.
            padding_mask: ``[batch, length]``, True for positions that are tokens and not padding.
        """
        time, dim = x.shape[1:]

        def heads(name, count):
            projected = hk.Linear(count * self.sizes.head_dim, with_bias=False, name=name)(x)
            return projected.reshape(*x.shape[:2], count, self.sizes.head_dim)

        query = heads("query", self.sizes.num_heads)
        key, value = (heads(name, self.sizes.num_kv_heads) for name in ("key", "value"))

        shape = (x.shape[0], self.sizes.length, *key.shape[2:])
        cached_key = hk.get_state("cached_key", shape, x.dtype, init=jnp.zeros)
        cached_value = hk.get_state("cached_value", shape, x.dtype, init=jnp.zeros)
        index = hk.get_state("cache_index", [], jnp.int32, init=jnp.zeros)

        causal = jnp.arange(self.sizes.length) <= index + jnp.arange(time)[:, None]
        mask = causal & padding_mask[:, None, :]  # [batch, time, length]
        operands = query, key, value, cached_key, cached_value, mask, index
        if self.mesh is not None and time == 1:
            mixed, cached_key, cached_value = in_parts(self.mesh, *operands)
        else:
            mixed, cached_key, cached_value = write_and_attend(*operands)
        hk.set_state("cached_key", cached_key)
        hk.set_state("cached_value", cached_value)
        hk.set_state("cache_index", index + time)
        return hk.Linear(dim, with_bias=False, name="out")(mixed.reshape(*x.shape[:2], -1))


def write_and_attend(query, key, value, cached_key, cached_value, mask, index) -> Any:
    """Writes keys and values into the cache, and attends to all of it."""
    cached_key = jax.lax.dynamic_update_slice(cached_key, key, (0, index, 0, 0))
    cached_value = jax.lax.dynamic_update_slice(cached_value, value, (0, index, 0, 0))
    weights = jax.nn.softmax(scores_of(query, cached_key, mask))
    return mix(weights, cached_value), cached_key, cached_value


def scores_of(query: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns masked ``[batch, heads, time, length]`` of queries ``[batch, time, heads, depth]``."""
    keys = jnp.repeat(keys, query.shape[2] // keys.shape[2], axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", query, keys) * query.shape[-1] ** -0.5
    return jnp.where(mask[:, None], scores, MASKED)


def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns ``[batch, time, heads, depth]`` from values ``[batch, length, fewer heads, depth]``."""
    values = jnp.repeat(values, weights.shape[1] // values.shape[2], axis=2)
    return jnp.einsum("bhts,bshd->bthd", weights, values)


def in_parts(mesh: Mesh, *operands: jax.Array) -> Any:
    """Runs ``write_and_attend`` for one token, on the devices' parts of the cache."""
    new = P(DATA, None, "tp", None)
    specs = new, new, new, CACHE_SPEC, CACHE_SPEC, P(DATA, None, "sp"), P()
    outs = new, CACHE_SPEC, CACHE_SPEC
    return jax.shard_map(on_part, mesh=mesh, in_specs=specs, out_specs=outs)(*operands)


def on_part(query, key, value, cached_key, cached_value, mask, index) -> Any:
    """Writes on the device that has the position; softmax runs over the positions of all devices."""
    here = index - jax.lax.axis_index("sp") * cached_key.shape[1]

    def write():
        at = (0, here, 0, 0)
        return (
            jax.lax.dynamic_update_slice(cached_key, key, at),
            jax.lax.dynamic_update_slice(cached_value, value, at),
        )

    is_here = (here >= 0) & (here < cached_key.shape[1])
    keys, values = jax.lax.cond(is_here, write, lambda: (cached_key, cached_value))
    scores = scores_of(query, keys, mask)
    largest = jax.lax.pmax(scores.max(-1, keepdims=True), "sp")
    weights = jnp.exp(scores - largest)
    total = jax.lax.psum(weights.sum(-1), "sp")  # [batch, heads, 1]
    mixed = jax.lax.psum(mix(weights, values), "sp")
    return mixed / jnp.swapaxes(total, 1, 2)[..., None], keys, values
