"""`Zeros`: a constant that annihilates, as JAX's own symbolic zeros do."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays.constant import (
    SymbolicConstant,
    as_result,
    constant_of,
    named,
    result_struct,
)
from haiku_implicit.core import compat
from haiku_implicit.core.array import ArrayValue
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.interpreter import default_handler


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Zeros(SymbolicConstant):
    """An array of zeros that annihilates: `x + Zeros` is `x`, `x * Zeros` is `Zeros`.

    These zeros are *symbolic*, as those of JAX's own differentiation are: a factor of them makes
    nothing of the other one, be it infinite or NaN, `Zeros / x` is `Zeros`, and a sum with them is
    the other term, be it -0.0. What is linear (sums, products, dots, convolutions, negation, casts,
    changes of shape) keeps this meaning. Other functions see the number 0 and are folded exactly:
    `exp(Zeros)` is `SymbolicConstant(1.0)`, and `sin(Zeros)` is `SymbolicConstant(0.0)`, a zero
    that does not annihilate.

    Args:
      shape: the shape.
      dtype: the dtype, float32 by default.

    Raises:
      TypeError: where `dtype` is no dtype of numbers.
      ValueError: where `shape` is negative.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> zeros = hki.Zeros(shape=(2, 3))
      >>> hki.use_implicit_args(jnp.matmul)(jnp.ones((4, 2)), zeros)
      Zeros(float32[4,3])
      >>> print(hki.use_implicit_args(lambda x, b: x + b)(jnp.arange(3.0), hki.Zeros(shape=(3,))))
      [0. 1. 2.]
    """

    def __init__(self, *, shape: Any, dtype: Any = jnp.float32):
        super().__init__(0, shape=shape, dtype=jnp.float32 if dtype is None else dtype)

    def __repr__(self) -> str:
        return f"Zeros({self.dtype.name}[{','.join(map(str, self.shape))}])"


def _zeros(primitive: Any, operands: Sequence[Any], params: Any) -> Any:
    out = result_struct(primitive, operands, params)
    return Zeros._make(np.zeros((), out.dtype), out.shape, bool(out.weak_type))


LINEAR = named(
    "neg real imag conj reduce_sum cumsum reduce_window_sum fft convert_element_type "
    "reduce_precision"
)
BILINEAR = named("mul mulhi and dot_general conv_general_dilated")
ADDITIVE = named("add or xor") + [compat.add_any_p]


@primitive_handler(LINEAR, precedence=20)
def linear(primitive: Any, x: Zeros, **params: Any) -> Any:
    """A linear function of zeros is zeros."""
    return _zeros(primitive, (x,), params)


@primitive_handler("complex", precedence=20)
def complex_zeros(primitive: Any, x: Zeros, y: Zeros) -> Any:
    """The same of two parts."""
    return _zeros(primitive, (x, y), {})


@primitive_handler(BILINEAR, precedence=20)
def annihilate(primitive: Any, x: Zeros, y: ArrayValue, **params: Any) -> Any:
    """A product with zeros is zeros."""
    return _zeros(primitive, (x, y), params)


@primitive_handler(BILINEAR, precedence=20)
def annihilate_second(primitive: Any, x: ArrayValue, y: Zeros, **params: Any) -> Any:
    """The same where the second factor is."""
    return _zeros(primitive, (x, y), params)


@primitive_handler(named("triangular_solve"), precedence=20)
def solve(primitive: Any, a: ArrayValue, b: Zeros, **params: Any) -> Any:
    """The system whose right side is zeros is solved by zeros, but for one known to be singular."""
    if constant_of(a) is not None:
        return NotImplemented
    return _zeros(primitive, (a, b), params)


@primitive_handler(named("div"), precedence=20)
def divide(primitive: Any, x: Zeros, y: ArrayValue, **params: Any) -> Any:
    """Zeros by anything are zeros, but for what is known not to be: 0 / 0."""
    known = constant_of(y)
    if known is not None and (not known.value or np.isnan(known.value)):
        return NotImplemented
    return _zeros(primitive, (x, y), params)


@primitive_handler(ADDITIVE, precedence=20)
def add(primitive: Any, x: Zeros, y: ArrayValue, **params: Any) -> Any:
    """A sum with zeros is the other term."""
    return as_result(y, result_struct(primitive, (x, y), params))


@primitive_handler(ADDITIVE + named("sub"), precedence=20)
def add_second(primitive: Any, x: ArrayValue, y: Zeros, **params: Any) -> Any:
    """The same where the second term is zeros, and the difference."""
    return as_result(x, result_struct(primitive, (x, y), params))


@primitive_handler("sub", precedence=20)
def subtract_from(primitive: Any, x: Zeros, y: ArrayValue, **params: Any) -> Any:
    """Zeros minus something is its negative; what is known is folded, as 0 - 0 is not -0."""
    if constant_of(y) is not None:
        return NotImplemented
    out = result_struct(primitive, (x, y), params)
    negative = default_handler(jax.lax.neg_p, y)
    return as_result(negative, out)


@primitive_handler(named("scatter_add scatter_sub"), precedence=20)
def scatter_nothing(
    primitive: Any, x: ArrayValue, indices: ArrayValue, updates: Zeros, **params: Any
) -> Any:
    """Rows of zeros change nothing."""
    return x
