"""Fine-tunes SmolLM2-135M-Instruct on Shakespeare: LoRA on 4-bit weights, on two CPU cores.

The model (`models/llama.py`) is plain Haiku and knows nothing of `haiku_implicit`. Its weights are
the 4-bit blocks of a GGUF file, which stay 4-bit throughout; only LoRA's factors are trained.

  python examples/finetune_smollm.py
  python examples/finetune_smollm.py --steps=200 --resume
  python examples/finetune_smollm.py --gguf=model.gguf --text=corpus.txt --prompt="Once upon a time"
"""

import contextlib
import ctypes
import functools
import os
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tqdm import tqdm

import decoding
import haiku_implicit as hki
import smollm
from models import llama

_GGUF = flags.DEFINE_string("gguf", None, "GGUF file of a Llama; by default SmolLM2 from PyPI.")
_TEXT = flags.DEFINE_string("text", None, "UTF-8 text to learn; by default Shakespeare's works.")
_ADAPTER = flags.DEFINE_string(
    "adapter", "smollm_adapter.safetensors", "Where the adapter is saved, and resumed from."
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the saved adapter.")
_STEPS = flags.DEFINE_integer("steps", 30, "Training steps in all.", lower_bound=0)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 10, "Steps between saves.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 2, "Sequences in a batch.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 128, "Tokens in a sequence.", lower_bound=2)
_RANK = flags.DEFINE_integer("rank", 8, "Rank of the LoRA factors.", lower_bound=1)
_ALPHA = flags.DEFINE_float("alpha", 16.0, "LoRA's alpha: the correction is alpha / rank * a @ b.")
_TARGETS = flags.DEFINE_string(
    "targets", r".*_proj/w", "Which parameters get LoRA: a regular expression over module/name."
)
_COMPUTE = flags.DEFINE_enum(
    "compute", "float32", ["float32", "bfloat16", "int8"], "What products with weights compute in."
)
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Adam's learning rate.", lower_bound=0.0)
_EVAL = flags.DEFINE_integer("eval_batches", 4, "Held-out batches to score.", lower_bound=1)
_PROMPT = flags.DEFINE_string("prompt", "ROMEO:\n", "What the samples continue.")
_SAMPLE = flags.DEFINE_integer("sample_tokens", 32, "Tokens to sample.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "Of the samples.", lower_bound=0.01)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the LoRA factors, the batches and the samples.")


class State(NamedTuple):
    """The state that training changes.

    Attributes:
      step: steps done.
      adapter: the trainable half of the parameters (see `hki.partition`).
      optimizer: Adam's state for the adapter.
    """

    step: int
    adapter: Any
    optimizer: Any


class Data(NamedTuple):
    """Token ids, `[tokens]` int32, to train on and held out."""

    train: np.ndarray
    heldout: np.ndarray


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        run()
    except smollm.InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; what was saved in {_ADAPTER.value} can be resumed with --resume")


def run() -> None:
    """Loads, scores, trains, and scores again."""
    started = time.time()
    check_folder(_ADAPTER.value)
    checkpoint = smollm.read_gguf(_GGUF.value or smollm.fetch(smollm.MODEL))
    text = smollm.read_text(_TEXT.value or smollm.fetch(smollm.SHAKESPEARE))
    data = tokenize(checkpoint.tokenizer, text)
    prompt = encode_prompt(checkpoint.tokenizer)
    params = load_params(checkpoint)
    adapter, base = hki.partition(params, trainable_dense=False)
    summary = hki.summary(params, depth=-1, trainable_dense=False)
    print(summary)
    held = sum(x.nbytes for x in jax.tree.leaves(base))
    dense = summary.total.dense_nbytes
    print(
        f"\nweights without LoRA: {held / 1e6:.2f} MB, instead of {dense / 1e6:.0f} MB when dense"
    )

    apply = make_model(checkpoint.config)
    optimizer = optax.adam(_RATE.value)
    state = State(0, adapter, optimizer.init(adapter))
    if _RESUME.value:
        state = load_state(state)
        print(f"resumed from {_ADAPTER.value} at step {state.step}")
    elif os.path.exists(_ADAPTER.value):
        os.replace(_ADAPTER.value, _ADAPTER.value + ".bak")
        print(f"kept the adapter that was there as {_ADAPTER.value}.bak")

    sampler = make_sampler(checkpoint, prompt, state.adapter, base)
    evaluate = make_evaluation(apply, data, sampler, state.adapter, base)
    before = evaluate(state.adapter, base)
    state = train(apply, optimizer, state, base, data)
    after = evaluate(state.adapter, base)
    sampling = time.time()
    sampler(state.adapter, base)
    speed = (len(prompt) + _SAMPLE.value) / (time.time() - sampling)
    for title, (_, sample) in (("before", before), ("after", after)):
        print(f"\n--- sample {title} ---\n{sample}")
    print(f"\nheld-out loss  {before[0]:.4f} -> {after[0]:.4f}   (nats per token)")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "linux" else 2**30
    )
    print(f"peak memory    {peak:.2f} GiB")
    print(f"adapter        {_ADAPTER.value} (step {state.step})")
    print(f"sampling       {speed:.0f} tokens per second, with the 4-bit weights and LoRA")
    print(f"time           {time.time() - started:.0f} s")


