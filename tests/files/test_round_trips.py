"""Trees that files hold: what is loaded is what was saved, to the bit."""

import collections
import dataclasses
import pickle
import string
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import haiku_implicit as hki
from haiku_implicit.quantization import QtRule, QuantRule, QuantStats
from tests.cases import CASES
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("may_be_dense")


def bits(x):
    """What tells an array from all others."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(x)), bits(jax.random.key_data(x))
    host = np.asarray(x)
    return str(host.dtype), host.shape, getattr(x, "weak_type", False), host.tobytes()


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert type(found) is type(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, jax.ShapeDtypeStruct):
            assert a == b and a.weak_type == b.weak_type
        elif hasattr(b, "dtype"):
            assert bits(a) == bits(b)
        else:
            assert type(a) is type(b) and a == b


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


def static_quantized():
    stats = QuantStats({"absmax": jnp.array([[2.0]])}, jnp.array(1.0), mode="fixed")
    return hki.StaticQuantized.of(CASES["int8"]().with_activation("int8"), stats)


def trained():
    rule = QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    return hki.TrainedQuantized(jnp.ones((4, 4)), rules=(rule, QuantRule(weight_qtype="nf4")))


OTHERS = {
    "static": static_quantized,
    "trained by rules": trained,
    "blocks": lambda: hki.QuantizedBlocks.quantize(jnp.ones((3, 5)), "int8", 8),
    "rounded": lambda: hki.QuantizedMatrix.quantize(jnp.ones((32, 4), jnp.bfloat16), "mxfp4"),
    "batched": lambda: CASES["lora of int4"](batch=(3,)),
    "stacked": lambda: CASES["view of lora"].stacked(0, 2),
    "constant nan": lambda: hki.SymbolicConstant(float("nan"), shape=(2,), dtype=jnp.float32),
}


def made(name):
    return OTHERS[name]() if name in OTHERS else CASES[name]()


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
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


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
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
    jax.config.update("jax_enable_x64", False)
    assert hki.load(path).dtype == jnp.float32


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


class Registered(NamedTuple):
    step: int
    params: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    a: Any
    b: str = dataclasses.field(metadata=dict(static=True))


class Unknown(NamedTuple):
    a: Any


hki.register_tree_type(Registered)
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
    "tree", [{1: 2.0, 3: jnp.ones(1)}, {(1, "a"): jnp.ones(1)}, jnp.ones(2), 5]
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


@settings(max_examples=60, deadline=None)
@given(tree=st.recursive(leaves(), containers, max_leaves=12), room=st.integers(1, 200))
def test_random_trees(tree, room, tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "x"
    hki.save(path, tree, max_shard_bytes=room)
    assert_same(hki.load(path, like=tree), jax.tree.map(as_jax, tree))
    assert_same(hki.load(path, numpy=True), tree)


def as_jax(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


# --- parameters, states --------------------------------------------------------------------------


def mlp_params():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 4])(x)))
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))
    params = hki.quantize_params(params, dtype="int4", group_size=4)
    return model, hki.add_lora(params, jax.random.key(1), rank=2, alpha=4.0)


def test_parts_of_parameters(again):
    _, params = mlp_params()
    trainable, frozen = map(again, hki.partition(params, trainable_dense=False))
    assert_same(hki.combine(trainable, frozen), params)


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
    assert done >= 3, done


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


# --- files ---------------------------------------------------------------------------------------


def test_other_programs_read_dense_parameters_by_their_names(path):
    model = hk.transform(lambda x: hk.nets.MLP([8, 4])(x))
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))
    hki.save(path, params)
    found = safetensors.numpy.load_file(path)
    assert sorted(found) == [f"mlp/~/linear_{i}/{n}" for i in range(2) for n in "bw"]
    for module, name, value in hk.data_structures.traverse(params):
        assert bits(found[f"{module}/{name}"]) == bits(np.asarray(value))
    _, params = mlp_params()
    hki.save(path, params)
    names = set(safetensors.numpy.load_file(path))
    assert {"mlp/~/linear_0/w.w.codes", "mlp/~/linear_0/w.a", "mlp/~/linear_0/b"} <= names


def test_files_of_other_programs(path):
    tensors = {
        "mlp/~/linear/w": np.eye(2, 3),
        "mlp/~/linear/b": np.ones(3, "f2"),
        "scale": np.int8([4]),
    }
    safetensors.numpy.save_file(tensors, path, {"format": "np"})
    found = hki.load(path, numpy=True)
    wanted = {
        "mlp/~/linear": {"w": np.eye(2, 3), "b": np.ones(3, "f2")},
        "": {"scale": np.int8([4])},
    }
    assert_same(found, wanted)
    assert list(hki.load(path, only="scale")) == [""]


@pytest.mark.parametrize("room", [1, 70, 1000])
def test_several_files(room, tmp_path, path):
    _, params = mlp_params()
    hki.save(path, params, max_shard_bytes=room)
    count = len(jax.tree.leaves(params))
    files = list(tmp_path.iterdir())
    assert len(files) == {1: count, 1000: 1}.get(room, len(files)) and path in files
    assert all(safetensors.numpy.load_file(file) for file in files)
    assert_same(hki.load(path, like=params), params)
    moved = tmp_path / "there"
    moved.mkdir()
    for file in files:
        file.rename(moved / file.name)
    assert_same(hki.load(moved / path.name), params)


def test_what_was_replaced_is_removed(tmp_path, path):
    _, params = mlp_params()
    others = [
        tmp_path / name for name in ("tree", "tree.safetensors.txt", "a.0123456789abcdef.part")
    ]
    hki.save(others[0], params, max_shard_bytes=100)
    for other in others[1:]:
        other.write_text("not of the checkpoint")
    kept = set(tmp_path.iterdir())
    hki.save(path, params, max_shard_bytes=100)
    hki.save(path, params, max_shard_bytes=100)
    hki.save(path, {"a": jnp.ones(1)})
    assert set(tmp_path.iterdir()) == kept | {path}
    assert_same(hki.load(others[0]), params)


def test_a_link_stays_a_link(tmp_path, path):
    (tmp_path / "real").mkdir()
    path.symlink_to(tmp_path / "real" / "file")
    hki.save(path, {"a": jnp.ones(3)}, max_shard_bytes=4)
    assert path.is_symlink() and (tmp_path / "real" / "file").exists()
    assert_same(hki.load(path), {"a": jnp.ones(3)})


def test_views_of_the_file(path):
    tree = {"a": {"w": np.arange(5, dtype=np.int8), "v": np.arange(6.0), "s": np.float32([1])}}
    hki.save(path, tree)
    found = hki.load(path, numpy=True)
    hki.save(path, {})  # which does not touch what is mapped
    assert_same(found, tree)
    for x in found["a"].values():
        assert not x.flags.writeable and not x.flags.owndata and x.flags.aligned


def test_parts_are_read_alone(path):
    _, params = mlp_params()
    hki.save(path, params)
    data = bytearray(path.read_bytes())
    with hki.open_checkpoint(path) as checkpoint:
        assert_same(checkpoint.structs, jax.tree.map(struct, params))
        assert checkpoint.structs["mlp/~/linear_0"]["w"].shape == (8, 8)
        assert list(checkpoint) == list(params) and list(checkpoint["mlp/~/linear_0"]) == ["w", "b"]
        found = checkpoint["mlp/~/linear_1"]["w"]
        assert_same(found, params["mlp/~/linear_1"]["w"])
        assert_same(checkpoint["mlp/~/linear_1"].read(), params["mlp/~/linear_1"])
        with pytest.raises(KeyError, match=r"has no 'mlp'; it has 'mlp/~/linear_0'"):
            checkpoint["mlp"]
    with pytest.raises(ValueError, match="closed"):
        checkpoint["mlp/~/linear_1"]["w"]
    # A parameter that is damaged does not keep the others from being read.
    codes = np.asarray(params["mlp/~/linear_0"]["w"].w.codes).tobytes()
    data[data.index(codes)] ^= 1
    path.write_bytes(data)
    with hki.open_checkpoint(path) as checkpoint:
        assert_same(checkpoint["mlp/~/linear_1"]["w"], params["mlp/~/linear_1"]["w"])
        with pytest.raises(hki.CheckpointError, match=r"linear_0/w.w.codes: .* damaged"):
            checkpoint["mlp/~/linear_0"]["w"]


def struct(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


def test_objects_and_lists_are_opened_too(path):
    state = Registered(4, [{"w": jnp.ones(2)}, (jnp.zeros(1), None)])
    hki.save(path, state)
    with hki.open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["step", "params"] and checkpoint["step"] == 4
        assert_same(checkpoint["params"][0]["w"], jnp.ones(2))
        assert checkpoint["params"][1][1] is None and len(checkpoint["params"]) == 2
        assert "Registered" in repr(checkpoint)
        with pytest.raises(ValueError, match="only: chooses from nested dicts"):
            checkpoint.read(only=".*")
        assert_same(checkpoint["params"][0].read(only="w"), {"w": jnp.ones(2)})


def test_only_some_parameters(path):
    _, params = mlp_params()
    hki.save(path, params)
    assert_same(hki.load(path, only=".*/b"), {m: {"b": p["b"]} for m, p in params.items()})
    names = ["mlp/~/linear_1/w"]
    wanted = {"mlp/~/linear_1": {"w": params["mlp/~/linear_1"]["w"]}}
    assert_same(hki.load(path, only=names), wanted)
    chosen = lambda m, n, x: isinstance(x, hki.LoRA) and x.shape == (8, 4)  # noqa: E731
    assert_same(hki.load(path, only=chosen, like=wanted), wanted)
    with pytest.raises(ValueError, match="only: 'b' matches none of the 4 parameters"):
        hki.load(path, only="b")
    with pytest.raises(ValueError, match="only: no parameter is 'mlp/b'"):
        hki.load(path, only=["mlp/b"])


# --- errors --------------------------------------------------------------------------------------


def lora(rank=2, alpha=4.0):
    return hki.LoRA(jnp.ones((4, 4)), jnp.ones((4, rank)), jnp.ones((rank, 4)), alpha=alpha)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"m": {"w": lora(3), "b": 1}}, r"m/w.a: expected an array float32\[4, 3\], found an array float32\[4, 2\]"),
        ({"m": {"w": lora(alpha=1.0), "b": 1}}, r"m/w: expected haiku_implicit.LoRA float32\[4, 4\] with .*1.0"),
        ({"m": {"w": jnp.ones((4, 4)), "b": 1}}, r"m/w: expected an array float32\[4, 4\], found haiku_implicit.LoRA"),
        ({"m": {"w": lora(), "b": jnp.ones(1)}}, r"m/b: expected an array float32\[1\], found a Python value"),
        ({"m": {"w": lora()}}, "m/b: expected no such key, found it as a key"),
        ({"m": {"w": lora(), "b": 1, "c": 1}}, "m/c: expected it as a key, found no such key"),
        ([], "the tree: expected list, found dict"),
        ({"m": {"w": lora()._replace(a=jnp.ones((4, 2), jnp.bfloat16)), "b": 1}}, "m/w"),
    ],
)  # fmt: skip
def test_a_tree_that_is_not_like_the_other(like, message, path):
    hki.save(path, {"m": {"w": lora(), "b": 1}})
    with pytest.raises(hki.CheckpointError, match=message) as raised:
        hki.load(path, like=like)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    hki.load(path, like={"m": {"w": jax.tree.map(struct, lora()), "b": 2}})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (object(), r"m/w: files cannot hold a object\. .*register_tree_type"),
        (Unknown(jnp.ones(1)), "m/w: files cannot hold a Unknown"),
        (lambda x: x, "m/w: files cannot hold a function"),
        ({1, 2}, "files cannot hold a set"),
        (np.array(["a"]), "m/w: files have no dtype str"),
        (np.array([object()]), "m/w: files have no dtype object"),
        (np.ma.array([1.0], mask=[True]), "files cannot hold a MaskedArray"),
        (np.str_("a"), "files cannot hold a str_"),
        (collections.defaultdict(list), "files cannot hold a defaultdict"),
        ({object(): 1}, "m/w/<object"),
        (jax.ShapeDtypeStruct((1,), jnp.float32), "m/w: a ShapeDtypeStruct, which has no values"),
    ],
)  # fmt: skip
def test_what_files_cannot_hold(bad, message, tmp_path, path):
    with pytest.raises(hki.CheckpointError, match=message):
        hki.save(path, {"m": {"w": bad}})
    assert list(tmp_path.iterdir()) == []


def test_arrays_without_values(path):
    with pytest.raises(hki.CheckpointError, match=r"a: a tracer"):
        jax.jit(lambda x: hki.save(path, {"a": x}))(jnp.ones(1))
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(hki.CheckpointError, match="a: the array has been deleted"):
        hki.save(path, {"a": x})
    itself: list = []
    itself.append(itself)
    with pytest.raises(hki.CheckpointError, match="holds itself"):
        hki.save(path, itself)


def test_other_mistakes(tmp_path, path):
    with pytest.raises(IsADirectoryError):
        hki.save(tmp_path, {})
    with pytest.raises(FileNotFoundError):
        hki.load(path)
    for room in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_shard_bytes: expected a positive integer"):
            hki.save(path, {}, max_shard_bytes=room)


def test_types_by_name(path):
    with pytest.raises(TypeError, match="expected a named tuple or a dataclass"):
        hki.register_tree_type(dict)
    with pytest.raises(ValueError, match="LoRA is registered already"):
        hki.register_tree_type(hki.LoRA)
    with pytest.raises(ValueError, match=r"'tests.Data' is already the type"):
        hki.register_tree_type(Unknown, name="tests.Data")

    def make(fields):
        cls = NamedTuple("Twice", fields)
        return hki.register_tree_type(cls)

    first = make([("a", int)])
    hki.save(path, first(1))
    second = make([("a", int), ("b", int)])
    with pytest.raises(
        hki.CheckpointError, match=r"fields \['a'\] .* the class now has \['a', 'b'\]"
    ):
        hki.load(path)
    with pytest.raises(hki.CheckpointError, match="another Twice has been defined since"):
        hki.save(path, first(1))
    hki.save(path, second(1, 2))
    assert hki.load(path) == second(1, 2)


def test_a_pickle_of_what_was_loaded(again):
    """Nothing in it holds on to the file."""
    found = again({"w": CASES["lora of int4"]()})
    assert_same(pickle.loads(pickle.dumps(found)), found)
