"""Equations in files: the allowed primitives, and the parameters that need a form of their own.

The parameters of a loop or an inner `jit` differ between versions of JAX, and some are objects of this
process. A file has the parameters that affect numbers; the others come from a newly made equation.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat
from haiku_implicit.mox import made
from haiku_implicit.mox.plain import Unsaveable, require, same_type

# Functions with custom derivatives, which have a table in a file.
WITH_RULES = ("custom_jvp_call", "custom_vjp_call")

# These run Python or other programs, name devices, or make sense only inside an equation that does.
_NOT_SAVED = {
    "all_gather",
    "all_to_all",
    "axis_index",
    "custom_lin",
    "dce_sink",
    "get",
    "pmax",
    "pmin",
    "ppermute",
    "psum",
    "ragged_all_to_all",
    "sharding_constraint",
    "stage",
    "swap",
    "xla_pmap",
    *WITH_RULES,
}


@functools.cache
def primitives() -> dict[str, Primitive]:
    """The primitives that a file may have, by name."""
    public = [
        *(
            getattr(module, name)
            for module in (jax.lax, jax.lax.linalg, jex)
            for name in dir(module)
        ),
        *compat.IDENTITIES,
        compat.remat_p,
        compat.ragged_dot_general_p,
        *(eqn.primitive for eqns in made.equations().values() for eqn in eqns),
    ]
    found = {x.name: x for x in public if isinstance(x, Primitive)}
    return {name: x for name, x in found.items() if name not in _NOT_SAVED}


def to_file(primitive: Primitive, params: Mapping[str, Any], operands: Sequence[Any]) -> Any:
    """The parameters of an equation, in the form that a file has."""
    known = primitives().get(primitive.name)
    if known is not primitive:
        raise Unsaveable(
            f"a file can't have {primitive.name}: it runs code that is not in the program, or names "
            "devices of this machine"
        )
    write, _ = _SPECIAL.get(primitive.name, (None, None))
    if write is not None:
        return write(params, operands)
    try:
        made.check_names(primitive, params, (x.aval for x in operands))
    except ValueError as e:  # bound by hand, otherwise than JAX's functions bind it
        raise Unsaveable(str(e)) from e
    return params


def from_file(
    name: str, params: dict[str, Any], operands: Sequence[Any], num_results: int
) -> list[Any]:
    """Binds an equation of a file to operands, and returns its results."""
    primitive = primitives().get(name)
    require(primitive is not None, f"there is no primitive {name!r} that a file may have")
    assert primitive is not None
    if name in _OWN_NAMES:
        made.require_names(name, params, *_OWN_NAMES[name])
    else:
        made.check_names(primitive, params, map(jax.typeof, operands))
    _, read = _SPECIAL.get(name, (None, None))
    if name == "unstack":  # JAX makes as many results as the axis is long, whatever the file says
        axis = params["axis"]
        require(operands[0].shape[axis] == num_results, "unstack has another number of results")
    return compat.bind(primitive, operands, params) if read is None else read(params, operands)


# --- checks ----------------------------------------------------------------------------------------


def check_operands(what: str, jaxpr: Any, operands: Sequence[Any]) -> None:
    """Raises a ValueError unless a program takes these operands."""
    check_types(what, jaxpr, list(map(jax.typeof, operands)))


def check_types(what: str, jaxpr: Any, types: Sequence[Any]) -> None:
    """Raises a ValueError unless a program takes arrays of these types."""
    require(isinstance(jaxpr, ClosedJaxpr | Jaxpr), f"{what} has to be a program")
    expected = _in_avals(jaxpr)
    fits = len(expected) == len(types) and all(map(same_shape, expected, types))
    require(fits, f"{what} takes {_str(expected)}, and gets {_str(types)}")


def same_shape(x: Any, y: Any) -> bool:
    """Whether two types of arrays have the same shape and dtype. Weak types are ignored."""
    return x.shape == y.shape and x.dtype == y.dtype


def _in_avals(jaxpr: Any) -> list[Any]:
    return [v.aval for v in getattr(jaxpr, "jaxpr", jaxpr).invars]


def _out_avals(jaxpr: Any) -> list[Any]:
    return [x.aval for x in getattr(jaxpr, "jaxpr", jaxpr).outvars]


def _str(avals: Sequence[Any]) -> str:
    return f"({', '.join(x.str_short() for x in avals)})"


def _same_types(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
    return len(xs) == len(ys) and all(map(same_type, xs, ys))


# --- primitives with another form in files -----------------------------------------------------------


def _refuse(condition: bool, reason: str) -> None:
    if condition:
        raise Unsaveable(reason)


def _write_jit(params: Mapping[str, Any], operands: Any) -> dict[str, Any]:
    for name in ("in_shardings", "out_shardings"):
        own = [x for x in params[name] if x is not compat.UNSPECIFIED]
        _refuse(bool(own), f"it has {name} of its own: {own}")
    for name in ("in_layouts", "out_layouts"):
        _refuse(any(x is not None for x in params[name]), f"it has {name} of its own")
    mesh = params["ctx_mesh"]
    _refuse(mesh is not None and not mesh.empty, f"it runs on a mesh: {mesh}")
    _refuse(bool(params["compiler_options_kvs"]), "it has options for the compiler")
    kept = {name: params[name] for name in ("name", "jaxpr", "keep_unused", "donated_invars")}
    if params["inline"] != made.template("jit")["inline"]:
        kept["inline"] = getattr(params["inline"], "name", params["inline"])
    return kept


def _read_jit(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    jaxpr, template = params["jaxpr"], made.template("jit")
    check_operands("jit", jaxpr, operands)
    require(type(params["name"]) is str, "the name of a function has to be a text")
    require(type(params["keep_unused"]) is bool, "keep_unused has to be a boolean")
    donated = params["donated_invars"]
    require(
        type(donated) is tuple and [type(x) for x in donated] == [bool] * len(operands),
        "donated_invars has to be a boolean for each operand",
    )
    num_results = len(_out_avals(jaxpr))
    new = template | params
    new |= dict(
        in_shardings=(compat.UNSPECIFIED,) * len(operands),
        in_layouts=(None,) * len(operands),
        out_shardings=(compat.UNSPECIFIED,) * num_results,
        out_layouts=(None,) * num_results,
        inline=_inline(params.get("inline"), template["inline"]),
    )
    return compat.bind(jex.jit_p, operands, new)


def _inline(x: Any, default: Any) -> Any:
    """The parameter `inline` of an inner `jit`, as this version of JAX has it."""
    if x is None or isinstance(default, bool):
        return default
    members = getattr(jax, "Inline", type(default)).__members__
    require(x is True or x in members, f"jit has no inline {x!r}")
    return compat.INLINE if x is True else members[x]


def _write_scan(params: Mapping[str, Any], operands: Sequence[Any]) -> dict[str, Any]:
    num_consts, num_carry = compat.scan_arity(dict(params), list(operands))
    kept = {name: params[name] for name in ("jaxpr", "length", "reverse", "unroll")}
    for name in ("linear", "_split_transpose"):
        if name in params:
            kept[name] = params[name]
    return dict(kept, num_consts=num_consts, num_carry=num_carry)


def _read_scan(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    jaxpr, length = params["jaxpr"], params["length"]
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    for name, x in (("length", length), ("num_consts", num_consts), ("num_carry", num_carry)):
        require(type(x) is int and x >= 0, f"{name} of a scan has to be a whole number from 0 on")
    require(num_consts + num_carry <= len(operands), "the scan has fewer operands than it says")
    require(type(params["reverse"]) is bool, "reverse has to be a boolean")
    require(type(params["unroll"]) is int and params["unroll"] > 0, "unroll has to be positive")
    types = list(map(jax.typeof, operands))
    xs = types[num_consts + num_carry :]
    require(all(x.shape[:1] == (length,) for x in xs), f"the scan is over {_str(xs)} by {length}")
    inner = [jax.core.ShapedArray(x.shape[1:], x.dtype) for x in xs]
    check_types("the body of the scan", jaxpr, [*types[: num_consts + num_carry], *inner])
    carry = _in_avals(jaxpr)[num_consts:][:num_carry]
    out = _out_avals(jaxpr)[:num_carry]
    require(
        _same_types(carry, out), f"the scan has {_str(carry)} before a step, and then {_str(out)}"
    )
    template = made.template("scan")
    if "num_consts" not in template:
        return _scan(params, operands)
    new = template | {name: x for name, x in params.items() if name in template}
    if "linear" in template:
        linear = params.get("linear", (False,) * len(operands))
        require([type(x) for x in linear] == [bool] * len(operands), "linear has to be booleans")
        new["linear"] = linear
    return compat.bind(jex.scan_p, operands, new)


def _scan(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Binds a scan whose parameters include trees of operands and results (from JAX 0.11 on)."""
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    num_xs = len(operands) - num_consts - num_carry
    num_ys = len(_out_avals(params["jaxpr"])) - num_carry
    new = dict(_flat_scan(num_consts, num_carry, num_xs, num_ys))
    new |= {name: params[name] for name in ("jaxpr", "length", "reverse", "unroll")}
    return compat.bind(jex.scan_p, operands, new)


