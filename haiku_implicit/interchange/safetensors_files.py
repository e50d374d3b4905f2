"""Reads tensors from another library's safetensors files, one or several."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from haiku_implicit.core.typing import JsonObject
from haiku_implicit.files import dtypes
from haiku_implicit.files.checkpoint import opened
from haiku_implicit.files.container import ENTRY, PART, CheckpointError, File, expect
from haiku_implicit.files.file_types import kind_of, open_container, read_json
from haiku_implicit.files.shards import shards_in, shards_of
from haiku_implicit.interchange.trees import Stored

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# The dtypes of scales.
FLOATS = "F16 BF16 F32"
# The dtypes of dense tensors. Codes of fewer bits are useless without their scales.
_DENSE = "F16 BF16 F32 F64 BOOL I16 I32 I64 U16 U32 U64".split()
# The dtypes into which codes are packed.
_PACKED = ("I16", "U16", "I32", "U32")


@dataclasses.dataclass(frozen=True)
class Tensors:
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
        """Returns a tensor as a view of the file.

        Args:
          name: the tensor's name.
          kinds: the format's names of the allowed dtypes; any if empty.
          shape: the required shape; any if None.

        Raises:
          CheckpointError: if there is no such tensor, or it has another dtype or shape.
        """
        found = self.shape(name)
        dtype = self.files[name].tensors[name].dtype
        if (kinds and dtype not in kinds.split()) or (shape is not None and found != shape):
            sizes = list(found if shape is None else shape)
            wanted = f"{kinds.replace(' ', ' or ') or dtype}{sizes}"
            raise CheckpointError(
                f"{self.where}: {name}: expected {wanted}, got {dtype}{list(found)}"
            )
        data = self.files[name].bytes_of(name)
        return dtypes.array_of(data, dtypes.FOREIGN[dtype], found, False, as_numpy=True)

    def modules(self, part: str) -> list[str]:
        """The names of the modules that have a tensor with this last part of its name."""
        return [x.removesuffix(f".{part}") for x in self.files if x.endswith(f".{part}")]

    def dense(self, name: str) -> Stored:
        """Returns a `Stored` for a tensor that is not quantized."""

        def shape() -> tuple[int, ...]:
            self._check_dense(name)
            return self.shape(name)

        return Stored(name, shape, lambda dense: self.array(name))

    def _check_dense(self, name: str) -> None:
        """Raises for codes without known scales, and for weights that an unknown method quantized."""
        kind, shape = self.files[name].tensors[name][:2]
        out = "A place of None leaves it out"
        if kind not in _DENSE:
            raise CheckpointError(
                f"{self.where}: {name}: codes of {kind} without scales that are known; read are "
                f"{', '.join(_DENSE)}. {out}"
            )
        scales = self._scales.get(name) or self._scales.get(name.rpartition(".")[0])
        if kind in _PACKED and len(shape) > 1 and scales:
            raise CheckpointError(
                f"{self.where}: {name}: of a quantized weight, whose scales are {scales}, and no "
                f"quantization_config in {CONFIG} says how it was quantized. {out}"
            )

    @functools.cached_property
    def _scales(self) -> dict[str, str]:
        """The name of a tensor of scales for each weight or module that has one."""
        found = {}
        for name in self.files:
            owner, _, own = name.rpartition(".")
            if owner and ("scale" in own or own in ("absmax", "SCB")):
                found[owner] = name
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """The tensors of one module, by the last parts of their names.

    Attributes:
      tensors: the tensors of the checkpoint.
      module: the name of the module.
    """

    tensors: Tensors
    module: str

    def path(self, part: str) -> str:
        """The name of a tensor."""
        return f"{self.module}.{part}"

    def has(self, part: str) -> bool:
        """Whether the module has a tensor."""
        return self.path(part) in self.tensors.files

    def kind(self, part: str) -> str:
        """The format's name of a tensor's dtype."""
        self.sizes(part)
        return self.tensors.files[self.path(part)].tensors[self.path(part)].dtype

    def sizes(self, part: str) -> tuple[int, ...]:
        """`Tensors.shape`."""
        return self.tensors.shape(self.path(part))

    def array(self, part: str, kinds: str = "", shape: tuple[int, ...] | None = None) -> np.ndarray:
        """`Tensors.array`."""
        return self.tensors.array(self.path(part), kinds, shape)

    def indices(self, part: str, kinds: str, length: int, count: int) -> np.ndarray:
        """A tensor of `length` integers from 0 to `count - 1`."""
        found = self.array(part, kinds, (length,))
        ends = [int(found.min()), int(found.max())]
        self.expect(ends[0] >= 0 and ends[1] < count, part, f"groups 0 ... {count - 1}", ends)
        return found

    def expect(self, right: bool, part: str, expected: str, found: Any) -> None:
        """Raises unless a tensor is right."""
        expect(right, f"{self.tensors.where}: {self.path(part)}", expected, found)

    def stored(
        self, shape: Callable[[], tuple[int, ...]], read: Any, parts: Iterable[str]
    ) -> Stored:
        """A `Stored` for the weight of the module, made of some parts."""
        return Stored(self.path("weight"), shape, read, tuple(map(self.path, parts)))


def open_tensors(path: str | os.PathLike[str]) -> Tensors:
    """Opens the tensors in all files of a model, even if `path` is only one of them.

    Args:
      path: a file, or a folder in the layout of the Hugging Face hub.

    Raises:
      CheckpointError: for a folder without weights, an index that does not fit, a file that is damaged
        or missing, or a tensor that several files have.
      OSError: if a file can't be read.
    """
    path = pathlib.Path(path)
    shards = shards_in(path, WHOLE) if path.is_dir() else shards_of(path)
    if shards is None:
        raise CheckpointError(f"{path}: neither {WHOLE} nor {INDEX} is there{_hint(path)}")
    files: dict[str, File] = {}
    for name, file in ((x, file) for x in shards.files for file in _opened(os.fspath(x))):
        for tensor in file.tensors:
            listed = shards.of_tensors.get(tensor, name)
            if listed != name:  # a copy
                continue
            if tensor in files:
                raise CheckpointError(f"{name}: {tensor}: {files[tensor].path} has it, too")
            files[tensor] = file
    for tensor, name in shards.of_tensors.items():
        if tensor not in files:
            raise CheckpointError(f"{name}: {tensor}: missing, and {shards.listed_in} lists it")
    return Tensors(os.fspath(path), files)


def _opened(path: str) -> list[File]:
    """Opens a file, or all files of a checkpoint that `save` wrote."""
    file = open_container(path)
    ours = ENTRY in file.metadata or PART in file.metadata
    return opened(path)[0] if ours else [file]


def read_config(path: str | os.PathLike[str]) -> JsonObject:
    """Reads the `config.json` in a folder, or next to a file; empty if there is none.

    Raises:
      CheckpointError: if it is not a JSON object.
    """
    path = pathlib.Path(path)
    path = (path if path.is_dir() else path.parent) / CONFIG
    config = read_json(path) if path.exists() else {}
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def _hint(folder: pathlib.Path) -> str:
    """Text about a folder without weights, for an error."""
    if any(folder.glob("*.bin")):
        return ". Pickled weights (.bin) are not read; save the model as safetensors"
    kind = kind_of(folder)
    return f". {kind.way_out}" if kind.name == "folder" else f": it is {kind.what}. {kind.way_out}"
