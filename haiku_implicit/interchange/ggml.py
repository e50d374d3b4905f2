"""Converts weights from and to the quantized blocks of GGUF files.

Bits are kept; codes are reordered if their order within a block differs from `formats.pack`.
"""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import imported, value_error
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.interchange.ggml_blocks import KINDS, block_size, is_packed, packed, unpacked
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.numbers.casts import largest_before_overflow, overflows
from haiku_implicit.quantized.numbers.formats import Recipe

DENSE = ("F32", "F16", "BF16")
# The recipes of weights in these blocks. (`formats` lacks recipes for IQ4_NL, since that is the name of
# its codes, and for TQ2_0, which is only for files of models that were trained for it.)
RECIPES: dict[str, Recipe] = {
    kind: formats.RECIPES[kind.lower()] for kind in KINDS if kind.lower() in formats.RECIPES
} | {"IQ4_NL": Recipe("iq4_nl", 32, "float16"), "TQ2_0": Recipe("ternary", 256, "float16")}
# Kinds that the package `gguf` reads, but does not write.
_BY_LIBRARY = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
_LARGEST_HALF = 65504.0
_LARGEST_BFLOAT16 = largest_before_overflow(jnp.bfloat16)


def gguf_package() -> types.ModuleType:
    """Imports the optional package `gguf`."""
    return imported("gguf", "GGUF files need gguf", "'haiku-implicit[gguf]'")


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
      ValueError: for an unknown kind, or bytes that are not whole blocks.

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
        raise value_error(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    data, size = np.asarray(data), block_size(name)
    if data.dtype != np.uint8 or data.ndim < 2 or data.shape[-1] % size or not data.size:
        raise value_error(
            f"data: expected uint8[..., rows, bytes] in whole blocks of {size} bytes for {name!r}, got "
            f"{data.dtype}{list(data.shape)}"
        )
    recipe: Recipe = RECIPES[name]
    fmt = formats.FORMATS[recipe.format]
    as_stored = is_packed(name, fmt.bits, recipe.group_size)
    parts = unpacked(name, data.reshape(*data.shape[:-1], -1, size), codes=not as_stored)
    scale: Array = parts["d"]
    offset: Array = parts.get("m")
    codes = parts["codes"].view(fmt.dtype)
    if as_stored:
        codes = codes.reshape(*scale.shape[:-1], -1)
    else:
        codes = formats.pack(codes.reshape(*scale.shape[:-1], -1, recipe.group_size), fmt)
    if "scales" in parts:
        of_scale, *of_offset = np.split(parts["scales"], 1 if offset is None else 2, axis=-1)
        scale = _nested(of_scale, scale, recipe)
        offset = _nested(of_offset[0], offset, recipe) if of_offset else None
    return QuantizedMatrix.from_parts(
        *map(_on_device, (codes, scale, offset)),
        dtype=recipe.format, axis=axis, out_dtype=dtype,
    )  # fmt: skip


def _nested(codes: np.ndarray, d: Array, recipe: Recipe) -> QuantizedMatrix:
    """The scales of groups `[..., rows, blocks, n]` as codes with a scale for each block."""
    fmt = formats.FORMATS[recipe.scale_dtype.partition(",")[0]]
    stored = formats.pack(codes.view(fmt.dtype), fmt)
    return QuantizedMatrix.from_parts(
        compat.on_device(stored), compat.on_device(d), dtype=fmt.name, axis=-1,
        out_dtype=jnp.float32,
    )  # fmt: skip


def _on_device(x: Array) -> Array:
    return compat.on_device(x) if isinstance(x, np.ndarray) else x


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
      ValueError: for an unknown kind, rows that are not whole blocks, numbers that are not finite or
        too large for float16.

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
        raise value_error(f"axis: expected -2 or -1, got {axis!r}")
    exact = kind_of(weight)
    if isinstance(weight, QuantizedMatrix) and exact == name and weight.axis == axis:
        return _blocks_of(weight, name)
    rows = _as_float32(weight)
    return _quantized(rows if axis == -1 else rows.swapaxes(-1, -2), name)


def checked_kind(kind: Any) -> str:
    """Returns the name of a kind; raises if it can't be written."""
    name = kind.upper() if isinstance(kind, str) else getattr(kind, "name", kind)
    if name not in (*DENSE, *RECIPES):
        raise value_error(f"kind: expected one of {', '.join((*DENSE, *RECIPES))}, got {kind!r}")
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


def _blocks_of(weight: QuantizedMatrix, kind: str) -> np.ndarray:
    """The bytes `[..., rows, bytes]` of a weight that already has the format of these blocks."""
    codes, scales = _codes_of(weight), []
    parts = {"codes": codes.reshape(*codes.shape[:-2], -1, RECIPES[kind].multiple)}
    for name, x in (("d", weight.scale), ("m", weight.offset)):
        nested = isinstance(x, QuantizedMatrix)
        scales += [_codes_of(x)] if nested else []
        parts[name] = x.scale if nested else x
    if scales:
        parts["scales"] = np.concatenate(scales, axis=-1)
    blocks = packed(kind, parts)
    return blocks.reshape(*blocks.shape[:-2], -1)


def _codes_of(x: QuantizedMatrix) -> np.ndarray:
    """The codes `[..., rows, groups, n]` of a weight, or of quantized scales."""
    return np.asarray(formats.unpack(x.codes, x.num_groups, formats.FORMATS[x.format]))


# --- from values -----------------------------------------------------------------------------------


def _quantized(rows: np.ndarray, kind: str) -> np.ndarray:
    """Quantizes dense float32 rows `[..., rows, elements]` to blocks."""
    if kind == "F32":
        return rows
    if rows.shape[-1] % block_elements(kind):
        raise value_error(
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


def dense_of(weight: Array) -> np.ndarray:
    """The values of a weight, dense or implicit."""
    return np.asarray(materialize_array(weight) if is_implicit(weight) else weight)


def _as_float32(weight: Array) -> np.ndarray:
    """Converts a weight to float32; raises a ValueError for numbers that are too large."""
    values = dense_of(weight)
    with np.errstate(over="ignore"):
        rows = values.astype(np.float32)
    if jnp.issubdtype(values.dtype, jnp.floating) and overflows(values, rows):
        raise value_error(f"weight: {values.dtype.name} numbers that are too large for float32")
    return rows


def _check_range(rows: np.ndarray, kind: str) -> None:
    largest = float(np.abs(rows).max(initial=0))
    if not np.isfinite(largest) and kind not in DENSE:
        raise value_error(f"weight: has elements that are not finite, which {kind!r} can't hold")
    largest = float(np.abs(rows).max(initial=0, where=np.isfinite(rows)))
    if kind == "BF16" and largest > _LARGEST_BFLOAT16:
        raise value_error(f"weight: {largest:g} is too large for 'BF16'; 'F32' can hold it")
    if largest > _LARGEST_HALF and kind not in ("BF16", "MXFP4"):
        raise value_error(
            f"weight: {largest:g} is too large for float16, which {kind!r} has numbers or scales in; "
            "'F32' and 'BF16' can hold it"
        )