@functools.lru_cache(maxsize=1024)
def _flat_scan(num_consts: int, num_carry: int, num_xs: int, num_ys: int) -> dict[str, Any]:
    """The parameters of a new scan over flat lists of operands and results, of these lengths."""

    def fun(consts: Any, carry: Any, xs: Any) -> Any:
        def step(carry: Any, xs: Any) -> Any:
            for x in consts:
                jnp.sin(x)
            return list(map(jnp.sin, carry)), [jnp.ones(()) * i for i in range(num_ys)]

        return jax.lax.scan(step, carry, xs, length=1)

    one, row = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.float32)
    jaxpr = jax.make_jaxpr(fun)([one] * num_consts, [one] * num_carry, [row] * num_xs)
    eqn = next(eqn for eqn in jaxpr.eqns if eqn.primitive is jex.scan_p)
    arity = compat.scan_arity(eqn.params, list(eqn.invars)), len(eqn.invars), len(eqn.outvars)
    assert arity == ((num_consts, num_carry), num_consts + num_carry + num_xs, num_carry + num_ys)
    return dict(eqn.params)


def _read_call(params: dict[str, Any], operands: Sequence[Any], primitive: Any) -> list[Any]:
    """Binds a call of a program on all operands."""
    name = "jaxpr" if "jaxpr" in params else "call_jaxpr"
    check_operands(primitive.name, params[name], operands)
    return compat.bind(primitive, operands, params)


