"""Which tests are slow."""

import itertools

import pytest

from tests.tiers import drawn, few, redundant


def more_than_quick(request):
    return request.config.getoption("slow") or request.config.getoption("long")


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
    assert i % 2 == 0 or more_than_quick(request)


@pytest.mark.parametrize("i", few(range(7), 0))
def test_of_the_slow_ones_some_run_slowly(i, request):
    names = [f"{request.node.originalname}[{j}]" for j in range(1, 7)]
    slowly = request.node.name in drawn(names) and more_than_quick(request)
    assert i == 0 or slowly or request.config.getoption("long")


def test_of_a_file_one_more_runs_slowly(request):
    """Each of the functions of this file that has slow tests has quick ones, too."""
    own = [item for item in request.session.items if item.path == request.path]
    slow = [item for item in own if item.get_closest_marker("slow")]
    assert len(slow) <= more_than_quick(request) or request.config.getoption("long")


def test_those_drawn_are_always_the_same():
    names = [f"test_a[{i}-{j}]" for i in range(60) for j in range(10)]
    found = drawn(names, 200)
    assert len(found) == 200 and found == drawn(names[::-1], 200)
    assert len({name[-2] for name in found}) == 10
    assert drawn(names[:1]) == set(names[:1])


@pytest.mark.combinations
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [1, 2])
def test_pytest_runs_what_is_asked_for(x, y, request):
    assert x == y or more_than_quick(request)
