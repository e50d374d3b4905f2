"""Warnings of correct but unexpected results: large adapters, weights left out."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from haiku_implicit.arrays.matrix_view import matrix_of
from haiku_implicit.core.messages import shown, warn_caller
from haiku_implicit.core.predicates import Predicate
from haiku_implicit.params import trees
from haiku_implicit.params.options import QuantizeOptions, Room
from haiku_implicit.params.selection import describe, in_tree, is_complex_weight


class LargeAdapters:
    """Looks for adapters with more numbers than their weights, and warns of them once.

    A weight of more than two axes is a stack of matrices, each with its own adapter. If these matrices
    are small, as in attention's weights `[inputs, heads, width]`, the adapters are larger than the
    weight.
    """

    def __init__(self) -> None:
        self._found: list[str] = []
        self._said = False

    def see(self, parameter: trees.Parameter, new: Any) -> Any:
        """Looks at a weight and its new adapter, and returns the latter."""
        weight = matrix_of(new)
        size, added = math.prod(parameter.value.shape), _numbers(weight) - _numbers(weight.w)
        if len(parameter.value.shape) - parameter.stacked > 2 and added > size:
            about = f"{describe(parameter.value)}: {added:,} numbers for {size:,}"
            self._found.append(f"{parameter.path} ({about})")
        return new

    def warn(self) -> None:
        """Warns of the large adapters, if it has not warned yet."""
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
    """Warns of the weights that `targets=None` leaves dense because their groups do not fit."""
    _warn(_left(params, choice, options.leaves), _dense_text(options), _complex(params, choice))


def warn_of_complex(params: Any, choice: trees.Choice) -> None:
    """Warns of the complex weights, which `targets=None` does not change."""
    _warn([], _skipped_text, _complex(params, choice))


def warn_of_skipped(params: Any, choice: trees.Choice, room: Room) -> None:
    """Warns of the weights that `targets=None` gives no adapter because the rank is too large."""
    _warn(_left(params, choice, room.leaves), _skipped_text, _complex(params, choice))


def noticing(
    options: QuantizeOptions | Room, text: Callable[[Sequence[trees.Parameter]], str]
) -> Predicate:
    """`options.takes`, which also warns of the first weight left out, for creators and getters."""
    said: list[str] = []

    def takes(module_name: str, name: str, value: Any) -> bool:
        if options.takes(module_name, name, value):
            return True
        if not said and options.leaves(module_name, name, value):
            parameter = trees.Parameter(module_name, name, value)
            said.append(parameter.path)
            _warn([parameter], text)
        return False

    return takes


def noticing_dense(options: QuantizeOptions) -> Predicate:
    """`options.takes`, which warns of the first weight that stays dense."""
    return noticing(options, _dense_text(options))


def noticing_skipped(room: Room) -> Predicate:
    """`room.takes`, which warns of the first weight that gets no adapter."""
    return noticing(room, _skipped_text)


def _left(params: Any, choice: trees.Choice, leaves: Predicate) -> list[trees.Parameter]:
    """The parameters that the default targets leave out, by `leaves`, unless they are excluded."""
    if choice.targets is not None:
        return []
    parameters = trees.parameters_of(params)
    marks = choice._replace(missing_ok=True).marks(parameters, in_tree(leaves))
    return [choice.opened(p) for p, m in zip(parameters, marks, strict=True) if m]


def _complex(params: Any, choice: trees.Choice) -> list[trees.Parameter]:
    """The complex weights among the default targets, which no function here changes."""
    return _left(params, choice, is_complex_weight)


def _warn(
    left: Sequence[trees.Parameter],
    text: Callable[[Sequence[trees.Parameter]], str],
    others: Sequence[trees.Parameter] = (),
) -> None:
    """Warns once of the weights that are left out, and of complex weights."""
    sentences = [text(left)] if left else []
    if others:
        names = _named(others)
        sentences.append(f"complex weights are not supported, and stay as they are: {names}")
    if sentences:
        warn_caller(". ".join(sentences))


def _named(left: Sequence[trees.Parameter]) -> str:
    return shown([f"{p.path} ({describe(p.value)})" for p in left])


def _several(left: Sequence[trees.Parameter]) -> bool:
    """Whether any of these weights has more axes than a matrix."""
    return any(len(p.value.shape) - p.stacked > 2 for p in left)


def _skipped_text(left: Sequence[trees.Parameter]) -> str:
    what = "1 weight gets" if len(left) == 1 else f"{len(left)} weights get"
    axes = (
        " infer_matrix_axes(apply, params, *args) finds which axes make one matrix of a weight of more "
        "than two, for matrix_axes=."
        if _several(left)
        else ""
    )
    return (
        f"{what} no adapter, because the rank is larger than there is room for (the smaller of the "
        f"last two axes): {_named(left)}.{axes} Or give a smaller rank=, or leave them out by exclude="
    )


def _dense_text(options: QuantizeOptions) -> Callable[[Sequence[trees.Parameter]], str]:
    def text(left: Sequence[trees.Parameter]) -> str:
        axis, size = options.axis, options.divisor
        what = "1 weight stays" if len(left) == 1 else f"{len(left)} weights stay"
        axes = "; matrix_axes= makes a matrix of more than two axes" if _several(left) else ""
        axes += " (infer_matrix_axes finds it)" if axes else ""
        fitting = ""
        if isinstance(size, int):
            common = math.gcd(size, *(p.value.shape[axis] for p in left))
            fitting = f" ({common} would fit)" if common >= 8 and options.group_size else ""
        return (
            f"{what} dense, because groups of {size} do not divide axis {axis}: {_named(left)}. "
            f"Quantize with another group_size={fitting}, these alone by targets=; or leave them out "
            f"by exclude={axes}"
        )

    return text
