"""The multiple-choice knapsack: one way for each item, within a size, for the least cost."""

from collections.abc import Sequence

import numpy as np

# Sizes are rounded up to such a part of the room, if they have no larger common divisor.
_CELLS = 1 << 16
_MOST = 1e30  # costs are cut here, so that sums of them are finite

# The ways of an item, as pairs of cost and size.
Ways = Sequence[tuple[float, int]]


def least_cost(items: Sequence[Ways], room: int) -> list[int]:
    """The index of the way of each item, by dynamic programming.

    It is the optimum if the sizes have a common divisor above `room / 65536`. Otherwise sizes are
    rounded up to such a unit, and it is the optimum for a room that is smaller by a unit for each item.

    Args:
      items: the ways of each item.
      room: what the sizes add up to at most. The smallest ways fit.
    """
    least = [min(size for _, size in ways) for ways in items]
    more = [
        np.array([size for _, size in ways]) - low for ways, low in zip(items, least, strict=True)
    ]
    spare = room - sum(least)
    unit = max(int(np.gcd.reduce(np.concatenate(more))), -(-spare // _CELLS), 1)
    best, picks = np.zeros(spare // unit + 1), []  # the least cost, by the units at hand
    for ways, sizes in zip(items, more, strict=True):
        tried = np.full((len(ways), len(best)), np.inf)
        for row, (cost, _), units in zip(tried, ways, -(-sizes // unit), strict=True):
            if units < len(best):
                row[units:] = min(cost, _MOST) + best[: len(best) - units]
        picks.append(tried.argmin(0))
        best = tried.min(0)
    at, found = len(best) - 1, []
    for pick, sizes in zip(reversed(picks), reversed(more), strict=True):
        found.append(int(pick[at]))
        at -= -(-sizes[pick[at]] // unit)
    return found[::-1]


def lower_bound(items: Sequence[Ways], room: int) -> float:
    """A cost that no choice within the room can be below: the best of the Lagrangian bounds.

    For each price of a unit of size, the cost and the price of the cheapest ways, less the price of the
    room, is such a bound.
    """
    most = max(map(len, items))
    even = np.array([[*ways, *[ways[0]] * (most - len(ways))] for ways in items], np.float64)
    costs, sizes = np.minimum(even[..., 0], _MOST), even[..., 1]

    def bound(price: float) -> float:
        return float((costs + price * sizes).min(1).sum() - price * room)

    # The bound is concave in the price, and bends at prices at which two ways of an item cost the same.
    less = sizes[:, :, None] - sizes[:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        prices = (costs[:, None, :] - costs[:, :, None]) / less
    prices = np.unique(prices[np.isfinite(prices) & (prices > 0)])
    low, high = 0, len(prices) - 1
    while low < high:
        middle = (low + high) // 2
        if bound(prices[middle]) < bound(prices[middle + 1]):
            low = middle + 1
        else:
            high = middle
    return max([bound(0.0), *(bound(price) for price in prices[low : low + 1])])
