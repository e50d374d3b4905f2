"""Primitives that carry a jaxpr: implicit operands go through them, without becoming dense."""

import dataclasses
import functools
import textwrap

import chex
import jax
import jax.extend.core.primitives as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.core import compat
from haiku_implicit.core.caches import Carried
from haiku_implicit.core.structure import free_summand
from tests.cases import Diagonal, Outer
from tests.dense_twin import on_twins
from tests.devices import run_on_devices
from tests.random_arrays import normal
from tests.tiers import few

use = hki.use_implicit_args
KEY = jax.random.key(7)


def lora(seed=0, shape=(4, 4), w=None, alpha=3.0):
    """A LoRA weight of ordinary values: products of several of them stay of order one."""
    *batch, n, m = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    w = jax.random.normal(keys[0], shape) / 3 if w is None else w
    a, b = (
        jax.random.normal(keys[1], (*batch, n, 2)),
        jax.random.normal(keys[2], (*batch, 2, m)) / 3,
    )
    return hki.LoRA(w, a, b, alpha=alpha)


def int8():
    return hki.QuantizedMatrix.quantize(normal((4, 4)), "int8")


def mesh(n=1):
    return jax.make_mesh((n,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def close(got, want, rtol=2e-5):
    # float32, sums of a few products in another order than the dense twin takes them.
    chex.assert_trees_all_close(hki.materialize(got), want, rtol=rtol, atol=rtol)


def dot(w, x):
    return jnp.tanh(x @ w)


# --- the table: functions of a weight [4, 4] and an input [3, 4] in which a sub-jaxpr uses the weight ------


def calls(name):
    def run(w, x):
        jaxpr = jax.make_jaxpr(dot)(w, x)
        params = dict(call_jaxpr=jaxpr if name == "closed_call" else jaxpr.jaxpr)
        return compat.bind(getattr(jex, f"{name}_p"), [w, x], params)[0]

    return run


@jax.custom_jvp
def cube(x):
    return x**3


@cube.defjvp
def cube_jvp(primals, tangents):
    return cube(*primals), 5 * primals[0] ** 2 * tangents[0]  # wrong on purpose: it has to be used


@jax.custom_vjp
def dot_with_wrong_gradient(w, x):
    return x @ w


dot_with_wrong_gradient.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda res, g: (7.0 * res[1].T @ g, -g @ res[0].T)
)


def solve(w, x):
    """`(I + w / 20) y = x`, by a custom linear solve with a few steps of iteration."""

    def matvec(y):
        return y + y @ w / 20

    def iterate(matvec, b):
        return lax.fori_loop(0, 30, lambda _, y: b - (matvec(y) - y), b)

    return lax.custom_linear_solve(matvec, x, iterate, iterate)


def steps(w, x, **options):
    return lax.scan(lambda c, r: (dot(w, c + r), c @ w), x, jnp.stack([x, 2 * x, -x]), **options)


def sharded(w, x):
    f = jax.shard_map(dot, mesh=mesh(), in_specs=(P(), P("i")), out_specs=P("i"))
    return f(w, x)


TABLE = {
    "jit": jax.jit(dot),
    "jit twice": lambda w, x: jax.jit(dot)(w, x) + jax.jit(dot)(w, 2 * x),
    "jit, not inlined, in jit": jax.jit(lambda w, x: jax.jit(dot)(w, x) * 2),
    "jit, static argument": lambda w, x: jax.jit(lambda w, x, n: dot(w, x) * n, static_argnums=2)(w, x, 3),
    "jit, shardings": lambda w, x: jax.jit(
        dot, in_shardings=(None, jax.sharding.NamedSharding(mesh(), P("i")))
    )(w, x),
    "closed_call": calls("closed_call"),
    "core_call": calls("call"),
    "remat": jax.checkpoint(dot),
    "remat, nothing saved": jax.checkpoint(dot, policy=jax.checkpoint_policies.nothing_saveable),
    "remat, dots saved": jax.checkpoint(dot, policy=jax.checkpoint_policies.dots_saveable),
    "remat, names saved": jax.checkpoint(
        lambda w, x: jnp.sin(checkpoint_name(x @ w, "y")),
        policy=jax.checkpoint_policies.save_only_these_names("y"),
    ),
    "remat, named weight": jax.checkpoint(
        lambda w, x: jnp.sin(x @ checkpoint_name(w, "w")),
        policy=jax.checkpoint_policies.save_any_names_but_these("w"),
    ),
    "remat, prevent_cse": jax.checkpoint(dot, prevent_cse=False),
    "scan, constant": steps,
    "scan, reverse": lambda w, x: steps(w, x, reverse=True),
    "scan, unrolled": lambda w, x: steps(w, x, unroll=2),
    "scan, fully unrolled": lambda w, x: steps(w, x, unroll=True),
    "scan, carry": lambda w, x: lax.scan(lambda c, r: (c, r @ c), w, x)[1],
    "scan, carry that goes unused": lambda w, x: lax.scan(lambda c, r: (c, r), w, x)[1],
    "scan, no xs": lambda w, x: lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0],
    "scan, length 0": lambda w, x: lax.scan(lambda c, r: (c + r @ w, c), x[0], x[:0])[0],
    "scan, length 1": lambda w, x: lax.scan(lambda c, r: (c + r @ w, c), x[0], x[:1]),
    "scan, stacked result": lambda w, x: x @ lax.scan(lambda c, _: (c, w), 0, None, length=2)[1][1],
    "map": lambda w, x: lax.map(lambda r: r @ w, x),
    "map, batches": lambda w, x: lax.map(lambda r: r @ w, x, batch_size=2),
    "associative_scan": lambda w, x: lax.associative_scan(jnp.add, x @ w),
    "scan, random keys": lambda w, x: lax.scan(
        lambda c, k: (jax.random.fold_in(c, 1), x @ w * jax.random.uniform(k)), KEY, jax.random.split(KEY)
    )[1],
    "cond, random key": lambda w, x: lax.cond(
        x[0, 0] > 0, lambda w, k: (x @ w, k), lambda w, k: (x, k), w, KEY
    )[0],
    "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda i, c: dot(w, c), x),
    "fori_loop, implicit carry": lambda w, x: lax.fori_loop(
        0, 3, lambda i, c: (c[0], dot(c[0], c[1])), (w, x)
    )[1],
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w * 2, w),
    "cond, closures": lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
    "switch": lambda w, x: lax.switch(
        jnp.argmax(x[0]), [lambda w: x @ w, lambda w: jnp.sin(x @ w), lambda w: x, lambda w: x @ w], w
    ),
    "cond, implicit result": lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w, w),
    "platform_dependent": lambda w, x: lax.platform_dependent(
        w, x, cpu=dot, default=lambda w, x: x
    ),
    "platform_dependent, default": lambda w, x: lax.platform_dependent(
        w, x, tpu=lambda w, x: x, default=dot
    ),
    "custom_jvp": lambda w, x: cube(x @ w) + jax.nn.relu(x @ w),
    "custom_vjp": dot_with_wrong_gradient,
    "custom_linear_solve": solve,
    "shard_map": sharded,
    "custom_gradient": lambda w, x: jax.custom_gradient(lambda y: (y, lambda g: 3 * g))(x @ w),
    "named_call": jax.named_call(dot, name="dot"),
    # nests
    "jit of scan of cond": jax.jit(
        lambda w, x: lax.scan(
            lambda c, r: (lax.cond(r[0] > 0, lambda c: c @ w, lambda c: c, c), c), x, x
        )
    ),
    "remat of scan of remat": jax.checkpoint(
        lambda w, x: lax.scan(lambda c, r: (jax.checkpoint(dot)(w, c), c), x, x)
    ),
    "scan of scan": lambda w, x: lax.scan(
        lambda c, r: lax.scan(lambda d, s: (d, dot(w, d + s)), c, x), x[0], x
    ),
    "cond of jit of custom_vjp": lambda w, x: lax.cond(
        x[0, 0] > 0, jax.jit(dot_with_wrong_gradient), lambda w, x: x, w, x
    ),
    "custom_vjp in scan in remat": jax.checkpoint(
        lambda w, x: lax.scan(lambda c, r: (dot_with_wrong_gradient(w, c), r), x, x)
    ),
    "scan of linear_solve": lambda w, x: lax.scan(lambda c, r: (solve(w, c), r @ w), x, x),
    "shard_map of scan of jit": lambda w, x: jax.shard_map(
        lambda w, x: lax.scan(lambda c, r: (jax.jit(dot)(w, c), r), x, x),
        mesh=mesh(), in_specs=(P(), P("i")), out_specs=P("i"),
    )(w, x),
    "vmap of everything": jax.vmap(
        lambda w, x: lax.scan(
            lambda c, _: (jax.jit(jax.checkpoint(dot))(w, c), lax.cond(c[0] > 0, dot, lambda w, x: x, w, c)),
            x, None, length=2,
        ),
        (None, 0),
    ),
}  # fmt: skip

