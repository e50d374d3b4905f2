"""The structures of arguments and results as JSON and back.

A structure is "array" for an array, and an object with one key for a container or another value.
"""

import collections
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var

from haiku_implicit.core.transform import Static
from haiku_implicit.core.typing import Json, JsonObject, Tree
from haiku_implicit.mox.format import values
from haiku_implicit.mox.format.values import Kind, Unsaveable, of_type, require
from haiku_implicit.mox.program import interface, marks
from haiku_implicit.mox.program.interface import ENTRIES, WHOLE, Interface, Path


class _Leaf:
    """A leaf of a structure: an array if it holds None, or else the tuple of a value."""

    def __init__(self, x: Any):
        self.x = x


def tree_to_json(tree: Static, kinds: Mapping[str, Kind]) -> Json:
    """A structure as JSON.

    Args:
      tree: the structure.
      kinds: further kinds of values in it. With `CONSTANTS`, an unknown container is refused; otherwise
        it is written as a tuple.
    """
    if tree.treedef is None:
        return _to_json(_Leaf(tree.leaves[0]), kinds)
    return _to_json(tree.treedef.unflatten(map(_Leaf, tree.leaves)), kinds)


def _to_json(x: Any, kinds: Mapping[str, Kind]) -> Json:
    if isinstance(x, _Leaf):
        return "array" if x.x is None else {"value": values.to_json(x.x[0], kinds)}
    if x is None:
        return None
    if type(x) is dict:
        return {"dict": [[values.to_json(key), _to_json(y, kinds)] for key, y in x.items()]}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        fields = [[name, _to_json(y, kinds)] for name, y in zip(x._fields, x, strict=True)]
        return {"namedtuple": [type(x).__name__, *fields]}
    if type(x) not in (tuple, list) and kinds is values.CONSTANTS:
        raise Unsaveable(
            f"it has a {type(x).__name__}. A file can have dicts, lists, tuples, named tuples and None"
        )
    children, _ = jax.tree_util.tree_flatten(x, is_leaf=lambda y: y is not x)
    return {"list" if type(x) is list else "tuple": [_to_json(y, kinds) for y in children]}


def tree_from_json(x: Any, types: Mapping[str, type]) -> Static:
    """A structure that `tree_to_json` wrote; `types` are classes of named tuples by name."""
    tree, _ = marks.split(_from_json(x, types), lambda leaf: isinstance(leaf, _Leaf))
    return tree


def _from_json(x: Any, types: Mapping[str, type]) -> Tree:
    if x is None:
        return None
    if x == "array":
        return _Leaf(None)
    require(len(of_type(x, dict, "a structure")) == 1, "a structure has to have one key")
    ((kind, parts),) = x.items()
    if kind == "value":
        return values.from_json(parts)
    of_type(parts, list, kind)
    if kind in ("tuple", "list"):
        nodes = (_from_json(y, types) for y in parts)
        return tuple(nodes) if kind == "tuple" else list(nodes)
    if kind == "dict":
        pairs = [(values.from_json(key), _from_json(y, types)) for key, y in parts]
        require(len(dict(pairs)) == len(pairs), "a dict has a key twice")
        return dict(pairs)
    require(kind == "namedtuple" and parts, f"there is no structure {kind!r}")
    name, *fields = parts
    names = tuple(of_type(field, str, "a field") for field, _ in fields)
    cls: Any = types.get(of_type(name, str, "the name of a class")) or _new_namedtuple(name, names)
    require(getattr(cls, "_fields", None) == names, f"{name} has other fields than {list(names)}")
    return cls(*(_from_json(y, types) for _, y in fields))


# `Any`, because a type checker only accepts literal arguments. Python checks them.
_new_namedtuple: Any = collections.namedtuple


# --- interfaces -----------------------------------------------------------------------------------


def interface_to_json(face: Interface) -> JsonObject:
    """The arguments and results of a program, as JSON."""
    new: JsonObject = {"leading": list(face.leading), "signature": []}
    for name, parameter in face.signature.parameters.items():
        written = [name, parameter.kind.name]
        if parameter.default is not inspect.Parameter.empty:
            written.append(_named(f"the default of {name}", values.to_json, parameter.default))
        new["signature"].append(written)
    for kind, label in (interface.ARGUMENTS | interface.RESULTS).items():
        trees = {
            path: _named(
                "/".join(path) if kind in ENTRIES else f"the {label}", tree_to_json, slot.tree
            )
            for path, slot in face.slots(kind).items()
        }
        new[kind] = [[*path, x] for path, x in trees.items()] if kind in ENTRIES else trees[WHOLE]
    return new


def _named(what: str, write: Any, x: Any) -> Any:
    try:
        return write(x, values.CONSTANTS)
    except Unsaveable as e:
        raise ValueError(f"save: {what} can't be saved: {e}") from e


def interface_from_json(
    x: Any, types: Mapping[str, type], invars: Sequence[Var], returns: Sequence[Any]
) -> Interface:
    """The arguments and results of a program, with the variables of its arguments and results."""
    leading = tuple(of_type(of_type(x, dict, "an interface").get("leading"), list, "leading"))
    every = ("params", "state", "rng")
    some = [names for n in range(4) for names in itertools.combinations(every, n)]
    require(leading in some, f"the first arguments have to be some of {every}")
    signature = inspect.Signature(
        list(map(_parameter, of_type(x.get("signature"), list, "signature")))
    )
    found: dict[str, Any] = {}
    for kinds, atoms in ((interface.ARGUMENTS, invars), (interface.RESULTS, returns)):
        trees = {kind: _trees(x, kind, types) for kind in kinds}
        count = sum(tree.num_arrays for entries in trees.values() for tree in entries.values())
        fits = f"there are {count} arrays in the {'/'.join(kinds)}, and {len(atoms)} in the body"
        require(count == len(atoms), fits)
        found |= interface.filled(trees, atoms)
    named = found["args"].tree.merge(found["args"].atoms)
    require(type(named) is dict, "args has to be a dict")
    same = set(named) == set(signature.parameters)
    require(same, "args has to have the names of the signature")
    return Interface(leading, signature, **found)


_PARAMETER_KINDS: Any = type(inspect.Parameter.VAR_KEYWORD)


def _parameter(x: Any) -> inspect.Parameter:
    require(len(of_type(x, list, "a parameter")) in (2, 3), "a parameter has to be [name, kind]")
    kind = values.one_of(_PARAMETER_KINDS.__members__, "kind of parameter", x[1])
    default = values.from_json(x[2]) if len(x) == 3 else inspect.Parameter.empty
    return inspect.Parameter(of_type(x[0], str, "a name"), kind, default=default)


def _trees(x: Any, kind: str, types: Mapping[str, type]) -> dict[Path, Static]:
    """The structures of a part of an interface, by module and name."""
    found: dict[Path, Static] = {}
    entries = of_type(x.get(kind), list, kind) if kind in ENTRIES else [[*WHOLE, x.get(kind)]]
    for module, name, tree in entries:
        path = of_type(module, str, "a module"), of_type(name, str, "a name")
        require(path not in found, f"{kind} has {'/'.join(path)!r} twice")
        found[path] = tree_from_json(tree, types)
    return found
