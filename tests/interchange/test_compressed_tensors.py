"""Models that llm-compressor quantized, with the weights that compressed-tensors makes of them.

`tests/data/make_compressed_tensors_goldens.py` made them.
"""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki

DATA = pathlib.Path(__file__).parents[1] / "data" / "compressed"
NAMES = hki.names_by_pattern(
    {
        r"model\.layers\.0\.(?:mlp|self_attn)\.(\w+)_proj\.weight": r"\1/w",
        r".*(norm|embed_tokens|lm_head)\.weight": None,
    }
)


@functools.cache
def loaded(case, dtype=None, dequantize=None):
    """The weights of a folder, and the values that compressed-tensors gives them."""
    found = hki.load_hugging_face(DATA / case, NAMES, dtype=dtype, dequantize=dequantize)
    with np.load(DATA / case / "expected.npz") as file:
        wanted = {x.split(".")[-2].removesuffix("_proj"): file[x].T for x in file if "proj" in x}
    return {module: own["w"] for module, own in found.items()}, wanted


# The format, the group size and the number of tiles of each weight.
STORED = {
    "integers": {
        "q": ("int4", 16, 32),
        "k": ("uint4", 16, 32),
        "v": ("int4", 32, 32),
        "o": ("int8", 32, 32),
        "gate": ("uint8", 32, 64),
        "up": ("int3", 32, 64),
        "down": ("int8", 16, 32),  # 7 bits
    },
    "floats": {
        "q": ("fp8_e4m3", 32, 1),
        "k": ("fp8_e4m3", 32, 32),
        "v": ("fp8_e4m3", 16, 2),
        "gate": ("fp8_e4m3", 32, 64),  # blocks of 24 rows, the last one of 16
        "o": ("fp4", 16, 32),
        "up": ("fp4", 32, 64),
        "down": ("fp8_e4m3", 32, 32),
    },
    "linear": dict.fromkeys(("q", "down"), ("int4", 16, 32)),
    "fp8": {"q": ("fp8_e4m3", 32, 2), "down": ("fp8_e4m3", 32, 2)},
    "fp8_powers": {"gate": ("fp8_e4m3", 32, 4)},
}
PAIRS = [(case, name) for case, own in STORED.items() for name in own]
DTYPES = {"linear": "float32", "fp8": "float32"}


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_values_are_those_of_the_writer(case, name):
    found, wanted = loaded(case)
    w = found[name]
    assert (w.format, w.group_size, w.scale.shape[-2]) == STORED[case][name]
    assert w.dtype == DTYPES.get(case, "bfloat16")
    got = np.asarray(w.materialize(), np.float32)
    # transformers rounds to the dtype of the model, which was bfloat16.
    got = got.astype(jnp.bfloat16).astype(np.float32) if case == "fp8" else got
    np.testing.assert_array_equal(got, wanted[name])


@pytest.mark.parametrize(("case", "name"), [("integers", "k"), ("floats", "o"), ("floats", "gate")])
def test_products_keep_the_codes(case, name):
    found, wanted = loaded(case, dtype="float32")
    w, want = found[name], wanted[name]
    assert w.dtype == jnp.float32
    x = np.random.default_rng(0).normal(size=(3, w.shape[0])).astype(np.float32)

    def loss(x, w):
        return (jnp.dot(x, w) ** 2).sum()

    with hki.materialization("error"):
        y = jax.jit(hki.use_implicit_args(jnp.dot))(x, w)
        gradient = jax.grad(hki.use_implicit_args(loss))(x, w)
    dense = np.asarray(w.materialize())
    np.testing.assert_allclose(dense, want, rtol=2**-8)  # not rounded to bfloat16
    np.testing.assert_allclose(y, x @ dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, 2 * (x @ dense) @ dense.T, rtol=1e-4, atol=1e-4)


def test_inputs_in_the_order_of_their_activations():
    with pytest.raises(ValueError, match=r"groups are not runs of inputs .*`dequantize` makes it"):
        loaded("order")
    found, wanted = loaded("order", dtype="float16", dequantize=True)
    np.testing.assert_array_equal(found["q"], wanted["q"])


