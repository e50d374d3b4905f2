"""Products with quantized matrices: the one place that chooses how they are computed."""

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit._array import dense_struct, is_implicit
from haiku_implicit.kernels.matmul import quantized_matmul
from haiku_implicit.quantization.blocked import blocked_dot, blocks_of

if TYPE_CHECKING:
    from haiku_implicit.arrays.quantized import QuantizedMatrix


def quantized_dot(
    x: jax.Array,
    q: "QuantizedMatrix",
    dimension_numbers: Any,
    *,
    q_first: bool = False,
    **params: Any,
) -> jax.Array:
    """`jax.lax.dot_general(x, q)`, of which no dense copy of `q` is left over.

    What contracts one axis of the matrix is a `quantized_matmul`. The rest (nothing or everything is
    contracted, or the matrix axes are batch axes, as those of a cache are) dequantizes the operand in
    blocks. For the backward pass the codes and the scales are kept, and dequantized anew.

    Args:
      x: any array.
      q: the quantized matrix, or stack of them.
      dimension_numbers: as `jax.lax.dot_general` has them, for the operands in their order.
      q_first: whether that order is `q`, `x`.
      **params: the other parameters of `dot_general`.

    Returns:
      What `dot_general` of `x` and the dense `q` is, up to the order of its sums.
    """
    operands = (q, x) if q_first else (x, q)
    contract, batch = (axes[::-1] if q_first else axes for axes in dimension_numbers)
    if _is_matmul(x, q, contract[1], batch[1], params):
        dot = functools.partial(
            jax.lax.dot_general_p.bind, dimension_numbers=dimension_numbers, **params
        )
        out = jax.eval_shape(dot, *map(dense_struct, operands))
        axes = tuple(tuple(map(tuple, pair)) for pair in (contract, batch))
        return _as_matmul(x, q, *axes, q_first, params.get("precision"), np.dtype(out.dtype))
    blocks = blocks_of(operands, dimension_numbers, params)
    if blocks is not None:
        named = tuple(params.items())
        return blocked_dot(x, q.with_row_scales(), dimension_numbers, q_first, blocks, named)
    return with_dense(
        jax.lax.dot_general_p, *operands, dimension_numbers=dimension_numbers, **params
    )


def _is_matmul(x: Any, q: Any, contracted: Any, batch: Any, params: Any) -> bool:
    core = (q.ndim - 2, q.ndim - 1)
    dtypes = (x.dtype, params.get("preferred_element_type") or x.dtype)
    return (
        len(contracted) == 1
        and contracted[0] in core
        and not set(core) & set(batch)
        and all(jnp.issubdtype(d, np.floating) for d in dtypes)
        and params.get("out_sharding") is None
        and 0 not in (*x.shape, *q.shape)
    )


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _as_matmul(
    x: jax.Array,
    q: "QuantizedMatrix",
    contract: Any,
    batch: Any,
    q_first: bool,
    precision: Any,
    dtype: Any,
) -> jax.Array:
    """The product as one of `[batch, m, i]` and `[batch, i, o]`."""
    (x_contracted,), (contracted,) = contract
    if contracted == q.ndim - 1:
        q = q._replace(axis=-3 - q.axis)  # its transpose
    # Axes of stacks of matrices that are not axes of `x`, too, come after those that are.
    free = tuple(i for i in range(q.ndim - 2) if i not in batch[1])
    of_x = tuple(i for i in range(x.ndim) if i not in (*batch[0], x_contracted))
    q = jax.tree.map(lambda y: jnp.transpose(y, (*batch[1], *free, y.ndim - 2, y.ndim - 1)), q)
    x = jnp.transpose(x, (*batch[0], *of_x, x_contracted))
    in_both, stacked, rows = (
        x.shape[: len(batch[0])],
        q.shape[len(batch[0]) : -2],
        x.shape[len(batch[0]) : -1],
    )
    x = x.reshape(math.prod(in_both), 1, math.prod(rows), x.shape[-1])
    x = jnp.broadcast_to(x, (x.shape[0], math.prod(stacked), *x.shape[2:]))
    flat = jax.tree.map(lambda y: y.reshape(-1, *y.shape[-2:]), q)
    out = quantized_matmul(x.reshape(-1, *x.shape[-2:]), flat, precision=precision, dtype=dtype)
    out = out.reshape(*in_both, *stacked, *rows, out.shape[-1])
    # `dot_general` has batch axes, then the free ones of the first operand, then of the second.
    b, s, r = len(in_both), len(stacked), len(rows)
    of_rows, of_q = range(b + s, b + s + r), (*range(b, b + s), b + s + r)
    order = (*range(b), *of_q, *of_rows) if q_first else (*range(b), *of_rows, *of_q)
    return jnp.transpose(out, order)


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
