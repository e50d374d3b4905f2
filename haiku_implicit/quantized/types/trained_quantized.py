"""`TrainedQuantized`: a dense weight in quantized training, which each product quantizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.quantized.products import by_rule
from haiku_implicit.quantized.products.bilinear import Product
from haiku_implicit.quantized.products.rules import ProductConfig, QuantRule
from haiku_implicit.quantized.types.ruled import RuledWeight, rescale


@dataclasses.dataclass
class TrainedQuantized(RuledWeight):
    """A dense weight that is trained while its products are quantized.

    Each product quantizes the weight, the other operand, and in the backward pass the gradient, by the
    rules. Operations that rearrange (transpose, slice, split, reshape), cast, scale or shift the weight
    give a `TrainedQuantized`, for the product that follows. Everything else sees the dense weight.
    `quantized_training` puts this type into a tree of parameters.

    Attributes:
      value: `[..., n, m]`, the weight, which is trained.
      key: random keys `[...]` for stochastic rounding, or None; see `with_rounding_key`.
      stats: statistics of the activation, a `QuantStats` (without arrays outside of a call, see
        `with_quant_stats`); None if no rule has static scales.
      rules: the rules for the weight's module, in order: the first rule for the operation decides.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.quantization import QtRule
      >>> rule = QtRule(weight_qtype='int2', act_qtype='int8', bwd_qtype='int8')
      >>> w = hki.TrainedQuantized(jnp.array([[1.0], [0.1]]), rules=(rule,))
      >>> print(hki.use_implicit_args(jnp.dot)(jnp.ones((1, 2)), w))  # 0.1 is rounded to 0
      [[0.66405237]]
    """

    field_axes = {}

    value: Array
    key: Array = frozen_field(default=None)
    stats: Array = frozen_field(default=None)
    rules: tuple[QuantRule, ...] = aux_field(default=())

    def with_weight(self, weight: jax.Array) -> Array:
        """Puts a rearranged weight in this type; with fewer than two axes, or of integers, it is dense.

        New keys are split from the first key; the first statistics serve all matrices.
        """
        if weight.ndim < 2 or not jnp.issubdtype(weight.dtype, np.floating):
            return weight
        key, stats, batch = self.key, self.stats, weight.shape[:-2]
        if key is not None and np.shape(key) != batch:
            key = jax.random.split(self.first_key, batch)
        stats = None if stats is None else stats.spread(batch)
        return self._replace(value=weight, key=key, stats=stats)

    def config(self, op_name: str, w_first: bool, product: Product) -> ProductConfig | None:
        """How the rule quantizes operands; see `rule_for`."""
        rule = self.rule_for(op_name)
        return None if rule is None else rule.config(w_first, not w_first)

    def rule_for(self, op_name: str) -> QuantRule | None:
        """The first rule for an operation; None if it leaves products dense."""
        rule = next((rule for rule in self.rules if rule.is_for(op_name)), None)
        return None if rule is None or rule.weight_qtype is None else rule

    @property
    def first_key(self) -> Array:
        """One random key for a product of the weight; None without keys."""
        return None if self.key is None else self.key.reshape(-1)[0]


@primitive_handler("dot_general")
def dot_of_two_trained(
    primitive: Primitive, v: TrainedQuantized, w: TrainedQuantized, **params: EqnParam
) -> jax.Array:
    """Multiplies two weights by the rule of the second one."""
    rule = w.rule_for("dot_general")
    if rule is None:
        return primitive.bind(v.value, w.value, **params)
    both: Any = dict(rule=rule, key=w.first_key, stats=w.stats, lhs_is_weight=True)
    return by_rule.dot_general(v.value, w.value, **params, **both)


@primitive_handler(["add", "sub"])
def shift(primitive: Primitive, w: TrainedQuantized, x: jax.Array, **params: EqnParam) -> Result:
    """Shifts by a number, or one per row or column, as in weight standardization."""
    return rescale(primitive, w, x, **params)


@primitive_handler("concatenate")
def join(primitive: Primitive, *operands: TrainedQuantized, dimension: int) -> Result:
    """Concatenates weights (for one product with several) to one weight if their rules agree.

    Statistics of activations belong to a single weight, so weights with statistics do not join.
    """
    first = operands[0]
    if dimension < first.ndim - 2:
        return NotImplemented  # each matrix has its own key
    if any(w.rules != first.rules or w.stats is not None for w in operands):
        return NotImplemented
    return first.with_weight(primitive.bind(*(w.value for w in operands), dimension=dimension))
