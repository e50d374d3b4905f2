"""`auto_in_axes` beside `jax.vmap` with axes by hand, and a loop over examples."""

import collections

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests import random_arrays
from tests.cases import CASES
from tests.tiers import few

SIZE = 3
Problem = collections.namedtuple("Problem", "weight x label")


def normal(seed, *shape):
    return random_arrays.normal(shape, seed)


def sliced(tree, axes, i):
    """Example `i` of the dense tree."""
    leaf = lambda axis, x: x if axis is None else x[i]  # noqa: E731
    return jax.tree.map(leaf, axes, tree, is_leaf=lambda x: x is None)


def test_arrays_with_the_leading_axis_are_mapped_and_nothing_else():
    problem = {
        "x": normal(0, SIZE, 4),
        "numpy": np.ones((SIZE, 2)),
        "keys": jax.random.split(jax.random.key(0), SIZE),
        "scalar": jnp.float32(SIZE),
        "number": SIZE,
        "text": "abc",
        "flag": True,
        "function": jnp.tanh,
        "other": normal(1, 4, SIZE),
        "nested": [Problem(normal(2, 4, 2), normal(3, SIZE), None)],
        "struct": jax.ShapeDtypeStruct((SIZE,), jnp.float32),
    }
    mapped = dict(x=0, numpy=0, keys=0, struct=0)
    want = {name: mapped.get(name) for name in problem}
    want["nested"] = [Problem(None, 0, None)]
    assert hki.auto_in_axes(problem, SIZE) == want
    assert hki.auto_in_axes(normal(0, SIZE), SIZE) == 0


def problem_with(weight):
    return {
        "w": weight,
        "x": normal(5, SIZE, 4),
        "b": hki.Zeros(shape=(4,)),
        "activation": "tanh",
        "plain": normal(6, 4),
    }


@hki.use_implicit_args
def routine(problem):
    y = problem["x"] @ problem["w"] + problem["b"] * problem["plain"]
    return getattr(jnp, problem["activation"])(y)


def dense_routine(problem):
    y = problem["x"] @ problem["w"] + problem["b"] * problem["plain"]
    return jnp.tanh(y)


# Their shape is static metadata, which `jax.vmap` would leave as it is.
STATIC = ("zeros", "constant", "nought")
BATCHED = [name for name, case in CASES.items() if case.batched and case.dtype == jnp.float32]


@pytest.mark.parametrize("name", few(BATCHED, "lora of int4", "view of lora", "zeros"))
def test_implicit_batches_are_mapped_by_vmap_around_or_refused(name):
    problem = problem_with(CASES[name](0, (SIZE,)))
    dense = hki.materialize(problem)
    dense_axes = {**dict.fromkeys(problem), "w": 0, "x": 0}
    want = jnp.stack([dense_routine(sliced(dense, dense_axes, i)) for i in range(SIZE)])
    if name in STATIC:
        with pytest.raises(ValueError, match="w is a .*exclude="):
            hki.auto_in_axes(problem, SIZE)
    else:
        axes = hki.auto_in_axes(problem, SIZE)
        assert axes == dense_axes
        np.testing.assert_allclose(jax.vmap(routine, (axes,))(problem), want, rtol=2e-5, atol=1e-5)

    @hki.use_implicit_args
    def mapped_within(problem):
        return jax.vmap(routine, (hki.auto_in_axes(problem, SIZE),))(problem)

    out = hki.materialize(mapped_within(problem))
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-5)


def test_parameters_are_shared_under_grad_and_jit():
    problem = problem_with(CASES["lora"](0))
    axes = hki.auto_in_axes(problem, SIZE)
    assert axes == {**dict.fromkeys(problem), "x": 0}

    def loss(run, weight):
        return (jax.vmap(run, (axes,))({**problem, "w": weight}) ** 2).sum()

    def dense_loss(a, b):
        weight = problem["w"]._replace(a=a, b=b).materialize()
        dense = {**hki.materialize(problem), "w": weight}
        return sum((dense_routine(sliced(dense, axes, i)) ** 2).sum() for i in range(SIZE))

    value, grads = jax.jit(jax.value_and_grad(lambda w: loss(routine, w)))(problem["w"])
    want, wanted = jax.value_and_grad(dense_loss, (0, 1))(problem["w"].a, problem["w"].b)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads.a, wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads.b, wanted[1], rtol=1e-4, atol=1e-5)


