"""Selects rules by operation, and serves static activation scales with integers.

After Qwix's quantized training: a small model with a convolution, an einsum and a mixture of experts
(`jax.lax.ragged_dot`), in plain Haiku. Rules chosen by operation quantize its products, including the
gradients' products. Training collects statistics of its activations. Then its weights
become integers, and the model with these, without statistics, gives the same bits.

    python examples/static_scales.py
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tqdm import tqdm

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule, matching_rule
from models import mixture
from printing import heading, table
from product_dtypes import Product, products_in

_SIZE = flags.DEFINE_integer("size", 32, "Height and width of the images, a multiple of 8.", 8)
_DIM = flags.DEFINE_integer("dim", 64, "Width of the model, a multiple of 8.", 8)
_EXPERTS = flags.DEFINE_integer("experts", 8, "Number of experts.", 2)
_BATCH = flags.DEFINE_integer("batch", 32, "Images in a batch.", 1)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of training.", 1)
_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Adam's learning rate.", 0.0)
_MARGIN = flags.DEFINE_float(
    "margin", 4.0, "How far static ranges reach, in averages of largest magnitudes.", 0.0
)
_GOAL = flags.DEFINE_float("goal", 0.9, "What the accuracy has to be above.", 0.0, 1.0)

CLASSES = 4  # the directions of an image's stripes
HEADS = 4
TESTED = 8  # the number of batches that measure the accuracy


# --- the model and its data -----------------------------------------------------------------------


class Heads(hk.Module):
    """A weight `[inputs, heads, outputs]` in an einsum, as in attention."""

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = [x.shape[-1], HEADS, x.shape[-1] // HEADS]
        init = hk.initializers.TruncatedNormal(x.shape[-1] ** -0.5)
        return jnp.einsum("btc,chd->bthd", x, hk.get_parameter("w", shape, x.dtype, init))


def classify(images: jax.Array) -> jax.Array:
    """Maps images `[batch, size, size, 1]` to logits `[batch, CLASSES]`."""
    dim = _DIM.value
    config = mixture.MixtureConfig(
        vocab_size=1, dim=dim, num_layers=1, num_heads=HEADS, num_kv_heads=HEADS,
        hidden_dim=2 * dim, num_experts=_EXPERTS.value,
    )  # fmt: skip
    x = jax.nn.relu(hk.Conv2D(dim, 8, stride=8, name="patches")(images))
    x = x.reshape(len(x), -1, dim)
    x = x + jax.nn.relu(Heads()(x)).reshape(x.shape)
    x = x + mixture.Mixture(config)(x)
    return hk.Linear(CLASSES, name="head")(x.mean(1))


def batches(seed: int, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields images of stripes with noise, and the stripes' directions."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: _SIZE.value, : _SIZE.value]
    for _ in range(number):
        labels = rng.integers(CLASSES, size=_BATCH.value)
        angle, phase, width = (
            values[:, None, None]
            for values in (
                np.pi * labels / CLASSES,
                rng.uniform(0, 6, _BATCH.value),
                rng.uniform(1, 2, _BATCH.value),
            )
        )
        images = np.sin((np.cos(angle) * x + np.sin(angle) * y) / width + phase)
        images += 0.5 * rng.standard_normal(images.shape)
        yield images[..., None].astype(np.float32), labels


# --- rules by operation -----------------------------------------------------------------------------


def rules(static: bool) -> list[QtRule]:
    """Returns the rules; the first that matches a module and its operation decides.

    A quantized weight of three axes could be for any operation, so the modules with experts are named.
    """
    rule = functools.partial(
        QtRule, weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", act_static_scale=static,
        act_calibration_method=f"absmax,{_MARGIN.value}" if static else "absmax",
    )  # fmt: skip
    return [
        QtRule(module_path=".*/router"),  # no weight_qtype: its products are not quantized
        rule(op_names="ragged_dot", module_path="mixture/.*"),
        rule(op_names="conv_general_dilated", module_path="(?!mixture).*"),
        rule(
            op_names=("einsum", "dot_general"), module_path="(?!mixture).*", act_batch_axes=(0, 1)
        ),
    ]


def show_rules(products: Sequence[Product], modules: Sequence[str]) -> None:
    """Prints the products of each module, and checks for integer products if its rule says so."""
    rows = []
    for module in modules:
        own = [p for p in products if p.is_in(module)]
        forward, backward = ([p for p in own if p.is_backward is is_it] for is_it in (False, True))
        assert len(forward) == 1 and backward, module
        rule = matching_rule(rules(static=True), module, forward[0].operation)
        assert rule is not None
        for p in own:
            assert p.is_of_integers == (rule.weight_qtype is not None), p
            assert rule.is_for(p.operation) and p.operation == forward[0].operation, p
        dtypes = {" x ".join(x.split("[")[0] for x in p.operands) for p in backward}
        rows.append(
            [module, forward[0].operation, rules(static=True).index(rule),
             " x ".join(forward[0].operands), f"{len(backward)} of {', '.join(dtypes)}"]
        )  # fmt: skip
    table(["module", "operation", "rule", "its product", "of the gradient"], rows)
    assert sum(len([p for p in products if p.is_in(m)]) for m in modules) == len(products)


# --- training and serving ---------------------------------------------------------------------------


def train(model: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """Trains, and collects statistics at each step; returns the parameters, and the state with them."""
    optimizer = optax.adam(_RATE.value)
    trainable, frozen = hki.partition(params)

    @jax.jit
    def step(trainable: Any, state: Any, optimizer_state: Any, batch: Any) -> Any:
        def loss(trainable: Any) -> Any:
            logits, new = model.apply(hki.combine(trainable, frozen), state, batch[0])
            found = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return found.mean(), new

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        return optax.apply_updates(trainable, updates), state, optimizer_state, value

    optimizer_state = optimizer.init(trainable)
    bar = tqdm(batches(1, _STEPS.value), "training", total=_STEPS.value, leave=False)
    for batch in bar:
        trainable, state, optimizer_state, value = step(trainable, state, optimizer_state, batch)
        bar.set_postfix(loss=f"{value:.3f}", refresh=False)
    return hki.combine(trainable, frozen), state


class Way(NamedTuple):
    """A way to run the trained model.

    Attributes:
        name: Its name.
        apply: Maps `params`, `state` and images to logits.
        params: The weights.
        state: The statistics, if it takes any.
    """

    name: str
    apply: Callable[[Any, Any, jax.Array], jax.Array]
    params: Any
    state: Any = ()


def ways(t: Any, params: Any, state: Any, axes: Any) -> list[Way]:
    """Returns the trained model with static and dynamic scales, each also served; and in float32."""
    reading, dense = hki.with_quant_stats(t, update=False), hki.materialize(params)
    dynamic = hki.quantized_training(dense, rules(static=False), matrix_axes=axes)

    def trained(params: Any, state: Any, images: jax.Array) -> jax.Array:
        return reading.apply(params, state, images)[0]

    def stateless(params: Any, state: Any, images: jax.Array) -> jax.Array:
        return t.apply(params, images)

    return [
        Way("static, as trained", trained, params, state),
        Way("static, served", stateless, hki.convert_trained(params, state)),
        Way("dynamic, as trained", stateless, dynamic),
        Way("dynamic, served", stateless, hki.convert_trained(dynamic)),
        Way("float32", stateless, dense),
    ]


def compare(ways: Sequence[Way]) -> None:
    """Prints bytes, products, accuracy and errors of logits, and checks the promises."""
    tested = list(batches(2, TESTED))
    labels = np.stack([own for _, own in tested])
    logits, rows = {}, []
    for way in tqdm(ways, "serving", leave=False):
        apply = jax.jit(way.apply)
        logits[way.name] = np.stack([apply(way.params, way.state, x) for x, _ in tested])
        products = products_in(way.apply, way.params, way.state, tested[0][0])
        integers = sum(p.is_of_integers for p in products)
        kernels = sum(p.operation == "quantized_matmul" for p in products)
        rows.append([way.name, nbytes(way.params), nbytes(way.state), integers, kernels])
    largest = np.abs(logits["float32"]).max()
    accuracy = [(x.argmax(-1) == labels).mean() for x in logits.values()]
    errors = [np.abs(x - logits["float32"]).max() / largest for x in logits.values()]
    names = ["scales", "bytes", "of state", "int8 x int8", "kernels", "accuracy", "error"]
    measured = zip(rows, accuracy, errors, strict=True)
    table(names, [[r[0], f"{r[1]:,}", *r[2:], f"{a:.3f}", f"{e:.4f}"] for r, a, e in measured])
    print("(error: the largest of the logits, relative to the largest logit of float32)")
    as_trained, served = logits["static, as trained"], logits["static, served"]
    print("static scales, trained and served: equal bits:", np.array_equal(as_trained, served))
    np.testing.assert_array_equal(served, as_trained)
    # With dynamic scales the library's kernel multiplies the codes, with another order of sums.
    difference = np.abs(logits["dynamic, served"] - logits["dynamic, as trained"]).max()
    assert difference < 1e-2 * largest and max(errors[2:4]) < 0.1, (difference, errors)
    assert rows[1][1] < 0.5 * rows[0][1] and rows[1][2] == 0 < rows[0][2]
    assert min(accuracy) > _GOAL.value, "the accuracy is not above --goal"


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    model = hk.without_apply_rng(hk.transform(classify))
    t = hki.transform_implicit(model)
    ((images, _),) = batches(0, 1)
    dense = jax.jit(model.init)(jax.random.key(0), images)
    axes = hki.infer_matrix_axes(t.apply, dense, images)
    params = hki.quantized_training(dense, rules(static=True), matrix_axes=axes)
    state = hki.init_quant_stats(t, params, {}, images)
    reading = hki.with_quant_stats(t, update=False)

    def loss(trainable: Any, frozen: Any) -> jax.Array:
        return reading.apply(hki.combine(trainable, frozen), state, images)[0].sum()

    with hki.materialization("error"):  # a weight that became dense would stop the program
        heading("Rules by operation")
        modules = [module for module, own in dense.items() if "w" in own]
        show_rules(products_in(jax.grad(loss), *hki.partition(params)), modules)
        heading("Static scales, and serving with integers")
        params, state = train(hki.with_quant_stats(t, decay=0.95), params, state)
        compare(ways(t, params, state, axes))


if __name__ == "__main__":
    app.run(main)
