"""Reads AlphaFold 3's parameters: records of arrays, in one file or in pieces, with zstd or without.

A record is five lengths (of the scope, name, dtype, shape and bytes), the three texts, the shape and
the bytes, all little-endian. The first pass reads the records without their bytes; the second one reads
one array at a time.
"""

import contextlib
import io
import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from haiku_implicit.core.messages import imported
from haiku_implicit.files import dtypes
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.structure import Structure, describe_modules
from haiku_implicit.files.unpacking import unpacked

LENGTHS = struct.Struct("<5i")
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20
# `af3.bin.zst.1`, or `af3.1.bin.zst`: the name of a piece, and its number.
_PIECE = re.compile(r"(?P<name>.+)\.bin(?P<zst>\.zst)?\.(?P<number>\d+)")
_NUMBERED = re.compile(r"(?P<name>.+)\.(?P<number>\d+)\.bin(?P<zst>\.zst)?")


class _Record(NamedTuple):
    """An array in the file: its names, its dtype and shape, and where its bytes start."""

    scope: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class Records:
    """The counterpart of a `File`: the arrays of AlphaFold 3's file, by their names in its structure.

    Attributes:
      path: the file, or one of its pieces.
      structure: `{scope: {name: array}}`.

    Raises:
      CheckpointError: if the file is damaged, or of another kind.
      ImportError: for a compressed file, without the package zstandard.
      OSError: if it can't be read.
    """

    def __init__(self, path: str):
        self.path = path
        self._pieces = pieces_of(path)
        self.structure: Structure
        with contextlib.closing(_Stream(path, self._pieces)) as stream:
            arrays = (
                (r.scope, r.name, dtypes.struct_of(r.dtype, r.shape), r) for r in _scan(stream)
            )
            self.structure, self._records = describe_modules(path, arrays)
        if not self._records:
            raise CheckpointError(f"{path}: has no records, as AlphaFold 3's files have them")
        self._stream = _Stream(path, self._pieces)

    def bytes_of(self, name: str) -> np.ndarray:
        """Reads the bytes of an array, `[bytes]` uint8; in the file's order without going back."""
        record = self._records[name]
        if record.start < self._stream.position:
            self._stream.close()
            self._stream = _Stream(self.path, self._pieces)
        self._stream.skip(record.start - self._stream.position)
        return np.frombuffer(self._stream.read(record.size), np.uint8)

    def close(self) -> None:
        """Closes the files."""
        self._stream.close()


def pieces_of(path: str) -> list[str]:
    """The pieces of a file in their order, if the path is one of them; otherwise the path."""
    folder, own = os.path.split(path)
    for pattern in (_PIECE, _NUMBERED):
        if match := pattern.fullmatch(own):
            key = (match["name"], match["zst"])
            others = (pattern.fullmatch(name) for name in os.listdir(folder or "."))
            found = [other for other in others if other and (other["name"], other["zst"]) == key]
            found.sort(key=lambda other: int(other["number"]))
            return [os.path.join(folder, other.string) for other in found]
    return [path]


def file_in(folder: str) -> str | None:
    """The one file of parameters in AlphaFold 3's folder of a model, or its first piece."""
    names = sorted(os.listdir(folder))
    found = [name for name in names if re.search(r"\.bin(\.zst)?(\.\d+)?$", name)]
    models = {tuple(pieces_of(os.path.join(folder, name))) for name in found}
    first = next(iter(models))[0] if len(models) == 1 else None
    return first if first and os.path.isfile(first) and _may_have_records(first) else None


def _may_have_records(path: str) -> bool:
    """Whether a file begins with a record, or was compressed by zstd."""
    with open(path, "rb") as file:
        return file.read(len(_ZSTD)) == _ZSTD or is_record(path)


