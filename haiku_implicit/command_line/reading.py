"""Reads the parameters in a command's file."""

from collections.abc import Mapping

from absl import flags

from haiku_implicit.command_line.command import text
from haiku_implicit.core.typing import Tree
from haiku_implicit.files.loading import load
from haiku_implicit.params.adapters.parts import AdapterParts


def define_key(values: flags.FlagValues) -> None:
    """Defines the flag that `part_of` reads."""
    text(values, "key", None, "The part of the file that holds the parameters, as in --key=params.")


def part_of(tree: Tree, values: flags.FlagValues, path: str) -> Tree:
    """The part of a file's tree that --key names."""
    for key in values.key.split("/") if values.key else ():
        if not isinstance(tree, Mapping) or key not in tree:
            found = ", ".join(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
            raise ValueError(f"{path}: --key: there is no {key!r}; there is {found}")
        tree = tree[key]
    return tree


def read(values: flags.FlagValues, path: str) -> Tree:
    """Reads the parameters in a file: a mapping of modules to mappings of arrays."""
    tree = part_of(load(path), values, path)
    if isinstance(tree, AdapterParts):
        raise ValueError(
            f"{path}: this is an adapter apart from its base; `merge --adapter` takes one"
        )
    modules = tree.items() if isinstance(tree, Mapping) else ()
    for name, own in modules:
        if not isinstance(own, Mapping) or not all(hasattr(x, "shape") for x in own.values()):
            raise ValueError(
                f"{path}: expected a model's parameters, a mapping of modules to mappings of arrays; "
                f"{name!r} is no module. --key=NAME takes a part of the file"
            )
    if not modules:
        raise ValueError(f"{path}: expected a model's parameters, got {type(tree).__name__}")
    return tree
