"""The count of products by what they multiply, which the examples of quantized training rely on."""

import doctest

import haiku as hk
import jax
import jax.numpy as jnp

import haiku_implicit as hki
import product_dtypes
from haiku_implicit.quantization import QtRule
from product_dtypes import count_products


def test_the_docstring():
    assert doctest.testmod(product_dtypes).failed == 0


def test_products_in_the_bodies_of_equations_count():
    x = jnp.ones((2, 2))

    def fun(x):
        looped, _ = jax.lax.scan(lambda c, _: (jnp.dot(c, x), None), x, length=3)
        branch = jax.lax.cond(x.sum() > 0, lambda: x @ x, lambda: x + 1)
        custom = jax.custom_vjp(jnp.dot)
        custom.defvjp(lambda a, b: (a @ b, None), lambda _, g: (g, g))
        return looped + branch + custom(x, x)

    assert count_products(fun, x) == {"float32 * float32": 3}
    of_ragged = count_products(jax.lax.ragged_dot, x, x[None], jnp.array([2]))
    assert of_ragged == {"float32 * float32": 1}


def test_each_pass_of_a_quantized_model():
    model = hki.transform_implicit(hk.transform(lambda x: hk.Linear(2)(hk.Conv1D(3, 2)(x)).sum()))
    params, x = model.init(jax.random.key(0), jnp.ones((1, 4, 3))), jnp.ones((1, 4, 3))
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    own = [QtRule(module_path="linear"), rule]

    def forward(p):
        return model.apply(p, None, x)

    quantized = hki.quantized_training(params, own)
    assert count_products(forward, params) == {"float32 * float32": 2}
    assert count_products(forward, quantized) == {"float32 * float32": 1, "int8 * int8": 1}
    both = count_products(jax.grad(forward), quantized)
    assert both == {"float32 * float32": 3, "int8 * int8": 3}
