"""Rules: which modules of a model are quantized, and how."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from haiku_implicit.core.messages import shown, warn_caller
from haiku_implicit.core.predicates import compiled
from haiku_implicit.core.serialization import static_values
from haiku_implicit.numerics import calibration, formats, options, ranges
from haiku_implicit.products import product_config
from haiku_implicit.products.product_config import GradientConfig, OperandConfig, ProductConfig

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
      act_qtype: the format of activations, or None for dense ones.
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

    def __post_init__(self) -> None:
        compiled("module_path", self.module_path)
        self._set(op_names=_op_names(self.op_names), act_batch_axes=tuple(self.act_batch_axes))
        self._set(
            **{name: options.format_name(name, getattr(self, name)) for name in self._qtype_names()}
        )
        for name in self._method_names():
            options.parse(name, getattr(self, name), calibration.METHODS | ranges.METHODS)
        product_config.check_tile_size("tile_size", self.tile_size)
        if self.act_static_scale and self.act_qtype is None:
            raise ValueError(
                "act_static_scale: expected an act_qtype with it, got None; give one, or leave it out"
            )

    def _qtype_names(self) -> tuple[str, ...]:
        return "weight_qtype", "act_qtype"

    def _method_names(self) -> tuple[str, ...]:
        return "weight_calibration_method", "act_calibration_method"

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
            raise ValueError("weight_qtype: None leaves the weight as it is")
        method: str | None = self.weight_calibration_method
        recipe = self.weight_qtype in formats.RECIPES
        fmt = None if recipe else formats.find(self.weight_qtype)
        size = (
            round(length * self.tile_size) if isinstance(self.tile_size, float) else self.tile_size
        )
        if method == "absmax" and fmt is not None and (fmt.offset or fmt.name in formats.BY_MEAN):
            method = None  # the rules' default suits only formats with a symmetric range
        activation = activation_of(self)
        return dict(
            dtype=self.weight_qtype, group_size=size, calibration=method, activation=activation
        )


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
      ValueError: bwd_qtype: expected one of int8, int6, int5, int4, int3, int2, nf4, fp4, fp4_bnb,
      fp8_e4m3, fp8_e5m2, got 'uint8'
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
        for name in self._qtype_names():
            options.operand_format(name, getattr(self, name))
        for name in self._method_names():
            options.parse(name, getattr(self, name), ranges.METHODS)
        product_config.check_tile_size("bwd_weight_grad_tile_size", self.bwd_weight_grad_tile_size)
        product_config.check_rounding(
            "bwd_stochastic_rounding", self.bwd_stochastic_rounding, self.bwd_qtype
        )
        extra = self.additional_qt_config
        pairs = extra.items() if isinstance(extra, Mapping) else extra or ()
        self._set(
            channelwise_noise_axes=tuple(self.channelwise_noise_axes),
            additional_qt_config=tuple(sorted((str(k), v) for k, v in pairs)),
        )
        for side in (True, False):  # raises for overrides that do not exist, and for bad ones
            config_of(self, lhs_is_weight=side, rhs_is_weight=not side)

    def _qtype_names(self) -> tuple[str, ...]:
        return *super()._qtype_names(), "bwd_qtype"

    def _method_names(self) -> tuple[str, ...]:
        return *super()._method_names(), "bwd_calibration_method"


def config_of(rule: QuantRule, lhs_is_weight: bool, rhs_is_weight: bool) -> ProductConfig:
    """Returns a rule's configuration of a product; the arguments say which operands are weights.

    Raises:
      ValueError: for an `additional_qt_config` with an unknown name, or a value out of its range.
    """
    qt = as_training_rule(rule)
    shared = qt.disable_channelwise_axes
    configs: dict[str, OperandConfig] = {}
    for side, is_weight in (("lhs", lhs_is_weight), ("rhs", rhs_is_weight)):
        qtype, method = (
            (qt.weight_qtype, qt.weight_calibration_method)
            if is_weight
            else (qt.act_qtype, qt.act_calibration_method)
        )
        tile_size = qt.bwd_weight_grad_tile_size if is_weight and qt.bwd_qtype else None
        configs[side] = OperandConfig(qtype, method, shared, qt.tile_size)
        configs[f"d{side}_residual"] = OperandConfig(tile_size=tile_size)
        configs[f"d{side}_grad"] = GradientConfig(
            qt.bwd_qtype,
            qt.bwd_calibration_method,
            shared,
            tile_size,
            qt.bwd_stochastic_rounding,
            qt.channelwise_noise_axes,
        )
    config = ProductConfig(**configs, use_original_residuals=qt.bwd_qtype is None)  # type: ignore
    try:
        return config.with_flat(**dict(qt.additional_qt_config or ()))
    except ValueError as e:
        raise ValueError(f"additional_qt_config: {e}") from None


def activation_of(rule: QuantRule) -> str | None:
    """Returns a rule's quantization of activations as `QuantizedMatrix.activation`."""
    if rule.act_qtype is None:
        return None
    config = OperandConfig(rule.act_qtype, rule.act_calibration_method, tile_size=rule.tile_size)
    if isinstance(rule, QtRule):
        config = config_of(rule, lhs_is_weight=False, rhs_is_weight=True).lhs
    shared, tiled = config.disable_channelwise_axes, config.tile_size is not None
    return str(options.Activation(config.qtype, tiled, shared, config.calibration_method))


def as_training_rule(rule: QuantRule) -> QtRule:
    """Converts a rule to a `QtRule`, with a dense backward pass if it is not one already.

    Raises:
      TypeError: for anything but a rule.
      ValueError: for formats and methods that quantized training does not have.
    """
    if isinstance(rule, QtRule):
        return rule
    if not isinstance(rule, QuantRule):
        raise TypeError(f"rule: expected a QtRule or a QuantRule, got {rule!r}")
    return QtRule(**{f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)})


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
        raise ValueError(f"op_names: expected some of {', '.join(OP_NAMES)}, got {unknown[0]!r}")
    return names
