"""The family of implicit types: one file per type, with the class and then its rules."""

# ruff: noqa: F401
# Types and rules, which act without being named.
from haiku_implicit.arrays import collectives, concatenated, deferred, repeated
from haiku_implicit.core import any_type, batch_axes
from haiku_implicit.quantized.types import (
    fake_quantized,
    matrix_indexing,
    matrix_rules,
    quantized_blocks,
    quantized_cache,
    static_quantized,
    trained_quantized,
    trellis,
)
