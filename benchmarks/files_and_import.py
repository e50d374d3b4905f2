"""Measures the import of the package, and the speed of files, each as a ratio in one process.

    taskset -c 1 python -m benchmarks.files_and_import
    taskset -c 1 python -m benchmarks.files_and_import --gguf=model.gguf    # opens and loads it, too

Times are of the processor: the machine may be busy. Each is the least of several. Files have times by
the clock, too; without `taskset` checksums run beside the copy or the write.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import safetensors.flax
from absl import app, flags

import haiku_implicit as hki

_GGUF = flags.DEFINE_string("gguf", None, "A GGUF file that is opened and loaded.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each is measured.", lower_bound=1)

_IMPORT = """
import time
start = time.process_time()
import jax, haiku, optax, chex
middle = time.process_time()
import haiku_implicit
print((time.process_time() - start) / (middle - start))
"""
_OPEN = """
import sys, time
import jax, haiku_implicit as hki
jax.devices(), hki.load_gguf
start = time.process_time()
file = hki.open_gguf(sys.argv[1])
middle = time.process_time()
jax.block_until_ready(hki.load_gguf(file, lambda name: 'model/' + name))
print(middle - start, time.process_time() - middle)
"""


def main(argv: list[str]) -> None:
    del argv
    (ratio,) = _least(_IMPORT)
    print(f"import, to jax + haiku + optax + chex: {ratio:.2f}")
    if _GGUF.value:
        opening, loading = _least(_OPEN, _GGUF.value)
        print(f"open_gguf {opening:.2f} s, load_gguf {loading:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        files(folder)


def _least(program: str, *args: str) -> list[float]:
    """The least of each number that a program prints, in processes of their own.

    They keep bytecode, as Python does by default. Without it, an import compiles the package.
    """
    command, env = (
        [sys.executable, "-c", program, *args],
        {**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split()
        for _ in range(_REPEATS.value)
    ]
    return [min(map(float, numbers)) for numbers in zip(*runs, strict=True)]


def files(folder: str) -> None:
    """Prints the seconds for each gigabyte that is saved and loaded, here and with safetensors."""
    keys = jax.random.split(jax.random.key(0), 32)
    tree = {f"layer_{i}": {"w": jax.random.normal(key, (4096, 1024))} for i, key in enumerate(keys)}
    flat = {name: own["w"] for name, own in jax.block_until_ready(tree).items()}
    gigabytes = sum(x.nbytes for x in flat.values()) / 1e9
    theirs, ours = os.path.join(folder, "a.safetensors"), os.path.join(folder, "b.safetensors")
    jobs: dict[str, Callable[[], Any]] = {
        "safetensors.flax.save_file": lambda: safetensors.flax.save_file(flat, theirs),
        "safetensors.flax.save_file, and fsync": lambda: _saved_to_disk(flat, theirs),
        "hki.save": lambda: hki.save(ours, tree),
        "safetensors.flax.load_file": lambda: safetensors.flax.load_file(theirs),
        "hki.load": lambda: hki.load(ours),
    }
    clocks = time.process_time, time.thread_time, time.perf_counter
    times: dict[str, list[list[float]]] = {name: [] for name in jobs}
    for _ in range(_REPEATS.value):
        for name, job in jobs.items():
            start = [clock() for clock in clocks]
            jax.block_until_ready(job())
            times[name].append([clock() - t for clock, t in zip(clocks, start, strict=True)])
    for name, found in times.items():
        process, thread, wall = (min(x) / gigabytes for x in zip(*found, strict=True))
        own = f"{process:.2f} s/GB, of them {thread:.2f} in the calling thread"
        print(f"{name}: {own}; {wall:.2f} by the clock")


def _saved_to_disk(flat: dict[str, jax.Array], path: str) -> None:
    """Saves with safetensors and waits for the disk, as `hki.save` does."""
    safetensors.flax.save_file(flat, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


if __name__ == "__main__":
    app.run(main)
