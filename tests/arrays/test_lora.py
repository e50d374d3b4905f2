"""LoRA's rules against the dense weight, by other means than LoRA's own `materialize`."""

import dataclasses

import chex
import haiku as hk
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import haiku_implicit as hki
from haiku_implicit.core.sharding import shard_specs
from tests.random_arrays import numpy_normal

N, M, K = 5, 3, 4  # all different, so that no axis can pass for another


@dataclasses.dataclass
class Halves(hki.ImplicitArray, core_ndim=2):
    """Stands for a quantized weight: `codes / 2`, with a rule for one product and for rows."""

    codes: hki.ArrayValue

    def compute_shape(self):
        return tuple(self.codes.shape)

    def compute_dtype(self):
        return jnp.dtype(jnp.float32)

    def materialize(self):
        return self.codes.astype(jnp.float32) / 2


@hki.primitive_handler("dot_general")
def dot_halves(primitive, x: jax.Array, w: Halves, **params):
    return primitive.bind(x, w.codes.astype(x.dtype), **params) / 2


@hki.primitive_handler("gather")
def gather_halves(primitive, w: Halves, ids: jax.Array, **params):
    return primitive.bind(w.codes.astype(jnp.float32), ids, **params) / 2


@hki.primitive_handler("transpose")
def transpose_halves(primitive, w: Halves, **params):
    return Halves(primitive.bind(w.codes, **params))


def lora(shape=(N, M), *, rank=2, alpha=3.0, seed=0, dtype=jnp.float32, factors=None):
    *batch, n, m = shape
    factors = dtype if factors is None else factors
    a, b = (
        normal((*batch, n, rank), seed + 2, factors),
        normal((*batch, rank, m), seed + 3, factors),
    )
    return hki.LoRA(normal(shape, seed, dtype), a, b, alpha)


def normal(shape, seed=1, dtype=jnp.float32):
    # By NumPy and `device_put`: there is nothing to compile for each shape.
    return jax.device_put(numpy_normal(shape, seed, 0.5)).astype(dtype)


def scale_of(w):
    """`alpha / rank`, with the axes of the weight."""
    return jnp.asarray(w.scale)[..., None, None]


def dense(w, a=None, b=None):
    """The dense twin, with the factors as arguments for the chain rule."""
    a, b = (w.a, w.b) if a is None else (a, b)
    delta = jnp.einsum("...nr,...rm->...nm", a, b, precision="highest") * scale_of(w)
    return hki.materialize(w.w) + delta.astype(w.dtype)


def close(got, want, tolerance=2e-5):
    # Sums of a few float32 terms in another order: rounding in the seventh digit, and more after
    # cancellation.
    got, want = hki.materialize(got), hki.materialize(want)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=tolerance, atol=tolerance)


def loss_of(y):
    leaves = jax.tree.leaves(y)
    return sum(jnp.sum(jnp.sin(x)) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))


def quick_jit(fun):
    """`jax.jit` that compiles fast rather than well."""
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def check(fun, w, *xs):
    """`fun(w, *xs)` against the dense twin: eager, jit, grad, vmap and scan."""
    inexact = [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def everything(run, weight, w):
        """Of either kind, all in one program: compiling is what takes time here."""

        def loss(factors, *floats):
            mixed = list(xs)
            for i, x in zip(inexact, floats, strict=True):
                mixed[i] = x
            return loss_of(run(weight(w, *factors), *mixed))

        def at(w):
            return run(weight(w, w.a, w.b), *xs)

        grads = jax.grad(loss, range(len(inexact) + 1))((w.a, w.b), *(xs[i] for i in inexact))
        stack = stacked(w)
        scanned = jax.lax.scan(lambda c, w: (c, at(w)), 0, stack)[1]
        return at(w), grads, jax.vmap(at)(stack), scanned

    def implicit(*args):
        return hki.materialize(hki.use_implicit_args(fun)(*args))

    def scan_inside(w):
        scan = lambda ws: jax.lax.scan(lambda c, w: (c, fun(w, *xs)), 0, ws)[1]  # noqa: E731
        return hki.materialize(hki.use_implicit_args(scan)(stacked(w)))

    # The weight is an argument: XLA of jaxlib 0.7 folds some gathers of constants to wrong numbers,
    # `jit(lambda: vmap(lambda a: a[ids] * 1.5)(a))()` for one.
    def all_of_it(w):
        got = everything(implicit, lambda w, a, b: w._replace(a=a, b=b), w)
        return got, everything(fun, dense, w), scan_inside(w)

    got, want, scanned = quick_jit(all_of_it)(w)
    close(got, want)
    close(scanned, want[3])
    close(implicit(w, *xs), want[0])


def stacked(w):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), w)


