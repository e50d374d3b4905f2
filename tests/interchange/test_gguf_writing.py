"""GGUF files written, and what the `gguf` package reads in them."""

import os
import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki

NAMES = {
    "token_embd.weight": "embed/embeddings",
    "blk.0.attn_q.weight": "layer/q/w",
    "output_norm.weight": "norm/scale",
    "output.weight": hki.Place("head/w", (0, 1)),
}
METADATA = {"general.architecture": "mine", "mine.block_count": 1}


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def params():
    return {
        "embed": {"embeddings": jnp.asarray(normal(6, 64))},
        "layer/q": {"w": jnp.asarray(normal(64, 32))},
        "norm": {"scale": jnp.arange(64.0, dtype=jnp.bfloat16)},
        "head": {"w": jnp.asarray(normal(8, 64))},
    }


@pytest.fixture
def written(tmp_path):
    """Writes parameters, and returns the tensors of the file by name, and its metadata."""

    def write(params, names=NAMES, path=tmp_path / "model.gguf", metadata=METADATA, **options):
        hki.save_gguf(path, params, names, metadata=metadata, **options)
        reader = gguf.GGUFReader(path)
        fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        return {t.name: t for t in reader.tensors}, fields

    return write


def kinds(tensors):
    return [t.tensor_type.name for t in tensors.values()]


def test_dense_parameters_as_they_are(params, written):
    tensors, fields = written(params)
    assert list(tensors) == list(NAMES) and set(kinds(tensors)) == {"F32"}
    np.testing.assert_array_equal(tensors["token_embd.weight"].data, params["embed"]["embeddings"])
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight"].data, params["layer/q"]["w"].T)
    np.testing.assert_array_equal(tensors["output_norm.weight"].data, np.arange(64.0))
    np.testing.assert_array_equal(tensors["output.weight"].data, params["head"]["w"])
    assert fields == METADATA | {"general.quantization_version": 2, "general.file_type": 0}


def test_kinds_by_pattern_and_the_first_that_fits(params, written):
    rules = {"token_embd.*": "F16", r"blk\.\d+\..*": ("Q4_K", "Q8_0"), "output.*": "BF16"}
    tensors, fields = written(params, kind=rules)
    assert kinds(tensors) == ["F16", "Q8_0", "F32", "BF16"]
    for name, module in (("blk.0.attn_q.weight", "layer/q"), ("output.weight", "head")):
        want = params[module]["w"].T if module == "layer/q" else params[module]["w"]
        got = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        np.testing.assert_allclose(got, want, atol=0.02)
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0


def test_quantized_weights_bit_for_bit(params, written):
    del params["head"]
    quantized = hki.quantize_params(params, dtype="q4_0", targets="layer.*")
    quantized = hki.quantize_params(quantized, dtype="q8_0", axis=-1, targets="embed.*")
    names = {k: NAMES[k] for k in list(NAMES)[:3]}
    tensors, _ = written(quantized, names)
    assert kinds(tensors) == ["Q8_0", "Q4_0", "F32"]
    want = hki.materialize(quantized)
    for name, x in (
        ("token_embd.weight", want["embed"]["embeddings"]),
        ("blk.0.attn_q.weight", want["layer/q"]["w"].T),
    ):
        t = tensors[name]
        np.testing.assert_array_equal(gguf.quants.dequantize(t.data, t.tensor_type), x)


