"""`Adapter`: the base of weights that hold a frozen one, and little beside it that is trained."""

import dataclasses
from typing import Any

import jax
import numpy as np

from haiku_implicit.arrays.wrapper import Wrapper
from haiku_implicit.core.dense import dense
from haiku_implicit.core.fields import FROZEN


@dataclasses.dataclass
class Adapter(Wrapper, core_ndim=2):
    """A weight that is made of a frozen one and of trained arrays.

    A subclass says in `equivalent` what it is in terms of types that have rules for products and parts:
    `LoRA`, `ScaledMatrix`, `Sum`, `Rotated`. It needs no rules of its own.

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
