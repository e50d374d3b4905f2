"""Trains LoRA, saves it, and merges it: the common part of scripts that fine-tune models of others.

The flags are those of `finetune_alphafold3.py` and `finetune_graphcast.py`, too.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import flags

import haiku_implicit as hki
from bars import tqdm
from errors import InputError

DO = flags.DEFINE_enum(
    "do",
    "train",
    ["train", "merge", "score", "compare"],
    "Train an adapter; merge one into the weights; score weights as they are; or compare gradients "
    "and costs with a dense twin.",
)
ADAPTER = flags.DEFINE_string(
    "adapter", "adapter.safetensors", "Where the adapter is saved, and read from."
)
MERGED = flags.DEFINE_string("merged", None, "Where merged weights are saved, for --do=merge.")
RANK = flags.DEFINE_integer("rank", 4, "Rank of LoRA's factors.", lower_bound=1)
RUNS = flags.DEFINE_integer("runs", 3, "How often costs are measured.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 30, "Training steps.", lower_bound=0)
RATE = flags.DEFINE_float("learning_rate", 3e-3, "Adam's learning rate.", lower_bound=0.0)


def check_paths(*written: flags.FlagHolder) -> None:
    """Raises before the work, not after it, for a file that can't be read or written.

    Args:
      *written: the flags, beside `--adapter`, that name a file in a folder that has to be there.
    """
    if DO.value == "merge" and MERGED.value is None:
        raise InputError("--merged: give a path for the merged weights")
    if DO.value == "merge" and not pathlib.Path(ADAPTER.value).is_file():
        raise InputError(f"--adapter: there is no file {ADAPTER.value}. --do=train makes one")
    for flag in (ADAPTER, *written):
        if flag.value and not pathlib.Path(flag.value).absolute().parent.is_dir():
            raise InputError(f"--{flag.name}: {flag.value} is in a folder that is not there")


def with_lora(params: Any, **choice: Any) -> Any:
    """Adds LoRA to the weights that are chosen as for `hki.add_lora`."""
    try:
        return hki.add_lora(params, jax.random.key(0), rank=RANK.value, **choice)
    except ValueError as error:
        raise InputError(f"--rank={RANK.value}: {error}") from error


def train(
    frozen: tuple[Any, Any],
    optimizer: optax.GradientTransformation,
    gradients: Callable[[Any, Any], tuple[jax.Array, Any]],
    example_of: Callable[[int], Any],
    score: Callable[[Any], float],
    title: str,
) -> None:
    """Trains LoRA, prints a loss before and after, and saves the adapter.

    Args:
      frozen: the result of `hki.freeze`.
      optimizer: the optimizer.
      gradients: gives the loss and its gradients, for the trained arrays and an example.
      example_of: gives the example of a step, by its number.
      score: gives the loss that is printed, for the trained arrays.
      title: the name of this loss.
    """
    model, trained = frozen
    # On a chosen device, as the frozen arrays are: otherwise JAX compiles the second step once more.
    trained, state = jax.device_put((trained, optimizer.init(trained)), jax.devices()[0])

    @jax.jit
    def step(trained: Any, state: Any, example: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = gradients(trained, example)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, loss

    before = score(trained)
    with tqdm(range(_STEPS.value), desc="training", unit="step") as bar:
        for number in bar:
            trained, state, loss = step(trained, state, example_of(number))
            bar.set_postfix(loss=f"{float(loss):.4f}")
    print(f"\n{title}  {before:.4f} -> {score(trained):.4f}")
    hki.save(ADAPTER.value, hki.get_adapter(model.params(trained)))
    size = pathlib.Path(ADAPTER.value).stat().st_size
    print(f"adapter  {ADAPTER.value}, {size / 1e6:.2g} MB")


def merged(base: Any) -> Any:
    """Merges the saved adapter into weights."""
    try:
        params = hki.set_adapter(base, hki.load(ADAPTER.value))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--adapter: {ADAPTER.value}: {error}") from error
    return hki.materialize(hki.merge_lora(params))


def nudged(trained: Any) -> Any:
    """Moves LoRA away from its start: the factors `b` are zero there, which would hide errors."""
    return jax.tree.map(lambda x: x + jnp.asarray(0.01, x.dtype), trained)
