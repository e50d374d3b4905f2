"""`MatrixView`: tensors that are held as matrices, beside the contract for every type."""

import functools

import jax
import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.arrays import axes as axes_of
from tests import dense_twin
from tests.random_arrays import normal
from tests.tiers import few

SHAPE = (12, 4, 6)


def lora(w):
    a, b = normal((*w.shape[:-1], 2), 1), normal((*w.shape[:-2], 2, w.shape[-1]), 2)
    return hki.LoRA(w, a, b, alpha=3.0)


def int8(w):
    return hki.QuantizedMatrix.quantize(w, "int8")


def int4(w):
    return hki.QuantizedMatrix.quantize(w, "int4", group_size=4)


def awq(w):
    return hki.ScaledMatrix(int4(w), jnp.arange(1.0, w.shape[-2] + 1))


KINDS = {"lora": lora, "int4": int4, "lora of int4": lambda w: lora(int4(w)), "awq": awq}
# Axes of the tensor: those of the rows, and those of the columns.
HELD = {
    "inputs first": ([-3], [-2, -1]),
    "outputs last": ([-3, -2], [-1]),
    "apart": ([-2], [-3, -1]),
}


close = functools.partial(dense_twin.close, rtol=2e-6)
same_without_dense = functools.partial(dense_twin.same_without_dense, rtol=2e-6)


# Products that contract the rows, or the columns, of a matrix by one of the ways to hold it.
PRODUCTS = {
    "ba,ahc->bhc": "inputs first",
    "ba,ahc->cbh": "inputs first",
    "ahc,ab->hbc": "inputs first",
    "bch,ahc->ba": "inputs first",
    "hbc,ahc->ab": "inputs first",
    "bah,ahc->bc": "outputs last",
    "hba,ahc->cb": "outputs last",
    "bc,ahc->bah": "outputs last",
    "bh,ahc->bca": "apart",
    "cba,ahc->hb": "apart",
}


@pytest.mark.every(3)
@pytest.mark.combinations
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("equation", PRODUCTS)
def test_products(kind, equation):
    w = hki.MatrixView.of(normal(SHAPE), *HELD[PRODUCTS[equation]], KINDS[kind])
    letters = [own for own in equation.split("->")[0].split(",") if own != "ahc"][0]
    x = normal([dict(a=12, h=4, c=6, b=5)[i] for i in letters], 3)
    operands = (w, x) if equation.startswith("ahc") else (x, w)
    same_without_dense(lambda *xs: jnp.einsum(equation, *xs), *operands)


@pytest.mark.parametrize("equation", ["ba,ahc->bhc", "bch,ahc->ba"])
def test_gradients(equation):
    w = hki.MatrixView.of(normal(SHAPE), [-3], [-2, -1], lora)
    x = normal((5, 12) if equation.startswith("ba") else (5, 6, 4), 3)

    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.einsum(equation, x, w)))

    found = jax.jit(jax.grad(hki.use_implicit_args(loss), argnums=(0, 1)))(w, x)
    expected = jax.grad(lambda w, x: loss(hki.materialize(w), x), argnums=(0, 1))(w, x)
    jax.tree.map(lambda a, b: close(a, b, rtol=2e-5), found, expected)


@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_batch_axes(kind):
    """Stacked layers in a scan and under `vmap`, and as batch axes of one product."""
    w = hki.MatrixView.of(normal((3, *SHAPE)), [-3], [-2, -1], KINDS[kind])
    x = normal((3, 5, 12), 3)

    def scanned(w, x):
        return jax.lax.scan(lambda c, own: (c, jnp.einsum("ba,ahc->bhc", x[0], own)), 0, w)[1]

    assert w.shape == (3, *SHAPE) and w.core_ndim == 3
    same_without_dense(scanned, w, x)
    same_without_dense(lambda w, x: jnp.einsum("lba,lahc->lbhc", x, w), w, x)
    same_without_dense(lambda w, x: jnp.einsum("ba,ahc->bhc", x[1], w[1]), w, x)
    # (Older versions of JAX index every other matrix by a gather.)
    every_other = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=None, stride=2)
    same_without_dense(lambda w, x: every_other(w).transpose(0, 2, 1, 3)[1], w, x)
    mapped = jax.vmap(hki.use_implicit_args(lambda w, x: jnp.einsum("ba,ahc->bhc", x, w)))
    close(mapped(w, x), jnp.einsum("lba,lahc->lbhc", x, hki.materialize(w)))


