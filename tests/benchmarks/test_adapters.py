"""The comparison of adapters: its table is that of the record, and its search and optimizers are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haiku_implicit as hki
from benchmarks import adapters, adapters_report
from benchmarks.adapter_kinds import PLUS, Kind, optimizer_of, trained_size


@pytest.fixture(scope="module", params=adapters_report.TASKS)
def task(request):
    return request.param


@pytest.fixture(scope="module")
def recorded(task):
    return adapters_report.read(task)


def test_the_recorded_results_are_those_of_the_page(recorded, task):
    (page,) = adapters_report.DOCUMENTS
    table = adapters_report.table(recorded)
    assert f"<!-- {task} -->\n{table}\n<!-- end -->" in page.read_text()
    short = adapters_report.short_table(list(map(adapters_report.read, adapters_report.TASKS)))
    assert f"<!-- best -->\n{short}\n<!-- end -->" in page.read_text()


def test_which_kinds_are_not_as_large_as_lora(recorded):
    found = {name for name in recorded["kinds"] if adapters_report.has_own_size(recorded, name)}
    assert found == {"VeRA", "IA3", "norms alone"} & set(recorded["kinds"])
    assert all(recorded["kinds"][name]["trained"] < 100_000 for name in found)


def test_the_rate_is_the_best_of_its_neighbors(recorded):
    for name, record in adapters_report.in_order(recorded).items():
        tried = {float(rate): runs[0]["validation"] for rate, runs in record["tried"].items()}
        rate = float(record["rate"])
        assert min(tried) < rate < max(tried), name
        assert tried[rate] == min(tried.values()), name


@pytest.mark.parametrize("first", [-8, -5, -4, 2])
def test_the_search_finds_the_least_score(first):
    asked = []

    def score(power):
        asked.append(power)
        return (power + 4) ** 2

    assert adapters.best_power(score, first) == -4
    assert {-5, -4, -3} <= set(asked) <= set(range(min(first, -5), max(first + 1, -3) + 1))


@pytest.mark.parametrize("optimizer, of_a, of_b", [("lora+", 1, PLUS), ("lora-fa", 0, 1)])
def test_factors_have_their_own_rates(optimizer, of_a, of_b):
    kind = Kind("lora", optimizer=optimizer)
    params = hki.add_lora({"m": {"w": jnp.ones((4, 3))}}, 0, rank=2)
    trained, _ = hki.partition(params, trainable_dense=False)
    adam = optimizer_of(kind)
    updates, _ = adam.update(jax.tree.map(jnp.ones_like, trained), adam.init(trained), trained)
    np.testing.assert_allclose(hki.materialize(updates["m"]["w"].a), of_a, rtol=1e-4)
    np.testing.assert_allclose(abs(updates["m"]["w"].b), of_b, rtol=1e-4)
    assert trained_size(kind, trained) == {"lora+": 14, "lora-fa": 6}[optimizer]
