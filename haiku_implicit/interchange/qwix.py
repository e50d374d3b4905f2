"""Quantized matrices as Qwix's `QArray`, and back, with the same codes and scales.

A `QArray` (Qwix 0.1.8, which tokamax takes, too) has codes in the shape of the matrix, `qvalue`, and
scales with as many axes, each as long as an axis of the matrix or a divisor of it. Its values are
`(qvalue - zero_point) * scale`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

_FLOATS = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


def to_qwix(matrix: QuantizedMatrix) -> Any:
    """Returns a matrix as `qwix.QArray`; needs the package qwix.

    Args:
      matrix: in integers of 2 to 8 bits, nf4, fp4 or 8-bit floats; also mxfp8, mxfp4 and nvfp4.

    Returns:
      The array: its `dequantize` has the values of the matrix, in the dtype of the scales. (float32, if
      these are quantized themselves. An `activation` is left out.)

    Raises:
      ValueError: for a format that Qwix does not have, or a group in which zero has no code.
      ModuleNotFoundError: without qwix.
    """
    import qwix

    fmt = formats.find(matrix.format)
    scale, offset = (_floats(x) for x in (matrix.scale, matrix.offset))
    codes = formats.unpack(matrix.codes, scale.shape[-1], fmt)
    codes = codes.reshape(*codes.shape[:-2], -1)[..., : matrix.shape[matrix.axis]]
    zero_point = None
    if fmt.is_integer and fmt.name[-1].isdigit() and fmt.bits >= 2:
        half = 2 ** (fmt.bits - 1)
        dtype = jnp.int4 if fmt.bits <= 4 else jnp.int8
        values = (codes.astype(jnp.int16) - (half if fmt.offset else int(fmt.bias))).astype(dtype)
        if offset is not None:
            zero_point = _zero_point(scale, offset, half).astype(dtype)
        qtype: Any = np.dtype(dtype) if fmt.bits in (4, 8) else f"int{fmt.bits}"
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
    parts = [values, scale, zero_point]
    if matrix.axis == -2:
        parts = [None if x is None else jnp.swapaxes(x, -1, -2) for x in parts]
    return qwix.QArray(*parts, qtype=_recipe(matrix) or qtype)


def _floats(x: Array) -> Any:
    """Returns scales or offsets as floating numbers of a dtype that Qwix takes; None for None."""
    x = materialize_array(x) if is_implicit(x) else x
    return x if x is None or x.dtype.itemsize > 1 else x.astype(jnp.float32)


def _zero_point(scale: jax.Array, offset: jax.Array, half: int) -> jax.Array:
    """Returns the code of zero; raises if zero has none."""
    found = jnp.round(-offset / jnp.where(scale == 0, 1, scale)) - half
    held = (-half - found) * scale
    fits = (jnp.abs(held - offset) <= 1e-6 * jnp.abs(offset)) & (found >= -half) & (found < half)
    if not bool(fits.all()):
        raise value_error(
            "matrix: its offsets are not whole multiples of its scales within the range of the codes, "
            "as Qwix's zero points are"
        )
    return found


def _recipe(matrix: QuantizedMatrix) -> str | None:
    """Returns the name of the microscaled format that a matrix has, if any."""
    own = (matrix.format, matrix.group_size - matrix.padding, matrix.scale_dtype)
    return next((name for name, recipe in formats.MICROSCALED.items() if recipe == own), None)


def from_qwix(array: Any) -> QuantizedMatrix:
    """Returns `qwix.QArray` as a matrix, with the same codes, scales and values.

    Args:
      array: `[..., n, m]`, a `QArray`, or any object with its attributes.

    Returns:
      The matrix, of the dtype of the scales. Groups are along axis -2 if they fill whole bytes there,
      else along axis -1.

    Raises:
      ValueError: for a format or groups that matrices do not have.
    """
    fmt, codes = _codes_of(array)
    shape, scale = codes.shape, array.scale
    lead = (*shape[:-2], *scale.shape[-2:])
    if len(shape) < 2 or any(n % s for n, s in zip(shape, scale.shape, strict=True)):
        raise value_error(f"array: expected a matrix with scales that divide it, got {list(shape)}")
    axis = next((a for a in (-2, -1) if _fills_bytes(fmt, shape[a], scale.shape[a])), None)
    if axis is None:
        raise value_error(
            f"array: expected groups that are multiples of {fmt.multiple}, got scales "
            f"{list(scale.shape)} for {list(shape)}"
        )
    scale = jnp.broadcast_to(scale, lead)
    offset = None
    if array.zero_point is not None:
        zero_point = jnp.broadcast_to(array.zero_point, lead).astype(scale.dtype)
        offset = (-(2.0 ** (fmt.bits - 1)) - zero_point) * scale
    if axis == -2:
        codes, scale = jnp.swapaxes(codes, -1, -2), jnp.swapaxes(scale, -1, -2)
        offset = None if offset is None else jnp.swapaxes(offset, -1, -2)
    groups = scale.shape[-1]
    codes = codes.reshape(*codes.shape[:-1], groups, -1)
    padding = -codes.shape[-1] % fmt.multiple
    codes = jnp.concatenate([codes, jnp.repeat(codes[..., -1:], padding, -1)], -1)
    dtype, recipe = scale.dtype, formats.MICROSCALED.get(str(array.qtype))
    if recipe and recipe.scale_dtype == "e8m0":
        scale = scale.astype(jnp.float8_e8m0fnu)
    packed = formats.pack(codes, fmt)
    return QuantizedMatrix.from_parts(
        packed, scale, offset, dtype=fmt.name, axis=axis, padding=padding, out_dtype=dtype
    )


def _codes_of(array: Any) -> tuple[formats.Format, jax.Array]:
    """Returns the format and the stored codes, not packed."""
    name, values = (
        str(np.dtype(array.qtype) if _is_dtype(array.qtype) else array.qtype),
        array.qvalue,
    )
    if name in formats.MICROSCALED:
        name = formats.MICROSCALED[name].format
    fmt = formats.find(name, "array")
    if fmt.name == "nf4":
        return fmt, values.astype(jnp.uint8)
    if fmt.name == "fp4":
        return fmt, jax.lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.uint8)
    if fmt.is_float:
        return fmt, values
    if not fmt.is_integer or fmt.offset or fmt.bits < 2:
        raise value_error(f"array: matrices have no codes for {name!r}")
    if array.zero_point is None:
        return fmt, (values.astype(jnp.int16) + int(fmt.bias)).astype(fmt.dtype)
    unsigned = formats.find(f"u{fmt.name}")
    return unsigned, (values.astype(jnp.int16) + 2 ** (fmt.bits - 1)).astype(unsigned.dtype)


def _is_dtype(qtype: Any) -> bool:
    return not isinstance(qtype, str)


def _fills_bytes(fmt: formats.Format, length: int, groups: int) -> bool:
    return groups == 1 or length // groups % fmt.multiple == 0 and groups < length
