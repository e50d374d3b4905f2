"""Arguments of `make_mox` and `eval_mox`: how they are bound, and what wrong ones raise."""

import copy
import functools
import pickle
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.mox import diff, eval_mox, make_mox, map_mox, save, to_transformed
from tests.haiku_models import RNG, X
from tests.mox_models import ALL

KEY = jax.random.key(1)


def same(x, y):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def drop(x, rate=0.5, scale=1.0):
    return hk.dropout(hk.next_rng_key(), rate, hk.Linear(4)(x)) * scale


@pytest.mark.parametrize("kind", ["transform", "with_state", "without_apply_rng", "without_both"])
def test_kinds_of_transforms(kind):
    """Each has its own arguments, also when it is made of an expression again."""
    fun = ALL["mlp"].fun
    with_state = kind in ("with_state", "without_apply_rng")
    t = (hk.transform_with_state if with_state else hk.transform)(fun)
    variables = t.init(RNG, X) if with_state else (t.init(RNG, X),)
    keys = () if kind.startswith("without") else (RNG,)
    t = t if keys else hk.without_apply_rng(t)
    mox = make_mox(t)(X)
    wanted = t.apply(*variables, *keys, X)
    again = make_mox(to_transformed(mox))(X)
    for got in (
        eval_mox(mox, *variables, *keys, X),
        eval_mox(again, *variables, *keys, x=X),
        hki.transform_implicit(to_transformed(again)).apply(*variables, *keys, X),
    ):
        jax.tree.map(same, got, wanted)
        assert type(got) is type(wanted)


def test_keywords_and_defaults():
    t = hk.transform(drop)
    params = t.init(RNG, X)
    mox = make_mox(t)(x=X, scale=2.0)
    wanted = t.apply(params, RNG, X, 0.5, 2.0)
    for args, kwargs in (
        ((params, RNG, X, 0.5, 2.0), {}),
        ((params, RNG), dict(scale=2.0, x=X)),
        ((X,), dict(scale=2.0, rng=RNG, params=params)),
    ):
        same(eval_mox(mox, *args, **kwargs), wanted)


def recurrent(x, state):
    return hk.VanillaRNN(4)(x, state)


def keyed(rng, x):
    return hk.Linear(4)(x) + jax.random.normal(rng, x.shape)


def scaled(params, x):
    return hk.Linear(4)(x) * params


@pytest.mark.combinations
@pytest.mark.parametrize("apply_rng", [True, False])
@pytest.mark.parametrize("fun, first", [(recurrent, X), (keyed, KEY), (scaled, X)])
def test_arguments_with_the_names_that_haiku_adds(fun, first, apply_rng):
    t = hk.transform(fun)
    params = t.init(RNG, first, X)
    keys = (RNG,) if apply_rng else ()
    t = t if apply_rng else hk.without_apply_rng(t)
    mox = make_mox(t)(first, X)
    wanted = t.apply(params, *keys, first, X)
    jax.tree.map(same, eval_mox(mox, params, *keys, first, X), wanted)
    again = make_mox(to_transformed(mox))(first, X)
    jax.tree.map(same, eval_mox(again, params, *keys, first, X), wanted)


def test_variables_that_exist_already():
    """An evaluation whose `init` is that of training."""

    def model(x, is_training):
        return hk.BatchNorm(True, True, 0.9)(x, is_training)

    t = hk.transform_with_state(model)
    params, state = t.init(RNG, X, True)
    state = jax.tree.map(lambda x: x + 0.5, state)
    mox = make_mox(t)(X, False, params=params, state=state)
    jax.tree.map(
        same, eval_mox(mox, params, state, None, X, False), t.apply(params, state, None, X, False)
    )
    with pytest.raises(ValueError, match="make_mox .*No value for 'average'") as e:
        make_mox(t)(X, False)
    assert "give params= and state= (docs" in str(e.value)
    with pytest.raises(ValueError, match="make_mox .*No value for 'average'") as e:
        make_mox(t)(X, False, params=params)
    assert "give state= (docs" in str(e.value)
    changed = mox.insert_after("batch_norm", jnp.tanh).insert_after("**/batch_norm", jnp.sin)
    with pytest.raises(ValueError, match=r"(?s)No value for 'average'.*is_training=True") as e:
        changed.init(RNG, X, False)
    assert str(e.value).count("init of the changed model") == 1
    jax.tree.map(same, changed.init(RNG, X, True), t.init(RNG, X, True))


