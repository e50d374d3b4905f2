"""`sub`, `wrap`, `insert_before` and `insert_after`, against models that are written that way."""

import functools
import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import eval_mox, make_mox, to_transformed

X = jax.random.normal(jax.random.key(1), (4, 8))


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), got, want)


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


def transparent(act, x):
    class Map(hk.experimental.LayerStackTransparencyMapping if hasattr(hk.experimental, "LayerStackTransparencyMapping") else object):
        pass

    return Block(act)(x)


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


def mapped_twice(act, x):
    block = Block(act)
    inner = hk.vmap(block, in_axes=1, out_axes=1, split_rng=False)
    return hk.vmap(inner, split_rng=False)(x.reshape(2, 2, 8).transpose(0, 2, 1)[..., None, :].swapaxes(1, 3))


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
    branches,
    switched,
    looped,
    counted,
    rematted,
    mapped,
    recurrent,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
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


@pytest.mark.parametrize("model", PATHS, ids=lambda m: m.__name__)
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


@pytest.mark.parametrize("model", [stacked, stacked_with_inputs], ids=lambda m: m.__name__)
def test_layers_of_a_stack_have_parameters_of_their_own(model):
    """By hand: the stack with the new function in its layer."""
    mox = make_mox(hk.transform(functools.partial(model, jax.nn.relu)))(X)
    changed = mox.sub(relus(mox), scaled(jnp.tanh))
    params = changed.init(jax.random.key(3), X)
    gain = {name: entries for name, entries in params.items() if "gain" in entries}
    ((name, entries),) = gain.items()
    assert name.endswith("/block/relu")
    layers = 3 if model is stacked else 4
    assert entries["gain"].shape == (layers, 16)
    assert len(np.unique(entries["gain"])) == layers * 16

    hand = hk.transform(functools.partial(model, lambda x: at("block/relu", scaled(jnp.tanh))(x)))
    close(eval_mox(changed, params, None, X), hand.apply(params, None, X))
    got, want = (jax.grad(loss(f))(params, X) for f in (to_transformed(changed).apply, hand.apply))
    close(got, want)
