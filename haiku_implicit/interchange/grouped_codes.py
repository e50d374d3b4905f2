"""Weights of other libraries as `QuantizedMatrix`: integer codes in groups, and blocks of floats."""

import math
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

# The fewest numbers that share a scale, if a block has to be divided.
_LEAST = 16


class IntegerCodes(NamedTuple):
    """The weight `scale * (code - zero point)`.

    Attributes:
      codes: `[..., outputs, inputs]`, from 0 on.
      scales: `[..., outputs, groups]`, or `[..., 1, groups]` for all outputs.
      zeros: the zero points, of the same shape; HQQ's are not whole numbers.
      group: the group of each input.
      bits: the bits of a code.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: np.ndarray
    bits: int

    def values(self) -> np.ndarray:
        """The weight in float32, which holds it exactly for scales of 16 bits."""
        codes, scales, zeros, group, _ = self
        return scales.astype(np.float32)[..., group] * (codes - zeros[..., group]).astype(
            np.float32
        )

    def read(self, dense: bool) -> np.ndarray | QuantizedMatrix:
        """The weight, as `Stored.read` returns it."""
        return self.values() if dense else self.matrix()

    def matrix(self) -> QuantizedMatrix:
        """A `QuantizedMatrix` of the weight, without offsets if all zero points are the middle code.

        Raises:
          ValueError: if its groups are not runs of inputs of one size, or do not fill whole bytes.
        """
        codes, scales, zeros, group, bits = self
        if bits == 7:  # in 8 bits
            codes, zeros, bits = codes + np.uint8(64), zeros.astype(np.float32) + 64, 8
        *lead, inputs = codes.shape
        groups = scales.shape[-1]
        size = int(np.count_nonzero(group == 0)) or 1
        if groups != -(-inputs // size) or (group != np.arange(inputs) // size).any():
            raise value_error(
                "the groups are not runs of inputs that follow each other (desc_act, actorder, g_idx), "
                "which a QuantizedMatrix can't hold. `dequantize` makes it dense"
            )
        if inputs % size:
            raise value_error(
                f"rows of {inputs} numbers end within a group of {size}, which a QuantizedMatrix can't "
                "hold. `dequantize` makes it dense"
            )
        symmetric = bits > 1 and (zeros == 2 ** (bits - 1)).all()
        fmt = formats.FORMATS[f"int{bits}" if symmetric else f"uint{bits}"]
        if size % fmt.multiple:
            raise value_error(
                f"groups of {size} codes of {bits} bits do not fill whole bytes, as they have to in a "
                "QuantizedMatrix. `dequantize` makes it dense"
            )
        if fmt.name == "int8":
            codes = (codes ^ 128).view(np.int8)  # minus 128
        # A float16 scale has 11 digits and a zero point 8: float32 holds the offset exactly.
        offset = None if symmetric else -scales.astype(np.float32) * zeros.astype(np.float32)
        return grouped(codes.reshape(*lead, groups, size), scales, offset, fmt, scales.dtype)


def blocks_of_floats(
    codes: np.ndarray,
    scales: np.ndarray,
    block: tuple[int, int],
    out_dtype: Any = None,
    dense: bool = False,
) -> QuantizedMatrix:
    """A matrix of float8 codes in blocks, the last ones of which may be smaller.

    Args:
      codes: `[..., rows, k]` float8.
      scales: `[..., rows / block rows, k / block columns]`, rounded up.
      block: the rows and columns of a block.
      out_dtype: the dtype of the weight; None for the dtype of the scales.
      dense: whether the matrix becomes dense at once, so that its scales may take any room.

    Raises:
      ValueError: if the last block is so small that scales would take more room than they are worth.
    """
    rows, k = codes.shape[-2:]
    across, along = block
    size = k if along >= k else math.gcd(along, k)
    if size < min(k, along, _LEAST) and not dense:
        raise value_error(
            f"rows of {k} numbers end within a block of {along}, and {size} is the largest group that "
            "both are made of, too small for a QuantizedMatrix. `dequantize` makes it dense"
        )
    if size < along and size < k:
        scales = np.repeat(scales, along // size, -1)[..., : k // size]
    if across < rows and rows % across:
        scales = np.repeat(scales, across, -2)[..., :rows, :]
    fmt = formats.find(codes.dtype)
    return grouped(codes.reshape(*codes.shape[:-1], -1, size), scales, None, fmt, out_dtype)


def fours_of_floats(data: np.ndarray, scales: Any, out_dtype: Any = None) -> QuantizedMatrix:
    """A matrix of fp4 (e2m1) codes, two to a byte, the first one in the low bits.

    Args:
      data: `[..., rows, k / 2]` uint8.
      scales: `[..., rows, groups]`; may be quantized.
      out_dtype: the dtype of the weight; None for the dtype of the scales.
    """
    codes = np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], scales.shape[-1], -1)
    return grouped(codes, scales, None, formats.FORMATS["fp4"], out_dtype)


def is_pair(block: Any) -> bool:
    """Whether a JSON value gives the rows and the columns of a block."""
    right = isinstance(block, list) and len(block) == 2
    return right and all(type(x) is int and x > 0 for x in block)


def grouped(
    codes: np.ndarray, scales: Any, offset: Any, fmt: formats.Format, out_dtype: Any
) -> QuantizedMatrix:
    """A matrix with groups along its last axis, from stored codes `[..., rows, groups, g]`."""
    if isinstance(scales, np.ndarray):
        scales = np.ascontiguousarray(scales)
    packed = formats.pack(codes, fmt)
    return QuantizedMatrix.from_parts(
        packed, scales, offset, dtype=fmt.name, axis=-1, out_dtype=out_dtype
    )
