"""Primitives that carry a jaxpr: for each, a function that runs it on implicit operands.

Each function takes the operands (dense or implicit) and the parameters of an equation, and returns the
list of results. It interprets the sub-jaxpr, mostly under a separate trace that is cached by the
structure of operands (`retrace`), and calls a public function of JAX (`jax.jit`, `jax.lax.scan`, ...)
on the result. JAX's transformations, which may be active around the interpreter, then see an ordinary
call.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat, dispatch, structure
from haiku_implicit.core import materialization as events
from haiku_implicit.core.array import dense_struct, flatten, is_implicit, num_batch_axes
from haiku_implicit.core.caches import Carried, kept
from haiku_implicit.core.interpreter import HIGHER_ORDER, densify, interpret
from haiku_implicit.core.literals import LiteralNumber, as_literal
from haiku_implicit.core.sharding import leaf_places
from haiku_implicit.core.typing import Array, EqnParams, Primitive, Tree

Operands = list[Array]

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
            jaxpr = own()
            assert jaxpr is not None, "a jaxpr is interpreted while an equation holds it"
            out = interpret(jaxpr, consts, known)
            out = out if transform is None else transform(out)
        return out, Carried(tuple(log))

    return run


# --- primitives ----------------------------------------------------------------------------------


def handles(*primitives: Primitive) -> Callable[[Any], Any]:
    """Registers the decorated function to run these primitives."""

    def register(fun: Any) -> Any:
        for primitive in primitives:
            HIGHER_ORDER[primitive] = fun
        return fun

    return register


def _retrace(closed: ClosedJaxpr, operands: Operands, transform: Any = None) -> Retraced:
    return retrace(closed.jaxpr, closed.consts, operands, transform)


def _leaves(consts: Array, operands: Sequence[Array]) -> list[Array]:
    return jax.tree_util.tree_leaves((list(consts), list(operands)))


@handles(jex.closed_call_p, jex.call_p, compat.custom_vmap_p)
def call(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs a plain call: its equations are interpreted in place.

    This includes functions with a custom rule for `vmap`, which handles dense arrays only.
    """
    # Closed in closed_call and custom_vmap, open in core_call.
    jaxpr: Any = params["call" if "call" in params else "call_jaxpr"]
    consts: Array = getattr(jaxpr, "consts", ())
    return interpret(getattr(jaxpr, "jaxpr", jaxpr), consts, operands)


