"""What the adapters of a tree share, held once: through steps, donation, files and other bases."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.adapter_cases import normal
from tests.tiers import few

METHODS = {
    "vera": dict(rank=4),
    "vblora": dict(rank=2, num_vectors=6, vector_length=4),
}
T = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 16, 8], name="mlp")(x)))
APPLY = hki.transform_implicit(T).apply
X = normal((3, 16), 1)


def adapted(method):
    return hki.add_adapter(T.init(jax.random.key(0), X), 0, method, **METHODS[method])


def buffers(tree):
    return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}


def step(params):
    trained, frozen = hki.partition(params, trainable_dense=False)

    def loss(trained):
        params = hki.with_vector_bank(hki.combine(trained, frozen))
        return ((APPLY(params, X) - 1) ** 2).mean()

    new = jax.tree.map(lambda p, g: p - 0.1 * g, trained, jax.grad(loss)(trained))
    return hki.combine(new, frozen)


@pytest.mark.slow
@pytest.mark.parametrize("method", few(METHODS, "vera"))
def test_each_array_is_one_buffer_and_stays_it(method, tmp_path):
    params = adapted(method)
    run, donating = jax.jit(step), jax.jit(step, donate_argnums=0)
    kept = run(run(params))
    hki.save(tmp_path / "params", kept)
    adapter = hki.get_adapter(kept)
    hki.save(tmp_path / "adapter", adapter)
    base = T.init(jax.random.key(0), X)
    again = hki.set_adapter(base, hki.load(tmp_path / "adapter"))
    for tree in (params, kept, hki.load(tmp_path / "params"), again):
        assert len(buffers(tree)) == len(jax.tree.leaves(tree))
        assert jax.tree.structure(tree) == jax.tree.structure(params)
        assert sum(x.nbytes for x in jax.tree.leaves(tree)) == sum(
            x.nbytes for x in jax.tree.leaves(params)
        )
    jax.tree.map(np.testing.assert_array_equal, again, kept)
    donated = donating(donating(jax.tree.map(jnp.copy, params)))
    jax.tree.map(np.testing.assert_array_equal, donated, kept)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), *(
        hki.partition(p, trainable_dense=False)[0] for p in (kept, params)))  # fmt: skip
    assert (
        all(jax.tree.leaves(moved)) or method == "vblora"
    )  # (some of its vectors are in no piece)


def test_an_adapter_of_vera_is_its_vectors(tmp_path):
    base = {f"layer_{i}": {"w": normal((64, 64), i)} for i in range(6)}
    base["layers/__layer_stack_no_per_layer"] = {"w": normal((4, 64, 64), 7)}
    adapter = hki.get_adapter(hki.add_adapter(base, 0, "vera", rank=16))
    vectors = 10 * (16 + 64)
    assert sum(x.nbytes for x in jax.tree.leaves(adapter)) == 4 * vectors + 10 * 2 * 4
    path = tmp_path / "adapter"
    hki.save(path, adapter)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (
        path.stat().st_size - header < 4 * vectors + 7 * 4 * 64
    )  # (each array begins at 64 bytes)


@pytest.mark.slow
def test_one_pair_of_random_factors_serves_all_weights():
    shapes = {"small": (4, 6), "large": (9, 8), "stack": (3, 5, 7)}
    params = {name: {"w": normal(shape)} for name, shape in shapes.items()}
    new = hki.add_adapter(params, 0, "vera", rank=2)
    # A second call with the same key draws the same pair, whichever weights it is for.
    again = hki.add_adapter(params, 0, "vera", rank=2, targets="small/w")
    jax.tree.map(np.testing.assert_array_equal, again["small"], new["small"])
    other = hki.add_adapter(params, 1, "vera", rank=2)
    assert (hki.materialize(other["large"]["w"].a) != hki.materialize(new["large"]["w"].a)).all()
    a, b = (hki.materialize(getattr(new["large"]["w"], name)) for name in "ab")
    for name, shape in shapes.items():
        n, m = shape[-2:]
        w = new[name]["w"]
        for layer in np.ndindex(*shape[:-2]):
            own = jax.tree.map(lambda x, i=layer: x[i], w)
            np.testing.assert_allclose(hki.materialize(own.a) * n**0.5, a[:n] * 3, rtol=1e-6)
            np.testing.assert_array_equal(hki.materialize(own.b), b[:, :m])


def test_random_matrices_are_the_same_for_ever():
    """Adapters in files depend on these numbers; they are those of the MurmurHash3 finalizer."""

    def mixed(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    def number(seed, row, column, bound):
        rows, columns = (mixed((mixed(x) + i) % 2**32) for x, i in
                         ((seed, row), (seed ^ 0xFFFFFFFF, column)))  # fmt: skip
        bits = mixed(rows ^ columns)
        signed = (bits - 2**32 if bits >= 2**31 else bits) >> 8
        return np.float32(signed) * np.float32(bound * 2.0**-23)

    for seed in (0, 1, 2**32 - 1):
        w = hki.adapters.RandomMatrix(jnp.uint32(seed), (5, 3), 0.7)
        want = [[number(seed, i, j, 0.7) for j in range(3)] for i in range(5)]
        for run in (lambda w: w.materialize(), jax.jit(lambda w: w.materialize())):
            np.testing.assert_array_equal(run(w), want)
    w = hki.adapters.RandomMatrix(jnp.uint32(5), (512, 64), 1.0)
    singular = np.linalg.svd(hki.materialize(w) * (3 / 512) ** 0.5, compute_uv=False)
    # As of independent numbers (Marchenko and Pastur): 1 ± sqrt(64 / 512).
    assert 1.28 < singular.max() < 1.42 and 0.58 < singular.min() < 0.72


def test_halves_of_other_ranks_are_named():
    """Only if the frozen half knows its rank. A frozen half of LoRA does not."""
    params = {"a": {"w": jnp.ones((16, 8))}}
    one, four = (
        hki.partition(hki.add_adapter(params, 0, "vera", rank=rank), False) for rank in (1, 4)
    )
    shapes = r"shape_of_matrix=\(16, 1\), got shape_of_matrix=\(16, 4\)"
    for run in (hki.combine, jax.jit(hki.combine)):
        with pytest.raises(
            ValueError, match=f"^frozen: a/w/a: expected RandomMatrix with {shapes}"
        ):
            run(one[0], four[1])


def test_a_pair_that_is_given(tmp_path):
    """Factors of another library, or of an older file."""
    pair = normal((20, 2), 3), normal((2, 12), 4)
    w = hki.adapters.VeRA(normal((16, 8)), *pair, jnp.ones(2), normal((8,), 5))
    want = w.w + (pair[0][:16] * w.d) @ (pair[1][:, :8] * w.e)
    np.testing.assert_allclose(hki.materialize(w), want, rtol=1e-5, atol=1e-5)
    hki.save(tmp_path / "w", {"linear": {"w": w}})
    jax.tree.map(np.testing.assert_array_equal, hki.load(tmp_path / "w"), {"linear": {"w": w}})


def test_what_length_of_vectors_fits():
    params = {"linear": {"w": jnp.ones((16, 24))}}
    with pytest.raises(ValueError, match="16 and 24, got 256; those are 1, 2, 4, 8"):
        hki.add_adapter(params, 0, "vblora", rank=1)
    w = hki.add_adapter(params, 0, "vblora", rank=1, vector_length=8)["linear"]["w"]
    assert (w.of_a.shape, w.of_b.shape) == ((2, 1, 256), (1, 3, 256))
