"""Reads arrays onto devices: each process reads the boxes that its devices hold."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from haiku_implicit.core.typing import Array, Tree
from haiku_implicit.files import dtypes
from haiku_implicit.files import structure as structures
from haiku_implicit.files.parts import Box, box_of
from haiku_implicit.files.structure import Leaf, Structure


def by_name(structure: Structure, shardings: Tree, file: str, path: str) -> dict[str, Any]:
    """The sharding of each array, by its name in the structure.

    Args:
      structure: the structure of the tree that is read.
      shardings: one for all arrays, or a tree of them with this structure or a prefix of it; None in
        it stands for the default device.
      file: the structure's file, for errors.
      path: the structure's path in the whole tree, for errors.

    Raises:
      ValueError: for a tree of another structure.
      TypeError: for a leaf that is neither a sharding nor None.
    """
    names: dict[int, str] = {}
    found: dict[str, Any] = {}

    def struct(leaf: Leaf) -> Any:
        made = structures.struct_of(leaf)
        names[id(made)] = leaf.name
        return made

    def put(sharding: Sharding | None, below: Any) -> None:
        if not _is_place(sharding):
            raise TypeError(
                f"shardings: expected a jax.sharding.Sharding or None, got {sharding!r:.80}"
            )
        for x in jax.tree.leaves(below):
            if sharding is not None and id(x) in names:
                found[names[id(x)]] = sharding

    tree = structures.build(structure, struct, file, path)
    try:
        jax.tree.map(put, shardings, tree, is_leaf=_is_place)
    except ValueError as e:
        raise ValueError(
            "shardings: expected one sharding, or a tree of them that is like the tree in the file or "
            f"a prefix of it: {' '.join(str(e).split()):.500}"
        ) from e
    return found


def _is_place(x: Any) -> bool:
    return x is None or isinstance(x, jax.sharding.Sharding)


def placed(
    leaf: Leaf, sharding: Any, whole: Callable[[], Any], read: Callable[[Box], np.ndarray]
) -> Array:
    """Reads an array onto the devices of a sharding.

    Args:
      leaf: the array in the file.
      sharding: the sharding of the result.
      whole: reads all of the array.
      read: reads a box of the array.
    """
    struct = dtypes.struct_of(leaf.dtype, leaf.shape)
    small = leaf.weak_type or jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key)
    if small or jax.dtypes.canonicalize_dtype(struct.dtype) != struct.dtype:
        x = whole()
        if isinstance(x, np.ndarray):  # of 64 bits, which JAX would not keep
            return x
        # Unlike `jax.device_put`, this writes only to this process's devices.
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    # Copied, since JAX may use a NumPy array without a copy, and this one is a view of a file.
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: np.array(read(box_of(index or (), leaf.shape)))
    )