# Reverse-mode differentiation of these is not defined (with respect to a loop of unknown length).
FORWARD_ONLY = {
    "while": lambda w, x: lax.while_loop(
        lambda c: jnp.sum(c[0]) < 5, lambda c: (c[0] + 1, dot(w, c[1])), (jnp.sum(x) * 0, x)
    ),
    "while, constant of the condition": lambda w, x: lax.while_loop(
        lambda c: (c[1] @ w).sum() * 0 + c[0] < 3, lambda c: (c[0] + 1, c[1] + 1), (0.0, x)
    ),
    "while, implicit carry": lambda w, x: lax.while_loop(
        lambda c: c[2] < 3, lambda c: (c[0], dot(c[0], c[1]), c[2] + 1), (w, x, 0)
    )[1:],
    "while, random key": lambda w, x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jax.random.fold_in(c[1], c[0]), dot(w, c[2])), (0, KEY, x)
    )[2],
    "while, nested": lambda w, x: lax.while_loop(
        lambda c: c[0] < 2,
        lambda c: (c[0] + 1, lax.while_loop(lambda d: d[0] < 2, lambda d: (d[0] + 1, dot(w, d[1])), (0, c[1]))[1]),
        (0, x),
    ),
}  # fmt: skip

BOTH = {**TABLE, **FORWARD_ONLY}

# `jax.vmap` of a branch by a predicate with batch axes selects among the operands, and its derivative
# hands operands out of one branch and zeros out of the others; a predicate of a loop selects, too.
# That, and what a shard_map hands out, is dense.
SELECTS = {name for name in BOTH if "cond" in name or "switch" in name or "everything" in name}
SELECTS |= {name for name in BOTH if "while" in name}
HANDS_OUT = {name for name in BOTH if "shard_map" in name or "platform" in name} | SELECTS

# A nested weight, one part of which is stored in integers.
WEIGHTS = {
    "lora": lora,
    "lora of int8": lambda: lora(w=hki.QuantizedMatrix.quantize(hki.materialize(lora(5)), "int8")),
}


@pytest.fixture
def x():
    return make_x()


def make_x():
    return normal((3, 4), 9)


class Together:
    """Functions of one table compiled to one program, which takes a tenth of the time.

    `results[name]` raises what the function raised.
    """

    def __init__(self, functions, *args, may_be_dense=()):
        self.errors = {}

        def run(name, fun, args):
            with hki.materialization("allow" if name in may_be_dense else "error"):
                try:
                    return hki.materialize(fun(*args))
                except Exception as e:
                    self.errors[name] = e

        @jax.jit
        def program(*args):
            return {name: run(name, fun, args) for name, fun in functions.items()}

        self.results = program(*args)

    def __getitem__(self, name):
        if name in self.errors:
            raise self.errors[name]
        return self.results[name]


def each(transform, table=BOTH):
    return {name: transform(fun) for name, fun in table.items()}


@functools.cache
def forward(weight, dense):
    w = WEIGHTS[weight]()
    return Together(BOTH if dense else each(use), hki.materialize(w) if dense else w, make_x(),
                    may_be_dense={"vmap of everything"})  # fmt: skip


@pytest.mark.parametrize("weight", few(WEIGHTS, "lora"))
@pytest.mark.parametrize("name", BOTH)
def test_forward(name, weight):
    close(forward(weight, False)[name], forward(weight, True)[name])


# Eagerly a function is traced and compiled as above, alone.
@pytest.mark.every(3)
@pytest.mark.parametrize("name", BOTH)
def test_eager(name, x):
    with hki.materialization("allow" if name == "vmap of everything" else "error"):
        close(use(BOTH[name])(lora(), x), forward("lora", True)[name])


def total(f):
    return lambda w, x: sum(jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(f(w, x)))


@functools.cache
def gradients(way):
    """By the factors and the input, from outside; by the dense weight and the input, from inside."""
    w, x = lora(), make_x()
    dense = hki.materialize(w)

    def grad(f):
        return jax.grad(f, argnums=(0, 1))

    return {
        "outside": lambda: Together(each(lambda f: grad(use(total(f))), TABLE), w, x, may_be_dense=SELECTS),
        "outside, dense": lambda: Together(
            each(lambda f: grad(lambda w, x: total(f)(hki.materialize(w), x)), TABLE), w, x
        ),
        "inside": lambda: Together(each(lambda f: use(grad(total(f))), TABLE), w, x, may_be_dense=HANDS_OUT),
        "inside, dense": lambda: Together(each(lambda f: grad(total(f)), TABLE), dense, x),
    }[way]()  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("way", few(["outside", "inside"], "outside"))
@pytest.mark.slow
def test_gradient(way, name):
    want = jax.tree.leaves(gradients(f"{way}, dense")[name])
    # Gradients are sums of products that cancel: rounding is relative to the largest of them.
    largest = max(float(jnp.max(jnp.abs(x))) for x in want)
    got = [x / largest for x in jax.tree.leaves(gradients(way)[name])]
    close(got, [x / largest for x in want], rtol=5e-5)


