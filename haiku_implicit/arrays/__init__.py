"""The family of implicit types: one file a type, the class and then its rules."""

from haiku_implicit.arrays import any_type  # noqa: F401
from haiku_implicit.arrays.lora import LoRA

__all__ = ["LoRA"]
