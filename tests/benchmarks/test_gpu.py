"""The GPU benchmarks: what they do without a GPU, and that their programs and tables are right."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from absl import flags
from absl.testing import flagsaver

import haiku_implicit as hki
from benchmarks import tables
from benchmarks.gpu import products as benchmark
from benchmarks.gpu import steps, tune
from tests.cuda import lowered_for_cuda

KERNEL = "__gpu$xla.gpu.triton"


@pytest.fixture(autouse=True)
def parsed_flags():
    """What `app.run` would do."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["products"])


def test_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.pallas, "supported", lambda: False)
    output = tmp_path / "results.json"
    with flagsaver.flagsaver(gpu_output=str(output)), pytest.raises(SystemExit) as raised:
        benchmark.main(["products"])
    assert raised.value.code == 1 and not output.exists()
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_results_and_table(tmp_path, monkeypatch):
    """Run on whatever is there: every formulation gives the same product."""
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- gpu -->\nnothing\n<!-- end -->\nafter\n")
    monkeypatch.setattr(benchmark, "DOCUMENTS", (document,))
    monkeypatch.setattr(benchmark, "WEIGHTS", (("int4", 32), ("int8", None)))
    monkeypatch.setattr(benchmark, "number_of_weights", lambda *_: 2)
    monkeypatch.setattr(benchmark, "copy_bandwidth", lambda: 1e9)
    output = tmp_path / "results.json"
    with flagsaver.flagsaver(gpu_sizes=["64x16"], gpu_rows=["3"], gpu_turns=1):
        output.write_text(json.dumps(benchmark.measure()))
    with flagsaver.flagsaver(gpu_output=str(output), gpu_report_only=True):
        benchmark.main(["products"])
    results = json.loads(output.read_text())
    assert results["environment"]["device"]
    # Rounded to bfloat16 once or twice.
    assert all(case["error"] < 1e-2 for case in results["cases"])
    lines = document.read_text().splitlines()
    assert sum(line.startswith("| int4, groups of 32 | 64 × 16 | 3 |") for line in lines) == 1
    assert lines[0] == "before" and lines[-1] == "after"


def test_a_time_is_that_of_one_product(monkeypatch):
    """Of large weights there are fewer copies, and tokamax is asked if it is there."""
    monkeypatch.setattr(benchmark, "number_of_weights", lambda nbytes, m: 2 if nbytes > 2000 else 3)
    monkeypatch.setattr(benchmark, "in_turns", lambda runs, turns: [[len(run())] for run in runs])
    monkeypatch.setattr(benchmark, "tokamax", Tokamax)
    monkeypatch.setattr(benchmark, "qwix", Qwix, raising=False)
    benchmark.weights.cache_clear()
    found = benchmark.measure_case((64, 16), "int4", 32, 3)
    benchmark.weights.cache_clear()
    assert found["times"] == dict.fromkeys(benchmark.FORMULATIONS, [1.0])
    assert set(Tokamax.rows) == {3}
    header, *_, line = benchmark.tables(
        dict(environment=dict(date="", device="", versions={}), turns=1, bandwidth=1, cases=[found])
    )["gpu"].splitlines()[-3:]
    assert len(header.split("|")) == len(line.split("|"))


class Qwix:
    """Gives a weight as it is, for what `qwix.quantize` would give."""

    @staticmethod
    def quantize(w, qtype, channelwise_axes, tiled_axes):
        assert (qtype, channelwise_axes, tiled_axes) == ("int4", [1], {0: 32})
        return w


class Tokamax:
    """Multiplies as `tokamax.ragged_dot` does, for one group."""

    rows: list[int] = []

    @classmethod
    def ragged_dot(cls, x, w, sizes):
        assert sizes.shape == (1,)
        cls.rows.append(x.shape[0])
        return x @ w[0]


def test_the_document_has_its_place(tmp_path):
    copy = tmp_path / "document.md"
    (page,) = benchmark.DOCUMENTS
    copy.write_text(page.read_text())
    tables.replace([copy], {"gpu": "a table", "gpu steps": "another"})
    assert "a table" in copy.read_text() and "another" in copy.read_text()


