"""`Concatenated`: weights side by side, beside the contract for every type."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests import dense_twin
from tests.random_arrays import normal

SHAPE = (32, 24)


def lora(w, alpha=2.0, seed=1):
    a, b = normal((*w.shape[:-1], 3), seed), normal((*w.shape[:-2], 3, w.shape[-1]), seed + 1)
    return hki.LoRA(w, a, b, alpha=alpha)


def int4(w):
    return hki.QuantizedMatrix.quantize(w, "int4", group_size=8)


def int8_by_rows(w):
    return hki.QuantizedMatrix.quantize(w, "int8", axis=-1)


V, W = normal(SHAPE, 7), normal(SHAPE, 8)
PAIRS = {
    "lora": (lora(V), lora(W, None, 3)),
    "int4": (int4(V), int4(W)),
    "lora of int4": (lora(int4(V)), lora(W)),
    "dense and lora": (V, lora(W)),
    "int4 and lora of int4": (int4(V), lora(int4(W))),
    "int8, rows and columns": (int8_by_rows(V), hki.QuantizedMatrix.quantize(W, "int8")),
    "scaled and lora": (hki.ScaledMatrix(int4(V), jnp.arange(1.0, 33)), lora(W)),
}


close = functools.partial(dense_twin.close, rtol=4e-6)
same_without_dense = functools.partial(dense_twin.same_without_dense, rtol=4e-6)


def gated(x, v, w):
    """As AlphaFold 3 has it: `[k, 2, n]`, multiplied as `[k, 2 * n]`."""
    both = jnp.stack([v, w], axis=1)
    gate, value = jnp.split(x @ jax.lax.collapse(both, 1, 3), 2, axis=-1)
    return jax.nn.swish(gate) * value


PRODUCTS = {
    "gated unit": gated,
    "stacked between": lambda x, v, w: jnp.einsum("bk,kcn->cbn", x, jnp.stack([v, w], 1)),
    "split anew": lambda x, v, w: jnp.einsum(
        "bk,kcn->cbn", x, jnp.concatenate([v, w], -1).reshape(32, 4, 12)
    ),
    "columns": lambda x, v, w: x @ jnp.concatenate([v, w], 1),
    "three": lambda x, v, w: x @ jnp.concatenate([v, w, v], 1),
    "transposed": lambda x, v, w: jnp.concatenate([v, w], 1).T @ x.T,
    "rows": lambda x, v, w: jnp.concatenate([x, 2 * x], -1) @ jnp.concatenate([v, w], 0),
    "uneven parts": lambda x, v, w: [
        x @ part for part in jnp.split(jnp.concatenate([v, w], 1), [8, 32], axis=1)
    ],
    "the parts": lambda x, v, w: [
        x @ part for part in jnp.split(jnp.concatenate([v, w], 1), 2, axis=1)
    ],
    "stacked last": lambda x, v, w: jnp.einsum("bk,knc->cbn", x, jnp.stack([v, w], -1)),
    "sliced rows": lambda x, v, w: x[:, :8] @ jnp.concatenate([v, w], 1)[:8],
    "where it runs": lambda x, v, w: x[:, :8] @ jax.lax.dynamic_slice_in_dim(
        jnp.concatenate([v, w], 1), jnp.int32(8), 8
    ),
    "scaled": lambda x, v, w: x @ (jnp.concatenate([v, w], 1) * -2 / 3),
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.combinations
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(pair, name):
    x = normal((5, 32), 5)
    same_without_dense(PRODUCTS[name], x, *PAIRS[pair])


def test_stacks_are_batch_axes():
    """Concatenates arrays of two types."""
    v, w = PAIRS["int4 and lora of int4"]
    x = normal((2, 5, 32), 5)
    same_without_dense(lambda x, v, w: jnp.einsum("cbk,ckn->cbn", x, jnp.stack([v, w])), x, v, w)
    same_without_dense(lambda x, v, w: jnp.einsum("bk,ckn->cbn", x[0], jnp.stack([v, w])), x, v, w)
    same_without_dense(lambda x, v, w: x[0] @ jnp.stack([v, w])[1], x, v, w)


def test_sums_in_bfloat16_are_rounded_once():
    """Over parts of the contracted axis: no worse than the dense product in bfloat16."""
    v, w = (hki.tree_map_with_implicit(lambda y: y, p) for p in PAIRS["lora"])
    x = normal((5, 64), 5).astype(jnp.bfloat16)

    def product(x, v, w):
        return x @ jnp.concatenate([v, w]).astype(jnp.bfloat16)

    exact = np.asarray(x, np.float64) @ np.concatenate(hki.materialize([v, w])).astype(np.float64)
    found = hki.use_implicit_args(product)(x, v, w)
    dense = product(x, *hki.materialize((v, w)))
    assert found.dtype == jnp.bfloat16

    def error(y):
        return np.abs(np.asarray(y, np.float64) - exact).max()

    assert error(found) <= 1.5 * error(dense)


@pytest.mark.every(2)
@pytest.mark.parametrize("pair", ["lora", "dense and lora"])
def test_gradients(pair):
    x = normal((5, 32), 5)

    def loss(x, v, w):
        return jnp.sum(gated(x, v, w) ** 2)

    found = jax.jit(jax.grad(hki.use_implicit_args(loss), argnums=(0, 1, 2)))(x, *PAIRS[pair])
    dense = lambda x, v, w: loss(x, *hki.materialize((v, w)))  # noqa: E731
    expected = jax.grad(dense, argnums=(0, 1, 2))(x, *PAIRS[pair])
    jax.tree.map(lambda a, b: close(a, b, rtol=2e-5), found, expected)


ROWS = jnp.array([[0, 31, 32], [63, 40, -1], [64, 700, -65]])


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_rows_as_an_embedding_has_them(mode):
    """A table of several parts, as with an adaptive softmax, or with tokens that were added."""
    ids = ROWS[:2] if mode == "promise_in_bounds" else ROWS
    for axis in range(2):
        take = functools.partial(_rows, axis=axis, mode=mode)
        same_without_dense(take, ids // (1 + axis), *PAIRS["int4 and lora of int4"])
        same_without_dense(take, ids // (1 + axis), *PAIRS["scaled and lora"])


def _rows(ids, v, w, axis, mode):
    return jnp.concatenate([v, w], axis).at[ids].get(mode=mode, fill_value=3.0, unique_indices=True)


def test_in_loops_and_under_vmap():
    v, w = PAIRS["lora of int4"]
    x = normal((5, 32), 5)

    def looped(x, v, w):
        both = jnp.concatenate([v, w], 1)
        return jax.lax.scan(lambda c, _: (c + x @ both, None), x @ both, None, length=2)[0]

    same_without_dense(looped, x, v, w)
    mapped = jax.vmap(hki.use_implicit_args(gated), in_axes=(0, None, None))
    expected = gated(x, *hki.materialize((v, w)))
    close(mapped(x[:, None], v, w)[:, 0], expected, rtol=4e-6)


@pytest.mark.usefixtures("may_be_dense")
def test_what_is_not_a_weight_is_dense():
    """A small weight beside activations, and a cache."""
    row = lora(normal((1, 24)))
    out = hki.use_implicit_args(lambda x, w: jnp.concatenate([x, w]))(W, row)
    close(out, np.concatenate([W, hki.materialize(row)]), rtol=1e-6)
    assert isinstance(out, jax.Array)
    cache = hki.QuantizedCache.quantize(V, "int8", axis=-1)
    out = hki.use_implicit_args(lambda v, w: jnp.concatenate([v, w]))(cache, W)
    assert isinstance(out, jax.Array)


@pytest.mark.usefixtures("may_be_dense")
def test_a_type_says_whether_it_may_be_wrapped():
    @dataclasses.dataclass
    class Kept(hki.ImplicitArray, core_ndim=2, may_be_wrapped=False):
        x: hki.ArrayValue

        def materialize(self):
            return 1 * self.x

    join = hki.use_implicit_args(lambda v, w: jnp.concatenate([v, w]))
    assert isinstance(join(Kept(V), W), jax.Array)
    assert isinstance(join(lora(V), W), hki.Concatenated)


@pytest.mark.parametrize("other", [(7, 24), (32, 24, 1), ()])
def test_parts_that_do_not_fit(other):
    message = r"Concatenated: expected parts of one dtype whose shapes differ in axis -1 alone, got"
    with pytest.raises(ValueError, match=message):
        hki.Concatenated((V, jnp.ones(other)), -1)
    with pytest.raises(ValueError, match=message):
        hki.Concatenated((V, W.astype(jnp.bfloat16)), -1)
