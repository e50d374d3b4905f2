"""`sub`, `wrap`, `insert_before` and `insert_after`, against models that are written that way."""

import functools
import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import eval_mox, load, make_mox, save, to_transformed
from tests.mox.compare import close, same
from tests.random_arrays import normal
from tests.tiers import few

X = normal((4, 8), 1)
RNG = jax.random.PRNGKey(0)


def relus(mox):
    return mox.query('//custom_jvp_call[@name="relu"]')


# --- the same function in every place ---------------------------------------------------------------


class Block(hk.Module):
    def __init__(self, act, name=None):
        super().__init__(name=name)
        self.act = act

    def __call__(self, x):
        return x + hk.Linear(8, name="down")(self.act(hk.Linear(16, name="up")(x)))


def plain(act, x):
    return Block(act, name="b")(Block(act, name="a")(x))


def nested(act, x):
    class Outer(hk.Module):
        def __call__(self, x):
            return Block(act)(x) * 2

    return Outer()(x).sum(0)


def jitted(act, x):
    return Block(jax.jit(lambda h: act(h) + 1))(x)


def scanned(act, x):
    block = Block(act)
    return hk.scan(lambda c, _: (block(c), c.sum()), x, None, length=3)


def scanned_back(act, x):
    block = Block(act)
    return hk.scan(lambda c, y: (c + block(y), c.sum()), x[0], x, reverse=True, unroll=2)


def stacked(act, x):
    return hk.layer_stack(3)(lambda x: Block(act, name="block")(x))(x)


def stacked_with_inputs(act, x):
    @hk.layer_stack(4, with_per_layer_inputs=True)
    def layer(x, y):
        return Block(act, name="block")(x) + y, x.sum()

    return layer(x, x)


def stacked_twice(act, x):
    def inner(x):
        return hk.layer_stack(2, name="inner")(lambda x: Block(act, name="block")(x))(x)

    return hk.layer_stack(3, name="outer")(inner)(x)


def stacked_by_number(act, x, wrap=lambda f: f):
    """A stack of layers that takes its slices of the parameters by the number of the layer."""

    def slice_of(i):
        def getter(next_getter, value, context):
            return next_getter(jax.lax.dynamic_index_in_dim(value, i, 0, keepdims=False))

        return getter

    def stacked(next_creator, shape, dtype, init, context):
        return next_creator((3, *shape), dtype, init)

    layer = wrap(lambda x: Block(act, name="block")(x))
    if hk.running_init():
        with hk.custom_creator(stacked), hk.custom_getter(slice_of(0)):
            return layer(x)

    def step(x, i):
        with hk.custom_getter(slice_of(i)):
            return layer(x), None

    return hk.scan(step, x, jnp.arange(3))[0]


def stacked_by_number_in_remat(act, x):
    return stacked_by_number(act, x, hk.remat)


def branches(act, x):
    first, second = Block(act, name="a"), Block(act, name="b")
    if hk.running_init():
        first(x), second(x)
    return hk.cond(x.sum() > 0, first, lambda x: second(x) * 2, x)


def switched(act, x):
    blocks = [Block(act, name=f"b{i}") for i in range(3)]
    if hk.running_init():
        [block(x) for block in blocks]
    return hk.switch(jnp.argmax(x[0, :3]), blocks, x)


def looped(act, x):
    block = Block(act)
    if hk.running_init():
        return block(x)
    return hk.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, block(c[1])), (0, x))[1]


def counted(act, x):
    block = Block(act)
    return hk.fori_loop(0, 3, lambda i, x: block(x) + i, x)


def rematted(act, x):
    return hk.remat(Block(act))(x)


def mapped(act, x):
    return hk.vmap(Block(act), split_rng=False)(x)


def mapped_in_two_axes(act, x):
    block = Block(act)
    inner = hk.vmap(block, in_axes=1, out_axes=1, split_rng=False)
    return hk.vmap(inner, split_rng=False)(x.reshape(2, 2, 8)[:, None])


