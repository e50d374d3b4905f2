"""A few of JAX's own test cases on implicit arrays. `python -m tests.jax_harnesses` runs them all."""

import importlib.util

import jax.numpy as jnp
import pytest

from tests.jax_harnesses import agree
from tests.random_programs.wrong import Wrong

FINE = {"agrees", "no operand", "not dense either"}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 100))
def test_some_cases(first):
    assert importlib.util.find_spec("jax._src.internal_test_util.test_harnesses"), (
        "this release of JAX has its cases elsewhere: mend tests/jax_harnesses"
    )
    number = len(agree.harnesses())
    assert number > 5000
    found = agree.outcomes(range(first, number, 400))
    assert {case: what for case, what in found.items() if what not in FINE} == {}
    assert sum(what == "agrees" for what in found.values()) > 50


def test_a_wrong_number_is_found(monkeypatch):
    [index, *_] = [
        i
        for i, h in enumerate(agree.harnesses())
        if h.fullname.startswith("dot_general") and h.dtype == jnp.float32
    ]
    monkeypatch.setitem(agree.TYPES, "LoRA", lambda x, _: Wrong(jnp.asarray(x)))
    assert "off by" in agree.outcome(agree.harnesses()[index], "LoRA", "forward")
