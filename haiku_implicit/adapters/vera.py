"""`VeRA`: LoRA with shared random factors and trained scales."""

import dataclasses
import sys
from typing import Any, Self

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.box import dense
from haiku_implicit.core.fields import FROZEN, aux_field
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class RandomMatrix(ImplicitArray, core_ndim=2):
    """A random matrix that is stored as a seed: its numbers are computed when they are used.

    The number at a row and a column depends only on the seed, the row and the column. So matrices with
    one seed are parts of one matrix, except for their `bound`, and a seed of 4 bytes stores it. The
    numbers are the same to the bit on all devices, and with all settings of JAX's random keys.

    Attributes:
      seed: `[...]`, of uint32.
      shape_of_matrix: `(n, m)`.
      bound: the numbers are uniform in ±bound.

    Example:
      >>> import jax.numpy as jnp, numpy as np, haiku_implicit as hki
      >>> seed = jnp.uint32(3)
      >>> large, small = (hki.adapters.RandomMatrix(seed, (n, 5), 1.0) for n in (4, 2))
      >>> bool((hki.materialize(large)[:2] == hki.materialize(small)).all())
      True
    """

    seed: Array = dataclasses.field(metadata=FROZEN)
    shape_of_matrix: tuple[int, int] = aux_field()
    bound: float = aux_field()

    default_dtype = jnp.float32

    def compute_shape(self) -> tuple[int, ...]:
        return (*self.seed.shape, *self.shape_of_matrix)

    def materialize(self) -> jax.Array:
        n, m = self.shape_of_matrix
        rows = _mixed(_counted(_mixed(self.seed), n))
        columns = _mixed(_counted(_mixed(~self.seed), m))
        bits = _mixed(rows[..., :, None] ^ columns[..., None, :])
        # 24 bits are exact in float32, and one product rounds equally however it is compiled.
        signed = jax.lax.bitcast_convert_type(bits, jnp.int32) >> 8
        return (signed.astype(jnp.float32) * (self.bound * 2.0**-23)).astype(self.dtype)


def _counted(start: jax.Array, count: int) -> jax.Array:
    """Counts from `start` along a new last axis: `start`, `start + 1` and so on."""
    shape = (*start.shape, count)
    return start[..., None] + jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)


def _mixed(x: jax.Array) -> jax.Array:
    """Mixes the bits of unsigned integers (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@dataclasses.dataclass
class VeRA(Adapter):
    """The weight `w + (a * d) @ (b * e)`, with trained vectors `d` and `e`.

    After Kopiczko et al. 2023, arXiv:2310.11454.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., n, r]` or with more rows, and
      b: `[..., r, m]` or with more columns, which are not used: random, and frozen. `create` makes
        `RandomMatrix`; all weights of a tree that `add_adapter` makes have the same two seeds, so one
        pair serves them all, and no array of its size is stored. Dense arrays, from a file of another
        library for example, work too.
      d: `[..., r]`.
      e: `[..., m]`, zeros at first.
    """

    one_key = True
    field_axes = {"a": "n.", "b": ".m", "e": "m"}

    a: Array = dataclasses.field(metadata=FROZEN)
    b: Array = dataclasses.field(metadata=FROZEN)
    d: Array
    e: Array

    @classmethod
    def room(cls, shape: tuple[int, ...], **options: Any) -> int:
        """The largest rank: any, because each rank trains only one number."""
        return sys.maxsize

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, rank: int, d_initial: float = 0.1) -> Self:
        """Makes an adapter with `e` zero.

        Args:
          rank: the rank of the correction.
          d_initial: the initial value of `d`.
        """
        *lead, n, m = w.shape
        of_a, of_b = jax.random.bits(key, (2,), jnp.uint32)
        # (Variances of 1/n and 1/r.)
        a, b = (
            RandomMatrix(jnp.full(lead, seed), shape, (3 / shape[0]) ** 0.5, dtype=w.dtype)
            for seed, shape in ((of_a, (n, rank)), (of_b, (rank, m)))
        )
        d, e = jnp.full((*lead, rank), d_initial, w.dtype), jnp.zeros((*lead, m), w.dtype)
        return cls(w, a, b, d, e)

    def equivalent(self) -> LoRA:
        n, m = self.shape[-2:]
        a, b = dense(self.a)[..., :n, :], dense(self.b)[..., :m]
        return LoRA(self.w, a * self.d[..., None, :], b * self.e[..., None, :])
