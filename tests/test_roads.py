"""From the first parameters to a served model, through processes that end and begin (`tests/roads.py`)."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests import roads
from tests.devices import HANG, run_on_devices

WALK = "import sys; from tests.roads import walk; walk(*sys.argv[1:3], sys.argv[3:])"
# The roads that documents show.
DOCUMENTED = ("LoRA on int4 documented dict", "LoRA on int4 frozen dict")


def walked(chosen, folder, devices):
    """Walks roads to their end. Returns how far the outputs of Haiku alone are from those of the tuned model."""
    for part in roads.PARTS:
        printed = run_on_devices(WALK, devices, part, str(folder), *chosen)
        rows = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
        assert [name for name, _ in rows] == list(chosen), printed
        failed = [f"{name}, {part} part: {error[-2000:]}" for name, error in rows if error]
        assert not failed, "\n\n".join(failed)
    paths = [roads.path_of(folder, roads.NAMED[name], "plain") for name in chosen]
    command = [sys.executable, "-W", "ignore", "-m", "tests.plain_model", *paths]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG)
    assert run.returncode == 0, run.stderr
    return dict(zip(chosen, map(float, run.stdout.split()), strict=True))


def check(chosen, folder, devices):
    for name, distance in walked(chosen, folder, devices).items():
        # Products of the merged model do not round activations to 8 bits.
        limit = 0.05 if roads.KINDS[roads.NAMED[name].kind].rounds else 1e-5
        assert distance <= limit, name


@pytest.mark.slow
def test_the_road_of_a_user(tmp_path):
    check(DOCUMENTED, tmp_path, 1)


# Each kind with each loop, in one of the containers; with `--long`, in both.
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_road(half, devices, tmp_path):
    names = [name for i, name in enumerate(sorted(roads.NAMED)) if i % 2 == half]
    check(names, tmp_path, devices)


def test_a_road_that_differs_is_seen(tmp_path):
    """The comparison itself: one bit, one dtype, one key of a tree."""
    tree = {"w": np.ones(3, np.float32)}
    roads.same_bits(tree, {"w": np.ones(3, np.float32)})
    one_bit = {"w": np.nextafter(tree["w"], 2)}
    for other in (one_bit, {"w": np.ones(3)}, {"v": np.ones(3, np.float32)}):
        with pytest.raises(AssertionError):
            roads.same_bits(tree, other)
