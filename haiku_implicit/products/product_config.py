"""The configuration of a quantized product: the format and the calibration of each operand."""

import dataclasses
from collections.abc import Collection
from typing import Any

from haiku_implicit.numerics import options, ranges

STOCHASTIC_ROUNDING = ("uniform", "low_bit_uniform")


@dataclasses.dataclass(frozen=True)
class OperandConfig:
    """How one operand of a product is quantized.

    Attributes:
      qtype: the format; None for a dense operand. Stored as the format's name.
      calibration_method: the method to find its scales, see `QuantRule`.
      disable_channelwise_axes: whether all channels share a scale.
      tile_size: how many elements along the contracted axis share a scale, see `QuantRule`.

    Raises:
      ValueError: for an option out of its range, by its name.
    """

    qtype: Any = None
    calibration_method: str = "absmax"
    disable_channelwise_axes: bool = False
    tile_size: int | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "qtype", options.operand_format("qtype", self.qtype))
        options.parse("calibration_method", self.calibration_method, ranges.METHODS)
        check_tile_size("tile_size", self.tile_size)


@dataclasses.dataclass(frozen=True)
class GradientConfig(OperandConfig):
    """How the incoming gradient is quantized for a backward product.

    Attributes:
      stochastic_rounding: the method of rounding, see `QtRule.bwd_stochastic_rounding`.
      channelwise_noise_axes: the axes along which the noise differs.
    """

    stochastic_rounding: str | None = None
    channelwise_noise_axes: Collection[int] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "channelwise_noise_axes", tuple(self.channelwise_noise_axes))
        check_rounding("stochastic_rounding", self.stochastic_rounding, self.qtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductConfig:
    """How one product is quantized, operand by operand: the resolved form of a `QtRule`.

    The forward pass multiplies `lhs` and `rhs`. The backward pass has two products, for the gradients
    with respect to `lhs` and to `rhs`: each multiplies the incoming gradient with a residual, which is
    the other operand of the forward pass.

    Attributes:
      lhs, rhs: the operands in the forward pass.
      dlhs_grad, drhs_grad: the incoming gradient, in the products for `lhs` and for `rhs`.
      dlhs_residual, drhs_residual: the residual in these products, if the forward pass leaves a dense
        one.
      disable_gradient_clipping: whether gradients also pass to values beyond the range of a
        calibration that clips ('absmax,0.8').
      use_original_residuals: whether the residuals are the operands before their quantization.

    Example:
      >>> from haiku_implicit.quantization import OperandConfig, ProductConfig
      >>> config = ProductConfig(lhs=OperandConfig('int8')).with_flat(rhs_qtype='int4', tile_size=32)
      >>> config.rhs.qtype, config.lhs.tile_size
      ('int4', 32)
    """

    lhs: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    rhs: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    dlhs_grad: GradientConfig = dataclasses.field(default_factory=GradientConfig)
    drhs_grad: GradientConfig = dataclasses.field(default_factory=GradientConfig)
    dlhs_residual: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    drhs_residual: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    disable_gradient_clipping: bool = False
    use_original_residuals: bool = False

    def flat(self) -> dict[str, Any]:
        """Returns all options in one mapping, by Qwix's names."""
        found = {name: getattr(self, name) for name in _FLAGS}
        for operand, names in _FLAT_NAMES.items():
            config = getattr(self, operand)
            found |= {name: getattr(config, option) for option, name in names.items()}
        return found

    def with_flat(self, **changes: Any) -> "ProductConfig":
        """Returns this configuration with changed options, by Qwix's names.

        Args:
          **changes: for example `lhs_qtype`, `dlhs_grad_calibration_method`; `tile_size` is for both
            operands of the forward pass, `drhs_tile_size` for both operands of the product for `rhs`.

        Raises:
          ValueError: for a name that does not exist, or a value out of its range.
        """
        known = self.flat()
        if unknown := sorted(changes.keys() - known.keys()):
            raise ValueError(
                f"expected fields of ProductConfig, got {', '.join(unknown)}; there are "
                f"{', '.join(sorted(known))}"
            )
        new = {name: changes[name] for name in _FLAGS if name in changes}
        for operand, names in _FLAT_NAMES.items():
            own = {option: changes[name] for option, name in names.items() if name in changes}
            try:
                new[operand] = dataclasses.replace(getattr(self, operand), **own)
            except ValueError as e:
                option, problem = str(e).split(":", 1)
                raise ValueError(f"{names[option]}:{problem}") from None
        return dataclasses.replace(self, **new)


# --- validation ----------------------------------------------------------------------------------


def check_tile_size(name: str, value: Any) -> None:
    if value is None:
        return
    part = isinstance(value, float) and 0 < value <= 1
    if not (options.is_positive_integer(value) or part):
        raise ValueError(
            f"{name}: expected a positive integer, or a float in (0, 1] for a part of the axis, got "
            f"{value!r}"
        )


def check_rounding(name: str, method: Any, qtype: str | None) -> None:
    if method not in (None, *STOCHASTIC_ROUNDING):
        known = ", ".join(map(repr, STOCHASTIC_ROUNDING))
        raise ValueError(f"{name}: expected None or one of {known}, got {method!r}")
    if method is not None and not (qtype or "").startswith("int"):
        raise ValueError(
            f"{name}: expected gradients in integers with it, got the format {qtype!r}"
        )


# --- the names of Qwix ----------------------------------------------------------------------------

_FLAGS = ("disable_gradient_clipping", "use_original_residuals")


def _flat_name(operand: str, option: str) -> str:
    """Returns Qwix's name of an operand's option; operands of one product share some of these names."""
    if option == "channelwise_noise_axes" or (option == "tile_size" and operand in ("lhs", "rhs")):
        return option
    shared = option in ("tile_size", "stochastic_rounding")
    return f"{operand.partition('_')[0] if shared else operand}_{option}"


_FLAT_NAMES = {
    operand: {option: _flat_name(operand, option) for option in vars(config)}
    for operand, config in vars(ProductConfig()).items()
    if operand not in _FLAGS
}
