"""`Observed`: a weight that sees what it is multiplied by."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit._array import ImplicitArray, frozen_field
from haiku_implicit._dispatch import primitive_handler


@dataclasses.dataclass
class Observed(ImplicitArray, core_ndim=2):
    """A dense weight, of whose inputs the gradient by `moments` is the sum of products.

    That makes statistics of a pure function: differentiation collects them, through loops, branches,
    checkpoints and stacks of layers. The gradient that arrives does not matter, only that one does.

    Attributes:
      w: `[..., n, m]`.
      moments: `[..., n, n]`, zeros: for inputs x `[b, n]` of `x @ w` their gradient is xᵀx.
    """

    w: Any = frozen_field()
    moments: Any = frozen_field()

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def compute_dtype(self) -> Any:
        return self.w.dtype

    def materialize(self) -> jax.Array:
        return self.w


@primitive_handler("dot_general")
def dot_with_observed(
    primitive: Any, x: jax.Array, w: Observed, *, dimension_numbers: Any, **params: Any
) -> Any:
    """`x @ w`: what is contracted with the first axis of the weight is seen."""
    return _observed_dot(primitive, x, w, dimension_numbers, False, params)


@primitive_handler("dot_general")
def dot_of_observed(
    primitive: Any, w: Observed, x: jax.Array, *, dimension_numbers: Any, **params: Any
) -> Any:
    """The same with the weight first."""
    return _observed_dot(primitive, x, w, dimension_numbers, True, params)


def _observed_dot(
    primitive: Any, x: jax.Array, w: Observed, numbers: Any, first: bool, params: Any
) -> Any:
    contract, batch = (pair[::-1] if first else pair for pair in numbers)
    if w.ndim != 2 or tuple(contract[1]) != (0,) or batch[1]:
        return NotImplemented
    x = _seen(x, w.moments, contract[0][0])
    operands = (w.w, x) if first else (x, w.w)
    return primitive.bind(*operands, dimension_numbers=numbers, **params)


def _seen(x: jax.Array, moments: jax.Array, axis: int) -> jax.Array:
    """`x`, with a gradient by `moments`."""

    @jax.custom_vjp
    def identity(x: jax.Array, moments: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array, moments: jax.Array) -> Any:
        return x, (x, moments)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        x, moments = kept
        rows = jnp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]).astype(moments.dtype)
        return cotangent, rows.T @ rows

    identity.defvjp(forward, backward)
    return identity(x, moments)


@primitive_handler("convert_element_type")
def cast_observed(primitive: Any, w: Observed, **params: Any) -> Observed:
    """A cast weight sees its inputs as well."""
    return w._replace(w=primitive.bind(w.w, **params))


@primitive_handler("transpose")
def transposed_observed(primitive: Any, w: Observed, **params: Any) -> Any:
    """What contracts the other axis sees nothing; the values are dense."""
    return primitive.bind(w.w, **params)