def is_record(path: str) -> bool:
    """Whether a file begins with a record."""
    with open(path, "rb") as file:
        start = file.read(LENGTHS.size)
        lengths = LENGTHS.unpack(start) if len(start) == LENGTHS.size else (-1,)
        if not _are_lengths(lengths):
            return False
        file.seek(sum(lengths[:2]), os.SEEK_CUR)
        return file.read(lengths[2]).decode("latin1") in dtypes.STORED


def _are_lengths(lengths: Sequence[int]) -> bool:
    return min(lengths) >= 0 and max(lengths[:4]) <= 1000


# --- the bytes --------------------------------------------------------------------------------------


def _scan(stream: "_Stream") -> Iterator[_Record]:
    """Reads the records without their bytes."""
    while head := stream.read(LENGTHS.size, or_end=True):
        lengths = LENGTHS.unpack(head)
        if not _are_lengths(lengths):
            raise CheckpointError(
                f"{stream.path}: a record of {list(lengths)} bytes; it is damaged"
            )
        try:
            scope, name, dtype = (stream.read(n).decode() for n in lengths[:3])
        except UnicodeDecodeError as e:
            raise CheckpointError(f"{stream.path}: a name in it is not text ({e})") from None
        shape = struct.unpack(f"<{lengths[3]}i", stream.read(4 * lengths[3]))
        where = f"{stream.path}: {scope}/{name}"
        if dtype not in dtypes.NUMBERS:
            raise CheckpointError(f"{where}: there is no dtype {dtype} here")
        size = math.prod(shape) * np.dtype(dtypes.struct_of(dtype, ()).dtype).itemsize
        if min(shape, default=0) < 0 or size != lengths[4]:
            raise CheckpointError(
                f"{where}: {dtype}{list(shape)} takes {size} bytes, it has {lengths[4]}"
            )
        yield _Record(scope, name, dtype, shape, stream.position, size)
        stream.skip(size)


class _Joined(io.RawIOBase):
    """Files, one after the other, as one."""

    def __init__(self, files: Sequence[BinaryIO]):
        self._files = list(files)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads from the first file that has more bytes."""
        while self._files:
            data = self._files[0].read(len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            del self._files[0]
        return 0


class _Stream:
    """The bytes of the pieces, unpacked. It reads forward, and knows its position.

    Attributes:
      path: the file, for errors.
      position: how many bytes were read.
    """

    def __init__(self, path: str, pieces: Sequence[str]):
        self.path, self.position = path, 0
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(piece, "rb")) for piece in pieces]
            self._file: Any = io.BufferedReader(_Joined(files))
            if self._file.peek(len(_ZSTD)).startswith(_ZSTD):
                zstandard = imported(
                    "zstandard", f"{path}: compressed by zstd, which needs zstandard", "zstandard"
                )
                new_frame = lambda: zstandard.ZstdDecompressor().decompressobj()  # noqa: E731
                self._file = unpacked(self._file, new_frame)
            self._close = stack.pop_all().close

    def read(self, size: int, or_end: bool = False) -> bytes:
        """Reads bytes; in chunks, since a damaged file may ask for any number of them.

        Args:
          size: how many.
          or_end: whether the file may end here, which gives no bytes.

        Raises:
          CheckpointError: if there are fewer.
        """
        found = b"".join(self._chunks(size))
        if len(found) < size and not (or_end and not found):
            raise CheckpointError(
                f"{self.path}: ends {size - len(found)} bytes before the end of an array or its names. "
                "If it was not copied completely, copy it again"
            )
        return found

    def skip(self, size: int) -> None:
        """Reads bytes, and forgets them."""
        if (found := sum(map(len, self._chunks(size)))) < size:
            self.read(size - found)

    def close(self) -> None:
        """Closes the files."""
        self._close()

    def _chunks(self, size: int) -> Iterator[bytes]:
        while size and (chunk := self._read(min(size, _CHUNK))):
            size -= len(chunk)
            self.position += len(chunk)
            yield chunk

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError:
            raise
        except Exception as e:  # zstandard's own error, too
            raise CheckpointError(
                f"{self.path}: not whole ({e}). If it was not copied completely, copy it again"
            ) from None
