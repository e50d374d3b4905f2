"""Ragged products: each row is multiplied by the matrix of its group, a tile of rows at a time.

The rows come sorted by group, as in a mixture of experts. They are cut into tiles of rows of one group,
as in block-sparse products of experts (MegaBlocks, arXiv:2211.15841), and a loop multiplies tile after
tile with the stored matrix of its group. So at most one matrix is decoded at a time, matrices of groups
without rows are hardly read, and the number of operations is about the number that the rows need. (On a
CPU, JAX's own product multiplies all rows with the matrices of all groups.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import Sharding

from haiku_implicit.core.binary import BinaryCall
from haiku_implicit.core.sharding import is_split
from haiku_implicit.core.typing import Array, EqnParam, Result
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.products.blocks import slices
from haiku_implicit.quantized.products.by_parts import (
    Fixed,
    by_parts,
    is_wanted,
)
from haiku_implicit.quantized.products.partitioned import WHOLE, Axes, Parts, Pieces
from haiku_implicit.quantized.products.stored import quantized_dot
from haiku_implicit.quantized.products.tiles import tiles_of


class RowNumbers(NamedTuple):
    """The axes of a product of `[batch..., m, k]` and stacked matrices `[group, batch..., k, n]`.

    The operands may have these axes in another order; the last two axes of the second operand are `k`
    and `n`, in any order.

    Attributes:
      x_rows, x_contracted: the axes `m` and `k` of the first operand.
      w_group, w_contracted: the axes of the groups and `k` of the second operand.
      x_batch, w_batch: the batch axes.
    """

    x_rows: int
    x_contracted: int
    w_group: int
    w_contracted: int
    x_batch: tuple[int, ...]
    w_batch: tuple[int, ...]

    def without_batch(self) -> "RowNumbers":
        """Returns the axes for one element of the first batch axes."""
        x, w = self.x_batch[0], self.w_batch[0]
        rows, x_contracted, *x_batch = (
            i - (i > x) for i in (self.x_rows, self.x_contracted, *self.x_batch[1:])
        )
        group, w_contracted, *w_batch = (
            i - (i > w) for i in (self.w_group, self.w_contracted, *self.w_batch[1:])
        )
        return RowNumbers(rows, x_contracted, group, w_contracted, tuple(x_batch), tuple(w_batch))

    def of_result(self) -> "RowNumbers":
        """Returns the axes for a next product, with the result `[batch..., m, n]` as first operand."""
        n = len(self.x_batch)
        return self._replace(x_rows=n, x_contracted=n + 1, x_batch=tuple(range(n)))

    def axes(self, sizes_ndim: int, pieces: Pieces = ()) -> Axes:
        """Names the axes of all operands and of the result.

        Args:
          sizes_ndim: how many axes the sizes of the groups have.
          pieces: see `Axes`.
        """
        batch = [f"batch{i}" for i in range(len(self.x_batch))]
        of_x: dict[int, str] = dict(zip(self.x_batch, batch, strict=True))
        of_x |= {self.x_rows: "rows", self.x_contracted: "inputs"}
        of_w: dict[int, str] = dict(zip(self.w_batch, batch, strict=True))
        of_w |= {self.w_group: "groups", self.w_contracted: "inputs"}
        operands = (
            tuple(of_x[i] for i in range(len(of_x))),
            tuple(of_w.get(i, "outputs") for i in range(len(of_w) + 1)),
            (*(batch if sizes_ndim > 1 else ()), None),
        )
        return Axes(operands, (*batch, "rows", "outputs"), pieces)


def row_numbers(
    x: Array,
    w: Array,
    *,
    ragged_dot_dimension_numbers: Any,
    group_offset: Array = None,
    out_sharding: Sharding | None = None,
    **options: Any,
) -> RowNumbers | None:
    """Returns the axes of a product of rows with the matrices of their groups; None for other products.

    (Also None if it is split over explicit axes of a mesh, if lengths are symbolic, or if it is empty.)

    Args:
      x, w: the operands.
      ragged_dot_dimension_numbers: as for `jax.lax.ragged_dot_general`, like all that follow.
      group_offset, out_sharding: as for JAX.
      **options: the other parameters, which do not matter here.
    """
    numbers, operands = ragged_dot_dimension_numbers, (x, w)
    contracted, batch = numbers.dot_dimension_numbers
    of_each = zip(operands, contracted, batch, strict=True)
    rest, _ = ([i for i in range(y.ndim) if i not in (*c, *b)] for y, c, b in of_each)
    if rest != list(numbers.lhs_ragged_dimensions) or len(contracted[0]) != 1:
        return None
    ((x_contracted,), (w_contracted,)), (group,) = contracted, numbers.rhs_group_dimensions
    if {group, *batch[1]} != {*range(w.ndim - 2)}:
        return None
    if group_offset is not None or is_split([out_sharding, x, w]) or 0 in w.shape:
        return None
    if any(map(export.is_symbolic_dim, (*x.shape, *w.shape))):
        return None
    x_batch, w_batch = (tuple(map(int, axes)) for axes in batch)
    return RowNumbers(rest[0], int(x_contracted), int(group), int(w_contracted), x_batch, w_batch)


def quantized_ragged_dot(
    x: jax.Array, q: QuantizedMatrix, group_sizes: jax.Array, **params: EqnParam
) -> Result:
    """Computes `jax.lax.ragged_dot_general(x, q, group_sizes)`, and decodes one matrix at a time.

    The backward pass keeps the codes and the scales, and decodes them again.

    Args:
      x: `[batch..., m, k]`.
      q: the stored matrices, `[group, batch..., k, n]`.
      group_sizes: how many rows each group has, `[group]` or `[batch..., group]`; rows that are in no
        group give zeros.
      **params: the parameters of `ragged_dot_general`.

    Returns:
      `[batch..., m, n]`, JAX's result for the dense `q`, up to the order of its sums; NotImplemented
      for other products, and for activations that are rounded together.
    """
    numbers = row_numbers(x, q, **params)
    if numbers is None or not q.activation_config.by_rows:
        return NotImplemented
    options = params.get("precision"), params.get("preferred_element_type")
    fun = Fixed(_of_stored, (numbers, options))
    if not is_wanted(x, q, group_sizes):
        return _run(fun, x, q, group_sizes)
    # The rounding of activations needs whole rows.
    pieces = () if q.activation is None else (("inputs", 1),)
    return by_parts(fun, numbers.axes(group_sizes.ndim, pieces), x, q, group_sizes, dense=False)


# Jitted, because eager code would allocate each intermediate value.
@functools.partial(jax.jit, static_argnums=0)
def _run(fun: Any, *operands: jax.Array) -> jax.Array:
    return fun(*operands, parts=WHOLE)


def _of_stored(
    numbers: RowNumbers,
    options: tuple[Any, Any],
    x: jax.Array,
    q: QuantizedMatrix,
    sizes: jax.Array,
    parts: Parts,
) -> jax.Array:
    """Computes the product with stored matrices; `options` are precision and dtype."""
    precision, dtype = options
    params = dict(precision=precision, preferred_element_type=dtype, out_sharding=None)

    def multiply(rows: jax.Array, q: QuantizedMatrix, groups: jax.Array, contract: int) -> Array:
        numbers = (((1,), (contract,)), ((), ()))
        call = BinaryCall(
            jax.lax.dot_general_p, params | dict(dimension_numbers=numbers), w_first=False
        )

        # Checkpointed, or the loop would keep the codes of each tile for the backward pass.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def one(rows: jax.Array, group: jax.Array) -> jax.Array:
            part = jax.tree.map(lambda leaf: leaf[0], slices(q, group, 1, 0))
            return quantized_dot(call, rows, part.with_row_scales())

        return jax.lax.map(lambda tile: one(*tile), (rows, groups))

    return _in_tiles(multiply, x, q, sizes, numbers, parts)


def small_ragged_dot(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, numbers: RowNumbers, **options: Any
) -> jax.Array:
    """Computes a ragged product with small dense matrices: each tile gets a copy of its matrix.

    JAX's own product copies the rows for each group, and so does its derivative.

    Args:
      x, w: the operands.
      group_sizes: as for `quantized_ragged_dot`.
      numbers: the axes.
      **options: parameters of `jax.lax.dot_general`.
    """
    fun = Fixed(_of_dense, (numbers, tuple(options.items())))
    if not is_wanted(x, w, group_sizes):
        return fun(x, w, group_sizes, parts=WHOLE)
    return by_parts(fun, numbers.axes(group_sizes.ndim), x, w, group_sizes)


def _of_dense(
    numbers: RowNumbers,
    options: tuple[tuple[str, Any], ...],
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    parts: Parts,
) -> jax.Array:
    """Computes the product with dense matrices; `options` are parameters of `dot_general`."""

    def multiply(rows: jax.Array, w: jax.Array, groups: jax.Array, contract: int) -> jax.Array:
        numbers = (((2,), (1 + contract,)), ((0,), (0,)))
        return jax.lax.dot_general(rows, w[groups], numbers, out_sharding=None, **dict(options))

    return _in_tiles(multiply, x, w, sizes, numbers, parts)


def _in_tiles(
    multiply: Callable[..., jax.Array],
    x: jax.Array,
    w: Array,
    sizes: jax.Array,
    numbers: RowNumbers,
    parts: Parts,
) -> jax.Array:
    """Computes a ragged product `[batch..., m, n]` in tiles.

    Args:
      multiply: a function from the rows of tiles `[tiles, rows, k]`, the stacked matrices, the group of
        each tile, and the contracted axis of a matrix, to `[tiles, rows, n]`.
      x, w: the operands of the product.
      sizes: the sizes of the groups, `[group]` or `[batch..., group]`.
      numbers: the axes.
      parts: the parts of all rows and groups that `x` and `w` are; `sizes` is for all of them.
    """
    if numbers.x_batch:
        # All leaves of an implicit array have its batch axes.
        axes = numbers.x_batch[0], numbers.w_batch[0], 0 if sizes.ndim > 1 else None
        one = functools.partial(_in_tiles, multiply, numbers=numbers.without_batch(), parts=parts)
        return jax.vmap(one, axes)(x, w, sizes)
    x = jnp.transpose(x, (numbers.x_rows, numbers.x_contracted))
    num_groups = w.shape[0]
    tiles = tiles_of(
        sizes,
        len(x),
        first_row=parts.index("rows") * len(x),
        first_group=parts.index("groups") * num_groups,
        num_groups=num_groups,
    )
    rows = x.at[tiles.rows].get(mode="fill", fill_value=0)
    outs = multiply(rows, w, tiles.groups, numbers.w_contracted - 1)
    outs = outs.reshape(-1, outs.shape[-1])
    return outs.at[tiles.places].get(mode="fill", fill_value=0)
