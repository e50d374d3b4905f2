"""Runs GPT-2 without its biases: as zeros in memory, and as symbolic zeros, which cost nothing.

The model (`models/gpt2.py`) is plain Haiku and always adds its biases. With dense zeros it adds
zeros; with symbolic ones there is neither a buffer nor an addition. Layer normalization is unchanged.

    python examples/symbolic_zeros.py
    python examples/symbolic_zeros.py --repo=openai-community/gpt2
"""

import dataclasses
import re
import time
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
import hub
from errors import main_of
from models import gpt2
from printing import heading, table

_REPO = flags.DEFINE_string("repo", None, "A GPT-2 of the Hugging Face hub, by name.")
_FOLDER = flags.DEFINE_string("folder", None, "A folder in the hub's layout that holds a GPT-2.")
_LAYERS = flags.DEFINE_integer("layers", 12, "Layers of the GPT-2 with random weights.", 1)
_WIDTH = flags.DEFINE_integer("width", 768, "Its width, a multiple of 12.", 12)
_TOKENS = flags.DEFINE_integer("tokens", 9, "How many tokens it reads.", 1)

# The bias of every linear layer; biases of layer normalization are called `offset`.
BIASES = r".*/b"


@dataclasses.dataclass
class Outcome:
    """The measurements of the model with one kind of biases.

    Attributes:
        logits: `[1, tokens, vocab]`.
        lowered: Additions in the program that JAX gives to XLA.
        compiled: Additions in XLA's compiled program.
        flops: Floating-point operations, as XLA counts them.
        nbytes: Bytes of the biases.
        milliseconds: A forward pass, the fastest of ten.
    """

    logits: jax.Array
    lowered: int
    compiled: int
    flops: float
    nbytes: int
    milliseconds: float


def run() -> None:
    """Compares three kinds of biases in one model."""
    model, params, config = load()
    tokens = jnp.arange(1, 1 + _TOKENS.value)[None] % config.vocab_size
    symbolic = hki.zero_params(params, targets=BIASES)
    # The biases of a model without the library.
    dense = hki.materialize(symbolic)
    some = symbolic["gpt2/layer_0/attention/qkv"]["b"]
    heading(f"GPT-2, {config.num_layers} layers of width {config.dim}")
    print("a new bias:", some)

    kinds = {"as they were": params, "dense zeros": dense, "symbolic zeros": symbolic}
    with hki.materialization("error"):
        found = {
            name: measure(model, p, tokens)
            for name, p in tqdm(kinds.items(), "three kinds", leave=False)
        }
    table(
        ["biases", "bytes", "additions", "after XLA", "FLOPs", "ms", "last logits, mean"],
        [
            [
                name,
                f"{x.nbytes:,}",
                x.lowered,
                x.compiled,
                f"{x.flops:,.0f}",
                f"{x.milliseconds:.1f}",
                f"{x.logits[0, -1].mean():.6f}",
            ]
            for name, x in found.items()
        ],
    )
    check(params, symbolic, *found.values())


def check(params: Any, symbolic: Any, original: Outcome, dense: Outcome, new: Outcome) -> None:
    """Checks for equal logits from fewer additions, and unchanged layer normalization."""
    biases = [b for b in jax.tree.leaves(symbolic, is_leaf=is_zeros) if is_zeros(b)]
    saved = dense.lowered - new.lowered
    difference = float(abs(new.logits - dense.logits).max())
    exact = np.array_equal(new.logits, dense.logits)
    print(f"\n{len(biases)} biases became symbolic, and {saved} additions are gone")
    print(
        f"logits of dense and symbolic zeros: {'the same bits' if exact else f'{difference:.1e}'}"
    )
    assert saved == len(biases)
    assert new.compiled < dense.compiled and new.flops < dense.flops
    assert new.nbytes == 0 < dense.nbytes == original.nbytes
    np.testing.assert_allclose(new.logits, dense.logits, rtol=1e-4, atol=1e-4)
    assert abs(new.logits - original.logits).max() > 1e-3, "the biases made no difference before"
    for module, own in params.items():
        if module.endswith("norm"):
            assert own.keys() == {"scale", "offset"}
            assert all(symbolic[module][name] is own[name] for name in own), module


def is_zeros(x: Any) -> bool:
    return isinstance(x, hki.Zeros)


def load() -> tuple[hk.Transformed, dict[str, dict[str, jax.Array]], gpt2.Gpt2Config]:
    """Returns the model that the flags name, or one with random weights."""
    if _REPO.value or _FOLDER.value:
        folder = _FOLDER.value or hub.fetch(_REPO.value)
        config, model, params = hub.load_as(gpt2.Gpt2Config, folder)
        return model, params, config
    width = _WIDTH.value
    config = gpt2.Gpt2Config(dim=width, num_layers=_LAYERS.value, hidden_dim=4 * width)
    model = hk.without_apply_rng(hk.transform(lambda tokens: gpt2.Gpt2(config)(tokens)))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    # Haiku starts biases at zero, which would hide the change.
    keys = iter(jax.random.split(jax.random.key(1), len(params)))
    for own in params.values():
        if "b" in own:
            own["b"] = 0.1 * jax.random.normal(next(keys), own["b"].shape)
    return model, params, config


def measure(model: hk.Transformed, params: Any, tokens: jax.Array) -> Outcome:
    """Lowers, compiles and runs the model; only implicit arrays need it to be wrapped."""
    lowered = jax.jit(hki.transform_implicit(model).apply).lower(params, tokens)
    compiled = lowered.compile()
    logits = compiled(params, tokens).block_until_ready()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        compiled(params, tokens).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return Outcome(
        logits,
        len(re.findall(r"stablehlo\.add\b", lowered.as_text())),
        len(re.findall(r" add\(", compiled.as_text())),
        compiled.cost_analysis()["flops"],
        sum(own["b"].nbytes for own in params.values() if "b" in own),
        1e3 * min(seconds),
    )


if __name__ == "__main__":
    app.run(main_of(run))
