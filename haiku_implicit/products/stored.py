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

from haiku_implicit.core.array import dense_struct, is_implicit
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.sharding import left_to_partitioner, result_sharding
from haiku_implicit.numerics.options import activation_of
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products.bilinear import product_of
from haiku_implicit.products.blocks import BLOCKED_FROM, over_blocks, slices
from haiku_implicit.products.by_rule import apply, how_stored
from haiku_implicit.products.matmul import quantized_matmul

# The number of blocks in which a large matrix is dequantized.
_NUM_BLOCKS = 16

Axes = tuple[int, ...]


class _Dot(NamedTuple):
    """A `dot_general` of an array `x` and a stored matrix `q`; hashable.

    Attributes:
      contract: the contracted axes of `x`, and of `q`.
      batch: the batch axes of `x`, and of `q`.
      q_first: whether `q` is the first operand.
      options: the other parameters, as pairs.
    """

    contract: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]
    q_first: bool
    options: tuple[tuple[str, Any], ...]

    def in_order(self, x: Any, q: Any) -> tuple[Any, Any]:
        """Returns a pair for `x` and `q` in the order of the operands."""
        return (q, x) if self.q_first else (x, q)

    @property
    def numbers(self) -> Any:
        """The dimension numbers, in the order of the operands."""
        return self.in_order(*self.contract), self.in_order(*self.batch)

    def option(self, name: str) -> Any:
        return dict(self.options).get(name)

    def dense(self, x: jax.Array, q: jax.Array, **changes: Any) -> jax.Array:
        """Computes the product of dense arrays."""
        params = dict(self.options) | dict(dimension_numbers=self.numbers) | changes
        return jax.lax.dot_general_p.bind(*self.in_order(x, q), **params)


def quantized_dot(
    x: jax.Array,
    q: QuantizedMatrix,
    dimension_numbers: Any,
    *,
    q_first: bool = False,
    **params: Any,
) -> jax.Array:
    """Computes `jax.lax.dot_general(x, q)` without keeping a dense copy of `q`.

    The backward pass keeps the codes and the scales, and dequantizes them again.

    Args:
      x: any array.
      q: the stored matrix, or stack of them.
      dimension_numbers: as for `jax.lax.dot_general`, for the operands in their order.
      q_first: whether that order is `q`, `x`.
      **params: the other parameters of `dot_general`.

    Returns:
      The result of `dot_general` for the dense `q`, up to the order of its sums.
    """
    contract, batch = ((tuple(lhs), tuple(rhs)) for lhs, rhs in dimension_numbers)
    if q_first:
        contract, batch = contract[::-1], batch[::-1]
    dot = _Dot(contract, batch, q_first, tuple(params.items()))
    numbers = dict(dimension_numbers=dimension_numbers)
    sharding = result_sharding(jax.lax.dot_general_p, dot.in_order(x, q), params | numbers)
    if params.get("out_sharding") is not None:
        # Derivatives have an `out_sharding` on any mesh, even if it does not split anything.
        dot = dot._replace(options=tuple((params | dict(out_sharding=None)).items()))
    return _dot(x, q, dot) if sharding is None else _in_mesh(x, q, dot, sharding)


# Jitted, because eager code would allocate each intermediate value.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _in_mesh(x: jax.Array, q: QuantizedMatrix, dot: _Dot, sharding: Any) -> jax.Array:
    """Computes the product if axes of a mesh are explicit."""
    return left_to_partitioner(functools.partial(_dot, dot=dot), sharding)(x, q)


def _dot(x: jax.Array, q: QuantizedMatrix, dot: _Dot) -> jax.Array:
    q = q.with_row_scales()
    out = jax.eval_shape(dot.dense, dense_struct(x), dense_struct(q))
    by_rows = q.activation is None or activation_of(q.activation).by_rows
    row = _row_axis(x, q, dot, out.dtype) if by_rows else None
    if row is not None:
        return _as_matmul(x, q, row, dot, np.dtype(out.dtype))
    params = dict(dot.options, dimension_numbers=dot.numbers)
    if q.activation is not None:
        return in_codes(jax.lax.dot_general_p, x, q, dot.q_first, params)
    blocks = _blocks(x, q, dot, out)
    if blocks is not None:
        return _in_blocks(x, q, blocks, dot, np.dtype(out.dtype))
    return with_dense(jax.lax.dot_general_p, *dot.in_order(x, q), **params)


# --- as products of matrices ---------------------------------------------------------------------


