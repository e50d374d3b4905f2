"""A language model with a mixture of experts, in plain Haiku, after https://arxiv.org/abs/2401.04088.

A Llama that sends each token to a few of many feed-forward networks, as in Mixtral. Tokens are
sorted by expert, so that each layer of all experts is one product, ``jax.lax.ragged_dot``.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

from models import llama


@dataclasses.dataclass(frozen=True)
class MixtureConfig(llama.LlamaConfig):
    """The sizes of a Llama and its mixtures; ``hidden_dim`` is the width of each expert.

    Attributes:
        num_experts: Number of experts in each layer.
        experts_per_token: Number of experts for each token.
    """

    num_experts: int = 8
    experts_per_token: int = 2

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is not between 1 and "
                f"num_experts {self.num_experts}"
            )


class ExpertLinear(hk.Module):
    """One matrix for each expert."""

    def __init__(self, num_experts: int, size: int, name: str):
        super().__init__(name=name)
        self.num_experts, self.size = num_experts, size

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Maps rows ``[rows, dim]`` that are sorted by expert to ``[rows, size]``.

        Args:
            x: The rows.
            group_sizes: Number of rows of each expert, ``[num_experts]`` int32.
        """
        shape = [self.num_experts, x.shape[-1], self.size]
        init = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
        return jax.lax.ragged_dot(x, hk.get_parameter("w", shape, x.dtype, init), group_sizes)


class Mixture(hk.Module):
    """The weighted sum of the outputs of each token's best experts."""

    def __init__(self, config: MixtureConfig, name: str = "mixture"):
        super().__init__(name=name)
        self.config = config

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chooses the experts of each row ``[rows, dim]``, and their weights.

        Returns:
            Weights with sum one, and ids of experts, both ``[rows, experts_per_token]``.
        """
        logits = hk.Linear(self.config.num_experts, with_bias=False, name="router")(x)
        best, experts = jax.lax.top_k(logits, self.config.experts_per_token)
        return jax.nn.softmax(best), experts

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., dim]`` to ``[..., dim]``."""
        config, rows = self.config, x.reshape(-1, x.shape[-1])
        weights, experts = self.route(rows)
        experts = experts.reshape(-1)
        order = jnp.argsort(experts)
        token = order // config.experts_per_token
        sizes = jnp.bincount(experts, length=config.num_experts).astype(jnp.int32)

        def linear(y: jax.Array, size: int, name: str) -> jax.Array:
            return ExpertLinear(config.num_experts, size, name)(y, sizes)

        chosen = rows[token]
        hidden = jax.nn.silu(linear(chosen, config.hidden_dim, "gate_proj"))
        hidden *= linear(chosen, config.hidden_dim, "up_proj")
        out = linear(hidden, x.shape[-1], "down_proj") * weights.reshape(-1)[order, None]
        return jnp.zeros_like(rows).at[token].add(out).reshape(x.shape)


class Layer(hk.Module):
    """Attention and a mixture, each after a norm and added to the residual stream."""

    def __init__(self, config: MixtureConfig, name: str = "layer"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, time, dim]`` to ``[batch, time, dim]``."""
        x = x + llama.Attention(self.config)(llama.rms_norm(self.config, "attention_norm")(x))
        return x + Mixture(self.config)(llama.rms_norm(self.config, "mixture_norm")(x))


class MixtureOfExperts(hk.Module):
    """The language model: maps tokens to logits of each next token."""

    def __init__(self, config: MixtureConfig, name: str = "mixture_of_experts"):
        super().__init__(name=name)
        self.config = config

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Predicts the token after each of ``tokens``.

        Args:
            tokens: Token ids, ``[batch, time]`` int32.

        Returns:
            Logits, ``[batch, time, vocab_size]`` float32.
        """
        embed = hk.Embed(self.config.vocab_size, self.config.dim, name="embed")
        x = embed(tokens)
        for i in range(self.config.num_layers):
            x = Layer(self.config, name=f"layer_{i}")(x)
        x = llama.rms_norm(self.config, "final_norm")(x)
        if self.config.tied:
            return jnp.einsum("btd,vd->btv", x, embed.embeddings)
        return hk.Linear(self.config.vocab_size, with_bias=False, name="lm_head")(x)
