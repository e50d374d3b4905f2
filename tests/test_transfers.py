"""Under `jax.transfer_guard`: a value in the program is not transferred, an argument is."""

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.cases import CASES, SHAPE
from tests.random_arrays import normal
from tests.tiers import few

QUICK = ["lora", "lora of int4", "int8", "zeros", "constant", "nought"]
FLOATS = [name for name, case in CASES.items() if case.dtype == jnp.float32]
X = normal((2, SHAPE[0]))


def model(x):
    y = hk.Linear(SHAPE[1], name="linear")(x)
    return jnp.clip(2.0 * jnp.sin(y), 0.1, 0.7) + 0.5


def loss(params, x):
    return jnp.sum(jnp.maximum(x @ params["linear"]["w"], 0.1) * 2.0 + params["linear"]["b"])


def guarded(fun, *args):
    args = jax.device_put(args)
    with jax.transfer_guard("disallow"):
        return jax.block_until_ready(fun(*args))


def params_of(name):
    return {"linear": {"w": CASES[name](), "b": jnp.ones(SHAPE[1])}}


@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("name", few(FLOATS, *QUICK))
def test_programs_have_their_own_numbers(name):
    params = params_of(name)
    for fun in (hki.use_implicit_args(loss), hki.grad(loss), hki.value_and_grad(loss)):
        wanted = fun(params, X)
        chex.assert_trees_all_close(guarded(jax.jit(fun), params, X), wanted, rtol=1e-5)


@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("name", few(FLOATS, *QUICK))
def test_kept_traces_have_their_own_numbers(name):
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    params = params_of(name)
    wanted = t.apply(hki.materialize(params), X)
    np.testing.assert_allclose(guarded(t.apply, params, X), wanted, rtol=2e-5)
    np.testing.assert_allclose(guarded(t.apply, params, X), wanted, rtol=2e-5)


@pytest.mark.parametrize("name", QUICK[:-1])
def test_eager_calls_are_as_those_of_dense_arrays(name, may_be_dense):
    """Each operation runs at once, so that the operations themselves may have no numbers."""
    params = params_of(name)
    plain = hki.use_implicit_args(lambda p, x: x @ p["linear"]["w"] + p["linear"]["b"])
    wanted = plain(hki.materialize(params), X)
    np.testing.assert_allclose(guarded(plain, params, X), wanted, rtol=1e-5)


def test_constants_are_made_and_kept():
    with jax.transfer_guard("disallow"):
        two = hki.SymbolicConstant(2.0, shape=(3,))
        four = hki.use_implicit_args(lambda c: c * c)(two)
        dense = hki.materialize((four, hki.Zeros(shape=(2,))))
    assert four.value == 4.0
    assert dense[0].tolist() == [4.0] * 3 and dense[1].tolist() == [0.0] * 2


def test_arguments_are_transfers():
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    params, x = params_of("lora"), np.asarray(X)
    t.apply(params, x)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed"):
        t.apply(params, x)
