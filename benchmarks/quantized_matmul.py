"""Times products with quantized weights: this library, dense float32, and qwix if it is installed.

    python -m benchmarks.quantized_matmul                # everything: results, tables and plot
    python -m benchmarks.quantized_matmul --sizes=576x1536 --rows=1,8 --output=results.json
    python -m benchmarks.quantized_matmul --report_only  # tables and plot from the recorded results

Run it from the root of the repository, with nothing else running on the machine. Each case takes turns
with the dense product, and its time is the fastest call's: other load on the machine only adds.

A program multiplies with several small weights one after another, so that the dense weights come from
memory, as in a model, and the call of the program is a small part of the time.
"""

import concurrent.futures
import json
import os
import pathlib
import statistics
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
from benchmarks.machine import about_this_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quantized_matmul.json"
DOCUMENTS = (
    ROOT / "docs" / "quantization_speed.md",
    ROOT / "benchmarks" / "results" / "quantized_matmul.md",
)
PLOT = ROOT / "docs" / "images" / "quantized_matmul.png"

FORMATS = ("int8", "uint8", "fp8_e4m3", "fp8_e5m2", "int4", "uint4", "nf4", "fp4")
GROUPS = (None, 128, 32)
# Also timed with activations rounded to 8 bits: the formats with an integer kernel.
ROUNDED = ("int8", "int4", "fp4")
# The dense weights of one program take about this many bytes.
IN_MEMORY = 1 << 26
# Cases for XLA's formulation and for qwix: one size only, since they are slow.
OTHERS = (
    ("int8", None),
    ("fp8_e4m3", None),
    ("int4", None),
    ("int4", 128),
    ("int4", 32),
    ("nf4", 128),
)
OTHERS_SIZE, OTHERS_ROWS = (4096, 4096), (1, 8, 128)

SIZES = flags.DEFINE_list(
    "sizes", ["576x1536", "2048x2048", "4096x4096", "4096x11008"], "Weights [inputs x outputs]."
)
ROWS = flags.DEFINE_list("rows", ["1", "2", "8", "32", "128", "512"], "Rows of activations.")
TURNS = flags.DEFINE_integer("turns", 3, "How often each time is taken.", 1)
SECONDS = flags.DEFINE_float("seconds", 0.02, "For how long a product is repeated in a turn.")
OUTPUT = flags.DEFINE_string("output", str(RESULTS), "The file that the results are written to.")
REPORT = flags.DEFINE_bool("report", True, "Whether to renew the tables and the plot in docs/.")
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only tables and plot, from --output.")

Results = dict[str, Any]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    path = pathlib.Path(OUTPUT.value)
    if not REPORT_ONLY.value:
        result_files.write(measure(), path)
        print(f"wrote {path}")
    if REPORT.value:
        results = json.loads(path.read_text())
        markdown.replace(DOCUMENTS, tables(results))
        draw(results)


# --- measuring -----------------------------------------------------------------------------------


def measure() -> Results:
    """Measures all times, in seconds."""
    sizes = [tuple(map(int, size.split("x"))) for size in SIZES.value]
    rows = [int(m) for m in ROWS.value]
    bandwidth = memory_bandwidth()
    cases = [case for size in sizes for case in _cases(size, rows)]
    others = list(_others(OTHERS_SIZE, OTHERS_ROWS)) if OTHERS_SIZE in sizes else []
    return dict(
        environment=about_this_machine("jax", "jaxlib", "haiku-implicit", "qwix", "numpy"),
        turns=TURNS.value,
        bandwidth=bandwidth,
        cases=cases,
        others=others,
    )


def _cases(size: tuple[int, ...], rows: Sequence[int]) -> Iterator[Results]:
    w = jax.random.normal(jax.random.key(0), size)
    count = max(1, round(IN_MEMORY / w.nbytes))
    dense_weights = _copies(w, count)
    xs = {m: jax.random.normal(jax.random.key(1), (m, size[0])) for m in rows}
    kinds = [(name, group) for name in FORMATS for group in GROUPS]
    for name, group in kinds:
        if group is not None and size[0] % group:
            continue
        q = hki.QuantizedMatrix.quantize(w, name, group)
        for activation in (None, "int8,groups") if name in ROUNDED else (None,):
            weights = _copies(q.with_activation(activation), count)
            for m, x in xs.items():
                ours, dense = _in_turns([_program(weights, x), _program(dense_weights, x)])
                case = dict(size=size, format=name, group=group, activation=activation, rows=m)
                print(f"{case}: {_ratio(dense, ours):.2f}", flush=True)
                yield dict(case, bytes=count * q.nbytes, count=count, ours=ours, dense=dense)


