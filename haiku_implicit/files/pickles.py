"""Reads pickles of NumPy arrays without running their code, also those that joblib writes.

Functions that a pickle calls are looked up in a table of stand-ins. These do not have attributes that a
pickle could set, and never pass NumPy arguments that make it read other memory, or Python objects.
"""

import collections
import io
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from haiku_implicit.core.typing import Tree
from haiku_implicit.files import dtypes
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.unpacking import OPENERS

# A pickle's tree may take `_LEAST_ROOM` bytes, and `_ROOM` per byte of it; each object takes `_NODE`.
_LEAST_ROOM, _ROOM, _NODE = 1 << 20, 64, 64
# So many bytes, and `_LEAST_ROOM`, are unpacked per byte of a compressed file.
_UNPACKED = 16


class _Stand:
    """A stand-in for a function or a type in a pickle."""

    __slots__ = ("_call", "name")
    name: str

    def __init__(self, name: str, call: Callable[..., Any] | None = None):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        call = object.__getattribute__(self, "_call")
        if call is None:
            raise CheckpointError(f"it calls {self.name}")
        return call(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CheckpointError(f"it sets {name!r} of {self.name}")

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError(f"it changes {self.name}")


class _DType:
    """A stand-in for NumPy's dtype, only of numbers."""

    def __init__(self, kind: Any, *_: Any):
        named = isinstance(kind, str) and re.fullmatch(r"b1|[iu][1248]|f[248]|c8|c16", kind)
        if isinstance(kind, _Stand) and kind.name in dtypes.STORED:
            self.dtype = np.dtype(getattr(ml_dtypes, kind.name))
        elif named:
            self.dtype = np.dtype(kind)
        else:
            raise CheckpointError(f"it has an array of {kind!r:.80}, which are not numbers")

    def __setstate__(self, state: Any) -> None:
        _, order, subdtype, names, fields, *_ = state
        if order not in ("<", ">", "|", "=") or (subdtype, names, fields) != (None, None, None):
            raise CheckpointError("it has an array of records")
        if order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """A stand-in for NumPy's array, which gets its contents after its construction."""

    def __init__(self) -> None:
        self.value = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _array(data, dtype, shape, "F" if fortran else "C")


def _array(data: Any, dtype: Any, shape: Any, order: str = "C") -> np.ndarray:
    if not isinstance(dtype, _DType):
        raise CheckpointError("it has an array without a dtype")
    if isinstance(data, str):  # of Python 2
        data = data.encode("latin1")
    if not isinstance(data, bytes | bytearray):
        raise CheckpointError("it has an array of other objects than numbers")
    return np.frombuffer(bytes(data), dtype.dtype).reshape(shape, order=order)  # type: ignore[call-overload]


def _encoded(text: Any, encoding: Any) -> bytes:
    """Encodes a text as `_codecs.encode`, with which pickles of protocol 2 write bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise CheckpointError("it calls _codecs.encode")
    return text.encode("latin1")


def _mapping(*args: Any) -> dict[Any, Any]:
    """A stand-in for Haiku's immutable dict, which makes a dict."""
    if len(args) > 1 or not all(isinstance(x, Mapping) for x in args):
        raise CheckpointError("it has an immutable dict of Haiku that is not made of a dict")
    return dict(*args)


# The functions and types that a pickle may name, and their stand-ins.
_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _DType,
    ("numpy", "ndarray"): None,
    ("haiku._src.data_structures", "FlatMapping"): _mapping,
    ("haiku._src.data_structures", "FlatMap"): _mapping,
}
for _core in ("numpy.core", "numpy._core"):
    _FUNCTIONS |= {
        (f"{_core}.multiarray", "_reconstruct"): lambda *_: _Array(),
        (f"{_core}.multiarray", "scalar"): lambda dtype, data: _array(data, dtype, (1,))[0],
        (f"{_core}.numeric", "_frombuffer"): _array,
    }


