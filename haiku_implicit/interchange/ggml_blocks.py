"""The layouts of the quantized blocks of GGUF files, to read and to write them.

`ggml-common.h` of GGML defines them. A block holds codes and a number `d`, their scale. Kinds with
offsets have a number `m`. K-quants have nested scales: codes, of which `d` is the scale, and codes of
minima, of which `m` is.
"""

import functools
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
_POWER, _SIXES = _Number("d", ml_dtypes.float8_e8m0fnu), _ScalesOfQ4K()
_codes, _scales = functools.partial(_Bits, "codes"), functools.partial(_Bits, "scales")

# The fields of a block, one after another; of codes and scales the bytes, the bits, the run, and the
# number of lower bits that are elsewhere.
KINDS: dict[str, tuple[_Field, ...]] = {
    "Q4_0": (_D, _codes(16, 4, 16)),
    "Q4_1": (_D, _M, _codes(16, 4, 16)),
    "Q5_0": (_D, _codes(4, 1, 1, 4), _codes(16, 4, 16)),
    "Q5_1": (_D, _M, _codes(4, 1, 1, 4), _codes(16, 4, 16)),
    "Q8_0": (_D, _codes(32, 8, 32)),
    "Q2_K": (_scales(16, 4, 16), _codes(64, 2, 32), _D, _MINUS_M),
    "Q3_K": (_codes(32, 1, 32, 2), _codes(64, 2, 32), _scales(8, 4, 8), _scales(4, 2, 4, 4), _D),
    "Q4_K": (_D, _MINUS_M, _SIXES, _codes(128, 4, 32)),
    "Q5_K": (_D, _MINUS_M, _SIXES, _codes(32, 1, 32, 4), _codes(128, 4, 32)),
    "Q6_K": (_codes(128, 4, 64), _codes(64, 2, 32, 4), _scales(16, 8, 16), _D),
    "IQ4_NL": (_D, _codes(16, 4, 16)),
    "IQ4_XS": (_D, _scales(2, 2, 1, 4), _scales(4, 4, 1), _codes(128, 4, 16)),
    "TQ2_0": (_codes(64, 2, 32), _D),
    "MXFP4": (_POWER, _codes(16, 4, 16)),
}


def block_size(kind: str) -> int:
    """The bytes of a block."""
    return sum(field.size for field in KINDS[kind])


def is_packed(kind: str, bits: int, group_size: int) -> bool:
    """Whether the codes in a block are packed as `quantized.numbers.formats.pack` packs them."""
    own = [field for field in KINDS[kind] if isinstance(field, _Bits) and field.holds == "codes"]
    return len(own) == 1 and (own[0].bits, own[0].run * 8) == (bits, group_size * bits)


def unpacked(kind: str, blocks: np.ndarray, codes: bool = True) -> dict[str, np.ndarray]:
    """The codes, numbers and codes of scales in blocks `[..., bytes]`, by what `KINDS` calls them.

    With `codes=False` the codes of `is_packed` blocks stay packed.
    """
    found: dict[str, np.ndarray] = {}
    ends = np.cumsum([field.size for field in KINDS[kind]])
    for field, part in zip(KINDS[kind], np.split(blocks, ends[:-1], axis=-1), strict=True):
        data, old = part.copy(), found.get(field.holds)  # JAX may use its memory: not a file's
        new = field.read(data) if codes or field.holds != "codes" else data
        found[field.holds] = new if old is None else old | new
    return found


def packed(kind: str, parts: Mapping[str, Array]) -> np.ndarray:
    """The blocks `[..., bytes]` of these parts: the inverse of `unpacked`."""
    return np.concatenate([field.write(parts[field.holds]) for field in KINDS[kind]], axis=-1)
