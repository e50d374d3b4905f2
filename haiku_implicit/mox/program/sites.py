"""Sites: nodes of a tree with their places, and the paths that new modules get there."""

import collections
import dataclasses
import functools
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from haiku_implicit.mox.program.interface import Path
from haiku_implicit.mox.program.sources import Sources, sources_in, sources_of_body
from haiku_implicit.mox.program.tree import Body, Equation, ModuleCall, Node, walk


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A place in a tree, and the parameters in reach there.

    Attributes:
      body: the body.
      params: the parameters among the arguments of the whole tree, by variable.
      around: the equations around the body, the outermost first.
      outer: the place of the innermost of these equations; None for the body of the whole tree.
    """

    body: Body
    params: Mapping[Any, Path]
    around: tuple[Equation, ...] = ()
    outer: "Place | None" = None

    @functools.cached_property
    def known(self) -> Sources:
        """The parameters in reach, by variable."""
        if self.outer is None:
            return sources_in(self.body.children, self.params)
        return sources_of_body(self.around[-1], self.body, self.outer.known)

    def inside(self, node: Equation, body: Body) -> "Place":
        """The place of a body of an equation."""
        return Place(body, self.params, (*self.around, node), self)

    @property
    def scope(self) -> str:
        """The prefix of the names in the body, such as the name of a stack of layers."""
        if self.outer is None:
            return ""
        inside = walk(self.body, into_bodies=False)
        scopes = {x.call.scope for x in inside if isinstance(x, ModuleCall) and x.call}
        found = scopes - {None, ""}
        return posixpath.commonpath(map(str, found)) if found else self.outer.scope


class Site(NamedTuple):
    """A node to replace.

    Attributes:
      node: the node.
      path: the path of the modules and parameters of the new function.
      name: the path without the number of an equation, which depends on the other replaced equations.
      place: the place of the node.
    """

    node: Any
    path: str
    name: str
    place: Place

    @property
    def top(self) -> Any:
        """The node itself, or the outermost equation around it."""
        return self.place.around[0] if self.place.around else self.node


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
            raise ValueError(f"where: {node!r} is a body: choose calls of modules, or equations")
    wanted, start = frozenset(map(id, nodes)), _Around(Place(root, params or {}))
    for deep in (False, True):
        found = list(_search(root.children, wanted, start, deep))
        lost = wanted.difference(id(node) for node, _ in found)
        if not lost:
            break
    else:
        other = next(x for x in nodes if id(x) in lost)
        raise ValueError(f"where: {other!r} is not a node of this expression, but of another one")
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
        sites.append(Site(node, name + number, name, around.place))
    return sites


class _Around(NamedTuple):
    """The surroundings of nodes.

    Attributes:
      place: their place.
      module: the full path of the innermost module around them.
      caller: the `id` of the innermost call around them.
      is_wanted: whether one of the wanted nodes is around them.
    """

    place: Place
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
                below = inside._replace(place=around.place.inside(node, body))
                yield from _search(body.children, wanted, below, deep)


def _name_at(node: Node, around: _Around, path: Any) -> str:
    """The path of the modules that are made instead of a node."""
    if path is not None:
        return path if isinstance(path, str) else str(path(node))
    module = around.module
    if isinstance(node, ModuleCall):
        return node.path or module
    return "/".join(filter(None, [module or around.place.scope, _NO_NAME.sub("_", node.name)]))


# Characters that Haiku does not allow in the name of a module (`scatter-add`, `<lambda>`).
_NO_NAME = re.compile(r"\W|^(?=\d)")
