"""Random arrays for which nothing is compiled for each shape.

(`jnp.asarray` of an array of NumPy compiles a conversion for each shape, also to the same dtype; `jax.device_put` doesn't.)
"""

import functools
import math

import jax
import numpy as np


def normal(shape, seed=0, dtype=float, scale=1):
    """The array `jax.random.normal(jax.random.key(seed), shape, dtype) * scale`, from numbers drawn once."""
    size = math.prod(shape)
    count = max(1 << 16, 1 << (size - 1).bit_length())
    drawn = _drawn(seed, jax.dtypes.canonicalize_dtype(dtype), count)
    return jax.device_put(drawn[:size].reshape(shape) * np.asarray(scale, drawn.dtype))


def numpy_normal(shape, seed=0, scale=1.0):
    """Normal numbers of NumPy's generator, as an array of NumPy."""
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


@functools.cache
def _drawn(seed, dtype, count):
    """JAX's random bits depend on the place of a number alone: a longer array begins with a shorter one."""
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.normal(jax.random.key(seed), (count,), dtype))
