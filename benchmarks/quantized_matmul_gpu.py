"""Times products with quantized weights on a GPU: this library's kernel, XLA only, and dense bfloat16.

    python -m benchmarks.quantized_matmul_gpu                # everything: results and table
    python -m benchmarks.quantized_matmul_gpu --gpu_sizes=4096x4096 --gpu_rows=1,512
    python -m benchmarks.quantized_matmul_gpu --gpu_report_only  # the table from the recorded results

Run it from the root of the repository, with nothing else running on the GPU. Each program multiplies
with several weights in turn, more than fit in the caches, so that they come from memory as in a
model's layers. Without a GPU that supports the kernel it measures nothing, and exits with status 1.
"""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from haiku_implicit.quantized.gpu import pallas

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quantized_matmul_gpu.json"
DOCUMENTS = (ROOT / "docs" / "quantization_speed.md",)

WEIGHTS = (
    ("int8", None),
    ("int8", 128),
    ("fp8_e4m3", None),
    ("int4", None),
    ("int4", 128),
    ("int4", 32),
    ("uint4", 128),
    ("nf4", 128),
)

SIZES = flags.DEFINE_list(
    "gpu_sizes", ["2048x2048", "4096x4096", "4096x11008"], "Weights [inputs x outputs]."
)
ROWS = flags.DEFINE_list("gpu_rows", [str(2**i) for i in range(12)], "Rows of activations.")
TURNS = flags.DEFINE_integer("gpu_turns", 7, "How often each time is taken.", 1)
OUTPUT = flags.DEFINE_string("gpu_output", str(RESULTS), "Where the results are written to.")
REPORT_ONLY = flags.DEFINE_bool("gpu_report_only", False, "Only the table, from the results.")

_SWITCH = "HAIKU_IMPLICIT_PALLAS"

Results = dict[str, Any]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    path = pathlib.Path(OUTPUT.value)
    if not REPORT_ONLY.value:
        if not pallas.supported():
            print("There is no GPU here that has the kernel: nothing was measured.")
            sys.exit(1)
        result_files.write(measure(), path)
        print(f"wrote {path}")
    markdown.replace(DOCUMENTS, tables(json.loads(path.read_text())))


# --- measuring -----------------------------------------------------------------------------------


def measure() -> Results:
    """Measures all times, in seconds for one product."""
    sizes = [tuple(map(int, size.split("x"))) for size in SIZES.value]
    rows = [int(m) for m in ROWS.value]
    return dict(
        environment=environment(),
        turns=TURNS.value,
        bandwidth=copy_bandwidth(),
        cases=[case for size in sizes for m in rows for case in measure_rows(size, m)],
    )


