"""JAX's products with a rule for quantization: the same arguments, and quantized gradients.

The forward pass quantizes both operands, with a scale for each index of the axes that are not summed
(or for each tile of the summed one). Integers are multiplied as integers and summed exactly in int32
(sums of more than 131071 products might overflow it: they use the operands' dtype). The backward pass
quantizes the incoming gradient, and multiplies it with the quantized operands of the forward pass. The
rounding itself has the gradient one ("straight through").
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_implicit.core.keys import as_key
from haiku_implicit.numerics import options
from haiku_implicit.numerics.operands import OperandSpec, QuantizedOperand
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products import quant_rules
from haiku_implicit.products.activation_stats import QuantStats, static_limits
from haiku_implicit.products.bilinear import (
    Operand,
    Others,
    Product,
    conv_product,
    dot_product,
    ragged_product,
)
from haiku_implicit.products.product_config import OperandConfig, ProductConfig
from haiku_implicit.products.quantized_product import (
    Inputs,
    as_operand,
    quantized_product,
    spec_of_side,
)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    rule: quant_rules.QuantRule,
    out_sharding: Any = None,
    lhs_is_weight: bool = False,
    rhs_is_weight: bool = True,
    key: Any = None,
    stats: QuantStats | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` of quantized operands, with a quantized backward pass.

    The stored codes of a `QuantizedMatrix` are used directly; it does not get a gradient.

    Args:
      lhs, rhs: arrays; only floating ones are quantized.
      dimension_numbers: as for `jax.lax.dot_general`, like the two that follow and `out_sharding`.
      precision: the precision of products of values; products of integers are exact.
      preferred_element_type: the dtype of the result.
      rule: the formats and calibrations; without `weight_qtype` dense operands are not quantized.
      out_sharding: the sharding of the result.
      lhs_is_weight, rhs_is_weight: which operands are weights; the others are activations.
      key: a random key, or an integer seed, for a rule with stochastic rounding that is differentiated.
      stats: statistics of the activation, for a rule with `act_static_scale`.

    Returns:
      The result of `jax.lax.dot_general`, with its shape and dtype, up to rounding.

    Raises:
      ValueError: for a tile size that does not divide the axis, a calibration that the format does not
        have, stochastic rounding without a key, or a static scale without statistics of one activation.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit.quantization import QtRule, dot_general
      >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='int8')
      >>> x, w = jnp.array([[1.0, -0.5]]), jnp.array([[1.0], [0.25]])
      >>> y = dot_general(x, w, (((1,), (0,)), ((), ())), rule=rule)
      >>> bool(abs(y[0, 0] - 0.875) < 0.01)
      True
    """
    product = dot_product((lhs.ndim, rhs.ndim), dimension_numbers, precision, out_sharding)
    weights = (lhs_is_weight, rhs_is_weight)
    return apply(
        product, (lhs, rhs), how_by_rule(rule, weights, preferred_element_type, key, stats)
    )


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    rule: quant_rules.QuantRule,
    out_sharding: Any = None,
    lhs_is_weight: bool = False,
    rhs_is_weight: bool = True,
    key: Any = None,
    stats: QuantStats | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` of quantized operands, with a quantized backward pass.

    `lhs` has a scale for each index of its batch axis, `rhs` for each output feature. Tiles divide the
    input features.

    Args:
      lhs, rhs: arrays.
      window_strides: as for `jax.lax.conv_general_dilated`, like those that follow up to
        `preferred_element_type`, and `out_sharding`.
      padding, lhs_dilation, rhs_dilation, dimension_numbers: as for JAX.
      feature_group_count, batch_group_count: as for JAX. With batch groups, `lhs` has one scale.
      precision, preferred_element_type: as for JAX.
      rule: as for `dot_general`, like the arguments that follow.
      out_sharding: the sharding of the result, in versions of JAX that have this argument.
      lhs_is_weight, rhs_is_weight: which operands are weights.
      key: a random key, or an integer seed.
      stats: statistics of the activation.

    Returns:
      The result of `jax.lax.conv_general_dilated`, up to rounding.

    Raises:
      ValueError: as for `dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit.quantization import QtRule, conv_general_dilated
      >>> rule = QtRule(weight_qtype='fp8', act_qtype='fp8')
      >>> x, w = jnp.ones((1, 3, 8)), jnp.ones((4, 3, 5))  # batch, features, space; out, in, space
      >>> y = conv_general_dilated(x, w, (1,), 'VALID', rule=rule)
      >>> y.shape, round(float(y[0, 0, 0]), 4)
      ((1, 4, 4), 15.0)
    """
    product = conv_product(
        (lhs.shape, rhs.shape),
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        out_sharding=out_sharding,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
    )
    weights = (lhs_is_weight, rhs_is_weight)
    return apply(
        product, (lhs, rhs), how_by_rule(rule, weights, preferred_element_type, key, stats)
    )


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    rule: quant_rules.QuantRule,
    lhs_is_weight: bool = False,
    rhs_is_weight: bool = True,
    key: Any = None,
    stats: QuantStats | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` of quantized operands, with a quantized backward pass.

    `lhs` has a scale for each row, `rhs` has one for each column, which all groups share.

    Args:
      lhs: `[m, k]`.
      rhs: `[g, k, n]`.
      group_sizes: integers `[g]`.
      precision, preferred_element_type, group_offset: as for `jax.lax.ragged_dot`.
      rule: as for `dot_general`, like the arguments that follow.
      lhs_is_weight, rhs_is_weight: which operands are weights.
      key: a random key, or an integer seed.
      stats: statistics of the activation.

    Returns:
      `[m, n]`, the result of `jax.lax.ragged_dot`, up to rounding.

    Raises:
      ValueError: as for `dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit.quantization import QtRule, ragged_dot
      >>> rule = QtRule(weight_qtype='fp8', act_qtype='fp8')
      >>> sizes = jnp.array([1, 2])
      >>> print(ragged_dot(jnp.ones((3, 4)), jnp.ones((2, 4, 2)), sizes, rule=rule).round(4))
      [[4. 4.]
       [4. 4.]
       [4. 4.]]
    """
    product, weights = ragged_product(precision, group_offset), (lhs_is_weight, rhs_is_weight)
    how = how_by_rule(rule, weights, preferred_element_type, key, stats)
    return apply(product, (lhs, rhs), how, (jnp.asarray(group_sizes),))


