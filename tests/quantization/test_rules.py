"""Rules: which one decides for a module, which are left over, and which are refused."""

import warnings

import jax.numpy as jnp
import pytest

import haiku_implicit as hki
from haiku_implicit.quantization import (
    GradientConfig,
    OperandConfig,
    ProductConfig,
    QtRule,
    QuantRule,
    dot_general,
    matching_rule,
    unused_rules,
)

HEAD = QuantRule(module_path=".*/head")
CONVS = QuantRule(op_names=("conv_general_dilated",), weight_qtype="int8")
FIRST = QuantRule(module_path=r"net/layer_\d/linear", weight_qtype=jnp.int4)
REST = QuantRule(weight_qtype="fp8")
RULES = [HEAD, CONVS, FIRST, REST]


@pytest.mark.parametrize(
    "path, op_name, expected",
    [
        ("net/head", None, HEAD),
        ("net/head", "conv_general_dilated", HEAD),
        ("net/layer_0/linear", "conv_general_dilated", CONVS),
        ("net/layer_0/linear", "dot_general", FIRST),
        ("net/layer_0/linear", "einsum", FIRST),
        ("net/layer_0/linear_1", "dot_general", REST),  # the whole name has to match
        ("head", "ragged_dot", REST),
    ],
)
def test_the_first_rule_that_matches_decides(path, op_name, expected):
    assert matching_rule(RULES, path, op_name) is expected


def test_no_rule_that_matches_is_none():
    assert matching_rule([HEAD], "net/linear") is None
    assert matching_rule([], "net/linear") is None


def test_an_einsum_is_a_product_of_two():
    for named, asked in (("einsum", "dot_general"), ("dot_general", "einsum")):
        rule = QuantRule(op_names=named)
        assert rule.matches("any", asked) and not rule.matches("any", "ragged_dot")


def test_rules_that_decide_for_nothing_are_reported():
    late = QuantRule(module_path="net/linear", weight_qtype="int8")
    absent = QuantRule(module_path="net", weight_qtype="int8")
    rules = [absent, CONVS, HEAD, REST, late]
    assert unused_rules(rules, ["net/linear", "net/head"]) == [absent, late]
    # Rules that are equal are told apart: the second one of them comes too late.
    twice = [QuantRule(weight_qtype="int8"), QuantRule(weight_qtype="int8")]
    assert [id(rule) for rule in unused_rules(twice, ["net"])] == [id(twice[1])]


def test_unused_rules_are_warned_of_by_pattern_and_place():
    params = {"net/linear": {"w": jnp.ones((2, 3))}}
    rules = [QtRule(module_path="typo", weight_qtype="int8"), QtRule(weight_qtype="int8")]
    with pytest.warns(UserWarning, match=r"'typo' \(rules\[0\]\).*net/linear") as caught:
        hki.quantized_training(params, rules)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hki.quantized_training(params, rules[1:])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(module_path="("), "module_path: '.' is not a regular expression"),
        (dict(op_names="matmul"), "op_names: expected some of dot_general, .*got 'matmul'"),
        (dict(weight_qtype="int9"), "weight_qtype: expected one of int8, .*got 'int9'"),
        (dict(act_qtype=jnp.float32), "act_qtype: expected one of int8"),
        (
            dict(weight_calibration_method="max"),
            "weight_calibration_method: expected one of absmax",
        ),
        (dict(act_calibration_method="rms,x"), "act_calibration_method: expected numbers"),
        (dict(act_calibration_method="rms,1,2"), "act_calibration_method: expected 0 to 1 numbers"),
        (dict(act_calibration_method="rms,nan"), "act_calibration_method: expected finite"),
        (dict(tile_size=0), "tile_size: expected a positive integer"),
        (dict(tile_size=1.5), "tile_size: expected a positive integer"),
        (dict(tile_size=True), "tile_size: expected a positive integer"),
        (dict(act_static_scale=True), "act_static_scale: expected an act_qtype"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    for cls in (QuantRule, QtRule):
        with pytest.raises(ValueError, match=message):
            cls(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weight_qtype="q4_0"), "weight_qtype: expected one of int8, .*got 'q4_0'"),
        (dict(weight_qtype="binary"), "weight_qtype: expected one of int8, .*got 'binary'"),
        (dict(bwd_qtype="uint8"), "bwd_qtype: 'uint8' has no negative codes"),
        (dict(weight_calibration_method="hqq"), "weight_calibration_method: .*got 'hqq'"),
        (dict(bwd_weight_grad_tile_size=-1), "bwd_weight_grad_tile_size: expected a positive"),
        (
            dict(bwd_qtype="int8", bwd_stochastic_rounding="normal"),
            "bwd_stochastic_rounding: expected None or one of 'uniform', 'low_bit_uniform'",
        ),
        (dict(bwd_stochastic_rounding="uniform"), "expected gradients in integers .*got .*None"),
        (
            dict(bwd_qtype="fp8", bwd_stochastic_rounding="uniform"),
            "expected gradients in integers .*got .*fp8",
        ),
        (
            dict(additional_qt_config={"lhs_type": "int8"}),
            "additional_qt_config: expected fields of ProductConfig, got lhs_type; there are",
        ),
        (dict(additional_qt_config={"lhs_qtype": "int9"}), "lhs_qtype: expected one of"),
    ],
)
def test_training_refuses_what_it_does_not_have(options, message):
    with pytest.raises(ValueError, match=message):
        QtRule(**options)


