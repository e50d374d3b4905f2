"""Adapters and the operators they are made of, against their dense twins."""

import dataclasses
import functools
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests import adapter_cases
from tests.adapter_cases import CASES, M, N, R, definition, normal
from tests.tiers import few

QUICK = ("dora", "loha", "lokr", "oft", "sparse")


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
    "integers": lambda w: jnp.round(3 * X).astype(jnp.int8) @ w,
    "booleans": lambda w: w.T @ (X.T > 0),
    "narrow numbers": lambda w: X.astype(jnp.bfloat16) @ w,
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


@pytest.mark.every(3)
@pytest.mark.parametrize("name", few(CASES, *QUICK))
def test_what_it_stands_for_and_operations(name, may_be_dense):
    w = CASES[name]((), normal((N, M)))
    dense = jax.jit(hki.materialize)(w)
    close(dense, definition(w))
    run = jax.jit(lambda w: {label: fun(w) for label, fun in OPERATIONS.items()})
    got, want = hki.use_implicit_args(run)(w), run(dense)
    for label in OPERATIONS:
        close(got[label], want[label], 2e-2 if label == "bfloat16" else 1e-5)


def test_rotated_weights_are_normalized_and_cut(never_dense):
    w = CASES["butterfly"]((), normal((N, M)))
    run = jax.jit(
        lambda w: (
            X @ (w / jnp.linalg.norm(w, axis=0)),
            X @ ((w - w.mean(1, keepdims=True)) * X[0][:, None]),
            X @ w[:, 1:4],
            X @ jnp.split(w, 2, 1)[1],
            jnp.abs(w).max(),
        )
    )
    for got, want in zip(hki.use_implicit_args(run)(w), run(hki.materialize(w)), strict=True):
        close(got, want)


@pytest.mark.parametrize("result", ["float32", "bfloat16"])
@pytest.mark.parametrize("x", ["float32", "float8_e4m3fn", "int8"])
def test_a_product_with_a_rotated_weight_has_the_dtype_that_is_asked_for(x, result, never_dense):
    w, x = CASES["butterfly"]((), normal((N, M))), jnp.round(2 * normal((3, N), 2)).astype(x)
    for axis, operand in ((0, x), (1, x[:, :M])):
        numbers = ((1,), (axis,)), ((), ())
        run = functools.partial(jax.lax.dot_general, operand, dimension_numbers=numbers)
        product = functools.partial(run, preferred_element_type=result)
        got, want = hki.use_implicit_args(product)(w), product(hki.materialize(w))
        assert got.dtype == want.dtype
        close(
            got.astype(jnp.float32), want.astype(jnp.float32), 1e-5 if result == "float32" else 2e-2
        )


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
    of_dense = jax.grad(lambda t: loss(hki.materialize(hki.combine(t, frozen))))
    want = jax.jit(of_dense)(trained)
    assert jax.tree.leaves(got)
    jax.tree.map(functools.partial(close, tolerance=2e-5), got, want)


