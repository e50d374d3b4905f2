"""Counts that keep tracing cheap: rules run once, and primitives are linearized once.

Times are in `docs/benchmarks.md`; counts do not depend on the machine.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad

import haiku_implicit as hki
from haiku_implicit.core import interpreter


@dataclasses.dataclass
class Doubled(hki.ImplicitArray, warn_on_materialize=False):
    """Twice an array; its rules note that they ran."""

    x: hki.ArrayValue

    def compute_shape(self):
        return self.x.shape

    def compute_dtype(self):
        return self.x.dtype

    def materialize(self):
        return self.x * 2


ran = []


@hki.primitive_handler("cos")
def cos_of_doubled(primitive, x: Doubled, **params):
    ran.append("cos")
    return primitive.bind(2 * x.x, **params)


@hki.primitive_handler("sin")
def sin_of_doubled(primitive, x: Doubled, **params):
    ran.append("sin")
    hki.default_handler(jax.lax.exp_p, x, accuracy=None)  # has no rule: materializes
    return NotImplemented if x.ndim == 0 else jnp.sin(x.x) * jnp.cos(x.x) * 2


@pytest.fixture(autouse=True)
def nothing_traced_before():
    jax.clear_caches()
    ran.clear()


def many(fun, times=12):
    """Sums what a function gives at every use."""
    return hki.use_implicit_args(lambda *args: sum(fun(*args) for _ in range(times)).sum())


@contextlib.contextmanager
def count_jvps(primitive):
    """Counts how often JAX asks for the derivative of a primitive."""
    rule, calls = ad.primitive_jvps[primitive], []

    def counting(*args, **params):
        calls.append(1)
        return rule(*args, **params)

    ad.primitive_jvps[primitive] = counting
    try:
        yield calls
    finally:
        ad.primitive_jvps[primitive] = rule


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"]
)
@pytest.mark.slow
def test_a_rule_runs_once_for_one_structure(transform):
    x = jnp.arange(1.0, 4.0)
    out = transform(many(jnp.cos))(Doubled(x))
    assert ran == ["cos"]
    expected = transform(lambda x: 12 * jnp.cos(2 * x).sum())(x)
    assert jnp.allclose(jax.tree.leaves(out)[0], expected, rtol=1e-5)


def test_a_rule_for_nested_arrays_runs_once():
    x = jnp.arange(1.0, 4.0)
    nested = Doubled(Doubled(x))
    out, grad = jax.value_and_grad(many(jnp.cos))(nested)
    assert ran == ["cos"]
    assert jnp.allclose(out, 12 * jnp.cos(4 * x).sum(), rtol=1e-5)
    assert jnp.allclose(grad.x.x, -48 * jnp.sin(4 * x), rtol=1e-5)


def test_a_rule_runs_anew_for_another_shape_dtype_or_structure():
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(3, jnp.bfloat16)):
        many(jnp.cos)(Doubled(x))
    many(jnp.cos)(Doubled(Doubled(jnp.ones(3))))
    assert len(ran) == 4


def test_what_a_rule_materializes_is_reported_at_every_use():
    with hki.materialization("allow"), hki.materialization_report() as report:
        many(jnp.sin, times=5)(Doubled(jnp.ones(3)))
    assert ran == ["sin"]
    assert report.count == 5


def test_what_a_rule_that_declines_materializes_is_not_reported():
    with hki.materialization("allow"), hki.materialization_report() as report:
        many(jnp.sin, times=5)(Doubled(jnp.float32(1)))
    assert {event.primitive for event, _ in report} == {"sin"}
    assert report.count == 5


def test_a_new_rule_is_seen():
    def tanh(x):
        return many(jnp.tanh)(Doubled(x))

    with hki.materialization("allow"):
        before = tanh(jnp.ones(3))

    @hki.primitive_handler("tanh")
    def tanh_of_doubled(primitive, x: Doubled, **params):
        return jnp.zeros_like(x.x)

    assert before > 0
    assert tanh(jnp.ones(3)) == 0


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_a_primitive_is_linearized_once(transform):
    def fun(w, x):
        for _ in range(12):
            x = jax.lax.erf(x)
        return (x @ w).sum()

    w = hki.LoRA(jnp.ones((3, 2)), jnp.ones((3, 1)), jnp.ones((1, 2)))
    x = jnp.ones((4, 3))
    wrapped = hki.use_implicit_args(fun)
    with count_jvps(jax.lax.erf_p) as calls:
        transform(lambda x: wrapped(w, x))(x)
    assert len(calls) == 1


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, lambda f: f])
def test_equations_keep_their_names_and_lines(transform):
    def fun(w, x):
        with jax.named_scope("first"):
            y = jax.lax.erf(x)
        with jax.named_scope("second"):
            return (jax.lax.erf(y) * w).sum()

    def erf_names(f):
        jaxpr = jax.make_jaxpr(transform(lambda x: f(jnp.ones(3), x)))(jnp.ones((3,)))
        return [
            (str(e.source_info.name_stack), e.source_info.traceback.frames[0].line_num)
            for e in jaxpr.eqns
            if e.primitive is jax.lax.erf_p
        ]

    if transform is jax.vmap:
        fun_of = fun
        fun = lambda w, x: fun_of(w, jnp.stack([x]))  # noqa: E731
    plain, wrapped = erf_names(fun), erf_names(hki.use_implicit_args(fun))
    assert len(plain) == 2
    assert [name for name, _ in wrapped] == [name for name, _ in plain]
    assert wrapped[0][1] != wrapped[1][1] or plain[0][1] == plain[1][1]


def test_a_primitive_without_a_lowering_is_not_jitted():
    own_p = Primitive("own")
    own_p.def_impl(lambda x: x * 3)
    own_p.def_abstract_eval(lambda x: x)
    ad.deflinear2(own_p, lambda t, _: [t * 3])
    f = hki.use_implicit_args(lambda w, x: own_p.bind(x).sum() + jnp.cos(w).sum())
    assert jnp.array_equal(jax.grad(f, 1)(Doubled(jnp.ones(2)), jnp.ones(2)), jnp.full(2, 3.0))


def test_a_rule_does_not_run_again_for_a_new_function():
    for _ in range(2):
        jax.jit(jax.grad(many(jnp.cos))).trace(Doubled(jnp.arange(1.0, 4.0)))
    assert ran == ["cos"]


@pytest.fixture
def interpreted(monkeypatch):
    """The names of the primitives that the interpreter has bound."""
    names, bind = [], interpreter.bind

    def counting(primitive, *args):
        names.append(primitive.name)
        return bind(primitive, *args)

    monkeypatch.setattr(interpreter, "bind", counting)
    return names


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.vmap, jax.grad], ids=["plain", "vmap", "grad"]
)
@pytest.mark.parametrize("start", [1.0, jnp.float32(1)], ids=["weak", "strong"])
def test_the_body_of_a_scan_is_interpreted_once(interpreted, transform, start):
    def fun(w, x):
        step = lambda c, y: (jax.lax.erf(c) + y.sum() * jnp.cos(w).sum(), c)  # noqa: E731
        return jax.lax.scan(step, start, x)[0]

    arguments = Doubled(jnp.ones((2, 3))), jnp.ones((2, 4, 3))
    if transform is not jax.vmap:
        arguments = jax.tree.map(lambda x: x[0], arguments)
    jax.make_jaxpr(transform(hki.use_implicit_args(fun)))(*arguments)
    assert interpreted.count("erf") == 1


def test_the_body_of_a_scan_is_interpreted_once_more_where_its_carry_becomes_dense(interpreted):
    def fun(w, x):
        return jax.lax.scan(lambda c, y: (jnp.tanh(c) + jax.lax.erf(y), None), w, x)[0]

    with hki.materialization("allow"), hki.materialization_report() as report:
        out = jax.eval_shape(hki.use_implicit_args(fun), Doubled(jnp.ones(3)), jnp.ones((4, 3)))
    assert isinstance(out, jax.ShapeDtypeStruct)
    assert interpreted.count("erf") == 2
    assert report.count == 1  # the carry that comes in; in the body it is dense then


def test_the_body_of_a_while_loop_is_interpreted_once(interpreted):
    def fun(w, x):
        body = lambda c: (jax.lax.erf(c[0]) + jnp.cos(w).sum(), c[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[1] < 3, body, (x, jnp.int32(0)))[0]

    jax.eval_shape(hki.use_implicit_args(fun), Doubled(jnp.ones(3)), jnp.ones(3))
    assert interpreted.count("erf") == 1


def shifted(ws, x):
    """Weights that move on by one place in each step, of which the last one becomes dense."""
    step = lambda c: (jnp.tanh(c[-1]) + jax.lax.erf(x), *c[:-1])  # noqa: E731
    return jax.lax.scan(lambda c, _: (step(c), None), tuple(ws), length=3)[0]


def shifted_by_while(ws, x):
    def step(c):
        return (jnp.tanh(c[0][-1]) + jax.lax.erf(x), *c[0][:-1]), c[1] + 1

    return jax.lax.while_loop(lambda c: c[1] < 3, step, (tuple(ws), jnp.int32(0)))[0]


@pytest.mark.parametrize("fun", [shifted, shifted_by_while])
def test_a_carry_that_moves_on_becomes_dense_at_once(interpreted, may_be_dense, fun):
    """One place after the other would take as many traces as there are."""
    ws, x = [Doubled(jnp.arange(3.0) + i) for i in range(8)], jnp.arange(3.0)
    jax.eval_shape(hki.use_implicit_args(fun), ws, x)
    assert interpreted.count("erf") == 2
    got = jax.jit(hki.use_implicit_args(fun))(ws, x)
    for y, want in zip(got, fun([w.materialize() for w in ws], x), strict=True):
        assert jnp.allclose(y, want, rtol=1e-6)


def test_a_carry_that_moves_on_stays_implicit_where_nothing_makes_it_dense(never_dense):
    ws = [Doubled(jnp.arange(3.0) + i) for i in range(4)]
    fun = lambda ws: jax.lax.scan(lambda c, _: ((c[-1], *c[:-1]), None), tuple(ws), length=3)[0]  # noqa: E731
    got = jax.jit(hki.use_implicit_args(fun))(ws)
    for y, w in zip(got, ws[1:] + ws[:1], strict=True):
        assert isinstance(y, Doubled) and jnp.array_equal(y.x, w.x)


def test_a_dense_value_in_a_carry_that_moves_on_makes_only_its_takers_dense(may_be_dense):
    """Two circles of values: one with a dense one in it, one without."""
    own, other = (tuple(Doubled(jnp.arange(3.0) + i) for i in range(3)) for _ in range(2))
    own = (jnp.ones(3), *own[1:])

    def fun(own, other):
        step = lambda c: tuple((x[-1], *x[:-1]) for x in c)  # noqa: E731
        return jax.lax.scan(lambda c, _: (step(c), None), (own, other), length=2)[0]

    got = jax.jit(hki.use_implicit_args(fun))(own, other)
    assert [isinstance(x, Doubled) for x in got[0]] == [False] * 3
    assert [isinstance(x, Doubled) for x in got[1]] == [True] * 3
    assert jnp.array_equal(got[0][2], jnp.ones(3))
    assert jnp.array_equal(got[0][0], own[1].materialize())
