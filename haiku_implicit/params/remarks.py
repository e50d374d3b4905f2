"""Warnings of changes that are right, and not what one expects: large adapters, weights left dense."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.core.predicates import Predicate
from haiku_implicit.core.warn import shown, warn_caller
from haiku_implicit.params import trees
from haiku_implicit.params.options import QuantizeOptions
from haiku_implicit.params.selection import describe, in_tree


class LargeAdapters:
    """Looks for adapters with more numbers than their weights, and says so once.

    A weight of more than two axes is a stack of matrices, each of which has an adapter of its own. Of
    attention's weights `[inputs, heads, width]` these matrices are small, and the adapter is not.
    """

    def __init__(self) -> None:
        self._found: list[str] = []
        self._said = False

    def see(self, parameter: trees.Parameter, new: Any) -> Any:
        """Looks at a weight and the adapter on it, which is returned."""
        weight = new.matrix if isinstance(new, MatrixView) else new
        size, added = math.prod(parameter.value.shape), _numbers(weight) - _numbers(weight.w)
        if len(parameter.value.shape) - parameter.stacked > 2 and added > size:
            about = f"{describe(parameter.value)}: {added:,} numbers for {size:,}"
            self._found.append(f"{parameter.path} ({about})")
        return new

    def warn(self) -> None:
        """Warns of what was found, if that was not done."""
        if not self._found or self._said:
            return
        self._said = True
        warn_caller(
            f"an adapter has more numbers than its weight: {shown(self._found)}. A weight of more than "
            "two axes counts as a stack of matrices [..., n, m] with an adapter each. matrix_axes= "
            "says which axes make one matrix, such as {'.*/query/w': ([-3], [-2, -1])} for "
            "[inputs, heads, width]; a smaller rank= or exclude= helps, too"
        )


def _numbers(tree: Any) -> int:
    return sum(math.prod(np.shape(x)) for x in jax.tree_util.tree_leaves(tree))


def warn_of_dense(params: Any, choice: trees.Choice, options: QuantizeOptions) -> None:
    """Names the weights that `targets=None` leaves dense because their groups do not fit."""
    if choice.targets is not None:
        return
    parameters = trees.parameters_of(params)
    marks = choice._replace(missing_ok=True).marks(parameters, in_tree(options.leaves))
    left = [choice.opened(p) for p, m in zip(parameters, marks, strict=True) if m]
    if left:
        _warn(left, options)


def noticing(options: QuantizeOptions) -> Predicate:
    """`options.takes`, which also warns of the first weight that stays dense: for creators, getters."""
    said: list[str] = []

    def takes(module_name: str, name: str, value: Any) -> bool:
        if options.takes(module_name, name, value):
            return True
        if not said and options.leaves(module_name, name, value):
            parameter = trees.Parameter(module_name, name, value)
            said.append(parameter.path)
            _warn([parameter], options)
        return False

    return takes


def _warn(left: Sequence[trees.Parameter], options: QuantizeOptions) -> None:
    axis = options.axis
    names = [f"{p.path} ({describe(p.value)})" for p in left]
    what = "1 weight stays" if len(left) == 1 else f"{len(left)} weights stay"
    several = any(len(p.value.shape) - p.stacked > 2 for p in left)
    axes = "; matrix_axes= makes a matrix of more than two axes" if several else ""
    size = options.divisor
    fitting = ""
    if isinstance(size, int):
        common = math.gcd(size, *(p.value.shape[axis] for p in left))
        fitting = f" ({common} would fit)" if common >= 8 and options.group_size else ""
    warn_caller(
        f"{what} dense, because groups of {size} do not divide axis {axis}: {shown(names)}. Quantize "
        f"with another group_size={fitting}, these alone by targets=; or leave them out by exclude="
        f"{axes}"
    )
