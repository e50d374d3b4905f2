"""Which parameters the functions on trees choose: `exclude`, `missing_ok`, tables of positions."""

import dataclasses
import functools
import re
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule, QuantRule
from tests.random_arrays import normal

RULES = [QuantRule(weight_qtype="int8")]


def weights():
    """Two dense weights and a bias."""
    layer = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
    return {"body": layer, "head": dict(layer)}


def quantized():
    return hki.quantize_params(weights())


# Each function on a tree with `targets`, what it may be called with, and what it makes.
EDITS = {
    "add_lora": (weights, lambda p, **o: hki.add_lora(p, 0, rank=2, **o), hki.LoRA),
    "quantize_params": (weights, hki.quantize_params, hki.QuantizedMatrix),
    "by rules": (
        weights,
        lambda p, **o: hki.quantize_params(p, rules=RULES, **o),
        hki.QuantizedMatrix,
    ),
    "quantize_activations": (quantized, hki.quantize_activations, hki.QuantizedMatrix),
    "zero_params": (
        weights,
        lambda p, targets=".*/w", **o: hki.zero_params(p, targets=targets, **o),
        hki.Zeros,
    ),
    "quantized_training": (
        weights,
        lambda p, **o: hki.quantized_training(p, [QtRule(weight_qtype="int8")], **o),
        hki.TrainedQuantized,
    ),
    "quantization_aware": (
        weights,
        lambda p, **o: hki.quantization_aware(p, RULES, **o),
        hki.FakeQuantized,
    ),
}
ALL = pytest.mark.parametrize("make, edit, kind", EDITS.values(), ids=EDITS)


def changed(old, new):
    """The paths of the parameters that are no longer the same object."""
    return [
        f"{module}/{name}" for module in old for name in old[module]
        if new[module][name] is not old[module][name]
    ]  # fmt: skip


@pytest.mark.combinations
@ALL
@pytest.mark.parametrize(
    "exclude",
    [
        "head/.*",
        re.compile("head/w"),
        lambda module, name, value: module == "head",
        ["head/w"],
        [hki.BIASES, re.compile("head/w")],
    ],
    ids=["text", "pattern", "predicate", "name", "list"],
)
def test_excluded_parameters_are_left_out(make, edit, kind, exclude):
    params = make()
    for options in ({}, {"targets": ".*/w"}):
        new = edit(params, exclude=exclude, **options)
        assert changed(params, new) == ["body/w"]
        assert type(new["body"]["w"]) is kind


@ALL
def test_missing_ok_returns_the_parameters(make, edit, kind):
    params = make()
    for options in (
        dict(targets="decoder/.*"),
        dict(targets=False),
        dict(exclude=True),
        dict(targets="head/w", exclude="head/.*"),
    ):
        new = edit(params, missing_ok=True, **options)
        assert not changed(params, new)
        with pytest.raises(ValueError, match="rules|targets|exclude"):
            edit(params, **options)
    new = edit(params, missing_ok=True, exclude="decoder/.*")
    assert changed(params, new) == ["body/w", "head/w"]


@ALL
def test_a_misspelt_exclude_is_an_error(make, edit, kind):
    with pytest.raises(ValueError, match=r"exclude: 'haed/w' matches none .*Nearest: head/w"):
        edit(make(), exclude="haed/w")
    with pytest.raises(TypeError, match="exclude: expected a regular expression"):
        edit(make(), exclude=3)


def test_lists_of_names_and_expressions():
    params = {"a.b": {"w": jnp.ones((2, 2)), "w[0]": jnp.ones((2, 2)), "(": jnp.ones((2, 2))}}
    params |= {"a_b": {"w": jnp.ones((2, 2)), "w0": jnp.ones((2, 2))}}

    def chosen(*targets):
        return changed(params, hki.zero_params(params, targets=targets))

    assert chosen("a.b/w") == ["a.b/w"]  # a name, though it would match a_b/w
    assert chosen("a.b/w", "a_b/w0") == ["a.b/w", "a_b/w0"]
    assert chosen("a.b/(") == ["a.b/("]  # not an expression
    assert chosen("a_b/.*", "a.b/w[0]") == ["a.b/w[0]", "a_b/w", "a_b/w0"]
    with pytest.raises(ValueError, match=r"targets: no parameter is 'a-b/w'. Nearest: a_b/w"):
        chosen("a_b/w", "a-b/w")
    with pytest.raises(ValueError, match=r"targets: \[\] chooses none of the 5 parameters"):
        hki.zero_params(params, targets=[])
    with pytest.raises(ValueError, match=r"targets: no parameter matches 'c/.\*'. Nearest: a"):
        chosen("a_b/w", "c/.*")


