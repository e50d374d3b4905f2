"""Trees as JSON: containers, types, static metadata, Python values, and arrays by their tensors."""

import collections
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Union

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
from haiku_implicit.files import dtypes
from haiku_implicit.files.container import METADATA, CheckpointError, is_shape
from haiku_implicit.files.parts import Part, parts_from_json, parts_to_json

_FLAT: type = type(hk.data_structures.to_immutable_dict({}))


class Leaf(NamedTuple):
    """An array.

    Attributes:
      name: of the tensor that it is stored as. Where it is in the tree, with `/` between keys and a dot
        before the field of an implicit array.
      dtype: the name of its dtype: see `dtypes`.
      shape: its shape.
      weak_type: whether JAX treats its dtype as that of a Python number.
      file: which file it lies in, 0 for the main one.
      crc: the CRC-32 of its bytes; None if it is not known.
      parts: the tensors that it is stored as, if these are several.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    weak_type: bool = False
    file: int = 0
    crc: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def tensors(self) -> tuple[Part, ...]:
        """What it is stored as: its parts, or one tensor."""
        whole = Part(self.name, self.file, (0,) * len(self.shape), self.shape, self.crc)
        return self.parts or (whole,)


class Branch(NamedTuple):
    """A container, an object, None or a Python value.

    Attributes:
      kind: one of `_CONTAINERS`, 'none', 'value', or the name of a registered type.
      keys: of the children: those of a mapping, names of fields, numbers.
      children: what it holds.
      static: of a registered type, its static metadata as JSON; of a value, the value as JSON.
      dense: of an implicit array, the dtype and shape of the dense one, if it has them.
      whole: of an implicit array, whether its arrays make one of `dense`. Those in an optimizer's state
        may not: some are missing, or have shapes of their own.
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
# How many levels `save` writes. To read one takes two calls, and Python allows 1000 of them in all.
_DEEPEST = 200
MAPPINGS = ("dict", "OrderedDict", "FlatMapping")


# --- from trees ----------------------------------------------------------------------------------


class Described(NamedTuple):
    """A tree: its structure, and its arrays by their tensors' names, in the order of the tree."""

    structure: Structure
    arrays: dict[str, Any]


def describe(tree: Any) -> Described:
    """The structure of a tree.

    Raises:
      CheckpointError: for what a file can't hold; it names the key.
    """
    arrays: dict[str, Any] = {}
    try:
        return Described(_describe(tree, "", arrays), arrays)
    except RecursionError:
        raise CheckpointError(
            f"the tree is nested too deeply, or holds itself; save writes at most {_DEEPEST} levels"
        ) from None


def joined(path: str, key: Any, dot: str = "/") -> str:
    """The path of a child."""
    return f"{path}{dot}{key}" if path else str(key)


def is_implicit_kind(kind: str) -> bool:
    """Whether a kind of branches is a type of implicit arrays."""
    node = serialization.node_named(kind)
    return node is not None and issubclass(node.kind, ImplicitArray)


def between(kind: str) -> str:
    """What is between the path of a branch and the keys in it."""
    return "." if is_implicit_kind(kind) else "/"


def _describe(x: Any, path: str, arrays: dict[str, Any]) -> Structure:
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
    """A value as JSON, from which it can be read."""
    encoded = serialization.encode(x)
    serialization.decode(json.loads(json.dumps(encoded)))
    return encoded


def _check_sortable(keys: tuple[Any, ...], where: str) -> None:
    """JAX sorts the keys of a dict."""
    try:
        sorted(keys)
    except TypeError as e:
        raise CheckpointError(
            f"{where or 'the tree'}: a dict whose keys JAX can't sort ({e}). Make them all texts"
        ) from None


def _describe_array(x: Any, path: str, arrays: dict[str, Any]) -> Leaf:
    if isinstance(x, jax.core.Tracer):
        raise CheckpointError(
            f"{path or 'the tree'}: a tracer, which has no values: save outside of jax.jit"
        )
    if isinstance(x, jax.Array) and x.is_deleted():
        raise CheckpointError(f"{path}: the array has been deleted (donated to a function?)")
    with _naming(path):
        dtype = dtypes.name_of(x)
    # A lone surrogate, which a text of Python may have, is in no file that other programs read.
    base = name = (path or "array").encode(errors="backslashreplace").decode()
    count = 1
    while name in arrays or name == METADATA:
        name = f"{base}#{(count := count + 1)}"
    arrays[name] = x
    return Leaf(name, dtype, tuple(x.shape), bool(getattr(x, "weak_type", False)))


