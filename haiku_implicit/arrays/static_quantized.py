"""`StaticQuantized`: a quantized weight whose products quantize activations with static scales."""

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from haiku_implicit.arrays.ruled import RuledWeight
from haiku_implicit.core.array import aux_field, frozen_field
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products.activation_stats import QuantStats
from haiku_implicit.products.quant_rules import QuantRule


@dataclasses.dataclass
class StaticQuantized(RuledWeight):
    """A `QuantizedMatrix` with static activation scales.

    A product quantizes the activation with a scale that was found in calibration or training, so that
    no pass over the activation is needed to find its range; values beyond the range are clipped to it.
    `convert_trained` makes this type from trained weights and their statistics. `quantize_params` with
    a rule that has `act_static_scale` makes one without statistics, for a calibration run with
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
        return jax.tree.unflatten(self.kind, self.parts)

    @property
    def wrapped(self) -> QuantizedMatrix:
        """The stored weight."""
        return self.weight

    def with_weight(self, weight: Any) -> Any:
        """What stays a stored matrix keeps the range; the first of several ranges is that of all."""
        if not isinstance(weight, QuantizedMatrix):
            return weight
        parts, kind = jax.tree.flatten(weight)
        stats = self.stats.spread(weight.shape[:-2])
        return self._replace(parts=tuple(parts), kind=kind, stats=stats, dtype=None)

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
