"""Primitives that carry a jaxpr, run with implicit operands, against the dense twin.

One table holds functions of `(w, x)`: a 4 x 4 LoRA weight (or its dense twin) and three rows. Each
runs in every way in which JAX lets the dense function run.
"""

import collections
import dataclasses
import functools
import os
import subprocess
import sys

import chex
import haiku as hk
import jax
import jax.extend.core.primitives as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit import _compat

N, ROWS, BATCH = 4, 3, 2


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=0.5, size=shape), jnp.float32)


def weight(*batch, seed=0):
    factors = normal(seed + 1, *batch, N, 2), normal(seed + 2, *batch, 2, N)
    return hki.LoRA(normal(seed, *batch, N, N), *factors, alpha=3.0)


def nested(seed=5):
    return hki.LoRA(weight(seed=seed), normal(seed + 3, N, 2), normal(seed + 4, 2, N), alpha=3.0)


def dense(w):
    """The dense twin, by other means than LoRA's own `materialize`."""
    inner = dense(w.w) if isinstance(w.w, hki.LoRA) else w.w
    return inner + w.scale * jnp.einsum("...nr,...rm->...nm", w.a, w.b)


def close(got, want):
    # Sums of a few float32 terms, taken in another order.
    chex.assert_trees_all_close(got, want, rtol=3e-5, atol=3e-5)


def mesh():
    return jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


# --- calls -----------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="power")
def power_of_product(w, x, *, power):
    return (x @ w) ** power


@functools.partial(jax.jit, donate_argnums=1)
def donating(w, x):
    return x @ w


def sharded_jit(w, x):
    one = NamedSharding(mesh(), P())
    return jax.jit(lambda w, x: x @ w, in_shardings=(one, one), out_shardings=one)(w, x)


def called(name):
    def run(w, x):
        shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (w, x)]
        jaxpr = jax.make_jaxpr(lambda w, x: jnp.sin(x @ w))(*shapes)
        # JAX has public names for these primitives, but no public function that binds them.
        params = dict(call_jaxpr=jaxpr if name == "closed_call_p" else jaxpr.jaxpr)
        return _compat.bind(getattr(jex, name), [w, x], params)[0]

    return run


def checkpointed(**options):
    layers = lambda w, x: jnp.sin(jnp.sin(x @ w) @ w)  # noqa: E731
    return jax.checkpoint(layers, **options)


POLICIES = jax.checkpoint_policies


# --- loops and branches ----------------------------------------------------------------------------


def scan_consts_and_ys(w, x):
    return lax.scan(lambda c, row: (jnp.tanh(c @ w + row), row @ w), x[0], x)


def scan_over_stack(w, x):
    return lax.scan(lambda c, v: (jnp.tanh(c @ v), v), x, jnp.stack([w, 2 * w]))


def scan_lora_carry(w, x):
    return lax.scan(lambda c, row: (0.5 * c, row @ c), w, x)


def scan_dense_carry(w, x):
    return lax.scan(lambda c, row: (jnp.sin(c), row @ c), w, x)


def scan_of_length(length):
    return lambda w, x: lax.scan(lambda c, row: (0.5 * c, row @ c), w, x[:length])


def scan_swapped_carry(w, x):
    # The second carry is dense at first, so the first one becomes dense in the second round.
    return lax.scan(lambda c, row: ((c[1], c[0]), row @ c[0]), (w, jnp.eye(N)), x)[1]


def while_with_consts(w, x):
    # Bounded by the weight in the condition; the body multiplies by it.
    def goes_on(c):
        return (c[0] < 3) & (jnp.abs(c[1] @ w).sum() < 1e3)

    return lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]


def while_lora_carry(w, x):
    step = lambda c: (c[0] + 1, 0.5 * c[1])  # noqa: E731
    return x @ lax.while_loop(lambda c: c[0] < 3, step, (0, w))[1]


def while_to_dense(w, x):
    step = lambda c: (c[0] + 1, jnp.sin(c[1]))  # noqa: E731
    return x @ lax.while_loop(lambda c: c[0] < 3, step, (0, w))[1]


