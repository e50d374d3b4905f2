"""Weights that a default leaves out, and the one warning that names them."""

import re
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import haiku_implicit as hki

SKIPPED = ("triangle/query_w .float32.128,4,32.", "head/w .float32.256,1.")


def params():
    return {
        "triangle": {"query_w": jnp.ones((128, 4, 32)), "gating_b": jnp.ones((4, 32))},
        "linear": {"w": jnp.ones((64, 64)), "b": jnp.ones((1, 64))},
        "norm": {"scale": jnp.ones((1, 64)), "offset": jnp.ones((1, 64))},
        "head": {"w": jnp.ones((256, 1))},
    }


def said(function, *args, **options):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        new = function(*args, **options)
    return new, [str(w.message) for w in found]


ADD = {
    "lora": lambda p, **more: hki.add_lora(p, 0, rank=8, **more),
    "dora": lambda p, **more: hki.add_adapter(p, 0, "dora", rank=8, **more),
    "bank": lambda p, **more: hki.AdapterBank.of(p, capacity=2, rank=8, **more),
}


@pytest.mark.parametrize("name", ADD)
def test_one_warning_names_the_weights_without_an_adapter(name):
    _, found = said(ADD[name], params())
    assert len(found) == 1
    for name_of_one in SKIPPED:
        assert re.search(name_of_one, found[0])
    assert "hki.prepare(model, params, *args)" in found[0] and "2 weights get no" in found[0]
    assert not any(own in found[0] for own in ("gating_b", "scale", "linear"))
    _, found = said(ADD[name], params(), exclude="head/w")
    assert len(found) == 1 and "head/w" not in found[0] and "triangle" in found[0]
    _, found = said(ADD[name], params(), exclude="triangle/.*")
    assert len(found) == 1 and "prepare" not in found[0] and "head/w" in found[0]
    for silent in (
        dict(exclude="head/w|triangle/.*"),
        dict(targets="linear/w"),
        dict(exclude="head/w", matrix_axes={"triangle/query_w": ([-3], [-2, -1])}),
    ):
        assert said(ADD[name], params(), **silent)[1] == []


def test_many_are_counted():
    many = {f"layer_{i}": {"w": jnp.ones((4, 4))} for i in range(9)} | {
        "l": {"w": jnp.ones((8, 8))}
    }
    _, [found] = said(hki.add_lora, many, 0, rank=8)
    assert "9 weights get no adapter" in found and "and 4 more" in found


def test_the_room_is_that_of_the_type():
    kernel = {"conv": {"w": jnp.ones((3, 3, 1, 64))}}
    new, found = said(hki.add_adapter, kernel, 0, "locon", rank=4)  # the matrix is [9, 64]
    assert found == [] and type(new["conv"]["w"]).__name__ == "LoCon"
    new, found = said(hki.add_adapter, {"l": {"w": jnp.ones((4, 4))}}, 0, "vera", rank=8)
    assert found == [] and new["l"]["w"].d.shape == (8,)


def test_a_creator_says_it_once():
    def model(x):
        with hk.custom_creator(hki.lora_creator(rank=8)):
            return hk.nets.MLP([4, 16, 4])(x)

    t = hki.transform_implicit(hk.transform(model))
    new, found = said(jax.eval_shape, t.init, jax.random.key(0), jnp.ones((1, 16)))
    assert len(found) == 1 and "1 weight gets no adapter" in found[0]


EACH = {
    "lora": ("an adapter", lambda p, **more: hki.add_lora(p, 0, rank=1, **more)),
    "dora": ("an adapter", lambda p, **more: hki.add_adapter(p, 0, "dora", rank=1, **more)),
    "bank": ("an adapter", lambda p, **more: hki.AdapterBank.of(p, capacity=2, rank=1, **more)),
    "quantize": ("scales", lambda p, **more: hki.quantize_params(p, **more)),
    "rules": (
        "scales",
        lambda p, **more: hki.quantize_params(
            p, rules=[hki.quantization.QuantRule(weight_qtype="int8")], **more
        ),
    ),
    "moments": ("a statistic", lambda p, **more: hki.input_moments(products, p, [1.0], **more)),
    "maxima": ("a statistic", lambda p, **more: hki.input_maxima(products, p, [1.0], **more)),
    "sensitivity": (
        "scales",
        lambda p, **more: hki.sensitivity(
            products, p, [1.0], {"a": dict(dtype="int8"), "b": dict(dtype="int4")}, **more
        ),
    ),
}


