"""`StaticQuantized`: a quantized weight whose products quantize activations with static scales."""

import dataclasses
from collections.abc import Collection
from typing import Any, Self

import jax
import numpy as np

from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.sharding import is_spec
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.products.activation_stats import QuantStats
from haiku_implicit.quantized.products.bilinear import Product
from haiku_implicit.quantized.products.product import config_by_activation
from haiku_implicit.quantized.products.rules import ProductConfig
from haiku_implicit.quantized.types.converted import ConvertedMatrix, check_change
from haiku_implicit.quantized.types.ruled import RuledWeight


@dataclasses.dataclass
class StaticQuantized(RuledWeight):
    """A `QuantizedMatrix` with static activation scales.

    A product quantizes the activation with a scale from calibration or training, without a pass over
    the activation to find its range; values beyond the range are clipped to it.
    `convert_trained` makes this type from trained weights and their statistics. `quantize_params` with
    a rule that has `act_static_scale` makes one without statistics, for a calibration run with
    `with_quant_stats`; `convert_trained` then puts the ranges in.

    Attributes:
      parts: the leaves of the `QuantizedMatrix`, see `weight`. Its `activation` is the format of
        activations.
      stats: a `QuantStats`: mode 'fixed', the range of activations; or without arrays, see
        `with_quant_stats`.
      kind: the tree structure of the `QuantizedMatrix`.
      batch_axes: the axes of activations that statistics are averaged over.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QuantStats
      >>> stats = QuantStats({'absmax': jnp.array([[1.0]])}, jnp.array(1.0), mode='fixed')
      >>> q = hki.QuantizedMatrix.quantize(jnp.eye(2), 'int8', activation='int8')
      >>> w = hki.StaticQuantized.of(q, stats)
      >>> print(hki.use_implicit_args(jnp.dot)(jnp.array([[2.0, 0.5]]), w).round(1))
      [[1.  0.5]]
    """

    field_axes = {"weight": "nm"}

    parts: Array = frozen_field()
    stats: Array = frozen_field()
    kind: Any = aux_field()
    batch_axes: tuple[int, ...] = aux_field(default=(0,))

    @classmethod
    def of(
        cls, weight: QuantizedMatrix, stats: QuantStats, batch_axes: Collection[int] = (0,)
    ) -> Self:
        """Makes a quantized weight with a static range for activations.

        Args:
          weight: the weight, `[..., n, m]`, with an `activation`.
          stats: the range, with the batch axes of the weight; or only the name of the parameter.
          batch_axes: the axes of activations that statistics are averaged over.

        Raises:
          TypeError: for a weight that is not a `QuantizedMatrix`.
          ValueError: for a weight without an activation; for statistics of another mode, or with other
            batch axes.
        """
        if not isinstance(weight, QuantizedMatrix):
            raise type_error(f"weight: expected a QuantizedMatrix, got {weight!r}")
        if weight.activation is None:
            raise value_error(
                "weight: expected one with an activation='int8' or the like, got None"
            )
        fixed = stats.mode == "fixed" and np.shape(stats.count) == weight.shape[:-2]
        if stats.sums is not None and not fixed:
            raise value_error(
                f"stats: expected mode='fixed' and the batch axes {list(weight.shape[:-2])}, got "
                f"mode={stats.mode!r} and {list(np.shape(stats.count))}"
            )
        parts, kind = jax.tree.flatten(weight)
        return cls(tuple(parts), stats, kind, tuple(batch_axes))

    def __reduce__(self) -> Any:
        """Pickles the stored weight, because tree structures cannot be pickled."""
        return type(self).of, (self.weight, self.stats, self.batch_axes)

    @property
    def weight(self) -> QuantizedMatrix:
        """The quantized weight, a `QuantizedMatrix`."""
        return jax.tree.unflatten(self.kind, self.parts)

    wrapped = weight  # as for other types around one array

    def with_weight(self, weight: Array) -> Array:
        """Puts a rearranged quantized matrix in this type; the first of several ranges serves all."""
        if not isinstance(weight, QuantizedMatrix):
            return weight
        parts, kind = jax.tree.flatten(weight)
        stats = self.stats.spread(weight.shape[:-2])
        return self._replace(parts=tuple(parts), kind=kind, stats=stats, dtype=None)

    def config(self, op_name: str, w_first: bool, product: Product) -> ProductConfig:
        """How the stored weight quantizes operands, but with the static range of activations."""
        if isinstance(self.weight, ConvertedMatrix):
            self.weight.check_product(product, 0 if w_first else 1)
        return config_by_activation(self.weight, w_first, product, self.batch_axes)

    def materialize(self) -> jax.Array:
        return materialize_array(self.weight)

    def before_dense(self, primitive_name: str) -> None:
        """Warns if the stored weight does."""
        self.weight.before_dense(primitive_name)

    def _replace(self, **changes: Any) -> Self:
        """Takes a `weight` as well, also one of other leaves, such as partition specs."""
        if "weight" in changes:
            changes["parts"] = tuple(jax.tree.leaves(changes.pop("weight"), is_leaf=is_spec))
        return super()._replace(**changes)


# --- rules: each may warn, like the rules of `ConvertedMatrix` ------------------------------------


@primitive_handler(["slice", "dynamic_slice", "split"], precedence=2)
def check_batch_axes(
    primitive: Primitive, w: StaticQuantized, *others: Array, **params: EqnParam
) -> Result:
    """Warns for the stored weight, which the rules of batch axes do not see."""
    weight = w.weight
    if isinstance(weight, ConvertedMatrix):
        check_change(primitive, weight, *others, **params)
    return NotImplemented


# Operations other than products that have rules. Operations without rules make the weight dense.
@primitive_handler(
    ["abs", "square", "integer_pow", "reduce_sum", "reduce_max", "reduce_min"], precedence=1
)
def check_alone(
    primitive: Primitive, w: ConvertedMatrix | StaticQuantized, **params: EqnParam
) -> Result:
    """Warns of an operation on the weight by itself, for which training has the dense weight."""
    w.before_dense(primitive.name)
    return NotImplemented


@binary_handler(["add", "sub", "max", "min", "pow"], precedence=1)
def check_with_dense(
    call: BinaryCall, x: jax.Array, w: ConvertedMatrix | StaticQuantized
) -> Result:
    """Warns of a sum, extremum or power with a dense array: training quantizes the result."""
    w.before_dense(call.primitive.name)
    return NotImplemented
