"""Static activation scales: the statistics, products with them, and stored weights."""

import dataclasses
import functools
import pickle
import re

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
    QuantStats,
    conv_general_dilated,
    dot_general,
    einsum,
)
from tests.tiers import few

MATRICES = (((1,), (0,)), ((), ()))
STATIC = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", act_static_scale=True)
FORWARD = QuantRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)

close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
pytestmark = pytest.mark.usefixtures("never_dense")


def normal(shape, seed):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))


def implicit(fun):
    return hki.transform_implicit(hk.without_apply_rng(hk.transform(fun)))


def made(fun, x, rule=STATIC):
    """A model, its parameters with the rule, and the model that collects, jitted."""
    t = implicit(fun)
    params = hki.quantized_training(t.init(jax.random.key(0), x), [rule])
    return t, params, jax.jit(hki.with_quant_stats(t).apply)


def fixed(absmax, ndim=2):
    return QuantStats({"absmax": jnp.full((1,) * ndim, absmax)}, jnp.ones(()), mode="fixed")


class ByHand:
    """`x @ w` in int8 with the scale of an average, for layers one after the other, in NumPy."""

    def __init__(self):
        self.sums, self.counts, self.before = {}, {}, {}

    def begin(self):
        self.before = {k: (self.sums[k], self.counts[k]) for k in self.sums}

    def __call__(self, name, x, w):
        seen = np.abs(x).max(-1).mean()
        total, count = self.before.get(name, (0.0, 0))
        self.sums[name] = self.sums.get(name, 0.0) + seen
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.product(x, w, (total + seen) / (count + 1))

    @staticmethod
    def product(x, w, absmax):
        # With the reciprocals that are taken there: the largest magnitude lies on a tie.
        scales = [np.float32(y) * np.float32(1 / 127.5) for y in (absmax, np.abs(w).max(0))]
        codes = [
            np.clip(np.round(y * (1 / s)), -128, 127) for y, s in zip((x, w), scales, strict=True)
        ]
        return (codes[0] @ codes[1]) * scales[0] * scales[1]


def stats_of(state):
    return {
        name: (np.asarray(own["sum_of_absmax"]).ravel(), np.asarray(own["count"]).ravel())
        for name, own in state["quant_stats"].items()
    }


def two_layers(x):
    return hk.Linear(3, name="b")(jnp.tanh(hk.Linear(5, name="a")(x)))


# --- statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", few(["eager", "jit"], "jit"))
def test_a_moving_average_is_kept_of_each_product(how):
    batches = [normal((6, 4), i) * (i + 1) for i in range(3)]
    t, params, apply = made(two_layers, batches[0])
    if how == "eager":
        apply = hki.with_quant_stats(t).apply
    state, by_hand = {}, ByHand()
    for x in batches[: 2 if how == "eager" else 3]:
        out, state = apply(params, state, x)
        by_hand.begin()
        y = np.tanh(by_hand("a/w", np.asarray(x), np.asarray(params["a"]["w"].value)))
        # A tie may be rounded the other way: one code in 128.
        close(out, by_hand("b/w", y, np.asarray(params["b"]["w"].value)), atol=0.02)
        for name, (sums, count) in stats_of(state).items():
            close(sums, by_hand.sums[name], rtol=1e-4)
            assert count == by_hand.counts[name]
    assert set(state["quant_stats"]) == {"a/w", "b/w"}
    assert set(state["quant_stats"]["a/w"]) == {"count", "sum_of_absmax"}
    reading = jax.jit(hki.with_quant_stats(t, update=False).apply)
    out, same = reading(params, state, x)
    np.testing.assert_equal(jax.tree.map(np.asarray, same), jax.tree.map(np.asarray, state))
    mean = {name: sums[0] / count[0] for name, (sums, count) in stats_of(state).items()}
    y = np.tanh(ByHand.product(np.asarray(x), np.asarray(params["a"]["w"].value), mean["a/w"]))
    y = ByHand.product(y, np.asarray(params["b"]["w"].value), mean["b/w"])
    close(out, y, atol=0.02)


