"""Which weights cost most when quantized, and formats within a number of bytes."""

import itertools
import warnings

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.params.sensitivity import WeightCost
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
    assert repr(chosen).startswith("Allocation(3 int8: 9.556 bits a number; 1,600 bytes with all")


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


def test_what_stays_dense_is_in_the_table(params):
    tables = {"emb": normal((16, 16), 1), "pos_emb": normal((4, 16), 2)}

    def apply(params, x):
        return MODEL.apply(
            {k: v for k, v in params.items() if k != "~"}, x + params["~"]["pos_emb"]
        )

    params = {**params, "~": tables, "odd": {"w": normal((9, 4))}}
    options = {"int4": OPTIONS["int4"]}
    with pytest.warns(UserWarning, match="odd/w"):
        found = hki.sensitivity(apply, params, [X[0]], options, exclude=WEIGHTS[0])
    reasons = {path: reason for path, (_, reason) in found.dense.items()}
    assert reasons == {
        WEIGHTS[0]: "targets= or exclude= leaves it out",
        "~/pos_emb": "its name is that of a table of positions",
        "odd/w": "no option fits it",
    }
    *_, last = str(found).splitlines()
    assert last.split() == ["all", "others", "stay", "dense", "224", "224"]
    assert "~/pos_emb" in str(found) and found.dense["~/pos_emb"][0] == 256


@pytest.mark.parametrize("method", few([None, "gptq"], None))
def test_it_is_saved_and_loaded(params, method, tmp_path):
    # (A class such as `jnp.bfloat16` is no value of a file; its dtype is.)
    options = {name: dict(own, scale_dtype=jnp.bfloat16) for name, own in OPTIONS.items()}
    found = hki.sensitivity(MODEL.apply, params, X, options, method=method)
    hki.save(tmp_path / "found", found)
    again = hki.load(tmp_path / "found")
    assert str(again) == str(found) and again.allocate(2_000) == found.allocate(2_000)
    assert again.method == method and sorted(again.inputs) == (WEIGHTS if method else [])
    pair = [x.quantize(params, 2_000) for x in (found, again)]
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.parametrize("given", [100, 4.5, "1MB", None])
def test_bytes_that_cannot_be(given):
    rows = [
        WeightCost(path, "int8", 0.1, n, 4 * 512, 512)
        for path, n in zip("abc", (600, 500, 276), strict=True)
    ]
    found = hki.Sensitivity(tuple(rows), {"int8": OPTIONS["int8"]}, other_nbytes=224)
    expected = (
        "nbytes: expected the bytes of all parameters, a whole number of at least 1,600 .1,376 for the "
        f"smallest formats of 3 weights, and 224 .*, got {given!r}. With 6,368 all weights stay dense"
    )
    for call in (found.allocate, lambda nbytes: found.quantize({}, nbytes)):
        with pytest.raises(ValueError, match=expected):
            call(given)


@pytest.mark.parametrize(
    "replaced, message",
    [
        (dict(apply=MODEL), "apply: expected a function, got a Transformed; give its field apply"),
        (dict(batches=X[0]), r"batches: expected batches, got an array \[4, 16\]. Give \[x\] for one"),
        (dict(batches={"x": X[0]}), "batches: expected batches, got a dict. Give"),
        (dict(batches=None), "batches: expected batches, got a NoneType. Give"),
        (dict(options=["int4"]), r"options: expected arguments of .*, got \['int4'\]"),
        (dict(options={"int4": "int4"}), "options: expected arguments of .*, got {'int4': 'int4'}"),
        (dict(options={"a": dict(targets=".*")}), "options: 'a' has targets=, .* give it to sensitivity"),
        (dict(options={"a": dict(bits=4)}), "unexpected keyword argument 'bits': expected an option"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(params, replaced, message):
    given = dict(apply=MODEL.apply, batches=X, options=OPTIONS) | replaced
    with pytest.raises(TypeError, match=message):
        hki.sensitivity(params=params, **given)


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
