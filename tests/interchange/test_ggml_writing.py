"""GGUF's blocks written: the bytes that were read, and values as the `gguf` package decodes them."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.interchange import ggml
from tests.interchange.ggml_blocks import KINDS, blocks
from tests.tiers import few

# The relative error of normal numbers [64, 512]. In the comments that of llama.cpp's own quantizer
# (`ggml_quantize_chunk` of llama-cpp-python 0.3.36, all elements equally important); the kinds without
# a comment are quantized as there, to the same bytes.
ERRORS = {
    "Q4_0": 0.0865, "Q4_1": 0.0783, "Q5_0": 0.0429, "Q5_1": 0.0382, "Q8_0": 0.0054, "TQ2_0": 0.811,
    "MXFP4": 0.1151,
    "Q2_K": 0.2602,  # 0.2688
    "Q3_K": 0.1447,  # 0.1457
    "Q4_K": 0.0697,  # 0.0708
    "Q5_K": 0.0345,  # 0.0356
    "Q6_K": 0.0168,  # 0.0174
    "IQ4_NL": 0.0735,  # 0.0752
    "IQ4_XS": 0.0743,  # 0.0759
}  # fmt: skip


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", few(KINDS, "Q4_1", "Q4_K", "Q6_K"))
def test_what_was_read_is_written_bit_for_bit(name):
    kind, data = blocks(name)
    for axis in (-1, -2):
        q = hki.from_ggml(data, kind, axis=axis)
        assert ggml.kind_of(q) == name
        np.testing.assert_array_equal(hki.to_ggml(q, kind, axis=axis), data)
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), q)
    np.testing.assert_array_equal(hki.to_ggml(stack, name), [data, data])


@pytest.mark.parametrize("name", few(KINDS, "Q4_0"))
def test_values_are_quantized(name):
    w = normal((64, 512))
    data = hki.to_ggml(w.T, name)
    decoded = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(hki.from_ggml(data, name, axis=-1).materialize(), decoded)
    assert np.linalg.norm(decoded - w) / np.linalg.norm(w) < ERRORS[name]


@pytest.mark.parametrize("recipe", few(["q4_0", "q4_1", "q8_0", "q2_k", "q6_k"], "q4_0"))
def test_what_the_library_quantizes_is_written_bit_for_bit(recipe):
    q = hki.QuantizedMatrix.quantize(jnp.asarray(normal((512, 8))), recipe)
    kind = recipe.upper()
    data = hki.to_ggml(q, kind)
    got = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(got.T, q.materialize())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.slow
def test_numbers_of_one_sign(sign):
    """Minima of K-quants are not positive: a range above zero begins at zero."""
    w = sign * np.random.default_rng(0).uniform(1, 3, (8, 256)).astype(np.float32)
    got = hki.from_ggml(hki.to_ggml(w, "Q4_K", axis=-1), "Q4_K", axis=-1).materialize()
    assert np.linalg.norm(got - w) / np.linalg.norm(w) < 0.026
    zeros = np.zeros((2, 256), np.float32)
    assert not np.any(hki.from_ggml(hki.to_ggml(zeros, "Q4_K", axis=-1), "Q4_K").materialize())


def test_another_format_or_axis_is_quantized_again():
    w = normal((64, 64))
    for q in (
        hki.QuantizedMatrix.quantize(jnp.asarray(w), "int8", 32),  # float32 scales
        hki.QuantizedMatrix.quantize(jnp.asarray(w), "q8_0", axis=-1),
        hki.QuantizedMatrix.quantize(jnp.asarray(w), "int8", (2, 32), scale_dtype="float16"),
    ):
        got = hki.from_ggml(hki.to_ggml(q, "Q8_0"), "Q8_0").materialize()
        np.testing.assert_allclose(got, q.materialize(), atol=0.02)


@pytest.mark.parametrize(
    "weight, kind, message",
    [
        (np.ones((32, 2)), "Q4_2", r"kind: expected one of F32, .*TQ2_0, got 'Q4_2'"),
        (np.ones((48, 2)), "Q4_0", "rows of 48 elements are not whole blocks of 32 for 'Q4_0'"),
        (np.full((32, 2), np.nan), "Q8_0", "not finite, which 'Q8_0' can't hold"),
        (np.full((32, 2), 7e4), "F16", "70000 is too large for float16.*'F32' and 'BF16' can"),
    ],
)
def test_errors(weight, kind, message):
    with pytest.raises(ValueError, match=message):
        hki.to_ggml(weight, kind)


# --- the recipes ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_requantizing_keeps_the_format(name):
    """Also of scales in codes: the structure of the tree, and nearly the values."""
    q = hki.from_ggml(hki.to_ggml(normal((8, 512)), name, axis=-1), name)
    lora = hki.LoRA(q, jnp.zeros((512, 1)), jnp.zeros((1, 8)))
    new = hki.merge_adapters({"linear": {"w": lora}}, requantize=True)["linear"]["w"]
    assert jax.tree.structure(new) == jax.tree.structure(q)
    assert ggml.kind_of(new) == name
    step = np.abs(np.asarray(q.materialize())).max() / {"Q2_K": 2, "Q3_K": 3}.get(name, 7)
    np.testing.assert_allclose(new.materialize(), q.materialize(), atol=step)


def test_scales_in_runs_have_to_fit():
    w = jnp.ones((320, 4))
    with pytest.raises(ValueError, match="multiple of 256, got 320"):
        hki.QuantizedMatrix.quantize(w, "q4_k")
    with pytest.raises(ValueError, match="int4 need scales in a format that has both signs"):
        hki.QuantizedMatrix.quantize(w, "int4", 32, scale_dtype="uint6,2")
    with pytest.raises(ValueError, match="uint4 need scales in a format that counts up from zero"):
        hki.QuantizedMatrix.quantize(w, "uint4", 32, scale_dtype="int6,2")
    with pytest.raises(ValueError, match="expected a multiple of 4 scales in a run"):
        hki.QuantizedMatrix.quantize(w, "uint4", 32, scale_dtype="uint6,5")
    with pytest.raises(ValueError, match="too large for 'uint6,4'"):
        hki.QuantizedMatrix.quantize(w[:256] * 1e9, "uint4", 32, scale_dtype="uint6,4")
    params = {"a": {"w": w}, "b": {"w": jnp.ones((256, 4))}}
    quantized = hki.quantize_params(params, dtype="q4_k")
    assert quantized["a"]["w"] is w and quantized["b"]["w"].scale_dtype == "uint6,8"
