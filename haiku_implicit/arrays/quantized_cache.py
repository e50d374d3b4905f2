"""`QuantizedCache`: a quantized array that is written to, the keys and values of attention.

What is written is quantized, and nothing else is quantized again.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.quantized_rows import as_index
from haiku_implicit.core.array import flatten
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix


@dataclasses.dataclass
class QuantizedCache(QuantizedMatrix, core_ndim=2):
    """A `QuantizedMatrix` that stays one when vectors are written into it: they are rounded.

    A cache `[batch, time, heads, depth]` is quantized along its last axis, with a scale for each
    position and head (or for each group of the depth). `jax.lax.dynamic_update_slice` and
    `.at[...].set` of whole vectors along that axis quantize these vectors alone. (Of a plain
    `QuantizedMatrix` such a write makes a dense array: a weight is not rounded where nobody said so.)

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> cache = hki.QuantizedCache.quantize(jnp.zeros((1, 16, 2, 64)), 'int8', axis=-1)
      >>> write = lambda cache, x, at: jax.lax.dynamic_update_slice(cache, x, (0, at, 0, 0))
      >>> cache = jax.jit(hki.use_implicit_args(write))(cache, jnp.ones((1, 1, 2, 64)), 3)
      >>> cache.nbytes / (16 * 2 * 64 * 4), float(hki.materialize(cache)[0, 3, 1, 0])
      (0.265625, 1.0)
    """


# To let the last of several writes to one place win, all pairs of them are compared.
_MOST_SCATTERED = 1024


@primitive_handler("dynamic_update_slice")
def write_slice(primitive: Any, w: QuantizedCache, new: jax.Array, *starts: jax.Array) -> Any:
    """Whole vectors at a position: they alone are quantized."""
    if not new.size:  # a prompt of no tokens, say
        return w
    if not _takes_vectors(w) or new.shape[-1] != w.shape[-1] or new.ndim < 2:
        return NotImplemented
    starts = (*starts[:-1], jnp.zeros_like(starts[-1]))
    return _write(w, new, lambda leaf, update: primitive.bind(leaf, update, *starts))


@primitive_handler("dynamic_update_slice")
def write_quantized_slice(
    primitive: Any, w: QuantizedCache, new: QuantizedMatrix, *starts: jax.Array
) -> Any:
    """The same of vectors that are quantized in the same way: their codes are copied."""
    if not (_takes_vectors(w) and _takes_vectors(new) and _alike(w, new)):
        return NotImplemented
    if new.shape[-1] != w.shape[-1]:
        return NotImplemented
    starts = (*starts[:-1], jnp.zeros_like(starts[-1]))
    leaves, treedef = flatten(w)
    updates = jax.tree.leaves(new)
    return treedef.unflatten(
        [
            primitive.bind(leaf, update, *starts)
            for leaf, update in zip(leaves, updates, strict=True)
        ]
    )


@primitive_handler("scatter")
def scatter_vectors(
    primitive: Any,
    w: QuantizedCache,
    indices: jax.Array,
    new: jax.Array,
    *,
    dimension_numbers: Any,
    unique_indices: bool,
    **params: Any,
) -> Any:
    """`w.at[..., ids, :].set(new)` of whole vectors: they alone are quantized."""
    d, last = dimension_numbers, w.ndim - 1
    if not new.size:
        return w
    if (
        not _takes_vectors(w)
        or last in {*d.inserted_window_dims, *d.operand_batching_dims}
        or new.ndim - 1 not in d.update_window_dims
        or new.shape[-1] != w.shape[-1]
    ):
        return NotImplemented
    clipped = params.get("mode") == jax.lax.GatherScatterMode.CLIP
    # A window as long as its axis has one place, if it is moved to within bounds.
    if last in d.scatter_dims_to_operand_dims and not clipped:
        return NotImplemented
    if not unique_indices and _num_windows(indices, d) > 1:
        # Codes and scales are written apart, and the order of writes to one place is not defined:
        # all of them write what the last one does.
        sizes = _window_sizes(w, new, d)
        places = _moved_into_bounds(indices, w, sizes, d) if clipped else indices
        winner = _last_of_equal(places, d)
        if winner is None or not _writes_single_places(w, sizes, d, clipped):
            return NotImplemented
        new = _take_updates(new, winner, d)

    def write(leaf: jax.Array, update: jax.Array) -> jax.Array:
        return primitive.bind(
            leaf, indices, update, dimension_numbers=d, unique_indices=unique_indices, **params
        )

    return _write(w, new, write)


def _takes_vectors(w: QuantizedMatrix) -> bool:
    """Whether vectors along the last axis have scales of their own."""
    return w.axis == -1 and w.scale.shape[-2] == w.codes.shape[-2] and w.rounded_to is None


def _write(w: QuantizedCache, new: jax.Array, write: Any) -> Any:
    """Quantizes vectors `[..., k]` as the matrix is, and writes each of their leaves."""
    vectors = new.astype(w.dtype)
    vectors = vectors[None] if vectors.ndim < 2 else vectors
    quantized = w.like(vectors)
    squeeze = (lambda x: x[0]) if new.ndim < 2 else (lambda x: x)

    def leaf(old: jax.Array, update: jax.Array) -> jax.Array:
        return write(old, squeeze(update).astype(old.dtype))

    return w._replace(
        codes=leaf(w.codes, quantized.codes),
        scale=leaf(w.scale, quantized.scale),
        offset=None if w.offset is None else leaf(w.offset, quantized.offset),
    )


def _alike(w: QuantizedCache, new: QuantizedMatrix) -> bool:
    same = (w.format, w.axis, w.padding, w.num_groups, w.dtype, new.rounded_to) == (
        new.format, new.axis, new.padding, new.num_groups, new.dtype, None
    )  # fmt: skip
    leaves = jax.tree.leaves(w), jax.tree.leaves(new)
    return same and [x.dtype for x in leaves[0]] == [x.dtype for x in leaves[1]]


def _num_windows(indices: jax.Array, d: Any) -> int:
    """How many windows are written to each element of the batch."""
    batching = d.scatter_indices_batching_dims
    return math.prod(n for i, n in enumerate(indices.shape[:-1]) if i not in batching)


def _window_sizes(w: QuantizedCache, new: jax.Array, d: Any) -> list[int]:
    """The length of a window along each axis of the cache."""
    gone = {*d.inserted_window_dims, *d.operand_batching_dims}
    lengths = iter([new.shape[i] for i in d.update_window_dims])
    return [1 if i in gone else next(lengths) for i in range(w.ndim)]


def _writes_single_places(w: QuantizedCache, sizes: list[int], d: Any, clipped: bool) -> bool:
    """Whether two windows are the same place, or have none in common."""
    return all(
        sizes[i] == 1 or (clipped and sizes[i] == w.shape[i])
        for i in d.scatter_dims_to_operand_dims
    )


def _moved_into_bounds(indices: jax.Array, w: QuantizedCache, sizes: list[int], d: Any) -> Any:
    """The index vectors of windows that are clipped: different ones may be the same place."""
    indices = as_index(indices)
    most = [w.shape[i] - sizes[i] for i in d.scatter_dims_to_operand_dims]
    return jnp.clip(indices, 0, jnp.array(most, indices.dtype))


def _last_of_equal(indices: jax.Array, d: Any) -> jax.Array | None:
    """For each index vector the last one that is equal to it, in its batch; None for very many."""
    indices = as_index(indices)
    shape = (*indices.shape[:-1], 1)
    places = [
        jax.lax.broadcasted_iota(indices.dtype, shape, i) for i in d.scatter_indices_batching_dims
    ]
    vectors = jnp.concatenate([indices, *places], axis=-1)
    flat = vectors.reshape(-1, vectors.shape[-1])
    if len(flat) > _MOST_SCATTERED:
        return None
    equal = (flat[:, None] == flat[None]).all(-1)
    return jnp.where(equal, jnp.arange(len(flat)), -1).max(-1)


def _take_updates(new: jax.Array, winner: jax.Array, d: Any) -> jax.Array:
    """The updates at these places among the index vectors."""
    window = list(d.update_window_dims)
    scattered = [i for i in range(new.ndim) if i not in window]
    front = jnp.moveaxis(new, scattered, range(len(scattered)))
    flat = front.reshape(-1, *front.shape[len(scattered) :])
    return jnp.moveaxis(flat[winner].reshape(front.shape), range(len(scattered)), scattered)
