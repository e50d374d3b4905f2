"""Initializations of LoRA: what the weight and the correction are together, and what each is for."""

import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from tests.adapter_cases import normal
from tests.tiers import few

N, M, R = 16, 12, 4
PEFT = pathlib.Path(__file__).resolve().parents[1] / "data" / "peft_starts.npz"


def moments_of(w, name="layer/w"):
    x = normal((*w.shape[:-2], 40, w.shape[-2]), 5)
    return {name: jnp.swapaxes(x, -1, -2) @ x}


INITS = {
    "default": lambda w: None,
    "gaussian": lambda w: "gaussian",
    "orthogonal": lambda w: "orthogonal",
    "pissa": lambda w: "pissa",
    "olora": lambda w: "olora",
    "eva": lambda w: hki.EVA(moments_of(w)),
    "corda": lambda w: hki.CorDA(moments_of(w)),
    "corda, preserving": lambda w: hki.CorDA(moments_of(w), preserve=True),
    "lora_ga": lambda w: hki.LoRAGA({"layer": {"w": normal(w.shape, 6)}}),
}
RESTS = ("pissa", "olora", "corda", "corda, preserving", "lora_ga")  # those that change the weight


@pytest.mark.parametrize("name", few(INITS, "pissa", "olora", "corda", "lora_ga"))
@pytest.mark.parametrize("kind", few(["matrix", "stack", "view", "bfloat16"], "matrix", "view"))
def test_the_sum_is_the_weight(name, kind):
    """To the rounding of one subtraction; with an alpha, and where the rank stabilizes it."""
    shape = {"stack": (3, N, M), "view": (N, 3, 4)}.get(kind, (N, M))
    w = normal(shape).astype(jnp.bfloat16 if kind == "bfloat16" else jnp.float32)
    axes = {"layer/w": ([-3], [-2, -1])} if kind == "view" else None
    matrix = w.reshape(N, M) if kind == "view" else w
    for stabilized in (False, True):
        new = hki.add_lora(
            {"layer": {"w": w}},
            0,
            rank=R,
            alpha=3.0,
            init=INITS[name](matrix),
            matrix_axes=axes,
            rank_stabilized=stabilized,
        )["layer"]["w"]
        lora = new.matrix if kind == "view" else new
        assert isinstance(lora, hki.LoRA) and lora.a.dtype == jnp.float32
        np.testing.assert_allclose(lora.scale, 3 / (R**0.5 if stabilized else R), rtol=1e-6)
        assert lora.a.shape == (*matrix.shape[:-2], N, R)
        eps = float(jnp.finfo(w.dtype).eps)
        error = np.abs(np.asarray(hki.materialize(new) - w, np.float32)).max()
        assert error <= 4 * eps * float(jnp.abs(w).max()), error
        if name in RESTS:
            assert float(jnp.abs(lora.b).max()) > 0 and float(jnp.abs(lora.w - matrix).max()) > 0


def test_pissa_holds_the_largest_singular_values():
    w = normal((N, M))
    lora = hki.add_lora({"m": {"w": w}}, 0, rank=R, alpha=8.0, init="pissa")["m"]["w"]
    values = np.linalg.svd(w, compute_uv=False)
    np.testing.assert_allclose(
        np.linalg.svd(lora.delta(), compute_uv=False)[:R], values[:R], rtol=1e-4
    )
    np.testing.assert_allclose(
        np.linalg.svd(lora.w, compute_uv=False)[: M - R], values[R:], rtol=1e-4
    )
    np.testing.assert_allclose(lora.a.T @ lora.a, lora.b @ lora.b.T, atol=1e-5)  # balanced


def test_olora_is_orthonormal_in_the_outputs():
    w = normal((N, M))
    lora = hki.add_lora({"m": {"w": w}}, 0, rank=R, init="olora")["m"]["w"]
    np.testing.assert_allclose(lora.b @ lora.b.T, np.eye(R), atol=1e-5)
    q, r = np.linalg.qr(np.asarray(w).T)
    np.testing.assert_allclose(lora.delta(), (q[:, :R] @ r[:R]).T, atol=1e-5)


