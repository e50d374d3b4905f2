"""What all tests share."""

import gc

import jax
import pytest

import haiku_implicit as hki


@pytest.fixture(autouse=True, scope="module")
def empty_caches():
    """Gives the memory of one module's programs back before the next."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def key():
    """A random key."""
    return jax.random.key(0)


@pytest.fixture
def never_dense():
    """Fails the test where an implicit array is materialized."""
    with hki.materialization("error"):
        yield


@pytest.fixture
def may_be_dense():
    """For tests of what happens after a materialization: it is not warned of."""
    with hki.materialization("allow"):
        yield


@pytest.fixture
def x64():
    """Doubles, for one test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
