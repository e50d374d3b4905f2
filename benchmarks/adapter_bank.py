"""Times a batch whose examples have 1, 8 or 64 different adapters, against one adapter for all of them.

    python -m benchmarks.adapter_bank                # everything: results and tables
    python -m benchmarks.adapter_bank --bank_report_only  # tables from the recorded results

Run it from the root of the repository. All cases take turns in one process; ratios are medians over
all turns. The model is a Llama with random weights, dense and in 4 bits.
"""

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import result_files
from benchmarks import tables as markdown
from benchmarks.machine import about_this_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name

from models import llama  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "adapter_bank.json"
DOCUMENTS = (ROOT / "benchmarks" / "results" / "lora_transformer.md",)

BANK_TURNS = flags.DEFINE_integer("bank_turns", 9, "How often each time is taken.", 1)
BANK_BATCH = flags.DEFINE_integer("bank_batch", 64, "Examples in a batch.", 1)
BANK_REPORT_ONLY = flags.DEFINE_bool("bank_report_only", False, "Only the tables.")

RANK, CAPACITY = 8, 64
CONFIG = llama.LlamaConfig(
    vocab_size=512, dim=256, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=768
)
LENGTHS = (1, 32)  # tokens of an example: a step of decoding, and a prompt
ADAPTERS = (1, 8, 64)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not BANK_REPORT_ONLY.value:
        result_files.write(measure(), RESULTS)
        print(f"wrote {RESULTS}")
    tables = table_of(json.loads(RESULTS.read_text()))
    print(tables["adapter bank"])
    markdown.replace(DOCUMENTS, tables)


def measure() -> dict[str, Any]:
    """Returns the seconds of all turns, for each base, length and number of adapters."""
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(CONFIG)(tokens)))
    apply = hki.transform_implicit(model).apply
    dense = model.init(jax.random.key(0), jnp.ones((1, 2), jnp.int32))
    bases = {"f32": dense, "int4/32": hki.quantize_params(dense, dtype="int4", group_size=32)}
    cases = []
    for name, base in bases.items():
        for length in LENGTHS:
            cases += cases_of(name, base, apply, length)
    for case in tqdm(cases, desc="compiling"):
        case["run"]()
    for _ in tqdm(range(BANK_TURNS.value), desc="turns"):
        for case in cases:
            started = time.perf_counter()
            case["run"]()
            case["seconds"].append(time.perf_counter() - started)
    for case in cases:
        del case["run"]
    environment = about_this_machine("jax", "jaxlib", "haiku-implicit")
    return dict(environment=environment, batch=BANK_BATCH.value, rank=RANK, cases=cases)


def cases_of(name: str, base: Any, apply: Any, length: int) -> list[dict[str, Any]]:
    """Returns the case of one adapter for the whole batch, and a bank's case for each of `ADAPTERS`."""
    tokens = jax.random.randint(jax.random.key(1), (BANK_BATCH.value, length), 0, CONFIG.vocab_size)
    whole = jax.jit(apply)
    banked = jax.jit(hki.with_bank(lambda params, x: apply(params, x[None])[0]))
    trees = [adapted(base, seed) for seed in range(CAPACITY)]
    bank = hki.AdapterBank.of(base, capacity=CAPACITY, rank=RANK)
    for slot, tree in enumerate(trees):
        bank = bank.put(slot, hki.get_adapter(tree), check_base=False)

    def case(adapters: int | None, run: Any) -> dict[str, Any]:
        return dict(
            base=name, length=length, adapters=adapters,
            run=lambda: jax.block_until_ready(run()), seconds=[],
        )  # fmt: skip

    cases = [case(None, lambda: whole(trees[0], tokens))]
    for count in ADAPTERS:
        slots = np.arange(BANK_BATCH.value) % count
        cases.append(case(count, lambda slots=slots: banked(bank, slots, tokens)))
    want = np.stack([whole(trees[i % 8], x[None])[0] for i, x in enumerate(tokens)])
    got = np.asarray(banked(bank, np.arange(BANK_BATCH.value) % 8, tokens))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    return cases


def adapted(base: Any, seed: int) -> Any:
    """Returns the base with an adapter that is not zero."""
    params = hki.add_lora(base, seed, rank=RANK, alpha=16.0, targets=".*_proj/w")
    trained, frozen = hki.partition(params, trainable_dense=False)
    leaves, treedef = jax.tree.flatten(trained)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.02 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return hki.combine(treedef.unflatten(moved), frozen)


def table_of(results: dict[str, Any]) -> dict[str, str]:
    """Returns a table of each case's throughput relative to one adapter for all."""
    batch, rows = results["batch"], []
    for base in dict.fromkeys(case["base"] for case in results["cases"]):
        for length in LENGTHS:
            own = [c for c in results["cases"] if (c["base"], c["length"]) == (base, length)]
            one, *banks = own
            speed = batch * length / statistics.median(one["seconds"])
            cells = [
                statistics.median(a / b for a, b in zip(one["seconds"], c["seconds"], strict=True))
                for c in banks
            ]
            rows.append([base, str(length), f"{speed:,.0f}", *(f"{x:.2f}" for x in cells)])
    header = ["weights", "tokens each", "one for all, tokens/s", *(f"bank, {n}" for n in ADAPTERS)]
    env = results["environment"]
    note = (
        f"Batches of {batch} examples, LoRA of rank {results['rank']}; throughput relative to one "
        f"adapter for all. {env['cpu']}, {env['cores']} cores, JAX {env['versions']['jax']}, "
        f"{env['date']}."
    )
    return {"adapter bank": f"{markdown.table(header, rows)}\n\n{note}"}


if __name__ == "__main__":
    app.run(main)
