"""`OFT` and `BOFT`: weights whose inputs are first rotated, in blocks or by a butterfly."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.operators import BlockDiagonal
from haiku_implicit.adapters.rotated import Rotated
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.messages import value_error
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
            raise value_error(f"block_size: expected a divisor of the {n} inputs, got {block_size}")
        entries = block_size * (block_size - 1) // 2
        return cls(w, jnp.zeros((*w.shape[:-2], n // block_size, entries), w.dtype))

    def equivalent(self) -> Rotated:
        return Rotated(self.w, BlockDiagonal(_rotations(self.upper).astype(self.dtype)))


@dataclasses.dataclass
class BOFT(Adapter):
    """The weight `rotation @ w @ diag(scale)` (Liu et al. 2023, arXiv:2311.06243).

    The rotation is a product of sparse rotations, `B[k-1] ... B[1] B[0]`. Each has orthogonal blocks,
    the Cayley transforms of skew-symmetric matrices as in `OFT`. A block of the `i`-th factor has two
    halves that are `2^i` halves apart, so `k` factors mix `2^(k-1)` times as many inputs as one block.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      upper: `[..., k, n / size, size * (size - 1) / 2]`: the entries above the diagonal for each factor
        and block; zeros at first.
      scale: `[..., m]`, a factor for each output; ones at first.
    """

    field_axes = {"scale": "m"}

    upper: Array
    scale: Array

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, block_size: int, factors: int = 2) -> Self:
        """Makes an adapter whose rotation is the identity.

        Args:
          block_size: the size of a block, even if there are several factors.
          factors: the number of sparse rotations; `block_size * 2^(factors - 1)` divides `n`.
        """
        *lead, n, m = w.shape
        if factors < 1 or (factors > 1 and block_size % 2) or block_size < 2:
            raise value_error(
                "block_size, factors: expected an even block size and one factor or more, got "
                f"{block_size} and {factors}"
            )
        if n % (block_size << (factors - 1)):
            raise value_error(
                f"block_size, factors: expected block_size * 2^(factors - 1) to divide the {n} inputs, "
                f"got {block_size} and {factors}"
            )
        shape = (*lead, factors, n // block_size, block_size * (block_size - 1) // 2)
        return cls(w, jnp.zeros(shape, w.dtype), jnp.ones((*lead, m), w.dtype))

    def equivalent(self) -> ScaledMatrix:
        blocks = _rotations(self.upper).astype(self.dtype)
        rotated = self.w
        for i in range(blocks.shape[-4]):
            unit = blocks.shape[-1] // 2 if i else 1
            own = BlockDiagonal(blocks[..., i, :, :, :], 1 << i, unit)
            rotated = Rotated(rotated, own)
        return ScaledMatrix(rotated, self.scale.astype(self.dtype), -1)


def _rotations(upper: jax.Array) -> jax.Array:
    """Rotations `[..., size, size]` from entries `[..., size * (size - 1) / 2]`, in float32 or wider.

    The Cayley transforms `(1 + q)(1 - q)^-1` of the skew-symmetric `q` with these entries above their
    diagonals.
    """
    entries = upper.shape[-1]
    size = round((1 + (1 + 8 * entries) ** 0.5) / 2)
    if size * (size - 1) // 2 != entries:
        raise value_error(f"upper: expected size * (size - 1) / 2 entries, got {entries}")
    rows, columns = jnp.triu_indices(size, 1)
    q = jnp.zeros((*upper.shape[:-1], size, size), upper.dtype).at[..., rows, columns].set(upper)
    q = (q - q.mT).astype(jnp.promote_types(q.dtype, jnp.float32))
    eye = jax.lax.broadcast_to_rank(jnp.eye(size, dtype=q.dtype), q.ndim)
    return jnp.linalg.solve((eye - q).mT, (eye + q).mT).mT
