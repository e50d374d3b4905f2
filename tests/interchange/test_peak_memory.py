"""What reading a checkpoint takes in memory, as `peak_memory.py` measures it."""

import json
import os
import subprocess
import sys

import pytest

from tests.interchange import peak_memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", peak_memory.KINDS)
def test_no_more_than_the_parameters_and_one_of_them(kind, tmp_path):
    # Memory that is freed goes back to the system at once.
    freed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, peak_memory.__file__, kind, tmp_path]
    result = subprocess.run(
        command, env=os.environ | freed, capture_output=True, text=True, check=True
    )
    found = json.loads(result.stdout)
    own = 2**20  # of Python, JAX and the thread that watches
    assert found["peak"] <= found["held"] + found["one"] + own
