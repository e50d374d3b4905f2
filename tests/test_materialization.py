"""Materialization is visible: policies, warnings, reports."""

import contextvars
import dataclasses
import inspect
import re
import sys
import threading
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki

X = jnp.arange(6.0).reshape(2, 3)


@dataclasses.dataclass
class Held(hki.ImplicitArray):
    """A type without rules."""

    x: hki.ArrayValue

    def materialize(self):
        return self.x


class Quiet(Held, warn_on_materialize=False):
    """A type that finds its materialization not worth a warning."""


def held(x=X):
    """An array of a new type, which no cache knows."""
    return type("Held", (Held,), {})(x)


def line_of(text, function):
    """The number of the first line of this file, within a function, that has a text."""
    lines, start = inspect.getsourcelines(function)
    return next(start + i for i, line in enumerate(lines) if text in line)


def caught(fun, *args):
    """The warnings that a call gives."""
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("default")
        fun(*args)
    return [w for w in log if issubclass(w.category, hki.MaterializationWarning)]


def report_of(fun, *args):
    with hki.materialization("allow"), hki.materialization_report() as report:
        fun(*args)
    return report


# --- policies ----------------------------------------------------------------------------------------


def test_allow_says_nothing():
    fun = hki.use_implicit_args(jnp.sin)
    with hki.materialization("allow"):
        assert not caught(fun, held())
        np.testing.assert_allclose(fun(held()), jnp.sin(X), rtol=1e-6)


def test_error_raises_what_the_warning_says():
    w = held()
    fun = hki.use_implicit_args(jnp.sin)
    with hki.materialization("error"), pytest.raises(hki.MaterializationError) as e:
        fun(w)  # the line
    here = line_of("the line", test_error_raises_what_the_warning_says)
    assert isinstance(e.value, RuntimeError)
    assert str(e.value) == (
        "Held float32[2,3] was materialized (24 bytes), because no rule handles it in 'sin' "
        f"({__file__}:{here}). Add one with haiku_implicit.primitive_handler, or accept it with "
        "haiku_implicit.materialization('allow')."
    )


def test_the_innermost_policy_counts_and_the_outer_one_comes_back():
    fun = hki.use_implicit_args(lambda x: x + 1)
    with hki.materialization("error"):
        with hki.materialization("allow"):
            fun(held())
        with pytest.raises(hki.MaterializationError):
            fun(held())
        with pytest.raises(KeyError), hki.materialization("allow"):
            raise KeyError
        with pytest.raises(hki.MaterializationError):
            fun(held())
    assert len(caught(fun, held())) == 1


@pytest.mark.parametrize("policy", ["ignore", "", None, "Warn", 1])
def test_a_policy_that_there_is_not(policy):
    message = f"policy: expected one of allow, warn, error, got {policy!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        with hki.materialization(policy):
            raise AssertionError


def test_the_policy_may_decorate_a_function():
    @hki.materialization("error")
    def fun(x):
        return hki.use_implicit_args(jnp.cos)(x)

    with pytest.raises(hki.MaterializationError):
        fun(held())
    with pytest.raises(hki.MaterializationError):
        fun(held())


def test_the_class_keyword_silences_the_warning_alone():
    fun = hki.use_implicit_args(jnp.sin)
    assert not caught(fun, Quiet(X))
    with hki.materialization("warn"):
        assert not caught(fun, Quiet(X))
    assert report_of(fun, Quiet(X)).count == 1
    with hki.materialization("error"), pytest.raises(hki.MaterializationError, match="^Quiet"):
        fun(Quiet(X))


# --- the warning ---------------------------------------------------------------------------------------


def test_the_warning_names_what_and_where():
    w = held()
    f = hki.use_implicit_args(lambda w: jnp.tanh(w) + 1)  # the line
    (warning,) = caught(f, w)
    assert issubclass(warning.category, UserWarning)
    assert warning.filename == __file__
    assert warning.lineno == line_of("# the line", test_the_warning_names_what_and_where)
    text = str(warning.message)
    assert text.startswith("Held float32[2,3] was materialized (24 bytes), because no rule")
    assert f"in 'tanh' ({__file__}:{warning.lineno})" in text


def test_the_line_is_the_users_own_in_each_kind_of_function():
    def body(w):
        return jax.nn.relu(w).sum()  # the relu

    @jax.jit
    def outer(w):
        return body(w)

    here = line_of("# the relu", test_the_line_is_the_users_own_in_each_kind_of_function)
    wrappers = {
        "plain": body,
        "jit": outer,
        "checkpoint": jax.checkpoint(body),
        "scan": lambda w: jax.lax.scan(lambda c, _: (c + body(w), None), 0.0, length=2)[0],
        "cond": lambda w: jax.lax.cond(w[0, 0] > -1, body, lambda w: 0.0, w),
        "while": lambda w: jax.lax.fori_loop(0, 2, lambda _, c: c + body(w), 0.0),
    }
    for name, fun in wrappers.items():
        report = report_of(hki.use_implicit_args(fun), held())
        places = {(e.file, e.line) for e, _ in report if e.primitive == "max"}
        assert places == {(__file__, here)}, name