def recurrent(act, x):
    class Core(hk.RNNCore):
        def __call__(self, x, h):
            h = act(hk.Linear(8)(x) + hk.Linear(8)(h))
            return h, h

        def initial_state(self, n):
            return jnp.zeros((n, 8))

    return hk.dynamic_unroll(Core(), x[:, None], jnp.zeros((1, 8)))


MODELS = [
    plain,
    nested,
    jitted,
    scanned,
    scanned_back,
    stacked,
    stacked_with_inputs,
    stacked_twice,
    stacked_by_number,
    stacked_by_number_in_remat,
    branches,
    switched,
    looped,
    counted,
    rematted,
    mapped,
    mapped_in_two_axes,
    recurrent,
]


QUICK = plain, stacked_with_inputs, switched, looped, mapped, scanned


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("model", few(MODELS, *QUICK), ids=lambda m: m.__name__)
def test_another_function_for_an_equation_in_every_place(model):
    old, new = (hk.transform(functools.partial(model, act)) for act in (jax.nn.relu, jax.nn.gelu))
    params = old.init(jax.random.key(0), X)
    mox = make_mox(old)(X)
    changed = mox.sub(relus(mox), jax.nn.gelu)

    assert not relus(changed)
    assert len(relus(mox)) == len(changed.query("//function"))
    close(eval_mox(changed, params, None, X), new.apply(params, None, X))
    same(eval_mox(mox, params, None, X), old.apply(params, None, X))
    assert jax.tree.map(jnp.shape, changed.init(jax.random.key(0), X)) == jax.tree.map(
        jnp.shape, params
    )


def loss(apply):
    return lambda params, x: sum(jnp.sum(y**2) for y in jax.tree.leaves(apply(params, None, x)))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_under_transformations(model):
    old, new = (hk.transform(functools.partial(model, act)) for act in (jax.nn.relu, jax.nn.gelu))
    params = old.init(jax.random.key(0), X)
    mox = make_mox(old)(X)
    t = to_transformed(mox.sub(relus(mox), jax.nn.gelu))

    close(jax.jit(t.apply)(params, None, X), jax.jit(new.apply)(params, None, X))
    xs = jnp.stack([X, -X])
    for apply, in_axes in ((t.apply, (None, None, 0)),):
        got, want = (jax.vmap(f, in_axes)(params, None, xs) for f in (apply, new.apply))
        close(got, want)
    _, want = jax.lax.scan(lambda c, x: (c, new.apply(params, None, x)), 0, xs)
    close(jax.lax.scan(lambda c, x: (c, t.apply(params, None, x)), 0, xs)[1], want)
    tangents = jax.tree.map(jnp.ones_like, params)
    got, want = (
        jax.jvp(lambda p, f=f: f(p, None, X), (params,), (tangents,)) for f in (t.apply, new.apply)
    )
    close(got, want)
    if model is not looped:  # JAX has no reverse mode for `while`
        close(jax.grad(loss(t.apply))(params, X), jax.grad(loss(new.apply))(params, X))
        checkpointed = jax.checkpoint(loss(t.apply))
        close(jax.grad(checkpointed)(params, X), jax.grad(loss(new.apply))(params, X))


# --- new parameters --------------------------------------------------------------------------------


def scaled(act):
    """A function with a parameter, and one of a module in it."""

    def fun(x):
        gain = hk.get_parameter("gain", x.shape[-1:], init=hk.initializers.RandomNormal())
        return act(x) * gain + hk.Linear(x.shape[-1], name="extra")(x)

    return fun


def at(path, fun):
    """A function whose parameters are at a path."""

    class Site(hk.Module):
        def __call__(self, x):
            return fun(x)

    return lambda x: Site(name=hk.force_name(path))(x)


# What the new function's modules are below, in the place of the block's activation.
PATHS = {
    plain: ["a/relu", "b/relu"],
    scanned: ["block/relu"],
    scanned_back: ["block/relu"],
    rematted: ["block/relu"],
    mapped: ["block/relu"],
    branches: ["a/relu", "b/relu"],
    looped: ["block/relu"],
    counted: ["block/relu"],
}


