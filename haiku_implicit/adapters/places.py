"""Corrections of a few numbers at positions in a matrix: `SHiRA`, `FourierFT`, and their operators."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.adapters.operators import Operator, mapped
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter, filled
from haiku_implicit.core.fields import FROZEN, aux_field
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array


def _check_places(owner: Any, shape: Sequence[int]) -> None:
    """Raises if `row` or `column` of an array is known to be outside of a matrix `[n, m]`.

    JAX drops updates beyond the edge of an array, and would count negative indices from its end.
    """
    for name, size in zip(("row", "column"), shape, strict=True):
        places = getattr(owner, name)
        if isinstance(places, jax.core.Tracer) or not getattr(places, "is_fully_addressable", True):
            continue
        if not isinstance(places, jax.Array | np.ndarray):
            continue  # a placeholder, such as a spec
        places = jax.device_get(places)  # (an explicit transfer, which guards may allow)
        beyond = places[(places < 0) | (places >= size)]
        if beyond.size:
            raise value_error(
                f"{type(owner).__name__}: {name}: expected numbers from 0 to {size - 1}, for a matrix "
                f"{list(shape)}, got {beyond.flat[0]}"
            )


def _places(
    key: jax.Array, shape: tuple[int, ...], count: int, name: str
) -> tuple[jax.Array, jax.Array]:
    """Draws the rows and columns `[..., count]` of different random entries of each matrix.

    The entries of a matrix, row by row, are cut into `count` stretches, and each gives one.

    Args:
      key: a random key.
      shape: `[..., n, m]`.
      count: the number of entries.
      name: the name of the option, for errors.
    """
    *lead, n, m = shape
    if not 0 < count <= n * m:
        raise value_error(f"{name}: expected 1 to {n * m} for a weight [{n}, {m}], got {count}")
    step = n * m // count
    start = np.arange(count, dtype=np.int64) * step  # (may not fit into JAX's integers)
    start = start.reshape(*(1 for _ in lead), count)
    column = jax.random.randint(key, (*lead, count), 0, step) + start % m
    return jnp.asarray(start // m) + column // m, column % m


@dataclasses.dataclass
class AtPlaces(Operator, linear_in="values"):
    """The base of operators made of a few numbers at positions in a matrix.

    Attributes:
      values: `[..., k]`.
      row, column: `[..., k]` integers, the positions of the values; values at one position are added.
      shape_of_matrix: `(n, m)`.

    Raises:
      ValueError: for a position outside of the matrix, if positions are known (they are not while JAX
        traces).
    """

    values: Array
    row: Array = dataclasses.field(metadata=FROZEN)
    column: Array = dataclasses.field(metadata=FROZEN)
    shape_of_matrix: tuple[int, int] = aux_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_places(self, self.shape_of_matrix)

    def compute_shape(self) -> tuple[int, ...]:
        return (*np.shape(self.values)[:-1], *self.shape_of_matrix)

    def transposed(self) -> Self:
        shape = self.shape_of_matrix[::-1]
        return self._replace(row=self.column, column=self.row, shape_of_matrix=shape)


@dataclasses.dataclass
class Sparse(AtPlaces):
    """A matrix with a few nonzero entries."""

    def times(self, x: jax.Array) -> jax.Array:
        out = jnp.zeros((x.shape[0], self.shape_of_matrix[1]), x.dtype)
        return out.at[:, self.column].add(x[:, self.row] * self.values[None])

    def rows(self, ids: jax.Array) -> jax.Array:
        out = jnp.zeros((ids.shape[0], self.shape_of_matrix[1]), self.dtype)
        hit = ids[:, None] == self.row[None]
        return out.at[:, self.column].add(hit * self.values[None])

    def materialize(self) -> jax.Array:
        def of_one(w: Sparse) -> jax.Array:
            return jnp.zeros(w.shape_of_matrix, w.dtype).at[w.row, w.column].add(w.values)

        return mapped(of_one, self.ndim - 2)(self)


@dataclasses.dataclass
class Fourier(AtPlaces):
    """The real part of the inverse Fourier transform of a sparse matrix, in both axes.

    A product takes three steps, and none makes the dense matrix: it transforms the rows of `x`,
    multiplies by the coefficients, and transforms the sums. The positions are frequencies, along rows
    and columns, and the values real coefficients.
    """

    def times(self, x: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        spectrum = jnp.fft.ifft(x.astype(wide), axis=-1)
        return self._along_columns(spectrum[:, self.row])

    def rows(self, ids: jax.Array) -> jax.Array:
        n = self.shape_of_matrix[0]
        # (Above this size, the product of an index and a frequency does not fit in 32 bits.)
        if n >= 1 << 16:
            return super().rows(ids)
        product = ids.astype(jnp.uint32)[:, None] * self.row.astype(jnp.uint32)[None]
        turns = (product % n).astype(jnp.float32) / n
        return self._along_columns(jnp.exp(2j * jnp.pi * turns) / n)

    def _along_columns(self, amplitudes: jax.Array) -> jax.Array:
        """Transforms the amplitudes `[k, coefficients]` of the rows along the columns."""
        amplitudes = amplitudes * self.values.astype(amplitudes.real.dtype)[None]
        out = jnp.zeros((amplitudes.shape[0], self.shape_of_matrix[1]), amplitudes.dtype)
        return jnp.fft.ifft(out.at[:, self.column].add(amplitudes)).real.astype(self.dtype)


# --- adapters ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Corrected(Adapter, method=""):
    """The base of adapters with a few numbers at positions in a matrix as their correction."""

    values: Array
    row: Array = dataclasses.field(metadata=FROZEN)
    column: Array = dataclasses.field(metadata=FROZEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_places(self, self.shape[-2:])


@dataclasses.dataclass
class SHiRA(Corrected):
    """The weight `w + delta`, with a `delta` that is zero except at a few positions.

    After Bhardwaj et al. 2024, arXiv:2406.13175, with random positions (the paper's SHiRA-Rand).

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      values: `[..., k]`; zeros at first.
      row, column: `[..., k]`, the positions of the values.
    """

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, entries: int) -> Self:
        """Makes an adapter with a correction of zero.

        Args:
          entries: the number of trained entries per matrix. (LoRA of rank `r` trains `r * (n + m)`.)
        """
        row, column = _places(key, w.shape, entries, "entries")
        return cls(w, jnp.zeros(row.shape, w.dtype), row, column)

    def equivalent(self) -> Sum:
        n, m = self.shape[-2:]
        values = self.values.astype(self.dtype)
        return Sum(self.w, Sparse(values, self.row, self.column, (n, m)))


@dataclasses.dataclass
class FourierFT(Corrected):
    """The weight `w + scale * Re(ifft2(spectrum))` (Gao et al. 2024, arXiv:2405.03003).

    The spectrum is zero except at a few positions. Products transform the inputs and the outputs, so
    they never make the dense correction.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      values: `[..., k]`, the coefficients; zeros at first.
      row, column: `[..., k]`, their random positions in the spectrum.
      scale: `[...]`; None for 1.
    """

    scale: Array = dataclasses.field(default=None, metadata=FROZEN)

    @classmethod
    def create(
        cls, w: Array, key: jax.Array, *, coefficients: int, scale: float | None = 150.0
    ) -> Self:
        """Makes an adapter with a correction of zero.

        Args:
          coefficients: the number of coefficients per matrix.
          scale: the scale of the correction; the default is PEFT's.
        """
        row, column = _places(key, w.shape, coefficients, "coefficients")
        values = jnp.zeros(row.shape, w.dtype)
        return cls(w, values, row, column, filled(1.0 if scale is None else scale, w.shape[:-2]))

    def completed(self) -> Self:
        return self.with_number("scale", 1.0, self.values.shape[:-1])

    def equivalent(self) -> Sum:
        n, m = self.shape[-2:]
        scale = 1 if self.scale is None else self.scale[..., None]
        values = (self.values * scale).astype(self.dtype)
        return Sum(self.w, Fourier(values, self.row, self.column, (n, m)))
