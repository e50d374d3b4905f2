"""T5, an encoder and a decoder, in plain Haiku, after https://arxiv.org/abs/1910.10683.

RMSNorm before each block, no biases except on the attention logits, for the relative positions; these
logits are not scaled by the heads' width. Version 1.1 (T5 v1.1, FLAN-T5) has a
gated feed-forward network and its own output projection.
"""

import dataclasses
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The sizes of a T5; the defaults are T5-small's (v1.0).

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        dim: Width of the residual stream.
        num_layers: Number of the encoder's blocks.
        num_decoder_layers: Number of the decoder's blocks.
        num_heads: Number of attention heads.
        head_dim: Width of a head.
        hidden_dim: Width of the feed-forward network.
        num_buckets: Number of relative positions that attention distinguishes, an even number.
        max_distance: Positions at least this far apart are in the last bucket.
        norm_eps: Added to the mean square in RMSNorm.
        gated: Whether the feed-forward network is a gated GELU (v1.1) or a ReLU.
        scaled: Whether the decoder's outputs are scaled by ``dim ** -0.5`` before the projection to
            logits (v1.0).
        tied: Whether the embedding is also the output projection (v1.0).
    """

    vocab_size: int = 32128
    dim: int = 512
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    head_dim: int = 64
    hidden_dim: int = 2048
    num_buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    gated: bool = False
    scaled: bool = True
    tied: bool = True


def rms_norm(config: T5Config, name: str) -> hk.RMSNorm:
    return hk.RMSNorm(axis=-1, eps=config.norm_eps, name=name)


def linear(size: int, name: str) -> hk.Linear:
    return hk.Linear(size, with_bias=False, name=name)


def relative_buckets(
    queries: int, keys: int, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Returns the bucket of each key's position relative to each query's, ``[queries, keys]`` int.

    Half of the buckets (of each direction) hold one distance each, the others logarithmically more.
    """
    relative = np.arange(keys) - np.arange(queries)[:, None]
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets * (relative > 0)
        distance = np.abs(relative)
    else:
        distance = np.maximum(-relative, 0)
    exact = num_buckets // 2
    # In float32, as in the model's training.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    steps = np.log(ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (steps * np.float32(num_buckets - exact)).astype(int)
    return first + np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))


class RelativeBias(hk.Module):
    """The attention bias for relative positions, which the layers of a stack share."""

    def __init__(self, config: T5Config, bidirectional: bool, name: str = "relative_bias"):
        super().__init__(name=name)
        self.config, self.bidirectional = config, bidirectional

    def __call__(self, time: int) -> jax.Array:
        """Returns ``[heads, time, time]``."""
        config = self.config
        buckets = relative_buckets(
            time, time, self.bidirectional, config.num_buckets, config.max_distance
        )
        embed = hk.Embed(config.num_buckets, config.num_heads, name="buckets")
        return embed(buckets).transpose(2, 0, 1)


class Attention(hk.Module):
    """Attention from ``x`` to ``source``, without scaling of the logits."""

    def __init__(self, config: T5Config, name: str = "attention"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array, source: jax.Array, bias: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``.

        Args:
            x: Input of the queries, ``[batch, time, dim]``.
            source: Input of the keys and values, ``[batch, source_time, dim]``.
            bias: Added to the logits, broadcast to ``[batch, heads, time, source_time]``.
        """
        heads, depth = self.config.num_heads, self.config.head_dim
        query, key, value = (
            linear(heads * depth, name)(y).reshape(*y.shape[:-1], heads, depth)
            for name, y in (("q", x), ("k", source), ("v", source))
        )
        scores = jnp.einsum("bthd,bshd->bhts", query, key) + bias
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
        return linear(x.shape[-1], "o")(mixed.reshape(*x.shape[:-1], heads * depth))


class FeedForward(hk.Module):
    """A ReLU network, or a gated GELU."""

    def __init__(self, config: T5Config, name: str = "mlp"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., dim]`` to ``[..., dim]``."""
        size = self.config.hidden_dim
        if self.config.gated:
            gate = jax.nn.gelu(linear(size, "wi_0")(x), approximate=True)
            hidden = gate * linear(size, "wi_1")(x)
        else:
            hidden = jax.nn.relu(linear(size, "wi")(x))
        return linear(x.shape[-1], "wo")(hidden)


class Layer(hk.Module):
    """Self-attention, in the decoder also cross-attention, and a feed-forward network."""

    def __init__(self, config: T5Config, name: str = "layer"):
        super().__init__(name=name)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        encoded: jax.Array | None = None,
        encoded_bias: jax.Array | None = None,
    ) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``; the biases are for ``Attention``."""
        normed = rms_norm(self.config, "attention_norm")(x)
        x = x + Attention(self.config)(normed, normed, bias)
        if encoded is not None:
            normed = rms_norm(self.config, "cross_attention_norm")(x)
            x = x + Attention(self.config, name="cross_attention")(normed, encoded, encoded_bias)
        return x + FeedForward(self.config)(rms_norm(self.config, "mlp_norm")(x))


def encode(config: T5Config, x: jax.Array, padding: jax.Array) -> jax.Array:
    """Runs the encoder on embedded tokens; maps ``[batch, time, dim]`` to ``[batch, time, dim]``."""
    bias = RelativeBias(config, bidirectional=True)(x.shape[1]) + padding
    for i in range(config.num_layers):
        x = Layer(config, name=f"layer_{i}")(x, bias)
    return rms_norm(config, "final_norm")(x)


def decode(config: T5Config, x: jax.Array, encoded: jax.Array, padding: jax.Array) -> jax.Array:
    """Runs the decoder, whose tokens attend to earlier ones and to the encoder's outputs."""
    time = x.shape[1]
    causal = jnp.where(jnp.tri(time, dtype=bool), 0.0, -1e30)
    bias = RelativeBias(config, bidirectional=False)(time) + causal
    for i in range(config.num_decoder_layers):
        x = Layer(config, name=f"layer_{i}")(x, bias, encoded, padding)
    return rms_norm(config, "final_norm")(x)


class T5(hk.Module):
    """The whole model: maps two sequences of tokens to logits of the second one's next tokens."""

    def __init__(self, config: T5Config, name: str = "t5"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, tokens: jax.Array, mask: jax.Array, targets: jax.Array) -> jax.Array:
        """Predicts the token after each of ``targets``.

        Args:
            tokens: The encoder's token ids, ``[batch, time]`` int32.
            mask: True for ``tokens`` that are not padding, ``[batch, time]`` bool.
            targets: The decoder's token ids so far, ``[batch, target_time]`` int32; by T5's
                convention they begin with the padding token 0.

        Returns:
            Logits, ``[batch, target_time, vocab_size]`` float32.
        """
        config = self.config
        embed = hk.Embed(config.vocab_size, config.dim, name="embed")
        padding = jnp.where(mask, 0.0, -1e30)[:, None, None]
        with hk.name_scope("encoder"):
            encoded = encode(config, embed(tokens), padding)
        with hk.name_scope("decoder"):
            x = decode(config, embed(targets), encoded, padding)
        if config.scaled:
            x = x * config.dim**-0.5
        if config.tied:
            return jnp.einsum("btd,vd->btv", x, embed.embeddings)
        return linear(config.vocab_size, "lm_head")(x)
