"""`LoHa`: a weight with the elementwise product of two low-rank matrices as its correction."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter, alpha_or
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class LoHa(Adapter):
    """The weight `w + (alpha / rank) * (a1 @ b1) * (a2 @ b2)` (Hyeon-Woo et al., arXiv:2108.06098).

    The correction has the rank `r²`, with the products of the columns of `a1` and `a2` as its first
    factor. If the rank is less than half of the weight's smaller side, products go through these
    factors; otherwise they make the dense correction, but not its sum with `w`.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a1, a2: `[..., n, r]`, and
      b1, b2: `[..., r, m]`: the factors of the two matrices.
      alpha: the numerator of the scale `alpha / r`, as for `LoRA`.
    """

    field_axes = {"a1": "n.", "a2": "n.", "b1": ".m", "b2": ".m"}

    a1: Array
    b1: Array
    a2: Array
    b2: Array
    alpha: Array = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, rank: int, alpha: float | None = None) -> Self:
        *lead, n, m = w.shape
        keys = jax.random.split(key, 3)
        a1 = 0.1 * jax.random.normal(keys[0], (*lead, n, rank), w.dtype)
        b1, b2 = (jax.random.normal(k, (*lead, rank, m), w.dtype) for k in keys[1:])
        return cls(w, a1, b1, jnp.zeros_like(a1), b2, alpha_or(alpha, rank, tuple(lead)))

    def completed(self) -> Self:
        return self.with_number("alpha", self.a1.shape[-1], self.a1.shape[:-2])

    def equivalent(self) -> Array:
        r = self.a1.shape[-1]
        scale = 1.0 if self.alpha is None else jnp.expand_dims(self.alpha / r, (-2, -1))
        a1 = (self.a1 * scale).astype(self.dtype)
        b1, a2, b2 = (x.astype(self.dtype) for x in (self.b1, self.a2, self.b2))
        if 2 * r * r < min(self.shape[-2:]):
            a = (a1[..., :, None] * a2[..., None, :]).reshape(*a1.shape[:-1], r * r)
            b = (b1[..., :, None, :] * b2[..., None, :, :]).reshape(*self.lead, r * r, -1)
            return LoRA(self.w, a, b)
        # Computed again in the backward pass rather than kept.
        delta = jax.checkpoint(lambda a1, b1, a2, b2: (a1 @ b1) * (a2 @ b2))(a1, b1, a2, b2)
        return Sum(self.w, delta)
