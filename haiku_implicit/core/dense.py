"""`dense`: a primitive that makes its operand dense, for rules that need a field as a whole."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import interpreter
from haiku_implicit.core.array import flatten_one_level, is_implicit

dense_p = Primitive("dense")


def dense(x: Any) -> jax.Array:
    """Returns a rule's operand, or a field of it, as a dense array, without a warning.

    In a rule a field reads as a dense array even if it holds an implicit one. Operations on it are
    dispatched: `w.w + delta` would find no rule for a quantized `w.w`, and would warn. A rule that
    needs the dense array in any case says so with this function.

    Args:
      x: an operand, or a field of one. A dense array is returned unchanged.
    """
    if not is_implicit(x):
        return dense_p.bind(x)
    parts, treedef = flatten_one_level(x)
    return interpreter.materialize_array(treedef.unflatten(map(dense, parts)))


dense_p.def_impl(lambda x: x)
dense_p.def_abstract_eval(lambda x: x)
ad.deflinear2(dense_p, lambda cotangent, _: [cotangent])
batching.defvectorized(dense_p)
mlir.register_lowering(dense_p, lambda _, x: [x])


# In the trace of an outer rule, fields of the operand may stand for implicit arrays in turn.
interpreter.HIGHER_ORDER[dense_p] = lambda operands, _: list(map(dense, operands))
