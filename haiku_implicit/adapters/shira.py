"""`SHiRA`: a weight with a correction of a few entries."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.operators import Sparse, check_places, places
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class SHiRA(Adapter):
    """The weight `w + delta`, with a `delta` that is zero except in a few places.

    After Bhardwaj et al. 2024, arXiv:2406.13175, with random places (the paper's SHiRA-Rand).

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      values: `[..., k]`; zeros at first.
      row, column: `[..., k]`, the places of the values.
    """

    values: Array
    row: Array = dataclasses.field(metadata=FROZEN)
    column: Array = dataclasses.field(metadata=FROZEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        n, m = self.shape[-2:]
        check_places(self, (n, m))

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, entries: int) -> Self:
        """Makes an adapter with a correction of zero.

        Args:
          entries: the number of trained entries per matrix. (LoRA of rank `r` trains `r * (n + m)`.)
        """
        row, column = places(key, w.shape, entries, "entries")
        return cls(w, jnp.zeros(row.shape, w.dtype), row, column)

    def equivalent(self) -> Sum:
        n, m = self.shape[-2:]
        values = self.values.astype(self.dtype)
        return Sum(self.w, Sparse(values, self.row, self.column, (n, m)))