def test_rules_are_hashable_and_equal_by_value():
    make = lambda: QtRule(  # noqa: E731
        weight_qtype=jnp.int8,
        op_names=["einsum"],
        channelwise_noise_axes=[0, 1],
        additional_qt_config={"use_original_residuals": True, "tile_size": 4},
    )
    assert make() == make() and hash(make()) == hash(make())
    assert make().weight_qtype == "int8"
    assert make() != QtRule(weight_qtype="int8")


def test_a_rule_says_how_each_operand_of_a_product_is_quantized():
    rule = QtRule(
        weight_qtype="int4",
        act_qtype="int8",
        bwd_qtype="fp8_e5m2",
        weight_calibration_method="rms,3",
        bwd_weight_grad_tile_size=2,
        additional_qt_config={"drhs_grad_qtype": "int8", "disable_gradient_clipping": True},
    )
    expected = ProductConfig(
        lhs=OperandConfig("int8"),
        rhs=OperandConfig("int4", "rms,3"),
        dlhs_grad=GradientConfig("fp8_e5m2"),
        drhs_grad=GradientConfig("int8", tile_size=2),
        drhs_residual=OperandConfig(tile_size=2),
        disable_gradient_clipping=True,
    )
    assert rule.config(lhs_is_weight=False, rhs_is_weight=True) == expected
    swapped = rule.config(lhs_is_weight=True, rhs_is_weight=False)
    assert swapped.lhs.qtype == "int4"
    assert (swapped.dlhs_grad.tile_size, swapped.drhs_grad.tile_size) == (2, None)
    # Dense gradients are those of the operands before rounding, as Qwix's provider has it.
    for cls in (QuantRule, QtRule):
        assert cls(weight_qtype="int8").config(False, True).use_original_residuals
    with pytest.raises(TypeError, match="rule: expected a QtRule or a QuantRule, got 'int8'"):
        dot_general(jnp.eye(2), jnp.eye(2), (((1,), (0,)), ((), ())), rule="int8")


def test_options_of_operands_have_the_flat_names_of_qwix():
    flat = dict(
        lhs_qtype="int8",
        rhs_calibration_method="rms,3",
        tile_size=4,
        dlhs_grad_qtype="int4",
        drhs_tile_size=0.5,
        dlhs_stochastic_rounding="uniform",
        channelwise_noise_axes=(0, 1),
        dlhs_residual_disable_channelwise_axes=True,
        use_original_residuals=True,
    )
    config = ProductConfig(
        lhs=OperandConfig("int8", tile_size=4),
        rhs=OperandConfig(calibration_method="rms,3", tile_size=4),
        dlhs_grad=GradientConfig(
            "int4", stochastic_rounding="uniform", channelwise_noise_axes=(0, 1)
        ),
        drhs_grad=GradientConfig(tile_size=0.5, channelwise_noise_axes=(0, 1)),
        dlhs_residual=OperandConfig(disable_channelwise_axes=True),
        drhs_residual=OperandConfig(tile_size=0.5),
        use_original_residuals=True,
    )
    assert ProductConfig().with_flat(**flat) == config
    assert ProductConfig().with_flat(**config.flat()) == config
    assert config.flat() == ProductConfig().flat() | flat
    # Qwix has a function of noise where there is the name of one here.
    assert len(config.flat()) == 26


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(qtype="int8"), "expected fields of ProductConfig, got qtype; there are channelwise_"),
        (dict(tile_size=-1), "^tile_size: expected a positive integer"),
        (dict(drhs_tile_size=-1), "^drhs_tile_size: expected a positive integer"),
        (dict(rhs_calibration_method="mse"), "^rhs_calibration_method: expected one of absmax"),
        (dict(drhs_stochastic_rounding="uniform"), "^drhs_stochastic_rounding: .* got .* None"),
    ],
)
def test_flat_names_are_those_of_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ProductConfig().with_flat(**options)


@pytest.mark.parametrize(
    "rule, expected",
    [
        (QuantRule(weight_qtype="int4", tile_size=0.25), dict(group_size=8, calibration="absmax")),
        (
            QuantRule(weight_qtype="int8", weight_calibration_method="minmax"),
            dict(dtype="int8", calibration="minmax"),
        ),
        (QuantRule(weight_qtype="uint4"), dict(dtype="uint4", calibration=None)),
        (QuantRule(weight_qtype="mxfp4"), dict(dtype="mxfp4", group_size=None)),
    ],
)
def test_what_rules_say_of_stored_weights(rule, expected):
    options = rule.weight_options(32)
    assert {name: options[name] for name in expected} == expected
    hki.QuantizedMatrix.quantize(jnp.ones((32, 4)), **options)
