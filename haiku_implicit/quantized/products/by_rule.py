"""JAX's products with a rule for quantization: the same arguments, and quantized gradients.

The forward pass quantizes both operands, with a scale for each index of the axes that are not summed
(or for each tile of the summed one). Integers are multiplied as integers and summed exactly in int32
(sums of more than 131071 products might overflow it: they use the operands' dtype). The backward pass
quantizes the incoming gradient, and multiplies it with the quantized operands of the forward pass. The
rounding itself has the gradient one ("straight through").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.keys import as_key
from haiku_implicit.core.typing import Array, DType, EqnParam, Precision
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.products.activation_stats import QuantStats
from haiku_implicit.quantized.products.bilinear import (
    Others,
    Product,
    conv_product,
    dot_product,
    ragged_product,
)
from haiku_implicit.quantized.products.product import quantized_product
from haiku_implicit.quantized.products.rules import QuantRule


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: EqnParam,
    precision: Precision = None,
    preferred_element_type: DType | None = None,
    *,
    rule: QuantRule,
    out_sharding: Sharding | None = None,
    lhs_is_weight: bool = False,
    rhs_is_weight: bool = True,
    key: jax.Array | None = None,
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
    return _by_rule(product, (lhs, rhs), (), rule, weights, preferred_element_type, key, stats)


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: EqnParam,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: EqnParam = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Precision = None,
    preferred_element_type: DType | None = None,
    *,
    rule: QuantRule,
    out_sharding: Sharding | None = None,
    lhs_is_weight: bool = False,
    rhs_is_weight: bool = True,
    key: jax.Array | None = None,
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
    return _by_rule(product, (lhs, rhs), (), rule, weights, preferred_element_type, key, stats)


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    precision: Precision = None,
    preferred_element_type: DType | None = None,
    group_offset: Array = None,
    *,
    rule: QuantRule,
    lhs_is_weight: bool = False,
    rhs_is_weight: bool = True,
    key: jax.Array | None = None,
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
    others = (jnp.asarray(group_sizes),)
    return _by_rule(product, (lhs, rhs), others, rule, weights, preferred_element_type, key, stats)


def _by_rule(
    product: Product,
    operands: tuple[Any, Any],
    others: Others,
    rule: QuantRule,
    are_weights: tuple[bool, bool],
    dtype: DType | None,
    key: jax.Array | None,
    stats: QuantStats | None,
) -> jax.Array:
    if not isinstance(rule, QuantRule):
        raise TypeError(f"rule: expected a QtRule or a QuantRule, got {rule!r}")
    config = rule.config(*are_weights)
    lhs, rhs = map(_as_operand, operands)
    if rule.weight_qtype is None and not any(map(is_implicit, (lhs, rhs))):
        return product.plain(lhs, rhs, *others, dtype=dtype)
    key = None if key is None else as_key(key)
    return quantized_product(product, config, (lhs, rhs), others, dtype=dtype, key=key, stats=stats)


def _as_operand(x: Array) -> jax.Array | QuantizedMatrix:
    """Converts an array; a stored matrix keeps its codes, other implicit arrays are materialized."""
    if isinstance(x, QuantizedMatrix):
        return x
    return materialize_array(x) if is_implicit(x) else jnp.asarray(x)
