"""A module expression as an HTML page: a tree that folds, with a search box and colors."""

import base64
import difflib
import hashlib
import html
import math
import pathlib
import string
from collections.abc import Iterator, Mapping
from typing import Any

from haiku_implicit.core.messages import value_error
from haiku_implicit.mox.program.interface import Path
from haiku_implicit.mox.show.outline import Row, totals, with_unit
from haiku_implicit.mox.show.view import clean

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")


class Colors:
    """The numbers that a page shows in color.

    Args:
      values: numbers by the path of a module or a parameter; None for the bytes of parameters.
      root: the row of the model.

    Raises:
      ValueError: if a path is not in the model, or a value is not a number.
    """

    def __init__(self, values: Mapping[str, Any] | None, root: Row):
        sizes = root.sizes
        self.given = None if values is None else {k: _number(k, x) for k, x in values.items()}
        known = {*(row.path for row in _all(root) if row.kind), *map("/".join, sizes.avals)}
        for path in self.given or ():
            if path not in known:
                close = difflib.get_close_matches(path, known) or sorted(known)[:5]
                raise value_error(
                    f"values: the model has no module and no parameter {path!r}. There are "
                    f"{', '.join(close)}"
                )
        found = [x for x in (self.given or {}).values() if math.isfinite(x)]
        if self.given is None:
            found = [*(sizes.nbytes([path]) for path in sizes.avals), sizes.nbytes(sizes.avals)]
        self.low, self.high = min(found, default=0.0), max(found, default=0.0)

    def of_parameter(self, path: Path) -> float | None:
        """The given number of a parameter."""
        return (self.given or {}).get("/".join(path))

    def of_row(self, row: Row) -> float | None:
        """The given number of a module, or else the largest number in it."""
        if self.given is None:
            return None
        if row.path in self.given and row.kind:
            return self.given[row.path]
        inner = [*map(self.of_row, row.rows), *map(self.of_parameter, row.own_parameters)]
        return max((x for x in inner if x is not None and not math.isnan(x)), default=None)

    def text(self, value: float) -> str:
        """A number as the page shows it."""
        return with_unit(value, "B") if self.given is None else f"{value:.4g}"

    def cells(self, value: float | None, nbytes: int) -> str:
        """The cells of a row: the number, with a bar in its color, and the bytes."""
        if self.given is None:
            value = nbytes or None
        bar = "" if value is None else f' style="--v:{self._share(value):.3f}"'
        text = "" if value is None else html.escape(self.text(value))
        of_bytes = f"<b>{with_unit(nbytes, 'B') if nbytes else ''}</b>"
        return f'<b class="v"{bar}>{text}</b>{"" if self.given is None else of_bytes}'

    def _share(self, value: float) -> float:
        """The position of a number between the lowest and the highest; logarithmic for bytes."""
        if math.isnan(value) or self.high == self.low:
            return 0.0 if math.isnan(value) else 1.0
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.given is None:
            low, high, value = (math.log(max(x, 1.0)) for x in (low, high, value))
        return (value - low) / (high - low) if high > low else 1.0


def _number(path: str, x: Any) -> float:
    try:
        return float(x)
    except (TypeError, ValueError):
        raise value_error(f"values: expected a number for {path!r}, got {x!r}") from None


def page(root: Row, values: Mapping[str, Any] | None = None) -> str:
    """The page of an expression: see `Mox.to_html`."""
    colors, template = Colors(values, root), _TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    what = "bytes of parameters (logarithmic)" if values is None else "values"
    return string.Template(template).substitute(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'",
        legend=f"{what} {colors.text(colors.low)} <i></i> {colors.text(colors.high)}",
        shapes=_escape(root.shapes),
        totals=_escape(totals(root)),
        values="" if values is None else "<b>values</b>",
        rows="\n".join(_inside(root, colors, _num_open(root))),
    )


def frame(page: str) -> str:
    """Embeds a page in another one, such as a notebook, with its own styles and scripts."""
    source = html.escape(page, quote=True)
    return (
        f'<iframe srcdoc="{source}" sandbox="allow-scripts" '
        'style="width:100%;height:32em;border:1px solid #8888"></iframe>'
    )


def _all(row: Row) -> Iterator[Row]:
    yield row
    for inner in row.rows:
        yield from _all(inner)


def _escape(text: str) -> str:
    return html.escape(clean(text), quote=True)


def _num_open(root: Row) -> int:
    """How many levels are unfolded at first: as many as fit on a screen or two."""
    level, shown, opened = root.rows, len(root.rows), 0
    while level and shown <= _MAX_SHOWN:
        level, opened = [inner for row in level for inner in row.rows], opened + 1
        shown += len(level)
    return opened


_MAX_SHOWN = 40


def _module(row: Row, colors: Colors, num_open: int) -> Iterator[str]:
    """The HTML of a row and its contents."""
    found = " ".join([row.label, row.kind, *row.own_primitives]).lower()
    sizes = row.sizes
    count = f"{sizes.count(row.read):,}" if row.read else ""
    yield (
        f'<details class="r" data-t="{_escape(found)}" data-p="{_escape(row.path.lower())}"'
        f"{' open' if num_open > 0 and row.rows else ''}>"
        f'<summary title="{_escape(row.path)}"><span><em>{_escape(row.label)}</em> '
        f"<u>{_escape(row.kind)}</u> <s>{_escape(row.shapes)}</s></span>"
        f"{colors.cells(colors.of_row(row), sizes.nbytes(row.read))}"
        f"<b>{with_unit(row.flops, '')}</b><b>{count}</b></summary>"
    )
    yield from _inside(row, colors, num_open)
    yield "</details>"


def _inside(row: Row, colors: Colors, num_open: int) -> Iterator[str]:
    sizes = row.sizes
    own = (f"{name} × {n}" if n > 1 else name for name, n in row.own_primitives.most_common())
    if about := " · ".join(x for x in (row.path, ", ".join(own)) if x):
        yield f'<div class="e">{_escape(about)}</div>'
    for path in row.own_parameters:
        full, name = "/".join(path), path[1] if path[0] == row.path else "/".join(path)
        yield (
            f'<div class="r p" data-t="{_escape(name.lower())}" data-p="{_escape(full.lower())}" '
            f'title="{_escape(full)}"><span><em>{_escape(name)}</em> '
            f"<s>{_escape(sizes.shape(path))}</s></span>"
            f"{colors.cells(colors.of_parameter(path), sizes.nbytes([path]))}"
            f"<b></b><b>{sizes.count([path]):,}</b></div>"
        )
    for inner in row.rows:
        yield from _module(inner, colors, num_open - 1)
