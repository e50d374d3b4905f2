"""Which tests are slow: those that only `--slow` runs."""

import zlib

import pytest


def few(values, *fast):
    """What a test is parametrized with; those that are not named are slow.

    Args:
      values: values of one parameter, or tuples, of one value for each of several parameters.
      fast: those of them that run without `--slow` too.
    """
    values = list(values)
    unknown = [v for v in fast if v not in values]
    assert not unknown, f"{unknown} not in {values}"
    slow = lambda row: pytest.param(*row, marks=pytest.mark.slow)  # noqa: E731
    return [v if v in fast else slow(v if isinstance(v, tuple) else (v,)) for v in values]


def redundant(rows):
    """Indices of the rows that a few others make dispensable, which have every value of every column.

    Args:
      rows: dictionaries with the same keys, the parameters of the tests of one function.
    """
    cells = [{(name, repr(value)) for name, value in row.items()} for row in rows]
    rest, missing = list(range(len(rows))), set().union(*cells)
    while missing:
        best = max(rest, key=lambda i: len(missing & cells[i]))
        rest.remove(best)
        missing -= cells[best]
    return rest


# So many of the slow tests of one function run with `--slow`; the others with `--long`. Of those whose
# functions the quick tier runs with other parameters, `--slow` runs so many of each file.
MOST = 1


def drawn(names, number=MOST):
    """So many of the names, by their hashes: as though at random, always the same."""
    return set(sorted(names, key=lambda name: zlib.crc32(name.encode()))[:number])