@pytest.mark.parametrize("key", [RNG, KEY, 3, jax.random.key(2, impl="rbg")])
def test_kinds_of_keys(key):
    t = hk.transform(drop)
    params = t.init(RNG, X)
    wanted = t.apply(params, key, X)
    same(eval_mox(make_mox(t)(X, rng=key), params, key, X), wanted)
    if getattr(key, "size", 1) <= 2 and "rbg" not in str(getattr(key, "dtype", "")):
        same(eval_mox(make_mox(t)(X), params, key, X), wanted)


def test_a_model_with_or_without_a_key():
    def model(x):
        key = hk.maybe_next_rng_key()
        return x if key is None else hk.dropout(key, 0.5, x)

    t = hk.transform(model)
    mox = make_mox(t)(X, rng=None)
    same(eval_mox(mox, {}, None, X), X)
    with pytest.raises(ValueError, match="rng: the expression was made without a key, and got one"):
        eval_mox(mox, {}, RNG, X)
    same(eval_mox(make_mox(t)(X), {}, RNG, X), t.apply({}, RNG, X))
    with pytest.raises(ValueError, match="rng: the expression draws random numbers, and got None"):
        eval_mox(make_mox(t)(X), {}, None, X)


def test_an_unused_callback_draws_no_random_numbers():
    """`jax.vmap` has no rule for it."""

    def model(x):
        noise = jax.random.uniform(hk.next_rng_key(), x.shape)
        jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), noise)
        return 2 * x

    mox = make_mox(hk.transform(model))(X)
    same(eval_mox(mox, {}, None, X), 2 * X)


@pytest.mark.parametrize("with_state", [False, True])
def test_a_model_without_a_key_whose_init_needs_one(with_state):
    t = hk.transform_with_state if with_state else hk.transform
    t = t(lambda x: hk.nets.MLP([3])(x))
    mox = make_mox(t)(X, rng=None)
    variables = t.init(RNG, X) if with_state else (t.init(RNG, X),)
    same(*(jax.tree.leaves(f(*variables, None, X))[0] for f in (mox.apply, t.apply)))
    jax.tree.map(same, mox.init(RNG, X), t.init(RNG, X))
    changed = mox.insert_after(hk.Linear, lambda y: y + hk.Linear(3, name="new")(y))
    made = changed.init(RNG, X)
    assert "mlp/~/linear_0/new" in (made[0] if with_state else made)


def test_only_making_speaks_of_parameters_that_may_be_given():
    mox = make_mox(hk.transform(lambda x: hk.Linear(4)(x)))(X)

    def failing(*args):
        raise RuntimeError("no")

    for change in (mox.sub, mox.wrap, mox.insert_after, mox.patch):
        with pytest.raises(RuntimeError) as e:
            change(hk.Linear, failing)
        assert "This was in the replacement at 'linear'." in e.value.__notes__
        assert "params=" not in "".join(e.value.__notes__)


def test_weak_types():
    """Arrays are of the type that the expression was made for, as in what JAX has compiled."""

    def model(x, y):
        return x.astype(jnp.bfloat16) * y

    t = hk.transform(model)
    strong, weak = jax.ShapeDtypeStruct((), jnp.float32), jnp.asarray(2.0)
    assert weak.weak_type
    wanted = t.apply({}, None, X, jnp.float32(2.0))
    assert wanted.dtype == jnp.float32
    got = eval_mox(make_mox(t)(X, strong), {}, None, X, weak)
    assert got.dtype == jnp.float32
    same(got, wanted)


