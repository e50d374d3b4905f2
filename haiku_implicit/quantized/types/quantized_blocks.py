"""`QuantizedBlocks`: an array of any shape in few bits per element, in blocks that share a scale."""

import dataclasses
import functools
import math
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized.numbers import calibration, formats
from haiku_implicit.quantized.numbers.extremes import largest, smallest
from haiku_implicit.quantized.numbers.options import is_positive_integer


@dataclasses.dataclass
class QuantizedBlocks(ImplicitArray):
    """An array whose elements, in memory order, are quantized in blocks: the state of an optimizer.

    A block with a number below zero is quantized directly. In any other block (second moments, and
    other divisors of an optimizer) the square roots are quantized: second moments have twice the
    dynamic range of first moments, and 8 bits that hold a gradient would lose its square. The codes
    then do not need a sign, and a positive number keeps a positive code: a second moment of zero would
    make a step infinite. Otherwise numbers are rounded to the nearest code: rounded up, a moving
    average would climb a code at each step, up to the largest of its block.

    The type does not have rules: any operation makes it dense.

    Attributes:
      codes: `[blocks, block * bits / 8]`, packed like the codes of `QuantizedMatrix`.
      scale: `[blocks, 1]`, float32 (float64 for float64 arrays); below zero if the codes are of
        square roots.
      logical_shape: the shape of the array.
      format: the format of the codes.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> x = jnp.linspace(-1.0, 1.0, 1000)
      >>> q = hki.QuantizedBlocks.quantize(x, 'int8', block=250)
      >>> q.shape, q.nbytes, bool(jnp.abs(hki.materialize(q) - x).max() < 0.004)
      ((1000,), 1016, True)
    """

    codes: Array = frozen_field()
    scale: Array = frozen_field()
    logical_shape: tuple[int, ...] = aux_field()
    format: str = aux_field(default="int8")

    @classmethod
    def quantize(cls, x: Array, dtype: DType, block: int = 256) -> Self:
        """Quantizes an array in blocks.

        Args:
          x: an array of any shape, floating.
          dtype: a symmetric format of `QuantizedMatrix.quantize`.
          block: the number of elements that share a scale; they fill whole bytes.

        Returns:
          The quantized array, with the dtype of `x`. A block with NaN or infinity is NaN.

        Raises:
          ValueError: for an unknown format or one with an offset; for a block that does not fit it.
        """
        fmt = formats.find(dtype)
        if fmt.offset:
            raise value_error(f"dtype: expected a symmetric format, got {dtype!r}")
        if not is_positive_integer(block) or block % fmt.multiple:
            raise value_error(
                f"block: expected a multiple of {fmt.multiple} for codes of {fmt.name!r}, got {block!r}"
            )
        x = jnp.asarray(x)
        wide = x.astype(formats.arithmetic_dtype(x.dtype)).reshape(-1)
        rows = jnp.pad(wide, (0, -x.size % block)).reshape(-1, block)
        codes, scale = _encoded(rows, fmt)
        return cls(codes=codes, scale=scale, logical_shape=x.shape, format=fmt.name, dtype=x.dtype)

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.logical_shape)

    def materialize(self) -> jax.Array:
        fmt, scale = formats.FORMATS[self.format], self.scale
        values = formats.decode(formats.unpack(self.codes, 1, fmt)[:, 0], scale.dtype, fmt)
        roots = (values - _lowest(fmt)) * scale
        values = jnp.where(scale < 0, roots * roots, values * scale)
        flat = values.reshape(-1)[: math.prod(self.logical_shape)]
        return flat.reshape(self.logical_shape).astype(self.dtype)


# Jitted, as eager code would compile each operation for each shape.
@functools.partial(jax.jit, static_argnames="fmt", inline=compat.INLINE)
def _encoded(rows: jax.Array, fmt: formats.Format) -> tuple[jax.Array, jax.Array]:
    """The codes and scales of blocks `[blocks, block]`."""
    highest = largest(rows, -1, keepdims=True)
    rooted = (smallest(rows, -1, keepdims=True) >= 0) & (highest > 0)
    roots, lowest = jnp.sqrt(jnp.abs(rows)), _lowest(fmt)
    scale = jnp.where(
        rooted,
        jnp.sqrt(jnp.abs(highest)) / (fmt.largest - lowest),
        calibration.calibrate(rows, fmt).scale,
    )
    relative = jnp.where(rooted, roots, rows) / jnp.where(scale == 0, 1, scale)
    positive = jnp.maximum(relative, _least_positive(fmt))
    from_lowest = jnp.where(rows > 0, positive, 0) + lowest
    codes = formats.nearest(jnp.where(rooted, from_lowest, relative), fmt)
    return formats.pack(codes[:, None], fmt), jnp.where(rooted, -scale, scale)


def _lowest(fmt: formats.Format) -> float:
    """The value of the code for a root of zero: integer codes count from the lowest."""
    return fmt.lowest if fmt.is_integer else 0.0


def _least_positive(fmt: formats.Format) -> float:
    if fmt.table is not None:
        return min(v for v in fmt.table if v > 0)
    return float(jnp.finfo(fmt.dtype).smallest_subnormal) if fmt.is_float else 1.0