def test_an_exclude_that_leaves_nothing_says_so():
    with pytest.raises(
        ValueError, match=r"exclude: it leaves out .* targets chooses: body/w, head/w"
    ):
        hki.add_lora(weights(), 0, rank=2, exclude=".*")


def test_a_pattern_of_a_part_is_told_the_whole():
    for pattern, whole in (("ad/w", ".*ad/w.*"), ("x|ad/w", ".*(x|ad/w).*")):
        text = re.escape(f"It matches a part of head/w: {whole!r} matches the whole")
        with pytest.raises(ValueError, match=text):
            hki.add_lora(weights(), 0, rank=2, targets=pattern)
        hki.add_lora(weights(), 0, rank=2, targets=whole)


@pytest.mark.parametrize(
    "count, shown", [(5, "m/0, m/1, m/2, m/3, m/4 "), (6, "m/3, m/4 and 1 more ")]
)
def test_where_a_predicate_chooses_nothing_the_first_parameters_are_named(count, shown):
    params = {"m": {str(i): jnp.ones((2, 2)) for i in range(count)}}
    with pytest.raises(
        ValueError, match=f"true of none of the {count} parameters.* There are: .*{shown}"
    ):
        hki.zero_params(params, targets=lambda *_: False)


def test_inputs_of_weights_that_are_not_excluded():
    x = jnp.ones((2, 4))
    apply = lambda p, x: x @ p["body"]["w"] @ p["head"]["w"]  # noqa: E731
    for collect in (hki.input_moments, hki.input_maxima):
        assert set(collect(apply, weights(), [x], exclude="head/.*")) == {"body/w"}


POSITIONS = (
    "pos position positions pos_emb pos_embs pos_embed pos_embedder pos_embedding pos_embeddings "
    "posembed posembedding position_embedding position_embeddings positional_embedding "
    "positional_embeddings positional_encoding pos_enc learned_pos_emb abs_pos_embed wpe position_table"
).split()


@pytest.mark.parametrize("name", POSITIONS)
def test_default_targets_leave_tables_of_positions_out(name):
    params = {"gpt": {name: jnp.ones((16, 8)), "w": jnp.ones((8, 8))}}
    for make, edit, _ in EDITS.values():
        if make is quantized or edit is EDITS["zero_params"][1]:
            continue
        assert changed(params, edit(params)) == ["gpt/w"]
    new = hki.quantize_params(params, targets=f"gpt/{name}")  # named, they are taken
    assert changed(params, new) == [f"gpt/{name}"]


@pytest.mark.parametrize("name", ["w", "embeddings", "w_pos", "composition", "pos_w", "deposit"])
def test_other_names_are_weights(name):
    params = {"gpt": {name: jnp.ones((16, 8))}}
    assert changed(params, hki.quantize_params(params)) == [f"gpt/{name}"]


@dataclasses.dataclass
class Sum(hki.ImplicitArray, core_ndim=2):
    """A type of a user: the sum of two matrices."""

    x: jax.Array
    y: jax.Array

    def materialize(self):
        return self.x + self.y


def test_lora_on_a_type_of_the_user():
    params = {"linear": {"w": Sum(jnp.ones((4, 4)), jnp.ones((4, 4)))}}
    with pytest.raises(ValueError, match="is Sum .* name them by targets="):
        hki.add_lora(params, 0, rank=2)
    w = hki.add_lora(params, 0, rank=2, targets="linear/w")["linear"]["w"]
    assert type(w.w) is Sum
    np.testing.assert_array_equal(hki.materialize(w), 2)


def test_summary_of_parameters():
    params = {
        "embed": {"embeddings": jnp.ones((4, 2), jnp.bfloat16)},
        "linear": {
            "b": np.zeros(2, np.float32),
            "w": hki.add_lora(quantized(), 0, rank=1)["head"]["w"],
        },
        "none": {"w": hki.Zeros(shape=(300, 2), dtype=jnp.float32)},
        "keys": {"key": jax.random.key(0)},
    }
    text = str(hki.summary(params))
    lines = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert lines == [
        ["path", "type", "shape", "dtype", "trained", "bytes", "of dense bytes", "bits"],
        ["embed/embeddings", "dense", "[4,2]", "bfloat16", "8", "16", "16", "16.00"],
        ["linear/b", "dense", "[2]", "float32", "2", "8", "8", "32.00"],
        ["linear/w", "LoRA of QuantizedMatrix int8", "[4,4]", "float32", "8", "68", "64", "34.00"],
        ["none/w", "Zeros", "[300,2]", "float32", "0", "0", "2,400", "0.00"],
        ["keys/key", "dense", "[]", "key<fry>", "0", "8", "8", "64.00"],
        ["total", "18", "100", "2,496", "1.28"],
    ]
    assert len({len(line) for line in text.splitlines()}) == 1, "numbers end in one column"
    assert str(hki.summary(jax.eval_shape(lambda: weights()))).count("\n") == 5
    assert "total" in str(hki.summary({}))
    with pytest.raises(TypeError, match="params: expected a mapping"):
        hki.summary(jnp.ones(2))


