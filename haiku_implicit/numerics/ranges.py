"""Ranges: between which ends the values lie that share a scale.

The scales of stored matrices (`calibration`) and those of operands (`operands`) start from them. How a
range becomes a scale differs, and is there.
"""

from typing import Any

import jax
import jax.numpy as jnp

# The lower and the upper end; the lower one is None where a range reaches as far down as up.
Limits = tuple[jax.Array | None, jax.Array]

# Each method, and how many numbers it takes, at least and at most (see `options.parse`).
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
    """The ranges of an array.

    Args:
      x: floating.
      method: one of `METHODS`, or 'absmean'.
      numbers: those after it: a factor of what it finds (3 for 'rms'), a percentile (99.5), one end
        or both of a fixed range.
      axis: the axes whose elements share a range; they stay, with length one.
      symmetric: whether ranges reach as far down as up.
      with_zero: whether 'minmax' has zero in its range, also where all values are on one side of it.
    """
    if method == "fixed":
        low, high = numbers if len(numbers) == 2 else (-numbers[0], numbers[0])
        if symmetric:
            return known(x, None, jnp.asarray(max(abs(low), abs(high)), x.dtype), axis)
        return known(x, jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype), axis)
    over: Any = dict(axis=axis, keepdims=True)
    if method == "percentile":
        percent = numbers[0] if numbers else _PERCENT
        if symmetric:
            return None, jnp.percentile(jnp.abs(x), percent, **over)
        return jnp.percentile(x, 100 - percent, **over), jnp.percentile(x, percent, **over)
    factor = numbers[0] if numbers else _RMS_FACTOR if method == "rms" else 1.0
    if factor <= 0:
        raise ValueError(
            f"calibration: expected a positive factor after {method!r}, got {factor:g}"
        )
    if method == "minmax" and not symmetric:
        over["initial"] = 0.0 if with_zero else None
        return _times(jnp.min(x, **over), factor), _times(jnp.max(x, **over), factor)
    if method == "rms":
        size = jnp.sqrt(jnp.mean(x * x, **over))
    elif method == "absmean":
        size = jnp.mean(jnp.abs(x), **over)
    else:
        size = jnp.max(jnp.abs(x), **over)
    return None, _times(size, factor)


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor  # (a product may flush subnormal numbers to zero)


def known(x: jax.Array, low: jax.Array | None, high: jax.Array, axis: Any = None) -> Limits:
    """A range that does not depend on the array, but for this: NaN has no code.

    It makes the range NaN, and so the result, as with ranges of the array.

    Args:
      x: floating.
      low, high: the ends.
      axis: the axes whose elements share a range; None for all of them.
    """
    broken = jnp.where(jnp.isnan(x).any(axis=axis, keepdims=True), jnp.nan, jnp.zeros((), x.dtype))
    return None if low is None else broken + low.astype(x.dtype), broken + high.astype(x.dtype)