# --- model and data ------------------------------------------------------------------------------


def make_model(config: llama.LlamaConfig) -> Any:
    """Returns the logits `[batch, time, vocab]` of tokens, as a function of (params, tokens)."""
    model = hk.transform(lambda tokens: llama.Llama(config)(tokens))
    return hki.transform_implicit(hk.without_apply_rng(model)).apply


def load_params(checkpoint: smollm.Checkpoint) -> dict[str, dict[str, Any]]:
    """Returns the file's parameters, still quantized, with LoRA factors on top of the targets."""
    key = jax.random.key(_SEED.value)
    lora = dict(rank=_RANK.value, alpha=_ALPHA.value, targets=_TARGETS.value)
    try:
        return hki.add_lora(computed(checkpoint.params), key, **lora)
    except ValueError as error:
        raise smollm.InputError(f"--rank, --alpha, --targets: {error}") from error


def computed(params: Any) -> Any:
    """Returns parameters whose products compute in `--compute`. Weights stay in 4 bits."""
    if _COMPUTE.value == "int8":
        return hki.quantize_activations(params, "int8")
    return params if _COMPUTE.value == "float32" else hki.use_implicit_args(in_floats)(params)


def in_floats(tree: Any) -> Any:
    """Returns a tree whose floats have the dtype that the model computes in."""
    dtype = jnp.bfloat16 if _COMPUTE.value == "bfloat16" else jnp.float32

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def tokenize(tokenizer: Any, text: str) -> Data:
    """Returns the text's token ids; the last tenth is held out."""
    ids = smollm.token_ids(tokenizer, text)
    cut = len(ids) - len(ids) // 10
    data = Data(ids[:cut], ids[cut:])
    if min(map(len, data)) <= _CONTEXT.value:
        raise smollm.InputError(
            f"the text has {len(ids)} tokens; with --context={_CONTEXT.value} it takes at least "
            f"{10 * (_CONTEXT.value + 1)}"
        )
    return data


def encode_prompt(tokenizer: Any) -> list[int]:
    """Returns the prompt's token ids, which must fit into the context."""
    ids = list(tokenizer.encode(_PROMPT.value).ids)
    if not ids:
        raise smollm.InputError("--prompt is empty")
    if len(ids) > _CONTEXT.value:
        raise smollm.InputError(
            f"--prompt has {len(ids)} tokens, more than --context={_CONTEXT.value}"
        )
    return ids


def windows(tokens: np.ndarray, key: list[int]) -> np.ndarray:
    """Returns a batch of random windows, `[batch, context + 1]`; equal keys give equal windows."""
    starts = np.random.default_rng(key).integers(len(tokens) - _CONTEXT.value, size=_BATCH.value)
    return np.stack([tokens[s : s + _CONTEXT.value + 1] for s in starts])


# --- training and scoring ------------------------------------------------------------------------


def make_loss(apply: Any) -> Any:
    """Returns the next token's mean cross entropy in nats, as a function of (adapter, base, batch)."""

    def loss(adapter: Any, base: Any, batch: jax.Array) -> jax.Array:
        logits = apply(hki.combine(adapter, base), batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return loss


def train(apply: Any, optimizer: Any, state: State, base: Any, data: Data) -> State:
    """Runs the remaining steps under a progress bar, and saves at intervals."""
    if state.step >= _STEPS.value:
        return state
    batch = windows(data.train, [_SEED.value, state.step])
    update = compiled(make_update(apply, optimizer), state.adapter, state.optimizer, base, batch)
    tokens = _BATCH.value * _CONTEXT.value
    with tqdm(total=_STEPS.value, initial=state.step, desc="training", unit="step") as bar:
        while state.step < _STEPS.value:
            started = time.time()
            batch = windows(data.train, [_SEED.value, state.step])
            loss, adapter, moments = update(state.adapter, state.optimizer, base, batch)
            state = State(state.step + 1, adapter, moments)
            loss = float(loss)
            bar.set_postfix(
                loss=f"{loss:.3f}", tokens_per_s=f"{tokens / (time.time() - started):.0f}"
            )
            bar.update()
            if state.step % _SAVE_EVERY.value == 0 or state.step == _STEPS.value:
                save_state(state)
    return state


def make_update(apply: Any, optimizer: Any) -> Any:
    """Returns a step, as a jitted function of (adapter, moments, base, batch)."""
    loss_and_grad = one_by_one(jax.value_and_grad(make_loss(apply)))

    # The new adapter and moments take the place of the old ones.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(adapter: Any, moments: Any, base: Any, batch: jax.Array) -> Any:
        loss, grads = loss_and_grad(adapter, base, batch)
        updates, moments = optimizer.update(grads, moments, adapter)
        return loss, optax.apply_updates(adapter, updates), moments

    return update


def compiled(fun: Any, *args: Any) -> Any:
    """Compiles a jitted function, and gives the memory back that this took.

    The C library of most Linux systems keeps such memory, here 0.2 GiB, unless it is asked.
    """
    program = fun.lower(*args).compile()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return program


def one_by_one(loss_and_grad: Any) -> Any:
    """Returns the mean loss and gradient of a batch, with activations for one sequence at a time."""

    def run(adapter: Any, base: Any, batch: jax.Array) -> Any:
        def add(total: Any, sequence: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, loss_and_grad(adapter, base, sequence[None])), None

        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, adapter)
        total, _ = jax.lax.scan(add, zero, batch)
        return jax.tree.map(lambda x: x / len(batch), total)

    return run


