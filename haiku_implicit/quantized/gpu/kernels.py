"""The three kernels of `pallas_matmul`, in Pallas: the computation of one GPU program.

Each takes a `Plan`, which says how the work is divided (`tiles`), and references to the operands in
memory. `one_row_along_groups` serves one row of activations, `along_groups` and `along_rows` all
others. They share the functions below: indices of blocks and pieces, masked loads and stores, and the
decoding of codes. Triton compiles them, so that all sizes are powers of two. Pallas is imported in
functions, because importing it takes longer than importing this library.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Array
from haiku_implicit.quantized.gpu import ptx
from haiku_implicit.quantized.gpu.tiles import Plan, parts, steps, tiles
from haiku_implicit.quantized.numbers import formats


class Refs(NamedTuple):
    """References to the operands in memory, for one matrix of the batch."""

    x: Any
    codes: Any
    scale: Any
    offset: Any
    table: Any
    y: Any


class Block(NamedTuple):
    """Indices, and a mask of the indices that exist; the mask is None if all do."""

    index: Any
    mask: Any

    def at(self, *axes: int) -> "Block":
        """Inserts axes of length one at these positions, like `jnp.expand_dims`."""
        mask = None if self.mask is None else jnp.expand_dims(self.mask, axes)
        return Block(jnp.expand_dims(self.index, axes), mask)


class Pieces(NamedTuple):
    """Pieces of groups, by their positions in a row, which are the same in every row.

    Attributes:
      group: the group of each piece, `[pieces]`.
      byte: the position of each stored byte in its row, `[pieces, piece]`.
      within: the position of each stored byte in its group, `[pieces, piece]`.
    """

    group: Block
    byte: Block
    within: Any


def one_row_along_groups(plan: Plan, refs: Refs) -> None:
    """Computes y[0, row] for one row of activations and a block of rows of the matrix.

    Each thread adds up its own products of all pieces; their sums are added up at the end.
    """
    tile = plan.tile
    rows = _block(_program_id(1), tile.rows, plan.matrix.rows)

    def step(t: Any, total: jax.Array) -> jax.Array:
        pieces = _pieces(plan, t)
        read = _read(refs, rows, pieces)
        for digit in range(plan.matrix.digits):
            values, k = _values(plan, refs, read, digit, wide=True), _elements(plan, pieces, digit)
            x = compat.pallas_load(refs.x, (jnp.zeros_like(k.index), k.index), k.mask)
            total += values * x.astype(jnp.float32)[None]
        return total

    start = jnp.zeros((tile.rows, tile.pieces, tile.piece), jnp.float32)
    total = _loop(steps(plan), step, start).sum(2).sum(1)
    _store(refs.y, (jnp.zeros_like(rows.index), rows.index), total, rows.mask)


def along_groups(plan: Plan, refs: Refs) -> None:
    """Computes y[m, row] for a block of rows of activations and a block of rows of the matrix."""
    tile, split = plan.tile, _program_id(2)
    m = _block(_program_id(0), tile.m, plan.m)
    rows = _block(_program_id(1), tile.rows, plan.matrix.rows)

    def step(t: Any, total: jax.Array) -> jax.Array:
        pieces = _pieces(plan, split * steps(plan) + t)
        read = _read(refs, rows, pieces)
        for digit in range(plan.matrix.digits):
            values = _values(plan, refs, read, digit).reshape(tile.rows, -1)
            x = _load_pairs(refs.x, m, _flat(_elements(plan, pieces, digit)))
            total += _dot(plan, x, values, 1)
        return total

    total = _loop(steps(plan), step, jnp.zeros((tile.m, tile.rows), jnp.float32))
    _store_pairs(refs.y, m, rows, total)


def along_rows(plan: Plan, refs: Refs) -> None:
    """Computes y[m, k] for a block of rows of activations and some pieces of the matrix's rows."""
    tile, split, terms = plan.tile, _program_id(2), steps(plan)
    m = _block(_program_id(0), tile.m, plan.m)
    pieces = _pieces(plan, _program_id(1))

    def step(t: Any, totals: Array) -> Any:
        rows = _block(split * terms + t, tile.rows, plan.matrix.rows, terms * tile.splits)
        read = _read(refs, rows, pieces)
        x = _load_pairs(refs.x, m, rows)
        values = [_values(plan, refs, read, digit) for digit in range(plan.matrix.digits)]
        products = [_dot(plan, x, v.reshape(tile.rows, -1), 0) for v in values]
        return tuple(map(jnp.add, totals, products))

    zeros = jnp.zeros((tile.m, tile.pieces * tile.piece), jnp.float32)
    for digit, total in enumerate(_loop(terms, step, (zeros,) * plan.matrix.digits)):
        _store_pairs(refs.y, m, _flat(_elements(plan, pieces, digit)), total)


