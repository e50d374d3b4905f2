"""Stored weights whose activations are quantized in each product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki

K, N = 64, 24


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rounded(x):
    """Rows of int8 by their largest magnitude, of which half a step more is the bound (as in Qwix).

    With the reciprocals that are taken there: the largest magnitude lies on a tie.
    """
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127.5)
    return np.clip(np.round(x * (1 / scale)), -128, 127) * scale


FORMATS = {
    "int8": dict(dtype="int8"),
    "int4": dict(dtype="int4"),
    "groups": dict(dtype="int4", group_size=16),
    "zero point": dict(dtype="int4", zero_point=True),
    "nf4": dict(dtype="nf4", group_size=32),
    "double": dict(dtype="nf4", group_size=32, scale_dtype="double"),
    "other axis": dict(dtype="int8", axis=-1),
    "tiles": dict(dtype="int8", group_size=(8, 16)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_products(name, never_dense):
    q = hki.QuantizedMatrix.quantize(normal((K, N)), **FORMATS[name], activation="int8")
    w, x = np.asarray(hki.materialize(q)), normal((2, 5, K), 1)
    dot = hki.use_implicit_args(lambda x, w: x @ w)
    want = rounded(x) @ w
    # A quotient that lies on a tie may round either way: one step of one element of x, at most.
    step = np.abs(x).max() / 127.5 * np.abs(w).max()
    for run in (dot, jax.jit(dot)):
        got = np.asarray(run(x, q))
        assert np.abs(got - want).max() < step + 1e-4
        assert np.median(np.abs(got - want)) < 1e-5
    assert np.abs(want - x @ w).max() > 1e-4  # it is another product than the dense one
    np.testing.assert_allclose(jax.vmap(dot, in_axes=(0, None))(x, q), got, rtol=1e-5, atol=step)
    first = hki.use_implicit_args(lambda w, x: w.T @ x)(q, x[0].T)
    np.testing.assert_allclose(first, got[0].T, rtol=1e-5, atol=step)
    # Straight through: the gradient by x is that of the product with the stored weight.
    grad = jax.grad(lambda x: jnp.sum(jnp.cos(jnp.arange(N)) * dot(x, q)))(x)
    np.testing.assert_allclose(
        grad, np.broadcast_to(w @ np.cos(np.arange(N)), x.shape), rtol=1e-4, atol=1e-4
    )


def test_what_is_kept(never_dense):
    q = hki.QuantizedMatrix.quantize(normal((3, K, N)), "int8", activation="int8")
    one = hki.use_implicit_args(lambda w: w[1].T)(q)
    assert one.activation == "int8" and q.requantize(normal((3, K, N))).activation == "int8"
    layers = hki.use_implicit_args(lambda w, x: jax.lax.scan(lambda c, w: (c, c @ w), x, w)[1])
    x = normal((4, K), 1)
    want = rounded(x) @ np.asarray(hki.materialize(q))
    assert np.median(np.abs(np.asarray(layers(q, x)) - want)) < 1e-5


@pytest.mark.parametrize("activation", ["int5", "uint8", "mxfp8"])
def test_errors(activation):
    with pytest.raises(ValueError, match=f"activation: expected one of .*, got '{activation}'"):
        hki.QuantizedMatrix.quantize(normal((K, N)), "int8", activation=activation)