@pytest.mark.parametrize("model", few(PATHS, branches, scanned), ids=lambda m: m.__name__)
def test_new_parameters_are_created_by_haiku(model):
    old = hk.transform(functools.partial(model, jax.nn.relu))
    mox = make_mox(old)(X)
    changed = mox.sub(relus(mox), scaled(jnp.tanh))
    params = changed.init(jax.random.key(3), X)
    new = {name for name in params if name not in old.init(jax.random.key(0), X)}
    assert new == {x for path in PATHS[model] for x in (path, f"{path}/extra")}

    paths = iter(PATHS[model] * 9)
    by_block = {}

    def act(x):
        block = inspect.currentframe().f_back.f_locals["self"]
        path = by_block.setdefault(id(block), None) or by_block.update({id(block): next(paths)})
        return at(by_block[id(block)] if path is None else path, scaled(jnp.tanh))(x)

    want = hk.transform(functools.partial(model, act)).apply(params, None, X)
    close(eval_mox(changed, params, None, X), want)
    close(jax.jit(to_transformed(changed).apply)(params, None, X), want)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "model",
    few(
        [stacked, stacked_with_inputs, stacked_by_number, stacked_by_number_in_remat],
        stacked_by_number_in_remat,
        stacked,
    ),
    ids=lambda m: m.__name__,
)
def test_layers_of_a_stack_have_parameters_of_their_own(model):
    """By hand: the stack with the new function in its layer."""
    mox = make_mox(hk.transform(functools.partial(model, jax.nn.relu)))(X)
    changed = mox.sub(relus(mox), scaled(jnp.tanh))
    params = changed.init(jax.random.key(3), X)
    gain = {name: entries for name, entries in params.items() if "gain" in entries}
    ((name, entries),) = gain.items()
    assert f"/{name}".endswith("/block/relu")
    layers = 4 if model is stacked_with_inputs else 3
    assert entries["gain"].shape == (layers, 16)
    assert len(np.unique(entries["gain"])) == layers * 16

    hand = hk.transform(functools.partial(model, lambda x: at("block/relu", scaled(jnp.tanh))(x)))
    close(eval_mox(changed, params, None, X), hand.apply(params, None, X))
    got, want = (jax.grad(loss(f))(params, X) for f in (to_transformed(changed).apply, hand.apply))
    close(got, want)


@pytest.mark.slow
def test_stacks_and_steps_in_one_another():
    mox = make_mox(hk.transform(functools.partial(stacked_twice, jax.nn.relu)))(X)
    params = mox.sub(relus(mox), scaled(jnp.tanh)).init(jax.random.key(3), X)
    shapes = {name: entries["gain"].shape for name, entries in params.items() if "gain" in entries}
    assert shapes == {"outer/inner/block/relu": (3, 2, 16)}


# --- state and random numbers ----------------------------------------------------------------------


def normalized(norm, place):
    """A model with batch normalization, or something else, in three places."""

    def model(x, is_training):
        x = hk.Linear(8, name="first")(x)
        call = functools.partial(norm(), is_training=is_training)
        x = call(x) if place == "top" else x
        if place == "scan":
            x = hk.scan(lambda c, _: (call(c), None), x, None, length=3)[0]
        if place == "cond":
            if hk.running_init():
                call(x)
            else:
                x = hk.cond(x.sum() > 0, call, lambda x: x * 2, x)
        return hk.Linear(2, name="last")(x)

    return hk.transform_with_state(model)


def batch_norm(name="norm"):
    return hk.BatchNorm(True, True, 0.9, name=name)


def tanh():
    return lambda x, is_training: jnp.tanh(x)


PLACES = ["top", "scan", "cond"]


