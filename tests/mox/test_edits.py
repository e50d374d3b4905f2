"""Several edits one after the other, what may not change in one, and the containers of the model."""

import collections
import dataclasses
import functools
import itertools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_implicit.mox import load, make_mox, save, to_transformed
from haiku_implicit.mox.program.constants import identical
from tests.haiku_models import RNG
from tests.mox.compare import close, same
from tests.tiers import few

X = jax.device_put(np.arange(8, dtype=np.float32).reshape(2, 4) / 8)


# --- random keys ----------------------------------------------------------------------------------


def drawn(x):
    return x * 0 + jax.random.uniform(hk.next_rng_key(), x.shape)


def with_weight(x):
    return x * 0 + hk.get_parameter("new", x.shape, init=hk.initializers.RandomUniform())


def three(x):
    """Three values that tell which keys a function of each place drew."""
    a, b, c = (hk.Linear(4, name=name)(x) for name in "abc")
    return jnp.sin(a), jnp.sin(b), jnp.sin(c)


MODEL = hk.transform(three)
PARAMS = jax.jit(MODEL.init)(RNG, X)


def saved(mox, folder):
    save(folder / "mox.json", mox)
    return load(folder / "mox.json")


def remade(mox, folder):
    return make_mox(to_transformed(mox))(X)


PLACES = {
    "modules": ["a", "b", "c"],
    "equations": [f"(//sin)[{i}]" for i in (3, 2, 1)],  # the places in front stay
}
BETWEEN = {"nothing": lambda mox, folder: mox, "a file": saved, "a model": remade}


WAYS = list(itertools.product(PLACES, BETWEEN))


@pytest.mark.parametrize(
    "places, between", few(WAYS, ("modules", "a file"), ("equations", "a model"))
)
def test_edits_one_after_the_other_draw_different_numbers(places, between, tmp_path):
    mox = make_mox(MODEL)(X)
    for place in PLACES[places]:
        mox = BETWEEN[between](mox.sub(place, drawn), tmp_path)
    values = mox.apply(PARAMS, RNG, X)
    for one, other in itertools.combinations(values, 2):
        assert np.abs(one - other).min() > 0
    same(mox.apply(PARAMS, RNG, X), values)


def test_an_insertion_twice_at_one_place_draws_twice():
    noisy = lambda x: x + drawn(x)  # noqa: E731
    once = make_mox(MODEL)(X).insert_after("a", noisy)
    twice = once.insert_after("**/a", noisy)
    assert np.abs(twice.apply(PARAMS, RNG, X)[0] - once.apply(PARAMS, RNG, X)[0]).max() > 0.1
    plain = jnp.arcsin(MODEL.apply(PARAMS, RNG, X)[0])
    first, both = (jnp.arcsin(y.apply(PARAMS, RNG, X * 0)[0]) for y in (once, twice))
    assert plain.shape == first.shape and np.abs(both - 2 * first).max() > 1e-3


ORDERS = list(itertools.product(itertools.permutations("abc"), [drawn, with_weight]))


@pytest.mark.parametrize(
    "order, change", few(ORDERS, (tuple("cab"), drawn), (tuple("cba"), with_weight))
)
def test_edits_of_modules_are_one_edit_of_all_in_any_order(order, change):
    mox = make_mox(MODEL)(X)
    whole, each = mox.sub(hk.Linear, change), mox
    for name in order:
        each = each.sub(name, change)
    params = whole.init(RNG, X)
    same(each.init(RNG, X), params)
    same(each.apply(params, RNG, X), whole.apply(params, RNG, X))
    values = whole.apply(params, RNG, X)
    assert all(np.abs(x - y).min() > 0 for x, y in itertools.combinations(values, 2))


