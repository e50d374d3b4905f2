"""`HiRA`: a weight times a matrix of low rank, entry by entry."""

import dataclasses
from typing import Self

import jax

from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.drawing import uniform, zeros
from haiku_implicit.core.box import dense
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class HiRA(Adapter):
    """The weight `w * (1 + a @ b)`, entry by entry (Huang et al., ICLR 2025).

    The correction `w * (a @ b)` has a rank of up to `r` times the rank of `w`. So a product makes the
    dense weight, which the backward pass computes again.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., n, r]`.
      b: `[..., r, m]`, zeros at first.
    """

    keeps_base = False  # (a factor may be zero)
    field_axes = {"a": "n.", "b": ".m"}

    a: Array
    b: Array

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, rank: int) -> Self:
        """Makes an adapter with `b` zero.

        Args:
          rank: the rank of `a @ b`.
        """
        *lead, n, m = w.shape
        a = uniform(key, (*lead, n, rank), w.dtype)
        return cls(w, a, zeros((*lead, rank, m), w.dtype))

    def equivalent(self) -> jax.Array:
        def scaled(w: Array, a: Array, b: Array) -> jax.Array:
            return (dense(w) * (1 + a @ b)).astype(self.dtype)  # 1 + small needs its own dtype

        return jax.checkpoint(scaled)(self.w, self.widened(self.a), self.widened(self.b))
