"""Values of hijax, JAX's types that are not arrays, in wrapped functions beside implicit arrays.

JAX 0.9 and later have them. What a version of JAX can't do itself is no more with a wrapper.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.core import compat
from tests.pages import DOCS
from tests.random_arrays import numpy_normal
from tests.tiers import few

AVAILABLE = compat.HiType is not None
if AVAILABLE:
    from tests.hijax_rows import MAPS, Leading, dequantize, quantize


def from_rows(rows, w):
    return jnp.tanh(dequantize(rows) @ w).sum()


def from_dense(x, w):
    return from_rows(quantize(x), w)


def carried(rows, w):
    def body(rows, _):
        y = dequantize(rows) @ w
        return quantize(dequantize(rows) * 0.5), jnp.tanh(y).sum()

    rows, ys = jax.lax.scan(body, rows, None, length=3)
    return ys.sum() + dequantize(rows).sum()


def branches(rows, w):
    second = w.shape[0] > 7
    y = jax.lax.cond(second, lambda q: dequantize(q) @ w, lambda q: 2 * dequantize(q) @ w, rows)
    return y.sum()


def returned(rows, w):
    return rows, jnp.ones((2, 6)) @ w


def shown(out):
    return dequantize(out[0]), out[1]


def mapped(fun):
    return jax.vmap(fun, in_axes=(Leading(), None), axis_size=3)


X, XS = numpy_normal((4, 6), 0), numpy_normal((3, 4, 6), 1)
# Each takes a wrapper of functions, and a weight.
WAYS = {
    "forward": lambda wrap, w: wrap(from_rows)(quantize(X), w),
    "jit": lambda wrap, w: jax.jit(wrap(from_rows))(quantize(X), w),
    "jit inside": lambda wrap, w: wrap(jax.jit(from_rows))(quantize(X), w),
    "grad": lambda wrap, w: jax.grad(wrap(from_rows))(quantize(X), w),
    "grad of dense": lambda wrap, w: jax.grad(wrap(from_dense))(X, w),
    "grad inside": lambda wrap, w: wrap(jax.grad(from_rows))(quantize(X), w),
    "jvp": lambda wrap, w: jax.jvp(lambda x: wrap(from_dense)(x, w), (X,), (X,)),
    "checkpoint": lambda wrap, w: jax.grad(wrap(jax.checkpoint(from_dense)))(X, w),
    "vmap of dense": lambda wrap, w: jax.vmap(wrap(from_dense), (0, None))(XS, w),
    "vmap inside": lambda wrap, w: wrap(jax.vmap(from_dense, (0, None)))(XS, w),
    "cond": lambda wrap, w: wrap(branches)(quantize(X), w),
    "returned": lambda wrap, w: shown(wrap(returned)(quantize(X), w)),
    "returned by jit": lambda wrap, w: shown(jax.jit(wrap(returned))(quantize(X), w)),
    "vmap": lambda wrap, w: mapped(wrap(from_rows))(quantize(XS), w),
    "vmap of rows inside": lambda wrap, w: wrap(mapped(from_rows))(quantize(XS), w),
    "scan": lambda wrap, w: wrap(carried)(quantize(X), w),
    "scan in jit": lambda wrap, w: jax.jit(wrap(carried))(quantize(X), w),
    "scan in grad": lambda wrap, w: jax.grad(wrap(lambda x, w: carried(quantize(x), w)))(X, w),
}
# Ways that JAX before 0.12 does not go (issue 39700 of JAX, and `vmap` without `MappingSpec`).
NEWER = {"vmap", "vmap of rows inside", "scan", "scan in jit", "scan in grad"}
QUICK = "jit inside", "grad", "vmap", "scan", "cond"


@pytest.mark.parametrize("way", few(WAYS, *QUICK))
def test_a_value_of_hijax_passes_through(way):
    if not AVAILABLE:
        assert compat.hi_type(jnp.ones(2)) is None
        return
    w = hki.QuantizedMatrix.quantize(jnp.asarray(numpy_normal((6, 8), 2)), "int4")
    run = WAYS[way]
    if way in NEWER and not MAPS:
        with pytest.raises((TypeError, AttributeError, ValueError)):
            jax.jit(lambda w: run(lambda fun: fun, w))(w.materialize())
        return
    want = run(lambda fun: fun, w.materialize())
    with hki.materialization("error"):
        got = run(hki.use_implicit_args, w)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(y).max() > 0.01
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_the_type_of_a_value():
    assert compat.hi_type(1.0) is None and compat.hi_type(np.ones(2)) is None
    if not AVAILABLE:
        assert not hasattr(jax.experimental, "hijax")
        return
    rows = quantize(X)
    assert compat.hi_type(rows) == jax.typeof(rows) == compat.hi_type(jax.typeof(rows))
    seen = []
    jax.jit(lambda rows: seen.append(compat.hi_type(rows)))(rows)
    assert seen == [jax.typeof(rows)]


def check_vmap(matmul, held):
    """Maps over rows, whichever axis they have, and their gradients inside and outside of `vmap`."""
    w, xs = held.array.materialize(), numpy_normal((2, 64, 5), 3)

    def grad(product):
        return jax.grad(lambda x, w: jnp.sin(product(x, w)).sum())

    def mapped(product):
        return jax.vmap(product, (2, None))

    ways = mapped, lambda product: grad(mapped(product)), lambda product: mapped(grad(product))
    for way in ways:
        want = jax.jit(way(jnp.matmul))(xs, w)
        np.testing.assert_allclose(jax.jit(way(matmul))(xs, held), want, rtol=1e-4, atol=1e-4)


def test_the_page(capsys):
    """Its program holds one of our arrays in a type of hijax; before JAX 0.12 a name is another."""
    page = (DOCS / "hijax.md").read_text()
    ((program, shown),) = re.findall(r"```py\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    names = {}
    if AVAILABLE:
        program = program if MAPS else program.replace("hijax.HiPrim", "hijax.VJPHiPrimitive")
        exec(compile(program, "docs/hijax.md", "exec"), names)
        assert capsys.readouterr().out == shown
        assert names["held"].array is names["w"]
        np.testing.assert_allclose(names["y"], names["x"] @ names["w"].materialize(), rtol=1e-5)
        want = jax.grad(lambda x: (x @ names["w"].materialize()).sum())(names["x"])
        np.testing.assert_allclose(names["gradient"], want, rtol=1e-5)
        check_vmap(names["matmul"], names["held"])
    else:
        with pytest.raises((ImportError, AttributeError)):
            exec(compile(program, "docs/hijax.md", "exec"), names)