def check_inner_vmap(fun, w, *xs):
    """`fun` vmapped inside the wrapped function, where the rules meet a batched weight."""
    fun = jax.vmap(fun, in_axes=(0, *[None] * len(xs)))
    close(hki.use_implicit_args(fun)(stacked(w), *xs), fun(dense(stacked(w)), *xs))


# --- products ------------------------------------------------------------------------------------

DOTS = {
    "x @ w": (lambda w, x: x @ w, (N, M), (K, N)),
    "vector @ w": (lambda w, x: x @ w, (N, M), (N,)),
    "x @ w.T": (lambda w, x: x @ w.T, (N, M), (K, M)),
    "w @ x": (lambda w, x: w @ x, (N, M), (M, K)),
    "w @ vector": (lambda w, x: w @ x, (N, M), (M,)),
    "w.T @ x": (lambda w, x: w.T @ x, (N, M), (N, K)),
    "middle axis of x": (lambda w, x: jnp.einsum("bnk,nm->bkm", x, w), (N, M), (2, N, K)),
    "w first, free axes": (lambda w, x: jnp.einsum("nm,bnk->mbk", w, x), (N, M), (2, N, K)),
    "batched": (lambda w, x: x @ w, (2, N, M), (2, K, N)),
    "batched, w first": (lambda w, x: w @ x, (2, N, M), (2, M, K)),
    "batch axes, swapped": (
        lambda w, x: jnp.einsum("bckn,cbnm->cbkm", x, w),
        (2, 3, N, M),
        (3, 2, K, N),
    ),
    "batched, by columns": (lambda w, x: jnp.einsum("kbm,bnm->bnk", x, w), (2, N, M), (K, 2, M)),
}  # fmt: skip
EINSUMS = {
    "free leading axis": ("kn,bnm->bkm", (2, N, M), (K, N)),
    "contracted leading axis": ("kbn,bnm->km", (2, N, M), (K, 2, N)),
    "both contracted": ("nmk,nm->k", (N, M), (N, M, K)),
    "all contracted": ("bnm,bnm->", (2, N, M), (2, N, M)),
    "none contracted": ("k,nm->knm", (N, M), (K,)),
    "rows as batch": ("nk,nm->nkm", (N, M), (N, K)),
    "columns as batch": ("km,nm->mnk", (N, M), (K, M)),
    "batch and leading free": ("cnk,bcnm->cbkm", (2, 3, N, M), (3, N, K)),
}


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name, alpha", [*((name, 3.0) for name in DOTS), ("x @ w", None)])
def test_dot(name, alpha):
    fun, w, x = DOTS[name]
    check(fun, lora(w, alpha=alpha), normal(x))


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", EINSUMS)
def test_dot_of_other_axes(name):
    equation, w, x = EINSUMS[name]
    x_axes, w_axes, out = equation.replace("->", ",").split(",")
    check(lambda w, x: jnp.einsum(equation, x, w), lora(w), normal(x))
    close(
        hki.use_implicit_args(lambda w, x: jnp.einsum(f"{w_axes},{x_axes}->{out}", w, x))(
            lora(w), normal(x)
        ),
        jnp.einsum(equation, normal(x), dense(lora(w))),
    )


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("equation", ["ka,ahc->khc", "ahc,ka->hck"])
def test_weights_of_attention_heads_cost_one_product(equation):
    """The matrices of `[a, h, c]` are `[h, c]`: `x · a · b` would be two more products with `w`."""
    w, x = lora((16, 4, 8)), normal((32, 16))
    pair = (lambda w: (x, w)) if equation.startswith("k") else (lambda w: (w, x))
    flops = [
        quick_jit(hki.use_implicit_args(lambda w: jnp.einsum(equation, *pair(w))))
        .lower(v).compile().cost_analysis()["flops"]
        for v in (w, w.w)
    ]  # fmt: skip
    assert flops[0] <= flops[1] + w.size * (2 * w.rank + 4)


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", ["x @ w", "w.T @ x", "batched"])
def test_dot_under_inner_vmap(name):
    fun, w, x = DOTS[name]
    check_inner_vmap(fun, lora(w), normal(x))


