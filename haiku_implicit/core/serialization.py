"""Implicit types in files of `jax.export`: names of types, and their static metadata as JSON.

A file says what structure the arguments and results of its function have. Reading one looks names up
among the types that this program has defined, and runs no code of the file or of the types.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import export

T = TypeVar("T")


class _Node(NamedTuple):
    """What is known of a type of pytree nodes: see `register_node`."""

    name: str
    kind: type
    fields: Callable[[], tuple[Sequence[str], Sequence[str]]]
    build: Any


_nodes: dict[str, _Node] = {}
_names: dict[type, str] = {}
_statics: dict[str, type] = {}


def register_node(
    kind: type,
    fields: Callable[[], tuple[Sequence[str], Sequence[str]]],
    build: Any,
) -> None:
    """Lets files of `jax.export` hold a type of pytree nodes, under its module and name.

    Args:
      kind: the type. Where another one has the same name (a cell that ran twice, a class within a
        function), it gets a number behind the name.
      fields: gives the names of its children, and those of the values in its static data, a tuple.
      build: makes a node of the static data and the children.
    """
    name = base = f"{kind.__module__}.{kind.__qualname__}"
    count = 1
    while name in _nodes:
        name = f"{base}#{(count := count + 1)}"
    node = _nodes[name] = _Node(name, kind, fields, build)
    _names[kind] = name
    export.register_pytree_node_serialization(
        kind,
        serialized_name=name,
        serialize_auxdata=lambda aux: json.dumps(_encode_node(node, aux)).encode(),
        deserialize_auxdata=lambda data: _decode_node(node, json.loads(data)),
        from_children=build,
    )


def static_values(cls: type[T]) -> type[T]:
    """Lets the static metadata of nodes hold objects of a frozen dataclass."""
    _statics[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return cls


# --- static data ---------------------------------------------------------------------------------


def _encode_node(node: _Node, aux: Sequence[Any]) -> Any:
    children, names = node.fields()
    static = {}
    for name, value in zip(names, aux, strict=True):
        try:
            static[name.lstrip("_")] = _encode(value)
        except TypeError as e:
            raise TypeError(
                f"{node.kind.__name__}.{name.lstrip('_')}: a file of jax.export cannot hold {e}. It "
                "can hold numbers, texts, bytes, dtypes, None, tuples of these, and quantization rules"
            ) from None
    return {"children": list(children), "static": static}


def _decode_node(node: _Node, data: Any) -> tuple[Any, ...]:
    children, names = node.fields()
    found, own = data["static"], [name.lstrip("_") for name in names]
    if data["children"] != list(children) or sorted(found) != sorted(own):
        raise ValueError(
            f"{node.name}: the file has the fields {data['children']} and static {sorted(found)}, the "
            f"class now has {list(children)} and {sorted(own)}. Export the function again"
        )
    return tuple(_decode(found[name]) for name in own)


def _encode(x: Any) -> Any:
    """A value that JSON holds: tuples as lists, all others that it does not know as `{kind: parts}`."""
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) is tuple:
        return [_encode(y) for y in x]
    if type(x) is complex:
        return {"complex": [x.real, x.imag]}
    if type(x) is bytes:
        return {"bytes": x.hex()}
    if isinstance(x, np.dtype) and x.names is None:
        return {"dtype": x.name}
    if isinstance(x, np.generic):
        return {"number": [x.dtype.name, x.tobytes().hex()]}
    if isinstance(x, jax.tree_util.PyTreeDef):
        return {"structure": _encode_structure(x)}
    name = f"{type(x).__module__}.{type(x).__qualname__}"
    if _statics.get(name) is type(x):
        fields = dataclasses.fields(_statics[name])
        return {"object": [name, {f.name: _encode(getattr(x, f.name)) for f in fields}]}
    raise TypeError(f"{x!r}, of the type {type(x).__name__}")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_decode, data))
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
    raise ValueError(f"static metadata of an unknown kind: {kind!r}")


def _object_of(name: str, values: dict[str, Any]) -> Any:
    if name not in _statics:
        raise ValueError(f"static metadata of the type {name!r}, which this program does not know")
    new: Any = object.__new__(_statics[name])
    for field in dataclasses.fields(new):
        object.__setattr__(new, field.name, _decode(values[field.name]))
    return new


def _encode_structure(treedef: Any) -> Any:
    about, children = treedef.node_data(), list(map(_encode_structure, treedef.children()))
    if about is None:
        return "leaf"
    kind, aux = about
    if kind in (type(None), tuple):
        return [kind.__name__, children]
    if kind not in _names:
        raise TypeError(f"a tree with {kind.__name__} in it")
    node = _nodes[_names[kind]]
    return [node.name, children, _encode_node(node, aux)]


def _decode_structure(data: Any) -> Any:
    """A tree of this structure."""
    if data == "leaf":
        return 0
    name, children = data[0], list(map(_decode_structure, data[1]))
    if name in ("NoneType", "tuple"):
        return tuple(children) if name == "tuple" else None
    if name not in _nodes:
        raise ValueError(f"a tree with {name!r} in it, which this program does not know")
    node = _nodes[name]
    return node.build(_decode_node(node, data[2]), children)
