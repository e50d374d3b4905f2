"""Computations in blocks along an axis: large intermediate values exist for one block at a time.

`over_blocks` runs a function block after block and joins the results; `slices` cuts a block out of
each leaf of a tree.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Array

Tree = TypeVar("Tree")

# Products with matrices of more elements than this are computed in blocks.
BLOCKED_FROM = 1 << 18


def over_blocks(
    fun: Callable[[Any, int], Any],
    length: int,
    size: int,
    axis: int | None = None,
    combine: Callable[[Any, Any], Any] = jnp.add,
    start: float = 0.0,
) -> Any:
    """Joins the results of a function for the blocks of an axis.

    Args:
      fun: called as `fun(start, size)`, returns a tree of arrays.
      length: the length of the axis to cut.
      size: the size of the blocks, at most `length`. If results are combined, the rest is one more
        block, which takes memory in addition.
      axis: the axis of the results along which to concatenate them, not negative; None: combine them.
      combine: a function of two results, their sum by default.
      start: the neutral number of `combine`.
    """
    count, rest = divmod(length, size)
    if length == size:
        return fun(0, length)
    if axis is None:

        def add(total: Array, i: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(combine, total, fun(i * size, size)), None

        if rest:
            first = fun(count * size, rest)
        else:
            structs = jax.eval_shape(lambda: fun(0, size))
            first = jax.tree.map(
                lambda s: compat.vary_like(jnp.full(s.shape, start, s.dtype), [s]), structs
            )
        return jax.lax.scan(add, first, jnp.arange(count))[0]
    # The last block may overlap the one before it, so that one program computes all blocks.
    starts = jnp.minimum(jnp.arange(count + bool(rest)) * size, length - size)
    _, blocks = jax.lax.scan(lambda _, start: (None, fun(start, size)), None, starts)
    return jax.tree.map(functools.partial(_joined, rest=rest, axis=axis), blocks)


def _joined(blocks: jax.Array, rest: int, axis: int) -> jax.Array:
    """Concatenates stacked blocks along an axis; takes only the rest of the last one, if any."""
    whole = blocks[:-1] if rest else blocks
    whole = jax.lax.collapse(jnp.moveaxis(whole, 0, axis), axis, axis + 2)
    if not rest:
        return whole
    last = jax.lax.slice_in_dim(blocks[-1], -rest, None, axis=axis)
    return jnp.concatenate([whole, last], axis=axis)


def slices(tree: Tree, start: Array, size: int, axis: int) -> Tree:
    """Returns a slice of each leaf along an axis."""
    return jax.tree.map(lambda leaf: _slice(leaf, start, size, axis), tree)


def _slice(x: jax.Array, start: Array, size: int, axis: int) -> jax.Array:
    if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, np.inexact):
        return _slice_of_bytes(x, start, size, axis)
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _slice_of_bytes(x: jax.Array, start: Array, size: int, axis: int) -> jax.Array:
    """Slices 8-bit floats as bytes: XLA on a CPU would first cast the whole array to a wider dtype."""
    part = jax.lax.bitcast_convert_type(x, jnp.uint8)
    part = jax.lax.dynamic_slice_in_dim(part, start, size, axis=axis)
    return jax.lax.bitcast_convert_type(part, x.dtype)


@_slice_of_bytes.defjvp
def _slice_of_bytes_jvp(
    size: int, axis: int, primals: Sequence[Array], tangents: Sequence[Array]
) -> Any:
    (x, start), (of_x, _) = primals, tangents
    tangent = jax.lax.dynamic_slice_in_dim(of_x, start, size, axis=axis)
    return _slice_of_bytes(x, start, size, axis), tangent
