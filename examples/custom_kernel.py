"""Puts your own kernel into a model that was written without it: a type brings it to every weight.

The weights of a GPT-2 become 8-bit codes with a scale for each column. Their products become a Pallas
kernel that reads the codes and scales the sums. On a CPU it runs in Pallas' interpreter, which is slow:
the example only shows that it is called, and that its numbers are right.

    python examples/custom_kernel.py
    python examples/custom_kernel.py --folder=path/to/a/gpt2
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import pallas as pl
from tqdm import tqdm

import haiku_implicit as hki
import hub
from dense_twin import difference
from errors import main_of
from models import gpt2
from printing import heading, table

_REPO = flags.DEFINE_string("repo", None, "A GPT-2 of the Hugging Face hub, by name.")
_FOLDER = flags.DEFINE_string("folder", None, "A folder in the hub's layout that holds a GPT-2.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the GPT-2 with random weights.", 1)
_WIDTH = flags.DEFINE_integer("width", 128, "Its width, a multiple of 4.", 4)
_TOKENS = flags.DEFINE_integer("tokens", 10, "How many tokens it reads.", 2)


# --- the kernel -------------------------------------------------------------------------------------

BLOCK = 64  # rows and columns of the result that one program computes


def scaled_product(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes `(x @ codes) * scale` from the codes, without making a dense weight.

    Args:
        x: `[rows, n]`.
        codes: `[n, m]` int8.
        scale: The scale of each column, `[m]`.

    Returns:
        `[rows, m]`, in the dtype of `x`.
    """
    (rows, n), m = x.shape, codes.shape[1]

    def kernel(x: Any, codes: Any, scale: Any, y: Any) -> None:
        y[...] = jnp.dot(x[...], codes[...].astype(x.dtype)) * scale[...]

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, BLOCK), pl.cdiv(m, BLOCK)),
        in_specs=[
            pl.BlockSpec((BLOCK, n), lambda i, j: (i, 0)),
            pl.BlockSpec((n, BLOCK), lambda i, j: (0, j)),
            pl.BlockSpec((1, BLOCK), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, m), x.dtype),
        interpret=jax.default_backend() == "cpu",
    )(x, codes, scale[None])


