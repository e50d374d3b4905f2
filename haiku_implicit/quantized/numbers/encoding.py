"""Encodes dense matrices as codes and scales."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.literals import at_trace_time
from haiku_implicit.core.messages import see, value_error
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized.numbers import calibration, formats, gptq, options, pieces, scales
from haiku_implicit.quantized.numbers.extremes import largest

_BLOCK = 256  # how many scales share a second-level scale, in 'double'


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Codes and scales of the rows of a stored matrix, under the names of `QuantizedMatrix`'s fields.

    Attributes:
      codes: `[..., rows, stored]`, packed.
      scale: `[..., tiles, groups]`, or `Encoded` itself.
      offset: as `scale`, or None.
      format: the name of the codes' format.
      padding: how many codes at the end of each row are padding.
    """

    codes: jax.Array
    scale: Array
    offset: Array
    format: str = dataclasses.field(metadata=dict(static=True))
    padding: int = dataclasses.field(default=0, metadata=dict(static=True))


def encode_rows(
    weight: jax.Array,
    dtype: DType,
    group_size: Any = None,
    zero_point: bool = False,
    method: str | None = None,
    scale_dtype: DType | None = None,
    moments: jax.Array | None = None,
    *,
    transposed: bool = False,
) -> Encoded:
    """Encodes the rows of a matrix as codes, scales and offsets.

    Args:
      weight: `[..., rows, k]`, floating.
      dtype, group_size, zero_point, method (`calibration`), scale_dtype: as for
        `QuantizedMatrix.quantize`.
      moments: `[..., k, k]`, xᵀx of the inputs x `[n, k]`, to round for the least error of the product
        (`gptq`). Or its diagonal, `[..., k]`, to weigh errors in a search for scales; elements are
        then rounded to the nearest codes.
      transposed: whether the weight is `[..., k, rows]` instead.

    Raises:
      ValueError: for a weight that is known to have infinite or NaN elements, and as `quantize` does.
    """
    *lead, rows, k = weight.shape
    rows, k = (k, rows) if transposed else (rows, k)
    by_ends = options.split(method)[0] == "minmax"  # the range need not be symmetric
    fmt, recipe = formats.for_quantizing(dtype, zero_point or by_ends)
    if recipe is not None:
        group_size = _prescribed("group_size", group_size, recipe.group_size, dtype)
        scale_dtype = _prescribed("scale_dtype", scale_dtype, recipe.scale_dtype, dtype)
    tile = _fitting_tile(group_size, (rows, k), fmt)
    inputs = None if moments is None else _inputs_of(moments, weight.dtype, [*lead, k], fmt)
    name = scales.name_of(scale_dtype, fmt)
    _check_runs(name, k, tile[1])
    eager = not isinstance(weight, jax.core.Tracer) and not compat.is_traced()
    how = fmt, tile, method, name, transposed
    if _rows_are_independent(inputs, *how[:4]) and pieces.can_be_cut(weight):
        encoded, lost, finite = _in_pieces(weight, inputs, *how)
    else:
        encoded, lost, finite = _encoded(weight, inputs, None, *how, eager)
    with at_trace_time():  # `jax.transfer_guard` should not count the check as a transfer
        nonfinite = not finite.all() if eager else scales.known_nonfinite(weight)
    if nonfinite:
        about = f"{weight.dtype.name}{list(weight.shape)}"
        raise value_error(f"w {about}: it has infinite or NaN elements")
    scales.check(lost, scale_dtype)
    return encoded


def _rows_are_independent(
    inputs: gptq.Inputs | None,
    fmt: formats.Format,
    tile: tuple[int, int],
    method: str | None,
    scale_dtype: str | None,
) -> bool:
    """Whether the codes of a row have the same bits with any other rows, or need not have them.

    Sums may be taken in another order if there are more rows, and codes of scales belong to many rows.
    """
    by_mean = method is None and fmt.name in formats.BY_MEAN
    by_sum = by_mean or options.split(method)[0] in ("absmean", "rms", "mse", "hqq")
    same = inputs is not None or not by_sum
    return same and tile[0] == 1 and not _has_coded_scales(scale_dtype)


def _has_coded_scales(scale_dtype: str | None) -> bool:
    return scale_dtype in scales.CODES or scales.runs_of(scale_dtype) is not None


