"""Quantization from a calibration batch: the inputs of each weight, and GPTQ by its definition."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.params.quantizing import carried, programs
from haiku_implicit.quantization import QuantRule
from haiku_implicit.quantized.numbers import gptq
from tests.random_arrays import numpy_normal as normal
from tests.tiers import few


def close(a, b, rtol=1e-4):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.abs(b).max()))


# --- the inputs of each weight ----------------------------------------------------------------------------------


def model(x):
    """Two layers, the first one used twice, the second one within a checkpoint."""
    first = hk.Linear(4, name="first")
    h = jax.nn.relu(first(x)) + first(2 * x)
    h = hk.remat(hk.Linear(5, name="second"))(jnp.tanh(h))
    return h, hk.Linear(2, with_bias=False, name="third")(h[:, None] * jnp.ones((3, 1))).argmax(-1)


def test_moments_are_those_of_all_inputs():
    t = hk.without_apply_rng(hk.transform(model))
    batches = [normal((6, 3)), normal((2, 3), 1)]
    params = t.init(jax.random.key(0), batches[0])
    # The third feeds nothing but a choice, which has no gradient: it is not seen.
    with pytest.warns(UserWarning, match="inputs of 1 of 3 weights were not seen: .* third/w"):
        got = hki.input_moments(t.apply, params, batches)
    assert set(got) == {"first/w", "second/w"}
    x = np.concatenate(batches)
    close(got["first/w"], 5 * x.T @ x)
    first = params["first"]
    h = np.tanh(np.maximum(x @ first["w"] + first["b"], 0) + 2 * x @ first["w"] + first["b"])
    close(got["second/w"], h.T @ h)


def test_batches_are_tuples_of_arguments_or_one_argument():
    t = hk.without_apply_rng(hk.transform(lambda x, y: hk.Linear(3)(x + y)))
    x = normal((5, 4))
    params = t.init(jax.random.key(0), x, x)
    two = hki.input_moments(t.apply, params, [(x, x)])
    one = hki.input_moments(lambda params, x: t.apply(params, x, x), params, [x])
    close(two["linear/w"], one["linear/w"])
    close(two["linear/w"], 4 * x.T @ x)


def test_batches_are_anything_that_python_iterates_over():
    class Dataset:
        """Has the older protocol, as datasets of PyTorch do."""

        def __getitem__(self, i):
            return [x, 2 * x][i]

    t = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
    x = normal((5, 4))
    params = t.init(jax.random.key(0), x)
    close(hki.input_moments(t.apply, params, Dataset())["linear/w"], 5 * x.T @ x)


@pytest.mark.slow
def test_moments_of_stacked_layers():
    def stacked(x):
        return hk.experimental.layer_stack(3)(lambda x: jnp.sin(hk.Linear(4, name="l")(x)))(x)

    t = hk.without_apply_rng(hk.transform(stacked))
    x = normal((5, 4))
    params = t.init(jax.random.key(0), x)
    ((path, got),) = hki.input_moments(t.apply, params, [x]).items()
    (own,) = params.values()
    for w, b, moments in zip(own["w"], own["b"], got, strict=True):
        close(moments, x.T @ x)
        x = np.sin(x @ w + b)
    new = hki.quantize_with_inputs(params, {path: got}, dtype="int8")
    out = hki.transform_implicit(t).apply(new, normal((5, 4)))
    close(out, t.apply(params, normal((5, 4))), rtol=0.05)


def test_moments_of_columns():
    """The gates of a recurrent weight, and a weight whose columns are scaled."""

    def gates(x):
        w = hk.get_parameter("w", (3, 4), init=hk.initializers.RandomNormal())
        first, second = jnp.split(w, [1], axis=1)
        return x @ first, (2 * x) @ (second / 3), (3 * x) @ w[:, 1:3], x @ (w / jnp.arange(1.0, 5))

    t = hk.without_apply_rng(hk.transform(gates))
    x = normal((6, 3))
    params = t.init(jax.random.key(0), x)
    with hki.materialization("error"):
        close(hki.input_moments(t.apply, params, [x])["~/w"], (1 + 4 + 9 + 1) * x.T @ x)
        close(hki.input_maxima(t.apply, params, [x])["~/w"], 3 * np.abs(x).max(0))


@pytest.mark.slow
@pytest.mark.parametrize("method", few(["gptq", "awq", "smoothquant"], "gptq"))
def test_a_model_with_strict_promotion(method):
    """Dtypes are mixed by the library's rules, where a model may not."""
    t = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))
    x = normal((6, 8))
    params = t.init(jax.random.key(0), x)
    observe = hki.input_maxima if method == "smoothquant" else hki.input_moments
    with jax.numpy_dtype_promotion("strict"):
        inputs = observe(t.apply, params, [x])
        new = hki.quantize_with_inputs(
            params, inputs, method=method, dtype="int8", activation="int8"
        )
        out = jax.jit(hki.transform_implicit(t).apply)(new, x)
        merged = hki.merge_lora(hki.add_lora(new, 0, rank=1), requantize=True)
    close(out, t.apply(params, x), rtol=0.03)
    close(hki.materialize(merged["linear"]["w"]), params["linear"]["w"], rtol=0.03)


