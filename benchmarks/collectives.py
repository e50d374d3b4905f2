"""Counts the bytes that devices send each other in a forward pass and a training step, by weight type.

    python -m benchmarks.collectives

A transformer of four blocks on eight devices of this CPU, split in four ways; then single products of
other kinds. The figures are the results of collectives in the compiled programs, and the calls of
native kernels in them, so other load on the machine does not matter.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX starts

import haiku as hk
import jax
import jax.numpy as jnp
from absl import app
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import haiku_implicit as hki
from benchmarks import collectives_text, models
from benchmarks import tables as markdown

SIZES = models.Sizes(depth=4, width=256, heads=8, batch=8, length=48)
REST = [(".*", P())]
COLUMNS, ROWS = P(None, "m"), P("m")


class Split(NamedTuple):
    """The sharding of the weights, as rules of `hki.shardings`, and of the batch."""

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
    kinds = ("dense", "int8", "int4/32")
    rows = [
        [f"{name}: {split}", *(cell(fun, params[kind], x, places, mesh) for kind in kinds)]
        for name, (fun, params, x, splits) in tqdm(other_products().items(), file=sys.stderr)
        for split, places in splits.items()
    ]
    print(markdown.table(["forward pass, KB a device", *kinds], rows))


def other_products() -> dict[str, Any]:
    """Returns each kind's function, its parameters by type, its input, and the sharding of both."""
    keys = iter(jax.random.split(jax.random.key(2), 9))

    def types(shape: tuple[int, ...]) -> dict[str, Any]:
        w = jax.random.normal(next(keys), shape)
        return {
            "dense": w,
            "int8": hki.QuantizedMatrix.quantize(w, "int8"),
            "int4/32": hki.QuantizedMatrix.quantize(w, "int4", 32),
        }

    caches = jax.random.normal(next(keys), (2, 8, 512, 8, 64))
    images = jax.random.normal(next(keys), (8, 16, 16, 256))
    queries = jax.random.normal(next(keys), (8, 1, 8, 64))
    tokens = jax.random.normal(next(keys), (1024, 256))
    inputs, outputs = P(None, None, "m"), P(None, None, None, "m")
    return {
        "convolution": (
            convolve,
            types((3, 3, 256, 256)),
            images,
            {
                "data parallel": (P(), P("m")),
                "fully sharded, inputs": (inputs, P("m")),
                "fully sharded, outputs": (outputs, P("m")),
                "tensor parallel, columns": (outputs, P()),
                "tensor parallel, rows": (inputs, outputs),
            },
        ),
        "cache": (
            attend,
            {
                "dense": caches,
                "int8": hki.QuantizedCache.quantize(caches, "int8", axis=-1),
                "int4/32": hki.QuantizedCache.quantize(caches, "int4", 32, axis=-1),
            },
            queries,
            {
                "batch": (P(None, "m"), P("m")),
                "heads": (P(None, None, None, "m"), P(None, None, "m")),
                "length": (P(None, None, "m"), P()),
            },
        ),
        "experts": (
            multiply_ragged,
            types((8, 256, 256)),
            tokens,
            {
                "data parallel": (P(), P("m")),
                "expert parallel": (P("m"), P()),
                "expert parallel, rows split": (P("m"), P("m")),
                "fully sharded, inputs": (P(None, "m"), P("m")),
                "fully sharded, outputs": (P(None, None, "m"), P("m")),
                "tensor parallel, columns": (P(None, None, "m"), P()),
                "tensor parallel, rows": (P(None, "m"), P(None, "m")),
            },
        ),
    }


@hki.use_implicit_args
def convolve(w: Any, x: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


@hki.use_implicit_args
def attend(kv: Any, x: jax.Array) -> jax.Array:
    k, v = kv[0], kv[1]
    weights = jax.nn.softmax(jnp.einsum("bthc,bshc->bhts", x, k))
    return jnp.einsum("bhts,bshc->bthc", weights, v)


@hki.use_implicit_args
def multiply_ragged(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, jnp.full(8, 128))


def blocks(x: jax.Array) -> jax.Array:
    for _ in range(SIZES.depth):
        x = models.Block(models.Linears(SIZES))(x)
    return x


def types_of(dense: Any) -> dict[str, Any]:
    """Returns the parameters in each type."""
    int4 = hki.quantize_params(dense, dtype="int4", group_size=32)
    return {
        "dense": dense,
        "LoRA": hki.add_lora(dense, 0, rank=SIZES.rank),
        "int8": hki.quantize_params(dense, dtype="int8"),
        "int4/32": int4,
        "QLoRA": hki.add_lora(int4, 0, rank=SIZES.rank),
    }


def measured(fun: Callable[..., Any], params: Any, x: jax.Array, split: Split, mesh: Any) -> str:
    """Returns the bytes sent and the number of native kernel calls, as a cell of the table."""
    places = hki.shardings(params, split.rules, mesh), NamedSharding(mesh, split.batch)
    return _cell(fun, (params, x), places)


def cell(fun: Any, params: Any, x: jax.Array, specs: tuple[P, P], mesh: Any) -> str:
    """Returns the cell for one parameter, from the specs of both operands."""
    of_w = hki.shardings({"w": params}, [(".*", specs[0])], mesh)["w"]
    return _cell(fun, (params, x), (of_w, NamedSharding(mesh, specs[1])))


def _cell(fun: Any, operands: Any, places: Any) -> str:
    text = jax.jit(fun).lower(*jax.device_put(operands, places)).compile().as_text()
    count = collectives_text.calls(text)
    return f"{collectives_text.sent(text) // 1024:,}" + (
        f" ({count} call{'s' * (count > 1)})" if count else ""
    )


if __name__ == "__main__":
    app.run(main)
