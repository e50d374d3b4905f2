"""Sub-jaxprs, interpreted under separate traces that are cached by the structure of operands."""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from haiku_implicit.core import dispatch
from haiku_implicit.core import materialization as events
from haiku_implicit.core.caches import Carried, kept
from haiku_implicit.core.interpreter import interpret
from haiku_implicit.core.literals import LiteralNumber, as_literal
from haiku_implicit.core.typing import Array

# A hashable function that is applied to the list of results.
Transform = Callable[[list[Array]], list[Array]]

Run = Callable[[list[Array], list[Array]], tuple[list[Array], Carried]]


class Retraced(NamedTuple):
    """A sub-jaxpr, interpreted once on the leaves of its operands.

    Attributes:
      jaxpr: the program from the leaves of the operands to the leaves of the results.
      fun: the program as a function of leaves: one object for each program, for JAX's caches.
      out: the results, with `jax.ShapeDtypeStruct` leaves.
      events: the materializations in it.
    """

    jaxpr: ClosedJaxpr
    fun: Callable[..., list[Array]]
    out: list[Array]
    events: Sequence[events.Event]

    def rebuild(self, leaves: Sequence[Array]) -> list[Array]:
        """Returns the results from their leaves."""
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.out), leaves)


def retrace(
    jaxpr: Jaxpr,
    consts: Sequence[Array],
    operands: Sequence[Array],
    transform: Transform | None = None,
) -> Retraced:
    """Interprets a sub-jaxpr under a separate trace, cached by jaxpr and operand structure.

    Args:
      jaxpr: the sub-jaxpr.
      consts: values of its `constvars`.
      operands: values of its `invars`, dense or implicit. A literal of the outer program is passed on
        as a literal, so that constants fold with it.
      transform: a hashable function that is applied to the list of results (`structure.Coerce`).
    """
    run = interpreted(jaxpr, operands, transform)
    fun = kept(jaxpr, ("jit", run), lambda: jax.jit(run))
    # `trace` takes only structures and abstract values, so no outer tracer gets in.
    traced = fun.trace(list(consts), list(operands))
    out, log = traced.out_info
    program = traced.jaxpr
    fun = kept(jaxpr, ("fun", program), lambda: jaxpr_as_fun(program))
    return Retraced(program, fun, out, log.value)


def interpreted(jaxpr: Jaxpr, operands: Sequence[Array], transform: Transform | None = None) -> Run:
    """Returns the interpreter of a jaxpr as a function `(consts, operands) -> (results, events)`.

    It is one object for each jaxpr, so JAX caches its traces, by the structure and shapes of operands
    and by JAX's settings. The events are from the trace, for `replay`.

    Args:
      jaxpr, operands, transform: as for `retrace`.
    """
    literals = tuple(map(as_literal, operands))
    key = "run", literals, transform, dispatch.generation()
    return kept(jaxpr, key, lambda: _interpreter_of(jaxpr, literals, transform))


def _interpreter_of(
    jaxpr: Jaxpr, literals: tuple[LiteralNumber | None, ...], transform: Transform | None
) -> Run:
    own = weakref.ref(jaxpr)  # `run` is cached by the jaxpr, and must not keep it alive

    def run(consts: list[Array], operands: list[Array]) -> tuple[list[Array], Carried]:
        known = [y if x is None else x.value for x, y in zip(literals, operands, strict=True)]
        with events.recording() as log:
            out = interpret(_there(own), consts, known)
            out = out if transform is None else transform(out)
        return out, Carried(tuple(log))

    return run


def _there(reference: "weakref.ref[Jaxpr]") -> Jaxpr:
    jaxpr = reference()
    assert jaxpr is not None, "a jaxpr is interpreted while an equation holds it"
    return jaxpr
