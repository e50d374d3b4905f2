"""Batch axes of every type that has them: leaf by leaf, never as a whole."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests import random_arrays

L, N, M = 3, 6, 4


@dataclasses.dataclass
class Gram(hki.ImplicitArray, core_ndim=2):
    """The matrix `v vᵀ`, whose leaf has one axis less than the matrix; with an explicit shape."""

    v: hki.ArrayValue

    def materialize(self):
        return self.v[..., :, None] * self.v[..., None, :]


def normal(shape, seed=0):
    return random_arrays.normal(shape, seed, scale=0.5)


def lora(shape, seed=0, w=normal):
    *batch, n, m = shape
    a, b = normal((*batch, n, 2), seed + 1), normal((*batch, 2, m), seed + 2)
    return hki.LoRA(w(shape, seed), a, b, alpha=3.0)


def quantized(shape, seed=0, axis=-2):
    return hki.QuantizedMatrix.quantize(normal(shape, seed), "int4", 2, axis, zero_point=True)


TYPES = {
    "lora": lora,
    "quantized": quantized,
    "quantized rows": lambda shape, seed=0: quantized(shape, seed, -1),
    "lora of quantized": lambda shape, seed=0: lora(shape, seed, quantized),
    "gram": lambda shape, seed=0: Gram(normal((*shape[:-2], N), seed), shape=(*shape[:-2], N, N)),
}
types = pytest.mark.parametrize("make", TYPES.values(), ids=TYPES)


def is_implicit(x):
    return isinstance(x, hki.ImplicitArray)


def stays(f, *operands, eagerly=True):
    """All of `f(*operands)` is of the type of the operands, with the values of the dense ones."""
    want = jax.jit(lambda *operands: f(*map(hki.materialize, operands)))(*operands)
    with hki.materialization("error"):
        g = hki.use_implicit_args(f)
        for run in (jax.jit(g), g) if eagerly else (jax.jit(g),):
            out = run(*operands)
            leaves = jax.tree.leaves(out, is_leaf=is_implicit)
            assert {type(x) for x in leaves} == {type(operands[0])}
            found = jax.jit(hki.materialize)(leaves)
            for got, dense, x in zip(leaves, found, jax.tree.leaves(want), strict=True):
                assert got.shape == x.shape and got.dtype == x.dtype
                np.testing.assert_allclose(dense, x, rtol=1e-5, atol=1e-5)
    return out


IDS = np.array([[2, 0], [1, 1]])

PARTS = {
    "slice": lambda w: (w[1:], w[::2, 1], w[1, :1]),
    "dynamic_slice": lambda w: (
        jax.lax.dynamic_slice_in_dim(w, jnp.int32(5), 2),
        jax.lax.dynamic_index_in_dim(w, jnp.int32(1), 0, keepdims=False),
        w[jnp.int32(-1), jnp.int32(1)],
    ),
    "split": lambda w: (jnp.split(w, [1]), jnp.split(w, 2, axis=1)),
    "gather": lambda w: (w[IDS], w[:, IDS % 2], w[IDS, IDS % 2], jnp.take(w, IDS, 0, mode="clip")),
    "concatenate": lambda w: (jnp.concatenate([w, w[1:]]), jnp.concatenate([w, w, w], axis=1)),
    "stack": lambda w: (jnp.stack([w, w]), jnp.stack([w, w], axis=1), jnp.stack([w[0], w[1]], 1)),
    "unstack": lambda w: (jnp.unstack(w), jnp.unstack(w, axis=1)),
    "squeeze": lambda w: (jnp.squeeze(w[:1], 0), jnp.squeeze(w[None, :, :1], (0, 2))),
    "reshape": lambda w: (
        w.reshape(2 * L, *w.shape[2:]),
        w.reshape(2, 1, L, *w.shape[2:]),
        w[0, 0].reshape(1, *w.shape[2:]),
    ),
    "expand": lambda w: (w[None], w[:, None], jnp.expand_dims(w[0, 0], (0, 1))),
    "broadcast": lambda w: (jnp.broadcast_to(w[:1], w.shape), jnp.broadcast_to(w, (2, *w.shape))),
    "repeat": lambda w: (jnp.repeat(w, 2, axis=0),),
    "transpose": lambda w: (jnp.swapaxes(w, 0, 1), jnp.moveaxis(w[None], 0, 2)),
    "rev": lambda w: (w[::-1], jnp.flip(w, (0, 1))),
    "update": lambda w: (
        jax.lax.dynamic_update_slice_in_dim(w, w[:1], jnp.int32(2), 0),
        jax.lax.dynamic_update_index_in_dim(w, w[0], jnp.int32(1), 0),
    ),
    "select": lambda w: (jnp.where(jnp.bool_(True), w, w[::-1]), jax.lax.select_n(1, w, w[::-1])),
}
if hasattr(jax.lax, "tile_p"):  # before it, `jnp.tile` was a reshape of all axes
    PARTS["tile"] = lambda w: (jnp.tile(w, (2, 3, 1, 1)),)


@pytest.mark.every(3)
@pytest.mark.combinations
@types
@pytest.mark.parametrize("part", PARTS)
def test_parts(make, part):
    stays(PARTS[part], make((L, 2, N, M)), eagerly=part in ("slice", "gather"))


@pytest.mark.every(2)
@types
def test_filling_gather(make):
    """Out of bounds, a matrix is NaN; where that is no matter of leaves, the array becomes dense."""
    w, ids = make((L, N, M)), np.array([1, 7])
    f = lambda w: jnp.take(w, ids, axis=0)  # noqa: E731
    with hki.materialization("error"):
        out = hki.use_implicit_args(f)(w)
    assert type(out) is type(w)
    np.testing.assert_allclose(hki.materialize(out), f(hki.materialize(w)), rtol=1e-5, atol=1e-5)
    zeros = lambda w: jnp.take(w, ids, axis=0, fill_value=0.0)  # noqa: E731
    with hki.materialization("allow"):
        out = hki.use_implicit_args(zeros)(w)
    np.testing.assert_allclose(
        hki.materialize(out), zeros(hki.materialize(w)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.every(2)
@types
def test_what_touches_the_matrix_is_right(make, may_be_dense):
    w = make((L, 2, N, M))
    n = w.shape[-1]

    def f(w):
        return (
            w[:, :, 1:], w[..., 0], w.reshape(L, -1), w.reshape(L, 2 * N, n), jnp.flip(w, -1),
            jnp.moveaxis(w, -1, 0), jnp.concatenate([w, w], -1), jnp.split(w, 2, -1), w[:, :, None],
            jnp.broadcast_to(w[..., :1], w.shape), w[IDS, :, IDS], w[..., IDS], w.ravel(),
            jax.lax.dynamic_slice(w, (0, jnp.int32(1), jnp.int32(1), 0), (L, 1, 2, n)),
            jax.lax.dynamic_update_slice_in_dim(w, w[..., :1], jnp.int32(1), -1),
        )  # fmt: skip

    got = jax.jit(lambda w: hki.materialize(hki.use_implicit_args(f)(w)))(w)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(f(hki.materialize(w))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_differs_in_kind_is_right(may_be_dense):
    """Joined with another type, format, group size or rank, or with a dense array."""
    w = quantized((L, N, M))
    others = [
        hki.QuantizedMatrix.quantize(normal((L, N, M)), "int4", 2),
        hki.QuantizedMatrix.quantize(normal((L, N, M)), "int4", 6, zero_point=True),
        quantized((L, N, M), axis=-1),
        lora((L, N, M)),
        normal((L, N, M)),
    ]
    f = lambda w, x: (  # noqa: E731
        jnp.concatenate([w, x]), jnp.stack([w, x]), jnp.where(jnp.bool_(False), w, x),
        jax.lax.dynamic_update_slice_in_dim(w, x[1:], 1, 0),
    )  # fmt: skip
    for x in others:
        for pair in ((w, x), (x, w)):
            got = hki.materialize(hki.use_implicit_args(f)(*pair))
            want = f(*map(hki.materialize, pair))
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# --- stacked layers ------------------------------------------------------------------------------


def total(f):
    return lambda *args: jnp.sin(f(*args)).sum()


def trainable(w):
    """The floating leaves by name, one level deep."""
    leaves = {
        f.name: getattr(w, f.name)
        for f in dataclasses.fields(w)
        if f.name not in ("shape", "dtype")
    }
    return {k: v for k, v in leaves.items() if isinstance(v, jax.Array) and v.dtype == jnp.float32}


def by_index(w, x):
    """As AlphaFold's own layer stack does it: the stack is a constant, each step slices its layer."""

    def layer(i, x):
        return jnp.tanh(x @ jax.tree.map(lambda p: p[i], w))

    return jax.lax.fori_loop(0, L, layer, x)


