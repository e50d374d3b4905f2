"""AlphaFold 3's Pairformer in plain Haiku, after the algorithms of its supplement.

The paper is https://doi.org/10.1038/s41586-024-07487-w. Dropout is left out. A crop of a complex has
`n` tokens; `single` is ``[n, single]`` and describes them, `pair` is ``[n, n, pair]``, for each two.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class PairformerConfig:
    """The sizes of a Pairformer; the defaults are those of AlphaFold 3.

    Attributes:
        single: Width of the representation of a token.
        pair: Width of the representation of a pair.
        num_blocks: Number of blocks, whose parameters are stacked.
        single_heads: Heads of the attention between tokens; ``single`` is a multiple of it.
        pair_heads: Heads of the attention between pairs; ``pair`` is a multiple of it.
        factor: Width within a transition, relative to the representation.
    """

    single: int = 384
    pair: int = 128
    num_blocks: int = 48
    single_heads: int = 16
    pair_heads: int = 4
    factor: int = 4


def norm(x: jax.Array, name: str = "norm") -> jax.Array:
    return hk.LayerNorm(-1, True, True, name=name)(x)


def linear(x: jax.Array, size: int, name: str, with_bias: bool = False) -> jax.Array:
    return hk.Linear(size, with_bias, name=name)(x)


class TriangleMultiplication(hk.Module):
    """Algorithms 12 and 13: an edge `ij` from the edges `ik` and `jk`, or from `ki` and `kj`."""

    def __init__(self, outgoing: bool, name: str):
        super().__init__(name=name)
        self.equation = "ikc,jkc->ijc" if outgoing else "kic,kjc->ijc"

    def __call__(self, pair: jax.Array) -> jax.Array:
        """Maps ``[n, n, pair]`` to ``[n, n, pair]``."""
        size, z = pair.shape[-1], norm(pair)
        a, b = (
            jax.nn.sigmoid(linear(z, size, f"{name}_gate")) * linear(z, size, name)
            for name in ("left", "right")
        )
        mixed = norm(jnp.einsum(self.equation, a, b), "center_norm")
        return jax.nn.sigmoid(linear(z, size, "gate")) * linear(mixed, size, "output")


def attention(x: jax.Array, bias: jax.Array, num_heads: int, query_bias: bool = False) -> jax.Array:
    """Returns gated attention along the last axis but one, with `bias` ``[n, n, heads]``."""
    size = x.shape[-1]
    heads = (*x.shape[:-1], num_heads, size // num_heads)
    query = linear(x, size, "query", query_bias).reshape(heads)
    key, value = (linear(x, size, name).reshape(heads) for name in ("key", "value"))
    scores = jnp.einsum("...jhc,...khc->...hjk", query, key) * heads[-1] ** -0.5
    scores = scores.astype(jnp.float32) + jnp.moveaxis(bias, -1, 0)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("...hjk,...khc->...jhc", weights, value).reshape(x.shape)
    return linear(jax.nn.sigmoid(linear(x, size, "gate")) * mixed, size, "output")


class TriangleAttention(hk.Module):
    """Algorithms 14 and 15: between edges with the same starting node, or the same ending node."""

    def __init__(self, num_heads: int, starting: bool, name: str):
        super().__init__(name=name)
        self.num_heads, self.starting = num_heads, starting

    def __call__(self, pair: jax.Array) -> jax.Array:
        """Maps ``[n, n, pair]`` to ``[n, n, pair]``."""
        z = norm(pair if self.starting else pair.swapaxes(0, 1))
        out = attention(z, linear(z, self.num_heads, "bias"), self.num_heads)
        return out if self.starting else out.swapaxes(0, 1)


class Transition(hk.Module):
    """Algorithm 11: a gated feed-forward network."""

    def __init__(self, factor: int, name: str):
        super().__init__(name=name)
        self.factor = factor

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., width]`` to ``[..., width]``."""
        hidden, size = norm(x), x.shape[-1]
        gate = jax.nn.silu(linear(hidden, self.factor * size, "gate"))
        return linear(gate * linear(hidden, self.factor * size, "up"), size, "down")


class SingleAttention(hk.Module):
    """Algorithm 24 without conditioning: attention between tokens, biased by their pairs."""

    def __init__(self, num_heads: int, name: str):
        super().__init__(name=name)
        self.num_heads = num_heads

    def __call__(self, single: jax.Array, pair: jax.Array) -> jax.Array:
        """Maps ``[n, single]`` and ``[n, n, pair]`` to ``[n, single]``."""
        bias = linear(norm(pair, "pair_norm"), self.num_heads, "bias")
        return attention(norm(single), bias, self.num_heads, query_bias=True)


class Pairformer(hk.Module):
    """Algorithm 17: blocks that update pairs by triangles, and tokens by their pairs."""

    def __init__(self, config: PairformerConfig, name: str = "pairformer"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, single: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps ``[n, single]`` and ``[n, n, pair]`` to the same shapes."""
        block = hk.remat(self.block)
        return hk.experimental.layer_stack(self.config.num_blocks)(block)(single, pair)

    def block(self, single: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs one block."""
        config = self.config
        for name in ("outgoing", "incoming"):
            pair += TriangleMultiplication(name == "outgoing", f"{name}_edges")(pair)
        for name in ("starting", "ending"):
            pair += TriangleAttention(config.pair_heads, name == "starting", f"{name}_node")(pair)
        pair += Transition(config.factor, "pair_transition")(pair)
        single += SingleAttention(config.single_heads, "single_attention")(single, pair)
        return single + Transition(config.factor, "single_transition")(single), pair
