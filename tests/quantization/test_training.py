"""Quantized and quantization-aware training of unmodified Haiku models, and the weights stored after it."""

import functools
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import (
    QtRule,
    QuantRule,
    conv_general_dilated,
    dot_general,
    ragged_dot,
)
from tests.tiers import few

MATRICES = (((1,), (0,)), ((), ()))
INT8 = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
NOISY = QtRule(weight_qtype="int8", bwd_qtype="int4", bwd_stochastic_rounding="uniform")

close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
pytestmark = pytest.mark.usefixtures("never_dense")


convert = jax.jit(hki.convert_trained)


def normal(shape, seed, dtype=jnp.float32):
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(drawn).astype(dtype)


def transformed(fun, jit=True):
    model = hki.transform_implicit(hk.transform(fun))
    return model if not jit else hk.Transformed(jax.jit(model.init), jax.jit(model.apply))


def mlp(x):
    return hk.nets.MLP([16, 8, 3])(x)


def mlp_by_hand(params, x, dot):
    """The model by hand, with a given product in place of `@`."""
    for i in range(3):
        layer = params[f"mlp/~/linear_{i}"]
        x = dot(x, layer["w"]) + layer["b"]
        x = x if i == 2 else jax.nn.relu(x)
    return x


def test_rules_of_both_classes_give_one_structure():
    params = {"l": {"w": jnp.ones((8, 6))}}
    rules = [kind(weight_qtype="int8", act_qtype="int8") for kind in (QtRule, QuantRule)]
    trees = [hki.quantized_training(params, [rule]) for rule in rules]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])


def matmul(rule, **options):
    return functools.partial(dot_general, dimension_numbers=MATRICES, rule=rule, **options)


def trees_close(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(functools.partial(close, **tolerance), a, b)


def values(tree):
    """A tree of parameters, or gradients by them, without our types."""
    return hki.tree_map_with_implicit(
        lambda x: x.value if isinstance(x, hki.TrainedQuantized | hki.FakeQuantized) else x, tree
    )


# --- quantized training --------------------------------------------------------------------------


TILED = QtRule(weight_qtype="int4", tile_size=4, bwd_qtype="int8", bwd_weight_grad_tile_size=2)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "rule, how",
    [
        pytest.param(INT8, "eager", marks=pytest.mark.slow),
        (INT8, "jit"),
        (INT8, "vmap"),
        (TILED, "jit"),
        (QtRule(weight_qtype="fp8", act_qtype="fp8"), "jit"),
    ],
)
def test_an_unmodified_model_multiplies_by_rule(rule, how):
    model, x = transformed(mlp, jit=how != "eager"), normal((6, 4), 1)
    params = model.init(jax.random.key(0), x)
    wrapped = hki.quantized_training(params, [rule])
    assert {type(p["w"]).__name__ for p in wrapped.values()} == {"TrainedQuantized"}

    def ours(p, x):
        return (model.apply(p, None, x) ** 2).sum()

    def by_hand(p, x):
        return (mlp_by_hand(p, x, matmul(rule)) ** 2).sum()

    if how == "vmap":
        x = normal((2, 6, 4), 1)
        both = [jax.vmap(jax.value_and_grad(f), (None, 0)) for f in (ours, by_hand)]
    else:
        both = [jax.value_and_grad(f) for f in (ours, by_hand)]
    found = (both[0] if how == "eager" else jax.jit(both[0]))(wrapped, x)
    # One code of a gradient may be the next one where a sum was rounded another way.
    expected = jax.jit(both[1])(params, x)
    close(found[0], expected[0], rtol=1e-5)
    trees_close(values(found[1]), expected[1], rtol=1e-4, atol=1e-4)


def test_rules_choose_modules_and_operations():
    model, x = transformed(mlp), normal((6, 4), 1)
    params = model.init(jax.random.key(0), x)
    rules = [
        QtRule(module_path=r"mlp/~/linear_0"),
        QtRule(op_names=["conv_general_dilated"], weight_qtype="int2"),
        QtRule(module_path=r"mlp/~/linear_1", weight_qtype="int8"),
        QtRule(op_names=["einsum"], weight_qtype="int4"),
        QtRule(op_names=["ragged_dot"], weight_qtype="int2"),
    ]
    wrapped = hki.quantized_training(params, rules)
    # `linear_0` is left alone but for convolutions, of which it has none.
    assert not isinstance(wrapped["mlp/~/linear_0"]["w"], hki.TrainedQuantized)
    used = iter(["int8", "int4"])

    def dot(x, w):
        if x.shape[1] == 4:
            return x @ w
        return matmul(QtRule(weight_qtype=next(used)))(x, w)

    by_hand = jax.jit(lambda params, x: mlp_by_hand(params, x, dot))
    close(model.apply(wrapped, None, x), by_hand(params, x))


