"""Counts costs of programs that do not depend on the machine's load, and compares with a baseline.

    python -m benchmarks.counts           # compares; fails if anything costs more
    python -m benchmarks.counts --renew   # rewrites the baseline

Run it from the root of the repository. For each program of `benchmarks.counted_programs` it counts

* `equations` of its jaxpr, including equations of loops and inner functions;
* `operations` of the lowered module (StableHLO), `instructions` of the compiled one (HLO), and calls of
  native kernels in it;
* `flops` and `temporary_bytes`, as XLA counts them (it does not see into native kernels);
* `traces`: the runs of the user's function in two calls with different values, and `compilations`.

and, for programs on eight devices of this CPU, `bytes_sent` by each, as in `benchmarks.collectives`.

JAX and XLA make different programs in different versions, so the baseline names the versions that made
it. With other versions only the counts that hold for all of them are compared: traces, compilations,
and LoRA against LoRA by hand. A lower count is reported, and does not fail.
"""

import functools
import json
import os
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
from absl import app, flags
from jax.extend.core import ClosedJaxpr, Jaxpr
from tqdm import tqdm

from benchmarks import collectives_text, result_files
from benchmarks.machine import about_this_machine
from haiku_implicit.quantized.cpu import build

BASELINE = pathlib.Path(__file__).resolve().parent / "results" / "counts.json"
COMMAND = "python -m benchmarks.counts --renew"
# The options that compile fastest; the passes over HLO, which decide the counts, stay the same.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)

RENEW = flags.DEFINE_bool("renew", False, "Whether to write the baseline anew.")
ONLY = flags.DEFINE_string("only", "", "Only programs that this regular expression is found in.")
COUNTS_FILE = flags.DEFINE_string("counts_file", str(BASELINE), "The file with the baseline.")

# Counts that are the same on all versions of JAX and XLA.
ON_ALL_VERSIONS = ("traces", "compilations")
VERSIONS = ("jax", "jaxlib", "dm-haiku", "haiku-implicit", "numpy", "optax")
DECIDING = ("jax", "jaxlib", "dm-haiku")  # a full comparison needs equal versions of these
COMPILED = "/jax/core/compile/backend_compile_duration"

Counts = dict[str, dict[str, int]]


class Difference(NamedTuple):
    """A count that differs from the baseline (None: missing on one side)."""

    program: str
    count: str
    baseline: int | None
    now: int | None

    @property
    def worse(self) -> bool:
        """Whether the gate fails on it: the count is higher, or not in the baseline."""
        return self.baseline is None or self.now is None or self.now > self.baseline


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if RENEW.value and ONLY.value:
        raise app.UsageError("--renew writes all programs: expected no --only beside it")
    os.environ["XLA_FLAGS"] = XLA_FLAGS  # JAX reads them when it first looks for devices
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    if not build.available():
        sys.exit(
            "counts are those with native kernels: expected a C++ compiler (see docs/sharp_edges.md)"
        )
    now, twins = count_all(ONLY.value)
    path = pathlib.Path(COUNTS_FILE.value)
    if RENEW.value:
        versions = about_this_machine(*VERSIONS)["versions"]
        result_files.write(dict(versions=versions, counts=now), path)
        print(f"wrote {path}: {len(now)} programs")
        return
    text, failed = report(json.loads(path.read_text()), now, twins, bool(ONLY.value))
    print(text)
    sys.exit(1 if failed else 0)


# --- comparing -----------------------------------------------------------------------------------


def report(
    recorded: Mapping[str, Any], now: Counts, twins: Mapping[str, str], partial: bool = False
) -> tuple[str, bool]:
    """Returns the gate's report, and whether it fails.

    Args:
      recorded: the baseline file: `versions` and `counts`.
      now: the current counts.
      twins: for some programs, the name of the program that bounds their counts.
      partial: whether programs of the baseline may be missing in `now`.
    """
    baseline: Counts = recorded["counts"]
    lines = []
    installed = about_this_machine(*DECIDING)["versions"]
    other = {k: v for k, v in installed.items() if recorded["versions"].get(k) != v}
    if other:
        made = ", ".join(f"{k} {recorded['versions'].get(k)}" for k in other)
        here = ", ".join(f"{k} {v}" for k, v in other.items())
        lines.append(
            f"The baseline was made with {made}; here is {here}. Compared are only "
            f"{' and '.join(ON_ALL_VERSIONS)}, and LoRA with LoRA by hand. For all counts, install "
            f"these versions, or move the baseline: {COMMAND}"
        )
        baseline, now_too = _only(baseline), _only(now)
    else:
        now_too = now
    if partial:
        baseline = {k: v for k, v in baseline.items() if k in now}
    found = differences(baseline, now_too)
    worse = [d for d in found if d.worse] + above_twins(now, twins)
    better = [d for d in found if not d.worse]
    if worse:
        lines += ["Costs more than the baseline, or is not in it:", *table(worse)]
        lines.append(f"If it has to: {COMMAND}, and say why in the commit.")
    if better:
        lines += ["Better than the baseline:", *table(better), f"Renew it, to keep it: {COMMAND}"]
    if not worse:
        lines.append(f"No cost is above the baseline, of {len(now)} programs.")
    return "\n".join(lines), bool(worse)


