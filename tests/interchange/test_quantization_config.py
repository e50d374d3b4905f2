"""Every key of a `quantization_config`: what GPTQ's, AWQ's and MLX's codes are by it.

Codes are packed here bit by bit, by the definitions: GPTQModel's `BaseQuantLinear.pack_original`,
AutoAWQ's `WQLinear_GEMM` and `WQLinear_GEMV`, MLX's `affine_quantize`.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.interchange.quantization_config import Config

RNG = np.random.default_rng(0)
NAMES = hki.names_by_pattern({r"(.*)\.(?:weight|bias)": hki.Place(r"\1/w", None)})


def run_of_bits(codes, bits, word=32):
    """Integers `[rows, n * bits / word]`: bit b of code i of a row is bit `i * bits + b` of the row."""
    rows = []
    for row in np.asarray(codes):
        whole = sum(int(code) << (i * bits) for i, code in enumerate(row))
        data = whole.to_bytes(len(row) * bits // 8, "little")
        rows.append(np.frombuffer(data, f"<i{word // 8}"))
    return np.stack(rows)


def gptq(codes, stored, scales, bits=4, word=32, module="up"):
    """Tensors of codes `[inputs, outputs]`, and zero points `[groups, outputs]` as they are stored."""
    return {
        f"{module}.qweight": np.ascontiguousarray(run_of_bits(codes.T, bits, word).T),
        f"{module}.qzeros": run_of_bits(stored, bits, word),
        f"{module}.scales": scales,
    }


def gemm(codes, zeros, scales):
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(x):
        return run_of_bits(x.reshape(len(x), -1, 8)[..., order].reshape(len(x), -1), 4)

    return {"up.qweight": interleaved(codes), "up.qzeros": interleaved(zeros), "up.scales": scales}


def gemv(codes, zeros, scales):
    """The scales and zero points of all groups are filled up to whole integers of 32 bits."""
    room = [(0, 0), (0, -len(zeros) % 8)]
    return {
        "up.qweight": run_of_bits(codes.T, 4),
        "up.qzeros": run_of_bits(np.pad(zeros.T, room), 4),
        "up.scales": np.pad(scales.T, room),
    }


def loaded(folder, tensors, config, key="quantization_config", **options):
    """The weight `up` that a file with this configuration has."""
    hki.save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({key: config}))
    return hki.load_hugging_face(folder, NAMES, **options)["up"]["w"]


def case_of(bits=4, groups=2, size=32, outputs=32, middle=False):
    codes = RNG.integers(0, 2**bits, (groups * size, outputs))
    zeros = RNG.integers(1, 2**bits, (groups, outputs))
    if middle:
        zeros[:] = 2 ** (bits - 1)
    return codes, zeros, np.exp(RNG.normal(size=zeros.shape)).astype(np.float16)


def values_of(codes, zeros, scales):
    size = len(codes) // len(zeros)
    return (codes - zeros.repeat(size, 0)) * scales.astype(np.float64).repeat(size, 0)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
V1, V2 = {"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}


# --- the zero points of GPTQ ---------------------------------------------------------------------

# What the configuration says, what is stored for the middle code, and whether other zero points are
# stored less one (None: they are refused).
ZERO_POINTS = [
    ({}, -1, True),
    ({}, 0, True),
    (V1, -1, True),
    (V1, 0, True),
    (V2, 0, False),
    ({"format": "gptq"}, -1, True),
    ({"format": "gptq_v2"}, 0, False),
    ({"format": "GPTQ_V2", **V2}, 0, False),
    ({"version": "gptq_v2"}, 0, False),
    ({"sym": True}, -1, None),
    ({"sym": True}, 0, None),
    ({"sym": True, **V1}, -1, None),
    ({"sym": True, **V1}, 0, None),
    ({"sym": True, "format": "gptq", **V1}, 0, None),
    ({"sym": True, **V2}, 0, None),
    ({"sym": True, "format": "gptq_v2"}, 0, None),
    ({"zero_point": False, **V1}, 0, None),
    ({"sym": False}, -1, True),
    ({"sym": False, **V2}, 0, False),
]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("config", "shift", "less_one"), ZERO_POINTS)
@pytest.mark.combinations
def test_zero_points(config, shift, less_one, bits, tmp_path):
    config = {**GPTQ, "bits": bits, **config}
    codes, zeros, scales = case_of(bits, middle=True)
    w = loaded(tmp_path, gptq(codes, zeros + shift, scales, bits), config)
    assert w.format == f"int{bits}"
    np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros, scales))
    codes, zeros, scales = case_of(bits)
    if less_one is None:
        with pytest.raises(hki.CheckpointError, match=r"up.qzeros: .*is symmetric \(sym\)"):
            loaded(tmp_path, gptq(codes, zeros - 1, scales, bits), config)
        return
    w = loaded(tmp_path, gptq(codes, zeros - less_one, scales, bits), config)
    np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros, scales))


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({"sym": True, **V2}, 7),  # that of 'gptq'
        ({"sym": True, "format": "gptq_v2"}, 7),
        ({"sym": True}, 6),
        ({"sym": True}, [7, 8]),
        ({"sym": True, **V1}, [8] * 31 + [9]),
    ],
)
def test_a_symmetric_weight_whose_zero_points_are_not_the_middle(config, stored, tmp_path):
    codes, zeros, scales = case_of()
    zeros[:] = np.resize(stored, zeros.shape)
    with pytest.raises(
        hki.CheckpointError, match=r"symmetric \(sym\) .* by which all are stored as"
    ):
        loaded(tmp_path, gptq(codes, zeros, scales), {**GPTQ, **config})


def test_an_asymmetric_weight_may_have_the_middle_code(tmp_path):
    """By the format it is that code, or the next one."""
    codes, zeros, scales = case_of(middle=True)
    for config, less_one in (({"sym": False, **V1}, 1), ({"sym": False, **V2}, 0)):
        w = loaded(tmp_path, gptq(codes, zeros, scales), {**GPTQ, **config})
        np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros + less_one, scales))


@pytest.mark.parametrize("word", [8, 16, 32, 64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.combinations
def test_integers_that_codes_are_packed_into(bits, word, tmp_path):
    codes, zeros, scales = case_of(bits)
    config = {**GPTQ, **V2, "bits": bits, "pack_dtype": f"int{word}"}
    w = loaded(tmp_path, gptq(codes, zeros, scales, bits, word), config)
    np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros, scales))


# --- the layouts of AWQ --------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 9])
@pytest.mark.parametrize(
    ("write", "config"),
    [
        (gemm, {}),
        (gemm, {"version": "GEMM"}),
        (gemm, {"format": "gemm", "checkpoint_format": "gemm", "version": "gemm"}),
        (gemm, {"checkpoint_format": "gemm", "zero_point": True, "backend": "autoawq"}),
        (gemv, {"version": "gemv"}),
        (gemv, {"format": "gemv"}),
        (gemv, {"format": "gemv", "checkpoint_format": "gemv", "sym": False, "method": "awq"}),
    ],
)
@pytest.mark.combinations
def test_layouts_of_awq(write, config, groups, tmp_path):
    codes, zeros, scales = case_of(groups=groups)
    zeros[0, 0] = 0
    w = loaded(tmp_path, write(codes, zeros, scales), {**AWQ, **config})
    assert (w.format, w.group_size) == ("uint4", 32)
    np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros, scales))


@pytest.mark.parametrize("write", [gemm, gemv])
def test_symmetric_weights_of_awq(write, tmp_path):
    """GPTQModel writes the zero points of these, too: the middle code."""
    form = {"format": write.__name__}
    codes, zeros, scales = case_of(middle=True)
    for config in ({"zero_point": False}, {"sym": True}):
        w = loaded(tmp_path, write(codes, zeros, scales), {**AWQ, **form, **config})
        assert w.format == "int4"
        np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros, scales))
        with pytest.raises(
            hki.CheckpointError, match=r"up.qzeros: .* symmetric .* all are stored as 8; got"
        ):
            loaded(tmp_path, write(codes, zeros - 1, scales), {**AWQ, **form, **config})


def test_a_layout_under_the_name_of_another_one(tmp_path):
    codes, zeros, scales = case_of(groups=9, outputs=48)
    for write, name in ((gemm, "gemv"), (gemv, "gemm")):
        with pytest.raises(hki.CheckpointError, match="expected"):
            loaded(tmp_path, write(codes, zeros, scales), {**AWQ, "version": name})


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"format": "gptq", **V2},
            "format is 'gptq' and checkpoint_format is 'gptq_v2', which contr",
        ),
        ({"format": "gptq_v2", **V1}, "contradict"),
        ({"bits": 4, "w_bit": 8}, "bits is 4 and w_bit is 8, which contradict"),
        ({"q_group_size": 64}, "group_size is 32 and q_group_size is 64"),
        ({"method": "awq"}, "quant_method is 'gptq' and method is 'awq'"),
        ({"sym": True, "zero_point": True}, "sym is True and zero_point is True, which contradict"),
        ({"sym": 1}, "sym: expected true or false, got 1"),
        ({"format": "gptq_p"}, "format: expected 'gptq' or 'gptq_v2', got 'gptq_p'"),
        (
            {"checkpoint_format": "marlin"},
            "checkpoint_format: expected 'gptq' or 'gptq_v2', got 'mar",
        ),
        ({"format": 2}, "format: expected 'gptq' or 'gptq_v2', got 2"),
        ({"is_marlin_format": True}, "is_marlin_format: expected False, got True"),
        ({"pack_dtype": ["int32"]}, "pack_dtype: expected"),
        (
            {"pack_dtype": "int4"},
            "pack_dtype: expected int8 or int16 or int32 or int64, got 'int4'",
        ),
        ({"bits": 3, "pack_dtype": "int64"}, "pack_dtype: expected"),
        ({"bits": 5}, "bits: expected one of 2, 3, 4, 8, got 5"),
        ({"bits": True}, "bits: expected"),
        ({"rotation": "hadamard"}, "rotation: expected null, got 'hadamard'"),
        ({"adapter": {"rank": 8}}, "adapter: expected {}, got"),
        ({"extra_config": {"up": {"bits": 8}}}, "extra_config: expected"),
        ({"data_type": "mx_fp"}, "data_type: expected 'int', got 'mx_fp'"),
        ({"act_bits": 8}, "act_bits: expected 16 or 32, got 8"),
        ({"shuffled": True}, "shuffled: True: not a key that is known, .* remove it there"),
        ({"dynamic": [8]}, "dynamic: expected an object"),
        ({"dynamic": {"(": {}}}, r"dynamic: '\(': "),
        ({"dynamic": {"-:up": {}}}, "dynamic: by '-:up' up is not quantized, and it has a qweight"),
        ({"dynamic": {"up": {"shuffled": 1}}}, "dynamic: shuffled: 1: not a key that is known"),
        ({"desc_act": True}, "up.g_idx: missing, and by desc_act"),
    ],
)
def test_what_a_configuration_may_not_say(config, message, tmp_path):
    codes, zeros, scales = case_of(middle=True)
    with pytest.raises(hki.CheckpointError, match=message):
        loaded(tmp_path, gptq(codes, zeros - 1, scales), {**GPTQ, **config})


@pytest.mark.parametrize(
    "config",
    [
        *({"version": form} for form in ("gemv_fast", "marlin", "llm-awq", "bitblas", "exllama")),
        *({"format": form} for form in ("gemv_fast", "marlin", "llm-awq", "gptq")),
        {"backend": "llm-awq"},
        {"format": "gemm", "version": "gemv"},
        {"bits": 8},
    ],
)
def test_layouts_of_awq_that_are_not_read(config, tmp_path):
    key, value = list(config.items())[-1]
    with pytest.raises(hki.CheckpointError, match=f"{key}.*{value}"):
        loaded(tmp_path, gemm(*case_of()), {**AWQ, **config})


def test_what_programs_write_is_known():
    """GPTQModel 5, AutoGPTQ 0.7, transformers 4 and 5, AutoAWQ 0.2 and AutoRound."""
    gptqmodel = {
        "bits": 4, "dynamic": None, "group_size": 128, "desc_act": False, "lm_head": False,
        "method": "gptq", "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq",
        "pack_dtype": "int32", "rotation": None, "sym": True, "hessian": {"chunk_size": None},
        "meta": {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05, "mse": 0.0},
    }  # fmt: skip
    autogptq = {
        "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False,
        "sym": True, "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "m",
        "is_marlin_format": False, "quant_method": "gptq", "checkpoint_format": "gptq",
    }  # fmt: skip
    transformers = {
        "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
        "damp_percent": 0.1, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
        "group_size": 128, "max_input_length": None, "model_seqlen": None, "quant_method": "gptq",
        "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
        "pad_token_id": None, "sym": True, "tokenizer": None, "true_sequential": True,
        "use_cuda_fp16": False, "use_exllama": True, "backend": "auto", "meta": None,
    }  # fmt: skip
    awq = {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None,
        "fuse_max_seq_len": None, "group_size": 128, "modules_to_fuse": None, "version": "gemm",
        "modules_to_not_convert": None, "quant_method": "awq", "zero_point": True,
    }  # fmt: skip
    autoround = {
        "amp": True, "autoround_version": "0.4.2", "batch_size": 8, "bits": 4, "data_type": "int",
        "damp_percent": 0.01, "desc_act": False, "enable_minmax_tuning": True, "group_size": 128,
        "enable_quanted_input": True, "gradient_accumulate_steps": 1, "iters": 200, "lr": 0.005,
        "low_gpu_mem_usage": False, "minmax_lr": 0.005, "nsamples": 128, "quant_method": "gptq",
        "scale_dtype": "torch.float16", "seqlen": 2048, "sym": True, "true_sequential": False,
        "quant_block_list": None, "to_quant_block_names": None, "super_bits": None, "seed": 42,
    }  # fmt: skip
    for config in (gptqmodel, autogptq, transformers, awq, autoround):
        Config("here", config)


def test_settings_of_single_modules(tmp_path):
    """GPTQModel's `dynamic`: the first pattern that the beginning of a name matches counts."""
    config = {
        **GPTQ, "format": "gptq", "checkpoint_format": "gptq", "sym": True,
        "dynamic": {
            r"+:up\.1$": {"bits": 8, "group_size": 16},
            r".*\.2": {"bits": 2, "sym": False, "desc_act": False, "mse": 2.4},
            r"up\.3": {"format": "gptq_v2", "sym": False},
            r".*": {"bits": 4},
            r"-:up\.4": {},
        },
    }  # fmt: skip
    known = [(4, 32, True, 1), (8, 16, True, 1), (2, 32, False, 1), (4, 32, False, 0)]
    tensors = {"up.4.weight": np.ones((3, 5), np.float32)}
    want = {}
    for i, (bits, size, middle, less_one) in enumerate(known):
        case = case_of(bits, size=size, middle=middle)
        want[f"up.{i}"] = values_of(*case)
        tensors |= gptq(case[0], case[1] - less_one, case[2], bits, module=f"up.{i}")
    hki.save(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = hki.load_hugging_face(tmp_path, NAMES)
    assert found.keys() == {*want, "up.4"}
    for module, w in want.items():
        np.testing.assert_array_equal(hki.materialize(found[module]["w"]), w)


def test_the_first_pattern_counts_of_modules_that_are_not_quantized_too(tmp_path):
    codes, zeros, scales = case_of(4, size=16)
    config = {**GPTQ, **V2, "dynamic": {"+:up": {"group_size": 16}, "-:.*": {}}}
    w = loaded(tmp_path, gptq(codes, zeros, scales), config)
    np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros, scales))
    config["dynamic"] = {"-:.*": {}, "+:up": {"group_size": 16}}
    with pytest.raises(hki.CheckpointError, match="by '-:.*' up is not quantized"):
        loaded(tmp_path, gptq(codes, zeros, scales), config)


