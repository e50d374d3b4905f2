"""Files of older versions: adapters without an `alpha`, names of types with modules, other rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.core import serialization
from haiku_implicit.core.array import is_implicit
from haiku_implicit.quantization import QtRule, QuantRule
from tests.files.trees import assert_same


def new(alpha=None):
    params = {"l": {"w": jnp.arange(12.0).reshape(4, 3), "b": jnp.ones(3)}}
    return hki.add_lora(params, 0, rank=2, alpha=alpha)


NUMBERS = ("factor", "alpha", "scale")


def older(tree):
    """The tree as older versions made it."""

    def without(x):
        if not is_implicit(x):
            return x
        fields = dataclasses.fields(x)
        new = object.__new__(type(x))
        new.__dict__.update(x.__dict__ | {f.name: None for f in fields if f.name in NUMBERS})
        return new

    return jax.tree.map(without, tree, is_leaf=is_implicit)


OPTIMIZERS = {
    "frozen": hki.freeze_declared(optax.adam(0.1)),
    "all": optax.adam(0.1),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def test_parameters(path):
    params = new()
    hki.save(path, older(params))
    assert hki.load(path)["l"]["w"].factor is None
    assert_same(hki.load(path, like=params), params)


def test_inside_of_another(path):
    params = {"l": {"w": hki.LoRA(new()["l"]["w"], jnp.ones((4, 1)), jnp.ones((1, 3)), alpha=1)}}
    inner = params["l"]["w"]
    old = {"l": {"w": inner._replace(w=older(inner.w))}}
    hki.save(path, old)
    assert_same(hki.load(path, like=params), params)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_states_of_optimizers(optimizer, path):
    params = new()
    state = optimizer.init(params)
    hki.save(path, older(state))
    assert_same(hki.load(path, like=state), state)


def test_another_scale_is_an_error(path):
    hki.save(path, older(new()))
    for alpha in (4, 0):
        with pytest.raises(hki.CheckpointError, match=r"LoRA.factor: an older .* has .*, not 1.0,"):
            hki.load(path, like=new(alpha))
    with pytest.raises(hki.CheckpointError, match="`like` has no values there. Load"):
        hki.load(path, like=jax.eval_shape(new))


def test_other_fields_may_not_be_left_out(path):
    hki.save(path, {"l": {"w": None, "b": jnp.ones(3)}})
    with pytest.raises(hki.CheckpointError, match="l/w: expected"):
        hki.load(path, like=new())


def test_a_new_file_is_not_like_an_older_tree(path):
    hki.save(path, new())
    with pytest.raises(hki.CheckpointError, match="l/w.factor: expected None, found an array"):
        hki.load(path, like=older(new()))
    np.testing.assert_array_equal(hki.load(path)["l"]["w"].factor, 1)


KINDS = {
    "dora": dict(rank=2),
    "locon": dict(rank=2),
    "loha": dict(rank=2),
    "lokr": dict(rank=2),
    "low_rank_diagonal": dict(rank=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_adapters(kind, path):
    params = hki.add_adapter({"l": {"w": jnp.ones((8, 6))}}, 0, kind, **KINDS[kind])
    hki.save(path, older(params))
    assert_same(hki.load(path, like=params), params)
    state = hki.freeze_declared(optax.adam(0.1)).init(params)
    hki.save(path, older(state))
    assert_same(hki.load(path, like=state), state)


def test_metadata_with_the_modules_of_types(path, monkeypatch):
    """A structure in the metadata of static weights named its types by modules that have moved."""
    rules = [QuantRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    params = hki.quantize_params({"l": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}}, rules=rules)
    encode = serialization._encode_structure

    def with_modules(treedef):
        found = encode(treedef)
        if found[0] == "haiku_implicit.QuantizedMatrix":
            found[0] = "haiku_implicit.numerics.quantized_matrix.QuantizedMatrix"
        return found

    with monkeypatch.context() as patch:
        patch.setattr(serialization, "_encode_structure", with_modules)
        hki.save(path, params)
    assert b"haiku_implicit.numerics.quantized_matrix.QuantizedMatrix" in path.read_bytes()
    assert_same(hki.load(path), params)
    assert_same(hki.load(path, like=params), params)


def test_rules_of_training_are_of_one_class(path):
    """Files from before have a `QtRule` for each rule."""
    params = {"l": {"w": jnp.ones((8, 6))}}
    rule = dict(weight_qtype="int8", act_qtype="int8")
    old = hki.quantized_training(params, [QtRule(**rule)])
    new = hki.quantized_training(params, [QuantRule(**rule)])
    hki.save(path, old)
    assert_same(hki.load(path, like=new), new)
