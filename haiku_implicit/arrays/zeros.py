"""`Zeros`: a constant that annihilates, as JAX's symbolic zeros do."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.constant import (
    SymbolicConstant,
    as_result,
    constant_of,
    result_of,
    result_struct,
)
from haiku_implicit.core import compat
from haiku_implicit.core.array import ArrayValue, short
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.dispatch import named, primitive_handler
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.messages import type_error
from haiku_implicit.core.typing import DType, EqnParam, Primitive, Result

# An optimizer that meets these zeros was not told which arrays are frozen.
_WAY_OUT = (
    "the gradient of a frozen array: hki.freeze_declared(optimizer) takes it; wrappers such as "
    "optax.MultiSteps and optax.apply_if_finite belong inside"
)


class _TellsTheWayOut(type(SymbolicConstant)):  # type: ignore[misc]
    """Adds the way out to the name of `Zeros`: JAX's errors about different trees print only types."""

    def __repr__(cls) -> str:
        return f"{super().__repr__()} ({_WAY_OUT})"


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Zeros(SymbolicConstant, metaclass=_TellsTheWayOut):
    """An array of zeros that annihilates: `x + Zeros` is `x`, `x * Zeros` is `Zeros`.

    These zeros are *symbolic*, like the zeros of JAX's differentiation: `Zeros * x` and `Zeros / x`
    are `Zeros` even if `x` is infinite or NaN, and `x + Zeros` is `x` even if that is -0.0.
    Linear functions (sums, products, dots, convolutions, negation, casts, changes of shape) give
    `Zeros`. Other functions see the number 0 and are folded exactly: `exp(Zeros)` is
    `SymbolicConstant(1.0)`, and `sin(Zeros)` is `SymbolicConstant(0.0)`, a zero that does not
    annihilate.

    Args:
      shape: the shape.
      dtype: the dtype, float32 by default.

    Raises:
      TypeError: if `dtype` is not a dtype of numbers.
      ValueError: if `shape` is negative.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> zeros = hki.Zeros(shape=(2, 3))
      >>> hki.use_implicit_args(jnp.matmul)(jnp.ones((4, 2)), zeros)
      Zeros(float32[4,3])
      >>> print(hki.use_implicit_args(lambda x, b: x + b)(jnp.arange(3.0), hki.Zeros(shape=(3,))))
      [0. 1. 2.]
    """

    def __init__(self, *, shape: Sequence[int], dtype: DType = jnp.float32):
        super().__init__(0, shape=shape, dtype=jnp.float32 if dtype is None else dtype)

    def __repr__(self) -> str:
        return f"Zeros({short(self)})"

    def __jax_array__(self) -> jax.Array:
        try:
            return super().__jax_array__()
        except TypeError as error:
            raise type_error(f"{error} Zeros may be {_WAY_OUT}.") from None


def _zeros(out: jax.ShapeDtypeStruct) -> Zeros:
    return Zeros._make(np.zeros((), out.dtype), out.shape, bool(out.weak_type))


LINEAR = named(
    "neg real imag conj complex reduce_sum cumsum reduce_window_sum fft convert_element_type "
    "reduce_precision"
)
BILINEAR = named("mul mulhi and dot_general conv_general_dilated ragged_dot_general")
ADDITIVE = named("add or xor") + [compat.add_any_p]


@primitive_handler(LINEAR, precedence=20)
def linear(primitive: Primitive, *operands: Zeros, **params: EqnParam) -> Zeros:
    """Applies a linear function to zeros, or makes complex zeros of two parts."""
    return _zeros(result_struct(primitive, operands, params))


@binary_handler(BILINEAR, precedence=20)
def annihilate(call: BinaryCall, x: ArrayValue, zeros: Zeros) -> Zeros:
    """Multiplies with zeros, which gives zeros."""
    return _zeros(result_of(call, x, zeros))


@primitive_handler(named("triangular_solve"), precedence=20)
def solve(primitive: Primitive, a: ArrayValue, b: Zeros, **params: EqnParam) -> Result:
    """Solves a system with zeros on its right side by zeros, unless a constant matrix is singular."""
    if constant_of(a) is not None:
        return NotImplemented
    return _zeros(result_struct(primitive, (a, b), params))


@primitive_handler(named("div"), precedence=20)
def divide(primitive: Primitive, x: Zeros, y: ArrayValue, **params: EqnParam) -> Result:
    """Divides zeros, which gives zeros, unless the divisor is known to be zero or NaN."""
    known = constant_of(y)
    if known is not None and (not known.value or np.isnan(known.value)):
        return NotImplemented
    return _zeros(result_struct(primitive, (x, y), params))


@binary_handler(ADDITIVE, precedence=20)
def add(call: BinaryCall, x: ArrayValue, zeros: Zeros) -> Result:
    """Adds zeros, which gives the other term."""
    return as_result(x, result_of(call, x, zeros))


@primitive_handler("sub", precedence=20)
def subtract(primitive: Primitive, x: ArrayValue, zeros: Zeros, **params: EqnParam) -> Result:
    """Subtracts zeros, which gives the first operand."""
    return as_result(x, result_struct(primitive, (x, zeros), params))


@primitive_handler("sub", precedence=20)
def subtract_from(primitive: Primitive, zeros: Zeros, y: ArrayValue, **params: EqnParam) -> Result:
    """Subtracts from zeros, which negates; constants are folded, because 0 - 0 is not -0."""
    if constant_of(y) is not None:
        return NotImplemented
    negative = default_handler(jax.lax.neg_p, y)
    return as_result(negative, result_struct(primitive, (zeros, y), params))


@primitive_handler(named("scatter_add scatter_sub"), precedence=20)
def scatter_nothing(
    primitive: Primitive, x: ArrayValue, indices: ArrayValue, updates: Zeros, **params: EqnParam
) -> Result:
    """Adds rows of zeros to an array, which does not change it."""
    return x
