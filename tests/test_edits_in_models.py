"""`creator` and `getter`: any edit of parameters, inside a model as on the whole tree."""

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
from tests.tiers import few

X = jax.random.normal(jax.random.key(0), (4, 16))
KEY = jax.random.key(1)
part = functools.partial


def model(x):
    """Dense layers, and state."""
    x = hk.nets.MLP([16, 8], activation=jnp.tanh, b_init=jnp.ones)(x)
    hk.set_state("last", hk.get_state("last", (), init=jnp.zeros) + x.sum())
    return hk.Linear(6, name="head")(x)


def halved(params):
    """A function of a user, without anything of this library."""
    return {
        module: {n: 0.5 * w if n == "w" else w for n, w in own.items()}
        for module, own in params.items()
    }


def scaled(params):
    """A function of a user that makes a type of this library."""
    return {
        module: {
            n: hki.ScaledMatrix(w, 2 * jnp.ones(w.shape[:-1], w.dtype)) if n == "w" else w
            for n, w in own.items()
        }
        for module, own in params.items()
    }


def qlora(params):
    params = hki.quantize_params(params, dtype="int4", group_size=4)
    return hki.add_lora(hki.zero_params(params, targets="head/b"), 5, rank=2, alpha=4.0)


RULES = [QuantRule(module_path="head"), QuantRule(weight_qtype="int8", act_qtype="int8")]
EDITS = {
    "zeros": part(hki.zero_params, targets=".*/b"),
    "quantized": hki.quantize_params,
    "int4": part(hki.quantize_params, dtype="int4", group_size=4, targets=".*head/w", axis=-2),
    "rules": part(hki.quantize_params, rules=RULES),
    "lora": part(hki.add_lora, key=3, rank=2, alpha=4.0),
    "lora pissa": part(hki.add_lora, key=3, rank=2, init="pissa", targets="mlp/.*/w"),
    "dora": part(hki.add_adapter, key=3, method="dora", rank=2),
    "vera": part(hki.add_adapter, key=3, method="vera", rank=2),
    "ia3": part(hki.add_adapter, key=3, method=hki.adapters.IA3, targets="head/w"),
    "patterns": part(
        hki.add_adapter, key=3, method="lora", rank=2, patterns={"head/w": {"rank": 1}}
    ),
    "matrix axes": part(
        hki.add_lora, key=3, rank=2, targets="head/w", matrix_axes={"head/w": ([-2], [-1])}
    ),
    "qlora": qlora,
    "aware": part(hki.quantization_aware, rules=[QuantRule(weight_qtype="int4")]),
    "training": part(hki.quantized_training, rules=[QtRule(weight_qtype="int8")]),
    "a user's": halved,
    "a user's type": scaled,
}
FAST = ("zeros", "rules", "lora", "dora", "qlora", "a user's type")


def with_hook(put, hook, fun=model):
    def wrapped(x):
        with put(hook):
            return fun(x)

    return wrapped


def transformed(fun):
    return hki.transform_implicit(hk.without_apply_rng(hk.transform_with_state(fun)))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(y).max(initial=0)))


def as_dicts(tree):
    return {module: dict(own) for module, own in tree.items()}


def gradients(t, params, state):
    """Those of the floating leaves, with JAX's own `grad`."""
    leaves, structure = jax.tree.flatten(params)
    floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(own):
        new = [*leaves]
        for i, x in zip(floating, own, strict=True):
            new[i] = x
        return (t.apply(structure.unflatten(new), state, X)[0] ** 2).sum()

    return jax.jit(jax.grad(loss))([leaves[i] for i in floating])


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", few(EDITS, *FAST))
def test_a_creator_makes_the_tree_that_the_edit_makes(name):
    edit = EDITS[name]
    plain, t = transformed(model), transformed(with_hook(hk.custom_creator, hki.creator(edit)))
    dense, state = jax.jit(plain.init)(KEY, X)
    want = edit(as_dicts(dense))
    params, _ = jax.jit(t.init)(KEY, X)
    assert_same(as_dicts(params), want)
    shapes, _ = jax.eval_shape(t.init, KEY, X)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    out, _ = jax.jit(t.apply)(params, state, X)
    assert_same(out, jax.jit(plain.apply)(want, state, X)[0])
    assert_same(gradients(t, params, state), gradients(plain, want, state))


