"""Unpacks codes of a few bits that are packed across the bytes of integers."""

import sys

import numpy as np


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks the codes in rows of integers: each row is one run of bits, lowest bits first.

    Args:
      words: integers `[..., n]` of `w` bits.
      bits: the bits of a code, up to 8.

    Returns:
      Codes `[..., n * w / bits]` uint8.

    Example:
      >>> import numpy as np
      >>> unpacked(np.array([[0x87654321]], np.uint32), 4).tolist()
      [[1, 2, 3, 4, 5, 6, 7, 8]]
    """
    words = np.ascontiguousarray(words)
    data = (words.byteswap() if sys.byteorder == "big" else words).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = data[..., None] >> shifts & np.uint8(2**bits - 1)
        return codes.reshape(*data.shape[:-1], -1)
    ones = np.unpackbits(data, axis=-1, bitorder="little")  # a code may span two bytes
    ones = ones.reshape(*data.shape[:-1], -1, bits)
    return np.bitwise_or.reduce(ones << np.arange(bits, dtype=np.uint8), axis=-1)
