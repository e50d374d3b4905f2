"""Rules for collectives (in `jax.shard_map`, or over an axis of `vmap`) that move arrays.

They move leaves. Sums (`psum`, `psum_scatter`) are left to materialization: codes do not have a sum.
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from haiku_implicit.arrays.constant import SymbolicConstant, reshaped
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, dense_struct, flatten, num_batch_axes
from haiku_implicit.core.dispatch import named, primitive_handler
from haiku_implicit.core.sharding import is_spec, shard_specs
from haiku_implicit.core.typing import Array, EqnParam, EqnParams, Primitive, Result


def _names(params: EqnParams) -> tuple[Any, ...]:
    """The mesh axes of a collective."""
    names = params["axis_name"] if "axis_name" in params else params["axes"]
    return names if isinstance(names, tuple) else (names,)


def _move(primitive: Primitive, leaf: Array, params: EqnParams) -> Array:
    return primitive.bind(compat.vary_over(leaf, _names(params)), **params)


@primitive_handler(named("ppermute pbroadcast"))
def pass_on(primitive: Primitive, x: ImplicitArray, **params: EqnParam) -> Result:
    """Sends each device all leaves of another device's array.

    If a device would receive nothing, the array is made dense, as that device needs zeros.
    """
    if primitive is jax.lax.ppermute_p and not _reaches_all(params):
        return NotImplemented
    return jax.tree.map(lambda leaf: _move(primitive, leaf, params), x)


def _reaches_all(params: EqnParams) -> bool:
    count = math.prod(jax.lax.axis_size(name) for name in _names(params))
    return len(params["perm"]) == count


@primitive_handler("all_gather")
def gather_shards(primitive: Primitive, x: ImplicitArray, **params: EqnParam) -> Result:
    """Gathers the shards of each leaf along the leaf's axis that the type splits with the array's axis.

    Gathers into a new axis (`tiled=False`) if it is one of the batch axes, which all leaves have.
    """
    axis = params["all_gather_dimension"]
    if params["tiled"]:
        axes = _axes_of_leaves(x, axis, _names(params))
    else:
        may = x.core_ndim is not None and axis <= num_batch_axes(x) == x.ndim - x.core_ndim
        axes = [axis] * len(jax.tree.leaves(x)) if may else None
    if axes is None:
        return NotImplemented
    leaves, treedef = flatten(x)
    moved = [
        y if at is None else _move(primitive, y, params | dict(all_gather_dimension=at))
        for y, at in zip(leaves, axes, strict=True)
    ]
    new = treedef.unflatten(moved)
    shape = _result(primitive, x, params).shape
    if new.__dict__.get("_shape") is not None:
        new = new._replace(shape=shape)
    if new.shape != shape or params["tiled"] and not _is_made_of(new, x, axis):
        return NotImplemented
    return new


def _result(primitive: Primitive, x: ImplicitArray, params: EqnParams) -> Any:
    """The struct of the result for a dense operand."""
    return jax.eval_shape(lambda y: _move(primitive, y, params), dense_struct(x))


def _axes_of_leaves(x: ImplicitArray, axis: int, names: tuple[Any, ...]) -> list[int | None] | None:
    """The axis along which each leaf is split with the array; None for leaves that all shards have.

    Returns None if the type cannot be split so, or if devices may differ in a shared leaf: JAX knows
    whether a leaf varies over the devices, except with `check_vma=False`.
    """
    specs = _split(x, axis, 1)
    if specs is None:
        return None
    leaves = jax.tree.leaves(x)
    known = any(compat.varying(y).issuperset(names) for y in leaves)
    axes = [list(spec).index(_SHARDS) if _SHARDS in spec else None for spec in specs]
    shared = [y for y, at in zip(leaves, axes, strict=True) if at is None]
    same = known and not any(compat.varying(y).intersection(names) for y in shared)
    return axes if same or not shared else None


_SHARDS = "shards"


def _split(x: ImplicitArray, axis: int, count: int) -> list[PartitionSpec] | None:
    """The partition specs of the leaves if an axis of the array is split into `count` shards."""
    mesh = compat.auto_mesh([count], [_SHARDS])
    specs = shard_specs(x, PartitionSpec(*[None] * axis, _SHARDS), mesh)
    return None if specs is NotImplemented else jax.tree.leaves(specs, is_leaf=is_spec)


def _is_made_of(new: ImplicitArray, shard: ImplicitArray, axis: int) -> bool:
    """Whether the type splits the gathered array into the shards that it was gathered from."""
    return _split(new, axis, new.shape[axis] // shard.shape[axis]) == _split(shard, axis, 1)


# --- constants -----------------------------------------------------------------------------------


@primitive_handler(named("all_gather all_to_all pbroadcast ppermute"), precedence=10)
def move_constant(primitive: Primitive, x: SymbolicConstant, **params: EqnParam) -> Result:
    """Moves a constant, which is the same on all devices; a device that receives nothing has zeros."""
    if primitive is jax.lax.ppermute_p and not (_reaches_all(params) or isinstance(x, Zeros)):
        return _move(primitive, x.materialize(), params)
    return reshaped(x, _result(primitive, x, params))


@primitive_handler(compat.SUMS, precedence=10)
def add_constant(primitive: Primitive, x: SymbolicConstant, **params: EqnParam) -> Result:
    """Sums a constant over devices as a dense array."""
    return _move(primitive, x.materialize(), params)


@primitive_handler(compat.SUMS, precedence=20)
def add_zeros(primitive: Primitive, x: Zeros, **params: EqnParam) -> Result:
    """Sums zeros over devices, which gives zeros."""
    return reshaped(x, _result(primitive, x, params))
