"""Containers that keep their leaves flat, as Haiku's immutable dict does: as the same trees of dicts."""

import dataclasses
from typing import Any

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule
from tests.random_arrays import normal

N, M = 4, 3
X = normal((2, N), 9)
flat, plain = hk.data_structures.to_immutable_dict, hk.data_structures.to_mutable_dict


def lora(w=None):
    w = normal((N, M)) if w is None else w
    return hki.LoRA(w, normal((N, 2), 1), normal((2, M), 2), 3.0)


def make_params():
    """Implicit arrays of all kinds: with leaves and without, nested, and beside dense ones and None."""
    int8 = hki.QuantizedMatrix.quantize(normal((N, M), 3), "int8")
    return {
        "linear": {"w": lora(), "b": normal((M,), 4)},
        "other": {"w": lora(int8), "b": hki.Zeros(shape=(M,), dtype=jnp.float32)},
        "rest": {"steps": jnp.arange(3), "extra": None},
    }


def forward(params, x):
    return sum(jnp.sin(x @ params[k]["w"] + params[k]["b"]) for k in ("linear", "other"))


def loss(params, x):
    return jnp.sum(forward(params, x) ** 2)


def is_flat(tree):
    return type(tree) is type(flat({}))


def check(found, wanted, container=True):
    """That a flat tree and a tree of dicts hold the same."""
    assert is_flat(found) == container
    found = plain(found) if container else found
    chex.assert_trees_all_equal_structs(found, wanted)
    chex.assert_trees_all_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_partition_and_combine():
    params = make_params()
    for dense in (True, False, "linear/b"):
        halves = hki.partition(flat(params), dense)
        for half, wanted in zip(halves, hki.partition(params, dense), strict=True):
            check(half, wanted)
        check(hki.combine(*halves), params)


def test_tree_functions():
    params, own = make_params(), flat(make_params())
    leaves, treedef = hki.tree_flatten_with_implicit(own)
    assert [type(x) for x in leaves] == [type(x) for x in hki.tree_leaves_with_implicit(params)]
    assert treedef == hki.tree_structure_with_implicit(own)
    check(treedef.unflatten(leaves), params)
    check(hki.materialize(own), hki.materialize(params))
    shapes = hki.tree_map_with_implicit(lambda x, y: (x.shape, y.shape), own, own)
    assert is_flat(shapes) and shapes["linear"]["w"] == ((N, M), (N, M))
    nested = [{"inner": own}, (own["linear"],)]
    assert len(hki.tree_leaves_with_implicit(nested)) == len(leaves) + 2
    check(hki.materialize(nested)[0]["inner"], hki.materialize(params))


@pytest.mark.usefixtures("never_dense")
def test_calls_and_gradients():
    params, own = make_params(), flat(make_params())
    wanted = hki.use_implicit_args(forward)(params, X)
    for run in (hki.use_implicit_args(forward), jax.jit(hki.use_implicit_args(forward))):
        chex.assert_trees_all_close(run(own, X), wanted, rtol=1e-6)
    check(hki.use_implicit_args(lambda p: p)(own), params)
    check(hki.grad(loss)(own, X), hki.grad(loss)(params, X))
    value, grads = jax.jit(hki.value_and_grad(loss, trainable_dense="linear/b"))(own, X)
    wanted = hki.value_and_grad(loss, trainable_dense="linear/b")(params, X)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    check(grads, wanted[1])


@pytest.mark.parametrize(
    "make",
    [
        hki.freeze_declared,
        lambda o: hki.freeze_keys(o, hki.LoRA, ["a"]),
        lambda o: hki.freeze_subtrees(o, {"linear": "train", "other": "freeze", "rest": "train"}),
        lambda o: hki.freeze_subtrees(o, lambda p: dict.fromkeys(p, "train")),
        lambda o: hki.freeze_declared(hki.quantized_state(o, block=2, min_size=1)),
    ],
    ids=["declared", "keys", "subtrees", "label function", "quantized state"],
)
@pytest.mark.slow
def test_optimizer_steps(make):
    optimizer = make(optax.adam(0.1))

    def step(carry, _=None):
        params, state = carry
        updates, state = optimizer.update(hki.grad(loss)(params, X), state, params)
        return (hki.apply_updates(params, updates), state), None

    def trained(params):
        state = optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, (params, state), None, length=2)
        return params, sum(x.size for x in jax.tree.leaves(state))

    (found, size), (wanted, wanted_size) = trained(flat(make_params())), trained(make_params())
    check(found, wanted)
    assert size == wanted_size