def test_new_parameters_of_two_edits_at_one_place_differ():
    one, two = (functools.partial(hk.Linear, 4, name=name) for name in ("one", "two"))
    mox = make_mox(MODEL)(X).sub("(//sin)[2]", lambda x: one()(x))
    mox = mox.sub("(//sin)[1]", lambda x: two()(x))
    params = mox.init(RNG, X)
    assert np.abs(params["sin/one"]["w"] - params["sin/two"]["w"]).min() > 0


def test_edits_in_one_loop_draw_different_numbers():
    def model(x):
        return hk.scan(lambda c, _: (c, (jnp.sin(c), jnp.cos(c))), x, None, length=2)[1]

    mox = make_mox(hk.transform(model))(X).sub("//sin", drawn).sub("//cos", drawn)
    values = jnp.stack(mox.apply({}, RNG, X)).reshape(4, -1)
    assert len(np.unique(values)) == values.size


# --- constants ------------------------------------------------------------------------------------


class Scaled(hk.Module):
    def __init__(self, constant, name="s"):
        super().__init__(name=name)
        self.constant = constant

    def __call__(self, x):
        return x, self.constant


@dataclasses.dataclass(frozen=True)
class Options:
    rate: float


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["rate"])
@dataclasses.dataclass
class Static:
    x: jax.Array
    rate: float


KINDS = [
    [1, 1.0, True, 1 + 0j, "1", np.float32(1), np.float64(1), np.int32(1)],
    [0.0, -0.0, 0, False, complex(0.0, -0.0), np.float32(-0.0), np.float32(0.0)],
    [math.nan, math.inf, -math.inf, np.float32("nan"), complex("nanj")],
    [None, (), [], {}, frozenset(), "", b""],
    [(0.0,), (-0.0,), (0,), [0.0], {"a": 0.0}, {"a": -0.0}, {"a": math.nan}, {1: 0.0}, {True: 0.0}],
    [
        np.array([0.0]),
        np.array([-0.0]),
        np.array([0]),
        np.array([0.0], "float32"),
        np.array([[0.0]]),
    ],
    [Options(0.0), Options(-0.0), Options(0), Options(math.nan), Options((math.nan,))],
    [
        slice(0, 1),
        slice(0.0, 1),
        range(1),
        jnp.float32,
        jnp.float16,
        frozenset([1]),
        frozenset([True]),
    ],
    [functools.partial(max, 0.0), functools.partial(max, -0.0), functools.partial(min, 0.0)],
]


def copied(x):
    """An equal object that is another one."""
    if type(x) is float:
        return float(repr(x))
    if isinstance(x, tuple | list | frozenset):
        return type(x)(map(copied, x))
    if isinstance(x, dict):
        return {k: copied(y) for k, y in x.items()}
    if isinstance(x, Options):
        return Options(copied(x.rate))
    return x.copy() if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: str(kinds[0]))
def test_constants_are_identical_to_themselves_alone(kinds):
    for i, x in enumerate(kinds):
        assert [identical(copied(x), y) for y in kinds] == [i == j for j in range(len(kinds))]


STATIC = [1, 1.0, True, 0.0, -0.0, math.nan, Options(0.0), Options(-0.0)]


@pytest.mark.parametrize("way", [lambda c: c, lambda c: {"a": [c]}, lambda c: Static(X, c)])
def test_arguments_are_the_constants_that_the_expression_was_made_for(way):
    t = hk.transform(lambda x, c: x * 2)
    for made in STATIC:
        mox = make_mox(t)(X, way(made))
        for given in STATIC:
            if identical(made, given):
                same(mox.apply({}, None, X, way(copied(given))), X * 2)
            else:
                with pytest.raises(ValueError, match="the expression was made for"):
                    mox.apply({}, None, X, way(given))


def test_keys_of_dictionaries_are_constants():
    mox = make_mox(hk.transform(lambda d: d[1] * 2))({1: X})
    same(mox.apply({}, None, {1: X}), X * 2)
    for key in (True, 1.0):
        with pytest.raises(ValueError, match="the expression was made for"):
            mox.apply({}, None, {key: X})


