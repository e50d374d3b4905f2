"""Training on many devices: as on one, and on from the last checkpoint where a process is killed."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
TINY = ["--layers=1", "--width=32", "--group_size=4", "--length=8"]


def started(folder, *flags):
    """The program, as a process that prints its losses. What XLA has compiled is kept in the folder."""
    folder.mkdir(exist_ok=True)
    paths = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    kept = dict(
        JAX_COMPILATION_CACHE_DIR=str(folder),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", EXAMPLES / "train_sharded.py", *TINY, *flags],
        stdout=subprocess.PIPE,
        # Not a pipe: it would fill while only the other one is read.
        stderr=open(folder / "errors", "w"),  # noqa: SIM115
        text=True,
        env={**os.environ, **kept, "PYTHONPATH": os.pathsep.join(paths)},
    )
    process.errors = folder / "errors"
    return process


def output_of(process):
    out, _ = process.communicate()
    assert process.returncode == 0, process.errors.read_text()[-3000:]
    return out


def losses_in(text):
    """The losses of steps, to the last bit: each as the text that the program prints."""
    return {int(number): loss for number, loss in re.findall(r"step (\d+) loss (\S+)\n", text)}


def rows_in(text):
    """The table at the end: (model, mode, split) to how far the losses are from those of one device."""
    rows = re.findall(r"^(\w+) +(\w+) +(\w+) +\S+ +-> \S+ +(\d\S*) ", text, re.MULTILINE)
    return {tuple(row[:3]): float(row[3]) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_losses_are_those_of_one_device(model, tmp_path):
    flags = f"--model={model} --mode=all --strategy=all --devices=4 --steps=3 --compare".split()
    rows = rows_in(output_of(started(tmp_path, *flags)))
    assert len(rows) == 4 * (4 if model == "moe" else 3)
    for (_, mode, split), difference in rows.items():
        # Activations within rounding of the middle between two integers become the other one.
        limit = 0.02 if mode == "quantized" else 1e-5
        assert difference < limit, (mode, split, difference)


# Kills, processes, mode, and who writes: ten in all.
JOBS = [(7, 2, "qlora", "hki"), (2, 2, "lora", "orbax"), (1, 4, "dense", "hki")]
STEPS = 12


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "count", "mode", "form"), JOBS)
def test_a_job_of_which_a_process_is_killed_goes_on_with_identical_losses(
    kills, count, mode, form, tmp_path
):
    """At a random step of the job and a random moment of the step: in a save, say."""
    seed = time.time_ns()
    print("seed", seed)  # noqa: T201
    draw = random.Random(seed)
    job = [f"--mode={mode}", f"--format={form}", f"--processes={count}", f"--devices={count}"]
    job += ["--strategy=full", f"--steps={STEPS}", "--timeout=3600"]
    expected = losses_in(
        output_of(started(tmp_path / "cache", *job, f"--checkpoint={tmp_path / 'alone'}"))
    )
    assert sorted(expected) == list(range(STEPS))
    found, done = {}, 0
    while len(found) < STEPS or done < kills:
        if len(found) == STEPS:  # and not killed often enough: another job
            found = {}
            (tmp_path / "killed").rename(tmp_path / f"killed_{done}")
        process = started(tmp_path / "cache", *job, f"--checkpoint={tmp_path / 'killed'}")
        text, last = "", draw.randrange(2, 5) if done < kills else STEPS + 1
        for line in process.stdout:
            text += line
            if len(losses_in(text)) == last:
                time.sleep(draw.random() / 20)
                pids = re.search(r"processes ([\d ]+)", text)[1].split()
                os.kill(int(draw.choice(pids)), signal.SIGKILL)
                done += 1
                break
        rest, _ = process.communicate()
        steps = losses_in(text + rest)
        assert steps == {number: expected[number] for number in steps}
        assert min(steps, default=0) <= len(found), "it begins where a checkpoint is"
        if process.returncode:
            assert "goes on from what was saved last" in process.errors.read_text()
        found |= steps
    assert found == expected and done == kills


@pytest.mark.slow
def test_flags_that_do_not_fit(tmp_path):
    process = started(tmp_path, "--strategy=expert")
    process.communicate()
    assert "error: --strategy=expert needs --model=moe" in process.errors.read_text()
