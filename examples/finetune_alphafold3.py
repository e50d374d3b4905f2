"""Fine-tunes AlphaFold 3's Pairformer and diffusion head with LoRA on 4-bit weights.

The model is your own checkout of https://github.com/google-deepmind/alphafold3, with its dependencies,
and is not modified. It comes without a training loop; this one denoises coordinates, with the weights
that AlphaFold 3's paper gives to noise levels. The weights are random, or yours (`--weights`); they are
never printed. The structures are random walks, with random embeddings in the place of a sequence.

  python examples/finetune_alphafold3.py --repo=PATH
  python examples/finetune_alphafold3.py --repo=PATH --do=merge --merged=FOLDER
  python examples/finetune_alphafold3.py --repo=PATH --do=score --weights=FOLDER
  python examples/finetune_alphafold3.py --repo=PATH --do=compare
"""

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

import dense_twin
import fine_tuning
import haiku_implicit as hki
import presets
import training_costs
from errors import InputError, main_of
from training_costs import Form

_REPO = flags.DEFINE_string("repo", None, "Folder of a checkout; by default what is installed.")
_WEIGHTS = flags.DEFINE_string("weights", None, "Folder of weights; by default random ones.")
_BASE = flags.DEFINE_enum("base", "int4", ["float", "int8", "int4"], "Form of the frozen weights.")
_TOKENS = flags.DEFINE_integer("tokens", 16, "Tokens of a structure.", lower_bound=2)
_ATOMS = flags.DEFINE_integer("atoms", 8, "Atoms of a token.", lower_bound=1)
_LAYERS = flags.DEFINE_integer(
    "layers", 4, "Layers of each stack at most, a multiple of 4.", lower_bound=4
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "What it computes in.")
flags.set_default(fine_tuning.ADAPTER, "alphafold3_adapter.safetensors")

STRUCTURES = 4
TARGET_FEATURES = 447
SIGMA_DATA = 16.0  # of the model's own module, too
# Of gradients in float32: another order of sums changes them by up to 0.03: random layers amplify it.
RTOL = 4e-2
Params = Mapping[str, Mapping[str, Any]]


class Library(NamedTuple):
    """The modules of the checkout."""

    diffusion_head: Any
    evoformer: Any
    modules: Any
    atom_layout: Any
    utils: Any
    model_config: Any
    params: Any


class Example(NamedTuple):
    """A structure, what the Pairformer is given of it, and noise.

    Attributes:
      pair, single, target: embeddings of pairs of tokens, of tokens, and of their features.
      positions: `[tokens, atoms, 3]`.
      noise: of the positions' shape, with a variance of one.
      level: the noise's standard deviation.
    """

    pair: jax.Array
    single: jax.Array
    target: jax.Array
    positions: jax.Array
    noise: jax.Array
    level: jax.Array


def run() -> None:
    """Does what `--do` says."""
    fine_tuning.check_paths()
    if _LAYERS.value % 4:
        raise InputError(f"--layers={_LAYERS.value}: expected a multiple of 4")
    logging.set_verbosity(logging.FATAL)  # tokamax tells of each kernel that a CPU does not have
    library = load_library()
    model = denoiser(library)
    params = pretrained(library, model)
    dict(train=train, merge=merge, score=score, compare=compare)[fine_tuning.DO.value](
        library, model, params
    )


def load_library() -> Library:
    """Imports the checkout."""
    names = ("diffusion_head", "evoformer", "modules")
    paths = [f"alphafold3.model.network.{name}" for name in names]
    others = ("atom_layout.atom_layout", "components.utils", "model_config", "params")
    paths += [f"alphafold3.model.{name}" for name in others]
    return Library(*dense_twin.modules_of(_REPO.value, paths))


# --- the model, its loss and data -----------------------------------------------------------------


