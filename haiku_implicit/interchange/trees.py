"""Builds trees of parameters from the tensors in another library's file, by names."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays import axes as axes_of
from haiku_implicit.arrays.matrix_view import view_of
from haiku_implicit.core import compat
from haiku_implicit.core.messages import shown, value_error, warn_caller
from haiku_implicit.core.predicates import Targets, check_list, no_match, path_of, predicate_of
from haiku_implicit.core.progress import bar
from haiku_implicit.core.typing import Array, DType, Tree
from haiku_implicit.files.container import CheckpointError, expect
from haiku_implicit.interchange.names import Names, Place, places_of
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers.casts import may_overflow, overflows


class Stored(NamedTuple):
    """A tensor of a file that is not read yet.

    Attributes:
      name: its name in the file; for a quantized tensor, the name of the dense weight.
      shape: returns its shape, in the order of the file. This and `read` raise for a tensor that can't
        be read; neither is called for a tensor that is left out.
      read: returns a NumPy array, which may be a view of the file, or a `QuantizedMatrix` with groups
        along the last axis. With True it may return dense values instead, if a `QuantizedMatrix` cannot
        hold them; otherwise that is an error.
      uses: the names of the tensors that a quantized one consists of.
    """

    name: str
    shape: Callable[[], tuple[int, ...]]
    read: Callable[[bool], np.ndarray | QuantizedMatrix]
    uses: tuple[str, ...] = ()


class _Placed(NamedTuple):
    """A tensor, its place, its shape in the file, and the shape of the parameter."""

    stored: Stored
    place: Place
    in_file: tuple[int, ...]
    shape: tuple[int, ...]


def tree_of(
    tensors: Sequence[Stored],
    names: Names,
    where: str,
    *,
    dtype: DType | None,
    like: Tree,
    dequantize: Targets | None,
) -> dict[str, dict[str, Array]]:
    """Reads the tensors of a file one by one into a tree of parameters.

    Args:
      tensors: the tensors of the file.
      names: the place of each tensor.
      where: the file, for errors.
      dtype: the dtype of the parameters' values; None keeps the file's.
      like: `{module: {name: array or shape}}`: the expected parameters, or None.
      dequantize: the quantized parameters that become dense.

    Raises:
      CheckpointError: if the parameters differ from `like`.
      ValueError: for a `dtype` that is not floating, a tensor that `names` does not know, two
        for one parameter, or a place that does not fit the tensor.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise value_error(
            f"dtype: expected a floating dtype, or None for that of the file, got "
            f"{np.dtype(dtype).name}"
        )
    placed = _placed(tensors, names, where)
    if like is not None:
        _check_like(placed, like, where)
    dense = _dense_ones(placed, dequantize)
    tree: dict[str, dict[str, Array]] = {}
    with bar("reading", len(placed)) as run:
        for path, found in placed.items():
            module, _, name = path.rpartition("/")
            value = run(path, _read, found, where, dtype, path in dense)
            tree.setdefault(module, {})[name] = value
    return tree


# --- places --------------------------------------------------------------------------------------


def _placed(tensors: Sequence[Stored], names: Names, where: str) -> dict[str, _Placed]:
    """The tensors that are not left out, by the paths of their parameters."""
    placed: dict[str, _Placed] = {}
    pairs = [(x, place) for x in tensors for place in places_of(names, x.name, where)]
    for stored, place in pairs:
        path = place.path
        if not all(path.rpartition("/")[::2]):
            raise value_error(
                f"{where}: {stored.name}: names gives {path!r} for it, expected 'module/name'"
            )
        if path in placed:
            raise value_error(
                f"{where}: {path}: names gives two tensors this place, {placed[path].stored.name} and "
                f"{stored.name}"
            )
        shape = stored.shape()
        is_matrix = not stored.uses or (len(shape) > 1 and all(shape))
        about = "[..., outputs, inputs], none of them empty"
        expect(is_matrix, f"{where}: {stored.name}", about, list(shape))
        own = _shape_at(shape, place, f"{where}: {stored.name}")
        placed[path] = _Placed(stored, place, shape, own)
    return placed


def _shape_at(shape: tuple[int, ...], place: Place, where: str) -> tuple[int, ...]:
    """The shape of the parameter that a tensor becomes."""
    try:
        moved = tuple(shape[i] for i in place.axes_for(len(shape)))
    except ValueError as e:
        raise value_error(f"{where} {list(shape)}: {e}") from None
    if place.shape is None:
        return moved
    if math.prod(place.shape) != math.prod(moved):
        raise value_error(
            f"{where}: expected {math.prod(place.shape)} numbers for {place.path} "
            f"{list(place.shape)}, got {list(moved)}"
        )
    return tuple(place.shape)


