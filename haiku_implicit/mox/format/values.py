"""Values in expressions as JSON and back, by a table of their kinds.

None, booleans, numbers and texts are written directly, and a tuple as a list. Any other value is an
object with one key, the tag of its kind. Reading makes only values of the kinds in the table.
"""

import base64
import dataclasses
import enum
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Aval, DType, Json, JsonObject
from haiku_implicit.files import dtypes
from haiku_implicit.mox.show import view


class Unsaveable(ValueError):
    """A value can't be written to a file. The text is the reason."""


def require(condition: Any, reason: str) -> None:
    """Raises a ValueError with this reason unless a condition on the file's contents holds."""
    if not condition:
        raise value_error(reason)


def of_type(x: Json, kind: type, what: str) -> Json:
    """Returns a value from a file if it is of this type, or raises. A boolean is not a number."""
    if type(x) is not kind:
        raise value_error(f"{what} has to be a {_JSON_NAMES[kind]}, got {type(x).__name__}")
    return x


_JSON_NAMES = {int: "whole number", str: "text", list: "list", dict: "object", bool: "boolean"}


def one_of(table: Mapping[str, Any], what: str, name: Json) -> Any:
    """Looks up a name from a file."""
    require(type(name) is str and name in table, f"there is no {what} {name!r}")
    return table[name]


# --- types of arrays ------------------------------------------------------------------------------


class _KeyKind(NamedTuple):
    """A kind of random keys: its name, its dtype, and the parameter `impl` of its equations."""

    name: str
    dtype: Any
    impl: Any


@functools.cache
def _key_kinds() -> dict[str, _KeyKind]:
    """The kinds of random keys by the names of their dtypes, such as `key<fry>`."""
    found = {}
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        jaxpr = jax.make_jaxpr(functools.partial(jax.random.key, impl=name))(0)
        (eqn,) = (x for x in jaxpr.eqns if x.primitive.name == "random_seed")
        dtype = jaxpr.out_avals[0].dtype
        found[str(dtype)] = _KeyKind(name, dtype, eqn.params["impl"])
    return found


@functools.cache
def _dtypes() -> dict[str, Any]:
    """All dtypes of arrays by name."""
    numbers = {name: x.dtype for name, x in _scalars().items()}
    keys = {name: kind.dtype for name, kind in _key_kinds().items()}
    return {**numbers, **keys, "float0": np.dtype(jax.dtypes.float0)}


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype) if _is_key(dtype) else dtypes.name_of_dtype(dtype)


def _is_named(dtype: Any) -> bool:
    """Whether files know a dtype."""
    return _name_of(dtype) in _dtypes()


def dtype_to_json(dtype: Any) -> str:
    """The name of a dtype."""
    if not _is_named(dtype):
        raise Unsaveable(f"it has the dtype {dtype}")
    return _name_of(dtype)


def dtype_from_json(name: Json) -> np.dtype:
    """The dtype of this name."""
    return one_of(_dtypes(), "dtype", name)


def _is_dtype(x: Any) -> bool:
    return isinstance(x, np.dtype) or any(type(x) is type(y.dtype) for y in _key_kinds().values())


def _is_key(dtype: DType) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def type_to_json(aval: Aval) -> list[Json]:
    """The type of an array: dtype, shape, and true if the dtype is weak."""
    if not isinstance(aval, jax.core.ShapedArray | jax.ShapeDtypeStruct):
        raise Unsaveable(f"it has a value of the type {aval}, which is not an array")
    if not all(type(n) is int for n in aval.shape):
        raise Unsaveable(f"it has a symbolic shape: {aval}")
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and not getattr(sharding.mesh, "empty", False):
        raise Unsaveable(f"it has an array on a mesh: {aval}")
    if "Device" not in str(getattr(aval, "memory_space", "Device")):
        raise Unsaveable(f"it has an array in another memory: {aval}")
    return shape_and_dtype(aval)


def shape_and_dtype(x: Aval) -> list[Json]:
    """The type of an array, wherever it is."""
    weak = [True] if getattr(x, "weak_type", False) else []
    return [dtype_to_json(x.dtype), list(x.shape), *weak]


