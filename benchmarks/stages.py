"""Times the stages of one training step, of several implementations in turns.

Implementations take turns (A, B, C, A, B, C, ...) and ratios are within a turn, so that a
machine that is busy for a while slows both sides of a ratio.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from benchmarks import implementations, models

LEARNING_RATE = 1e-3

# Without the pass that fuses elementwise operations. On the CPU it makes each layer normalization, and
# each gradient of one, recompute the sum of all earlier layers' outputs: time and memory to
# compile grow with the square of the depth, and the step gets slower (docs/benchmarks.md).
UNFUSED = {"xla_disable_hlo_passes": "fusion"}

Record = dict[str, Any]


def measure(
    sizes: models.Sizes, names: list[str], repeats: int, runs: int, fuse: bool = True
) -> dict[str, Record]:
    """Times the stages of each implementation, and counts the size of its program.

    Args:
      sizes: the model.
      names: keys of `implementations.available()`.
      repeats: how often tracing and lowering are timed.
      runs: how often the compiled step is timed.
      fuse: whether to use XLA's fusion pass, as by default.

    Returns:
      For each name a record: seconds by stage (`trace`, `lower`, `run`: a list with one value for
      each turn; `compile`: a list of one), numbers of equations, HLO lines, flops and temporary bytes,
      and the loss.
    """
    tokens, params = example(sizes)
    records: dict[str, Record] = {name: dict(trace=[], lower=[]) for name in names}
    for turn in range(-1, repeats):  # the first turn, which imports and warms up, is not counted
        for name in in_turn(names, turn):
            lowered = _trace_and_lower(name, sizes, params, tokens, records[name])
            if turn == repeats - 1:
                records[name]["hlo_lines"] = lowered.as_text().count("\n")
                options = {} if fuse else UNFUSED
                _compile(name, lowered, options, params, tokens, records[name])
        if turn < 0:
            records = {name: dict(trace=[], lower=[]) for name in names}
    _run(records, names, runs)
    return records


def _run(records: dict[str, Record], names: list[str], runs: int) -> None:
    """Times the compiled steps, and compares their losses."""
    steps = {name: records[name].pop("step") for name in names}
    _check_equal(records)
    for turn in range(runs):
        for name in in_turn(names, turn):
            records[name].setdefault("run", []).append(_seconds(steps[name]))


def example(sizes: models.Sizes) -> tuple[jax.Array, hk.Params]:
    """Returns tokens, and parameters of the model by hand, moved away from initial zeros."""
    key = jax.random.key(0)
    tokens = jax.random.randint(key, (sizes.batch, sizes.length), 0, sizes.vocabulary)
    init = models.transformed(sizes, by_hand=True).init

    @jax.jit
    def moved(key: jax.Array, tokens: jax.Array) -> hk.Params:
        move = lambda x: x + 0.01 * jnp.cos(jnp.arange(x.size)).reshape(x.shape)  # noqa: E731
        return jax.tree.map(move, init(key, tokens))

    return tokens, moved(key, tokens)


def training_step(loss: implementations.Loss) -> Callable[..., Any]:
    """Returns a step of gradient descent on the trainable parameters."""

    def step(trainable: hk.Params, frozen: hk.Params, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(trainable, frozen, tokens)
        return value, jax.tree.map(lambda p, g: p - LEARNING_RATE * g, trainable, grads)

    return step


def _trace_and_lower(
    name: str, sizes: models.Sizes, params: hk.Params, tokens: jax.Array, record: Record
) -> Any:
    """Traces and lowers as a new process would: with new functions and empty caches."""
    step = jax.jit(training_step(implementations.available()[name](sizes)))
    arguments = implementations.arguments(name, params)
    jax.clear_caches()
    with no_garbage_collection():
        start = time.perf_counter()
        traced = step.trace(*arguments, tokens)
        between = time.perf_counter()
        lowered = traced.lower()
        end = time.perf_counter()
    record["trace"].append(between - start)
    record["lower"].append(end - between)
    record["equations"] = len(traced.jaxpr.eqns)
    return lowered


def _compile(
    name: str, lowered: Any, options: dict[str, str], params: hk.Params, tokens: jax.Array,
    record: Record,
) -> None:  # fmt: skip
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    record["compile"] = [time.perf_counter() - start]
    record["flops"] = compiled.cost_analysis()["flops"]
    record["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    arguments = (*implementations.arguments(name, params), tokens)
    record["step"] = lambda: jax.block_until_ready(compiled(*arguments))
    record["loss"] = float(record["step"]()[0])


def _check_equal(records: dict[str, Record]) -> None:
    """Raises unless all implementations computed the same: otherwise the comparison is worthless."""
    for name, record in records.items():
        expected = records.get("by_hand", record)["loss"]
        if name != "dense" and not np.isclose(record["loss"], expected, rtol=1e-5):
            raise AssertionError(f"{name} has loss {record['loss']}, by hand it is {expected}")


def trace_again(sizes: models.Sizes, names: list[str], repeats: int) -> dict[str, Record]:
    """Times tracing a new loss around a model that this process has traced before.

    JAX's caches are not cleared, as in a process that trains the same model twice, or that evaluates
    it after training.

    Returns:
      For each name the seconds of processor time for the loss alone (`forward`) and for the loss with
      its gradient (`gradient`): a list with one value for each turn.
    """
    tokens, params = example(sizes)
    losses = {name: implementations.available()[name](sizes) for name in names}
    transforms = dict(forward=lambda loss: loss, gradient=jax.value_and_grad)
    records: dict[str, Record] = {}
    for turn in range(-1, repeats):  # the first turn, which fills the caches, is not counted
        if turn <= 0:
            records = {name: {kind: [] for kind in transforms} for name in names}
        for kind, transform in transforms.items():
            for name in in_turn(names, turn):
                # A new function, since JAX caches traces by function.
                step = jax.jit(transform(lambda *args, name=name: losses[name](*args)))
                arguments = implementations.arguments(name, params)
                with no_garbage_collection():
                    start = time.process_time()
                    step.trace(*arguments, tokens)
                    records[name][kind].append(time.process_time() - start)
    return records


def eager_calls(sizes: models.Sizes, calls: int) -> Record:
    """Counts the runs of the wrapped model's Python code in repeated eager calls, and times the calls.

    Returns:
      `traces`: how often the function of the model ran in `calls` calls after the first; `library`
      and `by_hand`: the seconds of each of these calls.
    """
    traces = 0

    def counted(tokens: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return models.Transformer(models.Linears(sizes))(tokens)

    tokens, params = example(sizes)
    trainable, frozen = implementations.split(params)
    adapted = implementations.with_lora(trainable, frozen, sizes)
    library = hki.transform_implicit(hk.without_apply_rng(hk.transform(counted))).apply
    by_hand = models.transformed(sizes, by_hand=True).apply
    functions = dict(
        library=lambda: library(adapted, tokens), by_hand=lambda: by_hand(params, tokens)
    )
    for fun in functions.values():
        jax.block_until_ready(fun())
    traces = 0
    seconds: Record = {name: [] for name in functions}
    for turn in range(calls):
        for name in in_turn(list(functions), turn):
            seconds[name].append(
                _seconds(lambda name=name: jax.block_until_ready(functions[name]()))
            )
    return dict(calls=calls, traces=traces, **seconds)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects garbage, and disables collection within the context."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turn(names: list[str], turn: int) -> list[str]:
    """Returns the names, starting with a different one in each turn."""
    shift = turn % len(names)
    return names[shift:] + names[:shift]


def _seconds(fun: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fun()
    return time.perf_counter() - start
