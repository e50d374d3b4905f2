"""A BERT encoder in plain Haiku, after https://arxiv.org/abs/1810.04805."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT; the defaults are MiniLM-L6's (https://arxiv.org/abs/2002.10957).

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        dim: Width of the residual stream.
        num_layers: Number of blocks, each an attention and a feed-forward network.
        num_heads: Number of attention heads; ``dim`` is a multiple of it.
        hidden_dim: Width of the feed-forward network.
        max_positions: Longest sequence.
        norm_eps: Added to the variance in layer normalization.
        masked_lm: Whether two more layers turn the encoder's vectors into logits of the tokens before
            masking.
    """

    vocab_size: int = 30522
    dim: int = 384
    num_layers: int = 6
    num_heads: int = 12
    hidden_dim: int = 1536
    max_positions: int = 512
    norm_eps: float = 1e-12
    masked_lm: bool = False

    def __post_init__(self):
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")


def layer_norm(config: BertConfig, name: str) -> hk.LayerNorm:
    return hk.LayerNorm(-1, True, True, eps=config.norm_eps, name=name)


class Attention(hk.Module):
    """Attention from all tokens to all tokens that are not padding."""

    def __init__(self, config: BertConfig, name: str = "attention"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``; ``mask`` is ``[batch, time]`` bool."""
        batch, time, dim = x.shape
        shape = batch, time, self.config.num_heads, dim // self.config.num_heads
        query, key, value = (
            hk.Linear(dim, name=name)(x).reshape(shape) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, value).reshape(x.shape)
        return hk.Linear(dim, name="output")(mixed)


class Layer(hk.Module):
    """Attention and feed-forward network, each added to its input and normalized."""

    def __init__(self, config: BertConfig, name: str = "layer"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``."""
        attended = Attention(self.config)(x, mask)
        x = layer_norm(self.config, "attention_norm")(x + attended)
        hidden = jax.nn.gelu(hk.Linear(self.config.hidden_dim, name="up")(x), approximate=False)
        return layer_norm(self.config, "norm")(x + hk.Linear(x.shape[-1], name="down")(hidden))


class Bert(hk.Module):
    """The encoder: maps tokens to vectors (or to logits of the original tokens)."""

    def __init__(self, config: BertConfig, name: str = "bert"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Encodes sentences of one segment.

        Args:
            tokens: Token ids, ``[batch, time]`` int32.
            mask: True for tokens that are not padding, ``[batch, time]`` bool.

        Returns:
            ``[batch, time, dim]`` float32, with ``masked_lm`` ``[batch, time, vocab_size]``.
        """
        config = self.config
        words = hk.Embed(config.vocab_size, config.dim, name="words")
        x = words(tokens)
        positions = hk.Embed(config.max_positions, config.dim, name="positions")
        x = x + positions(jnp.arange(tokens.shape[1]))
        x = x + hk.Embed(2, config.dim, name="segments")(jnp.zeros((), jnp.int32))
        x = layer_norm(config, "embedding_norm")(x)
        for i in range(config.num_layers):
            x = Layer(config, name=f"layer_{i}")(x, mask)
        if not config.masked_lm:
            return x
        x = jax.nn.gelu(hk.Linear(config.dim, name="head")(x), approximate=False)
        x = layer_norm(config, "head_norm")(x)
        logits = jnp.einsum("btd,vd->btv", x, words.embeddings)
        return hk.Bias(bias_dims=[-1], name="head_bias")(logits)


def embed_sentences(config: BertConfig, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of the tokens' vectors, normalized: ``[batch, dim]`` (Sentence-BERT)."""
    x = Bert(config)(tokens, mask) * mask[..., None]
    mean = x.sum(1) / mask.sum(1, keepdims=True)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)
