"""Rules for the batch axes of every type that has them (`core_ndim`): they act leaf by leaf.

Each leaf of such a type has the batch axes first and axes of its own behind them. What slices,
joins or reorders batch axes alone does the same to each leaf. Where the axes of the tensor itself
are touched, the rules here leave the case to the type's own, or to materialization.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import ImplicitArray, flatten_one_level, num_batch_axes
from haiku_implicit.core.dispatch import primitive_handler


def _map(fun: Callable[..., Any], shape: Sequence[int], *operands: ImplicitArray) -> Any:
    """`fun` of each leaf (of all operands); an explicit shape, where there is one, follows."""
    split = [flatten_one_level(x) for x in operands]
    new = split[0][1].unflatten([fun(*xs) for xs in zip(*(own for own, _ in split), strict=True)])
    return new if new.__dict__.get("_shape") is None else new._replace(shape=tuple(shape))


def _core(x: ImplicitArray) -> tuple[int, ...]:
    """The axes that are not batch axes."""
    return tuple(range(num_batch_axes(x), x.ndim))


def _own_shape(leaf: Any, n: int) -> tuple[int, ...]:
    """The shape of a leaf without its `n` batch axes."""
    return np.shape(leaf)[n:]


def _alike(operands: Sequence[ImplicitArray]) -> bool:
    """Whether arrays agree in type, metadata, and dtypes and shapes of leaves behind batch axes."""

    def kind(x: ImplicitArray) -> Any:
        leaves, treedef = flatten_one_level(x._replace(shape=None, dtype=x.dtype))
        n = num_batch_axes(x)
        return treedef, [(_own_shape(y, n), jnp.result_type(y)) for y in leaves]

    return all(kind(x) == kind(operands[0]) for x in operands[1:])


# --- slicing -------------------------------------------------------------------------------------


@primitive_handler("slice")
def slice_batch(
    primitive: Any,
    x: ImplicitArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> Any:
    """`w[1:3]` of batch axes."""
    strides = strides or (1,) * x.ndim
    cuts = list(zip(start_indices, limit_indices, strides, strict=True))
    n = num_batch_axes(x)
    if not n or any(cuts[i] != (0, x.shape[i], 1) for i in _core(x)):
        return NotImplemented

    def cut(leaf: Any) -> jax.Array:
        own = [(0, size, 1) for size in _own_shape(leaf, n)]
        start, limit, step = zip(*cuts[:n], *own, strict=True)
        return primitive.bind(leaf, start_indices=start, limit_indices=limit, strides=step)

    shape = [len(range(*cut)) for cut in cuts]
    return _map(cut, shape, x)


@primitive_handler("dynamic_slice")
def dynamic_slice_batch(
    primitive: Any, x: ImplicitArray, *starts: jax.Array, slice_sizes: Sequence[int], **params: Any
) -> Any:
    """`w[i]` of a batch axis, with `i` known at run time: a layer of a stack within a scan."""
    n = num_batch_axes(x)
    if not n or any(slice_sizes[i] != x.shape[i] for i in _core(x)):
        return NotImplemented

    def cut(leaf: Any) -> jax.Array:
        sizes = (*slice_sizes[:n], *_own_shape(leaf, n))
        at = _with_zeros(starts[:n], np.ndim(leaf))
        return primitive.bind(leaf, *at, slice_sizes=sizes, **params)

    return _map(cut, slice_sizes, x)


@primitive_handler("dynamic_update_slice")
def dynamic_update_batch(
    primitive: Any, x: ImplicitArray, update: ImplicitArray, *starts: jax.Array, **params: Any
) -> Any:
    """Some matrices of a batch replaced by others of the same kind."""
    n = num_batch_axes(x)
    core_changes = any(x.shape[i] != update.shape[i] for i in _core(x))
    if not n or num_batch_axes(update) != n or core_changes or not _alike([x, update]):
        return NotImplemented
    return _map(
        lambda leaf, new: primitive.bind(
            leaf, new, *_with_zeros(starts[:n], np.ndim(leaf)), **params
        ),
        x.shape,
        x,
        update,
    )


def _with_zeros(starts: Sequence[jax.Array], ndim: int) -> list[jax.Array]:
    return [*starts, *[jnp.zeros_like(starts[0])] * (ndim - len(starts))]


@primitive_handler("split")
def split_batch(
    primitive: Any, x: ImplicitArray, *, sizes: Sequence[int], axis: int, **params: Any
) -> Any:
    """`jnp.split` along a batch axis."""
    if axis >= num_batch_axes(x):
        return NotImplemented
    leaves, treedef = flatten_one_level(x)
    parts = zip(*(primitive.bind(y, sizes=sizes, axis=axis, **params) for y in leaves), strict=True)
    shapes = [[*x.shape[:axis], int(n), *x.shape[axis + 1 :]] for n in sizes]
    whole = [treedef.unflatten(part) for part in parts]
    return [_map(lambda leaf: leaf, shape, y) for shape, y in zip(shapes, whole, strict=True)]


def without_whole_axes(
    indices: jax.Array, numbers: Any, shape: Sequence[int], sizes: Sequence[int]
) -> tuple[jax.Array, Any]:
    """A gather (other than a filling one) without the indices of axes that it takes as a whole.

    Such an index is clamped to 0. A batched `dynamic_slice` is a gather that has one for every axis.
    """
    axes = numbers.start_index_map
    needed = [i for i, axis in enumerate(axes) if sizes[axis] != shape[axis]]
    if len(needed) == len(axes) or not needed:
        return indices, numbers
    kept = tuple(axes[i] for i in needed)
    return indices[..., jnp.array(needed)], numbers._replace(start_index_map=kept)


@primitive_handler("gather")
def gather_batch(
    primitive: Any,
    x: ImplicitArray,
    indices: jax.Array,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    """`w[ids]` along batch axes.

    Matrices that are out of bounds are to be NaN throughout, or what `fill_value` says. That is
    left to the types, but for those all of whose leaves are floating: leaves of NaN mean that.
    """
    filling = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    d, n, core = dimension_numbers, num_batch_axes(x), set(_core(x))
    if not filling:
        indices, d = without_whole_axes(indices, d, x.shape, slice_sizes)
    touched = {*d.collapsed_slice_dims, *d.operand_batching_dims, *d.start_index_map}
    if not n or touched & core or any(slice_sizes[i] != x.shape[i] for i in core):
        return NotImplemented
    if filling:
        leaves = flatten_one_level(x)[0]
        floating = all(jnp.issubdtype(y.dtype, np.floating) for y in leaves)
        if not leaves or not floating or not (fill_value is None or np.isnan(fill_value)):
            return NotImplemented
    of_batch = len(d.offset_dims) - len(core)
    lead = indices.ndim - 1 + of_batch
    if tuple(d.offset_dims[of_batch:]) != tuple(range(lead, lead + len(core))):
        return NotImplemented

    def take(leaf: Any) -> jax.Array:
        own = _own_shape(leaf, n)
        offsets = (*d.offset_dims[:of_batch], *range(lead, lead + len(own)))
        return primitive.bind(
            leaf,
            indices,
            dimension_numbers=d._replace(offset_dims=offsets),
            slice_sizes=(*slice_sizes[:n], *own),
            mode=mode,
            fill_value=fill_value,
            **params,
        )

    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    options = dict(dimension_numbers=d, slice_sizes=slice_sizes, mode=mode, fill_value=fill_value)
    out = jax.eval_shape(lambda y, i: primitive.bind(y, i, **options, **params), struct, indices)
    return _map(take, out.shape, x)


# --- joining -------------------------------------------------------------------------------------


@primitive_handler("concatenate")
def concatenate_batch(primitive: Any, *operands: ImplicitArray, dimension: int) -> Any:
    """Along a batch axis, arrays of one kind."""
    x = operands[0]
    if any(dimension >= num_batch_axes(y) for y in operands) or not _alike(operands):
        return NotImplemented
    shape = list(x.shape)
    shape[dimension] = sum(y.shape[dimension] for y in operands)
    return _map(lambda *leaves: primitive.bind(*leaves, dimension=dimension), shape, *operands)


@primitive_handler("select_n")
def select_one(primitive: Any, which: jax.Array, *cases: ImplicitArray) -> Any:
    """One of several arrays of one kind, as a whole."""
    if which.ndim or type(cases[0]).core_ndim is None or not _alike(cases):
        return NotImplemented
    return _map(lambda *leaves: primitive.bind(which, *leaves), cases[0].shape, *cases)


# --- the order and the number of batch axes ------------------------------------------------------


@primitive_handler("squeeze")
def squeeze_batch(
    primitive: Any, x: ImplicitArray, *, dimensions: Sequence[int], **params: Any
) -> Any:
    """Batch axes of length one, dropped."""
    if max(dimensions, default=0) >= num_batch_axes(x):
        return NotImplemented
    shape = [size for i, size in enumerate(x.shape) if i not in dimensions]
    return _map(lambda leaf: primitive.bind(leaf, dimensions=dimensions, **params), shape, x)


@primitive_handler("reshape")
def reshape_batch(
    primitive: Any,
    x: ImplicitArray,
    *,
    new_sizes: Sequence[int],
    dimensions: Any,
    sharding: Any = None,
) -> Any:
    """Batch axes merged, divided, added; the axes of the tensor itself stay the last ones."""
    core, n = type(x).core_ndim, num_batch_axes(x)
    if core is None or dimensions is not None or sharding is not None or core > len(new_sizes):
        return NotImplemented
    lead = tuple(new_sizes[: len(new_sizes) - core])
    own_stay = tuple(new_sizes[len(lead) :]) == x.shape[x.ndim - core :]
    if n != x.ndim - core or not own_stay or math.prod(lead) != math.prod(x.shape[:n]):
        return NotImplemented
    return _map(lambda leaf: jnp.reshape(leaf, (*lead, *_own_shape(leaf, n))), new_sizes, x)


@primitive_handler("broadcast_in_dim")
def broadcast_batch(
    primitive: Any,
    x: ImplicitArray,
    *,
    shape: Sequence[int],
    broadcast_dimensions: Sequence[int],
    sharding: Any = None,
    **params: Any,
) -> Any:
    """Batch axes added (`w[None]`, `jnp.expand_dims`) or repeated."""
    core, n = type(x).core_ndim, num_batch_axes(x)
    if core is None or sharding is not None or n != x.ndim - core:
        return NotImplemented
    lead = len(shape) - core
    places = tuple(broadcast_dimensions)
    if places[n:] != tuple(range(lead, len(shape))) or tuple(shape[lead:]) != x.shape[n:]:
        return NotImplemented

    def broadcast(leaf: Any) -> jax.Array:
        own = _own_shape(leaf, n)
        return primitive.bind(
            leaf,
            shape=(*shape[:lead], *own),
            broadcast_dimensions=(*places[:n], *range(lead, lead + len(own))),
            sharding=None,
            **params,
        )

    return _map(broadcast, shape, x)


@primitive_handler("transpose")
def transpose_batch(
    primitive: Any, x: ImplicitArray, *, permutation: Sequence[int], **params: Any
) -> Any:
    """Batch axes in another order."""
    n = num_batch_axes(x)
    if not n or tuple(permutation[n:]) != _core(x):
        return NotImplemented

    def reorder(leaf: Any) -> jax.Array:
        order = (*permutation[:n], *range(n, np.ndim(leaf)))
        return primitive.bind(leaf, permutation=order, **params)

    return _map(reorder, [x.shape[i] for i in permutation], x)


@primitive_handler("rev")
def reverse_batch(primitive: Any, x: ImplicitArray, *, dimensions: Sequence[int]) -> Any:
    """Batch axes reversed: the last layer first, a kernel's window turned around."""
    if max(dimensions, default=0) >= num_batch_axes(x):
        return NotImplemented
    return _map(lambda leaf: primitive.bind(leaf, dimensions=dimensions), x.shape, x)


