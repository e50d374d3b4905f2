"""JAX's products with a rule that says what is quantized: the same arguments, and quantized gradients.

In the forward pass both operands are quantized, with a scale for each index of the axes that are not
summed (or for each tile of the summed one); integers are multiplied as integers and summed in int32,
exactly (sums of more than 131071 products, which it may not hold, in the operands' dtype). In the
backward pass the incoming gradient is quantized, and multiplied with what the forward pass has
quantized. The rounding itself has the gradient one ("straight through").
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from haiku_implicit.core import compat
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.numerics.operands import Limits, OperandSpec, QuantizedOperand, stored_operand
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products import quant_rules
from haiku_implicit.products.activation_stats import QuantStats, static_limits
from haiku_implicit.products.bilinear import Product, quantized_product, spec_of_side


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
    numbers = _as_tuples(dimension_numbers)
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers
    lhs_free = [i for i in range(lhs.ndim) if i not in (*lhs_sum, *lhs_batch)]
    rhs_free = [i for i in range(rhs.ndim) if i not in (*rhs_sum, *rhs_batch)]
    product = Product(
        jax.lax.dot_general,
        _given(dimension_numbers=numbers, precision=precision, out_sharding=out_sharding),
        axes=(
            (*lhs_batch, *lhs_free, *[None] * len(rhs_free)),
            (*rhs_batch, *[None] * len(lhs_free), *rhs_free),
        ),
        summed=tuple(zip(lhs_sum, rhs_sum, strict=True)),
        separable=out_sharding is None,
    )
    weights = (lhs_is_weight, rhs_is_weight)
    return _apply(product, rule, weights, (lhs, rhs), (), preferred_element_type, key, stats)


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
    product = Product(
        jax.lax.conv_general_dilated,
        _given(
            window_strides=tuple(window_strides),
            padding=padding if isinstance(padding, str) else tuple(map(tuple, padding)),
            lhs_dilation=lhs_dilation and tuple(lhs_dilation),
            rhs_dilation=rhs_dilation and tuple(rhs_dilation),
            dimension_numbers=numbers,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
            precision=precision,
            out_sharding=out_sharding,
        ),
        axes=(lhs_axes, rhs_axes),
        summed=((lhs_at[1], rhs_at[1]),),
        separable=feature_group_count == batch_group_count == 1 and out_sharding is None,
    )
    weights = (lhs_is_weight, rhs_is_weight)
    return _apply(product, rule, weights, (lhs, rhs), (), preferred_element_type, key, stats)


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
        jax.lax.ragged_dot,
        _given(precision=precision, group_offset=group_offset),
        axes=((0, None), (None, 2)),
        summed=((1, 1),),
        separable=False,
    )
    weights, others = (lhs_is_weight, rhs_is_weight), (jnp.asarray(group_sizes),)
    return _apply(product, rule, weights, (lhs, rhs), others, preferred_element_type, key, stats)


def einsum(
    subscripts: str,
    *operands: Any,
    rule: quant_rules.QuantRule,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    weights: int | Sequence[int] = -1,
    key: Any = None,
) -> jax.Array:
    """`jnp.einsum` of quantized operands, with a quantized backward pass.

    JAX's own order of contraction is kept. Each product of two is `dot_general`; what it gives is an
    activation for the next one.

    Args:
      subscripts: as for `jnp.einsum`.
      *operands: any number of arrays.
      rule: as for `dot_general`.
      precision, preferred_element_type, out_sharding: as for `jnp.einsum`.
      weights: which operands are weights, by position; the last one by default.
      key: a random key. All products draw from it, each with a key of its own.

    Returns:
      What `jnp.einsum` returns, up to rounding.

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
    options = _given(precision=precision, out_sharding=out_sharding)

    def plain(*operands: Any) -> jax.Array:
        return jnp.einsum(
            subscripts, *operands, preferred_element_type=preferred_element_type, **dict(options)
        )

    chosen = (weights,) if isinstance(weights, int) else tuple(weights)
    if any(not -len(operands) <= i < len(operands) for i in chosen):
        raise ValueError(
            f"weights: expected positions among {len(operands)} operands, got {weights!r}"
        )
    positions = {i % len(operands) for i in chosen}
    closed = jax.make_jaxpr(plain)(*operands)
    marked = [(jnp.asarray(x), i in positions) for i, x in enumerate(operands)]
    count = 0

    def product(lhs: Any, rhs: Any, params: Any) -> Any:
        nonlocal count
        own = key if key is None or not count else jax.random.fold_in(key, count)
        count += 1
        of_weights = dict(lhs_is_weight=lhs[1], rhs_is_weight=rhs[1])
        return dot_general(lhs[0], rhs[0], **params, **of_weights, rule=rule, key=own), False

    return _with_products(closed, marked, product)[0][0]


