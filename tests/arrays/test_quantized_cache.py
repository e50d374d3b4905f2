"""A quantized key-value cache: new vectors are quantized, and the old ones keep their bits."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haiku_implicit as hki
from tests.random_arrays import normal
from tests.tiers import few

B, T, H, D = 2, 6, 3, 8
use = hki.use_implicit_args
quantize = hki.QuantizedCache.quantize


def cache(name="int8", group=None, shape=(B, T, H, D)):
    return quantize(normal(shape, 9), name, group, axis=-1)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


NEW, ONE = normal((B, 2, H, D)), normal((B, 1, H, D), 1)
IDS = jnp.array([4, 1])

# name: (write, of the new vectors), where the same write of codes and of scales is what is expected.
WRITES = {
    "slice": (lambda c, x: lax.dynamic_update_slice(c, x, (0, jnp.asarray(3), 0, 0)), NEW),
    "slice, clamped": (lambda c, x: lax.dynamic_update_slice(c, x, (0, 9, 0, 0)), NEW),
    "slice of a batch": (lambda c, x: lax.dynamic_update_slice(c, x, (1, 2, 0, 0)), NEW[:1]),
    "slice of heads": (lambda c, x: lax.dynamic_update_slice(c, x, (0, 2, 1, 0)), NEW[:, :, :2]),
    "in dim": (lambda c, x: lax.dynamic_update_slice_in_dim(c, x, 2, axis=1), NEW),
    "at positions": (lambda c, x: c.at[:, IDS].set(x), NEW),
    "at positions of each": (lambda c, x: c.at[jnp.arange(B), IDS].set(x[:, 0]), NEW),
    "at one position": (lambda c, x: c.at[:, 2].set(x[:, 0]), NEW),
    "at one vector": (lambda c, x: c.at[0, 3, 1].set(x[0, 0, 0]), NEW),
    "dropped": (lambda c, x: c.at[:, jnp.array([2, 99])].set(x, mode="drop"), NEW),
    "twice": (lambda c, x: c.at[:, jnp.array([2, 2])].set(x), NEW),
    "vmapped": (lambda c, x: jax.vmap(lambda c, x, i: c.at[i].set(x))(c, x, IDS[:, None]), ONE),
    "vmapped slices": (
        lambda c, x: jax.vmap(lambda c, x, i: lax.dynamic_update_slice(c, x, (i, 0, 0)))(c, x, IDS),
        ONE,
    ),
    "ring": (
        lambda c, x: lax.fori_loop(
            4, 9, lambda i, c: lax.dynamic_update_slice(c, x * (i + 1.0), (0, i % T, 0, 0)), c
        ),
        ONE,
    ),
    "in a cond": (lambda c, x: lax.cond(x[0, 0, 0, 0] < 9, lambda: c.at[:, 1].set(x[:, 0]), lambda: c), ONE),
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.combinations
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("kind", [("int8", None), ("int4", 4), ("uint4", None)])
def test_writes(name, kind, never_dense):
    write, new = WRITES[name]
    old = cache(*kind)
    got = jax.jit(use(write))(old, new)
    assert isinstance(got, hki.QuantizedCache) and got.format == old.format
    # Which positions are written, the dense twin knows; these are the new vectors quantized.
    dense = write(hki.materialize(old), new)
    written = np.asarray(write(jnp.zeros(old.shape), jnp.ones_like(new)) != 0).any(-1)
    want = quantize(dense, kind[0], kind[1], axis=-1)
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, old)), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[~written], np.asarray(c)[~written])
        # (Quotients by a scale may round differently in differently fused programs.)
        np.testing.assert_allclose(
            np.asarray(a, np.float32)[written], np.asarray(b, np.float32)[written], rtol=1e-5
        )


def test_writes_that_are_not_of_whole_vectors_are_dense(may_be_dense):
    old = cache()
    for write in (
        lambda c: c.at[:, 0, 0, :4].set(0.0),
        lambda c: c.at[..., jnp.array([1])].set(0.0),
        lambda c: lax.dynamic_update_slice(c, jnp.ones((1, 1, 1, 4)), (0, 0, 0, 2)),
        lambda c: c.at[0].add(1.0),
    ):
        got = use(write)(old)
        assert isinstance(got, jax.Array)
        np.testing.assert_allclose(got, write(hki.materialize(old)), rtol=1e-6)


def test_a_write_of_no_positions(never_dense):
    old, new = cache(), jnp.zeros((B, 0, H, D))
    for write in (
        lambda c, x: lax.dynamic_update_slice(c, x, (0, 2, 0, 0)),
        lambda c, x: c.at[:, IDS[:0]].set(x),
    ):
        same(jax.jit(use(write))(old, new), old)


def test_a_weight_is_not_rounded_by_a_write(may_be_dense):
    w = hki.QuantizedMatrix.quantize(normal((B, T, H, D)), "int8", axis=-1)
    got = use(WRITES["slice"][0])(w, NEW)
    np.testing.assert_array_equal(got, WRITES["slice"][0](hki.materialize(w), NEW))


def test_codes_are_copied_from_a_cache_of_the_same_kind(never_dense):
    old, new = cache(), quantize(NEW, "int8", axis=-1)
    got = use(lambda c, x: lax.dynamic_update_slice(c, x, (0, 1, 0, 0)))(old, new)
    same(jax.tree.map(lambda x: x[:, 1:3], got), new)


def test_codes_are_not_copied_where_vectors_share_a_scale(may_be_dense):
    old, new = cache(), hki.QuantizedMatrix.quantize(NEW, "int8", "tensor", axis=-1)
    write = lambda c, x: lax.dynamic_update_slice(c, x, (0, 1, 0, 0))  # noqa: E731
    got = hki.materialize(jax.jit(use(write))(old, new))
    want = write(hki.materialize(old), hki.materialize(new))
    # Values may be rounded anew, to codes of their own vectors' scales.
    np.testing.assert_allclose(got, want, atol=np.abs(NEW).max() / 127)


MANY = jax.random.randint(jax.random.key(3), (1500,), 0, T)

# name: writes of rows of the second array into the first one, some of them to the same places.
SAME_PLACES = {
    # Clipped, different indices are the same place: of 6 rows the last one, and the first.
    "clipped": lambda c, x: c.at[jnp.array([T + 3, 1, T - 1, -T - 2, 0], jnp.int8)].set(x[:5], mode="clip"),
    "dropped": lambda c, x: c.at[jnp.array([T + 3, 1, 1, T, 0])].set(x[:5], mode="drop"),
    "very many": lambda c, x: c.at[MANY].set(x),
    "from the last": lambda c, x: c.at[jnp.array([-1, T - 1, 2, -4])].set(x[:4]),
    "windows that overlap": lambda c, x: lax.scatter(
        c, jnp.array([[1], [3], [2]]), x[:9].reshape(3, 3, D).transpose(1, 0, 2), lax.ScatterDimensionNumbers((0, 2), (), (0,)), mode="clip",
    ),
    # More of a batch than the type of the indices counts to.
    "in a batch": lambda c, x: jax.vmap(lambda c, x, i: c.at[i].set(x), (None, 0, 0))(
        c, x.reshape(300, 5, D), (jnp.arange(1500).reshape(300, 5) % 3).astype(jnp.int8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_PLACES)
def test_the_last_of_several_writes_to_one_place(name, never_dense):
    """Codes and scales are those of the last one, which the same write of rows' numbers tells."""
    write, old, new = SAME_PLACES[name], cache(shape=(T, D)), normal((1500, D), 5)
    got = jax.jit(use(write))(old, new)
    assert isinstance(got, hki.QuantizedCache)
    numbers = jnp.broadcast_to(jnp.arange(1.0, len(new) + 1)[:, None], new.shape)
    last = np.asarray(write(jnp.zeros(old.shape), numbers)).astype(
        int
    )  # one after another, on CPUs
    rows = np.concatenate([np.asarray(hki.materialize(old)).reshape(-1, D), np.asarray(new)])
    kept = np.broadcast_to(np.arange(T)[:, None], last.shape[-2:])
    want = np.take(rows, np.where(last > 0, last + T - 1, kept)[..., 0], axis=0)
    want = quantize(jnp.asarray(want), "int8", axis=-1)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-5)