def while_of_values(w, x):
    """As many rounds as the values say: `vmap` gives the condition a batch axis."""
    halve = lambda c: (c[0] / 2 @ w, c[1] + 1)  # noqa: E731
    return lax.while_loop(lambda c: (jnp.abs(c[0]).max() > 0.05) & (c[1] < 9), halve, (x, 0))[0]


def fori(w, x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c @ w) + x[i], x)


def cond_both_lora(w, x):
    return x @ lax.cond(x[0, 0] > 0, lambda v: 2 * v, lambda v: v - 1, w)


def cond_to_dense(w, x):
    return x @ lax.cond(x[0, 0] > 0, jnp.sin, lambda v: v, w)


def switched(w, x):
    index = jnp.where(x[0, 0] > 0, 1, 2)
    branches = [lambda v: x, lambda v: x @ v, lambda v: jnp.cos(v.T @ x.T).T]
    return lax.switch(index, branches, w)


def by_platform(w, x):
    return lax.platform_dependent(w, x, cpu=lambda w, x: x @ w, default=lambda w, x: 0 * x)


# --- derivatives of their own, solves, meshes ------------------------------------------------------


@jax.custom_jvp
def jvp_ruled(w, x):
    return x @ w


@jvp_ruled.defjvp
def jvp_ruled_jvp(primals, tangents):
    (w, x), (w_dot, x_dot) = primals, tangents
    return jvp_ruled(w, x), x @ w_dot + 3 * (x_dot @ w)  # wrong on purpose: it must be used


@jax.custom_vjp
def vjp_ruled(w, x):
    return x @ w


def vjp_ruled_bwd(residuals, g):
    w, x = residuals
    return 2.5 * x.T @ g, g @ w.T - 1  # wrong on purpose, too


vjp_ruled.defvjp(lambda w, x: (vjp_ruled(w, x), (w, x)), vjp_ruled_bwd)


def linear_solve(w, x):
    """Of the matrix `eye + w / 4`, whose inverse is two terms of its series, on purpose."""
    times = lambda v: v + v @ w.T / 4  # noqa: E731
    back = lambda v: v + v @ w / 4  # noqa: E731
    return lax.custom_linear_solve(
        times, x, lambda _, v: v - v @ w.T / 4, lambda _, v: v - v @ w / 4
    ) + back(x)


def symmetric_solve(w, x):
    times = lambda v: 4 * v + v @ w @ w.T  # noqa: E731
    return lax.custom_linear_solve(times, x, lambda f, v: v / 4 - f(v) / 64, symmetric=True)


def sharded(spec, **options):
    def run(w, x):
        specs = dict(in_specs=(spec, P()), out_specs=P())
        fun = lambda w, x: lax.psum(jnp.sin(x @ w), "i")  # noqa: E731
        return jax.shard_map(fun, mesh=mesh(), **specs, **options)(w, x)

    return run


def parallel(w, x):
    return jax.pmap(lambda row: row @ w, axis_name="i")(x[None])


# --- nestings --------------------------------------------------------------------------------------


def scan_of_remat_of_jit(w, x):
    layer = jax.checkpoint(jax.jit(lambda c, w: jnp.sin(c @ w)))
    return lax.scan(lambda c, row: (layer(c, w), layer(row, w)), x, x)


def cond_in_scan(w, x):
    def body(c, row):
        return lax.cond(row[0] > 0, lambda c: c @ w, lambda c: c + row @ w, c), row @ w

    return lax.scan(body, x, x)


def vjp_ruled_in_scan_in_jit(w, x):
    return jax.jit(lambda w, x: lax.scan(lambda c, _: (vjp_ruled(w, c), None), x, length=2)[0])(
        w, x
    )


def scan_in_while(w, x):
    inner = lambda c: lax.scan(lambda d, row: (jnp.sin(d @ w) + row, None), c, x)[0]  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, inner(c[1])), (0, x))[1]


