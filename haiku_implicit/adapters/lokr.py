"""`LoKr`: a weight with a Kronecker product as its correction (Yeh et al. 2023, arXiv:2309.14859)."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.operators import Kronecker
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter, filled
from haiku_implicit.arrays.drawing import uniform, zeros
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class LoKr(Adapter):
    """The weight `w + (alpha / rank) * kron(c, d)`, with dense or low-rank `c` and `d`.

    Attributes:
      w: `[..., p * s, q * t]`, the frozen weight.
      c: `[..., p, q]`, or a pair `[..., p, r]`, `[..., r, q]`.
      d: `[..., s, t]`, or a pair `[..., s, r]`, `[..., r, t]`.
      scale: `[...]`, `alpha / rank`; None for 1.
    """

    c: Array
    d: Array
    scale: Array = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def create(
        cls,
        w: Array,
        key: jax.Array,
        *,
        rank: int,
        alpha: float | None = None,
        factor: int | None = None,
    ) -> Self:
        """Makes an adapter with `c` zero.

        Args:
          rank: the rank of `d` if less than half of its smaller side; otherwise `d` is dense.
          alpha: the correction is scaled by `alpha / rank`.
          factor: the largest side of `c`; None for sides of `c` and `d` as equal as possible.
        """
        *lead, n, m = w.shape
        (p, s), (q, t) = split_size(n, factor), split_size(m, factor)
        keys = jax.random.split(key)
        c = zeros((*lead, p, q), w.dtype)
        d: Array = uniform(keys[0], (*lead, s, t), w.dtype)
        if 2 * rank < min(s, t):
            d = (uniform(keys[0], (*lead, s, rank), w.dtype),
                 uniform(keys[1], (*lead, rank, t), w.dtype))  # fmt: skip
        return cls(w, c, d, filled(1.0 if alpha is None else alpha / rank, tuple(lead)))

    def completed(self) -> Self:
        c = self.c[0] if isinstance(self.c, tuple) else self.c
        return self.with_number("scale", 1.0, c.shape[:-2])

    def equivalent(self) -> Array:
        c, d = (x[0] @ x[1] if isinstance(x, tuple) else x for x in (self.c, self.d))
        if self.scale is not None:
            c = c * jnp.expand_dims(self.scale, (-2, -1))
        return Sum(self.w, Kronecker(c.astype(self.dtype), d.astype(self.dtype)))


def split_size(n: int, largest: int | None = None) -> tuple[int, int]:
    """Two factors of `n`, the first not larger than the second, nor than `largest`.

    >>> split_size(576), split_size(576, 4), split_size(7)
    ((24, 24), (4, 144), (1, 7))
    """
    limit = math.isqrt(n) if largest is None else min(largest, n)
    first = max(k for k in range(1, limit + 1) if n % k == 0)
    return first, n // first
