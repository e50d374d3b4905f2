"""`TrainedQuantized`: a weight in quantized training, dense, and quantized in each product."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.batch_axes import on_batch_axes
from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, aux_field, frozen_field
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.products import by_rule
from haiku_implicit.products.quant_rules import QuantRule


@dataclasses.dataclass
class TrainedQuantized(ImplicitArray, core_ndim=2):
    """A dense weight that is quantized anew in each product, as are the other operand and gradients.

    It stands for the dense weight: what is no product sees that. `quantized_training` puts it into
    a tree of parameters. What rearranges the weight (transposed, sliced, split, reshaped, cast)
    keeps the type, for the product that follows.

    Attributes:
      value: `[..., n, m]`, the weight. It is what is trained.
      key: random keys `[...]` for stochastic rounding, or None; see `with_rounding_key`.
      stats: statistics of the activation, a `QuantStats` (without arrays outside of a call, see
        `with_quant_stats`); None where no rule has static scales.
      rules: the rules that decide for the weight's module, in order: the first one that is for the
        operation is taken.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> rule = QtRule(weight_qtype='int2', act_qtype='int8', bwd_qtype='int8')
      >>> w = hki.TrainedQuantized(jnp.array([[1.0], [0.1]]), rules=(rule,))
      >>> print(hki.use_implicit_args(jnp.dot)(jnp.ones((1, 2)), w))  # 0.1 is rounded to 0
      [[0.66405237]]
    """

    value: Any
    key: Any = frozen_field(default=None)
    stats: Any = frozen_field(default=None)
    rules: tuple[QuantRule, ...] = aux_field(default=())

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.value))

    def compute_dtype(self) -> Any:
        return self.value.dtype

    def materialize(self) -> jax.Array:
        return self.value

    def partition_spec(self, spec: Any, mesh: Any) -> Any:
        """As the dense weight; keys and statistics are along its batch axes."""
        batch = jax.sharding.PartitionSpec(*tuple(spec)[: max(self.ndim - 2, 0)])
        key, stats = jax.tree.map(lambda _: batch, (self.key, self.stats))
        return self._replace(value=spec, key=key, stats=stats)

    def rule_for(self, op_name: str) -> QuantRule | None:
        """The rule for products of a kind; None where they are dense."""
        return deciding_rule(self.rules, op_name)

    def with_value(self, value: jax.Array) -> "TrainedQuantized":
        """Another arrangement of the same weight, of any shape.

        Keys are drawn from the first one; the first statistics are those of all.
        """
        key, stats, batch = self.key, self.stats, value.shape[:-2]
        if key is not None and np.shape(key) != batch:
            key = jax.random.split(self.first_key, batch)
        stats = None if stats is None else stats.spread(batch)
        return self._replace(value=value, key=key, stats=stats)

    @property
    def first_key(self) -> Any:
        """One random key for a product of the weight; None without."""
        return None if self.key is None else self.key.reshape(-1)[0]


def deciding_rule(rules: Sequence[QuantRule], op_name: str) -> QuantRule | None:
    """The rule for products of a kind; None where they are dense."""
    rule = next((rule for rule in rules if rule.is_for(op_name)), None)
    return None if rule is None or rule.weight_qtype is None else rule


# --- products ------------------------------------------------------------------------------------


@primitive_handler("dot_general")
def dot_with_trained(primitive: Any, x: jax.Array, w: TrainedQuantized, **params: Any) -> jax.Array:
    """See `quantization.dot_general`."""
    return _product("dot_general", primitive, (x, w), params)


@primitive_handler("dot_general")
def dot_of_trained(primitive: Any, w: TrainedQuantized, x: jax.Array, **params: Any) -> jax.Array:
    """The same with the weight first."""
    return _product("dot_general", primitive, (w, x), params)


@primitive_handler("dot_general")
def dot_of_two_trained(
    primitive: Any, v: TrainedQuantized, w: TrainedQuantized, **params: Any
) -> jax.Array:
    """Both are weights; the rule is that of the second one."""
    return _product("dot_general", primitive, (v, w), params)


@primitive_handler("conv_general_dilated")
def convolve_with_trained(
    primitive: Any, x: jax.Array, w: TrainedQuantized, **params: Any
) -> jax.Array:
    """See `quantization.conv_general_dilated`."""
    return _product("conv_general_dilated", primitive, (x, w), params)


# The one with a rule is that of JAX's `ragged_dot`; the primitive is more general.
RAGGED_DOT = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
ragged_dot_general_p = compat._primitive_of(
    jax.lax.ragged_dot, *map(jnp.ones, [(1, 1), (1, 1, 1)]), jnp.ones(1, jnp.int32)
)


@primitive_handler(ragged_dot_general_p)
def ragged_dot_with_trained(
    primitive: Any,
    x: jax.Array,
    w: TrainedQuantized,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: Any,
    out_sharding: Any = None,
    **params: Any,
) -> Any:
    """See `quantization.ragged_dot`."""
    if ragged_dot_dimension_numbers != RAGGED_DOT or out_sharding is not None:
        return NotImplemented
    rule = w.rule_for("ragged_dot")
    if rule is None:
        return jax.lax.ragged_dot(x, w.value, group_sizes, **params)
    own = dict(rule=rule, key=w.first_key, stats=w.stats)
    return by_rule.ragged_dot(x, w.value, group_sizes, **params, **own)


FUNCTIONS: dict[str, Any] = {
    "dot_general": by_rule.dot_general,
    "conv_general_dilated": by_rule.conv_general_dilated,
}


def _product(op_name: str, primitive: Any, operands: Any, params: dict[str, Any]) -> jax.Array:
    """A product by the rule of the weight, the second one of two."""
    are_weights = [isinstance(x, TrainedQuantized) for x in operands]
    dense = [
        x.value if is_weight else x for x, is_weight in zip(operands, are_weights, strict=True)
    ]
    weight = operands[1] if are_weights[1] else operands[0]
    rule = weight.rule_for(op_name)
    if rule is None:
        return primitive.bind(*dense, **params)
    return FUNCTIONS[op_name](
        *dense,
        **params,
        rule=rule,
        lhs_is_weight=are_weights[0],
        rhs_is_weight=are_weights[1],
        key=weight.first_key,
        stats=weight.stats,
    )


# --- rearrangements ------------------------------------------------------------------------------


REARRANGEMENTS = [
    "transpose", "reshape", "broadcast_in_dim", "squeeze", "rev", "slice", "dynamic_slice", "split",
    "neg",
]  # fmt: skip


@primitive_handler(REARRANGEMENTS)
def rearrange(primitive: Any, w: TrainedQuantized, *others: jax.Array, **params: Any) -> Any:
    """The same of the dense weight: it is still a weight for the product that follows."""
    out = on_batch_axes(primitive, w, *others, **params)
    if out is not NotImplemented:  # each matrix has keys and statistics of its own
        return out
    out = primitive.bind(w.value, *others, **params)
    return jax.tree.map(lambda part: w.with_value(part) if part.ndim >= 2 else part, out)


@primitive_handler(["mul", "div"])
def rescale(primitive: Any, w: TrainedQuantized, x: jax.Array, **params: Any) -> Any:
    """Times, or by, a number or factors along some axes, as where a weight is normalized.

    What has a number for each element may be an activation, and their product one.
    """
    return rearrange(primitive, w, x, **params) if is_factor(x, w) else NotImplemented


def is_factor(x: jax.Array, w: Any) -> bool:
    """Whether what multiplies a weight is the same along some axis of it."""
    return x.ndim == 0 or any(i < j for i, j in zip(x.shape, w.shape, strict=True))


@primitive_handler("concatenate")
def join(primitive: Any, *operands: TrainedQuantized, dimension: int) -> Any:
    """Weights side by side, as for one product with several, are one weight if one rule is for all.

    (What activations it meets is counted for no other than a single weight.)
    """
    first = operands[0]
    if dimension < first.ndim - 2:
        return NotImplemented  # each matrix has its own key
    if any(w.rules != first.rules or w.stats is not None for w in operands):
        return NotImplemented
    return first.with_value(primitive.bind(*(w.value for w in operands), dimension=dimension))


@primitive_handler("convert_element_type")
def cast(primitive: Any, w: TrainedQuantized, *, new_dtype: Any, **params: Any) -> Any:
    """To another floating dtype."""
    value = primitive.bind(w.value, new_dtype=new_dtype, **params)
    return w.with_value(value) if jnp.issubdtype(new_dtype, np.floating) else value


@primitive_handler("gather")
def look_up(primitive: Any, w: TrainedQuantized, indices: jax.Array, **params: Any) -> Any:
    """Rows of a table are no product, and come as they are; whole matrices of a batch are weights."""
    out = on_batch_axes(primitive, w, indices, **params)
    return primitive.bind(w.value, indices, **params) if out is NotImplemented else out
