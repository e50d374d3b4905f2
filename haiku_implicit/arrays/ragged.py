"""Products of routed experts: `ragged_dot`, and which rows belong to which group."""

from typing import Any

import jax
import jax.numpy as jnp


def is_plain_ragged_dot(x: Any, w: Any, params: dict[str, Any]) -> bool:
    """Whether a `ragged_dot_general` is `[rows, n]` times `[groups, n, m]`, in floating numbers."""
    numbers = params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    plain = (x.ndim, w.ndim) == (2, 3) and tuple(map(tuple, contract)) == ((1,), (1,))
    plain = plain and not any(map(tuple, batch)) and tuple(numbers.lhs_ragged_dimensions) == (0,)
    known = plain and tuple(numbers.rhs_group_dimensions) == (0,)
    return known and params.get("group_offset") is None and jnp.issubdtype(x.dtype, jnp.floating)


def group_of_rows(group_sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each row; for rows after the last group the number of groups."""
    return jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows), side="right")
