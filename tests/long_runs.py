"""Many small jobs on several processes, with a bar."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from tests.xla_flags import quick_to_compile

# A process ends after so many chunks, with all that JAX keeps.
CHUNKS_OF_A_PROCESS = 20


def results(
    job: Callable[[range], Any], chunks: Sequence[range], processes: int, devices: int = 1
) -> Iterator[Any]:
    """What a job returns for each chunk, in any order.

    Each process has as many devices of this CPU, and compiles as the tests do.

    Raises:
      concurrent.futures.process.BrokenProcessPool: where a process dies.
    """
    # For the processes, which import JAX themselves.
    os.environ["JAX_PLATFORMS"] = "cpu"
    count = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{count} {quick_to_compile()}"
    number = max(-(-len(chunks) // CHUNKS_OF_A_PROCESS), min(processes, len(chunks)))
    groups = [chunks[i::number] for i in range(number)]
    with (
        concurrent.futures.ThreadPoolExecutor(processes) as threads,
        tqdm(total=sum(map(len, chunks)), disable=None) as bar,
    ):

        def run(group: Sequence[range]) -> list[Any]:
            # One pool for all, with `max_tasks_per_child`, waits for ever once its processes have ended
            # (python/cpython#115634).
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
                found = []
                for chunk in group:
                    found.append(process.submit(job, chunk).result())
                    bar.update(len(chunk))
                return found

        try:
            for future in concurrent.futures.as_completed([threads.submit(run, g) for g in groups]):
                yield from future.result()
        finally:
            threads.shutdown(
                wait=False, cancel_futures=True
            )  # after an error the others are not begun
