"""GGUF's blocks, against the definitions that the `gguf` package has of them."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.interchange.ggml_blocks import KINDS, blocks
from tests.tiers import few


@pytest.mark.every(4)
@pytest.mark.parametrize("name", few(KINDS, "Q4_0", "Q4_K", "Q3_K", "IQ4_XS"))
def test_values_and_bytes(name):
    kind, data = blocks(name)
    want = gguf.quants.dequantize(data, kind)
    for axis in (-1, -2):
        q = hki.from_ggml(data, kind if axis == -1 else name, axis=axis)
        assert q.nbytes == data.nbytes and q.dtype == np.float32
        np.testing.assert_array_equal(hki.materialize(q), want if axis == -1 else want.T)
    x = np.random.default_rng(2).normal(size=(2, 512)).astype(np.float32)
    with hki.materialization("error"):
        got = jax.jit(hki.use_implicit_args(jnp.dot))(x, q)
        rows = jax.jit(hki.use_implicit_args(lambda w: w[:, jnp.array([2, 0])]))(q)
    np.testing.assert_allclose(got, x @ want.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(hki.materialize(rows), want.T[:, [2, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    "data, kind, message",
    [
        (np.zeros((1, 98), np.uint8), "IQ3_XXS", "kind: expected one of Q4_0, .*, got 'IQ3_XXS'"),
        (np.zeros((1, 20), np.uint8), "Q4_0", "whole blocks of 18 bytes for 'Q4_0', got uint8"),
        (np.zeros((1, 18)), "Q4_0", r"expected uint8.*got float64\[1, 18\]"),
        (np.zeros(18, np.uint8), "Q4_0", r"rows, bytes\].*got uint8\[18\]"),
    ],
)
def test_errors(data, kind, message):
    with pytest.raises(ValueError, match=message):
        hki.from_ggml(data, kind)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q2_K"])
def test_a_weight_of_one_block_has_its_own_memory(name):
    """The bytes of a file may change later; JAX uses memory of NumPy that begins at 64 bytes."""
    kind, data = blocks(name)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    memory = np.zeros(size + 192, np.uint8)
    start = -memory.ctypes.data % 64
    for offset in range(start, start + 64, 2):
        view = memory[offset : offset + size].reshape(1, size)
        view[:] = data.reshape(-1)[:size]
        q = hki.from_ggml(view, kind, axis=-1)
        want = np.array(hki.materialize(q))
        memory[:] = 0
        np.testing.assert_array_equal(hki.materialize(q), want)