def _check_like(placed: Mapping[str, _Placed], like: Tree, where: str) -> None:
    wanted = {
        path_of(module, name): tuple(np.shape(x))
        for module, own in like.items()
        for name, x in own.items()
    }
    wrong = [
        f"{path}: expected {list(shape)}, no tensor has this place"
        for path, shape in wanted.items()
        if path not in placed
    ]
    for path, (stored, _, in_file, shape) in placed.items():
        if path not in wanted:
            wrong.append(f"{path}: the model has no such parameter, {stored.name} has this place")
        elif shape != wanted[path]:
            expected = f"expected {list(wanted[path])}, got {list(shape)}"
            wrong.append(f"{path}: {expected} of {stored.name} {list(in_file)}")
    if wrong:
        raise CheckpointError(
            f"{where}: not the parameters of `like`: {shown(wrong, separator='; ')}"
        )


def _dense_ones(placed: Mapping[str, _Placed], dequantize: Targets | None) -> set[str]:
    """The paths that `dequantize` chooses."""
    chosen = predicate_of("dequantize", dequantize, lambda module_name, name, value: False)
    check_list("dequantize", dequantize, list(placed))
    found = set()
    for path, own in placed.items():
        module, _, name = path.rpartition("/")
        if chosen(module, name, jax.ShapeDtypeStruct(own.shape, jnp.float32)):
            found.add(path)
    if isinstance(dequantize, str) and not found:
        raise no_match("dequantize", dequantize, list(placed))
    return found


# --- values --------------------------------------------------------------------------------------


def _read(placed: _Placed, where: str, dtype: DType, dense: bool) -> Array:
    """Reads a tensor as a parameter."""
    stored, place, in_file, shape = placed
    try:
        with np.errstate(all="ignore"):  # infinite scales and NaN come from the file
            value = stored.read(dense)
        axes = place.axes_for(len(in_file))
        if dense and isinstance(value, QuantizedMatrix):
            value = value if dtype is None else value._replace(dtype=np.dtype(np.float32))
            value = np.asarray(value.materialize())
        if isinstance(value, QuantizedMatrix):
            new: Array = _as_placed(value, place, axes, shape, dtype)
            if dtype is not None and may_overflow(value.dtype, dtype):
                _cast(np.asarray(value.materialize()), dtype, f"{where}: {stored.name}")  # warns
        else:
            host = _cast(value.transpose(axes).reshape(shape), dtype, f"{where}: {stored.name}")
            same = jax.dtypes.canonicalize_dtype(host.dtype) == host.dtype
            new = compat.on_device(host) if same else host  # JAX would drop bits
    except CheckpointError:
        raise
    except ValueError as e:
        raise value_error(f"{where}: {stored.name}: {e}") from e
    # One at a time: JAX computes after it returns, and needs memory for that.
    return jax.block_until_ready(new)


def _cast(value: np.ndarray, dtype: DType, where: str) -> np.ndarray:
    """A copy of a tensor's values, with this dtype if they are floating; warns of an overflow."""
    floating = dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
    # Always a copy: JAX may use the memory of its argument, and this may be a mapped file.
    copy = _aligned(value.shape, dtype if floating else value.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        copy[...] = value
    if floating and overflows(value, copy):
        warn_caller(
            f"{where}: has numbers that {np.dtype(dtype).name} does not have, which are beyond its "
            "range: they become infinite or NaN. dtype=None keeps the dtype of the file"
        )
    return copy


def _aligned(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """An array that JAX uses on a CPU without a copy, since it begins at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def _as_placed(
    value: QuantizedMatrix,
    place: Place,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: DType,
) -> Array:
    """A matrix with groups along its last axis, converted to the axes and the shape of a place."""
    lead = len(axes) - 2
    if axes[:lead] != tuple(range(lead)):
        raise value_error(
            f"{place.path}: axes: of a quantized tensor only the last two axes can change places, got "
            f"{axes}. dequantize={place.path!r} makes it dense"
        )
    axis = -1 if axes[-2] < axes[-1] else -2
    value = value._replace(axis=axis, dtype=value.dtype if dtype is None else np.dtype(dtype))
    if value.shape == shape:
        return value
    same = shape[:lead] == value.shape[:lead]
    made = axes_of.reshaped(axes_of.whole(value.shape[lead:]), shape[lead:]) if same else None
    if made is None:
        raise value_error(
            f"{place.path}: shape: expected the rows and the columns of {list(value.shape)}, each cut "
            f"into axes, got {list(shape)}. dequantize={place.path!r} makes it dense"
        )
    return view_of(value, made)
