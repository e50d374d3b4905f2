"""Haiku models on implicit arrays: LoRA, quantized weights, symbolic zeros, and your own types.

The names follow the order of use: wrap a model; put implicit arrays in its parameters, or let it make
them; train; report materialized arrays; and for new types, the base class and the rules.
"""

import ast
import importlib
import pathlib
import warnings
from typing import Any

# ruff: noqa: F401
# Types and rules, which act without being named: files hold types, and operands choose rules.
import haiku_implicit.adapters
import haiku_implicit.arrays
import haiku_implicit.core.custom_derivatives
import haiku_implicit.core.higher_order
import haiku_implicit.core.placing
import haiku_implicit.files.other_types
import haiku_implicit.params.adapters.bank
import haiku_implicit.params.adapters.parts
import haiku_implicit.quantized.types.observed
import haiku_implicit.training.optimizers
import haiku_implicit.training.quantized_state

__version__ = "0.1.0"

# Everything else is imported at its first use. The stub names the module of each name.
_stub = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_modules = {
    alias.name: node.module
    for node in _stub.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
[__all__] = [ast.literal_eval(node.value) for node in _stub.body if isinstance(node, ast.Assign)]

# Public names that go, each with the one that takes its place; for one minor version they are aliases.
_RENAMED: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        old, name = name, _RENAMED[name]
        text = f"haiku_implicit.{old} is now haiku_implicit.{name}; the next minor version drops it"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    if name not in _modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _modules[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    globals()[name] = found = getattr(importlib.import_module(_modules[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
