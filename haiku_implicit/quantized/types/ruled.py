"""`RuledWeight`: the base of weights whose products quantize the other operand, too."""

import abc

import jax

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.batch_axes import on_batch_axes
from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.core.wrapper import Wrapper
from haiku_implicit.quantized.products.bilinear import Product, product_of
from haiku_implicit.quantized.products.product import quantized_product
from haiku_implicit.quantized.products.rules import ProductConfig


class RuledWeight(Wrapper, core_ndim=2):
    """A weight, dense or quantized, whose products quantize activations (and more).

    Operations that rearrange or rescale the weight apply to `wrapped`, and their result is a weight for
    the product that follows.

    Attributes:
      stats: statistics of the activation, a `QuantStats`, or None.
    """

    stats: Array

    @property
    def first_key(self) -> Array:
        """A random key for stochastic rounding in one product; None without keys."""
        return None

    @abc.abstractmethod
    def with_weight(self, weight: Array) -> Array:
        """Puts a rearranged weight in this type; returns `weight` itself if it doesn't fit the type."""

    @abc.abstractmethod
    def config(self, op_name: str, w_first: bool, product: Product) -> ProductConfig | None:
        """How a product with the weight quantizes operands; None if it quantizes none.

        Args:
          op_name: the operation, one of `quant_rules.OP_NAMES`.
          w_first: whether the weight is the first operand.
          product: the product.
        """


# --- products ------------------------------------------------------------------------------------


@binary_handler(["dot_general", "conv_general_dilated", "ragged_dot_general"])
def multiply_by_rule(call: BinaryCall, x: jax.Array, w: RuledWeight) -> Result:
    """Multiplies by a function of `quantization`: `dot_general`, `ragged_dot`, ..."""
    if call.others and call.w_first:  # rules are for the matrices of a ragged product, not its rows
        return NotImplemented
    op_name = "ragged_dot" if call.others else call.primitive.name
    pair, dtype = call.ordered(x, w.wrapped), call.params["preferred_element_type"]
    product = product_of(call.primitive, pair, call.params)
    if product is None:
        return NotImplemented
    config = w.config(op_name, call.w_first, product)
    if config is None:
        return call(x, w.wrapped)
    options = dict(dtype=dtype, key=w.first_key, stats=w.stats)
    return quantized_product(product, config, pair, call.others, **options)


# --- rearrangements ------------------------------------------------------------------------------


@primitive_handler(
    [
        "transpose", "reshape", "broadcast_in_dim", "squeeze", "rev", "slice", "dynamic_slice",
        "split", "neg", "convert_element_type", "gather",
    ]
)  # fmt: skip
def rearrange(
    primitive: Primitive, w: RuledWeight, *others: jax.Array, **params: EqnParam
) -> Result:
    """Rearranges the wrapped weight, which is still a weight for the product that follows.

    Rows that an embedding looks up are dense, and not rounded by the rules.
    """
    out = on_batch_axes(primitive, w, *others, **params)
    if out is not NotImplemented:  # each matrix has its own keys and statistics
        return out
    out = default_handler(primitive, w.wrapped, *others, **params)
    if primitive is jax.lax.gather_p and not is_implicit(out):
        return out
    return jax.tree.map(w.with_weight, out, is_leaf=is_implicit)


@primitive_handler(["mul", "div"])
def rescale(primitive: Primitive, w: RuledWeight, x: jax.Array, **params: EqnParam) -> Result:
    """Multiplies or divides by a number or factors along some axes, as in weight normalization.

    An `x` with a number for each element may be an activation, and then the result is not a weight.
    """
    is_factor = x.ndim == 0 or any(i < j for i, j in zip(x.shape, w.shape, strict=True))
    return rearrange(primitive, w, x, **params) if is_factor else NotImplemented
