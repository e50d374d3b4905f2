"""`MiSS`: a weight with one trained block of rows, added again and again down the rows."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.operators import Kronecker
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.drawing import zeros
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class MiSS(Adapter):
    """The weight `w` plus a block of `r` rows that repeats down its `n` rows.

    Row `i` of the correction is row `i mod r` of the block (Kang and Yin 2024, arXiv:2409.15371). So a
    product sums groups of inputs and multiplies once: half of LoRA's trained numbers, and of its work.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      block: `[..., r, m]`, zeros at first.
    """

    field_axes = {"block": ".m"}

    block: Array

    @classmethod
    def room(cls, shape: tuple[int, ...], **options: int) -> int:
        """The largest rank: one row of the block for each row of the weight."""
        return shape[-2]

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, rank: int) -> Self:
        """Makes an adapter with a block of zeros.

        Args:
          rank: the number of rows of the block. Products are cheapest if it divides `n`.
        """
        *lead, _, m = w.shape
        return cls(w, zeros((*lead, rank, m), w.dtype))

    def equivalent(self) -> Array:
        n, r = self.shape[-2], self.block.shape[-2]
        block = self.block.astype(self.dtype)
        if n % r:
            a = jnp.tile(jnp.eye(r, dtype=self.dtype), (-(-n // r), 1))[:n]
            return LoRA(self.w, jnp.broadcast_to(a, (*self.lead, n, r)), block)
        ones = jnp.ones((*self.lead, n // r, 1), self.dtype)
        return Sum(self.w, Kronecker(ones, block))
