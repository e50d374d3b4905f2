"""Adapters in the files of PEFT: read, written, and what is wrong in them."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from haiku_implicit.interchange.peft_config import KEYS
from tests.random_arrays import numpy_normal as normal
from tests.tiers import few

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
NAMES = {"model.layers.0.q_proj": "model/layer_0/q/w", "model.layers.1.q_proj": "model/layer_1/q/w"}
BACK = {path: module for module, path in NAMES.items()}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}


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
    with pytest.warns(UserWarning, match="embed/embeddings: PEFT adapts the look-up alone"):
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
    "rank": ({**CONFIG, "r": 3}, {}, "q_proj: rank 3 by adapter_config.json, 2 by the tensors"),
    "rank of a decomposition": (
        {**CONFIG, "r": 3, "init_lora_weights": "pissa"},
        {},
        "q_proj: rank 3 by adapter_config.json, 2 by the tensors",
    ),
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
    with pytest.raises(ValueError, match="model/layer_0/q/w: expected LoRA or DoRA, got LoHa"):
        hki.save_peft(tmp_path / "new", adapter, BACK)
    stacked = {"stack": {"w": jnp.ones((3, 5, 4))}}
    adapter = hki.get_adapter(hki.add_lora(stacked, 0, rank=1))
    with pytest.raises(ValueError, match="stack/w: expected the LoRA of one matrix"):
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


# --- what PEFT writes ----------------------------------------------------------------------------


@functools.cache
def goldens(file="peft_adapters.npz"):
    """What PEFT wrote and computed, by configuration; see tests/data/make_peft_goldens.py."""
    with np.load(DATA / file) as arrays:
        return {name: arrays[name] for name in arrays}


def of(name, *file):
    start = f"{name}/"
    return {k.removeprefix(start): x for k, x in goldens(*file).items() if k.startswith(start)}


def configurations(*file):
    return sorted({k.split("/")[0] for k in goldens(*file) if k.endswith("/config")})


CONFIGURATIONS = configurations()


def place(module):
    name = module.removeprefix("model.").replace(".", "/")
    return f"{name}/embeddings" if name == "embed" else f"{name}/w"


def blocks():
    """The parameters of the model that the adapters are for."""
    params = {}
    for key, w in of("base").items():
        own, name = place(key.removesuffix(".weight")).rsplit("/", 1)
        params[own] = {name: jnp.asarray(w if name == "embeddings" else w.T)}
    return params


def run(params):
    x = np.asarray(params["embed"]["embeddings"])[goldens()["ids"]]
    for i in range(2):
        up, down = (np.asarray(params[f"layers/{i}/{name}"]["w"]) for name in ("up", "down"))
        x = x + np.tanh(x @ up) @ down
    return x


def written_by_peft(folder, name):
    own = of(name)
    tensors = {k.removeprefix("tensors/"): x for k, x in own.items() if k.startswith("tensors/")}
    return write(folder, json.loads(str(own["config"])), tensors)


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:.*PEFT adapts the look-up alone")
@pytest.mark.parametrize(
    "name", few(CONFIGURATIONS, "ranks and alphas", "olora", "pissa, dora", "pissa, no higher rank")
)
def test_outputs_are_those_of_peft(tmp_path, name):
    adapter = hki.load_peft(written_by_peft(tmp_path, name), place, base=blocks())
    out = run(hki.materialize(hki.set_adapter(blocks(), adapter)))
    want = goldens()[f"{name}/out"]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    assert np.abs(run(blocks()) - want).max() > 0.05  # the adapter does something


@pytest.mark.parametrize("name", few(["pissa", "olora", "pissa, dora"], "pissa"))
def test_a_base_that_peft_changes_has_to_be_given(tmp_path, name):
    folder = written_by_peft(tmp_path, name)
    with pytest.raises(ValueError, match="init_lora_weights: '(pissa|olora)'.* as base=.*convert"):
        hki.load_peft(folder, place)
    other = blocks()
    other["layers/0/up"] = {"w": 2 * other["layers/0/up"]["w"]}
    adapter = hki.load_peft(folder, place, base=blocks())
    with pytest.raises(ValueError, match="layers/0/up/w: the adapter was made for another base"):
        hki.set_adapter(other, adapter)
    wrong = {
        "is not there": {"embed": other["embed"]},
        r"expected the shape \[6, 8\]": other | {"layers/0/up": {"w": jnp.ones((8, 6))}},
        "decomposes a dense weight": hki.quantize_params(other, dtype="int8"),
    }
    for message, base in wrong.items():
        with pytest.raises(ValueError, match=message):
            hki.load_peft(folder, place, base=base)


def test_a_base_in_more_axes(tmp_path):
    """The factors that PiSSA begins with are those of the matrix."""
    folder = written_by_peft(tmp_path, "pissa")
    names = lambda m: hki.Place(place(m), shape=(6, 2, 4)) if m.endswith("up") else None  # noqa: E731
    cut = {k: {"w": v["w"].reshape(6, 2, 4)} for k, v in blocks().items() if k.endswith("up")}
    params = hki.set_adapter(cut, hki.load_peft(folder, names, base=cut))
    whole = hki.set_adapter(blocks(), hki.load_peft(folder, place, base=blocks()))
    got = hki.materialize(params["layers/1/up"]["w"]).reshape(6, 8)
    np.testing.assert_allclose(got, hki.materialize(whole["layers/1/up"]["w"]), atol=1e-6)


# --- what PEFT trains beside the factors ----------------------------------------------------------


OF_PARTS = "peft_parts.npz"
PARTS = configurations(OF_PARTS)
ENDINGS = {"norm": "scale", "norm.bias": "offset", "embed": "embeddings"}


def part_place(name):
    """The place of a module's weight, or of its bias."""
    module = name.removeprefix("model.").removesuffix(".bias").replace(".", "/")
    ending = ENDINGS.get(name.removeprefix("model."), "b" if name.endswith(".bias") else "w")
    return f"{module}/{ending}"


