"""`auto_jit` against the plain function and `jax.jit`; traces count the compilations."""

import dataclasses
import functools
import gc
import logging
import operator
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.cases import CASES
from tests.random_arrays import normal


def counted(fun, **options):
    """`auto_jit` of a function, and the list that gets an entry whenever it is traced."""
    traces = []

    @functools.wraps(fun)
    def traced(*args, **kwargs):
        traces.append(None)
        return fun(*args, **kwargs)

    return hki.auto_jit(traced, **options), traces


def linear(w, problem, *, shifted=True, activation="tanh"):
    y = problem["x"] @ w
    if shifted:
        y = y + problem["b"] * problem["gain"]
    return getattr(jnp, activation)(problem["after"](y))


run_linear = hki.use_implicit_args(linear)


def problem_of(seed=0, **changes):
    x = normal((2, 4), seed)
    return {"x": x, "b": np.ones(4, np.float32), "gain": 2.0, "after": jnp.abs, **changes}


@pytest.mark.parametrize("name", ["lora of int4", "zeros"])
def test_arrays_are_traced_and_everything_else_is_static(name):
    w, dense = CASES[name](0), hki.materialize(CASES[name](0))
    f, traces = counted(run_linear)
    for seed in range(3):  # other values: nothing is compiled again
        problem = problem_of(seed)
        problem["b"] = problem["b"] + seed
        np.testing.assert_allclose(f(w, problem), linear(dense, problem), rtol=1e-5, atol=1e-6)
    assert len(traces) == 1
    for kwargs in (
        {"shifted": False},
        {"activation": "sin"},
        {"shifted": False, "activation": "sin"},
    ):
        for _ in range(2):
            want = linear(dense, problem, **kwargs)
            got = hki.materialize(f(w, problem, **kwargs))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert len(traces) == 4
    for change in ({"gain": 3.0}, {"after": jnp.negative}, {"x": problem["x"][:1]}):
        other = problem_of(**change)
        np.testing.assert_allclose(f(w, other), linear(dense, other), rtol=1e-5, atol=1e-6)
    assert len(traces) == 7
    f(CASES[name](1), problem)
    assert len(traces) == 7


