"""Computations on parameters alone, made once."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import numpy_normal as normal


def standardized(x):
    """A convolution and a matrix with standardized weights; the gain is used by both."""
    gain = hk.get_parameter("gain", (6,), init=hk.initializers.RandomNormal())

    def weight(name, shape):
        w = hk.get_parameter(name, shape, init=hk.initializers.RandomNormal(0.3))
        axes = tuple(range(len(shape) - 1))
        return jax.jit(lambda w: (w - w.mean(axes)) / jnp.sqrt(w.var(axes) + 1e-4))(w) * gain

    kernel = weight("kernel", (3, 3, 2, 6))
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
    return hk.Linear(3)(jax.nn.relu(x).mean((1, 2)) @ weight("w", (6, 6)))


MODEL = hk.without_apply_rng(hk.transform(standardized))


@pytest.fixture
def params():
    return MODEL.init(jax.random.key(0), normal((1, 4, 4, 2)))


@pytest.mark.slow
def test_weights_are_standardized_once(params):
    x = normal((5, 6, 6, 2))
    folded, new = hki.fold_parameters(MODEL.apply, params, x[:1])
    shapes = jax.tree.map(jnp.shape, new)
    assert shapes == {
        "linear": {"w": (6, 3), "b": (3,)},
        "~": {"kernel_folded": (3, 3, 2, 6), "w_folded": (6, 6)},
    }
    np.testing.assert_allclose(folded(new, x), MODEL.apply(params, x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(folded)(new, x), folded(new, x), rtol=1e-5, atol=1e-6)
    each = jax.vmap(folded, (None, 0))(new, x[:, None])[:, 0]
    np.testing.assert_allclose(each, folded(new, x), rtol=1e-5, atol=1e-6)
    assert "sqrt" not in str(jax.make_jaxpr(folded)(new, x))


@pytest.mark.slow
def test_folded_weights_are_quantized_as_they_are_used(params):
    x = normal((5, 6, 6, 2))
    folded, new = hki.fold_parameters(MODEL.apply, params, x)
    small = hki.quantize_params(new, dtype="int8", matrix_axes={})
    assert isinstance(small["~"]["w_folded"], hki.QuantizedMatrix)
    out = jax.jit(folded)(small, x)
    np.testing.assert_allclose(out, folded(hki.materialize(small), x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out, MODEL.apply(params, x), atol=0.05)
    # Its inputs are seen, as those of the weight before standardization are not.
    assert "~/w_folded" in hki.input_moments(folded, new, [x], targets="~/w_folded")


def test_a_model_without_such_computations_stays_as_it_is():
    t = hk.transform(lambda x: hk.nets.MLP([8, 4])(hk.dropout(hk.next_rng_key(), 0.5, x)))
    x = normal((2, 8))
    params = t.init(jax.random.key(0), x)
    folded, new = hki.fold_parameters(t.apply, params, jax.random.key(1), x)
    jax.tree.map(np.testing.assert_array_equal, new, params)
    key = jax.random.key(2)
    np.testing.assert_array_equal(folded(new, key, x), t.apply(params, key, x))


def test_what_a_model_prints_is_printed(capfd):
    def apply(params, x):
        w = params["m"]["w"]
        jax.debug.print("first {}", w[0, 0])
        return x @ (w / w.std())

    params, x = {"m": {"w": jnp.arange(8.0).reshape(4, 2) + 1}}, jnp.ones((1, 4))
    folded, new = hki.fold_parameters(apply, params, x)
    capfd.readouterr()
    np.testing.assert_allclose(
        folded(new, x), x @ (params["m"]["w"] / params["m"]["w"].std()), rtol=1e-6
    )
    jax.effects_barrier()
    assert "first 1.0" in capfd.readouterr().out
