"""Tensors in the safetensors files of another library, in one or in several."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.files import dtypes
from haiku_implicit.files.container import CheckpointError, File, brief
from haiku_implicit.files.kinds import kind_of, open_container, read_json
from haiku_implicit.interchange.trees import Stored

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# What holds the values of dense tensors. Codes of fewer bits are nothing without their scales.
_DENSE = (
    "F16",
    "BF16",
    "F32",
    "F64",
    "BOOL",
    *(f"{kind}{n}" for kind in "IU" for n in (16, 32, 64)),
)


class Tensors(NamedTuple):
    """The tensors of a checkpoint, mapped into memory.

    Attributes:
      where: the folder or file, for errors.
      files: the file of each tensor.
    """

    where: str
    files: Mapping[str, File]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
          CheckpointError: if there is no such tensor.
        """
        if name not in self.files:
            raise CheckpointError(f"{self.where}: {name}: missing")
        return self.files[name].tensors[name].shape

    def array(self, name: str, kinds: str = "", shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A tensor, as a view of the file.

        Args:
          name: of the tensor.
          kinds: what the format calls the dtypes that it may have; any if empty.
          shape: that it has to have; any if None.

        Raises:
          CheckpointError: if there is no such tensor, or it has another dtype or shape.
        """
        found = self.shape(name)
        dtype = self.files[name].tensors[name].dtype
        if (kinds and dtype not in kinds.split()) or (shape is not None and found != shape):
            wanted = (
                f"{kinds.replace(' ', ' or ') or dtype}{list(found if shape is None else shape)}"
            )
            raise CheckpointError(
                f"{self.where}: {name}: expected {wanted}, got {dtype}{list(found)}"
            )
        data = self.files[name].bytes_of(name)
        return dtypes.array_of(data, dtypes.FOREIGN[dtype], found, False, as_numpy=True)

    def dense(self, name: str) -> Stored:
        """A tensor that is not quantized."""

        def read(dense: bool) -> np.ndarray:
            kind = self.files[name].tensors[name].dtype
            if kind not in _DENSE:
                raise CheckpointError(
                    f"{self.where}: {name}: codes of {kind} without scales that are known; read are "
                    f"{', '.join(_DENSE)}. A place of None leaves it out"
                )
            return self.array(name)

        return Stored(name, self.shape(name), read)


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a file, or of a folder in the layout of the Hugging Face hub.

    Raises:
      CheckpointError: for a folder without weights, an index that does not fit, a damaged file.
      OSError: if a file can't be read.
    """
    path = pathlib.Path(path)
    listed = _files_of(path) if path.is_dir() else {path: set()}
    files: dict[str, File] = {}
    for name, tensors in listed.items():
        file = open_container(os.fspath(name))
        if missing := sorted(tensors - set(file.tensors)):
            raise CheckpointError(f"{name}: {missing[0]}: missing, and {INDEX} lists it")
        for tensor in file.tensors:
            if tensor in files:
                raise CheckpointError(f"{name}: {tensor}: {files[tensor].path} has it, too")
            files[tensor] = file
    return Tensors(os.fspath(path), files)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `config.json` of a folder, or beside a file; empty where there is none.

    Raises:
      CheckpointError: if it is not a JSON object.
    """
    path = pathlib.Path(path)
    path = (path if path.is_dir() else path.parent) / CONFIG
    return _json(path) if path.exists() else {}


def _files_of(folder: pathlib.Path) -> dict[pathlib.Path, set[str]]:
    """The files with weights, and the tensors that have to be in each by the index."""
    if (folder / WHOLE).exists():
        return {folder / WHOLE: set()}
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder}: neither {WHOLE} nor {INDEX} is there{_hint(folder)}")
    listed = _json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{folder / INDEX}: weight_map: missing")
    files: dict[pathlib.Path, set[str]] = {}
    for name, file in listed.items():
        plain = isinstance(file, str) and file.isprintable()
        if not plain or pathlib.PurePath(file).name != file:
            raise CheckpointError(
                f"{folder / INDEX}: weight_map: {name}: expected a file beside it, got {brief(file)}"
            )
        files.setdefault(folder / file, set()).add(name)
    return files


def _hint(folder: pathlib.Path) -> str:
    """What there is in their place."""
    if any(folder.glob("*.bin")):
        return ". Pickled weights (.bin) are not read; save the model as safetensors"
    kind = kind_of(folder)
    return f". {kind.way_out}" if kind.name == "folder" else f": it is {kind.what}. {kind.way_out}"


def _json(path: pathlib.Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(found).__name__}")
    return found