def test_multi_transform():
    """Functions of different arguments, each with an expression of its own."""

    def coder():
        encoder, decoder = hk.Linear(2, name="encoder"), hk.Linear(4, name="decoder")
        return lambda x: decoder(encoder(x)), {"encode": encoder, "decode": decoder}

    t = hk.multi_transform(coder)
    params = t.init(RNG, X)
    makers = make_mox(t).apply
    assert jax.tree.structure(makers) == jax.tree.structure(t.apply)
    for name, x in (("encode", X), ("decode", X[:, :2])):
        mox, apply = makers[name](x, params=params), t.apply[name]
        assert [node.path for node in mox.select(hk.Module)] == [f"{name}r"]
        same(eval_mox(mox, params, RNG, x), apply(params, RNG, x))
        same(to_transformed(mox).init(RNG, X)["encoder"]["w"], params["encoder"]["w"])
        lora, implicit = hki.add_lora(params, 0, rank=1), hki.transform_implicit(t).apply[name]
        same(eval_mox(mox, lora, None, x), implicit(lora, None, x))
    assert len(makers["encode"](X).interface.params) == 4  # of all functions, as init says


@pytest.mark.combinations
@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("apply_rng", [True, False])
def test_multi_transform_with_state(implicit, apply_rng):
    def model():
        norm, layer = hk.BatchNorm(True, True, 0.9), hk.Linear(4)

        def train(x):
            return hk.dropout(
                hk.maybe_next_rng_key() if apply_rng else KEY, 0.5, norm(layer(x), True)
            )

        def evaluate(x):
            return norm(layer(x), False)

        return train, (train, evaluate)

    t = hk.multi_transform_with_state(model)
    params, state = t.init(RNG, X)
    keys = (RNG,) if apply_rng else ()
    t = t if apply_rng else hk.without_apply_rng(t)
    t = hki.transform_implicit(t) if implicit else t
    for mox, apply in zip(make_mox(t)(X), t.apply, strict=True):
        wanted = jax.jit(apply)(params, state, *keys, X)
        for evaluate in (functools.partial(eval_mox, mox), to_transformed(mox).apply):
            jax.tree.map(same, jax.jit(evaluate)(params, state, *keys, X), wanted)


# --- wrong ones -----------------------------------------------------------------------------------


def call(make=(X,), **changes):
    """A call of the expression with one thing wrong; None leaves an argument out."""

    def run():
        t = hk.transform_with_state(lambda x, batch=None, flag=True: (drop(x), batch, flag))
        params, state = t.init(RNG, X)
        given = dict(params=params, state=state, rng=RNG, x=X) | changes
        eval_mox(make_mox(t)(*make), **{k: v for k, v in given.items() if v is not None})

    return run


