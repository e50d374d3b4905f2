"""Plain values of an expression as JSON and back: numbers, types, arrays, JAX's own constants.

Texts, numbers, booleans and None are written directly, and a tuple as a list. Any other value is an
object with one key, which names its kind. Reading makes only values of the classes listed here.
"""

import base64
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from haiku_implicit.core import compat
from haiku_implicit.mox import view


class Unsaveable(Exception):
    """A value can't be written to a file. The text is the reason."""


def require(condition: Any, reason: str) -> None:
    """Raises a ValueError with this reason unless a condition on the file's contents holds."""
    if not condition:
        raise ValueError(reason)


def of_type(x: Any, kind: type, what: str) -> Any:
    """Returns a value from a file if it is of this type, or raises. A boolean is not a number."""
    require(type(x) is kind, f"{what} has to be a {_JSON_NAMES[kind]}, got {type(x).__name__}")
    return x


_JSON_NAMES = {int: "whole number", str: "text", list: "list", dict: "object", bool: "boolean"}


class Shown:
    """A value of which a file has only the text, such as a function that a constructor was given.

    Args:
      text: the text of its attribute in a query.
      given: its `repr`.
    """

    def __init__(self, text: str, given: str):
        self.__name__, self.given = text, given

    def __repr__(self) -> str:
        return self.given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a ValueError, because the function is not in the file."""
        raise ValueError(f"{self.given} is not in the file that the expression comes from")


# --- constants of JAX ------------------------------------------------------------------------------


@functools.cache
def _records() -> dict[str, Any]:
    """The classes of enumerations, named tuples and records in the parameters of equations."""
    public = {name: x for name, x in vars(jax.lax).items() if isinstance(x, type)}
    found = {name: x for name, x in public.items() if _is_record(x)}
    solve = jax.make_jaxpr(lambda a, b: jnp.linalg.solve(a, b))(jnp.eye(2), jnp.ones(2))
    (tuple_class,) = {
        type(eqn.params["jaxprs"])
        for eqn in all_equations(solve.jaxpr)
        if eqn.primitive is jax.lax.linear_solve_p
    }
    found["LinearSolve"] = tuple_class
    return found


def all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, and of the jaxprs in its calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        inner = eqn.params.get("jaxpr")
        if inner is not None:
            yield from all_equations(getattr(inner, "jaxpr", inner))


def _is_record(cls: type) -> bool:
    fields = hasattr(cls, "_fields") or dataclasses.is_dataclass(cls)
    return issubclass(cls, enum.Enum) or fields


def _fields_of(cls: Any) -> tuple[str, ...]:
    return getattr(cls, "_fields", None) or tuple(x.name for x in dataclasses.fields(cls))


def _name_of_class(cls: type) -> str | None:
    return next((name for name, known in _records().items() if known is cls), None)


KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@functools.cache
def key_kinds() -> dict[str, tuple[str, Any, Any]]:
    """Kinds of random keys by tag: the name, the dtype, and the parameter `impl` of equations."""
    found = {}
    for name in KEY_IMPLS:
        jaxpr = jax.make_jaxpr(functools.partial(jax.random.key, impl=name))(0)
        (eqn,) = [x for x in jaxpr.eqns if x.primitive.name == "random_seed"]
        found[str(eqn.params["impl"])] = name, jaxpr.out_avals[0].dtype, eqn.params["impl"]
    return found


@functools.cache
def _policies() -> dict[str, Any]:
    """The policies of `jax.checkpoint` that are plain functions, by name."""
    names = (
        x for x in dir(jax.checkpoint_policies) if not x.startswith(("_", "save_", "offload_"))
    )
    found = {name: getattr(jax.checkpoint_policies, name) for name in names}
    return {name: x for name, x in found.items() if callable(x)}


# Policies that are made from names of values.
_OF_NAMES = (
    "save_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
)


def _policy_to_json(x: Any) -> Any:
    """A policy that `jax.checkpoint_policies` makes from others or from names; None for anything else.

    To recognize a policy, it is made again from its contents.
    """
    both = jax.checkpoint_policies.save_from_both_policies
    if _is_made_as(x, both(x, x)):
        try:
            return {"policy": ["save_from_both_policies", *map(to_json, _held_by(x))]}
        except Unsaveable:
            return None
    for name in _OF_NAMES:
        make = getattr(jax.checkpoint_policies, name)
        sets = _held_by(x)
        if _is_made_as(x, make("a")) and all(isinstance(held, set | frozenset) for held in sets):
            names = sorted({str(y) for held in sets for y in held})
            if _held_by(make(*names)) == sets:
                return {"policy": [name, *names]}
    return None


def _is_made_as(x: Any, other: Any) -> bool:
    """Whether the same function makes both policies."""
    return type(x) is type(other) and getattr(x, "__code__", 0) is getattr(other, "__code__", 0)


def _held_by(policy: Any) -> list[Any]:
    """The values that a policy was made from. A policy is a function or a record."""
    if dataclasses.is_dataclass(policy):
        return [getattr(policy, field.name) for field in dataclasses.fields(policy)]
    return [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]


def _policy_from_json(x: Any, other: Any) -> Any:
    if type(x) is not list:
        return _one_of(_policies(), "policy", x)
    require(x and x[0] in (*_OF_NAMES, "save_from_both_policies"), f"there is no policy {x}")
    make, given = getattr(jax.checkpoint_policies, x[0]), x[1:]
    if x[0] in _OF_NAMES:
        return make(*(of_type(y, str, "a name") for y in given))
    require(len(given) == 2, "save_from_both_policies takes two policies")
    return make(
        *(_policy_from_json(of_type(y, dict, "a policy").get("policy"), other) for y in given)
    )


# --- dtypes and types of arrays ---------------------------------------------------------------------


def dtype_to_json(dtype: Any) -> str:
    """The name of a dtype."""
    if dtype == jax.dtypes.float0:
        return "float0"
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        for tag, (_, known, _) in key_kinds().items():
            if known == dtype:
                return f"key<{tag}>"
        raise Unsaveable(f"it has the dtype {dtype}")
    return str(np.dtype(dtype).name)


def dtype_from_json(name: Any) -> Any:
    """The dtype of this name."""
    of_type(name, str, "a dtype")
    if name.startswith("key<"):
        kind = key_kinds().get(name[4:-1])
        require(kind and name.endswith(">"), f"there is no dtype {name!r}")
        return kind[1] if kind else None
    dtype = _dtypes().get(name)
    require(dtype is not None, f"there is no dtype {name!r}")
    return dtype


@functools.cache
def _scalars() -> dict[str, Any]:
    """JAX's types of numbers by name: `jax.numpy.float32`."""
    every = ((getattr(x, "dtype", None), x) for x in vars(jnp).values() if isinstance(x, type))
    return {dtype.name: x for dtype, x in every if isinstance(dtype, np.dtype)}


