"""Trees as JSON: containers, types, static metadata, Python values, and arrays by their tensors."""

import collections
import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, Union

import haiku as hk
import jax
import numpy as np

from haiku_implicit.core import serialization
from haiku_implicit.core.array import (
    ImplicitArray,
    IncompleteError,
    empty_names,
    flatten_one_level,
    is_implicit,
    known_struct,
    materialized_struct,
    short,
)
from haiku_implicit.core.messages import see, value_error
from haiku_implicit.core.typing import Array, Json, Tree, TreeDef
from haiku_implicit.files import dtypes
from haiku_implicit.files.container import METADATA, CheckpointError, is_shape
from haiku_implicit.files.parts import (
    Part,
    checksum_to_json,
    part_from_json,
    parts_from_json,
    parts_to_json,
)

_FLAT: type = type(hk.data_structures.to_immutable_dict({}))


class Leaf(NamedTuple):
    """An array in a structure.

    Attributes:
      name: the name of its tensor: its path in the tree, with `/` between keys and a dot before the
        field of an implicit array.
      dtype: the name of its dtype: see `dtypes`.
      shape: its shape.
      weak_type: whether it is weakly typed in JAX, like a Python number.
      parts: the tensors that store it, if they are known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    weak_type: bool = False
    parts: tuple[Part, ...] = ()

    @property
    def tensors(self) -> tuple[Part, ...]:
        """The tensors that store the array: its parts, or one tensor in the main file."""
        return self.parts or (Part(self.name, 0, (0,) * len(self.shape), self.shape),)


class Branch(NamedTuple):
    """A container, an object, None or a Python value.

    Attributes:
      kind: one of `_CONTAINERS`, 'none', 'value', or the name of a registered type.
      keys: the children's keys: keys of a mapping, names of fields, or numbers.
      children: the structures below it.
      static: the static metadata of a registered type, or a Python value, as JSON.
      dense: the dtype and shape that an implicit array stands for, if it has them.
      whole: whether the arrays in an implicit array make an array of `dense`. In an optimizer's state
        they may not: some are missing, or have other shapes.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple["Structure", ...] = ()
    static: Any = None
    dense: tuple[str, tuple[int, ...]] | None = None
    whole: bool = False


Structure = Union[Leaf, Branch]  # noqa: UP007

_CONTAINERS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "FlatMapping": hk.data_structures.to_immutable_dict,
    "list": lambda items: list(items.values()),
    "tuple": lambda items: tuple(items.values()),
}
_KINDS = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    _FLAT: "FlatMapping",
    list: "list",
    tuple: "tuple",
}
# The most levels that `save` writes. Reading a level takes two calls, and Python allows 1000 in all.
_DEEPEST = 200
MAPPINGS = ("dict", "OrderedDict", "FlatMapping")


# --- from trees ----------------------------------------------------------------------------------


class Described(NamedTuple):
    """A tree's structure, and its arrays by their tensors' names, in the tree's order."""

    structure: Structure
    arrays: dict[str, Array]


def describe(tree: Tree) -> Described:
    """Splits a tree into its structure and its arrays.

    Raises:
      CheckpointError: for a value that a file can't hold; it names the key.
    """
    arrays: dict[str, Array] = {}
    try:
        return Described(_describe(tree, "", arrays), arrays)
    except RecursionError:
        raise CheckpointError(
            f"the tree is nested too deeply, or holds itself; save writes at most {_DEEPEST} levels"
        ) from None


def joined(path: str, key: Any, dot: str = "/") -> str:
    """The path of a child, from its parent's path and its key."""
    return f"{path}{dot}{key}" if path else str(key)


def is_implicit_kind(kind: str) -> bool:
    """Whether the kind of a branch is a type of implicit arrays."""
    node = serialization.node_named(kind)
    return node is not None and issubclass(node.kind, ImplicitArray)


def between(kind: str) -> str:
    """The separator between the path of a branch and its keys."""
    return "." if is_implicit_kind(kind) else "/"


_Source = TypeVar("_Source")