STACKED = {
    "stack": lambda x, w: jnp.einsum("sbn,snm->bsm", x, w),
    "scan": lambda x, w: jax.lax.scan(lambda c, xw: (c, xw[0] @ xw[1]), 0, (x, w))[1],
    "vmap": lambda x, w: jax.vmap(lambda x, w: x @ w.T.T)(x, w),
    "layer": lambda x, w: x[1] @ w[1],
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", few(CASES, "dora", "loha", "lokr", "oft"))
def test_stacks(name, never_dense):
    w, x = CASES[name]((3,), normal((3, N, M))), normal((3, 5, N), 7)
    dense = jax.jit(hki.materialize)(w)
    one = jax.tree.map(lambda leaf: leaf[1], w)
    close(dense[1], definition(one))
    run = jax.jit(lambda x, w: {label: fun(x, w) for label, fun in STACKED.items()})
    got, want = hki.use_implicit_args(run)(x, w), run(x, dense)
    for label in STACKED:
        close(got[label], want[label])


def mlp(x):
    return hk.nets.MLP([8, 4], name="mlp")(x)


METHODS = adapter_cases.METHODS | {  # for weights [6, 8] and [8, 4]
    "loha": dict(rank=1),
    "oft": dict(block_size=2),
    "boft": dict(block_size=2, factors=1),
    "vblora": dict(rank=1, num_vectors=6, vector_length=2),
    "c3a": dict(block_size=2),
    "gralora": dict(rank=2),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("method", few(METHODS, "lora", "dora", "trained_rows"))
def test_a_model_is_the_same_at_first_and_then_trained(method, never_dense):
    t = hk.without_apply_rng(hk.transform(mlp))
    model = hki.transform_implicit(t)
    x = normal((3, 6), 1)
    dense = t.init(jax.random.key(0), x)
    params = hki.add_adapter(dense, 0, method, **METHODS[method])
    # (VB-LoRA starts with a small correction, since its bank cannot be zero.)
    apply, apply_dense = jax.jit(model.apply), jax.jit(t.apply)
    start = apply(hki.with_vector_bank(params), x)
    close(start, apply_dense(dense, x), 1e-2 if method == "vblora" else 1e-5)
    trained, frozen = hki.partition(params, trainable_dense=False)

    @jax.jit
    def loss(trained):
        params = hki.with_vector_bank(hki.combine(trained, frozen))
        return ((model.apply(params, x) - 1) ** 2).mean()

    grads = jax.jit(jax.grad(loss))(trained)
    # Nothing but the adapters is trained, and their frozen fields are not.
    assert set(trained) <= {*dense, "vblora_bank"}
    assert trained["mlp/~/linear_0"]["b"] is None and trained["mlp/~/linear_0"]["w"].w is None
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, trained, grads)
    assert loss(moved) < loss(trained)
    merged = hki.merge_adapters(hki.combine(moved, frozen))
    assert jax.tree.structure(merged) == jax.tree.structure(
        hk.data_structures.to_mutable_dict(dense)
    )
    moved = hki.with_vector_bank(hki.combine(moved, frozen))
    close(apply_dense(merged, x), apply(moved, x))


@pytest.mark.slow
def test_the_bank_of_vblora_is_one(never_dense):
    """Its gradient is the sum of those that each weight would have alone."""
    params = {f"layer_{i}": {"w": normal((N, M), i)} for i in range(2)}
    params |= {"stack": {"w": normal((3, N, M), 2)}}
    options = dict(rank=R, num_vectors=6, vector_length=4)
    params = hki.add_adapter(params, 0, "vblora", **options)
    vectors = params["vblora_bank"]["vectors"].vectors
    assert vectors.shape == (6, 4) and params["layer_0"]["w"].bank is None
    trained, frozen = hki.partition(params, trainable_dense=False)
    names = ("layer_0", "layer_1", "stack")

    def loss(trained, dense=False, only=names):
        params = hki.with_vector_bank(hki.combine(trained, frozen))
        weights = [params[name]["w"] for name in only]
        if dense:
            weights = [hki.materialize(w) for w in weights]
        run = lambda weights: sum(((X @ w) ** 2).sum() for w in weights)  # noqa: E731
        return hki.use_implicit_args(run)(weights)

    got, want = jax.grad(loss)(trained), jax.grad(functools.partial(loss, dense=True))(trained)
    jax.tree.map(functools.partial(close, tolerance=2e-5), got, want)
    of_bank = lambda grads: grads["vblora_bank"]["vectors"].vectors  # noqa: E731
    apart = sum(of_bank(jax.grad(functools.partial(loss, only=[n]))(trained)) for n in names)
    close(of_bank(got), apart)


@pytest.mark.parametrize("method", few(METHODS, "lora", "dora", "locon"))
def test_its_base_may_be_quantized_later(method):
    """The order of `quantize_params` and `add_adapter` does not matter for the codes."""
    base = {"layer": {"w": normal((N, M))}}
    options = METHODS[method] | (dict(vector_length=4) if method == "vblora" else {})
    params = hki.quantize_params(hki.add_adapter(base, 0, method, targets="layer/w", **options))
    codes = hki.quantize_params(base)["layer"]["w"].codes
    np.testing.assert_array_equal(params["layer"]["w"].w.codes, codes)
    w = hki.with_vector_bank(params)["layer"]["w"]
    close(hki.use_implicit_args(jnp.matmul)(X, w), X @ hki.materialize(w))
    assert hki.quantize_activations(params)["layer"]["w"].w.activation == "int8"


@pytest.mark.parametrize("method", few(METHODS, "vblora"))
def test_apart_from_its_base_and_in_a_file(method, tmp_path):
    base = {"layer": {"w": normal((N, M)), "b": normal((M,), 1)}}
    options = METHODS[method] | (dict(vector_length=4) if method == "vblora" else {})
    params = hki.add_adapter(base, 0, method, targets="layer/w", **options)
    again = hki.set_adapter(base, hki.get_adapter(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    hki.save(tmp_path / "params.safetensors", params)
    jax.tree.map(np.testing.assert_array_equal, hki.load(tmp_path / "params.safetensors"), params)
    bare = hki.set_adapter(params, None)
    assert jax.tree.structure(bare) == jax.tree.structure(base)
    with pytest.raises(ValueError, match="another base"):
        hki.set_adapter({"layer": {"w": normal((N, M), 3), "b": base["layer"]["b"]}},
                        hki.get_adapter(params))  # fmt: skip


# The options that have one structure, and the field that an adapter made by hand may have as None.
SCALED = {
    "lora": ([dict(rank=2), dict(rank=2, alpha=8.0),
              dict(rank=2, alpha=8.0, rank_stabilized=True)], "factor"),
    "dora": ([dict(rank=2), dict(rank=2, alpha=8.0)], "alpha"),
    "loha": ([dict(rank=2), dict(rank=2, alpha=8.0)], "alpha"),
    "lokr": ([dict(rank=2), dict(rank=2, alpha=8.0)], "scale"),
    "locon": ([dict(rank=2), dict(rank=2, alpha=8.0)], "alpha"),
    "low_rank_diagonal": ([dict(rank=2), dict(rank=2, alpha=8.0)], "alpha"),
    "fourierft": ([dict(coefficients=5, scale=None), dict(coefficients=5)], "scale"),
}  # fmt: skip


@pytest.mark.parametrize("method", few(SCALED, "lora", "dora"))
@pytest.mark.parametrize("lead", few([0, 3], 0))
def test_adapters_with_and_without_alpha_have_one_structure(method, lead, tmp_path):
    """So a compiled function takes either; one of a file that holds None is completed."""
    base = {"layer": {"w": normal((lead, N, M) if lead else (N, M))}}
    options, field = SCALED[method]
    if method == "locon":
        options = [{**own, "kernel_ndim": 2} for own in options]
    whole = [hki.add_adapter(base, i, method, **own) for i, own in enumerate(options)]
    parts = list(map(hki.get_adapter, whole))
    for trees in (whole, parts):
        assert len({jax.tree.structure(tree) for tree in trees}) == 1
    old = dataclasses.replace(
        parts[0], weights={"layer/w": parts[0].weights["layer/w"]._replace(**{field: None})}
    )
    hki.save(tmp_path / "adapter", old)
    again = hki.set_adapter(whole[1], hki.load(tmp_path / "adapter"))
    assert jax.tree.structure(again) == jax.tree.structure(whole[1])
    jax.tree.map(np.testing.assert_array_equal, again, whole[0])
    # (A scale of 1 changes nothing.)
    trained, frozen = hki.partition(again)
    moved = hki.combine(jax.tree.map(lambda x: x + 1, trained), frozen)["layer"]["w"]
    np.testing.assert_array_equal(
        hki.materialize(moved), hki.materialize(moved._replace(**{field: None}))
    )


def test_a_second_call_keeps_the_bank():
    params = {f"layer_{i}": {"w": normal((4, 4), i)} for i in range(2)}
    options = dict(rank=1, num_vectors=6, vector_length=4)
    one = hki.add_adapter(params, 0, "vblora", targets="layer_0/w", **options)
    both = hki.add_adapter(one, 1, "vblora", targets="layer_1/w", **options)
    assert both["vblora_bank"]["vectors"] is one["vblora_bank"]["vectors"]
    with pytest.raises(ValueError, match=r"has a bank of \(6, 4\) already, got \(7, 4\)"):
        hki.add_adapter(one, 1, "vblora", targets="layer_1/w", **{**options, "num_vectors": 7})


def test_vblora_without_its_bank_says_so():
    w = hki.add_adapter({"layer": {"w": normal((4, 4))}}, 0, "vblora", rank=1, vector_length=4)
    with pytest.raises(ValueError, match="no vector bank.*with_vector_bank"):
        hki.materialize(w["layer"]["w"])
    message = "with_vector_bank: expected .* VectorBank, .*hki.partition"
    with pytest.raises(ValueError, match=message):
        hki.grad(lambda params: hki.with_vector_bank(params)["layer"]["w"].sum())(w)


@pytest.mark.every(2)
@pytest.mark.parametrize("base", ["int8", "dense"])
def test_a_token_costs_its_row(base, never_dense):
    """Look-ups are those of the rows to the bit, and logits of the tied table are right."""
    x, tokens = normal((3, M), 1), jnp.array([[7, 0], [49, 48]])
    table = normal((50, M))
    table = table if base == "dense" else hki.QuantizedMatrix.quantize(table, base)
    w = hki.add_adapter({"embed": {"w": table}}, 0, "trained_rows", ids=[7, 49])["embed"]["w"]
    assert w.rows.shape == (2, M)
    np.testing.assert_array_equal(w.rows, hki.materialize(table)[jnp.array([7, 49])])
    w = w._replace(rows=w.rows + 1)
    look_up = hki.use_implicit_args(lambda w: w[tokens])
    np.testing.assert_array_equal(look_up(w), hki.materialize(w)[tokens])
    close(hki.use_implicit_args(lambda w: x @ w.T)(w), x @ hki.materialize(w).T)
    loss = lambda rows: (look_up(w._replace(rows=rows))[0] ** 2).sum()  # noqa: E731
    grads = jax.jit(jax.grad(loss))(w.rows)
    np.testing.assert_allclose(grads, [2 * w.rows[0], jnp.zeros(M)], rtol=1e-6)


def test_predicates_of_biases_and_norms():
    params = {
        "layer_norm": {"scale": jnp.ones(2), "offset": jnp.ones(2)},
        "mlp/linear": {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "w_b": jnp.ones((2, 2))},
        "attention": {"query_bias": jnp.ones(2), "gating_b": jnp.ones(2), "biases_0": jnp.ones(2)},
    }
    trained = lambda which: {  # noqa: E731
        f"{module}/{name}"
        for module, own in hki.partition(params, which)[0].items()
        for name, x in own.items()
        if x is not None
    }
    assert trained(hki.LAYER_NORMS) == {"layer_norm/scale", "layer_norm/offset"}
    biases = {"mlp/linear/b", "layer_norm/offset"}
    biases |= {f"attention/{name}" for name in ("query_bias", "gating_b", "biases_0")}
    assert trained(hki.BIASES) == biases


def test_options_for_some_weights():
    params = {f"layer_{i}": {"w": normal((N, M), i)} for i in range(3)}
    new = hki.add_adapter(
        params, 0, "dora", rank=2, alpha=4.0, patterns={"layer_[12]/w": {"rank": 3, "alpha": None}}
    )
    got = [(new[name]["w"].a.shape[-1], float(new[name]["w"].alpha)) for name in params]
    assert got == [(2, 4.0), (3, 3.0), (3, 3.0)]  # without one the scale is 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("doro",), "method: expected one of .*'dora'.*'lora'.* got 'doro'"),
        (("dora",), "method 'dora': expected the options rank, alpha .optional., got none"),
        (
            ("oft", "w", {"block_size": 5}),
            "layer/w .*block_size: expected a divisor of the 12 inputs",
        ),
        (("boft", "w", {"block_size": 4, "factors": 3}), "layer/w .*to divide the 12 inputs"),
        (("boft", "w", {"block_size": 3}), "layer/w .*expected an even block size"),
        (("fourierft", "w", {"coefficients": 97}), "layer/w .*coefficients: expected 1 to 96"),
        (("shira", "w", {"entries": 0}), "layer/w .*entries: expected 1 to 96"),
        (("trained_rows", "w", {"ids": [1, 1]}), "layer/w .*ids: expected each index once"),
        (("trained_rows", "w", {"ids": [12]}), "layer/w .*ids: expected indices of the 12 rows"),
        (("trained_rows", "w", {"ids": 3}), "layer/w .*ids: expected a list of integers"),
        (("vblora", "w", {"rank": 1}), "layer/w .*vector_length: expected a divisor of both sides"),
        (
            ("vblora", "w", {"rank": 1, "vector_length": 4, "top_k": 300}),
            "layer/w .*top_k: expected 1 to 256",
        ),
        (("locon", "w", {"rank": 0}), "rank: expected a positive integer, got 0"),
        (("locon", "w", {"rank": 1, "axis": 0}), "layer/w .*axis: expected -2 to -1, got 0"),
        (("ia3", "b", {}), "layer/b: IA3 needs a floating-point parameter of at least two axes"),
    ],
)
def test_errors(arguments, message):
    params = {"layer": {"w": normal((N, M)), "b": jnp.ones(M)}}
    method, target, options = (*arguments, "w", {})[:3] if len(arguments) == 1 else arguments
    with pytest.raises(ValueError, match=message):
        hki.add_adapter(params, 0, method, targets=f"layer/{target}", **options)


@pytest.mark.every(2)
@pytest.mark.parametrize("base", [lambda w: w, lambda w: hki.QuantizedMatrix.quantize(w, "int8")])
def test_dora_of_a_column_of_zeros(base):
    """The column begins at zero, and learns: its factors have a gradient."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32).at[:, 0].set(0)
    params = hki.add_adapter({"l": {"w": base(w)}}, 0, "dora", rank=2, targets=".*")
    dora, x = params["l"]["w"], jnp.eye(8)
    start = hki.materialize(base(w))
    np.testing.assert_allclose(hki.materialize(dora), start, rtol=1e-5, atol=1e-6)
    product = hki.use_implicit_args(lambda x, w: x @ w)
    grads = jax.jit(jax.grad(lambda b: product(x, dora._replace(b=b)).sum()))(dora.b)
    grads = np.asarray(grads)
    assert np.isfinite(grads).all() and (np.abs(grads[:, 0]) > 0).any()
    learned = dora._replace(
        b=dora.b + 0.1
    )  # now the column has a length, and the magnitude is zero
    column = hki.materialize(learned)[:, 0]
    np.testing.assert_array_equal(column, np.zeros(8))
    of_magnitude = jax.grad(lambda m: product(x, learned._replace(magnitude=m)).sum())
    grads = np.asarray(jax.jit(of_magnitude)(dora.magnitude))
    assert np.isfinite(grads).all()
    assert grads[0] != 0


@pytest.mark.parametrize("place", [-1, 5])
@pytest.mark.parametrize("make", ["Sparse", "Fourier", "SHiRA", "FourierFT"])
def test_places_outside_of_the_matrix(make, place):
    """JAX would drop what is there, or take it from the other end."""
    shape = (5, 4)

    def of(values, row, column):
        kind = getattr(hki.adapters, make)
        if make in ("Sparse", "Fourier"):
            return kind(values, row, column, shape)
        return kind(jnp.zeros(shape), values, row, column)

    inside, outside = jnp.array([0, 3]), jnp.array([0, place])
    of(jnp.ones(2), inside, np.asarray(inside))
    for arrays, name in (((outside, inside), "row"), ((inside, np.asarray(outside)), "column")):
        with pytest.raises(ValueError, match=f"{make}: {name}: expected numbers .* got {place}"):
            of(jnp.ones(2), *arrays)
    jax.eval_shape(of, jnp.ones(2), outside, inside)  # nothing is known there


def test_a_pattern_that_others_hide():
    params = {"a": {"w": jnp.ones((4, 4))}, "b": {"w": jnp.ones((4, 4))}}
    patterns = {".*": {"rank": 1}, "a/w": {"rank": 2}}
    with pytest.warns(
        UserWarning, match="patterns: 'a/w' decides for no weight, since '.*' before"
    ):
        hki.add_adapter(params, 0, "dora", rank=3, patterns=patterns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = hki.add_adapter(
            params, 0, "dora", rank=3, patterns=dict(reversed(list(patterns.items())))
        )
    assert [new[name]["w"].a.shape[-1] for name in "ab"] == [2, 1]
