"""Rules for every implicit type: operations that keep a tensor's value, and those declared linear."""

import jax
import jax.numpy as jnp

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, dense_struct, flatten, flatten_one_level
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import named, primitive_handler
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.typing import Array, DType, EqnParam, Primitive, Result


@primitive_handler(compat.IDENTITIES)
def identity(primitive: Primitive, x: ImplicitArray, **params: EqnParam) -> Result:
    """Applies `copy`, `stop_gradient`, `checkpoint_name`, ... leaf by leaf."""
    out = jax.tree.map(lambda leaf: compat.bind(primitive, [leaf], params)[0], x)
    return [out] if primitive.multiple_results else out


@primitive_handler("optimization_barrier")
def optimization_barrier(primitive: Primitive, *operands: Array) -> list[Array]:
    """Puts one barrier over the leaves of all operands."""
    leaves, treedef = flatten(list(operands))
    return treedef.unflatten(primitive.bind(*leaves))


@primitive_handler(named("broadcast_in_dim tile"), precedence=1)
def repeat_vector(primitive: Primitive, x: ImplicitArray, **params: EqnParam) -> Result:
    """Makes a repeated row or column (such as a bias) dense: the result is larger."""
    out = jax.eval_shape(lambda y: primitive.bind(y, **params), dense_struct(x))
    lengths, repeated = ([n for n in y.shape if n != 1] for y in (x, out))
    if not x.core_ndim or len(lengths) > 1 or repeated == lengths:
        return NotImplemented
    return primitive.bind(dense(x), **params)


# --- types that are `linear_in` some fields ------------------------------------------------------


@primitive_handler("neg")
def apply_to_linear_fields(
    primitive: Primitive, x: ImplicitArray, *others: Array, **params: EqnParam
) -> Result:
    """Applies a linear primitive, such as a negation, to the fields that the array is linear in."""
    if x.linear_in is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return NotImplemented
    new = {}
    for name in x.linear_in:
        field = getattr(x, name)
        own = (y.astype(field.dtype) for y in others)
        new[name] = default_handler(primitive, field, *own, **params)
    return x._replace(**new)


@binary_handler("mul")
def multiply_by_number(call: BinaryCall, number: jax.Array, x: ImplicitArray) -> Result:
    """Multiplies the linear fields by a number."""
    if number.ndim:
        return NotImplemented
    return apply_to_linear_fields(call.primitive, x, number, **call.params)


@primitive_handler("div")
def divide_by_number(
    primitive: Primitive, x: ImplicitArray, number: jax.Array, **params: EqnParam
) -> Result:
    """Divides the linear fields by a number."""
    return NotImplemented if number.ndim else apply_to_linear_fields(primitive, x, number, **params)


@primitive_handler("convert_element_type")
def cast(primitive: Primitive, x: ImplicitArray, *, new_dtype: DType, **params: EqnParam) -> Result:
    """Casts the fields that have the tensor's dtype, so that the tensor has the new one."""
    both = (x.dtype, new_dtype)
    if x.linear_in is None or not all(jnp.issubdtype(d, jnp.floating) for d in both):
        return NotImplemented

    def of_field(y: Array) -> Array:
        same = getattr(y, "dtype", None) == x.dtype
        return default_handler(primitive, y, new_dtype=new_dtype, **params) if same else y

    parts, treedef = flatten_one_level(x)
    out = treedef.unflatten(map(of_field, parts))
    if out.__dict__.get("_dtype") is not None:
        out = out._replace(dtype=new_dtype)
    return out if out.dtype == new_dtype else NotImplemented
