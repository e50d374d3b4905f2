"""`QuantizedCache`: a quantized array that accepts writes, for the keys and values of attention.

A write quantizes only the written vectors.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from haiku_implicit.core.array import flatten
from haiku_implicit.core.compat import vary_like
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.typing import EqnParam, Primitive, Result
from haiku_implicit.quantized.matrix import QuantizedMatrix


@dataclasses.dataclass
class QuantizedCache(QuantizedMatrix, core_ndim=2, may_be_wrapped=False):
    """A `QuantizedMatrix` that stays quantized when vectors are written into it: they are rounded.

    A cache `[batch, time, heads, depth]` is quantized along its last axis, with a scale for each
    position and head (or for each group of the depth). `jax.lax.dynamic_update_slice` and
    `.at[...].set` of whole vectors along that axis quantize only these vectors. (In a plain
    `QuantizedMatrix` such a write makes a dense array: a weight is not rounded unless requested.)

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> cache = hki.QuantizedCache.quantize(jnp.zeros((1, 16, 2, 64)), 'int8', axis=-1)
      >>> write = lambda cache, x, at: jax.lax.dynamic_update_slice(cache, x, (0, at, 0, 0))
      >>> cache = jax.jit(hki.use_implicit_args(write))(cache, jnp.ones((1, 1, 2, 64)), 3)
      >>> cache.nbytes / (16 * 2 * 64 * 4), float(hki.materialize(cache)[0, 3, 1, 0])
      (0.265625, 1.0)
    """

    def divided(self, counts: Sequence[int]) -> Self:
        """The cache itself: smaller groups would round later writes to other numbers."""
        return self


@primitive_handler("dynamic_update_slice")
def write_slice(
    primitive: Primitive,
    w: QuantizedCache,
    new: jax.Array | QuantizedMatrix,
    *starts: jax.Array,
) -> Result:
    """Writes whole vectors at a position: quantizes them, or copies codes of the same kind."""
    if not new.size:  # a prompt of no tokens, say
        return w
    if not _takes_vectors(w) or new.shape[-1] != w.shape[-1] or new.ndim < 2:
        return NotImplemented
    if not isinstance(new, QuantizedMatrix):
        new = w.like(new.astype(w.dtype))
    elif not _takes_vectors(new) or _kind(w) != _kind(new):
        return NotImplemented
    starts = (*starts[:-1], jnp.zeros_like(starts[-1]))
    return _write(w, new, lambda leaf, update: primitive.bind(leaf, update, *starts))


@primitive_handler("scatter")
def scatter_vectors(
    primitive: Primitive,
    w: QuantizedCache,
    indices: jax.Array,
    new: jax.Array,
    *,
    dimension_numbers: jax.lax.ScatterDimensionNumbers,
    **params: EqnParam,
) -> Result:
    """Writes whole vectors by `w.at[..., ids, :].set(new)`, and quantizes only these."""
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
    # A window as long as its axis fits in one place, if the mode moves it within bounds.
    clipped = params["mode"] == jax.lax.GatherScatterMode.CLIP
    if last in d.scatter_dims_to_operand_dims and not clipped:
        return NotImplemented
    if not params["unique_indices"] and math.prod(indices.shape[:-1]) > 1:
        new = _last_writes(w, indices, new, d, params["mode"])
    vectors = new.astype(w.dtype)
    quantized = w.like(vectors[None] if new.ndim < 2 else vectors)
    if new.ndim < 2:
        quantized = jax.tree.map(lambda leaf: leaf[0], quantized)

    def write(leaf: jax.Array, update: jax.Array) -> jax.Array:
        return primitive.bind(leaf, indices, update, dimension_numbers=d, **params)

    return _write(w, quantized, write)


def _takes_vectors(w: QuantizedMatrix) -> bool:
    """Whether each vector along the last axis has its own scales."""
    return w.axis == -1 and w.scale.shape[-2] == w.codes.shape[-2] and w.rounded_to is None


def _write(
    w: QuantizedCache, new: QuantizedMatrix, write: Callable[[jax.Array, jax.Array], jax.Array]
) -> QuantizedCache:
    """Writes each leaf of quantized vectors into the cache's leaf."""
    leaves, treedef = flatten(w)
    updates = jax.tree.leaves(new)
    # In `shard_map`, scales that devices share differ after a write to one device's part.
    leaves = [vary_like(x, (*leaves, *updates)) for x in leaves]
    return treedef.unflatten(
        [write(x, update.astype(x.dtype)) for x, update in zip(leaves, updates, strict=True)]
    )


def _kind(w: QuantizedMatrix) -> tuple[Any, ...]:
    """A key that is equal for matrices whose codes and scales mean the same."""
    dtypes = (leaf.dtype for leaf in jax.tree.leaves(w))
    return w.format, w.axis, w.padding, w.num_groups, w.dtype, *dtypes


def _last_writes(
    w: QuantizedCache,
    indices: jax.Array,
    new: jax.Array,
    d: jax.lax.ScatterDimensionNumbers,
    mode: jax.lax.GatherScatterMode,
) -> jax.Array:
    """The updates, each replaced by the last update that is written to the same position.

    Codes and scales are written separately, and the order of writes to one position is not defined. So
    all of them write the same values. The last update is found by numbers that are written and read in
    the same way.
    """
    scattered = [i for i in range(new.ndim) if i not in d.update_window_dims]
    front = jnp.moveaxis(new, scattered, range(len(scattered)))
    shape = (*front.shape[:-1], 1)
    numbers = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    numbers = jnp.moveaxis(numbers, range(len(scattered)), scattered)
    nothing = jnp.full((*w.shape[:-1], 1), -1, jnp.int32)
    written = jax.lax.scatter_max(nothing, indices, numbers, d, mode=mode)
    gone = (*d.inserted_window_dims, *d.operand_batching_dims)
    lengths = iter([numbers.shape[i] for i in d.update_window_dims])
    as_gather = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(d.update_window_dims),
        collapsed_slice_dims=tuple(d.inserted_window_dims),
        start_index_map=tuple(d.scatter_dims_to_operand_dims),
        operand_batching_dims=tuple(d.operand_batching_dims),
        start_indices_batching_dims=tuple(d.scatter_indices_batching_dims),
    )
    sizes = [1 if i in gone else next(lengths) for i in range(w.ndim)]
    last = jax.lax.gather(written, indices, as_gather, sizes, mode=mode, fill_value=0)
    return front.reshape(-1, new.shape[-1])[last[..., 0]]