CHANGES = {
    "sub": lambda mox, new: mox.sub("s", lambda x: (x, new)),
    "wrap": lambda mox, new: mox.wrap("s", lambda f, x: (f(x)[0], new)),
    "insert_after": lambda mox, new: mox.insert_after("s", lambda out: (out[0], new)),
    "patch": lambda mox, new: mox.patch("s", (X, new)),
}


@pytest.mark.parametrize("change", few(CHANGES, "sub", "patch"))
def test_a_replacement_returns_the_constants_of_the_node(change):
    for old in STATIC:
        mox = make_mox(hk.transform(lambda x, old=old: Scaled(old)(x)[0]))(X)
        for new in STATIC:
            if identical(old, new):
                same(CHANGES[change](mox, copied(new)).apply({}, None, X), X)
            else:
                with pytest.raises(ValueError, match="has to return|which the rest of the model"):
                    CHANGES[change](mox, new)


def test_an_array_among_the_constants_can_be_returned():
    table = np.arange(3.0)
    mox = make_mox(hk.transform(lambda x: Scaled(table)(x)[0]))(X)
    same(mox.sub("s", lambda x: (x * 2, table)).apply({}, None, X), X * 2)
    with pytest.raises(ValueError, match="has to return"):
        mox.sub("s", lambda x: (x * 2, table + 1))


# --- containers -----------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "a b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    a: jax.Array
    b: jax.Array


