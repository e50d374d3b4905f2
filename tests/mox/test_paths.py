"""Modules of functions that are transformed for themselves: `hk.lift`, and stacks of layers."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import eval_mox, load, make_mox, save
from tests.mox.compare import close, same
from tests.random_arrays import normal
from tests.tiers import few

X = normal((2, 4), 1)


class Net(hk.Module):
    """Two layers, and a module between them that has no parameters."""

    def __init__(self, between, name=None):
        super().__init__(name=name)
        self.between = between

    def __call__(self, x):
        return hk.Linear(4, name="last")(self.between(hk.Linear(4, name="first")(x)))


class Act(hk.Module):
    def __call__(self, x):
        return jnp.tanh(x)


def member(between):
    return hk.transform(lambda x: Net(between, name="net")(x))


def act(x):
    return Act(name="act")(x)


def lifted(inner, x, name="a", apply=lambda f: f):
    params = hk.lift(inner.init, name=name)(hk.maybe_next_rng_key(), x)
    return apply(inner.apply)(params, None, x)


def two(inner, x):
    return lifted(inner, x, "a"), lifted(inner, x, "b")


def compiled(inner, x):
    apply = jax.jit(inner.apply)  # the same program for both
    return tuple(lifted(inner, x, name, lambda f: apply) for name in "ab")


def in_remat(inner, x):
    return tuple(lifted(inner, x, name, jax.checkpoint) for name in "ab")


def in_a_module(inner, x):
    class Outer(hk.Module):
        def __call__(self, x):
            return two(inner, x)

    return Outer(name="outer")(x)


def given_to_a_method(inner, x):
    class Outer(hk.Module):
        def __call__(self, x):
            return tuple(self.run(lift(inner, x, name), x) for name in "ab")

        def run(self, params, x):
            return inner.apply(params, None, x)

    def lift(inner, x, name):
        return hk.lift(inner.init, name=name)(hk.maybe_next_rng_key(), x)

    return Outer(name="outer")(x)


def transparent(inner, x):
    class Outer(hk.Module):
        def __call__(self, x):
            init = hk.transparent_lift(inner.init)
            return inner.apply(init(hk.maybe_next_rng_key(), x), None, x)

    return Outer(name="a")(x), Outer(name="b")(x)


def lifted_twice(inner, x):
    middle = hk.transform(functools.partial(lifted, inner, name="net"))
    return two(middle, x)


def in_a_stack(inner, x):
    return hk.layer_stack(2, name="stack")(lambda x: sum(two(inner, x)))(x)


# The paths of the two members.
MEMBERS = {
    two: ("a/net", "b/net"),
    compiled: ("a/net", "b/net"),
    in_remat: ("a/net", "b/net"),
    in_a_module: ("outer/a/net", "outer/b/net"),
    given_to_a_method: ("outer/a/net", "outer/b/net"),
    transparent: ("a/net", "b/net"),
    lifted_twice: ("a/net/net", "b/net/net"),
    in_a_stack: ("stack/a/net", "stack/b/net"),
}
models = pytest.mark.parametrize(
    "model", few(MEMBERS, two, compiled, given_to_a_method), ids=lambda m: m.__name__
)


def expression(model, between=act):
    t = hk.transform(functools.partial(model, member(between)))
    return t, make_mox(t)(X)


@models
def test_paths_are_those_of_the_parameters(model, tmp_path):
    _, mox = expression(model)
    save(tmp_path / "mox.json", mox)
    for each in (mox, load(tmp_path / "mox.json")):
        for path in MEMBERS[model]:
            names = [path, *(f"{path}/{name}" for name in ("first", "act", "last"))]
            below = f'//module_call[starts-with(@path, "{path}")]'
            assert sorted(set(each.query(f"{below}/@path"))) == sorted(names)
            assert [x.path for x in each[f"{path}/**"] if x.path in names] == [
                path,
                *names[1:],
            ]
            for layer in ("first", "last"):
                full = f"{path}/{layer}"
                assert sorted(each.parameters(full)) == [f"{full}/b", f"{full}/w"]
                assert [x.path for x in each.select(hk.Linear)].count(full) == (each is mox)


def adapter(x):
    return x + hk.Linear(4, name="new", w_init=hk.initializers.RandomNormal())(x)


@models
def test_each_member_has_new_parameters_of_its_own(model):
    """By hand: the adapter in the member's own function."""
    _, mox = expression(model)
    changed = mox.insert_after("**/act", adapter)
    params = changed.init(jax.random.key(0), X)
    news = [f"{path}/act/new" for path in MEMBERS[model]]
    assert set(params) - set(mox.init(jax.random.key(0), X)) == set(news)
    first, second = (params[name]["w"] for name in news)
    assert np.abs(first - second).min() > 0

    class Hand(Act):
        def __call__(self, x):
            return adapter(super().__call__(x))

    hand = hk.transform(functools.partial(model, member(lambda x: Hand(name="act")(x))))
    close(eval_mox(changed, params, None, X), hand.apply(params, None, X))
    one = mox.insert_after(f"{MEMBERS[model][1]}/act", adapter)
    assert set(one.init(jax.random.key(0), X)) == set(params) - {news[0]}


@models
def test_one_member_is_changed(model):
    t, mox = expression(model)
    params = t.init(jax.random.key(0), X)
    path = MEMBERS[model][1]
    renamed = mox.rename(f"{path}/first", "other")
    assert set(renamed.init(jax.random.key(0), X)) ^ set(params) == {
        f"{path}/first",
        f"{path}/other",
    }
    new = {name.replace(f"{path}/first", f"{path}/other"): x for name, x in params.items()}
    close(renamed.apply(new, None, X), t.apply(params, None, X))

    less = mox.sub(f"{path}/last", None)
    if model not in (in_a_stack, given_to_a_method):  # a loop or a method is given all parameters
        assert set(params) - set(less.init(jax.random.key(0), X)) == {f"{path}/last"}
    identity = {"w": jnp.broadcast_to(jnp.eye(4), params[f"{path}/last"]["w"].shape)}
    identity["b"] = jnp.zeros_like(params[f"{path}/last"]["b"])
    close(less.apply(params, None, X), t.apply({**params, f"{path}/last": identity}, None, X))


def test_lifted_state():
    inner = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9, name="norm")(x, True))

    def model(x):
        for name in "ab":
            init, updater = hk.lift_with_state(inner.init, name=name)
            params, state = init(hk.maybe_next_rng_key(), x)
            x, state = inner.apply(params, state, None, x)
            updater.update(state)
        return x

    t = hk.transform_with_state(model)
    params, state = t.init(None, X)
    mox = make_mox(t)(X)
    paths = mox.query('//module_call[@type="ExponentialMovingAverage"]/@path')
    assert sorted(set(paths)) == sorted(set(state))
    same(mox.apply(params, state, None, X), t.apply(params, state, None, X))
    less = mox.sub("a/norm", lambda x, is_training: x)
    params, state = less.init(None, X)
    assert {name.split("/")[0] for name in (*params, *state)} == {"b"}


def test_stacks_have_full_paths_for_predicates_and_errors():
    t = hk.transform(lambda x: hk.layer_stack(2, name="stack")(lambda x: Act()(hk.Linear(4)(x)))(x))
    mox = make_mox(t)(X)
    (node,) = mox.select(lambda x: getattr(x, "path", "") == "stack/linear")
    assert repr(node).startswith("<stack/linear: Linear")
    assert [x.path for x in mox.select(Act)] == ["stack/act"]
    with pytest.raises(ValueError, match="<stack/linear: Linear.* the replacement has to return"):
        mox.sub(hk.Linear, lambda x: (x, x))
