"""Uses a PyTorch loss in JAX, forward and backward, by `pure_callback` and `custom_vjp`.

An unmodified Haiku model with LoRA on 4-bit weights is trained with torch's cross entropy. JAX gets
the gradient with respect to the logits from torch (`torch.func.vjp`), and does the rest. Values,
gradients and trained losses are compared with optax's cross entropy.

PyTorch is not among this project's dependencies. Install it in a separate environment:

    python3 -m venv .venv-torch && .venv-torch/bin/pip install -e '.[examples]'
    .venv-torch/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    .venv-torch/bin/python examples/torch_loss.py

Without it, `--library=numpy` uses a cross entropy in NumPy.
"""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import app, flags

import haiku_implicit as hki
from printing import heading, table

_LIBRARY = flags.DEFINE_enum("library", "torch", ["torch", "numpy"], "What computes the loss.")
_STEPS = flags.DEFINE_integer("steps", 200, "Steps of training.", 1)
_BATCH = flags.DEFINE_integer("batch", 64, "Number of examples.", 2)

FEATURES, CLASSES = 64, 10

Losses = Callable[[np.ndarray, np.ndarray], np.ndarray]
Vjp = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    of_library = {"torch": of_torch, "numpy": of_numpy}[_LIBRARY.value]
    cross_entropy = in_jax(*of_library())
    compare(cross_entropy)
    train(cross_entropy)


# --- the loss and its derivative, in another library ------------------------------------------------


