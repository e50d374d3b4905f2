"""New functions in the bodies of equations: loops, branches and calls are rebuilt around them.

A piece is a pair of functions of arrays, as in Haiku: `init(rng, *arrays)` returns parameters and
state, `apply(params, state, rng, *arrays)` returns results and new state. The piece of an equation is
made from the pieces of the nodes in its bodies.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Key, Params, State, Tree
from haiku_implicit.mox.program.interface import by_path, by_variable, nested
from haiku_implicit.mox.program.program import Piece, Program, run
from haiku_implicit.mox.program.sites import Site, given_to, is_known
from haiku_implicit.mox.program.tree import Body, Equation, steps, variables, walk


@dataclasses.dataclass(frozen=True, eq=False)
class Changes:
    """Changes of an expression, also in the bodies of equations.

    Attributes:
      mox: the expression.
      sites: the sites of the replaced nodes and of the tapped values.
      pieces: the new pieces, by the `id` of the node that each replaces.
      taps: the values to tap, by the `id` of a body and by name.
    """

    mox: Program
    sites: Sequence[Site]
    pieces: Mapping[int, Piece]
    taps: Mapping[int, Mapping[str, Sequence[Any]]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def holders(self) -> frozenset[int]:
        """The `id`s of the equations around the sites."""
        return frozenset(id(equation) for site in self.sites for equation in site.region.around)

    @functools.cached_property
    def known(self) -> set[Var]:
        """The variables at the top of the program that come only from parameters."""
        return from_parameters(self.mox.body, set(by_variable(self.mox.interface.params)))

    def piece_of(self, top: Any) -> Piece:
        """The piece for a changed node at the top of the program."""
        return self.pieces.get(id(top)) or piece_of_equation(top, self, self.known)


def piece_of_equation(node: Any, changes: Changes, known: set[Var]) -> Piece:
    """The piece of an equation with changes in its bodies.

    Args:
      node: the equation.
      changes: the changes.
      known: the variables in reach of the equation that come only from parameters.

    Raises:
      ValueError: if nothing can be replaced in this kind of equation.
    """
    make = _MAKERS.get(node.primitive)
    if make is None:
        raise value_error(
            f"nothing can be replaced in the body of {node!r}"
            + _REASONS.get(node.primitive, f": there is no rule for {node.primitive.name}")
        )
    pieces = {
        body.name: _piece_of_body(body, changes, _known_arguments(node, body, known))
        for body in node.bodies
    }
    init, apply = make(node, pieces, known)
    return Piece(tuple(node.inputs), tuple(node.outputs), init, apply)


def _known_arguments(node: Equation, body: Body, known: Container[Any]) -> set[Var]:
    """The arguments of a body of an equation that are set to known variables."""
    return {v for v, x in given_to(node, body) if is_known(x, known)}


def from_parameters(body: Body, known: set[Var]) -> set[Var]:
    """The variables in a program that come only from parameters.

    Args:
      body: the program.
      known: its arguments that come only from parameters.
    """
    known = set(known)
    for step in steps(body.children):
        atoms = list(variables(step.inputs))
        known.update(step.outputs if atoms and known.issuperset(atoms) else ())
    return known


def _piece_of_body(body: Body, changes: Changes, known: set[Var]) -> Piece:
    """The piece of a program: runs its equations, and the pieces of nodes in it."""
    own = _pieces_in(body, changes, from_parameters(body, known))
    wanted = changes.taps.get(id(body), {})
    tapped = [atom for atoms in wanted.values() for atom in atoms]
    num_results = len(body.returns)
    body = dataclasses.replace(body, returns=(*body.returns, *tapped))

    def init(rng: Key | None, *arrays: Array) -> Tree:
        params: dict[Any, Any] = {}
        state: dict[Any, Any] = {}
        keys = _keys(own, rng)

        def run_piece(made: Piece, *arrays: Array) -> Tree:
            key = keys[id(made)]
            for entries, new in zip((params, state), made.init(key, *arrays), strict=True):
                entries |= {path: x for path, x in by_path(new).items() if path not in entries}
            return made.apply(nested(params), nested(state), key, *arrays)[0]

        run(body, body.consts, arrays, own, run_piece)
        return nested(params), nested(state)

    def apply(params: Params, state: State, rng: Key | None, *arrays: Array) -> Tree:
        taps: dict[str, Any] = {}
        keys = _keys(own, rng)

        def run_piece(made: Piece, *arrays: Array) -> Tree:
            nonlocal state
            out, new, tapped = made.apply(params, state, keys[id(made)], *arrays)
            state = nested(by_path(state) | by_path(new))
            taps.update(tapped)
            return out

        out = run(body, body.consts, arrays, own, run_piece)
        rest = iter(out[num_results:])
        taps |= {name: [next(rest) for _ in atoms] for name, atoms in wanted.items()}
        return out[:num_results], state, taps

    return Piece(body.invars, (), init, apply)


def _pieces_in(body: Body, changes: Changes, known: set[Var]) -> dict[int, Piece]:
    """The pieces of the changed nodes of a program, by the `id` of the node."""
    inside = list(walk(body, into_bodies=False))
    own = {id(x): changes.pieces[id(x)] for x in inside if id(x) in changes.pieces}
    holders = (x for x in inside if id(x) in changes.holders)
    return own | {id(x): piece_of_equation(x, changes, known) for x in holders}


def _keys(pieces: Mapping[int, Piece], rng: Key | None) -> dict[int, Any]:
    """The random keys of pieces, by the `id` of the piece."""
    if rng is None:
        return dict.fromkeys(map(id, pieces.values()))
    return {id(piece): jax.random.fold_in(rng, i) for i, piece in enumerate(pieces.values())}


# --- the equations ---------------------------------------------------------------------------------

# The pieces of an equation's bodies, by the name of the body.
Pieces = Mapping[str, Piece]
Functions = tuple[Callable[..., Any], Callable[..., Any]]


def _call(node: Equation, pieces: Pieces, known: set[Var]) -> Functions:
    """The functions of `jit` and other calls: they inline the equations of the body."""
    (piece,) = pieces.values()
    return piece.init, piece.apply


def _remat(node: Equation, pieces: Pieces, known: set[Var]) -> Functions:
    """The functions of `jax.checkpoint`."""
    init, apply = _call(node, pieces, known)
    params = node.eqn.params
    options = dict(policy=params["policy"], prevent_cse=params["prevent_cse"])
    return init, jax.checkpoint(apply, **options)


def _cond(node: Equation, pieces: Pieces, known: set[Var]) -> Functions:
    """The functions of `jax.lax.switch` and `cond`: each branch has the state of all branches."""
    if node.eqn.params.get("branches_platforms"):
        raise value_error(f"nothing can be replaced in {node!r}, whose branches are for platforms")
    branches = list(pieces.values())

    def init(rng: Key | None, index: Any, *arrays: Array) -> Tree:
        made = [branch.init(rng, *arrays) for branch in branches]
        params, state = (
            nested(dict(collections.ChainMap(*map(by_path, entries))))
            for entries in zip(*made, strict=True)
        )
        return params, state

    def apply(params: Params, state: State, rng: Key | None, index: Any, *arrays: Array) -> Tree:
        def no_taps(branch: Piece) -> Callable[..., Any]:
            return lambda *args: _without_taps(node, branch.apply(*args))

        functions = list(map(no_taps, branches))
        return *jax.lax.switch(index, functions, params, state, rng, *arrays), {}

    return init, apply


def _while(node: Any, pieces: Pieces, known: set[Var]) -> Functions:
    """The functions of `jax.lax.while_loop`: state and the random key are carried.

    Under a `vmap` of the condition, the loop continues while any element does, and the carry of the
    other elements does not change.
    """
    params = node.eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond, step = pieces["cond_jaxpr"], pieces["body_jaxpr"]
    ((flag,),) = (body.returns for body in node.bodies if body.name == "cond_jaxpr")

    def init(rng: Key | None, *arrays: Array) -> Tree:
        cond_consts, body_consts, carry = _cut(arrays, num_cond, num_body)
        first, second = cond.init(rng, *cond_consts, *carry), step.init(rng, *body_consts, *carry)
        if by_path(first[1]):
            raise value_error(
                f"{node!r}: a replacement in its condition has state, which can't change"
            )
        return nested(by_path(first[0]) | by_path(second[0])), second[1]

    def apply(params: Params, state: State, rng: Key | None, *arrays: Array) -> Tree:
        cond_consts, body_consts, carry = _cut(arrays, num_cond, num_body)

        def flags_of(carry: Array) -> Array:
            made = cond.apply(params, {}, rng, *cond_consts, *carry)
            return _without_taps(node, made)[0][0]

        def goes_on(carried: Array) -> Array:
            flags = flags_of(carried[0])
            return flags.any() if flags.ndim else flags

        def body(carried: Array) -> Tree:
            carry, state, key = carried
            key, own = (None, None) if key is None else jax.random.split(key)
            made = step.apply(params, state, own, *body_consts, *carry)
            new, state = _without_taps(node, made)
            if flag.aval.shape:
                flags = flags_of(carry)
                new = [_chosen(flags, x, y) for x, y in zip(new, carry, strict=True)]
            return new, state, key

        out, state, _ = jax.lax.while_loop(goes_on, body, (list(carry), state, rng))
        return out, state, {}

    return init, apply


def _chosen(flags: Any, x: Any, y: Any) -> Array:
    """Selects from `x` if the flags of the first axes are true, and from `y` if not."""
    flags = jax.lax.broadcast_in_dim(flags, x.shape, range(flags.ndim))
    return jax.lax.select(flags, x, y)


def _scan(node: Equation, pieces: Pieces, known: set[Var]) -> Functions:
    """The functions of `jax.lax.scan`: parameters and state per layer of a stack; other steps share."""
    params = node.eqn.params
    num_consts, num_carry = compat.scan_arity(params, list(node.inputs))
    (body,), (step,) = node.bodies, pieces.values()
    length = params["length"]
    own = _known_arguments(node, body, known)
    stacked = _is_stack(body, own, num_consts + num_carry, length)
    options = {name: params[name] for name in ("reverse", "unroll") if name in params}

    def keys(rng: Key | None) -> Array:
        return None if rng is None else jax.random.split(rng, length)

    def init(rng: Key | None, *arrays: Array) -> Tree:
        consts, carry, xs = _cut(arrays, num_consts, num_carry)
        if not stacked:
            return step.init(rng, *consts, *carry, *(x[0] for x in xs))
        return jax.vmap(lambda key, xs: step.init(key, *consts, *carry, *xs))(keys(rng), xs)

    def apply(params: Params, state: State, rng: Key | None, *arrays: Array) -> Tree:
        consts, carry, xs = _cut(arrays, num_consts, num_carry)
        per_layer = (params, state) if stacked else ({}, {})

        def one(carried: Array, slices: Array) -> Tree:
            (carry, shared), (xs, key, own) = carried, slices
            own = own if stacked else (params, shared)
            out, new, taps = step.apply(*own, key, *consts, *carry, *xs)
            rest = (out[num_carry:], new if stacked else {}, taps)
            return (out[:num_carry], {} if stacked else new), rest

        first = carry, {} if stacked else state
        slices = xs, keys(rng), per_layer
        (carry, shared), (ys, new, taps) = jax.lax.scan(one, first, slices, length, **options)
        return [*carry, *ys], (new if stacked else shared), taps

    return init, apply


def _cut(arrays: Sequence[Array], *sizes: int) -> list[list[Array]]:
    """Arrays in parts of these sizes, and the rest."""
    rest = iter(arrays)
    return [*(list(itertools.islice(rest, size)) for size in sizes), list(rest)]


def _is_stack(body: Body, params: set[Var], num_unscanned: int, length: int) -> bool:
    """Whether a scan runs over a stack of layers, that is, over slices of parameters.

    It either scans over parameters, or over numbers by which each step takes its slice of a parameter
    (AlphaFold's stacks).
    """
    scanned: Any = body.invars[num_unscanned:]
    numbers = {v for v in scanned if not v.aval.shape and jnp.issubdtype(v.aval.dtype, jnp.integer)}
    return not params.isdisjoint(scanned) or _takes_slices(body, params, numbers, length)


def _takes_slices(body: Body, params: set[Var], numbers: set[Var], length: int) -> bool:
    """Whether a program takes one of `length` slices of a parameter, by the number of the slice.

    Args:
      body: the program.
      params: the arguments that come from parameters.
      numbers: the arguments that may be this number.
      length: how many slices there are.
    """
    params, numbers = (from_parameters(body, x) for x in (params, numbers))
    for _, operands, node in steps(body.children):
        if node is None:
            continue
        if node.primitive is jex.dynamic_slice_p and is_known(operands[0], params):
            operand: Any = operands[0]
            sizes = zip(operand.aval.shape, node.eqn.params["slice_sizes"], strict=True)
            axes = zip(operands[1:], sizes, strict=True)
            if any(is_known(i, numbers) and size == (length, 1) for i, size in axes):
                return True
        for inner in node.bodies:
            own = [_known_arguments(node, inner, known) for known in (params, numbers)]
            if _takes_slices(inner, own[0], own[1], length):
                return True
    return False


def _without_taps(node: Equation, made: Any) -> Tree:
    out, state, taps = made
    if taps:
        loop = node.primitive is jex.while_p
        reason = "it runs an unknown number of times" if loop else "it may not run"
        raise value_error(
            f"no value can be tapped in the body of {node!r}: {reason}. Tap the {node.primitive.name} "
            f"itself ('//{node.primitive.name}') for what it returns; or look at values as they are "
            "computed, by mox.patch(where, function) with a jax.debug.callback in the function"
        )
    return out, state


_MAKERS: dict[Any, Callable[[Any, Pieces, set[Var]], Functions]] = {
    jex.jit_p: _call,
    jex.closed_call_p: _call,
    jex.call_p: _call,
    compat.custom_vmap_p: _call,
    compat.remat_p: _remat,
    jex.cond_p: _cond,
    jex.while_p: _while,
    jex.scan_p: _scan,
}

_OWN_DERIVATIVE = (
    ": the function has a derivative of its own, which would be that of the old body. Replace it as a "
    "whole"
)
_REASONS = {jex.custom_jvp_call_p: _OWN_DERIVATIVE, jex.custom_vjp_call_p: _OWN_DERIVATIVE}
