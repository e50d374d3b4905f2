"""The small programs whose costs are counted (`benchmarks.counts`), with their dense twins.

Each compiles in a second or less. Together they have all costly features: products with all kinds of
weights, gradients, a loop over layers, and a cache.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from benchmarks import implementations, models, stages

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name

import decoding  # noqa: E402
from models import llama  # noqa: E402

SIZES = models.Sizes(
    depth=2, width=32, heads=2, vocabulary=64, batch=2, length=8, rank=4, alpha=8.0
)
LLAMA = llama.LlamaConfig(
    vocab_size=64, dim=64, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=128
)
CACHED = 32  # positions
# The outermost modules: each of their calls is a run of a user's function.
TOP = (hk.nets.MLP, models.Transformer, llama.Llama)

Tree = Any


class Program(NamedTuple):
    """A program to count.

    Attributes:
      fun: a function of arrays.
      arguments: its arguments.
      twin: the name of the program that bounds its counts, with all versions of JAX and XLA.
      counted: the kind of counts: `program` (the size of the program), `calls` (the traces and
        compilations of two jitted calls), `eager calls`, or `sent` (bytes between devices).
    """

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]
    twin: str | None = None
    counted: tuple[str, ...] = ("program",)


def all_programs() -> dict[str, Callable[[], Program]]:
    """Returns a function for each program by name, which makes the program."""
    found: dict[str, Callable[[], Program]] = {}
    for kind in KINDS:
        found[f"MLP, {kind}"] = lambda k=kind: mlp(k)
    for kind in ("dense", "LoRA", "QLoRA"):
        found[f"MLP, eager calls, {kind}"] = lambda k=kind: mlp(k)._replace(
            counted=("eager calls",)
        )
    for kind in ("dense", "LoRA", "int8", "int4/32"):
        found[f"transformer, {kind}"] = lambda k=kind: transformer(k)
    stacked = dataclasses.replace(SIZES, stacked=True)
    for name, sizes in {"training step": SIZES, "training step, layer_stack": stacked}.items():
        for kind in ("by hand", "LoRA", "QLoRA"):
            # (In a stack, LoRA's scales are an array, from which each layer reads its own.)
            twin = f"{name}, by hand" if (kind, sizes.stacked) == ("LoRA", False) else None
            found[f"{name}, {kind}"] = lambda k=kind, s=sizes, t=twin: training_step(k, s, t)
    for kind, cache in (("dense", "f32"), ("dense", "int8"), ("int4/32", "int4")):
        found[f"decoding, {kind}, cache {cache}"] = lambda k=kind, c=cache: decoding_step(k, c)
    for split in SPLITS:
        for kind in ("dense", "LoRA", "int8", "QLoRA"):
            found[f"8 devices, {split}, {kind}"] = lambda k=kind, s=split: on_devices(k, s)
    return found


KINDS: dict[str, Callable[[Tree], Tree]] = {
    "dense": lambda params: params,
    "zero biases": lambda params: hki.zero_params(params, targets=".*/b"),
    "LoRA": lambda params: hki.add_lora(params, 0, rank=SIZES.rank),
    "int8": lambda params: hki.quantize_params(params, dtype="int8"),
    "int4/32": lambda params: hki.quantize_params(params, dtype="int4", group_size=32),
    "QLoRA": lambda params: hki.add_lora(KINDS["int4/32"](params), 0, rank=SIZES.rank),
}
# The sharding of the weights over the devices, and of the batch.
SPLITS = {
    "data parallel": ([(".*", P())], P("m")),
    "fully sharded": ([(".*/w", P(None, "m")), (".*", P())], P("m")),
    "tensor parallel": (
        [(".*linear_0/w", P(None, "m")), (".*linear_1/w", P("m")), (".*", P())], P()
    ),
}  # fmt: skip


def mlp(kind: str) -> Program:
    """The forward pass of a multilayer perceptron."""
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([256, 64])(x)))
    return _forward(kind, model, jnp.ones((8, 64)))._replace(counted=("program", "calls"))


def transformer(kind: str) -> Program:
    """The forward pass of the transformer that `benchmarks.run` times."""
    return _forward(kind, models.transformed(SIZES), jnp.ones((2, 8), jnp.int32))


def _forward(kind: str, model: hk.Transformed, x: jax.Array) -> Program:
    params = numbers(lambda: KINDS[kind](model.init(jax.random.key(0), x)))
    apply = model.apply if kind == "dense" else hki.transform_implicit(model).apply
    return Program(apply, (params, x))


def training_step(kind: str, sizes: models.Sizes, twin: str | None) -> Program:
    """A step of gradient descent on the LoRA factors."""
    tokens = jnp.ones((sizes.batch, sizes.length), jnp.int32)
    init = models.transformed(sizes, by_hand=True).init
    name = "by_hand" if kind == "by hand" else "library"

    def arguments() -> Tree:
        trainable, frozen = implementations.arguments(name, init(jax.random.key(0), tokens))
        if kind == "QLoRA":
            frozen = hki.quantize_params(frozen, dtype="int4", group_size=32, targets=r".*/w")
        return trainable, frozen

    step = stages.training_step(implementations.available()[name](sizes))
    return Program(step, (*numbers(arguments), tokens), twin, ("program", "calls"))


def decoding_step(kind: str, cache: str) -> Program:
    """A decoding step: one token after the tokens in a cache."""
    model = decoding.make_model(LLAMA, CACHED, cache)
    token = jnp.ones((1, 1), jnp.int32)
    key = jax.random.key(0)
    params = numbers(lambda: KINDS[kind](model.init(key, token)[0]))
    state = numbers(lambda: model.init(key, token)[1])

    def step(params: Tree, state: Tree, token: jax.Array) -> Any:
        return model.apply(params, state, None, token)

    return Program(step, (params, state, token), counted=("program", "calls"))


def on_devices(kind: str, split: str) -> Program:
    """The forward pass of a multilayer perceptron, split over eight devices."""
    fun, (params, x), *_ = mlp(kind)
    mesh = jax.make_mesh((8,), ("m",), axis_types=(AxisType.Auto,))
    rules, batch = SPLITS[split]
    params = jax.device_put(params, hki.shardings(params, rules, mesh))
    x = jax.device_put(x, NamedSharding(mesh, batch))
    return Program(fun, (params, x), counted=("sent",))


def numbers(make: Callable[[], Tree]) -> Tree:
    """Returns zeros of the shapes that a function makes, without running it, which would be slow."""
    return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), jax.eval_shape(make))
