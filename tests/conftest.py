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

from tests.xla_flags import quick_to_compile, share_programs

# Before JAX is imported. Accelerators come as plugins, whose code is to be tested as it is used.
if not importlib.metadata.entry_points(group="jax_plugins"):
    os.environ.setdefault("XLA_FLAGS", quick_to_compile())
    PROGRAMS = share_programs()  # until this process ends

import jax

import haiku_implicit as hki
from haiku_implicit.core import compat
from tests.tiers import drawn, redundant

# Collecting the docstrings would import it.
collect_ignore = [] if compat.HiType is not None else ["hijax_rows.py"]

# Almost all that imports and collecting make stays.
gc.disable()  # until `pytest_collection_finish`

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
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}

    def mark(item, name):
        item.add_marker(name)  # for `-m`
        marks[item].add(name)

    def function(item):
        return item.parent, getattr(item, "originalname", item.name)

    def by_function(chosen):
        """The tests for which `chosen` holds of their marks, in lists of those of one function."""
        found = {}
        for item in items:
            if chosen(marks[item]):
                found.setdefault(function(item), []).append(item)
        return found.values()

    for item in items:
        if isinstance(item, pytest.DoctestItem):  # as the examples in the pages
            mark(item, "slow")
    for product in by_function(lambda names: "combinations" in names):
        for i in redundant([item.callspec.params for item in product]):
            mark(product[i], "slow")
    for tests in by_function(lambda names: "every" in names and "slow" not in names):
        [number] = tests[0].get_closest_marker("every").args
        for i, item in enumerate(tests):
            if i % number:
                mark(item, "slow")
    quick = {function(item) for item in items if "slow" not in marks[item]}
    more = {}  # of functions that the quick tier runs with other parameters, by their files
    for tests in by_function(lambda names: "slow" in names and "all_slow" not in names):
        chosen = drawn([item.name for item in tests])
        for item in tests:
            if item.name not in chosen:
                mark(item, "long")
            elif function(item) in quick and "of_each" not in marks[item]:
                more.setdefault(item.path, {})[item.name] = item
    for tests in more.values():
        for name in tests.keys() - drawn(tests):
            mark(tests[name], "long")
    long = config.getoption("long")
    left_out = {
        *([] if long else ["long"]),
        *([] if long or config.getoption("slow") else ["slow"]),
    }
    config.hook.pytest_deselected(items=[item for item in items if marks[item] & left_out])
    items[:] = [item for item in items if not marks[item] & left_out]


def pytest_collection_finish(session):
    """Lets the garbage collector skip the objects that stay until the end, and run less often."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    session.config.stash[AT_REST] = resident_bytes()


# So many bytes more than at rest, and a worker gives the memory of compiled programs back. Until
# then the next module finds compiled what it shares with those before it. JAX keeps the MLIR module of each
# program, of more than a megabyte, and the more there are the longer XLA takes for a next one: with two
# thousand half as long again.
MUCH_MEMORY = 1 << 30
AT_REST = pytest.StashKey[float]()


def resident_bytes():
    """The memory that this process has; more than there is where the system does not say."""
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return math.inf


@pytest.fixture(autouse=True, scope="module")
def empty_caches(pytestconfig):
    """Bounds the memory that modules leave behind."""
    yield
    resident = resident_bytes()
    if resident == math.inf or resident > pytestconfig.stash[AT_REST] + MUCH_MEMORY:
        jax.clear_caches()
        gc.collect()
        # glibc keeps freed memory, and the modules after this one would seem to have as much.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        kept = max(pytestconfig.stash[AT_REST], resident_bytes())
        pytestconfig.stash[AT_REST] = kept  # which tests keep, in caches of their own


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
