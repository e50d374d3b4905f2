"""Shardings of leaves, and meshes with explicit axes.

Shardings over explicit axes are a part of arrays' types. Products with codes cut axes into blocks and
groups, for which JAX lacks a sharding rule. So they leave explicit axes to XLA's partitioner, as if
they were of type `Auto`. Only the result is sharded explicitly, like the result of the dense product.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from haiku_implicit.core import compat
from haiku_implicit.core.array import (
    ImplicitArray,
    data_names,
    dense_struct,
    flatten_one_level,
    is_implicit,
    same_struct,
)
from haiku_implicit.core.typing import Array, EqnParams, MeshLike, Primitive, Tree

# Types of places that apply to arrays of any rank.
_PLACES: tuple[type, ...] = (type(None), jax.Device, SingleDeviceSharding)
if hasattr(jax, "memory"):  # from JAX 0.8 on: the host's memory and the device's
    _PLACES += (jax.memory.Space,)


def leaf_places(x: Array, place: Any) -> Any:
    """Returns the place of each leaf of an implicit array, for a place of the dense array.

    Args:
      x: an implicit array.
      place: a sharding, a device, a memory, or None.

    Returns:
      A list of places, or `NotImplemented` if the type can't be split, and for a sharding other than a
      `NamedSharding`.
    """
    leaves = jax.tree.leaves(x)
    if isinstance(place, _PLACES):
        return [place] * len(leaves)
    if not isinstance(place, NamedSharding):
        return NotImplemented
    specs = leaf_specs(x, place.spec, place.mesh)
    if specs is NotImplemented:
        return NotImplemented
    padded = (padded_spec(s, np.ndim(y)) for s, y in zip(specs, leaves, strict=True))
    kind = place.memory_kind
    return [NamedSharding(place.mesh, PartitionSpec(*s), memory_kind=kind) for s in padded]


def leaf_specs(x: Array, spec: PartitionSpec, mesh: MeshLike) -> Any:
    """Returns the specs of an implicit array's leaves, for XLA to keep the dense array split by `spec`.

    XLA computes with whole arrays, so a shard need not be an array of the type: each leaf is split
    along each axis that can be cut evenly.

    Args:
      x: an implicit array.
      spec: the spec of the dense array.
      mesh: the mesh whose axes it names.

    Returns:
      A list of specs, or `NotImplemented` if no leaf would be split.
    """
    found = shard_specs(x, spec, mesh)
    if found is not NotImplemented:
        return jax.tree.leaves(found, is_leaf=is_spec)
    if x.as_part(_counts(spec, x.ndim, mesh)) is NotImplemented:
        return NotImplemented

    parts = _with_specs(x, functools.partial(part_specs, mesh=mesh), spec, mesh)
    specs = jax.tree.leaves(parts, is_leaf=is_spec)
    return specs if any(map(names_in, specs)) or _has_shards(x) else NotImplemented


def part_specs(x: Array, own: PartitionSpec, mesh: MeshLike) -> Any:
    """Returns the spec of a dense part of an array, or its leaves' specs: whole if it can't be cut."""
    if not is_implicit(x):
        return fitting(own, np.shape(x), mesh)
    found = leaf_specs(x, own, mesh)
    return [PartitionSpec()] * len(jax.tree.leaves(x)) if found is NotImplemented else found


def shard_specs(x: Array, spec: PartitionSpec, mesh: MeshLike) -> Any:
    """Returns how leaves are split so that each device has a shard of the type, as in `jax.shard_map`.

    Args:
      x: an implicit array.
      spec: the spec of the dense array.
      mesh: the mesh whose axes it names.

    Returns:
      A tree like the shard of this array on one device, with a `PartitionSpec` for each leaf. Its
      static metadata, such as an explicit shape, describes the shard. Or `NotImplemented` if the type
      can't be split like this.
    """
    if all(entry is None for entry in spec):
        return jax.tree.map(lambda _: PartitionSpec(), x)
    if not _has_shards(x):
        return NotImplemented

    def of_part(y: Array, own: PartitionSpec) -> Any:
        if is_implicit(y):
            return shard_specs(y, own, mesh)
        return NotImplemented if _shard_shape(np.shape(y), own, mesh) is None else own

    found = _with_specs(x, of_part, spec, mesh).as_part(_counts(spec, x.ndim, mesh))
    specs, treedef = jax.tree.flatten(found, is_leaf=is_spec)
    if any(s is NotImplemented for s in specs):
        return NotImplemented
    pairs = zip(jax.tree.leaves(x), specs, strict=True)
    local = [
        jax.ShapeDtypeStruct(_shard_shape(np.shape(y), own, mesh), jnp.result_type(y))
        for y, own in pairs
    ]
    is_part = jax.tree.unflatten(treedef, local).shape == _shard_shape(x.shape, spec, mesh)
    return found if is_part else NotImplemented


def fitted(x: ImplicitArray, spec: PartitionSpec, mesh: MeshLike) -> Any:
    """Returns the same values in a form that `shard_specs` can split; if it has none, the array."""
    if shard_specs(x, spec, mesh) is not NotImplemented:
        return x
    counts = _counts(spec, x.ndim, mesh)
    new = x.divided(counts)
    if new is not NotImplemented:
        return x if shard_specs(new, spec, mesh) is NotImplemented else new
    if x.as_part(counts) is NotImplemented:
        return x
    specs = field_specs(x, spec, mesh)
    old = {name: getattr(x, name) for name in data_names(type(x))}
    fields = {k: fitted(y, specs[k], mesh) for k, y in old.items() if is_implicit(y)}
    return x._replace(**fields) if any(y is not old[k] for k, y in fields.items()) else x


def field_specs(x: ImplicitArray, spec: PartitionSpec, mesh: MeshLike) -> dict[str, PartitionSpec]:
    """Returns the spec of each field, by the axes that the type declares (`field_axes`).

    Fields of a type that is not separable are split over explicit axes only if they are like the array:
    JAX does not have a rule for sums over axes by which both operands are split, as they may need.
    """
    entries = padded_spec(spec, x.ndim)
    core = x.ndim if x.core_ndim is None else min(x.core_ndim, x.ndim)
    lead, own = entries[: x.ndim - core], entries[x.ndim - core :]
    names = dict(zip(axis_names(core), own, strict=True))

    def of_axis(letter: str, length: int) -> Any:
        entry = names.get(letter.lower())
        shared = letter.isupper() and length == 1 and num_shards(entry, mesh) > 1
        return None if shared else entry

    def of_field(y: Array, letters: str) -> PartitionSpec:
        lengths = np.shape(y)[-len(letters) :] or [0] * len(letters)
        return PartitionSpec(*lead, *map(of_axis, letters, lengths))

    rest = PartitionSpec(*lead) if _is_declared(x) else PartitionSpec()
    fields = ((name, getattr(x, name)) for name in data_names(type(x)))
    found = {name: spec if same_struct(y, x) else rest for name, y in fields}
    if not x.separable and AxisType.Explicit in mesh.axis_types:
        return found
    axes = x.field_axes or {}
    return found | {name: of_field(getattr(x, name), own) for name, own in axes.items()}


def axis_names(count: int) -> str:
    """The letters of a tensor's last axes in `ImplicitArray.field_axes`: 'nm' for two axes."""
    letters = "abcdefghijklnm"
    return letters[len(letters) - count :]


