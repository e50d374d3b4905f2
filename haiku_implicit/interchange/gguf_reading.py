"""Reads parameters from GGUF files: dense tensors, and quantized ones without requantizing them."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import DType, Tree
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.shards import missing, names_of, numbered
from haiku_implicit.interchange.ggml import KINDS, from_ggml, gguf_package
from haiku_implicit.interchange.gguf_header import Field, Header, Row, header_of
from haiku_implicit.interchange.names import Names, places_of
from haiku_implicit.interchange.trees import Stored, tree_of
from haiku_implicit.quantized.matrix import QuantizedMatrix

# Kinds that are not quantized.
_DENSE = {
    **dict(F32=np.float32, F16=np.float16, BF16=ml_dtypes.bfloat16, F64=np.float64),
    **dict(I8=np.int8, I16=np.int16, I32=np.int32, I64=np.int64),
}


def load_gguf(
    file: str | os.PathLike[str] | GGUFFile,
    names: Names,
    *,
    dtype: DType | None = jnp.float32,
    like: Tree = None,
    dequantize: Targets | None = None,
) -> dict[str, dict[str, jax.Array]]:
    """Reads the tensors of a GGUF file as the parameters of a Haiku model.

    The file is mapped into memory and read tensor by tensor, with a progress bar. If a model is split
    into several files (`model-00001-of-00003.gguf`, ...), all are read, whichever of them is given.
    Quantized tensors keep their bits, see `from_ggml`. As in the file, a weight `w` `[inputs, outputs]`
    has groups along its inputs, and an embedding `[rows, width]` along its width.

    Args:
      file: the path of the file, or a `GGUFFile` from `open_gguf`.
      names: the place of each tensor: a mapping or a function from its name in the file to
        'module/name', to a `Place`, to a list of places that all get it, or to None for a tensor that
        the model does not have; see `names_by_pattern`.
      dtype: the dtype of the parameters' values. None keeps the dtype of dense tensors, and takes
        float32 for quantized ones. Integers are not converted.
      like: `{module: {name: array or shape}}`, such as `jax.eval_shape(model.init, ...)` gives: other
        parameters or other shapes are an error. The default does not check.
      dequantize: quantized tensors that become dense: a regular expression over 'module/name', a list
        of such names, a predicate, or True for all.

    Returns:
      `{module: {name: array}}`, with dense arrays and `QuantizedMatrix`, in a `MatrixView` if a place
      gives a quantized tensor another shape.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError`: for a file that is truncated or damaged, has
        tensors of unsupported types (it names all except those that `names` leaves out), is one of
        several files of a model of which others are missing, or has parameters that differ from `like`.
      ValueError: for a tensor that `names` does not know, two tensors for one parameter, or a place
        that does not fit.
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
    if not isinstance(file, GGUFFile):
        file = open_gguf(file)
    _check_kinds(file.tensors, names, file.path)
    stored = list(map(_stored, file.tensors))
    return tree_of(stored, names, file.path, dtype=dtype, like=like, dequantize=dequantize)


class Tensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
      name: its name.
      kind: the name of its type, such as 'Q4_0'; a description if the type is not known.
      shape: its shape in NumPy's order, which is the reverse of the file's.
      data: a view of the mapped file: numbers, or blocks `[..., rows, bytes]` uint8 of a quantized
        tensor; None if the type is not known.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray | None


class GGUFFile(NamedTuple):
    """An opened GGUF file, or all files of one model.

    Attributes:
      path: the file that was opened.
      fields: the metadata. A field's `contents()` is its value.
      tensors: the tensors of all files of the model, which are not read yet.
    """

    path: str
    fields: dict[str, Field]
    tensors: list[Tensor]

    def __repr__(self) -> str:
        count = f"{len(self.fields)} fields, {len(self.tensors)} tensors"
        return f"GGUFFile({self.path!r}, {count})"


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file.

    Args:
      path: the file; any one of them if the model is split into several.

    Returns:
      A `GGUFFile`: `fields` has the metadata, `tensors` the tensors of all files of the model, which
      are not read yet.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError`: if it is not a GGUF file, is truncated or damaged,
        or is one of several files of a model of which others are missing.
      ImportError: without the package `gguf`.
      OSError: if the file can't be read.
    """
    path = os.fspath(path)
    parts = _parts(path)
    tensors = [tensor for part, header in parts.items() for tensor in _tensors(part, header.rows)]
    return GGUFFile(path, next(iter(parts.values())).fields, tensors)


def _tensors(path: str, rows: list[Row]) -> Iterator[Tensor]:
    file = np.memmap(path, mode="r")
    for name, kind, shape, start, stop, packed in rows:
        if kind in _DENSE:
            data = file[start:stop].view(_DENSE[kind]).reshape(shape)
        else:
            data = None if packed is None else file[start:stop].reshape(packed)
        yield Tensor(name, kind, shape, data)


def header_of_model(path: str | os.PathLike[str]) -> Header:
    """Returns the metadata of a model, and the tables of all its files, in either byte order."""
    path = os.fspath(path)
    own = header_of(path)
    if own.order != "<":
        return own
    headers = list(_parts(path).values())
    return headers[0]._replace(rows=[row for header in headers for row in header.rows])


# --- the files of a model --------------------------------------------------------------------------


def _header(path: str) -> Header:
    """The header of a file in this machine's byte order."""
    gguf_package()  # an ImportError before others
    header = header_of(path)
    if header.order != "<" or sys.byteorder != "little":
        raise CheckpointError(f"{path}: only little-endian GGUF files are read, on such machines")
    return header


