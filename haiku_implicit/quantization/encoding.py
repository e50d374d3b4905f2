"""From a dense matrix to codes and scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit._array import is_implicit
from haiku_implicit.quantization import calibration, formats, gptq, scales


def encode_rows(
    matrix: Any,
    stored: jax.Array,
    dtype: Any,
    group_size: Any = None,
    zero_point: bool = False,
    method: str | None = None,
    scale_dtype: Any = None,
    moments: jax.Array | None = None,
) -> dict[str, Any]:
    """Codes, scales and offsets of rows, of which elements along the last axis share a scale.

    Args:
      matrix: the class of quantized matrices, for scales that are quantized themselves.
      stored: `[..., rows, k]`, floating.
      dtype, group_size, zero_point, method (`calibration`), scale_dtype: as for its `quantize`.
      moments: `[..., k, k]`, of what the weight is multiplied by the sums of products of elements, to
        round for the least error of the product (`gptq`). Or their diagonal, `[..., k]`: this weighs
        errors in a search for scales, and elements are rounded to the nearest codes.

    Returns:
      The fields of the matrix: `codes`, `scale`, `offset`, `format`, `padding`.
    """
    fmt, recipe = formats.for_quantizing(dtype, zero_point)
    if recipe is not None:
        group_size = _prescribed("group_size", group_size, recipe.group_size, dtype)
        scale_dtype = _prescribed("scale_dtype", scale_dtype, recipe.scale_dtype, dtype)
    moments = None if moments is None else _checked_moments(moments, stored)
    tile = _fitting_tile(group_size, stored.shape[-2:], fmt)
    rounding = scales.rounding(scale_dtype)
    products = moments if moments is not None and moments.ndim == stored.ndim else None
    weight = 1.0 if moments is None else _importance(stored, moments, tile)
    found = calibration.calibrate(_blocks(stored, tile), fmt, method, rounding, weight)
    found = jax.tree.map(lambda x: x[..., 0], found)
    scale, offset = scales.store(matrix, found, fmt, scale_dtype, method)
    padding = -tile[1] % fmt.multiple
    if padding:
        stored = jnp.concatenate([stored, jnp.repeat(stored[..., -1:], padding, -1)], axis=-1)
        if products is not None:
            widths = [(0, 0)] * (products.ndim - 2) + [(0, padding)] * 2
            products = jnp.pad(products, widths)
    codes = _codes(stored, scale, offset, fmt, products)
    codes = formats.pack(codes, fmt)
    return dict(codes=codes, scale=scale, offset=offset, format=fmt.name, padding=padding)


def _codes(
    stored: jax.Array, scale: Any, offset: Any, fmt: formats.Format, moments: jax.Array | None
) -> jax.Array:
    """The codes `[..., rows, groups, g]` of `[..., rows, k]`, for scales as they are stored."""
    *lead, rows, k = stored.shape
    groups = np.shape(scale)[-1]

    def by_element(x: Any) -> Any:
        dense = x.materialize() if is_implicit(x) else x
        return formats.by_rows(dense, rows)[..., None]

    scale, offset = by_element(scale), None if offset is None else by_element(offset)
    if moments is None:
        grouped = stored.reshape(*lead, rows, groups, k // groups)
        return calibration.encode(grouped, scale, offset, fmt)
    return gptq.codes(stored, moments, scale, offset, fmt)


def _checked_moments(moments: Any, stored: jax.Array) -> jax.Array:
    moments, (*lead, _, k) = jnp.asarray(moments), stored.shape
    if moments.shape not in ((*lead, k, k), (*lead, k)):
        raise ValueError(
            f"moments: expected shape {[*lead, k, k]} for groups along an axis of length {k} (or "
            f"{[*lead, k]}, the diagonal), got {list(moments.shape)}"
        )
    return moments


def _importance(stored: jax.Array, moments: jax.Array, tile: tuple[int, int]) -> jax.Array:
    """What the squared error of each element counts: the mean square of what it is multiplied by."""
    if moments.ndim == stored.ndim:
        moments = jnp.diagonal(moments, axis1=-2, axis2=-1)
    return _blocks(jnp.broadcast_to(moments[..., None, :], stored.shape), tile)


def _prescribed(name: str, given: Any, needed: Any, dtype: Any) -> Any:
    if given not in (None, needed):
        raise ValueError(f"{name}: {dtype!r} has {needed!r}, got {given!r}; leave it out")
    return needed


def _fitting_tile(group_size: Any, core: tuple[int, ...], fmt: formats.Format) -> tuple[int, int]:
    """How many rows, and how many elements of each, share a scale."""
    rows, length = core
    if group_size is None:
        return 1, length
    if isinstance(group_size, str):
        if group_size != "tensor":
            raise ValueError(
                f"group_size: expected a number, a pair, 'tensor' or None, got {group_size!r}"
            )
        return rows, length
    pair = group_size if isinstance(group_size, tuple | list) else (1, group_size)
    if len(pair) != 2:
        raise ValueError(
            "group_size: expected a pair (rows, elements), a number, 'tensor' or None, got "
            f"{group_size!r}"
        )
    tile, g = pair
    sizes = formats.group_sizes(length, fmt)
    if g != length and g not in sizes:
        whole = f" and are multiples of {fmt.multiple}" if fmt.multiple > 1 else ""
        raise ValueError(
            f"group_size: expected None or one of {sizes}, which divide the axis of length "
            f"{length}{whole}, got {group_size!r}"
        )
    if isinstance(tile, bool) or not isinstance(tile, int | np.integer) or tile < 1 or rows % tile:
        raise ValueError(
            f"group_size: expected a tile whose rows divide the {rows} of the matrix, got "
            f"{group_size!r}"
        )
    return int(tile), int(g)


def _blocks(stored: jax.Array, tile: tuple[int, int]) -> jax.Array:
    """The elements that share a scale, last: `[..., tiles, groups, rows * g]`."""
    *lead, rows, k = stored.shape
    r, g = tile
    blocks = stored.reshape(*lead, rows // r, r, k // g, g).swapaxes(-2, -3)
    blocks = blocks.reshape(*lead, rows // r, k // g, r * g)
    return blocks.astype(formats.arithmetic_dtype(stored.dtype))
