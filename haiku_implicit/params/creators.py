"""Creators and getters of single edits, by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.box import box
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import Array, DType, State
from haiku_implicit.params.adapters.adding import add_lora
from haiku_implicit.params.edits import quantize_params, zero_params
from haiku_implicit.params.haiku import hooks
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.one_by_one import is_one_of_many
from haiku_implicit.params.trees.options import checked_group_size
from haiku_implicit.params.trees.selection import editing, is_floating
from haiku_implicit.quantized.types.quantized_cache import QuantizedCache


def lora_creator(rank: int, **options: Any) -> hooks.Creator:
    """`creator` of `add_lora` with this rank and these options."""
    return hooks.creator(_edit(add_lora, rank=rank, **options))


def lora_getter(rank: int, **options: Any) -> hooks.Getter:
    """`getter` of `add_lora` with this rank and these options."""
    return hooks.getter(_edit(add_lora, rank=rank, **options))


def quantize_creator(dtype: str = "int8", **options: Any) -> hooks.Creator:
    """`creator` of `quantize_params` with this format and these options."""
    return hooks.creator(_edit(quantize_params, dtype=dtype, **options))


def quantize_getter(dtype: str = "int8", **options: Any) -> hooks.Getter:
    """`getter` of `quantize_params` with this format and these options."""
    return hooks.getter(_edit(quantize_params, dtype=dtype, **options))


def zeros_getter(targets: Targets, **options: Any) -> hooks.Getter:
    """`getter` of `zero_params` with these targets and options."""
    return hooks.getter(_edit(zero_params, targets=targets, **options))


def _edit(function: hooks.Edit, **options: Any) -> hooks.Edit:
    """A function on trees with these options, which are checked now."""
    return hooks.checked(functools.partial(function, **options))


def zeros_creator(targets: Targets) -> hooks.Creator:
    """`creator` of `zero_params` with these targets; initializers of the targets do not run."""
    edited = hooks.edited_alone(_edit(zero_params, targets=targets))

    def create(
        next_creator: Any, shape: Sequence[int], dtype: DType, init: Any, context: Any
    ) -> jax.Array:
        if is_one_of_many():  # a parameter that another edit adds
            return next_creator(shape, dtype, init)
        new = edited(*hooks.final_name(context), jax.ShapeDtypeStruct(shape, dtype))
        return next_creator(shape, dtype, (lambda *_: box(new)) if is_implicit(new) else init)

    return create


def cache_creator(
    dtype: str = "int8", group_size: int | None = None, targets: Targets | None = None
) -> hooks.Creator:
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
        with editing(parameter.path, parameter.value):
            return QuantizedCache.quantize(parameter.value, dtype, group_size, axis=-1)

    def caches(state: State) -> Array:
        return trees.replace_targets(state, trees.Choice(targets), trees.Edit(quantized, _is_cache))

    return hooks.creator(hooks.checked(caches))


def _is_cache(module_name: str, name: str, value: Array) -> bool:
    return len(value.shape) >= 3 and is_floating(value)
