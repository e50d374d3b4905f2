"""Equations that this version of JAX makes: templates, to check and complete the equations of a file.

JAX checks most parameters when a primitive is bound. But only its compiler, or a derivative rule, reads
some of them: an equation without one of these, or with one too many, would fail far from its file. So
a file's parameters must have the same names as those in a newly made equation. (The compiler can't do
the check: some wrong values end the process.)
"""

import concurrent.futures
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Aval, JsonObject


@functools.cache
def equations() -> dict[str, list[JaxprEqn]]:
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
    return dict(equations()[name][0].params)


def equations_of(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr, and of the jaxprs in its calls, in order."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        yield from equations_of(eqn.params["jaxpr"]) if "jaxpr" in eqn.params else ()


def _program(x: jax.Array, i: jax.Array, key: jax.Array) -> Any:
    calls = [
        jax.jit(lambda x: x * 2)(x),
        jax.device_put(x),
        jax.device_put(x, jax.devices()[0], src=jax.devices()[0]),
    ]
    row, image = x[0], x[None, None]
    control_flow = [
        jax.lax.scan(lambda c, y: (c + y, None), row, x)[0],
        jax.lax.cond(i[0] > 0, jnp.sin, jnp.cos, x),
        jax.lax.while_loop(lambda x: x[0] < 1, jnp.sin, row),
        jax.checkpoint(jnp.sin)(x),
        jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        jax.lax.composite(jnp.sin, "sine")(x),
        jax.lax.reduce(x, jnp.float32(1), lambda a, b: a * b + a, (0,)),
    ]
    numbers = [
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
    ]
    random = [
        jax.random.wrap_key_data(jax.random.key_data(jax.random.clone(key))),
        jax.random.split(key, 2),
        jax.random.fold_in(key, 1),
        jax.random.bits(key, (2,)),
        jax.random.gamma(key, row),
    ]
    return [calls, control_flow, numbers, random]


_REDUCTIONS = ("and", "max", "min", "or", "prod", "sum", "xor")
_UPDATES = ("add", "max", "min", "mul", "set", "subtract")


# --- names ----------------------------------------------------------------------------------------


def check_names(primitive: Primitive, names: Collection[str], types: Iterable[Aval]) -> None:
    """Raises a ValueError unless a primitive's parameters have these names.

    Args:
      primitive: the primitive.
      names: the names of the parameters.
      types: the types of the operands.
    """
    name = primitive.name
    if name not in _KNOWN:
        made = equations().get(name) or _made_of(primitive, types)
        _KNOWN[name] = [frozenset(eqn.params) for eqn in made]
    if known := _KNOWN[name]:
        require_names(name, names, known[0].intersection(*known), known[0].union(*known))


# The names in newly made equations, by the primitive's name. Without any, JAX checks them all.
_KNOWN: dict[str, list[frozenset[str]]] = {}


def require_names(
    name: str, names: Collection[str], required: Collection[str], allowed: Collection[str] = ()
) -> None:
    """Raises a ValueError if required parameters are missing, or other parameters are not allowed.

    Args:
      name: the name of the primitive.
      names: the names of the parameters.
      required: the names that must be present.
      allowed: the names that may also be present.
    """
    missing = sorted({*required} - {*names})
    foreign = sorted({*names} - {*required, *allowed})
    for verb, wrong in (("has to have", missing), ("does not have", foreign)):
        if wrong:
            plural = "s" * (len(wrong) > 1)
            raise ValueError(f"{name} {verb} the parameter{plural} {', '.join(map(repr, wrong))}")


def _made_of(primitive: Primitive, types: Iterable[Aval]) -> Sequence[JaxprEqn]:
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
