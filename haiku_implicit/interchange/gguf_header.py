"""Where a GGUF file ends that is not whole: its header, read for an error that says so.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # by the number of the type
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
_MOST_DIMENSIONS = 8


class _Ended(Exception):
    """The file ends within its header."""


class _Tensor(NamedTuple):
    """A row of the table: where the bytes of a tensor are, counted from the end of the header."""

    name: str
    start: int
    nbytes: int


def what_is_missing(path: str, gguf: Any) -> str | None:
    """The first thing of a GGUF file that is not there in part; None if all is, or it is damaged.

    Args:
      path: the file, which begins like one of GGUF.
      gguf: the package, for the sizes of blocks.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(4)
        read = _Reader(file, size)
        try:
            tensors, data = _table(read, gguf)
        except _Ended:
            return f"it ends at byte {size:,}, before {read.within} is complete"
        except (ValueError, KeyError, OverflowError, RecursionError, struct.error):
            return None
    for name, start, nbytes in sorted(tensors, key=lambda t: t.start):
        stop = data + start + nbytes
        if stop > size:
            return (
                f"it ends at byte {size:,}, and the tensor {name} reaches from byte {data + start:,} "
                f"to byte {stop:,}"
            )
    return None


def _table(read: "_Reader", gguf: Any) -> tuple[list[_Tensor], int]:
    """The tensors, and where their bytes begin."""
    version, num_tensors, num_keys = read.numbers("IQQ")
    if not 0 < version < 2**16:  # the bytes of its numbers are in another order
        raise ValueError("damaged")
    read.within, alignment = "its metadata", 32
    for _ in range(num_keys):
        key = read.text()
        value = read.value(*read.numbers("I"))
        if key == _ALIGNMENT and isinstance(value, int) and value > 0:
            alignment = value
    read.within = "its table of tensors"
    return list(_tensors(read, num_tensors, gguf)), -(-read.offset // alignment) * alignment


def _tensors(read: "_Reader", count: int, gguf: Any) -> Iterator[_Tensor]:
    for _ in range(count):
        name = read.text()
        (ndim,) = read.numbers("I")
        if ndim > _MOST_DIMENSIONS:
            raise ValueError("damaged")
        *shape, kind, start = read.numbers(f"{ndim}QIQ")
        elements, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        yield _Tensor(name, start, math.prod(shape) // elements * width)


class _Reader:
    """Reads parts of a header, one after another.

    Attributes:
      within: what is being read.
    """

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size, self.within = file, size, "its header"

    @property
    def offset(self) -> int:
        return self._file.tell()

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self.offset:
            raise _Ended
        return self._file.read(count)

    def numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def text(self) -> str:
        return self._bytes(*self.numbers("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value of the metadata; of a list nothing but where it ends."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            if kind not in _NUMBERS:
                raise ValueError("damaged")
            return self.numbers(_NUMBERS[kind])[0]
        inner, count = self.numbers("IQ")
        if inner in _NUMBERS:
            self._bytes(count * struct.calcsize(f"<{_NUMBERS[inner]}"))
            return None
        for _ in range(count):
            self.value(inner)
        return None
