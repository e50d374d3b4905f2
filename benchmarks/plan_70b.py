"""What QLoRA of a Llama with 70 billion weights takes on many accelerators: on paper, by its shapes.

    python -m benchmarks.plan_70b

Nothing of the model is ever made: its parameters are `jax.ShapeDtypeStruct`s, quantized and placed as
real ones are, on meshes without devices. Bytes of weights, adapters and Adam's state on a device are
exact sums over these. What is sent is a formula, which is compared first with the compiled programs of a
small Llama on eight devices of this CPU. Times are bounds from the rates that are given as flags.
"""

import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX starts

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from benchmarks import tables as markdown
from benchmarks.collectives import sent

sys.path.insert(0, "examples")
from models import llama

# NVIDIA's data sheet of the H100 SXM: dense bfloat16, HBM3, and NVLink in both directions together.
_FLOPS = flags.DEFINE_float("tflops", 989.0, "Of one accelerator, in bfloat16, 10^12 a second.")
_HBM = flags.DEFINE_float("hbm", 3350.0, "Its memory's bandwidth, GB/s.")
_LINK = flags.DEFINE_float("link", 450.0, "GB/s into one device of a machine (half of 900).")
_NETWORK = flags.DEFINE_float("network", 50.0, "The same between machines (InfiniBand NDR, 400 Gb/s).")
_USED = flags.DEFINE_float("used", 0.4, "The part of the FLOP/s that products of matrices reach.")
_BATCH = flags.DEFINE_integer("batch_size", 1, "Sequences a device.")
_LENGTH = flags.DEFINE_integer("length", 4096, "Tokens in a sequence.")
_RANK = flags.DEFINE_integer("rank", 16, "Of LoRA.")

# https://arxiv.org/abs/2407.21783, table 3.
LLAMA_70B = llama.LlamaConfig(
    vocab_size=128_256,
    dim=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    hidden_dim=28_672,
    rope_base=5e5,
    tied=False,
)
SMALL = llama.LlamaConfig(
    vocab_size=512, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, hidden_dim=512, tied=False
)
# Rows by one axis of the mesh and columns by the other, so that both factors of LoRA are split.
SPLIT = P("rows", "columns")
RULES = [(".*_proj/w", SPLIT), (".*/(w|embeddings)", SPLIT), (".*", P())]


class Plan(NamedTuple):
    """What is on one device, in bytes.

    Attributes:
      frozen: weights, of which `whole` are those of all devices.
      adapters: LoRA's factors.
      adam: its two moments of them.
      gathered: of frozen weights, what one pass over all layers gathers.
      layer: of one layer, which is there as codes at a time.
      whole: the frozen weights of all devices.
    """

    frozen: int
    adapters: int
    adam: int
    gathered: int
    layer: int
    whole: int


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    print(markdown.table(["a small Llama, KB a device", "formula", "compiled"], checked()), "\n")
    shapes = [(4, 2), (16, 16)]
    plans = [plan_of(LLAMA_70B, AbstractMesh(shape, ("rows", "columns"))) for shape in shapes]
    names = [f"{math.prod(shape)} devices, {shape[0]} x {shape[1]}" for shape in shapes]
    columns = [described(plan, math.prod(s)) for plan, s in zip(plans, shapes, strict=True)]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    print(markdown.table(["QLoRA of 70B", *names], rows))


# --- shapes --------------------------------------------------------------------------------------


