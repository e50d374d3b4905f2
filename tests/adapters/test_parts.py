"""Adapters apart from their base: taken out, put in, kept in a bank, combined."""

import itertools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import normal
from tests.tiers import few

KEY = jax.random.key(0)


def mlp(x):
    return hk.nets.MLP([8, 6, 4], name="mlp")(x)


T = hk.without_apply_rng(hk.transform(mlp))
MODEL = hki.transform_implicit(T)
X = jax.random.normal(KEY, (5, 6))
WEIGHTS = [f"mlp/~/linear_{i}/w" for i in range(3)]


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture
def base():
    return T.init(KEY, X)


def tuned(base, seed, rank=2, alpha=3.0, targets=None):
    """The base with an adapter that is not zero."""
    params = hki.add_lora(base, seed, rank=rank, alpha=alpha, targets=targets)
    trained, frozen = hki.partition(params, trainable_dense=False)
    leaves, treedef = jax.tree.flatten(trained)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return hki.combine(treedef.unflatten(moved), frozen)


# --- get_adapter, set_adapter ----------------------------------------------------------------------


def test_out_and_in_again(base):
    params = tuned(base, 1)
    adapter = hki.get_adapter(params)
    again = hki.set_adapter(base, adapter)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    leaves = sum(x.nbytes for x in jax.tree.leaves(adapter))
    assert leaves == sum(
        w.a.nbytes + w.b.nbytes + w.factor.nbytes for w in adapter.weights.values()
    )


def test_another_adapter_takes_its_place_and_compiles_nothing(base):
    traced = []

    @jax.jit
    def run(params, x):
        traced.append(1)
        return MODEL.apply(params, x)

    one, two = tuned(base, 1, alpha=3.0), tuned(base, 2, alpha=None)
    close(run(one, X), T.apply(hki.materialize(one), X))
    switched = hki.set_adapter(one, hki.get_adapter(two))
    close(run(switched, X), T.apply(hki.materialize(two), X))
    assert traced == [1]


def test_other_targets_leave_nothing_of_the_first(base):
    one = tuned(base, 1)
    two = tuned(base, 2, rank=3, targets=WEIGHTS[:1])
    got = hki.set_adapter(one, hki.get_adapter(two))
    jax.tree.map(np.testing.assert_array_equal, hki.materialize(got), hki.materialize(two))
    alone = hki.set_adapter(one, None)
    assert not [x for x in hki.tree_leaves_with_implicit(alone) if isinstance(x, hki.LoRA)]
    jax.tree.map(np.testing.assert_array_equal, alone, hk.data_structures.to_mutable_dict(base))


@pytest.mark.parametrize("method", ["dora", "lokr"])
def test_other_adapters_on_quantized_views(method):
    w = {"attention": {"w": jax.random.normal(KEY, (16, 4, 8)), "b": jnp.ones(4)}}
    axes = {"attention/w": ([-3], [-2, -1])}
    base = hki.quantize_params(w, dtype="int8", matrix_axes=axes)
    params = hki.add_adapter(base, 1, method, rank=2)
    adapter = hki.get_adapter(params, trainable_dense="attention/b")
    assert sorted(adapter.dense) == ["attention/b"]
    again = hki.set_adapter(base, adapter)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_in_jit_the_base_is_not_compared(base):
    adapter = hki.get_adapter(tuned(base, 1))
    got = jax.jit(lambda p: MODEL.apply(hki.set_adapter(p, adapter), X))(base)
    close(got, T.apply(hki.materialize(tuned(base, 1)), X))


def test_errors_name_the_weight(base):
    adapter = hki.get_adapter(tuned(base, 1))
    other = jax.tree.map(lambda x: x + 1, base)
    with pytest.raises(ValueError, match="mlp/~/linear_0/w: the adapter was made for another base"):
        hki.set_adapter(other, adapter)
    hki.set_adapter(other, adapter, check_base=False)
    quantized = hki.quantize_params(base, dtype="int8")
    with pytest.raises(ValueError, match="linear_0/w: the adapter was made for another base"):
        hki.set_adapter(quantized, adapter)  # as merging QLoRA into the dense base would be
    with pytest.raises(
        ValueError, match="linear_0/w: the adapter is for this weight, which is not"
    ):
        hki.set_adapter({"mlp/~/linear_1": base["mlp/~/linear_1"]}, adapter)
    narrow = {**base, "mlp/~/linear_0": {"w": jnp.ones((6, 7)), "b": jnp.ones(7)}}
    with pytest.raises(ValueError, match="linear_0/w: the adapter does not fit float32.6,7."):
        hki.set_adapter(narrow, adapter, check_base=False)
    with pytest.raises(ValueError, match="params: expected weights with adapters"):
        hki.get_adapter(base)


