"""Reads the header of a GGUF file: its table of tensors, checked before any tensor is read.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from haiku_implicit.files.container import CheckpointError, brief

# `struct`'s format of a number in the metadata, by the number of its type.
LAYOUTS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
ALIGNMENT = "general.alignment"
_WIDTHS = {kind: struct.calcsize(f"<{layout}") for kind, layout in LAYOUTS.items()}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8
# Limits on nested lists, and on the entries of all lists. (The package `gguf` makes an object of some
# 600 bytes of each entry. The largest vocabularies have a quarter of a million tokens, with a text, a
# score and a type.)
_DEEPEST, _MOST_ENTRIES = 8, 4_000_000


# Types that GGML removed, and types that only ik_llama.cpp has, by their numbers in files.
_GONE = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_GONE |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
_FOREIGN = {133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K"}
_FOREIGN |= {140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS"}
_FOREIGN |= {152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS"}
_FOREIGN |= {157: "IQ2_KL", 158: "IQ1_KT"}
# Keys of a model in several files: the number of files, this file's number, and the tensors in all.
SPLIT = ("split.count", "split.no", "split.tensors.count")


class Row(NamedTuple):
    """A tensor in the table.

    Attributes:
      name: the tensor's name.
      kind: the name of its type, such as 'Q4_0'; for an unknown type, its description in errors.
      shape: its shape in NumPy's order, which is the reverse of the file's.
      start: the offset of its first byte in the file.
      stop: the offset after its last byte; equal to `start` for an unknown type.
      packed: the shape of its blocks as bytes, `[..., rows, bytes]`; None for an unknown type.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int
    packed: tuple[int, ...] | None


class Header(NamedTuple):
    """The header of a file.

    Attributes:
      rows: the table of tensors.
      number: the index of this file among the files of its model, from 0.
      num_files: the number of the model's files.
      tensors: the number of tensors in all of them; None if the file does not say.
    """

    rows: list[Row]
    number: int = 0
    num_files: int = 1
    tensors: int | None = None


class _Ended(Exception):
    """The file ends within its header."""


class _Damaged(Exception):
    """The header has an impossible value."""


