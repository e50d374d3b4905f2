"""`jax.lax.ragged_dot` with implicit weights `[groups, k, n]`, against the dense twin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import numpy_normal
from tests.tiers import few

use = hki.use_implicit_args

K, N = 16, 6
SIZES = np.array([2, 0, 4], np.int32)  # of 7 rows: the last one is in no group
ROWS, GROUPS = 7, 3


def normal(seed, *shape):
    return jax.device_put(numpy_normal(shape, seed))


def quantized(dtype, **options):
    return lambda w: hki.QuantizedMatrix.quantize(w, dtype, **options)


def lora(base):
    def make(w):
        *lead, k, n = w.shape
        alpha = jnp.abs(normal(4, *lead)) + 1  # of each matrix its own
        return hki.LoRA(base(w), normal(5, *lead, k, 2), normal(6, *lead, 2, n), alpha=alpha)

    return make


def scaled(axis):
    def make(w):
        scale = jnp.abs(normal(7, *w.shape[:-2], w.shape[axis])) + 0.5
        return hki.ScaledMatrix(quantized("int8")(w), scale, axis)

    return make


WEIGHTS = {
    "int8": quantized("int8"),
    "int8, one scale": quantized("int8", group_size="tensor"),
    "int4": quantized("int4", group_size=4),
    "int4 along the last axis": quantized("int4", group_size=2, axis=-1, zero_point=True),
    "nf4 with double scales": quantized("nf4", group_size=4, scale_dtype="double"),
    "fp8": quantized("fp8_e4m3"),
    "nvfp4": quantized("nvfp4"),
    "lora": lora(lambda w: w),
    "lora of lora": lora(lora(lambda w: w)),
    "lora of int4": lora(quantized("int4", group_size=4)),
    "fake int8": lambda w: hki.FakeQuantized(w, (("dtype", "int8"),)),
    "scaled rows": scaled(-2),
    "scaled columns": scaled(-1),
}
FAST = ["int8", "int4", "lora", "lora of int4"]


def weight(name, lead=(GROUPS,)):
    return WEIGHTS[name](normal(1, *lead, K, N))


def close(got, want):
    """Sums of a few float32 terms in another order."""
    got, want = hki.materialize((got, want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4), got, want)


def same(fun, *args):
    """A function of implicit arrays against the dense twin, eagerly and compiled."""
    want = jax.jit(fun)(*hki.materialize(args))
    close(use(fun)(*args), want)
    close(jax.jit(use(fun))(*args), want)


def of_numbers(fun, w):
    """A function of the float32 leaves of `w` (factors, scales), and these."""
    leaves, treedef = jax.tree.flatten(w)
    floats = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32]

    def with_numbers(numbers):
        new = list(leaves)
        for i, x in zip(floats, numbers, strict=True):
            new[i] = x
        return fun(treedef.unflatten(new))

    return with_numbers, [leaves[i] for i in floats]


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", few(WEIGHTS, *FAST))
def test_each_row_meets_the_matrix_of_its_group(name):
    x, w = normal(0, ROWS, K), weight(name)
    found = jax.jit(use(jax.lax.ragged_dot))(x, w, SIZES)
    dense = np.asarray(hki.materialize(w))
    ends = np.cumsum(SIZES)
    parts = [np.asarray(x)[end - n : end] @ m for n, end, m in zip(SIZES, ends, dense, strict=True)]
    close(found, np.concatenate([*parts, np.zeros((ROWS - ends[-1], N))]))


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", few(WEIGHTS, *FAST))
def test_eager_and_compiled_values_and_gradients(name):
    """The gradients with respect to the rows, and to all factors and scales."""
    x, w, mix = normal(0, ROWS, K), weight(name), normal(3, ROWS, N)
    same(jax.lax.ragged_dot, x, w, SIZES)

    def loss(run):
        def of_numbers_and_rows(numbers, x):
            fun, _ = of_numbers(lambda w: jnp.sum(jnp.sin(run(x, w, SIZES)) * mix), w)
            return fun(numbers)

        return jax.jit(jax.grad(of_numbers_and_rows, (0, 1)))

    numbers = of_numbers(None, w)[1]
    dense = loss(lambda x, w, sizes: jax.lax.ragged_dot(x, hki.materialize(w), sizes))
    close(loss(use(jax.lax.ragged_dot))(numbers, x), dense(numbers, x))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", few(WEIGHTS, "int4", "lora"))
def test_differentiated_inside(name):
    """The transposed product, with respect to the rows, is a ragged product along the other axis."""
    x, w, mix = normal(0, ROWS, K), weight(name), normal(3, ROWS, N)

    def gradient(x, w):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.lax.ragged_dot(x, w, SIZES)) * mix))(x)

    same(gradient, x, w)


@pytest.mark.every(2)
@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", few(WEIGHTS, "int4", "lora of int4"))
def test_in_vmap_and_scan(name):
    """JAX batches all three operands, or none."""
    x, w = normal(0, 2, ROWS, K), weight(name, (2, GROUPS))
    sizes = jnp.stack([SIZES, np.array([0, 6, 1], np.int32)])

    def scanned(x, w, sizes):
        return jax.lax.scan(lambda c, xs: (c, jax.lax.ragged_dot(*xs)), 0, (x, w, sizes))[1]

    same(jax.vmap(jax.lax.ragged_dot), x, w, sizes)
    same(scanned, x, w, sizes)
    outside = jax.vmap(use(jax.lax.ragged_dot))
    close(jax.jit(outside)(x, w, sizes), scanned(x, hki.materialize(w), sizes))


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", few(WEIGHTS, "int4"))
def test_a_batch_differentiated_inside(name):
    x, w = normal(0, 2, ROWS, K), weight(name, (2, GROUPS))
    sizes = jnp.stack([SIZES, np.array([0, 6, 1], np.int32)])

    def gradient(x, w):
        return jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(jax.lax.ragged_dot)(x, w, sizes))))(x)

    same(gradient, x, w)


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize(
    "sizes", [[0, 0, 0], [7, 0, 0], [0, 0, 7], [1, 1, 1], [3, 3, 3], [9, 9, 9], [2, 3, 2]], ids=str
)
def test_any_sizes(sizes):
    """Also more than there are rows."""
    x, w = normal(0, ROWS, K), weight("int4")
    sizes = jnp.array(sizes)
    close(
        jax.jit(use(jax.lax.ragged_dot))(x, w, sizes),
        jax.lax.ragged_dot(x, hki.materialize(w), sizes),
    )


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("rows", few([0, 1, 2, 3, 4, 200], 0, 1, 200))
def test_any_number_of_rows(rows):
    x, w = normal(0, rows, K), weight("int8")
    sizes = jnp.array([rows // 2, 0, rows - rows // 2])
    same(jax.lax.ragged_dot, x, w, sizes)


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("name", FAST)
def test_dtypes_and_precision(name):
    x, w = normal(0, ROWS, K), weight(name)
    options = dict(precision="highest", preferred_element_type=jnp.float32)
    run = functools.partial(jax.lax.ragged_dot, **options)
    half = use(lambda x, w: run(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), SIZES))(x, w)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(
        half, jax.lax.ragged_dot(x, hki.materialize(w), SIZES), rtol=0.1, atol=0.3
    )
    same(lambda x, w: run(x, w, SIZES), x, w)
    text = str(jax.make_jaxpr(use(run))(x, w, SIZES))
    products = text.count("ragged_dot_general[") + text.count("quantized_matmul[")
    assert products and text.count("HIGHEST") >= products


@pytest.mark.usefixtures("never_dense")
@pytest.mark.parametrize("activation", few(["int8", "int8,groups", "int4"], "int8"))
def test_activations_are_rounded_row_by_row(activation):
    """As in a product of each group's rows with its matrix alone."""
    x, w = normal(0, ROWS, K), weight("int4").with_activation(activation)
    found = jax.jit(use(jax.lax.ragged_dot))(x, w, SIZES)
    close(found[:2], use(jnp.matmul)(x[:2], jax.tree.map(lambda leaf: leaf[0], w)))
    close(found[2:6], use(jnp.matmul)(x[2:6], jax.tree.map(lambda leaf: leaf[2], w)))
    assert np.abs(found - use(jax.lax.ragged_dot)(x, weight("int4"), SIZES)).max() > 1e-3