def test_what_was_trained_as_a_whole_is_not_forgotten(base):
    params = tuned(base, 1)
    params["mlp/~/linear_1"]["b"] = params["mlp/~/linear_1"]["b"] + 1.0
    with pytest.raises(
        ValueError, match="linear_1/b: this parameter was another one .*trainable_de"
    ):
        hki.set_adapter(base, hki.get_adapter(params))
    adapter = hki.get_adapter(params, trainable_dense=".*/b")
    again = hki.set_adapter(base, adapter)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_an_adapter_of_views_of_dense_weights():
    base = {"attention": {"w": jax.random.normal(KEY, (3, 4, 8))}}
    axes = {"attention/w": ([-2, -3], [-1])}
    params = hki.add_lora(base, 1, rank=2, matrix_axes=axes, init=jax.nn.initializers.ones)
    view = params["attention"]["w"]
    params = {"attention": {"w": view._replace(matrix=view.matrix._replace(b=jnp.ones((2, 8))))}}
    again = hki.set_adapter(base, hki.get_adapter(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    np.testing.assert_array_equal(
        hki.set_adapter(params, None)["attention"]["w"], base["attention"]["w"]
    )


def test_digests_do_not_depend_on_the_program():
    w = hki.QuantizedMatrix.quantize(jnp.arange(8.0).reshape(2, 4), "int8")
    params = hki.add_lora({"linear": {"w": w}}, 0, rank=1)
    [(path, found)] = hki.get_adapter(params).bases
    assert (path, found) == ("linear/w", "9b0c3b472a186efe")


# --- a bank ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_example_has_its_own_and_nothing_is_compiled_again(base):
    traced = []

    def apply(params, x):
        traced.append(1)
        return MODEL.apply(params, x)

    run = jax.jit(hki.with_bank(apply))
    bank = hki.AdapterBank.of(base, capacity=4, rank=3)
    adapters = {
        1: tuned(base, 1, rank=1, alpha=None),
        2: tuned(base, 2, rank=3, alpha=7.0),
        3: tuned(base, 3, rank=2, targets=WEIGHTS[1:2]),
    }
    for slot, params in adapters.items():
        bank = bank.put(slot, hki.get_adapter(params))
    slots = np.array([2, 0, 3, 1, 2])

    def expected(slots):
        dense = {slot: hki.materialize(params) for slot, params in adapters.items()}
        return [T.apply(dense.get(int(s), base), x) for s, x in zip(slots, X, strict=True)]

    close(run(bank, slots, X), expected(slots))
    assert traced == [1]
    adapters[1] = tuned(base, 9, rank=2)
    bank = bank.put(1, hki.get_adapter(adapters[1]))
    del adapters[2]
    bank = bank.remove(2)
    close(run(bank, slots, X), expected(slots))
    assert traced == [1]


@pytest.mark.slow
def test_factors_that_are_gathered_once_for_many_steps(base):
    bank = hki.AdapterBank.of(base, capacity=3, rank=2).put(2, hki.get_adapter(tuned(base, 1)))
    slots = np.array([2, 0, 2, 1, 2])

    @jax.jit
    def run(bank, slots, xs):
        factors = jax.vmap(bank.factors)(slots)
        one = jax.vmap(lambda factors, x: MODEL.apply(bank.with_factors(factors), x))
        return jax.lax.scan(lambda _, x: (None, one(factors, x)), None, xs)[1]

    xs = jnp.stack([X, 2 * X])
    want = jax.vmap(lambda x: hki.with_bank(MODEL.apply)(bank, slots, x))(xs)
    close(run(bank, slots, xs), want)
    with pytest.raises(ValueError, match="slot: expected 0 to 2, got 3"):
        bank.factors(3)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", few([2, 128, 256, 300], 128))
def test_slots_of_any_integer_dtype(capacity):
    """The capacity may be no number of the dtype of the slots."""
    bank = hki.AdapterBank.of({"l": {"w": jnp.zeros((2, 2))}}, capacity=capacity, rank=1)
    numbers = jnp.arange(capacity, dtype=jnp.float32).reshape(-1, 1, 1)
    slots = {"l/w": (jnp.ones((capacity, 2, 1)), numbers * jnp.ones((1, 1, 2)), jnp.ones(capacity))}
    bank = hki.AdapterBank(bank.params, slots)
    numbers_of = jax.vmap(lambda slot: bank.select(slot)["l"]["w"].b[0, 0])
    wanted = [0, 1, 7, 127, 128, 200, 255, 256, 299, -1, -128]
    for dtype in ("int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"):
        info = jnp.iinfo(dtype)
        own = jnp.array([s for s in wanted if info.min <= s <= info.max], dtype)
        inside = np.array([0 <= int(s) < capacity for s in own])
        want = np.where(inside, np.asarray(own, np.float32), np.nan)
        np.testing.assert_array_equal(numbers_of(own), want, err_msg=dtype)
    run = hki.with_bank(hki.use_implicit_args(lambda params, x: x @ params["l"]["w"]))
    got = run(bank, jnp.array([1, 0], jnp.int8), jnp.array([[1.0, 0.0]] * 2))
    np.testing.assert_array_equal(got[:, 0], [1.0, 0.0])
    zero = hki.AdapterParts({})
    last = np.uint8(min(capacity, 256) - 1)
    emptied = bank.put(last, zero).slots["l/w"][1][:, 0, 0]
    np.testing.assert_array_equal(np.flatnonzero(emptied != numbers[:, 0, 0]), [last])
    with pytest.raises(
        ValueError, match=f"slot: expected an integer from 0 to {capacity - 1}, got True"
    ):
        bank.put(True, zero)


def test_a_bank_of_a_quantized_base_with_views(never_dense):
    params = {"attention": {"w": jax.random.normal(KEY, (16, 4, 8))}}
    axes = {"attention/w": ([-3], [-2, -1])}
    base = hki.quantize_params(params, dtype="int8", matrix_axes=axes)
    bank = hki.AdapterBank.of(base, capacity=2, rank=4)
    one = tuned(base, 1)
    bank = bank.put(1, hki.get_adapter(one))
    x = jax.random.normal(KEY, (3, 16))

    def apply(params, x):
        return jnp.einsum("a,ahc->hc", x, params["attention"]["w"])

    run = jax.jit(hki.with_bank(hki.use_implicit_args(apply)))
    got = run(bank, np.array([0, 1, 1]), x)
    of_dense = jax.jit(lambda params, x: apply(hki.materialize(params), x))
    for i, params in enumerate((base, one, one)):
        close(got[i], of_dense(params, x[i]), 1e-4)


@pytest.mark.slow
def test_gradients_of_one_adapter_in_a_bank(base):
    bank = hki.AdapterBank.of(base, capacity=2, rank=2).put(1, hki.get_adapter(tuned(base, 1)))

    apply = hki.with_bank(MODEL.apply)

    def loss(slots):
        out = apply(hki.AdapterBank(bank.params, slots), np.array([0, 1, 0, 0, 0]), X)
        return (out**2).sum()

    grads = jax.grad(loss)(bank.slots)
    params = tuned(base, 1)
    trained, frozen = hki.partition(params, trainable_dense=False)
    want = jax.grad(lambda t: (MODEL.apply(hki.combine(t, frozen), X[1]) ** 2).sum())(trained)
    for path in WEIGHTS:
        own = want[path.removesuffix("/w")]["w"]
        close(grads[path][0][1], own.a, 1e-4)
        close(grads[path][1][1], own.b, 1e-4)
        assert not grads[path][2].any()  # LoRA's scale is not trained


def test_errors_of_a_bank(base):
    bank = hki.AdapterBank.of(base, capacity=2, rank=2, targets=WEIGHTS[:2])
    adapter = hki.get_adapter(tuned(base, 1))
    with pytest.raises(ValueError, match="linear_2/w: not a target of the bank"):
        bank.put(0, adapter)
    with pytest.raises(ValueError, match="slot: expected 0 to 1, got 2"):
        bank.put(2, adapter)
    large = hki.get_adapter(tuned(base, 1, rank=3, targets=WEIGHTS[0]))
    with pytest.raises(
        ValueError, match="linear_0/w: the adapter has rank 3, the bank has room for 2"
    ):
        bank.put(0, large)
    other = hki.get_adapter(tuned(jax.tree.map(lambda x: x + 1, base), 1, targets=WEIGHTS[0]))
    with pytest.raises(ValueError, match="linear_0/w: the adapter was made for another base"):
        bank.put(0, other)
    dora = hki.get_adapter(hki.add_adapter(base, 1, "dora", rank=2, targets=WEIGHTS[0]))
    with pytest.raises(ValueError, match="linear_0/w: a bank has room for LoRA alone, got DoRA"):
        bank.put(0, dora)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=f"slot: expected 0 to 1, got {wrong}"):
            hki.with_bank(MODEL.apply)(bank, np.array([0, wrong]), X[:2])
        out = jax.jit(hki.with_bank(MODEL.apply))(bank, np.array([0, wrong]), X[:2])
        assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()
    with pytest.raises(TypeError, match="params: the bank is an argument of a wrapped function"):
        hki.use_implicit_args(hki.with_bank(MODEL.apply))(bank, np.zeros(2, int), X[:2])
    with pytest.raises(
        TypeError, match="adapter: expected an adapter apart from its base, .*got dict"
    ):
        bank.put(0, base)
    with pytest.raises(ValueError, match=r"slots: expected integers \[batch\], got float32"):
        hki.with_bank(MODEL.apply)(bank, np.ones(5, np.float32), X)


# --- combining -------------------------------------------------------------------------------------


def deltas(adapter):
    return {path: np.asarray(w.delta(), np.float64) for path, w in adapter.weights.items()}


def test_the_sum_is_that_of_the_corrections_and_not_of_the_factors(base):
    one, two = (
        hki.get_adapter(tuned(base, 1, alpha=3.0)),
        hki.get_adapter(tuned(base, 2, rank=3, alpha=None, targets=WEIGHTS[:2])),
    )
    new = hki.combine_adapters([one, two], [0.5, -2.0])
    first, second, got = deltas(one), deltas(two), deltas(new)
    for path in WEIGHTS:
        close(got[path], 0.5 * first[path] - 2 * second.get(path, 0.0))
    assert [new.weights[path].rank for path in WEIGHTS] == [5, 5, 2]
    params = hki.set_adapter(base, new)
    close(jax.jit(MODEL.apply)(params, X), jax.jit(T.apply)(hki.materialize(params), X))


def test_the_nearest_of_a_smaller_rank(base):
    one, two = (hki.get_adapter(tuned(base, i, targets=WEIGHTS[0])) for i in (1, 2))
    new = hki.combine_adapters([one, two], [1.0, 1.0], rank=3)
    whole = sum(deltas(x)[WEIGHTS[0]] for x in (one, two))
    u, s, vh = np.linalg.svd(whole)
    close(deltas(new)[WEIGHTS[0]], u[:, :3] * s[:3] @ vh[:3])


def elected(deltas, weights):
    """The weighted mean of the entries with the sign of the sum."""
    agreeing = np.sign(deltas) == np.where(deltas.sum(0) >= 0, 1, -1)
    return (weights * deltas * agreeing).sum(0) / np.maximum(agreeing.sum(0), 1)


BY = np.array([1.0, 0.1, -1.0])[:, None, None]


def combined_with_dense(base, method, **options):
    """The combined correction of one weight, of full rank, and the corrections."""
    parts = [hki.get_adapter(tuned(base, i, targets=WEIGHTS[0])) for i in (1, 2, 3)]
    new = hki.combine_adapters(parts, BY.ravel().tolist(), method, rank=6, **options)
    return deltas(new)[WEIGHTS[0]], np.stack([deltas(x)[WEIGHTS[0]] for x in parts])


@pytest.mark.parametrize("method", ["ties", "magnitude_prune"])
def test_the_largest_entries(base, method):
    got, whole = combined_with_dense(base, method, density=0.5)
    limits = [np.sort(np.abs(x).ravel())[-x.size // 2] for x in whole]
    kept = np.where(np.abs(whole) >= np.reshape(limits, (3, 1, 1)), whole, 0)
    close(got, elected(kept, BY) if method == "ties" else (BY * kept).sum(0), 1e-4)


def test_drawn_entries_with_the_sign_of_their_sum(base):
    got, whole = combined_with_dense(base, "dare_ties", density=0.5, key=0)
    draws = np.array(list(itertools.product([0, 2], repeat=3)))[..., None, None]
    possible = np.stack([elected(whole * draw, BY) for draw in draws])
    assert np.abs(possible - got).min(0).max() < 1e-4 * np.abs(whole).max()
    assert np.abs(possible - got).max() > np.abs(whole).max() / 2  # (they differ much)


def test_dare_has_the_sum_as_its_mean(base):
    parts = [hki.get_adapter(tuned(base, i, targets=WEIGHTS[0])) for i in (1, 2)]
    mean = np.mean(
        [
            deltas(hki.combine_adapters(parts, [1.0, 1.0], "dare", density=0.5, rank=6, key=i))[
                WEIGHTS[0]
            ]
            for i in range(300)
        ],
        axis=0,
    )
    want = sum(deltas(x)[WEIGHTS[0]] for x in parts)
    # The deviation of one draw is that of the entries; that of the mean a seventeenth of it.
    assert np.abs(mean - want).max() < 5 * np.abs(want).max() / 300**0.5


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1.0],), "weights: expected one for each of the 2 adapters, got 1"),
        (([1.0, 1.0], "mean"), "method: expected one of 'linear', 'ties', .*, got 'mean'"),
        (([1.0, 1.0], "linear", 0.5), "density: it is for the other methods"),
        (([1.0, 1.0], "ties"), "density: expected a number above 0 and up to 1, got None"),
    ],
)
def test_errors_of_combining(base, arguments, message):
    parts = [hki.get_adapter(tuned(base, i)) for i in (1, 2)]
    with pytest.raises(ValueError, match=message):
        hki.combine_adapters(parts, *arguments[:2], **dict(zip(["density"], arguments[2:])))  # noqa: B905


