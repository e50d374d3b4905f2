"""Reads Haiku parameters from `.npz` files, and from pickles without running their code."""

import collections
import errno
import io
import math
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from haiku_implicit.core.typing import Array, Tree
from haiku_implicit.files import dtypes
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.file_types import kind_of, not_a

# The files that `load` reads, for errors.
EXPECTED = "a safetensors or .npz file"
# Kinds that only the unpickler can tell from pickles: old pickles are texts.
_MAY_BE_PICKLES = ("pickle", "text", "unknown")
# A pickle's tree may take `_LEAST_ROOM` bytes, and `_ROOM` per byte of it; each object takes `_NODE`.
_LEAST_ROOM, _ROOM, _NODE = 1 << 20, 64, 64


def read(path: str, allow_pickle: bool) -> Tree:
    """Reads the tree in an `.npz` file or a pickle, with NumPy arrays.

    Raises:
      CheckpointError: for a file of another kind, and for a pickle without `allow_pickle`.
    """
    kind = kind_of(path).name
    if kind == "npz":
        return _read_npz(path)
    if kind == "joined":
        raise not_a("an .npz file of names `module/name`", path)
    if allow_pickle and kind in _MAY_BE_PICKLES:
        return _read_pickle(path)
    raise not_a(EXPECTED, path)


# --- npz -----------------------------------------------------------------------------------------


def _read_npz(path: str) -> dict[str, dict[str, Array]]:
    """Reads `{module: {name: array}}` from a file with names `module//name` or `module/name`."""
    modules: dict[str, dict[str, Array]] = {}
    try:
        with zipfile.ZipFile(path) as file:
            compressed = sum(member.compress_size for member in file.infolist())
            size = os.path.getsize(path)
            if compressed > size:  # files that overlap would expand beyond all bounds
                raise CheckpointError(
                    f"{path}: {compressed} bytes of arrays in a file of {size}; it is damaged"
                )
            for member in file.infolist():
                key = member.filename.removesuffix(".npy")
                module, _, name = key.rpartition("//" if "//" in key else "/")
                if name in modules.setdefault(module, {}):
                    raise CheckpointError(f"{path}: {key}: is in the file twice")
                modules[module][name] = _read_member(f"{path}: {key}", file, member)
    except Exception as e:  # zipfile raises many types of errors for a damaged archive
        # (EINVAL is a seek to before the file's beginning.)
        of_system = isinstance(e, OSError) and e.errno != errno.EINVAL
        if of_system or isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a whole .npz file ({e})") from None
    return modules


def _read_member(where: str, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Reads an array, and checks that it has as many bytes as its header says."""
    try:
        with file.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                header = np.lib.format.read_array_header_2_0  # 3.0 is this with names in UTF-8
            shape, fortran, dtype = header(stream)
            if dtype.hasobject:
                raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
            if dtype.kind not in "biufc":
                raise ValueError(
                    f"an array of {dtype.name}, which are not numbers. numpy.load reads it; "
                    "haiku_implicit.save writes the parameters among what that gives"
                )
            if any(n < 0 for n in shape):
                raise ValueError(f"{list(shape)} is not the shape of an array")
            expected = math.prod(shape) * dtype.itemsize
            if expected > member.file_size:
                raise ValueError(f"{list(shape)} takes {expected} bytes, it has less")
            data = stream.read()
            if len(data) != expected:
                raise ValueError(f"{list(shape)} takes {expected} bytes, it has {len(data)}")
    except Exception as e:  # the header is a Python literal, which may raise any type of error
        said = str(e) or type(e).__name__
        raise CheckpointError(f"{where}: {said}") from None
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


# --- pickles -------------------------------------------------------------------------------------
# Functions that a pickle calls are looked up in a table of stand-ins. These do not have attributes that
# a pickle could set, and never pass NumPy arguments that make it read other memory, or Python objects.


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


def _functions() -> dict[tuple[str, str], Any]:
    """The functions and types that a pickle may name."""
    found: dict[tuple[str, str], Any] = {("_codecs", "encode"): _encoded}
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray", "_reconstruct"] = lambda *_: _Array()
        found[f"{core}.multiarray", "scalar"] = lambda dtype, data: _array(data, dtype, (1,))[0]
        found[f"{core}.numeric", "_frombuffer"] = _array
    found["numpy", "dtype"] = _DType
    found["numpy", "ndarray"] = None
    for name in ("FlatMapping", "FlatMap"):
        found["haiku._src.data_structures", name] = _mapping
    return found


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only NumPy arrays and containers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "ml_dtypes" and name in dtypes.STORED:
            return _Stand(name)
        functions = _functions()
        if (module, name) not in functions:
            raise CheckpointError(
                f"it has {module}.{name}, and only arrays of NumPy, dicts, lists and tuples are read. "
                "If you trust the file, unpickle it yourself, and write it anew: haiku_implicit.save"
            )
        return _Stand(f"{module}.{name}", functions[module, name])


def _read_pickle(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read()
        _check_operations(data)
        return _finished(_Unpickler(io.BytesIO(data)).load(), _Room(len(data)))
    except OSError:
        raise
    except CheckpointError as e:
        raise CheckpointError(f"{path}: not a pickle of parameters: {e}") from None
    except Exception as e:  # any error of the unpickler about bytes that are not a pickle
        raise CheckpointError(f"{path}: not a whole pickle ({type(e).__name__}: {e})") from None


def _check_operations(data: bytes) -> None:
    """Raises for lengths and numbers beyond a pickle's size, for which Python would allocate memory."""
    for operation, argument, _ in pickletools.genops(data):
        places = operation.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if places and argument is not None and argument >= len(data):
            raise CheckpointError(f"it numbers an object {argument}, in {len(data)} bytes")


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
    if isinstance(x, _Stand | _DType):
        raise CheckpointError("it has a function or a type as a value")
    if type(x) in (dict, collections.OrderedDict):
        return type(x)((key, _finished(value, room)) for key, value in x.items())
    if type(x) in (list, tuple):
        return type(x)(_finished(value, room) for value in x)
    return x
