"""Times tiles of the GPU kernel, to choose the ones in `haiku_implicit/quantized/gpu/tiles.py`.

    python -m benchmarks.gpu.tune --tune_output=FOLDER --tune_part=0 --tune_parts=14
    python -m benchmarks.gpu.tune --tune_report=tiles.jsonl --tune_about="NVIDIA H200, 2026-11-26"

Run it twice with JAX's compilation cache: with `--tune_compile` in as many processes as there are
processors, and then in a few, of which one at a time uses the GPU.
"""

import fcntl
import functools
import json
import pathlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from benchmarks.gpu import products
from haiku_implicit.quantized.gpu import pallas, tiles

OUTPUT = flags.DEFINE_string("tune_output", "tiles", "Folder of the results, one file a process.")
PART = flags.DEFINE_integer("tune_part", 0, "Which part of the tiles this process times.")
PARTS = flags.DEFINE_integer("tune_parts", 1, "The number of parts.", 1)
NUMBER = flags.DEFINE_integer("tune_number", 28, "Tiles of each product, drawn at random.", 1)
SIZE = flags.DEFINE_string("tune_size", "4096x14336", "The weight, [inputs x outputs].")
COMPILE = flags.DEFINE_bool("tune_compile", False, "Compile the programs, and time nothing.")
SECONDS = flags.DEFINE_integer("tune_seconds", 120, "When to stop.", 1)

CASES = [
    *(
        (name, group, axis, m)
        for name, group in (("int4", 128), ("int8", None))
        for axis, rows in ((-2, (1, 2, 4, 16, 64, 128)), (-1, (16, 128)))
        for m in rows
    ),
    *(("nf4", 64, -2, m) for m in (1, 16, 128)),
]

REPORT = flags.DEFINE_string("tune_report", None, "Results, of which only a table is made.")
ABOUT = flags.DEFINE_string("tune_about", "", "The machine and the date of these results.")
RESULTS = products.ROOT / "benchmarks" / "results" / "gpu_tiles.json"

Options = dict[str, Any]
Case = tuple[str, int | None, int, int]


def main(argv: Sequence[str]) -> None:
    del argv
    if REPORT.value:
        return report(pathlib.Path(REPORT.value), ABOUT.value)
    start = time.monotonic()
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    mine = work()[PART.value :: PARTS.value]
    with (folder / f"{PART.value}.jsonl").open("w") as out, (folder / "lock").open("w") as lock:
        for case, options in mine:
            if time.monotonic() - start > SECONDS.value:
                break
            out.write(json.dumps(timed(case, options, lock)) + "\n")
            out.flush()


def work() -> list[tuple[Case, Options]]:
    """Returns products and their tiles; the shuffled list covers all products early."""
    draw = random.Random(0)
    found = [(case, options) for case in CASES for options in candidates(case, draw)]
    draw.shuffle(found)
    return found


def candidates(case: Case, draw: random.Random) -> Iterator[Options]:
    """Yields options for `with_options`; the empty one is today's plan."""
    *_, axis, m = case
    yield {}
    yield dict(formulation="dense")
    yield dict(formulation="fusion")
    one_row = m == 1 and axis == -2
    large = m >= 128
    for _ in range(NUMBER.value):
        if one_row:
            yield dict(
                rows=draw.choice([1, 2, 4, 8, 16]),
                size=draw.choice([512, 1024, 2048]),
                warps=draw.choice([1, 2, 4, 8]),
            )
            continue
        yield dict(
            m=draw.choice([64, 128, 256]) if large else max(16, m),
            rows=draw.choice([64, 128, 256] if large else [32, 64, 128, 256]),
            size=draw.choice([32, 64, 128] if large else [32, 64, 128, 256]),
            splits=draw.choice([1, 2] if large else [1, 2, 4, 8]),
            warps=draw.choice([4, 8]),
            stages=draw.choice([1, 2, 3, 4, 5]),
        )


