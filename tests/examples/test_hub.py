"""Models from folders of the hub, against what transformers computes with the same files.

``tests/data/make_hub_goldens.py`` says how the folders were made. Where transformers is installed,
fresh models are compared as well.
"""

import importlib.util
import json
import sys
import types

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
import hub
from models import t5
from tests.dense_twin import close, same_without_dense
from tests.examples.hub_folders import NAMES, ROOT, expected, tensors_of, write, write_shards
from tests.haiku_models import noise
from tests.tiers import few


def agrees(folder, rtol=1e-5):
    """The outputs of a folder's model are those in its `expected.npz`."""
    _, model, params = hub.load(folder)
    arguments, want = expected(folder)
    close(jax.jit(model.apply)(params, *arguments), want, rtol)


@pytest.mark.parametrize("name", few(NAMES, "gpt2", "t5_v1_1"))
def test_outputs_are_those_of_transformers(name):
    agrees(ROOT / name)


def test_a_folder_has_to_hold_the_model_that_is_asked_for():
    assert hub.load_as(t5.T5Config, ROOT / "t5").config.vocab_size == 40
    with pytest.raises(hub.InputError, match="gpt2: expected T5Config, got Gpt2Config"):
        hub.load_as(t5.T5Config, ROOT / "gpt2")


# --- What files of the same model look like -------------------------------------------------------


def renamed(tensors, prefix):
    """Without the prefix where there is one, and with it where there is none."""
    return {
        n.removeprefix(prefix) if n.startswith(prefix) else prefix + n: x
        for n, x in tensors.items()
    }


def old_gpt2():
    """As the hub has GPT-2: without a prefix, with the masks of attention, and the head again."""
    tensors = renamed(tensors_of("gpt2"), "transformer.")
    masks = {
        f"h.{i}.attn.{name}": np.ones((1, 1, 12, 12), np.uint8)
        for i in range(2)
        for name in ("bias", "masked_bias")
    }
    return tensors | masks | {"lm_head.weight": tensors["wte.weight"]}


def old_t5():
    tensors = tensors_of("t5")
    copies = {
        f"{side}.embed_tokens.weight": tensors["shared.weight"] for side in ("encoder", "decoder")
    }
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return (
        tensors
        | copies
        | {"lm_head.weight": tensors["shared.weight"], unused: np.zeros((8, 2), np.float32)}
    )


def old_bert():
    tensors = tensors_of("bert")
    last = {"weight": "gamma", "bias": "beta"}
    norms = [name for name in tensors if "LayerNorm" in name]
    for head, _, name in (norm.rpartition(".") for norm in norms):
        tensors[f"{head}.{last[name]}"] = tensors.pop(f"{head}.{name}")
    return tensors | {
        "bert.embeddings.position_ids": np.arange(12)[None],
        "bert.pooler.dense.weight": np.zeros((16, 16), np.float32),
        "cls.seq_relationship.bias": np.zeros(2, np.float32),
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
    }


VARIANTS = {
    "gpt2 as the hub has it": lambda path: write(path, "gpt2", old_gpt2(), n_inner=None, tie_word_embeddings=None),
    "gpt2 with a head of its own": lambda path: write(path, "gpt2", tensors_of("gpt2") | {"lm_head.weight": tensors_of("gpt2")["transformer.wte.weight"]}, tie_word_embeddings=False),
    "t5 as the hub has it": lambda path: write(path, "t5", old_t5(), feed_forward_proj=None, scale_decoder_outputs=None, tie_word_embeddings=None),
    "t5 v1.1 as the hub has it": lambda path: write(path, "t5_v1_1", tensors_of("t5_v1_1"), scale_decoder_outputs=None, tie_word_embeddings=False),
    "bert for pretraining": lambda path: write(path, "bert", old_bert(), architectures=["BertForPreTraining"]),
    "bert's encoder with a prefix": lambda path: write(path, "bert_encoder", renamed(tensors_of("bert_encoder"), "bert.")),
    "llama of version 4": lambda path: write(path, "llama", tensors_of("llama"), rope_parameters=None, rope_theta=50.0, head_dim=None),
    "llama in shards": lambda path: write_shards(path, "llama"),
    "vit in shards": lambda path: write_shards(path, "vit"),
}  # fmt: skip


