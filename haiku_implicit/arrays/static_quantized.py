"""`StaticQuantized`: a stored weight, multiplied with activations in codes of a static scale."""

import dataclasses
import functools
from typing import Any, Self

import jax
import numpy as np

from haiku_implicit.arrays.batch_axes import on_batch_axes
from haiku_implicit.arrays.trained import (
    FUNCTIONS,
    RAGGED_DOT,
    REARRANGEMENTS,
    deciding_rule,
    is_factor,
    ragged_dot_general_p,
)
from haiku_implicit.core.array import ImplicitArray, aux_field, frozen_field, is_implicit
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products import by_rule
from haiku_implicit.products.activation_stats import QuantStats
from haiku_implicit.products.quant_rules import QuantRule


@dataclasses.dataclass
class StaticQuantized(ImplicitArray, core_ndim=2):
    """A `QuantizedMatrix` with static activation scales.

    A product quantizes the activation with the scale that was found in calibration or training, which
    takes no pass over the activation to find a range; what lies beyond the range gets the last code.
    `convert_trained` makes it of trained weights and their statistics. `quantize_params` with a rule
    that has `act_static_scale` makes one without statistics, for a calibration run with
    `with_quant_stats`; `convert_trained` then puts the ranges in.

    Attributes:
      parts: the leaves of the `QuantizedMatrix`, see `weight`.
      stats: a `QuantStats`: mode 'fixed', the range of activations; or without arrays, see
        `with_quant_stats`.
      kind: the tree structure of the `QuantizedMatrix`.
      rules: as in `TrainedQuantized`; formats of weights are not read.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule, QuantStats
      >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
      >>> stats = QuantStats({'absmax': jnp.array([[1.0]])}, jnp.array(1.0), mode='fixed')
      >>> q = hki.QuantizedMatrix.quantize(jnp.eye(2), 'int8')
      >>> w = hki.StaticQuantized.of(q, stats, (rule,))
      >>> print(hki.use_implicit_args(jnp.dot)(jnp.array([[2.0, 0.5]]), w).round(1))
      [[1.  0.5]]
    """

    parts: Any = frozen_field()
    stats: Any = frozen_field()
    kind: Any = aux_field()
    rules: tuple[QuantRule, ...] = aux_field()

    @classmethod
    def of(cls, weight: QuantizedMatrix, stats: QuantStats, rules: tuple[QuantRule, ...]) -> Self:
        """A stored weight with a static range for activations.

        Args:
          weight: the weight, `[..., n, m]`.
          stats: the range, with the batch axes of the weight; or a name alone, that of the parameter.
          rules: for its products.

        Raises:
          TypeError: for a weight of another type.
          ValueError: for statistics of another mode, or with other batch axes.
        """
        if not isinstance(weight, QuantizedMatrix):
            raise TypeError(f"weight: expected a QuantizedMatrix, got {weight!r}")
        fixed = stats.mode == "fixed" and np.shape(stats.count) == weight.shape[:-2]
        if stats.sums is not None and not fixed:
            raise ValueError(
                f"stats: expected mode='fixed' and the batch axes {list(weight.shape[:-2])}, got "
                f"mode={stats.mode!r} and {list(np.shape(stats.count))}"
            )
        parts, kind = jax.tree.flatten(weight)
        return cls(tuple(parts), stats, kind, rules)

    def __reduce__(self) -> Any:
        """Tree structures cannot be pickled, the stored weight can."""
        return type(self).of, (self.weight, self.stats, self.rules)

    @property
    def weight(self) -> QuantizedMatrix:
        """The stored weight."""
        weight: QuantizedMatrix = jax.tree.unflatten(self.kind, self.parts)
        return weight

    def compute_shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def compute_dtype(self) -> Any:
        return self.weight.dtype

    def materialize(self) -> jax.Array:
        return materialize_array(self.weight)

    def partition_spec(self, spec: Any, mesh: Any) -> Any:
        """As the stored weight; ranges are along its batch axes."""
        own = self.weight.partition_spec(spec, mesh)
        if own is NotImplemented:
            return NotImplemented
        batch = jax.sharding.PartitionSpec(*tuple(spec)[: self.ndim - 2])
        stats = jax.tree.map(lambda _: batch, self.stats)
        return self._replace(parts=tuple(jax.tree.leaves(own)), stats=stats)


