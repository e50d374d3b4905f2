"""`VeRA`: LoRA with random factors that weights share, and trained scales."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.fields import FROZEN


@dataclasses.dataclass
class VeRA(Adapter):
    """The weight `w + (a * d) @ (b * e)`, of which the vectors `d` and `e` are trained.

    After Kopiczko et al. 2023, arXiv:2310.11454.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., n, r]` or with more rows, and
      b: `[..., r, m]` or with more columns, of which the first ones are used: random, and frozen. One
        pair serves all weights of a tree that `add_adapter` makes, except stacked ones.
      d: `[..., r]`.
      e: `[..., m]`, zeros at first.
    """

    field_axes = {"a": "n.", "b": ".m", "e": "m"}

    a: Any = dataclasses.field(metadata=FROZEN)
    b: Any = dataclasses.field(metadata=FROZEN)
    d: Any
    e: Any

    @classmethod
    def create(
        cls,
        w: Any,
        key: jax.Array,
        *,
        rank: int,
        d_initial: float = 0.1,
        shared: tuple[jax.Array, jax.Array] | None = None,
    ) -> Self:
        """An adapter with `e` zero.

        Args:
          rank: of the correction.
          d_initial: the value of `d` at first.
          shared: `a` and `b`, where other weights have them, too; None to draw them.
        """
        *lead, n, m = w.shape
        a, b = shared or cls.draw(key, w.shape, rank, w.dtype)
        d, e = jnp.full((*lead, rank), d_initial, w.dtype), jnp.zeros((*lead, m), w.dtype)
        return cls(w, a, b, d, e)

    @staticmethod
    def draw(
        key: jax.Array, shape: tuple[int, ...], rank: int, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Random `a` and `b` for weights `[..., n, m]`, or smaller ones."""
        *lead, n, m = shape
        keys = jax.random.split(key)
        a = jax.random.normal(keys[0], (*lead, n, rank), dtype) / n**0.5
        b = jax.random.normal(keys[1], (*lead, rank, m), dtype) / rank**0.5
        return a, b

    def equivalent(self) -> LoRA:
        n, m = self.shape[-2:]
        a, b = self.a[..., :n, :], self.b[..., :m]
        return LoRA(self.w, a * self.d[..., None, :], b * self.e[..., None, :])
