"""Quantization rules, formats, and products that follow the rules.

A rule says how the modules that it matches are quantized; the products are JAX's, with such a rule.
To apply rules to the parameters of a model, use `haiku_implicit.quantized_training`.
"""

from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.numbers.formats import register_format
from haiku_implicit.quantized.numbers.options import OperandConfig
from haiku_implicit.quantized.products.activation_stats import QuantStats
from haiku_implicit.quantized.products.by_rule import (
    conv_general_dilated,
    dot_general,
    einsum,
    ragged_dot,
)
from haiku_implicit.quantized.products.rules import (
    GradientConfig,
    ProductConfig,
    QtRule,
    QuantRule,
    matching_rule,
    unused_rules,
)

__all__ = [
    "formats",
    "register_format",
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