# --- products ------------------------------------------------------------------------------------


@primitive_handler("dot_general")
def dot_with_static(primitive: Any, x: jax.Array, w: StaticQuantized, **params: Any) -> Any:
    """See `quantization.dot_general`."""
    return _product("dot_general", primitive, (x, w), params)


@primitive_handler("dot_general")
def dot_of_static(primitive: Any, w: StaticQuantized, x: jax.Array, **params: Any) -> Any:
    """The same with the weight first."""
    return _product("dot_general", primitive, (w, x), params)


@primitive_handler("conv_general_dilated")
def convolve_with_static(primitive: Any, x: jax.Array, w: StaticQuantized, **params: Any) -> Any:
    """See `quantization.conv_general_dilated`."""
    return _product("conv_general_dilated", primitive, (x, w), params)


@primitive_handler(ragged_dot_general_p)
def ragged_dot_with_static(
    primitive: Any,
    x: jax.Array,
    w: StaticQuantized,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: Any,
    out_sharding: Any = None,
    **params: Any,
) -> Any:
    """See `quantization.ragged_dot`."""
    rule = deciding_rule(w.rules, "ragged_dot")
    if rule is None or ragged_dot_dimension_numbers != RAGGED_DOT or out_sharding is not None:
        return NotImplemented
    own = dict(rule=rule, stats=w.stats)
    return by_rule.ragged_dot(x, w.weight, group_sizes, **params, **own)


def _product(op_name: str, primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    """A product by the rule of the weight; dequantized where that leaves it dense."""
    first = isinstance(operands[0], StaticQuantized)
    w = operands[0] if first else operands[1]
    pair = [x.weight if x is w else x for x in operands]
    rule = deciding_rule(w.rules, op_name)
    if rule is None:
        return use_implicit_args(functools.partial(primitive.bind, **params))(*pair)
    of_weights = dict(lhs_is_weight=first, rhs_is_weight=not first)
    return FUNCTIONS[op_name](*pair, **params, rule=rule, stats=w.stats, **of_weights)


# --- rearrangements ------------------------------------------------------------------------------


@primitive_handler([*REARRANGEMENTS, "gather"])
def rearrange(primitive: Any, w: StaticQuantized, *others: jax.Array, **params: Any) -> Any:
    """What stays a stored matrix keeps the range; the first of them is that of all."""
    out = on_batch_axes(primitive, w, *others, **params)
    return _of_weight(primitive, w, *others, **params) if out is NotImplemented else out


@primitive_handler(["mul", "div"])
def rescale(primitive: Any, w: StaticQuantized, x: jax.Array, **params: Any) -> Any:
    """As of a `TrainedQuantized` weight."""
    return _of_weight(primitive, w, x, **params) if is_factor(x, w) else NotImplemented


@primitive_handler("convert_element_type")
def cast(primitive: Any, w: StaticQuantized, **params: Any) -> Any:
    """To another floating dtype: that of the stored weight."""
    return _of_weight(primitive, w, **params)


def _of_weight(primitive: Any, w: StaticQuantized, *others: jax.Array, **params: Any) -> Any:
    def kept(out: Any) -> Any:
        if not isinstance(out, QuantizedMatrix):
            return out
        parts, kind = jax.tree.flatten(out)
        stats = w.stats.spread(out.shape[:-2])
        return w._replace(parts=tuple(parts), kind=kind, stats=stats, dtype=None)

    out = use_implicit_args(functools.partial(primitive.bind, **params))(w.weight, *others)
    return jax.tree.map(kept, out, is_leaf=is_implicit)