@pytest.mark.parametrize(("density", "kept"), [(0.33, 20), (0.2, 12), (0.01, 0), (1.0, 63)])
def test_pruning_keeps_as_many_entries_as_peft(density, kept):
    """`int(density * n)` of 7 x 9; without a rank, it is the largest one at any weight, or fits."""
    base = {"one": {"w": jnp.zeros((7, 9))}, "two": {"w": jnp.zeros((16, 16))}}
    params = [
        hki.add_lora(base, 0, rank=3, targets="one/w"),
        hki.add_lora(base, 1, rank=8, targets="two/w"),
    ]

    def random(x):
        return normal(x.shape) if x.ndim == 2 else x

    parts = [hki.get_adapter(jax.tree.map(random, p)) for p in params]
    new = hki.combine_adapters(parts, [2.0, 1.0], "magnitude_prune", density=density).weights
    assert new["one/w"].rank == 7 and new["two/w"].rank == 8
    delta = np.asarray(parts[0].weights["one/w"].delta(), np.float64)
    order = np.argsort(-np.abs(delta), axis=None)[:kept]
    want = np.zeros(63)
    want[order] = 2 * delta.ravel()[order]
    np.testing.assert_allclose(new["one/w"].delta(), want.reshape(7, 9), atol=1e-5)


