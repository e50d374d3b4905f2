"""Rows of a weight in pieces of one shape, so that weights of all shapes share a compiled program.

JAX compiles a program for each shape. On a CPU this takes longer than quantizing most weights.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.literals import at_trace_time

_PIECE = 1 << 17  # numbers: few calls, and all temporary arrays stay in the cache
_COLUMNS = 64  # that are transposed at a time, for the same reason


def can_be_cut(x: jax.Array) -> bool:
    """Whether an array is in the memory of one CPU, not empty, and of a dtype that JAX has now."""
    if isinstance(x, jax.core.Tracer) or compat.is_traced() or x.size == 0:
        return False
    if not isinstance(x.sharding, jax.sharding.SingleDeviceSharding) or x.dtype == np.float64:
        return False
    (device,) = x.devices()
    return device.platform == "cpu" and jax.sharding.get_abstract_mesh().empty


def on_host(x: jax.Array, transposed: bool) -> np.ndarray:
    """Returns an array for which `can_be_cut` is true as NumPy has it, perhaps with swapped axes."""
    with at_trace_time():  # `jax.transfer_guard` should not count this as a transfer
        return _swapped(np.asarray(x)) if transposed else np.asarray(x)


def map_rows(fun: Callable[[Any], Any], rows: Any) -> Any:
    """Calls a function with pieces of a matrix, all of one shape.

    Args:
      fun: a function of rows `[n, width]` that returns a tree of arrays `[n, ...]` and of numbers.
      rows: all rows, `[..., width]`; or a tree of such arrays, whose first one is the widest.

    Returns:
      The results for the pieces, joined. Numbers become an array of one for each piece.
    """
    first = jax.tree.leaves(rows)[0]
    size, count = max(_PIECE // first.shape[-1], 1), len(first)

    def piece(start: int) -> Any:
        return jax.tree.map(lambda x: _filled(x[start : start + size], size), rows)

    with at_trace_time():
        found = [fun(piece(i)) for i in range(0, count, size)]
        return jax.tree.map(
            lambda *parts: np.concatenate(list(map(np.atleast_1d, parts)))[:count], *found
        )


def _filled(x: np.ndarray, size: int) -> np.ndarray:
    """Rows, with rows of zeros after them for this number of rows."""
    if len(x) == size:
        return x
    new = np.zeros((size, *x.shape[1:]), x.dtype)
    new[: len(x)] = x
    return new


def _swapped(x: np.ndarray) -> np.ndarray:
    """A copy with the last two axes swapped; NumPy's own takes four times as long if it is large."""
    *lead, k, rows = x.shape
    new = np.empty((*lead, rows, k), x.dtype)
    for old_matrix, matrix in zip(x.reshape(-1, k, rows), new.reshape(-1, rows, k), strict=True):
        for i in range(0, rows, _COLUMNS):
            matrix[i : i + _COLUMNS] = np.ascontiguousarray(old_matrix[:, i : i + _COLUMNS]).T
    return new


def put_beside(x: np.ndarray, other: jax.Array) -> jax.Array:
    """Puts an array on the device of another one; it stays uncommitted if the other one is."""
    with at_trace_time():
        return jax.device_put(x, other.sharding if other.committed else None)
