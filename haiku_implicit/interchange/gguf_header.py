"""The header of a GGUF file, its metadata and its table of tensors: read and checked, and written.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. (The package `gguf` can't write empty
or nested lists.)
"""

import collections
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.files.container import CheckpointError, brief
from haiku_implicit.files.file_types import kind_of, not_a
from haiku_implicit.interchange.ggml import gguf_package

# `struct`'s format of a number in the metadata, by the number of its type.
LAYOUTS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
ALIGNMENT = "general.alignment"
_WIDTHS = {kind: struct.calcsize(f"<{layout}") for kind, layout in LAYOUTS.items()}
_UINT32, _INT32, STRING, ARRAY = 4, 5, 8, 9
# The types of NumPy's numbers, and of Python's values.
_KINDS = {np.dtype(layout): kind for kind, layout in LAYOUTS.items()}
_PYTHON_KINDS = {bool: _KINDS[np.dtype(bool)], str: STRING, float: _KINDS[np.dtype(np.float32)]}
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8
# Limits on nested lists, on the entries and the texts of all lists, and on lists in lists. (The largest
# vocabularies have a quarter of a million tokens, with a text, a score and a type.)
_DEEPEST, _MOST_ENTRIES, _MOST_TEXTS, _MOST_LISTS = 8, 4_000_000, 1 << 27, 100_000
# The format allows names of 64 bytes, and keys of this length.
_LONGEST_NAME = (1 << 16) - 1


_UNKNOWN = (
    "the type {}, which is not known: GGML no longer has it, it is one of another program such as "
    "ik_llama.cpp, or the file is damaged"
)
# Keys of a model in several files: this file's number, the number of files, and the tensors in all.
_SPLIT = ("split.no", "split.count", "split.tensors.count")
_ARCHITECTURE = "general.architecture"
_FILE_TYPE, _VERSION = "general.file_type", "general.quantization_version"
# Keys that describe the division into files, or the kind of the tensors.
_NOT_KEPT = ("split.", _FILE_TYPE)

# A tensor to write: its name, its kind, and its shape in NumPy's order.
Named = tuple[str, str, tuple[int, ...]]


