"""Meshes with explicit axes, whose shardings are a part of arrays' types.

What computes with codes cuts axes in blocks and in groups, for which JAX has no sharding rule. So it
runs with these axes left to XLA's partitioner, as axes of type `Auto` are, and only its result is
sharded explicitly: as that of the dense operands is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, dense_struct, is_implicit


def result_sharding(primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    """How the result of a primitive with dense operands is sharded over explicit mesh axes.

    Args:
      primitive: with one result.
      operands: its operands, some of them quantized.
      params: its parameters.

    Returns:
      A sharding, or None where no operand is split over explicit axes and no result is asked to be.

    Raises:
      What JAX raises for the dense operands, where it can't tell how the result is to be sharded.
    """
    split = [compat.if_explicit(params.get("out_sharding"))]
    split += map(compat.explicit_sharding, jax.tree.leaves(operands))
    if not any(split):
        return None
    bind = functools.partial(primitive.bind, **params)
    return jax.eval_shape(bind, *map(dense_struct, operands)).sharding


def left_to_partitioner(fun: Callable[..., jax.Array], sharding: Any) -> Callable[..., jax.Array]:
    """A function whose explicit mesh axes XLA sees to, with a result that is sharded like this."""
    mesh = sharding.mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in pairs if kind == AxisType.Explicit)
    return jax.sharding.auto_axes(fun, axes=axes, out_sharding=sharding)


def padded_spec(spec: Any, ndim: int) -> tuple[Any, ...]:
    """The entries of a partition spec, one for each axis."""
    return (*spec, *[None] * (ndim - len(spec)))


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