def with_head():
    params = {}
    for key, x in of("base", OF_PARTS).items():
        own, name = part_place(key.removesuffix(".weight")).rsplit("/", 1)
        params.setdefault(own, {})[name] = jnp.asarray(x.T if name == "w" else x)
    return params


def run_with_head(params):
    def linear(x, name):
        return x @ params[name]["w"] + params[name]["b"]

    x = params["embed"]["embeddings"][goldens(OF_PARTS)["ids"]]
    for i in range(2):
        x = x + linear(jnp.tanh(linear(x, f"layers/{i}/up")), f"layers/{i}/down")
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return linear(x * params["norm"]["scale"] + params["norm"]["offset"], "head")


def written_with_parts(folder, name, **changes):
    own = of(name, OF_PARTS)
    tensors = {k.removeprefix("tensors/"): x for k, x in own.items() if k.startswith("tensors/")}
    return write(folder, json.loads(str(own["config"])) | changes, tensors)


@pytest.mark.filterwarnings("ignore:.*PEFT adapts the look-up alone")
@pytest.mark.parametrize("name", PARTS)
def test_parts_beside_the_factors_are_those_of_peft(tmp_path, name):
    adapter = hki.load_peft(written_with_parts(tmp_path, name), part_place)
    params = hki.set_adapter(with_head(), adapter)
    want = goldens(OF_PARTS)[f"{name}/out"]
    assert np.abs(run_with_head(with_head()) - want).max() > 0.05  # the adapter does something
    out = hki.use_implicit_args(run_with_head)(params)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    kept = hki.get_adapter(params, trainable_dense=list(adapter.dense) or None)
    assert sorted(kept.weights) == sorted(adapter.weights)
    assert sorted(kept.dense) == sorted(adapter.dense)


def test_biases_of_a_saved_module_are_those_that_peft_reads(tmp_path):
    """PEFT 0.21.2 reads `head.bias`, whatever the other two are, and fails without it."""
    folder = written_with_parts(tmp_path, "biases and modules")
    file = folder / "adapter_model.safetensors"
    tensors, head = safetensors.numpy.load_file(file), "base_model.model.head"
    for name in ("modules_to_save", "original_module"):
        tensors[f"{head}.{name}.bias"] += 9
    safetensors.numpy.save_file(tensors, file)
    dense = hki.load_peft(folder, part_place).dense
    np.testing.assert_array_equal(dense["head/b"], tensors.pop(f"{head}.bias"))
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(
        ValueError, match=r"model.head.bias: missing; PEFT does not read its copy .*head\.\w+.bias"
    ):
        hki.load_peft(folder, part_place)


