"""Trees in files: a loaded tree is the saved one, to the bit."""

import collections
import dataclasses
import string
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import haiku_implicit as hki
from haiku_implicit.files import dtypes
from tests.cases import CASES
from tests.files.trees import OTHERS, Registered, as_jax, assert_same, bits, made, mlp_params
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


@pytest.fixture
def again(path):
    """Saves and loads a tree; checks that it is the same, and like itself."""

    def run(tree, **how):
        hki.save(path, tree, **how)
        found = hki.load(path, like=tree)
        assert_same(found, tree)
        return found

    return run


# --- types ---------------------------------------------------------------------------------------


QUICK = ["lora of int4", "view of lora", "zeros", "constant complex", "static", "trained by rules"]


@pytest.mark.parametrize("name", few([*CASES, *OTHERS], *QUICK))
def test_each_type(name, again):
    w = made(name)
    found = again({"linear": {"w": w}})["linear"]["w"]
    assert type(found) is type(w) and found.shape == w.shape and found.dtype == w.dtype
    assert bits(hki.materialize(found)) == bits(hki.materialize(w))


def test_a_loaded_weight_works_in_each_transformation(again):
    w, x = CASES["lora of int4"](), jnp.ones((3, 4))
    found = again(w)
    for transform in (lambda f: f, jax.jit, hki.grad):
        run = transform(hki.use_implicit_args(lambda w, x: (x @ w).sum()))
        assert_same(run(found, x), run(w, x))


DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "complex64"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("shape", [(), pytest.param((3, 0), marks=pytest.mark.slow), (2, 3)])
def test_dtypes(shape, again):
    again({d: jnp.asarray(np.arange(np.prod(shape)).reshape(shape), d) for d in DTYPES})


def test_64_bits_stay_64_bits(path):
    tree = {d: np.arange(3).astype(d) * 2**40 for d in ("int64", "uint64", "float64", "complex128")}
    hki.save(path, tree)
    found = hki.load(path)
    for d, x in tree.items():
        assert isinstance(found[d], np.ndarray) and bits(found[d]) == bits(x)


def test_64_bits_in_the_64_bit_mode(again, x64):
    found = again({"a": jnp.arange(3.0), "b": hki.Zeros(shape=(2,), dtype=jnp.float64)})
    assert isinstance(found["a"], jax.Array) and found["a"].dtype == jnp.float64


def test_a_type_of_64_bits_is_read_in_32(path, x64):
    hki.save(path, hki.Zeros(shape=(2,), dtype=jnp.float64))
    constant = path.with_name("constant")
    hki.save(constant, hki.SymbolicConstant(0.1, shape=(2,), dtype=jnp.float64))
    jax.config.update("jax_enable_x64", False)
    assert hki.load(path).dtype == jnp.float32
    np.testing.assert_array_equal(hki.materialize(hki.load(path)), np.zeros(2, np.float32))
    np.testing.assert_array_equal(hki.materialize(hki.load(constant)), np.full(2, 0.1, np.float32))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys(impl, again):
    key = jax.random.key(7, impl=impl)
    found = again({"one": key, "many": jax.random.split(key, (2, 3))})
    np.testing.assert_array_equal(jax.random.uniform(found["one"]), jax.random.uniform(key))


@pytest.mark.parametrize("value", [2.5, 3, 1 + 2j])
def test_weak_types_stay_weak(value, again):
    found = again([jnp.asarray(value), jnp.full((2, 3), value)])
    assert found[1].weak_type


def test_orders_of_bytes_and_axes(path):
    tree = {"big": np.arange(6, dtype=">f4"), "fortran": np.asfortranarray(np.eye(3, 2)).T}
    tree["strided"] = np.arange(12, dtype=np.int16)[::-3]
    hki.save(path, tree)
    jax.tree.map(np.testing.assert_array_equal, hki.load(path), tree)


