"""Weights that a model standardizes or normalizes before it multiplies them.

Weight standardization (NFNets) subtracts the mean of a kernel and divides by its deviation; weight
normalization divides by a norm. None of this needs a dense weight. A subtrahend for each row or column
is a correction of rank one (`LoRA`), and a factor for each is a `ScaledMatrix`. A sum or a maximum of
squares is computed block after block. `Deferred` is the weight between the square and the sum.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Union

import jax
import jax.numpy as jnp
from jax import export

from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.binary import BinaryCall, binary_handler, fits
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler, rules_for
from haiku_implicit.core.fields import aux_field
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.sharding import is_split
from haiku_implicit.core.typing import Array, EqnParam, EqnParams, Primitive, Result
from haiku_implicit.core.wrapper import Wrapper
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.products.blocks import BLOCKED_FROM, over_blocks, slices
from haiku_implicit.quantized.types.ruled import RuledWeight

# With this many blocks, a block's values and a gradient's residuals stay far below 1/8 of the array.
_NUM_BLOCKS = 64

_COMBINED = {
    jax.lax.reduce_sum_p: (jnp.add, 0.0),
    jax.lax.reduce_max_p: (jnp.maximum, -jnp.inf),
    jax.lax.reduce_min_p: (jnp.minimum, jnp.inf),
}

Step = tuple[str, tuple[tuple[str, Any], ...]]


@dataclasses.dataclass
class Deferred(Wrapper, core_ndim=2):
    """An elementwise function of a weight that is computed when its values are reduced.

    Sums, maxima and minima see one block of it at a time. Everything else sees the dense array, which
    is reported.

    Attributes:
      w: `[..., n, m]`, the weight, usually itself implicit.
      steps: the function: a sequence of primitives, by name, with their parameters (`jax.export` can
        write these to files).

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.QuantizedMatrix.quantize(jnp.array([[3.0], [4.0]]), 'int8')
      >>> square = hki.use_implicit_args(jax.lax.square)(w)
      >>> square.steps
      (('square', ()),)
      >>> print(hki.use_implicit_args(jnp.sum)(square).round())
      25.0
    """

    field_axes = {"w": "nm"}

    w: Array
    steps: tuple[Step, ...] = aux_field(default=())

    def materialize(self) -> jax.Array:
        return self.applied(dense(self.w))

    def applied(self, values: jax.Array) -> jax.Array:
        """Applies the function to values of the weight.

        Args:
          values: values of any shape.
        """
        for name, params in self.steps:
            values = getattr(jax.lax, f"{name}_p").bind(values, **dict(params))
        return values

    def followed_by(self, primitive: Primitive, params: EqnParams) -> "Deferred":
        """This function, followed by a primitive."""
        return self._replace(steps=(*self.steps, (primitive.name, tuple(params.items()))))


class WrappedWeight(Wrapper):
    """A base of types around a weight that can be standardized, normalized and cut by the rules here.

    A type inherits from it if its rules for products and slices keep these from becoming dense. Other
    types of users have no such rules: only their own are known.
    """


# Plum needs a typing.Union.
Weight = Union[LoRA, QuantizedMatrix, ScaledMatrix, RuledWeight, WrappedWeight]  # noqa: UP007
AnyWeight = Union[Weight, Deferred]  # noqa: UP007


# --- functions of each element -------------------------------------------------------------------


@primitive_handler(["square", "integer_pow", "abs"])
def defer(primitive: Primitive, w: AnyWeight, **params: EqnParam) -> Result:
    """Defers the elementwise function of a statistic to its reduction."""
    if not w.may_be_wrapped or not jnp.issubdtype(w.dtype, jnp.floating):
        return NotImplemented
    return (w if isinstance(w, Deferred) else Deferred(w)).followed_by(primitive, params)


@primitive_handler(["neg", "convert_element_type"])
def defer_further(primitive: Primitive, w: Deferred, **params: EqnParam) -> Result:
    """Defers functions for which weights themselves have rules."""
    new = params.get("new_dtype", w.dtype)
    if not jnp.issubdtype(new, jnp.floating) or params.get("sharding") is not None:
        return NotImplemented
    return w.followed_by(primitive, params)._replace(dtype=jnp.dtype(new))


@primitive_handler("mul", precedence=-1)
def times_itself(
    primitive: Primitive, w: ImplicitArray, other: ImplicitArray, **params: EqnParam
) -> Result:
    """Computes `w * w`, as norms do, as the square of `w` if that has a rule, or by an equal type."""
    if w is not other or any(v is not None for v in params.values()):
        return NotImplemented
    if rules_for(jax.lax.square_p, (type(w),)):
        return default_handler(jax.lax.square_p, w)
    equal = w.equivalent()
    return equal if equal is NotImplemented else default_handler(primitive, equal, equal, **params)


# --- reductions ----------------------------------------------------------------------------------


@primitive_handler(list(_COMBINED))
def reduce_weight(primitive: Primitive, w: Weight, **params: EqnParam) -> Result:
    """Reduces a weight by `reduce_in_blocks`."""
    return default_handler(primitive, Deferred(w), **params) if w.may_be_wrapped else NotImplemented


@primitive_handler(list(_COMBINED))
def reduce_in_blocks(
    primitive: Primitive, w: Deferred, *, axes: Sequence[int], **params: EqnParam
) -> Result:
    """Reduces with only one block of the dense array in memory, and keeps none for the backward pass.

    (If several elements are the largest, all of them share the gradient, but less equally than in a
    dense array when blocks are combined.)
    """
    is_plain = all(v is None for v in params.values()) and not is_split(w)
    if not is_plain or 0 in w.shape or any(map(export.is_symbolic_dim, w.shape)):
        return NotImplemented
    cut = _axis_to_cut(w.shape, () if primitive is jax.lax.reduce_sum_p else axes)
    length = w.shape[cut]
    size = length if w.size <= BLOCKED_FROM else max(length // _NUM_BLOCKS, 1)
    place = None if cut in axes else cut - sum(i < cut for i in axes)
    # Sums of blocks are not rounded before they are added.
    wide = jnp.promote_types(w.dtype, jnp.float32)

    def block(start: Array, size: int) -> jax.Array:
        def reduced(start: Array) -> jax.Array:
            part = w.w if size == length else slices(w.w, start, size, cut)
            return primitive.bind(w.applied(dense(part)).astype(wide), axes=axes, **params)

        # Without a checkpoint, the scan would keep each dense block for the backward pass. (JAX would
        # keep a function with static arguments, and `w` with it.)
        return jax.checkpoint(reduced, prevent_cse=False)(start)

    return over_blocks(block, length, size, place, *_COMBINED[primitive]).astype(w.dtype)


def _axis_to_cut(shape: Sequence[int], reduced: Sequence[int]) -> int:
    """The last axis that is long enough, preferably not a reduced one, for the sake of gradients."""
    return max(range(len(shape)), key=lambda i: (min(shape[i], _NUM_BLOCKS), i not in reduced, i))


# --- shifted and scaled by rows or columns -------------------------------------------------------


@binary_handler(["add", "sub"])
def shift(call: BinaryCall, x: jax.Array, w: Weight) -> Result:
    """Computes `w ± x` and `x ± w` as a correction of rank one: one `x`, or one per row or column."""
    along = _constant_axis(x, w)
    if along is None or not _may_be_wrapped(w, x):
        return NotImplemented
    negative = call.primitive is jax.lax.sub_p
    if negative and not call.w_first:
        w, negative = default_handler(jax.lax.neg_p, w), False
    *batch, n, m = w.shape
    x = _for_each_matrix(-x if negative else x, w, along)
    if along == -2:
        return LoRA(w, jnp.ones((*batch, n, 1), x.dtype), x)
    return LoRA(w, x, jnp.ones((*batch, 1, m), x.dtype))


@primitive_handler(["mul", "div"])
def scale(
    primitive: Primitive,
    w: QuantizedMatrix | ScaledMatrix | WrappedWeight,
    x: jax.Array,
    **params: EqnParam,
) -> Result:
    """Scales rows or columns with factors that the type can't take itself."""
    along = _constant_axis(x, w)
    by_number = not x.ndim and isinstance(w, WrappedWeight)  # its field takes the number
    if along is None or by_number or not _may_be_wrapped(w, x):
        return NotImplemented
    factor = _for_each_matrix(x if primitive is jax.lax.mul_p else 1 / x, w, along)
    if along == -1:
        return ScaledMatrix(w, factor[..., 0], axis=-2)
    return ScaledMatrix(w, factor[..., 0, :], axis=-1)


def _constant_axis(x: jax.Array, w: Array) -> int | None:
    """An axis of the matrices along which an operand is constant; None if there is none.

    None also for an operand that does not fit.
    """
    if not x.ndim:
        return -2
    return next((i for i in (-2, -1) if fits(x, w) and x.shape[i] != w.shape[i]), None)


def _for_each_matrix(x: jax.Array, w: Array, along: int) -> jax.Array:
    """Broadcasts an operand to the weight's shape, with length one along its constant axis."""
    shape = list(w.shape)
    shape[along] = 1
    return jnp.broadcast_to(x, shape)


def _may_be_wrapped(w: Array, x: jax.Array) -> bool:
    """Whether products are the same with another type around the weight.

    Convolutions would not quantize activations, and explicit axes of a mesh would split the new parts.
    """
    if not (w.may_be_wrapped and jnp.issubdtype(w.dtype, jnp.floating)) or is_split([w, x]):
        return False
    stored = w.wrapped if isinstance(w, RuledWeight) else w
    return w.ndim == 2 or getattr(stored, "activation", None) is None
