"""Reads the quantized blocks of GGUF files, without requantizing them.

`ggml-common.h` of GGML defines the formats. Their bits are kept; codes are reordered if their order
within a block differs from `formats.pack`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats


def from_ggml(
    data: np.ndarray, kind: Any, *, axis: int = -2, dtype: DType = jnp.float32
) -> QuantizedMatrix:
    """Reads a quantized weight from the blocks of a GGUF file.

    Args:
      data: `[..., rows, bytes]` uint8: the blocks of each row, one after another, as in
        `gguf.GGUFReader`.
      kind: 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0', 'Q2_K', 'Q3_K', 'Q4_K', 'Q5_K', 'Q6_K', 'IQ4_NL',
        'IQ4_XS', 'TQ2_0' or 'MXFP4', or an object with such a `name` (`gguf.GGMLQuantizationType`).
      axis: the axis of the weight within rows: -2 for Haiku's weights `[in, out]`, which are rows
        `[out, in]` in the file; -1 for `[rows, elements]` (an embedding).
      dtype: the dtype of the weight's values.

    Returns:
      A quantized weight with as many bytes, and groups along `axis`.

    Raises:
      ValueError: for another kind, or bytes that are not whole blocks.

    Example:
      >>> import numpy as np
      >>> import haiku_implicit as hki
      >>> block = np.array([[0.5], [1.0]], np.float16).view(np.uint8)  # scale and minimum
      >>> data = np.concatenate([block.ravel(), np.full(16, 0x21, np.uint8)])[None]
      >>> w = hki.from_ggml(data, 'Q4_1', axis=-1)
      >>> w.shape, w.nbytes, w.materialize()[0, ::16].tolist()
      ((1, 32), 20, [1.5, 2.0])
    """
    name = kind if isinstance(kind, str) else getattr(kind, "name", kind)
    if name not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    sizes, read = KINDS[name]
    data = np.asarray(data)
    if data.dtype != np.uint8 or data.ndim < 2 or data.shape[-1] % sum(sizes) or not data.size:
        raise ValueError(
            f"data: expected uint8[..., rows, bytes] in whole blocks of {sum(sizes)} bytes for "
            f"{name!r}, got {data.dtype}{list(data.shape)}"
        )
    blocks = data.reshape(*data.shape[:-1], -1, sum(sizes))
    fields = np.split(blocks, np.cumsum(sizes)[:-1], axis=-1)
    parts = read(*map(np.ascontiguousarray, fields))
    groups = parts.codes.reshape(*parts.scale.shape, -1)
    codes = formats.pack(jnp.asarray(groups), formats.FORMATS[parts.format])
    return QuantizedMatrix.from_parts(
        codes, parts.scale, parts.offset, dtype=parts.format, axis=axis, out_dtype=dtype
    )


class _Parts(NamedTuple):
    """Codes `[..., rows, blocks, elements]`, scales and offsets `[..., rows, groups]`, the format."""

    codes: np.ndarray
    scale: Array
    offset: Array
    format: str


def _q4_0(d: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * (code - 8)`"""
    return _Parts(_unpacked(qs, 4, 16), _halves(d), None, "int4")