def test_summary_by_module():
    w = jnp.ones((4, 2))
    params = {
        "model/layer_0/~/linear": {"w": w, "b": jnp.ones(2)},
        "model/layer_0/norm": {"scale": jnp.ones(2)},
        "model/layer_1/~/linear": {"w": hki.QuantizedMatrix.quantize(w, "int8")},
        "head": {"w": w.astype(jnp.bfloat16)},
    }
    rows = {row.path: row for row in hki.summary(params, depth=2, trainable_dense=False).rows}
    assert list(rows) == ["model/layer_0", "model/layer_1", "head"]
    first, second, head = rows.values()
    assert (first.kind, first.size, first.nbytes, first.dtype) == ("dense", 12, 48, "float32")
    assert (second.kind, second.size, second.dense_nbytes) == ("QuantizedMatrix int8", 8, 32)
    assert second.nbytes == params["model/layer_1/~/linear"]["w"].nbytes and head.bits == 16
    assert hki.summary(params, trainable_dense=".*/b").total.trained == 2
    last = {row.path: row.size for row in hki.summary(params, depth=-1).rows}
    assert last == {"linear": 18, "norm": 2, "head": 8}
    outside = hki.summary({"~": {"w": w}, "w": w, "~/m": {"w": w}}, depth=1)
    assert [row.path for row in outside.rows] == ["~", "m"]
    with pytest.raises(ValueError, match="depth: expected None, 1 and more, or -1 and less, got 0"):
        hki.summary(params, depth=0)


def test_comparing_two_trees():
    w = normal((8, 4))
    first = {"linear": {"w": w, "b": jnp.ones(4)}, "old": {"b": jnp.ones(1)}}
    second = {"linear": {"w": w + 0.5, "b": jnp.ones(4)}, "new": {"b": jnp.ones(1)}}
    x = jnp.ones((2, 8))
    found = hki.compare_params(first, second, apply=lambda p, x: x @ p["linear"]["w"], args=(x,))
    errors = {row.path: row for row in found.rows}
    norm = np.sqrt(np.mean(np.square(w)))
    np.testing.assert_allclose(errors["linear/w"].relative, 0.5 / norm, rtol=1e-5)
    np.testing.assert_allclose(errors["linear/w"].largest, 0.5, rtol=1e-5)
    assert errors["linear/b"] == ("linear/b", ("dense", "dense"), 0.0, 0.0)
    assert (found.only_first, found.only_second) == (("old/b",), ("new/b",))
    want = np.linalg.norm(np.full((2, 4), 4.0)) / np.linalg.norm(x @ w)
    np.testing.assert_allclose(found.outputs, want, rtol=1e-5)
    assert str(found).count("is there") == 2 and "outputs" in str(found)
    with pytest.raises(ValueError, match=r"linear/w: the first is \[8, 4\], the second \[4, 8\]"):
        hki.compare_params(first, {"linear": {"w": w.T}})


def attention():
    return {
        "query": {"w": jnp.ones((16, 4, 16)), "b": jnp.ones(64)},
        "linear": {"w": jnp.ones((32, 8))},
        "odd": {"w": jnp.ones((24, 8))},
    }


