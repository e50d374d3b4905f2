"""Plans QLoRA of a Llama with 70 billion weights on many accelerators, from its shapes only.

    python -m benchmarks.plan_70b

The model is never made: its parameters are `jax.ShapeDtypeStruct`s, quantized and sharded like real
ones, on meshes without devices. Bytes of weights, adapters and Adam's state on a device are
exact sums over these. The bytes sent are a formula, which is first compared with the compiled programs
of a small Llama on eight devices of this CPU. Times are lower bounds from the rates in the flags.
"""

import math
import os
import pathlib
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name
from models import llama  # noqa: E402

# NVIDIA's data sheet of the H100 SXM: dense bfloat16, HBM3, and NVLink in both directions together.
_FLOPS = flags.DEFINE_float("tflops", 989.0, "Of one accelerator, in bfloat16, 10^12 a second.")
_HBM = flags.DEFINE_float("hbm", 3350.0, "Its memory's bandwidth, GB/s.")
_LINK = flags.DEFINE_float("link", 450.0, "GB/s into one device of a machine (half of 900).")
_NETWORK = flags.DEFINE_float(
    "network", 50.0, "The same between machines (InfiniBand NDR, 400 Gb/s)."
)
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
# By columns, so that no group is cut. The embedding and the head are on all devices: XLA would gather
# the activations of all devices rather than these weights.
RULES = [(".*_proj/w", P(None, "d")), (".*", P())]


class Plan(NamedTuple):
    """The contents of one device, in bytes.

    Attributes:
      frozen: frozen weights.
      adapters: LoRA's factors.
      adam: Adam's two moments of the factors.
      layer: the codes and scales of one layer, gathered.
      codes: the codes and scales of all layers, gathered one after the other.
      a: the first factors, which are on all devices.
      b: the second factors, gathered.
    """

    frozen: int
    adapters: int
    adam: int
    layer: int
    codes: int
    a: int
    b: int


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    print(markdown.table(["a small Llama, KB a device", "formula", "compiled"], checked()), "\n")
    counts = (8, 256)
    columns = [
        described(plan_of(LLAMA_70B, AbstractMesh((count,), ("d",))), count) for count in counts
    ]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    header = ["QLoRA of 70B, one device of", *map(str, counts)]
    print(markdown.table(header, rows))


# --- shapes --------------------------------------------------------------------------------------