def _weight():
    return hk.get_parameter("w", (3, 2, 4), init=hk.initializers.RandomNormal())


def test_errors():
    t = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
    params = t.init(jax.random.key(0), normal((1, 3)))
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        hki.input_moments(t.apply, params, [])
    with pytest.raises(ValueError, match="apply: expected floating outputs, got none"):
        hki.input_moments(lambda p, x: t.apply(p, x) > 0, params, [normal((1, 3))])
    with pytest.raises(ValueError, match="targets: 'linear/v' matches none"):
        hki.input_moments(t.apply, params, [normal((1, 3))], targets="linear/v")
    # A weight of which another axis than the next to last is contracted is not seen.
    einsum = hk.without_apply_rng(hk.transform(lambda x: jnp.einsum("nc,chd->nhd", x, _weight())))
    own = einsum.init(jax.random.key(0), normal((1, 3)))
    with pytest.warns(
        UserWarning,
        match=r"1 of 1 weights were not seen: .*: ~/w\. quantize_with_inputs leaves them dense; then quantize_params",
    ) as told:
        assert (inputs := hki.input_moments(einsum.apply, own, [normal((1, 3))])) == {}
    assert [w.filename for w in told] == 2 * [__file__] and "as 3 matrices of 2 x 4" in str(told[0])
    with pytest.raises(ValueError, match="inputs: .* input_moments says .* got nothing: no weight"):
        hki.quantize_with_inputs(own, inputs)
    with pytest.raises(ValueError, match="inputs: the parameters have no other/w"):
        hki.quantize_with_inputs(params, {"other/w": jnp.eye(3)})
    for moments in (jnp.eye(4), jnp.ones(3)):
        with pytest.raises(
            ValueError, match=r"linear/w: .* input_moments says, \[..., k, k\], got "
        ):
            hki.quantize_with_inputs(params, {"linear/w": moments})
    with pytest.raises(ValueError, match="linear/w: moments of its inputs are infinite or NaN"):
        hki.quantize_with_inputs(params, {"linear/w": jnp.full((3, 3), jnp.nan)})
    with pytest.raises(ValueError, match="linear/w: moments of its inputs are infinite or NaN"):
        broken = jnp.full((3, 3), jnp.nan)
        jax.jit(lambda params: hki.quantize_with_inputs(params, {"linear/w": broken}))(params)
    with pytest.raises(ValueError, match=r"linear/w .*group_size"):
        hki.quantize_with_inputs(params, {"linear/w": jnp.eye(3)}, group_size=2)


# --- GPTQ ------------------------------------------------------------------------------------------


def correlated(n, k, seed=0):
    """Inputs as activations are: correlated, a few of them much larger."""
    mix = normal((k, k), seed) * np.exp(normal((k,), seed + 1))
    return normal((n, k), seed + 2) @ mix