def test_a_decay_forgets():
    x = normal((6, 4), 0)
    t, params, _ = made(two_layers, x)
    apply = jax.jit(hki.with_quant_stats(t, decay=0.5).apply)
    state = {}
    for factor in (1.0, 2.0, 4.0):
        _, state = apply(params, state, x * factor)
    sums, count = stats_of(state)["a/w"]
    seen = np.abs(x).max(-1).mean()
    close(sums, seen * (0.25 + 0.5 * 2 + 4))
    close(count, 1.75)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    few(
        ["layer_stack", "remat in layer_stack", "scan", "unrolled"], "remat in layer_stack", "scan"
    ),
)
def test_loops_and_shared_weights(form):
    x = normal((4, 5), 1)

    def stacked(x):
        layer = lambda x: jnp.tanh(hk.Linear(5)(x))  # noqa: E731
        if form != "layer_stack":
            layer = hk.remat(layer)
        return hk.experimental.layer_stack(3)(layer)(x)

    def shared(x):
        linear = hk.Linear(5)
        if form == "unrolled":
            return jnp.tanh(linear(jnp.tanh(linear(jnp.tanh(linear(x))))))
        return hk.scan(lambda x, _: (jnp.tanh(linear(x)), None), x, None, length=3)[0]

    own = stacked if "stack" in form else shared
    t, params, apply = made(own, x)
    (path,) = params
    values = params[path]["w"].value
    weights = values if values.ndim == 3 else [values] * 3
    by_hand, state = ByHand(), {}
    for i in range(2):
        out, state = apply(params, state, x * (i + 1))
        by_hand.begin()
        y = np.asarray(x) * (i + 1)
        for j, w in enumerate(weights):
            y = np.tanh(by_hand(j if values.ndim == 3 else 0, y, np.asarray(w)))
        close(out, y, atol=0.02)
    sums, counts = stats_of(state)[f"{path}/w"]
    close(sums, list(by_hand.sums.values()), rtol=1e-3)
    np.testing.assert_array_equal(counts, [2.0] * 3 if values.ndim == 3 else [6.0])
    stored = hki.convert_trained(params, state)
    read = hki.with_quant_stats(t, update=False)
    close(jax.jit(t.apply)(stored, x), jax.jit(read.apply)(params, state, x)[0])


def test_vmap_over_the_batch_maps_the_statistics():
    x = normal((3, 6, 4), 0)
    t, params, _ = made(two_layers, x[0])
    state = hki.init_quant_stats(t, params, {}, x[0])
    apply = hki.with_quant_stats(t).apply
    out, new = jax.jit(jax.vmap(apply, (None, None, 0)))(params, state, x)
    one, own = jax.jit(apply)(params, state, x[1])
    close(out[1], one)
    close(new["quant_stats"]["b/w"]["sum_of_absmax"][1], own["quant_stats"]["b/w"]["sum_of_absmax"])


def test_a_vmapped_module_adds_its_axis_to_the_product():
    def model(x):
        linear = hk.Linear(3)
        return hk.vmap(linear, split_rng=False)(x)

    x = normal((2, 6, 4), 0)
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True,
                  act_batch_axes=(0, 1))  # fmt: skip
    t, params, apply = made(model, x, rule)
    _, state = apply(params, {}, x)
    close(stats_of(state)["linear/w"][0], np.abs(x).max(-1).mean())


@pytest.mark.parametrize("axes, shape", [((0,), (1, 3, 1)), ((0, 1), (1, 1, 1)), ((), (2, 3, 1))])
def test_axes_that_are_not_averaged_keep_scales(axes, shape):
    x, rule = normal((2, 3, 4), 0), QtRule(weight_qtype="int8", act_qtype="int8",
                                           act_static_scale=True, act_batch_axes=axes)  # fmt: skip
    t, params, apply = made(lambda x: hk.Linear(3)(x), x, rule)
    _, state = apply(params, {}, x)
    found = state["quant_stats"]["linear/w"]["sum_of_absmax"]
    assert found.shape == shape
    close(found, np.abs(x).max(-1, keepdims=True).mean(axes, keepdims=True))
    if axes == (0,):
        with pytest.raises(ValueError, match=r"'linear/w'.*absmax \[1, 2, 1\].*act_batch_axes"):
            apply(params, state, x[:, :2])


