"""A primitive that asks for a dense operand, for a rule that needs a field of its operand whole."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import interpreter

dense_p = Primitive("dense")


def dense(x: Any) -> jax.Array:
    """A field of a rule's operand, dense: without a warning, because the rule cannot do with less.

    In a rule a field reads as a dense array even where it holds an implicit one, and what the rule
    does to it is dispatched: `w.w + delta` would find no rule for a quantized `w.w`, and warn.

    Args:
      x: a dense array (which is returned), or what stands for an implicit one in a rule.
    """
    return dense_p.bind(x)


dense_p.def_impl(lambda x: x)
dense_p.def_abstract_eval(lambda x: x)
ad.deflinear2(dense_p, lambda cotangent, _: [cotangent])
batching.defvectorized(dense_p)
mlir.register_lowering(dense_p, lambda _, x: [x])


def _materialize(operands: list[Any], _: dict[str, Any]) -> list[Any]:
    return [interpreter.materialize_array(x) for x in operands]


interpreter.HIGHER_ORDER[dense_p] = _materialize