_ALONE: dict[Any, Any] = {
    jax.lax.slice_p: slice_batch,
    jax.lax.dynamic_slice_p: dynamic_slice_batch,
    jax.lax.gather_p: gather_batch,
    jax.lax.squeeze_p: squeeze_batch,
    jax.lax.reshape_p: reshape_batch,
    jax.lax.broadcast_in_dim_p: broadcast_batch,
    jax.lax.transpose_p: transpose_batch,
    jax.lax.rev_p: reverse_batch,
    jax.lax.split_p: split_batch,
}


def on_batch_axes(primitive: Any, x: ImplicitArray, *others: Any, **params: Any) -> Any:
    """What the rules here do to one array, for a type's own rule to try first.

    `NotImplemented` where other axes are touched as well.
    """
    rule = _ALONE.get(primitive)
    return NotImplemented if rule is None else rule(primitive, x, *others, **params)


# --- primitives of newer versions of JAX ---------------------------------------------------------


def _existing(name: str) -> list[str]:
    return [name] if hasattr(jax.lax, f"{name}_p") else []


@primitive_handler(_existing("stack"))
def stack_batch(primitive: Any, *operands: ImplicitArray, axis: int, **params: Any) -> Any:
    """`jnp.stack` of arrays of one kind, into a new batch axis."""
    x = operands[0]
    core = type(x).core_ndim
    if core is None or axis > num_batch_axes(x) or not _alike(operands):
        return NotImplemented
    if num_batch_axes(x) != x.ndim - core:
        return NotImplemented
    shape = (*x.shape[:axis], len(operands), *x.shape[axis:])
    return _map(lambda *leaves: primitive.bind(*leaves, axis=axis, **params), shape, *operands)


@primitive_handler(_existing("unstack"))
def unstack_batch(primitive: Any, x: ImplicitArray, *, axis: int, **params: Any) -> Any:
    """`jnp.unstack` of a batch axis."""
    if axis >= num_batch_axes(x):
        return NotImplemented
    leaves, treedef = flatten_one_level(x)
    parts = zip(*(primitive.bind(leaf, axis=axis, **params) for leaf in leaves), strict=True)
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return [_map(lambda leaf: leaf, shape, treedef.unflatten(part)) for part in parts]


@primitive_handler(_existing("tile"))
def tile_batch(primitive: Any, x: ImplicitArray, *, reps: Sequence[int], **params: Any) -> Any:
    """Batch axes repeated."""
    n = num_batch_axes(x)
    if not n or len(reps) != x.ndim or any(reps[i] != 1 for i in _core(x)):
        return NotImplemented

    def tile(leaf: Any) -> jax.Array:
        own = (1,) * (np.ndim(leaf) - n)
        return primitive.bind(leaf, reps=(*reps[:n], *own), **params)

    return _map(tile, [size * r for size, r in zip(x.shape, reps, strict=True)], x)
