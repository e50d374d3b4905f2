"""`hki.freeze`: training loops as they are, of models that hold their frozen arrays."""

import functools
import pickle
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.core import compat
from tests.devices import run_on_devices
from tests.random_arrays import normal

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
DENSE = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 6, 2])(x)))


def changed(params, by=0.1):
    """Parameters in which no trained array is zero, as the factors of a new LoRA are."""
    trained, frozen = hki.partition(params)
    return hki.combine(jax.tree.map(lambda x: x + by, trained), frozen)


def with_lora(params):
    return changed(hki.add_lora(params, jax.random.key(1), rank=2))


def on_int8(params):
    return with_lora(hki.quantize_params(params, dtype="int8"))


MAKERS = {
    "LoRA": with_lora,
    "LoRA on int8": on_int8,
    "LoRA on nf4": lambda p: with_lora(hki.quantize_params(p, dtype="nf4", group_size=2)),
    "DoRA": lambda p: changed(hki.add_adapter(p, 3, "dora", rank=2)),
    "IA3 on LoRA": lambda p: changed(hki.add_adapter(with_lora(p), 4, "ia3", targets=".*/w")),
    "dense": lambda p: p,
}


def twins(make=on_int8, trainable_dense=False):
    """The loss of a frozen model and its parameters; the loss of the two halves and theirs."""
    params = make(DENSE.init(jax.random.key(0), X))
    model, own = hki.freeze(DENSE, params, trainable_dense=trainable_dense)
    half, frozen = hki.partition(params, trainable_dense)
    whole = hki.transform_implicit(DENSE)
    return (
        (lambda p, x: (model.apply(p, x) ** 2).sum(), own),
        (lambda p, x: (whole.apply(hki.combine(p, frozen), x) ** 2).sum(), half),
    )