class Field(NamedTuple):
    """A value of the metadata.

    Attributes:
      kind: the number of its type.
      value: a number or a text; for a list, a list of these; for a list of lists, a list of fields.
      inner: the type of a list's elements; None for other values.
    """

    kind: int
    value: Any
    inner: int | None = None

    def contents(self) -> Any:
        """Returns the value as Python's numbers, texts and lists."""
        if self.inner != ARRAY:
            return self.value
        return [field.contents() for field in self.value]


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
      fields: the metadata.
      rows: the table of tensors.
      order: the byte order, as in `struct`: '<' or '>'.
    """

    fields: dict[str, Field]
    rows: list[Row]
    order: str

    @property
    def split(self) -> tuple[int, int, int | None]:
        """The index of this file in its model, from 0, and the numbers of files and of all tensors.

        A file that is not one of several does not say the number of tensors.
        """
        found = {key: field.value for key, field in self.fields.items() if key in _SPLIT}
        number, files, tensors = map(found.get, _SPLIT)
        return number or 0, files or 1, tensors


# --- reading ---------------------------------------------------------------------------------------


class _Damaged(Exception):
    """The header is incomplete, or has an impossible value."""


def header_of(path: str) -> Header:
    """Reads the header of a GGUF file, in either byte order.

    Args:
      path: the file.

    Raises:
      CheckpointError: if it is not a GGUF file, or its header is incomplete or has an impossible value.
      OSError: if it can't be read.
    """
    if kind_of(path).name != "gguf":
        raise not_a("a GGUF file", path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _header(_Reader(data))
        except _Damaged as e:
            raise CheckpointError(f"{path}: truncated or damaged GGUF file: {e}") from None


def _header(read: "_Reader") -> Header:
    (version,) = read.numbers("I")
    if version and not version % 2**16:
        read.order, read.offset = ">", 4
        (version,) = read.numbers("I")
    if version not in _VERSIONS:
        raise _Damaged(f"version {version} of the format; read are {_VERSIONS}")
    num_tensors, num_keys = read.numbers("QQ")
    read.within = "its metadata"
    fields = _fields(read, num_keys)
    read.within = "its table of tensors"
    rows = list(_rows(read, num_tensors))
    alignment = alignment_of(fields)
    data = -(-read.offset // alignment) * alignment
    rows = [row._replace(start=data + row.start, stop=data + row.stop) for row in rows]
    _check_places(rows, read.size)
    return Header(fields, rows, read.order)


def alignment_of(fields: Mapping[str, Field]) -> int:
    """Returns the alignment of a file in bytes: its tensors begin at multiples of it."""
    return int(fields[ALIGNMENT].value) if ALIGNMENT in fields else 32


def _fields(read: "_Reader", count: int) -> dict[str, Field]:
    """Reads the metadata, and checks the integers that matter for reading."""
    found: dict[str, Field] = {}
    for _ in range(count):
        key = read.text()
        (kind,) = read.numbers("I")
        field = read.field(kind)
        if key in found:
            raise _Damaged(f"the key {brief(key)} occurs twice in its metadata")
        if key == ALIGNMENT and (kind != _UINT32 or field.value.bit_count() != 1):
            raise _Damaged(f"{ALIGNMENT} should be a power of two, not {brief(field.value)}")
        if key in _SPLIT and type(field.value) is not int:
            raise _Damaged(f"{key} should be an integer, not {brief(field.value)}")
        found[key] = field
    return found


def _rows(read: "_Reader", count: int) -> Iterator[Row]:
    """Yields the rows of the table, with offsets from the end of the header."""
    of_package = gguf_package().GGML_QUANT_SIZES
    sizes = {int(kind): (kind.name, *size) for kind, size in of_package.items()}
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
        kind, elements, width = sizes.get(number, (_UNKNOWN.format(number), 1, 1))
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
      order: the byte order, as in `struct`.
      offset: its position in the file.
      size: the size of the file in bytes.
    """

    def __init__(self, data: mmap.mmap):
        self._data, self.offset, self.size = data, 4, len(data)
        self.within, self.order, self._entries = "its header", "<", 0
        self._texts, self._lists = _MOST_TEXTS, 0

    def _skip(self, count: int) -> int:
        """Moves past the next bytes, and returns their offset."""
        start = self.offset
        self._check_room(count)
        self.offset += count
        return start

    def _check_room(self, count: int) -> None:
        """Raises unless this many bytes follow in the file."""
        if count > self.size - self.offset:
            raise _Damaged(
                f"it ends at byte {self.size:,}, before {self.within} is complete. Copy it again"
            )

    def numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"{self.order}{layout}"
        return struct.unpack_from(layout, self._data, self._skip(struct.calcsize(layout)))

    def text(self, most: int = _LONGEST_NAME, errors: str = "strict") -> str:
        """Reads a text of at most so many bytes."""
        (count,) = self.numbers("Q")
        start = self._skip(count)
        if count > most:
            raise _Damaged(f"a text of {count:,} bytes in {self.within}")
        try:
            return self._data[start : start + count].decode("utf-8", errors)
        except UnicodeDecodeError as e:
            raise _Damaged(f"a text in {self.within} is not UTF-8 ({e})") from None

    def _value(self) -> str:
        """Reads a text of the metadata; tokens may be parts of a character, to be written again."""
        text = self.text(self._texts, "surrogateescape")
        self._texts -= len(text)
        return text

    def field(self, kind: int, depth: int = 0) -> Field:
        """Reads a value of the metadata."""
        if kind in LAYOUTS:
            return Field(kind, *self.numbers(LAYOUTS[kind]))
        if kind == STRING:
            return Field(kind, self._value())
        if kind != ARRAY or depth > _DEEPEST:
            raise _Damaged(f"a value of the type {kind}, in {depth} lists, in its metadata")
        inner, count = self.numbers("IQ")
        self._entries += count
        if self._entries > _MOST_ENTRIES:
            raise _Damaged(f"lists of more than {_MOST_ENTRIES:,} entries in its metadata")
        if inner in LAYOUTS:
            self._check_room(count * _WIDTHS[inner])
            return Field(kind, list(self.numbers(f"{count}{LAYOUTS[inner]}")), inner)
        if inner == STRING:
            return Field(kind, [self._value() for _ in range(count)], inner)
        self._lists += count
        if self._lists > _MOST_LISTS:
            raise _Damaged(f"more than {_MOST_LISTS:,} lists in lists in its metadata")
        return Field(kind, [self.field(inner, depth + 1) for _ in range(count)], inner)


# --- writing ---------------------------------------------------------------------------------------


