"""Fine-tunes ProteinMPNN with LoRA on chains of a protein family, and tests it on held-out ones.

The model is ColabDesign's (`pip install colabdesign`), with the weights in that package, and is not
modified. The chains are a folder of PDB files, such as the zinc fingers of Debian's package
`mustang-testdata`. Each chain is held out once:

    python examples/finetune_proteinmpnn.py --pdbs=FOLDER --save=adapter.safetensors
    python examples/finetune_proteinmpnn.py --pdbs=FOLDER --load=adapter.safetensors --merged=merged.pkl
"""

import collections
import contextlib
import pathlib
import pickle
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import dense_twin
import haiku_implicit as hki
import printing
from bars import tqdm
from errors import InputError, main_of

_REPO = flags.DEFINE_string("repo", None, "Folder of a checkout; by default what is installed.")
_PDBS = flags.DEFINE_string("pdbs", None, "Folder of PDB files with one chain each.", required=True)
_WEIGHTS = flags.DEFINE_string("weights", None, "ColabDesign's pickle; by default v_48_020 of it.")
_FOLDS = flags.DEFINE_integer("folds", 5, "Parts of the chains, each held out once.", 2)
_SEEDS = flags.DEFINE_integer("seeds", 3, "How often each fold is trained.", 1)
_STEPS = flags.DEFINE_integer("steps", 60, "Training steps.", 1)
_EVERY = flags.DEFINE_integer("test_every", 20, "Steps between tests.", 1)
_BATCH = flags.DEFINE_integer("batch_size", 4, "Chains in a step.", 1)
_RANK = flags.DEFINE_integer("rank", 4, "LoRA's rank.", 1)
_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Adam's.", 0.0)
_ORDERS = flags.DEFINE_integer(
    "orders", 16, "Decoding orders that a held-out NLL is the mean of.", 1
)
_SAVE = flags.DEFINE_string("save", None, "File for the adapter of the first fold and seed.")
_LOAD = flags.DEFINE_string("load", None, "File of an adapter to test, instead of training.")
_MERGED = flags.DEFINE_string(
    "merged", None, "ColabDesign's pickle of ordinary weights, with the adapter of --load in them."
)

LETTERS = "ACDEFGHIKLMNPQRSTVWYX"  # ProteinMPNN's order of amino acids
BACKBONE = ("N", "CA", "C", "O")
LAYERS = 3

Params = Any
Batch = dict[str, jax.Array]


class Task(NamedTuple):
    """The model, ColabDesign's checkpoint with its weights, and the chains with the fold of each."""

    model: hk.Transformed
    checkpoint: dict[str, Any]
    params: Params
    names: list[str]
    batch: Batch
    folds: np.ndarray


def run() -> None:
    """Trains and tests, or tests an adapter that was saved."""
    if _MERGED.value and not _LOAD.value:
        raise InputError("--merged: needs --load, the adapter to merge")
    modules = dense_twin.modules_of(
        _REPO.value,
        [
            "colabdesign.mpnn.modules",
            "colabdesign.af.prep",
            "colabdesign.af.alphafold.common.residue_constants",
        ],
        folder="",
    )
    with names_of_older_jax():
        task = task_of(*modules)
        if _LOAD.value:
            test_saved(task, _LOAD.value)
        else:
            train_and_test(task)


@contextlib.contextmanager
def names_of_older_jax() -> Iterator[None]:
    """Gives ColabDesign 1.1.1 the function `jax.tree_map`, which JAX has under another name now."""
    if hasattr(jax, "tree_map"):
        yield
    else:
        with mock.patch.object(jax, "tree_map", jax.tree.map, create=True):
            yield


# --- the model and the chains -----------------------------------------------------------------------


def task_of(modules: Any, prep: Any, constants: Any) -> Task:
    """Reads the weights and the chains."""
    default = pathlib.Path(modules.__file__).parent / "weights" / "v_48_020.pkl"
    checkpoint = read_weights(_WEIGHTS.value or str(default))
    config = dict(
        num_letters=len(LETTERS),
        node_features=128,
        edge_features=128,
        hidden_dim=128,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        augment_eps=0.0,
        k_neighbors=checkpoint["num_edges"],
        dropout=0.0,
    )
    model = hk.transform(lambda inputs: modules.ProteinMPNN(**config).score(inputs)["logits"])
    names, batch = read_chains(pathlib.Path(_PDBS.value), prep.prep_pdb, constants)
    params, folds = checkpoint["model_state_dict"], folds_of(names, _FOLDS.value)
    return Task(model, checkpoint, params, names, batch, folds)


