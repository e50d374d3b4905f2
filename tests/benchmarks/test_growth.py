"""How costs grow: the runner on small sizes, its report, and that nothing recorded is superlinear in depth."""

import json

import matplotlib.image
import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import growth, growth_report

SMALL = dict(width=16, heads=2, vocabulary=32, batch=2, length=8, rank=2)
AXES = {
    "depth": growth.Axis((1, 2), "depth", SMALL, compiled_up_to=1),
    "adapters": growth.Axis((2,), "adapters", dict(SMALL, depth=1), dict(devices=2)),
}


@pytest.fixture(autouse=True)
def parsed_flags():
    """What `app.run` would do."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["growth"])


@pytest.fixture(scope="module")
def recorded():
    return json.loads(growth.RESULTS.read_text())


@pytest.mark.slow
def test_a_run(tmp_path, monkeypatch):
    """All that is to be said of one run, which takes long."""
    monkeypatch.setattr(growth, "AXES", AXES)
    monkeypatch.setattr(growth, "NAMES", ("by_hand", "library"))
    monkeypatch.setattr(growth_report, "DOCUMENTS", (tmp_path / "growth.md",))
    monkeypatch.setattr(growth_report, "IMAGES", tmp_path)
    path = tmp_path / "growth.json"
    with flagsaver.flagsaver(growth_output=str(path), growth_report=False, growth_runs=1):
        growth.main(["growth"])
        results = json.loads(path.read_text())
        monkeypatch.setattr(growth, "NAMES", ("by_hand",))
        with flagsaver.flagsaver(axis=["adapters"], growth_counts_only=True):
            growth.main(["growth"])
    check_records(results)
    again = json.loads(path.read_text())["axes"]
    assert again["depth"] == results["axes"]["depth"]
    assert set(again["adapters"]["points"][0]) == {
        "value", "implementation", *growth_report.COUNTS
    }  # fmt: skip
    check_report(results, tmp_path)


def check_records(results):
    assert list(results["axes"]) == list(AXES)
    for name, axis in results["axes"].items():
        for p in axis["points"]:
            assert p["equations"] > 50 and p["calls"] > 10_000 and p["trace"] > 0
            compiled = name != "depth" or p["value"] == 1
            assert all((k in p) == compiled for k in ("step", "compile", "loss", "peak_bytes"))
        by_hand, library = (
            growth_report.series(axis, n, "operations")[1] for n in ("by_hand", "library")
        )
        if name != "adapters":
            assert by_hand == library
    assert all(p["bytes_sent"] > 0 for p in results["axes"]["adapters"]["points"])


def check_report(results, folder):
    document = folder / "growth.md"
    lines = [f"<!-- {name} -->\n<!-- end -->" for name in ("ratios", *growth_report.AXES)]
    document.write_text("\n".join(lines))
    images = growth_report.write(results)
    once = document.read_text()
    growth_report.write(results)
    assert document.read_text() == once and "haiku_implicit" in once
    assert once.count("Not measured yet") == len(growth_report.AXES) - len(AXES)
    assert [image.name for image in images] == [f"growth_{axis}.png" for axis in AXES]
    for image in images:
        assert matplotlib.image.imread(image).std() > 0


def test_an_unknown_axis():
    with (
        flagsaver.flagsaver(axis=["depht"]),
        pytest.raises(Exception, match="depht is not an axis"),
    ):
        growth.chosen_axes()


def test_the_report_knows_all_axes():
    assert list(growth.AXES) == list(growth_report.AXES)


def test_ratios_are_medians_over_what_both_have():
    costs = dict(by_hand=[2.0, 4.0, 8.0], library=[4.0, 4.0, 24.0, 1.0])
    points = [
        dict(value=i, implementation=name, trace=cost)
        for name, own in costs.items()
        for i, cost in enumerate(own)
    ]
    assert growth_report.median_ratio(dict(points=points), "library", "trace") == 2
    assert growth_report.median_ratio(dict(points=points), "library", "step") is None


def test_different_losses_are_not_compared():
    point = dict(value=1, implementation="by_hand", loss=1.0)
    growth.check_losses("depth", [point, dict(point, implementation="quax")])
    with pytest.raises(AssertionError, match="quax: loss"):
        growth.check_losses("depth", [point, dict(point, implementation="quax", loss=1.1)])


@pytest.mark.parametrize(
    "costs, expected",
    [
        ([5, 10, 20, 40], 1),
        ([7, 7, 7, 7], 0),
        ([100, 10, 20, 40], 1),  # what is paid at small sizes does not count
    ],
)
def test_exponents(costs, expected):
    assert growth_report.exponent([1, 2, 4, 8], costs) == pytest.approx(expected)
    assert growth_report.exponent([1], costs[:1]) is None


def test_times_of_a_busy_machine_are_marked():
    axis = dict(
        environment=dict(date="today", cpu="some", cores=2, versions={}), fixed={}, load=1.5,
        counts_only=False, points=[],
    )  # fmt: skip
    assert "busy" in growth_report.environment(axis)
    assert "busy" not in growth_report.environment(dict(axis, load=0.4))
    assert "Without quax" in growth_report.environment(axis)


def test_the_recorded_results_are_those_of_the_document(recorded):
    assert set(recorded["axes"]) == set(growth.AXES)
    pages = "".join(page.read_text() for page in growth_report.DOCUMENTS)
    for name, table in growth_report.tables(recorded).items():
        expected = f"<!-- {name} -->\n{table}\n<!-- end -->"
        assert expected in pages, name


@pytest.mark.parametrize("cost", growth_report.COUNTS)
def test_nothing_recorded_is_superlinear_in_depth(recorded, cost):
    depth, stack = (recorded["axes"][name] for name in ("depth", "layer_stack"))
    assert growth_report.series(depth, "library", cost)[0][-1] == 192
    assert growth_report.exponent(*growth_report.series(depth, "library", cost)) <= 1.01
    assert growth_report.exponent(*growth_report.series(stack, "library", cost)) <= 0.01


@pytest.mark.slow
def test_the_calls_of_a_trace_are_linear_in_depth():
    """Counted now, and not recorded: what one more layer costs is the same at any depth."""
    case = dict(implementation="library", compiled=False)
    calls = [
        growth.run_point(dict(case, sizes=dict(SMALL, depth=depth)))["calls"]
        for depth in (2, 6, 10)
    ]
    assert calls[2] - calls[1] == pytest.approx(calls[1] - calls[0], rel=0.01)