@st.composite
def dot_cases(draw):
    """Any shape of a weight, and any axes of it contracted or batch axes, in any order."""
    w_shape = tuple(draw(st.permutations([2, 3, 4, 5]))[: draw(st.integers(2, 4))])
    axes = draw(st.permutations(range(len(w_shape))))
    cut = sorted(draw(st.integers(0, len(axes))) for _ in range(2))
    contract, batch = axes[: cut[0]], axes[cut[0] : cut[1]]
    shared = [*contract, *batch]
    free = draw(st.lists(st.sampled_from([1, 6]), max_size=2))
    order = draw(st.permutations(range(len(shared) + len(free))))
    sizes = [*(w_shape[i] for i in shared), *free]
    x_shape = tuple(sizes[i] for i in order)
    place = [order.index(i) for i in range(len(shared))]
    x_contract, x_batch = place[: len(contract)], place[len(contract) :]
    return w_shape, x_shape, ((x_contract, contract), (x_batch, batch)), draw(st.booleans())


@hypothesis.settings(max_examples=12, derandomize=True)
@hypothesis.given(dot_cases())
@pytest.mark.slow
def test_dot_of_any_axes(case):
    w_shape, x_shape, numbers, w_first = case
    w, x = lora(w_shape), normal(x_shape)

    def fun(w, x):
        if w_first:
            swapped = tuple((right, left) for left, right in numbers)
            return jax.lax.dot_general(w, x, swapped)
        return jax.lax.dot_general(x, w, numbers)

    with hki.materialization("error"):
        got = quick_jit(hki.use_implicit_args(fun))(w, x)
    delta = np.einsum("...nr,...rm->...nm", w.a, w.b) * scale_of(w)
    want = quick_jit(fun)(w.w + delta, x)
    close(got, want, 1e-4)


@pytest.mark.combinations
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("out", [None, jnp.float32], ids=["as operands", "float32"])
@pytest.mark.parametrize(
    "x_dtype, w_dtype, factors",
    [("bfloat16",) * 3, ("bfloat16", "bfloat16", "float32"), ("float32", "float32", "bfloat16")],
)
@pytest.mark.parametrize("equation", ["kn,nm->km", "nm,nk->mk", "kbn,bnm->km"])
def test_dtypes(x_dtype, w_dtype, factors, out, equation):
    x_first = equation.startswith("k")
    w = lora((2, N, M) if "b" in equation else (N, M), dtype=w_dtype, factors=factors)
    x = normal(dict(n=(K, N), b=(K, 2, N), m=(N, K))[equation[1]], dtype=x_dtype)

    def fun(w, x):
        pair = (x, w) if x_first else (w, x)
        return jnp.einsum(equation, *pair, preferred_element_type=out)

    got = quick_jit(hki.use_implicit_args(fun))(w, x)
    assert got.dtype == jax.eval_shape(lambda: fun(dense(w), x)).dtype
    w, x = jax.tree.map(np.float32, (w, x))
    want = np.asarray(fun(w.w + w.scale * w.a @ w.b, x))
    # bfloat16 has 8 bits: a few roundings of operands and results, each of 2^-9 of a sum of terms.
    np.testing.assert_allclose(np.float32(got), want, atol=0.01 * np.abs(want).max() + 0.05)


@pytest.mark.usefixtures("never_dense")
def test_weight_of_eight_bits():
    w = lora(dtype=jnp.float8_e4m3fn, factors=jnp.bfloat16)
    x = normal((K, N), dtype=jnp.bfloat16)

    def fun(w, x):
        numbers = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(x, w, numbers, preferred_element_type=jnp.float32)

    got = hki.use_implicit_args(fun)(w, x)
    want = fun(jnp.float32(w.w) + w.scale * jnp.float32(w.a) @ jnp.float32(w.b), jnp.float32(x))
    close(got, want, 0.02)  # bfloat16 has 8 bits; float8 has 4, which would be off by 0.1


@pytest.mark.usefixtures("never_dense")
def test_factors_are_more_precise_than_the_weight():
    # A correction too small for the weight's own dtype still counts in a product.
    w = lora(dtype=jnp.bfloat16, factors=jnp.float32)
    w = w._replace(w=jnp.zeros((N, M), jnp.bfloat16))
    x = normal((K, N))
    got = hki.use_implicit_args(lambda w, x: x @ w)(w, x)
    close(got, x @ (w.scale * w.a @ w.b))


