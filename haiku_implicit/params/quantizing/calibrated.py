"""Quantization with calibration data: rounding that takes the inputs of each weight into account."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.array import ImplicitArray, is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import shown, type_error, value_error, warn_caller
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import Array, Params, SameTree
from haiku_implicit.params.quantizing import carried
from haiku_implicit.params.quantizing.observing import Model, arguments_of, check_batches, inputs_of
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf
from haiku_implicit.params.trees.options import QuantizeOptions
from haiku_implicit.params.trees.selection import describe, editing
from haiku_implicit.quantized.matrix import QuantizeArguments
from haiku_implicit.quantized.numbers import channel_scales, formats, options, scales
from haiku_implicit.quantized.products.rules import QuantRule
from haiku_implicit.quantized.types.trellis import BITS

# A model, `apply(params, *batch)`, and its batches.
Carry = tuple[Callable[..., Any], Iterable[Any]]


def input_moments(
    apply: Callable[..., Any],
    params: Params,
    batches: Iterable[Any],
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    matrix_axes: MatrixAxesOf | None = None,
) -> dict[str, jax.Array]:
    """The second moments of the inputs of a model's weights.

    The model runs and is differentiated unchanged, including weights in scans, stacks of layers and
    checkpointed blocks. A weight is seen if the outputs depend on it in a differentiable way.

    Args:
      apply: the model, `apply(params, *batch)`, with floating outputs of any structure.
      params: its parameters, with dense weights.
      batches: calibration data: tuples of the arguments of `apply` after the parameters. Anything else
        than a tuple or a list is the only argument.
      targets: the weights to observe, as for `add_lora`. None: all dense weights.
      exclude: the targets to leave out, as for `add_lora`.
      matrix_axes: the input and output axes of weights, as for `add_lora`.

    Returns:
      The sum of xᵀx over the inputs x `[n, k]` of all batches, by the path (`module/name`) of each
      target that is used as `x @ w`: `[k, k]` float32, or `[layers, k, k]` for stacked layers. A
      warning names the other targets.

    Raises:
      ValueError: for targets that match nothing, no batches, or outputs that are not floating.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
      >>> params = {'linear': {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}}
      >>> print(hki.input_moments(model.apply, params, [jnp.array([[1.0, 2.0]])])['linear/w'])
      [[1. 2.]
       [2. 4.]]
    """
    choice = trees.Choice(targets, exclude, matrix_axes=matrix_axes)
    return _seen("moments", apply, params, batches, choice)


def input_maxima(
    apply: Callable[..., Any],
    params: Params,
    batches: Iterable[Any],
    *,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    matrix_axes: MatrixAxesOf | None = None,
) -> dict[str, jax.Array]:
    """The largest magnitudes of the inputs of a model's weights, for SmoothQuant.

    The model runs as for `input_moments`, under the same conditions.

    Args:
      apply, params, batches, targets, exclude, matrix_axes: as for `input_moments`.

    Returns:
      The maximum of |x| over n, for the inputs x `[n, k]` of all batches, by the path (`module/name`)
      of each target that is used as `x @ w`: `[k]` float32, or `[layers, k]` for stacked layers. It is
      exact if a run of the model uses the weight once (or once in each layer). If a run uses it several
      times, it is the mean of the largest maxima, those within an eighth of an octave, and at most 9 %
      too small: a gradient can only sum over uses, so the maxima are read from counts by size.
      Magnitudes from 2⁻³² to 2³² are distinguished.

    Raises:
      ValueError: as `input_moments` does.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
      >>> params = {'linear': {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}}
      >>> batches = [jnp.array([[1.0, -2.0]]), jnp.array([[-3.0, 1.0]])]
      >>> print(hki.input_maxima(model.apply, params, batches)['linear/w'])
      [3. 2.]
    """
    choice = trees.Choice(targets, exclude, matrix_axes=matrix_axes)
    return _seen("maxima", apply, params, batches, choice)


def _seen(
    needed: str,
    apply: Callable[..., Any],
    params: Params,
    batches: Iterable[Any],
    choice: trees.Choice,
) -> dict[str, jax.Array]:
    """A statistic of the inputs of each target; warns of those without one, and of odd targets."""
    parameters = trees.parameters_of(params)
    weights = trees.of_weights(lambda parameter: parameter.value, QuantizeOptions())
    marks = trees.marks_of(parameters, choice, weights)
    trees.warn_of_others(parameters, marks, choice, of_each="a statistic")
    paths = [p.path for p in itertools.compress(parameters, marks)]
    seen = inputs_of(needed, Model(apply, params, choice.matrix_axes), batches, paths)
    _warn_of_unseen([path for path in paths if path not in seen], len(paths))
    return seen


def _warn_of_unseen(unseen: list[str], count: int) -> None:
    if unseen:
        warn_caller(
            f"inputs of {len(unseen)} of {count} weights were not seen: the model does not use them as "
            "x @ w, w [n, m], in a differentiable way (tables that are looked up do not count; weights "
            "of more axes in an einsum do after hki.prepare(model, params, *args)), or all inputs were "
            f"zero: {shown(unseen, most=10)}. quantize_with_inputs leaves them dense; then "
            "quantize_params(params, exclude=...) rounds them without inputs. exclude= of this call "
            "leaves them out without this warning"
        )


def quantize_with_inputs(
    params: SameTree,
    inputs: dict[str, jax.Array],
    *,
    method: str = "gptq",
    carry: Carry | None = None,
    rules: Sequence[QuantRule] | None = None,
    matrix_axes: MatrixAxesOf | None = None,
    **options: Unpack[QuantizeArguments],
) -> SameTree:
    """Quantizes weights for the least error of their products with their inputs.

    Args:
      params: parameters with dense weights.
      inputs: the result of `input_moments` ('smoothquant': of `input_maxima`), or a part of it. The
        weights that it names are quantized.
      method: 'gptq' rounds elements one after another, and the elements not yet rounded make up for the
        error (arXiv:2210.17323). 'awq' multiplies input channels by rms(x)^α, with the best α of 0,
        0.05, ..., 1 for each weight, and rounds to the nearest (arXiv:2306.00978). 'awq+gptq'
        multiplies as 'awq' and rounds as 'gptq'. 'smoothquant', or 'smoothquant,α' (0.5), multiplies
        channels by max|x|^α / max|w|^(1−α), which moves outliers of the activations into the weight
        (arXiv:2211.10438).
      carry: the model and the batches given to `input_moments`, `(apply, batches)`. Weights are then
        quantized in the order of their use, each for its inputs in the model with the earlier ones
        quantized, and makes up for a part of the errors of these inputs (arXiv:2504.09629). Most often
        the whole model's error is less, but not always: compare both on other data. The model runs
        twice, side by side in one program (under `vmap`), and a stack of L layers L times for each of
        its weights. None: each weight is quantized as if all others were dense.
      rules: as for `quantize_params`, instead of all options except `scale_dtype`. Weights without a
        quantizing rule stay dense.
      matrix_axes: the `matrix_axes` given to `input_moments` or `input_maxima`.
      **options: how to quantize, as `QuantizedMatrix.quantize` documents: `dtype` ('int4'),
        `group_size`, `zero_point`, `calibration` ('mse'; the search for scales also weights errors by
        the mean squares of the inputs, except for 'smoothquant', which does not know them),
        `scale_dtype`, `activation` ('smoothquant' needs one); `rotate`, and trellis codes, as for
        `quantize_params`, with 'gptq'.

    Returns:
      The parameters with these weights as `QuantizedMatrix`, grouped along axis -2 (rotated ones in
      `adapters.Rotated`). All methods but 'gptq' wrap it in a `ScaledMatrix`, which divides the inputs
      by the factors of the channels.

    Raises:
      ValueError: for empty inputs, a path without a dense weight in `params`, inputs that are not
        finite or that belong to another method, or options that do not fit.
      TypeError: for an unknown option.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
      >>> x = x * jnp.arange(64.0) ** 2
      >>> params, inputs = {'linear': {'w': w}}, {'linear/w': x.T @ x}
      >>> def error(params):
      ...     return float(jnp.linalg.norm(x @ (hki.materialize(params['linear']['w']) - w)))
      >>> rounded = error(hki.quantize_params(params, dtype='int4', calibration='mse'))
      >>> error(hki.quantize_with_inputs(params, inputs)) < 0.8 * rounded
      True
      >>> error(hki.quantize_with_inputs(params, inputs, method='awq')) < 0.9 * rounded
      True
    """
    how = options_with_inputs(options, "int4", rules=rules is not None)
    if rules is not None:
        rules = trees.checked_rules(rules)
    else:
        _check_method(method, how)

    def how_of(parameter: trees.Parameter) -> QuantizeOptions | None:
        return how if rules is None else _how_by_rule(rules, parameter, how)

    return quantize_by(how_of, params, inputs, method, carry, matrix_axes)


def options_with_inputs(
    options: QuantizeArguments, dtype: str, *, rules: bool = False
) -> QuantizeOptions:
    """The record of a function's `**options`, by default with this dtype and scales by 'mse'."""
    default: QuantizeArguments = dict(dtype=dtype, calibration="mse")
    return QuantizeOptions.of(options, {} if options.get("dtype") in BITS else default, rules=rules)


