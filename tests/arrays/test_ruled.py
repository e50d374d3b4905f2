"""`TrainedQuantized` and `StaticQuantized`: products by rule, and operations that keep the type."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.core.sharding import shard_specs
from haiku_implicit.quantization import QtRule, QuantStats, conv_general_dilated, dot_general
from tests import random_arrays

use = hki.use_implicit_args

INT8 = QtRule(weight_qtype="int8", act_qtype="int8")
NONE = QtRule(weight_qtype=None)


def normal(seed, *shape):
    return random_arrays.normal(shape, seed)


def trained(value, rule=INT8):
    return hki.TrainedQuantized(value, rules=(rule,))


def fixed(batch=()):
    return QuantStats({"absmax": jnp.full((*batch, 1, 1), 4.0)}, jnp.ones(batch), mode="fixed")


def static(value):
    q = hki.QuantizedMatrix.quantize(value, "int8", activation="int8")
    return hki.StaticQuantized.of(q, fixed(value.shape[:-2]))


MAKE = pytest.mark.parametrize("make", [trained, static])


@pytest.mark.combinations
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("w_first", [False, True])
@MAKE
def test_products_in_both_orders(make, w_first):
    value, x = normal(0, 4, 4), normal(1, *((4, 1) if w_first else (1, 4)))
    w = make(value)
    numbers = (((1,), (0,)), ((), ()))
    pair = (w, x) if w_first else (x, w)
    rule = dataclasses.replace(INT8, act_static_scale=make is static)
    own = dict(rule=rule, stats=w.stats, lhs_is_weight=w_first, rhs_is_weight=not w_first)
    dense = (w.wrapped, x) if w_first else (x, w.wrapped)
    want = dot_general(*dense, numbers, **own)
    got = jax.jit(use(jnp.matmul))(*pair)
    np.testing.assert_array_equal(got, want)
    exact = value @ x if w_first else x @ value
    assert 0 < np.abs(np.asarray(got - exact)).max() < 0.2  # it is rounded


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("w_first", [False, True])
def test_convolutions_in_both_orders(w_first):
    value, x = normal(0, 2, 3, 6), normal(1, 2, 3, 3)
    pair = (trained(value), x) if w_first else (x, trained(value[..., :3]))
    dense = (value, x) if w_first else (x, value[..., :3])
    which = dict(lhs_is_weight=w_first, rhs_is_weight=not w_first)
    want = conv_general_dilated(*dense, (1,), "SAME", rule=INT8, **which)
    got = use(lambda a, b: jax.lax.conv_general_dilated(a, b, (1,), "SAME"))(*pair)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    exact = jax.lax.conv_general_dilated(*dense, (1,), "SAME")
    assert np.abs(np.asarray(got - exact)).max() > 0


@pytest.mark.usefixtures("never_dense")
def test_without_a_rule_products_are_dense():
    value, x = normal(0, 2, 4, 4), normal(1, 6, 4)
    w, sizes = trained(value, NONE), jnp.array([2, 4])
    np.testing.assert_array_equal(use(jnp.matmul)(x, w), x @ value)
    got = use(jax.lax.ragged_dot)(x, w, sizes)
    np.testing.assert_array_equal(got, jax.lax.ragged_dot(x, value, sizes))


def test_a_ragged_dot_of_a_stored_weight_with_dense_activations(may_be_dense):
    value, x, sizes = normal(0, 2, 4, 4), normal(1, 6, 4), jnp.array([2, 4])
    w = hki.QuantizedMatrix.quantize(value, "int8")
    got = use(jax.lax.ragged_dot)(x, w, sizes)
    want = jax.lax.ragged_dot(x, hki.materialize(w), sizes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


KEPT = {
    "transpose": lambda w: jnp.swapaxes(w, -1, -2),
    "layer": lambda w: w[1],
    "slice": lambda w: w[:1],
    "split": lambda w: jnp.split(w, 2)[1],
    "reshape": lambda w: w.reshape(1, 2, 4, 6),
    "reversed": lambda w: jnp.flip(w, 0),
    "negative": lambda w: -w,
    "scaled": lambda w: w * 0.5,
    "divided": lambda w: w / jnp.float32(2),
    "cast": lambda w: w.astype(jnp.bfloat16),
    "matrices": lambda w: w[jnp.array([1, 0, 1])],
}


@pytest.mark.combinations
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", KEPT)
@MAKE
def test_rearranged_and_rescaled_it_is_a_weight(make, name):
    w = make(normal(0, 2, 4, 6))
    got = use(KEPT[name])(w)
    assert type(got) is type(w)
    assert got.rules == w.rules if make is trained else got.weight.activation == "int8"
    want = KEPT[name](hki.materialize(w))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(
        hki.materialize(got).astype(np.float32), want.astype(np.float32), rtol=1e-2
    )
    if got.stats is not None:
        assert np.shape(got.stats.count) == got.shape[:-2]


DENSE = {
    "rows": lambda w: w[:, jnp.array([1, 3])],
    "a factor for each element": lambda w: w * jnp.ones((2, 4, 6)),
    "integers": lambda w: w.astype(jnp.int32),
}


@pytest.mark.parametrize("name", DENSE)
@MAKE
def test_what_is_not_a_weight_is_dense(make, name, may_be_dense):
    w = make(normal(0, 2, 4, 6))
    got = use(DENSE[name])(w)
    assert isinstance(got, jax.Array)
    np.testing.assert_allclose(got, DENSE[name](hki.materialize(w)), rtol=1e-6)


@MAKE
def test_it_is_split_as_the_dense_weight(make):
    mesh = jax.make_mesh((1, 1), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    w = make(normal(0, 2, 4, 6))
    specs = shard_specs(w, P("i", None, "j"), mesh)
    leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    assert len(leaves) == len(jax.tree.leaves(w))
    if make is trained:
        assert specs.value == P("i", None, "j")
    else:
        assert specs.parts[0] == P("i", "j", None)
        assert set(jax.tree.leaves(specs.stats, is_leaf=lambda s: isinstance(s, P))) == {P("i")}
