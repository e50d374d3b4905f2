"""`RandLoRA`: a sum of random low-rank matrices, with trained scales."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.vera import RandomMatrix
from haiku_implicit.arrays.adapter import Adapter, alpha_or
from haiku_implicit.arrays.drawing import zeros
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.box import dense
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class RandLoRA(Adapter):
    """The weight `w` plus a sum of `k` random matrices of rank `r` with trained scales.

    The correction has full rank with about as many trained numbers as LoRA (Albert et al. 2025,
    arXiv:2502.00987). A product with it costs about as much as a product with `w`.

    Attributes:
      w: `[..., n, m]`, the frozen weight; `small` and `large` are its sides.
      a: `[..., r, small]` or with more columns, and
      b: `[..., large, k * r]` or with more rows and columns, which are not used: random, and frozen.
        `create` makes `RandomMatrix`, of two seeds for all weights of a tree.
      rows: `[..., r, k]`, scales of the rows of `a`; zeros at first.
      columns: `[..., k, small]`, scales of the columns of `a`.
      alpha: the numerator of the scale `alpha / r`, as for `LoRA`.
    """

    one_key = True

    a: Array = dataclasses.field(metadata=FROZEN)
    b: Array = dataclasses.field(metadata=FROZEN)
    rows: Array
    columns: Array
    alpha: Array = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, rank: int, alpha: float | None = None) -> Self:
        """Makes an adapter with `rows` zero.

        Args:
          rank: the rank of each random matrix. There are `k = ceil(small / rank)` of them, so that a
            higher rank trains fewer numbers.
          alpha: the correction is scaled by `alpha / rank`; 1 by default.
        """
        lead, (small, large) = tuple(w.shape[:-2]), sorted(w.shape[-2:])
        k = -(-small // rank)
        # Uniform numbers with a variance of 1.
        a, b = (
            RandomMatrix(jnp.full(lead, seed), shape, 3**0.5, dtype=w.dtype)
            for seed, shape in zip(
                jax.random.bits(key, (2,), jnp.uint32),
                ((rank, small), (large, k * rank)),
                strict=True,
            )
        )
        columns = jnp.full((*lead, k, small), 1 / max(k, small), w.dtype)
        rows = zeros((*lead, rank, k), w.dtype)
        return cls(w, a, b, rows, columns, alpha_or(alpha, rank, lead))

    def completed(self) -> Self:
        return self.with_number("alpha", self.rows.shape[-2], self.lead)

    def equivalent(self) -> LoRA:
        r, k = self.rows.shape[-2:]
        n, m = self.shape[-2:]
        scale = 1.0 if self.alpha is None else jnp.expand_dims(self.alpha / r, (-2, -1))
        a = dense(self.a)[..., :r, None, : min(n, m)]
        a = (self.rows * scale)[..., :, :, None] * a * self.columns[..., None, :, :]
        a = a.reshape(*self.lead, r * k, min(n, m)).astype(self.dtype)
        b = dense(self.b)[..., : max(n, m), : r * k].astype(self.dtype)
        return LoRA(self.w, *map(jnp.matrix_transpose, (a, b))) if n <= m else LoRA(self.w, b, a)
