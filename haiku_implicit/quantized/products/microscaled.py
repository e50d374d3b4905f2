"""Products of two microscaled operands: `jax.nn.scaled_matmul` on CUDA.

XLA gives it to cuDNN on Blackwell GPUs if the operands are mxfp8 or nvfp4, and multiplies dequantized
values on older GPUs. JAX does not lower it for CPUs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.typing import DType
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.numbers.options import OperandConfig
from haiku_implicit.quantized.operands import QuantizedOperand, e4m3_unit
from haiku_implicit.quantized.products.bilinear import Bilinear, Operand, multiply

_SERVED = ("mxfp8", "nvfp4")


class _Blocks(NamedTuple):
    """An operand of `jax.nn.scaled_matmul`.

    Attributes:
      codes: `[batch, rows, k]`.
      scales: `[batch, rows, tiles]`, e8m0 or e4m3.
      unit: `[batch, rows, 1]`, the factor of the rows; None for one.
    """

    codes: jax.Array
    scales: jax.Array
    unit: jax.Array | None


def microscaled_product(
    product: Bilinear,
    a: Operand,
    b: Operand,
    configs: tuple[OperandConfig, OperandConfig],
    dtype: DType,
    out_dtype: DType,
) -> jax.Array:
    """Computes `multiply`; on CUDA, with `jax.nn.scaled_matmul` if both operands have its formats.

    Args:
      product, a, b, dtype, out_dtype: as for `multiply`.
      configs: how the operands were quantized.
    """

    def of_values(a: Operand, b: Operand) -> jax.Array:
        return multiply(product, a, b, dtype, out_dtype)

    order = _order(product, a, b, configs, out_dtype)
    if order is None:
        return of_values(a, b)
    return jax.lax.platform_dependent(
        a, b, cuda=_in_blocks(product, order, configs, out_dtype), default=of_values
    )


class _Order(NamedTuple):
    """The axes of both operands: shared with the result, of one operand alone, and summed."""

    batch: tuple[tuple[int, int], ...]
    free: tuple[tuple[int, ...], tuple[int, ...]]
    summed: tuple[tuple[int, ...], tuple[int, ...]]


def _order(
    product: Bilinear,
    a: Operand,
    b: Operand,
    configs: tuple[OperandConfig, OperandConfig],
    out_dtype: DType,
) -> _Order | None:
    """Returns how the axes make matrices; None if this is not a product that `scaled_matmul` has."""
    if configs[0].qtype != configs[1].qtype or configs[0].qtype not in _SERVED:
        return None
    if not product.separable or not product.summed or np.dtype(out_dtype).itemsize > 4:
        return None
    pairs = list(zip(*product.axes, strict=True))
    batch = tuple((i, j) for i, j in pairs if i is not None and j is not None)
    left = tuple(i for i, j in pairs if i is not None and j is None)
    right = tuple(j for i, j in pairs if j is not None and i is None)
    order = _Order(
        batch,
        (left, right),
        (tuple(i for i, _ in product.summed), tuple(j for _, j in product.summed)),
    )
    for side, (x, config) in enumerate(zip((a, b), configs, strict=True)):
        if not isinstance(x, QuantizedOperand) or not _fits(x, order, side, config):
            return None
    return order


def _fits(x: QuantizedOperand, order: _Order, side: int, config: OperandConfig) -> bool:
    """Whether an operand has no other axes, and a scale for each tile of the last summed axis."""
    known = {pair[side] for pair in order.batch} | {*order.free[side], *order.summed[side]}
    tiled = order.summed[side][-1]
    return (
        known == {*range(x.codes.ndim)}
        and x.scale is not None
        and x.codes.shape[tiled] == x.scale.shape[tiled] * (config.tile or 0)
        and compat.explicit_sharding(x.codes) is None
    )


def _in_blocks(
    product: Bilinear,
    order: _Order,
    configs: tuple[OperandConfig, OperandConfig],
    out_dtype: DType,
) -> Callable[[QuantizedOperand, QuantizedOperand], jax.Array]:
    """Returns the product of two operands as matrices of blocks."""

    def run(a: QuantizedOperand, b: QuantizedOperand) -> jax.Array:
        left, right = (
            _blocks(
                x, [*(p[side] for p in order.batch)], order.free[side], order.summed[side], config
            )
            for side, (x, config) in enumerate(zip((a, b), configs, strict=True))
        )
        out = _scaled_matmul(left.codes, right.codes, left.scales, right.scales)
        if left.unit is not None and right.unit is not None:
            out = out * left.unit * jnp.swapaxes(right.unit, -1, -2)
        of_a = [i for i, _ in order.batch] + [*order.free[0]]
        shape = [a.codes.shape[i] for i in of_a] + [b.codes.shape[j] for j in order.free[1]]
        # The axes of the result, by their source, in the order that they have now.
        found = [
            *order.batch,
            *((i, None) for i in order.free[0]),
            *((None, j) for j in order.free[1]),
        ]
        places = [found.index(pair) for pair in zip(*product.axes, strict=True)]
        return jnp.transpose(out.reshape(shape), places).astype(out_dtype)

    return run


def _blocks(
    x: QuantizedOperand,
    batch: Sequence[int],
    free: Sequence[int],
    summed: Sequence[int],
    config: OperandConfig,
) -> _Blocks:
    """Returns an operand as matrices whose rows are cut into tiles."""
    scale: Any = x.scale
    shape, tiled = x.codes.shape, summed[-1]
    of_scale = [n if i != tiled else scale.shape[tiled] for i, n in enumerate(shape)]
    rows = int(np.prod([shape[i] for i in free], dtype=int))
    count = int(np.prod([shape[i] for i in batch], dtype=int))

    def matrices(y: jax.Array) -> jax.Array:
        return jnp.transpose(y, (*batch, *free, *summed)).reshape(count, rows, -1)

    codes, scale = matrices(x.codes), matrices(jnp.broadcast_to(scale, of_scale))
    if config.qtype == "mxfp8":
        return _Blocks(codes, scale.astype(jnp.float8_e8m0fnu), None)
    unit = e4m3_unit(scale, (-1,))
    scales = (scale / unit).astype(formats.FORMATS["fp8_e4m3"].dtype)
    return _Blocks(codes.astype(jnp.float4_e2m1fn), scales, unit)


@jax.custom_batching.custom_vmap
def _scaled_matmul(a: jax.Array, b: jax.Array, of_a: jax.Array, of_b: jax.Array) -> jax.Array:
    """`jax.nn.scaled_matmul`, which JAX itself maps only if all operands have the mapped axis."""
    return jax.nn.scaled_matmul(a, b, of_a, of_b)


@_scaled_matmul.def_vmap
def _batched(size: int, batched: Sequence[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
    if batched == [True, False, True, False]:  # more rows of the same product
        a, b, of_a, of_b = operands
        count, rows = a.shape[1:3]
        a, of_a = (jnp.swapaxes(x, 0, 1).reshape(count, size * rows, -1) for x in (a, of_a))
        out = _scaled_matmul(a, b, of_a, of_b).reshape(count, size, rows, -1)
        return jnp.swapaxes(out, 0, 1), True
    whole = (
        x if own else jnp.broadcast_to(x, (size, *x.shape))
        for x, own in zip(operands, batched, strict=True)
    )
    out = _scaled_matmul(*(x.reshape(-1, *x.shape[2:]) for x in whole))
    return out.reshape(size, -1, *out.shape[1:]), True