def test_the_table_of_steps(tmp_path, monkeypatch):
    document, output = tmp_path / "document.md", tmp_path / "steps.json"
    document.write_text("<!-- gpu steps -->\n<!-- end -->\n")
    monkeypatch.setattr(benchmark, "DOCUMENTS", (document,))
    sizes = dict(weights=2e9, arguments=3e9, temporaries=4e9)
    times = {"all weights": 0.2, "LoRA": 0.15}
    case = dict(model="Llama", batch="8x512", **sizes)
    cases = [case | dict(method=name, time=times[name]) for name in times]
    about = dict(environment=benchmark.environment(), layers=12, width=2048, blocks=48, rank=16)
    output.write_text(json.dumps(about | dict(cases=cases)))
    with flagsaver.flagsaver(steps_output=str(output), steps_report_only=True):
        steps.main(["steps"])
    assert "| Llama, 8x512 | LoRA | 150.0 | 0.75 | 2.00 | 3.00 | 4.00 |" in document.read_text()


@pytest.mark.slow
def test_products_for_a_gpu(monkeypatch):
    """XLA takes every program that is timed there, and the kernel is in those that say so."""
    monkeypatch.setattr(benchmark, "number_of_weights", lambda *_: 1)
    monkeypatch.setattr(benchmark.pallas, "capability", lambda: 9.0)
    with flagsaver.flagsaver(gpu_sizes=["4096x14336"]):
        cases = benchmark.cases()
    for size, weight, group, m in cases:
        w = jax.ShapeDtypeStruct(size, jnp.bfloat16)
        forms = jax.eval_shape(lambda w, n=weight, g=group: benchmark.forms(w, n, g), w)
        x = jax.ShapeDtypeStruct((m, size[0]), jnp.bfloat16)
        for name, form in forms.items():
            kernel = name == "kernel"
            monkeypatch.setattr(benchmark.pallas, "available", lambda kernel=kernel: kernel)
            text = lowered_for_cuda(lambda a=(name, form, x): benchmark.traced(*a)[0])
            assert (KERNEL in text) == (kernel and m <= 128)


@pytest.mark.slow
def test_tiles_for_a_gpu(monkeypatch):
    """A tile of each product, and its other formulations."""
    monkeypatch.setattr(benchmark, "number_of_weights", lambda *_: 1)
    monkeypatch.setattr(benchmark.pallas, "capability", lambda: 9.0)
    tried = {}
    for case, options in tune.work():
        tried[case, options.get("formulation")] = dict(options)
    assert len(tried) == 3 * len(tune.CASES)
    with flagsaver.flagsaver(tune_compile=True, tune_size="4096x512"):
        for (case, formulation), options in tried.items():
            options.pop("formulation", None)
            *of_weight, m = case
            quantized, dense = tune.weight(*of_weight)
            w = dense if formulation == "dense" else quantized
            x = jax.ShapeDtypeStruct((m, 4096), jnp.bfloat16)
            monkeypatch.setattr(
                benchmark.pallas, "available", lambda name=formulation: name is None
            )
            monkeypatch.setattr(benchmark.pallas, "plan_of", tune.with_options(options))
            a = (formulation or "kernel", w, x)
            text = lowered_for_cuda(lambda a=a: benchmark.traced(*a)[0])
            assert (KERNEL in text) == (formulation is None)


@pytest.mark.slow
@pytest.mark.all_slow
@pytest.mark.parametrize("method", steps.METHODS)
@pytest.mark.parametrize(("name", "batch"), [("Llama", "1x16"), ("Pairformer", "16")])
def test_steps_for_a_gpu(name, batch, method, monkeypatch):
    monkeypatch.setattr(benchmark.pallas, "capability", lambda: 9.0)
    monkeypatch.setattr(benchmark.pallas, "available", lambda: True)
    optimizer, of = optax.adam(1e-4), steps.MODELS[name]
    with flagsaver.flagsaver(steps_layers=1, steps_width=128, steps_blocks=2):
        model, params = steps.METHODS[method](of.dense)
        state = optimizer.init(params)
        step = (model, of.loss, optimizer, params, state, of.batch(batch))
        text = lowered_for_cuda(lambda: steps.traced(*step))
    assert (KERNEL in text) == ("LoRA on" in method)


