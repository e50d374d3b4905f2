"""Models that HQQ and TorchAO quantized, with the weights that these make of them.

`tests/data/make_hqq_torchao_goldens.py` made them.
"""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from tests.random_arrays import numpy_normal as normal

DATA = pathlib.Path(__file__).parents[1] / "data" / "hqq_torchao"
NAMES = hki.names_by_pattern(
    {
        r"(?:model\.layers\.0\.(?:mlp|self_attn)\.)?([\w ]+?)(?:_proj)?\.weight": r"\1/w",
        r".*(norm|embed_tokens|lm_head)\.weight": None,
    }
)
NAMES_OF_LLAMA = hki.names_by_pattern(
    {
        r"model\.layers\.0\.(?:mlp|self_attn)\.(\w+)_proj\.weight": r"\1/w",
        r".*(norm|embed_tokens|lm_head)\.weight": None,
    }
)


@functools.cache
def loaded(case, dtype="float32", dequantize=None):
    """The weights of a folder, and the values that their writer gives them."""
    names = NAMES_OF_LLAMA if case == "torchao" else NAMES
    found = hki.load_hugging_face(DATA / case, names, dtype=dtype, dequantize=dequantize)
    with np.load(DATA / case / "expected.npz") as file:
        weights = [x for x in file if x.endswith(".weight")]
        wanted = {x.split(".")[-2].removesuffix("_proj"): file[x].T for x in weights}
    assert found.keys() == wanted.keys()
    return {module: own["w"] for module, own in found.items()}, wanted


# The format, the group size and the number of tiles of each weight.
STORED = {
    "torchao": {
        "q": ("int8", 32, 32),
        "k": ("int8", 32, 1),
        "v": ("fp8_e4m3", 32, 32),
        "o": ("int4", 32, 32),
        "gate": ("uint3", 32, 64),
        "up": ("int8", 32, 64),
        "down": ("int8", 64, 32),
    },
    "hqq": {
        "q": ("uint4", 16, 24),
        "k": ("uint8", 32, 24),
        "v": ("uint3", 16, 24),
        "o": ("uint2", 32, 24),
        "gate": ("uint1", 32, 24),
        "up": ("uint4", 16, 24),
        "down": ("uint5", 32, 24),
        "all": ("uint8", 32, 1),
        "rounded": ("uint4", 32, 24),
    },
    "hqq_half": dict.fromkeys(("q", "v", "up"), ("uint4", 16, 24)) | {"v": ("uint3", 16, 24)},
}
ONLY_DENSE = "columns|columns of 3|across rows"
PAIRS = [(case, name) for case, own in STORED.items() for name in own]


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_values_are_those_of_the_writer(case, name):
    found, wanted = loaded(case, None, f"({ONLY_DENSE})/w" if case == "hqq" else None)
    w, want = found[name], wanted[name]
    assert (w.format, w.group_size, w.scale.shape[-2]) == STORED[case][name]
    assert w.dtype == {"torchao": "bfloat16", "hqq": "float32", "hqq_half": "float16"}[case]
    got = np.asarray(w.materialize(), np.float32)
    if case == "torchao":  # its values have one rounding, to the dtype of the weight
        np.testing.assert_array_equal(got, want)
    else:  # HQQ rounds code - zero, and the product, to its dtype; here the sum is rounded
        np.testing.assert_allclose(
            got, want, rtol=0, atol=2 * np.finfo(w.dtype).eps * abs(want).max()
        )


def test_dense_values_of_torchao_are_its_own():
    found, wanted = loaded("torchao", "bfloat16", True)
    for name, want in wanted.items():
        assert isinstance(found[name], jax.Array)
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), want)


def test_dense_values_of_hqq_are_its_own():
    found, wanted = loaded("hqq", "float32", True)
    for name, want in wanted.items():
        np.testing.assert_array_equal(found[name], want)


