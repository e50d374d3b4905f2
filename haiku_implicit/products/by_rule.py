"""JAX's products with a rule that says what is quantized: the same arguments, and quantized gradients.

In the forward pass both operands are quantized, with a scale for each index of the axes that are not
summed (or for each tile of the summed one); integers are multiplied as integers and summed in int32,
exactly (sums of more than 131071 products, which it may not hold, in the operands' dtype). In the
backward pass the incoming gradient is quantized, and multiplied with what the forward pass has
quantized. The rounding itself has the gradient one ("straight through").
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_implicit.numerics.operands import OperandSpec, QuantizedOperand
from haiku_implicit.products import quant_rules
from haiku_implicit.products.activation_stats import QuantStats, static_limits
from haiku_implicit.products.bilinear import Operand, Others, Product, dot_product, sharded
from haiku_implicit.products.product_config import ProductConfig
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

    An operand that is a `QuantizedMatrix` is taken as it is stored, without a gradient.

    Args:
      lhs, rhs: arrays; what is not floating is not quantized.
      dimension_numbers: as for `jax.lax.dot_general`, like the two that follow and `out_sharding`.
      precision: of products that are not of codes: those of integers are exact.
      preferred_element_type: the dtype of the result.
      rule: what is quantized how; without `weight_qtype` nothing is.
      out_sharding: of the result.
      lhs_is_weight, rhs_is_weight: which operands are weights; the others are activations.
      key: a random key, for a rule with stochastic rounding that is differentiated.
      stats: statistics of the activation, for a rule with `act_static_scale`.

    Returns:
      What `jax.lax.dot_general` returns, of the same shape and dtype, up to rounding.

    Raises:
      ValueError: for a tile size that does not divide the axis, a calibration that the format does not
        have, stochastic rounding without a key, a static scale without statistics of one activation.

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
    return _apply(product, (lhs, rhs), _Call(rule, weights, preferred_element_type, key, stats))


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

    `lhs` has a scale for each index of its batch axis, `rhs` for each output feature. Tiles are those
    of input features.

    Args:
      lhs, rhs: arrays.
      window_strides: as for `jax.lax.conv_general_dilated`, like those that follow up to
        `preferred_element_type`, and `out_sharding`.
      padding, lhs_dilation, rhs_dilation, dimension_numbers: see there.
      feature_group_count, batch_group_count: see there. With batch groups, `lhs` has one scale.
      precision, preferred_element_type: see there.
      rule: as for `dot_general`, like those that follow.
      out_sharding: of the result; from the JAX version on that has it.
      lhs_is_weight, rhs_is_weight: which operands are weights.
      key: a random key.
      stats: statistics of the activation.

    Returns:
      What `jax.lax.conv_general_dilated` returns, up to rounding.

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
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    lhs_at, rhs_at, out_at = numbers
    every = range(len(out_at))
    batched = batch_group_count == 1  # else a batch axis of the result is a part of that of lhs
    lhs_axes = tuple(lhs_at[0] if i == out_at[0] and batched else None for i in every)
    rhs_axes = tuple(rhs_at[0] if i == out_at[1] else None for i in every)
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        **sharded(out_sharding),
    )
    product = Product(
        convolve,
        precision,
        axes=(lhs_axes, rhs_axes),
        summed=((lhs_at[1], rhs_at[1]),),
        separable=feature_group_count == batch_group_count == 1 and out_sharding is None,
    )
    weights = (lhs_is_weight, rhs_is_weight)
    return _apply(product, (lhs, rhs), _Call(rule, weights, preferred_element_type, key, stats))


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

    `lhs` has a scale for each row, `rhs` for each column, which the groups share.

    Args:
      lhs: `[m, k]`.
      rhs: `[g, k, n]`.
      group_sizes: integers `[g]`.
      precision, preferred_element_type, group_offset: as for `jax.lax.ragged_dot`.
      rule: as for `dot_general`, like those that follow.
      lhs_is_weight, rhs_is_weight: which operands are weights.
      key: a random key.
      stats: statistics of the activation.

    Returns:
      `[m, n]`, what `jax.lax.ragged_dot` returns, up to rounding.

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
    product = Product(
        functools.partial(jax.lax.ragged_dot, group_offset=group_offset),
        precision,
        axes=((0, None), (None, 2)),
        summed=((1, 1),),
        separable=False,
    )
    call = _Call(rule, (lhs_is_weight, rhs_is_weight), preferred_element_type, key, stats)
    return _apply(product, (lhs, rhs), call, (jnp.asarray(group_sizes),))


class _Call(NamedTuple):
    """What the three functions take besides operands and the options of JAX's product."""

    rule: quant_rules.QuantRule
    are_weights: tuple[bool, bool]
    dtype: Any
    key: jax.Array | None
    stats: QuantStats | None


def _apply(
    product: Product, operands: tuple[Any, Any], call: _Call, others: Others = ()
) -> jax.Array:
    """A product by a rule; the plain one where the rule leaves weights alone."""
    lhs, rhs = pair = as_operand(operands[0]), as_operand(operands[1])

    def plain(lhs: Any, rhs: Any, *others: Any) -> jax.Array:
        return product.forward(others).fun(lhs, rhs, call.dtype)

    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    out = jax.eval_shape(plain, *structs, *others)  # raises what JAX has to say of the arguments
    if call.rule.weight_qtype is None and not any(isinstance(x, QuantizedOperand) for x in pair):
        return plain(lhs, rhs, *others)
    config = quant_rules.config_of(call.rule, *call.are_weights)
    activation = _static_activation(product, config, call, pair)
    if activation is None:
        inputs = Inputs(pair, others, call.key)
        return quantized_product(product, config, inputs, out.dtype)
    i, x, spec = activation
    limits, remember = static_limits(x, spec, call.rule.act_batch_axes, call.stats)
    inputs = Inputs(pair, others, call.key, (limits, None) if i == 0 else (None, limits))
    return remember(quantized_product(product, config, inputs, out.dtype))


def _static_activation(
    product: Product, config: ProductConfig, call: _Call, pair: tuple[Operand, Operand]
) -> tuple[int, jax.Array, OperandSpec] | None:
    """The operand that is quantized with a static range, and how; None where there is none."""
    if not call.rule.act_static_scale:
        return None
    found = []
    for i, (x, is_weight) in enumerate(zip(pair, call.are_weights, strict=True)):
        spec = spec_of_side(product, config, i, x)
        if spec is not None and not is_weight and not isinstance(x, QuantizedOperand):
            found.append((i, x, spec))
    if len(found) > 1:
        raise ValueError(
            "act_static_scale: expected a product of an activation and a weight, got one of two "
            "activations; say which operand is a weight, or leave it out"
        )
    return found[0] if found else None