def vmap_in_scan(w, x):
    return lax.scan(lambda c, _: (jax.vmap(lambda row: jnp.sin(row @ w))(c), None), x, length=2)[0]


def grad_in_scan(w, x):
    step = jax.grad(lambda c: jnp.square(jnp.sin(c @ w)).sum())
    return lax.scan(lambda c, _: (c - 0.1 * step(c), None), x, length=2)[0]


# --- the table -------------------------------------------------------------------------------------

WAYS = ("eager", "jit", "grad", "jvp", "vmap", "inner vmap", "inner grad")
NO_REVERSE = {"grad", "inner grad"}  # while loops have no reverse mode
NO_FORWARD = {"jvp"}  # custom_vjp has no forward mode


@dataclasses.dataclass(frozen=True)
class Op:
    """A function of `(w, x)`.

    Attributes:
      fun: the function.
      free: whether nothing in it needs the dense weight; True, or the ways in which that is so.
      without: the ways in which JAX cannot run even the dense function.
    """

    fun: object
    free: object = True
    without: frozenset = frozenset()

    def needs_none(self, way):
        return self.free if isinstance(self.free, bool) else way in self.free


def op(fun, free=True, without=()):
    return Op(fun, free, frozenset(without))


# A gradient inside takes the loss of a result that is implicit itself, or, of a weight that one of
# several branches keeps for its transpose, the other branches' zeros.
NOT_INNER_GRAD = set(WAYS) - {"inner grad"}
# JAX turns branches on batched predicates into element-wise selects.
NOT_INNER_VMAP = set(WAYS) - {"inner vmap"}
OUTSIDE = NOT_INNER_GRAD & NOT_INNER_VMAP

OPS = {
    "jit": op(lambda w, x: jax.jit(lambda w, x: jnp.sin(x @ w))(w, x)),
    "jit static name": op(lambda w, x: power_of_product(w, x, power=3)),
    "jit donated": op(lambda w, x: donating(w, x + 1)),
    "jit in_shardings": op(sharded_jit),
    "jit closes over": op(lambda w, x: jax.jit(lambda x: jnp.sin(x @ w))(x)),
    "jit returns lora": op(lambda w, x: (jax.jit(lambda w: 2 * w)(w), x), free=NOT_INNER_GRAD),
    "closed_call": op(called("closed_call_p")),
    "core_call": op(called("call_p")),
    "remat": op(checkpointed()),
    "remat policy": op(checkpointed(policy=POLICIES.dots_saveable)),
    "remat policy nothing": op(checkpointed(policy=POLICIES.nothing_saveable, prevent_cse=False)),
    "scan": op(scan_consts_and_ys),
    "scan over stack": op(scan_over_stack, free=NOT_INNER_GRAD),
    "scan lora carry": op(scan_lora_carry, free=NOT_INNER_GRAD),
    "scan dense carry": op(scan_dense_carry, free=False),
    "scan swapped carry": op(scan_swapped_carry, free=False),
    "scan reverse": op(lambda w, x: lax.scan(lambda c, r: (c @ w + r, c), x[0], x, reverse=True)),
    "scan unroll": op(lambda w, x: lax.scan(lambda c, r: (c @ w + r, c), x[0], x, unroll=2)),
    "scan of nothing": op(scan_of_length(0), free=NOT_INNER_GRAD),
    "while": op(while_with_consts, without=NO_REVERSE),
    "while lora carry": op(while_lora_carry, without=NO_REVERSE),
    "while to dense": op(while_to_dense, free=False, without=NO_REVERSE),
    "while of values": op(while_of_values, without=NO_REVERSE),
    "fori_loop": op(fori),
    "cond": op(cond_both_lora, free=NOT_INNER_VMAP),
    "cond to dense": op(cond_to_dense, free=False),
    "switch": op(switched, free=OUTSIDE),
    "platform_dependent": op(by_platform, free=NOT_INNER_GRAD),
    "custom_jvp": op(jvp_ruled),
    "custom_vjp": op(vjp_ruled, without=NO_FORWARD),
    "relu": op(lambda w, x: x @ jax.nn.relu(w), free=False),
    "silu": op(lambda w, x: x @ jax.nn.silu(w), free=False),
    "logsumexp": op(lambda w, x: jax.nn.logsumexp(w, axis=0) + x, free=False),
    "custom_linear_solve": op(linear_solve),
    "custom_linear_solve symmetric": op(symmetric_solve),
    "shard_map": op(sharded(P())),
    "shard_map rows": op(sharded(P("i", None))),
    "shard_map columns": op(sharded(P(None, "i"))),
    "pmap": op(parallel),
    "scan of remat of jit": op(scan_of_remat_of_jit),
    "cond in scan": op(cond_in_scan, free=NOT_INNER_VMAP),
    "custom_vjp in scan in jit": op(vjp_ruled_in_scan_in_jit, without=NO_FORWARD),
    "scan in while": op(scan_in_while, without=NO_REVERSE),
    "vmap in scan": op(vmap_in_scan),
    "grad in scan": op(grad_in_scan),
}


