"""Products with quantized matrices: the one place that chooses how they are computed."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import dense_struct, is_implicit
from haiku_implicit.core.sharding import left_to_partitioner, result_sharding
from haiku_implicit.numerics import formats
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products import by_rule
from haiku_implicit.products.blocked import blocked_dot, blocks_of
from haiku_implicit.products.matmul import quantized_matmul
from haiku_implicit.products.quant_rules import QtRule


def quantized_dot(
    x: jax.Array,
    q: QuantizedMatrix,
    dimension_numbers: Any,
    *,
    q_first: bool = False,
    **params: Any,
) -> jax.Array:
    """`jax.lax.dot_general(x, q)`, of which no dense copy of `q` is left over.

    What contracts one axis is a `quantized_matmul`, wherever the axes are: of a cache `[batch, time,
    heads, depth]` attention contracts the depth or the time, for each head. The rest (nothing or
    everything is contracted, or the axis that is stored in groups is a batch axis) dequantizes the
    operand in blocks. For the backward pass the codes and the scales are kept, and dequantized anew.

    Args:
      x: any array.
      q: the quantized matrix, or stack of them.
      dimension_numbers: as `jax.lax.dot_general` has them, for the operands in their order.
      q_first: whether that order is `q`, `x`.
      **params: the other parameters of `dot_general`.

    Returns:
      What `dot_general` of `x` and the dense `q` is, up to the order of its sums.
    """
    own = formats.find(q.format).dtype
    if q.codes.dtype != own:
        # Who casts all floating leaves of a tree, as `jmp` does, casts codes of 8-bit floats as well;
        # they lose nothing by it.
        q = q._replace(codes=q.codes.astype(own))
    operands = (q, x) if q_first else (x, q)
    params = dict(params, dimension_numbers=dimension_numbers)
    sharding = result_sharding(jax.lax.dot_general_p, operands, params)
    if sharding is not None:
        params["out_sharding"] = None
        return _in_mesh(operands, sharding, q_first, tuple(params.items()))
    return _dot(operands, q_first, **params)


# Jitted, as eager code would lay out each intermediate value anew.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _in_mesh(operands: Any, sharding: Any, q_first: bool, params: Any) -> jax.Array:
    """The same where axes of a mesh are explicit."""
    run = functools.partial(_dot, q_first=q_first, **dict(params))
    return left_to_partitioner(run, sharding)(operands)


def _dot(operands: Any, q_first: bool, *, dimension_numbers: Any, **params: Any) -> jax.Array:
    q, x = operands if q_first else operands[::-1]
    contract, batch = (axes[::-1] if q_first else axes for axes in dimension_numbers)
    row = _row_axis(x, q, contract[1], batch[1], params)
    if row is not None:
        dot = functools.partial(
            jax.lax.dot_general_p.bind, dimension_numbers=dimension_numbers, **params
        )
        out = jax.eval_shape(dot, *map(dense_struct, operands))
        axes = tuple(tuple(map(tuple, pair)) for pair in (contract, batch))
        dtype = np.dtype(out.dtype)
        return _as_matmul(x, q, row, *axes, q_first, params.get("precision"), dtype)
    if q.activation is not None:
        return _dot_in_codes(operands, dimension_numbers, q_first, params)
    blocks = blocks_of(operands, dimension_numbers, params)
    if blocks is not None:
        named = tuple(params.items())
        return blocked_dot(x, q.with_row_scales(), dimension_numbers, q_first, blocks, named)
    return with_dense(
        jax.lax.dot_general_p, *operands, dimension_numbers=dimension_numbers, **params
    )


def _dot_in_codes(operands: Any, numbers: Any, q_first: bool, params: Any) -> jax.Array:
    """A product of codes with those of activations, see `quantization.dot_general`."""
    lhs, rhs = (x.with_row_scales() if is_implicit(x) else x for x in operands)
    q = lhs if q_first else rhs
    # (The rule's format of weights is not used: this one is stored in its own.)
    rule = QtRule(weight_qtype="int8", act_qtype=q.activation.split(",")[0])
    which: Any = dict(lhs_is_weight=q_first, rhs_is_weight=not q_first)
    return by_rule.dot_general(lhs, rhs, numbers, **params, rule=rule, **which)


def _row_axis(x: Any, q: Any, contracted: Any, batch: Any, params: Any) -> int | None:
    """The axis of `q` that makes matrices with the one that is stored in groups.

    One of the two is contracted. None: the product is none with matrices.
    """
    grouped = q.ndim + q.axis
    dtypes = (x.dtype, params.get("preferred_element_type") or x.dtype)
    if (
        len(contracted) != 1
        or grouped in batch
        or not all(jnp.issubdtype(d, np.floating) for d in dtypes)
        or params.get("out_sharding") is not None
        or 0 in (*x.shape, *q.shape)
    ):
        return None
    free = [i for i in range(q.ndim) if i not in (grouped, *batch)]
    if contracted[0] != grouped:
        return int(contracted[0])
    return free[-1] if free else None


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6, 7))
def _as_matmul(
    x: jax.Array,
    q: QuantizedMatrix,
    row: int,
    contract: Any,
    batch: Any,
    q_first: bool,
    precision: Any,
    dtype: Any,
) -> jax.Array:
    """The product as one of `[batch, m, i]` and `[batch, i, o]`."""
    (x_contracted,), (contracted,) = contract
    # Axes of stacks of matrices that are not axes of `x`, too, come after those that are.
    matrix = (row, q.ndim + q.axis)
    free = tuple(i for i in range(q.ndim) if i not in (*batch[1], *matrix))
    of_x = tuple(i for i in range(x.ndim) if i not in (*batch[0], x_contracted))
    out_axis = next(i for i in matrix if i != contracted)
    free_of_q = (*free, out_axis)
    in_both = [x.shape[i] for i in batch[0]]
    stacked = [q.shape[i] for i in free]
    rows = [x.shape[i] for i in of_x]
    # Leaves have the grouped axis last, whichever of the array's it is.
    others = [i for i in range(q.ndim) if i != q.ndim + q.axis]
    order = (*(others.index(i) for i in (*batch[1], *free, row)), q.ndim - 1)
    x = jnp.transpose(x, (*batch[0], *of_x, x_contracted))
    x = x.reshape(math.prod(in_both), 1, math.prod(rows), x.shape[-1])
    x = jnp.broadcast_to(x, (x.shape[0], math.prod(stacked), *x.shape[2:]))
    x = x.reshape(-1, *x.shape[-2:])
    q = q._replace(axis=-1 if contracted == row else -2)
    out = quantized_matmul(x, q, order=order, precision=precision, dtype=dtype)
    out = out.reshape(*in_both, *stacked, *rows, out.shape[-1])
    # `dot_general` has batch axes, then the free ones of the first operand, then of the second.
    b, s, r = len(in_both), len(stacked), len(rows)
    at = dict(zip(free_of_q, (*range(b, b + s), b + s + r), strict=True))
    of_q = [at[i] for i in sorted(free_of_q)]
    of_rows = range(b + s, b + s + r)
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
