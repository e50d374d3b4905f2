"""Quantization rules: which modules are quantized, and how; the configuration of one product."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from haiku_implicit.core.messages import shown, value_error, warn_caller
from haiku_implicit.core.predicates import compiled
from haiku_implicit.core.serialization import static_values
from haiku_implicit.quantized.numbers import formats, options
from haiku_implicit.quantized.numbers.options import OperandConfig, renamed

# --- the configuration of a product ---------------------------------------------------------------

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
            raise value_error(
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


# --- rules ----------------------------------------------------------------------------------------

# The operations that rules distinguish. When rules see an einsum, it has already become products of two
# operands, so that a rule for one is a rule for the other.
OP_NAMES = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot")
_SAME_OP = {"einsum": "dot_general"}


@static_values
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantRule:
    """The formats and calibrations of products in the modules that it matches.

    Rules come in a list, and the first one that matches decides. Modules that no rule matches, or that
    match a rule without `weight_qtype`, are not quantized.

    Attributes:
      module_path: a regular expression that matches the whole of the module's name in Haiku's
        parameters: `'transformer/layer_0/linear'`, `'mlp/~/linear_1'`.
      op_names: the operations that the rule is for, from 'dot_general', 'einsum' (the same as
        'dot_general'), 'conv_general_dilated', 'ragged_dot'; empty for all of them. For stored weights
        the number of axes tells the operation: two for a 'dot_general', more than three for a
        convolution, and three for any operation that the rules quantize.
      weight_qtype: the format of weights, a name (see `QuantizedMatrix.quantize`) or a dtype; with None
        the module is not quantized. Stored as the format's name.
      act_qtype: the format of activations, or None for dense ones. With 'uint8' negative activations
        become zero, unless `act_calibration_method` is 'minmax'.
      weight_calibration_method: the method to find the scales of weights, with numbers after commas:
        'absmax' (the largest magnitude; 'absmax,0.8' for a part of it), 'minmax' (with a zero point),
        'rms,3', 'percentile,99.5', 'fixed,-1,1', and for stored weights all other methods of
        `QuantizedMatrix.quantize`.
      act_calibration_method: the method for activations.
      tile_size: how many elements along the (last) contracted axis share a scale; a float is the
        fraction of the axis; None for all elements.
      act_static_scale: whether the scales of activations come from collected statistics, see
        `with_quant_stats`.
      act_batch_axes: the axes of activations in the product (`jax.vmap` within a model adds one) that
        these statistics are averaged over. Along the other axes that have scales each index keeps its
        scale, so that their lengths have to stay the same. The average of largest magnitudes clips
        larger values, by much if the examples of a batch differ.
      rotate: whether the inputs of stored weights are rotated before the weights are quantized, as for
        `quantize_params`; tables of `hk.Embed` are not rotated. Rules for training can't rotate.

    Raises:
      ValueError: for an option out of its range, by its name.

    Example:
      >>> from haiku_implicit.quantization import QuantRule, matching_rule
      >>> rules = [QuantRule(module_path='.*/head'), QuantRule(weight_qtype='int8')]
      >>> matching_rule(rules, 'model/head').weight_qtype is None
      True
      >>> matching_rule(rules, 'model/linear').weight_qtype
      'int8'
    """

    module_path: str = ".*"
    op_names: Collection[str] = ()
    weight_qtype: Any = None
    act_qtype: Any = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str = "absmax"
    tile_size: int | float | None = None
    act_static_scale: bool = False
    act_batch_axes: Collection[int] = (0,)
    rotate: bool = False

    def __post_init__(self) -> None:
        compiled("module_path", self.module_path)
        self._set(op_names=_op_names(self.op_names), act_batch_axes=tuple(self.act_batch_axes))
        for name in ("weight_qtype", "act_qtype"):
            self._set(**{name: options.format_name(name, getattr(self, name))})
        for name in ("weight_calibration_method", "act_calibration_method"):
            options.parse(name, getattr(self, name), options.CALIBRATIONS | options.RANGES)
        options.check_tile_size("tile_size", self.tile_size)
        if self.act_static_scale and self.act_qtype is None:
            raise value_error(
                "act_static_scale: expected an act_qtype with it, got None; give one, or leave it out"
            )
        if self.act_static_scale and self.rotate:
            raise value_error(
                "rotate: the statistics of act_static_scale are those of inputs that are not rotated; "
                "leave out one of them"
            )

    def _set(self, **changes: Any) -> None:
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    def matches(self, module_path: str, op_name: str | None = None) -> bool:
        """Whether the rule is for a module (and an operation).

        Args:
          module_path: Haiku's name of the module.
          op_name: one of `OP_NAMES`; None for any.
        """
        of_op = op_name is None or self.is_for(op_name)
        return of_op and re.fullmatch(self.module_path, module_path) is not None

    def is_for(self, op_name: str) -> bool:
        """Whether the rule is for an operation, one of `OP_NAMES`."""
        named = {_SAME_OP.get(name, name) for name in self.op_names}
        return not named or _SAME_OP.get(op_name, op_name) in named

    def weight_options(self, length: int) -> dict[str, Any]:
        """Returns the arguments of `QuantizedMatrix.quantize` for a stored weight.

        Args:
          length: the length of the axis that scales are shared along.
        """
        if self.weight_qtype is None:
            raise value_error("weight_qtype: None leaves the weight as it is")
        method: str | None = self.weight_calibration_method
        fmt, size = formats.FORMATS.get(self.weight_qtype), self.tile_size  # None for a recipe
        size = round(length * size) if isinstance(size, float) else size
        if method == "absmax" and fmt is not None and (fmt.offset or fmt.name in formats.BY_MEAN):
            method = None  # the rules' default suits only formats with a symmetric range
        return dict(
            dtype=self.weight_qtype, group_size=size, calibration=method, activation=self.activation
        )

    @property
    def activation(self) -> str | None:
        """The quantization of activations as `QuantizedMatrix.activation`."""
        return None if self.act_qtype is None else options.activation_text(self._activation())

    def _activation(self) -> OperandConfig:
        return self.operand(is_weight=False)

    def operand(self, is_weight: bool) -> OperandConfig:
        """Returns how the forward pass quantizes a weight, or an activation.

        Raises:
          ValueError: for a format, a method or a rotation that stored weights have, and operands of
            products not.
        """
        if is_weight and self.rotate:
            raise value_error(
                "rotate: only stored weights are rotated, and no products in training"
            )
        static = self.act_static_scale and not is_weight
        return self._operand(
            "weight" if is_weight else "act",
            tile_size=self.tile_size,
            static_axes=tuple(self.act_batch_axes) if static else None,
        )

    def _operand(self, prefix: str, *more: str, **others: Any) -> OperandConfig:
        """Makes a configuration of options that the rule has with a prefix, and other options."""
        names = {option: f"{prefix}_{option}" for option in ("qtype", "calibration_method", *more)}
        own = {option: getattr(self, name) for option, name in names.items()}
        with renamed(names):
            config = OperandConfig(**own, **others)
        if prefix != "act" and options.has_no_negative(config.qtype, config.calibration_method):
            raise value_error(
                f"{prefix}_qtype: {config.qtype!r} has no negative codes: expected "
                f"{prefix}_calibration_method='minmax' with it, got {config.calibration_method!r}"
            )
        return config

    def config(self, lhs_is_weight: bool, rhs_is_weight: bool) -> ProductConfig:
        """Returns the configuration of a product; the arguments say which operands are weights.

        Raises:
          ValueError: as `operand` does.
        """
        lhs, rhs = self.operand(lhs_is_weight), self.operand(rhs_is_weight)
        return ProductConfig(lhs=lhs, rhs=rhs, use_original_residuals=True)


@static_values
@dataclasses.dataclass(frozen=True, kw_only=True)
class QtRule(QuantRule):
    """A rule for quantized training: a `QuantRule` that also says how gradients are quantized.

    Names and quantization are Qwix's: the bound of symmetric integers is a half more than their largest
    code, so that 'int8' has the scale `largest magnitude / 127.5`.

    Attributes:
      bwd_qtype: the format of incoming gradients; None for a dense backward pass, which uses the
        operands before their quantization.
      bwd_calibration_method: the method to find the scales of gradients.
      bwd_weight_grad_tile_size: how many elements along the contracted axis share a scale in the
        product for the weight's gradient.
      disable_channelwise_axes: whether all channels share one scale, in both passes.
      bwd_stochastic_rounding: the rounding of gradients: None to the nearest; 'uniform' up or down
        with noise of 24 bits; 'low_bit_uniform' with noise of 8 bits. Needs integers, and a random
        key in each step.
      channelwise_noise_axes: the axes of gradients along which noise differs.
      additional_qt_config: other options of single operands, by Qwix's names, see
        `ProductConfig.with_flat`. Stored as pairs.

    Example:
      >>> from haiku_implicit.quantization import QtRule
      >>> QtRule(weight_qtype='int8', act_qtype='int8', bwd_qtype='uint8')
      Traceback (most recent call last):
      ...
      ValueError: bwd_qtype: 'uint8' has no negative codes: expected bwd_calibration_method='minmax'
      with it, got 'absmax' (docs/errors.md#arguments-and-types)
    """

    bwd_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: int | float | None = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    channelwise_noise_axes: Collection[int] = (0,)
    additional_qt_config: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        extra = self.additional_qt_config
        pairs = extra.items() if isinstance(extra, Mapping) else extra or ()
        self._set(
            bwd_qtype=options.format_name("bwd_qtype", self.bwd_qtype),
            channelwise_noise_axes=tuple(self.channelwise_noise_axes),
            additional_qt_config=tuple(sorted((str(k), v) for k, v in pairs)),
        )
        options.check_tile_size("bwd_weight_grad_tile_size", self.bwd_weight_grad_tile_size)
        for side in (True, False):  # raises for options out of range
            self.config(lhs_is_weight=side, rhs_is_weight=not side)

    def _activation(self) -> OperandConfig:
        return self.config(lhs_is_weight=False, rhs_is_weight=True).lhs

    def operand(self, is_weight: bool) -> OperandConfig:
        """Returns how the forward pass quantizes a weight, or an activation."""
        shared = self.disable_channelwise_axes
        return dataclasses.replace(super().operand(is_weight), disable_channelwise_axes=shared)

    def config(self, lhs_is_weight: bool, rhs_is_weight: bool) -> ProductConfig:
        """Returns the configuration of a product; the arguments say which operands are weights.

        Raises:
          ValueError: for an `additional_qt_config` with an unknown name, or a value out of its range.
        """
        configs: dict[str, Any] = {}
        for side, is_weight in (("lhs", lhs_is_weight), ("rhs", rhs_is_weight)):
            tile_size = self.bwd_weight_grad_tile_size if is_weight and self.bwd_qtype else None
            configs[side] = self.operand(is_weight)
            configs[f"d{side}_residual"] = OperandConfig(tile_size=tile_size)
            configs[f"d{side}_grad"] = self._operand(
                "bwd",
                "stochastic_rounding",
                disable_channelwise_axes=self.disable_channelwise_axes,
                tile_size=tile_size,
                channelwise_noise_axes=self.channelwise_noise_axes,
            )
        config = ProductConfig(**configs, use_original_residuals=self.bwd_qtype is None)
        try:
            return config.with_flat(**dict(self.additional_qt_config or ()))
        except ValueError as e:
            raise value_error(f"additional_qt_config: {e}") from None


# --- lists of rules ------------------------------------------------------------------------------


def matching_rule(
    rules: Iterable[QuantRule], module_path: str, op_name: str | None = None
) -> QuantRule | None:
    """Returns the first of the rules that matches a module (and an operation), or None.

    Args:
      rules: in the order of precedence.
      module_path: Haiku's name of the module.
      op_name: one of 'dot_general', 'einsum', 'conv_general_dilated', 'ragged_dot'; None for any.
    """
    return next((rule for rule in rules if rule.matches(module_path, op_name)), None)


def rules_for_module(rules: Iterable[QuantRule], module_path: str) -> tuple[QuantRule, ...]:
    """Returns the rules that can decide for a module, in order: up to the first for all operations."""
    found = []
    for rule in rules:
        if rule.matches(module_path):
            found.append(rule)
            if not rule.op_names:
                break
    return tuple(found)


def unused_rules(rules: Sequence[QuantRule], module_paths: Iterable[str]) -> list[QuantRule]:
    """Returns the rules that do not decide for any of some modules: they match none, or come too late.

    Args:
      rules: in the order of precedence.
      module_paths: Haiku's names of modules: the keys of the parameters.

    Example:
      >>> from haiku_implicit.quantization import QuantRule, unused_rules
      >>> rules = [QuantRule(weight_qtype='int8'), QuantRule(module_path='head', weight_qtype='int4')]
      >>> [rule.module_path for rule in unused_rules(rules, ['mlp/~/linear_0', 'head'])]
      ['head']
    """
    used = {id(rule) for path in set(module_paths) for rule in rules_for_module(rules, path)}
    return [rule for rule in rules if id(rule) not in used]


def warn_of_unused(rules: Sequence[QuantRule], module_paths: Iterable[str]) -> None:
    """Warns of rules that do not decide for any module: names their patterns, and the modules."""
    paths = sorted(set(module_paths))
    unused = [f"{rule.module_path!r} (rules[{list(rules).index(rule)}])"
              for rule in unused_rules(rules, paths)]  # fmt: skip
    if unused:
        warn_caller(
            f"rules: no module is left for {', '.join(unused)}: the pattern has to match the whole of "
            f"a module's name, and the first rule that does decides. Modules with weights: "
            f"{shown(paths, most=10)}"
        )


# --- validation ----------------------------------------------------------------------------------


def _op_names(names: Any) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    if unknown := [name for name in names if name not in OP_NAMES]:
        raise value_error(f"op_names: expected some of {', '.join(OP_NAMES)}, got {unknown[0]!r}")
    return names
