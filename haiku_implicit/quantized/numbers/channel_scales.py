"""Scales of input channels, found from a weight's inputs: AWQ and SmoothQuant.

In `x @ w`, dividing channel j of the inputs by a number s_j and multiplying row j of the weight by it
keeps the product, but changes the magnitudes that are quantized. The functions here return 1/s, the
scale of `ScaledMatrix`, in bfloat16. The weight is divided by the rounded scale, so that this rounding
adds no error.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from haiku_implicit.quantized.numbers.extremes import largest, smallest
from haiku_implicit.quantized.numbers.gptq import DAMPING

STEPS = 20  # of the search for AWQ's exponent, from 0 to 1
_SMALLEST = 1e-4  # of AWQ's s, relative to the largest one, for channels that are hardly used


def awq(moments: jax.Array, error: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The scales of activation-aware weight quantization (Lin et al. 2023, arXiv:2306.00978, eq. 5).

    s = rms(x)^α, with the α of a grid that gives the product's least error. (The authors use the mean
    magnitude; moments hold the mean square.) α = 0 is in the grid, so that no weight becomes worse on
    the inputs of the moments. A channel that is never used keeps s = 1.

    Args:
      moments: `[..., k, k]`, xᵀx of the product's inputs x `[n, k]`.
      error: a function from scales `[..., k]` to the product's error `[...]`.

    Returns:
      `[..., k]`, bfloat16.
    """
    size = jnp.sqrt(jnp.diagonal(moments, axis1=-2, axis2=-1))
    alphas = jnp.linspace(0.0, 1.0, STEPS + 1)
    errors = jax.lax.map(lambda alpha: error(_inverse_power(size, alpha)), alphas)
    best = jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors), axis=0)
    return _inverse_power(size, alphas[best][..., None])


def _inverse_power(size: jax.Array, alpha: jax.Array) -> jax.Array:
    """Returns 1/s for s = size^α, normalized: the largest and the smallest s are equally far from 1."""
    highest, used = largest(size, -1, keepdims=True), size > 0
    s = jnp.maximum((size / jnp.where(highest > 0, highest, 1)) ** alpha, _SMALLEST)
    low = smallest(s, -1, keepdims=True, where=used, initial=1.0)
    return jnp.where(used, jnp.sqrt(low) / s, 1.0).astype(jnp.bfloat16)  # (the largest s is 1)


def smoothquant(w: jax.Array, maxima: jax.Array, alpha: float) -> jax.Array:
    """The scales of SmoothQuant (Xiao et al. 2022, arXiv:2211.10438, eq. 4).

    s_j = max|x_j|^α / max|w_j|^(1−α) moves the difficulty of outlier channels from the activations to
    the weight. A channel whose inputs or weights are all zero keeps s = 1.

    Args:
      w: `[..., k, m]`.
      maxima: `[..., k]`, the largest magnitudes of the inputs.
      alpha: how much of the difficulty moves, 0 to 1; the authors use 0.5, and 0.75 for models with
        more outliers.

    Returns:
      `[..., k]`, bfloat16.
    """
    of_w = largest(jnp.abs(w), -1).astype(maxima.dtype)
    used = (maxima > 0) & (of_w > 0)
    x, y = (jnp.where(used, size, 1) for size in (maxima, of_w))
    return (y ** (1 - alpha) / x**alpha).astype(jnp.bfloat16)


def product_error(difference: jax.Array, moments: jax.Array) -> jax.Array:
    """Returns the squared error `[...]` of `x @ w`, summed over all inputs: tr(Eᵀ xᵀx E).

    Args:
      difference: `[..., k, m]`, E: between the stored and the intended weight.
      moments: `[..., k, k]`, xᵀx.
    """
    moved = jnp.matmul(moments, difference, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(difference * moved, axis=(-2, -1))


def fitted(w: jax.Array, codes: jax.Array, moments: jax.Array) -> jax.Array:
    """Returns the factors `[..., m]` of columns of codes that give the product's least error.

    Args:
      w: `[..., k, m]`, the intended weight.
      codes: `[..., k, m]`.
      moments: `[..., k, k]`, xᵀx of the product's inputs; damped as for the codes.
    """
    mean = jnp.diagonal(moments, axis1=-2, axis2=-1).mean(-1)[..., None, None]
    moved = jnp.matmul(moments, codes, precision=jax.lax.Precision.HIGHEST) + DAMPING * mean * codes
    norm = jnp.sum(codes * moved, axis=-2)
    return jnp.where(norm > 0, jnp.sum(w * moved, axis=-2) / jnp.where(norm > 0, norm, 1), 1)
