"""Draws the plots and writes the tables of `benchmarks/results/growth.md`, from recorded results."""

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "benchmarks" / "results" / "growth.md",)
IMAGES = ROOT / "docs" / "images"

# The axes, in the document's order; `growth.AXES` describes each one.
AXES = ("depth", "layer_stack", "width", "rank", "adapters", "batch", "context", "devices")
COUNTS = ("equations", "operations", "calls")
TIMES = ("trace", "lower", "compile", "step")
BYTES = ("peak_bytes", "temporary_bytes", "bytes_sent")
TITLES = dict(
    equations="equations", operations="operations", calls="calls", trace="trace", lower="lower",
    compile="compile", step="step", peak_bytes="peak memory", temporary_bytes="temporary bytes",
    bytes_sent="bytes sent",
)  # fmt: skip
UNITS = {**dict.fromkeys(TIMES, ("ms", 1e3)), **dict.fromkeys(BYTES, ("MB", 1e-6))}
# Above this share of busy cores, other work makes the times unreliable.
BUSY = 0.5

Results = dict[str, Any]


def write(results: Results) -> list[pathlib.Path]:
    """Updates the tables of `benchmarks/results/growth.md` and the plots of the measured axes."""
    markdown.replace(DOCUMENTS, tables(results))
    return [draw(name, axis, IMAGES) for name, axis in results["axes"].items()]


def tables(results: Results) -> dict[str, str]:
    """Returns the document's tables: ratios, and each axis's plot and exponents, or its command."""
    found = {"ratios": ratios_table(results)}
    for name in AXES:
        axis = results["axes"].get(name)
        if axis is None:
            found[name] = f"Not measured yet: `python -m benchmarks.growth --axis={name}`."
            continue
        image = f"![Costs by {name}, for each implementation](../../docs/images/{image_name(name)})"
        found[name] = "\n\n".join([image, exponents_table(axis), environment(axis)])
    return found


def ratios_table(results: Results) -> str:
    """Returns a row for each axis: costs relative to LoRA by hand, medians over the axis's values."""
    costs = [c for c in (*COUNTS, *TIMES, *BYTES) if c != "bytes_sent"]
    rows = []
    for axis_name in filter(results["axes"].__contains__, AXES):
        axis = results["axes"][axis_name]
        for name in implementations(axis):
            if name not in ("dense", "by_hand"):
                ratios = [_number(median_ratio(axis, name, c)) for c in costs]
                rows.append([axis_name, report.LABELS[name], *ratios])
    return markdown.table(["axis", "implementation", *(TITLES[c] for c in costs)], rows)


def median_ratio(axis: Results, name: str, cost: str) -> float | None:
    """Returns the cost of an implementation relative to LoRA by hand; None if it was not measured."""
    by_hand, own = (dict(zip(*series(axis, n, cost), strict=True)) for n in ("by_hand", name))
    ratios = [own[value] / by_hand[value] for value in own if value in by_hand]
    return statistics.median(ratios) if ratios else None


def image_name(axis: str) -> str:
    """Returns the file name of a plot."""
    return f"growth_{axis}.png"


def exponents_table(axis: Results) -> str:
    """Returns a row for each implementation, with the exponent of each cost."""
    costs = costs_of(axis)
    rows = [
        [report.LABELS[n], *(_number(exponent(*series(axis, n, c))) for c in costs)]
        for n in implementations(axis)
    ]
    return markdown.table(["implementation", *(TITLES[c] for c in costs)], rows)


def environment(axis: Results) -> str:
    """Describes the measurement and the machine, and warns if its times are unreliable."""
    about = axis["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    fixed = ", ".join(f"{name} {value}" for name, value in axis["fixed"].items())
    text = (
        f"{about['date']}: {about['cpu']}, {about['cores']} cores; {versions}. The model: {fixed}."
    )
    if axis["counts_only"]:
        text += " Only what does not depend on the machine."
    elif busy(axis):
        text += (
            f" **The machine was busy with other work (load {axis['load']}): times are to be measured "
            "again, counts and bytes are not concerned.**"
        )
    if "quax" not in about["versions"]:
        text += " Without quax, which is not installed."
    return text


def busy(axis: Results) -> bool:
    """Whether other work ran on the machine when the measurement of an axis began."""
    return axis["load"] > BUSY * axis["environment"]["cores"]


def costs_of(axis: Results) -> list[str]:
    """Returns the measured costs that are not always zero."""
    return [c for c in (*COUNTS, *TIMES, *BYTES) if any(p.get(c) for p in axis["points"])]


def implementations(axis: Results) -> list[str]:
    """Returns the names of the implementations, in their order."""
    return list(dict.fromkeys(p["implementation"] for p in axis["points"]))


def series(axis: Results, name: str, cost: str) -> tuple[list[int], list[float]]:
    """Returns the values of an axis at which an implementation's cost is known, and these costs."""
    own = [p for p in axis["points"] if p["implementation"] == name and p.get(cost)]
    return [p["value"] for p in own], [p[cost] for p in own]


def exponent(values: Sequence[float], costs: Sequence[float]) -> float | None:
    """Returns the power of the value by which a cost grows: the log-log slope of the larger half.

    One-time costs hide growth at small values, so only the last three points count, or the
    last half if that is more. Returns None for fewer than two points.

    >>> exponent([1, 2, 4, 8], [3, 12, 48, 192])
    2.0
    """
    keep = max(3, math.ceil(len(values) / 2))
    x, y = ([math.log(n) for n in own[-keep:]] for own in (values, costs))
    if len(x) < 2:
        return None
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    pairs = [(a - mean_x, b - mean_y) for a, b in zip(x, y, strict=True)]
    return round(sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs), 6)


def draw(name: str, axis: Results, folder: pathlib.Path) -> pathlib.Path:
    """Draws each cost of an axis by its values, both in logarithms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    costs = costs_of(axis)
    columns = min(4, len(costs))
    rows = math.ceil(len(costs) / columns)
    size = (2.7 * columns, 2.3 * rows + 0.4)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for panel, cost in zip(grid.flat, costs, strict=False):
        unit, factor = UNITS.get(cost, ("", 1))
        for n in implementations(axis):
            x, y = series(axis, n, cost)
            style = dict(color=report.COLORS[n], marker="o", markersize=3, linewidth=1.4)
            panel.plot(x, [v * factor for v in y], label=report.LABELS[n], **style)
        panel.set_title(f"{TITLES[cost]}{unit and ', ' + unit}", fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.tick_params(labelsize=7)
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(grid.flat)[len(costs) :]:
        panel.set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    path = folder / image_name(name)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x + 0.0:.2f}".replace("-0.00", "0.00")
