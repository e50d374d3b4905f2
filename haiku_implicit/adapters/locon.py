"""`LoCon`: LoRA on the kernel of a convolution, as one matrix."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays import drawing
from haiku_implicit.arrays.adapter import Adapter, alpha_or
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import FROZEN, aux_field
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.sharding import axis_names
from haiku_implicit.core.typing import Array, DType, EqnParam, Primitive, Result


@dataclasses.dataclass
class LoCon(Adapter):
    """The kernel `w + (alpha / rank) * a · b`, corrected as a matrix `[window * inputs, outputs]`.

    After LyCORIS (Yeh et al. 2023, arXiv:2309.14859) and PEFT's LoRA for convolutions. A convolution
    runs as one with `w`, and one with the `r` channels of `a`, which `b` then mixes. So neither it nor
    its gradient makes an array of the kernel's size. If the rank is so large that two convolutions cost
    more (`a` and `b` have more than a third of the kernel's numbers), one runs with the dense sum.

    Attributes:
      w: `[..., *window, inputs, outputs]`, the frozen kernel, in any order of axes; itself implicit
        if it is quantized, for example.
      a: like `w`, with `r` for the outputs.
      b: `[..., r, outputs]`.
      alpha: `[...]`; None for a scale of 1.
      axis: the output axis of the kernel, from the end: -1, or -2 for Haiku's transposed convolutions.
    """

    a: Array
    b: Array
    alpha: Array = dataclasses.field(default=None, metadata=FROZEN)
    axis: int = aux_field(default=-1)

    @property
    def core_ndim(self) -> int:  # type: ignore[override]
        """The number of axes of the kernel; the axes before them are batch axes."""
        return np.ndim(self.a) - np.ndim(self.b) + 2

    @property
    def field_axes(self) -> dict[str, str]:  # type: ignore[override]
        """The axes of `a`, the kernel's without its outputs, and of `b`, which has these."""
        kernel = axis_names(self.core_ndim)
        outputs = kernel[self.axis]
        return {"a": kernel.replace(outputs, "."), "b": f".{outputs}", "alpha": ""}

    @classmethod
    def room(cls, shape: tuple[int, ...], *, axis: int = -1, **options: Any) -> int:
        """The largest rank: the smaller side of the matrix `[window * inputs, outputs]`."""
        outputs = shape[axis] if -len(shape) <= axis < 0 else 1
        return min(math.prod(shape) // outputs, outputs)

    @classmethod
    def options_for(cls, path: str, ndim: int, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `create`: all axes except stacked layers are the kernel's by default."""
        return {"kernel_ndim": ndim, **options}

    @classmethod
    def create(
        cls,
        w: Array,
        key: jax.Array,
        *,
        rank: int,
        alpha: float | None = None,
        axis: int = -1,
        kernel_ndim: int | None = None,
    ) -> Self:
        """Makes an adapter with `b` zero.

        Args:
          rank: the rank of the correction.
          alpha: the correction is scaled by `alpha / rank`.
          axis: the axis of the outputs, from the end.
          kernel_ndim: the number of last axes that are the kernel, after batch axes; None for all (in
            `add_adapter`, all except axes of `layer_stack`).
        """
        ndim = kernel_ndim or w.ndim
        if not -ndim <= axis < 0:
            raise value_error(f"axis: expected -{ndim} to -1, got {axis}")
        if rank < 1:
            raise value_error(f"rank: expected a positive integer, got {rank}")
        lead, kernel = w.shape[: w.ndim - ndim], list(w.shape[w.ndim - ndim :])
        outputs, kernel[axis] = kernel[axis], rank
        bound = (math.prod(kernel) // rank) ** -0.5
        a = drawing.uniform(key, (*lead, *kernel), w.dtype, bound)
        b = drawing.zeros((*lead, rank, outputs), w.dtype)
        return cls(w, a, b, alpha_or(alpha, rank, lead), axis)

    @property
    def scaled_b(self) -> jax.Array:
        """The factor `b` times the scale `alpha / rank`."""
        b = self.widened(self.b)
        if self.alpha is None:
            return b
        return b * (self.alpha / b.shape[-2])[..., None, None].astype(b.dtype)

    def delta(self) -> jax.Array:
        """The dense correction."""
        place = self.axis % np.ndim(self.a)
        lead = range(np.ndim(self.b) - 2)
        of_a, rank, out = list(range(np.ndim(self.a))), place, np.ndim(self.a)
        of_delta = [out if i == place else i for i in of_a]
        delta = jnp.einsum(self.widened(self.a), of_a, self.scaled_b, [*lead, rank, out], of_delta)
        return delta.astype(self.dtype)

    def completed(self) -> Self:
        return self.with_number("alpha", self.b.shape[-2], self.b.shape[:-2])

    def equivalent(self) -> Result:
        """A `LoRA` if the kernel does not have a window, else `NotImplemented`."""
        plain = self.core_ndim == 2 and self.axis == -1
        return LoRA(self.w, self.a, self.b, self.alpha) if plain else NotImplemented

    def materialize(self) -> jax.Array:
        return self.w + self.delta()


@binary_handler("conv_general_dilated")
def convolve_with_locon(call: BinaryCall, x: jax.Array, w: LoCon) -> Result:
    """Convolves with the kernel and with `r` channels, or once with the dense sum."""
    numbers = call.params["dimension_numbers"]
    axis, groups = w.axis % w.ndim, call.params["feature_group_count"]
    known = not call.w_first and w.core_ndim == w.ndim and numbers.rhs_spec[0] == axis
    if not known or call.params["batch_group_count"] != 1:
        return NotImplemented
    outputs, rank = w.shape[axis], w.b.shape[-2]
    inputs = w.size // outputs
    if 3 * rank * (groups * inputs + outputs) > inputs * outputs:
        return jax.checkpoint(lambda x, w, delta: call(x, dense(w) + delta))(x, w.w, w.delta())
    # Each group of inputs meets the same `a`, and its own columns of `b`.
    a = jnp.concatenate([w.a] * groups, axis).astype(x.dtype)
    b = w.scaled_b.reshape(rank, groups, outputs // groups).astype(x.dtype)
    high, low = call(x, w.w), call(x, a)
    features = numbers.out_spec[1]
    low = jnp.moveaxis(low, features, -1)
    low = low.reshape(*low.shape[:-1], groups, rank).astype(x.dtype)
    low = jnp.einsum("...gr,rgo->...go", low, b, precision=call.params["precision"])
    low = low.reshape(*low.shape[:-2], outputs)
    return high + jnp.moveaxis(low, -1, features).astype(high.dtype)


@primitive_handler("convert_element_type")
def cast_locon(primitive: Primitive, w: LoCon, *, new_dtype: DType, **params: EqnParam) -> Result:
    """Casts the kernel and the factors to another floating dtype."""
    if not jnp.issubdtype(new_dtype, np.floating):
        return NotImplemented
    new, a, b = (primitive.bind(x, new_dtype=new_dtype, **params) for x in (w.w, w.a, w.b))
    return w._replace(w=new, a=a, b=b, shape=None, dtype=None)