def differences(baseline: Counts, now: Counts) -> list[Difference]:
    """Returns all counts that differ, in the baseline's order."""
    return [
        Difference(program, count, was, is_now)
        for program in dict.fromkeys([*baseline, *now])
        for count in dict.fromkeys([*baseline.get(program, ()), *now.get(program, ())])
        if (was := baseline.get(program, {}).get(count))
        != (is_now := now.get(program, {}).get(count))
    ]


def above_twins(now: Counts, twins: Mapping[str, str]) -> list[Difference]:
    """Returns counts above the counts of the same program by hand, which serve as the baseline."""
    return [
        Difference(f"{program} (to {twin})", count, now[twin][count], value)
        for program, twin in twins.items()
        if program in now and twin in now
        for count, value in now[program].items()
        if value > now[twin].get(count, value)
    ]


def table(rows: Sequence[Difference]) -> list[str]:
    """Returns lines with aligned columns."""
    text = [("program", "count", "baseline", "now", "")]
    for row in rows:
        numbers = ("-" if n is None else f"{n:,}" for n in (row.baseline, row.now))
        change = f"{row.now / row.baseline - 1:+.1%}" if row.baseline and row.now else ""
        text.append((row.program, row.count, *numbers, change))
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return [
        "  "
        + "  ".join((str.ljust, str.rjust)[i > 1](cell, widths[i]) for i, cell in enumerate(row))
        for row in text
    ]


def _only(counts: Counts) -> Counts:
    return {
        program: {k: v for k, v in own.items() if k in ON_ALL_VERSIONS}
        for program, own in counts.items()
    }


# --- counting ------------------------------------------------------------------------------------


def count_all(pattern: str = "") -> tuple[Counts, dict[str, str]]:
    """Returns the counts of all programs whose names match a regular expression, and their twins."""
    from benchmarks import counted_programs

    counts: Counts = {}
    twins: dict[str, str] = {}
    makers = counted_programs.all_programs()
    names = [name for name in makers if re.search(pattern, name)]
    for name in tqdm(names, "counting", file=sys.stderr):
        program = makers[name]()
        counts[name] = {}
        for way in program.counted:
            counts[name].update(WAYS[way](program.fun, program.arguments))
        if program.twin:
            twins[name] = program.twin
    return counts, twins


def of_program(fun: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, int]:
    """Returns the sizes of a program at each stage, and XLA's estimates of its costs."""
    traced = jax.jit(lambda *args: fun(*args)).trace(*arguments)
    lowered = traced.lower()
    compiled = lowered.compile()
    text = compiled.as_text()
    return dict(
        equations=equations(traced.jaxpr.jaxpr),
        operations=operations(lowered),
        instructions=len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.M)),
        kernels=collectives_text.calls(text),
        flops=int(compiled.cost_analysis().get("flops", 0)),
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )


def equations(jaxpr: Jaxpr) -> int:
    """Counts the equations of a jaxpr, including those inside its equations."""
    return sum(1 + sum(map(equations, _jaxprs_in(list(eqn.params.values())))) for eqn in jaxpr.eqns)


def operations(lowered: Any) -> int:
    """Counts the operations of a lowered program: StableHLO's operations and calls."""
    return len(re.findall(r"^\s+%\S+ = ", lowered.as_text(), re.MULTILINE))


def _jaxprs_in(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _jaxprs_in(part)


def sent(fun: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, int]:
    """Returns the bytes that devices send each other: results of collectives, for each device."""
    text = jax.jit(fun).lower(*arguments).compile().as_text()
    return dict(bytes_sent=collectives_text.sent(text))


def in_calls(
    fun: Callable[..., Any], arguments: Sequence[Any], eager: bool = False
) -> dict[str, int]:
    """Counts the traces and compilations of a function in two calls, starting with empty caches.

    Args:
      fun: a function that is not jitted.
      arguments: the arguments of the first call; the second call gets copies.
      eager: whether the calls are without `jit`.
    """
    from benchmarks import counted_programs

    happened: Counter[str] = Counter()

    def count_module(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        top = type(context.module) in counted_programs.TOP and context.method_name == "__call__"
        happened["traces"] += top
        return next_fun(*args, **kwargs)

    def count_compiled(event: str, duration: float, **_: Any) -> None:
        happened["compilations"] += event == COMPILED

    copies = jax.tree.map(lambda x: x.copy(), arguments)
    jax.clear_caches()
    called = fun if eager else jax.jit(lambda *args: fun(*args))
    jax.monitoring.register_event_duration_secs_listener(count_compiled)
    with hk.intercept_methods(count_module):
        for given in (arguments, copies):
            jax.block_until_ready(called(*given))
    counted = dict(happened)  # JAX cannot remove a single listener
    return dict(traces=counted.get("traces", 0), compilations=counted.get("compilations", 0))


WAYS: dict[str, Callable[..., dict[str, int]]] = {
    "program": of_program,
    "calls": in_calls,
    "eager calls": functools.partial(in_calls, eager=True),
    "sent": sent,
}


if __name__ == "__main__":
    app.run(main)
