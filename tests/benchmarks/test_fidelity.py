"""The tables of fidelity are those of the recorded results, and the aims that are among these."""

import pytest

from benchmarks import fidelity_report as report


@pytest.fixture(scope="module")
def results():
    return report.recorded()


def test_the_recorded_results_are_those_of_the_document(results):
    assert list(report.in_order(results)) == list(report.CASES)
    assert not {*results["cases"]} - {*report.CASES, *report.LLAMA_CPP}
    pages = "".join(page.read_text() for page in report.DOCUMENTS)
    for name, table in report.tables(results).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end -->" in pages, name


@pytest.mark.parametrize("kind", [kind for kind in report.BESIDE_GGUF if kind != "IQ2_S"])
def test_no_worse_than_llama_cpp_at_equal_bits(kind, results):
    """However llama.cpp quantizes without data; a hundredth of a bit is worth 0.7 % of the error."""
    ours, theirs = results["cases"][report.BESIDE_GGUF[kind]], report.without_data(results, kind)
    assert ours["bits"] <= theirs["bits"] + 0.011
    more = max(ours["bits"] - theirs["bits"], 0)
    assert ours["rms"] * 2**more <= theirs["rms"]


def test_with_data_no_type_of_llama_cpp_is_as_good_in_as_many_bits(results):
    """In MiniLM's cosine, also with three hundredths of a bit more than the format here."""
    both = report.with_and_without_data(results)
    for name in report.WITH_DATA:
        ours = both[name][1]
        beaten = [
            own
            for kind in report.LLAMA_CPP_WITH_DATA
            if (own := both[f"llama.cpp: {kind}"][1])["bits"] < ours["bits"] + 0.035
        ]
        assert all(own["cosine"] < ours["cosine"] for own in beaten), name


def test_a_case_without_all_figures_is_left_out(results):
    """As `--cases=... --nocosine` records a case that was never measured before."""
    name = "fp4, 32, mse"
    others = {key: x for key, x in results["cases"].items() if key != name}
    new = {**results, "cases": {**others, name: {"perplexity": 60.0}}}
    assert report.tables(new) == report.tables({**results, "cases": others})
