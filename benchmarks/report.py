"""Draws the plots and writes the tables of `docs/`, from the recorded results."""

import json
import pathlib
import statistics
from typing import Any

from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = (
    ROOT / "docs" / "benchmarks.md",
    ROOT / "benchmarks" / "results" / "lora_transformer.md",
)
IMAGES = ROOT / "docs" / "images"

LABELS = dict(
    dense="Haiku, no LoRA",
    by_hand="LoRA written into the modules",
    library="haiku_implicit",
    quax="quax 0.4.6",
    quax_example="quax 0.4.6, its own LoRA",
)
COLORS = dict(
    dense="#9a9a9a", by_hand="#333333", library="#1f6fb2", quax="#d07c1f", quax_example="#b8433f"
)

STAGES = ("trace", "lower", "compile", "run")
AGAIN = ("forward", "gradient")  # the functions that are traced again

Results = dict[str, Any]


def ratio(case: Results, name: str, stages: tuple[str, ...]) -> float:
    """Returns the median over all turns of the time of some stages, relative to LoRA by hand."""
    ours, theirs = (
        [
            sum(values)
            for values in zip(*(case["implementations"][n][s] for s in stages), strict=True)
        ]
        for n in (name, "by_hand")
    )
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def seconds(case: Results, name: str, *stages: str) -> float:
    """Returns the median time of some stages together."""
    record = case["implementations"][name]
    return statistics.median(
        sum(values) for values in zip(*(record[stage] for stage in stages), strict=True)
    )


def flops_ratio(case: Results, name: str) -> float:
    """Returns the number of flops, relative to LoRA by hand."""
    return _record(case, name)["flops"] / _record(case, "by_hand")["flops"]


def tables(results: Results) -> dict[str, str]:
    """Returns Markdown tables by their names in `docs/benchmarks.md`."""
    names = results["implementations"]
    compared = [n for n in names if n != "by_hand"]
    cases = results["cases"]
    return dict(
        environment=_environment(results),
        tracing=markdown.table(
            ["layers", *(f"{LABELS[n]}, ms" for n in names), *(f"ratio {n}" for n in compared)],
            [
                [
                    _title(c),
                    *(f"{seconds(c, n, 'trace', 'lower') * 1e3:.0f}" for n in names),
                    *(f"{ratio(c, n, ('trace', 'lower')):.2f}" for n in compared),
                ]
                for c in cases
            ],
        ),
        stages=markdown.table(
            ["layers", "implementation", "trace, ms", "lower, ms", "compile, ms", "run, ms"],
            [
                [
                    _title(c),
                    LABELS[n],
                    *(f"{seconds(c, n, s) * 1e3:.1f}" for s in STAGES),
                ]
                for c in cases
                for n in names
            ],
        ),
        programs=markdown.table(
            ["layers", "implementation", "equations", "HLO lines", "flops", "temporary MB",
             "flops to by hand", "step time to by hand"],
            [
                [
                    _title(c),
                    LABELS[n],
                    *_program(_record(c, n)),
                    f"{flops_ratio(c, n):.5f}",
                    f"{ratio(c, n, ('run',)):.3f}",
                ]
                for c in cases
                for n in names
            ],
        ),
        growth=markdown.table(
            ["layers", *(f"{LABELS[n]}, ms a layer" for n in names)],
            [
                [
                    f"{a['depth']} to {b['depth']}",
                    *(f"{_per_layer(a, b, n) * 1e3:.1f}" for n in names),
                ]
                for a, b in zip(_unrolled(results), _unrolled(results)[1:], strict=False)
            ],
        ),
        eager=_eager(results["eager"]),
        again=_again(results["again"]),
    )  # fmt: skip


def write_tables(results: Results) -> None:
    """Updates the tables of `docs/benchmarks.md`."""
    markdown.replace(DOCUMENTS, tables(results))


def draw(results: Results, folder: pathlib.Path = IMAGES) -> list[pathlib.Path]:
    """Draws the plots: time to trace and lower by depth, and the ratios to LoRA by hand."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    cases, names = _unrolled(results), results["implementations"]
    depths = [c["depth"] for c in cases]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    for name in names:
        style = dict(
            color=COLORS[name], marker="o", markersize=4, linewidth=1.8, label=LABELS[name]
        )
        left.plot(depths, [seconds(c, name, "trace", "lower") for c in cases], **style)
        if name not in ("dense", "by_hand"):
            right.plot(depths, [ratio(c, name, ("trace", "lower")) for c in cases], **style)
    left.set(title="Tracing and lowering a training step, seconds", xlabel="layers")
    left.legend(frameon=False, fontsize=8)
    right.axhline(1, color=COLORS["by_hand"], linewidth=1)
    right.set(title="The same, relative to LoRA written by hand", xlabel="layers")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8, loc="lower right")
    for axes in (left, right):
        axes.set_xticks(depths)
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(10)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    path = folder / "tracing.png"
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return [path]


def load(path: pathlib.Path) -> Results:
    """Reads recorded results."""
    return json.loads(path.read_text())


def _unrolled(results: Results) -> list[Results]:
    return [c for c in results["cases"] if not c["stacked"]]


def _title(case: Results) -> str:
    kind = ", `layer_stack`" if case["stacked"] else "" if case["fused"] else ", not fused"
    return f"{case['depth']}{kind}"


def _per_layer(a: Results, b: Results, name: str) -> float:
    more = seconds(b, name, "trace", "lower") - seconds(a, name, "trace", "lower")
    return more / (b["depth"] - a["depth"])


def _record(case: Results, name: str) -> Results:
    return case["implementations"][name]


def _program(record: Results) -> list[str]:
    return [
        f"{record['equations']:,}",
        f"{record['hlo_lines']:,}",
        f"{record['flops']:,.0f}",
        f"{record['temporary_bytes'] / 1e6:.1f}",
    ]


def _environment(results: Results) -> str:
    about, sizes = results["environment"], results["sizes"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    model = ", ".join(f"{name} {value}" for name, value in sizes.items())
    return (
        f"Measured on {about['date']}: {about['cpu']}, {about['cores']} cores, Python "
        f"{about['python']}; {versions}. The model: {model}. {results['repeats']} turns of tracing "
        f"and lowering, {results['runs']} of running."
    )


def _again(again: Results) -> str:
    about, names = again["environment"], again["implementations"]
    compared = [n for n in names if n != "by_hand"]
    rows = [
        [
            _title(c),
            kind,
            *(f"{seconds(c, n, kind) * 1e3:.0f}" for n in names),
            *(f"{ratio(c, n, (kind,)):.2f}" for n in compared),
        ]
        for c in again["cases"]
        for kind in AGAIN
    ]
    header = [*(f"{LABELS[n]}, ms" for n in names), *(f"ratio {n}" for n in compared)]
    table = markdown.table(["layers", "traced again", *header], rows)
    jax = about["versions"]["jax"]
    return f"{table}\n\nMeasured on {about['date']} with jax {jax}, {again['repeats']} turns."


def _eager(eager: Results) -> str:
    by_hand, library = (statistics.median(eager[n]) * 1e3 for n in ("by_hand", "library"))
    return (
        f"{eager['calls']} further eager calls of `apply` ran the model's Python code "
        f"{eager['traces']} times; a call took {library:.1f} ms, LoRA by hand {by_hand:.1f} ms."
    )
