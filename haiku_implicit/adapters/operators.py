"""Matrices that are known by what they do: `Kronecker`, `Diagonal`, `BlockDiagonal`, `Sparse`."""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import FROZEN, aux_field


class Operator(ImplicitArray, core_ndim=2):
    """A matrix `[n, m]`, or a stack of them, with products that do not need it dense.

    A subclass writes its methods for one matrix; batch axes are mapped over.
    """

    @abc.abstractmethod
    def times(self, x: jax.Array) -> jax.Array:
        """`x @ matrix`: `[k, n]` to `[k, m]`."""

    @abc.abstractmethod
    def transposed(self) -> "Operator":
        """`matrix.T`, of the same type."""

    def rows(self, ids: jax.Array) -> jax.Array:
        """`matrix[ids]`: `[k]` to `[k, m]`."""
        return self.times(jax.nn.one_hot(ids, self.shape[-2], dtype=self.dtype))

    def materialize(self) -> jax.Array:
        eye = jnp.eye(self.shape[-2], dtype=self.dtype)
        return _mapped(lambda w: w.times(eye), self.ndim - 2)(self)


def _mapped(fun: Any, times: int) -> Any:
    """A function of arrays, for all of their leading axes."""
    for _ in range(times):
        fun = jax.vmap(fun)
    return fun


@binary_handler("dot_general")
def dot_with_operator(call: BinaryCall, x: jax.Array, w: Operator) -> Any:
    """A product that contracts rows or columns, and has every leading axis as a batch axis."""
    lead = w.ndim - 2
    (of_x, of_w), (x_batch, w_batch) = call.contracted, call.batch
    preferred = call.params.get("preferred_element_type") or w.dtype
    plain = x.dtype == w.dtype == preferred and call.params.get("out_sharding") is None
    if not plain or len(of_w) != 1 or of_w[0] < lead or sorted(w_batch) != list(range(lead)):
        return NotImplemented
    batch = [x_batch[w_batch.index(i)] for i in range(lead)]
    free = [i for i in range(x.ndim) if i not in (*batch, *of_x)]
    rows = jnp.transpose(x, (*batch, *free, *of_x))
    by_columns = of_w[0] == lead
    product = _mapped(lambda w, x: (w if by_columns else w.transposed()).times(x), lead)
    count = math.prod(x.shape[i] for i in free)
    out = product(w, rows.reshape(*w.shape[:lead], count, rows.shape[-1]))
    out = out.reshape(*rows.shape[:-1], out.shape[-1])
    # The batch axes in the order of the product, then the free ones of its first operand.
    order = [*w_batch, *range(lead, out.ndim)]
    if call.w_first:
        order.insert(lead, order.pop())
    return jnp.transpose(out, order)


@primitive_handler("transpose")
def transpose_operator(primitive: Primitive, w: Operator, *, permutation: Any) -> Any:
    """The matrix, or each of the stacked ones, is transposed."""
    lead = range(w.ndim - 2)
    return w.transposed() if permutation == (*lead, w.ndim - 1, w.ndim - 2) else NotImplemented


@primitive_handler("gather")
def gather_rows(
    primitive: Primitive,
    w: Operator,
    ids: jax.Array,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    fill_value: Any,
    mode: Any,
    **params: Any,
) -> Any:
    """Rows of one matrix, as an embedding takes them."""
    numbers = dimension_numbers
    whole_rows = w.ndim == 2 and tuple(slice_sizes) == (1, w.shape[1])
    taken = (numbers.collapsed_slice_dims, numbers.start_index_map) == ((0,), (0,))
    last = tuple(numbers.offset_dims) == (ids.ndim - 1,)
    if not (whole_rows and taken and last) or numbers.operand_batching_dims:
        return NotImplemented
    index = ids[..., 0]
    inside = (index >= 0) & (index < w.shape[0])
    rows = w.rows(jnp.clip(index, 0, w.shape[0] - 1).reshape(-1)).reshape(*index.shape, -1)
    if mode != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return rows
    return jnp.where(inside[..., None], rows, jnp.nan if fill_value is None else fill_value)


