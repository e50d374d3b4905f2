"""Compares the tree in a file with a `like` tree."""

import json
import os
from typing import Any

from haiku_implicit.core import serialization
from haiku_implicit.core.messages import see
from haiku_implicit.core.typing import Tree
from haiku_implicit.files import structure as structures
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.file_types import kind_of
from haiku_implicit.files.structure import Branch, Leaf, Structure

_WAY_OUT = "The file is of another model or other settings; without `like` it is read as it is"
_WAY_OUT_OF_ORBAX = (
    "A folder of Orbax gives dicts, lists and arrays here. Orbax restores other types: "
    "orbax.checkpoint.StandardCheckpointer().restore(path, jax.eval_shape(lambda: like))"
)


def check_like(found: Structure, like: Tree, where: str) -> None:
    """Checks that a file's tree has the containers, types, keys, shapes and dtypes of `like`.

    Args:
      found: the structure in the file.
      like: the other tree.
      where: the file, for errors.

    Raises:
      CheckpointError: at the first difference; it names the key, and both sides.
    """
    _compare(found, structures.describe(like).structure, "", where)


def _compare(found: Structure, wanted: Structure, path: str, where: str) -> None:
    if _about(found) != _about(wanted):
        raise _different(path, _told(wanted), _told(found), where)
    if isinstance(found, Leaf) or isinstance(wanted, Leaf) or found.kind == "value":
        return
    there, children = _by_key(found), _by_key(wanted)
    for key, own in children.items():
        if key not in there:
            shown = structures.joined(path, key, structures.between(wanted.kind))
            raise _unlike(where, shown, f"missing in the file, `like` has {_told(own)} there")
    for key, child in there.items():
        shown = structures.joined(path, key, structures.between(found.kind))
        if key not in children:
            raise _unlike(where, shown, f"the file has {_told(child)} there, `like` nothing")
        _compare(child, children[key], shown, where)
    if _text_of(found.static) != _text_of(wanted.static):
        expected, got = _unlike_parts(wanted.static, found.static)
        raise _different(path, f"{_told(wanted)} with {expected}", got, where)


def _unlike_parts(wanted: Any, found: Any) -> tuple[str, str]:
    """The static fields that differ, in words; both sides whole if they are no fields."""
    if not (isinstance(wanted, dict) and isinstance(found, dict) and {*wanted} == {*found}):
        return f"{wanted}", f"{found}"
    names = [name for name in wanted if _text_of(wanted[name]) != _text_of(found[name])]
    own, other = (", ".join(f"{n}={x[n]!r}" for n in names) for x in (wanted, found))
    return own, other


def _text_of(static: Any) -> str:
    return json.dumps(static, sort_keys=True)


def _by_key(branch: Branch) -> dict[Any, Structure]:
    """The children of a branch by their keys as read from a file, so that NaN equals NaN."""
    keys = (serialization.decode(serialization.encode(key)) for key in branch.keys)
    return dict(zip(keys, branch.children, strict=True))


def _different(path: str, wanted: str, found: str, where: str) -> CheckpointError:
    return _unlike(where, path or "the tree", f"expected {wanted}, found {found}")


def _unlike(where: str, path: str, what: str) -> CheckpointError:
    is_orbax = os.path.isdir(where) and kind_of(where).name == "orbax"
    way_out = _WAY_OUT_OF_ORBAX if is_orbax else _WAY_OUT
    return CheckpointError(f"{where}: {path}: {what}. {way_out} {see('a-file-unlike-like')}")


def _about(structure: Structure) -> Any:
    """The properties in which two structures have to agree, apart from their children."""
    if isinstance(structure, Leaf):
        return structure.dtype, structure.shape
    return structure.kind, structure.dense


def _told(structure: Structure) -> str:
    """Describes a structure in words, for errors."""
    if isinstance(structure, Leaf):
        return f"an array {structure.dtype}{list(structure.shape)}"
    names = {"none": "None", "value": "a Python value"}
    dense = f" {structure.dense[0]}{list(structure.dense[1])}" if structure.dense else ""
    return f"{names.get(structure.kind, structure.kind)}{dense}"