def by_dynamic_slice(w, x):
    def layer(carry, _):
        x, i = carry
        own = jax.lax.dynamic_index_in_dim(w, i, keepdims=False)
        return (jnp.tanh(x @ own), i + 1), None

    return jax.lax.scan(layer, (x, 0), None, length=L)[0][0]


def by_scan(w, x):
    return jax.lax.scan(lambda x, own: (jnp.tanh(x @ own), None), x, w)[0]


def by_vmap(w, x):
    return jax.vmap(lambda i: jnp.tanh(x @ w[i]))(jnp.arange(L)).sum(0)


@pytest.mark.combinations
@pytest.mark.parametrize("make", [lora, quantized, TYPES["lora of quantized"]])
@pytest.mark.parametrize("stack", [by_index, by_dynamic_slice, by_scan, by_vmap])
def test_layers_of_a_stack(make, stack):
    w, x = make((L, N, N)), normal((5, N))
    implicit = hki.use_implicit_args(stack)
    moving = trainable(w)

    def ours(moving, x):
        return implicit(w._replace(**moving), x)

    def dense(moving, x):
        return stack(hki.materialize(w._replace(**moving)), x)

    grads = lambda f: jax.jit(jax.value_and_grad(total(f), argnums=(0, 1)))  # noqa: E731
    if stack is by_index:  # a loop of this kind has no reverse mode
        grads = lambda f: jax.jit(lambda *args: jax.jvp(f, args, args))  # noqa: E731
    with hki.materialization("error"):
        got = grads(ours)(moving, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(grads(dense)(moving, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_layer_stack_of_haiku(key):
    def f(x):
        layer = lambda x: jnp.tanh(hk.Linear(N)(x))  # noqa: E731
        return hk.experimental.layer_stack(L)(layer)(x)

    model = hk.without_apply_rng(hk.transform(f))
    x = normal((5, N))
    params = model.init(key, x)
    # A stack of vectors (biases) is not a matrix.
    implicit = jax.tree.map(
        lambda p: lora(p.shape, 3, lambda *_: quantized(p.shape)) if p.ndim == 3 else p, params
    )
    with hki.materialization("error"):
        out = jax.jit(hki.use_implicit_args(model.apply))(implicit, x)
    np.testing.assert_allclose(out, model.apply(hki.materialize(implicit), x), rtol=1e-4, atol=1e-5)


@dataclasses.dataclass
class Seven(hki.ImplicitArray, core_ndim=0):
    """An array of sevens without leaves: there is nothing that could be NaN where a gather fills."""

    def materialize(self):
        return jnp.full(self.shape, 7.0, self.dtype)


def test_filling_gather_of_a_type_without_leaves():
    ids = jnp.array([0, 9])
    with hki.materialization("allow"):
        got = hki.use_implicit_args(jnp.take)(Seven(shape=(3,), dtype=np.float32), ids)
    np.testing.assert_array_equal(hki.materialize(got), [7.0, np.nan])


@dataclasses.dataclass
class Tagged(hki.ImplicitArray, core_ndim=0):
    """An array with a label: all of its axes are batch axes."""

    x: hki.ArrayValue
    label: str = hki.aux_field(default="m")

    def materialize(self):
        return self.x


@pytest.mark.combinations
@pytest.mark.parametrize(
    "f",
    [
        lambda w, i: w[i],
        lambda w, i: w[:, i],
        lambda w, i: w[i, i],
        lambda w, i: jnp.take(w, i, axis=0, mode="clip"),
        lambda w, i: jnp.take(w, i, axis=1),
        lambda w, i: jnp.take(w, i + 2, axis=0),  # partly out of bounds
        lambda w, i: jax.vmap(lambda row, j: row[j])(w, jnp.arange(L)),
    ],
)
@pytest.mark.parametrize("shape", [(L, N), (L, N, 2)], ids=str)
def test_gather_where_all_axes_are_batch_axes(f, shape):
    out = stays(f, Tagged(normal(shape), label="s"), jnp.array([2, 0]))
    assert out.label == "s"
