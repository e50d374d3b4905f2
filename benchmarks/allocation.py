"""Compares a mixture of formats, as `hki.sensitivity` chooses it, with one format everywhere.

    taskset -c 1 python -m benchmarks.allocation                  # MiniLM, some minutes
    taskset -c 1 python -m benchmarks.allocation --allocated=SmolLM2  # an hour

Run it from the root of the repository. `docs/fidelity.md` has the results.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import haiku_implicit as hki
from benchmarks import fidelity, tables

MODEL = flags.DEFINE_enum("allocated", "MiniLM", ["MiniLM", "SmolLM2"], "The model.")

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
    model = fidelity.Encoder() if MODEL.value == "MiniLM" else fidelity.Language()
    apply, batch = measured(model)
    rows = []
    for family, options in FORMATS.items():
        found = hki.sensitivity(
            apply,
            model.params,
            [batch],
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


def measured(model: Any) -> tuple[Any, Any]:
    """The outputs that are compared, and the batch: 16 texts, or 192 tokens."""
    apply, (batch, *_) = model.inputs.model
    if isinstance(model, fidelity.Encoder):
        return apply, jax.tree.map(lambda x: x[:16], tuple(batch))

    # The squares of their differences are as the divergence of the distributions of the next token.
    def roots_of_probabilities(params: Any, tokens: Any) -> Any:
        return jnp.exp(jax.nn.log_softmax(apply(params, tokens)) / 2)

    return roots_of_probabilities, batch[:2, :96]


if __name__ == "__main__":
    app.run(main)
