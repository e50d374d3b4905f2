"""The largest and the smallest number of an array, NaN if one of the numbers is NaN.

`jnp.max` and `jnp.min` should do so, too. But on a CPU, XLA computes the maximum of some thousand
numbers or more in a way that drops NaN. So code that looks for numbers that are not finite uses these.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def largest(x: jax.Array, axis: Any = None, **over: Any) -> jax.Array:
    """`jnp.max` of a floating array, NaN if one of the numbers is.

    Args:
      x: floating.
      axis: the axes to reduce; None for all.
      **over: `keepdims`, `initial` and `where`, as for `jnp.max`.
    """
    return _or_nan(jnp.max, x, axis, over)


def smallest(x: jax.Array, axis: Any = None, **over: Any) -> jax.Array:
    """`jnp.min` of a floating array, NaN if one of the numbers is.

    Args:
      x: floating.
      axis: the axes to reduce; None for all.
      **over: `keepdims`, `initial` and `where`, as for `jnp.min`.
    """
    return _or_nan(jnp.min, x, axis, over)


def _or_nan(extreme: Callable[..., jax.Array], x: jax.Array, axis: Any, over: Any) -> jax.Array:
    found = extreme(x, axis=axis, **over)
    of_any = {name: over[name] for name in ("keepdims", "where") if name in over}
    has_nan = jnp.any(jnp.isnan(x), axis=axis, **of_any)
    return jnp.where(has_nan, jnp.asarray(jnp.nan, found.dtype), found)