@pytest.mark.parametrize("place", PLACES)
def test_state_is_added(place):
    """By hand: the normalization where `tanh` was, with the same name."""
    old = normalized(tanh, place)
    mox = make_mox(old)(X, True)
    changed = mox.sub("//tanh", lambda x: batch_norm()(x, True), path="site")
    assert isinstance(to_transformed(changed), hk.TransformedWithState)
    params, state = changed.init(jax.random.key(0), X, True)
    assert {name.split("/")[0] for name in state} == {"site"}

    hand = normalized(lambda: batch_norm(hk.force_name("site/norm")), place)
    want_params, want_state = hand.init(jax.random.key(0), X, True)
    assert jax.tree.map(jnp.shape, (params, state)) == jax.tree.map(
        jnp.shape, (want_params, want_state)
    )
    want = hand.apply(params, state, None, X, True)
    close(eval_mox(changed, params, state, None, X, True), want)
    again = hand.apply(params, want[1], None, X + 1, True)
    close(eval_mox(changed, params, want[1], None, X + 1, True), again)


@pytest.mark.parametrize("place", PLACES)
def test_state_and_parameters_that_nobody_reads_are_left_out_or_kept(place):
    mox = make_mox(normalized(batch_norm, place))(X, True)
    params, state = mox.init(jax.random.key(0), X, True)
    hand = normalized(tanh, place)
    want, _ = hand.apply(params, {}, None, X, True)
    instead = lambda x, is_training: jnp.tanh(x)  # noqa: E731
    less, kept = (mox.sub(hk.BatchNorm, instead, keep_unused=keep) for keep in (False, True))
    out, new = eval_mox(kept, params, state, None, X, True)
    close(out, want)
    same(new, state)
    out, new = eval_mox(less, params, state, None, X, True)
    close(out, want)
    assert list(less.init(jax.random.key(0), X, True)[0]) == ["first", "last"]
    assert new == {} == less.init(jax.random.key(0), X, True)[1]
    assert set(kept.init(jax.random.key(0), X, True)[0]) == set(params)


def dropouts(rates):
    def model(x):
        for i, rate in enumerate(rates):
            x = hk.Linear(8, name=f"l{i}")(x)
            if rate:
                x = Drop(rate, name=f"d{i}")(x)
        return x

    return hk.transform(model)


class Drop(hk.Module):
    def __init__(self, rate, name=None):
        super().__init__(name=name)
        self.rate = rate

    def __call__(self, x):
        return hk.dropout(hk.next_rng_key(), self.rate, x)


def test_the_random_numbers_of_others_stay():
    """The first dropout draws the block of keys that the other ones use."""
    model = dropouts([0.5, 0.5, 0.5])
    params, rng = model.init(jax.random.key(0), X), jax.random.PRNGKey(7)
    mox = make_mox(model)(X)
    (first, *_), taps = mox.select(Drop), []

    def keep(original, x):
        taps.append(1)
        return original(x)

    same(eval_mox(mox.wrap(first, keep), params, rng, X), model.apply(params, rng, X))
    assert taps
    dropped = mox.sub(first, None)
    got = eval_mox(dropped, params, rng, X)

    class Quiet(Drop):
        def __call__(self, x):
            hk.dropout(hk.next_rng_key(), self.rate, x)
            return x

    def hand(x):
        x = Quiet(0.5)(hk.Linear(8, name="l0")(x))
        x = Drop(0.5)(hk.Linear(8, name="l1")(x))
        return Drop(0.5)(hk.Linear(8, name="l2")(x))

    close(got, hk.transform(hand).apply(params, rng, X))


