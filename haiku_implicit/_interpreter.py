"""The interpreter: a loop over a jaxpr's equations, and what one equation does to implicit operands."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from haiku_implicit import _compat, _dispatch
from haiku_implicit import _materialization as events
from haiku_implicit._array import dense_struct, flatten_one_level, is_implicit, is_nested

# Primitives that carry a jaxpr, each with the function that retraces it; see `_higher_order`.
HIGHER_ORDER: dict[_compat.Primitive, Callable[[list[Any], dict[str, Any]], Any]] = {}

# Primitives that make implicit arrays of dense operands; see `_box`.
BOXES: set[_compat.Primitive] = set()


def interpret(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr whose constants and arguments may be implicit.

    Args:
      jaxpr: the program.
      consts: a value for each of its `constvars`.
      args: a value for each of its `invars`.

    Returns:
      A value, possibly implicit, for each of its `outvars`.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn, dead in zip(jaxpr.eqns, _last_uses(jaxpr), strict=True):
        operands = [read(v) for v in eqn.invars]
        with _context_of(eqn):
            if any(map(is_implicit, operands)) or _makes_boxes(eqn):
                results = apply(eqn.primitive, operands, eqn.params)
            else:
                results = _compat.bind(eqn.primitive, operands, eqn.params)
        env.update(zip(eqn.outvars, results, strict=True))
        for var in dead:
            del env[var]
    return [read(v) for v in jaxpr.outvars]


def apply(
    primitive: _compat.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """What one primitive does to operands of which some are implicit (steps: `primitive_handler`)."""
    types = tuple(type(x) if is_implicit(x) else jax.Array for x in operands)
    for rule, order in _dispatch.rules_for(primitive, types):
        ordered = [_as_array(operands[i]) for i in order]
        out = _call_rule(rule, primitive, ordered, params)
        if out is not NotImplemented:
            return list(out) if primitive.multiple_results else [out]
    if primitive in HIGHER_ORDER:
        out = HIGHER_ORDER[primitive](list(operands), params)
        if out is not NotImplemented:
            return out
    return _compat.bind(primitive, [densify(x, primitive.name) for x in operands], params)


def default_handler(primitive: _compat.Primitive, *args: Any, **params: Any) -> Any:
    """Runs a primitive itself, for use within a rule.

    Args:
      primitive: the primitive.
      *args: its operands; where one is implicit, the rules for it apply.
      **params: its parameters, as the rule received them.

    Returns:
      An array, or a list of arrays where the primitive has several results.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> float(hki.default_handler(jax.lax.neg_p, jnp.float32(2)))
      -2.0
    """
    run = apply if any(map(is_implicit, args)) else _compat.bind
    out = run(primitive, args, params)
    return out if primitive.multiple_results else out[0]


def densify(x: Any, primitive_name: str) -> Any:
    """A dense array for `x`, visibly."""
    if not is_implicit(x):
        return x
    events.emit(events.describe(primitive_name, x))
    return materialize_array(x)


def materialize_array(x: Any) -> jax.Array:
    """The dense array of one implicit array, without an event."""
    if is_nested(x):
        leaves, treedef = flatten_one_level(x)
        rebuild = functools.partial(jax.tree_util.tree_unflatten, treedef)
        with events.recording():  # what happens inside is part of the one event for `x`
            out = call_interpreted(lambda *leaves: rebuild(leaves).materialize(), leaves)
    else:
        out = x.materialize()
    if is_implicit(out):  # an implicit child, returned as it is
        out = materialize_array(out)
    if np.shape(out) != x.shape or out.dtype != x.dtype:
        raise TypeError(
            f"{type(x).__name__}.materialize() returned {out.dtype}{list(np.shape(out))}, but the "
            f"array says that it is {x.dtype}{list(x.shape)}"
        )
    return out


def call_interpreted(fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """Traces `fun` with a dense tracer for each value, and interprets it on the values.

    Args:
      fun: a function of arrays that returns a tree of arrays and implicit arrays.
      leaves: its arguments, dense or implicit.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*map(dense_struct, leaves))
    outs = interpret(closed.jaxpr, closed.consts, leaves)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outs)