def _with_products(closed: Any, operands: Sequence[Any], product: Callable[..., Any]) -> list[Any]:
    """The results of an einsum's jaxpr with another product of two, for values with a mark each.

    A function of one value hands its mark on, so that a transposed weight is a weight.
    """
    env = dict(zip(closed.jaxpr.invars, operands, strict=True))
    env |= {v: (x, False) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    for eqn in closed.jaxpr.eqns:
        ins = [(v.val, False) if isinstance(v, Literal) else env[v] for v in eqn.invars]
        if eqn.primitive is jax.lax.dot_general_p:
            outs = [product(*ins, eqn.params)]
        elif hasattr(eqn.params.get("jaxpr"), "jaxpr"):
            outs = _with_products(eqn.params["jaxpr"], ins, product)
        else:
            values = compat.bind(eqn.primitive, [x for x, _ in ins], eqn.params)
            outs = [(x, len(ins) == 1 and ins[0][1]) for x in values]
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [env[v] for v in closed.jaxpr.outvars]


def _as_tuples(numbers: Any) -> Any:
    return tuple(tuple(tuple(map(int, axes)) for axes in pair) for pair in numbers)


def _given(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((k, v) for k, v in options.items() if v is not None)


def _apply(
    product: Product,
    rule: quant_rules.QuantRule,
    weights: tuple[bool, bool],
    operands: tuple[Any, Any],
    others: tuple[Any, ...],
    preferred_element_type: Any,
    key: Any,
    stats: QuantStats | None,
) -> jax.Array:
    """A product by a rule; the plain one where the rule leaves weights alone."""

    def plain(lhs: Any, rhs: Any, *others: Any) -> jax.Array:
        return product(lhs, rhs, others, preferred_element_type)

    pair = [_as_operand(x) for x in operands]
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    out = jax.eval_shape(plain, *structs, *others)  # raises what JAX has to say of the arguments
    if rule.weight_qtype is None and not any(isinstance(x, QuantizedOperand) for x in pair):
        return plain(*pair, *others)
    config = quant_rules.config_of(rule, *weights)
    dtypes = [None if isinstance(x, QuantizedOperand) else x.dtype for x in pair]
    limits, remember = _ranges(product, config, rule, weights, pair, stats)
    out = quantized_product(product, config, (*dtypes, out.dtype), tuple(pair), others, key, limits)
    return remember(out)


def _ranges(
    product: Product,
    config: quant_rules.ProductConfig,
    rule: quant_rules.QuantRule,
    weights: tuple[bool, bool],
    pair: Sequence[Any],
    stats: QuantStats | None,
) -> tuple[Any, Callable[[jax.Array], jax.Array]]:
    """The static ranges of both operands, None for dynamic ones; see `static_limits`."""
    own = [spec_of_side(product, config, i, pair[i]) for i in (0, 1)]
    static = [i for i in (0, 1) if rule.act_static_scale and not weights[i] and own[i] is not None]
    if len(static) > 1:
        raise ValueError(
            "act_static_scale: expected a product of an activation and a weight, got one of two "
            "activations; say which operand is a weight, or leave it out"
        )
    limits: list[Limits | None] = [None, None]
    if not static:
        return tuple(limits), lambda out: out
    spec = cast(OperandSpec, own[static[0]])
    limits[static[0]], remember = static_limits(pair[static[0]], spec, rule.act_batch_axes, stats)
    return tuple(limits), remember


def _as_operand(x: Any) -> Any:
    if not is_implicit(x):
        return jnp.asarray(x)
    if not isinstance(x, QuantizedMatrix):
        return materialize_array(x)
    stored = stored_operand(x)
    return QuantizedOperand(materialize_array(x), None) if stored is None else stored