# --- products of any kind ------------------------------------------------------------------------


class How(NamedTuple):
    """How the operands of a product are quantized.

    Attributes:
      config: the configuration of each operand.
      are_weights: which operands are weights.
      dtype: the dtype of the result; None: the dtype of the plain product.
      key: a random key for stochastic rounding.
      stats: statistics of the activation, if its range is static.
      batch_axes: the axes of the activation that statistics are averaged over; None if each product
        finds the range.
      dense_are_plain: whether a product without operands in codes is not quantized.
    """

    config: ProductConfig
    are_weights: tuple[bool, bool]
    dtype: Any = None
    key: jax.Array | None = None
    stats: QuantStats | None = None
    batch_axes: tuple[int, ...] | None = None
    dense_are_plain: bool = False


def how_by_rule(
    rule: quant_rules.QuantRule,
    are_weights: tuple[bool, bool],
    dtype: Any = None,
    key: jax.Array | None = None,
    stats: QuantStats | None = None,
) -> How:
    """Returns a rule's quantization of a product; without `weight_qtype`, dense operands stay dense."""
    config = quant_rules.config_of(rule, *are_weights)
    batch_axes = tuple(rule.act_batch_axes) if rule.act_static_scale else None
    key = None if key is None else as_key(key)
    return How(config, are_weights, dtype, key, stats, batch_axes, rule.weight_qtype is None)


def how_stored(q: QuantizedMatrix, q_first: bool, product: Product) -> How:
    """Returns the quantization by a matrix's `activation`; gradients are a plain product's gradients.

    Args:
      q: the matrix.
      q_first: whether it is the first operand.
      product: the product, whose activations have groups only if the groups of `q` are summed over.
    """
    activation = options.activation_of(str(q.activation))
    # (In a convolution with feature groups, the activation has more inputs than the kernel.)
    in_groups = activation.groups and len(product.summed) > 0
    if in_groups and product.summed[-1][0 if q_first else 1] == q.ndim + q.axis:
        tile_size = q.group_size - q.padding
    else:
        tile_size = None
    config = OperandConfig(activation.qtype, activation.method, activation.tensor, tile_size)
    pair = (OperandConfig(), config) if q_first else (config, OperandConfig())
    both = ProductConfig(lhs=pair[0], rhs=pair[1], use_original_residuals=True)
    return How(both, (q_first, not q_first))


def apply(product: Product, operands: tuple[Any, Any], how: How, others: Others = ()) -> jax.Array:
    """Computes a product of dense operands or stored matrices."""
    pair = as_operand(operands[0]), as_operand(operands[1])

    def plain(lhs: Any, rhs: Any, *others: Any) -> jax.Array:
        return product.forward(others).fun(lhs, rhs, how.dtype)

    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    out = jax.eval_shape(plain, *structs, *others)  # raises JAX's errors for wrong arguments
    if how.dense_are_plain and not any(isinstance(x, QuantizedOperand) for x in pair):
        return plain(*pair, *others)
    activation = None if how.batch_axes is None else _activation(product, how, pair)
    if activation is None or how.batch_axes is None:
        return quantized_product(product, how.config, Inputs(pair, others, how.key), out.dtype)
    i, x, spec = activation
    limits, remember = static_limits(x, spec, how.batch_axes, how.stats)
    inputs = Inputs(pair, others, how.key, (limits, None) if i == 0 else (None, limits))
    return remember(quantized_product(product, how.config, inputs, out.dtype))


def _activation(
    product: Product, how: How, pair: tuple[Operand, Operand]
) -> tuple[int, jax.Array, OperandSpec] | None:
    """Returns the operand with a static range, its position and its spec; None if there is none."""
    found = []
    for i, (x, is_weight) in enumerate(zip(pair, how.are_weights, strict=True)):
        spec = spec_of_side(product, how.config, i, x)
        if spec is not None and not is_weight and not isinstance(x, QuantizedOperand):
            found.append((i, x, spec))
    if len(found) > 1:
        raise ValueError(
            "act_static_scale: expected a product of an activation and a weight, got one of two "
            "activations; say which operand is a weight, or leave it out"
        )
    return found[0] if found else None