def products(params, x):
    """Uses the matrices of all weights, one after another."""
    weights = [w for own in params.values() for w in own.values() if w.ndim > 1]
    matrices = [m for w in weights for m in w.reshape(-1, *w.shape[-2:])]
    return sum((jnp.full((1, m.shape[0]), x) @ m).sum() for m in matrices)


@pytest.mark.every(8)
@pytest.mark.parametrize("name", EACH)
def test_a_weight_of_more_axes_is_a_stack_only_with_a_warning(name):
    each, change = EACH[name]
    unsaid = {"attention": {"query_w": jnp.ones((16, 4, 8))}, "experts": {"w": jnp.ones((3, 8, 4))}}
    said_by_names = {
        "linear": {"w": jnp.ones((8, 4)), "b": jnp.ones((1, 1, 4))},
        "net/conv2_d": {"w": jnp.ones((2, 2, 8, 4))},
        "a/__layer_stack_no_per_layer/linear": {"w": jnp.ones((2, 8, 4))},
        "one": {"w": jnp.ones((1, 8, 4))},
        "blocks/linear": {"w": jnp.ones((3, 8, 4)), "b": jnp.ones((3, 4))},
    }
    found = stacks(change, {**unsaid, **said_by_names})
    assert len(found) == 1 and "axes of 2 weights make a matrix, so that each counts" in found[0]
    assert "attention/query_w (float32[16,4,8] as 16 matrices of 4 x 8)" in found[0]
    assert "experts/w (float32[3,8,4] as 3 matrices of 8 x 4)" in found[0]
    assert f"with {each} for each" in found[0] and "hki.prepare(model, params, *args)" in found[0]
    assert "matrix_axes={}" in found[0]
    assert len(stacks(change, {**unsaid, **said_by_names}, targets="attention/query_w")) == 1
    for silent in (
        dict(matrix_axes={}),
        dict(exclude="(attention|experts)/.*"),
        dict(targets="linear/w"),
        dict(matrix_axes={"attention/query_w": ([-3], [-2, -1])}),
    ):
        if name not in ("moments", "maxima") or "attention/query_w" not in str(silent):
            assert stacks(change, {**unsaid, **said_by_names}, **silent) == []


def stacks(*args, **options):
    """The warnings about stacks of matrices, and not LoRA's about kernels of convolutions."""
    return [text for text in said(*args, **options)[1] if "each counts" in text]


def test_what_is_said_once_is_said_for_later_calls():
    """A view in the tree; a kernel with a method that is for kernels."""
    axes = {"attention/query_w": ([-3], [-2, -1])}
    weights = {"attention": {"query_w": jnp.ones((16, 4, 8))}, "other": {"w": jnp.ones((3, 8, 4))}}
    once = hki.quantize_params(weights, targets="attention/query_w", matrix_axes=axes)
    assert said(hki.add_lora, once, 0, rank=2)[1] == []
    kernel = {"stem": {"w": jnp.ones((3, 3, 8, 4))}}
    assert said(hki.add_adapter, kernel, 0, "locon", rank=2)[1] == []
    assert len(said(hki.add_adapter, kernel, 0, "lora", rank=2)[1]) == 1


RULES = [hki.quantization.QuantRule(weight_qtype="int8")]
CHANGES = {
    "lora": lambda p, **more: hki.add_lora(p, 0, rank=2, **more),
    "dora": lambda p, **more: hki.add_adapter(p, 0, "dora", rank=2, **more),
    "quantize": lambda p, **more: hki.quantize_params(p, **more),
    "rules": lambda p, **more: hki.quantize_params(p, rules=RULES, **more),
    "training": lambda p, **more: hki.quantized_training(p, RULES, **more),
    "aware": lambda p, **more: hki.quantization_aware(p, RULES, **more),
}
BY_RULES = ("rules", "training", "aware")


