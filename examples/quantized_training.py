"""Trains in 8 bits: a transformer on Shakespeare and a ResNet on digits, against float32.

Neither model is changed: `QtRule`s define the quantization, as in Qwix. Each model is trained from the
same start on the same batches in float32, with products of int8 in the forward pass, and with products
of int8 in both passes, with stochastic rounding of gradients. A fourth run is float32 again, from
a start that is a ten-thousandth larger: the effect of a meaningless change on the loss.

The comparison is between mean losses of the last steps and losses on held-out data (quantized models
use quantized products). It needs losses that are not close to zero, since there any two runs differ by
many percent. So the digits have fresh noise in each batch, and no model can be sure of them; the
transformer sees a small part of its text once.

    python examples/quantized_training.py
    python examples/quantized_training.py --models=digits --seeds=3 --plot=curves.png
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
import optax
from absl import app, flags
from sklearn import datasets
from tqdm import tqdm

import haiku_implicit as hki
import smollm
from errors import InputError, main_of
from haiku_implicit.quantization import QtRule
from models import llama
from printing import heading, table
from product_dtypes import count_products

_MODELS = flags.DEFINE_multi_enum(
    "models", ["language", "digits"], ["language", "digits"], "What is trained."
)
_SEEDS = flags.DEFINE_integer("seeds", 1, "From how many starts.", 1)
_STEPS = flags.DEFINE_integer("steps", 600, "Steps of each run of the language model.", 1)
_DIGITS_STEPS = flags.DEFINE_integer("digits_steps", 500, "Those of the ResNet.", 1)
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the language model.", 1)
_WIDTH = flags.DEFINE_integer("width", 64, "Width of the language model.", 8)
_GROUPS = flags.DEFINE_integer("groups", 4, "Groups of the ResNet's blocks, one in each.", 1, 4)
_CHANNELS = flags.DEFINE_integer("channels", 16, "Channels of the ResNet's first group.", 1)
_GOAL = flags.DEFINE_float("goal", 2.0, "How far losses may be from those of float32, in %.", 0.0)
_PLOT = flags.DEFINE_string("plot", None, "Where the curves are saved, a PNG.")

LAST = 50  # the number of steps whose losses are averaged
LENGTH = 64  # bytes of a passage
NOISE = 0.7  # standard deviation, in images of numbers from -1 to 1


class Way(NamedTuple):
    """A way to train a model.

    Attributes:
      options: options of the `QtRule` for all modules except those kept in float32; empty: no rule.
      factor: the factor of the initial parameters.
    """

    options: dict[str, Any]
    factor: float = 1.0


INT8 = dict(weight_qtype="int8", act_qtype="int8")
BACKWARD = dict(bwd_qtype="int8", bwd_stochastic_rounding="uniform")
WAYS = {
    "float32": Way({}),
    "float32, start times 1.0001": Way({}, factor=1.0001),
    "int8 forward": Way(INT8),
    "int8 both": Way(INT8 | BACKWARD),
}


class Data(NamedTuple):
    """Examples: inputs, and the class number of each output."""

    inputs: np.ndarray
    labels: np.ndarray


class Task(NamedTuple):
    """A model and its training data.

    Attributes:
      name: its name.
      model: with state: a function of inputs and an is-training flag, which returns logits.
      in_float: a regular expression for the modules whose products stay in float32.
      batch: makes the batch of a step, given a random generator.
      heldout: the test data.
      steps: the number of training steps.
      rate: the largest learning rate of AdamW; it rises for a tenth of the steps, then falls to 0.
    """

    name: str
    model: hk.TransformedWithState
    in_float: str
    batch: Callable[[np.random.Generator], Data]
    heldout: Data
    steps: int
    rate: float


class Result(NamedTuple):
    """The losses of all steps; the mean of the last losses, and held-out loss and accuracy."""

    curve: np.ndarray
    last: float
    heldout: float
    accuracy: float


def run() -> None:
    """Trains each model in each way, prints, draws and compares."""
    found: dict[str, list[dict[str, Result]]] = {}
    for name in dict.fromkeys(_MODELS.value):
        task = {"language": language, "digits": digits}[name]()
        heading(task.name)
        describe(task)
        step, test = programs(task)
        found[task.name] = [
            {way: train(task, step, test, way, seed) for way in WAYS}
            for seed in range(_SEEDS.value)
        ]
        print_losses(found[task.name])
    save_plot(found)
    for name, seeds in found.items():
        check(name, seeds)


# --- the models and their data --------------------------------------------------------------------


def language() -> Task:
    """Returns the task of a transformer that predicts the next byte of Shakespeare's works."""
    text = smollm.read_text(smollm.fetch(smollm.SHAKESPEARE)).encode()
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    width = _WIDTH.value
    config = llama.LlamaConfig(
        vocab_size=256,
        dim=width,
        num_layers=_LAYERS.value,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=3 * width,
        tied=False,
    )

    def passages(count: int, data: np.ndarray, rng: np.random.Generator) -> Data:
        starts = rng.integers(len(data) - LENGTH, size=count)
        tokens = data[starts[:, None] + np.arange(LENGTH + 1)]
        return Data(tokens[:, :-1], tokens[:, 1:])

    cut = len(data) * 9 // 10  # the last tenth is held out
    return Task(
        "a transformer on Shakespeare",
        hk.transform_with_state(lambda tokens, is_training: llama.Llama(config)(tokens)),
        in_float=r"llama/(embed|lm_head)",
        batch=functools.partial(passages, 8, data[:cut]),
        heldout=passages(128, data[cut:], np.random.default_rng(0)),
        steps=_STEPS.value,
        rate=4e-3,
    )


