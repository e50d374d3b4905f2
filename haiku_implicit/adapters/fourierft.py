"""`FourierFT`: a weight with a correction of a few Fourier coefficients."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.operators import Fourier, check_places, places
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter, filled
from haiku_implicit.core.fields import FROZEN
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class FourierFT(Adapter):
    """The weight `w + scale * Re(ifft2(spectrum))` (Gao et al. 2024, arXiv:2405.03003).

    The spectrum is zero except in a few places. Products transform the inputs and the outputs, so they
    never make the dense correction.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      values: `[..., k]`, the coefficients; zeros at first.
      row, column: `[..., k]`, their random places in the spectrum.
      scale: `[...]`; None for 1.
    """

    values: Array
    row: Array = dataclasses.field(metadata=FROZEN)
    column: Array = dataclasses.field(metadata=FROZEN)
    scale: Array = dataclasses.field(default=None, metadata=FROZEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        n, m = self.shape[-2:]
        check_places(self, (n, m))

    @classmethod
    def create(
        cls, w: Array, key: jax.Array, *, coefficients: int, scale: float | None = 150.0
    ) -> Self:
        """Makes an adapter with a correction of zero.

        Args:
          coefficients: the number of coefficients per matrix.
          scale: the scale of the correction; the default is PEFT's.
        """
        row, column = places(key, w.shape, coefficients, "coefficients")
        values = jnp.zeros(row.shape, w.dtype)
        return cls(w, values, row, column, filled(1.0 if scale is None else scale, w.shape[:-2]))

    def completed(self) -> Self:
        return self.with_number("scale", 1.0, self.values.shape[:-1])

    def equivalent(self) -> Sum:
        n, m = self.shape[-2:]
        scale = 1 if self.scale is None else self.scale[..., None]
        values = (self.values * scale).astype(self.dtype)
        return Sum(self.w, Fourier(values, self.row, self.column, (n, m)))
