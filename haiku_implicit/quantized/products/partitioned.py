"""Products in programs that XLA partitions: each device multiplies its own shards.

Without a partitioning rule, XLA looks into a product, decodes blocks of the matrix, and moves these.
Here a product is a function of arrays whose axes have names (`Axes`). Axes of one name are cut
together: rows of the activations and of the result, say, or inputs of the activations, codes, and the
scales of their groups.
All answers to XLA follow from the names:

- an axis with a name of the result: each device computes its shard of the result;
- an axis with another name is summed over: each device computes a part of the sum, and these are added;
- an array with another sharding moves in its stored form: a quantized matrix moves as codes.

The operands' shardings suggest several ways to split; the choice moves the fewest bytes.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haiku_implicit.core import compat
from haiku_implicit.core.sharding import names_in_entry, num_shards, padded_spec
from haiku_implicit.core.typing import Array, MeshLike

Names = tuple[str | None, ...]
Pieces = tuple[tuple[str, int], ...]
Split = dict[str, tuple[str, ...]]  # from each name to the mesh axes that split its axes


class Parts:
    """The shards of a function's arrays on one device.

    Args:
      split: the mesh axes by name.
      mesh: the mesh; None if nothing is split.
    """

    def __init__(self, split: Split | None = None, mesh: MeshLike | None = None):
        self._split, self._mesh = split or {}, mesh

    def count(self, name: str | None) -> int:
        """Returns the number of shards that the axes of a name are cut into."""
        return num_shards(self._split.get(name or "", ()), self._mesh) if self._split else 1

    def index(self, name: str) -> Any:
        """Returns the index of this device's shard among them."""
        return jax.lax.axis_index(self._split[name]) if self._split.get(name) else 0


WHOLE = Parts()


@dataclasses.dataclass(frozen=True)
class Axes:
    """Names of the axes of a function's operands and of its result; hashable.

    The results for shards of axes whose name the result does not have add up to the whole result.

    Attributes:
      operands: for each operand a name for each axis; None for an axis that is never split.
      result: a name or None for each axis of the result.
      pieces: names of axes that can only be cut between pieces, with the number of these pieces.
    """

    operands: tuple[Names, ...]
    result: Names
    pieces: Pieces = ()

    @property
    def names(self) -> list[str]:
        """All names, first the names in the result."""
        every = (*self.result, *(name for own in self.operands for name in own))
        return list(dict.fromkeys(name for name in every if name is not None))

    @property
    def summed(self) -> list[str]:
        """The names that the result does not have."""
        return [name for name in self.names if name not in self.result]

    def pieces_of(self, name: str, shapes: Sequence[Sequence[int]]) -> int:
        """Returns the number of pieces along the axes of a name, for operands of these shapes."""
        lengths = [
            n
            for own, shape in zip(self.operands, shapes, strict=True)
            for a, n in zip(own, shape, strict=True)
            if a == name
        ]
        return math.gcd(*lengths, *(n for a, n in self.pieces if a == name))


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices over which XLA splits a program, or a function in a `shard_map` over some mesh axes.

    Such a `shard_map` makes groups of devices. XLA tells the rule how arrays are split over one group,
    as if there were no other, with its devices in the order in which one of the arrays is split. So
    sums are over whole groups, and functions must not use a device's index.

    Attributes:
      number: the number of devices, or of devices in a group.
      program: the mesh of the program if there are groups; else None: XLA's call has the mesh.
      free: the names of the mesh axes that are not the `shard_map`'s.
    """

    number: int
    program: Any = None
    free: tuple[str, ...] = ()

    def meshes(self, of_call: Any) -> list[Any]:
        """Returns the mesh of XLA's call, or the meshes of a group, one for each order of its axes."""
        if self.program is None:
            return [of_call]
        first = self.program.devices.reshape(-1)[: self.number]
        sizes = self.program.shape
        orders = itertools.permutations(self.free)
        return [Mesh(first.reshape([sizes[a] for a in own]), own) for own in orders]

    def can_sum(self, over: Sequence[str], mesh: MeshLike) -> bool:
        """Whether products of shards can be added up over these axes of `mesh`."""
        return self.program is None or num_shards(tuple(over), mesh) in (1, self.number)