def quantize_by(
    how_of: Callable[[trees.Parameter], QuantizeOptions | None],
    params: Params,
    inputs: Mapping[str, jax.Array],
    method: str,
    carry: Carry | None,
    matrix_axes: MatrixAxesOf | None,
) -> Params:
    """Quantizes each weight that `inputs` names by its own options; None leaves it dense."""
    chosen, numbers = parsed(method)
    paths = [parameter.path for parameter in trees.parameters_of(params)]
    _check_paths(inputs, paths, chosen.needed)

    def quantized(parameter: trees.Parameter, inputs: jax.Array) -> Array:
        path, value = parameter.path, parameter.value
        _check_inputs(path, value, inputs, chosen.needed)
        with editing(path, value):
            own = how_of(parameter)
            if own is None:
                return value
            if own.axis != -2:
                raise value_error(f"axis: the inputs are those of axis -2, got {own.axis}")
            _check_method(method, own)
            return chosen.quantize(value, inputs, own, *numbers)

    known: Mapping[str, Array] = {}
    if carry is not None:
        known = _carried(quantized, Model(carry[0], params, matrix_axes), carry[1], inputs, chosen)

    def made(parameter: trees.Parameter) -> Array:
        path = parameter.path
        return known[path] if path in known else quantized(parameter, inputs[path])

    marks = [path in inputs for path in paths]
    return trees.map_marked(params, marks, trees.on_matrix(made, matrix_axes))


