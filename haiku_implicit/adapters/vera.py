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
      a: `[..., n, r]`, and
      b: `[..., r, m]`: random, and frozen; one array may serve many weights.
      d: `[..., r]`.
      e: `[..., m]`, zeros at first.
    """

    a: Any = dataclasses.field(metadata=FROZEN)
    b: Any = dataclasses.field(metadata=FROZEN)
    d: Any
    e: Any

    @classmethod
    def create(cls, w: Any, key: jax.Array, *, rank: int, d_initial: float = 0.1) -> Self:
        *lead, n, m = w.shape
        keys = jax.random.split(key)
        a = jax.random.normal(keys[0], (*lead, n, rank), w.dtype) / n**0.5
        b = jax.random.normal(keys[1], (*lead, rank, m), w.dtype) / rank**0.5
        d, e = jnp.full((*lead, rank), d_initial, w.dtype), jnp.zeros((*lead, m), w.dtype)
        return cls(w, a, b, d, e)

    def equivalent(self) -> LoRA:
        return LoRA(self.w, self.a * self.d[..., None, :], self.b * self.e[..., None, :])