@functools.cache
def _dtypes() -> dict[str, np.dtype[Any]]:
    """JAX's dtypes by name."""
    found = {name: x.dtype for name, x in _scalars().items()}
    return {**found, "float0": np.dtype(jax.dtypes.float0)}


def type_to_json(aval: Any) -> list[Any]:
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
    weak = [True] if getattr(aval, "weak_type", False) else []
    return [dtype_to_json(aval.dtype), list(aval.shape), *weak]


def type_from_json(x: Any) -> jax.ShapeDtypeStruct:
    """The type of an array, from JSON."""
    require(len(of_type(x, list, "a type")) in (2, 3), "a type has to be [dtype, shape]")
    shape = of_type(x[1], list, "a shape")
    for n in shape:
        require(0 <= of_type(n, int, "a length") < 2**63, f"{n} is not the length of an axis")
    require(x[2:] in ([], [True]), "the third part of a type has to be true")
    dtype = dtype_from_json(x[0])
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=len(x) == 3)


def same_type(x: Any, y: Any) -> bool:
    """Whether two types of arrays are equal."""
    return (x.shape, x.dtype, bool(getattr(x, "weak_type", False))) == (
        y.shape,
        y.dtype,
        bool(getattr(y, "weak_type", False)),
    )


# --- arrays ----------------------------------------------------------------------------------------


def array_to_json(x: Any) -> dict[str, Any]:
    """An array with its exact bits."""
    if isinstance(x, jax.core.Tracer):
        raise Unsaveable("it has an array of a function that is being traced")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return {"key": dtype_to_json(x.dtype), **array_to_json(jax.random.key_data(x))}
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise Unsaveable("it has an array that other processes hold a part of")
    weak = [True] if getattr(x, "weak_type", False) else []
    host = np.asarray(x)
    data = base64.b64encode(np.ascontiguousarray(host).tobytes()).decode("ascii")
    return {"type": [dtype_to_json(host.dtype), list(host.shape), *weak], "data": data}


