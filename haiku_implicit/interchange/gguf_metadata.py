"""Writes the metadata and the header of a GGUF file.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. (The package `gguf` can't write empty
or nested lists.)
"""

import collections
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.interchange.gguf_header import (
    ALIGNMENT,
    ARRAY,
    LAYOUTS,
    STRING,
    Field,
    alignment_of,
)

_ARCHITECTURE = "general.architecture"
_FILE_TYPE, _VERSION = "general.file_type", "general.quantization_version"
# Keys that describe the division into files, or the kind of the tensors.
_NOT_KEPT = ("split.", _FILE_TYPE)


class Info(NamedTuple):
    """A tensor of the file: its name, shape in NumPy's order, kind, and number of bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int


def fields_of(
    gguf: Any, metadata: Mapping[str, Any], source: Mapping[str, Field], tensors: Sequence[Info]
) -> dict[str, Field]:
    """The metadata of a file.

    Args:
      gguf: the package.
      metadata: the user's keys; None removes a key.
      source: the metadata that is copied from another file.
      tensors: the tensors of the file.

    Raises:
      ValueError: for a value that a file can't hold, or if there is no architecture.
    """
    fields = {key: field for key, field in source.items() if not key.startswith(_NOT_KEPT)}
    fields |= _about(gguf, tensors)
    for key, value in metadata.items():
        if value is None:
            fields.pop(key, None)
        else:
            try:
                fields[key] = _field(gguf, key, value)
                _text(key), _packed(fields[key])
            except (struct.error, OverflowError, UnicodeEncodeError) as e:
                raise ValueError(f"metadata: {key!a}: a file can't hold {value!r} ({e})") from None
    if _ARCHITECTURE not in fields:
        raise ValueError(
            f"metadata: {_ARCHITECTURE!r} is missing. Give it, with the other keys that its programs "
            "read, or metadata_from=, the file that the model came from"
        )
    alignment = fields.get(ALIGNMENT, Field(gguf.GGUFValueType.UINT32, 32))
    if alignment.kind != gguf.GGUFValueType.UINT32 or alignment.value.bit_count() != 1:
        raise ValueError(
            f"metadata: {ALIGNMENT!r}: expected a power of two, got {alignment.contents()!r}"
        )
    return {_ARCHITECTURE: fields.pop(_ARCHITECTURE)} | fields


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
        (kind,) = inner
        return Field(types.ARRAY, each if kind == ARRAY else [x.value for x in each], kind)
    if isinstance(value, np.generic):
        name = "BOOL" if value.dtype == bool else value.dtype.name.upper()
        if name in types.__members__:
            return Field(types[name], value.item())
    elif type(value) in _TYPES:
        str(value).encode()  # strictly
        return Field(types[_TYPES[type(value)]], value)
    elif type(value) is int and -(2**31) <= value < 2**32:
        return Field(types.INT32 if value < 0 else types.UINT32, value)
    raise ValueError(
        f"metadata: {key}: expected a text, a number, a boolean or a list of them, got {value!r}. "
        "Larger integers: numpy.uint64, numpy.int64"
    )


# --- bytes -----------------------------------------------------------------------------------------


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
        found += _text(key) + struct.pack("<I", field.kind) + _packed(field)
    for t in tensors:
        kind = gguf.GGMLQuantizationType[t.kind]
        numbers = (len(t.shape), *t.shape[::-1], kind, offset)
        found += _text(t.name) + struct.pack(f"<I{len(t.shape)}QIQ", *numbers)
        offset += t.nbytes + -t.nbytes % alignment
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
