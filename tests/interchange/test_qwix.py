"""Qwix's arrays, which Qwix itself made (tests/data/make_qwix_goldens.py), and back."""

import pathlib
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import normal

GOLDENS = np.load(pathlib.Path(__file__).parents[1] / "data" / "qwix.npz")
CASES = [name for name in GOLDENS.files if "/" not in name]


class QArray(NamedTuple):
    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = None


@pytest.fixture(autouse=True)
def qwix(monkeypatch):
    """The package's one name that is used: its `QArray`, with the fields of Qwix's."""
    monkeypatch.setitem(sys.modules, "qwix", types.SimpleNamespace(QArray=QArray))


def golden(case):
    dtype, qtype = (str(x) for x in GOLDENS[f"{case}/names"])

    def codes(name):
        if f"{case}/{name}" not in GOLDENS.files:
            return None
        raw = jnp.asarray(GOLDENS[f"{case}/{name}"])
        raw = raw if np.dtype(dtype).name in ("int8", "float8_e4m3fn", "float8_e5m2") else (
            raw.astype(jnp.uint4)
        )  # fmt: skip
        return jax.lax.bitcast_convert_type(raw, jnp.dtype(dtype))

    return QArray(
        codes("qvalue"), jnp.asarray(GOLDENS[f"{case}/scale"]), codes("zero_point"), qtype
    )


def same(a, b):
    assert a.dtype == b.dtype
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    np.testing.assert_array_equal(np.broadcast_to(a, b.shape), b)


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES)
def test_arrays_of_qwix_and_back(case):
    array = golden(case)
    q = hki.from_qwix(array)
    # With a zero point, the offset is rounded.
    error = 0 if array.zero_point is None else 1e-6
    np.testing.assert_allclose(hki.materialize(q), GOLDENS[case], rtol=0, atol=error)
    again = hki.to_qwix(q)
    same(array.qvalue, again.qvalue)
    same(array.scale, again.scale)
    assert (array.zero_point is None) == (again.zero_point is None)
    if array.zero_point is not None:
        same(array.zero_point, again.zero_point)
    name = again.qtype if isinstance(again.qtype, str) else again.qvalue.dtype.name
    assert name == array.qtype


@pytest.mark.parametrize("name", ["int5", "fp8_e4m3", "mxfp4"])
def test_matrices_and_back(name):
    q = hki.QuantizedMatrix.quantize(normal((64, 32)), name, None if name == "mxfp4" else 16)
    array = hki.to_qwix(q)
    assert array.qvalue.shape == q.shape and array.qtype == {"fp8_e4m3": None}.get(name, name)
    again = hki.from_qwix(array._replace(qtype=array.qtype or array.qvalue.dtype))
    np.testing.assert_array_equal(hki.materialize(again), hki.materialize(q))
    assert again.format == q.format and again.scale_dtype == q.scale_dtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "name", ["int3", "int8", "uint4", "uint8", "nf4", "mxfp8", "mxfp4", "nvfp4"]
)
def test_matrices_come_back_with_the_same_bits(name, dtype):
    signed = name.removeprefix("u")
    own = (None, -2, name != signed) if name[:2] in ("mx", "nv") else (16, -2, name != signed)
    q = hki.QuantizedMatrix.quantize(normal((64, 32)).astype(dtype), signed, *own)
    array = hki.to_qwix(q)
    again = hki.from_qwix(array._replace(qtype=array.qtype or array.qvalue.dtype), dtype=q.dtype)
    assert jax.tree.structure(again) == jax.tree.structure(q)
    jax.tree.map(same, again, q)


