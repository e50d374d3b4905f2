"""`Rotated`: a weight whose inputs pass through a square operator first."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.adapters.operators import Hadamard, mapped
from haiku_implicit.arrays.axes import filled_outside, takes_whole_rows
from haiku_implicit.arrays.deferred import WrappedWeight
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.batch_axes import leaves_whole
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import product_dtype
from haiku_implicit.core.messages import expecting
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.quantized.products.ragged import row_numbers


@dataclasses.dataclass
class Rotated(WrappedWeight, core_ndim=2, linear_in="w"):
    """The weight `rotation @ w`. A product `x @ (rotation @ w)` is `(x @ rotation) @ w`.

    Attributes:
      w: `[..., n, m]`.
      rotation: `[..., n, n]`, of the same dtype; usually an operator, such as `BlockDiagonal`.

    Raises:
      ValueError: if the shapes do not fit together.
    """

    w: Array
    rotation: Array

    def __post_init__(self) -> None:
        super().__post_init__()
        w, rotation = np.shape(self.w), np.shape(self.rotation)
        sentence = f"Rotated: expected w [..., n, m] and rotation [..., n, n], got {w}, {rotation}"
        with expecting(sentence):
            chex.assert_shape(self.rotation, (*w[:-1], w[-2]))

    @classmethod
    def quantize(
        cls, w: Array, quantize: Callable[[Array, Array], Array], moments: Array = None
    ) -> Self:
        """Quantizes a weight after a random Hadamard rotation of its inputs.

        Args:
          w: `[..., n, m]`, floating.
          quantize: a function of the rotated weight and its moments (or None), such as one that calls
            `QuantizedMatrix.quantize`.
          moments: `[..., n, n]`, xᵀx of the inputs x of products with `w`; or None.
        """
        *lead, n, _ = w.shape
        rotation = Hadamard.random(n, tuple(lead), dtype=w.dtype)
        if moments is not None:
            moments = _back(rotation, _back(rotation, jnp.asarray(moments)).mT).mT
        return cls(quantize(_back(rotation, w).astype(w.dtype), moments), rotation)

    def requantize(self, w: Array) -> Array:
        """Another weight with the rotation of this one: quantized like `w`, without inputs.

        Args:
          w: a dense weight of this shape.

        Returns:
          The weight; `NotImplemented` for other operators, or if `w` can't be quantized again.
        """
        if not isinstance(self.rotation, Hadamard) or not is_implicit(self.w):
            return NotImplemented
        new = self.w.requantize(_back(self.rotation, jnp.asarray(w)))
        return new if new is NotImplemented else self._replace(w=new)

    def materialize(self) -> jax.Array:
        return self.rotation @ self.w


def _back(rotation: Hadamard, x: jax.Array) -> jax.Array:
    """Multiplies the inverse of a rotation by `x`, `[..., n, m]`, in float32 or wider."""
    wide = rotation._replace(dtype=jnp.promote_types(x.dtype, jnp.float32))
    x = jnp.asarray(x, wide.dtype)  # (NumPy 1 has no `mT`.)
    return mapped(lambda r, x: r.times(x), x.ndim - 2)(wide, x.mT).mT


@binary_handler("dot_general")
def dot_with_rotated(call: BinaryCall, x: jax.Array, w: Rotated) -> Result:
    """Multiplies and rotates: `x` if the rows are contracted, otherwise the result."""
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
    return _turned(out, w.rotation, batch, axis, lead + 1).astype(out.dtype)


def _turned(x: jax.Array, rotation: Array, batch: Any, axis: int, contracted: int) -> jax.Array:
    """Multiplies one axis of `x` by rows (or columns) of the rotation; axes stay in place.

    Args:
      x: the array.
      rotation: `[..., n, n]`.
      batch: the axes of `x` that meet the batch axes of the rotation.
      axis: the axis of `x` to multiply.
      contracted: the axis of the rotation to contract with it.
    """
    numbers = (((axis,), (contracted,)), (tuple(batch), tuple(range(len(batch)))))
    x, rotation = _alike(x, rotation)
    out = jax.lax.dot_general(x, rotation, numbers, preferred_element_type=x.dtype)
    free = [i for i in range(x.ndim) if i not in (*batch, axis)]
    return jnp.transpose(out, np.argsort([*batch, *free, axis]).tolist())


def _alike(x: jax.Array, rotation: Array) -> tuple[jax.Array, Array]:
    """Casts both to the wider dtype: integers, once rotated, are no integers."""
    wide = product_dtype(x.dtype, rotation.dtype)
    if wide != rotation.dtype and jnp.issubdtype(wide, np.floating):
        rotation = jax.lax.convert_element_type(rotation, wide)
    return x.astype(wide), rotation


@primitive_handler("ragged_dot_general")
def ragged_dot_with_rotated(
    primitive: Primitive, x: jax.Array, w: Rotated, group_sizes: jax.Array, **params: EqnParam
) -> Result:
    """Multiplies rows, rotated by the rotations of their groups, with the matrices of the groups."""
    numbers = row_numbers(x, w, **params)
    if numbers is None or numbers.x_batch or (numbers.x_rows, numbers.w_contracted) != (0, 1):
        return NotImplemented
    x, rotation = _alike(x, w.rotation)
    of_rotation = params | dict(preferred_element_type=x.dtype)
    turned = primitive.bind(x, rotation, group_sizes, **of_rotation)
    return primitive.bind(turned, w.w, group_sizes, **params)


@primitive_handler("gather")
def gather_rotated(primitive: Primitive, w: Rotated, ids: jax.Array, **params: EqnParam) -> Result:
    """Gathers rows of the rotation and multiplies them with the weight."""
    if not takes_whole_rows(w, ids, params):
        return NotImplemented
    # (Rows out of bounds are filled at the end: NaN in a factor would get into gradients.)
    of_rotation = params | dict(slice_sizes=(1, w.shape[0]), fill_value=0)
    rows = primitive.bind(w.rotation, ids, **of_rotation) @ w.w
    return filled_outside(rows, w, ids, params)


@binary_handler("conv_general_dilated")
def convolve_with_rotated(call: BinaryCall, x: jax.Array, w: Rotated) -> jax.Array:
    """Convolves with the dense kernel: a kernel is small compared with the images."""
    return jax.checkpoint(lambda x, w: call(x, dense(w)))(x, w)


@primitive_handler(["slice", "dynamic_slice", "split"])
def cut_columns(primitive: Primitive, w: Rotated, *starts: jax.Array, **params: EqnParam) -> Result:
    """Slices or splits the columns of the weight."""
    if not all(leaves_whole(w, i, params) for i in range(w.ndim - 1)):
        return NotImplemented
    new = primitive.bind(w.w, *starts, **params)
    if not primitive.multiple_results:
        return w._replace(w=new, shape=None)
    return [w._replace(w=part, shape=None) for part in new]
