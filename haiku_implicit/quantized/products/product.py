"""Products that quantize their operands, with gradients that are quantized products themselves.

The forward pass quantizes both operands and multiplies them. The backward pass quantizes the incoming
gradient, and multiplies it with the quantized operands of the forward pass. The rounding itself has the
gradient one ("straight through").
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import DType
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers.options import OperandConfig
from haiku_implicit.quantized.numbers.ranges import Limits
from haiku_implicit.quantized.operands import QuantizedOperand, quantize, stored_operand
from haiku_implicit.quantized.products.activation_stats import QuantStats, static_limits
from haiku_implicit.quantized.products.bilinear import (
    Operand,
    Others,
    Product,
    scaled,
    scaled_axes,
)
from haiku_implicit.quantized.products.microscaled import microscaled_product
from haiku_implicit.quantized.products.rules import ProductConfig


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


def config_by_activation(
    q: QuantizedMatrix, q_first: bool, product: Product, static_axes: tuple[int, ...] | None = None
) -> ProductConfig:
    """Returns the configuration by a matrix's `activation`; gradients are a plain product's gradients.

    Args:
      q: the matrix.
      q_first: whether it is the first operand.
      product: the product, whose activations have groups only if the groups of `q` are summed over.
      static_axes: as for `OperandConfig`.
    """
    config, side = q.activation_config, 0 if q_first else 1
    in_groups = product.summed and product.summed[-1][side] == q.ndim + q.axis
    tile_size = config.tile_size if in_groups else None
    config = dataclasses.replace(config, tile_size=tile_size, static_axes=static_axes)
    own: dict[str, Any] = {"rhs" if q_first else "lhs": config}
    return ProductConfig(**own, use_original_residuals=True)


def quantized_product(
    product: Product,
    config: ProductConfig,
    operands: tuple[jax.Array | QuantizedMatrix, jax.Array | QuantizedMatrix],
    others: Others = (),
    *,
    dtype: DType | None = None,
    key: jax.Array | None = None,
    stats: QuantStats | None = None,
) -> jax.Array:
    """Computes a product that quantizes its operands, and the gradients in its backward pass.

    Args:
      product: the product.
      config: how operands and gradients are quantized.
      operands: `lhs` and `rhs`, dense arrays or stored matrices.
      others: the other arguments of the product.
      dtype: the dtype of the result; None: the dtype of the plain product.
      key: a random key for stochastic rounding.
      stats: statistics of the activation, if its range is static.

    Raises:
      ValueError: for two operands with static ranges, or one without statistics.
    """
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    # (Raises JAX's errors for wrong arguments.)
    out = jax.eval_shape(functools.partial(product.plain, dtype=dtype), *structs, *others)
    lhs, rhs = (stored_operand(x) if isinstance(x, QuantizedMatrix) else x for x in operands)
    pair = lhs, rhs
    limits, remember = _static_ranges(product, config, pair, stats)
    dtypes = (None if isinstance(x, QuantizedOperand) else x.dtype for x in pair)
    inputs = Inputs(pair, others, key, limits)
    return remember(_product(product, config, (*dtypes, out.dtype), inputs))


_Ranges = tuple[Limits | None, Limits | None]


def _static_ranges(
    product: Product, config: ProductConfig, pair: tuple[Operand, Operand], stats: QuantStats | None
) -> tuple[_Ranges, Callable[[jax.Array], jax.Array]]:
    """Returns the static range of the activation, if any, and the function of `static_limits`."""
    static = [
        (i, x, own)
        for i, (x, own) in enumerate(zip(pair, config.operands, strict=True))
        if own.static_axes is not None and _rounds(x, own)
    ]
    if not static:
        return (None, None), lambda out: out
    if len(static) > 1:
        raise value_error(
            "act_static_scale: expected a product of an activation and a weight, got one of two "
            "activations; say which operand is a weight, or leave it out"
        )
    ((i, x, own),) = static
    limits, remember = static_limits(x, own, scaled_axes(product, i, own), stats)
    return ((limits, None) if i == 0 else (None, limits)), remember


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
    both = zip(inputs.operands, config.operands, inputs.limits, strict=True)
    lhs, rhs = operands = [
        quantize(x, own, scaled_axes(product, i, own), limits=limits) if _rounds(x, own) else x
        for i, (x, own, limits) in enumerate(both)
    ]
    # (In a product with integers, an integer dtype would drop the fractions of a stored matrix.)
    known = [d for d in dtypes[:2] if d is not None and jnp.issubdtype(d, np.inexact)]
    dtype = jnp.result_type(*(known or dtypes[2:]))
    forward = product.forward(inputs.others)
    out = microscaled_product(forward, lhs, rhs, config.operands, dtype, dtypes[2])
    pairs = [
        _kept(config, own, x, q)
        for own, x, q in zip(config.operands, inputs.operands, operands, strict=True)
    ]
    kept, inside = zip(*pairs, strict=True)
    return out, (inputs._replace(operands=kept, limits=(None, None)), inside)


def _kept(
    config: ProductConfig, own: OperandConfig, x: Operand, q: Operand
) -> tuple[Operand, jax.Array | None]:
    """Returns the residual for an operand `x` quantized to `q`, and a mask of its gradient."""
    if not isinstance(q, QuantizedOperand):
        return q, None
    inside, q = q.inside, q._replace(inside=None)
    if isinstance(x, QuantizedOperand):
        return q, None
    original = config.use_original_residuals or own.recipe is not None or _is_tiled(q)
    return x if original else q, None if config.disable_gradient_clipping else inside


def _is_tiled(q: QuantizedOperand) -> bool:
    """Whether the backward product would mix an operand's scales; if so, its residual is dense."""
    shapes = () if q.scale is None else zip(q.scale.shape, q.codes.shape, strict=True)
    return any(n not in (1, m) for n, m in shapes)


def _rounds(x: Operand, config: OperandConfig) -> TypeGuard[jax.Array]:
    """Whether the forward pass quantizes an operand."""
    if config.qtype is None or isinstance(x, QuantizedOperand):
        return False
    return bool(jnp.issubdtype(x.dtype, np.floating))


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
    product: Product, side: int, config: ProductConfig, kept: Inputs, g: jax.Array, dtype: DType
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
        left = quantize(g, of_gradient, scaled_axes(transposed, 0, of_gradient), kept.key)
    if of_residual.qtype is not None and not isinstance(y, QuantizedOperand):
        y = quantize(y, of_residual, scaled_axes(transposed, 1, of_residual))
    both = of_gradient, of_residual
    return microscaled_product(transposed, left, y, both, wide, dtype)


_product.defvjp(_forward, _backward)