def of_torch() -> tuple[Losses, Vjp]:
    """Returns torch's cross entropy of each example, and its vector-Jacobian product."""
    try:
        import torch
    except ImportError:
        raise SystemExit(f"torch is not installed\n\n{__doc__}") from None

    def losses(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    def forward(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return losses(*tensors(logits, labels)).numpy()

    def backward(logits: np.ndarray, labels: np.ndarray, cotangents: np.ndarray) -> np.ndarray:
        logits, labels, cotangents = tensors(logits, labels, cotangents)
        _, vjp = torch.func.vjp(lambda logits: losses(logits, labels), logits)
        return vjp(cotangents)[0].numpy()

    def tensors(*arrays: Any) -> Any:
        # Copies, because JAX's arrays are not writable; torch needs 64-bit labels.
        return [
            torch.tensor(x, dtype=torch.int64 if x.dtype.kind == "i" else None)
            for x in map(np.asarray, arrays)
        ]

    print(f"torch {torch.__version__}, which JAX {jax.__version__} calls")
    return forward, backward


def of_numpy() -> tuple[Losses, Vjp]:
    """Returns NumPy's cross entropy of each example, and its vector-Jacobian product."""

    def log_softmax(logits: np.ndarray) -> np.ndarray:
        logits = np.asarray(logits)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    def forward(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return -np.take_along_axis(log_softmax(logits), np.asarray(labels)[:, None], -1)[:, 0]

    def backward(logits: np.ndarray, labels: np.ndarray, cotangents: np.ndarray) -> np.ndarray:
        one_hot = np.eye(logits.shape[-1], dtype=logits.dtype)[np.asarray(labels)]
        return (np.exp(log_softmax(logits)) - one_hot) * np.asarray(cotangents)[:, None]

    return forward, backward


# --- the same in JAX --------------------------------------------------------------------------------


def in_jax(forward: Losses, backward: Vjp) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Makes a JAX function with a gradient from two functions of NumPy arrays.

    Args:
      forward: maps logits `[n, classes]` and integer labels `[n]` to losses `[n]`.
      backward: maps these and the losses' cotangents `[n]` to the logits' cotangents.

    Returns:
      A function from logits `[..., classes]` and labels `[...]` to losses `[...]`.
    """

    def call(fun: Any, like: jax.Array, logits: jax.Array, *others: jax.Array) -> jax.Array:
        """Flattens all batch axes, including those from `vmap`, into the one that `fun` has."""

        def flat(logits: Any, *others: Any) -> np.ndarray:
            lead, classes = logits.shape[:-1], logits.shape[-1]
            logits = np.reshape(logits, (-1, classes))
            out = fun(logits, *(np.broadcast_to(x, lead).reshape(-1) for x in others))
            return np.reshape(out, (*lead, *out.shape[1:])).astype(like.dtype)

        struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
        return jax.pure_callback(flat, struct, logits, *others, vmap_method="broadcast_all")

    @jax.custom_vjp
    def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return call(forward, logits[..., 0], logits, labels)

    def forward_rule(logits: jax.Array, labels: jax.Array) -> Any:
        return cross_entropy(logits, labels), (logits, labels)

    def backward_rule(residuals: Any, cotangents: jax.Array) -> Any:
        # Integer labels do not have a gradient: None.
        return call(backward, residuals[0], *residuals, cotangents), None

    cross_entropy.defvjp(forward_rule, backward_rule)
    return cross_entropy


# --- the model --------------------------------------------------------------------------------------


def model_and_data() -> Any:
    """Returns an unmodified MLP, its parameters with LoRA on 4-bit weights, inputs and labels."""
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, CLASSES])(x)))
    x = jax.random.normal(jax.random.key(0), (_BATCH.value, FEATURES))
    labels = jax.random.randint(jax.random.key(1), (_BATCH.value,), 0, CLASSES)
    params = hki.quantize_params(model.init(jax.random.key(2), x), dtype="int4", group_size=32)
    params = hki.add_lora(params, jax.random.key(3), rank=4)
    return hki.transform_implicit(model).apply, params, x, labels


def compare(cross_entropy: Callable[..., jax.Array]) -> None:
    """Compares losses and gradients with optax's, under transformations."""
    apply, params, x, labels = model_and_data()
    reference = optax.softmax_cross_entropy_with_integer_labels
    direct = hki.use_implicit_args(lambda w, x: cross_entropy(x @ w, labels).mean())
    direct_reference = hki.use_implicit_args(lambda w, x: reference(x @ w, labels).mean())
    weight = hki.add_lora({"a": {"w": jnp.zeros((FEATURES, CLASSES))}}, jax.random.key(0), rank=2)[
        "a"
    ]["w"]

    def of_params(losses: Any) -> Any:
        return hki.value_and_grad(lambda params: losses(apply(params, x), labels).mean())

    def each(losses: Any) -> Any:
        one = hki.value_and_grad(
            lambda params, x, label: losses(apply(params, x[None]), label[None])[0]
        )
        return lambda params: jax.vmap(one, (None, 0, 0))(params, x, labels)

    ways = {
        "value and gradient": [(of_params(f), params) for f in (cross_entropy, reference)],
        "under jit": [(jax.jit(of_params(f)), params) for f in (cross_entropy, reference)],
        "of each example, by vmap": [
            (jax.jit(each(f)), params) for f in (cross_entropy, reference)
        ],
        "within a wrapped function": [
            (jax.jit(hki.value_and_grad(lambda w, f=f: f(w, x))), weight)
            for f in (direct, direct_reference)
        ],
    }
    heading(f"{_LIBRARY.value}'s cross entropy in JAX, beside optax's")
    rows = []
    for name, ((ours, args), (theirs, _)) in ways.items():
        (value, grads), (want, wanted) = ours(args), theirs(args)
        pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True))
        errors = abs(value - want).max(), max(abs(a - b).max() for a, b in pairs)
        rows.append([name, f"{jnp.mean(value):.6f}", *(f"{error:.0e}" for error in errors)])
        assert max(errors) < 1e-5 and jax.tree.structure(grads) == jax.tree.structure(wanted)
    table(["", "loss", "difference", "of the gradients"], rows)


def train(cross_entropy: Callable[..., jax.Array]) -> None:
    """Trains LoRA with one loss and with the other."""
    apply, params, x, labels = model_and_data()
    optimizer = hki.freeze_declared(optax.adam(1e-2))
    ends = []
    for losses in (cross_entropy, optax.softmax_cross_entropy_with_integer_labels):

        @jax.jit
        def step(params: Any, state: Any, losses: Any = losses) -> Any:
            loss_of = hki.value_and_grad(lambda params: losses(apply(params, x), labels).mean())
            value, grads = loss_of(params)
            updates, state = optimizer.update(grads, state, params)
            return hki.apply_updates(params, updates), state, value

        trained, state = params, optimizer.init(params)
        bar = tqdm.trange(_STEPS.value, desc="training", leave=False)
        for _ in bar:
            trained, state, value = step(trained, state)
            bar.set_postfix(loss=f"{value:.4f}", refresh=False)
        ends.append(value)
        first = losses(apply(params, x), labels).mean()
    heading(f"LoRA on 4-bit weights, {_STEPS.value} steps")
    names = f"with {_LIBRARY.value}'s loss", "with optax's"
    table(
        ["", "loss before", "after"],
        [[n, f"{first:.4f}", f"{end:.6f}"] for n, end in zip(names, ends, strict=True)],
    )
    assert ends[0] < first
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-2, atol=1e-5)


if __name__ == "__main__":
    app.run(main)
