"""Number formats that a program registers itself, outside of the package."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import QuantRule, formats, register_format

# Of each number of bits, in any order, with and without zero, symmetric or not.
TABLES = {
    "own1": (1.0, -0.25),
    "own2": (-1.0, 0.0, 0.5, 1.0),
    "own3": (-4, -2, -1, 0, 1, 2, 4, 8),
    "own4": tuple(np.random.default_rng(0).permutation(np.linspace(-1.0, 1.0, 16) ** 3).tolist()),
    "wide4": tuple(100.0 * n for n in range(-8, 8)),
}


@pytest.fixture(autouse=True)
def registered():
    for name, table in TABLES.items():
        register_format(name, table)
    yield
    for name in TABLES:
        del formats.FORMATS[name]


def normal(*shape):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("axis", [-2, -1])
def test_values_are_the_nearest_ones(name, axis):
    w = normal(16, 24)
    q = hki.QuantizedMatrix.quantize(w, name, 8, axis)
    scale = np.repeat(np.asarray(q.scale.astype(jnp.float32)), 8, -1)
    scale = scale.T if axis == -2 else scale
    values = scale[..., None] * np.asarray(TABLES[name], np.float32)
    at = np.abs(values - np.asarray(w)[..., None]).argmin(-1)
    want = np.take_along_axis(values, at[..., None], -1)[..., 0]
    np.testing.assert_allclose(q.materialize(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.every(3)
@pytest.mark.parametrize("activation", [None, "int8", "int8,groups"])
@pytest.mark.parametrize("name", ["own3", "own4", "wide4"])
def test_products_are_those_of_the_dense_weight(name, activation):
    q = hki.QuantizedMatrix.quantize(normal(64, 24), name, 32, activation=activation)
    dot = hki.use_implicit_args(jnp.matmul)
    exact = q if activation is None else q._replace(activation=None)
    for rows in (1, 5, 40):
        x = normal(rows, 64)
        want = x @ exact.materialize()
        error = np.abs(jax.jit(dot)(x, q) - want).max() / np.abs(want).max()
        assert error < (1e-5 if activation is None else 2e-2)
    x = normal(3, 24)
    transposed = hki.use_implicit_args(lambda x, w: x @ w.T)(x, exact)
    np.testing.assert_allclose(transposed, x @ exact.materialize().T, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_the_way_of_a_weight(tmp_path):
    """Made by a rule, trained below LoRA, saved, loaded by another program that knows the format."""
    params = {"linear": {"w": normal(32, 8)}}
    params = hki.quantize_params(params, rules=[QuantRule(weight_qtype="own4", tile_size=16)])
    assert params["linear"]["w"].format == "own4"
    params = hki.add_lora(params, 0, rank=2)
    loss = hki.use_implicit_args(lambda p: ((normal(4, 32) @ p["linear"]["w"]) ** 2).mean())
    optimizer = hki.freeze_declared(optax.adam(1e-2))
    _, grads = hki.value_and_grad(loss)(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    params = hki.apply_updates(params, updates)
    path = tmp_path / "params.safetensors"
    hki.save(path, params)
    program = (
        "import haiku_implicit as hki\n"
        f"hki.quantization.register_format('own4', {TABLES['own4']!r})\n"
        f"w = hki.merge_lora(hki.load({str(path)!r}))['linear']['w']\n"
        "print(float(abs(w).sum()))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    want = float(jnp.abs(hki.merge_lora(params)["linear"]["w"]).sum())
    assert float(run.stdout) == pytest.approx(want, rel=1e-6)
    unknown = program.splitlines()
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(unknown[:1] + unknown[2:])], capture_output=True, text=True
    )
    assert "CheckpointError" in run.stderr and "'own4'" in run.stderr


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("mine", (-1, 0, 1), "table: expected 2, 4, 8 or 16 different numbers"),
        ("mine", (-1, 0, 0, 1), "table: expected"),
        ("mine", (0, 1, 2, 3), "some negative and some positive"),
        ("mine", (-1, 0, 1, float("nan")), "table: expected"),
        ("mine", (-1, 0, 1, 1 + 1e-12), "table: expected"),  # equal in float32
        ("mine", (-1e300, -1, 0, 1), "table: expected"),
        ("float32", (-1, 1), "name: 'float32' has another meaning"),
        ("bfloat16", (-1, 1), "name: 'bfloat16' has another meaning"),
        ("nf4", (-1, 1), "name: 'nf4' has another meaning"),
        ("unf4", (-1, 1), "name: 'unf4' has another meaning"),
        ("q4_k", (-1, 1), "name: 'q4_k' has another meaning"),
        ("own2", (-1, 1), "name: 'own2' has another meaning"),
        ("My format", (-1, 1), "name: expected lower-case"),
    ],
)
def test_errors(name, table, message):
    with pytest.raises(ValueError, match=message):
        register_format(name, table)
