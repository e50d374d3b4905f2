"""The vector bank of VB-LoRA: one bank per tree of parameters, put into the weights in each step."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from haiku_implicit.adapters.vblora import MODULE, NAME, VBLoRA, VectorBank
from haiku_implicit.core.predicates import path_of
from haiku_implicit.core.typing import Array, Params, SameTree, Tree
from haiku_implicit.params.trees import trees

PATH = path_of(MODULE, NAME)


def beside(params: Params, bank: VectorBank | None) -> Params:
    """A tree with a bank added to it; the unchanged tree if the bank is None."""
    return params if bank is None else {**params, MODULE: {NAME: bank}}


def put_into(value: Array, bank: VectorBank | None) -> Array:
    """A weight with the bank in it, if it is a `VBLoRA` or a view of one."""
    return with_vector_bank(beside({"": {"w": value}}, bank))[""]["w"]


def with_vector_bank(params: SameTree) -> SameTree:
    """Puts the vector bank of a tree into its `VBLoRA` weights.

    Call it in each step, within the function that `jax.grad` differentiates, so that the bank's
    gradient is the sum over all weights:

        trained, frozen = hki.partition(params)

        def loss(trained, batch):
          params = hki.with_vector_bank(hki.combine(trained, frozen))
          ...

    (Do not call it within `hki.value_and_grad` or `hki.use_implicit_args`: they call a function with an
    ordinary array for the bank, which raises an error here.)

    Args:
      params: a tree that `add_adapter(params, key, 'vblora', ...)` has made.

    Returns:
      The tree with the bank in the weights, and mappings as dicts. A tree without a bank is returned
      unchanged.

    Raises:
      ValueError: if the bank is an ordinary array.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> options = dict(rank=1, num_vectors=4, vector_length=2)
      >>> params = hki.add_adapter({'linear': {'w': jnp.ones((4, 2))}}, 0, 'vblora', **options)
      >>> hki.with_vector_bank(params)['linear']['w'].bank.shape
      (4, 2)
    """
    if not _has_bank(params):
        return params
    tree: Tree = params
    bank = tree[MODULE][NAME]
    if not isinstance(bank, VectorBank):
        raise trees.none_of("with_vector_bank", "a VectorBank", {MODULE: tree[MODULE]})
    vectors = bank.vectors

    def filled(parameter: trees.Parameter) -> Array:
        value = parameter.value
        if not isinstance(value, VBLoRA):
            return value
        return value._replace(bank=jnp.broadcast_to(vectors, (*value.lead, *vectors.shape)))

    return trees.map_matrices(filled, params)


def without(params: Params) -> Params:
    """A tree without its vector bank."""
    return {k: v for k, v in params.items() if k != MODULE} if _has_bank(params) else params


def _has_bank(params: Params) -> bool:
    return isinstance(params, Mapping) and MODULE in params
