"""Options that users write: formats, methods with numbers after commas, the options of one operand."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.quantized.numbers import formats

# The least and the largest count of numbers for each method that finds a range, see `ranges`.
RANGES = {"absmax": (0, 1), "minmax": (0, 1), "rms": (0, 1), "percentile": (0, 1), "fixed": (1, 2)}

# The methods for stored weights: ranges, the mean magnitude (binary as in XNOR-Net, arXiv:1603.05279,
# ternary as in BitNet b1.58), and two searches.
CALIBRATIONS = RANGES | {"fixed": (2, 2), "absmean": (0, 0), "mse": (0, 0), "hqq": (0, 1)}

STOCHASTIC_ROUNDING = ("uniform", "low_bit_uniform")


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
        raise value_error(f"{option}: expected one of {', '.join(known)}, got {text!r}")
    try:
        numbers = tuple(map(float, rest))
    except ValueError:
        raise value_error(f"{option}: expected numbers after {name!r}, got {text!r}") from None
    least, most = known[name]
    if not least <= len(numbers) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise value_error(f"{option}: expected {count} numbers after {name!r}, got {text!r}")
    if not all(map(math.isfinite, numbers)):
        raise value_error(f"{option}: expected finite numbers after {name!r}, got {text!r}")
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


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Gives options in errors the names under which the user wrote them.

    Args:
      names: from the name of an option in errors to the user's name.
    """
    try:
        yield
    except ValueError as e:
        option, problem = str(e).split(":", 1)
        raise value_error(f"{names.get(option, option)}:{problem}") from None


def check_tile_size(option: str, value: Any) -> None:
    """Raises unless the value is None, a positive integer, or a float for a part of the axis."""
    part = isinstance(value, float) and 0 < value <= 1
    if not (value is None or is_positive_integer(value) or part):
        raise value_error(
            f"{option}: expected a positive integer, or a float in (0, 1] for a part of the axis, got "
            f"{value!r}"
        )


# --- operands of products ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OperandConfig:
    """How one operand of a product is quantized.

    Attributes:
      qtype: the format, or the name of a microscaled one ('mxfp8', 'mxfp4', 'nvfp4'), whose tiles and
        scales are a part of it; None for a dense operand. Stored as the format's name.
      calibration_method: the method to find its scales, see `QuantRule`.
      disable_channelwise_axes: whether all channels share a scale.
      tile_size: how many elements along the contracted axis share a scale, see `QuantRule`.
      stochastic_rounding: the method of rounding gradients, see `QtRule.bwd_stochastic_rounding`.
      channelwise_noise_axes: the axes of gradients along which the noise differs.
      static_axes: the axes of activations that static ranges are averaged over, see
        `QuantRule.act_batch_axes`; None if each product finds the range.

    Raises:
      ValueError: for an option out of its range, by its name.
    """

    qtype: Any = None
    calibration_method: str = "absmax"
    disable_channelwise_axes: bool = False
    tile_size: int | float | None = None
    stochastic_rounding: str | None = None
    channelwise_noise_axes: Collection[int] = (0,)
    static_axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "qtype", _operand_format(self.qtype, self.tile_size))
        object.__setattr__(self, "channelwise_noise_axes", tuple(self.channelwise_noise_axes))
        parse("calibration_method", self.calibration_method, RANGES)
        check_tile_size("tile_size", self.tile_size)
        _check_rounding(self.stochastic_rounding, self.qtype)

    @property
    def format(self) -> formats.Format:
        """The format of the codes."""
        return formats.find(self.qtype if self.recipe is None else self.recipe.format)

    @property
    def recipe(self) -> formats.Recipe | None:
        """The groups and scales of a microscaled format; None for other formats."""
        return formats.RECIPES.get(self.qtype or "")

    @property
    def tile(self) -> int | float | None:
        """How many elements along the contracted axis share a scale, also if the format says so."""
        return self.tile_size if self.recipe is None else self.recipe.group_size

    @property
    def by_rows(self) -> bool:
        """Whether each row is rounded by itself, and scales come from largest magnitudes."""
        return not self.disable_channelwise_axes and self.calibration_method == "absmax"