W, B = jax.device_put((np.ones((4, 4), np.float32), np.ones(4, np.float32)))
WRONG = {
    "a missing parameter": (call(params={"linear": {"w": W}}), "params: there is no 'linear/b'"),
    "another shape of a parameter": (
        call(params={"linear": {"w": W[:3], "b": B}}),
        "params: linear/w: .* made for float32[4,4], got float32[3,4]. Make another",
    ),
    "another dtype of a parameter": (
        call(params={"linear": {"w": W, "b": np.ones(4, np.int32)}}),
        "params: linear/b: .* made for float32[4], got int32[4]",
    ),
    "parameters that are none": (call(params=X), "params: expected what init gives, a dictionary"),
    "parameters of a module": (call(params={"w": W, "b": B}), "params: expected what init gives"),
    "state that is none": (call(state=X), "state: expected what init gives"),
    "another shape": (call(x=X[:3]), "x: .* made for float32[6,4], got float32[3,4]"),
    "another dtype": (call(x=X.astype(int)), "x: .* made for float32[6,4], got int32[6,4]"),
    "a number": (call(x=2.0), "x: .* made for float32[6,4], got 2.0"),
    "a tree": (call(x=[X]), "x: .* made for array, got [array]. Make another"),
    "a tree in place of none": (
        call(batch={"a": X}),
        "batch: .* made for None, got {'a': array}. Make another",
    ),
    "another shape in a tree": (
        call((X, {"a": (X, X)}), batch={"a": (X, X[0])}),
        "batch['a'][1]: .* made for float32[6,4], got float32[4]",
    ),
    "another structure in a tree": (
        call((X, {"a": (X, X)}), batch={"a": [X, X]}),
        "batch: .* made for {'a': (array, array)}, got {'a': [array, array]}",
    ),
    "another flag": (call(flag=False), "flag: .* made for True, got False"),
    "a flag of another type": (call(flag=1), "flag: .* made for True, got 1"),
    "a wrong key": (call(rng=X), "rng: .* made for uint32[2], got float32[6,4]"),
    "no key": (call(rng=None), "missing: rng. The arguments are (params, state, rng, /, x"),
    "no input": (
        call(x=None),
        "missing a required argument: 'x'. The arguments are (params, state",
    ),
    "an unknown argument": (
        call(other=1),
        "unexpected keyword argument 'other'. The arguments are",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    run, message = WRONG[name]
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises((TypeError, ValueError), match=pattern):
        run()


def test_too_many_arguments():
    t = hk.transform(lambda x: x)
    mox = make_mox(t)(X)
    with pytest.raises(TypeError, match="too many positional arguments. The arguments are"):
        eval_mox(mox, {}, None, X, X)
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        make_mox(t)(X, X)


@pytest.mark.parametrize("thing", [hk.nets.MLP, lambda x: x, (len, len), None])
def test_what_is_not_transformed(thing):
    with pytest.raises(
        TypeError, match="transformed: expected what hk.transform.*A function is transformed first"
    ):
        make_mox(thing)


def test_arguments_that_are_no_trees():
    """Dictionaries whose keys can't be sorted: neither can such a model be jitted."""
    t = hk.transform(lambda batch: batch["a"])
    with pytest.raises((TypeError, ValueError), match="batch.*keys"):
        make_mox(t)({"a": X, 1: X}, params={})


LINEAR = hk.transform(lambda x: hk.Linear(4)(x))
SWAPPED = {
    "save": (lambda mox, path: save(mox, path), "save(path, mox): mox has to be .* got PosixPath"),
    "save a model": (
        lambda mox, path: save(path, LINEAR),
        "save(path, mox): mox has to be a module expression, got Transformed: make one with make_mox",
    ),
    "diff": (
        lambda mox, path: diff(mox, LINEAR),
        "diff(mox, other_mox): mox has to be .* make_mox",
    ),
    "diff a text": (lambda mox, path: diff("a", mox), "diff(mox, other_mox): .* got str"),
    "map": (lambda mox, path: map_mox(mox, len), "map_mox(fun, mox): .* got builtin"),
    "eval": (
        lambda mox, path: eval_mox(LINEAR, {}, None, X),
        "eval_mox(mox, params, ...): .* make_mox",
    ),
    "to_transformed": (
        lambda mox, path: to_transformed(LINEAR),
        "to_transformed(mox): .* make_mox",
    ),
    "share": (lambda mox, path: mox.share("a"), "taking: expected a dictionary, .* got str"),
    "values": (
        lambda mox, path: mox.to_html(values=[1]),
        "values: expected a dictionary .* got list",
    ),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_arguments_in_another_order_or_of_another_type(name, tmp_path):
    run, message = SWAPPED[name]
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(TypeError, match=f"^{pattern}"):
        run(make_mox(LINEAR)(X), tmp_path / "mox.json")


def test_copies_are_the_expression_and_pickling_names_save():
    mox = make_mox(LINEAR)(X)
    assert copy.copy(mox) is copy.deepcopy(mox) is mox
    assert copy.deepcopy({"a": [mox]}) == {"a": [mox]}
    with pytest.raises(TypeError, match=r"can't be pickled. save\(path, mox\)"):
        pickle.dumps(mox)


def test_shapes_are_shown_in_the_order_of_the_arguments():
    def model(z, flag, *rest, a=None, **others):
        return z.sum() + rest[0].sum() + a["x"].sum() + others["b"].sum()

    shapes = [jnp.ones(n) for n in range(1, 5)]
    z, y, x, w = shapes
    mox = make_mox(hk.transform(model))(z, True, y, b=w, a={"x": x})
    assert str(mox).startswith("model: f32[1], f32[2], f32[3], f32[4] -> f32[]")
