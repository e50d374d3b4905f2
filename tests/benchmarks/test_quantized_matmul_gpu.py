"""The GPU benchmark: what it does without a GPU, and that its programs and its table are right."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import quantized_matmul_gpu as benchmark
from benchmarks import tables


@pytest.fixture(autouse=True)
def parsed_flags():
    """What `app.run` would do."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["quantized_matmul_gpu"])


def test_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.pallas, "supported", lambda: False)
    output = tmp_path / "results.json"
    with flagsaver.flagsaver(gpu_output=str(output)), pytest.raises(SystemExit) as raised:
        benchmark.main(["quantized_matmul_gpu"])
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
        benchmark.main(["quantized_matmul_gpu"])
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