# --- containers and values -----------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    a: Any
    b: str = dataclasses.field(metadata=dict(static=True))


hki.register_tree_type(Data, name="tests.Data")


def test_containers_and_values(again):
    x = jnp.ones(2)
    found = again(
        {
            "values": [
                1,
                -(2**80),
                2.5,
                float("inf"),
                "text",
                b"bytes",
                True,
                None,
                1j,
                np.float32(2),
            ],
            "more": (
                np.dtype("int8"),
                np.dtype("bfloat16"),
                np.dtype(">i4"),
                ml_dtypes.bfloat16(3),
                np.int64(2**40),
            ),
            "empty": ((), [], {}, optax.EmptyState()),
            "ordered": collections.OrderedDict(b=x, a=2),
            "immutable": hk.data_structures.to_immutable_dict(
                {"m": {"w": CASES["lora"](), "b": x}}
            ),
            "named": Registered(3, {"w": x}),
            "data": Data({"w": CASES["int8"]()}, "static"),
            "lstm": hk.LSTMState(x, x),
            "": {"": x, "é/\n\"'": x},
        }
    )
    assert list(found["ordered"]) == ["b", "a"] and isinstance(found["named"].step, int)


@pytest.mark.parametrize(
    "tree", [{1: 2.0, 3: jnp.ones(1)}, {(1, "a"): jnp.ones(1)}, jnp.ones(2), 5, np.dtype(">f8")]
)
def test_other_keys_and_roots(tree, again):
    again(tree)


def test_names_are_unique(path, again):
    x = np.arange(8, dtype=np.float32)
    again({"a": {"b/c": x[0], "b": {"c": x[1]}}, "a/b": {"c": x[2]}, "__metadata__": jnp.ones(1)})
    again({"w": {"0": x[:2], "a.b": x[2:3]}, "w/0": jnp.ones(1)})


def leaves():
    numbers = (
        st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.none() | st.booleans()
    )
    shapes = st.lists(st.integers(0, 3), max_size=3)
    dtypes = st.sampled_from(["float32", "bool", "bfloat16", "int8", "complex64"])
    arrays = st.builds(lambda s, d: np.arange(np.prod(s)).reshape(s).astype(d), shapes, dtypes)
    return numbers | arrays | st.sampled_from([made("lora"), made("int8"), made("zeros")])


def containers(of):
    keys = st.text(string.printable, max_size=4)
    maps = st.dictionaries(keys, of, max_size=3)
    lists = st.lists(of, max_size=3)
    named = st.builds(Registered, of, of)
    return maps | lists | lists.map(tuple) | named | maps.map(collections.OrderedDict)


@settings(max_examples=25)
@given(tree=st.recursive(st.deferred(leaves), containers, max_leaves=12), room=st.integers(1, 200))
def test_random_trees(tree, room, tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "x"
    hki.save(path, tree, max_shard_bytes=room)
    assert_same(hki.load(path, like=tree), jax.tree.map(as_jax, tree))
    assert_same(hki.load(path, numpy=True), tree)


# --- parameters, states --------------------------------------------------------------------------


def test_parts_of_parameters(again):
    _, params = mlp_params()
    trainable, frozen = map(again, hki.partition(params, trainable_dense=False))
    assert_same(hki.combine(trainable, frozen), params)


@pytest.mark.parametrize(
    "method", few(["lora", "dora", "ia3", "loha", "lokr", "oft", "vera"], "dora")
)
def test_adapters(method, again):
    _, params = mlp_params()
    base = hki.merge_lora(params)
    options = {"ia3": {}, "oft": {"block_size": 2}}.get(method, {"rank": 2})
    adapter = hki.get_adapter(hki.add_adapter(base, 0, method, **options))
    found = again(adapter)
    assert_same(hki.set_adapter(base, found), hki.set_adapter(base, adapter))


def test_a_bank_of_adapters(again):
    params = mlp_params()[0].init(jax.random.key(0), jnp.ones((1, 8)))
    bank = hki.AdapterBank.of(params, capacity=2, rank=2)
    assert again(bank).capacity == 2


def labels(params):
    return {module: "a" if module.endswith("0") else "b" for module in params}


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.ema(0.9)),
    "multi": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, labels),
    "masked": optax.masked(optax.lion(1e-2), lambda p: {m: m.endswith("0") for m in p}),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=optax.constant_schedule(0.25)),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "quantized": hki.quantized_state(optax.adam(1e-2), "int8", block=8, min_size=8),
    "schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
}