@pytest.mark.parametrize("name", few(VARIANTS, "gpt2 as the hub has it"))
def test_files_of_the_same_model(name, tmp_path):
    agrees(VARIANTS[name](tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, rtol", [(np.float16, 0.01), (ml_dtypes.bfloat16, 0.1)])
def test_half_precision_files_are_read_as_float32(dtype, rtol, tmp_path):
    tensors = {name: x.astype(dtype) for name, x in tensors_of("gpt2").items()}
    params = hub.load(write(tmp_path, "gpt2", tensors)).params
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        params["gpt2/words"]["embeddings"], tensors["transformer.wte.weight"].astype(np.float32)
    )
    agrees(tmp_path, rtol)


# --- What cannot be read --------------------------------------------------------------------------


def refused(folder, message):
    with pytest.raises(hub.InputError, match=message) as info:
        hub.load(folder)
    assert str(info.value).startswith(str(folder)) and "\n" not in str(info.value)


FIRST = "transformer.h.0.mlp.c_fc.weight"
BAD_TENSORS = {
    "missing": (lambda t: t.pop(FIRST), r"tensor 'h.0.mlp.c_fc.weight' \(gpt2/layer_0/up/w\) is missing"),
    "extra": (lambda t: t.update({"transformer.h.2.ln_1.weight": t["transformer.ln_f.weight"]}), "'transformer.h.2.ln_1.weight' is not of the model"),
    "shape": (lambda t: t.update({FIRST: t[FIRST].T.copy()}), r"has shape \(64, 16\), expected \(16, 64\)"),
    "axes": (lambda t: t.update({FIRST: t[FIRST][0]}), r"has shape \(64,\), expected \(16, 64\)"),
    "integers": (lambda t: t.update({FIRST: t[FIRST].astype(np.int8)}), f"{FIRST}' is I8, expected F32, F16 or BF16"),
    "other head": (lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}), "'lm_head.weight' differs from 'transformer.wte.weight'"),
    "head of another class": (lambda t: t.update({"score.weight": np.zeros((2, 16), np.float32)}), "'score.weight' is not of the model"),
    "twice": (lambda t: t.update({"wte.weight": t["transformer.wte.weight"]}), "'wte.weight' is 'transformer.wte.weight' of model.safetensors, too"),
}  # fmt: skip


@pytest.mark.parametrize("case", few(BAD_TENSORS, "missing", "extra", "shape"))
def test_bad_tensors(case, tmp_path):
    change, message = BAD_TENSORS[case]
    change(tensors := tensors_of("gpt2"))
    refused(write(tmp_path, "gpt2", tensors), message)


