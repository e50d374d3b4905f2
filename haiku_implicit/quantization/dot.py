"""Products with quantized matrices: the one place that chooses how they are computed."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit._array import dense_struct, is_implicit

if TYPE_CHECKING:
    from haiku_implicit.arrays.quantized import QuantizedMatrix

# A weight of more elements is dequantized in this many blocks of rows, so that its dense form never
# exists as a whole. On two CPU cores (4096 x 4096, int8 and 4 bits in groups of 32) 8 to 16 blocks
# run 1.7 to 10 times as fast as dequantizing the whole first for one row of activations, and 1.2 to
# 1.7 times for 128 rows; more blocks are slower. For 576 x 1536 one piece is faster, by up to 2.
_BLOCKED_FROM = 1 << 20
_NUM_BLOCKS = 16


def quantized_dot(
    x: jax.Array,
    q: "QuantizedMatrix",
    dimension_numbers: Any,
    *,
    q_first: bool = False,
    **params: Any,
) -> jax.Array:
    """`jax.lax.dot_general(x, q)`, of which no dense copy of `q` is left over.

    For the backward pass the codes and the scales are kept, and dequantized anew.

    Args:
      x: any array.
      q: the quantized matrix, or stack of them.
      dimension_numbers: as `jax.lax.dot_general` has them, for the operands in their order.
      q_first: whether that order is `q`, `x`.
      **params: the other parameters of `dot_general`.

    Returns:
      What `dot_general` of `x` and the dense `q` is, up to the order of its sums.
    """
    q, numbers = _in_storage_order(q, dimension_numbers, 0 if q_first else 1)
    operands = (q, x) if q_first else (x, q)
    blocks = _blocks(operands, numbers, params)
    if blocks is None:
        return with_dense(jax.lax.dot_general_p, *operands, dimension_numbers=numbers, **params)
    return _blocked_dot(x, q, numbers, q_first, blocks, tuple(params.items()))


def _in_storage_order(q: "QuantizedMatrix", dimension_numbers: Any, q_at: int) -> tuple[Any, Any]:
    """The same product with the quantized axis last, so that nothing is transposed in memory."""
    contract, batch = (list(map(tuple, axes)) for axes in dimension_numbers)
    n, m = q.ndim - 2, q.ndim - 1
    # Where both axes of the matrix are in the result, their order there is that of `q`.
    if q.axis == -2 and {n, m} & {*contract[q_at], *batch[q_at]}:
        q, swap = q._replace(axis=-1), {n: m, m: n}
        for axes in (contract, batch):
            axes[q_at] = tuple(swap.get(i, i) for i in axes[q_at])
    return q, (tuple(contract), tuple(batch))


def with_dense(primitive: Any, *operands: Any, **params: Any) -> jax.Array:
    """A primitive on the dense values of its quantized operands, which are not kept for a gradient.

    Args:
      primitive: a primitive with one result.
      *operands: its operands, some of them quantized.
      **params: its parameters.
    """
    return _with_dense(operands, primitive, tuple(params.items()))


# Jitted, so that eager code does not allocate each intermediate value in turn.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _with_dense(operands: Any, primitive: Any, params: Any) -> jax.Array:
    def run(operands: Any) -> jax.Array:
        dense = [x.materialize() if is_implicit(x) else x for x in operands]
        return primitive.bind(*dense, **dict(params))

    return jax.checkpoint(run)(operands)


# --- in blocks -----------------------------------------------------------------------------------


class _Blocks(NamedTuple):
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


def _blocks(operands: Any, dimension_numbers: Any, params: Any) -> _Blocks | None:
    """The blocks to cut a product in; None where it is computed in one piece."""
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
    return _Blocks(axis, count, size, x_axis_of.get(axis), out_axis, out.dtype)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _blocked_dot(
    x: jax.Array, q: "QuantizedMatrix", numbers: Any, q_first: bool, blocks: _Blocks, params: Any
) -> jax.Array:
    options = dict(params)
    if blocks.out_axis is None:  # sums of blocks are not rounded in between
        options["preferred_element_type"] = _sum_dtype(blocks.dtype)

    def dot(x: jax.Array, q: "QuantizedMatrix") -> jax.Array:
        operands = (q.materialize(), x) if q_first else (x, q.materialize())
        return jax.lax.dot_general_p.bind(*operands, dimension_numbers=numbers, **options)

    def run(x: jax.Array, q: "QuantizedMatrix") -> jax.Array:
        return _over_blocks(dot, x, q, blocks).astype(blocks.dtype)

    return jax.checkpoint(run)(x, q)


def _over_blocks(dot: Callable[..., Any], x: Any, q: "QuantizedMatrix", b: _Blocks) -> jax.Array:
    def part(start: Any, size: int) -> tuple[Any, Any]:
        # Of the axes of the leaves, the last one is the quantized one, and the rows come before it.
        of_q = jax.tree.map(lambda leaf: _slice(leaf, start, size, min(b.axis, q.ndim - 2)), q)
        return x if b.x_axis is None else _slice(x, start, size, b.x_axis), of_q

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


def _slice(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _sum_dtype(dtype: Any) -> Any:
    """The dtype that sums of blocks are taken in."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, np.inexact) else dtype
