"""The tables and the picture of `docs/adapters.md`, from the results of `benchmarks.adapters`."""

import json
import pathlib
import statistics
from typing import Any

from benchmarks import tables as markdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "docs" / "adapters.md",)
IMAGE = ROOT / "docs" / "images" / "adapters.png"
HEADER = ["adapter", "trained", "held-out loss", "runs", "to LoRA", "rate", "time", "MB"]

Results = dict[str, Any]


TASKS = ("smollm", "proteinmpnn")
# The kinds of the short table, as the page writes them: four of the best, and DoRA.
SHORT = {
    "rsLoRA": '`"lora"`, `rank_stabilized=True` (rsLoRA)',
    "HiRA": '`"hira"`',
    "LoRA+": '`"lora"` with [LoRA+](#lora-and-lora-fa)',
    "GraLoRA": '`"gralora"`',
    "DoRA": '`"dora"`',
}


def results_path(task: str) -> pathlib.Path:
    return ROOT / "benchmarks" / "results" / f"adapters_{task}.json"


def write(task: str) -> None:
    """Updates the table of a task, and the picture."""
    results, both = read(task), [read(name) for name in TASKS]
    tables = {task: table(results), f"about {task}": about(results), "best": short_table(both)}
    markdown.replace(DOCUMENTS, tables)
    draw(both)


def read(task: str) -> Results:
    found: Results = json.loads(results_path(task).read_text())
    return found


def in_order(results: Results) -> dict[str, Results]:
    """The records that have runs, the least mean loss first."""
    found = {name: record for name, record in results["kinds"].items() if runs_of(record)}
    return dict(sorted(found.items(), key=lambda item: statistics.mean(losses(item[1]))))


def runs_of(record: Results) -> list[dict[str, float]]:
    """The runs with the best learning rate, one for each seed; [] before that is known."""
    return record["tried"][record["rate"]] if "rate" in record else []


def losses(record: Results) -> list[float]:
    return [run["heldout"] for run in runs_of(record)]


def about(results: Results) -> str:
    """What the runs of a task have in common."""
    machine, settings = results["machine"], results["settings"]
    before = statistics.mean(one["heldout"] for one in results["before"])
    versions = " ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{settings['model']}, {settings['num_steps']} steps; without training the held-out loss is "
        f"{before:.3f}. {machine['cpu']}, {versions}, {machine['date']}."
    )


def has_own_size(results: Results, name: str) -> bool:
    """Whether a kind trains another number than LoRA, by more than a tenth."""
    kinds = results["kinds"]
    return abs(kinds[name]["trained"] / kinds["LoRA"]["trained"] - 1) > 0.1


def table(results: Results) -> str:
    """The table of a task: a row for each kind, and the range of its runs."""
    return markdown.table(HEADER, [row(results, name) for name in in_order(results)])


def short_table(both: list[Results]) -> str:
    """The differences from LoRA in both tasks, and the least and the largest time of a step."""
    header = ["adapter", "loss, less LoRA's: SmolLM2", "ProteinMPNN", "time of a step, LoRA's is 1"]
    rows = []
    for name, shown in SHORT.items():
        losses = [f"{statistics.mean(to_lora(results, name)):+.3f}" for results in both]
        times = sorted(f"{relative_time(results['kinds'][name]):.1f}" for results in both)
        rows.append([shown, *losses, " to ".join(dict.fromkeys(times))])
    return markdown.table(header, rows)


def row(results: Results, name: str) -> list[str]:
    record = results["kinds"][name]
    found = losses(record)
    return [
        name + (" †" if has_own_size(results, name) else ""),
        f"{record['trained']:,}",
        with_range(found, ".3f"),
        str(len(found)),
        with_range(to_lora(results, name), "+.3f"),
        record["rate"],
        f"{relative_time(record):.2f}" if "seconds" in record else "–",
        f"{record['bytes'] / 1e6:.0f}",
    ]


def to_lora(results: Results, name: str) -> list[float]:
    """The differences from LoRA's runs of the same seeds and batches, which vary less."""
    kinds = results["kinds"]
    pairs = zip(losses(kinds[name]), losses(kinds["LoRA"]), strict=False)
    return [own - reference for own, reference in pairs]


def with_range(values: list[float], form: str) -> str:
    """The mean, and in brackets the least and the largest value if there are several."""
    mean, least, largest = statistics.mean(values), min(values), max(values)
    return f"{mean:{form}}" + (f" ({least:{form}} to {largest:{form}})" if values[1:] else "")


def relative_time(record: Results) -> float:
    """How long a step takes relative to LoRA's, the median of the turns."""
    pairs = zip(record["seconds"], record["seconds_of_lora"], strict=True)
    return statistics.median(own / lora for own, lora in pairs)


def draw(tasks: list[Results]) -> None:
    """Plots each run of the tasks, and the first task's times and bytes beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = in_order(tasks[0])
    options = dict(width_ratios=(3, 3, 1, 1), layout="constrained", sharey=True)
    figure, panels = plt.subplots(1, 4, figsize=(10, 0.24 * len(records) + 1), **options)
    places = range(len(records))
    for axes, results in zip(panels, tasks, strict=False):
        plot_runs(axes, results, list(records))
    times = [relative_time(r) if "seconds" in r else 0.0 for r in records.values()]
    panels[2].barh(places, times, color="#9a9a9a", height=0.6)
    sizes = [r["bytes"] / 1e6 for r in records.values()]
    panels[3].barh(places, sizes, color="#9a9a9a", height=0.6)
    labels = [f"{results['settings']['model']}: loss above LoRA's" for results in tasks]
    for axes, label in zip(panels, [*labels, "time, LoRA = 1", "MB"], strict=True):
        axes.set_xlabel(label, fontsize=9)
        axes.grid(color="#e4e4e4", linewidth=0.8, axis="x")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(places, list(records), fontsize=8)
    panels[0].set_ylim(len(records) - 0.5, -0.5)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=160)
    plt.close(figure)


def plot_runs(axes: Any, results: Results, names: list[str]) -> None:
    """A dot for each seed: the held-out loss less that of LoRA with the same seed."""
    recorded = in_order(results)
    axes.axvline(0, color="#9a9a9a", linewidth=0.8)
    for place, name in enumerate(names):
        if name in recorded:
            found = to_lora(results, name)
            color = "#d07c1f" if has_own_size(results, name) else "#1f6fb2"
            axes.plot([min(found), max(found)], [place] * 2, color=color, linewidth=1)
            axes.scatter(found, [place] * len(found), s=14, color=color)
            axes.scatter(statistics.mean(found), place, s=70, marker="|", color=color)
