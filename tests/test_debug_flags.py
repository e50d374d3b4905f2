"""JAX's debug flags: every implicit type computes the numbers of its dense twin."""

import contextlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haiku_implicit as hki
from tests.cases import CASES, SHAPE
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")

FLAGS = (
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_enable_checks",
    "jax_check_tracer_leaks",
)


@contextlib.contextmanager
def enabled(flag):
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, before)


def product(w, x):
    return x @ w


def loop(w, xs):
    return lax.scan(lambda c, x: (c + 1, x @ w + c), jnp.zeros((), xs.dtype), xs)


def on_implicit(fun):
    wrapped = hki.use_implicit_args(fun)
    return lambda w, x: hki.materialize(wrapped(w, x))


def gradient(of):
    def loss(w, x):
        y = of(product)(w, x)
        return jnp.sum(y * y).real

    return lambda w, x: jax.grad(loss, 1)(w, x)


# Each way to run a product of `w` and `x` `[2, 3, 4]`, for `of`, which wraps what sees `w`.
WAYS = {
    "eager": lambda of: of(product),
    "jit": lambda of: jax.jit(of(product)),
    "vmap": lambda of: jax.vmap(of(product), (None, 0)),
    "scan": lambda of: of(loop),
    "grad": gradient,
}


def activations(dtype):
    return jnp.asarray(np.random.default_rng(0).integers(1, 8, (2, 3, SHAPE[0])), dtype)


def check(flag, w, dense):
    x = activations(w.dtype)
    for name in WAYS:
        if name == "grad" and not jnp.issubdtype(w.dtype, jnp.floating):
            continue
        with enabled(flag):
            got = WAYS[name](on_implicit)(w, x)
        want = WAYS[name](lambda fun: fun)(jnp.asarray(dense), x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


QUICK = [("jax_disable_jit", "lora of int4"), ("jax_disable_jit", "scaled int8")]


@pytest.mark.parametrize("flag, name", few([(f, n) for f in FLAGS for n in CASES], *QUICK))
@pytest.mark.slow
def test_products(flag, name):
    case = CASES[name]
    w = case()
    check(flag, w, case.dense(w))


@pytest.mark.parametrize("options", few([{}, {"activation": "int8"}], {}))
def test_quantizing_without_jit(options):
    w = jnp.asarray(np.random.default_rng(1).integers(-127, 128, SHAPE), jnp.float32).at[0].set(127)
    with jax.disable_jit():
        q = hki.QuantizedMatrix.quantize(w, "int8", **options)
        np.testing.assert_allclose(hki.materialize(q), w, rtol=1e-6)
        got = hki.use_implicit_args(product)(q, activations(jnp.float32))
    want = hki.use_implicit_args(product)(q, activations(jnp.float32))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_model_without_jit():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 2])(x)))
    x = activations(jnp.float32)[0]
    params = hki.quantize_params(model.init(jax.random.key(0), x), dtype="int8")
    loss = lambda apply: lambda p: jnp.sum(apply(p, x) ** 2)  # noqa: E731
    with jax.disable_jit():
        value, _ = hki.value_and_grad(loss(hki.transform_implicit(model).apply))(params)
    np.testing.assert_allclose(value, loss(model.apply)(hki.materialize(params)), rtol=1e-5)


@pytest.mark.parametrize(
    "flag, row", [("jax_debug_nans", [np.inf, -np.inf, 1, 1]), ("jax_debug_infs", [2e38] * 4)]
)
def test_what_the_flags_are_for(flag, row):
    """JAX says where the number comes from; its search for the operation ends."""
    q = hki.QuantizedMatrix.quantize(jnp.ones(SHAPE), "int8")
    x = jnp.asarray([row] * 7)  # a shape of its own: JAX may not check what it has compiled before
    with enabled(flag), pytest.raises(FloatingPointError):
        hki.use_implicit_args(product)(q, x)
