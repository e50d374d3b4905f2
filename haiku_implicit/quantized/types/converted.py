"""`ConvertedMatrix`: the result of `convert_trained`, which warns of uses that differ from training."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.materialization import Remark, emit
from haiku_implicit.core.typing import Array, EqnParam, EqnParams, Primitive, Result
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.products.bilinear import Product, product_of

_WAY_OUT = "convert_trained(params, apply=..., args=...) looks at how the model uses its weights"


@dataclasses.dataclass
class ConvertedMatrix(QuantizedMatrix, core_ndim=2):
    """A `QuantizedMatrix` with the codes that a weight has in the products of training.

    Training quantizes a weight in each product, with scales shared along the axes that the product
    sums. The stored codes are the codes of one such product. A product that sums other axes has other
    codes in training, and so has an operation that changes the weight before its product. Each such
    use gives a warning.

    Attributes:
      path: the name of the weight, for warnings.
      shared: the batch axes, from the end (negative), that share scales, as positions of a kernel do.
      channelwise: whether rows (and the other batch axes) have separate scales.
    """

    path: str = aux_field(default="")
    shared: tuple[int, ...] = aux_field(default=())
    channelwise: bool = aux_field(default=True)

    @classmethod
    def of(cls, q: QuantizedMatrix, **fields: Any) -> Self:
        """Makes a converted matrix of a quantized matrix and the fields that the class adds."""
        own = {f.name: getattr(q, f.name) for f in dataclasses.fields(q)}
        new = cls(**own, **fields)
        return new if new.dtype == q.dtype else new._replace(dtype=q.dtype)

    def check_product(self, product: Product, side: int) -> None:
        """Warns if training has other scales in a product.

        Args:
          product: the product.
          side: the operand that this matrix is, 0 or 1.
        """
        of_result = {axis for axis in product.axes[side] if axis is not None}
        own = {i for i in range(self.ndim - 2) if i - self.ndim not in self.shared}
        other = {i for i in of_result ^ {self._row_axis, *own} if self.shape[i] > 1}
        tiled = self.num_groups > 1 and not (
            product.summed and product.summed[-1][side] == self._grouped_axis
        )
        if tiled or (self.channelwise and other):
            summed = [i - self.ndim for i in range(self.ndim) if i not in of_result]
            self.warn(
                f"it is stored for a product that sums axis {self.axis}, and this one sums "
                f"{summed or 'none'} of its axes {list(self.shape)}",
                f" {_WAY_OUT}.",
            )

    def before_dense(self, primitive_name: str) -> None:
        """Warns that in training the operation takes the weight before it is rounded."""
        self.warn(
            f"{primitive_name!r} takes it as it is stored, rounded, and in training as it was before"
        )

    def warn(self, reason: str, way_out: str = "") -> None:
        """Warns of a use that training computes with other codes."""
        of = f"{self.path}: the outputs differ from those of quantized training"
        emit(Remark(f"{of}: {reason}.{way_out}"))


# --- rules: each may warn, and leaves the computation to the rules of `QuantizedMatrix` -----------


@primitive_handler(["dot_general", "conv_general_dilated", "ragged_dot_general"], precedence=1)
def check_product(
    primitive: Primitive, *operands: jax.Array | ConvertedMatrix, **params: EqnParam
) -> Result:
    """Warns if training has other scales in a product."""
    pair = operands[0], operands[1]
    product = product_of(primitive, pair, params)
    for side, w in enumerate(pair):
        if product is not None and isinstance(w, ConvertedMatrix):
            w.check_product(product, side)
    return NotImplemented


@primitive_handler(["mul", "div", "neg"], precedence=1)
def check_scaled(
    primitive: Primitive, w: ConvertedMatrix, *others: jax.Array, **params: EqnParam
) -> Result:
    """Warns of scaling: training quantizes the scaled weight, and a tie may go the other way."""
    w.warn(f"{primitive.name!r} changes it before its product, and training quantizes the result")
    return NotImplemented


@primitive_handler(
    ["gather", "convert_element_type", "reshape", "slice", "dynamic_slice", "split", "concatenate"],
    precedence=1,
)
def check_change(
    primitive: Primitive, w: ConvertedMatrix, *others: Array, **params: EqnParam
) -> Result:
    """Warns of a change before the product, if training quantizes the changed weight differently."""
    reason = _difference(primitive.name, w, params)
    if reason is not None:
        w.warn(reason)
    return NotImplemented


def _difference(name: str, w: ConvertedMatrix, params: EqnParams) -> str | None:
    """Returns how training differs from an operation on the stored weight; None if it does not."""
    if name == "convert_element_type":
        new = np.dtype(params["new_dtype"])
        loses = jnp.promote_types(w.dtype, new) != new
        return (
            f"it is cast to {new.name}, and training quantizes what that leaves" if loses else None
        )
    if name == "reshape":
        # In training, tiles are along the last of the new axes and are shared along the others.
        cut = w.num_groups > 1 and w.shape[w._grouped_axis] not in params["new_sizes"]
        return "the axis that is cut into tiles is reshaped before the product" if cut else None
    if name == "gather" and tuple(params["slice_sizes"][-2:]) != w.shape[-2:]:
        return "training looks up its rows as they are, and the stored ones are rounded"
    sharing = {w._grouped_axis, *(w.ndim + i for i in w.shared)}
    sharing = sharing if w.channelwise else set(range(w.ndim))
    if not sharing & _changed(w, params):
        return None
    return (
        f"{name!r} changes the length of an axis that shares scales, before the product, and training "
        "quantizes the result"
    )


def _changed(w: ConvertedMatrix, params: EqnParams) -> set[int]:
    """The axes that an operation cuts or makes longer."""
    along = params.get("axis", params.get("dimension"))
    if along is not None:
        return {along}
    if "slice_sizes" in params:
        sizes = params["slice_sizes"]
    else:
        corners = zip(params["start_indices"], params["limit_indices"], strict=True)
        steps = params.get("strides") or (1,) * w.ndim
        sizes = [-((a - b) // step) for (a, b), step in zip(corners, steps, strict=True)]
    return {i for i, (a, b) in enumerate(zip(sizes, w.shape, strict=True)) if a != b}
