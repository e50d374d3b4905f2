"""Training: partition, gradients and optimizers against the same done by hand."""

import pickle
import warnings

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from tests import random_arrays

N, M, R = 6, 5, 2


def normal(shape, seed):
    return random_arrays.normal(shape, seed, scale=0.5)


def lora(seed=0, w=None, shape=(N, M), alpha=3.0):
    n, m = shape
    w = normal(shape, seed) if w is None else w
    return hki.LoRA(w, normal((n, R), seed + 1), normal((R, m), seed + 2), alpha)


def quantized(seed=0):
    return hki.QuantizedMatrix.quantize(normal((N, M), seed), "int8")


def make_params():
    """Every kind of slot: dense, of integers, absent, symbolic, implicit, implicit in implicit."""
    return {
        "linear": {"w": lora(0), "b": normal((M,), 7)},
        "qlora": {"w": lora(3, w=quantized()), "b": hki.Zeros(shape=(M,), dtype=jnp.float32)},
        "head": {"w": normal((M, 2), 9), "steps": jnp.arange(3), "extra": None},
    }


def loss(params, x):
    h = jnp.sin(x @ params["linear"]["w"] + params["linear"]["b"])
    h += jnp.cos(x @ params["qlora"]["w"] + params["qlora"]["b"])
    return jnp.mean((h @ params["head"]["w"]) ** 2 + params["head"]["steps"].sum())


X = normal((4, N), 20)
ALL = ["head/w", "linear/b", "linear/w/a", "linear/w/b", "qlora/w/a", "qlora/w/b"]


def names_of(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return sorted(jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves)


def close(got, want):
    # float32, a few sums of a few terms in another order.
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-6)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


# --- partition -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dense, names",
    [
        (True, ALL),
        (False, ALL[2:]),
        ("head/w", [ALL[0], *ALL[2:]]),
        (lambda module, name, value: (module, name, value.ndim) == ("linear", "b", 1), ALL[1:]),
    ],
    ids=["all", "none", "regex", "predicate"],
)
def test_partition(dense, names):
    params = make_params()
    trainable, frozen = hki.partition(params, dense)
    assert names_of(trainable) == names
    assert sorted(names_of(trainable) + names_of(frozen)) == names_of(params)
    assert frozen["qlora"]["b"] is params["qlora"]["b"]
    assert trainable["linear"]["w"].w is None and frozen["linear"]["w"].a is None
    back = hki.combine(trainable, frozen)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True))


def test_the_trained_part_alone_says_what_to_do():
    w = hki.partition(lora())[0]
    assert not hasattr(w, "shape") and "?" in repr(w)
    for fun in (lambda w: w.dtype, hki.materialize, hki.use_implicit_args(jnp.sin)):
        with pytest.raises(AttributeError, match="LoRA: w is None.*haiku_implicit.combine"):
            fun(w)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda w: w._replace(w=lora()._replace(dtype=jnp.bfloat16)),
            "linear/w/w: .* dtype=None, got dtype=.*bfloat16",
        ),
        (lambda w: w._replace(dtype=jnp.bfloat16), "linear/w: .* dtype=None, got dtype=.*bfloat16"),
        (lambda w: quantized(), "linear/w: expected LoRA, got QuantizedMatrix"),
        (lambda w: jnp.ones(3), "linear/w: expected LoRA, got "),
        (lambda w: None, "linear/w: expected LoRA, got None"),
    ],
    ids=["inner", "dtype", "type", "dense", "none"],
)
def test_trees_that_differ_say_where(change, message):
    params = make_params()
    linear = {**params["linear"], "w": lora(w=lora())}
    params, other = (
        {**params, "linear": {**linear, "w": w}} for w in (linear["w"], change(linear["w"]))
    )
    optimizer = hki.freeze_declared(optax.sgd(0.1))
    state = optimizer.init(params)
    for what, fun in (
        ("frozen", lambda: hki.combine(hki.partition(params)[0], hki.partition(other)[1])),
        ("updates", lambda: hki.apply_updates(params, other)),
        ("updates", lambda: optimizer.update(other, state, params)),
    ):
        with pytest.raises(ValueError, match=f"{what}: {message}"):
            fun()
    with pytest.raises(ValueError, match="updates: head/extra: missing"):
        hki.apply_updates(params, {**params, "head": {"w": None, "steps": None}})