@pytest.mark.parametrize("precision", ["highest", ("default", "highest"), "F32_F32_F32"])
def test_precision_is_kept(precision):
    if precision == "F32_F32_F32":
        precision = jax.lax.DotAlgorithmPreset.F32_F32_F32
    fun = hki.use_implicit_args(lambda w, x: jnp.matmul(x, w, precision=precision))
    jaxpr = jax.make_jaxpr(fun)(lora(), normal((K, N)))
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    plain = jax.make_jaxpr(lambda x, w: jnp.matmul(x, w, precision=precision))(
        normal((K, N)), normal((N, M))
    )
    assert len(dots) == 3
    assert {str(e.params["precision"]) for e in dots} == {str(plain.eqns[0].params["precision"])}


@pytest.mark.usefixtures("may_be_dense")
def test_dot_of_two():
    u, w = lora((K, N)), lora((N, M), seed=5)
    close(hki.use_implicit_args(jnp.matmul)(u, w), dense(u) @ dense(w))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("w_first", [False, True])
def test_dot_with_out_sharding(w_first):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    equation, x = ("nm,nk->mk", normal((N, K))) if w_first else ("kn,nm->km", normal((K, N)))

    def fun(w, x):
        pair = (w, x) if w_first else (x, w)
        return jnp.einsum(equation, *pair, out_sharding=P("i", None))

    in_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh
    with in_mesh(mesh):
        got = jax.jit(hki.use_implicit_args(fun))(lora(), x)
        close(got, fun(dense(lora()), x))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("alpha", [None, 4.0], ids=["scale 1", "scale 2"])
def test_as_cheap_as_by_hand(alpha):
    w, x = lora((64, 48), alpha=alpha), normal((32, 64))

    def by_hand(w, x):
        t = x @ w.a if alpha is None else (x @ w.a) * w.scale
        return jnp.sum(jnp.sin(x @ w.w + t @ w.b))

    implicit = hki.use_implicit_args(lambda w, x: jnp.sum(jnp.sin(x @ w)))

    def flops(fun):
        return jax.jit(jax.grad(fun)).lower(w, x).compile().cost_analysis()["flops"]

    assert flops(implicit) == flops(by_hand)
    sizes = [v.aval.size for e in jax.make_jaxpr(implicit)(w, x).eqns for v in e.outvars]
    assert max(sizes) < 64 * 48


K3 = dict(output_channels=4, kernel_shape=3)
CONVS = {
    "1-d": (K3, hk.Conv1D, (2, 8, 3)),
    "2-d, strides": (dict(K3, stride=2), hk.Conv2D, (2, 8, 8, 3)),
    "3-d": (dict(output_channels=2, kernel_shape=2), hk.Conv3D, (1, 4, 4, 4, 3)),
    "grouped": (dict(K3, feature_group_count=2), hk.Conv2D, (1, 6, 6, 4)),
    "channels first": (dict(K3, data_format="NCHW"), hk.Conv2D, (1, 3, 6, 6)),
    "transposed": (dict(K3, stride=2), hk.Conv2DTranspose, (1, 5, 5, 3)),
    "transposed 1-d": (dict(K3, stride=2), hk.Conv1DTranspose, (1, 5, 3)),
}


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name, nested", [*((name, False) for name in CONVS), ("grouped", True)])
def test_conv(name, nested):
    options, module, shape = CONVS[name]
    net = hk.without_apply_rng(hk.transform(lambda x: module(**options)(x)))
    x = normal(shape)
    (path, params), *_ = net.init(jax.random.key(0), x).items()
    w = lora(params["w"].shape)
    if nested:
        w = w._replace(w=Halves(jnp.round(4 * w.w).astype(jnp.int8)))

    def loss(factors, x, weight):
        params_ = {path: {**params, "w": weight(factors)}}
        return loss_of(hki.use_implicit_args(net.apply)(params_, x))

    implicit = jax.value_and_grad(
        lambda f, x: loss(f, x, lambda f: w._replace(a=f[0], b=f[1])), (0, 1)
    )
    wanted = jax.value_and_grad(lambda f, x: loss(f, x, lambda f: dense(w, *f)), (0, 1))
    got, want = quick_jit(lambda *args: (implicit(*args), wanted(*args)))((w.a, w.b), x)
    close(got, want, 2e-4)


# --- parts ---------------------------------------------------------------------------------------

