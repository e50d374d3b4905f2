"""`convert_trained`: the outputs of training, for every product that training quantizes; or a warning."""

import dataclasses
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule
from tests import random_arrays
from tests.tiers import few

RULES = {
    "int8": QtRule(weight_qtype="int8", act_qtype="int8"),
    "int4": QtRule(weight_qtype="int4", act_qtype="int8"),
    "weights": QtRule(weight_qtype="int4"),
    "nf4": QtRule(weight_qtype="nf4"),
    "offset": QtRule(weight_qtype="int4", weight_calibration_method="minmax"),
    "tiles": QtRule(weight_qtype="int4", act_qtype="int8", tile_size=4),
    "tensor": QtRule(weight_qtype="int8", act_qtype="int8", disable_channelwise_axes=True),
}
INIT = hk.initializers.RandomNormal()


def normal(*shape, seed=1):
    return random_arrays.normal(shape, seed)


def weight(*shape, name="w"):
    return hk.get_parameter(name, shape, init=INIT)


def convolve(x, w, numbers=("NHWC", "HWIO", "NHWC"), **options):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **options)


IMAGE, ROWS = normal(2, 6, 5, 8), normal(4, 16)

# A model, its input, and whether it computes `x @ w` (or has a kernel with the outputs last).
CONVOLUTIONS = {
    "Conv2D": (hk.Conv2D, {}, True),
    "Conv2D, strides": (hk.Conv2D, dict(stride=2, padding="VALID"), True),
    "Conv2D, dilated": (hk.Conv2D, dict(rate=2), True),
    "Conv2D, groups": (hk.Conv2D, dict(feature_group_count=2), True),
    "Conv2D, NCHW": (hk.Conv2D, dict(data_format="NCHW"), True),
    "Conv2DTranspose": (hk.Conv2DTranspose, dict(stride=2), False),
    "Conv2DTranspose, VALID": (hk.Conv2DTranspose, dict(padding="VALID"), False),
    "Conv2DTranspose, NCHW": (hk.Conv2DTranspose, dict(data_format="NCHW"), False),
    "Conv1D": (hk.Conv1D, {}, None),
    "Conv1DTranspose": (hk.Conv1DTranspose, {}, None),
    "Conv3D": (hk.Conv3D, {}, True),
    "Conv3DTranspose": (hk.Conv3DTranspose, {}, False),
}
IMAGES = {1: normal(2, 5, 8), 2: IMAGE, 3: normal(2, 3, 4, 3, 8)}


def of_module(module, options, plain):
    x = IMAGES[int(module.__name__[4])]
    if "data_format" in options:
        x = jnp.moveaxis(x, -1, 1)
    return lambda x: module(12, 3, **options)(x), x, plain


def of_einsum(equation, *shapes, plain):
    """`None` stands for the weight: a warning needs 2 axes, an error is given for 3."""
    x, w = shapes

    def first(x):
        return jnp.einsum(equation, x, weight(*w))

    def second(x):
        a, b = equation.split("->")[0].split(",")
        return jnp.einsum(f"{b},{a}->{equation.split('->')[1]}", weight(*w), x)

    return (first, normal(*x), plain), (second, normal(*x), plain)


EINSUMS = {
    "bi,io->bo": ((4, 16), (16, 8), True),
    "bi,oi->bo": ((4, 16), (8, 16), False),
    "bthc,hca->bta": ((2, 3, 2, 8), (2, 8, 4), None),
    "bta,ahc->bthc": ((2, 3, 16), (16, 2, 4), None),
    "bta,hac->bthc": ((2, 3, 16), (2, 16, 4), None),
    "ebd,edf->ebf": ((3, 4, 16), (3, 16, 8), None),
    "ebd,efd->ebf": ((3, 4, 16), (3, 8, 16), None),
    "bgi,goi->bgo": ((3, 2, 16), (2, 8, 16), None),
    "bijk,ijkl->bl": ((3, 2, 4, 8), (2, 4, 8, 4), True),
    "bhc,hcjk->bjk": ((3, 4, 8), (4, 8, 2, 8), False),
}