def test_partition_of_single_arrays():
    assert hki.partition(jnp.ones(2), trainable_dense=False)[0] is None
    assert hki.partition({"w": jnp.ones(2)}, trainable_dense="w")[0]["w"] is not None
    assert names_of(hki.partition([lora()])[0]) == ["0/a", "0/b"]


@pytest.mark.parametrize(
    "dense, error, message",
    [
        ("lineer/b", ValueError, "none of the 2 dense parameters .*Nearest: linear/b"),
        (
            "linear/w",
            ValueError,
            "dense parameters, but linear/w, a LoRA .exclude= of .*Nearest: linear/b",
        ),
        (["linear/b", "linear/w"], ValueError, "but linear/w, a LoRA .exclude= of .*: linear/b"),
        (["linear/b", "linear/v"], ValueError, "'linear/v' matches none of the 2 dense"),
        ("(", ValueError, "not a regular expression"),
        (3, TypeError, "trainable_dense: expected a regular .* True or False, got 3"),
    ],
)
def test_bad_dense(dense, error, message):
    with pytest.raises(error, match=message):
        hki.partition(make_params(), dense)
    with pytest.raises(error, match=message):
        hki.grad(loss, trainable_dense=dense)(make_params(), X)

    with pytest.raises(error, match=message):
        hki.freeze_declared(optax.sgd(1.0), trainable_dense=dense).init(make_params())


def test_dense_that_is_not_all_of_a_module():
    """An expression for a head whose weight has LoRA trains the bias, and says so."""
    with pytest.warns(
        UserWarning, match="'linear/.*' trains linear/b, but .*linear/w, a LoRA."
    ) as found:
        trained, _ = hki.partition(make_params(), "linear/.*")
    assert [w.filename for w in found] == [__file__]
    assert trained["linear"]["w"].w is None and trained["linear"]["b"] is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chosen in (".*", "linear/b", ["linear/b"], True, hki.BIASES):
            hki.partition(make_params(), chosen)


def test_dense_of_former_versions():
    """An argument of this name is refused at once or when the gradient is taken."""
    for call in (
        lambda: hki.partition(make_params(), dense=False),
        lambda: hki.grad(loss, dense=False)(make_params(), X),
        lambda: hki.freeze_declared(optax.sgd(1.0), dense=False),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'dense'"):
            call()


def test_combine_of_others():
    with pytest.raises(ValueError, match="frozen:"):
        hki.combine({"w": None}, {"v": 1.0})
    with pytest.raises(ValueError, match="w: both"):
        hki.combine({"w": 1.0}, {"w": 2.0})


# --- gradients -----------------------------------------------------------------------------------


def reference(params, x, dense=True):
    """The gradients of the trained arrays, by `jax.grad` of a loss on dense weights."""
    trainable, frozen = hki.partition(params, dense)

    def dense_loss(trainable):
        full = hki.combine(trainable, frozen)
        for path in ("linear", "qlora"):
            w = full[path]["w"]
            weight = hki.materialize(w.w) + 1.5 * w.a @ w.b
            full[path] = {**full[path], "w": weight}
        full["qlora"]["b"] = jnp.zeros(M)
        return loss(full, x)

    return jax.value_and_grad(dense_loss)(trainable)


@pytest.mark.combinations
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("dense", [True, False, "linear/.*"])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"]
)
def test_value_and_grad(dense, wrap):
    params = make_params()
    value, grads = wrap(hki.value_and_grad(loss, trainable_dense=dense))(params, X)
    want, want_grads = reference(params, X, dense)
    close(value, want)
    close(jax.tree.leaves(grads), jax.tree.leaves(want_grads))
    # Symbolic zeros of the parameter's own shape and dtype in place of frozen arrays.
    assert grads["linear"]["w"].w.shape == (N, M)
    assert isinstance(grads["linear"]["w"].w, hki.Zeros)
    assert isinstance(grads["head"]["steps"], hki.Zeros)
    assert grads["head"]["steps"].dtype == jnp.int32
    assert isinstance(grads["qlora"]["w"].w, hki.QuantizedMatrix)
    assert isinstance(grads["qlora"]["b"], hki.Zeros)
    assert grads["head"]["extra"] is None
    assert names_of(grads) == names_of(hki.partition(params, dense)[0])


