"""Arrays in parts: each process writes boxes of an array, which together tile it."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from haiku_implicit.core.typing import Json
from haiku_implicit.files.container import CheckpointError, is_shape

Box = tuple[tuple[int, int], ...]  # the first index along each axis, and the one after the last


class Part(NamedTuple):
    """A tensor that holds a box of an array, or all of it.

    Attributes:
      name: the tensor's name.
      file: the index of its file.
      start: the first index along each axis.
      shape: the number of indices along each axis.
      crc: the CRC-32 of its bytes; None if it is unknown.
    """

    name: str
    file: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    crc: int | None = None

    @property
    def box(self) -> Box:
        """The box of the array in this part."""
        return tuple((i, i + n) for i, n in zip(self.start, self.shape, strict=True))


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Converts an index of slices, as JAX gives for the shards of an array, to a box."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def parts_to_json(parts: Sequence[Part]) -> Json:
    """Converts parts to JSON."""
    names = ("array", "file", "start", "shape", "crc32")
    return [
        dict(zip(names, (name, file, list(start), list(shape), f"{crc or 0:08x}"), strict=True))
        for name, file, start, shape, crc in parts
    ]


def parts_from_json(data: Json, shape: tuple[int, ...], where: str) -> tuple[Part, ...]:
    """Converts JSON from `parts_to_json` back to parts.

    Raises:
      CheckpointError: if they do not tile an array of this shape.
    """
    if not isinstance(data, list):
        raise CheckpointError(f"{where}: expected a list of parts, found {data!r:.80}")
    parts = tuple(_part(row, len(shape), where) for row in data)
    if not _tile(parts, shape):
        raise CheckpointError(
            f"{where}: its {len(parts)} parts do not make an array {list(shape)}; the file is damaged"
        )
    return parts


def _part(row: Json, ndim: int, where: str) -> Part:
    wrong = CheckpointError(f"{where}: not the description of a part: {row!r:.80}")
    if not isinstance(row, dict):
        raise wrong
    name, file, crc = row.get("array"), row.get("file"), row.get("crc32")
    if not isinstance(name, str) or type(file) is not int or not isinstance(crc, str):
        raise wrong
    ends = row.get("start", ()), row.get("shape", ())
    if not all(is_shape(x) and len(x) == ndim for x in ends):
        raise wrong
    if not re.fullmatch("[0-9a-f]{8}", crc):
        raise wrong
    return Part(name, file, tuple(ends[0]), tuple(ends[1]), int(crc, 16))


def _tile(parts: Sequence[Part], shape: tuple[int, ...]) -> bool:
    """Whether parts are the cells of a grid as large as the array, each cell once."""
    if not parts:
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