def type_from_json(x: Json) -> jax.ShapeDtypeStruct:
    """The type of an array, from JSON."""
    require(len(of_type(x, list, "a type")) in (2, 3), "a type has to be [dtype, shape]")
    for n in of_type(x[1], list, "a shape"):
        require(0 <= of_type(n, int, "a length") < 2**63, f"{n} is not the length of an axis")
    require(x[2:] in ([], [True]), "the third part of a type has to be true")
    return jax.ShapeDtypeStruct(tuple(x[1]), dtype_from_json(x[0]), weak_type=len(x) == 3)


def same_shape(x: Aval, y: Aval) -> bool:
    """Whether two types of arrays have the same shape and dtype. Weak types are ignored."""
    return x.shape == y.shape and x.dtype == y.dtype


def same_type(x: Aval, y: Aval) -> bool:
    """Whether two types of arrays are equal."""
    weak = (bool(getattr(z, "weak_type", False)) for z in (x, y))
    return same_shape(x, y) and len(set(weak)) == 1


# --- arrays ---------------------------------------------------------------------------------------


def array_to_json(x: Array) -> JsonObject:
    """An array with its exact bits."""
    if isinstance(x, jax.core.Tracer):
        raise Unsaveable("it has an array of a function that is being traced")
    if _is_key(x.dtype):
        return {"key": dtype_to_json(x.dtype), **array_to_json(jax.random.key_data(x))}
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise Unsaveable("it has an array that other processes hold a part of")
    return {"type": shape_and_dtype(x), "data": _bytes_to_json(dtypes.bytes_of(x))}


def array_from_json(x: Json) -> Array:
    """A NumPy array, or an array of random keys, from JSON."""
    struct = type_from_json(of_type(x, dict, "an array").get("type"))
    require(isinstance(struct.dtype, np.dtype), "the bytes of an array have to be numbers")
    data = np.frombuffer(_bytes_from_json(x.get("data")), np.uint8)
    name, expected = x["type"][0], math.prod(struct.shape) * struct.dtype.itemsize
    what = f"an array {name}{list(struct.shape)}"
    require(len(data) == expected, f"{what} has {expected} bytes, got {len(data)}")
    array = dtypes.array_of(data, name, struct.shape, weak_type=False, as_numpy=True)
    if "key" not in x:
        return array
    kind = one_of(_key_kinds(), "kind of keys", x["key"])
    return jax.random.wrap_key_data(array, impl=kind.name)


def constant_from_json(x: Json) -> Array:
    """A JAX array, from JSON."""
    array = array_from_json(x)
    if array.dtype == jax.dtypes.float0:
        return array
    new = jnp.asarray(array)
    require(new.dtype == array.dtype, f"an array of {array.dtype} needs jax_enable_x64")
    if type_from_json(x["type"]).weak_type:
        params = dict(new_dtype=new.dtype, weak_type=True, sharding=None)
        (new,) = compat.bind(jax.lax.convert_element_type_p, [new], params)
    return new


def _bytes_to_json(x: Any) -> str:
    return base64.b64encode(x).decode("ascii")


def _bytes_from_json(x: Json) -> bytes:
    return base64.b64decode(of_type(x, str, "bytes"), validate=True)


def aval_from_json(x: Json) -> jax.core.ShapedArray:
    """The type of an array as JAX's abstract value, from JSON."""
    struct = type_from_json(x)
    return jax.core.ShapedArray(struct.shape, struct.dtype, struct.weak_type)


# --- constants of JAX -----------------------------------------------------------------------------


@functools.cache
def _classes() -> dict[str, Any]:
    """The classes of enumerations, named tuples and records in the parameters of equations."""
    public = {name: x for name, x in vars(jax.lax).items() if isinstance(x, type)}
    found = {name: x for name, x in public.items() if issubclass(x, enum.Enum) or _fields_of(x)}
    solve = functools.partial(jax.lax.custom_linear_solve, jnp.positive, solve=lambda _, x: x)
    eqn = jax.make_jaxpr(solve)(1.0).eqns[-1]
    return found | {"LinearSolve": type(eqn.params["jaxprs"])}


def _fields_of(cls: Any) -> tuple[str, ...]:
    named = getattr(cls, "_fields", ())
    return named or tuple(x.name for x in getattr(cls, "__dataclass_fields__", {}).values())


def _class(parts: Sequence[Any]) -> Any:
    require(parts, "a constant has to have a class")
    return one_of(_classes(), "class", parts[0])


