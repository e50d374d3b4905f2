"""What `save` accepts, `load` returns: states of optimizers, parts of parameters, and odd trees."""

import collections
import dataclasses
import itertools
from typing import Any, NamedTuple

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.command_line.main import main
from tests.adapter_cases import CASES as ADAPTERS
from tests.cases import CASES
from tests.files.trees import OTHERS, as_jax, assert_same, made
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


def check(path, tree):
    """A tree is read back as it is."""
    hki.save(path, tree)
    assert_same(hki.load(path, like=tree), jax.tree.map(as_jax, tree))


# --- states of optimizers ------------------------------------------------------------------------


def weight(kind):
    if kind in ADAPTERS:
        return ADAPTERS[kind]((), jnp.ones((12, 8)))
    return jnp.ones((4, 4)) if kind == "dense" else made(kind)


KINDS = [*CASES, *OTHERS, *ADAPTERS, "dense"]
OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),  # whose moments have other shapes
    "sm3": optax.sm3(0.1),
    "lbfgs": optax.lbfgs(0.1),
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 9)),
    "momentum": optax.sgd(0.1, 0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.1)),
    **{
        name: make(0.1)
        for name, make in dict(
            adabelief=optax.adabelief,
            adadelta=optax.adadelta,
            adagrad=optax.adagrad,
            adamax=optax.adamax,
            adan=optax.adan,
            amsgrad=optax.amsgrad,
            lamb=optax.lamb,
            nadam=optax.nadam,
            novograd=optax.novograd,
            radam=optax.radam,
            rmsprop=optax.rmsprop,
            rprop=optax.rprop,
            yogi=optax.yogi,
            schedule_free=optax.contrib.schedule_free_adamw,
            prodigy=optax.contrib.prodigy,
        ).items()
    },
    # Older versions lack it.
    **({"muon": optax.contrib.muon(0.1)} if hasattr(optax.contrib, "muon") else {}),
    "inject": optax.inject_hyperparams(optax.adam)(optax.constant_schedule(0.25)),
}


def is_inexact(params):
    return jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), params)


def labels(params):
    return jax.tree.map(lambda known: "a" if known else "b", is_inexact(params))


WRAPPERS = {
    "frozen": hki.freeze_declared,
    "frozen dense": lambda o: hki.freeze_declared(o, trainable_dense=".*/b"),
    "whole": lambda o: o,
    "masked": lambda o: optax.masked(o, is_inexact),
    "multi": lambda o: optax.multi_transform({"a": o, "b": optax.sgd(0.1)}, labels),
    "steps": lambda o: optax.MultiSteps(hki.freeze_declared(o), 2),
    "schedule-free": lambda o: hki.freeze_declared(optax.contrib.schedule_free(o, 0.1)),
    "quantized": lambda o: hki.freeze_declared(hki.quantized_state(o, "int8", block=8, min_size=8)),
}


@pytest.mark.parametrize("wrapper", few(WRAPPERS))
def test_states_of_each_optimizer_and_each_kind_of_weights(wrapper, path):
    shift = list(WRAPPERS).index(wrapper)
    kinds = KINDS[shift % 3 :: 3]
    optimizers = itertools.islice(itertools.cycle(OPTIMIZERS.values()), 3 * shift, None)
    done = 0
    for optimizer, kind in zip(optimizers, kinds, strict=False):
        params = {"m": {"w": weight(kind), "b": jnp.ones(4)}}
        try:
            state = WRAPPERS[wrapper](optimizer).init(params)
        except (TypeError, ValueError):  # it does not take such weights
            continue
        check(path, state)
        done += 1
    assert done > 0.7 * len(kinds)


# --- the optimizer that README recommends ----------------------------------------------------------


