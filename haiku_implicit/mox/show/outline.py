"""The outline of a module expression: each module with its parameters and sizes; also as a text."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Aval
from haiku_implicit.mox.program.interface import Interface, Path, by_variable
from haiku_implicit.mox.program.sites import Region, known_among
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, Node, walk
from haiku_implicit.mox.show.flops import flops, label_of_loop, times
from haiku_implicit.mox.show.view import is_hidden


@dataclasses.dataclass(eq=False)
class Row:
    """The row of a module's call, or of a loop or branch with such calls in it.

    Attributes:
      node: the node.
      shapes: the shapes of its arguments and results.
      sizes: the sizes of the model's parameters.
      path: the full path of the module; for a loop or branch, of the module around it.
      times: how often it runs in loops, as far as known.
      rows: the rows in it.
      read: the parameters that are read in it.
      primitives: how many equations of each primitive are in it.
      flops: the floating-point operations of all its runs.
    """

    node: Any
    shapes: str
    sizes: "Sizes"
    path: str = ""
    times: int = 1
    rows: list["Row"] = dataclasses.field(default_factory=list)
    read: set[Path] = dataclasses.field(default_factory=set)
    primitives: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    flops: int = 0

    @property
    def label(self) -> str:
        """The last name of the path; for a loop, its primitive and the number of its steps."""
        if isinstance(self.node, Equation):
            return label_of_loop(self.node)
        return self.node.name or "function"

    @property
    def kind(self) -> str:
        """The class of the module, and the method unless it is `__call__`."""
        return self.node.kind if isinstance(self.node, ModuleCall) else ""

    @property
    def own_primitives(self) -> collections.Counter[str]:
        """How many equations of each primitive are in it, but not in its inner rows."""
        inner = (row.primitives for row in self.rows)
        return self.primitives - sum(inner, collections.Counter())

    @property
    def own_parameters(self) -> list[Path]:
        """The parameters that are read in it, but not in its inner rows."""
        return sorted(self.read.difference(*(row.read for row in self.rows)))

    @functools.cached_property
    def look(self) -> int:
        """A number that is equal for rows that differ only by the numbers in their names."""
        stem = re.sub(r"_?\d+", "", self.label)
        inner = tuple(row.look for row in self.rows)
        look = stem, self.kind, self.shapes, self.flops, len(self.read), inner
        return self.sizes.looks.setdefault(look, len(self.sizes.looks))


class Sizes:
    """The sizes of a model's parameters.

    Args:
      interface: the arguments and results of the model.

    Attributes:
      avals: the types of the arrays of each parameter.
      looks: a number for each look of the model's rows: nested tuples would be hashed again and again.
    """

    def __init__(self, interface: Interface):
        self.looks: dict[Any, int] = {}
        self.avals = {path: [v.aval for v in slot.atoms] for path, slot in interface.params.items()}

    def shape(self, path: Path) -> str:
        """The dtype and shape of a parameter: `f32[2,3]`."""
        return ", ".join(map(_shape, self.avals[path]))

    def count(self, paths: Any) -> int:
        """The number of elements of parameters."""
        return sum(math.prod(aval.shape) for path in paths for aval in self.avals[path])

    def nbytes(self, paths: Any) -> int:
        """The number of bytes of parameters, as dense arrays."""
        found = (aval for path in paths for aval in self.avals[path])
        return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in found)


def outline(body: Body, interface: Interface) -> Row:
    """The row of a whole model, with the rows of its modules in it.

    Args:
      body: the tree of the model.
      interface: its arguments and results.
    """
    row = Row(body, _shapes(interface.inputs, interface.results.atoms), Sizes(interface))
    _fill(row, body.children, Region(body, by_variable(interface.params)))
    return row


def _fill(row: Row, nodes: Sequence[Node], region: Region) -> None:
    """Puts nodes into a row."""
    for node in nodes:
        if isinstance(node, Equation):
            if node.marked is None:
                _add_equation(row, node, region)
            else:
                _add_bodies(row, node, region)
        elif is_hidden(node):
            _fill(row, node.children, region)
        else:
            inner = _row(node, row, getattr(node, "path", ""))
            _fill(inner, node.children, region)
            _add(row, inner)
            row.read.update(known_among(node.inputs, region.known))


def _add_equation(row: Row, node: Equation, region: Region) -> None:
    row.read.update(known_among(node.inputs, region.known))
    row.primitives.update(x.primitive.name for x in walk(node) if isinstance(x, Equation))
    row.flops += row.times * flops(node)


def _add_bodies(row: Row, node: Equation, region: Region) -> None:
    """Adds an equation with calls of modules in its bodies."""
    outer = _row(node, row)
    outer.times *= times(node)
    outer.primitives[node.primitive.name] += 1
    for body in node.bodies:
        inner = outer if len(node.bodies) == 1 else _row(body, outer)
        _fill(inner, body.children, region.inside(node, body))
        if inner is not outer:
            _add(outer, inner)
    if node.primitive.name == "cond" and len(node.bodies) > 1:
        outer.flops = max(inner.flops for inner in outer.rows)
    _add(row, outer)


def _add(row: Row, inner: Row) -> None:
    row.rows.append(inner)
    row.read |= inner.read
    row.primitives += inner.primitives
    row.flops += inner.flops


def _row(node: Node, around: Row, path: str = "") -> Row:
    shapes = _shapes(node.inputs, node.outputs)
    return Row(node, shapes, around.sizes, path or around.path, around.times)


def _shapes(inputs: Sequence[Atom], outputs: Sequence[Atom]) -> str:
    return f"{_in_short(inputs)} -> {_in_short(outputs)}"


def _in_short(atoms: Sequence[Atom]) -> str:
    shown = [_shape(atom.aval) for atom in atoms[:_NUM_SHAPES]]
    more = [f"… {len(atoms)}"] if len(atoms) > _NUM_SHAPES else []
    return ", ".join(shown + more) or "()"


_NUM_SHAPES = 4


@functools.lru_cache(maxsize=4096)
def _shape(aval: Aval) -> str:
    return str(aval.str_short(short_dtypes=True))


# --- repeated rows ---------------------------------------------------------------------------------


def runs(rows: Sequence[Row]) -> Iterator[list[Sequence[Row]]]:
    """Groups repeated rows.

    Yields:
      For a repeated pattern of rows, one list for each row of the pattern: all rows that look like it.
      For a row that is not repeated, one list of this row.
    """
    looks = [row.look for row in rows]
    i = 0
    while i < len(rows):
        period, number = _longest_run(looks, i)
        yield [rows[i + j : i + period * number : period] for j in range(period)]
        i += period * number


def _longest_run(looks: Sequence[Any], start: int) -> tuple[int, int]:
    """The length of the pattern that is repeated from `start` on, and how often it occurs."""
    best = (1, 1)
    for period in range(1, min(_MAX_PERIOD, (len(looks) - start) // 2) + 1):
        number = 1
        pattern = looks[start : start + period]
        while looks[start + number * period : start + (number + 1) * period] == pattern:
            number += 1
        if number > 1 and period * number > best[0] * best[1]:
            best = (period, number)
    return best


_MAX_PERIOD = 32


def name_of_run(rows: Sequence[Row]) -> str:
    """One name for rows that look the same: `block_{0..11}`."""
    names = [row.label for row in rows]
    if len(set(names)) == 1:
        return names[0]
    parts = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    if all(parts) and len({part[1] for part in parts if part}) == 1:
        numbers = [int(part[2]) for part in parts if part]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{parts[0][1]}{{{numbers[0]}..{numbers[-1]}}}"  # type: ignore[index]
    return f"{names[0]} … {names[-1]}"


# --- text ------------------------------------------------------------------------------------------


def text(root: Row, depth: int | None = None) -> str:
    """The text of an outline: a line for each call of a module, and totals.

    Args:
      root: the row of a whole model.
      depth: how many levels of modules to show; None for all.
    """
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise value_error(f"depth: expected a number of levels, 0 or more, or None, got {depth!r}")
    lines = [f"model: {root.shapes}", *_lines(root, depth)]
    if depth is not None and depth < height(root):
        lines.append(f"(to depth {depth} of {height(root)})")
    return "\n".join([*lines, totals(root)])


def short_text(root: Row) -> str:
    """The text of an outline, to the largest depth with at most 60 lines."""
    for depth in range(height(root), 1, -1):
        shown = text(root, depth)
        if shown.count("\n") < 60:
            return shown
    return text(root, 1)


def height(row: Row) -> int:
    """The number of levels in a row."""
    return max((1 + height(inner) for inner in row.rows), default=0)


def totals(root: Row) -> str:
    """The totals of a model: `1,234 parameters (4.94 kB), 25 equations, 12.3 kflop`."""
    sizes, paths = root.sizes, root.sizes.avals
    return (
        f"{sizes.count(paths):,} parameters ({with_unit(sizes.nbytes(paths), 'B')}), "
        f"{root.primitives.total():,} equations, {with_unit(root.flops, 'flop')}"
    )


def with_unit(number: float, unit: str) -> str:
    """A number with three digits and a unit: `12.3 kB`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":
            return f"{number:.3g} {prefix}{unit}" if number < 999.5 else f"{number:,.0f} P{unit}"
        number /= 1000
    raise AssertionError


def _lines(row: Row, depth: int | None, indent: str = "  ") -> Iterator[str]:
    if depth == 0:
        return
    below = None if depth is None else depth - 1
    for run in runs(row.rows):
        number, inner = len(run[0]), indent
        if len(run) > 1:
            yield f"{indent}repeated × {number}:"
            inner = f"{indent}  "
        for rows in run:
            times = f" × {number}" if number > 1 and len(run) == 1 else ""
            yield inner + _line(name_of_run(rows) + times, rows[0], number > 1)
            yield from _lines(rows[0], below, f"{inner}  ")


def _line(label: str, row: Row, each: bool) -> str:
    kind = f": {row.kind}" if row.kind else ":"
    count = row.sizes.count(row.read)
    suffix = f"  {count:,} parameters{' each' if each else ''}" if count else ""
    return f"{label}{kind}  {row.shapes}{suffix}"
