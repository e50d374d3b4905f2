"""The timed model: a small Haiku transformer, and its twin with LoRA written in by hand.

Neither knows of this library.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model, its batch and its adapters.

    Attributes:
      depth: the number of layers.
      stacked: whether the layers are one `hk.experimental.layer_stack`.
    """

    depth: int
    stacked: bool = False
    width: int = 128
    heads: int = 4
    vocabulary: int = 512
    batch: int = 4
    length: int = 64
    rank: int = 8
    alpha: float = 16.0


class LoraLinear(hk.Linear):
    """`hk.Linear` with LoRA written in by hand: the reference for the library."""

    def __init__(self, output_size: int, *, rank: int, alpha: float, name: str = "linear"):
        super().__init__(output_size, name=name)
        self.rank, self.alpha = rank, alpha

    def __call__(self, inputs: jax.Array) -> jax.Array:
        n, m, dtype = inputs.shape[-1], self.output_size, inputs.dtype
        w = hk.get_parameter("w", [n, m], dtype, hk.initializers.VarianceScaling())
        a = hk.get_parameter("w_a", [n, self.rank], dtype, hk.initializers.RandomNormal(0.02))
        b = hk.get_parameter("w_b", [self.rank, m], dtype, jnp.zeros)
        bias = hk.get_parameter("b", [m], dtype, jnp.zeros)
        low_rank = jnp.dot(jnp.dot(inputs, a) * (self.alpha / self.rank), b)
        out = jnp.dot(inputs, w) + low_rank
        return out + jnp.broadcast_to(bias, out.shape)


@dataclasses.dataclass
class Linears:
    """Makes the linear layers of this kind of model: by hand with LoRA in them, or Haiku's."""

    sizes: Sizes
    by_hand: bool = False

    def __call__(self, output_size: int, name: str) -> hk.Module:
        if self.by_hand:
            return LoraLinear(output_size, rank=self.sizes.rank, alpha=self.sizes.alpha, name=name)
        return hk.Linear(output_size, name=name)


class Transformer(hk.Module):
    """A causal transformer of pre-normalized blocks, each with its own weights."""

    def __init__(self, linears: Linears):
        super().__init__(name="transformer")
        self.sizes, self.linear = linears.sizes, linears

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits `[batch, length, vocabulary]` for tokens `int32[batch, length]`."""
        x = hk.Embed(self.sizes.vocabulary, self.sizes.width)(tokens)
        if self.sizes.stacked:
            stack = hk.experimental.layer_stack(self.sizes.depth)
            x = stack(lambda x: Block(self.linear)(x))(x)
        else:
            for _ in range(self.sizes.depth):
                x = Block(self.linear)(x)
        return self.linear(self.sizes.vocabulary, "logits")(norm(x))


class Block(hk.Module):
    """Attention, then a multilayer perceptron, each added to its input."""

    def __init__(self, linears: Linears):
        super().__init__(name="block")
        self.heads, self.linear = linears.sizes.heads, linears

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, length, width]` to `[batch, length, width]`."""
        x = x + self.attention(norm(x))
        hidden = jax.nn.gelu(self.linear(4 * x.shape[-1], "up")(norm(x)))
        return x + self.linear(x.shape[-1], "down")(hidden)

    def attention(self, x: jax.Array) -> jax.Array:
        """Computes causal attention of several heads."""
        *batch, length, width = x.shape
        split = (*batch, length, self.heads, width // self.heads)
        q, k, v = (self.linear(width, name)(x).reshape(split) for name in ("q", "k", "v"))
        scores = jnp.einsum("...thd,...Thd->...htT", q, k) * split[-1] ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
        mixed = jnp.einsum("...htT,...Thd->...thd", weights, v)
        return self.linear(width, "out")(mixed.reshape(x.shape))


def norm(x: jax.Array) -> jax.Array:
    """Layer normalization over the last axis."""
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


def transformed(sizes: Sizes, by_hand: bool = False) -> hk.Transformed:
    """Returns the transformer as functions `init(rng, tokens)` and `apply(params, tokens)`."""
    return hk.without_apply_rng(
        hk.transform(lambda tokens: Transformer(Linears(sizes, by_hand))(tokens))
    )


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of predicting each next token."""
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()
