"""Rules that act on the batch axes of every type with `core_ndim`, leaf by leaf.

Each leaf of such a type has the batch axes first, then its own axes. An operation that slices, joins
or reorders only batch axes applies to each leaf. Parameters with one entry per axis keep their entries
for the batch axes; for the leaf's own axes they get entries that leave an axis unchanged. If the
parameters have such entries for the array's other axes too, the operation touches only batch axes.
Otherwise the rules here leave the case to the type's own rules, or to materialization.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import (
    ImplicitArray,
    data_names,
    dense_struct,
    flatten_one_level,
    num_batch_axes,
)
from haiku_implicit.core.dispatch import named, primitive_handler, rules_for
from haiku_implicit.core.sharding import axis_names
from haiku_implicit.core.typing import Array, EqnParam, EqnParams, Primitive, Result

# Parameters with one entry per axis, by the entry that leaves an axis unchanged: a number, the length
# of the axis, or its position in the result.
_NUMBERS = {"start_indices": 0, "strides": 1, "reps": 1}
_LENGTHS = ("limit_indices", "slice_sizes", "new_sizes", "shape")
_PLACES = ("permutation", "broadcast_dimensions", "offset_dims")
_PER_AXIS = (*_NUMBERS, *_LENGTHS, *_PLACES)


def _own(leaf: Array, n: int) -> tuple[int, ...]:
    """The shape of a leaf without its `n` batch axes."""
    return np.shape(leaf)[n:]


def _params_of_leaf(params: EqnParams, own: Sequence[int], core: int, first: int) -> EqnParams:
    """The parameters of a primitive for one leaf.

    Args:
      params: the parameters for the array.
      own: the shape of the leaf without batch axes.
      core: the number of axes of the array that are not batch axes.
      first: the position of the first axis after the batch axes, in the result.
    """

    def adapted(name: str, entries: Sequence[int]) -> tuple[int, ...]:
        of_batch = entries[: max(len(entries) - core, 0)]
        if name in _PLACES:
            return (*of_batch, *range(first, first + len(own)))
        return (*of_batch, *(_NUMBERS.get(name, length) for length in own))

    return {k: adapted(k, v) if k in _PER_AXIS and v is not None else v for k, v in params.items()}


def _acts_on_batch(params: EqnParams, x: ImplicitArray, n: int, first: int) -> bool:
    """Whether the parameters leave all axes except the batch axes unchanged."""
    same = _params_of_leaf(params, x.shape[n:], x.ndim - n, first)
    return all(tuple(params[k]) == v for k, v in same.items() if k in _PER_AXIS and v is not None)


def _leafwise(
    primitive: Primitive,
    operands: Sequence[ImplicitArray],
    on_leaf: Callable[..., Any],
    result: Callable[[], Any],
) -> Array:
    """Applies `on_leaf` to each leaf (of all operands) and returns arrays like the first operand.

    Args:
      primitive: the primitive that is run.
      operands: arrays of one kind.
      on_leaf: the primitive on one leaf of each operand.
      result: gives the shapes of the results, to update explicit shapes.
    """
    split = [flatten_one_level(x) for x in operands]
    treedef = split[0][1]
    leaves = [on_leaf(*xs) for xs in zip(*(own for own, _ in split), strict=True)]
    several = primitive.multiple_results
    parts = zip(*leaves, strict=True) if several else [leaves]
    outs = [treedef.unflatten(own) for own in parts]
    if operands[0].__dict__.get("_shape") is not None:
        structs = result() if several else [result()]
        outs = [y._replace(shape=s.shape) for y, s in zip(outs, structs, strict=True)]
    return outs if several else outs[0]


def _result(primitive: Primitive, *operands: Array, **params: EqnParam) -> Callable[[], Any]:
    """A function that returns the structs of a primitive's results on dense operands."""
    bind = functools.partial(primitive.bind, **params)
    return lambda: jax.eval_shape(bind, *map(dense_struct, operands))


