"""One NaN among 6,144 numbers is seen: XLA's maximum on a CPU drops it from some thousand numbers on."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.command_line.main import main
from haiku_implicit.quantization import QtRule, QuantStats, dot_general
from haiku_implicit.quantized.numbers import channel_scales
from haiku_implicit.quantized.numbers.extremes import largest, smallest
from tests.tiers import few

GOOD = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
BAD = GOOD.copy()
BAD[50, 20] = np.nan
WAYS = {"eager": lambda f: f, "jit": jax.jit}


@pytest.mark.combinations
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_largest_and_smallest(way, dtype):
    for shape, axis in [((6144,), None), ((96, 64), 0), ((96, 64), 1), ((2, 48, 64), (0, 2))]:
        good, bad = (jnp.asarray(x.reshape(shape), dtype) for x in (GOOD, BAD))
        for ours, numpy in ((largest, np.max), (smallest, np.min)):
            run = WAYS[way](functools.partial(ours, axis=axis))
            assert run(good).dtype == dtype
            for x in (good, bad):
                with np.errstate(invalid="ignore"):
                    np.testing.assert_array_equal(
                        run(x).astype(np.float32), numpy(np.asarray(x, np.float32), axis)
                    )
    assert largest(jnp.zeros((0, 3)), 0, initial=-1.0, keepdims=True).tolist() == [[-1.0] * 3]
    assert not jnp.isnan(smallest(jnp.asarray(BAD), where=~jnp.isnan(BAD), initial=0.0))


@pytest.mark.parametrize(
    "calibration", few(["absmax", "minmax", "mse", "rms,3", "percentile,99"], "absmax", "minmax")
)
def test_a_weight(calibration):
    kind = "uint4" if calibration == "minmax" else "int4"
    quantize = functools.partial(
        hki.QuantizedMatrix.quantize, dtype=kind, calibration=calibration, group_size=32
    )
    with pytest.raises(ValueError, match="it has infinite or NaN elements"):
        quantize(BAD)
    got = np.isnan(hki.materialize(jax.jit(quantize)(BAD)))
    want = np.zeros_like(got)
    want[32:64, 20] = True
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", few(["nvfp4", "mxfp4", "q4_k"], "nvfp4"))
def test_scales_that_are_codes(dtype):
    wide = np.tile(GOOD, (8, 1))
    wide[50, 20] = np.nan
    got = jax.jit(lambda w: hki.QuantizedMatrix.quantize(w, dtype).materialize())(wide)
    assert np.isnan(got)[:32, 20].any() or np.isnan(got)[32:64, 20].all()


@pytest.mark.combinations
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("values", [BAD, np.abs(BAD)], ids=["moments", "second moments"])
def test_the_state_of_an_optimizer(way, values):
    quantize = WAYS[way](lambda x: hki.QuantizedBlocks.quantize(x, "int8").materialize())
    got = np.isnan(quantize(values)).ravel()
    at = (50 * 64 + 20) // 256 * 256
    np.testing.assert_array_equal(np.flatnonzero(got), np.arange(at, at + 256))


@pytest.mark.combinations
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", few(["absmax", "minmax", "absmax,0.9"], "absmax", "minmax"))
def test_a_product(way, method):
    """A row with NaN has no numbers; nor has a product with a matrix that has a NaN."""
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_calibration_method=method)
    dot = WAYS[way](lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ())), rule=rule))
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(dot(BAD, GOOD.T)).all(1)), [50])
    assert not np.isnan(np.delete(dot(BAD, GOOD.T), 50, 0)).any()
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(dot(GOOD, BAD.T)).all(0)), [50])
    stored = hki.QuantizedMatrix.quantize(GOOD.T, "int8", activation="int8")
    out = WAYS[way](hki.use_implicit_args(jnp.dot))(BAD, stored)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(out).any(1)), [50])


def test_statistics_leave_it_out():
    rule = QtRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
    stats = QuantStats({"absmax": jnp.ones((1, 1))}, jnp.array(1.0), mode="update")

    def out(stats, x):
        return dot_general(x, GOOD.T, (((1,), (0,)), ((), ())), rule=rule, stats=stats).sum()

    for x, count in ((GOOD, 1.0), (BAD, 0.0)):
        assert jax.jit(jax.grad(out))(stats, x).count == count


def test_calibration():
    """The largest inputs of a weight, and the scales that come from a weight and from these."""
    params = {"l": {"w": jnp.ones((64, 2))}}
    found = hki.input_maxima(lambda p, x: x @ p["l"]["w"], params, [jnp.asarray(BAD)])["l/w"]
    assert np.flatnonzero(~np.isfinite(found)).tolist() == [20]
    maxima = jnp.ones(96)
    for run in WAYS.values():
        scale = run(functools.partial(channel_scales.smoothquant, alpha=0.5))(BAD, maxima)
        assert scale[50] == 1 and scale[49] != 1  # as of a channel without a weight


@pytest.mark.parametrize("method", few(["linear", "ties", "dare"], "ties"))
def test_a_sum_of_adapters(method):
    params = {"l": {"w": jnp.zeros((96, 64))}}
    adapters = []
    for seed, value in ((0, 1.0), (1, np.nan)):
        lora = hki.add_lora(params, seed, rank=2)
        b = lora["l"]["w"].b.at[0, 20].set(value) + 0.5
        adapters.append(hki.get_adapter({"l": {"w": lora["l"]["w"]._replace(b=b)}}))
    options = {} if method == "linear" else {"method": method, "density": 0.5}
    options |= {"key": 0} if method == "dare" else {}
    try:
        made = hki.combine_adapters(adapters, [0.5, 0.5], **options)
    except ValueError as e:
        assert "NaN" in str(e) or "finite" in str(e)
        return
    merged = hki.merge_adapters(hki.set_adapter(params, made))
    assert np.isnan(merged["l"]["w"]).any()


@pytest.mark.parametrize(
    ("first", "second", "relative", "apart"),
    [
        ([1 + 0j], [1 + 5j], 5, 5),
        ([1 + 0j], [complex(1, np.nan)], np.nan, np.nan),
        (np.float32([1e-30]), np.float32([2e-30]), 1, 1e-30),
        (np.float32([1e20]), np.float32([2e20]), 1, 1e20),
        (np.int32([2**24]), np.int32([2**24 + 1]), 2.0**-24, 1),
        (np.float64([1]), np.float64([1 + 1e-9]), 1e-9, 1e-9),
    ],
)
def test_a_comparison_of_any_numbers(first, second, relative, apart):
    trees = [{"l": {"b": np.asarray(x)}} for x in (first, second)]
    [row] = hki.compare_params(*trees).rows
    np.testing.assert_allclose([row.relative, row.largest], [relative, apart], rtol=1e-6)


def test_a_comparison_of_keys():
    with pytest.raises(TypeError, match="l/b: random keys have no distance"):
        hki.compare_params(*({"l": {"b": jax.random.key(i)}} for i in range(2)))


def test_a_comparison(tmp_path, capsys):
    first, second = ({"l": {"w": jnp.asarray(x)}} for x in (GOOD, BAD))
    found = hki.compare_params(first, second, apply=lambda p: p["l"]["w"])
    assert math.isnan(found.rows[0].largest) and math.isnan(found.rows[0].relative)
    assert math.isnan(found.outputs)
    far = hki.compare_params({"l": {"b": jnp.zeros(2)}}, {"l": {"b": jnp.array([np.inf, 0])}})
    assert far.rows[0].largest == far.rows[0].relative == math.inf
    for comparison in (found, far):
        [row] = json.loads(json.dumps(comparison.to_json(), allow_nan=False))["rows"]
        assert row["largest"] is row["relative"] is None
    names = [str(tmp_path / name) for name in ("first", "second")]
    for name, tree in zip(names, (first, second), strict=True):
        hki.save(name, tree)
    assert main(["diff", *names, "--json"]) == 0

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed["rows"][0]["largest"] is printed["rows"][0]["relative"] is None
    assert main(["diff", *names]) == 0
    assert "nan" in capsys.readouterr().out


def test_a_comparison_of_numbers_of_python():
    found = hki.compare_params(
        {"l": {"b": jnp.ones(2)}}, {"l": {"b": jnp.full(2, 3.0)}}, apply=lambda p: (2, p["l"]["b"])
    )
    assert found.outputs == np.sqrt(8 / 6)
