"""`Wrapper`: the base of types around one array."""

from typing import Any

import jax
import numpy as np

from haiku_implicit.core.array import ImplicitArray, data_names


class Wrapper(ImplicitArray):
    """An array around another one, its first field, which has the same shape and dtype.

    It stands for the values of that field unless a type has a `materialize` of its own.
    """

    @property
    def wrapped(self) -> Any:
        """The first field."""
        return getattr(self, data_names(type(self))[0])

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.wrapped))

    def compute_dtype(self) -> Any:
        return self.wrapped.dtype

    def materialize(self) -> jax.Array:
        return self.wrapped
