"""Each method on each kind of weight, over dense and quantized bases; and what a step keeps in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.testing import OPERATIONS, check_type
from tests.adapter_cases import BASES, CASES, METHODS, USES, adapted, normal
from tests.tiers import few


def close(got, want, tolerance=3e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


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


QUICK = [("dora", "attention", "int4 groups"), ("oft", "layers", "int8")]
QUICK += [("shira", "experts", "nf4"), ("trained_rows", "tied", "int8")]
# (nf4 differs from int4 in how codes are decoded, which a use does not see.)
ALL = [
    (method, use, base)
    for method in METHODS
    for use in USES
    for base in BASES
    if base != "nf4" or use in ("matrix", "tied", "experts")
]


@pytest.mark.every(4)
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
    "c3a": dict(block_size=128),
}
# (These make arrays of the weight's size, as docs/adapters.md says.)
del LARGE["hira"], LARGE["randlora"]


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
    most = n * n * 4 / 4
    if method == "dora" and jax.__version_info__ < (0, 8):
        # XLA in JAX 0.7.0 does not fuse the norms of columns with the sum that they are of.
        most += n * n * 4
    assert held < most, held


# (The others are made of the same types.)
CONTRACT = [name for name in CASES if " of " not in name and " through " not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name):
    """What a type has to hold, on small matrices.

    These types are equal to others that have the rules. So each sees every sixth operation, others in
    turn; all of them on all types take ten minutes, and were run when the types were written.
    """
    first = CONTRACT.index(name) % 6
    operations = dict(list(OPERATIONS.items())[first::6])
    make = lambda seed: CASES[name]((), normal((12, 8), seed))  # noqa: E731
    check_type(make, operations=operations, rtol=1e-3, atol=1e-4)
