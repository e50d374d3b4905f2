"""Sub-jaxprs, interpreted under a trace of their own that is kept for operands of one structure."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from haiku_implicit.core import dispatch
from haiku_implicit.core import materialization as events
from haiku_implicit.core.array import Carried
from haiku_implicit.core.interpreter import interpret
from haiku_implicit.core.literals import LiteralNumber, as_literal

# A hashable function that is applied to the list of results.
Transform = Callable[[list[Any]], list[Any]]

Run = Callable[[list[Any], list[Any]], tuple[list[Any], Carried]]


class Retraced(NamedTuple):
    """A sub-jaxpr, interpreted once on the leaves of its operands.

    Attributes:
      jaxpr: the program from the leaves of the operands to the leaves of the results.
      fun: the same as a function of leaves: one object for one program, so that JAX's caches work.
      out: the results, with `jax.ShapeDtypeStruct` leaves.
      events: what was materialized in it.
    """

    jaxpr: ClosedJaxpr
    fun: Callable[..., list[Any]]
    out: list[Any]
    events: list[events.Materialization]

    def rebuild(self, leaves: Sequence[Any]) -> list[Any]:
        """The results, from their leaves."""
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.out), leaves)


def retrace(
    jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], transform: Transform | None = None
) -> Retraced:
    """Interprets a sub-jaxpr under a trace of its own, cached by jaxpr and operand structure.

    Args:
      jaxpr: the sub-jaxpr.
      consts: values of its `constvars`.
      operands: values of its `invars`, dense or implicit. A literal of the outer program is passed on
        as a literal, so that constants fold with it.
      transform: a hashable function that is applied to the list of results (`structure.Coerce`).
    """
    fun = _jitted(interpreted(jaxpr, operands, transform))
    # `trace` takes only structures and abstract values, so no outer tracer gets in.
    traced = fun.trace(list(consts), list(operands))
    out, log = traced.out_info
    return Retraced(traced.jaxpr, _as_fun(traced.jaxpr), out, log.value)


def interpreted(jaxpr: Jaxpr, operands: Sequence[Any], transform: Transform | None = None) -> Run:
    """The interpreter of a jaxpr as a function `(consts, operands) -> (results, events)`.

    It is one object for one jaxpr, so that traces of it are kept, by JAX: for operands of the same
    structure and shapes, and the same settings. The events are those of the trace, for `replay`.

    Args:
      jaxpr, operands, transform: as for `retrace`.
    """
    return _interpreted(jaxpr, tuple(map(as_literal, operands)), transform, dispatch.generation())


@functools.lru_cache(maxsize=4096)
def _interpreted(
    jaxpr: Jaxpr,
    literals: tuple[LiteralNumber | None, ...],
    transform: Transform | None,
    generation: int,
) -> Run:
    del generation  # only part of the cache's key

    def run(consts: list[Any], operands: list[Any]) -> tuple[list[Any], Carried]:
        known = [y if x is None else x.value for x, y in zip(literals, operands, strict=True)]
        with events.recording() as log:
            out = interpret(jaxpr, consts, known)
            out = out if transform is None else transform(out)
        return out, Carried(log)

    return run


@functools.lru_cache(maxsize=4096)
def _jitted(run: Run) -> Any:
    return jax.jit(run)


@functools.lru_cache(maxsize=4096)
def _as_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    return jaxpr_as_fun(jaxpr)
