"""`Repeated`: an array with repeated entries, stored once, such as keys that query heads share."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.typing import Array, DType, EqnParam, Primitive, Result
from haiku_implicit.quantized.types.quantized_cache import QuantizedCache


@dataclasses.dataclass
class Repeated(ImplicitArray, linear_in="array"):
    """An array whose entries along one axis are repeated: `jnp.repeat(array, count, axis)`.

    A model makes it when it broadcasts a `QuantizedCache` or a `MatrixView`, for example when key heads
    `[batch, heads, time, depth]` each serve `count` query heads. A product with it is a product with
    the array, which is read once. Writes and slices work on a repeated copy.

    Attributes:
      array: `[...]`, usually itself implicit.
      axis: the repeated axis, counted from the end (negative).
      count: how often each entry is repeated.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> keys = hki.QuantizedCache.quantize(jnp.ones((1, 2, 16, 64)), 'int8', axis=-1)
      >>> attend = hki.use_implicit_args(
      ...     lambda q, k: jnp.einsum('bhd,bhsd->bhs', q, jnp.repeat(k, 4, axis=1)))
      >>> attend(jnp.ones((1, 8, 64)), keys).shape
      (1, 8, 16)
    """

    array: Array
    axis: int = aux_field()
    count: int = aux_field()

    @property
    def core_ndim(self) -> int:  # type: ignore[override]
        """The larger of `-axis` and the array's `core_ndim`; axes in front are batch axes."""
        return max(-self.axis, getattr(self.array, "core_ndim", None) or 0)

    def compute_shape(self) -> tuple[int, ...]:
        shape = list(np.shape(self.array))
        shape[self.axis] *= self.count
        return tuple(shape)

    def compute_dtype(self) -> np.dtype:
        return self.array.dtype

    def materialize(self) -> jax.Array:
        return jnp.repeat(dense(self.array), self.count, axis=self.axis)


def _place(x: Repeated) -> int:
    return x.ndim + x.axis


def _copied(x: Repeated) -> Array:
    """The array with its entries repeated, by a gather, for which each type has rules."""
    ids = jnp.arange(x.shape[x.axis]) // x.count
    return jnp.take(x.array, ids, axis=_place(x), mode="clip")


# --- construction --------------------------------------------------------------------------------


@primitive_handler("broadcast_in_dim")
def repeat_cache(primitive: Primitive, w: QuantizedCache, **params: EqnParam) -> Result:
    """Broadcasts a cache: adds axes, and repeats axes of length one."""
    return _broadcast(primitive, w, **params)


@primitive_handler("broadcast_in_dim", precedence=1)
def repeat_view(primitive: Primitive, w: MatrixView, **params: EqnParam) -> Result:
    """Broadcasts a view; new axes of length one give a view of the same matrix."""
    return _broadcast(primitive, w, **params)


def _broadcast(primitive: Primitive, w: ImplicitArray, **params: EqnParam) -> Result:
    shape = params["shape"]
    old = dict(zip(params["broadcast_dimensions"], w.shape, strict=True))
    short = [old.get(i, 1) for i in range(len(shape))]
    longer = [i for i, n in enumerate(shape) if n != short[i]]
    # (A repetition along the first axis is a stack, of beams for example, which a loop may write into.)
    if 0 in (*longer, *shape) or params.get("sharding") is not None:
        return NotImplemented
    if any(export.is_symbolic_dim(n) for n in shape):
        return NotImplemented
    new = dict(new_sizes=tuple(short), dimensions=None, sharding=None)
    out = default_handler(jax.lax.reshape_p, w, **new) if tuple(short) != w.shape else w
    for i in longer:
        out = Repeated(out, i - len(shape), shape[i])
    return out


# --- products ------------------------------------------------------------------------------------


@binary_handler("dot_general")
def dot_with_repeated(call: BinaryCall, x: jax.Array, w: Repeated) -> Result:
    """Multiplies with the array: heads that share an entry together, or with a repeated result."""
    axis = _place(w)
    if axis in call.contracted[1] or call.params.get("out_sharding") is not None:
        return NotImplemented
    if axis not in call.batch[1]:
        return jnp.repeat(call(x, w.array), w.count, axis=call.in_result(x, w)[1][axis])

    # The axis of `x` that meets the repeated axis is split in two: the entries, and then the
    # repetitions, a free axis.
    at = call.batch[1].index(axis)
    cut = call.batch[0][at]
    x = x.reshape(*x.shape[:cut], -1, w.count, *x.shape[cut + 1 :])
    numbers = tuple(
        call.ordered(tuple(i + (i > cut) for i in of_x), of_w)
        for of_x, of_w in (call.contracted, call.batch)
    )
    split = dataclasses.replace(call, params=call.params | dict(dimension_numbers=numbers))
    repetitions = split.in_result(x, w.array)[0][cut + 1]
    out = jnp.moveaxis(split(x, w.array), repetitions, at + 1)
    return out.reshape(*out.shape[:at], -1, *out.shape[at + 2 :])


# --- axes ----------------------------------------------------------------------------------------


@primitive_handler("reshape")
def reshape_repeated(
    primitive: Primitive, x: Repeated, *, new_sizes: Sequence[int], **params: EqnParam
) -> Result:
    """Merges the repeated axis with axes before it, or divides it between entries; else in a copy."""
    behind = math.prod(x.shape[_place(x) + 1 :])
    for i, n in enumerate(new_sizes):
        fits = math.prod(new_sizes[i + 1 :]) == behind and n % x.count == 0
        if i and fits and not any(p is not None for p in params.values()):
            new = (*new_sizes[:i], n // x.count, *new_sizes[i + 1 :])
            return Repeated(x.array.reshape(new), i - len(new), x.count)
    return default_handler(primitive, _copied(x), new_sizes=new_sizes, **params)


@primitive_handler("transpose")
def transpose_repeated(primitive: Primitive, x: Repeated, *, permutation: Sequence[int]) -> Result:
    """Transposes the array, and finds the repeated axis."""
    array = jnp.transpose(x.array, permutation)
    return Repeated(array, tuple(permutation).index(_place(x)) - x.ndim, x.count)


@primitive_handler("squeeze")
def squeeze_repeated(primitive: Primitive, x: Repeated, *, dimensions: Sequence[int]) -> Result:
    """Drops axes of length one other than the repeated axis."""
    if _place(x) in dimensions:
        return NotImplemented
    gone_behind = sum(i > _place(x) for i in dimensions)
    return Repeated(jnp.squeeze(x.array, dimensions), x.axis + gone_behind, x.count)


@primitive_handler("convert_element_type")
def cast_repeated(
    primitive: Primitive, x: Repeated, *, new_dtype: DType, **params: EqnParam
) -> Result:
    """Casts to a wider dtype; to a narrower one in a copy, or gradients would be summed in it."""
    if not jnp.issubdtype(new_dtype, np.inexact):
        return NotImplemented
    wider = jnp.promote_types(x.dtype, new_dtype) == new_dtype
    array = x.array if wider else _copied(x)
    array = default_handler(primitive, array, new_dtype=new_dtype, **params)
    return Repeated(array, x.axis, x.count) if wider else array


@primitive_handler(["slice", "dynamic_slice", "gather", "dynamic_update_slice", "scatter"])
def change_copy(
    primitive: Primitive, x: Repeated, *others: jax.Array, **params: EqnParam
) -> Result:
    """Slices, gathers from or writes into a copy with its entries repeated."""
    return default_handler(primitive, _copied(x), *others, **params)
