"""Opens files of other programs: `.npz`, pickles, AlphaFold 3's records, folders of Orbax."""

import os
from collections.abc import Mapping

import numpy as np

from haiku_implicit.core.typing import Array, Tree
from haiku_implicit.files import dtypes, pickles, records
from haiku_implicit.files.checkpoint import Readable
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.file_types import kind_of, not_a
from haiku_implicit.files.npz import Archive
from haiku_implicit.files.orbax_folders import Folder
from haiku_implicit.files.structure import Structure, describe

# The files that `load` reads, for errors.
EXPECTED = "a safetensors or .npz file"
# Kinds that only the unpickler can tell from pickles: old pickles are texts.
_MAY_BE_PICKLES = ("pickle", "text", "unknown", "packed")
_RECORDS = ("records", "zstd")


class Once:
    """Arrays in memory, each of which is read once and then forgotten."""

    def __init__(self, path: str, arrays: Mapping[str, Array]):
        self.path, self._arrays = path, dict(arrays)

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of an array, `[bytes]` uint8."""
        return dtypes.bytes_of(self._arrays.pop(name))

    def close(self) -> None:
        """Forgets the arrays."""
        self._arrays = {}


def opened(path: str, allow_pickle: bool) -> tuple[Readable, Structure]:
    """Opens a file or folder of another program.

    Raises:
      CheckpointError: for a file of another kind, a damaged one, and for a pickle without
        `allow_pickle`.
      ImportError: without the package that the file needs.
      OSError: if it can't be read.
    """
    kind = kind_of(records.pieces_of(path)[0]).name
    if kind == "npz":
        return _with_structure(Archive(path))
    if kind == "orbax":
        return _with_structure(Folder(path))
    if kind in _RECORDS:
        file = records.file_in(path) if os.path.isdir(path) else path
        return _with_structure(records.Records(file or path))
    if kind == "joined":
        raise not_a("an .npz file of names `module/name`", path)
    if allow_pickle and kind in _MAY_BE_PICKLES:
        return _in_memory(path, pickles.read(path))
    raise not_a(EXPECTED, path)


def _with_structure(file: Archive | Folder | records.Records) -> tuple[Readable, Structure]:
    return file, file.structure


def _in_memory(path: str, tree: Tree) -> tuple[Readable, Structure]:
    try:
        structure, arrays = describe(tree)
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from None
    return Once(path, arrays), structure