def _others(size: tuple[int, ...], rows: Sequence[int]) -> Iterator[Results]:
    w = jax.random.normal(jax.random.key(0), size)
    for name, group in OTHERS:
        q = hki.QuantizedMatrix.quantize(w, name, group)
        for m in rows:
            x = jax.random.normal(jax.random.key(1), (m, size[0]))
            functions = dict(
                dense=_program([w], x), ours=_program([q], x), xla=_without_kernel(q, x)
            )
            if (theirs := _qwix(w, x, name, group)) is not None:
                functions["qwix"] = theirs
            times = dict(zip(functions, _in_turns(list(functions.values())), strict=True))
            yield dict(size=size, format=name, group=group, rows=m, times=times)


def _copies(w: Any, count: int) -> list[Any]:
    return [jax.tree.map(jnp.copy, w) for _ in range(count)]


def _program(weights: Sequence[Any], x: jax.Array) -> Callable[[], Any]:
    """Returns a program of products with all weights, each of which waits for the one before."""
    leaves, treedef = jax.tree.flatten(weights)  # once: flattening is not part of a product

    @hki.use_implicit_args
    def products(weights: Sequence[Any], x: jax.Array) -> list[jax.Array]:
        found: list[jax.Array] = []
        for w in weights:
            x = x + 0 * found[-1][:, :1] if found else x
            found.append(x @ w)
        return found

    run = jax.jit(lambda x, *leaves: products(treedef.unflatten(leaves), x))
    compiled = run.lower(x, *leaves).compile()
    return lambda: compiled(x, *leaves)


def _without_kernel(q: hki.QuantizedMatrix, x: jax.Array) -> Callable[[], Any]:
    jax.clear_caches()
    os.environ["HAIKU_IMPLICIT_NATIVE"] = "0"
    try:
        return _program([q], x)
    finally:
        del os.environ["HAIKU_IMPLICIT_NATIVE"]
        jax.clear_caches()


def _qwix(w: jax.Array, x: jax.Array, name: str, group: int | None) -> Callable[[], Any] | None:
    """Returns the same weight-only product in qwix, or None without qwix."""
    try:
        import qwix
    except ImportError:
        return None
    dtype = {"fp8_e4m3": "float8_e4m3fn"}.get(name, name)
    tiles = None if group is None else {0: group}
    q = jax.jit(lambda w: qwix.quantize(w, dtype, channelwise_axes=(1,), tiled_axes=tiles))(w)
    leaves, treedef = jax.tree.flatten(q)
    numbers = (((1,), (0,)), ((), ()))
    run = jax.jit(lambda x, *leaves: qwix.dot_general(x, treedef.unflatten(leaves), numbers))
    compiled = run.lower(x, *leaves).compile()
    return lambda: compiled(x, *leaves)


