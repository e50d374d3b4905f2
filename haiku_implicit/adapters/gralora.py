"""`GraLoRA`: a weight with a pair of low-rank factors for each of its blocks, and this operator."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.adapters.operators import Operator
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter, alpha_or
from haiku_implicit.arrays.drawing import uniform, zeros
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class BlockLowRank(Operator, linear_in="a"):
    """A matrix of `k * k` blocks, the block `(i, j)` of which is `a[i, :, j] @ b[j, i]`.

    Attributes:
      a: `[..., k, n / k, k, s]`.
      b: `[..., k, k, s, m / k]`, of the same dtype.
    """

    a: Array
    b: Array

    def compute_shape(self) -> tuple[int, ...]:
        *lead, k, rows, _, _ = np.shape(self.a)
        return (*lead, k * rows, k * np.shape(self.b)[-1])

    def times(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], *self.a.shape[:2])
        low = jnp.einsum("tin,injs->tijs", x, self.a)
        return jnp.einsum("tijs,jism->tjm", low, self.b).reshape(x.shape[0], -1)

    def transposed(self) -> "BlockLowRank":
        a, b = jnp.moveaxis(self.b, -1, -3), jnp.moveaxis(self.a, -3, -1)
        return self._replace(a=a, b=b)


@dataclasses.dataclass
class GraLoRA(Adapter):
    """The weight `w` plus `k * k` blocks of rank `r / k`, times `alpha / r`.

    With as many trained numbers and as much work as LoRA, the correction has a rank of up to `k * r`,
    and an outlier among the inputs changes the gradients of one row of blocks alone (Jung et al. 2025,
    arXiv:2505.20355).

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., k, n / k, r]`, the first factors; its columns are `k` groups, one for each column of
        blocks.
      b: `[..., k, r, m / k]`, the second factors; zeros at first.
      alpha: the numerator of the scale, as for `LoRA`.
    """

    positive_options = ("rank", "blocks")

    a: Array
    b: Array
    alpha: Array = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        super().check_options(options)
        blocks = options.get("blocks", 2)
        if options.get("rank", blocks) % blocks:
            raise value_error(
                f"rank: expected a multiple of blocks={blocks}, got {options['rank']}"
            )

    @classmethod
    def create(
        cls, w: Array, key: jax.Array, *, rank: int, alpha: float | None = None, blocks: int = 2
    ) -> Self:
        """Makes an adapter with `b` zero.

        Args:
          rank: the sum of the ranks of the blocks in a row of blocks, a multiple of `blocks`.
          alpha: the correction is scaled by `alpha / rank`; 1 by default.
          blocks: the number of blocks along each side, a divisor of `n` and `m`.
        """
        *lead, n, m = w.shape
        if n % blocks or m % blocks:
            raise value_error(f"blocks: expected a divisor of {n} and {m}, got {blocks}")
        a = uniform(key, (*lead, blocks, n // blocks, rank), w.dtype)
        b = zeros((*lead, blocks, rank, m // blocks), w.dtype)
        return cls(w, a, b, alpha_or(alpha, rank, tuple(lead)))

    def completed(self) -> Self:
        return self.with_number("alpha", self.a.shape[-1], self.lead)

    def equivalent(self) -> Sum:
        *lead, k, _, r = self.a.shape
        scale = 1.0 if self.alpha is None else jnp.expand_dims(self.alpha / r, (-3, -2, -1))
        a = (self.a * scale).astype(self.dtype).reshape(*self.a.shape[:-1], k, r // k)
        b = self.b.astype(self.dtype).reshape(*lead, k, k, r // k, -1)
        return Sum(self.w, BlockLowRank(a, b))