CONTAINERS = {
    "dict": lambda x: {"b": x, "a": x * 2},
    "list": lambda x: [x, x * 2],
    "tuple": lambda x: (x, [x]),
    "nested": lambda x: {"a": [x, {"c": (x,)}], "b": None},
    "named tuple": lambda x: Pair({"x": x}, x),
    "dataclass": lambda x: Record(x, x * 2),
    "ordered": lambda x: collections.OrderedDict(b=x, a=[x]),
}
LOOPS = {
    "none": lambda f, x: f(x),
    "scan": lambda f, x: hk.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "fori_loop": lambda f, x: hk.fori_loop(0, 2, lambda i, c: f(c), x),
    "while_loop": lambda f, x: jax.lax.while_loop(lambda c: c.sum() < 9, f, x),
    "cond": lambda f, x: hk.cond(x.sum() > 0, f, lambda x: x, x),
    "switch": lambda f, x: hk.switch(1, [lambda x: x, f], x),
    "remat": lambda f, x: hk.remat(f)(x),
    "vmap": lambda f, x: hk.vmap(f, split_rng=False)(x),
    "layer_stack": lambda f, x: hk.layer_stack(2)(f)(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: hk.grad(lambda x: f(x).sum())(x),
}


class Pass(hk.Module):
    def __call__(self, d):
        return d


def arrays_in(tree):
    return jax.tree.leaves(tree)


IN_LOOPS = list(itertools.product(LOOPS, CONTAINERS))
QUICK = [("scan", "dict"), ("vmap", "list"), ("cond", "nested"), ("layer_stack", "tuple")]
QUICK += [("none", "dict"), ("remat", "dict"), ("fori_loop", "dataclass")]


@pytest.mark.parametrize("loop, container", few(IN_LOOPS, *QUICK))
def test_containers_from_outside_are_left_as_they_are(loop, container):
    held = []

    def model(x):
        d, p = CONTAINERS[container](x[0]), Pass(name="p")
        before = arrays_in(d)
        out = LOOPS[loop](lambda c: c + sum(map(jnp.sum, arrays_in(p(d)))), x)
        held.append(all(x is y for x, y in zip(arrays_in(d), before, strict=True)))
        return out, d

    t = hk.transform(model)
    mox = make_mox(t)(X)
    assert all(held)
    close(mox.apply({}, RNG, X), t.apply({}, RNG, X))


@pytest.mark.parametrize("container", few(["dict", "list", "nested"], "nested"))
def test_what_is_read_of_the_container_is_not_what_the_module_returned(container):
    def model(hand, x):
        d = CONTAINERS[container](x)
        returned = hand(d) if hand else Pass(name="p")(d)
        return sum(arrays_in(returned)), sum(arrays_in(d))

    double = functools.partial(jax.tree.map, lambda x: x * 2)
    mox = make_mox(hk.transform(functools.partial(model, None)))(X)
    same(mox.sub("p", double).apply({}, None, X), model(double, X))


class Collects(hk.Module):
    """Returns a list of its own, which others append to."""

    def __init__(self):
        super().__init__()
        self.values = []

    def __call__(self):
        return self.values


def appended(x):
    collects = Collects()
    for i in range(3):
        collects().append(x * i)
    return sum(collects())


def changed_by_two_names(x):
    d = {"a": x}
    other = Pass()(d)
    other["b"] = x * 3
    d["a"] = x * 5
    return other["a"] + d["b"]


def accumulated(x):
    class Appends(hk.Module):
        def __call__(self, values, x):
            values.append(x)
            return values

    values, appends = [], Appends()
    for i in range(3):
        values = appends(values, x * i)
    return sum(values)


def changed(make, change, x):
    d = make(x)
    change(Pass()(d), x * 9)
    return arrays_in(d)


def set_a(e, x):
    e["a"] = x


def append_q(e, x):
    e["q"].append(x)
    e["z"].append(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)
class Slots:
    a: jax.Array


class Queue(collections.deque):
    """A container that can't be filled as others are; its parts are made anew each time."""


jax.tree_util.register_pytree_node(
    Queue, lambda q: ([tuple(q)], None), lambda _, parts: Queue(parts[0])
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Pair


CHANGED = {
    "ordered": (lambda x: collections.OrderedDict(b=x, a=x), set_a),
    "default": (lambda x: collections.defaultdict(list, q=[x]), append_q),
    "within a dict": (
        lambda x: {"s": collections.OrderedDict(a=x)},
        lambda e, x: set_a(e["s"], x),
    ),
    "dataclass": (lambda x: Record(x, x), lambda e, x: setattr(e, "b", x)),
    "slots": (Slots, lambda e, x: setattr(e, "a", x)),
    "within others": (
        lambda x: Frozen(Pair([x], None)),
        lambda e, x: e.a.a.append(x),
    ),
}
CHANGED = {name: functools.partial(changed, *given) for name, given in CHANGED.items()}
MODELS = [appended, changed_by_two_names, accumulated, *CHANGED.values()]


@pytest.mark.parametrize("model", MODELS)
def test_containers_that_have_two_names_stay_one(model):
    jax.tree.map(same, make_mox(hk.transform(model))(X).apply({}, None, X), model_alone(model))


def test_changes_that_cannot_be_followed_name_the_module_and_the_container():
    def model(change, x):
        return changed(lambda x: Queue([x]), change, x)

    with pytest.raises(ValueError, match=r"'pass' \(Pass\) returns a Queue that others hold"):
        make_mox(hk.transform(functools.partial(model, Queue.append)))(X)
    unchanged = make_mox(hk.transform(functools.partial(model, lambda e, x: None)))(X)
    same(unchanged.apply({}, None, X)[0], X)


class Puts(hk.Module):
    """Keeps an array in a container and as an attribute."""

    def __call__(self, d, v):
        self.last = d["c"] = v
        return d


def kept(loop, x):
    """Arrays from outside of a loop, which are read outside again."""
    d, v, puts, p = {"a": x * 2}, x * 3, Puts(name="puts"), Pass()
    held = []

    def step(c):
        held.append(p([v]))
        return c + puts(d, v)["a"].sum() + held[-1][0].sum()

    y = LOOPS[loop](step, x)
    e = p(d)
    e["z"] = x
    return y, puts.last, held[0], d


@pytest.mark.parametrize("loop", few(LOOPS, "scan", "while_loop", "cond", "vmap", "jit"))
def test_arrays_from_outside_that_a_loop_keeps(loop, tmp_path):
    t = hk.transform(functools.partial(kept, loop))
    mox, wanted = make_mox(t)(X, params={}), t.apply({}, RNG, X)
    close(mox.apply({}, RNG, X), wanted)
    close(saved(mox, tmp_path).apply({}, RNG, X), wanted)


def test_calls_that_the_model_goes_around_are_not_replaced(tmp_path):
    mox = make_mox(hk.transform(functools.partial(kept, "scan")))(X)
    for each in (mox, saved(mox, tmp_path)):
        with pytest.raises(ValueError, match="<puts: .*can't be replaced: it is in a loop"):
            each.sub("puts", lambda d, v: d)


def test_a_value_of_a_loop_that_is_used_outside_is_an_error():
    def model(x):
        held = []
        hk.fori_loop(0, 2, lambda i, c: held.append(c * 2) or Pass()(c), x)
        return held[0]

    with pytest.raises(jax.errors.UnexpectedTracerError, match="the model keeps a value of a loop"):
        make_mox(hk.transform(model))(X)


def model_alone(model):
    return hk.transform(model).apply({}, None, X)


def test_a_new_container_can_be_changed():
    """The model is traced once: nobody else can see the dict that the module made."""
    traced = []

    class Makes(hk.Module):
        def __call__(self, x):
            return {"a": jnp.sin(x)}

    def model(x):
        traced.append(x)
        out = Makes(name="m")(x)
        out["b"] = x
        return out["a"] + out["b"]

    mox = make_mox(hk.transform(model))(X, params={})
    assert len(traced) == 1
    same(mox.sub("m", lambda x: {"a": x}).apply({}, None, X), X * 2)


# --- loops whose condition is mapped --------------------------------------------------------------


def counting(act, levels, x):
    """Each element has its own number of steps."""
    layer = hk.Linear(4, name="layer", w_init=hk.initializers.Constant(0.1))
    if hk.running_init():
        layer(x.reshape(-1, 4)[0])

    def one(row):
        goes_on = lambda c: (c[1].sum() < 6) & (c[0] < row[0] * 8)  # noqa: E731
        return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, act(layer(c[1])) + row), (0, row))

    for _ in range(levels):
        one = jax.vmap(one)
    return one(x)


