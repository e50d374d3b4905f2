"""JAX's products with a rule that says what is quantized: the same arguments, and quantized gradients.

In the forward pass both operands are quantized, with a scale for each index of the axes that are not
summed (or for each tile of the summed one); integers are multiplied as integers and summed in int32,
exactly (sums of more than 131071 products, which it may not hold, in the operands' dtype). In the
backward pass the incoming gradient is quantized, and multiplied with what the forward pass has
quantized. The rounding itself has the gradient one ("straight through").
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

    An operand that is a `QuantizedMatrix` is taken as it is stored, without a gradient.

    Args:
      lhs, rhs: arrays; what is not floating is not quantized.
      dimension_numbers: as for `jax.lax.dot_general`, like the two that follow and `out_sharding`.
      precision: of products that are not of codes: those of integers are exact.
      preferred_element_type: the dtype of the result.
      rule: what is quantized how; without `weight_qtype` nothing is.
      out_sharding: of the result.
      lhs_is_weight, rhs_is_weight: which operands are weights; the others are activations.
      key: a random key, or an integer seed, for a rule with stochastic rounding that is differentiated.
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
      key: a random key, or an integer seed.
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

    `lhs` has a scale for each row, `rhs` for each column, which the groups share.

    Args:
      lhs: `[m, k]`.
      rhs: `[g, k, n]`.
      group_sizes: integers `[g]`.
      precision, preferred_element_type, group_offset: as for `jax.lax.ragged_dot`.
      rule: as for `dot_general`, like those that follow.
      lhs_is_weight, rhs_is_weight: which operands are weights.
      key: a random key, or an integer seed.
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
    product, weights = ragged_product(precision, group_offset), (lhs_is_weight, rhs_is_weight)
    how = how_by_rule(rule, weights, preferred_element_type, key, stats)
    return apply(product, (lhs, rhs), how, (jnp.asarray(group_sizes),))


# --- products of any kind ------------------------------------------------------------------------


class How(NamedTuple):
    """What is quantized in a product, and how.

    Attributes:
      config: of each operand.
      are_weights: which operands are weights.
      dtype: of the result; None for that of the plain product.
      key: a random key for stochastic rounding.
      stats: statistics of the activation, where its range is static.
      batch_axes: the axes of the activation that statistics are averaged over; None where its range is
        found in each product.
      dense_are_plain: whether nothing is quantized where neither operand is stored in codes.
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
    """As a rule says; nothing of dense operands where it leaves weights alone."""
    config = quant_rules.config_of(rule, *are_weights)
    batch_axes = tuple(rule.act_batch_axes) if rule.act_static_scale else None
    key = None if key is None else as_key(key)
    return How(config, are_weights, dtype, key, stats, batch_axes, rule.weight_qtype is None)


def how_stored(q: QuantizedMatrix, q_first: bool, product: Product) -> How:
    """As a stored matrix says by its `activation`; gradients pass as those of a plain product.

    Args:
      q: the matrix.
      q_first: whether it is the first operand.
      product: the product, whose activations have groups only where those of `q` are summed.
    """
    activation = options.activation_of(str(q.activation))
    # (Of a convolution with feature groups, the activation has more inputs than the kernel.)
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
    """A product of operands that are dense, or stored matrices."""
    pair = as_operand(operands[0]), as_operand(operands[1])

    def plain(lhs: Any, rhs: Any, *others: Any) -> jax.Array:
        return product.forward(others).fun(lhs, rhs, how.dtype)

    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    out = jax.eval_shape(plain, *structs, *others)  # raises what JAX has to say of the arguments
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
    """The operand that is quantized with a static range, and how; None where there is none."""
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
