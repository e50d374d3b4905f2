"""Products that quantize their operands, with gradients that are quantized products themselves.

The forward pass quantizes both operands and multiplies them. The backward pass quantizes the incoming
gradient, and multiplies it with the quantized operands of the forward pass. The rounding itself has the
gradient one ("straight through").
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.numerics.operands import (
    Limits,
    OperandSpec,
    QuantizedOperand,
    quantize,
    stored_operand,
)
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products.bilinear import Bilinear, Operand, Others, Product, multiply, scaled
from haiku_implicit.products.product_config import GradientConfig, OperandConfig, ProductConfig


class Inputs(NamedTuple):
    """The arguments of a product.

    Attributes:
      operands: `lhs` and `rhs`. A `QuantizedOperand` is not quantized again, and gets no gradient.
      others: the other arguments.
      key: a random key for stochastic rounding, or None.
      limits: the ranges of `lhs` and of `rhs`; None: the range of the operand itself.
    """

    operands: tuple[Operand, Operand]
    others: Others = ()
    key: jax.Array | None = None
    limits: tuple[Limits | None, Limits | None] = (None, None)


def as_operand(x: Any) -> Operand:
    """Converts an array; a stored matrix keeps its codes, other implicit arrays are materialized."""
    if not is_implicit(x):
        return jnp.asarray(x)
    if not isinstance(x, QuantizedMatrix):
        return materialize_array(x)
    stored = stored_operand(x)
    return QuantizedOperand(materialize_array(x), None) if stored is None else stored


def quantized_product(
    product: Product, config: ProductConfig, inputs: Inputs, dtype: Any
) -> jax.Array:
    """Computes a product that quantizes its operands, and the gradients in its backward pass.

    Args:
      product: the product.
      config: how operands and gradients are quantized.
      inputs: its arguments.
      dtype: the dtype of the result.
    """
    dtypes = (None if isinstance(x, QuantizedOperand) else x.dtype for x in inputs.operands)
    return _product(product, config, (*dtypes, dtype), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(product: Product, config: ProductConfig, dtypes: Any, inputs: Inputs) -> jax.Array:
    """Computes the product; `dtypes` of `lhs`, `rhs` (None: without a gradient) and the result."""
    return _forward(product, config, dtypes, inputs)[0]


# The residuals of the backward pass: its operands, and a mask of the elements of each that get a
# gradient (None: all).
_Residuals = tuple[Inputs, tuple[jax.Array | None, ...]]


def _forward(
    product: Product, config: ProductConfig, dtypes: Any, inputs: Inputs
) -> tuple[jax.Array, _Residuals]:
    specs = (spec_of_side(product, config, i, x) for i, x in enumerate(inputs.operands))
    lhs, rhs = operands = [
        x if spec is None or isinstance(x, QuantizedOperand) else quantize(x, spec, limits=limits)
        for x, spec, limits in zip(inputs.operands, specs, inputs.limits, strict=True)
    ]
    # (In a product with integers, an integer dtype would drop the fractions of a stored matrix.)
    known = [d for d in dtypes[:2] if d is not None and jnp.issubdtype(d, np.inexact)]
    dtype = jnp.result_type(*(known or dtypes[2:]))
    out = multiply(product.forward(inputs.others), lhs, rhs, dtype, dtypes[2])
    pairs = [_kept(config, x, q) for x, q in zip(inputs.operands, operands, strict=True)]
    kept, inside = zip(*pairs, strict=True)
    return out, (inputs._replace(operands=kept, limits=(None, None)), inside)


def _kept(config: ProductConfig, x: Operand, q: Operand) -> tuple[Operand, jax.Array | None]:
    """Returns the residual for an operand `x` quantized to `q`, and a mask of its gradient."""
    if not isinstance(q, QuantizedOperand):
        return q, None
    inside, q = q.inside, q._replace(inside=None)
    if isinstance(x, QuantizedOperand):
        return q, None
    original = config.use_original_residuals or _is_tiled(q)
    return x if original else q, None if config.disable_gradient_clipping else inside


def _is_tiled(q: QuantizedOperand) -> bool:
    """Whether the backward product would mix an operand's scales; if so, its residual is dense."""
    shapes = () if q.scale is None else zip(q.scale.shape, q.codes.shape, strict=True)
    return any(n not in (1, m) for n, m in shapes)


def spec_of_side(product: Product, config: ProductConfig, i: int, x: Operand) -> OperandSpec | None:
    """Returns how the forward pass quantizes an operand; None if it does not."""
    own = (config.lhs, config.rhs)[i]
    if isinstance(x, QuantizedOperand) or not jnp.issubdtype(x.dtype, np.floating):
        return None
    return None if own.qtype is None else _spec(product, i, own)


def _spec(product: Product | Bilinear, i: int, config: OperandConfig) -> OperandSpec:
    """Combines an operand's configuration with the meaning of its axes in the product."""
    shared = config.disable_channelwise_axes
    channels = () if shared else tuple(a for a in product.axes[i] if a is not None)
    tile = None
    if config.tile_size is not None and product.summed:
        tile = product.summed[-1][i], config.tile_size
    rounding = None
    if isinstance(config, GradientConfig) and config.stochastic_rounding is not None:
        rounding = config.stochastic_rounding, tuple(config.channelwise_noise_axes)
    return OperandSpec(config.qtype, config.calibration_method, channels, tile, rounding)


def _backward(
    product: Product, config: ProductConfig, dtypes: Any, residuals: _Residuals, gradient: jax.Array
) -> tuple[Inputs]:
    kept, inside = residuals
    found: list[Any] = [None, None]
    for i in (0, 1):
        if dtypes[i] is not None and jnp.issubdtype(dtypes[i], np.inexact):
            out = _gradient(product, i, config, kept, gradient, dtypes[i])
            passes = inside[i]
            found[i] = out if passes is None else jnp.where(passes, out, 0)
    return (Inputs((found[0], found[1]), None, None, None),)  # type: ignore[arg-type]


def _gradient(
    product: Product, side: int, config: ProductConfig, kept: Inputs, g: jax.Array, dtype: Any
) -> jax.Array:
    """Returns an operand's gradient: a product of the incoming gradient and the other operand."""
    of_gradient = (config.dlhs_grad, config.drhs_grad)[side]
    of_residual = (config.dlhs_residual, config.drhs_residual)[side]
    own, y = kept.operands[side], kept.operands[1 - side]
    own = own.codes if isinstance(own, QuantizedOperand) else own
    transposed = product.transposed(side, own, kept.others)
    wide = jnp.promote_types(g.dtype, dtype)
    left: Operand = g
    if of_gradient.qtype is not None:
        if isinstance(y, QuantizedOperand) and y.multiplies and not _is_tiled(y):
            # The scales of y are along axes that this product sums, so the gradient absorbs them.
            sizes = product.group_sizes(kept.others) if side == 0 else None
            g = scaled(g, y.scale, product.axes[1 - side], sizes)
            y = y._replace(scale=None)
        left = quantize(g, _spec(transposed, 0, of_gradient), kept.key)
    if of_residual.qtype is not None and not isinstance(y, QuantizedOperand):
        y = quantize(y, _spec(transposed, 1, of_residual))
    return multiply(transposed, left, y, wide, dtype)


_product.defvjp(_forward, _backward)