@pytest.mark.usefixtures("never_dense")
def test_memory():
    """No dense weight, and neither codes for each tile nor rows for each group, also for a gradient."""
    w = jax.jit(lora(quantized("int4", group_size=32)))(normal(1, 16, 64, 128))
    x, sizes = normal(0, 64, 64), jnp.full(16, 4, jnp.int32)

    def loss(factors, x, w, sizes):
        whole = w._replace(a=factors[0], b=factors[1])
        return jnp.sum(use(jax.lax.ragged_dot)(x, whole, sizes) ** 2)

    args = (w.a, w.b), x, w, sizes
    memory = jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().memory_analysis()
    rows = 4 * len(x) * (64 + 128)
    assert memory.temp_size_in_bytes < 3 * w.w.nbytes + 4 * rows


@pytest.mark.usefixtures("never_dense")
def test_zeros_annihilate():
    x, zeros = normal(0, ROWS, K), hki.Zeros(shape=(GROUPS, K, N))
    found = use(jax.lax.ragged_dot)(x, zeros, SIZES)
    assert isinstance(found, hki.Zeros) and found.shape == (ROWS, N)
    found = use(jax.lax.ragged_dot)(hki.Zeros(shape=(ROWS, K)), weight("lora"), SIZES)
    assert isinstance(found, hki.Zeros) and found.shape == (ROWS, N)