def _operand_format(value: Any, tile_size: Any) -> str | None:
    """Returns the name of a format that has a zero, as operands need."""
    known = [f.name for f in formats.FORMATS.values() if _has_zero(f)] + [*formats.MICROSCALED]
    try:
        name = format_name("qtype", value)
    except (TypeError, ValueError):
        name = ""
    if name is not None and name not in known:
        raise value_error(f"qtype: expected one of {', '.join(known)}, got {value!r}")
    size = formats.MICROSCALED[name].group_size if name in formats.MICROSCALED else tile_size
    if tile_size not in (None, size):
        raise value_error(
            f"tile_size: {name!r} has tiles of {size}, got {tile_size!r}; leave it out"
        )
    return name


def _has_zero(fmt: formats.Format) -> bool:
    return fmt.name not in formats.BY_MEAN and (fmt.table is None or 0 in fmt.table)


def has_no_negative(qtype: str | None, calibration_method: str) -> bool:
    """Whether operands of this format lose their negative values: no code stands for them."""
    if qtype is None or qtype in formats.RECIPES or not formats.FORMATS[qtype].offset:
        return False
    name, numbers = parse("calibration_method", calibration_method, RANGES)
    return name != "minmax" and (name != "fixed" or len(numbers) == 1 or sum(numbers) == 0)


def _check_rounding(method: Any, qtype: str | None) -> None:
    if method not in (None, *STOCHASTIC_ROUNDING):
        known = ", ".join(map(repr, STOCHASTIC_ROUNDING))
        raise value_error(f"stochastic_rounding: expected None or one of {known}, got {method!r}")
    if method is not None and not (qtype or "").startswith("int"):
        raise value_error(
            f"stochastic_rounding: expected gradients in integers with it, got the format {qtype!r}"
        )


@functools.lru_cache
def parse_activation(text: str | None, tile_size: int | None = None) -> OperandConfig:
    """Parses `QuantizedMatrix.activation`, as in 'int8,groups,rms,7'.

    Args:
      text: None for dense activations; or a format, then 'groups' (each part of a row that meets a
        group of the matrix has a scale) or 'tensor' (all rows share scales), then a method.
      tile_size: the size of the matrix's groups, for 'groups'.

    Raises:
      ValueError: for a format that activations can't have, or an unknown method.
    """
    if text is None:
        return OperandConfig()
    qtype, *rest = split(text)
    method = ",".join(word for word in rest if word not in ("groups", "tensor"))
    tile_size = tile_size if "groups" in rest else None
    names = ("qtype", "calibration_method", "tile_size")
    with renamed(dict.fromkeys(names, "activation")):
        return OperandConfig(qtype, method or "absmax", "tensor" in rest, tile_size)


def activation_text(config: OperandConfig) -> str | None:
    """Returns the text that `parse_activation` reads as this configuration."""
    if config.qtype is None:
        return None
    in_groups = config.recipe is None and config.tile_size is not None
    chosen = dict(groups=in_groups, tensor=config.disable_channelwise_axes)
    method = [] if config.calibration_method == "absmax" else [config.calibration_method]
    return ",".join([config.qtype, *(name for name in chosen if chosen[name]), *method])


def checked_activation(activation: Any) -> str | None:
    """Returns one text for all texts (or dtypes) of the same activation; None for None.

    Raises:
      ValueError: as `parse_activation` does.
    """
    if activation is not None and not isinstance(activation, str):
        with renamed({"qtype": "activation"}):
            activation = OperandConfig(activation).qtype
    return activation_text(parse_activation(activation, tile_size=1))


def loses_negatives(activation: Any) -> bool:
    """Whether products round negative activations to zero: the format has no codes for them.

    Raises:
      ValueError: as `parse_activation` does.
    """
    config = parse_activation(checked_activation(activation), tile_size=1)
    return has_no_negative(config.qtype, config.calibration_method)