@pytest.mark.parametrize(
    "model", few([plain, scanned, stacked, looped, mapped, rematted], plain, stacked, looped)
)
def test_new_random_numbers_differ_from_place_to_place(model):
    def masked(x):
        return x * 0 + jax.random.uniform(hk.next_rng_key(), x.shape)

    old = hk.transform(functools.partial(model, lambda x: jax.nn.relu(x)))
    params = old.init(jax.random.key(0), X)
    mox = make_mox(old)(X)
    changed = mox.sub(relus(mox), masked)
    one, two, again = (
        jax.tree.leaves(eval_mox(changed, params, jax.random.key(seed), X))[0] for seed in (1, 2, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - two).min() > 0
    with pytest.raises(ValueError, match="rng: the expression draws random numbers"):
        eval_mox(changed, params, None, X)


def test_a_model_without_a_key_can_not_draw():
    mox = make_mox(hk.without_apply_rng(hk.transform(mlp)))(X)
    with pytest.raises(ValueError, match="draws random numbers, and the model has no key"):
        mox.sub(relus(mox), lambda x: hk.dropout(hk.next_rng_key(), 0.5, x))


# --- what a replacement may be ---------------------------------------------------------------------


def mlp(x):
    return hk.nets.MLP([8, 8, 8])(x)


class Wide(hk.Module):
    def __init__(self, output_size, with_bias=True, name=None):
        super().__init__(name=name)
        self.output_size = output_size

    def __call__(self, x):
        return hk.Linear(self.output_size, name="lin")(jnp.tanh(x))


INNER = hk.transform(lambda x: hk.Linear(8, name="lin")(jnp.tanh(x)))
KINDS = dict(
    function=lambda x: hk.Linear(8, name="lin")(jnp.tanh(x)),
    cls=Wide,
    partial=functools.partial(Wide, 8),
    factory=lambda: Wide(8, name="wide"),
    transformed=INNER,
    without_rng=hk.without_apply_rng(INNER),
    with_state=hk.transform_with_state(lambda x: hk.Linear(8, name="lin")(jnp.tanh(x))),
    mox=make_mox(INNER)(X),
)


@pytest.mark.parametrize("kind", few(KINDS, "function", "cls", "with_state", "mox"))
def test_replacements(kind):
    mox = make_mox(hk.transform(mlp))(X)
    changed = mox.sub("**/linear_1", KINDS[kind])
    params = changed.init(jax.random.key(0), X)
    (new,) = (name for name in params if name.endswith("/lin"))
    assert new.startswith("mlp/~/linear_1/")

    def hand(x):
        x = jax.nn.relu(hk.Linear(8, name=hk.force_name("mlp/~/linear_0"))(x))
        x = jax.nn.relu(hk.Linear(8, name=hk.force_name(new))(jnp.tanh(x)))
        return hk.Linear(8, name=hk.force_name("mlp/~/linear_2"))(x)

    close(eval_mox(changed, params, None, X), hk.transform(hand).apply(params, None, X))


def test_a_module_that_is_called_twice_shares_what_is_created():
    def twice(make):
        def model(x):
            layer = make()
            return layer(layer(x)) + x

        return hk.transform(model)

    mox = make_mox(twice(lambda: hk.Linear(8, name="one")))(X)
    changed = mox.sub(hk.Linear, lambda x: hk.Linear(8, name="new")(jnp.sin(x)))
    params = changed.init(jax.random.key(0), X)
    assert list(params) == ["one/new"]
    hand = twice(lambda: lambda x: hk.Linear(8, name=hk.force_name("one/new"))(jnp.sin(x)))
    close(eval_mox(changed, params, None, X), hand.apply(params, None, X))


def test_a_module_that_returns_its_input():
    class Same(hk.Module):
        def __call__(self, x):
            return x

    def model(same):
        def f(x):
            h = jnp.sin(x)
            return h + same(h) + h * 2

        return hk.transform(f)

    mox = make_mox(model(lambda h: Same()(h)))(X)
    got = eval_mox(mox.sub(Same, lambda h: h * 10), {}, None, X)
    close(got, model(lambda h: h * 10).apply({}, None, X))


def test_of_nodes_in_one_another_the_outermost_is_replaced():
    mox = make_mox(hk.transform(mlp))(X)
    changed = mox.sub("//module_call", jnp.tanh)
    assert not changed.select(hk.Module)
    same(eval_mox(changed, {}, None, X), jnp.tanh(X))
    assert mox.select(hk.Linear) and len(mox.select(hk.Module)) == 4


def test_changes_compose():
    mox = make_mox(hk.transform(mlp))(X)
    once = mox.sub("**/linear_0", lambda x: hk.nets.MLP([4, 8], name="inner")(x))
    twice = once.sub(once["**/inner/~/linear_0"], lambda x: hk.Linear(4, name="deep")(jnp.sin(x)))
    again = make_mox(to_transformed(twice))(X)
    params = again.init(jax.random.key(0), X)
    assert "mlp/~/linear_0/inner/~/linear_0/deep" in params
    same(eval_mox(again, params, None, X), eval_mox(twice, params, None, X))
    assert again.query("//module_call/@path") == twice.query("//module_call/@path")


def test_modules_under_vmap():
    """Of modules, and not of equations, it is known which axis is that of the elements."""

    def norm(x):
        return (x - x.mean()) / (x.std() + 1)

    def norm_of_linear(x):
        return norm(hk.Linear(8, name="new")(x))

    def model(layer):
        return hk.transform(lambda x: hk.vmap(layer(), in_axes=1, out_axes=1, split_rng=False)(x))

    mox = make_mox(model(lambda: hk.Linear(8)))(X.T)
    changed = mox.sub(hk.Linear, norm_of_linear)
    params = changed.init(jax.random.key(0), X.T)
    assert params["linear/new"]["w"].shape == (8, 8)
    name = hk.force_name("linear/new")
    hand = model(lambda: (lambda layer: lambda x: norm(layer(x)))(hk.Linear(8, name=name)))
    close(eval_mox(changed, params, None, X.T), hand.apply(params, None, X.T))
    again = make_mox(to_transformed(mox))(X.T)
    close(
        eval_mox(again.sub(hk.Linear, norm_of_linear), params, None, X.T),
        eval_mox(changed, params, None, X.T),
    )


# --- what can't be right is refused ----------------------------------------------------------------


def differentiated(x):
    layer = hk.Linear(8)
    layer(x)
    w = hk.get_parameter("w", (8, 8), init=jnp.ones)
    inner = lambda x: (Block(jnp.tanh)(x @ w) ** 2).sum()  # noqa: E731
    if hk.running_init():
        return inner(x)
    return hk.grad(inner)(x)


@jax.custom_jvp
def custom(x):
    return jnp.sin(x) * 2


custom.defjvps(lambda t, out, x: t * jnp.cos(x) * 2)


@jax.custom_vjp
def reversed_custom(x):
    return jnp.sin(x) * 2


reversed_custom.defvjp(lambda x: (reversed_custom(x), x), lambda x, g: (g * jnp.cos(x) * 2,))


@pytest.mark.parametrize(
    "model, where, message",
    [
        (differentiated, Block, "can't be replaced: the model differentiates it"),
        (custom, "//sin", "has a derivative of its own.*Replace it as a whole"),
        (reversed_custom, "//sin", "has a derivative of its own.*Replace it as a whole"),
        (mlp, "//cos", "nothing in the expression is '//cos'"),
        (mlp, "//*[", "is not an XPath"),
        (mlp, "count(//*)", "gives .*, and not nodes"),
        (mlp, lambda node: False, "nothing in the expression"),
        (mlp, "/mox", "is a body: choose calls of modules, or equations"),
    ],
)
def test_nodes_that_can_not_be_replaced(model, where, message):
    mox = make_mox(hk.transform(model))(X)
    with pytest.raises(ValueError, match=message):
        mox.sub(where, lambda x: x)


def doubled(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]


DERIVATIVES = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "grad of jit": lambda f: jax.grad(lambda x: jax.jit(f)(x).sum()),
    "grad of remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "grad of a loop": lambda f: jax.grad(lambda x: doubled(f)(x).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
    "hessian": lambda f: lambda x: jax.hessian(lambda x: f(x).sum())(x).sum((0, 1)),
}