def with_options(options: Options) -> Callable[..., Any]:
    """Returns a replacement of `plan_of` with these options of the tile."""

    def plan_of(*args: Any) -> tiles.Plan:
        plan = planned(*args)
        changes = dict(options)
        if size := changes.pop("size", None):
            whole = 1 << (plan.matrix.stored - 1).bit_length()
            piece = min(whole, 16 if plan.one_row else size)
            changes |= dict(piece=piece, pieces=size // piece)
        return plan._replace(tile=plan.tile._replace(**changes))

    return plan_of


planned = tiles.plan_of


def timed(case: Case, options: Options, lock: TextIO) -> dict[str, Any]:
    """Returns the time of one product, or the error; without a time if only to be compiled."""
    name, group, axis, m = case
    options = dict(options)
    formulation = options.pop("formulation", "kernel")
    result = dict(case=case, options=options, formulation=formulation)
    q, dense = weight(name, group, axis)
    w = dense if formulation == "dense" else q
    x = jax.ShapeDtypeStruct((m, q.shape[0]), jnp.bfloat16)
    with mock.patch.object(pallas, "plan_of", with_options(options)):
        try:
            run, count = products.compiled(formulation, w, x)
        except jax.errors.JaxRuntimeError as error:  # a tile that does not fit
            return result | dict(failed=str(error)[:300])
        if COMPILE.value:
            return result
        x = jax.random.normal(jax.random.key(1), x.shape, x.dtype)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            copies = [jax.tree.map(jnp.copy, jax.tree.leaves(w)) for _ in range(count)]
            got = np.asarray(run(x, copies)[0], np.float64)
            times = products.in_turns([lambda: run(x, copies)], 8)[0]
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
    want = np.asarray(jnp.matmul(x, dense, preferred_element_type=jnp.float32), np.float64)
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return result | dict(error=error, time=min(times) / count, bytes=q.nbytes)


@functools.cache
def weight(name: str, group: int | None, axis: int) -> tuple[Any, Any]:
    """Returns a quantized weight and the dense one; only their shapes if nothing is timed."""
    size = [int(n) for n in SIZE.value.split("x")]
    quantize = functools.partial(
        hki.QuantizedMatrix.quantize, dtype=name, group_size=group, axis=axis
    )
    if COMPILE.value:
        w = jax.ShapeDtypeStruct(size, jnp.bfloat16)
        return jax.eval_shape(quantize, w), w
    q = quantize(jax.random.normal(jax.random.key(0), size, jnp.bfloat16))
    return q, hki.materialize(q)


# --- reporting -----------------------------------------------------------------------------------


def report(path: pathlib.Path, about: str) -> None:
    """Records the times of today's tiles and the best ones, and writes a table of them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [case for case in CASES if times_of(case, lines)]
    cases = [summary(case, times_of(case, lines)) for case in found]
    result_files.write(dict(about=about, size=SIZE.value, cases=cases), RESULTS)
    header = ["weight", "grouped axis", "rows", "dense", "kernel", "best tile", "XLA"]
    rows = [
        [
            f"{case['format']}, {case['group'] or 'per channel'}",
            str(case["axis"]),
            str(case["rows"]),
            *(f"{case[name] * 1e6:.0f}" for name in ("dense", "kernel", "best", "fusion")),
        ]
        for case in cases
    ]
    markdown.replace(products.DOCUMENTS, dict(tiles=markdown.table(header, rows)))


def times_of(case: Case, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the times of a case, if all formulations have one."""
    mine = [line for line in lines if tuple(line["case"]) == case and "time" in line]
    return mine if {"dense", "fusion", "kernel"} <= {line["formulation"] for line in mine} else []


def summary(case: Case, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the seconds of each formulation, and of the kernel's best tile."""
    name, group, axis, m = case
    kernels = [line for line in lines if line["formulation"] == "kernel"]
    best = min(kernels, key=lambda line: line["time"])
    about = dict(format=name, group=group, axis=axis, rows=m, bytes=best["bytes"])
    times = {line["formulation"]: line["time"] for line in lines if not line["options"]}
    errors = dict(error=max(line["error"] for line in lines))
    return about | times | dict(best=best["time"], best_tile=best["options"]) | errors


if __name__ == "__main__":
    app.run(main)
