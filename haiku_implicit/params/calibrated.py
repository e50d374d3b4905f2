"""Quantization from a calibration batch: weights rounded for the inputs that they have in a model."""

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.arrays import observed
from haiku_implicit.arrays.observed import Observed
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.array import ImplicitArray, is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.numerics import channel_scales, formats, scales
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.params import progress, trees
from haiku_implicit.params.options import GroupSize, QuantizeOptions
from haiku_implicit.params.selection import describe, errors_name


def input_moments(
    apply: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    targets: Targets | None = None,
) -> dict[str, jax.Array]:
    """The second moments of what weights are multiplied by in a model.

    The model is run and differentiated as it is, wherever its weights are used: in scans, stacks of
    layers, checkpointed blocks. Its outputs have to depend on a weight by a path that has a gradient.

    Args:
      apply: the model, `apply(params, batch)`, with floating outputs of any structure.
      params: its parameters, with dense weights.
      batches: calibration data.
      targets: which parameters, as for `add_lora`. None: all dense weights.

    Returns:
      For each target that is multiplied as `x @ w` its path (`module/name`) and, for all inputs x
      `[n, k]` of all batches, the sum of xᵀx: `[k, k]` float32, or `[layers, k, k]` where layers are
      stacked. A warning names the other targets.

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
    return _collect(observed.MOMENTS, jnp.add, apply, params, batches, targets)


def input_maxima(
    apply: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    targets: Targets | None = None,
) -> dict[str, jax.Array]:
    """The largest magnitudes of what weights are multiplied by in a model, for SmoothQuant.

    They are found as `input_moments` finds its sums, and under the same conditions.

    Args:
      apply, params, batches, targets: as for `input_moments`.

    Returns:
      For each target that is multiplied as `x @ w` its path (`module/name`) and for all inputs x
      `[n, k]` of all batches the maximum of |x| by n: `[k]` float32, or `[layers, k]` where layers are
      stacked. It is exact where the weight is used once in a run of the model (or once in each
      layer). For several uses in a run it is the mean of the largest ones among their maxima, of
      those within an eighth of an octave: at most 9 % too small. (What comes from a gradient is a
      sum over uses; sums of counts by size are what a maximum can be read from.) Magnitudes are told
      apart from 2⁻³² to 2³².

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
    return _collect(observed.MAXIMA, jnp.maximum, apply, params, batches, targets)


