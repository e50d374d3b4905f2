"""A Llama language model in plain Haiku, after https://arxiv.org/abs/2302.13971.

RMSNorm before each block, rotary positions, grouped-query attention, a SwiGLU feed-forward network
and an embedding that may also be the output projection.
"""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes and constants of a Llama.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        dim: Width of the residual stream.
        num_layers: Number of blocks, each an attention and a feed-forward network.
        num_heads: Number of query heads; ``dim`` is a multiple of it.
        num_kv_heads: Number of key and value heads; ``num_heads`` is a multiple of it.
        hidden_dim: Width of the feed-forward network.
        rope_base: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        rope_interleaved: Whether the rotary embedding turns the neighbors ``(2i, 2i + 1)`` of a
            head, as in the paper and llama.cpp, or ``(i, i + head_dim / 2)``, as in Hugging Face.
            Both give the same model if the outputs of the query and key projections are permuted.
        tied: Whether the embedding is also the output projection.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    rope_interleaved: bool = False
    tied: bool = True

    def __post_init__(self):
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim} is not an even number for each of {self.num_heads} heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@functools.cache
def rotations(length: int, head_dim: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Sines and cosines of the rotary position embedding of https://arxiv.org/abs/2104.09864.

    They are constants, because XLA would compute sines again for each layer and head.

    Args:
        length: Number of positions.
        head_dim: Width of a head.
        base: Pair ``i`` turns by ``position * base ** (-2i / head_dim)`` radians.

    Returns:
        Sines and cosines, each ``[length, 1, head_dim / 2]`` float32.
    """
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(length)[:, None, None] * frequencies
    return np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array, interleaved: bool) -> jax.Array:
    """Applies the rotary position embedding.

    Args:
        x: Queries or keys, ``[batch, time, heads, head_dim]``.
        sin: Sines for the position of each time step, see ``rotations``.
        cos: Cosines.
        interleaved: Which elements form a pair, see ``LlamaConfig.rope_interleaved``.

    Returns:
        The turned queries or keys, with the shape and dtype of ``x``.
    """
    sin, cos = sin.astype(x.dtype), cos.astype(x.dtype)
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = jnp.split(x, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape)
    return jnp.concatenate(turned, axis=-1)


class Attention(hk.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, config: LlamaConfig, name: str = "attention"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array, cache_length: int | None = None) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``.

        Args:
            x: The sequence; with a cache, its next part.
            cache_length: The number of positions to keep in Haiku's state, or None.
        """
        config = self.config
        batch, time, dim = x.shape
        groups = config.num_heads // config.num_kv_heads

        def heads(name, count):
            projected = hk.Linear(count * config.head_dim, with_bias=False, name=name)(x)
            return projected.reshape(batch, time, count, config.head_dim)

        query = heads("q_proj", config.num_heads)
        key = heads("k_proj", config.num_kv_heads)
        value = heads("v_proj", config.num_kv_heads)

        start = 0 if cache_length is None else hk.get_state("position", [], jnp.int32, jnp.zeros)
        positions = start + jnp.arange(time)
        of_all = rotations(cache_length or time, config.head_dim, config.rope_base)
        sin, cos = (jax.lax.dynamic_slice_in_dim(x, start, time) for x in of_all)
        query = rotate(query, sin, cos, config.rope_interleaved)
        key = rotate(key, sin, cos, config.rope_interleaved)
        if cache_length is not None:
            key, value = (
                remember(name, x, start, cache_length)
                for name, x in (("key_cache", key), ("value_cache", value))
            )
            hk.set_state("position", start + time)

        query = query.reshape(batch, time, config.num_kv_heads, groups, config.head_dim)
        scores = jnp.einsum("btkgd,bskd->bkgts", query, key) * config.head_dim**-0.5
        scores = scores.astype(jnp.float32)
        causal = positions[:, None] >= jnp.arange(key.shape[1])[None, :]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(batch, time, dim)
        return hk.Linear(dim, with_bias=False, name="o_proj")(mixed)


def remember(name: str, x: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Writes keys or values, from position ``start`` on, into Haiku's state.

    Args:
        name: The name of the state.
        x: ``[batch, time, heads, head_dim]``.
        start: The position of the first of them.
        length: The number of positions in the state.

    Returns:
        The whole state, ``[batch, length, heads, head_dim]``.
    """
    shape = [x.shape[0], length, *x.shape[2:]]
    cache = hk.get_state(name, shape, x.dtype, init=jnp.zeros)
    cache = jax.lax.dynamic_update_slice(cache, x, (0, start, 0, 0))
    hk.set_state(name, cache)
    return cache


class SwiGLU(hk.Module):
    """The gated feed-forward network of https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden_dim: int, name: str = "mlp"):
        super().__init__(name=name)
        self.hidden_dim = hidden_dim

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., dim]`` to ``[..., dim]``."""
        gate = hk.Linear(self.hidden_dim, with_bias=False, name="gate_proj")(x)
        up = hk.Linear(self.hidden_dim, with_bias=False, name="up_proj")(x)
        return hk.Linear(x.shape[-1], with_bias=False, name="down_proj")(jax.nn.silu(gate) * up)


def rms_norm(config: LlamaConfig, name: str) -> hk.RMSNorm:
    return hk.RMSNorm(axis=-1, eps=config.norm_eps, name=name)


class Layer(hk.Module):
    """Attention and feed-forward network, each after a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, name: str = "layer"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array, cache_length: int | None = None) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``; see ``Attention``."""
        normed = rms_norm(self.config, "attention_norm")(x)
        x = x + Attention(self.config)(normed, cache_length)
        return x + SwiGLU(self.config.hidden_dim)(rms_norm(self.config, "mlp_norm")(x))


class Llama(hk.Module):
    """The language model: maps tokens to logits of each next token."""

    def __init__(self, config: LlamaConfig, name: str = "llama"):
        super().__init__(name=name)
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        cache_length: int | None = None,
        only: int | jax.Array | None = None,
    ) -> jax.Array:
        """Predicts the token after each of ``tokens``.

        Args:
            tokens: Token ids, ``[batch, time]`` int32; with a cache, the next tokens.
            cache_length: The number of positions that each attention keeps in Haiku's state, so that a
                call takes only the new tokens. (Then use ``hk.transform_with_state``.)
            only: The index of the only token whose logits are computed, or None for all of them.

        Returns:
            Logits, ``[batch, time, vocab_size]`` float32; with ``only``, ``[batch, 1, vocab_size]``.
        """
        embed = hk.Embed(self.config.vocab_size, self.config.dim, name="embed")
        x = embed(tokens)
        for i in range(self.config.num_layers):
            x = Layer(self.config, name=f"layer_{i}")(x, cache_length)
        if only is not None:
            x = jax.lax.dynamic_slice_in_dim(x, only, 1, axis=1)
        x = rms_norm(self.config, "final_norm")(x)
        if self.config.tied:
            return jnp.einsum("btd,vd->btv", x, embed.embeddings).astype(jnp.float32)
        head = hk.Linear(self.config.vocab_size, with_bias=False, name="lm_head")
        return head(x).astype(jnp.float32)
