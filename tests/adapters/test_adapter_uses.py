"""Each method on each kind of weight, over dense and quantized bases; and what a step keeps in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.testing import check_type
from tests.adapter_cases import CASES, normal
from tests.tiers import few

METHODS = {
    "lora": dict(rank=2, alpha=4.0),
    "dora": dict(rank=2, alpha=4.0),
    "loha": dict(rank=2),
    "lokr": dict(rank=2),
    "vera": dict(rank=2),
    "vblora": dict(rank=2, num_vectors=6, vector_length=4),
    "ia3": dict(),
    "oft": dict(block_size=4),
    "boft": dict(block_size=4, factors=2),
    "fourierft": dict(coefficients=6),
    "shira": dict(entries=7),
    "low_rank_diagonal": dict(rank=2),
    "trained_rows": dict(ids=[1, 3]),
    "locon": dict(rank=2),
}
BASES = {
    "dense": None,
    "int8": dict(dtype="int8"),
    "int4 groups": dict(dtype="int4", group_size=4),
    "nf4": dict(dtype="nf4"),
}


X = normal((5, 16), 8)
SIZES = jnp.array([2, 0, 3], jnp.int32)
# The shape of a weight, which of its axes make a matrix, and what a model does with it.
USES = {
    "matrix": ((16, 8), None, lambda w: X @ w),
    "attention": ((16, 2, 4), ([-3], [-2, -1]), lambda w: jnp.einsum("ba,ahc->bhc", X, w)),
    "out of attention": (
        (4, 4, 8),
        ([-3, -2], [-1]),
        lambda w: jnp.einsum("bhc,hcm->bm", X.reshape(5, 4, 4), w),
    ),
    "embedding": ((16, 8), None, lambda w: w[jnp.array([[1, 0], [3, 15]])]),
    "tied": ((16, 8), None, lambda w: w[jnp.array([1, 0, 3])] @ w.T),
    "layers": (
        (3, 16, 16),
        None,
        lambda w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), X, w)[0],
    ),
    "experts": ((3, 16, 8), None, lambda w: jnp.einsum("ebn,enm->ebm", jnp.stack([X] * 3), w)),
    "routed experts": ((3, 16, 8), None, lambda w: jax.lax.ragged_dot(X, w, SIZES)),
}


def close(got, want, tolerance=3e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def adapted(method, use, base):
    """A weight with an adapter of random numbers, in a tree."""
    shape, axes, _ = USES[use]
    params = {"layer": {"w": normal(shape)}}
    given = {"layer/w": axes} if axes else None
    if BASES[base]:
        params = hki.quantize_params(params, matrix_axes=given, **BASES[base])
        given = None
    options = dict(METHODS[method])
    if method == "locon" and not axes:
        options["kernel_ndim"] = 2  # no window
    params = hki.add_adapter(params, 0, method, targets="layer/w", matrix_axes=given, **options)
    trained, frozen = hki.partition(params, trainable_dense=False)
    leaves, treedef = jax.tree.flatten(trained)
    moved = [x + 0.3 * normal(x.shape, i) for i, x in enumerate(leaves)]
    return treedef.unflatten(moved), frozen


def check(method, use, base):
    trained, frozen = adapted(method, use, base)
    run = USES[use][2]

    def loss(trained, dense):
        w = hki.with_vector_bank(hki.combine(trained, frozen))["layer"]["w"]
        out = run(hki.materialize(w)) if dense else hki.use_implicit_args(run)(w)
        return (jnp.sin(out)).sum(), out

    got, out = jax.jit(jax.grad(functools.partial(loss, dense=False), has_aux=True))(trained)
    want, of_dense = jax.grad(functools.partial(loss, dense=True), has_aux=True)(trained)
    close(out, of_dense)
    jax.tree.map(close, got, want)


QUICK = [("lora", "tied", "nf4"), ("dora", "attention", "int4 groups"), ("oft", "layers", "int8")]
QUICK += [("shira", "experts", "nf4"), ("trained_rows", "tied", "int8")]
ALL = [(method, use, base) for method in METHODS for use in USES for base in BASES]


@pytest.mark.every(2)
@pytest.mark.parametrize("method, use, base", few(ALL, *QUICK))
def test_method_on_weight(method, use, base, never_dense):
    check(method, use, base)


LARGE = METHODS | {
    "vblora": dict(rank=2, num_vectors=16, vector_length=64),
    "lokr": dict(rank=4),
    "oft": dict(block_size=16),
    "boft": dict(block_size=16, factors=3),
    "fourierft": dict(coefficients=100),
    "shira": dict(entries=500),
}


@pytest.mark.parametrize("use", few(["x @ w", "x @ w.T"], "x @ w"))
@pytest.mark.parametrize("method", few(LARGE, "dora", "boft"))
def test_a_step_holds_nothing_of_the_size_of_the_weight(method, use):
    """Temporary memory of outputs and gradients, from XLA's own analysis of the compiled program."""
    n = 1024
    run = (lambda x, w: x @ w) if use == "x @ w" else (lambda x, w: x @ w.T)
    params = hki.add_adapter({"layer": {"w": jnp.ones((n, n))}}, 0, method, **LARGE[method])
    trained, frozen = hki.partition(params, trainable_dense=False)

    def loss(trained, frozen, x):
        w = hki.with_vector_bank(hki.combine(trained, frozen))["layer"]["w"]
        return (hki.use_implicit_args(run)(x, w) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 2)))
    compiled = step.lower(trained, frozen, jnp.ones((4, n))).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    assert held < n * n * 4 / 4, held


# (The others are made of the same types.)
CONTRACT = [name for name in CASES if " of " not in name and " through " not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name):
    """Everything that a type has to hold, on small matrices."""
    check_type(lambda seed: CASES[name]((), normal((12, 8), seed)), rtol=1e-3, atol=1e-4)