def attention(query, key, value):
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key)
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), value)


@pytest.mark.parametrize("name", few(["int8", "int4"], "int8"))
def test_attention_reads_it(name, never_dense):
    key, value, query = cache(name), cache(name), normal((B, 1, H, 2, D), 2)
    dense = attention(query, hki.materialize(key), hki.materialize(value))
    got = jax.jit(use(attention))(query, key, value)
    np.testing.assert_allclose(got, dense, rtol=1e-5, atol=1e-5)
    by_query = jax.grad(lambda q: use(attention)(q, key, value).sum())(query)
    want = jax.grad(
        lambda q: attention(q, hki.materialize(key), hki.materialize(value)).sum()
    )(query)  # fmt: skip
    np.testing.assert_allclose(by_query, want, rtol=1e-4, atol=1e-5)


def test_no_dense_cache_is_built(never_dense):
    length = 8192

    def step(cache, new, query, i):
        cache = lax.dynamic_update_slice(cache, new, (0, i, 0, 0))
        return attention(query, cache, cache), cache

    args = jnp.zeros((1, length, 4, 64)), jnp.ones((1, 1, 4, 64)), jnp.ones((1, 1, 4, 1, 64))
    q = quantize(args[0], "int8", axis=-1)
    compiled = jax.jit(use(step), donate_argnums=0).lower(q, *args[1:], 5).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < args[0].nbytes / 3
    # Donated buffers are reused: codes and scales are updated in place.
    assert memory.alias_size_in_bytes >= q.nbytes
    codes = q.codes
    compiled(q, *args[1:], 5)
    assert codes.is_deleted()


