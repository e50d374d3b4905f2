"""`LoKr`: a correction that is a Kronecker product (Yeh et al. 2023, arXiv:2309.14859)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.adapters.operators import Kronecker
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.core.fields import FROZEN


@dataclasses.dataclass
class LoKr(Adapter):
    """The weight `w + (alpha / rank) * kron(c, d)`, where `c` and `d` are dense or of low rank.

    Attributes:
      w: `[..., p * s, q * t]`, the frozen weight.
      c: `[..., p, q]`, or a pair `[..., p, r]`, `[..., r, q]`.
      d: `[..., s, t]`, or a pair `[..., s, r]`, `[..., r, t]`.
      scale: `[...]`, `alpha / rank`; None for 1.
    """

    c: Any
    d: Any
    scale: Any = dataclasses.field(default=None, metadata=FROZEN)

    def equivalent(self) -> Any:
        c, d = (x[0] @ x[1] if isinstance(x, tuple) else x for x in (self.c, self.d))
        if self.scale is not None:
            c = c * jnp.expand_dims(self.scale, (-2, -1))
        return Sum(self.w, Kronecker(c.astype(self.dtype), d.astype(self.dtype)))