def _alike(operands: Sequence[ImplicitArray]) -> bool:
    """Whether arrays agree in type, metadata, and dtypes and shapes of leaves without batch axes."""

    def kind(x: ImplicitArray) -> Any:
        leaves, treedef = flatten_one_level(x._replace(shape=None, dtype=x.dtype))
        n = num_batch_axes(x)
        return treedef, [(_own(y, n), jnp.result_type(y)) for y in leaves]

    return all(kind(x) == kind(operands[0]) for x in operands[1:])


def _may_grow(x: ImplicitArray) -> bool:
    """Whether leaves can get new batch axes, and have all the batch axes of `x`."""
    core = x.core_ndim
    return core is not None and num_batch_axes(x) == x.ndim - core


# --- one array -----------------------------------------------------------------------------------


@primitive_handler(named("slice dynamic_slice transpose tile"))
def change_batch_axes(
    primitive: Primitive, x: ImplicitArray, *starts: jax.Array, **params: EqnParam
) -> Result:
    """Slices (`w[1:3]`, `w[i]`), reorders or repeats batch axes."""
    n = num_batch_axes(x)
    return _changed(primitive, x, starts, params, n) if n else NotImplemented


def _changed(
    primitive: Primitive,
    x: ImplicitArray,
    starts: Sequence[jax.Array],
    params: EqnParams,
    first: int,
) -> Result:
    """Applies a primitive to each leaf with the leaf's parameters, if it acts only on batch axes."""
    n = num_batch_axes(x)
    if not _acts_on_batch(params, x, n, first):
        return NotImplemented

    def change(leaf: Array) -> jax.Array:
        own = _params_of_leaf(params, _own(leaf, n), x.ndim - n, first)
        return primitive.bind(leaf, *_for_leaf(starts, n, leaf), **own)

    return _leafwise(primitive, [x], change, _result(primitive, x, *starts, **params))


def _for_leaf(starts: Sequence[jax.Array], n: int, leaf: Array) -> list[jax.Array]:
    """The starts of a dynamic slice of a leaf; empty for a primitive without starts."""
    return [*starts[:n], *[jnp.zeros_like(x) for x in starts[:1]] * (np.ndim(leaf) - n)]


@primitive_handler(named("squeeze rev split unstack"))
def act_along_batch_axes(primitive: Primitive, x: ImplicitArray, **params: EqnParam) -> Result:
    """Drops or reverses batch axes, or splits along one into several arrays."""
    axes = params["dimensions"] if "dimensions" in params else (params["axis"],)
    if max(axes, default=0) >= num_batch_axes(x):
        return NotImplemented
    on_leaf = functools.partial(primitive.bind, **params)
    return _leafwise(primitive, [x], on_leaf, _result(primitive, x, **params))


@primitive_handler(["reshape", "broadcast_in_dim"])
def reshape_batch_axes(primitive: Primitive, x: ImplicitArray, **params: EqnParam) -> Result:
    """Merges, divides, adds (`w[None]`) or repeats batch axes; the tensor's own axes stay last."""
    new = params["new_sizes" if primitive is jax.lax.reshape_p else "shape"]
    n = num_batch_axes(x)
    first = max(len(new) - (x.ndim - n), 0)
    elsewhere = params.get("dimensions") is not None or params.get("sharding") is not None
    if not _may_grow(x) or elsewhere:
        return NotImplemented
    # An empty tensor can be reshaped to any number of empty ones.
    if primitive is jax.lax.reshape_p and math.prod(new[:first]) != math.prod(x.shape[:n]):
        return NotImplemented
    return _changed(primitive, x, (), params, first)


def without_whole_axes(
    indices: jax.Array, numbers: EqnParam, shape: Sequence[int], sizes: Sequence[int]
) -> tuple[jax.Array, Any]:
    """The indices and dimension numbers of a gather without the indices of axes that it takes whole.

    Such an index is clamped to 0, unless the gather fills. A batched `dynamic_slice` is a gather with
    an index for every axis.
    """
    axes = numbers.start_index_map
    needed = [i for i, axis in enumerate(axes) if sizes[axis] != shape[axis]]
    if len(needed) == len(axes) or not needed:
        return indices, numbers
    kept = tuple(axes[i] for i in needed)
    return indices[..., jnp.array(needed)], numbers._replace(start_index_map=kept)


