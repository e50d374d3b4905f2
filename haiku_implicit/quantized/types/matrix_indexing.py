"""Rules of `QuantizedMatrix` that change its axes or take parts of it.

Columns and groups stay quantized. Only the rows that an embedding looks up become dense.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.batch_axes import with_renamed_axes, without_whole_axes
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.typing import EqnParam, Primitive, Result, Tree
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.products.blocks import slices

_Modes = jax.lax.GatherScatterMode


# --- axes ----------------------------------------------------------------------------------------
# Leaves have the batch axes of the matrix, then the rows, and last the grouped axis. `batch_axes` has
# the rules that touch only batch axes.


@primitive_handler("transpose")
def transpose_matrix(
    primitive: Primitive, w: QuantizedMatrix, *, permutation: tuple[int, ...], **params: EqnParam
) -> Result:
    """Swaps the two axes of the matrix in name only, and reorders batch axes.

    If the grouped axis is the last one, rows can also change places with batch axes.
    """
    core = (w.ndim - 2, w.ndim - 1)
    if w.axis == -1 and permutation[-1] == core[1] and permutation[-2] != core[0]:
        move = functools.partial(primitive.bind, permutation=permutation, **params)
        return jax.tree.map(move, w.with_row_scales())
    if tuple(sorted(permutation[-2:])) != core:
        return NotImplemented
    order = (*permutation[:-2], *core)
    out = w
    if order != tuple(range(w.ndim)):
        out = jax.tree.map(lambda leaf: primitive.bind(leaf, permutation=order, **params), w)
    return out if permutation[-1] == core[1] else out._replace(axis=-3 - w.axis)


@primitive_handler("split")
def split_matrix(
    primitive: Primitive, w: QuantizedMatrix, *, sizes: Sequence[int], axis: int, **params: EqnParam
) -> Result:
    """Splits the rows, or the grouped axis between groups."""
    if axis < w.ndim - 2:
        return NotImplemented
    limits = np.cumsum(sizes).tolist()
    w = w.with_row_scales()
    parts = [part_of(w, axis, b - n, b) for b, n in zip(limits, sizes, strict=True)]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


@primitive_handler("concatenate")
def concatenate_matrices(
    primitive: Primitive, *operands: QuantizedMatrix, dimension: int
) -> Result:
    """Concatenates matrices of one kind, along the rows or group after group."""
    operands = tuple(w.with_row_scales()._replace(dtype=w.dtype) for w in operands)
    first = operands[0]
    if dimension < first.ndim - 2 or len({(_kind(w), w.group_size) for w in operands}) > 1:
        return NotImplemented
    axis = -2 if dimension == first._row_axis else -1
    if axis == -1 and any(w.padding for w in operands):
        return NotImplemented
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=axis), *operands)


def _kind(w: QuantizedMatrix) -> Any:
    """A key that is equal for matrices whose leaves can be concatenated."""
    return jax.tree_util.tree_structure(w), *(leaf.dtype for leaf in jax.tree.leaves(w))


def part_of(w: QuantizedMatrix, axis: int, start: int, limit: int) -> Result:
    """A quantized part along one axis of a matrix with scales for each row.

    `NotImplemented` if it would cut a group.
    """

    if (start, limit) == (0, w.shape[axis]):
        return w
    if axis != w._grouped_axis:
        return _cut(w, min(axis, w.ndim - 2), start, limit)
    if start == limit:
        return NotImplemented  # a matrix has at least one group
    g, fmt = w.group_size, w._format
    codes = _cut(w.codes, w.ndim - 1, fmt.stored(start), fmt.stored(limit))
    if w.num_groups == 1 and fmt.bits == 8:  # a scale per channel holds for each part
        return w._replace(codes=codes)
    if w.padding or start % g or limit % g:
        return NotImplemented
    out = w.map_scales(lambda leaf: _cut(leaf, w.ndim - 1, start // g, limit // g))
    return out._replace(codes=codes)


def _cut(tree: Tree, axis: int, start: int, limit: int, step: int = 1) -> Tree:
    """Slices each leaf along an axis."""
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, limit, step, axis), tree)


# --- slices ---------------------------------------------------------------------------------------


@primitive_handler("slice")
def slice_matrix(
    primitive: Primitive,
    w: QuantizedMatrix,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> Result:
    """Slices rows `w[i:j]`, dense, or columns `w[:, i:j]`, quantized, without cutting a group."""
    steps = strides or (1,) * w.ndim
    cuts = list(zip(start_indices, limit_indices, steps, strict=True))
    changed = [i for i, cut in enumerate(cuts) if cut != (0, w.shape[i], 1)]
    if all(i < w.ndim - 2 for i in changed):
        return NotImplemented
    w, grouped = w.with_row_scales(), w._grouped_axis
    if grouped == w.ndim - 1 and grouped in changed:
        start, limit, step = cuts[grouped]
        w = NotImplemented if step != 1 else part_of(w, grouped, start, limit)
        if w is NotImplemented:
            return NotImplemented
        changed.remove(grouped)
    for i in (i for i in changed if i != grouped):
        w = _cut(w, min(i, w.ndim - 2), *cuts[i])
    if grouped in changed:
        return _along_groups(w, jnp.arange(*cuts[grouped]))
    return w.materialize() if w.ndim - 2 in changed else w


@primitive_handler("dynamic_slice")
def dynamic_slice_matrix(
    primitive: Primitive, w: QuantizedMatrix, *starts: jax.Array, slice_sizes: Sequence[int]
) -> Result:
    """Slices rows or columns at starts known at run time; dense if it cuts the grouped axis."""
    changed = [i for i, size in enumerate(slice_sizes) if size != w.shape[i]]
    grouped = w._grouped_axis
    if all(i < w.ndim - 2 for i in changed):
        return NotImplemented
    # Clipped, as the primitive does: in JAX's functions a negative start counts from the end.
    at = {i: jnp.clip(as_index(starts[i]), 0, w.shape[i] - slice_sizes[i]) for i in changed}
    w = w.with_row_scales()
    for i in (i for i in changed if i != grouped):
        w = slices(w, at[i], slice_sizes[i], axis=min(i, w.ndim - 2))
    if grouped in changed:
        steps = jnp.arange(slice_sizes[grouped], dtype=at[grouped].dtype)
        return _along_groups(w, at[grouped] + steps)
    return w.materialize() if w.ndim - 2 in changed else w


def as_index(x: jax.Array) -> jax.Array:
    """Widens integers so that positions can be computed with them."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def _along_groups(w: QuantizedMatrix, ids: jax.Array) -> jax.Array:
    """Dense values at positions of the grouped axis: rows `[..., len(ids), m]` for axis -2."""
    values = _elements(w, ids, lambda leaf, index: jnp.take(leaf, index, axis=-1, mode="clip"))
    return values if w.axis == -1 else jnp.swapaxes(values, -1, -2)