@pytest.mark.parametrize("derivative", few(list(DERIVATIVES), "grad", "grad of a loop"))
def test_equations_that_the_model_differentiates_are_refused(derivative, tmp_path):
    """Without modules, too, and after loading. Those beside can be replaced."""

    def model(act, beside, x):
        return DERIVATIVES[derivative](lambda x: act(x) * 2)(x) + beside(x)

    mox = make_mox(hk.transform(functools.partial(model, jnp.tanh, jnp.cos)))(X)
    save(tmp_path / "mox.json", mox)
    for made in (mox, load(tmp_path / "mox.json")):
        for change in (made.sub, made.insert_after, made.patch):
            with pytest.raises(ValueError, match="the model differentiates it"):
                change("//tanh", jnp.sin)
        beside = made.query("/mox/cos")[-1]
        want = model(jnp.tanh, jnp.exp, X)
        close(made.sub(beside, jnp.exp).apply({}, None, X), want)


def test_the_original_is_called_with_what_it_was_made_for():
    class Scaled(hk.Module):
        def __call__(self, x, scale, is_training):
            return x * scale - is_training

    mox = make_mox(hk.transform(lambda x: Scaled(name="a")(x, 2.0, is_training=True)))(X)
    calls = {
        r"\[1\]\['is_training'\]: .* made for True, got False": lambda f, x, s, is_training: f(
            x, s, is_training=False
        ),
        r"\[0\]\[1\]: .* made for 2.0, got 3.0": lambda f, x, s, is_training: f(
            x, 3.0, is_training=is_training
        ),
        r"\[0\]\[0\]: .* made for float32\[4,8\], got float32\[1,8\]": lambda f, x, *a, **k: (
            f(x[:1], *a, **k) + x * 0
        ),
        "made for float32.*, got bfloat16": lambda f, x, *a, **k: f(x.astype("bfloat16"), *a, **k),
        "made for .*array.*, got": lambda f, x, s, is_training: f(x, is_training=is_training),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"<a: Scaled.*{message}"):
            mox.wrap("a", call)
    changed = mox.wrap("a", lambda f, x, *a, **k: f(x, *a, **k) * 3)
    close(changed.apply({}, None, X), (X * 2 - 1) * 3)