@pytest.mark.usefixtures("never_dense")
def test_grad_of_several_arguments_with_aux():
    def two(x, u, v, *, power):
        y = x @ u @ v
        return jnp.sum(y**power), {"y": y, "u": u}

    u, v = lora(), lora(5, shape=(M, 3))
    grads, aux = hki.grad(two, argnums=(1, -1), has_aux=True)(X, u, v, power=2)
    assert isinstance(aux["u"], hki.LoRA)
    assert isinstance(grads, tuple)
    dense_u, dense_v = (w.w + 1.5 * w.a @ w.b for w in (u, v))
    full = jax.grad(lambda u, v: two(X, u, v, power=2)[0], (0, 1))(dense_u, dense_v)
    for w, g, d in zip((u, v), grads, full, strict=True):
        close((g.a, g.b), (1.5 * d @ w.b.T, 1.5 * w.a.T @ d))
    with pytest.raises(ValueError, match="argnums: 3 is not among the 3"):
        hki.grad(two, argnums=3)(X, u, v, power=2)


def test_loss_may_be_implicit():
    fun = hki.value_and_grad(lambda p: hki.box(hki.Zeros(shape=(), dtype=jnp.float32)))
    value, grads = fun({"b": jnp.ones(2)})
    assert value == 0 and not grads["b"].any()


def test_parameters_by_keyword():
    """They are found by the position of their name, wherever other arguments are given."""
    params, scale = make_params(), lambda p, x, by=2.0, *, shift=0.0: by * loss(p, x) + shift
    wanted = hki.value_and_grad(scale)(params, X)
    both = hki.value_and_grad(scale)
    for found in (both(p=params, x=X), both(x=X, p=params, shift=0.0), both(params, x=X, by=2.0)):
        close(found, wanted)
    close(jax.jit(hki.grad(scale, (0, 1)))(x=X, p=params), hki.grad(scale, (0, 1))(params, X))
    close(hki.grad(lambda x, by=1, p=None: loss(p, x), 2)(X, p=params), hki.grad(loss)(params, X))
    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x).sum())))
    own = {"linear": {"w": lora(shape=(N, 2)), "b": jnp.ones(2)}}
    close(hki.grad(t.apply)(params=own, x=X), hki.grad(t.apply)(own, X))


def test_arguments_that_cannot_be_found():
    for fun in (loss, lambda *args, **kwargs: loss(kwargs["params"], kwargs["x"])):
        with pytest.raises(ValueError, match="argnums: 2 is not among the . positional arguments"):
            hki.grad(fun, 2)(params=make_params(), x=X)
    with pytest.raises(ValueError, match=r"by keyword \(params, x\).*Give it by its position"):
        hki.grad(lambda **kwargs: loss(**kwargs))(params=make_params(), x=X)


def test_wrapped_twice():
    once = hki.grad(loss)(make_params(), X)
    close(
        jax.tree.leaves(hki.grad(hki.use_implicit_args(loss))(make_params(), X)),
        jax.tree.leaves(once),
    )


