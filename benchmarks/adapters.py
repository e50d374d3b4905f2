"""Compares the adapters on two tasks: held-out loss, seconds a step, bytes.

    taskset -c 1 python -m benchmarks.adapters --adapters_resume  # every run that is not recorded yet
    taskset -c 1 python -m benchmarks.adapters --adapters_kinds='LoRA'  # those whose names match
    python -m benchmarks.adapters --adapters_report_only  # the table and the picture

Run it from the root of the repository. `docs/adapters.md` has the results.
"""

import functools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import adapter_tasks, adapters_report, machine, result_files
from benchmarks.adapter_kinds import KINDS, Kind, optimizer_of, trained_size

ONLY = flags.DEFINE_string(
    "adapters_kinds", "", "A regular expression: only kinds whose names match."
)
TASK = flags.DEFINE_enum(
    "adapters_task", "smollm", list(adapter_tasks.TASKS), "The model and its data."
)
RESUME = flags.DEFINE_bool(
    "adapters_resume", False, "Keep the recorded runs, and add those that lack."
)
SEEDS = flags.DEFINE_integer("adapters_seeds", 3, "How many seeds.", lower_bound=1)
STEPS = flags.DEFINE_integer("adapters_steps", 20, "Steps of a run.", lower_bound=1)
REPORT_ONLY = flags.DEFINE_bool("adapters_report_only", False, "Only the table and the picture.")

TURNS = 7  # of the steps that are timed
Results = dict[str, Any]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not REPORT_ONLY.value:
        measure()
    adapters_report.write(TASK.value)


def measure() -> None:
    """Trains and records what is missing: each kind with one seed, then with the others."""
    path = adapters_report.results_path(TASK.value)
    results = json.loads(path.read_text()) if RESUME.value and path.exists() else {}
    task = adapter_tasks.TASKS[TASK.value]()
    settings = dict(num_steps=STEPS.value, **task.about)
    if results.setdefault("settings", settings) != settings:
        raise app.UsageError(f"{path} was measured with {results['settings']}, not {settings}")
    results["machine"] = machine.about_this_machine("jax", "jaxlib", "dm-haiku")
    results.setdefault("before", [task.evaluate(task.params, i) for i in range(SEEDS.value)])
    chosen = [name for name in KINDS if re.fullmatch(ONLY.value or ".*", name)]
    passes = [(name, last) for last in sorted({1, SEEDS.value}) for name in chosen]
    save = functools.partial(result_files.write, results, path)
    lora = Run(task, KINDS["LoRA"])
    for name, seeds in tqdm(passes, unit="kind"):
        record = results.setdefault("kinds", {}).setdefault(name, {})
        if len(adapters_report.runs_of(record)) < seeds:
            run = Run(task, KINDS[name])
            describe(run, lora, record)
            train_kind(run, record, seeds, save)
            jax.clear_caches()


def describe(run: "Run", lora: "Run", record: Results) -> None:
    """Records the size, the bytes and the seconds of a kind, if they are not there."""
    if "seconds" in record:
        return
    memory = run.step.memory_analysis()
    record["trained"] = run.trained_size
    record["bytes"] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    record["temporary_bytes"] = memory.temp_size_in_bytes
    record["seconds"], record["seconds_of_lora"] = seconds_in_turns([run, lora])


def seconds_in_turns(runs: Sequence["Run"]) -> list[list[float]]:
    """The processor times of steps of some kinds, which take turns, without the first one of each."""
    halves = [run.start(0) for run in runs]
    states = [run.optimizer.init(trained) for run, (trained, _) in zip(runs, halves, strict=True)]
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(TURNS + 1):
        for i, run in enumerate(runs):
            (trained, frozen), began = halves[i], time.process_time()
            trained, states[i], loss = run.step(
                trained, states[i], frozen, run.task.batch(0, 0), np.float32(0)
            )
            loss.block_until_ready()
            found[i].append(round(time.process_time() - began, 4))
            halves[i] = trained, frozen
    return [own[1:] for own in found]


