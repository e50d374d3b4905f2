"""`jnp.einsum` with a rule for quantization.

`jnp.einsum` chooses the order of its products, and rearranges operands before them. So it runs
unchanged, on operands of an implicit type whose products are `by_rule.dot_general`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.keys import as_key
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Array, DType, EqnParam, Precision, Primitive
from haiku_implicit.quantized.products import by_rule
from haiku_implicit.quantized.products.rules import QuantRule


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
        raise ValueError(
            f"weights: expected positions among {len(operands)} operands, got {weights!r}"
        )
    positions = {i % len(operands) for i in chosen}
    key = None if key is None else as_key(key)
    options: dict[str, Any] = dict(preferred_element_type=preferred_element_type)
    options |= {} if precision is None else dict(precision=precision)
    options |= {} if out_sharding is None else dict(out_sharding=out_sharding)

    @use_implicit_args
    def run(*operands: Array) -> Any:
        return jnp.einsum(subscripts, *operands, **options)

    out: Array = run(
        *(_Operand(jnp.asarray(x), rule, i, i in positions, key) for i, x in enumerate(operands))
    )
    return out.value


@dataclasses.dataclass
class _Operand(ImplicitArray):
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

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def compute_dtype(self) -> np.dtype:
        return self.value.dtype

    def materialize(self) -> NoReturn:
        """Raises, because a product of the dense array would not be quantized."""
        raise NotImplementedError(
            "quantization.einsum: this version of JAX computes einsums with a primitive that it does "
            "not know; multiply with quantization.dot_general"
        )


@primitive_handler("dot_general")
def _multiply(primitive: Any, lhs: _Operand, rhs: _Operand, **params: EqnParam) -> _Operand:
    # Each product uses up one first position, whose number makes its key different from all others.
    first, number = sorted((lhs.first, rhs.first))
    key = lhs.key if lhs.key is None or number == 1 else jax.random.fold_in(lhs.key, number - 1)
    own: Any = dict(lhs_is_weight=lhs.is_weight, rhs_is_weight=rhs.is_weight)
    out = by_rule.dot_general(lhs.value, rhs.value, **params, **own, rule=lhs.rule, key=key)
    return _Operand(out, lhs.rule, first, is_weight=False, key=lhs.key)


@primitive_handler(
    ["transpose", "squeeze", "reduce_sum", "reduce_or", "convert_element_type", "copy"]
)
def _rearrange(primitive: Primitive, x: _Operand, **params: EqnParam) -> _Operand:
    """Rearranges an operand: a transposed weight is still a weight."""
    return x._replace(value=primitive.bind(x.value, **params))


@primitive_handler("select_n")
def _mask(primitive: Primitive, mask: jax.Array, zeros: jax.Array, x: _Operand) -> _Operand:
    """Takes the diagonal of an operand that has an index twice."""
    return x._replace(value=primitive.bind(mask, zeros, x.value))