@pytest.mark.slow
def test_limits_with_a_zero_point():
    x = normal((6, 4), 0) + 2
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="minmax",
                  act_static_scale=True)  # fmt: skip
    t, params, apply = made(lambda x: hk.Linear(3)(x), x, rule)
    _, state = apply(params, {}, x)
    own = state["quant_stats"]["linear/w"]
    close(own["sum_of_min"], np.minimum(np.asarray(x).min(-1), 0).mean().reshape(1, 1))
    close(own["sum_of_max"], np.asarray(x).max(-1).mean().reshape(1, 1))
    stored = hki.convert_trained(params, state)
    read = hki.with_quant_stats(t, update=False)
    close(t.apply(stored, x), jax.jit(read.apply)(params, state, x)[0], rtol=1e-5)


def test_models_with_state_randomness_and_several_functions():
    def model():
        def counted(x):
            calls = hk.get_state("calls", [], init=jnp.zeros)
            hk.set_state("calls", calls + 1)
            return hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(3)(x))

        return counted, (counted, lambda x: {"text": "as it is", "n": jnp.argmax(x), "none": None})

    x, key = normal((6, 4), 0), jax.random.key(1)
    t = hki.transform_implicit(hk.multi_transform_with_state(model))
    params, state = t.init(key, x)
    params = hki.quantized_training(params, [STATIC])
    (apply, other) = hki.with_quant_stats(t).apply
    assert hki.with_quant_stats(t).init(key, x)[1].keys() == state.keys()
    out, new = jax.jit(apply)(params, state, key, x)
    assert (out == 0).any() and new["~"]["calls"] == 1
    assert stats_of(new)["linear/w"][1] == 1
    out, same = other(params, new, None, x)
    assert out["text"] == "as it is" and out["n"] == jnp.argmax(x) and out["none"] is None
    assert stats_of(same)["linear/w"][1] == 1 and same["~"]["calls"] == 1


def test_what_no_gradient_reaches_is_not_counted_and_not_stored():
    def model(x):
        picked = jnp.argmax(hk.Linear(3, name="lost")(x), -1)
        return hk.Linear(3, name="kept")(x) * picked[:, None].astype(x.dtype)

    x = normal((6, 4), 0)
    t, params, apply = made(model, x)
    out, state = apply(params, {}, x)
    assert stats_of(state)["lost/w"][1] == 0 and stats_of(state)["kept/w"][1] == 1
    # Nothing is counted: the range is that of the activation itself, in every mode.
    read = jax.jit(hki.with_quant_stats(t, update=False).apply)(params, state, x)[0]
    close(read, out)
    with pytest.raises(
        ValueError, match="nothing is counted in the statistics of 'lost/w'.*argmax"
    ):
        hki.convert_trained(params, state)
    stored = jax.jit(hki.convert_trained)(params, state)
    assert np.isnan(stored["lost"]["w"].stats.sums["absmax"]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_counted(bad):
    x = normal((6, 4), 0)
    t, params, apply = made(lambda x: hk.Linear(3)(x), x)
    _, state = apply(params, {}, x)
    out, new = apply(params, state, x.at[0, 0].set(bad))
    np.testing.assert_equal(stats_of(new), stats_of(state))
    # The range is known: a value outside it shows in its own row alone.
    before, _ = apply(params, state, x)
    out = np.asarray(out)
    assert np.isnan(out[0]).all()
    stored, run = jax.jit(hki.convert_trained)(params, state), jax.jit(t.apply)
    close(run(stored, x.at[0, 0].set(bad)), out)
    close(np.asarray(run(stored, x))[1:], out[1:])
    close(np.asarray(before)[1:], out[1:])


def test_empty_activations_are_not_counted():
    x = normal((6, 4), 0)
    t, params, apply = made(lambda x: hk.Linear(3)(x), x)
    out, state = apply(params, {}, x[:0])
    assert out.shape == (0, 3) and stats_of(state)["linear/w"][1] == 0


# --- gradients, training -------------------------------------------------------------------------


def test_gradients_are_those_of_products_with_known_ranges():
    x = normal((6, 4), 0)
    # (In eight bits as well, one code of a gradient is another where a sum is rounded another way.)
    t, params, apply = made(two_layers, x, FORWARD)
    _, state = apply(params, {}, x * 1.5)

    def loss(p, state):
        out, state = hki.with_quant_stats(t).apply(p, state, x)
        return (out**2).sum(), state

    (value, new), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, state)
    mean = {name: sums[0] / count[0] for name, (sums, count) in stats_of(new).items()}

    def by_hand(p):
        def layer(name, x):
            w = p[name]["w"].value
            y = dot_general(x, w, MATRICES, rule=FORWARD, stats=fixed(mean[f"{name}/w"]))
            return y + p[name]["b"]

        return (layer("b", jnp.tanh(layer("a", x))) ** 2).sum()

    wanted, expected = jax.jit(jax.value_and_grad(by_hand))(params)
    close(value, wanted, rtol=1e-5)
    jax.tree.map(functools.partial(close, rtol=1e-4, atol=1e-4), grads, expected)
    _, again = apply(params, state, x)
    np.testing.assert_equal(stats_of(new), stats_of(again))


