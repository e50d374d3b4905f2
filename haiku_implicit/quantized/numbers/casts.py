"""Finds casts that lose finite numbers, because the new dtype's range is smaller."""

import math

import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.typing import DType

# Numbers per comparison, so that a large tensor does not need a second one of its size.
_BLOCK = 2**20


def may_overflow(old: DType, new: DType) -> bool:
    """Whether some finite numbers of a floating dtype do not round to finite numbers of another.

    Args:
      old, new: floating dtypes.
    """
    return float(jnp.finfo(old).max) > largest_before_overflow(new)


def overflows(values: np.ndarray, new: np.ndarray) -> bool:
    """Whether a cast turned finite numbers into infinity, NaN or the largest number.

    (float16, bfloat16 and float8_e5m2 have infinity, float8_e4m3fn has NaN, and float4_e2m1fn neither.)

    Args:
      values: floating, before the cast.
      new: the values after the cast.
    """
    if not may_overflow(values.dtype, new.dtype):
        return False
    bound = largest_before_overflow(new.dtype)
    before, after = values.reshape(-1), new.reshape(-1)
    for i in range(0, before.size, _BLOCK):
        x, y = before[i : i + _BLOCK], after[i : i + _BLOCK]
        beyond = np.isfinite(x) & (~np.isfinite(y) | (np.abs(x.astype(np.float64)) > bound))
        if beyond.any():
            return True
    return False


def largest_before_overflow(dtype: DType) -> float:
    """Returns the largest number that rounds to a finite one: half a step above the dtype's largest."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    return largest + math.ldexp(float(info.eps), math.frexp(largest)[1] - 2)
