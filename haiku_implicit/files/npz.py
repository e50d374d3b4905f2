"""Reads `.npz` files array by array: at first only the archive's directory and the arrays' headers."""

import errno
import math
import os
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.files import dtypes
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.structure import Structure, describe_modules

_Result = TypeVar("_Result")


class _Header(NamedTuple):
    """An array in the archive: its key, its member, and where in the member its bytes start."""

    key: str
    member: zipfile.ZipInfo
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int


class Archive:
    """The counterpart of a `File`: the arrays of an `.npz` file, by their names in its structure.

    Attributes:
      path: the file.
      structure: `{module: {name: array}}`, from names `module//name` or `module/name`.

    Raises:
      CheckpointError: if the file is damaged, or has other arrays than those of numbers.
      OSError: if it can't be read.
    """

    def __init__(self, path: str):
        self.path = path
        self._file = self._guarded(lambda: zipfile.ZipFile(path))
        self.structure: Structure
        arrays = map(_array_of, self._guarded(self._headers))
        self.structure, self._members = describe_modules(path, arrays)

    def bytes_of(self, name: str) -> np.ndarray:
        """Reads the bytes of an array, `[bytes]` uint8, in C order."""
        header = self._members[name]
        with_key = f"{self.path}: {header.key}"
        data = self._guarded(lambda: _data_of(self._file, header), with_key)
        x = np.frombuffer(data, header.dtype)
        return dtypes.bytes_of(x.reshape(header.shape, order="F" if header.fortran else "C"))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _headers(self) -> list[_Header]:
        compressed = sum(member.compress_size for member in self._file.infolist())
        size = os.path.getsize(self.path)
        if compressed > size:  # files that overlap would expand beyond all bounds
            raise CheckpointError(
                f"{self.path}: {compressed} bytes of arrays in a file of {size}; it is damaged"
            )
        return [self._header(member) for member in self._file.infolist()]

    def _header(self, member: zipfile.ZipInfo) -> _Header:
        key = member.filename.removesuffix(".npy")
        return self._guarded(lambda: _header_of(self._file, key, member), f"{self.path}: {key}")

    def _guarded(self, run: Callable[[], _Result], where: str = "") -> _Result:
        """Runs a function; raises one kind of error for whatever a damaged archive leads to."""
        try:
            return run()
        except Exception as e:  # zipfile raises many types, and a header is a Python literal
            # (EINVAL is a seek to before the file's beginning.)
            of_system = isinstance(e, OSError) and e.errno not in (None, errno.EINVAL)
            if of_system or isinstance(e, CheckpointError):
                raise
            said = str(e) or type(e).__name__
            text = f"{where}: {said}" if where else f"{self.path}: not a whole .npz file ({said})"
            raise CheckpointError(text) from None


def _array_of(header: _Header) -> tuple[str, str, jax.ShapeDtypeStruct, _Header]:
    """The module, the name and the struct of an array, and its header."""
    module, _, name = header.key.rpartition("//" if "//" in header.key else "/")
    return module, name, jax.ShapeDtypeStruct(header.shape, header.dtype.newbyteorder("=")), header


def _header_of(file: zipfile.ZipFile, key: str, member: zipfile.ZipInfo) -> _Header:
    """Reads an array's shape, order and dtype, and checks them."""
    with file.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            header = np.lib.format.read_array_header_2_0  # 3.0 is this with names in UTF-8
        shape, fortran, dtype = header(stream)
        if dtype.hasobject:
            raise value_error(
                "it holds Python objects, such as a dict; haiku_implicit.save writes trees"
            )
        if dtype.kind not in "biufc":
            raise value_error(
                f"an array of {dtype.name}, which are not numbers. numpy.load reads it; "
                "haiku_implicit.save writes the parameters among what that gives"
            )
        if any(n < 0 for n in shape):
            raise value_error(f"{list(shape)} is not the shape of an array")
        start = stream.tell()
    expected, there = math.prod(shape) * dtype.itemsize, member.file_size - start
    if expected != there:
        raise value_error(f"{list(shape)} takes {expected} bytes, it has {there}")
    return _Header(key, member, dtype, shape, fortran, start)


def _data_of(file: zipfile.ZipFile, header: _Header) -> bytes:
    """Reads an array's bytes, which zipfile compares with their checksum."""
    expected = math.prod(header.shape) * header.dtype.itemsize
    with file.open(header.member) as stream:
        stream.read(header.start)  # `seek` would turn the checksum off
        data = stream.read()
    if len(data) != expected:
        raise value_error(f"{list(header.shape)} takes {expected} bytes, it has {len(data)}")
    return data