def header_of(path: str, gguf: Any) -> Header | None:
    """Reads the header of a GGUF file; None if its numbers are in the other byte order.

    Args:
      path: the file, which begins like a GGUF file.
      gguf: the package, for the sizes of blocks.

    Raises:
      CheckpointError: if the header is incomplete or has an impossible value.
      OSError: if it can't be read.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        read = _Reader(data)
        try:
            return _header(read, gguf)
        except _Ended:
            raise CheckpointError(
                f"{path}: truncated or damaged GGUF file: it ends at byte {len(data):,}, before "
                f"{read.within} is complete. Copy it again"
            ) from None
        except _Damaged as e:
            raise CheckpointError(f"{path}: truncated or damaged GGUF file: {e}") from None


def _header(read: "_Reader", gguf: Any) -> Header | None:
    (version,) = read.numbers("I")
    if version and not version % 2**16:
        return None
    if version not in _VERSIONS:
        raise _Damaged(f"version {version} of the format; read are {_VERSIONS}")
    num_tensors, num_keys = read.numbers("QQ")
    read.within = "its metadata"
    numbers = _numbers(read, num_keys)
    read.within = "its table of tensors"
    rows = list(_rows(read, num_tensors, gguf))
    alignment = numbers.get(ALIGNMENT, 32)
    data = -(-read.offset // alignment) * alignment
    rows = [row._replace(start=data + row.start, stop=data + row.stop) for row in rows]
    _check_places(rows, read.size)
    count, number, total = map(numbers.get, SPLIT)
    return Header(rows, number or 0, count or 1, total)


def _numbers(read: "_Reader", count: int) -> dict[str, Any]:
    """Reads the metadata; returns the integers that matter for reading, after a check."""
    keys: set[str] = set()
    found: dict[str, Any] = {}
    for _ in range(count):
        key = read.text()
        (kind,) = read.numbers("I")
        value = read.value(kind)
        if key in keys:
            raise _Damaged(f"the key {brief(key)} occurs twice in its metadata")
        keys.add(key)
        if key == ALIGNMENT and (kind != _UINT32 or value.bit_count() != 1):
            raise _Damaged(f"{ALIGNMENT} should be a power of two, not {brief(value)}")
        if key in SPLIT and type(value) is not int:
            raise _Damaged(f"{key} should be an integer, not {brief(value)}")
        if key == ALIGNMENT or key in SPLIT:
            found[key] = value
    return found


def _rows(read: "_Reader", count: int, gguf: Any) -> Iterator[Row]:
    """Yields the rows of the table, with offsets from the end of the header."""
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    names: set[str] = set()
    for _ in range(count):
        name = read.text()
        if name in names:
            raise _Damaged(f"the tensor {brief(name)} occurs twice")
        names.add(name)
        (ndim,) = read.numbers("I")
        if ndim > _MOST_DIMENSIONS:
            raise _Damaged(f"the tensor {brief(name)} has {ndim} axes")
        *shape, number, start = read.numbers(f"{ndim}QIQ")
        shape = shape[::-1]
        kind, elements, width = sizes.get(number, (_unknown(number), 1, 1))
        if math.prod(max(n, 1) for n in shape) * width >= 2**56:
            raise _Damaged(f"the tensor {brief(name)}: {shape} is not the shape of an array")
        if number not in sizes:  # its size is also unknown
            yield Row(name, kind, tuple(shape), start, start, None)
            continue
        last = shape[-1] if shape else 1
        if last % elements:
            raise _Damaged(
                f"the tensor {brief(name)} {shape}: blocks of {kind} have {elements} numbers"
            )
        packed = (*shape[:-1], last // elements * width)
        yield Row(name, kind, tuple(shape), start, start + math.prod(packed), packed)


def _unknown(number: int) -> str:
    """Describes an unknown type for errors."""
    if number in _GONE:
        what = f"{_GONE[number]}, which GGML no longer has"
    elif number in _FOREIGN:
        what = f"{_FOREIGN[number]} of ik_llama.cpp"
    else:
        what = "of another program, or the file is damaged"
    return f"the type {number}, which is not known: {what}"


def _check_places(rows: list[Row], size: int) -> None:
    """Raises if tensors overlap, or reach beyond the end of the file."""
    end = 0
    for row in sorted(rows, key=lambda row: (row.start, row.stop)):
        if row.start < end:
            raise _Damaged(
                f"the tensor {brief(row.name)} begins at byte {row.start:,}, within another"
            )
        end = row.stop
        if end > size:
            raise _Damaged(
                f"it ends at byte {size:,}, and the tensor {row.name} reaches from byte "
                f"{row.start:,} to byte {end:,}. Copy it again"
            )


class _Reader:
    """Reads parts of a header, one after another.

    Attributes:
      within: the name of the section that is being read, for errors.
      offset: its position in the file.
      size: the size of the file in bytes.
    """

    def __init__(self, data: mmap.mmap):
        self._data, self.offset, self.size = data, 4, len(data)
        self.within, self._entries = "its header", 0

    def _skip(self, count: int) -> int:
        """Moves past the next bytes, and returns their offset."""
        start = self.offset
        if count > self.size - start:
            raise _Ended
        self.offset += count
        return start

    def numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack_from(layout, self._data, self._skip(struct.calcsize(layout)))

    def text(self) -> str:
        (count,) = self.numbers("Q")
        start = self._skip(count)
        try:
            return self._data[start : start + count].decode("utf-8")
        except UnicodeDecodeError as e:
            raise _Damaged(f"a text in {self.within} is not UTF-8 ({e})") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        """Reads a number of the metadata; skips texts and lists, and returns None for them."""
        if kind in LAYOUTS:
            return self.numbers(LAYOUTS[kind])[0]
        if kind == _STRING:
            self._skip(*self.numbers("Q"))
            return None
        if kind != _ARRAY or depth > _DEEPEST:
            raise _Damaged(f"a value of the type {kind}, in {depth} lists, in its metadata")
        inner, count = self.numbers("IQ")
        self._entries += count
        if self._entries > _MOST_ENTRIES:
            raise _Damaged(f"lists of more than {_MOST_ENTRIES:,} entries in its metadata")
        if inner in LAYOUTS:
            self._skip(count * _WIDTHS[inner])
            return None
        for _ in range(count):
            self.value(inner, depth + 1)
        return None
