"""Equations with bodies, run again with other functions in them."""

from collections.abc import Callable, Mapping
from typing import Any


def rerun(node: Any, replaced: Mapping[int, Callable[..., Any]], *operands: Any) -> list[Any]:
    """Runs an equation whose bodies have nodes that are replaced, within a Haiku function."""
    raise NotImplementedError(
        f"{node!r}: nodes in the bodies of {node.primitive.name} can't be replaced yet"
    )
