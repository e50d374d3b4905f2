"""`transform_implicit`: kinds of transformed functions, Haiku's features, and the eager cache."""

import functools
import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests.cases import CASES
from tests.haiku_models import MODELS, RNG, TOLERANCE, X, case, noise, quick_jit, with_lora
from tests.tiers import few


def with_int4(params):
    return hki.quantize_params(params, dtype="int4")


def with_qlora(params):
    return hki.quantize_params(with_lora(params), dtype="int4")


def with_zeros(params):
    return hki.zero_params(params, targets=".*")


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def assert_close(a, b, close=close):
    a, b = hki.materialize((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(close, a, b)


# --- kinds of transformed functions -----------------------------------------------------------


def linear(x):
    """Three outputs."""
    return hk.Linear(3, b_init=jnp.ones)(x)


def counted(x):
    count = hk.get_state("count", (), init=jnp.zeros)
    hk.set_state("count", count + 1)
    return linear(x) + count


def encoder_and_decoder():
    encoder, decoder = hk.Linear(3), hk.Linear(4)
    return (lambda x: decoder(encoder(x))), {"encode": encoder, "decode": (decoder,)}


KINDS = {
    "transform": (hk.transform, linear),
    "transform_with_state": (hk.transform_with_state, counted),
    "multi_transform": (hk.multi_transform, encoder_and_decoder),
    "multi_transform_with_state": (hk.multi_transform_with_state, encoder_and_decoder),
}


@pytest.mark.parametrize("rng", [True, False], ids=["rng", "without_apply_rng"])
@pytest.mark.parametrize("name", KINDS)
def test_kind(name, rng):
    transform, fun = KINDS[name]
    plain = transform(fun)
    plain = plain if rng else hk.without_apply_rng(plain)
    t = hki.transform_implicit(plain)
    assert type(t) is type(plain)
    assert jax.tree.structure(t) == jax.tree.structure(plain)
    assert inspect.signature(t.init) == inspect.signature(plain.init)
    for wrapped, own in zip(jax.tree.leaves(t.apply), jax.tree.leaves(plain.apply), strict=True):
        assert inspect.signature(wrapped) == inspect.signature(own)
        assert wrapped.__doc__ == own.__doc__
        assert getattr(wrapped, "_original_fn", None) is getattr(own, "_original_fn", None)

    out = t.init(RNG, X)
    assert_close(out, plain.init(RNG, X))
    stateful = "with_state" in name
    params, *state = out if stateful else (out,)
    implicit = with_lora(params)
    dense = hki.materialize(implicit)
    rest = [*state, *([None] if rng else [])]
    if "multi" in name:
        pairs = [(t.apply["encode"], plain.apply["encode"], X)]
        pairs += [(t.apply["decode"][0], plain.apply["decode"][0], jnp.ones((2, 3)))]
    else:
        pairs = [(t.apply, plain.apply, X)]
    for apply, own, x in pairs:
        assert_close(apply(implicit, *rest, x), own(dense, *rest, x))
        assert_close(quick_jit(apply)(implicit, *rest, x), own(dense, *rest, x))


@pytest.mark.parametrize("name", KINDS)
def test_commutes_with_without_apply_rng(name):
    transform, fun = KINDS[name]
    inside = hki.transform_implicit(hk.without_apply_rng(transform(fun)))
    outside = hk.without_apply_rng(hki.transform_implicit(transform(fun)))
    assert type(inside) is type(outside)
    out = inside.init(RNG, X)
    params, *state = out if "with_state" in name else (out,)
    implicit = with_lora(params)
    a, b = (t.apply["encode"] if "multi" in name else t.apply for t in (inside, outside))
    assert_close(a(implicit, *state, X), b(implicit, *state, X))


@pytest.mark.parametrize("wrong", [linear, (linear, linear), None])
def test_wrong_kind(wrong):
    with pytest.raises(
        TypeError, match=r"t: expected what hk\.transform.*got (function|tuple|NoneType)"
    ):
        hki.transform_implicit(wrong)


# --- Haiku's features -------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.combinations
@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("make", [with_lora, with_int4, with_zeros])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "while_loop"])
def test_feature(name, make):
    """Results and gradients, compiled; a loop of unknown length has no reverse derivative."""
    case(name).check(make, TOLERANCE.get(name, 1e-4))


@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("name", ["layer_stack", "scan", "cond", "grad", "mixed_precision"])
def test_feature_with_lora_on_quantized_weights(name):
    case(name).check(with_qlora, TOLERANCE.get(name, 1e-4))


