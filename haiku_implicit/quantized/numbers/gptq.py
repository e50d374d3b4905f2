"""GPTQ: rounding for the least error of the product.

Frantar et al. 2022, arXiv:2210.17323: elements along the contracted axis are rounded one after
another, and the remaining ones take up the error, as far as their inputs are correlated.
"""

import functools

import jax
import jax.numpy as jnp

from haiku_implicit.core.typing import Array
from haiku_implicit.quantized.numbers import calibration, formats

DAMPING = 0.01  # added to each input's mean square, in units of their mean


@functools.partial(jax.jit, static_argnums=4)
def codes(
    stored: jax.Array, moments: jax.Array, scale: jax.Array, offset: Array, fmt: formats.Format
) -> jax.Array:
    """Returns the codes of a weight, given its scales.

    Args:
      stored: `[..., rows, k]`, floating.
      moments: `[..., k, k]`, xᵀx of the product's inputs x `[n, k]`.
      scale: `[..., rows, groups, 1]`.
      offset: as `scale`, or None.
      fmt: the format.

    Returns:
      `[..., rows, groups, g]`, not packed.
    """
    *lead, rows, k = stored.shape
    groups = scale.shape[-2]
    dtype = formats.arithmetic_dtype(stored.dtype)
    by_element = functools.partial(jnp.repeat, repeats=k // groups, axis=-1)
    args = [stored.astype(dtype), moments.astype(dtype), by_element(scale[..., 0].astype(dtype))]
    args += [] if offset is None else [by_element(offset[..., 0].astype(dtype))]
    fun = functools.partial(_codes_of_matrix, fmt)
    for _ in lead:
        fun = jax.vmap(fun)
    return fun(*args).reshape(*lead, rows, groups, k // groups)


def _codes_of_matrix(
    fmt: formats.Format, w: jax.Array, moments: jax.Array, scale: jax.Array, *offset: jax.Array
) -> jax.Array:
    """Returns the codes of one matrix; scale and offset have its shape `[rows, k]`, as the codes do."""
    # The largest inputs first: then most elements are left to take up their errors.
    order = jnp.argsort(-jnp.diagonal(moments))
    factor = _inverse_factor(moments[order][:, order])
    w, scale = w[:, order], scale[:, order]
    offset = tuple(x[:, order] for x in offset)

    def step(w: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        column = [x[:, i] for x in (w, scale, *offset)]
        own_offset = column[2] if offset else None
        code = calibration.encode(column[0], column[1], own_offset, fmt)
        value = formats.scaled(code, column[1], own_offset, fmt)
        error = (column[0] - value) / factor[i, i]
        return w - error[:, None] * factor[i][None], code  # (finished columns do not matter)

    _, found = jax.lax.scan(step, w, jnp.arange(w.shape[1]))
    return found.T[:, jnp.argsort(order)]


def _inverse_factor(moments: jax.Array) -> jax.Array:
    """Returns the upper Cholesky factor U of the inverse of the damped moments, UᵀU."""
    size = len(moments)
    mean = jnp.trace(moments) / size
    damped = moments / jnp.where(mean > 0, mean, 1) + DAMPING * jnp.eye(size, dtype=moments.dtype)
    # From the factor of the moments in reverse order: this inverts only a triangle, not a matrix.
    lower = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]  # upper: damped = lower lowerᵀ
    return jax.scipy.linalg.solve_triangular(lower, jnp.eye(size, dtype=moments.dtype), lower=False)
