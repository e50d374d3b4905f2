"""Types in files (of `jax.export`, and checkpoints): their names, and their static metadata as JSON.

A file describes the structure of a tree. Reading it looks names up among the types that this program
has defined; it never runs code from the file.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import export

from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.typing import Json, Tree, TreeDef

T = TypeVar("T")


class Node(NamedTuple):
    """A registered type of pytree nodes; see `register_node` and `register_tree_type`."""

    name: str
    kind: type
    fields: Callable[[], tuple[Sequence[str], Sequence[str]]]
    build: Any
    parts: Callable[[Any], tuple[Sequence[Any], Sequence[Any]]]


_nodes: dict[str, Node] = {}
_exported: dict[type, Node] = {}
_statics: dict[str, type] = {}
# Values that are not equal to themselves, by their JSON.
_nans: dict[str, Any] = {"NaN": np.nan}


def register_node(
    kind: type, fields: Callable[[], tuple[Sequence[str], Sequence[str]]], build: Any
) -> None:
    """Lets files of `jax.export` hold a type of pytree nodes, under its module and name.

    Names of this library's types omit their modules, which may change.

    Args:
      kind: the type. If another one has the same name (a cell that ran twice, a class within a
        function), a number is appended to the name.
      fields: returns the names of the children, and the names of the values in the static data (a
        tuple).
      build: makes a node from the static data and the children.
    """
    name = base = _short(_full_name(kind))
    count = 1
    while name in _nodes:
        name = f"{base}#{(count := count + 1)}"
    node = _nodes[name] = _exported[kind] = Node(name, kind, fields, build, _parts_by_jax)
    _add_to_checkpoints(kind, node._replace(name=base))
    export.register_pytree_node_serialization(
        kind,
        serialized_name=name,
        serialize_auxdata=lambda aux: json.dumps(encode_node(node, aux)).encode(),
        deserialize_auxdata=lambda data: decode_node(node, json.loads(data)),
        from_children=build,
    )


def _parts_by_jax(x: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    treedef: TreeDef
    children, treedef = jax.tree_util.tree_flatten(x, is_leaf=lambda y: y is not x)
    return children, treedef.node_data()[1]


def static_values(cls: type[T]) -> type[T]:
    """Lets the static metadata of nodes hold objects of this frozen dataclass."""
    _statics[_short(_full_name(cls))] = cls
    return cls


# --- checkpoints ---------------------------------------------------------------------------------
# They outlive a program, so their names of types carry no number: the last class of a name counts.
# Names of this library's types omit their modules, which may change.

_checkpoints: dict[str, Node] = {}
_kinds: dict[type, str] = {}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(name: str) -> str:
    package = __name__.partition(".")[0]
    return f"{package}.{name.rpartition('.')[2]}" if name.startswith(f"{package}.") else name


def register_tree_type(cls: type[T], *, name: str | None = None) -> type[T]:
    """Lets checkpoints (`haiku_implicit.save`) hold objects of a named tuple or a dataclass.

    Implicit types, and the states of optax, need no registration. A file holds the name of the type and
    the values of its fields, which may be trees. `load` looks the name up, so the program that reads
    the file has to register the type as well.

    Args:
      cls: the type. JAX has to know it as a pytree: a named tuple, or a dataclass that
        `jax.tree_util.register_dataclass`, `chex.dataclass` or a similar function has registered.
        Loading sets the fields of an object without running its constructor.
      name: the name in files, with a dot in it. By default its module and name; a type in a script
        has that name only in the script itself (`__main__.State`).

    Returns:
      The type, so that this can be a decorator.

    Raises:
      TypeError: if `cls` is neither a named tuple nor a dataclass.
      ValueError: for a name without a dot, or a name that another type has already.

    Example:
      >>> import tempfile, jax.numpy as jnp, haiku_implicit as hki
      >>> from typing import Any, NamedTuple
      >>> @hki.register_tree_type
      ... class Training(NamedTuple):
      ...   step: int
      ...   params: Any
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   hki.save(f'{folder}/state', Training(3, {'w': jnp.ones(2)}))
      ...   hki.load(f'{folder}/state')
      Training(step=3, params={'w': Array([1., 1.], dtype=float32)})
    """
    is_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    if not is_tuple and not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise type_error(f"register_tree_type: expected a named tuple or a dataclass, got {cls!r}")
    if cls in _exported:
        raise value_error(f"register_tree_type: {cls.__name__} is registered already, or implicit")
    if name is not None and not (isinstance(name, str) and "." in name):
        raise value_error(f"name: expected a text like 'my_project.State', got {name!r}")
    name = name or _short(_full_name(cls))
    known = _checkpoints.get(name)
    if known is not None and _full_name(known.kind) != _full_name(cls):  # not a cell that ran twice
        raise value_error(f"name: {name!r} is already the type {known.kind!r}; give another name=")
    fields = cls._fields if is_tuple else tuple(f.name for f in dataclasses.fields(cls))  # type: ignore
    build = functools.partial(_made_of if is_tuple else _filled, cls)
    parts = lambda x: ([getattr(x, field) for field in fields], ())  # noqa: E731
    _add_to_checkpoints(cls, Node(name, cls, lambda: (fields, ()), build, parts))
    return cls


def _add_to_checkpoints(kind: type, node: Node) -> None:
    _checkpoints[node.name] = node
    _kinds.setdefault(kind, node.name)  # a type may have several names, all of which `load` knows


def _made_of(cls: Any, static: Any, values: Sequence[Any]) -> Any:
    """Makes a named tuple of these fields, without its constructor."""
    return cls._make(values)


def _filled(cls: type, static: Any, values: Sequence[Any]) -> Any:
    """Makes a dataclass of these fields, without its constructor."""
    new: Any = object.__new__(cls)
    for field, value in zip(dataclasses.fields(new), values, strict=True):
        object.__setattr__(new, field.name, value)
    return new


def node_of(x: Any) -> Node | None:
    """The node for the type of an object, under its name in checkpoints; None if it is unknown.

    Raises:
      TypeError: if a class of the same name has been defined since.
    """
    kind = type(x)
    if kind not in _kinds:
        return None
    node = _checkpoints[_kinds[kind]]
    if node.kind is not kind:
        raise type_error(
            f"another {kind.__name__} has been defined since in {kind.__module__}, and a file could "
            "not tell the two apart. Make the object anew with the present class"
        )
    return node


def node_named(name: str) -> Node | None:
    """The node for a type by its name in checkpoints; None if it is unknown."""
    package, _, own = name.rpartition(".")
    if name not in _checkpoints and package == __name__.partition(".")[0]:
        getattr(sys.modules[package], own, None)  # imports its module, which registers it
    return _checkpoints.get(name)


@contextlib.contextmanager
def naming_lost_types(*trees: Tree) -> Iterator[None]:
    """Turns an error about a dict that lost its type into one that names the type.

    Args:
      *trees: the trees that may contain the dict; the error gives its path in them.

    Raises:
      TypeError: if a dict with the fields of a known type was used as an object of that type.
    """
    try:
        yield
    except AttributeError as e:
        lost: Any = e.obj
        kinds = _kinds_with_fields(lost) if type(lost) is dict else []
        if not kinds:
            raise
        raise type_error(
            f"{_path_of(lost, trees)}expected a {' or a '.join(kinds[:3])}, got a dict of its fields "
            f"({', '.join(lost)}). Orbax gives such dicts where it restores a checkpoint without a "
            "target. Give it one: checkpointer.restore(path, target), a tree of the same types, such "
            "as jax.eval_shape gives of the function that made what was saved"
        ) from e


def _kinds_with_fields(names: Iterable[Any]) -> list[str]:
    """The names of the types that may have exactly these fields, without subclasses of such types.

    Orbax leaves out fields that are None.
    """
    found, there = [], set(names)
    for node in _checkpoints.values():
        with contextlib.suppress(TypeError):  # a class without its decorator
            fields = set(node.fields()[0])
            if there and there <= fields and fields - there <= _optional_fields(node.kind):
                found.append(node.kind)
    found = list(filter(_is_public, found))
    return [kind.__name__ for kind in found if not set(kind.__mro__[1:]) & set(found)]


def _optional_fields(kind: type) -> set[str]:
    """The fields of a dataclass that are None by default."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name for field in fields if field.default is None}


