"""`box` makes an implicit array in traced code, `dense` a dense array in a rule: two primitives."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import interpreter
from haiku_implicit.core.array import flatten_one_level, is_implicit
from haiku_implicit.core.custom_derivatives import derivative
from haiku_implicit.core.sharding import mapped_first
from haiku_implicit.core.typing import Array, Aval, TreeDef

box_p = Primitive("box")


def box(x: Array) -> jax.Array:
    """Turns an implicit array that was made inside a function into a value that JAX can trace.

    Under `use_implicit_args` or `transform_implicit`, the value stands for the implicit array, which
    may become a parameter, a state entry, or an operand. Elsewhere (in eager code and under `jit`,
    `grad` and `vmap`) the value is the dense array. Haiku creators and getters use this function.

    Args:
      x: an implicit array; a dense one is returned unchanged.

    Returns:
      An array of the dense shape and dtype.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> f = lambda w, a, b: hki.box(hki.LoRA(w, a, b))
      >>> args = jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3))
      >>> print(f(*args))
      [[2. 2. 2.]
       [2. 2. 2.]]
      >>> hki.use_implicit_args(f)(*args)
      LoRA(float32[2,3], w=float32[2,3], a=float32[2,1], b=float32[1,3])
    """
    if not is_implicit(x):
        return x
    leaves, treedef = jax.tree_util.tree_flatten(x)
    return box_p.bind(*leaves, treedef=treedef)


def _materialize(*leaves: Array, treedef: TreeDef) -> jax.Array:
    return interpreter.materialize_array(treedef.unflatten(leaves))


def _abstract(*leaves: Aval, treedef: TreeDef) -> jax.core.ShapedArray:
    return treedef.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]).aval


def _jvp(primals: Sequence[Array], tangents: Sequence[Array], *, treedef: TreeDef) -> Any:
    # The primal stays boxed, for an interpreter that runs the differentiated code.
    _, dots = derivative(lambda leaves: [_materialize(*leaves, treedef=treedef)], primals, tangents)
    return box_p.bind(*primals, treedef=treedef), *dots


def _batch(leaves: Sequence[Array], axes: Any, *, treedef: TreeDef) -> Any:
    stacked = mapped_first(leaves, axes)
    boxed = treedef.unflatten(stacked).with_leading_axis(len(stacked[0]))
    if boxed is NotImplemented:
        return jax.vmap(lambda *xs: _materialize(*xs, treedef=treedef))(*stacked), 0
    return box(boxed), 0


box_p.def_impl(_materialize)
box_p.def_abstract_eval(_abstract)
ad.primitive_jvps[box_p] = _jvp
batching.primitive_batchers[box_p] = _batch
mlir.register_lowering(box_p, mlir.lower_fun(_materialize, multiple_results=False))
interpreter.BOXES.add(box_p)


interpreter.HIGHER_ORDER[box_p] = lambda operands, params: [params["treedef"].unflatten(operands)]


# --- dense arrays in rules ------------------------------------------------------------------------

dense_p = Primitive("dense")


def dense(x: Array) -> jax.Array:
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