def loss(out):
    return sum(jnp.sin(y + 0.5).sum() for y in jax.tree.leaves(hki.materialize(out)))


def jit(fun):
    # What the compiled program computes is looked at, not how fast.
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def in_way(way, fun, wrap):
    """`wrap(fun)` run in one way on a LoRA weight and rows."""
    w, x = weight(), normal(10, ROWS, N)
    ws, xs = weight(BATCH), normal(11, BATCH, ROWS, N)
    out = lambda w, x: hki.materialize(wrap(fun)(w, x))  # noqa: E731
    match way:
        case "eager" | "jit":
            return out(w, x)
        case "grad":
            return jax.grad(lambda w, x: loss(wrap(fun)(w, x)), (0, 1))(w, x)
        case "jvp":
            return jax.jvp(out, (w, x), (weight(seed=20), normal(24, ROWS, N)))
        case "vmap":
            return hki.materialize(jax.vmap(wrap(fun))(ws, xs))
        case "inner vmap":
            return hki.materialize(wrap(jax.vmap(fun))(ws, xs))
        case "inner grad":
            return wrap(jax.grad(lambda w, x: loss(fun(w, x)), (0, 1)))(w, x)


def on_dense(fun):
    return lambda w, x: fun(dense(w), x)


@functools.cache
def wanted(name):
    """What the dense twin gives in every way, by one program."""
    case = OPS[name]
    ways = [way for way in WAYS if way not in case.without]
    return jit(lambda: {way: in_way(way, case.fun, on_dense) for way in ways})()


@pytest.mark.parametrize(
    "name, way", [(n, w) for n, o in OPS.items() for w in WAYS if w not in o.without]
)
def test_against_dense_twin(name, way):
    case = OPS[name]
    with hki.materialization("error" if case.needs_none(way) else "allow"):
        on_lora = functools.partial(in_way, way, case.fun, hki.use_implicit_args)
        got = on_lora() if way == "eager" else jit(on_lora)()
    close(got, wanted(name)[way])


# --- the types of results --------------------------------------------------------------------------

ZEROS = hki.Zeros(shape=(N, N))


TYPES = {
    "scan lora carry": (lambda w, x: scan_lora_carry(w, x)[0], hki.LoRA, jax.Array),
    "scan lora ys": (lambda w, x: scan_over_stack(w, x)[1], hki.LoRA, jax.Array),
    "scan of nothing": (lambda w, x: scan_of_length(0)(w, x)[0], hki.LoRA, jax.Array),
    "scan dense carry": (lambda w, x: scan_dense_carry(w, x)[0], jax.Array, None),
    "while lora carry": (
        lambda w, x: lax.while_loop(lambda c: c.sum() > 9, lambda c: c / 2, w), hki.LoRA, jax.Array
    ),
    "jit": (lambda w, x: jax.jit(jnp.negative)(w), hki.LoRA, jax.Array),
    "remat": (lambda w, x: jax.checkpoint(jnp.negative)(w), hki.LoRA, jax.Array),
    "custom_jvp": (lambda w, x: jvp_ruled(w, jnp.eye(N)), jax.Array, None),
    # Partly implicit: the carry is a LoRA of a LoRA at first, of a dense weight then.
    "scan to dense inside": (
        lambda w, x: lax.scan(lambda c, _: (w, None), nested_of(w), length=2)[0], hki.LoRA, jax.Array
    ),
}  # fmt: skip


