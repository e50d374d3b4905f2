"""`C3A`: a weight with a matrix of circulant blocks as its correction, and this operator."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.adapters.operators import Operator
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.drawing import zeros
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class Circulant(Operator, linear_in="kernel"):
    """A matrix of circulant blocks: the entry `(i, j)` of a block is `kernel[(i - j) mod size]`.

    Attributes:
      kernel: `[..., p, q, size]`; the matrix is `[..., p * size, q * size]`.
    """

    kernel: Array

    def compute_shape(self) -> tuple[int, ...]:
        *lead, p, q, size = np.shape(self.kernel)
        return (*lead, p * size, q * size)

    def times(self, x: jax.Array) -> jax.Array:
        p, _, size = self.kernel.shape
        # JAX has no Fourier transform of 16 bits.
        spectrum = jnp.fft.rfft(self.kernel.astype(jnp.promote_types(self.dtype, np.float32)))
        x = x.reshape(x.shape[0], p, size).astype(jnp.promote_types(x.dtype, np.float32))
        out = jnp.einsum("kpf,pqf->kqf", jnp.fft.rfft(x), spectrum.conj())
        out = jnp.fft.irfft(out, size)
        return out.reshape(x.shape[0], -1).astype(self.dtype)

    def transposed(self) -> "Circulant":
        mirrored = jnp.roll(self.kernel[..., ::-1], 1, axis=-1)
        return self._replace(kernel=mirrored.swapaxes(-3, -2))


@dataclasses.dataclass
class C3A(Adapter):
    """The weight `w` plus circulant blocks, `[size, size]` each, divided by `n`.

    A product convolves blocks of inputs, by Fourier transforms (Chen et al. 2024, arXiv:2407.19342).

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      kernel: `[..., n / size, m / size, size]`, the first column of each block; zeros at first.
    """

    positive_options = ("block_size",)

    kernel: Array

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, block_size: int) -> Self:
        """Makes an adapter with a kernel of zeros.

        Args:
          block_size: the side of a block, a divisor of `n` and `m`. It trains `n m / block_size`
            numbers.
        """
        *lead, n, m = w.shape
        if n % block_size or m % block_size:
            raise value_error(f"block_size: expected a divisor of {n} and {m}, got {block_size}")
        shape = (*lead, n // block_size, m // block_size, block_size)
        return cls(w, zeros(shape, w.dtype))

    def equivalent(self) -> Sum:
        kernel = (self.kernel / self.shape[-2]).astype(self.dtype)
        return Sum(self.w, Circulant(kernel))