@jax.custom_vjp
def differentiable_product(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """The kernel with its derivative in `x`, which Pallas does not provide; the weight is frozen."""
    return scaled_product(x, codes, scale)


def _forward(x: jax.Array, codes: jax.Array, scale: jax.Array) -> Any:
    return scaled_product(x, codes, scale), (codes, scale)


def _backward(weight: Any, cotangent: jax.Array) -> Any:
    codes, scale = weight
    # The same kernel: its columns are now the rows of the weight.
    ones = jnp.ones(len(codes), cotangent.dtype)
    of_codes = np.zeros(codes.shape, jax.dtypes.float0)
    return scaled_product(cotangent * scale, codes.T, ones), of_codes, jnp.zeros_like(scale)


differentiable_product.defvjp(_forward, _backward)


# --- the type that brings it ------------------------------------------------------------------------


@dataclasses.dataclass
class KernelWeight(hki.ImplicitArray):
    """The matrix `codes * scale`, whose products run the kernel.

    Attributes:
        codes: `[n, m]` int8.
        scale: The scale of each column, `[m]`.
    """

    codes: jax.Array = hki.frozen_field()
    scale: jax.Array = hki.frozen_field()

    @classmethod
    def of(cls, w: jax.Array) -> "KernelWeight":
        """Rounds a dense weight to the nearest codes."""
        scale = abs(w).max(0) / 127
        return cls(jnp.round(w / scale).astype(jnp.int8), scale)

    def materialize(self) -> jax.Array:
        return self.codes * self.scale


@hki.primitive_handler("dot_general")
def run_kernel(
    primitive: Any, x: jax.Array, w: KernelWeight, *, dimension_numbers: Any, **params: Any
) -> Any:
    """Computes `x @ w`; any other product uses the dense matrix, and is reported."""
    if w.ndim != 2 or dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    if x.dtype != w.dtype:
        return NotImplemented
    rows = x.reshape(-1, x.shape[-1])
    return differentiable_product(rows, w.codes, w.scale).reshape(*x.shape[:-1], -1)


# --- the model with the kernel --------------------------------------------------------------------


def run() -> None:
    """Runs the model with the kernel, and its dense twin."""
    model, params, config = load()
    tokens = jnp.arange(_TOKENS.value)[None] % config.vocab_size
    with_kernel = {
        module: {name: KernelWeight.of(w) if name == "w" else w for name, w in own.items()}
        for module, own in params.items()
    }
    weights = sum("w" in own for own in params.values())
    trainable, frozen = hki.partition(with_kernel)

    def loss(trainable: Any, apply: Any) -> Any:
        logits = apply(hki.combine(trainable, frozen), tokens)
        return jnp.square(logits).mean(), logits

    step = jax.value_and_grad(loss, has_aux=True)
    kernel = functools.partial(step, apply=hki.transform_implicit(model).apply)
    dense = functools.partial(step, apply=lambda p, x: model.apply(hki.materialize(p), x))
    heading(f"GPT-2, {config.num_layers} layers of width {config.dim}, {weights} weights")
    rows, results = [], []
    with hki.materialization("error"):  # raises for a product that the kernel does not run
        both = ("kernel", kernel, with_kernel), ("dense twin", dense, params)
        for name, fun, held in tqdm(both, "GPT-2", leave=False):
            counts = collections.Counter(primitives_in(jax.make_jaxpr(fun)(trainable).jaxpr))
            results.append(jax.jit(fun)(trainable))
            nbytes = sum(w.nbytes for own in held.values() for n, w in own.items() if n == "w")
            (value, _), _ = results[-1]
            rows.append([name, counts["pallas_call"], counts["dot_general"], nbytes, value])
    names = ["", "calls of the kernel", "other products", "bytes of weights", "loss"]
    table(names, [[*row[:3], f"{row[3]:,}", f"{row[4]:.6f}"] for row in rows])
    check(rows, *results, weights)
    run_what_the_rule_leaves()


def check(rows: list[list[Any]], kernel: Any, dense: Any, weights: int) -> None:
    """Checks for equal numbers, and one kernel call for each weight's product and its derivative."""
    errors = [difference(*pair) for pair in zip(kernel, dense, strict=True)]
    print(f"largest difference: of logits {errors[0]:.0e}, of gradients {errors[1]:.0e}")
    print("(relative to the largest; the gradients are those of embeddings, norms and biases)")
    assert max(errors) < 1e-4, errors
    assert [row[1] for row in rows] == [2 * weights, 0]
    assert rows[1][2] - rows[0][2] == 2 * weights


def run_what_the_rule_leaves() -> None:
    """Shows that a product for which the rule returns `NotImplemented` is right, and is reported."""
    w = KernelWeight.of(jax.random.normal(jax.random.key(0), (8, 4)))
    x = jnp.ones((4, 8))
    with hki.materialization("allow"), hki.materialization_report() as report:
        y = hki.use_implicit_args(lambda w, x: w @ x)(w, x)
    heading("w @ x, which the rule leaves to the dense matrix")
    for event, count in report:
        print(f"{event.type_name} {list(event.shape)} became dense in {event.primitive}: {count}")
    np.testing.assert_allclose(y, hki.materialize(w) @ x, rtol=1e-5)
    assert report.count == 1


def primitives_in(jaxpr: Any) -> Iterator[str]:
    """Yields the names of all primitives of a program, but not inside kernels."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name != "pallas_call":
            for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=has_equations):
                if has_equations(sub):
                    yield from primitives_in(sub)


def has_equations(x: Any) -> bool:
    return hasattr(x, "eqns")


def load() -> tuple[hk.Transformed, Any, gpt2.Gpt2Config]:
    """Returns the model that the flags name, or one with random weights."""
    if _REPO.value or _FOLDER.value:
        folder = _FOLDER.value or hub.fetch(_REPO.value)
        config, model, params = hub.load_as(gpt2.Gpt2Config, folder)
        return model, params, config
    width = _WIDTH.value
    config = gpt2.Gpt2Config(256, width, _LAYERS.value, 4, 4 * width, 64)
    model = hk.without_apply_rng(hk.transform(lambda tokens: gpt2.Gpt2(config)(tokens)))
    return model, model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)), config


if __name__ == "__main__":
    app.run(main_of(run))