@pytest.mark.parametrize(("case", "name"), [("torchao", "gate"), ("torchao", "v"), ("hqq", "q")])
def test_products_keep_the_codes(case, name):
    w = loaded(case, "float32", f"({ONLY_DENSE})/w" if case == "hqq" else None)[0][name]
    dense = np.asarray(w.materialize())
    np.testing.assert_allclose(dense, loaded(case, "float32", True)[0][name], rtol=0, atol=1e-6)
    x = normal((3, w.shape[0]))

    def loss(x, w):
        return (jnp.dot(x, w) ** 2).sum()

    with hki.materialization("error"):
        y = jax.jit(hki.use_implicit_args(jnp.dot))(x, w)
        gradient = jax.grad(hki.use_implicit_args(loss))(x, w)
    np.testing.assert_allclose(y, x @ dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, 2 * (x @ dense) @ dense.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ONLY_DENSE.split("|"))
def test_groups_of_hqq_that_are_not_runs_of_inputs(name):
    others = NAMES_OF_LLAMA
    with pytest.raises(
        ValueError, match=r"not runs of inputs \(axis .* `dequantize` makes it dense"
    ):
        hki.load_hugging_face(
            DATA / "hqq",
            lambda x: others(x) if "proj" in x else ("up/w" if x == f"{name}.weight" else None),
        )


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_with_two_codes_to_a_byte(tmp_path, dense, symmetric):
    """`Int4Tensor`, which TorchAO makes on GPUs alone: `scale * code + zero`."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (24, 64)).astype(np.int8)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    scale, zero = (normal((2, 24), seed).astype(jnp.bfloat16) for seed in (1, 2))
    zero = zero * 0 if symmetric else zero
    parts = {"qdata": packed, "scale": scale, "zero_point": zero}
    write(tmp_path, "Int4Tensor", parts, block_size=[1, 32], shape=[24, 64])
    w = hki.load_hugging_face(tmp_path, {"up.weight": "up/w"}, dequantize=dense or None)["up"]["w"]
    by_input = [np.repeat(x.astype(np.float32), 32, 0) for x in (scale, zero)]
    np.testing.assert_allclose(hki.materialize(w), by_input[0] * codes.T + by_input[1], rtol=1e-6)
    if not dense:
        assert (w.format, w.group_size) == ("int4" if symmetric else "uint4", 32)


@pytest.mark.parametrize("dense", [False, True])
def test_blocks_of_several_rows_and_three_axes(tmp_path, dense):
    codes = np.random.default_rng(0).integers(-128, 128, (2, 4, 64)).astype(np.int8)
    scale = abs(normal((2, 2, 2)))
    own = ATTRIBUTES | {"block_size": [1, 2, 32]}
    write(tmp_path, "Int8Tensor", {"qdata": codes, "scale": scale}, **own)
    w = hki.load_hugging_face(tmp_path, {"up.weight": "up/w"}, dequantize=dense or None)["up"]["w"]
    want = codes * scale.repeat(2, 1).repeat(32, 2)
    axes = (0, 1, 2) if w.shape == want.shape else (0, 2, 1)
    np.testing.assert_allclose(hki.materialize(w), want.transpose(axes), rtol=1e-6)


def write(folder, kind, parts, names=None, **data):
    """A file of TorchAO with one weight."""
    state = {"_type": kind, "_data": data, "_tensor_data_names": names or list(parts)}
    metadata = {"up.weight": json.dumps(state), "tensor_names": '["up.weight"]'}
    tensors = {f"up._weight_{part}": x for part, x in parts.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata)
    config = {"quantization_config": {"quant_method": "torchao"}}
    (folder / "config.json").write_text(json.dumps(config))


INT8 = {"qdata": np.ones((4, 32), np.int8), "scale": np.ones((4, 1), np.float32)}
ATTRIBUTES = {"block_size": [1, 32], "dtype": {"_type": "torch.dtype", "_data": "float32"}}
WRONG = [
    ("Int4TilePackedTo4dTensor", {}, {}, "up.weight: _type: expected one of Int8Tensor, .* got 'Int4TileP"),
    ("NVFP4Tensor", {}, {}, "up.weight: _type: expected one of"),
    ("Int8Tensor", {"act_pre_scale": np.ones(32, np.float32)}, {}, "act_pre_scale: the model has to"),
    ("Int8Tensor", {"scale": np.ones((4, 2), np.float32)}, {}, "scale: expected a number for each block"),
    ("Int8Tensor", {}, {"block_size": [1, 5]}, r"block_size: expected sizes that divide \[4, 32\]"),
    ("Int8Tensor", {}, {"dtype": "float64"}, "dtype: expected one of float16"),
    ("Int8Tensor", {"qdata": np.ones((4, 32), np.uint8)}, {}, "_weight_qdata: expected I8"),
    ("IntxUnpackedToInt8Tensor", {}, {"target_dtype": "int1"}, "target_dtype: expected int2, "),
    ("IntxUnpackedToInt8Tensor", {"qdata": np.full((4, 32), 9, np.int8)}, {"target_dtype": "int4"},
     "expected codes of 4 bits"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "parts", "data", "message"), WRONG)
def test_what_is_not_read_of_torchao_is_named(tmp_path, kind, parts, data, message):
    write(tmp_path, kind, {**INT8, **parts}, **(ATTRIBUTES | data))
    with pytest.raises(hki.CheckpointError, match=message):
        hki.load_hugging_face(tmp_path, {"up.weight": "up/w"})
    assert hki.load_hugging_face(tmp_path, {"up.weight": None}) == {}


@pytest.mark.parametrize("config", [None, {}])
def test_parameters_of_others_that_are_named_like_codes(tmp_path, config):
    weights = {"attn.W_q": normal((4, 3)), "attn.W_k": normal((4, 3), 1)}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    found = hki.load_hugging_face(tmp_path, lambda name: name.replace(".", "/"))["attn"]
    for name in ("W_q", "W_k"):
        np.testing.assert_array_equal(
            np.sort(found[name], None), np.sort(weights[f"attn.{name}"], None)
        )


def test_a_part_that_is_missing(tmp_path):
    write(tmp_path, "Int8Tensor", INT8, ["qdata", "scale", "zero_point"], **ATTRIBUTES)
    with pytest.raises(hki.CheckpointError, match="up._weight_zero_point: missing"):
        hki.load_hugging_face(tmp_path, {"up.weight": "up/w"})


CHANGES = [
    ("packing", np.frombuffer(b"4bit_u9", np.uint8), "packing: expected one of .* got '4bit_u9'"),
    ("shape", np.array([24, 33]), "W_q: expected 792 codes of 4 bits"),
    ("nbits", np.int32([3]), "W_q: expected codes up to 7"),
    ("nbits", np.int32([9]), "nbits: expected 1 to 8, got 9"),
    ("axis", np.int32([2]), "axis: expected 0 or 1, got 2"),
    ("group_size", np.int32([7]), "group_size: expected a divisor"),
    ("scale", np.ones((24, 1), np.float32), "scale: expected 48 numbers"),
    ("quant_zero", np.uint8([1]), "quant_zero: expected 0, got 1"),
    ("zero", None, "q.zero: missing"),
]


@pytest.mark.parametrize(("part", "value", "message"), CHANGES)
def test_what_is_not_read_of_hqq_is_named(tmp_path, part, value, message):
    tensors = safetensors.numpy.load_file(DATA / "hqq" / "model.safetensors")
    own = {k: x for k, x in tensors.items() if k.startswith("q.")} | {f"q.{part}": value}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({k: x for k, x in own.items() if x is not None}, path)
    with pytest.raises(hki.CheckpointError, match=message):
        hki.load_hugging_face(path, {"q.weight": "q/w"})


def test_a_configuration_names_the_method(tmp_path):
    path = shutil.copytree(DATA / "hqq_half", tmp_path / "new")
    config = {"quantization_config": {"quant_method": "hqq", "quant_config": {}}}
    (path / "config.json").write_text(json.dumps(config))
    found = hki.load_hugging_face(path, NAMES, dtype=None)
    np.testing.assert_array_equal(
        found["q"]["w"].materialize(), loaded("hqq_half", None)[0]["q"].materialize()
    )