def _collect(
    statistic: observed.Statistic,
    join: Callable[[jax.Array, jax.Array], jax.Array],
    apply: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    targets: Targets | None,
) -> dict[str, jax.Array]:
    """A statistic of the inputs of each target, those of single batches joined."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(parameter: trees.Parameter) -> Any:
        shapes[parameter.path] = tuple(parameter.value.shape)
        return parameter.value

    options = QuantizeOptions()
    params = trees.replace_targets(params, targets, note, options.takes, options.default)

    def total(sums: dict[str, jax.Array], batch: Any) -> jax.Array:
        def observed_weight(parameter: trees.Parameter) -> Any:
            path, value = parameter.path, parameter.value
            return Observed(value, sums[path], statistic) if path in sums else value

        return _total(
            use_implicit_args(apply)(trees.map_parameters(observed_weight, params), batch)
        )

    zeros = {
        path: jnp.zeros((*shape[:-2], *statistic.shape(shape[-2])), jnp.float32)
        for path, shape in shapes.items()
    }
    step = jax.jit(lambda *args: jax.tree.map(statistic.read, jax.grad(total)(*args)))
    found = None
    with progress.bar("calibration batches", operator.length_hint(batches) or None) as run:
        for batch in batches:
            new = run("", step, zeros, batch)
            found = new if found is None else jax.tree.map(join, found, new)
    if found is None:
        raise ValueError("batches: expected at least one, got none")
    seen = {path: x for path, x in found.items() if bool((x != 0).any())}
    _warn_of_unseen([path for path in shapes if path not in seen], len(shapes))
    return seen


def _total(outputs: Any) -> jax.Array:
    """The sum of all floating outputs: something that has a gradient."""
    leaves = jax.tree.leaves(outputs, is_leaf=is_implicit)
    floating = [y for y in leaves if jnp.issubdtype(y.dtype, np.inexact)]
    if not floating:
        raise ValueError("apply: expected floating outputs, got none")
    return sum((jnp.sum(y).astype(jnp.float32) for y in floating), jnp.float32(0))


def _warn_of_unseen(unseen: list[str], count: int) -> None:
    if unseen:
        warnings.warn(
            f"inputs of {len(unseen)} of {count} weights were not seen: none of these is multiplied as "
            "x @ w, w [n, m], where there is a gradient (tables that are looked up are not, nor are "
            f"weights of more axes in an einsum), or only zeros were: {', '.join(unseen[:10])}"
            f"{', ...' if len(unseen) > 10 else ''}. Leave them out by targets=",
            stacklevel=4,
        )


def quantize_with_inputs(
    params: Any,
    inputs: dict[str, jax.Array],
    *,
    method: str = "gptq",
    dtype: str = "int4",
    group_size: GroupSize = None,
    zero_point: bool = False,
    calibration: str | None = "mse",
    scale_dtype: Any = None,
    activation: str | None = None,
) -> Any:
    """Quantizes weights for the least error of their products with the inputs that they have.

    Args:
      params: parameters with dense weights.
      inputs: what `input_moments` says of some of them: these are quantized. For 'smoothquant', what
        `input_maxima` says.
      method: 'gptq' rounds elements one after another, and those that are left take up the error
        (arXiv:2210.17323). 'awq' rounds to the nearest, after input channels are multiplied by
        rms(x)^α, with the best α of 0, 0.05, ..., 1 for each weight (arXiv:2306.00978). 'awq+gptq'
        rounds the channels so multiplied as 'gptq' does. 'smoothquant', or 'smoothquant,α' (0.5):
        channels are multiplied by max|x|^α / max|w|^(1−α), which leaves outliers of the activations
        to the weight (arXiv:2211.10438).
      dtype, group_size, zero_point, calibration, scale_dtype: as for `QuantizedMatrix.quantize`. With
        'mse' the search for scales weighs errors by the mean squares of inputs as well (but with
        'smoothquant', which knows none).
      activation: as there; what 'smoothquant' is for.

    Returns:
      The parameters with `QuantizedMatrix` in place of these weights, grouped along their axis -2; by
      all methods but 'gptq' within a `ScaledMatrix`, which divides the inputs by what the channels
      were multiplied by.

    Raises:
      ValueError: for no inputs at all, a path that `params` have no dense weight at, inputs that are
        not finite or are those of another method, options that do not fit.

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
    fun, of_inputs = _method(method)
    options = QuantizeOptions(
        dtype, group_size, -2, zero_point, calibration, scale_dtype, activation
    )
    if of_inputs == "maxima" and activation is None:
        raise ValueError(
            f"method: {method!r} is for activations that are quantized, too: expected "
            "activation='int8' or the like, got None"
        )
    if not inputs:
        raise ValueError(
            f"inputs: expected what input_{of_inputs} says of one weight or more, got nothing: no "
            "weight [n, m] of the model is multiplied as x @ w where there is a gradient; "
            "quantize_params quantizes others, without inputs"
        )
    paths = [parameter.path for parameter in trees.parameters_of(params)]
    if missing := sorted(inputs.keys() - set(paths)):
        raise ValueError(f"inputs: the parameters have no {', '.join(missing)}")

    def quantized(parameter: trees.Parameter) -> ImplicitArray:
        path, value = parameter.path, parameter.value
        _check_inputs(path, value, inputs[path], of_inputs)
        with errors_name(path, value), jax.numpy_dtype_promotion("standard"):
            return fun(value, inputs[path], options)

    return trees.replace_marked(params, [path in inputs for path in paths], quantized)


def _gptq(w: jax.Array, moments: jax.Array, options: QuantizeOptions) -> QuantizedMatrix:
    return options.quantize(w, moments)


