"""Creators and getters: what `init` stores, what the model sees, and where they act."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.haiku_models import MODELS, RNG, TOLERANCE, X, noise, quick_jit
from tests.tiers import few

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def assert_close(a, b):
    a, b = hki.materialize((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(close, a, b)


def within(context, fun):
    """A function run within a Haiku context manager, made anew by `context()`."""

    def wrapped(*args):
        with context():
            return fun(*args)

    return wrapped


def creating(creator, fun, **kinds):
    return within(lambda: hk.custom_creator(creator, **kinds), fun)


def getting(getter, fun, **kinds):
    return within(lambda: hk.custom_getter(getter, **kinds), fun)


def types_of(tree):
    """`{'module/name': type name}` of the implicit parameters."""
    return {
        f"{m}/{n}": type(v).__name__
        for m, n, v in hk.data_structures.traverse(tree)
        if isinstance(v, hki.ImplicitArray)
    }


def mlp(x):
    return hk.nets.MLP([5, 3], activation=jnp.tanh, b_init=jnp.ones)(x)


W = {"mlp/~/linear_0/w", "mlp/~/linear_1/w"}
B = {"mlp/~/linear_0/b", "mlp/~/linear_1/b"}

CREATORS = {
    "zeros": (lambda **kw: hki.zeros_creator(**{"targets": r".*/b", **kw}), "Zeros", B),
    "lora": (lambda **kw: hki.lora_creator(rank=2, alpha=1.0, **kw), "LoRA", W),
    "int8": (lambda **kw: hki.quantize_creator("int8", **kw), "QuantizedMatrix", W),
    "int4": (
        lambda **kw: hki.quantize_creator("int4", zero_point=True, **kw),
        "QuantizedMatrix",
        W,
    ),
    "nf4": (lambda **kw: hki.quantize_creator("nf4", axis=-1, **kw), "QuantizedMatrix", W),
}
GETTERS = {
    "zeros": (lambda **kw: hki.zeros_getter(**{"targets": r".*/b", **kw}), "Zeros", B),
    "lora": (lambda **kw: hki.lora_getter(rank=2, alpha=1.0, **kw), "LoRA", W),
    "int8": (lambda **kw: hki.quantize_getter("int8", **kw), "QuantizedMatrix", W),
}


@pytest.mark.parametrize("name", few(CREATORS, "zeros", "lora", "int8"))
def test_creator(name):
    make, kind, default = CREATORS[name]
    plain = hk.transform(creating(make(), mlp))
    t = hki.transform_implicit(plain)
    params = quick_jit(t.init)(RNG, X)
    assert types_of(params) == dict.fromkeys(default, kind)
    # With nothing of this library around it, the model has the same parameters, dense.
    assert_close(quick_jit(plain.init)(RNG, X), params)
    shapes = jax.eval_shape(t.init, RNG, X)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert_close(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, shapes))
    params = noise(params)
    expected = quick_jit(plain.apply)(hki.materialize(params), None, X)
    for apply in (t.apply, quick_jit(t.apply)):
        assert_close(apply(params, None, X), expected)


def test_creator_eagerly():
    t = hki.transform_implicit(hk.transform(creating(hki.lora_creator(rank=2), mlp)))
    assert_close(t.init(RNG, X), quick_jit(t.init)(RNG, X))


@pytest.mark.parametrize("name", GETTERS)
def test_getter(name):
    make, kind, default = GETTERS[name]
    plain = hk.transform(getting(make(), mlp))
    t = hki.transform_implicit(plain)
    params = quick_jit(t.init)(RNG, X)
    assert not types_of(params)
    assert_close(quick_jit(plain.init)(RNG, X), params)
    params = noise(params)
    out = t.apply(params, None, X)
    assert_close(quick_jit(plain.apply)(params, None, X), out)
    assert_close(quick_jit(t.apply)(params, None, X), out)
    by_hand = dict(hk.data_structures.filter(lambda m, n, v: "_lora_" not in n, params))
    if name == "lora":
        for m, n, w in hk.data_structures.traverse(by_hand):
            if n == "w":
                by_hand[m]["w"] = hki.LoRA(w, params[m]["w_lora_a"], params[m]["w_lora_b"], 1.0)
    elif name == "zeros":
        by_hand = hki.zero_params(by_hand, targets=".*/b")
    else:
        by_hand = hki.quantize_params(by_hand)
    of_hand = hki.transform_implicit(hk.transform(mlp))
    assert_close(out, quick_jit(of_hand.apply)(by_hand, None, X))


def test_getters_value_is_implicit():
    """What the model sees is handled by rules, not made dense."""
    for name in ("zeros", "lora"):
        t = hki.transform_implicit(hk.transform(getting(GETTERS[name][0](), mlp)))
        params = t.init(RNG, X)
        with hki.materialization("error"):
            jax.jit(t.apply)(params, None, X)


def test_lora_getter_trains_its_factors_alone():
    t = hki.transform_implicit(hk.transform(getting(hki.lora_getter(2, alpha=4.0), mlp)))
    params = noise(t.init(RNG, X))
    assert set(params["mlp/~/linear_0"]) == {"w", "b", "w_lora_a", "w_lora_b"}

    def loss(params):
        return (t.apply(params, None, X) ** 2).sum()

    def dense_loss(params):
        for p in (params := jax.tree.map(lambda x: x, params)).values():
            p["w"] = p["w"] + 2.0 * p.pop("w_lora_a") @ p.pop("w_lora_b")
        return (hk.transform(mlp).apply(params, None, X) ** 2).sum()

    assert_close(*(quick_jit(jax.grad(f))(params) for f in (loss, dense_loss)))


def test_getters_keep_to_other_getters_and_do_not_recurse():
    """A cast around it reaches the weight and both factors; the factors get no factors of their own."""

    def cast(next_getter, value, context):
        return next_getter(value.astype(jnp.bfloat16))

    def f(x):
        with hk.custom_getter(cast), hk.custom_getter(hki.lora_getter(1, targets=".*")):
            return x.astype(jnp.bfloat16) @ hk.get_parameter("w", (4, 3), init=jnp.ones)

    t = hki.transform_implicit(hk.transform(f))
    params = t.init(RNG, X)
    stored = {k: v.dtype.name for k, v in params["~"].items()}
    assert stored == dict.fromkeys(("w", "w_lora_a", "w_lora_b"), "float32")
    assert t.apply(params, None, X).dtype == jnp.bfloat16


def test_quantizing_creator_leaves_the_factors_of_a_getter_alone():
    def f(x):
        with (
            hk.custom_creator(hki.quantize_creator(targets=".*w.*")),
            hk.custom_getter(hki.lora_getter(2)),
        ):
            return mlp(x)

    params = hki.transform_implicit(hk.transform(f)).init(RNG, X)
    assert types_of(params) == dict.fromkeys(W, "QuantizedMatrix")


def test_qlora_by_two_creators():
    def f(x):
        with hk.custom_creator(hki.lora_creator(rank=2)), hk.custom_creator(hki.quantize_creator()):
            return mlp(x)

    t = hki.transform_implicit(hk.transform(f))
    params = t.init(RNG, X)
    assert types_of(params) == dict.fromkeys(W, "LoRA")
    assert isinstance(params["mlp/~/linear_0"]["w"].w, hki.QuantizedMatrix)
    params = noise(params)
    assert_close(
        t.apply(params, None, X), hk.transform(mlp).apply(hki.materialize(params), None, X)
    )


def test_zeros_creator_around_lora_creator():
    def f(x):
        with (
            hk.custom_creator(hki.lora_creator(rank=2)),
            hk.custom_creator(hki.zeros_creator(targets=".*/w")),
        ):
            return mlp(x)

    params = hki.transform_implicit(hk.transform(f)).init(RNG, X)
    assert isinstance(params["mlp/~/linear_0"]["w"].w, hki.Zeros)


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["creator", "getter"])
@pytest.mark.parametrize("kind", ["zeros", "lora", "int8"])
def test_state(kind, name):
    """Creators and getters of `hk.get_state`."""

    def f(x):
        w = hk.get_state("w", (4, 3), init=hk.initializers.RandomNormal())
        hk.set_state("last", x.sum())
        return x @ w

    options = dict(targets=".*/w")
    table, wrap = (CREATORS, creating) if name == "creator" else (GETTERS, getting)
    make, type_name, _ = table[kind]
    plain = hk.transform_with_state(wrap(make(**options), f, params=False, state=True))
    t = hki.transform_implicit(plain)
    params, state = t.init(RNG, X)
    assert types_of(state) == ({"~/w": type_name} if name == "creator" else {})
    params, state = noise(params), noise(state)
    out, after = t.apply(params, state, None, X)
    expected = plain.apply(params, hki.materialize(state), None, X)
    assert_close((out, after), expected)
    assert types_of(after) == types_of(state)
    if name == "getter" and kind == "lora":
        assert set(params["~"]) == {"w_lora_a", "w_lora_b"}


# --- within Haiku's features ------------------------------------------------------------------


@pytest.mark.every(6)
@pytest.mark.combinations
@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("where", ["creator", "getter"])
@pytest.mark.parametrize("name", MODELS)
def test_feature(name, where):
    """LoRA in each model of the table, by a creator and by a getter."""
    fun = MODELS[name]
    wrapped = (
        creating(hki.lora_creator(2), fun)
        if where == "creator"
        else getting(hki.lora_getter(2), fun)
    )
    t = hki.transform_implicit(hk.transform_with_state(wrapped))
    params, state = quick_jit(t.init)(RNG, X)
    params, plain = noise(params), hk.transform_with_state(wrapped)
    if where == "creator":
        weights = [v for _, n, v in hk.data_structures.traverse(params) if n in ("w", "embeddings")]
        assert weights and all(isinstance(w, hki.LoRA) for w in weights)
    else:
        assert any(n.endswith("_lora_b") for _, n, _ in hk.data_structures.traverse(params))
    tolerance = TOLERANCE.get(name, 1e-4)
    expected = quick_jit(plain.apply)(hki.materialize(params), state, RNG, X)
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance / 10)
    jax.tree.map(close, quick_jit(t.apply)(params, state, RNG, X), expected)


def test_names_are_final_ones_for_creators():
    names = []

    def predicate(module_name, name, value):
        names.append(f"{module_name}/{name}")
        assert value.dtype == jnp.float32
        return False

    for model in ("lift", "transparent_lift", "name_scope", "layer_stack", "renamed"):
        names.clear()
        t = hk.transform_with_state(creating(hki.lora_creator(2, targets=predicate), MODELS[model]))
        params, _ = jax.eval_shape(t.init, RNG, X)
        stored = {f"{m}/{n}" for m, n, _ in hk.data_structures.traverse(params)}
        assert stored == set(names), model


def test_default_targets():
    def f(x):
        x = hk.Linear(4)(x)
        hk.Embed(5, 4)(jnp.zeros(2, int))
        hk.Bias(bias_dims=[1])(x)
        hk.Conv2D(3, 2)(jnp.ones((1, 4, 4, 4)))
        hk.get_parameter("table", (4, 4), jnp.int32, init=jnp.zeros)
        hk.LayerNorm(-1, True, True)(x)
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    t = hki.transform_implicit(hk.transform_with_state(creating(hki.lora_creator(3), f)))
    params, _ = jax.eval_shape(t.init, RNG, X)
    assert set(types_of(params)) == {"linear/w", "embed/embeddings", "conv2_d/w"}
    conv = params["conv2_d"]["w"]
    assert (conv.a.shape, conv.b.shape) == ((2, 2, 4, 3), (2, 2, 3, 3))
    t = hk.transform(creating(hki.lora_creator(2), MODELS["layer_stack"]))
    stacked = quick_jit(hki.transform_implicit(t).init)(RNG, X)
    assert set(types_of(stacked)) == {"__layer_stack_no_per_layer/linear/w"}
    assert stacked["__layer_stack_no_per_layer/linear"]["w"].shape == (3, 4, 4)
    a = stacked["__layer_stack_no_per_layer/linear"]["w"].a
    assert not np.allclose(a[0], a[1]), "each layer has a key of its own"


def test_factors_are_drawn_as_documented():
    def drawn(**options):
        t = hk.transform(creating(hki.lora_creator(16, **options), lambda x: hk.Linear(32)(x)))
        return hki.transform_implicit(t).init(RNG, jnp.ones((1, 64)))["linear"]["w"]

    w = drawn()
    assert not np.any(w.b)
    assert np.abs(w.a).max() <= 1 / 8
    close(np.std(w.a), 1 / 8 / np.sqrt(3), rtol=0.1)
    assert not np.array_equal(w.a, drawn(targets="linear/w").w[:, :16])
    w = drawn(init=jax.nn.initializers.ones, alpha=8)
    np.testing.assert_array_equal(w.a, 1)
    assert w.scale == 0.5


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [hki.lora_creator, hki.lora_getter])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(rank=0), ValueError, "rank: expected a positive integer, got 0"),
        (dict(rank=2.5), ValueError, r"rank: expected a positive integer, got 2\.5"),
        (dict(rank=True), ValueError, "rank: .*True"),
        (dict(rank="4"), ValueError, "rank: .*'4'"),
        (dict(rank=2, alpha=float("nan")), ValueError, "alpha: expected None or a finite number"),
        (dict(rank=2, alpha="1"), ValueError, "alpha: .*'1'"),
        (dict(rank=2, targets=3), TypeError, "targets: expected a regular expression"),
        (dict(rank=2, targets="*/w"), ValueError, r"targets: '\*/w' is not a regular expression"),
    ],
)
def test_bad_lora_options(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize("wrap", [creating, getting])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(rank=4, targets=".*"),
            r"linear/w \(float32\[4,3\]\): LoRA of rank 4 does not fit; .* 3 at most",
        ),
        (dict(rank=2, targets=".*/b"), r"linear/b: LoRA needs a floating-point .* float32\[3\]"),
    ],
)
def test_chosen_parameters_that_do_not_fit(wrap, options, message):
    make = hki.lora_creator if wrap is creating else hki.lora_getter
    t = hki.transform_implicit(hk.transform(wrap(make(**options), lambda x: hk.Linear(3)(x))))
    with pytest.raises(ValueError, match=message):
        t.init(RNG, X)


@pytest.mark.parametrize("make", [hki.quantize_creator, hki.quantize_getter])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(group_size=0),
            "group_size: expected None, .tensor., a positive integer or a pair of them, got 0",
        ),
        (dict(group_size=2.0), r"group_size: .*2\.0"),
        (dict(axis=0), "axis: expected -2 or -1, got 0"),
        (dict(dtype="int9"), "dtype: expected one of int8, .*int9"),
    ],
)
def test_bad_quantization_options(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("wrap", [creating, getting])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(group_size=3, targets=".*/w"), r"linear/w \(float32\[4,3\]\): .*3"),
        (dict(targets=".*/b"), r"linear/b: quantization needs .* float32\[3\]"),
    ],
)
def test_chosen_parameters_that_cannot_be_quantized(wrap, options, message):
    make = hki.quantize_creator if wrap is creating else hki.quantize_getter
    t = hki.transform_implicit(hk.transform(wrap(make(**options), lambda x: hk.Linear(3)(x))))
    with pytest.raises(ValueError, match=message):
        t.init(RNG, X)


@pytest.mark.parametrize("make", [hki.zeros_creator, hki.zeros_getter])
def test_zeros_need_targets(make):
    with pytest.raises(TypeError, match="targets"):
        make(None)
