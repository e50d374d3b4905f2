"""`zero_params`: parameters that are zero, without buffers."""

from __future__ import annotations

from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import Params
from haiku_implicit.params.trees import trees


def zero_params(
    params: Params, *, targets: Targets, exclude: Targets | None = None, missing_ok: bool = False
) -> Params:
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
