"""Runs a tree of equations."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Literal, Var

from haiku_implicit.core.bind import bind
from haiku_implicit.core.typing import Array
from haiku_implicit.mox.program import marks
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, hidden, needed


@dataclasses.dataclass(frozen=True)
class Piece:
    """A pair of functions that replaces a node.

    Attributes:
      inputs: the arguments.
      outputs: the variables of the results.
      init: maps a random key and arrays to parameters and state.
      apply: maps parameters, state, a random key and arrays to results, new state, and tapped values by
        name.
      replaces: whether the node itself does not run any more.
    """

    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    init: Callable[..., Any]
    apply: Callable[..., Any]
    replaces: bool = True


def run(
    body: Body,
    consts: Sequence[Any],
    args: Sequence[Any],
    pieces: Mapping[int, Piece] | None = None,
    run_piece: Callable[..., Sequence[Any]] | None = None,
) -> list[Any]:
    """Binds the equations of a program, in their order, to these values.

    Under `marks.marking` the calls in it are marked again.

    Args:
      body: the program.
      consts: values of its `constvars`.
      args: values of its `invars`.
      pieces: the pieces that run instead of nodes, by the `id` of the node.
      run_piece: runs a piece on its arrays.

    Returns:
      The results of the program.
    """
    variables: Any = (*body.constvars, *body.invars)
    env: dict[Any, Any] = dict(zip(variables, (*consts, *args), strict=True))
    outer, last_uses, marked = source_info_util.current_name_stack(), body.last_uses, marks.active()
    pieces = pieces or {}

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    def visit(nodes: Sequence[Any]) -> None:
        for node in nodes:
            if id(node) in pieces:
                substitute(node, pieces[id(node)])
            elif isinstance(node, Equation):
                results = run_equation(node, list(map(read, node.inputs)), outer)
                env.update(zip(node.outputs, results, strict=True))
            else:
                call(node)
            for var in last_uses.get(id(node), ()):
                env.pop(var, None)

    def call(node: ModuleCall) -> None:
        values = list(map(read, node.inputs))
        if marked and node.call:
            token, values = marks.begin(node.call, values, node.seen)
        env.update(zip((var for var, _ in node.given), values, strict=True))
        visit(node.children)
        results = list(map(read, node.returns))
        if marked and node.call:
            results = marks.end(token, node.call, results, node.seen_results)
        env.update(zip(node.outputs, results, strict=True))

    def substitute(node: ModuleCall, new: Piece) -> None:
        assert run_piece is not None
        results = run_piece(new, *map(read, new.inputs))
        others = needed(node.children, hidden(body, node).difference(new.outputs))
        if others:
            env.update((var, read(atom)) for var, atom in node.given)
            visit(others)
        env.update(zip(new.outputs, results, strict=True))

    visit(body.children)
    return list(map(read, body.returns))


def run_equation(node: Equation, operands: Sequence[Array], outer: Any = None) -> list[Any]:
    """Binds the primitive of an equation, with the name stack and the settings it was traced with.

    Args:
      node: the equation.
      operands: its operands.
      outer: the name stack around it; by default the current one.
    """
    eqn = node.eqn
    info = eqn.source_info
    stack = (source_info_util.current_name_stack() if outer is None else outer) + info.name_stack
    params = dict(node.params_to_bind(marks.active()))
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        return bind(eqn.primitive, list(operands), params)
