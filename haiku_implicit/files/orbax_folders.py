"""Reads a checkpoint of Orbax by Orbax itself, a group of arrays at a time, without a target."""

from typing import Any

import jax
import numpy as np

from haiku_implicit.core.messages import imported
from haiku_implicit.core.typing import Tree
from haiku_implicit.files import dtypes
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.structure import Structure, describe

# The bytes of arrays that are read at once: Orbax reads a tree's arrays side by side.
_GROUP = 1 << 28


class Folder:
    """The counterpart of a `File`: the arrays in a folder of Orbax, by their names in its structure.

    Attributes:
      path: the folder.
      structure: the tree, in dicts and lists, which is all that Orbax knows without a target.

    Raises:
      CheckpointError: if Orbax can't read it, or if it has other leaves than arrays and numbers.
      ImportError: without Orbax.
    """

    def __init__(self, path: str):
        self.path = path
        self._orbax = imported(
            "orbax.checkpoint",
            f"{path}: a checkpoint of Orbax, which needs its package",
            "orbax-checkpoint",
        )
        self._reader = self._orbax.Checkpointer(self._orbax.PyTreeCheckpointHandler())
        leaves, self._treedef = jax.tree.flatten(self._guarded(self._tree))
        self._structs = [self._struct_of(leaf) for leaf in leaves]
        described = describe(jax.tree.unflatten(self._treedef, self._structs))
        self.structure: Structure = described.structure
        places = {id(x): i for i, x in enumerate(self._structs)}
        self._places = {name: places[id(x)] for name, x in described.arrays.items()}
        self._read: dict[int, np.ndarray] = {}

    def bytes_of(self, name: str) -> np.ndarray:
        """Reads the bytes of an array, `[bytes]` uint8, and keeps some of those that follow it."""
        place = self._places[name]
        if place not in self._read:
            self._read = self._guarded(lambda: self._group(place))
        return dtypes.bytes_of(self._read.pop(place))

    def close(self) -> None:
        """Ends Orbax's reader, and forgets what was read ahead."""
        self._reader.close()
        self._read = {}

    def _tree(self) -> Tree:
        """The tree with metadata for arrays, which Orbax 0.11 does not put into metadata of a step."""
        found = self._reader.metadata(self.path)
        return getattr(found, "item_metadata", found).tree

    def _group(self, first: int) -> dict[int, np.ndarray]:
        """Reads an array and those that follow it, as long as they are small together."""
        chosen, room = {first}, _GROUP
        for i in range(first, len(self._structs)):
            room -= self._structs[i].size * self._structs[i].dtype.itemsize
            if room >= 0:
                chosen.add(i)
        empty = self._orbax.PLACEHOLDER
        marks = [x if i in chosen else empty for i, x in enumerate(self._structs)]
        as_numpy = [self._orbax.RestoreArgs(restore_type=np.ndarray) for _ in marks]
        wanted = self._orbax.args.PyTreeRestore(
            item=jax.tree.unflatten(self._treedef, marks),
            restore_args=jax.tree.unflatten(self._treedef, as_numpy),
        )
        found = jax.tree.leaves(self._reader.restore(self.path, args=wanted))
        return {i: np.asarray(found[i]) for i in chosen}

    def _struct_of(self, leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise CheckpointError(
                f"{self.path}: {getattr(leaf, 'name', leaf)!s:.80}: is neither an array nor a number. "
                "Restore it with Orbax; haiku_implicit.save writes what that gives"
            )
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    def _guarded(self, run: Any) -> Any:
        try:
            return run()
        except Exception as e:  # Orbax and TensorStore raise many types for a damaged folder
            said = " ".join(f"{type(e).__name__}: {e}".split())
            raise CheckpointError(
                f"{self.path}: a checkpoint of Orbax, which can't read it ({said:.500})"
            ) from e