def devices_of(context: Any) -> Devices | None:
    """Returns the devices over which XLA splits a lowered program; None if they are unknown.

    One device: the program, or a part of it within `shard_map`, runs on whole arrays in this process.
    """
    if getattr(context.lowering_parameters, "for_export", False):
        return None  # to run elsewhere
    axes = context.axis_context
    if hasattr(axes, "num_devices"):
        known = axes.num_devices == 1 or getattr(axes, "abstract_mesh", None) is not None
        return Devices(axes.num_devices) if known else None
    if not hasattr(axes, "manual_axes"):
        return Devices(1) if hasattr(axes, "axis_env") else None
    mesh = axes.mesh
    free = tuple(a for a, size in mesh.shape.items() if size > 1 and a not in axes.manual_axes)
    if not free:
        return Devices(1)
    return Devices(num_shards(free, mesh), mesh, free) if isinstance(mesh, Mesh) else None


def partitioned(
    fun: Callable[..., jax.Array], axes: Axes, devices: Devices
) -> Callable[..., jax.Array]:
    """Makes a function that XLA splits over devices: each device runs it on its own shards.

    Args:
      fun: a function of arrays; also called with `parts=`, the parts that these are.
      axes: the names of their axes.
      devices: the devices over which XLA splits it.
    """

    def partition(of_call: Any, operands: Sequence[Array], result: Any) -> Any:
        (*placed, out), mesh = _placed((*operands[:-1], result), devices.meshes(of_call))
        split = _cheapest(axes, placed, out, mesh, devices.can_sum)
        parts = Parts(split, mesh)
        summed = tuple(a for name in axes.summed for a in split.get(name, ()))

        def local(*own: jax.Array) -> jax.Array:
            out = of_bytes(own[:-1], parts)
            return jax.lax.psum(out, summed) if summed else out

        specs = [*(_spec(own, split) for own in axes.operands), PartitionSpec()]  # the table
        places = tuple(NamedSharding(mesh, spec) for spec in specs)
        of_result = NamedSharding(mesh, _spec(axes.result, split))
        # JAX traces and lowers `local` as a part of the whole program.
        return devices.program or of_call, local, of_result, places

    def infer(of_call: Any, operands: Sequence[Array], _: Any) -> Any:
        placed, mesh = _placed(operands[:-1], devices.meshes(of_call))
        split = _cheapest(axes, placed, None, mesh, devices.can_sum)
        return NamedSharding(mesh, _spec(axes.result, split))

    dtypes: list[Any] = []

    def of_bytes(own: Sequence[jax.Array], parts: Parts) -> jax.Array:
        pairs = zip(own, dtypes, strict=True)
        return fun(*(jax.lax.bitcast_convert_type(x, dtype) for x, dtype in pairs), parts=parts)

    def run(*operands: jax.Array) -> jax.Array:
        dtypes[:] = [x.dtype for x in operands]
        cut, table = _table(axes, [x.shape for x in operands], devices.number)
        own = custom_partitioning(lambda *operands: of_bytes(operands[:-1], WHOLE))
        rule = _rule(axes, cut)
        own.def_partition(partition, infer, decode_shardings=False, sharding_rule=lambda *_: rule)
        return own(*map(_as_moved, operands), table)

    return run


def _as_moved(x: jax.Array) -> jax.Array:
    """Converts floats of 8 bits to bytes: XLA on a CPU would widen them before it moves them."""
    is_byte = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if is_byte else x


