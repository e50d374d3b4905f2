"""Compares a mixture of formats, as `hki.sensitivity` chooses it, with one format everywhere.

    taskset -c 1 python -m benchmarks.allocation  # MiniLM, some minutes

Run it from the root of the repository. `docs/fidelity.md` has the results.
"""

from collections.abc import Sequence
from typing import Any

import jax
from absl import app

import haiku_implicit as hki
from benchmarks import fidelity, tables

TEXTS = 16  # that errors are measured with; the inputs are those of 128
GROUPS = dict(group_size=64, scale_dtype="bfloat16", calibration="mse")
FORMATS: dict[str, dict[str, dict[str, Any]]] = {
    "int": {f"int{bits}": dict(dtype=f"int{bits}", **GROUPS) for bits in (2, 3, 4)},
    "trellis": {f"trellis{bits}": dict(dtype=f"trellis{bits}") for bits in (2, 3, 4)},
}
# The bits of a mixture, the first ones those of three bits everywhere.
BITS = {"int": (3.25, 3.0), "trellis": (3.03125, 2.5)}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    model = fidelity.Encoder()
    apply, (batch,) = model.inputs.model
    few = jax.tree.map(lambda x: x[:TEXTS], tuple(batch))
    rows = []
    for family, options in FORMATS.items():
        found = hki.sensitivity(
            apply,
            model.params,
            [few],
            options,
            targets=model.inputs.targets,
            method="gptq",
            inputs=model.inputs.moments,
        )
        size = sum({row.path: row.size for row in found.rows}.values())
        everywhere = {row.path: f"{family}3" for row in found.rows}
        budgets = [int(bits * size / 8) + found.other_nbytes for bits in BITS[family]]
        for chosen in (everywhere, *map(found.allocate, budgets)):
            new = found.quantize(model.params, chosen)
            bits = fidelity.held(new, fidelity.is_quantized)["bits"]
            counts = [f"{list(chosen.values()).count(name)} {name}" for name in options]
            scores = model.score(hki.materialize(new))
            rows.append([", ".join(counts), f"{bits:.3f}", *(f"{x:.4f}" for x in scores.values())])
            print(*rows[-1], flush=True)
    print(tables.table(["weights", "bits", *scores], rows))


if __name__ == "__main__":
    app.run(main)
