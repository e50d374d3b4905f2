"""A program that is killed and started again comes to the losses of one that was left alone."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import haiku_implicit as hki

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 40


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The function `train` of the recipe, as a program that trains a checkpoint up to `STEPS`."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [train] = [block for block in blocks if "def train(" in block]
    path = tmp_path_factory.mktemp("program") / "resume.py"
    path.write_text(f"{blocks[0]}\n{train}\nimport sys\n\ntrain(sys.argv[1], steps={STEPS})\n")
    return path


def started(program, checkpoint):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, program, checkpoint],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def losses_in(lines):
    """The losses of steps, to the last bit: each as the text that the program prints."""
    return {int(number): loss for number, loss in re.findall(r"step (\d+) loss (\S+)\n", lines)}


@pytest.mark.slow
def test_a_killed_program_goes_on_with_identical_losses(program, tmp_path):
    alone, killed = tmp_path / "alone.safetensors", tmp_path / "killed.safetensors"
    process = started(program, alone)
    expected = losses_in(process.communicate()[0])
    assert process.returncode == 0 and sorted(expected) == list(range(STEPS))

    draw = random.Random(time.time_ns())  # another moment in each run of the tests
    found, kills = {}, 0
    while len(found) < STEPS:
        process = started(program, killed)
        lines, last = "", draw.randrange(8, 20) if kills < 2 else STEPS
        for count, line in enumerate(process.stdout, 1):
            lines += line
            if count == last:  # in the middle of a later step, or of a save
                time.sleep(draw.random() / 100)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
        lines += process.stdout.read()
        process.wait()
        process.stdout.close()
        steps = losses_in(lines)
        assert steps and min(steps) <= len(found), "it begins where a checkpoint is"
        assert steps == {number: expected[number] for number in steps}
        found |= steps
    assert kills == 2 and found == expected
    for one, other in zip(*(jax.tree.leaves(hki.load(p)) for p in (alone, killed)), strict=True):
        np.testing.assert_array_equal(one, other)