def digits() -> Task:
    """Returns the task of Haiku's ResNet on images of 8 x 8 pixels, with a small first convolution."""
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 8, 8, 1).astype(np.float32) / 8 - 1
    heldout, training = (Data(images[s], labels[order][s]) for s in (slice(360), slice(360, None)))
    width = _CHANNELS.value

    def resnet(images: jax.Array, is_training: bool) -> jax.Array:
        net = hk.nets.ResNet(
            blocks_per_group=[int(i < _GROUPS.value) for i in range(4)],
            num_classes=10,
            bottleneck=False,
            channels_per_group=(width, width, 2 * width, 2 * width),
            use_projection=(False, True, True, True),
            initial_conv_config=dict(output_channels=width, kernel_shape=3, stride=1),
            strides=(1, 1, 2, 1),
        )
        return net(images, is_training)

    def noisy(count: int, data: Data, rng: np.random.Generator) -> Data:
        chosen = rng.integers(len(data.inputs), size=count)
        inputs = data.inputs[chosen]
        noise = rng.standard_normal(inputs.shape, np.float32)
        return Data(inputs + NOISE * noise, data.labels[chosen])

    return Task(
        "a ResNet on digits",
        hk.transform_with_state(resnet),
        in_float=r"res_net/~/(initial_conv|logits)",
        batch=functools.partial(noisy, 64, training),
        heldout=noisy(2000, heldout, np.random.default_rng(0)),
        steps=_DIGITS_STEPS.value,
        rate=7e-4,
    )


# --- training ---------------------------------------------------------------------------------------


def start(task: Task, way: str, seed: int) -> tuple[Any, Any]:
    """Returns the parameters, with the way's rules on their weights if it has any, and the state."""
    options, factor = WAYS[way]
    inputs = task.batch(np.random.default_rng(0)).inputs
    init = jax.jit(task.model.init, static_argnums=2)
    params, state = init(jax.random.key(seed), inputs, True)
    params = jax.tree.map(lambda x: factor * x, params)
    if options:
        rules = [QtRule(module_path=task.in_float), QtRule(**options)]
        params = hki.quantized_training(params, rules)
    return params, state


def loss_of(
    task: Task, is_training: bool, params: Any, state: Any, key: jax.Array, data: Data
) -> tuple[jax.Array, Any]:
    """Returns the loss, with the new state and the accuracy."""
    params = hki.with_rounding_key(params, key)
    apply = hki.transform_implicit(task.model).apply
    logits, state = apply(params, state, None, data.inputs, is_training)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, data.labels).mean()
    return loss, (state, (logits.argmax(-1) == data.labels).mean())


def programs(task: Task) -> tuple[Any, Any]:
    """Returns a training step and a test, which compile once for each structure of the parameters."""
    gradients = jax.value_and_grad(functools.partial(loss_of, task, True), has_aux=True)
    optimizer = optimizer_of(task)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, state: Any, moments: Any, key: jax.Array, data: Data) -> Any:
        (loss, (state, _)), grads = gradients(params, state, key, data)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments, loss

    return step, jax.jit(functools.partial(loss_of, task, False))


def optimizer_of(task: Task) -> optax.GradientTransformation:
    warmup = task.steps // 10
    return optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, task.rate, warmup, max(task.steps, warmup + 1))
    )


