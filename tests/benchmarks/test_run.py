"""The benchmark's runner, on small sizes: its records, its report, and the aims that are counts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import matplotlib.image
import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import implementations, models, report, run, stages

SIZES = models.Sizes(depth=2, width=16, heads=2, vocabulary=32, batch=2, length=8, rank=2)


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    """What `app.run` would do."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["run"])


def run_small(path):
    """What the runner writes."""
    small = dict(depths=["1"], stacked=["2"], repeats=1, runs=2, width=16, length=8)
    small.update(again=["1"], again_stacked=["2"])
    small["implementations"] = ["library"]  # LoRA by hand is always there
    with flagsaver.flagsaver(**small, output=str(path), report=False):
        run.main(["run"])
        more = dict(depths=["2"], stacked=[], append=True, fuse_up_to=1)
        with flagsaver.flagsaver(**more):
            run.main(["run"])
        with (
            flagsaver.flagsaver(**dict(more, runs=3)),
            pytest.raises(Exception, match="runs 2, got"),
        ):
            run.main(["run"])
        recorded = report.load(path)
        with flagsaver.flagsaver(again_only=True, again_stacked=[]):
            run.main(["run"])
    results = report.load(path)
    assert [len(r["again"]["cases"]) for r in (recorded, results)] == [2, 1]
    assert dict(results, again=None) == dict(recorded, again=None)
    return recorded


@pytest.mark.slow
def test_a_run(tmp_path, monkeypatch):
    """All that is to be said of one run, which takes long."""
    results = run_small(tmp_path / "results.json")
    check_that_records_are_complete(results)
    check_that_the_program_is_that_of_lora_by_hand(results)
    assert results["eager"]["traces"] == 0
    check_report(results, tmp_path, monkeypatch)


def check_that_records_are_complete(results):
    kinds = [(c["depth"], c["stacked"], c["fused"]) for c in results["cases"]]
    assert kinds == [(1, False, True), (2, False, False), (2, True, True)]
    assert {"jax", "dm-haiku"} <= set(results["environment"]["versions"])
    for case in results["cases"]:
        for record in case["implementations"].values():
            assert [len(record[s]) for s in report.STAGES] == [1, 1, 1, 2]

    for case in results["again"]["cases"]:
        for record in case["implementations"].values():
            assert {kind: len(times) for kind, times in record.items()} == dict.fromkeys(
                report.AGAIN, 1
            )


def check_that_the_program_is_that_of_lora_by_hand(results):
    for case in results["cases"]:
        by_hand, library = (case["implementations"][n] for n in ("by_hand", "library"))
        assert library["flops"] == pytest.approx(by_hand["flops"], rel=1e-3)
        assert library["equations"] == by_hand["equations"]
        assert library["temporary_bytes"] <= 1.01 * by_hand["temporary_bytes"]


@pytest.mark.slow
def test_gradients_of_all_implementations_agree():
    tokens, params = stages.example(SIZES)
    arguments = *implementations.arguments("by_hand", params), tokens
    found = implementations.available()
    gradients = {
        name: jax.jit(jax.grad(found[name](SIZES)))(*arguments) for name in found if name != "dense"
    }
    for gradient in gradients.values():
        assert jax.tree.all(
            jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-6), gradient, gradients["by_hand"])
        )


@pytest.mark.slow
def test_a_wrong_loss_is_not_timed(monkeypatch):
    def wrong(sizes):
        loss = implementations.by_hand(sizes)
        return lambda *args: 1.01 * loss(*args)

    monkeypatch.setattr(implementations, "library", wrong)
    with pytest.raises(AssertionError, match="library has loss"):
        stages.measure(
            dataclasses.replace(SIZES, depth=1), ["by_hand", "library"], repeats=1, runs=1
        )


def test_ratios_are_medians_within_a_turn():
    by_hand = dict(trace=[1.0, 10.0, 1.0], lower=[1.0, 10.0, 1.0])
    library = dict(trace=[2.0, 20.0, 9.0], lower=[2.0, 20.0, 9.0])
    case = dict(implementations=dict(by_hand=by_hand, library=library))
    assert report.ratio(case, "library", ("trace", "lower")) == 2.0
    assert report.seconds(case, "library", "trace", "lower") == 18.0


def check_report(results, tmp_path, monkeypatch):
    document = tmp_path / "benchmarks.md"
    document.write_text("".join(page.read_text() for page in report.DOCUMENTS))
    monkeypatch.setattr(report, "DOCUMENTS", (document,))
    report.write_tables(results)
    once = document.read_text()
    report.write_tables(results)
    assert document.read_text() == once
    assert "| 2, `layer_stack` | haiku_implicit |" in once
    assert "| 2, `layer_stack` | gradient |" in once
    assert results["environment"]["date"] in once
    for image in report.draw(results, tmp_path):
        assert matplotlib.image.imread(image).std() > 0
    document.write_text("nothing")
    with pytest.raises(ValueError, match="expected one '<!-- environment -->', found 0"):
        report.write_tables(results)


def test_the_recorded_results_are_those_of_the_document():
    recorded = report.load(run.RESULTS)
    pages = "".join(page.read_text() for page in report.DOCUMENTS)
    for name, table in report.tables(recorded).items():
        assert table in pages, name


def test_what_is_written_is_json(tmp_path):
    path = tmp_path / "results.json"
    run.write(dict(seconds=[1.23456789012, 2.0], name="a, b", flops=1234567.0), path)
    assert json.loads(path.read_text()) == dict(
        seconds=[1.2345679, 2.0], name="a, b", flops=1234567.0
    )


def test_unknown_implementation():
    with flagsaver.flagsaver(implementations=["nothing"]):
        with pytest.raises(Exception, match="--implementations: nothing not found, there is dense"):
            run.chosen()