@pytest.mark.parametrize("what", ["lora", "dora", "quantization"])
def test_a_named_parameter_that_does_not_fit_is_an_error(what):
    """Nothing that a pattern names is left out in silence, and layers do not make biases matrices."""
    change = functools.partial(hki.add_adapter, key=0, method=what, rank=2)
    change = hki.quantize_params if what == "quantization" else change
    stack = "__layer_stack_no_per_layer/linear"
    stacked = {stack: {"w": jnp.ones((3, 4, 4)), "b": jnp.ones((3, 4))}}
    for params, pattern, axes in (
        (weights(), r"^body/b: {} needs .* at least two axes, .* float32\[4\]", ()),
        (stacked, r"^{}/b: {} needs .* at least two axes besides .* float32\[3,4\]", (stack,)),
    ):
        name = {"lora": "LoRA", "dora": "DoRA"}.get(what, what)
        with pytest.raises(ValueError, match=pattern.format(*axes, name)):
            change(params, targets=".*")
        change(params, targets=".*", exclude=".*/b")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            change(params)  # by default biases are not targets, without a warning


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_larger_than_its_weight_is_said_once(method):
    kernel = {"conv2_d": {"w": jnp.ones((16, 4, 16))}}
    for params, path in ((kernel, "conv2_d/w"), (attention(), "query/w")):
        axes = None if params is kernel else {}  # without which each weight of three axes is named
        add = functools.partial(hki.add_adapter, params, 0, method, rank=4, matrix_axes=axes)
        with pytest.warns(UserWarning) as found:
            add()
        (one,) = found
        assert one.filename == __file__ and f"{path} (float32[16,4,16]: 16 adapters" in str(
            one.message
        )
        assert "for 1,024)" in str(one.message) and "'locon'" in str(one.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add(matrix_axes={"query/w": ([-3], [-2, -1])})
        add(exclude="query/w")
        hki.add_lora(attention(), 0, rank=1, matrix_axes={})
        stacked = {"__layer_stack_no_per_layer/linear": {"w": jnp.ones((3, 8, 4))}}
        hki.add_lora(stacked, 0, rank=4)  # the user's own rank, for matrices


def test_weights_that_groups_leave_dense_are_named_once():
    with pytest.warns(UserWarning) as found:
        hki.quantize_params(attention(), group_size=32, exclude="query/.*")
    (one,) = found
    assert one.filename == __file__
    text = (
        "1 weight stays dense, because groups of 32 do not divide axis -2: odd/w (float32[24,8])."
    )
    assert text in str(one.message) and "group_size= (8, 12, 24 would fit)" in str(one.message)
    with pytest.raises(ValueError, match=r"is divided by 48 \(8, 16 would fit\) \(matrix_axes="):
        hki.quantize_params(
            {"m": {"w": jnp.ones((32, 8))}, "n": {"w": jnp.ones((16, 8))}}, group_size=48
        )
    with pytest.warns(
        UserWarning, match=r"2 weights .* query/w .*odd/w.* hki.prepare.* finds matrices"
    ):
        hki.quantize_params(attention(), dtype="mxfp4")  # which has groups of its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hki.quantize_params(attention(), matrix_axes={})
        hki.quantize_params(attention(), group_size=32, targets="linear/w")
        hki.quantize_params(attention(), group_size=32, exclude="(query|odd)/.*")
        once = hki.quantize_params(attention(), group_size=8, targets=".*(linear|odd)/w")
        hki.quantize_params(once, group_size=4, matrix_axes={})  # a quantized weight is not dense


def test_kernels_of_one_channel_are_named():
    """They stay dense, and so does a single row, a vector, without a word."""
    params = {"conv": {"w": jnp.ones((3, 3, 1, 8))}, "linear": {"w": jnp.ones((8, 8))}}
    params["~"] = {"token": jnp.ones((1, 1, 8))}
    with pytest.warns(
        UserWarning, match="-2 has the length one .*own scale: conv/w .float"
    ) as found:
        new = hki.quantize_params(params)
    assert len(found) == 1 and "token" not in str(found[0].message)
    assert new["conv"]["w"] is params["conv"]["w"]
    with pytest.warns(UserWarning, match="conv/w .*. 1 weight stays dense, .*linear.*.8 would fit"):
        hki.quantize_params(params | {"a": {"w": jnp.ones((32, 8))}}, group_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hki.quantize_params(params, exclude="conv/w")


@pytest.mark.parametrize("put", [hk.custom_creator, hk.custom_getter])
def test_creators_and_getters_say_it_once(put):
    make = hki.quantize_creator if put is hk.custom_creator else hki.quantize_getter

    def model(x):
        with put(make("int8", group_size=16)):
            return hk.nets.MLP([24, 10, 8])(x)

    with pytest.warns(UserWarning, match="1 weight stays dense, .* mlp/~/linear_0/w") as found:
        jax.eval_shape(hki.transform_implicit(hk.transform(model)).init, 0, jnp.ones((1, 8)))
    assert {w.filename for w in found} == {__file__}


def test_a_second_call_says_already():
    params = {"linear": {"w": jnp.ones((8, 8))}, "head": {"w": jnp.ones((8, 1))}}
    some = hki.add_lora(params, 0, rank=2, targets="linear/w")
    found = r"already implicit: 1, such as linear/w, LoRA float32\[8,8\]"
    with pytest.raises(ValueError, match=found):
        hki.add_lora(some, 0, rank=2)
    every = hki.quantize_params(params)
    with pytest.raises(
        ValueError, match="all 2 weights are implicit already.*hki.materialize makes"
    ):
        hki.quantize_params(every)
