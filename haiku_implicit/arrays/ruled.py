"""`RuledWeight`: the base of weights whose products quantize the other operand, too."""

import abc
from typing import Any

import jax

from haiku_implicit.arrays.batch_axes import on_batch_axes
from haiku_implicit.arrays.wrapper import Wrapper
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.compat import Primitive, ragged_dot_general_p
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.products.bilinear import Product, product_of
from haiku_implicit.products.by_rule import How, apply


class RuledWeight(Wrapper, core_ndim=2):
    """A weight, dense or quantized, whose products quantize activations (and more).

    Operations that rearrange or rescale the weight apply to `wrapped`, and their result is a weight for
    the product that follows.
    """

    @abc.abstractmethod
    def with_weight(self, weight: Any) -> Any:
        """Puts a rearranged weight in this type; returns `weight` itself if it doesn't fit the type."""

    @abc.abstractmethod
    def how(self, op_name: str, w_first: bool, product: Product) -> How | None:
        """How a product with the weight quantizes operands; None if it quantizes none.

        Args:
          op_name: the operation, one of `quant_rules.OP_NAMES`.
          w_first: whether the weight is the first operand.
          product: the product.
        """


# --- products ------------------------------------------------------------------------------------


@binary_handler(["dot_general", "conv_general_dilated"])
def multiply_by_rule(call: BinaryCall, x: jax.Array, w: RuledWeight) -> Any:
    """Multiplies by `quantization.dot_general` or `quantization.conv_general_dilated`."""
    return _multiply(call.primitive.name, call.primitive, x, w, call.w_first, call.params)


@primitive_handler(ragged_dot_general_p)
def ragged_dot_by_rule(
    primitive: Primitive, x: jax.Array, w: RuledWeight, group_sizes: jax.Array, **params: Any
) -> Any:
    """Multiplies rows with the matrices of their groups by `quantization.ragged_dot`."""
    return _multiply("ragged_dot", primitive, x, w, False, params, group_sizes)


def _multiply(
    op_name: str,
    primitive: Primitive,
    x: jax.Array,
    w: RuledWeight,
    w_first: bool,
    params: dict[str, Any],
    *others: jax.Array,
) -> Any:
    pair = (w.wrapped, x) if w_first else (x, w.wrapped)
    product = product_of(primitive, pair, params)
    if product is None:
        return NotImplemented
    how = w.how(op_name, w_first, product)
    if how is None:
        return default_handler(primitive, *pair, *others, **params)
    return apply(product, pair, how._replace(dtype=params["preferred_element_type"]), others)


# --- rearrangements ------------------------------------------------------------------------------


@primitive_handler(
    [
        "transpose", "reshape", "broadcast_in_dim", "squeeze", "rev", "slice", "dynamic_slice",
        "split", "neg", "convert_element_type",
    ]
)  # fmt: skip
def rearrange(primitive: Primitive, w: RuledWeight, *others: jax.Array, **params: Any) -> Any:
    """Rearranges the wrapped weight, which is still a weight for the product that follows."""
    out = on_batch_axes(primitive, w, *others, **params)
    if out is not NotImplemented:  # each matrix has its own keys and statistics
        return out
    out = default_handler(primitive, w.wrapped, *others, **params)
    return jax.tree.map(w.with_weight, out, is_leaf=is_implicit)


@primitive_handler(["mul", "div"])
def rescale(primitive: Primitive, w: RuledWeight, x: jax.Array, **params: Any) -> Any:
    """Multiplies or divides by a number or factors along some axes, as in weight normalization.

    An `x` with a number for each element may be an activation, and then the result is not a weight.
    """
    is_factor = x.ndim == 0 or any(i < j for i, j in zip(x.shape, w.shape, strict=True))
    return rearrange(primitive, w, x, **params) if is_factor else NotImplemented


@primitive_handler("gather")
def look_up(primitive: Primitive, w: RuledWeight, indices: jax.Array, **params: Any) -> Any:
    """Looks up rows, dense and not rounded by the rules, or whole matrices of a batch as weights."""
    out = on_batch_axes(primitive, w, indices, **params)
    if out is NotImplemented:
        out = default_handler(primitive, w.wrapped, indices, **params)
        out = w.with_weight(out) if is_implicit(out) else out
    return out