HAVE_JVP = {n: f for n, f in BOTH.items() if "custom_vjp" not in n and n != "custom_gradient"}


@functools.cache
def tangents(implicit):
    args = lora(), make_x()
    moved = jax.tree.map(jnp.cos, args)

    def jvp(f):
        f = use(f) if implicit else f
        run = (lambda w, x: f(w, x)) if implicit else lambda w, x: f(hki.materialize(w), x)
        return lambda w, x: without_integers(
            jax.jvp(lambda w, x: hki.materialize(run(w, x)), (w, x), moved)[1]
        )

    return Together(each(jvp, HAVE_JVP), *args, may_be_dense=SELECTS)


def without_integers(tree):
    return [y for y in jax.tree.leaves(tree) if y.dtype != jax.dtypes.float0]


@pytest.mark.parametrize("name", HAVE_JVP)
@pytest.mark.slow
def test_forward_mode(name):
    close(tangents(True)[name], tangents(False)[name], rtol=2e-4)  # as for gradients


@functools.cache
def batched(way, dense):
    """Over the input, or over a batch of weights too; from outside (the leaves) or from inside."""
    x, w, ws = make_x(), lora(), lora(3, (2, 4, 4))
    axes = (None, 0) if "input" in way else (0, 0)
    first = w if "input" in way else ws
    args = hki.materialize(first) if dense else first, jnp.stack([x, -x])
    if dense:
        return Together(each(lambda f: jax.vmap(f, axes)), *args)
    if "outside" in way:
        return Together(
            each(lambda f: jax.vmap(use(f), axes)), *args, may_be_dense={"vmap of everything"}
        )
    return Together(each(lambda f: use(jax.vmap(f, axes))), *args, may_be_dense=SELECTS)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "way",
    few(
        ["input, outside", "all, outside", "input, inside", "all, inside"],
        "all, outside",
        "input, inside",
    ),
)
@pytest.mark.slow
def test_vmap(way, name):
    close(batched(way, False)[name], batched(way.split(",")[0], True)[name])


# --- which results are implicit, and which dense ----------------------------------------------------------------


def kind(x):
    return type(x).__name__ if isinstance(x, hki.ImplicitArray) else "dense"


def kinds(f, *args):
    out = use(f)(*args)
    with hki.materialization("allow"):
        expected = on_twins(f)(*args)
    close(out, expected)
    return [kind(y) for y in hki.tree_leaves_with_implicit(out)]


def test_results_stay_implicit_through_every_call(never_dense):
    w = Outer(jnp.arange(4.0), jnp.ones(4))
    for f in (
        jax.jit(lambda w: -w),
        jax.checkpoint(lambda w: -w),
        lambda w: lax.cond(True, lambda w: -w, lambda w: w, w),
    ):
        assert kinds(f, w) == ["Outer"]


def test_scanned_inputs_are_sliced_leaf_by_leaf(x, never_dense):
    ws = lora(1, (3, 4, 4))
    assert kinds(lambda ws, x: lax.scan(lambda c, w: (dot(w, c), w), x, ws), ws, x) == [
        "dense",
        "LoRA",
    ]
    shapes = {v.aval.shape for eqn in jaxpr_of(use(lambda ws, x: lax.scan(lambda c, w: (dot(w, c), None), x, ws)), ws, x)
              for v in eqn.outvars}  # fmt: skip
    assert (3, 4, 4) not in shapes and (
        4,
        4,
    ) not in shapes  # neither the stack nor one is made whole


