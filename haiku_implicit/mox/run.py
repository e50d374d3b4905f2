"""Running a tree of equations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Literal

from haiku_implicit.core.bind import bind
from haiku_implicit.mox import marks
from haiku_implicit.mox.tree import Atom, Body, Equation, ModuleCall, hidden, needed

# Of input arrays, the list of results.
Replacements = Mapping[int, Callable[..., Sequence[Any]]]


def run(
    body: Body, consts: Sequence[Any], args: Sequence[Any], replaced: Replacements | None = None
) -> list[Any]:
    """Binds the equations of a program, in their order, to these values.

    Under `marks.marking` the calls in it are marked again.

    Args:
      body: the program.
      consts: values of its `constvars`.
      args: values of its `invars`.
      replaced: by the `id` of a node, the function that is called in its place.

    Returns:
      Its results.
    """
    env = dict(zip((*body.constvars, *body.invars), (*consts, *args), strict=True))
    outer, last_uses, marked = source_info_util.current_name_stack(), body.last_uses, marks.active()
    replaced = replaced or {}

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    def visit(nodes: Sequence[Any]) -> None:
        for node in nodes:
            if id(node) in replaced:
                results = replaced[id(node)](*map(read, node.inputs))
                visit(needed(node.children, hidden(body, node)))
                env.update(zip(node.outputs, results, strict=True))
            else:
                visit_one(node)
            for var in last_uses.get(id(node), ()):
                env.pop(var, None)

    def visit_one(node: Any) -> None:
        if isinstance(node, Equation):
            env.update(zip(node.outputs, bind_one(node, list(map(read, node.inputs))), strict=True))
        else:
            call(node)

    def call(node: ModuleCall) -> None:
        env.update((var, read(atom)) for var, atom in node.given)
        if marked and node.call:
            token = marks.begin(node.call, list(map(read, node.inputs)))
        visit(node.children)
        results = list(map(read, node.returns))
        if marked and node.call:
            results = marks.end(token, node.call, results)
        env.update(zip(node.outputs, results, strict=True))

    def bind_one(node: Equation, operands: list[Any]) -> list[Any]:
        eqn = node.eqn
        info = eqn.source_info
        stack = outer + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
            return bind(eqn.primitive, operands, dict(node.params_to_bind(marked)))

    visit(body.children)
    return list(map(read, body.returns))