def test_the_tuple_of_arguments_is_in_axes():
    args = (CASES["int8"](0), {"x": normal(1, SIZE, 4)}, "unused")
    f = hki.use_implicit_args(lambda w, data, text: data["x"] @ w)
    axes = hki.auto_in_axes(args, SIZE)
    assert axes == (None, {"x": 0}, None)
    want = args[1]["x"] @ hki.materialize(args[0])
    np.testing.assert_allclose(jax.vmap(f, axes)(*args), want, rtol=2e-5, atol=1e-5)


def test_keys_for_a_batch_of_a_haiku_model():
    def model(x):
        return hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(4)(x))

    transformed = hki.transform_implicit(hk.transform(model))
    params = transformed.init(jax.random.key(0), jnp.ones(6))
    params = hki.add_lora(params, jax.random.key(1), rank=2)
    args = (params, jax.random.split(jax.random.key(2), SIZE), normal(3, SIZE, 6))
    out = jax.vmap(transformed.apply, hki.auto_in_axes(args, SIZE))(*args)
    want = [transformed.apply(params, args[1][i], args[2][i]) for i in range(SIZE)]
    np.testing.assert_allclose(out, jnp.stack(want), rtol=1e-5)


# --- chance, and what cannot be mapped -----------------------------------------------------------


@pytest.mark.parametrize(
    "exclude", [r"model/.*", ["model/linear/w"], lambda module, name, x: name == "w"]
)
def test_a_parameter_with_as_many_rows_by_chance_is_excluded(exclude):
    params = {"model/linear": {"w": CASES["lora"](0)}}  # 4 x 4
    args = (params, normal(0, 4, 4))
    with pytest.raises(
        ValueError, match=r"0/model/linear/w is a LoRA float32\[4,4\], whose leading"
    ):
        hki.auto_in_axes(args, 4)
    axes = hki.auto_in_axes(params | {"x": args[1]}, 4, exclude=exclude)
    assert axes == {"model/linear": {"w": None}, "x": 0}


def test_a_dense_parameter_is_excluded_by_name():
    tree = {"w": normal(0, SIZE, 2), "x": normal(1, SIZE, SIZE)}
    assert hki.auto_in_axes(tree, SIZE) == {"w": 0, "x": 0}
    assert hki.auto_in_axes(tree, SIZE, exclude="w") == {"w": None, "x": 0}


@pytest.mark.parametrize("exclude", ["wrong", ["wrong"], lambda *_: False])
def test_an_exclude_that_matches_nothing_is_an_error(exclude):
    with pytest.raises(ValueError, match="exclude: .*x"):
        hki.auto_in_axes({"x": jnp.ones(SIZE)}, SIZE, exclude=exclude)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hki.Zeros(shape=(SIZE, 4)),
        lambda: CASES["diagonal"](0),
        lambda: hki.LoRA(hki.Zeros(shape=(4, 2, 5)), jnp.ones((4, 2, 1)), jnp.ones((4, 1, 5))),
        lambda: hki.QuantizedMatrix.quantize(normal(0, 4, 8), "int8"),
    ],
    ids=["no leaves", "no batch axes", "static shape within", "rows"],
)
def test_what_vmap_cannot_slice_is_an_error_around_and_mapped_within(make):
    x = make()
    size = x.shape[0]
    with pytest.raises(ValueError, match=r"auto_in_axes: a/0 is a .*use jax.vmap within"):
        hki.auto_in_axes({"a": [x]}, size)

    @hki.use_implicit_args
    def doubled(tree):
        return jax.vmap(lambda tree: tree["a"][0] * 2, (hki.auto_in_axes(tree, size),))(tree)

    out = hki.materialize(doubled({"a": [x]}))
    np.testing.assert_allclose(out, 2 * hki.materialize(x), rtol=1e-6)


def test_no_batch_is_an_error_that_lists_shapes():
    with pytest.raises(ValueError, match=r"length 7.*float32\[4,4\], float32\[6\]"):
        hki.auto_in_axes({"w": CASES["lora"](0), "x": jnp.ones(6), "s": 7}, 7)
    with pytest.raises(ValueError, match="no arrays with axes"):
        hki.auto_in_axes({"s": "text"}, 7)


def test_haikus_immutable_dict_is_refused():
    tree = hk.data_structures.to_immutable_dict({"a": {"w": jnp.ones((SIZE, 2))}})
    with pytest.raises(TypeError, match="to_mutable_dict"):
        hki.auto_in_axes(tree, SIZE)
