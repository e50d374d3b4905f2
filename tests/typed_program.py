"""A program as a user writes it, in which type checkers find no error; `test_types.py` gives it to mypy.

`reveal_type` asks them what they know of a result. For what has no type in Python (the content of any
file) or none in JAX (the result of a jitted function) the program has an annotation, and Haiku's `init`
and `apply` return anything.
"""

import pathlib
import tempfile
from typing import TYPE_CHECKING, assert_type

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


def with_aux(params: hk.Params, x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return loss(params, x), {"rows": len(x)}


@hki.auto_jit
def scaled(x: jax.Array, factor: float) -> jax.Array:
    return x * factor


@hki.auto_jit(cache_size=2)
def named(x: jax.Array, name: str) -> dict[str, jax.Array]:
    return {name: x}


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

    parts = hki.get_adapter(with_lora)
    reveal_type(parts.weights)
    reveal_type(hki.set_adapter(quantized, parts))
    bank = hki.AdapterBank.of(quantized, capacity=2, rank=4)
    reveal_type(bank.put(0, parts))
    reveal_type(hki.with_bank(loss)(bank, jnp.zeros(8, int), x))
    reveal_type(hki.prepare(model, params, None, x))
    reveal_type(hki.input_moments(lambda p, x: model.apply(p, None, x), params, [x]))

    # Statistics of activations in Haiku's state.
    assert_type(hki.with_quant_stats(model), hk.TransformedWithState)
    forwards = hk.multi_transform(lambda: (network, network))
    assert_type(hki.with_quant_stats(forwards), hk.MultiTransformedWithState)
    reveal_type(hki.init_quant_stats(model, params, {}, None, x))

    # Gradients of implicit parameters, and a step.
    gradients: hk.Params
    value, gradients = jax.jit(hki.value_and_grad(loss))(with_lora, x)
    reveal_type(hki.value_and_grad(loss)(with_lora, x))
    reveal_type(hki.value_and_grad(lambda p: loss(p, x))(with_lora))
    reveal_type(hki.value_and_grad(with_aux, has_aux=True)(with_lora, x))
    reveal_type(hki.grad(loss)(with_lora, x))
    reveal_type(hki.grad(lambda p: loss(p, x))(with_lora))
    optimizer = hki.freeze_declared(optax.adam(1e-3))
    updates, _ = optimizer.update(gradients, optimizer.init(with_lora), with_lora)
    stepped = hki.apply_updates(with_lora, updates)
    reveal_type(stepped)
    assert loss(stepped, x) < value

    # Files, merging and reports.
    with tempfile.TemporaryDirectory() as folder:
        hki.save(pathlib.Path(folder) / "params.npz", stepped)
        loaded: hk.Params = hki.load(pathlib.Path(folder) / "params.npz")
        reveal_type(hki.load(pathlib.Path(folder) / "params.npz", like=stepped))
    reveal_type(hki.merge_lora(loaded))
    reveal_type(hki.summary(stepped))
    reveal_type(hki.summary(stepped).total.bits)
    reveal_type(hki.compare_params(params, stepped).rows[0].relative)
    folded, new = hki.fold_parameters(loss, params, x)
    reveal_type(folded(new, x))
    reveal_type(new)

    # A weight by itself.
    weight = hki.QuantizedMatrix.quantize(jnp.ones((16, 8)), "int4", group_size=8)
    reveal_type(weight)
    reveal_type(weight.shape)
    reveal_type(weight.dtype.name)
    reveal_type(weight.codes)
    if TYPE_CHECKING:  # It raises an error outside of wrapped functions.
        reveal_type(weight[0])
    lora = hki.LoRA(weight, jnp.ones((16, 2)), jnp.ones((2, 8)))
    reveal_type(lora.a)
    reveal_type(hki.grad(lambda w: (x @ w).sum())(lora))
    reveal_type(scaled(x, 2.0))
    reveal_type(named(x, "x"))
    reveal_type(hki.use_implicit_args(jnp.matmul)(x, weight))
    reveal_type(hki.materialize(weight))
    reveal_type(hki.materialize(with_lora))

    # The model as a tree of its modules.
    tree = mox.make_mox(model)(x)
    reveal_type(tree)
    reveal_type(tree.select(hk.Linear)[0].path)
    reveal_type(tree["**/linear_*"])
    reveal_type(tree.insert_after(hk.Linear, lambda y: y))
    reveal_type(mox.map_mox(lambda node: node.name, tree))
    reveal_type(mox.diff(tree, tree))
    assert len(tree.select(hk.Linear)) == 3
