"""One file of a checkpoint: its tensors, one by one, and what its metadata says."""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from haiku_implicit.core import progress
from haiku_implicit.files import container, dtypes
from haiku_implicit.files.structure import Leaf, Structure, leaves_of, to_json, with_leaves

# What is in the metadata of a main file, and of the files beside it.
ENTRY = "haiku_implicit"
CHECKSUM = "haiku_implicit.crc32"
PART = "haiku_implicit.part_of"
# Of the format. In the second one arrays may lie in parts.
VERSIONS = (1, 2)


class Stored(NamedTuple):
    """A tensor that is going to be written.

    Attributes:
      name: of the tensor.
      dtype: the name of its dtype: see `dtypes`.
      shape: its shape.
      read: gives its bytes, `[bytes]` uint8.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def row(self) -> tuple[str, str, tuple[int, ...]]:
        """Its row of the file's table."""
        return self.name, *dtypes.stored_of(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return container.table([self.row])[self.name].stop


def divided(tensors: Sequence[Stored], max_shard_bytes: int) -> list[list[Stored]]:
    """The tensors of each file, which has room for so many bytes, but for one tensor in any case."""
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
    """Writes tensors one by one, all to disk, and adds their checksums to `crcs`.

    The header goes before them and may have the checksums in it: it is written again at the end, with
    as many bytes.
    """
    # The widest first, so that each begins at a multiple of its width.
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
    """What the metadata of a further file says of the checkpoint that it belongs to."""
    return f"{os.path.basename(path)}, save {number}"


def main_metadata(
    structure: Structure, crcs: Mapping[str, int], number: str, names: Sequence[str]
) -> dict[str, str]:
    """The metadata of a main file.

    Args:
      structure: of the tree.
      crcs: of the tensors, by name; those that are not known yet are taken for 0.
      number: of the save.
      names: of the further files.
    """

    def known(leaf: Leaf) -> Leaf:
        own = tuple(part._replace(crc=crcs.get(part.name, 0)) for part in leaf.parts)
        return leaf._replace(crc=crcs.get(leaf.name, 0), parts=own)

    version = VERSIONS[any(leaf.parts for leaf in leaves_of(structure))]
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
