"""Edits of existing parameters: weights become implicit arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Unpack

import jax

from haiku_implicit.adapters.rotated import Rotated
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.messages import value_error, warn_caller
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import Array, SameTree
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf
from haiku_implicit.params.trees.one_by_one import is_news
from haiku_implicit.params.trees.options import QuantizeOptions
from haiku_implicit.params.trees.selection import describe, editing
from haiku_implicit.quantized.matrix import QuantizeArguments, QuantizedMatrix
from haiku_implicit.quantized.numbers.options import checked_activation, loses_negatives
from haiku_implicit.quantized.products.activation_stats import QuantStats
from haiku_implicit.quantized.products.rules import QuantRule
from haiku_implicit.quantized.types.static_quantized import StaticQuantized
from haiku_implicit.quantized.types.trellis import TrellisMatrix


def quantize_params(
    params: SameTree,
    *,
    targets: Targets | None = None,
    rules: Sequence[QuantRule] | None = None,
    exclude: Targets | None = None,
    missing_ok: bool = False,
    matrix_axes: MatrixAxesOf | None = None,
    **options: Unpack[QuantizeArguments],
) -> SameTree:
    """Quantizes weights of a tree of parameters; of an adapter, its `w`.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings; or
        `jax.ShapeDtypeStruct`s of them, to get the structs of the quantized parameters.
      targets: the parameters to quantize, as for `add_lora`. None: weights, as defined there, that
        are not quantized yet, that `group_size` divides and whose `axis` is longer than one. A
        warning names the weights that it does not divide and `exclude` does not name, and complex
        weights, which are not supported.
      rules: a list of `quantization.QuantRule` instead of the options (except `axis` and
        `scale_dtype`). The first rule that matches a module, and the product that its weight is for,
        decides how its dense weights are quantized; a rule without `weight_qtype` leaves them dense. A
        warning names the rules that decide for no module. A rule with `act_static_scale` gives
        `StaticQuantized` weights, whose ranges come from a calibration run (`with_quant_stats`) and
        `convert_trained`.
      exclude, missing_ok, matrix_axes: as for `add_lora`. With `matrix_axes`, `axis` is an axis of
        the matrix.
      **options: how to quantize, as `QuantizedMatrix.quantize` documents: `dtype` (the number format,
        'int8'), `group_size` (the number of elements that share a scale; None: a whole row or column),
        `axis` (along which they lie, -2), `zero_point` (False), `calibration` (how scales are found:
        'absmax', 'minmax', 'absmean', 'mse', 'hqq', 'rms,3', 'percentile,99.5' or 'fixed,LOW,HIGH';
        None: 'absmean' for binary and ternary, 'minmax' with a zero point, else 'absmax'),
        `scale_dtype` (how scales are stored, None), `activation` (the format of activations in
        products; None: dense). `rotate` (False): whether the inputs are rotated before the weight is
        quantized, against outliers. The dtypes 'trellis2', 'trellis3' and 'trellis4' are rotated
        `TrellisMatrix`, without other options but `activation`; 2 bits need inputs
        (`quantize_with_inputs`).

    Returns:
      The tree with the targets replaced by `QuantizedMatrix` (rotated: in `adapters.Rotated`), and
      mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (the error lists near misses), a parameter that
        cannot be quantized with these options, or an unknown format.
      TypeError: for an unknown option.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'linear': {'w': jnp.ones((64, 32)), 'b': jnp.zeros(32)}}
      >>> w = hki.quantize_params(params, dtype='int4')['linear']['w']
      >>> w.shape, w.nbytes < params['linear']['w'].nbytes / 6
      ((64, 32), True)
      >>> from haiku_implicit.quantization import QuantRule
      >>> params['head'] = params['linear']
      >>> rules = [QuantRule(module_path='head'), QuantRule(weight_qtype='nf4', tile_size=32)]
      >>> new = hki.quantize_params(params, rules=rules)
      >>> new['linear']['w'].format, type(new['head']['w']) is type(params['head']['w'])
      ('nf4', True)
    """
    how = QuantizeOptions.of(options, rules=rules is not None)
    _check_activation(how.activation)
    of_structs = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
    if how.dtype == "trellis2" and not of_structs:
        warn_caller(
            "dtype 'trellis2': without inputs, models lose most of what they know; give inputs to "
            "quantize_with_inputs, or more bits"
        )
    choice = trees.Choice(targets, exclude, missing_ok, matrix_axes)
    if rules is not None:
        stored = functools.partial(_stored_by_rule, how)
        edit = trees.by_rules(trees.checked_rules(rules), stored, in_adapters=True)
    else:
        edit = trees.of_weights(lambda p: how.put_on(p.path, p.value, p.stacked), how)
    return trees.replace_targets(params, choice, edit)


def _stored_by_rule(
    options: QuantizeOptions, parameter: trees.Parameter, rule: QuantRule
) -> ImplicitArray:
    """A weight quantized by a rule, for products by that rule."""
    stored = options.by_rule(rule, parameter).quantize(parameter.value)
    if not (rule.act_static_scale and isinstance(stored, QuantizedMatrix)):
        return stored
    return StaticQuantized.of(stored, QuantStats(name=parameter.path), rule.act_batch_axes)


def quantize_activations(
    params: SameTree,
    dtype: str | None = "int8",
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    missing_ok: bool = False,
) -> SameTree:
    """Makes products with quantized weights quantize their activations, too.

    The codes of the weights do not change, for example codes read from a file. The scale of a row of
    activations is its largest magnitude over 127.5 for int8, and over 7.5 for int4. A product of
    integers takes a fraction of the time of a product with floating-point activations, and rounds more.

    Args:
      params: parameters with `QuantizedMatrix` or `TrellisMatrix` in them, in any nesting of mappings.
      dtype: the format of activations, such as 'int8' (a scale for each row) or 'int8,groups' (a
        scale for each part of a row that is multiplied with a group of the weight). Formats without a
        sign ('uint8') make negative numbers zero; 'uint8,minmax' does not. None turns rounding off.
      targets: the weights to change, as for `add_lora`. None: all quantized weights, including those
        under adapters.
      exclude, missing_ok: as for `add_lora`.

    Returns:
      The tree with this `activation` in the targets, and mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (the error lists near misses), a weight that is not
        quantized, or a format that activations cannot have.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.QuantizedMatrix.quantize(jax.random.normal(jax.random.key(0), (64, 3)), 'int4')
      >>> params = hki.quantize_activations({'linear': {'w': w}})
      >>> params['linear']['w'].activation
      'int8'
    """

    def with_activation(path: str, value: Array) -> Array:
        for kind, part in _HOLDERS.items():
            if isinstance(value, kind):
                return value._replace(**{part: with_activation(path, getattr(value, part))})
        if not isinstance(value, QuantizedMatrix | TrellisMatrix):
            raise value_error(
                f"{path}: expected a QuantizedMatrix or a TrellisMatrix, got {describe(value)}; "
                "quantize_params makes one of a dense weight"
            )
        with editing(path, value):
            return value.with_activation(dtype)

    _check_activation(dtype)
    edit = trees.Edit(
        lambda parameter: with_activation(parameter.path, parameter.value),
        _is_stored,
        functools.partial(trees.nothing_chosen, wanted="a quantized weight"),
    )
    return trees.replace_targets(params, trees.Choice(targets, exclude, missing_ok), edit)


def _check_activation(activation: str | None) -> None:
    """Raises for an unknown activation; warns of one without codes for negative numbers."""
    if loses_negatives(activation) and is_news("negative activations"):
        name, *_ = str(checked_activation(activation)).split(",")
        warn_caller(
            f"activation {activation!r} makes negative activations zero; '{name},minmax' has codes "
            "for them"
        )


# Types of weights that hold a quantized weight, and the field that holds it.
_HOLDERS: dict[type[Adapter | ScaledMatrix | Rotated], str] = {
    Adapter: "w", ScaledMatrix: "matrix", Rotated: "w",
}  # fmt: skip


def _is_stored(module_name: str, name: str, value: Array) -> bool:
    """Whether a weight is quantized, or holds a quantized weight."""
    for kind, part in _HOLDERS.items():
        if isinstance(value, kind):
            return _is_stored(module_name, name, getattr(value, part))
    return isinstance(value, QuantizedMatrix | TrellisMatrix)


def zero_params(
    params: SameTree, *, targets: Targets, exclude: Targets | None = None, missing_ok: bool = False
) -> SameTree:
    """Replaces parameters of a tree by symbolic zeros, which cost no memory and no work.

    Args:
      params: parameters as Haiku's `init` returns them, or any nesting of mappings.
      targets: the parameters to replace, as for `add_lora`, but without a default.
      exclude, missing_ok: as for `add_lora`.

    Returns:
      The tree with the targets replaced by `Zeros`, and mappings as dicts.

    Raises:
      ValueError: for targets that match nothing (the error lists near misses).

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> hki.zero_params({'linear': {'b': jnp.ones(3)}}, targets='.*/b')
      {'linear': {'b': Zeros(float32[3])}}
    """
    choice = trees.Choice(targets, exclude, missing_ok)
    edit = trees.Edit(lambda p: Zeros(shape=tuple(p.value.shape), dtype=p.value.dtype))
    return trees.replace_targets(params, choice, edit)
