"""The paths of modules in a tree: full paths, as in the parameters, and new paths.

In a function that is transformed by itself, as in `hk.lift` and stacks of layers, Haiku's names start
again from the top. The full path of a module is the path of the parameters that it reads.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from haiku_implicit.core.typing import Array
from haiku_implicit.mox.program import sites
from haiku_implicit.mox.program.interface import Path
from haiku_implicit.mox.program.marks import Call, mark_p
from haiku_implicit.mox.program.sites import Sources
from haiku_implicit.mox.program.tree import Body, Equation, ModuleCall, Node, with_jaxprs


def with_full_paths(body: Body, params: Mapping[Any, Path]) -> Body:
    """Gives the modules of a program their full paths.

    A full path follows from the parameters and state that the module reads, or a module in it, or else
    from the path of its caller.

    Args:
      body: the program.
      params: the parameters and the state, by variable.
    """
    children = _Full().nodes(body.children, sites.sources_in(body.children, params), "")
    return dataclasses.replace(body, children=children)


class _Full:
    """Finds the full paths of calls."""

    def __init__(self) -> None:
        self.with_path = _renamer()

    def nodes(self, nodes: Sequence[Any], known: Sources, prefix: str) -> tuple[Any, ...]:
        """Nodes with full paths.

        Args:
          nodes: the nodes.
          known: the parameters in reach.
          prefix: the prefix of the paths around them.
        """
        return tuple(
            (self._equation if isinstance(node, Equation) else self._call)(node, known, prefix)
            for node in nodes
        )

    def _call(self, node: ModuleCall, known: Sources, prefix: str) -> ModuleCall:
        call = node.call
        if call is not None:
            told = _told_by(node, known, prefix) if call.scope is None else ""
            prefix = prefix if told is None else told
            if prefix:
                call = self.with_path(call, f"{prefix}/{call.path}", prefix)
        new = node if call is node.call else dataclasses.replace(node, call=call)
        given = sites.own_arguments(new, known)
        if not known.keys() >= given.keys():
            known = sites.sources_in(node.children, {**known, **given})
        children = self.nodes(node.children, known, prefix)
        same = all(map(operator.is_, children, node.children))
        return new if same else dataclasses.replace(new, children=children)

    def _equation(self, node: Equation, known: Sources, prefix: str) -> Equation:
        if node.marked is None:
            return node
        changes: Changes = {}
        for body in node.bodies:
            inner = sites.sources_of_body(node, body, known)
            told = {_told_by(*part, prefix) for part in _parts(body.children, inner)} - {None}
            own = told.pop() if len(told) == 1 else prefix
            changes |= _changes(body.children, self.nodes(body.children, inner, own or ""))
        return with_changes(node, changes) if changes else node


def _told_by(node: Node, known: Sources, around: str) -> str | None:
    """The prefix of a call's path, if the parameters that it reads tell it; else None.

    The parameters that the module itself reads come first: they have its path.
    """
    if not isinstance(node, ModuleCall) or not node.path:
        return None
    parts = list(_parts(node.children, known))
    equations = [(x, inner) for x, inner in parts if isinstance(x, Equation)]
    reads = [path for x, inner in equations for path in sites.known_among(x.inputs, inner)]
    direct = list(_prefixes(reads, node.path))
    if direct:
        return around if around in direct else direct[0]
    for x, inner in parts:
        if isinstance(x, ModuleCall) and x.path.startswith(f"{node.path}/"):
            told = _told_by(x, inner, around)
            if told is not None:
                return told
    returned = sites.known_among(node.returns, known)
    own = f"{around}/{node.path}/".lstrip("/")
    if any(f"{module}/".startswith(own) for module, _ in returned):
        return around
    return next(_prefixes(returned, node.path), None)


def _parts(nodes: Sequence[Node], known: Sources) -> Iterator[tuple[Any, Sources]]:
    """The calls and equations among nodes, and in nodes that only hold others."""
    for node in nodes:
        if isinstance(node, ModuleCall) and node.call is None:
            yield from _parts(node.children, known)
        elif isinstance(node, Equation) and node.marked is not None:
            for body in node.bodies:
                yield from _parts(body.children, sites.sources_of_body(node, body, known))
        else:
            yield node, known


def _prefixes(read: Iterable[Path], path: str) -> Iterator[str]:
    """The prefixes of a path in the paths of parameters."""
    for module, _ in read:
        if f"/{module}".endswith(f"/{path}"):
            yield module[: -len(path)].rstrip("/")


# --- other paths ------------------------------------------------------------------------------------


def with_new_paths(nodes: Sequence[Any], new_path: Callable[[str], str]) -> tuple[Any, ...]:
    """Nodes with new paths. `new_path` maps the old paths to them."""
    with_path = _renamer()

    def of_node(node: Any) -> Any:
        if isinstance(node, ModuleCall):
            call = node.call
            if call is not None:
                scope = call.scope and new_path(call.scope)
                call = with_path(call, new_path(call.path), scope)
            return dataclasses.replace(node, call=call, children=tuple(map(of_node, node.children)))
        if node.marked is None:
            return node
        changes: Changes = {}
        for body in node.bodies:
            changes |= _changes(body.children, tuple(map(of_node, body.children)))
        return with_changes(node, changes)

    return tuple(map(of_node, nodes))


def _renamer() -> Callable[[Call, str, str | None], Call]:
    """A function that gives a call a path and a scope.

    The call with these has one object, by which its end mark is found.
    """

    @functools.cache
    def with_path(call: Call, path: str, scope: str | None) -> Call:
        if (path, scope) == (call.path, call.scope):
            return call
        return dataclasses.replace(call, path=path, scope=scope)

    return with_path


# --- changes ----------------------------------------------------------------------------------------

# New calls, by the old call. New parameters of equations, by the `id` of the old ones.
Changes = dict[Any, Any]


def _changes(old: Sequence[Any], new: Sequence[Array]) -> Changes:
    """The changes between nodes and the same nodes with other calls."""
    found: Changes = {}
    for x, y in zip(old, new, strict=True):
        if x is y:
            continue
        if isinstance(x, Equation):
            found[id(x.marked)] = y.marked
        else:
            found |= {x.call: y.call} if x.call is not y.call else {}
            found |= _changes(x.children, y.children)
    return found


def with_changes(node: Equation, changes: Changes) -> Equation:
    """An equation with other calls in its bodies."""

    def of_jaxpr(jaxpr: Any) -> Any:
        # From JAX 0.12 on, closed and open jaxprs are one class, whose `jaxpr` is the object itself.
        if isinstance(jaxpr, ClosedJaxpr) and jaxpr.jaxpr is not jaxpr:
            return jaxpr.replace(jaxpr=of_jaxpr(jaxpr.jaxpr))
        return jaxpr.replace(eqns=[eqn.replace(params=of_params(eqn)) for eqn in jaxpr.eqns])

    def of_params(eqn: JaxprEqn) -> Any:
        if eqn.primitive is mark_p:
            call = eqn.params["call"]
            return {**eqn.params, "call": changes.get(call, call)}
        return changes.get(id(eqn.params), eqn.params)

    marked = {name: with_jaxprs(x, of_jaxpr) for name, x in (node.marked or {}).items()}
    return dataclasses.replace(node, marked=marked)