class _File:
    """A file, compressed or not, that never reads more than it has: a pickle may claim any length."""

    def __init__(self, path: str, file: io.BufferedReader):
        self._file: Any = file
        self.left, self._most = os.path.getsize(path), ""
        for beginning, opener in OPENERS.items():
            if file.peek(len(beginning)).startswith(beginning):
                self._file = opener(file)
                self.left = _LEAST_ROOM + _UNPACKED * self.left
                self._most = f" (at most {self.left} are unpacked. Unpack a larger file first)"

    def read(self, size: int) -> bytes:
        """Reads bytes, if there are so many.

        Raises:
          EOFError: if there are fewer.
        """
        if not 0 <= size <= self.left:
            raise EOFError(f"it should have {size} more bytes, and has {self.left}{self._most}")
        self.left -= size
        found = self._file.read(size)
        if len(found) < size:
            raise EOFError(f"it should have {size - len(found)} more bytes")
        return found

    def readline(self) -> bytes:
        """Reads a line."""
        line = self._file.readline(self.left)
        self.left -= len(line)
        return line

    def check_end(self) -> None:
        """Raises if more bytes follow in a compressed file, or if its checksum at the end is wrong."""
        if self._most and self._file.read(1):
            raise EOFError("more bytes follow after its end")


class _Following(_Array):
    """A stand-in for joblib's wrapper of an array, whose bytes follow it in the file."""

    file: ClassVar[_File]

    def __setstate__(self, state: Any) -> None:
        shape, dtype, order = state["shape"], state["dtype"], state["order"]
        if not isinstance(dtype, _DType) or state["subclass"].name != "numpy.ndarray":
            raise CheckpointError("it has an array that is not one of NumPy's numbers")
        if state.get("numpy_array_alignment_bytes") is not None:
            self.file.read(self.file.read(1)[0])
        data = self.file.read(math.prod(shape) * dtype.dtype.itemsize)
        self.value = _array(data, dtype, shape, "F" if order == "F" else "C")


class _Unpickler(pickle._Unpickler):
    """An unpickler that knows only NumPy arrays and containers.

    It is Python's, as joblib's is: the one in C reads ahead, into the bytes of joblib's arrays, and
    makes room for as many objects as a pickle says.
    """

    def __init__(self, file: _File):
        super().__init__(file)
        self._following = type("Following", (_Following,), {"file": file})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("joblib.numpy_pickle", "NumpyArrayWrapper"):
            return self._following
        if module == "ml_dtypes" and name in dtypes.STORED:
            return _Stand(name)
        if (module, name) not in _FUNCTIONS:
            raise CheckpointError(
                f"it has {module}.{name}, and only arrays of NumPy, dicts, lists and tuples are read. "
                "If you trust the file, unpickle it yourself, and write it anew: haiku_implicit.save"
            )
        return _Stand(f"{module}.{name}", _FUNCTIONS[module, name])


def read(path: str) -> Tree:
    """Reads the tree in a pickle, with NumPy arrays.

    Raises:
      CheckpointError: for a file that is not a whole pickle, or has other objects in it.
      OSError: if the file can't be read.
    """
    try:
        with open(path, "rb") as opened:
            file = _File(path, opened)
            room = _Room(os.path.getsize(path))
            tree = _Unpickler(file).load()
            file.check_end()
            return _finished(tree, room)
    except CheckpointError as e:
        raise CheckpointError(f"{path}: not a pickle of parameters: {e}") from None
    except Exception as e:  # of the unpickler, or of bz2, about bytes that are not a pickle
        if isinstance(e, OSError) and e.errno is not None:
            raise
        raise CheckpointError(f"{path}: not a whole pickle ({type(e).__name__}: {e})") from None


class _Room:
    """Limits the memory of a pickle's tree: a few bytes can repeat an object any number of times."""

    def __init__(self, size: int):
        self.left = _LEAST_ROOM + _ROOM * size

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise CheckpointError(
                "the same objects are in it so often that it needs much more room"
            )


def _finished(x: Any, room: _Room) -> Any:
    """Replaces the stand-ins in a tree by the arrays that they stand for."""
    room.take(_NODE)
    if isinstance(x, _Array):
        room.take(x.value.nbytes)
        return x.value
    if isinstance(x, _Stand | _DType | type):
        raise CheckpointError("it has a function or a type as a value")
    if type(x) in (dict, collections.OrderedDict):
        return type(x)((key, _finished(value, room)) for key, value in x.items())
    if type(x) in (list, tuple):
        return type(x)(_finished(value, room) for value in x)
    return x