def _awq(
    w: jax.Array, moments: jax.Array, options: QuantizeOptions, products: bool = False
) -> ScaledMatrix:
    """With the scales of least error by rounding to the nearest, also where `products` are used."""
    scale = _awq_scale(w, moments, options)
    return _scaled(w, scale, options, moments if products else _diagonal(moments))


@functools.partial(jax.jit, static_argnums=2)
def _awq_scale(w: jax.Array, moments: jax.Array, options: QuantizeOptions) -> jax.Array:
    def error(scale: jax.Array) -> jax.Array:
        held = materialize_array(_scaled(w, scale, options, _diagonal(moments)))
        return channel_scales.product_error((held - w).astype(moments.dtype), moments)

    return channel_scales.awq(moments, error)


def _smoothquant(
    w: jax.Array, maxima: jax.Array, options: QuantizeOptions, alpha: float = 0.5
) -> ScaledMatrix:
    return _scaled(w, channel_scales.smoothquant(w, maxima, alpha), options, None)


def _scaled(
    w: jax.Array, scale: jax.Array, options: QuantizeOptions, moments: jax.Array | None
) -> ScaledMatrix:
    """`w`, divided by the scale of its input channels and quantized then, for inputs times the scale.

    Args:
      w: `[..., k, m]`.
      scale: `[..., k]`.
      options: how it is quantized.
      moments: of the inputs, `[..., k, k]`; or the diagonal, `[..., k]`; or None.
    """
    wide = scale.astype(formats.arithmetic_dtype(w.dtype))
    if moments is not None:
        scales = wide**2 if moments.ndim < w.ndim else wide[..., None] * wide[..., None, :]
        moments = moments * scales
    matrix = options.quantize(w / wide[..., None], moments)
    return ScaledMatrix(
        matrix if matrix.dtype == w.dtype else matrix._replace(dtype=w.dtype), scale
    )


def _diagonal(moments: jax.Array) -> jax.Array:
    return jnp.diagonal(moments, axis1=-2, axis2=-1)


# Name: (the function of a weight, of what is known of its inputs, and of options; what that is).
_METHODS: dict[str, tuple[Callable[..., Any], str]] = {
    "gptq": (_gptq, "moments"),
    "awq": (_awq, "moments"),
    "awq+gptq": (functools.partial(_awq, products=True), "moments"),
    "smoothquant": (_smoothquant, "maxima"),
}


def _method(method: str) -> tuple[Callable[..., Any], str]:
    """A method by its name, with a number after the comma where it takes one."""
    name, comma, number = str(method).replace(" ", "").partition(",")
    if name not in _METHODS or (comma and name != "smoothquant"):
        expected = ", ".join(repr(known) for known in _METHODS)
        raise ValueError(f"method: expected {expected} or 'smoothquant,ALPHA', got {method!r}")
    fun, of_inputs = _METHODS[name]
    if comma:
        try:
            alpha = float(number)
        except ValueError:
            alpha = math.nan
        if not 0 <= alpha <= 1:
            raise ValueError(
                f"method: expected a number from 0 to 1 after 'smoothquant', got {method!r}"
            )
        fun = functools.partial(fun, alpha=alpha)
    return fun, of_inputs


def _check_inputs(path: str, value: Any, of_inputs: jax.Array, what: str) -> None:
    """Raises unless a weight is dense, and this is what is known of its inputs."""
    own = list(value.shape[:-1])
    wanted, axes = (own, "k") if what == "maxima" else (own + own[-1:], "k, k")
    if is_implicit(value) or list(of_inputs.shape) != wanted:
        raise ValueError(
            f"{path}: expected a dense weight [..., k, m] and of its inputs what input_{what} says, "
            f"[..., {axes}], got {describe(value)} and {list(of_inputs.shape)}"
        )
    if scales.known_nonfinite(of_inputs):
        raise ValueError(f"{path}: {what} of its inputs are infinite or NaN; look for such inputs")
