"""Groups and tiles of rows that are sorted by group, as in a mixture of experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Tiles have as many rows as groups have on average, up to this number: longer ones save little decoding
# time, and more of their rows are empty.
_MOST_ROWS = 64


class Tiles(NamedTuple):
    """Rows, sorted by group, in tiles of rows of one group.

    Attributes:
      rows: `[tiles, rows of a tile]`, int32: the rows in each tile; an index out of bounds is an empty
        row.
      groups: `[tiles]`, int32: the group of each tile.
      places: `[rows]`, int32: the position of each row among the rows of all tiles; out of bounds for
        a row that is not in any group.
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
    """Cuts rows into tiles.

    Args:
      sizes: `[groups]`, integers: how many rows each group has, one group after another.
      num_rows: the number of rows in this part of all groups' rows.
      first_row: the index of the first of them among all groups' rows.
      first_group, num_groups: the groups in this part; None: all groups. Rows of other groups are not
        in any tile.
    """
    ends = jnp.clip(jnp.cumsum(sizes, dtype=np.int32) - first_row, 0, num_rows)
    starts = jnp.concatenate([jnp.zeros(1, np.int32), ends[:-1]])
    if num_groups is not None and num_groups != len(sizes):
        starts, ends = (
            jax.lax.dynamic_slice_in_dim(x, first_group, num_groups) for x in (starts, ends)
        )
    num_groups = len(ends)
    height = min(max(-(-num_rows // num_groups), 1), _MOST_ROWS)
    # A group has at most one tile that is not full.
    count = (num_rows + num_groups * (height - 1)) // height
    last_tiles = jnp.cumsum(-(-(ends - starts) // height), dtype=np.int32)
    first_tiles = jnp.concatenate([jnp.zeros(1, np.int32), last_tiles[:-1]])

    tile = jnp.arange(count, dtype=np.int32)
    # The last tiles may not belong to any group: all rows of the group assigned here are used up.
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
    """Returns the group of each row, `[rows]` int32; the number of groups for a row outside of groups.

    Args:
      sizes: `[groups]`, integers: how many rows each group has, one group after another.
      num_rows: how many rows there are.
    """
    ends = jnp.cumsum(sizes, dtype=np.int32)
    return _found(ends, jnp.arange(num_rows, dtype=np.int32))


def _found(ends: jax.Array, x: jax.Array) -> jax.Array:
    """Returns for each number the index of its interval, of the intervals with these ends."""
    return jnp.sum(ends[None] <= x[:, None], axis=1, dtype=np.int32)
