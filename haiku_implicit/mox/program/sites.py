"""Regions of a tree: the parameters in reach there, and the nodes to replace.

`Sources` are the parameters among variables, also in the bodies of loops and calls. A `Region` is a
body with its sources, and a `Site` a node with its region and the path that new modules get there.
"""

import collections
import dataclasses
import functools
import posixpath
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal, Var
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat
from haiku_implicit.core.messages import value_error
from haiku_implicit.mox.program import tree
from haiku_implicit.mox.program.interface import Path
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, Node

# The module and name of a parameter, by the variable that is this parameter (or one layer's slice).
Sources = dict[Any, Path]


def sources_in(nodes: Sequence[Node], known: Mapping[Any, Path]) -> Sources:
    """The parameters in reach of a program's nodes.

    An argument of a module's call does not count as a parameter within the call, unless it belongs to
    the module or to a module below it.

    Args:
      nodes: the nodes.
      known: the parameters among the program's arguments.
    """
    found = dict(known)
    _add_sources(nodes, found)
    return found


def _add_sources(nodes: Sequence[Node], found: Sources) -> None:
    for node in nodes:
        if isinstance(node, ModuleCall):
            found |= own_arguments(node, found)
            _add_sources(node.children, found)
            found |= handed(zip(node.outputs, node.returns, strict=True), found)


def own_arguments(node: ModuleCall, known: Sources) -> Sources:
    """The variables of a call's arguments that are parameters of the module itself."""
    own = handed(node.given, known)
    if node.cls is None:  # an inserted function is a part of the module around it
        return own
    return {v: path for v, path in own.items() if tree.is_below(path[0], node.path)}


def is_known(atom: Atom, known: Container[Any]) -> bool:
    """Whether an atom is one of some variables."""
    return not isinstance(atom, Literal) and atom in known


def known_among(atoms: Iterable[Atom], known: Mapping[Any, Any]) -> list[Any]:
    """The entries of those atoms that are known."""
    return [known[x] for x in atoms if is_known(x, known)]


