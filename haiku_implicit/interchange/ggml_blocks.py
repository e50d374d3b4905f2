"""The layouts of the quantized blocks of GGUF files, to read and to write them.

`ggml-common.h` of GGML defines them. A block holds codes and a number `d`, their scale. Kinds with
offsets have a number `m`. K-quants have nested scales: codes, of which `d` is the scale, and codes of
minima, of which `m` is.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from haiku_implicit.core.typing import Array
from haiku_implicit.interchange import runs_of_bits


class _Number(NamedTuple):
    """A field of one floating number in each block, with this factor."""

    holds: str
    dtype: Any = "<f2"
    factor: int = 1

    @property
    def size(self) -> int:
        return np.dtype(self.dtype).itemsize

    def read(self, data: np.ndarray) -> np.ndarray:
        x = data.view(self.dtype)[..., 0]
        return x if self.factor == 1 else -x

    def write(self, x: Array) -> np.ndarray:
        x = np.asarray(x if self.factor == 1 else -x)
        return x.astype(self.dtype)[..., None].view(np.uint8)


class _Bits(NamedTuple):
    """A field with a few bits of each code: `run` bytes hold 8 / bits runs, the first lowest.

    Attributes:
      holds: 'codes', or 'scales' for the codes of scales and, after them, those of minima.
      size: the bytes of the field.
      bits: the number of bits of each code in it.
      run: the number of codes that follow each other in neighboring bytes.
      below: the number of lower bits of each code, which another field has.
    """

    holds: str
    size: int
    bits: int
    run: int
    below: int = 0

    def read(self, data: np.ndarray) -> np.ndarray:
        return runs_of_bits.unpacked(data, self.bits, self.run) << np.uint8(self.below)

    def write(self, codes: np.ndarray) -> np.ndarray:
        return runs_of_bits.packed(codes >> self.below, self.bits, self.run)


class _ScalesOfQ4K(NamedTuple):
    """A field with 6-bit scales and minima of 8 groups.

    The low 6 bits of bytes 0 to 3 are the first four scales, of bytes 4 to 7 the first four minima.
    Bytes 8 to 11 have the low 4 bits of the other scales (low half) and minima (high half), whose high
    2 bits are the top bits of bytes 0 to 7.
    """

    holds: str = "scales"
    size: int = 12

    def read(self, data: np.ndarray) -> np.ndarray:
        first, second, third = np.split(data, 3, axis=-1)
        scales = first & 63, third & 15 | first >> 6 << 4
        return np.concatenate([*scales, second & 63, third >> 4 | second >> 6 << 4], axis=-1)

    def write(self, codes: np.ndarray) -> np.ndarray:
        scale, high, minimum, high_minimum = np.split(codes, 4, axis=-1)
        first, second = scale | high >> 4 << 6, minimum | high_minimum >> 4 << 6
        return np.concatenate([first, second, high & 15 | (high_minimum & 15) << 4], axis=-1)


_Field = _Number | _Bits | _ScalesOfQ4K
_D, _M, _MINUS_M = _Number("d"), _Number("m"), _Number("m", factor=-1)
_FOURS = _Bits("codes", 16, bits=4, run=16)
_FIFTHS = _Bits("codes", 4, bits=1, run=1, below=4)
_TWOS_OF_256, _FOURS_OF_256 = (
    _Bits("codes", 64, bits=2, run=32),
    _Bits("codes", 128, bits=4, run=32),
)

# The fields of a block, one after another.
KINDS: dict[str, tuple[_Field, ...]] = {
    "Q4_0": (_D, _FOURS),
    "Q4_1": (_D, _M, _FOURS),
    "Q5_0": (_D, _FIFTHS, _FOURS),
    "Q5_1": (_D, _M, _FIFTHS, _FOURS),
    "Q8_0": (_D, _Bits("codes", 32, bits=8, run=32)),
    "Q2_K": (_Bits("scales", 16, bits=4, run=16), _TWOS_OF_256, _D, _MINUS_M),
    "Q3_K": (
        _Bits("codes", 32, bits=1, run=32, below=2),
        _TWOS_OF_256,
        _Bits("scales", 8, bits=4, run=8),
        _Bits("scales", 4, bits=2, run=4, below=4),
        _D,
    ),
    "Q4_K": (_D, _MINUS_M, _ScalesOfQ4K(), _FOURS_OF_256),
    "Q5_K": (
        *(_D, _MINUS_M, _ScalesOfQ4K()),
        _Bits("codes", 32, bits=1, run=32, below=4),
        _FOURS_OF_256,
    ),
    "Q6_K": (
        _Bits("codes", 128, bits=4, run=64),
        _Bits("codes", 64, bits=2, run=32, below=4),
        _Bits("scales", 16, bits=8, run=16),
        _D,
    ),
    "IQ4_NL": (_D, _FOURS),
    "IQ4_XS": (
        _D,
        _Bits("scales", 2, bits=2, run=1, below=4),
        _Bits("scales", 4, bits=4, run=1),
        _Bits("codes", 128, bits=4, run=16),
    ),
    "TQ2_0": (_TWOS_OF_256, _D),
    "MXFP4": (_Number("d", ml_dtypes.float8_e8m0fnu), _FOURS),
}


def block_size(kind: str) -> int:
    """The bytes of a block."""
    return sum(field.size for field in KINDS[kind])


def unpacked(kind: str, blocks: np.ndarray) -> dict[str, np.ndarray]:
    """The codes, numbers and codes of scales in blocks `[..., bytes]`, by what `KINDS` calls them."""
    found: dict[str, np.ndarray] = {}
    ends = np.cumsum([field.size for field in KINDS[kind]])
    for field, data in zip(KINDS[kind], np.split(blocks, ends[:-1], axis=-1), strict=True):
        new, old = field.read(np.ascontiguousarray(data)), found.get(field.holds)
        found[field.holds] = new if old is None else old | new
    return found


def packed(kind: str, parts: Mapping[str, Array]) -> np.ndarray:
    """The blocks `[..., bytes]` of these parts: the inverse of `unpacked`."""
    return np.concatenate([field.write(parts[field.holds]) for field in KINDS[kind]], axis=-1)