def environment() -> Results:
    """Returns the hardware and versions that the times depend on."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    versions["haiku-implicit"] = hki.__version__
    device = jax.devices()[0].device_kind
    return dict(date=datetime.date.today().isoformat(), device=device, versions=versions)


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Measures the bytes per second, read and written, of a copy of `size` bytes."""
    x = jnp.zeros(size // 4, jnp.uint32)
    copy = jax.jit(lambda x: x + 1).lower(x).compile()
    return 2 * size / min(_in_turns([lambda: copy(x)], TURNS.value)[0])


def measure_rows(size: tuple[int, ...], m: int) -> Iterator[Results]:
    """Yields the times of all weights of one size with `m` rows of activations."""
    x = jax.random.normal(jax.random.key(1), (m, size[0]), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(0), size, jnp.bfloat16)
    for name, group in WEIGHTS:
        q = hki.QuantizedMatrix.quantize(w, name, group)
        count = number_of_weights(q.nbytes, m)
        programs = dict(
            dense=_program(jnp.matmul, w, x, count),
            kernel=_library(q, x, count, "1"),
            blocks=_library(q, x, count, "0"),
            fusion=_program(lambda x, q: x @ hki.materialize(q), q, x, count),
        )
        times = dict(zip(programs, _in_turns(list(programs.values()), TURNS.value), strict=True))
        times = {n: [t / count for t in found] for n, found in times.items()}
        got, want = (np.asarray(programs[n]()[0], np.float64) for n in ("kernel", "fusion"))
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        case = dict(size=size, format=name, group=group, rows=m, bytes=q.nbytes, error=error)
        print(f"{size} {name} {group} {m}: {_ratio(times, 'kernel'):.2f}, error {error:.1e}")
        yield case | dict(times=times)


def number_of_weights(nbytes: int, m: int) -> int:
    """Returns a number of weights beyond the caches' capacity, or 4 if computing outlasts reading."""
    return max(4, min(32, math.ceil((1 << 28) / nbytes))) if m < 512 else 4


def _library(q: hki.QuantizedMatrix, x: jax.Array, count: int, switch: str) -> Callable[[], Any]:
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = switch
    jax.clear_caches()
    try:
        matmul = hki.use_implicit_args(lambda x, q: x @ q)
        return _program(matmul, q, x, count)
    finally:
        os.environ.pop(_SWITCH)
        if before is not None:
            os.environ[_SWITCH] = before


def _program(product: Callable[..., Any], w: Any, x: jax.Array, count: int) -> Callable[[], Any]:
    """Returns one program with a product for each of `count` copies of a weight."""
    # Leaves, not implicit arrays: passing these is not part of a product.
    leaves, treedef = jax.tree.flatten(w)
    copies = [[leaf + jnp.zeros((), leaf.dtype) for leaf in leaves] for _ in range(count)]

    def run(x: jax.Array, copies: Any) -> list[jax.Array]:
        return [product(x, treedef.unflatten(leaves)) for leaves in copies]

    compiled = jax.jit(run).lower(x, copies).compile()
    return lambda: compiled(x, copies)


def _in_turns(functions: Sequence[Callable[[], Any]], turns: int) -> list[list[float]]:
    """Returns the seconds of each function, for each turn."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(turns + 1):  # the first turn is not counted
        for function, found in zip(functions, times, strict=True):
            start = time.perf_counter()
            results = [function() for _ in range(4)]  # several, so that the GPU never waits
            jax.block_until_ready(results)
            if turn:
                found.append((time.perf_counter() - start) / 4)
    return times


# --- reporting -----------------------------------------------------------------------------------


def tables(results: Results) -> dict[str, str]:
    """Returns Markdown tables by their names in `docs/quantization_speed.md`."""
    about = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    header = ["weight", "size", "rows", "dense, µs", "kernel", "XLA, in blocks", "XLA, fused"]
    text = (
        f"Measured on {about['date']}: {about['device']}; {versions}. {results['turns']} turns. "
        f"A copy runs at {results['bandwidth'] / 1e9:.0f} GB/s. How many times as fast as dense "
        "bfloat16, and the share of the copy's bandwidth that quantized bytes are read at:\n\n"
    )
    lines = [_line(case, results["bandwidth"]) for case in results["cases"]]
    return dict(gpu=text + markdown.table([*header, "share of bandwidth"], lines))


def _line(case: Results, bandwidth: float) -> list[str]:
    group = "per channel" if case["group"] is None else f"groups of {case['group']}"
    times = case["times"]
    ratios = [f"{_ratio(times, name):.2f}" for name in ("kernel", "blocks", "fusion")]
    dense, kernel = (statistics.median(times[name]) for name in ("dense", "kernel"))
    share = f"{case['bytes'] / kernel / bandwidth:.2f}"
    size = " × ".join(map(str, case["size"]))
    weight = f"{case['format']}, {group}"
    return [weight, size, str(case["rows"]), f"{dense * 1e6:.1f}", *ratios, share]


def _ratio(times: dict[str, list[float]], name: str) -> float:
    return statistics.median(a / b for a, b in zip(times["dense"], times[name], strict=True))


if __name__ == "__main__":
    app.run(main)