def _row_axis(x: jax.Array, q: QuantizedMatrix, dot: _Dot, dtype: Any) -> int | None:
    """Returns the axis of `q` that makes matrices with the axis that is stored in groups.

    One of the two is contracted. None: this is not a product of matrices.
    """
    (contracted, batch), grouped = (dot.contract[1], dot.batch[1]), q.ndim + q.axis
    if (
        len(contracted) != 1
        or grouped in batch
        or not all(jnp.issubdtype(d, np.floating) for d in (x.dtype, dtype))
        or dot.option("out_sharding") is not None
        or 0 in (*x.shape, *q.shape)
    ):
        return None
    if contracted[0] != grouped:
        return int(contracted[0])
    free = [i for i in range(q.ndim) if i not in (grouped, *batch)]
    return free[-1] if free else None


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _as_matmul(x: jax.Array, q: QuantizedMatrix, row: int, dot: _Dot, dtype: Any) -> jax.Array:
    """Computes the product as a product of `[batch..., m..., i]` and `[batch..., i, o]`."""
    ((x_contracted,), (contracted,)), (x_batch, q_batch) = dot.contract, dot.batch
    # Axes of stacks of matrices come after the batch axes that `x` also has.
    matrix = (row, q.ndim + q.axis)
    free = tuple(i for i in range(q.ndim) if i not in (*q_batch, *matrix))
    of_x = tuple(i for i in range(x.ndim) if i not in (*x_batch, x_contracted))
    out_axis = next(i for i in matrix if i != contracted)
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
    out = quantized_matmul(x, q, order=order, precision=dot.option("precision"), dtype=dtype)
    # `dot_general` has batch axes, then the free ones of the first operand, then of the second.
    b, s, r = len(in_both), len(stacked), len(rows)
    at = dict(zip((*free, out_axis), (*range(b, b + s), b + s + r), strict=True))
    of_q = [at[i] for i in sorted(at)]
    first, second = dot.in_order(range(b + s, b + s + r), of_q)
    return jnp.transpose(out, (*range(b), *first, *second))


# --- in codes ------------------------------------------------------------------------------------


def in_codes(
    primitive: Primitive,
    x: jax.Array,
    q: QuantizedMatrix,
    q_first: bool,
    params: dict[str, Any],
    *others: jax.Array,
) -> Any:
    """Computes a product with activations quantized by `q.activation`.

    Args:
      primitive: `dot_general`, `conv_general_dilated` or `ragged_dot_general`.
      x, q: its operands.
      q_first: whether `q` is the first operand.
      params: the parameters of the primitive.
      others: operands after these two.

    Returns:
      The primitive's result, up to rounding; NotImplemented for other products.
    """
    pair = (q, x) if q_first else (x, q)
    product = product_of(primitive, pair, params)
    if product is None:
        return NotImplemented
    how = how_stored(q, q_first, product)._replace(dtype=params.get("preferred_element_type"))
    return apply(product, pair, how, others)


# --- in blocks -----------------------------------------------------------------------------------


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


def _blocks(x: jax.Array, q: QuantizedMatrix, dot: _Dot, out: Any) -> _Blocks | None:
    """Returns the blocks to cut a product in; None to compute it in one piece."""
    algorithm = jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
    if (
        q.size <= BLOCKED_FROM
        or dot.option("out_sharding") is not None
        or isinstance(dot.option("precision"), algorithm)  # it says how to accumulate, too
    ):
        return None
    axis = max((i for i in range(q.ndim) if i != q.ndim + q.axis), key=lambda i: q.shape[i])
    count = min(_NUM_BLOCKS, q.shape[axis])
    if count < 2:
        return None
    of_x, of_q = ((*c, *b) for c, b in zip(dot.contract, dot.batch, strict=True))
    x_axes = dict(zip(of_q, of_x, strict=True))
    out_axis = None
    if axis in dot.batch[1]:
        out_axis = dot.batch[1].index(axis)
    elif axis not in x_axes:
        if out.size > q.size:
            return None  # joining the results would take more memory than the dense weight
        free = [i for i in range(q.ndim) if i not in x_axes]
        before = 0 if dot.q_first else x.ndim - len(x_axes)
        out_axis = len(dot.batch[1]) + before + free.index(axis)
    return _Blocks(axis, q.shape[axis] // count, x_axes.get(axis), out_axis)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _in_blocks(
    x: jax.Array, q: QuantizedMatrix, blocks: _Blocks, dot: _Dot, dtype: Any
) -> jax.Array:
    """Computes the product block after block."""
    changes = {}
    if blocks.out_axis is None and jnp.issubdtype(dtype, np.inexact):
        # Sums of blocks are not rounded in between.
        changes["preferred_element_type"] = jnp.promote_types(dtype, jnp.float32)

    def run(x: jax.Array, q: QuantizedMatrix) -> jax.Array:
        # Checkpointed, or the scan would keep each dense block for the backward pass.
        @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
        def block(start: Any, size: int) -> jax.Array:
            # The last axis of the leaves is the grouped one, and the rows come before it.
            part = slices(q, start, size, min(blocks.axis, q.ndim - 2))
            own = x if blocks.x_axis is None else slices(x, start, size, blocks.x_axis)
            return dot.dense(own, part.materialize(), **changes)

        length = q.shape[blocks.axis]
        return over_blocks(block, length, blocks.size, blocks.out_axis).astype(dtype)

    return jax.checkpoint(run)(x, q)


# --- with a dense copy ---------------------------------------------------------------------------


def with_dense(primitive: Any, *operands: Any, **params: Any) -> jax.Array:
    """Computes a primitive on the dense values of stored operands; the backward pass keeps the codes.

    Args:
      primitive: a primitive with one result.
      *operands: its operands, some of them stored matrices.
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