def array_from_json(x: Any) -> Any:
    """A NumPy array, or an array of random keys, from JSON."""
    of_type(x, dict, "an array")
    struct = type_from_json(x.get("type"))
    dtype = struct.dtype
    require(isinstance(dtype, np.dtype), "the bytes of an array have to be numbers")
    try:
        data = base64.b64decode(of_type(x.get("data"), str, "data"), validate=True)
    except ValueError as e:
        raise ValueError(f"the bytes of an array are not base64: {e}") from None
    expected = math.prod(struct.shape) * dtype.itemsize
    require(
        len(data) == expected,
        f"an array {dtype.name}{list(struct.shape)} has {expected} bytes, got {len(data)}",
    )
    array: Any = np.frombuffer(data, dtype).reshape(struct.shape)
    if dtype.kind == "b":
        require(
            (array.view(np.uint8) < 2).all(), "an array of booleans has other bytes than 0 and 1"
        )
    if "key" not in x:
        return array
    require(
        f"{x['key']}" in {f"key<{tag}>" for tag in key_kinds()}, "there is no such kind of keys"
    )
    return jax.random.wrap_key_data(array, impl=key_kinds()[x["key"][4:-1]][0])


def constant_from_json(x: Any) -> Any:
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


def number_of(x: Any, dtype: Any) -> Any:
    """A number as a NumPy array of a dtype that represents it exactly."""
    require(isinstance(dtype, np.dtype), "a number has to have a dtype of numbers")
    array = np.asarray(x, dtype)
    require(x != x or array.item() == x, f"{x} is not a number of the dtype {dtype}")
    return array


# --- values ----------------------------------------------------------------------------------------


# Writes values that `to_json` does not know, or raises `Unsaveable`.
Other = Callable[[Any], Any]


def refuse(x: Any) -> Any:
    """The `Other` that raises for anything."""
    raise Unsaveable(f"{_brief(x)} is not a value that a file can have")


def constant(x: Any) -> Any:
    """The `Other` that writes arrays."""
    if isinstance(x, jax.Array):
        return {"constant": array_to_json(x)}
    return {"ndarray": array_to_json(x)} if type(x) is np.ndarray else refuse(x)


def shown(x: Any) -> Any:
    """The `Other` that writes the text of a value, or the shape and dtype of an array."""
    if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return {"struct": type_to_json(jax.ShapeDtypeStruct(x.shape, x.dtype))}
    if isinstance(x, Shown):
        return {"shown": [x.__name__, repr(x)]}
    return {"shown": [view.text_of(x) or "", repr(x)]}