def dequantized(array, codes):
    """Qwix's own arithmetic: each step in the dtype of the scales."""
    values = codes.astype(array.scale.dtype)
    if array.zero_point is not None:
        values = values - array.zero_point.astype(array.scale.dtype)
    return (values * array.scale).astype(jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_with_zero_points(dtype):
    """They differ by the order of rounding in float32 alone."""
    codes = jnp.broadcast_to(jnp.arange(-128, 128, dtype=jnp.int8)[:, None], (256, 64))
    zero_point = jnp.arange(-128, 128, 4, dtype=jnp.int8)[None]
    scale = jnp.exp(normal((1, 64))).astype(dtype)
    array = QArray(codes, scale, zero_point, "int8")
    q = hki.from_qwix(array)
    again = hki.to_qwix(q)
    for mine, own in zip(again[:3], array[:3], strict=True):
        same(own, mine)
    error = jnp.abs(hki.materialize(q).astype(jnp.float32) - dequantized(array, codes))
    bound = 2.0**-22 * 255 * scale if dtype == jnp.float32 else 0
    assert bool((error <= bound).all())


def test_values_of_nf4_with_scales_of_16_bits():
    """Qwix rounds the table to the scales' dtype before the product; here the product is rounded."""
    codes = jnp.broadcast_to(jnp.arange(16, dtype=jnp.uint4)[:, None], (16, 128))
    array = QArray(codes, (1 + jnp.arange(128)[None] / 128).astype(jnp.bfloat16), None, "nf4")
    q = hki.from_qwix(array)
    same(array.qvalue, hki.to_qwix(q).qvalue)
    same(array.scale, hki.to_qwix(q).scale)
    table = jnp.asarray(hki.quantization.formats.NF4_TABLE)[codes.astype(jnp.int32)]
    want = dequantized(array, table)
    error = jnp.abs(hki.materialize(q).astype(jnp.float32) - want)
    assert 2.0**-9 < float((error / jnp.maximum(jnp.abs(want), 1e-9)).max()) <= 2.0**-7


@pytest.mark.parametrize("name", ["uint2", "uint4", "uint8"])
def test_unsigned_codes_without_a_zero_point(name):
    bits = int(name[4:])
    codes = (jnp.arange(64 * 8).reshape(64, 8) % 2**bits).astype(name)
    array = QArray(codes, jnp.exp(normal((2, 8))), None, name)
    q = hki.from_qwix(array)
    assert q.format == name and q.offset is None
    wide = jnp.repeat(array.scale, 32, 0) * codes.astype(jnp.float32)
    np.testing.assert_array_equal(hki.materialize(q), wide)
    again = hki.to_qwix(q)
    same(array.qvalue, again.qvalue)
    same(array.scale, again.scale)
    assert again.zero_point is None and np.dtype(again.qtype) == codes.dtype


def test_stacks_keep_the_8_bit_scales_of_each_matrix():
    weights = normal((8, 32, 4)) * jnp.exp(normal((8, 1, 1)))
    q = hki.QuantizedMatrix.quantize(weights, "nvfp4")
    again = hki.from_qwix(hki.to_qwix(q))
    assert again.scale_dtype == q.scale_dtype and again.nbytes == q.nbytes
    np.testing.assert_array_equal(hki.materialize(again), hki.materialize(q))


def test_scales_of_8_bits_are_written_in_the_dtype_of_the_matrix_if_it_holds_them():
    w = normal((64, 4)).astype(jnp.bfloat16)
    for name, dtype in (("mxfp8", jnp.bfloat16), ("nvfp4", jnp.float32)):
        q = hki.QuantizedMatrix.quantize(w, name)
        assert hki.to_qwix(q).scale.dtype == dtype
        # A traced array might have other scales: they stay as they are, with the same values.
        array = hki.to_qwix(q)
        values = jax.jit(
            lambda scale, a=array: hki.from_qwix(a._replace(scale=scale)).materialize()
        )
        np.testing.assert_array_equal(values(array.scale), hki.materialize(hki.from_qwix(array)))


@pytest.mark.parametrize("scales", [(16, 8), (16, 2), (4, 8), (1, 1)])
def test_scales_of_single_numbers_and_of_groups_along_either_axis(scales):
    codes = (jnp.arange(16 * 8).reshape(16, 8) - 64).astype(jnp.int8)
    array = QArray(codes, jnp.exp(normal(scales)), None, "int8")
    wide = np.repeat(np.repeat(array.scale, 16 // scales[0], 0), 8 // scales[1], 1)
    q = hki.from_qwix(array)
    np.testing.assert_array_equal(hki.materialize(q), codes.astype(np.float32) * wide)
    same(array.scale, hki.to_qwix(q).scale)


@pytest.mark.parametrize("name", ["nf4", "uint8", "uint4", "float8_e4m3fn"])
def test_zero_points_of_other_formats(name):
    codes = (jnp.arange(16 * 8).reshape(16, 8) % 16).astype("uint4" if name == "nf4" else name)
    array = QArray(codes, jnp.full((1, 8), 0.5), codes[3:4], name)
    q = hki.from_qwix(array)
    table = jnp.asarray(hki.quantization.formats.NF4_TABLE)
    values = table[codes.astype(jnp.int32)] if name == "nf4" else codes
    np.testing.assert_array_equal(hki.materialize(q), dequantized(array, values))
    if name.startswith("uint"):  # as signed codes
        again = hki.to_qwix(q)
        np.testing.assert_array_equal(dequantized(again, again.qvalue), hki.materialize(q))
    else:
        with pytest.raises(ValueError, match="Qwix has no offsets for"):
            hki.to_qwix(q)


def test_scales_and_zero_points_in_other_tiles():
    codes = (jnp.arange(2 * 16 * 8).reshape(2, 16, 8) % 16 - 8).astype(jnp.int8)
    scale, zero_point = jnp.exp(normal((1, 2, 1))), codes[:1, :1, :]
    q = hki.from_qwix(QArray(codes, scale, zero_point, None))
    wide = lambda x: np.repeat(np.broadcast_to(x, (2, *x.shape[1:])), 16 // x.shape[1], 1)  # noqa: E731
    want = (codes.astype(np.float32) - wide(zero_point)) * wide(scale)
    assert (abs(hki.materialize(q) - want) <= 2.0**-22 * 255 * wide(scale)).all()


def test_scales_that_8_bits_do_not_hold_stay_dense():
    scale = jnp.exp(normal((2, 8)))
    for name, codes in (
        ("mxfp8", jnp.ones((64, 8), jnp.float8_e4m3fn)),
        ("nvfp4", jnp.ones((32, 8), jnp.float4_e2m1fn)),
    ):
        same(scale, hki.from_qwix(QArray(codes, scale, None, name)).scale.mT)


def test_what_qwix_does_not_have():
    above_zero = normal((64, 32)) + 10  # zero has no code
    for name, message in (
        ("binary", "Qwix has no format for 'binary'"),
        ("iq4_nl", "Qwix has no format for 'iq4_nl'"),
        ("uint4", "offsets are not whole multiples"),
    ):
        with pytest.raises(ValueError, match=message):
            hki.to_qwix(hki.QuantizedMatrix.quantize(above_zero, name, 32))
    q = hki.QuantizedMatrix.quantize(normal((16, 8)), "int4")
    for factor in (2.001, 9):  # no whole multiple, and beyond the codes
        with pytest.raises(ValueError, match="offsets are not whole multiples"):
            hki.to_qwix(q._replace(offset=factor * q.scale))
    with pytest.raises(ValueError, match="can't be checked within jit"):
        jax.jit(hki.to_qwix)(q._replace(offset=2 * q.scale))
    odd = QArray(jnp.zeros((6, 6), jnp.int4), jnp.ones((2, 2)), None, "int4")
    with pytest.raises(ValueError, match="expected groups that are multiples of 2"):
        hki.from_qwix(odd)
    array = hki.to_qwix(q)
    empty = array._replace(qvalue=array.qvalue[:0])
    for other in (array._replace(scale=jnp.ones((3, 8))), array._replace(scale=jnp.ones(8)), empty):
        with pytest.raises(ValueError, match="scales and zero points that divide it"):
            hki.from_qwix(other)
    for wrong in (jnp.int32, bool, "complex64"):
        with pytest.raises(TypeError, match="dtype: expected a floating dtype or None"):
            hki.from_qwix(array, dtype=wrong)
    with pytest.raises(TypeError, match="expected a QuantizedMatrix, got LoRA"):
        hki.to_qwix(hki.LoRA.create(q, jax.random.key(0), rank=2))
    with pytest.raises(TypeError, match="which has no qvalue"):
        hki.from_qwix(above_zero)