def test_a_rule_for_other_operations_leaves_this_one_dense():
    w, x = normal((4, 3), 0), normal((2, 4), 1)
    other = QtRule(op_names=["ragged_dot"], weight_qtype="int2")
    wrapped = hki.TrainedQuantized(w, rules=(other,))
    close(hki.use_implicit_args(jnp.dot)(x, wrapped), x @ w)


def test_only_weights_are_wrapped():
    params = {
        "linear": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)},
        "norm": {"scale": jnp.ones((1, 3)), "offset": jnp.ones((1, 3))},
        "ids": {"w": jnp.ones((2, 2), jnp.int32)},
        "lora": {"w": hki.LoRA(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))},
    }
    wrapped = hki.quantized_training(params, [INT8])
    changed = [
        f"{module}/{name}"
        for module, own in wrapped.items()
        for name, value in own.items()
        if value is not params[module][name]
    ]
    assert changed == ["linear/w"]
    by_name = hki.quantized_training(params, [INT8], targets=".*/offset")
    assert isinstance(by_name["norm"]["offset"], hki.TrainedQuantized)


def test_errors_say_what_there_is():
    params = {"net/linear": {"w": jnp.ones((4, 3))}}
    with pytest.raises(ValueError, match="'head' quantize none of the 1 dense weights.*net/linear"):
        hki.quantized_training(params, [QtRule(module_path="head", weight_qtype="int8")])
    with pytest.raises(
        TypeError, match=r"rules\[1\]: expected a QtRule or a QuantRule, got 'int8'"
    ):
        hki.quantized_training(params, [INT8, "int8"])
    with pytest.raises(ValueError, match=r"net/linear/w .*group_size: expected .*got 3"):
        hki.quantization_aware(params, [QuantRule(weight_qtype="int8", tile_size=3)])
    with pytest.raises(ValueError, match="act_qtype=None.*quantized_training has activations"):
        hki.quantization_aware(params, [INT8])


def test_lora_on_a_trained_weight():
    """By nesting: the product with the weight is quantized, those with the factors are not."""
    w, x = normal((6, 5), 0), normal((3, 6), 1)
    a, b = normal((6, 2), 2), normal((2, 5), 3)
    lora = hki.LoRA(hki.TrainedQuantized(w, rules=(INT8,)), a, b)
    expected = jax.jit(lambda x, w, a, b: matmul(INT8)(x, w) + x @ a @ b)(x, w, a, b)
    found = jax.jit(hki.use_implicit_args(jnp.dot))(x, lora)
    close(found, expected, rtol=1e-5, atol=1e-5)


def stacked_layers(x):
    return hk.experimental.layer_stack(3)(lambda x: jax.nn.tanh(hk.Linear(5)(x)))(x)


@pytest.mark.slow
def test_stacked_layers_are_quantized_one_by_one():
    model, x = transformed(stacked_layers), normal((4, 5), 1)
    params = model.init(jax.random.key(0), x)
    ((path, stacked),) = params.items()

    def by_hand(p, x):
        for w, b in zip(p[path]["w"], p[path]["b"], strict=True):
            x = jax.nn.tanh(matmul(INT8)(x, w) + b)
        return (x**2).sum()

    wrapped = hki.quantized_training(params, [INT8])
    found = jax.jit(jax.value_and_grad(lambda p: (model.apply(p, None, x) ** 2).sum()))(wrapped)
    expected = jax.jit(jax.value_and_grad(by_hand))(params, x)
    close(found[0], expected[0], rtol=1e-5)
    trees_close(values(found[1]), expected[1], rtol=1e-4, atol=1e-4)
    noisy = hki.with_rounding_key(hki.quantized_training(params, [NOISY]), jax.random.key(0))
    assert noisy[path]["w"].key.shape == (3,)
    jax.grad(lambda p: model.apply(hki.with_rounding_key(p, jax.random.key(0)), None, x).sum())(
        hki.quantized_training(params, [NOISY])
    )


