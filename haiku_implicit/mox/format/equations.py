"""Equations in files: the allowed primitives, and the parameters that need a form of their own.

The parameters of a loop or an inner `jit` differ between versions of JAX, and some are objects of this
process. A file has the parameters that affect numbers; the others come from a newly made equation.

JAX checks most parameters when a primitive is bound. But only its compiler, or a derivative rule, reads
some of them: an equation without one of these, or with one too many, would fail far from its file. So
a file's parameters must have the same names as those in a newly made equation. (The compiler can't do
the check: some wrong values end the process.)
"""

import concurrent.futures
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Aval, EqnParam, EqnParams, JsonObject
from haiku_implicit.mox.format.derivatives import RULES
from haiku_implicit.mox.format.values import Unsaveable, one_of, require, same_shape, same_type

# These run Python or other programs, name devices, or make sense only inside an equation that does.
_NOT_SAVED = {
    *("all_gather", "all_to_all", "axis_index", "custom_lin", "dce_sink", "get", "pmax", "pmin"),
    *("ppermute", "psum", "ragged_all_to_all", "sharding_constraint", "stage", "swap", "xla_pmap"),
    *RULES,
}

_CALLS = [getattr(jex, name) for name in ("closed_call_p", "call_p") if hasattr(jex, name)]

# The names of the parameters that a file has, if JAX's equations have others: the required and the
# optional ones.
_FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "jit": (("name", "jaxpr", "keep_unused", "donated_invars"), ("inline",)),
    "scan": (
        ("jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry"),
        ("linear", "_split_transpose"),
    ),
    "device_put": ((), ()),
    "reduce": (("jaxpr", "dimensions"), ("out_sharding",)),
    **{primitive.name: (("call_jaxpr",), ("name",)) for primitive in _CALLS},
}
# Parameters that name devices or meshes of this process. A file lacks them, so they must be usual ones.
_OF_THIS_PROCESS = (
    *("in_shardings", "out_shardings", "in_layouts", "out_layouts", "ctx_mesh"),
    *("compiler_options_kvs", "devices", "srcs"),
)


@functools.cache
def primitives() -> dict[str, Primitive]:
    """The primitives that a file may have, by name."""
    modules = (jax.lax, jax.lax.linalg, jex)
    public = [
        *(getattr(module, name) for module in modules for name in dir(module)),
        *compat.IDENTITIES,
        compat.remat_p,
        compat.ragged_dot_general_p,
        *(eqn.primitive for eqns in new_equations().values() for eqn in eqns),
    ]
    found = {x.name: x for x in public if isinstance(x, Primitive)}
    return {name: x for name, x in found.items() if name not in _NOT_SAVED}


# --- newly made equations -------------------------------------------------------------------------


