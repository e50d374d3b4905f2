"""Fine-tunes AlphaGenome: LoRA on dense, int8 or nf4 weights, and new heads trained whole.

The model, its loss and its training step (`finetuning/finetune.py`) are your own checkout of
https://github.com/google-deepmind/alphagenome_research, with its dependencies, and are not modified.
The weights are random, or yours (`--weights`); the data are made: random DNA, and marks at motifs.

    python examples/finetune_alphagenome.py --repo=PATH --method=lora --steps=20
    python examples/finetune_alphagenome.py --repo=PATH --method=lora --steps=40 --resume
    python examples/finetune_alphagenome.py --repo=PATH --method=lora --steps=40 --resume --export=OUT
"""

import contextlib
import functools
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from absl import app, flags, logging

import dense_twin
import haiku_implicit as hki
import presets
from bars import tqdm
from errors import InputError, main_of

# Classes of the model's blocks, for `--checkpoint_blocks`.
BLOCKS = (
    *("DnaEmbedder", "DownResBlock", "UpResBlock", "MHABlock", "MLPBlock"),
    *("AttentionBiasBlock", "PairUpdateBlock", "OutputEmbedder"),
)
METHODS = {"full": None, "heads": None, "lora": None, "int8": "int8", "nf4": "nf4"}
MOTIFS = ("GTAAG", "CTTAC", "TTCAG", "CTGAA")  # of the classes of splice sites

