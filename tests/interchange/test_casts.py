"""Casts to a dtype of smaller range: one warning for numbers that it does not have."""

import warnings

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantized.numbers.casts import overflows

# From, to, the largest number that rounds to a finite one, and one beyond it.
RANGES = [
    ("float64", "float32", 3.4028235e38, 3.4028236e38),
    ("float64", "bfloat16", 3.39e38, 3.4e38),
    ("float64", "float16", 65519.0, 65520.0),
    ("float32", "bfloat16", 3.3961e38, 3.3962e38),
    ("float32", "float16", 65519.0, 65520.0),
    ("bfloat16", "float16", 65280.0, 65536.0),
    ("float32", "float8_e5m2", 61439.0, 61441.0),
    ("bfloat16", "float8_e4m3fn", 448.0, 480.0),
    ("float16", "float8_e4m3fn", 464.0, 465.0),
    ("float8_e5m2", "float8_e4m3fn", 448.0, 512.0),
    ("float32", "float8_e4m3b11fnuz", 30.0, 32.0),
    ("float32", "float4_e2m1fn", 6.9, 7.1),
]


def dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("old, new, inside, beyond", RANGES)
def test_what_overflows(old, new, inside, beyond):
    for number, expected in ((inside, False), (beyond, True), (-beyond, True)):
        values = np.full(3 * 2**20 // 2, 1, dtype(old))
        values[-1] = number
        with np.errstate(all="ignore"):
            assert overflows(values, values.astype(dtype(new))) == expected, number
    for number in (np.inf, np.nan):  # are no finite ones that are lost
        if old != "float8_e4m3fn":
            values = np.array([number, 1], dtype(old))
            with np.errstate(all="ignore"):
                assert not overflows(values, values.astype(dtype(new)))
    assert not overflows(np.array([beyond], dtype(old)), np.array([beyond], dtype(old)))


@pytest.mark.parametrize(
    "old, new, inside, beyond",
    [row for row in RANGES if row[0] in ("float32", "bfloat16") and "b11" not in row[1]],
)
def test_a_checkpoint(tmp_path, old, new, inside, beyond):
    for number, count in ((inside, 0), (beyond, 1)):
        path = tmp_path / f"{count}.safetensors"
        hki.save(path, {"up.weight": np.array([[number, 1]], dtype(old))})
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = hki.load_hugging_face(path, {"up.weight": "up/w"}, dtype=dtype(new))
        assert len(said) == count, [str(w.message) for w in said]
        assert found["up"]["w"].dtype == dtype(new) and float(found["up"]["w"][1, 0]) == 1
        for w in said:
            assert f"up.weight: has numbers that {new} does not have" in str(w.message)


def test_quantized_tensors(tmp_path):
    """The values of a quantized tensor, which stays quantized."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "test")
    w = np.linspace(-7e4, 7e4, 64, dtype=np.float32).reshape(2, 32)
    data = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("up.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = {"up.weight": "up/w"}
    with pytest.warns(UserWarning, match="up.weight: has numbers that float16 does not have"):
        found = hki.load_gguf(path, names, dtype=jnp.float16)
    assert np.isinf(hki.materialize(found)["up"]["w"]).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hki.load_gguf(path, names, dtype=jnp.bfloat16)
    assert np.isfinite(hki.materialize(found)["up"]["w"]).all()


@pytest.mark.parametrize("bad", [jnp.int8, np.int32, bool])
def test_parameters_are_floating(tmp_path, bad):
    path = tmp_path / "x.safetensors"
    hki.save(path, {"up.weight": np.array([[1.5, 300.0]])})
    with pytest.raises(ValueError, match="dtype: expected a floating dtype, or None"):
        hki.load_hugging_face(path, {"up.weight": "up/w"}, dtype=bad)


def test_gguf_is_written():
    for kind, good, bad in (("BF16", 3.3961e38, 3.3962e38), ("F16", 65504.0, 65520.0)):
        hki.to_ggml(np.full((2, 32), good, np.float32), kind, axis=-1)
        for rest in (1.0, np.inf):  # what is infinite hides nothing
            w = np.full((2, 32), rest, np.float32)
            w[0, 0] = bad
            with pytest.raises(ValueError, match="weight: .* is too large for"):
                hki.to_ggml(w, kind, axis=-1)
    with pytest.raises(ValueError, match="weight: float64 numbers that are too large for float32"):
        hki.to_ggml(np.full((2, 32), 1e39), "F32", axis=-1)
