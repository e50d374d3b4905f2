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

from haiku_implicit.core.messages import see
from haiku_implicit.core.transform import Static
from haiku_implicit.core.typing import Json, JsonObject, Tree
from haiku_implicit.mox.format import values
from haiku_implicit.mox.format.values import Kind, Unsaveable, of_type, require
from haiku_implicit.mox.program import interface, marks
from haiku_implicit.mox.program.interface import ENTRIES, WHOLE, Interface, Path, Slot


class _Leaf:
    """A leaf of a structure, as `Static` has it: None for an array, or the tuple of a value."""

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


def tree_from_json(x: Json, types: Mapping[str, type]) -> Static:
    """A structure that `tree_to_json` wrote; `types` are classes of named tuples by name."""

    def read(y: Any) -> Tree:
        return values.from_json(y, readers)

    def namedtuple(y: Any) -> Tree:
        name, *fields = read(of_type(y, list, "a named tuple"))
        names = tuple(of_type(field, str, "a field") for field, _ in fields)
        cls: Any = types.get(of_type(name, str, "the name of a class"))
        cls = cls or _new_namedtuple(name, names)
        require(getattr(cls, "_fields", None) == names, f"{name} has other fields than {names}")
        return cls(*(part for _, part in fields))

    def leaf(y: Any) -> _Leaf:
        return _Leaf((values.from_json(y),))

    readers = {"tuple": read, "namedtuple": namedtuple, "value": leaf}
    whole = read(x)
    if type(whole) is _Leaf:  # it may be something that JAX can't flatten
        return marks.split(whole.x[0], lambda y: False)[0]
    leaves, treedef = jax.tree.flatten(whole)
    for y in leaves:
        require(type(y) is _Leaf or (type(y) is str and y == "array"), f"{y!r} is no structure")
    return Static(treedef, tuple(y.x if type(y) is _Leaf else None for y in leaves))


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
    for field, label in (interface.ARGUMENTS | interface.RESULTS).items():
        trees = {}
        for path, slot in face.slots(field).items():
            what = "/".join(path) if field in ENTRIES else f"the {label}"
            trees[path] = _named(what, tree_to_json, slot.tree)
        new[field] = [[*path, x] for path, x in trees.items()] if field in ENTRIES else trees[WHOLE]
    return new


def _named(what: str, write: Any, x: Any) -> Any:
    try:
        return write(x, values.CONSTANTS)
    except Unsaveable as e:
        raise ValueError(f"save: {what} can't be saved: {e} {see('not-for-files')}") from e


def interface_from_json(
    x: Json, types: Mapping[str, type], invars: Sequence[Var], returns: Sequence[Any]
) -> Interface:
    """The arguments and results of a program, with the variables of its arguments and results."""
    leading = tuple(of_type(of_type(x, dict, "an interface").get("leading"), list, "leading"))
    every = ("params", "state", "rng")
    some = [names for n in range(4) for names in itertools.combinations(every, n)]
    require(leading in some, f"the first arguments have to be some of {every}")
    parameters = map(_parameter, of_type(x.get("signature"), list, "signature"))
    signature = inspect.Signature(list(parameters))
    fields = interface.ARGUMENTS | interface.RESULTS
    slots = {field: _slots(x, field, types) for field in fields}
    found: Any = {field: x if field in ENTRIES else x[WHOLE] for field, x in slots.items()}
    face = Interface(leading, signature, **found)
    for fields, atoms in ((interface.ARGUMENTS, invars), (interface.RESULTS, returns)):
        count = sum(slot.tree.num_arrays for field in fields for slot in slots[field].values())
        fits = f"there are {count} arrays in the {'/'.join(fields)}, and {len(atoms)} in the body"
        require(count == len(atoms), fits)
        face = face.with_atoms(fields, atoms)
    named = face.args.filled
    require(type(named) is dict, "args has to be a dict")
    same = set(named) == set(signature.parameters)
    require(same, "args has to have the names of the signature")
    return face


_PARAMETER_KINDS: Any = type(inspect.Parameter.VAR_KEYWORD)


def _parameter(x: Json) -> inspect.Parameter:
    require(len(of_type(x, list, "a parameter")) in (2, 3), "a parameter has to be [name, kind]")
    kind = values.one_of(_PARAMETER_KINDS.__members__, "kind of parameter", x[1])
    default = values.from_json(x[2]) if len(x) == 3 else inspect.Parameter.empty
    return inspect.Parameter(of_type(x[0], str, "a name"), kind, default=default)


def _slots(x: Json, field: str, types: Mapping[str, type]) -> dict[Path, Slot]:
    """The slots of a field of an interface, by module and name, without variables."""
    found: dict[Path, Slot] = {}
    entries = of_type(x.get(field), list, field) if field in ENTRIES else [[*WHOLE, x.get(field)]]
    for module, name, tree in entries:
        path = of_type(module, str, "a module"), of_type(name, str, "a name")
        require(path not in found, f"{field} has {'/'.join(path)!r} twice")
        found[path] = Slot(tree_from_json(tree, types), ())
    return found