@pytest.mark.slow
def test_optimizers_of_the_trainable_part():
    def trained(params):
        trainable, frozen = hki.partition(params)
        optimizer = hki.quantized_state(optax.sgd(0.1, momentum=0.9), block=2, min_size=1)
        state = optimizer.init(trainable)
        implicit = hki.use_implicit_args(loss)
        for _ in range(2):
            grads = jax.grad(lambda t: implicit(hki.combine(t, frozen), X))(trainable)
            updates, state = optimizer.update(grads, state, trainable)
            trainable = hki.apply_updates(trainable, updates)
        return hki.combine(trainable, frozen)

    check(trained(flat(make_params())), trained(make_params()))


def test_haiku_models_and_their_state():
    def model(x):
        steps = hk.get_state("steps", (M,), init=jnp.zeros)
        hk.set_state("steps", steps + 1)
        return hk.Linear(M)(x) + steps

    t = hki.transform_implicit(hk.without_apply_rng(hk.transform_with_state(model)))
    params = {"linear": {"w": lora(), "b": normal((M,), 4)}}
    state = {"~": {"steps": hki.SymbolicConstant(2.0, shape=(M,), dtype=jnp.float32)}}
    wanted = t.apply(params, state, X)
    for apply in (t.apply, jax.jit(t.apply)):
        for _ in range(2):
            out, after = apply(flat(params), flat(state), X)
            np.testing.assert_allclose(out, wanted[0], rtol=1e-6)
            np.testing.assert_allclose(hki.materialize(after)["~"]["steps"], [3.0] * M)


def test_edits_give_dicts():
    dense = {"linear": {"w": normal((N, M)), "b": normal((M,), 4)}}
    for edit in (
        lambda p: hki.add_lora(p, 0, rank=2),
        lambda p: hki.merge_lora(hki.add_lora(flat(p), 0, rank=2)),
        lambda p: hki.quantize_params(p),
        lambda p: hki.quantize_activations(flat(hki.quantize_params(p))),
        lambda p: hki.zero_params(p, targets=".*/b"),
        lambda p: hki.convert_trained(
            flat(hki.quantized_training(p, [QtRule(weight_qtype="int4")]))
        ),
    ):
        check(edit(flat(dense)), edit(dense), container=False)


def test_quant_stats():
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(lambda x: hk.Linear(M)(x))))
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    dense = {"linear": {"w": normal((N, M)), "b": normal((M,), 4)}}
    params = hki.quantized_training(dense, [rule])
    model = hki.with_quant_stats(t)
    state = hki.init_quant_stats(t, flat(params), {}, X)
    out, after = model.apply(flat(params), flat(state), X)
    wanted, wanted_after = model.apply(params, {}, X)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    chex.assert_trees_all_close(after, wanted_after)
    check(hki.convert_trained(flat(params), flat(after)), hki.convert_trained(params, after), False)


@dataclasses.dataclass
class Leaves:
    """A container that keeps its leaves flat and is not a mapping."""

    leaves: Any
    treedef: Any


jax.tree_util.register_dataclass(Leaves, data_fields=["leaves"], meta_fields=["treedef"])


def test_others_say_what_to_do():
    leaves, treedef = jax.tree.flatten({"w": lora()})
    for fun in (hki.partition, hki.materialize, hki.tree_leaves_with_implicit):
        with pytest.raises(TypeError, match="Leaves.*keeps its leaves flat.*LoRA.*a dict"):
            fun({"params": Leaves(leaves, treedef)})
    dense = Leaves(*jax.tree.flatten({"w": X}))
    assert hki.tree_leaves_with_implicit(dense)[0] is X
