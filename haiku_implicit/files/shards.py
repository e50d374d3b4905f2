"""Finds the files of a model that is divided into several, by an index or numbers in their names."""

import collections
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from haiku_implicit.core.messages import shown
from haiku_implicit.files.container import CheckpointError, expect
from haiku_implicit.files.file_types import read_json

# As in model-00002-of-00003.safetensors, also before a variant: model-00002-of-00003.fp16.safetensors.
_NUMBERED = re.compile(r"((?:.*[-_.])?)(\d+)-of-(\d+)((?:\.\w+)+)", re.DOTALL)
# As in consolidated.00.safetensors, a name without the number of files.
_CONSOLIDATED = re.compile(r"consolidated\.(\d+)\.safetensors")
# As in model.safetensors.index.json, and for a variant model.safetensors.index.fp16.json.
_INDEX_END = ".safetensors.index.json"
_INDEX_OF_VARIANT = re.compile(r".*\.safetensors\.index(\.[\w-]+)?\.json", re.DOTALL)
# The largest number of files that a name may give.
_MOST = 10_000


class Shards(NamedTuple):
    """The files of a model.

    Attributes:
      files: all files, in their order.
      listed_in: the name of the index; empty if there is none.
      of_tensors: the file of each tensor, from the index.
    """

    files: tuple[pathlib.Path, ...]
    listed_in: str = ""
    of_tensors: Mapping[str, pathlib.Path] = {}


def shards_of(path: pathlib.Path) -> Shards:
    """Finds all files of the model to which a safetensors file belongs; it may be the only one.

    Raises:
      CheckpointError: if one of them is missing, or an index is damaged.
      OSError: if an index can't be read.
    """
    model = _model_of(path)
    for index in _indices(path.parent):
        shards = _listed(index)
        if path in shards.files or (model and model in map(_model_of, shards.files)):
            _check_numbers(index, shards)
        if path in shards.files:
            return _all_there(path, shards)
    return _all_there(path, Shards(numbered(path) or _consolidated(path) or (path,)))


def shards_in(folder: pathlib.Path, whole: str) -> Shards | None:
    """Finds the files of the only model in a folder; None if there is none, or several.

    Args:
      folder: the folder.
      whole: the file name of a model that is not divided.

    Raises:
      CheckpointError: if a file is missing, or an index is damaged.
      OSError: if an index can't be read.
    """
    if (folder / whole).exists():  # it may also be one of several files
        return shards_of(folder / whole)
    if index := _index_in(folder, whole):
        shards = _listed(index)
        _check_numbers(index, shards)
        return _all_there(index, shards)
    models = {files for path in sorted(folder.glob("*.safetensors")) if (files := numbered(path))}
    return _all_there(folder, Shards(models.pop())) if len(models) == 1 else None


def numbered(path: pathlib.Path) -> tuple[pathlib.Path, ...] | None:
    """Lists all files of a model by the numbers in the name of one; None for a name without them.

    >>> [str(x) for x in numbered(pathlib.Path('a/model-00002-of-00002.gguf'))]
    ['a/model-00001-of-00002.gguf', 'a/model-00002-of-00002.gguf']
    """
    if (model := _model_of(path)) is None:
        return None
    stem, count, end = model
    number = path.name[len(stem) :].partition("-")[0]

    def file(i: int, width: int = len(number)) -> pathlib.Path:
        return path.with_name(f"{stem}{i:0{width}}-of-{count}{end}")

    first = 0 if int(number) == 0 or file(0).exists() else 1
    # 10-of-12 may belong to 01-of-12 or 1-of-12.
    width = 1 if number[0] != "0" and file(first, 1).exists() else len(number)
    return tuple(file(i, width) for i in range(first, first + int(count)))


def missing(files: Iterable[pathlib.Path]) -> str:
    """The names of missing files, for an error; empty if all exist."""
    return names_of([file for file in files if not file.exists()])


def names_of(files: Iterable[pathlib.Path]) -> str:
    """The names of files, for an error."""
    return shown([file.name for file in files])


def _all_there(where: pathlib.Path, shards: Shards) -> Shards:
    if len(shards.files) > 1 and (names := missing(shards.files)):
        raise CheckpointError(
            f"{where}: the model is divided into {len(shards.files)} files, of which these are not "
            f"beside it: {names}. Copy all of them into one folder"
        )
    return shards


def _model_of(path: pathlib.Path) -> tuple[str, str, str] | None:
    """The parts of a numbered name: the text before the number, the file count, and the text after."""
    match = _NUMBERED.fullmatch(path.name)
    if match is None:
        return None
    stem, number, count, end = match.groups()
    return (stem, count, end) if 1 < int(count) <= _MOST and int(number) <= int(count) else None


def _consolidated(path: pathlib.Path) -> tuple[pathlib.Path, ...] | None:
    """For a name like consolidated.01.safetensors, all files up to the last existing one."""
    if (match := _CONSOLIDATED.fullmatch(path.name)) is None:
        return None
    beside = map(_CONSOLIDATED.fullmatch, (x.name for x in path.parent.glob("consolidated.*")))
    last = max([int(match[1]), *(int(other[1]) for other in beside if other)])
    if last > _MOST:
        return None
    width = len(match[1])
    return tuple(path.with_name(f"consolidated.{i:0{width}}.safetensors") for i in range(last + 1))


def _indices(folder: pathlib.Path) -> list[pathlib.Path]:
    found = folder.glob("*.safetensors.index*.json")
    return sorted(index for index in found if _INDEX_OF_VARIANT.fullmatch(index.name))


def _index_in(folder: pathlib.Path, whole: str) -> pathlib.Path | None:
    """The index of the only model in a folder, if there is one; variants come second."""
    indices = _indices(folder)
    plain = [index for index in indices if index.name.endswith(_INDEX_END)]
    if (own := folder / f"{whole}.index.json") in plain:
        return own
    found = plain or indices
    return found[0] if len(found) == 1 else None


def _check_numbers(index: pathlib.Path, shards: Shards) -> None:
    """Raises if an index lists fewer files than their names count."""
    counts = collections.Counter(map(_model_of, shards.files))
    for file in shards.files:
        model = _model_of(file)
        if model is not None and counts[model] < int(model[1]):
            raise CheckpointError(
                f"{index}: weight_map: expected all {int(model[1])} files that the name {file.name} "
                f"tells of, got {counts[model]}. Copy the index that belongs to the model; without an "
                "index, all files that the names number are read"
            )


def _listed(index: pathlib.Path) -> Shards:
    """Reads the files that an index lists."""
    found: Any = read_json(index)
    listed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map: missing")
    for name, file in listed.items():
        plain = isinstance(file, str) and file.isprintable() and pathlib.PurePath(file).name == file
        expect(plain, f"{index}: weight_map: {name}", "a file beside it", file)
    of_tensors = {name: index.with_name(file) for name, file in listed.items()}
    return Shards(tuple(dict.fromkeys(of_tensors.values())), index.name, of_tensors)
