"""Checkpoints as files: several of them, parts of them, those of other programs; and errors."""

import collections
import errno
import functools
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from haiku_implicit.files import replacing, structure
from tests.files.trees import Registered, assert_same, bits, mlp_params

pytestmark = pytest.mark.usefixtures("may_be_dense")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


class Unknown(NamedTuple):
    a: Any


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
    hki.save(path, {"a": jnp.ones(3), "b": jnp.ones(3)}, max_shard_bytes=4)
    assert path.is_symlink() and len(list((tmp_path / "real").iterdir())) == 2
    assert_same(hki.load(path), {"a": jnp.ones(3), "b": jnp.ones(3)})


def test_links_to_each_file(tmp_path, path):
    """As in the cache of the Hugging Face hub, whose links lead to files of other names."""
    hki.save(path, {"a": jnp.ones(3), "b": jnp.ones(3)}, max_shard_bytes=4)
    for i, file in enumerate(list(tmp_path.iterdir())):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        file.rename(tmp_path / "blobs" / str(i))
        file.symlink_to(tmp_path / "blobs" / str(i))
    assert_same(hki.load(path), {"a": jnp.ones(3), "b": jnp.ones(3)})


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


def lora(rank=2):
    return hki.LoRA(
        *(jax.device_put(np.ones(s, np.float32)) for s in ((4, 4), (4, rank), (rank, 4)))
    )


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"m": {"w": lora(3), "b": 1}}, r"m/w.a: expected an array float32\[4, 3\], found an array float32\[4, 2\]"),
        ({"m": {"w": jnp.ones((4, 4)), "b": 1}}, r"m/w: expected an array float32\[4, 4\], found haiku_implicit.LoRA"),
        ({"m": {"w": lora(), "b": jnp.ones(1)}}, r"m/b: expected an array float32\[1\], found a Python value"),
        ({"m": {"w": lora()}}, "m/b: the file has a Python value there, `like` nothing"),
        ({"m": {"w": lora(), "b": 1, "c": 1}}, "m/c: missing in the file, `like` has a Python value there"),
        ([], "the tree: expected list, found dict"),
        ({"m": {"w": lora()._replace(a=jnp.ones((4, 2), jnp.bfloat16)), "b": 1}}, "m/w"),
        ({"m": {"w": lora()._replace(factor=jnp.ones(())), "b": 1}}, "m/w.factor: expected an array .*, found None"),
    ],
)  # fmt: skip
def test_a_tree_that_is_not_like_the_other(like, message, path):
    hki.save(path, {"m": {"w": lora(), "b": 1}})
    with pytest.raises(hki.CheckpointError, match=message) as raised:
        hki.load(path, like=like)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    hki.load(path, like={"m": {"w": jax.tree.map(struct, lora()), "b": 2}})


@pytest.mark.parametrize("kind", [jnp.float16, np.float32, bool])
def test_classes_of_dtypes_are_refused_with_the_way_out(kind, path):
    with pytest.raises(
        hki.CheckpointError, match=r"m/d: files cannot hold the class .*np\.dtype\("
    ):
        hki.save(path, {"m": {"d": kind}})
    hki.save(path, {"m": {"d": np.dtype(kind)}})
    assert hki.load(path) == {"m": {"d": np.dtype(kind)}}


def test_a_folder_that_may_not_be_written_is_named_by_the_file(path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "/x/.model.0123.part")

    monkeypatch.setattr(replacing, "start", refused)
    with pytest.raises(PermissionError, match="Permission denied") as raised:
        hki.save(path, {"a": jnp.ones(2)})
    assert raised.value.filename == str(path)


def test_static_metadata_that_is_not_like_the_other(path):
    w = hki.QuantizedMatrix.quantize(jnp.ones((4, 4)), "int8")
    hki.save(path, {"w": w})
    with pytest.raises(
        hki.CheckpointError,
        match=r"w: expected .*Quan.* with activation='int8', found activation=None\. ",
    ):
        hki.load(path, like={"w": w.with_activation("int8")})


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
        (np.dtype("bfloat16").newbyteorder(">"), "files cannot hold a dtype"),
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


def test_nesting(path, monkeypatch):
    def nest(levels):
        return functools.reduce(lambda inner, _: {"a": inner}, range(levels), jnp.ones(1))

    def from_below(calls):
        return from_below(calls - 1) if calls else hki.load(path)

    hki.save(path, nest(200))
    assert jax.tree.structure(from_below(300)) == jax.tree.structure(nest(200))
    with pytest.raises(hki.CheckpointError, match=r"at most 200 levels .*, got 201.*flatter"):
        hki.save(path, nest(201))
    with pytest.raises(hki.CheckpointError, match="too deeply, .* at most 200 levels"):
        hki.save(path, nest(2000))
    monkeypatch.setattr(structure, "_DEEPEST", 1000)  # as older versions wrote them
    hki.save(path, nest(300))
    assert jax.tree.structure(hki.load(path)) == jax.tree.structure(nest(300))


def test_other_mistakes(tmp_path, path):
    with pytest.raises(IsADirectoryError):
        hki.save(tmp_path, {})
    with pytest.raises(FileNotFoundError):
        hki.load(path)
    for room in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_shard_bytes: expected a positive integer"):
            hki.save(path, {}, max_shard_bytes=room)


def test_types_by_name(path):
    class PlainTuple(tuple): ...

    class Fields:
        _fields = ("a",)

    for kind in (dict, PlainTuple, Fields):
        with pytest.raises(TypeError, match="expected a named tuple or a dataclass"):
            hki.register_tree_type(kind)
    with pytest.raises(ValueError, match="LoRA is registered already"):
        hki.register_tree_type(hki.LoRA)
    with pytest.raises(ValueError, match=r"'haiku_implicit.LoRA' is already the type"):
        hki.register_tree_type(Unknown, name="haiku_implicit.LoRA")

    with pytest.raises(ValueError, match="name: expected a text like"):
        hki.register_tree_type(Unknown, name="dict")

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


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("no key", "no key (docs/errors.md#files)"),
        (
            "bad (docs/errors.md#a-b), so that it is lost",
            "bad, so that it is lost (docs/errors.md#a-b)",
        ),
        ("x" * 1495 + " (docs/errors.md#a-b)", "x" * 1495 + " (docs/errors.md#a-b)"),
    ],
)
def test_errors_end_in_one_link(text, want):
    assert str(hki.CheckpointError(text)) == want
