"""Counts the bytes that training holds for SmolLM2-135M, and draws them for the first page.

    python -m benchmarks.training_bytes

The model is never made: its parameters are `jax.ShapeDtypeStruct`s, and the bytes exact sums over them.
Activations, which depend on the batch, come on top, and are the same in all three ways.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import haiku_implicit as hki

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # its scripts import each other by name
from models import llama  # noqa: E402

IMAGE = ROOT / "docs" / "images" / "training_bytes.svg"
# https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json
SMOLLM2 = llama.LlamaConfig(
    vocab_size=49_152, dim=576, num_layers=30, num_heads=9, num_kv_heads=3, hidden_dim=1536
)
RANK, GROUP = 8, 32  # as in the three lines on that page
PARTS = {
    "weights": "#4c78a8",
    "LoRA": "#e45756",
    "gradients": "#f2b447",
    "Adam's two moments": "#72b7b2",
}


def main() -> None:
    counts = {name: counted(make) for name, make in ways().items()}
    for name, parts in counts.items():
        shown = ", ".join(f"{part} {count / 1e6:.1f}" for part, count in parts.items())
        print(f"{name}: {sum(parts.values()) / 1e6:.1f} MB ({shown})")
    draw(counts)


def ways() -> dict[str, Callable[[Any, jax.Array], Any]]:
    """The three ways, each as a function of dense parameters and a key."""

    def lora(params: Any, key: jax.Array) -> Any:
        return hki.add_lora(params, key, rank=RANK)

    def qlora(params: Any, key: jax.Array) -> Any:
        return lora(hki.quantize_params(params, dtype="int4", group_size=GROUP), key)

    return {
        "all weights, float32": lambda params, key: params,
        "LoRA, float32": lora,
        "LoRA on 4 bits": qlora,
    }


def counted(make: Callable[[Any, jax.Array], Any]) -> dict[str, int]:
    """Returns the bytes of each of `PARTS`."""
    model = hk.without_apply_rng(hk.transform(lambda tokens: llama.Llama(SMOLLM2)(tokens)))

    def params_of(key: jax.Array) -> Any:
        return make(model.init(key, jnp.zeros((1, 2), jnp.int32)), key)

    params = jax.eval_shape(params_of, jax.random.key(0))
    tuned = any(isinstance(x, hki.LoRA) for x in implicit_leaves(params))
    trained, frozen = hki.partition(params, trainable_dense=not tuned)
    state = jax.eval_shape(optax.adam(1.0).init, trained)
    sizes = (
        nbytes(frozen if tuned else trained),
        nbytes(trained) if tuned else 0,
        nbytes(trained),
        nbytes(state),
    )
    return dict(zip(PARTS, sizes, strict=True))


def implicit_leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, hki.ImplicitArray))


def nbytes(tree: Any) -> int:
    """Returns the bytes of a tree; two codes of 4 bits share a byte already."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def draw(counts: dict[str, dict[str, int]]) -> None:
    """Draws a bar for each way; its numbers are MB."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "0", "svg.fonttype": "none", "font.size": 11})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 2.5), layout="constrained")
    starts = [0.0] * len(counts)
    for part, color in PARTS.items():
        widths = [parts[part] / 1e6 for parts in counts.values()]
        axes.barh(list(counts), widths, left=starts, color=color, label=part, height=0.6)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, total in enumerate(starts):
        axes.annotate(
            f"{total:,.0f} MB", (total, row), (5, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.set_xlim(0, max(starts) * 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("MB held in training SmolLM2-135M, without activations")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