def by_name(tree):
    """Arrays by path and field, whether a tree has implicit arrays or arrays of names like `w_lora_a`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(k, simple=True, separator="/").split("_")[-1]: x for k, x in leaves
    }


def assert_same(found, expected):
    found, expected = map(jax.tree.leaves, (found, expected))
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def step(loss, p, x):
    return jax.tree.map(lambda a, g: a - 0.01 * g, p, jax.grad(loss)(p, x))


USES = {
    "eager": lambda loss, p: loss(p, X),
    "jit": lambda loss, p: jax.jit(loss)(p, X),
    "grad": lambda loss, p: jax.grad(loss)(p, X),
    "jit of grad": lambda loss, p: jax.jit(jax.value_and_grad(loss))(p, X),
    "grad of jit": lambda loss, p: jax.grad(jax.jit(loss))(p, X),
    "vmap over inputs": lambda loss, p: jax.vmap(loss, (None, 0))(p, X),
    "vmap over models": lambda loss, p: jax.jit(jax.vmap(jax.grad(loss), (0, None)))(
        jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p), X
    ),
    "scan": lambda loss, p: jax.jit(
        lambda p: jax.lax.scan(lambda c, x: (step(loss, c, x), loss(c, x)), p, jnp.stack([X, -X]))
    )(p),
    "fori_loop": lambda loss, p: jax.lax.fori_loop(0, 3, lambda _, c: step(loss, c, X), p),
    "cond": lambda loss, p: jax.jit(
        jax.grad(lambda p: jax.lax.cond(X[0, 0] < 9, lambda: loss(p, X), lambda: 0.0))
    )(p),
    "checkpoint": lambda loss, p: jax.jit(jax.grad(jax.checkpoint(loss)))(p, X),
    "jvp of grad": lambda loss, p: jax.jvp(lambda p: jax.grad(loss)(p, X), (p,), (p,)),
    "linearize": lambda loss, p: jax.linearize(lambda p: loss(p, X), p)[1](p),
    "map in batches": lambda loss, p: jax.lax.map(lambda x: loss(p, x[None]), X, batch_size=2),
    "ahead of time": lambda loss, p: jax.jit(loss).lower(p, X).compile()(p, X),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("use", USES)
def test_the_frozen_model_computes_what_its_halves_do(use):
    (loss, own), (of_halves, half) = twins()
    assert_same(USES[use](loss, own), USES[use](of_halves, half))


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", MAKERS)
def test_each_kind_of_parameters(kind):
    (loss, own), (of_halves, half) = twins(MAKERS[kind], trainable_dense=r".*/b")
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(own))
    found = jax.jit(jax.value_and_grad(loss))(own, X)
    assert_same(found, jax.jit(jax.value_and_grad(of_halves))(half, X))


def test_trained_arrays_have_the_names_of_a_getter():
    def forward(x):
        with hk.custom_getter(hki.getter(functools.partial(hki.add_lora, rank=2))):
            return hk.nets.MLP([8, 6, 2])(x)

    added = hki.transform_implicit(hk.transform(forward)).init(jax.random.key(0), X)
    _, own = hki.freeze(DENSE, with_lora(DENSE.init(jax.random.key(0), X)))
    shapes = {m: {k: v.shape for k, v in p.items() if "lora" in k} for m, p in added.items()}
    assert jax.tree.map(jnp.shape, own) == shapes


# --- loops of others -------------------------------------------------------------------------------

IS_FACTOR = functools.partial(hk.data_structures.map, lambda m, n, v: n.endswith("_b"))
LABELS = functools.partial(hk.data_structures.map, lambda m, n, v: "ab"[n.endswith("_b")])

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "masked decay": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=IS_FACTOR),
    "two rates": lambda: optax.multi_transform(
        {"a": optax.sgd(1e-2), "b": optax.adam(1e-2)}, LABELS
    ),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "average": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2, momentum=0.9)),
    "masked": lambda: optax.masked(optax.adam(1e-2), IS_FACTOR),
    "lamb": lambda: optax.lamb(1e-2),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_optax(name):
    """The steps are those of the same model in which LoRA is written by hand."""
    params = with_lora(DENSE.init(jax.random.key(0), X))
    model, own = hki.freeze(DENSE, params)

    def by_hand(p, x):
        for i in range(3):
            w, layer = params[f"mlp/~/linear_{i}"]["w"], p[f"mlp/~/linear_{i}"]
            x = x @ (w.w + w.factor * layer["w_lora_a"] @ layer["w_lora_b"])
            x = x + params[f"mlp/~/linear_{i}"]["b"]
            x = jax.nn.relu(x) if i < 2 else x
        return x

    optimizer, trained = OPTIMIZERS[name](), []
    for apply in (model.apply, by_hand):

        @jax.jit
        def update(p, state, x, apply=apply):
            grads = jax.grad(lambda p: (apply(p, x) ** 2).sum())(p)
            updates, state = optimizer.update(grads, state, p)
            return optax.apply_updates(p, updates), state

        p, state = own, optimizer.init(own)
        for i in range(4):
            p, state = update(p, state, X * (1 + i))
        trained.append(p)
    np.testing.assert_array_less(
        0, jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), trained[0], own))
    )
    for a, b in zip(*map(jax.tree.leaves, trained), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    frozen = hki.partition(model.params(trained[0]), False)[1]
    jax.tree.map(np.testing.assert_array_equal, frozen, hki.partition(params, False)[1])


@pytest.mark.parametrize("kind", ["LoRA", "LoRA on int8"])
def test_optax_adds_the_updates_of_freeze_declared(kind):
    """A loop on whole parameters: the frozen arrays pass through it, and no program copies them."""
    params = MAKERS[kind](DENSE.init(jax.random.key(0), X))
    optimizer = hki.freeze_declared(optax.adam(1e-2), trainable_dense=False)
    apply = hki.transform_implicit(DENSE).apply
    loss = lambda p: (apply(p, X) ** 2).sum()  # noqa: E731

    def update(p, state):
        grads = hki.grad(loss, trainable_dense=False)(p)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), hki.apply_updates(p, updates)

    state = optimizer.init(params)
    ours_and_optax = jax.jit(update)(params, state)
    jax.tree.map(np.testing.assert_array_equal, *ours_and_optax)
    jaxpr = jax.make_jaxpr(update)(params, state)
    flags = jax.tree.leaves(jax.tree.map(lambda _: True, hki.partition(params, False)[0]))
    passed = [v for v in jaxpr.jaxpr.outvars if v in jaxpr.jaxpr.invars]
    assert len(passed) == 2 * (len(jax.tree.leaves(params)) - len(flags))
    grads = jax.jit(hki.grad(loss, trainable_dense=False))(params)
    updates, _ = optimizer.update(grads, state, params)
    assert all(
        a is b or not np.shape(a)
        for a, b in zip(
            jax.tree.leaves(hki.partition(optax.apply_updates(params, updates), False)[1]),
            jax.tree.leaves(hki.partition(params, False)[1]),
            strict=True,
        )
    )
    assert np.all(np.asarray(np.ones(3) + updates["mlp/~/linear_0"]["b"]) == 1)


def test_a_wrapper_that_keeps_parameters_belongs_inside():
    """schedule_free computes all parameters anew from its copies: codes would lose a bit now and then."""
    params = hki.add_lora(hki.quantize_params(DENSE.init(jax.random.key(0), X)), 1, rank=2)
    loss = lambda p: (hki.transform_implicit(DENSE).apply(p, X) ** 2).sum()  # noqa: E731
    sgd, wrapper = optax.sgd(0.1), optax.contrib.schedule_free

    def step(optimizer):
        grads, state = hki.grad(loss, trainable_dense=False)(params), optimizer.init(params)
        return optax.apply_updates(params, optimizer.update(grads, state, params)[0])

    declared = functools.partial(hki.freeze_declared, trainable_dense=False)
    for copies in (None, jnp.bfloat16):
        with pytest.raises(ValueError, match="a wrapper that keeps parameters belongs inside"):
            step(wrapper(declared(sgd), 0.1, state_dtype=copies))
    with pytest.raises(ValueError, match="a wrapper that keeps parameters belongs inside"):
        jax.jit(lambda: step(wrapper(declared(sgd), 0.1)))()
    new = step(declared(wrapper(sgd, 0.1)))
    frozen = (hki.partition(p, False)[1] for p in (new, params))
    jax.tree.map(np.testing.assert_array_equal, *frozen)


@pytest.mark.parametrize("of", [None, 6])
def test_updates_without_parameters(of):
    """With gradients, or with gradients of examples, whose updates have another shape."""
    params = MAKERS["LoRA"](DENSE.init(jax.random.key(0), X))
    loss = lambda p: (hki.transform_implicit(DENSE).apply(p, X) ** 2).sum()  # noqa: E731
    grads = hki.grad(loss)(params)
    inner = optax.sgd(0.1) if of is None else optax.contrib.dpsgd(0.1, 1e9, 0.0, 0)
    of_each = grads if of is None else jax.tree.map(lambda g: jnp.stack([g] * of), grads)
    optimizer = hki.freeze_declared(inner)
    updates, _ = optimizer.update(of_each, optimizer.init(params))
    want = hki.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))
    # Parameters that another function gets, as `lax.cond` does to leave a step out.
    apply = jax.jit(lambda p: optax.apply_updates(p, updates))
    new = jax.lax.cond(True, apply, lambda p: p, jax.tree.map(jnp.copy, params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), new, want)


def test_updates_of_empty_parameters():
    params = hki.zero_params(DENSE.init(jax.random.key(0), X), targets=".*/b")
    optimizer = hki.freeze_declared(optax.sgd(0.1))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    want = jax.tree.map(lambda x: x - 0.1, params)
    assert jax.tree.structure(want) == jax.tree.structure(params)
    for new in (optax.apply_updates(params, updates), hki.apply_updates(params, updates)):
        jax.tree.map(np.testing.assert_array_equal, new, want)


OWN = {"a": {"w": normal((4, 3)), "b": normal((3,))}}
WHOLE = OWN | {"c": {"w": normal((3, 2))}}


def loss_of(p, xs):
    hidden = jnp.tanh(xs @ p["a"]["w"] + p["a"]["b"]) @ WHOLE["c"]["w"]
    return (jnp.square(hidden) @ jnp.arange(1.0, 3.0)).mean()


def of_examples(p, xs):
    return jax.vmap(jax.grad(loss_of), (None, 0))(p, xs[:, None])


@pytest.mark.parametrize(
    "make, gradient, options",
    [
        (optax.lbfgs, jax.grad(loss_of), lambda g, xs: dict(value=0.5, grad=g, value_fn=loss_of, xs=xs)),
        (
            lambda: optax.GradientTransformationExtraArgs(  # as Sophia, which optax 0.2.4 lacks
                lambda params: (), lambda g, s, params, *, obj_fn: (jax.grad(obj_fn)(params), s)
            ),
            jax.grad(loss_of),
            lambda g, xs: dict(obj_fn=lambda p: loss_of(p, xs)),
        ),
        (
            lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
            jax.grad(loss_of),
            lambda g, xs: dict(grad_fn=lambda p, _: jax.grad(loss_of)(p, xs)),
        ),
        (lambda: optax.contrib.dpsgd(0.1, 1.0, 0.0, 0), of_examples, lambda g, xs: {}),
    ],
    ids=["lbfgs", "obj_fn", "sam", "dpsgd"],
)  # fmt: skip
def test_optimizers_that_take_functions_or_gradients_of_examples(make, gradient, options):
    def step(optimizer, params, xs):
        grads = gradient(params, xs)
        grads = {name: grads[name] if name == "a" else {"w": None} for name in params}
        return optimizer.update(grads, optimizer.init(params), params, **options(grads, xs))[0]

    xs = normal((6, 4))
    want = step(make(), OWN, xs)
    update = step(hki.freeze_declared(make(), trainable_dense="a/.*"), WHOLE, xs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), update["a"], want["a"])
    assert isinstance(update["c"]["w"], hki.Zeros)


def test_a_group_of_an_optimizer_without_trained_arrays():
    declared = hki.freeze_declared(optax.sgd(0.5), trainable_dense="a/.*")
    optimizer = optax.multi_transform({"x": declared, "y": declared}, {"a": "x", "c": "y"})
    grads = {"a": jax.tree.map(jnp.ones_like, OWN["a"]), "c": {"w": None}}
    new = hki.apply_updates(WHOLE, optimizer.update(grads, optimizer.init(WHOLE), WHOLE)[0])
    np.testing.assert_array_equal(new["a"]["w"], WHOLE["a"]["w"] - 0.5)
    assert new["c"]["w"] is WHOLE["c"]["w"]


def test_a_list_that_groups_of_an_optimizer_share():
    """Each group has one of the names; `init` sees the group alone."""
    params = {"a": {"w": jnp.ones(2)}, "b": {"w": jnp.ones(2)}, "c": {"w": jnp.ones(2)}}
    one = hki.freeze_declared(optax.sgd(0.5), trainable_dense=["a/w", "c/w"])
    labels = {"a": "x", "b": "x", "c": "y"}
    optimizer = optax.multi_transform({"x": one, "y": one}, labels)
    grads = params | {"b": {"w": None}}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    new = hki.apply_updates(params, updates)
    assert [float(new[name]["w"][0]) for name in "abc"] == [0.5, 1.0, 0.5]
    with pytest.raises(ValueError, match="d/w. matches none"):
        hki.freeze_declared(optax.sgd(0.5), trainable_dense=["d/w", "e/w"]).init(params)


def test_gradients_of_jax_beside_freeze_declared():
    """`jax.grad` differentiates frozen floats, too; the optimizer leaves them out."""
    params = with_lora(DENSE.init(jax.random.key(0), X))
    optimizer = hki.freeze_declared(optax.adam(1e-2), trainable_dense=False)
    apply = hki.transform_implicit(DENSE).apply
    grads = jax.grad(lambda p: (apply(p, X) ** 2).sum())(params)
    dense_too = {m: {n: x if n == "w" else None for n, x in p.items()} for m, p in grads.items()}
    updates, _ = optimizer.update(dense_too, optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    for a, b in zip(
        *(jax.tree.leaves(hki.partition(p, False)[1]) for p in (new, params)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(new["mlp/~/linear_0"]["w"].a, params["mlp/~/linear_0"]["w"].a)


def test_the_state_of_the_optimizer_is_for_trained_arrays_alone():
    (_, own), _ = twins()
    size = sum(x.size for x in jax.tree.leaves(own))
    assert sum(x.size for x in jax.tree.leaves(optax.adam(1e-3).init(own))) == 2 * size + 1


def test_a_step_that_donates_its_parameters():
    (loss, own), _ = twins()
    one = functools.partial(step, loss)
    donating, plain = jax.jit(one, donate_argnums=0), jax.jit(one)
    expected = plain(plain(own, X), X)
    assert_same(donating(donating(own, X), X), expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(own))


def test_init_gives_the_first_parameters_after_they_were_donated():
    params = on_int8(DENSE.init(jax.random.key(0), X))
    model, own = hki.freeze(DENSE, params)
    first = jax.tree.map(np.asarray, own)
    jax.jit(lambda p: jax.tree.map(jnp.negative, p), donate_argnums=0)(own)
    jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(3), X), first)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(model.init)(jax.random.key(3), X), first)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


# --- kinds of transformed functions ----------------------------------------------------------------


def with_state(x, is_training):
    x = hk.Linear(6)(x)
    x = hk.BatchNorm(True, True, 0.9)(x, is_training)
    return hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x


def test_a_model_with_state_and_keys():
    t = hk.transform_with_state(with_state)
    params, state = t.init(jax.random.key(0), X, True)
    params = on_int8(params)
    model, own = hki.freeze(t, params, trainable_dense=".*(scale|offset)")
    assert set(own) == {"linear", "batch_norm"}
    of_whole = jax.jit(hki.transform_implicit(t).apply, static_argnums=4)
    apply = jax.jit(model.apply, static_argnums=4)
    for key in (1, 2):
        expected = of_whole(params, state, jax.random.key(key), X, True)
        found = apply(own, state, jax.random.key(key), X, True)
        assert_same(found, expected)
        state = found[1]
    assert_same(apply(own, state, None, X, False), of_whole(params, state, None, X, False))
    first, new_state = model.init(jax.random.key(0), X, True)
    assert_same(first, own)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


@pytest.mark.parametrize("state", [False, True])
def test_several_functions(state):
    def model():
        body, head = hk.Linear(6, name="body"), hk.Linear(2, name="head")
        return (lambda x: head(body(x))), {"body": body, "whole": lambda x: head(body(x))}

    t = (hk.multi_transform_with_state if state else hk.multi_transform)(model)
    key = jax.random.key(0)
    made = t.init(key, X)
    params, rest = (made[0], (made[1],)) if state else (made, ())
    params = on_int8(params)
    frozen, own = hki.freeze(t, params)
    whole = hki.transform_implicit(t)
    for name in ("body", "whole"):
        found = frozen.apply[name](own, *rest, None, X)
        assert_same(found, whole.apply[name](params, *rest, None, X))
    first = frozen.init(key, X)
    assert_same(first[0] if state else first, own)
    assert not state or first[1] == {}


def test_layers_of_a_stack():
    @hk.transform
    def t(x):
        return hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(6)(x)))(x)

    params = with_lora(t.init(jax.random.key(0), X))
    model, own = hki.freeze(t, params)
    assert_same(model.apply(own, None, X), hki.transform_implicit(t).apply(params, None, X))
    shapes = jax.tree.map(jnp.shape, own)
    assert list(shapes.values()) == [{"w_lora_a": (3, 6, 2), "w_lora_b": (3, 2, 6)}]


def test_within_another_haiku_function():
    """The frozen model as a part of another one, lifted into it."""
    model, own = hki.freeze(DENSE, on_int8(DENSE.init(jax.random.key(0), X)))

    def outer(x):
        inner = hk.lift(model.init, name="inner")(
            hk.next_rng_key() if hk.running_init() else None, x
        )
        return hk.Linear(1)(model.apply({k.removeprefix("inner/"): v for k, v in inner.items()}, x))

    t = hk.without_apply_rng(hk.transform(outer))
    params = t.init(jax.random.key(0), X)
    assert_same({k: v for k, v in params.items() if k.startswith("inner/")}, own)
    linear = params["linear"]
    assert_same(t.apply(params, X), model.apply(own, X) @ linear["w"] + linear["b"])
    assert_same(jax.grad(lambda p: t.apply(p, X).sum())(params)["linear"]["b"], 4.0)


def test_results_are_dense():
    def f(x):
        table = hk.get_parameter("w", (6, 4), init=jnp.ones)
        return {"rows": table[2:4], "y": x @ table}

    t = hk.transform(f)
    params = on_int8(t.init(jax.random.key(0), X))
    model, own = hki.freeze(t, params)
    for apply in (model.apply, jax.jit(model.apply)):
        results = apply(own, None, X)
        assert_same(results, hki.materialize(model.whole.apply(params, None, X)))
        assert [type(x) for x in jax.tree.leaves(results)] == [type(X)] * 2
    assert isinstance(model.whole.apply(params, None, X)["rows"], hki.LoRA)


@pytest.mark.slow
def test_an_implicit_argument_stays_implicit():
    def f(x, cache):
        y = hk.Linear(8)(x)
        return y, jax.lax.dynamic_update_slice(cache, y, (0, 0))

    cache = hki.QuantizedCache.quantize(jnp.zeros((16, 8)), "int8", axis=-1)
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(f)))
    params = on_int8(t.init(jax.random.key(0), X, cache))
    model, own = hki.freeze(t, params)
    new = model.apply(own, X, cache)
    assert_same(new, t.apply(params, X, cache))
    assert isinstance(new[1], hki.QuantizedCache)


def test_flat_maps_and_frozen_models_again():
    params = hk.data_structures.to_immutable_dict(on_int8(DENSE.init(jax.random.key(0), X)))
    model, own = hki.freeze(DENSE, params)
    immutable = hk.data_structures.to_immutable_dict(own)
    assert_same(model.apply(immutable, X), model.apply(own, X))
    assert isinstance(model.params(own), type(params))
    again, factors = hki.freeze(model, own, trainable_dense=".*_b")
    assert {n for p in factors.values() for n in p} == {"w_lora_b"}
    assert_same(again.apply(factors, X), model.apply(own, X))


@pytest.mark.slow
def test_with_statistics_of_activations():
    rules = [hki.quantization.QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)]
    params = hki.quantized_training(DENSE.init(jax.random.key(0), X), rules)
    stats = hki.with_quant_stats(hki.transform_implicit(DENSE))
    state = hki.init_quant_stats(hki.transform_implicit(DENSE), params, {}, X)
    model, own = hki.freeze(stats, params)
    found, expected = model.apply(own, state, X), stats.apply(params, state, X)
    assert_same(found, expected)
    loss = lambda p, s: model.apply(p, s, X)[0].sum()  # noqa: E731
    half, rest = hki.partition(params)
    of_halves = lambda h, s: stats.apply(hki.combine(h, rest), s, X)[0].sum()  # noqa: E731
    grads = jax.tree.leaves(jax.grad(of_halves)(half, state))
    own_grads = jax.tree.leaves(jax.grad(loss)(own, state))
    assert 0 < len(own_grads) <= len(grads)


def test_expressions_of_a_frozen_model():
    params = on_int8(DENSE.init(jax.random.key(0), X))
    model, own = hki.freeze(DENSE, params)
    mox = hki.mox.make_mox(model.whole)(X, params=params)
    assert_same(hki.mox.eval_mox(mox, model.params(own), X), model.apply(own, X))


@pytest.mark.slow
def test_a_tuned_adapter_is_served_by_a_bank():
    base = hki.quantize_params(DENSE.init(jax.random.key(0), X), dtype="int8")
    model, own = hki.freeze(DENSE, hki.add_lora(base, 1, rank=2))
    own = jax.tree.map(lambda x: x + 0.1, own)
    bank = hki.AdapterBank.of(base, capacity=2, rank=2)
    bank = bank.put(1, hki.get_adapter(model.params(own)))
    served = hki.with_bank(hki.transform_implicit(DENSE).apply)(bank, jnp.full(len(X), 1), X)
    assert_same(served, model.apply(own, X))


def test_the_function_is_wrapped_once():
    params = on_int8(DENSE.init(jax.random.key(0), X))
    wrapped = hki.transform_implicit(DENSE)
    model, own = hki.freeze(wrapped, params)
    assert model.whole is wrapped
    again = hki.transform_implicit(model)
    assert_same(again.apply(own, X), model.apply(own, X))
    assert_same(again.params(own), params)


# --- the frozen arrays of a training that goes on ---------------------------------------------------


def for_resuming(dense=None, dtype="int8", alpha=8.0, trainable_dense=False, **options):
    dense = DENSE.init(jax.random.key(0), X) if dense is None else dense
    base = hki.quantize_params(dense, dtype=dtype)
    params = hki.add_lora(base, 1, **{"rank": 2, "alpha": alpha, **options})
    return hki.freeze(DENSE, params, trainable_dense=trainable_dense)


OTHERS = {
    "base": (
        lambda: for_resuming(DENSE.init(jax.random.key(5), X)),
        "linear_0/w/w/codes has other values",
    ),
    "one bias": (
        lambda: for_resuming(
            hki.tree_map_with_implicit(
                lambda x: x + 1e-6 if x.shape == (2,) else x, DENSE.init(jax.random.key(0), X)
            )
        ),
        "linear_2/b has other values",
    ),
    "alpha": (
        lambda: for_resuming(alpha=16.0),
        r"linear_0/w/factor has other values .*factor: expected float32\[\] 4.0, got float32\[\] 8.0\)",
    ),
    "rank": (
        lambda: for_resuming(rank=1),
        r"linear_0/w has another type, another shape .*/a: expected float32\[6, 2\], trained, got ",
    ),
    "targets": (
        lambda: for_resuming(targets=".*0/w"),
        "linear_1/w has another type.* type: expected LoRA, got QuantizedMatrix",
    ),
    "format": (
        lambda: for_resuming(dtype="int4"),
        "linear_0/w has another type.* format: expected 'int8', got 'int4'",
    ),
    "trained": (
        lambda: for_resuming(trainable_dense=".*1/b"),
        r"linear_1/b has other values .*expected float32\[6\], got float32\[6\], trained\)",
    ),
}


@pytest.mark.parametrize("form", ["hki.save", "pickle"])
def test_digests_of_the_frozen_arrays_are_saved_beside_the_trained_ones(form, tmp_path):
    model, own = for_resuming()
    path = str(tmp_path / "run")
    tree = {"trained": changed(own), "digests": model.digests()}
    if form == "pickle":
        (tmp_path / "run").write_bytes(pickle.dumps(jax.device_get(tree)))
    else:
        hki.save(path, tree)
    found = hki.load(path, allow_pickle=True)
    again, _ = for_resuming()
    again.check_digests(found["digests"])
    np.testing.assert_array_equal(
        again.apply(found["trained"], X), model.apply(tree["trained"], X), strict=True
    )


@pytest.mark.parametrize("other", OTHERS)
def test_digests_tell_other_frozen_arrays(other):
    digests = for_resuming()[0].digests()
    make, message = OTHERS[other]
    with pytest.raises(ValueError, match=rf"^digests: mlp/~/{message}.* Give hki\.freeze the same"):
        make()[0].check_digests(digests)


def test_digests_of_models_frozen_again_and_of_other_arrays():
    def twice(alpha):
        return hki.freeze(*for_resuming(alpha=alpha), trainable_dense=".*_b")[0]

    digests = twice(8.0).digests()
    twice(8.0).check_digests(jnp.asarray(digests))
    short = digests[: np.flatnonzero(~digests[:, :3].any(1))[0]]  # without texts, as files had them
    twice(8.0).check_digests(short)
    damaged = np.where(np.arange(len(digests))[:, None] > len(short) + 1, 7, digests)
    twice(8.0).check_digests(damaged)
    for without_texts in (short, damaged):
        with pytest.raises(
            ValueError, match="factor has other values than in the model of the digests. G"
        ):
            twice(16.0).check_digests(without_texts)
    with pytest.raises(ValueError, match="linear_0/w/factor has other values"):
        twice(16.0).check_digests(digests)
    with pytest.raises(ValueError, match="from a model with 3 arrays; this one has "):
        twice(8.0).check_digests(digests[:3])
    with pytest.raises(TypeError, match=r"expected the result of model\.digests\(\), got dict"):
        twice(8.0).check_digests({"digests": digests})


# --- programs --------------------------------------------------------------------------------------


def programs(donate=False):
    """Compiled training steps: with the frozen half as an argument, and with a frozen model."""
    t = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([256] * 3)(x)))
    x = jnp.ones((2, 256))
    params = hki.add_lora(t.init(jax.random.key(0), x), jax.random.key(1), rank=2)
    model, own = hki.freeze(t, params)
    half, frozen = hki.partition(params, False)
    whole = hki.transform_implicit(t)

    def of_halves(half, frozen, x):
        return step(lambda h, x: (whole.apply(hki.combine(h, frozen), x) ** 2).sum(), half, x)

    def of_model(own, x):
        return step(lambda p, x: (model.apply(p, x) ** 2).sum(), own, x)

    return [
        jax.jit(f, donate_argnums=0).lower(*args)
        for f, args in ((of_halves, (half, frozen, x)), (of_model, (own, x)))
    ], (model, own, x)


def test_frozen_arrays_are_arguments_of_programs():
    (by_argument, frozen), _ = programs()
    weights = 3 * 256 * 256 * 4
    if compat.new_ref is None:  # JAX before 0.9 writes frozen arrays into the program.
        assert len(frozen.as_text()) > weights
        return
    assert len(frozen.as_text()) < len(by_argument.as_text()) + weights / 100
    a, b = (x.compile() for x in (by_argument, frozen))
    flops = [x.cost_analysis()["flops"] for x in (a, b)]
    assert flops[0] == flops[1]
    a, b = (x.memory_analysis() for x in (a, b))
    for field in ("argument_size_in_bytes", "temp_size_in_bytes"):
        assert abs(getattr(a, field) - getattr(b, field)) <= weights / 100
    new = lambda m: m.output_size_in_bytes - m.alias_size_in_bytes  # noqa: E731
    assert new(b) <= new(a) + weights / 100  # nothing is copied out


def test_programs_share_one_copy():
    t = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(509, name="only")(x)))
    x = jnp.ones((2, 509))
    model, own = hki.freeze(t, hki.add_lora(t.init(jax.random.key(0), x), 1, rank=1))
    train = jax.jit(functools.partial(step, lambda p, x: (model.apply(p, x) ** 2).mean()))
    evaluate = jax.jit(model.apply)
    weight_is = lambda a: a.shape == (509, 509)  # noqa: E731
    for _ in range(2):
        own = train(own, x)
        evaluate(own, x)
    copies = 1 if compat.new_ref is not None else 2  # (an older JAX makes constants of them)
    assert sum(map(weight_is, jax.live_arrays())) <= copies


def test_programs_without_references():
    params = on_int8(DENSE.init(jax.random.key(0), X))
    model, own = hki.freeze(DENSE, params, by_reference=False)
    exported = jax.export.export(jax.jit(model.apply))(own, X)
    again = jax.export.deserialize(exported.serialize())
    assert_same(again.call(own, X), model.apply(own, X))
    of_references = hki.freeze(DENSE, params)[0]
    if compat.new_ref is not None:  # as docs/sharp_edges.md says
        with pytest.raises(ValueError, match="Too many leaves for PyTreeDef; expected "):
            jax.export.export(jax.jit(of_references.apply))(own, X)
    whole = jax.export.export(jax.jit(of_references.whole.apply))(params, X)
    assert_same(whole.call(params, X), model.apply(own, X))


DEVICES = """
import warnings, haiku as hk, jax, jax.numpy as jnp, numpy as np
import haiku_implicit as hki
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
t = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 8])(x)))
x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
params = hki.add_lora(t.init(jax.random.key(0), x), jax.random.key(1), rank=2)
params = jax.tree.map(lambda x: x + .1, params)
loss_of = lambda apply, p, x: (apply(p, x) ** 2).sum()
half, rest = hki.partition(params, False)
whole = hki.transform_implicit(t)
expected = jax.tree.leaves(jax.grad(lambda h: loss_of(whole.apply, hki.combine(h, rest), x))(half))

