"""Number formats: how real values become integer codes with scales, and back.

Everything here works along the last axis, in *groups*: `g` consecutive elements that share a scale
(and an offset). A value is `scale * decode(code) + offset`.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
      name: what users call it.
      bits: the bits of one code; codes of 4 bits are stored two in a byte.
      largest: the largest code that `encode` makes (the smallest is its negative, or 0).
      bias: what is subtracted from a stored code to get its value.
      table: the value of each code, in ascending order, where that is not the code itself.
    """

    name: str
    bits: int
    largest: int
    bias: int = 0
    table: tuple[float, ...] | None = None

    @property
    def storage(self) -> Any:
        """The dtype of the stored codes."""
        return np.dtype(np.int8 if self.name == "int8" else np.uint8)

    @property
    def per_byte(self) -> int:
        """How many codes one stored element holds."""
        return 8 // self.bits


# The quantiles of a normal distribution, with an exact zero: Dettmers et al. 2023 (QLoRA,
# arXiv:2305.14314), appendix E.
NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

FORMATS = {
    f.name: f
    for f in (
        # Codes stay within ±127 and ±7, so that the negative of every value is a value as well.
        Format("int8", bits=8, largest=127),
        Format("int4", bits=4, largest=7, bias=8),  # a nibble holds code + 8, as in GGML's Q4_0
        Format("uint8", bits=8, largest=255),
        Format("uint4", bits=4, largest=15),
        Format("nf4", bits=4, largest=15, table=NF4_TABLE),
    )
}

# The format of the codes that count up from the smallest value (the offset) of a group.
_WITH_OFFSET = {"int8": FORMATS["uint8"], "int4": FORMATS["uint4"]}


def find(name: Any) -> Format:
    """The format of this name; a dtype of the same name will do.

    Raises:
      ValueError: for an unknown format.
    """
    return _find(name, FORMATS)


def _find(name: Any, allowed: Iterable[str], when: str = "") -> Format:
    key = name if isinstance(name, str) else _dtype_name(name)
    if key not in allowed:
        raise ValueError(f"dtype: expected one of {', '.join(allowed)}{when}, got {name!r}")
    return FORMATS[key]


def _dtype_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        return ""


def for_quantizing(name: Any, zero_point: bool) -> Format:
    """The format that weights are quantized to.

    Raises:
      ValueError: for a format that weights are not quantized to.
    """
    if zero_point:
        return _WITH_OFFSET[_find(name, _WITH_OFFSET, " with zero_point=True").name]
    return _find(name, ["int8", "int4", "nf4"])


def group_sizes(length: int, fmt: Format) -> list[int]:
    """The group sizes that divide an axis of this length, even where two codes share a byte."""
    return [g for g in range(fmt.per_byte, length + 1, fmt.per_byte) if length % g == 0]


# --- packing -----------------------------------------------------------------------------------


