"""A module expression as an HTML page: a tree that folds, with a search box and colors."""

import base64
import difflib
import hashlib
import html
import math
from collections.abc import Iterator, Mapping
from typing import Any

from haiku_implicit.mox.program.interface import Path
from haiku_implicit.mox.show.outline import Row, totals, with_unit
from haiku_implicit.mox.show.view import clean


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
                raise ValueError(
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
        raise ValueError(f"values: expected a number for {path!r}, got {x!r}") from None


def page(root: Row, values: Mapping[str, Any] | None = None) -> str:
    """The page of an expression: see `Mox.to_html`."""
    colors = Colors(values, root)
    hashed = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"
    what = "bytes of parameters (logarithmic)" if values is None else "values"
    legend = f"{what} {colors.text(colors.low)} <i></i> {colors.text(colors.high)}"
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>Module expression</title><style>{_STYLE}</style></head><body>",
            '<header><input id="q" type="search" placeholder="Search: name, class, primitive, a/path"',
            ' autocomplete="off"><span id="n"></span><button id="open">Unfold all</button>',
            f'<button id="close">Fold all</button><span class="l">{legend}</span></header>',
            f"<p>{_escape(root.shapes)}<br>{_escape(totals(root))}</p><main>",
            f'<div class="h">{"" if values is None else "<b>values</b>"}<b>bytes</b><b>flops</b>',
            "<b>parameters</b></div>",
            *_inside(root, colors, _num_open(root)),
            f"</main><script>{_SCRIPT}</script></body></html>\n",
        ]
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


_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d0d7de;--hit:#fff1b8;
--low:#d6e6f5;--high:#f39a6b;--kind:#0550ae}
@media(prefers-color-scheme:dark){:root{--bg:#15191e;--fg:#e6edf3;--soft:#9aa5b1;--line:#343c45;
--hit:#5c4a00;--low:#1f3a57;--high:#a8430f;--kind:#7cb7ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:14px/1.5 system-ui,sans-serif}
header{position:sticky;top:0;z-index:1;display:flex;flex-wrap:wrap;gap:.6em;align-items:center;
padding:.6em 1em;background:var(--bg);border-bottom:1px solid var(--line)}
header input{flex:0 1 24em;min-width:10em}
input,button{font:inherit;color:inherit;background:transparent;border:1px solid var(--line);
border-radius:5px;padding:.2em .6em}
button:hover{background:var(--line)}
#n{color:var(--soft);min-width:5.5em}
.l{margin-left:auto;color:var(--soft)}
.l i{display:inline-block;width:7em;height:.7em;border-radius:3px;
background:linear-gradient(90deg,var(--low),var(--high))}
p{margin:.8em 1em;color:var(--soft)}
main{padding:0 1em 2em}
details details,details .r,details .e{margin-left:1.3em}
summary,.p,.h{display:flex;gap:1em;border-bottom:1px solid var(--line);padding:.1em .2em}
summary{cursor:pointer;list-style:none}
summary::-webkit-details-marker{display:none}
summary::before{content:"▸";width:.9em;color:var(--soft)}
[open]>summary::before{content:"▾"}
.p::before{content:"";width:.9em}
summary:hover,.p:hover{background:color-mix(in srgb,var(--line) 40%,transparent)}
summary>span,.p>span{flex:1;min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
em{font-style:normal;font-weight:600}
.p em{font-weight:400}
u{text-decoration:none;color:var(--kind)}
s,.e{text-decoration:none;color:var(--soft);font-family:ui-monospace,monospace;font-size:12px}
.e{padding:.1em 1.9em}
b{flex:0 0 6.5em;font-weight:400;text-align:right;font-variant-numeric:tabular-nums}
.h{justify-content:flex-end;color:var(--soft)}
.v{--c:color-mix(in oklab,var(--high) calc(var(--v)*100%),var(--low))}
.v[style]{background:linear-gradient(var(--c),var(--c)) left/calc(4% + var(--v)*96%) 85% no-repeat;
padding-right:.3em}
.hit>summary,.hit.p{background:var(--hit)}
[hidden]{display:none!important}
"""

_SCRIPT = """
"use strict";
const rows = [...document.querySelectorAll(".r")], box = document.getElementById("q");
const folds = rows.filter(r => r.tagName === "DETAILS");
let before = null;
function search() {
  const q = box.value.trim().toLowerCase();
  if (q && !before) before = folds.map(r => r.open);
  if (!q && before) { folds.forEach((r, i) => { r.open = before[i]; }); before = null; }
  const hits = q ? rows.filter(r => (q.includes("/") ? r.dataset.p : r.dataset.t).includes(q)) : [];
  rows.forEach(r => { r.hidden = !!q; r.classList.remove("hit"); });
  if (q) folds.forEach(r => { r.open = false; });
  for (const hit of hits) {
    hit.classList.add("hit");
    hit.querySelectorAll(".r").forEach(r => { r.hidden = false; });
    for (let r = hit; r; r = r.parentElement.closest(".r")) {
      r.hidden = false;
      if (r !== hit) r.open = true;
    }
  }
  document.getElementById("n").textContent = q ? hits.length + " found" : "";
}
box.addEventListener("input", search);
for (const [id, open] of [["open", true], ["close", false]])
  document.getElementById(id).addEventListener("click", () => folds.forEach(r => { r.open = open; }));
"""
