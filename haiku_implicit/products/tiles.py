"""Rows that are sorted by group, as those of a mixture of experts are: their groups, and tiles."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Tiles have as many rows as groups have on average, up to so many: longer ones save little of what
# decoding takes, and more of their rows are empty.
_MOST_ROWS = 64


class Tiles(NamedTuple):
    """Rows, sorted by group, in tiles of rows of one group.

    Attributes:
      rows: `[tiles, rows of a tile]`, int32: which rows are in which tile; what is out of bounds
        stands for none.
      groups: `[tiles]`, int32: the group of each tile.
      places: `[rows]`, int32: where each row is among those of all tiles; out of bounds for a row
        that is in no group.
    """

    rows: jax.Array
    groups: jax.Array
    places: jax.Array


def tiles_of(
    sizes: jax.Array,
    num_rows: int,
    *,
    first_row: Any = 0,
    first_group: Any = 0,
    num_groups: int | None = None,
) -> Tiles:
    """The tiles of so many rows.

    Args:
      sizes: `[groups]`, integers: how many rows each group has, one group after another.
      num_rows: how many rows there are.
      first_row: which of the groups' rows is the first one that is there.
      first_group, num_groups: the groups that are there; None: all of them. Rows of others are in none.
    """
    ends = jnp.clip(jnp.cumsum(sizes, dtype=np.int32) - first_row, 0, num_rows)
    starts = jnp.concatenate([jnp.zeros(1, np.int32), ends[:-1]])
    if num_groups is not None and num_groups != len(sizes):
        starts, ends = (
            jax.lax.dynamic_slice_in_dim(x, first_group, num_groups) for x in (starts, ends)
        )
    num_groups = len(ends)
    height = min(max(-(-num_rows // num_groups), 1), _MOST_ROWS)
    # A group has less than one tile more than it has whole ones.
    count = (num_rows + num_groups * (height - 1)) // height
    last_tiles = jnp.cumsum(-(-(ends - starts) // height), dtype=np.int32)
    first_tiles = jnp.concatenate([jnp.zeros(1, np.int32), last_tiles[:-1]])

    tile = jnp.arange(count, dtype=np.int32)
    # The last tiles may be of no group: what is taken for theirs has no rows left.
    groups = jnp.minimum(_found(last_tiles, tile), num_groups - 1)
    first = starts[groups] + (tile - first_tiles[groups]) * height
    rows = first[:, None] + jnp.arange(height, dtype=np.int32)[None]
    rows = jnp.where(rows < ends[groups][:, None], rows, num_rows)

    row = jnp.arange(num_rows, dtype=np.int32)
    own = jnp.minimum(_found(ends, row), num_groups - 1)
    places = first_tiles[own] * height + row - starts[own]
    inside = (row >= starts[0]) & (row < ends[-1])
    return Tiles(rows, groups, jnp.where(inside, places, count * height))


def groups_of_rows(sizes: jax.Array, num_rows: int) -> jax.Array:
    """The group of each row, `[rows]` int32; the number of groups for a row that is in none.

    Args:
      sizes: `[groups]`, integers: how many rows each group has, one group after another.
      num_rows: how many rows there are.
    """
    ends = jnp.cumsum(sizes, dtype=np.int32)
    return _found(ends, jnp.arange(num_rows, dtype=np.int32))


def _found(ends: jax.Array, x: jax.Array) -> jax.Array:
    """In which of the intervals that end there each number lies."""
    return jnp.sum(ends[None] <= x[:, None], axis=1, dtype=np.int32)
