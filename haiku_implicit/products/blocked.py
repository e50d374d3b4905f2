"""Products with quantized arrays in blocks, so that a dense form never exists as a whole.

For what is no product with matrices: the keys and values of a cache `[batch, time, heads, depth]`, of
which attention contracts the depth or the time, for each head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import dense_struct, is_implicit
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix

# An array of more elements is dequantized in this many blocks.
_BLOCKED_FROM = 1 << 18
_NUM_BLOCKS = 16


class Blocks(NamedTuple):
    """How a product is cut along one axis of the quantized operand.

    Attributes:
      axis: the axis of `q` (never the one that is quantized along).
      number: how many blocks of `size` there are; what is left over is one block more.
      size: the length of a block along the axis.
      x_axis: the axis of `x` that is cut along with it, if any.
      out_axis: the axis of the result where the blocks' results come one after another; None where
        they are summed, because the axis is contracted.
      dtype: the dtype of the result.
    """

    axis: int
    number: int
    size: int
    x_axis: int | None
    out_axis: int | None
    dtype: Any


def blocks_of(operands: Any, dimension_numbers: Any, params: Any) -> Blocks | None:
    """The blocks to cut a product in; None where it is computed in one piece.

    Args:
      operands: the quantized matrix and any array, in the order of the product.
      dimension_numbers, params: as `jax.lax.dot_general` has them.
    """
    q_at = 0 if is_implicit(operands[0]) else 1
    q, x = operands[q_at], operands[1 - q_at]
    algorithm = jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
    if (
        q.size <= _BLOCKED_FROM
        or params.get("out_sharding") is not None
        or isinstance(params.get("precision"), algorithm)  # it says how to accumulate, too
    ):
        return None
    grouped = q.ndim + q.axis
    axis = max((i for i in range(q.ndim) if i != grouped), key=lambda i: q.shape[i])
    length = q.shape[axis]
    count = min(_NUM_BLOCKS, length)
    if count < 2:
        return None
    size = length // count
    bind = functools.partial(
        jax.lax.dot_general_p.bind, dimension_numbers=dimension_numbers, **params
    )
    out = jax.eval_shape(bind, *map(dense_struct, operands))
    contract, batch = dimension_numbers
    q_batch = list(batch[q_at])
    x_axis_of = dict(
        zip((*contract[q_at], *q_batch), (*contract[1 - q_at], *batch[1 - q_at]), strict=True)
    )
    if axis in q_batch:
        out_axis = q_batch.index(axis)
    elif axis in x_axis_of:
        out_axis = None
        count -= count * size == length  # one block starts the sum
    elif out.size > q.size:
        return None  # putting the results together would take more than the dense weight does
    else:
        free = [i for i in range(q.ndim) if i not in x_axis_of]
        of_x = x.ndim - len(x_axis_of) if q_at else 0
        out_axis = len(q_batch) + of_x + free.index(axis)
    return Blocks(axis, count, size, x_axis_of.get(axis), out_axis, out.dtype)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def blocked_dot(
    x: jax.Array, q: QuantizedMatrix, numbers: Any, q_first: bool, blocks: Blocks, params: Any
) -> jax.Array:
    """The product, block after block.

    Args:
      x: any array.
      q: the quantized matrix, or stack of them.
      numbers: the dimension numbers of `jax.lax.dot_general`, for the operands in their order.
      q_first: whether that order is `q`, `x`.
      blocks: what `blocks_of` says.
      params: the other parameters, as pairs.
    """
    options = dict(params)
    if blocks.out_axis is None:  # sums of blocks are not rounded in between
        options["preferred_element_type"] = _sum_dtype(blocks.dtype)

    def dot(x: jax.Array, q: QuantizedMatrix) -> jax.Array:
        operands = (q.materialize(), x) if q_first else (x, q.materialize())
        return jax.lax.dot_general_p.bind(*operands, dimension_numbers=numbers, **options)

    def run(x: jax.Array, q: QuantizedMatrix) -> jax.Array:
        return _over_blocks(dot, x, q, blocks).astype(blocks.dtype)

    return jax.checkpoint(run)(x, q)


def _over_blocks(dot: Callable[..., Any], x: Any, q: QuantizedMatrix, b: Blocks) -> jax.Array:
    def part(start: Any, size: int) -> tuple[Any, Any]:
        # Of the axes of the leaves, the last one is the quantized one, and the rows come before it.
        of_q = slices(q, start, size, min(b.axis, q.ndim - 2))
        return x if b.x_axis is None else slices(x, start, size, b.x_axis), of_q

    # Checkpointed, or the scan would keep each dense block for the backward pass.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(i: jax.Array) -> jax.Array:
        return dot(*part(i * b.size, b.size))

    done = b.number * b.size
    rest = q.shape[b.axis] - done
    numbers = jnp.arange(b.number)
    if b.out_axis is None:
        start = dot(*part(done, rest))
        return jax.lax.scan(lambda total, i: (total + block(i), None), start, numbers)[0]
    _, out = jax.lax.scan(lambda _, i: (None, block(i)), None, numbers)
    out = jax.lax.collapse(jnp.moveaxis(out, 0, b.out_axis), b.out_axis, b.out_axis + 2)
    return jnp.concatenate([out, dot(*part(done, rest))], axis=b.out_axis) if rest else out


def slices(tree: Any, start: Any, size: int, axis: int) -> Any:
    """A part of each leaf along an axis."""
    return jax.tree.map(lambda leaf: _slice(leaf, start, size, axis), tree)


def _slice(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, np.inexact):
        return _slice_of_bytes(x, start, size, axis)
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _slice_of_bytes(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    """A slice of floats of 8 bits. On a CPU XLA would make wider ones of all before it slices them."""
    part = jax.lax.bitcast_convert_type(x, jnp.uint8)
    part = jax.lax.dynamic_slice_in_dim(part, start, size, axis=axis)
    return jax.lax.bitcast_convert_type(part, x.dtype)


@_slice_of_bytes.defjvp
def _(size: int, axis: int, primals: Any, tangents: Any) -> Any:
    (x, start), (of_x, _) = primals, tangents
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=axis)
    return _slice_of_bytes(x, start, size, axis), cut(of_x, start)


def _sum_dtype(dtype: Any) -> Any:
    """The dtype that sums of blocks are taken in."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, np.inexact) else dtype