def handed(pairs: Iterable[tuple[Var, Atom]], known: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of variables that are set to known atoms."""
    return {v: known[x] for v, x in pairs if is_known(x, known)}


def sources_of_body(node: Equation, body: Body, known: Mapping[Any, Path]) -> Sources:
    """The parameters in reach of the nodes in a body of an equation."""
    return sources_in(body.children, handed(given_to(node, body), known))


def given_to(node: Equation, body: Body) -> list[tuple[Var, Atom]]:
    """The arguments of a body of an equation, each with the operand that it is set to."""
    inputs = list(node.inputs)
    if node.primitive is jex.while_p:
        num_cond, num_body = node.eqn.params["cond_nconsts"], node.eqn.params["body_nconsts"]
        carry = inputs[num_cond + num_body :]
        consts = inputs[:num_cond] if body.name == "cond_jaxpr" else inputs[num_cond:][:num_body]
        inputs = [*consts, *carry]
    # The first operand of a condition is the index of the branch.
    return list(zip(body.invars, inputs[len(inputs) - len(body.invars) :], strict=True))


def arity_of(node: Equation, body: Body) -> tuple[int, int]:
    """How many constants an equation passes to one of its bodies, and how many carried values then."""
    if node.primitive is jex.scan_p:
        return compat.scan_arity(node.eqn.params, list(node.inputs))
    num_carry = len(node.outputs) if node.primitive is jex.while_p else 0
    return len(body.invars) - num_carry, num_carry


def read_by(node: Node, known: Sources) -> Iterator[Path]:
    """The parameters that a node reads, also in the bodies of its equations.

    Arguments of a module's call do not count, unless they are parameters of the module itself.
    """
    if not isinstance(node, ModuleCall):
        yield from _read_in([node], known)
        return
    atoms = (*(v for v, _ in node.given), *node.returns)
    yield from known_among(atoms, known)
    yield from _read_in(node.children, known)


def _read_in(nodes: Sequence[Node], known: Sources) -> Iterator[Path]:
    for x in (x for node in nodes for x in tree.walk(node, into_bodies=False)):
        if isinstance(x, Body):
            continue
        read = known_among(tree.reads(x), known)
        yield from read
        if isinstance(x, Equation) and read:
            for body in x.bodies:
                yield from _read_in(body.children, sources_of_body(x, body, known))


# --- regions and sites -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A body in a tree, with the parameters in reach there.

    Attributes:
      body: the body.
      params: the parameters among the arguments of the whole tree, by variable.
      around: the equations around the body, the outermost first.
      outer: the region of the innermost of these equations; None for the body of the whole tree.
    """

    body: Body
    params: Mapping[Any, Path]
    around: tuple[Equation, ...] = ()
    outer: "Region | None" = None

    @functools.cached_property
    def known(self) -> Sources:
        """The parameters in reach, by variable."""
        if self.outer is None:
            return sources_in(self.body.children, self.params)
        return sources_of_body(self.around[-1], self.body, self.outer.known)

    def inside(self, node: Equation, body: Body) -> "Region":
        """The region of a body of an equation."""
        return Region(body, self.params, (*self.around, node), self)

    @property
    def scope(self) -> str:
        """The prefix of the names in the body, such as the name of a stack of layers."""
        if self.outer is None:
            return ""
        inside = tree.walk(self.body, into_bodies=False)
        scopes = {x.call.scope for x in inside if isinstance(x, ModuleCall) and x.call}
        found = scopes - {None, ""}
        return posixpath.commonpath(map(str, found)) if found else self.outer.scope


class Site(NamedTuple):
    """A node to replace.

    Attributes:
      node: the node.
      path: the path of the modules and parameters of the new function.
      name: the path without the number of an equation, which depends on the other replaced equations.
      region: the region of the node.
    """

    node: Any
    path: str
    name: str
    region: Region

    @property
    def top(self) -> Any:
        """The node itself, or the outermost equation around it."""
        return self.region.around[0] if self.region.around else self.node


def sites_of(
    root: Body,
    nodes: Sequence[Node],
    path: str | Callable[[Node], str] | None = None,
    *,
    inner: bool = False,
    params: Mapping[Any, Path] | None = None,
) -> list[Site]:
    """The sites of nodes in a tree.

    All calls of a module have the same path. Each equation in a call has a path below its module's.

    Args:
      root: the tree.
      nodes: the nodes. If one is inside another, only the outermost has a site.
      path: the path of each site, or a function of the node that returns it.
      inner: whether nodes inside others have sites, too.
      params: the parameters among the arguments of the tree, by variable.

    Raises:
      ValueError: if a node is a body, or is not in the tree.
    """
    for node in nodes:
        if isinstance(node, Body):
            raise value_error(f"where: {node!r} is a body: choose calls of modules, or equations")
    wanted, start = frozenset(map(id, nodes)), _Around(Region(root, params or {}))
    for deep in (False, True):
        found = list(_search(root.children, wanted, start, deep))
        lost = wanted.difference(id(node) for node, _ in found)
        if not lost:
            break
    else:
        other = next(x for x in nodes if id(x) in lost)
        raise value_error(f"where: {other!r} is not a node of this expression, but of another one")
    counts: collections.Counter[Any] = collections.Counter()
    sites = []
    for node, around in found:
        if around.is_wanted and not inner:
            continue
        name, number = _name_at(node, around, path), ""
        if path is None and isinstance(node, Equation):
            count = counts[around.caller, name]
            counts[around.caller, name] += 1
            number = f"_{count}" if count else ""
        sites.append(Site(node, name + number, name, around.region))
    return sites


class _Around(NamedTuple):
    """The surroundings of nodes.

    Attributes:
      region: their region.
      module: the full path of the innermost module around them.
      caller: the `id` of the innermost call around them.
      is_wanted: whether one of the wanted nodes is around them.
    """

    region: Region
    module: str = ""
    caller: int = 0
    is_wanted: bool = False


def _search(
    nodes: Sequence[Any], wanted: frozenset[int], around: _Around, deep: bool
) -> Iterator[tuple[Any, _Around]]:
    """The wanted nodes with their surroundings; with `deep`, also in the bodies of equations."""
    for node in nodes:
        inside = around
        if id(node) in wanted:
            yield node, around
            inside = around._replace(is_wanted=True)
        if isinstance(node, ModuleCall):
            if deep or not node.inside.isdisjoint(wanted):
                inside = inside._replace(module=node.path or around.module, caller=id(node))
                yield from _search(node.children, wanted, inside, deep)
        elif deep:
            for body in node.bodies:
                below = inside._replace(region=around.region.inside(node, body))
                yield from _search(body.children, wanted, below, deep)


def _name_at(node: Node, around: _Around, path: Any) -> str:
    """The path of the modules that are made instead of a node."""
    if path is not None:
        return path if isinstance(path, str) else str(path(node))
    module = around.module
    if isinstance(node, ModuleCall):
        return node.path or module
    return "/".join(filter(None, [module or around.region.scope, _NO_NAME.sub("_", node.name)]))


# Characters that Haiku does not allow in the name of a module (`scatter-add`, `<lambda>`).
_NO_NAME = re.compile(r"\W|^(?=\d)")
