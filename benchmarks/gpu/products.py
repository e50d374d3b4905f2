"""Times products with quantized weights on a GPU: this library's kernel, XLA's, tokamax's, and dense.

    python -m benchmarks.gpu.products                # everything: results and table
    python -m benchmarks.gpu.products --gpu_sizes=4096x4096 --gpu_rows=1,512
    python -m benchmarks.gpu.products --gpu_report_only  # the table from the recorded results

Run it from the root of the repository, with nothing else running on the GPU. Each program multiplies
with several weights in turn, more than fit in the caches, so that they come from memory as in a
model's layers. Without a GPU that supports the kernel it measures nothing, and exits with status 1.
With JAX's compilation cache, `--gpu_compilers=14` lets so many processes compile all programs first.
`tokamax.ragged_dot` is timed if tokamax is installed, with the formats that Qwix's `QArray` has too.
"""

import datetime
import functools
import importlib.metadata
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from haiku_implicit.quantized.gpu import pallas

try:
    import qwix
    import tokamax
except ImportError:
    tokamax = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_products.json"
DOCUMENTS = (ROOT / "benchmarks" / "results" / "quantized_matmul.md",)

WEIGHTS = (
    ("int8", None),
    ("int8", 128),
    ("int4", 128),
    ("int4", 32),
    ("nf4", 64),
    ("fp8_e4m3", None),
)

# Their names in Qwix.
IN_QWIX = dict(int8="int8", int4="int4", fp8_e4m3="float8_e4m3fn")

SIZES = flags.DEFINE_list("gpu_sizes", ["4096x4096", "4096x14336"], "Weights [inputs x outputs].")
ROWS = flags.DEFINE_list(
    "gpu_rows", "1 2 4 8 16 32 64 128 256 1024 4096".split(), "Rows of activations."
)
TURNS = flags.DEFINE_integer("gpu_turns", 7, "How often each time is taken.", 1)
OUTPUT = flags.DEFINE_string("gpu_output", str(RESULTS), "Where the results are written to.")
REPORT_ONLY = flags.DEFINE_bool("gpu_report_only", False, "Only the table, from the results.")

COMPILERS = flags.DEFINE_integer("gpu_compilers", 0, "Processes that compile beforehand.", 0)
COMPILE = flags.DEFINE_integer("gpu_compile", None, "Compile this part, and measure nothing.")

Results = dict[str, Any]
Size = tuple[int, ...]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if COMPILE.value is not None:
        return compile_part(COMPILE.value)
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
    compile_beforehand()
    return dict(
        environment=environment(),
        turns=TURNS.value,
        bandwidth=copy_bandwidth(),
        cases=[measure_case(*case) for case in cases()],
    )


def cases() -> list[tuple[Size, str, int | None, int]]:
    """Returns the sizes, formats, groups and rows of activations of all products."""
    sizes = [tuple(map(int, size.split("x"))) for size in SIZES.value]
    rows = [int(m) for m in ROWS.value]
    return [(size, *weight, m) for size in sizes for weight in WEIGHTS for m in rows]


def compile_beforehand() -> None:
    """Fills JAX's compilation cache from several processes."""
    command = [sys.executable, "-m", "benchmarks.gpu.products", *sys.argv[1:]]
    started = [
        subprocess.Popen([*command, f"--gpu_compile={i}"], cwd=ROOT) for i in range(COMPILERS.value)
    ]
    for process in started:
        process.wait()


def compile_part(part: int) -> None:
    """Compiles every so-many-th case."""
    for size, name, group, m in cases()[part :: COMPILERS.value]:
        w = jax.ShapeDtypeStruct(size, jnp.bfloat16)
        x = jax.ShapeDtypeStruct((m, size[0]), jnp.bfloat16)
        for formulation, of in jax.eval_shape(lambda w, n=name, g=group: forms(w, n, g), w).items():
            compiled(formulation, of, x)