@functools.cache
def new_equations() -> dict[str, list[JaxprEqn]]:
    """Newly made equations, by the names of their primitives.

    They are for primitives whose parameters JAX does not check completely, and for primitives without a
    public function of their name.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    x, i = jax.ShapeDtypeStruct((2, 2), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a thread without meshes or settings
        jaxpr = thread.submit(jax.make_jaxpr(_program), x, i, key).result()
    found: dict[str, list[JaxprEqn]] = {}
    for eqn in equations_of(jaxpr):
        found.setdefault(eqn.primitive.name, []).append(eqn)
    return found


def template(name: str) -> JsonObject:
    """The parameters of a newly made equation."""
    return dict(new_equations()[name][0].params)


def equations_of(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, and of the jaxprs in its calls, in order."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        yield from equations_of(eqn.params["jaxpr"]) if "jaxpr" in eqn.params else ()


def _program(x: jax.Array, i: jax.Array, key: jax.Array) -> Any:
    row, image = x[0], x[None, None]
    return [
        # Calls.
        jax.jit(lambda x: x * 2)(x),
        jax.device_put(x),
        jax.device_put(x, jax.devices()[0], src=jax.devices()[0]),
        # Control flow.
        jax.lax.scan(lambda c, y: (c + y, None), row, x)[0],
        jax.lax.cond(i[0] > 0, jnp.sin, jnp.cos, x),
        jax.lax.while_loop(lambda x: x[0] < 1, jnp.sin, row),
        jax.checkpoint(jnp.sin)(x),
        jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        jax.lax.composite(jnp.sin, "sine")(x),
        jax.lax.reduce(x, jnp.float32(1), lambda a, b: a * b + a, (0,)),
        # Numbers.
        jnp.concatenate([x, x]),
        jax.lax.conv(image, image, (1, 1), "SAME"),
        jax.lax.ragged_dot(x, x[None], i[:1]),
        jax.lax.linalg.triangular_solve(x, x),
        jax.lax.linalg.lu_pivots_to_permutation(i, 2),
        jax.lax.betainc(x, x, x),
        *(getattr(jax.lax, f"reduce_{name}")(i, (0,)) for name in _REDUCTIONS),
        *(getattr(x.at[0], method)(row) for method in _UPDATES),
        *compat.polynomials(row),
        *(getattr(jex, f"{name}_to_p").bind(x, x) for name in ("eq", "le", "lt")),
        # Random numbers.
        jax.random.wrap_key_data(jax.random.key_data(jax.random.clone(key))),
        jax.random.split(key, 2),
        jax.random.fold_in(key, 1),
        jax.random.bits(key, (2,)),
        jax.random.gamma(key, row),
    ]


_REDUCTIONS = ("and", "max", "min", "or", "prod", "sum", "xor")
_UPDATES = ("add", "max", "min", "mul", "set", "subtract")


# --- the names of parameters -----------------------------------------------------------------------


def _check_names(primitive: Primitive, names: Collection[str], types: Iterable[Aval]) -> None:
    """Raises a ValueError unless a primitive's parameters have these names.

    Args:
      primitive: the primitive.
      names: the names of the parameters.
      types: the types of the operands.
    """
    name, every = primitive.name, new_equations()
    if name not in every:
        every[name] = _made_of(primitive, types)
    if known := _known_names(name):  # else JAX checks them all
        _require_names(name, names, *known)


@functools.cache
def _known_names(name: str) -> tuple[frozenset[str], ...]:
    """The names that all new equations of a primitive have, and that any has; nothing without any."""
    known = [frozenset(eqn.params) for eqn in new_equations()[name]]
    return (known[0].intersection(*known), known[0].union(*known)) if known else ()


def _require_names(
    name: str, names: Collection[str], required: Collection[str], allowed: Collection[str] = ()
) -> None:
    """Raises a ValueError if required parameters are missing, or other parameters are not allowed.

    Args:
      name: the name of the primitive.
      names: the names of the parameters.
      required: the names that must be present.
      allowed: the names that may also be present.
    """
    if names == required:
        return
    missing = sorted({*required} - {*names})
    foreign = sorted({*names} - {*required, *allowed})
    for verb, wrong in (("has to have", missing), ("does not have", foreign)):
        if wrong:
            plural = "s" * (len(wrong) > 1)
            raise value_error(f"{name} {verb} the parameter{plural} {', '.join(map(repr, wrong))}")


def _made_of(primitive: Primitive, types: Iterable[Aval]) -> list[JaxprEqn]:
    """The equations that a primitive's public function makes for such operands, if it takes them."""
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
    names = (primitive.name, f"bitwise_{primitive.name}")
    found: list[Any] = [getattr(x, y, None) for x in (jax.lax, jax.lax.linalg) for y in names]
    for fun in filter(None, found):
        try:
            made = list(equations_of(jax.make_jaxpr(fun)(*structs)))
        except Exception:  # it takes other arguments
            continue
        if own := [eqn for eqn in made if eqn.primitive is primitive]:
            return own
    return []


# --- writing --------------------------------------------------------------------------------------


def to_file(
    primitive: Primitive, params: Mapping[str, EqnParam], operands: Sequence[Array]
) -> Mapping[str, Any]:
    """The parameters of an equation, in the form that a file has."""
    if primitives().get(primitive.name) is not primitive:
        raise Unsaveable(
            f"a file can't have {primitive.name}: it runs code that is not in the program, or names "
            "devices of this machine. Compute it by jax.numpy, or make implicit arrays parameters: "
            "eval_mox takes them in place of dense ones"
        )
    if primitive.name not in _FORMS:
        try:
            _check_names(primitive, params.keys(), (x.aval for x in operands))
        except ValueError as e:  # bound by hand, otherwise than JAX's functions bind it
            raise Unsaveable(str(e)) from e
        return params
    for name in _OF_THIS_PROCESS:
        if name in params and (own := _unusual(primitive.name, name, params[name])):
            raise Unsaveable(f"it has {name} of its own: {own}")
    if primitive is jex.scan_p:
        num_consts, num_carry = compat.scan_arity(dict(params), list(operands))
        params = {**params, "num_consts": num_consts, "num_carry": num_carry}
    required, optional = _FORMS[primitive.name]
    kept = {name: params[name] for name in (*required, *optional) if name in params}
    if "inline" in kept:
        inline = kept.pop("inline")
        if inline != template("jit")["inline"]:
            kept["inline"] = getattr(inline, "name", inline)
    return kept