def test_under_grad_vmap_and_jit_of_jit():
    w, problem = CASES["lora"](0), problem_of()
    f, traces = counted(lambda w, problem, **kwargs: run_linear(w, problem, **kwargs).sum())
    plain = lambda w: run_linear(w, problem, activation="sin").sum()  # noqa: E731
    ours = lambda w: f(w, problem, activation="sin")  # noqa: E731
    want = jax.grad(plain)(w)
    for got in (jax.grad(ours)(w), jax.jit(jax.grad(ours))(w), jax.grad(jax.jit(ours))(w)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    twice = hki.auto_jit(lambda w, how: f(w, problem, activation=how))
    np.testing.assert_allclose(twice(w, "sin"), plain(w), rtol=1e-5)
    axes = ({**dict.fromkeys(problem), "x": 0},)
    mapped = jax.vmap(lambda p: f(w, p, activation="sin"), axes)(problem)
    rows = [run_linear(w, {**problem, "x": x}, activation="sin").sum() for x in problem["x"]]
    np.testing.assert_allclose(mapped, jnp.stack(rows), rtol=1e-5, atol=1e-6)
    assert f.cache_info().currsize == 1


def test_static_values_that_are_equal_in_python_and_differ_are_told_apart():
    f, traces = counted(lambda x, n: x * n if type(n) is not float else jnp.copysign(x, n))
    x = jnp.ones(2, jnp.int32)
    assert f(x, 1).dtype == jnp.int32
    assert f(x, True).dtype == jnp.int32
    assert f(jnp.ones(()), 0.0) == 1 and f(jnp.ones(()), -0.0) == -1
    f(x, float("nan")), f(x, float("nan"))
    assert len(traces) == 5


def test_numbers_that_change_often_are_given_as_arrays():
    f, traces = counted(lambda x, rate: x * rate)
    for rate in (0.5, 0.25, 0.125):
        np.testing.assert_allclose(f(2.0, np.float32(rate)), 2 * rate)
        np.testing.assert_allclose(f(2.0, jnp.float32(rate)), 2 * rate)
    assert len(traces) == 1


def test_the_cache_is_bounded_and_drops_what_was_not_used_for_longest():
    f, traces = counted(lambda x, name: getattr(jnp, name)(x), cache_size=2)
    x = jnp.ones(2)
    for name in ("sin", "cos", "sin", "tan", "sin"):
        np.testing.assert_allclose(f(x, name), getattr(jnp, name)(x), rtol=1e-6)
    assert len(traces) == 3 and f.cache_info().currsize == 2
    f(x, "cos")
    assert len(traces) == 4


def test_as_a_decorator_with_options():
    @hki.auto_jit(cache_size=1)
    def scaled(x, *rest, by):
        """Says what it does."""
        return x * by + sum(rest)

    assert scaled.__name__ == "scaled" and scaled.__doc__ == "Says what it does."
    assert scaled(jnp.ones(()), jnp.ones(()), 2, by=3) == 6
    with pytest.raises(ValueError, match="cache_size must be .* got 0"):
        hki.auto_jit(scaled, cache_size=0)


# --- methods, and objects ---------------------------------------------------------------------------


@hki.use_implicit_args
def affine(x, params):
    return x @ params["w"] + params["b"]


class Model:
    def __init__(self, weight, activation="tanh"):
        self.params = {"w": weight, "b": jnp.zeros(4)}
        self.activation, self.scale = activation, np.float32(1)

    def plain(self, x, train=False):
        y = affine(x, self.params)
        return getattr(jnp, self.activation)(y) * self.scale + (1.0 if train else 0.0)

    step = hki.auto_jit(plain)

    @hki.auto_jit
    def __call__(self, x):
        return self.plain(x)


def check_sees_changes(model, step):
    """Compares a compiled method with the plain one while the object changes."""
    x = normal((2, 4), 1)
    changes = [
        lambda: None,
        lambda: model.params.update(w=CASES["lora of int4"](3)),
        lambda: model.params.update(b=jnp.ones(4)),
        lambda: setattr(model, "scale", np.float32(2)),
        lambda: setattr(model, "activation", "sin"),
        lambda: model.params.update(w=CASES["zeros"](3)),
    ]
    for change in changes:
        change()
        np.testing.assert_allclose(step(x), model.plain(x), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            step(x, train=True), model.plain(x, train=True), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("how", ["decorated", "bound", "argument"])
def test_methods_see_changed_attributes(how):
    model = Model(CASES["lora of int4"](0))
    steps = {
        "decorated": lambda: model.step,
        "bound": lambda: hki.auto_jit(model.plain),
        "argument": lambda: functools.partial(
            hki.auto_jit(lambda f, *a, **k: f(*a, **k)), model.plain
        ),
    }
    check_sees_changes(model, steps[how]())


def test_new_values_in_attributes_compile_nothing():
    model = Model(CASES["lora"](0))
    f = hki.auto_jit(model.plain)
    for seed in range(3):
        model.params["w"], model.scale = CASES["lora"](seed), np.float32(seed)
        np.testing.assert_allclose(f(jnp.ones((2, 4))), model.plain(jnp.ones((2, 4))), rtol=1e-5)
    assert f.cache_info().currsize == 1


def test_gradients_of_what_an_object_holds():
    def loss(w):
        return Model(w).step(jnp.ones((2, 4))).sum()

    def plain(w):
        return Model(w).plain(jnp.ones((2, 4))).sum()

    w = CASES["lora"](0)
    got, want = jax.jit(jax.grad(loss))(w), jax.grad(plain)(w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_callable_objects_and_callable_pytrees():
    model = Model(CASES["lora"](0))
    want = model.plain(jnp.ones((2, 4)))
    np.testing.assert_allclose(model(jnp.ones((2, 4))), want, rtol=1e-5)
    np.testing.assert_allclose(hki.auto_jit(model)(jnp.ones((2, 4))), want, rtol=1e-5)
    dot = hki.use_implicit_args(jnp.dot)
    f, traces = counted(lambda g, x: g(x))
    for seed in range(2):
        x, w = normal((4, 4), seed), CASES["lora"](seed)
        np.testing.assert_allclose(f(jax.tree_util.Partial(dot, x), w), dot(x, w), rtol=1e-5)
    assert len(traces) == 1


def test_objects_are_told_apart_and_not_kept_alive():
    x = jnp.ones((2, 4))
    models = [Model(CASES["lora"](seed), act) for seed, act in enumerate(["tanh", "sin", "tanh"])]
    for model in models:
        np.testing.assert_allclose(model.step(x), model.plain(x), rtol=1e-5)
        np.testing.assert_allclose(hki.auto_jit(model.plain)(x), model.plain(x), rtol=1e-5)
        hki.auto_jit(lambda f: f(jnp.ones((2, 4))))(model.plain)
        model.compiled = hki.auto_jit(model.plain)
        model.compiled(x)
    references = [weakref.ref(model) for model in models]
    del model, models
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_functions_are_told_apart_and_not_kept_alive():
    f, traces = counted(lambda g, x: g(x))
    references = []
    for i in range(4):
        g = lambda x, i=i: x + i  # noqa: E731
        assert f(g, jnp.zeros(())) == i
        references.append(weakref.ref(g))
    assert len(traces) == 4
    del g
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


class Single(Model):
    """An object of which `copy.copy` makes no other."""

    def __copy__(self):
        return self


def test_an_object_that_is_its_own_copy_keeps_its_attributes():
    model = Single(CASES["lora"](0))
    weight = model.params["w"]
    np.testing.assert_allclose(
        model.step(jnp.ones((2, 4))), model.plain(jnp.ones((2, 4))), rtol=1e-5
    )
    assert model.params["w"] is weight


def test_objects_of_jax_and_python_are_static():
    f, traces = counted(lambda g, x, *others: g(x, x))
    others = (
        jax.devices()[0],
        threading.Lock(),
        logging.getLogger("a"),
        jax.sharding.PartitionSpec("x"),
    )
    functions = jnp.add, operator.add, jax.jit(jnp.add), functools.partial(jnp.where, True)
    for g in functions:
        for _ in range(2):
            np.testing.assert_allclose(f(g, jnp.ones(2), *others), g(jnp.ones(2), jnp.ones(2)))
    assert len(traces) == len(functions)


@dataclasses.dataclass
class Mutable:
    scale: jax.Array
    shift: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: int
    kind: str = "a"


def test_dataclasses():
    f, traces = counted(lambda x, config: x * config.scale + getattr(config, "shift", 0))
    config = Mutable(jnp.float32(2), 1)
    assert f(jnp.ones(()), config) == 3
    config.scale = jnp.float32(3)
    assert f(jnp.ones(()), config) == 4 and len(traces) == 1
    config.shift = 2
    assert f(jnp.ones(()), config) == 5 and len(traces) == 2
    for _ in range(2):
        assert f(jnp.ones(()), Frozen(4)) == 4  # equal ones are one
    assert len(traces) == 3
    # A frozen one with an array is not hashable.
    assert f(jnp.ones(()), Frozen(jnp.float32(5))) == 5
    tree = jax.tree_util.register_dataclass(Mutable, ["scale"], ["shift"])
    assert f(jnp.ones(()), tree(jnp.float32(2), 1)) == 3
    assert len(traces) == 5


def test_setting_attributes_is_an_error():
    class Counter:
        def __init__(self):
            self.count, self.history = 0, []

        @hki.auto_jit
        def add(self, x):
            self.count += 1
            return x

        @hki.auto_jit
        def append(self, x):
            self.history.append(x)
            return x

    for method, name in ((Counter().add, "count"), (Counter().append, "history")):
        with pytest.raises(TypeError, match=f"sets the attribute '{name}' of a Counter.*Return"):
            method(jnp.ones(2))


# --- errors -------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, config):
        self.config = config

    def run(self, x, **kwargs):
        return x


@pytest.mark.parametrize(
    "path, call",
    [
        ("problem/a/1: a set", lambda f: f(jnp.ones(2), {"a": [1, {2}]})),
        ("x: a ndarray", lambda f: f(np.array(["a", "b"]), None)),
        ("rest/1: a bytearray", lambda f: f(1, 2, 3, bytearray())),
        ("options/kind: a set", lambda f: f(1, 2, kind={3})),
        ("problem/0.config: a set", lambda f: f(1, [Holder({1})])),
        ("problem.config/1: a set", lambda f: f(1, Holder([1, {1}]))),
        ("self.config: a set", lambda f: hki.auto_jit(Holder({1}).run)(jnp.ones(2))),
    ],
)
def test_what_is_not_hashable_is_named(path, call):
    start, _, kind = path.partition(": ")
    with pytest.raises(TypeError, match=rf"^auto_jit: {start}\b.*{kind}"):
        call(hki.auto_jit(lambda x, problem, *rest, **options: x))


def test_a_call_that_does_not_fit_raises_as_the_function_does():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'problem'"):
        hki.auto_jit(linear)(jnp.ones(2))
