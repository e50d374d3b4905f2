"""How scales and offsets are stored: as floating numbers, or quantized themselves."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit._array import is_implicit
from haiku_implicit.quantization.calibration import Scales
from haiku_implicit.quantization.formats import Format

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_NAMES = (*_FLOATS, "e8m0", "e4m3", "double")

_BLOCK = 256  # how many scales share a scale of theirs, in 'double'


def store(
    matrix: Any, found: Scales, fmt: Format, dtype: Any, calibration: str | None
) -> tuple[Any, Any]:
    """Scales and offsets as they are stored.

    Args:
      matrix: the class of quantized matrices.
      found: scales and offsets `[..., tiles, groups]`.
      fmt: the format of their codes.
      dtype: a name of `_NAMES`, a floating dtype, or None: as they are.
      calibration: what found them.

    Raises:
      ValueError: for another dtype, or one that does not hold them.
    """
    if dtype is None:
        return found.scale, found.offset
    name = _name(dtype)
    if name not in _NAMES:
        raise ValueError(f"scale_dtype: expected one of {', '.join(_NAMES)}, got {dtype!r}")
    if name in _FLOATS:
        stored = jax.tree.map(lambda x: x.astype(name), found)
        _check_held(found, stored, name)
        return stored.scale, stored.offset
    if found.offset is not None:
        raise ValueError(
            f"scale_dtype: expected one of {', '.join(_FLOATS)} for a format with an offset, got "
            f"{dtype!r}"
        )
    if name == "e8m0":
        # (Of codes up to a power of two, as in nf4, this would clip up to half of a value.)
        by_largest = calibration in (None, "absmax", "minmax") and np.frexp(fmt.largest)[0] > 0.5
        return _powers_of_two(found.scale, fmt if by_largest else None), None
    return _quantized(matrix, found.scale, name, -fmt.lowest > fmt.largest), None


def rounding(dtype: Any) -> Callable[[Scales], Scales]:
    """From scales to the nearest ones that `store` can hold; quantized ones are not looked ahead to."""
    return _rounding(None if dtype is None else _name(dtype))


def _name(dtype: Any) -> str:
    try:
        return dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        return ""


@functools.lru_cache  # one function for one dtype: what is compiled for it is found again
def _rounding(name: str | None) -> Callable[[Scales], Scales]:
    if name == "e8m0":
        return lambda found: Scales(_powers_of_two(found.scale, None).astype(found.scale.dtype))
    if name in _FLOATS:
        return lambda found: jax.tree.map(lambda x: x.astype(name).astype(x.dtype), found)
    return lambda found: found


def stored_as(scale: Any) -> str:
    """The name that `store` has for how a scale is stored."""
    if is_implicit(scale):
        return "e4m3" if scale.format == "fp8_e4m3" else "double"
    return "e8m0" if scale.dtype.name == "float8_e8m0fnu" else scale.dtype.name


def known_nonfinite(x: jax.Array) -> bool:
    """Whether an array has infinite or NaN elements, where its elements are known: not of a tracer.

    A function that is traced may use arrays that are none, and what is computed of them is traced, too,
    unless asked for at once.
    """
    return _known(lambda x: ~jnp.isfinite(x), x)


def _known(condition: Callable[..., jax.Array], *arrays: jax.Array) -> bool:
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return False
    with jax.ensure_compile_time_eval():
        return bool(condition(*arrays).any())


def _check_held(found: Scales, stored: Scales, name: str) -> None:
    """Whether a narrower dtype holds scales and offsets. (Subnormal ones have few digits, or none.)"""

    def lost(found: jax.Array, stored: jax.Array) -> jax.Array:
        return jnp.abs(stored.astype(found.dtype) - found) > jnp.abs(found) / 8

    for problem, wrong in (
        ("large", any(map(known_nonfinite, jax.tree.leaves(stored)))),
        ("small", _known(lost, found.scale, stored.scale)),
    ):
        if wrong:
            raise ValueError(
                f"scale_dtype: the weight's scales are too {problem} for {name!r}; use 'bfloat16' or "
                "'float32'"
            )


def _powers_of_two(scale: jax.Array, fmt: Format | None) -> jax.Array:
    """Scales in e8m0, a byte each.

    Those of the largest magnitudes are rounded as section 6.3 of the OCP Microscaling specification
    says: the exponent of the largest magnitude less that of the largest code. (So the magnitudes
    just below a power of two saturate.) Others are rounded to the nearest exponent. That of a block
    with NaN or infinities is NaN.
    """
    if fmt is None:
        exponent = jnp.round(jnp.log2(jnp.where(scale == 0, 1, jnp.abs(scale)))).astype(jnp.int32)
    else:
        exponent = jnp.frexp(scale * fmt.largest)[1] - int(np.frexp(fmt.largest)[1])
    exponent = jnp.where(scale == 0, -126, jnp.clip(exponent, -126, 127))  # 2^-127 is subnormal
    power = jnp.ldexp(jnp.ones_like(scale), exponent)
    return jnp.where(jnp.isfinite(scale), power, jnp.nan).astype(jnp.float8_e8m0fnu)


def _quantized(matrix: Any, scale: jax.Array, name: str, signed: bool) -> Any:
    """Scales in 8 bits with scales of their own."""
    if name == "e4m3":  # NVFP4: one scale for the tensor
        return matrix.quantize(scale, "fp8_e4m3", "tensor", axis=-1)
    tiles, groups = scale.shape[-2:]
    along = _largest_divisor(groups, _BLOCK)
    rows = _largest_divisor(tiles, _BLOCK // along) if along == groups else 1
    blocks = scale.reshape(*scale.shape[:-2], tiles // rows, rows, groups // along, along)
    # Codes 0 to 255 without an offset, unless some scales are negative.
    largest, dtype = (127, "int8") if signed else (255, "uint8")
    of_scale = jnp.abs(blocks).max(axis=(-1, -3)) / largest
    whole = jnp.repeat(jnp.repeat(of_scale, rows, -2), along, -1)
    codes = jnp.round(scale / jnp.where(whole > 0, whole, 1)).astype(dtype)
    return matrix(codes=codes, scale=of_scale, format=dtype, axis=-1)


def _largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, max(min(n, most), 1) + 1) if n % d == 0)
