"""GPT-2 in plain Haiku, after https://cdn.openai.com/better-language-models/language_models.pdf.

Layer normalization before each block, learned positions, biases everywhere, and one weight for the
embedding and the output projection.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Gpt2Config:
    """The sizes of a GPT-2; the defaults are the smallest model's.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        dim: Width of the residual stream.
        num_layers: Number of blocks, each an attention and a feed-forward network.
        num_heads: Number of attention heads; ``dim`` is a multiple of it.
        hidden_dim: Width of the feed-forward network.
        max_positions: Longest sequence.
        norm_eps: Added to the variance in layer normalization.
        tied: Whether the embedding is also the output projection.
    """

    vocab_size: int = 50257
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    hidden_dim: int = 3072
    max_positions: int = 1024
    norm_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self):
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")


def layer_norm(config: Gpt2Config, name: str) -> hk.LayerNorm:
    return hk.LayerNorm(-1, True, True, eps=config.norm_eps, name=name)


class Attention(hk.Module):
    """Causal attention, whose queries, keys and values come from one product."""

    def __init__(self, config: Gpt2Config, name: str = "attention"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``."""
        batch, time, dim = x.shape
        shape = batch, time, self.config.num_heads, dim // self.config.num_heads
        parts = jnp.split(hk.Linear(3 * dim, name="qkv")(x), 3, axis=-1)
        query, key, value = (part.reshape(shape) for part in parts)
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * shape[-1] ** -0.5
        causal = jnp.tri(time, dtype=bool)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, value).reshape(x.shape)
        return hk.Linear(dim, name="output")(mixed)


class Layer(hk.Module):
    """Attention and feed-forward network, each after a norm and added to the residual stream."""

    def __init__(self, config: Gpt2Config, name: str = "layer"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``."""
        x = x + Attention(self.config)(layer_norm(self.config, "attention_norm")(x))
        hidden = layer_norm(self.config, "mlp_norm")(x)
        hidden = jax.nn.gelu(hk.Linear(self.config.hidden_dim, name="up")(hidden), approximate=True)
        return x + hk.Linear(x.shape[-1], name="down")(hidden)


class Gpt2(hk.Module):
    """The language model: maps tokens to logits of each next token."""

    def __init__(self, config: Gpt2Config, name: str = "gpt2"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Predicts the token after each of ``tokens``.

        Args:
            tokens: Token ids, ``[batch, time]`` int32, at most ``max_positions`` per sequence.

        Returns:
            Logits, ``[batch, time, vocab_size]`` float32.
        """
        config, time = self.config, tokens.shape[1]
        if time > config.max_positions:
            raise ValueError(
                f"{time} tokens, expected at most max_positions {config.max_positions}"
            )
        embed = hk.Embed(config.vocab_size, config.dim, name="words")
        positions = hk.Embed(config.max_positions, config.dim, name="positions")
        x = embed(tokens) + positions(jnp.arange(time))
        for i in range(config.num_layers):
            x = Layer(config, name=f"layer_{i}")(x)
        x = layer_norm(config, "final_norm")(x)
        if config.tied:
            return jnp.einsum("btd,vd->btv", x, embed.embeddings)
        return hk.Linear(config.vocab_size, with_bias=False, name="lm_head")(x)
