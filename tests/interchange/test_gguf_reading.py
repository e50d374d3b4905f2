"""GGUF files as parameters: values, places, and what is refused. `test_ggml.py` has the formats."""

import re
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.interchange.ggml import KINDS
from tests.interchange.ggml_blocks import blocks

RNG = np.random.default_rng(0)
Kind = gguf.GGMLQuantizationType
# The package quantizes to these; of the others random bytes are blocks, too (`test_ggml.py`).
QUANTIZED = [Kind[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", "MXFP4")]


def write(path, tensors, **options):
    """A GGUF file of `{name: (numbers or blocks, type)}`."""
    writer = gguf.GGUFWriter(path, arch="test", **options)
    for name, (numbers, kind) in tensors.items():
        as_it_is = kind == Kind.F32 or np.asarray(numbers).dtype == np.uint8  # blocks
        data = numbers if as_it_is else gguf.quantize(np.asarray(numbers, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def expected(numbers, kind):
    """What the package makes of it."""
    return gguf.dequantize(gguf.quantize(numbers, kind), kind)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [*QUANTIZED, Kind.F16, Kind.BF16, Kind.F32], ids=lambda k: k.name)
def test_values_are_those_of_the_package(kind, tmp_path):
    up, embedding = normal(6, 512), normal(10, 256)
    tensors = {"up.weight": (up, kind), "embedding.weight": (embedding, kind)}
    names = {"up.weight": "model/up/w", "embedding.weight": "model/embed/embeddings"}
    params = hki.load_gguf(write(tmp_path / "a.gguf", tensors), names)
    w, embeddings = params["model/up"]["w"], params["model/embed"]["embeddings"]
    assert isinstance(w, hki.QuantizedMatrix) == (kind.name in KINDS)
    assert w.dtype == embeddings.dtype == jnp.float32
    np.testing.assert_array_equal(hki.materialize(w), expected(up, kind).T)
    np.testing.assert_array_equal(hki.materialize(embeddings), expected(embedding, kind))


def test_the_bytes_of_every_type_are_those_of_the_package(tmp_path):
    """Of blocks of random bytes, also in types that the package can't quantize to."""
    write(tmp_path / "a.gguf", {name: blocks(name)[::-1] for name in KINDS})
    found = {t.name: t for t in hki.open_gguf(tmp_path / "a.gguf").tensors}
    params = hki.load_gguf(tmp_path / "a.gguf", lambda name: f"m/{name}")["m"]
    for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors:
        assert found[t.name].kind == t.tensor_type.name
        np.testing.assert_array_equal(found[t.name].data, t.data)
        wanted = gguf.dequantize(t.data, t.tensor_type)
        np.testing.assert_array_equal(hki.materialize(params[t.name]), wanted)


def test_dtypes(tmp_path):
    tensors = {"a": (normal(4, 32), Kind.Q8_0), "b": (normal(4), Kind.F32), "c": (normal(2, 3), Kind.BF16)}  # fmt: skip
    path = write(tmp_path / "a.gguf", tensors)
    names = {name: f"m/{name}" for name in tensors}
    found = {
        dtype: {n: x.dtype.name for n, x in hki.load_gguf(path, names, dtype=dtype)["m"].items()}
        for dtype in ("bfloat16", None)
    }
    assert found["bfloat16"] == dict.fromkeys("abc", "bfloat16")
    assert found[None] == dict(a="float32", b="float32", c="bfloat16")
    w = hki.load_gguf(path, names, dtype="bfloat16")["m"]["a"]
    want = expected(tensors["a"][0], Kind.Q8_0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(hki.materialize(w), want)


# --- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.F16], ids=lambda k: k.name)
def test_a_parameter_of_another_shape(kind, tmp_path):
    """`[inputs, heads, width]` of rows `[heads * width, inputs]`, and `[heads, width, outputs]`."""
    query, output = normal(4 * 8, 64), normal(16, 4 * 8)
    path = write(tmp_path / "a.gguf", {"q": (query, kind), "o": (output, kind)})
    names = {
        "q": hki.Place("attention/query/w", shape=(64, 4, 8)),
        "o": hki.Place("attention/out/w", shape=(4, 8, 16)),
    }
    params = hki.load_gguf(path, names)
    q, o = params["attention/query"]["w"], params["attention/out"]["w"]
    assert isinstance(q, hki.MatrixView) == isinstance(o, hki.MatrixView) == (kind.name in KINDS)
    want = expected(query, kind).T.reshape(64, 4, 8), expected(output, kind).T.reshape(4, 8, 16)
    np.testing.assert_array_equal(hki.materialize(q), want[0])
    np.testing.assert_array_equal(hki.materialize(o), want[1])
    x = normal(3, 64)
    got = hki.use_implicit_args(lambda x, w: jnp.einsum("bi,ihw->bhw", x, w))(x, q)
    np.testing.assert_allclose(got, np.einsum("bi,ihw->bhw", x, want[0]), rtol=1e-5, atol=1e-5)


def test_experts_stay_a_stack(tmp_path):
    experts = normal(3, 8, 64)
    path = write(tmp_path / "a.gguf", {"up": (experts, Kind.Q4_0)})
    want = expected(experts, Kind.Q4_0)
    for axes, swapped in (None, False), ((0, 2, 1), True):
        w = hki.load_gguf(path, {"up": hki.Place("moe/up", axes)})["moe"]["up"]
        assert isinstance(w, hki.QuantizedMatrix)
        np.testing.assert_array_equal(hki.materialize(w), want.swapaxes(1, 2) if swapped else want)
    place = hki.Place("moe/up", (0, 2, 1), (3, 64, 2, 4))
    w = hki.load_gguf(path, {"up": place})["moe"]["up"]
    np.testing.assert_array_equal(hki.materialize(w), want.swapaxes(1, 2).reshape(3, 64, 2, 4))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (hki.Place("moe/up", (2, 0, 1)), r"only the last two axes can change places, got \(2, 0, 1\)"),
        (hki.Place("moe/up", None, (24, 64)), r"the rows and the columns of \[3, 8, 64\]"),
        (hki.Place("moe/up", None, (3, 8, 63)), r"expected 1512 numbers for moe/up .* got \[3, 8, 64\]"),
        (hki.Place("moe/up", (0, 1)), r"up \[3, 8, 64\]: moe/up: axes: expected each of 0 \.\.\. 2"),
        ("up", r"names gives 'up' for it, expected 'module/name'"),
    ],
)  # fmt: skip
def test_places_that_a_quantized_tensor_cannot_have(place, message, tmp_path):
    path = write(tmp_path / "a.gguf", {"up": (normal(3, 8, 64), Kind.Q4_0)})
    with pytest.raises(ValueError, match=message) as info:
        hki.load_gguf(path, {"up": place})
    assert str(info.value).startswith(f"{path}: up")


def test_the_way_out_is_a_dense_parameter(tmp_path):
    experts = normal(3, 8, 64)
    path = write(tmp_path / "a.gguf", {"up": (experts, Kind.Q4_0)})
    place = hki.Place("moe/up", (2, 0, 1))
    w = hki.load_gguf(path, {"up": place}, dequantize="moe/up")["moe"]["up"]
    assert isinstance(w, jax.Array)
    np.testing.assert_array_equal(w, expected(experts, Kind.Q4_0).transpose(2, 0, 1))
    with pytest.raises(ValueError, match="dequantize"):
        hki.load_gguf(path, {"up": place}, dequantize="other")


# --- the model's parameters ----------------------------------------------------------------------


def test_the_parameters_have_to_be_those_of_the_model(tmp_path):
    tensors = {"a": (normal(4, 32), Kind.Q8_0), "b": (normal(4), Kind.F32)}
    path = write(tmp_path / "a.gguf", tensors)
    names = {"a": "linear/w", "b": "linear/b"}
    model = {"linear": {"w": np.zeros((32, 4)), "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}}
    assert set(hki.load_gguf(path, names, like=model)["linear"]) == {"w", "b"}
    model["linear"]["w"] = np.zeros((4, 32))
    model["head"] = {"w": np.zeros(3)}
    del model["linear"]["b"]
    with pytest.raises(hki.CheckpointError) as info:
        hki.load_gguf(path, names, like=model)
    assert str(info.value) == (
        f"{path}: not the parameters of `like`: head/w: expected [3], no tensor has this place; "
        "linear/w: expected [4, 32], got [32, 4] of a [4, 32]; linear/b: the model has no such "
        "parameter, b has this place (docs/errors.md#files)"
    )


def test_two_tensors_at_one_place(tmp_path):
    path = write(tmp_path / "a.gguf", dict.fromkeys("ab", (normal(4), Kind.F32)))
    with pytest.raises(ValueError, match=r"m/x: names gives two tensors this place, a and b"):
        hki.load_gguf(path, lambda name: "m/x")


# --- types and files -----------------------------------------------------------------------------


def test_one_error_names_all_tensors_that_are_not_read(tmp_path):
    tensors = {name: (normal(2, 256), Kind.TQ1_0) for name in ("one", "two")}
    tensors |= {"three": (normal(2, 256), Kind.Q4_0)}
    path = write(tmp_path / "a.gguf", tensors)
    message = r"types that are not read: TQ1_0: one, two\. Read are F32, .*, MXFP4\. "
    with pytest.raises(hki.CheckpointError, match=message):
        hki.load_gguf(path, {name: f"m/{name}" for name in tensors})
    names = {"one": None, "two": None, "three": "m/w"}
    assert set(hki.load_gguf(path, names)["m"]) == {"w"}


@pytest.mark.parametrize("number", [31, 137, 1000])
def test_types_that_are_not_known(number, tmp_path):
    """Nothing is known of their size. Other tensors are read, and those after them."""
    path, numbers = tmp_path / "a.gguf", normal(4, 32)
    kinds = {"a": Kind.F32, "b": Kind.Q8_0, "c": Kind.Q4_0}
    write(path, {name: (numbers, kind) for name, kind in kinds.items()})
    row = b"b" + struct.pack("<I2Q", 2, 32, 4)
    data = path.read_bytes()
    assert data.count(row + struct.pack("<I", Kind.Q8_0)) == 1
    path.write_bytes(
        data.replace(row + struct.pack("<I", Kind.Q8_0), row + struct.pack("<I", number))
    )
    found = hki.load_gguf(path, {"a": "m/a", "b": None, "c": hki.Place("m/c", (0, 1))})["m"]
    np.testing.assert_array_equal(found["a"], numbers)
    np.testing.assert_array_equal(found["c"].materialize(), expected(numbers, Kind.Q4_0))
    what = f"the type {number}, which is not known: GGML no longer has it, .* ik_llama.cpp, or the file"
    message = f"b has {what}"
    with pytest.raises(hki.CheckpointError, match=message) as info:
        hki.load_gguf(path, {name: f"m/{name}" for name in kinds})
    assert "truncated" not in str(info.value)
    tensors = {t.name: t for t in hki.open_gguf(path).tensors}
    assert tensors["b"].data is None and re.match(what, tensors["b"].kind)
    np.testing.assert_array_equal(tensors["a"].data, numbers)


def test_one_tensor_at_two_places(tmp_path):
    table = normal(4, 32)
    path = write(tmp_path / "a.gguf", {"embed": (table, Kind.Q8_0)})
    found = hki.load_gguf(path, {"embed": ["embed/embeddings", "head/w"]})
    want = expected(table, Kind.Q8_0)
    np.testing.assert_array_equal(found["embed"]["embeddings"].materialize(), want)
    np.testing.assert_array_equal(found["head"]["w"].materialize(), want.T)


def test_what_is_not_a_gguf_file(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK")
    with pytest.raises(hki.CheckpointError, match=r"a.gguf: not a GGUF file"):
        hki.load_gguf(path, {})
    with pytest.raises(FileNotFoundError):
        hki.load_gguf(tmp_path / "none.gguf", {})


def test_files_for_other_machines(tmp_path):
    tensors = {"a": (normal(2, 32), Kind.F32)}
    path = write(tmp_path / "a.gguf", tensors, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(
        hki.CheckpointError, match=r"a.gguf: only little-endian GGUF files are read"
    ):
        hki.load_gguf(path, {"a": "m/a"})


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'haiku-implicit\[gguf\]'"):
        hki.load_gguf(tmp_path / "a.gguf", {})


def test_the_file_is_not_held_by_the_parameters(tmp_path):
    """A view of the mapped file would change with it."""
    numbers = normal(64, 64)
    path = write(tmp_path / "a.gguf", {"a": (numbers, Kind.F32), "b": (numbers, Kind.Q8_0)})
    params = hki.load_gguf(path, {"a": hki.Place("m/a", (0, 1)), "b": "m/b"})["m"]
    want = jax.tree.map(np.array, params)
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    jax.tree.map(np.testing.assert_array_equal, params, want)
