"""Quantized matrices as Qwix's `QArray`, and back, with the same codes, scales and zero points.

A `QArray` (Qwix 0.1.8, which tokamax takes, too) has codes in the shape of the matrix, `qvalue`, and
scales with as many axes, each as long as an axis of the matrix or a divisor of it. Its values are
`(qvalue - zero_point) * scale`, which Qwix computes in the dtype of the scales. A `QuantizedMatrix`
computes them in float32 and rounds them once, with an offset in place of the zero point. So values are
the same to the last bit, with two exceptions: zero points with float32 scales, and nf4 with scales of
16 bits (Qwix rounds the table to the dtype of the scales first). Comparisons that decide how scales are
stored run in NumPy, as XLA takes the smallest numbers of float32 for zero.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

_UNSIGNED = ("uint2", "uint4", "uint8")
_FLOATS = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


def to_qwix(matrix: QuantizedMatrix) -> Any:
    """Returns a matrix as `qwix.QArray`; needs the package qwix.

    Args:
      matrix: in integers of 2 to 8 bits, nf4, fp4 or 8-bit floats; also mxfp8, mxfp4 and nvfp4.

    Returns:
      The array, with the same codes, scales and zero points. (Scales that are quantized themselves are
      written in the dtype of the matrix if it holds them exactly, else in float32; within `jit` always
      in float32. `activation` and `rounded_to` are left out.)

      A `QArray` has the dtype of its scales. If the matrix has another one, give it to `from_qwix`
      again: `qwix.dequantize` rounds values to the dtype of the scales, and
      `array.astype(matrix.dtype)` has the dtype of the matrix. With zero points in float32, Qwix's
      values differ by up to 2⁻²² of the range of a group, which is `(2**bits - 1) * scale`; in nf4 with
      scales of 16 bits by up to 2⁻⁷ of a value.

    Raises:
      TypeError: for another type.
      ValueError: for a format that Qwix does not have, a group in which zero has no code, or zero
        points within `jit`, which can't check their codes.
      ModuleNotFoundError: without qwix.
    """
    import qwix

    if not isinstance(matrix, QuantizedMatrix):
        raise type_error(f"matrix: expected a QuantizedMatrix, got {type(matrix).__name__}")
    fmt = formats.find(matrix.format)
    scale, offset = (_floats(x, matrix.dtype) for x in (matrix.scale, matrix.offset))
    codes = formats.unpack(matrix.codes, scale.shape[-1], fmt)
    codes = codes.reshape(*codes.shape[:-2], -1)[..., : matrix.shape[matrix.axis]]
    zero_point, from_zero = None, fmt.offset and offset is None
    if from_zero and fmt.name in _UNSIGNED:
        qtype: Any = jnp.dtype(fmt.name)
        values = codes.astype(qtype)
    elif fmt.is_integer and fmt.name[-1].isdigit() and fmt.bits >= 2 and not from_zero:
        half = 2 ** (fmt.bits - 1)
        dtype, above = jnp.int4 if fmt.bits <= 4 else jnp.int8, half if fmt.offset else 0
        values = (codes.astype(jnp.int16) - (above or int(fmt.bias))).astype(dtype)
        if offset is not None:
            zero_point = _zero_point(scale, offset, half, above).astype(dtype)
        qtype = np.dtype(dtype) if fmt.bits in (4, 8) else f"int{fmt.bits}"
    elif fmt.name == "nf4":
        values, qtype = codes.astype(jnp.uint4), "nf4"
    elif fmt.name == "fp4":
        values, qtype = (
            jax.lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.float4_e2m1fn),
            None,
        )
    elif fmt.name in _FLOATS:
        values, qtype = codes, None
    else:
        raise value_error(f"matrix: Qwix has no format for {matrix.format!r}")
    if offset is not None and zero_point is None:
        raise value_error(f"matrix: Qwix has no offsets for {matrix.format!r}")
    parts = [values, scale, zero_point]
    if matrix.axis == -2:
        parts = [None if x is None else jnp.swapaxes(x, -1, -2) for x in parts]
    return qwix.QArray(*parts, qtype=_recipe(matrix) or qtype)


def _floats(x: Array, dtype: DType) -> Any:
    """Returns scales or offsets as floating numbers of a dtype that Qwix takes; None for None."""
    if x is None or (not is_implicit(x) and x.dtype.itemsize > 1):
        return x
    wide = materialize_array(x) if is_implicit(x) else x
    wide = wide.astype(formats.arithmetic_dtype(wide.dtype))
    if isinstance(wide, jax.core.Tracer):
        return wide
    narrow = wide.astype(dtype)
    return narrow if np.array_equal(_exact(narrow), _exact(wide)) else wide


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _zero_point(scale: jax.Array, offset: jax.Array, half: int, above: int) -> jax.Array:
    """Returns the code of zero, less `above`; raises if zero has none."""
    if isinstance(scale, jax.core.Tracer):
        raise value_error(
            "matrix: zero points can't be checked within jit: call to_qwix outside of it"
        )
    wide = formats.arithmetic_dtype(scale.dtype)
    scale, offset = scale.astype(wide), offset.astype(wide)
    code = jnp.round(-offset / jnp.where(scale == 0, 1, scale))
    found = code - above
    if not bool(((-code * scale == offset) & (found >= -half) & (found < half)).all()):
        raise value_error(
            "matrix: its offsets are not whole multiples of its scales within the range of the codes, "
            "as Qwix's zero points are. Quantize hki.materialize(matrix) to symmetric integers, or "
            "with zero_point=True and float32 scales"
        )
    return found


def _recipe(matrix: QuantizedMatrix) -> str | None:
    """Returns the name of the microscaled format that a matrix has, if any."""
    own = (matrix.format, matrix.group_size - matrix.padding, matrix.scale_dtype)
    return next((name for name, recipe in formats.MICROSCALED.items() if recipe == own), None)


def from_qwix(array: Any, *, dtype: DType | None = None) -> QuantizedMatrix:
    """Returns `qwix.QArray` as a matrix, with the same codes, scales and zero points.

    Args:
      array: `[..., n, m]`, a `QArray`, or any object with its attributes.
      dtype: the dtype of the matrix, to which its values are rounded; None: the dtype of the scales.

    Returns:
      The matrix. Groups are along axis -2 if they fill whole bytes there, else along axis -1. Values
      are those of `qwix.dequantize`, except that `to_qwix` names two differences. Scales of mxfp8,
      mxfp4 and nvfp4 take 8 bits, if these hold them exactly (within `jit`, they stay as they are).
      Unsigned codes with zero points become signed codes in `to_qwix`.

    Raises:
      TypeError: for an object without these attributes, or a dtype that is not floating.
      ValueError: for a format or groups that matrices do not have.
    """
    if missing := [x for x in ("qvalue", "scale", "zero_point", "qtype") if not hasattr(array, x)]:
        raise type_error(
            f"array: expected a qwix.QArray, got {type(array).__name__}, which has no {missing[0]}"
        )
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise type_error(f"dtype: expected a floating dtype or None, got {dtype!r}")
    fmt, codes, lowest = _codes_of(array)
    shape, scale, zero_point = codes.shape, array.scale, array.zero_point
    parts = [x.shape for x in (scale, zero_point) if x is not None]
    tiles = [max(lengths) for lengths in zip(*parts, strict=False)]
    fit = all(_divides(x, shape) and _divides(x, tiles) for x in parts)
    if len(shape) < 2 or 0 in shape or not fit:
        raise value_error(
            "array: expected a matrix with elements, scales and zero points that divide it, got shapes "
            f"{list(shape)} and {', '.join(str(list(x)) for x in parts)}"
        )
    fill_bytes = [a for a in (-2, -1) if tiles[a] == 1 or shape[a] // tiles[a] % fmt.multiple == 0]
    if not fill_bytes:
        raise value_error(
            f"array: expected groups that are multiples of {fmt.multiple}, got scales "
            f"{tiles} for {list(shape)}. Quantize qwix.dequantize(array) with other groups"
        )
    # The axis along which numbers share a scale, if there is one.
    axis = min(fill_bytes, key=lambda a: 1 < tiles[a] == shape[a])
    grid = (*shape[:-2], *tiles[-2:])
    scale = _repeated(scale, grid)
    offset = None
    if zero_point is not None:
        # (Exact for scales of 16 bits, if it is not rounded to their dtype.)
        wide = formats.arithmetic_dtype(scale.dtype)
        offset = (lowest - _repeated(zero_point, grid).astype(wide)) * scale.astype(wide)
    if axis == -2:
        codes, scale = jnp.swapaxes(codes, -1, -2), jnp.swapaxes(scale, -1, -2)
        offset = None if offset is None else jnp.swapaxes(offset, -1, -2)
    groups = scale.shape[-1]
    codes = codes.reshape(*codes.shape[:-1], groups, -1)
    padding = -codes.shape[-1] % fmt.multiple
    codes = jnp.concatenate([codes, jnp.repeat(codes[..., -1:], padding, -1)], -1)
    dtype = np.dtype(scale.dtype if dtype is None else dtype)
    if recipe := formats.MICROSCALED.get(str(array.qtype)):
        scale = _microscales(scale, recipe.scale_dtype)
    packed = formats.pack(codes, fmt)
    matrix = QuantizedMatrix.from_parts(
        packed, scale, offset, dtype=fmt.name, axis=axis, padding=padding
    )
    return matrix if matrix.dtype == dtype else matrix._replace(dtype=dtype)


def _divides(parts: Sequence[int], shape: Sequence[int]) -> bool:
    return len(parts) == len(shape) and not any(
        n % max(part, 1) for part, n in zip(parts, shape, strict=True)
    )


def _repeated(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns scales or zero points with each of their numbers as often as its group is long."""
    for axis, (part, n) in enumerate(zip(x.shape, shape, strict=True)):
        x = x if part == n else jnp.repeat(x, n // part, axis)
    return x


def _microscales(scale: jax.Array, name: str) -> Array:
    """Returns scales as a microscaled format stores them; as they are, if that would change them."""
    if isinstance(scale, jax.core.Tracer):
        return scale
    exact = _exact(scale)
    if name == "e8m0":
        powers = scale.astype(jnp.float8_e8m0fnu)
        return powers if np.array_equal(_exact(powers), exact) else scale
    # Qwix has no scale of the tensor: it is 1. Here it is the largest scale of a matrix over 448, to
    # the last bit or two, as the product was rounded.
    wide = exact.astype(np.float32)
    quotient = wide.max((-2, -1), keepdims=True) / np.float32(448)
    factor, codes = np.ones_like(quotient), np.zeros(wide.shape, jnp.float8_e4m3fn)
    done = np.zeros(quotient.shape, bool)
    near = (np.nextafter(quotient, np.float32(end)) for end in (-np.inf, np.inf))
    for tried in (np.ones_like(quotient), quotient, *near):
        found = (wide / np.where(tried > 0, tried, 1)).astype(jnp.float8_e4m3fn)
        holds = (found.astype(np.float32) * tried == exact).all((-2, -1), keepdims=True) & ~done
        factor, codes = np.where(holds, tried, factor), np.where(holds, found, codes)
        done |= holds
    if not done.all():
        return scale
    return QuantizedMatrix.from_parts(
        jnp.asarray(codes), jnp.asarray(factor), dtype="fp8_e4m3", axis=-1
    )


def _codes_of(array: Any) -> tuple[formats.Format, jax.Array, int]:
    """Returns the format, the stored codes, not packed, and the code of Qwix that the lowest one is."""
    values = array.qvalue
    qtype = values.dtype if array.qtype is None else array.qtype
    name = qtype if isinstance(qtype, str) else np.dtype(qtype).name
    if name in formats.MICROSCALED:
        name = formats.MICROSCALED[name].format
    fmt = formats.find(name, "array")
    if fmt.name == "nf4":
        return fmt, values.astype(jnp.uint8), 0
    if fmt.name == "fp4":
        return fmt, jax.lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8), 0
    if fmt.is_float:
        return fmt, values, 0
    if fmt.name in _UNSIGNED:
        return fmt, values.astype(jnp.uint8), 0
    if not fmt.is_integer or fmt.offset or fmt.bits < 2:
        raise value_error(f"array: matrices have no codes for {name!r}")
    lowest = int(fmt.lowest)
    if array.zero_point is None:
        return fmt, (values.astype(jnp.int16) + int(fmt.bias)).astype(fmt.dtype), lowest
    unsigned = formats.find(f"u{fmt.name}")
    return unsigned, (values.astype(jnp.int16) - lowest).astype(unsigned.dtype), lowest
