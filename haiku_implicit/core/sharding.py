"""Where arrays lie: the shardings of leaves, and meshes with explicit axes.

Shardings over explicit axes are a part of arrays' types. Products with codes cut axes into blocks and
groups, for which JAX has no sharding rule. So they leave explicit axes to XLA's partitioner, as if they
were of type `Auto`. Only the result is sharded explicitly, as the result of the dense product is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, dense_struct, is_implicit

# Places that are the same for arrays of any rank.
_PLACES: tuple[type, ...] = (type(None), jax.Device, SingleDeviceSharding)
if hasattr(jax, "memory"):  # from JAX 0.8 on: the host's memory and the device's
    _PLACES += (jax.memory.Space,)


def leaf_places(x: Any, place: Any) -> Any:
    """Where each leaf of an implicit array goes when the dense array is to go to a place.

    Args:
      x: an implicit array.
      place: a sharding, a device, a memory, or None.

    Returns:
      A list of places, or `NotImplemented` where the type's `partition_spec` returns that, and for a
      sharding of another kind.
    """
    leaves = jax.tree.leaves(x)
    if isinstance(place, _PLACES):
        return [place] * len(leaves)
    if not isinstance(place, NamedSharding):
        return NotImplemented
    specs = x.partition_spec(place.spec, place.mesh)
    if specs is NotImplemented:
        return NotImplemented
    specs = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    padded = (padded_spec(s, np.ndim(y)) for s, y in zip(specs, leaves, strict=True))
    kind = place.memory_kind
    return [NamedSharding(place.mesh, PartitionSpec(*s), memory_kind=kind) for s in padded]


def in_type(x: Any, sharding: Any) -> Any:
    """A dense array whose type has this sharding, if that is over explicit axes."""
    if not compat.is_explicit(sharding):
        return x
    wanted, own = padded_spec(sharding.spec, np.ndim(x)), compat.explicit_sharding(x)
    if own is not None and padded_spec(own.spec, np.ndim(x)) == wanted:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*wanted)))


def result_sharding(primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    """How the result of a primitive with dense operands is sharded over explicit mesh axes.

    Args:
      primitive: with one result.
      operands: its operands, some of them quantized.
      params: its parameters.

    Returns:
      A sharding, or None if neither an operand nor `out_sharding` is split over explicit axes.

    Raises:
      The error that JAX raises for dense operands if it can't tell how the result is sharded.
    """
    if not is_split([params.get("out_sharding"), operands]):
        return None
    bind = functools.partial(primitive.bind, **params)
    return jax.eval_shape(bind, *map(dense_struct, operands)).sharding


def is_split(tree: Any) -> bool:
    """Whether any of the arrays and shardings in a tree is split over explicit axes."""
    leaves = jax.tree.leaves(tree)
    found = (x if compat.is_explicit(x) else compat.explicit_sharding(x) for x in leaves)
    return any(entry is not None for s in found if s is not None for entry in s.spec)


def left_to_partitioner(fun: Callable[..., jax.Array], sharding: Any) -> Callable[..., jax.Array]:
    """The function with explicit mesh axes left to XLA, and with a result of this sharding."""
    mesh = sharding.mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in pairs if kind == AxisType.Explicit)
    return jax.sharding.auto_axes(fun, axes=axes, out_sharding=sharding)


def padded_spec(spec: Any, ndim: int) -> tuple[Any, ...]:
    """The entries of a partition spec, one for each axis."""
    return (*spec, *[None] * (ndim - len(spec)))


def num_parts(entry: Any, mesh: Any) -> int:
    """Into how many parts an axis is split, for its entry of a partition spec."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


def split_fields(x: ImplicitArray, mesh: Any, **specs: PartitionSpec) -> Any:
    """What `partition_spec` returns for an array, from a spec for each of its fields.

    All arrays in a field are split by the spec of the field, an implicit one as its type says.
    """

    def split(y: Any, spec: PartitionSpec) -> Any:
        return y.partition_spec(spec, mesh) if is_implicit(y) else spec

    found = {
        name: jax.tree.map(
            functools.partial(split, spec=spec), getattr(x, name), is_leaf=is_implicit
        )
        for name, spec in specs.items()
    }
    leaves = jax.tree.leaves(found, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return NotImplemented if any(s is NotImplemented for s in leaves) else x._replace(**found)
