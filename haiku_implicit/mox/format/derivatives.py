"""Rules of `jax.custom_jvp` and `jax.custom_vjp` functions, as programs.

Such a function is an equation with Python functions in it. To get its rule as a program, `rules_of`
differentiates the equation under a trace: `jax.jvp` and `jax.vjp` call the rule, and JAX records its
equations. `with_rules` makes such a function from programs.

Rules are traced with all tangents. A rule with `symbolic_zeros=True` may do less when some tangents are
zero; its program in a file computes these zeros.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Array, Aval


class NoRule(ValueError):
    """A file lacks the derivative rule of one of its functions."""


# The rules of a function with a custom derivative, by the name of its primitive:
# - `jvp` maps arguments and tangents to results and tangents;
# - `fwd` maps arguments to results and residuals;
# - `bwd` maps residuals and cotangents of results to cotangents of arguments.
# Only floating-point and complex arrays have tangents and cotangents in these programs.
RULES = {"custom_jvp_call": ("jvp",), "custom_vjp_call": ("fwd", "bwd")}


def rules_of(eqn: JaxprEqn) -> dict[str, ClosedJaxpr]:
    """The rules of an equation that calls a `jax.custom_jvp` or `jax.custom_vjp` function."""
    avals = [struct_of(x.aval) for x in eqn.invars]
    outs = [struct_of(x.aval) for x in eqn.outvars]
    call = functools.partial(_call, eqn)
    if eqn.primitive.name == "custom_jvp_call":

        def jvp(*arrays: Array) -> list[Array]:
            primals = arrays[: len(avals)]
            tangents = with_zeros(avals, arrays[len(avals) :])
            out, tangents = jax.jvp(call, primals, tuple(tangents))
            return [*out, *without_zeros(outs, tangents)]

        return {"jvp": jax.make_jaxpr(jvp)(*types_of("jvp", avals, outs)[0])}
    trees: list[Any] = []

    def fwd(*primals: Array) -> list[Array]:
        out, pullback = jax.vjp(call, *primals)
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return [*out, *residuals]

    def bwd(*arrays: Array) -> list[Array]:
        residuals, cotangents = arrays[:num_residuals], arrays[num_residuals:]
        pullback = trees[-1].unflatten(residuals)
        return without_zeros(avals, pullback(with_zeros(outs, cotangents)))

    forward = jax.make_jaxpr(fwd)(*avals)
    residuals = list(map(struct_of, forward.out_avals[len(outs) :]))
    num_residuals = len(residuals)
    backward = jax.make_jaxpr(bwd)(*types_of("bwd", avals, outs, residuals)[0])
    return {"fwd": forward, "bwd": backward}


def types_of(
    rule: str, avals: Sequence[Aval], outs: Sequence[Array], residuals: Sequence[Array] = ()
) -> tuple[list[Aval], list[Aval]]:
    """The types of the arguments and results of a rule.

    Args:
      rule: its name.
      avals: the types of the function's arguments.
      outs: the types of its results.
      residuals: the types of its residuals.
    """
    tangents, out_tangents = without_zeros(avals, avals), without_zeros(outs, outs)
    if rule == "jvp":
        return [*avals, *tangents], [*outs, *out_tangents]
    if rule == "fwd":
        return [*avals], [*outs, *residuals]
    return [*residuals, *out_tangents], tangents


def _call(eqn: JaxprEqn, *arrays: Array) -> list[Array]:
    return compat.bind(eqn.primitive, arrays, dict(eqn.params))


def struct_of(aval: Aval) -> jax.ShapeDtypeStruct:
    """The type of an array, for `jax.make_jaxpr`."""
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def has_tangent(aval: Aval) -> bool:
    """Whether an array of this type has a derivative."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jnp.inexact))


def with_zeros(avals: Sequence[Aval], tangents: Sequence[Array]) -> list[Array]:
    """Adds zero tangents for the arrays without a derivative. `tangents` are for the others."""
    rest = iter(tangents)
    none = jax.dtypes.float0
    return [next(rest) if has_tangent(x) else np.zeros(x.shape, none) for x in avals]


def without_zeros(avals: Sequence[Aval], tangents: Sequence[Array]) -> list[Array]:
    """Drops the tangents of arrays without a derivative. `tangents` are for all arrays."""
    return [t for x, t in zip(avals, tangents, strict=True) if has_tangent(x)]


# A program, as a function of arrays.
Run = Callable[..., list[Array]]


def with_rules(
    body: Run, rules: Mapping[str, Run], avals: Sequence[Aval], outs: Sequence[Array]
) -> Run:
    """Makes a `jax.custom_jvp` or `jax.custom_vjp` function from its body and its rules.

    Args:
      body: the function.
      rules: its rules by name: see `RULES`.
      avals: the types of its arguments.
      outs: the types of its results.
    """
    fun: Any

    def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        every = rules["jvp"](*primals, *without_zeros(avals, tangents))
        return every[: len(outs)], with_zeros(outs, every[len(outs) :])

    def forward(*primals: Array) -> Any:
        every = rules["fwd"](*primals)
        return every[: len(outs)], every[len(outs) :]

    def backward(residuals: Sequence[Array], cotangents: Sequence[Array]) -> Any:
        found = iter(rules["bwd"](*residuals, *without_zeros(outs, cotangents)))
        return tuple(next(found) if has_tangent(x) else None for x in avals)

    if "jvp" in rules:
        fun = jax.custom_jvp(body)
        fun.defjvp(jvp)
    else:
        fun = jax.custom_vjp(body)
        backward.__name__ = rules["bwd"].__name__
        fun.defvjp(forward, backward)
    return fun
