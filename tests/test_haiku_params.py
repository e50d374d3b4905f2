"""Functions on trees of existing parameters."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule
from tests.haiku_models import X, case, noise

KEY = jax.random.key(0)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def assert_close(a, b):
    a, b = hki.materialize((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(close, a, b)


def chosen(params):
    """The names of the implicit parameters."""
    return {
        f"{m}/{n}"
        for m, n, v in hk.data_structures.traverse(params)
        if isinstance(v, hki.ImplicitArray)
    }


@pytest.fixture
def params():
    return case("mlp").params


def test_add_lora(params):
    new = hki.add_lora(params, KEY, rank=2, alpha=6)
    assert chosen(new) == {"mlp/~/linear_0/w", "mlp/~/linear_1/w"}
    w = new["mlp/~/linear_0"]["w"]
    assert (w.a.shape, w.b.shape, w.scale, w.a.dtype) == ((4, 2), (2, 5), 3.0, jnp.float32)
    assert w.w is params["mlp/~/linear_0"]["w"]
    assert_close(new, params)
    assert params == case("mlp").params, "the tree itself is not changed"


def test_factors_depend_on_key_and_path_alone(params):
    both = hki.add_lora(params, KEY, rank=2)
    one = hki.add_lora(params, KEY, rank=2, targets=".*linear_1/w")
    assert chosen(one) == {"mlp/~/linear_1/w"}
    np.testing.assert_array_equal(*(p["mlp/~/linear_1"]["w"].a for p in (both, one)))
    other = hki.add_lora(params, jax.random.key(1), rank=2)
    assert not np.allclose(*(p["mlp/~/linear_1"]["w"].a for p in (both, other)))
    seeded = hki.add_lora(params, 0, rank=2)
    assert_close(seeded, both)
    np.testing.assert_array_equal(*(p["mlp/~/linear_1"]["w"].a for p in (both, seeded)))
    legacy = hki.add_lora(params, jax.random.PRNGKey(0), rank=2, init=jax.nn.initializers.ones)
    np.testing.assert_array_equal(legacy["mlp/~/linear_1"]["w"].a, 1)


@pytest.mark.parametrize("dtype", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("group_size", [None, 2])
def test_quantize_params(params, dtype, group_size):
    new = hki.quantize_params(params, dtype=dtype, group_size=group_size)
    # The second weight has five rows, which two does not divide.
    second = set() if group_size else {"mlp/~/linear_1/w"}
    assert chosen(new) == {"mlp/~/linear_0/w", *second}
    w = new["mlp/~/linear_0"]["w"]
    expected = hki.QuantizedMatrix.quantize(params["mlp/~/linear_0"]["w"], dtype, group_size)
    assert_close(w, expected)


@pytest.mark.parametrize(
    "name", ["gating_b", "query_bias", "spatial_biases", "biases_0", "b", "offset"]
)
def test_biases_of_two_axes_are_no_default_targets(name):
    tree = {"attention": {"gating_w": jnp.ones((4, 4)), "w_b": jnp.ones((4, 4))}}
    expected = {"attention/gating_w", "attention/w_b"}
    tree["attention"][name] = jnp.ones((4, 4))
    assert chosen(hki.add_lora(tree, KEY, rank=2)) == expected
    assert chosen(hki.quantize_params(tree)) == expected
    assert chosen(hki.quantize_params(tree, targets=f".*/{name}")) == {f"attention/{name}"}


@pytest.mark.parametrize(("axis", "left_out"), [(-2, "depthwise"), (-1, "column")])
def test_by_default_no_number_gets_a_scale_of_its_own(axis, left_out):
    shapes = dict(dense=(8, 8), column=(9, 1), depthwise=(3, 3, 1, 8))
    tree = {"m": {k: jnp.ones(s) for k, s in shapes.items()}}
    new = hki.quantize_params(tree, axis=axis)
    assert chosen(new) == {f"m/{name}" for name in shapes if name != left_out}
    assert all(new["m"][k].nbytes < tree["m"][k].nbytes for k in shapes if k != left_out)
    assert chosen(hki.quantize_params(tree, axis=axis, targets=f"m/{left_out}"))


def test_zero_params(params):
    new = hki.zero_params(params, targets=lambda module, name, value: value.ndim == 1)
    assert chosen(new) == {"mlp/~/linear_0/b", "mlp/~/linear_1/b"}
    b = new["mlp/~/linear_0"]["b"]
    assert isinstance(b, hki.Zeros)
    assert (b.shape, b.dtype, b.nbytes) == ((5,), jnp.float32, 0)


def test_qlora_in_both_orders(params):
    a = hki.quantize_params(hki.add_lora(params, KEY, rank=2), dtype="int4")
    b = hki.add_lora(hki.quantize_params(params, dtype="int4"), KEY, rank=2)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    w = a["mlp/~/linear_0"]["w"]
    assert isinstance(w, hki.LoRA)
    assert isinstance(w.w, hki.QuantizedMatrix)
    t = hki.transform_implicit(case("mlp").plain)
    a = noise(a)
    out = t.apply(a, {}, None, X)
    np.testing.assert_allclose(
        out[0], case("mlp").plain.apply(hki.materialize(a), {}, None, X)[0], rtol=1e-4, atol=1e-7
    )


def test_merge_lora(params):
    lora = noise(hki.add_lora(params, KEY, rank=2, alpha=5))
    merged = hki.merge_lora(lora)
    assert not chosen(merged)
    assert_close(merged, lora)
    assert_close(hki.merge_lora(merged), merged)
    twice = hki.merge_lora(noise(hki.add_lora(merged, KEY, rank=1)))
    assert not chosen(twice)


def test_lists_and_tuples_within_a_mapping():
    class Layer(NamedTuple):
        w: Any
        b: Any

    layers = [Layer(jnp.ones((4, 4)), jnp.ones(4)), (jnp.ones((4, 4)), None)]
    new = hki.add_lora({"layers": layers}, KEY, rank=2, targets="layers/(0/0|1/0)")
    (w, b), (v, none) = new["layers"]
    assert isinstance(new["layers"][0], Layer) and none is None and b is layers[0].b
    assert isinstance(w, hki.LoRA) and isinstance(v, hki.LoRA) and (w.a != v.a).any()
    merged = hki.merge_lora(noise(new))
    assert jax.tree.structure(merged) == jax.tree.structure({"layers": layers})


@pytest.mark.parametrize(
    "options",
    [
        dict(dtype="int8"),
        dict(dtype="int4", group_size=2, zero_point=True),
        dict(dtype="nf4", axis=-1, targets=".*linear_0/w"),
    ],
)
def test_merge_into_a_quantized_base(params, options):
    base = hki.quantize_params(params, **options)
    lora = noise(hki.add_lora(base, KEY, rank=2))
    dense = hki.merge_lora(lora)
    assert not chosen(dense)
    assert_close(dense, lora)
    again = hki.merge_lora(lora, requantize=True)
    assert chosen(again) == chosen(base)
    assert jax.tree.structure(again) == jax.tree.structure(base)
    expected = hki.quantize_params(dense, **options)
    assert_close(
        hk.data_structures.filter(lambda m, n, v: f"{m}/{n}" in chosen(base), again),
        hk.data_structures.filter(lambda m, n, v: f"{m}/{n}" in chosen(base), expected),
    )


def test_under_jit_and_eval_shape(params):
    def everything(params, key):
        params = hki.quantize_params(hki.add_lora(params, key, rank=2))
        params = hki.zero_params(params, targets=".*/b")
        return params, hki.merge_lora(params)

    eager = everything(params, KEY)
    assert_close(jax.jit(everything)(params, KEY), eager)
    shapes = jax.eval_shape(everything, params, KEY)
    assert jax.tree.structure(shapes) == jax.tree.structure(eager)
    assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(eager)]


def test_layer_stack_and_convolutions():
    layers = "__layer_stack_no_per_layer/linear"
    params = case("layer_stack").params
    params = {layers: {**params[layers], "gain": jnp.ones((3, 4))}}  # a vector for each layer
    stacked = jax.eval_shape(lambda p: hki.add_lora(p, KEY, rank=2), params)
    assert chosen(stacked) == {f"{layers}/w"}
    assert stacked[layers]["w"].b.shape == (3, 2, 4)
    assert chosen(jax.eval_shape(hki.quantize_params, params)) == chosen(stacked)

    conv = {"conv": {"w": jnp.ones((3, 3, 4, 6)), "b": jnp.ones((1, 1, 6))}}
    lora = jax.eval_shape(lambda p: hki.add_lora(p, KEY, rank=3), conv)
    assert lora["conv"]["w"].a.shape == (3, 3, 4, 3)
    quantized = jax.eval_shape(hki.quantize_params, conv)
    assert chosen(quantized) == {"conv/w"}
    assert quantized["conv"]["w"].shape == (3, 3, 4, 6)


@pytest.mark.parametrize("name", ["nested_modules", "lift", "name_scope", "scan", "cond"])
def test_in_models(name):
    c = case(name)
    plain, params, state = c.plain, c.params, c.state
    t = hki.transform_implicit(plain)
    lora = noise(hki.add_lora(params, KEY, rank=2))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    expected = plain.apply(hki.merge_lora(lora), state, None, X)
    jax.tree.map(close, t.apply(lora, state, None, X), expected)


def test_nested_and_immutable_mappings():
    nested = {"encoder": {"layer": {"w": jnp.ones((4, 4)), "step": 3}}, "w": jnp.ones((4, 4))}
    seen = []
    new = hki.add_lora(nested, KEY, rank=1, targets=lambda m, n, v: seen.append((m, n)) or n == "w")
    assert sorted(seen) == [("", "w"), ("encoder/layer", "w")]
    assert isinstance(new["encoder"]["layer"]["w"], hki.LoRA)
    assert isinstance(new["w"], hki.LoRA)
    assert new["encoder"]["layer"]["step"] == 3
    assert not isinstance(
        hki.add_lora(nested, KEY, rank=1, targets="w")["encoder"]["layer"]["w"], hki.LoRA
    )
    flat = hk.data_structures.to_immutable_dict({"linear": {"w": jnp.ones((2, 2))}})
    assert isinstance(hki.add_lora(flat, KEY, rank=1)["linear"]["w"], hki.LoRA)


@pytest.mark.parametrize(
    "targets", [r".*/linear_[01]/w", re.compile(r".*/linear_\d/w"), lambda m, n, v: n == "w"]
)
def test_targets(params, targets):
    expected = {"mlp/~/linear_0/w", "mlp/~/linear_1/w"}
    assert chosen(hki.add_lora(params, KEY, rank=2, targets=targets)) == expected
    assert chosen(hki.quantize_params(params, targets=targets)) == expected
    assert chosen(hki.zero_params(params, targets=targets)) == expected


def test_all_parameters_and_none(params):
    names = {f"mlp/~/linear_{i}/{name}" for i in (0, 1) for name in "wb"}
    assert chosen(hki.zero_params(params, targets=True)) == names
    with pytest.raises(ValueError, match="targets: False chooses none of the 4 param"):
        hki.zero_params(params, targets=False)


# --- bad input --------------------------------------------------------------------------------

CALLS = {
    "add_lora": lambda params, **kw: hki.add_lora(params, KEY, **{"rank": 2, **kw}),
    "quantize_params": hki.quantize_params,
    "zero_params": hki.zero_params,
}


@pytest.mark.parametrize("name", CALLS)
def test_targets_that_match_nothing(params, name):
    message = (
        r"targets: 'mlp/linear_0/w' matches none of the 4 parameters .*Nearest: mlp/~/linear_0/w, "
    )
    with pytest.raises(ValueError, match=message):
        CALLS[name](params, targets="mlp/linear_0/w")
    with pytest.raises(
        ValueError, match=r"targets: the predicate is true of none .*mlp/~/linear_0/b"
    ):
        CALLS[name](params, targets=lambda m, n, v: False)
    with pytest.raises(TypeError, match="targets"):
        CALLS[name](params, targets=3)
    with pytest.raises(TypeError, match="params: expected a mapping .* got tuple"):
        CALLS[name]((params, {}), targets=".*")
    with pytest.raises(ValueError, match="not a regular expression"):
        CALLS[name](params, targets="(")


def test_a_name_that_is_another_expression():
    tree = {"m": {"w[0,0]": jnp.ones((4, 4))}}
    with pytest.raises(ValueError, match="It is a parameter's name: give re.escape of it"):
        hki.add_lora(tree, KEY, rank=2, targets="m/w[0,0]")
    assert chosen(hki.add_lora(tree, KEY, rank=2, targets=re.escape("m/w[0,0]"))) == {"m/w[0,0]"}


def test_nothing_to_do_by_default(params):
    biases = hk.data_structures.filter(lambda m, n, v: n == "b", params)
    with pytest.raises(
        ValueError, match="targets: none of the 2 parameters is a weight with room for"
    ):
        hki.add_lora(biases, KEY, rank=2)
    with pytest.raises(ValueError, match="is a dense weight whose axis -2 is divided by 64"):
        hki.quantize_params(params, group_size=64)
    with pytest.raises(ValueError, match="all 2 weights are implicit already"):
        hki.quantize_params(hki.quantize_params(params))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: hki.add_lora(p, KEY, rank=-1), "rank: expected a positive integer, got -1"),
        (lambda p: hki.add_lora(p, KEY, rank=2, alpha=float("inf")), "alpha: expected None or"),
        (
            lambda p: hki.add_lora(p, KEY, rank=4, targets=".*linear_1/w"),
            r"linear_1/w \(float32\[5,3\]\): LoRA of rank 4 does",
        ),
        (
            lambda p: hki.add_lora(p, KEY, rank=1, targets=".*/b"),
            r"linear_0/b: LoRA needs a floating-point",
        ),
        (
            lambda p: hki.add_lora(hki.add_lora(p, KEY, rank=1), KEY, rank=1, targets=".*/w"),
            r"linear_0/w \(LoRA float32\[4,5\]\): this is LoRA already; merge_lora",
        ),
        (
            lambda p: hki.quantize_params(p, dtype="int9"),
            "dtype: expected one of int8, .* trellis4, got .int9",
        ),
        (
            lambda p: hki.quantize_params(p, group_size=3, targets=".*/w"),
            r"linear_0/w \(float32\[4,5\]\): ",
        ),
        (
            lambda p: hki.quantize_params(hki.quantize_params(p), targets=".*/w"),
            r"linear_0/w: this is QuantizedMatrix float32\[4,5\], and only a dense",
        ),
        (lambda p: hki.quantize_params(p, axis=1), "axis: expected -2 or -1, got 1"),
    ],
)
def test_bad_options(params, call, message):
    with pytest.raises(ValueError, match=message):
        call(params)


def test_integers_are_no_weights():
    tree = {"m": {"w": jnp.ones((4, 4), jnp.int32)}}
    with pytest.raises(ValueError, match=r"m/w: LoRA needs a floating-point .* int32\[4,4\]"):
        hki.add_lora(tree, KEY, rank=1, targets=".*")


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 4, 4)])
def test_empty_arrays_are_no_default_targets(shape):
    """One of them was an error for the whole tree."""
    empty = jnp.zeros(shape)
    params = {"m": {"w": jnp.ones((4, 4)), "v": empty}}
    quantized, adapted = hki.quantize_params(params, dtype="int8"), hki.add_lora(params, 0, rank=2)
    assert quantized["m"]["v"] is empty and adapted["m"]["v"] is empty
    assert isinstance(quantized["m"]["w"], hki.QuantizedMatrix)


def test_an_empty_target_is_an_error():
    with pytest.raises(ValueError, match=r"^m/v \(.*n, m > 0"):
        hki.quantize_params({"m": {"v": jnp.ones((4, 0))}}, dtype="int8", targets="m/v")


def test_zero_params_needs_targets(params):
    with pytest.raises(TypeError, match="targets"):
        hki.zero_params(params)
    with pytest.raises(TypeError, match="targets"):
        hki.zero_params(params, targets=None)


def test_quantize_activations(params):
    stored = hki.quantize_params(params, dtype="int4", axis=-1)
    stored["other"] = dict(w=hki.add_lora(stored, KEY, rank=1)["mlp/~/linear_0"]["w"])
    new = hki.quantize_activations(stored)
    for module in ("mlp/~/linear_0", "mlp/~/linear_1"):
        assert new[module]["w"].activation == "int8"
    assert new["other"]["w"].w.activation == "int8"
    assert_close(new, stored)
    some = hki.quantize_activations(new, None, targets=".*_1/w")
    assert [some[f"mlp/~/linear_{i}"]["w"].activation for i in (0, 1)] == ["int8", None]
    with pytest.raises(ValueError, match=r"mlp/~/linear_0/b: expected a QuantizedMatrix or a T"):
        hki.quantize_activations(stored, targets=".*/b")
    with pytest.raises(ValueError, match="activation: expected one of"):
        hki.quantize_activations(stored, "int9")
    with pytest.raises(ValueError, match="a quantized weight"):
        hki.quantize_activations(params)


def test_quantize_by_rules():
    from haiku_implicit.quantization import QuantRule

    weight = jax.random.normal(KEY, (32, 16))
    params = {name: {"w": weight, "b": jnp.ones(16)} for name in ("head", "a/b", "a/c")}
    rules = [
        QuantRule(module_path="head"),
        QuantRule(module_path="a/b", weight_qtype="nf4", tile_size=0.5),
        QuantRule(module_path=".*", weight_qtype="int8", weight_calibration_method="minmax"),
    ]
    new = hki.quantize_params(params, rules=rules, scale_dtype="bfloat16")
    assert new["head"]["w"] is weight and new["a/b"]["b"].shape == (16,)
    assert (new["a/b"]["w"].format, new["a/b"]["w"].group_size) == ("nf4", 16)
    assert new["a/c"]["w"].format == "uint8" and new["a/c"]["w"].scale.dtype == jnp.bfloat16
    for name in ("a/b", "a/c"):
        assert np.abs(hki.materialize(new[name]["w"]) - weight).max() < 0.5
    with pytest.warns(UserWarning, match=r"no module is left for 'z' \(rules\[1\]\)") as told:
        hki.quantize_params(params, rules=[rules[2], QuantRule(module_path="z")])
    assert told[0].filename == __file__
    both = QuantRule(weight_qtype="int8", act_qtype="int8")
    assert hki.quantize_params(params, rules=[both])["head"]["w"].activation == "int8"
    by_rms = dataclasses.replace(both, act_calibration_method="rms,3")
    assert hki.quantize_params(params, rules=[by_rms])["head"]["w"].activation == "int8,rms,3"
    with pytest.raises(ValueError, match="quantize none of the 3 dense weights"):
        hki.quantize_params(params, rules=[QuantRule(module_path="z", weight_qtype="int8")])


def test_rules_quantize_the_weight_of_an_adapter():
    from haiku_implicit.quantization import QuantRule

    weight = jax.random.normal(KEY, (32, 16))
    params = hki.add_lora({"a": {"w": weight}, "head": {"w": weight}}, KEY, rank=2)
    params = hki.add_adapter(params, KEY, "dora", rank=2, targets="head/w")
    rules = [QuantRule(module_path="a", weight_qtype="nf4"), QuantRule(weight_qtype="int8")]
    new = hki.quantize_params(params, rules=rules)
    plain = hki.quantize_params({"a": {"w": weight}, "head": {"w": weight}}, rules=rules)
    for name, base in (("a", new["a"]["w"].w), ("head", new["head"]["w"].w.w)):
        jax.tree.map(np.testing.assert_array_equal, base, plain[name]["w"])
    with pytest.raises(ValueError, match="are implicit already"):
        hki.quantize_params(new, rules=rules)


def test_rules_rotate():
    from haiku_implicit.quantization import QtRule, QuantRule

    w = jax.random.normal(KEY, (32, 16))
    params = {name: {"w": w} for name in ("a", "b")} | {"table": {"embeddings": w}}
    rules = [
        QuantRule(module_path="b", weight_qtype="int4", act_qtype="int8"),
        QuantRule(weight_qtype="int4", act_qtype="int8", rotate=True),
    ]
    new = hki.quantize_params(params, rules=rules)
    alone = hki.quantize_params({"a": {"w": w}}, dtype="int4", activation="int8", rotate=True)
    assert jax.tree.structure(new["a"]) == jax.tree.structure(alone["a"])
    np.testing.assert_array_equal(*(hki.materialize(p["a"]["w"]) for p in (new, alone)))
    for plain in (new["b"]["w"], new["table"]["embeddings"]):
        assert type(plain) is hki.QuantizedMatrix
    inputs = {"a/w": w @ w.T, "b/w": w @ w.T}
    fitted = hki.quantize_with_inputs(params, inputs, rules=rules)
    assert isinstance(fitted["a"]["w"], hki.adapters.Rotated)
    with pytest.raises(ValueError, match="rotate: only stored weights are rotated"):
        QtRule(weight_qtype="int8", rotate=True)
    with pytest.raises(ValueError, match="rotate: the statistics of act_static_scale"):
        QuantRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True, rotate=True)
    with pytest.raises(ValueError, match=r"rules\[0\]: expected rotate=False"):
        hki.quantization_aware(params, [QuantRule(weight_qtype="int4", rotate=True)])
    with pytest.raises(ValueError, match="rotate: only stored weights are rotated"):
        hki.quantized_training(params, [QuantRule(weight_qtype="int4", rotate=True)])


@pytest.mark.parametrize("first", ["lora", "int8"])
@pytest.mark.parametrize("second", ["lora", "int8", "training"])
def test_all_weights_are_implicit_already(first, second):
    """As in a cell of a notebook that runs twice."""
    dense = {"l": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, "s": {"scale": jnp.ones(4)}}
    edits = {
        "lora": lambda params: hki.add_lora(params, 0, rank=1),
        "int8": lambda params: hki.quantize_params(params, dtype="int8"),
        "training": lambda params: hki.quantized_training(params, [QtRule(weight_qtype="int8")]),
    }
    params = edits[first](dense)
    if {first, second} == {"int8", "lora"}:  # QLoRA, in either order
        assert isinstance(edits[second](params)["l"]["w"], hki.LoRA)
        return
    with pytest.raises(
        ValueError, match="all 1 weights are implicit already; l/w is .*merge_adapters"
    ):
        edits[second](params)
