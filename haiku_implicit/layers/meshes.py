"""Meshes of devices with named axes, and sharding constraints that do nothing without the mesh.

The mesh is set by `jax.set_mesh`, or by the older `with mesh:`. (EasyDeL's code reads a part of JAX
that is not public, and supports only the latter.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import SameTree, Tree


def create_mesh(
    axis_dims: Sequence[int] = (1, -1, 1, 1),
    axis_names: Sequence[str] = ("dp", "fsdp", "tp", "sp"),
    backend: str = "",
) -> Mesh:
    """Makes a mesh of all devices: data, fully sharded, tensor and sequence parallel by default.

    Args:
      axis_dims: the length of each axis; one may be -1, for the remaining devices.
      axis_names: the names of the axes.
      backend: 'cpu', 'gpu', 'tpu', or '' for JAX's default. (EasyDeL's code counts the devices of this
        backend, but makes a mesh of the default backend's.)

    Returns:
      A mesh whose axes are all of type `Auto`.

    Raises:
      ValueError: for lengths whose product is not the number of devices, or whose number is not the
        number of names.
      RuntimeError: for an unavailable backend.

    Example:
      >>> from haiku_implicit import layers
      >>> layers.create_mesh((1, 1, 1, -1)).axis_names
      ('dp', 'fsdp', 'tp', 'sp')
    """
    devices = jax.devices(backend or None)
    dims = list(axis_dims)
    if len(dims) != len(axis_names):
        raise value_error(
            f"axis_dims: expected a length for each of the axes {list(axis_names)}, got {dims}"
        )
    if dims.count(-1) == 1:
        dims[dims.index(-1)] = len(devices) // max(math.prod(n for n in dims if n != -1), 1)
    if min(dims, default=0) < 1 or math.prod(dims) != len(devices):
        raise value_error(
            f"axis_dims: expected lengths (at most one of them -1) whose product is the number of "
            f"devices, {len(devices)}, got {list(axis_dims)}"
        )
    types = (AxisType.Auto,) * len(dims)
    return jax.make_mesh(dims, tuple(axis_names), axis_types=types, devices=devices)


def names_in_mesh(*names: str) -> bool:
    """Returns whether a mesh is set, here or around the traced code, and has all these axes.

    (EasyDeL's docstring calls this a decorator that raises. It never was one.)

    Args:
      *names: names of axes. Without names, the result is True.

    Example:
      Without a mesh (`with jax.set_mesh(layers.create_mesh()):` sets one with this axis):

      >>> from haiku_implicit import layers
      >>> layers.names_in_mesh('dp')
      False
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return set(names) <= set(mesh.axis_names)
    return all(map(_in_context, names))


def _in_context(name: str) -> bool:
    """Whether a mesh of `with mesh:` has an axis, found by whether JAX accepts a constraint."""
    nothing = jax.ShapeDtypeStruct((0,), jnp.float32)
    try:
        jax.eval_shape(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(name)), nothing)
    except (RuntimeError, ValueError):  # there is no mesh; there is no such axis
        return False
    return True


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Returns the names of mesh axes in a partition spec, or in a tree of partition specs.

    Args:
      partition_specs: a `jax.sharding.PartitionSpec`, or lists, tuples and dicts (of lists, ...) of
        partition specs, names and None.

    Returns:
      Each name once, in order of first appearance. (EasyDeL returns them in the order of a set, which
      differs from run to run.)

    Example:
      >>> from jax.sharding import PartitionSpec
      >>> from haiku_implicit import layers
      >>> layers.get_names_from_partition_spec({'w': PartitionSpec(('dp', 'fsdp'), None, 'tp')})
      ['dp', 'fsdp', 'tp']
    """
    if partition_specs is None or partition_specs is PartitionSpec.UNCONSTRAINED:
        return []
    if isinstance(partition_specs, str):
        return [partition_specs]
    if isinstance(partition_specs, dict):
        partition_specs = partition_specs.values()
    return list(dict.fromkeys(n for s in partition_specs for n in get_names_from_partition_spec(s)))


def with_sharding_constraint(x: SameTree, partition_specs: Tree) -> SameTree:
    """Applies `jax.lax.with_sharding_constraint` if the mesh has the axes; otherwise does nothing.

    So a model with constraints runs on one device, too. Nothing happens over manual axes of
    `jax.shard_map`: there an array is one device's part. Over axes of type `Explicit` the array is
    resharded, as JAX treats a constraint as an assertion there.

    Args:
      x: an array, dense or implicit, or a tree of arrays. The type of an implicit array decides how
        its leaves are split.
      partition_specs: a `PartitionSpec` for all arrays, or a prefix tree of `x` with partition specs.

    Returns:
      `x`, split in this way or unchanged.

    Raises:
      ValueError: JAX's error, if a mesh has the axes, and an array has fewer axes than its spec.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec
      >>> from haiku_implicit import layers
      >>> print(layers.with_sharding_constraint(jnp.arange(2), PartitionSpec('tp')))
      [0 1]
    """
    is_spec = lambda s: s is None or isinstance(s, PartitionSpec)  # noqa: E731
    return jax.tree.map(_constrained, partition_specs, x, is_leaf=is_spec)


def _constrained(spec: PartitionSpec | None, tree: Tree) -> Tree:
    names = get_names_from_partition_spec(spec)
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kinds = {types.get(name, AxisType.Auto) for name in names}
    if not names or not names_in_mesh(*names) or AxisType.Manual in kinds:
        return tree
    return _split(tree, spec, AxisType.Explicit in kinds)


# Jitted, because JAX's function fails outside of `jit` for an array on one device.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _split(tree: Tree, spec: PartitionSpec, explicit: bool) -> Tree:
    def split(x: jax.Array) -> jax.Array:
        if explicit:
            sharding = NamedSharding(jax.sharding.get_abstract_mesh(), spec)
            return jax.sharding.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, spec)

    return use_implicit_args(lambda tree: jax.tree.map(split, tree))(tree)


def get_ranks_and_size(mesh: Mesh) -> dict[str, Any]:
    """Returns how the processes of a run share data and models: the group sizes and this one's ranks.

    Args:
      mesh: a mesh with the axes 'tp' and 'sp'; a missing one counts as an axis of length one.
        (EasyDeL's code fails without them.)

    Returns:
      A dict: `mesh`; `mp_node_size`, the number of processes that share one model; `dp_node_size`, the
      number of such groups, each with its own data; `mp_node_rank` and `dp_node_rank`, the ranks of
      this process in its group and of its group.

    Raises:
      ValueError: if models do not fill whole processes, or the groups do not divide the processes:
        ranks would not be defined.

    Example:
      >>> from haiku_implicit import layers
      >>> ranks = layers.get_ranks_and_size(layers.create_mesh())
      >>> ranks['dp_node_size'], ranks['mp_node_rank']
      (1, 0)
    """
    model = mesh.shape.get("tp", 1) * mesh.shape.get("sp", 1)
    local, processes = jax.local_device_count(), jax.process_count()
    size = max(1, model // local)
    if model > local and model % local or processes % size:
        raise value_error(
            f"mesh: a model on {model} devices ('tp' times 'sp') needs whole processes of {local} "
            f"devices, in groups that divide the {processes} processes"
        )
    rank = jax.process_index()
    return dict(
        mesh=mesh,
        mp_node_size=size,
        dp_node_size=processes // size,
        dp_node_rank=rank // size,
        mp_node_rank=rank % size,
    )
