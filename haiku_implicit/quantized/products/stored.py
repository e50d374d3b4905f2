"""Products with stored matrices: `quantized_dot` chooses how to compute one, without a dense copy.

There are four ways. A product that contracts one axis is a batch of matrix products, and the primitive
of `matmul` computes these. Other products are computed in codes, by `quantized_product`, if the matrix
has an `activation`; else block after block if they are large, and with the whole matrix dequantized if
they are small.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.binary import BinaryCall
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.typing import Array, DType, Result
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.products.bilinear import product_of
from haiku_implicit.quantized.products.blocks import BLOCKED_FROM, over_blocks, slices
from haiku_implicit.quantized.products.matmul import quantized_matmul
from haiku_implicit.quantized.products.product import config_by_activation, quantized_product

# The number of blocks in which a large matrix is dequantized.
_NUM_BLOCKS = 16


def quantized_dot(call: BinaryCall, x: jax.Array, q: Array) -> jax.Array:
    """Computes a `dot_general` of `x` and `q` without keeping a dense copy of `q`.

    The backward pass keeps the codes and the scales, and dequantizes them again.

    Args:
      call: the call of `dot_general`; its `out_sharding` is None.
      x: any array.
      q: a `QuantizedMatrix`, or stack of them, with dense scales for each row; or a `TrellisMatrix`.

    Returns:
      The result of `dot_general` for the dense `q`, up to the order of its sums.
    """
    structs = (jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x, q))
    out = jax.eval_shape(functools.partial(_dense, call), *structs)
    row = _row_axis(call, x, q, out.dtype) if q.activation_config.by_rows else None
    if row is not None:
        return _as_matmul(call, x, q, row, np.dtype(out.dtype))
    return blocked_dot(call, x, q) if q.activation is None else in_codes(call, x, q)


def _dense(call: BinaryCall, x: jax.Array, q: jax.Array, **changes: Any) -> Any:
    """Computes the product of dense arrays, with some parameters changed."""
    return call.primitive.bind(*call.ordered(x, q), **(call.params | changes))


# --- as products of matrices ---------------------------------------------------------------------


def _row_axis(call: BinaryCall, x: jax.Array, q: QuantizedMatrix, dtype: DType) -> int | None:
    """Returns the axis of `q` that makes matrices with the axis that is stored in groups.

    One of the two is contracted. None: this is not a product of matrices.
    """
    contracted, batch, grouped = call.contracted[1], call.batch[1], q.ndim + q.axis
    if (
        len(contracted) != 1
        or grouped in batch
        or not all(jnp.issubdtype(d, np.floating) for d in (x.dtype, dtype))
        or 0 in (*x.shape, *q.shape)
    ):
        return None
    if contracted[0] != grouped:
        return int(contracted[0])
    free = [i for i in range(q.ndim) if i not in (grouped, *batch)]
    return free[-1] if free else None


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _as_matmul(
    call: BinaryCall, x: jax.Array, q: QuantizedMatrix, row: int, dtype: DType
) -> jax.Array:
    """Computes the product as a product of `[batch..., m..., i]` and `[batch..., i, o]`."""
    ((x_contracted,), (contracted,)), (x_batch, q_batch) = call.contracted, call.batch
    # Axes of stacks of matrices come after the batch axes that `x` also has.
    matrix = (row, q.ndim + q.axis)
    free = tuple(i for i in range(q.ndim) if i not in (*q_batch, *matrix))
    of_x = tuple(i for i in range(x.ndim) if i not in (*x_batch, x_contracted))
    out_axis = next(i for i in matrix if i != contracted)
    x_at, q_at = call.in_result(x, q)
    in_both = [x.shape[i] for i in x_batch]
    stacked = [q.shape[i] for i in free]
    rows = [x.shape[i] for i in of_x]
    # The grouped axis of the array, whichever it is, is the last one in leaves.
    others = [i for i in range(q.ndim) if i != q.ndim + q.axis]
    order = (*(others.index(i) for i in (*q_batch, *free, row)), q.ndim - 1)
    x = jnp.transpose(x, (*x_batch, *of_x, x_contracted))
    x = x.reshape(*in_both, *[1] * len(free), *rows, x.shape[-1])
    x = jnp.broadcast_to(x, (*in_both, *stacked, *rows, x.shape[-1]))
    q = q._replace(axis=-1 if contracted == row else -2)
    out = quantized_matmul(x, q, order=order, precision=call.params["precision"], dtype=dtype)
    places = [
        *range(len(x_batch)),
        *(q_at[i] for i in free),
        *(x_at[i] for i in of_x),
        q_at[out_axis],
    ]
    return jnp.moveaxis(out, range(out.ndim), places)


# --- in codes ------------------------------------------------------------------------------------


def in_codes(call: BinaryCall, x: jax.Array, q: Array, *others: jax.Array) -> Result:
    """Computes a product with activations quantized by `q.activation`.

    Args:
      call: the call of `dot_general`, `conv_general_dilated` or `ragged_dot_general`.
      x, q: its operands.
      *others: operands after these two.

    Returns:
      The primitive's result, up to rounding; NotImplemented for other products.
    """
    pair, dtype = call.ordered(x, q), call.params["preferred_element_type"]
    product = product_of(call.primitive, pair, call.params)
    if product is None:
        return NotImplemented
    config = config_by_activation(q, call.w_first, product)
    if not isinstance(q, QuantizedMatrix):  # trellis codes
        pair = call.ordered(x, materialize_array(q))
    return quantized_product(product, config, pair, others, dtype=dtype)


# --- in blocks -----------------------------------------------------------------------------------


def blocked_dot(call: BinaryCall, x: jax.Array, q: Array) -> jax.Array:
    """Computes a product with the dense values of a stored matrix, block after block if it is large.

    Args:
      call, x: as for `quantized_dot`.
      q: a matrix, or stack of them, whose leaves end in its rows and, stored last, its axis `q.axis`.
    """
    structs = (jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x, q))
    out = jax.eval_shape(functools.partial(_dense, call), *structs)
    blocks = _blocks(call, x, q, out)
    if blocks is not None:
        return _in_blocks(call, x, q, blocks, np.dtype(out.dtype))
    return with_dense(call, x, q)


class _Blocks(NamedTuple):
    """How a product is cut along one axis of `q`.

    Attributes:
      axis: the axis of `q`, never the one that is stored in groups.
      size: the length of a block along it.
      x_axis: the axis of `x` that is cut in the same way, if any.
      out_axis: the axis of the result along which the blocks' results are concatenated; None if they
        are summed, because the axis is contracted.
    """

    axis: int
    size: int
    x_axis: int | None
    out_axis: int | None


def _blocks(call: BinaryCall, x: jax.Array, q: Array, out: Array) -> _Blocks | None:
    """Returns the blocks to cut a product in; None to compute it in one piece."""
    algorithm = jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
    if (
        q.size <= BLOCKED_FROM
        or isinstance(call.params["precision"], algorithm)  # it says how to accumulate, too
    ):
        return None
    axis = max((i for i in range(q.ndim) if i != q.ndim + q.axis), key=lambda i: q.shape[i])
    count = min(_NUM_BLOCKS, q.shape[axis])
    if count < 2:
        return None
    of_x, of_q = ((*c, *b) for c, b in zip(call.contracted, call.batch, strict=True))
    x_axes = dict(zip(of_q, of_x, strict=True))
    if axis not in x_axes and out.size > q.size:
        return None  # joining the results would take more memory than the dense weight
    out_axis = call.in_result(x, q)[1].get(axis)
    return _Blocks(axis, q.shape[axis] // count, x_axes.get(axis), out_axis)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _in_blocks(
    call: BinaryCall, x: jax.Array, q: Array, blocks: _Blocks, dtype: DType
) -> jax.Array:
    """Computes the product block after block."""
    changes = {}
    if blocks.out_axis is None and jnp.issubdtype(dtype, np.inexact):
        # Sums of blocks are not rounded in between.
        changes["preferred_element_type"] = jnp.promote_types(dtype, jnp.float32)

    def run(x: jax.Array, q: Array) -> jax.Array:
        # Checkpointed, or the scan would keep each dense block for the backward pass.
        @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
        def block(start: Array, size: int) -> jax.Array:
            # The last axis of the leaves is the grouped one, and the rows come before it.
            part = slices(q, start, size, min(blocks.axis, q.ndim - 2))
            own = x if blocks.x_axis is None else slices(x, start, size, blocks.x_axis)
            return _dense(call, own, part.materialize(), **changes)

        length = q.shape[blocks.axis]
        return over_blocks(block, length, blocks.size, blocks.out_axis).astype(dtype)

    return jax.checkpoint(run)(x, q)


# --- with a dense copy ---------------------------------------------------------------------------


# Jitted, so that eager code does not allocate each intermediate value in turn.
@functools.partial(jax.jit, static_argnums=0)
def with_dense(call: BinaryCall, x: Array, q: Array) -> jax.Array:
    """Computes a product of the dense values of stored operands; the backward pass keeps the codes.

    Args:
      call: the call of a primitive with one result.
      x, q: its operands, one or both of them stored matrices.
    """

    def run(*operands: Array) -> Any:
        return _dense(call, *(y.materialize() if is_implicit(y) else y for y in operands))

    return jax.checkpoint(run)(x, q)
