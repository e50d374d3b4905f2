"""Repeated eager calls of `transform_implicit`: which functions are traced once, and which again."""

import functools
import gc
import weakref

import cloudpickle
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.core import eager
from tests.haiku_models import RNG, X, noise, with_lora

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def linear(x):
    return hk.Linear(3, b_init=jnp.ones)(x)


class Counter:
    """A transformed function that counts how often its Python code runs."""

    def __init__(self, *inputs, cache=True, fun=linear):
        self.count = 0

        def counting(*args, **kwargs):
            self.count += 1
            return fun(*args, **kwargs)

        self.plain = hk.transform(fun)
        self.t = hki.transform_implicit(hk.transform(counting), cache=cache)
        self.params = with_lora(self.plain.init(RNG, X, *inputs))

    def __call__(self, *args, params=None, **kwargs):
        """Applies it, compares with the dense twin, and returns how often the code ran."""
        params, before = self.params if params is None else params, self.count
        out = self.t.apply(params, None, *args, **kwargs)
        dense = self.plain.apply(hki.materialize(params), None, *args, **kwargs)
        jax.tree.map(lambda a, b: close(a, b) if isinstance(b, jax.Array) else None, out, dense)
        return self.count - before


def test_repeated_calls_trace_once():
    f = Counter()
    assert [f(X), f(X + 1), f(2 * X, params=noise(f.params))] == [1, 0, 0]
    assert f(np.asarray(X)) == 0
    assert Counter(cache=False)(X) == 1
    f = Counter(cache=False)
    assert [f(X), f(X)] == [1, 1]
    count = f.count
    [f.t.init(seed, X) for seed in (RNG, RNG)]
    assert f.count == count + 2
    f = Counter()
    [f.t.init(key, X) for key in jax.random.split(RNG, 3)]
    assert f.count == 1


def test_what_is_traced_anew():
    f = Counter()
    f(X)
    assert f(X[:2]) == 1, "shape"
    assert f(X[:2].astype(jnp.bfloat16).astype(jnp.float32)) == 0
    assert f(X.astype(jnp.int32)) == 1, "dtype"
    assert f(X, params=hki.add_lora(hki.merge_lora(f.params), 0, rank=1)) == 1, "rank"
    assert f(X, params=hki.add_lora(hki.merge_lora(f.params), 0, rank=2)) == 0, "alpha"
    assert f(X, params=hki.merge_lora(f.params)) == 1, "dense"
    with jax.default_matmul_precision("highest"):
        assert f(X) == 1, "precision"
    with hki_enable_x64():
        assert f(X) == 1, "x64"
    assert f(X) == 0

    class Other(hki.LoRA):
        """No type that the pages list the rules of."""

    @hki.primitive_handler("erf_inv")
    def declines(primitive, x: Other, **params):
        return NotImplemented

    assert [f(X), f(X)] == [1, 0], "a new rule"


def hki_enable_x64():
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def test_weak_types_are_kept_apart():
    f = Counter(1.0, fun=lambda x, y: linear(x) * y)
    half = X.astype(jnp.bfloat16)
    weak, strong = jnp.asarray(2.0), jnp.float32(2.0)
    assert weak.weak_type and not strong.weak_type
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), f.params)
    assert f.t.apply(params, None, half, weak).dtype == jnp.bfloat16
    assert f.t.apply(params, None, half, strong).dtype == jnp.float32
    assert f.count == 2


def test_static_arguments():
    def scaled(x, scale, flag="no"):
        return linear(x) * scale, flag, scale

    f = Counter(1, fun=scaled)
    assert [f(X, 1), f(X, 1)] == [1, 0]
    assert [f(X, 1.0), f(X, True), f(X, 2)] == [1, 1, 1], "type and value"
    assert [f(X, 1, flag="yes"), f(X, 1, "yes"), f(X, 1, flag="yes")] == [1, 1, 0]
    out = f.t.apply(f.params, None, X, True, flag=None)
    assert out[1:] == (None, True)
    assert [f(X, float("nan")), f(X, float("nan"))] == [1, 0]
    zero, minus = (f.t.apply(f.params, None, jnp.ones((1, 4)), s)[0] for s in (0.0, -0.0))
    assert not np.array_equal(np.signbit(zero), np.signbit(minus))


class Mutable:
    scale = 1.0


class Unhashable(Mutable):
    __hash__ = None


@pytest.mark.parametrize("kind", [Mutable, Unhashable])
def test_objects_that_may_change_are_not_cached(kind):
    options = kind()
    f = Counter(options, fun=lambda x, options: linear(x) * options.scale)
    assert f(X, options) == 1
    options.scale = 3.0
    assert f(X, options) == 1


def test_functions_may_be_arguments():
    f = Counter(jnp.tanh, fun=lambda x, g: g(linear(x)))
    assert [f(X, jnp.tanh), f(X, jnp.tanh), f(X, jnp.sin)] == [1, 0, 1]


