"""`MatrixView`: a tensor of any axes that is stored as a matrix of any type."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.arrays.axes import Axes
from haiku_implicit.core.array import ImplicitArray, has_equivalent, is_implicit
from haiku_implicit.core.batch_axes import with_renamed_axes
from haiku_implicit.core.binary import BinaryCall, binary_handler, fits
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.sharding import axis_names
from haiku_implicit.core.typing import Array, EqnParam, EqnParams, Primitive, Result
from haiku_implicit.quantized.types.ruled import RuledWeight


@dataclasses.dataclass
class MatrixView(ImplicitArray, linear_in="matrix"):
    """A tensor stored as a matrix: some axes form the rows, and the others the columns.

    So attention's weight `[inputs, heads, width]` can be one LoRA or one quantized matrix
    `[inputs, heads * width]`, with a common rank or common scales, instead of a stack of small
    matrices. A product that contracts all rows, or all columns, is a product with the matrix;
    reshaping and transposing change only static metadata. `matrix_axes=` of the functions that make
    implicit parameters puts this type around them.

    Attributes:
      matrix: `[..., n, m]`, usually itself implicit. Leading axes are batch axes of the tensor, too.
      axes: each further axis of the tensor as a group of rows or columns, see `arrays.axes`;
        `MatrixView.of` finds it.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = jax.random.normal(jax.random.key(0), (64, 4, 16))
      >>> q = hki.MatrixView.of(w, inputs=[-3], outputs=[-2, -1], make=hki.QuantizedMatrix.quantize,
      ...                       dtype='int8')
      >>> q.shape, q.matrix.shape, q.matrix.scale.shape
      ((64, 4, 16), (64, 64), (64, 1))
      >>> project = hki.use_implicit_args(lambda x, w: jnp.einsum('ba,ahc->bhc', x, w))
      >>> project(jnp.ones((2, 64)), q).shape
      (2, 4, 16)
    """

    matrix: Array
    axes: Axes = aux_field()

    @classmethod
    def of(
        cls, w: Array, inputs: Sequence[int], outputs: Sequence[int], make: Any, **options: Any
    ) -> ImplicitArray:
        """Makes an implicit array of a tensor, seen as a matrix.

        Args:
          w: the dense tensor.
          inputs: the axes that form the rows, from the end (negative): usually the axes that products
            contract.
          outputs: the axes that form the columns. All other axes are batch axes, and come first.
          make: called as `make(matrix, **options)` with the dense matrix `[..., n, m]`; returns an
            implicit matrix.

        Returns:
          The array in a `MatrixView`, or the array itself if the matrix is the tensor.

        Raises:
          ValueError: for axes other than the last axes of the tensor, each once.
        """
        matrix, axes = unfolded(w, inputs, outputs)
        return view_of(make(matrix, **options), axes)

    @property
    def core_ndim(self) -> int:  # type: ignore[override]
        """The number of axes in `axes`; the axes in front of them are batch axes."""
        return len(self.axes)

    def compute_shape(self) -> tuple[int, ...]:
        return (*np.shape(self.matrix)[:-2], *axes_of.shape(self.axes))

    def compute_dtype(self) -> np.dtype:
        return self.matrix.dtype

    def materialize(self) -> jax.Array:
        lead = axes_of.others(self.shape[: _lead(self)])
        stored = axes_of.stored(self.axes)
        return axes_of.rearranged(dense(self.matrix), [*lead, *stored], [*lead, *self.axes])

    @property
    def field_axes(self) -> dict[str, str]:  # type: ignore[override]
        """Rows are split like their outermost axis, columns likewise."""
        found = [".", "."]
        for name, group in zip(axis_names(len(self.axes)), self.axes, strict=True):
            if axes_of.is_outermost(group, self.axes):
                found[group[0][2]] = name
        return {"matrix": "".join(found)}

    def as_part(self, counts: Sequence[int]) -> Result:
        """The view with the axes of a part."""
        axes = axes_of.of_part(self.axes, counts[len(counts) - len(self.axes) :])
        return NotImplemented if axes is None else self._replace(axes=axes)


def unfolded(w: Array, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[Array, Axes]:
    """A dense tensor as a matrix `[..., n, m]`, and the `axes` of its `MatrixView`.

    Args:
      w: the tensor; for a `jax.ShapeDtypeStruct`, the matrix is one, too.
      inputs, outputs: as for `MatrixView.of`.

    Raises:
      ValueError: for axes other than the last axes of the tensor, each once.
    """
    last = [*inputs, *outputs]
    if not inputs or not outputs or sorted(last) != list(range(-len(last), 0)):
        raise value_error(
            "matrix axes: expected inputs and outputs that are together the last axes of the tensor, "
            f"from the end (such as [-3] and [-2, -1]), got {list(inputs)} and {list(outputs)}"
        )
    if len(last) > len(w.shape):
        raise value_error(
            f"matrix axes: inputs {list(inputs)} and outputs {list(outputs)} are {len(last)} axes, and "
            f"the tensor has the shape {list(w.shape)}"
        )
    sizes = [[w.shape[i] for i in own] for own in (inputs, outputs)]
    axes = axes_of.of_split(sizes, np.argsort(last).tolist())
    if isinstance(w, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda w: matrix_in(w, axes), w), axes
    return matrix_in(w, axes), axes


def matrix_in(x: jax.Array, axes: Axes) -> jax.Array:
    """The matrix `[..., n, m]` of a dense tensor whose last axes are `axes`."""
    lead = axes_of.others(x.shape[: x.ndim - len(axes)])
    return axes_of.rearranged(x, [*lead, *axes], [*lead, *axes_of.stored(axes)])


def view_of(matrix: Array, axes: Axes) -> Array:
    """The tensor of a matrix; the matrix itself if it is the tensor."""
    return matrix if axes == axes_of.whole(matrix.shape[-2:]) else MatrixView(matrix, axes)


def matrix_of(w: Array) -> Array:
    """The matrix that a view holds; any other array itself."""
    return w.matrix if isinstance(w, MatrixView) else w


def tensor_of(w: Array) -> Array:
    """The dense tensor that a view of a dense matrix stands for; any other array itself."""
    if not is_view_of_dense(w):
        return w
    is_struct = isinstance(w.matrix, jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(w.shape, w.dtype) if is_struct else w.materialize()


def is_view_of_dense(w: Array) -> bool:
    """Whether an array is a view of a dense matrix, as `prepare` makes them."""
    return isinstance(w, MatrixView) and w.matrix is not None and not is_implicit(w.matrix)


def with_matrix(w: Array, new: Array) -> Array:
    """Another matrix in the view `w`; the matrix itself if `w` is not a view."""
    return w._replace(matrix=new) if isinstance(w, MatrixView) else new


def _lead(w: MatrixView) -> int:
    """The number of batch axes of a tensor."""
    return w.ndim - len(w.axes)


def _whole_axes(w: MatrixView, groups: Iterable[axes_of.Group]) -> list[int] | None:
    """The axes of the matrix that these axes of the tensor form; None if they form only a part."""
    used = [f for group in groups for f in group]
    inner = [axis for axis in (0, 1) if any(f[2] == axis for f in used)]
    of_inner = [f for axis in inner for f in axes_of.parts(w.axes, axis)]
    return inner if sorted(used) == sorted(of_inner) else None


# --- products ------------------------------------------------------------------------------------


@binary_handler("dot_general")
def dot_with_view(call: BinaryCall, x: jax.Array, w: MatrixView) -> Result:
    """Computes a product with the matrix, if all of its rows (or columns) are contracted, or none."""
    lead = _lead(w)
    if call.params.get("out_sharding") is not None or any(i >= lead for i in call.batch[1]):
        return NotImplemented
    of_x = {i: w.axes[j - lead] for i, j in zip(*call.contracted, strict=True) if j >= lead}
    inner = _whole_axes(w, of_x.values())
    if inner is None:
        return NotImplemented

    # Axes of `x` that do not meet the matrix come first, then the others in the order of the matrix.
    rest = [i for i in range(x.ndim) if i not in of_x]
    split = [of_x.get(i, group) for i, group in enumerate(axes_of.others(x.shape))]
    stored = axes_of.stored(w.axes, inner)
    x = axes_of.rearranged(x, split, [*(split[i] for i in rest), *stored])

    pairs = [(rest.index(i), j) for i, j in zip(*call.contracted, strict=True) if j < lead]
    pairs += [(len(rest) + k, lead + axis) for k, axis in enumerate(inner)]
    contract = tuple(zip(*pairs, strict=True)) or ((), ())
    batch = tuple(rest.index(i) for i in call.batch[0]), call.batch[1]
    numbers = call.ordered(*contract), call.ordered(*batch)
    params = call.params | dict(dimension_numbers=numbers)
    out = call.primitive.bind(*call.ordered(x, w.matrix), **params)

    # In the result, the free axes of the matrix become axes of the tensor.
    free_lead = [i for i in range(lead) if i not in (*batch[1], *contract[1])]
    free = [axis for axis in (0, 1) if axis not in inner]
    groups = [g for i, g in enumerate(w.axes) if lead + i not in call.contracted[1]]
    count = len(free_lead) + len(free)
    start = (len(batch[1]) if call.w_first else out.ndim - count) + len(free_lead)
    return _folded(out, start, len(free), groups, free)


def _folded(
    x: jax.Array, start: int, count: int, groups: Sequence[axes_of.Group], inner: Sequence[int]
) -> jax.Array:
    """Replaces axes of the matrix in `x` by axes of the tensor.

    Args:
      x: an array.
      start: the position of the first of the matrix's axes.
      count: the number of these axes.
      groups: the axes of the tensor that they form.
      inner: their positions in the matrix.
    """
    others = axes_of.others(x.shape)
    before, after = others[:start], others[start + count :]
    stored = axes_of.stored(groups, inner)
    return axes_of.rearranged(x, [*before, *stored, *after], [*before, *groups, *after])


# --- axes ----------------------------------------------------------------------------------------


@primitive_handler(["reshape", "squeeze", "broadcast_in_dim"], precedence=-1)
def reshape_matrix(primitive: Primitive, w: ImplicitArray, **params: EqnParam) -> Result:
    """Splits or merges axes of the rows, or of the columns, of a view or of a matrix of any type.

    Also adds and drops axes of length one. A matrix becomes a view.
    """
    matrix, axes = _opened(w)
    new = axes_of.new_shape(w.shape, params)
    if axes is None or new is None:
        return NotImplemented
    *batch, rows, columns = matrix.shape
    # The new batch axes are the first axes with the old number of elements, plus added axes of length
    # one.
    sizes = [math.prod(new[:i]) for i in range(len(new) + 1)]
    if math.prod(batch) not in sizes:
        return NotImplemented
    n = sizes.index(math.prod(batch))
    while len(new) - n > len(axes) and new[n] == 1:
        n += 1
    changed = axes_of.reshaped(axes, new[n:])
    if changed is None or axes_of.are_mixed(changed):
        return NotImplemented  # (no product could contract an axis of rows and columns)
    stacked = (*new[:n], rows, columns)
    if list(new[:n]) != batch:
        if stacked == new:
            return NotImplemented  # `batch_axes` handles this if possible
        matrix = default_handler(
            jax.lax.reshape_p, matrix, new_sizes=stacked, dimensions=None, sharding=None
        )
    return view_of(matrix, changed)


@primitive_handler("transpose", precedence=-1)
def transpose_matrix(
    primitive: Primitive, w: ImplicitArray, *, permutation: tuple[int, ...]
) -> Result:
    """Transposes a view, or a matrix of a type without its own rule; batch axes stay in front."""
    matrix, axes = _opened(w)
    lead = w.ndim - len(axes or ())
    of_batch = tuple(permutation[:lead])
    if axes is None or any(i >= lead for i in of_batch):
        return NotImplemented
    if of_batch != tuple(range(lead)):
        if matrix is w:
            return NotImplemented  # `batch_axes` handles this if possible
        order = (*of_batch, lead, lead + 1)
        matrix = default_handler(jax.lax.transpose_p, matrix, permutation=order)
    return view_of(matrix, tuple(axes[i - lead] for i in permutation[lead:]))


def _opened(w: ImplicitArray) -> tuple[Array, Axes | None]:
    """The matrix of a view, or a matrix itself, and the axes of the tensor; None for other arrays.

    Also None for a `RuledWeight`, which rearranges its wrapped weight itself, and for a type with an
    `equivalent`, whose rules apply.
    """
    if isinstance(w, MatrixView):
        return w.matrix, w.axes
    is_matrix = w.core_ndim == 2 and w.ndim >= 2
    is_matrix = is_matrix and not (isinstance(w, RuledWeight) or has_equivalent(type(w)))
    return w, axes_of.whole(w.shape[-2:]) if is_matrix else None


# --- parts ---------------------------------------------------------------------------------------


@primitive_handler("slice")
def slice_view(primitive: Primitive, w: MatrixView, **params: EqnParam) -> Result:
    """Slices axes, if each part is a contiguous part of the rows or columns."""
    if any(n != 1 for n in params["strides"] or ()):
        return NotImplemented
    return _part(w, params["start_indices"], params["limit_indices"])


@primitive_handler("split")
def split_view(primitive: Primitive, w: MatrixView, *, sizes: tuple[int, ...], axis: int) -> Result:
    """Splits an axis, if each part is a contiguous part of the rows or columns."""
    out = [_part(w, *corners) for corners in axes_of.pieces(w.shape, axis, sizes)]
    return NotImplemented if any(part is NotImplemented for part in out) else out


def _part(w: MatrixView, starts: Sequence[int], limits: Sequence[int]) -> Result:
    """The part between two corners; `NotImplemented` if it is not a contiguous part of the matrix."""
    lead = _lead(w)
    low, high = list(starts[:lead]) + [0, 0], list(limits[:lead]) + list(w.matrix.shape[lead:])
    axes = list(w.axes)
    for i, group in enumerate(w.axes):
        start, limit = starts[lead + i], limits[lead + i]
        if (start, limit) == (0, w.shape[lead + i]):
            continue
        cut = _cut(w, group, start, limit)
        if cut is None:
            return NotImplemented
        axis, low[lead + axis], high[lead + axis], axes[i] = cut
    matrix = jax.lax.slice(w.matrix, low, high)
    return view_of(matrix, tuple(axes))


def _cut(
    w: MatrixView, group: axes_of.Group, start: int, limit: int
) -> tuple[int, int, int, axes_of.Group] | None:
    """The axis of the matrix to cut, its start and limit, and the axis of the tensor that is left.

    Only the outermost factor of an axis of the matrix can be cut, between its indices; otherwise None.
    """
    n, stride, axis = group[0]
    size = axes_of.length(group[1:])
    outermost = n * stride == w.matrix.shape[axis - 2]
    if not outermost or start % size or limit % size or start == limit:
        return None
    count = (limit - start) // size
    left = ((count, stride, axis), *group[1:]) if count > 1 else group[1:]
    return axis, start // size * stride, limit // size * stride, left


@primitive_handler("dynamic_slice")
def dynamic_slice_view(
    primitive: Primitive, w: MatrixView, *starts: jax.Array, slice_sizes: tuple[int, ...]
) -> Result:
    """Slices axes at starts that are known at run time, if the part is contiguous in the matrix."""
    lead, sizes, axes = _lead(w), list(slice_sizes), list(w.axes)
    at = [*starts[:lead], *[jnp.zeros_like(starts[0])] * 2]
    of_matrix = [*sizes[:lead], *w.matrix.shape[lead:]]
    for i, group in enumerate(w.axes):
        if sizes[lead + i] == w.shape[lead + i]:
            continue
        cut = _cut(w, group, 0, sizes[lead + i])
        if cut is None or len(group) > 1:
            return NotImplemented
        axis, _, of_matrix[lead + axis], axes[i] = cut
        # (Within bounds before it is multiplied: integers may be narrow.)
        last = w.shape[lead + i] - sizes[lead + i]
        start = jnp.clip(starts[lead + i], 0, last).astype(jnp.int32)
        at[lead + axis] = start * group[0][1]
    matrix = jax.lax.dynamic_slice(w.matrix, at, of_matrix)
    return view_of(matrix, tuple(axes))


# The parameters of a gather. Another one, such as a sharding of the result, is not known here.
_OF_GATHER = {"dimension_numbers", "slice_sizes", "mode", "fill_value"}
_OF_GATHER |= {"indices_are_sorted", "unique_indices"}


@primitive_handler("gather")
def gather_from_view(
    primitive: Primitive, w: MatrixView, ids: jax.Array, **params: EqnParam
) -> Result:
    """Gathers parts of axes, all of the rows or all of the columns, as whole rows or columns."""
    lead, sizes = _lead(w), params["slice_sizes"]
    d, ids = _without_batching(params["dimension_numbers"], ids, lead)
    cut = {f[2] for i, group in enumerate(w.axes, lead) if sizes[i] != w.shape[i] for f in group}
    if len(cut) > 1 or {k for k, v in params.items() if v is not None} - _OF_GATHER:
        return NotImplemented
    # For axes of length one, either axis of the matrix works.
    axis = next(iter(cut or {f[2] for group in w.axes for f in group} or {0}))
    dropped = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    batch = [i for i in range(lead) if i not in dropped]
    kept = [i for i in range(lead, w.ndim) if i not in dropped]
    own = [i for i in kept if any(f[2] == axis for f in w.axes[i - lead])]
    others = [i for i in kept if i not in own]
    params |= dict(dimension_numbers=d)
    places = _places(w, ids, params, axis, own)
    out = _gathered(primitive, w, ids, places, params, axis)
    # The result has the axes of `ids`, then those made of `axis`, batch axes, and the other axis.
    out = _folded(out, out.ndim - 1, 1, [w.axes[i - lead] for i in others], [1 - axis])
    count = ids.ndim - 1
    of_ids, of_tensor = iter(range(count)), iter(count + np.argsort([*own, *batch, *others]))
    order = [next(of_tensor if i in d.offset_dims else of_ids) for i in range(out.ndim)]
    return jnp.transpose(out, order)


def _gathered(
    primitive: Primitive,
    w: MatrixView,
    ids: jax.Array,
    places: jax.Array,
    params: EqnParams,
    axis: int,
) -> jax.Array:
    """Gathers rows (or columns) of the matrix, with the indices that a gather has for batch axes.

    Args:
      w, ids: the tensor, and the indices of the gather.
      places: the indices of the rows (or columns), as `_places` returns them.
      params: the parameters of the gather from the tensor.
      axis: the axis of the matrix, 0 for the rows.

    Returns:
      `[*places.shape, ...]`, with the batch axes and the other axis of the matrix.
    """
    d, lead = params["dimension_numbers"], _lead(w)
    indexed = [k for k, i in enumerate(d.start_index_map) if i < lead]
    collapsed = [i for i in d.collapsed_slice_dims if i < lead]
    num_batch = lead - len(collapsed) - len(d.operand_batching_dims)
    numbers = d._replace(
        offset_dims=tuple(range(places.ndim, places.ndim + num_batch + 1)),
        collapsed_slice_dims=(*collapsed, lead + axis),
        start_index_map=(*(d.start_index_map[k] for k in indexed), lead + axis),
    )
    sizes = [*params["slice_sizes"][:lead], *w.matrix.shape[lead:]]
    sizes[lead + axis] = 1
    of_batch = jnp.expand_dims(ids[..., np.array(indexed, int)], range(ids.ndim - 1, places.ndim))
    of_batch = jnp.broadcast_to(of_batch, (*places.shape, len(indexed))).astype(places.dtype)
    own = dict(dimension_numbers=numbers, slice_sizes=tuple(sizes))
    own |= dict(indices_are_sorted=False, unique_indices=False)
    indices = jnp.concatenate([of_batch, places[..., None]], -1)
    return primitive.bind(w.matrix, indices, **params | own)


def _without_batching(numbers: EqnParam, ids: jax.Array, lead: int) -> tuple[Any, jax.Array]:
    """Rewrites a gather with an index for each batching axis of the operand from `lead` on."""
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    pairs = list(zip(*batching, strict=True))
    moved = [pair for pair in pairs if pair[0] >= lead]
    if not moved:
        return numbers, ids
    shape = (*ids.shape[:-1], 1)
    more = [jax.lax.broadcasted_iota(np.int32, shape, of_ids) for _, of_ids in moved]
    kept = [pair for pair in pairs if pair not in moved]
    axes = [axis for axis, _ in moved]
    new = numbers._replace(
        collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, *axes))),
        start_index_map=(*numbers.start_index_map, *axes),
        operand_batching_dims=tuple(axis for axis, _ in kept),
        start_indices_batching_dims=tuple(of_ids for _, of_ids in kept),
    )
    return new, jnp.concatenate([ids.astype(np.int32), *more], -1)


def _places(
    w: MatrixView, ids: jax.Array, params: EqnParams, axis: int, own: Sequence[int]
) -> jax.Array:
    """The indices of the rows (or columns) of the matrix that a gather from the tensor takes.

    If the gather fills slices out of bounds, these have an index beyond the last.

    Args:
      w: the tensor.
      ids: the indices of the gather.
      params: its parameters.
      axis: the axis of the matrix, 0 for the rows.
      own: the axes of the tensor that are made of `axis`, and that the result has.

    Returns:
      `[*ids.shape[:-1], ...]`, with a further axis for each of `own`, of its slice size.
    """
    lead, sizes, count = _lead(w), params["slice_sizes"], ids.ndim - 1
    axes_in_ids = params["dimension_numbers"].start_index_map
    starts = dict(zip(axes_in_ids, jnp.moveaxis(ids, -1, 0), strict=True))
    shape = (*ids.shape[:-1], *(sizes[i] for i in own))
    behind = range(count, len(shape))
    places, inside = jnp.zeros(shape, np.int32), jnp.ones(ids.shape[:-1], bool)
    for i, group in enumerate(w.axes, lead):
        last = w.shape[i] - sizes[i]
        start = starts.get(i, jnp.zeros(ids.shape[:-1], np.int32))
        inside &= (start >= 0) & (start <= last)
        if not any(f[2] == axis for f in group):
            continue
        start = jnp.clip(start, 0, last).astype(np.int32)  # (may be narrow)
        index = jnp.expand_dims(start, behind)
        if i in own:
            index += jax.lax.broadcasted_iota(np.int32, shape, count + own.index(i))
        for n, stride, _ in reversed(group):
            places, index = places + index % n * stride, index // n
    if params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return places
    return jnp.where(jnp.expand_dims(inside, behind), places, w.matrix.shape[lead + axis])


@primitive_handler("gather", precedence=-1)
def gather_columns(
    primitive: Primitive, w: ImplicitArray, ids: jax.Array, **params: EqnParam
) -> Result:
    """Gathers whole columns of a matrix of any type as rows of its transpose, if that is implicit."""
    if w.core_ndim != 2 or w.ndim < 2:
        return NotImplemented
    rows, columns = params["slice_sizes"][-2:]
    if rows != w.shape[-2] or columns == w.shape[-1]:
        return NotImplemented
    n, m = w.ndim - 2, w.ndim - 1
    order = (*range(n), m, n)
    transpose = default_handler(jax.lax.transpose_p, w, permutation=order)
    if isinstance(transpose, MatrixView) or not is_implicit(transpose):
        return NotImplemented
    numbers = params["dimension_numbers"]
    swapped = dict(
        dimension_numbers=with_renamed_axes(numbers, {n: m, m: n}),
        slice_sizes=tuple(params["slice_sizes"][i] for i in order),
    )
    out = default_handler(primitive, transpose, ids, **params | swapped)
    if {n, m} & {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}:
        return out
    # Both axes are in the result, in the other order.
    *_, i, j = numbers.offset_dims
    return jnp.swapaxes(out, i, j)


# --- elementwise, and statistics -----------------------------------------------------------------


@primitive_handler(["square", "integer_pow", "abs"])
def apply_to_matrix(primitive: Primitive, w: MatrixView, **params: EqnParam) -> Result:
    """Applies the elementwise function of a statistic; most types defer it to the reduction."""
    return view_of(primitive.bind(w.matrix, **params), w.axes)


@primitive_handler(["reduce_sum", "reduce_max", "reduce_min"])
def reduce_view(
    primitive: Primitive, w: MatrixView, *, axes: tuple[int, ...], **params: EqnParam
) -> Result:
    """Reduces over all rows, or all columns."""
    lead = _lead(w)
    inner = _whole_axes(w, [w.axes[i - lead] for i in axes if i >= lead])
    if inner is None:
        return NotImplemented
    of_matrix = (*(i for i in axes if i < lead), *(lead + axis for axis in inner))
    out = primitive.bind(w.matrix, axes=of_matrix, **params)
    free = [axis for axis in (0, 1) if axis not in inner]
    groups = [g for i, g in enumerate(w.axes) if lead + i not in axes]
    return _folded(out, out.ndim - len(free), len(free), groups, free)


@primitive_handler(["mul", "div", "add", "sub"])
def with_dense(primitive: Primitive, w: MatrixView, x: jax.Array, **params: EqnParam) -> Result:
    """Combines the matrix with an operand of as many axes, rearranged. (`any_type` has numbers.)"""
    if x.ndim != w.ndim or not fits(x, w):
        return NotImplemented
    return view_of(primitive.bind(w.matrix, _in_order(x, w), **params), w.axes)


def _in_order(x: jax.Array, w: MatrixView) -> jax.Array:
    """Rearranges an array that broadcasts with the tensor to one that broadcasts with the matrix."""
    lead = axes_of.others(x.shape[: _lead(w)])
    own = zip(x.shape[len(lead) :], w.axes, strict=True)
    used = {f[2] for n, group in own if n > 1 for f in group}
    # (If any factor of a matrix axis varies, the operand is broadcast along all of them.)
    wide = [tuple(f for f in group if f[2] in used) for group in w.axes]
    x = jnp.broadcast_to(x, (*x.shape[: len(lead)], *axes_of.shape(wide)))
    return axes_of.rearranged(x, [*lead, *wide], [*lead, *axes_of.stored(wide)])