def denoiser(library: Library) -> hk.TransformedWithState:
    """The model: the Pairformer, and the diffusion head that denoises positions."""
    settings = library.model_config.GlobalConfig(
        bfloat16="all" if _DTYPE.value == "bfloat16" else "none",
        flash_attention_implementation="xla",
    )
    trunk = library.evoformer.Evoformer.Config().pairformer
    head = library.diffusion_head.DiffusionHead.Config()
    head.transformer.num_blocks = min(_LAYERS.value, head.transformer.num_blocks)
    batch = batch_of(library)

    def forward(example: Example) -> jax.Array:
        mask = jnp.ones(_TOKENS.value, _DTYPE.value)

        def layer(x: Any) -> Any:
            block = library.modules.PairFormerIteration(
                trunk, settings, with_single=True, name="trunk_pairformer"
            )
            pair_mask = mask[:, None] * mask[None]
            return block(act=x[0], single_act=x[1], pair_mask=pair_mask, seq_mask=mask)

        given = (x.astype(_DTYPE.value) for x in (example.pair, example.single))
        with library.utils.bfloat16_context():
            stack = hk.experimental.layer_stack(_LAYERS.value)(layer)
            pair, single = (x.astype(jnp.float32) for x in stack(tuple(given)))
        embeddings = dict(pair=pair, single=single, target_feat=example.target)
        noisy = example.positions + example.level * example.noise
        denoise = library.diffusion_head.DiffusionHead(head, settings)
        return denoise(noisy, example.level, batch, embeddings, use_conditioning=True)

    return hk.transform_with_state(forward)


def loss_of(model: Any, params: Params, example: Example) -> jax.Array:
    """The squared error of denoised positions, with the weight of the noise level."""
    denoised, _ = model.apply(params, {}, jax.random.PRNGKey(0), example)
    level = example.level
    weight = (level**2 + SIGMA_DATA**2) / (level * SIGMA_DATA) ** 2
    return weight * jnp.square(denoised - example.positions).mean()


def gradients_of(model: Any, params: Params, example: Example) -> tuple[jax.Array, Params]:
    return jax.value_and_grad(functools.partial(loss_of, model))(params, example)


def example_of(number: int, seed: int = 0) -> Example:
    """Makes a structure, of which there are a few, with noise of its own."""
    tokens, atoms = _TOKENS.value, _ATOMS.value
    rng = np.random.default_rng([number % STRUCTURES, 1])
    steps = rng.standard_normal((tokens, 1, 3)) * 3.8
    walk = np.cumsum(steps, axis=0) + rng.standard_normal((tokens, atoms, 3))
    shapes = (tokens, tokens, 128), (tokens, 384), (tokens, TARGET_FEATURES)
    pair, single, target = (rng.standard_normal(shape, np.float32) for shape in shapes)
    positions = (walk - walk.mean((0, 1))).astype(np.float32)
    rng = np.random.default_rng([number, seed])
    level = np.float32(SIGMA_DATA * np.exp(-1.2 + 1.5 * rng.standard_normal()))
    noise = rng.standard_normal(positions.shape, np.float32)
    return Example(*map(jnp.asarray, (pair, single, target, positions, noise, level)))


def batch_of(library: Library) -> types.SimpleNamespace:
    """What the head reads of AlphaFold 3's batch: one chain whose tokens have as many atoms each."""
    tokens, atoms = _TOKENS.value, _ATOMS.value
    group, index = types.SimpleNamespace, np.arange(_TOKENS.value)
    ones, shape, rng = np.ones(tokens, np.int32), (tokens, atoms), np.random.default_rng(0)
    chain = dict(token_index=index, residue_index=index, asym_id=ones, entity_id=ones, sym_id=ones)
    reference = dict(
        positions=rng.standard_normal((*shape, 3), np.float32),
        mask=np.ones(shape, bool),
        element=rng.integers(6, 9, shape),
        charge=np.zeros(shape, np.float32),
        atom_name_chars=rng.integers(32, 58, (*shape, 4)),
        ref_space_uid=np.broadcast_to(index[:, None], shape),
    )
    return group(
        token_features=group(mask=np.ones(tokens, np.float32), **chain),
        predicted_structure_info=group(atom_mask=np.ones(shape, np.float32)),
        ref_structure=group(**reference),
        atom_cross_att=group(**layouts(library, tokens, atoms)),
    )