@functools.cache
def needs_devices() -> Any:
    """Returns a jaxpr that contains a partitioned function; None if this rule is not in use.

    Partitioning needs the mesh of the program. JAX gives it to a primitive's lowering rule only if the
    program contains such a function, so the primitive has this jaxpr among its parameters. Then JAX
    wants one mesh, of devices that exist: `HAIKU_IMPLICIT_PARTITION=0` in the environment leaves
    products to XLA, for programs with several meshes or an abstract one.
    """
    wanted = os.environ.get("HAIKU_IMPLICIT_PARTITION", "1") != "0"
    if not wanted or not compat.PARTITIONING_RULES or len(jax.devices()) == 1:
        return None
    fun = custom_partitioning(lambda x: x)
    fun.def_partition(lambda *_: None, sharding_rule="->")
    return jax.make_jaxpr(fun)(0.0)


# --- the shardings of the operands ---------------------------------------------------------------


def _placed(arrays: Sequence[Array], meshes: Sequence[Any]) -> tuple[list[Any], Any]:
    """Expresses XLA's shardings of arrays by names of mesh axes; returns the arrays and the mesh.

    XLA may split an axis by a part of a mesh axis, as two of four devices. JAX would raise for such a
    sharding; here the array counts as replicated, and XLA moves it. Among several meshes, this returns
    one with names for the most arrays.
    """
    found = [([_spec_on(mesh, x) for x in arrays], mesh) for mesh in meshes]
    specs, mesh = max(found, key=lambda own: len(arrays) - own[0].count(None))
    places = (NamedSharding(mesh, spec or PartitionSpec()) for spec in specs)
    pairs = zip(arrays, places, strict=True)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x, place in pairs], mesh


def _spec_on(mesh: MeshLike, x: Array) -> PartitionSpec | None:
    """Returns an array's split by names of the mesh; None if the mesh cannot express it."""
    ndim = len(x.shape)
    if x.sharding is None:
        return PartitionSpec()
    pairs = ((spec, NamedSharding(mesh, spec)) for spec in _specs_on(mesh, ndim))
    same = (spec for spec, place in pairs if compat.is_same_split(x.sharding, place, ndim))
    return next(same, None)


@functools.lru_cache(maxsize=256)
def _specs_on(mesh: MeshLike, ndim: int) -> list[PartitionSpec]:
    """Returns every way to split an array of `ndim` axes on a mesh, by few mesh axes first."""
    names = [axis for axis, parts in mesh.shape.items() if parts > 1]
    found: dict[PartitionSpec, None] = {}
    for order in itertools.permutations(names):
        for places in itertools.product([None, *range(ndim)], repeat=len(names)):
            split = [
                tuple(a for a, i in zip(order, places, strict=True) if i == j) for j in range(ndim)
            ]
            found[PartitionSpec(*(own or None for own in split))] = None
    return sorted(found, key=lambda spec: sum(len(own or ()) for own in spec))


# --- the choice ----------------------------------------------------------------------------------


def _cheapest(
    axes: Axes,
    operands: Sequence[Array],
    result: Any,
    mesh: MeshLike,
    can_sum: Callable[[Sequence[str], Any], bool],
) -> Split:
    """Returns the split that moves the fewest bytes, given the shardings of operands and result.

    If two splits move the same number of bytes, splits of the result's axes come first, in their order.
    But if operands agree on the axis that a mesh axis splits, the split uses this mesh axis: without it
    fewer bytes might move, but each device would compute the whole product.
    """
    arrays = [*zip(operands, axes.operands, strict=True)]
    shapes = [x.shape for x in operands]

    def is_possible(split: Split) -> bool:
        summed = [a for name in axes.summed for a in split.get(name, ())]
        return can_sum(summed, mesh) and all(
            axes.pieces_of(name, shapes) % num_shards(own, mesh) == 0 for name, own in split.items()
        )

    def cost(suggested: tuple[Split, int]) -> tuple[int, float]:
        return suggested[1], moved(suggested[0])

    def moved(split: Split) -> float:
        total: float = sum(_moved(x, _spec_of(x), _spec(own, split), mesh) for x, own in arrays)
        if result is None:
            return total
        of_result = _spec(axes.result, split)
        # The sum over devices moves each of its numbers twice.
        summed = any(split.get(name) for name in axes.summed)
        total += 2 * summed * _local_bytes(result, of_result, mesh)
        return total + _moved(result, of_result, _spec_of(result), mesh)

    possible = ((s, idle) for s, idle in _suggested(axes, arrays, mesh) if is_possible(s))
    return min(possible, key=cost)[0]


