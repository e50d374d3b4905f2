"""The family of implicit types: one file per type, with the class and then its rules."""

from haiku_implicit.arrays import collectives, deferred  # noqa: F401 (their rules)
from haiku_implicit.arrays.concatenated import Concatenated
from haiku_implicit.arrays.constant import SymbolicConstant
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.arrays.repeated import Repeated
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core import any_type, batch_axes  # noqa: F401 (their rules)
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.types import matrix_indexing, matrix_rules  # noqa: F401 (their rules)
from haiku_implicit.quantized.types.fake_quantized import FakeQuantized, fake_quantize
from haiku_implicit.quantized.types.quantized_blocks import QuantizedBlocks
from haiku_implicit.quantized.types.quantized_cache import QuantizedCache
from haiku_implicit.quantized.types.static_quantized import StaticQuantized
from haiku_implicit.quantized.types.trained_quantized import TrainedQuantized
from haiku_implicit.quantized.types.trellis import TrellisMatrix

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
    "TrellisMatrix",
    "Zeros",
    "fake_quantize",
]