def _loop(steps: int, step: Callable[[Any, Any], Any], start: Array) -> Any:
    return jax.lax.fori_loop(0, steps, lambda t, total: step(t.astype(jnp.int32), total), start)


def _dot(plan: Plan, a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Multiplies tiles: the last axis of `a` by this axis of `b`."""
    return jax.lax.dot_general(
        a.astype(plan.operand),
        b.astype(plan.operand),
        (((1,), (axis,)), ((), ())),
        precision=plan.precision,
        preferred_element_type=jnp.float32,
    )


# --- positions -------------------------------------------------------------------------------------


def _program_id(axis: int) -> jax.Array:
    from jax.experimental import pallas as pl

    return pl.program_id(axis)


def _iota(size: int) -> jax.Array:
    return jax.lax.iota(jnp.int32, size)


def _block(i: Any, size: int, end: int, count: int | None = None) -> Block:
    """Returns block i of an axis of length `end`, for i below `count` (default: all that exist)."""
    index = i * size + _iota(size)
    count = parts(end, size) if count is None else count
    return Block(index, index < end if count * size > end else None)


def _pieces(plan: Plan, tile: Any) -> Pieces:
    """Returns the pieces of one tile."""
    matrix, size = plan.matrix, plan.tile.piece
    in_group = parts(matrix.stored, size)
    at = tile * plan.tile.pieces + _iota(plan.tile.pieces)
    # Not `//`, which would check signs.
    group = jax.lax.div(at, jnp.full_like(at, in_group))
    first = jax.lax.rem(at, jnp.full_like(at, in_group)) * size
    within = first[:, None] + _iota(size)[None]
    taken = tiles(plan) if plan.along_rows else steps(plan) * plan.tile.splits
    all_groups = taken * plan.tile.pieces == matrix.groups * in_group
    of_group = Block(group, None if all_groups else group < matrix.groups)
    byte, mask = (group * matrix.stored)[:, None] + within, of_group.at(1).mask
    if mask is not None:
        mask = jnp.broadcast_to(mask, byte.shape)
    if matrix.stored % size:
        mask = _both(mask, within < matrix.stored)
    return Pieces(of_group, Block(byte, mask), within)


def _elements(plan: Plan, pieces: Pieces, digit: int) -> Block:
    """Returns the elements of a row that one digit of the bytes stands for: `[pieces, piece]`."""
    matrix = plan.matrix
    group = matrix.digits * matrix.stored
    index = (pieces.group.index * group + digit * matrix.stored)[:, None] + pieces.within
    mask = pieces.byte.mask
    if matrix.stored % plan.tile.piece:  # else it would be another byte's index
        index = jnp.where(pieces.within < matrix.stored, index, matrix.length)
    if matrix.length < matrix.groups * group:
        mask = _both(mask, index < matrix.length)
    return Block(index, mask)


def _flat(block: Block) -> Block:
    return Block(block.index.reshape(-1), None if block.mask is None else block.mask.reshape(-1))


def _both(a: Array, b: Array) -> Any:
    return b if a is None else a if b is None else a & b


def _store(ref: Any, index: Any, value: jax.Array, mask: Any) -> None:
    compat.pallas_store(ref, index, value.astype(ref.dtype), mask)


def _pairs(a: Block, b: Block) -> tuple[Any, Any]:
    """Combines blocks of rows and columns to the indices and the mask of a matrix."""
    a, b = a.at(1), b.at(0)
    return (a.index, b.index), _both(a.mask, b.mask)


def _load_pairs(ref: Any, a: Block, b: Block) -> jax.Array:
    return compat.pallas_load(ref, *_pairs(a, b))


def _store_pairs(ref: Any, a: Block, b: Block, value: jax.Array) -> None:
    index, mask = _pairs(a, b)
    _store(ref, index, value, mask)


# --- values ----------------------------------------------------------------------------------------


class Read(NamedTuple):
    """The stored codes, scales and offsets for some pieces of some rows.

    Attributes:
      codes: `[rows, pieces, piece]`, bytes.
      scale, offset: `[rows, pieces, 1]`, float32; or None.
    """

    codes: jax.Array
    scale: Array
    offset: Array


def _read(refs: Refs, rows: Block, pieces: Pieces) -> Read:
    # Loaded as a matrix, scales do not determine the threads that hold the codes, which are larger.
    scale, offset = (
        None if ref is None else _load_pairs(ref, rows, pieces.group).astype(jnp.float32)[..., None]
        for ref in (refs.scale, refs.offset)
    )
    rows, byte = rows.at(1, 2), pieces.byte.at(0)
    codes = compat.pallas_load(refs.codes, (rows.index, byte.index), _both(rows.mask, byte.mask))
    return Read(codes, scale, offset)


def _values(plan: Plan, refs: Refs, read: Read, digit: int, wide: bool = False) -> jax.Array:
    """Returns the weights that one digit of each byte stands for.

    They are rounded to the matrix's dtype, and have this dtype; or float32 if `wide`.
    """
    fmt, dtype = plan.matrix.format, plan.matrix.dtype
    if ptx.decodes(fmt, plan.capability):
        scale = jnp.broadcast_to(read.scale, read.codes.shape)
        offset = None if read.offset is None else jnp.broadcast_to(read.offset, read.codes.shape)
        return ptx.decoded(read.codes, scale, offset, fmt, digit, dtype, wide)
    codes = read.codes.astype(jnp.int32)
    if fmt.bits < 8:
        shift = jnp.full_like(codes, digit * fmt.bits)
        codes = jax.lax.shift_right_logical(codes, shift) & (2**fmt.bits - 1)
    values = _decoded(codes, fmt, refs.table) * read.scale
    if read.offset is not None:
        values += read.offset
    if wide and plan.capability:
        return ptx.rounded(values, dtype)
    values = values.astype(dtype)
    return values.astype(jnp.float32) if wide else values


def _decoded(codes: jax.Array, fmt: formats.Format, table: Any) -> jax.Array:
    """Returns the values of int32 codes, before scale and offset."""
    if fmt.is_float or fmt.name == "fp4":
        return _from_small_float(codes, fmt)
    if table is not None:
        return compat.pallas_load(table, (codes,), None)
    if fmt.bias % 1:
        return codes.astype(jnp.float32) - fmt.bias
    # From the bits of 2^23 + code: GPUs convert integers more slowly than they subtract floats.
    signed = fmt.dtype == np.int8
    bits = (codes ^ 0x80 if signed else codes) | 0x4B000000
    bias = 128 if signed else fmt.bias
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - (2.0**23 + bias)


def _from_small_float(codes: jax.Array, fmt: formats.Format) -> jax.Array:
    """Decodes floats of few bits: float16 with fewer digits and another bias of the exponent."""
    codes = codes.astype(jnp.uint16)
    mantissa, bias = {"fp4": (1, 1), "fp8_e4m3": (3, 7), "fp8_e5m2": (2, 15)}[fmt.name]
    sign = 1 << (fmt.bits - 1)
    half = _shifted(codes & sign, 16 - fmt.bits) | _shifted(codes & (sign - 1), 10 - mantissa)
    values = jax.lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    values *= 2.0 ** (15 - bias)
    if fmt.name == "fp8_e4m3":  # has one NaN instead of infinities
        values = jnp.where((codes & 0x7F) == 0x7F, jnp.nan, values)
    return values


def _shifted(x: jax.Array, by: int) -> jax.Array:
    return jax.lax.shift_left(x, jnp.full_like(x, by))
