"""Haiku functions that are hard for module expressions: calls, arguments and results of all kinds.

Those of `haiku_models.py` are about parameters, these are about programs. None knows this library.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from haiku._src.integration import descriptors

from tests import haiku_models
from tests.haiku_models import RNG, Block, X, noise

MODELS = {}


class Model(NamedTuple):
    """A Haiku function and its arguments; the first one is an array."""

    fun: object
    args: tuple
    kwargs: dict

    @property
    def transformed(self):
        return hk.transform_with_state(self.fun)

    def variables(self):
        """Parameters and state."""
        params, state = jax.jit(lambda: self.transformed.init(RNG, *self.args, **self.kwargs))()
        return noise(params), noise(state, 7)


def model(*args, **kwargs):
    """Lists a function and its arguments; `X` if none are given."""

    def add(fun):
        MODELS[fun.__name__] = Model(fun, args or (X,), kwargs)
        return fun

    return add


@model()
def dropout(x):
    """Random numbers are drawn ahead in blocks: in the first dropout for both."""
    x = hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(4)(x))
    return hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(4)(x))


@model(X, True)
def batch_norm_trained(x, is_training):
    return hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), is_training)


@model()
def attention(x):
    return hk.MultiHeadAttention(2, 3, w_init_scale=1.0, model_size=4)(x, x, x, mask=None)


class Identity(hk.Module):
    """Returns its argument, once more and in part."""

    def __call__(self, x):
        return x

    def twice(self, x, y=None):
        return x, {"y": y, "x": x}, x


@model()
def returned_inputs(x):
    h = hk.Linear(4)(x)
    first, rest, again = Identity()(h), *Identity().twice(h)[1:]
    return h + first + rest["x"] * again, rest["y"]


class Table(hk.Module):
    """A module without arguments, and one that counts its calls."""

    def __call__(self):
        return hk.get_parameter("table", (4,), init=jnp.ones)

    def count(self):
        calls = hk.get_state("calls", (), jnp.int32, init=jnp.zeros)
        hk.set_state("calls", calls + 1)
        return None


@model()
def no_arguments(x):
    table = Table()
    table.count()
    table.count()
    return x * table() + table()


@dataclasses.dataclass
class Scale(hk.Module):
    """A module that is a dataclass."""

    factor: float
    offset: jax.Array | None = None

    def __call__(self, x):
        shift = 0.0 if self.offset is None else self.offset
        return hk.Linear(4)(x) * self.factor + shift


@model()
def dataclass_modules(x):
    return Scale(2.0)(x) + Scale(3.0, offset=x.sum())(x)


class Gated(hk.Module):
    """Arrays go in through the constructor, and are kept on `self` between methods."""

    def __init__(self, gate, names=(), name=None):
        super().__init__(name=name)
        self.gate, self.names, self.last = gate, names, None

    def encode(self, x):
        self.last = jax.nn.sigmoid(self.gate) * hk.Linear(3)(x)
        return self.last

    def decode(self):
        return {name: hk.Linear(2, name=name)(self.last) for name in self.names}


@model()
def methods_and_self(x):
    gated = Gated(x.mean(1, keepdims=True), names=("a", "b"))
    return gated.encode(x), gated.decode()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    """A result with an array, and a part that is static."""

    logits: jax.Array
    kind: str = dataclasses.field(metadata=dict(static=True))


class Pair(NamedTuple):
    first: jax.Array
    second: object


class Structured(hk.Module):
    def __call__(self, batch, *, kind):
        out = Output(hk.Linear(2)(batch["x"]), kind)
        return Pair(out, [None, "text", 3, (batch["y"],), {}]), print

    def count(self, counts):
        return sum(counts.values()), {2: counts["b"], "c": counts[1]}


@model({"x": X, "y": (X, None)}, kind="dense")
def structures(batch, kind="sparse"):
    """Trees of all kinds as arguments and results, also of modules."""
    (pair, fun), module = Structured()(batch, kind=kind), Structured(name="again")
    total, counts = module.count({1: pair.first.logits, "b": 2})
    assert fun is print
    assert counts[2] == 2
    return pair, total, counts["c"]


@model(X, 2, activation=jnp.tanh, sizes=[3, 2])
def ints_and_flags(x, repeats, *rest, sizes=(), activate=True, activation=None, **options):
    assert not rest
    assert not options
    for _ in range(repeats):
        for size in sizes:
            x = hk.Linear(size)(x)
            x = activation(x) if activate else x
    return x


@model(np.asarray(X), np.arange(6) % 3)
def numpy_arguments(x, ids):
    return hk.Embed(3, 4)(ids) * x + np.float32(2.0)


@model(X, jnp.arange(6) % 3, jnp.array([True, False] * 3))
def integers_and_booleans(x, ids, mask):
    return jnp.where(mask[:, None], hk.Embed(3, 4)(ids) + x, 0), ids + 1, ~mask


class Layers(hk.experimental.LayerStackTransparencyMapping):
    """The parameters of a stack under the names that its layers have without it."""

    def stacked_to_flat(self, stacked_module_name, scan_idx):
        return f"{stacked_module_name}_{scan_idx}"

    def flat_to_stacked(self, unstacked_module_name):
        name, _, number = unstacked_module_name.rpartition("_")
        return name, int(number)


@model()
def transparent_layer_stack(x):
    stack = hk.experimental.layer_stack(
        3, transparent=True, transparency_map=Layers(), name="stack"
    )
    return stack(lambda x: jnp.tanh(hk.Linear(4, name="layer")(x)))(x)


@model()
def layer_stack_of_blocks(x):
    @hk.experimental.layer_stack(3, with_per_layer_inputs=True, name="stack")
    def stack(x, scale):
        x = Block(4)(x) * scale
        return hk.dropout(hk.next_rng_key(), 0.3, x), {"norm": (x**2).sum()}

    return stack(x, jnp.arange(3.0))


@model()
def gru_in_remat(x):
    core = hk.GRU(3)
    layer = hk.remat(lambda x: jax.nn.relu(hk.Linear(4)(x)), prevent_cse=False)
    return hk.dynamic_unroll(core, layer(x)[:, None], core.initial_state(1))


@model()
def scan_with_state(x):
    norm, cell = hk.ExponentialMovingAverage(0.9), hk.Linear(4)

    def step(carry, row):
        carry = jnp.tanh(cell(carry) + row)
        norm(carry)
        return carry, hk.dropout(hk.next_rng_key(), 0.5, carry)

    return hk.scan(step, jnp.zeros(4), x, reverse=True, unroll=2)


@model()
def batched_modules(x):
    """`vmap` of modules: within one another, with random keys, and along another axis."""
    layer, block = hk.Linear(4), Block(4)

    def row(x):
        return hk.dropout(hk.next_rng_key(), 0.5, jnp.tanh(layer(x)))

    def matrix(x):
        return hk.vmap(row, split_rng=not hk.running_init())(x) + block(x)

    return hk.vmap(matrix, in_axes=2, out_axes=1, split_rng=False)(jnp.stack([x, 2 * x], 2))


@model()
def grad_over_scan_and_remat(x):
    """The gradient of a network in the network, through loops and checkpoints."""
    layer = hk.Linear(4, name="cell")
    layer(x)

    def energy(x):
        block = hk.remat(lambda x: jax.nn.relu(layer(x)))
        last, _ = hk.scan(lambda c, row: (jnp.tanh(layer(c)) + row, None), jnp.zeros(4), block(x))
        return (last**2).sum()

    return jax.grad(energy)(x) + hk.grad(energy)(2 * x)


@model()
def derivatives(x):
    """`jvp`, `linearize`, `vjp` and a Hessian of modules, within a model."""
    net = hk.nets.MLP([5, 4], activation=jnp.tanh)
    net(x)
    out, tangent = jax.jvp(net, (x,), (jnp.cos(x),))
    _, linear = jax.linearize(net, x)
    _, pull = jax.vjp(net, x)
    curvature = jax.hessian(lambda row: (net(row) ** 2).sum())(x[0])
    return out, tangent, linear(x), linear(tangent), pull(out), curvature


@jax.custom_jvp
def squared(x, y):
    """With a tangent that is not the true one, so that a rule that is lost is seen."""
    return x * x * y


@squared.defjvp
def _squared_jvp(primals, tangents):
    x, y = primals
    return squared(x, y), 5 * x * tangents[0] * y + tangents[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped(x, bound):
    """The identity, with clipped gradients."""
    return x * 1.0


clipped.defvjp(
    lambda x, bound: (clipped(x, bound), None),
    lambda bound, _, g: (jnp.clip(g, -bound, bound),),
)


@jax.custom_jvp
def activated(w, x):
    """A function with a rule of its own that is made of modules."""
    return jnp.tanh(Identity()(x @ w))


@activated.defjvp
def _activated_jvp(primals, tangents):
    return jnp.tanh(primals[1] @ primals[0]), 3 * tangents[1]


@model()
def custom_tangents(x):
    x = squared(hk.Linear(4)(x), 2.0)
    x = x + activated(hk.get_parameter("w", (4, 4), init=jnp.ones), x)
    return jax.nn.silu(x) + jax.nn.relu6(x) + jax.nn.logsumexp(x, 1, keepdims=True)


@model()
def custom_pullbacks(x):
    return jax.nn.relu(clipped(hk.Linear(4)(x), 0.5))


@model()
def while_with_module_in_condition(x):
    layer, judge = hk.Linear(4), hk.Linear(1, name="judge")
    if hk.running_init():
        return layer(x), judge(x)

    def goes_on(carried):
        i, x = carried
        return (i < 5) & (jax.nn.sigmoid(judge(x)).sum() > 0)

    return hk.while_loop(goes_on, lambda c: (c[0] + 1, jnp.tanh(layer(c[1]))), (0, x))


@model()
def branches_with_state(x):
    """Branches of modules, one of which writes state, in a loop over examples."""
    count, layer = Table(name="table"), hk.Linear(4)
    count.count()
    if hk.running_init():
        return layer(x)

    def counted(x):
        count.count()
        return layer(x)

    return hk.switch(jnp.argmax(x) % 3, [counted, lambda x: x, layer], x)


@model()
def jitted_modules(x):
    """A function of modules under `jax.jit`, called twice."""
    if hk.running_init():
        return Block(4, name="jitted")(x)
    block = Block(4, name="jitted")
    block(x)
    fun = jax.jit(lambda x: jax.nn.gelu(block(x)))
    return fun(fun(x))


@model()
def nested_name_scopes(x):
    with hk.name_scope("outer"), jax.named_scope("not_a_module"):
        x = Block(4)(x)
        with hk.name_scope("inner"):
            return hk.Linear(3)(x)


@model()
def lifted(x):
    """Transformed functions within a model, with state and random numbers."""
    inner = hk.transform_with_state(lambda x: dropout(hk.BatchNorm(True, True, 0.9)(x, True)))
    init, updater = hk.lift_with_state(inner.init, name="lifted")
    params, state = init(hk.next_rng_key(), x)
    out, state = inner.apply(params, state, hk.next_rng_key(), x)
    updater.update(state)
    return out


@model()
def constants(x):
    """Arrays that the function closes over, and numbers that have a weak type."""
    table = jnp.asarray(np.sin(np.arange(24.0, dtype=np.float32)).reshape(6, 4))
    return hk.Linear(4)(x + table) * 2 + jnp.float32(1) + TABLE, 3.0, jnp.asarray(2)


TABLE = jnp.cos(X)


def _of_haiku(d):
    if jnp.issubdtype(d.dtype, jnp.integer):
        x = jax.device_put(np.arange(math.prod(d.shape), dtype=d.dtype).reshape(d.shape) % 6)
    else:
        x = jax.device_put(np.random.default_rng(0).uniform(size=d.shape).astype(np.float32))
    return Model(lambda x: d.create()(x), (x,), {})


FROM_PARAMETERS = {name: Model(fun, (X,), {}) for name, fun in haiku_models.MODELS.items()}
OF_HAIKU = {d.name: _of_haiku(d) for d in descriptors.ALL_MODULES}


def resnet50(x):
    return hk.nets.ResNet50(5)(x, is_training=True)


LARGE = {
    "ResNet50": Model(resnet50, (jnp.cos(jnp.arange(32 * 32 * 3.0)).reshape(1, 32, 32, 3),), {})
}
ALL = {**MODELS, **FROM_PARAMETERS, **OF_HAIKU, **LARGE}
