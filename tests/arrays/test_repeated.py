"""`Repeated`: key heads that query heads share are held, and read, once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import normal

B, N, S, D, R = 2, 3, 4, 8, 2
use = hki.use_implicit_args


def cache(fmt="int8", shape=(B, N, S, D), seed=9):
    return hki.QuantizedCache.quantize(normal(shape, seed), fmt, axis=-1)


def lora():
    w = normal((N * S, D))
    matrix = hki.LoRA(w, normal((N * S, 2), 1), normal((2, D), 2))
    return hki.MatrixView(matrix, (((N, S, 0),), ((S, 1, 0),), ((D, 1, 1),)))


ROUTES = {
    "repeat": lambda x: jnp.repeat(x, R, axis=1),
    "repeat heads after time": lambda x: jnp.repeat(x, R, axis=2),
    "broadcast and reshape": lambda x: jnp.broadcast_to(
        x[:, :, None], (B, N, R, S, D)
    ).reshape(B, N * R, S, D),
    "broadcast alone": lambda x: jnp.broadcast_to(x[:, :, None], (B, N, R, S, D)),
    "between the axes of the matrix": lambda x: jnp.broadcast_to(
        x[:, :, :, None], (B, N, S, R, D)
    ).reshape(B, N, S * R, D),
    "transposed": lambda x: jnp.repeat(x, R, axis=1).transpose(0, 2, 1, 3),
    "two axes": lambda x: jnp.broadcast_to(x[:, :, None, :, None], (B, N, R, S, 3, D)),
}  # fmt: skip


@pytest.mark.combinations
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_a_repeated_cache_holds_no_more_than_the_cache(name, fmt, never_dense):
    x = cache(fmt)
    got = use(ROUTES[name])(x)
    assert isinstance(got, hki.Repeated) and got.nbytes == x.nbytes
    np.testing.assert_array_equal(hki.materialize(got), ROUTES[name](hki.materialize(x)))


def test_a_view_of_any_type_is_repeated(never_dense):
    fun = lambda w: jnp.repeat(w, R, axis=1)  # noqa: E731
    w = lora()
    got = use(fun)(w)
    assert isinstance(got, hki.Repeated) and got.nbytes == w.nbytes
    np.testing.assert_allclose(hki.materialize(got), fun(hki.materialize(w)), rtol=1e-6)


# einsum with queries, of the heads `n` that are repeated; `k` before or after the queries.
PRODUCTS = [
    "bnd,bnsd->bns",
    "bntd,bnsd->bnts",
    "bntd,bnsd->btns",
    "bnts,bnsd->bntd",
    "ntd,bnsd->bnts",  # heads are of both, the batch of the keys alone
    "btd,bnsd->bnts",  # heads are a free axis of the keys
    "td,bnsd->bnst",
    "bnt,bnsd->btsd",  # heads are summed over
    "bnsd,bnsd->b",
]


@pytest.mark.every(6)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("first", [False, True])
def test_products(product, first, request):
    of_x = product.partition(",")[0]
    if not {*of_x} >= {"n"} or product not in ("bnt,bnsd->btsd", "bnsd,bnsd->b"):
        request.getfixturevalue("never_dense")
    else:
        request.getfixturevalue("may_be_dense")
    sizes = dict(b=B, n=N * R, s=S, d=D, t=5)
    x = normal([sizes[c] for c in of_x])

    def fun(x, k):
        k = jnp.repeat(k, R, axis=1)
        if not first:
            return jnp.einsum(product, x, k)
        left, right = product.split("->")
        return jnp.einsum(",".join(reversed(left.split(","))) + "->" + right, k, x)

    k = cache()
    want = fun(x, hki.materialize(k))
    np.testing.assert_allclose(use(fun)(x, k), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(jax.jit(use(fun))(x, k), want, rtol=2e-5, atol=2e-5)
    loss = lambda f: jax.grad(lambda x, k: jnp.sum(jnp.sin(f(x, k))))  # noqa: E731
    np.testing.assert_allclose(
        loss(use(fun))(x, k), loss(fun)(x, hki.materialize(k)), rtol=2e-4, atol=2e-4
    )


def test_attention_reads_each_head_once():
    """The compiled program has room for the scores and not for repeated keys, not even in codes."""
    batch, heads, time, depth, group = 2, 4, 512, 64, 4
    keys = hki.QuantizedCache.quantize(normal((batch, heads, time, depth)), "int8", axis=-1)
    queries = normal((batch, heads * group, 1, depth))

    def scores(q, k):
        return jnp.einsum("bhtd,bhsd->bhts", q, jnp.repeat(k, group, axis=1))

    program = jax.jit(use(scores)).lower(queries, keys).compile()
    repeated_codes = group * keys.codes.size
    assert program.memory_analysis().temp_size_in_bytes < repeated_codes / 4


def test_gradients_of_a_repeated_lora_go_to_its_factors(never_dense):
    x = normal((5, D), 5)

    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.einsum("td,nsd->tns", x, jnp.repeat(w, R, axis=1))))

    w = lora()
    w = w._replace(matrix=w.matrix._replace(w=jnp.zeros_like(w.matrix.w)))
    got = jax.grad(use(loss))(w, x).matrix
    dense = jax.grad(
        lambda ab: loss((ab[0] @ ab[1]).reshape(N, S, D), x)
    )((w.matrix.a, w.matrix.b))  # fmt: skip
    np.testing.assert_allclose(got.a, dense[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.b, dense[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(B, N, 1, D), (B, 1, S, D), (1, 1, 1, D)])
def test_an_axis_of_length_one_anywhere(shape, never_dense):
    for axis in range(4):
        fun = functools.partial(jnp.expand_dims, axis=axis)
        x = cache(shape=shape)
        got = use(fun)(x)
        assert got.nbytes == x.nbytes
        np.testing.assert_array_equal(hki.materialize(got), fun(hki.materialize(x)))


# Writes and cuts happen in a copy of the codes, which is a cache again.
COPIES = {
    "write": (lambda x: x.at[:, :, 1].set(1.0), hki.QuantizedCache),
    "write a slice": (
        lambda x: jax.lax.dynamic_update_slice(x, jnp.ones((B, N * R, 1, D)), (0, 0, 2, 0)),
        hki.QuantizedCache,
    ),
    "heads": (lambda x: x[:, 1:4], hki.QuantizedCache),
    "some head": (lambda x: jax.lax.dynamic_slice_in_dim(x, 3, 1, axis=1), hki.QuantizedCache),
    "chosen heads": (lambda x: x.at[:, jnp.array([5, 0])].get(mode="clip"), hki.QuantizedCache),
    "heads join the batch": (lambda x: x.reshape(B * N * R, S, D), hki.QuantizedCache),
    "one of the batch": (lambda x: x[1], hki.QuantizedCache),
    "times a number": (lambda x: 2.0 * x, hki.Repeated),
    "in bfloat16": (lambda x: x.astype(jnp.bfloat16), hki.QuantizedCache),
    "in bfloat16 before": (
        lambda x: jnp.repeat(x[:, ::R].astype(jnp.bfloat16), R, axis=1).astype(jnp.float32),
        hki.Repeated,
    ),
    "without an axis": (lambda x: x[:1].reshape(N * R, S, D), None),
}


@pytest.mark.parametrize("name", COPIES)
def test_other_functions(name, never_dense):
    fun, kind = COPIES[name]
    got = use(lambda x: fun(jnp.repeat(x, R, axis=1)))(cache())
    want = fun(jnp.repeat(hki.materialize(cache()), R, axis=1))
    assert kind is None or isinstance(got, kind)
    np.testing.assert_allclose(
        np.asarray(hki.materialize(got), np.float32), np.asarray(want, np.float32), rtol=1e-2
    )


def test_beams_stay_a_cache_that_a_loop_writes(never_dense):
    def decode(x):
        beams = jnp.broadcast_to(x[:, None], (B, 3, N, S, D)).reshape(B * 3, N, S, D)

        def step(i, cache):
            new = jnp.full((B * 3, N, 1, D), i + 1.0)
            return jax.lax.dynamic_update_slice(cache, new, (0, 0, i, 0))

        return jax.lax.fori_loop(0, 2, step, beams)

    got = jax.jit(use(decode))(cache())
    assert isinstance(got, hki.QuantizedCache)
    np.testing.assert_allclose(
        hki.materialize(got), decode(hki.materialize(cache())), rtol=1e-5, atol=1e-5
    )


def test_vmap_and_scan(never_dense):
    stacked = jax.tree.map(lambda *x: jnp.stack(x), cache(), cache("int8"))
    q = normal((2, B, N * R, D), 3)

    def attend(q, k):
        return jnp.einsum("bnd,bnsd->bns", q, jnp.repeat(k, R, axis=1))

    want = jax.vmap(attend)(q, hki.materialize(stacked))
    inside = use(lambda q, k: jax.vmap(attend)(q, k))
    loop = use(lambda q, k: jax.lax.scan(lambda c, qk: (c, attend(*qk)), 0.0, (q, k))[1])
    for fun in (jax.vmap(use(attend)), inside, jax.jit(loop)):
        np.testing.assert_allclose(fun(q, stacked), want, rtol=2e-5, atol=2e-5)


def test_repeated_arrays_go_through_loops_and_branches(never_dense):
    both = [use(lambda x: jnp.repeat(x, R, axis=1))(cache(seed=seed)) for seed in (1, 2)]
    q = normal((B, N * R, D))

    def fun(x, y, q):
        def body(k, q):
            return k, jnp.einsum("bnd,bnsd->bns", q, k)

        k = jax.lax.cond(q[0, 0, 0] > 0, lambda: x, lambda: y)
        return jax.lax.scan(body, k, q[None])[1]

    want = fun(*hki.materialize(both), q)
    np.testing.assert_allclose(jax.jit(use(fun))(*both, q), want, rtol=2e-5, atol=2e-5)
