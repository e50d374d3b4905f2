"""Primitives that place arrays: they act on the leaves, as the shardings of each type say.

They are not rules, because a rule is traced separately: `device_put` would do nothing there, and
the operands of `reshard` are not in the new mesh yet.
"""

import functools
from typing import Any

import jax

from haiku_implicit.core import compat
from haiku_implicit.core.array import flatten, is_implicit
from haiku_implicit.core.higher_order import Operands, handles
from haiku_implicit.core.interpreter import HIGHER_ORDER, densify
from haiku_implicit.core.sharding import leaf_places
from haiku_implicit.core.typing import Array, EqnParams, Primitive


@handles(jax.lax.sharding_constraint_p)
def constrain(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.lax.with_sharding_constraint` on the leaves, with shardings that match."""
    (x,) = operands
    leaves, treedef = flatten(x)
    places = leaf_places(x, params["sharding"])
    if places is NotImplemented or params.get("layout") is not None:
        x = densify(x, "sharding_constraint")
        return compat.bind(jax.lax.sharding_constraint_p, [x], params)
    return [treedef.unflatten(map(jax.lax.with_sharding_constraint, leaves, places))]


@handles(jax.lax.device_put_p)
def put(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.device_put` on the leaves: to a device, a memory, or the shards of a mesh."""
    values, leaves = [], []
    expanded: dict[str, list[Any]] = {name: [] for name in params}
    for i, (x, place) in enumerate(zip(operands, params["devices"], strict=True)):
        places = leaf_places(x, place) if is_implicit(x) else [place]
        if places is NotImplemented:
            x, places = densify(x, "device_put"), [place]
        values.append(x)
        own = jax.tree.leaves(x)
        leaves += own
        for name, given in params.items():  # one value for each operand
            expanded[name] += places if name == "devices" else [given[i]] * len(own)
    out = leaves
    if leaves:
        out = jax.lax.device_put_p.bind(*leaves, **{k: tuple(v) for k, v in expanded.items()})
    return list(jax.tree.unflatten(jax.tree.structure(values), out))


def _reshard(primitive: Primitive, operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.sharding.reshard` on the leaves, over explicit mesh axes."""
    (x,) = operands
    leaves, treedef = flatten(x)
    places = leaf_places(x, params["dst_sharding"])
    if places is NotImplemented:
        # Made dense in the mesh that it comes from, in which the equations before this one ran.
        with compat.within_mesh_of(x):
            x = densify(x, primitive.name)
        return [primitive.bind(x, **params)]
    pairs = zip(leaves, places, strict=True)
    new = [primitive.bind(leaf, **params | dict(dst_sharding=place)) for leaf, place in pairs]
    return [treedef.unflatten(new)]


for _primitive in compat.RESHARDS:
    HIGHER_ORDER[_primitive] = functools.partial(_reshard, _primitive)