def _class_name(x: Any) -> str | None:
    return next((name for name, cls in _classes().items() if cls is type(x)), None)


@functools.cache
def _scalars() -> dict[str, Any]:
    """JAX's types of numbers by name: `jax.numpy.float32`."""
    every = ((getattr(x, "dtype", None), x) for x in vars(jnp).values() if isinstance(x, type))
    return {dtype.name: x for dtype, x in every if isinstance(dtype, np.dtype)}


def _unsharded(num_axes: Any) -> jax.sharding.NamedSharding:
    require(0 <= of_type(num_axes, int, "the number of axes") < 1000, f"{num_axes} axes")
    spec = jax.sharding.PartitionSpec(*[None] * num_axes)
    return jax.sharding.NamedSharding(jax.sharding.AbstractMesh((), ()), spec)


@functools.cache
def _policies() -> dict[str, Any]:
    """The policies of `jax.checkpoint` that are plain functions, by name."""
    every = inspect.getmembers(jax.checkpoint_policies, callable)
    return {name: x for name, x in every if not name.startswith(("_", "save_", "offload_"))}


# Functions that make policies: of names of values, or of two policies.
_BOTH = "save_from_both_policies"
_NAMES = ("save_only_these_names", "save_any_names_but_these", "save_anything_except_these_names")
_MAKERS = (*_NAMES, _BOTH)


def _policy_to_json(x: Any) -> Json:
    """A policy of `jax.checkpoint_policies` as JSON; None for anything else.

    To recognize a policy that a function has made, it is made again from its contents.
    """
    for name, policy in _policies().items():
        if x is policy:
            return name
    for name in _MAKERS if callable(x) else ():
        make = getattr(jax.checkpoint_policies, name)
        if not _is_made_as(x, make(x, x) if name == _BOTH else make("a")):
            continue
        held = _held_by(x)
        parts = held if name == _BOTH else sorted({str(y) for some in held for y in some})
        if name == _BOTH or _held_by(make(*parts)) == held:
            return [name, *map(to_json, parts)]
    return None


def _is_made_as(x: Any, other: Any) -> bool:
    """Whether the same function makes both policies."""
    return type(x) is type(other) and getattr(x, "__code__", 0) is getattr(other, "__code__", 0)


def _held_by(policy: Any) -> list[Any]:
    """The values that a policy was made from. A policy is a function or a record."""
    if dataclasses.is_dataclass(policy):
        return [getattr(policy, name) for name in _fields_of(policy)]
    return [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]


def _policy_from_json(x: Json) -> Any:
    if type(x) is not list:
        return one_of(_policies(), "policy", x)
    name, *parts = map(from_json, x)
    fits = callable if name == _BOTH else _is(str)
    require(name in _MAKERS and all(map(fits, parts)), f"there is no policy {x}")
    return getattr(jax.checkpoint_policies, name)(*parts)


def _key_tag(x: Any) -> str | None:
    """The tag of a parameter `impl`: `fry` for the keys of the dtype `key<fry>`."""
    known = (y.impl for y in _key_kinds().values())
    return str(x) if any(type(x) is type(impl) and x == impl for impl in known) else None


class Shown:
    """A value of which a file has only the text, such as a function that a constructor was given.

    Args:
      text: the text of its attribute in a query.
      given: its `repr`.
    """

    def __init__(self, text: str, given: str):
        self.__name__, self.given = of_type(text, str, "a text"), of_type(given, str, "a text")

    def __repr__(self) -> str:
        return self.given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a ValueError, because the function is not in the file."""
        raise value_error(f"{self.given} is not in the file that the expression comes from")


# --- the table ------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of values in files.

    Attributes:
      includes: whether a value is of this kind.
      write: makes JSON from a value.
      read: makes a value from JSON; None if that takes the tables of a file.
    """

    includes: Callable[[Any], Any]
    write: Callable[[Any], Any]
    read: Any = None


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda x: type(x) is kind


def _is_of(*kinds: Any) -> Callable[[Any], bool]:
    """Whether a value is an instance of these classes with a dtype that files know."""
    return lambda x: isinstance(x, kinds) and _is_named(x.dtype)


