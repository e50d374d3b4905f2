"""Unpacks codes of a few bits that are packed into integers, and packs them into bytes."""

import sys

import numpy as np


def unpacked(words: np.ndarray, bits: int, run: int = 1) -> np.ndarray:
    """Unpacks the codes in rows of integers: each row is one run of bits, lowest bits first.

    Args:
      words: integers `[..., n]` of `w` bits.
      bits: the bits of a code, up to 8.
      run: the number of codes that follow each other in neighboring bytes, if 8 bits hold whole codes:
        this many bytes hold 8 / bits runs of codes, the first in the lowest bits.

    Returns:
      Codes `[..., n * w / bits]` uint8.

    Example:
      >>> import numpy as np
      >>> unpacked(np.array([[0x87654321]], np.uint32), 4).tolist()
      [[1, 2, 3, 4, 5, 6, 7, 8]]
      >>> unpacked(np.array([0x21, 0x43], np.uint8), 4, run=2).tolist()
      [1, 3, 2, 4]
    """
    words = np.ascontiguousarray(words)
    data = (words.byteswap() if sys.byteorder == "big" else words).view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits == 0:
        runs = data.reshape(*data.shape[:-1], -1, 1, run)
        codes = runs >> _shifts(bits) & np.uint8(2**bits - 1)
        return codes.reshape(*data.shape[:-1], -1)
    ones = np.unpackbits(data, axis=-1, bitorder="little")  # a code may span two bytes
    ones = ones.reshape(*data.shape[:-1], -1, bits)
    return np.bitwise_or.reduce(ones << np.arange(bits, dtype=np.uint8), axis=-1)


def packed(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Packs the lowest bits of codes `[..., n]` into bytes: inverts `unpacked` of bytes.

    >>> packed(np.array([1, 3, 2, 4], np.uint8), 4, run=2).tolist()
    [33, 67]
    """
    if bits == 8:
        return codes.astype(np.uint8, copy=False)
    low = codes.astype(np.uint8) & np.uint8(2**bits - 1)
    runs = low.reshape(*low.shape[:-1], -1, 8 // bits, run) << _shifts(bits)
    return np.bitwise_or.reduce(runs, axis=-2).reshape(*low.shape[:-1], -1)


def _shifts(bits: int) -> np.ndarray:
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]