REARRANGED = {
    "merged": lambda x, w: x @ w.reshape(12, 24),
    "split": lambda x, w: jnp.einsum("ba,ahkc->bkhc", x, w.reshape(12, 4, 2, 3)),
    "split across": lambda x, w: jnp.einsum("ba,ahkc->bkhc", x, w.reshape(12, 2, 2, 6)),
    "rows split": lambda x, w: jnp.einsum(
        "bst,sthc->bch", x.reshape(5, 3, 4), w.reshape(3, 4, 4, 6)
    ),
    "transposed": lambda x, w: x @ w.transpose(2, 1, 0).reshape(24, 12).T,
    "expanded": lambda x, w: jnp.einsum("ba,ahzc->zbhc", x, w[:, :, None]),
    "squeezed": lambda x, w: x @ w[:, :1, :].squeeze(1),
    "a head": lambda x, w: x @ w[:, 2],
    "heads": lambda x, w: jnp.einsum("ba,ahc->bhc", x, w[:, 1:3]),
    "rows": lambda x, w: jnp.einsum("ba,ahc->bhc", x[:, 4:], w[4:]),
    "parts": lambda x, w: [x @ v.reshape(12, -1) for v in jnp.split(w, [1, 3], axis=1)],
    "where it runs": lambda x, w: jnp.einsum(
        "ba,ahc->bhc", x, jax.lax.dynamic_slice_in_dim(w, jnp.int32(3), 2, axis=1)
    ),
    "times a number": lambda x, w: jnp.einsum("ba,ahc->bhc", x, -w * 3 / 7),
    "times heads": lambda x, w: jnp.einsum("ba,ahc->bhc", x, w * jnp.arange(1.0, 5)[:, None]),
    "times columns": lambda x, w: jnp.einsum("ba,ahc->bhc", x, w * x[:1, :6]),
    "standardized": lambda x, w: jnp.einsum(
        "ba,ahc->bhc",
        x,
        (w - w.mean(0))
        / jnp.sqrt(jnp.square(w - w.mean(0, keepdims=True)).mean(0, keepdims=True) + 0.1),
    ),
    "largest": lambda x, w: abs(w).max((1, 2)) + w.max(0).sum(),
    "in a jit": lambda x, w: jax.jit(lambda w: jnp.einsum("ba,ahc->bhc", x, w))(w),
}


@pytest.mark.every(3)
@pytest.mark.combinations
@pytest.mark.parametrize("kind", ["lora", "int8", "lora of int8"])
@pytest.mark.parametrize("name", REARRANGED)
def test_rearranged(kind, name):
    """Operations that keep rows and columns whole, or cut them between indices of their outermost parts."""
    make = {"lora": lora, "int8": int8, "lora of int8": lambda w: lora(int8(w))}[kind]
    w = hki.MatrixView.of(normal(SHAPE), [-3], [-2, -1], make)
    same_without_dense(REARRANGED[name], normal((5, 12), 3), w)


@pytest.mark.parametrize("kind", [lora, int8])
def test_matrices_whose_columns_are_split_become_views(kind):
    """AlphaFold 3 reshapes `[k, 2 * n]` before a gated unit."""
    w, x = kind(normal((12, 24))), normal((5, 12), 3)
    same_without_dense(lambda x, w: jnp.einsum("bk,kcn->cbn", x, w.reshape(12, 2, 12)), x, w)
    same_without_dense(lambda x, w: x @ w.reshape(12, 2, 12).reshape(12, 24), x, w)
    same_without_dense(
        lambda x, w: jnp.einsum("bsk,skn->bn", x.reshape(5, 3, 4), w.reshape(3, 4, 24)), x, w
    )
    back = hki.use_implicit_args(lambda w: w.reshape(12, 2, 12).reshape(12, 24))(w)
    assert type(back) is type(w)