@pytest.mark.parametrize("name", CHANGES)
def test_complex_weights_are_named(name):
    fft = {"fft": {"w": jnp.ones((8, 8), jnp.complex64), "b": jnp.ones(8, jnp.complex64)}}
    linear = {"linear": {"w": jnp.ones((8, 8))}}
    new, found = said(CHANGES[name], fft | linear)
    assert new["fft"]["w"] is fft["fft"]["w"] and len(found) == 1
    assert "complex weights are not supported" in found[0] and "fft/w (complex64[8,8])" in found[0]
    assert "fft/b" not in found[0]
    assert said(CHANGES[name], fft | linear, exclude="fft/.*")[1] == []
    by_rules = r"quantize none .* \(1 complex weights are not supported\)"
    none = by_rules if name in BY_RULES else "complex weights, of which there are 1, are not"
    with warnings.catch_warnings(), pytest.raises(ValueError, match=none):
        warnings.simplefilter("ignore")
        CHANGES[name](fft)


def test_the_size_that_a_format_has_of_its_own():
    with pytest.raises(ValueError, match="a dense weight whose axis -2 is divided by 32"):
        hki.quantize_params({"l": {"w": jnp.ones((16, 16))}}, dtype="mxfp4")


QUANTIZED = {
    "int8": dict(dtype="int8"),
    "groups": dict(dtype="int4", group_size=16, zero_point=True),
    "nf4": dict(dtype="nf4", group_size=16, scale_dtype="double"),
    "mxfp4": dict(dtype="mxfp4"),
    "rules": dict(rules=[hki.quantization.QuantRule(weight_qtype="int8")]),
    "static": dict(
        rules=[
            hki.quantization.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
        ]
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_structs_become_what_arrays_become(name):
    own = {"l": {"w": jnp.ones((64, 32)), "b": jnp.ones(32)}}
    wanted = hki.quantize_params(own, **QUANTIZED[name])
    structs = hki.quantize_params(jax.eval_shape(lambda: own), **QUANTIZED[name])
    assert jax.tree.structure(structs) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(structs), jax.tree.leaves(wanted), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


ON_VALUES = {
    "pissa": lambda p: hki.add_lora(p, 0, rank=2, init="pissa"),
    "dora": lambda p: hki.add_adapter(p, 0, "dora", rank=2),
    "get_adapter": lambda p: hki.get_adapter(hki.add_lora(p, 0, rank=2)),
    "merge": lambda p: hki.merge_adapters(hki.add_lora(p, 0, rank=2)),
    "convert": lambda p: hki.convert_trained(hki.quantized_training(p, RULES)),
    "compare": lambda p: hki.compare_params(p, p),
}


@pytest.mark.parametrize("name", ON_VALUES)
def test_what_needs_values_says_so(name):
    structs = jax.eval_shape(lambda: {"l": {"w": jnp.ones((64, 32)), "b": jnp.ones(32)}})
    with pytest.raises(TypeError, match="^l/[wb]: has no values, but is a jax.ShapeDtypeStruct"):
        ON_VALUES[name](structs)
    if name not in ("get_adapter", "compare"):
        jax.eval_shape(ON_VALUES[name], structs)


def test_a_creator_says_once_what_is_a_stack():
    def model(x):
        with hk.custom_creator(hki.quantize_creator("int8")):
            for name in ("first", "second"):
                w = hk.get_parameter(name, [4, 2, 8], init=jnp.ones)
            return x @ w.sum(0)

    t = hki.transform_implicit(hk.transform(model))
    with hki.materialization("allow"):
        _, found = said(jax.eval_shape, t.init, jax.random.key(0), jnp.ones((1, 2)))
    assert len(found) == 1 and "~/first" in found[0] and "by matrix_axes=, such as {" in found[0]
