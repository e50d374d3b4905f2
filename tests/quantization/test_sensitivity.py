"""Which weights cost most when quantized, and formats within a number of bytes."""

import itertools
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.random_arrays import normal
from tests.tiers import few

OPTIONS = {"int8": dict(dtype="int8"), "int4": dict(dtype="int4", group_size=16)}


def forward(x):
    return hk.nets.MLP([32, 16, 8], name="mlp")(x)


MODEL = hk.without_apply_rng(hk.transform(forward))
X = [normal((4, 16), i) for i in range(2)]
WEIGHTS = [f"mlp/~/linear_{i}/w" for i in range(3)]


@pytest.fixture
def params():
    made = MODEL.init(jax.random.key(9), X[0])
    # A weight with an outlier, which int4 makes worst.
    module = made["mlp/~/linear_1"]
    return {**made, "mlp/~/linear_1": {**module, "w": module["w"].at[0, 0].set(9.0)}}


def error_of(params, path, option):
    """By the definition, one weight at a time."""
    new = hki.materialize(hki.quantize_params(params, targets=[path], **OPTIONS[option]))
    pairs = [(MODEL.apply(params, x), MODEL.apply(new, x)) for x in X]
    change = sum(float(jnp.square(b - a).sum()) for a, b in pairs)
    return (change / sum(float(jnp.square(a).sum()) for a, _ in pairs)) ** 0.5


@pytest.mark.slow
def test_errors_are_those_of_one_weight_at_a_time_from_one_program(params):
    traced = []

    def apply(params, x):
        traced.append(1)
        return MODEL.apply(params, x)

    found = hki.sensitivity(apply, params, [(x,) for x in X], OPTIONS)
    assert len(traced) == 1  # before and after, from one program
    assert len(found.rows) == 6
    for row in found.rows:
        np.testing.assert_allclose(row.error, error_of(params, row.path, row.option), rtol=1e-3)
        quantized = hki.quantize_params(params, targets=[row.path], **OPTIONS[row.option])
        module = row.path.removesuffix("/w")
        assert row.nbytes == quantized[module]["w"].nbytes
    errors = [row.error for row in found.rows]
    assert errors == sorted(errors, reverse=True) and found.rows[0][:2] == (WEIGHTS[1], "int4")
    assert str(found).splitlines()[1].split()[:2] == [WEIGHTS[1], "int4"]


def test_formats_within_a_number_of_bytes(params):
    found = hki.sensitivity(MODEL.apply, params, [(x,) for x in X], OPTIONS)
    rows = {(row.path, row.option): row for row in found.rows}
    dense = {row.path: row.dense_nbytes for row in found.rows}
    others = sum(x.nbytes for x in jax.tree.leaves(params)) - sum(dense.values())
    assert others == found.other_nbytes == 4 * (32 + 16 + 8)
    assert found.allocate(sum(dense.values()) + others) == {}
    ways = [(None, "int8", "int4")] * 3

    def cost(chosen):
        picked = [(path, option) for path, option in zip(WEIGHTS, chosen, strict=True)]
        nbytes = sum(dense[p] if o is None else rows[p, o].nbytes for p, o in picked)
        return nbytes, sum(0.0 if o is None else rows[p, o].error ** 2 for p, o in picked)

    everything = [cost(chosen) for chosen in itertools.product(*ways)]
    for budget in (1_200, 1_600, 2_000, 3_000):
        chosen = found.allocate(budget + others)
        nbytes, error = cost([chosen.get(path) for path in WEIGHTS])
        best = min(e for n, e in everything if n <= budget)
        assert nbytes <= budget and error == pytest.approx(best)
        assert chosen.nbytes == nbytes + others and chosen.error**2 == pytest.approx(best)
        assert chosen.bound**2 <= best * (1 + 1e-6)
        size = sum(row.size for row in rows.values()) / 2
        assert size == 16 * 32 + 32 * 16 + 16 * 8 and chosen.bits == 8 * nbytes / size
        small = found.quantize(params, budget + others)
        held = {row.path: row.nbytes for row in hki.summary(small).rows}
        assert sum(held[path] for path in WEIGHTS) == nbytes
        assert hki.summary(small).total.nbytes == nbytes + others <= budget + others
    chosen = found.allocate(1_600 + others)
    assert chosen[WEIGHTS[1]] != "int4", "the worst weight keeps its bits"
    assert repr(chosen).startswith("Allocation(3 int8; 9.556 bits, 1,600 bytes; error ")


def test_views_of_matrices(params):
    w = {"attention": {"w": normal((16, 2, 8))}}
    axes = {"attention/w": ([-3], [-2, -1])}

    def apply(params, x):
        return jnp.einsum("ba,ahc->bhc", x, params["attention"]["w"])

    found = hki.sensitivity(apply, w, [(X[0],)], OPTIONS, matrix_axes=axes)
    assert found.other_nbytes == 0
    small = found.quantize(w, found.allocate(300))
    assert isinstance(small["attention"]["w"], hki.MatrixView)
    assert small["attention"]["w"].nbytes <= 300