def test_policy_that_changes_is_noticed():
    f = Counter(fun=lambda x: hk.nets.MLP([5, 3])(x))
    f(X)
    half = jmp.get_policy("params=float32,compute=bfloat16,output=bfloat16")
    with hk.mixed_precision.push_policy(hk.Linear, half):
        assert [f.t.apply(f.params, None, X).dtype for _ in range(2)] == [jnp.bfloat16] * 2
    assert f.count == 2
    assert [f(X), f(X)] == [1, 0]


def test_within_another_transform_nothing_is_cached():
    """The outer function's getters act in the inner one."""
    f = Counter()
    scale = 1.0

    def outer(x):
        with hk.custom_getter(lambda next_getter, value, context: next_getter(value * scale)):
            return f.t.apply(f.params, None, x)

    t = hk.transform(outer)
    first = t.apply({}, None, X)
    scale = 2.0
    close(t.apply({}, None, X), 2 * first)


def test_transformations_and_closures_over_tracers():
    f = Counter()
    f(X)
    scale = 1.0
    g = hki.transform_implicit(hk.transform(lambda x: linear(x) * scale))

    def loss(s):
        nonlocal scale
        scale = s
        return g.apply(f.params, None, X).sum()

    dense = f.plain.apply(hki.materialize(f.params), None, X).sum()
    close(jax.grad(loss)(2.0), dense)
    close(jax.jit(loss)(3.0), 3 * dense)
    by_x = jax.grad(lambda x: f.t.apply(f.params, None, x).sum())(X)
    close(by_x, jnp.ones((6, 3)) @ hki.materialize(f.params)["linear"]["w"].T)
    with jax.disable_jit():
        assert f(X) == 1
    # Of concrete arrays within a trace.
    close(jax.jit(lambda s: s * f.t.apply(f.params, None, X).sum())(2.0), 2 * dense)


def test_constants_and_structures_of_results():
    table = np.arange(3.0, dtype=np.float32)

    def f(x):
        return {
            "y": linear(x) + table,
            "table": table,
            "name": "f",
            "none": None,
            "two": 2,
            "w": hk.get_params(),
        }

    plain = hk.transform(f)
    t = hki.transform_implicit(plain)
    params = with_lora(plain.init(RNG, X))
    for _ in range(2):
        out = t.apply(params, None, X)
        assert (out["name"], out["none"], out["two"]) == ("f", None, 2)
        assert type(out["two"]) is int
        assert isinstance(out["table"], jax.Array)
        close(out["y"], plain.apply(hki.materialize(params), None, X)["y"])
        jax.tree.map(close, out["w"], params)


def test_materializations_are_counted_in_every_call():
    f = Counter(fun=lambda x: jnp.sin(hk.get_parameter("w", (4, 3), init=jnp.ones)).sum() * x)
    with hki.materialization("allow"), hki.materialization_report() as report:
        [f(X) for _ in range(3)]
    assert report.count == 3
    assert f.count == 1
    with hki.materialization("error"), pytest.raises(hki.MaterializationError, match=r"'sin'"):
        f(X)


def test_effects_happen_in_every_call(capfd):
    def f(x):
        jax.debug.print("sum {}", x.sum())
        return linear(x)

    t = hki.transform_implicit(hk.transform(f))
    params = with_lora(t.init(RNG, X))
    jax.effects_barrier()
    capfd.readouterr()
    for i in range(3):
        t.apply(params, None, jnp.full((1, 4), i))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n") == ["sum 0", "sum 4", "sum 8", ""]


def test_the_cache_dies_with_the_function_and_is_bounded():
    t = hki.transform_implicit(hk.transform(lambda x, n: linear(x) * n))
    params = with_lora(t.init(RNG, X, 0))
    alive = weakref.ref(t.apply)
    for n in range(3):
        t.apply(params, None, X, n)
    del t
    gc.collect()
    assert alive() is None


def test_the_program_that_was_not_used_for_longest_is_forgotten(monkeypatch):
    monkeypatch.setattr(eager, "_MAX_ENTRIES", 2)
    f = Counter(0, fun=lambda x, n: linear(x) * n)
    assert [f(X, n) for n in (1, 2, 1, 2, 3, 2, 1)] == [1, 1, 0, 0, 1, 0, 1]


def test_sharded_and_committed_arrays():
    f = Counter()
    mesh = jax.sharding.Mesh(jax.devices()[:1], "i")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    assert f(jax.device_put(X, sharding)) == 1
    out = f.t.apply(f.params, None, jax.device_put(X, sharding))
    assert out.shape == (6, 3)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_that_was_called_can_be_pickled(frozen):
    model = hk.without_apply_rng(hk.transform(linear))
    params = with_lora(model.init(RNG, X))
    model, params = hki.freeze(model, params) if frozen else (hki.transform_implicit(model), params)
    out = model.apply(params, X)
    again = cloudpickle.loads(cloudpickle.dumps(model))
    np.testing.assert_array_equal(again.apply(params, X), out)
