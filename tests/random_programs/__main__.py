"""Runs many random programs, and prints each that disagrees with its dense twin.

python -m tests.random_programs --count=1000
python -m tests.random_programs --first=1271 --count=1 --processes=1
python -m tests.random_programs --count=1000 --devices=4
"""

import concurrent.futures
import multiprocessing
import os
import sys

from absl import app, flags
from tqdm import tqdm

from tests.random_programs import agree

_FIRST = flags.DEFINE_integer("first", 0, "The first seed.", lower_bound=0)
_COUNT = flags.DEFINE_integer("count", 1000, "How many seeds.", lower_bound=1)
_DEVICES = flags.DEFINE_integer("devices", 1, "Devices of this CPU in each process.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Processes.", lower_bound=1)
# Programs for one process after another: JAX keeps what it has compiled.
_CHUNK, _CHUNKS_OF_A_PROCESS = 20, 20


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    # For the processes, which import JAX themselves.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={_DEVICES.value} "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    end = _FIRST.value + _COUNT.value
    chunks = [range(first, min(first + _CHUNK, end)) for first in range(_FIRST.value, end, _CHUNK)]
    pool = concurrent.futures.ProcessPoolExecutor(
        _PROCESSES.value,
        multiprocessing.get_context("spawn"),
        max_tasks_per_child=_CHUNKS_OF_A_PROCESS,
    )
    compared, failures = 0, {}
    with pool, tqdm(total=_COUNT.value, unit="program", disable=None) as bar:
        futures = {pool.submit(agree.check_seeds, chunk): chunk for chunk in chunks}
        for future in concurrent.futures.as_completed(futures):
            number, failed = future.result()
            compared += number
            failures |= failed
            for seed, error in failed.items():
                bar.write(f"seed {seed}: {error}\n", file=sys.stdout)
            bar.update(len(futures[future]))
    skipped = _COUNT.value - compared - len(failures)
    print(
        f"seeds {_FIRST.value} to {end - 1} on {_DEVICES.value} device(s): {compared} agree, "
        f"{len(failures)} disagree, {skipped} can't be run with dense arrays either"
    )
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
