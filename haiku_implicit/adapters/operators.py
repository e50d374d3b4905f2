"""Matrices as linear operators, without dense entries: diagonal, Kronecker, blocks, Hadamard."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.adapters.hadamard import multiply_blocks
from haiku_implicit.arrays.axes import filled_outside, takes_whole_rows
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.typing import Array, DType, EqnParam, Primitive, Result
from haiku_implicit.quantized.products.ragged import row_numbers
from haiku_implicit.quantized.products.tiles import groups_of_rows


class Operator(ImplicitArray, core_ndim=2):
    """A matrix `[n, m]`, or a stack of matrices, with products that do not need it dense.

    A subclass defines its methods for one matrix; batch axes are mapped over. It has the dtype of the
    field in which it is linear, if it names one.
    """

    def compute_dtype(self) -> np.dtype | None:
        return getattr(self, self.linear_in[0]).dtype if self.linear_in else None

    @abc.abstractmethod
    def times(self, x: jax.Array) -> jax.Array:
        """Multiplies `x @ matrix`: `[k, n]` to `[k, m]`."""

    @abc.abstractmethod
    def transposed(self) -> "Operator":
        """The transpose of the matrix, of the same type."""

    def rows(self, ids: jax.Array) -> jax.Array:
        """Looks up the rows `matrix[ids]`: `[k]` to `[k, m]`."""
        return self.times(jax.nn.one_hot(ids, self.shape[-2], dtype=self.dtype))

    def materialize(self) -> jax.Array:
        eye = jnp.eye(self.shape[-2], dtype=self.dtype)
        return mapped(lambda w: w.times(eye), self.ndim - 2)(self)


def mapped(fun: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Maps a function over `times` leading axes of its arguments."""
    for _ in range(times):
        fun = jax.vmap(fun)
    return fun


@binary_handler("dot_general")
def dot_with_operator(call: BinaryCall, x: jax.Array, w: Operator) -> Result:
    """Computes a product that contracts rows or columns, with every leading axis a batch axis."""
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
    product = mapped(lambda w, x: (w if by_columns else w.transposed()).times(x), lead)
    count = math.prod(x.shape[i] for i in free)
    out = product(w, rows.reshape(*w.shape[:lead], count, rows.shape[-1]))
    out = out.reshape(*rows.shape[:-1], out.shape[-1])
    # The result has the batch axes in the product's order, then the free axes of the first operand.
    order = [*w_batch, *range(lead, out.ndim)]
    if call.w_first:
        order.insert(lead, order.pop())
    return jnp.transpose(out, order)


@primitive_handler("ragged_dot_general")
def ragged_dot_with_operator(
    primitive: Primitive, x: jax.Array, w: Operator, group_sizes: jax.Array, **params: EqnParam
) -> Result:
    """Multiplies rows with the operators of their groups: each in turn, on its rows and zeros."""
    numbers = row_numbers(x, w, **params)
    preferred = params.get("preferred_element_type") or w.dtype
    if numbers is None or numbers.x_batch or not x.dtype == w.dtype == preferred:
        return NotImplemented
    x = jnp.transpose(x, (numbers.x_rows, numbers.x_contracted))
    w = w if numbers.w_contracted == 1 else w.transposed()
    groups = groups_of_rows(group_sizes, x.shape[0])

    def add(out: jax.Array, group: Any) -> Array:
        index, one = group
        return out + one.times(jnp.where(groups[:, None] == index, x, 0)), None

    start = jnp.zeros((x.shape[0], w.shape[-1]), w.dtype)
    return jax.lax.scan(add, start, (jnp.arange(w.shape[0]), w))[0]


@primitive_handler("transpose")
def transpose_operator(
    primitive: Primitive, w: Operator, *, permutation: tuple[int, ...]
) -> Result:
    """Transposes the matrix, or each matrix of a stack."""
    lead = range(w.ndim - 2)
    return w.transposed() if permutation == (*lead, w.ndim - 1, w.ndim - 2) else NotImplemented


@primitive_handler("gather")
def gather_rows(primitive: Primitive, w: Operator, ids: jax.Array, **params: EqnParam) -> Result:
    """Gathers rows of one matrix, as an embedding does."""
    if not takes_whole_rows(w, ids, params):
        return NotImplemented
    index = ids[..., 0]
    rows = w.rows(jnp.clip(index, 0, w.shape[0] - 1).reshape(-1)).reshape(*index.shape, -1)
    return filled_outside(rows, w, ids, params)


@dataclasses.dataclass
class Diagonal(Operator, linear_in="values"):
    """A diagonal matrix, `[n, m]`.

    Attributes:
      values: `[..., min(n, m)]`.
      num_columns: `m`; None for as many as there are values.
      num_rows: `n`; None for as many as there are values.
    """

    values: Array
    num_columns: int | None = aux_field(default=None)
    num_rows: int | None = aux_field(default=None)

    def _sizes(self) -> tuple[int, int]:
        k = np.shape(self.values)[-1]
        return self.num_rows or k, self.num_columns or k

    def compute_shape(self) -> tuple[int, ...]:
        return (*np.shape(self.values)[:-1], *self._sizes())

    def times(self, x: jax.Array) -> jax.Array:
        k = self.values.shape[-1]
        return jnp.pad(x[:, :k] * self.values[None], ((0, 0), (0, self._sizes()[1] - k)))

    def rows(self, ids: jax.Array) -> jax.Array:
        m = self._sizes()[1]
        # (Rows past the last value are zero.)
        values = jnp.take(self.values, ids, mode="fill", fill_value=0)
        return values[:, None] * jax.nn.one_hot(ids, m, dtype=self.dtype)

    def transposed(self) -> "Diagonal":
        return self._replace(num_columns=self.num_rows, num_rows=self.num_columns)


