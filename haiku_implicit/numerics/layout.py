"""How the leaves of a quantized array make a batch of matrices.

A leaf `[..., rows, ..., k]` keeps its axes where they are: an `order` says which of them are those of
the batch, then the one of the rows; the last one, which is stored in groups, stays the last.
"""

from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix

Order = tuple[int, ...]


def sizes(q: QuantizedMatrix, order: Order) -> tuple[int, int]:
    """`i` and `o` of the matrices `[batch, i, o]`."""
    rows, length = q.codes.shape[order[-2]], q.shape[q.axis]
    return (rows, length) if q.axis == -1 else (length, rows)


def matrices(leaf: Any, order: Order) -> jax.Array:
    """A leaf as `[batch, rows, k]`."""
    leaf = jnp.transpose(leaf, order)
    return leaf.reshape(-1, *leaf.shape[-2:])
