"""Weights of more than two axes as one matrix: the axes given, or found by a run of the model."""

import dataclasses
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule, QuantRule
from tests.random_arrays import normal
from tests.tiers import few

WIDTH, HEADS, SIZE = 32, 2, 8


def attention(x):
    """As AlphaFold has it: projections to heads by einsum; and a weight for the transposed product."""

    def weight(name, *shape):
        return hk.get_parameter(name, shape, init=hk.initializers.RandomNormal(0.15))

    q = jnp.einsum("bta,ahc->bthc", x, weight("query_w", WIDTH, HEADS, SIZE))
    k = jnp.einsum(
        "bta,ahc->bthc", x, weight("key_w", WIDTH, HEADS * SIZE).reshape(WIDTH, HEADS, SIZE)
    )
    v = jnp.einsum("bta,hac->bthc", x, weight("value_w", HEADS, WIDTH, SIZE))
    p = jax.nn.softmax(jnp.einsum("bqhc,bkhc->bhqk", q, k))
    y = jnp.einsum("bhqk,bkhc->bqhc", p, v)
    x = x + jnp.einsum("bthc,hco->bto", y, weight("output_w", HEADS, SIZE, WIDTH))
    return x + jax.nn.gelu(x @ weight("up_w", 24, WIDTH).T) @ weight("down_w", 24, WIDTH)


class Block(hk.Module):
    def __call__(self, x):
        return attention(x)


def model(x):
    return hk.experimental.layer_stack(2)(lambda x: Block("inner")(x))(Block("first")(x))


T = hk.without_apply_rng(hk.transform(model))
X = normal((2, 5, WIDTH), 1)
# Drawn as `init` draws them, without a program at each import.
_LEAVES, _TREE = jax.tree.flatten(jax.eval_shape(T.init, jax.random.key(0), X))
PARAMS = _TREE.unflatten([normal(x.shape, i, scale=0.15) for i, x in enumerate(_LEAVES)])
IMPLICIT = hki.transform_implicit(T)
AXES = {
    "query_w": ((-3,), (-2, -1)),
    "key_w": ((-2,), (-1,)),
    "output_w": ((-3, -2), (-1,)),
    "up_w": ((-1,), (-2,)),
    "down_w": ((-2,), (-1,)),
}
GIVEN = {rf".*/{name}": axes for name, axes in AXES.items()}
FIRST, STACK = "first", "__layer_stack_no_per_layer/inner"


def error(found, expected):
    return float(np.abs(np.asarray(found - expected)).max() / np.abs(np.asarray(expected)).max())


def check(params, rtol=1e-5):
    """Nothing becomes dense, and the numbers are those of the dense twin."""
    with hki.materialization("error"):
        found = jax.jit(IMPLICIT.apply)(params, X)
    assert error(found, T.apply(hki.materialize(params), X)) < rtol


def test_axes_are_found_by_an_abstract_run():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    for apply, params, x in (
        (T.apply, PARAMS, X),
        (IMPLICIT.apply, shapes, jax.ShapeDtypeStruct(X.shape, X.dtype)),
        (jax.jit(T.apply), hki.quantize_params(PARAMS, matrix_axes={}), X),
        (IMPLICIT, PARAMS, X),
    ):
        found = hki.infer_matrix_axes(apply, params, x)
        # `value_w` `[heads, inputs, size]` is not a matrix, as its inputs are between its outputs ...
        expected = {f"{m}/{name}": axes for name, axes in AXES.items() for m in (FIRST, STACK)}
        own = {path: axes for path, axes in found.items() if not path.endswith("value_w")}
        assert own == expected
        # ... unless the order of axes may change.
        assert found[f"{FIRST}/value_w"] == ((-2,), (-3, -1))