def test_orthogonal_factors_have_no_product():
    w = normal((N, M))
    lora = hki.add_lora({"m": {"w": w}}, 0, rank=R, init="orthogonal")["m"]["w"]
    assert float(jnp.abs(lora.a).max()) > 0.01 and float(jnp.abs(lora.b).max()) > 0.01
    np.testing.assert_allclose(lora.delta(), np.zeros((N, M)), atol=1e-7)


def test_gaussian_has_the_deviation_of_peft():
    a = hki.add_lora({"m": {"w": jnp.ones((4000, 8))}}, 0, rank=8, init="gaussian")["m"]["w"].a
    assert abs(float(a.std()) - 1 / 8) < 2e-3


def test_eva_from_a_calibration_batch():
    """The rank spans the directions of the inputs: the error of projecting them is the least there is."""
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(M, name="layer")(x)))
    x = normal((64, 3), 1) @ normal((3, N), 2) + 1e-3 * normal((64, N), 3)
    params = model.init(jax.random.key(0), x)
    moments = hki.input_moments(model.apply, params, [x])
    a = hki.add_lora(params, 0, rank=3, init=hki.EVA(moments))["layer"]["w"].a
    np.testing.assert_allclose(a.T @ a, np.eye(3), atol=1e-5)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(a @ a.T, v[:3].T @ v[:3], atol=1e-3)


@pytest.mark.parametrize("mode, preserve", [("ipm", False), ("kpm", True)])
def test_corda_is_pefts(mode, preserve):
    """The correction and the rest of the weight, from the same inputs; the factors up to a scale."""
    with np.load(PEFT) as g:
        w, x, (of_a, of_b, rest) = (
            g["weight"].T,
            g["x"],
            (g[f"{mode}/{k}"] for k in ("a", "b", "rest")),
        )
    init = hki.CorDA({"m/w": x.T @ x}, preserve=preserve)
    lora = hki.add_lora({"m": {"w": jnp.array(w)}}, 0, rank=2, alpha=3.0, init=init)["m"]["w"]
    np.testing.assert_allclose(lora.delta(), 1.5 * (of_b @ of_a).T, atol=2e-5)
    np.testing.assert_allclose(lora.w, rest.T, atol=2e-5)
    ratios = np.concatenate([np.ravel(lora.a / of_a.T), np.ravel(of_b.T / lora.b)])
    np.testing.assert_allclose(np.abs(ratios), np.abs(ratios[0]), rtol=1e-3)


def test_corda_loses_least_of_the_outputs():
    """The correction times the moments is the nearest matrix of this rank."""
    w, x = normal((N, M)), normal((40, N), 5) @ normal((N, N), 6)
    init = hki.CorDA({"m/w": x.T @ x}, damping=0.0)
    lora = hki.add_lora({"m": {"w": w}}, 0, rank=R, init=init)["m"]["w"]
    u, s, v = np.linalg.svd(x.T @ x @ w, full_matrices=False)
    best = (u[:, :R] * s[:R]) @ v[:R]
    np.testing.assert_allclose(x.T @ x @ lora.delta(), best, atol=1e-4 * np.abs(best).max())


def test_the_first_step_of_lora_ga():
    """Gradient descent changes the product by the nearest matrix to the gradient of twice the rank."""
    w, g = normal((N, M)), normal((N, M), 1)
    init = hki.LoRAGA({"m": {"w": g}}, gamma=4.0)
    lora = hki.add_lora({"m": {"w": w}}, 0, rank=R, init=init)["m"]["w"]
    change = (g @ lora.b.T) @ lora.b + lora.a @ (lora.a.T @ g)  # for a small learning rate
    u, s, v = np.linalg.svd(g, full_matrices=False)
    best = (u[:, : 2 * R] * s[: 2 * R]) @ v[: 2 * R]
    np.testing.assert_allclose(change, M**0.5 / 4 * best, atol=1e-5)