def check(name, grads):
    for a, b in zip(jax.tree.leaves(grads), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)

split = jax.device_put(x, NamedSharding(mesh, P("d")))
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    model, own = hki.freeze(t, params)
assert (len(found) == 1) == (hki.core.compat.new_ref is not None), found
check("not placed", jax.jit(jax.grad(lambda p, x: loss_of(model.apply, p, x)))(own, split))

model, own = hki.freeze(t, jax.device_put(params, jax.devices()[0]))
try:
    jax.jit(model.apply)(own, split)
except ValueError as error:  # as docs/sharp_edges.md says
    assert "Received incompatible devices for jitted computation" in str(error)
else:
    assert hki.core.compat.new_ref is None
model, own = hki.freeze(model.whole, jax.device_put(model.params(own), NamedSharding(mesh, P())))
check("placed again", jax.jit(jax.grad(lambda p, x: loss_of(model.apply, p, x)))(own, split))

for spec in (P(), P(None, "d")):
    places = hki.shardings(params, [(".*/w", spec), (".*", P())], mesh)
    model, own = hki.freeze(t, jax.device_put(params, places))
    f = jax.jit(jax.grad(lambda p, x: loss_of(model.apply, p, x)))
    check(spec, f(own, split))
    weight = model.params(own)["mlp/~/linear_0"]["w"].w
    assert weight.sharding.spec == spec, weight.sharding
