"""Runs attention over a key-value cache in 8 and 4 bits, on one device and over eight.

    python examples/quantized_attention.py

The model (`models/cached_attention.py`) is plain Haiku: keys, values and an index in its state, as in
EasyDeL's `_concatenate_to_cache`, grouped heads, causal and padding masks. It runs unchanged over
the dense cache and over quantized ones, first on one device, and then with the cache split by batch,
positions and heads over eight devices of the host. The output is the bytes of the cache, the greatest
difference from the dense cache's outputs, and the time for each token.
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec
from tqdm import tqdm

import haiku_implicit as hki
from cache_kinds import make_model
from haiku_implicit import layers
from models.cached_attention import CACHE_SPEC, Sizes

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch", 4, "Sequences, a multiple of 2.")
flags.DEFINE_integer("heads", 16, "Heads of queries.")
flags.DEFINE_integer("kv_heads", 4, "Heads of keys and values, a multiple of 2.")
flags.DEFINE_integer("head_dim", 64, "Width of a head.")
flags.DEFINE_integer("length", 1024, "Positions of the cache, a multiple of 2.")
flags.DEFINE_integer("prompt", 256, "Positions that are read at once.")
flags.DEFINE_integer("tokens", 32, "Positions that follow one by one.")

DEVICES = 8
MESH = (2, 1, 2, 2)  # dp, fsdp, tp, sp
# The largest difference from the dense cache, relative to the largest output.
TOLERANCES = {"dense": 0.0, "int8": 0.02, "int4": 0.3}


class Run(NamedTuple):
    """The results of a run with one kind of cache.

    Attributes:
      nbytes: the bytes of the keys and values.
      outputs: `[batch, prompt + tokens, dim]`.
      per_token: seconds.
      dense: the number of arrays that became dense for lack of a rule.
    """

    nbytes: int
    outputs: np.ndarray
    per_token: float
    dense: int


def split(state: Any) -> Any:
    """Returns the state with its cache split over the current mesh."""
    leaves = hki.tree_map_with_implicit(lambda x: CACHE_SPEC if x.ndim else PartitionSpec(), state)
    return layers.with_sharding_constraint(state, leaves)


def run(sizes: Sizes, kind: str, params: Any, x: Any, mask: Any, mesh: Any = None) -> Run:
    """Reads the prompt, and then the other positions one by one."""
    model = make_model(sizes, kind, mesh)
    apply = jax.jit(model.apply, donate_argnums=1)
    prompt = x[:, : FLAGS.prompt]
    with hki.materialization_report() as report:
        _, state = model.init(jax.random.key(0), prompt[:, :1], mask)
        out, state = apply(params, state, None, prompt, mask)
        state = split(state)
        nbytes = sum(c.nbytes for c in hki.tree_leaves_with_implicit(state) if c.ndim)
        outputs, seconds = [out], []
        steps = tqdm(range(FLAGS.prompt, x.shape[1]), desc=f"{kind:5s}", leave=False)
        for i in steps:
            start = time.perf_counter()
            out, state = jax.block_until_ready(apply(params, state, None, x[:, i : i + 1], mask))
            seconds.append(time.perf_counter() - start)
            outputs.append(out)
    for cache in hki.tree_leaves_with_implicit(state):
        if mesh is not None and cache.ndim:
            assert all(len(y.sharding.device_set) == DEVICES for y in jax.tree.leaves(cache))
    joined = np.concatenate([np.asarray(y) for y in outputs], axis=1)
    return Run(nbytes, joined, float(np.median(seconds)), len(report))


def at_once(sizes: Sizes, params: Any, x: Any, mask: Any) -> np.ndarray:
    """Computes the attention with all positions read at once."""
    model = make_model(sizes, "dense")
    _, state = model.init(jax.random.key(0), x[:, :1], mask)
    return np.asarray(model.apply(params, state, None, x, mask)[0])


def table(runs: dict[str, Run], exact: Run, tokens: np.ndarray) -> None:
    """Prints bytes, differences of the outputs at tokens (not at padding), and times."""
    largest = np.abs(exact.outputs[tokens]).max()
    print(f"{'cache':8s} {'bytes':>12s} {'part':>6s} {'difference':>11s} {'ms/token':>9s}")
    for kind, got in runs.items():
        difference = np.abs(got.outputs - exact.outputs)[tokens].max() / largest
        part = got.nbytes / exact.nbytes
        print(
            f"{kind:8s} {got.nbytes:12,d} {part:6.1%} {difference:11.2%} {1e3 * got.per_token:9.2f}"
        )
        assert difference <= TOLERANCES[kind] + 1e-5, (kind, difference)
        assert got.dense == 0, f"{kind}: {got.dense} arrays were made dense"


def main(_: Any) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sizes = Sizes(FLAGS.heads, FLAGS.kv_heads, FLAGS.head_dim, FLAGS.length)
    total, dim = FLAGS.prompt + FLAGS.tokens, FLAGS.heads * FLAGS.head_dim
    x = jax.random.normal(jax.random.key(0), (FLAGS.batch, total, dim))
    # Each sequence begins with a different amount of padding.
    padding = np.arange(FLAGS.batch) * FLAGS.prompt // (2 * FLAGS.batch)
    mask = jnp.asarray(np.arange(FLAGS.length) >= padding[:, None])
    tokens = np.asarray(mask)[:, :total]
    params, _ = make_model(sizes, "dense").init(jax.random.key(1), x[:, :1], mask)

    print(f"one device: {FLAGS.heads} heads share {FLAGS.kv_heads}, {FLAGS.length} positions")
    alone = {kind: run(sizes, kind, params, x, mask) for kind in TOLERANCES}
    table(alone, alone["dense"], tokens)

    mesh = layers.create_mesh(MESH, backend="cpu")
    lengths = ", ".join(f"{name}={n}" for name, n in mesh.shape.items())
    print(f"\n{DEVICES} devices: {lengths}")
    set_mesh: Any = getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh")  # noqa: B009
    with set_mesh(mesh):
        parts = {kind: run(sizes, kind, params, x, mask, mesh) for kind in TOLERANCES}
    table(parts, alone["dense"], tokens)

    whole = at_once(sizes, params, x, mask)
    step_by_step = np.abs(whole - alone["dense"].outputs)[tokens].max()
    over_devices = max(
        np.abs(parts[kind].outputs - alone[kind].outputs)[tokens].max() for kind in TOLERANCES
    )
    print(f"\nstep by step against all at once: {step_by_step:.1e}")
    print(f"eight devices against one, the same cache: {over_devices:.1e}")
    assert step_by_step < 1e-4 and over_devices < 1e-4
    for kind, bits in (("int8", 8), ("int4", 4)):  # and a float32 scale for each vector
        held = (FLAGS.head_dim * bits / 8 + 4) / (FLAGS.head_dim * 4)
        assert alone[kind].nbytes == parts[kind].nbytes == held * alone["dense"].nbytes


if __name__ == "__main__":
    app.run(main)