class Retraced(NamedTuple):
    """A sub-jaxpr, interpreted once on the leaves of its operands.

    Attributes:
      jaxpr: the program from the leaves of the operands to the leaves of the results.
      fun: the same as a function of leaves; one object for one program, so that JAX's caches hold.
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
    jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], transform: Any = None
) -> Retraced:
    """Interprets a sub-jaxpr under a trace of its own; cached by jaxpr and operand structure.

    Args:
      jaxpr: the sub-jaxpr.
      consts: values of its `constvars`.
      operands: values of its `invars`, dense or implicit.
      transform: a hashable function from the list of results to another one (see `_structure`).
    """
    tracer, logs = _retracer(jaxpr, transform, _dispatch.generation())
    # Only structure and abstract values matter here, so that what is traced sees no outer tracer.
    traced = tracer.trace(list(consts), list(operands))
    if logs:
        _logs[traced.jaxpr] = logs.pop()
    log = _logs.get(traced.jaxpr, [])
    return Retraced(traced.jaxpr, _as_fun(traced.jaxpr), traced.out_info, log)


# The events of each retraced program that has any.
_logs: weakref.WeakKeyDictionary[ClosedJaxpr, list[events.Materialization]] = (
    weakref.WeakKeyDictionary()
)


@functools.lru_cache(maxsize=4096)
def _retracer(jaxpr: Jaxpr, transform: Any, generation: int) -> tuple[Any, list[Any]]:
    """A jitted interpreter of one jaxpr: JAX keys its traces by structure, avals and settings."""
    del generation  # only part of the cache's key
    logs: list[Any] = []

    def run(consts: list[Any], operands: list[Any]) -> list[Any]:
        with events.recording() as log:
            out = interpret(jaxpr, consts, operands)
            out = out if transform is None else transform(out)
        if log:
            logs.append(log)
        return out

    return jax.jit(run), logs


@functools.lru_cache(maxsize=4096)
def _as_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    return jaxpr_as_fun(jaxpr)


def _call_rule(
    rule: _dispatch.Rule, primitive: _compat.Primitive, operands: list[Any], params: dict[str, Any]
) -> Any:
    """Calls a rule; one with a nested operand is itself traced, and interpreted on the inner arrays."""
    if not any(is_implicit(x) and is_nested(x) for x in operands):
        return rule(primitive, *operands, **params)
    split = [flatten_one_level(x) if is_implicit(x) else ([x], None) for x in operands]
    declined: list[bool] = []

    def on_leaves(*leaves: Any) -> Any:
        rest = iter(leaves)
        args = []
        for own, treedef in split:
            mine = [next(rest) for _ in own]
            args.append(mine[0] if treedef is None else treedef.unflatten(mine))
        out = rule(primitive, *args, **params)
        declined[:] = [out is NotImplemented]
        return None if out is NotImplemented else out

    out = call_interpreted(on_leaves, [leaf for own, _ in split for leaf in own])
    return NotImplemented if declined == [True] else out


def _as_array(x: Any) -> Any:
    """Rules see arrays, never the bare Python scalars that jaxprs hold as literals."""
    return x if is_implicit(x) or isinstance(x, jax.Array) else jnp.asarray(x, dtype=x.dtype)


@contextlib.contextmanager
def _context_of(eqn: JaxprEqn) -> Any:
    """The name stack, traceback and settings under which an equation was traced."""
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


@functools.lru_cache(maxsize=1024)
def _last_uses(jaxpr: Jaxpr) -> list[list[Any]]:
    """For each equation the variables that nothing reads after it: their buffers can go."""
    seen = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    dead = []
    for eqn in reversed(jaxpr.eqns):
        mine = {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)} - seen
        seen |= mine
        dead.append(list(mine))
    return dead[::-1]


def _makes_boxes(eqn: JaxprEqn) -> bool:
    return eqn.primitive in BOXES or any(
        _jaxpr_makes_boxes(sub) for value in eqn.params.values() for sub in _jaxprs_in(value)
    )


@functools.lru_cache(maxsize=4096)
def _jaxpr_makes_boxes(jaxpr: Jaxpr) -> bool:
    return any(_makes_boxes(eqn) for eqn in jaxpr.eqns)


def _jaxprs_in(value: Any) -> list[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    return [j for v in value for j in _jaxprs_in(v)] if isinstance(value, tuple | list) else []