# --- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clipped, scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(optax.cosine_decay_schedule(0.1, 5))
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "multi": lambda: optax.multi_transform(
        {"slow": optax.adam(1e-3), "fast": optax.sgd(0.1)},
        lambda tree: jax.tree.map(lambda x: "slow" if x.ndim == 1 else "fast", tree),
    ),
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}
FREEZERS = {
    "declared": lambda o: hki.freeze_declared(o),
    "keys": lambda o: hki.freeze_keys(o, hki.LoRA, ["w"]),
    "subtrees": lambda o: hki.freeze_subtrees(o, lambda tree: dict.fromkeys(tree, "train")),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "freezer, name",
    [("keys", "adamw"), ("subtrees", "adamw")] + [("declared", o) for o in OPTIMIZERS],
)
def test_as_on_the_trainable_part(freezer, name):
    """Steps equal those of an optimizer of the trainable part alone."""
    optimizer, plain = FREEZERS[freezer](OPTIMIZERS[name]()), OPTIMIZERS[name]()
    params = make_params()
    trainable, frozen = hki.partition(params)
    state, plain_state = optimizer.init(params), plain.init(trainable)
    assert nbytes(state) == nbytes(plain_state)
    close(jax.tree.leaves(state), jax.tree.leaves(plain_state))

    @jax.jit
    def step(params, state):
        grads = hki.grad(loss)(params, X)
        updates, state = optimizer.update(grads, state, params)
        return hki.apply_updates(params, updates), updates, state

    @jax.jit
    def plain_step(trainable, state):
        grads = reference(hki.combine(trainable, frozen), X)[1]
        updates, state = plain.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state

    for _ in range(3):
        params, updates, state = step(params, state)
        trainable, plain_state = plain_step(trainable, plain_state)
        got, same = hki.partition(params)
        close(jax.tree.leaves(got), jax.tree.leaves(trainable))
        chex.assert_trees_all_equal(jax.tree.leaves(same), jax.tree.leaves(frozen))
    assert isinstance(updates["linear"]["w"].w, hki.Zeros)
    assert pickle.loads(pickle.dumps(state)) is not None


@pytest.mark.combinations
@pytest.mark.parametrize("kind", ["dense", "none", "float0"])
@pytest.mark.parametrize("with_params", [True, False])
def test_gradients_of_other_kinds(kind, with_params):
    """The values in the frozen slots of the gradients have no influence."""
    optimizer = hki.freeze_declared(optax.adam(0.1))
    params = make_params()
    state = optimizer.init(params)
    given = params if with_params else None
    want, _ = optimizer.update(hki.grad(loss)(params, X), state, given)
    if kind == "none":
        trainable, frozen = hki.partition(params)
        grads = jax.grad(lambda t: hki.use_implicit_args(loss)(hki.combine(t, frozen), X))(
            trainable
        )
    else:
        grads = jax.grad(hki.use_implicit_args(loss), allow_int=True)(params, X)
        if kind == "dense":
            integers = lambda g: np.zeros(g.shape, int) if g.dtype == jax.dtypes.float0 else g  # noqa: E731
            grads = jax.tree.map(integers, grads)
    got, _ = optimizer.update(grads, state, given)
    close(jax.tree.leaves(got), jax.tree.leaves(want))
    close(
        jax.tree.leaves(hki.apply_updates(params, got)),
        jax.tree.leaves(hki.apply_updates(params, want)),
    )


def test_dense_side_frozen():
    optimizer = hki.freeze_declared(optax.adamw(0.1), trainable_dense=False)
    params = make_params()
    state = optimizer.init(params)
    assert nbytes(state) < nbytes(hki.freeze_declared(optax.adamw(0.1)).init(params))
    updates, _ = optimizer.update(hki.grad(loss, trainable_dense=False)(params, X), state, params)
    new = hki.apply_updates(params, updates)
    assert new["head"]["w"] is params["head"]["w"]
    assert new["linear"]["w"].w is params["linear"]["w"].w
    assert not np.array_equal(new["linear"]["w"].a, params["linear"]["w"].a)

    with pytest.raises(ValueError, match="linear/b: the optimizer trains this, but its gradient"):
        eager = hki.freeze_declared(optax.adamw(0.1))
        eager.update({**updates, "head": params["head"]}, eager.init(params), params)


