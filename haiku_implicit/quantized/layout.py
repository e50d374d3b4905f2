"""How the leaves of a quantized array make a batch of matrices.

A leaf `[..., rows, ..., k]` keeps its axes in their places. An `order` lists the batch axes, then the
axis of the rows, then the last axis, which is stored in groups.
"""

import jax
import jax.numpy as jnp

from haiku_implicit.core.typing import Array
from haiku_implicit.quantized.matrix import QuantizedMatrix

Order = tuple[int, ...]


def sizes(q: QuantizedMatrix, order: Order) -> tuple[int, int]:
    """Returns `i` and `o` of the matrices `[batch, i, o]`."""
    rows, length = q.codes.shape[order[-2]], q.shape[q.axis]
    return (rows, length) if q.axis == -1 else (length, rows)


def matrices(leaf: Array, order: Order) -> jax.Array:
    """Reshapes a leaf to `[batch, rows, k]`."""
    leaf = jnp.transpose(leaf, order)
    return leaf.reshape(-1, *leaf.shape[-2:])
