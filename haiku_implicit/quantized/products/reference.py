"""The product with quantized matrices in XLA's own operations, for cases that no kernel serves.

Blocks of rows are dequantized one after another, so that the dense matrix never exists as a whole. The
gradients with respect to scales are computed in the same way on all platforms.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.core.typing import Array, DType, Precision
from haiku_implicit.quantized.layout import Order, matrices
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.operands import quantize_rows, rounded_rows, stored_operand
from haiku_implicit.quantized.products.bilinear import dot_product, multiply
from haiku_implicit.quantized.products.blocks import over_blocks, slices

# The part of the matrix that is dense at a time: at most this fraction, scales included, and at least
# this many elements.
_DENSE = 1 / 9
_BLOCK = 1 << 15


def product(
    x: jax.Array, q: QuantizedMatrix, order: Order, precision: Precision, dtype: DType
) -> jax.Array:
    """Computes the product with a batch of matrices.

    Args:
      x: `[batch, m, i]`.
      q: `[batch, i, o]`.
      order, precision, dtype: as for `quantized_matmul`.
    """
    run = functools.partial(_product_of_one, precision=precision, dtype=dtype)
    q = matrices(q, order)
    if x.shape[0] == 1:
        return run(x[0], jax.tree.map(lambda leaf: leaf[0], q))[None]
    return jax.vmap(run)(x, q)


def _product_of_one(
    x: jax.Array, q: QuantizedMatrix, precision: Precision, dtype: DType
) -> jax.Array:
    """Computes `[m, i] @ [i, o]`: a sum over blocks, or columns of the result from each block."""
    summed = q.axis == -1
    # Sums of blocks are not rounded in between.
    wide = jnp.promote_types(dtype, jnp.float32) if summed else dtype
    numbers = (((1,), (0 if summed else 1,)), ((), ()))
    rounded = None  # the activations in codes, once for all blocks
    if q.activation is not None and summed:
        x = rounded_rows(x, q)
    elif q.activation is not None:
        rounded = quantize_rows(x, q)

    def block(start: Array, size: int) -> jax.Array:
        part = slices(q, start, size, -2)._replace(axis=-1)  # as stored: nothing is transposed
        if rounded is not None:
            both = dot_product((2, 2), numbers, precision).forward(())
            between = jnp.promote_types(part.dtype, rounded.wide)
            return multiply(both, rounded, stored_operand(part), between, dtype)
        columns = slices(x, start, size, 1) if summed else x
        return jax.lax.dot_general(
            columns, part.materialize(), numbers, precision=precision, preferred_element_type=wide
        )

    rows = q.codes.shape[-2]
    return over_blocks(block, rows, _block_size(q), None if summed else 1).astype(dtype)


def gradients_of_scales(
    ct: jax.Array, x: jax.Array, q: QuantizedMatrix, precision: Precision
) -> Any:
    """Returns the gradients with respect to scales and offsets, `[batch, rows, groups]` each.

    Args:
      ct: `[batch, m, o]`, the gradient with respect to the product.
      x: `[batch, m, i]`.
      q: the quantized `[batch, i, o]`, reshaped by `layout.matrices`; its scales do not matter.
      precision: as for `quantized_matmul`.
    """
    if q.activation is not None:
        x = rounded_rows(x, q)
    wide = jnp.promote_types(jnp.promote_types(ct.dtype, x.dtype), jnp.float32)

    def one(ct: jax.Array, x: jax.Array, q: QuantizedMatrix) -> Any:
        by_row, other = (ct, x) if q.axis == -2 else (x, ct)

        def block(start: Array, size: int) -> Any:
            (codes, *scales), treedef = jax.tree.flatten(slices(q, start, size, -2))
            of_rows = slices(by_row, start, size, 1)
            of_w = jax.lax.dot(of_rows.T, other, precision=precision, preferred_element_type=wide)

            def values(*scales: jax.Array) -> jax.Array:
                own: QuantizedMatrix = jax.tree.unflatten(treedef, (codes, *scales))
                return own._replace(axis=-1).materialize().astype(wide)

            return jax.linear_transpose(values, *scales)(of_w)

        return over_blocks(block, q.codes.shape[-2], _block_size(q), 0)

    return jax.vmap(one)(ct, x, q)


def _block_size(q: QuantizedMatrix) -> int:
    """Returns the number of rows of a matrix to dequantize at a time."""
    rows = q.codes.shape[-2]
    scales = sum(scale.size for scale in jax.tree.leaves(q)[1:2])
    part = max(_DENSE - scales / q.size, _DENSE / 4)
    count = max(min(q.size // _BLOCK, math.ceil(1 / part), rows), 1)
    return rows // count  # rounded down, so that few rows remain
