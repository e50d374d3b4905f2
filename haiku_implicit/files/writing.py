"""Writes one file of a checkpoint: its tensors, one by one, and its metadata."""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from haiku_implicit.core import progress
from haiku_implicit.files import container, dtypes
from haiku_implicit.files.structure import Leaf, Structure, leaves_of, to_json, with_leaves

# Keys in the metadata of a main file, and of the files next to it.
ENTRY = "haiku_implicit"
CHECKSUM = "haiku_implicit.crc32"
PART = "haiku_implicit.part_of"
# Versions of the format. The second one allows arrays in parts.
VERSIONS = (1, 2)


class Stored(NamedTuple):
    """A tensor to write.

    Attributes:
      name: the tensor's name.
      dtype: the name of its dtype: see `dtypes`.
      shape: its shape.
      read: returns its bytes, `[bytes]` uint8.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def row(self) -> tuple[str, str, tuple[int, ...]]:
        """The tensor's row in the file's table."""
        return self.name, *dtypes.stored_of(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return container.table([self.row])[self.name].stop


def divided(tensors: Sequence[Stored], max_shard_bytes: int) -> list[list[Stored]]:
    """Divides tensors into files of at most `max_shard_bytes`; a larger tensor has its own file."""
    files: list[list[Stored]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if tensor.nbytes > room and files[-1]:
            files.append([])
            room = max_shard_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files


def write_file(
    file: BinaryIO,
    tensors: Sequence[Stored],
    crcs: dict[str, int],
    metadata: Callable[[], Mapping[str, str]],
) -> None:
    """Writes tensors to disk one by one, and adds their checksums to `crcs`.

    The header precedes them and may contain the checksums: it is written again at the end, with the
    same length.
    """
    # The widest dtypes first, so that each tensor begins at a multiple of its width.
    ordered = sorted(tensors, key=lambda tensor: -container.WIDTHS[tensor.row[1]])
    table = container.table([tensor.row for tensor in ordered])
    begin = container.header(metadata(), table)
    file.write(begin)

    def write(tensor: Stored) -> None:
        data = tensor.read().data
        crcs[tensor.name] = zlib.crc32(data)
        file.write(data)

    with progress.bar("saving", len(table)) as run:
        for tensor in ordered:
            run(tensor.name, write, tensor)
    end = container.header(metadata(), table)
    assert len(begin) == len(end), "the header has changed its length"
    file.seek(0)
    file.write(end)
    file.flush()
    os.fsync(file.fileno())


def part_text(path: str, number: str) -> str:
    """The text in a further file's metadata that names its checkpoint."""
    return f"{os.path.basename(path)}, save {number}"


def main_metadata(
    structure: Structure, crcs: Mapping[str, int], number: str, names: Sequence[str]
) -> dict[str, str]:
    """The metadata of a main file.

    Args:
      structure: the tree's structure.
      crcs: the tensors' checksums by name; 0 stands for unknown ones.
      number: the number of the save.
      names: the names of the further files.
    """

    def known(leaf: Leaf) -> Leaf:
        parts = (part._replace(crc=crcs.get(part.name, 0)) for part in leaf.tensors)
        return leaf._replace(parts=tuple(parts))

    version = VERSIONS[any(len(leaf.parts) > 1 for leaf in leaves_of(structure))]
    tree = to_json(with_leaves(structure, known))
    found = {"version": version, "save": number, "files": list(names), "tree": tree}
    text = json.dumps(found, separators=(",", ":"))
    return {ENTRY: text, CHECKSUM: f"{zlib.crc32(text.encode()):08x}"}


def number_in(path: str) -> str | None:
    """The number of the save that wrote a checkpoint; None for another file."""
    try:
        return json.loads(container.File(path).metadata[ENTRY])["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
