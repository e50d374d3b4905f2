"""How products read the leaves of a quantized array: as a batch of matrices, in a kernel's dtypes.

A leaf `[..., rows, ..., k]` keeps its axes in their order. An `order` lists the batch axes, then the
axis of the rows, then the last axis, which is stored in groups.
"""

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.typing import Array, DType, Precision, Tree
from haiku_implicit.quantized.matrix import QuantizedMatrix

Order = tuple[int, ...]

# The dtypes of activations, weights, scales and results that kernels serve, with the numbers of the
# CPU's kernels for rounding to them.
FLOATS = {np.dtype(np.float32): 0, np.dtype(jnp.bfloat16): 1, np.dtype(np.float16): 2}


def sizes(q: QuantizedMatrix, order: Order) -> tuple[int, int]:
    """Returns `i` and `o` of the matrices `[batch, i, o]`."""
    rows, length = q.codes.shape[order[-2]], q.shape[q.axis]
    return (rows, length) if q.axis == -1 else (length, rows)


def matrices(tree: Tree, order: Order) -> Tree:
    """Reshapes each leaf to `[batch, rows, k]`."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        leaf = jnp.transpose(leaf, order)
        return leaf.reshape(-1, *leaf.shape[-2:])

    return jax.tree.map(of_leaf, tree)


def may_be_served(x: Array, q: QuantizedMatrix, precision: Precision, dtype: DType) -> bool:
    """Whether kernels know the dtypes and the precision of a product, and it is not empty.

    Args:
      x: `[batch, m, i]`, an array or its shape and dtype, as are the leaves of `q`.
      q: the quantized matrices.
      precision, dtype: as for `quantized_matmul`.
    """
    algorithm = jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
    return (
        {np.dtype(d) for d in (x.dtype, q.dtype, dtype)} <= FLOATS.keys()
        and all(leaf.dtype != np.float64 for leaf in jax.tree.leaves(q))
        and q.rounded_to is None
        and not isinstance(precision, algorithm)
        and 0 not in (*x.shape, *q.shape)
    )


def readable(scale: jax.Array) -> jax.Array:
    """Casts scales to a dtype that kernels read."""
    return scale if scale.dtype in FLOATS else scale.astype(jnp.float32)