def test_flags_beside_what_is_handed_through():
    mox = make_mox(
        hk.transform_with_state(
            lambda x: hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True)
        )
    )(X)
    same(mox.sub("norm", None).apply({}, {}, None, X)[0], X)
    with pytest.raises(ValueError, match="no arrays by position.*query.*wrap"):
        make_mox(hk.transform(attention_by_keywords))(X).insert_before("attention", lambda x: x)


def attention_by_keywords(x):
    layer = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(), name="attention")
    return layer(query=x, key=x, value=x)


def test_names_that_haiku_does_not_allow():
    """Of primitives and functions; new parameters have the nearest name that it does."""

    def model(x):
        x = jax.jit(lambda x: x * 2)(x)
        return jax.ops.segment_sum(x, jnp.array([0, 0, 1, 1]), 2)

    mox = make_mox(hk.transform(model))(X)

    def gain(x):
        return x * hk.get_parameter("gain", (8,), init=jnp.ones)

    changed = mox.insert_after("//*[name()='scatter-add']", gain)
    changed = changed.insert_after('//jit[@name="<lambda>"]', gain)
    params = changed.init(RNG, X)
    assert set(params) == {"scatter_add", "_lambda_"}
    same(changed.apply(params, None, X), mox.apply({}, None, X))


def test_a_path_that_no_module_has():
    mox = make_mox(hk.transform(mlp))(X)
    with pytest.raises(KeyError, match="no module has the path 'mlp/linear_0'.*mlp/~/linear_0"):
        mox.sub("mlp/linear_0", None)


@pytest.mark.parametrize(
    "replacement, message",
    [
        (lambda x: x[:2], r"linear_1.*has to be float32\[4,8\], and is float32\[2,8\]"),
        (lambda x: x.astype(jnp.bfloat16), r"has to be float32\[4,8\], and is bfloat16\[4,8\]"),
        (lambda x: (x, x), r"has to return array, and returned \(array, array\)"),
        (lambda x: None, "has to return array, and returned None"),
        (
            lambda x: hk.get_parameter("w", (8, 8), init=jnp.ones) @ x.T,
            "has to be|makes another one",
        ),
    ],
)
def test_results_of_another_kind(replacement, message):
    mox = make_mox(hk.transform(mlp))(X)
    with pytest.raises(ValueError, match=message):
        mox.sub("**/linear_1", replacement)