@pytest.mark.usefixtures("may_be_dense")
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: jnp.einsum("bh,ahc->bac", x[:, :4], w),
        lambda x, w: w[:, :, 2],
        lambda x, w: w[:, ::2],
        lambda x, w: w.reshape(-1),
        lambda x, w: w.reshape(16, 18),
        lambda x, w: jnp.exp(w),
        lambda x, w: w + normal(SHAPE, 5),
        lambda x, w: w * x[0, :, None, None],
        lambda x, w: w[jnp.array([1, -1, 7])],
        lambda x, w: w.sum((0, 2)),
        lambda x, w: w @ w.transpose(0, 2, 1),
        lambda x, w: w.at[0].set(1),
    ],
)
def test_everything_else_is_right_as_well(fun):
    w = hki.MatrixView.of(normal(SHAPE), [-3], [-2, -1], lambda w: lora(int4(w)))
    x = normal((5, 12), 3)
    expected = dense_twin.on_twins(fun)(x, w)
    for run in (lambda f: f, jax.jit):
        close(hki.materialize(run(hki.use_implicit_args(fun))(x, w)), expected)


def test_one_lora_costs_what_lora_of_the_matrix_costs():
    x, w = normal((2, 64), 3), lora(normal((64, 128)))
    view = hki.MatrixView(w, axes_of.of_split([[64], [4, 32]], [0, 1, 2]))
    by_hand = jax.jit(hki.use_implicit_args(jnp.dot)).lower(x, w).compile()
    found = jax.jit(hki.use_implicit_args(lambda x, w: jnp.einsum("ba,ahc->bhc", x, w)))
    found = found.lower(x, view).compile()
    assert found.cost_analysis()["flops"] == by_hand.cost_analysis()["flops"]
    assert found.memory_analysis().temp_size_in_bytes < w.w.nbytes / 8


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([-3], [-1], "together the last axes"),
        ([0], [1, 2], "from the end"),
        ([-3], [], "together the last axes"),
        ([-3, -2], [-2, -1], "together the last axes"),
        ([-4], [-3, -2, -1], "4 axes, and the tensor has the shape"),
    ],
)
def test_axes_that_do_not_fit_are_an_error(inputs, outputs, message):
    with pytest.raises(ValueError, match=message):
        hki.MatrixView.of(normal(SHAPE), inputs, outputs, lora)


# --- gathers ---------------------------------------------------------------------------------------

IDS = jnp.array([2, 0, 3])
OUTSIDE = jnp.array([1, 9, -9])