class Memory(hk.Module):
    """An attention that keeps keys in Haiku's state, and knows of no quantization."""

    def __call__(self, x):
        at = hk.get_state("at", [], jnp.int32, jnp.zeros)
        keys = hk.get_state("keys", [B, T, H, D], init=jnp.zeros)
        keys = lax.dynamic_update_slice(keys, x, (0, at, 0, 0))
        hk.set_state("keys", keys)
        hk.set_state("at", at + x.shape[1])
        return attention(x[:, :, :, None], keys, keys)


@pytest.mark.parametrize("name", few(["int8", "int4"], "int4"))
def test_a_cache_in_haiku_state(name, never_dense):
    def model(x):
        with hk.custom_creator(
            hki.cache_creator(name, targets=r".*/keys"), params=False, state=True
        ):
            return Memory()(x)

    quantized = hki.transform_implicit(hk.transform_with_state(model))
    dense = hk.transform_with_state(lambda x: Memory()(x))
    _, state = quantized.init(None, ONE)
    _, twin = dense.init(None, ONE)
    assert isinstance(state["memory"]["keys"], hki.QuantizedCache)
    bits = {"int8": 8, "int4": 4}[name]
    assert state["memory"]["keys"].nbytes == B * T * H * (D * bits // 8 + 4)  # a scale to a vector
    steps = [normal((B, n, H, D), n) for n in (3, 1, 1)]  # a prefill, and two positions
    for x in steps:
        out, state = jax.jit(quantized.apply)({}, state, None, x)
        _, twin = dense.apply({}, twin, None, x)
        # The twin computes on the rounded keys.
        rounded = quantize(twin["memory"]["keys"], name, axis=-1)
        keys = hki.materialize(rounded)
        np.testing.assert_allclose(
            out, attention(x[:, :, :, None], keys, keys), rtol=1e-4, atol=1e-4
        )
    assert int(state["memory"]["at"]) == 5
    same(state["memory"]["keys"].codes, rounded.codes)


def test_decoding_in_a_scan_keeps_the_cache_quantized(never_dense):
    def model(x):
        with hk.custom_creator(
            hki.cache_creator("int8", targets=r".*/keys"), params=False, state=True
        ):
            return Memory()(x)

    apply = hki.transform_implicit(hk.transform_with_state(model)).apply
    _, state = hki.transform_implicit(hk.transform_with_state(model)).init(None, ONE)
    xs = normal((3, B, 1, H, D), 4)

    def step(state, x):
        out, state = apply({}, state, None, x)
        return state, out

    final, outs = jax.jit(lambda s, xs: lax.scan(step, s, xs))(state, xs)
    for x, out in zip(xs, outs, strict=True):
        state, want = step(state, x)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    got, want = (s["memory"]["keys"] for s in (final, state))
    same(got.codes, want.codes)
    # (A quotient may differ in its last bit between a compiled loop and single operations.)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6)


@pytest.mark.slow
def test_heads_and_time_change_places(never_dense):
    """Vectors with scales of their own, in any order; also a group of rows with one scale."""
    tiled = hki.QuantizedMatrix.quantize(normal((B, T, 4, D)), "int8", (2, D), axis=-1)
    for old in (cache(), cache("int4", 4), cache("uint4"), tiled):
        for order in ((0, 2, 1, 3), (2, 0, 1, 3), (2, 1, 0, 3)):
            got = use(lambda c, order=order: c.transpose(order))(old)
            assert isinstance(got, hki.QuantizedMatrix)
            same([hki.materialize(got)], [hki.materialize(old).transpose(order)])