def _elements(
    w: QuantizedMatrix,
    ids: jax.Array,
    take: Callable[[jax.Array, jax.Array], jax.Array],
    expand: Callable[[jax.Array], jax.Array] = lambda shift: shift,
) -> jax.Array:
    """Dense values at positions of the grouped axis.

    Args:
      w: the matrix.
      ids: the positions.
      take: returns the elements of a leaf at positions of its last axis.
      expand: reshapes an array of the shape of `ids` so that it broadcasts with these elements.
    """
    fmt, g = w._format, w.group_size
    group, within = ids // g, ids % g
    codes = formats.codes_at(group, within, g, fmt, functools.partial(take, w.codes), expand)
    offset = None if w.offset is None else take(w.offset, group)
    return w.rounded(formats.scaled(codes, take(w.scale, group), offset, fmt))


# --- gather --------------------------------------------------------------------------------------


@primitive_handler("gather")
def gather_from_matrix(
    primitive: Primitive,
    w: QuantizedMatrix,
    indices: jax.Array,
    *,
    dimension_numbers: EqnParam,
    slice_sizes: Sequence[int],
    mode: EqnParam,
    fill_value: EqnParam,
    **params: EqnParam,
) -> Result:
    """Gathers rows or columns `w[ids]`, dense, also of batched matrices; whole ones stay quantized."""
    d, core = dimension_numbers, {w.ndim - 2, w.ndim - 1}
    filling = mode == _Modes.FILL_OR_DROP
    if not filling and mode not in (_Modes.CLIP, _Modes.PROMISE_IN_BOUNDS):
        return NotImplemented
    if not filling:
        indices, d = without_whole_axes(indices, d, w.shape, slice_sizes)
    clamped = _Modes.CLIP if filling else mode
    run = functools.partial(primitive.bind, mode=clamped, fill_value=None, **params)
    gather = _Gather(w, as_index(indices), d, slice_sizes, run)
    gone = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    if not core & {*gone, *d.start_index_map} and all(slice_sizes[i] == w.shape[i] for i in core):
        last = indices.ndim - 1 + len(d.offset_dims)  # the matrices' axes should end here
        # `batch_axes` does everything except filling
        with_nan = filling and (fill_value is None or np.isnan(fill_value))
        in_order = d.offset_dims[-2:] == (last - 2, last - 1)
        return gather.matrices() if with_nan and in_order else NotImplemented
    grouped = w._grouped_axis
    picked = grouped in d.start_index_map
    is_cut = slice_sizes[grouped] != (1 if picked else w.shape[grouped])
    if is_cut or (grouped in gone and not picked):
        return NotImplemented
    gather = gather._replace(w=w.with_row_scales())
    out = gather.elements() if picked else gather.rows()
    if w.axis == -2 and not core & gone:
        out = jnp.swapaxes(out, d.offset_dims[-1], d.offset_dims[-2])
    if not filling:
        return out
    fill = jnp.asarray(jnp.nan if fill_value is None else fill_value, w.dtype)
    return jnp.where(jnp.expand_dims(gather.is_inside(), d.offset_dims), out, fill)


