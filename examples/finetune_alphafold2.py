"""Fine-tunes AlphaFold 2 with LoRA, by AlphaFold's own losses.

The model is your own `alphafold` package: DeepMind's, or `pip install alphafold-colabfold`. It is not
modified. The weights are random, or yours (`--weights=params_model_3.npz`); the structure is a made-up
helix, or yours (`--structure`):

    python examples/finetune_alphafold2.py --save=adapter.safetensors
    python examples/finetune_alphafold2.py --load=adapter.safetensors --merged=merged.npz
"""

import functools
import sys
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import alphafold2_features
import dense_twin
import haiku_implicit as hki
from bars import tqdm
from errors import InputError, main_of

_REPO = flags.DEFINE_string("repo", None, "Folder of a checkout; by default what is installed.")
_MODEL = flags.DEFINE_enum(
    "model",
    "model_3",
    ["model_3", "model_4", "model_5"],
    "Of AlphaFold's, those without templates.",
)
_WEIGHTS = flags.DEFINE_string("weights", None, "AlphaFold's .npz file; by default random weights.")
_STRUCTURE = flags.DEFINE_string(
    "structure", None, "PDB file of one chain; by default a made-up helix."
)
_CROP = flags.DEFINE_integer("crop", 32, "Residues of it.", 8)
_ROWS = flags.DEFINE_integer("rows", 8, "Rows of the MSA.", 1)
_EXTRA = flags.DEFINE_integer("extra_rows", 16, "Rows of the extra MSA.", 1)
_BLOCKS = flags.DEFINE_integer("blocks", 48, "Evoformer blocks, all by default.", 1)
_RECYCLES = flags.DEFINE_integer("recycles", 1, "Passes whose result is put in again.", 0)
_RANK = flags.DEFINE_integer("rank", 4, "LoRA's rank.", 1)
_STEPS = flags.DEFINE_integer("steps", 5, "Training steps.", 0)
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Adam's.", 0.0)
_CHECK = flags.DEFINE_bool("check", True, "Compare the gradients with those of the dense twin.")
_SAVE = flags.DEFINE_string("save", None, "File for the adapter.")
_LOAD = flags.DEFINE_string("load", None, "File of an adapter to go on with.")
_MERGED = flags.DEFINE_string(
    "merged", None, "AlphaFold's .npz file of ordinary weights, with the adapter in them."
)

Params = Any


class AlphaFold(NamedTuple):
    """The modules of the package."""

    modules: Any
    all_atom: Any
    quat_affine: Any
    config: Any
    constants: Any
    protein: Any


def run() -> None:
    """Makes the model, trains it, and saves what was asked for."""
    names = [f"model.{name}" for name in ("modules", "all_atom", "quat_affine", "config")]
    names += ["common.residue_constants", "common.protein"]
    alphafold = AlphaFold(
        *dense_twin.modules_of(_REPO.value, [f"alphafold.{name}" for name in names], folder="")
    )
    batch = batch_of(alphafold)
    model = hk.transform(functools.partial(loss_of, alphafold, config_of(alphafold.config)))
    path = _WEIGHTS.value
    base = read_weights(path, model, batch) if path else random_weights(model, batch)
    key = jax.random.key(1)
    params = with_lora(model, base, key, batch)
    if _CHECK.value:
        dense_twin.check_gradients(model, params, lambda apply, params: apply(params, key, batch))
    params = train(model, params, key, batch)
    if _SAVE.value:
        hki.save(_SAVE.value, hki.get_adapter(params))
    merged = hki.materialize(hki.merge_lora(params))
    losses = [
        jax.jit(apply)(p, key, batch)
        for apply, p in ((hki.transform_implicit(model).apply, params), (model.apply, merged))
    ]
    print(f"loss {losses[0]:.5f}, merged and without this library {losses[1]:.5f}")
    if _MERGED.value:
        entries = {f"{m}//{n}": x for m, own in merged.items() for n, x in own.items()}
        np.savez(_MERGED.value, **entries)


# --- the model, its weights and its batch -----------------------------------------------------------


def config_of(config: Any) -> Any:
    """AlphaFold's configuration of the model, with AlphaFold's own names of weights."""
    made = config.model_config(_MODEL.value).model
    made.global_config.bfloat16 = False  # products that XLA lacks on CPUs
    made.global_config.use_remat = True
    evoformer = made.embeddings_and_evoformer
    evoformer.evoformer_num_block = _BLOCKS.value
    for direction in ("outgoing", "incoming"):
        part = evoformer.evoformer[f"triangle_multiplication_{direction}"]
        if "fuse_projection_weights" in part:
            part.fuse_projection_weights = False
    return made


