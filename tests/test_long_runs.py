"""Long runs: what each of many chunks gives, from processes that end on the way."""

import concurrent.futures.process
import functools
import os
import pathlib

import pytest

from tests import long_runs


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What a long run sets is not left to other tests."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_a_process_ends_after_some_chunks_and_another_goes_on():
    # With fewer jobs to a process `max_tasks_per_child` of a pool is the same, and with more it hangs.
    count = 2 * long_runs.CHUNKS_OF_A_PROCESS + 3
    chunks = [range(i, 2 * i) for i in range(count)]
    assert sorted(long_runs.results(sum, chunks, 2)) == sorted(map(sum, chunks))


def test_a_job_that_fails_and_a_process_that_dies_are_errors():
    with pytest.raises(ValueError, match="max"):
        list(long_runs.results(max, [range(2), range(0)], 1))
    with pytest.raises(concurrent.futures.process.BrokenProcessPool):
        list(long_runs.results(_exit, [range(2)], 1))


def test_after_an_error_no_more_is_begun(tmp_path):
    job = functools.partial(_leaves_a_file, str(tmp_path))
    chunks = [range(i + 1) for i in range(5 * long_runs.CHUNKS_OF_A_PROCESS)]
    with pytest.raises(FileExistsError):
        list(long_runs.results(job, chunks, 1))
    assert len(list(tmp_path.iterdir())) <= 2


def _leaves_a_file(folder, chunk):
    pathlib.Path(folder, str(len(chunk))).touch()
    raise FileExistsError


def _exit(chunk):
    os._exit(len(chunk))


def test_few_chunks_run_on_all_processes():
    together = list(long_runs.results(_process, [range(1), range(2)], 2))
    assert len(set(together)) == 2


def _process(chunk):
    return os.getpid()
