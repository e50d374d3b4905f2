"""`jax.custom_jvp` and `jax.custom_vjp` of implicit arrays under `vmap`, in all orders with other calls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haiku_implicit as hki
from tests.tiers import few

use = hki.use_implicit_args


def with_jvp():
    """A product with a wrong derivative, so that its rule has to be used."""
    f = jax.custom_jvp(lambda x, w: x @ w)
    f.defjvp(lambda p, t: (p[0] @ p[1], 2 * (t[0] @ p[1]) + 0.5 * (p[0] @ t[1])))
    return f


def with_vjp():
    f = jax.custom_vjp(lambda x, w: x @ w)
    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda s, g: (2 * g @ s[1].T, 0.5 * s[0].T @ g))
    return f


def in_scan(f, w, x):
    return lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0]


def in_cond(f, w, x):
    return lax.cond(x[0, 0] > 2, lambda x: x, lambda x: f(x, w), x)


CALLS = {
    "plain": lambda f, w, x: f(x, w),
    "jit": lambda f, w, x: jax.jit(f)(x, w),
    "cond": in_cond,
    "scan": in_scan,
    "remat": lambda f, w, x: jax.checkpoint(f)(x, w),
    "vmap": lambda f, w, x: jax.vmap(lambda row: f(row[None], w)[0])(x),
    "cond in scan": lambda f, w, x: in_scan(lambda c, w: in_cond(f, w, c), w, x),
}


def stacked(f, w, x):
    """The results for two weights and one input."""
    return hki.materialize(jax.vmap(f, (0, None))(w, x))


# How the value y is differentiated by the input.
TRANSFORMED = {
    "value and gradient": lambda f: (
        lambda w, x: jax.value_and_grad(
            lambda x: (lambda y: (jnp.sum(y**2), y))(stacked(f, w, x)), has_aux=True
        )(x)
    ),
    "mapped gradient": lambda f: jax.vmap(
        jax.grad(lambda w, x: hki.materialize(f(w, x)).sum(), 1), (0, None)
    ),
    "mapped inputs": lambda f: (
        lambda w, x: jax.grad(lambda x: hki.materialize(jax.vmap(f)(w, x)).sum())(
            jnp.stack([x, 2 * x])
        )
    ),
    "gradient of gradient": lambda f: (
        lambda w, x: jax.grad(
            lambda x: jnp.sum(jnp.tanh(jax.grad(lambda x: jnp.sum(stacked(f, w, x) ** 2))(x) / 50))
        )(x)
    ),
    "remat": lambda f: (
        lambda w, x: jax.grad(lambda x: jax.checkpoint(lambda x: stacked(f, w, x))(x).sum())(x)
    ),
}


def agrees(function, call, transformed, within, x):
    w = hki.QuantizedMatrix.quantize(jax.random.normal(jax.random.key(0), (6, 6)) / 3, "int8")
    w = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), w)

    def fun(w, x):
        return CALLS[call](function, w, x)

    transform = TRANSFORMED[transformed]
    got = (use(transform(fun)) if within else transform(use(fun)))(w, x)
    want = transform(lambda w, x: fun(hki.materialize(w), x))(w, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # float32; a few sums in another order.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


CASES = list(itertools.product(CALLS, TRANSFORMED, ["within", "outside"]))
QUICK = [
    ("plain", "value and gradient", "outside"),
    ("jit", "value and gradient", "outside"),
    ("cond", "remat", "outside"),
    ("scan", "mapped gradient", "within"),
]


@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
@pytest.mark.parametrize("call, transformed, order", few(CASES, *QUICK))
def test_gradients_of_mapped_calls(rule, call, transformed, order, may_be_dense):
    # As many rows as columns: a result with its mapped axis in another place has the same shape.
    x = jax.random.normal(jax.random.key(5), (6, 6))
    agrees(rule(), call, transformed, order == "within", x)


@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
def test_one_function_in_several_ways(rule, may_be_dense):
    # JAX keeps the traced rule of a function, and may find that of another way of using it.
    function, x = rule(), jnp.ones((2, 6))
    for transformed in TRANSFORMED:
        agrees(function, "jit", transformed, False, x)


@pytest.mark.parametrize("rule", [with_jvp, with_vjp])
def test_a_result_that_does_not_depend_on_what_is_mapped(rule, may_be_dense):
    # That of zeros and mapped inputs: its derivative depends on them.
    function = rule()
    w = hki.Zeros(shape=(6, 6), dtype=jnp.float32)
    x = jnp.stack([jnp.ones((2, 6)), 2 * jnp.ones((2, 6))])

    def fun(w, x):
        return jax.jit(function)(x, w)

    def transformed(f):
        return jax.value_and_grad(lambda x: jnp.sum((hki.materialize(jax.vmap(f)(x)) - 1) ** 2))

    got = transformed(lambda x: use(fun)(w, x))(x)
    want = transformed(lambda x: fun(jnp.zeros((6, 6)), x))(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