def _brief(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 100 else f"{text[:100]}..."


def to_json(x: Any, other: Other = refuse) -> Any:
    """A plain value as JSON."""
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return x if math.isfinite(x) else {"float": repr(x)}
    if type(x) is tuple:
        return [to_json(y, other) for y in x]
    for tag, kind, write, _ in _KINDS:
        if type(x) is kind:
            return {tag: write(x, other)}
    return _special_to_json(x, other)


def _special_to_json(x: Any, other: Other) -> Any:
    cls = _name_of_class(type(x))
    if cls is not None:
        if isinstance(x, enum.Enum):
            return {"enum": [cls, x.name]}
        return {
            "record": [cls, *(to_json(getattr(x, name), other) for name in _fields_of(type(x)))]
        }
    if isinstance(x, np.dtype) or any(type(x) is type(y) for _, y, _ in key_kinds().values()):
        return {"dtype": dtype_to_json(x)}
    if isinstance(x, type) and issubclass(x, np.generic):
        return {"numpy": dtype_to_json(x)}
    if isinstance(x, type) and any(x is known for known in _scalars().values()):
        return {"jnp": np.dtype(x.dtype).name}  # type: ignore[attr-defined]
    if isinstance(x, np.generic):
        return {"number": array_to_json(np.asarray(x))}
    if isinstance(x, jax.core.ShapedArray):
        return {"aval": type_to_json(x)}
    if x is compat.UNSPECIFIED:
        return {"unspecified": True}
    if isinstance(x, jax.sharding.NamedSharding) and x.mesh.empty and not any(x.spec):
        return {"unsharded": len(x.spec)}
    for tag, (_, _, impl) in key_kinds().items():
        if type(x) is type(impl) and x == impl:
            return {"keys": tag}
    for name, policy in _policies().items():
        if x is policy:
            return {"policy": name}
    policy = _policy_to_json(x) if callable(x) else None
    return other(x) if policy is None else policy


def from_json(x: Any, other: Mapping[str, Callable[[Any], Any]]) -> Any:
    """A plain value from JSON.

    Args:
      x: the JSON.
      other: functions that read the values that `to_json` left to its `other`, by tag.
    """
    if x is None or type(x) in (bool, int, str, float):
        return x
    if type(x) is list:
        return tuple(from_json(y, other) for y in x)
    require(
        len(of_type(x, dict, "a value")) == 1, "a value has to have one key, which says what it is"
    )
    ((tag, value),) = x.items()
    if tag in other:
        return other[tag](value)
    read = _READERS.get(tag)
    require(read is not None, f"there is no value of the kind {tag!r}")
    return read(value, other) if read else None


def _record_from_json(x: Any, other: Any) -> Any:
    cls = _class_named(of_type(x, list, "a record")[:1])
    require(not issubclass(cls, enum.Enum), f"{x[0]} is an enumeration")
    require(len(x) - 1 == len(_fields_of(cls)), f"{x[0]} has {len(_fields_of(cls))} fields")
    return cls(*(from_json(y, other) for y in x[1:]))


def _enum_from_json(x: Any, other: Any) -> Any:
    cls = _class_named(of_type(x, list, "an enumeration")[:1])
    require(issubclass(cls, enum.Enum) and len(x) == 2, f"{x[0]} is not an enumeration")
    member = cls.__members__.get(of_type(x[1], str, "a member"))
    require(member is not None, f"{x[0]} has no member {x[1]!r}")
    return member


def _class_named(name: list[Any]) -> Any:
    cls = _records().get(of_type(name[0], str, "a class")) if name else None
    require(cls is not None, f"there is no class {name} of constants")
    return cls


def _one_of(table: Any, what: str, x: Any) -> Any:
    require(type(x) is str and x in table, f"there is no {what} {x!r}")
    return table[x]


def _complex_from_json(x: Any, other: Any) -> complex:
    parts = [from_json(y, other) for y in of_type(x, list, "a complex number")]
    require([type(y) for y in parts] == [float, float], "a complex number has to be two numbers")
    return complex(*parts)


def _dict_from_json(x: Any, other: Any) -> dict[Any, Any]:
    pairs = [from_json(pair, other) for pair in of_type(x, list, "a dict")]
    require(all(type(pair) is tuple and len(pair) == 2 for pair in pairs), "a dict has to be pairs")
    return dict(pairs)


def _float_from_json(x: Any, other: Any) -> float:
    require(x in ("nan", "inf", "-inf"), f"{x!r} is not a number")
    return float(x)


def _unsharded(x: Any, other: Any) -> jax.sharding.NamedSharding:
    require(0 <= of_type(x, int, "the number of axes") < 1000, f"there are no {x} axes")
    mesh = jax.sharding.AbstractMesh((), ())
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * x))


def _shown_from_json(x: Any, other: Any) -> Shown:
    require(len(of_type(x, list, "a text")) == 2, "what is shown has to be two texts")
    return Shown(of_type(x[0], str, "a text"), of_type(x[1], str, "a text"))


def _bytes_from_json(x: Any, other: Any) -> bytes:
    return base64.b64decode(of_type(x, str, "bytes"), validate=True)


# Tag, class, and the functions that write and read it.
_KINDS: tuple[tuple[str, Any, Any, Any], ...] = (
    (
        "list",
        list,
        lambda x, other: [to_json(y, other) for y in x],
        lambda x, other: [from_json(y, other) for y in of_type(x, list, "a list")],
    ),
    (
        "dict",
        dict,
        lambda x, other: [[to_json(k, other), to_json(y, other)] for k, y in x.items()],
        _dict_from_json,
    ),
    (
        "complex",
        complex,
        lambda x, other: [to_json(x.real), to_json(x.imag)],
        _complex_from_json,
    ),
    (
        "bytes",
        bytes,
        lambda x, other: base64.b64encode(x).decode("ascii"),
        _bytes_from_json,
    ),
)

_READERS: dict[str, Any] = {
    **{tag: read for tag, _, _, read in _KINDS},
    "float": _float_from_json,
    "enum": _enum_from_json,
    "record": _record_from_json,
    "dtype": lambda x, other: dtype_from_json(x),
    "numpy": lambda x, other: dtype_from_json(x).type,
    "ndarray": lambda x, other: array_from_json(x),
    "constant": lambda x, other: constant_from_json(x),
    "jnp": lambda x, other: _one_of(_scalars(), "type of numbers", x),
    "number": lambda x, other: array_from_json(x)[()],
    "aval": lambda x, other: jax.core.ShapedArray(
        (struct := type_from_json(x)).shape, struct.dtype, struct.weak_type
    ),
    "struct": lambda x, other: type_from_json(x),
    "unspecified": lambda x, other: compat.UNSPECIFIED,
    "unsharded": _unsharded,
    "keys": lambda x, other: _one_of(key_kinds(), "kind of keys", x)[2],
    "policy": _policy_from_json,
    "shown": _shown_from_json,
}
