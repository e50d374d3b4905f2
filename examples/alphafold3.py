"""Tries int8, int4 and LoRA in AlphaFold 3's Pairformer and diffusion transformer, against dense ones.

The model is your own checkout of https://github.com/google-deepmind/alphafold3, with its dependencies,
and is not modified. The weights are random, or yours (`--weights`); this never prints them.

    python examples/alphafold3.py --repo=PATH
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from absl import app, flags

import dense_twin
from errors import main_of

_REPO = flags.DEFINE_string("repo", None, "Folder of a checkout; by default what is installed.")
_WEIGHTS = flags.DEFINE_string("weights", None, "Folder of your weights; by default random ones.")
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens of the structure.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers of each stack, a multiple of 4.", lower_bound=4)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "What it computes in.")
_RUNS = flags.DEFINE_integer("runs", 5, "How often each program is timed.", lower_bound=1)


def run() -> None:
    """Compares each part with its dense twin."""
    network = "alphafold3.model.network"
    names = [f"{network}.{name}" for name in ("modules", "diffusion_transformer", "evoformer")]
    others = ["alphafold3.model.components.utils", "alphafold3.model.model_config"]
    modules = dense_twin.modules_of(_REPO.value, names + others)
    weights = read_weights(_WEIGHTS.value) if _WEIGHTS.value else None
    show("Pairformer", *pairformer(*modules), weights)
    show("diffusion transformer", *diffusion_transformer(*modules), weights)


def read_weights(folder: str) -> Any:
    """Reads the parameters of the whole model, as AlphaFold 3 reads them."""
    (params,) = dense_twin.modules_of(None, ["alphafold3.model.params"])
    try:
        return params.get_model_haiku_params(folder)
    except (OSError, RuntimeError) as error:
        raise dense_twin.InputError(f"--weights: {error}") from error


def pairformer(modules: Any, _: Any, evoformer: Any, utils: Any, config: Any) -> Any:
    """Returns the stack of the trunk, as `Evoformer` calls it, and arguments."""
    own = evoformer.Evoformer.Config().pairformer
    tokens, settings = _TOKENS.value, global_config(config)

    def model(pair: jax.Array, single: jax.Array, mask: jax.Array) -> Any:
        def layer(x: Any) -> Any:
            block = modules.PairFormerIteration(
                own, settings, with_single=True, name="trunk_pairformer"
            )
            pair_mask = mask[:, None] * mask[None]
            return block(act=x[0], single_act=x[1], pair_mask=pair_mask, seq_mask=mask)

        with utils.bfloat16_context():
            return hk.experimental.layer_stack(_LAYERS.value)(layer)((pair, single))

    shapes = [(tokens, tokens, 128), (tokens, 384)]
    return model, [*map(normal, shapes), jnp.ones(tokens, _DTYPE.value)]


def diffusion_transformer(_: Any, module: Any, *rest: Any) -> Any:
    """Returns the transformer over tokens that denoises coordinates, and arguments."""
    own = module.Transformer.Config(num_blocks=_LAYERS.value)
    tokens, settings = _TOKENS.value, global_config(rest[-1])

    def model(act: jax.Array, mask: jax.Array, single: jax.Array, pair: jax.Array) -> Any:
        return module.Transformer(own, settings)(act, mask, single, pair)

    act, single, pair = map(normal, [(tokens, 768), (tokens, 384), (tokens, tokens, 128)])
    return model, [act, jnp.ones(tokens), single, pair]


def global_config(config: Any) -> Any:
    return config.GlobalConfig(
        bfloat16="all" if _DTYPE.value == "bfloat16" else "none",
        flash_attention_implementation="xla",
    )


def normal(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape).astype(_DTYPE.value)


def show(name: str, model: Any, args: Any, weights: Any) -> None:
    """Compares a part of the model with its dense twin, in a table."""
    with_state = hk.transform_with_state(model)
    params, _ = dense_twin.random_params(with_state, *args)
    if weights is not None:
        params = dense_twin.params_from(weights, params)
    part = dense_twin.Part(name, hk.transform(model), params, (jax.random.PRNGKey(0), *args))
    # Weights that differ in their last bit change the diffusion transformer's result by 1e-4 of the
    # greatest value in float32, and gradients by ten times as much.
    dense_twin.compare(part, rtol=5e-3 if _DTYPE.value == "float32" else 0.1, runs=_RUNS.value)


if __name__ == "__main__":
    app.run(main_of(run))
