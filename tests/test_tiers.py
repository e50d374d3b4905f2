"""What is slow, and what is not."""

import itertools

import pytest

from tests.tiers import few, redundant


def test_of_a_table_those_not_named_are_slow():
    rows = few(["a", "b", ("c", 1)], "b")
    assert rows[1] == "b"
    assert [(row.values, row.marks[0].name) for row in rows[::2]] == [
        (("a",), "slow"),
        (("c", 1), "slow"),
    ]
    with pytest.raises(AssertionError, match=r"\['d'\] not in"):
        few("abc", "d")


def test_of_a_product_every_value_stays_once():
    rows = [dict(x=x, y=y, z=z) for x, y, z in itertools.product("abc", [1, None], [0.5])]
    kept = [row for i, row in enumerate(rows) if i not in redundant(rows)]
    assert kept == [dict(x="a", y=1, z=0.5), dict(x="b", y=None, z=0.5), dict(x="c", y=1, z=0.5)]


@pytest.mark.every(2)
@pytest.mark.parametrize("i", range(5))
def test_each_nth_runs_quickly(i, request):
    assert i % 2 == 0 or request.config.getoption("slow")


@pytest.mark.combinations
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [1, 2])
def test_pytest_runs_what_is_asked_for(x, y, request):
    assert x == y or request.config.getoption("slow")