def make_evaluation(apply: Any, data: Data, sampler: Any, *params: Any) -> Any:
    """Returns a function of (adapter, base): the held-out loss, and a continuation of the prompt."""
    batches = [windows(data.heldout, [_SEED.value, i, 1]) for i in range(_EVAL.value)]
    loss = compiled(jax.jit(make_loss(apply)), *params, batches[0])

    def evaluate(adapter: Any, base: Any) -> tuple[float, str]:
        losses = [float(loss(adapter, base, b)) for b in tqdm(batches, "held out", leave=False)]
        return float(np.mean(losses)), sampler(adapter, base)

    return evaluate


def make_sampler(checkpoint: smollm.Checkpoint, prompt: list[int], *params: Any) -> Any:
    """Returns a function of (adapter, base) that continues the prompt, with a cache of keys and values.

    The loop over tokens is one compiled program; its first steps take the prompt's tokens.
    """
    length = len(prompt) + _SAMPLE.value
    model = decoding.make_model(checkpoint.config, length, "f32")
    given = np.pad(np.asarray(prompt, np.int32), (0, _SAMPLE.value))

    @jax.jit
    def sample(adapter: Any, base: Any, given: jax.Array, key: jax.Array) -> jax.Array:
        params = hki.combine(adapter, base)

        def step(carry: Any, place: Any) -> Any:
            state, last = carry
            i, token = place
            token = jnp.where(i < len(prompt), token, last)
            logits, state = model.apply(params, state, None, token[None, None])
            own_key = jax.random.fold_in(key, i)
            following = jax.random.categorical(own_key, logits[0, -1] / _TEMPERATURE.value)
            return (state, following.astype(token.dtype)), token

        start = in_floats(decoding.empty_cache(model)), jnp.int32(0)
        return jax.lax.scan(step, start, (jnp.arange(length), given))[1]

    key = jax.random.key(_SEED.value)
    program = compiled(sample, *params, given, key)

    def run(adapter: Any, base: Any) -> str:
        ids = np.asarray(program(adapter, base, given, key))
        return checkpoint.tokenizer.decode(ids, skip_special_tokens=False)

    return run


# --- the adapter file ----------------------------------------------------------------------------


def check_folder(path: str) -> None:
    """Raises before the training, not after it, if the adapter's folder does not exist."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise smollm.InputError(
            f"--adapter={path}: the folder {folder} is not there. Make it first"
        )


def save_state(state: State) -> None:
    """Writes adapter and optimizer state to the file, whole or not at all."""
    hki.save(_ADAPTER.value, {"settings": settings(), **state._asdict()})


def load_state(fresh: State) -> State:
    """Reads the saved state, which must fit the present model and settings (those in `fresh`)."""
    path = _ADAPTER.value
    try:
        with hki.open_checkpoint(path) as file:
            check_settings(path, file["settings"])
            found = file.read(like={"settings": settings(), **fresh._asdict()})
    except (OSError, KeyError, ValueError) as error:
        raise smollm.InputError(f"{path}: cannot resume from it ({error})") from error
    return State(*(found[name] for name in State._fields))


def check_settings(path: str, saved: Mapping[str, Any]) -> None:
    """Raises unless an adapter was trained with the present settings."""
    for name, value in settings().items():
        if saved.get(name) != value:
            raise smollm.InputError(
                f"{path}: was made with --{name}={saved.get(name)}, now it is --{name}={value}"
            )


def settings() -> dict[str, Any]:
    """Returns the settings that a run must share with the adapter that it resumes."""
    return {"rank": _RANK.value, "alpha": _ALPHA.value, "targets": _TARGETS.value}


if __name__ == "__main__":
    app.run(main)