def with_renamed_axes(numbers: EqnParam, new: Mapping[int, int]) -> Any:
    """The dimension numbers of a gather from an operand whose axis `i` has become axis `new[i]`.

    The order of the axes of slices in the result does not change.
    """

    def renamed(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(new.get(i, i) for i in axes)

    return numbers._replace(
        collapsed_slice_dims=tuple(sorted(renamed(numbers.collapsed_slice_dims))),
        start_index_map=renamed(numbers.start_index_map),
        operand_batching_dims=renamed(numbers.operand_batching_dims),
    )


@primitive_handler("gather")
def gather_batch(
    primitive: Primitive, x: ImplicitArray, indices: jax.Array, **params: EqnParam
) -> Result:
    """Gathers along batch axes, as in `w[ids]`.

    A filling gather makes matrices that are out of bounds NaN, or `fill_value`. This rule handles only
    NaN, and only if all leaves are floating: leaves of NaN represent such a matrix.
    """
    d, sizes, n = params["dimension_numbers"], params["slice_sizes"], num_batch_axes(x)
    if params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        indices, d = without_whole_axes(indices, d, x.shape, sizes)
    elif not _filled_by_leaves(x, params["fill_value"]):
        return NotImplemented
    core = x.ndim - n
    first = indices.ndim - 1 + len(d.offset_dims) - core
    axes = dict(offset_dims=d.offset_dims, slice_sizes=sizes)
    touched = (*d.collapsed_slice_dims, *d.operand_batching_dims, *d.start_index_map)
    if not n or max(touched, default=0) >= n or not _acts_on_batch(axes, x, n, first):
        return NotImplemented

    def take(leaf: Array) -> jax.Array:
        own = _params_of_leaf(axes, _own(leaf, n), core, first)
        numbers = d._replace(offset_dims=own.pop("offset_dims"))
        return primitive.bind(leaf, indices, **params | own | dict(dimension_numbers=numbers))

    whole = params | dict(dimension_numbers=d)
    return _leafwise(primitive, [x], take, _result(primitive, x, indices, **whole))


def _filled_by_leaves(x: ImplicitArray, fill_value: EqnParam) -> bool:
    """Whether an array with leaves of NaN has the fill value throughout."""
    leaves = flatten_one_level(x)[0]
    floating = all(jnp.issubdtype(y.dtype, np.floating) for y in leaves)
    return bool(leaves) and floating and (fill_value is None or bool(np.isnan(fill_value)))


# --- types whose fields have axes of the tensor ------------------------------------------------------


def cut_fields(
    primitive: Primitive, x: ImplicitArray, starts: Sequence[jax.Array], params: EqnParams
) -> Result:
    """Runs `slice`, `dynamic_slice` or `split` on each field, along the axes in `field_axes`.

    For rules of types whose static metadata does not depend on lengths, and whose fields have each
    declared axis in full.
    """
    assert x.core_ndim is not None and x.field_axes is not None
    lead = range(x.ndim - x.core_ndim)
    places = dict(zip(axis_names(x.core_ndim), range(len(lead), x.ndim), strict=True))
    fields = {}
    for name in data_names(type(x)):
        axes = [*lead, *(places.get(letter) for letter in x.field_axes.get(name, ""))]
        fields[name] = _cut_field(primitive, getattr(x, name), axes, starts, params)
    if not primitive.multiple_results:
        return x._replace(**fields, shape=None)
    parts = zip(*fields.values(), strict=True)
    return [x._replace(**dict(zip(fields, part, strict=True)), shape=None) for part in parts]


def leaves_whole(x: ImplicitArray, axis: int, params: EqnParams) -> bool:
    """Whether `slice`, `dynamic_slice` or `split` with these parameters leaves an axis as it is."""
    if "axis" in params:
        return bool(params["axis"] != axis)
    sizes = params.get("slice_sizes") or params["limit_indices"]
    steps = params.get("strides") or (1,) * x.ndim
    begins = params.get("start_indices", (0,) * x.ndim)
    return bool((begins[axis], sizes[axis], steps[axis]) == (0, x.shape[axis], 1))


def _cut_field(
    primitive: Primitive,
    y: Array,
    axes: Sequence[int | None],
    starts: Sequence[jax.Array],
    params: EqnParams,
) -> Any:
    """The part of a field, or its parts, for a field with these axes of the array (None: its own)."""
    if "axis" in params:
        if y is None or params["axis"] not in axes:
            return [y] * len(params["sizes"])
        return primitive.bind(y, **params | dict(axis=axes.index(params["axis"])))
    if y is None or not axes:
        return y
    own = {
        name: entries
        and tuple(
            _NUMBERS.get(name, length) if axis is None else entries[axis]
            for axis, length in zip(axes, np.shape(y), strict=True)
        )
        for name, entries in params.items()
    }
    at = [starts[i] if i is not None else jnp.zeros_like(starts[-1]) for i in axes if starts]
    return primitive.bind(y, *at, **own)


# --- several arrays of one kind ------------------------------------------------------------------


@primitive_handler("concatenate")
def concatenate_batch(primitive: Primitive, *operands: ImplicitArray, dimension: int) -> Result:
    """Concatenates arrays along a batch axis."""
    if any(dimension >= num_batch_axes(y) for y in operands) or not _alike(operands):
        return NotImplemented
    on_leaves = functools.partial(primitive.bind, dimension=dimension)
    out = _result(primitive, *operands, dimension=dimension)
    return _leafwise(primitive, operands, on_leaves, out)


@primitive_handler(named("stack"))
def stack_batch(
    primitive: Primitive, *operands: ImplicitArray, axis: int, **params: EqnParam
) -> Result:
    """Stacks arrays along a new batch axis."""
    x = operands[0]
    if not _may_grow(x) or axis > num_batch_axes(x) or not _alike(operands):
        return NotImplemented
    on_leaves = functools.partial(primitive.bind, axis=axis, **params)
    out = _result(primitive, *operands, axis=axis, **params)
    return _leafwise(primitive, operands, on_leaves, out)


@primitive_handler("dynamic_update_slice")
def dynamic_update_batch(
    primitive: Primitive,
    x: ImplicitArray,
    update: ImplicitArray,
    *starts: jax.Array,
    **params: EqnParam,
) -> Result:
    """Replaces some matrices of a batch."""
    n = num_batch_axes(x)
    core_changes = x.shape[n:] != update.shape[n:]
    if not n or num_batch_axes(update) != n or core_changes or not _alike([x, update]):
        return NotImplemented

    def write(leaf: Array, new: Array) -> jax.Array:
        return primitive.bind(leaf, new, *_for_leaf(starts, n, leaf), **params)

    return _leafwise(primitive, [x, update], write, lambda: x)


@primitive_handler("select_n")
def select_one(primitive: Primitive, which: jax.Array, *cases: ImplicitArray) -> Result:
    """Selects one of several arrays as a whole."""
    if which.ndim or cases[0].core_ndim is None or not _alike(cases):
        return NotImplemented
    on_leaves = functools.partial(primitive.bind, which)
    return _leafwise(primitive, cases, on_leaves, lambda: cases[0])


def on_batch_axes(
    primitive: Primitive, x: ImplicitArray, *others: Array, **params: EqnParam
) -> Result:
    """Applies the rules of every type to one array, for a type's own rule to try first.

    Returns `NotImplemented` if the primitive touches other axes as well.
    """
    for rule, _ in rules_for(primitive, (ImplicitArray, *[jax.Array] * len(others))):
        out = rule(primitive, x, *others, **params)
        if out is not NotImplemented:
            return out
    return NotImplemented