@pytest.mark.parametrize(
    "edit", [hki.quantize_params, EDITS["zeros"], part(hki.add_lora, rank=2, targets=".*/w")]
)
def test_stacked_layers(edit):
    """The creator sees one layer, and the tree has all of them."""

    def layers(x):
        return hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(16)(x)))(x)

    plain, t = (
        transformed(layers),
        transformed(with_hook(hk.custom_creator, hki.creator(edit), layers)),
    )
    (dense, _), (params, _) = (jax.jit(f.init)(KEY, X) for f in (plain, t))
    if "add_lora" in str(edit):
        (own,) = params.values()
        assert own["w"].a.shape == (3, 16, 2) and not np.array_equal(own["w"].a[0], own["w"].a[1])
    else:
        assert_same(as_dicts(params), edit(as_dicts(dense)))


def without_new(params):
    return {
        module: {n: w for n, w in own.items() if n in ("w", "b")} for module, own in params.items()
    }


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", few(EDITS, "zeros", "rules", "lora", "a user's type"))
def test_a_getter_computes_what_the_edit_of_the_tree_computes(name):
    edit = EDITS[name]

    def layers(x):  # a getter within a layer_stack does not see the final names
        return hk.Linear(6, name="head")(hk.nets.MLP([16, 8], activation=jnp.tanh)(x))

    plain = hki.transform_implicit(hk.without_apply_rng(hk.transform(layers)))
    t = with_hook(hk.custom_getter, hki.getter(edit), layers)
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(t)))
    params = as_dicts(jax.jit(t.init)(KEY, X))
    assert not any(
        isinstance(w, hki.ImplicitArray) for own in params.values() for w in own.values()
    )
    stored = without_new(params)
    assert_same(stored, as_dicts(jax.jit(plain.init)(KEY, X)))
    want = plain.apply(edit(stored), X)
    for apply in (t.apply, jax.jit(t.apply)):
        assert_same(apply(params, X), want)
    flags = hki.partition(edit(stored), trainable_dense=False)[0]
    added = len(jax.tree.leaves(params)) - len(jax.tree.leaves(stored))
    if name not in ("aware", "training", "a user's type"):  # whose trained array is the stored one
        assert added == len(jax.tree.leaves(flags))
    grads = jax.jit(jax.grad(lambda p: (t.apply(p, X) ** 2).sum()))(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.slow
def test_new_parameters_are_trained_as_in_the_tree():
    edit = part(hki.add_adapter, key=3, method="dora", rank=2)

    def layers(x):
        return hk.Linear(6, name="head")(x)

    plain = hki.transform_implicit(hk.without_apply_rng(hk.transform(layers)))
    t = with_hook(hk.custom_getter, hki.getter(edit), layers)
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(t)))
    params = as_dicts(t.init(KEY, X))
    assert set(params["head"]) == {"w", "b", "w_dora_a", "w_dora_b", "w_dora_magnitude"}
    params["head"]["w_dora_b"] = jnp.full((2, 6), 0.1)
    weight = edit(without_new(params))["head"]["w"]._replace(b=params["head"]["w_dora_b"])
    tree = {"head": {"w": weight, "b": params["head"]["b"]}}
    of_getter = jax.grad(lambda p: (t.apply(p, X) ** 2).sum())(params)["head"]
    of_tree = hki.grad(lambda p: (plain.apply(p, X) ** 2).sum())(tree)["head"]["w"]
    for field in ("a", "b", "magnitude"):
        assert_same(of_getter[f"w_dora_{field}"], getattr(of_tree, field))


