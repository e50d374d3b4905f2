"""Meshes with explicit axes, whose shardings are a part of arrays' types.

Products with codes cut axes into blocks and groups, for which JAX has no sharding rule. So they leave
explicit axes to XLA's partitioner, as if they were of type `Auto`. Only the result is sharded
explicitly, as the result of the dense product is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from haiku_implicit.core import compat
from haiku_implicit.core.array import dense_struct


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
    split = [compat.if_explicit(params.get("out_sharding"))]
    split += map(compat.explicit_sharding, jax.tree.leaves(operands))
    if not any(split):
        return None
    bind = functools.partial(primitive.bind, **params)
    return jax.eval_shape(bind, *map(dense_struct, operands)).sharding


def left_to_partitioner(fun: Callable[..., jax.Array], sharding: Any) -> Callable[..., jax.Array]:
    """The function with explicit mesh axes left to XLA, and with a result of this sharding."""
    mesh = sharding.mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in pairs if kind == AxisType.Explicit)
    return jax.sharding.auto_axes(fun, axes=axes, out_sharding=sharding)
