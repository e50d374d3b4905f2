"""`random_arrays.normal`: the numbers of `jax.random.normal`."""

import jax
import numpy as np
import pytest

from tests.random_arrays import normal


@pytest.mark.combinations
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5), (2, 3, 4), (5000,)])
def test_numbers_are_those_of_jax(shape, dtype):
    found, expected = normal(shape, 7, dtype), jax.random.normal(jax.random.key(7), shape, dtype)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_the_default_dtype_is_that_of_jax(x64):
    found = normal((2, 3), 1)
    assert found.dtype == "float64"
    np.testing.assert_array_equal(found, jax.random.normal(jax.random.key(1), (2, 3)))