def test_rules_for_derivatives_within_the_model_act_once():
    @jax.custom_vjp
    def tripled(x):
        return x

    tripled.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))
    x = normal((6, 4), 0)
    t, params, _ = made(lambda x: hk.Linear(3)(tripled(hk.Linear(4, name="first")(x))), x)
    plain = implicit(lambda x: hk.Linear(3)(hk.Linear(4, name="first")(x)))

    @jax.jit
    def grads(p):
        return [
            jax.grad(lambda p, f=f: hki.with_quant_stats(f).apply(p, {}, x)[0].sum())(p)
            for f in (t, plain)
        ]

    with_rule, without = grads(params)
    close(with_rule["first"]["b"], 3 * without["first"]["b"])
    close(with_rule["linear"]["w"].value, without["linear"]["w"].value)


@pytest.mark.parametrize("rounding", few([None, "uniform"], "uniform"))
@pytest.mark.slow
def test_a_model_trains_in_a_scan(rounding):
    x = normal((64, 4), 1)
    y = jnp.sin(x[:, :1] * 2)
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", act_static_scale=True,
                  bwd_stochastic_rounding=rounding)  # fmt: skip
    t, params, _ = made(lambda x: hk.nets.MLP([32, 1])(x), x, rule)
    model, optimizer = hki.with_quant_stats(t), optax.adam(1e-2)

    def loss(p, state, key):
        out, state = model.apply(hki.with_rounding_key(p, key), state, x)
        return jnp.mean((out - y) ** 2), state

    def step(carry, key):
        params, state, opt = carry
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, key)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), state, opt), value

    state = hki.init_quant_stats(t, params, {}, x)
    keys = jax.random.split(jax.random.key(0), 150)
    carry = params, state, optimizer.init(params)
    (params, state, _), losses = jax.jit(lambda c: jax.lax.scan(step, c, keys))(carry)
    assert losses[-1] < 0.1 * losses[0]
    assert stats_of(state)["mlp/~/linear_1/w"][1] == 150
    stored = hki.convert_trained(params, state)
    served = jnp.mean((jax.jit(t.apply)(stored, x) - y) ** 2)
    assert served < 1.2 * losses[-1] + 0.01