def layouts(library: Library, tokens: int, atoms: int, queries: int = 32, keys: int = 128) -> Any:
    """Where the atoms are in the subsets in which they attend to each other."""
    count = tokens * atoms
    subsets = -(-count // queries)
    of_queries = np.arange(subsets * queries).reshape(subsets, queries)
    centers = of_queries[:, :1] + queries // 2
    first = np.clip(centers - keys // 2, 0, max(count - keys, 0))
    of_keys = first + np.arange(keys)

    def layout(places: np.ndarray, valid: np.ndarray, shape: tuple[int, ...]) -> Any:
        found = np.where(valid, places, 0), valid, np.array(shape)
        return library.atom_layout.GatherInfo(*map(jnp.asarray, found))

    own, others = of_queries < count, of_keys < count
    return dict(
        token_atoms_to_queries=layout(of_queries, own, (tokens, atoms)),
        tokens_to_queries=layout(of_queries // atoms, own, (tokens,)),
        tokens_to_keys=layout(of_keys // atoms, others, (tokens,)),
        queries_to_keys=layout(of_keys, others, (subsets, queries)),
        queries_to_token_atoms=layout(
            np.arange(count).reshape(tokens, atoms),
            np.ones((tokens, atoms), bool),
            (subsets, queries),
        ),
    )


# --- weights --------------------------------------------------------------------------------------


def pretrained(library: Library, model: hk.TransformedWithState) -> Params:
    """The parameters of the model: random ones, or a part of those in the folder."""
    params, _ = dense_twin.random_params(model, example_of(0))
    return dense_twin.params_from(read_weights(library), params) if _WEIGHTS.value else params


def read_weights(library: Library) -> dict[str, dict[str, Any]]:
    """Reads the parameters of the whole model, as AlphaFold 3 reads them."""
    try:
        return library.params.get_model_haiku_params(_WEIGHTS.value)
    except (OSError, RuntimeError, library.params.RecordError) as error:
        raise InputError(f"--weights: {error}") from error


def write_weights(library: Library, params: Params) -> None:
    """Writes parameters as AlphaFold 3 reads them, in those of `--weights` if given."""
    whole: dict[str, dict[str, Any]] = {name: dict(own) for name, own in params.items()}
    if _WEIGHTS.value:
        whole = dense_twin.with_params(read_weights(library), params)
    folder = pathlib.Path(fine_tuning.MERGED.value or "").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "merged.bin").open("wb") as file:
        for module, own in whole.items():
            for name, value in own.items():
                file.write(library.params.encode_record(module, name, np.asarray(value)))


def base_of(params: Params, form: str) -> Params:
    """Returns the weights in the form that stays frozen."""
    if form == "float":
        return params
    preset = presets.read("alphafold3")
    return hki.quantize_params(
        params,
        dtype=form,
        group_size=32,
        targets=preset.quantized,
        matrix_axes=preset.matrix_axes,
    )


def with_lora(params: Params) -> Params:
    """Adds LoRA to the preset's matrices."""
    preset = presets.read("alphafold3")
    return fine_tuning.with_lora(
        params, targets=preset.adapters["lora"], matrix_axes=preset.matrix_axes
    )


# --- what the script does -------------------------------------------------------------------------


def train(library: Library, dense: hk.TransformedWithState, params: Params) -> None:
    """Trains LoRA, and saves it."""
    params = with_lora(base_of(params, _BASE.value))
    print(hki.summary(params, depth=1))
    frozen = hki.freeze(dense, params)
    fine_tuning.train(
        frozen,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(fine_tuning.RATE.value)),
        functools.partial(gradients_of, frozen[0]),
        example_of,
        functools.partial(held_out, frozen[0]),
        "loss with other noise",
    )


def held_out(model: Any, params: Params) -> float:
    """The mean loss of the structures with noise that training does not see."""
    loss = jax.jit(functools.partial(loss_of, model))
    return float(np.mean([loss(params, example_of(i, seed=1)) for i in range(2 * STRUCTURES)]))


def merge(library: Library, dense: hk.TransformedWithState, params: Params) -> None:
    """Merges a saved adapter into the weights, and saves them in AlphaFold 3's own form."""
    merged = fine_tuning.merged(base_of(params, _BASE.value))
    score(library, dense, merged)
    write_weights(library, merged)
    print(f"merged weights  {fine_tuning.MERGED.value}")


def score(library: Library, dense: hk.TransformedWithState, params: Params) -> None:
    """Scores plain weights by the model, without this library."""
    print(f"loss with other noise  {held_out(dense, params):.4f}")


def compare(library: Library, dense: hk.TransformedWithState, params: Params) -> None:
    """Compares gradients with a dense twin, and costs with it."""
    forms = {}
    for base in ("float", "int4"):
        name = "LoRA" if base == "float" else f"LoRA on {base}"
        model, trained = hki.freeze(dense, with_lora(base_of(params, base)))
        trained = fine_tuning.nudged(trained)
        twin = dense._replace(apply=training_costs.merging(dense, model))
        for suffix, own in ((", merged", twin), ("", model)):
            gradients = functools.partial(gradients_of, own)
            twin_name = None if suffix else f"{name}, merged"
            forms[name + suffix] = Form(gradients, trained, (example_of(0),), twin_name)
    training_costs.compare(
        forms, fine_tuning.RUNS.value, rtol=RTOL if _DTYPE.value == "float32" else None
    )


if __name__ == "__main__":
    app.run(main_of(run))
