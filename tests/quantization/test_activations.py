"""Stored weights whose activations are quantized in each product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.adapters import Hadamard
from tests.random_arrays import numpy_normal as normal
from tests.tiers import few

K, N = 64, 24


def rounded(x, bits=8):
    """Rows of int8 by their largest magnitude, of which half a step more is the bound (as in Qwix).

    With the reciprocals that are taken there: the largest magnitude lies on a tie.
    """
    most = 2 ** (bits - 1)
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / (most - 0.5))
    return np.clip(np.round(x * (1 / scale)), -most, most - 1) * scale


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


@pytest.mark.parametrize("name", few(FORMATS, "int8", "nf4", "groups"))
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


@pytest.mark.parametrize("axis", [-2, -1])
def test_codes_that_int8_does_not_hold(axis, never_dense):
    """Codes up to 255 without an offset, in products of matrices and in others."""
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 256, (6, 8)), jnp.uint8)
    q = hki.QuantizedMatrix.from_parts(codes, jnp.ones((6, 1)) / 256, dtype="uint8", axis=axis)
    w = np.asarray(hki.materialize(q))
    q, x = q.with_activation("int8"), np.abs(normal(w.shape))
    for equation in ("ij,ij->", "kj,ij->ki", "ik,ij->kj", "ij,ij->ij"):
        product = hki.use_implicit_args(lambda x, w, equation=equation: jnp.einsum(equation, x, w))
        want = np.einsum(equation, x, w)
        np.testing.assert_allclose(product(x, q), want, atol=0.01 * want.max())  # rounded to int8


@pytest.mark.combinations
@pytest.mark.parametrize("weight", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_floating_is_not_rounded(weight, dtype, never_dense):
    """A mask, or integers, times a stored matrix: its values are not integers."""
    q = hki.QuantizedMatrix.quantize(jnp.asarray(normal((6, 4)), dtype), weight, activation="int8")
    ids = jnp.arange(30).reshape(5, 6)
    product = hki.use_implicit_args(jax.jit(lambda x, w: x @ w))
    for x in (ids, ids % 3 == 0):
        want = x @ hki.materialize(q)
        got = product(x, q)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        rounding = 1e-6 if dtype == jnp.float32 else 0.02  # bfloat16 has 8 bits
        np.testing.assert_allclose(got, want, atol=rounding * np.abs(want).max())


def test_what_is_kept(never_dense):
    q = hki.QuantizedMatrix.quantize(normal((3, K, N)), "int8", activation="int8")
    one = hki.use_implicit_args(lambda w: w[1].T)(q)
    assert one.activation == "int8" and q.requantize(normal((3, K, N))).activation == "int8"
    layers = hki.use_implicit_args(lambda w, x: jax.lax.scan(lambda c, w: (c, c @ w), x, w)[1])
    x = normal((4, K), 1)
    want = rounded(x) @ np.asarray(hki.materialize(q))
    assert np.median(np.abs(np.asarray(layers(q, x)) - want)) < 1e-5


@pytest.mark.parametrize("activation", ["int9", "ternary", "q4_0"])
def test_errors(activation):
    with pytest.raises(ValueError, match=f"activation: expected one of .*, got '{activation}'"):
        hki.QuantizedMatrix.quantize(normal((K, N)), "int8", activation=activation)


@pytest.mark.parametrize("bits", [8, 4])
def test_rotated_inputs_are_rounded(bits, never_dense):
    """The rounded inputs are the rotated ones, among which one outlier does not spoil the scale."""
    w, x = normal((K, N)), np.array(normal((8, K), 1))
    x[:, 7] *= 60
    options = dict(dtype="int8", activation=f"int{bits}")
    plain, q = (
        hki.quantize_params({"m": {"w": w}}, rotate=rotate, **options)["m"]["w"]
        for rotate in (False, True)
    )
    dot = hki.use_implicit_args(lambda x, w: x @ w)
    rotation, codes = np.asarray(hki.materialize(q.rotation)), np.asarray(hki.materialize(q.w))
    turned = x @ rotation
    want, step = rounded(turned, bits) @ codes, np.abs(turned).max() / 2 ** (bits - 1)
    for run in (dot, jax.jit(dot), jax.vmap(dot, in_axes=(0, None))):
        got = np.asarray(run(x, q))
        assert np.abs(got - want).max() < step * np.abs(codes).max()  # a tie, as above
        assert np.median(np.abs(got - want)) < 1e-4
    dense = rotation @ codes
    grad = jax.grad(lambda x: jnp.sum(jnp.cos(jnp.arange(N)) * dot(x, q)))(x)
    np.testing.assert_allclose(
        grad, np.broadcast_to(dense @ np.cos(np.arange(N)), x.shape), rtol=1e-4, atol=1e-4
    )

    def error(w):
        return np.linalg.norm(dot(x, w) - x @ hki.materialize(w))

    assert error(q) < 0.4 * error(plain)


def test_rotated_weights_get_activations():
    params = {"m": {"w": normal((K, N))}}
    want = hki.quantize_params(params, rotate=True, activation="int8")
    got = hki.quantize_activations(hki.quantize_params(params, rotate=True))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    with pytest.raises(ValueError, match="m/w: expected a QuantizedMatrix or a TrellisMatrix, got"):
        hki.quantize_activations(params, targets="m/w")


def test_warns_of_activations_without_negative_numbers():
    params = {"linear": {"w": normal((K, N))}}
    with pytest.warns(UserWarning, match="'uint8' makes negative activations zero; 'uint8,minmax'"):
        params = hki.quantize_params(params, dtype="int4", activation="uint8")
    with pytest.warns(UserWarning, match="'uint4,groups' makes negative"):
        hki.quantize_activations(params, "uint4,groups")
    with pytest.raises(ValueError, match="activation: expected one of int8, .*, got 'int9'"):
        hki.quantize_activations(params, "int9")


def test_inputs_of_several_products_are_rotated_once():
    """As XLA sees it: the signs are constants, equal for equal widths."""
    weights = [hki.adapters.Rotated(normal((K, N), i), Hadamard.random(K)) for i in range(3)]

    def products(count):
        fun = hki.use_implicit_args(lambda x, *weights: [x @ w for w in weights])
        text = jax.jit(fun).lower(normal((8, K)), *weights[:count]).compile().as_text()
        return text.count(" dot(") + text.count('target="haiku_implicit_Hadamard"')

    assert products(3) <= products(1) + 2


def test_signs_in_an_array_are_those_of_the_length():
    """Files from before signs were constants hold them."""
    for batch in ((), (2,)):
        held, known = Hadamard.random(K, batch, seed=0), Hadamard.random(K, batch)
        np.testing.assert_array_equal(hki.materialize(held), hki.materialize(known))
    other = hki.materialize(Hadamard.random(K, seed=1))
    assert np.abs(other - hki.materialize(known)).max() > 0.1