def train_kind(run: "Run", record: Results, seeds: int, save: Callable[[], None]) -> None:
    """Adds the missing runs of a kind to its record, the first after trying learning rates."""
    tried = record.setdefault("tried", {})

    def runs(rate: str, count: int) -> list[dict[str, float]]:
        found = tried.setdefault(rate, [])
        while len(found) < count:
            found.append(run(float(rate), len(found)))
            save()
        return found

    def score(power: int) -> float:
        loss = runs(rate_of(power), 1)[0]["validation"]
        return loss if math.isfinite(loss) else math.inf

    rate = rate_of(best_power(score, run.kind.first))
    runs(rate, seeds)
    record["rate"] = rate
    save()


def rate_of(power: int) -> str:
    return f"{10 ** (power / 2):.3g}"


def best_power(score: Callable[[int], float], first: int) -> int:
    """Goes upwards, or else downwards, for as long as the score falls."""
    way = 1 if score(first + 1) < score(first) else -1
    power = first
    while score(power + way) < score(power):
        power += way
    return power


class Run:
    """The training of one kind, compiled once."""

    def __init__(self, task: Any, kind: Kind) -> None:
        self.task, self.kind, self.optimizer = task, kind, optimizer_of(kind)
        self.starts: dict[int, Any] = {}
        trained, frozen = self.start(0)
        self.trained_size = trained_size(kind, trained)
        state, rate = self.optimizer.init(trained), np.float32(0)
        step = jax.jit(self._step, donate_argnums=(0, 1))
        self.step = step.lower(trained, state, frozen, task.batch(0, 0), rate).compile()
        self.merged = jax.jit(lambda *halves: merged(whole(*halves)))

    def start(self, seed: int) -> tuple[Any, Any]:
        """The trained and the frozen half of the parameters; the trained one may be donated."""
        seed = seed if self.kind.draws else 0
        if seed not in self.starts:
            self.starts = {seed: self._new(seed)}
        trained, frozen = self.starts[seed]
        return jax.tree.map(jnp.copy, trained), frozen

    def _new(self, seed: int) -> tuple[Any, Any]:
        task, kind = self.task, self.kind
        if not kind.method:
            return hki.partition(task.params, hki.LAYER_NORMS)
        options = {**kind.options, **(kind.protein if TASK.value == "proteinmpnn" else {})}
        if kind.init is not None:
            options["init"] = kind.init(getattr(task, kind.data)())
        params = hki.add_adapter(task.params, seed, kind.method, targets=task.targets, **options)
        return hki.partition(params, trainable_dense=False)

    def _loss(self, trained: Any, frozen: Any, batch: Any) -> jax.Array:
        return self.task.loss(whole(trained, frozen), batch)

    def _step(self, trained: Any, state: Any, frozen: Any, batch: Any, rate: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(self._loss)(trained, frozen, batch)
        updates, state = self.optimizer.update(grads, state, trained)
        updates = jax.tree.map(lambda x: -rate * x, updates)
        return optax.apply_updates(trained, updates), state, loss

    def __call__(self, rate: float, seed: int) -> Results:
        """Trains, with a learning rate that falls linearly to zero, and evaluates."""
        trained, frozen = self.start(seed)
        state, losses = self.optimizer.init(trained), []
        for i in range(STEPS.value):
            batch = self.task.batch(seed, i)
            now = np.float32(rate * (1 - i / STEPS.value))
            trained, state, loss = self.step(trained, state, frozen, batch, now)
            losses.append(float(loss))
        found = self.task.evaluate(self.merged(trained, frozen), seed)
        return dict(**found, training=statistics.mean(losses[-5:]))


def whole(trained: Any, frozen: Any) -> Any:
    """The parameters for a model, with the bank of VB-LoRA in the weights."""
    params = hki.combine(trained, frozen)
    return hki.with_vector_bank(params) if "vblora_bank" in params else params


def merged(params: Any) -> Any:
    """The dense parameters, with which one program evaluates all kinds."""
    return hki.materialize({k: v for k, v in params.items() if k != "vblora_bank"})


if __name__ == "__main__":
    app.run(main)