def test_a_constant_is_the_one_that_becomes_dense():
    ones = hki.SymbolicConstant(1.0, shape=(ROWS, K), dtype=jnp.float32)
    w = weight("int4")
    with hki.materialization("allow"), hki.materialization_report() as report:
        found = use(jax.lax.ragged_dot)(ones, w, SIZES)
    assert {event.type_name for event, _ in report} == {"SymbolicConstant"}
    close(found, jax.lax.ragged_dot(jnp.ones((ROWS, K)), hki.materialize(w), SIZES))


MODES = {
    # [m, k], [k, n] -> [g, m, n]: the groups are parts of the contracted axis.
    "contracted": jax.lax.RaggedDotDimensionNumbers((((0,), (1,)), ((), ())), (0,), ()),
    # [b, m, k], [b, k, n] -> [b, m, n]: of a batch axis.
    "batch": jax.lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ()),
    # [m, k], [k, g, n]: the groups are rows of the stored matrices.
    "rows": jax.lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (0,), (1,)),
    # [m, k, l], [g, k, l]: no axis of the matrices is left.
    "both": jax.lax.RaggedDotDimensionNumbers((((1, 2), (1, 2)), ((), ())), (0,), (0,)),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["int8", "lora", "scaled rows"])
def test_other_modes_are_left_to_the_dense_weight(name, mode, may_be_dense):
    shapes = {
        "contracted": ((ROWS, 5), (N, ROWS)),
        "batch": ((GROUPS, ROWS, K), (GROUPS, K, N)),
        "rows": ((ROWS, K), (K, GROUPS, N)),
        "both": ((ROWS, K, N), (GROUPS, K, N)),
    }
    of_x, of_w = shapes[mode]
    x, w = normal(0, *of_x), WEIGHTS[name](normal(1, *of_w))
    run = functools.partial(
        jax.lax.ragged_dot_general, group_sizes=SIZES, ragged_dot_dimension_numbers=MODES[mode]
    )
    same(lambda x, w: run(x, w), x, w)
