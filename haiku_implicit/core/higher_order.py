"""Primitives that carry a jaxpr: one function for each, which runs it with implicit operands.

Each function takes the operands (dense or implicit) and the parameters of an equation, and returns
the list of results. The sub-jaxpr is interpreted under a trace of its own (`retrace`), and a public
function of JAX (`jax.jit`, `jax.lax.scan`, ...) is called on it, so that JAX's transformations, which
may be active around the interpreter, see an ordinary call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.extend.core import primitives as jex
from jax.sharding import NamedSharding, PartitionSpec

from haiku_implicit.core import compat, structure
from haiku_implicit.core import materialization as events
from haiku_implicit.core.array import dense_struct, flatten, is_implicit, num_batch_axes
from haiku_implicit.core.interpreter import HIGHER_ORDER, densify, interpret, materialize_array
from haiku_implicit.core.retrace import Retraced, retrace

Operands = list[Any]
Params = dict[str, Any]


def _handles(*primitives: compat.Primitive) -> Callable[[Any], Any]:
    def register(fun: Any) -> Any:
        for primitive in primitives:
            HIGHER_ORDER[primitive] = fun
        return fun

    return register


def _retrace(closed: ClosedJaxpr, operands: Operands, transform: Any = None) -> Retraced:
    return retrace(closed.jaxpr, closed.consts, operands, transform)


def _leaves(consts: Any, operands: Any) -> list[Any]:
    return jax.tree_util.tree_leaves((list(consts), list(operands)))


@_handles(jex.closed_call_p, jex.call_p)
def call(operands: Operands, params: Params) -> list[Any]:
    """A plain call: the equations are interpreted in place."""
    jaxpr: Any = params["call_jaxpr"]  # closed in closed_call, open in core_call
    consts: Any = getattr(jaxpr, "consts", ())
    return interpret(getattr(jaxpr, "jaxpr", jaxpr), consts, operands)


@_handles(jex.jit_p)
def jit(operands: Operands, params: Params) -> list[Any]:
    """`jax.jit`: a jitted call of the retraced function, under its own name."""
    closed = params["jaxpr"]
    operands = list(map(_constrain, operands, params["in_shardings"]))
    new = _retrace(closed, operands)
    events.replay(new.events, of_library=events.is_of_jax(closed.jaxpr))
    fun = _jitted(new.fun, params["name"], params["inline"], params["keep_unused"],
                  params["compiler_options_kvs"])  # fmt: skip
    out = new.rebuild(fun(*_leaves(closed.consts, operands)))
    return list(map(_constrain, out, params["out_shardings"]))


@functools.lru_cache(maxsize=4096)
def _jitted(fun: Any, name: str, inline: bool, keep_unused: bool, options: Any) -> Any:
    def named(*args: Any) -> Any:
        return fun(*args)

    named.__name__ = named.__qualname__ = name
    return jax.jit(
        named, inline=inline, keep_unused=keep_unused, compiler_options=dict(options) or None
    )


def _constrain(x: Any, sharding: Any) -> Any:
    """What the `in_shardings` and `out_shardings` of an inner jit mean for a dense value."""
    if is_implicit(x) or not isinstance(sharding, jax.sharding.Sharding):
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


@_handles(compat.remat_p)
def remat(operands: Operands, params: Params) -> list[Any]:
    """`jax.checkpoint`: what is saved is decided for the retraced function, on the leaves."""
    new = retrace(params["jaxpr"], (), operands)
    events.replay(new.events)
    fun = _checkpointed(new.fun, params["prevent_cse"], params["policy"])
    return new.rebuild(fun(*_leaves((), operands)))


@functools.lru_cache(maxsize=4096)
def _checkpointed(fun: Any, prevent_cse: Any, policy: Any) -> Any:
    return jax.checkpoint(fun, prevent_cse=prevent_cse, policy=policy)


@_handles(jex.scan_p)
def scan(operands: Operands, params: Params) -> list[Any]:
    """`jax.lax.scan`: implicit constants, carries (to a fixed point), scanned inputs and outputs."""
    closed, length = params["jaxpr"], params["length"]
    num_consts, num_carry = compat.scan_arity(params, operands)
    consts, init = operands[:num_consts], operands[num_consts:][:num_carry]
    xs = [_sliceable(x) for x in operands[num_consts + num_carry :]]
    slices = [jax.tree.map(_first, x) for x in xs]
    slices = [x.with_leading_axis(None) if is_implicit(x) else x for x in slices]

    carry = [structure.structure(x) for x in init]
    new = _fixed_point(lambda c, t: _retrace(closed, [*consts, *c, *slices], t), carry, "scan")
    carry = new.out[:num_carry]
    stackable = [_stackable(y) for y in new.out[num_carry:]]
    if not all(map(structure.same, stackable, new.out[num_carry:])):
        target = structure.Coerce([*carry, *stackable], "scan", _NO_BATCH_AXES)
        new = _retrace(closed, [*consts, *carry, *slices], target)
    events.replay(new.events)

    leaves_in = _leaves(closed.consts, consts)
    num_carry_leaves = len(jax.tree_util.tree_leaves(carry))

    def body(c: Any, x: Any) -> tuple[list[Any], list[Any]]:
        out = new.fun(*leaves_in, *c, *x)
        return out[:num_carry_leaves], out[num_carry_leaves:]

    init_leaves = _coerced_leaves(init, carry, "scan")
    options: dict[str, Any] = {k: params[k] for k in ("reverse", "unroll") if k in params}
    if params.get("_split_transpose"):
        options["_split_transpose"] = True
    final, ys = jax.lax.scan(
        body, init_leaves, jax.tree_util.tree_leaves(xs), length=length, **options
    )
    out = new.rebuild([*final, *ys])
    ys = [y.with_leading_axis(length) if is_implicit(y) else y for y in out[num_carry:]]
    return [*out[:num_carry], *ys]


_NO_BATCH_AXES = "its type has no batch axes (core_ndim), along which 'scan' slices and stacks"


def _coerced_leaves(init: list[Any], carry: list[Any], name: str) -> list[Any]:
    pairs = zip(init, carry, strict=True)
    return jax.tree_util.tree_leaves([structure.coerce(x, to, name) for x, to in pairs])


def _sliceable(x: Any) -> Any:
    """`x` if it can be sliced along its first axis by slicing its leaves, else its dense array."""
    if not is_implicit(x) or num_batch_axes(x) > 0:
        return x
    return densify(x, "scan", _NO_BATCH_AXES)


def _stackable(y: Any) -> Any:
    if is_implicit(y) and y.with_leading_axis(1) is NotImplemented:
        return jax.ShapeDtypeStruct(y.shape, y.dtype)
    return y


def _first(x: Any) -> jax.ShapeDtypeStruct:
    split = compat.explicit_sharding(x)
    of_slice = split and NamedSharding(split.mesh, PartitionSpec(*split.spec[1:]))
    return compat.struct(np.shape(x)[1:], x.dtype, like=[x], sharding=of_slice)


def _fixed_point(
    step: Callable[[list[Any], Any], Retraced], carry: list[Any], name: str
) -> Retraced:
    """Retraces a loop body until what it returns as the carry has the structure it was given.

    The structures only ever lose implicit parts, so that this ends.
    """
    while True:
        new = step(carry, structure.Coerce(carry, name, meet=True))
        out = new.out[: len(carry)]
        if all(map(structure.same, out, carry)):
            return new
        carry = out


@_handles(jex.while_p)
def while_loop(operands: Operands, params: Params) -> list[Any]:
    """`jax.lax.while_loop`: implicit constants of both functions, carries to a fixed point."""
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:num_cond], operands[num_cond:][:num_body]
    init = operands[num_cond + num_body :]

    # `vmap` gives the condition batch axes: what is done then keeps its carry, leaf by leaf.
    batch = cond.out_avals[0].shape
    start = [structure.structure(x) for x in init]
    start = [
        dense_struct(x) if is_implicit(x) and num_batch_axes(x) < len(batch) else x for x in start
    ]
    new_body = _fixed_point(lambda c, t: _retrace(body, [*body_consts, *c], t), start, "while")
    carry = new_body.out
    dense_bool = structure.Coerce([jax.ShapeDtypeStruct(batch, np.bool_)], "while", _CONDITION)
    new_cond = _retrace(cond, [*cond_consts, *carry], dense_bool)
    events.replay(new_cond.events + new_body.events)

    cond_leaves = _leaves(cond.consts, cond_consts)
    body_leaves = _leaves(body.consts, body_consts)

    def goes_on(c: list[Any]) -> jax.Array:
        return new_cond.fun(*cond_leaves, *c)[0]

    def step(c: list[Any]) -> list[Any]:
        new = new_body.fun(*body_leaves, *c)
        return [_where(goes_on(c), x, y) for x, y in zip(new, c, strict=True)] if batch else new

    out = jax.lax.while_loop(
        lambda c: goes_on(c).any() if batch else goes_on(c),
        step,
        _coerced_leaves(init, carry, "while"),
    )
    return new_body.rebuild(out)


_CONDITION = "the condition of 'while' is a dense boolean"


def _where(mask: jax.Array, x: Any, y: Any) -> jax.Array:
    """`x` where the mask, over the first axes, is true, else `y`."""
    return jnp.where(jnp.expand_dims(mask, tuple(range(mask.ndim, np.ndim(x)))), x, y)


@_handles(jex.cond_p)
def cond(operands: Operands, params: Params) -> list[Any]:
    """`jax.lax.cond` and `switch`: results of the branches meet at their largest common structure."""
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
    # Bound directly, since `branches_platforms` (`jax.lax.platform_dependent`) has no other way in.
    fixed = [_with_consts(n, b.consts) for n, b in zip(new, branches, strict=True)]
    index = densify(index, "cond")
    out = jex.cond_p.bind(index, *leaves, branches=tuple(fixed), **rest)
    return new[0].rebuild(out)


def _with_consts(new: Retraced, consts: list[Any]) -> ClosedJaxpr:
    """The retraced branch as a function of the operands alone, its own constants closed over."""
    if not consts:
        return new.jaxpr
    args = new.jaxpr.in_avals[len(consts) :]
    return jax.make_jaxpr(lambda *xs: new.fun(*consts, *xs))(*args)


@_handles(jex.custom_jvp_call_p, jex.custom_vjp_call_p)
def custom_derivative(operands: Operands, params: Params) -> list[Any]:
    """A function with a derivative rule of its own (`jax.custom_jvp`, `jax.custom_vjp`).

    Its body is interpreted. Under differentiation its own rule must act, and that rule knows only
    dense arrays: the derivative of f(W + AB) by A is not that of f by A. So the operands are taken
    through `materialize` and its derivative, and the rule sees dense values and tangents. A result
    stays implicit if it can have any dense tangent (`structure.free_summand`), since nobody knows
    here whether it will be differentiated.
    """
    closed = params["call_jaxpr"]
    primitive = jex.custom_jvp_call_p if "jvp_jaxpr_fun" in params else jex.custom_vjp_call_p
    if not any(_differentiable(x) for x in operands):
        with events.recording() as log:
            out = interpret(closed.jaxpr, closed.consts, operands)
        events.replay(log)
        return out
    new = _retrace(closed, operands)
    places: list[Any] = list(map(_place_of_tangent, new.out))
    if None in places:
        target = [dense_struct(y) if i is None else y for y, i in zip(new.out, places, strict=True)]
        reason = f"the derivative rule of {primitive.name!r} knows dense arrays alone"
        new = _retrace(closed, operands, structure.Coerce(target, primitive.name, reason))
        places = [i or 0 for i in places]
    events.replay(new.events)

    @jax.custom_jvp
    def fun(operands: Operands) -> list[Any]:
        return new.fun(*_leaves(closed.consts, operands))

    def jvp(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[list[Any], list[Any]]:
        def original(operands: Operands) -> list[Any]:
            dense = [materialize_array(x) if is_implicit(x) else x for x in operands]
            return compat.bind(primitive, dense, params)

        dense, dots = _jvp_of_perturbed(original, primals[0], tangents[0])
        if not any(map(is_implicit, new.out)):
            return dense, dots
        out = new.rebuild(fun(primals[0]))
        for y, i in zip(out, places, strict=True):
            if i == _REFUSED:
                materialize_array(y)  # says so again, now that it matters
        dots = map(structure.tangent_leaves, out, dots, places)
        return jax.tree_util.tree_leaves(out), [dot for leaves in dots for dot in leaves]

    fun.defjvp(jvp, symbolic_zeros=True)
    return new.rebuild(fun(operands))


_REFUSED = -1


def _place_of_tangent(y: Any) -> int | None:
    """Which leaf of a result takes its tangent, if any can; `_REFUSED` where there is none to take.

    That is so for a type that refuses to be dense (quantities with units): undifferentiated, it has
    no need to be.
    """
    if not is_implicit(y):
        return 0
    try:
        return structure.free_summand(y)
    except Exception:  # whatever its `materialize` raises
        return _REFUSED


def _differentiable(x: Any) -> bool:
    leaves = [y for y in jax.tree_util.tree_leaves(x) if isinstance(y, jax.Array)]  # no literals
    return any(jax.dtypes.issubdtype(y.dtype, np.inexact) for y in leaves)


def _jvp_of_perturbed(fun: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`jax.jvp` with respect to the leaves that are perturbed at all: no zeros of weights' size."""
    leaves, treedef = flatten(primals)
    dots = treedef.flatten_up_to(tangents)
    still = jax.custom_derivatives.SymbolicZero
    moving = [
        i for i, t in enumerate(dots) if not isinstance(t, still) and t.dtype != jax.dtypes.float0
    ]

    def of_moving(*values: Any) -> Any:
        mixed = list(leaves)
        for i, value in zip(moving, values, strict=True):
            mixed[i] = value
        return fun(treedef.unflatten(mixed))

    return jax.jvp(of_moving, tuple(leaves[i] for i in moving), tuple(dots[i] for i in moving))


