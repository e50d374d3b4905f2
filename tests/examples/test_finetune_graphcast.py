"""Fine-tuning GraphCast by its demo's own loss and gradients, on a stand-in with the same features."""

import functools
import json
import pathlib
import re
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dense_twin
import graphcast_demo
import haiku_implicit as hki
import presets
import training_costs
from tests.tiers import few

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "examples" / "stand_ins" / "graphcast"
SCRIPT = ROOT / "examples" / "finetune_graphcast.py"
PRESET = presets.read("graphcast")
SETTINGS = graphcast_demo.Settings(
    weights=None,
    data=None,
    statistics=None,
    target_steps=2,
    bfloat16=False,
    resolution=45.0,
    mesh_size=2,
    latent_size=8,
    message_steps=1,
)


@pytest.fixture(scope="module", autouse=True)
def own_modules():
    """Forgets the stand-in's modules, one of which is called `xarray`, after these tests."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("xarray", "xarray_jax", "weathernext"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def demo():
    return graphcast_demo.read(str(STAND_IN), SETTINGS)


def adapted(params, quantized=None):
    if quantized:
        params = hki.quantize_params(params, dtype=quantized, targets=PRESET.quantized)
    return hki.add_lora(params, 0, rank=2, targets=PRESET.adapters["lora"])


@pytest.mark.slow
def test_the_preset_has_all_matrices_but_those_of_four_features(demo):
    new = adapted(demo.params, "int8")
    kinds = {}
    for module, name, value in hk.data_structures.traverse(new):
        shape = np.shape(demo.params[module][name])
        kinds.setdefault(type(value).__name__, []).append((f"{module}/{name}", shape))
    assert all(len(shape) == 2 and shape[0] > 4 for _, shape in kinds.pop("LoRA"))
    (rest,) = kinds.values()
    dense = [path for path, shape in rest if len(shape) == 2]
    assert dense and all("/encoder_edges_" in path for path in dense)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", few([None, "int8"], "int8"))
def test_gradients_are_the_dense_twins(demo, quantized):
    """Two autoregressive steps with gradient checkpointing; no array of 64 kB becomes dense."""
    dense = demo.names["loss_fn"]
    model, trained = hki.freeze(dense, adapted(demo.params, quantized))
    trained = jax.tree.map(lambda x: x + 0.01, trained)  # `b` starts at zero

    def merged(params, *args):
        return dense.apply(hki.materialize(model.params(params)), *args)

    got, want = (
        training_costs.trace(
            training_costs.Form(functools.partial(demo.gradients, m), trained, (demo.windows[0],))
        )
        .lower()
        .compile()(trained, demo.windows[0])
        for m in (model, dense._replace(apply=merged))
    )
    assert dense_twin.difference(got, want) < 1e-3
    assert min(float(jnp.abs(x).max()) for x in jax.tree.leaves(want[1])) > 0
    assert demo.names["loss_fn"] is dense


@pytest.mark.slow
def test_the_start_has_the_pretrained_models_bits():
    demo = graphcast_demo.read(str(STAND_IN), SETTINGS._replace(bfloat16=True))
    dense = demo.names["loss_fn"]
    model, trained = hki.freeze(dense, adapted(demo.params))
    losses = [
        jax.jit(functools.partial(demo.loss, m))(params, demo.windows[0])
        for m, params in ((model, trained), (dense, demo.params))
    ]
    assert losses[0] == losses[1]
    moved = jax.tree.map(lambda x: x + 0.1, trained)
    assert jax.jit(functools.partial(demo.loss, model))(moved, demo.windows[0]) != losses[1]


def test_a_checkout_in_the_former_form(tmp_path):
    """Until 2026 the package was called `graphcast`, and the notebook lay at the root."""
    (tmp_path / "graphcast").mkdir()
    with pytest.raises(graphcast_demo.InputError, match=r"graphcast\.autoregressive could not be"):
        graphcast_demo.read(str(tmp_path), SETTINGS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a notebook"),
        ("{}", "is not a notebook: 'cells'"),
        (json.dumps({"cells": []}), "0 cells of .* define grads_fn, expected one"),
        (json.dumps({"cells": [{"source": ["def grads_fn(", "x)"]}] * 2}), "2 cells of"),
    ],
)
def test_another_notebook(tmp_path, text, message):
    path = tmp_path / "demo.ipynb"
    if text is not None:
        path.write_text(text)
    with pytest.raises(graphcast_demo.InputError, match=message):
        graphcast_demo.cell_of(path)


def forms(function, trained, wrong=0.0):
    """A step, and its twin, whose gradients may be wrong."""

    def other(trained):
        loss, grads = function(trained)
        return loss, jax.tree.map(lambda x: x + wrong, grads)

    form = functools.partial(training_costs.Form, trained=trained, args=())
    return {"one": form(function, twin="two"), "two": form(other)}


@pytest.mark.parametrize("rtol", [1e-3, None])
def test_costs_and_gradients_that_are_off(capsys, rtol):
    step, trained = jax.value_and_grad(lambda p: (p["w"] ** 2).sum()), {"w": jnp.ones((4, 4))}
    training_costs.compare(forms(step, trained), runs=2, rtol=rtol)
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[:2] == ["trace", "s"] and rows[2].count("(1.00)") == 4
    assert rows[2].endswith("0.0e+00") and not rows[3].endswith("e+00")
    if rtol is not None:
        with pytest.raises(AssertionError, match="gradients are off by"):
            training_costs.compare(forms(step, trained, wrong=0.1), runs=1, rtol=rtol)


def test_what_becomes_dense_is_an_error():
    params = hki.quantize_params({"a": {"w": jnp.ones((256, 256))}}, dtype="int8")
    step = jax.value_and_grad(
        lambda x: hki.use_implicit_args(lambda p, x: jnp.tanh(p["a"]["w"]).sum() * x)(params, x)
    )
    with pytest.raises(AssertionError, match="arrays became dense"):
        training_costs.trace(training_costs.Form(step, jnp.float32(1), ()))


# --- the script ---------------------------------------------------------------------------------


def script(folder, *flags, ok=True):
    """Runs the script in a new process; returns what it printed."""
    sizes = ["--resolution=45", "--latent_size=8", "--message_steps=1", "--mesh_size=2", "--rank=2"]
    always = [f"--repo={STAND_IN}", f"--adapter={folder / 'adapter.safetensors'}", *sizes]
    run = subprocess.run(
        [sys.executable, SCRIPT, *always, *flags], capture_output=True, text=True, check=False
    )
    assert (run.returncode == 0) == ok, run.stderr
    return run.stdout if ok else run.stderr


def losses(text):
    return [float(x) for x in re.findall(r"\d+\.\d+", text.partition("held-out loss")[2])]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "int8"])
def test_the_whole_road(tmp_path, base):
    """Trains, merges in a new process, and scores in a third one what GraphCast reads."""
    before, after, *_ = losses(script(tmp_path, f"--base={base}", "--steps=10"))
    assert after < 0.9 * before
    merged = tmp_path / "merged.npz"
    (found,) = losses(script(tmp_path, f"--base={base}", "--do=merge", f"--merged={merged}"))
    (scored,) = losses(script(tmp_path, "--do=score", f"--weights={merged}"))
    assert scored == found and abs(found - after) < 0.02 * after
    with np.load(merged) as arrays:
        assert "params:mesh_gnn/~_networks_builder/processor_edges_0_mlp/~/linear_0:w" in arrays
    if base == "int8":  # the adapter belongs to the base that it was trained on
        text = script(tmp_path, "--do=merge", f"--merged={merged}", ok=False)
        assert "--adapter: " in text and "another base" in text


@pytest.mark.slow
def test_the_comparison():
    out = script(pathlib.Path(), "--do=compare", "--runs=1", "--nobfloat16")
    assert out.splitlines()[2].startswith("by hand ") and out.count("LoRA on int8") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repo=/no/such"], "--repo: /no/such has none of the folders weathernext, graphcast"),
        (["--weights=/no/such"], "--weights: /no/such is not a checkpoint of GraphCast (.npz)"),
        (["--data=/no/such"], "--data: /no/such is not a netCDF file"),
        (["--statistics=/no/such"], "--statistics: /no/such/diffs_stddev_by_level.nc"),
        (["--rank=400"], "--rank=400: "),
        (["--adapter=/no/such/file"], "--adapter: /no/such/file is in a folder that is not there"),
        (["--do=merge"], "--merged: give a path"),
        (["--do=merge", "--merged=m.npz"], "--do=train makes one"),
    ],
)
def test_what_a_user_gets_wrong(tmp_path, flags, message):
    assert message in script(tmp_path, *flags, ok=False)