@pytest.mark.every(3)
@pytest.mark.parametrize("of_gradient", [True, False, "head/w", r".*/b"])
@pytest.mark.parametrize("of_optimizer", [True, False, "head/w", r".*/b"])
@pytest.mark.parametrize("with_params", [True, False])
def test_one_choice_of_dense_arrays_for_gradient_and_optimizer(
    of_gradient, of_optimizer, with_params
):
    """Whatever the two differ by is one error while JAX traces, in both directions."""
    params = make_params()
    optimizer = hki.freeze_declared(optax.adam(0.1), trainable_dense=of_optimizer)
    state = optimizer.init(params)

    def step(params, state):
        grads = hki.grad(loss, trainable_dense=of_gradient)(params, X)
        return optimizer.update(grads, state, params if with_params else None)[0]

    if of_gradient == of_optimizer:
        assert names_of(jax.eval_shape(step, params, state)) == names_of(
            hki.partition(params, of_gradient)[0]
        )
        return
    name = "(head/w|linear/b)" if with_params else "(head/w|linear/b|updates)"
    with pytest.raises(ValueError, match=f"(?s){name}: .*same trainable_dense="):
        jax.eval_shape(step, params, state)


@pytest.mark.parametrize("before, now, said", [(False, True, "trains"), (True, False, "does not")])
def test_the_state_of_another_choice_of_dense_arrays(before, now, said):
    """As after a resume with another `trainable_dense`."""
    params = make_params()
    state = hki.freeze_declared(optax.adam(0.1), trainable_dense=before).init(params)
    grads = hki.grad(loss, trainable_dense=now)(params, X)
    optimizer = hki.freeze_declared(optax.adam(0.1), trainable_dense=now)
    with pytest.raises(ValueError, match=rf"state: .*mu\['head'\].*, which the optimizer {said}"):
        optimizer.update(grads, state, params)


@pytest.mark.parametrize("with_params", [True, False])
@pytest.mark.parametrize("of_state, of_gradient", [(1, 2), (2, 1)])
def test_arrays_of_another_rank_are_not_broadcast(of_state, of_gradient, with_params):
    """Rank 1 would be added to each column of rank 2 without an error."""
    dense = {"linear": {"w": jnp.ones((4, 3))}}
    params = {rank: hki.add_lora(dense, 0, rank=rank) for rank in (1, 2)}
    gradients = {rank: jax.tree.map(jnp.ones_like, params[rank]) for rank in params}
    optimizer = hki.freeze_declared(optax.adam(0.1), trainable_dense=False)
    states = {rank: optimizer.init(params[rank]) for rank in params}
    own = params[of_gradient] if with_params else None
    said = rf"linear/w/a would go from \[4, {of_gradient}\]|mu.*\.a would go from \[4, {of_state}\]"
    with pytest.raises(ValueError, match=f"state: it is for other shapes .*({said})"):
        optimizer.update(gradients[of_gradient], states[of_state], own)
    updates, _ = optimizer.update(gradients[of_gradient], states[of_gradient], own)
    with pytest.raises(
        ValueError, match=r"linear/w/a: expected an update in the shape \[4, .*LoRA"
    ):
        hki.apply_updates(params[of_state], updates)
    with pytest.raises(
        ValueError, match=r"linear/w/a: expected a gradient in the shape \[4, .*LoRA"
    ):
        optimizer.update(gradients[of_gradient], states[of_state], params[of_state])


def test_the_history_of_an_optimizer_may_grow():
    grow = optax.GradientTransformation(
        lambda params: jnp.zeros(0),
        lambda updates, state, params=None: (updates, jnp.append(state, 1.0)),
    )
    optimizer = hki.freeze_declared(grow)
    params = {"linear": {"w": jnp.ones(3)}}
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(params, state, params)
    assert state.shape == (2,)
    np.testing.assert_array_equal(updates["linear"]["w"], 1)


def test_errors_of_an_optimizer_stay_as_they_are():
    def update(updates, state, params=None):
        raise TypeError("of this optimizer")

    params, optimizer = make_params(), optax.GradientTransformation(lambda p: (), update)
    frozen = hki.freeze_declared(optimizer)
    with pytest.raises(TypeError, match="of this optimizer"):
        frozen.update(hki.grad(loss)(params, X), frozen.init(params), params)