def nested_of(w):
    return hki.box(hki.LoRA(w, normal(7, N, 2), normal(8, 2, N), alpha=3.0))


@pytest.mark.parametrize("name", TYPES)
def test_types_of_results(name, may_be_dense):
    fun, kind, field = TYPES[name]
    w, x = weight(), normal(10, ROWS, N)
    out = hki.use_implicit_args(fun)(w, x)
    assert isinstance(out, kind)
    assert field is None or isinstance(out.w, field)


MEETINGS = {
    "lora and lora": ((weight(), weight(seed=3)), "LoRA"),
    "nested and plain": ((nested(), weight()), "LoRA"),
    "nested and nested": ((nested(), nested(seed=9)), "LoRA of LoRA"),
    "three of them": ((nested(), weight(), nested()), "LoRA"),
    "zeros and zeros": ((ZEROS, ZEROS), "Zeros"),
    "zeros and dense": ((ZEROS, normal(1, N, N)), "dense"),
    "zeros and lora": ((ZEROS, weight()), "dense"),
    "ranks differ": (
        (weight(), hki.LoRA(normal(0, N, N), normal(1, N, 1), normal(2, 1, N))),
        "dense",
    ),
    "scales differ": ((weight(), weight()._replace(alpha=1.0)), "dense"),
}


def kind_of(x):
    if not isinstance(x, hki.ImplicitArray):
        return "dense"
    inner = getattr(x, "w", None)
    return type(x).__name__ + (f" of {kind_of(inner)}" if isinstance(inner, hki.LoRA) else "")


@pytest.mark.parametrize("name", MEETINGS)
def test_branches_meet_at_the_largest_common_structure(name, may_be_dense):
    values, kind = MEETINGS[name]

    def choose(index, *values):
        return lax.switch(index, [lambda *vs, i=i: vs[i] for i in range(len(values))], *values)

    with hki.materialization_report() as report:
        outs = [hki.use_implicit_args(choose)(jnp.int32(i), *values) for i in range(len(values))]
    for value, out in zip(values, outs, strict=True):
        assert kind_of(out) == kind
        close(hki.materialize(out), hki.materialize(value))
    assert report.count == 0 or kind not in (kind_of(values[0]), "Zeros")

    def losses(values, choose):
        return sum(jnp.sin(choose(jnp.int32(i), *values)).sum() for i in range(len(values)))

    chosen = hki.use_implicit_args(choose)
    got = jit(jax.grad(lambda v: losses(v, lambda *args: hki.materialize(chosen(*args)))))(values)
    want = jax.grad(lambda v: sum(jnp.sin(y).sum() for y in hki.materialize(v)))(values)
    close(got, want)


def test_a_nested_lora_loses_its_inner_one_in_a_carry(may_be_dense):
    """LoRA(w=LoRA) at first and LoRA(w=dense) from the first round on: the outer LoRA stays."""
    fun = lambda v, w: lax.scan(lambda c, _: (w, c), v, length=3)  # noqa: E731
    v, w = nested(), weight()
    last, seen = hki.use_implicit_args(fun)(v, w)
    assert kind_of(last) == kind_of(seen) == "LoRA" and seen.shape == (3, N, N)
    close(hki.materialize((last, seen)), (dense(w), jnp.stack([dense(v), dense(w), dense(w)])))


# --- primitives that need dense operands -----------------------------------------------------------


def pallas_product(w, x):
    def kernel(w_ref, x_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        w, x
    )


def on_host(callback, **options):
    shape = jax.ShapeDtypeStruct((ROWS, N), jnp.float32)
    fun = lambda w, x: np.asarray(x) @ np.asarray(w)  # noqa: E731
    return lambda w, x: callback(fun, shape, w, x, **options)


