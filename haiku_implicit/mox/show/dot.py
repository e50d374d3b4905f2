"""A module expression as a graph, in Graphviz's DOT language."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Var

from haiku_implicit.core.messages import value_error
from haiku_implicit.mox.program import tree
from haiku_implicit.mox.program.interface import Interface, Slot, by_variable
from haiku_implicit.mox.program.sites import Region, given_to, known_among
from haiku_implicit.mox.program.tree import Atom, Body, Equation, Node
from haiku_implicit.mox.show.flops import label_of_loop
from haiku_implicit.mox.show.view import clean, is_hidden

# The names of the boxes that a variable's value comes from, by variable.
Origins = dict[Any, set[str]]


def dot(body: Body, interface: Interface, depth: int | None = None) -> str:
    """The graph of an expression: see `Mox.to_dot`."""
    if depth is not None and (not isinstance(depth, int) or depth < 1):
        raise value_error(f"depth: expected a number of levels, 1 or more, or None, got {depth!r}")
    return "\n".join(_Graph(depth).lines(body, interface)) + "\n"


class _Graph:
    """Makes the lines of a graph.

    Args:
      depth: how many levels of modules to draw; the last level is drawn as boxes.
    """

    def __init__(self, depth: int | None):
        self.depth = depth
        self.numbers = itertools.count()
        self.edges: dict[tuple[str, str], None] = {}

    def lines(self, body: Body, interface: Interface) -> Iterator[str]:
        """All lines of the graph."""
        yield "digraph model {"
        yield '  node [shape="box", fontname="sans-serif", fontsize="10"];'
        yield '  graph [fontname="sans-serif", fontsize="10"];'
        origins: Origins = {}
        for label, atom in [*_arrays(interface.args), *(("rng", v) for v in interface.rng.atoms)]:
            if body.uses[atom]:
                name = self._name()
                origins[atom] = {name}
                yield f'  {name} [label={_quoted(label)}, shape="ellipse"];'
        names = by_variable(interface.params) | by_variable(interface.state)
        yield from self._nodes(body.children, Region(body, names), origins, 1)
        name = self._name()
        yield f'  {name} [label="result", shape="ellipse"];'
        self._connect(interface.results.atoms, origins, name)
        yield from (f"  {start} -> {end};" for start, end in self.edges)
        yield "}"

    def _nodes(
        self, nodes: Sequence[Any], region: Region, origins: Origins, level: int
    ) -> Iterator[str]:
        """The lines of nodes. The boxes of their variables are added to `origins`."""
        for node in nodes:
            if isinstance(node, Equation):
                if node.marked is None:
                    yield self._box(node, _label(node, region), origins)
                elif level == self.depth:
                    yield self._box(node, label_of_loop(node), origins)
                else:
                    inner = self._bodies(node, region, origins, level + 1)
                    yield from self._cluster(label_of_loop(node), inner)
                continue
            if level == self.depth and not is_hidden(node):
                yield self._box(node, f"{node.name}\n{node.type_name}", origins)
                continue
            origins |= {v: _boxes(origins, x) for v, x in node.given}
            if is_hidden(node):
                yield from self._nodes(node.children, region, origins, level)
            else:
                inner = self._nodes(node.children, region, origins, level + 1)
                yield from self._cluster(f"{node.name}: {node.type_name or 'function'}", inner)
            pairs = zip(node.outputs, node.returns, strict=True)
            origins |= {v: _boxes(origins, x) for v, x in pairs}

    def _bodies(
        self, node: Equation, region: Region, origins: Origins, level: int
    ) -> Iterator[str]:
        """The lines of the bodies of an equation."""
        for body in node.bodies:
            inner = {v: _boxes(origins, x) for v, x in given_to(node, body)}
            lines = self._nodes(body.children, region.inside(node, body), inner, level)
            yield from lines if len(node.bodies) == 1 else self._cluster(body.name, lines)
            if body.name != "cond_jaxpr":
                for v, x in zip(node.outputs, body.returns, strict=False):
                    origins[v] = _boxes(origins, v) | _boxes(inner, x)

    def _box(self, node: Node, label: str, origins: Origins) -> str:
        """The line of a node that is drawn without its contents."""
        name = self._name()
        own = tree.defined_in(node)
        inside = tree.walk(node, into_bodies=False)
        read = (v for x in inside for v in tree.variables(tree.reads(x)))
        self._connect([v for v in read if v not in own], origins, name)
        origins |= {v: {name} for v in own}
        return f"  {name} [label={_quoted(label)}];"

    def _cluster(self, label: str, lines: Iterable[str]) -> Iterator[str]:
        yield f"  subgraph cluster_{self._name()} {{"
        yield f"    label={_quoted(label)};"
        yield from (f"  {line}" for line in lines)
        yield "  }"

    def _connect(self, atoms: Iterable[Atom], origins: Origins, name: str) -> None:
        for atom in atoms:
            self.edges |= {(start, name): None for start in sorted(_boxes(origins, atom))}

    def _name(self) -> str:
        return f"n{next(self.numbers)}"


def _boxes(origins: Origins, atom: Atom) -> set[str]:
    """The boxes that a value comes from; empty for a number or a parameter."""
    return origins.get(atom, set()) if isinstance(atom, Var) else set()


def _arrays(slot: Slot) -> Iterator[tuple[str, Any]]:
    """The arrays among arguments, with their names."""
    named, _ = jax.tree_util.tree_flatten_with_path(slot.filled)
    for path, x in named:
        if isinstance(x, Var):
            yield jax.tree_util.keystr(path, simple=True, separator="."), x


def _label(node: Equation, region: Region) -> str:
    """The primitive, and the names of the parameters that an equation reads."""
    read = (name for _, name in known_among(node.inputs, region.known))
    return "\n".join([node.label, *dict.fromkeys(read)])


def _quoted(text: str) -> str:
    text = clean(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