def describe_modules(
    path: str, arrays: Iterable[tuple[str, str, jax.ShapeDtypeStruct, _Source]]
) -> tuple[Structure, dict[str, _Source]]:
    """The structure of a file's arrays as `{module: {name: array}}`.

    Args:
      path: the file, for errors.
      arrays: the module, the name and the struct of each array, and its source.

    Returns:
      The structure, and the source of each array by its name in the structure.

    Raises:
      CheckpointError: for a name that is there twice.
    """
    modules: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    sources: dict[int, _Source] = {}
    for module, name, struct, source in arrays:
        if name in modules.setdefault(module, {}):
            raise CheckpointError(f"{path}: {joined(module, name)}: is in the file twice")
        modules[module][name], sources[id(struct)] = struct, source
    structure, own = describe(modules)
    return structure, {name: sources[id(x)] for name, x in own.items()}


def _describe(x: Any, path: str, arrays: dict[str, Array]) -> Structure:
    if x is None:
        return Branch("none")
    if dtypes.is_array(x):
        return _describe_array(x, path, arrays)
    if kind := _KINDS.get(type(x)):
        items = x.items() if isinstance(x, Mapping) else enumerate(x)
        keys, values = zip(*items, strict=True) if len(x) else ((), ())
        if kind == "dict":
            _check_sortable(keys, path)
        for key in keys:
            _check_key(key, joined(path, key))
        children = [
            _describe(y, joined(path, k), arrays) for k, y in zip(keys, values, strict=True)
        ]
        return Branch(kind, tuple(keys), tuple(children))
    with _naming(path):
        node = serialization.node_of(x)
    if node is None:
        return _describe_value(x, path)
    return _describe_object(x, node, path, arrays)


def _check_key(key: Any, where: str) -> None:
    try:
        _encoded(key)
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"{where}: files cannot hold a key that is a {type(key).__qualname__} ({e}). They hold "
            "texts, numbers, bytes, dtypes, None, and tuples of these"
        ) from None


def _encoded(x: Any) -> Any:
    """A value as JSON, after a check that it can be read back."""
    encoded = serialization.encode(x)
    serialization.decode(json.loads(json.dumps(encoded)))
    return encoded


def _check_sortable(keys: tuple[Any, ...], where: str) -> None:
    """Raises for keys of a dict that JAX can't sort, since it sorts them all."""
    try:
        sorted(keys)
    except TypeError as e:
        raise CheckpointError(
            f"{where or 'the tree'}: a dict whose keys JAX can't sort ({e}). Make them all texts"
        ) from None


def _describe_array(x: Any, path: str, arrays: dict[str, Array]) -> Leaf:
    if isinstance(x, jax.core.Tracer):
        raise CheckpointError(
            f"{path or 'the tree'}: a tracer, which has no values: save outside of jax.jit"
            f" {see('no-values')}"
        )
    if isinstance(x, jax.Array) and x.is_deleted():
        raise CheckpointError(f"{path}: the array has been deleted (donated to a function?)")
    with _naming(path):
        dtype = dtypes.name_of(x)
    # Python texts may have lone surrogates, which other programs do not read.
    base = name = (path or "array").encode(errors="backslashreplace").decode()
    count = 1
    while name in arrays or name == METADATA:
        name = f"{base}#{(count := count + 1)}"
    arrays[name] = x
    return Leaf(name, dtype, tuple(x.shape), bool(getattr(x, "weak_type", False)))


def _describe_object(
    x: Any, node: serialization.Node, path: str, arrays: dict[str, Array]
) -> Structure:
    names, _ = node.fields()
    children, static = node.parts(x)
    dot = between(node.name)
    with _naming(path):
        if is_implicit(x):
            _check_leaves(x)
        encoded = serialization.encode_node(node, static)
        serialization.decode_node(node, encoded)  # checks that it can be read back
    described = [
        _describe(y, joined(path, name, dot), arrays)
        for name, y in zip(names, children, strict=True)
    ]
    static, dense = encoded["static"], _dense(x)
    whole = dense is not None and _is_whole(x, json.dumps(static))
    return Branch(node.name, tuple(names), tuple(described), static, dense, whole)


def _dense(x: Any) -> tuple[str, tuple[int, ...]] | None:
    """The dtype and shape of the array that an object stands for; None if there is not one."""
    struct = known_struct(x) if is_implicit(x) else None
    return None if struct is None else (struct.dtype.name, struct.shape)


