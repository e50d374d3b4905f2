"""`DoRA`: LoRA for the directions of a weight's columns, and their lengths (Liu et al. 2024, arXiv:2402.09353)."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.fields import FROZEN


@dataclasses.dataclass
class DoRA(Adapter):
    """The weight `v * (magnitude / |v|)`, where `v = w + (alpha / rank) * a @ b` and `|v|` is of columns.

    The lengths `|v|` count as constants in gradients, as in section 4.3 of the paper. They are found
    without `v`: `|w|² + 2 w·(a b) + |a b|²`, column by column.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., n, r]`, and
      b: `[..., r, m]`: the factors of the correction.
      magnitude: `[..., m]`, the lengths of the columns.
      alpha: as of `LoRA`.
    """

    a: Any
    b: Any
    magnitude: Any
    alpha: Any = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def on(cls, lora: LoRA) -> Self:
        """A weight that stands for the same numbers as one with LoRA does."""
        lengths = jnp.sqrt(_squared_lengths(lora))
        return cls(lora.w, lora.a, lora.b, lengths.astype(lora.w.dtype), lora.alpha)

    def equivalent(self) -> ScaledMatrix:
        lora = LoRA(self.w, self.a, self.b, self.alpha)
        lengths = jnp.sqrt(jax.lax.stop_gradient(_squared_lengths(lora)))
        return ScaledMatrix(lora, (self.magnitude / lengths).astype(self.dtype), -1)


def _squared_lengths(lora: LoRA) -> jax.Array:
    """The squared lengths of the columns of a weight with LoRA, `[..., m]`, in float32."""
    w, a, b = lora.w, (lora.a * jnp.expand_dims(jnp.asarray(lora.scale), (-2, -1))), lora.b
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    of_w = jnp.square(w.astype(jnp.float32)).sum(-2)
    crossed = jnp.einsum("...nm,...nr->...rm", w.astype(jnp.float32), a)
    inner = jnp.einsum("...nr,...ns->...rs", a, a)
    of_both = (crossed * b).sum(-2)
    of_delta = jnp.einsum("...rm,...rs,...sm->...m", b, inner, b)
    return of_w + 2 * of_both + of_delta
