"""A save is there whole or not at all: killed programs, full disks, programs that save at once."""

import errno
import itertools
import os
import random
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.files import checkpoint, replacing, saving
from tests.tiers import few

# Saves trees of one number, again and again, in several files of 40 kB, as fast as it can.
SAVER = """
import itertools, os, sys
import numpy as np
import haiku_implicit as hki
path, first = sys.argv[1], int(sys.argv[2])
for n in itertools.count(first):
    arrays = {str(i): np.full(10_000, n, np.int32) for i in range(8)}
    hki.save(path, {"m": arrays, "n": n}, max_shard_bytes=80_000)
    os.write(1, f"{n}\\n".encode())  # at once: `print` may be killed before it ends the line
"""


def start(path, first):
    """A program that saves, once it has saved for the first time."""
    command = [sys.executable, "-c", SAVER, str(path), str(first)]
    saver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    saver.stdout.readline()
    return saver


def number_of(path):
    """The one number in a tree, after checking that it is the same everywhere."""
    tree = hki.load(path, numpy=True)
    assert all((x == tree["n"]).all() for x in tree["m"].values()) and len(tree["m"]) == 8
    return tree["n"]


@pytest.mark.parametrize("cuts", few([2, 100], 2))
def test_a_program_that_is_killed_leaves_a_whole_checkpoint(cuts, tmp_path):
    """At random moments, until so many of them were in the middle of a save."""
    path, draw, last, cut = tmp_path / "x", random.Random(0), 0, 0
    for before, found, leftovers in kill_many(path, draw):
        assert found >= before >= last
        last, cut = found, cut + (leftovers > 0)
        if cut == cuts:
            break
    hki.save(path, {"n": 0}, max_shard_bytes=80_000)  # which removes what they have left
    assert list(tmp_path.iterdir()) == [path]


def naming_numbers(path, names):
    return {replacing.number_of(str(path), name) for name in names} - {None}


# A program that imports once, and forks one that saves for each kill.
FORKER = """
import os, signal, sys, threading, time
import haiku_implicit as hki
saver = {saver!r}
for line in sys.stdin:
    first, delay = line.split()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(into, 1)
        sys.argv = ["-c", {path!r}, first]
        exec(saver)
    os.close(into)
    told = os.read(out, 100).decode()
    time.sleep(float(delay))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while chunk := os.read(out, 100_000).decode():
        told = told[-100:] + chunk
    os.close(out)
    print(told.split()[-1] if told.endswith("\\n") else told.split()[-2], flush=True)
"""


def kill_many(path, draw):
    """For each program, without an end: what it had saved, what is there, and how many saves left something behind.

    They are forks of one program, since to import takes longer than all else.
    """
    text = FORKER.format(saver=SAVER, path=str(path))
    forker = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        for first in itertools.count(1000, 1000):
            forker.stdin.write(f"{first} {draw.random() * 0.05}\n")
            forker.stdin.flush()
            told = int(forker.stdout.readline())
            kept = naming_numbers(path, os.listdir(path.parent)) - {saving.number_in(path)}
            yield told, number_of(path), len(kept)
    finally:
        forker.communicate()


def tree(n, size=50):
    return {"m": {str(i): jnp.full(size, n) for i in range(8)}, "n": n}


def test_every_step_of_a_save_may_be_the_last(tmp_path, monkeypatch):
    """Each system call that writes or names a file fails once, as on a full disk."""
    path = tmp_path / "x"
    hki.save(path, tree(1), max_shard_bytes=400)
    before = sorted(tmp_path.iterdir())
    for name in ("fsync", "replace", "open"):
        for fails_at in range(1, 7):
            calls, real = [0], getattr(os, name)

            def fail(*args, **kwargs):
                calls[0] += 1  # noqa: B023
                if calls[0] == fails_at:  # noqa: B023
                    raise OSError(errno.ENOSPC, "no space left on device")
                return real(*args, **kwargs)  # noqa: B023

            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail)
                try:
                    hki.save(path, tree(2), max_shard_bytes=400)
                except OSError as e:
                    assert e.errno == errno.ENOSPC
            if number_of(path) == 1:
                assert sorted(tmp_path.iterdir()) == before
            else:
                hki.save(path, tree(1), max_shard_bytes=400)
                before = sorted(tmp_path.iterdir())
                assert len(before) == 4