def _is_whole(x: ImplicitArray, static: str) -> bool:
    """Whether the arrays in an implicit array make an array of its shape and dtype."""
    if _is_part(x):
        return False
    try:
        _check_whole(x, static)
    except Exception:  # any error of JAX or the type about arrays that do not fit
        return False
    return True


def _describe_value(x: Any, path: str) -> Branch:
    try:
        encoded = _encoded(x)
    except (TypeError, ValueError) as e:
        because = "" if isinstance(e, TypeError) else f" ({e})"
        raise CheckpointError(
            f"{path or 'the tree'}: files cannot hold {_called(x)}{because}. They hold arrays, "
            "numbers, texts, bytes, dtypes, None, dicts, lists, tuples, implicit arrays, states of "
            "optax, and named tuples and dataclasses after haiku_implicit.register_tree_type(cls)"
            f" {see('not-for-files')}"
        ) from None
    return Branch("value", static=encoded)


def _called(x: Any) -> str:
    """Describes a value for errors; for a class such as `jnp.float32`, also names its dtype."""
    try:
        dtype = np.dtype(x) if callable(x) else np.dtype(object)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.hasobject:
        return f"a {type(x).__qualname__}"
    return f"the class {x.__name__} (give np.dtype({dtype.name!r}))"


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Adds the key to errors that types raise."""
    try:
        yield
    except CheckpointError:
        raise
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{path or 'the tree'}: {e}") from None


# --- to and from JSON ----------------------------------------------------------------------------


def to_json(structure: Structure) -> Json:
    """Converts a structure to JSON."""
    if isinstance(structure, Leaf):
        (first, *more), weak_type = structure.tensors, structure.weak_type
        found: dict[str, Any] = {"array": structure.name, "dtype": structure.dtype}
        found |= {"shape": list(structure.shape)}
        found |= checksum_to_json(None if more else first.checksum)
        found |= {"weak_type": True} if weak_type else {}
        if more:
            return found | {"parts": parts_to_json(structure.parts)}
        return found | ({"file": first.file} if first.file else {})
    kind, keys, children, static, dense, whole = structure
    if kind == "none":
        return None
    if kind == "value":
        return {"value": static}
    found = {"type": kind, "items": list(map(to_json, children))}
    if kind not in ("list", "tuple"):
        found["keys"] = [serialization.encode(key) for key in keys]
    if kind not in _CONTAINERS:
        found["static"] = static
    found |= {"dense": [dense[0], list(dense[1])]} if dense else {}
    return found | ({"whole": True} if whole else {})


def from_json(data: Json, path: str = "") -> Structure:
    """Converts JSON from `to_json` back to a structure.

    Raises:
      CheckpointError: if it is not valid, or has a type that this program does not know.
    """
    where = path or "the tree"
    if data is None:
        return Branch("none")
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: expected a table in the structure, found {data!r:.80}")
    if "array" in data:
        return _leaf(data, where)
    if data.keys() == {"value"}:
        try:
            serialization.decode(data["value"])
        except Exception as e:  # any error of its parts
            raise CheckpointError(f"{where}: not a value that a file can hold ({e})") from None
        return Branch("value", static=data["value"])
    kind, items = data.get("type"), data.get("items")
    if not isinstance(kind, str) or not isinstance(items, list):
        raise CheckpointError(f"{where}: expected a type and its items, found {data!r:.80}")
    if kind in ("list", "tuple"):
        keys: tuple[Any, ...] = tuple(range(len(items)))
    else:
        keys = _keys(data.get("keys"), len(items), where)
    if kind == "dict":
        _check_sortable(keys, where)
    node = None if kind in _CONTAINERS else _known(kind, where)
    static, dense = data.get("static"), data.get("dense")
    if node is not None:
        _decoded(node, keys, static, where)
    dot = between(kind)
    children = [
        from_json(item, joined(path, key, dot)) for key, item in zip(keys, items, strict=True)
    ]
    if dense is not None:
        if not (isinstance(dense, list) and len(dense) == 2 and is_shape(dense[1])):
            raise CheckpointError(f"{where}: expected a dtype and a shape, found {dense!r:.80}")
        dense = (dense[0], tuple(dense[1]))
    return Branch(kind, keys, tuple(children), static, dense, data.get("whole") is True)


def _leaf(data: dict[str, Any], where: str) -> Leaf:
    shape, weak_type = data.get("shape"), data.get("weak_type", False)
    start = [0] * len(shape) if isinstance(shape, list) else None
    whole = part_from_json({"file": 0, **data, "start": start}, where)
    if type(weak_type) is not bool:
        raise CheckpointError(f"{where}: not the description of an array: {data!r:.80}")
    parts = parts_from_json(data["parts"], whole.shape, where) if "parts" in data else (whole,)
    dtype: Any = data.get("dtype")
    try:
        dtypes.stored_of(dtype, whole.shape)
    except (AttributeError, KeyError):  # not a text, or an unknown one
        raise CheckpointError(
            f"{where}: this program does not know the dtype {dtype!r:.80}"
        ) from None
    return Leaf(whole.name, dtype, whole.shape, weak_type, parts)


def _keys(data: Json, count: int, where: str) -> tuple[Any, ...]:
    try:
        keys = tuple(map(serialization.decode, data))
        distinct = len(set(keys))
    except Exception as e:  # any error of their parts
        raise CheckpointError(f"{where}: the keys {data!r:.80} are not valid ({e})") from None
    if not len(keys) == distinct == count:
        raise CheckpointError(f"{where}: {count} items, and {distinct} different keys for them")
    return keys


def _known(kind: str, where: str) -> serialization.Node:
    node = serialization.node_named(kind)
    if node is None:
        raise CheckpointError(
            f"{where}: this program does not know the type {kind!r:.80}. Import the module that "
            "defines it before loading; a named tuple or a dataclass also has to be registered, by "
            "haiku_implicit.register_tree_type"
            f" {see('an-unknown-type-in-a-file')}"
        )
    return node


def _decoded(node: serialization.Node, keys: Any, static: Any, where: str) -> tuple[Any, ...]:
    try:
        return serialization.decode_node(node, {"children": list(keys), "static": static})
    except Exception as e:  # any error of its parts
        raise CheckpointError(f"{where}: the metadata of a {node.name} is not valid: {e}") from None


def leaves_of(structure: Structure) -> Iterator[Leaf]:
    """Yields the arrays in a structure."""
    if isinstance(structure, Leaf):
        yield structure
    else:
        for child in structure.children:
            yield from leaves_of(child)


def struct_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array in a structure."""
    return dtypes.struct_of(leaf.dtype, leaf.shape, leaf.weak_type)


