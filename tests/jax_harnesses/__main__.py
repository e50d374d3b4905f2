"""Runs JAX's own test cases on implicit arrays, prints what is wrong, and a table.

python -m tests.jax_harnesses
python -m tests.jax_harnesses --first=3 --step=100
"""

import collections
import os
import sys

from absl import app, flags

from tests import long_runs
from tests.jax_harnesses import agree

_FIRST = flags.DEFINE_integer("first", 0, "The index of the first case.", lower_bound=0)
_STEP = flags.DEFINE_integer("step", 1, "From one case to the next.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Processes.", lower_bound=1)
EXPECTED = ("agrees", "no operand", "not dense either")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    cases = agree.harnesses()
    indices = range(_FIRST.value, len(cases), _STEP.value)
    chunks = [indices[i : i + 10] for i in range(0, len(indices), 10)]
    table: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for found in long_runs.results(agree.outcomes, chunks, _PROCESSES.value):
        for (i, type_name, use), what in found.items():
            table[type_name, use, what if what in EXPECTED else "wrong"] += 1
            if what not in EXPECTED:
                print(f"{i} {cases[i].fullname} {type_name} {use}: {what}\n", flush=True)
    print(f"{len(indices)} of {len(cases)} cases\n\n{as_table(table)}")
    sys.exit(any(what == "wrong" for _, _, what in table))


def as_table(table: collections.Counter[tuple[str, str, str]]) -> str:
    """For each type and use how many agree, and how many are wrong."""
    lines = [
        "| type | " + " | ".join(agree.USES) + " | wrong | no such operand | not dense either |"
    ]
    lines.append("| --- |" + " ---: |" * (len(agree.USES) + 3))
    for name in agree.TYPES:
        agreeing = [table[name, use, "agrees"] for use in agree.USES]
        others = [
            sum(table[name, use, what] for use in agree.USES)
            for what in ("wrong", "no operand", "not dense either")
        ]
        lines.append(f"| {name} | " + " | ".join(f"{n:,}" for n in agreeing + others) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
