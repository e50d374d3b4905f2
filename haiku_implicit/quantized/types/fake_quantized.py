"""`FakeQuantized`: a weight in quantization-aware training, which computes with rounded values."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.typing import Array, DType, EqnParam, Primitive
from haiku_implicit.core.wrapper import Wrapper
from haiku_implicit.quantized.matrix import QuantizedMatrix


def fake_quantize(
    x: Array,
    dtype: DType,
    group_size: Any = None,
    axis: int = -2,
    zero_point: bool = False,
    calibration: str | None = None,
    scale_dtype: DType | None = None,
) -> jax.Array:
    """Rounds values to the values of a format; the gradient is the identity's.

    The values equal the values of `QuantizedMatrix.quantize` with the same arguments, to the bit; with
    a zero point, zero is one of them. The gradient is the straight-through estimator (Bengio et al.
    2013, arXiv:1308.3432): it passes as if nothing had been rounded.

    Args:
      x: `[..., n, m]`, floating.
      dtype: as for `QuantizedMatrix.quantize`, like all that follow.
      group_size: the number of elements that share a scale.
      axis: the axis along which elements share a scale.
      zero_point: whether the format has a zero point.
      calibration: how scales are found.
      scale_dtype: how scales are stored.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError, TypeError: as `QuantizedMatrix.quantize` does.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> x = jnp.array([[1.0], [0.2], [-2.0]])
      >>> print(hki.fake_quantize(x, 'int2', zero_point=True).ravel())
      [ 1.  0. -2.]
      >>> print(jax.grad(lambda x: hki.fake_quantize(x, 'int2').sum())(x).ravel())
      [1. 1. 1.]
    """
    options = dict(dtype=dtype, group_size=group_size, axis=axis, zero_point=zero_point,
                   calibration=calibration, scale_dtype=scale_dtype)  # fmt: skip
    return _straight_through(jnp.asarray(x), tuple(options.items()))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _straight_through(x: jax.Array, options: tuple[tuple[str, Any], ...]) -> jax.Array:
    return materialize_array(QuantizedMatrix.quantize(x, **dict(options)))


@_straight_through.defjvp
def _pass_through(
    options: Any, primals: Sequence[Array], tangents: Sequence[Array]
) -> tuple[jax.Array, jax.Array]:
    return _straight_through(*primals, options), tangents[0]


@dataclasses.dataclass
class FakeQuantized(Wrapper, core_ndim=2, warn_on_materialize=False):
    """A weight that is trained in full precision and computes with its rounded values.

    It stands for `fake_quantize(value, **options)`, and so its gradient goes to `value`.

    Attributes:
      value: `[..., n, m]`, the weight before rounding, which is trained.
      options: arguments of `QuantizedMatrix.quantize`, as pairs.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.FakeQuantized(jnp.array([[1.0], [0.6]]), (('dtype', 'int2'),))
      >>> print(hki.materialize(w).ravel())
      [1. 1.]
    """

    value: Array
    options: tuple[tuple[str, Any], ...] = aux_field(default=(("dtype", "int8"),))

    def materialize(self) -> jax.Array:
        return fake_quantize(self.value, **dict(self.options))

    def quantized(self) -> QuantizedMatrix:
        """The quantized matrix with the same values, for use after training."""
        return QuantizedMatrix.quantize(self.value, **dict(self.options))


@primitive_handler(
    [
        "dot_general", "conv_general_dilated", "ragged_dot_general", "add", "sub", "mul", "div",
        "transpose", "reshape", "convert_element_type", "gather", "square", "integer_pow", "abs",
        "reduce_sum", "reduce_max", "reduce_min",
    ],
    precedence=1,
)  # fmt: skip
def apply_to_straight_through(
    primitive: Primitive, *operands: jax.Array | FakeQuantized, **params: EqnParam
) -> jax.Array:
    """Applies a product, or an operation that changes more than batch axes, to the rounded values."""
    dense = [x.materialize() if isinstance(x, FakeQuantized) else x for x in operands]
    return primitive.bind(*dense, **params)