def module_names():
    """The names of modules and of biases in PyTorch, by the parameters of the Haiku model."""
    names = [key.removesuffix(".weight") for key in of("base", OF_PARTS)]
    return {part_place(name): name for name in names}


@pytest.mark.filterwarnings("ignore:.*PEFT adapts the look-up alone")
@pytest.mark.parametrize("name", PARTS)
def test_parts_are_written_as_peft_wrote_them(tmp_path, name):
    """The same tensors; `tests/run_other_programs.sh peft` has PEFT read such files."""
    adapter = hki.load_peft(written_with_parts(tmp_path / "old", name), part_place)
    hki.save_peft(tmp_path / "new", adapter, module_names())
    old, new = (
        safetensors.numpy.load_file(tmp_path / x / "adapter_model.safetensors")
        for x in ("old", "new")
    )
    # With both keys PEFT also writes a saved module's biases by names that it does not read.
    unread = {key for key in old if "modules_to_save" in key or "original_module" in key}
    assert len(unread) == {"biases and modules": 4, "biases and a block": 4}.get(name, 0)
    assert old.keys() - unread == new.keys()
    for key, x in new.items():
        np.testing.assert_array_equal(old[key], x)
    again = hki.load_peft(tmp_path / "new", part_place)
    jax.tree.map(np.testing.assert_array_equal, again, adapter)
    assert jax.tree.structure(again) == jax.tree.structure(adapter)


def parts_of(weights=("layers/0/up/w",), **dense):
    """An adapter with LoRA on these weights, and with dense parameters."""
    params = {path.rpartition("/")[0]: {"w": jnp.ones((6, 8))} for path in weights}
    found = hki.get_adapter(hki.add_lora(params, 0, rank=1)) if weights else None
    return hki.AdapterParts(found.weights if found else {}, dense)


def trained_rows(path="embed/embeddings"):
    own, name = path.rsplit("/", 1)
    params = {own: {name: jnp.ones((9, 6))}}
    return hki.get_adapter(hki.add_adapter(params, 0, "trained_rows", ids=[2])).weights