ROWS = jnp.linspace(0.05, 1.6, 24).reshape(6, 4)


@pytest.mark.parametrize("levels", few([1, 2], 2))
def test_edits_in_a_loop_whose_condition_is_mapped(levels, tmp_path):
    x = ROWS.reshape((6, 4) if levels == 1 else (2, 3, 4))
    old, new = (
        hk.transform(functools.partial(counting, act, levels)) for act in (lambda y: y, jnp.tanh)
    )
    params = old.init(RNG, x)
    changed = make_mox(old)(x).insert_after("layer", jnp.tanh)
    counts, values = new.apply(params, None, x)
    assert len(set(counts.ravel().tolist())) > 2
    close(changed.apply(params, None, x), (counts, values))
    of_equation = make_mox(old)(x).insert_after("//while//dot_general", lambda y: y)
    close(of_equation.apply(params, None, x), old.apply(params, None, x))
    sooner = make_mox(old)(x).sub("//body[@name='cond_jaxpr']//lt", lambda a, b: a < b - 2)
    assert (sooner.apply(params, None, x)[0] <= old.apply(params, None, x)[0]).all()
    same(saved(changed, tmp_path).apply(params, None, x), changed.apply(params, None, x))


def test_random_numbers_in_a_loop_whose_condition_is_mapped():
    old = hk.transform(functools.partial(counting, lambda y: y, 1))
    changed = make_mox(old)(ROWS).insert_after("layer", lambda y: y + drawn(y))
    values = changed.apply(old.init(RNG, ROWS), RNG, ROWS)[1]
    assert len(np.unique(values)) == values.size
