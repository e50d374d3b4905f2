"""Measures what `merge_lora(requantize=True)` loses, and what encoding costs, on SmolLM2.

    python examples/finetune_smollm.py    # trains the LoRA, of rank 8
    python -m benchmarks.merging          # some ten minutes

Run it from the root of the repository. Projections are quantized, the LoRA is put on, and then merged
into codes of the same format, which know no inputs. The last perplexity is that of the original weights
with the LoRA merged, quantized once. `docs/adapters.md` has the results.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import haiku_implicit as hki
from benchmarks import fidelity, tables

ADAPTER = flags.DEFINE_string(
    "merged_adapter", "smollm_adapter.safetensors", "The file of examples/finetune_smollm.py."
)
INPUTS = flags.DEFINE_bool("merged_inputs", False, "Whether to quantize with inputs (GPTQ, LDLQ).")
FORMATS = flags.DEFINE_list("merged_formats", None, "Only these formats; by default all.")

TARGETS = r".*_proj/w"
GROUPS = dict(group_size=64, scale_dtype="bfloat16", calibration="mse")
OPTIONS: dict[str, dict[str, Any]] = {
    "int4/64": dict(dtype="int4", **GROUPS),
    "nf4/64": dict(dtype="nf4", **GROUPS),
    "int4/64/rotated": dict(dtype="int4", rotate=True, **GROUPS),
    "trellis4": dict(dtype="trellis4"),
    "trellis3": dict(dtype="trellis3"),
}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    adapter = jax.tree.leaves(hki.load(ADAPTER.value)["adapter"])
    model = fidelity.Language()
    dense = hki.merge_lora(with_lora(model.params, adapter))
    print(
        "dense, without LoRA and merged:", perplexity(model, model.params), perplexity(model, dense)
    )
    method = "gptq" if INPUTS.value else None
    rows = []
    for name in FORMATS.value or OPTIONS:
        base, quantizing = timed(lambda name=name: model.inputs.quantized(OPTIONS[name], method)[0])
        tuned = with_lora(base, adapter)
        merged, merging = timed(lambda tuned=tuned: hki.merge_lora(tuned, requantize=True))
        exact, merged = hki.merge_lora(tuned), hki.materialize(merged)
        error = relative_error(merged, exact)
        again = hki.quantize_params(dense, targets=TARGETS, **OPTIONS[name])
        found = exact, merged, hki.materialize(again)
        scores = [perplexity(model, params) for params in found]
        rows.append([name, f"{error:.3f}", *scores, quantizing, merging])
        print(*rows[-1], flush=True)
    header = ["weights", "error", "perplexity", "merged", "from dense", "s quantizing", "s merging"]
    print(tables.table(header, rows))


def with_lora(params: Any, adapter: list[jax.Array]) -> Any:
    """Returns parameters with the LoRA of the example, whose trained arrays are given."""
    lora = hki.add_lora(params, 0, rank=8, alpha=16, targets=TARGETS)
    trained, frozen = hki.partition(lora, trainable_dense=False)
    return hki.combine(jax.tree.unflatten(jax.tree.structure(trained), adapter), frozen)


def relative_error(params: Any, exact: Any) -> float:
    """Returns the error of the projections, relative to their root mean square."""
    names = [(m, n) for m in exact for n in exact[m] if m.endswith("_proj")]
    pairs = [(params[m][n], exact[m][n]) for m, n in names]
    error = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
    return math.sqrt(error / sum(float(jnp.sum(b**2)) for _, b in pairs))


def perplexity(model: fidelity.Language, params: Any) -> str:
    return f"{model.score(params)['perplexity']:.1f}"


def timed(fun: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of a function, and its seconds of processor time."""
    start = time.process_time()
    result = jax.block_until_ready(fun())
    return result, f"{time.process_time() - start:.0f}"


if __name__ == "__main__":
    app.run(main)
