"""Writes weights as the quantized blocks of GGUF files: the inverse of `ggml`."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.typing import Array
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.numbers.casts import largest_before_overflow, overflows
from haiku_implicit.quantized.numbers.formats import Recipe

DENSE = ("F32", "F16", "BF16")
_LARGEST_HALF = 65504.0
_LARGEST_BFLOAT16 = largest_before_overflow(jnp.bfloat16)


def gguf_package() -> types.ModuleType:
    """Imports the optional package `gguf`."""
    try:
        import gguf
    except ImportError as e:
        raise ImportError("GGUF files need gguf: pip install 'haiku-implicit[gguf]'") from e
    return gguf


def to_ggml(weight: Array, kind: Any, *, axis: int = -2) -> np.ndarray:
    """Converts a weight to the blocks of a GGUF file; the inverse of `from_ggml`.

    A `QuantizedMatrix` in the format of these blocks, grouped along `axis`, is written bit for bit.
    `from_ggml` and `quantize_params` with `dtype='q4_k'` or `dtype='q4_0'` make such weights, also with
    inputs. Any other weight is made dense and quantized from its values: to Q4_0, Q4_1, Q5_0, Q5_1,
    Q8_0, TQ2_0 and MXFP4 as in llama.cpp, and to the K-quants and IQ4 by this library, for the least
    squared error.

    Args:
      weight: `[..., n, m]`, dense or implicit.
      kind: a kind that `from_ggml` reads, or 'F32', 'F16', 'BF16'; or an object with such a `name`.
      axis: the axis of the weight within rows: -2 for Haiku's weights `[in, out]`, -1 for
        `[rows, elements]` (an embedding).

    Returns:
      `[..., rows, bytes]` uint8; for 'F32' and 'F16' the numbers themselves, float32 and float16.

    Raises:
      ImportError: if the package `gguf` is needed to quantize, and missing.
      ValueError: for another kind, rows that are not whole blocks, numbers that are not finite or too
        large for float16.

    Example:
      >>> import jax, haiku_implicit as hki
      >>> w = jax.random.normal(jax.random.key(0), (256, 4))
      >>> q = hki.QuantizedMatrix.quantize(w, 'q4_k', calibration='mse')
      >>> data = hki.to_ggml(q, 'Q4_K')
      >>> data.shape, data.dtype
      ((4, 144), dtype('uint8'))
      >>> bool((hki.from_ggml(data, 'Q4_K').materialize() == q.materialize()).all())
      True
    """
    name = checked_kind(kind)
    if axis not in (-2, -1):
        raise ValueError(f"axis: expected -2 or -1, got {axis!r}")
    exact = kind_of(weight)
    if isinstance(weight, QuantizedMatrix) and exact == name and weight.axis == axis:
        return _blocks_of(weight, name)
    rows = as_float32(materialize_array(weight) if is_implicit(weight) else weight)
    return _quantized(rows if axis == -1 else rows.swapaxes(-1, -2), name)


def checked_kind(kind: Any) -> str:
    """Returns the name of a kind; raises if it can't be written."""
    name = kind.upper() if isinstance(kind, str) else getattr(kind, "name", kind)
    if name not in (*DENSE, *RECIPES):
        raise ValueError(f"kind: expected one of {', '.join((*DENSE, *RECIPES))}, got {kind!r}")
    return name


def kind_of(weight: Array) -> str | None:
    """The kind whose format a quantized or dense weight already has; None if there is none."""
    if not isinstance(weight, QuantizedMatrix):
        names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
        return None if is_implicit(weight) else names.get(np.dtype(weight.dtype).name)
    whole = np.shape(weight.scale)[-2] == np.shape(weight.codes)[-2]  # a scale for each row
    if weight.padding or weight.rounded_to is not None or not whole:
        return None
    held = Recipe(weight.format, weight.group_size, weight.scale_dtype)
    return next((name for name, recipe in RECIPES.items() if recipe == held), None)


def block_elements(kind: str) -> int:
    """The number of elements in a block; 1 for kinds that are not quantized."""
    return RECIPES[kind].multiple if kind in RECIPES else 1


# --- from values -----------------------------------------------------------------------------------


def _quantized(rows: np.ndarray, kind: str) -> np.ndarray:
    """Quantizes dense float32 rows `[..., rows, elements]` to blocks."""
    if kind == "F32":
        return rows
    if rows.shape[-1] % block_elements(kind):
        raise ValueError(
            f"weight: rows of {rows.shape[-1]} elements are not whole blocks of "
            f"{block_elements(kind)} for {kind!r}"
        )
    _check_range(rows, kind)
    if kind in _BY_LIBRARY:
        recipe = RECIPES[kind]
        q = QuantizedMatrix.quantize(
            jnp.asarray(rows), recipe.format, recipe.group_size, -1, calibration="mse",
            scale_dtype=recipe.scale_dtype,
        )  # fmt: skip
        return _blocks_of(q, kind)
    gguf = gguf_package()
    return gguf.quants.quantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])


def as_float32(weight: Array) -> np.ndarray:
    """Converts a weight to float32; raises a ValueError for numbers that are too large."""
    values = np.asarray(weight)
    with np.errstate(over="ignore"):
        rows = values.astype(np.float32)
    if jnp.issubdtype(values.dtype, jnp.floating) and overflows(values, rows):
        raise ValueError(f"weight: {values.dtype.name} numbers that are too large for float32")
    return rows


