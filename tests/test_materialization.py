"""Materialization: policy, warning, report, and that caches do not swallow any of it."""

import contextvars
import dataclasses
import inspect
import threading
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haiku_implicit as hki
from tests.cases import Diagonal, Outer

use = hki.use_implicit_args
W = Outer(jnp.arange(3.0), jnp.ones(4))


@dataclasses.dataclass
class Quiet(hki.ImplicitArray, warn_on_materialize=False):
    """Not worth a warning."""

    x: jax.Array

    def materialize(self):
        return self.x * 1


def caught(fun, *args):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        fun(*args)
    return [w for w in found if issubclass(w.category, hki.MaterializationWarning)]


def line():
    """The number of the line that calls this."""
    return inspect.currentframe().f_back.f_lineno


# --- names of parameters --------------------------------------------------------------------------------


@hk.without_apply_rng
@hk.transform
def two_tables(x, names=("table",)):
    def in_module(x):
        return x + sum(
            jnp.cumsum(hk.get_parameter(n, [8, 4], init=jnp.ones), 0)[: len(x)] for n in names
        )

    return hk.to_module(in_module)("two")(in_module(x)) if len(names) == 1 else in_module(x)


@pytest.mark.parametrize(
    "names, targets, expected",
    [
        (["table"], "two/.*", "(probably two/table) was"),
        (["table"], ".*", "(probably ~/table) was"),
        (["a", "b"], ".*", "(probably one of ~/a, ~/b) was"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_message_names_the_parameter_and_the_way_out(names, targets, expected, wrap):
    x, names = jnp.ones((2, 4)), tuple(names)
    params = hki.add_lora(two_tables.init(None, x, names), 0, rank=1, targets=targets)
    apply = hki.transform_implicit(two_tables).apply
    with hki.materialization("error"), pytest.raises(hki.MaterializationError) as error:
        wrap(lambda p, x: apply(p, x, names))(params, x)
    assert expected in str(error.value)
    only = expected.partition("probably ")[2].partition(")")[0]
    way_out = "exclude= of" if "one of" in expected else f"exclude={only!r} of"
    assert f"or leave it dense by {way_out} the edit that made it implicit" in str(error.value)


class Made(hk.Module):
    """Has a parameter that the constructor makes, and a method of another name than `__call__`."""

    def __init__(self, name):
        super().__init__(name=name)
        self.w = hk.get_parameter("w", [4, 4], init=jnp.ones)

    def sorted(self, x):
        return x @ jnp.sort(self.w)


class MadeOfParts(hk.Module):
    def __init__(self):
        super().__init__(name="outer")
        self.parts = [Made(name) for name in ("a", "b")]

    def __call__(self, x):
        return self.parts[1].sorted(x)


def test_the_message_names_a_parameter_that_the_constructor_made():
    model, x = hk.without_apply_rng(hk.transform(lambda x: MadeOfParts()(x))), jnp.ones((2, 4))
    params = hki.add_lora(model.init(None, x), 0, rank=1)
    with hki.materialization("error"), pytest.raises(hki.MaterializationError) as error:
        hki.transform_implicit(model).apply(params, x)
    assert "(probably outer/~/b/w) was" in str(error.value)


def test_the_message_names_the_parameter_that_holds_the_array():
    """Trellis codes with scales, which have no rule for `split` along their sequences."""
    weight = lambda: hk.get_parameter("w", [64, 64], init=jnp.ones)  # noqa: E731
    model = hk.without_apply_rng(hk.transform(lambda x: x @ jnp.split(weight(), 2, 1)[0]))
    codes = hki.TrellisMatrix(jnp.zeros((64, 12), jnp.uint16), 64, 3)
    params = {"~": {"w": hki.ScaledMatrix(codes, jnp.ones(64), -1)}}
    with hki.materialization("error"), pytest.raises(hki.MaterializationError) as error:
        hki.transform_implicit(model).apply(params, jnp.ones((1, 64)))
    assert str(error.value).startswith("TrellisMatrix float32[64,64] (probably ~/w) was")
    assert "leave it dense by exclude='~/w' of" in str(error.value)


def test_the_message_of_what_is_made_from_a_parameter():
    """A table of positions with LoRA, added to the inputs, makes each weight dense after it."""

    @hk.without_apply_rng
    @hk.transform
    def model(x):
        return hk.Linear(8)(x + hk.get_parameter("table", [16, 8], init=jnp.ones)[: len(x)])

    x = jnp.ones((4, 8))
    params = hki.add_lora(model.init(jax.random.key(0), x), 0, rank=1, targets=".*/(w|table)")
    params = jax.tree.map(lambda x: x + 0.1, params)
    with hki.materialization("allow"), hki.materialization_report() as report:
        found = hki.transform_implicit(model).apply(params, x)
    assert [event.shape for event, _ in report] == [(4, 8), (8, 8)]
    np.testing.assert_allclose(found, model.apply(hki.materialize(params), x), rtol=1e-5)
    message = "leave the parameter that it is made from dense by exclude= of"
    with hki.materialization("error"), pytest.raises(hki.MaterializationError, match=message):
        hki.transform_implicit(model).apply(params, x)


# --- policy ---------------------------------------------------------------------------------------------


def test_a_warning_is_the_default():
    with pytest.warns(hki.MaterializationWarning):
        use(jnp.sin)(W)


def test_categories():
    assert issubclass(hki.MaterializationWarning, UserWarning)
    assert issubclass(hki.MaterializationError, Exception)
    assert not issubclass(hki.MaterializationError, Warning)


def test_allow():
    with hki.materialization("allow"):
        assert not caught(use(jnp.sin), W)


def test_error():
    with (
        hki.materialization("error"),
        pytest.raises(hki.MaterializationError, match="Outer.*'sin'"),
    ):
        use(jnp.sin)(W)


def test_the_same_text_as_warning_and_as_error():
    def f(w):
        return jnp.cos(w)

    [warning] = caught(use(f), W)
    with hki.materialization("error"), pytest.raises(hki.MaterializationError) as error:
        use(f)(W)
    assert str(warning.message) == str(error.value)


def test_a_type_that_refuses_is_told_who_asked(may_be_dense):
    @dataclasses.dataclass
    class Refusing(Quiet):
        default_shape, default_dtype = (3,), jnp.float32

        def materialize(self):
            raise ValueError("it has units")

    def f(w):
        return jnp.cos(w), line()

    for fun in (f, jax.jit(f)):
        with pytest.raises(ValueError, match="it has units") as error:
            use(fun)(Refusing(jnp.ones(3)))
        where = f"{__file__}:{f.__code__.co_firstlineno + 1}"
        note = f"Refusing was to be materialized, because no rule handles it in 'cos' ({where})."
        assert note in error.value.__notes__


def test_policies_nest_and_end():
    with hki.materialization("error"):
        with hki.materialization("allow"):
            use(jnp.sin)(W)
        with pytest.raises(hki.MaterializationError):
            use(jnp.sin)(W)
        with pytest.raises(ZeroDivisionError), hki.materialization("allow"):
            1 / 0  # noqa: B018
        with pytest.raises(hki.MaterializationError):
            use(jnp.sin)(W)
    assert caught(use(lambda w: jnp.sin(w)), W)


def test_an_unknown_policy():
    with pytest.raises(ValueError, match="policy: expected one of allow, warn, error, got 'raise'"):
        hki.materialization("raise").__enter__()


def test_a_policy_is_of_its_thread():
    found = []

    def run():
        with hki.materialization_report() as report:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use(jnp.sin)(W)
        found.append(report.count)

    with hki.materialization("error"), hki.materialization_report() as mine:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [1] and mine.count == 0


def test_what_is_asked_for_by_name_is_no_event():
    with hki.materialization("error"), hki.materialization_report() as report:
        hki.materialize({"w": W})
        W.materialize()
        hki.box(W)
        jax.jit(hki.materialize)(W)
    assert report.count == 0


def test_what_a_rule_handles_is_no_event():
    with hki.materialization("error"):
        use(lambda w: (-w).T)(W)


def test_what_is_only_handed_on_is_no_event():
    with hki.materialization("error"):
        use(lambda w: (w, {"again": w}))(W)


# --- per class --------------------------------------------------------------------------------------------


def test_a_class_that_is_not_worth_a_warning():
    w = Quiet(jnp.ones(3))
    assert not caught(use(jnp.sin), w)
    with hki.materialization_report() as report:
        use(jnp.sin)(w)
    assert report.count == 1
    with hki.materialization("error"), pytest.raises(hki.MaterializationError):
        use(jnp.sin)(w)


def test_the_class_keyword_is_inherited():
    class Child(Quiet):
        pass

    class Loud(Quiet, warn_on_materialize=True):
        pass

    assert not caught(use(jnp.sin), Child(jnp.ones(3)))
    assert caught(use(jnp.sin), Loud(jnp.ones(3)))


# --- what the warning says ----------------------------------------------------------------------------------


def test_the_warning_names_primitive_type_shape_and_line():
    def f(w):
        return jnp.tan(w), line()

    [warning] = caught(use(f), W)
    at = use(f)(W)[1]
    assert (warning.filename, warning.lineno) == (__file__, at)
    text = str(warning.message)
    for part in ("Outer", "float32[3,4]", "'tan'", f"{__file__}:{at}", "48 bytes", "primitive_handler",
                 "`with haiku_implicit.materialization('allow'):`"):  # fmt: skip
        assert part in text, part
    assert "module" not in text


def helper(w):
    return jnp.sinh(w)


def test_the_line_is_the_innermost_of_the_user():
    [warning] = caught(use(lambda w: helper(w)), W)
    assert warning.lineno == inspect.getsourcelines(helper)[1] + 1


@pytest.mark.parametrize(
    "way",
    [
        jax.jit,
        jax.checkpoint,
        jax.named_call,
        lambda f: lambda w: lax.cond(True, f, f, w),
        lambda f: lambda w: lax.scan(lambda c, _: (c, f(w)), 0, None, length=2)[1],
        lambda f: lambda w: jax.vmap(lambda _: f(w))(jnp.ones(2)),
        lambda f: lambda w: jax.grad(lambda w: jnp.sum(f(w)))(w),
        lambda f: (
            lambda w: lax.while_loop(lambda c: c[0, 0] > 1, lambda c: c + f(w), jnp.ones((3, 4)))
        ),
    ],
    ids=["jit", "remat", "named_call", "cond", "scan", "vmap", "grad", "while"],
)
def test_the_line_is_found_from_within_every_call(way):
    def fun(w):
        return jnp.tanh(w) * 2

    found = caught(use(way(fun)), W)
    assert found
    assert {(w.filename, w.lineno) for w in found} == {
        (__file__, inspect.getsourcelines(fun)[1] + 1)
    }


def test_two_calls_of_one_function_of_jax_are_two_places():
    """`jnp.clip` is traced once; its jaxpr knows the line of the first caller only."""

    def first(w):
        return jnp.clip(w, 0, 1)

    def second(w):
        return jnp.clip(w, 0, 1)

    for f in (first, second, first):
        found = caught(use(lambda w, f=f: f(w)), W)
        assert {w.lineno for w in found} == {inspect.getsourcelines(f)[1] + 1}


def test_the_warning_names_the_haiku_module():
    class Block(hk.Module):
        def __call__(self, x):
            w = hk.get_parameter("w", (3, 4), init=jnp.zeros)
            return x @ jnp.sin(w)

    def model(x):
        return hk.Sequential([Block(name="first")], name="stack")(x)

    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    x = jnp.ones((2, 3))
    params = {name: {"w": W} for name in t.init(jax.random.key(0), x)}
    [warning] = [w for w in caught(t.apply, params, x) if "'sin'" in str(w.message)]
    assert "in module " in str(warning.message)
    assert "first" in str(warning.message).split("in module ")[1]
    assert warning.filename == __file__


# --- once for a place ---------------------------------------------------------------------------------------


def test_once_for_a_place():
    def f(w):
        a = [jnp.arctan(w) for _ in range(3)]
        return a, jnp.arctan(w)

    found = caught(lambda: (use(f)(W), use(f)(W), jax.jit(use(f))(W)))
    assert len(found) == 2
    assert found[0].lineno != found[1].lineno


def test_another_type_or_primitive_in_a_line_is_another_place():
    def f(w):
        return jnp.arcsin(w), jnp.arccos(w)

    found = caught(lambda: (use(f)(W), use(f)(Diagonal(jnp.ones(3))), use(f)(W)))
    assert len(found) == 4


def test_once_for_a_place_whatever_the_module():
    def f(w):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                w2 = jnp.arcsinh(w)
        return w2

    assert len(caught(use(f), W)) == 1


def test_as_often_as_the_filter_wants():
    def f(w):
        return [jnp.arccosh(w) for _ in range(3)]

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        use(f)(W)
    assert len(found) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", hki.MaterializationWarning)
        with pytest.raises(hki.MaterializationWarning):
            use(f)(W)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore", hki.MaterializationWarning)
        use(f)(W)
    assert not found


# --- reports ------------------------------------------------------------------------------------------------


def report_of(fun, *args):
    with hki.materialization("allow"), hki.materialization_report() as report:
        fun(*args)
    return report


def test_an_empty_report():
    report = report_of(use(lambda w: -w), W)
    assert (len(report), report.count, report.nbytes, list(report)) == (0, 0, 0, [])
    assert str(report) == "nothing was materialized"


def test_a_report_counts_places_and_bytes():
    def f(w, d):
        for _ in range(3):
            y = jnp.sin(w)
        return y, jnp.cos(d)

    report = report_of(use(f), W, Diagonal(jnp.ones(2)))
    assert (len(report), report.count, report.nbytes) == (2, 4, 3 * 48 + 16)
    by_type = {event.type_name: (event, count) for event, count in report}
    event, count = by_type["Outer"]
    assert count == 3
    assert (event.primitive, event.shape, event.dtype, event.nbytes) == (
        "sin",
        (3, 4),
        "float32",
        48,
    )
    assert event.file == __file__


def test_a_report_is_a_table():
    def f(w, d):
        with jax.named_scope("mlp"), jax.named_scope("linear"):
            y = jnp.sin(w)
        return y, jnp.sin(w), jnp.cos(d)

    lines = str(report_of(use(f), W, Diagonal(jnp.ones(2)))).split("\n")
    header, *rows, total = lines
    assert header.split() == ["count", "bytes", "type", "dense", "primitive", "module", "line"]
    assert rows[0].split()[:6] == ["1", "48", "Outer", "float32[3,4]", "sin", "mlp/linear"]
    assert rows[2].split()[:6] == ["1", "16", "Diagonal", "float32[2,2]", "cos", "-"]
    assert rows[0].split()[6].startswith("test_materialization.py:")
    assert total.split() == ["3", "112", "all"]
    columns = [header.index(word) for word in header.split()]
    assert all(row[c] != " " and (c == 0 or row[c - 1] == " ") for row in rows for c in columns)


def test_reports_nest():
    with hki.materialization("allow"), hki.materialization_report() as outer:
        use(jnp.sin)(W)
        with hki.materialization_report() as inner:
            use(jnp.cos)(W)
        use(jnp.sin)(W)
    assert (outer.count, inner.count) == (3, 1)


def test_a_report_does_not_change_the_policy():
    with hki.materialization_report() as report:
        assert caught(use(lambda w: jnp.log1p(w)), W)
    assert report.count == 1
    with hki.materialization("error"), hki.materialization_report() as report:
        with pytest.raises(hki.MaterializationError):
            use(jnp.sin)(W)
    assert report.count == 1


def test_a_nested_array_is_one_event():
    nested = hki.LoRA(Outer(jnp.ones(3), jnp.ones(4)), jnp.ones((3, 1)), jnp.ones((1, 4)))
    report = report_of(use(jnp.sin), nested)
    assert [(e.type_name, n) for e, n in report] == [("LoRA", 1)]


def test_an_inner_array_that_a_rule_does_not_handle_is_an_event():
    nested = hki.LoRA(Diagonal(jnp.ones(3)), jnp.ones((3, 1)), jnp.ones((1, 3)))
    report = report_of(use(lambda w, x: x @ w), nested, jnp.ones((2, 3)))
    assert [(e.type_name, e.primitive) for e, _ in report] == [("Diagonal", "dot_general")]


# --- caches ---------------------------------------------------------------------------------------------------


SUB_JAXPRS = {
    "jit": jax.jit(lambda w: jnp.sin(w)),
    "jit of jit": jax.jit(lambda w: jax.jit(lambda w: jnp.sin(w))(w)),
    "remat": jax.checkpoint(lambda w: jnp.sin(w)),
    "scan": lambda w: lax.scan(lambda c, _: (c, jnp.sin(w)), 0, None, length=2)[1],
    "while": lambda w: lax.while_loop(lambda c: c.sum() < -1, lambda c: c + jnp.sin(w), jnp.ones((3, 4))),
    "condition": lambda w: lax.while_loop(lambda c: (jnp.sin(w) * c > 9).all(), lambda c: c, jnp.ones((3, 4))),
    "cond": lambda w: lax.cond(True, lambda w: jnp.sin(w), lambda w: jnp.ones((3, 4)), w),
    "relu": jax.nn.relu,
    "linear solve": lambda w: lax.custom_linear_solve(
        lambda y: y + 0 * jnp.sin(w).sum(), jnp.ones(3), lambda _, b: b, lambda _, b: b
    ),
    "result of a branch": lambda w: lax.cond(True, lambda w: w, lambda w: jnp.ones((3, 4)), w),
    "carry": lambda w: lax.fori_loop(0, 2, lambda i, c: c + 1, w),
}  # fmt: skip


@pytest.mark.parametrize("name", SUB_JAXPRS)
def test_events_are_delivered_again_from_a_cached_trace(name):
    f = SUB_JAXPRS[name]
    counts = [report_of(use(f), W).count for _ in range(3)]
    assert counts[0] > 0
    assert counts == counts[:1] * 3
    with hki.materialization("error"), pytest.raises(hki.MaterializationError):
        use(f)(W)
    assert caught(use(f), W)
    with hki.materialization("error"):
        use(f)(jnp.ones((3, 4)))


@pytest.mark.parametrize("name", SUB_JAXPRS)
def test_an_error_does_not_spoil_the_cache(name):
    f = SUB_JAXPRS[name]
    with hki.materialization("error"), pytest.raises(hki.MaterializationError):
        use(f)(W + 0 if False else W)
    with hki.materialization("allow"):
        for got, want in zip(
            jax.tree.leaves(use(f)(W)), jax.tree.leaves(f(hki.materialize(W))), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_events_of_a_jitted_function_used_often():
    block = jax.jit(lambda w: jnp.sin(w))
    report = report_of(use(lambda w: [block(w) for _ in range(5)]), W)
    assert report.count == 5


def test_names_of_modules_come_from_each_use():
    @jax.jit
    def block(w):
        with jax.named_scope("inner"):
            return jnp.sin(w)

    def f(w):
        for name in ("one", "two"):
            with jax.named_scope(name):
                y = block(w)
        return y

    report = report_of(use(f), W)
    modules = sorted(event.module for event, _ in report)
    assert [m.split("/")[0] for m in modules] == ["one", "two"]
    assert all(m.endswith("inner") for m in modules)


def test_an_outer_jit_that_was_traced_before_is_silent():
    """Documented: the policy acts where functions are traced."""
    f = jax.jit(use(lambda w: jnp.sin(w)))
    with hki.materialization("allow"):
        f(W)
    with hki.materialization("error"):
        f(W)


def test_transform_implicit_reports_on_every_call():
    def model(x):
        return x @ jnp.sin(hk.get_parameter("w", (3, 4), init=jnp.zeros))

    t = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    params, x = {"~": {"w": W}}, jnp.ones((2, 3))
    assert [report_of(t.apply, params, x).count for _ in range(3)] == [1, 1, 1]
    with hki.materialization("error"), pytest.raises(hki.MaterializationError):
        t.apply(params, x)


# --- places, counts and contexts, with a type that has no rule ------------------------------------------


X = jnp.arange(6.0).reshape(2, 3)


@dataclasses.dataclass
class Held(hki.ImplicitArray):
    """A type without rules."""

    x: hki.ArrayValue

    def materialize(self):
        return self.x


def held(x=X):
    """An array of a new type, which no cache knows."""
    return type("Held", (Held,), {})(x)


def line_of(text, function):
    """The number of the first line of this file, within a function, that has a text."""
    lines, start = inspect.getsourcelines(function)
    return next(start + i for i, line in enumerate(lines) if text in line)


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
        assert found == {("net/a", "sin", line), ("net/b", "sin", line)}
    (warning,) = caught(wrapped.apply, params, X)
    assert "in module net/a" in str(warning.message) and warning.lineno == line


def test_a_module_has_one_row_whatever_transforms_it():
    class Net(hk.Module):
        def __call__(self, x):
            w = hk.get_parameter("w", (3, 3), init=jnp.ones)
            with jax.named_scope("a/b"):
                return jnp.sum(x @ jnp.sin(w))

    model = hk.without_apply_rng(hk.transform(lambda x: Net(name="net")(x)))
    params = {"net": {"w": Held(jnp.ones((3, 3)))}}
    apply, rows = hki.transform_implicit(model).apply, jnp.ones((2, 3))
    inside = lambda fun: hki.use_implicit_args(lambda p, x: fun(model.apply, p, x))  # noqa: E731
    with hki.materialization_report() as report:
        for fun in (
            apply,
            jax.jit(apply),
            jax.grad(apply),
            jax.vmap(jax.grad(apply, 1), (None, 0)),
            jax.jit(jax.checkpoint(jax.grad(apply))),
            inside(lambda f, p, x: jax.grad(f, 1)(p, x)),
            inside(lambda f, p, x: jax.vmap(jax.grad(f, 1), (None, 0))(p, x)),
            inside(lambda f, p, x: jax.jvp(jax.jit(lambda x: jax.jit(f)(p, x)), (x,), (x,))),
        ):
            fun(params, rows)
    assert {e.module for e, _ in report} == {"net/a/b"}


def test_the_file_is_the_one_that_calls_where_a_library_wrote_the_function():
    (event,) = [e for e, _ in report_of(hki.use_implicit_args(jax.nn.sigmoid), held())]
    assert event.file == __file__ and event.line == line_of("fun(*args)", report_of)


def test_a_report_counts_under_every_policy():
    f = hki.use_implicit_args(lambda w: jnp.sin(w))
    with hki.materialization_report() as report:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f(held())
        with hki.materialization("error"), pytest.raises(hki.MaterializationError):
            f(held())
    assert report.count == 2


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


def test_transformations_count_what_they_trace():
    f = hki.use_implicit_args(lambda w: jnp.sin(w).sum())
    assert report_of(jax.grad(f), held()).count == 1
    assert report_of(jax.vmap(f), held()).count == 1
    assert report_of(jax.eval_shape, f, held()).count == 1
    assert report_of(jax.make_jaxpr(f), held()).count == 1


def test_a_box_outside_any_wrapper_is_silent():
    with hki.materialization("error"), hki.materialization_report() as report:
        np.testing.assert_array_equal(hki.box(held()) + 1, X + 1)
    assert report.count == 0


def test_a_new_thread_starts_with_the_default_policy_and_a_copied_context_with_its_own():
    f, outcomes = hki.use_implicit_args(lambda w: jnp.sin(w)), []

    def work():
        try:
            f(Quiet(X))
            outcomes.append("fine")
        except hki.MaterializationError:
            outcomes.append("raised")

    with hki.materialization("error"), hki.materialization_report() as report:
        plain = threading.Thread(target=contextvars.Context().run, args=(work,))
        copied = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    for thread, count in ((plain, 0), (copied, 1)):
        thread.start()
        thread.join()
        assert report.count == count
    assert outcomes == ["fine", "raised"]


def test_an_error_of_a_rule_says_once_where_it_was():
    @dataclasses.dataclass
    class Fails(Outer):
        pass

    @hki.primitive_handler("sinh")
    def rule(primitive, x: Fails, **params):
        error = ValueError("too large")
        error.add_note("a note of the rule")
        raise error

    inner = jax.jit(lambda w: jnp.sinh(w))  # the sinh
    own = line_of("# the sinh", test_an_error_of_a_rule_says_once_where_it_was)
    # JAX keeps its own functions with the first place they are called at.
    jnp.sinh(jnp.ones((3, 2)))
    w = Fails(jnp.ones(3), jnp.ones(2))
    for fun in (inner, jax.checkpoint(inner), lambda w: lax.cond(True, inner, inner, w)):
        model = hk.transform(lambda w, fun=fun: hk.to_module(fun)("layer")(w))
        for apply in (hki.transform_implicit(model).apply, hki.use_implicit_args(model.apply)):
            with pytest.raises(ValueError, match="too large") as caught:
                apply({}, None, w)
            assert [note for note in caught.value.__notes__ if "JAX" not in note] == [
                "a note of the rule",
                f"This was in the model's 'sinh', {__file__}:{own}, in module layer",
            ]
    with pytest.raises(ValueError, match="too large") as caught:
        hki.use_implicit_args(jnp.sinh)(w)
    # The traceback has the line.
    assert any(n.startswith("This was in the model's 'sinh'") for n in caught.value.__notes__)


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
