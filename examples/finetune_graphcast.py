"""Fine-tunes GraphCast whole, with LoRA, by the demo notebook's own loss and gradients.

The model is your own checkout of https://github.com/google-deepmind/graphcast (now called
weathernext), with its dependencies, and is not modified. The weights are random, or those of a
checkpoint (`--weights`); the data are waves that move east, or yours (`--data`, `--statistics`).

  python examples/finetune_graphcast.py --repo=PATH
  python examples/finetune_graphcast.py --repo=PATH --do=merge --merged=merged.npz
  python examples/finetune_graphcast.py --repo=PATH --do=score --weights=merged.npz
  python examples/finetune_graphcast.py --repo=PATH --do=compare
"""

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import fine_tuning
import graphcast_demo
import haiku_implicit as hki
import presets
import training_costs
from errors import main_of
from graphcast_demo import Demo, Params, Window
from training_costs import Form

_REPO = flags.DEFINE_string("repo", None, "Folder of a checkout.", required=True)
_WEIGHTS = flags.DEFINE_string("weights", None, "Checkpoint of GraphCast; by default random.")
_DATA = flags.DEFINE_string("data", None, "netCDF file of weather; by default waves.")
_STATISTICS = flags.DEFINE_string("statistics", None, "Folder of GraphCast's three statistics.")
_BASE = flags.DEFINE_enum("base", "float32", ["float32", "int8"], "Form of the weights.")
_TARGETS = flags.DEFINE_integer("target_steps", 2, "Autoregressive steps.", lower_bound=1)
_BFLOAT16 = flags.DEFINE_bool("bfloat16", True, "Compute in bfloat16, as the demo does.")
_RESOLUTION = flags.DEFINE_float("resolution", 4.0, "Degrees between the waves' points.", 0.25)
_MESH = flags.DEFINE_integer("mesh_size", 3, "Refinements of a random model's mesh.", lower_bound=1)
_LATENT = flags.DEFINE_integer("latent_size", 64, "Width of a random model.", lower_bound=1)
_MESSAGES = flags.DEFINE_integer("message_steps", 4, "Steps of a random model.", lower_bound=1)
flags.set_default(fine_tuning.ADAPTER, "graphcast_adapter.safetensors")


def run() -> None:
    """Does what `--do` says."""
    fine_tuning.check_paths(fine_tuning.MERGED)
    settings = graphcast_demo.Settings(
        weights=_WEIGHTS.value,
        data=_DATA.value,
        statistics=_STATISTICS.value,
        target_steps=_TARGETS.value,
        bfloat16=_BFLOAT16.value,
        resolution=_RESOLUTION.value,
        mesh_size=_MESH.value,
        latent_size=_LATENT.value,
        message_steps=_MESSAGES.value,
    )
    demo = graphcast_demo.read(_REPO.value, settings)
    dict(train=train, merge=merge, score=score, compare=compare)[fine_tuning.DO.value](demo)


def base_of(params: Params, form: str) -> Params:
    """Returns the weights in the form that stays frozen."""
    if form == "float32":
        return params
    return hki.quantize_params(params, dtype=form, targets=presets.read("graphcast").quantized)


def with_lora(params: Params) -> Params:
    """Adds LoRA to all matrices, except those of an edge's four features."""
    targets = presets.read("graphcast").adapters["lora"]
    return fine_tuning.with_lora(params, targets=targets)


def train(demo: Demo) -> None:
    """Trains LoRA in the demo's own step, and saves it."""
    params = with_lora(base_of(demo.params, _BASE.value))
    print(hki.summary(params, depth=1))
    frozen = hki.freeze(demo.names["loss_fn"], params)
    score = jax.jit(functools.partial(demo.loss, frozen[0]))
    *windows, held_out = demo.windows * 2 if len(demo.windows) == 1 else demo.windows
    fine_tuning.train(
        frozen,
        optax.adam(fine_tuning.RATE.value),
        functools.partial(demo.gradients, frozen[0]),
        lambda number: windows[number % len(windows)],
        lambda trained: float(score(trained, held_out)),
        "held-out loss",
    )


def merge(demo: Demo) -> None:
    """Merges a saved adapter into the weights, and saves them in GraphCast's own form."""
    merged = fine_tuning.merged(base_of(demo.params, _BASE.value))
    score(demo._replace(params=merged))
    demo.save(fine_tuning.MERGED.value or "", merged)
    print(f"merged weights {fine_tuning.MERGED.value}")


def score(demo: Demo) -> None:
    """Scores plain weights by the demo's own model, without this library."""
    loss = jax.jit(functools.partial(demo.loss, demo.names["loss_fn"]))
    print(f"held-out loss  {float(loss(demo.params, demo.windows[-1])):.4f}")


# --- the comparison -------------------------------------------------------------------------------


def compare(demo: Demo) -> None:
    """Compares gradients with a dense twin, and costs with the same LoRA written by hand."""
    dense, window = demo.names["loss_fn"], demo.windows[0]
    forms = {}
    for base in ("float32", "int8"):
        name = "LoRA" if base == "float32" else f"LoRA on {base}"
        model, trained = hki.freeze(dense, with_lora(base_of(demo.params, base)))
        trained = fine_tuning.nudged(trained)
        if base == "float32":
            hand = functools.partial(by_hand, demo)
            forms["by hand"] = Form(hand, trained, (demo.params, window), f"{name}, merged")
        # The line that chooses: this model adds the corrections to the weights inside the loss.
        merged = dense._replace(apply=training_costs.merging(dense, model))
        apart, twin = (functools.partial(demo.gradients, m) for m in (model, merged))
        forms[name] = Form(apart, trained, (window,), f"{name}, merged")
        forms[f"{name}, merged"] = Form(twin, trained, (window,))
    training_costs.compare(forms, fine_tuning.RUNS.value, rtol=None if _BFLOAT16.value else 1e-3)


def by_hand(
    demo: Demo, trained: Params, frozen: Params, window: Window
) -> tuple[jax.Array, Params]:
    """The gradients of the same LoRA, which an interceptor of Haiku's puts into each `hk.Linear`."""
    dense = demo.names["loss_fn"]

    def corrected(call: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        y = call(*args, **kwargs)
        own = trained.get(context.module.module_name)
        if (
            not isinstance(context.module, hk.Linear)
            or context.method_name != "__call__"
            or not own
        ):
            return y
        (x,) = args
        a, b = (
            hk.get_parameter(name, own[name].shape, x.dtype, init=jnp.zeros)
            for name in ("w_lora_a", "w_lora_b")
        )
        return y + (x @ a) @ b

    def apply(trained: Params, *args: Any) -> Any:
        params = {name: {**own, **trained.get(name, {})} for name, own in frozen.items()}
        with hk.intercept_methods(corrected):
            return dense.apply(params, *args)

    return demo.gradients(dense._replace(apply=apply), trained, window)


if __name__ == "__main__":
    app.run(main_of(run))
