"""Rules for where arrays lie: leaf by leaf, as each type's `partition_spec` says."""

from typing import Any

import jax

from haiku_implicit.core.array import ArrayValue, ImplicitArray, is_implicit
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.sharding import leaf_places


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
    places = leaf_places(x, sharding)
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
        places = leaf_places(x, place) if is_implicit(x) else [place]
        if places is NotImplemented:
            return NotImplemented
        own = jax.tree.leaves(x)
        leaves += own
        expanded["devices"] += places
        for name, values in params.items():  # one value for each operand
            expanded[name] += [values[i]] * len(own)
    out = primitive.bind(*leaves, **{name: tuple(v) for name, v in expanded.items()})
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(list(operands)), out)