def _q4_1(d: np.ndarray, m: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * code + m`"""
    return _Parts(_unpacked(qs, 4, 16), _halves(d), _halves(m), "uint4")


def _q5_0(d: np.ndarray, qh: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * (code - 16)`, with the fifth bits of all codes in one 32-bit number."""
    codes = _unpacked(qs, 4, 16) | _unpacked(qh, 1, 1) << 4
    return _Parts(codes, _halves(d), None, "int5")


def _q5_1(d: np.ndarray, m: np.ndarray, qh: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * code + m`"""
    return _q5_0(d, qh, qs)._replace(offset=_halves(m), format="uint5")


def _q8_0(d: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * code`"""
    return _Parts(qs.view(np.int8), _halves(d), None, "int8")


def _q2_k(scales: np.ndarray, qs: np.ndarray, d: np.ndarray, dmin: np.ndarray) -> _Parts:
    """`d * scale * code - dmin * minimum`, with 4-bit scales and minima for 16 groups of 16."""
    scale = _nested(scales & 15, d, "uint4")
    minimum = _nested(scales >> 4, -dmin.view("<f2"), "uint4")
    return _Parts(_unpacked(qs, 2, 32), scale, minimum, "uint2")


def _q3_k(hmask: np.ndarray, qs: np.ndarray, scales: np.ndarray, d: np.ndarray) -> _Parts:
    """`d * (scale - 32) * (code - 4)`, with 6-bit scales for 16 groups of 16."""
    codes = _unpacked(qs, 2, 32) | _unpacked(hmask, 1, 32) << 2
    scale = _unpacked(scales[..., :8], 4, 8) | _unpacked(scales[..., 8:], 2, 4) << 4
    return _Parts(codes, _nested(scale, d, "int6"), None, "int3")


def _q4_k(d: np.ndarray, dmin: np.ndarray, scales: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * scale * code - dmin * minimum`, with 6-bit scales and minima for 8 groups of 32.

    The low 6 bits of bytes 0 to 3 are the first four scales, of bytes 4 to 7 the first four minima.
    Bytes 8 to 11 have the low 4 bits of the other scales (low half) and minima (high half), whose high
    2 bits are the top bits of bytes 0 to 7.
    """
    first, second, third = np.split(scales, 3, axis=-1)
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    offset = _nested(minimum, -dmin.view("<f2"), "uint6")
    return _Parts(_unpacked(qs, 4, 32), _nested(scale, d, "uint6"), offset, "uint4")


def _q5_k(
    d: np.ndarray, dmin: np.ndarray, scales: np.ndarray, qh: np.ndarray, qs: np.ndarray
) -> _Parts:
    """`d * scale * code - dmin * minimum`, as Q4_K, with a fifth bit in each code."""
    parts = _q4_k(d, dmin, scales, qs)
    return parts._replace(codes=parts.codes | _unpacked(qh, 1, 32) << 4, format="uint5")


def _q6_k(ql: np.ndarray, qh: np.ndarray, scales: np.ndarray, d: np.ndarray) -> _Parts:
    """`d * scale * (code - 32)`, with 8-bit scales for 16 groups of 16."""
    codes = _unpacked(ql, 4, 64) | _unpacked(qh, 2, 32) << 4
    return _Parts(codes, _nested(scales.view(np.int8), d, "int8"), None, "int6")


def _iq4_nl(d: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * table[code]`"""
    return _Parts(_unpacked(qs, 4, 16), _halves(d), None, "iq4_nl")


def _iq4_xs(d: np.ndarray, high: np.ndarray, low: np.ndarray, qs: np.ndarray) -> _Parts:
    """`d * (scale - 32) * table[code]`, with 6-bit scales for 8 groups of 32."""
    scale = _unpacked(low, 4, 1) | _unpacked(high, 2, 1) << 4
    return _Parts(_unpacked(qs, 4, 16), _nested(scale, d, "int6"), None, "iq4_nl")


def _tq2_0(qs: np.ndarray, d: np.ndarray) -> _Parts:
    """`d * (code - 1)`"""
    return _Parts(_unpacked(qs, 2, 32), _halves(d), None, "ternary")


def _mxfp4(e: np.ndarray, qs: np.ndarray) -> _Parts:
    """`2^(e - 127) * table[code]`"""
    return _Parts(_unpacked(qs, 4, 16), e.view(jnp.float8_e8m0fnu)[..., 0], None, "fp4")


def _unpacked(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Unpacks numbers of a few bits: `run` bytes hold 8 / bits runs, the first in the lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = data.reshape(*data.shape[:-1], -1, 1, run) >> shifts & (2**bits - 1)
    return runs.reshape(*data.shape[:-1], -1)


def _halves(d: np.ndarray) -> np.ndarray:
    return d.view("<f2")[..., 0]


def _nested(codes: np.ndarray, d: np.ndarray, name: str) -> QuantizedMatrix:
    """The scales of groups `[..., rows, blocks, n]` as codes with a scale for each block."""
    packed = formats.pack(jnp.asarray(codes), formats.FORMATS[name])
    return QuantizedMatrix.from_parts(
        packed, _halves(d), dtype=name, axis=-1, out_dtype=jnp.float32
    )


# The sizes of a block's fields in bytes, and the function that converts them to parts.
KINDS: dict[str, tuple[tuple[int, ...], Callable[..., _Parts]]] = {
    "Q4_0": ((2, 16), _q4_0),
    "Q4_1": ((2, 2, 16), _q4_1),
    "Q5_0": ((2, 4, 16), _q5_0),
    "Q5_1": ((2, 2, 4, 16), _q5_1),
    "Q8_0": ((2, 32), _q8_0),
    "Q2_K": ((16, 64, 2, 2), _q2_k),
    "Q3_K": ((32, 64, 12, 2), _q3_k),
    "Q4_K": ((2, 2, 12, 128), _q4_k),
    "Q5_K": ((2, 2, 12, 32, 128), _q5_k),
    "Q6_K": ((128, 64, 16, 2), _q6_k),
    "IQ4_NL": ((2, 16), _iq4_nl),
    "IQ4_XS": ((2, 2, 4, 128), _iq4_xs),
    "TQ2_0": ((64, 2), _tq2_0),
    "MXFP4": ((1, 16), _mxfp4),
}