@pytest.mark.parametrize(
    ("put", "old", "new"),
    [
        (hk.custom_creator, hki.lora_creator(2, alpha=4.0), part(hki.add_lora, rank=2, alpha=4.0)),
        (hk.custom_getter, hki.lora_getter(2, alpha=4.0), part(hki.add_lora, rank=2, alpha=4.0)),
        (
            hk.custom_creator,
            hki.quantize_creator("int4", group_size=4),
            part(hki.quantize_params, dtype="int4", group_size=4),
        ),
        (hk.custom_creator, hki.zeros_creator(".*/b"), part(hki.zero_params, targets=".*/b")),
    ],
)
def test_old_names_are_the_new_ones(put, old, new):
    hook = (hki.creator if put is hk.custom_creator else hki.getter)(new)
    one, two = (jax.jit(transformed(with_hook(put, h)).init)(KEY, X) for h in (old, hook))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_key_from_haiku_is_drawn_for_each_weight_that_needs_one():
    drawn = []

    def init(key, shape, dtype):
        drawn.append(shape)
        return jax.random.normal(key, shape, dtype)

    edit = part(hki.add_lora, rank=2, init=init, targets="mlp/.*/w")
    params, _ = transformed(with_hook(hk.custom_creator, hki.creator(edit))).init(KEY, X)
    assert drawn == [(16, 2), (16, 2)]
    first, second = (params[f"mlp/~/linear_{i}"]["w"].a for i in (0, 1))
    assert not np.array_equal(first, second)

    def own(params, key):
        return {m: {n: w + jax.random.normal(key(), w.shape) for n, w in p.items()} for m, p in params.items()}  # fmt: skip

    t = hki.transform_implicit(
        hk.transform(with_hook(hk.custom_getter, hki.getter(own), lambda x: hk.Linear(3)(x)))
    )
    params = t.init(KEY, X)
    one, again, other = (t.apply(params, jax.random.key(i), X) for i in (1, 1, 2))
    assert np.array_equal(one, again) and not np.allclose(one, other)


def test_a_type_around_another_form_of_the_stored_array_stores_nothing():
    """The array that the type would train is made of the stored one, at each use, with a key of its own."""

    def noisy(params, key):
        def of(w):
            w = w + jax.random.normal(key(), w.shape)
            return hki.ScaledMatrix(w, jnp.ones(w.shape[:1]))

        return {m: {n: of(w) if n == "w" else w for n, w in p.items()} for m, p in params.items()}

    fun = with_hook(hk.custom_getter, hki.getter(noisy), lambda x: hk.Linear(3)(x))
    t = hki.transform_implicit(hk.transform(fun))
    params = t.init(KEY, X)
    assert set(params["linear"]) == {"w", "b"}
    one, again, other = (t.apply(params, jax.random.key(i), X) for i in (1, 1, 2))
    assert np.array_equal(one, again) and not np.allclose(one, other)


def test_state_by_an_edit():
    def counted(x):
        hk.set_state("sum", hk.get_state("sum", (8, 8), init=jnp.ones) + 1)
        return x

    hook = hki.creator(hki.quantize_params)

    def wrapped(x):
        with hk.custom_creator(hook, params=False, state=True):
            return counted(x)

    _, state = transformed(wrapped).init(KEY, X)
    assert isinstance(state["~"]["sum"], hki.QuantizedMatrix)


def test_each_warning_comes_once():
    def both(params):
        return hki.add_lora(hki.quantize_params(params, group_size=32), 0, rank=7)

    hook = hki.creator(both)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jax.eval_shape(transformed(with_hook(hk.custom_creator, hook)).init, KEY, X)
    said = [str(w.message) for w in found]
    assert len(said) == 2 and "groups of 32" in said[0] and "the rank is larger" in said[1]
    assert all(w.filename == __file__ for w in found)


# --- errors --------------------------------------------------------------------------------------


def raised(edit, put=hk.custom_creator):
    hook = (hki.creator if put is hk.custom_creator else hki.getter)(edit)
    with pytest.raises((ValueError, TypeError, KeyError)) as found:
        transformed(with_hook(put, hook)).init(KEY, X)
    return found.value


@pytest.mark.parametrize("make", [hki.creator, hki.getter])
def test_what_is_no_function(make):
    with pytest.raises(TypeError, match="edit: expected a function of a tree of parameters, got 3"):
        make(3)


@pytest.mark.parametrize("put", [hk.custom_creator, hk.custom_getter])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda params: {"bank": {"w": 1}, **params},
            "edit: expected the parameter mlp/.*/w alone",
        ),
        (lambda params: {}, "edit: expected the parameter .*/w alone, got"),
        (
            lambda params: None,
            "edit: expected a function that returns a tree with mlp/.*, got None",
        ),
        (
            lambda params: jax.tree.map(jnp.transpose, params),
            r"in the shape \[16\], got|in the shape",
        ),
        (lambda params: params["head"], "head"),
        (
            part(hki.quantize_with_inputs, inputs={"head/w": np.ones((8, 8), np.float32)}),
            "have no head/w",
        ),
        (part(hki.add_adapter, method="vblora", rank=2), ""),
        (
            part(hki.add_adapter, method="vera", rank=2),
            "'vera': all weights share one key; give key=",
        ),
        (part(hki.quantize_params, dtyp="int4"), "unexpected keyword argument 'dtyp'"),
    ],
)
def test_an_edit_of_the_whole_tree_is_an_error(edit, message, put):
    error = raised(edit, put)
    assert re.search(message, str(error))
    assert "alone. An edit that needs the whole tree is for the parameters that init" in str(
        error.__notes__
    )