def test_adapters_of_two_bases_are_not_combined(base):
    other = jax.tree.map(lambda x: x + 1, base)
    parts = [hki.get_adapter(tuned(p, 1)) for p in (base, other)]
    with pytest.raises(ValueError, match="linear_0/b: the adapters were made for different bases"):
        hki.combine_adapters(parts, [1.0, 1.0])


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_half_of_a_partition_is_no_tree_of_parameters(method, half):
    params = hki.add_adapter(
        {"linear": {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}}, 0, method, rank=2
    )
    part = hki.partition(params, trainable_dense=False)[half]
    functions = [hki.get_adapter, hki.merge_adapters, lambda x: hki.compare_params(x, params)]
    if half == 0:  # of the other one the base is there, for these
        base = hki.get_adapter(params)
        functions += [hki.summary, hki.quantize_params, lambda x: hki.set_adapter(x, base)]
    for function in functions:
        with pytest.raises(ValueError, match=r"linear/w: a half of \w+, .* haiku_implicit.combine"):
            function(part)
    with pytest.raises(TypeError, match="combine the halves of partition first"):
        hki.set_adapter(params, part)


def test_a_bank_knows_what_began_with_a_part_of_its_weight(tmp_path):
    """A program that reads the file would add the correction to the whole weight."""
    base = {"l": {"w": normal((16, 8))}}
    began = hki.add_lora(base, 1, rank=2, init="pissa")
    bank = hki.AdapterBank.of(hki.set_adapter(began, None), capacity=2, rank=2)
    bank = bank.put(1, initial := hki.get_adapter(began))
    selected = bank.select(1)
    np.testing.assert_allclose(hki.materialize(selected)["l"]["w"], base["l"]["w"], atol=1e-5)
    adapter = hki.get_adapter(selected)
    with pytest.raises(ValueError, match="l/w.*initial="):
        hki.save_peft(tmp_path, adapter, {"l/w": "l"})
    hki.save_peft(tmp_path, adapter, {"l/w": "l"}, initial=initial)
    again = hki.set_adapter(base, hki.load_peft(tmp_path, {"l": "l/w"}))
    np.testing.assert_allclose(hki.materialize(again)["l"]["w"], base["l"]["w"], atol=1e-5)
