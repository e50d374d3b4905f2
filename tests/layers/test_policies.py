"""Checkpoint policies, and products in few bits by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit import layers
from tests import random_arrays

WIDTH, ROWS = 64, 8
OF_JAX = [
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
    "save_anything_except_these_names",
    "save_any_names_but_these",
    "save_only_these_names",
    "save_from_both_policies",
]
OURS = "no_dequantized_saveable"


@pytest.mark.parametrize("name", OF_JAX)
def test_names_of_the_document(name):
    assert layers.get_gradient_checkpoint_policy(name) is getattr(jax.checkpoint_policies, name)


def test_an_unknown_name():
    with pytest.raises(ValueError, match="name: expected one of .*dots_saveable.*, got 'dots'"):
        layers.get_gradient_checkpoint_policy("dots")


def normal(*shape, seed=0):
    return random_arrays.normal(shape, seed) / shape[0] ** 0.5


def quantized(fmt="int8"):
    return hki.QuantizedMatrix.quantize(normal(WIDTH, WIDTH), fmt)


def lora(base):
    return hki.LoRA(base, normal(WIDTH, 4, seed=1), normal(4, WIDTH, seed=2))


WEIGHTS = {
    "int8": quantized,
    "int4": lambda: quantized("int4"),
    "nf4, groups": lambda: hki.QuantizedMatrix.quantize(normal(WIDTH, WIDTH), "nf4", 16),
    "double": lambda: hki.QuantizedMatrix.quantize(
        normal(WIDTH, WIDTH), "int4", 16, scale_dtype="double"
    ),
    "lora of int8": lambda: lora(quantized()),
    "lora of dense": lambda: lora(normal(WIDTH, WIDTH)),
    "cache": lambda: hki.QuantizedCache.quantize(normal(WIDTH, WIDTH), "int8", axis=-1),
}
# What a model does with a weight: products, with or without a rule, and what makes it dense.
MODELS = {
    "product": lambda x, w: jnp.sin(jnp.sin(x @ w) @ w),
    "made dense": lambda x, w: jnp.sin(jnp.sin(x @ jnp.tanh(w)) @ w),
    "both": lambda x, w: jnp.sin(x @ (w @ w)),
    "convolution": lambda x, w: jnp.sin(
        jax.lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME")[0, 0] @ w
    ),
    "in a loop": lambda x, w: jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=3)[0],
    "as it is": lambda x, w: x @ (w + 1.0),
}


def residuals(fun, x, w, policy):
    """Shapes of floating arrays of the size of the weight that are kept, beyond those of `w`."""
    run = jax.checkpoint(hki.use_implicit_args(fun), policy=policy)
    _, pullback = jax.vjp(run, x, w)
    own = [y.shape for y in jax.tree.leaves(w) if jnp.issubdtype(y.dtype, jnp.floating)]
    kept = [
        y.shape for y in jax.tree.leaves(pullback)
        if jnp.issubdtype(y.dtype, jnp.floating) and y.size >= WIDTH * WIDTH
    ]  # fmt: skip
    return [shape for shape in kept if shape not in own]


@pytest.mark.every(2)
@pytest.mark.combinations
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_no_dequantized_weight_is_kept(weight, model, may_be_dense):
    x, w, fun = normal(ROWS, WIDTH, seed=3), WEIGHTS[weight](), MODELS[model]
    policy = layers.get_gradient_checkpoint_policy(OURS)
    if model != "both":  # whose weight is the result of a product
        assert not residuals(fun, x, w, policy)
    loss = lambda fun: lambda x, w: jnp.sum(fun(x, w) ** 2)  # noqa: E731
    run = jax.checkpoint(hki.use_implicit_args(loss(fun)), policy=policy)
    got = jax.grad(run)(x, w)
    want = jax.grad(loss(fun))(x, hki.materialize(w))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_other_policies_may_keep_one(may_be_dense):
    """The count would see it."""
    x, everything = normal(ROWS, WIDTH), jax.checkpoint_policies.everything_saveable
    assert residuals(MODELS["made dense"], x, quantized(), everything)
    dots = jax.checkpoint_policies.dots_saveable
    assert residuals(MODELS["made dense"], x, lora(quantized()), dots)


def products(fun, policy):
    """How many products with codes the gradient computes."""
    x, w = normal(ROWS, WIDTH), quantized()
    run = jax.checkpoint(hki.use_implicit_args(fun), policy=policy)
    return count(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(run(x, w))))(x).jaxpr)


def count(jaxpr):
    has_equations = lambda x: hasattr(x, "eqns")  # noqa: E731
    params = [list(eqn.params.values()) for eqn in jaxpr.eqns]
    inner = filter(has_equations, jax.tree.leaves(params, is_leaf=has_equations))
    return sum(e.primitive.name == "quantized_matmul" for e in jaxpr.eqns) + sum(map(count, inner))


def test_products_with_codes_are_kept():
    """A policy that keeps nothing computes them again; the policy of this library does not."""
    fun = MODELS["product"]
    ours, nothing = (
        products(fun, layers.get_gradient_checkpoint_policy(name))
        for name in (OURS, "nothing_saveable")
    )
    assert ours == 4 and nothing > ours


def test_the_policy_in_a_model():
    """As a layer in a model has it, where `jax.checkpoint` is inside."""
    policy = layers.get_gradient_checkpoint_policy(OURS)
    w, x = lora(quantized()), normal(ROWS, WIDTH)
    layer = jax.checkpoint(MODELS["product"], policy=policy)
    got = jax.grad(hki.use_implicit_args(lambda x, w: jnp.sum(layer(x, w))))(x, w)
    want = jax.grad(lambda x: jnp.sum(MODELS["product"](x, hki.materialize(w))))(x)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_dot_general_by_bits():
    x, w, numbers = normal(ROWS, WIDTH), normal(WIDTH, WIDTH), (((1,), (0,)), ((), ()))
    assert layers.get_dot_general_by_bits() == {} == layers.get_dot_general_by_bits(None, "serve")
    made = {
        mode: layers.get_dot_general_by_bits(8, mode)["dot_general_cls"]()
        for mode in ("train", "serve", "convert")
    }
    trained = made["train"](x, w, numbers)
    np.testing.assert_array_equal(trained, hki.dot_general_by_bits(8, 8)(x, w, numbers))
    np.testing.assert_array_equal(made["serve"](x, made["convert"](w), numbers), trained)
    np.testing.assert_allclose(trained, x @ w, atol=0.05)


def test_dot_general_by_bits_errors():
    with pytest.raises(ValueError, match="fwd_bits: expected .*, got 9"):
        layers.get_dot_general_by_bits(9)
    with pytest.raises(ValueError, match="mode: expected .*, got 'eval'"):
        layers.get_dot_general_by_bits(8, "eval")
