"""The family of implicit types: one file per type, with the class and then its rules."""

from haiku_implicit.arrays import (  # noqa: F401 (their rules)
    any_type,
    batch_axes,
    collectives,
    deferred,
    quantized,
    quantized_rows,
)
from haiku_implicit.arrays.concatenated import Concatenated
from haiku_implicit.arrays.constant import SymbolicConstant
from haiku_implicit.arrays.fake_quantized import FakeQuantized, fake_quantize
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.arrays.quantized_blocks import QuantizedBlocks
from haiku_implicit.arrays.quantized_cache import QuantizedCache
from haiku_implicit.arrays.repeated import Repeated
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.arrays.static_quantized import StaticQuantized
from haiku_implicit.arrays.trained import TrainedQuantized
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix

__all__ = [
    "Concatenated",
    "FakeQuantized",
    "LoRA",
    "MatrixView",
    "QuantizedBlocks",
    "QuantizedCache",
    "QuantizedMatrix",
    "Repeated",
    "ScaledMatrix",
    "StaticQuantized",
    "SymbolicConstant",
    "TrainedQuantized",
    "Zeros",
    "fake_quantize",
]
