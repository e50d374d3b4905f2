"""Haiku functions that use each of its features around parameters; none of them knows this library."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

X = jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)
MODELS = {}


def model(fun):
    """Lists a function of `X`."""
    MODELS[fun.__name__] = fun
    return fun


@model
def mlp(x):
    return hk.nets.MLP([5, 3], activation=jnp.tanh)(x)


class Block(hk.Module):
    """A residual layer with a submodule made in its constructor and one made in its method."""

    def __init__(self, size, name=None):
        super().__init__(name=name)
        self.size = size
        self.inner = hk.Linear(size, name="inner")

    def __call__(self, x):
        return x + hk.Linear(self.size, name="outer")(jnp.tanh(self.inner(x)))


@model
def nested_modules(x):
    return Block(4, name="second")(Block(4, name="first")(x))


@model
def shared_module(x):
    block = Block(4)
    return block(block(x))


@model
def name_scope(x):
    with hk.name_scope("scope"):
        x = hk.Linear(4)(x)
        return x @ hk.get_parameter("w", (4, 3), init=hk.initializers.RandomNormal())


@model
def transposed_weight(x):
    """A tied embedding: rows are looked up, and the output is a product with the transpose."""
    embed = hk.Embed(7, 4)
    ids = jnp.arange(6) % 7
    return jnp.tanh(x + embed(ids)) @ embed.embeddings.T


@model
def lift(x):
    inner = hk.transform(lambda x: hk.Linear(3)(x))
    params = hk.lift(inner.init, name="lifted")(hk.next_rng_key() if hk.running_init() else None, x)
    return inner.apply(params, None, x)


@model
def transparent_lift(x):
    inner = hk.transform(lambda x: hk.Linear(3)(x))
    params = hk.transparent_lift(inner.init)(hk.next_rng_key() if hk.running_init() else None, x)
    return inner.apply(params, None, x)


@model
def layer_stack(x):
    return hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(4)(x)))(x)


@model
def layer_stack_with_inputs(x):
    @hk.experimental.layer_stack(2, with_per_layer_inputs=True)
    def stack(x, y):
        return jnp.tanh(hk.Linear(4)(x) + y), x.sum()

    return stack(x, jnp.arange(2.0))


@model
def scan(x):
    cell = hk.Linear(4)

    def step(carry, row):
        carry = jnp.tanh(cell(carry) + row)
        return carry, carry

    return hk.scan(step, jnp.zeros(4), x)


@model
def lstm(x):
    core = hk.LSTM(3)
    return hk.dynamic_unroll(core, x[:, None], core.initial_state(1))[0]


@model
def remat(x):
    return hk.remat(Block(4))(x)


@model
def vmap(x):
    layer = hk.Linear(3)
    return hk.vmap(lambda row: jnp.tanh(layer(row)), split_rng=False)(x)


def _branches():
    return hk.Linear(3, name="yes"), hk.nets.MLP([5, 3], activation=jnp.tanh, name="no")


@model
def cond(x):
    yes, no = _branches()
    if hk.running_init():
        return yes(x) + no(x)
    return hk.cond(x.sum() > 0.5, yes, no, x)


@model
def switch(x):
    yes, no = _branches()
    if hk.running_init():
        return yes(x) + no(x)
    return hk.switch(x.argmax() % 2, [no, yes], x)


@model
def while_loop(x):
    layer = hk.Linear(4)
    if hk.running_init():
        return layer(x)
    end = jax.lax.stop_gradient(x.shape[0] // 2)
    return hk.while_loop(lambda c: c[0] < end, lambda c: (c[0] + 1, jnp.tanh(layer(c[1]))), (0, x))[1]


@model
def fori_loop(x):
    layer = hk.Linear(4)
    if hk.running_init():
        return layer(x)
    return hk.fori_loop(0, 3, lambda i, x: jnp.tanh(layer(x) + i), x)


@model
def grad(x):
    """The energy of a network, and its gradient by the input."""
    net = hk.nets.MLP([5, 2], activation=jnp.tanh)
    return hk.grad(lambda x: net(x).sum())(x)


@model
def value_and_grad(x):
    net = hk.nets.MLP([5, 2], activation=jnp.tanh)
    return hk.value_and_grad(lambda x: net(x).sum())(x)


@model
def custom_getter_casts(x):
    def half(next_getter, value, context):
        return next_getter(value.astype(jnp.bfloat16).astype(jnp.float32))

    with hk.custom_getter(half):
        return hk.Linear(3)(x)


@model
def interceptor(x):
    def double(next_f, args, kwargs, context):
        out = next_f(*args, **kwargs)
        return 2 * out if context.method_name == "__call__" else out

    with hk.intercept_methods(double):
        return hk.nets.MLP([5, 3])(x)


@model
def custom_setter(x):
    def halve(next_setter, value, context):
        return next_setter(value / 2)

    with hk.custom_setter(halve):
        hk.set_state("last", hk.Linear(3)(x))
    return hk.get_state("last")


@model
def running_statistics(x):
    x = hk.Linear(3)(x)
    return hk.BatchNorm(True, True, 0.9)(x, is_training=True)


@model
def params_by_name(x):
    hk.Linear(3)(x)
    return x @ hk.get_params()["linear"]["w"]


class Policied(hk.Module):
    """A layer whose class has a mixed precision policy."""

    def __call__(self, x):
        return jnp.tanh(hk.Linear(3)(x))


@model
def mixed_precision(x):
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    with hk.mixed_precision.push_policy(Policied, policy):
        return Policied()(x)


def transformed(fun):
    """The function with state, and its dense parameters with values that are no ties or zeros."""
    t = hk.transform_with_state(fun)
    params, state = t.init(jax.random.PRNGKey(1), X)
    return t, jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), params), state


# These compute in bfloat16, of 8 bits: x @ w + x @ a @ b is rounded elsewhere than x @ (w + a @ b).
TOLERANCE = {"mixed_precision": 0.05, "custom_getter_casts": 0.05}


@functools.cache
def case(name):
    """`transformed` of a model of the table."""
    return transformed(MODELS[name])


def noise(params, seed=0):
    """The same tree with floats moved a little, so that no factor is zero any more."""
    leaves, treedef = jax.tree.flatten(params)
    moved = [
        x + 0.2 * jnp.cos(seed + i + jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else x
        for i, x in enumerate(leaves)
    ]
    return treedef.unflatten(moved)