def trained(kind="int8", optimizer="adam"):
    params = {"up": {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}, "att": {"w": jnp.ones((8, 4))}}
    params = hki.quantize_params(params, dtype=kind, targets="up/w")
    params = hki.add_lora(params, 0, rank=2)
    state = hki.freeze_declared(OPTIMIZERS[optimizer]).init(params)
    return {"params": params, "optimizer": state, "step": 3}


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    few(
        [("int8", "adam"), ("int8", "adafactor"), ("int4", "lbfgs"), ("nf4", "inject")],
        ("int8", "adam"),
        ("int8", "adafactor"),
    ),
)
def test_a_state_of_freeze_declared_in_each_way_to_read_it(kind, optimizer, path, capsys):
    tree = trained(kind, optimizer)
    check(path, tree)
    host = hki.load(path, numpy=True)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(host["optimizer"]))
    jax.tree.map(np.testing.assert_array_equal, host, tree)
    assert_same(hki.load(path, only="optimizer"), {"optimizer": tree["optimizer"]})
    assert_same(hki.load(path, only="params/up/.*")["params"]["up"], tree["params"]["up"])
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    assert_same(hki.load(path, shardings=NamedSharding(mesh, P())), tree)
    with hki.open_checkpoint(path) as checkpoint:
        assert_same(checkpoint["optimizer"].read(), tree["optimizer"])
        places = hki.shardings(checkpoint["optimizer"].structs, P(), mesh)
        assert_same(checkpoint["optimizer"].read(shardings=places), tree["optimizer"])
    assert main(["inspect", str(path), "--key=optimizer"]) == 0
    floating = [
        x for x in jax.tree.leaves(tree["optimizer"]) if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    size = sum(x.size for x in floating)
    assert f"{size:,}" in capsys.readouterr().out.splitlines()[-1]


def test_training_goes_on_as_if_nothing_had_been(path):
    tree = trained()
    optimizer = hki.freeze_declared(OPTIMIZERS["adam"])
    grads = jax.tree.map(lambda x: x * 0 + 0.5, hki.partition(tree["params"])[0])
    hki.save(path, tree)
    found = hki.load(path)
    update = jax.jit(optimizer.update)
    wanted, given = (update(grads, x["optimizer"], x["params"]) for x in (tree, found))
    assert_same(given, wanted)


def test_the_file_of_another_state_is_not_like_it(path):
    hki.save(path, trained())
    for other, message in {
        "momentum": "optimizer/0: expected optax.TraceState, found optax.ScaleByAdamState",
        "adafactor": "optimizer/2: missing in the file, `like` has optax.EmptyState there",
    }.items():
        with pytest.raises(hki.CheckpointError, match=message):
            hki.load(path, like=trained(optimizer=other))


# --- parts of parameters, gradients --------------------------------------------------------------


@pytest.mark.parametrize("kind", few(KINDS, "lora of int4", "dora", "dense"))
def test_parts(kind, path):
    params = {"m": {"w": weight(kind), "b": jnp.ones(4)}}
    for half in hki.partition(params):
        check(path, half)


@pytest.mark.parametrize("hole", [None, optax.MaskedNode(), (), {}], ids=str)
def test_trees_without_arrays(hole, path):
    tree = jax.tree.map(lambda _: hole, {"m": {"w": made("lora of int4"), "b": jnp.ones(4)}})
    check(path, tree)
    check(path, hk.data_structures.to_immutable_dict(tree))


def test_gradients(path):
    w = hki.LoRA(jnp.ones((4, 4)), jnp.ones((4, 2)), jnp.ones((2, 4)))
    check(path, hki.grad(lambda w: (jnp.ones((1, 4)) @ w["w"]).sum())({"w": w}))
    grads = jax.grad(lambda x: jnp.sum(x["w"] * x["i"]), allow_int=True)
    tree = grads({"w": jnp.ones(3), "i": jnp.arange(3)})
    hki.save(path, tree)
    for found in (hki.load(path, like=tree), hki.load(path, numpy=True)):
        assert found["i"].dtype == jax.dtypes.float0 and found["i"].shape == (3,)
        np.testing.assert_array_equal(found["w"], [0, 1, 2])


# --- odd trees -----------------------------------------------------------------------------------


@hki.register_tree_type
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    step: Any
    params: Any
    optimizer: Any
    name: str = dataclasses.field(default="x", metadata=dict(static=True))


@hki.register_tree_type
@chex.dataclass
class Chex:
    a: Any
    b: int = 3


class Strict(NamedTuple("Strict", [("a", Any)])):
    """A named tuple whose constructor takes arrays alone."""

    def __new__(cls, a):
        if not isinstance(a, jax.Array | np.ndarray):
            raise TypeError("expected an array")
        return super().__new__(cls, a)


hki.register_tree_type(Strict)
X = np.ones(2, np.float32)
TREES = {
    "a dataclass": lambda: TrainState(jnp.int32(1), {"w": X}, optax.adam(0.1).init({"w": X})),
    "one of chex in another": lambda: TrainState(1, Chex(a={"w": made("lora")}), Chex(a=None)),
    "a constructor of its own": lambda: {"w": Strict(X)},
    "an immutable dict": lambda: hk.data_structures.to_immutable_dict(
        {"m": {"w": made("lora"), "n": None, "x": optax.MaskedNode(), "e": {}}}
    ),
    "empty": lambda: [{}, (), [], None, {"a": {}}, collections.OrderedDict(), optax.EmptyState()],
    "numbers": lambda: [np.float32(2), np.int8(1), np.bool_(True), np.float64("nan"), 1j],
    "None as a key": lambda: {None: X},
    "NaN as keys": lambda: {np.nan: X, 2.0: X, 1.0: X, np.inf: X},
    "NaN in keys": lambda: {(np.nan, 1): X, (0.5, 2): {np.nan: None}},
    "a lone surrogate": lambda: {"a\ud800": X, "a\\ud800": X},
}


@pytest.mark.parametrize("name", TREES)
def test_odd_trees(name, path):
    check(path, TREES[name]())


def test_keys_that_are_not_equal_to_themselves(path):
    tree = {float("nan"): X, 2.0: X + 1, 1.0: X}
    hki.save(path, tree)
    [nan, two, one] = found = hki.load(path, like={float("nan"): X, 2.0: X, 1.0: X})
    assert np.isnan(nan) and (two, one) == (2.0, 1.0)
    np.testing.assert_array_equal(found[2.0], X + 1)
    with pytest.raises(hki.CheckpointError, match="nan: the file has an array .* `like` nothing"):
        hki.load(path, like={2.0: X, 1.0: X})
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    with hki.open_checkpoint(path) as checkpoint:
        places = hki.shardings(checkpoint.structs, P(), mesh)
    assert hki.load(path, shardings=places)[1.0].sharding == NamedSharding(mesh, P())


def test_names_that_other_programs_read(path):
    hki.save(path, {"a\ud800": {"w": X}})
    with safetensors.safe_open(path, "numpy") as file:
        assert list(file.keys()) == ["a\\ud800/w"]


def keys():
    floats = st.floats().map(lambda x: np.nan if np.isnan(x) else x)
    scalars = [st.text(max_size=3), st.integers(), floats, st.booleans(), st.binary(max_size=3)]
    return st.sampled_from([*scalars, st.tuples(st.integers(), st.text(max_size=2))])


def children(of):
    dicts = keys().flatmap(lambda kind: st.dictionaries(kind, of, max_size=3))
    lists = st.lists(of, max_size=3)
    objects = st.builds(TrainState, of, of, of, st.text(max_size=3)) | st.builds(Chex, a=of)
    immutable = st.dictionaries(st.text(max_size=3), of, max_size=3).map(
        hk.data_structures.to_immutable_dict
    )
    return dicts | lists | lists.map(tuple) | objects | immutable


def leaves():
    halves = [*hki.partition(made("lora of int4")), hki.partition(made("static"))[1]]
    others = [X, None, optax.MaskedNode(), 1, "x", np.int8(3), np.zeros((0, 2), "int8")]
    return st.sampled_from(others) | st.sampled_from(halves)


@settings(max_examples=20, deadline=None)
@given(tree=st.recursive(st.deferred(leaves), children, max_leaves=9))
def test_random_trees_with_keys_of_each_kind(tree, tmp_path_factory):
    check(tmp_path_factory.mktemp("tree") / "x", tree)


# --- trees that no file holds --------------------------------------------------------------------


class Unsaid(NamedTuple):
    a: Any


class Doubled:
    """A field that takes a number for its half."""

    def __get__(self, instance, owner):
        return 1 if instance is None else instance.__dict__["number"]

    def __set__(self, instance, value):
        instance.__dict__["number"] = 2 * value


@hki.register_tree_type
@dataclasses.dataclass
class Doubling:
    number: int = Doubled()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [Unsaid(1)]}, "a/0: files cannot hold a Unsaid.*register_tree_type"),
        ({"tx": optax.adam(0.1)}, "tx/init: files cannot hold a function"),
        ([{"a": 1, 2: 3}], "0: a dict whose keys JAX can't sort"),
        ({"a": {frozenset([1]): X}}, "files cannot hold a key that is a frozenset"),
        ({"a": {np.str_("b"): X}}, "a/b: files cannot hold a key that is a str_"),
        ({"a": 10**5000}, r"a: files cannot hold a int \(Exceeds the limit"),
        ({"a": {float("nan"): X, np.nan: X}}, "a: 2 items, and 1 different keys.*give it back"),
        ({"a": collections.defaultdict(list)}, "a: files cannot hold a defaultdict"),
        ({"a": np.array(["x"])}, "a: files have no dtype str"),
        ({"a": {1}}, "a: files cannot hold a set"),
        (
            {"a": [Doubling()]},
            "a/0/number: a value made of its fields is not the same.*give it back",
        ),
        (
            {"w": jax.tree.map(lambda _: "x", made("lora"))},
            "w: expected arrays and numbers, found a str",
        ),
    ],
)  # fmt: skip
def test_trees_that_cannot_be_read_back_are_not_saved(tree, message, path):
    with pytest.raises(hki.CheckpointError, match=message) as raised:
        hki.save(path, tree)
    assert "\n" not in str(raised.value) and not path.exists()