def read_weights(path: str) -> dict[str, Any]:
    """Reads a pickle of ColabDesign, without running code in it."""
    try:
        found = hki.load(path, allow_pickle=True)
    except (OSError, ValueError) as error:
        raise InputError(f"--weights: {error}") from error
    wanted = {"num_edges", "model_state_dict"}
    if not (isinstance(found, dict) and wanted <= found.keys()):
        raise InputError(
            f"--weights: {path}: expected a pickle of ColabDesign's ProteinMPNN, with num_edges and "
            "model_state_dict"
        )
    return found


def read_chains(
    folder: pathlib.Path, prep_pdb: Callable[..., Any], constants: Any
) -> tuple[list[str], Batch]:
    """Reads the backbones and sequences, `[chains, residues, ...]`, shorter ones padded."""
    paths = sorted(folder.glob("*.pdb"))
    if len(paths) < _FOLDS.value:
        raise InputError(
            f"--pdbs: {folder} has {len(paths)} files *.pdb, expected at least --folds={_FOLDS.value}"
        )
    atoms = [constants.atom_order[name] for name in BACKBONE]
    kinds = np.array([LETTERS.index(letter) for letter in [*constants.restypes, "X"]])
    chains = []
    for path in paths:
        found = prep_pdb(str(path), None)
        inside, offset = found["batch"], np.asarray(found["residue_index"])
        chain = dict(
            X=inside["all_atom_positions"][:, atoms].astype(np.float32),
            mask=inside["all_atom_mask"][:, atoms].min(1).astype(np.float32),
            S=np.eye(len(LETTERS), dtype=np.float32)[kinds[inside["aatype"]]],
            residue_idx=offset.astype(np.int32),
            chain_idx=np.zeros(len(offset), np.int32),
        )
        chains.append(chain)
    longest = max(len(chain["mask"]) for chain in chains)
    rows = [{name: padded(x, longest) for name, x in chain.items()} for chain in chains]
    return [path.stem for path in paths], jax.tree.map(lambda *x: jnp.stack(x), *rows)


def padded(x: np.ndarray, length: int) -> np.ndarray:
    return np.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1))


def folds_of(names: list[str], count: int) -> np.ndarray:
    """The fold of each chain. Chains of one PDB entry, the first four letters, stay together."""
    entries = collections.Counter(name[:4] for name in sorted(names))
    sizes, fold = [0] * count, {}
    for entry, chains in entries.most_common():
        fold[entry] = sizes.index(min(sizes))
        sizes[fold[entry]] += chains
    return np.array([fold[name[:4]] for name in names])


# --- training and testing ---------------------------------------------------------------------------


def nll(apply: Callable[..., Any], params: Params, key: jax.Array, batch: Batch) -> jax.Array:
    """The mean negative log-likelihood of each chain's residues, `[chains]`, in a random order."""

    def of_chain(key: jax.Array, chain: Batch) -> jax.Array:
        order = (jax.random.uniform(key, chain["mask"].shape) + 1 - chain["mask"]).argsort()
        logits = apply(params, key, {**chain, "decoding_order": order})
        loss = optax.softmax_cross_entropy(logits, chain["S"])
        return (loss * chain["mask"]).sum() / chain["mask"].sum()

    return jax.vmap(of_chain)(jax.random.split(key, len(batch["mask"])), batch)


def tester(task: Task, apply: Callable[..., Any]) -> Callable[[Params], np.ndarray]:
    """Makes a function that gives the NLL of each chain, the mean of the same decoding orders."""
    keys = jax.random.split(jax.random.key(1), _ORDERS.value)
    of_orders = jax.jit(
        lambda params: jax.lax.map(lambda key: nll(apply, params, key, task.batch), keys).mean(0)
    )
    return lambda params: np.asarray(of_orders(params))


