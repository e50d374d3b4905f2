"""Creators and getters: implicit parameters and state made inside an unmodified Haiku function.

A *creator* (`hk.custom_creator`) decides which arrays `init` makes and stores. A *getter*
(`hk.custom_getter`) decides which array the model sees for a stored array. Both make their arrays with
`box`, so that the same model without `transform_implicit` computes the same numbers with dense arrays.

All of them have an argument `targets`, which chooses the parameters that they act on:

- None: weights that fit. Weights are floating-point parameters of at least two axes (without the axes
  along which `hk.experimental.layer_stack` stacks) that are not called `b`, `bias`, `offset` or `scale`
  (or `gating_b`, `query_bias` and so on), nor `pos`, `position_embeddings` or another name for a table
  of positions. They fit LoRA if the rank is not too large, and quantization if the axis to quantize
  along is longer than one and divided by the group size.
- A regular expression that the whole of `module/name` has to match, like `r'.*/linear_\\d+/w'`; a
  predicate `(module_name, name, value) -> bool`, whose `value` has a `shape` and a `dtype`; True for
  all. A parameter that is chosen in these ways and does not fit is an error.

Creators see the final names of parameters. Getters within `hk.lift`, `hk.transparent_lift` or
`hk.experimental.layer_stack` see the names within the lifted function, since Haiku does not provide
others when it applies the function.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.lora_init import Initializer
from haiku_implicit.arrays.quantized_cache import QuantizedCache
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.box import box
from haiku_implicit.core.predicates import Predicate, Targets, path_of, predicate_of
from haiku_implicit.params import trees
from haiku_implicit.params.matrix_axes import MatrixAxesOf
from haiku_implicit.params.options import (
    GroupSize,
    LoRAOptions,
    QuantizeOptions,
    checked_group_size,
    zeros_for,
)
from haiku_implicit.params.remarks import LargeAdapters, noticing_dense, noticing_skipped
from haiku_implicit.params.selection import LORA_SUFFIXES, errors_name, is_floating

Creator = Callable[..., jax.Array]
Getter = Callable[..., jax.Array]

# True while `lora_getter` asks Haiku for the factors: the creators and getters here must skip these.
_making_factors: contextvars.ContextVar[bool] = contextvars.ContextVar("factors", default=False)


@contextlib.contextmanager
def _factors() -> Iterator[None]:
    token = _making_factors.set(True)
    try:
        yield
    finally:
        _making_factors.reset(token)


def zeros_creator(targets: Targets) -> Creator:
    """A creator of symbolic zeros, for `hk.custom_creator`.

    The parameter's own initializer does not run.

    Args:
      targets: the parameters to replace, as for `lora_creator`, but without a default.

    Returns:
      A creator: `init` stores `Zeros` of the parameter's shape and dtype.

    Raises:
      TypeError: for `targets` of another type.
      ValueError: for a string that is not a regular expression.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_creator(hki.zeros_creator('.*/b')):
      ...     return hk.Linear(3)(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> t.init(0, jnp.ones((1, 2)))['linear']['b']
      Zeros(float32[3])
    """
    chosen = predicate_of("targets", targets)

    def creator(next_creator: Any, shape: Any, dtype: Any, init: Any, context: Any) -> jax.Array:
        if _applies(chosen, *_final_name(context), jax.ShapeDtypeStruct(shape, dtype)):
            init = _zeros
        return next_creator(shape, dtype, init)

    return creator


def _zeros(shape: Any, dtype: Any) -> jax.Array:
    return box(zeros_for(jax.ShapeDtypeStruct(shape, dtype)))


def lora_creator(
    rank: int,
    alpha: float | None = None,
    targets: Targets | None = None,
    init: Initializer | None = None,
    matrix_axes: MatrixAxesOf | None = None,
) -> Creator:
    """A creator of LoRA parameters, for `hk.custom_creator`.

    It creates the weight as usual, and with it a random factor `a` and a factor `b` of zeros. At first
    the model computes the same as without them (Hu et al. 2021, arXiv:2106.09685). The keys come from
    `hk.next_rng_key`. Around a `quantize_creator`, it puts LoRA on quantized weights (QLoRA: Dettmers
    et al. 2023, arXiv:2305.14314). A parameter with more than two axes, like the kernel of a
    convolution, is a stack of matrices `[..., n, m]`.

    Args:
      rank: the rank of the correction, at most the smaller of `n` and `m`.
      alpha: the correction is scaled by `alpha / rank`; None for a scale of 1.
      targets: the parameters that get LoRA. None: all floating-point parameters of two axes or more
        that have room for the rank, except those named `b`, `bias`, `offset` or `scale` (or `gating_b`,
        `query_bias` and so on) or like a table of positions. A string or compiled pattern: the
        parameters whose whole `module/name` matches the regular expression. A predicate: those for
        which `targets(module_name, name, value)` is true.
      init: a function `init(key, shape, dtype)` that draws `a` (like those of `jax.nn.initializers`).
        None: uniform in ±1/sqrt(n), as in PEFT and the authors' own code.
      matrix_axes: as for `add_lora`.

    Returns:
      A creator: `init` stores `LoRA`.

    Raises:
      ValueError: for a rank that is not a positive integer, or an `alpha` that is not finite; from the
        creator, for a parameter that `targets` chose and that LoRA of this rank does not fit.
      TypeError: for `targets` of another type.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_creator(hki.lora_creator(rank=2, targets=r'.*linear_\\d/w')):
      ...     return hk.nets.MLP([8, 4])(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> t.init(0, jnp.ones((1, 2)))['mlp/~/linear_1']['w']
      LoRA(float32[8,4], w=float32[8,4], a=float32[8,2], b=float32[2,4], factor=float32[])
    """
    options = LoRAOptions(rank, alpha, init)
    choice, large = trees.Choice(targets, matrix_axes=matrix_axes), LargeAdapters()

    def make(parameter: trees.Parameter) -> LoRA:
        new = options.put_on(parameter.path, parameter.value, hk.next_rng_key())
        large.see(parameter, new)
        large.warn()
        return new

    return _creator(choice, noticing_skipped(options.room), make)


def quantize_creator(
    dtype: str = "int8",
    group_size: GroupSize = None,
    targets: Targets | None = None,
    *,
    axis: int = -2,
    zero_point: bool = False,
    calibration: str | None = None,
    scale_dtype: Any = None,
    activation: str | None = None,
    matrix_axes: MatrixAxesOf | None = None,
) -> Creator:
    """A creator of quantized parameters, for `hk.custom_creator`.

    Args:
      dtype: the number format. `QuantizedMatrix.quantize` describes it and the other options.
      group_size: the number of consecutive elements along `axis` that share a scale; None for all of
        them.
      targets: the parameters to quantize, as for `lora_creator`. None: weights, as defined there, that
        `group_size` divides and whose `axis` is longer than one.
      axis: the axis along which scales are shared, -2 (the contracted axis of a weight `[n, m]` in
        `x @ w`) or -1.
      zero_point: whether codes are relative to a zero point (asymmetric quantization).
      calibration: the method that finds the scales.
      scale_dtype: the dtype of the stored scales.
      activation: the format to which products quantize activations; None for dense activations.
      matrix_axes: as for `add_lora`.

    Returns:
      A creator: `init` stores `QuantizedMatrix`.

    Raises:
      ValueError: for options that are out of range; from the creator, for a parameter that `targets`
        chose and that cannot be quantized with these options.
      TypeError: for `targets` of another type.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_creator(hki.quantize_creator('int4', group_size=4)):
      ...     return hk.Linear(3)(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> type(t.init(0, jnp.ones((1, 8)))['linear']['w']).__name__
      'QuantizedMatrix'
    """
    options = QuantizeOptions(
        dtype, group_size, axis, zero_point, calibration, scale_dtype, activation
    )
    choice = trees.Choice(targets, matrix_axes=matrix_axes)
    return _creator(choice, noticing_dense(options), lambda p: options.put_on(p.path, p.value))


def cache_creator(
    dtype: str = "int8", group_size: int | None = None, targets: Targets | None = None
) -> Creator:
    """A creator of quantized caches, for `hk.custom_creator(..., params=False, state=True)`.

    It is for modules that keep keys and values in Haiku's state and write new positions into it. The
    state is quantized from the start: see `QuantizedCache`.

    Args:
      dtype: the number format, see `QuantizedMatrix.quantize`.
      group_size: the number of elements along the last axis that share a scale; None: all of them, so
        that each position and head has a scale.
      targets: the states to quantize: a regular expression over `module/name` or a predicate
        `(module_name, name, value)`. None: all floating states of three axes or more.

    Returns:
      A creator: `init` stores `QuantizedCache`.

    Raises:
      ValueError: for a group size out of range; from the creator, for a state that `targets` chose and
        that cannot be quantized with these options.
      TypeError: for `targets` of another type.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   keys = hk.get_state('keys', [1, 8, 2, 4], init=jnp.zeros)
      ...   hk.set_state('keys', jax.lax.dynamic_update_slice(keys, x, (0, 0, 0, 0)))
      >>> def quantized(x):
      ...   with hk.custom_creator(hki.cache_creator('int8'), params=False, state=True):
      ...     return model(x)
      >>> t = hki.transform_implicit(hk.transform_with_state(quantized))
      >>> x = jnp.ones((1, 1, 2, 4))
      >>> _, state = t.init(None, x)
      >>> _, state = t.apply({}, state, None, x)
      >>> type(state['~']['keys']).__name__
      'QuantizedCache'
    """
    checked_group_size(group_size)

    def quantized(parameter: trees.Parameter) -> QuantizedCache:
        with errors_name(parameter.path, parameter.value):
            return QuantizedCache.quantize(parameter.value, dtype, group_size, axis=-1)

    return _creator(trees.Choice(targets), _is_cache, quantized)


def _is_cache(module_name: str, name: str, value: Any) -> bool:
    return len(value.shape) >= 3 and is_floating(value)


def _creator(
    choice: trees.Choice, default: Predicate, make: Callable[[trees.Parameter], ImplicitArray]
) -> Creator:
    """A creator that replaces the chosen parameters by `make(parameter)`.

    Args:
      choice: the choice of parameters.
      default: the predicate if `choice` does not have targets.
      make: a function of a parameter whose value is a matrix.
    """
    chosen = choice.predicate(default)
    made = trees.on_matrix(make, choice.matrix_axes)

    def creator(next_creator: Any, shape: Any, dtype: Any, init: Any, context: Any) -> jax.Array:
        value = next_creator(shape, dtype, init)
        name = _final_name(context)
        if not _applies(chosen, *name, value):
            return value
        return box(made(trees.Parameter(*name, value)))

    return creator


def _final_name(context: Any) -> tuple[str, str]:
    """The module and the name under which the outermost function stores a parameter."""
    return (context.lifted_prefix_name or "") + context.module_name, context.name


def _applies(chosen: Predicate, module_name: str, name: str, value: Any) -> bool:
    return not _making_factors.get() and bool(chosen(module_name, name, value))


# --- getters -------------------------------------------------------------------------------------


def zeros_getter(targets: Targets) -> Getter:
    """A getter of symbolic zeros, for `hk.custom_getter`: it switches stored parameters off.

    Args:
      targets: the parameters to replace, as for `lora_creator`, but without a default.

    Returns:
      A getter: the model sees `Zeros` instead of the stored parameter.

    Raises:
      TypeError: for `targets` of another type.
      ValueError: for a string that is not a regular expression.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_getter(hki.zeros_getter('.*/w')):
      ...     return hk.Linear(3, b_init=jnp.ones)(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> print(t.apply(t.init(0, jnp.ones((1, 2))), None, jnp.ones((1, 2))))
      [[1. 1. 1.]]
    """
    chosen = predicate_of("targets", targets)
    return getter_of(chosen, lambda context, value: zeros_for(value))


def lora_getter(
    rank: int,
    alpha: float | None = None,
    targets: Targets | None = None,
    init: Initializer | None = None,
) -> Getter:
    """A getter of LoRA weights, for `hk.custom_getter`: stored parameters stay dense arrays.

    For a parameter `w` it makes two more in the same module, `w_lora_a` and `w_lora_b`, by
    `hk.get_parameter`; the model sees `LoRA` of the three. So all parameters are plain arrays, for
    tools that support only those. To put it around a model whose parameters exist already, take the
    factors from `init` and the rest from the parameters:
    `hk.data_structures.merge(t.init(...), params)`.

    Args:
      rank: as for `lora_creator`.
      alpha: as for `lora_creator`.
      targets: as for `lora_creator`.
      init: as for `lora_creator`.

    Returns:
      A getter: the model sees `LoRA`.

    Raises:
      ValueError: as for `lora_creator`.
      TypeError: as for `lora_creator`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_getter(hki.lora_getter(rank=1)):
      ...     return hk.Linear(3)(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> jax.tree.map(jnp.shape, t.init(0, jnp.ones((1, 2))))
      {'linear': {'b': (3,), 'w': (2, 3), 'w_lora_a': (2, 1), 'w_lora_b': (1, 3)}}
    """
    options, large = LoRAOptions(rank, alpha, init), LargeAdapters()
    chosen = predicate_of("targets", targets, noticing_skipped(options.room))

    def with_factors(context: Any, value: jax.Array) -> LoRA:
        options.check(path_of(context.module_name, context.name), value)
        name_a, name_b = (context.name + suffix for suffix in LORA_SUFFIXES)
        shape_a, shape_b = options.factor_shapes(value.shape)
        # The dtype that the module requested, so that a getter that casts `w` casts the factors too.
        dtype = context.original_dtype or value.dtype
        with _factors():
            a = hk.get_parameter(
                name_a, shape_a, dtype, lambda *of: options.draw(hk.next_rng_key(), *of)
            )
            b = hk.get_parameter(name_b, shape_b, dtype, jnp.zeros)
        new = LoRA(value, a, b, alpha)
        large.see(trees.Parameter(context.module_name, context.name, value), new)
        large.warn()
        return new

    return getter_of(chosen, with_factors)


def quantize_getter(
    dtype: str = "int8",
    group_size: GroupSize = None,
    targets: Targets | None = None,
    *,
    axis: int = -2,
    zero_point: bool = False,
    calibration: str | None = None,
    scale_dtype: Any = None,
    activation: str | None = None,
) -> Getter:
    """A getter of quantized weights, for `hk.custom_getter`: stored parameters stay dense.

    It quantizes a weight each time that the model reads it. So you can try a format without changing
    the parameters.

    Args:
      dtype: as for `quantize_creator`, like all further arguments.
      group_size: the number of consecutive elements along `axis` that share a scale.
      targets: the parameters to quantize.
      axis: the axis along which scales are shared.
      zero_point: whether codes are relative to a zero point.
      calibration: the method that finds the scales.
      scale_dtype: the dtype of the scales.
      activation: the format to which products quantize activations; None for dense activations.

    Returns:
      A getter: the model sees `QuantizedMatrix`.

    Raises:
      ValueError: as for `quantize_creator`.
      TypeError: as for `quantize_creator`.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_getter(hki.quantize_getter('int8')):
      ...     return hk.Linear(3, w_init=jnp.ones)(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> params = t.init(0, jnp.ones((1, 2)))
      >>> params['linear']['w'].dtype.name, float(t.apply(params, None, jnp.ones((1, 2)))[0, 0])
      ('float32', 2.0)
    """
    options = QuantizeOptions(
        dtype, group_size, axis, zero_point, calibration, scale_dtype, activation
    )
    chosen = predicate_of("targets", targets, noticing_dense(options))

    def quantized(context: Any, value: jax.Array) -> ImplicitArray:
        return options.put_on(path_of(context.module_name, context.name), value)

    return getter_of(chosen, quantized)


def getter_of(chosen: Predicate, make: Callable[[Any, jax.Array], ImplicitArray]) -> Getter:
    """A getter that replaces the chosen parameters by `make(context, value)`."""

    def getter(next_getter: Any, value: jax.Array, context: Any) -> jax.Array:
        if _applies(chosen, context.module_name, context.name, value):
            value = box(make(context, value))
        return next_getter(value)

    return getter