@pytest.mark.every(2)
@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("name", MODELS)
def test_feature_eagerly(name):
    c = case(name)
    implicit = with_lora(c.params)
    out = hki.transform_implicit(c.plain).apply(implicit, c.state, RNG, X)
    tolerance = TOLERANCE.get(name, 1e-4)
    expected = quick_jit(c.plain.apply)(hki.materialize(implicit), c.state, RNG, X)
    assert_close(out, expected, functools.partial(close, rtol=tolerance, atol=tolerance))


@pytest.mark.parametrize("name", ["mlp", "nested_modules", "remat", "layer_stack", "scan", "vmap"])
def test_lora_is_never_dense(name, never_dense):
    c = case(name)
    implicit = with_lora(c.params)
    jax.eval_shape(hki.transform_implicit(c.plain).apply, implicit, c.state, RNG, X)


def test_outer_vmap_and_scan_over_stacked_parameters():
    c = case("mlp")
    plain, params, state = c.plain, c.params, c.state
    t = hki.transform_implicit(plain)
    many = [noise(with_lora(params), seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *many)
    expected = jnp.stack([plain.apply(hki.materialize(p), state, RNG, X)[0] for p in many])
    apply = functools.partial(lambda p: t.apply(p, state, RNG, X)[0])
    close(jax.vmap(apply)(stacked), expected)
    close(jax.lax.map(apply, stacked), expected)
    close(jnp.stack([jax.checkpoint(apply)(p) for p in many]), expected)
    assert jax.eval_shape(apply, many[0]).shape == expected.shape[1:]


@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_mixed_precision_does_not_widen_payloads(compute):
    """jmp's casts say what dtype the weight is of; the codes stay as small as they were."""
    policy = jmp.get_policy(f"params=float32,compute={compute},output=float32")
    seen = []

    class Probe(hk.Module):
        def __call__(self, x):
            w = hk.get_parameter("w", (4, 3), x.dtype, init=jnp.ones)
            seen.append(w.dtype.name)
            hk.set_state("w", w)
            return x @ w

    t = hki.transform_implicit(hk.transform_with_state(lambda x: Probe()(x)))
    with hk.mixed_precision.push_policy(Probe, policy):
        params, state = t.init(RNG, X)
        params = hki.quantize_params(params)
        out, state = t.apply(params, state, RNG, X)
    assert seen == [compute] * 2
    assert out.dtype == jnp.float32
    kept = state["probe"]["w"]
    assert isinstance(kept, hki.QuantizedMatrix)
    assert kept.dtype == compute
    assert [x.dtype for x in jax.tree.leaves(kept) if x.dtype == jnp.int8]
    assert kept.nbytes <= params["probe"]["w"].nbytes


def test_state_is_implicit_and_changes(never_dense):
    def f(x):
        w = hk.get_state("w", (4, 3), init=lambda s, d: hki.box(hki.Zeros(shape=s, dtype=d)))
        a, b = jnp.ones((4, 1)) * x.sum(), jnp.ones((1, 3))
        hk.set_state("w", hki.box(hki.LoRA(jnp.zeros((4, 3)), a, b)))
        return x @ w

    t = hki.transform_implicit(hk.transform_with_state(f))
    params, state = t.init(RNG, X)
    assert isinstance(state["~"]["w"], hki.Zeros)
    out, state = t.apply(params, state, RNG, X)
    assert isinstance(out, hki.Zeros)
    assert isinstance(state["~"]["w"], hki.LoRA)
    out, state = jax.jit(t.apply)(params, state, RNG, X)
    close(out, X @ jnp.full((4, 3), X.sum()))
    assert isinstance(state["~"]["w"], hki.LoRA)


def test_implicit_state_through_scan(never_dense):
    """An implicit state that every step replaces is a carry of `hk.scan`."""

    def f(x):
        hk.get_state("w", (4, 3), init=lambda s, d: hki.box(_lora(s, jnp.zeros(()))))

        def step(carry, row):
            hk.set_state("w", hki.box(_lora((4, 3), row.sum())))
            return carry, row @ hk.get_state("w")

        return hk.scan(step, 0, x)[1]

    def _lora(shape, value):
        return hki.LoRA(jnp.zeros(shape), value * jnp.ones((4, 1)), jnp.ones((1, 3)))

    t = hki.transform_implicit(hk.transform_with_state(f))
    out, state = t.apply(*t.init(RNG, X), RNG, X)
    close(out, X.sum(1, keepdims=True) ** 2 * jnp.ones((1, 3)))
    assert isinstance(state["~"]["w"], hki.LoRA)


def test_get_params_and_current_state_come_back_as_stored():
    def f(x):
        y = linear(x)
        hk.set_state("params", x.sum())
        return y, hk.get_params(), hk.get_current_state()

    t = hki.transform_implicit(hk.transform_with_state(f))
    params, state = t.init(RNG, X)
    implicit = with_lora(params)
    (_, params_out, state_out), _ = t.apply(implicit, state, RNG, X)
    assert_close(params_out, implicit)
    close(state_out["~"]["params"], X.sum())


def test_do_not_store_keeps_a_frozen_base_outside():
    base = hki.LoRA(jnp.ones((4, 3)), jnp.ones((4, 1)), jnp.ones((1, 3)))

    def outside(next_getter, value, context):
        return next_getter(hki.box(base) if context.name == "w" else value)

    def do_not_store(next_creator, shape, dtype, init, context):
        return (
            hk.experimental.DO_NOT_STORE
            if context.name == "w"
            else next_creator(shape, dtype, init)
        )

    def f(x):
        with hk.custom_creator(do_not_store), hk.custom_getter(outside):
            return linear(x)

    t = hki.transform_implicit(hk.transform(f))
    params = t.init(RNG, X)
    assert list(params["linear"]) == ["b"]
    with hki.materialization("error"):
        close(t.apply(params, None, X), X @ hki.materialize(base) + 1)


def test_data_structures_take_an_implicit_parameter_for_one_value():
    params = case("mlp").params
    implicit = with_lora(params)
    is_w = lambda module, name, value: isinstance(value, hki.LoRA)  # noqa: E731
    w, b = hk.data_structures.partition(is_w, implicit)
    assert {n for _, n, _ in hk.data_structures.traverse(w)} == {"w"}
    assert_close(hk.data_structures.filter(is_w, implicit), w)
    assert_close(hk.data_structures.merge(w, b, check_duplicates=True), implicit)
    with pytest.raises(ValueError, match="different shape"):
        wrong = hk.data_structures.map(lambda m, n, v: jnp.ones(1), w)
        hk.data_structures.merge(wrong, w, check_duplicates=True)
    assert_close(
        hk.data_structures.map(lambda m, n, v: hki.materialize(v), implicit),
        hki.materialize(implicit),
    )
    assert hk.data_structures.is_subset(subset=w, superset=implicit)
    assert_close(
        hk.data_structures.to_mutable_dict(hk.data_structures.to_immutable_dict(implicit)), implicit
    )


def _lora_mlp(x):
    with hk.custom_creator(hki.lora_creator(rank=2)):
        return hk.nets.MLP([5, 3])(x)


def test_summaries_show_logical_shapes():
    t = hki.transform_implicit(hk.transform(_lora_mlp))
    plain = hk.transform(lambda x: hk.nets.MLP([5, 3])(x))
    tabulate = functools.partial(
        hk.experimental.tabulate, columns=("module", "owned_params", "params_size", "params_bytes")
    )
    table = tabulate(t)(X)
    assert table == tabulate(plain)(X)
    assert "w: f32[4,5]" in table
    rows = hk.experimental.eval_summary(t)(X)
    assert [tuple(r.output_spec.shape) for r in rows] == [(6, 3), (6, 5), (6, 3)]

    # Of a function of existing implicit parameters, too.
    params = t.init(RNG, X)
    rows = hk.experimental.eval_summary(lambda p, x: t.apply(p, None, x))(params, X)
    shapes = {k: tuple(v.shape) for r in rows for k, v in r.module_details.params.items()}
    assert shapes["mlp/~/linear_0/w"] == (4, 5)
    info = hk.experimental.jaxpr_info.make_model_info(t.apply)(params, None, X)
    assert info.expressions


def test_fast_eval_shape():
    t = hki.transform_implicit(hk.transform(_lora_mlp))
    shapes = hk.experimental.fast_eval_shape(t.init, RNG, X)
    assert str(shapes) == str(jax.eval_shape(t.init, RNG, X))
    assert isinstance(shapes["mlp/~/linear_0"]["w"], hki.LoRA)
    params = t.init(RNG, X)
    assert hk.experimental.fast_eval_shape(t.apply, params, RNG, X).shape == (6, 3)


def test_interceptor_around_apply_without_cache():
    calls = []

    def log(next_f, args, kwargs, context):
        calls.append(context.method_name)
        return next_f(*args, **kwargs)

    c = case("mlp")
    plain, params, state = c.plain, c.params, c.state
    t = hki.transform_implicit(plain, cache=False)
    for _ in range(2):
        with hk.intercept_methods(log):
            t.apply(with_lora(params), state, RNG, X)
    assert calls.count("__call__") == 2 * 3


def test_haiku_settings_are_left_alone():
    c = case("mlp")
    plain, params, state = c.plain, c.params, c.state
    t = hki.transform_implicit(plain)
    with hk.config.context(check_jax_usage=True, module_auto_repr=False, rng_reserve_size=4):
        implicit = with_lora(params)
        dense = hki.materialize(implicit)
        assert_close(t.apply(implicit, state, RNG, X), plain.apply(dense, state, RNG, X))

        def misused(x):
            return jax.vmap(lambda row: linear(row))(x)

        with pytest.raises(ValueError, match="Haiku overloaded transform"):
            hki.transform_implicit(hk.transform(misused)).init(RNG, X)


@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize(
    "make",
    [
        lambda: hk.EMAParamsTree(0.5, ignore_regex=".*/b"),
        lambda: hk.SNParamsTree(ignore_regex=".*/b"),
    ],
    ids=["EMAParamsTree", "SNParamsTree"],
)
@pytest.mark.slow
def test_params_trees_act_on_what_an_implicit_parameter_stands_for(make):
    plain = hk.transform_with_state(lambda tree: make()(tree))
    t = hki.transform_implicit(plain)
    implicit = with_lora(case("mlp").params)
    dense = hki.materialize(implicit)
    _, state = t.init(RNG, implicit)
    expected_state = hki.materialize(state)
    for _ in range(2):
        out, state = t.apply({}, state, RNG, implicit)
        expected, expected_state = plain.apply({}, expected_state, RNG, dense)
        assert_close((out, state), (expected, expected_state))
    with pytest.raises(TypeError, match="transform_implicit"):
        plain.apply({}, expected_state, RNG, implicit)


def test_optimize_rng_use_and_dropout():
    f = hk.experimental.optimize_rng_use(lambda x: hk.dropout(hk.next_rng_key(), 0.5, linear(x)))
    plain = hk.transform(f)
    t = hki.transform_implicit(plain)
    params = with_lora(plain.init(RNG, X))
    close(t.apply(params, RNG, X), plain.apply(hki.materialize(params), RNG, X))


# --- averages of parameters ------------------------------------------------------------------------


def dense_averages(values, decay=0.2, zero_debias=True):
    """What `hk.EMAParamsTree` gives for a sequence of dense arrays."""
    hidden, found = 0.0, []
    for i, value in enumerate(values, 1):
        hidden = hidden * decay + np.asarray(value) * (1 - decay)
        found.append(hidden / (1 - decay**i) if zero_debias else hidden)
    return found


@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize("kind", few(["lora", "int8", "zeros", "outer"], "lora"))
def test_averages_of_parameters_keep_the_type_of_their_state(kind):
    ema = hki.transform_implicit(
        hk.without_apply_rng(hk.transform_with_state(lambda tree: hk.EMAParamsTree(0.2)(tree)))
    )
    trees = [{"linear": {"w": CASES[kind](seed)}} for seed in range(4)]
    wanted = dense_averages([hki.materialize(tree["linear"]["w"]) for tree in trees])
    _, state = ema.init(None, trees[0])
    first = jax.tree.structure(state)
    for tree, want in zip(trees, wanted, strict=True):
        average, state = ema.apply(state=state, params=None, tree=tree)
        np.testing.assert_allclose(hki.materialize(average)["linear"]["w"], want, rtol=1e-5)
        assert jax.tree.structure(state) == first

    def step(state, tree):
        average, state = ema.apply(None, state, tree)
        return state, hki.materialize(average)["linear"]["w"]

    stacked = {
        "linear": {"w": jax.tree.map(lambda *x: jnp.stack(x), *(t["linear"]["w"] for t in trees))}
    }
    _, found = jax.lax.scan(step, ema.init(None, trees[0])[1], stacked, length=4)
    np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-5)


def test_averages_of_factors_are_taken_leaf_by_leaf():
    trainable, other = (hki.partition({"w": CASES["lora"](seed)})[0] for seed in (0, 1))
    average = optax.incremental_update(other, trainable, 0.25)
    assert jax.tree.structure(average) == jax.tree.structure(trainable)
    close(average["w"].a, 0.25 * other["w"].a + 0.75 * trainable["w"].a)


def test_the_average_of_one_part_of_a_partition_says_what_to_do():
    """Haiku's module averages arrays, and a part has None for the other one's."""
    model = hk.transform(lambda x: hk.Linear(8)(x))
    params = model.init(jax.random.key(0), jnp.ones((2, 4)))
    trainable, _ = hki.partition(hki.add_lora(params, 1, rank=2))
    average = hk.transform_with_state(lambda tree: hk.EMAParamsTree(0.5)(tree))
    for t in (average, hki.transform_implicit(average)):
        with pytest.raises(
            (TypeError, AttributeError), match="haiku_implicit.(combine|materialize)"
        ):
            t.init(None, trainable)