@pytest.mark.parametrize("case", ["integers", "floats"])
def test_dense_values(case):
    found, wanted = loaded(case, dtype="bfloat16", dequantize=True)
    exact, _ = loaded(case, dtype="float32", dequantize=True)
    codes, _ = loaded(case, dtype="float32")
    for name, want in wanted.items():
        assert isinstance(found[name], jax.Array)
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), want)
        np.testing.assert_array_equal(exact[name], codes[name].materialize())


def deepseek(codes, scales, size):
    """`weight_dequant` of DeepSeek-V3, element by element."""
    rows, columns = np.indices(codes.shape)
    return codes.astype(np.float32) * scales[rows // size, columns // size]


@pytest.mark.parametrize(
    ("shape", "groups"), [((256, 256), 128), ((200, 384), 128), ((8, 192), 64)]
)
def test_blocks_of_deepseek(shape, groups, tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.normal(size=shape).astype(np.float32).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(1, 2, [-(-n // 128) for n in shape]).astype(np.float32)
    tensors = {"up.weight": codes, "up.weight_scale_inv": scales}
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    hki.save(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    w = hki.load_hugging_face(tmp_path, {"up.weight": "up/w"})["up"]["w"]
    assert isinstance(w, hki.QuantizedMatrix) and w.group_size == groups
    np.testing.assert_array_equal(w.materialize(), deepseek(codes, scales, 128).T)


def of_one_weight(folder, config, *, dequantize=None, dtype="float32", **tensors):
    hki.save(folder / "model.safetensors", {f"up.{key}": x for key, x in tensors.items()})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    names = {"up.weight": "up/w"}
    return hki.load_hugging_face(folder, names, dtype=dtype, dequantize=dequantize)["up"]["w"]


def compressed(form, **weights):
    """A configuration of compressed-tensors with these settings of weights."""
    group = {"targets": ["Linear"], "weights": weights}
    own = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return own | {"format": form, "quantization_status": "compressed"}


@pytest.mark.parametrize(("form", "kind"), [("naive-quantized", "float"), ("int-quantized", "int")])
def test_frozen_weights_are_codes_if_their_format_says_so(form, kind, tmp_path):
    config = compressed(form, type=kind, num_bits=8, strategy="tensor")
    config["quantization_status"] = "frozen"
    codes = np.arange(-12, 12).reshape(4, 6).astype(np.int8 if kind == "int" else jnp.float8_e4m3fn)
    own = dict(weight=codes, weight_scale=np.array([0.5], np.float32))
    w = of_one_weight(tmp_path, config, **own)
    assert isinstance(w, hki.QuantizedMatrix)
    np.testing.assert_array_equal(w.materialize(), codes.T.astype(np.float32) / 2)
    for form in (None, "dense"):  # the weights may be rounded, and not codes
        with pytest.raises(hki.CheckpointError, match=r"status .*'compressed', got 'frozen'"):
            of_one_weight(tmp_path, config | {"format": form}, **own)


def packed_fours():
    """A configuration for 4 bits, the tensors of a weight [8, 16], and its values."""
    codes = np.random.default_rng(0).integers(0, 16, (8, 16))
    words = (codes.reshape(8, 2, 8) << np.arange(0, 32, 4)).sum(-1).astype(np.uint32).view(np.int32)
    own = dict(weight_packed=words, weight_scale=np.full((8, 1), 0.5, np.float32))
    own["weight_shape"] = np.array([8, 16])
    return compressed("pack-quantized", num_bits=4, strategy="channel"), own, (codes - 8).T / 2


MIDDLES = np.array([[0x88888888]], np.uint32).view(np.int32)
EIGHTS = compressed("float-quantized", type="float", num_bits=8, strategy="channel")


@pytest.mark.parametrize("zeros", [MIDDLES, np.zeros((8, 1), np.int8)], ids=["packed", "int8"])
def test_zero_points_of_a_symmetric_weight_are_0(zeros, tmp_path):
    config, own, want = packed_fours()
    w = of_one_weight(tmp_path, config, **own, weight_zero_point=zeros)
    assert w.format == "int4"
    np.testing.assert_array_equal(w.materialize(), want)
    one_less = zeros - np.ones_like(zeros)
    for dequantize in (None, True):
        with pytest.raises(
            hki.CheckpointError,
            match=r"up.weight_zero_point: .* symmetric, .*; got -1 \.\.\. (0|-1) \(docs",
        ):
            of_one_weight(
                tmp_path, config, **own, weight_zero_point=one_less, dequantize=dequantize
            )


def test_zero_points_of_floats_are_0(tmp_path):
    codes = np.ones((2, 16), jnp.float8_e4m3fn)
    own = dict(weight=codes, weight_scale=np.ones((2, 1), np.float32))
    zeros = np.zeros((2, 1), jnp.float8_e4m3fn)
    w = of_one_weight(tmp_path, EIGHTS, **own, weight_zero_point=zeros)
    np.testing.assert_array_equal(w.materialize(), np.ones((16, 2)))
    with pytest.raises(hki.CheckpointError, match=r"symmetric, .*; got 0 \.\.\. 1 \(docs"):
        of_one_weight(tmp_path, EIGHTS, **own, weight_zero_point=np.eye(2, 1, dtype=np.int8))


def test_groups_of_activations_say_nothing_about_weights(tmp_path):
    config, own, want = packed_fours()
    attention = {"targets": ["LlamaAttention"], "weights": None}
    attention["input_activations"] = {"num_bits": 8, "type": "float"}
    config["config_groups"] = {"group_1": attention, **config["config_groups"]}
    np.testing.assert_array_equal(of_one_weight(tmp_path, config, **own).materialize(), want)
    config["config_groups"] = {"group_1": attention}
    with pytest.raises(hki.CheckpointError, match=r"up: expected one group .*got none"):
        of_one_weight(tmp_path, config, **own)


F8 = np.ones((2, 16), jnp.float8_e4m3fn)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [2, 16]}
WITHOUT_SCALES = [
    (EIGHTS, "weight", F8, "weight_scale"),
    (EIGHTS, "weight", F8.astype(np.int8), "weight_scale"),
    (EIGHTS, "weight_packed", MIDDLES, "weight_scale"),
    (BLOCKS, "weight", F8, "weight_scale_inv"),
    ({"quant_method": "fp8"}, "weight", F8, "weight_scale"),
    (BLOCKS, "weight_packed", MIDDLES, "weight_scale"),
    (BLOCKS, "qweight", MIDDLES, "scales"),
]


@pytest.mark.parametrize(("config", "part", "codes", "scales"), WITHOUT_SCALES)
def test_codes_without_scales(config, part, codes, scales, tmp_path):
    with pytest.raises(hki.CheckpointError, match=rf": up\.{scales}: missing, and the weights are"):
        of_one_weight(tmp_path, config, **{part: codes})


def test_codes_of_another_method_than_the_configuration_says(tmp_path):
    _, own, _ = packed_fours()
    with pytest.raises(hki.CheckpointError, match="weight_packed: .*no quantization_config in con"):
        of_one_weight(tmp_path, BLOCKS, **own)


def floats_with_powers(bits):
    """A configuration for mx floats, the tensors of a weight [2, 64], and its values."""
    powers = np.array([[126, 128], [127, 130]], np.uint8)
    config = compressed(
        f"mxfp{bits}-{'pack-' if bits == 4 else ''}quantized",
        **dict(type="float", num_bits=bits, strategy="group", group_size=32),
    )
    if bits == 8:
        codes, own = np.arange(128).reshape(2, 64).astype(jnp.float8_e4m3fn), "weight"
        values = codes.astype(np.float32)
    else:  # all are code 2, which is 1
        codes, own, values = np.full((2, 32), 0x22, np.uint8), "weight_packed", np.ones((2, 64))
    factors = np.repeat(2.0 ** (powers.astype(int) - 127), 32, -1)
    return config, {own: codes, "weight_scale": powers}, (values * factors).T


@pytest.mark.parametrize("bits", [4, 8])
def test_powers_as_bytes_and_as_floats(bits, tmp_path):
    config, own, want = floats_with_powers(bits)
    np.testing.assert_array_equal(of_one_weight(tmp_path, config, **own).materialize(), want)
    own["weight_scale"] = own["weight_scale"].view(jnp.float8_e8m0fnu)
    np.testing.assert_array_equal(of_one_weight(tmp_path, config, **own).materialize(), want)


def test_fours_fill_their_groups(tmp_path):
    config, own, _ = floats_with_powers(4)
    own["weight_packed"] = own["weight_packed"][:, :24]  # two groups of 24 would fit, too
    with pytest.raises(hki.CheckpointError, match=r"whole blocks of \[1, 32\], got \[2, 48\]"):
        of_one_weight(tmp_path, config, **own)


@pytest.mark.parametrize("scale", [[0], [1, 1]])
def test_a_global_scale_is_one_number(scale, tmp_path):
    config = compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="channel")
    own = dict(weight_packed=np.full((2, 16), 0x22, np.uint8), weight_scale=F8[:, :1])
    good = of_one_weight(tmp_path, config, **own, weight_global_scale=np.array([2], np.float32))
    np.testing.assert_array_equal(good.materialize(), np.full((32, 2), 0.5))
    message = rf"{tmp_path.name}: up.weight_global_scale: expected one number, not 0"
    with pytest.raises(hki.CheckpointError, match=message):
        of_one_weight(tmp_path, config, **own, weight_global_scale=np.array(scale, np.float32))


def test_tensors_that_contradict_each_other(tmp_path):
    config, own, want = packed_fours()
    config["transform_config"] = {"config_groups": {}}
    np.testing.assert_array_equal(of_one_weight(tmp_path, config, **own).materialize(), want)
    with pytest.raises(hki.CheckpointError, match=r"weight_packed: expected either .*got both"):
        of_one_weight(tmp_path, config, **own, weight=np.ones((8, 16), np.float32))
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": 8}
    own["weight_scale"] = own["weight_scale"].repeat(2, -1)
    np.testing.assert_array_equal(of_one_weight(tmp_path, config, **own).materialize(), want)
    own["weight_shape"] = np.array([8, 15])
    with pytest.raises(ValueError, match=r"rows of 15 numbers end within a group of 8, which"):
        of_one_weight(tmp_path, config, **own)
    dense = of_one_weight(tmp_path, config, **own, dequantize=True)
    np.testing.assert_array_equal(dense, want[:15])


@pytest.mark.parametrize(("method", "shape"), [("fp8", (40, 75)), ("compressed-tensors", (33, 39))])
def test_blocks_that_end_early_become_dense(method, shape, tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.normal(size=shape).astype(np.float32).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(1, 2, [-(-n // 32) for n in shape]).astype(np.float32)
    config, part = {"quant_method": "fp8", "weight_block_size": [32, 32]}, "weight_scale_inv"
    if method != "fp8":
        block = dict(strategy="block", block_structure=[32, 32])
        config = compressed("float-quantized", type="float", num_bits=8, **block)
        part = "weight_scale"
    own = {"weight": codes, part: scales}
    with pytest.raises(ValueError, match=r"within a block of 32, .*`dequantize` makes it dense"):
        of_one_weight(tmp_path, config, **own)
    want = deepseek(codes, scales, 32).T
    for dtype in ("float32", "bfloat16", None):
        got = of_one_weight(tmp_path, config, **own, dequantize=True, dtype=dtype)
        assert isinstance(got, jax.Array) and got.dtype == (dtype or "float32")
        np.testing.assert_array_equal(got, want.astype(got.dtype))


def test_scales_of_float8_for_outputs_and_for_all(tmp_path):
    codes = np.arange(24, dtype=np.float32).reshape(4, 6).astype(jnp.float8_e4m3fn)
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    for scale in (np.float32(0.3), np.array([0.3]), np.arange(4)[:, None]):
        scale = np.asarray(scale, np.float32)
        own = dict(weight=codes, weight_scale=scale, input_scale=np.float32(1))
        w = of_one_weight(tmp_path, config, **own)
        want = codes.astype(np.float32) * scale
        np.testing.assert_array_equal(w.materialize(), want.T)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CODES = np.zeros((8, 130), jnp.float8_e4m3fn)
WRONG_FP8 = [
    (FP8, (1, 2), "end within a block of 128, and 2 is the largest group"),
    (FP8, (1, 3), r"scales \[1, 3\] for \[8, 130\]: expected one for each block of \[128, 128\]"),
    (FP8 | {"fmt": "e5m2"}, (1, 2), "fmt: expected 'e4m3', got 'e5m2'"),
    (FP8 | {"weight_block_size": 128}, (1, 2), "weight_block_size: expected two positive integers"),
    (FP8 | {"rotation": True}, (1, 2), "rotation: True: not a key that is known"),
]


@pytest.mark.parametrize(("config", "shape", "message"), WRONG_FP8)
def test_blocks_that_are_not_read(config, shape, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        of_one_weight(tmp_path, config, weight=CODES, weight_scale_inv=np.ones(shape, np.float32))


# A change of the configuration, by the path of a key, and the error.
WRONG = [
    (["format"], "marlin-24", "format: expected one of pack-quantized, .*got 'marlin-24'"),
    (["transform_config"], {"R1": {}}, "transform_config: expected none"),
    (["sparsity_config"], {"format": "sparse-24-bitmask"}, "sparsity_config: expected none"),
    (["quantization_status"], "calibration", "expected 'compressed', got 'calibration'"),
    (["config_groups"], {}, "config_groups: expected groups, got {}"),
    (["rotation"], 1, "rotation: 1: not a key that is known"),
    (["config_groups", "group_0", "weights", "num_bits"], 9, "int and 2 to 8, or float and 4 or 8"),
    (
        ["config_groups", "group_0", "weights", "strategy"],
        "token",
        "strategy: expected one of tensor",
    ),
    (["config_groups", "group_0", "weights", "group_size"], 0, "group_size: expected a positive"),
    (
        ["config_groups", "group_0", "weights", "group_size"],
        32,
        r"weight_scale: expected .*\[32, 2\]",
    ),
    (["config_groups", "group_0", "weights", "sign"], True, "sign: True: not a key that is known"),
    (["config_groups", "group_0", "targets"], ["re:["], r"targets: 're:\[': unterminated"),
    (["config_groups", "group_0", "targets"], ["re:.*k_proj"], "down_proj: expected one group of"),
    (
        ["config_groups", "group_0", "weights", "num_bits"],
        3,
        r"version \(with 3 bits\): expected 0.18",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_what_a_configuration_may_not_say(path, value, message, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "linear" / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["version"] = "0.17.1"
    *place, key = ["quantization_config", *path]
    functools.reduce(dict.__getitem__, place, config)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(hki.CheckpointError, match=message):
        hki.load_hugging_face(tmp_path, NAMES)


@pytest.mark.slow
def test_two_groups_for_classes_of_layers(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "linear" / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    other = json.loads(json.dumps(groups["group_0"])) | {"targets": ["Embedding"]}
    groups["group_1"] = other
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hki.load_hugging_face(tmp_path, NAMES)["q"]["w"].format == "int4"  # they are alike
    other["weights"]["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        hki.CheckpointError, match="got group_0, group_1. Name the weight in targets"
    ):
        hki.load_hugging_face(tmp_path, NAMES)
    exact = "model.layers.0.self_attn.q_proj"
    names = dict.fromkeys(hki.load(tmp_path / "model.safetensors")[""])
    names |= {f"{exact}.{part}": None for part in ("weight_packed",)} | {f"{exact}.weight": "q/w"}
    names |= {
        f"{x.rpartition('.')[0]}.weight": None for x in names if "proj" in x and exact not in x
    }
    groups["group_0"]["targets"] = [exact]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hki.load_hugging_face(tmp_path, names)["q"]["w"].format == "int4"
