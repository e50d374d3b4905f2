"""`OFT`: a weight whose inputs are first rotated in blocks."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.operators import BlockDiagonal
from haiku_implicit.adapters.rotated import Rotated
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class OFT(Adapter):
    """The weight `rotation @ w` (Qiu et al. 2023, arXiv:2306.07280).

    The rotation has square blocks along its diagonal. Each is the Cayley transform
    `(1 + q)(1 - q)^-1` of a skew-symmetric `q`, so it is orthogonal, and the identity at first.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      upper: `[..., n / size, size * (size - 1) / 2]`: the entries of `q` above its diagonal, row by
        row, for each block; zeros at first.
    """

    field_axes = {"upper": "n."}

    upper: Array

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, block_size: int) -> Self:
        n = w.shape[-2]
        if not 0 < block_size <= n or n % block_size:
            raise ValueError(f"block_size: expected a divisor of the {n} inputs, got {block_size}")
        entries = block_size * (block_size - 1) // 2
        return cls(w, jnp.zeros((*w.shape[:-2], n // block_size, entries), w.dtype))

    def equivalent(self) -> Rotated:
        blocks = cayley(skew(self.upper, block_size(self.upper.shape[-1])))
        return Rotated(self.w, BlockDiagonal(blocks.astype(self.dtype)))


def block_size(entries: int) -> int:
    """The size of a skew-symmetric matrix from the number of entries above its diagonal."""
    size = round((1 + (1 + 8 * entries) ** 0.5) / 2)
    if size * (size - 1) // 2 != entries:
        raise ValueError(f"upper: expected size * (size - 1) / 2 entries, got {entries}")
    return size


def skew(upper: jax.Array, size: int) -> jax.Array:
    """Skew-symmetric matrices `[..., size, size]` with these entries above their diagonals."""
    rows, columns = jnp.triu_indices(size, 1)
    q = jnp.zeros((*upper.shape[:-1], size, size), upper.dtype).at[..., rows, columns].set(upper)
    return q - jnp.swapaxes(q, -1, -2)


def cayley(q: jax.Array) -> jax.Array:
    """The Cayley transform `(1 + q)(1 - q)^-1`, orthogonal for a skew-symmetric `q`; in float32."""
    q = q.astype(jnp.float32)
    eye = jax.lax.broadcast_to_rank(jnp.eye(q.shape[-1], dtype=q.dtype), q.ndim)
    return jnp.linalg.solve(jnp.swapaxes(eye - q, -1, -2), jnp.swapaxes(eye + q, -1, -2)).swapaxes(
        -1, -2
    )