def test_two_users_of_one_jitted_function_of_jax_are_two_places():
    def fun(w):
        a = jnp.clip(w, 0, 1)  # the first
        b = jnp.clip(w, 0, 1)  # the second
        return a + b

    events = [e for e, _ in report_of(hki.use_implicit_args(fun), held())]
    lines = {line_of(f"# the {n}", fun) for n in ("first", "second")}
    assert {e.line for e in events} == lines and {e.file for e in events} == {__file__}


def test_once_for_each_place():
    w = held()

    def fun(w):
        return jnp.sin(w) + jnp.sin(w), jnp.cos(w)

    class Other(Held):
        pass

    f = hki.use_implicit_args(fun)

    def often(w):
        for g in (f, f, jax.jit(f), jax.grad(lambda w: f(w)[1].sum())):
            g(w)

    assert len(caught(often, w)) == 2  # sin (twice on one line) and cos
    # Another type is another place, and so is another shape, of which there may be more to say.
    assert len(caught(lambda: (often(w), often(Other(X))))) == 4
    assert len(caught(lambda: (often(w), often(type(w)(X[0]))))) == 4


def test_a_loop_over_layers_of_one_kind_warns_once():
    w = held()
    f = hki.use_implicit_args(lambda w: [jnp.sin(w) for _ in range(5)])
    assert len(caught(f, w)) == 1
    assert report_of(f, w).count == 5


def test_filters_of_warnings_apply():
    f = hki.use_implicit_args(jnp.sin)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hki.MaterializationWarning)
        with pytest.raises(hki.MaterializationWarning):
            f(held())
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("ignore", hki.MaterializationWarning)
        f(held())
    assert not log


def test_the_module_path_of_haiku():
    class Inner(hk.Module):
        def __call__(self, x):
            w = hk.get_parameter("w", (3, 3), init=jnp.ones)
            return x @ jnp.sin(w)  # the sine

    class Outer(hk.Module):
        def __call__(self, x):
            return Inner(name="a")(x) + Inner(name="b")(x)

    model = hk.without_apply_rng(hk.transform(lambda x: Outer(name="net")(x)))
    params = model.init(jax.random.key(0), X)
    kind = type("Held", (Held,), {})
    params = jax.tree.map(kind, params)
    wrapped = hki.transform_implicit(model)
    for apply in (wrapped.apply, jax.jit(wrapped.apply), hki.use_implicit_args(model.apply)):
        report = report_of(apply, params, X)
        found = {(e.module, e.primitive, e.line) for e, _ in report}
        line = line_of("# the sine", Inner.__call__)
        assert {(m.removeprefix("jit(apply)/"), p, n) for m, p, n in found} == {
            ("net/a", "sin", line),
            ("net/b", "sin", line),
        }
    (warning,) = caught(wrapped.apply, params, X)
    assert "in module net/a" in str(warning.message) and warning.lineno == line


def test_outside_any_module_there_is_no_module_path():
    report = report_of(hki.use_implicit_args(jnp.sin), held())
    assert [e.module for e, _ in report] == [""]
    with jax.named_scope("mine"):
        scoped = hki.use_implicit_args(jax.named_scope("scope")(lambda w: jnp.sin(w)))
        (event,) = [e for e, _ in report_of(scoped, held())]
    assert event.module.endswith("scope")


# --- the report ----------------------------------------------------------------------------------------


