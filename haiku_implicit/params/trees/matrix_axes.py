"""Axes of weights: which are the rows of a matrix and which its columns."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from haiku_implicit.arrays.axes import Axes
from haiku_implicit.arrays.matrix_view import MatrixView, unfolded, view_of
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.predicates import compiled, no_match
from haiku_implicit.core.typing import Array
from haiku_implicit.params.trees.selection import editing
from haiku_implicit.quantized.types.ruled import RuledWeight


class MatrixAxes(NamedTuple):
    """The axes of a weight, counted from the end (negative), that make it a matrix.

    Attributes:
      inputs: the rows of the matrix, which products contract.
      outputs: the columns. The remaining axes come first; they are batch axes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


# Axes by the path (`module/name`) of a parameter, or a regular expression that matches all of it.
MatrixAxesOf = Mapping[str, MatrixAxes | Sequence[Sequence[int]]]
LAST_TWO = MatrixAxes((-2,), (-1,))


class Opened(NamedTuple):
    """A matrix, and the axes of the tensor that it holds; None if they are unknown."""

    matrix: Array
    axes: Axes | None

    def closed(self, new: Array) -> Array:
        """The tensor that holds another matrix with the same axes; dense for a dense matrix.

        A stack of matrices with rules stays a view of itself: `convert_trained` could take a tensor of
        three axes or more for the kernel of a convolution.
        """
        if self.axes is None or not is_implicit(new):
            return new if self.axes is None else materialize_array(MatrixView(new, self.axes))
        stacked = isinstance(new, RuledWeight) and new.ndim > 2
        return MatrixView(new, self.axes) if stacked else view_of(new, self.axes)


def open_matrix(path: str, value: Array, given: MatrixAxesOf | None = None) -> Opened:
    """The matrix in a `MatrixView`, or in a dense tensor whose axes are given.

    Args:
      path: the path of the parameter.
      value: an array, or a `jax.ShapeDtypeStruct` to get the struct of the matrix.
      given: the axes of some parameters.

    Raises:
      ValueError: for axes that do not fit.
    """
    if isinstance(value, MatrixView):
        return Opened(value.matrix, value.axes)
    axes = _given_for(path, given or {})
    if axes is None or (axes == LAST_TWO and is_implicit(value)):
        return Opened(value, None)
    with editing(path, value):
        if is_implicit(value):
            raise value_error(
                "matrix_axes: it is implicit already; give them to the function that made it so"
            )
        return Opened(*unfolded(value, *axes))


def check_given(given: MatrixAxesOf | None, paths: Sequence[str]) -> None:
    """Raises for axes in another form, or axes of a parameter that does not exist."""
    if not isinstance(given, Mapping | None):
        raise type_error(f"matrix_axes: expected a mapping from names to axes, got {given!r}")
    for key, axes in (given or {}).items():
        if not isinstance(axes, Sequence) or not all(isinstance(x, Sequence) for x in axes):
            raise type_error(
                f"matrix_axes: {key!r}: expected the axes of the rows and of the columns, such as "
                f"((-3,), (-2, -1)), got {axes!r}"
            )
        if key not in paths:
            pattern = compiled("matrix_axes", key)
            if not any(map(pattern.fullmatch, paths)):
                raise no_match("matrix_axes", key, paths)


def _given_for(path: str, given: MatrixAxesOf) -> MatrixAxes | None:
    found = given.get(path)
    if found is None:
        found = next((axes for key, axes in given.items() if _matches(key, path)), None)
    return None if found is None else MatrixAxes(*map(tuple, found))


def _matches(key: str, path: str) -> bool:
    with contextlib.suppress(ValueError):  # a name with a bracket, say, not an expression
        return bool(compiled("matrix_axes", key).fullmatch(path))
    return False
