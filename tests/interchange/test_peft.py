"""Adapters in the files of PEFT: read, written, and what is wrong in them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki

NAMES = {"model.layers.0.q_proj": "model/layer_0/q/w", "model.layers.1.q_proj": "model/layer_1/q/w"}
BACK = {path: module for module, path in NAMES.items()}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


BASE = {f"model/layer_{i}/q": {"w": jnp.asarray(normal((5, 4), i))} for i in range(2)}


def tensors_of(ranks=(2, 2), magnitude=False):
    found = {}
    for i, rank in enumerate(ranks):
        prefix = f"base_model.model.model.layers.{i}.q_proj"
        found[f"{prefix}.lora_A.weight"] = normal((rank, 5), 10 + i)
        found[f"{prefix}.lora_B.weight"] = normal((4, rank), 20 + i)
        if magnitude:
            found[f"{prefix}.lora_magnitude_vector"] = 1 + abs(normal((4,), 30 + i))
    return found


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


# What PEFT says of the scale of each of two layers, and what it has to be.
SCALES = {
    "alpha": ({}, (2, 2), [3.0, 3.0]),
    "rslora": ({"use_rslora": True}, (2, 2), [6 / 2**0.5] * 2),
    "patterns": (
        {"rank_pattern": {r"layers\.1\.q_proj": 3}, "alpha_pattern": {"layers.0.q_proj": 1}},
        (2, 3),
        [0.5, 2.0],
    ),
}


@pytest.mark.parametrize("name", SCALES)
def test_lora_is_what_peft_says(tmp_path, name):
    config, ranks, scales = SCALES[name]
    tensors = tensors_of(ranks)
    adapter = hki.load_peft(write(tmp_path, {**CONFIG, **config}, tensors), NAMES)
    dense = hki.materialize(hki.set_adapter(BASE, adapter))
    for i, scale in enumerate(scales):
        prefix = f"base_model.model.model.layers.{i}.q_proj"
        delta = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
        want = BASE[f"model/layer_{i}/q"]["w"] + scale * delta.T
        np.testing.assert_allclose(dense[f"model/layer_{i}/q"]["w"], want, rtol=1e-5, atol=1e-6)


def test_dora_is_what_peft_says(tmp_path):
    tensors = tensors_of(magnitude=True)
    folder = write(tmp_path, {**CONFIG, "use_dora": True}, tensors)
    dense = hki.materialize(hki.set_adapter(BASE, hki.load_peft(folder, lambda m: NAMES[m])))
    for i in range(2):
        prefix = f"base_model.model.model.layers.{i}.q_proj"
        delta = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
        v = np.asarray(BASE[f"model/layer_{i}/q"]["w"]) + 3 * delta.T
        want = v / np.linalg.norm(v, axis=0) * tensors[f"{prefix}.lora_magnitude_vector"]
        np.testing.assert_allclose(dense[f"model/layer_{i}/q"]["w"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_written_and_read_again(tmp_path, method):
    options = {"rank": 2, "alpha": 6.0, "patterns": {".*layer_1.*": {"rank": 3, "alpha": 2.0}}}
    params = hki.add_adapter(BASE, 0, method, **options)
    params = {m: {"w": own["w"]._replace(b=own["w"].b + 0.5)} for m, own in params.items()}
    adapter = hki.get_adapter(params)
    hki.save_peft(tmp_path / "new", adapter, BACK, base_model="somebody/model")
    again = hki.load_peft(tmp_path / "new", NAMES)
    assert sorted(again.weights) == sorted(NAMES.values())
    first, second = (hki.materialize(hki.set_adapter(BASE, a)) for a in (adapter, again))
    for path in BASE:
        np.testing.assert_array_equal(first[path]["w"], second[path]["w"])
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somebody/model"
    assert config["use_dora"] == (method == "dora") and config["target_modules"] == sorted(NAMES)
    # As any program reads it.
    tensors = safetensors.numpy.load_file(tmp_path / "new" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.q_proj.lora_A.weight"].shape == (3, 5)


def test_an_embedding_has_names_of_its_own(tmp_path):
    """Those that PEFT looks for in an `Embedding`."""
    base = {"embed": {"embeddings": jnp.asarray(normal((7, 4), 0))}}
    params = hki.add_lora(base, 0, rank=2, targets=".*embeddings")
    names = {"embed/embeddings": "wte"}
    hki.save_peft(tmp_path, hki.get_adapter(params), names)
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    shapes = {key.removeprefix("base_model.model."): x.shape for key, x in tensors.items()}
    assert shapes == {"wte.lora_embedding_A": (2, 7), "wte.lora_embedding_B": (4, 2)}
    with pytest.warns(UserWarning, match="PEFT adapts the look-up alone"):
        again = hki.load_peft(tmp_path, {"wte": "embed/embeddings"})
    assert list(again.weights) == list(names)


def test_a_name_that_ends_in_another_one_keeps_its_rank(tmp_path):
    names = {f"{x}/w": x for x in ("head", "block.head", "other")}
    base = {x: {"w": jnp.asarray(normal((5, 4), 0))} for x in ("head", "block.head", "other")}
    ranks = {"^head/w": {"rank": 2, "alpha": 1.0}, "block.*": {"rank": 3, "alpha": 1.5}}
    params = hki.add_adapter(base, 0, "lora", rank=1, alpha=1.0, patterns=ranks)
    hki.save_peft(tmp_path, hki.get_adapter(params), names)
    again = hki.load_peft(tmp_path, {x: path for path, x in names.items()})
    found = {path: (w.rank, float(w.factor)) for path, w in again.weights.items()}
    assert found == {"head/w": (2, 0.5), "block.head/w": (3, 0.5), "other/w": (1, 1.0)}


def test_a_view_of_a_matrix_takes_it(tmp_path):
    tensors = tensors_of((2,))
    adapter = hki.load_peft(write(tmp_path, CONFIG, tensors), NAMES)
    w = {"model/layer_0/q": {"w": jnp.asarray(normal((5, 2, 2), 0))}}
    axes = {".*": ([-3], [-2, -1])}
    base = hki.quantize_params(w, dtype="int8", matrix_axes=axes)
    dense = hki.materialize(hki.set_adapter(base, adapter))["model/layer_0/q"]["w"]
    a, b = tensors.values()
    want = hki.materialize(base)["model/layer_0/q"]["w"].reshape(5, 4) + 3 * (b @ a).T
    np.testing.assert_allclose(dense.reshape(5, 4), want, rtol=1e-5, atol=1e-6)


def without(mapping, *names):
    return {k: v for k, v in mapping.items() if not k.endswith(names)}


PREFIX = "base_model.model.model.layers.0.q_proj"
WRONG = {
    "no alpha": (without(CONFIG, "lora_alpha"), {}, "lora_alpha: expected a number, got None"),
    "kind": ({**CONFIG, "peft_type": "VERA"}, {}, "peft_type: expected 'LORA', got 'VERA'"),
    "bias": ({**CONFIG, "bias": "all"}, {}, "bias: 'all' is not read"),
    "saved": (
        {**CONFIG, "modules_to_save": ["head"]},
        {},
        "modules_to_save: .'head'. are not read",
    ),
    "rank": ({**CONFIG, "r": 3}, {}, "q_proj: rank 3 by adapter_config.json, 2 by the tensors"),
    "no B": (CONFIG, {f"{PREFIX}.lora_B.weight": None}, "q_proj: lora_B: missing"),
    "unknown": (CONFIG, {f"{PREFIX}.hada_w1": normal((2, 2), 0)}, "hada_w1: not a tensor of LoRA"),
    "convolution": (
        CONFIG,
        {f"{PREFIX}.lora_A.weight": normal((2, 5, 3, 3), 0)},
        "q_proj: expected lora_A .rank, inputs.",
    ),
    "unnamed": (
        CONFIG,
        {"base_model.model.head.lora_A.weight": normal((2, 5), 0)},
        "head: names has no place for it",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path, name):
    config, changes, message = WRONG[name]
    tensors = {k: v for k, v in {**tensors_of(), **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        hki.load_peft(write(tmp_path, config, tensors), NAMES)


def test_a_configuration_that_is_no_json(tmp_path):
    folder = write(tmp_path, CONFIG, tensors_of())
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json: not JSON"):
        hki.load_peft(folder, NAMES)


def test_two_parameters_of_one_name(tmp_path):
    adapter = hki.get_adapter(hki.add_lora(BASE, 0, rank=1))
    with pytest.raises(
        ValueError, match="names: two parameters are 'same', the second one is 'model/l"
    ):
        hki.save_peft(tmp_path / "new", adapter, lambda path: "same")
    with pytest.raises(TypeError, match="adapter: expected an adapter apart from its base"):
        hki.save_peft(tmp_path / "new", BASE, BACK)


def test_a_file_without_an_adapter(tmp_path):
    with pytest.raises(ValueError, match="there is no adapter in it"):
        hki.load_peft(write(tmp_path, CONFIG, {}), NAMES)


def test_what_cannot_be_written(tmp_path):
    adapter = hki.get_adapter(hki.add_adapter(BASE, 0, "loha", rank=1))
    with pytest.raises(ValueError, match="model/layer_0/q/w: PEFT's LoRA .* got LoHa"):
        hki.save_peft(tmp_path / "new", adapter, BACK)
    stacked = {"stack": {"w": jnp.ones((3, 5, 4))}}
    adapter = hki.get_adapter(hki.add_lora(stacked, 0, rank=1))
    with pytest.raises(ValueError, match="stack/w: PEFT's LoRA is for single matrices"):
        hki.save_peft(tmp_path / "new", adapter, {"stack/w": "stack"})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("base", ["dense", "view"])
def test_a_weight_of_more_axes(tmp_path, base):
    """`[inputs, heads, width]`, where PEFT has a matrix `[heads * width, inputs]`."""
    tensors = tensors_of((2,))
    place = hki.Place("attention/q", (1, 0), (5, 2, 2))
    names = {"model.layers.0.q_proj": place}
    adapter = hki.load_peft(write(tmp_path, CONFIG, tensors), names)
    params = {"attention": {"q": jnp.asarray(normal((5, 2, 2), 3))}}
    if base == "view":
        axes = {"attention/q": ([-3], [-2, -1])}
        params = hki.quantize_params(params, dtype="int8", targets=".*", matrix_axes=axes)
    a, b = (tensors[f"base_model.model.model.layers.0.q_proj.lora_{k}.weight"] for k in "AB")
    want = hki.materialize(params)["attention"]["q"] + 3 * (b @ a).T.reshape(5, 2, 2)
    got = hki.materialize(hki.set_adapter(params, adapter))["attention"]["q"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_places_that_do_not_fit_an_adapter_and_modules_left_out(tmp_path):
    folder = write(tmp_path, CONFIG, tensors_of())
    of_both = lambda place: dict.fromkeys(NAMES) | {"model.layers.0.q_proj": place}  # noqa: E731
    assert list(hki.load_peft(folder, of_both("a/w")).weights) == ["a/w"]
    with pytest.raises(
        ValueError, match=r"layers.0.q_proj: shape: .* of \[5, 4\], .* got \[2, 10\]"
    ):
        hki.load_peft(folder, of_both(hki.Place("a/w", shape=(2, 10))))
    with pytest.raises(
        ValueError, match=r"layers.0.q_proj: axes: expected \(1, 0\) .* got \(0, 1\)"
    ):
        hki.load_peft(folder, of_both(hki.Place("a/w", (0, 1))))
