"""`Sum`: a weight and a correction, both of any type."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from haiku_implicit.core.array import short
from haiku_implicit.core.binary import BinaryCall, binary_handler, fits
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.messages import expecting
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.core.wrapper import Wrapper


@dataclasses.dataclass
class Sum(Wrapper, core_ndim=2, linear_in=("w", "delta")):
    """The weight `w + delta`. A product with it is the sum of the two products.

    Attributes:
      w: `[..., n, m]`.
      delta: a correction of the same shape and dtype.
      apart: whether convolutions, too, use the two terms separately instead of a kernel that is their
        sum: for a `delta` that does more than its dense matrix (`InputDropout`).

    Raises:
      ValueError: if shapes or dtypes differ.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> from haiku_implicit.adapters import Diagonal, Sum
      >>> w = Sum(jnp.zeros((2, 3)), Diagonal(jnp.array([1.0, 2.0]), 3))
      >>> print(hki.use_implicit_args(jnp.dot)(jnp.ones((1, 2)), w))
      [[1. 2. 0.]]
    """

    field_axes = {"w": "nm", "delta": "nm"}

    w: Array
    delta: Array
    apart: bool = aux_field(default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        w, delta = short(self.w), short(self.delta)
        with expecting(f"Sum: expected w and delta of one shape and dtype, got {w} and {delta}"):
            chex.assert_equal(w, delta)

    def materialize(self) -> jax.Array:
        return self.w + self.delta


@binary_handler(["dot_general", "ragged_dot_general"])
def dot_with_sum(call: BinaryCall, x: jax.Array, w: Sum) -> jax.Array:
    """Computes a product as `x · w + x · delta`."""
    out = call(x, w.w)
    return out + call(x, w.delta)


@binary_handler("conv_general_dilated")
def convolve_with_sum(call: BinaryCall, x: jax.Array, w: Sum) -> jax.Array:
    """Convolves with the dense sum, because a kernel is small compared with the images."""
    if w.apart:
        out = call(x, w.w)
        return out + call(x, w.delta)
    return jax.checkpoint(lambda x, w, delta: call(x, dense(w) + dense(delta)))(x, w.w, w.delta)


@primitive_handler("gather")
def gather_from_sum(primitive: Primitive, w: Sum, ids: jax.Array, **params: EqnParam) -> jax.Array:
    """Gathers from both terms and adds the results; only the first is filled out of bounds."""
    out = primitive.bind(w.w, ids, **params)
    if params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
        params["fill_value"] = 0
    return out + primitive.bind(w.delta, ids, **params)


@primitive_handler(["slice", "dynamic_slice", "transpose", "split"])
def rearrange_sum(primitive: Primitive, w: Sum, *others: jax.Array, **params: EqnParam) -> Result:
    """Slices, transposes or splits both terms."""
    terms = [primitive.bind(x, *others, **params) for x in (w.w, w.delta)]
    if primitive.multiple_results:
        return [_sum_of(w, *parts) for parts in zip(*terms, strict=True)]
    return _sum_of(w, *terms)


@primitive_handler("reduce_sum")
def reduce_sum(primitive: Primitive, w: Sum, **params: EqnParam) -> jax.Array:
    """Reduces both terms and adds the results."""
    return primitive.bind(w.w, **params) + primitive.bind(w.delta, **params)


@primitive_handler(["mul", "div"])
def rescale_sum(primitive: Primitive, w: Sum, x: jax.Array, **params: EqnParam) -> Result:
    """Multiplies or divides both terms by a number, or by factors that fit the matrix."""
    if not fits(x, w):
        return NotImplemented
    return _sum_of(w, primitive.bind(w.w, x, **params), primitive.bind(w.delta, x, **params))


@binary_handler(["add", "sub"])
def add_to_sum(call: BinaryCall, x: jax.Array, w: Sum) -> Result:
    """Computes `(w + delta) ± x` as `(w ± x) + delta`, and `x - (w + delta)` as `(x - w) - delta`."""
    if not fits(x, w):
        return NotImplemented
    negative = call.primitive is jax.lax.sub_p and not call.w_first
    return _sum_of(w, call(x, w.w), jnp.negative(w.delta) if negative else w.delta)


def _sum_of(old: Sum, w: Array, delta: Array) -> Sum:
    """Replaces the terms of a sum without validation, for rules."""
    return old._replace(w=w, delta=delta, shape=None, dtype=None)