# Of a tensor [4, 3, 6] or [2, 4, 3, 6]. The rows of the matrix are the first two axes of the last three,
# the first one, or the last one; the columns are the others.
GATHERS = {
    "outermost": lambda w: w[IDS],
    "in a tuple": lambda w: w[(IDS,)],
    "inner": lambda w: w[:, IDS % 3],
    "last": lambda w: w[..., IDS],
    "of two axes": lambda w: w[IDS, IDS % 3],
    "many": lambda w: w[jnp.stack([IDS, IDS])],
    "within": lambda w: w.at[IDS].get(mode="promise_in_bounds"),
    "clipped": lambda w: w.at[OUTSIDE].get(mode="clip"),
    "filled": lambda w: jnp.nan_to_num(w.at[OUTSIDE].get(mode="fill"), nan=7.0),
    "filled with a number": lambda w: w.at[OUTSIDE].get(mode="fill", fill_value=0.5),
    "narrow": lambda w: w[IDS.astype(jnp.uint8)],
    "wrapped around": lambda w: w[-IDS],
    "taken": lambda w: jnp.take(w, IDS, axis=0) + jnp.take(w, IDS, axis=-3),
    "windows": lambda w: jax.vmap(lambda i: jax.lax.dynamic_slice_in_dim(w, i, 2))(IDS),
    "each its own": lambda w: jax.vmap(lambda i: w[i])(IDS),
    "along the inner axis": lambda w: jax.vmap(lambda v, i: v[i])(
        w, IDS[jnp.array([0, 1, 2, 0])] % 3
    ),
    "along the outermost axis": lambda w: jax.vmap(lambda v, i: v[i], (1, 0))(w, IDS),
    "along it, filled": lambda w: jax.vmap(
        lambda v, i: v.at[i].get(mode="fill", fill_value=0.5), (1, 0)
    )(w, OUTSIDE),
    "of one": lambda w: w[1:2][IDS * 0],
    "of one, filled": lambda w: w[1:2].at[OUTSIDE].get(mode="fill", fill_value=0.5),
    "two at a time": lambda w: jax.vmap(lambda i: w[i], out_axes=1)(jnp.stack([IDS, IDS])),
}
BATCHED = {
    "both": lambda w: w[IDS % 2, IDS],
    "second": lambda w: w[:, IDS],
    "mapped": lambda w: jax.vmap(lambda w: w[IDS])(w),
    "mapped with indices": lambda w: jax.vmap(lambda w, i: w[i])(w, jnp.stack([IDS, 3 - IDS])),
    "mapped last": lambda w: jax.vmap(lambda w: w[:, IDS % 3], out_axes=-1)(w),
}
VIEWS = {
    "rows split": ((12, 6), "rows"),
    "columns split": ((4, 18), "rows"),
    "transposed": ((6, 12), "columns"),
}


def viewed(matrix, transposed, batch=()):
    """A matrix as a tensor [..., 4, 3, 6]."""
    w = jnp.swapaxes(matrix, -1, -2) if transposed else matrix
    return w.reshape(*batch, 4, 3, 6)


def same_gather(kind, held, gather, batch=(), dense=()):
    """Numbers as of the dense tensor, eagerly and compiled; arrays of these types become dense."""
    shape, order = VIEWS[held]
    make = {"lora": lora, "int8": int8}.get(kind, int4_pairs)
    w, use = make(normal((*batch, *shape))), hki.use_implicit_args

    def fun(w):
        return gather(viewed(w, order == "columns", batch))

    expected = dense_twin.on_twins(fun)(w)
    with hki.materialization_report() as report, hki.materialization("allow"):
        for run in (lambda f: f, jax.jit):
            close(hki.materialize(run(use(fun))(w)), expected)
        if kind == "lora":
            got, want = (
                jax.grad(lambda w, f=f: jnp.sum(hki.materialize(f(w)) ** 2))(w)
                for f in (use(fun), dense_twin.on_twins(fun))
            )
            jax.tree.map(functools.partial(dense_twin.close, rtol=2e-5), got, want)
    assert {event.type_name for event, _ in report} == set(dense)


def int4_pairs(w):
    return hki.QuantizedMatrix.quantize(w, "int4", group_size=2)


ROWS_AND_COLUMNS = [
    ("columns split", name)
    for name in (
        "of two axes",
        "along the inner axis",
        "along the outermost axis",
        "along it, filled",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "held, gather",
    few(
        [(held, gather) for held in VIEWS for gather in GATHERS],
        ("columns split", "outermost"),
        ("transposed", "filled"),
    ),
)
def test_gathers(held, gather):
    """Whole rows, or whole columns, of the matrix are gathered; parts of both from the dense array."""
    for kind in ("lora", "int8", "int4"):
        dense = ["MatrixView"] if (held, gather) in ROWS_AND_COLUMNS else []
        same_gather(kind, held, GATHERS[gather], dense=dense)


@pytest.mark.slow
@pytest.mark.parametrize("held", VIEWS)
@pytest.mark.parametrize("gather", BATCHED)
def test_gathers_from_stacked_matrices(held, gather):
    for kind in ("lora", "int8"):
        # LoRA has no rule for rows of some of its matrices.
        dense = ["LoRA"] if (kind, gather) == ("lora", "both") else []
        same_gather(kind, held, BATCHED[gather], batch=(2,), dense=dense)
