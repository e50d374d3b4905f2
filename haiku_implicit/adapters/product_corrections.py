"""`LoHa` and `LoKr`: weights whose correction is a Hadamard or a Kronecker product."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.operators import Kronecker
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter, alpha_or, filled, uniform
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
        a1, b1, b2 = (
            scale * jax.random.normal(k, (*lead, *shape), w.dtype)
            for k, scale, shape in zip(
                keys, (0.1, 1.0, 1.0), ((n, rank), (rank, m), (rank, m)), strict=True
            )
        )
        a2 = jnp.zeros_like(a1)
        return cls(w, a1, b1, a2, b2, alpha_or(alpha, rank, tuple(lead)))

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
        c = jnp.zeros((*lead, p, q), w.dtype)
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