def _describe_object(
    x: Any, node: serialization.Node, path: str, arrays: dict[str, Any]
) -> Structure:
    names, _ = node.fields()
    children, static = node.parts(x)
    dot = between(node.name)
    with _naming(path):
        if is_implicit(x):
            _check_leaves(x)
        encoded = serialization.encode_node(node, static)
        serialization.decode_node(node, encoded)  # what is written can be read
    described = [
        _describe(y, joined(path, name, dot), arrays)
        for name, y in zip(names, children, strict=True)
    ]
    static, dense = encoded["static"], _dense(x)
    whole = dense is not None and _is_whole(x, json.dumps(static))
    return Branch(node.name, tuple(names), tuple(described), static, dense, whole)


def _dense(x: Any) -> tuple[str, tuple[int, ...]] | None:
    """The dtype and shape of what an object stands for; None if it does not stand for an array."""
    struct = known_struct(x) if is_implicit(x) else None
    return None if struct is None else (struct.dtype.name, struct.shape)


def _is_whole(x: ImplicitArray, static: str) -> bool:
    """Whether the arrays of an implicit array make one of its shape and dtype."""
    if _is_part(x):
        return False
    try:
        _check_whole(x, static)
    except Exception:  # whatever JAX or the type says about arrays that do not fit
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
        ) from None
    return Branch("value", static=encoded)


def _called(x: Any) -> str:
    """What a value is, for errors; of a class such as `jnp.float32` what to give instead."""
    try:
        dtype = np.dtype(x) if callable(x) else np.dtype(object)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.hasobject:
        return f"a {type(x).__qualname__}"
    return f"the class {x.__name__} (give np.dtype({dtype.name!r}))"


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Makes of errors of the types ones that name the key."""
    try:
        yield
    except CheckpointError:
        raise
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{path or 'the tree'}: {e}") from None


# --- to and from JSON ----------------------------------------------------------------------------


def to_json(structure: Structure) -> Any:
    """A structure as JSON."""
    if isinstance(structure, Leaf):
        name, dtype, shape, weak_type, file, crc, parts = structure
        found: dict[str, Any] = {"array": name, "dtype": dtype, "shape": list(shape)}
        found["crc32"] = f"{crc or 0:08x}"
        found |= {"weak_type": True} if weak_type else {}
        found |= {"file": file} if file else {}
        return found | ({"parts": parts_to_json(parts)} if parts else {})
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


def from_json(data: Any, path: str = "") -> Structure:
    """The structure that `to_json` gave this for.

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
        except Exception as e:  # whatever its parts may raise
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
    name, dtype, shape = data["array"], data.get("dtype"), data.get("shape")
    file, weak_type, crc = data.get("file", 0), data.get("weak_type", False), data.get("crc32")
    if not isinstance(name, str) or type(file) is not int or type(weak_type) is not bool:
        raise CheckpointError(f"{where}: not the description of an array: {data!r:.80}")
    if shape is None or not is_shape(shape):
        raise CheckpointError(f"{where}: {shape!r:.80} is not the shape of an array")
    if not isinstance(crc, str) or not re.fullmatch("[0-9a-f]{8}", crc):
        raise CheckpointError(f"{where}: {crc!r:.80} is not a checksum")
    leaf = Leaf(name, dtype if isinstance(dtype, str) else "", tuple(shape), weak_type, file)
    try:
        dtypes.stored_of(leaf.dtype, leaf.shape)
    except KeyError:
        raise CheckpointError(
            f"{where}: this program does not know the dtype {dtype!r:.80}"
        ) from None
    parts = parts_from_json(data["parts"], leaf.shape, where) if "parts" in data else ()
    return leaf._replace(crc=int(crc, 16), parts=parts)


def _keys(data: Any, count: int, where: str) -> tuple[Any, ...]:
    try:
        keys = tuple(map(serialization.decode, data))
        distinct = len(set(keys))
    except Exception as e:  # whatever their parts may raise
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
        )
    return node


def _decoded(node: serialization.Node, keys: Any, static: Any, where: str) -> tuple[Any, ...]:
    try:
        return serialization.decode_node(node, {"children": list(keys), "static": static})
    except Exception as e:  # whatever its parts may raise
        raise CheckpointError(f"{where}: the metadata of a {node.name} is not valid: {e}") from None