@pytest.mark.every(2)
@pytest.mark.parametrize("form", ["layers", "stack"])
def test_statistics_cost_no_products(form):
    """What the backward pass with zeros computes besides is of no use, and XLA drops it."""

    def model(x):
        layer = lambda x: jnp.tanh(hk.Linear(8)(x))  # noqa: E731
        return hk.experimental.layer_stack(3)(layer)(x) if form == "stack" else layer(layer(x))

    x = normal((4, 8), 0)
    t, params, _ = made(model, x)
    state, apply = hki.init_quant_stats(t, params, {}, x), hki.with_quant_stats(t).apply
    plain = hki.quantized_training(
        t.init(jax.random.key(0), x), [dataclasses.replace(STATIC, act_static_scale=False)]
    )

    def products(fun, *args):
        return len(re.findall(r" dot\(", jax.jit(fun).lower(*args).compile().as_text()))

    def loss(p, s):
        out, s = apply(p, s, x)
        return out.sum(), s

    counts = [
        products(apply, params, state, x),
        products(jax.grad(loss, has_aux=True), params, state),
        products(t.apply, plain, x),
        products(jax.grad(lambda p: t.apply(p, x).sum()), plain),
    ]
    assert counts[:2] == counts[2:] and counts[0] > 0


# --- stored weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [
    FORWARD,
    pytest.param(QuantRule(weight_qtype="int4", act_qtype="int8", act_static_scale=True),
                 marks=pytest.mark.slow),
    pytest.param(QuantRule(weight_qtype="fp8", act_qtype="fp8", act_static_scale=True, tile_size=4),
                 marks=pytest.mark.slow),
    QuantRule(weight_qtype="nf4", act_qtype="int4", act_calibration_method="absmax,0.8",
              act_static_scale=True),
], ids=lambda rule: rule.weight_qtype)  # fmt: skip
@pytest.mark.slow
def test_stored_weights_give_what_the_trained_ones_give(rule):
    def model(x):
        return hk.Linear(4)(jax.nn.relu(hk.Linear(8)(x)))

    x = normal((6, 8), 0)
    t, params, apply = made(model, x, rule)
    _, state = apply(params, {}, x)
    expected, _ = jax.jit(hki.with_quant_stats(t, update=False).apply)(params, state, 2 * x)
    stored = hki.convert_trained(params, state)
    stored = pickle.loads(pickle.dumps(stored))
    assert {type(p["w"]) for p in stored.values()} == {hki.StaticQuantized}
    found = jax.jit(t.apply)(stored, 2 * x)
    if rule is FORWARD:
        np.testing.assert_array_equal(found, expected)
    close(found, expected, rtol=1e-5, atol=1e-5)
    # The gradient by the input goes straight through the rounding, in both.
    grads = [jax.jit(jax.grad(f))(2 * x) for f in (
        lambda x: t.apply(stored, x).sum(),
        lambda x: hki.with_quant_stats(t, update=False).apply(params, state, x)[0].sum())]  # fmt: skip
    assert grads[0].shape == x.shape and (grads[0] != 0).any()
    # Stored weights have no values from before the rounding.
    close(*grads, rtol=0.3, atol=0.3 * np.abs(grads[1]).max())