def test_a_gradient_of_what_the_optimizer_leaves_out():
    """Fields that types freeze may have one (of `jax.grad`), and subtrees that are left out by name."""
    params = make_params()
    ones = jax.tree.map(jnp.ones_like, params)
    with pytest.raises(ValueError, match="head/w: there is a gradient, but trainable_dense= of"):
        wrapped = hki.freeze_keys(optax.sgd(0.1), hki.LoRA, ["a"], trainable_dense=False)
        wrapped.update(ones, wrapped.init(params), params)
    labels = {**dict.fromkeys(params, "train"), "head": "freeze"}
    optimizer = hki.freeze_subtrees(optax.sgd(0.1), labels, trainable_dense="linear/b")
    updates, _ = optimizer.update(ones, optimizer.init(params), params)
    assert names_of(updates) == ["linear/b", "linear/w/a", "linear/w/b", "qlora/w/a", "qlora/w/b"]


def test_freeze_keys():
    params = make_params()
    optimizer = hki.freeze_keys(optax.sgd(0.1, momentum=0.9), hki.LoRA, "a")
    assert names_of(optimizer.init(params)[0].trace) == [
        "head/w",
        "linear/b",
        "linear/w/b",
        "qlora/w/b",
    ]
    with pytest.raises(ValueError, match="LoRA has no field 'c', 'd' .* it has 'w', 'a', 'b'"):
        hki.freeze_keys(optax.sgd(0.1), hki.LoRA, ["d", "w", "c"])
    with pytest.raises(TypeError, match="arr_type"):
        hki.freeze_keys(optax.sgd(0.1), dict, ["w"])
    unmet = hki.freeze_keys(optax.sgd(0.1), hki.QuantizedMatrix, [])
    with pytest.raises(ValueError, match="no QuantizedMatrix in the parameters; .*: LoRA"):
        unmet.init(params["linear"])
    with pytest.raises(ValueError, match="in them: none"):
        unmet.init({"b": jnp.ones(3)})


@pytest.mark.parametrize(
    "labels",
    [
        lambda tree: {**dict.fromkeys(tree, "train"), "head": "freeze"},
        lambda tree: {**jax.tree.map(lambda _: "train", tree), "head": "freeze"},
        {"linear": "train", "qlora": "train", "head": "freeze"},
    ],
)
def test_freeze_subtrees(labels):
    params = make_params()
    optimizer = hki.freeze_subtrees(optax.sgd(0.1, momentum=0.9), labels)
    state = optimizer.init(params)
    assert names_of(state[0].trace) == ALL[1:]
    updates, _ = optimizer.update(hki.grad(loss)(params, X), state, params)
    new = hki.apply_updates(params, updates)
    assert new["head"]["w"] is params["head"]["w"]
    assert names_of(updates) == ALL[1:]
    # Wrappers within wrappers: what either freezes is frozen.
    both = hki.freeze_subtrees(
        hki.freeze_keys(optax.sgd(0.1, momentum=0.9), hki.LoRA, ["a"]), labels
    )
    state = both.init(params)
    assert names_of(state[0].trace) == ["linear/b", "linear/w/b", "qlora/w/b"]
    updates, _ = both.update(hki.grad(loss)(params, X), state, params)
    assert names_of(updates) == ["linear/b", "linear/w/b", "qlora/w/b"]


def test_bad_labels():
    params = make_params()
    with pytest.raises(ValueError, match="'freeze' or 'train' at 'head', got 'frozen'"):
        hki.freeze_subtrees(
            optax.sgd(0.1), {**dict.fromkeys(params, "train"), "head": "frozen"}
        ).init(params)
    with pytest.raises(ValueError, match="label_fn: "):
        hki.freeze_subtrees(optax.sgd(0.1), {"linear": "train"}).init(params)