def test_a_configuration_within_that_of_the_text_model(tmp_path):
    codes, zeros, scales = case_of()
    own = {"quantization_config": {**GPTQ, **V2}}
    w = loaded(tmp_path, gptq(codes, zeros, scales), own, key="text_config")
    np.testing.assert_array_equal(w.materialize(), values_of(codes, zeros, scales))


# --- MLX -----------------------------------------------------------------------------------------


def affine(codes, scales, biases, bits, module="up"):
    """Tensors of codes `[outputs, inputs]`."""
    return {
        f"{module}.weight": run_of_bits(codes, bits).view(np.uint32),
        f"{module}.scales": scales,
        f"{module}.biases": biases,
    }


def mlx_case(bits, size=32, outputs=6, inputs=128):
    codes = RNG.integers(0, 2**bits, (outputs, inputs))
    shape = (outputs, inputs // size)
    scales, biases = (RNG.normal(size=shape).astype(np.float16) for _ in range(2))
    want = codes * scales.astype(np.float64).repeat(size, 1) + biases.repeat(size, 1)
    return affine(codes, scales, biases, bits), want


@pytest.mark.parametrize("key", ["quantization", "both"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.combinations
def test_affine_weights_of_mlx(bits, key, tmp_path):
    tensors, want = mlx_case(bits)
    own = {"group_size": 32, "bits": bits, "mode": "affine"}
    config = {"quantization": own} | ({"quantization_config": own} if key == "both" else {})
    hki.save(tmp_path / "model.safetensors", tensors | {"up.1.weight": np.ones((2, 3), np.float32)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = hki.load_hugging_face(tmp_path, NAMES)
    w = found["up"]["w"]
    assert (w.format, w.group_size) == (f"uint{bits}", 32) and found["up.1"]["w"].shape == (3, 2)
    np.testing.assert_allclose(w.materialize(), want.T, rtol=1e-6, atol=1e-6)


def test_settings_of_mlx_for_single_modules(tmp_path):
    tensors, want = mlx_case(8, 64)
    own = {"group_size": 32, "bits": 4, "up": {"group_size": 64, "bits": 8}, "down": False}
    w = loaded(tmp_path, tensors, own, key="quantization")
    np.testing.assert_allclose(w.materialize(), want.T, rtol=1e-6, atol=1e-6)
    for changes, message in (
        ({"up": False}, "quantization: up: false, and there are scales of it"),
        ({"up": {"mode": "mxfp4"}}, "mode: expected 'affine', got 'mxfp4'"),
        ({"up": {"bits": 7}}, "bits: expected one of 2, 3, 4, 5, 6, 8, got 7"),
        ({"up": {"bits": 4}}, r"up.scales: expected .*\[6, 8\], got F16\[6, 2\]"),
        ({"up": {"group_size": 0}}, "group_size: expected a multiple of 8, got 0"),
    ):
        with pytest.raises(hki.CheckpointError, match=message):
            loaded(tmp_path, tensors, own | changes, key="quantization")


def test_codes_of_mlx_without_scales(tmp_path):
    tensors, want = mlx_case(4)
    own = {"group_size": 32, "bits": 4}
    alone = {"up.weight": tensors["up.weight"], "down.weight": tensors["up.weight"]}
    inner = {"text_config": {"quantization": own}}
    for config in ({"quantization": {**own, "up": False}}, inner, {"thinker_config": inner}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        hki.save(tmp_path / "model.safetensors", alone)
        with pytest.raises(
            hki.CheckpointError, match=r"(up|down).scales, (up|down).scales: missing"
        ):
            hki.load_hugging_face(tmp_path, NAMES)
        out = lambda name: None if name == "up.weight" else NAMES(name)  # noqa: E731
        with pytest.raises(hki.CheckpointError, match=r": down.scales: missing"):
            hki.load_hugging_face(tmp_path, out)
    hki.save(tmp_path / "model.safetensors", tensors)
    w = hki.load_hugging_face(tmp_path, NAMES)["up"]["w"]
    np.testing.assert_allclose(w.materialize(), want.T, rtol=1e-6, atol=1e-6)
    config["talker_config"] = {"quantization": {**own, "bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        hki.CheckpointError, match="got those of talker_config and thinker_config.text"
    ):
        hki.load_hugging_face(tmp_path, NAMES)


def test_codes_of_configurations_that_are_not_read(tmp_path):
    """They would be a dense weight of integers."""
    tensors, _ = mlx_case(4)
    for config, message in (
        (
            {},
            r"up.weight: of a quantized weight, whose scales are up.scales, and no quantization_config",
        ),
        (
            {"compression_config": {"format": "pack-quantized"}},
            "compression_config: config_groups: expected groups",
        ),
        (
            {"quantization_config": {"quant_method": "quark"}},
            "got 'quark'",
        ),
        ({"quantization": [4]}, "quantization: not an object"),
        ({"quantization": {"bits": 4}, "quantization_config": GPTQ}, "expected one of them"),
    ):
        hki.save(tmp_path / "model.safetensors", tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(hki.CheckpointError, match=message):
            hki.load_hugging_face(tmp_path, lambda name: f"m/{name}")
    for codes in ("up.weight_packed", "up.weight"):
        tensors = {codes: np.ones((3, 4), np.int32), "up.weight_scale": np.ones((3, 1), np.float32)}
        (tmp_path / "config.json").unlink(missing_ok=True)
        hki.save(tmp_path / "model.safetensors", tensors)
        with pytest.raises(hki.CheckpointError, match=f"{codes}: of a quantized weight"):
            hki.load_hugging_face(tmp_path, lambda name: f"m/{name}")
    ids = {
        "up.position_ids": np.arange(8)[None],
        "up.scale": np.ones(3),
        "ids": np.ones((2, 3), "i4"),
    }
    hki.save(tmp_path / "model.safetensors", ids)
    found = hki.load_hugging_face(tmp_path, lambda name: f"m/{name}", dtype=None)["m"]
    np.testing.assert_array_equal(found["up.position_ids"], ids["up.position_ids"])
    assert found["ids"].dtype == jnp.int32
