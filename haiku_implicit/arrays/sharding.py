"""Rules for where arrays lie: leaf by leaf, as each type's `partition_spec` says."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from haiku_implicit.core.array import ArrayValue, ImplicitArray, is_implicit
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.dispatch import primitive_handler

# Places that are the same for arrays of any rank.
_PLACES: tuple[type, ...] = (type(None), jax.Device, SingleDeviceSharding)
if hasattr(jax, "memory"):  # from JAX 0.8 on: the host's memory and the device's
    _PLACES += (jax.memory.Space,)


def _leaf_places(x: Any, place: Any) -> Any:
    """Where each leaf of `x` goes when the dense array is to go to `place`."""
    leaves = jax.tree.leaves(x)
    if isinstance(place, _PLACES):
        return [place] * len(leaves)
    if not isinstance(place, NamedSharding):
        return NotImplemented
    specs = x.partition_spec(place.spec, place.mesh)
    if specs is NotImplemented:
        return NotImplemented
    specs = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return [NamedSharding(place.mesh, s, memory_kind=place.memory_kind) for s in specs]


@primitive_handler("sharding_constraint")
def constrain(
    primitive: Primitive,
    x: ImplicitArray,
    *,
    sharding: Any,
    layout: Any = None,
    unconstrained_dims: Any = (),
    **params: Any,
) -> Any:
    """`jax.lax.with_sharding_constraint`: the same split, of the leaves."""
    places = _leaf_places(x, sharding)
    if places is NotImplemented or layout is not None or unconstrained_dims:
        return NotImplemented
    leaves, treedef = jax.tree_util.tree_flatten(x)
    constrained = map(jax.lax.with_sharding_constraint, leaves, places)
    return jax.tree_util.tree_unflatten(treedef, constrained)


@primitive_handler("device_put")
def put(primitive: Primitive, *operands: ArrayValue, devices: Any, **params: Any) -> Any:
    """`jax.device_put` to a device, a memory, or the shards of a mesh."""
    leaves: list[Any] = []
    expanded: dict[str, list[Any]] = {name: [] for name in ("devices", *params)}
    for i, (x, place) in enumerate(zip(operands, devices, strict=True)):
        places = _leaf_places(x, place) if is_implicit(x) else [place]
        if places is NotImplemented:
            return NotImplemented
        own = jax.tree.leaves(x)
        leaves += own
        expanded["devices"] += places
        for name, values in params.items():  # one value for each operand
            expanded[name] += [values[i]] * len(own)
    out = primitive.bind(*leaves, **{name: tuple(v) for name, v in expanded.items()})
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(list(operands)), out)