def test_a_report_counts_and_adds_up():
    @hki.use_implicit_args
    def fun(w, v):
        return jnp.sin(w), jnp.sin(w), w + v, jnp.exp(v)

    report = report_of(fun, held(), held(jnp.ones((2, 3), jnp.bfloat16)))
    assert report.count == 5 and report.nbytes == 3 * 24 + 2 * 12
    counts = {(e.primitive, e.dtype): n for e, n in report}
    assert counts.pop(("sin", "float32")) == 2
    assert sum(counts.values()) == 3 and len(report) == len(counts) + 1
    (event,) = [e for e, _ in report if e.primitive == "sin"]
    assert (event.type_name, event.shape, event.nbytes, event.file) == (
        "Held",
        (2, 3),
        24,
        __file__,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.line = 3


def test_an_empty_report():
    report = report_of(hki.use_implicit_args(lambda x: x + 1), X)
    assert (report.count, report.nbytes, len(report), list(report)) == (0, 0, 0, [])
    assert str(report) == "nothing was materialized"


def test_the_table():
    def fun(w, v):
        return jnp.sin(v), jnp.sin(w), jnp.sin(w)

    v = Held(jnp.ones((1000, 3)))
    report = report_of(hki.use_implicit_args(fun), Held(X), v)
    line = line_of("return jnp.sin(v)", fun)
    assert str(report).splitlines() == [
        "count  bytes   type  dense            primitive  module  line",
        f"1      12,000  Held  float32[1000,3]  sin        -       test_materialization.py:{line}",
        f"2      48      Held  float32[2,3]     sin        -       test_materialization.py:{line}",
        "3      12,048  all",
    ]


def test_reports_nest_and_end():
    f = hki.use_implicit_args(lambda w: jnp.sin(w))
    with hki.materialization("allow"), hki.materialization_report() as outer:
        f(held())
        with hki.materialization_report() as inner:
            f(held())
        f(held())
    with hki.materialization("allow"):
        f(held())
    assert (inner.count, outer.count) == (1, 3)


def test_a_report_counts_under_every_policy():
    f = hki.use_implicit_args(lambda w: jnp.sin(w))
    with hki.materialization_report() as report:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f(held())
        with hki.materialization("error"), pytest.raises(hki.MaterializationError):
            f(held())
    assert report.count == 2


def test_a_report_ends_with_an_error_too():
    with pytest.raises(KeyError), hki.materialization_report() as report:
        raise KeyError
    report_of(hki.use_implicit_args(jnp.sin), held())
    assert report.count == 0


# --- traces that are used again ------------------------------------------------------------------------


def test_a_jitted_function_counts_at_each_use():
    inner = jax.jit(lambda w: jnp.sin(w))
    f = hki.use_implicit_args(lambda w: inner(w) + inner(w) + inner(w))
    w = held()
    assert report_of(f, w).count == 3
    assert report_of(f, w).count == 3


@pytest.mark.parametrize(
    "carrier, times",
    [
        (jax.checkpoint, 1),
        (lambda f: jax.jit(jax.jit(f)), 1),
        (lambda f: lambda w: jax.lax.map(lambda _: f(w), jnp.arange(3)), 1),
        (lambda f: lambda w: jax.lax.cond(w[0, 0] > 0, f, lambda w: f(w), w), 2),
        (lambda f: lambda w: jax.lax.fori_loop(0, 3, lambda _, c: c + f(w), jnp.zeros(X.shape)), 1),
    ],
    ids=["checkpoint", "jit in jit", "scan", "cond", "while"],
)
def test_each_place_in_a_sub_jaxpr_counts_once_for_each_use(carrier, times):
    fun = carrier(lambda w: jnp.sin(w))
    w = held()
    for f in (fun, lambda w: (fun(w), fun(w))):
        uses = 1 if f is fun else 2
        report = report_of(hki.use_implicit_args(f), w)
        assert sum(n for e, n in report if e.primitive == "sin") == times * uses


def test_error_raises_though_the_trace_was_made_under_another_policy():
    inner = jax.jit(lambda w: jnp.sin(w))
    f = hki.use_implicit_args(lambda w: inner(w) * 2)
    w = held()
    assert len(caught(f, w)) == 1
    for _ in range(2):
        with hki.materialization("error"), pytest.raises(hki.MaterializationError, match="'sin'"):
            f(w)
    assert report_of(f, w).count == 1


def test_what_was_traced_under_error_is_no_error_later():
    inner = jax.jit(lambda w: jnp.sin(w))
    f = hki.use_implicit_args(lambda w: inner(w) * 2)
    w = held()
    with hki.materialization("error"), pytest.raises(hki.MaterializationError):
        f(w)
    assert report_of(f, w).count == 1
    with hki.materialization("allow"):
        out = f(w)
    np.testing.assert_allclose(out, jnp.sin(X) * 2, rtol=1e-6)


def test_a_rule_that_materializes_counts_at_each_use():
    outer, kind = type("Outer", (Held,), {}), type("Held", (Held,), {})

    @hki.primitive_handler("neg")
    def rule(primitive, x: outer, **params):
        return jnp.sin(x.x)

    f = hki.use_implicit_args(lambda w: jax.lax.neg(w) + jax.lax.neg(w))
    w = outer(kind(X))
    for _ in range(2):
        report = report_of(f, w)
        assert {(e.type_name, e.primitive): n for e, n in report} == {("Held", "sin"): 2}
    with hki.materialization("error"), pytest.raises(hki.MaterializationError, match="Held.*'sin'"):
        f(w)


def test_an_eager_apply_reports_at_each_call_though_it_is_not_traced_again():
    model = hk.without_apply_rng(hk.transform(lambda x: jnp.sin(hk.Linear(3, name="l")(x))))
    wrapped = hki.transform_implicit(model)
    params = jax.tree.map(type("Held", (Held,), {}), model.init(jax.random.key(0), X))
    first, second = (report_of(wrapped.apply, params, X) for _ in range(2))
    assert first.count == second.count > 0 and str(first) == str(second)
    with hki.materialization("error"), pytest.raises(hki.MaterializationError):
        wrapped.apply(params, X)


def test_an_outer_jit_keeps_what_it_did_when_it_was_traced():
    f = jax.jit(hki.use_implicit_args(lambda w: jnp.sin(w)))
    w = held()
    assert report_of(f, w).count == 1
    assert report_of(f, w).count == 0, "JAX does not come here again"
    with hki.materialization("error"):
        f(w)
    assert "traced before keeps" in hki.materialization.__doc__


def test_transformations_count_what_they_trace():
    f = hki.use_implicit_args(lambda w: jnp.sin(w).sum())
    assert report_of(jax.grad(f), held()).count == 1
    assert report_of(jax.vmap(f), held()).count == 1
    assert report_of(jax.eval_shape, f, held()).count == 1
    assert report_of(jax.make_jaxpr(f), held()).count == 1


# --- by name, and in threads ---------------------------------------------------------------------------


def test_materialize_by_name_is_silent():
    tree = {"w": held(), "nested": held(held()), "x": X, "flag": True}
    with hki.materialization("error"), hki.materialization_report() as report:
        for materialize in (hki.materialize, jax.jit(lambda t: hki.materialize(t)["nested"])):
            assert not caught(materialize, {k: v for k, v in tree.items() if k != "flag"})
        out = hki.materialize(tree)
    assert report.count == 0 and out["flag"] is True
    np.testing.assert_array_equal(out["nested"], X)


def test_a_box_outside_any_wrapper_is_silent():
    with hki.materialization("error"), hki.materialization_report() as report:
        np.testing.assert_array_equal(hki.box(held()) + 1, X + 1)
    assert report.count == 0


def test_threads_do_not_mix():
    f = hki.use_implicit_args(lambda w: jnp.sin(w))
    kinds = [type(f"Held{i}", (Held,), {}) for i in range(4)]
    start, found = threading.Barrier(len(kinds), timeout=60), {}

    def work(i):
        policy = "error" if i % 2 else "allow"
        with hki.materialization(policy), hki.materialization_report() as report:
            start.wait()
            for _ in range(i + 1):
                try:
                    f(kinds[i](X))
                    outcome = "fine"
                except hki.MaterializationError:
                    outcome = "raised"
            start.wait()
        found[i] = (outcome, report.count, {e.type_name for e, _ in report})

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(kinds))]
    with hki.materialization_report() as mine:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {
        i: ("raised" if i % 2 else "fine", i + 1, {f"Held{i}"}) for i in range(len(kinds))
    }
    assert mine.count == 0


