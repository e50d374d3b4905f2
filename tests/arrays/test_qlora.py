"""LoRA nested with quantized arrays: on a quantized base (QLoRA), with quantized factors, or both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import numpy_normal

pytestmark = pytest.mark.usefixtures("never_dense")

N, M, RANK, ALPHA = 8, 6, 4, 8.0
WAYS = {  # which parts are quantized, and how
    "base": dict(w=dict(dtype="nf4", group_size=4, scale_dtype="double")),
    "factors": dict(a=dict(dtype="int8"), b=dict(dtype="int4", group_size=2)),
    "all": dict(w=dict(dtype="int4", group_size=4), a=dict(dtype="int8"), b=dict(dtype="int8")),
}
ways = pytest.mark.parametrize("way", WAYS)


def normal(shape, seed):
    return jax.device_put(numpy_normal(shape, seed, 0.3))


def make(way, batch=()):
    parts = {
        "w": normal((*batch, N, M), 0),
        "a": normal((*batch, N, RANK), 1),
        "b": normal((*batch, RANK, M), 2),
    }
    for name, options in WAYS[way].items():
        parts[name] = hki.QuantizedMatrix.quantize(parts[name], **options)
    return hki.LoRA(**parts, alpha=ALPHA)


def dense(lora):
    """The dense twin, by NumPy's product of the dequantized parts."""
    w, a, b = (np.asarray(hki.materialize(x)) for x in (lora.w, lora.a, lora.b))
    return w + ALPHA / RANK * a @ b


def close(got, want):
    # Float32 sums of a few terms in another order.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def product(w, x):
    return jnp.sin(x @ w) @ w.T


@ways
def test_values(way):
    lora, x = make(way), normal((3, N), 3)
    want = product(dense(lora), x)
    fun = hki.use_implicit_args(product)
    close(fun(lora, x), want)
    close(jax.jit(fun)(lora, x), want)


@pytest.mark.combinations
@ways
@pytest.mark.parametrize("how", ["vmap", "vmap inside", "scan", "scan inside"])
def test_stacked(way, how):
    stack, x = make(way, (3,)), normal((2, N), 3)
    one = functools.partial(product, x=x)
    each = np.stack([one(dense(jax.tree.map(lambda y, i=i: y[i], stack))) for i in range(3)])
    implicit = hki.use_implicit_args
    ways = {
        "vmap": jax.vmap(implicit(one)),
        "vmap inside": implicit(jax.vmap(one)),
        "scan": lambda ws: jax.lax.scan(lambda c, w: (c, implicit(one)(w)), 0, ws)[1],
        "scan inside": implicit(lambda ws: jax.lax.scan(lambda c, w: (c, one(w)), 0, ws)[1]),
    }
    close(jax.jit(ways[how])(stack), each)


@ways
def test_gradients(way):
    """Floating arrays that the type does not freeze get the gradient of the dense twin."""
    lora, x = make(way), normal((3, N), 3)
    loss = hki.use_implicit_args(lambda w, x: jnp.sum(product(w, x) ** 2))
    got, by_x = jax.jit(lambda w, x: (hki.grad(loss)(w, x), jax.grad(loss, 1)(w, x)))(lora, x)
    w = jnp.asarray(dense(lora))
    of_w, want_x = jax.grad(lambda w, x: jnp.sum(product(w, x) ** 2), (0, 1))(w, x)
    np.testing.assert_allclose(by_x, want_x, rtol=1e-4, atol=1e-4)
    a, b = (np.asarray(hki.materialize(f)) for f in (lora.a, lora.b))
    wants = {"a": ALPHA / RANK * of_w @ b.T, "b": ALPHA / RANK * a.T @ of_w}
    for name, want in wants.items():
        if name in WAYS[way]:  # quantized, and so frozen: no gradient is held for it
            assert not [g for g in jax.tree.leaves(getattr(got, name)) if np.ndim(g)]
        else:
            np.testing.assert_allclose(getattr(got, name), want, rtol=1e-4, atol=1e-4)


@ways
def test_gradients_by_the_scales_of_factors(way):
    """By all leaves that JAX can differentiate by: those of quantized factors are their scales."""
    lora, x = make(way), normal((3, N), 3)
    leaves, treedef = jax.tree.flatten((lora.w, lora.a, lora.b))
    floating = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32]

    def parts(values):
        new = dict(enumerate(leaves)) | dict(zip(floating, values, strict=True))
        return treedef.unflatten([new[i] for i in range(len(leaves))])

    def implicit(values):
        w = hki.LoRA(*parts(values), alpha=ALPHA)
        return jnp.sum(hki.use_implicit_args(product)(w, x) ** 2)

    def twin(values):
        w, a, b = map(hki.materialize, parts(values))
        return jnp.sum(product(w + ALPHA / RANK * a @ b, x) ** 2)

    values = [leaves[i] for i in floating]
    got, want = jax.jit(lambda v: (jax.grad(implicit)(v), jax.grad(twin)(v)))(values)
    assert len(got) == len(floating) > 0
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * np.abs(w).max())


@ways
def test_merge(way):
    lora = make(way)
    merged = hki.merge_lora({"linear": {"w": lora}})["linear"]["w"]
    close(hki.materialize(merged), dense(lora))


@ways
def test_sharding(way):
    mesh = jax.make_mesh((1, 1), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i", "j"))
    lora, x = make(way), normal((3, N), 3)
    placed = hki.use_implicit_args(lambda w: jax.device_put(w, at))(lora)
    assert jax.tree.structure(placed) == jax.tree.structure(lora)
    assert all(isinstance(y.sharding, jax.sharding.NamedSharding) for y in jax.tree.leaves(placed))
    close(jax.jit(hki.use_implicit_args(product))(placed, x), product(dense(lora), x))