def train(task: Task, step: Any, test: Any, way: str, seed: int) -> Result:
    """Trains in one way; the start and the batches depend only on the seed."""
    params, state = start(task, way, seed)
    moments, losses, rng = optimizer_of(task).init(params), [], np.random.default_rng(seed)
    for i in (bar := tqdm(range(task.steps), f"{way}, seed {seed}", leave=False)):
        key = jax.random.fold_in(jax.random.key(seed), i)
        params, state, moments, loss = step(params, state, moments, key, task.batch(rng))
        losses.append(float(loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    heldout, (_, accuracy) = test(params, state, key, task.heldout)
    last = float(np.mean(losses[-LAST:]))
    return Result(np.array(losses), last, float(heldout), float(accuracy))


# --- quantized products ---------------------------------------------------------------------------


def describe(task: Task) -> None:
    """Counts the products by their operands in both passes, and the arrays that become dense."""
    print("in float32 by a rule:", task.in_float)
    rows, data = [], task.batch(np.random.default_rng(0))
    forward = functools.partial(loss_of, task, True)
    for way in WAYS:
        if WAYS[way].factor != 1:
            continue
        params, state = start(task, way, 0)
        args = params, state, jax.random.key(0), data
        with hki.materialization_report() as report:
            counts = count_products(forward, *args)
            both = count_products(jax.grad(forward, has_aux=True), *args)
        assert not report, f"{way}: {report}"
        backward = both - counts
        check_counts(way, params, counts, backward)
        rows += [[way, "forward", summary(counts)], ["", "backward", summary(backward)]]
    table(["way", "pass", "products"], rows)


def summary(counts: Any) -> str:
    """Describes counts in words."""
    return ", ".join(f"{n} of {kind}" for kind, n in sorted(counts.items()))


def check_counts(way: str, params: Any, forward: Any, backward: Any) -> None:
    """Checks that each quantized weight has one int8 product forward, and two backward."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, hki.TrainedQuantized))
    weights = sum(isinstance(x, hki.TrainedQuantized) for x in leaves)
    options = WAYS[way].options
    assert bool(weights) == bool(options), f"{way}: {weights} weights have rules"
    assert forward["int8 * int8"] == weights, f"{way}: {forward}"
    in_both = "bwd_qtype" in options
    assert backward["int8 * int8"] == in_both * 2 * weights, f"{way}: {backward}"


# --- results --------------------------------------------------------------------------------------


def print_losses(seeds: list[dict[str, Result]]) -> None:
    """Prints a table of losses, and their differences from float32 with the same start."""
    print()
    rows = []
    for seed, results in enumerate(seeds):
        for way, result in results.items():
            last, heldout = differences(result, results["float32"])
            rows.append([seed, way, f"{result.last:.4f}", f"{last:+.2f} %", f"{result.heldout:.4f}",
                         f"{heldout:+.2f} %", f"{100 * result.accuracy:.1f} %"])  # fmt: skip
    header = ["seed", "way", f"last {LAST} steps", "to float32", "held out", "to float32", "right"]
    table(header, rows)


def differences(result: Result, reference: Result) -> tuple[float, float]:
    """Returns the last and the held-out loss above another run's, in percent."""
    last = 100 * (result.last / reference.last - 1)
    return last, 100 * (result.heldout / reference.heldout - 1)


def check(name: str, seeds: list[dict[str, Result]]) -> None:
    """Checks that training learned something, and quantized training about as much."""
    for results in seeds:
        reference = results["float32"]
        assert reference.last < reference.curve[0], f"{name}: nothing was learned"
        for way, result in results.items():
            far = max(map(abs, differences(result, reference)))
            assert far <= _GOAL.value, f"{name}, {way}: {far:.2f} % from the loss of float32"


def save_plot(found: dict[str, list[dict[str, Result]]]) -> None:
    """Draws the losses, and their differences from float32, if the flags name a file."""
    if not _PLOT.value:
        return
    try:
        from matplotlib import figure
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from error
    drawing = figure.Figure(figsize=(9, 5), layout="constrained")
    columns = drawing.subplots(2, len(found), squeeze=False, sharex="col").T
    for (upper, lower), (name, seeds) in zip(columns, found.items(), strict=True):
        reference = smooth(seeds[0]["float32"].curve)
        for way, result in seeds[0].items():
            curve = smooth(result.curve)
            upper.plot(curve, label=way, linewidth=1.2)
            lower.plot(100 * (curve / reference - 1), linewidth=1.2)
        upper.set(ylabel="loss, nats", title=name)
        lower.set(xlabel="step", ylabel="to float32, %")
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
        upper.legend(frameon=False, fontsize=8)
    drawing.savefig(_PLOT.value, dpi=100)
    print(f"\nthe curves are in {_PLOT.value}")


def smooth(curve: np.ndarray) -> np.ndarray:
    """Returns the mean of the last (at most) ten losses, at each step."""
    sums = np.concatenate([[0.0], np.cumsum(curve)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - 10, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


if __name__ == "__main__":
    app.run(main_of(run))
