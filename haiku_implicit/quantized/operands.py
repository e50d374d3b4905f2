"""Operands of products: arrays that are quantized for one product, with scales for its channels.

A `QuantizedMatrix` is made for storage. Operands are not packed: integer codes are int8, which hardware
can multiply. Scales are the ones of Qwix, and `ranges` says how they differ from the scales of stored
matrices. With a zero point the codes span the whole type.
"""

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.messages import see, value_error
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats, ranges
from haiku_implicit.quantized.numbers.extremes import largest
from haiku_implicit.quantized.numbers.options import OperandConfig
from haiku_implicit.quantized.numbers.ranges import Limits, ScaledAxes


class QuantizedOperand(NamedTuple):
    """A quantized array: `(codes - zero_point) * scale`.

    Attributes:
      codes: int8, uint8 or a float8 dtype; for formats whose codes are not numbers (nf4), the values
        that the codes stand for.
      scale: with the axes of `codes`, each of length 1, of the same length, or of a divisor of it
        (tiles); None for a scale of 1. float32, or float64 for float64 arrays.
      zero_point: with the shape of `scale`, floating; or None.
      inside: a mask of the elements within the range of the calibration; None if all are.
    """

    codes: jax.Array
    scale: jax.Array | None
    zero_point: jax.Array | None = None
    inside: jax.Array | None = None

    @property
    def multiplies(self) -> bool:
        """Whether a product of the codes is one of the values, up to the scale."""
        return self.zero_point is None and self.codes.dtype.itemsize == 1

    @property
    def wide(self) -> Array:
        """The dtype to compute the values in."""
        like = self.codes.dtype if self.scale is None else self.scale.dtype
        return formats.arithmetic_dtype(like)


def quantize(
    x: jax.Array,
    config: OperandConfig,
    axes: ScaledAxes,
    key: jax.Array | None = None,
    limits: Limits | None = None,
) -> QuantizedOperand:
    """Quantizes an array to the nearest codes; with stochastic rounding, to one of the two nearest.

    Args:
      x: floating.
      config: how it is quantized.
      axes: the axes along which scales differ.
      key: a random key, for stochastic rounding.
      limits: the range of each scale, if it is known; None: the range of the array. Values beyond it
        get the last code; an infinite or NaN element makes all elements that share its scale NaN.

    Raises:
      ValueError: for a tile that does not divide its axis, or a calibration that the format does not
        have.
    """
    fmt, clips = config.format, ranges.clips(config)
    x = x.astype(formats.arithmetic_dtype(x.dtype))
    low, high = ranges.of_operand(x, config, axes) if limits is None else limits
    if limits is not None or clips:  # else the range already shows such elements
        low, high = ranges.tainted(x, config, axes, (low, high))
    if low is None:
        bound = fmt.largest + 0.5 if fmt.is_integer else fmt.largest  # see `ranges`
        scale, zero_point = _nonzero(high * np.asarray(1 / bound, high.dtype)), None
        scale = _microscaled(scale, config, axes)
    else:
        scale, zero_point = _asymmetric(low, high, fmt)
    # The largest magnitude is a tie between two codes. The barriers make every compiled program take
    # the same reciprocal, so that the tie goes the same way in all of them.
    inverse = jax.lax.optimization_barrier(1 / jax.lax.optimization_barrier(scale))
    relative = x * expand(inverse, x.shape)
    if zero_point is not None:
        relative = relative + expand(zero_point, x.shape)
    if config.stochastic_rounding is not None:
        added = noise(key, config.stochastic_rounding, config.channelwise_noise_axes, x.shape)
        relative = relative + added.astype(x.dtype)
    inside = None
    if clips:
        inside = (x <= expand(high, x.shape)) & (
            x >= expand(-high if low is None else low, x.shape)
        )
    return QuantizedOperand(_codes(relative, fmt), scale, zero_point, inside)


def stored_operand(q: Array) -> QuantizedOperand:
    """Unpacks a stored matrix as an operand: as codes if these are numbers that need only a scale."""
    if not isinstance(q, QuantizedMatrix):  # trellis codes
        return QuantizedOperand(q.materialize(), None)
    fmt = formats.find(q.format)
    whole = fmt.is_integer and fmt.bias == int(fmt.bias) and fmt.largest < 128  # (int8)
    plain = q.offset is None and q.rounded_to is None and not is_implicit(q.scale)
    if not plain or not (whole or fmt.is_float):
        return QuantizedOperand(q.with_row_scales().materialize(), None)
    groups, rows = q.scale.shape[-1], q.codes.shape[-2]
    codes = formats.unpack(q.codes, groups, fmt)
    codes = codes.reshape(*codes.shape[:-2], -1)[..., : q.shape[q.axis]]
    if whole:
        codes = (codes.astype(jnp.int16) - int(fmt.bias)).astype(jnp.int8)
    scale = formats.by_rows(q.scale.astype(formats.arithmetic_dtype(q.scale.dtype)), rows)
    if q.axis == -2:
        codes, scale = jnp.swapaxes(codes, -1, -2), jnp.swapaxes(scale, -1, -2)
    return QuantizedOperand(codes, scale)


