"""Ranges: the ends of the values that share a scale.

Stored matrices (`calibration`) and operands (`operands`) turn these into scales, in different ways.
"""

from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.numerics.extremes import largest, smallest

# The lower and the upper end; the lower one is None if a range is symmetric about zero.
Limits = tuple[jax.Array | None, jax.Array]

# The least and the largest count of numbers for each method (see `options.parse`).
METHODS = {"absmax": (0, 1), "minmax": (0, 1), "rms": (0, 1), "percentile": (0, 1), "fixed": (1, 2)}
_RMS_FACTOR = 3.0
_PERCENT = 99.5


def find(
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
      method: one of `METHODS`, or 'absmean'.
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
        raise ValueError(
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