def test_axes_are_followed_through_stacks_and_concatenations():
    """A gated unit with weights stacked as AlphaFold 3 stacks them; one of them is held transposed."""

    def gated(x):
        gate = hk.get_parameter("gate", [8, 2, 3], init=jnp.ones)
        value = hk.get_parameter("value", [6, 8], init=jnp.ones)
        both = jnp.stack([gate.reshape(8, 6), value.T], axis=1)
        w = hk.get_parameter("w", [8, 4], init=jnp.ones)
        more = jnp.concatenate([gate.reshape(8, 6), w], 1)
        return jnp.einsum("bk,kcn->cbn", x, both), x @ more

    t = hk.without_apply_rng(hk.transform(gated))
    x = jnp.ones((2, 8))
    found = hki.infer_matrix_axes(t.apply, t.init(None, x), x)
    assert found == {
        "~/gate": ((-3,), (-2, -1)),
        "~/value": ((-1,), (-2,)),
        "~/w": ((-2,), (-1,)),
    }


def test_weights_without_a_matrix_are_left_out():
    def model(x, flag, ids):
        assert flag == "a flag", "what is not an array is passed on"
        table = hk.get_parameter("table", [7, 4], init=jnp.ones)
        kernel = hk.Conv2D(3, 2)(x)
        whole = hk.get_parameter("whole", [4, 2], init=jnp.ones)
        batched = hk.get_parameter("batched", [4, 3, 5], init=jnp.ones)
        partly = hk.get_parameter("partly", [8, 5], init=jnp.ones)
        y = jnp.einsum("bij,ij->b", x[..., 0, :2], whole) + table[ids].sum() + kernel.sum()
        z = jnp.einsum("ba,ahc->bhc", x[:, :, 0, 0], batched)
        u = jnp.einsum("bh,bhc,ahc->abhc", x[:, :3, 0, 0], z, batched)
        return y, u, jnp.einsum("ba,ahc->bhc", x[:, :, 0, 0], partly.reshape(4, 2, 5))

    t = hk.transform(model)
    args = jnp.ones((2, 4, 4, 2)), "a flag", jnp.array([1, 2])
    params = t.init(jax.random.key(0), *args)
    found = hki.infer_matrix_axes(t.apply, params, None, args[0], "a flag", ids=args[2])
    assert found == {"~/batched": ((-3,), (-2, -1))}


@pytest.mark.parametrize("axes", few([GIVEN, "inferred"], GIVEN))
@pytest.mark.slow
def test_lora(axes):
    axes = hki.infer_matrix_axes(T, PARAMS, X) if axes == "inferred" else axes
    params = hki.add_lora(PARAMS, 0, rank=3, exclude=".*/value_w", matrix_axes=axes)
    for module, lead in ((FIRST, ()), (STACK, (2,))):
        q, o = params[module]["query_w"], params[module]["output_w"]
        assert q.shape == (*lead, WIDTH, HEADS, SIZE)
        assert q.matrix.a.shape == (*lead, WIDTH, 3) and q.matrix.b.shape == (
            *lead,
            3,
            HEADS * SIZE,
        )
        assert o.matrix.a.shape == (*lead, HEADS * SIZE, 3)
        assert isinstance(params[module]["key_w"], hki.LoRA)
    np.testing.assert_array_equal(
        hki.materialize(params)[FIRST]["query_w"], PARAMS[FIRST]["query_w"]
    )
    noisy = jax.tree.map(lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size).reshape(x.shape)), params)
    check(noisy)
    merged = hki.merge_lora(noisy)
    assert jax.tree.structure(merged) == jax.tree.structure(PARAMS)
    assert error(T.apply(merged, X), IMPLICIT.apply(noisy, X)) < 1e-5

    trained, frozen = hki.partition(noisy)
    names = {p[-1].name for p, _ in jax.tree_util.tree_leaves_with_path(trained) if len(p) > 2}
    assert names == {"a", "b"}
    found = jax.grad(lambda p: jnp.sum(IMPLICIT.apply(hki.combine(p, frozen), X) ** 2))(trained)
    expected = jax.grad(
        lambda p: jnp.sum(T.apply(hki.materialize(hki.combine(p, frozen)), X) ** 2)
    )(trained)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected
    )