@dataclasses.dataclass
class Diagonal(Operator, linear_in="values"):
    """A diagonal matrix, `[n, m]`.

    Attributes:
      values: `[..., min(n, m)]`.
      num_columns: `m`; None for as many as there are values.
      num_rows: `n`; None for as many as there are values.
    """

    values: Any
    num_columns: int | None = aux_field(default=None)
    num_rows: int | None = aux_field(default=None)

    def _sizes(self) -> tuple[int, int]:
        k = np.shape(self.values)[-1]
        return self.num_rows or k, self.num_columns or k

    def compute_shape(self) -> tuple[int, ...]:
        return (*np.shape(self.values)[:-1], *self._sizes())

    def compute_dtype(self) -> Any:
        return self.values.dtype

    def times(self, x: jax.Array) -> jax.Array:
        k = self.values.shape[-1]
        return jnp.pad(x[:, :k] * self.values, ((0, 0), (0, self._sizes()[1] - k)))

    def transposed(self) -> "Diagonal":
        return self._replace(num_columns=self.num_rows, num_rows=self.num_columns)


@dataclasses.dataclass
class Kronecker(Operator, linear_in="a"):
    """The Kronecker product of two matrices.

    Attributes:
      a: `[..., p, q]`.
      b: `[..., r, s]`, of the same dtype; together they are `[..., p * r, q * s]`.
    """

    a: Any
    b: Any

    def compute_shape(self) -> tuple[int, ...]:
        (*lead, p, q), (r, s) = np.shape(self.a), np.shape(self.b)[-2:]
        return (*lead, p * r, q * s)

    def compute_dtype(self) -> Any:
        return self.a.dtype

    def times(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], self.a.shape[0], self.b.shape[0])
        out = jnp.einsum("kpr,pq,rs->kqs", x, self.a, self.b)
        return out.reshape(x.shape[0], -1)

    def transposed(self) -> "Kronecker":
        return self._replace(a=self.a.mT, b=self.b.mT)

    def rows(self, ids: jax.Array) -> jax.Array:
        r = self.b.shape[-2]
        rows = jnp.einsum("kq,ks->kqs", self.a[ids // r], self.b[ids % r])
        return rows.reshape(ids.shape[0], -1)


@dataclasses.dataclass
class BlockDiagonal(Operator, linear_in="blocks"):
    """Square blocks along the diagonal, of indices that are `stride` apart.

    With a stride of 1 a block has neighbouring indices. With another one, the index
    `(i * size + j) * stride + k` of the matrix is index `j` of the block `i * stride + k`: a butterfly
    (Dao et al. 2019, arXiv:1903.05895) is a product of such matrices with growing strides.

    Attributes:
      blocks: `[..., count, size, size]`.
      stride: how far apart the indices of a block are; it divides `count`.
    """

    blocks: Any
    stride: int = aux_field(default=1)

    def compute_shape(self) -> tuple[int, ...]:
        *lead, count, size, _ = np.shape(self.blocks)
        return (*lead, count * size, count * size)

    def compute_dtype(self) -> Any:
        return self.blocks.dtype

    def times(self, x: jax.Array) -> jax.Array:
        count, size, _ = self.blocks.shape
        blocks = self.blocks.reshape(count // self.stride, self.stride, size, size)
        parts = x.reshape(x.shape[0], count // self.stride, size, self.stride).swapaxes(2, 3)
        return jnp.einsum("kisj,isjl->kisl", parts, blocks).swapaxes(2, 3).reshape(x.shape)

    def transposed(self) -> "BlockDiagonal":
        return self._replace(blocks=self.blocks.mT)


@dataclasses.dataclass
class Sparse(Operator, linear_in="values"):
    """A matrix of a few numbers, all others being zero.

    Attributes:
      values: `[..., k]`.
      row, column: `[..., k]` integers, where they are; what is at one place is added up.
      shape_of_matrix: `(n, m)`.
    """

    values: Any
    row: Any = dataclasses.field(metadata=FROZEN)
    column: Any = dataclasses.field(metadata=FROZEN)
    shape_of_matrix: tuple[int, int] = aux_field()

    def compute_shape(self) -> tuple[int, ...]:
        return (*np.shape(self.values)[:-1], *self.shape_of_matrix)

    def compute_dtype(self) -> Any:
        return self.values.dtype

    def times(self, x: jax.Array) -> jax.Array:
        out = jnp.zeros((x.shape[0], self.shape_of_matrix[1]), x.dtype)
        return out.at[:, self.column].add(x[:, self.row] * self.values)

    def transposed(self) -> "Sparse":
        shape = self.shape_of_matrix[::-1]
        return self._replace(row=self.column, column=self.row, shape_of_matrix=shape)

    def materialize(self) -> jax.Array:
        def of_one(w: Sparse) -> jax.Array:
            return jnp.zeros(w.shape_of_matrix, w.dtype).at[w.row, w.column].add(w.values)

        return _mapped(of_one, self.ndim - 2)(self)
