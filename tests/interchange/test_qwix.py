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
    # The name of nvfp4 says that the scales are numbers of e4m3: here they are float32.
    name = again.qtype if isinstance(again.qtype, str) else again.qvalue.dtype.name
    assert name == {"nvfp4": "float4_e2m1fn"}.get(array.qtype, array.qtype)


@pytest.mark.parametrize("name", ["int5", "fp8_e4m3", "mxfp4"])
def test_matrices_and_back(name):
    q = hki.QuantizedMatrix.quantize(normal((64, 32)), name, None if name == "mxfp4" else 16)
    array = hki.to_qwix(q)
    assert array.qvalue.shape == q.shape and array.qtype == {"fp8_e4m3": None}.get(name, name)
    again = hki.from_qwix(array._replace(qtype=array.qtype or array.qvalue.dtype))
    np.testing.assert_array_equal(hki.materialize(again), hki.materialize(q))
    assert again.format == q.format and again.scale_dtype == q.scale_dtype


def test_what_qwix_does_not_have():
    above_zero = normal((64, 32)) + 10  # zero has no code
    for name, message in (
        ("binary", "Qwix has no format for 'binary'"),
        ("iq4_nl", "Qwix has no format for 'iq4_nl'"),
        ("uint4", "offsets are not whole multiples"),
    ):
        with pytest.raises(ValueError, match=message):
            hki.to_qwix(hki.QuantizedMatrix.quantize(above_zero, name, 32))
    odd = QArray(jnp.zeros((6, 6), jnp.int4), jnp.ones((2, 2)), None, "int4")
    with pytest.raises(ValueError, match="expected groups that are multiples of 2"):
        hki.from_qwix(odd)