@_handles(jex.linear_solve_p)
def linear_solve(operands: Operands, params: Params) -> list[Any]:
    """`jax.lax.custom_linear_solve`: the functions' constants may be implicit, the vector is dense."""
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    rest = iter(operands)
    functions: list[Any] = []
    for n, closed in zip(lengths, jaxprs, strict=True):
        consts = [next(rest) for _ in range(n)]
        functions.append(None if closed is None else _linear(closed, consts))
    matvec, vecmat, solve, transpose_solve = functions
    b = [densify(x, "custom_linear_solve") for x in rest]
    n, has_aux = len(b), len(jaxprs[2].out_avals) > len(b)

    def split(out: list[Any]) -> Any:
        return (out[:n], out[n:]) if has_aux else out

    # `transpose_solve` is for the transposed system; a symmetric one says so by reusing `solve`.
    out = jax.lax.custom_linear_solve(
        lambda x: matvec(*x),
        b,
        lambda _, x: split(solve(*x)),
        None if transpose_solve is None else (lambda _, x: split(transpose_solve(*x))),
        symmetric=vecmat is not None and jaxprs[0] is jaxprs[1],
        has_aux=has_aux,
    )
    return [*out[0], *out[1]] if has_aux else out


def _linear(closed: ClosedJaxpr, consts: Operands) -> Callable[..., list[Any]]:
    def fun(*xs: Any) -> list[Any]:
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.out_avals]
        reason = "what 'custom_linear_solve' iterates on is dense"
        target = structure.Coerce(structs, "custom_linear_solve", reason)
        new = _retrace(closed, [*consts, *xs], target)
        events.replay(new.events)
        return new.fun(*_leaves(closed.consts, [*consts, *xs]))

    return fun