def _in_pieces(
    weight: jax.Array, inputs: gptq.Inputs | None, *how: Any
) -> tuple[Encoded, Any, Any]:
    """Returns the result of `_encoded`, by a program for all shapes with groups of this size.

    With inputs, one such program searches the scales, and another one for all weights with this number
    of inputs finds the codes.
    """
    fmt, (_, group), method, scale_dtype, transposed = how
    options = fmt, (1, group), method, scale_dtype, False, True
    stored = pieces.on_host(weight, transposed)
    *lead, rows, k = stored.shape

    def encoded_matrix(matrix: np.ndarray, own: gptq.Inputs) -> Any:
        importance = np.broadcast_to(own.squares, matrix.shape)
        blocks = [x.reshape(-1, group) for x in (matrix, importance)]
        found = pieces.map_rows(lambda x: _calibrated(*x, fmt, method, scale_dtype), blocks)
        found = jax.tree.map(lambda x: x.reshape(rows, -1, 1), found)
        return pieces.map_rows(lambda x: _encoded(x[0], own, x[1], *options), (matrix, found))

    if inputs is None:
        parts = stored.reshape(-1, group)
        found = [pieces.map_rows(lambda x: _encoded(x, None, None, *options), parts)]
    else:
        matrices = stored.reshape(-1, rows, k)
        flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[len(lead) :]), inputs)
        each = (jax.tree.map(lambda x, i=i: x[i], flat) for i in range(len(matrices)))
        found = list(map(encoded_matrix, matrices, each))
    encoded, lost, finite = jax.tree.map(lambda *parts: np.concatenate(parts), *found)
    encoded = jax.tree.map(lambda x: pieces.put_beside(x.reshape(*lead, rows, -1), weight), encoded)
    return encoded, lost, finite


@functools.partial(jax.jit, static_argnums=range(2, 5))
def _calibrated(
    blocks: jax.Array,
    importance: jax.Array,
    fmt: formats.Format,
    method: str | None,
    scale_dtype: str | None,
) -> calibration.Scales:
    """Returns the scales of blocks, with a weight for each squared error."""
    blocks = blocks.astype(formats.arithmetic_dtype(blocks.dtype))
    return calibration.calibrate(blocks, fmt, method, scales.rounding(scale_dtype), importance)


# Jitted, because eager code would compile each operation for each shape.
@functools.partial(jax.jit, static_argnums=range(3, 9), inline=compat.INLINE)
def _encoded(
    weight: jax.Array,
    inputs: gptq.Inputs | None,
    known: calibration.Scales | None,
    fmt: formats.Format,
    tile: tuple[int, int],
    method: str | None,
    scale_dtype: str | None,
    transposed: bool,
    checked: bool,
) -> tuple[Encoded, Any, Any]:
    """Returns the result of `encode_rows`, whether the scales fit their dtype, and, if it is checked,
    whether the weight is finite.

    `known` are its scales before they are rounded to their dtype, if these have been found.
    """
    stored = jnp.swapaxes(weight, -1, -2) if transposed else weight
    rounding = scales.rounding(scale_dtype)
    importance: jax.Array | float = 1.0
    # A squared error weighs as the mean square of the inputs of its element.
    if inputs is not None:
        importance = _blocks(jnp.broadcast_to(inputs.squares[..., None, :], stored.shape), tile)
    blocks = _blocks(stored, tile)
    found = known
    if found is None:
        found = calibration.calibrate(blocks, fmt, method, rounding, importance)
    finite = jnp.isfinite(found.scale).all() if checked else None  # as the elements of its group
    held: calibration.Scales
    if _has_coded_scales(scale_dtype):
        held, lost = _encoded_scales(found, fmt, scale_dtype)
        if options.split(method)[0] == "mse":  # again, among the scales that codes can hold
            rounding = calibration.Rounding(_nearest_of_codes(fmt), held)
            found = calibration.calibrate(blocks, fmt, method, rounding, importance)
            held = _in_same_blocks(held, found)
    else:
        held, lost = scales.store(_each(lambda x: x[..., 0], found), fmt, scale_dtype, method)
    padding = -tile[1] % fmt.multiple
    if padding:
        stored = jnp.concatenate([stored, jnp.repeat(stored[..., -1:], padding, -1)], axis=-1)
    codes = formats.pack(_codes(stored, held, fmt, inputs), fmt)
    return Encoded(codes, held.scale, held.offset, fmt.name, padding), lost, finite