def _suggested(
    axes: Axes, arrays: Sequence[tuple[Any, Names]], mesh: MeshLike
) -> Iterator[tuple[Split, int]]:
    """Yields the ways to split that operands suggest: each mesh axis splits one of its names, or none.

    With each it yields the number of idle mesh axes that split all operands with some name.
    """
    found: dict[str, dict[str, set[bool]]] = {}  # by mesh axis and name: whether operands are split
    for axis in (axis for axis, parts in mesh.shape.items() if parts > 1):
        of_axis: dict[str, set[bool]] = {name: set() for name in axes.names}
        for x, own in arrays:
            for name, entry in zip(own, padded_spec(_spec_of(x), len(own)), strict=True):
                if name is not None:
                    of_axis[name].add(axis in names_in_entry(entry))
        found[axis] = {name: has for name, has in of_axis.items() if True in has}
    agreed = [{True} in own.values() for own in found.values()]
    for chosen in itertools.product(*([*own, None] for own in found.values())):
        split: Split = {}
        for axis, name in zip(found, chosen, strict=True):
            if name is not None:
                split[name] = (*split.get(name, ()), axis)
        yield (
            split,
            sum(all_do and name is None for all_do, name in zip(agreed, chosen, strict=True)),
        )


def _moved(x: Array, old: PartitionSpec, new: PartitionSpec, mesh: MeshLike) -> float:
    """Returns the bytes that a device receives if a sharding changes; zero if it has its new shard."""
    pairs = zip(*(padded_spec(s, len(x.shape)) for s in (old, new)), strict=True)
    has_it = all(names_in_entry(b)[: len(names_in_entry(a))] == names_in_entry(a) for a, b in pairs)
    return 0 if has_it else _local_bytes(x, new, mesh)


def _local_bytes(x: Array, spec: PartitionSpec, mesh: MeshLike) -> float:
    return math.prod(x.shape) * x.dtype.itemsize / math.prod(num_shards(s, mesh) for s in spec)


def _spec_of(x: Array) -> Any:
    return getattr(x.sharding, "spec", ())


def _spec(names: Names, split: Mapping[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(None if name is None else split.get(name) or None for name in names))


# --- the rule for XLA's propagation of shardings -------------------------------------------------


def _rule(axes: Axes, cut: Sequence[str]) -> SdyShardingRule:
    """Returns the rule: the axes of all operands, of the table after them, and of the result.

    Axes of one name split together, whatever their lengths: codes, and the scales of their groups.
    """
    others = (f"other{i}" for i in itertools.count())

    def mapping(names: Sequence[str | None]) -> ArrayMapping:
        return ArrayMapping(*(next(others) if name is None else name for name in names))

    return SdyShardingRule(
        tuple(map(mapping, (*axes.operands, tuple(cut)))),
        (mapping(axes.result),),
        reduction_factors=tuple(axes.summed),
    )


def _table(
    axes: Axes, shapes: Sequence[Sequence[int]], num_devices: int
) -> tuple[list[str], jax.Array]:
    """Returns the names of axes that are cut between pieces, and an array shaped by their parts.

    XLA uses the length of the shortest axis of a name. If one mesh axis splits two axes, XLA keeps the
    split of the operand that is larger by these lengths: here the operand with axes of other names, the
    activations, if it is split at all.
    """
    cut = list(dict.fromkeys(name for name, _ in axes.pieces))
    lengths = [math.gcd(axes.pieces_of(name, shapes), num_devices) for name in cut]
    return cut, jnp.zeros(lengths, jnp.uint8)
