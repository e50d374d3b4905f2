"""Runs many random programs, and prints each that disagrees with its dense twin.

python -m tests.random_programs --count=1000
python -m tests.random_programs --first=1271 --count=1 --processes=1
python -m tests.random_programs --count=1000 --devices=4
"""

import os
import sys

from absl import app, flags

from tests import long_runs
from tests.random_programs import agree

_FIRST = flags.DEFINE_integer("first", 0, "The first seed.", lower_bound=0)
_COUNT = flags.DEFINE_integer("count", 1000, "How many seeds.", lower_bound=1)
_DEVICES = flags.DEFINE_integer("devices", 1, "Devices of this CPU in each process.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Processes.", lower_bound=1)
# A process begins with 4 s of imports and of compiling what all programs use, and takes 4 MB a program.
CHUNK = 1000 // long_runs.CHUNKS_OF_A_PROCESS


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    end = _FIRST.value + _COUNT.value
    chunks = [range(i, min(i + CHUNK, end)) for i in range(_FIRST.value, end, CHUNK)]
    compared = failures = 0
    for number, failed in long_runs.results(
        agree.check_seeds, chunks, _PROCESSES.value, _DEVICES.value
    ):
        compared += number
        failures += len(failed)
        for seed, error in failed.items():
            print(f"seed {seed}: {error}\n", flush=True)
    skipped = _COUNT.value - compared - failures
    print(
        f"seeds {_FIRST.value} to {end - 1} on {_DEVICES.value} device(s): {compared} agree, "
        f"{failures} disagree, {skipped} can't be run with dense arrays either"
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    app.run(main)
