"""Haiku models with implicit arrays: LoRA, quantized weights, symbolic zeros, and your own types."""

from haiku_implicit import _higher_order  # noqa: F401
from haiku_implicit._array import ArrayValue, ImplicitArray, aux_field, frozen_field
from haiku_implicit._box import box
from haiku_implicit._dispatch import primitive_handler
from haiku_implicit._interpreter import default_handler
from haiku_implicit._materialization import (
    MaterializationError,
    MaterializationWarning,
    materialization,
    materialization_report,
)
from haiku_implicit._transform import (
    materialize,
    tree_flatten_with_implicit,
    tree_leaves_with_implicit,
    tree_map_with_implicit,
    tree_structure_with_implicit,
    use_implicit_args,
)
from haiku_implicit.arrays import LoRA, QuantizedMatrix, SymbolicConstant, Zeros
from haiku_implicit._creators import (
    lora_creator,
    lora_getter,
    quantize_creator,
    quantize_getter,
    zeros_creator,
    zeros_getter,
)
from haiku_implicit._haiku import transform_implicit
from haiku_implicit._params import add_lora, merge_lora, quantize_params, zero_params
from haiku_implicit._training import combine, grad, partition, value_and_grad
from haiku_implicit._optimizers import (
    apply_updates,
    freeze_declared,
    freeze_keys,
    freeze_subtrees,
)

__version__ = "0.1.0"
