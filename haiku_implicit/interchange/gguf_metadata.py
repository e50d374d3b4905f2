"""Writes the metadata and the header of a GGUF file.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. (The package `gguf` can't write empty
or nested lists, and reads nested ones as one list.)
"""

import collections
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.interchange.gguf_header import ALIGNMENT, LAYOUTS

_ARCHITECTURE = "general.architecture"
_FILE_TYPE, _VERSION = "general.file_type", "general.quantization_version"
# Keys that the reader adds, that describe the division into files, or the kind of the tensors.
_NOT_KEPT = ("GGUF.", "split.", _FILE_TYPE)


class Field(NamedTuple):
    """A value of the metadata.

    Attributes:
      kind: the number of its type.
      value: a number or a text; for a list, its fields.
      inner: the type of a list's elements; None for other values.
    """

    kind: int
    value: Any
    inner: int | None = None


class Info(NamedTuple):
    """A tensor of the file: its name, shape in NumPy's order, kind, and number of bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int


def fields_of(
    gguf: Any, metadata: Mapping[str, Any], source: Any, tensors: Sequence[Info]
) -> dict[str, Field]:
    """The metadata of a file.

    Args:
      gguf: the package.
      metadata: the user's keys; None removes a key.
      source: the reader of a file whose metadata is copied, or None.
      tensors: the tensors of the file.

    Raises:
      ValueError: for a value that a file can't hold, or if there is no architecture.
    """
    fields = _taken_over(gguf, source) if source else {}
    fields |= _about(gguf, tensors)
    for key, value in metadata.items():
        if value is None:
            fields.pop(key, None)
        else:
            fields[key] = _field(gguf, key, value)
    if _ARCHITECTURE not in fields:
        raise ValueError(
            f"metadata: {_ARCHITECTURE!r} is missing. Give it, with the other keys that its programs "
            "read, or metadata_from=, the file that the model came from"
        )
    return {_ARCHITECTURE: fields.pop(_ARCHITECTURE)} | fields


def _taken_over(gguf: Any, source: Any) -> dict[str, Field]:
    found = {}
    for key, field in source.fields.items():
        if not key.startswith(_NOT_KEPT):
            # The value follows the length of the key, the key, and the type of the value.
            _, _, kind, *parts = field.parts
            found[key] = _read(gguf, int(kind[0]), iter(parts))
    return found


def _read(gguf: Any, kind: int, parts: Iterator[np.ndarray]) -> Field:
    """Reads a value from the parts into which the package's reader splits it."""
    types = gguf.GGUFValueType
    if kind == types.ARRAY:
        inner, count = int(next(parts)[0]), int(next(parts)[0])
        return Field(kind, [_read(gguf, inner, parts) for _ in range(count)], inner)
    if kind == types.STRING:
        next(parts)  # its length
        return Field(kind, next(parts).tobytes().decode())
    return Field(kind, next(parts).item())


def _about(gguf: Any, tensors: Sequence[Info]) -> dict[str, Field]:
    """The file's type, which programs show, and the version of the quantized blocks."""
    uint32 = gguf.GGUFValueType.UINT32
    sizes: collections.Counter[str] = collections.Counter()
    for t in tensors:
        sizes[t.kind] += math.prod(t.shape)
    most = sizes.most_common(1)[0][0] if sizes else "F32"
    prefixes = ("ALL_", "MOSTLY_")
    found = [x for x in gguf.LlamaFileType if x.name.startswith(tuple(p + most for p in prefixes))]
    about = {_VERSION: Field(uint32, gguf.GGML_QUANT_VERSION)}
    return about | ({_FILE_TYPE: Field(uint32, int(found[0]))} if found else {})


_TYPES = {bool: "BOOL", str: "STRING", float: "FLOAT32"}


def _field(gguf: Any, key: str, value: Any) -> Field:
    """Converts a user's value to a field."""
    types = gguf.GGUFValueType
    if isinstance(value, list | tuple | np.ndarray):
        each = [_field(gguf, key, x) for x in value]
        inner = {field.kind for field in each}
        if inner == {types.INT32, types.UINT32}:  # some are negative
            inner = {types.INT32}
        if len(inner) != 1:
            raise ValueError(
                f"metadata: {key}: expected a list of numbers or texts of one type, got {value!r}"
            )
        return Field(types.ARRAY, each, inner.pop())
    if isinstance(value, np.generic):
        name = "BOOL" if value.dtype == bool else value.dtype.name.upper()
        if name in types.__members__:
            return Field(types[name], value.item())
    elif type(value) in _TYPES:
        return Field(types[_TYPES[type(value)]], value)
    elif type(value) is int and -(2**31) <= value < 2**32:
        return Field(types.INT32 if value < 0 else types.UINT32, value)
    raise ValueError(
        f"metadata: {key}: expected a text, a number, a boolean or a list of them, got {value!r}. "
        "Larger integers: numpy.uint64, numpy.int64"
    )


# --- bytes -----------------------------------------------------------------------------------------


def alignment_of(fields: Mapping[str, Field]) -> int:
    """The alignment of a file in bytes: its tensors begin at multiples of it."""
    return int(fields[ALIGNMENT].value) if ALIGNMENT in fields else 32


def header(gguf: Any, fields: Mapping[str, Field], tensors: Sequence[Info]) -> bytes:
    """The beginning of a file, up to its first tensor.

    Args:
      gguf: the package.
      fields: the metadata.
      tensors: the tensors, which follow in this order, each padded to the alignment.
    """
    alignment, offset = alignment_of(fields), 0
    found = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, field in fields.items():
        found += _text(key) + struct.pack("<I", field.kind) + _packed(gguf, field, field.kind)
    for t in tensors:
        kind = gguf.GGMLQuantizationType[t.kind]
        numbers = (len(t.shape), *t.shape[::-1], kind, offset)
        found += _text(t.name) + struct.pack(f"<I{len(t.shape)}QIQ", *numbers)
        offset += t.nbytes + -t.nbytes % alignment
    return found + bytes(-len(found) % alignment)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _packed(gguf: Any, field: Field, kind: int) -> bytes:
    """The bytes of a value of this type, without its type."""
    types = gguf.GGUFValueType
    if kind == types.STRING:
        return _text(field.value)
    if kind != types.ARRAY:
        return struct.pack(f"<{LAYOUTS[kind]}", field.value)
    assert field.inner is not None
    each = [_packed(gguf, x, field.inner) for x in field.value]
    return struct.pack("<IQ", field.inner, len(each)) + b"".join(each)
