"""Parsers of options that users write: names of formats, and methods with numbers after commas."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.numerics import formats, ranges


def split(text: Any) -> list[str]:
    """Splits an option at its commas: 'int8,groups' to 'int8' and 'groups'."""
    return str(text).replace(" ", "").split(",")


def parse(
    option: str, text: Any, known: Mapping[str, tuple[int, int]]
) -> tuple[str, tuple[float, ...]]:
    """Parses a method and the numbers after it, as in 'percentile,99.5'.

    Args:
      option: the name of the option, for errors.
      text: the value of the option.
      known: the least and the largest count of numbers for each method.

    Raises:
      ValueError: for an unknown method, more or fewer numbers, or text that is not a finite number.
    """
    name, *rest = split(text)
    if name not in known:
        raise ValueError(f"{option}: expected one of {', '.join(known)}, got {text!r}")
    try:
        numbers = tuple(map(float, rest))
    except ValueError:
        raise ValueError(f"{option}: expected numbers after {name!r}, got {text!r}") from None
    least, most = known[name]
    if not least <= len(numbers) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise ValueError(f"{option}: expected {count} numbers after {name!r}, got {text!r}")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{option}: expected finite numbers after {name!r}, got {text!r}")
    return name, numbers


def is_integer(x: Any) -> bool:
    """Whether an option is a whole number; True is not one."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def is_positive_integer(x: Any) -> bool:
    """Whether an option is a whole number above zero."""
    return is_integer(x) and bool(x > 0)


def format_name(option: str, value: Any) -> str | None:
    """Returns the name of a format; the name of a recipe ('mxfp4') is returned unchanged."""
    if value is None or (isinstance(value, str) and value in formats.RECIPES):
        return value
    return formats.find(value, option, also=formats.RECIPES).name


def operand_format(option: str, value: Any) -> str | None:
    """Returns the name of a format that operands of products can be quantized to."""
    name = format_name(option, value)
    known = [f.name for f in formats.FORMATS.values() if _is_of_operands(f)]
    if name is not None and name not in known:
        raise ValueError(f"{option}: expected one of {', '.join(known)}, got {value!r}")
    return name


def _is_of_operands(fmt: formats.Format) -> bool:
    """Whether a format has a zero, and needs only a scale."""
    has_zero = fmt.name not in formats.BY_MEAN and (fmt.table is None or 0 in fmt.table)
    return has_zero and not fmt.offset


class Activation(NamedTuple):
    """How the products of a stored matrix quantize activations, see `QuantizedMatrix.quantize`.

    Attributes:
      qtype: their format.
      groups: whether each part of a row that meets a group of the matrix has a scale.
      tensor: whether all rows share scales.
      method: how the scales are found.
    """

    qtype: str
    groups: bool = False
    tensor: bool = False
    method: str = "absmax"

    @property
    def by_rows(self) -> bool:
        """Whether each row is rounded by itself, and scales come from largest magnitudes."""
        return not self.tensor and self.method == "absmax"

    def __str__(self) -> str:
        method = [] if self.method == "absmax" else [self.method]
        chosen = [name for name in ("groups", "tensor") if getattr(self, name)]
        return ",".join([self.qtype, *chosen, *method])


@functools.lru_cache
def activation_of(text: str) -> Activation:
    """Parses the text of an activation.

    Raises:
      ValueError: for a format that activations can't have, or an unknown method.
    """
    qtype, *rest = split(text)
    chosen = [name for name in ("groups", "tensor") if name in rest]
    method = ",".join(word for word in rest if word not in chosen) or "absmax"
    parse("activation", method, ranges.METHODS)
    name = str(operand_format("activation", qtype))
    return Activation(name, "groups" in chosen, "tensor" in chosen, method)


def checked_activation(activation: Any) -> str | None:
    """Returns one text for all texts (or dtypes) of the same activation; None for None.

    Raises:
      ValueError: as `activation_of` does.
    """
    if activation is None:
        return None
    text = activation if isinstance(activation, str) else operand_format("activation", activation)
    return str(activation_of(str(text)))
