"""The safetensors format: a table of named tensors in front of their bytes.

A file is the length of its header (8 bytes, little-endian), the header (JSON: the dtype, shape and
offsets of each tensor, and texts under `__metadata__`), and the bytes, without gaps. This module
replaces the `safetensors` package because errors have to name the tensor, repeated keys have to be
found, and checkpoints are written tensor by tensor.
"""

import json
import math
import mmap
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from haiku_implicit.core.messages import linked, printable, see

METADATA = "__metadata__"
# Keys in the metadata of a main file, and of the files next to it.
ENTRY = "haiku_implicit"
CHECKSUM = "haiku_implicit.crc32"
PART = "haiku_implicit.part_of"
# Versions of the format. The second one allows arrays in parts, the third has other checksums.
VERSIONS = (1, 2, 3)

# The format's own limit.
_MAX_HEADER = 100_000_000
_LENGTH = 8
# The most characters of an error, without its link.
_MAX_TEXT = 1500

# Bytes of an element, by the format's name of the dtype.
WIDTHS = {
    "BOOL": 1,
    **dict.fromkeys(["U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}

# Bits of an element, also for dtypes that are not read.
_BITS = {dtype: 8 * width for dtype, width in WIDTHS.items()} | dict(F4=4, F6_E2M3=6, F6_E3M2=6)


class CheckpointError(ValueError):
    """An invalid file, or a tree that a file cannot hold; the message names the key.

    Its text is one line, since names in a file may contain any characters. It ends in a link.
    """

    def __init__(self, text: str):
        message, space, link = linked(text, "files").rpartition(" ")
        super().__init__(one_line(message) + space + link)


def one_line(text: str) -> str:
    """Makes a text safe for an error: no line breaks or terminal control characters."""
    text = printable(text[: _MAX_TEXT + 1])
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


class Tensor(NamedTuple):
    """A tensor's row in the table of a file.

    Attributes:
      dtype: the format's name of the dtype: a key of `WIDTHS`, or a dtype of fewer than 8 bits.
      shape: the tensor's shape.
      start: the offset of its first byte, counted from the end of the header.
      stop: the offset after its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class File:
    """A safetensors file, mapped into memory: only its header is read.

    Attributes:
      path: the file.
      metadata: its texts.
      tensors: its table.
      identity: the file's device and inode, which stay when it is renamed.
    """

    def __init__(self, path: str):
        self.path = path
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait
            raise CheckpointError(f"{path}: expected a safetensors file, and this is not a file")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            self.identity = (status.st_dev, status.st_ino)
            header = _read_header(path, file, status.st_size)
            self._start = _LENGTH + len(header)
            self.metadata, self.tensors = _parse(path, header, status.st_size - self._start)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of a tensor, `[bytes]` uint8: a view of the file that is not read yet."""
        tensor = self.tensors[name]
        return np.frombuffer(
            self._map, np.uint8, tensor.stop - tensor.start, self._start + tensor.start
        )

    def close(self) -> None:
        """Does nothing: the map is closed with the last array that is a view of it."""


def is_container(path: str) -> bool:
    """Whether a file begins like a safetensors file."""
    with open(path, "rb") as file:
        return file.read(_LENGTH + 1)[_LENGTH:] == b"{"


def _read_header(path: str, file: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(start, "little") if len(start := file.read(_LENGTH)) == _LENGTH else -1
    if not 0 < length <= min(_MAX_HEADER, size - _LENGTH):
        raise CheckpointError(
            f"{path}: not a whole safetensors file: of its {size} bytes a header should take {length}. "
            "If it was not copied completely, copy it again"
            f" {see('a-damaged-file')}"
        )
    header = file.read(length)
    if len(header) != length:
        raise CheckpointError(
            f"{path}: the file became shorter while it was read. Read it again"
            f" {see('a-damaged-file')}"
        )
    return header


def parse_json(
    where: str, text: bytes | str, hint: str = "the file is damaged", **options: Any
) -> Any:
    """Parses JSON in which no key may occur twice.

    Args:
      where: the file, for errors.
      text: the JSON.
      hint: the end of error messages.
      **options: options of `json.loads`.

    Raises:
      CheckpointError: if the text is not JSON, or repeats a key.
    """

    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: the key {twice!r} occurs twice; {hint}")
        return found

    try:
        return json.loads(text, object_pairs_hook=without_doubles, **options)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply; {hint}") from None
    except ValueError as e:  # also for texts that are not UTF-8, and numbers with too many digits
        raise CheckpointError(f"{where}: not JSON ({e}); {hint}") from None


def _parse(path: str, header: bytes, size: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the table in a header; the tensors have to fill the file."""
    rows = parse_json(f"{path}: the header", header)
    if not isinstance(rows, dict):
        raise CheckpointError(f"{path}: the header is not a table; the file is damaged")
    metadata = rows.pop(METADATA, None)
    metadata = {} if metadata is None else metadata  # MLX writes null
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise CheckpointError(f"{path}: {METADATA} should map texts to texts; the file is damaged")
    tensors = {name: _tensor(f"{path}: {name}", row) for name, row in rows.items()}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise CheckpointError(
                f"{path}: {name}: its bytes should begin at {end}, right after those before them, the "
                f"header says {tensor.start}; the file is damaged"
            )
        end = tensor.stop
        if end > size:
            raise CheckpointError(
                f"{path}: {name}: the file ends at byte {size} of its data, where this should reach to "
                f"byte {end}: it is truncated. Copy it again"
                f" {see('a-damaged-file')}"
            )
    if end != size:
        raise CheckpointError(
            f"{path}: {size} bytes of data, where the header tells of {end}; the file is damaged"
            f" {see('a-damaged-file')}"
        )
    return metadata, tensors


def is_shape(x: Any) -> bool:
    """Whether a JSON value is the shape of an array that might exist."""
    if not isinstance(x, list) or len(x) > 32 or any(type(n) is not int or n < 0 for n in x):
        return False
    return math.prod(max(n, 1) for n in x) < 2**56


def _tensor(where: str, row: Any) -> Tensor:
    if not isinstance(row, dict) or sorted(row) != ["data_offsets", "dtype", "shape"]:
        raise CheckpointError(
            f"{where}: expected dtype, shape and data_offsets in the header, found {brief(row)}"
        )
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(
            f"{where}: the dtype {brief(dtype)}; known are {', '.join(sorted(_BITS))}"
        )
    if not is_shape(shape):
        raise CheckpointError(f"{where}: {brief(shape)} is not the shape of an array")
    pair = isinstance(offsets, list) and len(offsets) == 2
    if not pair or any(type(n) is not int or n < 0 for n in offsets):
        raise CheckpointError(f"{where}: data_offsets should be two numbers, not {brief(offsets)}")
    start, stop = offsets
    if stop - start != (needed := -(-math.prod(shape) * _BITS[dtype] // 8)):
        raise CheckpointError(
            f"{where}: {dtype}{shape} takes {needed} bytes, the header gives it {stop - start}; the "
            "file is damaged"
        )
    return Tensor(dtype, tuple(shape), start, stop)


def brief(x: Any) -> str:
    """A value from a file as text for an error: at most 80 characters."""
    try:
        text = repr(x)
    except RecursionError:
        text = "something nested"
    return text if len(text) <= 80 else f"{text[:77]}..."


def expect(right: bool, where: str, expected: str, found: Any) -> None:
    """Raises unless a value in a file is right.

    Args:
      right: whether it is.
      where: the file and the key, for the error.
      expected: what is expected there.
      found: the value.
    """
    if not right:
        raise CheckpointError(f"{where}: expected {expected}, got {brief(found)}")


def expect_one_of(known: Iterable[Any], where: str, found: Any) -> None:
    """Raises unless a value in a file is a known one, of the same type."""
    known = list(known)
    right = any(type(found) is type(x) and found == x for x in known)
    expect(right, where, f"one of {', '.join(map(str, known))}", found)


def table(rows: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The table of tensors, given as `(name, dtype, shape)` in their order in the file."""
    found, end = {}, 0
    for name, dtype, shape in rows:
        start, end = end, end + math.prod(shape) * WIDTHS[dtype]
        found[name] = Tensor(dtype, shape, start, end)
    return found


def header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """The beginning of a file: the header's length, and the header, padded to a multiple of 8 bytes.

    Raises:
      CheckpointError: if the header is longer than the format allows.
    """
    rows: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, (dtype, shape, start, stop) in tensors.items():
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise CheckpointError(
            f"a header of {len(text)} bytes, where safetensors has at most {_MAX_HEADER}: the tree has "
            "too many leaves. Save its parts in several files"
        )
    return len(text).to_bytes(_LENGTH, "little") + text