IDS = jax.device_put(np.array([[0, 4, 2], [1, 1, -1]], np.int32))
PARTS = {
    "rows": lambda w, ids: w[ids],
    "columns": lambda w, ids: w[:, ids % M],
    "rows of the transpose": lambda w, ids: w.T[ids % M],
    "columns of the transpose": lambda w, ids: w.T[:, ids],
    "take": lambda w, ids: jnp.take(w, ids, axis=0),
    "take columns": lambda w, ids: jnp.take(w, ids % M, axis=1),
    "take, clip": lambda w, ids: jnp.take(w, ids * 3, axis=0, mode="clip"),
    "take, wrap": lambda w, ids: jnp.take(w, ids * 3, axis=0, mode="wrap"),
    "take, fill 7": lambda w, ids: jnp.take(w, ids * 3, axis=0, mode="fill", fill_value=7.0),
    "one row": lambda w, ids: w[1],
    "one column": lambda w, ids: w[:, 2],
    "one element": lambda w, ids: w[1, 2],
    "row of an index": lambda w, ids: w[ids[0, 1]],
    "block": lambda w, ids: jax.lax.slice(w, (1, 0), (4, M), (1, 2)),
    "block of an index": lambda w, ids: jax.lax.dynamic_slice(w, (ids[0, 1], ids[0, 0]), (2, 2)),
    "split rows": lambda w, ids: jnp.split(w, [2], axis=0),
    "split columns": lambda w, ids: jnp.split(w, [1, 2], axis=1),
    "transpose": lambda w, ids: w.T,
    "sum of rows": lambda w, ids: w.sum(0),
    "sum of columns": lambda w, ids: w.sum(1, keepdims=True),
    "sum": lambda w, ids: w.sum(),
    "mean": lambda w, ids: w.mean(0),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    check(PARTS[name], lora(), IDS)


@pytest.mark.usefixtures("never_dense")
def test_rows_filled_with_nan():
    w, ids = lora(), jnp.array([1, 7, 2])

    def taken(w):
        return jnp.take(w, ids, axis=0)

    got = hki.use_implicit_args(taken)(w)
    assert np.isnan(got[1]).all()
    close(got[::2], taken(dense(w))[::2])
    # The rows out of bounds reach no gradient, though they are NaN.
    loss = hki.use_implicit_args(lambda w: jnp.nansum(taken(w) * normal((3, M))))
    grads = jax.grad(lambda a, b: loss(w._replace(a=a, b=b)), (0, 1))
    wants = jax.grad(lambda a, b: loss(dense(w, a, b)), (0, 1))
    close(jax.jit(grads)(w.a, w.b), jax.jit(wants)(w.a, w.b))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize(
    "name", ["rows", "columns", "take", "row of an index", "block of an index"]
)
def test_parts_under_inner_vmap(name):
    if name == "block of an index":  # a gather of blocks, with neither all rows nor all columns
        pytest.raises(hki.MaterializationError, check_inner_vmap, PARTS[name], lora(), IDS)
        with hki.materialization("allow"):
            return check_inner_vmap(PARTS[name], lora(), IDS)
    return check_inner_vmap(PARTS[name], lora(), IDS)


@pytest.mark.usefixtures("never_dense")
def test_rows_of_batched_ids():
    w, ids = lora((2, N, M)), IDS
    fun = jax.vmap(lambda w, ids: w[ids])
    close(hki.use_implicit_args(fun)(w, ids), fun(dense(w), ids))
    fun = jax.vmap(lambda w, ids: w[:, ids % M], in_axes=(0, 0), out_axes=1)
    close(hki.use_implicit_args(fun)(w, ids), fun(dense(w), ids))


STAYS = {
    "rows": lambda w: w[1:3],
    "columns": lambda w: w[:, 1:],
    "transpose": lambda w: w.T,
    "dynamic rows": lambda w: jax.lax.dynamic_slice_in_dim(w, 1, 2, 0),
    "plus number": lambda w: w + 1.5,
    "plus dense": lambda w: w + jnp.arange(15.0).reshape(N, M),
    "plus row": lambda w: jnp.arange(3.0) + w,
    "minus dense": lambda w: w - jnp.arange(15.0).reshape(N, M),
    "dense minus": lambda w: 1.5 - w,
    "minus": lambda w: -w,
    "times number": lambda w: 1.5 * w,
    "times row": lambda w: w * jnp.arange(3.0),
    "times column": lambda w: w * jnp.arange(5.0)[:, None],
    "over number": lambda w: w / 1.5,
    "over row": lambda w: w / jnp.arange(1.0, 4.0),
    "float16": lambda w: w.astype(jnp.float16),
    "centered": lambda w: w - w.mean(0),
}


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", STAYS)
def test_stays_lora(name):
    fun, w = STAYS[name], lora()
    got, want = hki.use_implicit_args(fun)(w), fun(dense(w))
    assert isinstance(got, hki.LoRA)
    assert got.shape == want.shape
    close(got, want, 4e-3 if name == "float16" else 2e-5)  # float16 has 11 bits
    if name != "float16":
        check(fun, w)


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("permutation", [(1, 0, 2, 3), (1, 0, 3, 2), (0, 1, 3, 2)])
def test_leading_axes_in_any_order(permutation):
    w = lora((2, 4, N, M))
    got = hki.use_implicit_args(lambda w: w.transpose(permutation))(w)
    assert isinstance(got, hki.LoRA)
    close(got, dense(w).transpose(permutation))


# --- an implicit w, shardings, the constructor ---------------------------------------------------


def nested():
    w = lora()
    return w._replace(w=Halves(jnp.round(4 * w.w).astype(jnp.int8)))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: x @ w,
        lambda w, x: x[:, :M] @ w.T,
        lambda w, x: w[IDS],
        lambda w, x: jax.jit(jnp.dot)(x, w),
    ],
)
def test_implicit_weight(fun):
    w, x = nested(), normal((K, N))
    close(hki.use_implicit_args(fun)(w, x), fun(dense(w), x))
    loss = hki.use_implicit_args(lambda w, x: loss_of(fun(w, x)))
    grads = jax.grad(lambda a, b: loss(w._replace(a=a, b=b), x), (0, 1))
    wants = jax.grad(lambda a, b: loss_of(fun(dense(w, a, b), x)), (0, 1))
    close(jax.jit(grads)(w.a, w.b), jax.jit(wants)(w.a, w.b))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("spec", [P(), P("i"), P(None, "i"), P("i", "j")])