def test_within_multi_transform():
    params = {"linear": make_params()["linear"], "head": {"w": normal((M, 2), 9)}}
    optimizer = optax.multi_transform(
        {"lora": hki.freeze_declared(optax.adamw(0.1)), "rest": optax.set_to_zero()},
        lambda tree: jax.tree.map(lambda _: "lora", tree) | {"head": {"w": "rest"}},
    )
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert isinstance(updates["linear"]["w"].w, hki.Zeros)
    new = hki.apply_updates(params, updates)
    assert new["linear"]["w"].w is params["linear"]["w"].w
    assert not np.array_equal(new["linear"]["w"].a, params["linear"]["w"].a)
    assert np.array_equal(new["head"]["w"], params["head"]["w"])


def test_line_search():
    """L-BFGS evaluates the loss itself, at parameters of which it knows the trained ones."""
    optimizer = hki.freeze_declared(optax.lbfgs())
    params = {"linear": make_params()["linear"]}

    def value_fn(params):
        h = X @ params["linear"]["w"] + params["linear"]["b"]
        return jnp.sum((h - 1) ** 2)

    fun = hki.use_implicit_args(value_fn)

    @jax.jit
    def step(params, state):
        value, grads = hki.value_and_grad(value_fn)(params)
        updates, state = optimizer.update(
            grads, state, params, value=value, grad=grads, value_fn=fun
        )
        return hki.apply_updates(params, updates), state

    state, before = optimizer.init(params), fun(params)
    for _ in range(3):
        params, state = step(params, state)
    assert fun(params) < before / 4


def test_apply_updates():
    params = {
        "f": jnp.ones(2, jnp.bfloat16),
        "i": jnp.arange(2),
        "z": jnp.ones(2),
        "n": None,
        "m": jnp.ones(1),
    }
    updates = {
        "f": jnp.full(2, 0.5),
        "i": jnp.ones(2, int),
        "z": hki.Zeros(shape=(2,), dtype=jnp.float32),
        "n": None,
        "m": optax.MaskedNode(),
    }
    new = hki.apply_updates(params, updates)
    assert new["f"].dtype == jnp.bfloat16 and new["f"][0] == 1.5
    assert all(new[k] is params[k] for k in "iznm")
    with pytest.raises(ValueError, match="updates:"):
        hki.apply_updates(params, {"f": None})


# --- whole training steps ------------------------------------------------------------------------


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("w_type", ["dense", "int8"])
def test_steps_match_lora_by_hand(w_type):
    """A stock Haiku model with LoRA in its parameters against the same model written out."""
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 3], activation=jnp.tanh)(x)))
    x, y = normal((16, N), 1), normal((16, 3), 2)
    params = net.init(jax.random.key(0), x)
    paths = list(params)
    for i, path in enumerate(paths):
        w = params[path]["w"]
        held = hki.QuantizedMatrix.quantize(w, w_type) if w_type != "dense" else w
        params[path] = {**params[path], "w": lora(10 * i, w=held, shape=w.shape)}
    # Copies, because the steps are given their arguments' buffers for their results.
    weights = [np.array(hki.materialize(params[path]["w"].w)) for path in paths]

    def by_hand(factors):
        h = x
        for i, (w, (a, b, bias)) in enumerate(zip(weights, factors, strict=True)):
            h = h @ w + ((h @ a) * 1.5) @ b + bias
            h = jnp.tanh(h) if i == 0 else h
        return jnp.mean((h - y) ** 2)

    def implicit(params):
        return jnp.mean((hki.transform_implicit(net).apply(params, x) - y) ** 2)

    plain = optax.adamw(3e-2, weight_decay=0.01)
    optimizer = hki.freeze_declared(plain)
    factors = jax.tree.map(jnp.array, [(p["w"].a, p["w"].b, p["b"]) for p in params.values()])
    state, plain_state = optimizer.init(params), plain.init(factors)

    def step(params, state):
        value, grads = hki.value_and_grad(implicit)(params)
        updates, state = optimizer.update(grads, state, params)
        return value, hki.apply_updates(params, updates), state

    def plain_step(factors, state):
        value, grads = jax.value_and_grad(by_hand)(factors)
        updates, state = plain.update(grads, state, factors)
        return value, optax.apply_updates(factors, updates), state

    step, plain_step = (jax.jit(f, donate_argnums=(0, 1)) for f in (step, plain_step))
    values = []
    for _ in range(6):
        value, params, state = step(params, state)
        want, factors, plain_state = plain_step(factors, plain_state)
        close(value, want)
        # Adam divides by the root of a small second moment, which magnifies rounding.
        chex.assert_trees_all_close(
            [(p["w"].a, p["w"].b, p["b"]) for p in params.values()], factors, rtol=1e-3, atol=1e-5
        )
        values.append(float(value))
    assert values[-1] < values[0] / 2


