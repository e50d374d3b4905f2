"""GPTQ: rounding for the least error of the product.

Frantar et al. 2022, arXiv:2210.17323: elements along the contracted axis are rounded one after
another, and the remaining ones take up the error, as far as their inputs are correlated.
"""

import functools

import jax
import jax.numpy as jnp

from haiku_implicit.quantized.numbers import calibration, formats

DAMPING = 0.01  # added to each input's mean square, in units of their mean


@functools.partial(jax.jit, static_argnums=3)
def codes(
    stored: jax.Array, moments: jax.Array, held: calibration.Scales, fmt: formats.Format
) -> jax.Array:
    """Returns the codes of a weight, given its scales.

    Args:
      stored: `[..., rows, k]`, floating.
      moments: `[..., k, k]`, xᵀx of the product's inputs x `[n, k]`.
      held: scales and offsets, `[..., rows, groups, 1]`.
      fmt: the format.

    Returns:
      `[..., rows, groups, g]`, not packed.
    """
    *lead, rows, k = stored.shape
    groups = held.scale.shape[-2]
    dtype = formats.arithmetic_dtype(stored.dtype)

    def by_element(x: jax.Array) -> jax.Array:
        return jnp.repeat(x[..., 0].astype(dtype), k // groups, axis=-1)

    fun = functools.partial(_codes_of_matrix, fmt)
    for _ in lead:
        fun = jax.vmap(fun)
    found = fun(stored.astype(dtype), moments.astype(dtype), jax.tree.map(by_element, held))
    return found.reshape(*lead, rows, groups, k // groups)


def _codes_of_matrix(
    fmt: formats.Format, w: jax.Array, moments: jax.Array, held: calibration.Scales
) -> jax.Array:
    """Returns the codes of one matrix `[rows, k]`; scales and offsets have its shape, as codes do."""
    # The largest inputs first: then most elements are left to take up their errors.
    order = jnp.argsort(-jnp.diagonal(moments))
    factor = _inverse_factor(moments[order][:, order])
    w, held = jax.tree.map(lambda x: x[:, order], (w, held))

    def step(w: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        column = w[:, i]
        own: calibration.Scales = jax.tree.map(lambda x: x[:, i], held)
        code = calibration.encode(column, *own, fmt)
        error = (column - formats.scaled(code, *own, fmt)) / factor[i, i]
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
