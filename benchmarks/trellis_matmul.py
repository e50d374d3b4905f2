"""Times products with trellis codes beside dense float32 and int4, on one pinned thread.

    taskset -c 0 python -m benchmarks.trellis_matmul
    HAIKU_IMPLICIT_NATIVE_TARGET=x86-64-v3 taskset -c 0 python -m benchmarks.trellis_matmul

Each run adds the instruction set that it is for to the recorded results, and renews the table in
docs/quantization_speed.md. Times are of the processor, the least of many calls, which take turns: the
machine may be busy. Calls follow each other, so that all weights but the dense one stay in a cache of
some megabytes. Trellis codes are measured with their rotation and scales, as `quantize_params` makes
them.
"""

import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from benchmarks.machine import about_this_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "trellis_matmul.json"
DOCUMENT = ROOT / "docs" / "quantization_speed.md"

SIZE = 4096, 4096
ROWS = 1, 4, 8, 16, 32
BITS = 2, 3, 4
ACTIVATIONS = None, "int8"

TRELLIS_TURNS = flags.DEFINE_integer("trellis_turns", 20, "How many turns are taken.", 1)
TRELLIS_CALLS = flags.DEFINE_integer("trellis_calls", 10, "How often a product runs in a turn.", 1)

Results = dict[str, Any]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[os.environ.get("HAIKU_IMPLICIT_NATIVE_TARGET", "native")] = measure()
    result_files.write(results, RESULTS)
    markdown.replace([DOCUMENT], tables(results))
    print(table(results))


def measure() -> Results:
    """Measures the milliseconds of each product, by the number of rows and the weight."""
    w = jax.random.normal(jax.random.key(0), SIZE)
    weights: dict[str, Any] = {"dense": w}
    for activation in ACTIVATIONS:
        formats: dict[str, dict[str, Any]] = {"int4": dict(dtype="int4", group_size=64)}
        formats |= {f"trellis{bits}": dict(dtype=f"trellis{bits}") for bits in BITS}
        for name, options in formats.items():
            quantized = hki.quantize_params({"linear": {"w": w}}, activation=activation, **options)
            weights[_kind(name, activation)] = quantized["linear"]["w"]
    found = {}
    for rows in ROWS:
        x = jax.random.normal(jax.random.key(1), (rows, SIZE[0]))
        functions = [_program(w, x) for w in weights.values()]
        found[str(rows)] = dict(zip(weights, in_turns(functions), strict=True))
        print(rows, found[str(rows)], flush=True)
    return dict(environment=about_this_machine("jax", "jaxlib", "numpy"), milliseconds=found)


def _program(w: Any, x: jax.Array) -> Callable[[], Any]:
    """Returns a program of one product; its call does not flatten the weight."""
    leaves, treedef = jax.tree.flatten(w)
    multiply = hki.use_implicit_args(jnp.matmul)
    run = jax.jit(lambda x, *leaves: multiply(x, treedef.unflatten(leaves)))
    compiled = run.lower(x, *leaves).compile()
    return lambda: compiled(x, *leaves)


def in_turns(functions: Sequence[Callable[[], Any]]) -> list[float]:
    """Returns the least processor time of each function in milliseconds: other load only adds."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(TRELLIS_TURNS.value):
        for function, own in zip(functions, times, strict=True):
            own += [_milliseconds(function) for _ in range(TRELLIS_CALLS.value)]
    return [round(min(own), 4) for own in times]


def _milliseconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(function())
    return (time.process_time() - start) * 1e3


def _kind(name: str, activation: str | None) -> str:
    return f"{name}, {activation}" if activation else name


def tables(results: Results) -> dict[str, str]:
    """Returns Markdown texts by their names in `docs/quantization_speed.md`."""
    about = results["native"]["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    environment = f"Measured on {about['date']}: {about['cpu']}; {versions}."
    return {"trellis": table(results), "trellis environment": environment}


def table(results: Results) -> str:
    """Returns the Markdown table of all instruction sets."""
    names = {"native": "AVX-512", "x86-64-v3": "AVX2"}
    lines = []
    for target, measured in results.items():
        for rows, found in measured["milliseconds"].items():
            line = [f"{rows}, {names.get(target, target)}", f"{found['dense']:.2f}"]
            for activation in ACTIVATIONS:
                line.append(f"{found[_kind('int4', activation)]:.2f}")
                times = [found[_kind(f"trellis{bits}", activation)] for bits in BITS]
                line.append(", ".join(f"{x:.2f}" for x in times))
            lines.append(line)
    bits = ", ".join(map(str, BITS))
    header = ["rows", "dense", "int4", f"{bits} bits", "int4, int8", f"{bits} bits, int8"]
    return markdown.table(header, lines)


if __name__ == "__main__":
    app.run(main)
