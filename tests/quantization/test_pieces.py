"""Weights quantized piece by piece: the bits of the whole, by one program for all shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from haiku_implicit.quantized.numbers import pieces
from tests.tiers import few

FORMATS = {
    "int8": {},
    "int3": dict(group_size=8),
    "uint4": dict(group_size=16, scale_dtype="float16"),
    "nf4": dict(group_size=16),
    "mxfp8": {},
    "int4": dict(axis=-1),  # a row of 37 codes is filled up to whole bytes
}


def weight(*shape):
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    w[..., 3, :] *= 40
    w[..., 2] = 0
    return jnp.asarray(w)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", FORMATS)
def test_bits_are_those_of_the_whole(dtype, monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE", 256)  # so there are several, the last one with room
    run, calls = pieces.map_rows, []
    monkeypatch.setattr(
        pieces, "map_rows", lambda fun, rows: run(lambda x: calls.append(0) or fun(x), rows)
    )
    for w in (weight(32, 37).astype(jnp.bfloat16), weight(2, 3, 32, 37)):
        got = hki.QuantizedMatrix.quantize(w, dtype, **FORMATS[dtype])
        assert len(calls) > 1
        calls.clear()
        want = jax.jit(lambda w: hki.QuantizedMatrix.quantize(w, dtype, **FORMATS[dtype]))(w)
        assert not calls
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(*(np.asarray(z).view(np.uint8) for z in (x, y)))


def test_new_shapes_compile_nothing():
    """After a first weight, others with groups of the same size need no further program."""
    names, on = [], [False]

    def listen(name, *_, **__):
        if on[0] and name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    shapes = (48, 5), (3, 96, 7), (24, 9)
    params = {f"m{i}": {"w": weight(*shape)} for i, shape in enumerate(shapes)}
    options = dict(dtype="int4", group_size=24, matrix_axes={})
    hki.quantize_params({"m": {"w": weight(24, 11)}}, **options)
    on[0] = True
    new = hki.quantize_params(params, **options)
    on[0] = False
    assert not names
    names.clear()
    assert new["m1"]["w"].shape == (3, 96, 7)
    on[0] = True
    hki.quantize_params(params, **options | {"group_size": 12})  # the listener hears a program
    on[0] = False
    assert len(names) == 1


@pytest.mark.parametrize("at", [(0, 0), (63, 36)])
def test_a_weight_that_is_not_finite(at, monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE", 256)
    for bad in (np.nan, np.inf, -np.inf):
        for options in (dict(dtype="int8"), dict(dtype="uint4"), dict(dtype="nf4", group_size=8)):
            w = weight(64, 37).at[at].set(bad)
            with pytest.raises(ValueError, match="it has infinite or NaN elements"):
                hki.QuantizedMatrix.quantize(w, **options)


def test_scales_of_any_piece_are_checked(monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE", 256)
    for column in (0, 36):
        w = weight(64, 37).at[:, column].multiply(1e20)
        with pytest.raises(ValueError, match="scales are too large for 'float16'"):
            hki.QuantizedMatrix.quantize(w, "int8", scale_dtype="float16")


def test_results_are_where_the_weight_is():
    device = jax.devices()[-1]
    placed = jax.device_put(weight(16, 4), device)
    for w in (placed, weight(16, 4)):
        with jax.transfer_guard("disallow"):
            new = hki.QuantizedMatrix.quantize(w, "int8")
        for x in jax.tree.leaves(new):
            assert x.devices() == w.devices() and x.committed == w.committed


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", few([dict(group_size=16), dict(), dict(dtype="uint4")], dict(dtype="uint4"))
)
def test_rounding_by_inputs(options, monkeypatch):
    """Stacked matrices in pieces of rows, each with its own inputs, as `jit` rounds the whole."""
    monkeypatch.setattr(pieces, "_PIECE", 256)
    w = jax.random.normal(jax.random.key(0), (2, 96, 13))
    x = jax.random.normal(jax.random.key(1), (2, 400, 96))
    x += jnp.roll(x, 1, axis=-1)  # correlated inputs
    moments = jnp.einsum("bni,bnj->bij", x, x)
    options = dict(dtype="int4", calibration="mse") | options
    quantize = lambda w: hki.QuantizedMatrix.quantize(w, **options, moments=moments)  # noqa: E731
    got, want = (hki.materialize(f(w)) for f in (quantize, jax.jit(quantize)))
    errors = [float(jnp.linalg.norm(x @ (q - w))) for q in (got, want)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    plain = hki.materialize(hki.QuantizedMatrix.quantize(w, **options))
    assert errors[0] < 0.9 * float(jnp.linalg.norm(x @ (plain - w)))
    # Sums for more rows may be taken in another order. So scales differ in their last bits, and of two
    # candidates with equal errors the other one may win, in 1 or 2 of the 26 rows.
    assert np.isclose(got, want, rtol=4e-6, atol=0).mean() > 0.9
