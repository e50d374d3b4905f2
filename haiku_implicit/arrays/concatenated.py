"""`Concatenated`: weights of any types side by side, which keep their types."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.core.array import ArrayValue, ImplicitArray, is_implicit
from haiku_implicit.core.binary import BinaryCall, binary_handler, fits
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import named, primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.interpreter import call_interpreted
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.sharding import is_split
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result

# Weights concatenated with dense arrays are kept if they are at least this part of the whole. (A bias
# that is put in front of activations is not worth it.)
_LEAST_PART = 1 / 4


@dataclasses.dataclass
class Concatenated(ImplicitArray):
    """Arrays side by side, the result of `jnp.concatenate` and `jnp.stack` of weights.

    A product with it is one product per part. The results are concatenated, or summed if the products
    contract the axis along which the parts are concatenated. So LoRA and quantized weights that a
    model concatenates for one product (in a gated unit, for example) keep their types. Rules make this
    type; users need not.

    Attributes:
      parts: a tuple of arrays of one dtype, dense or implicit, that differ in the length of one axis.
      axis: this axis, from the end (negative).

    Raises:
      ValueError: if the parts do not fit together.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.ones((4, 3)), jnp.ones((4, 1)), jnp.ones((1, 3)))
      >>> both = hki.use_implicit_args(lambda v, w: jnp.concatenate([v, w], -1))(w, jnp.ones((4, 2)))
      >>> type(both).__name__, both.shape, hki.materialize(both)[0].tolist()
      ('Concatenated', (4, 5), [2.0, 2.0, 2.0, 1.0, 1.0])
    """

    parts: Array
    axis: int = aux_field()

    def __post_init__(self) -> None:
        shapes = [list(np.shape(x)) for x in self.parts]
        # Dtypes, and shapes without the axis of concatenation.
        kinds = {
            (np.dtype(x.dtype), len(shape), *shape[: self.axis], *shape[self.axis :][1:])
            for x, shape in zip(self.parts, shapes, strict=True)
        }
        if len(kinds) != 1 or -self.axis > len(shapes[0]):
            found = ", ".join(
                f"{x.dtype.name}{shape}" for x, shape in zip(self.parts, shapes, strict=True)
            )
            raise value_error(
                "Concatenated: expected parts of one dtype whose shapes differ in axis "
                f"{self.axis} alone, got {found}"
            )
        super().__post_init__()

    @property
    def core_ndim(self) -> int:  # type: ignore[override]
        """The larger of `-axis` and the largest `core_ndim` of the parts."""
        cores = (x.core_ndim for x in self.parts if is_implicit(x))
        return max([-self.axis, *(0 if n is None else n for n in cores)])

    def compute_shape(self) -> tuple[int, ...]:
        shape = list(np.shape(self.parts[0]))
        shape[self.axis] = sum(self.sizes)
        return tuple(shape)

    def compute_dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def materialize(self) -> jax.Array:
        return jnp.concatenate([dense(x) for x in self.parts], self.axis)

    @property
    def sizes(self) -> list[int]:
        """The length of each part along the axis of concatenation."""
        return [np.shape(x)[self.axis] for x in self.parts]

    @property
    def place(self) -> int:
        """The axis of concatenation, counted from the front."""
        return self.ndim + self.axis

    def of_each(self, fun: Callable[..., Any], *others: Array, axis: int | None = None) -> Array:
        """Concatenates the results of a function of each part.

        Args:
          fun: called with each part and its values in `others`.
          others: sequences with one value per part.
          axis: the new axis of concatenation, from the end; None: `self.axis`.
        """
        new = tuple(map(fun, self.parts, *others))
        return Concatenated(new, self.axis if axis is None else axis)

    def split(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """Splits an array along an axis into pieces of the lengths of the parts."""
        return jnp.split(x, np.cumsum(self.sizes)[:-1].tolist(), axis)


# --- construction ----------------------------------------------------------------------------------


@primitive_handler("concatenate", precedence=-1)
def concatenate(primitive: Primitive, *operands: ArrayValue, dimension: int) -> Result:
    """Concatenates matrices, perhaps with dense arrays, if their types do not have a rule for it."""
    weights = [x for x in operands if is_implicit(x)]
    if not all(map(_is_weight, weights)):
        return NotImplemented
    if sum(x.size for x in weights) < _LEAST_PART * sum(math.prod(x.shape) for x in operands):
        return NotImplemented
    axis = dimension - operands[0].ndim
    parts: list[Any] = []
    for x in operands:
        parts += x.parts if isinstance(x, Concatenated) and x.axis == axis else [x]
    return Concatenated(tuple(parts), axis)


def _is_weight(x: Array) -> bool:
    """Whether an implicit array is a matrix of some type."""
    return x.may_be_wrapped and (x.core_ndim or 0) >= 2


@primitive_handler(named("stack"), precedence=-1)
def stack(primitive: Primitive, *operands: ArrayValue, axis: int) -> Result:
    """Stacks matrices, perhaps with dense arrays, along a new axis."""
    if not all(_is_weight(x) for x in operands if is_implicit(x)):
        return NotImplemented

    def side_by_side(*xs: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.expand_dims(x, axis) for x in xs], axis)

    return call_interpreted(side_by_side, operands)


# --- products ------------------------------------------------------------------------------------


@binary_handler("dot_general")
def dot_with_parts(call: BinaryCall, x: jax.Array, w: Concatenated) -> Result:
    """Computes a product with each part and joins the results."""
    contracted, batch = call.contracted, call.batch
    met = dict(zip((*contracted[1], *batch[1]), (*contracted[0], *batch[0]), strict=True))
    if call.params.get("out_sharding") is not None or is_split([x, w]):
        return NotImplemented  # JAX cannot split a sharded axis into uneven parts
    xs = w.split(x, met[w.place]) if w.place in met else [x] * len(w.parts)
    if w.place in contracted[1]:
        return _summed(call, xs, w)
    outs = [call(*pair) for pair in zip(xs, w.parts, strict=True)]
    return jnp.concatenate(outs, call.in_result(x, w)[1][w.place])


def _summed(call: BinaryCall, xs: Sequence[jax.Array], w: Concatenated) -> Result:
    """The sum of the products with the parts, which are not rounded before they are added."""
    dtype = call.params.get("preferred_element_type")
    if dtype is None:
        dtype = jnp.result_type(xs[0].dtype, w.dtype)
    params = call.params
    if jnp.issubdtype(dtype, np.inexact) and np.dtype(dtype).itemsize < 4:
        algorithm = jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
        if isinstance(params.get("precision"), algorithm):
            return NotImplemented  # it says how to accumulate, too
        params = params | dict(preferred_element_type=np.dtype(np.float32))
    wide = dataclasses.replace(call, params=params)
    outs = [wide(*pair) for pair in zip(xs, w.parts, strict=True)]
    return sum(outs[1:], outs[0]).astype(dtype)


# --- axes ----------------------------------------------------------------------------------------


@primitive_handler("transpose")
def transpose_parts(
    primitive: Primitive, w: Concatenated, *, permutation: tuple[int, ...]
) -> Result:
    """Transposes each part, and the axis of concatenation."""
    axis = permutation.index(w.place) - w.ndim
    return w.of_each(lambda x: jnp.transpose(x, permutation), axis=axis)


@primitive_handler(["reshape", "squeeze", "broadcast_in_dim"])
def reshape_parts(primitive: Primitive, w: Concatenated, **params: EqnParam) -> Result:
    """Reshapes each part if the new axes cut none: the axis is split between parts, or merged with
    the axes after it."""
    new = axes_of.new_shape(w.shape, params)
    if new is None or 0 in w.shape:
        return NotImplemented
    before = [math.prod(new[:i]) for i in range(len(new))]
    front, behind = math.prod(w.shape[: w.place]), math.prod(w.shape[w.place + 1 :])
    # The new axis at which the axis begins. New axes of length one go in front.
    starts = [i for i, n in enumerate(before) if n == front and (new[i] > 1 or i == len(new) - 1)]
    if not starts:
        return NotImplemented
    place = starts[0]
    rest = math.prod(new[place + 1 :])
    if any(size * behind % rest for size in w.sizes):
        return NotImplemented

    def reshape(x: jax.Array, size: int) -> jax.Array:
        return x.reshape(*new[:place], size * behind // rest, *new[place + 1 :])

    return w.of_each(reshape, w.sizes, axis=place - len(new))


# --- parts ---------------------------------------------------------------------------------------


@primitive_handler("slice")
def slice_parts(primitive: Primitive, w: Concatenated, **params: EqnParam) -> Result:
    """Slices each part that the slice overlaps."""
    strides = params["strides"]
    if strides is not None and strides[w.place] != 1:
        return NotImplemented
    return _between(w, params["start_indices"], params["limit_indices"], strides)


@primitive_handler("split")
def split_parts(
    primitive: Primitive, w: Concatenated, *, sizes: tuple[int, ...], axis: int
) -> Result:
    """Splits the array into pieces, each made of the parts that it overlaps."""
    out = [_between(w, *corners, None) for corners in axes_of.pieces(w.shape, axis, sizes)]
    return NotImplemented if any(x is NotImplemented for x in out) else out


def _between(
    w: Concatenated, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int] | None
) -> Result:
    start, limit = starts[w.place], limits[w.place]
    ends = itertools.accumulate(w.sizes)
    found = []
    for x, end, size in zip(w.parts, ends, w.sizes, strict=True):
        low, high = max(start - end + size, 0), min(limit - end + size, size)
        if low < high:
            own_starts, own_limits = list(starts), list(limits)
            own_starts[w.place], own_limits[w.place] = low, high
            whole = strides is None and not any(own_starts) and tuple(own_limits) == x.shape
            found.append(x if whole else jax.lax.slice(x, own_starts, own_limits, strides))
    if len(found) < 2:
        return found[0] if found else NotImplemented
    return Concatenated(tuple(found), w.axis)


@primitive_handler("dynamic_slice")
def dynamic_slice_parts(
    primitive: Primitive, w: Concatenated, *starts: jax.Array, slice_sizes: tuple[int, ...]
) -> Result:
    """Slices each part, if the slice takes the axis of concatenation whole."""
    if slice_sizes[w.place] != w.shape[w.place]:
        return NotImplemented

    def cut(x: jax.Array, size: int) -> jax.Array:
        at = [jnp.zeros_like(s) if i == w.place else s for i, s in enumerate(starts)]
        sizes = [size if i == w.place else n for i, n in enumerate(slice_sizes)]
        return jax.lax.dynamic_slice(x, at, sizes)

    return w.of_each(cut, w.sizes)


@primitive_handler("gather")
def gather_from_parts(
    primitive: Primitive, w: Concatenated, ids: jax.Array, **params: EqnParam
) -> Result:
    """Gathers whole rows, as an embedding does: of all parts, or of the one that has the row."""
    if not axes_of.takes_whole_rows(w, ids, params) or not jnp.issubdtype(w.dtype, jnp.inexact):
        return NotImplemented
    if ids.dtype.itemsize < 4:  # which may not hold where parts start
        ids = ids.astype(jnp.int32)
    # Each part takes the nearest row that it has.
    own = params | dict(mode=jax.lax.GatherScatterMode.CLIP, unique_indices=False)

    def take(x: Array, ids: jax.Array) -> jax.Array:
        return dense(primitive.bind(x, ids, **own | dict(slice_sizes=(1, x.shape[1]))))

    if w.axis == -1:
        rows = jnp.concatenate([take(x, ids) for x in w.parts], -1)
    else:
        starts = np.cumsum([0, *w.sizes[:-1]], dtype=ids.dtype)
        rows = take(w.parts[0], ids)
        for x, start in zip(w.parts[1:], starts[1:], strict=True):
            rows = jnp.where(ids >= start, take(x, ids - start), rows)
    return axes_of.filled_outside(rows, w, ids, params)


# --- elementwise ---------------------------------------------------------------------------------


@primitive_handler(["convert_element_type", "neg"])
def apply_to_parts(primitive: Primitive, w: Concatenated, **params: EqnParam) -> Result:
    """Casts or negates each part."""
    return w.of_each(lambda x: primitive.bind(x, **params))


@binary_handler(["mul", "div", "add", "sub"])
def apply_with_dense(call: BinaryCall, x: jax.Array, w: Concatenated) -> Result:
    """Combines each part with its piece of a dense operand that does not enlarge the result."""
    if call.primitive is jax.lax.div_p and call.w_first is False:
        return NotImplemented
    if not fits(x, w):
        return NotImplemented
    differs = x.ndim and x.shape[w.place] > 1
    xs = w.split(x, w.place) if differs else [x] * len(w.parts)
    return w.of_each(lambda part, x: call(x, part), xs)