BAD_SETTINGS = [
    ("gpt2", dict(model_type=None), "'model_type' is missing"),
    ("gpt2", dict(model_type="mamba"), "'mamba', expected one of bert, gpt2, llama, t5, vit"),
    ("gpt2", dict(architectures=["GPT2ForTokenClassification"]), "expected GPT2LMHeadModel"),
    ("gpt2", dict(activation_function="relu"), "'activation_function' is 'relu', expected 'gelu_new'"),
    ("gpt2", dict(quantization_config={"bits": 4}), "'quantization_config' is .*, expected None"),
    ("gpt2", dict(n_embd=None), "'n_embd' is missing"),
    ("gpt2", dict(n_embd="16"), "'n_embd' is '16', expected a positive whole number"),
    ("gpt2", dict(n_head=3), "dim 16 is not a multiple of num_heads 3"),
    ("gpt2", dict(layer_norm_epsilon=-1), "'layer_norm_epsilon' is -1, expected a positive number"),
    ("gpt2", dict(n_layer=1), "'transformer.h.1.* is not of the model"),
    ("gpt2", dict(tie_word_embeddings=False), "'lm_head.weight' .*is missing"),
    ("t5", dict(feed_forward_proj="gated-silu"), "'feed_forward_proj' is 'gated-silu'"),
    ("bert", dict(hidden_act="relu"), "'hidden_act' is 'relu', expected 'gelu'"),
    ("bert", dict(tie_word_embeddings=False), "'tie_word_embeddings' is False"),
    ("llama", dict(rope_parameters=dict(rope_type="llama3", factor=8.0)), "type 'llama3'"),
    ("llama", dict(rope_parameters=None, rope_scaling=dict(type="linear")), "type 'linear'"),
    ("llama", dict(rope_scaling=dict(rope_type="yarn")), "'rope_scaling' is of type 'yarn'"),
    ("llama", dict(rope_parameters=dict(partial_rotary_factor=0.5)), "'partial_rotary_factor' is 0.5"),
    ("llama", dict(attention_bias=True), "'attention_bias' is True"),
    ("llama", dict(head_dim=8), "'head_dim' is 8, expected 4"),
    ("llama", dict(num_key_value_heads=3), "num_heads 4 is not a multiple of num_kv_heads 3"),
    ("vit", dict(image_size=13), "image_size 13 is not a multiple of patch_size 4"),
    ("vit", dict(image_size=[12, 12]), r"'image_size' is \[12, 12\], expected a positive whole"),
    ("vit_pooled", dict(pooler_act="relu"), "'pooler_act' is 'relu', expected 'tanh'"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, settings, message", few(BAD_SETTINGS, BAD_SETTINGS[1], BAD_SETTINGS[3], BAD_SETTINGS[14])
)
def test_bad_settings(name, settings, message, tmp_path):
    refused(write(tmp_path, name, tensors_of(name), **settings), message)


def test_truncated_file_is_refused_wherever_it_ends(tmp_path):
    path = write(tmp_path, "gpt2", tensors_of("gpt2")) / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(tmp_path, "model.safetensors: truncated or damaged safetensors file")


def test_missing_and_damaged_files(tmp_path):
    refused(tmp_path, "config.json: No such file")
    write(tmp_path, "gpt2", {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, "neither model.safetensors nor .* pickled weights")
    for content in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        refused(tmp_path, "config.json: (not JSON|holds list, expected an object)")


def test_damaged_shards(tmp_path):
    write_shards(tmp_path, "gpt2")
    index = tmp_path / "model.safetensors.index.json"
    first, second = sorted(tmp_path.glob("model-*"))
    listed = json.loads(index.read_text())["weight_map"]

    def with_index(**changes):
        index.write_text(json.dumps(dict(weight_map=listed | changes)))

    with_index(gone=first.name)
    refused(tmp_path, f"{first.name}: tensor 'gone', which .*index.json lists, is missing")
    with_index(gone="../other.safetensors")
    refused(tmp_path, "'weight_map' names '../other.safetensors', expected a file beside it")
    index.write_text("{}")
    refused(tmp_path, "index.json: 'weight_map' is missing")
    with_index()
    again = safetensors.numpy.load_file(second)
    safetensors.numpy.save_file(
        again | {"transformer.h.0.attn.c_attn.bias": np.zeros(48, np.float32)}, second
    )
    refused(tmp_path, f"{second.name}: tensor .*c_attn.bias' is .* of {first.name}, too")
    second.unlink()
    refused(tmp_path, f"{second.name}: No such file")


def test_downloads_that_fail(monkeypatch):
    def fail(repo, **options):
        raise ConnectionError("no route\nto the hub")

    fake = types.SimpleNamespace(snapshot_download=fail)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    with pytest.raises(hub.InputError, match=r"^a/b: could not be downloaded \(no route\)$"):
        hub.fetch("a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        hub.InputError, match=r"huggingface_hub: pip install 'haiku-implicit\[hub\]'"
    ):
        hub.fetch("a/b")
    fake.snapshot_download = lambda repo, allow_patterns: str(ROOT / "gpt2")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert hub.load(hub.fetch("a/b")).config.num_layers == 2


# --- Implicit parameters in them ------------------------------------------------------------------


def with_lora(params):
    return noise(hki.add_lora(params, jax.random.key(0), rank=2))


WAYS = {
    "lora": with_lora,
    "int8": lambda params: hki.quantize_params(params, dtype="int8"),
    "lora on int4": lambda params: with_lora(hki.quantize_params(params, dtype="int4", group_size=4)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, way", [(n, w) for n in NAMES for w in WAYS])
def test_implicit_parameters_stay_implicit(name, way):
    _, model, params = hub.load(ROOT / name)
    arguments, _ = expected(ROOT / name)
    same_without_dense(model.apply, WAYS[way](params), *arguments, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_lora_are_those_of_the_dense_weights(name, never_dense):
    _, model, params = hub.load(ROOT / name)
    arguments, _ = expected(ROOT / name)
    trained, frozen = hki.partition(with_lora(params), trainable_dense=False)

    def loss(params):
        return (model.apply(params, *arguments) ** 2).mean()

    def implicit(trained):
        return hki.use_implicit_args(loss)(hki.combine(trained, frozen))

    def dense(trained):
        return loss(hki.materialize(hki.combine(trained, frozen)))

    found, want = (jax.jit(jax.grad(f))(trained) for f in (implicit, dense))
    jax.tree.map(lambda a, b: close(a, b, 1e-4), found, want)


# --- T5's relative positions ----------------------------------------------------------------------


def bucket_by_definition(distance, num_buckets, max_distance):
    """One key that is `distance` before its query, by the thresholds of the powers."""
    exact = num_buckets // 2
    if distance < exact:
        return distance
    steps = num_buckets - exact
    # The largest k with exact * (max_distance / exact) ** (k / steps) <= distance, in whole numbers.
    fits = [k for k in range(steps) if max_distance**k * exact**steps <= distance**steps * exact**k]
    return exact + max(fits)


@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 20), (32, 100)])
def test_relative_buckets(num_buckets, max_distance):
    keys = 300
    causal = t5.relative_buckets(keys, keys, False, num_buckets, max_distance)
    both = t5.relative_buckets(keys, keys, True, num_buckets, max_distance)
    for distance in range(keys):
        want = bucket_by_definition(distance, num_buckets, max_distance)
        assert causal[-1, keys - 1 - distance] == want and not causal[0, distance]
        half = bucket_by_definition(distance, num_buckets // 2, max_distance)
        assert both[-1, keys - 1 - distance] == half
        assert both[0, distance] == half + (num_buckets // 2 if distance else 0)


# --- Against transformers itself, where it is installed -------------------------------------------

if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    from tests.data import make_hub_goldens

    LIVE = {name: {} for name in NAMES} | {
        "gpt2": dict(n_inner=20, layer_norm_epsilon=0.1),
        "t5": dict(num_decoder_layers=2, layer_norm_epsilon=0.1),
        "llama": dict(num_key_value_heads=1, rms_norm_eps=0.1),
        "vit": dict(qkv_bias=False, num_channels=3, layer_norm_eps=0.1),
    }

    @pytest.mark.parametrize("name", NAMES)
    def test_outputs_are_those_of_transformers_now(name, tmp_path):
        make_hub_goldens.save(getattr(make_hub_goldens, name), tmp_path, **LIVE[name])
        agrees(tmp_path)

    @pytest.mark.parametrize("bidirectional", [True, False])
    def test_relative_buckets_are_those_of_transformers(bidirectional):
        torch = make_hub_goldens.torch
        attention = make_hub_goldens.transformers.models.t5.modeling_t5.T5Attention
        relative = torch.arange(-600, 601)
        for sizes in ((32, 128), (32, 100), (8, 20), (64, 256)):
            want = attention._relative_position_bucket(relative, bidirectional, *sizes).numpy()
            found = t5.relative_buckets(601, 601, bidirectional, *sizes)
            np.testing.assert_array_equal(found[-1], want[:601])
            np.testing.assert_array_equal(found[0], want[600:])
