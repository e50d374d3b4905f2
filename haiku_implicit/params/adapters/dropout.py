"""Dropout for LoRA."""

from __future__ import annotations

import jax

from haiku_implicit.adapters.dropout import InputDropout
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core.keys import as_key
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Key, SameTree
from haiku_implicit.params.trees import trees


def with_dropout(params: SameTree, key: Key, rate: float) -> SameTree:
    """Applies dropout to the inputs of LoRA's corrections, for a training step.

    Call it in each step, within the function that `jax.grad` differentiates, with a key of the step:

        trained, frozen = hki.partition(params)

        def loss(trained, key, batch):
          params = hki.with_dropout(hki.combine(trained, frozen), key, 0.1)
          ...

    (Do not call it within `hki.value_and_grad` or `hki.use_implicit_args`: they call a function with
    ordinary arrays for the weights, which raises an error here.)

    A product `x @ w` is then `x @ w.w + (dropout(x) @ a) @ b`, as in PEFT. Look-ups in an embedding do
    not change. The mask depends only on the key and the weight's path. So it is the same if a
    checkpointed block runs again, and if a step uses a weight twice with inputs of one shape. Under
    `jax.vmap` all examples have the same mask, unless the key is mapped, too.

    Args:
      params: a tree with `LoRA` in it.
      key: a random key, or an integer seed. Each weight gets its own key, from this key and its path.
      rate: the probability of a zero, at least 0 and less than 1.

    Returns:
      The tree with dropout on each `LoRA`, and mappings as dicts; for a rate of 0, the tree itself.

    Raises:
      ValueError: for a rate outside of [0, 1), or if no parameter is a `LoRA`.
      TypeError: for anything but a key or a seed.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.zeros((4, 1)), jnp.ones((4, 1)), jnp.ones((1, 1)))
      >>> params = hki.with_dropout({'linear': {'w': w}}, jax.random.key(1), 0.5)
      >>> y = hki.use_implicit_args(jnp.dot)(jnp.ones((3, 4)), params['linear']['w'])
      >>> bool((y % 2 == 0).all())  # each of the four inputs counts twice, or not at all
      True
    """
    if not 0 <= rate < 1:
        raise value_error(f"rate: expected a number of at least 0 and less than 1, got {rate!r}")
    if rate == 0:
        return params
    key = as_key(key)
    count = 0

    def dropped(parameter: trees.Parameter) -> Array:
        value = parameter.value
        if not isinstance(value, LoRA):
            return value
        nonlocal count
        count += 1
        batch = value.shape[:-2]
        own = parameter.key_from(key)
        zeros = Zeros(shape=value.shape, dtype=value.dtype)
        delta = LoRA(zeros, value.a, value.b, factor=value.factor)
        keys = jax.random.split(own, batch) if batch else own
        return Sum(value.w, InputDropout(delta, keys, float(rate)), apart=True)

    new = trees.map_matrices(dropped, params)
    if not count:
        raise trees.none_of("with_dropout", "LoRA", params)
    return new
