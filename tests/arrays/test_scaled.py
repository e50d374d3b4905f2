"""`ScaledMatrix`: a factor for each row or column of a matrix, beside the contract for every type."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import haiku_implicit as hki
from haiku_implicit.core import compat
from haiku_implicit.core.sharding import shard_specs
from tests.random_arrays import numpy_normal as normal


def scaled(axis, shape=(6, 4), matrix=None):
    matrix = jnp.asarray(normal(shape)) if matrix is None else matrix
    of_scale = (*shape[:-2], shape[axis])
    return hki.ScaledMatrix(matrix, jnp.asarray(np.exp(normal(of_scale, 1))), axis)


def dense(w):
    """The definition."""
    scale = np.asarray(w.scale)
    matrix = np.asarray(hki.materialize(w.matrix), np.float32)
    return matrix * (scale[..., None] if w.axis == -2 else scale[..., None, :])


def close(a, b, rtol=1e-5):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


AXES = pytest.mark.parametrize("axis", [-2, -1])

# Products in which the scaled axes are contracted, free or batch axes, with the weight in either place.
PRODUCTS = {
    "bn,nm->bm": [(5, 6), (6, 4)],
    "bm,nm->bn": [(5, 4), (6, 4)],
    "nm,nb->mb": [(6, 4), (6, 5)],
    "abn,nm->abm": [(2, 5, 6), (6, 4)],
    "sbn,snm->sbm": [(3, 5, 6), (3, 6, 4)],
    "snm,smb->nsb": [(3, 6, 4), (3, 4, 5)],
    "bsn,snm->bm": [(5, 3, 6), (3, 6, 4)],
    "abmn,stnm->abst": [(2, 5, 4, 6), (3, 2, 6, 4)],
    "an,nm->nma": [(5, 6), (6, 4)],
    "bn,snm->bsm": [(5, 6), (3, 6, 4)],
}


@pytest.mark.every(3)
@pytest.mark.combinations
@AXES
@pytest.mark.parametrize("equation", PRODUCTS)
def test_products(axis, equation):
    letters = equation.split("->")[0].split(",")
    place = next(i for i, own in enumerate(letters) if "nm" in own)
    shapes = PRODUCTS[equation]
    x, w = normal(shapes[1 - place], 2), scaled(axis, shapes[place])

    def product(x, w):
        return jnp.einsum(equation, *((w, x) if place == 0 else (x, w)), precision="highest")

    operands = (dense(w), x) if place == 0 else (x, dense(w))
    want = np.einsum(equation, *operands)
    run = hki.use_implicit_args(product)
    # Some scales of stacks neither the operand nor the result can take: the weight is made dense.
    stacks = {"bn,snm->bsm": [-2], "bsn,snm->bm": [-1], "abmn,stnm->abst": [-2, -1]}
    with hki.materialization("allow" if axis in stacks.get(equation, []) else "error"):
        close(run(x, w), want)
        close(jax.jit(run)(x, w), want)
        close(jax.vmap(run, (0, None))(np.stack([x, -x]), w), np.stack([want, -want]))
        weights = np.cos(np.arange(want.size)).reshape(want.shape).astype(np.float32)
        grad = jax.grad(lambda x: jnp.sum(weights * run(x, w)))(x)
    want = jax.grad(lambda x: jnp.sum(weights * product(x, dense(w))))(x)
    close(grad, want)


@AXES
def test_scan_over_a_stack(axis, never_dense):
    w, x = scaled(axis, (3, 4, 4)), normal((5, 4), 2)

    @hki.use_implicit_args
    def loop(w, x):
        return jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), h @ v.T), x, w)

    got = jax.jit(loop)(w, x)
    want = jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), h @ v.T), x, jnp.asarray(dense(w)))
    jax.tree.map(close, got, want)


def test_dtypes(never_dense):
    """The dtype is that of the matrix; activations keep theirs."""
    matrix = jnp.asarray(normal((6, 4)), jnp.bfloat16)
    w, x = scaled(-2, matrix=matrix), jnp.asarray(normal((5, 6), 2), jnp.bfloat16)
    assert w.dtype == jnp.bfloat16 and hki.materialize(w).dtype == jnp.bfloat16
    run = hki.use_implicit_args(lambda x, w: (x @ w, x.astype(jnp.float32) @ w.astype(jnp.float32)))
    narrow, wide = run(x, w)
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    close(wide, np.asarray(x, np.float32) @ dense(w))
    close(np.asarray(narrow, np.float32), wide, rtol=0.02)  # bfloat16 has 8 bits


def test_operands_that_are_not_scaled():
    """Integers take no factor: the dense weight does."""
    w, x = scaled(-2), np.arange(12).reshape(2, 6)
    dot = hki.use_implicit_args(jax.lax.dot)
    with hki.materialization("allow"):
        close(dot(x, w), x @ dense(w))


def test_activations_are_quantized_after_they_are_scaled(never_dense):
    q = hki.QuantizedMatrix.quantize(normal((6, 4)), "int8", activation="int8")
    w, x = scaled(-2, matrix=q), normal((5, 6), 2)
    dot = hki.use_implicit_args(lambda x, w: x @ w)
    np.testing.assert_array_equal(dot(x, w), dot(x * w.scale, q))


def test_lora_on_a_scaled_quantized_weight(never_dense):
    q = hki.QuantizedMatrix.quantize(normal((8, 4)), "int4", 4)
    w = scaled(-2, (8, 4), q)
    params = hki.add_lora({"linear": {"w": w, "b": jnp.zeros(4)}}, 0, rank=2)
    lora = params["linear"]["w"]
    assert isinstance(lora, hki.LoRA) and isinstance(lora.w, hki.ScaledMatrix)
    params["linear"]["w"] = lora._replace(b=jnp.asarray(normal((2, 4), 3)))
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))
    x = normal((5, 8), 2)
    got = hki.transform_implicit(model).apply(params, x)
    close(got, x @ (dense(w) + lora.a @ normal((2, 4), 3)))
    trained = jax.tree.leaves(hki.partition(params)[0])
    assert [y.shape for y in trained] == [(4,), (8, 2), (2, 4)]


@AXES
def test_merged_lora_is_quantized_again(axis):
    q = hki.QuantizedMatrix.quantize(normal((8, 4)), "int8")
    w = scaled(axis, (8, 4), q)
    lora = hki.LoRA(w, jnp.asarray(normal((8, 2), 2)), jnp.asarray(normal((2, 4), 3)))
    merged = hki.merge_lora({"w": lora}, requantize=True)["w"]
    assert jax.tree.structure(merged) == jax.tree.structure(w)
    np.testing.assert_array_equal(merged.scale, w.scale)
    want = dense(w) + lora.a @ lora.b
    assert np.abs(hki.materialize(merged) - want).max() < 0.02 * np.abs(want).max()
    assert scaled(axis, (8, 4)).requantize(want) is NotImplemented  # the matrix is dense


def test_partition_spec():
    w = scaled(-2, (3, 6, 4))
    mesh = compat.auto_mesh((2, 2), ("x", "y"))
    spec = shard_specs(w, PartitionSpec(None, "x", "y"), mesh)
    assert spec.matrix == PartitionSpec(None, "x", "y")
    assert spec.scale == PartitionSpec(None, "x")
    spec = shard_specs(scaled(-1, (3, 6, 4)), PartitionSpec(None, "x"), mesh)
    assert spec.scale == PartitionSpec(None, None)


def test_errors():
    matrix, scale = jnp.ones((2, 3)), jnp.ones(2)
    with pytest.raises(ValueError, match=r"scale \[..., n\] for axis -2, got .*\[2, 3\].*\[3\]"):
        hki.ScaledMatrix(matrix, jnp.ones(3))
    with pytest.raises(ValueError, match=r"scale \[..., m\] for axis -1"):
        hki.ScaledMatrix(matrix, scale, -1)
    with pytest.raises(ValueError, match="axis must be -2 or -1, got 0"):
        hki.ScaledMatrix(matrix, scale, 0)
    with pytest.raises(TypeError, match="matrix must be of a floating dtype, got int32"):
        hki.ScaledMatrix(matrix.astype(int), scale)
    with pytest.raises(TypeError, match="scale must be of a floating dtype, got int32"):
        hki.ScaledMatrix(matrix, scale.astype(int))