SCRIPT = benchmark.ROOT / "benchmarks" / "gpu" / "run.sh"


def script(*arguments, **environment):
    """Runs the script on a CPU; returns its exit status and what it printed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # of python3
    env = os.environ | dict(PATH=path, JAX_PLATFORMS="cpu") | environment
    command = ["bash", SCRIPT, *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow
def test_the_script_without_a_gpu(tmp_path):
    """It says so at once; a stage that is asked for runs, keeps its log, and says that it failed."""
    status, shown = script(tmp_path)
    assert status == 1 and "JAX finds no GPU here" in shown and "===" not in shown
    status, shown = script(tmp_path, STAGES="products", LIMIT="100")
    assert status == 1 and "products: exit status 1\n" in shown and "=== done" in shown
    assert "no GPU here" in (tmp_path / "products.log").read_text()


def test_what_the_script_is_not_given(tmp_path):
    assert script(tmp_path, STAGES="product") == (2, "STAGES: no stage is called product\n")
    bare = tmp_path / "python3"  # without packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    status, shown = script(tmp_path, PATH=path)
    assert status == 1 and "No module named 'haiku'" in shown and "Put the wheels into" in shown
    status, shown = script(tmp_path, tmp_path / "none", PATH=path)
    assert status == 1 and f"wheels for this Python, got {tmp_path}/none\n" in shown


@pytest.mark.slow
@pytest.mark.all_slow
@pytest.mark.parametrize("method", ["all weights", "LoRA on int4, groups of 128"])
@pytest.mark.parametrize(("name", "batch"), [("Llama", "2x16"), ("Pairformer", "6")])
def test_steps(name, batch, method):
    """A step lowers the loss, and trains LoRA's factors alone."""
    sizes = dict(steps_layers=1, steps_width=128, steps_blocks=1)
    with flagsaver.flagsaver(**sizes, steps_number=2):
        found = steps.measure(name, method, batch)
    first, last = found["loss"]
    assert last < first
    assert (found["trained"] == found["weights"]) == (method == "all weights")


def test_tiles(tmp_path, monkeypatch):
    """Every tile that is tried has a plan; the report has today's tile and the best one."""
    monkeypatch.setattr(tune, "RESULTS", tmp_path / "tiles.json")
    document = tmp_path / "document.md"
    document.write_text("<!-- tiles -->\n<!-- end -->\n")
    monkeypatch.setattr(benchmark, "DOCUMENTS", (document,))
    case = ("int4", 128, -2, 16)
    lines = [
        dict(case=case, options={}, formulation=name, error=0.1, time=time, bytes=10)
        for name, time in (("dense", 4e-6), ("fusion", 5e-6), ("kernel", 3e-6))
    ]
    lines.append(lines[-1] | dict(options=dict(rows=32), time=2e-6))
    results = tmp_path / "tiles.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tune.report(results, "a machine")
    assert "| int4, 128 | -2 | 16 | 4 | 3 | 2 | 5 |" in document.read_text()
    [found] = json.loads((tmp_path / "tiles.json").read_text())["cases"]
    assert found["best_tile"] == dict(rows=32) and found["kernel"] == 3e-6
    w = jax.eval_shape(
        lambda w: hki.QuantizedMatrix.quantize(w, "int4", 128),
        jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16),
    )
    for case, options in tune.work():
        if "formulation" not in options:
            *sizes, _ = tune.with_options(options)(case[-1], 1, w, jnp.bfloat16, None).tile
            assert all(n & (n - 1) == 0 for n in sizes)
