"""`wrap` and insertions at modules under `vmap`, which call their functions for one element."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from haiku_implicit.mox import eval_mox, make_mox
from tests.mox.compare import close
from tests.random_arrays import normal
from tests.tiers import few

X = normal((4, 8), 1)
RNG = jax.random.PRNGKey(3)


class Layer(hk.Module):
    """A function of one element. The values that it captures are not arguments of its call."""

    def __init__(self, captured=0.0, name="layer"):
        super().__init__(name=name)
        self.captured = captured

    def __call__(self, x, *others):
        return hk.Linear(x.shape[-1])(x) * 2 + sum(others, self.captured)


class Noisy(Layer):
    def __call__(self, x):
        count = hk.get_state("count", (), init=jnp.zeros)
        hk.set_state("count", count + 1)
        return hk.dropout(hk.next_rng_key(), 0.5, super().__call__(x))


def one_axis(change, x):
    return hk.vmap(change(Layer()), in_axes=1, out_axes=1, split_rng=False)(x)


def two_axes(change, x):
    inner = hk.vmap(change(Layer()), in_axes=1, out_axes=0, split_rng=False)
    return hk.vmap(inner, in_axes=1, out_axes=2, split_rng=False)(x.reshape(8, 2, 2))


def one_axis_of_two(change, x):
    """The inner `vmap` maps what the call returns, and none of its arguments."""
    layer = change(Layer())
    inner = hk.vmap(lambda y, x: layer(x) + y, in_axes=(0, None), split_rng=False)
    return hk.vmap(functools.partial(inner, x), split_rng=False)(x)


def shared_argument(change, x):
    return hk.vmap(change(Layer()), in_axes=(0, None), split_rng=False)(x, x[0])


def captures(change, x):
    mapped = hk.vmap(lambda x, y: change(Layer(y[0]))(x), in_axes=(0, 1), split_rng=False)
    return mapped(x, x.T)


def without_haikus_vmap(change, x):
    layer = change(Layer())
    if hk.running_init():
        return layer(x[0])
    return jax.vmap(layer)(x)


def random_and_state(change, x):
    mapped = hk.vmap(change(Noisy()), split_rng=False)
    return mapped(x) + hk.dropout(hk.next_rng_key(), 0.5, x), hk.get_state(
        "layer/count", (), init=jnp.zeros
    )


MODELS = [one_axis, two_axes, one_axis_of_two, shared_argument, captures, without_haikus_vmap]


def norm(x):
    return (x - x.mean()) / (x.std() + 1)


def scaled(x):
    gain = hk.get_parameter("gain", x.shape, init=hk.initializers.RandomNormal())
    return norm(x) * gain


def residual(original, x, *others):
    return norm(x) + original(x, *others)


def twice(original, x, *others):
    return original(norm(original(x, *others)), *others)


def in_jit(original, x, *others):
    return jax.jit(lambda x: original(norm(x), *others))(x)


def in_scan(original, x, *others):
    return jax.lax.scan(lambda c, _: (norm(original(c, *others)), c.max()), x, None, length=3)[0]


def ignored(original, x, *others):
    return norm(x)


def with_parameters(original, x, *others):
    return original(x, *others) + hk.Linear(x.shape[-1], name="beside")(norm(x))


FUNCTIONS = [residual, twice, in_jit, in_scan, ignored, with_parameters]


def by_hand(function):
    """A layer with the function around it."""
    return lambda layer: lambda *args: in_module("layer", function, layer, *args)


def in_module(name, function, *args):
    class Site(hk.Module):
        def __call__(self, *args):
            return function(*args)

    return Site(name=hk.force_name(name))(*args)


def equal_under_transformations(got, want, params, in_axes=(None, None, 0)):
    close(got(params, None, X), want(params, None, X))
    close(jax.jit(got)(params, None, X), want(params, None, X))

    def loss(apply, params, x):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(apply(params, None, x)))

    gradients = [jax.grad(loss, (1, 2))(apply, params, X) for apply in (got, want)]
    close(*gradients)
    xs = jnp.stack([X, -X, X + 1])
    close(*(jax.vmap(apply, in_axes)(params, None, xs) for apply in (got, want)))


CASES = [(model, function) for model in MODELS for function in FUNCTIONS]
QUICK = [(two_axes, with_parameters)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "function"), few(CASES, *QUICK), ids=lambda x: getattr(x, "__name__", str(x))
)
def test_a_function_around_a_module(model, function):
    old = hk.transform(functools.partial(model, lambda layer: layer))
    new = hk.transform(functools.partial(model, by_hand(function)))
    changed = make_mox(old)(X).wrap(Layer, function, path="layer")
    params = new.init(RNG, X) | old.init(RNG, X)
    own = changed.init(RNG, X)
    assert jax.tree.map(jnp.shape, own) == {
        name: jax.tree.map(jnp.shape, params[name]) for name in own
    }
    equal_under_transformations(functools.partial(eval_mox, changed), new.apply, params)


@pytest.mark.slow
@pytest.mark.parametrize("model", few(MODELS, two_axes), ids=lambda f: f.__name__)
def test_functions_before_and_after_a_module(model):
    def before(layer):
        return lambda x, *others: layer(*([norm(x), *map(norm, others)] if others else [norm(x)]))

    def after(layer):
        return lambda *args: in_module("layer/after", scaled, layer(*args))

    def norms(*args):
        return tuple(map(norm, args)) if len(args) > 1 else norm(*args)

    old, *news = (
        hk.transform(functools.partial(model, change)) for change in (lambda x: x, before, after)
    )
    mox = make_mox(old)(X)
    changed = [
        mox.insert_before(Layer, norms),
        mox.insert_after(Layer, scaled, path="layer/after"),
    ]
    for got, want in zip(changed, news, strict=True):
        params = want.init(RNG, X)
        equal_under_transformations(functools.partial(eval_mox, got), want.apply, params)


@pytest.mark.slow
def test_what_the_rest_of_the_model_reads_of_it_stays():
    """The random keys that the module draws, and the state that it writes."""
    old, new = (
        hk.transform_with_state(functools.partial(random_and_state, change))
        for change in (lambda layer: layer, by_hand(residual))
    )
    params, state = old.init(RNG, X)
    changed = make_mox(old)(X).wrap(Noisy, residual, path="layer")
    for apply in (changed.apply, jax.jit(changed.apply)):
        close(apply(params, state, RNG, X), new.apply(params, state, RNG, X))


def test_one_argument_for_all_elements_stays_one():
    model = hk.transform(functools.partial(shared_argument, lambda layer: layer))
    mox = make_mox(model)(X)
    with pytest.raises(
        ValueError, match="takes one array for all elements here, and was given one"
    ):
        mox.wrap(Layer, lambda original, x, y: original(x, x + y))


def test_the_original_is_not_differentiated():
    model = hk.transform(functools.partial(one_axis, lambda layer: layer))
    with pytest.raises(
        ValueError, match="the original can't be differentiated within the function"
    ):
        make_mox(model)(X).wrap(Layer, lambda f, x: jax.grad(lambda x: f(x).sum())(x))
