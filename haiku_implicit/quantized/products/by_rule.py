"""JAX's products with a rule for quantization: the same arguments, and quantized gradients.

The forward pass quantizes both operands, with a scale for each index of the axes that are not summed
(or for each tile of the summed one). Integers are multiplied as integers and summed exactly in int32
(sums of more than 131071 products, of uint8 33025, might overflow it: they use the operands' dtype).
The backward pass quantizes the incoming gradient, and multiplies it with the quantized operands of the
forward pass. The rounding itself has the gradient one ("straight through").
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.keys import as_key
from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Array, DType, EqnParam, Precision, Primitive
from haiku_implicit.core.wrapper import Wrapper
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
        raise type_error(f"rule: expected a QtRule or a QuantRule, got {rule!r}")
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


# --- einsum --------------------------------------------------------------------------------------
# `jnp.einsum` chooses the order of its products, and rearranges operands before them. So it runs
# unchanged, on operands of an implicit type whose products are `dot_general` of this file.


def einsum(
    subscripts: str,
    *operands: Array,
    rule: QuantRule,
    precision: Precision = None,
    preferred_element_type: DType | None = None,
    out_sharding: Sharding | None = None,
    weights: int | Sequence[int] = -1,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jnp.einsum` of quantized operands, with a quantized backward pass.

    JAX's own order of contraction is kept. Each product of two operands is `dot_general`; its result is
    an activation for the next product.

    Args:
      subscripts: as for `jnp.einsum`.
      *operands: any number of arrays.
      rule: as for `dot_general`.
      precision, preferred_element_type, out_sharding: as for `jnp.einsum`.
      weights: which operands are weights, by position; the last one by default.
      key: a random key, or an integer seed. Each product derives its own key from it.

    Returns:
      The result of `jnp.einsum`, up to rounding.

    Raises:
      ValueError: as for `dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit.quantization import QtRule, einsum
      >>> rule = QtRule(weight_qtype='int8', act_qtype='int8')
      >>> x, v, w = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((4, 5))
      >>> einsum('bi,ij,jk->bk', x, v, w, rule=rule, weights=(1, 2)).shape
      (2, 5)
    """
    chosen = (weights,) if isinstance(weights, int) else tuple(weights)
    if any(not -len(operands) <= i < len(operands) for i in chosen):
        raise value_error(
            f"weights: expected positions among {len(operands)} operands, got {weights!r}"
        )
    positions = {i % len(operands) for i in chosen}
    key = None if key is None else as_key(key)
    options: dict[str, Any] = {} if out_sharding is None else dict(out_sharding=out_sharding)
    options |= dict(precision=precision, preferred_element_type=preferred_element_type)

    @use_implicit_args
    def run(*operands: Array) -> Any:
        return jnp.einsum(subscripts, *operands, **options)

    out: Array = run(
        *(_Operand(jnp.asarray(x), rule, i, i in positions, key) for i, x in enumerate(operands))
    )
    return out.value


@dataclasses.dataclass
class _Operand(Wrapper):
    """An operand of an einsum, or the product of some operands.

    Attributes:
      value: the array.
      rule: the rule for quantization.
      first: the position of the first of the operands that are in it.
      is_weight: whether it is a weight.
      key: the random key of the einsum, or None.
    """

    value: Array
    rule: QuantRule = aux_field()
    first: int = aux_field()
    is_weight: bool = aux_field()
    key: Array = None

    def materialize(self) -> NoReturn:
        """Raises, because a product of the dense array would not be quantized."""
        raise NotImplementedError(
            "quantization.einsum: this version of JAX computes einsums with a primitive that it does "
            f"not know; multiply with quantization.dot_general {see('arguments-and-types')}"
        )


@primitive_handler("dot_general")
def _multiply(primitive: Any, lhs: _Operand, rhs: _Operand, **params: EqnParam) -> _Operand:
    # Each product uses up one first position, whose number makes its key different from all others.
    first, number = sorted((lhs.first, rhs.first))
    key = lhs.key if lhs.key is None or number == 1 else jax.random.fold_in(lhs.key, number - 1)
    own: Any = dict(lhs_is_weight=lhs.is_weight, rhs_is_weight=rhs.is_weight)
    out = dot_general(lhs.value, rhs.value, **params, **own, rule=lhs.rule, key=key)
    return _Operand(out, lhs.rule, first, is_weight=False, key=lhs.key)


@primitive_handler(
    ["transpose", "squeeze", "reduce_sum", "reduce_or", "convert_element_type", "copy", "select_n"]
)
def _rearrange(
    primitive: Primitive, *operands: jax.Array | _Operand, **params: EqnParam
) -> _Operand:
    """Rearranges an operand, or takes the diagonal of one: a transposed weight is still a weight."""
    (x,) = (y for y in operands if isinstance(y, _Operand))
    return x._replace(value=primitive.bind(*(y.value if y is x else y for y in operands), **params))
