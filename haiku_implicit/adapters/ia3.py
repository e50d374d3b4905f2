"""`IA3`: a weight with a trained factor per row or column (Liu et al. 2022, arXiv:2205.05638)."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array


@dataclasses.dataclass
class IA3(Adapter):
    """The weight `diag(factor) @ w`, or `w @ diag(factor)`.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      factor: `[..., n]` for axis -2 (the inputs, as for the second layer of a feed-forward block),
        `[..., m]` for axis -1 (the outputs, as for keys and values); ones at first.
      axis: -2 or -1.
    """

    factor: Array
    axis: int = aux_field(default=-1)

    @classmethod
    def create(cls, w: Array, key: jax.Array, *, axis: int = -1) -> Self:
        if axis not in (-2, -1):
            raise value_error(f"axis: expected -2 or -1, got {axis!r}")
        return cls(w, jnp.ones((*w.shape[:-2], w.shape[axis]), w.dtype), axis)

    @property
    def field_axes(self) -> dict[str, str]:  # type: ignore[override]
        """The factor has the scaled axis of the weight."""
        return {"factor": "nm"[self.axis]}

    def equivalent(self) -> ScaledMatrix:
        return ScaledMatrix(self.w, self.factor.astype(self.dtype), self.axis)
