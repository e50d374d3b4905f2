"""Times a LoRA training step: this library, LoRA written by hand, quax, and Haiku without LoRA.

    python -m benchmarks.run                    # everything: results, plots and tables
    python -m benchmarks.run --depths=12        # less
    python -m benchmarks.run --again_only       # tracing again only; keeps the other results
    python -m benchmarks.run --report_only      # plots and tables from the recorded results

Run it from the root of the repository, with nothing else running on the machine.
`docs/benchmarks.md` describes the measurements.
"""

import dataclasses
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from benchmarks import implementations, models, report, result_files, stages
from benchmarks.machine import about_this_machine

RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "lora_transformer.json"

DEPTHS = flags.DEFINE_list("depths", ["6", "12", "24", "48", "96"], "Numbers of layers, unrolled.")
STACKED = flags.DEFINE_list("stacked", ["96"], "Numbers of layers in one `layer_stack`.")
NAMES = flags.DEFINE_list("implementations", None, "What is compared; all there is by default.")
REPEATS = flags.DEFINE_integer("repeats", 7, "How often tracing and lowering are timed.", 1)
RUNS = flags.DEFINE_integer("runs", 40, "How often a compiled step is timed.", 1)
FUSE_UP_TO = flags.DEFINE_integer(
    "fuse_up_to", 48, "Unrolled layers up to which steps are compiled with XLA's fusion pass.", 0
)
APPEND = flags.DEFINE_bool(
    "append", False, "Whether to add cases to those in --output, or to replace some."
)
AGAIN = flags.DEFINE_list("again", ["12"], "Numbers of layers, unrolled, that are traced again.")
AGAIN_STACKED = flags.DEFINE_list("again_stacked", ["24"], "The same, in one `layer_stack`.")
AGAIN_ONLY = flags.DEFINE_bool(
    "again_only", False, "Whether to time tracing again alone, and to keep the rest of --output."
)
WIDTH = flags.DEFINE_integer("width", models.Sizes.width, "The model's width.", 4)
LENGTH = flags.DEFINE_integer("length", models.Sizes.length, "Tokens in a sequence.", 2)
OUTPUT = flags.DEFINE_string("output", str(RESULTS), "The file that the results are written to.")
REPORT = flags.DEFINE_bool("report", True, "Whether to renew the plots and tables in docs/.")
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only the plots and tables, from --output.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    path = pathlib.Path(OUTPUT.value)
    if not REPORT_ONLY.value:
        if AGAIN_ONLY.value:
            write(dict(report.load(path), again=measure_again(chosen())), path)
        else:
            measure(chosen(), path)
        print(f"wrote {path}")
    if REPORT.value or REPORT_ONLY.value:
        results = report.load(path)
        report.write_tables(results)
        for image in report.draw(results):
            print(f"wrote {image}")


def chosen() -> list[str]:
    """Returns the implementations to compare, always with LoRA by hand."""
    found = list(implementations.available())
    names = found if NAMES.value is None else NAMES.value
    if unknown := set(names) - set(found):
        raise app.UsageError(
            f"--implementations: {', '.join(sorted(unknown))} not found, "
            f"there is {', '.join(found)}"
        )
    return [n for n in found if n in names or n == "by_hand"]


def measure(names: list[str], path: pathlib.Path) -> None:
    """Runs all cases, and writes the results after each."""
    base = _base()
    fixed = {k: v for k, v in dataclasses.asdict(base).items() if k not in ("depth", "stacked")}
    kinds = _kinds(DEPTHS.value, STACKED.value)
    results: report.Results = dict(
        environment=environment(),
        sizes=fixed,
        repeats=REPEATS.value,
        runs=RUNS.value,
        implementations=names,
        cases=[],
    )
    if APPEND.value:
        results = with_recorded(results, report.load(path))
    else:
        results["eager"] = stages.eager_calls(dataclasses.replace(base, depth=1), calls=10)
        print("eager: {traces} traces in {calls} repeated calls".format(**results["eager"]))
        results["again"] = measure_again(names)
    for depth, stacked in kinds:
        sizes = dataclasses.replace(base, depth=depth, stacked=stacked)
        # With its fusion pass XLA takes many minutes and 20 GB for a step of 96 unrolled layers.
        fuse = stacked or depth <= FUSE_UP_TO.value
        records = stages.measure(sizes, names, REPEATS.value, RUNS.value, fuse)
        case = dict(depth=depth, stacked=stacked, fused=fuse, implementations=records)
        others = [c for c in results["cases"] if (c["depth"], c["stacked"]) != (depth, stacked)]
        results["cases"] = sorted([*others, case], key=lambda c: (c["stacked"], c["depth"]))
        _print(case)
        result_files.write(
            rounded(results), path
        )  # an interrupted run keeps the cases it has finished


def measure_again(names: list[str]) -> report.Results:
    """Times tracing again in a process that has traced before, without compiling."""
    cases = []
    for depth, stacked in _kinds(AGAIN.value, AGAIN_STACKED.value):
        sizes = dataclasses.replace(_base(), depth=depth, stacked=stacked)
        records = stages.trace_again(sizes, names, REPEATS.value)
        case = dict(depth=depth, stacked=stacked, fused=True, implementations=records)
        for name in names:
            ratios = (f"{k} {report.ratio(case, name, (k,)):.3f}" for k in report.AGAIN)
            print(f"{depth} layers again, {name}: to by hand {', '.join(ratios)}", flush=True)
        cases.append(case)
    return dict(
        environment=environment(), repeats=REPEATS.value, implementations=names, cases=cases
    )


def _base() -> models.Sizes:
    """Returns the sizes that all cases have in common."""
    return models.Sizes(depth=0, width=WIDTH.value, length=LENGTH.value)


def _kinds(depths: list[str], stacked: list[str]) -> list[tuple[int, bool]]:
    return [(int(d), False) for d in depths] + [(int(d), True) for d in stacked]


def with_recorded(results: report.Results, recorded: report.Results) -> report.Results:
    """Returns the recorded results to add to, if their settings are the same as this run's."""
    for name in ("environment", "sizes", "repeats", "runs", "implementations"):
        if recorded[name] != results[name]:
            raise app.UsageError(
                f"--append: expected the recorded {name} {recorded[name]}, got {results[name]}"
            )
    return recorded


def environment() -> dict[str, Any]:
    """Returns the machine, the versions and the system of the measurements."""
    about = about_this_machine("jax", "jaxlib", "dm-haiku", "haiku-implicit", "quax", "numpy")
    return dict(about, python=platform.python_version(), system=platform.system())


def write(results: report.Results, path: pathlib.Path) -> None:
    """Writes the results, rounded."""
    result_files.write(rounded(results), path)


def rounded(value: Any) -> Any:
    """Rounds seconds to a tenth of a microsecond, finer than the measurements."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 7) if isinstance(value, float) else value


def _print(case: report.Results) -> None:
    kind = "layer_stack of " if case["stacked"] else ""
    print(f"{kind}{case['depth']} layers")
    for name in case["implementations"]:
        times = ", ".join(f"{s} {report.seconds(case, name, s) * 1e3:.1f}" for s in report.STAGES)
        ratios = ", ".join(
            f"{' + '.join(which)} {report.ratio(case, name, which):.3f}"
            for which in (("trace", "lower"), ("run",))
        )
        flops = f"flops {report.flops_ratio(case, name):.5f}"
        print(f"  {name:13}{times} ms; to by hand: {ratios}, {flops}", flush=True)


if __name__ == "__main__":
    app.run(main)
