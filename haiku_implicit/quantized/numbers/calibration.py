"""Calibration: finding the scales of stored matrices; `ranges` says how those of operands differ.

All functions here take blocks `[..., n]`, in float32 or float64: the elements along the last axis share
a scale (and an offset). Scales and offsets are `[..., 1]`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.quantized.numbers import formats, options, ranges
from haiku_implicit.quantized.numbers.extremes import largest, smallest
from haiku_implicit.quantized.numbers.formats import Format


class Scales(NamedTuple):
    """Scales and offsets: the values of a block are `scale * decode(code) + offset`.

    Attributes:
      scale: `[..., 1]`; zero for a block of equal values.
      offset: `[..., 1]`, or None for formats without one.
    """

    scale: jax.Array
    offset: jax.Array | None = None


# A function from scales to the nearest ones that can be stored, with the arrays that it needs.
Rounding = jax.tree_util.Partial
_UNCHANGED = Rounding(lambda scales: scales)


def calibrate(
    w: jax.Array,
    fmt: Format,
    method: str | None = None,
    rounding: Rounding = _UNCHANGED,
    weight: jax.Array | float = 1.0,
) -> Scales:
    """Finds the scales of blocks of values.

    Args:
      w: `[..., n]`, float32 or float64, finite.
      fmt: the format.
      method: a name of `options.CALIBRATIONS`, with numbers after commas (`'percentile,99.5'`); None:
        absmean for binary and ternary codes, minmax for codes with an offset, absmax for all others.
      rounding: a function from scales to the nearest ones that can be stored; a search considers
        only these.
      weight: the weight of each squared error in a search, broadcastable to `w`.

    Raises:
      ValueError: for an unknown method, a method that does not fit the format, or wrong numbers.
    """
    name, numbers = options.parse("calibration", method or _default(fmt), options.CALIBRATIONS)
    if name == "mse":
        return _mse(w, fmt, rounding, weight)
    if name == "hqq":
        return _hqq(w, fmt, int(numbers[0]) if numbers else _HQQ_STEPS)
    return _by_range(w, fmt, name, numbers)


def _default(fmt: Format) -> str:
    if fmt.offset:
        return "minmax"
    return "absmean" if fmt.name in formats.BY_MEAN else "absmax"


# --- scales from ranges --------------------------------------------------------------------------


def _by_range(
    w: jax.Array, fmt: Format, method: str = "minmax", numbers: tuple[float, ...] = ()
) -> Scales:
    """Returns the scales with which codes stand for the ends of a range."""
    if method == "percentile" and numbers and not 50 < numbers[0] <= 100:
        raise value_error(f"calibration: expected a percentile above 50 to 100, got {numbers[0]:g}")
    if method == "fixed" and not numbers[0] < numbers[1]:
        raise value_error(
            f"calibration: expected 'fixed,LOW,HIGH', low first, got {numbers[0]:g}, {numbers[1]:g}"
        )
    find = functools.partial(
        ranges.limits, method=method, numbers=numbers, axis=-1, symmetric=not fmt.offset
    )
    if method not in ("rms", "absmean"):
        return _spanning(*find(w), fmt)
    unit = _unit(w)
    return _spanning(None, find(w / unit)[1] * unit, fmt)


def _spanning(low: jax.Array | None, high: jax.Array, fmt: Format) -> Scales:
    """Returns the scales (and offsets) with which codes span a range.

    Without an offset the largest code stands for the upper end. With one, the codes 0 to `largest` span
    the range. If the range contains zero, one code stands for exactly zero: the offset is a multiple of
    the scale, whose last bits are cleared so that the multiple is exact (even if a compiler fuses
    `scale * code + offset` into one rounding).
    """
    if not fmt.offset:
        return Scales(high / fmt.largest)
    low = -high if low is None else low
    scale = (high / 2 - low / 2) / (fmt.largest / 2)  # halves, because the difference may overflow
    info = jnp.finfo(low.dtype)
    scale = jax.lax.reduce_precision(scale, exponent_bits=info.nexp, mantissa_bits=info.nmant - 8)
    zero = jnp.round(-low / _divisor(scale))
    return Scales(scale, jnp.where((low <= 0) & (high >= 0), 0 - zero * scale, low))


# --- searches ------------------------------------------------------------------------------------

# The candidates shorten the range of absmax or minmax by these numbers of code steps (negative: they
# lengthen it). The error goes up and down within each step, for any number of bits. Twice as many
# candidates change it by less than 1 %.
_CUTS = np.linspace(-2, 4.2, 32)
# With an offset, the cuts at each end; the search tries all pairs.
_CUTS_OF_ENDS = (-1, -0.6, -0.2, 0.2, 0.6, 1, 1.5, 2.4, 4.5)
# One more multiple of the scale, for scales that are powers of two: it rounds up when 1 rounds down.
_UP = 1.42
_HQQ_STEPS = 20
_REFITS = 4  # how often the best candidate is refitted to its own codes


# Jitted, like the other loops here, so that all weights of a shape share one compiled program.
@functools.partial(jax.jit, static_argnums=1)
def _mse(
    w: jax.Array, fmt: Format, rounding: Rounding = _UNCHANGED, weight: jax.Array | float = 1.0
) -> Scales:
    """Searches smaller and larger ranges for the scales of least squared error.

    Each candidate is refitted to its own codes: a linear regression of the values on the codes gives
    the best scale for these codes, as in GGML's `make_qx_quants`.
    """
    first = _by_range(w, fmt)
    candidates, scales_of = _cut_at_ends(w, fmt) if fmt.offset else _shrunk(first, fmt)
    start = rounding(first)

    # One loop for all steps, since each part of a program takes long to compile.
    def step(best: Any, x: Any) -> Any:
        number, candidate = x
        tried = _where(number < len(candidates), scales_of(candidate), best[0])
        tried = _where(number < 0, start, rounding(refit(w, tried, fmt, weight)))
        error = _squared_error(w, tried, fmt, weight)
        less = error < best[1]
        return (_where(less, tried, best[0]), jnp.where(less, error, best[1])), None

    # The start itself, the candidates, and the best one again and again.
    numbers = np.arange(-1, len(candidates) + _REFITS)
    each = jnp.asarray(candidates, w.dtype)[np.clip(numbers, 0, len(candidates) - 1)]
    best = start, jnp.full_like(start.scale, jnp.inf)
    return jax.lax.scan(step, best, (numbers, each))[0][0]


def _where(condition: jax.Array, scales: Scales, others: Scales) -> Scales:
    return jax.tree.map(functools.partial(jnp.where, condition), scales, others)


# The candidates of a search, and a function from a candidate to its scales.
Candidates = tuple[list[Any], Callable[[jax.Array], Scales]]


def _shrunk(first: Scales, fmt: Format) -> Candidates:
    """Returns multiples of a scale; also negative ones if the format is not symmetric."""
    signs = (1.0, -1.0) if fmt.one_sided else (1.0,)
    # (Floats do not have even steps. With few bits, one step is too much.)
    steps = 7 if fmt.is_float else max(7, 2 ** (fmt.bits - 1) - 1)
    factors = (_UP, *(1 - _CUTS / steps))
    return [sign * f for sign in signs for f in factors], lambda f: Scales(first.scale * f)


def _cut_at_ends(w: jax.Array, fmt: Format) -> Candidates:
    """Returns the range of the values, cut or extended at both ends."""
    low, high = smallest(w, -1, keepdims=True), largest(w, -1, keepdims=True)
    half = high / 2 - low / 2  # as the difference may overflow

    def scales_of(cut: jax.Array) -> Scales:
        scale = half * (1 - cut[0] - cut[1]) / (fmt.largest / 2)
        return Scales(scale, low + 2 * cut[0] * half)

    cuts = np.asarray(_CUTS_OF_ENDS) / max(15, fmt.largest)
    return list(itertools.product(cuts, cuts)), scales_of


def refit(w: jax.Array, scales: Scales, fmt: Format, weight: jax.Array | float = 1.0) -> Scales:
    """Refits scales (and offsets) to the codes that they give, for the least squared error.

    Args:
      w: blocks `[..., n]`.
      scales: their scales.
      fmt: the format.
      weight: the weight of each squared error, broadcastable to `w`.
    """
    q = formats.nearest_values(_relative(w, *scales), fmt)
    unit = _unit(w)
    w, weight = w / unit, jnp.broadcast_to(weight, w.shape)
    if scales.offset is None:
        norm = _sums(weight * q * q)
        fitted = _sums(weight * w * q) / _divisor(norm)
        return Scales(jnp.where(norm > 0, fitted * unit, scales.scale))
    total = _divisor(_sums(weight))
    mean_q, mean_w = _sums(weight * q) / total, _sums(weight * w) / total
    variance = _sums(weight * (q - mean_q) ** 2)
    slope = _sums(weight * (q - mean_q) * (w - mean_w)) / _divisor(variance)
    fits = (variance > 0) & (slope > 0)
    return Scales(
        jnp.where(fits, slope * unit, scales.scale),
        jnp.where(fits, (mean_w - slope * mean_q) * unit, scales.offset),
    )


def _squared_error(
    w: jax.Array, scales: Scales, fmt: Format, weight: jax.Array | float = 1.0
) -> jax.Array:
    unit = _unit(w)
    error = (w - _rounded(w, scales, fmt)) / unit
    return _sums(weight * error * error)


def _sums(x: jax.Array) -> jax.Array:
    """The sum of each block, `[..., 1]`.

    XLA's reduction on a CPU would compute `x` in the same loop, one number after another. A product is
    a call of its own, so that the codes in `x` are computed in vectors.
    """
    return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _hqq(w: jax.Array, fmt: Format, steps: int) -> Scales:
    """Half-quadratic quantization: finds offsets with sparse errors (Badri & Shaji 2023).

    Minimizes the p-norm of the error for p = 0.7 in alternating steps: the generalized soft threshold
    splits the error into a sparse part and a rest, and the offset takes the mean of the rest.
    """
    if not fmt.offset:
        raise value_error(f"calibration: 'hqq' needs a format with an offset, got {fmt.name!r}")
    first = _by_range(w, fmt)
    scale, offset = first.scale, jnp.asarray(first.offset)
    p, kappa = 0.7, 1.01

    def step(state: Any, _: Any) -> Any:
        offset, beta = state
        now = Scales(scale, offset)
        rounded = _rounded(w, now, fmt)
        error = (w - rounded) / _divisor(scale)  # in steps of the codes, as the authors have it
        size = jnp.abs(error)
        small = jnp.where(size > 0, size, 1.0) ** (p - 1) / beta
        sparse = jnp.sign(error) * jnp.maximum(size - small, 0)
        shift = jnp.mean(error - sparse, axis=-1, keepdims=True)
        return (offset + shift * scale, beta * kappa), None

    (offset, _), _ = jax.lax.scan(step, (offset, jnp.asarray(10.0, w.dtype)), length=steps)
    found = Scales(scale, offset)
    better = _squared_error(w, found, fmt) < _squared_error(w, first, fmt)
    return Scales(scale, jnp.where(better, offset, jnp.asarray(first.offset)))


# --- codes -------------------------------------------------------------------------------------


def _unit(w: jax.Array) -> jax.Array:
    """Returns the largest magnitude of each block: in units of it, squares do not overflow."""
    return _divisor(largest(jnp.abs(w), -1, keepdims=True))


def _divisor(x: jax.Array) -> jax.Array:
    """Replaces zeros by ones: a block of equal values has the scale zero."""
    return jnp.where(x == 0, 1, x)


def _rounded(w: jax.Array, scales: Scales, fmt: Format) -> jax.Array:
    return formats.scaled_values(formats.nearest_values(_relative(w, *scales), fmt), *scales)


def encode(w: jax.Array, scale: jax.Array, offset: jax.Array | None, fmt: Format) -> jax.Array:
    """Returns the unpacked codes of values, given their scales.

    Args:
      w: values.
      scale: broadcastable to `w`, in the dtype of stored scales.
      offset: as `scale`, or None.
      fmt: the format.
    """
    return formats.nearest(_relative(w, scale, offset), fmt)


def _relative(w: jax.Array, scale: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Values in units of their scales, from their offsets on; zeros for scales of zero."""
    dtype = formats.arithmetic_dtype(w.dtype)
    w, scale = w.astype(dtype), scale.astype(dtype)
    shifted = w if offset is None else w - offset.astype(dtype)
    return jnp.where(scale == 0, 0, shifted / _divisor(scale))
