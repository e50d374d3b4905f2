"""A primitive that asks for a dense operand, for rules that need a whole field of their operand."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import interpreter

dense_p = Primitive("dense")


def dense(x: Any) -> jax.Array:
    """A field of a rule's operand as a dense array, without a warning.

    In a rule a field reads as a dense array even if it holds an implicit one. Operations on it are
    dispatched: `w.w + delta` would find no rule for a quantized `w.w`, and would warn. A rule that
    needs the dense array in any case says so with this function.

    Args:
      x: a field of an operand. A dense array is returned as it is.
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
