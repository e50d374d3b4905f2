"""The tables of fidelity are those of the recorded results, and the aims that are among these."""

import pytest

from benchmarks import fidelity_report as report


@pytest.fixture(scope="module")
def recorded():
    return report.recorded()


def test_the_recorded_results_are_those_of_the_document(recorded):
    results, _ = recorded
    assert list(report.in_order(results)) == list(report.CASES)
    pages = "".join(page.read_text() for page in report.DOCUMENTS)
    for name, table in report.tables(*recorded).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end -->" in pages, name


@pytest.mark.parametrize(
    "kind", [k for k in report.BESIDE_GGUF if k not in ("Q3_K", "IQ3_S", "Q2_K")]
)
def test_no_worse_than_llama_cpp_at_equal_bits(kind, recorded):
    """However llama.cpp quantizes without data; a hundredth of a bit is worth 0.7 % of the error."""
    results, theirs = recorded
    ours = results["cases"][report.BESIDE_GGUF[kind]]
    ways = [record for name, record in theirs["cases"].items() if name.split(",")[0] == kind]
    assert ours["bits"] <= ways[0]["bits"] + 0.011
    more = max(ours["bits"] - ways[0]["bits"], 0)
    assert ours["rms"] * 2**more <= min(record["rms"] for record in ways)