def stored_matrix(x: QuantizedOperand, qtype: str, dtype: DType) -> QuantizedMatrix:
    """Returns the matrix that stores an operand, grouped along axis -2: inverse of `stored_operand`.

    Args:
      x: `[..., k, m]`; its scales are shared along the axis `k`, or along tiles of it.
      qtype: the format that it was quantized to.
      dtype: the dtype of the matrix.

    Raises:
      ValueError: for tiles that do not fill whole bytes.
    """
    recipe = formats.RECIPES.get(qtype)
    fmt, codes, offset = _storage(x, formats.find(recipe.format if recipe else qtype))
    columns = (*codes.shape[:-2], codes.shape[-1])

    def by_column(scale: Array) -> jax.Array:
        return jnp.broadcast_to(jnp.swapaxes(scale, -1, -2), (*columns, scale.shape[-2]))

    scale = by_column(x.scale)
    groups = scale.shape[-1]
    codes = jnp.swapaxes(codes, -1, -2).reshape(*columns, groups, -1)
    padding = -codes.shape[-1] % fmt.multiple
    if padding and groups > 1:
        raise value_error(
            f"tile_size: expected a multiple of {fmt.multiple} for stored codes of {fmt.name!r}, got "
            f"{codes.shape[-1]}"
        )
    codes = jnp.concatenate([codes, jnp.repeat(codes[..., -1:], padding, -1)], axis=-1)
    offset = None if offset is None else by_column(offset)
    if recipe:  # exact: they are powers of two, or have four digits
        scale = scale.astype(jnp.float8_e8m0fnu if recipe.scale_dtype == "e8m0" else jnp.bfloat16)
    matrix = QuantizedMatrix(formats.pack(codes, fmt), scale, offset, fmt.name, padding=padding)
    return matrix if matrix.dtype == dtype else matrix._replace(dtype=dtype)


def _storage(
    x: QuantizedOperand, fmt: formats.Format
) -> tuple[formats.Format, jax.Array, jax.Array | None]:
    """Returns the format, the unpacked codes and the offset (if any) that store an operand's values."""
    if not fmt.is_integer:
        return fmt, x.codes if fmt.is_float else formats.nearest(x.codes, fmt), None
    codes = x.codes.astype(jnp.int16)
    if x.scale is None or (x.zero_point is None and not fmt.offset):
        return fmt, (codes + int(fmt.bias)).astype(fmt.dtype), None
    unsigned = fmt if fmt.offset else formats.find(f"u{fmt.name}")
    zero_point = 0 if x.zero_point is None else x.zero_point
    offset = (fmt.lowest - zero_point) * x.scale
    return unsigned, (codes - int(fmt.lowest)).astype(unsigned.dtype), offset


def dequantize(x: QuantizedOperand, dtype: DType) -> jax.Array:
    """Returns the values of an operand, in a dtype."""
    values = x.codes.astype(x.wide)
    if x.zero_point is not None:
        values = values - expand(x.zero_point, values.shape)
    if x.scale is not None:
        values = values * expand(x.scale, values.shape)
    return values.astype(dtype)


def quantize_rows(x: jax.Array, q: QuantizedMatrix) -> QuantizedOperand:
    """Quantizes activations for the product with a matrix, by its `activation`.

    Args:
      x: `[..., i]`, floating.
      q: `[..., i, o]`. With 'groups' in its `activation`, each part of a row of `x` that meets a group
        of `q` has a scale.
    """
    last = x.ndim - 1
    config = q.activation_config
    tiled = last if config.recipe or (q.axis == -2 and q.num_groups > 1) else None
    return quantize(x, config, ScaledAxes(tuple(range(last)), tiled))


def rounded_rows(x: jax.Array, q: QuantizedMatrix) -> jax.Array:
    """Returns the values of `quantize_rows`, in float32 (or float64).

    Args:
      x, q: as for `quantize_rows`.
    """
    return dequantize(quantize_rows(x, q), formats.arithmetic_dtype(x.dtype))


