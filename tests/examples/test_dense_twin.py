"""The weights of a part out of those of a whole model, and what is said of those that do not fit."""

import pathlib
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dense_twin
import haiku_implicit as hki

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests" / "examples" / "stand_ins"

WEIGHTS = {
    "diffuser/evoformer/__layer_stack_no_per_layer_1/trunk/linear": {
        "w": np.arange(24.0).reshape(4, 2, 3)
    },
    "diffuser/other/linear": {"w": np.zeros((4, 2, 3))},
}
SHAPES = {
    "__layer_stack_no_per_layer/trunk/linear": {"w": jax.ShapeDtypeStruct((2, 2, 3), "bfloat16")}
}


def test_the_first_layers_of_a_stack_are_taken():
    params = dense_twin.params_from(WEIGHTS, SHAPES)
    got = params["__layer_stack_no_per_layer/trunk/linear"]["w"]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(float), np.arange(12.0).reshape(2, 2, 3))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"trunk/absent": {"w": np.zeros((2, 2, 3))}}, "0 modules are called .../trunk/absent"),
        ({"linear": {"w": np.zeros((2, 2, 3))}}, "2 modules are called .../linear"),
        ({"trunk/linear": {"b": np.zeros(3)}}, "linear/b is missing, expected"),
        ({"trunk/linear": {"w": np.zeros((2, 3, 3))}}, r"\(4, 2, 3\), expected \(2, 3, 3\)"),
        ({"trunk/linear": {"w": np.zeros((5, 2, 3))}}, r"\(4, 2, 3\), expected \(5, 2, 3\)"),
    ],
)
def test_weights_that_do_not_fit(shapes, message):
    with pytest.raises(dense_twin.InputError, match=message):
        dense_twin.params_from(WEIGHTS, shapes)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(dense_twin.InputError, match="--repo: there is no folder"):
        dense_twin.modules_of(str(tmp_path), ["alphafold3"])
    (tmp_path / "src").mkdir()
    with pytest.raises(dense_twin.InputError, match="no_such_model could not be imported from"):
        dense_twin.modules_of(str(tmp_path), ["no_such_model"])


@pytest.mark.parametrize("times", [1.0, 1.01])
def test_gradients_that_are_not_those_of_the_twin(times, capsys):
    x = jax.random.normal(jax.random.key(0), (8, 16))
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 4])(x)))
    params = hki.add_lora(model.init(jax.random.key(1), x), 0, rank=2)
    factors = iter([times, 1.0])  # ours is traced first

    def loss_of(apply, params):
        return next(factors) * jnp.square(apply(params, x)).mean()

    if times == 1.0:
        dense_twin.check_gradients(model, params, loss_of)
        assert "became dense: 0 arrays" in capsys.readouterr().out
    else:
        with pytest.raises(dense_twin.InputError, match="not those of the dense twin"):
            dense_twin.check_gradients(model, params, loss_of)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["encoder,tower,decoder", "tower,nothing"])
def test_alphagenome_as_a_script(parts):
    """Its own name is that of a package that the model imports."""
    script = ROOT / "examples" / "alphagenome.py"
    flags = [f"--repo={STAND_INS / 'alphagenome'}", f"--parts={parts}", "--length=2048", "--runs=1"]
    run = subprocess.run(
        [sys.executable, script, *flags], capture_output=True, text=True, check=False
    )
    if "nothing" in parts:
        assert run.returncode == 1 and run.stderr.strip().endswith("of encoder, tower, decoder")
    else:
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("LoRA on int4") == 3