UNWRITABLE_PARTS = [
    ({}, {"head/w": jnp.ones((3, 3, 1, 2))}, "head/w: trained as a whole, which is written of dense"),
    ({}, {"head/w": hki.quantize_params({"head": {"w": jnp.ones((32, 32))}}, dtype="int8")["head"]["w"]},
     "head/w: trained as a whole, which is written of dense"),
    ({"head/w": "up"}, {"head/w": jnp.ones((6, 5))}, "up: trained as a whole, by which PEFT means model.layers.0.up"),
    ({"head/w": "model.layers.0.up"}, {"head/w": jnp.ones((6, 5))}, "has an adapter, and a weight that is trained as a whole"),
    ({"head/w": "head.bias"}, {"head/w": jnp.ones(5), "head/b": jnp.ones(5)}, "two parameters are 'head.bias'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "dense", "message"), UNWRITABLE_PARTS)
def test_parts_that_cannot_be_written(tmp_path, changes, dense, message):
    with pytest.raises(ValueError, match=message):
        hki.save_peft(tmp_path / "new", parts_of(**dense), module_names() | changes)
    assert not (tmp_path / "new").exists()


def test_rows_that_cannot_be_written(tmp_path):
    names = {"embed/embeddings": "embed", "embed/w": "embed"}
    with pytest.raises(ValueError, match="expected LoRA or DoRA on one weight at least"):
        hki.save_peft(tmp_path / "new", hki.AdapterParts(trained_rows()), names)
    with pytest.raises(ValueError, match="embed/w: expected trained rows of one embedding"):
        hki.save_peft(tmp_path / "new", hki.AdapterParts(trained_rows("embed/w")), names)
    both = parts_of().weights | trained_rows() | trained_rows("decoder/embeddings")
    names = module_names() | {"embed/embeddings": "embed", "decoder/embeddings": "decoder.embed"}
    with pytest.raises(
        ValueError, match="embed: has trained rows, by which PEFT means decoder.embed"
    ):
        hki.save_peft(tmp_path / "new", hki.AdapterParts(both), names)
    assert not (tmp_path / "new").exists()


WRONG_PARTS = [
    ("all biases", {"bias": "none"}, "base_layer.bias|head.bias: not a tensor of LoRA"),
    ("all biases", {"bias": "some"}, "bias: expected 'none', 'all' or 'lora_only', got 'some'"),
    ("modules", {"modules_to_save": ["head"]}, "norm.(bias|weight): not a tensor of LoRA or DoRA"),
    ("modules", {"modules_to_save": "head"}, "modules_to_save: expected a list of names, got 'head'"),
    ("tokens", {"trainable_token_indices": [7]}, r"has 1 indices, and the rows are \[2, 6\]"),
    ("tokens", {"trainable_token_indices": [7, 7]}, "trainable_token_indices: expected indices, each"),
    ("tokens", {"trainable_token_indices": {"other": [1]}}, "trainable_tokens_delta: not a tensor of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_PARTS)
def test_parts_that_no_key_explains(tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        hki.load_peft(written_with_parts(tmp_path, name, **changes), part_place)


def test_a_part_that_is_left_out_or_has_the_place_of_another(tmp_path):
    folder = written_with_parts(tmp_path, "modules")
    only = lambda name: "head/b" if name == "head.bias" else None  # noqa: E731
    assert list(hki.load_peft(folder, only).dense) == ["head/b"]
    with pytest.raises(ValueError, match="two modules are 'head/b', the second one is"):
        hki.load_peft(folder, lambda name: "head/b" if "bias" in name else None)


# --- the keys of a configuration -----------------------------------------------------------------


def test_every_key_of_peft_has_a_place():
    """PEFT 0.21.2's, and the two that it has no more."""
    known = json.loads((DATA / "peft_config.json").read_text())
    assert set(KEYS) == {*known, "merge_weights", "enable_lora"}
    assert {key.use for key in KEYS.values()} == {"read", "unused", "refused"}


def loaded(folder, config):
    """The factors and scales, which with the base are all that outputs depend on."""
    adapter = hki.load_peft(write(folder, {**CONFIG, **config}, tensors_of()), NAMES)
    return jax.tree.leaves_with_path(jax.device_get(adapter))


def same(got, want):
    assert [path for path, _ in got] == [path for path, _ in want] and want
    for (_, x), (_, y) in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_peft_writes_by_default_is_read(tmp_path):
    config = json.loads((DATA / "peft_config.json").read_text())
    want = loaded(tmp_path / "short", {})
    got = loaded(tmp_path / "whole", config | {"r": 2, "lora_alpha": 6})
    same(got, want)


def named(use):
    return sorted(name for name, key in KEYS.items() if key.use == use)


@pytest.mark.parametrize("name", named("unused"))
def test_an_unused_key_changes_nothing(tmp_path, name):
    want = loaded(tmp_path / "without", {})
    for i, value in enumerate([True, 0.5, 7, "some text", ["q_proj"], {"rank": 3}]):
        got = loaded(tmp_path / str(i), {name: value})
        same(got, want)


@pytest.mark.parametrize("name", named("refused"))
def test_a_key_that_is_not_read_is_named(tmp_path, name):
    neutral = ["none"] if name == "bias" else [None, False, [], {}]
    want = loaded(tmp_path / "without", {})
    for i, value in enumerate(neutral):
        same(loaded(tmp_path / str(i), {name: value}), want)
    for value in (True, 7, "all", [1, 2], {"some": "option"}):
        with pytest.raises(
            ValueError, match=f"adapter_config.json: {name}: .* not read; .* is. .{{20}}"
        ):
            loaded(tmp_path / "refused", {name: value})


# Values of the keys that are read, of which there is no adapter of PEFT's above, and what is said.
WRONG_VALUES = [
    ({"a_key_of_a_newer_peft": True}, "'a_key_of_a_newer_peft': this key is not one of PEFT"),
    ({"a_key_of_a_newer_peft": None}, "'a_key_of_a_newer_peft': this key is not one of PEFT"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' .* random numbers"),
    ({"init_lora_weights": "corda"}, "init_lora_weights: 'corda' is not read.* convert"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights: 'loftq' is not read.* convert"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights: 'lora_ga' is not read.* convert"),
    ({"init_lora_weights": "PISSA"}, "init_lora_weights: 'PISSA' is not known"),
    ({"init_lora_weights": "pissa_niter_"}, "init_lora_weights: 'pissa_niter_' is not known"),
    ({"init_lora_weights": ["pissa"]}, "init_lora_weights: .'pissa'. is not known"),
    ({"init_lora_weights": "olora", "fan_in_fan_out": True}, "'olora' .* fan_in_fan_out"),
    ({"use_rslora": "false"}, "use_rslora: expected true or false, got 'false'"),
    ({"use_dora": 1}, "use_dora: expected true or false, got 1"),
    ({"use_dora": True}, "q_proj: lora_magnitude_vector: missing"),
    ({"target_modules": 3}, "target_modules: expected a text or a list of texts, got 3"),
    ({"target_modules": "("}, "target_modules: '.': not a regular expression"),
    ({"layers_pattern": ["("]}, "layers_pattern: .* not a regular expression"),
    ({"layers_pattern": "(?P<layer>a)"}, "layers_pattern: .* not a regular expression"),
    ({"layers_to_transform": "1"}, "layers_to_transform: expected whole numbers, got '1'"),
    ({"target_modules": ["proj"]}, "leaves model.layers.0.q_proj out by target_modules, .'proj'."),
    ({"target_modules": "q_proj"}, "leaves model.layers.0.q_proj out by target_modules"),
    ({"exclude_modules": ["1.q_proj"]}, "leaves model.layers.1.q_proj out by exclude_modules"),
    (
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 2]},
        "leaves model.layers.0.q_proj out by layers_to_transform",
    ),
    (
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "blocks"},
        "leaves model.layers.0.q_proj out by layers_to_transform",
    ),
]  # fmt: skip


@pytest.mark.parametrize("config, message", WRONG_VALUES)
def test_a_value_that_is_not_read_is_named(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path, config)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": []},
        {"target_modules": list(NAMES), "layers_to_transform": [5]},  # whole names come first
        {"target_modules": ["other"], "ensure_weight_tying": True},
        {"exclude_modules": ["proj", "0"]},
        {"init_lora_weights": None},
        {"rank_pattern": None, "alpha_pattern": None},
        {"fan_in_fan_out": True},
    ],
)
def test_values_that_leave_nothing_out(tmp_path, config):
    got, want = loaded(tmp_path / "with", config), loaded(tmp_path / "without", {})
    same(got, want)


@pytest.mark.parametrize(
    "key, message",
    [
        (f"{PREFIX}.lora_B.bias", "lora_B.bias: not a tensor of LoRA"),
        (f"{PREFIX}.base_layer.weight", "base_layer.weight: not a tensor of LoRA"),
        (f"{PREFIX}.lora_velora_embed", "lora_velora_embed: not a tensor of LoRA"),
        (f"{PREFIX}.lora_A", "lora_A: the module has two tensors lora_A|lora_A.weight: the module"),
        (f"{PREFIX}.lora_magnitude_vector", "lora_magnitude_vector: .* has no use_dora"),
        (f"{PREFIX}.lora_embedding_A", "q_proj: lora_embedding_B: missing"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*PEFT adapts the look-up alone")
def test_a_tensor_that_no_key_explains(tmp_path, key, message):
    tensors = tensors_of() | {key: normal((2, 5), 0)}
    with pytest.raises(ValueError, match=message):
        hki.load_peft(write(tmp_path, CONFIG, tensors), NAMES)


# --- LoRA that began with a part of its weight ---------------------------------------------------


INITS = {
    "pissa": "pissa",
    "olora": "olora",
    "loftq": hki.LoftQ("int8", iterations=2),
    "orthogonal": "orthogonal",
}


def moved(params):
    """Other factors than at the beginning."""
    step = lambda x: x._replace(a=x.a + 0.1, b=x.b - 0.2)  # noqa: E731
    return {m: {"w": step(own["w"])} for m, own in params.items()}


@pytest.mark.parametrize("init", few(INITS, "pissa", "orthogonal"))
@pytest.mark.parametrize("stabilized", few([False, True], True))
def test_written_for_the_weight_as_it_was(tmp_path, init, stabilized):
    options = dict(rank=2, alpha=3.0, init=INITS[init], rank_stabilized=stabilized)
    began = hki.add_lora(BASE, 0, **options)
    initial, params = hki.get_adapter(began), moved(began)
    changes = init != "orthogonal"
    if changes:
        with pytest.raises(ValueError, match="layer_0/q/w: its init .* changed .* initial="):
            hki.save_peft(tmp_path / "new", hki.get_adapter(params), BACK)
        assert not (tmp_path / "new").exists()
    hki.save_peft(tmp_path / "new", hki.get_adapter(params), BACK, initial=initial)
    adapter = hki.load_peft(tmp_path / "new", NAMES)
    assert {w.rank for w in adapter.weights.values()} == ({4} if changes else {2})
    got, want = hki.materialize(hki.set_adapter(BASE, adapter)), hki.materialize(params)
    for path in BASE:  # LoftQ's base lacks what int8 loses of a weight of deviation one
        np.testing.assert_allclose(
            got[path]["w"], want[path]["w"], atol=0.02 if init == "loftq" else 1e-5
        )


@pytest.mark.slow
def test_a_sum_of_them_is_one_of_them(tmp_path):
    """`w + (a1 b1 + a2 b2) / 2`, and not what is left of `w` below it."""
    began = hki.add_lora(BASE, 0, rank=2, alpha=3.0, init="pissa")
    initial = hki.get_adapter(began)
    for method in ({}, dict(rank=3), dict(method="ties", density=0.9)):
        adapters = [hki.get_adapter(moved(began)), initial]
        both = hki.combine_adapters(adapters, [0.5, 0.5], **method)
        with pytest.raises(ValueError, match="its init .* changed .* initial="):
            hki.save_peft(tmp_path, both, BACK)
        hki.save_peft(tmp_path, both, BACK, initial=initial)
        got = hki.materialize(hki.set_adapter(BASE, hki.load_peft(tmp_path, NAMES)))
        want = hki.materialize(hki.set_adapter(began, both))
        for path in BASE:
            np.testing.assert_allclose(got[path]["w"], want[path]["w"], atol=1e-5)


def test_the_mark_stays_through_files_and_steps(tmp_path, never_dense):
    began = hki.add_lora(BASE, 0, rank=2, init="pissa")
    x, w = normal((3, 5), 5), began["model/layer_0/q"]["w"]
    out = hki.use_implicit_args(jnp.matmul)(x, w)  # by the rules of LoRA
    np.testing.assert_allclose(out, x @ BASE["model/layer_0/q"]["w"], atol=1e-5)
    trained, frozen = hki.partition(began, trainable_dense=False)
    stepped = hki.combine(jax.tree.map(lambda x: x + 0.1, trained), frozen)
    hki.save(tmp_path / "adapter", hki.get_adapter(stepped))
    hki.save(tmp_path / "all", stepped)
    for adapter in (
        hki.load(tmp_path / "adapter"),
        hki.get_adapter(hki.load(tmp_path / "all")),
        hki.get_adapter(hki.quantize_params(stepped, dtype="int8")),
        hki.get_adapter(hki.set_adapter(stepped, hki.load(tmp_path / "adapter"))),
    ):
        with pytest.raises(ValueError, match="its init .* changed"):
            hki.save_peft(tmp_path / "new", adapter, BACK)


def test_an_initial_adapter_of_another_beginning(tmp_path):
    adapter = hki.get_adapter(hki.add_lora(BASE, 0, rank=2, init="pissa"))
    other = hki.get_adapter(hki.add_lora(BASE, 0, rank=1, init="pissa"))
    with pytest.raises(ValueError, match="initial: model/layer_0/q/w: .* began on another base"):
        hki.save_peft(tmp_path, adapter, BACK, initial=other)
    plain = hki.get_adapter(hki.add_lora(BASE, 0, rank=2))
    with pytest.raises(ValueError, match="initial: model/layer_0/q/w: expected the LoRA that"):
        hki.save_peft(tmp_path, adapter, BACK, initial=plain)
