"""`LowRankDiagonal`: LoRA plus a trained diagonal."""

import dataclasses
from typing import Self

import jax

from haiku_implicit.adapters.operators import Diagonal
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter, alpha_or
from haiku_implicit.arrays.drawing import uniform, zeros
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class LowRankDiagonal(Adapter, method="low_rank_diagonal"):
    """The weight `w + (alpha / rank) * a @ b + diag(values)`.

    A diagonal has full rank, so no `a @ b` of small rank approximates it.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., n, r]`, and
      b: `[..., r, m]`: the factors of low rank.
      values: `[..., min(n, m)]`, the diagonal; zeros at first.
      alpha: as for `LoRA`.
    """

    field_axes = {"a": "n.", "b": ".m"}

    a: Array
    b: Array
    values: Array
    alpha: Array = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, rank: int, alpha: float | None = None) -> Self:
        *lead, n, m = w.shape
        a, b = uniform(key, (*lead, n, rank), w.dtype), zeros((*lead, rank, m), w.dtype)
        values = zeros((*lead, min(n, m)), w.dtype)
        return cls(w, a, b, values, alpha_or(alpha, rank, tuple(lead)))

    def completed(self) -> Self:
        return self.with_number("alpha", self.a.shape[-1], self.a.shape[:-2])

    def equivalent(self) -> Sum:
        n, m = self.shape[-2:]
        diagonal = Diagonal(self.values.astype(self.dtype), m, n)
        return Sum(LoRA(self.w, self.a, self.b, self.alpha), diagonal)