def test_a_new_thread_starts_with_the_default_policy_and_a_copied_context_with_its_own():
    f, outcomes = hki.use_implicit_args(lambda w: jnp.sin(w)), []

    def work():
        try:
            f(Quiet(X))
            outcomes.append("fine")
        except hki.MaterializationError:
            outcomes.append("raised")

    with hki.materialization("error"):
        plain = threading.Thread(target=contextvars.Context().run, args=(work,))
        copied = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    for thread in (plain, copied):
        thread.start()
        thread.join()
    assert outcomes == ["fine", "raised"]


def test_an_error_inside_leaves_nothing_behind():
    def fails(w):
        jnp.sin(w)
        raise KeyError

    inner = jax.jit(fails)
    for fun in (fails, lambda w: inner(w)):
        with pytest.raises(KeyError):
            hki.use_implicit_args(fun)(held())
    rule_type = type("Held", (Held,), {})

    @hki.primitive_handler("neg")
    def rule(primitive, x: rule_type, **params):
        raise KeyError

    with pytest.raises(KeyError):
        hki.use_implicit_args(jax.jit(jax.lax.neg))(rule_type(X))
    assert report_of(hki.use_implicit_args(jnp.sin), held()).count == 1


def test_the_file_is_the_one_that_calls_where_a_library_wrote_the_function():
    (event,) = [e for e, _ in report_of(hki.use_implicit_args(jax.nn.sigmoid), held())]
    assert event.file == __file__ and event.line == line_of("fun(*args)", report_of)
    assert sys.modules[Held.__module__].__file__ == event.file
