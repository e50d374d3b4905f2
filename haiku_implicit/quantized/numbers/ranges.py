"""Ranges: the ends of the values that share a scale.

Stored matrices (`calibration`) and operands of products (`operands`) find ranges here, and turn them
into scales in two ways, which differ by half a step:

| | stored matrices | operands |
|---|---|---|
| a symmetric range of integers ends at | the largest code: 127 for int8 | half a step more: 127.5 |
| the scale of a range of zeros | zero | the smallest number that is safe to divide by |
| a range that is not symmetric has | an offset, any number | a zero point, a number of steps |
| the scales are those of | GGML, bitsandbytes | Qwix |

With half a step more, the last step is as wide as the others; without it, the largest magnitude has an
exact code. So a weight has other codes in `QuantizedMatrix.quantize` than in quantized training, and
`convert_trained` stores the codes of training. (Floats and tables end at their largest code in both.
The powers of two of mxfp8 and mxfp4 are rounded up for operands, as Qwix does, so that nothing
saturates; for stored matrices down, as the specification of MX says.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_implicit.core.messages import value_error
from haiku_implicit.quantized.numbers import formats, options
from haiku_implicit.quantized.numbers.extremes import largest, smallest
from haiku_implicit.quantized.numbers.options import OperandConfig

# The lower and the upper end; the lower one is None if a range is symmetric about zero.
Limits = tuple[jax.Array | None, jax.Array]

_RMS_FACTOR = 3.0
_PERCENT = 99.5


def limits(
    x: jax.Array,
    method: str,
    numbers: tuple[float, ...],
    axis: Any,
    symmetric: bool,
    with_zero: bool = False,
) -> Limits:
    """Finds the ranges of an array.

    Args:
      x: floating.
      method: one of `options.RANGES`, or 'absmean'.
      numbers: the numbers after the method: a factor of the range (default: 3 for 'rms', else 1), a
        percentile (99.5), one end or both of a fixed range.
      axis: the axes whose elements share a range; they stay, with length one.
      symmetric: whether ranges are symmetric about zero.
      with_zero: whether the range of 'minmax' contains zero even if all values have one sign.
    """
    over: Any = dict(axis=axis, keepdims=True)
    if method == "fixed":
        (low, high), taint = fixed(numbers), taint_of(x, axis)
        return (None, max(-low, high) + taint) if symmetric else (low + taint, high + taint)
    if method == "percentile":
        percent, taint = numbers[0] if numbers else _PERCENT, taint_of(x, axis)
        upper = jnp.percentile(jnp.abs(x) if symmetric else x, percent, **over) + taint
        return None if symmetric else jnp.percentile(x, 100 - percent, **over) + taint, upper
    factor = numbers[0] if numbers else _RMS_FACTOR if method == "rms" else 1.0
    if factor <= 0:
        raise value_error(
            f"calibration: expected a positive factor after {method!r}, got {factor:g}"
        )
    if method == "minmax" and not symmetric:
        over["initial"] = 0.0 if with_zero else None
        return _times(smallest(x, **over), factor), _times(largest(x, **over), factor)
    if method == "rms":
        size = jnp.sqrt(jnp.mean(x * x, **over))
    elif method == "absmean":
        size = jnp.mean(jnp.abs(x), **over)
    else:
        size = largest(jnp.abs(x), **over)
    return None, _times(size, factor)


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor  # (a product may flush subnormal numbers to zero)


def fixed(numbers: tuple[float, ...]) -> tuple[float, float]:
    """Returns the ends of a fixed range; one number stands for a symmetric range."""
    low, high = numbers if len(numbers) == 2 else (-numbers[0], numbers[0])
    return low, high


def taint_of(x: jax.Array, axis: Any) -> jax.Array:
    """Returns NaN for ranges with an element that is not finite, else zero; added to their ends.

    If a range does not depend on these elements, infinity would get the last code, and NaN any code.

    Args:
      x: floating.
      axis: the axes whose elements share a range; they stay, with length one.
    """
    return jnp.where(jnp.isfinite(x).all(axis, keepdims=True), 0, jnp.nan).astype(x.dtype)


# --- ranges of operands --------------------------------------------------------------------------


class ScaledAxes(NamedTuple):
    """The axes of an operand along which its scales differ.

    Attributes:
      channels: the axes that have a scale for each index.
      tiled: the axis that is cut into tiles if the configuration has a `tile`; None if no axis is.
    """

    channels: tuple[int, ...]
    tiled: int | None = None


def of_operand(x: jax.Array, config: OperandConfig, axes: ScaledAxes) -> Limits:
    """Finds the ends of the range of each scale of an array.

    Args:
      x: floating.
      config: how it is quantized.
      axes: the axes along which scales differ.

    Raises:
      ValueError: for a tile that does not divide its axis, or numbers out of the method's range.
    """
    x = x.astype(formats.arithmetic_dtype(x.dtype))
    name, numbers = _parsed(config)
    if name == "fixed":
        return _fixed(x, config.calibration_method, numbers)
    tiled, shared, shape = _blocks(x, config, axes)
    if x.size == 0:
        return None, jnp.zeros(shape, x.dtype)
    found = limits(tiled, name, numbers, shared, symmetric=name != "minmax", with_zero=True)
    low, high = jax.tree.map(lambda end: end.reshape(shape), found)
    return low, high


def clips(config: OperandConfig) -> bool:
    """Whether values may lie beyond the range that the calibration method finds."""
    name, numbers = _parsed(config)
    return name not in ("absmax", "minmax") or (bool(numbers) and numbers[0] < 1)


def tainted(x: jax.Array, config: OperandConfig, axes: ScaledAxes, known: Limits) -> Limits:
    """Returns the ends of each scale's range, NaN if one of its elements is not finite."""
    tiled, shared, shape = _blocks(x, config, axes)
    taint = taint_of(tiled, shared).reshape(shape)
    low, high = jax.tree.map(lambda end: end.astype(x.dtype) + taint, known)
    return low, high


def _parsed(config: OperandConfig) -> tuple[str, tuple[float, ...]]:
    return options.parse("calibration method", config.calibration_method, options.RANGES)


def _fixed(x: jax.Array, method: str, numbers: tuple[float, ...]) -> Limits:
    """Returns a fixed range, one for the whole array."""
    low, high = fixed(numbers)
    if not low <= 0 <= high or low == high:
        raise value_error(
            f"calibration method: expected 'fixed,LOW,HIGH' with LOW <= 0 <= HIGH, got {method!r}"
        )
    ends = [jnp.full((1,) * x.ndim, end, x.dtype) for end in (low, high)]
    return (None if low == -high else ends[0]), ends[1]


def _blocks(
    x: jax.Array, config: OperandConfig, axes: ScaledAxes
) -> tuple[jax.Array, tuple[int, ...], tuple[int, ...]]:
    """Splits the tiled axis in two; also returns the axes that share a scale, and the scales' shape."""
    shape = [size if i in axes.channels else 1 for i, size in enumerate(x.shape)]
    shared = [i for i in range(x.ndim) if i not in axes.channels]
    size, axis = config.tile, axes.tiled
    if size is not None and axis is not None:
        length = x.shape[axis]
        size = round(length * size) if isinstance(size, float) else size
        if size < 1 or length % size:
            raise value_error(
                f"tile_size: expected one that divides the axis of length {length}, got {size}"
            )
        shape[axis] = length // size
        x = x.reshape(*x.shape[:axis], length // size, size, *x.shape[axis + 1 :])
        shared = [i + (i >= axis) for i in shared]
    return x, tuple(shared), tuple(shape)
