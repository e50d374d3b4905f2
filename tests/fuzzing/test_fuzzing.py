"""Each loader on a few changed files; and wrong outcomes are seen.

`python -m tests.fuzzing --loader=load` is the long run. What such runs found is in the tests of each loader.
"""

import random
import signal
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.fuzzing import fuzz, loaders

# How many cases of each loader; some trace programs, and take longer.
COUNTS = {"mox": 8, "load": 30, "load_gguf": 30, "inspect": 30, "read_names": 200}


@pytest.fixture(scope="module")
def seeds():
    """The valid cases of each loader, made once."""
    table, found = dict(loaders.LOADERS), {}

    def of(name):
        if name not in found:
            found[name] = table[name].seeds()
        return found[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in loaders.LOADERS if name != "load_types"])
def test_changed_files(name, tmp_path, seeds, monkeypatch):
    loader = loaders.LOADERS[name]._replace(seeds=lambda: seeds(name))
    monkeypatch.setitem(loaders.LOADERS, name, loader)
    ends = set()
    count = COUNTS.get(name, 40)
    for _, (found, files) in zip(
        range(count), fuzz.outcomes(name, 0, str(tmp_path / "case")), strict=False
    ):
        assert found.wrong is None, (found, files)
        ends.add(found.what)
    assert "loaded" in ends  # the first case is valid
    assert len(ends) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["load_gguf", "load_pickle", "load_peft", "load_parts", "read_names"]
)
def test_valid_files_are_changed_by_their_format(name, seeds):
    """Only damaged files are changed byte by byte."""
    changed = 0
    for i, files in enumerate(seeds(name)):
        for j in range(5):
            changed += loaders.mutated_by_format(files, random.Random(f"{i} {j}")) != files
    assert changed > len(seeds(name))


# --- what is wrong is seen ----------------------------------------------------------------------------


def raises(error):
    def load(path):
        raise error

    return load


def allocates(path):
    np.zeros(40 << 20, np.uint8)
    raise hki.CheckpointError(path)


def warns(path):
    warnings.warn("overflow", RuntimeWarning, stacklevel=1)
    raise hki.CheckpointError(path)


def hangs(path):
    assert 0 < int(signal.getitimer(signal.ITIMER_PROF)[0]) <= fuzz.LIMIT  # it ends with a tick
    signal.raise_signal(signal.SIGPROF)  # as at the end of that time


class Broken(hki.LoRA):
    """Of factors that do not fit."""

    def __post_init__(self):
        pass


WRONG = {
    "no line of JSON": (raises(KeyError("x")), "KeyError"),
    "a text that is not UTF-8": (lambda path: b"\xff".decode(), "UnicodeDecodeError"),
    "another error": (raises(TypeError("x")), "TypeError"),
    "no file": (raises(ValueError("x")), "does not name the file"),
    "lines": (lambda path: raises(ValueError(f"{path}:\n"))(path), "not a line"),
    "memory": (allocates, "bytes of memory for"),
    "a warning": (warns, "RuntimeWarning"),
    "a hang": (hangs, "takes more than"),
    "a tree": (
        lambda path: Broken(jnp.ones((2, 2)), jnp.ones((2, 1)), jnp.ones((3, 2))),
        "loaded, but",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(name, tmp_path):
    (tmp_path / "file").write_bytes(b"12")
    load, message = WRONG[name]
    found = fuzz.run(loaders.Loader(list, "file", load), str(tmp_path))
    assert message in found.wrong


def test_a_clean_error_and_a_tree_are_not_wrong(tmp_path):
    (tmp_path / "file").write_bytes(b"12")
    for load in (hki.load, lambda path: {"w": jnp.ones(2)}):
        assert fuzz.run(loaders.Loader(list, "file", load), str(tmp_path)).wrong is None
