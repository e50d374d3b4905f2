"""`Adapter`: the base of weights that hold a frozen one, and little beside it that is trained."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.wrapper import Wrapper
from haiku_implicit.core.dense import dense
from haiku_implicit.core.fields import FROZEN


@dataclasses.dataclass
class Adapter(Wrapper, core_ndim=2):
    """A weight that is made of a frozen one and of trained arrays.

    A subclass says in `equivalent` what it is in terms of types that have rules for products and parts:
    `LoRA`, `ScaledMatrix`, `Sum`, `Rotated`. It needs no rules of its own. Its class method
    `create(w, key, **options)` puts a new one on a weight `[..., n, m]`, dense or implicit, which it
    leaves as it is; it draws with the key, and raises a `ValueError` for options that do not fit.

    Attributes:
      w: `[..., n, m]`, the frozen weight; itself implicit where it is quantized, say.
    """

    w: Any = dataclasses.field(metadata=FROZEN)

    def equivalent(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no equivalent()")

    def materialize(self) -> jax.Array:
        return dense(self.equivalent())

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the batch axes, which all fields have."""
        return tuple(np.shape(self.w)[:-2])


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A first factor `[..., n, r]`, uniform in ±1/sqrt(n)."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def filled(value: float | None, batch: tuple[int, ...]) -> jax.Array | None:
    """An option as an array with batch axes, float32."""
    return None if value is None else jnp.full(batch, float(value), jnp.float32)