# Kinds of values with parts, by tag: `write` makes a list of the parts, and `read` takes such a list.
_WITH_PARTS: dict[str, Kind] = {
    "list": Kind(_is(list), list, list),
    "dict": Kind(_is(dict), lambda x: list(x.items()), dict),
    "complex": Kind(_is(complex), lambda x: [x.real, x.imag], lambda x: complex(*x)),
    "enum": Kind(
        lambda x: isinstance(x, enum.Enum) and _class_name(x),
        lambda x: [_class_name(x), x.name],
        lambda x: one_of(_class(x).__members__, f"member of {x[0]}", x[1]),
    ),
    "record": Kind(
        _class_name,
        lambda x: [_class_name(x), *(getattr(x, name) for name in _fields_of(type(x)))],
        lambda x: _class(x)(*x[1:]),
    ),
}

# Kinds of simple values, by tag.
_SIMPLE: dict[str, Kind] = {
    "float": Kind(_is(float), repr, float),
    "bytes": Kind(_is(bytes), _bytes_to_json, _bytes_from_json),
    "dtype": Kind(_is_dtype, dtype_to_json, dtype_from_json),
    "numpy": Kind(
        lambda x: isinstance(x, type) and issubclass(x, np.generic),
        dtype_to_json,
        lambda x: dtype_from_json(x).type,
    ),
    "jnp": Kind(
        lambda x: any(x is known for known in _scalars().values()),
        lambda x: x.dtype.name,
        lambda x: one_of(_scalars(), "type of numbers", x),
    ),
    "number": Kind(_is_of(np.generic), array_to_json, lambda x: array_from_json(x)[()]),
    "unsharded": Kind(
        lambda x: isinstance(x, jax.sharding.NamedSharding) and x.mesh.empty and not any(x.spec),
        lambda x: len(x.spec),
        _unsharded,
    ),
    "keys": Kind(
        _key_tag, _key_tag, lambda x: one_of(_key_kinds(), "kind of keys", f"key<{x}>").impl
    ),
    "policy": Kind(_policy_to_json, _policy_to_json, _policy_from_json),
}

# Further kinds in arguments and results.
CONSTANTS = {
    "constant": Kind(lambda x: isinstance(x, jax.Array), array_to_json, constant_from_json),
    "ndarray": Kind(_is(np.ndarray), array_to_json, array_from_json),
}
# Further kinds in the arguments of modules: for arrays their types, and for anything else a text.
SHOWN = {
    "struct": Kind(
        _is_of(jax.Array, np.ndarray, jax.ShapeDtypeStruct),
        lambda x: [dtype_to_json(x.dtype), list(x.shape)],
        type_from_json,
    ),
    "shown": Kind(
        lambda x: True,
        lambda x: [x.__name__ if isinstance(x, Shown) else view.text_of(x) or "", repr(x)],
        lambda x: Shown(*x),
    ),
}


def to_json(x: Any, more: Mapping[str, Kind] = {}) -> Json:
    """A value as JSON.

    Args:
      x: the value.
      more: further kinds that it may be of, or have parts of.

    Raises:
      Unsaveable: if it is not of any kind.
    """
    if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
        return x
    if type(x) is tuple:
        return [to_json(y, more) for y in x]
    for tag, kind in _WITH_PARTS.items():
        if kind.includes(x):
            return {tag: [to_json(y, more) for y in kind.write(x)]}
    for tag, kind in (*_SIMPLE.items(), *more.items()):
        if kind.includes(x):
            return {tag: kind.write(x)}
    text = repr(x)
    text = text if len(text) < 100 else f"{text[:100]}..."
    raise Unsaveable(f"{text} is not a value that a file can have")


_READERS = {tag: kind.read for tag, kind in (_SIMPLE | CONSTANTS | SHOWN).items()}


def from_json(x: Json, more: Mapping[str, Callable[[Any], Any]] = {}) -> Any:
    """A value from JSON.

    Args:
      x: the JSON.
      more: functions that read further kinds, by tag.
    """
    if x is None or type(x) in (bool, int, str, float):
        return x
    if type(x) is list:
        return tuple(from_json(y, more) for y in x)
    require(len(of_type(x, dict, "a value")) == 1, "a value has to have one key, its kind")
    ((tag, value),) = x.items()
    if tag in _WITH_PARTS:
        return _WITH_PARTS[tag].read([from_json(y, more) for y in of_type(value, list, tag)])
    return one_of(_READERS | dict(more), "value of the kind", tag)(value)
