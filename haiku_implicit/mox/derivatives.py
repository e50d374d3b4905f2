"""Rules of `jax.custom_jvp` and `jax.custom_vjp` functions, as programs.

Such a function is an equation with Python functions in it. To get its rule as a program, `rules_of`
differentiates the equation under a trace: `jax.jvp` and `jax.vjp` call the rule, and JAX records its
equations. `with_jvp` and `with_vjp` make such a function from programs.

Rules are traced with all tangents. A rule with `symbolic_zeros=True` may do less when some tangents are
zero; its program in a file computes these zeros.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from haiku_implicit.core import compat


class NoRule(ValueError):
    """A file lacks the derivative rule of one of its functions."""


class Rules(NamedTuple):
    """The derivative rules of a function.

    Only floating-point and complex arrays have tangents and cotangents in these programs.

    Attributes:
      jvp: maps arguments and tangents to results and tangents; None for a `jax.custom_vjp` function.
      fwd: maps arguments to results and residuals.
      bwd: maps residuals and cotangents of results to cotangents of arguments.
    """

    jvp: ClosedJaxpr | None = None
    fwd: ClosedJaxpr | None = None
    bwd: ClosedJaxpr | None = None


def rules_of(eqn: JaxprEqn) -> Rules:
    """The rules of an equation that calls a `jax.custom_jvp` or `jax.custom_vjp` function."""
    avals = [_struct(x.aval) for x in eqn.invars]
    outs = [x.aval for x in eqn.outvars]
    call = functools.partial(_call, eqn)
    if eqn.primitive.name == "custom_jvp_call":

        def jvp(*arrays: Any) -> list[Any]:
            primals = arrays[: len(avals)]
            tangents = with_zeros(avals, arrays[len(avals) :])
            out, tangents = jax.jvp(call, primals, tuple(tangents))
            return [*out, *without_zeros(outs, tangents)]

        return Rules(jvp=jax.make_jaxpr(jvp)(*avals, *without_zeros(avals, avals)))
    trees: list[Any] = []

    def fwd(*primals: Any) -> list[Any]:
        out, pullback = jax.vjp(call, *primals)
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return [*out, *residuals]

    def bwd(*arrays: Any) -> list[Any]:
        residuals, cotangents = arrays[:num_residuals], arrays[num_residuals:]
        pullback = trees[-1].unflatten(residuals)
        return without_zeros(avals, pullback(with_zeros(outs, cotangents)))

    forward = jax.make_jaxpr(fwd)(*avals)
    residuals = list(map(_struct, forward.out_avals[len(outs) :]))
    num_residuals = len(residuals)
    cotangents = map(_struct, without_zeros(outs, outs))
    return Rules(fwd=forward, bwd=jax.make_jaxpr(bwd)(*residuals, *cotangents))


def _call(eqn: JaxprEqn, *arrays: Any) -> list[Any]:
    return compat.bind(eqn.primitive, arrays, dict(eqn.params))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def has_tangent(aval: Any) -> bool:
    """Whether an array of this type has a derivative."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jnp.inexact))


def with_zeros(avals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Adds zero tangents for the arrays without a derivative. `tangents` are for the others."""
    rest = iter(tangents)
    none = jax.dtypes.float0
    return [next(rest) if has_tangent(x) else np.zeros(x.shape, none) for x in avals]


def without_zeros(avals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Drops the tangents of arrays without a derivative. `tangents` are for all arrays."""
    return [t for x, t in zip(avals, tangents, strict=True) if has_tangent(x)]


# A program, as a function of arrays.
Run = Callable[..., list[Any]]


def with_jvp(body: Run, rule: Run, avals: Sequence[Any], outs: Sequence[Any]) -> Run:
    """Makes a `jax.custom_jvp` function from its body and its rule.

    Args:
      body: the function.
      rule: its `Rules.jvp`.
      avals: the types of its arguments.
      outs: the types of its results.
    """
    fun: Any = jax.custom_jvp(body)

    def jvp(primals: Any, tangents: Any) -> Any:
        every = rule(*primals, *without_zeros(avals, tangents))
        return every[: len(outs)], with_zeros(outs, every[len(outs) :])

    fun.defjvp(jvp)
    return fun


def with_vjp(body: Run, fwd: Run, bwd: Run, avals: Sequence[Any], outs: Sequence[Any]) -> Run:
    """Makes a `jax.custom_vjp` function from its body and its rules.

    Args:
      body: the function.
      fwd: its `Rules.fwd`.
      bwd: its `Rules.bwd`.
      avals: the types of its arguments.
      outs: the types of its results.
    """
    fun: Any = jax.custom_vjp(body)

    def forward(*primals: Any) -> Any:
        every = fwd(*primals)
        return every[: len(outs)], every[len(outs) :]

    def backward(residuals: Any, cotangents: Any) -> Any:
        found = iter(bwd(*residuals, *without_zeros(outs, cotangents)))
        return tuple(next(found) if has_tangent(x) else None for x in avals)

    backward.__name__ = getattr(bwd, "__name__", "backward")
    fun.defvjp(forward, backward)
    return fun