# --- scales that are stored as codes -------------------------------------------------------------
# They are `Scales` of `Encoded`.


def _each(fun: Callable[..., Any], *pairs: calibration.Scales) -> Any:
    """Applies a function to the scales, and to the offsets if there are any."""
    return jax.tree.map(fun, *pairs, is_leaf=lambda x: isinstance(x, Encoded))


def _encoded_scales(
    found: calibration.Scales, fmt: formats.Format, name: str | None
) -> tuple[calibration.Scales, scales.Lost | None]:
    """Encodes scales in few bits, and says whether their second-level scales do not fit their dtype."""
    tiles, groups = found.scale.shape[-3:-1]
    if runs := scales.runs_of(name):
        return _in_runs(_from_zero(found, fmt), runs)
    if name == "e4m3":  # NVFP4: one scale for the tensor
        return _each(lambda x: _in_blocks(x, "fp8_e4m3", tiles, groups), found), None
    along = _largest_divisor(groups, _BLOCK)
    block = (_largest_divisor(tiles, _BLOCK // along) if along == groups else 1), along
    # Codes 0 to 255 without an offset, unless some scales are negative.
    code = "int8" if fmt.one_sided and not fmt.offset else "uint8"
    names: Any = code, None if found.offset is None else "int8"
    coded = _each(lambda x, name: _in_blocks(x, name, *block), found, calibration.Scales(*names))
    return coded, None


def _in_runs(
    found: calibration.Scales, runs: scales.Runs
) -> tuple[calibration.Scales, scales.Lost | None]:
    """Encodes scales in runs of consecutive ones; each run has a float16 scale."""
    wanted = _each(lambda x: _of_blocks(x, runs.format, 1, runs.length), found)
    held = _each(lambda x: x.astype(jnp.float16), wanted)
    if held.offset is not None:
        held = held._replace(offset=-held.offset)
    infinite = (~jnp.isfinite(x).all() for x in jax.tree.leaves(held))
    # (Scales of some runs may be too small, as for a neuron that is never used; not the largest one.)
    most = largest(wanted.scale)
    small = jnp.abs(most.astype(jnp.float16) - most) > most / 8
    lost = scales.Lost(functools.reduce(jnp.logical_or, infinite), small)
    return _each(lambda x, of_runs: _coded(x, of_runs, runs.format), found, held), lost


def _from_zero(found: calibration.Scales, fmt: formats.Format) -> calibration.Scales:
    """Lets ranges above zero begin at zero: offsets in runs are not positive."""
    if found.offset is None:
        return found
    above = found.offset > 0
    scale = jnp.where(above, found.scale + found.offset / fmt.largest, found.scale)
    return calibration.Scales(scale, jnp.where(above, 0, found.offset))


def _in_blocks(found: jax.Array, name: str, rows: int, along: int) -> Encoded:
    """Encodes scales `[..., tiles, groups, 1]` in blocks; each block has a scale."""
    return _coded(found, _of_blocks(found, name, rows, along), name)


def _of_blocks(found: jax.Array, name: str, rows: int, along: int) -> jax.Array:
    """Returns the second-level scale of each block of `rows` by `along` scales."""
    *lead, tiles, groups, _ = found.shape
    blocks = found.reshape(*lead, tiles // rows, rows, groups // along, along)
    return largest(jnp.abs(blocks), (-1, -3)) / formats.FORMATS[name].largest


def _in_same_blocks(held: calibration.Scales, found: calibration.Scales) -> calibration.Scales:
    """Encodes other scales with the second-level scales of `held`."""
    return _each(lambda old, new: _coded(new, old.scale, old.format), held, found)


@functools.lru_cache  # as for `scales.rounding`
def _nearest_of_codes(fmt: formats.Format) -> Callable[..., calibration.Scales]:
    """Returns a function from scales to the nearest ones that `_in_same_blocks` can hold."""

    def nearest(held: Any, found: calibration.Scales) -> calibration.Scales:
        if held.offset is not None and formats.FORMATS[held.offset.format].offset:
            found = _from_zero(found, fmt)
        return _each(lambda x: _decoded(x)[..., None], _in_same_blocks(held, found))

    return nearest


def _coded(found: jax.Array, of_scale: jax.Array, name: str) -> Encoded:
    """Encodes scales `[..., tiles, groups, 1]` with second-level scales."""
    whole = formats.by_rows(of_scale, found.shape[-3])
    blocks = found.reshape(*whole.shape, -1)
    codes = calibration.encode(blocks, whole[..., None], None, formats.FORMATS[name])
    return Encoded(formats.pack(codes, formats.FORMATS[name]), of_scale, None, name)


def _largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, max(min(n, most), 1) + 1) if n % d == 0)


def _codes(
    stored: jax.Array, held: calibration.Scales, fmt: formats.Format, inputs: gptq.Inputs | None
) -> jax.Array:
    """Returns the codes `[..., rows, groups, g]` of `[..., rows, k]`, given the stored scales."""

    def of_rows(x: Array) -> Array:
        dense = _decoded(x) if isinstance(x, Encoded) else x
        return formats.by_rows(dense, stored.shape[-2])[..., None]

    held = _each(of_rows, held)
    if inputs is not None and inputs.order is not None:
        return gptq.codes(stored, inputs, held, fmt)
    grouped = stored.reshape(*held.scale.shape[:-1], stored.shape[-1] // held.scale.shape[-2])
    return calibration.encode(grouped, *held, fmt)


def _decoded(x: Encoded) -> jax.Array:
    return formats.dequantize(x.codes, x.scale, x.offset, formats.FORMATS[x.format])


def _check_runs(name: str | None, length: int, group: int) -> None:
    """Raises unless the groups along an axis fill whole runs."""
    runs = scales.runs_of(name)
    if runs and length % (group * runs.length):
        raise value_error(
            f"scale_dtype: {name!r} has a scale for {runs.length} groups of {group}: expected an axis "
            f"whose length is a multiple of {group * runs.length}, got {length}"
        )


def _inputs_of(
    moments: Array, dtype: DType, inputs: Sequence[int], fmt: formats.Format
) -> gptq.Inputs:
    """The moments of inputs, after a check by the shape `[..., k]` of the inputs of each matrix."""
    moments, (*lead, k) = jnp.asarray(moments), inputs
    if moments.shape not in ((*lead, k, k), (*lead, k)):
        raise value_error(
            f"moments: expected shape {[*lead, k, k]} for groups along an axis of length {k} (or "
            f"{[*lead, k]}, the diagonal), got {list(moments.shape)}"
        )
    if moments.ndim == len(inputs):
        return gptq.Inputs(moments)
    return gptq.inputs_of(moments, formats.arithmetic_dtype(dtype), -k % fmt.multiple)


def _prescribed(name: str, given: Any, needed: Any, dtype: DType) -> Any:
    if given not in (None, needed):
        raise value_error(f"{name}: {dtype!r} has {needed!r}, got {given!r}; leave it out")
    return needed


def _fitting_tile(group_size: Any, core: tuple[int, ...], fmt: formats.Format) -> tuple[int, int]:
    """Returns the tile that shares a scale: the number of rows, and of elements in each."""
    rows, length = core
    if group_size is None or group_size == "tensor":
        return (1 if group_size is None else rows), length
    pair = group_size if isinstance(group_size, tuple | list) else (1, group_size)
    if len(pair) != 2 or not all(map(options.is_integer, pair)):
        raise value_error(
            "group_size: expected a number, a pair (rows, elements), 'tensor' or None, got "
            f"{group_size!r}"
        )
    tile, g = pair
    sizes = formats.group_sizes(length, fmt)
    if g != length and g not in sizes:
        whole = f" and are multiples of {fmt.multiple}" if fmt.multiple > 1 else ""
        raise ValueError(
            f"group_size: expected None or one of {sizes}, which divide the axis of length "
            f"{length}{whole}, got {group_size!r}"
            f" {see('groups-that-do-not-fit')}"
        )
    if tile < 1 or rows % tile:
        raise value_error(
            f"group_size: expected a tile whose rows divide the {rows} of the matrix, got "
            f"{group_size!r}"
        )
    return int(tile), int(g)


def _blocks(stored: jax.Array, tile: tuple[int, int]) -> jax.Array:
    """Returns `[..., tiles, groups, rows * g]`: the last axis has the elements that share a scale."""
    *lead, rows, k = stored.shape
    r, g = tile
    blocks = stored.reshape(*lead, rows // r, r, k // g, g).swapaxes(-2, -3)
    blocks = blocks.reshape(*lead, rows // r, k // g, r * g)
    return blocks.astype(formats.arithmetic_dtype(stored.dtype))
