"""Sums and products of one number, rounded once, for folding constants."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def number(value: np.ndarray) -> Any:
    """A value as a Python integer or in double precision; None if XLA's steps matter.

    They matter if each is rounded to a few bits, or flushed to zero.
    """
    if jnp.issubdtype(value.dtype, jnp.integer):
        return int(value)
    if value.dtype.itemsize < 2 or not jnp.issubdtype(value.dtype, jnp.inexact):
        return None
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return np.complex128(value)
    wide = np.float64(value)
    return None if 0 < abs(wide) < jnp.finfo(value.dtype).tiny else wide


def times(c: Any, n: int) -> Any:
    """The sum of `n` numbers `c`."""
    if isinstance(c, int):
        return c * n
    if isinstance(c, np.complex128):  # by parts: a complex product makes NaN of infinities
        return np.complex128(complex(times(c.real, n), times(c.imag, n)))
    with np.errstate(all="ignore"):
        return np.float64(0) if n == 0 else c * n + 0.0  # a sum of -0.0 begins with 0.0


def power(c: Any, n: int) -> Any:
    """The product of `n` numbers `c`; None if that is not known."""
    if isinstance(c, int):  # the lowest 64 bits are enough for every dtype
        return pow(c, n, 1 << 64)
    if isinstance(c, np.complex128) and not np.isfinite(c):
        return None if n else np.complex128(1)
    with np.errstate(all="ignore"):
        return c**n


def rounded(value: Any, dtype: np.dtype) -> np.ndarray | None:
    """A number in a dtype: integers wrap, others are rounded; None for a dtype of another kind."""
    if isinstance(value, int):
        if not jnp.issubdtype(dtype, jnp.integer):
            return None
        info = jnp.iinfo(dtype)
        value = (value - int(info.min)) % (1 << info.bits) + int(info.min)
    elif jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize < 2:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype)
