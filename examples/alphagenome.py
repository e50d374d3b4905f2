"""Tries int8, int4 and LoRA in AlphaGenome's sequence tower, against dense weights.

The model is your own checkout of https://github.com/google-deepmind/alphagenome_research, with its
dependencies, and is not modified. The weights are random, or yours (`--weights`).

    python examples/alphagenome.py --repo=PATH
"""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from absl import app, flags

import dense_twin
from errors import main_of

_REPO = flags.DEFINE_string("repo", None, "Folder of a checkout; by default what is installed.")
_WEIGHTS = flags.DEFINE_string(
    "weights", None, "Folder of a checkpoint; by default random weights."
)
_LENGTH = flags.DEFINE_integer("length", 4096, "Bases of the sequence, a multiple of 2048.", 2048)
_PARTS = flags.DEFINE_list("parts", ["tower"], "What is compared: encoder, tower, decoder.")
_RUNS = flags.DEFINE_integer("runs", 3, "How often each program is timed.", lower_bound=1)


def run() -> None:
    """Compares each part with its dense twin."""
    (model,) = dense_twin.modules_of(_REPO.value, ["alphagenome_research.model.model"])
    weights = dense_twin.read_weights(_WEIGHTS.value) if _WEIGHTS.value else None
    models = parts_of(model)
    if unknown := set(_PARTS.value) - set(models):
        raise dense_twin.InputError(f"--parts: {', '.join(unknown)} is not of {', '.join(models)}")
    for name in _PARTS.value:
        show(name, *models[name], weights)


def parts_of(model: Any) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Returns the parts of the model by name: a function, and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((1, _LENGTH.value, 4), jnp.float32)
    encoder, tower, decoder = (
        lambda *args, kind=kind: kind()(*args)
        for kind in (model.SequenceEncoder, model.TransformerTower, model.SequenceDecoder)
    )
    initial = hk.transform_with_state(encoder)
    trunk, skips = jax.eval_shape(
        lambda x: initial.apply(*initial.init(jax.random.PRNGKey(0), x), None, x)[0], x
    )
    return dict(encoder=(encoder, [x]), tower=(tower, [trunk]), decoder=(decoder, [trunk, skips]))


def show(name: str, model: Callable[..., Any], shapes: list[Any], weights: Any) -> None:
    """Compares a part of the model with its dense twin, in a table."""
    keys = iter(jax.random.split(jax.random.key(0), 99))
    args = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), shapes)
    transformed = hk.transform_with_state(model)
    params, state = dense_twin.random_params(transformed, *args)
    if weights is not None:
        params, state = map(dense_twin.params_from, weights, (params, state))
    if jax.default_backend() == "cpu":
        transformed = dense_twin.with_products_for_cpus(transformed, params, state, args)
    rest = (state, jax.random.PRNGKey(0), *args)
    part = dense_twin.Part(name, transformed, params, rest)
    dense_twin.compare(part, rtol=5e-3, runs=_RUNS.value)


if __name__ == "__main__":
    app.run(main_of(run))