def test_names_that_are_taken():
    mox = make_mox(hk.transform(mlp))(X)
    with pytest.raises(ValueError, match="has 'mlp/~/linear_1/w', and a replacement makes another"):
        mox.sub(
            "**/linear_1",
            lambda x: x @ hk.get_parameter("w", (8, 8), init=jnp.ones),
            keep_unused=True,
        )
    made = mox.sub("**/linear_1", lambda x: hk.Linear(8, name="linear_1")(x), path="other")
    assert "other/linear_1" in made.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="Give each a path of its own"):
        wide = lambda x: hk.Linear(x.shape[-1], name="l")(x)[:, : x.shape[-1]]  # noqa: E731
        odd = make_mox(hk.transform(lambda x: (jnp.sin(x), jnp.sin(x[:, :4]))))(X)
        odd.sub("//sin", wide, path="one")


def test_a_node_of_another_expression():
    one, other = (make_mox(hk.transform(mlp))(X) for _ in range(2))
    with pytest.raises(ValueError, match="is not a node of this expression"):
        one.sub(other["**/linear_0"], None)


def test_what_is_no_replacement():
    mox = make_mox(hk.transform(mlp))(X)
    with pytest.raises(TypeError, match="replacement: expected a function.*got int"):
        mox.sub("**/linear_0", 3)
    with pytest.raises(ValueError, match="has to return array"):
        make_mox(hk.transform(lambda x: hk.MultiHeadAttention(2, 4, w_init=jnp.ones)(x, x, x)))(
            X
        ).sub(hk.MultiHeadAttention, None)


# --- state in properties ----------------------------------------------------------------------------


class Mean(hk.Module):
    """Reads its state and a parameter in properties, and its state changes where it is called."""

    @property
    def state(self):
        return hk.get_state("mean", (8,), init=jnp.zeros)

    @property
    def weight(self):
        return hk.get_parameter("w", (8,), init=hk.initializers.RandomNormal())

    def __call__(self, x):
        mean = self.state
        hk.set_state("mean", 0.9 * mean + 0.1 * x.mean(0))
        return (x + mean) * self.weight


def mean_alone(x):
    return Mean(name="m")(x)


def mean_read_again(x):
    mean = Mean(name="m")
    return mean(x) + mean.state


def mean_in_scan(x):
    mean = Mean(name="m")
    return hk.scan(lambda c, _: (mean(c), None), x, None, length=2)[0]


def mean_called_by_others(x):
    class Outer(hk.Module):
        def __init__(self, name=None):
            super().__init__(name=name)
            self.mean = Mean(name="m")

        def __call__(self, x):
            return self.mean(x)

    outer = Outer(name="outer")
    return outer.mean(x + 1) + outer(x)


@pytest.mark.parametrize("model", few([mean_alone, mean_in_scan], mean_alone))
def test_state_and_parameters_that_only_properties_of_a_replaced_module_read_are_left_out(model):
    mox = make_mox(hk.transform_with_state(model))(X)
    changed = mox.sub("m", jnp.tanh)
    params, state = changed.init(jax.random.key(0), X)
    assert params == state == {}
    assert changed.apply(params, state, None, X)[1] == {}


@pytest.mark.slow
def test_state_stays_as_long_as_a_call_of_its_module_does():
    """A property that is read elsewhere, and a module below the replaced one that others call."""
    t = hk.transform_with_state(mean_read_again)
    params, state = t.init(jax.random.key(0), X)
    state = jax.tree.map(lambda x: x + 2, state)
    changed = make_mox(t)(X).sub("m", jnp.tanh)
    out, new = changed.apply({}, state, None, X)
    _, updated = t.apply(params, state, None, X)
    close((out, new), (jnp.tanh(X) + updated["m"]["mean"], updated))

    t = hk.transform_with_state(mean_called_by_others)
    params, state = t.init(jax.random.key(0), X)
    changed = make_mox(t)(X).sub("outer", jnp.tanh)
    out, new = changed.apply(params, state, None, X)
    hand = hk.transform_with_state(lambda x: Mean(name=hk.force_name("outer/~/m"))(x + 1))
    want, _ = hand.apply(params, state, None, X)
    close((out, new), (want + jnp.tanh(X), t.apply(params, state, None, X)[1]))