def pack(codes: jax.Array, fmt: Format) -> jax.Array:
    """Stored codes: `[..., groups, g]` to `[..., groups * g]`, or half of that for 4 bits.

    Within each group byte j holds element j in its low nibble and element j + g/2 in its high one
    (the order of GGML's blocks), so that a group unpacks into two contiguous halves.
    """
    *lead, groups, g = codes.shape
    if fmt.bits == 4:
        low, high = codes[..., : g // 2], codes[..., g // 2 :]
        codes = low | (high << 4)
    return codes.reshape(*lead, groups * (g // fmt.per_byte))


def unpack(codes: jax.Array, groups: int, fmt: Format) -> jax.Array:
    """The inverse of `pack`: `[..., groups, g]`."""
    *lead, stored = codes.shape
    codes = codes.reshape(*lead, groups, stored // groups)
    if fmt.bits == 8:
        return codes
    return jnp.concatenate([codes & 15, codes >> 4], axis=-1)


def locate(position: jax.Array, g: int, fmt: Format) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the element at a position of the axis is stored.

    Args:
      position: integers.
      g: the group size.
      fmt: the format.

    Returns:
      Of each position the index of its stored code, of its group, and by how many bits the stored
      code has to be shifted.
    """
    group, within = position // g, position % g
    if fmt.bits == 8:
        return position, group, jnp.zeros_like(position)
    half = g // 2
    return group * half + within % half, group, jnp.where(within < half, 0, 4)


# --- values ------------------------------------------------------------------------------------


def arithmetic_dtype(dtype: Any) -> Any:
    """The dtype that values are computed in: float32, or float64 where the scales are that."""
    return jnp.promote_types(dtype, jnp.float32)


def decode(codes: jax.Array, scale: jax.Array, offset: jax.Array | None, fmt: Format) -> jax.Array:
    """`scale * decode(code) + offset` for unpacked codes and operands that broadcast with them."""
    dtype = arithmetic_dtype(scale.dtype)
    if fmt.table is not None:
        table = jnp.asarray(fmt.table, dtype)
        values = table.at[codes].get(mode="promise_in_bounds")
    else:
        values = codes.astype(dtype) - fmt.bias if fmt.bias else codes.astype(dtype)
    values = values * scale.astype(dtype)
    return values if offset is None else values + offset.astype(dtype)


def dequantize(
    codes: jax.Array, scale: jax.Array, offset: jax.Array | None, fmt: Format
) -> jax.Array:
    """The values of stored codes.

    Args:
      codes: `[..., k]`, or `[..., k / 2]` for 4 bits.
      scale: `[..., groups]`, floating.
      offset: the same, or None.
      fmt: the format.

    Returns:
      `[..., k]`, in the arithmetic dtype of `scale`.
    """
    unpacked = unpack(codes, scale.shape[-1], fmt)
    offset = None if offset is None else offset[..., None]
    values = decode(unpacked, scale[..., None], offset, fmt)
    return values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])


def encode(w: jax.Array, g: int, fmt: Format) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Rounds values to the nearest codes.

    Args:
      w: `[..., k]`, floating.
      g: the group size, which divides k.
      fmt: the format; codes of the unsigned ones come with an offset.

    Returns:
      The stored codes, the scales `[..., k / g]` and the offsets (None for symmetric formats), the
      latter in the arithmetic dtype of `w`.
    """
    *lead, k = w.shape
    w = w.reshape(*lead, k // g, g).astype(arithmetic_dtype(w.dtype))
    offset = None
    if fmt.name.startswith("uint"):
        scale, offset = _scale_and_offset(w, fmt.largest)
        w = w - offset
    else:
        scale = jnp.max(jnp.abs(w), axis=-1, keepdims=True)
        scale = scale if fmt.table is not None else scale / fmt.largest
    relative = w / jnp.where(scale > 0, scale, 1)  # a group of one value alone has no scale
    codes = _nearest(relative, fmt).astype(fmt.storage)
    offset = None if offset is None else offset[..., 0]
    return pack(codes, fmt), scale[..., 0], offset


def _nearest(relative: jax.Array, fmt: Format) -> jax.Array:
    """The code nearest to each value, which is in units of its scale."""
    if fmt.table is not None:
        table = np.asarray(fmt.table)
        middles = jnp.asarray((table[1:] + table[:-1]) / 2, relative.dtype)
        return jnp.searchsorted(middles, relative)
    lowest = 0 if fmt.name.startswith("uint") else -fmt.largest
    return jnp.clip(jnp.round(relative), lowest, fmt.largest) + fmt.bias


def _scale_and_offset(w: jax.Array, largest: int) -> tuple[jax.Array, jax.Array]:
    """Scale and offset, `[..., 1]`, such that the codes 0 to `largest` span the values.

    Where zero lies among the values, it is one of the codes' values exactly: the offset is a
    multiple of the scale, whose last bits are cleared so that the multiple is exact (also where a
    compiler fuses `scale * code + offset` into one rounding).
    """
    low, high = w.min(axis=-1, keepdims=True), w.max(axis=-1, keepdims=True)
    scale = (high / 2 - low / 2) / (largest / 2)  # halves, because the difference may overflow
    info = jnp.finfo(w.dtype)
    scale = jax.lax.reduce_precision(scale, exponent_bits=info.nexp, mantissa_bits=info.nmant - 8)
    zero = jnp.round(-low / jnp.where(scale > 0, scale, 1))
    return scale, jnp.where((low <= 0) & (high >= 0), 0 - zero * scale, low)
