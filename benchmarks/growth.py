"""Measures a LoRA step's cost by depth, width, rank, adapters, batch, context and devices.

    python -m benchmarks.growth                              # all axes: results, plots and tables
    python -m benchmarks.growth --axis=depth,layer_stack     # some axes; the others keep their results
    python -m benchmarks.growth --growth_counts_only         # nothing is compiled or timed
    python -m benchmarks.growth --growth_report_only         # plots and tables of recorded results

Run it from the root of the repository, with nothing else running on the machine. Each point is measured
in its own process (`benchmarks.growth_point`); the implementations of one size follow each other.
`docs/growth.md` describes the measurements.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import app, flags
from tqdm import tqdm

from benchmarks import growth_report, result_files
from benchmarks.machine import about_this_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "growth.json"


class Axis(NamedTuple):
    """An axis of growth: one size varies, the others are fixed.

    Attributes:
      values: from the smallest to the largest.
      field: a field of `models.Sizes`, or of `growth_point.Case` if `sizes` does not have it.
      fixed: the other sizes.
      case: other fields of `growth_point.Case`.
      compiled_up_to: larger values are only traced and lowered.
      without: the implementations to leave out.
    """

    values: tuple[int, ...]
    field: str
    fixed: dict[str, Any]
    case: dict[str, Any] = {}
    compiled_up_to: int | None = None
    without: tuple[str, ...] = ()


NARROW = dict(width=64, heads=4, vocabulary=128, batch=2, length=32, rank=4)
WIDE = dict(depth=2, width=128, heads=4, vocabulary=128, batch=4, length=64, rank=8)
AXES = {
    "depth": Axis((6, 12, 24, 48, 96, 192), "depth", NARROW, compiled_up_to=48),
    "layer_stack": Axis((6, 12, 24, 48, 96, 192), "depth", dict(NARROW, stacked=True)),
    "width": Axis((64, 128, 256, 512), "width", WIDE),
    "rank": Axis((2, 8, 32, 128), "rank", dict(WIDE, width=256)),
    # Each example of the batch has its own adapter; without LoRA there are none.
    "adapters": Axis(
        (1, 4, 16, 64), "adapters", dict(WIDE, batch=64, length=16), without=("dense",)
    ),
    "batch": Axis((4, 16, 64, 256), "batch", dict(WIDE, length=16)),
    "context": Axis((64, 128, 256, 512, 1024), "length", dict(WIDE, batch=1)),
    "devices": Axis((1, 2, 4, 8), "devices", dict(WIDE, batch=16)),
}
CASE_FIELDS = ("adapters", "devices")
NAMES = ("dense", "by_hand", "library", "quax")

AXIS = flags.DEFINE_list("axis", ["all"], f"What grows: all, or some of {', '.join(AXES)}.")
UP_TO = flags.DEFINE_integer("up_to", None, "Leaves larger values of the axes out.")
COUNTS_ONLY = flags.DEFINE_bool(
    "growth_counts_only", False, "Only what does not depend on the machine: nothing is compiled."
)
GROWTH_RUNS = flags.DEFINE_integer("growth_runs", 10, "How often a compiled step is timed.", 1)
GROWTH_OUTPUT = flags.DEFINE_string("growth_output", str(RESULTS), "The file with the results.")
GROWTH_REPORT_ONLY = flags.DEFINE_bool("growth_report_only", False, "Only the plots and tables.")
GROWTH_REPORT = flags.DEFINE_bool("growth_report", True, "Whether to renew plots and tables.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    path = pathlib.Path(GROWTH_OUTPUT.value)
    if not GROWTH_REPORT_ONLY.value:
        measure(chosen_axes(), path)
        print(f"wrote {path}")
    if GROWTH_REPORT.value or GROWTH_REPORT_ONLY.value:
        for image in growth_report.write(json.loads(path.read_text())):
            print(f"wrote {image}")


def chosen_axes() -> list[str]:
    """Returns the axes of `--axis`, in the order of `AXES`."""
    if AXIS.value == ["all"]:
        return list(AXES)
    if unknown := set(AXIS.value) - set(AXES):
        raise app.UsageError(
            f"--axis: {', '.join(sorted(unknown))} is not an axis; there are {', '.join(AXES)}"
        )
    return [name for name in AXES if name in AXIS.value]


def measure(axes: Sequence[str], path: pathlib.Path) -> None:
    """Measures axes, and writes the results after each one. Other axes keep their results."""
    results = json.loads(path.read_text()) if path.exists() else {"axes": {}}
    points = {name: points_of(AXES[name]) for name in axes}
    # The load by others on this machine, before this program adds to it.
    load = round(os.getloadavg()[0], 1)
    with tqdm(total=sum(map(len, points.values())), file=sys.stderr) as bar:
        for name in axes:
            about = about_this_machine("jax", "jaxlib", "dm-haiku", "quax")
            records = []
            for value, case in points[name]:
                bar.set_description(f"{name} {value}, {case['implementation']}")
                record = run_point(case)
                records.append(dict(value=value, implementation=case["implementation"], **record))
                bar.update()
            check_losses(name, records)
            results["axes"][name] = dict(
                environment=about, load=load, counts_only=COUNTS_ONLY.value,
                fixed=AXES[name].fixed, points=records,
            )  # fmt: skip
            result_files.write(results, path)


def points_of(axis: Axis) -> list[tuple[int, dict[str, Any]]]:
    """Returns the values of an axis, each with the cases to measure."""
    points = []
    for value in axis.values:
        if UP_TO.value is not None and value > UP_TO.value:
            continue
        fits = axis.compiled_up_to is None or value <= axis.compiled_up_to
        case: dict[str, Any] = dict(
            sizes=dict(axis.fixed), compiled=fits and not COUNTS_ONLY.value,
            runs=GROWTH_RUNS.value, **axis.case,
        )  # fmt: skip
        (case if axis.field in CASE_FIELDS else case["sizes"])[axis.field] = value
        points += [
            (value, dict(case, implementation=name)) for name in NAMES if name not in axis.without
        ]
    return points


def run_point(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of one case, measured by another process; raises if that process fails."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.growth_point", json.dumps(case)]
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        command,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"{case}: {run.stderr[-3000:]}")
    record = json.loads(run.stdout.splitlines()[-1])
    if not case["compiled"] and COUNTS_ONLY.value:
        record = {k: v for k, v in record.items() if k in growth_report.COUNTS}
    return {k: round(v, 7) if isinstance(v, float) else v for k, v in record.items()}


def check_losses(axis: str, records: Sequence[dict[str, Any]]) -> None:
    """Raises unless all implementations of LoRA compute the same losses."""
    by_hand = {r["value"]: r.get("loss") for r in records if r["implementation"] == "by_hand"}
    for r in records:
        expected = by_hand[r["value"]]
        if expected is None or r["implementation"] == "dense":
            continue
        if abs(r["loss"] - expected) > 1e-5 * abs(expected):
            raise AssertionError(
                f"{axis} {r['value']}, {r['implementation']}: loss {r['loss']}, by hand {expected}"
            )


if __name__ == "__main__":
    app.run(main)