def with_leaves(structure: Structure, change: Callable[[Leaf], Leaf]) -> Structure:
    """Returns a structure whose leaves `change` has replaced."""
    if isinstance(structure, Leaf):
        return change(structure)
    children = tuple(with_leaves(child, change) for child in structure.children)
    return structure._replace(children=children)


# --- to trees ------------------------------------------------------------------------------------


def build(structure: Structure, read: Callable[[Leaf], Any], file: str, path: str = "") -> Tree:
    """Builds the tree of a structure.

    Args:
      structure: the structure.
      read: returns the array of a leaf.
      file: the structure's file, for errors.
      path: the structure's path in the whole tree, for errors.

    Raises:
      CheckpointError: for arrays that do not fit their type, or the dtype and shape in the file.
    """
    if isinstance(structure, Leaf):
        return read(structure)
    kind, keys, children, static, dense, whole = structure
    if kind == "none":
        return None
    if kind == "value":
        return serialization.decode(static)
    dot = between(kind)
    items = [
        build(c, read, file, joined(path, k, dot)) for k, c in zip(keys, children, strict=True)
    ]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](dict(zip(keys, items, strict=True)))
    where = f"{file}: {path or 'the tree'}"
    node = _known(kind, where)
    values = _decoded(node, keys, static, where)
    try:
        made = node.build(values, items)
        _check_made(made, dense, json.dumps(static) if whole else None)
    except Exception as e:  # any error of JAX or the type about arrays that do not fit
        raise CheckpointError(
            f"{where}: its arrays do not make a {node.kind.__name__}: {e or type(e).__name__}"
        ) from None
    return made


def _check_made(made: Any, dense: tuple[str, tuple[int, ...]] | None, static: str | None) -> None:
    """Raises unless an implicit array has the dtype and shape in the file.

    `static` is the metadata in the file; None if the arrays need not fit together.
    """
    if not is_implicit(made):
        return
    if static is not None:
        _check_whole(made, static)
    own = _dense(made)
    if dense and own and own != (_canonical(dense[0]), dense[1]):
        raise value_error(f"they are {short(made)}, where the file says {dense[0]}{list(dense[1])}")
    _check_leaves(made)


