"""Checkpoints in the layout of the Hugging Face hub: dense ones, and those that others quantized.

`tests/data/make_bitsandbytes_goldens.py` made the weights of bitsandbytes, with the values that it
gives them. GPTQ's and AWQ's are packed here bit by bit, as AutoGPTQ's `qlinear_cuda_old.py` and AutoAWQ's
`packing_utils.py` define it.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import haiku_implicit as hki
from haiku_implicit.interchange.hugging_face import load_hugging_face

RNG = np.random.default_rng(0)
GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "bitsandbytes.npz"
NAMES = hki.names_by_pattern(
    {
        r"model\.(\w+)\.weight": r"model/\1/w",
        r"model\.(\w+)\.bias": r"model/\1/b",
        r"model\.embed\.(table)": r"model/embed/embeddings",
        r"ids": None,
    }
)


def write(folder, tensors, config=None):
    """A folder with tensors and a configuration."""
    folder.mkdir(exist_ok=True)
    hki.save(folder / "model.safetensors", tensors)
    if config is not None:
        text = json.dumps({"model_type": "test", "quantization_config": config})
        (folder / "config.json").write_text(text)
    return folder


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def apply(x, w):
    """The product with a weight, in which nothing becomes dense."""
    with hki.materialization("error"):
        return hki.use_implicit_args(jnp.dot)(x, w)


# --- dense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_dense_tensors(dtype, tmp_path):
    w, b, table = normal(3, 4), normal(3).astype(np.float16), normal(5, 4).astype(jnp.bfloat16)
    tensors = {"model.up.weight": w, "model.up.bias": b, "model.embed.table": table}
    path = write(tmp_path, tensors | {"ids": np.arange(4)})
    params = load_hugging_face(path, NAMES, dtype=dtype)
    assert {module: set(own) for module, own in params.items()} == {
        "model/up": {"w", "b"},
        "model/embed": {"embeddings"},
    }
    for got, want in (
        (params["model/up"]["w"], w.T),
        (params["model/up"]["b"], b),
        (params["model/embed"]["embeddings"], table),
    ):
        assert isinstance(got, jax.Array) and got.dtype == (dtype or want.dtype)
        np.testing.assert_array_equal(got, want.astype(got.dtype))


def test_files_of_the_package_and_shards(tmp_path):
    w, b = normal(3, 4), normal(3)
    safetensors.numpy.save_file({"model.up.weight": w}, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({"model.up.bias": b}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    listed = {"model.up.weight": "a.safetensors", "model.up.bias": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": listed}))
    params = load_hugging_face(tmp_path, NAMES)["model/up"]
    np.testing.assert_array_equal(params["w"], w.T)
    np.testing.assert_array_equal(params["b"], b)
    a_part = load_hugging_face(tmp_path / "a.safetensors", NAMES)
    np.testing.assert_array_equal(a_part["model/up"]["b"], b)

    def fails(message):
        with pytest.raises(hki.CheckpointError, match=message):
            load_hugging_face(tmp_path, NAMES)

    index.write_text(json.dumps({"weight_map": listed | {"model.up.scale": "b.safetensors"}}))
    fails(r"b.safetensors: model.up.scale: missing, and model.safetensors.index.json lists it")
    index.write_text(json.dumps({"weight_map": listed | {"x": "../b.safetensors"}}))
    fails(r"weight_map: x: expected a file beside it, got '../b.safetensors'")
    index.write_text(json.dumps({}))
    fails("weight_map: missing")
    index.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    fails(r"neither model.safetensors nor .* Pickled weights \(.bin\) are not read")


def test_a_truncated_file(tmp_path):
    path = write(tmp_path, {"model.up.weight": normal(3, 4)}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(hki.CheckpointError, match=r"model.up.weight: the file ends at byte 47"):
        load_hugging_face(tmp_path, NAMES)


def test_the_parameters_have_to_be_those_of_the_model(tmp_path):
    path = write(tmp_path, {"model.up.weight": normal(3, 4)})
    assert load_hugging_face(path, NAMES, like={"model/up": {"w": np.zeros((4, 3))}})
    message = r"model/up/w: expected \[3, 4\], got \[4, 3\] of model.up.weight \[3, 4\]"
    with pytest.raises(hki.CheckpointError, match=message):
        load_hugging_face(path, NAMES, like={"model/up": {"w": np.zeros((3, 4))}})


def test_other_quantizations_are_refused(tmp_path):
    codes = {"model.up.weight": normal(3, 4).astype(jnp.float8_e4m3fn)}
    path = write(tmp_path / "a", codes, {"quant_method": "quark"})
    with pytest.raises(hki.CheckpointError, match=r"one of awq, .* torchao, got 'quark'"):
        load_hugging_face(path, NAMES)
    with pytest.raises(hki.CheckpointError, match=r"model.up.weight: codes of F8_E4M3 without"):
        load_hugging_face(write(tmp_path / "b", codes), NAMES)
    path = write(tmp_path / "c", {"model.up.qweight": np.zeros((1, 1), np.int32)})
    with pytest.raises(hki.CheckpointError, match=r"model.up.qweight: of a quantized weight, and"):
        load_hugging_face(path, NAMES)


# --- bitsandbytes --------------------------------------------------------------------------------


def golden(case):
    """The tensors of a layer, and the values that bitsandbytes gives its weight."""
    with np.load(GOLDEN) as file:
        prefix = f"{case}/"
        own = {key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}
        return {f"model.up.{key}": x for key, x in own.items()}, file[case]


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("case", "format_name", "group", "dtype"),
    [
        ("nf4", "nf4", 64, "float32"),
        ("nf4 double", "nf4", 64, "bfloat16"),
        ("nf4 rows", "nf4", 32, "float16"),
        ("fp4", "fp4_bnb", 64, "float32"),
        ("fp4 double", "fp4_bnb", 64, "float16"),
    ],
)
def test_four_bits_of_bitsandbytes(case, format_name, group, dtype, tmp_path):
    tensors, want = golden(case)
    path = write(tmp_path, tensors, BNB)
    w = load_hugging_face(path, NAMES)["model/up"]["w"]
    assert (w.format, w.group_size, w.dtype) == (format_name, group, jnp.float32)
    # One product of two float32 numbers each, as bitsandbytes computes it.
    np.testing.assert_array_equal(w.materialize(), want.T)
    x = normal(3, want.shape[1])
    np.testing.assert_allclose(apply(x, w), x @ want.T, rtol=1e-5, atol=1e-5)
    assert load_hugging_face(path, NAMES, dtype=None)["model/up"]["w"].dtype == dtype
    dense = load_hugging_face(path, NAMES, dequantize="model/up/w")["model/up"]["w"]
    assert isinstance(dense, jax.Array)
    np.testing.assert_array_equal(dense, want.T)


def test_blocks_across_rows_become_dense_or_an_error(tmp_path):
    tensors, want = golden("nf4 across rows")
    path = write(tmp_path, tensors, BNB)
    message = r"model.up.weight: blocks of 64 numbers do not begin where the rows of \[4, 48\] do"
    with pytest.raises(ValueError, match=message):
        load_hugging_face(path, NAMES)
    w = load_hugging_face(path, NAMES, dequantize=True)["model/up"]["w"]
    np.testing.assert_array_equal(w, want.T)


def test_eight_bits_of_bitsandbytes(tmp_path):
    tensors, want = golden("int8")
    path = write(tmp_path, tensors, {"load_in_8bit": True})  # as older versions have it
    params = load_hugging_face(path, NAMES)["model/up"]
    assert params["w"].format == "int8" and params["w"].scale.shape == (6, 1)
    # code * (largest / 127) here, (code * largest) * (1 / 127) there: each rounds twice.
    np.testing.assert_allclose(params["w"].materialize(), want.T, rtol=3e-7)
    np.testing.assert_array_equal(params["b"], tensors["model.up.bias"])


def test_tensors_of_bitsandbytes_that_do_not_fit(tmp_path):
    tensors, _ = golden("nf4")
    state = "model.up.weight.quant_state.bitsandbytes__nf4"

    def fails(message, **changes):
        changed = tensors | {f"model.up.{k.replace('__', '.')}": x for k, x in changes.items()}
        changed = {name: x for name, x in changed.items() if x is not None}
        with pytest.raises(ValueError, match=message):
            load_hugging_face(write(tmp_path, changed, BNB), NAMES)

    fails(r"model.up.weight.absmax: missing", weight__absmax=None)
    fails(r"model.up.weight.absmax: expected F32\[12\], got F32\[3\]", weight__absmax=normal(3))
    fails(r"model.up.weight: 5 bytes of codes", weight=np.zeros((5, 1), np.uint8))
    fails("quant_map: not that of nf4", weight__quant_map=np.zeros(16, np.float32))
    for text, message in (
        (b"[]", "expected a JSON object"),
        (b"{", "not JSON"),
        (b'{"shape": [6, 128], "dtype": "float32"}', "blocksize: expected a positive integer, got 0"),
        (b'{"shape": [768], "dtype": "float32"}', r"shape: expected \[outputs, inputs\]"),
        (b'{"shape": [6, 128], "dtype": "int8"}', "dtype: expected a floating one, got 'int8'"),
    ):  # fmt: skip
        tensors[state] = np.frombuffer(text, np.uint8)
        fails(message)
    tensors, _ = golden("int8")
    fails(
        r"model.up.weight_format: expected 0 \(rows\), got 2", weight_format=np.array(2, np.uint8)
    )


def test_tensors_of_bitsandbytes_say_all_without_a_configuration(tmp_path):
    for case in ("nf4", "fp4 double", "int8"):
        tensors, want = golden(case)
        folder = tmp_path / case.replace(" ", "_")
        w = load_hugging_face(write(folder, tensors), NAMES)["model/up"]["w"]
        assert isinstance(w, hki.QuantizedMatrix)
        np.testing.assert_allclose(w.materialize(), want.T, rtol=3e-7)
        alone = load_hugging_face(folder / "model.safetensors", NAMES)["model/up"]["w"]
        np.testing.assert_array_equal(alone.materialize(), w.materialize())


def experts_of(tensors, shape):
    """Equal codes, as a weight of another shape."""
    name = "model.up.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors[name].tobytes()) | {"shape": shape}
    return tensors | {name: np.frombuffer(json.dumps(state).encode(), np.uint8)}


@pytest.mark.parametrize("shape", [[2, 3, 128], [3, 1, 2, 128], [2, 12, 32]])
def test_experts_of_bitsandbytes(shape, tmp_path):
    tensors, want = golden("nf4")
    path = write(tmp_path, experts_of(tensors, shape), BNB)
    axes = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    names = {"model.up.weight": hki.Place("m/experts", axes), "model.up.bias": None}
    w = load_hugging_face(path, names)["m"]["experts"]
    assert isinstance(w, hki.QuantizedMatrix)
    want = want.reshape(shape).transpose(axes)
    np.testing.assert_array_equal(w.materialize(), want)
    dense = load_hugging_face(path, names, dequantize=True)["m"]["experts"]
    np.testing.assert_array_equal(dense, want)


def test_experts_whose_blocks_lie_across_two(tmp_path):
    tensors, want = golden("nf4")
    path = write(tmp_path, experts_of(tensors, [8, 3, 32]), BNB)
    names = {"model.up.weight": "m/experts", "model.up.bias": None}
    with pytest.raises(ValueError, match=r"do not begin where the rows of \[8, 3, 32\] do"):
        load_hugging_face(path, names)
    dense = load_hugging_face(path, names, dequantize=True)["m"]["experts"]
    np.testing.assert_array_equal(dense, want.reshape(8, 3, 32))


# --- what is left out, and what several parameters get ---------------------------------------------


def test_a_tensor_that_is_left_out_may_be_anything(tmp_path):
    """What can't be read is an error for whoever asks for it alone."""
    up, _ = golden("nf4")
    gptq = gptq_module(*case_of(4, 64, 8, 2, True), 4, np.arange(64) // 32, True)
    gptq["model.up.qweight"] = gptq["model.up.qweight"][None]
    empty = gptq | {"model.up.qweight": np.zeros((0, 32), np.int32)}
    rest = {"model.b.weight": normal(3, 4)}
    narrow = {"model.up.weight": (np.zeros(6, np.uint8), "F4", [3, 4])}
    wide = {"model.up.weight": (np.zeros(9, np.uint8), "F6_E2M3", [3, 4])}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    cases = [
        (experts_of(up, [768]), BNB, r"shape: expected \[outputs, inputs\]"),
        (gptq, config, r"up.qweight: expected two axes, .* got \[1, 8, 8\]"),
        (empty, config, r"up.qweight: expected two axes, .* empty, got \[0, 32\]"),
        (gptq, config | {"dynamic": {"-:model.up": {}}}, "is not quantized, and it has a qweight"),
        ({"model.up.weight": normal(3, 4).astype(jnp.float8_e4m3fn)}, None, "codes of F8_E4M3"),
        ({"model.up.weight": np.zeros((3, 4), np.uint8)}, None, "codes of U8"),
        (narrow, None, "model.up.weight: codes of F4 without"),
        (wide, None, "model.up.weight: codes of F6_E2M3 without"),
    ]
    for tensors, config, message in cases:
        path = write(tmp_path, rest, config)
        write_raw(path / "model.safetensors", tensors | rest)
        with pytest.raises(ValueError, match=message):
            load_hugging_face(path, lambda name: f"m/{name}")
        left_out = lambda name: "m/b" if name == "model.b.weight" else None  # noqa: E731
        found = load_hugging_face(path, left_out)
        np.testing.assert_array_equal(found["m"]["b"], rest["model.b.weight"])
        (path / "config.json").unlink(missing_ok=True)


def write_raw(path, tensors):
    """A file of arrays, or of bytes with a dtype and a shape."""
    rows, data = {}, b""
    kinds = {"float32": "F32", "uint8": "U8", "int32": "I32", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}  # fmt: skip
    for name, x in tensors.items():
        x, kind, shape = x if isinstance(x, tuple) else (x, kinds[x.dtype.name], list(x.shape))
        ends = [len(data), len(data) + x.nbytes]
        rows[name] = {"dtype": kind, "shape": shape, "data_offsets": ends}
        data += np.ascontiguousarray(x).tobytes()
    header = json.dumps(rows).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_header_with_null_in_place_of_metadata(tmp_path):
    """As MLX writes it."""
    numbers = np.arange(3, dtype=np.float32)
    row = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    header = json.dumps({"__metadata__": None, "model.up.bias": row}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + numbers.tobytes())
    np.testing.assert_array_equal(load_hugging_face(path, NAMES)["model/up"]["b"], numbers)
    np.testing.assert_array_equal(hki.load(path)[""]["model.up.bias"], numbers)


def test_codes_without_a_configuration_may_be_left_out(tmp_path):
    tensors = gptq_module(*case_of(4, 64, 8, 2, True), 4, np.arange(64) // 32, True)
    names = dict.fromkeys(tensors) | {"model.up.bias": "up/b"}
    found = load_hugging_face(write(tmp_path, tensors), names)
    np.testing.assert_array_equal(found["up"]["b"], tensors["model.up.bias"])


def test_one_tensor_at_two_places(tmp_path):
    """A model with its own output layer, and a checkpoint in which that is the embeddings."""
    table = normal(5, 4)
    path = write(tmp_path, {"embed.weight": table})
    names = hki.names_by_pattern({r"(\w+)\.weight": [r"\1/embeddings", hki.Place("head/w")]})
    found = load_hugging_face(path, names, like={
        "embed": {"embeddings": np.zeros((5, 4))}, "head": {"w": np.zeros((4, 5))}
    })  # fmt: skip
    np.testing.assert_array_equal(found["embed"]["embeddings"], table)
    np.testing.assert_array_equal(found["head"]["w"], table.T)
    with pytest.raises(ValueError, match="two tensors this place, embed.weight and embed.weight"):
        load_hugging_face(path, {"embed.weight": ["a/b", "a/b"]})


# --- GPTQ and AWQ --------------------------------------------------------------------------------


def packed(codes, bits):
    """int32 `[rows, n * bits / 32]`: bit b of code i of a row is bit `i * bits + b` of the row."""
    rows = []
    for row in codes:
        whole = sum(int(code) << (i * bits) for i, code in enumerate(row))
        data = whole.to_bytes(len(row) * bits // 8, "little")
        rows.append(np.frombuffer(data, "<i4"))
    return np.stack(rows)


def gptq_module(codes, zeros, scales, bits, group, minus_one):
    """The tensors for codes `[inputs, outputs]`, zero points and scales `[groups, outputs]`."""
    return {
        "model.up.qweight": packed(codes.T, bits).T,
        "model.up.qzeros": packed(zeros - minus_one, bits),
        "model.up.scales": scales,
        "model.up.g_idx": group.astype(np.int32),
        "model.up.bias": np.arange(codes.shape[1], dtype=np.float16),
    }


def case_of(bits, inputs, outputs, groups, symmetric):
    codes = RNG.integers(0, 2**bits, (inputs, outputs))
    zeros = RNG.integers(1, 2**bits, (groups, outputs))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = np.exp(normal(groups, outputs)).astype(np.float16)
    return codes, zeros, scales


def values_of(codes, zeros, scales, group):
    return (codes - zeros[group]) * scales[group].astype(np.float64)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.combinations
def test_gptq(bits, symmetric, form, tmp_path):
    codes, zeros, scales = case_of(bits, 128, 64, 4, symmetric)
    group = np.arange(128) // 32
    minus_one = form == "gptq"
    tensors = gptq_module(codes, zeros, scales, bits, group, minus_one)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": form}
    if minus_one:
        del config["checkpoint_format"]
    path = write(tmp_path, tensors, config)
    params = load_hugging_face(path, NAMES)["model/up"]
    w, want = params["w"], values_of(codes, zeros, scales, group)
    assert (w.format, w.group_size) == (f"{'' if symmetric else 'u'}int{bits}", 32)
    assert (w.offset is None) == symmetric
    # Scales of float16 have 11 digits: float32 holds each product, and the difference.
    np.testing.assert_array_equal(w.materialize(), want)
    np.testing.assert_array_equal(params["b"], tensors["model.up.bias"])
    half = load_hugging_face(path, NAMES, dtype=None)["model/up"]["w"]
    assert half.dtype == jnp.float16
    np.testing.assert_array_equal(half.materialize(), want.astype(np.float16))
    x = normal(3, 128)
    np.testing.assert_allclose(apply(x, w), x @ want, rtol=1e-4, atol=1e-3)


def test_one_group_for_all_inputs(tmp_path):
    codes, zeros, scales = case_of(4, 64, 8, 1, False)
    tensors = gptq_module(codes, zeros, scales, 4, np.zeros(64), False)
    del tensors["model.up.g_idx"]  # old files lack it
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}
    w = load_hugging_face(write(tmp_path, tensors, config), NAMES)["model/up"]["w"]
    want = values_of(codes, zeros, scales, np.zeros(64, int))
    np.testing.assert_array_equal(w.materialize(), want)


def test_groups_of_inputs_in_another_order(tmp_path):
    codes, zeros, scales = case_of(4, 64, 8, 2, True)
    group = RNG.permutation(np.arange(64) // 32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    path = write(tmp_path, gptq_module(codes, zeros, scales, 4, group, True), config)
    message = r"model.up.weight: the groups are not runs of inputs .*`dequantize` makes it dense"
    with pytest.raises(ValueError, match=message):
        load_hugging_face(path, NAMES)
    w = load_hugging_face(path, NAMES, dequantize="model/up/w")["model/up"]["w"]
    np.testing.assert_array_equal(w, values_of(codes, zeros, scales, group))


def test_tensors_of_gptq_that_do_not_fit(tmp_path):
    codes, zeros, scales = case_of(4, 64, 8, 2, True)
    tensors = gptq_module(codes, zeros, scales, 4, np.arange(64) // 32, True)

    def fails(message, changes=None, **config):
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32} | config
        with pytest.raises(ValueError, match=message):
            load_hugging_face(write(tmp_path, tensors | (changes or {}), config), NAMES)

    ambiguous = gptq_module(codes, zeros * 2, scales, 4, np.arange(64) // 32, True)
    fails("model.up.qzeros: a zero point that is stored as 15, which programs read as 0", ambiguous)
    fails("bits: expected one of 2, 3, 4, 8, got 5", bits=5)
    fails("group_size: expected a positive integer or -1, got None", group_size=None)
    fails(
        "checkpoint_format: expected 'gptq' or 'gptq_v2', got 'marlin'", checkpoint_format="marlin"
    )
    fails(r"model.up.qzeros: expected I32\[4, 1\], got I32\[2, 1\]", group_size=16)
    fails(r"model.up.qzeros: expected I32\[1, 2\], got I32\[2, 1\]", bits=8)
    fails(r"g_idx: expected groups 0 \.\.\. 1", {"model.up.g_idx": np.full(64, 2, np.int32)})


def test_awq(tmp_path):
    codes, zeros, scales = case_of(4, 64, 16, 2, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(x):
        return packed(x.reshape(len(x), -1, 8)[..., order].reshape(len(x), -1), 4)

    tensors = {
        "model.up.qweight": interleaved(codes),
        "model.up.qzeros": interleaved(zeros),
        "model.up.scales": scales,
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}  # fmt: skip
    w = load_hugging_face(write(tmp_path, tensors, config), NAMES)["model/up"]["w"]
    assert (w.format, w.group_size) == ("uint4", 32)
    np.testing.assert_array_equal(
        w.materialize(), values_of(codes, zeros, scales, np.arange(64) // 32)
    )
    for change, message in (
        ({"version": "marlin"}, "version: expected 'gemm' or 'gemv', got 'marlin'"),
        ({"bits": 3}, "bits: expected one of 4, got 3"),
    ):
        with pytest.raises(hki.CheckpointError, match=message):
            load_hugging_face(write(tmp_path, tensors, config | change), NAMES)


def test_a_quantized_weight_of_another_shape(tmp_path):
    codes, zeros, scales = case_of(4, 64, 16, 2, True)
    tensors = gptq_module(codes, zeros, scales, 4, np.arange(64) // 32, True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    names = {
        "model.up.weight": hki.Place("attention/query/w", shape=(64, 2, 8)),
        "model.up.bias": None,
    }
    w = load_hugging_face(write(tmp_path, tensors, config), names)["attention/query"]["w"]
    assert isinstance(w, hki.MatrixView) and isinstance(w.matrix, hki.QuantizedMatrix)
    want = values_of(codes, zeros, scales, np.arange(64) // 32).reshape(64, 2, 8)
    np.testing.assert_array_equal(hki.materialize(w), want)
