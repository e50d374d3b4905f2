"""Writes the tables and the plot of the costs of module expressions, from the recorded results."""

import json
import pathlib
import statistics
from typing import Any

from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "module_expressions.json"
DOCUMENTS = (ROOT / "benchmarks" / "results" / "module_expressions.md",)
IMAGE = ROOT / "docs" / "images" / "module_expressions.png"

# Ratios to a plain trace: the title, the aim and the color of each.
RATIOS = dict(
    make_with_params=("`make_mox`, `params=` given", 2.0, "#1f6fb2"),
    make=("`make_mox` alone", 2.0, "#d07c1f"),
    init=("tracing `init`", None, "#9a9a9a"),
    evaluate=("evaluating", 1.2, "#3a9a5c"),
)
# Costs in milliseconds. The aims are for 96 layers.
TIMES = dict(
    view=("the view", 150.0, "#1f6fb2"),
    slowest_query=("slowest query", 5.0, "#b8433f"),
    median_query=("median query", None, "#d07c1f"),
    glob=("glob", None, "#3a9a5c"),
    first_sub=("first `sub`", None, "#333333"),
    further_sub=("further `sub`", None, "#9a9a9a"),
)

Results = dict[str, Any]


def load(path: pathlib.Path) -> Results:
    """Reads recorded results."""
    return json.loads(path.read_text())


def ratio(case: Results, name: str) -> float:
    """Returns the median over all turns of a time, relative to the plain trace."""
    pairs = zip(case["ms"][name], case["ms"]["plain"], strict=True)
    return statistics.median(ours / plain for ours, plain in pairs)


def queries(case: Results) -> dict[str, float]:
    """Returns the median milliseconds of each query."""
    return {name: statistics.median(ms) for name, ms in case["queries"].items()}


def milliseconds(case: Results, name: str) -> float:
    """Returns the median milliseconds of one of `TIMES`, or of another measured time."""
    if name == "slowest_query":
        return max(queries(case).values())
    if name == "median_query":
        return statistics.median(queries(case).values())
    return statistics.median(case["ms"][name])


def summary(case: Results) -> str:
    """Returns a case as a few lines of text."""
    ratios = ", ".join(f"{name} {ratio(case, name):.2f}" for name in RATIOS)
    times = ", ".join(f"{name} {milliseconds(case, name):.1f}" for name in ("plain", *TIMES))
    return (
        f"{case['depth']} layers\n  to a plain trace: {ratios}\n  ms: {times}\n  {case['program']}"
    )


def write(results: Results) -> None:
    """Updates the tables of `benchmarks/results/module_expressions.md` and the plot."""
    markdown.replace(DOCUMENTS, tables(results))
    draw(results)


def tables(results: Results) -> dict[str, str]:
    """Returns Markdown tables by their names in the document."""
    cases = results["cases"]
    ratios = [
        [
            f"{case['depth']}",
            f"{case['equations']:,}",
            f"{milliseconds(case, 'plain'):.0f}",
            *(f"{ratio(case, name):.2f}" for name in RATIOS),
            *_program(case["program"]),
        ]
        for case in cases
    ]
    times = [
        [f"{case['depth']}", *(f"{milliseconds(case, name):.1f}" for name in TIMES)]
        for case in cases
    ]
    by_query = [
        [f"`{name}`".replace("|", "\\|"), *(f"{queries(case)[name]:.2f}" for case in cases)]
        for name in cases[0]["queries"]
    ]
    return dict(
        measured=_measured(results),
        ratios=markdown.table(
            ["layers", "equations", "plain trace, ms", *(title for title, _, _ in RATIOS.values()),
             "same HLO", "operations compiled"],
            [*ratios, ["aim", "", "", *_aims(RATIOS), "yes", "the same"]],
        ),
        times=markdown.table(
            ["layers", *(f"{title}, ms" for title, _, _ in TIMES.values())],
            [*times, ["aim at 96 layers", *_aims(TIMES)[:-2], *["about constant"] * 2]],
        ),
        queries=markdown.table(
            ["ms by layers", *(f"{case['depth']}" for case in cases)], by_query
        ),
    )  # fmt: skip


def _aims(columns: dict[str, tuple[str, float | None, str]]) -> list[str]:
    return [f"at most {aim:g}" if aim else "" for _, aim, _ in columns.values()]


def _program(program: Results) -> list[str]:
    same = "yes" if program["same_hlo"] else "no"
    if "operations" not in program:
        return [same, "not compiled"]
    plain, ours = program["operations"]
    if program["same_compiled"]:
        return [same, f"{plain:,}, the same"]
    return [same, f"{plain:,}, and {ours:,}"]


def _measured(results: Results) -> str:
    about, model = results["environment"], results["model"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    sizes = ", ".join(f"{name} {value}" for name, value in model.items())
    return (
        f"Measured on {about['date']}: {about['cpu']}, {about['cores']} cores, Python "
        f"{about['python']}; {versions}. The model: {sizes}. {results['turns']} turns."
    )


def draw(results: Results) -> None:
    """Plots the ratios and the times against the depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = results["cases"]
    depths = [case["depth"] for case in cases]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    for axes, columns, value in ((left, RATIOS, ratio), (right, TIMES, milliseconds)):
        for name, (title, aim, color) in columns.items():
            style = dict(color=color, marker="o", markersize=4, linewidth=1.6)
            values = [value(case, name) for case in cases]
            axes.plot(depths, values, label=title.replace("`", ""), **style)
            if aim:
                axes.axhline(aim, color=color, linewidth=1, linestyle=":")
        axes.set_xscale("log")
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.minorticks_off()
        axes.set_xlabel("layers")
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_title("Relative to a plain trace of the model; dotted: the aims", fontsize=10)
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8, ncols=2)
    right.set_title("Milliseconds; dotted: the aims at 96 layers", fontsize=10)
    right.set_yscale("log")
    right.legend(frameon=False, fontsize=8)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=160)
    plt.close(figure)
