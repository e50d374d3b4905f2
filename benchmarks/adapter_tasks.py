"""The tasks of `benchmarks.adapters`: a model, its weights, and data to train on and to test with."""

import functools
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import haiku_implicit as hki

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # whose scripts import each other by their bare names

import dense_twin  # noqa: E402
import smollm  # noqa: E402
from models import llama  # noqa: E402

LAYERS = flags.DEFINE_integer(
    "adapters_layers", 10, "SmolLM2's last layers, which get adapters.", 1, 30
)

PDBS = flags.DEFINE_string("adapters_zinc_fingers", None, "Folder of PDB files, for ProteinMPNN.")

CONTEXT = 64  # tokens in a passage
EVALUATED = dict(validation=512, heldout=1024)  # tokens
CALIBRATION = 16  # passages
ORDERS = 4  # of decoding a protein
Batch = tuple[jax.Array, jax.Array]


class SmolLM:
    """SmolLM2-135M-Instruct on Shakespeare, with dense weights and adapters in the last layers.

    The layers below these are the same for all kinds, so that their outputs are computed once for each
    passage. The others are one stack.

    Attributes:
      params: the weights of the last layers and the logits, dense.
      targets: the weights that get adapters.
      about: the settings, for the record.
    """

    targets = r".*_proj/w"

    def __init__(self) -> None:
        checkpoint = smollm.read_gguf(smollm.fetch(smollm.MODEL))
        self.config, dense = checkpoint.config, hki.materialize(checkpoint.params)
        layers = self.config.num_layers
        self.frozen = stacked(dense, range(layers - LAYERS.value))
        self.params = stacked(dense, range(layers - LAYERS.value, layers))
        self.apply = hki.transform_implicit(transformed(self._upper)).apply
        self.lower = jax.jit(transformed(self._lower).apply)
        text = smollm.read_text(smollm.fetch(smollm.SHAKESPEARE))
        ids = smollm.token_ids(checkpoint.tokenizer, text)
        self.parts = np.split(ids, [len(ids) * 8 // 10, len(ids) * 9 // 10])
        self.about = dict(
            model="SmolLM2-135M", layers=LAYERS.value, context=CONTEXT, batch=1, **EVALUATED
        )
        self.evaluated = {name: self._evaluated(i) for i, name in enumerate(EVALUATED, 1)}

    def _layers(self, x: jax.Array, count: int) -> jax.Array:
        def layer(x: jax.Array) -> jax.Array:
            return llama.Layer(self.config, name="layer")(x)

        return hk.experimental.layer_stack(count)(layer)(x) if count else x

    def _lower(self, tokens: jax.Array) -> jax.Array:
        x = hk.Embed(self.config.vocab_size, self.config.dim, name="embed")(tokens)
        return self._layers(x, self.config.num_layers - LAYERS.value)

    def _upper(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = llama.rms_norm(config, "final_norm")(self._layers(x, LAYERS.value))
        embed = hk.Embed(config.vocab_size, config.dim, name="embed")
        return jnp.einsum("btd,vd->btv", x, embed.embeddings)

    def loss(self, params: Any, batch: Batch) -> jax.Array:
        x, labels = batch
        logits = self.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.cache  # noqa: B019 (there is one task)
    def batch(self, seed: int, step: int) -> Batch:
        """A passage to train on, the same for all kinds."""
        return self._windows(0, [seed, step], 1)

    def _windows(self, part: int, key: list[int], count: int) -> Batch:
        """The inputs of the last layers, and the next tokens, of random passages."""
        ids = self.parts[part]
        starts = np.random.default_rng(key).integers(len(ids) - CONTEXT, size=count)
        tokens = ids[starts[:, None] + np.arange(CONTEXT + 1)]
        return self.lower(self.frozen, tokens[:, :-1]), jnp.asarray(tokens[:, 1:])

    def _evaluated(self, part: int) -> list[Batch]:
        count = list(EVALUATED.values())[part - 1] // CONTEXT // 4
        return [self._windows(part, [part, i], 4) for i in range(count)]

    def evaluate(self, params: Any, seed: int) -> dict[str, float]:
        """The losses with dense parameters on two parts of the text, of the same passages always."""
        del seed
        return {
            name: float(np.mean([float(self._dense_loss(params, batch)) for batch in batches]))
            for name, batches in self.evaluated.items()
        }

    @functools.cached_property
    def _dense_loss(self) -> Any:
        step = jax.jit(self.loss)
        return step.lower(self.params, self.evaluated["validation"][0]).compile()

    @functools.cache  # noqa: B019
    def moments(self) -> dict[str, jax.Array]:
        """The moments of the inputs of the weights, in passages to train on."""
        x, _ = self._windows(0, [0, 0, 0], CALIBRATION)
        return hki.input_moments(self.apply, self.params, [x], targets=self.targets)

    @functools.cache  # noqa: B019
    def gradients(self) -> Any:
        """The gradient of the loss of the same passages, for the weights with adapters."""
        x, labels = self._windows(0, [0, 0, 0], CALIBRATION)
        own, rest = hki.partition(self.params, self.targets)
        gradient = jax.jit(jax.grad(lambda own, batch: self.loss(hki.combine(own, rest), batch)))
        parts = [gradient(own, (x[i : i + 4], labels[i : i + 4])) for i in range(0, len(x), 4)]
        return jax.tree.map(lambda *each: sum(each) / len(each), *parts)


class ProteinMPNN:
    """ProteinMPNN on the zinc fingers: each seed holds out a fold of chains, and validates on the next.

    `examples/finetune_proteinmpnn.py` has the model, the chains and the loss.

    Attributes:
      params, targets, about: as for `SmolLM`.
    """

    targets = r".*(enc|dec)_layer.*/w"

    def __init__(self) -> None:
        import finetune_proteinmpnn as example  # (it defines flags, of which one is required)

        flags.FLAGS.pdbs = PDBS.value
        self.example, self.names = example, example.names_of_older_jax()
        self.names.__enter__()  # for as long as the process runs
        names = ("mpnn.modules", "af.prep", "af.alphafold.common.residue_constants")
        modules = dense_twin.modules_of(None, [f"colabdesign.{name}" for name in names])
        self.task = example.task_of(*modules)
        self.params = jax.tree.map(jnp.asarray, self.task.params)
        self.apply = hki.transform_implicit(self.task.model).apply
        self.about = dict(model="ProteinMPNN", batch=1, orders=ORDERS)
        self.dense_loss = jax.jit(self.loss)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return self.example.nll(self.apply, params, *batch).mean()

    def _chains(self, chosen: np.ndarray, key: jax.Array) -> Any:
        return key, jax.tree.map(lambda x: x[jnp.asarray(chosen)], self.task.batch)

    def _folds(self, seed: int) -> np.ndarray:
        """Of each chain: 0 if it is held out, 1 if it is for validation."""
        return (self.task.folds - seed) % (self.task.folds.max() + 1)

    def batch(self, seed: int, step: int) -> Any:
        """A random decoding order of a random chain of the other folds."""
        training = np.flatnonzero(self._folds(seed) > 1)
        chosen = np.random.default_rng([seed, step]).choice(training, 1)
        return self._chains(chosen, jax.random.fold_in(jax.random.key(seed), step))

    def evaluate(self, params: Any, seed: int) -> dict[str, float]:
        """The losses of two folds with dense parameters, the means of the same decoding orders."""
        keys, folds = jax.random.split(jax.random.key(1), ORDERS), self._folds(seed)
        found = {}
        for fold, name in enumerate(("heldout", "validation")):
            batches = [self._chains(np.flatnonzero(folds == fold), key) for key in keys]
            found[name] = float(np.mean([float(self.dense_loss(params, b)) for b in batches]))
        return found

    def _calibration(self) -> list[Any]:
        """Orders of the last fold's chains, which no seed below three tests with."""
        chosen = np.flatnonzero(self.task.folds == self.task.folds.max())
        return [self._chains(chosen, jax.random.key(i)) for i in range(4)]

    @functools.cache  # noqa: B019
    def moments(self) -> dict[str, jax.Array]:
        """The moments of the inputs of the weights, on chains to train on."""
        return hki.input_moments(
            lambda params, *batch: self.example.nll(self.apply, params, *batch),
            self.params,
            self._calibration(),
            targets=self.targets,
        )

    @functools.cache  # noqa: B019
    def gradients(self) -> Any:
        """The gradient of the loss of the same chains, for all weights."""
        parts = [jax.jit(jax.grad(self.loss))(self.params, b) for b in self._calibration()]
        return jax.tree.map(lambda *each: sum(each) / len(each), *parts)


def transformed(forward: Any) -> hk.Transformed:
    return hk.without_apply_rng(hk.transform(forward))


def stacked(params: Any, layers: Sequence[int]) -> Any:
    """Some of the layers of a Llama as a stack, and the other modules as they are."""
    new: dict[str, Any] = {}
    for module, weights in params.items():
        if not (found := re.fullmatch(r"llama/layer_(\d+)/(.*)", module)):
            new[module.removeprefix("llama/")] = weights
        elif layers and found[1] == "0":
            own = [params[module.replace("layer_0", f"layer_{i}")] for i in layers]
            name = f"__layer_stack_no_per_layer/layer/{found[2]}"
            new[name] = jax.tree.map(lambda *x: jnp.stack(x), *own)
    return new


TASKS = {"smollm": SmolLM, "proteinmpnn": ProteinMPNN}
