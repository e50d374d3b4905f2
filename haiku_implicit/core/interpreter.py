"""The interpreter: it runs a jaxpr's equations in a loop, with rules for implicit operands.

From the top down: `interpret` runs the equations, `apply` chooses a rule for one, `_call_rule` runs
the rule, and `densify` makes a dense array if no rule applies.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from haiku_implicit.core import compat, dispatch
from haiku_implicit.core import materialization as events
from haiku_implicit.core.array import (
    ImplicitArray,
    check_complete,
    dense_struct,
    flatten_one_level,
    has_equivalent,
    is_implicit,
    is_nested,
    short,
)
from haiku_implicit.core.bind import bind, is_hashable
from haiku_implicit.core.caches import Carried, kept
from haiku_implicit.core.literals import are_literals, as_literal, fold, with_literals
from haiku_implicit.core.messages import see
from haiku_implicit.core.sharding import in_type
from haiku_implicit.core.typing import Array, Aval, EqnParam, EqnParams, Primitive, Result, Tree

# For each primitive that carries a jaxpr (see `higher_order`), and for our own primitives (`box`,
# `dense`), the function that runs it on implicit operands.
HIGHER_ORDER: dict[Primitive, Callable[[list[Array], EqnParams], list[Array]]] = {}

# Primitives that make implicit arrays from dense operands; see `box`.
BOXES: set[Primitive] = set()


def interpret(jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    """Evaluates a jaxpr on constants and arguments that may be implicit.

    Args:
      jaxpr: the program.
      consts: a value for each of its `constvars`.
      args: a value for each of its `invars`.

    Returns:
      A value, possibly implicit, for each of its `outvars`.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    outer = source_info_util.current_name_stack()
    for eqn, dead in zip(jaxpr.eqns, _last_uses(jaxpr), strict=True):
        operands = [read(v) for v in eqn.invars]
        # Restores the name stack, the traceback and the settings of the equation's trace.
        info = eqn.source_info
        name_stack = outer + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=name_stack), eqn.ctx.manager:
            results = _evaluate(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
        for var in dead:
            del env[var]
    return [read(v) for v in jaxpr.outvars]


def _evaluate(eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    if any(map(is_implicit, operands)) or _makes_boxes(eqn):
        try:
            results = apply(eqn.primitive, operands, eqn.params)
        except Exception as error:
            check_complete(operands, error)
            of_library = any(map(events.is_of_jax, _sub_jaxprs(eqn)))
            events.say_where(error, eqn.primitive.name, of_library)
            raise
        _check_results(eqn, operands, results)
        return list(map(_in_type, results, eqn.outvars))
    if are_literals(eqn, operands):
        return fold(eqn, operands)
    return bind(eqn.primitive, operands, eqn.params)


def apply(primitive: Primitive, operands: Sequence[Array], params: EqnParams) -> list[Array]:
    """Runs one primitive on operands, some of them implicit.

    `dispatch.primitive_handler` lists the steps.
    """
    operands = [x.restored() if is_implicit(x) else x for x in operands]
    types = tuple(type(x) if is_implicit(x) else jax.Array for x in operands)
    for rule, order in dispatch.rules_for(primitive, types):
        out = _call_rule(rule, primitive, [operands[i] for i in order], params)
        if out is not NotImplemented:
            return list(out) if primitive.multiple_results else [out]
    if primitive in HIGHER_ORDER:
        return HIGHER_ORDER[primitive](list(operands), params)
    if any(is_implicit(x) and has_equivalent(type(x)) for x in operands):
        out = _call_rule(_on_equivalents, primitive, list(operands), params)
        if out is not NotImplemented:
            return list(out) if primitive.multiple_results else [out]
    dense = [densify(x, primitive.name) for x in operands]
    # A constant is the same on all devices of a `shard_map`; the other operands may vary.
    dense = [
        compat.vary_like(y, dense) if is_implicit(x) else y
        for x, y in zip(operands, dense, strict=True)
    ]
    return bind(primitive, dense, params)


def default_handler(primitive: Primitive, *args: Array, **params: EqnParam) -> Result:
    """Runs a primitive itself, for use within a rule.

    Args:
      primitive: the primitive.
      *args: its operands; if one is implicit, the rules for it apply.
      **params: its parameters, as the rule received them.

    Returns:
      An array, or a list of arrays if the primitive has several results.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> float(hki.default_handler(jax.lax.neg_p, jnp.float32(2)))
      -2.0
    """
    run = apply if any(map(is_implicit, args)) else bind
    out = run(primitive, args, params)
    return out if primitive.multiple_results else out[0]


# --- rules -------------------------------------------------------------------------------------


def _on_equivalents(primitive: Primitive, *operands: Array, **params: EqnParam) -> Result:
    """The rule of all types that define `equivalent`: runs the primitive on the equivalents."""
    others = [x.equivalent() if is_implicit(x) else x for x in operands]
    others = [x if y is NotImplemented else y for x, y in zip(operands, others, strict=True)]
    if all(x is y for x, y in zip(operands, others, strict=True)):
        return NotImplemented
    return default_handler(primitive, *others, **params)


def _call_rule(
    rule: dispatch.Rule, primitive: Primitive, operands: list[Array], params: EqnParams
) -> Result:
    """Calls a rule, which is traced once for operands of one structure with the same literals.

    Operands that are one object are one object in the rule, too.
    """
    distinct, places = _distinct(operands)
    literals = tuple(map(as_literal, distinct))
    # The generation is part of the cache's key: a new nested rule changes the trace.
    about = tuple(params.items()), literals, places, dispatch.generation()
    if not is_hashable(about):
        known = with_literals(literals, distinct)
        return _run_rule(rule, primitive, [known[i] for i in places], params)
    out, log = _jitted_rule(rule, primitive)(about, distinct)
    # A rule that leaves the case to the next one made nothing dense, but may have warned.
    said = [e for e in log.value if out is not None or isinstance(e, events.Remark)]
    events.replay(said, of_library=True)
    return NotImplemented if out is None else out


def _distinct(operands: Sequence[Array]) -> tuple[list[Any], tuple[int, ...]]:
    """Drops repeated objects; returns the others, and the position of each operand among them."""
    positions = {key: i for i, key in enumerate(dict.fromkeys(map(id, operands)))}
    distinct = list({id(x): x for x in operands}.values())
    return distinct, tuple(positions[id(x)] for x in operands)


@functools.lru_cache(maxsize=4096)
def _jitted_rule(rule: dispatch.Rule, primitive: Primitive) -> Any:
    """Jits a rule with static parameters: JAX caches its traces, and `clear_caches` drops them."""

    def fun(about: Any, distinct: list[Array]) -> Any:
        params, literals, places, _ = about
        known = with_literals(literals, distinct)
        with events.recording() as log:
            out = _run_rule(rule, primitive, [known[i] for i in places], dict(params))
        return None if out is NotImplemented else out, Carried(tuple(log))

    fun.__name__ = fun.__qualname__ = getattr(rule, "__name__", "rule")
    return jax.jit(fun, static_argnums=0, inline=compat.INLINE)


def _run_rule(
    rule: dispatch.Rule, primitive: Primitive, operands: list[Array], params: EqnParams
) -> Result:
    """Runs a rule. If an operand is nested, the rule is traced and interpreted on the inner arrays."""
    if not any(is_implicit(x) and is_nested(x) for x in operands):
        return _run_own(rule, primitive, operands, params)
    distinct, places = _distinct(operands)
    split = [flatten_one_level(x) if is_implicit(x) else ([x], None) for x in distinct]

    def on_leaves(*leaves: Array) -> Result:
        rest = iter(leaves)
        args = []
        for own, treedef in split:
            mine = [next(rest) for _ in own]
            args.append(mine[0] if treedef is None else treedef.unflatten(mine))
        out = _run_own(rule, primitive, [args[i] for i in places], params)
        return None if out is NotImplemented else out

    out = call_interpreted(on_leaves, [leaf for own, _ in split for leaf in own])
    return NotImplemented if out is None else out


def _run_own(
    rule: dispatch.Rule, primitive: Primitive, operands: list[Array], params: EqnParams
) -> Any:
    """Runs a rule on operands whose fields are dense arrays."""
    taken = dispatch.keywords_of(rule)
    if taken is not None:
        # JAX adds parameters to primitives; they are None if unused. Rules that were written before
        # still work.
        params = {k: v for k, v in params.items() if k in taken or v is not None}
    # The model may have set strict promotion; rules are written for the standard one.
    with jax.numpy_dtype_promotion("standard"):
        out = rule(primitive, *operands, **params)
    if out is None:
        name = getattr(rule, "__qualname__", repr(rule))
        raise TypeError(
            f"rule {name!r} for {primitive.name} returned None; expected the result, or "
            "NotImplemented for a case that it does not handle"
            f" {see('a-wrong-result-of-a-rule')}"
        )
    return out


def _check_results(eqn: JaxprEqn, operands: Sequence[Array], results: Sequence[Array]) -> None:
    """Raises unless results have the shapes and dtypes that the later equations were traced for."""
    avals = [v.aval for v in eqn.outvars]
    if len(results) == len(avals) and all(map(_fits, results, avals)):
        return
    got = ", ".join(short(y) if hasattr(y, "dtype") else repr(y) for y in results)
    raise TypeError(
        f"a rule for {eqn.primitive.name} of {', '.join(map(_kind, operands))} returned {got}; "
        f"expected arrays, dense or implicit: {', '.join(map(short, avals))}"
        f" {see('a-wrong-result-of-a-rule')}"
    )


def _in_type(y: Array, var: Var) -> Array:
    """Shards a result over explicit mesh axes, as the equation's result is for dense operands."""
    return y if is_implicit(y) else in_type(y, getattr(var.aval, "sharding", None))


def _fits(y: Array, aval: Aval) -> bool:
    if not isinstance(aval, jax.core.ShapedArray):
        return True  # a token, or a reference
    if isinstance(y, int | float | complex):  # a literal
        return not aval.shape
    return getattr(y, "shape", None) == aval.shape and y.dtype == aval.dtype


def _kind(x: Any) -> str:
    return f"{type(x).__name__} {short(x)}" if is_implicit(x) else short(x)


# --- dense arrays ------------------------------------------------------------------------------


def densify(x: Array, primitive_name: str, reason: str = "") -> Array:
    """Returns the dense array of `x`, and reports it (and warns, by the policy) if `x` is implicit.

    Args:
      x: an array, dense or implicit.
      primitive_name: the primitive that needs it dense.
      reason: why it needs it dense; by default, because no rule handles it.
    """
    if not is_implicit(x):
        return x
    event = events.describe(primitive_name, x, reason)
    events.emit(event)
    _tell_parts(x, primitive_name)
    try:
        return materialize_array(x)
    except Exception as error:  # a type may refuse to be dense: name the primitive
        error.add_note(f"{event.type_name} was to be materialized, because {event.cause}.")
        raise


def _tell_parts(x: ImplicitArray, primitive_name: str) -> None:
    """Tells an array and the implicit ones in it which primitive makes them dense."""
    x.before_dense(primitive_name)
    for child in flatten_one_level(x)[0]:
        if is_implicit(child):
            _tell_parts(child, primitive_name)


def materialize_array(x: Array) -> jax.Array:
    """Returns the dense array of an implicit array, without a report or a warning."""
    try:
        return _materialized(x)
    except Exception as error:
        check_complete([x], error)
        raise


def _materialized(x: Array) -> jax.Array:
    x = x.restored()
    shape, dtype = x.shape, x.dtype
    with jax.numpy_dtype_promotion("standard"):
        if is_nested(x):
            leaves, treedef = flatten_one_level(x)
            with events.recording():  # `x` is reported as a whole, without its parts
                out = call_interpreted(
                    lambda *leaves: treedef.unflatten(leaves).materialize(), leaves
                )
        else:
            out = x.materialize()
    if is_implicit(out):  # an implicit child, returned unchanged
        out = materialize_array(out)
    if np.shape(out) != shape or out.dtype != dtype:
        raise TypeError(
            f"{type(x).__name__}.materialize() returned {out.dtype}{list(np.shape(out))}, but the "
            f"array says that it is {dtype}{list(shape)}. Correct it, or compute_shape and "
            "compute_dtype"
            f" {see('a-wrong-result-of-a-rule')}"
        )
    return out


def call_interpreted(fun: Callable[..., Any], leaves: Sequence[Array]) -> Tree:
    """Traces `fun` with a dense tracer for each leaf, and interprets the jaxpr on the leaves.

    Args:
      fun: a function of arrays that returns a tree of arrays and implicit arrays.
      leaves: its arguments, dense or implicit.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*map(dense_struct, leaves))
    outs = interpret(closed.jaxpr, closed.consts, leaves)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outs)


# --- analyses of a jaxpr before it runs --------------------------------------------------------


def _last_uses(jaxpr: Jaxpr) -> list[list[Var]]:
    """For each equation, the variables that nothing reads after it, so that their buffers are freed."""
    return kept(jaxpr, "last uses", lambda: _find_last_uses(jaxpr))


def _find_last_uses(jaxpr: Jaxpr) -> list[list[Var]]:
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update((v, i) for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal))
    dead: list[list[Var]] = [[] for _ in jaxpr.eqns]
    for v in last.keys() - {v for v in jaxpr.outvars if not isinstance(v, Literal)}:
        dead[last[v]].append(v)
    return dead


def _makes_boxes(eqn: JaxprEqn) -> bool:
    """Whether an equation, or one in its sub-jaxprs, may make an implicit array from dense ones."""
    if eqn.primitive not in HIGHER_ORDER:
        return False
    return eqn.primitive in BOXES or any(map(_jaxpr_makes_boxes, _sub_jaxprs(eqn)))


def _jaxpr_makes_boxes(jaxpr: Jaxpr) -> bool:
    return kept(jaxpr, "makes boxes", lambda: any(map(_makes_boxes, jaxpr.eqns)))


def _sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    return [getattr(jaxpr, "jaxpr", jaxpr) for _, jaxpr in jaxprs_of(eqn.params)]


def jaxprs_of(params: Mapping[str, EqnParam]) -> Iterator[tuple[str, Any]]:
    """The jaxprs among the parameters of an equation, closed or open, with their names."""
    for name, value in params.items():
        if isinstance(value, Jaxpr | ClosedJaxpr):
            yield name, value
        elif isinstance(value, tuple | list):
            for i, x in enumerate(value):
                if isinstance(x, Jaxpr | ClosedJaxpr):
                    yield f"{name}[{i}]", x