def _is_public(kind: type) -> bool:
    """Whether users can name a type: they define it, or the package exports it."""
    package = sys.modules[__name__.partition(".")[0]]
    if not kind.__module__.startswith(package.__name__):
        return True
    places = package, getattr(package, "adapters", None), getattr(package, "quantization", None)
    return any(getattr(place, kind.__name__, None) is kind for place in places)


def _path_of(mapping: Mapping[str, Any], trees: Sequence[Any]) -> str:
    """The path of a mapping, or of one with the same leaves, in the trees, followed by a colon."""

    def is_it(x: Any) -> bool:
        if not isinstance(x, Mapping) or set(x) != set(mapping):
            return False
        leaves, own = jax.tree.leaves(x), jax.tree.leaves(mapping)
        return len(leaves) == len(own) and all(map(operator.is_, leaves, own))

    pairs = jax.tree_util.tree_flatten_with_path(list(trees), is_leaf=is_it)[0]
    paths = (
        jax.tree_util.keystr(keys[1:], simple=True, separator="/") for keys, x in pairs if is_it(x)
    )
    return "".join(f"{path}: " for path in itertools.islice(filter(None, paths), 1))


# --- static data ---------------------------------------------------------------------------------


def encode_node(node: Node, aux: Sequence[Any]) -> Json:
    children, names = node.fields()
    static = {}
    for name, value in zip(names, aux, strict=True):
        try:
            static[name.lstrip("_")] = encode(value)
        except TypeError as e:
            raise TypeError(
                f"{node.kind.__name__}.{name.lstrip('_')}: a file cannot hold {e}. It "
                "can hold numbers, texts, bytes, dtypes, None, tuples of these, and quantization rules"
                f" {see('not-for-files')}"
            ) from None
    return {"children": list(children), "static": static}


