"""Ragged products, in which each row meets the matrix of its group, a tile of rows at a time.

The rows come sorted by group, as those of a mixture of experts do. They are cut into tiles of rows of
one group, as block-sparse products of experts do it (MegaBlocks, arXiv:2211.15841), and a loop
multiplies tile after tile with the stored matrix of its group. So no more than one matrix is decoded at
a time, matrices of groups without rows are hardly read, and the number of operations is about what the
rows ask for. (JAX's own product multiplies all rows with the matrices of all groups on a CPU.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from haiku_implicit.core.sharding import is_split
from haiku_implicit.numerics.options import activation_of
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products.blocks import slices
from haiku_implicit.products.stored import quantized_dot
from haiku_implicit.products.tiles import tiles_of


class RowNumbers(NamedTuple):
    """The axes of a product of `[batch..., m, k]` and stacked matrices `[group, batch..., k, n]`.

    Each may have them in another order, the second one with `k` and `n` (in any order) as its last two.

    Attributes:
      x_rows, x_contracted: the axes `m` and `k` of the first operand.
      w_group, w_contracted: the axes of the groups and `k` of the second one.
      x_batch, w_batch: the batch axes.
    """

    x_rows: int
    x_contracted: int
    w_group: int
    w_contracted: int
    x_batch: tuple[int, ...]
    w_batch: tuple[int, ...]

    def without_batch(self) -> "RowNumbers":
        """The same for one element of the first batch axes."""
        x, w = self.x_batch[0], self.w_batch[0]
        of_x, of_w = (lambda i: i - (i > x)), (lambda i: i - (i > w))
        return RowNumbers(
            of_x(self.x_rows),
            of_x(self.x_contracted),
            of_w(self.w_group),
            of_w(self.w_contracted),
            tuple(map(of_x, self.x_batch[1:])),
            tuple(map(of_w, self.w_batch[1:])),
        )

    def of_result(self) -> "RowNumbers":
        """The same for the result as the first operand, whose axes are `[batch..., m, k]`."""
        n = len(self.x_batch)
        return self._replace(x_rows=n, x_contracted=n + 1, x_batch=tuple(range(n)))


def row_numbers(
    x: Any,
    w: Any,
    *,
    ragged_dot_dimension_numbers: Any,
    group_offset: Any = None,
    out_sharding: Any = None,
    **options: Any,
) -> RowNumbers | None:
    """The axes of a product of rows with the matrices of their groups; None where it is another one.

    (Or is split over explicit axes of a mesh, or of lengths that are not known, or empty.)

    Args:
      x, w: the operands.
      ragged_dot_dimension_numbers: as for `jax.lax.ragged_dot_general`, like all that follow.
      group_offset, out_sharding: these.
      **options: the others, which make no difference.
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
    x: jax.Array, q: QuantizedMatrix, group_sizes: jax.Array, **params: Any
) -> Any:
    """`jax.lax.ragged_dot_general(x, q, group_sizes)`, which decodes one matrix at a time.

    For the backward pass the codes and the scales are kept, and decoded anew.

    Args:
      x: `[batch..., m, k]`.
      q: the stored matrices, `[group, batch..., k, n]`.
      group_sizes: how many rows each group has, `[group]` or `[batch..., group]`; rows that are in no
        group give zeros.
      **params: the parameters of `ragged_dot_general`.

    Returns:
      `[batch..., m, n]`, what JAX returns for the dense `q`, up to the order of its sums;
      NotImplemented for other products, and for activations that are rounded together.
    """
    numbers = row_numbers(x, q, **params)
    by_rows = q.activation is None or activation_of(q.activation).by_rows
    if numbers is None or not by_rows:
        return NotImplemented
    kept = {name: params.get(name) for name in ("precision", "preferred_element_type")}
    return _quantized(x, q, group_sizes, numbers, tuple(kept.items()))


# Jitted, as eager code would lay out each intermediate value anew.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _quantized(
    x: jax.Array, q: QuantizedMatrix, sizes: jax.Array, numbers: RowNumbers, options: Any
) -> jax.Array:
    def multiply(
        rows: jax.Array, q: QuantizedMatrix, groups: jax.Array, contract: int
    ) -> jax.Array:
        # Checkpointed, or the loop would keep the codes of each tile for the backward pass.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def one(rows: jax.Array, group: jax.Array) -> jax.Array:
            part = jax.tree.map(lambda leaf: leaf[0], slices(q, group, 1, 0))
            return quantized_dot(
                rows, part, (((1,), (contract,)), ((), ())), out_sharding=None, **dict(options)
            )

        return jax.lax.map(lambda tile: one(*tile), (rows, groups))

    return _in_tiles(multiply, x, q, sizes, numbers)


def small_ragged_dot(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, numbers: RowNumbers, **options: Any
) -> jax.Array:
    """The same of dense matrices that are small beside the rows: each tile gets a copy of its own.

    JAX's own product copies the rows for each group, and so does its derivative.

    Args:
      x, w: the operands.
      group_sizes: as for `quantized_ragged_dot`.
      numbers: the axes.
      **options: parameters of `jax.lax.dot_general`.
    """

    def multiply(rows: jax.Array, w: jax.Array, groups: jax.Array, contract: int) -> jax.Array:
        numbers = (((2,), (1 + contract,)), ((0,), (0,)))
        return jax.lax.dot_general(rows, w[groups], numbers, **options)

    return _in_tiles(multiply, x, w, group_sizes, numbers)


def _in_tiles(
    multiply: Callable[..., jax.Array], x: jax.Array, w: Any, sizes: jax.Array, numbers: RowNumbers
) -> jax.Array:
    """`[batch..., m, n]`.

    Args:
      multiply: from the rows of tiles `[tiles, rows, k]`, the stacked matrices, the group of each tile,
        and which axis of a matrix is contracted, to `[tiles, rows, n]`.
      x, w: the operands of the product.
      sizes: of the groups, `[group]` or `[batch..., group]`.
      numbers: the axes.
    """
    if numbers.x_batch:
        # Whatever leaves an array has, it has its batch axes.
        axes = numbers.x_batch[0], numbers.w_batch[0], 0 if sizes.ndim > 1 else None
        one = functools.partial(_in_tiles, multiply, numbers=numbers.without_batch())
        return jax.vmap(one, axes)(x, w, sizes)
    x = jnp.transpose(x, (numbers.x_rows, numbers.x_contracted))
    tiles = tiles_of(sizes, len(x))
    rows = x.at[tiles.rows].get(mode="fill", fill_value=0)
    outs = multiply(rows, w, tiles.groups, numbers.w_contracted - 1)
    outs = outs.reshape(-1, outs.shape[-1])
    return outs.at[tiles.places].get(mode="fill", fill_value=0)
