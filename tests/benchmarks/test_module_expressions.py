"""The costs of module expressions: their records on small models, their report, and the recorded ones."""

import matplotlib.image
import pytest

from benchmarks import expression_costs, expression_report, result_files

DEPTHS = [1, 2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What is written after the last of two depths."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    for results in expression_costs.measure(DEPTHS, turns=1, compile_up_to=1):
        result_files.write(results, path)
    return expression_report.load(path)


@pytest.mark.slow
def test_records_are_complete(measured):
    assert [case["depth"] for case in measured["cases"]] == DEPTHS
    for case in measured["cases"]:
        assert set(case["queries"]) == set(expression_costs.QUERIES)
        derived = {"slowest_query", "median_query"}
        named = {"plain", *expression_report.RATIOS, *expression_report.TIMES}
        in_no_table = {"save", "load"}
        assert set(case["ms"]) == named - derived | in_no_table
        for ms in (*case["ms"].values(), *case["queries"].values()):
            assert len(ms) == 1 and min(ms) > 0
    one, two = (case["equations"] for case in measured["cases"])
    assert 50 < one < two < 2 * one


@pytest.mark.slow
def test_the_programs_are_the_same(measured):
    one, two = (case["program"] for case in measured["cases"])
    assert one["same_hlo"] and two["same_hlo"] and one["same_compiled"]
    assert one["operations"][0] == one["operations"][1] > 100
    assert "operations" not in two


def test_another_program_is_seen():
    model = expression_costs.model_of(1)
    (norm,) = model.make()["llama/final_norm"]
    changed = model.make().sub("llama/final_norm", None)
    found = expression_costs.compare_programs(model, changed, compiled=False)
    assert norm.type_name == "RMSNorm" and not found["same_hlo"]


def test_every_query_finds_something():
    mox = expression_costs.model_of(3).make()
    found = {xpath: mox.query(xpath.format(middle=1)) for xpath in expression_costs.QUERIES}
    assert found.pop("count(//dot_general)") == 28
    counts = {xpath: len(nodes) for xpath, nodes in found.items()}
    assert list(counts.values()) == [3, 3, 1, 6, 7, 21]


def test_ratios_are_medians_within_a_turn():
    case = dict(ms=dict(plain=[1.0, 10.0, 1.0], make=[2.0, 20.0, 9.0]))
    case["queries"] = dict(a=[1.0, 3.0, 2.0], b=[4.0, 4.0, 9.0], c=[0.0, 1.0, 1.0])
    assert expression_report.ratio(case, "make") == 2.0
    assert expression_report.milliseconds(case, "make") == 9.0
    assert expression_report.milliseconds(case, "slowest_query") == 4.0
    assert expression_report.milliseconds(case, "median_query") == 2.0


@pytest.mark.slow
def test_report(measured, tmp_path, monkeypatch):
    document = tmp_path / "module_expressions.md"
    document.write_text("".join(page.read_text() for page in expression_report.DOCUMENTS))
    monkeypatch.setattr(expression_report, "DOCUMENTS", (document,))
    monkeypatch.setattr(expression_report, "IMAGE", tmp_path / "images" / "plot.png")
    expression_report.write(measured)
    once = document.read_text()
    expression_report.write(measured)
    assert document.read_text() == once
    operations = measured["cases"][0]["program"]["operations"][0]
    (row,) = [line for line in once.splitlines() if line.endswith(f"| {operations}, the same |")]
    assert row.startswith(f"| 1 | {measured['cases'][0]['equations']} | ") and "| yes |" in row
    assert "| yes | not compiled |" in once
    assert measured["environment"]["date"] in once
    assert matplotlib.image.imread(expression_report.IMAGE).std() > 0


@pytest.fixture(scope="module")
def recorded():
    return expression_report.load(expression_report.RESULTS)


def test_aims(recorded):
    for case in recorded["cases"]:
        assert expression_report.ratio(case, "make_with_params") <= 2
        assert expression_report.ratio(case, "evaluate") <= 1.2
        assert case["program"]["same_hlo"] and case["program"].get("same_compiled", True)


def test_the_recorded_results_are_those_of_the_document(recorded):
    pages = "".join(page.read_text() for page in expression_report.DOCUMENTS)
    for name, table in expression_report.tables(recorded).items():
        expected = f"<!-- {name} -->\n{table}\n<!-- end -->"
        assert expected in pages, name
