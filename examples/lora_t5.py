"""Puts LoRA on an unmodified T5: equal outputs at first, then it memorizes a pair of texts.

The model (`models/t5.py`) is plain Haiku. Every linear weight gets LoRA factors, only these are
trained, and the sum of a weight and its correction is never computed.

    python examples/lora_t5.py
    python examples/lora_t5.py --repo=google-t5/t5-small
"""

import os
import pathlib
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
import hub
from errors import InputError, main_of
from models import t5
from printing import heading, table

_REPO = flags.DEFINE_string("repo", None, "A T5 of the Hugging Face hub, by name.")
_FOLDER = flags.DEFINE_string("folder", None, "A folder in the hub's layout that holds a T5.")
_INPUT = flags.DEFINE_string("input", "Some input", "What a T5 with a tokenizer reads,")
_OUTPUT = flags.DEFINE_string("output", "Some output", "and what it learns to answer.")
_LAYERS = flags.DEFINE_integer("layers", 6, "Layers of the encoder and of the decoder.", 1)
_WIDTH = flags.DEFINE_integer("width", 512, "Width of the T5 with random weights.", 8)
_RANK = flags.DEFINE_integer("rank", 8, "Rank of the LoRA factors.", 1)
_RATE = flags.DEFINE_float("learning_rate", 3e-4, "Adam's learning rate.", 0.0)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of training.", 1)
# A narrow model can't be as sure of a token: its logits are at most the root of its width.
_GOAL = flags.DEFINE_float("goal", 0.02, "What the last loss has to be below.", 0.0)
_PLOT = flags.DEFINE_string("plot", None, "Where the curve of the loss is saved, a PNG.")

# All linear weights. The embeddings, which are also the output projection, get no LoRA.
WEIGHTS = r".*/w"
# Token ids instead of texts, if there is no tokenizer; the last one ends each.
READ, WRITTEN = (507, 3785, 1), (507, 3911, 1)


def run() -> None:
    """Puts LoRA on the model, compares, trains, and compares the frozen weights."""
    model, params, config, texts = load()
    read, written = (jnp.asarray(ids)[None] % config.vocab_size for ids in texts)
    batch = read, jnp.ones(read.shape, bool), jnp.pad(written, ((0, 0), (1, 0)))
    lora = hki.add_lora(
        params, jax.random.key(1234), rank=_RANK.value, targets=WEIGHTS, init=jax.random.normal
    )
    apply = hki.transform_implicit(model).apply
    heading(f"T5, {config.num_layers} + {config.num_decoder_layers} layers of width {config.dim}")
    with hki.materialization("error"):  # a weight that became dense would stop the program
        plain, wrapped = jax.jit(model.apply)(params, *batch), jax.jit(apply)(lora, *batch)
        difference = float(abs(plain - wrapped).max())
        print(f"largest difference of the outputs, LoRA to none: {difference}")
        losses, trained = train(apply, lora, batch)
    table(["step", "loss"], [[i, f"{loss:.3f}"] for i, loss in enumerate(losses)])
    save_plot(losses)
    check(params, trained, difference, losses)


def check(params: Any, trained: Any, difference: float, losses: list[float]) -> None:
    """Checks the promises for the start, the frozen weights and the end."""
    weights, factors, others = 0, 0, 0
    for module, own in params.items():
        for name, before in own.items():
            after = trained[module][name]
            if isinstance(after, hki.LoRA):
                weights += before.nbytes
                factors += after.a.nbytes + after.b.nbytes
                assert np.any(after.b), f"{module}/{name} was not trained"
                after = after.w
            else:
                others += before.nbytes
            np.testing.assert_array_equal(after, before, f"{module}/{name}")
    mb = [f"{nbytes / 1e6:.2f} MB" for nbytes in (weights, others, factors)]
    print(f"\nfrozen: {mb[0]} of weights and {mb[1]} beside them, all as they were")
    print(f"trained: {mb[2]} of factors")
    assert difference == 0.0
    assert losses[-1] < _GOAL.value, "the pair was not learned"


def train(apply: Any, params: Any, batch: tuple[jax.Array, ...]) -> tuple[list[float], Any]:
    """Trains the factors; returns the loss before each step, and the parameters."""
    optimizer = hki.freeze_declared(optax.adam(_RATE.value), trainable_dense=False)

    def loss_of(params: Any, read: jax.Array, mask: jax.Array, written: jax.Array) -> jax.Array:
        logits = apply(params, read, mask, written[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, written[:, 1:]).sum()

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        loss, grads = hki.value_and_grad(loss_of, trainable_dense=False)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return loss, hki.apply_updates(params, updates), state

    state, losses = optimizer.init(params), []
    for _ in (bar := tqdm(range(_STEPS.value), "training", leave=False)):
        loss, params, state = update(params, state)
        losses.append(float(loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses, params


def load() -> tuple[hk.Transformed, Any, t5.T5Config, tuple[Any, Any]]:
    """Returns the model that the flags name or one with random weights, and the pair of token ids."""
    if _REPO.value or _FOLDER.value:
        folder = pathlib.Path(_FOLDER.value or hub.fetch(_REPO.value))
        config, model, params = hub.load_as(t5.T5Config, folder)
        return model, params, config, encode(folder / "tokenizer.json")
    width = _WIDTH.value
    config = t5.T5Config(
        dim=width,
        num_layers=_LAYERS.value,
        num_decoder_layers=_LAYERS.value,
        head_dim=width // 8,
        hidden_dim=4 * width,
    )
    model = hk.without_apply_rng(hk.transform(lambda *batch: t5.T5(config)(*batch)))
    ids = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), ids, ids == 0, ids)
    return model, params, config, (READ, WRITTEN)


def encode(path: pathlib.Path) -> tuple[Any, Any]:
    """Returns the texts as token ids, if there is a tokenizer."""
    if not path.exists():
        return READ, WRITTEN
    try:
        tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the binding raises errors without a narrower common class
        raise InputError(f"{path}: {error}") from error
    return tokenizer.encode(_INPUT.value).ids, tokenizer.encode(_OUTPUT.value).ids


def save_plot(losses: list[float]) -> None:
    """Draws the losses, if the flags name a file."""
    if not _PLOT.value:
        return
    try:
        from matplotlib import figure
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from error
    axes = (drawing := figure.Figure(figsize=(6, 4), layout="constrained")).add_subplot()
    axes.semilogy(losses, marker="o")
    axes.set(xlabel="step", ylabel="loss (nats, all tokens)", title="LoRA on T5 memorizes a pair")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    drawing.savefig(_PLOT.value, dpi=150)
    print(f"\nthe curve is in {_PLOT.value}")


if __name__ == "__main__":
    app.run(main_of(run))