@pytest.mark.combinations
@pytest.mark.parametrize("form", ["layer", "stack"])
@pytest.mark.parametrize("dtype", ["nf4", "mxfp4", "uint4"])
@pytest.mark.slow
def test_stored_weights_of_any_format_are_calibrated(dtype, form):
    def model(x):
        linear = lambda x: hk.Linear(64)(x)  # noqa: E731
        return hk.experimental.layer_stack(2)(linear)(x) if form == "stack" else linear(x)

    x = normal((6, 64), 0)
    t = implicit(model)
    params = t.init(jax.random.key(0), x)
    ((path, own),) = params.items()
    rule = QuantRule(weight_qtype=dtype, act_qtype="int8", act_static_scale=True,
                     tile_size=None if dtype == "mxfp4" else 32)  # fmt: skip
    stored = hki.quantize_params(params, rules=[rule])
    _, state = jax.jit(hki.with_quant_stats(t).apply)(stored, {}, x)
    fixed = hki.convert_trained(stored, state)
    assert fixed[path]["w"].weight.format in (dtype, "fp4")
    dense = np.asarray(hki.materialize(fixed[path]["w"]))
    assert np.abs(dense - own["w"]).max() > 0
    y = np.asarray(2 * x)
    for i, w in enumerate(dense if form == "stack" else [dense]):
        sums = np.asarray(fixed[path]["w"].stats.sums["absmax"])
        absmax = sums.reshape(-1, sums.shape[-1])[i]  # for each tile, which a recipe has none of
        assert len(absmax) == (1 if dtype == "mxfp4" else 2)
        if i == 0:
            close(absmax, np.abs(x).reshape(6, len(absmax), -1).max(-1).mean(0))
        scale = np.repeat(absmax.astype(np.float32), 64 // len(absmax)) * np.float32(1 / 127.5)
        y = (np.clip(np.round(y * (1 / scale)), -128, 127) * scale) @ w
    close(t.apply(fixed, 2 * x), y, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_convolutions_and_stored_kernels():
    x = normal((2, 5, 5, 3), 0)
    t, params, apply = made(lambda x: hk.Conv2D(4, 3)(x), x)
    out, state = apply(params, {}, x)
    seen = np.abs(x).max((1, 2, 3)).mean()
    own = state["quant_stats"]["conv2_d/w"]
    close(own["sum_of_absmax"][0, 0], np.full((1, 1, 1, 1), seen))
    assert own["count"].sum() == 1  # a kernel is a batch of matrices, of which the first one counts
    by_hand = functools.partial(
        conv_general_dilated, window_strides=(1, 1), padding="SAME", rule=STATIC,
        stats=fixed(seen, 4), dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
    expected = jax.jit(by_hand)(x, params["conv2_d"]["w"].value)
    close(out, expected, rtol=1e-5, atol=1e-5)
    stored = hki.convert_trained(params, state)
    read = hki.with_quant_stats(t, update=False)
    np.testing.assert_array_equal(
        jax.jit(t.apply)(stored, x), jax.jit(read.apply)(params, state, x)[0]
    )


@pytest.mark.slow
def test_ragged_products():
    x, w, sizes = normal((5, 4), 0), normal((2, 4, 3), 1), jnp.array([2, 3])
    t = implicit(
        lambda x: jax.lax.ragged_dot(x, hk.get_parameter("w", w.shape, init=jnp.ones), sizes)
    )
    rule = dataclasses.replace(STATIC, op_names="ragged_dot")
    params = hki.quantized_training({"~": {"w": w}}, [rule])
    out, state = jax.jit(hki.with_quant_stats(t).apply)(params, {}, x)
    seen = np.abs(x).max(-1).mean()
    close(state["quant_stats"]["~/w"]["sum_of_absmax"][0], [[seen]])
    by_group = np.concatenate([ByHand.product(np.asarray(y), np.asarray(v), seen)
                               for y, v in ((x[:2], w[0]), (x[2:], w[1]))])  # fmt: skip
    # The columns of all groups share a scale, those by hand do not.
    close(out, by_group, atol=0.05)
    stored = hki.convert_trained(params, state)
    read = hki.with_quant_stats(t, update=False)
    got, want = jax.jit(t.apply)(stored, x), jax.jit(read.apply)(params, state, x)[0]
    np.testing.assert_array_equal(got, want)
    text = str(jax.make_jaxpr(t.apply)(stored, x))
    assert "i32[5,3] = ragged_dot_general" in text and "preferred_element_type=int32" in text


ARRANGED = {
    "transposed": lambda x, w: x @ w.T,
    "first": lambda x, w: w @ x.T,
    "cast": lambda x, w: x.astype(jnp.bfloat16) @ w.T.astype(jnp.bfloat16),
    "reshaped": lambda x, w: jnp.einsum("bi,hdi->bhd", x, w.reshape(2, 3, 4)),
    "split": lambda x, w: x @ jnp.split(w, [2])[1].T,
    "scaled": lambda x, w: x @ (-w / 3).T,
}


@pytest.mark.parametrize("way", ARRANGED)
@pytest.mark.slow
def test_rearranged_weights_keep_their_statistics(way):
    x, w = normal((5, 4), 0), normal((6, 4), 1)
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True,
                  act_batch_axes=(0, 1), disable_channelwise_axes=True)  # fmt: skip
    t = implicit(lambda x: ARRANGED[way](x, hk.get_parameter("w", w.shape, init=jnp.ones)))
    params = hki.quantized_training({"~": {"w": w}}, [rule])
    out, state = jax.jit(hki.with_quant_stats(t).apply)(params, {}, x)
    seen = np.abs(x.astype(jnp.bfloat16) if way == "cast" else x).max()
    ((sums, count),) = stats_of(state).values()
    close(sums, seen)
    assert count == 1
    # A stored matrix that is reshaped is none any more; one that is cast was rounded before, not after,
    # and one that is split, with a single scale.
    if way not in ("reshaped", "cast", "split"):
        stored = hki.convert_trained(params, state)
        read = hki.with_quant_stats(t, update=False)
        found, expected = t.apply(stored, x), read.apply(params, state, x)[0]
        close(found, expected, rtol=1e-5, atol=1e-5)


def test_layers_picked_by_index_have_statistics_of_their_own():
    x, w = normal((5, 4), 0), normal((3, 4, 4), 1)
    t = implicit(
        lambda x: x @ (v := hk.get_parameter("w", w.shape, init=jnp.ones))[0] + (2 * x) @ v[2]
    )
    rule = dataclasses.replace(STATIC, op_names="dot_general")
    params = hki.quantized_training({"~": {"w": w}}, [rule])
    _, state = jax.jit(hki.with_quant_stats(t).apply)(params, {}, x)
    seen = np.abs(x).max(-1).mean()
    sums, count = stats_of(state)["~/w"]
    close(sums, [seen, 0, 2 * seen])
    np.testing.assert_array_equal(count, [1, 0, 1])
    stored = jax.jit(hki.convert_trained)(params, state)["~"]["w"]
    ranges = stored.stats.sums["absmax"].ravel()
    close(ranges, [seen, np.nan, 2 * seen])  # the second one would show, if it were used


def test_lora_on_a_weight_with_static_scales():
    x = normal((6, 4), 0)
    t, params, apply = made(lambda x: hk.Linear(3)(x), x)
    _, state = apply(params, {}, x)
    a, b = normal((4, 2), 1), normal((2, 3), 2)
    reading = jax.jit(hki.with_quant_stats(t, update=False).apply)
    for base in (params, jax.jit(hki.convert_trained)(params, state)):
        lora = {"linear": dict(base["linear"], w=hki.LoRA(base["linear"]["w"], a, b))}
        out, _ = reading(lora, state, x)
        alone, _ = reading(base, state, x)
        close(out, alone + x @ a @ b, rtol=1e-5, atol=1e-5)


def test_statistics_that_are_left_out_start_anew_and_the_others_go_on():
    x = normal((6, 4), 0)
    _, params, apply = made(two_layers, x)
    _, state = apply(params, {}, x)
    del state["quant_stats"]["b/w"]
    _, state = apply(params, state, x)
    assert {name: float(count[0]) for name, (_, count) in stats_of(state).items()} == {
        "a/w": 2,
        "b/w": 1,
    }


# --- errors --------------------------------------------------------------------------------------


def test_a_weight_without_products_has_no_entry(may_be_dense):
    """Neither at first nor later: a loop carries one structure."""
    t = implicit(lambda x: x + hk.get_parameter("w", (4, 4), init=jnp.ones))
    params, x = hki.quantized_training({"~": {"w": normal((4, 4), 0)}}, [STATIC]), normal((4, 4), 1)
    first = hki.init_quant_stats(t, params, {}, x)
    _, later = jax.jit(hki.with_quant_stats(t).apply)(params, first, x)
    assert first == later == {}
    with pytest.raises(
        ValueError, match="no product has this parameter: .* leave it out by exclude"
    ):
        hki.convert_trained(params, later)


def test_errors_say_what_is_missing_and_what_to_do():
    x = normal((6, 4), 0)
    t, params, apply = made(lambda x: hk.Linear(3)(x), x)
    _, state = apply(params, {}, x)
    missing = "no statistics of 'linear/w' in quant_stats; wrap the model in with_quant_stats"
    with pytest.raises(ValueError, match=missing):
        t.apply(params, x)
    with pytest.raises(ValueError, match=missing):
        hki.with_quant_stats(t, update=False).apply(params, {}, x)
    with pytest.raises(
        ValueError, match="statistics of 'linear/w'.*under 'quant_stats'.*: nothing"
    ):
        hki.convert_trained(params)
    short = {"quant_stats": {"linear/w": {"count": jnp.ones(())}}}
    with pytest.raises(ValueError, match=r"'linear/w': expected 'count' \[\] and 'sum_of_absmax'"):
        apply(params, short, x)
    other = {"quant_stats": {"linear/w": dict(count=jnp.ones(()), sum_of_absmax=jnp.ones((6, 1)))}}
    with pytest.raises(
        ValueError, match=r"limits absmax \[1, 1\], but the statistics have .*\[6, 1\]"
    ):
        apply(params, other, x)
    with pytest.raises(ValueError, match=r"decay: expected a number in \(0, 1\], got 0"):
        hki.with_quant_stats(t, decay=0)
    with pytest.raises(TypeError, match="t: expected what hk.transform.*function"):
        hki.with_quant_stats(t.apply)
    with pytest.raises(TypeError, match="state: expected a mapping.*NoneType"):
        hki.with_quant_stats(t).apply(params, None, x)
    with pytest.raises(ValueError, match=r"rules\[0\]: act_static_scale.*use quantized_training"):
        hki.quantized_training_getter([STATIC])
    stored = hki.quantize_params({"linear": {"w": jnp.ones((4, 3))}}, rules=[FORWARD])
    with pytest.raises(ValueError, match=missing):
        hki.use_implicit_args(jnp.dot)(x, stored["linear"]["w"])


def test_a_model_with_such_a_state_is_refused():
    def model(x):
        hk.set_state("seen", x.sum())
        return hk.Linear(3)(x)

    x = normal((6, 4), 0)
    t = hki.transform_implicit(hk.transform_with_state(lambda x: Named(name="quant_stats")(x)))
    params, state = t.init(jax.random.key(0), x)
    params = hki.quantized_training(params, [STATIC])
    with pytest.raises(ValueError, match="'quant_stats' of its own.*another name"):
        hki.with_quant_stats(t).apply(params, {}, None, x)


class Named(hk.Module):
    def __call__(self, x):
        hk.set_state("seen", x.sum())
        return hk.Linear(3)(x)


def test_one_weight_and_activations_of_several_shapes():
    x = normal((2, 3, 4), 0)

    def model(x):
        linear = hk.Linear(4)
        return linear(x), linear(x[:, :2])

    t, params, apply = made(model, x)
    with pytest.raises(ValueError, match="'linear/w'.*another product with the same weight"):
        apply(params, {}, x)


@pytest.mark.slow
def test_products_by_themselves():
    x, w = normal((5, 4), 0), normal((4, 3), 1)
    found = dot_general(x, w, MATRICES, rule=STATIC, stats=fixed(1.5))
    close(found, ByHand.product(np.asarray(x), np.asarray(w), 1.5), rtol=1e-5, atol=1e-5)
    with pytest.raises(
        ValueError, match="act_static_scale: there are no statistics in quant_stats"
    ):
        einsum("bi,ij->bj", x, w, rule=STATIC)
    with pytest.raises(ValueError, match="an activation and a weight, got one of two activations"):
        dot_general(x, w, MATRICES, rule=STATIC, rhs_is_weight=False)
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_batch_axes=(2,))
    with pytest.raises(
        ValueError, match=r"act_batch_axes: .*has 2 \(its shape is \[5, 4\]\), got 2"
    ):
        dot_general(x, w, MATRICES, rule=rule, stats=fixed(1.0))
    q = hki.QuantizedMatrix.quantize(w, "int8", activation="int8")
    with pytest.raises(TypeError, match="weight: expected a QuantizedMatrix"):
        hki.StaticQuantized.of(w, fixed(1.0))
    with pytest.raises(ValueError, match="weight: expected one with an activation"):
        hki.StaticQuantized.of(q.with_activation(None), fixed(1.0))
    with pytest.raises(ValueError, match=r"mode='fixed' and the batch axes \[\], got mode='read'"):
        hki.StaticQuantized.of(q, QuantStats({}, jnp.ones(()), mode="read"))
