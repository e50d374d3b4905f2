"""A program as a user writes it, in which type checkers find no error; `test_types.py` gives it to mypy.

`reveal_type` asks them what they know of a result. For what has no type in Python (a gradient of any tree,
the content of any file) the program has an annotation, and Haiku's `init` and `apply` return anything.
"""

import pathlib
import tempfile
from typing import TYPE_CHECKING

import haiku as hk
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

import haiku_implicit as hki
from haiku_implicit import mox

if not TYPE_CHECKING:
    reveal_type = lambda value: None  # noqa: E731


def network(x: jax.Array) -> jax.Array:
    return hk.nets.MLP([64, 32, 4], name="mlp")(x)


model = hki.transform_implicit(hk.transform(network))


def loss(params: hk.Params, x: jax.Array) -> jax.Array:
    return jnp.square(model.apply(params, None, x)).mean()


def main() -> None:
    x = jnp.ones((8, 16))
    params: hk.MutableParams = model.init(jax.random.key(0), x)

    # LoRA on quantized weights, and the trained arrays alone.
    quantized = hki.quantize_params(params, dtype="int8", exclude=".*linear_2.*")
    with_lora = hki.add_lora(quantized, jax.random.key(1), rank=4)
    reveal_type(with_lora)
    frozen, factors = hki.freeze(model, with_lora)
    reveal_type(factors)
    reveal_type(frozen.params(factors))
    trained, rest = hki.partition(with_lora, hki.BIASES)
    reveal_type(trained)
    reveal_type(hki.combine(trained, rest))

    # Gradients of implicit parameters, and a step.
    gradients: hk.Params
    value, gradients = jax.jit(hki.value_and_grad(loss))(with_lora, x)
    reveal_type(hki.value_and_grad(loss)(with_lora, x)[0])
    reveal_type(hki.value_and_grad(lambda p: loss(p, x))(with_lora)[0])
    optimizer = hki.freeze_declared(optax.adam(1e-3))
    updates, _ = optimizer.update(gradients, optimizer.init(with_lora), with_lora)
    stepped = hki.apply_updates(with_lora, updates)
    reveal_type(stepped)
    assert loss(stepped, x) < value

    # Files, merging and reports.
    with tempfile.TemporaryDirectory() as folder:
        hki.save(pathlib.Path(folder) / "params.npz", stepped)
        loaded: hk.Params = hki.load(pathlib.Path(folder) / "params.npz")
    reveal_type(hki.merge_lora(loaded))
    reveal_type(hki.summary(stepped))

    # A weight by itself.
    weight = hki.QuantizedMatrix.quantize(jnp.ones((16, 8)), "int4", group_size=8)
    reveal_type(weight)
    reveal_type(weight.shape)
    reveal_type(hki.use_implicit_args(jnp.matmul)(x, weight))
    reveal_type(hki.materialize(weight))
    reveal_type(hki.materialize(with_lora))

    # The model as a tree of its modules.
    tree = mox.make_mox(model)(x)
    reveal_type(tree)
    reveal_type(tree.select(hk.Linear))
    assert len(tree.select(hk.Linear)) == 3