MODELS = {
    **{name: of_module(*own) for name, own in CONVOLUTIONS.items()},
    "batch groups": (lambda x: convolve(x, weight(3, 3, 8, 16), batch_group_count=2), IMAGE, True),
    "depthwise": (lambda x: hk.DepthwiseConv2D(2, 3)(x), IMAGE, True),
    "outputs first": (
        lambda x: convolve(x, weight(12, 8, 3, 3), ("NHWC", "OIHW", "NHWC")),
        IMAGE,
        False,
    ),
    "kernel first": (lambda x: convolve(weight(4, 6, 5, 8), x), normal(3, 3, 8, 4), False),
    "Linear": (lambda x: hk.Linear(8)(x), ROWS, True),
    "two layers": (lambda x: hk.nets.MLP([16, 8])(x), ROWS, True),
    "x @ w.T": (lambda x: x @ weight(8, 16).T, ROWS, False),
    "w @ x": (lambda x: weight(8, 16) @ x.T, ROWS, False),
    "w.T @ x": (lambda x: weight(16, 8).T @ x.T, ROWS, True),
    **{
        f"{name}, {'weights first' if i else 'weights last'}": model
        for name, own in EINSUMS.items()
        for i, model in enumerate(of_einsum(name, *own[:2], plain=own[2]))
    },
    "experts": (
        lambda x: jax.lax.ragged_dot(x, weight(3, 16, 8), jnp.array([1, 2, 1])),
        ROWS,
        None,
    ),
    "vmap": (
        lambda x: jax.vmap(jnp.dot)(x, weight(3, 16, 8)),
        normal(3, 4, 16),
        None,
    ),
    "layers": (lambda x: hk.experimental.layer_stack(3)(hk.Linear(16))(x), ROWS, True),
    "layers by name": (
        lambda x: hk.experimental.layer_stack(3, name="blocks")(hk.Linear(16))(x),
        ROWS,
        None,
    ),
    "columns": (lambda x: x @ weight(16, 8)[:, :4], ROWS, True),
    "heads": (
        lambda x: jnp.einsum("bi,ihc->bhc", x, weight(16, 8).reshape(16, 2, 4)),
        ROWS,
        True,
    ),
    "GRU": (lambda x: hk.GRU(16)(x, jnp.ones((4, 16)))[0], ROWS, True),
}
# No tiles of four: axes that are shorter, or not the one that is stored in groups.
NO_TILES = (
    "depthwise",
    "outputs first",
    "kernel first",
    *(f"{e}, weights {i}" for e in ("bthc,hca->bta", "bhc,hcjk->bjk") for i in ("first", "last")),
)
# A matrix does not have the scales of training if neither of its axes shares them alone; and parts of a
# weight have scales of their own.
NOT_STORED = ("outputs first", "kernel first", ("columns", "tensor"), ("GRU", "tensor"))
# Activations of a second product: the largest one of a row is a tie between two codes, and the last bit
# of the first product decides it.
CHAINS = ("layers", "layers by name", "GRU", "two layers")
QUICK = ("Conv2DTranspose", "x @ w.T", "bthc,hca->bta, weights first")


