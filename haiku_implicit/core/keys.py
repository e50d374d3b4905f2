"""Conversion of random keys and seeds from users."""

import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.typing import Array, Key

# A random key; or a function that makes keys, such as `hk.next_rng_key`.
KeySource = jax.Array | Callable[[], jax.Array]


def as_key_source(key: Key | Callable[[], jax.Array]) -> KeySource:
    """Converts a key or a seed as `as_key` does; a function that makes keys is returned unchanged."""
    return key if callable(key) else as_key(key)


def as_key(key: Any) -> jax.Array:
    """Converts a key of either kind (Haiku's are integers), or a seed, to a key of JAX's newer kind.

    Raises:
      TypeError: for anything else.
      ValueError: for several keys, and for a seed of more than 64 bits.
    """
    dtype, shape = getattr(key, "dtype", None), tuple(getattr(key, "shape", ()))
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return _one(key, shape, 0)
    if dtype == np.uint32 and shape:
        return jax.random.wrap_key_data(_one(key, shape, 1))
    is_seed = dtype is not None and jax.dtypes.issubdtype(dtype, np.integer) and not shape
    if isinstance(key, bool) or not (is_seed or isinstance(key, numbers.Integral)):
        raise type_error(
            f"key: expected a random key, as jax.random.key(0) returns, or an integer seed, got {key!r}"
        )
    try:
        return jax.random.key(key)
    except OverflowError as e:
        raise value_error(f"key: expected a seed of at most 64 bits, got {key}") from e


def _one(key: Array, shape: tuple[int, ...], axes: int) -> Array:
    """Returns the key, after a check that it is a single one."""
    if len(shape) > axes:
        raise value_error(f"key: expected one random key, got an array of them, {list(shape)}")
    return key