def jaxpr_of(f, *args):
    """All equations of a function, those of sub-jaxprs too, but not slices of its arguments."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            for sub in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda y: hasattr(y, "eqns")
            ):
                if hasattr(getattr(sub, "jaxpr", sub), "eqns"):
                    yield from walk(getattr(sub, "jaxpr", sub))

    return list(walk(jax.make_jaxpr(f)(*args).jaxpr))


def test_scanned_inputs_without_batch_axes_are_materialized(x, may_be_dense):
    diagonal = Diagonal(jnp.arange(4.0))
    with hki.materialization_report() as report:
        close(use(lambda d: lax.scan(lambda c, r: (c + r, r), jnp.zeros(4), d))(diagonal),
              (jnp.arange(4.0), jnp.diag(jnp.arange(4.0))))  # fmt: skip
    assert [e.primitive for e, _ in report] == ["scan"]


def test_stacked_results_of_a_type_without_batch_axes_are_dense(may_be_dense):
    d = Diagonal(jnp.arange(4.0))
    assert kinds(lambda d: lax.scan(lambda c, _: (c, d), 0, None, length=2)[1], d) == ["dense"]


@pytest.mark.parametrize("shape", [(5, 4, 4), (5, 2, 4, 4)], ids=str)
def test_a_loop_of_which_each_example_ends_by_itself_keeps_its_carry(shape, never_dense):
    def f(w, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2.0), (0, w))

    w, n = lora(shape=shape), jnp.array([3, 0, 1, 4, 2])
    for loop in (f, jax.jit(f)):
        close(use(jax.vmap(loop))(w, n), jax.vmap(f)(hki.materialize(w), n))
        assert kinds(jax.vmap(loop), w, n) == ["dense", "LoRA"]


@jax.custom_jvp
def doubled(w):
    return w * 2.0


doubled.defjvp(lambda primals, tangents: (primals[0] * 2.0, tangents[0] * 2.0))


@jax.custom_vjp
def reversed_gradient(w):
    return w * 1.5


reversed_gradient.defvjp(lambda w: (w * 1.5, None), lambda _, g: (-3 * g,))


def test_one_jaxpr_with_operands_of_several_structures(may_be_dense):
    either = jax.jit(lambda p, w, y: lax.cond(p, lambda: w, lambda: y))

    def f(p, w, y, d):
        return either(p, w, y), either(p, w, d), either(p, y, w)

    args = jnp.array(True), lora(), lora(1), jnp.ones((4, 4))
    assert kinds(f, *args) == ["LoRA", "dense", "LoRA"]


@jax.custom_jvp
def both(w, q):
    return w * 2.0, q * 2.0


# Not the derivative, so that the rule is seen.
both.defjvp(lambda primals, tangents: (both(*primals), (tangents[0] * 3.0, tangents[1] * 5.0)))


def test_a_derivative_rule_of_two_results_of_which_one_becomes_dense(may_be_dense):
    w, q = lora(), int8()
    assert kinds(use(both), w, q) == ["LoRA", "dense"]

    def loss(w, q, y):
        a, b = both(w, q * y)
        return jnp.sum(jnp.sin(a) * b)

    got = jax.jit(jax.grad(lambda w, y: use(loss)(w, q, y), (0, 1)))(w, 1.5)
    dense = lambda w, y: loss(hki.materialize(w), hki.materialize(q), y)  # noqa: E731
    close(
        jax.tree.leaves(got), jax.tree.leaves(jax.jit(jax.grad(dense, (0, 1)))(w, 1.5)), rtol=1e-4
    )


@pytest.mark.parametrize(
    "f, w, primitive, reason",
    [
        (
            lambda w: lax.cond(jnp.sum(w @ jnp.ones(4)) > 0, lambda: w, lambda: jnp.ones((4, 4))),
            lora(),
            "cond",
            "it meets values of other types in 'cond'",
        ),
        (
            lambda w: lax.fori_loop(0, 2, lambda i, c: c.at[0].set(0.0), w),
            lora(),
            "scan",
            "it meets values of other types in 'scan'",
        ),
        (
            doubled,
            int8(),
            "custom_jvp_call",
            "the derivative rule of 'custom_jvp_call' knows dense arrays alone",
        ),
    ],
    ids=["cond", "scan", "custom_jvp"],
)
def test_where_it_is_not_for_want_of_a_rule_the_reason_is_given(f, w, primitive, reason):
    with hki.materialization("allow"), hki.materialization_report() as report:
        close(use(f)(w), on_twins(f)(w))
    texts = [str(e) for e, _ in report if e.primitive == primitive]
    assert texts
    for text in texts:
        assert reason in text and "primitive_handler" not in text and "Accept it" in text


def test_a_carry_that_changes_its_type_becomes_dense(x, may_be_dense):
    def f(w, x):
        return lax.scan(lambda c, r: (jnp.sin(c), r @ c), w, x)

    assert kinds(f, lora(), x) == ["dense", "dense"]


def test_a_carry_keeps_what_of_it_stays(x, may_be_dense):
    """LoRA of LoRA, whose inner one is replaced: LoRA of a dense weight."""

    def f(w, x):
        return lax.scan(lambda c, r: (hki.box(hki.LoRA(w.w * 1.0, w.a, w.b)), r), hki.box(w), x)[0]

    def g(inner, a, b, x):
        start = hki.LoRA(inner, a, b)
        return lax.scan(
            lambda c, r: (hki.box(hki.LoRA(jnp.sin(inner), a, b)), r), hki.box(start), x
        )[0]

    inner, w = lora(1), lora(2)
    out = use(g)(inner, w.a, w.b, x)
    assert (kind(out), kind(out.w)) == ("LoRA", "dense")
    close(out, jnp.sin(hki.materialize(inner)) + w.a @ w.b)


def test_one_carry_may_become_dense_and_another_stay(x, may_be_dense):
    def f(w, v, x):
        return lax.scan(lambda c, r: ((c[0], jnp.sin(c[1])), r @ c[0]), (w, v), x)

    assert kinds(f, lora(), lora(1), x) == ["LoRA", "dense", "dense"]


def test_a_carry_that_takes_several_rounds_to_settle(may_be_dense):
    """Each carry becomes dense only because the one before it did."""

    def f(w, v, u):
        return lax.fori_loop(0, 3, lambda i, c: (jnp.sin(c[0]), c[0], c[1]), (w, v, u))

    assert kinds(f, lora(), lora(1), lora(2)) == ["dense"] * 3
    assert kinds(lambda *c: lax.while_loop(lambda c: c[0][0, 0] > 9, lambda c: (c[1], c[0], c[2]), c),
                 lora(), lora(1), jnp.ones((4, 4))) == ["LoRA", "LoRA", "dense"]  # fmt: skip


def test_a_carry_of_another_static_part_becomes_dense(may_be_dense):
    def f(w, v):
        return lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (w, v))

    assert kinds(f, lora(alpha=None), lora(1, alpha=2.0)) == ["dense"] * 2
    assert kinds(f, lora(alpha=1.0), lora(1, alpha=2.0)) == ["LoRA"] * 2


def test_weak_types_of_a_carry(may_be_dense):
    def f(w):
        return lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0.0, jnp.ones(4))
        )

    close(use(f)(lora()), on_twins(f)(lora()))


BRANCHES = {
    "same": (lambda p: p["lora"], lambda p: p["lora2"], "LoRA", "dense"),
    "a dense branch": (lambda p: p["lora"], lambda p: p["x"], "dense", None),
    "two types": (lambda p: p["lora"], lambda p: p["outer"], "dense", None),
    "nested and flat": (lambda p: p["nested"], lambda p: p["lora"], "LoRA", "dense"),
    "nested and nested": (lambda p: p["nested"], lambda p: p["nested"], "LoRA", "LoRA"),
    "quantized and flat": (lambda p: p["quantized"], lambda p: p["lora"], "LoRA", "dense"),
    "quantized and nested": (lambda p: p["quantized"], lambda p: p["nested"], "LoRA", "dense"),
    "quantized twice": (lambda p: p["quantized"], lambda p: p["quantized"], "LoRA", "QuantizedMatrix"),
    "other alpha": (lambda p: p["lora"], lambda p: p["alpha"], "LoRA", "dense"),
    "another structure": (lambda p: p["lora"], lambda p: p["no alpha"], "dense", None),
    "other rank": (lambda p: p["lora"], lambda p: p["rank"], "dense", None),
    "zeros": (lambda p: p["zeros"], lambda p: p["zeros"], "Zeros", None),
    "zeros and dense": (lambda p: p["zeros"], lambda p: p["x"], "dense", None),
}  # fmt: skip


@pytest.fixture
def parameters():
    w = lora()
    return {
        "x": jnp.ones((4, 4)),
        "lora": w,
        "lora2": lora(1),
        "alpha": lora(1, alpha=9.0),
        "no alpha": lora(1, alpha=None),
        "rank": hki.LoRA(w.w, w.a[:, :1], w.b[:1], alpha=3.0),
        "nested": lora(2, w=lora(3)),
        "quantized": lora(4, w=hki.QuantizedMatrix.quantize(w.w, "int8")),
        "outer": Outer(jnp.ones(4), jnp.ones(4)),
        "zeros": hki.Zeros(shape=(4, 4), dtype=jnp.float32),
    }


@pytest.mark.combinations
@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_branches_meet_at_their_largest_common_structure(name, jit, parameters, may_be_dense):
    first, second, outer, inner = BRANCHES[name]

    def f(flag, p):
        return lax.cond(flag, first, second, p)

    run, twin = jax.jit(use(f)) if jit else use(f), on_twins(f)
    for flag in (True, False):
        out = run(jnp.asarray(flag), parameters)
        assert kind(out) == outer
        assert inner is None or kind(out.w) == inner
        close(out, twin(flag, parameters))


def test_three_branches(parameters, may_be_dense):
    def f(i, p):
        return lax.switch(
            i, [lambda p: p["nested"], lambda p: p["lora"], lambda p: p["quantized"]], p
        )

    twin = on_twins(f)
    for i in range(3):
        out = use(f)(jnp.asarray(i), parameters)
        assert (kind(out), kind(out.w)) == ("LoRA", "dense")
        close(out, twin(i, parameters))


def test_gradients_through_branches_that_meet(parameters, may_be_dense):
    def f(p, flag):
        return jnp.sum(jnp.sin(lax.cond(flag, lambda p: p["nested"], lambda p: p["lora"], p)))

    p = {k: parameters[k] for k in ("nested", "lora")}
    twin = jax.jit(jax.grad(lambda p, flag: f(hki.materialize(p), flag)))
    for flag in (True, False):
        got = jax.grad(use(f))(p, jnp.asarray(flag))
        want = twin(p, flag)
        close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_a_branch_index_that_is_implicit(may_be_dense):
    index = hki.SymbolicConstant(1, shape=(), dtype=jnp.int32)
    out = use(lambda i: lax.switch(i, [lambda: 1.0, lambda: 2.0, lambda: 3.0]))(index)
    assert float(hki.materialize(out)) == 2


# --- custom derivatives with an implicit operand ---------------------------------------------------------------

DERIVATIVES = {
    "relu(w) @ x": lambda w, x: jax.nn.relu(w) @ x.T,
    "logsumexp(w)": lambda w, x: jax.nn.logsumexp(w),
    "logsumexp(w, 0) * x": lambda w, x: jax.nn.logsumexp(w, axis=0) * x,
    "softmax(w)": lambda w, x: jax.nn.softmax(w) @ x.T,
    "gelu(w)": lambda w, x: jax.nn.gelu(w).sum() + x,
    "silu(w)": lambda w, x: jax.nn.silu(w) * x[0],
    "relu6(w)": lambda w, x: jax.nn.relu6(w) * x[0],
    "a custom_jvp": lambda w, x: cube(w) @ x.T,
    "a custom_jvp that keeps the type": lambda w, x: doubled(w) @ x.T,
    "a custom_vjp that keeps the type": lambda w, x: reversed_gradient(w) @ x.T,
    "in a scan, keeping the type": lambda w, x: lax.scan(
        lambda c, r: (doubled(c) * 0.5, reversed_gradient(c) @ r), w, x
    )[1],
    "a custom_vjp with a wrong gradient": lambda w, x: dot_with_wrong_gradient(w, x),
    "of an argument inside": lambda w, x: jax.jit(lambda w: jax.nn.relu(w))(w) @ x.T,
    "in a scan": lambda w, x: lax.scan(lambda c, r: (c, jax.nn.relu(c) @ r), w, x)[1],
    "of w and x": lambda w, x: dot_with_wrong_gradient(w, jax.nn.relu(x @ w)),
    "norm(w)": lambda w, x: jnp.linalg.norm(w) * x,
    "where": lambda w, x: jnp.where(w > 0, w, 0.1 * w) @ x.T,
    "sinc": lambda w, x: jnp.sinc(w) @ x.T,
    "logaddexp": lambda w, x: jnp.logaddexp(w, x[0]),
    "clip": lambda w, x: jnp.clip(w, -0.5, 0.5) @ x.T,
}  # fmt: skip
QUICK = ["logsumexp(w)", "relu(w) @ x", "a custom_jvp", "in a scan"]
REVERSE_ONLY = {
    "a custom_vjp that keeps the type",
    "in a scan, keeping the type",
    "a custom_vjp with a wrong gradient",
    "of w and x",
}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name", few(DERIVATIVES, *QUICK, "of w and x", "a custom_vjp that keeps the type")
)
def test_custom_derivatives_are_used_and_right_for_lora(name, x, may_be_dense):
    w, f = lora(), DERIVATIVES[name]

    def loss(w, x):
        return jnp.sum(f(w, x) ** 2)

    close(use(f)(w, x), on_twins(f)(w, x))
    of_twin = jax.grad(lambda w, x: loss(hki.materialize(w), x), argnums=(0, 1))
    want = jax.jit(of_twin)(w, x)
    for transform in (lambda g: g, jax.jit):
        got = transform(jax.grad(use(loss), argnums=(0, 1)))(w, x)
        close(
            jax.tree.leaves(got), jax.tree.leaves(want), rtol=2e-4
        )  # sums of squares: they cancel
    inside = use(jax.grad(loss, argnums=(0, 1)))(w, x)
    close(inside, on_twins(jax.grad(loss, argnums=(0, 1)))(w, x), rtol=2e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", few((n for n in DERIVATIVES if n not in REVERSE_ONLY), *QUICK))
def test_forward_and_second_derivatives_of_custom_ones(name, x, may_be_dense):
    w, f = lora(), DERIVATIVES[name]

    def of(f):
        return lambda a: jnp.sum(f(w._replace(a=a), x) ** 2)

    implicit, dense = of(use(f)), of(lambda w, x: f(hki.materialize(w), x))
    tangent = jnp.ones_like(w.a)

    def derivatives(f):
        first = jax.jit(lambda a: jax.jvp(f, (a,), (tangent,)))
        second = jax.jit(lambda a: jax.jvp(jax.grad(f), (a,), (tangent,))[1])
        return first(w.a), second(w.a)

    (first, got), (expected, want) = derivatives(implicit), derivatives(dense)
    close(first, expected, rtol=2e-4)
    close(got, want, rtol=1e-3)  # two derivatives of a sum of squares of products cancel twice


@pytest.mark.parametrize("f", [doubled, reversed_gradient])
def test_a_result_that_any_tangent_fits_keeps_its_type(f, x, never_dense):
    w = lora()
    assert [kinds(transform(f), w) for transform in (lambda f: f, jax.jit)] == [["LoRA"]] * 2
    factor = 2.0 if f is doubled else -3.0
    grads = jax.grad(use(lambda w: jnp.sum(f(w) @ x.T)))(w)
    dense = jax.grad(lambda w: jnp.sum(hki.materialize(w) @ x.T))(w)
    close(jax.tree.leaves(grads), [factor * g for g in jax.tree.leaves(dense)])


@dataclasses.dataclass
class SumOf(hki.ImplicitArray):
    x: jax.Array
    y: jax.Array
    kind: str = hki.aux_field()

    def materialize(self):
        return SUMS[self.kind][0](self.x, self.y)


SUMS = dict(
    twice=(lambda x, y: x + x, None),
    product=(lambda x, y: x + x * y, None),
    second=(lambda x, y: jnp.sin(x) + y, 1),
    first=(lambda x, y: x + 2 * y, 0),
)


@pytest.mark.parametrize("kind, place", [(name, place) for name, (_, place) in SUMS.items()])
def test_which_leaf_any_tangent_fits(kind, place):
    """A leaf that the dense value reads once, in a sum."""
    assert free_summand(SumOf(jnp.ones(2), jnp.ones(2), kind)) == place


def test_a_value_that_is_carried_is_equal_to_itself():
    """JAX compares these with those of a trace that it has kept."""
    for value in ((1, 2), [1, 2]):
        one, other = Carried(value), Carried(type(value)(value))
        assert one == one and (one == other) is isinstance(value, tuple)
        assert one != value and one != Carried("text")
    assert hash(Carried((1,))) == hash(Carried((1,)))


@dataclasses.dataclass
class Wrapped(hki.ImplicitArray):
    value: jax.Array

    def materialize(self):
        return self.value


@hki.primitive_handler("max")
def max_of_wrapped(primitive, w: Wrapped, y: jax.Array):
    return w._replace(value=primitive.bind(w.value, y))


@hki.primitive_handler("dot_general")
def dot_with_wrapped(primitive, w: Wrapped, y: jax.Array, **params):
    return primitive.bind(w.value, y, **params)


def test_a_users_type_stays_in_relu(x, never_dense):
    w = Wrapped(jnp.linspace(-1, 1, 16).reshape(4, 4))

    def loss(w):
        return jnp.sum(jax.nn.relu(w) @ x.T)

    assert kinds(jax.nn.relu, w) == ["Wrapped"]
    close(jax.grad(use(loss))(w).value, jax.grad(loss)(w.value))


@dataclasses.dataclass
class Refusing(Wrapped):
    """A type that is never dense, as a quantity with units would be."""

    def materialize(self):
        raise ValueError("it has units")

    def compute_shape(self):
        return self.value.shape

    def compute_dtype(self):
        return self.value.dtype


def test_a_type_that_refuses_to_be_dense_stays_in_relu_but_has_no_derivative(never_dense):
    w = Refusing(jnp.linspace(-1, 1, 4))
    for f in (use(jax.nn.relu), jax.jit(use(jax.nn.relu)), use(jax.jit(jax.nn.relu))):
        close(f(w).value, jax.nn.relu(w.value))
        with pytest.raises(ValueError, match="it has units"):
            jax.grad(lambda w, f=f: jnp.sum(f(w).value))(w)


def test_a_result_that_refuses_to_be_dense_has_no_derivative(never_dense):
    @jax.custom_jvp
    def with_units(x):
        return hki.box(Refusing(x))

    with_units.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    x = jnp.ones(2)
    close(use(with_units)(x).value, x)
    with pytest.raises(ValueError, match="it has units"):
        jax.grad(lambda x: jnp.sum(use(with_units)(x).value))(x)


def test_a_custom_derivative_is_not_asked_without_differentiation(may_be_dense):
    @jax.custom_jvp
    def f(w):
        return -w

    @f.defjvp
    def _(primals, tangents):
        raise AssertionError("no derivative is taken")

    out = use(f)(Outer(jnp.ones(2), jnp.ones(2)))
    close(out, -jnp.ones((2, 2)))


def test_custom_vjp_with_an_integer_operand(x, may_be_dense):
    @jax.custom_vjp
    def f(w, i):
        return w[i]

    f.defvjp(
        lambda w, i: (f(w, i), (w.shape, i)),
        lambda r, g: (jnp.zeros(r[0]).at[r[1]].add(3 * g), None),
    )

    w, i = lora(), jnp.asarray(2)
    want = jax.grad(lambda w: jnp.sum(f(hki.materialize(w), i) * x[0]))(w)
    got = jax.grad(lambda w: use(lambda w, i: jnp.sum(f(w, i) * x[0]))(w, i))(w)
    close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_custom_vjp_with_static_arguments(x, may_be_dense):
    scaled = jax.custom_vjp(lambda factor, w: w * factor, nondiff_argnums=(0,))
    scaled.defvjp(lambda factor, w: (w * factor, None), lambda factor, _, g: (g * 100 * factor,))
    w = lora()
    got = jax.grad(use(lambda w: jnp.sum(scaled(2.0, w))))(w)
    want = jax.grad(lambda w: jnp.sum(scaled(2.0, hki.materialize(w))))(w)
    close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_a_scan_keeps_its_options():
    def f(w, xs):
        return lax.scan(lambda c, x: (c + 1, x @ w * c), 1.0, xs, reverse=True, unroll=2)[1]

    w, xs = lora(), jnp.ones((4, 4))
    close(use(f)(w, xs), on_twins(f)(w, xs))
    [scan] = [e for e in jax.make_jaxpr(use(f))(w, xs).eqns if e.primitive is lax.scan_p]
    assert (scan.params["reverse"], scan.params["unroll"]) == (True, 2)


# --- linear solves, shard_map, pmap ---------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
def test_custom_linear_solve(symmetric, x, never_dense):
    def f(w, b):
        def matvec(y):
            z = 20 * y + w @ y
            return z + w.T @ y if symmetric else z

        return lax.custom_linear_solve(
            matvec, b, lambda matvec, b: lax.fori_loop(0, 60, lambda _, y: (b - matvec(y)) / 20 + y, b),
            None if symmetric else lambda vecmat, b: lax.fori_loop(0, 60, lambda _, y: (b - vecmat(y)) / 20 + y, b),
            symmetric=symmetric,
        )  # fmt: skip

    w, b = lora(), x[0]
    with hki.materialization("allow"):  # `w.T @ y` of the transposed system
        close(use(f)(w, b), on_twins(f)(w, b))
        gradient = jax.grad(lambda w, b: jnp.sum(use(f)(w, b) ** 2), argnums=(0, 1))
        got = jax.jit(gradient)(w, b)
        loss = lambda w, b: jnp.sum(f(hki.materialize(w), b) ** 2)  # noqa: E731
        want = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, b)
    close(jax.tree.leaves(got), jax.tree.leaves(want), rtol=2e-4)  # an iteration of 60 steps


def test_custom_linear_solve_with_aux(x, may_be_dense):
    def f(w, b):
        def solve(matvec, b):
            return b / 3, jnp.int32(7)

        return lax.custom_linear_solve(lambda y: y * 3 + 0 * (w @ y), b, solve, solve, has_aux=True)

    got, want = use(f)(lora(), x[0]), on_twins(f)(lora(), x[0])
    close(got, want)


def test_custom_linear_solve_without_the_transposed_system(x):
    def f(w, b):
        return lax.custom_linear_solve(lambda y: 2 * y + w @ y, b, lambda matvec, b: b - matvec(b))

    close(use(f)(lora(), x[0]), on_twins(f)(lora(), x[0]))


def test_a_right_side_that_is_implicit(may_be_dense):
    def f(b):
        return lax.custom_linear_solve(lambda y: 2 * y, b, lambda _, b: b / 2, lambda _, b: b / 2)

    close(use(f)(lora()), on_twins(f)(lora()))


def test_cg_solves_with_an_implicit_matrix(x, never_dense):
    def f(w, b):
        return jax.scipy.sparse.linalg.cg(lambda y: 30 * y + w @ y, b, maxiter=50)[0]

    w = hki.LoRA(jnp.eye(4), jnp.ones((4, 1)), jnp.ones((1, 4)))
    close(use(f)(w, x[0]), on_twins(f)(w, x[0]))


def test_pmap(x, may_be_dense):
    ws = lora(1, (1, 4, 4))
    f = jax.pmap(dot)
    close(use(f)(ws, x[None]), jax.vmap(dot)(hki.materialize(ws), x[None]))
    close(jax.pmap(use(dot))(ws, x[None]), jax.vmap(dot)(hki.materialize(ws), x[None]))


def test_collectives_in_shard_map(x, may_be_dense):
    def f(w, x):
        def local(w, x):
            return lax.psum(x @ w, "i") + lax.psum(w, "i")[:3] + lax.axis_index("i")

        return jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("i")), out_specs=P("i"))(w, x)

    close(use(f)(lora(), x), on_twins(f)(lora(), x))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: jnp.sin(c), w),
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: c + x, w),
        lambda w, x: lax.fori_loop(0, jnp.int32(x[0, 0] * 0) + 2, lambda i, c: c + x, w),
        lambda w, x: lax.cond(x[0, 0] > 0, lambda: w, lambda: x),
    ],
    ids=["scan", "sum", "while", "cond"],
)
def test_a_value_that_becomes_dense_in_shard_map(fun, may_be_dense):
    """A constant has no leaves, which could vary over the mesh as the dense array does."""
    f, x = jax.shard_map(fun, mesh=mesh(), in_specs=P("i"), out_specs=P("i")), jnp.ones((4, 4))
    for w in (lora(), hki.Zeros(shape=(4, 4))):
        close(jax.jit(use(f))(w, x), on_twins(f)(w, x))


TWO_DEVICES = """
    import jax, jax.numpy as jnp, numpy as np, haiku_implicit as hki
    from jax.sharding import NamedSharding, PartitionSpec as P
    assert jax.device_count() == 2
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 4)
    w = hki.LoRA(*(jax.random.normal(k, s) for k, s in zip(keys, [(4, 6), (4, 2), (2, 6)])), alpha=3.0)
    q = hki.QuantizedMatrix.quantize(jax.random.normal(keys[3], (4, 6)), "int8")
    x = jax.random.normal(keys[3], (2, 4))
    use = hki.use_implicit_args
    hki.materialization("allow").__enter__()

    def check(f, w, *args):
        dense = lambda w, *args: f(hki.materialize(w), *args)
        loss = lambda f: lambda w, *args: (jnp.sum(jnp.sin(f(w, *args))), f(w, *args))
        if isinstance(w, hki.LoRA):
            run = lambda f: jax.jit(jax.grad(loss(f), (0, 1), has_aux=True))(w, *args)
        else:
            run = lambda f: jax.jit(f)(w, *args)
        for a, b in zip(jax.tree.leaves(run(use(f))), jax.tree.leaves(run(dense)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    specs = [
        ((P(), P("i")), P("i"), lambda w, x: x @ w),
        ((P(None, "i"), P()), P(None, "i"), lambda w, x: x @ w),
        ((P("i"), P(None, "i")), P(), lambda w, x: jax.lax.psum(x @ w, "i")),
        ((P("i", None), P()), P("i"), lambda w, x: w * 2),
        ((P(), P("i")), P("i"), lambda w, x: jax.lax.scan(lambda c, r: (c, r @ w), 0, x)[1]),
    ]
    for ins, outs, local in specs:
        f = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs)
        check(f, w, x)
    check(jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(P(None, "i"), P()), out_specs=P(None, "i")), q, x)

    stack = jax.tree.map(lambda y: jnp.stack([y, -y]), w)
    xs = jnp.stack([x, x])
    check(jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=P("i"), out_specs=P("i")), stack, xs)
    check(jax.pmap(lambda w, x: x @ w), stack, xs)
    check(lambda w, x: jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, "i"))), w, x)
    placed = jax.device_put(w, NamedSharding(mesh, P()))
    check(lambda w, x: x @ w, placed, jax.device_put(x, NamedSharding(mesh, P("i"))))
    print("done")