def train_and_test(task: Task) -> None:
    """Trains each fold with each seed, prints the held-out NLL, and saves the first adapter."""
    starts = [
        hki.freeze(task.model, hki.add_lora(task.params, seed, rank=_RANK.value))
        for seed in range(_SEEDS.value)
    ]
    model = starts[0][0]  # the frozen half is the same for all seeds
    step, optimizer = training_step(task, model)
    test = tester(task, model.apply)
    tests = range(0, _STEPS.value + 1, _EVERY.value)
    found = np.zeros((len(tests), _SEEDS.value, len(task.names)))
    runs = [(seed, fold) for seed in range(_SEEDS.value) for fold in range(_FOLDS.value)]
    with tqdm(total=len(runs) * _STEPS.value, unit="step") as bar:
        for seed, fold in runs:
            held_out, trained = task.folds == fold, starts[seed][1]
            rng, state = np.random.default_rng((seed, fold)), optimizer.init(trained)
            for number in range(_STEPS.value + 1):
                if number in tests:
                    found[number // _EVERY.value, seed, held_out] = test(trained)[held_out]
                if number == _STEPS.value:
                    break
                chosen = rng.choice(np.flatnonzero(~held_out), _BATCH.value, replace=False)
                key = jax.random.fold_in(jax.random.key(seed), number)
                trained, state, loss = step(trained, state, key, jnp.asarray(chosen))
                bar.update()
                bar.set_postfix(seed=seed, fold=fold, loss=f"{loss:.2f}")
            if _SAVE.value and (seed, fold) == (0, 0):
                hki.save(_SAVE.value, hki.get_adapter(model.params(trained)))
    before = tester(task, task.model.apply)(task.params)
    report(task, before, found, starts[0][1])


def training_step(
    task: Task, model: Any
) -> tuple[Callable[..., Any], optax.GradientTransformation]:
    """Makes an ordinary training step, with its optimizer."""
    optimizer = optax.adam(_RATE.value)

    @jax.jit
    def step(trained: Params, state: Any, key: jax.Array, chosen: jax.Array) -> Any:
        batch = jax.tree.map(lambda x: x[chosen], task.batch)
        loss, grads = jax.value_and_grad(lambda p: nll(model.apply, p, key, batch).mean())(trained)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, loss

    return step, optimizer


def report(task: Task, before: np.ndarray, found: np.ndarray, trained: Params) -> None:
    """Prints the held-out NLL of each chain at the end, and of all chains by seed and step.

    Args:
      task: the task.
      before: the pretrained NLL, `[chains]`.
      found: the held-out NLL, `[tests, seeds, chains]`.
      trained: what was trained.
    """
    count, total = (sum(x.size for x in jax.tree.leaves(t)) for t in (trained, task.params))
    print(
        f"{total:,} pretrained weights, {count:,} trained numbers in LoRA of rank {_RANK.value}\n"
    )
    rows = [
        [name, fold, f"{old:.3f}", f"{new.mean():.3f}", f"{spread(new):.3f}"]
        for name, fold, old, new in zip(task.names, task.folds, before, found[-1].T, strict=True)
    ]
    printing.table(["held out", "fold", "pretrained", "LoRA", "sd of seeds"], rows)
    letters = nll_of_frequencies(task).mean()
    print(f"\nall chains: letter frequencies {letters:.3f} nats per residue")
    print(f"all chains: pretrained {before.mean():.3f} nats per residue; with LoRA")
    rows = []
    for number, values in enumerate(found.mean(2)):
        mean = f"{values.mean():.3f}", f"{spread(values):.3f}"
        better = f"{int((found[number].mean(0) < before - 1e-3).sum())} of {len(before)}"
        rows.append([number * _EVERY.value, *(f"{x:.3f}" for x in values), *mean, better])
    seeds = [f"seed {seed}" for seed in range(_SEEDS.value)]
    printing.table(["steps", *seeds, "mean", "sd", "better chains"], rows)
    if _SAVE.value:
        print(f"\n{_SAVE.value}: held-out NLL {found[-1, 0, task.folds == 0].mean():.6f}")


def nll_of_frequencies(task: Task) -> np.ndarray:
    """The NLL of each chain by how often each letter is in the chains that are not held out with it."""
    counts = np.asarray((task.batch["S"] * task.batch["mask"][..., None]).sum(1))[:, :-1]
    others = [counts[task.folds != fold].sum(0) + 1 for fold in task.folds]
    logs = np.log([x / x.sum() for x in others])
    return -(counts * logs).sum(1) / counts.sum(1)


def spread(values: np.ndarray) -> float:
    return statistics.stdev(map(float, values)) if len(values) > 1 else 0.0


def test_saved(task: Task, path: str) -> None:
    """Tests an adapter of the first fold: its gradients, and its NLL, also merged; writes that."""
    try:
        params = hki.set_adapter(task.params, hki.load(path))
    except (OSError, ValueError) as error:
        raise InputError(f"--load: {error}") from error
    held_out, key = task.folds == 0, jax.random.key(0)
    batch = jax.tree.map(lambda x: x[held_out], task.batch)
    dense_twin.check_gradients(
        task.model, params, lambda apply, params: nll(apply, params, key, batch).mean()
    )
    implicit = tester(task, hki.transform_implicit(task.model).apply)(params)[held_out]
    plain = hki.materialize(hki.merge_lora(params))
    merged = tester(task, task.model.apply)(plain)[held_out]
    print(f"held-out NLL {implicit.mean():.6f}, merged {merged.mean():.6f}")
    if _MERGED.value:
        weights = jax.tree.map(np.asarray, plain)
        data = pickle.dumps(task.checkpoint | {"model_state_dict": weights})
        pathlib.Path(_MERGED.value).write_bytes(data)


if __name__ == "__main__":
    app.run(main_of(run))
