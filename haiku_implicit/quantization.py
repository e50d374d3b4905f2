"""How numbers are held in few bits, and how to compute with them.

The rules that say which modules are quantized how, and JAX's products with such a rule. What applies
them to the parameters of a model is in `haiku_implicit` itself: `quantized_training`.
"""

from haiku_implicit.numerics import formats
from haiku_implicit.products.activation_stats import QuantStats
from haiku_implicit.products.by_rule import conv_general_dilated, dot_general, einsum, ragged_dot
from haiku_implicit.products.product_config import GradientConfig, OperandConfig, ProductConfig
from haiku_implicit.products.quant_rules import QtRule, QuantRule, matching_rule, unused_rules

__all__ = [
    "formats",
    "QuantRule",
    "QtRule",
    "ProductConfig",
    "OperandConfig",
    "GradientConfig",
    "QuantStats",
    "matching_rule",
    "unused_rules",
    "dot_general",
    "einsum",
    "conv_general_dilated",
    "ragged_dot",
]