def params_of(config: llama.LlamaConfig, dtype: Any) -> Any:
    """Returns a function from a key to parameters: nf4 in groups of 64 or less, LoRA, others dense."""
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(config)(tokens)))

    def make(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, 2), jnp.int32))
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        size = min(64, config.dim // 8)
        params = hki.quantize_params(params, dtype="nf4", group_size=size, targets=".*_proj/w")
        return hki.add_lora(params, key, rank=_RANK.value, targets=".*_proj/w")

    return make


def on_one(tree: Any, places: Any) -> int:
    """Returns the bytes of a tree on one device."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
    return sum(math.prod(p.shard_shape(x.shape)) * x.dtype.itemsize for x, p in pairs)


def nbytes(tree: Any) -> int:
    """Returns the bytes of a whole tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def plan_of(config: llama.LlamaConfig, mesh: Any) -> Plan:
    """Sums over the shapes of the parameters, and of Adam's state."""
    params = jax.eval_shape(params_of(config, jnp.bfloat16), jax.random.key(0))
    trained, frozen = hki.partition(params, trainable_dense=False)
    state = jax.eval_shape(optax.adam(1.0).init, trained)
    own = [on_one(tree, hki.shardings(tree, RULES, mesh)) for tree in (frozen, trained, state)]
    return Plan(*own, *gathered_of(trained, frozen, config.num_layers))


def gathered_of(trained: Any, frozen: Any, layers: int) -> tuple[int, int, int, int]:
    """Returns the bytes of one layer's codes and scales, of all layers', and of LoRA's two factors."""
    is_lora = lambda x: isinstance(x, hki.LoRA)  # noqa: E731
    codes = nbytes([x.w for x in jax.tree.leaves(frozen, is_leaf=is_lora) if is_lora(x)])
    factors = [x for x in jax.tree.leaves(trained, is_leaf=is_lora) if is_lora(x)]
    return codes // layers, codes, nbytes([x.a for x in factors]), nbytes([x.b for x in factors])


# --- bytes sent and times -------------------------------------------------------------------------


def sent_by_step(codes: int, a: int, b: int, passes: int) -> int:
    """Returns the bytes of the results of collectives on one device in a training step.

    Args:
      codes: the bytes of the codes and scales of all layers.
      a, b: the bytes of LoRA's factors.
      passes: how often codes are gathered: once, if they are kept for the gradient.
    """
    # In addition to the codes: `b` in each pass, and the sums of gradients over devices.
    return passes * (codes + b) + a + b


def checked() -> list[list[str]]:
    """Compares the formula with compiled programs of a small model, with split batch and weights."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    params = jax.jit(params_of(SMALL, jnp.float32))(jax.random.key(0))
    trained, frozen = jax.device_put(
        (found := hki.partition(params, trainable_dense=False)), hki.shardings(found, RULES, mesh)
    )
    tokens = jnp.zeros((8, 129), jnp.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("d")))
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(SMALL)(tokens)))
    apply = hki.transform_implicit(model).apply

    def loss(trained: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        logits = apply(hki.combine(trained, frozen), tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    _, codes, a, b = gathered_of(trained, frozen, SMALL.num_layers)
    formulas = {"forward pass": codes + b, "training step": sent_by_step(codes, a, b, passes=1)}
    rows = []
    for name, fun in (("forward pass", loss), ("training step", jax.value_and_grad(loss))):
        text = jax.jit(fun).lower(trained, frozen, tokens).compile().as_text()
        rows.append([name, f"{formulas[name] / 1024:,.0f}", f"{sent(text) / 1024:,.0f}"])
    return rows


def described(plan: Plan, devices: int) -> dict[str, str]:
    """Returns lines of the table: the bytes held, the bytes sent, and lower bounds of the times."""
    tokens = _BATCH.value * _LENGTH.value
    # Each layer's input is kept, and the layer is computed again for the gradient.
    kept = LLAMA_70B.num_layers * tokens * LLAMA_70B.dim * 2
    logits = 2 * tokens * LLAMA_70B.vocab_size * 4
    held = plan.frozen + 2 * plan.adapters + plan.adam + plan.layer + kept + logits
    received = sent_by_step(plan.codes, plan.a, plan.b, passes=2)
    # Products per weight: forward, recomputed, and activations' gradients; none for frozen weights.
    flops = 3 * 2 * weights_of(LLAMA_70B) * tokens
    link = _LINK.value if devices <= 8 else _NETWORK.value
    times = {
        "products, s": flops / (_FLOPS.value * 1e12 * _USED.value),
        "receiving, s": received / (link * 1e9),
        "reading codes three times, s": 3 * plan.codes / (_HBM.value * 1e9),
    }
    gb = lambda x: f"{x / 1e9:,.2f} GB"  # noqa: E731
    return {
        "frozen weights": gb(plan.frozen),
        "LoRA's factors": gb(plan.adapters),
        "their gradients": gb(plan.adapters),
        "Adam's moments": gb(plan.adam),
        "codes of one layer, gathered": gb(plan.layer),
        "inputs of layers": gb(kept),
        "logits and their gradient": gb(logits),
        "in all": gb(held),
        "received in a step": gb(received),
        **{name: f"{time:.2f}" for name, time in times.items()},
        "tokens a second of all, at most": f"{devices * tokens / max(times.values()):,.0f}",
    }


def weights_of(config: llama.LlamaConfig) -> int:
    """Counts the weights that are operands of matrix products."""
    heads = config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    layer = config.dim * (heads + config.dim + 3 * config.hidden_dim)
    return config.num_layers * layer + config.dim * config.vocab_size


if __name__ == "__main__":
    app.run(main)
