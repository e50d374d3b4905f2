"""Random Haiku functions: modules, control flow, state, sharing and transforms within transforms.

A program is data, `(kind, options, children)`, that prints as the Python literal it is: a failure can be
kept as it was found, whatever becomes of what draws programs. All functions are of `x [BATCH, WIDTH]`,
and so are their results; none knows this library.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, WIDTH, HIDDEN = 4, 6, 8
Program = tuple[str, dict[str, Any], list[Any]]


def draw(rng: random.Random, depth: int = 3, without: frozenset[str] = frozenset()) -> Program:
    """A program whose structures are nested up to `depth`.

    Args:
      rng: what is drawn with.
      depth: how many structures lie within one another.
      without: kinds that the program may not have.
    """
    if depth == 0 or rng.random() < 0.35:
        return rng.choice([name for name in LEAVES if name not in without]), {}, []
    kind = rng.choice([name for name in STRUCTURES if name not in without])
    without |= NOT_WITHIN.get(kind, frozenset())
    if kind in ("cond", "switch"):
        count = 2
    else:
        count = rng.randint(1, 3) if kind == "sequence" else 1
    children = [draw(rng, depth - 1, without) for _ in range(count)]
    options = {"length": rng.randint(1, 3), "branch": rng.choice(["first", "last", "data"])}
    return kind, options if kind in WITH_OPTIONS else {}, children


def function(program: Program) -> Callable[[Any], Any]:
    """The Haiku function of a program."""
    return lambda x: build(program, "net")(x)


def build(program: Program, name: str) -> Callable[[Any], Any]:
    """Makes the modules of a program, in the scope that is current, and returns the function that calls them."""
    kind, options, children = program
    if kind in LEAVES:
        return Layer(LEAVES[kind], f"{name}_{kind}")
    if kind in ("layer_stack", "lift"):  # which make the modules in a place of their own
        make = lambda: build(children[0], f"{name}_inner")  # noqa: E731
        return functools.partial(STRUCTURES[kind], make, name=name, **options)
    calls = [build(child, f"{name}{i}") for i, child in enumerate(children)]
    if kind in AFTER_INIT and hk.running_init():
        return functools.partial(sequence, calls)
    return functools.partial(STRUCTURES[kind], calls, **options)


# --- modules, and other uses of parameters ---------------------------------------------------------------


class Layer(hk.Module):
    """A module that is one of `LEAVES`, bounded, so that errors do not grow along a program."""

    def __init__(self, fun: Callable[[Any], Any], name: str):
        super().__init__(name=name)
        self.fun = fun

    def __call__(self, x: Any) -> Any:
        return 0.5 * x + jnp.tanh(self.fun(x))


LEAVES: dict[str, Callable[[Any], Any]] = {}
STATEFUL = frozenset({"batch_norm", "counter", "moving_average", "state_of_weight"})
# What dense arrays can't do either: JAX maps `ragged_dot` over its first axis alone, and the forward rule
# of a loop whose length is not known has no transpose.
NO_VMAP, NO_REVERSE = frozenset({"ragged"}), frozenset({"while_loop"})
# Haiku maps and stacks no state.
NOT_WITHIN = {
    "vmap": STATEFUL | NO_VMAP,
    "layer_stack": STATEFUL,
    "lift": STATEFUL,
    "shared": frozenset({"lift"}),  # which makes its parameters once
    "value_and_grad": NO_REVERSE,
}


def leaf(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    LEAVES[fun.__name__] = fun
    return fun


def weight(*shape: int, name: str = "w") -> Any:
    return hk.get_parameter(name, shape, init=hk.initializers.RandomNormal())


@leaf
def linear(x):
    return hk.Linear(WIDTH)(x)


@leaf
def mlp(x):
    return hk.nets.MLP([HIDDEN, WIDTH], activation=jnp.tanh)(x)


@leaf
def layer_norm(x):
    return hk.LayerNorm(-1, True, True)(hk.Linear(WIDTH)(x))


@leaf
def rms_norm(x):
    return hk.RMSNorm(-1)(x)


@leaf
def conv1d(x):
    return hk.Conv1D(WIDTH, 3, stride=1)(x[None])[0]


@leaf
def conv2d_in_groups(x):
    return hk.Conv2D(WIDTH, 2, feature_group_count=2)(x.reshape(1, 2, 2, WIDTH)).reshape(x.shape)


@leaf
def conv1d_transposed(x):
    return hk.Conv1DTranspose(WIDTH, 2, stride=2)(x[None])[0, ::2]


@leaf
def depthwise(x):
    return hk.DepthwiseConv1D(1, 3)(x[None])[0]


@leaf
def attention(x):
    init = hk.initializers.VarianceScaling()
    return hk.MultiHeadAttention(2, 3, w_init=init, model_size=WIDTH)(x, x, x)


@leaf
def heads(x):
    y = jnp.einsum("bi,ihd->bhd", x, weight(WIDTH, 2, 4, name="into_heads"))
    return jnp.einsum("bhd,hdo->bo", jnp.tanh(y), weight(2, 4, WIDTH, name="out_of_heads"))


@leaf
def embed(x):
    return x + hk.Embed(5, WIDTH)(jnp.arange(x.shape[0]) % 5)


@leaf
def tied_embedding(x):
    table = weight(5, WIDTH, name="embeddings")
    return jax.nn.softmax(x @ table.T) @ table


@leaf
def gru(x):
    return hk.GRU(WIDTH)(x, jnp.zeros_like(x))[0]


@leaf
def lstm(x):
    core = hk.LSTM(WIDTH)
    return hk.dynamic_unroll(core, x[:, None], core.initial_state(1))[0][:, 0]


@leaf
def batch_norm(x):
    return hk.BatchNorm(True, True, 0.9)(x, is_training=True)


@leaf
def counter(x):
    count = hk.get_state("count", (), init=jnp.zeros)
    hk.set_state("count", count + 1)
    return x * (1 + 0.1 * count) @ weight(WIDTH, WIDTH)


@leaf
def moving_average(x):
    return x - hk.ExponentialMovingAverage(0.5)(x.mean(0)) + weight(WIDTH)


@leaf
def state_of_weight(x):
    """A state that is made of a weight."""
    w = weight(WIDTH, WIDTH)
    before = hk.get_state("w", w.shape, init=jnp.zeros)
    hk.set_state("w", 0.5 * before + w)
    return x @ (w - 0.1 * before)


@leaf
def dropout(x):
    return hk.dropout(hk.next_rng_key(), 0.3, x @ weight(WIDTH, WIDTH))


@leaf
def weight_norm(x):
    w = weight(WIDTH, WIDTH)
    return x @ (w * lax.rsqrt(jnp.sum(w**2, 0) + 0.1))


@leaf
def standardized(x):
    w = weight(WIDTH, WIDTH)
    return x @ ((w - w.mean(0)) / jnp.sqrt(w.var(0) + 0.1))


@leaf
def reshaped(x):
    return x @ weight(3, 2 * WIDTH).reshape(WIDTH, WIDTH)


@leaf
def cut(x):
    w = weight(HIDDEN, WIDTH + 1)
    return x @ w[1 : WIDTH + 1, :WIDTH]


@leaf
def transposed(x):
    return x @ weight(WIDTH, WIDTH).T


@leaf
def joined(x):
    return x @ jnp.concatenate([weight(WIDTH, 2, name="a"), weight(WIDTH, 4, name="b")], 1)


@leaf
def stacked(x):
    w = jnp.stack([weight(WIDTH, WIDTH, name="a"), weight(WIDTH, WIDTH, name="b")])
    return jnp.einsum("bi,kio->bo", x, w)


@leaf
def split(x):
    a, b = jnp.split(weight(WIDTH, 2 * WIDTH), 2, axis=1)
    return jax.nn.silu(x @ a) * (x @ b)


@leaf
def mixture_of_experts(x):
    gates = jax.nn.softmax(x @ weight(WIDTH, 3, name="gates"))
    return jnp.einsum("be,bi,eio->bo", gates, x, weight(3, WIDTH, WIDTH, name="experts"))


@leaf
def gathered_experts(x):
    chosen = weight(3, WIDTH, WIDTH)[jnp.arange(x.shape[0]) % 3]
    return jnp.einsum("bi,bio->bo", x, chosen)


@leaf
def ragged(x):
    return lax.ragged_dot(x, weight(3, WIDTH, WIDTH), jnp.array([1, 2, 1]))


@leaf
def bilinear(x):
    return x * jnp.einsum("bi,ij,bj->b", x, weight(WIDTH, WIDTH), x)[:, None]


@leaf
def tensor_product(x):
    return jnp.einsum("bi,bj,ijk->bk", x, x, weight(WIDTH, WIDTH, WIDTH))


@leaf
def of_elements(x):
    w = weight(WIDTH, WIDTH)
    return x @ (jnp.tanh(w) - jnp.exp(-w * w))


@leaf
def masked(x):
    w = weight(WIDTH, WIDTH)
    return x @ jnp.where(np.tri(WIDTH, dtype=bool), w, 0) + x @ jnp.triu(w, 1)


@leaf
def scaled_rows_and_columns(x):
    w = weight(WIDTH, WIDTH) * weight(WIDTH, 1, name="rows")
    return x @ (w * weight(WIDTH, name="columns"))


@leaf
def product_of_weights(x):
    return x @ (weight(WIDTH, 3, name="a") @ weight(3, WIDTH, name="b"))


@leaf
def sum_of_weights(x):
    return x @ (weight(WIDTH, WIDTH, name="a") - 0.5 * weight(WIDTH, WIDTH, name="b"))


@leaf
def padded(x):
    return x @ jnp.pad(weight(WIDTH - 1, WIDTH - 2), ((0, 1), (1, 1)))


@leaf
def rolled(x):
    return x @ jnp.roll(jnp.flip(weight(WIDTH, WIDTH), 0), 2, 1)


@leaf
def repeated(x):
    w = weight(2, 3)
    return x @ jnp.tile(jnp.repeat(w, 3, axis=0), (1, 2))


@leaf
def cumulative(x):
    return x @ jnp.cumsum(weight(WIDTH, WIDTH), 0) / 3


@leaf
def powers(x):
    w = weight(WIDTH, WIDTH)
    return x @ lax.integer_pow(w, 2) + x @ jnp.abs(w)


@leaf
def solved(x):
    """A linear system, which JAX solves by a custom rule."""
    w = weight(WIDTH, WIDTH)
    return jnp.linalg.solve(jnp.eye(WIDTH) + 0.1 * w @ w.T, x.T).T


@jax.custom_jvp
def _softplus(w):
    return jnp.log1p(jnp.exp(w))


@_softplus.defjvp
def _softplus_jvp(primals, tangents):
    return _softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]


@leaf
def custom_jvp(x):
    return x @ _softplus(weight(WIDTH, WIDTH))


@jax.custom_vjp
def _product(x, w):
    return x @ w


# A gradient that is not that of the function, so that it shows whether the rule was used.
_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (2 * g @ saved[1].T, 0.5 * saved[0].T @ g)
)


@leaf
def custom_vjp(x):
    return _product(x, weight(WIDTH, WIDTH))


@leaf
def inner_jit(x):
    return jax.jit(lambda x, w: jnp.tanh(x @ w) @ w.T)(x, weight(WIDTH, WIDTH))


@leaf
def inner_vmap(x):
    w = weight(3, WIDTH, WIDTH)
    return jax.vmap(lambda w: x @ w, in_axes=0, out_axes=1)(w).sum(1)


@leaf
def inner_vmap_of_rows(x):
    w = weight(WIDTH, WIDTH)
    return jax.vmap(lambda row, k: row @ w + k, in_axes=(0, None))(x, w[0])


@leaf
def inner_grad(x):
    """The gradient of an energy by a weight, used as a weight."""
    w = weight(WIDTH, WIDTH)
    return x @ jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


@leaf
def rows_scanned(x):
    """A loop over the rows of a weight."""
    step = lambda carry, row: (jnp.tanh(carry + row), carry.sum())  # noqa: E731
    carry, sums = lax.scan(step, x[0], weight(3, WIDTH))
    return x + carry * sums.mean()


@leaf
def weight_carried(x):
    """A loop that carries a weight, which changes."""
    step = lambda w, _: (0.5 * w, x @ w)  # noqa: E731
    return lax.scan(step, weight(WIDTH, WIDTH), None, length=2)[1].sum(0)


@leaf
def weight_from_cond(x):
    w = weight(WIDTH, WIDTH)
    return x @ lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w.T, w)


@leaf
def weight_in_while(x):
    w = weight(WIDTH, WIDTH)
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))  # noqa: E731
    return lax.fori_loop(0, 2, lambda i, y: step((i, y))[1], x)


@leaf
def associative_scan(x):
    w = 0.5 * weight(3, WIDTH, WIDTH)
    return x @ lax.associative_scan(jnp.matmul, w)[-1]


@leaf
def rematerialized(x):
    return jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)(x, weight(WIDTH, WIDTH))


@leaf
def transformed_within(x):
    """A transform within the transform, whose parameters are one parameter of the outer one."""
    inner = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(WIDTH, with_bias=False)(x)))
    return inner.apply({"linear": {"w": weight(WIDTH, WIDTH)}}, x)


@leaf
def getter(x):
    """A custom getter that scales each parameter."""
    with hk.custom_getter(lambda following, value, _: following(0.5 * value)):
        return hk.Linear(WIDTH)(x)


# --- structures: of the calls of their children ------------------------------------------------------------


def sequence(calls, x):
    for call in calls:
        x = call(x)
    return x


def shared(calls, x):
    """Calls the same modules twice."""
    return calls[0](jnp.tanh(calls[0](x)))


def cond(calls, x, *, branch, length):
    return hk.cond(_chosen(branch, x), *calls, x)


def switch(calls, x, *, branch, length):
    return hk.switch(jnp.where(_chosen(branch, x), 0, 1), calls, x)


def _chosen(branch, x):
    return {"first": True, "last": False, "data": x[0, 0] > x[1, 1]}[branch]


def while_loop(calls, x, *, branch, length):
    body = lambda c: (c[0] + 1, calls[0](c[1]))  # noqa: E731
    return hk.while_loop(lambda c: c[0] < length, body, (0, x))[1]


def fori_loop(calls, x, *, branch, length):
    return hk.fori_loop(0, length, lambda i, x: calls[0](x + 0.1 * i), x)


def scan(calls, x, *, branch, length):
    step = lambda carry, row: (calls[0](carry) + row, carry.mean())  # noqa: E731
    carry, means = hk.scan(step, x, x[:length])
    return carry + means.sum()


def remat(calls, x):
    return hk.remat(calls[0])(x)


def vmap(calls, x):
    both = hk.vmap(calls[0], split_rng=not hk.running_init())(jnp.stack([x, -x]))
    return both[0] - 0.5 * both[1]


def value_and_grad(calls, x):
    value, grad = hk.value_and_grad(lambda x: calls[0](x).sum())(x)
    return 0.5 * grad + 0.1 * value


def layer_stack(make, x, *, name, branch, length):
    return hk.experimental.layer_stack(length, name=f"{name}_stack")(lambda x: make()(x))(x)


def lift(make, x, *, name):
    inner = hk.transform(lambda x: make()(x))
    key = hk.next_rng_key()
    params = hk.lift(inner.init, name=f"{name}_lifted")(key if hk.running_init() else None, x)
    return inner.apply(params, key, x)


STRUCTURES: dict[str, Callable[..., Any]] = {
    fun.__name__: fun
    for fun in (
        sequence, shared, cond, switch, while_loop, fori_loop, scan, remat, vmap, value_and_grad,
        layer_stack, lift,
    )
}  # fmt: skip
WITH_OPTIONS = {"cond", "switch", "while_loop", "fori_loop", "scan", "layer_stack"}
# What Haiku does not run before the parameters are there: `init` runs the children one after another.
AFTER_INIT = {"cond", "switch", "while_loop", "fori_loop", "scan", "value_and_grad"}


def kinds(program: Program) -> set[str]:
    """The names of all that a program has."""
    return {program[0]}.union(*map(kinds, program[2]))
