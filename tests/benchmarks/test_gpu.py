"""The GPU benchmarks: what they do without a GPU, and that their programs and tables are right."""

import json

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

import haiku_implicit as hki
from benchmarks import tables
from benchmarks.gpu import products as benchmark
from benchmarks.gpu import steps, tune


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


def test_the_document_has_its_place(tmp_path):
    copy = tmp_path / "document.md"
    (page,) = benchmark.DOCUMENTS
    copy.write_text(page.read_text())
    tables.replace([copy], {"gpu": "a table"})
    assert "a table" in copy.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all weights", "LoRA on int4, groups of 128"])
def test_steps(method):
    """A step lowers the loss, and trains LoRA's factors alone."""
    with flagsaver.flagsaver(steps_layers=1, steps_width=128, steps_number=2):
        found = steps.measure(method, "2x16")
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