def loss_of(alphafold: AlphaFold, config: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """AlphaFold's weighted sum of losses, after some passes whose result is put in again."""
    with hk.name_scope("alphafold"):
        model = alphafold.modules.AlphaFoldIteration(config, config.global_config)
    length, channels = batch["aatype"].shape[1], config.embeddings_and_evoformer
    previous = dict(
        prev_msa_first_row=jnp.zeros((length, channels.msa_channel)),
        prev_pair=jnp.zeros((length, length, channels.pair_channel)),
        prev_pos=jnp.zeros((length, 37, 3)),
    )
    for _ in range(_RECYCLES.value):
        found = model(dict(batch), previous, is_training=False)
        previous = dict(
            prev_msa_first_row=found["representations"]["msa_first_row"],
            prev_pair=found["representations"]["pair"],
            prev_pos=found["structure_module"]["final_atom_positions"],
        )
        previous = jax.lax.stop_gradient(previous)
    _, loss = model(dict(batch), previous, is_training=True, compute_loss=True)
    return loss


def batch_of(alphafold: AlphaFold) -> dict[str, jax.Array]:
    """The features of the chain."""
    if _STRUCTURE.value:
        chain = alphafold2_features.read_chain(_STRUCTURE.value, alphafold.protein, _CROP.value)
    else:
        chain = alphafold2_features.made_up_chain(_CROP.value, alphafold.constants.atom_order)
    features = alphafold2_features.features_of(chain, _ROWS.value, _EXTRA.value, alphafold)
    return {name: jnp.asarray(x) for name, x in features.items()}


def read_weights(path: str, model: hk.Transformed, batch: Any) -> Params:
    """Reads AlphaFold's file, and checks that it has what the model needs."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch)
    try:
        found = hki.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--weights: {error}") from error
    for module, entries in shapes.items():
        for name, x in entries.items():
            value = found.get(module, {}).get(name)
            if value is None or value.shape != x.shape:
                there = "is missing" if value is None else f"is {list(value.shape)}"
                raise InputError(
                    f"--weights: {module}//{name} {there} in {path}, expected "
                    f"{list(x.shape)}. --model and --blocks have to be those of the file"
                )
    return {module: {name: found[module][name] for name in shapes[module]} for module in shapes}


def random_weights(model: hk.Transformed, batch: Any) -> Params:
    """Makes random weights, without the zeros that many of AlphaFold's layers start from."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch)
    rng = np.random.default_rng(0)

    def value(module: str, name: str, x: Any) -> jax.Array:
        noise = rng.standard_normal(x.shape, np.float32)
        if name in ("bias", "b", "offset") or name.endswith("_b"):
            return jnp.asarray(noise / 10)
        return jnp.asarray(1 + noise / 10 if name == "scale" else noise * max(x.shape) ** -0.5)

    return {m: {n: value(m, n, x) for n, x in entries.items()} for m, entries in shapes.items()}


# --- training ---------------------------------------------------------------------------------------


def with_lora(model: hk.Transformed, base: Params, key: jax.Array, batch: Any) -> Params:
    """Puts LoRA on all matrices, or the adapter in a file."""
    if _LOAD.value:
        try:
            return hki.set_adapter(base, hki.load(_LOAD.value))
        except (OSError, ValueError) as error:
            raise InputError(f"--load: {error}") from error
    axes = hki.infer_matrix_axes(model.apply, base, key, batch)
    return hki.add_lora(base, jax.random.key(0), rank=_RANK.value, matrix_axes=axes)


def train(model: hk.Transformed, params: Params, key: jax.Array, batch: Any) -> Params:
    """Trains LoRA's factors by an ordinary training step."""
    tuned, trained = hki.freeze(model, params)
    optimizer = optax.adam(_RATE.value)

    @jax.jit
    def step(trained: Params, state: Any, key: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(tuned.apply)(trained, key, batch)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, loss

    total = sum(x.size for x in hki.tree_leaves_with_implicit(params))
    count = sum(x.size for x in jax.tree.leaves(trained))
    matrices = sum(len(entries) for entries in trained.values()) // 2
    print(f"{total:,} numbers in weights, {count:,} trained ones in LoRA on {matrices} matrices")
    state = optimizer.init(trained)
    for number in tqdm(range(_STEPS.value), unit="step", disable=not sys.stderr.isatty()):
        trained, state, loss = step(trained, state, jax.random.fold_in(key, number))
        tqdm.write(f"step {number}  loss {loss:.4f}", file=sys.stdout)
    return tuned.params(trained)


if __name__ == "__main__":
    app.run(main_of(run))