@pytest.mark.parametrize("name", few(OPTIMIZERS, "adamw", "inject", "quantized"))
def test_optimizer_states_go_on_as_if_nothing_had_been(name, again):
    _, params = mlp_params()
    params = hki.partition(params, trainable_dense=False)[0]
    grads = jax.tree.map(lambda x: x + 0.5, params)
    optimizer = OPTIMIZERS[name]
    state = optimizer.update(grads, optimizer.init(params), params)[1]
    found = again(Registered(1, state)).params
    assert_same(optimizer.update(grads, found, params), optimizer.update(grads, state, params))


@pytest.mark.slow
@pytest.mark.parametrize("module", [optax, optax.contrib])
def test_the_state_of_every_optimizer_with_a_learning_rate(module, again):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    done = 0
    for name, make in vars(module).items():
        if not callable(make) or name.startswith("_") or isinstance(make, type):
            continue
        try:
            state = make(learning_rate=0.1).init(params)
        except Exception:  # not an optimizer, or one that needs more
            continue
        again(state)
        done += 1
    assert done >= {optax: 20, optax.contrib: 8}[module], done


@pytest.mark.slow
def test_layer_stack_and_haiku_state(again):
    def forward(x):
        x = hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(8)(x)))(x)
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    model = hki.transform_implicit(hk.transform_with_state(forward))
    x = jnp.ones((2, 8))
    params, state = model.init(jax.random.key(0), x)
    params = hki.add_lora(hki.quantize_params(params, dtype="int8"), jax.random.key(1), rank=2)
    found = again((params, state))
    assert_same(model.apply(*found, None, x), model.apply(params, state, None, x))


def test_what_creators_make(again):
    def forward(x):
        cache = hk.get_state("cache", (4, 8), init=jnp.zeros)
        hk.set_state("cache", cache + x.sum())
        return hk.Linear(4)(x)

    def with_creators(x):
        cached = hk.custom_creator(hki.cache_creator("int8"), params=False, state=True)
        with hk.custom_creator(hki.lora_creator(rank=2)), cached:
            return forward(x)

    model = hki.transform_implicit(hk.transform_with_state(with_creators))
    params, state = model.init(jax.random.key(0), jnp.ones((2, 8)))
    found = again({"params": params, "state": state})
    assert isinstance(found["params"]["linear"]["w"], hki.LoRA)


@dataclasses.dataclass
class NeverDense(hki.ImplicitArray):
    """A type whose arrays nobody may make dense."""

    codes: hki.ArrayValue

    def compute_shape(self):
        return (1000 * self.codes.shape[0],)

    def compute_dtype(self):
        return self.codes.dtype

    def materialize(self):
        raise NotImplementedError("this would be too large")


def test_a_type_that_is_never_dense(again):
    found = again({"w": NeverDense(jnp.arange(3.0))})
    assert found["w"].shape == (3000,)
    np.testing.assert_array_equal(found["w"].codes, np.arange(3.0))


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_arrays_do_not_use_the_memory_of_the_file(offset):
    """JAX uses aligned memory of NumPy as it is; a file that is written to would change parameters."""
    room = np.zeros(4096 + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    data = room[start : start + 4096]
    x = dtypes.array_of(data, "float32", (32, 32), weak_type=False, as_numpy=False)
    room[...] = 1
    assert x.shape == (32, 32) and not np.asarray(x).any()