MATERIALIZING = {
    "pallas_call": pallas_product,
    "pure_callback": on_host(jax.pure_callback, vmap_method="sequential"),
    "io_callback": on_host(io_callback),
    "io_callback ordered": on_host(io_callback, ordered=True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MATERIALIZING)
def test_dense_operands_are_made_visibly(name, compiled, may_be_dense):
    fun = hki.use_implicit_args(MATERIALIZING[name])
    w, x = weight(), normal(10, ROWS, N)
    with hki.materialization_report() as report:
        out = (jit(fun) if compiled else fun)(w, x)
    close(out, x @ dense(w))
    assert report.count == 1
    ((event, _),) = report
    assert event.type_name == "LoRA" and event.primitive == name.split()[0]


# --- caches ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Counted(hki.ImplicitArray):
    """A type that counts how often its rule runs."""

    value: hki.ArrayValue
    calls = collections.Counter()

    def materialize(self):
        return self.value


@hki.primitive_handler("sin")
def count_sin(primitive, x: Counted, **params):
    Counted.calls["sin"] += 1
    return Counted(primitive.bind(x.value, **params))


def jaxprs_named(jaxpr, name):
    return [e.params["jaxpr"] for e in jaxpr.eqns if e.params.get("name") == name]


# Of different lengths, since what was traced for one test is still known in the next one.
@pytest.mark.parametrize("outer, length", [(lambda f: f, 3), (jax.jit, 5)])
def test_a_jitted_function_is_interpreted_once(outer, length):
    @jax.jit
    def layer(w, x):
        return x * 2, jnp.sin(w)

    def fun(w, x):
        for _ in range(20):
            x, _ = layer(w, x)
        return x, layer(w, x)[1]

    Counted.calls.clear()
    args = Counted(jnp.ones(length)), jnp.ones(length)
    jaxpr = jax.make_jaxpr(outer(hki.use_implicit_args(fun)))(*args).jaxpr
    for closed in jaxprs_named(jaxpr, "fun"):
        jaxpr = closed.jaxpr
    layers = jaxprs_named(jaxpr, "layer")
    assert len(layers) == 21 and len({id(j) for j in layers}) == 1
    assert Counted.calls["sin"] == 1


# --- contexts: names, precisions, effects ----------------------------------------------------------


def op_names(fun, *args):
    return jax.jit(fun).lower(*args).as_text(debug_info=True)


def test_name_scopes_survive():
    def fun(w, x):
        with jax.named_scope("encoder"):
            step = jax.checkpoint(lambda c: jax.named_call(jnp.dot, name="product")(c, w))
            return lax.scan(lambda c, _: (step(c), None), x, length=2)[0]

    text = op_names(hki.use_implicit_args(fun), weight(), normal(10, ROWS, N))
    assert any(
        "encoder" in line and "product" in line and "dot_general" in line
        for line in text.split("\n")
    )


def test_haiku_module_names_survive():
    model = hki.transform_implicit(hk.transform(lambda x: hk.nets.MLP([N, N])(x)))
    params, x = model.init(jax.random.key(0), jnp.ones((ROWS, N))), jnp.ones((ROWS, N))
    params = hki.add_lora(params, jax.random.key(1), rank=2, targets=".*/w")
    text = op_names(lambda p: model.apply(p, None, x), params)
    for layer in ("mlp/~/linear_0", "mlp/~/linear_1"):
        short = layer.replace("/~", "")
        assert any(
            (layer in line or short in line) and "dot_general" in line for line in text.split("\n")
        )


def precisions(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.dot_general_p:
            yield eqn.params["precision"]
        for sub in jax.tree.leaves(list(eqn.params.values())):
            sub = getattr(sub, "jaxpr", sub)
            if isinstance(sub, jax.extend.core.Jaxpr):
                yield from precisions(sub)


def test_matmul_precision_contexts_survive():
    layer = jax.jit(lambda w, x: x @ w)

    def fun(w, x):
        y = layer(w, x)
        with jax.default_matmul_precision("highest"):
            return layer(w, y)  # the same function at another precision

    traced = jax.make_jaxpr(hki.use_implicit_args(fun))(weight(), normal(10, ROWS, N))
    found = collections.Counter(map(str, precisions(traced.jaxpr)))
    highest = str((lax.Precision.HIGHEST,) * 2)
    assert found == {"None": 3, highest: 3}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_debug_prints_survive(ordered, compiled, capfd):
    def fun(w, x):
        def body(c, row):
            jax.debug.print("row {}", (row @ w).sum().round(), ordered=ordered)
            return c + (row @ w).sum(), None

        total = jax.jit(lambda w: lax.scan(body, 0.0, x)[0])(w)
        jax.debug.print("total {}", total.round(), ordered=ordered)
        lax.cond(total > 0, lambda v: jax.debug.print("up", ordered=ordered), lambda v: None, w)
        return total

    w = hki.LoRA(jnp.eye(N), jnp.ones((N, 1)), jnp.ones((1, N)))
    x = jnp.arange(1.0, 4)[:, None] * jnp.ones(N)
    wrapped = hki.use_implicit_args(fun)
    with hki.materialization("error"):
        jax.block_until_ready((jax.jit(wrapped) if compiled else wrapped)(w, x))
    jax.effects_barrier()
    lines = capfd.readouterr().out.split("\n")[:-1]
    expected = ["row 20.0", "row 40.0", "row 60.0", "total 120.0", "up"]
    assert (lines if ordered else sorted(lines)) == (expected if ordered else sorted(expected))


# --- two devices -----------------------------------------------------------------------------------

TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import haiku_implicit as hki

assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
w, x = normal(8, 4), normal(3, 8)
rows = lambda w, x: jax.lax.psum(x @ w, "i")
columns = lambda w, x: x @ w
ways = {
    "rows": (rows, (P("i", None), P(None, "i")), P()),
    "columns": (columns, (P(None, "i"), P()), P(None, "i")),
    "whole": (columns, (P(), P("i", None)), P("i", None)),
}
weights = {
    "lora": hki.LoRA(w, normal(8, 2), normal(2, 4)),
    "int8": hki.QuantizedMatrix.quantize(w, "int8"),
    "int8 groups": hki.QuantizedMatrix.quantize(w, "int8", group_size=2),
    "lora of int8": hki.LoRA(hki.QuantizedMatrix.quantize(w, "int8"), normal(8, 2), normal(2, 4)),
}
x = jnp.concatenate([x, normal(1, 8)])
for kind, weight in weights.items():
    for way, (fun, in_specs, out_specs) in ways.items():
        sharded = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        call = hki.use_implicit_args(sharded)
        dense = hki.materialize(weight)
        with hki.materialization("error"):
            for run in (call, jax.jit(call)):
                np.testing.assert_allclose(run(weight, x), x @ dense, rtol=1e-4, atol=1e-4)
            loss = lambda p, x: jnp.sin(call(p, x)).sum()
            got = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(weight, x)
        want = jax.grad(lambda p, x: jnp.sin(x @ hki.materialize(p)).sum(), (0, 1), allow_int=True)(weight, x)
        for g, h in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if g.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(g, h, rtol=1e-4, atol=1e-4)
    # An inner jit that says how its operands lie, and pmap.
    inner = jax.jit(columns, in_shardings=(None, NamedSharding(mesh, P("i", None))))
    mapped = jax.pmap(columns, in_axes=(None, 0))
    with hki.materialization("error"):
        np.testing.assert_allclose(hki.use_implicit_args(inner)(weight, x), x @ dense, rtol=1e-4, atol=1e-4)
        out = hki.use_implicit_args(mapped)(weight, x.reshape(2, 2, 8))
    np.testing.assert_allclose(out.reshape(4, 4), x @ dense, rtol=1e-4, atol=1e-4)
print("done")
"""


def test_shard_map_and_pmap_on_two_devices():
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("done\n")
