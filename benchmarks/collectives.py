"""What devices send each other for a forward pass and a training step, by types of weights.

    python -m benchmarks.collectives

A transformer of four blocks on eight devices of this CPU, split in four ways. The figures are the
results of collectives in the compiled programs, and the calls of native kernels in them, so that it
does not matter what else the machine does.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX starts

import haiku as hk
import jax
import numpy as np
from absl import app
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import models
from benchmarks import tables as markdown
from haiku_implicit.products.cpu import build

SIZES = models.Sizes(depth=4, width=256, heads=8, batch=8, length=48)
REST = [(".*", P())]
COLUMNS, ROWS = P(None, "m"), P("m")
_OPERATIONS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_ITEMSIZES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


class Split(NamedTuple):
    """How weights are split, as rules of `hki.shardings`, and how the batch is."""

    rules: list[tuple[str, P]]
    batch: P


SPLITS = {
    "data parallel": Split(REST, P("m")),
    "fully sharded, inputs": Split([(".*/w", ROWS), *REST], P("m")),
    "fully sharded, outputs": Split([(".*/w", COLUMNS), *REST], P("m")),
    "tensor parallel": Split(
        [(".*/(out|down)/w", ROWS), (".*/w", COLUMNS), (".*/(q|k|v|up)/b", P("m")), *REST], P()
    ),
}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    mesh = jax.make_mesh((8,), ("m",), axis_types=(AxisType.Auto,))
    model = hk.without_apply_rng(hk.transform(blocks))
    x = jax.random.normal(jax.random.key(0), (SIZES.batch, SIZES.length, SIZES.width))
    trees = types_of(model.init(jax.random.key(1), x))
    apply = hki.transform_implicit(model).apply
    step = hki.value_and_grad(lambda params, x: (apply(params, x) ** 2).mean())
    for name, fun in (("forward pass", apply), ("training step", step)):
        chosen = trees if fun is apply else {k: trees[k] for k in ("dense", "LoRA", "QLoRA")}
        cases = [(split, kind) for split in SPLITS for kind in chosen]
        cells = [
            measured(fun, trees[kind], x, SPLITS[split], mesh)
            for split, kind in tqdm(cases, name, file=sys.stderr)
        ]
        rows = [
            [split, *cells[i * len(chosen) : (i + 1) * len(chosen)]]
            for i, split in enumerate(SPLITS)
        ]
        print(markdown.table([f"{name}, KB a device", *chosen], rows), "\n")


def blocks(x: jax.Array) -> jax.Array:
    for _ in range(SIZES.depth):
        x = models.Block(models.Linears(SIZES))(x)
    return x


def types_of(dense: Any) -> dict[str, Any]:
    """The parameters in each type."""
    int4 = hki.quantize_params(dense, dtype="int4", group_size=32)
    return {
        "dense": dense,
        "LoRA": hki.add_lora(dense, 0, rank=SIZES.rank),
        "int8": hki.quantize_params(dense, dtype="int8"),
        "int4/32": int4,
        "QLoRA": hki.add_lora(int4, 0, rank=SIZES.rank),
    }


def measured(fun: Callable[..., Any], params: Any, x: jax.Array, split: Split, mesh: Any) -> str:
    """What is sent, and how many calls of native kernels there are."""
    placed = jax.device_put(params, hki.shardings(params, split.rules, mesh))
    own_x = jax.device_put(x, NamedSharding(mesh, split.batch))
    text = jax.jit(fun).lower(placed, own_x).compile().as_text()
    count = calls(text)
    return f"{sent(text) // 1024:,}" + (f" ({count} calls)" if count else "")


def calls(text: str) -> int:
    """The calls of native kernels in a compiled program."""
    return sum("custom-call" in line and build.PREFIX in line for line in text.splitlines())


def sent(text: str) -> int:
    """The bytes of the results of collectives in a compiled program."""
    results = re.findall(rf"= (.*?) (?:{_OPERATIONS})(?:-start)?\(", text)
    arrays = [found for result in results for found in re.findall(r"(\w+)\[([\d,]*)\]", result)]
    return sum(
        _ITEMSIZES[dtype] * int(np.prod([int(n) for n in sizes.split(",") if n], dtype=int))
        for dtype, sizes in arrays
    )


if __name__ == "__main__":
    app.run(main)
