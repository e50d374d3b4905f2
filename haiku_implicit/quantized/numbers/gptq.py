"""GPTQ: rounding for the least error of the product.

Frantar et al. 2022, arXiv:2210.17323: elements along the contracted axis are rounded one after
another, and the remaining ones take up the error, as far as their inputs are correlated.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_implicit.core.typing import DType
from haiku_implicit.quantized.numbers import calibration, formats

_BLOCK = 32  # columns that are rounded before the others take up their errors, in one product

DAMPING = 0.01  # added to each input's mean square, in units of their mean


class Inputs(NamedTuple):
    """The second moments of the inputs of products, in the form that rounding needs.

    Attributes:
      squares: `[..., k]`, the diagonal of the moments.
      order: `[..., k]`, the order in which elements are rounded; None to round each to the nearest.
      factor: `[..., k, k]`, in this order: upper Cholesky factors of the inverse moments; or None.
    """

    squares: jax.Array
    order: jax.Array | None = None
    factor: jax.Array | None = None


@functools.partial(jax.jit, static_argnums=(1, 2))
def inputs_of(moments: jax.Array, dtype: DType, padding: int) -> Inputs:
    """Makes the form that rounding needs from second moments.

    Args:
      moments: `[..., k, k]`, xᵀx of the product's inputs x `[n, k]`.
      dtype: the dtype to compute in.
      padding: the number of elements at the end of each row that meet no inputs.
    """
    squares = jnp.diagonal(moments, axis1=-2, axis2=-1)
    widths = [(0, 0)] * (moments.ndim - 2) + [(0, padding)] * 2
    fun = _order_and_factor
    for _ in moments.shape[:-2]:
        fun = jax.vmap(fun)
    return Inputs(squares, *fun(jnp.pad(moments.astype(dtype), widths)))


def _order_and_factor(moments: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The largest inputs first: then most elements are left to take up their errors.
    order = jnp.argsort(-jnp.diagonal(moments))
    return order, _inverse_factor(moments[order][:, order])


def codes(
    stored: jax.Array, inputs: Inputs, held: calibration.Scales, fmt: formats.Format
) -> jax.Array:
    """Returns the codes of a weight, given its scales.

    Args:
      stored: `[..., rows, k]`, floating.
      inputs: the result of `inputs_of`.
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

    fun: Callable[..., jax.Array] = functools.partial(_codes_of_matrix, fmt)
    for _ in lead:
        fun = jax.vmap(fun)
    found = fun(stored.astype(dtype), *inputs[1:], jax.tree.map(by_element, held))
    return found.reshape(*lead, rows, groups, k // groups)


def _codes_of_matrix(
    fmt: formats.Format,
    w: jax.Array,
    order: jax.Array,
    factor: jax.Array,
    held: calibration.Scales,
) -> jax.Array:
    """Returns the codes of one matrix `[rows, k]`; scales and offsets have its shape, as codes do."""
    rows, k = w.shape
    width = min(_BLOCK, k)
    end = -k % width  # more columns fill the last block, which take up no error
    factor = jnp.pad(factor, (0, end)) + jnp.diag(jnp.arange(k + end) >= k).astype(factor.dtype)
    # Transposed, so that a column is contiguous.
    w, held = jax.tree.map(lambda x: jnp.pad(x.T[order], ((0, end), (0, 0))), (w, held))

    def step(w: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rounds the columns of a block, then lets all the others take up their errors at once."""
        own = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=width)
        upper = own(factor)
        inner = own(upper, axis=1)
        found, errors = _rounded(own(w), jax.tree.map(own, held), inner, fmt)
        return w - upper.T @ errors, found  # (finished columns do not matter)

    _, found = jax.lax.scan(step, w, jnp.arange(0, k + end, width))
    return found.reshape(-1, rows)[jnp.argsort(order)].T


def _rounded(
    w: jax.Array, held: calibration.Scales, factor: jax.Array, fmt: formats.Format
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes and the errors of columns `[n, rows]`, which take up each other's errors."""

    def step(w: jax.Array, x: Any) -> tuple[jax.Array, Any]:
        own: calibration.Scales
        i, own, row = x
        code = calibration.encode(w[i], *own, fmt)
        error = (w[i] - formats.scaled(code, *own, fmt)) / row[i]
        return w - row[:, None] * error[None], (code, error)

    return jax.lax.scan(step, w, (jnp.arange(len(w)), held, factor))[1]


def damped(moments: jax.Array) -> jax.Array:
    """Moments in units of the inputs' mean square, with `DAMPING` added to each square."""
    mean = jnp.trace(moments) / len(moments)
    unit = jnp.eye(len(moments), dtype=moments.dtype)
    return moments / jnp.where(mean > 0, mean, 1) + DAMPING * unit


def _inverse_factor(moments: jax.Array) -> jax.Array:
    """Returns the upper Cholesky factor U of the inverse of the damped moments, UᵀU."""
    # From the factor of the moments in reverse order: this inverts only a triangle, not a matrix.
    upper = jnp.linalg.cholesky(damped(moments)[::-1, ::-1])[::-1, ::-1]  # damped = upper upperᵀ
    unit = jnp.eye(len(moments), dtype=moments.dtype)
    return jax.scipy.linalg.solve_triangular(upper, unit, lower=False)
