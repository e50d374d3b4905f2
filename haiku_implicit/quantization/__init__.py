"""How numbers are held in few bits, and how to compute with them.

The rules that say which modules are quantized how, and JAX's products with such a rule. What applies
them to the parameters of a model is in `haiku_implicit` itself: `quantized_training`.
"""

from haiku_implicit.quantization.functions import (
    conv_general_dilated,
    dot_general,
    einsum,
    ragged_dot,
)
from haiku_implicit.quantization.rules import (
    ProductConfig,
    QtRule,
    QuantRule,
    matching_rule,
    unused_rules,
)
from haiku_implicit.quantization.statistics import QuantStats

__all__ = [
    "QuantRule",
    "QtRule",
    "ProductConfig",
    "QuantStats",
    "matching_rule",
    "unused_rules",
    "dot_general",
    "einsum",
    "conv_general_dilated",
    "ragged_dot",
]