@handles(jex.jit_p)
def jit(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.jit`: a jitted call of the interpreted function, under its original name."""
    closed = params["jaxpr"]
    options = tuple(params[name] for name in ("inline", "keep_unused", "compiler_options_kvs"))
    places = _leaf_shardings(operands, params["in_shardings"])
    if places is not None:
        places = flatten(operands)[1], places
    about = interpreted(closed.jaxpr, operands), params["name"], *options, places
    fun = kept(closed.jaxpr, ("jit", *about), lambda: _jitted(*about))
    out, log = fun(list(closed.consts), operands)
    events.replay(log.value, of_library=events.is_of_jax(closed.jaxpr))
    places = _leaf_shardings(out, params["out_shardings"])
    if places is None:
        return list(out)
    leaves, treedef = flatten(out)
    return treedef.unflatten(_putting(places)(leaves))


def _jitted(
    run: Run, name: str, inline: Any, keep_unused: bool, options: Any, places: Any = None
) -> Any:
    def named(consts: list[Array], operands: Operands) -> tuple[list[Array], Carried]:
        return run(consts, operands)

    named.__name__ = named.__qualname__ = name
    own: dict[str, Any] = dict(inline=inline, compiler_options=dict(options) or None)
    if places is not None:
        own["in_shardings"] = compat.UNSPECIFIED, places[0].unflatten(places[1])
    return jax.jit(named, keep_unused=keep_unused, **own)


def _leaf_shardings(values: list[Array], shardings: Tree) -> tuple[Array, ...] | None:
    """Expands `in_shardings` or `out_shardings` of a jit to leaves; None if no sharding is set."""
    if not any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return None
    found: list[Any] = []
    for x, sharding in zip(values, shardings, strict=True):
        places = leaf_places(x, sharding) if is_implicit(x) else [sharding]
        if places is NotImplemented:
            # Not specified, or not possible for the type: the placement of leaves affects no result.
            places = [compat.UNSPECIFIED] * len(jax.tree_util.tree_leaves(x))
        found += places
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _putting(places: tuple[Any, ...]) -> Any:
    return jax.jit(lambda leaves: leaves, out_shardings=list(places))


@handles(compat.remat_p)
def remat(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.checkpoint` on the interpreted function; its policy decides which leaves are saved."""
    run = interpreted(params["jaxpr"], operands)
    about = dict(prevent_cse=params["prevent_cse"], policy=params["policy"])
    key = "checkpoint", run, *about.values()
    fun = kept(params["jaxpr"], key, lambda: jax.checkpoint(run, **about))
    out, log = fun([], operands)
    events.replay(log.value)
    return out


@handles(jex.scan_p)
def scan(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.lax.scan` with implicit constants, carries (to a fixed point), inputs and outputs."""
    num_consts, num_carry = compat.scan_arity(params, operands)
    consts, init = operands[:num_consts], operands[num_consts:][:num_carry]
    xs = [_sliceable(x) for x in operands[num_consts + num_carry :]]
    carry = [structure.structure(x) for x in init]
    passes = structure.passed_on(params["jaxpr"].jaxpr, num_consts, num_carry)
    while True:
        carry = structure.spread(carry, passes)
        try:
            return _scan_with(carry, consts, init, xs, params)
        except _OtherCarry as error:
            carry = error.carry


class _OtherCarry(Exception):
    """Stops the trace of a loop body, because the carry needs another structure."""

    def __init__(self, carry: list[Array]):
        self.carry = carry


def _scan_with(
    carry: list[Array], consts: Operands, init: Operands, xs: Operands, params: EqnParams
) -> list[Array]:
    """Runs a scan whose carry has this structure.

    The body is interpreted while `jax.lax.scan` traces it: only once, if the carry keeps its structure.

    Raises:
      _OtherCarry: if the carry does not keep its structure.
    """
    closed, length = params["jaxpr"], params["length"]
    (xs_leaves, xs_def), (_, carry_def) = flatten(xs), flatten(carry)
    meet = structure.Coerce(carry, "scan", meet=True)
    ys_def: Any = None

    def body(c: list[Array], x: list[Array]) -> tuple[list[Any], list[Any]]:
        nonlocal ys_def
        slices = [_with_leading_axis(y, None) for y in xs_def.unflatten(x)]
        operands = [*consts, *carry_def.unflatten(c), *slices]
        out = meet(interpret(closed.jaxpr, closed.consts, operands))
        new, ys = out[: len(carry)], out[len(carry) :]
        if not all(map(structure.same, new, carry)):
            raise _OtherCarry(list(map(structure.structure, new)))
        ys_leaves, ys_def = flatten(list(map(_stackable, ys)))
        return jax.tree_util.tree_leaves(new), ys_leaves

    options: dict[str, Any] = {k: params[k] for k in ("reverse", "unroll") if k in params}
    if params.get("_split_transpose"):
        options["_split_transpose"] = True
    first = _coerced_leaves(init, carry, "scan")
    with events.recording() as log:
        final, stacked = jax.lax.scan(body, first, xs_leaves, length=length, **options)
    events.replay(log)
    ys = ys_def.unflatten(stacked)
    return [*carry_def.unflatten(final), *(_with_leading_axis(y, length) for y in ys)]


def _coerced_leaves(init: list[Array], carry: list[Array], name: str) -> list[Array]:
    pairs = zip(init, carry, strict=True)
    return jax.tree_util.tree_leaves([structure.coerce(x, to, name) for x, to in pairs])


_NO_BATCH_AXES = "its type has no batch axes (core_ndim), along which 'scan' slices and stacks"


def _sliceable(x: Array) -> Array:
    """Returns `x` if slices of its leaves make a slice along its first axis, else its dense array."""
    if not is_implicit(x) or num_batch_axes(x) > 0:
        return x
    return densify(x, "scan", _NO_BATCH_AXES)


def _stackable(y: Array) -> Array:
    """Returns `y` if stacks of its leaves make a stack of it, else its dense array."""
    if not is_implicit(y) or y.with_leading_axis(1) is not NotImplemented:
        return y
    return densify(y, "scan", _NO_BATCH_AXES)


def _with_leading_axis(x: Array, size: int | None) -> Array:
    return x.with_leading_axis(size) if is_implicit(x) else x


@handles(jex.while_p)
def while_loop(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.lax.while_loop` with implicit constants and carries (to a fixed point)."""
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:num_cond], operands[num_cond:][:num_body]
    init = operands[num_cond + num_body :]

    # Under `vmap` the condition has batch axes. An element that has ended keeps its carry (`_where`).
    batch = cond.out_avals[0].shape
    start = [structure.structure(x) for x in init]
    start = [
        dense_struct(x) if is_implicit(x) and num_batch_axes(x) < len(batch) else x for x in start
    ]
    passes = structure.passed_on(body.jaxpr, num_body, len(init))
    carry, new_body = start, None
    while new_body is None or not all(map(structure.same, new_body.out, carry)):
        carry = structure.spread(start if new_body is None else new_body.out, passes)
        meet = structure.Coerce(carry, "while", meet=True)
        new_body = _retrace(body, [*body_consts, *carry], meet)
    dense_bool = structure.Coerce([jax.ShapeDtypeStruct(batch, np.bool_)], "while", _CONDITION)
    new_cond = _retrace(cond, [*cond_consts, *carry], dense_bool)
    events.replay([*new_cond.events, *new_body.events])

    cond_leaves = _leaves(cond.consts, cond_consts)
    body_leaves = _leaves(body.consts, body_consts)

    def goes_on(c: list[Array]) -> jax.Array:
        return new_cond.fun(*cond_leaves, *c)[0]

    def step(c: list[Array]) -> list[Array]:
        new = new_body.fun(*body_leaves, *c)
        return [_where(goes_on(c), x, y) for x, y in zip(new, c, strict=True)] if batch else new

    out = jax.lax.while_loop(
        lambda c: goes_on(c).any() if batch else goes_on(c),
        step,
        _coerced_leaves(init, carry, "while"),
    )
    return new_body.rebuild(out)


_CONDITION = "the condition of 'while' is a dense boolean"


def _where(mask: jax.Array, x: Array, y: Array) -> jax.Array:
    """Selects `x` or `y` by a mask over their first axes."""
    return jnp.where(jnp.expand_dims(mask, tuple(range(mask.ndim, np.ndim(x)))), x, y)


@handles(jex.cond_p)
def cond(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.lax.cond` and `switch`, with all branches' results brought to one structure."""
    index, *args = operands
    branches = params["branches"]
    new = [_retrace(b, args) for b in branches]
    outs = zip(*(n.out for n in new), strict=True)
    joined = [functools.reduce(structure.join, alternatives) for alternatives in outs]
    target = structure.Coerce(joined, "cond")
    new = [_retrace(b, args, target) for b in branches]
    for n in new:
        events.replay(n.events)
    leaves = jax.tree_util.tree_leaves(args)
    rest = {k: v for k, v in params.items() if k != "branches"}
    # Bound directly, since no public function takes `branches_platforms` (`platform_dependent`).
    fixed = [_with_consts(n, b.consts) for n, b in zip(new, branches, strict=True)]
    index = densify(index, "cond")
    out = jex.cond_p.bind(index, *leaves, branches=tuple(fixed), **rest)
    return new[0].rebuild(out)


def _with_consts(new: Retraced, consts: list[Array]) -> ClosedJaxpr:
    """Returns the retraced branch as a jaxpr that holds its constants and takes only the operands."""
    if not consts:
        return new.jaxpr
    args = new.jaxpr.in_avals[len(consts) :]
    return jax.make_jaxpr(lambda *xs: new.fun(*consts, *xs))(*args)


@handles(jex.linear_solve_p)
def linear_solve(operands: Operands, params: EqnParams) -> list[Array]:
    """Runs `jax.lax.custom_linear_solve` on a dense vector; functions may have implicit constants."""
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    rest = iter(operands)
    functions: list[Any] = []
    for n, closed in zip(lengths, jaxprs, strict=True):
        consts = [next(rest) for _ in range(n)]
        functions.append(None if closed is None else _linear(closed, consts))
    matvec, vecmat, solve, transpose_solve = functions
    b = [densify(x, "custom_linear_solve") for x in rest]
    n, has_aux = len(b), len(jaxprs[2].out_avals) > len(b)

    def split(out: list[Array]) -> Any:
        return (out[:n], out[n:]) if has_aux else out

    # A symmetric system uses one jaxpr for both directions.
    out = jax.lax.custom_linear_solve(
        lambda x: matvec(*x),
        b,
        lambda _, x: split(solve(*x)),
        None if transpose_solve is None else (lambda _, x: split(transpose_solve(*x))),
        symmetric=vecmat is not None and jaxprs[0] is jaxprs[1],
        has_aux=has_aux,
    )
    return [*out[0], *out[1]] if has_aux else out


def _linear(closed: ClosedJaxpr, consts: Operands) -> Callable[..., list[Array]]:
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.out_avals]
    reason = "what 'custom_linear_solve' iterates on is dense"
    dense = structure.Coerce(structs, "custom_linear_solve", reason)

    def fun(*xs: Array) -> list[Array]:
        return dense(interpret(closed.jaxpr, closed.consts, [*consts, *xs]))

    return fun
