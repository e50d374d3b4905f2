"""Primitives that place arrays, and `jax.shard_map`: they act on leaves, as each type's shardings say.

They are not rules, because a rule is traced separately: `device_put` would do nothing there, and
the operands of `reshard` are not in the new mesh yet.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from haiku_implicit.core import compat
from haiku_implicit.core import materialization as events
from haiku_implicit.core.array import ImplicitArray, dense_struct, flatten, is_implicit
from haiku_implicit.core.higher_order import Operands, handles
from haiku_implicit.core.interpreter import HIGHER_ORDER, densify, interpret, materialize_array
from haiku_implicit.core.sharding import (
    fitted,
    in_type,
    is_spec,
    leaf_places,
    names_in,
    names_in_entry,
    padded_spec,
    shard_specs,
)
from haiku_implicit.core.structure import same_dense
from haiku_implicit.core.typing import Array, EqnParams, MeshLike, Primitive


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


# --- shard_map ------------------------------------------------------------------------------------


@handles(compat.shard_map_p)
def shard_map(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.shard_map`: the type of an implicit operand says how it is split (`field_axes`).

    A result with the structure and the spec of an operand (a cache that is written) stays implicit.
    """
    mesh, jaxpr = params["mesh"], params["jaxpr"]
    split = [_split(x, s, mesh) for x, s in zip(operands, params["in_specs"], strict=True)]
    leaves = jax.tree.leaves([x for x, _ in split])
    specs_of, treedef = jax.tree.flatten([shard for _, shard in split], is_leaf=is_spec)

    def mapped(results: Callable[[list[Any], list[Any]], Any], out_specs: Any) -> Any:
        def body(*local: Array) -> Any:
            shards = jax.tree.unflatten(treedef, local)
            return results(shards, interpret(jaxpr, (), shards))

        if AxisType.Manual in mesh.axis_types:
            # Inside another `shard_map`, JAX can save operands for a backward pass, but no values that
            # are made here.
            body = jax.checkpoint(body)
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(specs_of),
            out_specs=out_specs,
            axis_names=compat.manual_axes(params),
            check_vma=params["check_vma"],
        )

    specs = list(params["out_specs"])
    pairs = [(x, jax.tree.leaves(shard, is_leaf=is_spec)) for x, shard in split]
    like = _results_like_operands(mapped, leaves, pairs, params)

    def results(_: Any, out: list[Array]) -> list[Any]:
        return [
            densify(y, "shard_map") if i is None else jax.tree.leaves(y)
            for i, y in zip(like, out, strict=True)
        ]

    out_specs = [s if i is None else pairs[i][1] for i, s in zip(like, specs, strict=True)]
    found = mapped(results, out_specs)(*leaves)
    return [
        y if i is None else jax.tree.unflatten(jax.tree.structure(pairs[i][0]), y)
        for i, y in zip(like, found, strict=True)
    ]


def _results_like_operands(
    mapped: Any, leaves: list[Array], pairs: list[Any], params: EqnParams
) -> list[int | None]:
    """For each result of a `shard_map`, the index of the implicit operand whose specs it shares.

    On each device, this operand has the type, the static metadata and the shapes of leaves of the
    result, and it is split by the same spec. None if no operand does: then the result becomes dense.
    """
    specs, mesh = list(params["out_specs"]), params["mesh"]
    candidates = [
        i
        for i, ((x, own), spec) in enumerate(zip(pairs, params["in_specs"], strict=True))
        if is_implicit(x) and spec in specs and _all_split(own, spec, mesh, params["check_vma"])
    ]
    like: list[int | None] = [None] * len(specs)
    if not candidates:
        return like

    def results(shards: list[Any], out: list[Array]) -> list[Any]:
        for k, y in enumerate(out):
            for i in candidates:
                if params["in_specs"][i] == specs[k] and _same_leaves(shards[i], y):
                    like[k] = i
        return [materialize_array(y) if is_implicit(y) else y for y in out]

    with events.recording():  # the body runs once more
        jax.eval_shape(mapped(results, specs), *leaves)
    return like


def _all_split(own: list[Any], spec: PartitionSpec, mesh: MeshLike, check_vma: bool) -> bool:
    """Whether each leaf is split over all mesh axes that the array is split over.

    A leaf that is not split may differ between devices in a result. JAX checks this for axes that no
    spec names, unless `check_vma` is False.
    """

    def axes(spec: PartitionSpec) -> set[str]:
        return {name for name in names_in(spec) if mesh.shape[name] > 1}

    everywhere = axes(spec) == {name for name, n in mesh.shape.items() if n > 1}
    return (check_vma or everywhere) and all(axes(s) == axes(spec) for s in own)


def _same_leaves(a: Array, b: Array) -> bool:
    (xs, of_a), (ys, of_b) = flatten(a), flatten(b)
    return of_a == of_b and all(map(same_dense, xs, ys))


def _split(x: Array, spec: PartitionSpec, mesh: MeshLike) -> tuple[Any, Any]:
    """Returns an operand in a form that can be split, and its shard on one device, with specs."""
    if not is_implicit(x):
        return x, spec
    x = fitted(_without_explicit_cuts(x, spec, mesh), spec, mesh)
    shard = shard_specs(x, spec, mesh)
    return (densify(x, "shard_map"), spec) if shard is NotImplemented else (x, shard)


def _without_explicit_cuts(x: ImplicitArray, spec: PartitionSpec, mesh: MeshLike) -> ImplicitArray:
    """Replicates an operand over explicit axes if they cannot split its shards again.

    These are axes that the `shard_map` does not map over; arrays in its body keep their splits by them.
    """
    explicit: Any = dense_struct(x).sharding
    if not compat.is_explicit(explicit):
        return x
    entries = [
        (*names_in_entry(own), *(n for n in names_in_entry(other) if n not in names_in(spec)))
        for own, other in zip(*(padded_spec(s, x.ndim) for s in (spec, explicit.spec)), strict=True)
    ]
    if shard_specs(x, PartitionSpec(*entries), mesh) is not NotImplemented:
        return x
    whole = NamedSharding(explicit.mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: in_type(leaf, whole), x)
