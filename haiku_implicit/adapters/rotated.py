"""`Rotated`: a weight whose inputs pass through a square operator first."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.wrapper import Wrapper
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.compat import Primitive
from haiku_implicit.core.dense import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.validation import expecting


@dataclasses.dataclass
class Rotated(Wrapper, core_ndim=2, linear_in="w"):
    """The weight `rotation @ w`. A product `x @ (rotation @ w)` is `(x @ rotation) @ w`.

    Attributes:
      w: `[..., n, m]`.
      rotation: `[..., n, n]`, of the same dtype; usually an operator, such as `BlockDiagonal`.

    Raises:
      ValueError: where the shapes do not fit together.
    """

    w: Any
    rotation: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        w, rotation = np.shape(self.w), np.shape(self.rotation)
        sentence = f"Rotated: expected w [..., n, m] and rotation [..., n, n], got {w}, {rotation}"
        with expecting(sentence):
            chex.assert_shape(self.rotation, (*w[:-1], w[-2]))

    def materialize(self) -> jax.Array:
        return self.rotation @ self.w


@binary_handler("dot_general")
def dot_with_rotated(call: BinaryCall, x: jax.Array, w: Rotated) -> Any:
    """Where the rows are contracted, `x` is rotated; where they are not, the result is."""
    lead = w.ndim - 2
    (of_x, of_w), (x_batch, w_batch) = call.contracted, call.batch
    if sorted(w_batch) != list(range(lead)) or len(of_w) != 1 or of_w[0] < lead:
        return NotImplemented
    if call.params.get("out_sharding") is not None:
        return NotImplemented
    if of_w[0] == lead:
        batch = [x_batch[w_batch.index(i)] for i in range(lead)]
        return call(_turned(x, w.rotation, batch, of_x[0], lead), w.w)
    out = call(x, w.w)
    axis = lead if call.w_first else out.ndim - 1
    batch = [w_batch.index(i) for i in range(lead)]
    return _turned(out, w.rotation, batch, axis, lead + 1)


def _turned(x: jax.Array, rotation: Any, batch: Any, axis: int, contracted: int) -> jax.Array:
    """`x` with one of its axes multiplied by rows (or columns) of the rotation; axes stay in place.

    Args:
      batch: which axes of `x` are the batch axes of the rotation.
      axis: which of its axes is multiplied.
      contracted: by which of the rotation's axes.
    """
    numbers = (((axis,), (contracted,)), (tuple(batch), tuple(range(len(batch)))))
    out = jax.lax.dot_general(x, rotation, numbers, preferred_element_type=x.dtype)
    free = [i for i in range(x.ndim) if i not in (*batch, axis)]
    return jnp.transpose(out, np.argsort([*batch, *free, axis]).tolist())


@binary_handler("conv_general_dilated")
def convolve_with_rotated(call: BinaryCall, x: jax.Array, w: Rotated) -> jax.Array:
    """A convolution with the kernel, dense for it: a kernel is small beside the images."""
    return jax.checkpoint(lambda x, w: call(x, dense(w)))(x, w)


@primitive_handler("convert_element_type")
def cast_rotated(primitive: Primitive, w: Rotated, *, new_dtype: Any, **params: Any) -> Any:
    """To another floating dtype: both are cast."""
    if not jnp.issubdtype(new_dtype, np.floating):
        return NotImplemented
    cast = [primitive.bind(x, new_dtype=new_dtype, **params) for x in (w.w, w.rotation)]
    return w._replace(w=cast[0], rotation=cast[1])