EDITS = {
    "LoRA": lambda p, **more: hki.add_lora(p, 0, rank=3, **more),
    "DoRA": lambda p, **more: hki.add_adapter(p, 0, "dora", rank=3, **more),
    "int4": lambda p, **more: hki.quantize_params(p, dtype="int4", group_size=8, **more),
    "rules": lambda p, **more: hki.quantize_params(
        p, rules=[QuantRule(weight_qtype="int8")], **more
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", EDITS)
def test_prepared_parameters_need_no_axes(name):
    """The model once, then the same weights as with the axes in each call."""
    prepared = hki.prepare(T, PARAMS, X)
    given = EDITS[name](PARAMS, matrix_axes=hki.infer_matrix_axes(T, PARAMS, X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = EDITS[name](prepared)
    assert jax.tree.structure(params) == jax.tree.structure(given)
    jax.tree.map(np.testing.assert_array_equal, params, given)
    structs = jax.eval_shape(lambda: EDITS[name](hki.prepare(T, PARAMS, X)))
    assert jax.tree.structure(structs) == jax.tree.structure(params)


def test_messages_about_prepared_parameters():
    """They do not name `prepare` again, and count a dense matrix in a view as dense."""
    prepared = hki.prepare(T, PARAMS, X)
    tuned = hki.add_lora(prepared, 0, rank=2)
    with pytest.raises(ValueError, match=r"weights are implicit already; .* is LoRA float32"):
        hki.add_lora(tuned, 0, rank=2)
    with pytest.raises(ValueError, match=r"of rank 99 \(the rank can be \d+ at most\)") as error:
        hki.add_lora(prepared, 0, rank=99)
    assert "implicit" not in str(error.value)
    with pytest.warns(UserWarning, match=r"prepare: these weights are implicit already, .*query_w"):
        late = hki.prepare(T, hki.add_lora(PARAMS, 0, rank=2, matrix_axes={}), X)
    assert type(late[FIRST]["query_w"]) is hki.LoRA
    with_kernel = prepared | {"conv": {"w": jnp.ones((3, 3, 4, 1))}}
    with pytest.warns(UserWarning, match="1 weight gets no adapter") as told:
        hki.add_lora(with_kernel, 0, rank=2)
    assert not any("hki.prepare" in str(warning.message) for warning in told)


def test_prepared_parameters_have_the_same_values():
    prepared = hki.prepare(T, PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, hki.materialize(prepared), dict(PARAMS))
    check(prepared)
    assert prepared[FIRST]["key_w"] is PARAMS[FIRST]["key_w"]
    again = hki.prepare(IMPLICIT, prepared, X)
    assert jax.tree.structure(again) == jax.tree.structure(prepared)


@pytest.mark.slow
def test_a_prepared_weight_that_nothing_changes_stays_dense():
    """It is frozen by default, trained in its own shape, and the plain one in bases and merged trees."""
    targets = dict(targets=".*/query_w")
    prepared = hki.add_lora(hki.prepare(T, PARAMS, X), 0, rank=2, **targets)
    model, trained = hki.freeze(T, prepared)
    assert trained[FIRST].keys() == {"query_w_lora_a", "query_w_lora_b"}
    model, trained = hki.freeze(T, prepared, trainable_dense=".*/output_w")
    assert trained[STACK]["output_w"].shape == (2, HEADS, SIZE, WIDTH)
    np.testing.assert_allclose(model.apply(trained, X), T.apply(PARAMS, X), rtol=1e-4, atol=1e-5)
    half, _ = hki.partition(prepared, trainable_dense="first/output_w")
    assert len(jax.tree.leaves(half)) == 5  # two factors of two weights, and this one
    given = hki.add_lora(PARAMS, 0, rank=2, matrix_axes=GIVEN, **targets)
    adapter = hki.get_adapter(prepared)
    assert adapter.bases == hki.get_adapter(given).bases
    assert jax.tree.structure(hki.set_adapter(PARAMS, adapter)) == jax.tree.structure(given)
    hki.set_adapter(hki.prepare(T, PARAMS, X), adapter)
    assert jax.tree.structure(hki.merge_lora(prepared)) == jax.tree.structure(PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("trainable_dense", few([False, ".*/output_w"], ".*/output_w"))
def test_three_forms_of_a_loop_train_prepared_parameters_alike(trainable_dense):
    params = hki.add_lora(hki.prepare(T, PARAMS, X), 0, rank=2, targets=".*/query_w")
    model, trained = hki.freeze(T, params, trainable_dense=trainable_dense)
    half, frozen = hki.partition(params, trainable_dense)

    def loss(params):
        return (IMPLICIT.apply(params, X) ** 2).mean()

    def steps(of, grad, optimizer):
        @jax.jit
        def step(of, state):
            updates, state = optimizer.update(grad(of), state, of)
            return hki.apply_updates(of, updates), state

        state = optimizer.init(of)
        for _ in range(3):
            of, state = step(of, state)
        return of

    adam = optax.adam(1e-2)
    whole = steps(
        params,
        hki.grad(loss, trainable_dense=trainable_dense),
        hki.freeze_declared(adam, trainable_dense=trainable_dense),
    )
    half = steps(half, jax.grad(lambda p: loss(hki.combine(p, frozen))), adam)
    alone = steps(trained, jax.grad(lambda p: (model.apply(p, X) ** 2).mean()), adam)
    wanted = hki.materialize(whole)
    for found in (hki.combine(half, frozen), model.params(alone)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), hki.materialize(found), wanted
        )
    assert loss(whole) < 0.99 * loss(params)


@pytest.mark.parametrize("method", few(["gptq", "awq"]))
def test_calibration_of_prepared_parameters(method):
    prepared = hki.prepare(T, PARAMS, X)
    inputs = hki.input_moments(T.apply, prepared, [X])
    assert inputs[f"{STACK}/output_w"].shape[-1] == HEADS * SIZE
    params = hki.quantize_with_inputs(prepared, inputs, method=method, dtype="int4", group_size=8)
    check(params)
    options = {"int8": dict(dtype="int8"), "int4": INT4}
    found = hki.sensitivity(T.apply, prepared, [X], options, method=method)
    budget = sum(x.nbytes for x in jax.tree.leaves(PARAMS)) // 3
    small = found.quantize(prepared, found.allocate(budget))
    assert hki.summary(small).total.nbytes <= budget
    check(small)


@pytest.mark.parametrize("name", few(["trained", "aware"], "aware"))
def test_training_of_prepared_parameters(name):
    change = dict(trained=hki.quantized_training, aware=hki.quantization_aware)[name]
    rules = [QuantRule(weight_qtype="int8")]
    stored = hki.convert_trained(change(hki.prepare(T, PARAMS, X), rules))
    axes = hki.infer_matrix_axes(T, PARAMS, X)
    given = hki.convert_trained(change(PARAMS, rules, matrix_axes=axes))
    assert jax.tree.structure(stored) == jax.tree.structure(given)
    jax.tree.map(np.testing.assert_array_equal, stored, given)
    check(stored)


def test_shapes_of_prepared_parameters():
    structs = jax.eval_shape(lambda: PARAMS)
    prepared = hki.prepare(T, structs, jax.eval_shape(lambda: X))
    wanted = jax.eval_shape(lambda: hki.prepare(T, PARAMS, X))
    assert jax.tree.structure(prepared) == jax.tree.structure(wanted)
    assert list(map(str, jax.tree.leaves(prepared))) == list(map(str, jax.tree.leaves(wanted)))
    with pytest.raises(TypeError, match="expected arrays, got the struct"):
        hki.freeze(T, hki.add_lora(prepared, 0, rank=2, targets="first/query_w"))


def test_other_models_are_refused():
    multi = hk.multi_transform(lambda: (model, (model, model)))
    with pytest.raises(TypeError, match="of a multi-transform, one of its functions.*got Multi"):
        hki.prepare(multi, PARAMS, X)
    prepared = hki.prepare(multi.apply[0], PARAMS, None, X)
    assert isinstance(prepared[FIRST]["query_w"], hki.MatrixView)


INT4 = dict(dtype="int4", group_size=8)


@pytest.mark.parametrize("options", few([dict(dtype="int8"), INT4], INT4))
@pytest.mark.slow
def test_quantized(options):
    params = hki.quantize_params(PARAMS, exclude=".*/value_w", matrix_axes=GIVEN, **options)
    check(params)
    # One scale for each output and group of the inputs of all heads.
    groups = 1 if "group_size" not in options else HEADS * SIZE // 8
    assert params[FIRST]["output_w"].matrix.scale.shape == (WIDTH, groups)
    assert params[FIRST]["up_w"].shape == (24, WIDTH)
    of_matrix = np.asarray(PARAMS[FIRST]["output_w"]).reshape(-1, WIDTH)
    by_hand = hki.materialize(hki.QuantizedMatrix.quantize(of_matrix, **options))
    found = hki.materialize(params)[FIRST]["output_w"]
    np.testing.assert_array_equal(found.reshape(-1, WIDTH), by_hand)
    # LoRA on it needs no axes: the matrix is there.
    lora = hki.add_lora(params, 0, rank=2, exclude=".*/value_w")
    assert isinstance(lora[FIRST]["output_w"].matrix, hki.LoRA)
    check(lora)
    again = hki.merge_lora(lora, requantize=True)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    active = hki.quantize_activations(params)
    assert active[FIRST]["query_w"].matrix.activation == "int8"


@pytest.mark.slow
def test_rules_see_the_matrix():
    """A tile of the inputs; and a weight of three axes that is one for `dot_general`."""
    rules = [
        QuantRule(weight_qtype="int4", tile_size=8, op_names=("dot_general",)),
        QuantRule(weight_qtype="int8", op_names=("conv_general_dilated",)),
    ]
    params = hki.quantize_params(PARAMS, rules=rules, exclude=".*/value_w", matrix_axes=GIVEN)
    assert params[FIRST]["query_w"].matrix.format == "int4"
    assert params[FIRST]["query_w"].matrix.num_groups == WIDTH // 8
    check(params)


@pytest.mark.parametrize("method", few(["gptq", "awq", "smoothquant"]))
def test_calibration(method):
    """Inputs of weights with any axes; the error of products is less than by rounding."""
    axes = hki.infer_matrix_axes(T, PARAMS, X)
    collect = hki.input_maxima if method == "smoothquant" else hki.input_moments
    inputs = collect(T.apply, PARAMS, [X], matrix_axes=axes)
    assert inputs.keys() == axes.keys()
    assert inputs[f"{STACK}/output_w"].shape[-1] == HEADS * SIZE
    options = dict(dtype="int4", group_size=8)
    if method == "smoothquant":
        options = dict(dtype="int8", activation="int8")
    params = hki.quantize_with_inputs(PARAMS, inputs, method=method, matrix_axes=axes, **options)
    if method != "smoothquant":  # (whose activations are rounded in products alone)
        check(params)
        plain = hki.quantize_params(PARAMS, matrix_axes=axes, calibration="mse", **options)
        dense = T.apply(PARAMS, X)

        def distance(params):
            return float(jnp.linalg.norm(T.apply(hki.materialize(params), X) - dense))

        assert distance(params) < distance(plain)
    else:
        assert error(jax.jit(IMPLICIT.apply)(params, X), T.apply(PARAMS, X)) < 0.1


def test_inputs_of_an_einsum_are_its_second_moments():
    t = hk.without_apply_rng(
        hk.transform(
            lambda x: jnp.einsum("bhc,hco->bo", x, hk.get_parameter("w", [2, 3, 4], init=jnp.ones))
        )
    )
    x = normal((5, 2, 3))
    params = t.init(None, x)
    found = hki.input_moments(t.apply, params, [x], matrix_axes={"~/w": ((-3, -2), (-1,))})["~/w"]
    rows = np.asarray(x).reshape(5, 6)
    np.testing.assert_allclose(found, rows.T @ rows, rtol=1e-5)


PRODUCTS = {
    "bta,ahc->bthc": ((-3,), (-2, -1)),
    "bthc,hca->bta": ((-3, -2), (-1,)),
    "bta,ca->btc": ((-1,), (-2,)),
}


@pytest.mark.combinations
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("equation", PRODUCTS)
@pytest.mark.slow
def test_what_was_trained_is_what_is_stored(equation, static):
    """`convert_trained` of weights that are used in an einsum, or transposed."""
    sizes = dict(b=2, t=3, a=16, h=2, c=8)
    shapes = [[sizes[i] for i in own] for own in equation.split("->")[0].split(",")]
    x, w = (normal(s, i) for i, s in enumerate(shapes))
    t = hk.without_apply_rng(
        hk.transform(
            lambda x: jnp.einsum(equation, x, hk.get_parameter("w", w.shape, init=jnp.ones))
        )
    )
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=static)
    axes = {"~/w": PRODUCTS[equation]}
    params = hki.quantized_training({"~": {"w": w}}, [rule], matrix_axes=axes)
    plain = hki.quantized_training({"~": {"w": w}}, [rule])
    wrapped, state = hki.transform_implicit(t), None
    if static:
        _, state = hki.with_quant_stats(wrapped).apply(params, {}, x)
        trained = hki.with_quant_stats(wrapped, update=False).apply(params, state, x)[0]
    else:
        trained = wrapped.apply(params, x)
        # The axes make no difference to training.
        np.testing.assert_array_equal(trained, wrapped.apply(plain, x))
    stored = hki.convert_trained(params, state)
    assert isinstance(stored["~"]["w"], hki.MatrixView)
    np.testing.assert_allclose(wrapped.apply(stored, x), trained, rtol=1e-5, atol=1e-5)


@pytest.mark.every(2)
@pytest.mark.parametrize("static", [False, True])
def test_stacks_of_matrices_under_any_name(static):
    """A named stack of layers: each has scales of its own, as in training; without axes it is refused."""

    def stack(x):
        layer = lambda x: hk.Linear(16, with_bias=False)(x)  # noqa: E731
        return hk.experimental.layer_stack(3, name="blocks")(layer)(x)

    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(stack)))
    x = normal((8, 16))
    params = t.init(jax.random.key(1), x)
    params["blocks/linear"]["w"] *= jnp.array([1.0, 2.0, 8.0])[:, None, None]
    rule = QtRule(
        weight_qtype="int4", act_qtype="int8" if static else None, act_static_scale=static
    )
    axes = hki.infer_matrix_axes(t.apply, params, x)
    trained, state = hki.quantized_training(params, [rule], matrix_axes=axes), None
    if static:
        _, state = hki.with_quant_stats(t).apply(trained, {}, x)
        out = hki.with_quant_stats(t, update=False).apply(trained, state, x)[0]
    else:
        out = t.apply(trained, x)
    stored = hki.convert_trained(trained, state)
    np.testing.assert_allclose(t.apply(stored, x), out, rtol=1e-4, atol=1e-4)
    if not static:
        plain = hki.quantized_training(params, [rule])
        np.testing.assert_array_equal(out, t.apply(plain, x))
        with pytest.raises(ValueError, match=r"blocks/linear/w .*three axes.*matrix_axes="):
            hki.convert_trained(plain)
        dots = dataclasses.replace(rule, op_names=("dot_general",))
        stored = hki.convert_trained(hki.quantized_training(params, [dots]))
        np.testing.assert_allclose(t.apply(stored, x), out, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_experts():
    """`[experts, in, out]` in a batched product."""
    t = hk.without_apply_rng(
        hk.transform(
            lambda x: jnp.einsum(
                "ebd,edf->ebf", x, hk.get_parameter("w", [3, 16, 8], init=jnp.ones)
            )
        )
    )
    x, w = (normal(s, i) for i, s in enumerate([(3, 5, 16), (3, 16, 8)]))
    params = {"~": {"w": w * jnp.array([1.0, 3.0, 9.0])[:, None, None]}}
    axes = hki.infer_matrix_axes(t.apply, params, x)
    rule = QtRule(weight_qtype="int4", act_qtype="int8")
    trained = hki.quantized_training(params, [rule], matrix_axes=axes)
    wrapped = hki.transform_implicit(t)
    stored = hki.convert_trained(trained)
    np.testing.assert_allclose(
        wrapped.apply(stored, x), wrapped.apply(trained, x), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_gradients_of_normalized_views():
    """Weight normalization of a weight that is held transposed."""
    params = {"l": {"w": normal((8, 6))}}
    params = hki.add_lora(params, 0, rank=2, matrix_axes={"l/w": ((-1,), (-2,))})
    x = normal((3, 8), 1)

    def loss(params, x):
        w = params["l"]["w"]
        return jnp.sum((x @ (w / jnp.linalg.norm(w, axis=0) * w.mean(0))) ** 2)

    def of_leaves(loss):
        return jax.grad(loss)(params, x)["l"]["w"].matrix

    found = of_leaves(lambda p, x: hki.use_implicit_args(loss)(p, x))
    expected = of_leaves(lambda p, x: loss(hki.materialize(p), x))
    np.testing.assert_allclose(found.a, expected.a, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.b, expected.b, rtol=1e-4, atol=1e-5)


def test_quantization_aware():
    axes = {".*query_w": AXES["query_w"]}
    aware = hki.quantization_aware(
        PARAMS, [QuantRule(weight_qtype="int4")], targets=".*query_w", matrix_axes=axes
    )
    stored = hki.convert_trained(aware)
    np.testing.assert_array_equal(
        *(hki.materialize(tree)[FIRST]["query_w"] for tree in (aware, stored))
    )
    check(aware)
    assert stored[FIRST]["query_w"].matrix.scale.shape == (HEADS * SIZE, 1)


@pytest.mark.parametrize(
    "creator",
    [
        hki.lora_creator(2, targets=".*(query|output|up)_w", matrix_axes=GIVEN),
        pytest.param(
            hki.quantize_creator("int8", targets=".*(query|output|up)_w", matrix_axes=GIVEN),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_creators(creator):
    def made(x):
        with hk.custom_creator(creator):
            return model(x)

    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(made)))
    params = t.init(jax.random.key(0), X)
    for module in (FIRST, STACK):
        for name in ("query_w", "output_w", "up_w"):
            assert isinstance(params[module][name], hki.MatrixView), (module, name)
            assert params[module][name].shape == PARAMS[module][name].shape
    check(params)


def test_axes_that_do_not_fit_name_the_parameter():
    with pytest.raises(
        ValueError, match=r"first/query_w \(float32\[32,2,8\]\): matrix axes: expected"
    ):
        hki.add_lora(PARAMS, 0, rank=2, matrix_axes={"first/query_w": ([0], [1, 2])})
    quantized = hki.quantize_params(PARAMS, targets="first/query_w", matrix_axes={})
    with pytest.raises(
        ValueError, match=r"first/query_w .*implicit already.*function that made it"
    ):
        hki.add_lora(quantized, 0, rank=2, targets="first/query_w", matrix_axes=GIVEN)
    with pytest.raises(
        ValueError, match=r"matrix_axes: 'first/qery_w' matches none.*first/query_w"
    ):
        hki.add_lora(PARAMS, 0, rank=2, matrix_axes={"first/qery_w": ((-3,), (-2, -1))})


def test_a_reshape_with_a_sharding_is_followed():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    params = {"l": {"w": jnp.ones((32, 4, 4))}}

    def apply(params, x):
        return x @ params["l"]["w"].reshape(32, 16, out_sharding=PartitionSpec(None, None))

    with (getattr(jax, "set_mesh", None) or jax.sharding.use_mesh)(mesh):
        found = hki.infer_matrix_axes(apply, params, jnp.ones((2, 32)))
    assert found == {"l/w": ((-3,), (-2, -1))}


Q = ((-3,), (-2, -1))
PLAIN = ((-2,), (-1,))


def _scanned(w, x):
    carry = (x, w)  # the weight is a part of the carry, which the body passes on
    (y, w), _ = jax.lax.scan(lambda c, _: ((c[0] @ c[1], c[1]), None), carry, None, length=2)
    return y @ w


FOLLOWED = {
    "in a jit": (PLAIN, (8, 8), lambda w, x: jax.jit(jnp.matmul)(x, w)),
    "in a checkpoint": (PLAIN, (8, 8), lambda w, x: jax.checkpoint(lambda w, x: x @ w)(w, x)),
    "in a custom_jvp": (PLAIN, (8, 8), lambda w, x: jax.nn.relu(x @ w)),
    "cast and masked": (
        PLAIN,
        (8, 8),
        lambda w, x: x @ jnp.where(jnp.tri(8, dtype=bool), w.astype(jnp.bfloat16), 0),
    ),
    "in a carry": (PLAIN, (8, 8), _scanned),
    "in a while_loop": (
        PLAIN,
        (8, 8),
        lambda w, x: jax.lax.while_loop(
            lambda c: c[0].sum() < 0, lambda c: (c[0] @ c[1], c[1]), (x, w)
        ),
    ),
    "in a fori_loop": (PLAIN, (8, 8), lambda w, x: jax.lax.fori_loop(0, 3, lambda i, y: y @ w, x)),
    "in a branch": (
        ((-1,), (-2,)),
        (8, 8),
        lambda w, x: x @ jax.lax.cond(x.sum() > 0, lambda w: w.T, lambda w: (2 * w).T, w),
    ),
    "by index": (PLAIN, (3, 8, 8), lambda w, x: sum(x @ w[i] for i in range(3))),
    "one after another": (PLAIN, (3, 8, 8), lambda w, x: sum(x @ one for one in w)),
    "one of a pair": (
        Q,
        (8, 2, 4),
        lambda w, x: x @ jnp.stack([w.reshape(8, 8), jnp.zeros((8, 8))], 1)[:, 0],
    ),
    "both of a pair": (
        Q,
        (8, 2, 4),
        lambda w, x: x @ jnp.concatenate([w, w], 1).reshape(8, 16),
    ),
    "split again": (
        PLAIN,
        (8, 8),
        lambda w, x: x @ jnp.split(jnp.concatenate([w, jnp.zeros((8, 8))], 1), 2, 1)[0],
    ),
    "times another parameter": (
        ((-3,), (-2, -1)),
        (8, 2, 4),
        lambda w, x: jnp.einsum("ba,ahc->bhc", x, w * jnp.ones((1, 1, 4))),
    ),
    "solved for": (
        PLAIN,
        (8, 8),
        lambda w, x: jax.lax.custom_linear_solve(
            lambda y: y @ w, x, lambda _, y: y, lambda _, y: y
        ),
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_weights_are_followed(name):
    wanted, shape, model = FOLLOWED[name]
    params = {"l": {"w": jnp.ones(shape)}}
    found = hki.infer_matrix_axes(lambda p, x: model(p["l"]["w"], x), params, jnp.ones((2, 8)))
    assert found == {"l/w": wanted}


LOST = {
    "a sum of weights": lambda w, x: x @ (w + w.T),
    "a tile": lambda w, x: x @ jnp.tile(w, (1, 2)),
    "a carry that changes": lambda w, x: (
        x @ jax.lax.scan(lambda w, _: (w @ w / 2, None), w * 0, None, length=2)[0]
    ),
    "written to": lambda w, x: x @ w.at[0].set(0),
}


@pytest.mark.parametrize("name", LOST)
def test_other_values_than_weights_are_not_followed(name):
    params = {"l": {"w": jnp.ones((8, 8))}}
    apply = lambda p, x: LOST[name](p["l"]["w"], x)  # noqa: E731
    assert hki.infer_matrix_axes(apply, params, jnp.ones((2, 8))) == {}


def test_the_axes_cost_one_trace_of_the_model():
    """The model is traced once, and no operation of it is run again to find the axes."""
    traced, bound = [], []

    def counted(x):
        traced.append(1)
        return model(x)

    def bind(self, *args, **params):
        bound.append(self.name)
        return plain(self, *args, **params)

    t = hk.without_apply_rng(hk.transform(counted))
    primitive = type(jax.lax.dot_general_p)
    plain = primitive.bind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive, "bind", bind)
        jax.make_jaxpr(t.apply)(PARAMS, X)
        of_trace, bound[:], traced[:] = len(bound), [], []
        hki.infer_matrix_axes(t, PARAMS, X)
    assert len(traced) == 1 and 0 < len(bound) <= of_trace
