"""The configuration of a quantized product: the format and the calibration of each operand."""

import dataclasses
from typing import Any

from haiku_implicit.quantized.numbers.options import OperandConfig, renamed

GradientConfig = OperandConfig
"""Another name of `OperandConfig`, for the configuration of an incoming gradient."""


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
    dlhs_grad: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    drhs_grad: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    dlhs_residual: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    drhs_residual: OperandConfig = dataclasses.field(default_factory=OperandConfig)
    disable_gradient_clipping: bool = False
    use_original_residuals: bool = False

    @property
    def operands(self) -> tuple[OperandConfig, OperandConfig]:
        """The configurations of both operands in the forward pass."""
        return self.lhs, self.rhs

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
            with renamed(names):
                new[operand] = dataclasses.replace(getattr(self, operand), **own)
        return dataclasses.replace(self, **new)


# --- the names of Qwix ----------------------------------------------------------------------------

_FLAGS = ("disable_gradient_clipping", "use_original_residuals")


def _flat_name(operand: str, option: str) -> str:
    """Returns Qwix's name of an operand's option; operands of one product share some of these names."""
    if option == "channelwise_noise_axes" or (option == "tile_size" and operand in ("lhs", "rhs")):
        return option
    shared = option in ("tile_size", "stochastic_rounding")
    return f"{operand.partition('_')[0] if shared else operand}_{option}"


_OPTIONS = ("qtype", "calibration_method", "disable_channelwise_axes", "tile_size")
_ROUNDING = ("stochastic_rounding", "channelwise_noise_axes")
_FLAT_NAMES = {
    operand: {option: _flat_name(operand, option) for option in options}
    for options, operands in (
        (_OPTIONS, ("lhs", "rhs", "dlhs_residual", "drhs_residual")),
        ((*_OPTIONS, *_ROUNDING), ("dlhs_grad", "drhs_grad")),
    )
    for operand in operands
}
