"""Orbax saves and restores the trees that `save` and `load` do."""

import jax
import jax.numpy as jnp
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
