"""`LoHa`: the elementwise product of two corrections of low rank (Hyeon-Woo et al. 2021, arXiv:2108.06098)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.fields import FROZEN


@dataclasses.dataclass
class LoHa(Adapter):
    """The weight `w + (alpha / rank) * (a1 @ b1) * (a2 @ b2)`.

    The correction has the rank `r²`, with the products of the columns of `a1` and `a2` as its first
    factor. Where that is less than half of the weight's smaller side, products go through these
    factors; otherwise the correction is made, and not its sum with `w`.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a1, a2: `[..., n, r]`, and
      b1, b2: `[..., r, m]`: the factors of the two matrices.
      alpha: the numerator of the scale `alpha / r`, as of `LoRA`.
    """

    a1: Any
    b1: Any
    a2: Any
    b2: Any
    alpha: Any = dataclasses.field(default=None, metadata=FROZEN)

    def equivalent(self) -> Any:
        r = self.a1.shape[-1]
        scale = 1.0 if self.alpha is None else jnp.expand_dims(self.alpha / r, (-2, -1))
        a1 = (self.a1 * scale).astype(self.dtype)
        b1, a2, b2 = (x.astype(self.dtype) for x in (self.b1, self.a2, self.b2))
        if 2 * r * r < min(self.shape[-2:]):
            a = (a1[..., :, None] * a2[..., None, :]).reshape(*a1.shape[:-1], r * r)
            b = (b1[..., :, None, :] * b2[..., None, :, :]).reshape(*self.lead, r * r, -1)
            return LoRA(self.w, a, b)
        # Made again in the backward pass rather than kept.
        delta = jax.checkpoint(lambda a1, b1, a2, b2: (a1 @ b1) * (a2 @ b2))(a1, b1, a2, b2)
        return Sum(self.w, delta)
