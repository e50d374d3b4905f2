"""Compares a mixture of formats, as `hki.sensitivity` chooses it, with one format everywhere.

    taskset -c 1 python -m benchmarks.allocation                  # MiniLM, some minutes
    taskset -c 1 python -m benchmarks.allocation --mixed=smollm2  # SmolLM2, some ten minutes

Run it from the root of the repository. `docs/fidelity.md` has the results.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import haiku_implicit as hki
from benchmarks import fidelity, tables

MIXED = flags.DEFINE_enum("mixed", "minilm", ["minilm", "smollm2"], "The model to quantize.")

TEXTS = 16  # that MiniLM's errors are measured with; the inputs are those of 128
TOKENS = 192  # that SmolLM2's errors are measured with; the inputs are those of 2048
GROUPS = dict(group_size=64, scale_dtype="bfloat16", calibration="mse")
Formats = Mapping[str, Mapping[str, Any]]
INTEGERS: Formats = {f"int{bits}": dict(dtype=f"int{bits}", **GROUPS) for bits in (2, 3, 4)}
TRELLIS: Formats = {f"trellis{bits}": dict(dtype=f"trellis{bits}") for bits in (2, 3, 4)}
# To save time, SmolLM2's errors are measured with 3 bits only: the squares of the others' in theirs.
SQUARES = {"trellis2": 4.2, "trellis3": 1.0, "trellis4": 0.25}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if MIXED.value == "smollm2":
        language = fidelity.Language()
        rows = compared(language, roots_of_probabilities(language), "trellis3", (3.03125, 3.0))
    else:
        encoder = fidelity.Encoder()
        apply, (batch,) = encoder.inputs.model
        few = jax.tree.map(lambda x: x[:TEXTS], tuple(batch))
        # The bits of a mixture, the first ones those of three bits everywhere.
        rows = compared(encoder, measured(encoder, apply, few, INTEGERS), "int3", (3.25, 3.0))
        found = measured(encoder, apply, few, TRELLIS)
        rows += compared(encoder, found, "trellis3", (3.03125, 2.5))
    print(
        tables.table(
            ["weights", "bits", *rows[0][2]], [[*row[:2], *row[2].values()] for row in rows]
        )
    )


def measured(model: Any, apply: Any, batch: Any, formats: Formats) -> hki.Sensitivity:
    """Returns the errors of a model's outputs with each weight in each format, with inputs."""
    return hki.sensitivity(
        apply,
        model.params,
        [batch],
        formats,
        targets=model.inputs.targets,
        method="gptq",
        inputs=model.inputs.moments,
    )


def roots_of_probabilities(model: fidelity.Language) -> hki.Sensitivity:
    """Returns the errors of SmolLM2, with those of two and four bits taken from those of three.

    The squares of differences of these outputs are like a divergence of the distributions.
    """
    apply, (tokens, _) = model.inputs.model
    three = {"trellis3": TRELLIS["trellis3"]}
    found = measured(
        model,
        lambda params, tokens: jnp.sqrt(jax.nn.softmax(apply(params, tokens))),
        (tokens[:1, :TOKENS],),
        three,
    )
    rows = []
    for row in found.rows:
        scales = row.nbytes - row.size * 3 // 8
        for name, square in SQUARES.items():
            nbytes = scales + row.size * int(name[-1]) // 8
            error = row.error * math.sqrt(square)
            rows.append(row._replace(option=name, error=error, nbytes=nbytes))
    return dataclasses.replace(found, rows=tuple(rows), options=TRELLIS)


def compared(
    model: Any, found: hki.Sensitivity, name: str, mixtures: Sequence[float]
) -> list[tuple[str, str, dict[str, str]]]:
    """Returns the weights, bits and scores: of one format everywhere, then of mixtures of some bits."""
    size = sum({row.path: row.size for row in found.rows}.values())
    everywhere = dict.fromkeys((row.path for row in found.rows), name)
    budgets = [int(bits * size / 8) + found.other_nbytes for bits in mixtures]
    rows = []
    for chosen in (everywhere, *map(found.allocate, budgets)):
        new = found.quantize(model.params, chosen)
        bits = model.inputs.bits(new)
        counts = [f"{[*chosen.values()].count(option)} {option}" for option in found.options]
        scores = {k: f"{x:.4f}" for k, x in model.score(hki.materialize(new)).items()}
        rows.append((", ".join(counts), f"{bits:.3f}", scores))
        print(*rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    app.run(main)