def _parts(path: str) -> dict[str, Header]:
    """The headers of all files of a file's model, in their order."""
    own = _header(path)
    number, count, tensors = own.split
    if count <= 1:
        _check_name(path)
        return {path: own}
    here = f"{path}: file {number + 1} of {count} of a model (split.count)"
    files = numbered(pathlib.Path(path)) or ()
    if len(files) != count or files[number : number + 1] != (pathlib.Path(path),):
        raise CheckpointError(
            f"{here}, whose other files its name does not tell: expected it to end in "
            f"-{number + 1:05}-of-{count:05}.gguf. Give all files the names that they had"
        )
    if names := missing(files):
        raise CheckpointError(f"{here}, and these are not beside it: {names}. Copy them there")
    parts = {os.fspath(file): _header(os.fspath(file)) for file in files}
    _check_parts(parts, count, tensors)
    return parts


def _check_parts(parts: dict[str, Header], count: int, tensors: int | None) -> None:
    """Raises unless the files are one model: with the numbers in their names, and each tensor once."""
    found: dict[str, str] = {}
    for i, (path, header) in enumerate(parts.items()):
        if header.split != (i, count, tensors):
            number, files, own = header.split
            raise CheckpointError(
                f"{path}: expected file {i + 1} of {count} and {tensors} tensors in all, got file "
                f"{number + 1} of {files} and {own}"
            )
        for row in header.rows:
            if row.name in found:
                raise CheckpointError(f"{path}: {row.name}: {found[row.name]} has it, too")
            found[row.name] = path
    if tensors not in (None, len(found)):
        raise CheckpointError(
            f"{next(iter(parts))}: a model of {tensors} tensors (split.tensors.count); its {count} "
            f"files have {len(found)}"
        )


def _check_name(path: str) -> None:
    """Raises for a file that is one of several only by its name."""
    if files := numbered(pathlib.Path(path)):
        others = names_of(file for file in files if file != pathlib.Path(path))
        raise CheckpointError(
            f"{path}: by its name one of {len(files)} files of a model, and it does not say so itself "
            f"(split.count), so that they can't be read as one. The others are {others}. Divide the "
            "model with llama-gguf-split of llama.cpp. If the file is a whole model, rename it"
        )


# --- tensors ---------------------------------------------------------------------------------------


def _check_kinds(tensors: list[Tensor], names: Names, where: str) -> None:
    """Raises for tensors of unsupported types, unless they are left out."""
    unread: dict[tuple[str, bool], list[str]] = {}
    for name, kind, _, data in tensors:
        known = kind in KINDS or kind in _DENSE
        if not known and places_of(names, name, where):
            unread.setdefault((kind, data is None), []).append(name)
    if unread:
        shown = "; ".join(
            f"{', '.join(own)} has {kind}" if unknown else f"{kind}: {', '.join(own)}"
            for (kind, unknown), own in unread.items()
        )
        raise CheckpointError(
            f"{where}: tensors of types that are not read: {shown}. Read are {', '.join(_DENSE)}, "
            f"{', '.join(KINDS)}. `llama-quantize --allow-requantize` of llama.cpp, or of the program "
            "that wrote it, makes such a file; a place of None leaves a tensor out"
        )


def _stored(tensor: Tensor) -> Stored:
    def read(dense: bool) -> np.ndarray | QuantizedMatrix:
        assert tensor.data is not None  # `_check_kinds`
        if tensor.kind in _DENSE:
            return tensor.data
        return from_ggml(tensor.data, tensor.kind, axis=-1)

    return Stored(tensor.name, lambda: tensor.shape, read)
