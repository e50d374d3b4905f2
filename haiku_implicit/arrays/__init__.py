"""The family of implicit types: one file a type, the class and then its rules."""

from haiku_implicit.arrays import any_type, batch_axes, quantized_rows, sharding  # noqa: F401
from haiku_implicit.arrays.constant import SymbolicConstant
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.quantized import QuantizedMatrix
from haiku_implicit.arrays.zeros import Zeros

__all__ = ["LoRA", "QuantizedMatrix", "SymbolicConstant", "Zeros"]