class _Gather(NamedTuple):
    """A gather from the leaves of a matrix.

    Attributes:
      w: the matrix; with scales for each row, except for `matrices`.
      indices: the indices.
      numbers: the dimension numbers of the gather from the dense matrix.
      sizes: the sizes of its slices.
      run: the primitive, with its other parameters; it does not fill.
    """

    w: QuantizedMatrix
    indices: jax.Array
    numbers: Any
    sizes: Sequence[int]
    run: Callable[..., jax.Array]

    def is_inside(self) -> jax.Array:
        """Whether the slice at each index vector is within the matrix."""
        inside = [
            (self.indices[..., i] >= 0)
            & (self.indices[..., i] <= self.w.shape[axis] - self.sizes[axis])
            for i, axis in enumerate(self.numbers.start_index_map)
        ]
        return jnp.all(jnp.stack(inside, axis=-1), axis=-1)

    def matrices(self) -> QuantizedMatrix:
        """Gathers whole matrices of a batch; a matrix that is out of bounds gets scales of NaN."""

        def take(leaf: jax.Array, **options: Any) -> jax.Array:
            own = (*self.sizes[:-2], *leaf.shape[-2:])
            options |= dict(dimension_numbers=self.numbers, slice_sizes=own)
            return self.run(leaf, self.indices, **options)

        # NaN scales would be enough, but the gradient of a clamped offset would go to the last matrix.
        filled = functools.partial(take, mode=_Modes.FILL_OR_DROP, fill_value=np.nan)
        return self.w.map_scales(filled)._replace(codes=take(self.w.codes))

    def _take(self, leaf: jax.Array, indices: jax.Array, last: int, **options: Any) -> jax.Array:
        """Applies the gather to a leaf; slices have the length `last` along the leaf's last axis.

        The result has the axes of the gather from the dense matrix; if both axes of the matrix are
        kept, they are in storage order.
        """
        w = self.w
        own = (*self.sizes[:-2], self.sizes[w._row_axis], last)
        stored = {w._row_axis: w.ndim - 2, w._grouped_axis: w.ndim - 1}
        numbers = with_renamed_axes(self.numbers, stored)
        return self.run(leaf, indices, dimension_numbers=numbers, slice_sizes=own, **options)

    def rows(self) -> jax.Array:
        """Gathers whole rows along the grouped axis, at positions of other axes."""
        at = self.numbers.offset_dims[-1]

        def of_leaf(leaf: jax.Array) -> jax.Array:
            found = self._take(leaf, self.indices, leaf.shape[-1])
            return jnp.moveaxis(found, at, -1)[None]  # (a single row is a matrix of one)

        w = jax.tree.map(of_leaf, self.w)
        values = formats.dequantize(w.codes, w.scale, w.offset, w._format)[0]
        values = values[..., : values.shape[-1] - w.padding]
        return jnp.moveaxis(w.rounded(values), -1, at)

    def elements(self) -> jax.Array:
        """Gathers elements at single positions of the grouped axis."""
        column = self.numbers.start_index_map.index(self.w._grouped_axis)

        def take(leaf: jax.Array, index: jax.Array) -> jax.Array:
            # Sorted or unique indices need not stay so as positions of bytes and groups.
            loose = dict(indices_are_sorted=False, unique_indices=False)
            return self._take(leaf, self.indices.at[..., column].set(index), 1, **loose)

        ids = jnp.clip(self.indices[..., column], 0, self.w.shape[self.w.axis] - 1)
        offsets = self.numbers.offset_dims
        return _elements(self.w, ids, take, lambda x: jnp.expand_dims(x, offsets))