def _carried(
    quantized: carried.Quantize,
    model: Model,
    batches: Iterable[Any],
    inputs: Mapping[str, jax.Array],
    method: _Method,
) -> dict[str, Array]:
    """The weights that are quantized in the order of their use."""
    if method.needed != "moments":
        raise value_error("carry: 'smoothquant' rounds without the moments of inputs")
    check_batches("carry", batches)
    given = [arguments_of(batch) for batch in batches]
    if not given:
        raise value_error("carry: expected at least one batch, got none")
    return carried.quantized_in_order(quantized, model, given, inputs)


def _check_paths(inputs: Collection[str], paths: Sequence[str], needed: str) -> None:
    if not isinstance(inputs, Mapping):
        raise type_error(
            f"inputs: expected the result of input_{needed}(apply, params, batches), got "
            f"{type(inputs).__name__}"
        )
    if not inputs:
        raise value_error(
            f"inputs: expected what input_{needed} says of one weight or more, got nothing: no "
            "weight [n, m] of the model is used as x @ w in a differentiable way; quantize_params "
            "quantizes others, without inputs"
        )
    if missing := sorted(set(inputs) - set(paths)):
        raise value_error(f"inputs: the parameters have no {', '.join(missing)}")


def _how_by_rule(
    rules: Sequence[QuantRule], parameter: trees.Parameter, how: QuantizeOptions
) -> QuantizeOptions | None:
    """The options that the rules give for a parameter; None if they leave it dense."""
    rule = trees.rule_of(rules, parameter)
    if rule is not None and rule.act_static_scale:
        raise value_error(
            "rules: act_static_scale has no form together with what is quantized by its inputs; use "
            "quantize_params, or leave it out"
        )
    return None if rule is None else how.by_rule(rule, parameter)


