"""The plan of a product on a GPU: how the work is divided among programs, and within one.

A group of g elements has g / d bytes, with d = 8 / bits *digits* in each; digit i of byte j is
element i * g / d + j. So a tile of bytes is d tiles of weights, each with contiguous activations.
The bytes of a group are read in *pieces* whose size is a power of two, as Triton requires.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.typing import DType, Precision
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

PROGRAMS = 512  # about this many programs keep the memory of a large GPU (132 processors) busy


class Matrix(NamedTuple):
    """The static properties of a stored matrix.

    Attributes:
      rows, length: its shape, without padding.
      groups: how many groups each row has.
      stored: the number of bytes of a group.
      format: the format of the codes.
      dtype: the dtype that its values are rounded to.
    """

    rows: int
    length: int
    groups: int
    stored: int
    format: formats.Format
    dtype: Any

    @property
    def has_table(self) -> bool:
        """Whether values are looked up in a table; kernels compute the values of other formats."""
        return self.format.table is not None and self.format.name != "fp4"

    @property
    def digits(self) -> int:
        """The number of codes in a byte."""
        return 8 // self.format.bits


class Tile(NamedTuple):
    """How the work is divided among programs, and within one.

    Attributes:
      m: rows of activations.
      rows: rows of the matrix.
      pieces: pieces of groups.
      piece: bytes of each, a power of two as the other three are.
      splits: the number of programs that share a sum.
      warps: the number of warps of 32 threads in each program.
      stages: how many tiles are loaded ahead from memory, if the matrix units are used.
    """

    m: int
    rows: int
    pieces: int
    piece: int
    splits: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The plan of one kernel: the matrix, the tiles, and the dtype and precision of products."""

    matrix: Matrix
    tile: Tile
    m: int
    along_rows: bool
    operand: DType  # the dtype of the operands of a product; sums are float32
    precision: Precision
    capability: float = 0.0  # of the GPU; 0 if JAX interprets the kernel

    @property
    def one_row(self) -> bool:
        """Whether the matrix units would be idle for the most part."""
        return self.m == 1 and not self.along_rows


def plan_of(m: int, batch: int, q: QuantizedMatrix, dtype: DType, precision: Precision) -> Plan:
    """Plans the product of `[batch, m, i]` of this dtype and `[batch, i, o]`."""
    along_rows = q.axis == -1
    rows, length = q.shape[-2:] if along_rows else q.shape[:-3:-1]
    groups = q.scale.shape[-1]
    stored = q.codes.shape[-1] // groups
    matrix = Matrix(rows, length, groups, stored, formats.find(q.format), np.dtype(q.dtype))
    # This dtype holds the values of both dtypes exactly.
    operand = np.dtype(jnp.promote_types(dtype, q.dtype))
    default, exact = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST
    asked = default if precision in (None, default, (default, default)) else exact
    tile = _tile(m, matrix, along_rows, operand.itemsize)
    plan = Plan(matrix, tile, m, along_rows, operand, asked)
    if plan.one_row:
        return plan._replace(tile=_tile_of_one_row(matrix))
    return plan._replace(tile=tile._replace(splits=_splits(plan, batch)))


def _tile_of_one_row(matrix: Matrix) -> Tile:
    """Returns tiles for one row of activations: each thread reads 16 bytes at a time."""
    piece = min(_power_of_two(matrix.stored), 16)
    pieces = min(1024 // piece, _power_of_two(matrix.groups * parts(matrix.stored, piece)))
    return Tile(1, 4, pieces, piece, splits=1, warps=4, stages=1)


def _tile(m: int, matrix: Matrix, along_rows: bool, itemsize: int) -> Tile:
    """Returns tiles for the matrix units, with sides of at least 16."""
    block = min(max(_power_of_two(m), 16), 128)
    large = block == 128
    width, depth = (128, 128 // itemsize) if large else (64, 64)  # of the result, and of the sums
    rows, size = (depth, width) if along_rows else (width, depth)
    if large:
        size = max(size // matrix.digits, 16)
    piece = min(_power_of_two(matrix.stored), size)
    # Triton would also fetch the values of a table ahead, one by one.
    stages = 1 if matrix.has_table else 3
    return Tile(block, rows, size // piece, piece, 1, 8 if large else 4, stages)


def _splits(plan: Plan, batch: int) -> int:
    """Returns enough splits to keep the memory busy: a power of two; each program has two steps."""
    programs = parts(plan.m, plan.tile.m) * columns(plan) * batch
    most = min(PROGRAMS // programs, _terms(plan) // 2, 16)
    return 1 << max(most.bit_length() - 1, 0)


def columns(plan: Plan) -> int:
    """Returns the number of parts that the columns of the result are divided into."""
    return tiles(plan) if plan.along_rows else parts(plan.matrix.rows, plan.tile.rows)


def steps(plan: Plan) -> int:
    """Returns the number of tiles that each program sums over."""
    return parts(_terms(plan), plan.tile.splits)


def _terms(plan: Plan) -> int:
    """Returns the number of tiles to sum over."""
    return parts(plan.matrix.rows, plan.tile.rows) if plan.along_rows else tiles(plan)


def tiles(plan: Plan) -> int:
    """Returns the number of tiles in a row of the matrix."""
    pieces = plan.matrix.groups * parts(plan.matrix.stored, plan.tile.piece)
    return parts(pieces, plan.tile.pieces)


def parts(n: int, size: int) -> int:
    """Returns the number of parts of this size in `n`, the last one perhaps smaller."""
    return -(-n // size)


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