def _check_range(rows: np.ndarray, kind: str) -> None:
    largest = float(np.abs(rows).max(initial=0))
    if not np.isfinite(largest) and kind not in DENSE:
        raise ValueError(f"weight: has elements that are not finite, which {kind!r} can't hold")
    largest = float(np.abs(rows).max(initial=0, where=np.isfinite(rows)))
    if kind == "BF16" and largest > _LARGEST_BFLOAT16:
        raise ValueError(f"weight: {largest:g} is too large for 'BF16'; 'F32' can hold it")
    if largest > _LARGEST_HALF and kind not in ("BF16", "MXFP4"):
        raise ValueError(
            f"weight: {largest:g} is too large for float16, which {kind!r} has numbers or scales in; "
            "'F32' and 'BF16' can hold it"
        )


# --- blocks ----------------------------------------------------------------------------------------

_Fields = tuple[np.ndarray, ...]


def _blocks_of(weight: QuantizedMatrix, kind: str) -> np.ndarray:
    """The bytes `[..., rows, bytes]` of a weight that already has the format of these blocks."""
    recipe = RECIPES[kind]
    groups = formats.unpack(weight.codes, weight.num_groups, formats.FORMATS[weight.format])
    codes = np.asarray(groups)
    *lead, _, _ = codes.shape
    codes = codes.reshape(*lead, -1, recipe.multiple)
    fields = _WRITERS[kind](codes, weight.scale, weight.offset)
    blocks = np.concatenate([np.asarray(x).view(np.uint8) for x in fields], axis=-1)
    return blocks.reshape(*lead, -1)


def _packed(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Packs numbers of a few bits into bytes: the inverse of `ggml._unpacked`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    low = codes.astype(np.uint8) & (2**bits - 1)
    runs = low.reshape(*low.shape[:-1], -1, 8 // bits, run) << shifts
    return np.bitwise_or.reduce(runs, axis=-2).reshape(*low.shape[:-1], -1)


def _halves(scale: Array) -> np.ndarray:
    """The bytes of a float16 number in each block `[..., rows, blocks]`."""
    return np.asarray(scale).astype("<f2")[..., None].view(np.uint8)


def _codes_of(scale: QuantizedMatrix) -> np.ndarray:
    """The codes `[..., rows, blocks, n]` of quantized scales."""
    return np.asarray(formats.unpack(scale.codes, scale.num_groups, formats.FORMATS[scale.format]))


def _q4_0(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    return _halves(scale), _packed(codes, 4, 16)


def _q4_1(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    return _halves(scale), _halves(offset), _packed(codes, 4, 16)


def _q5_0(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    return _halves(scale), _packed(codes >> 4, 1, 1), _packed(codes, 4, 16)


def _q5_1(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    d, *rest = _q5_0(codes, scale, None)
    return d, _halves(offset), *rest


def _q8_0(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    return _halves(scale), codes


def _q2_k(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    scales = _codes_of(scale) | _codes_of(offset) << 4
    return scales, _packed(codes, 2, 32), _halves(scale.scale), _halves(-offset.scale)


def _q3_k(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    own = _codes_of(scale)
    scales = np.concatenate([_packed(own, 4, 8), _packed(own >> 4, 2, 4)], axis=-1)
    return _packed(codes >> 2, 1, 32), _packed(codes, 2, 32), scales, _halves(scale.scale)


def _q4_k(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    """The fields of Q4_K: see `ggml._q4_k` for the bits of scales and minima."""
    low, high = np.split(_codes_of(scale), 2, axis=-1)
    low_minimum, high_minimum = np.split(_codes_of(offset), 2, axis=-1)
    first = low | high >> 4 << 6
    second = low_minimum | high_minimum >> 4 << 6
    third = high & 15 | (high_minimum & 15) << 4
    scales = np.concatenate([first, second, third], axis=-1)
    return _halves(scale.scale), _halves(-offset.scale), scales, _packed(codes, 4, 32)


def _q5_k(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    d, dmin, scales, low = _q4_k(codes, scale, offset)
    return d, dmin, scales, _packed(codes >> 4, 1, 32), low


def _q6_k(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    high = _packed(codes >> 4, 2, 32)
    return _packed(codes, 4, 64), high, _codes_of(scale), _halves(scale.scale)


def _iq4_xs(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    own = _codes_of(scale)
    # The high two bits of four scales make a byte; there are two such bytes.
    return _halves(scale.scale), _packed(own >> 4, 2, 1), _packed(own, 4, 1), _packed(codes, 4, 16)


def _tq2_0(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    return _packed(codes, 2, 32), _halves(scale)


def _mxfp4(codes: np.ndarray, scale: Array, offset: Array) -> _Fields:
    return np.asarray(scale)[..., None].view(np.uint8), _packed(codes, 4, 16)


_WRITERS: dict[str, Callable[..., _Fields]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
}
# The recipes of weights in these blocks. (`formats` lacks recipes for IQ4_NL, since that is the name of
# its codes, and for TQ2_0, which is only for files of models that were trained for it.)
RECIPES: dict[str, Recipe] = {
    kind: formats.RECIPES[kind.lower()] for kind in _WRITERS if kind.lower() in formats.RECIPES
} | {"IQ4_NL": Recipe("iq4_nl", 32, "float16"), "TQ2_0": Recipe("ternary", 256, "float16")}
# Kinds that the package `gguf` reads, but does not write.
_BY_LIBRARY = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
