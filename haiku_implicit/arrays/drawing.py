"""New arrays of random numbers and of zeros, without a program for each shape.

Eager JAX compiles a program for each shape, which takes most of the time in which a model gets its
first adapters.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.typing import DType

# Arrays of up to this size are the beginnings of draws by one program.
_LEAST = 1 << 16

Draw = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def drawn(draw: Draw, key: jax.Array, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    """Calls `draw(key, shape, dtype)`, with the same result, and compiles few programs.

    Args:
      draw: a function of `jax.random` that computes each number by itself. With JAX's usual keys, the
        numbers of a larger array then begin with the numbers of a smaller one.
    """
    if _is_compiled() or not _has_prefixes(key):
        return draw(key, shape, dtype)
    size = math.prod(shape)
    padded = max(_LEAST, 1 << max(size - 1, 0).bit_length())
    numbers = jax.device_get(draw(key, (padded,), dtype))
    return jax.device_put(numbers[:size].reshape(shape))


def uniform(
    key: jax.Array, shape: tuple[int, ...], dtype: DType, bound: float | None = None
) -> jax.Array:
    """Draws uniformly in ±bound; by default a first factor `[..., n, r]`, in ±1/sqrt(n)."""
    bound = 1 / math.sqrt(shape[-2]) if bound is None else bound
    draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
    return drawn(draw, key, shape, dtype)


def zeros(shape: tuple[int, ...], dtype: DType) -> jax.Array:
    """Makes zeros."""
    return jnp.zeros(shape, dtype) if _is_compiled() else jax.device_put(np.zeros(shape, dtype))


def _is_compiled() -> bool:
    """Whether JAX puts new arrays into a program, or on a mesh."""
    return compat.is_traced() or not jax.sharding.get_abstract_mesh().empty


def _has_prefixes(key: jax.Array) -> bool:
    """Whether each number depends on its index and the key alone."""
    is_usual = str(jax.random.key_impl(key)) == "threefry2x32" and key.shape == ()
    return is_usual and bool(getattr(jax.config, "jax_threefry_partitionable", False))
