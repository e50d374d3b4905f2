"""The product with a quantized matrix on NVIDIA GPUs: the conditions on operands, and the call.

`tiles` divides the work, and `kernels`, which Triton compiles, compute it. They read stored codes,
decode them in registers and multiply there; no dense weight is written anywhere. The primitive has two
products, with the storage order W[rows, length]:

    along the groups:  y[m, row] = sum over k of x[m, k] * W[row, k]
    along the rows:    y[m, k]   = sum over rows of x[m, row] * W[row, k]

Along the groups, each thread sums products of one row of x in its registers, without the matrix units.
All others are products of tiles. If there are too few programs to
keep all of the GPU's memory busy, each sum is split among several, and XLA adds up the parts.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Array, DType, Precision
from haiku_implicit.quantized.gpu import kernels
from haiku_implicit.quantized.gpu.tiles import Plan, columns, parts, plan_of
from haiku_implicit.quantized.layout import Order, matrices, readable
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

_CAPABILITY = 8.0  # of the oldest GPUs that Triton compiles for

# With more rows of activations, decoding the matrix once for all of them is faster: see
# `benchmarks/results/quantized_matmul.md`.
_MOST_ROWS = 128


# --- conditions ------------------------------------------------------------------------------------


def available() -> bool:
    """Whether products on this process's GPU use the kernel; `HAIKU_IMPLICIT_PALLAS=0` turns it off."""
    return os.environ.get("HAIKU_IMPLICIT_PALLAS") != "0" and supported()


@functools.cache
def supported() -> bool:
    """Whether this process has a GPU that the kernel can be compiled for.

    If this process does not have a GPU, the program is for another one, perhaps with another JAX.
    """
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:
        return False
    return capability() >= _CAPABILITY


@functools.cache
def capability() -> float:
    """Returns the compute capability of this process's GPU, 0 without one."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return 0.0
    return float(getattr(device, "compute_capability", 0))


def applies(x: Array, q: QuantizedMatrix) -> bool:
    """Whether the kernel serves a product that `may_be_served`: codes of 8, 4, 2 or 1 bits, few rows.

    Args:
      x, q: as for `may_be_served`.
    """
    return (
        isinstance(q, QuantizedMatrix)
        and q.activation is None
        and x.shape[1] <= _MOST_ROWS
        and len(formats.find(q.format).planes) == 1
        and max(x.size, q.size) < 2**31  # offsets are 32-bit integers
        and available()
    )


# --- the product -----------------------------------------------------------------------------------


def pallas_matmul(
    x: jax.Array,
    q: QuantizedMatrix,
    order: Order,
    precision: Precision,
    dtype: DType,
    interpret: bool = False,
) -> jax.Array:
    """Computes `x @ q` for a batch of matrices.

    Args:
      x: `[batch, m, i]`, of one of the dtypes that the kernel serves.
      q: `[batch, i, o]` with dense scales for each row.
      order: as for `quantized_matmul`.
      precision: as for `jax.lax.dot_general`; if it is None or DEFAULT, float32 operands are rounded to
        TensorFloat-32, as in XLA's dense products.
      dtype: the dtype of the result; sums are float32.
      interpret: whether JAX itself runs the kernel, on any platform: slow, for tests.

    Returns:
      `[batch, m, o]`.
    """
    q = matrices(q, order)
    batch, m, _ = x.shape
    plan = plan_of(m, batch, q, x.dtype, precision)._replace(
        capability=0.0 if interpret else capability()
    )
    offset = None if q.offset is None else readable(q.offset)
    has_table, values = plan.matrix.has_table, plan.matrix.format.table
    table = jnp.asarray(values, jnp.float32) if has_table else None
    operands = x, q.codes.view(jnp.uint8), readable(q.scale), offset, table
    splits = plan.tile.splits
    shape = (splits, batch, m, q.shape[-1])
    out = compat.struct(shape, jnp.float32 if splits > 1 else dtype, like=jax.tree.leaves(operands))
    y = _call(plan, out, operands, interpret)
    return y.sum(0).astype(dtype) if splits > 1 else y[0]


def _call(
    plan: Plan, out: jax.ShapeDtypeStruct, operands: tuple[Any, ...], interpret: bool
) -> jax.Array:
    # Imported here, because importing Pallas takes longer than importing this library.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    run = kernels.along_rows if plan.along_rows else kernels.along_groups
    if plan.one_row:
        run = kernels.one_row_along_groups

    def kernel(refs: tuple[Any, Any, Any, Any, Any], y: Any) -> None:
        run(plan, kernels.Refs(*refs, y))

    def whole(x: jax.Array) -> Any:  # of one matrix of the batch
        if x.ndim == 1:
            return pl.BlockSpec(x.shape, lambda *_: (0,))
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, j, split, b: (b, 0, 0))

    result = pl.BlockSpec((None, None, *out.shape[2:]), lambda i, j, split, b: (split, b, 0, 0))
    tile = plan.tile
    call = pl.pallas_call(
        kernel,
        out_shape=out,
        # Programs for one part of the matrix run one after another.
        grid=(parts(plan.m, tile.m), columns(plan), *out.shape[:2]),
        in_specs=[jax.tree.map(whole, operands)],
        out_specs=result,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        name="quantized_matmul",
        interpret=interpret,
    )
    return call(operands)
