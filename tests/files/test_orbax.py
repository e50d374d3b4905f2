"""Orbax saves and restores the trees that `save` and `load` do."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests.files.trees import assert_same, made, mlp_params

TYPES = ["lora of int4", "int4 groups offset", "view of lora", "lora beside dense", "static"]


def trees():
    _, params = mlp_params()
    trainable, frozen = hki.partition(params, trainable_dense=False)
    optimizer = hki.quantized_state(optax.adamw(1e-2), "int8", block=8, min_size=8)
    return {
        "types": {name: made(name) for name in TYPES},
        "trainable": trainable,
        "frozen": frozen,
        "optimizer": optimizer.init(trainable),
        "masked": optax.masked(optax.adam(1.0), {"a": True, "b": False}).init(
            {"a": jnp.ones(2), "b": jnp.ones(2)}
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["types", "trainable", "frozen", "optimizer", "masked"])
def test_orbax_gives_the_same_tree(name, tmp_path):
    from orbax import checkpoint as ocp  # which takes seconds; the quick tests do without it

    # Without weak types, which Orbax does not keep.
    tree = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), trees()[name])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
        checkpointer.wait_until_finished()
        structs = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        by_orbax = checkpointer.restore(tmp_path / "orbax", structs)
    hki.save(tmp_path / "ours", tree)
    ours = hki.load(tmp_path / "ours", like=by_orbax)
    assert_same(by_orbax, tree)
    assert_same(ours, by_orbax)


# --- without a target ------------------------------------------------------------------------------


def forward(x):
    return hk.nets.MLP([8, 4])(x)


def lost(tree):
    """A tree as Orbax restores it without a target: objects are dicts of their fields."""
    is_object = lambda x: hasattr(x, "__dataclass_fields__") or hasattr(x, "_fields")  # noqa: E731
    if not is_object(tree):
        return jax.tree.map(lambda x: lost(x) if is_object(x) else x, tree, is_leaf=is_object)
    names = getattr(tree, "_fields", None) or data_fields(tree)
    return {name: lost(getattr(tree, name)) for name in names}


def data_fields(x):
    pairs = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    return [keys[0].name for keys, _ in pairs]


WAY_OUT = r"Orbax gives such dicts where it restores .* checkpointer.restore\(path, target\)"


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, hki.grad])
def test_a_dict_that_was_a_weight_is_told(transform):
    model = hki.transform_implicit(hk.without_apply_rng(hk.transform(forward)))
    found = lost(mlp_params()[1])
    loss = lambda params, x: model.apply(params, x).sum()  # noqa: E731
    message = r"mlp/~/linear_0/w: expected a LoRA, got a dict of its fields \(a, b, factor, w\). "
    with pytest.raises(TypeError, match=message + WAY_OUT):
        transform(loss)(found, jnp.ones((1, 8)))


WEIGHTS = {
    "QuantizedMatrix or a QuantizedBlocks": lambda p: hki.quantize_params(p),
    "FakeQuantized or a TrainedQuantized": lambda p: hki.quantized_training(p, RULES),
    "DoRA": lambda p: hki.add_adapter(p, 0, "dora", rank=2),
}
RULES = [hki.quantization.QtRule(weight_qtype="int8")]


@pytest.mark.parametrize("kinds", WEIGHTS)
def test_the_types_that_it_may_have_been_are_told(kinds):
    """Those that users know; Orbax leaves fields out that are None."""
    model = hki.transform_implicit(hk.without_apply_rng(hk.transform(forward)))
    params = model.init(jax.random.key(0), x := jnp.ones((1, 8)))
    made = WEIGHTS[kinds](params)
    found = {
        module: {name: {k: v for k, v in lost(w).items() if v is not None} if name == "w" else w}
        for module, weights in made.items()
        for name, w in weights.items()
        if name == "w"
    }
    # Types of other tests may come behind.
    with pytest.raises(TypeError, match=f"linear_0/w: expected a {kinds}( or a \\w+)*, got a dict"):
        model.apply({m: {**made[m], **own} for m, own in found.items()}, x)


def test_other_errors_about_dicts_stay_what_they_are():
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'shape'"):
        hki.use_implicit_args(lambda tree: tree.shape)({"linear": {"w": jnp.ones(2)}})
    with pytest.raises(AttributeError, match="'list' object has no attribute 'shape'"):
        hki.use_implicit_args(lambda tree: tree.shape)([jnp.ones(2)])


def test_a_dict_that_was_an_optimizer_state_is_told():
    params = {"w": hki.LoRA(jnp.ones((4, 4)), jnp.ones((4, 2)), jnp.ones((2, 4)))}
    optimizer = hki.freeze_declared(optax.adam(0.1))
    count, *rest = optimizer.init(params)
    with pytest.raises(TypeError, match=f"0: expected a ScaleByAdamState or .*mu, nu.*{WAY_OUT}"):
        optimizer.update(params, (lost(count), *rest), params)


@pytest.mark.slow
def test_what_orbax_gives_without_a_target(tmp_path):
    from orbax import checkpoint as ocp

    _, params = mlp_params()
    model = hki.transform_implicit(hk.without_apply_rng(hk.transform(forward)))
    x = jnp.ones((1, 8))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", params)
        checkpointer.wait_until_finished()
        for found in (checkpointer.restore(tmp_path / "orbax"), hki.load(tmp_path / "orbax")):
            with pytest.raises(TypeError, match="linear_0/w: expected a LoRA"):
                model.apply(found, x)
        with pytest.raises(hki.CheckpointError, match="Orbax restores other types: .*restore.path"):
            hki.load(tmp_path / "orbax", like=params)
        found = checkpointer.restore(tmp_path / "orbax", jax.eval_shape(lambda: params))
    np.testing.assert_array_equal(model.apply(found, x), model.apply(params, x))
