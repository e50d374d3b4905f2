"""Rules for collectives within `jax.shard_map`: leaves are moved, where that moves the array."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, dense_struct, flatten
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.sharding import is_spec, names_in


@primitive_handler("ppermute")
def permute(primitive: Primitive, x: ImplicitArray, *, perm: Any, **params: Any) -> Any:
    """Each device gets all of another one's array, or, where the permutation has a gap, dense zeros."""
    names = params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    if len({target for _, target in perm}) < np.prod([jax.lax.axis_size(n) for n in names]):
        return NotImplemented
    return jax.tree.map(lambda leaf: primitive.bind(leaf, perm=perm, **params), x)


@primitive_handler("pbroadcast")
def broadcast(primitive: Primitive, x: ImplicitArray, **params: Any) -> Any:
    """All devices get one device's array."""
    return jax.tree.map(lambda leaf: primitive.bind(leaf, **params), x)


@primitive_handler("all_gather")
def gather(primitive: Primitive, x: ImplicitArray, **params: Any) -> Any:
    """The parts put together: those of each leaf, along the axis of it that is split with the array.

    Into a new axis (`tiled=False`) where that is a batch axis, which all leaves have.
    """
    axis, size = params["all_gather_dimension"], params["axis_size"]
    out = jax.eval_shape(lambda y: primitive.bind(y, **params), dense_struct(x))
    if not params["tiled"]:
        new = _stacked(primitive, x, axis, params)
    else:
        new = _joined(primitive, x, axis, size, params)
    if new is NotImplemented:
        return NotImplemented
    if new.__dict__.get("_shape") is not None:
        new = new._replace(shape=out.shape)
    return new if new.shape == out.shape else NotImplemented
