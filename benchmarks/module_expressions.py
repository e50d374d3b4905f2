"""Times module expressions: making, evaluating, looking up and changing, by the model's depth.

    python -m benchmarks.module_expressions                  # everything: results, tables and plot
    python -m benchmarks.module_expressions --depths=6,12    # less
    python -m benchmarks.module_expressions --report_only    # tables and plot from the results

Run it from the root of the repository, with nothing else running on the machine.
`benchmarks/expression_costs.py` describes the measurements.
"""

import pathlib
from collections.abc import Sequence

from absl import app, flags

from benchmarks import expression_costs, expression_report, result_files

DEPTHS = flags.DEFINE_list("depths", ["6", "12", "24", "48", "96", "192"], "Numbers of layers.")
TURNS = flags.DEFINE_integer("turns", 7, "How often each time is taken.", 1)
COMPILE_UP_TO = flags.DEFINE_integer(
    "compile_up_to", 96, "Layers up to which the two programs are compiled.", 0
)
OUTPUT = flags.DEFINE_string(
    "output", str(expression_report.RESULTS), "The file that the results are written to."
)
REPORT_ONLY = flags.DEFINE_bool(
    "report_only", False, "Only the tables and the plot, from --output."
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    path = pathlib.Path(OUTPUT.value)
    if not REPORT_ONLY.value:
        depths = [int(depth) for depth in DEPTHS.value]
        for results in expression_costs.measure(depths, TURNS.value, COMPILE_UP_TO.value):
            result_files.write(results, path)  # an interrupted run keeps its finished cases
            print(expression_report.summary(results["cases"][-1]), flush=True)
    expression_report.write(expression_report.load(path))


if __name__ == "__main__":
    app.run(main)