def test_shard_map(spec):
    mesh = jax.make_mesh((1, 1), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    w, x = lora(), normal((K, N))

    def fun(w, x):
        by_rows = P(None, spec[0] if spec else None)
        body = lambda w, x: jax.lax.psum(x @ w, spec[0]) if spec and spec[0] else x @ w  # noqa: E731
        out = P(None, spec[1] if len(spec) > 1 else None)
        return jax.shard_map(body, mesh=mesh, in_specs=(spec, by_rows), out_specs=out)(w, x)

    close(hki.use_implicit_args(fun)(w, x), x @ dense(w))
    specs = shard_specs(lora((2, N, M)), P("i", "j"), mesh)
    assert (specs.a, specs.b) == (P("i", "j", None), P("i", None, None))


@pytest.mark.usefixtures("never_dense")
def test_sharding_constraint():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("i"))
    fun = jax.jit(hki.use_implicit_args(lambda w: jax.lax.with_sharding_constraint(w, sharding)))
    got = fun(lora())
    assert isinstance(got, hki.LoRA)
    close(got, dense(lora()))
    assert fun.lower(lora()).as_text().count("sharding_constraint") >= 3


def F(shape, dtype=np.float32):
    return jax.device_put(np.zeros(shape, dtype))


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ((F((3, 4)), F((3, 2)), F((3, 4))), ValueError, r"w \[3, 4\], a \[3, 2\], b \[3, 4\]"),
        ((F((3, 4)), F((4, 2)), F((2, 4))), ValueError, r"a \[4, 2\]"),
        ((F((2, 3, 4)), F((3, 2)), F((2, 4))), ValueError, "leading axes"),
        ((F((4,)), F((2,)), F((2,))), ValueError, r"w \[4\]"),
        ((F((3, 4)), F((3, 0)), F((0, 4))), ValueError, "rank r of 1 or more"),
        ((F((3, 4), jnp.int8), F((3, 2)), F((2, 4))), TypeError, "w must be .* got int8"),
        ((F((3, 4)), F((3, 2), jnp.int32), F((2, 4))), TypeError, "a must be .* got int32"),
        ((F((3, 4)), F((3, 2)), F((2, 4)), "2"), TypeError, "alpha"),
        ((F((3, 4)), F((3, 2)), F((2, 4)), float("nan")), ValueError, "alpha"),
    ],
)
def test_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        hki.LoRA(*fields)