_REPO = flags.DEFINE_string("repo", None, "Folder of a checkout; by default what is installed.")
_WEIGHTS = flags.DEFINE_string(
    "weights", None, "Folder of a checkpoint; by default random weights."
)
_METHOD = flags.DEFINE_enum(
    "method", "lora", list(METHODS), "What is trained; int8 and nf4 are LoRA on such weights."
)
_HEAD = flags.DEFINE_string(
    "head", "splice_sites", "The new head; another one, such as atac, needs 131072 bases."
)
_TRACKS = flags.DEFINE_integer("tracks", 2, "Tracks of a head other than splice_sites.", 1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Bases of a sequence, a multiple of 2048.", 2048)
_BATCH = flags.DEFINE_integer("batch_size", 1, "Sequences in a batch.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 8, "Rank of the factors.", lower_bound=1)
_REMAT = flags.DEFINE_bool(
    "checkpoint_blocks", False, "Compute each block again in the backward pass, to save memory."
)
_GROUP = flags.DEFINE_integer("group_size", 64, "Weights that share a scale, of nf4.", 1)
_STEPS = flags.DEFINE_integer("steps", 20, "Training steps in all.", lower_bound=0)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 10, "Steps between saves.", lower_bound=1)
_RATE = flags.DEFINE_float("learning_rate", 5e-4, "Adam's learning rate.", lower_bound=0.0)
_POLICY = flags.DEFINE_string(
    "policy", "params=float32,compute=bfloat16,output=bfloat16", "jmp's policy of the model."
)
_FOLDER = flags.DEFINE_string("folder", "alphagenome_tuned", "Where the results are saved.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on from what was saved in --folder.")
_EXPORT = flags.DEFINE_string(
    "export", None, "Folder for a checkpoint of merged, plain parameters, as AlphaGenome reads it."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the factors, the heads and the batches.")


class Library(NamedTuple):
    """The modules of the checkout."""

    finetune: Any
    model: Any
    schemas: Any
    dna_model: Any
    metadata: Any


class Tuned(NamedTuple):
    """What training changes: steps done, the trained arrays, and the optimizer's state."""

    step: int
    trained: hk.Params
    optimizer: optax.OptState


def run() -> None:
    """Makes the parameters, trains, saves, and exports."""
    check_flags()
    logging.set_verbosity(logging.WARNING)
    library = load_library()
    first = batch_of(library, 0)
    forward, params, state = pretrained(library, first)
    base = quantized(params)
    saved = load_saved() if _RESUME.value else None
    model, tuned = frozen_model(forward, base, saved)
    del base
    with kernels_may_be_summed() as report:
        if saved is None and _METHOD.value != "full":
            print(parity(forward, model, params, tuned.trained, state, first))
        del params
        tuned = train(library, model, tuned, state)
        if _EXPORT.value:
            export(_EXPORT.value, forward, model, tuned, state, first)
    types = {event.type_name for event, _ in report} - {"LoCon"}
    if types:
        print(f"other weights than standardized kernels became dense: {', '.join(sorted(types))}")


@contextlib.contextmanager
def kernels_may_be_summed() -> Iterator[Any]:
    """Allows a kernel that the model standardizes to become dense, as in LoRA by hand."""
    with hki.materialization("allow"), hki.materialization_report() as report:
        yield report


def check_flags() -> None:
    if _LENGTH.value % 2048:
        raise InputError(f"--length={_LENGTH.value}: expected a multiple of 2048 bases")
    if _HEAD.value != "splice_sites" and _LENGTH.value % 131072:
        raise InputError(
            f"--length={_LENGTH.value}: the loss of --head={_HEAD.value} needs a multiple of 131072 "
            "bases; --head=splice_sites takes any multiple of 2048"
        )


def load_library() -> Library:
    """Imports the checkout."""
    names = ("finetuning.finetune", *(f"model.{x}" for x in ("model", "schemas", "dna_model")))
    names = (*names, "model.metadata.metadata")
    return Library(
        *dense_twin.modules_of(_REPO.value, [f"alphagenome_research.{x}" for x in names])
    )


# --- data -----------------------------------------------------------------------------------------


@functools.cache
def tracks_of(library: Library) -> Any:
    """The metadata of the new head: the first of AlphaGenome's own tracks. Yours go here."""
    official = library.metadata.load(library.dna_model.Organism.HOMO_SAPIENS)
    tracks = getattr(official, _HEAD.value, None)
    if tracks is None:
        raise InputError(f"--head={_HEAD.value}: AlphaGenome's metadata have no such tracks")
    return tracks if _HEAD.value == "splice_sites" else tracks[: _TRACKS.value]


def metadata_of(library: Library) -> dict[Any, Any]:
    own = library.metadata.AlphaGenomeOutputMetadata(**{_HEAD.value: tracks_of(library)})
    return {library.dna_model.Organism.HOMO_SAPIENS: own}


def batch_of(library: Library, step: int) -> Any:
    """Makes a batch of random DNA; equal steps give equal batches."""
    rng = np.random.default_rng([_SEED.value, step])
    shape = _BATCH.value, _LENGTH.value
    ids = rng.integers(0, 4, shape)
    count = len(tracks_of(library))
    if _HEAD.value == "splice_sites":
        targets = {"splice_sites": np.eye(count, dtype=bool)[classes_of(ids, count)]}
    else:
        peaks = np.sum([hits(ids, motif) for motif in MOTIFS], 0)
        counts = rng.poisson(0.1 + 5.0 * peaks[..., None], (*shape, count))
        targets = {_HEAD.value: counts.astype(np.float32)}
        targets[f"{_HEAD.value}_mask"] = np.ones((_BATCH.value, 1, count), bool)
    return library.schemas.DataBatch(
        dna_sequence=np.eye(4, dtype=np.float32)[ids],
        organism_index=np.zeros(_BATCH.value, np.int32),
        **targets,
    )


def hits(ids: np.ndarray, motif: str) -> np.ndarray:
    """Marks where a motif begins, `[batch, length]`."""
    own = ["ACGT".index(base) for base in motif]
    return np.all([np.roll(ids, -i, -1) == base for i, base in enumerate(own)], axis=0)


def classes_of(ids: np.ndarray, count: int) -> np.ndarray:
    """The class of each base: which motif begins there; the last class is none."""
    marks = [hits(ids, motif) for motif in MOTIFS[: count - 1]]
    return np.select(marks, range(len(marks)), count - 1)


# --- parameters -----------------------------------------------------------------------------------


def forward_of(library: Library) -> hk.TransformedWithState:
    """The model with its loss. `get_forward_fn` is for heads alone: it stops gradients at the trunk."""
    if _METHOD.value == "heads":
        return library.finetune.get_forward_fn(metadata_of(library), _POLICY.value)
    return hk.transform_with_state(loss_of(library))


def loss_of(library: Library) -> Callable[[Any], Any]:
    """The function of a batch that `forward_of` transforms."""
    metadata, policy = metadata_of(library), jmp.get_policy(_POLICY.value)

    def loss(batch: Any) -> Any:
        with (
            hk.mixed_precision.push_policy(library.model.AlphaGenome, policy),
            hk.intercept_methods(checkpointed),
        ):
            return library.model.AlphaGenome(metadata).loss(batch)

    return loss


def checkpointed(call: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
    """Wraps the calls of the model's blocks in `hk.remat` if the flag says so."""
    is_block = type(context.module).__name__ in BLOCKS and context.method_name == "__call__"
    if not (is_block and _REMAT.value) or hk.running_init():
        return call(*args, **kwargs)
    return hk.remat(call)(*args, **kwargs)


def pretrained(library: Library, batch: Any) -> tuple[hk.TransformedWithState, Any, Any]:
    """The model, its parameters with new heads, and its state."""
    forward = forward_of(library)
    if _WEIGHTS.value:
        params, state = dense_twin.read_weights(_WEIGHTS.value)
        key = jax.random.PRNGKey(_SEED.value)
        heads = jax.jit(lambda: hk.data_structures.filter(is_head, forward.init(key, batch)[0]))()
        trunk = hk.data_structures.filter(lambda *args: not is_head(*args), params)
        params = hk.data_structures.merge(trunk, heads)
    else:
        params, state = dense_twin.random_params(forward, batch)
    if jax.default_backend() == "cpu":
        forward = dense_twin.with_products_for_cpus(forward, params, state, [batch])
    return forward, params, state


def is_head(module: str, name: str, value: Any) -> bool:
    return "/head/" in f"{module}/"


def quantized(params: hk.Params) -> hk.Params:
    """Quantizes the preset's weights if the method says so."""
    dtype = METHODS[_METHOD.value]
    if dtype is None:
        return params
    options = {"group_size": _GROUP.value} if dtype == "nf4" else {}
    targets = presets.read("alphagenome").quantized
    return with_name_of_flags(hki.quantize_params, params, dtype=dtype, targets=targets, **options)


def with_adapters(params: hk.Params) -> hk.Params:
    """Adds LoRA to the preset's matrices, and LoCon to its convolutions."""
    key = jax.random.key(_SEED.value)
    for method, targets in presets.read("alphagenome").adapters.items():
        options = dict(rank=_RANK.value, targets=targets)
        params = with_name_of_flags(hki.add_adapter, params, key, method, **options)
    return params


def with_name_of_flags(function: Any, *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except ValueError as error:
        raise InputError(f"--method={_METHOD.value}, --rank={_RANK.value}: {error}") from error


def rank() -> int:
    return _RANK.value


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(_RATE.value))


def trained_whole() -> bool | str:
    """The dense arrays that are trained."""
    return True if _METHOD.value == "full" else presets.read("alphagenome").trained_whole


def halves(params: hk.Params) -> tuple[Any, Any]:
    """The trained and the frozen arrays of a method, from the pretrained parameters."""
    params = quantized(params)
    if _METHOD.value not in ("full", "heads"):
        params = with_adapters(params)
    return hki.partition(params, trainable_dense=trained_whole())


def frozen_model(forward: Any, base: hk.Params, saved: Mapping[str, Any] | None) -> Any:
    """The model that takes the trained arrays alone, and these as they are at first or were saved."""
    adapted = _METHOD.value not in ("full", "heads")
    if saved is not None:
        base = hk.data_structures.merge(base, saved["dense"])
        base = hki.set_adapter(base, saved["adapter"]) if adapted else base
    elif adapted:
        base = with_adapters(base)
    whole = trained_whole()
    if saved is None:
        print(hki.summary(base, depth=2, trainable_dense=whole))
    model, trained = hki.freeze(forward, base, trainable_dense=whole)
    step, moments = (
        (0, optimizer().init(trained)) if saved is None else (saved["step"], saved["optimizer"])
    )
    # Results of a frozen model are on a chosen device. If the first arguments are, too, the training
    # step is not compiled a second time for them.
    return model, Tuned(step, *jax.device_put((trained, moments), jax.devices()[0]))


# --- the training ---------------------------------------------------------------------------------


def train(library: Library, model: Any, tuned: Tuned, state: Any) -> Tuned:
    """Runs the remaining steps by AlphaGenome's own training step."""
    step = library.finetune.get_train_step(model.apply, optimizer())
    with tqdm(total=_STEPS.value, initial=tuned.step, desc=_METHOD.value, unit="step") as bar:
        while tuned.step < _STEPS.value:
            batch = batch_of(library, tuned.step)
            trained, _, moments, scalars = step(tuned.trained, state, tuned.optimizer, batch)
            tuned = Tuned(tuned.step + 1, trained, moments)
            bar.set_postfix(loss=f"{float(scalars['loss']):.4f}")
            bar.update()
            if tuned.step in (1, _STEPS.value):
                bar.write(f"step {tuned.step}: loss {float(scalars['loss']):.4f}")
            if tuned.step % _SAVE_EVERY.value == 0 or tuned.step == _STEPS.value:
                save(model, tuned)
    return tuned


def parity(forward: Any, model: Any, params: Any, trained: Any, state: Any, batch: Any) -> str:
    """Compares the predictions before the first step with the pretrained model's, bit for bit."""
    want, got = (
        jax.jit(apply)(own, state, None, batch)[0]
        for apply, own in ((forward.apply, params), (model.apply, trained))
    )
    pairs = list(zip(*map(jax.tree.leaves, (want, got)), strict=True))
    same = sum(bool(jnp.array_equal(x, y)) for x, y in pairs)
    return (
        f"at the start {same} of {len(pairs)} outputs have the pretrained model's bits; "
        f"loss {float(want[0]):.4f}, now {float(got[0]):.4f}"
    )


# --- files ----------------------------------------------------------------------------------------


def save(model: Any, tuned: Tuned) -> None:
    """Saves the adapter, the dense arrays that were trained, and the optimizer's state, apart."""
    params = model.params(tuned.trained)
    folder = pathlib.Path(_FOLDER.value) / f"step_{tuned.step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    dense = hk.data_structures.filter(lambda m, n, _: n in tuned.trained.get(m, {}), params)
    hki.save(folder / "dense.safetensors", hk.data_structures.to_mutable_dict(dense))
    if _METHOD.value not in ("full", "heads"):
        hki.save(folder / "adapter.safetensors", hki.get_adapter(params))
    settings = dict(method=_METHOD.value, head=_HEAD.value)
    training = dict(settings=settings, step=tuned.step, optimizer=tuned.optimizer)
    hki.save(folder / "training.safetensors", training)  # the last: the folder is whole
    for other in folder.parent.glob("step_*"):
        if other != folder:
            shutil.rmtree(other)


def load_saved() -> dict[str, Any]:
    """Reads what `save` wrote, all of it or nothing."""
    found = sorted(pathlib.Path(_FOLDER.value).glob("step_*/training.safetensors"))
    if not found:
        raise InputError(f"--resume: nothing is saved in --folder={_FOLDER.value}")
    saved = hki.load(found[-1])
    settings = dict(method=_METHOD.value, head=_HEAD.value)
    if saved["settings"] != settings:
        raise InputError(f"--resume: {_FOLDER.value} has {saved['settings']}, expected {settings}")
    names = ["dense"] + ["adapter"] * (_METHOD.value not in ("full", "heads"))
    return saved | {name: hki.load(found[-1].with_name(f"{name}.safetensors")) for name in names}


def export(path: str, forward: Any, model: Any, tuned: Tuned, state: Any, batch: Any) -> None:
    """Writes merged, plain parameters, and compares them with the tuned model."""
    (ocp,) = dense_twin.modules_of(None, ["orbax.checkpoint"])
    plain = hki.materialize(hki.merge_adapters(model.params(tuned.trained)))
    losses = [
        float(jax.jit(apply)(params, state, None, batch)[0][0])
        for apply, params in ((model.apply, tuned.trained), (forward.apply, plain))
    ]
    folder = pathlib.Path(path).expanduser().resolve()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, (plain, state), force=True)
    print(f"{folder}: loss {losses[0]:.4f} as trained, {losses[1]:.4f} merged and plain")


if __name__ == "__main__":
    app.run(main_of(run))