def _unusual(primitive: str, name: str, value: Any) -> Any:
    """The entries in a parameter that newly made equations do not have."""
    usual = [eqn.params[name] for eqn in new_equations()[primitive]]
    if not isinstance(value, tuple):
        return [] if value in usual else [value]
    return [x for x in value if not any(x in entries for entries in usual)]


# --- reading --------------------------------------------------------------------------------------


def from_file(
    name: str, params: EqnParams, operands: Sequence[Array], num_results: int
) -> list[Array]:
    """Binds an equation of a file to operands, and returns its results."""
    primitive = one_of(primitives(), "primitive in files", name)
    types = list(map(jax.typeof, operands))
    if name in _FORMS:
        _require_names(name, params.keys(), *_FORMS[name])
    else:
        _check_names(primitive, params.keys(), types)
    if name in ("jit", "scan", "while"):
        _check_kinds(name, params, types)
    if name in _CHECKS:
        _CHECKS[name](params, types)
    if name == "unstack":  # JAX makes as many results as the axis is long, whatever the file says
        axis = params["axis"]
        require(types[0].shape[axis] == num_results, "unstack has another number of results")
    if name == "reduce":
        params = {**params, "computation": jaxpr_as_fun(params["jaxpr"])}
    elif name in ("jit", "scan", "device_put"):
        params = _completed(name, params, len(operands))
    return compat.bind(primitive, operands, params)


def _check_kinds(name: str, params: Mapping[str, EqnParam], types: Sequence[Aval]) -> None:
    """Raises a ValueError unless numbers and flags are of the kinds in a newly made equation."""
    new = dict(num_consts=0, num_carry=0) | template(name)
    for parameter, x in params.items():
        usual = new.get(parameter)
        if type(usual) in (bool, int, str):
            kind = f"{parameter} of {name} has to be of the type {type(usual).__name__}"
            require(type(x) is type(usual), f"{kind}, got {x!r}")
        if type(usual) is int:
            require(x >= (parameter == "unroll"), f"{parameter} of {name} can't be {x}")
        if parameter in ("donated_invars", "linear"):
            fits = type(x) is tuple and [type(y) for y in x] == [bool] * len(types)
            require(fits, f"{parameter} has to be a boolean for each operand")


def _completed(name: str, params: EqnParams, num_operands: int) -> EqnParams:
    """The parameters of an equation of a file, with the ones that it takes from a new one."""
    new = template(name)
    num_results = len(_out_avals(params["jaxpr"])) if "jaxpr" in params else num_operands
    if name == "scan" and "num_consts" not in new:
        # From JAX 0.11 on, they include trees of operands and results.
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        num_xs, num_ys = num_operands - num_consts - num_carry, num_results - num_carry
        new = dict(_flat_scan(num_consts, num_carry, num_xs, num_ys))
    for parameter, x in new.items():
        if isinstance(x, tuple):  # for each operand or result
            new[parameter] = x[:1] * (num_results if parameter[:3] == "out" else num_operands)
    params = {parameter: x for parameter, x in params.items() if parameter in new}
    if name == "jit":
        params["inline"] = _inline(params.get("inline"), new["inline"])
    return new | params


def _inline(x: Any, default: Any) -> Any:
    """The parameter `inline` of an inner `jit`, as this version of JAX has it."""
    if x is None or isinstance(default, bool):
        return default
    members = getattr(jax, "Inline", type(default)).__members__
    require(x is True or x in members, f"jit has no inline {x!r}")
    return compat.INLINE if x is True else members[x]


@functools.lru_cache(maxsize=1024)
def _flat_scan(num_consts: int, num_carry: int, num_xs: int, num_ys: int) -> EqnParams:
    """The parameters of a new scan over flat lists of operands and results, of these lengths."""

    def fun(consts: Any, carry: Array, xs: Any) -> Any:
        def step(carry: Array, xs: Any) -> Any:
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


