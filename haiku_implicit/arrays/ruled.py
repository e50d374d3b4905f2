"""`RuledWeight`: the base of weights whose products follow rules of quantization."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.batch_axes import on_batch_axes
from haiku_implicit.arrays.wrapper import Wrapper
from haiku_implicit.core import compat
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.products import by_rule
from haiku_implicit.products.activation_stats import QuantStats
from haiku_implicit.products.quant_rules import QuantRule


class RuledWeight(Wrapper, core_ndim=2):
    """A weight, dense or quantized, whose products are quantized as rules say.

    What rearranges or rescales the weight does so to `wrapped`, and the result is a weight again, for
    the product that follows.

    Attributes:
      rules: rules in order, of which the first one that is for an operation decides.
      stats: statistics of the activations that the weight meets, or None.
    """

    rules: tuple[QuantRule, ...]
    stats: QuantStats | None

    @abc.abstractmethod
    def with_weight(self, weight: Any) -> Any:
        """Another arrangement of the weight, in this type; `weight` itself where it can't be in it."""

    @property
    def first_key(self) -> jax.Array | None:
        """A random key for the rounding in a product, or None."""
        return None

    def rule_for(self, op_name: str) -> QuantRule | None:
        """The rule for products of a kind; None where nothing is quantized in them."""
        rule = next((rule for rule in self.rules if rule.is_for(op_name)), None)
        return None if rule is None or rule.weight_qtype is None else rule


# --- products ------------------------------------------------------------------------------------

PRODUCTS: dict[Primitive, Any] = {
    jax.lax.dot_general_p: by_rule.dot_general,
    jax.lax.conv_general_dilated_p: by_rule.conv_general_dilated,
}

# A rule is for what `jax.lax.ragged_dot` does; its primitive is more general.
RAGGED_DOT = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
ragged_dot_general_p = compat._primitive_of(
    jax.lax.ragged_dot,
    jax.ShapeDtypeStruct((1, 1), jnp.float32),
    jax.ShapeDtypeStruct((1, 1, 1), jnp.float32),
    jax.ShapeDtypeStruct((1,), jnp.int32),
)


@binary_handler(PRODUCTS)
def multiply_by_rule(call: BinaryCall, x: jax.Array, w: RuledWeight) -> jax.Array:
    """See `quantization.dot_general` and `quantization.conv_general_dilated`."""
    rule = w.rule_for(call.primitive.name)
    if rule is None:
        return call(x, w.wrapped)
    return PRODUCTS[call.primitive](
        *call.ordered(x, w.wrapped),
        **call.params,
        rule=rule,
        lhs_is_weight=call.w_first,
        rhs_is_weight=not call.w_first,
        key=w.first_key,
        stats=w.stats,
    )


@primitive_handler(ragged_dot_general_p)
def ragged_dot_by_rule(
    primitive: Primitive, x: jax.Array, w: RuledWeight, group_sizes: jax.Array, **params: Any
) -> Any:
    """See `quantization.ragged_dot`."""
    rule, options = w.rule_for("ragged_dot"), dict(params)
    if rule is None:
        return default_handler(primitive, x, w.wrapped, group_sizes, **params)
    numbers = options.pop("ragged_dot_dimension_numbers")
    if numbers != RAGGED_DOT or options.pop("out_sharding", None) is not None:
        return NotImplemented
    own: Any = dict(rule=rule, key=w.first_key, stats=w.stats)
    return by_rule.ragged_dot(x, w.wrapped, group_sizes, **options, **own)


# --- rearrangements ------------------------------------------------------------------------------


@primitive_handler(
    [
        "transpose", "reshape", "broadcast_in_dim", "squeeze", "rev", "slice", "dynamic_slice",
        "split", "neg", "convert_element_type",
    ]
)  # fmt: skip
def rearrange(primitive: Primitive, w: RuledWeight, *others: jax.Array, **params: Any) -> Any:
    """The same of what is wrapped: it is still a weight for the product that follows."""
    out = on_batch_axes(primitive, w, *others, **params)
    if out is not NotImplemented:  # each matrix has keys and statistics of its own
        return out
    out = default_handler(primitive, w.wrapped, *others, **params)
    return jax.tree.map(w.with_weight, out, is_leaf=is_implicit)


@primitive_handler(["mul", "div"])
def rescale(primitive: Primitive, w: RuledWeight, x: jax.Array, **params: Any) -> Any:
    """Times or divided by a number or factors along some axes, as where a weight is normalized.

    An `x` with a number for each element may be an activation, and the result is then not a weight.
    """
    is_factor = x.ndim == 0 or any(i < j for i, j in zip(x.shape, w.shape, strict=True))
    return rearrange(primitive, w, x, **params) if is_factor else NotImplemented


@primitive_handler("gather")
def look_up(primitive: Primitive, w: RuledWeight, indices: jax.Array, **params: Any) -> Any:
    """Rows of a table become dense, unrounded by the rules; whole matrices of a batch are weights."""
    out = on_batch_axes(primitive, w, indices, **params)
    if out is NotImplemented:
        out = default_handler(primitive, w.wrapped, indices, **params)
        out = w.with_weight(out) if is_implicit(out) else out
    return out
