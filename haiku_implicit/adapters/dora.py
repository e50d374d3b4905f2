"""`DoRA`: LoRA for the directions of a weight's columns, with separate trained lengths."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.adapter import Adapter, alpha_or
from haiku_implicit.arrays.drawing import uniform, zeros
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.transform import materialize, use_implicit_args
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class DoRA(Adapter):
    """The weight `v * (magnitude / |v|)` for `v = w + (alpha / rank) * a @ b` and column lengths `|v|`.

    After Liu et al. 2024, arXiv:2402.09353. The lengths `|v|` are constants for gradients, as in
    section 4.3 of the paper. They are computed without `v`: `|v|² = |w|² + 2 w·(a b) + |a b|²`. A
    column of zeros (of an output that begins at zero, for example) is not rescaled until it has a
    length.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., n, r]`, and
      b: `[..., r, m]`: the factors of the correction.
      magnitude: `[..., m]`, the lengths of the columns.
      alpha: as for `LoRA`.
    """

    keeps_base = False
    peft_flag = "use_dora"
    peft_tensors = {"magnitude": "lora_magnitude_vector"}
    field_axes = {"a": "n.", "b": ".m", "magnitude": "m"}

    a: Array
    b: Array
    magnitude: Array
    alpha: Array = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, rank: int, alpha: float | None = None) -> Self:
        *lead, n, m = w.shape
        a, b = uniform(key, (*lead, n, rank), w.dtype), zeros((*lead, rank, m), w.dtype)
        # The lengths of a constant are a constant, which `materialize` makes dense.
        lengths = materialize(use_implicit_args(lambda w: jnp.sqrt(_squared_lengths(w)))(w))
        return cls(w, a, b, lengths.astype(w.dtype), alpha_or(alpha, rank, tuple(lead)))

    @classmethod
    def of_factors(cls, a: Array, b: Array, scale: Array, **others: Any) -> Self:
        """As `LoRA.of_factors`, with the lengths as another field."""
        return cls.without_base(a=a, b=b, alpha=jnp.float32(scale * a.shape[-1]), **others)

    def completed(self) -> Self:
        return self.with_number("alpha", self.a.shape[-1], self.a.shape[:-2])

    def equivalent(self) -> ScaledMatrix:
        lora = LoRA(self.w, self.a, self.b, self.alpha)
        scaled_a = self.a if self.alpha is None else self.a * lora.scale[..., None, None]
        squares = _squared_lengths(self.w) + _squares_of_delta(self.w, scaled_a, self.b)
        lengths = jnp.sqrt(jax.lax.stop_gradient(squares))
        # A column of zeros lacks a direction. It is not rescaled, so that its factors have a gradient.
        some = lengths > 0
        ratio = jnp.where(some, self.magnitude / jnp.where(some, lengths, 1), 1)
        return ScaledMatrix(lora, ratio.astype(self.dtype), -1)


def _squared_lengths(w: jax.Array) -> jax.Array:
    """The squared lengths of the columns `[..., m]`, in float32 or wider."""
    return jnp.square(_wide(w)).sum(-2)


def _squares_of_delta(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """The change of the squared column lengths of `w` when `a @ b` is added."""
    w, a, b = map(_wide, (w, a, b))
    crossed = jnp.einsum("...nm,...nr->...rm", w, a)
    inner = jnp.einsum("...nr,...ns,...sm->...rm", a, a, b)
    return ((2 * crossed + inner) * b).sum(-2)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
