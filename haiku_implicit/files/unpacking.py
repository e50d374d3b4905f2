"""Unpacks compressed files, a few bytes at a time."""

import bz2
import functools
import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

_PACKED = 1 << 10  # unpacked at once: at most some thousand times as many bytes come of it


class _Unpacked(io.RawIOBase):
    """The bytes that were compressed, in one frame or several."""

    def __init__(self, file: BinaryIO, new_frame: Callable[[], Any]):
        self._file, self._new_frame, self._frame = file, new_frame, new_frame()
        self._found = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads at most so many bytes, and none only at the end."""
        while not self._found:
            if not (data := self._frame.unused_data or self._file.read(_PACKED)):
                break
            if self._frame.eof:
                self._frame = self._new_frame()
            self._found = memoryview(self._frame.decompress(data))
        size = min(len(buffer), len(self._found))
        buffer[:size], self._found = self._found[:size], self._found[size:]
        if not size and not self._frame.eof:
            raise EOFError("the last part of the compressed bytes is missing")
        return size


def unpacked(file: BinaryIO, new_frame: Callable[[], Any]) -> io.BufferedReader:
    """Opens the bytes that were compressed, in one frame or several."""
    return io.BufferedReader(_Unpacked(file, new_frame))


# Opens a file of one of Python's own compressors, by the file's first bytes. lzma is not among them:
# a file's first bytes decide how much memory it takes, up to 4 GB.
OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    **{
        b"x" + level: functools.partial(unpacked, new_frame=zlib.decompressobj)
        for level in (b"\x01", b"\x5e", b"\x9c", b"\xda")
    },
    b"BZh": bz2.open,
}