mapped = jax.pmap(lambda p, x: jax.lax.psum(jax.grad(lambda p: loss_of(model.apply, p, x))(p), "i"), "i", in_axes=(None, 0))
check("pmap", jax.tree.map(lambda x: x[0], mapped(jax.device_get(own), x[:, None])))
on_each = jax.shard_map(lambda p, x: jax.lax.psum(loss_of(model.apply, p, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
check("shard_map", jax.jit(jax.grad(on_each))(own, split))
print("done")
"""


@pytest.mark.slow
def test_on_eight_devices():
    assert run_on_devices(DEVICES, 8) == "done"


# --- errors ----------------------------------------------------------------------------------------


def test_other_parameters_are_refused():
    params = on_int8(DENSE.init(jax.random.key(0), X))
    model, own = hki.freeze(DENSE, params)
    some = {k: v for k, v in own.items() if not k.endswith("1")}
    with pytest.raises(
        ValueError, match=r"params: mlp/~/linear_1/w_lora_a is missing.*model\.whole"
    ):
        model.apply(some, X)
    with pytest.raises(ValueError, match=r"params: .*b is not trained.*model\.params"):
        model.apply({**own, "other": {"b": jnp.ones(2)}}, X)
    with pytest.raises(ValueError, match="params: "):
        model.apply(params, X)
    with pytest.raises(
        ValueError,
        match=r"linear_0/w_lora_a in the shape \[6, 2\], got \[4, 6, 2\]; is it an adapter",
    ):
        model.apply(jax.tree.map(lambda x: jnp.stack([x] * 4), own), X)


def test_the_trained_arrays_are_no_parameters():
    """Functions of parameters say so, instead of doing nothing."""
    _, own = hki.freeze(DENSE, on_int8(DENSE.init(jax.random.key(0), X)))
    message = r"params: .*linear_\d/w_lora_[ab] is a trained array .*model\.params\(params\)"
    for fun in (hki.merge_lora, hki.get_adapter, hki.quantize_params):
        with pytest.raises(ValueError, match=message):
            fun(own)
    with pytest.raises(ValueError, match=message):
        hki.add_lora(own, 0, rank=200)


def test_arguments_that_cannot_be():
    params = DENSE.init(jax.random.key(0), X)
    model, own = hki.freeze(DENSE, on_int8(params))
    with pytest.raises(ValueError, match=r"model: it is from hki\.freeze already.*model\.whole"):
        hki.freeze(model, on_int8(params))
    with pytest.raises(ValueError, match=r"model: it is from hki\.freeze already, .*Use both as"):
        hki.freeze(model, own)
    with pytest.raises(TypeError, match=r"transformed: a model from hki\.freeze.*model\.whole"):
        hki.mox.make_mox(model)
    structs = jax.eval_shape(lambda: params)
    with pytest.raises(TypeError, match=r"params: expected arrays, got the struct .*eval_shape"):
        hki.freeze(DENSE, structs, trainable_dense=True)
    shapes = jax.eval_shape(lambda p: hki.freeze(DENSE, on_int8(p))[1], params)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, shapes)
    with pytest.raises(ValueError, match="trainable_dense: no array is trained.*add_lora"):
        hki.freeze(DENSE, params)
    with pytest.raises(ValueError, match="trainable_dense: 'nothing' matches none"):
        hki.freeze(DENSE, params, trainable_dense="nothing")
    with pytest.raises(TypeError, match="model: expected what hk.transform"):
        hki.freeze(lambda x: x, params)
    with pytest.raises(TypeError, match="params: expected a mapping"):
        hki.freeze(DENSE, jnp.ones(3))


def test_names_that_occur_already():
    params = {
        "m": {
            "w": hki.LoRA(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2))),
            "w_lora_a": jnp.ones(3),
        }
    }
    t = hk.Transformed(
        init=lambda *_: params, apply=lambda p, x: x @ p["m"]["w"] + p["m"]["w_lora_a"].sum()
    )
    model, own = hki.freeze(t, params, trainable_dense=True)
    assert {k: v.shape for k, v in own["m"].items()} == {
        "w_lora_a": (2, 1), "w_lora_b": (1, 2), "w_lora_a_": (3,)
    }  # fmt: skip
    np.testing.assert_allclose(model.apply(own, jnp.ones(2)), [6, 6])


def test_no_warning_on_one_device():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hki.freeze(DENSE, on_int8(DENSE.init(jax.random.key(0), X)))


def test_a_summary_of_the_model_counts_what_it_trains():
    params = hki.quantize_params(DENSE.init(jax.random.key(0), X), targets="mlp/~/linear_0/w")
    params = hki.add_lora(params, 1, rank=2, targets="mlp/~/linear_[01]/w")
    for trainable_dense in (False, "mlp/~/linear_2/.*", True):
        model, trained = hki.freeze(DENSE, params, trainable_dense=trainable_dense)
        table = hki.summary(model)
        assert table.total.trained == sum(x.size for x in jax.tree.leaves(trained))
        own = {row.path: row for row in hki.summary(params, trainable_dense=trainable_dense).rows}
        assert {row.path: row for row in table.rows} == own
    stacked = hki.freeze(LAYERS, hki.add_lora(LAYERS.init(jax.random.key(0), X), 1, rank=2))
    assert hki.summary(stacked[0]).total.trained == sum(x.size for x in jax.tree.leaves(stacked[1]))


LAYERS = hk.without_apply_rng(
    hk.transform(lambda x: hk.experimental.layer_stack(3)(lambda x: hk.Linear(6)(x))(x))
)


def test_the_key_of_init_does_not_matter():
    """The trained arrays are part of one model, with its base."""
    model, trained = hki.freeze(DENSE, on_int8(DENSE.init(jax.random.key(0), X)))
    for key in (jax.random.key(1), jax.random.key(2)):
        assert_same(model.init(key, X), trained)


@pytest.mark.slow
def test_a_step_of_placed_arrays_is_compiled_once():
    """As docs/recipes.md says: JAX takes references, and all results with them, for placed arrays.

    A JAX without references outside of functions compiles it once either way.
    """
    counts, on = [0], [False]

    def listen(name, *_, **__):
        counts[0] += on[0] and name == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = {}
    for placed in (False, True):
        (loss, trained), _ = twins()
        adam = optax.adam(1e-2)
        args = trained, adam.init(trained)
        args = jax.device_put(args, jax.devices()[0]) if placed else args

        @jax.jit
        def step(trained, state, adam=adam, loss=loss):
            updates, state = adam.update(jax.grad(loss)(trained, X), state, trained)
            return optax.apply_updates(trained, updates), state

        counts[0], on[0] = 0, True
        for _ in range(3):
            args = step(*args)
        on[0] = False
        found[placed] = counts[0]
    has_references = compat.new_ref is not None
    assert found == {False: 1 + has_references, True: 1}
