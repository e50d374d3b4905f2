"""`QuantizedBlocks`: an array of any shape held in few bits, in blocks that share a scale."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

from haiku_implicit._array import ImplicitArray, aux_field, frozen_field
from haiku_implicit.arrays.quantized import QuantizedMatrix
from haiku_implicit.quantization import formats


@dataclasses.dataclass
class QuantizedBlocks(ImplicitArray):
    """An array whose elements, in memory order, are quantized in blocks: the state of an optimizer.

    It has no rules of its own: what computes with it makes it dense.

    Attributes:
      blocks: the elements (and zeros at the end) as a quantized matrix `[blocks, block]`.
      logical_shape: the shape of the array.
      squared: whether the elements are the squares of what is quantized. Second moments have twice
        the dynamic range of first ones: 8 bits that hold a gradient would lose its square.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> x = jnp.linspace(0.0, 1.0, 1000)
      >>> q = hki.QuantizedBlocks.quantize(x, 'int8', block=250)
      >>> q.shape, q.nbytes, bool(jnp.abs(hki.materialize(q) - x).max() < 0.004)
      ((1000,), 1016, True)
    """

    blocks: Any = frozen_field()
    logical_shape: tuple[int, ...] = aux_field()
    squared: bool = aux_field(default=False)

    @classmethod
    def quantize(cls, x: Any, dtype: Any, block: int = 256, squared: bool = False) -> Self:
        """Rounds an array.

        Args:
          x: an array of any shape, floating; not negative where `squared`.
          dtype: a symmetric format of `QuantizedMatrix.quantize`.
          block: how many elements share a scale.
          squared: whether the roots of the elements are quantized. Those of positive elements are
            at least the smallest code: a second moment of zero would make an optimizer's step
            infinite.

        Returns:
          The quantized array, of the dtype of `x`.

        Raises:
          ValueError: for a format with an offset, or an unknown one.
        """
        fmt = formats.find(dtype)
        if fmt.offset:
            raise ValueError(f"dtype: expected a symmetric format, got {dtype!r}")
        x = jnp.asarray(x)
        wide = x.astype(formats.arithmetic_dtype(x.dtype)).reshape(-1)
        padded = jnp.pad(jnp.sqrt(wide) if squared else wide, (0, -x.size % block))
        rows = padded.reshape(-1, block)
        make = _not_zero if squared else _nearest
        blocks = make(rows, fmt)
        return cls(blocks=blocks, logical_shape=x.shape, squared=squared, dtype=x.dtype)

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.logical_shape)

    def materialize(self) -> jax.Array:
        values = self.blocks.reshape(-1)[: math.prod(self.logical_shape)].reshape(
            self.logical_shape
        )
        return (jnp.square(values) if self.squared else values).astype(self.dtype)


def _nearest(rows: jax.Array, fmt: formats.Format) -> QuantizedMatrix:
    return QuantizedMatrix.quantize(rows, fmt.name, axis=-1)


def _not_zero(rows: jax.Array, fmt: formats.Format) -> QuantizedMatrix:
    """Rows of numbers that are not negative; codes that have no sign where there are such codes.

    What is positive keeps a positive code, and is otherwise rounded to the nearest: rounded up, a
    moving average would climb a code at each step, up to the largest of its block.
    """
    unsigned = formats.FORMATS.get(f"u{fmt.name}", fmt)
    scale = rows.max(-1, keepdims=True) / unsigned.largest
    relative = rows / jnp.where(scale > 0, scale, 1)
    relative = jnp.where(rows > 0, jnp.maximum(relative, _least_positive(unsigned)), 0)
    codes = formats.pack(formats.nearest(relative, unsigned)[..., None, :], unsigned)
    return QuantizedMatrix(codes=codes, scale=scale, format=unsigned.name, axis=-1)


def _least_positive(fmt: formats.Format) -> float:
    if fmt.table is not None:
        return min(v for v in fmt.table if v > 0)
    return float(jnp.finfo(fmt.dtype).smallest_subnormal) if fmt.is_float else 1.0
