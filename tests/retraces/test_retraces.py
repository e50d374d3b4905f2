"""Traces that a program has dropped leave nothing of this library behind.

`python -m tests.retraces` is the long run, with what dense parameters leave.
"""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr

import haiku_implicit as hki
from haiku_implicit.core.caches import _kept
from tests.retraces import count


@pytest.mark.slow
@pytest.mark.parametrize(("way", "traces"), [("functions", 4), ("shapes", 2)])
def test_no_object_is_left(way, traces, monkeypatch):
    monkeypatch.setattr(count, "GRADIENTS_EVERY", 1)
    retraces = count.Retraces(dense=False, way=way)

    def left():
        retraces.step()
        if way == "shapes" or jax.__version_info__ < (0, 8):  # JAX 0.7.0 keeps dense functions, too
            jax.clear_caches()
        return count.alive()

    for _ in range(2):
        before = left()
    for _ in range(traces):
        after = left()
    assert (after.objects, after.jaxprs) == (before.objects, before.jaxprs)


@pytest.mark.long
@pytest.mark.parametrize("way", ["functions", "shapes"])
def test_ten_thousand(way):
    """The process grows by no more than a few megabytes, over so many traces."""
    retraces = count.Retraces(dense=False, way=way)
    seen = []
    for done in range(1, 10_001):
        retraces.step()
        if done in (1000, 10_000):
            seen.append(count.alive())
    first, last = seen
    assert (last.objects, last.jaxprs) <= (first.objects + 20, first.jaxprs + 20)
    # JAX's own caches of shapes grow; the program prints by how much with dense parameters.
    assert last.resident < first.resident + 64e6


def jaxprs_of(fun, *args):
    return jax.jit(hki.use_implicit_args(fun)).trace(*args)


@pytest.mark.slow  # it looks at all objects, of which a worker has many
def test_what_is_kept_for_a_jaxpr_goes_with_it():
    """An inner jit, a loop, a branch and a checkpoint of a function that is gone."""
    w = hki.LoRA(jnp.ones((4, 4)), jnp.ones((4, 1)), jnp.ones((1, 4)))

    def make():
        def fun(w, x):
            x = jax.jit(lambda x: x @ w)(x)
            x, _ = jax.lax.scan(lambda c, _: (c @ w, None), x, length=2)
            x = jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)
            return jax.checkpoint(lambda x: x @ w)(x)

        return fun

    counts = []
    for _ in range(4):
        jaxprs_of(make(), w, jnp.ones((2, 4)))
        if jax.__version_info__ < (0, 8):
            jax.clear_caches()  # JAX 0.7.0 keeps dense functions, too, until then
        gc.collect()
        counts.append((len(_kept), sum(isinstance(x, Jaxpr) for x in gc.get_objects())))
    assert counts[-1] == counts[1]


def test_what_is_kept_is_used_again():
    """A layer that is used twice is traced once."""
    traced = []

    @jax.jit
    def layer(x, w):
        return x @ w

    class Counted(hki.LoRA):
        pass

    @hki.primitive_handler("dot_general")
    def dot(primitive, x: jax.Array, w: Counted, **params):
        traced.append(1)
        return NotImplemented

    w = Counted(jnp.ones((4, 4)), jnp.ones((4, 1)), jnp.ones((1, 4)))
    got = jax.jit(hki.use_implicit_args(lambda x, w: layer(layer(x, w), w)))(jnp.ones((2, 4)), w)
    assert len(traced) == 1
    np.testing.assert_allclose(got, jnp.ones((2, 4)) @ w.materialize() @ w.materialize())


def test_texts_of_warnings_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("haiku_implicit.core.materialization._MOST_TEXTS", 3)
    texts = "haiku_implicit.core.materialization._texts"
    monkeypatch.setattr(texts, own := {})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for n in range(2, 9):
            w = hki.LoRA(jnp.ones((n, n)), jnp.ones((n, 1)), jnp.ones((1, n)))
            jax.eval_shape(hki.use_implicit_args(jnp.sort), w)
    assert len(found) == 7
    assert len(own) <= 4
