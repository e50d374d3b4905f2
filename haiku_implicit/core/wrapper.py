"""`Wrapper`: the base of types around one array."""

from typing import Any

import jax
import numpy as np

from haiku_implicit.core.array import ImplicitArray, data_names


class Wrapper(ImplicitArray):
    """An array around another array, its first field, with the same shape and dtype.

    It has the values of that field unless a type defines its own `materialize`.
    """

    @property
    def wrapped(self) -> Any:
        """The first field, which is the wrapped array."""
        return getattr(self, data_names(type(self))[0])

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.wrapped))

    def compute_dtype(self) -> np.dtype:
        return self.wrapped.dtype

    def materialize(self) -> jax.Array:
        return self.wrapped
