"""What a type declares of itself instead of writing rules."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import haiku_implicit as hki
from tests import random_arrays

use = hki.use_implicit_args


@dataclasses.dataclass
class Circulant(hki.ImplicitArray, core_ndim=2, linear_in="column"):
    """Each column is the one before it, moved on by one."""

    column: hki.ArrayValue

    def materialize(self):
        n = self.column.shape[-1]
        i = jnp.arange(n)
        return self.column[..., (i[:, None] - i) % n]


@dataclasses.dataclass
class Gated(hki.ImplicitArray, core_ndim=2, linear_in=("w", "offset")):
    """Fields that are scaled together, one that isn't, an explicit dtype."""

    w: hki.ArrayValue
    offset: hki.ArrayValue
    gate: hki.ArrayValue

    def materialize(self):
        dense = self.w * jax.nn.sigmoid(self.gate) + self.offset
        return dense.astype(self.dtype)


def normal(seed, *shape):
    return random_arrays.normal(shape, seed)


def gated():
    return Gated(normal(0, 4, 4), Circulant(normal(1, 4)), normal(2, 4, 4), dtype=jnp.float32)


MAKE = pytest.mark.parametrize("make", [lambda: Circulant(normal(0, 4)), gated])
OPERATIONS = {
    "times": lambda w: w * 0.3,
    "number times": lambda w: jnp.float32(-2) * w,
    "divided": lambda w: w / 7,
    "negative": lambda w: -w,
    "cast": lambda w: w.astype(jnp.bfloat16),
    "there and back": lambda w: (w * 3).astype(jnp.float16).astype(jnp.float32),
}


@pytest.mark.combinations
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", OPERATIONS)
@MAKE
def test_linear_operations_keep_the_type(make, name):
    fun, w = OPERATIONS[name], make()
    for run in (use(fun), jax.jit(use(fun))):
        got = run(w)
        assert type(got) is type(w)
        want = fun(hki.materialize(w))
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        tolerance = 1e-6 if want.dtype == jnp.float32 and name != "there and back" else 2e-2
        np.testing.assert_allclose(
            hki.materialize(got).astype(np.float32),
            want.astype(np.float32),
            rtol=tolerance,
            atol=tolerance,
        )


@MAKE
def test_what_is_not_linear_is_dense(make, may_be_dense):
    w, scale = make(), normal(3, 4, 4)
    for fun in (lambda w: w * scale, lambda w: w / scale, lambda w: 2 / w, jnp.exp, jnp.int32):
        got, want = use(fun)(w), fun(hki.materialize(w))
        assert isinstance(got, jax.Array) and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_gradients():
    x, w = normal(4, 3, 4), Circulant(normal(0, 4))

    def loss(w):
        return (use(lambda w: x @ (w * 0.5 / 3))(w) ** 2).sum()

    with hki.materialization("allow"):
        got = jax.grad(loss)(w).column
    dense = jax.grad(lambda c: ((x @ Circulant(c).materialize() * 0.5 / 3) ** 2).sum())(w.column)
    np.testing.assert_allclose(got, dense, rtol=1e-5)


def test_mixed_precision_needs_no_rule():
    def model(x):
        return hk.Linear(4, with_bias=False)(x)

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    x, params = normal(1, 2, 4), {"linear": {"w": Circulant(normal(0, 4))}}
    hk.mixed_precision.set_policy(hk.Linear, policy)
    try:
        with hki.materialization_report() as report, hki.materialization("allow"):
            got = t.apply(params, x)
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)
    assert {event.primitive for event, _ in report} == {"dot_general"}  # and not the cast
    dense = hki.materialize(params["linear"]["w"])
    np.testing.assert_allclose(got, x @ dense, rtol=0.03, atol=0.03)


def test_a_name_that_is_no_field_is_an_error():
    @dataclasses.dataclass
    class Misspelt(Circulant, linear_in="colum"):
        pass

    with pytest.raises(TypeError, match="Misspelt: linear_in: it has no field colum"):
        Misspelt(jnp.ones(3))