def _check_whole(made: ImplicitArray, static: str) -> None:
    """Raises unless the arrays in an implicit array make an array of its shape and dtype."""
    leaves, treedef = flatten_one_level(made)
    kinds = tuple((y.shape, y.dtype) if hasattr(y, "dtype") else None for y in leaves)
    found = _traced(treedef, kinds, jax.dtypes.canonicalize_dtype(np.float64), static)
    if found != (tuple(made.shape), made.dtype):
        raise value_error(f"they make {found[1]}{list(found[0])}, not {short(made)}")


def _check_leaves(x: ImplicitArray) -> None:
    """Raises unless an implicit array contains only arrays and numbers."""
    numbers = (bool, int, float, complex, np.generic)
    for y in flatten_one_level(x)[0]:
        if not (is_implicit(y) or dtypes.is_array(y) or isinstance(y, numbers)):
            raise value_error(f"expected arrays and numbers, found a {type(y).__name__}")


def _is_part(x: ImplicitArray) -> bool:
    """Whether an implicit array lacks arrays, as an adapter without its base does."""
    inner = (y for y in flatten_one_level(x)[0] if is_implicit(y))
    return bool(empty_names(x)) or any(map(_is_part, inner))


@functools.lru_cache(maxsize=1000)
def _traced(
    treedef: TreeDef, kinds: tuple[Any, ...], widest: Any, static: str
) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype that `materialize` gives; cached, since most layers of a model are alike."""
    # Only for the cache's key: whether JAX has 64 bits; and 0.0, which equals 0 in a treedef.
    del widest, static
    leaves = [None if kind is None else jax.ShapeDtypeStruct(*kind) for kind in kinds]
    made = jax.tree_util.tree_unflatten(treedef, leaves)
    try:
        struct = materialized_struct(made)
    except (NotImplementedError, IncompleteError):  # a type that is never dense, or only elsewhere
        struct = made
    return tuple(struct.shape), struct.dtype


def _canonical(name: str) -> str:
    return jax.dtypes.canonicalize_dtype(dtypes.struct_of(name, ()).dtype).name


# --- back again ----------------------------------------------------------------------------------


def check_readable(structure: Structure) -> None:
    """Checks that a file with this structure gives the same tree back, without reading arrays.

    Raises:
      CheckpointError: if it does not; it names the key. Also if the structure is too deep to be read
        wherever a program loads it.
    """
    if (levels := _depth(structure)) > _DEEPEST:
        raise CheckpointError(
            f"the tree: expected at most {_DEEPEST} levels of containers, which can be read back "
            f"wherever a program loads them, got {levels}. Save a flatter tree"
        )
    way_out = "so that a file could not give it back. Save what is in it as a dict"
    try:
        read = from_json(json.loads(_text(structure)))
        again = describe(build(read, struct_of, "")).structure
    except CheckpointError as e:
        raise CheckpointError(f"{str(e).removeprefix(': ')}, {way_out}") from None
    except RecursionError:
        raise CheckpointError("the tree is nested too deeply") from None
    if different := _different(structure, again):
        path, kind = different
        raise CheckpointError(
            f"{path or 'the tree'}: a {kind} made of its fields is not the same, {way_out}"
        )


def _depth(structure: Structure) -> int:
    """The number of nested containers and objects."""
    if isinstance(structure, Leaf) or structure.kind in ("none", "value"):
        return 0
    return 1 + max(map(_depth, structure.children), default=0)


def _text(structure: Structure) -> str:
    return json.dumps(to_json(structure))


def _different(a: Structure, b: Structure, path: str = "") -> tuple[str, str] | None:
    """The path and kind of the first, innermost difference between two structures."""
    if _text(a) == _text(b):
        return None
    if isinstance(a, Leaf):
        return path, "array"
    below = (
        _different(x, y, joined(path, key, between(a.kind)))
        for key, x, y in zip(a.keys, a.children, getattr(b, "children", ()), strict=False)
    )
    return next(filter(None, below), (path, a.kind))