def trained_of(model, x, rule, *, apply):
    """The outputs of training, the outputs of the stored weights, and the warnings."""
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    params = t.init(jax.random.key(0), x)
    # Rows and columns of different sizes, so that codes show which share a scale.
    sizes = lambda n, seed: jnp.exp(normal(n, seed=seed))  # noqa: E731
    params = jax.tree.map(
        lambda w: w * sizes(w.shape[-1], 5) * sizes(w.shape[-2], 6)[:, None] if w.ndim > 1 else w,
        params,
    )
    trained = hki.quantized_training(params, [rule])
    want = t.apply(trained, x)
    options = dict(apply=t.apply, args=(x,)) if apply else {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stored = hki.convert_trained(trained, **options)
        got = t.apply(stored, x)
    return want, got, [str(w.message) for w in said], stored


def error_of(want, got):
    want, got = (np.asarray(x, np.float64) for x in (want, got))
    return np.abs(want - got).max() / np.abs(want).max()


@pytest.mark.every(3)
@pytest.mark.combinations
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", few(MODELS, *QUICK))
def test_outputs_are_those_of_training(name, rule):
    """With the model at hand, codes and scales are those of its product, and nothing is to be said."""
    model, x, _ = MODELS[name]
    if rule == "tiles" and name in NO_TILES:
        with pytest.raises(ValueError, match="tile_size"):
            trained_of(model, x, RULES[rule], apply=True)
        return
    want, got, said, stored = trained_of(model, x, RULES[rule], apply=True)
    if (name in NOT_STORED and rule != "tensor") or (name, rule) in NOT_STORED:
        assert len(said) == 1 and error_of(want, got) > 1e-3
        return
    assert not said
    if name not in CHAINS or RULES[rule].act_qtype is None:
        assert error_of(want, got) < 3e-6
    kinds = {row.path: row.kind for row in hki.summary(stored).rows}
    assert all("ConvertedMatrix" in kind for path, kind in kinds.items() if "/w" in path), kinds


@pytest.mark.every(3)
@pytest.mark.parametrize("name", few(MODELS, *QUICK))
def test_without_the_model_it_says_what_differs(name):
    model, x, plain = MODELS[name]
    if plain is None:
        with pytest.raises(ValueError, match=r"/w .*three axes .*apply="):
            trained_of(model, x, RULES["int4"], apply=False)
        return
    rule = RULES["weights" if name in CHAINS else "int4"]
    want, got, said, _ = trained_of(model, x, rule, apply=False)
    if plain:
        assert not said and error_of(want, got) < 3e-6
    else:
        assert error_of(want, got) > 1e-2
        [said] = said
        assert "/w: the outputs differ from those of quantized training" in said
        assert "convert_trained(params, apply=..., args=...)" in said


def both_ways(x):
    w = weight(16, 8)
    return jnp.tanh(x @ w) @ w.T


def tied(ids):
    table = weight(8, 16)
    return jnp.tanh(table[ids]) @ table.T


ONLY_IN_PART = {
    "both ways": (both_ways, ROWS, "sums"),
    "tied": (tied, jnp.arange(4), "looks up its rows"),
    "looked up": (lambda ids: hk.Embed(8, 16)(ids), jnp.arange(4), "looks up its rows"),
    "scaled": (lambda x: x @ (weight(16, 8) * 0.3), ROWS, "'mul' changes it"),
    "negative": (lambda x: x @ -weight(16, 8), ROWS, "'neg' changes it"),
    "cast": (lambda x: x @ weight(16, 8).astype(jnp.bfloat16), ROWS, "cast to bfloat16"),
    "rows": (lambda x: x @ weight(32, 8)[:16], ROWS, "'slice' changes the length"),
    "joined": (
        lambda x: x @ jnp.concatenate([weight(8, 8), weight(8, 8, name="v")]),
        ROWS,
        "'concatenate' changes the length",
    ),
    "two weights": (lambda x: x @ (weight(16, 4) @ weight(8, 4, name="v").T), ROWS, "sums"),
}


@pytest.mark.parametrize("apply", [True, False])
@pytest.mark.parametrize("name", few(ONLY_IN_PART, "both ways", "looked up"))
def test_what_no_stored_weight_does_is_said(name, apply):
    model, x, reason = ONLY_IN_PART[name]
    *_, said, _ = trained_of(model, x, RULES["weights"], apply=apply)
    if apply and name == "two weights":  # both are found in their own product
        assert not said
        return
    assert len(said) in (1, 2) and reason in said[0]
    assert "the outputs differ from those of quantized training" in said[0]


# What a model may do to a weight `[16, 8]` before its product with `[..., 16]`, or beside it.
CHANGES = {
    "number added": lambda w: w + 0.1,
    "row added": lambda w: w + 0.1 * jnp.arange(8.0),
    "dense added": lambda w: w + 0.1 * jnp.ones((16, 8)),
    "subtracted": lambda w: 1 - w,
    "centred": lambda w: w - w.mean(0),
    "standardized": lambda w: (w - w.mean(0)) / w.std(0),
    "normalized": lambda w: w / jnp.linalg.norm(w, axis=0),
    "every second row": lambda w: w[::2],
    "every second column": lambda w: w[:, ::2],
    "reversed": lambda w: w[::-1],
    "rolled": lambda w: jnp.roll(w, 1, 1),
    "rows looked up": lambda w: w[jnp.array([0, 2, 5, 5])],
    "tanh": jnp.tanh,
    "abs": jnp.abs,
    "clipped": lambda w: jnp.clip(w, -1, 1),
    "padded": lambda w: jnp.pad(w, ((0, 0), (0, 2))),
    "chosen": lambda w: jnp.where(jnp.arange(8) > 3, w, 0),
    "tiled": lambda w: jnp.tile(w, (1, 2)),
    "written into": lambda w: w.at[0].set(0),
    "squared": lambda w: w**2,
    "sorted": lambda w: jnp.sort(w, 0),
    "cumulated": lambda w: jnp.cumsum(w, 0),
    "a row of sums": lambda w: jnp.broadcast_to(w.sum(1, keepdims=True), w.shape),
}


def of_change(change):
    def model(x):
        w = change(weight(16, 8))
        return x[:, : w.shape[0]] @ w

    return model


CHANGED = {name: (of_change(change), ROWS) for name, change in CHANGES.items()} | {
    "penalty": (lambda x: x @ weight(16, 8) + (weight(16, 8) ** 2).sum(), ROWS),
    "largest": (lambda x: x @ weight(16, 8) + weight(16, 8).max(), ROWS),
    "block diagonal": (
        lambda x: jnp.einsum("bgi,gio->bgo", x.reshape(4, 2, 8), weight(16, 8).reshape(2, 8, 8)),
        ROWS,
    ),
    "summed by the einsum": (lambda x: jnp.einsum("bi,oi->b", x, weight(4, 16)), ROWS),
    "kernel summed": (lambda x: jnp.einsum("nhwi,abio->nhwo", x, weight(3, 3, 8, 6)), IMAGE),
    "kernel cut": (lambda x: convolve(x, weight(4, 4, 8, 6)[::2, ::2]), IMAGE),
    "kernel reversed": (lambda x: convolve(x, weight(3, 3, 8, 6)[::-1]), IMAGE),
    "diagonal": (lambda x: x * jnp.diagonal(weight(16, 16)), ROWS),
    "experts": (
        lambda x: jnp.einsum("bi,bio->bo", x, weight(3, 16, 8)[jnp.array([0, 2, 1, 1])]),
        ROWS,
    ),
    "an expert": (lambda x: x @ weight(3, 16, 8)[jnp.array(1)], ROWS),
    "two experts": (
        lambda x: jnp.einsum("bi,kio->bko", x, weight(3, 16, 8)[jnp.array([0, 2])]),
        ROWS,
    ),
}
QUICKLY_CHANGED = ("number added", "tanh", "experts")


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", few(["int4", "tiles", "tensor", "static"], "int4", "static"))
@pytest.mark.parametrize("name", few(CHANGED, *QUICKLY_CHANGED))
def test_a_weight_that_is_changed_has_the_outputs_of_training_or_it_is_said(
    name, rule, may_be_dense
):
    model, x = CHANGED[name]
    run = (
        static_of if rule == "static" else lambda *args: trained_of(*args, RULES[rule], apply=True)
    )
    try:
        want, got, said, _ = run(model, x)
    except ValueError as e:  # a product of training that rounds nothing counts nothing
        assert rule == "static" and "under 'quant_stats'; there are those of: nothing" in str(e)
        return
    said = [text for text in said if "the outputs differ from those of quantized training" in text]
    assert said or error_of(want, got) < 3e-6


def static_of(model, x):
    """As `trained_of`, with static scales of activations."""
    rule = dataclasses.replace(RULES["int4"], act_static_scale=True)
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    params = hki.quantized_training(t.init(jax.random.key(0), x), [rule])
    _, state = hki.with_quant_stats(t).apply(params, {}, x)
    want = hki.with_quant_stats(t, update=False).apply(params, state, x)[0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stored = hki.convert_trained(params, state, apply=t.apply, args=(x,))
        got = t.apply(stored, x)
    return want, got, [str(w.message) for w in said], stored


ONE_CHANNEL = {
    "Conv1D": (lambda x: hk.Conv1D(6, 3)(x), normal(4, 9, 1)),
    "DepthwiseConv1D": (lambda x: hk.DepthwiseConv1D(2, 3)(x), normal(4, 9, 8)),
    "Conv2DTranspose": (lambda x: hk.Conv2DTranspose(6, 3)(x), normal(2, 6, 5, 1)),
    "x @ w.T": (lambda x: x @ weight(8, 1).T, normal(4, 1)),
    "one output": (lambda x: x @ weight(1, 16).T, ROWS),
    "groups": (lambda x: jnp.einsum("bgi,goi->bgo", x[:, :, None], weight(16, 8, 1)), ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_CHANNEL)
def test_axes_of_length_one(name):
    want, got, said, _ = trained_of(*ONE_CHANNEL[name], RULES["int4"], apply=True)
    assert not said and error_of(want, got) < 3e-6


def test_it_is_said_again_where_a_trace_is_used_again():
    """JAX keeps the trace of an einsum; each model that uses it hears of its own."""
    for _ in range(2):
        model = MODELS["bi,oi->bo, weights last"][0]
        assert len(trained_of(model, ROWS, RULES["weights"], apply=False)[2]) == 1


def test_tiles_of_several_axes():
    """Training shares the scale of a tile of the last contracted axis along the others."""
    t = hki.transform_implicit(
        hk.without_apply_rng(hk.transform(lambda x: jnp.einsum("bhc,hca->ba", x, weight(2, 8, 4))))
    )
    params = t.init(jax.random.key(0), normal(3, 2, 8))
    axes = {"~/w": ((-3, -2), (-1,))}
    trained = hki.quantized_training(params, [RULES["tiles"]], matrix_axes=axes)
    with pytest.warns(UserWarning, match="~/w: .* differ from those of quantized training: tiles"):
        hki.convert_trained(trained)


def test_static_scales():
    rule = dataclasses.replace(RULES["int8"], act_static_scale=True)
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(lambda x: x @ weight(8, 16).T)))
    params = hki.quantized_training(t.init(jax.random.key(0), ROWS), [rule])
    _, state = hki.with_quant_stats(t).apply(params, {}, ROWS)
    fixed = hki.with_quant_stats(t, update=False)
    want = fixed.apply(params, state, ROWS)[0]
    with pytest.warns(
        UserWarning, match="~/w: the outputs differ from those of quantized training"
    ):
        t.apply(hki.convert_trained(params, state), ROWS)
    stored = hki.convert_trained(
        params, state, apply=lambda p, x: fixed.apply(p, state, x), args=(ROWS,)
    )
    assert error_of(want, t.apply(stored, ROWS)) < 3e-6


@pytest.mark.slow
def test_files_keep_what_it_is(tmp_path):
    model, x, _ = MODELS["x @ w.T"]
    want, _, _, stored = trained_of(model, x, RULES["int4"], apply=True)
    hki.save(tmp_path / "model", stored)
    loaded = hki.load(tmp_path / "model")
    assert jax.tree.structure(loaded) == jax.tree.structure(stored)
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    assert error_of(want, t.apply(loaded, x)) < 3e-6
