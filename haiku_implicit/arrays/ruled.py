"""`RuledWeight`: the base of weights in whose products other operands are quantized, too."""

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
    """A weight, dense or quantized, in whose products activations (and more) are quantized.

    What rearranges or rescales the weight does so to `wrapped`, and the result is a weight again, for
    the product that follows.
    """

    @abc.abstractmethod
    def with_weight(self, weight: Any) -> Any:
        """Another arrangement of the weight, in this type; `weight` itself where it can't be in it."""

    @abc.abstractmethod
    def how(self, op_name: str, w_first: bool, product: Product) -> How | None:
        """What is quantized in a product with the weight; None where nothing is.

        Args:
          op_name: the operation, one of `quant_rules.OP_NAMES`.
          w_first: whether the weight is the first operand.
          product: the product.
        """


# --- products ------------------------------------------------------------------------------------


@binary_handler(["dot_general", "conv_general_dilated"])
def multiply_by_rule(call: BinaryCall, x: jax.Array, w: RuledWeight) -> Any:
    """See `quantization.dot_general` and `quantization.conv_general_dilated`."""
    return _multiply(call.primitive.name, call.primitive, x, w, call.w_first, call.params)


@primitive_handler(ragged_dot_general_p)
def ragged_dot_by_rule(
    primitive: Primitive, x: jax.Array, w: RuledWeight, group_sizes: jax.Array, **params: Any
) -> Any:
    """See `quantization.ragged_dot`."""
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
    """The same of what is wrapped: it is still a weight for the product that follows."""
    out = on_batch_axes(primitive, w, *others, **params)
    if out is not NotImplemented:  # each matrix has keys and statistics of its own
        return out
    out = default_handler(primitive, w.wrapped, *others, **params)
    return jax.tree.map(w.with_weight, out, is_leaf=is_implicit)


@primitive_handler(["mul", "div"])
def rescale(primitive: Primitive, w: RuledWeight, x: jax.Array, **params: Any) -> Any:
    """Times or divided by a number or factors along some axes, as where a weight is normalized.

    An `x` with a number for each element may be an activation, and the result is then not a weight.
    """
    is_factor = x.ndim == 0 or any(i < j for i, j in zip(x.shape, w.shape, strict=True))
    return rearrange(primitive, w, x, **params) if is_factor else NotImplemented


@primitive_handler("gather")
def look_up(primitive: Primitive, w: RuledWeight, indices: jax.Array, **params: Any) -> Any:
    """Rows of a table become dense, unrounded by the rules; whole matrices of a batch are weights."""
    out = on_batch_axes(primitive, w, indices, **params)
    if out is NotImplemented:
        out = default_handler(primitive, w.wrapped, indices, **params)
        out = w.with_weight(out) if is_implicit(out) else out
    return out
