"""Many small jobs on several processes, with a bar."""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm


def results(
    job: Callable[[range], Any], chunks: Sequence[range], processes: int, devices: int = 1
) -> Iterator[Any]:
    """What a job returns for each chunk, as they come.

    Each process has as many devices of this CPU, compiles without optimizing, and ends after some
    chunks, with what JAX keeps.
    """
    # For the processes, which import JAX themselves.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), max_tasks_per_child=20
    )
    with pool, tqdm(total=sum(map(len, chunks)), disable=None) as bar:
        futures = {pool.submit(job, chunk): chunk for chunk in chunks}
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
            bar.update(len(futures[future]))