@dataclasses.dataclass
class Kronecker(Operator, linear_in="a"):
    """The Kronecker product of two matrices.

    Attributes:
      a: `[..., p, q]`.
      b: `[..., r, s]`, of the same dtype; together they are `[..., p * r, q * s]`.
    """

    a: Array
    b: Array

    def compute_shape(self) -> tuple[int, ...]:
        (*lead, p, q), (r, s) = np.shape(self.a), np.shape(self.b)[-2:]
        return (*lead, p * r, q * s)

    def times(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], self.a.shape[0], self.b.shape[0])
        out = jnp.einsum("kpr,pq,rs->kqs", x, self.a, self.b)
        return out.reshape(x.shape[0], -1)

    def transposed(self) -> "Kronecker":
        return self._replace(a=jnp.matrix_transpose(self.a), b=jnp.matrix_transpose(self.b))

    def rows(self, ids: jax.Array) -> jax.Array:
        r = self.b.shape[-2]
        rows = jnp.einsum("kq,ks->kqs", self.a[ids // r], self.b[ids % r])
        return rows.reshape(ids.shape[0], -1)


@dataclasses.dataclass
class BlockDiagonal(Operator, linear_in="blocks"):
    """A matrix of square diagonal blocks, each of indices that are `stride` apart.

    With a stride of 1, a block has neighboring indices. With another stride, the index
    `(i * size + j) * stride + k` of the matrix is index `j` of the block `i * stride + k`: a butterfly
    (Dao et al. 2019, arXiv:1903.05895) is a product of such matrices with growing strides. With a
    `unit` of more than 1, `unit` neighboring indices replace each index.

    Attributes:
      blocks: `[..., count, size, size]`.
      stride: the distance between the units of a block, in units; it divides `count`.
      unit: the number of indices that stay together; it divides `size`.
    """

    blocks: Array
    stride: int = aux_field(default=1)
    unit: int = aux_field(default=1)

    def compute_shape(self) -> tuple[int, ...]:
        *lead, count, size, _ = np.shape(self.blocks)
        return (*lead, count * size, count * size)

    def times(self, x: jax.Array) -> jax.Array:
        count, size, _ = self.blocks.shape
        blocks = self.blocks.reshape(count // self.stride, self.stride, size, size)
        places = (count // self.stride, size // self.unit, self.stride, self.unit)
        parts = x.reshape(x.shape[0], *places).swapaxes(2, 3)
        parts = parts.reshape(x.shape[0], count // self.stride, self.stride, size)
        out = jnp.einsum("kisj,isjl->kisl", parts, blocks)
        return out.reshape(*out.shape[:3], -1, self.unit).swapaxes(2, 3).reshape(x.shape)

    def transposed(self) -> "BlockDiagonal":
        return self._replace(blocks=jnp.matrix_transpose(self.blocks))


@dataclasses.dataclass
class Hadamard(Operator):
    """A rotation `[n, n]`: signs, then a Hadamard matrix for each block of indices, or its inverse.

    It spreads outliers over all indices of a block, so that a rotated weight is about normally
    distributed, and easier to quantize (QuIP#, arXiv:2402.04396; QuaRot, arXiv:2404.00456).

    Attributes:
      signs: `[..., ceil(n / 8)]`, uint8: bit `i % 8` of byte `i // 8` is set for a sign of -1. Or
        `[..., 0]` for signs that depend on `n` alone. These are constants of a program, so that XLA
        rotates the input of several products (queries, keys and values) once.
      length: `n`.
      block: the length of a block, a power of two that divides `n`.
      is_inverse: whether the signs come last, as in the transpose.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> rotation = hki.adapters.Hadamard.random(6)
      >>> back = rotation.transposed().times(rotation.times(jnp.eye(6)))
      >>> rotation.block, bool(jnp.allclose(back, jnp.eye(6), atol=1e-6))
      (2, True)
    """

    signs: Array = frozen_field()
    length: int = aux_field()
    block: int = aux_field()
    is_inverse: bool = aux_field(default=False)

    default_dtype = jnp.float32

    @classmethod
    def random(
        cls,
        length: int,
        batch: tuple[int, ...] = (),
        *,
        seed: int | None = None,
        dtype: DType | None = None,
    ) -> Self:
        """A rotation with the largest blocks that divide the length; a batch has the same signs.

        Without a seed, all rotations of this length have the same signs.
        """
        bits = np.zeros(0, np.uint8) if seed is None else _sign_bits(length, seed)
        signs = jnp.broadcast_to(bits, (*batch, len(bits)))
        return cls(signs, length, length & -length, dtype=dtype)

    def compute_shape(self) -> tuple[int, ...]:
        return (*np.shape(self.signs)[:-1], self.length, self.length)

    def times(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        packed = self.signs if len(self.signs) else _sign_bits(self.length, seed=0)
        bits = packed[:, None] >> np.arange(8, dtype=np.uint8) & 1
        signs = (1 - 2 * bits.reshape(-1)[: self.length].astype(np.int8)).astype(wide.dtype)
        if self.is_inverse:
            return (multiply_blocks(wide, self.block) * signs).astype(x.dtype)
        return multiply_blocks(wide * signs, self.block).astype(x.dtype)

    def transposed(self) -> "Hadamard":
        return self._replace(is_inverse=not self.is_inverse)


def _sign_bits(length: int, seed: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, -(-length // 8)).astype(np.uint8)


@primitive_handler("convert_element_type")
def cast_hadamard(
    primitive: Primitive, w: Hadamard, *, new_dtype: DType, **params: EqnParam
) -> Result:
    """Casts the rotation, which is computed with, to another floating dtype."""
    return w._replace(dtype=new_dtype) if jnp.issubdtype(new_dtype, np.floating) else NotImplemented