def decode_node(node: Node, data: Json) -> tuple[Any, ...]:
    children, names = node.fields()
    found, own = dict(data["static"]), [name.lstrip("_") for name in names]
    # A file from before the class had a field has its default.
    fields = dataclasses.fields(node.kind) if dataclasses.is_dataclass(node.kind) else ()
    for field in fields:
        lacks = field.name in own and field.name not in found
        if lacks and field.default is not dataclasses.MISSING:
            found[field.name] = encode(field.default)
    if data["children"] != list(children) or sorted(found) != sorted(own):
        raise value_error(
            f"{node.name}: the file has the fields {data['children']} and static {sorted(found)}, the "
            f"class now has {list(children)} and {sorted(own)}. Make the file again"
        )
    return tuple(decode(found[name]) for name in own)


def encode(x: Any) -> Json:
    """Converts a value for JSON: tuples to lists, other types that JSON lacks to `{kind: parts}`."""
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) is tuple:
        return [encode(y) for y in x]
    if type(x) is complex:
        return {"complex": [x.real, x.imag]}
    if type(x) is bytes:
        return {"bytes": x.hex()}
    if isinstance(x, np.dtype) and x.names is None and (name := _dtype_name(x)):
        return {"dtype": name}
    if isinstance(x, np.generic) and x.dtype.kind in "biufcV" and x.dtype.names is None:
        return {"number": [x.dtype.name, x.tobytes().hex()]}
    if isinstance(x, jax.tree_util.PyTreeDef):
        return {"structure": _encode_structure(x)}
    name = _short(_full_name(type(x)))
    if _statics.get(name) is type(x):
        fields = dataclasses.fields(_statics[name])
        return {"object": [name, {f.name: encode(getattr(x, f.name)) for f in fields}]}
    raise type_error(f"{x!r}, of the type {type(x).__name__}")


def _dtype_name(x: np.dtype[Any]) -> str:
    """A name from which `np.dtype` makes this dtype, or an empty one if none does."""
    for name in (x.name, x.str):  # `name` omits the byte order
        with contextlib.suppress(TypeError):
            if np.dtype(name) == x:
                return name
    return ""


def decode(data: Json) -> Any:
    """Inverts `encode`. NaN is the same object each time, so that it can be a key."""
    value = _decoded(data)
    return value if value == value else _nans.setdefault(json.dumps(data), value)


def _decoded(data: Json) -> Any:
    if isinstance(data, list):
        return tuple(map(decode, data))
    if not isinstance(data, dict):
        return data
    [(kind, parts)] = data.items()
    if kind == "complex":
        return complex(*parts)
    if kind == "bytes":
        return bytes.fromhex(parts)
    if kind == "dtype":
        return np.dtype(parts)
    if kind == "number":
        return np.frombuffer(bytes.fromhex(parts[1]), np.dtype(parts[0]))[0]
    if kind == "structure":
        return jax.tree_util.tree_structure(_decode_structure(parts))
    if kind == "object":
        return _object_of(*parts)
    raise value_error(f"static metadata of an unknown kind: {kind!r}")


def _object_of(name: str, values: dict[str, Any]) -> Any:
    if name not in _statics:
        raise value_error(f"static metadata of the type {name!r}, which this program does not know")
    fields = dataclasses.fields(_statics[name])
    return _filled(_statics[name], (), [decode(values[field.name]) for field in fields])


def _encode_structure(treedef: TreeDef) -> Json:
    about, children = treedef.node_data(), list(map(_encode_structure, treedef.children()))
    if about is None:
        return "leaf"
    kind, aux = about
    if kind in (type(None), tuple):
        return [kind.__name__, children]
    if kind not in _exported:
        raise type_error(f"a tree with {kind.__name__} in it")
    node = _exported[kind]
    return [node.name, children, encode_node(node, aux)]


def _decode_structure(data: Json) -> Tree:
    """Makes a tree of an encoded structure."""
    if data == "leaf":
        return 0
    name, children = data[0], list(map(_decode_structure, data[1]))
    if name in ("NoneType", "tuple"):
        return tuple(children) if name == "tuple" else None
    if name not in _nodes:
        raise value_error(f"a tree with {name!r} in it, which this program does not know")
    node = _nodes[name]
    return node.build(decode_node(node, data[2]), children)