def test_errors(params):
    with pytest.raises(ValueError, match="expected batches and options, got 0 and 2"):
        hki.sensitivity(MODEL.apply, params, [], OPTIONS)
    with pytest.raises(ValueError, match="inputs: expected a method that rounds by them, .* None"):
        hki.sensitivity(MODEL.apply, params, [X[0]], OPTIONS, inputs={})
    with pytest.raises(
        ValueError, match=r"inputs: expected those of weights such as .*, got \['w'\]"
    ):
        hki.sensitivity(
            MODEL.apply, params, [X[0]], OPTIONS, method="gptq", inputs={"w": jnp.eye(4)}
        )
    alone = hki.sensitivity(MODEL.apply, params, [X[0]], {"int8": OPTIONS["int8"]})
    found = hki.sensitivity(MODEL.apply, params, [(X[0],)], {"int8": OPTIONS["int8"]})
    assert found.rows == alone.rows  # a batch that is no tuple is the only argument
    with pytest.raises(
        ValueError, match="nbytes: the smallest .* 3 weights take 1,.* the other parameters 224, "
    ):
        found.allocate(100)
    with pytest.raises(ValueError, match="chosen: expected options of .'int8'., got 'int2'"):
        found.quantize(params, {WEIGHTS[0]: "int2"})


@pytest.mark.slow
def test_trellis_codes_among_the_options(params):
    """They have no search for scales, which is the default for other formats with a method."""
    options = {"trellis2": dict(dtype="trellis2"), "int4": OPTIONS["int4"]}
    xs = [(normal((64, 16), i),) for i in range(2)]
    with warnings.catch_warnings(action="error"):  # as of weights without inputs
        found = hki.sensitivity(MODEL.apply, params, xs, options, targets=WEIGHTS[0], method="gptq")
    small = found.quantize(params, {WEIGHTS[0]: "trellis2"})
    moments = hki.input_moments(MODEL.apply, params, xs, targets=WEIGHTS[0])
    want = hki.quantize_with_inputs(params, moments, dtype="trellis2")
    jax.tree.map(np.testing.assert_array_equal, small, want)


@pytest.mark.slow
@pytest.mark.parametrize("method", few(["gptq", "awq", "awq+gptq"], "awq+gptq"))
def test_weights_rounded_by_their_inputs(params, method):
    """What is measured is what `quantize` makes: by the method, and to the nearest without inputs."""

    def apply(params, x):
        return MODEL.apply(
            {k: v for k, v in params.items() if k != "embed"}, x + params["embed"]["table"][0]
        )

    params = {**params, "embed": {"table": normal((32, 16), 7)}}
    xs = [(normal((64, 16), i),) for i in range(2)]
    options = {"int4": OPTIONS["int4"]}
    found = hki.sensitivity(apply, params, xs, options, method=method)
    assert sorted(found.inputs) == WEIGHTS  # the table is looked up
    inputs = hki.input_moments(apply, params, xs, targets=WEIGHTS)
    of_less = hki.sensitivity(apply, params, xs[:1], options, method=method, inputs=inputs)
    assert of_less.inputs is inputs and of_less.rows != found.rows
    chosen = dict.fromkeys(WEIGHTS, "int4")
    pair = found.quantize(params, chosen), of_less.quantize(params, chosen)
    jax.tree.map(np.testing.assert_array_equal, *pair)
    chosen = dict.fromkeys([*WEIGHTS, "embed/table"], "int4")
    small = found.quantize(params, chosen)
    moments = hki.input_moments(apply, params, xs, exclude="embed/table")
    by_hand = hki.quantize_with_inputs(params, moments, method=method, **OPTIONS["int4"])
    by_hand = hki.quantize_params(by_hand, targets="embed/table", **OPTIONS["int4"])
    assert jax.tree.structure(small) == jax.tree.structure(by_hand)
    jax.tree.map(np.testing.assert_array_equal, small, by_hand)
    everything = sum(row.nbytes for row in found.rows) + found.other_nbytes
    assert hki.summary(small).total.nbytes == everything
    nearest = hki.sensitivity(apply, params, xs, options)
    errors = [
        sum(row.error**2 for row in of.rows if row.path in WEIGHTS) for of in (found, nearest)
    ]
    assert errors[0] < 0.8 * errors[1]
    budget = everything + 500
    small = found.quantize(params, found.allocate(budget))
    assert hki.summary(small).total.nbytes <= budget


@pytest.mark.slow
def test_a_weight_that_is_exact_has_no_error_in_bfloat16():
    """Programs that differ round at other places, and their difference is no error of a weight."""

    def apply(params, x):
        x = jnp.tanh(x.astype(jnp.bfloat16) @ params["a"]["w"])
        return jax.nn.softmax(jax.nn.gelu(x @ params["b"]["w"]) * 3)

    options = dict(dtype="int8")
    params = {
        name: {"w": jnp.asarray(normal((32, 32), i), jnp.bfloat16)} for i, name in enumerate("ab")
    }
    exact = hki.materialize(hki.quantize_params(params, **options))
    found = hki.sensitivity(apply, exact, [normal((4, 32), 2)], {"int8": options})
    again = hki.materialize(hki.quantize_params(exact, **options))
    for name in "ab":
        np.testing.assert_array_equal(exact[name]["w"], again[name]["w"])
    assert [row.error for row in found.rows] == [0.0, 0.0]
