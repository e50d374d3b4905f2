"""Adapters and the operators they are made of, against their dense twins."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit import adapters
from haiku_implicit.adapters import operators, rotated, sums
from tests.tiers import few

N, M, R = 12, 8, 2


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=0.5, size=shape), jnp.float32)


def diagonal(lead, w):
    return sums.Sum(w, operators.Diagonal(normal((*lead, M), 1), num_rows=N))


def sparse(lead, w):
    row, column = ([0, 1, 5, 5, 11], [0, 7, 2, 2, 3])  # one place is there twice
    row, column = (jnp.broadcast_to(jnp.array(x), (*lead, 5)) for x in (row, column))
    return sums.Sum(w, operators.Sparse(normal((*lead, 5), 1), row, column, (N, M)))


def loha(lead, w, rank=R):
    shapes = [(N, rank), (rank, M)] * 2
    parts = [normal((*lead, *shape), i) for i, shape in enumerate(shapes, 1)]
    return adapters.LoHa(w, *parts, alpha=jnp.full(lead, 3.0))


# Each makes an adapter of leading axes and a base.
CASES = {
    "dora": lambda lead, w: adapters.DoRA(
        w,
        normal((*lead, N, R), 1),
        normal((*lead, R, M), 2),
        1 + normal((*lead, M), 3),
        jnp.full(lead, 3.0),
    ),
    "loha": loha,
    "loha through its rank": functools.partial(loha, rank=1),
    "lokr": lambda lead, w: adapters.LoKr(
        w, normal((*lead, 3, 2), 1), normal((*lead, 4, 4), 2), jnp.full(lead, 3.0)
    ),
    "lokr of low rank": lambda lead, w: adapters.LoKr(
        w, normal((*lead, 3, 2), 1), (normal((*lead, 4, 2), 2), normal((*lead, 2, 4), 3))
    ),
    "vera": lambda lead, w: adapters.VeRA(
        w,
        normal((*lead, N, R), 1),
        normal((*lead, R, M), 2),
        normal((*lead, R), 3),
        normal((*lead, M), 4),
    ),
    "ia3": lambda lead, w: adapters.IA3(w, 1 + normal((*lead, M), 1)),
    "ia3 of inputs": lambda lead, w: adapters.IA3(w, 1 + normal((*lead, N), 1), -2),
    "oft": lambda lead, w: adapters.OFT(w, normal((*lead, 3, 6), 1)),
    "diagonal": diagonal,
    "sparse": sparse,
    "butterfly": lambda lead, w: rotated.Rotated(
        w, operators.BlockDiagonal(normal((*lead, 6, 2, 2), 1), stride=3)
    ),
}
QUICK = ("dora", "loha", "lokr", "oft", "sparse")


def definition(w):
    """The dense matrix by what the papers say, with NumPy, for one matrix."""
    base = np.asarray(hki.materialize(w.w), np.float64)
    f = lambda x: np.asarray(x, np.float64)  # noqa: E731
    match w:
        case adapters.DoRA():
            v = base + f(w.alpha) / R * f(w.a) @ f(w.b)
            return v * f(w.magnitude) / np.linalg.norm(v, axis=0)
        case adapters.LoHa():
            scale = f(w.alpha) / w.a1.shape[-1]
            return base + scale * (f(w.a1) @ f(w.b1)) * (f(w.a2) @ f(w.b2))
        case adapters.LoKr():
            d = f(w.d[0]) @ f(w.d[1]) if isinstance(w.d, tuple) else f(w.d)
            return base + (1 if w.scale is None else f(w.scale)) * np.kron(f(w.c), d)
        case adapters.VeRA():
            return base + (f(w.a) * f(w.d)) @ (f(w.b) * f(w.e))
        case adapters.IA3():
            return base * (f(w.factor) if w.axis == -1 else f(w.factor)[:, None])
        case adapters.OFT():
            q = np.zeros((3, 4, 4))
            q[:, *np.triu_indices(4, 1)] = f(w.upper)
            q -= q.swapaxes(1, 2)
            blocks = (np.eye(4) + q) @ np.linalg.inv(np.eye(4) - q)
            np.testing.assert_allclose(blocks @ blocks.swapaxes(1, 2), [np.eye(4)] * 3, atol=1e-12)
            return np.block([[blocks[i] * (i == j) for j in range(3)] for i in range(3)]) @ base
        case rotated.Rotated():
            r = np.zeros((N, N))
            for block in range(6):  # the indices of a block are `stride` apart
                i, k = divmod(block, 3)
                own = [(i * 2 + j) * 3 + k for j in range(2)]
                r[np.ix_(own, own)] = f(w.rotation.blocks[block])
            return r @ base
        case sums.Sum(delta=operators.Diagonal()):
            return base + np.eye(N, M) * f(w.delta.values)
        case sums.Sum():
            delta = np.zeros((N, M))
            np.add.at(
                delta, (np.asarray(w.delta.row), np.asarray(w.delta.column)), f(w.delta.values)
            )
            return base + delta


def close(got, want, tolerance=1e-5):
    got, want = np.asarray(hki.materialize(got)), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.nanmax(np.abs(want)))


X, Y = normal((3, N), 8), normal((5, M), 9)
IDS = jnp.array([[0, 3], [11, 2]])
OPERATIONS = {
    "x w": lambda w: X @ w,
    "w x": lambda w: w @ Y.T,
    "x wᵀ": lambda w: Y @ w.T,
    "wᵀ x": lambda w: w.T @ X.T,
    "einsum": lambda w: jnp.einsum("bkn,nm->kmb", jnp.stack([X, X]), w),
    "rows": lambda w: w[IDS],
    "columns": lambda w: w[:, IDS],
    "rows of the transpose": lambda w: w.T[IDS % M],
    "no row": lambda w: jnp.take(w, jnp.array([N, -N - 1, 0]), axis=0),
    "part": lambda w: w[2:5, 1:4],
    "sum": lambda w: w.sum(0),
    "scaled": lambda w: X @ (2 * w * Y[0]),
    "shifted": lambda w: X @ (Y[0] - w),
    "standardized": lambda w: X @ ((w - w.mean(0)) / w.std(0)),
    "bfloat16": lambda w: X @ w.astype(jnp.bfloat16).astype(jnp.float32),
    "convolution": lambda w: jax.lax.conv_general_dilated(
        X[None], w[None], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    ),
}


@pytest.mark.parametrize("name", few(CASES, *QUICK))
def test_what_it_stands_for_and_operations(name, may_be_dense):
    w = CASES[name]((), normal((N, M)))
    dense = hki.materialize(w)
    close(dense, definition(w))
    run = jax.jit(lambda w: {label: fun(w) for label, fun in OPERATIONS.items()})
    got, want = hki.use_implicit_args(run)(w), run(dense)
    for label in OPERATIONS:
        close(got[label], want[label], 2e-2 if label == "bfloat16" else 1e-5)


PRODUCTS = ("x w", "w x", "x wᵀ", "wᵀ x", "einsum")


@pytest.mark.parametrize("name", few(CASES, "dora", "lokr"))
@pytest.mark.parametrize("base", few(["dense", "int8", "nf4"], "int8"))
def test_products_and_gradients_of_a_base_of_any_type(name, base, never_dense):
    w = normal((N, M))
    w = w if base == "dense" else hki.QuantizedMatrix.quantize(w, base)
    w = CASES[name]((), w)

    def loss(w):
        return sum((OPERATIONS[label](w) ** 2).sum() for label in PRODUCTS)

    trained, frozen = hki.partition(w)
    got = jax.jit(jax.grad(lambda t: hki.use_implicit_args(loss)(hki.combine(t, frozen))))(trained)
    want = jax.grad(lambda t: loss(hki.materialize(hki.combine(t, frozen))))(trained)
    assert jax.tree.leaves(got)
    jax.tree.map(functools.partial(close, tolerance=2e-5), got, want)


STACKED = {
    "stack": lambda x, w: jnp.einsum("sbn,snm->bsm", x, w),
    "scan": lambda x, w: jax.lax.scan(lambda c, xw: (c, xw[0] @ xw[1]), 0, (x, w))[1],
    "vmap": lambda x, w: jax.vmap(lambda x, w: x @ w.T.T)(x, w),
    "layer": lambda x, w: x[1] @ w[1],
}


@pytest.mark.parametrize("name", few(CASES, "dora", "loha", "lokr", "oft"))
def test_stacks(name, never_dense):
    w, x = CASES[name]((3,), normal((3, N, M))), normal((3, 5, N), 7)
    dense = hki.materialize(w)
    one = jax.tree.map(lambda leaf: leaf[1], w)
    close(dense[1], definition(one))
    for fun in STACKED.values():
        close(hki.use_implicit_args(fun)(x, w), fun(x, dense))


def mlp(x):
    return hk.nets.MLP([8, 4], name="mlp")(x)


METHODS = {
    "lora": dict(rank=2, alpha=4.0),
    "dora": dict(rank=2, alpha=4.0),
    "loha": dict(rank=1),
    "lokr": dict(rank=2),
    "vera": dict(rank=2),
    "ia3": dict(),
    "oft": dict(block_size=2),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_the_same_at_first_and_then_trained(method, never_dense):
    t = hk.without_apply_rng(hk.transform(mlp))
    model = hki.transform_implicit(t)
    x = normal((3, 6), 1)
    dense = t.init(jax.random.key(0), x)
    params = hki.add_adapter(dense, 0, method, **METHODS[method])
    close(model.apply(params, x), t.apply(dense, x))
    trained, frozen = hki.partition(params, trainable_dense=False)

    def loss(trained):
        return ((model.apply(hki.combine(trained, frozen), x) - 1) ** 2).mean()

    grads = jax.grad(loss)(trained)
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, trained, grads)
    assert loss(moved) < loss(trained)
    merged = hki.merge_adapters(hki.combine(moved, frozen))
    assert jax.tree.structure(merged) == jax.tree.structure(
        hk.data_structures.to_mutable_dict(dense)
    )
    close(t.apply(merged, x), model.apply(hki.combine(moved, frozen), x))


def test_options_for_some_weights():
    params = {f"layer_{i}": {"w": normal((N, M), i)} for i in range(3)}
    new = hki.add_adapter(
        params, 0, "dora", rank=2, alpha=4.0, patterns={"layer_[12]/w": {"rank": 3, "alpha": None}}
    )
    got = [(new[name]["w"].a.shape[-1], new[name]["w"].alpha is None) for name in params]
    assert got == [(2, False), (3, True), (3, True)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("doro",), "method: expected 'lora' or one of .*'dora'.* got 'doro'"),
        (("dora",), "method 'dora': expected the options rank, alpha .optional., got none"),
        (
            ("oft", "w", {"block_size": 5}),
            "layer/w .*block_size: expected a divisor of the 12 inputs",
        ),
        (("ia3", "b", {}), "layer/b: ia3 needs a floating-point parameter of at least two axes"),
    ],
)
def test_errors(arguments, message):
    params = {"layer": {"w": normal((N, M)), "b": jnp.ones(M)}}
    method, target, options = (*arguments, "w", {})[:3] if len(arguments) == 1 else arguments
    with pytest.raises(ValueError, match=message):
        hki.add_adapter(params, 0, method, targets=f"layer/{target}", **options)
