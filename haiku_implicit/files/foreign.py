"""Haiku parameters in files of other kinds: `.npz`, and pickles by an unpickler that runs nothing."""

import collections
import io
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from haiku_implicit.files import dtypes
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.kinds import kind_of, not_a

# What `load` reads.
EXPECTED = "a safetensors or .npz file"
# Where only the unpickler can tell: old pickles are texts.
_MAY_BE_PICKLES = ("pickle", "text", "unknown")


def read(path: str, allow_pickle: bool) -> Any:
    """The tree in a file, with NumPy arrays.

    Raises:
      CheckpointError: if it is not such a file; for a pickle without `allow_pickle`.
    """
    kind = kind_of(path).name
    if kind == "npz":
        return _read_npz(path)
    if allow_pickle and kind in _MAY_BE_PICKLES:
        return _read_pickle(path)
    raise not_a(EXPECTED, path)


# --- npz -----------------------------------------------------------------------------------------


def _read_npz(path: str) -> dict[str, dict[str, Any]]:
    """`{module: {name: array}}`, of names `module//name` or `module/name`."""
    modules: dict[str, dict[str, Any]] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                module, _, name = key.rpartition("//" if "//" in key else "/")
                try:
                    modules.setdefault(module, {})[name] = file[key]
                except (ValueError, EOFError, zipfile.BadZipFile) as e:
                    raise CheckpointError(f"{path}: {key}: {e}") from None
    except (zipfile.BadZipFile, ValueError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a whole .npz file ({e})") from None
    return modules


# --- pickles -------------------------------------------------------------------------------------
# What a pickle calls is looked up in a table of stand-ins. These have no attributes that a pickle could
# set, and never pass on to NumPy what could make it read other memory, or Python objects.


class _Stand:
    """A function, or the name of a type, in a pickle."""

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
    """NumPy's dtype, of numbers."""

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
    """NumPy's array, which gets its contents after it has been made."""

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
    """How a pickle of protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise CheckpointError("it calls _codecs.encode")
    return text.encode("latin1")


def _mapping(*args: Any) -> dict[Any, Any]:
    """Haiku's immutable dict, as a dict."""
    if len(args) > 1 or not all(isinstance(x, Mapping) for x in args):
        raise CheckpointError("it has an immutable dict of Haiku that is not made of a dict")
    return dict(*args)


def _functions() -> dict[tuple[str, str], Any]:
    """What a pickle may name."""
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
    """Knows arrays of NumPy, and containers."""

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
            return _finished(_Unpickler(io.BytesIO(file.read())).load())
    except OSError:
        raise
    except CheckpointError as e:
        raise CheckpointError(f"{path}: not a pickle of parameters: {e}") from None
    except Exception as e:  # whatever the unpickler says about bytes that are not a pickle
        raise CheckpointError(f"{path}: not a whole pickle ({type(e).__name__}: {e})") from None


def _finished(x: Any) -> Any:
    """What the stand-ins stand for."""
    if isinstance(x, _Array):
        return x.value
    if isinstance(x, _Stand | _DType):
        raise CheckpointError("it has a function or a type as a value")
    if type(x) in (dict, collections.OrderedDict):
        return type(x)((key, _finished(value)) for key, value in x.items())
    if type(x) in (list, tuple):
        return type(x)(map(_finished, x))
    return x
