"""Arrays in parts: each process writes boxes of an array, which together tile it."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.core.typing import Json
from haiku_implicit.files.checksums import KINDS, WRITTEN, Checksum
from haiku_implicit.files.container import CheckpointError, is_shape

Box = tuple[tuple[int, int], ...]  # the first index along each axis, and the one after the last


class Part(NamedTuple):
    """A tensor that holds a box of an array, or all of it.

    Attributes:
      name: the tensor's name.
      file: the index of its file.
      start: the first index along each axis.
      shape: the number of indices along each axis.
      checksum: the checksum of its bytes; None if it is unknown.
    """

    name: str
    file: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: Checksum | None = None

    @property
    def box(self) -> Box:
        """The box of the array in this part."""
        return tuple((i, i + n) for i, n in zip(self.start, self.shape, strict=True))


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Converts an index of slices, as JAX gives for the shards of an array, to a box."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def parts_to_json(parts: Sequence[Part]) -> Json:
    """Converts parts to JSON."""
    names = ("array", "file", "start", "shape")
    return [
        dict(zip(names, (name, file, list(start), list(shape)), strict=True))
        | checksum_to_json(checksum)
        for name, file, start, shape, checksum in parts
    ]


def checksum_to_json(checksum: Checksum | None) -> dict[str, str]:
    """Converts the checksum that `save` writes to JSON, in a length that does not depend on it."""
    return {WRITTEN: str(checksum or Checksum(WRITTEN, 0))}


def part_from_json(row: Mapping[str, Any], where: str) -> Part:
    """Converts the JSON of a part of an array, or of all of it, to a part.

    Raises:
      CheckpointError: if it is not valid.
    """
    name, file = row.get("array"), row.get("file")
    kind = next((kind for kind in KINDS if kind in row), WRITTEN)
    checksum = row.get(kind)
    if not isinstance(name, str) or type(file) is not int:
        raise CheckpointError(f"{where}: not the description of an array: {row!r:.80}")
    shape: Any = row.get("shape")
    start: Any = row.get("start")
    if not is_shape(shape):
        raise CheckpointError(f"{where}: {shape!r:.80} is not the shape of an array")
    if not is_shape(start) or len(start) != len(shape):
        raise CheckpointError(f"{where}: {start!r:.80} is not a place in an array {shape}")
    if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{8}", checksum):
        raise CheckpointError(f"{where}: {checksum!r:.80} is not a checksum")
    return Part(name, file, tuple(start), tuple(shape), Checksum(kind, int(checksum, 16)))


def parts_from_json(data: Json, shape: tuple[int, ...], where: str) -> tuple[Part, ...]:
    """Converts JSON from `parts_to_json` back to parts.

    Raises:
      CheckpointError: if they do not tile an array of this shape.
    """
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise CheckpointError(f"{where}: expected a list of parts, found {data!r:.80}")
    parts = tuple(part_from_json(row, where) for row in data)
    if not _tile(parts, shape):
        raise CheckpointError(
            f"{where}: its {len(parts)} parts do not make an array {list(shape)}; the file is damaged"
        )
    return parts


def _tile(parts: Sequence[Part], shape: tuple[int, ...]) -> bool:
    """Whether parts are the cells of a grid as large as the array, each cell once."""
    if not parts or any(len(part.shape) != len(shape) for part in parts):
        return False
    cuts = [sorted({part.start[axis] for part in parts}) for axis in range(len(shape))]
    cells = set(itertools.product(*cuts)) if math.prod(map(len, cuts)) == len(parts) else set()
    after = [dict(itertools.pairwise([*at, n])) for at, n in zip(cuts, shape, strict=True)]
    return (
        {part.start for part in parts} == cells
        and all(at[0] == 0 for at in cuts)
        and all(
            stop == after[axis][start]
            for part in parts
            for axis, (start, stop) in enumerate(part.box)
        )
    )


def assembled(parts: Sequence[Part], box: Box, read: Callable[[Part], np.ndarray]) -> np.ndarray:
    """Assembles a box of an array from the parts that overlap it.

    Args:
      parts: the parts of the array.
      box: the box to return.
      read: returns the array in a part, `[*part.shape]`.
    """
    sizes = [b - a for a, b in box]
    if 0 in sizes:
        return np.empty(sizes, read(parts[0]).dtype)
    found = None
    for part in parts:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part.box, strict=True)]
        if any(a >= b for a, b in common):
            continue
        values = read(part)[_slices(common, part.start)]
        if common == list(box):
            return values
        if found is None:
            found = np.empty(sizes, values.dtype)
        found[_slices(common, [a for a, _ in box])] = values
    assert found is not None, "parts tile the array"
    return found


def _slices(box: Sequence[tuple[int, int]], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - i, b - i) for (a, b), i in zip(box, start, strict=True))