def test_no_memory_for_what_is_frozen():
    """XLA's own account of a training step, against the dense model, which needs all of it."""
    size, layers = 512, 2
    x = normal((4, size), 1)
    weight = size * size * 4
    frozen = layers * weight

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    def account(params):
        optimizer = hki.freeze_declared(optax.adam(1e-3))

        def step(params, state, x):
            value, grads = hki.value_and_grad(loss)(params, x)
            updates, state = optimizer.update(grads, state, params)
            return value, hki.apply_updates(params, updates), state

        state = optimizer.init(params)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()
        memory = compiled.memory_analysis()
        # Beyond the arguments whose buffers it was given.
        return (
            memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
            nbytes(state),
        )

    params = [lora(i, shape=(size, size)) for i in range(layers)]
    temporary, state = account(params)
    factors = sum(w.a.nbytes + w.b.nbytes for w in params)
    assert state == 2 * factors + 4  # two moments, and a count
    assert temporary < weight / 4
    temporary, state = account([w.w for w in params])
    assert state == 2 * frozen + 4
    assert temporary > weight / 2


# --- first mistakes ---------------------------------------------------------------------------------

PLAIN = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "several steps": optax.MultiSteps(optax.adam(0.1), 1),
}


@pytest.mark.parametrize("ours", [hki.freeze_declared, hki.lora_fa])
@pytest.mark.parametrize(
    "wrapper", [optax.MultiSteps, optax.apply_if_finite], ids=["MultiSteps", "apply_if_finite"]
)
def test_wrappers_that_compare_or_keep_gradients_belong_inside(ours, wrapper):
    params = hki.add_lora({"a": {"w": jnp.ones((8, 8))}}, 0, rank=2)
    grads = hki.grad(lambda params: (jnp.ones((2, 8)) @ params["a"]["w"]).sum())(params)
    optimizer = wrapper(ours(optax.sgd(0.1)), 1)
    message = r"(?s)wrappers such as .*MultiSteps and .*apply_if_finite belong inside"
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.update(grads, optimizer.init(params), params)
    inside = wrapper(optax.sgd(0.1), 1)
    expected, found = (
        o.update(grads, o.init(params), params)[0]["a"]["w"].b
        for o in map(
            ours, (optax.sgd(0.1), getattr(inside, "gradient_transformation", lambda: inside)())
        )
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.combinations
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("quantized", [True, False])
def test_gradients_of_what_is_frozen_name_the_optimizer(name, quantized):
    """With plain optax: JAX's error prints the types that differ, and the type says the way out."""
    params = {"a": {"w": jnp.ones((8, 8))}}
    params = hki.add_lora(hki.quantize_params(params) if quantized else params, 0, rank=2)
    grads = hki.grad(lambda params: (jnp.ones((2, 8)) @ params["a"]["w"]).sum())(params)
    optimizer = PLAIN[name]
    with pytest.raises(
        (ValueError, TypeError), match=r"hki\.freeze_declared\(optimizer\) takes it"
    ):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        optax.apply_updates(params, updates)
    optimizer = hki.freeze_declared(optimizer)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    new = hki.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, new["a"]["w"].w, params["a"]["w"].w)
    assert (np.asarray(new["a"]["w"].b) != np.asarray(params["a"]["w"].b)).any()
