"""Parameters from GGUF files: dense tensors, and quantized ones as they are in the file."""

import functools
import os
import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from haiku_implicit.core.predicates import Targets
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.kinds import check_file, kind_of, not_a
from haiku_implicit.interchange.ggml import KINDS, from_ggml
from haiku_implicit.interchange.ggml_writing import gguf_package
from haiku_implicit.interchange.gguf_header import Row, table_of
from haiku_implicit.interchange.names import Names, place_of
from haiku_implicit.interchange.trees import Stored, tree_of
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix

# Those that are not quantized.
_DENSE = {
    **dict(F32=np.float32, F16=np.float16, BF16=ml_dtypes.bfloat16, F64=np.float64),
    **dict(I8=np.int8, I16=np.int16, I32=np.int32, I64=np.int64),
}


def load_gguf(
    file: Any,
    names: Names,
    *,
    dtype: Any = jnp.float32,
    like: Any = None,
    dequantize: Targets | None = None,
) -> dict[str, dict[str, Any]]:
    """Reads the tensors of a GGUF file as the parameters of a Haiku model.

    The file is mapped into memory and read tensor by tensor, with a progress bar. Quantized tensors
    keep their bits, see `from_ggml`. The groups of a weight `w` `[inputs, outputs]` lie along its
    inputs, those of an embedding `[rows, width]` along its width, as they do in the file.

    Args:
      file: the path of the file, or the `gguf.GGUFReader` that `open_gguf` made of it.
      names: where each tensor goes: a mapping or a function from its name in the file to
        'module/name', to a `Place`, or to None for what the model does not have; see
        `names_by_pattern`.
      dtype: of the parameters' values. None: that of dense tensors in the file, and float32 for
        quantized ones. Integers stay what they are.
      like: `{module: {name: array or shape}}`, such as `jax.eval_shape(model.init, ...)` gives: if the
        parameters are others, or have other shapes, this is an error. By default there is no check.
      dequantize: quantized tensors that become dense: a regular expression over 'module/name', a list
        of such names, a predicate, or True for all.

    Returns:
      `{module: {name: array}}`, with dense arrays, `QuantizedMatrix`, and `MatrixView` around that
      where a place gives a quantized tensor another shape.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError`: for a file that is truncated or damaged, has
        tensors of types that are not read (it names all of them), or does not have the parameters of
        `like`.
      ValueError: for a tensor without a place, two tensors at one place, or a place that does not fit.
      ImportError: without the package `gguf`.
      OSError: if the file can't be read.

    Example:
      >>> import os, tempfile, gguf, numpy as np, haiku_implicit as hki
      >>> path = os.path.join(tempfile.mkdtemp(), 'tiny.gguf')
      >>> writer = gguf.GGUFWriter(path, arch='tiny')
      >>> w = gguf.quantize(np.ones((8, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
      >>> writer.add_tensor('up.weight', w, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
      >>> writer.add_tensor('up.bias', np.zeros(8, np.float32))
      >>> for write in ('header', 'kv_data', 'tensors'):
      ...   getattr(writer, f'write_{write}_to_file')()
      >>> writer.close()
      >>> hki.load_gguf(path, {'up.weight': 'linear/w', 'up.bias': 'linear/b'})['linear']['w']
      QuantizedMatrix(float32[64,8], ...)
    """
    if hasattr(file, "tensors"):
        where, tensors = os.fspath(file.data.filename), [_of_reader(t) for t in file.tensors]
    else:
        where = os.fspath(file)
        tensors = _mapped(where)
    _check_kinds(tensors, names, where)
    stored = [Stored(t.name, t.shape, functools.partial(_read, t)) for t in tensors]
    return tree_of(stored, names, where, dtype=dtype, like=like, dequantize=dequantize)


def open_gguf(path: str | os.PathLike[str]) -> Any:
    """Opens a GGUF file.

    Args:
      path: the file.

    Returns:
      A `gguf.GGUFReader`: `fields` has the metadata, `tensors` the tensors, not read yet.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError`: if it is not a GGUF file, truncated or damaged.
      ImportError: without the package `gguf`.
      OSError: if the file can't be read.
    """
    path = os.fspath(path)
    _table(path)
    return gguf_package().GGUFReader(path)


def read_gguf(path: str | os.PathLike[str]) -> Any:
    """`open_gguf`, for its metadata alone: the bytes of its numbers may be in another order."""
    gguf = gguf_package()
    path = os.fspath(path)
    _check_beginning(path)
    if table_of(path, gguf) is not None:
        return gguf.GGUFReader(path)
    # The package slices the mapped file without looking at its length, so that what a short file raises
    # depends on where it ends.
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as e:
        raise CheckpointError(f"{path}: truncated or damaged GGUF file ({e})") from e


def _check_beginning(path: str) -> None:
    check_file(path, "a GGUF file")
    if kind_of(path).name != "gguf":
        raise not_a("a GGUF file", path)


def _table(path: str) -> list[Row]:
    """The tensors of a file, of this machine's order of bytes."""
    gguf = gguf_package()
    _check_beginning(path)
    rows = table_of(path, gguf)
    if rows is None or sys.byteorder != "little":
        raise CheckpointError(f"{path}: only little-endian GGUF files are read, on such machines")
    return rows


class _Tensor(NamedTuple):
    """A tensor of a file: numbers, or of those in few bits blocks `[..., rows, bytes]` uint8."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


def _of_reader(tensor: Any) -> _Tensor:
    shape = tuple(map(int, tensor.shape[::-1]))
    return _Tensor(tensor.name, tensor.tensor_type.name, shape, tensor.data)


def _mapped(path: str) -> list[_Tensor]:
    """All tensors, as views of the mapped file. (The package makes objects of all metadata as well.)"""
    rows = _table(path)
    data = np.memmap(path, mode="r")
    return [
        _Tensor(row.name, row.kind, row.shape, data[row.start : row.stop].reshape(row.packed))
        for row in rows
    ]


def _check_kinds(tensors: list[_Tensor], names: Names, where: str) -> None:
    """All tensors that are asked for are of types that are read."""
    unknown: dict[str, list[str]] = {}
    for tensor in tensors:
        kind = tensor.kind
        known = kind in KINDS or kind in _DENSE
        if not known and place_of(names, tensor.name, where) is not None:
            unknown.setdefault(kind, []).append(tensor.name)
    if unknown:
        shown = "; ".join(f"{kind}: {', '.join(own)}" for kind, own in unknown.items())
        raise CheckpointError(
            f"{where}: tensors of types that are not read: {shown}. Read are {', '.join(_DENSE)}, "
            f"{', '.join(KINDS)}. llama.cpp's `llama-quantize --allow-requantize` makes such a file"
        )


def _read(tensor: _Tensor, dense: bool) -> np.ndarray | QuantizedMatrix:
    _, kind, shape, data = tensor
    if kind not in _DENSE:
        return from_ggml(data, kind, axis=-1)
    # The reader of the package gives numbers, but for BF16, whose bytes it gives, as the file has them.
    return data if data.dtype != np.uint8 else data.view(_DENSE[kind]).reshape(shape)