def _check_method(method: str, how: QuantizeOptions) -> None:
    """Raises if a method does not have these options."""
    chosen, _ = parsed(method)
    if how.is_rotated and chosen is not _METHODS["gptq"]:
        raise value_error(
            f"method: expected 'gptq' for trellis codes and rotated weights, got {method!r}"
        )
    if chosen.needed == "maxima" and how.activation is None:
        raise value_error(
            f"method: {method!r} is for quantized activations: expected activation='int8' or the like "
            "(act_qtype of a rule), got None"
        )


def _awq(
    w: jax.Array, moments: jax.Array, how: QuantizeOptions, products: bool = False
) -> ScaledMatrix:
    """A weight whose input channels are scaled for the least error of rounding to the nearest.

    With `products` (the full second moments), the scaled weight is then rounded by GPTQ.
    """
    scale = _awq_scale(w, moments, how)
    return _scaled(w, scale, how, moments if products else _diagonal(moments))


@functools.partial(jax.jit, static_argnums=2)
def _awq_scale(w: jax.Array, moments: jax.Array, how: QuantizeOptions) -> jax.Array:
    def error(scale: jax.Array) -> jax.Array:
        held = materialize_array(_scaled(w, scale, how, _diagonal(moments)))
        return channel_scales.product_error((held - w).astype(moments.dtype), moments)

    return channel_scales.awq(moments, error)


def _smoothquant(
    w: jax.Array, maxima: jax.Array, how: QuantizeOptions, alpha: float = 0.5
) -> ScaledMatrix:
    return _scaled(w, channel_scales.smoothquant(w, maxima, alpha), how, None)


def _scaled(
    w: jax.Array, scale: jax.Array, how: QuantizeOptions, moments: jax.Array | None
) -> ScaledMatrix:
    """`w` divided by a scale of its input channels and quantized, for inputs times that scale.

    Args:
      w: `[..., k, m]`.
      scale: `[..., k]`.
      how: the options for the quantization.
      moments: the second moments of the inputs of `w`, `[..., k, k]`; or their diagonal, `[..., k]`; or
        None.
    """
    wide = scale.astype(formats.arithmetic_dtype(w.dtype))
    if moments is not None:
        scales = wide**2 if moments.ndim < w.ndim else wide[..., None] * wide[..., None, :]
        moments = moments * scales
    matrix = how.quantize(w / wide[..., None], moments)
    return ScaledMatrix(
        matrix if matrix.dtype == w.dtype else matrix._replace(dtype=w.dtype), scale
    )


def _diagonal(moments: jax.Array) -> jax.Array:
    return jnp.diagonal(moments, axis1=-2, axis2=-1)


class _Method(NamedTuple):
    """A way to quantize a weight.

    Attributes:
      quantize: a function of the weight, a statistic of its inputs, its options, and perhaps a number.
      needed: the name of the statistic.
      numbers: the least and the greatest count of numbers that may follow the name of the method.
    """

    quantize: Callable[..., ImplicitArray]
    needed: str = "moments"
    numbers: tuple[int, int] = (0, 0)


_METHODS = {
    "gptq": _Method(lambda w, moments, how: how.quantize(w, moments)),
    "awq": _Method(_awq),
    "awq+gptq": _Method(functools.partial(_awq, products=True)),
    "smoothquant": _Method(_smoothquant, "maxima", (0, 1)),
}


def parsed(method: str) -> tuple[_Method, tuple[float, ...]]:
    """The method of a name, and the numbers after the comma."""
    known = {name: known.numbers for name, known in _METHODS.items()}
    name, numbers = options.parse("method", method, known)
    if not all(0 <= x <= 1 for x in numbers):
        raise value_error(f"method: expected a number from 0 to 1 after {name!r}, got {method!r}")
    return _METHODS[name], numbers


def _check_inputs(path: str, w: Array, inputs: jax.Array, needed: str) -> None:
    """Raises unless a weight is dense and the statistic of its inputs fits."""
    own = list(w.shape[:-1])
    shape, axes = (own, "k") if needed == "maxima" else (own + own[-1:], "k, k")
    if is_implicit(w) or list(inputs.shape) != shape:
        raise value_error(
            f"{path}: expected a dense weight [..., k, m] and of its inputs what input_{needed} says, "
            f"[..., {axes}], got {describe(w)} and {list(inputs.shape)}"
        )
    if scales.known_nonfinite(inputs):
        raise value_error(
            f"{path}: {needed} of its inputs are infinite or NaN; look for such inputs"
        )
