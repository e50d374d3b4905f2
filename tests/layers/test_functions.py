"""The dtype that a layer computes in, and docstrings put together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit import layers

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    ("args", "options", "want"),
    [
        ((jnp.ones(2, BF16), jnp.ones(2, F32)), {}, F32),
        ((jnp.ones(2, BF16), None, 2.0), {}, BF16),  # a number is weakly typed
        ((jnp.arange(2),), {}, F32),
        ((jnp.arange(2),), dict(inexact=False), jnp.int32),
        ((jnp.arange(2), 3), dict(inexact=False), jnp.int32),
        ((3,), {}, F32),
        ((np.float16(3),), {}, F16),
        (([1.0, 2.0], jnp.ones(2, F16)), {}, F32),
        ((jnp.ones(2, F32),), dict(dtype=F16), F16),
        ((jnp.ones(2, jnp.complex64),), {}, jnp.complex64),
        ((jnp.ones(2, F32),), dict(dtype=jnp.int8, inexact=False), jnp.int8),
    ],
)
def test_canonicalize_dtype(args, options, want):
    assert jnp.dtype(layers.canonicalize_dtype(*args, **options)) == jnp.dtype(want)
    traced = []
    jax.jit(lambda: traced.append(layers.canonicalize_dtype(*args, **options)))()
    assert jnp.dtype(traced[0]) == jnp.dtype(want)


def test_canonicalize_dtype_of_implicit_arrays():
    q = hki.QuantizedMatrix.quantize(jnp.ones((4, 4), BF16), "int8")
    assert layers.canonicalize_dtype(q, None) == BF16
    assert layers.canonicalize_dtype(hki.Zeros(shape=(2,), dtype=jnp.int32)) == F32
    found = []
    hki.use_implicit_args(lambda w: found.append(layers.canonicalize_dtype(w, jnp.ones(1, F16))))(q)
    assert found == [F32]


def test_canonicalize_dtype_returns_what_it_is_given():
    assert layers.canonicalize_dtype(jnp.ones(2), dtype="bfloat16") == "bfloat16"


def test_canonicalize_dtype_errors():
    with pytest.raises(ValueError, match="dtype: expected a floating .* int8.*inexact=False"):
        layers.canonicalize_dtype(jnp.ones(2), dtype=jnp.int8)
    with pytest.raises(ValueError, match="args: expected an array"):
        layers.canonicalize_dtype(None)


def test_add_start_docstrings():
    @layers.add_start_docstrings("a ", "b ")
    def documented():
        """c"""

    @layers.add_start_docstrings("a ", "b ")
    def bare():
        pass

    @layers.add_start_docstrings("a ")
    class Documented:
        """c"""

    assert documented.__doc__ == "a b c" and bare.__doc__ == "a b " and Documented.__doc__ == "a c"
    with pytest.raises(TypeError, match="docstr: expected strings, got 3"):
        layers.add_start_docstrings("a", 3)