def fields_of(
    metadata: Mapping[str, Any], source: Mapping[str, Field], tensors: Sequence[Named]
) -> dict[str, Field]:
    """The metadata of a file.

    Args:
      metadata: the user's keys; None removes a key.
      source: the metadata that is copied from another file.
      tensors: the tensors of the file.

    Raises:
      ValueError: for a value that a file can't hold, or if there is no architecture.
    """
    fields = {key: field for key, field in source.items() if not key.startswith(_NOT_KEPT)}
    fields |= _about(tensors)
    for key, value in metadata.items():
        if value is None:
            fields.pop(key, None)
        else:
            try:
                fields[key] = _field(key, value)
                _text(key), _packed(fields[key])
            except (struct.error, OverflowError, UnicodeEncodeError) as e:
                raise value_error(f"metadata: {key!a}: a file can't hold {value!r} ({e})") from None
    if _ARCHITECTURE not in fields:
        raise value_error(
            f"metadata: {_ARCHITECTURE!r} is missing. Give it, with the other keys that its programs "
            "read, or metadata_from=, the file that the model came from"
        )
    alignment = fields.get(ALIGNMENT, Field(_UINT32, 32))
    if alignment.kind != _UINT32 or alignment.value.bit_count() != 1:
        raise value_error(
            f"metadata: {ALIGNMENT!r}: expected a power of two, got {alignment.contents()!r}"
        )
    return {_ARCHITECTURE: fields.pop(_ARCHITECTURE)} | fields


def _about(tensors: Sequence[Named]) -> dict[str, Field]:
    """The file's type, which programs show, and the version of the quantized blocks."""
    gguf = gguf_package()
    sizes: collections.Counter[str] = collections.Counter()
    for _, kind, shape in tensors:
        sizes[kind] += math.prod(shape)
    most = sizes.most_common(1)[0][0] if sizes else "F32"
    names = f"ALL_{most}", f"MOSTLY_{most}"
    found = [int(x) for x in gguf.LlamaFileType if x.name.startswith(names)]
    about = {_VERSION: Field(_UINT32, gguf.GGML_QUANT_VERSION)}
    return about | ({_FILE_TYPE: Field(_UINT32, found[0])} if found else {})


def _field(key: str, value: Any) -> Field:
    """Converts a user's value to a field."""
    if isinstance(value, list | tuple | np.ndarray):
        each = [_field(key, x) for x in value]
        inner = {field.kind for field in each}
        if inner == {_INT32, _UINT32}:  # some are negative
            inner = {_INT32}
        if len(inner) != 1:
            raise value_error(
                f"metadata: {key}: expected a list of numbers or texts of one type, got {value!r}"
            )
        (kind,) = inner
        return Field(ARRAY, each if kind == ARRAY else [x.value for x in each], kind)
    if isinstance(value, np.generic) and value.dtype in _KINDS:
        return Field(_KINDS[value.dtype], value.item())
    if type(value) in _PYTHON_KINDS:
        str(value).encode()  # strictly
        return Field(_PYTHON_KINDS[type(value)], value)
    if type(value) is int and -(2**31) <= value < 2**32:
        return Field(_INT32 if value < 0 else _UINT32, value)
    raise value_error(
        f"metadata: {key}: expected a text, a number, a boolean or a list of them, got {value!r}. "
        "Larger integers: numpy.uint64, numpy.int64"
    )


def header(fields: Mapping[str, Field], tensors: Sequence[Named]) -> bytes:
    """The beginning of a file, up to its first tensor.

    Args:
      fields: the metadata.
      tensors: the tensors, which follow in this order, each padded to the alignment.
    """
    gguf, alignment, offset = gguf_package(), alignment_of(fields), 0
    found = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, field in fields.items():
        found += _text(key) + struct.pack("<I", field.kind) + _packed(field)
    for name, kind, shape in tensors:
        number = gguf.GGMLQuantizationType[kind]
        elements, size = gguf.GGML_QUANT_SIZES[number]
        found += _text(name)
        found += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, offset)
        offset += -(-math.prod(shape) // elements * size // alignment) * alignment
    return found + bytes(-len(found) % alignment)


def _text(text: str, errors: str = "strict") -> bytes:
    data = text.encode("utf-8", errors)
    return struct.pack("<Q", len(data)) + data


def _value(text: str) -> bytes:
    """A text of the metadata, with the bytes that another file has."""
    return _text(text, "surrogateescape")


def _packed(field: Field) -> bytes:
    """The bytes of a value, without its type."""
    if field.kind == STRING:
        return _value(field.value)
    if field.kind != ARRAY:
        return struct.pack(f"<{LAYOUTS[field.kind]}", field.value)
    assert field.inner is not None
    head = struct.pack("<IQ", field.inner, len(field.value))
    if field.inner in LAYOUTS:
        return head + struct.pack(f"<{len(field.value)}{LAYOUTS[field.inner]}", *field.value)
    each = map(_value if field.inner == STRING else _packed, field.value)
    return head + b"".join(each)