def by_definition(w, moments, scale):
    """Algorithm 1 of the paper with the inverse recomputed in each step, in double precision."""
    w, h = w.astype(np.float64).copy(), moments.astype(np.float64)
    h = h / (np.trace(h) / len(h)) + gptq.DAMPING * np.eye(len(h))
    left = list(np.argsort(-np.diag(moments), kind="stable"))
    codes = np.zeros_like(w)
    while left:
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        i = left[0]
        codes[:, i] = np.clip(np.round(w[:, i] / scale[:, i]), -8, 7)
        error = (w[:, i] - codes[:, i] * scale[:, i]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return codes


def test_codes_are_those_of_the_paper():
    w, x = normal((5, 12)), correlated(40, 12)
    q = hki.QuantizedMatrix.quantize(w, "int4", 4, axis=-1, moments=x.T @ x)
    scale = np.repeat(np.asarray(q.scale), 4, axis=-1)
    want = by_definition(w, x.T @ x, scale) * scale
    got = np.asarray(hki.materialize(q))
    # A value halfway between two codes, in single precision, may fall to the other side.
    assert np.isclose(got, want, rtol=1e-4).mean() > 0.95


FORMATS = {
    "int4": dict(dtype="int4", group_size=16),
    "uint4": dict(dtype="int4", group_size=16, zero_point=True),
    "nf4": dict(dtype="nf4", group_size=16, scale_dtype="bfloat16"),
    "int3": dict(dtype="int3", group_size=32),
    "int8": dict(dtype="int8"),
    "mxfp4": dict(dtype="mxfp4"),
    "nvfp4": dict(dtype="nvfp4"),
    "padded": dict(dtype="int2"),
}


@pytest.mark.parametrize("name", few(FORMATS, "int4", "nvfp4"))
@pytest.mark.slow
def test_outputs_have_less_error_than_by_rounding(name):
    w = normal((62 if name == "padded" else 64, 24))
    x = correlated(256, len(w))
    options = FORMATS[name]

    def error(**more):
        q = jax.jit(lambda w: hki.QuantizedMatrix.quantize(w, **options, **more))(w)
        return float(np.linalg.norm(x @ (hki.materialize(q) - w)))

    rounded, found = error(calibration="mse"), error(calibration="mse", moments=x.T @ x)
    assert found < 0.7 * rounded


def test_moments_of_another_shape():
    with pytest.raises(ValueError, match=r"moments: expected shape \[16, 16\] .*got \[4, 4\]"):
        hki.QuantizedMatrix.quantize(normal((16, 4)), "int8", moments=np.eye(4))


def test_inputs_that_are_never_seen():
    """Moments of zero, of one input or of all of them, leave finite codes."""
    w, x = normal((16, 4)), correlated(8, 16)
    x[:, 3] = 0
    for moments in (x.T @ x, np.zeros((16, 16), np.float32)):
        q = hki.QuantizedMatrix.quantize(w, "int8", moments=moments)
        assert np.abs(hki.materialize(q) - w).max() < 1


@pytest.mark.slow
def test_rules_in_place_of_options():
    w, x = normal((8, 4)), normal((16, 8))
    params = {"a": {"w": w}, "head": {"w": w}, "b": {"w": w}}
    inputs = {f"{name}/w": x.T @ x for name in params}
    rules = [
        QuantRule(module_path="head"),
        QuantRule(module_path="b", weight_qtype="int8", act_qtype="int8"),
        QuantRule(weight_qtype="int4", tile_size=4, weight_calibration_method="mse"),
    ]
    new = hki.quantize_with_inputs(params, inputs, rules=rules)
    alone = hki.quantize_with_inputs(params, inputs, group_size=4)
    np.testing.assert_array_equal(*(hki.materialize(p["a"]["w"]) for p in (new, alone)))
    assert new["head"]["w"] is w
    assert (new["b"]["w"].format, new["b"]["w"].activation) == ("int8", "int8")
    with pytest.raises(ValueError, match="rules: .* in place of dtype, got both"):
        hki.quantize_with_inputs(params, inputs, rules=rules, dtype="int8")
    with pytest.raises(ValueError, match="a/w .*'smoothquant' is for quantized activations"):
        maxima = {name: jnp.ones(8) for name in inputs}
        hki.quantize_with_inputs(params, maxima, method="smoothquant", rules=rules)
    static = QuantRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    with pytest.raises(ValueError, match="a/w .*act_static_scale has no form"):
        hki.quantize_with_inputs(params, inputs, rules=[static])


# --- errors that reach later weights --------------------------------------------------------------


def two_layers(x):
    return hk.Linear(3, with_bias=False, name="b")(
        jnp.tanh(hk.Linear(8, with_bias=False, name="a")(x))
    )


def carried_by_definition(dense, quantized, w):
    """The moments of inputs, and the weight that takes up their errors."""
    moments = quantized.T @ quantized
    damped = moments + gptq.DAMPING * np.trace(moments) / 8 * np.eye(8, dtype=np.float32)
    made_up = np.linalg.solve(damped, quantized.T @ (dense - quantized) @ w)
    return jnp.asarray(moments), w + carried.STRENGTH * made_up


@pytest.mark.slow
def test_a_later_weight_makes_up_for_the_errors_of_an_earlier_one():
    """By the definition: moments of the quantized model, and `X̃ (w + δ)` near `X w`."""
    t = hk.without_apply_rng(hk.transform(two_layers))
    batches, how = [correlated(24, 8), correlated(8, 8)], dict(dtype="int2", calibration="absmax")
    params = t.init(jax.random.key(0), batches[0])
    inputs = hki.input_moments(t.apply, params, batches)
    plain = hki.quantize_with_inputs(params, inputs, **how)
    new = hki.quantize_with_inputs(params, inputs, carry=(t.apply, batches), **how)
    x, (a, b) = np.concatenate(batches), (params[name]["w"] for name in "ab")
    close(hki.materialize(new["a"]["w"]), hki.materialize(plain["a"]["w"]))
    dense, quantized = np.tanh(x @ a), np.tanh(x @ hki.materialize(new["a"]["w"]))
    moments, w = carried_by_definition(dense, quantized, b)
    own = {"b": {"w": w}}
    want = hki.quantize_with_inputs(own, {"b/w": moments}, **how)
    close(hki.materialize(new["b"]["w"]), hki.materialize(want["b"]["w"]))
    assert not np.allclose(hki.materialize(new["b"]["w"]), hki.materialize(plain["b"]["w"]))


def block(x, name=""):
    h = jnp.tanh(hk.Linear(8, name=name + "z")(x)) * hk.Linear(8, name=name + "y")(x)
    return x + hk.remat(hk.Linear(8, name=name + "a"))(h)


@pytest.mark.slow
def test_stacked_layers_are_quantized_as_separate_ones():
    """Two stacks of two layers, and then a matrix."""

    def separate(x):
        for name in "pqrs":
            x = block(x, name)
        return hk.Linear(4, name="head")(x)

    def stacks(x):
        for name in "tu":
            x = hk.experimental.layer_stack(2, name=name)(block)(x)
        return hk.Linear(4, name="head")(x)

    one, two = (hk.without_apply_rng(hk.transform(f)) for f in (separate, stacks))
    x = correlated(32, 8)
    params = one.init(jax.random.key(0), x)
    places = {
        f"{name}/{c}": (a + c, b + c)
        for name, (a, b) in zip("tu", ("pq", "rs"), strict=True)
        for c in "zya"
    }
    stack = {
        path: jax.tree.map(lambda *w: jnp.stack(w), *(params[i] for i in own))
        for path, own in places.items()
    } | {"head": params["head"]}

    def quantized(t, params):
        inputs = hki.input_moments(t.apply, params, [x])
        options = dict(dtype="int4", calibration="absmax", scale_dtype="bfloat16")
        return hki.quantize_with_inputs(params, inputs, carry=(t.apply, [(x,)]), **options)

    own, stacked = quantized(one, params), quantized(two, stack)
    for path, layers in places.items():
        got = hki.materialize(stacked[path]["w"])
        close(got, np.stack([hki.materialize(own[i]["w"]) for i in layers]))
    close(hki.materialize(stacked["head"]["w"]), hki.materialize(own["head"]["w"]))
    out = jax.jit(hki.transform_implicit(two).apply)(stacked, x)
    close(out, two.apply(hki.materialize(stacked), x))


def test_equal_layers_share_a_compiled_program():
    """The third layer differs in a number only, and the last one keeps nothing for later ones."""

    def fun(weights, x):
        factors = np.float32([2, 2, 3, 2, 2])
        return [x := jnp.tanh(x @ w) * f for w, f in zip(weights, factors.tolist(), strict=True)]

    args = list(normal((5, 8, 8))), normal((4, 8), 1)
    program = programs.Program(fun, *args)
    leaves = jax.tree.leaves(args)
    values = [program.start | dict(zip(program.inputs, leaves, strict=True))]
    for i, (number, want) in enumerate(zip(program.outputs, fun(*args), strict=True)):
        ((got,),) = program.advance(values, [number], program.outputs[i + 1 :])
        # (The parts and single operations add in other orders, and each layer doubles the difference.)
        close(got, want, 1e-5)
    assert len(program.compiled) == 3


def test_parts_with_other_numbers_of_operands_are_compiled_apart():
    def fun(x, y):
        first, second, third = jnp.split(x, 3)
        return first, second, third, x, *jnp.split(y, 3)[:2]

    args = jnp.arange(6.0), jnp.arange(6.0) + 10
    program = programs.Program(fun, *args)
    values = [program.start | dict(zip(program.inputs, args, strict=True))]
    (one,) = program.advance(values, program.outputs[:3], program.outputs[3:])
    (two,) = program.advance(values, program.outputs[3:], [])
    for got, want in zip([*one, *two], fun(*args), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_shared_weight_and_a_loop():
    """A weight that is used before and after another one, in a branch of a loop."""

    def shared(x):
        first = hk.Linear(8, name="first")
        h = hk.Linear(8, name="second")(jnp.tanh(first(x)))
        w = hk.get_parameter("w", (8, 8), init=hk.initializers.RandomNormal(0.3))

        def loop(h, i):
            return jax.lax.cond(i > 0, lambda h: jnp.tanh(h @ w), jnp.sin, h), None

        return jax.lax.scan(loop, first(h), jnp.arange(3))[0]

    t = hk.without_apply_rng(hk.transform(shared))
    x = correlated(64, 8)
    params = t.init(jax.random.key(0), x)
    inputs = hki.input_moments(t.apply, params, [x])
    assert set(inputs) == {"first/w", "second/w", "~/w"}

    def error(**more):
        new = hki.quantize_with_inputs(params, inputs, dtype="int3", **more)
        return float(jnp.linalg.norm(t.apply(hki.materialize(new), x) - t.apply(params, x)))

    assert error(carry=(t.apply, [x])) < 0.9 * error()


def test_a_stack_beside_a_matrix_with_the_same_inputs():
    def apply(params, x):
        own = params["m"]
        return jnp.tanh(x @ own["a"]) + x @ own["stack"][0] @ own["stack"][1]

    own = {"a": normal((8, 8)), "stack": normal((2, 8, 8), 1)}
    params, x = {"m": jax.tree.map(jnp.asarray, own)}, correlated(32, 8)
    inputs = hki.input_moments(apply, params, [x], matrix_axes={})

    how = dict(matrix_axes={}, dtype="int4", calibration="absmax")
    plain = hki.materialize(hki.quantize_with_inputs(params, inputs, **how))["m"]
    new = hki.quantize_with_inputs(params, inputs, carry=(apply, [x]), **how)
    got, w = hki.materialize(new)["m"], own["stack"]
    close(got["a"], plain["a"])
    close(got["stack"][0], plain["stack"][0])
    moments, changed = carried_by_definition(x @ w[0], x @ got["stack"][0], w[1])
    want = hki.quantize_with_inputs({"m": {"w": changed}}, {"m/w": moments}, **how)
    close(got["stack"][1], hki.materialize(want)["m"]["w"])
    assert not np.allclose(got["stack"][1], plain["stack"][1])


def test_errors_of_carry():
    t = hk.without_apply_rng(hk.transform(two_layers))
    params = t.init(jax.random.key(0), normal((1, 8)))
    inputs = {"a/w": jnp.eye(8)}
    with pytest.raises(ValueError, match="carry: expected at least one batch, got none"):
        hki.quantize_with_inputs(params, inputs, carry=(t.apply, []))
    with pytest.raises(ValueError, match="carry: 'smoothquant' rounds without"):
        maxima = {"a/w": jnp.ones(8)}
        how = dict(method="smoothquant", activation="int8", carry=(t.apply, [normal((1, 8))]))
        hki.quantize_with_inputs(params, maxima, **how)
    with pytest.raises(ValueError, match="carry: the model does not use .* a/w"):
        hki.quantize_with_inputs(params, inputs, carry=(lambda p, x: x, [normal((1, 8))]))