def test_a_weight_of_three_axes_and_one_of_experts(tmp_path, written):
    w = jnp.asarray(normal(64, 4, 8))
    q = hki.MatrixView.of(w, [-3], [-2, -1], hki.QuantizedMatrix.quantize, dtype="q8_0")
    experts = jnp.asarray(normal(3, 64, 5))
    params = {"q": {"w": q}, "experts": {"w": experts}}
    flat = {"q": {"w": jnp.reshape(w, (64, 32))}, "experts": params["experts"]}
    names = {"attn_q.weight": "q/w", "exps.weight": hki.Place("experts/w", (0, 2, 1))}
    written(flat, names, tmp_path / "flat.gguf", kind="F32")
    names["attn_q.weight"] = hki.Place("q/w", shape=(64, 4, 8))
    dense = {**params, "q": {"w": w}}
    with pytest.raises(
        ValueError, match=r"attn_q.weight: its Place has a shape.* \[64, 32\] or \[256"
    ):
        written(dense, names, kind="F32")
    # A view of a matrix says which axes are joined.
    tensors, _ = written(params, names, kind={"exps.*": "Q4_0"})
    got = gguf.quants.dequantize(tensors["attn_q.weight"].data, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(got, np.reshape(q.materialize(), (64, 32)).T)
    source = tmp_path / "flat.gguf"
    tensors, _ = written(params, names, metadata_from=source, kind={"exps.*": "Q4_0"})
    assert kinds(tensors) == ["Q8_0", "Q4_0"]
    got = gguf.quants.dequantize(tensors["attn_q.weight"].data, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(got, np.reshape(q.materialize(), (64, 32)).T)
    got = gguf.quants.dequantize(tensors["exps.weight"].data, gguf.GGMLQuantizationType.Q4_0)
    assert got.shape == (3, 5, 64)
    np.testing.assert_allclose(got, np.swapaxes(experts, 1, 2), atol=0.3)


def test_metadata_of_another_file(params, written, tmp_path):
    first = tmp_path / "first.gguf"
    own = METADATA | {
        "a.float": 0.5, "a.negative": -3, "a.large": np.uint64(2**40), "a.yes": True,
        "a.texts": ["ü", ""], "a.numbers": [1.5, 2.0], "a.signs": [-1, 1], "general.alignment": 64,
    }  # fmt: skip
    _, before = written(params, path=first, metadata=own, kind="Q4_0")
    changes = {"a.yes": None, "mine.block_count": 2}
    names = lambda tensor: NAMES[tensor]  # noqa: E731
    tensors, after = written(params, names, metadata=changes, metadata_from=first, kind="F16")
    assert list(tensors) == list(NAMES)
    expected = own | {
        "mine.block_count": 2, "general.file_type": 1, "general.quantization_version": 2
    }  # fmt: skip
    assert after == {k: v for k, v in expected.items() if k != "a.yes"}
    types = {k: f.types for k, f in gguf.GGUFReader(first).fields.items()}
    again = {k: f.types for k, f in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert again == {k: v for k, v in types.items() if k != "a.yes"}
    assert all(t.data_offset % 64 == 0 for t in tensors.values())


# Values of metadata, as a file has them: the number of the type, then the value.
LISTS = {
    "a.numbers": struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ2b", 1, 2, -1, 2)
    + struct.pack("<IQd", 12, 1, 0.1),
    "a.texts": struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 8, 2) + struct.pack("<Q", 2)
    + "ü".encode() + struct.pack("<Q", 0),
    "a.deep": struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 2) + struct.pack("<IQH", 2, 1, 7)
    + struct.pack("<IQ", 9, 0),
    "a.empty": struct.pack("<IIQ", 9, 8, 0),
    "a.flat": struct.pack("<IIQ3?", 9, 7, 3, True, False, True),
    "a.half": struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ", 5, 0) + struct.pack("<IQ2i", 5, 2, -5, 5),
}  # fmt: skip


def test_lists_in_lists_are_taken_over_byte_by_byte(params, tmp_path, written):
    source = tmp_path / "source.gguf"
    found = b"GGUF" + struct.pack("<IQQ", 3, 0, len(LISTS) + 1)
    text = lambda x: struct.pack("<Q", len(x)) + x.encode()  # noqa: E731
    for key, value in LISTS.items():
        found += text(key) + value
    source.write_bytes(found + text("general.architecture") + struct.pack("<I", 8) + text("mine"))
    hki.save_gguf(tmp_path / "new.gguf", params, NAMES, metadata_from=source)
    new = (tmp_path / "new.gguf").read_bytes()
    for key, value in LISTS.items():
        assert new.count(text(key) + value) == 1, key
    hki.save_gguf(tmp_path / "again.gguf", params, NAMES, metadata_from=tmp_path / "new.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == new
    tensors, _ = written(params, metadata_from=source)
    np.testing.assert_array_equal(tensors["output.weight"].data, params["head"]["w"])


def test_lists_in_lists_that_are_given(params, tmp_path):
    nested = {
        "a.signed": [[1, 2], [-3]],
        "a.typed": np.arange(4, dtype=np.int8).reshape(2, 2),
        "a.texts": [[["x"], ["yz"]]],
    }
    path = tmp_path / "model.gguf"
    hki.save_gguf(path, params, NAMES, metadata=METADATA | nested)
    data = path.read_bytes()
    list_of = lambda kind, *values: struct.pack("<IQ", kind, len(values)) + b"".join(values)  # noqa: E731
    number = struct.pack
    for want in (
        list_of(9, list_of(4, number("<I", 1), number("<I", 2)), list_of(5, number("<i", -3))),
        list_of(9, list_of(1, b"\0", b"\1"), list_of(1, b"\2", b"\3")),
        list_of(
            9, list_of(9, list_of(8, number("<Q", 1) + b"x"), list_of(8, number("<Q", 2) + b"yz"))
        ),
    ):
        assert data.count(number("<I", 9) + want) == 1
    with pytest.raises(ValueError, match="metadata: a: expected a list of numbers or texts of one"):
        hki.save_gguf(path, params, NAMES, metadata=METADATA | {"a": [[1], 2]})


def test_a_tensor_of_two_parameters(params, written):
    """It is written once, if both have the same values."""
    both = [NAMES["token_embd.weight"], hki.Place("head/w", (0, 1))]
    names = {name: place for name, place in NAMES.items() if name != "output.weight"}
    names["token_embd.weight"] = both
    params["head"]["w"] = params["embed"]["embeddings"]
    tensors, _ = written(params, names)
    assert list(tensors) == list(names)
    np.testing.assert_array_equal(tensors["token_embd.weight"].data, params["head"]["w"])
    params["head"]["w"] = params["head"]["w"].at[3, 5].add(1)
    with pytest.raises(
        ValueError, match="token_embd.weight: .*'head/w' for it, which have different"
    ):
        written(params, names)


def test_a_file_stays_until_the_next_one_is_complete(params, written, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    written(params)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        written(params, kind="F16")
    params["head"]["w"] = params["head"]["w"].at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="output.weight, head/w: .*not finite"):
        written(params, kind="Q8_0")
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.gguf"]


def with_lora(params):
    return hki.add_lora(params, 0, rank=2, targets="layer.*")


@pytest.mark.parametrize(
    "change, options, message",
    [
        (with_lora, {}, r"layer/q/w: a LoRA adapter.*merge_adapters\(params\).*requantize=True"),
        (lambda p: p, dict(kind="Q4_K"), r"token_embd.weight: rows of 64 .*\(256 for Q4_K\).*'F16'"),
        (lambda p: p, dict(kind="Q4_2"), "kind: expected one of F32.*got 'Q4_2'"),
        (lambda p: p | {"new": {"b": jnp.ones(1)}}, {}, "new/b: names has no tensor for it"),
        (lambda p: {k: p[k] for k in list(p)[1:]}, {}, "token_embd.weight: names has 'embed/embedd"),
        (lambda p: hki.quantize_params(p, targets="head.*", dtype="nf4", group_size=4), {},
         "output.weight: head/w is nf4 in groups of 4 along the columns of the tensor, with scales in "
         "float32, which is not the format.*kind='Q8_0'"),
        (lambda p: p, dict(names=NAMES.get), "names: a function does not say what tensors there are"),
        (lambda p: p, dict(metadata={"a": 1}), "metadata: 'general.architecture' is missing"),
        (lambda p: p, dict(metadata=METADATA | {"a": [1, "b"]}), "metadata: a: expected a list"),
        (lambda p: p, dict(metadata=METADATA | {"a": 2**40}), "metadata: a: .*numpy.uint64"),
        (lambda p: p, dict(metadata_from=__file__), "metadata_from: .*not a GGUF file"),
    ],
)  # fmt: skip
def test_errors(params, written, tmp_path, change, options, message):
    with pytest.raises(ValueError, match=message):
        written(change(params), **options)
    assert not os.listdir(tmp_path)


def test_a_merged_adapter_keeps_the_format_where_asked(params, written):
    q = with_lora(hki.quantize_params(params, dtype="q4_0", targets="layer.*"))
    lora = q["layer/q"]["w"]
    q["layer/q"]["w"] = lora._replace(b=jnp.ones_like(lora.b))
    merged = hki.merge_adapters(q, requantize=True)
    tensors, _ = written(merged)
    assert kinds(tensors) == ["F32", "Q4_0", "F32", "F32"]
    t = tensors["blk.0.attn_q.weight"]
    got = gguf.quants.dequantize(t.data, t.tensor_type).T
    np.testing.assert_array_equal(got, merged["layer/q"]["w"].materialize())
    step = np.abs(lora.materialize()).max() / 7
    np.testing.assert_allclose(got, q["layer/q"]["w"].materialize(), atol=step)


def test_the_package_is_optional(params, written, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(
        ImportError, match=r"GGUF files need gguf: pip install 'haiku-implicit\[gguf\]'"
    ):
        written(params)
    assert hki.to_ggml(jnp.ones((32, 1)), "F32").dtype == np.float32


def test_a_pattern_of_kinds_has_to_match_a_whole_name(params, written):
    with pytest.raises(
        ValueError, match=r"kind: no tensor's whole name matches 'blk'. Nearest: blk"
    ):
        written(params, kind={"blk": "Q8_0"})
    tensors, _ = written(params, kind={r"blk\..*": "q8_0", ".*": "F16"})
    assert kinds(tensors)[1] == "Q8_0"


@pytest.mark.parametrize("order", "<>")
def test_tokens_that_are_parts_of_a_character(order, tmp_path):
    """Tokenizers of bytes have such texts; they are copied as they are, from either byte order."""

    def value(order):
        tokens = [b"caf\xc3\xa9", b"\xc3", b"\xa9\xff"]
        parts = [struct.pack(f"{order}Q", len(token)) + token for token in tokens]
        return struct.pack(f"{order}IIQ", 9, 8, len(tokens)) + b"".join(parts)

    fields = {b"general.architecture": struct.pack(f"{order}IQ", 8, 4) + b"test"}
    fields[b"tokens"] = value(order)
    path = tmp_path / "bytes.gguf"
    keys = [struct.pack(f"{order}Q", len(key)) + key + x for key, x in fields.items()]
    path.write_bytes(b"GGUF" + struct.pack(f"{order}IQQ", 3, 0, len(fields)) + b"".join(keys))
    copy = tmp_path / "copy.gguf"
    params = {"m": {"w": jnp.ones((4, 32))}}
    hki.save_gguf(copy, params, {"w": "m/w"}, kind="F32", metadata_from=path)
    assert value("<") in copy.read_bytes()
    assert hki.open_gguf(copy).fields["tokens"].contents()[0] == "café"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"\udc80": 1}, r"metadata: '\\udc80': a file can't hold 1"),
        ({"a": ["b", "\udc80"]}, "metadata: 'a': a file can't hold"),
        ({"a": [-1, 2**31]}, "metadata: 'a': a file can't hold"),
        ({"a": 1e300}, "metadata: 'a': a file can't hold"),
        ({"general.alignment": 7}, "'general.alignment': expected a power of two, got 7"),
        ({"general.alignment": "x"}, "'general.alignment': expected a power of two, got 'x'"),
        ({"general.alignment": 0}, "'general.alignment': expected a power of two, got 0"),
    ],
)
def test_metadata_that_a_file_cannot_hold(metadata, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_text("kept")
    params = {"m": {"w": jnp.ones((4, 32))}}
    with pytest.raises(ValueError, match=message):
        hki.save_gguf(path, params, {"w": "m/w"}, kind="F32", metadata={**METADATA, **metadata})
    assert path.read_text() == "kept"


def test_an_opened_file_says_what_it_holds(written, params, tmp_path):
    written(params, kind="F32")
    opened = hki.open_gguf(tmp_path / "model.gguf")
    assert repr(opened).endswith(" fields, 4 tensors)")