def test_frozen_arrays_need_a_key_that_apply_has():
    def edit(params, key):
        def noisy(n, w):
            noise = jax.random.normal(key(), (*w.shape[:-1], 1))
            return hki.LoRA(w + noise, noise, -jnp.ones((1, w.shape[-1]))) if n == "w" else w

        return {m: {n: noisy(n, w) for n, w in own.items()} for m, own in params.items()}

    error = raised(edit, hk.custom_getter)
    assert "do not become parameters depend on a random key from Haiku" in str(error)


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        part(hki.quantize_params, {"l": {"w": np.ones((4, 4), np.float32)}}),
        part(
            hki.quantize_with_inputs,
            {"l": {"w": np.ones((4, 4), np.float32)}},
            {"l/w": np.eye(4, dtype=np.float32)},
        ),
        hki.quantize_creator,
        hki.quantize_getter,
    ],
)
def test_an_unknown_option_is_named(function):
    with pytest.raises(TypeError, match="argument 'bits': expected an option of Quant.*group_size"):
        function(bits=4)


def test_options_are_in_help():
    for function in (hki.quantize_params, hki.quantize_with_inputs):
        text = function.__doc__
        assert "`QuantizedMatrix.quantize` documents" in text
        names = hki.QuantizedMatrix.quantize.__annotations__.keys()
        for name in names & {"dtype", "group_size", "zero_point", "calibration", "scale_dtype"}:
            assert f"`{name}`" in text


def test_an_initializer_of_haiku_draws_the_factors_of_a_getter():
    """`apply` without a key does not run it for the parameters that exist."""
    kinds = []

    def init(key, shape, dtype):
        kinds.append(key.dtype)
        return hk.initializers.RandomNormal()(shape, dtype)

    def model(x):
        with hk.custom_getter(hki.lora_getter(2, init=init)):
            return hk.Linear(3)(x)

    t, x = hki.transform_implicit(hk.transform(model)), jnp.ones((2, 4))
    params = t.init(jax.random.PRNGKey(0), x)
    y = jax.jit(t.apply)(params, None, x)
    np.testing.assert_allclose(t.apply(params, None, x), y, rtol=1e-6)
    assert np.abs(params["linear"]["w_lora_a"]).min() > 0 and kinds


def test_factors_of_a_getter_are_no_targets_of_a_creator():
    def model(x):
        zeros = hk.custom_creator(hki.zeros_creator(True))
        with zeros, hk.custom_getter(hki.lora_getter(2)):
            return hk.Linear(3)(x)

    t = hki.transform_implicit(hk.transform(model))
    params = t.init(jax.random.PRNGKey(0), jnp.ones((2, 4)))["linear"]
    assert isinstance(params["w"], hki.Zeros) and isinstance(params["b"], hki.Zeros)
    assert np.abs(params["w_lora_a"]).min() > 0


@pytest.mark.slow
def test_an_edit_that_takes_keys_from_haiku_itself_gets_those_of_the_model():
    """Each use has another key, and without a key of the model there is none."""

    def noisy(params):
        return jax.tree.map(lambda w: w + jax.random.normal(hk.next_rng_key(), w.shape), params)

    def model(x):
        with hk.custom_getter(hki.getter(noisy)):
            return hk.Linear(3)(x)

    t, x = hki.transform_implicit(hk.transform(model)), jnp.ones((2, 4))
    params = t.init(KEY, x)
    one, same, two = (jax.jit(t.apply)(params, jax.random.key(i), x) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - two).min() > 1e-3
    with pytest.raises(ValueError, match="PRNGKey"):
        t.apply(params, None, x)


@pytest.mark.slow
def test_each_step_rounds_by_another_key_in_a_getter():
    rule = QtRule(weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")

    def model(x):
        with hk.custom_getter(hki.quantized_training_getter([rule])):
            return hk.Linear(8)(x)

    t, x = hki.transform_implicit(hk.transform(model)), jax.random.normal(KEY, (16, 12))
    params = t.init(KEY, x)
    grad = jax.jit(jax.grad(lambda p, key: (t.apply(p, key, x) ** 2).sum()))
    one, same, two = (grad(params, jax.random.key(i))["linear"]["w"] for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - two).max() > 1e-4
