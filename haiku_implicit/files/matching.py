"""Compares the tree in a file with a `like` tree."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

from haiku_implicit.core import serialization
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.typing import Tree
from haiku_implicit.files import structure as structures
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.files.structure import Branch, Leaf, Structure

_WAY_OUT = "The file is of another model or other settings; without `like` it is read as it is"


def check_like(found: Structure, like: Tree, where: str) -> list[str]:
    """Checks that a file's tree has the containers, types, keys, shapes and dtypes of `like`.

    Numbers of adapters that `completed` fills may be None only in the file: older versions omitted
    them.

    Args:
      found: the structure in the file.
      like: the other tree.
      where: the file, for errors.

    Returns:
      The paths of the fields that are None only in the file: see `with_left_out`.

    Raises:
      CheckpointError: at the first difference; it names the key, and both sides.
    """
    left_out: list[str] = []
    _compare(found, structures.describe(like).structure, "", where, left_out)
    return left_out


def with_left_out(tree: Tree, like: Tree, where: str) -> Tree:
    """Fills the fields that a file leaves out with the values in `like`.

    These have to be the numbers that `completed` gives for None, or zeros in the states of optimizers.

    Raises:
      CheckpointError: if `like` has other values there, or none.
    """

    def completed(x: Any, y: Any) -> Tree:
        if not is_implicit(x):
            return x
        node = serialization.node_of(x)
        assert node is not None
        names, (values, static) = node.fields()[0], node.parts(x)
        others = [getattr(y, name) for name in names]
        made = [
            _left_out(x, y, name, where)
            if old is None and value is not None
            else jax.tree.map(completed, old, value, is_leaf=is_implicit)
            for name, old, value in zip(names, values, others, strict=True)
        ]
        return node.build(static, made)

    return jax.tree.map(completed, tree, like, is_leaf=is_implicit)


def _left_out(x: Any, like: Tree, name: str, where: str) -> Tree:
    value = getattr(like, name)
    arrays = jax.tree.leaves(like)
    if any(isinstance(y, jax.ShapeDtypeStruct) for y in arrays):
        raise _other_number(like, name, where, "no values")
    if not any(np.any(y) for y in arrays) or not jax.tree.leaves(value):
        return value  # the moments of an optimizer before its first step
    wanted = getattr(x.completed(), name)
    if not np.array_equal(value, wanted):
        raise _other_number(like, name, where, f"{value}, not {wanted},")
    return value


def _other_number(like: Tree, name: str, where: str, values: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {type(like).__name__}.{name}: an older version left out what it was by default, and "
        f"`like` has {values} there. Load the file without `like`, or give as `like` arrays that the "
        "same options made"
    )


def _compare(
    found: Structure, wanted: Structure, path: str, where: str, left_out: list[str]
) -> None:
    if _about(found) != _about(wanted):
        raise _different(path, _told(wanted), _told(found), where)
    if isinstance(found, Leaf) or isinstance(wanted, Leaf) or found.kind == "value":
        return
    there, children = _by_key(found), _by_key(wanted)
    for key, own in children.items():
        if key not in there:
            shown = structures.joined(path, key, structures.between(wanted.kind))
            raise CheckpointError(
                f"{where}: {shown}: missing in the file, `like` has {_told(own)} there. {_WAY_OUT}"
            )
    for key, child in there.items():
        shown = structures.joined(path, key, structures.between(found.kind))
        if key not in children:
            raise CheckpointError(
                f"{where}: {shown}: the file has {_told(child)} there, `like` nothing. {_WAY_OUT}"
            )
        if _is_none(child) and not _is_none(children[key]) and _may_be_none(found.kind, key):
            left_out.append(shown)
            continue
        _compare(child, children[key], shown, where, left_out)
    if _text_of(found.static) != _text_of(wanted.static):
        raise _different(path, f"{_told(wanted)} with {wanted.static}", f"{found.static}", where)


def _text_of(static: Any) -> str:
    return json.dumps(serialization.with_short_names(static), sort_keys=True)


def _is_none(structure: Structure) -> bool:
    return isinstance(structure, Branch) and structure.kind == "none"


def _may_be_none(kind: str, name: Any) -> bool:
    node = serialization.node_named(kind)
    if node is None or not hasattr(node.kind, "completed"):
        return False
    return any(f.name == name and f.default is None for f in dataclasses.fields(node.kind))


def _by_key(branch: Branch) -> dict[Any, Structure]:
    """The children of a branch by their keys as read from a file, so that NaN equals NaN."""
    keys = (serialization.decode(serialization.encode(key)) for key in branch.keys)
    return dict(zip(keys, branch.children, strict=True))


def _different(path: str, wanted: str, found: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {path or 'the tree'}: expected {wanted}, found {found}. {_WAY_OUT}"
    )


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
