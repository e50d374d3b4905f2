"""`FakeQuantized`: a weight in quantization-aware training, which stands for its rounded values."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.array import ImplicitArray, aux_field
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix


def fake_quantize(
    x: Any,
    dtype: Any,
    group_size: Any = None,
    axis: int = -2,
    zero_point: bool = False,
    calibration: str | None = None,
    scale_dtype: Any = None,
) -> jax.Array:
    """Rounds values to those that a format has, and hands gradients on as if it had not.

    The values are those of `QuantizedMatrix.quantize` with the same arguments, to the bit; with a zero
    point, zero is one of them. The gradient is that of the identity, the straight-through estimator
    (Bengio et al. 2013, arXiv:1308.3432).

    Args:
      x: `[..., n, m]`, floating.
      dtype: as for `QuantizedMatrix.quantize`, like all that follow.
      group_size: how many elements share a scale.
      axis: the axis that scales are shared along.
      zero_point: whether there is one.
      calibration: how scales are found.
      scale_dtype: how they are stored.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: as `QuantizedMatrix.quantize` does.
      TypeError: as it does.

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
    return _rounded(jnp.asarray(x), tuple(options.items()))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: jax.Array, options: tuple[tuple[str, Any], ...]) -> jax.Array:
    return materialize_array(QuantizedMatrix.quantize(x, **dict(options)))


@_rounded.defjvp
def _pass_through(options: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _rounded(*primals, options), tangents[0]


@dataclasses.dataclass
class FakeQuantized(ImplicitArray, core_ndim=2, warn_on_materialize=False):
    """The rounded values of a weight that is trained: those of `fake_quantize(value, **options)`.

    Attributes:
      value: `[..., n, m]`, the weight before rounding. It is what is trained.
      options: arguments of `QuantizedMatrix.quantize`, as pairs.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.FakeQuantized(jnp.array([[1.0], [0.6]]), (('dtype', 'int2'),))
      >>> print(hki.materialize(w).ravel())
      [1. 1.]
    """

    value: Any
    options: tuple[tuple[str, Any], ...] = aux_field(default=(("dtype", "int8"),))

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.value))

    def compute_dtype(self) -> Any:
        return self.value.dtype

    def materialize(self) -> jax.Array:
        return fake_quantize(self.value, **dict(self.options))

    def quantized(self) -> QuantizedMatrix:
        """The stored matrix of the same values."""
        return QuantizedMatrix.quantize(self.value, **dict(self.options))


@primitive_handler(["dot_general", "conv_general_dilated"])
def multiply_rounded(primitive: Any, x: jax.Array, w: FakeQuantized, **params: Any) -> jax.Array:
    """The product with the rounded values."""
    return primitive.bind(x, w.materialize(), **params)


@primitive_handler(["dot_general", "conv_general_dilated"])
def multiply_by_rounded(primitive: Any, w: FakeQuantized, x: jax.Array, **params: Any) -> jax.Array:
    """The same with the weight first."""
    return primitive.bind(w.materialize(), x, **params)


@primitive_handler(["transpose", "reshape", "convert_element_type", "gather"])
def as_rounded(primitive: Any, w: FakeQuantized, *others: jax.Array, **params: Any) -> jax.Array:
    """What is no batch axis is that of the rounded values."""
    return primitive.bind(w.materialize(), *others, **params)
