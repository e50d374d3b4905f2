"""Haiku functions that use each of its features around parameters, and how they are compared.

None of the functions knows this library.
"""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np

import haiku_implicit as hki

RNG = jax.random.PRNGKey(42)
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


class Renamed(hk.Module):
    """Parameters that are stored under names of another scope."""

    @hk.transparent
    def __call__(self, x):
        x = jnp.tanh(hk.Linear(4, name=hk.force_name("elsewhere"))(x))
        return x + self.named_like_call(x)

    @hk.name_like("__call__")
    def named_like_call(self, x):
        return hk.Linear(4)(x)


@model
def renamed(x):
    with hk.with_rng(jax.random.PRNGKey(3)):
        return Renamed()(x)


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
    return hk.while_loop(lambda c: c[0] < end, lambda c: (c[0] + 1, jnp.tanh(layer(c[1]))), (0, x))[
        1
    ]


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
    return hk.BatchNorm(True, True, 0.9, eps=0.1)(x, is_training=True)


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


# These compute in bfloat16, of 8 bits: x @ w + x @ a @ b is rounded elsewhere than x @ (w + a @ b).
TOLERANCE = {"mixed_precision": 0.05, "custom_getter_casts": 0.05}

# XLA is told not to spend time on optimizing.
quick_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


class Case:
    """A Haiku function with parameters and state, and its compiled derivative.

    Attributes:
      plain: what `hk.transform_with_state` returns.
      params: dense parameters.
      state: the state.
      x: the input.
    """

    def __init__(self, plain, params, state, x):
        self.plain, self.params, self.state, self.x = plain, params, state, x

    @functools.cached_property
    def dense(self):
        """`(params, x) -> (gradients by both, results)`."""
        return quick_jit(_differentiated(functools.partial(self.loss, self.plain.apply)))

    def loss(self, apply, params, x):
        """A number that every result enters, and the results."""
        out = hki.materialize(apply(params, self.state, RNG, x))
        return _scalar(out), out

    def check(self, make, tolerance):
        """Compares results and gradients under `jit` with those of the dense twin.

        Args:
          make: from dense parameters to implicit ones, under `jit`.
          tolerance: relative; a tenth of it absolute.
        """
        apply = hki.transform_implicit(self.plain).apply

        @quick_jit
        def implicit(params, x):
            trained, frozen = hki.partition(make(params))

            def loss(trained, x):
                return self.loss(apply, hki.combine(trained, frozen), x)

            return _differentiated(loss)(trained, x), hki.materialize(hki.combine(trained, frozen))

        @quick_jit
        def chained(params, by_dense):
            """Gradients of the dense parameters, brought to the leaves through `materialize`."""
            trained, frozen = hki.partition(make(params))
            dense = lambda trained: hki.materialize(hki.combine(trained, frozen))  # noqa: E731
            return jax.vjp(dense, trained)[1](by_dense)[0]

        ((by_params, by_x), out), dense = implicit(self.params, self.x)
        (by_dense, dense_by_x), expected = self.dense(dense, self.x)
        close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance / 10)
        jax.tree.map(close, out, expected)
        wanted = chained(self.params, by_dense), dense_by_x
        for a, b in zip(_floats((by_params, by_x)), _floats(wanted), strict=True):
            close(a, b)


def _differentiated(loss):
    return jax.grad(loss, (0, 1), has_aux=True, allow_int=True)


def _floats(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def _scalar(tree):
    """A function of all numbers of a tree that weighs each differently."""
    parts = [jnp.vdot(y, jnp.sin(1.0 + jnp.arange(y.size)).reshape(y.shape)) for y in _floats(tree)]
    return sum(parts, jnp.zeros(()))


@functools.cache
def case(name):
    """The case of a model of the table; parameters have values without ties or zeros."""
    plain = hk.transform_with_state(MODELS[name])
    params, state = jax.jit(plain.init)(jax.random.PRNGKey(1), X)
    return Case(plain, noise(params), state, X)


def waves(key, shape, dtype):
    """An initializer without random numbers, which would take longer to compile than most models."""
    return jnp.cos(jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape) / shape[-2]


def with_lora(params, rank=2, **options):
    """LoRA, none of whose factors is zero."""
    lora = hki.add_lora(params, 0, rank=rank, alpha=0.3, init=waves, **options)
    return jax.tree.map(lambda x: x + 0.1, lora)


def noise(params, seed=0):
    """Moves the floats of a tree a little, so that no factor stays zero."""

    def moved(x, phase):  # by NumPy: JAX would compile for each shape
        by = 0.2 * np.cos(phase + np.arange(x.size)).reshape(x.shape)
        return jax.device_put(np.asarray(x) + by.astype(x.dtype))

    leaves, treedef = jax.tree.flatten(params)
    new = [
        moved(x, seed + i) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for i, x in enumerate(leaves)
    ]
    return treedef.unflatten(new)
