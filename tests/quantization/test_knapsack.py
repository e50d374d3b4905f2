"""Choices within a size, against all of them."""

import itertools

import numpy as np
import pytest

from haiku_implicit.params import knapsack


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_and_the_bound_is_below_it(seed):
    random = np.random.default_rng(seed)
    items = [
        [(float(random.random() ** 4), int(random.integers(1, 1000))) for _ in range(ways)]
        for ways in random.integers(1, 5, 5)
    ]
    least, most = (sum(f(size for _, size in ways) for ways in items) for f in (min, max))
    room = int(random.integers(least, most + 1))
    picks = knapsack.least_cost(items, room)
    cost, size = map(
        sum, zip(*(ways[i] for ways, i in zip(items, picks, strict=True)), strict=True)
    )
    fitting = [p for p in itertools.product(*items) if sum(size for _, size in p) <= room]
    best = min(sum(cost for cost, _ in pick) for pick in fitting)
    assert size <= room and cost == pytest.approx(best)
    assert knapsack.lower_bound(items, room) <= best * (1 + 1e-9)


def test_the_bound_of_many_items_is_near():
    """210 weights, as SmolLM2 has, with sizes that have no common divisor."""
    random = np.random.default_rng(0)
    items = [
        [
            (float(random.random() * 4.0**-b), 41_472 * b + int(random.integers(100)))
            for b in (2, 3, 4)
        ]
        for _ in range(210)
    ]
    room = 41_472 * 3 * 210
    cost = sum(ways[i][0] for ways, i in zip(items, knapsack.least_cost(items, room), strict=True))
    assert knapsack.lower_bound(items, room) <= cost <= 1.01 * knapsack.lower_bound(items, room)