def _in_turns(functions: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Returns the seconds of each function's fastest call, for each turn."""
    calls = []
    for function in functions:
        jax.block_until_ready(function())
        calls.append(max(1, int(SECONDS.value / _seconds(function))))
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(TURNS.value):
        for function, n, found in zip(functions, calls, times, strict=True):
            found.append(min(_seconds(function) for _ in range(n)))
    return times


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def memory_bandwidth(size: int = 1 << 29) -> float:
    """Measures the bytes per second that all cores together read from memory."""
    parts = np.array_split(np.ones(size // 8, np.int64), os.cpu_count() or 1)
    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(10):
            start = time.perf_counter()
            list(pool.map(np.maximum.reduce, parts))
            best = max(best, size / (time.perf_counter() - start))
    return best


# --- reporting -----------------------------------------------------------------------------------


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return min(a) / min(b)


def _to_reading(case: Results, bandwidth: float) -> float:
    """Returns the time at one row, relative to the time of reading the quantized weight."""
    return min(case["ours"]) / (case["bytes"] / bandwidth)


def _kind(case: Results) -> str:
    group = "per channel" if case["group"] is None else f"groups of {case['group']}"
    return f"{case['format']}, {group}"


def tables(results: Results) -> dict[str, str]:
    """Returns Markdown tables by their names in `docs/quantization_speed.md`."""
    about = results["environment"]
    cases = [c for c in results["cases"] if c["activation"] is None]
    rows = sorted({c["rows"] for c in cases})
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    found = dict(
        environment=(
            f"Measured on {about['date']}: {about['cpu']}, {about['cores']} cores; {versions}. "
            f"{results['turns']} turns. Memory is read at {results['bandwidth'] / 1e9:.1f} GB/s."
        ),
        summary=markdown.table(
            ["rows", "fastest", "median", "slowest", "the slowest one"],
            [_summary(m, [c for c in cases if c["rows"] == m]) for m in rows],
        ),
        rounded=markdown.table(
            ["weight", "size", *map(str, rows)],
            _by_rows([c for c in results["cases"] if c["activation"] is not None], rows),
        ),
        others=markdown.table(
            ["weight", "rows", "dense, ms", "kernel", "XLA alone", "qwix"],
            [_other(case) for case in results["others"]],
        ),
    )
    for size in dict.fromkeys(tuple(c["size"]) for c in cases):
        of_size = [c for c in cases if tuple(c["size"]) == size]
        lines = []
        for kind in dict.fromkeys(map(_kind, of_size)):
            by_rows = {c["rows"]: c for c in of_size if _kind(c) == kind}
            ratios = [f"{_ratio(by_rows[m]['dense'], by_rows[m]['ours']):.2f}" for m in rows]
            reading = _to_reading(by_rows[1], results["bandwidth"]) if 1 in by_rows else 0
            lines.append([kind, *ratios, f"{reading:.2f}"])
        header = ["weight", *map(str, rows), "1, to reading"]
        found["x".join(map(str, size))] = markdown.table(header, lines)
    return found


def _by_rows(cases: Sequence[Results], rows: Sequence[int]) -> list[list[str]]:
    """Returns a line for each weight and size: the speed relative to dense, by the number of rows."""
    lines: dict[Any, dict[int, str]] = {}
    for c in cases:
        key = _kind(c), f"{c['size'][0]} × {c['size'][1]}"
        lines.setdefault(key, {})[c["rows"]] = f"{_ratio(c['dense'], c['ours']):.2f}"
    return [[*key, *(found[m] for m in rows)] for key, found in lines.items()]


def _summary(m: int, cases: Sequence[Results]) -> list[str]:
    ratios = sorted(
        (_ratio(c["dense"], c["ours"]), f"{_kind(c)}, {c['size'][0]} × {c['size'][1]}")
        for c in cases
    )
    middle = statistics.median(r for r, _ in ratios)
    return [str(m), f"{ratios[-1][0]:.2f}", f"{middle:.2f}", f"{ratios[0][0]:.2f}", ratios[0][1]]


def _other(case: Results) -> list[str]:
    times = case["times"]
    ratios = [
        f"{_ratio(times['dense'], times[name]):.3f}" if name in times else ""
        for name in ("ours", "xla", "qwix")
    ]
    dense = min(times["dense"]) * 1e3
    return [_kind(case), str(case["rows"]), f"{dense:.2f}", *ratios]


def draw(results: Results) -> None:
    """Plots the speed relative to dense by the number of rows, for each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = [c for c in results["cases"] if c["activation"] is None]
    sizes = list(dict.fromkeys(tuple(c["size"]) for c in cases))
    shown = {
        ("int8", None): "#1f6fb2",
        ("fp8_e4m3", None): "#b8433f",
        ("int4", 128): "#333333",
        ("nf4", 32): "#d07c1f",
    }
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(3 * len(sizes), 3), sharey=True, layout="constrained", squeeze=False
    )
    for ax, size in zip(axes[0], sizes, strict=True):
        for (name, group), color in shown.items():
            found = [
                c
                for c in cases
                if (tuple(c["size"]), c["format"], c["group"]) == (size, name, group)
            ]
            if found:
                ratios = [_ratio(c["dense"], c["ours"]) for c in found]
                ax.plot([c["rows"] for c in found], ratios, color=color, marker="o", markersize=3.5,
                        label=_kind(found[0]))  # fmt: skip
        ax.axhline(1, color="#9a9a9a", linewidth=1)
        ax.set_title(f"{size[0]} × {size[1]}", fontsize=10)
        ax.set(xscale="log", yscale="log", xlabel="rows of activations")
        ax.set_xticks(sorted({c["rows"] for c in cases}))
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.tick_params(labelsize=8)
        ax.minorticks_off()
        ax.set_yticks([0.5, 1, 2, 4, 8, 16])
        ax.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("times as fast as dense float32")
    axes[0][-1].legend(frameon=False, fontsize=7)
    figure.savefig(PLOT, dpi=160)
    plt.close(figure)
    print(f"wrote {PLOT}")


if __name__ == "__main__":
    app.run(main)