def _with_specs(
    x: ImplicitArray, of: Callable[..., Any], spec: PartitionSpec, mesh: MeshLike
) -> Any:
    """Replaces by `of(y, own)` each array `y` in a field with the spec `own`."""
    fields = {
        name: jax.tree.map(functools.partial(of, own=own), getattr(x, name), is_leaf=is_implicit)
        for name, own in field_specs(x, spec, mesh).items()
    }
    return x._replace(**fields)


def _is_declared(x: ImplicitArray) -> bool:
    return x.separable and x.field_axes is not None


def _has_shards(x: ImplicitArray) -> bool:
    """Whether a type, and each type in it, declares that shards of fields are a shard of the array."""
    nested = filter(is_implicit, flatten_one_level(x)[0])
    return _is_declared(x) and all(map(_has_shards, nested))


def is_spec(x: Any) -> bool:
    """Whether `x` is the spec of one array."""
    return isinstance(x, PartitionSpec)


def names_in(spec: PartitionSpec) -> list[str]:
    """The mesh axes that a spec names."""
    return [name for entry in spec for name in names_in_entry(entry)]


def names_in_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes in an entry of a spec, which splits one array axis."""
    entries = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in entries if isinstance(name, str))


def fitting(spec: PartitionSpec, shape: Sequence[int], mesh: MeshLike) -> PartitionSpec:
    """Returns the spec without the entries that don't cut their axes evenly."""
    pairs = zip(padded_spec(spec, len(shape)), shape, strict=True)
    return PartitionSpec(*(None if n % num_shards(entry, mesh) else entry for entry, n in pairs))