def test_convolutions_of_a_model():
    model = transformed(lambda x: hk.Conv2D(4, 3, stride=2)(x))
    x = normal((2, 6, 6, 3), 1)
    params = model.init(jax.random.key(0), x)

    def by_hand(p, x):
        own = p["conv2_d"]
        out = conv_general_dilated(x, own["w"], (2, 2), "SAME", rule=INT8,
                                   dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        return out + own["b"]

    wrapped = hki.quantized_training(params, [INT8])
    close(model.apply(wrapped, None, x), jax.jit(by_hand)(params, x))
    grads = [jax.jit(jax.grad(lambda p, f=f: (f(p) ** 2).sum())) for f in (
        lambda p: model.apply(p, None, x), lambda p: by_hand(p, x))]  # fmt: skip
    trees_close(values(grads[0](wrapped)), grads[1](params), rtol=1e-4, atol=1e-4)


def test_ragged_products():
    x, w, sizes = normal((5, 4), 0), normal((2, 4, 3), 1), jnp.array([2, 3])
    wrapped = hki.TrainedQuantized(w, rules=(INT8,))
    found = hki.use_implicit_args(jax.lax.ragged_dot)(x, wrapped, sizes)
    close(found, ragged_dot(x, w, sizes, rule=INT8))
    other = hki.TrainedQuantized(w, rules=(QtRule(op_names="einsum", weight_qtype="int2"),))
    found = hki.use_implicit_args(jax.lax.ragged_dot)(x, other, sizes)
    close(found, jax.lax.ragged_dot(x, w, sizes))


WAYS = {
    "first": (lambda x, w: w @ x, lambda x, w: dot_general(
        w, x, MATRICES, rule=INT8, lhs_is_weight=True, rhs_is_weight=False), (5, 3), (4, 5)),
    "both": (lambda x, w: w.T @ w, lambda x, w: dot_general(
        w.T, w, MATRICES, rule=INT8, lhs_is_weight=True), (1,), (5, 4)),
    "transposed": (lambda x, w: x @ w.T, lambda x, w: matmul(INT8)(x, w.T), (3, 5), (4, 5)),
    "cast": (lambda x, w: x @ w.astype(jnp.bfloat16),
             lambda x, w: matmul(INT8)(x, w.astype(jnp.bfloat16)), (3, 4), (4, 5)),
    "sliced": (lambda x, w: x @ w[1:4, 2:],
               lambda x, w: matmul(INT8)(x, w[1:4, 2:]), (2, 3), (5, 6)),
    "reshaped": (lambda x, w: jnp.einsum("bi,ihd->bhd", x, w.reshape(4, 2, 3)),
                 lambda x, w: matmul(INT8)(x, w).reshape(-1, 2, 3), (5, 4), (4, 6)),
    "stopped": (lambda x, w: x @ jax.lax.stop_gradient(w), matmul(INT8), (3, 4), (4, 5)),
    "batch": (lambda x, w: jnp.einsum("bi,bij->bj", x, w),
              lambda x, w: dot_general(x, w, (((1,), (1,)), ((0,), (0,))), rule=INT8),
              (3, 4), (3, 4, 5)),
    "one of a batch": (lambda x, w: x @ w[1], lambda x, w: matmul(INT8)(x, w[1]), (3, 4), (2, 4, 5)),
    "split": (lambda x, w: sum(x @ part for part in jnp.split(w, [2], axis=1)[1:]),
              lambda x, w: matmul(INT8)(x, w[:, 2:]), (2, 4), (4, 5)),
    "layers of a split": (lambda x, w: x @ jnp.split(w, 2)[1][0],
                          lambda x, w: matmul(INT8)(x, w[1]), (3, 4), (2, 4, 5)),
    "joined": (lambda x, w: x @ jnp.concatenate([w, 2 * w], axis=-1),
               lambda x, w: matmul(INT8)(x, jnp.concatenate([w, 2 * w], axis=-1)), (3, 4), (4, 5)),
    "normalized": (lambda x, w: x @ (-w / np.arange(1.0, 6)), lambda x, w: matmul(INT8)(
        x, -w / np.arange(1.0, 6)), (3, 4), (4, 5)),
    "looked up": (lambda x, w: w[jnp.array([0, 2])], lambda x, w: w[jnp.array([0, 2])],
                  (1,), (4, 5)),
}  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.combinations
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_key", [False, True])
def test_rearranged_weights_are_still_weights(way, with_key):
    implicit, explicit, x_shape, w_shape = WAYS[way]
    x, w = normal(x_shape, 0), normal(w_shape, 1)
    key = jax.random.split(jax.random.key(0), w_shape[:-2]) if with_key else None
    wrapped = hki.TrainedQuantized(w, key, rules=(INT8,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hki.use_implicit_args(implicit)(x, wrapped)
    expected = explicit(x, w)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=1e-5, atol=1e-5)


WEIGHT_ONLY = QtRule(weight_qtype="int4")


def test_what_is_no_product_sees_the_dense_weight():
    w = normal((4, 5), 0)
    wrapped = hki.TrainedQuantized(w, rules=(INT8,))
    with hki.materialization("allow"):
        close(hki.use_implicit_args(lambda w: (w * w).sum())(wrapped), (w * w).sum(), rtol=1e-6)
        # An activation times a table of parameters is an activation, which is not to be rounded.
        x, v = normal((4, 5), 1), hki.TrainedQuantized(normal((5, 3), 2), rules=(WEIGHT_ONLY,))
        found = hki.use_implicit_args(lambda x, w, v: (x * w) @ v)(x, wrapped, v)
        close(found, matmul(WEIGHT_ONLY)(x * w, v.value), rtol=1e-5)
    close(hki.materialize(wrapped), w)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.slow
def test_a_model_with_strict_promotion(dtype):
    x, w = normal((3, 4), 0).astype(dtype), normal((4, 5), 1).astype(dtype)
    wrapped = hki.TrainedQuantized(w, jax.random.key(0), rules=(NOISY,))
    loss = lambda w: (hki.use_implicit_args(jnp.dot)(x, w) ** 2).sum()  # noqa: E731
    expected = jax.grad(loss, allow_int=True)(wrapped).value
    with jax.numpy_dtype_promotion("strict"):
        found = jax.grad(loss, allow_int=True)(wrapped).value
    np.testing.assert_array_equal(np.float32(found), np.float32(expected))


def test_the_stored_weight_of_an_einsum():
    """It has three axes, as a kernel, but the rule is for products alone."""
    rule = QtRule(op_names=("einsum",), weight_qtype="int8")
    params = hki.quantized_training({"l": {"w": normal((4, 2, 3), 0)}}, [rule])
    stored = hki.convert_trained(params)["l"]["w"]
    assert isinstance(stored, hki.QuantizedMatrix)
    close(hki.materialize(stored), params["l"]["w"].value, atol=0.03)


# --- random rounding -----------------------------------------------------------------------------


def test_keys_of_a_step():
    params = {"a": {"w": normal((4, 3), 0)}, "b": {"w": normal((4, 3), 1), "b": jnp.ones(3)}}
    wrapped = hki.quantized_training(params, [NOISY])
    x = normal((5, 4), 2)

    def loss(p, key):
        p = hki.with_rounding_key(p, key)
        return sum((hki.use_implicit_args(jnp.dot)(x, p[m]["w"]) ** 2).sum() for m in "ab")

    gradient = jax.jit(jax.grad(loss))
    one, same, other = (values(gradient(wrapped, jax.random.key(i))) for i in (0, 0, 1))
    for m in "ab":
        np.testing.assert_array_equal(one[m]["w"], same[m]["w"])
        assert (one[m]["w"] != other[m]["w"]).any()
    keyed = hki.with_rounding_key(wrapped, jax.random.key(0))
    data = [jax.random.key_data(keyed[m]["w"].key) for m in "ab"]
    assert (data[0] != data[1]).any()
    # The gradient is that of the function with this key.
    dw = jax.grad(lambda w: (matmul(NOISY, key=keyed["a"]["w"].key)(x, w) ** 2).sum())
    close(one["a"]["w"], jax.jit(dw)(params["a"]["w"]), rtol=1e-5, atol=1e-5)
    old = hki.with_rounding_key(wrapped, jax.random.PRNGKey(0))  # keys as Haiku's are
    np.testing.assert_array_equal(jax.random.key_data(old["a"]["w"].key), data[0])
    trainable, frozen = hki.partition(keyed)
    assert trainable["a"]["w"].key is None and frozen["a"]["w"].value is None
    with pytest.raises(ValueError, match="with_rounding_key"):
        jax.grad(lambda p: hki.use_implicit_args(jnp.dot)(x, p["a"]["w"]).sum())(wrapped)
    with pytest.raises(ValueError, match="with_rounding_key.* by jax.value_and_grad"):
        hki.grad(loss)(wrapped, jax.random.key(0))


@pytest.mark.slow
def test_the_getter_takes_keys_from_haiku():
    noisy = QtRule(weight_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")

    def forward(x):
        with hk.custom_getter(hki.quantized_training_getter([noisy])):
            return mlp(x)

    model, x = transformed(forward), normal((6, 4), 1)
    params = model.init(jax.random.key(0), x)
    assert not any(isinstance(p["w"], hki.ImplicitArray) for p in params.values())
    close(
        model.apply(params, jax.random.key(0), x), mlp_by_hand(params, x, matmul(noisy)), rtol=1e-5
    )
    grad = jax.jit(jax.grad(lambda p, key: (model.apply(p, key, x) ** 2).sum()))
    first, again, other = (grad(params, jax.random.key(i)) for i in (1, 1, 2))
    name = "mlp/~/linear_1"
    np.testing.assert_array_equal(first[name]["w"], again[name]["w"])
    assert (first[name]["w"] != other[name]["w"]).any()
    mean = np.mean([grad(params, jax.random.key(i))[name]["w"] for i in range(64)], axis=0)
    exact = QtRule(weight_qtype="int8", additional_qt_config={"use_original_residuals": False})
    want = jax.jit(jax.grad(lambda p: (mlp_by_hand(p, x, matmul(exact)) ** 2).sum()))(params)
    want = want[name]["w"]
    # The largest magnitude of a row saturates where it is rounded up: half a step in 127.
    assert np.linalg.norm(mean - want) < 0.01 * np.linalg.norm(want)


def test_the_getter_without_randomness_needs_no_key():
    rules = [QtRule(module_path=".*linear_2"), INT8]

    def forward(x):
        with hk.custom_getter(hki.quantized_training_getter(rules)):
            return mlp(x)

    model, x = transformed(forward), normal((6, 4), 1)
    params = model.init(jax.random.key(0), x)

    def dot(x, w):
        return x @ w if w.shape == (8, 3) else matmul(INT8)(x, w)

    by_hand = jax.jit(lambda params, x: mlp_by_hand(params, x, dot))
    close(model.apply(params, None, x), by_hand(params, x), rtol=1e-5, atol=1e-5)


# --- training ------------------------------------------------------------------------------------


def train(model, params, optimizer, loss_of, steps):
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        loss, grads = jax.value_and_grad(loss_of)(params, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        params, state, loss = step(params, state, jax.random.key(i))
    return params, float(loss)


@pytest.mark.parametrize("rounding", few([None, "low_bit_uniform"]))
def test_a_model_trains_as_well_in_eight_bits(rounding):
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8",
                  bwd_stochastic_rounding=rounding)  # fmt: skip
    model, x = transformed(lambda x: hk.nets.MLP([32, 32, 1])(x)), normal((128, 4), 1)
    y = jnp.sin(x[:, :1] * 2) + x[:, 1:2] * x[:, 2:3]
    params = model.init(jax.random.key(0), x)

    def loss_of(params, key):
        params = hki.with_rounding_key(params, key)
        return jnp.mean((model.apply(params, None, x) - y) ** 2)

    first = float(loss_of(params, jax.random.key(0)))
    optimizer = optax.adam(1e-2)
    _, dense = train(model, params, optimizer, loss_of, 300)
    wrapped = hki.quantized_training(params, [rule])
    assert len(jax.tree.leaves(wrapped)) == len(jax.tree.leaves(params))
    trained, quantized = train(model, wrapped, optimizer, loss_of, 300)
    assert dense < 0.02 * first
    assert quantized < dense + 0.01 * first  # 8 bits cost about 1 % of the signal's power
    assert jax.tree.structure(trained) == jax.tree.structure(wrapped)


def test_partitions_and_gradients_of_the_library():
    model, x = transformed(mlp), normal((6, 4), 1)
    params = hki.quantized_training(model.init(jax.random.key(0), x), [INT8])
    trainable, frozen = hki.partition(params, trainable_dense=False)
    assert len(jax.tree.leaves(trainable)) == 3 and len(jax.tree.leaves(frozen)) == 3
    loss = lambda p: (model.apply(p, None, x) ** 2).sum()  # noqa: E731
    value, grads = jax.jit(hki.value_and_grad(loss))(params)
    plain = jax.jit(jax.value_and_grad(loss))(params)
    close(value, plain[0], rtol=1e-5)
    trees_close(grads, plain[1], rtol=1e-4, atol=1e-4)


# --- stored weights ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(weight_qtype="int8"), 1e-6),
        pytest.param(dict(weight_qtype="fp8_e4m3"), 1e-6, marks=pytest.mark.slow),
        pytest.param(dict(weight_qtype="nf4"), 1e-6, marks=pytest.mark.slow),
        (dict(weight_qtype="int4", tile_size=8), 1e-6),
        pytest.param(
            dict(weight_qtype="int8", disable_channelwise_axes=True), 1e-6, marks=pytest.mark.slow
        ),
        # With a zero point the values are scale * code + offset, rounded once more.
        (dict(weight_qtype="int4", weight_calibration_method="minmax"), 1e-5),
    ],
)
def test_converted_weights_are_those_of_the_forward_pass(options, error):
    model = transformed(lambda x: hk.Linear(6)(jax.nn.relu(hk.Linear(16)(x))))
    x = normal((6, 8), 1)
    params = hki.quantized_training(model.init(jax.random.key(0), x), [QtRule(**options)])
    stored = convert(params)
    assert isinstance(stored["linear_1"]["w"], hki.QuantizedMatrix)
    close(model.apply(stored, None, x), model.apply(params, None, x), rtol=error, atol=error)


def test_converted_kernels_and_stacks():
    conv = transformed(lambda x: hk.Conv2D(4, 3)(x))
    stack = transformed(stacked_layers)
    rule = QtRule(weight_qtype="int8")
    for model, x in ((conv, normal((2, 5, 5, 3), 1)), (stack, normal((4, 5), 1))):
        params = hki.quantized_training(model.init(jax.random.key(0), x), [rule])
        stored = convert(params)
        close(model.apply(stored, None, x), model.apply(params, None, x), rtol=1e-5, atol=1e-5)


def test_odd_lengths_are_padded_or_refused():
    w = normal((7, 3), 0)
    whole = {"a": {"w": hki.TrainedQuantized(w, rules=(QtRule(weight_qtype="int4"),))}}
    stored = convert(whole)["a"]["w"]
    expected = jax.jit(matmul(QtRule(weight_qtype="int4")))(np.eye(7, dtype=np.float32), w)
    close(hki.materialize(stored), expected, rtol=1e-6)
    rule = QtRule(weight_qtype="int4", tile_size=3)
    with pytest.raises(ValueError, match="tile_size: expected a multiple of 2 .*'int4', got 3"):
        hki.convert_trained({"a": {"w": hki.TrainedQuantized(normal((6, 3), 0), rules=(rule,))}})
    dense = hki.convert_trained({"a": {"w": hki.TrainedQuantized(w, rules=(QtRule(),))}})
    np.testing.assert_array_equal(dense["a"]["w"], w)  # as it is in products


@pytest.mark.parametrize("bits", few([8, 4, 2], 4))
@pytest.mark.slow
def test_products_by_bits(bits):
    x, w = normal((5, 12), 0), normal((12, 7), 1)
    name = f"int{bits}"
    rule = QtRule(weight_qtype=name, act_qtype=name, bwd_qtype="int8")
    train_dot = hki.dot_general_by_bits(bits, 8)
    found = jax.vjp(lambda x, w: train_dot(x, w, MATRICES), x, w)
    expected = jax.vjp(matmul(rule), x, w)
    close(found[0], expected[0])
    trees_close(found[1](jnp.ones((5, 7))), expected[1](jnp.ones((5, 7))))
    stored = hki.dot_general_by_bits(bits, mode="convert")(w)
    assert isinstance(stored, hki.QuantizedMatrix) and stored.format == name
    served = hki.dot_general_by_bits(bits, mode="serve")(x, stored, MATRICES)
    np.testing.assert_array_equal(served, train_dot(x, w, MATRICES))


def test_products_by_bits_refuse():
    assert hki.dot_general_by_bits(None) is jax.lax.dot_general
    for args, message in (
        ((9,), r"fwd_bits: expected None or one of \[2, 3, 4, 5, 6, 7, 8\], got 9"),
        ((8, 16), r"bwd_bits: expected None or one of \[2, 3, 4, 5, 6, 7, 8\], got 16"),
        ((8, 8, "eval"), "mode: expected 'train', 'serve' or 'convert', got 'eval'"),
    ):
        with pytest.raises(ValueError, match=message):
            hki.dot_general_by_bits(*args)
    with pytest.raises(TypeError, match="rhs: expected a QuantizedMatrix"):
        hki.dot_general_by_bits(8, mode="serve")(jnp.ones((2, 3)), jnp.ones((3, 2)), MATRICES)


# --- quantization-aware training -----------------------------------------------------------------

FORMATS = [
    dict(dtype="int8"),
    dict(dtype="int4", group_size=4),
    dict(dtype="int4", zero_point=True),
    dict(dtype="nf4", group_size=4, axis=-1),
    dict(dtype="mxfp4", group_size=None),
    dict(dtype="int3", calibration="mse"),
]


@pytest.mark.parametrize(
    "options", few(FORMATS, *FORMATS[:4]), ids=lambda options: options["dtype"]
)
def test_fake_quantization_rounds_and_passes_gradients(options):
    x, c = normal((32, 8), 0), normal((32, 8), 1)
    quantize = functools.partial(hki.QuantizedMatrix.quantize, **options)
    expected = jax.jit(lambda x: hki.materialize(quantize(x)))(x)
    round_off = functools.partial(hki.fake_quantize, **options)
    if options == {"dtype": "int8"}:
        np.testing.assert_array_equal(round_off(x), hki.materialize(quantize(x)))

    @jax.jit
    def transforms(x, c):
        gradient = jax.grad(lambda x: (round_off(x) * c).sum())(x)
        return jax.vmap(round_off)(x[None])[0], gradient, jax.jvp(round_off, (x,), (c,))[1]

    for found, want in zip(transforms(x, c), (expected, c, c), strict=True):
        np.testing.assert_array_equal(found, want)


def test_zero_stays_zero_with_a_zero_point():
    x = normal((16, 6), 0).at[3].set(0.0) + jnp.where(jnp.arange(6) > 2, 0.0, 0.3)
    x = x.at[3].set(0.0)
    for dtype, group in (("int4", None), ("int8", 4)):
        assert (jax.jit(hki.fake_quantize, static_argnums=(1, 2, 3, 4))(
            x, dtype, group, -2, True)[3] == 0).all()  # fmt: skip


AWARE = [
    QuantRule(weight_qtype="int8"),
    QuantRule(weight_qtype="int4", tile_size=4, weight_calibration_method="minmax"),
    QuantRule(weight_qtype="nf4", tile_size=0.5),
]


@pytest.mark.parametrize("rule", few(AWARE, *AWARE[:2]), ids=lambda rule: rule.weight_qtype)
@pytest.mark.slow
def test_aware_models_are_what_they_are_converted_to(rule):
    def two_layers(x):
        return hk.Linear(6)(jax.nn.relu(hk.Linear(16)(x)))

    model, x = transformed(two_layers), normal((6, 8), 1)
    params = model.init(jax.random.key(0), x)
    aware = hki.quantization_aware(params, [rule])
    stored = convert(aware)
    rounded = {m: dict(p, w=hki.materialize(stored[m]["w"])) for m, p in params.items()}
    found = jax.jit(jax.value_and_grad(lambda p: (model.apply(p, None, x) ** 2).sum()))
    (value, grads), (dense, expected) = found(aware), found(rounded)
    close(value, dense, rtol=1e-5)
    trees_close(values(grads), expected, rtol=1e-5, atol=1e-5)
    close(model.apply(stored, None, x), model.apply(aware, None, x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_aware_stacks_and_kernels():
    conv = transformed(lambda x: hk.Conv2D(4, 3)(x))
    stack = transformed(stacked_layers)
    for model, x in ((conv, normal((2, 5, 5, 4), 1)), (stack, normal((4, 5), 1))):
        params = hki.quantization_aware(
            model.init(jax.random.key(0), x), [QuantRule(weight_qtype="int8")]
        )
        stored = convert(params)
        close(model.apply(stored, None, x), model.apply(params, None, x), rtol=1e-5, atol=1e-5)
        jax.grad(lambda p: model.apply(p, None, x).sum())(params)  # noqa: B023


def test_the_first_rule_that_quantizes_weights_decides_how_they_are_stored():
    """As `quantize_params` has it, a rule before it may leave another operation alone."""
    params = {"linear": {"w": normal((8, 4), 0)}}
    rules = [
        QuantRule(op_names="conv_general_dilated"),
        QuantRule(weight_qtype="int4"),
    ]
    aware, stored = (f(params, rules=rules) for f in (hki.quantization_aware, hki.quantize_params))
    assert stored["linear"]["w"].format == "int4"
    np.testing.assert_array_equal(*(hki.materialize(p)["linear"]["w"] for p in (aware, stored)))


@pytest.mark.slow
def test_aware_training_ends_nearer_than_rounding_afterwards():
    model, x = transformed(lambda x: hk.nets.MLP([32, 1])(x)), normal((128, 4), 1)
    y = jnp.sin(x[:, :1] * 2)
    params = model.init(jax.random.key(0), x)

    def loss_of(params, key):
        return jnp.mean((model.apply(params, None, x) - y) ** 2)

    dense, _ = train(model, params, optax.adam(1e-2), loss_of, 200)
    rule = [QuantRule(weight_qtype="int2")]
    afterwards = float(loss_of(hki.quantization_aware(dense, rule), None))
    aware, _ = train(model, hki.quantization_aware(dense, rule), optax.adam(1e-2), loss_of, 200)
    assert loss_of(convert(aware), None) < 0.3 * afterwards


# --- activations after training ------------------------------------------------------------------


def matrix(x):
    return hk.Linear(3)(x)


def heads(x):
    w = hk.get_parameter("w", (8, 2, 6), init=hk.initializers.RandomNormal())
    return jnp.einsum("bi,ihd->bhd", x, w)


def transposed(x):
    w = hk.get_parameter("w", (6, 8), init=hk.initializers.RandomNormal())
    return x @ w.T


def kernel(x):
    return hk.Conv1D(4, 3)(x.reshape(2, 3, 8))


def experts(x):
    w = hk.get_parameter("w", (2, 8, 4), init=hk.initializers.RandomNormal())
    return jax.lax.ragged_dot(x, w, jnp.array([2, 4]))


ROUNDED = {
    "int8": {},
    "fp8": dict(act_qtype="fp8"),
    "asymmetric": dict(act_calibration_method="minmax"),
    "clipped": dict(act_calibration_method="rms,2"),
    "shared": dict(disable_channelwise_axes=True),
    "by tiles": dict(tile_size=4),
    "overridden": dict(additional_qt_config={"lhs_calibration_method": "absmax,0.5"}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "model, option",
    [
        *((matrix, name) for name in ROUNDED),
        *((model, "int8") for model in (kernel, experts)),
        *(
            pytest.param(model, name, marks=pytest.mark.slow)
            for model in (kernel, experts)
            for name in ROUNDED
            if name != "int8"
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_converted_weights_round_activations_as_trained_ones_do(model, option):
    t, x = transformed(model), normal((6, 8), 0)
    operation = {kernel: "conv_general_dilated", experts: "ragged_dot"}.get(model)
    rule = QtRule(
        weight_qtype="int8", **dict(act_qtype="int8") | ROUNDED[option],
        **({} if operation is None else dict(op_names=operation)),
    )  # fmt: skip
    params = hki.quantized_training(t.init(jax.random.key(0), x), [rule])
    stored = hki.convert_trained(params)
    (w,) = (p["w"] for p in stored.values())
    assert isinstance(w, hki.QuantizedMatrix) and w.activation is not None
    want, exact = t.apply(params, None, x), t.apply(hki.materialize(stored), None, x)
    assert np.abs(want - exact).max() > 1e-4  # activations are rounded
    close(t.apply(stored, None, x), want, rtol=1e-5, atol=1e-5)
    loss = lambda x, p: (t.apply(p, None, x) ** 2).sum()  # noqa: E731
    grads = [jax.grad(loss)(x, p) for p in (stored, params)]
    close(*grads, rtol=0.1, atol=0.1 * np.abs(grads[1]).max())


@pytest.mark.combinations
@pytest.mark.parametrize("model", [heads, transposed])
@pytest.mark.parametrize("activation", ["int8", "int8,rms,9", "int8,groups"])
def test_activations_are_rounded_whichever_axis_is_summed(model, activation):
    t, x = transformed(model), normal((6, 8), 0)
    params = t.init(jax.random.key(0), x)
    stored = hki.quantize_params(params, group_size=2, activation=activation)
    largest = 9 * np.sqrt(np.mean(x**2, -1, keepdims=True))
    if "rms" not in activation:
        largest = np.abs(x).max(-1, keepdims=True)
    scale = np.asarray(largest) * np.float32(1 / 127.5)
    rounded = np.clip(np.round(np.asarray(x) * (1 / scale)), -128, 127) * scale
    want = t.apply(hki.materialize(stored), None, rounded)
    close(t.apply(stored, None, x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "edit",
    [
        lambda p, rules: hki.quantize_params(p, rules=rules),
        lambda p, rules: hki.quantization_aware(p, rules),
        lambda p, rules: hki.convert_trained(hki.quantized_training(p, rules)),
    ],
    ids=["stored", "aware", "converted"],
)
@pytest.mark.slow
def test_a_rule_for_an_operation_leaves_weights_of_others_dense(edit):
    params = {"a": {"w": normal((8, 4), 0)}, "b": {"w": normal((3, 8, 4), 1)}}
    matrices = QuantRule(weight_qtype="int8", op_names="einsum")
    kernels = QuantRule(weight_qtype="int4", op_names="conv_general_dilated")
    with pytest.raises(ValueError, match="b/w .*differ for dot_general, .*conv_general_dilated"):
        edit(params, [matrices, kernels])
    by_name = QuantRule(module_path="b", weight_qtype="int4", op_names=kernels.op_names)
    found = edit(params, [by_name, QuantRule(module_path="a", weight_qtype="int8")])
    assert not isinstance(found["a"]["w"], jax.Array) and not isinstance(found["b"]["w"], jax.Array)
    only_kernels = {"a": params["a"], "b": {"w": normal((3, 8, 4), 1)}}
    assert not isinstance(edit(only_kernels, [kernels])["b"]["w"], jax.Array)
    image = {"a": params["a"], "c": {"w": normal((3, 3, 8, 4), 1)}}
    found = edit(image, [matrices, kernels])
    assert not isinstance(found["a"]["w"], jax.Array) and not isinstance(found["c"]["w"], jax.Array)
    assert isinstance(edit(image, [matrices])["c"]["w"], jax.Array)


@pytest.mark.parametrize("edit", [hki.quantize_params, hki.quantization_aware])
def test_a_matrix_is_not_a_kernel(edit):
    params = {"a": {"w": normal((8, 4), 0)}, "b": {"w": normal((3, 3, 8, 4), 1)}}
    found = edit(params, rules=[QuantRule(weight_qtype="int8", op_names="conv_general_dilated")])
    assert isinstance(found["a"]["w"], jax.Array)
    assert not isinstance(found["b"]["w"], jax.Array)


def test_tiles_that_do_not_divide_name_the_layer():
    t, x = transformed(mlp, jit=False), normal((6, 4), 0)
    rule = QtRule(weight_qtype="int8", tile_size=3)
    params = hki.quantized_training(t.init(jax.random.key(0), x), [rule])
    with pytest.raises(ValueError, match="tile_size: .*length 4, got 3(.|\n)*module mlp/linear_0"):
        t.apply(params, None, x)


def test_rules_stand_in_place_of_other_options():
    params, rules = {"a": {"w": normal((8, 4), 0)}}, [QuantRule(weight_qtype="int8")]
    with pytest.raises(ValueError, match="rules: .* in place of dtype, group_size, got both"):
        hki.quantize_params(params, rules=rules, dtype="int4", group_size=2)
