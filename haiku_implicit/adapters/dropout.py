"""`InputDropout`: a matrix whose products apply dropout to the other operand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import FROZEN, aux_field, product_dtype
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.core.wrapper import Wrapper


@dataclasses.dataclass
class InputDropout(Wrapper, core_ndim=2, linear_in="w"):
    """A matrix that sees its inputs through dropout, as LoRA's correction does in training.

    In a product or a convolution, each number of the other operand is zero with probability `rate`,
    and divided by `1 - rate` otherwise. Everything else sees the matrix, which is the expectation.
    `with_dropout` puts it into weights.

    Attributes:
      w: `[..., n, m]`.
      key: random keys `[...]`. A product with a stack of matrices uses the first key for all of them.
      rate: the probability of a zero.
    """

    w: Array
    key: Any = dataclasses.field(metadata=FROZEN)
    rate: float = aux_field(default=0.0)

    def dropped(self, x: jax.Array) -> jax.Array:
        """Applies dropout to the other operand of a product."""
        kept = jax.random.bernoulli(self.key.reshape(-1)[0], 1 - self.rate, x.shape)
        x = x.astype(product_dtype(x.dtype, self.dtype))  # integers, once divided, are none
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


@binary_handler(["dot_general", "conv_general_dilated", "ragged_dot_general"])
def product_with_dropout(call: BinaryCall, x: jax.Array, w: InputDropout) -> Result:
    """Computes a product after dropout of `x`."""
    return call(w.dropped(x), w.w)


@primitive_handler("gather")
def gather_without_dropout(
    primitive: Primitive, w: InputDropout, ids: jax.Array, **params: EqnParam
) -> jax.Array:
    """Gathers from the matrix, without dropout of indices."""
    return primitive.bind(w.w, ids, **params)


@primitive_handler(["transpose", "slice", "dynamic_slice", "split"])
def rearrange(
    primitive: Primitive, w: InputDropout, *others: jax.Array, **params: EqnParam
) -> Result:
    """Transposes, slices or splits the matrix; stacks of another shape get keys from the first key."""
    new = primitive.bind(w.w, *others, **params)
    return [_around(w, x) for x in new] if primitive.multiple_results else _around(w, new)


def _around(w: InputDropout, new: Array) -> InputDropout:
    """Puts dropout around another matrix or stack of matrices."""
    lead = new.shape[:-2]
    key = w.key if w.key.shape == lead else jax.random.split(w.key.reshape(-1)[0], lead)
    return w._replace(w=new, key=key, shape=None, dtype=None)