def in_type(x: Array, sharding: Any) -> Array:
    """Returns a dense array with this sharding in its type, if the sharding is over explicit axes."""
    if not compat.is_explicit(sharding):
        return x
    wanted, own = padded_spec(sharding.spec, np.ndim(x)), compat.explicit_sharding(x)
    if own is not None and padded_spec(own.spec, np.ndim(x)) == wanted:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*wanted)))


def mapped_first(operands: Sequence[Array], dims: Sequence[int | None]) -> list[Array]:
    """Moves the mapped axis of a batching rule's operands first, and repeats the others along it.

    If the axis is split over an explicit mesh axis, it is split in all operands, as it is in the type
    of the result for dense operands.
    """
    pairs = list(zip(operands, dims, strict=True))
    moved = [None if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
    like = next(y for y in moved if y is not None)
    return [_repeated(x, like) if y is None else y for x, y in zip(operands, moved, strict=True)]


def _repeated(x: Array, like: Array) -> Array:
    """Repeats an array along a new first axis, which is split like the first axis of `like`."""
    y = jnp.broadcast_to(x, (like.shape[0], *np.shape(x)))
    of_like, own = compat.explicit_sharding(like), compat.explicit_sharding(x)
    if of_like is None:
        return y
    first, *_ = padded_spec(of_like.spec, like.ndim)
    others = padded_spec(PartitionSpec() if own is None else own.spec, np.ndim(x))
    return in_type(y, NamedSharding(of_like.mesh, PartitionSpec(first, *others)))


def result_sharding(primitive: Primitive, operands: Sequence[Array], params: EqnParams) -> Any:
    """Returns the sharding over explicit mesh axes of a primitive's result for dense operands.

    Args:
      primitive: a primitive with one result.
      operands: its operands, some of them quantized.
      params: its parameters.

    Returns:
      A sharding, or None if neither an operand nor `out_sharding` is split over explicit axes.

    Raises:
      The error that JAX raises for dense operands if the sharding of the result is ambiguous.
    """
    if not is_split([params.get("out_sharding"), operands]):
        return None
    bind = functools.partial(primitive.bind, **params)
    return compat.sharding_of_result(bind, *map(dense_struct, operands))


def is_split(tree: Tree) -> bool:
    """Whether any of the arrays and shardings in a tree is split over explicit axes."""
    leaves = jax.tree.leaves(tree)
    found = (x if compat.is_explicit(x) else compat.explicit_sharding(x) for x in leaves)
    return any(entry is not None for s in found if s is not None for entry in s.spec)


def left_to_partitioner(fun: Callable[..., jax.Array], sharding: Any) -> Callable[..., jax.Array]:
    """Wraps a function to leave explicit mesh axes to XLA, and to return a result of this sharding."""
    mesh = sharding.mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in pairs if kind == AxisType.Explicit)
    new = jax.sharding.auto_axes(fun, axes=axes, out_sharding=sharding)
    if AxisType.Manual not in mesh.axis_types:
        return new
    # Residuals of a backward pass leave the `shard_map`, and come back with explicit axes. So they must
    # not be values that were left to XLA: only the operands are saved.
    return jax.checkpoint(new)


def padded_spec(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    """The entries of a partition spec, one for each axis."""
    return (*spec, *[None] * (ndim - len(spec)))


def num_shards(entry: Any, mesh: Any) -> int:
    """The number of shards of an axis with this entry of a partition spec."""
    names = names_in(PartitionSpec(entry))  # empty for `PartitionSpec.UNCONSTRAINED`
    return math.prod(mesh.shape[name] for name in names)


def _counts(spec: PartitionSpec, ndim: int, mesh: MeshLike) -> list[int]:
    """The number of shards along each axis."""
    return [num_shards(entry, mesh) for entry in padded_spec(spec, ndim)]


def _shard_shape(
    shape: Sequence[int], spec: PartitionSpec, mesh: MeshLike
) -> tuple[int, ...] | None:
    """The shape of one shard of an array; None if an axis can't be cut evenly."""
    pairs = list(zip(shape, _counts(spec, len(shape), mesh), strict=True))
    return None if any(n % count for n, count in pairs) else tuple(n // count for n, count in pairs)