def expand(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats a scale for the elements of each tile; axes of length one stay so."""
    for axis, (have, want) in enumerate(zip(scale.shape, shape, strict=True)):
        if have not in (1, want):
            scale = formats.repeated(scale, want // have, axis)
    return scale


def _asymmetric(
    low: jax.Array, high: jax.Array, fmt: formats.Format
) -> tuple[jax.Array, jax.Array]:
    if not fmt.is_integer:
        raise value_error(
            "calibration method: 'minmax' and ranges that are not symmetric need an integer format, "
            f"got {fmt.name!r}; use 'absmax'"
        )
    scale = _nonzero((high - low) / (fmt.largest - fmt.lowest))
    zero_point = jnp.clip(jnp.round(fmt.lowest - low / scale), fmt.lowest, fmt.largest)
    return scale, zero_point


def _nonzero(scale: jax.Array) -> jax.Array:
    """Raises scales, zeros above all, to the smallest number that is safe to divide by.

    (For the codes of zeros a scale of one would do. But gradients are multiplied by scales before they
    are quantized, and then the gradients of a channel of zeros would be by far the largest.)
    """
    return jnp.maximum(scale, np.sqrt(jnp.finfo(scale.dtype).tiny))


def _microscaled(scale: jax.Array, config: OperandConfig, axes: ScaledAxes) -> jax.Array:
    """Rounds the scales of a microscaled format; the others stay.

    Powers of two are rounded up, so that no value saturates. Scales in e4m3 have a power of two for
    each channel as a factor, which makes the largest scale of the channel one of e4m3's largest
    numbers. Without it, small scales would become zero; normal numbers of e4m3 do not change by it.
    """
    if config.recipe is None:
        return scale
    if config.recipe.scale_dtype == "e8m0":
        rounded = _power_of_two(scale)
    else:
        unit = e4m3_unit(scale, [i for i in range(scale.ndim) if i not in axes.channels])
        codes = formats.nearest(scale / unit, formats.FORMATS["fp8_e4m3"])
        smallest = float(jnp.finfo(codes.dtype).smallest_subnormal)
        rounded = jnp.maximum(codes.astype(scale.dtype), smallest) * unit
    return jnp.where(jnp.isfinite(scale), rounded, scale)


def e4m3_unit(scale: jax.Array, axes: Collection[int]) -> jax.Array:
    """Returns the power of two that makes the largest scale a number from 224 to 448, over some axes.

    Args:
      scale: positive.
      axes: the axes to take the largest over; they stay, with length one.
    """
    most = formats.FORMATS["fp8_e4m3"].largest
    return _power_of_two(largest(scale, tuple(axes), keepdims=True) / most)


def _power_of_two(x: jax.Array) -> jax.Array:
    """Returns the least power of two that is not below a positive number."""
    digits, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ones_like(x), jnp.where(digits == 0.5, exponent - 1, exponent))


# --- codes ---------------------------------------------------------------------------------------


def _codes(relative: jax.Array, fmt: formats.Format) -> jax.Array:
    if fmt.is_integer:
        dtype = jnp.int8 if fmt.largest < 128 else jnp.uint8
        return jnp.clip(jnp.round(relative), fmt.lowest, fmt.largest).astype(dtype)
    codes = formats.nearest(relative, fmt)
    return codes if fmt.is_float else formats.decode(codes, relative.dtype, fmt)


def noise(
    key: jax.Array | None, method: str, axes: Collection[int], shape: tuple[int, ...]
) -> jax.Array:
    """Returns noise between -0.5 and 0.5, which makes rounding stochastic and unbiased.

    Args:
      key: a random key.
      method: 'uniform', or 'low_bit_uniform': 256 values, symmetric about zero.
      axes: the axes along which it differs; along the others it is the same.
      shape: the shape of the array to round.

    Returns:
      float32, with the axes of the array, of length one except `axes`.
    """
    if key is None:
        raise ValueError(
            "bwd_stochastic_rounding: it needs a random key in each step; give key= to the function, "
            "or put keys on the weights with with_rounding_key(params, key) within the loss, "
            "differentiated by jax.value_and_grad (hki.value_and_grad calls it with ordinary arrays)"
            f" {see('ordinary-arrays-inside')}"
        )
    own = tuple(size if i in axes else 1 for i, size in enumerate(shape))
    if method == "uniform":
        return jax.random.uniform(key, own, jnp.float32, -0.5, 0.5)
    bits = jax.random.bits(key, own, jnp.uint8)
    return (bits.astype(jnp.float32) + 0.5) / 256 - 0.5