@pytest.mark.slow
@pytest.mark.parametrize("room", [10, 700, 900, 1500])
def test_a_full_disk_leaves_the_old_checkpoint(room, tmp_path):
    """By the system's own limit on the size of a file, in a program of its own."""
    path = tmp_path / "x"
    hki.save(path, tree(1, 300), max_shard_bytes=1000)
    before = sorted(tmp_path.iterdir())
    script = f"""
import resource, signal
import numpy as np, haiku_implicit as hki
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
try:
    hki.save({str(path)!r}, {{str(i): np.ones(300) for i in range(8)}}, max_shard_bytes=5000)
except OSError as e:
    print("refused", e.errno)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == f"refused {errno.EFBIG}\n", run.stderr
    assert sorted(tmp_path.iterdir()) == before and number_of(path) == 1


def test_an_interruption_right_after_the_new_file_has_its_name(tmp_path, monkeypatch):
    path, real = tmp_path / "x", os.replace

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    hki.save(path, tree(1), max_shard_bytes=400)
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hki.save(path, tree(2), max_shard_bytes=400)
    monkeypatch.undo()
    assert number_of(path) == 2


@pytest.mark.parametrize("saves", few([30, 250], 30))
def test_several_that_save_at_once(saves, tmp_path):
    """Threads here and other programs: what is there is always whole, for those that read as well."""
    path, errors = tmp_path / "x", []
    hki.save(path, tree(0), max_shard_bytes=400)
    programs = [start(path, first) for first in ([] if saves < 100 else [1000, 5000])]

    def repeat(act):
        try:
            for n in range(saves):
                act(n)
        except BaseException as e:
            errors.append(e)

    save = lambda n: hki.save(path, tree(n), max_shard_bytes=400)  # noqa: E731
    threads = [
        threading.Thread(target=repeat, args=(f,)) for f in (save, save, lambda _: number_of(path))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for program in programs:
        assert program.poll() is None  # it has not failed either
        program.kill()
        program.wait()
    assert errors == []
    number_of(path)
    save(7)
    assert number_of(path) == 7 and len(list(tmp_path.iterdir())) == 4


def test_a_reader_finds_the_new_files_if_the_old_are_gone(tmp_path, monkeypatch):
    path = tmp_path / "x"
    hki.save(path, tree(1), max_shard_bytes=400)
    real = checkpoint._parsed

    def parsed(*args):
        found = real(*args)
        monkeypatch.undo()
        hki.save(path, tree(2), max_shard_bytes=400)
        return found

    monkeypatch.setattr(checkpoint, "_parsed", parsed)
    assert number_of(path) == 2


def test_saves_that_run_are_left_alone(tmp_path):
    path = str(tmp_path / "x")
    number, file = replacing.start(path)
    shard = replacing.shard_name(path, number, 1, 2)
    with open(shard, "wb"):
        pass
    hki.save(path, tree(1))
    assert os.path.exists(shard) and os.path.exists(file.name)
    file.close()  # as when the program ends
    hki.save(path, tree(1))
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.slow
def test_memory_of_a_save_and_a_load(tmp_path):
    """Neither takes a copy of the whole; in arrays of the tree, in programs of their own."""
    path = str(tmp_path / "x")
    before = f"""
import pathlib, resource
import jax, jax.numpy as jnp, haiku_implicit as hki
size = 16_000_000
def held():
    status = pathlib.Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("RssAnon:") + 1])
peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jnp.ones(3).block_until_ready()
path = {path!r}
"""
    save = """
tree = {str(i): jax.block_until_ready(jnp.full(size // 4, i, jnp.float32)) for i in range(12)}
start = peak()
hki.save(path, tree)
print((peak() - start) / size)
"""
    load = """
start = held()
tree = hki.load(path, numpy=NUMPY)
print((held() - start) / size)
"""
    run = lambda text: subprocess.run(  # noqa: E731
        [sys.executable, "-c", before + text], capture_output=True, text=True, check=True
    )
    assert float(run(save).stdout) < 1.5
    # JAX lets go of what it has copied from some time later.
    assert 12 <= float(run(load.replace("NUMPY", "False")).stdout) < 22
    assert float(run(load.replace("NUMPY", "True")).stdout) < 0.5
