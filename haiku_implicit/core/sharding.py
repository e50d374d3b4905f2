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
    is_implicit,
)

# Types of places that apply to arrays of any rank.
_PLACES: tuple[type, ...] = (type(None), jax.Device, SingleDeviceSharding)
if hasattr(jax, "memory"):  # from JAX 0.8 on: the host's memory and the device's
    _PLACES += (jax.memory.Space,)


def leaf_places(x: Any, place: Any) -> Any:
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


def leaf_specs(x: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """Returns the specs of an implicit array's leaves, for XLA to keep the dense array split by `spec`.

    They come from the type's `placement_spec`, or else from its `field_specs`, without the entries that
    do not cut an axis evenly.

    Args:
      x: an implicit array.
      spec: the spec of the dense array.
      mesh: the mesh whose axes it names.

    Returns:
      A list of specs, or `NotImplemented` if no leaf would be split.
    """
    found = x.placement_spec(spec, mesh)
    if found is not NotImplemented:
        return jax.tree.leaves(found, is_leaf=is_spec)
    fields = x.field_specs(spec, mesh)
    specs: list[PartitionSpec] = []
    for name in data_names(type(x)):
        own = fields.get(name, PartitionSpec())
        for y in jax.tree.leaves(getattr(x, name), is_leaf=is_implicit):
            lies = leaf_specs(y, own, mesh) if is_implicit(y) else [fitting(own, np.shape(y), mesh)]
            whole = [PartitionSpec()] * len(jax.tree.leaves(y))
            specs += whole if lies is NotImplemented else lies
    return specs if any(map(names_in, specs)) else NotImplemented


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


def fitting(spec: Any, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Returns the spec without the entries that don't cut their axes evenly."""
    pairs = zip(padded_spec(spec, len(shape)), shape, strict=True)
    return PartitionSpec(*(None if n % num_parts(entry, mesh) else entry for entry, n in pairs))


def in_type(x: Any, sharding: Any) -> Any:
    """Returns a dense array with this sharding in its type, if the sharding is over explicit axes."""
    if not compat.is_explicit(sharding):
        return x
    wanted, own = padded_spec(sharding.spec, np.ndim(x)), compat.explicit_sharding(x)
    if own is not None and padded_spec(own.spec, np.ndim(x)) == wanted:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*wanted)))


def mapped_first(operands: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Moves the mapped axis of a batching rule's operands first, and repeats the others along it.

    If the axis is split over an explicit mesh axis, it is split in all operands, as it is in the type
    of the result for dense operands.
    """
    pairs = list(zip(operands, dims, strict=True))
    moved = [None if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
    like = next(y for y in moved if y is not None)
    return [_repeated(x, like) if y is None else y for x, y in zip(operands, moved, strict=True)]


def _repeated(x: Any, like: Any) -> Any:
    """Repeats an array along a new first axis, which is split like the first axis of `like`."""
    y = jnp.broadcast_to(x, (like.shape[0], *np.shape(x)))
    of_like, own = compat.explicit_sharding(like), compat.explicit_sharding(x)
    if of_like is None:
        return y
    first, *_ = padded_spec(of_like.spec, like.ndim)
    others = padded_spec(PartitionSpec() if own is None else own.spec, np.ndim(x))
    return in_type(y, NamedSharding(of_like.mesh, PartitionSpec(first, *others)))


def result_sharding(primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
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


def is_split(tree: Any) -> bool:
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


def padded_spec(spec: Any, ndim: int) -> tuple[Any, ...]:
    """The entries of a partition spec, one for each axis."""
    return (*spec, *[None] * (ndim - len(spec)))


def num_parts(entry: Any, mesh: Any) -> int:
    """The number of parts of an axis with this entry of a partition spec."""
    names = names_in(PartitionSpec(entry))  # empty for `PartitionSpec.UNCONSTRAINED`
    return math.prod(mesh.shape[name] for name in names)


def split_fields(x: ImplicitArray, mesh: Any, **specs: PartitionSpec) -> Any:
    """Makes the result of `partition_spec` for an array, from a spec for each of its fields.

    A field's spec applies to all arrays in it. An implicit one is split by its own `partition_spec`.
    """

    def split(y: Any, spec: PartitionSpec) -> Any:
        return y.partition_spec(spec, mesh) if is_implicit(y) else spec

    found = {
        name: jax.tree.map(
            functools.partial(split, spec=spec), getattr(x, name), is_leaf=is_implicit
        )
        for name, spec in specs.items()
    }
    leaves = jax.tree.leaves(found, is_leaf=is_spec)
    return NotImplemented if any(s is NotImplemented for s in leaves) else x._replace(**found)