def _read_cond(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    branches = params["branches"]
    require(type(branches) is tuple and branches, "branches have to be programs")
    require(operands, "a cond needs an index")
    index = jax.typeof(operands[0])
    require(index.shape == () and index.dtype in (jnp.int32, jnp.bool_), "the index is no int32")
    for branch in branches:
        check_operands("a branch", branch, operands[1:])
        fits = _same_types(_out_avals(branch), _out_avals(branches[0]))
        require(fits, "branches have to return the same types")
    return compat.bind(jex.cond_p, operands, params)


def _read_while(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    for x in (num_cond, num_body):
        require(
            type(x) is int and 0 <= x <= len(operands), "a while has another number of operands"
        )
    carry = operands[num_cond + num_body :]
    check_operands("cond_jaxpr", params["cond_jaxpr"], [*operands[:num_cond], *carry])
    check_operands("body_jaxpr", params["body_jaxpr"], operands[num_cond:])
    (test,) = _out_avals(params["cond_jaxpr"])
    require(test.dtype == jnp.bool_, "the condition has to be a boolean")
    # Under `vmap` there is a condition for each element, along the first axes of the carry.
    shapes = [jax.typeof(x).shape for x in carry]
    fits = all(shape[: len(test.shape)] == test.shape for shape in shapes)
    require(fits, f"the condition has the shape {test.shape}, and the loop has {shapes}")
    before, after = _in_avals(params["body_jaxpr"])[num_body:], _out_avals(params["body_jaxpr"])
    require(_same_types(before, after), f"the loop has {_str(before)}, and then {_str(after)}")
    return compat.bind(jex.while_p, operands, params)


def _write_device_put(params: Mapping[str, Any], operands: Sequence[Any]) -> dict[str, Any]:
    places = {*params["devices"], *params["srcs"]} - {None, jax.devices()[0]}
    _refuse(bool(places), f"it names places for arrays: {', '.join(map(str, places))}")
    return {}


def _read_device_put(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    template = made.template("device_put")
    return compat.bind(
        jax.lax.device_put_p, operands, {k: x * len(operands) for k, x in template.items()}
    )


def _write_reduce(params: Mapping[str, Any], operands: Sequence[Any]) -> dict[str, Any]:
    return {name: x for name, x in params.items() if name != "computation"}


def _read_reduce(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    jaxpr = params["jaxpr"]
    scalars = [jax.core.ShapedArray((), jax.typeof(x).dtype) for x in operands]
    check_types("reduce", jaxpr, scalars)
    fun = jaxpr_as_fun(jaxpr)
    half = len(operands) // 2
    out = jax.lax.reduce(
        list(operands[:half]),
        list(operands[half:]),
        lambda xs, ys: fun(*xs, *ys),
        params["dimensions"],
        **{name: x for name, x in params.items() if name == "out_sharding"},
    )
    return list(out)


_CALLS = [getattr(jex, name) for name in ("closed_call_p", "call_p") if hasattr(jex, name)]

# The required and the optional parameters of primitives with another form in files, and of primitives
# that no function of JAX makes.
_OWN_NAMES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "jit": (("name", "jaxpr", "keep_unused", "donated_invars"), ("inline",)),
    "scan": (
        ("jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry"),
        ("linear", "_split_transpose"),
    ),
    "device_put": ((), ()),
    "reduce": (("jaxpr", "dimensions"), ("out_sharding",)),
    **{primitive.name: (("call_jaxpr",), ("name",)) for primitive in _CALLS},
}

_SPECIAL: dict[str, tuple[Any, Any]] = {
    "jit": (_write_jit, _read_jit),
    "scan": (_write_scan, _read_scan),
    "cond": (None, _read_cond),
    "while": (None, _read_while),
    "device_put": (_write_device_put, _read_device_put),
    "reduce": (_write_reduce, _read_reduce),
    **{
        x.name: (None, functools.partial(_read_call, primitive=x))
        for x in (compat.remat_p, *_CALLS)
    },
}
