"""The files of a model that is divided into several, which an index lists, or their names number."""

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from haiku_implicit.files.container import CheckpointError, brief
from haiku_implicit.files.kinds import read_json

# As in model-00002-of-00003.safetensors.
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)(\.\w+)", re.DOTALL)
_INDEX_END = ".safetensors.index.json"
# How many files an error names, and the most that a name can tell of.
_SHOWN, _MOST = 5, 10_000


class Shards(NamedTuple):
    """The files of a model.

    Attributes:
      files: all of them, in their order.
      listed_in: the name of the index; empty if there is none.
      of_tensors: by the index, the file of each tensor.
    """

    files: tuple[pathlib.Path, ...]
    listed_in: str = ""
    of_tensors: Mapping[str, pathlib.Path] = {}


def shards_of(path: pathlib.Path) -> Shards:
    """The files of the model that a file of safetensors is a part of; it alone if it is no part.

    Raises:
      CheckpointError: if one of them is not there, or an index is damaged.
      OSError: if an index can't be read.
    """
    for index in _indices(path.parent):
        shards = _listed(index)
        if path in shards.files:
            return _all_there(path, shards)
    return _all_there(path, Shards(numbered(path) or (path,)))


def shards_in(folder: pathlib.Path, whole: str) -> Shards | None:
    """The files of the one model in a folder; None if there is none, or several.

    Args:
      folder: the folder.
      whole: the name of the file of a model that is not divided.

    Raises:
      CheckpointError: if a file is not there, or an index is damaged.
      OSError: if an index can't be read.
    """
    if (folder / whole).exists():
        return Shards((folder / whole,))
    indices = _indices(folder)
    own = folder / f"{whole}.index.json"
    if own in indices or len(indices) == 1:
        index = own if own in indices else indices[0]
        return _all_there(index, _listed(index))
    models = {files for path in sorted(folder.glob("*.safetensors")) if (files := numbered(path))}
    return _all_there(folder, Shards(models.pop())) if len(models) == 1 else None


def numbered(path: pathlib.Path) -> tuple[pathlib.Path, ...] | None:
    """All files of a model, by the numbers in the name of one; None if it has none.

    >>> [str(x) for x in numbered(pathlib.Path('a/model-00002-of-00002.gguf'))]
    ['a/model-00001-of-00002.gguf', 'a/model-00002-of-00002.gguf']
    """
    match = _NUMBERED.fullmatch(path.name)
    if match is None:
        return None
    stem, number, count, end = match.groups()
    if not 1 < int(count) <= _MOST or int(number) > int(count):
        return None

    def file(i: int) -> pathlib.Path:
        return path.with_name(f"{stem}-{i:0{len(number)}}-of-{count}{end}")

    first = 0 if int(number) == 0 or file(0).exists() else 1
    return tuple(file(i) for i in range(first, first + int(count)))


def missing(files: Iterable[pathlib.Path]) -> str:
    """The names of files that are not there, for an error; empty if all are."""
    return names_of([file for file in files if not file.exists()])


def names_of(files: Iterable[pathlib.Path]) -> str:
    """The names of files, for an error."""
    names = [file.name for file in files]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _all_there(where: pathlib.Path, shards: Shards) -> Shards:
    if len(shards.files) > 1 and (names := missing(shards.files)):
        raise CheckpointError(
            f"{where}: the model is divided into {len(shards.files)} files, of which these are not "
            f"beside it: {names}. Copy all of them into one folder"
        )
    return shards


def _indices(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob(f"*{_INDEX_END}"))


def _listed(index: pathlib.Path) -> Shards:
    """What an index lists."""
    found: Any = read_json(index)
    listed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map: missing")
    for name, file in listed.items():
        plain = isinstance(file, str) and file.isprintable()
        if not plain or pathlib.PurePath(file).name != file:
            raise CheckpointError(
                f"{index}: weight_map: {name}: expected a file beside it, got {brief(file)}"
            )
    of_tensors = {name: index.with_name(file) for name, file in listed.items()}
    return Shards(tuple(dict.fromkeys(of_tensors.values())), index.name, of_tensors)
