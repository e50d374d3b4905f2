"""Measures the temporary memory of a product with the experts of a mixture.

    python -m benchmarks.mixture_memory

For a weight `[experts, inputs, outputs]` in several types: its bytes, and the temporary bytes of
`jax.lax.ragged_dot` with it, forward and with its gradients (with respect to the rows, and to the
factors of LoRA). These are XLA's own figures for the compiled programs, so other load on the machine
does not matter.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import tables as markdown

EXPERTS = flags.DEFINE_integer("experts", 8, "How many experts there are.", 1)
INPUTS = flags.DEFINE_integer("inputs", 512, "Inputs of each, a multiple of 64.", 64)
OUTPUTS = flags.DEFINE_integer("outputs", 2048, "Outputs of each.", 1)
ROWS = flags.DEFINE_multi_integer("rows", [16, 1024], "Rows that are sent to an expert.", 1)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    cases = [(rows, name) for rows in ROWS.value for name in weights()]
    bar = tqdm(cases, "programs", file=sys.stderr)
    found = [[str(rows), name, *measured(rows, weights()[name]())] for rows, name in bar]
    print(markdown.table(["rows", "weight", "its MB", "forward MB", "with gradients MB"], found))


def weights() -> dict[str, Callable[[], Any]]:
    """Returns the weight in each type; `materialized` makes int4 codes dense for each product."""

    def dense() -> jax.Array:
        shape = EXPERTS.value, INPUTS.value, OUTPUTS.value
        return jax.random.normal(jax.random.key(0), shape) / INPUTS.value**0.5

    def int4() -> Any:
        return hki.QuantizedMatrix.quantize(dense(), "int4", group_size=32)

    def lora(w: Any) -> Any:
        params = hki.add_lora({"experts": {"w": w}}, jax.random.key(1), rank=8, targets=True)
        return params["experts"]["w"]

    return {
        "float32": dense,
        "int8": lambda: hki.QuantizedMatrix.quantize(dense(), "int8"),
        "int4 in groups of 32": int4,
        "LoRA on float32": lambda: lora(dense()),
        "LoRA on int4": lambda: lora(int4()),
        "LoRA on int4, materialized": lambda: Materialized(lora(int4())),
    }


class Materialized:
    """A weight that becomes dense before each product."""

    def __init__(self, weight: Any):
        self.weight = weight


def measured(rows: int, weight: Any) -> list[str]:
    """Returns the megabytes of the weight, and of temporary arrays."""
    as_dense = isinstance(weight, Materialized)
    weight = weight.weight if as_dense else weight
    trainable, frozen = hki.partition(weight, trainable_dense=False)

    def product(x: jax.Array, trainable: Any, frozen: Any, sizes: jax.Array) -> jax.Array:
        w = hki.combine(trainable, frozen)
        w = hki.materialize(w) if as_dense else w
        return hki.use_implicit_args(jax.lax.ragged_dot)(x, w, sizes)

    def gradients(*args: Any) -> Any:
        return jax.grad(lambda *args: jnp.square(product(*args)).sum(), (0, 1))(*args)

    sizes = jax.ShapeDtypeStruct((EXPERTS.value,), jnp.int32)
    args = jax.ShapeDtypeStruct((rows, INPUTS.value), jnp.float32), trainable, frozen, sizes
    nbytes = [sum(leaf.nbytes for leaf in jax.tree.leaves(weight))]
    for fun in (product, gradients):
        memory = jax.jit(fun).lower(*args).compile().memory_analysis()
        nbytes.append(memory.temp_size_in_bytes)
    return [f"{n / 1e6:.1f}" for n in nbytes]


if __name__ == "__main__":
    app.run(main)
