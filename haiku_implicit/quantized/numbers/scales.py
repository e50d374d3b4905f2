"""The storage of scales and offsets: as floating numbers, or quantized themselves."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.literals import at_trace_time
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import DType
from haiku_implicit.quantized.numbers.calibration import Rounding, Scales
from haiku_implicit.quantized.numbers.formats import FORMATS, Format, dtype_name

_RUNS = re.compile(r"u?int[4-68],[1-9][0-9]*")
_FLOATS = ("float32", "bfloat16", "float16", "float64")
CODES = ("e4m3", "double")  # with `Runs`, the kinds of scales that are quantized themselves


class Runs(NamedTuple):
    """Scales as codes, in runs that have a float16 scale each: 'uint6,8' as in GGML's Q4_K.

    Offsets are stored in this way, too, times minus one if codes are not negative.

    Attributes:
      format: the format of the codes.
      length: how many scales share a float16 scale.
    """

    format: str
    length: int


class Lost(NamedTuple):
    """Whether scales are out of the range of their storage dtype, as booleans.

    Attributes:
      large: whether one became infinite.
      small: whether one lost more than an eighth.
    """

    large: jax.Array
    small: jax.Array


def store(
    found: Scales, fmt: Format, name: str | None, calibration: str | None
) -> tuple[Scales, Lost | None]:
    """Casts scales and offsets to the floating numbers to store, and says whether they fit.

    Args:
      found: scales and offsets `[..., tiles, groups]`.
      fmt: the format of their codes.
      name: a result of `name_of`, but none of `CODES`.
      calibration: the calibration method that found the scales.
    """
    # (If the largest code is a power of two, as in nf4, the MX rule would clip up to half of a value.)
    by_largest = calibration in (None, "absmax", "minmax") and np.frexp(fmt.largest)[0] > 0.5
    stored = _as_held(found, name, fmt if by_largest else None)
    if name not in _FLOATS:
        return stored, None
    large = jnp.stack([~jnp.isfinite(x).all() for x in jax.tree.leaves(stored)]).any()
    difference = jnp.abs(stored.scale.astype(found.scale.dtype) - found.scale)
    return stored, Lost(large, (difference > jnp.abs(found.scale) / 8).any())


def check(lost: Lost | None, dtype: DType | None) -> None:
    """Raises for scales that are known to be out of the range of their dtype.

    Raises:
      ValueError: says in which direction.
    """
    for problem, wrong in () if lost is None else lost._asdict().items():
        if _known(lambda x: x, wrong):
            raise value_error(
                f"scale_dtype: the weight's scales are too {problem} for {_name(dtype)!r}; use "
                "'bfloat16' or 'float32'"
            )


def _as_held(found: Scales, name: str | None, fmt: Format | None = None) -> Scales:
    """Casts scales to their storage dtype; `fmt` as for `_powers_of_two`."""
    if name == "e8m0":
        return found._replace(scale=_powers_of_two(found.scale, fmt))
    return jax.tree.map(lambda x: x.astype(name), found) if name in _FLOATS else found


def runs_of(name: str | None) -> Runs | None:
    """Returns the runs that a name such as 'uint6,8' stands for; None for other names."""
    code, comma, length = (name or "").partition(",")
    return Runs(code, int(length)) if comma else None


def name_of(dtype: DType | None, fmt: Format) -> str | None:
    """Returns the name of the storage of scales.

    Args:
      dtype: a name of `_FLOATS` or `CODES`, 'e8m0', the text of `Runs`, a floating dtype, or None: no
        cast.
      fmt: the format of the codes that the scales belong to.

    Raises:
      ValueError: for another dtype, or one that does not fit the format.
    """
    name = _name(dtype)
    if name is None or name in _FLOATS:
        return name
    if _RUNS.fullmatch(name):
        return _checked_runs(name, fmt)
    if name not in ("e8m0", *CODES):
        known = ", ".join((*_FLOATS, "e8m0", *CODES, "or as 'uint6,8'"))
        raise value_error(f"scale_dtype: expected one of {known}, got {dtype!r}")
    if fmt.offset and name != "double":
        raise value_error(
            f"scale_dtype: expected one of {', '.join(_FLOATS)}, double for a format with an offset, "
            f"got {dtype!r}"
        )
    return name


def _checked_runs(name: str, fmt: Format) -> str:
    """Returns the text of `Runs`; raises if its format does not fit the format of the weight."""
    code, length = str(name).split(",")
    if fmt.offset != FORMATS[code].offset:
        needed = "counts up from zero" if fmt.offset else "has both signs"
        raise value_error(
            f"scale_dtype: codes in {fmt.name} need scales in a format that {needed}, got {name!r}"
        )
    whole = FORMATS[code].multiple
    if int(length) % whole:
        raise value_error(
            f"scale_dtype: expected a multiple of {whole} scales in a run, got {name!r}"
        )
    return name


@functools.lru_cache  # one function for each dtype, so that programs compiled for it are used again
def rounding(name: str | None) -> Rounding:
    """Returns a function from scales to the nearest ones that `store` can hold.

    It does not change scales that will be quantized themselves.
    """

    def nearest(found: Scales) -> Scales:
        return jax.tree.map(lambda x, held: held.astype(x.dtype), found, _as_held(found, name))

    return Rounding(nearest)


def _name(dtype: DType | None) -> str | None:
    return dtype if dtype is None or isinstance(dtype, str) else dtype_name(dtype)


def known_nonfinite(x: jax.Array) -> bool:
    """Whether an array is known to have infinite or NaN elements; False for a tracer.

    A concrete array may be used in a function that is being traced. Computations with it are traced,
    too, unless they are evaluated at compile time.
    """
    return _known(_has_nonfinite, x)


@jax.jit  # one program for each shape, instead of three
def _has_nonfinite(x: jax.Array) -> jax.Array:
    return ~jnp.isfinite(x).all()


def _known(condition: Callable[..., jax.Array], *arrays: jax.Array) -> bool:
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return False
    with at_trace_time():
        return bool(condition(*arrays).any())


def _powers_of_two(scale: jax.Array, fmt: Format | None) -> jax.Array:
    """Rounds scales to powers of two in e8m0, a byte each.

    With a format, they are rounded as section 6.3 of the OCP Microscaling specification says: to the
    exponent of the largest magnitude less the exponent of the largest code. (So magnitudes just below a
    power of two saturate.) Without a format, they are rounded to the nearest exponent. A block with NaN
    or infinities gets NaN.
    """
    if fmt is None:
        exponent = jnp.round(jnp.log2(jnp.where(scale == 0, 1, jnp.abs(scale)))).astype(jnp.int32)
    else:
        exponent = jnp.frexp(scale * fmt.largest)[1] - int(np.frexp(fmt.largest)[1])
    exponent = jnp.where(scale == 0, -126, jnp.clip(exponent, -126, 127))  # 2^-127 is subnormal
    power = jnp.ldexp(jnp.ones_like(scale), exponent)
    return jnp.where(jnp.isfinite(scale), power, jnp.nan).astype(jnp.float8_e8m0fnu)
