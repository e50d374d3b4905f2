"""Progress bars: on a terminal, with tqdm or without, and nothing where nobody looks on."""

import io
import os
import sys
import tempfile

import chex
import jax
import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.core import progress
from haiku_implicit.quantization import QuantRule
from haiku_implicit.testing import check_type

PARAMS = {f"linear_{i}": {"w": jnp.eye(4) + i, "b": jnp.zeros(4)} for i in range(2)}
BATCHES = [jnp.ones((3, 4)), jnp.eye(4)]
MOMENTS = {f"linear_{i}/w": jnp.eye(4) for i in range(2)}
NAMES = ("linear_0/w", "linear_1/w")


def read():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.safetensors"
        hki.save(path, {name: jnp.ones((4, 4)) for name in NAMES})
        return hki.load_hugging_face(path, lambda name: name)


def model(params, x):
    for layer in params.values():
        x = x @ layer["w"] + layer["b"]
    return x


LORA = hki.add_lora(PARAMS, 0, rank=1)


def save_and_load(params):
    with tempfile.TemporaryDirectory() as folder:
        hki.save(os.path.join(folder, "params"), params)
        return hki.load(os.path.join(folder, "params"))


# Name: (the work that takes long, the text of its bar).
WORK = {
    "quantize_params": (lambda: hki.quantize_params(PARAMS), ("parameters: ", "1/2 ", *NAMES)),
    "rules": (
        lambda: hki.quantize_params(PARAMS, rules=[QuantRule(weight_qtype="int4")]),
        ("parameters: ", "1/2 ", *NAMES),
    ),
    "quantize_with_inputs": (
        lambda: hki.quantize_with_inputs(PARAMS, MOMENTS),
        ("parameters: ", "1/2 ", *NAMES),
    ),
    "input_moments": (
        lambda: hki.input_moments(model, PARAMS, BATCHES),
        ("calibration batches: ", "1/2 "),
    ),
    "a generator": (
        lambda: hki.input_maxima(model, PARAMS, (x for x in BATCHES)),
        ("calibration batches: 1it ",),
    ),
    "load_hugging_face": (read, ("reading: ", "1/2 ", *NAMES)),
    "merge_adapters": (lambda: hki.merge_adapters(LORA), ("parameters: ", "1/2 ", *NAMES)),
    "compare_params": (
        lambda: hki.compare_params(PARAMS, LORA).rows[0].relative,
        ("comparing: ", "1/4 ", *NAMES),
    ),
    "save and load": (
        lambda: save_and_load(PARAMS),
        ("saving: ", "reading: ", "1/4 ", *NAMES),
    ),
    "check_type": (
        lambda: (
            check_type(
                lambda seed: LORA["linear_0"]["w"],
                operations={"twice": lambda w: w + w, "half": lambda w: w * 0.5},
            ).count
        ),
        ("functions: ", "1/2 ", "twice", "half"),
    ),
    "under jit": (
        lambda: jax.jit(lambda p: hki.quantize_params(p))(PARAMS),
        ("parameters: ", *NAMES),
    ),
}
work = pytest.mark.parametrize("name", WORK)


@pytest.fixture
def written(monkeypatch):
    """The text on stderr, by the work, the delay and whether stderr is a terminal."""

    def run(name, delay, terminal=True):
        stream = io.StringIO()
        stream.isatty = lambda: terminal
        with monkeypatch.context() as patch:
            patch.setattr(progress, "_DELAY", delay)
            patch.setattr(sys, "stderr", stream)
            WORK[name][0]()
        return stream.getvalue()

    return run


@pytest.mark.every(2)
@work
def test_a_bar_with_names(name, written):
    text = written(name, 0)
    for word in WORK[name][1]:
        assert word in text
    assert text.endswith("\r")  # the bar is gone, the line is free


def test_a_step_counts_when_it_is_done(written):
    text = written("quantize_params", 0)
    assert [word in text for word in ("0/2 ", "1/2 ", "2/2 ")] == [True, True, False]
    first, second = (text.index(name) for name in NAMES)
    assert text.rindex("0/2 ", 0, first) < first < text.index("1/2 ") < second


@pytest.mark.every(2)
@work
def test_without_tqdm(name, written, monkeypatch):
    want = WORK[name][0]()
    monkeypatch.setitem(sys.modules, "tqdm", None)  # importing it raises ImportError
    assert written(name, 0) == ""
    chex.assert_trees_all_close(WORK[name][0](), want, rtol=0)


@pytest.mark.combinations
@work
@pytest.mark.parametrize("terminal, delay", [(False, 0), (True, 1e9)])
def test_silent_where_nobody_waits(name, terminal, delay, written):
    assert written(name, delay, terminal) == ""


def test_an_error_ends_the_bar(written, monkeypatch):
    monkeypatch.setitem(PARAMS["linear_1"], "w", jnp.full((4, 4), jnp.nan))

    def quantize():
        with pytest.raises(ValueError, match=r"linear_1/w .*infinite or NaN"):
            hki.quantize_params(PARAMS)

    monkeypatch.setitem(WORK, "broken", (quantize, ()))
    text = written("broken", 0)
    assert "linear_1/w" in text and text.endswith("\r")


# --- errors of the user's functions ------------------------------------------------------------------


def broken(*args):
    raise ZeroDivisionError("the user's own")


def batches():
    yield BATCHES[0]
    raise ZeroDivisionError("the user's own")


USERS = {
    "input_moments": lambda: hki.input_moments(broken, PARAMS, BATCHES),
    "input_maxima": lambda: hki.input_maxima(broken, PARAMS, BATCHES),
    "batches": lambda: hki.input_moments(model, PARAMS, batches()),
    "targets": lambda: hki.quantize_params(PARAMS, targets=broken),
    "compare_params": lambda: hki.compare_params(PARAMS, PARAMS, apply=broken),
    "sensitivity": lambda: hki.sensitivity(
        broken, PARAMS, [(x,) for x in BATCHES[:1]], {"int8": dict(dtype="int8")}
    ),
}


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("installed", [True, False])
def test_an_error_is_not_shown_below_another(name, installed, monkeypatch):
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ZeroDivisionError, match="the user's own") as caught:
        USERS[name]()
    assert caught.value.__context__ is None