@_handles(compat.shard_map_p)
def shard_map(operands: Operands, params: Params) -> list[Any]:
    """`jax.shard_map`: an implicit operand is split as its type says (`partition_spec`)."""
    mesh, jaxpr = params["mesh"], params["jaxpr"]
    pairs = [_split(x, s, mesh) for x, s in zip(operands, params["in_specs"], strict=True)]
    leaves, treedef = flatten([x for x, _ in pairs])

    def body(*local: Any) -> list[Any]:
        out = interpret(jaxpr, (), treedef.unflatten(local))
        return [densify(y, "shard_map") for y in out]

    fun = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(s for _, specs in pairs for s in specs),
        out_specs=list(params["out_specs"]),
        axis_names=compat.manual_axes(params),
        check_vma=params["check_vma"],
    )
    return fun(*leaves)


def _split(x: Any, spec: Any, mesh: Any) -> tuple[Any, Any]:
    if not is_implicit(x):
        return x, [spec]
    specs = x.partition_spec(spec, mesh)
    if specs is NotImplemented:
        return densify(x, "shard_map"), [spec]
    is_spec = lambda s: isinstance(s, jax.sharding.PartitionSpec)  # noqa: E731
    return x, jax.tree_util.tree_leaves(specs, is_leaf=is_spec)
