"""What all tests share."""

import ctypes
import gc
import importlib.metadata
import math
import mmap
import os
import pathlib

import hypothesis
import pytest

from tests.xla_flags import quick_to_compile

# Before JAX is imported. Accelerators come as plugins, whose code is to be tested as it is used.
if not importlib.metadata.entry_points(group="jax_plugins"):
    os.environ.setdefault("XLA_FLAGS", quick_to_compile())

import jax

import haiku_implicit as hki
from tests.tiers import drawn, redundant

# No test depends on the clock: other programs may need the processors.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow too")
    parser.addoption(
        "--long",
        action="store_true",
        help="as --slow, with all parameters of each test",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(config, items):
    """Leaves the slow tests out, unless `--slow` asks for them; some of these, unless `--long` does."""
    products = {}
    for item in items:
        if item.get_closest_marker("combinations"):
            products.setdefault((item.parent, item.originalname), []).append(item)
    for product in products.values():
        for i in redundant([item.callspec.params for item in product]):
            product[i].add_marker("slow")
    thinned = {}
    for item in items:
        if item.get_closest_marker("every") and not item.get_closest_marker("slow"):
            thinned.setdefault((item.parent, item.originalname), []).append(item)
    for tests in thinned.values():
        [number] = tests[0].get_closest_marker("every").args
        for i, item in enumerate(tests):
            if i % number:
                item.add_marker("slow")
    slow = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("all_slow"):
            slow.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(
                item
            )
    for tests in slow.values():
        chosen = drawn([item.name for item in tests])
        for item in tests:
            if item.name not in chosen:
                item.add_marker("long")
    long = config.getoption("long")
    left_out = [
        *([] if long else ["long"]),
        *([] if long or config.getoption("slow") else ["slow"]),
    ]
    leaves = lambda item: any(map(item.get_closest_marker, left_out))  # noqa: E731
    config.hook.pytest_deselected(items=[item for item in items if leaves(item)])
    items[:] = [item for item in items if not leaves(item)]


def pytest_collection_finish(session):
    """Lets the garbage collector skip the objects that stay until the end, and run less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# From so many bytes on a worker gives the memory of compiled programs back. Below that the next module
# finds compiled what it shares with those before it.
MUCH_MEMORY = 4 << 30


def resident_bytes():
    """The memory that this process has; more than there is where the system does not say."""
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return math.inf


@pytest.fixture(autouse=True, scope="module")
def empty_caches():
    """Bounds the memory that modules leave behind."""
    yield
    if resident_bytes() > MUCH_MEMORY:
        jax.clear_caches()
        gc.collect()
        # glibc keeps freed memory, and the modules after this one would seem to have as much.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


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
    """Allows materializations, for tests of the code after one."""
    with hki.materialization("allow"):
        yield


@pytest.fixture
def x64():
    """Doubles, for one test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