def test_lora_ga_has_the_directions_of_peft():
    """PEFT also multiplies `b` by singular values, unlike the paper and its authors' code."""
    with np.load(PEFT) as g:
        w, grad, (of_a, of_b) = g["weight"].T, g["gradient"].T, (g[f"lora_ga/{k}"] for k in "ab")
    init = hki.LoRAGA({"m": {"w": jnp.array(grad)}}, gamma=w.shape[1] ** 0.5)  # lengths of 1
    lora = hki.add_lora({"m": {"w": jnp.array(w)}}, 0, rank=2, alpha=3.0, init=init)["m"]["w"]
    of_b = of_b / np.linalg.norm(of_b, axis=0)
    for found, theirs in ((lora.a, of_a.T), (lora.b.T, of_b)):
        np.testing.assert_allclose(np.abs(np.asarray(found).T @ theirs), np.eye(2), atol=1e-4)


@pytest.mark.parametrize("stacked", few([False, True], False))
def test_loftq_makes_up_for_rounding(stacked):
    """Together they are nearer to the weight than the quantized weight alone, and more with turns."""
    w = normal((3, 32, 24) if stacked else (32, 24))
    alone = hki.QuantizedMatrix.quantize(w, "nf4")

    def error(x):
        return float(jnp.linalg.norm(hki.materialize(x) - w))

    errors = [error(alone)]
    for turns in (1, 3):
        init = hki.LoftQ("nf4", iterations=turns)
        lora = hki.add_lora({"m": {"w": w}}, 0, rank=R, alpha=8.0, init=init)["m"]["w"]
        assert isinstance(lora.w, hki.QuantizedMatrix) and lora.w.format == "nf4"
        errors.append(error(lora))
    assert errors[0] * 0.9 > errors[1] > errors[2], errors


def test_quantizing_the_rest():
    """What is quantized after PiSSA is the rest, whose numbers are smaller (QPiSSA)."""
    u, v = normal((64, 1)), normal((1, 32), 1)
    w = 20 * u @ v + normal((64, 32), 2)
    plain = hki.quantize_params({"m": {"w": w}}, dtype="int4")["m"]["w"]
    lora = hki.add_lora({"m": {"w": w}}, 0, rank=1, init="pissa")
    lora = hki.quantize_params(lora, dtype="int4")["m"]["w"]
    assert isinstance(lora.w, hki.QuantizedMatrix)
    error = lambda x: float(jnp.linalg.norm(hki.materialize(x) - w))  # noqa: E731
    assert error(lora) < error(plain) / 5


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(init="pisa"), "init: expected a function or one of .*'pissa'.* got 'pisa'"),
        (dict(init="orthogonal", rank=3), "m/w .*needs an even rank, got 3"),
        (dict(init="pissa", alpha=-1.0), "m/w .*alpha: expected a positive number"),
        (dict(init=hki.EVA({})), "m/w .*no moments of m/w"),
        (
            dict(init=hki.EVA({"m/w": np.eye(3, dtype=np.float32)})),
            r"m/w .*expected moments \[16, 16\]",
        ),
        (dict(init=hki.CorDA({"n": {}})), "m/w .*CorDA has no moments of m/w, only of .'n'"),
        (dict(init=hki.LoRAGA({"m": {"w": np.eye(3)}})), r"m/w .*expected gradient \[16, 12\]"),
        (dict(init=hki.LoRAGA({}), rank=7), "m/w .*twice the rank, 14, .* has 12"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        hki.add_lora({"m": {"w": normal((N, M))}}, 0, **dict(rank=R) | options)


def test_the_default_scale():
    params = {"m": {"w": normal((N, M))}}
    for options, scale in ({}, 1), (dict(rank_stabilized=True), 8 / 4**0.5):  # PEFT's `lora_alpha`
        w = hki.add_lora(params, 0, rank=4, **options)["m"]["w"]
        change = hki.materialize(w._replace(b=w.b + 1)) - w.w
        want = scale * np.repeat(w.a.sum(-1, keepdims=True), M, -1)
        np.testing.assert_allclose(change, want, atol=1e-5)


def test_a_quantized_weight_is_not_decomposed():
    params = hki.quantize_params({"m": {"w": normal((N, M))}})
    with pytest.raises(ValueError, match="m/w .*pissa decomposes a dense weight"):
        hki.add_lora(params, 0, rank=R, init="pissa")
    with pytest.raises(ValueError, match="iterations: expected 1 or more, got 0"):
        hki.LoftQ(iterations=0)
