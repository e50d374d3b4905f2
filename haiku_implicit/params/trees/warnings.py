"""Warnings of correct but unexpected results: large adapters, weights left out."""

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from haiku_implicit.arrays.matrix_view import matrix_of
from haiku_implicit.core.messages import shown, warn_caller
from haiku_implicit.core.typing import Array, Tree
from haiku_implicit.params.trees.one_by_one import is_news
from haiku_implicit.params.trees.selection import Parameter, describe

# A function of weights that are left out, which returns a warning.
Text = Callable[[Sequence[Parameter]], str]


class LargeAdapters:
    """Looks for adapters with more numbers than their weights, and warns of them.

    A weight of more than two axes is a stack of matrices, each with its own adapter. If these matrices
    are small, as in attention's weights `[inputs, heads, width]`, the adapters are larger than the
    weight.
    """

    def __init__(self) -> None:
        self._found: list[str] = []

    def see(self, parameter: Parameter, new: Array) -> Array:
        """Looks at a weight and its new adapter, and returns the latter."""
        weight = matrix_of(new)
        size, added = math.prod(parameter.value.shape), _numbers(weight) - _numbers(weight.w)
        if len(parameter.value.shape) - parameter.stacked > 2 and added > size:
            about = f"{describe(parameter.value)}: {added:,} numbers for {size:,}"
            self._found.append(f"{parameter.path} ({about})")
        return new

    def warn(self) -> None:
        """Warns of the large adapters."""
        if not self._found or not is_news("large"):
            return
        warn_caller(
            f"an adapter has more numbers than its weight: {shown(self._found)}. A weight of more than "
            "two axes counts as a stack of matrices [..., n, m] with an adapter each. matrix_axes= "
            "says which axes make one matrix, such as {'.*/query/w': ([-3], [-2, -1])} for "
            "[inputs, heads, width]; a smaller rank= or exclude= helps, too"
        )


def _numbers(tree: Tree) -> int:
    return sum(math.prod(np.shape(x)) for x in jax.tree_util.tree_leaves(tree))


def warn_of_left_out(
    left: Sequence[Parameter], complex_: Sequence[Parameter], told: Text | None
) -> None:
    """Warns once of the weights that are left out, and of complex weights.

    Args:
      left: the weights left out.
      complex_: the complex weights.
      told: the warning about the former.
    """
    sentences = []
    if told and left and is_news(getattr(told, "__qualname__", "")):
        sentences.append(told(left))
    if complex_ and is_news("complex"):
        names = named(complex_)
        sentences.append(f"complex weights are not supported, and stay as they are: {names}")
    if sentences:
        warn_caller(". ".join(sentences))


def named(left: Sequence[Parameter]) -> str:
    """The paths, dtypes and shapes of some parameters."""
    return shown([f"{p.path} ({describe(p.value)})" for p in left])


def of_many_axes(left: Sequence[Parameter]) -> bool:
    """Whether any of these weights has more axes than a matrix."""
    return any(len(p.value.shape) - p.stacked > 2 for p in left)