def params_of(config: llama.LlamaConfig, dtype: Any) -> Any:
    """The parameters, as a function of a key: nf4 in groups of 64 or less, LoRA, the rest dense."""
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(config)(tokens)))

    def make(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, 2), jnp.int32))
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        size = min(64, config.dim // 8)
        params = hki.quantize_params(params, dtype="nf4", group_size=size, targets=".*_proj/w")
        return hki.add_lora(params, key, rank=_RANK.value, targets=".*_proj/w")

    return make


def on_one(tree: Any, places: Any) -> int:
    """The bytes of a tree on one device."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
    return sum(math.prod(p.shard_shape(x.shape)) * x.dtype.itemsize for x, p in pairs)


def nbytes(tree: Any) -> int:
    """The bytes of all of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def plan_of(config: llama.LlamaConfig, mesh: Any) -> Plan:
    """Sums over the shapes of the parameters, and of Adam's state."""
    params = jax.eval_shape(params_of(config, jnp.bfloat16), jax.random.key(0))
    trained, frozen = hki.partition(params, trainable_dense=False)
    state = jax.eval_shape(optax.adam(1.0).init, trained)
    own = [on_one(tree, hki.shardings(tree, RULES, mesh)) for tree in (frozen, trained, state)]
    first = {name: x for name, x in frozen.items() if "layer_0/" in name}
    return Plan(*own, gathered=nbytes(frozen), layer=nbytes(first), whole=nbytes(frozen))


# --- what is sent, and how long it takes ----------------------------------------------------------


def sent_by_step(frozen: int, adapters: int) -> dict[str, int]:
    """The results of collectives on one device, in bytes.

    Args:
      frozen: bytes of all frozen weights that are split.
      adapters: those of all factors of LoRA.
    """
    forward = frozen + adapters
    # Backwards the codes are gathered again, and gradients of factors are summed.
    return {"forward pass": forward, "training step": 2 * forward + adapters}


def checked() -> list[list[str]]:
    """The formula and what is compiled, for a small model whose batch and weights are split."""
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    params = jax.jit(params_of(SMALL, jnp.float32))(jax.random.key(0))
    trained, frozen = jax.device_put(
        (found := hki.partition(params, trainable_dense=False)), hki.shardings(found, RULES, mesh)
    )
    tokens = jnp.zeros((8, 33), jnp.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(("rows", "columns"))))
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(SMALL)(tokens)))
    apply = hki.transform_implicit(model).apply

    def loss(trained: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        logits = apply(hki.combine(trained, frozen), tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    split = [x for x in jax.tree.leaves(frozen) if not x.sharding.is_fully_replicated]
    formula = sent_by_step(nbytes(split), nbytes(trained))
    rows = []
    for name, fun in (("forward pass", loss), ("training step", jax.value_and_grad(loss))):
        text = jax.jit(fun).lower(trained, frozen, tokens).compile().as_text()
        rows.append([name, f"{formula[name] / 1024:,.0f}", f"{sent(text) / 1024:,.0f}"])
    return rows


def described(plan: Plan, devices: int) -> dict[str, str]:
    """Lines of the table."""
    tokens = _BATCH.value * _LENGTH.value
    kept = LLAMA_70B.num_layers * tokens * LLAMA_70B.dim * 2
    logits = 2 * tokens * LLAMA_70B.vocab_size * 4
    held = plan.frozen + 2 * plan.adapters + plan.adam
    weights = 2 * plan.gathered  # gathered once more where a layer is computed again
    sent_ = sent_by_step(plan.whole, plan.adapters * devices)["training step"] + plan.whole
    flops = weights_of(LLAMA_70B) * tokens * (2 + 2 + 2)
    link = _LINK.value if devices <= 8 else _NETWORK.value
    computing = flops / (_FLOPS.value * 1e12 * _USED.value)
    sending = sent_ / (link * 1e9)
    reading = weights * 1.5 / (_HBM.value * 1e9)
    bound = max(computing, sending, reading)
    gb = lambda x: f"{x / 1e9:,.2f} GB"  # noqa: E731
    return {
        "frozen weights": gb(plan.frozen),
        "LoRA's factors": gb(plan.adapters),
        "their gradients": gb(plan.adapters),
        "Adam's moments": gb(plan.adam),
        "one layer, gathered": gb(plan.layer),
        "activations between layers": gb(kept),
        "logits and their gradient": gb(logits),
        "in all": gb(held + plan.layer + kept + logits),
        "received in a step": gb(sent_),
        "products, s": f"{computing:.2f}",
        "sending, s": f"{sending:.2f}",
        "reading codes, s": f"{reading:.2f}",
        "tokens a second, at most": f"{devices * tokens / bound:,.0f}",
    }


def weights_of(config: llama.LlamaConfig) -> int:
    """How many weights are in products with matrices."""
    heads = config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    layer = config.dim * (heads + config.dim + 3 * config.hidden_dim)
    return config.num_layers * layer + config.dim * config.vocab_size


if __name__ == "__main__":
    app.run(main)