# --- checks of the programs in an equation ----------------------------------------------------------


def check_takes(what: str, jaxpr: Any, types: Sequence[Aval]) -> None:
    """Raises a ValueError unless a program takes arrays of these types."""
    require(isinstance(jaxpr, ClosedJaxpr | Jaxpr), f"{what} has to be a program")
    check_types(f"{what} takes", _in_avals(jaxpr), types)


def check_types(
    what: str, found: Sequence[Aval], expected: Sequence[Aval], fit: Any = same_shape
) -> None:
    """Raises a ValueError unless types of arrays are the expected ones."""
    if len(found) != len(expected) or not all(map(fit, found, expected)):
        raise value_error(f"{what} {_str(found)}, not {_str(expected)}")


def _in_avals(jaxpr: Any) -> list[Aval]:
    return [v.aval for v in getattr(jaxpr, "jaxpr", jaxpr).invars]


def _out_avals(jaxpr: Any) -> list[Aval]:
    return [x.aval for x in getattr(jaxpr, "jaxpr", jaxpr).outvars]


def _str(avals: Sequence[Aval]) -> str:
    return f"({', '.join(x.str_short() for x in avals)})"


def _check_call(params: Mapping[str, EqnParam], types: Sequence[Aval]) -> None:
    check_takes("the program", params.get("jaxpr", params.get("call_jaxpr")), types)


def _check_cond(params: Mapping[str, EqnParam], types: Sequence[Aval]) -> None:
    branches = params["branches"]
    require(type(branches) is tuple and branches, "branches have to be programs")
    index = [(x.shape, x.dtype in (jnp.int32, jnp.bool_)) for x in types[:1]]
    require(index == [((), True)], "the index has to be an int32")
    for branch in branches:
        check_takes("a branch", branch, types[1:])
        check_types("a branch returns", _out_avals(branch), _out_avals(branches[0]), same_type)


def _check_scan(params: Mapping[str, EqnParam], types: Sequence[Aval]) -> None:
    jaxpr, length, num_consts = params["jaxpr"], params["length"], params["num_consts"]
    num_carry = params["num_carry"]
    fixed, xs = types[: num_consts + num_carry], types[num_consts + num_carry :]
    require(len(fixed) == num_consts + num_carry, "the scan has fewer operands than it says")
    require(all(x.shape[:1] == (length,) for x in xs), f"the scan is over {_str(xs)} by {length}")
    rows = [jax.core.ShapedArray(x.shape[1:], x.dtype) for x in xs]
    check_takes("the body of the scan", jaxpr, [*fixed, *rows])
    carry = _in_avals(jaxpr)[num_consts:][:num_carry]
    check_types("a step of the scan returns", _out_avals(jaxpr)[:num_carry], carry, same_type)


def _check_while(params: Mapping[str, EqnParam], types: Sequence[Aval]) -> None:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    require(num_cond + num_body <= len(types), "a while has another number of operands")
    carry = types[num_cond + num_body :]
    check_takes("cond_jaxpr", params["cond_jaxpr"], [*types[:num_cond], *carry])
    check_takes("body_jaxpr", params["body_jaxpr"], types[num_cond:])
    (test,) = _out_avals(params["cond_jaxpr"])
    require(test.dtype == jnp.bool_, "the condition has to be a boolean")
    # Under `vmap` there is a condition for each element, along the first axes of the carry.
    fits = all(x.shape[: len(test.shape)] == test.shape for x in carry)
    require(fits, f"the condition has the shape {test.shape}, and the loop has {_str(carry)}")
    before, after = _in_avals(params["body_jaxpr"])[num_body:], _out_avals(params["body_jaxpr"])
    check_types("a step of the loop returns", after, before, same_type)


def _check_reduce(params: Mapping[str, EqnParam], types: Sequence[Aval]) -> None:
    check_takes("reduce", params["jaxpr"], [jax.core.ShapedArray((), x.dtype) for x in types])


_CHECKS = {
    **{primitive.name: _check_call for primitive in (jex.jit_p, compat.remat_p, *_CALLS)},
    "cond": _check_cond,
    "scan": _check_scan,
    "while": _check_while,
    "reduce": _check_reduce,
}