def environment() -> Results:
    """Returns the hardware and versions that the times depend on."""
    others = () if tokamax is None else ("tokamax", "qwix")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *others)}
    versions["haiku-implicit"] = hki.__version__
    device = jax.devices()[0].device_kind
    return dict(date=datetime.date.today().isoformat(), device=device, versions=versions)


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Measures the bytes per second, read and written, of a copy of `size` bytes."""
    x = jnp.zeros(size // 4, jnp.uint32)
    copy = jax.jit(lambda x: x + 1).lower(x).compile()
    return 2 * size / min(in_turns([lambda: copy(x)], TURNS.value)[0])


def measure_case(size: Size, name: str, group: int | None, m: int) -> Results:
    """Returns the times of one weight with `m` rows of activations."""
    x = jax.random.normal(jax.random.key(1), (m, size[0]), jnp.bfloat16)
    of_forms = weights(size, name, group)
    programs = {n: program(n, w, x) for n, w in of_forms.items()}
    found = in_turns([run for run, _ in programs.values()], TURNS.value)
    times = {
        n: [t / count for t in ts]
        for (n, (_, count)), ts in zip(programs.items(), found, strict=True)
    }
    got, want = (np.asarray(programs[n][0]()[0], np.float64) for n in ("kernel", "fusion"))
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    print(f"{size} {name} {group} {m}: {_ratio(times, 'kernel'):.2f}, error {error:.1e}")
    nbytes = of_forms["kernel"].nbytes
    about = dict(size=size, format=name, group=group, rows=m, bytes=nbytes, error=error)
    return about | dict(times=times)


@functools.lru_cache(maxsize=2)
def weights(size: Size, name: str, group: int | None) -> dict[str, Any]:
    """Returns a random weight as each formulation takes it."""
    return forms(jax.random.normal(jax.random.key(0), size, jnp.bfloat16), name, group)


def forms(w: jax.Array, name: str, group: int | None) -> dict[str, Any]:
    """Returns a weight as each formulation takes it: dense, quantized, or as a `QArray` `[1, ...]`."""
    q = hki.QuantizedMatrix.quantize(w, name, group)
    found = dict(dense=w, kernel=q, blocks=q, fusion=q)
    if tokamax is None or name not in IN_QWIX:
        return found
    tiles = {} if group is None else {0: group}
    of_qwix = qwix.quantize(w, IN_QWIX[name], channelwise_axes=[1], tiled_axes=tiles)
    return found | dict(tokamax=jax.tree.map(lambda a: a[None], of_qwix))


def number_of_weights(nbytes: int, m: int) -> int:
    """Returns a number of weights beyond the caches' capacity, or 4 if computing outlasts reading."""
    return max(4, min(32, math.ceil((1 << 28) / nbytes))) if m < 512 else 4


FORMULATIONS: dict[str, Callable[..., jax.Array]] = dict(
    dense=jnp.matmul,
    kernel=hki.use_implicit_args(lambda x, q: x @ q),
    blocks=hki.use_implicit_args(lambda x, q: x @ q),
    fusion=lambda x, q: x @ hki.materialize(q),
    tokamax=lambda x, q: tokamax.ragged_dot(x, q, jnp.full(1, x.shape[0], jnp.int32)),
)


def program(name: str, w: Any, x: jax.Array) -> tuple[Callable[[], Any], int]:
    """Returns a program with a product for each of several copies of a weight, and their number."""
    run, count = compiled(name, w, x)
    zeros = [jnp.zeros((), leaf.dtype) for leaf in jax.tree.leaves(w)]
    leaves = jax.tree.leaves(w)
    copies = [[a + zero for a, zero in zip(leaves, zeros, strict=True)] for _ in range(count)]
    return lambda: run(x, copies), count


def compiled(name: str, w: Any, x: Any) -> tuple[Callable[..., Any], int]:
    """Compiles a formulation, and returns it with the number of weights; for arrays or their shapes."""
    with mock.patch.object(pallas, "available", lambda: name == "kernel" and pallas.supported()):
        run, count = traced(name, w, x)
        return run.lower().compile(), count


def traced(name: str, w: Any, x: Any) -> tuple[jax.stages.Traced, int]:
    """Traces a formulation, and returns it with the number of weights."""
    # Leaves, not implicit arrays: passing these is not part of a product.
    leaves, treedef = jax.tree.flatten(w)
    count = number_of_weights(
        sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves), x.shape[0]
    )
    product = FORMULATIONS[name]

    def run(x: jax.Array, copies: Any) -> list[jax.Array]:
        return [product(x, treedef.unflatten(leaves)) for leaves in copies]

    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
    of_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.jit(run).trace(of_x, [abstract] * count), count


def in_turns(functions: Sequence[Callable[[], Any]], turns: int) -> list[list[float]]:
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
    """Returns Markdown tables by their names in `benchmarks/results/quantized_matmul.md`."""
    about = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    measured = [
        "dense, µs",
        "kernel",
        "XLA, in blocks",
        "XLA, fused",
        "tokamax",
        "share of bandwidth",
    ]
    text = (
        f"Measured on {about['date']}: {about['device']}; {versions}. {results['turns']} turns. "
        f"A copy runs at {results['bandwidth'] / 1e9:.0f} GB/s. How many times as fast as dense "
        "bfloat16, and the share of the copy's bandwidth that quantized bytes are read at:\n\n"
    )
    lines = [_line(case, results["bandwidth"]) for case in results["cases"]]
    return dict(gpu=text + markdown.table(["weight", "size", "rows", *measured], lines))


def _line(case: Results, bandwidth: float) -> list[str]:
    group = "per channel" if case["group"] is None else f"groups of {case['group']}"
    times = case["times"]
    others = ("kernel", "blocks", "fusion", "tokamax")
    ratios = [f"{_ratio(times, name):.2f}" if name in times else "" for name in others]
    dense, kernel = (statistics.median(times[name]) for name in ("dense", "kernel"))
    share = f"{case['bytes'] / kernel / bandwidth:.2f}"
    size = " × ".join(map(str, case["size"]))
    weight = f"{case['format']}, {group}"
    return [weight, size, str(case["rows"]), f"{dense * 1e6:.1f}", *ratios, share]


def _ratio(times: dict[str, list[float]], name: str) -> float:
    return statistics.median(a / b for a, b in zip(times["dense"], times[name], strict=True))


if __name__ == "__main__":
    app.run(main)