def leaves_of(structure: Structure) -> Iterator[Leaf]:
    """The arrays in a structure."""
    if isinstance(structure, Leaf):
        yield structure
    else:
        for child in structure.children:
            yield from leaves_of(child)


def struct_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """An array without its values."""
    return dtypes.struct_of(leaf.dtype, leaf.shape, leaf.weak_type)


def with_leaves(structure: Structure, change: Callable[[Leaf], Leaf]) -> Structure:
    """A structure with other descriptions of its arrays."""
    if isinstance(structure, Leaf):
        return change(structure)
    children = tuple(with_leaves(child, change) for child in structure.children)
    return structure._replace(children=children)


# --- to trees ------------------------------------------------------------------------------------


def build(structure: Structure, read: Callable[[Leaf], Any], file: str, path: str = "") -> Any:
    """The tree of this structure.

    Args:
      structure: of it.
      read: gives its arrays.
      file: where it is from, for errors.
      path: where it is in the whole tree, for errors.

    Raises:
      CheckpointError: for arrays that do not make a type what the file says.
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
    except Exception as e:  # whatever JAX or the type says about arrays that do not fit
        raise CheckpointError(
            f"{where}: its arrays do not make a {node.kind.__name__}: {e or type(e).__name__}"
        ) from None
    return made


def _check_made(made: Any, dense: tuple[str, tuple[int, ...]] | None, static: str | None) -> None:
    """Whether arrays give an implicit array the shape and dtype of the file.

    `static` is the metadata as the file has it; None if the arrays need not fit together.
    """
    if not is_implicit(made):
        return
    if static is not None:
        _check_whole(made, static)
    own = _dense(made)
    if dense and own and own != (_canonical(dense[0]), dense[1]):
        raise ValueError(f"they are {short(made)}, where the file says {dense[0]}{list(dense[1])}")
    _check_leaves(made)


def _check_whole(made: ImplicitArray, static: str) -> None:
    """Whether arrays fit together, and make what an implicit array says of itself."""
    leaves, treedef = flatten_one_level(made)
    kinds = tuple((y.shape, y.dtype) if hasattr(y, "dtype") else None for y in leaves)
    found = _traced(treedef, kinds, jax.dtypes.canonicalize_dtype(np.float64), static)
    if found != (tuple(made.shape), made.dtype):
        raise ValueError(f"they make {found[1]}{list(found[0])}, not {short(made)}")


def _check_leaves(x: ImplicitArray) -> None:
    """Whether an implicit array has nothing but arrays and numbers in it."""
    numbers = (bool, int, float, complex, np.generic)
    for y in flatten_one_level(x)[0]:
        if not (is_implicit(y) or dtypes.is_array(y) or isinstance(y, numbers)):
            raise ValueError(f"expected arrays and numbers, found a {type(y).__name__}")


def _is_part(x: ImplicitArray) -> bool:
    """Whether arrays are missing, as in an adapter without its base."""
    inner = (y for y in flatten_one_level(x)[0] if is_implicit(y))
    return bool(empty_names(x)) or any(map(_is_part, inner))


@functools.lru_cache(maxsize=1000)
def _traced(
    treedef: Any, kinds: tuple[Any, ...], widest: Any, static: str
) -> tuple[tuple[int, ...], Any]:
    """What `materialize` makes of arrays like these. Most layers of a model have the same."""
    # Only parts of the cache's key: whether there are 64 bits; and 0.0, which equals 0 in a treedef.
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
    """Checks that a file with this structure gives the tree that it describes. No array is read.

    Raises:
      CheckpointError: if it does not; it names the key. For a structure that is so deep that a program
        might not have the room to read it.
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
    """How many containers and objects lie in each other."""
    if isinstance(structure, Leaf) or structure.kind in ("none", "value"):
        return 0
    return 1 + max(map(_depth, structure.children), default=0)


def _text(structure: Structure) -> str:
    return json.dumps(to_json(structure))


def _different(a: Structure, b: Structure, path: str = "") -> tuple[str, str] | None:
    """The first place, and what is there, at which two structures differ; the innermost one."""
    if _text(a) == _text(b):
        return None
    if isinstance(a, Leaf):
        return path, "array"
    below = (
        _different(x, y, joined(path, key, between(a.kind)))
        for key, x, y in zip(a.keys, a.children, getattr(b, "children", ()), strict=False)
    )
    return next(filter(None, below), (path, a.kind))
