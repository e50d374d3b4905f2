"""What users write in options: names of formats, and methods with numbers after commas."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from haiku_implicit.numerics import formats


def split(text: Any) -> list[str]:
    """The parts of an option between its commas: 'int8', 'groups' of 'int8,groups'."""
    return str(text).replace(" ", "").split(",")


def parse(
    option: str, text: Any, known: Mapping[str, tuple[int, int]]
) -> tuple[str, tuple[float, ...]]:
    """A method and the numbers after it, as in 'percentile,99.5'.

    Args:
      option: the name of the option, for errors.
      text: what was given.
      known: how many numbers each method takes, at least and at most.

    Raises:
      ValueError: for an unknown method, more or fewer numbers, or what is not a finite number.
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
    """The name of a format; that of a recipe ('mxfp4') as it is."""
    if value is None or (isinstance(value, str) and value in formats.RECIPES):
        return value
    return formats.find(value, option, also=formats.RECIPES).name


def operand_format(option: str, value: Any) -> str | None:
    """The name of a format that operands of products can be quantized to."""
    name = format_name(option, value)
    known = [f.name for f in formats.FORMATS.values() if _is_of_operands(f)]
    if name is not None and name not in known:
        raise ValueError(f"{option}: expected one of {', '.join(known)}, got {value!r}")
    return name


def _is_of_operands(fmt: formats.Format) -> bool:
    """Whether a format has a zero, and needs nothing but a scale."""
    return not fmt.offset and fmt.name not in formats.BY_MEAN


def checked_activation(activation: Any) -> str | None:
    """What products of a stored matrix quantize activations to, under the name of its format.

    Args:
      activation: a format, or a format and ',groups' (`QuantizedMatrix.quantize`), or None.

    Raises:
      ValueError: for a format that activations can't have.
    """
    qtype, *scales = split(activation) if isinstance(activation, str) else [activation]
    if scales not in ([], ["groups"]):
        raise ValueError(
            f"activation: expected a format, or a format and ',groups', got {activation!r}"
        )
    name = operand_format("activation", qtype)
    return f"{name},groups" if scales else name
