"""Expresses the axes of a tensor by the axes of the matrix that stores it.

An axis of the tensor is a group of factors, the outermost first. A factor `(size, stride, axis)` is a
part of an axis of the matrix (0 for the rows, 1 for the columns): the index along that axis is the sum,
over its factors, of `stride` times the index along the factor. For example, the groups
`((heads, width, 0),), ((width, 1, 0),), ((m, 1, 1),)` store `[heads, width, m]` as a matrix
`[heads * width, m]`. An axis of length one has an empty group.

Reshaping and transposing such a tensor changes only groups, not data.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import export

from haiku_implicit.core.typing import Array, EqnParam

Factor = tuple[int, int, int]
Group = tuple[Factor, ...]
Axes = tuple[Group, ...]


def whole(sizes: Sequence[int]) -> Axes:
    """The axes of the matrix itself."""
    return tuple(((n, 1, i),) if n != 1 else () for i, n in enumerate(sizes))


def of_split(sizes: Sequence[Sequence[int]], order: Sequence[int]) -> Axes:
    """The axes of a tensor made by splitting rows and columns into axes and reordering these.

    Args:
      sizes: the lengths of the axes that make the rows, and of the axes that make the columns.
      order: for each axis of the tensor, its position among these.
    """
    groups = [
        ((n, math.prod(own[i + 1 :]), axis),) if n != 1 else ()
        for axis, own in enumerate(sizes)
        for i, n in enumerate(own)
    ]
    return tuple(groups[i] for i in order)


def length(group: Group) -> int:
    """The length of an axis of the tensor."""
    return math.prod(n for n, _, _ in group)


def shape(axes: Sequence[Group]) -> tuple[int, ...]:
    """The shape of the tensor."""
    return tuple(map(length, axes))


def parts(axes: Sequence[Group], axis: int) -> list[Factor]:
    """The factors of an axis of the matrix, the outermost first."""
    return sorted((f for group in axes for f in group if f[2] == axis), key=lambda f: -f[1])


def stored(axes: Sequence[Group], inner: Sequence[int] = (0, 1)) -> list[Group]:
    """The rows and the columns (or one of them) as groups of the factors in the tensor's axes."""
    return [tuple(parts(axes, axis)) for axis in inner]


def others(lengths: Sequence[int]) -> list[Group]:
    """A group for each axis of an array other than a matrix, with factors of their own."""
    return [((n, i, -1),) for i, n in enumerate(lengths)]


def rearranged(x: jax.Array, old: Sequence[Group], new: Sequence[Group]) -> jax.Array:
    """Splits axes of an array into factors, reorders these, and merges them.

    Args:
      x: an array with an axis for each group of `old`.
      old, new: the axes before and after, as groups of the same factors.
    """
    factors = [f for group in old for f in group]
    order = [factors.index(f) for group in new for f in group]
    x = jnp.transpose(x.reshape([n for n, _, _ in factors]), order)
    return x.reshape(shape(new))


def is_outermost(group: Group, axes: Axes) -> bool:
    """Whether an axis begins with the outermost factor of the rows or columns."""
    return bool(group) and parts(axes, group[0][2])[0] == group[0]


def of_part(axes: Axes, counts: Sequence[int]) -> Axes | None:
    """The axes of one part of a tensor that is cut into `counts` parts along its axes.

    None if the rows or columns of a part would not be contiguous in the matrix: only the outermost
    factor of the rows or columns can be cut, and only evenly.
    """
    out = []
    for group, count in zip(axes, counts, strict=True):
        if count > 1:
            if not is_outermost(group, axes) or group[0][0] % count:
                return None
            n, stride, axis = group[0]
            group = (*([(n // count, stride, axis)] if n > count else []), *group[1:])
        out.append(group)
    return tuple(out)


def new_shape(shape: Sequence[int], params: Mapping[str, EqnParam]) -> tuple[int, ...] | None:
    """The shape that `reshape`, `squeeze` or `broadcast_in_dim` gives a tensor.

    Args:
      shape: the shape of the tensor.
      params: the parameters of the primitive.

    Returns:
      The new shape, or None if the operation also reorders, repeats or shards elements.
    """
    if params.get("sharding") is not None:
        return None
    if "new_sizes" in params:
        return None if params["dimensions"] is not None else tuple(params["new_sizes"])
    if "shape" not in params:
        return tuple(n for i, n in enumerate(shape) if i not in params["dimensions"])
    old = dict(zip(params["broadcast_dimensions"], shape, strict=True))
    repeats = any(n != old.get(i, 1) for i, n in enumerate(params["shape"]))
    return None if repeats else tuple(params["shape"])


def reshaped(axes: Axes, new: Sequence[int]) -> Axes | None:
    """The axes of a tensor of another shape with the same elements in the same order.

    None if this would cut a factor unevenly, and for empty or symbolic shapes.
    """
    left = [f for group in axes for f in group]
    if any(export.is_symbolic_dim(n) for n in new) or 0 in new or 0 in shape(axes):
        return None
    out = []
    for size in new:
        group: list[Factor] = []
        while size > 1:
            n, stride, axis = left.pop(0)
            taken = math.gcd(n, size)
            if taken not in (n, size):
                return None
            group.append((taken, stride * (n // taken), axis))
            if taken < n:
                left.insert(0, (n // taken, stride, axis))
            size //= taken
        out.append(_merged(group))
    return tuple(out)


def pieces(
    shape: Sequence[int], axis: int, sizes: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The start and limit indices of each part of a tensor that is split along an axis."""
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        starts, limits = [0] * len(shape), list(shape)
        starts[axis], limits[axis] = end - size, end
        yield starts, limits


def are_mixed(axes: Axes) -> bool:
    """Whether an axis of the tensor has factors of several axes of the matrix."""
    return any(len({f[2] for f in group}) > 1 for group in axes)


def _merged(group: Sequence[Factor]) -> Group:
    """Merges neighboring factors that are contiguous in the matrix."""
    out: list[Factor] = []
    for n, stride, axis in group:
        if out and out[-1][1:] == (n * stride, axis):
            out[-1] = (out[-1][0] * n, stride, axis)
        else:
            out.append((n, stride, axis))
    return tuple(out)


def takes_whole_rows(w: Array, ids: Array, params: EqnParam) -> bool:
    """Whether a `gather` takes rows of one matrix, as an embedding does: `ids` are `[..., 1]`."""
    numbers = params["dimension_numbers"]
    whole_rows = w.ndim == 2 and tuple(params["slice_sizes"]) == (1, w.shape[1])
    taken = (numbers.collapsed_slice_dims, numbers.start_index_map) == ((0,), (0,))
    last = tuple(numbers.offset_dims) == (ids.ndim - 1,)
    return whole_rows and taken and last and not numbers.operand_batching_dims


def filled_outside(rows: jax.Array, w: Array, ids: jax.Array, params: EqnParam) -> jax.Array:
    """The rows that a `gather` took; if its mode says so, filled for indices out of bounds."""
    if params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return rows
    fill_value = jnp.nan if params["fill_value"] is None else params["fill_value"]
    return jnp.where((ids >= 0) & (ids < w.shape[0]), rows, fill_value)