"""


@pytest.mark.slow
def test_two_devices():
    assert run_on_devices(textwrap.dedent(TWO_DEVICES), 2) == "done"


# --- kernels and callbacks take dense operands ------------------------------------------------------------------


def test_pallas_call_materializes(may_be_dense):
    from jax.experimental import pallas

    def kernel(w_ref, out_ref):
        out_ref[...] = w_ref[...] * 2

    def f(w):
        return pallas.pallas_call(
            kernel, jax.ShapeDtypeStruct((4, 4), jnp.float32), interpret=True
        )(w)

    with hki.materialization_report() as report:
        close(use(f)(lora()), 2 * hki.materialize(lora()))
    assert [e.primitive for e, _ in report] == ["pallas_call"]


def test_callbacks_materialize(may_be_dense):
    seen = []

    def f(w):
        y = jax.pure_callback(lambda a: np.sin(a), jax.ShapeDtypeStruct((4, 4), jnp.float32), w)
        for ordered in (False, True):
            jax.experimental.io_callback(
                lambda a: seen.append(np.shape(a)), None, w, ordered=ordered
            )
        return y

    with hki.materialization_report() as report:
        close(jax.jit(use(f))(lora()), jnp.sin(hki.materialize(lora())))
    jax.effects_barrier()
    assert seen == [(4, 4)] * 2
    assert {e.primitive for e, _ in report} == {"pure_callback", "io_callback"}


# --- effects, names, settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_debug_prints(jit, ordered, capfd, never_dense, x):
    def f(w, x):
        jax.debug.print("first {}", jnp.abs(x[0, 0]) * 0, ordered=ordered)
        y = jax.jit(dot)(w, x)

        def body(c, i):
            jax.debug.print("step {}", i, ordered=ordered)
            return dot(w, c), None

        y = lax.scan(body, y, jnp.arange(3))[0]
        lax.cond(True, lambda: jax.debug.print("branch", ordered=False), lambda: None)
        jax.debug.print("last", ordered=ordered)
        return y

    w = lora()
    run = jax.jit(use(f)) if jit else use(f)
    run(w, x).block_until_ready()
    jax.effects_barrier()
    lines = capfd.readouterr().out.split("\n")[:-1]
    assert sorted(lines) == sorted(["first 0.0", "step 0", "step 1", "step 2", "branch", "last"])
    if ordered:
        assert [line for line in lines if line != "branch"] == [
            "first 0.0", "step 0", "step 1", "step 2", "last"
        ]  # fmt: skip


def test_debug_print_of_an_implicit_array(capfd, may_be_dense):
    use(jax.jit(lambda w: jax.debug.print("{}", w)))(Outer(jnp.ones(1), jnp.ones(1)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "[[1.]]\n"


def names_in(f, *args):
    """The names of the operations of the compiled program."""
    import re

    text = jax.jit(f).lower(*args).as_text(debug_info=True)
    return " ".join(re.findall(r'loc\("([^"]*)"', text))


def test_name_stacks_survive(x, never_dense):
    def f(w, x):
        with jax.named_scope("outer"):
            y = x @ w
            with jax.named_scope("inner"):
                y = jnp.sin(y @ w)

        @jax.jit
        def block(y):
            with jax.named_scope("in_block"):
                return jnp.cos(y @ w)

        with jax.named_scope("around"):
            y = block(y)
            y, _ = lax.scan(lambda c, _: (named_step(w, c), None), y, None, length=2)
        return y

    def named_step(w, c):
        with jax.named_scope("in_scan"):
            return jnp.tanh(c @ w)

    names = names_in(use(f), lora(), x)
    for name in ("outer/dot_general", "outer/inner/dot_general", "outer/inner/sin", "in_block/dot_general",
                 "in_block/cos", "around/", "in_scan/dot_general", "in_scan/tanh"):  # fmt: skip
        assert name in names, name


def test_one_jitted_function_under_two_names(x, never_dense):
    """Its trace is shared, its names are not."""

    @jax.jit
    def block(w, x):
        return jnp.cos(x @ w)

    def f(w, x):
        with jax.named_scope("one"):
            x = block(w, x)
        with jax.named_scope("two"):
            x = block(w, x)
        return x

    module = jax.jit(use(f)).lower(lora(), x).compile().as_text()
    for scope in ("one", "two"):
        assert f"{scope}/jit(block)" in module


def test_names_of_jitted_functions_survive(x, never_dense):
    @jax.jit
    def attention(w, x):
        return x @ w

    jaxpr = jax.make_jaxpr(use(lambda w, x: attention(w, x)))(lora(), x)
    assert "attention" in [eqn.params.get("name") for eqn in jaxpr.eqns]


def precisions(f, *args):
    return [
        eqn.params["precision"] for eqn in jaxpr_of(f, *args) if eqn.primitive is lax.dot_general_p
    ]


def test_matmul_precision_contexts_survive(x, never_dense):
    highest = (lax.Precision.HIGHEST,) * 2

    def inside(w, x):
        with jax.default_matmul_precision("highest"):
            return jax.jit(dot)(w, x)

    assert set(precisions(use(inside), lora(), x)) == {highest}
    assert set(precisions(use(dot), lora(), x)) == {None}

    def mixed(w, x):
        with jax.default_matmul_precision("highest"):
            y = jnp.dot(x, w)
        return jnp.dot(y, w)

    found = precisions(use(mixed), lora(), x)
    assert set(found[: len(found) // 2]) == {highest} and set(found[len(found) // 2 :]) == {None}
    with jax.default_matmul_precision("highest"):
        assert set(precisions(use(dot), lora(), x)) == {highest}
    with jax.default_matmul_precision("float32"):
        inner = precisions(jax.jit(use(dot)), lora(), x)
    assert None not in inner


def test_user_files_are_in_the_tracebacks(x, never_dense):
    text = jax.jit(use(jax.jit(dot))).lower(lora(), x).as_text(debug_info=True)
    assert "test_higher_order.py" in text


# --- caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))],
                         ids=["jit", "remat", "both"])  # fmt: skip
def test_a_function_that_is_used_often_is_traced_once(wrap, x):
    calls = []

    class Counted(Outer):
        pass

    @hki.primitive_handler("sinh")
    def rule(primitive, w: Counted, **params):
        calls.append(1)
        return NotImplemented

    block = wrap(lambda w, x: x @ jnp.sinh(w))

    def f(w, x):
        for _ in range(20):
            x = block(w, x)
        return x

    w = Counted(jnp.ones(4), jnp.ones(4) / 10)
    with hki.materialization("allow"):
        jax.jit(use(f))(w, x)
        assert len(calls) == 1
        jax.jit(use(lambda w, x: f(w, x) * 2))(w, x)
    assert len(calls) == 1


def test_a_trace_is_not_shared_between_structures(x, never_dense):
    block = jax.jit(dot)

    def f(w, v, x):
        return block(w, x) + block(v, x) + block(jnp.ones((4, 4)), x) + block(w, x)

    w, v = lora(alpha=None), lora(alpha=8.0)
    close(use(f)(w, v, x), on_twins(f)(w, v, x))


def test_a_trace_is_not_shared_between_settings(x, x64, never_dense):
    block = jax.jit(lambda w, x: x @ w + jnp.arange(4.0))
    for enabled in (True, False, True):
        jax.config.update("jax_enable_x64", enabled)
        out = use(block)(lora(), x)
        assert out.dtype == (jnp.float64 if enabled else jnp.float32) or out.dtype == jnp.float32


def test_constants_of_a_jaxpr_are_not_mixed_up(x, never_dense):
    """Functions of one text that close over different arrays."""

    def make(c):
        return jax.jit(lambda w, x: x @ w + c)

    blocks = [make(jnp.full(4, float(i))) for i in range(3)]
    w = lora()
    for i, block in enumerate(blocks):
        close(use(block)(w, x), x @ hki.materialize(w) + i)
    scans = [
        lambda w, x, c=c: lax.scan(lambda s, r: (s, r @ w + c), 0, x)[1]
        for c in np.arange(3.0, dtype=np.float32)
    ]
    for i, f in enumerate(scans):
        close(use(f)(w, x), x @ hki.materialize(w) + i)


def test_a_dense_equation_is_left_alone(x):
    def f(w, x):
        return lax.scan(lambda c, r: (c + r, jnp.sin(r)), x[0], x), x @ w

    dense = [e for e in jax.make_jaxpr(f)(jnp.ones((4, 4)), x).eqns if e.primitive is lax.scan_p]
    implicit = [e for e in jax.make_jaxpr(use(f))(lora(), x).eqns if e.primitive is lax.scan_p]
    assert str(dense[0].params["jaxpr"]) == str(implicit[0].params["jaxpr"])


@pytest.mark.slow
def test_custom_vmap():
    """A function with a rule of its own for `vmap`, as AlphaFold 3's gated unit is, and its gradients."""

    @jax.custom_batching.custom_vmap
    def product(x, w):
        return x @ w, w

    @product.def_vmap
    def _(size, batched, x, w):
        return (jnp.einsum("bij,jk->bik", x, w), w), (True, False)

    w = hki.LoRA(jnp.eye(3), jnp.ones((3, 1)), jnp.arange(3.0)[None])
    x = jnp.arange(6.0).reshape(2, 3)
    fun = hki.use_implicit_args(lambda x, w: product(x, w)[0].sum())
    with hki.materialization("error"):
        out, kept = jax.jit(hki.use_implicit_args(product))(x, w)
        grads = jax.grad(fun, argnums=1)(x, w)
        mapped = jax.vmap(hki.use_implicit_args(lambda x, w: product(x, w)[0]), (0, None))(
            x[None], w
        )
    assert isinstance(kept, hki.LoRA)
    np.testing.assert_allclose(out, x @ hki.materialize(w), rtol=1e-6)
    np.testing.assert_allclose(mapped[0], out, rtol=1e-6)
    expected = jax.grad(lambda w: (x @ hki.materialize(w)).sum())(w)
    np.testing.assert_allclose(grads.a, expected.a, rtol=1e-6)
    np.testing.assert_allclose(grads.b, expected.b, rtol=1e-6)
