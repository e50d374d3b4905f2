"""Merging of adapters into dense weights, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.adapters.rotated import Rotated
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.matrix_view import is_view_of_dense, matrix_of, with_matrix
from haiku_implicit.arrays.scaled import ScaledMatrix
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import see, shown, value_error, warn_caller
from haiku_implicit.core.structure import free_summand
from haiku_implicit.core.typing import Array, SameTree
from haiku_implicit.params.adapters import parts, vector_bank
from haiku_implicit.params.adapters.parts import AdapterParts
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.selection import describe


def merge_adapters(params: SameTree, *, requantize: bool = False) -> SameTree:
    """Replaces each weight that has an adapter by the dense weight that it stands for.

    A weight that occurs twice in the tree with the same adapter (tied weights) remains one array. If
    it occurs elsewhere without that adapter, the two are no longer tied, and a warning says so.

    Args:
      params: parameters with `LoRA` or types of `haiku_implicit.adapters` in them, in any nesting of
        mappings.
      requantize: whether an adapter on a quantized weight is merged into a quantized weight. False:
        the result is dense, exact but of the dense size. True: it has the format of the quantized
        weight, small but rounded again, so that a correction finer than the format's step is lost.
        Codes that `quantize_with_inputs` found become codes that know no inputs, which costs most
        with trellis codes of two and three bits: for them, quantize the dense merged weights with
        inputs again. Weights of other types become dense, with a warning.
        Another warning names the weights whose rounding error is more than half of the correction.
        `compare_params(params, merged)` reports the loss, for each weight and for the model's
        outputs. Less is lost if the adapter is put on the dense weights from before quantization
        (`set_adapter(dense, get_adapter(params), check_base=False)`), merged, and the result
        quantized once; or if it is not merged (docs/adapters.md#merging-and-its-cost).

    Returns:
      The tree without adapters, with mappings as dicts. Other parameters do not change.

    Raises:
      ValueError: for the trained arrays that `freeze` returns, without the others; for another
        `requantize`.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
      >>> print(hki.merge_adapters({'linear': {'w': w}})['linear']['w'])
      [[1. 1. 1.]
       [1. 1. 1.]]
    """
    if requantize not in (True, False):
        raise value_error(
            f"requantize: expected True or False, got {requantize!r}. True keeps the format of each "
            "weight; for another one, quantize_params(merge_adapters(params), dtype=...)"
        )
    whole = vector_bank.without(vector_bank.with_vector_bank(params))
    parameters = trees.parameters_of(whole)
    trees.check_whole_tree(parameters)
    _warn_of_untied(parameters)
    done: dict[Any, Any] = {}
    lost: list[str] = []

    def merged(parameter: trees.Parameter) -> Array:
        parts.check_whole(parameter.path, parameter.value)
        same = jax.tree.structure(parameter.value), _leaf_ids(parameter.value)
        if same not in done:
            done[same] = trees.on_matrix(lambda own: _merged(own, requantize, lost))(parameter)
        return done[same]

    marks = [parts.has_adapter(p.value) or is_view_of_dense(p.value) for p in parameters]
    new = trees.map_marked(whole, marks, merged)
    if lost:
        warn_caller(
            "requantize: rounding again has an error of more than half of the adapter's correction of "
            f"{shown(lost)}. Keep the adapter, or merge it into dense weights (requantize=False), or "
            "quantize the merged original weights once, with more bits "
            f"{see('an-adapter-rounded-away')}"
        )
    return new


# Another name, as most adapters are LoRA.
merge_lora = merge_adapters


def _merged(parameter: trees.Parameter, requantize: bool, lost: list[str]) -> Array:
    """Merges a parameter; `lost` gets its path if rounding it again spoils its adapter's correction."""
    value = parameter.value
    if not is_implicit(value):  # the matrix of a view
        return value
    dense, base = materialize_array(value), parts.base_of(value)
    if not requantize or not is_implicit(base):
        return dense
    new = base.requantize(dense)
    if new is NotImplemented:
        warn_caller(
            f"{parameter.path}: merged into a dense weight, since {type(base).__name__} can't be "
            "quantized again; quantize_params or quantize_with_inputs makes it anew"
        )
        return dense
    if not parts.is_traced((value, new)) and _is_lost(base, dense, new):
        lost.append(parameter.path)
    # With the tree structure of the base, for optimizer states and compiled functions.
    same = jax.tree.unflatten(jax.tree.structure(base), jax.tree.leaves(new))
    return same if same.dtype == new.dtype else new


def _is_lost(base: Array, dense: jax.Array, new: Array) -> bool:
    """Whether rounding has an error of more than half of the correction, which is not just noise.

    Weights that round to the codes of the base lose the whole correction, with an error as large as
    it. So an error as large as the correction is too much.
    """
    exact = dense.astype(jnp.promote_types(dense.dtype, jnp.float32))
    error, correction, size = (
        float(jnp.linalg.norm(jnp.ravel(x)))
        for x in (materialize_array(new) - exact, exact - materialize_array(base), exact)
    )
    return correction > 1e-6 * size and error > correction / 2


def _leaf_ids(value: Array) -> tuple[int, ...]:
    """The ids of a value's leaves, equal for values that share their arrays."""
    return tuple(map(id, jax.tree.leaves(value)))


def _warn_of_untied(parameters: list[trees.Parameter]) -> None:
    """Warns of weights that share an array with another weight and will not after merging."""
    by_base: dict[tuple[int, ...], list[trees.Parameter]] = {}
    for p in parameters:
        if base := _leaf_ids(parts.base_of(matrix_of(p.value))):
            by_base.setdefault(base, []).append(p)
    for tied in by_base.values():
        first, *others = sorted(tied, key=lambda p: not parts.has_adapter(p.value))
        other = next((p for p in others if _leaf_ids(p.value) != _leaf_ids(first.value)), None)
        if other is not None and parts.has_adapter(first.value):
            has = "has another adapter" if parts.has_adapter(other.value) else "has no adapter"
            warn_caller(
                f"{first.path}: this weight is the same array as {other.path}, which {has}: once "
                "merged, they are two different arrays. If the model ties them, give both the same "
                "adapter"
            )


# --- back ----------------------------------------------------------------------------------------


def unmerge_adapters(
    params: SameTree, adapter: AdapterParts, *, check_base: bool = True
) -> SameTree:
    """Takes an adapter out of the dense weights that it was merged into.

    The result is the base up to rounding, which is coarse for weights in bfloat16. If you still have
    the base, use it instead.

    Args:
      params: the result of `merge_adapters`, without `requantize`.
      adapter: the result of `get_adapter` before merging.
      check_base: whether to check that the parameters without adapters are those that the adapter was
        made for.

    Returns:
      The tree without the adapter, with mappings as dicts. Trained dense parameters stay trained.

    Raises:
      ValueError: for a weight that is missing from the tree or not dense, or whose adapter cannot be
        taken out (its type does not keep the values that it replaces, such as `DoRA` and
        `TrainedRows`).
      TypeError: for another kind of adapter.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
      >>> params = {'linear': {'w': w}}
      >>> merged = hki.merge_adapters(params)
      >>> print(hki.unmerge_adapters(merged, hki.get_adapter(params))['linear']['w'])
      [[0. 0. 0.]
       [0. 0. 0.]]
    """
    adapter = parts.checked_parts("adapter", adapter)
    bank = adapter.dense.get(vector_bank.PATH)
    parameters = trees.values_of(params)
    parts.check_paths_of(parameters, adapter.weights)
    if check_base:
        others = tuple(own for own in adapter.bases if own[0] not in adapter.weights)
        parts.check_bases(parameters, dataclasses.replace(adapter, bases=others))

    def unmerged(parameter: trees.Parameter) -> Array:
        path, value = parameter.path, parameter.value
        if path not in adapter.weights:
            return value
        if is_implicit(value):
            raise value_error(
                f"{path}: expected the dense weight that merge_adapters made, got {describe(value)}"
            )
        whole = vector_bank.put_into(parts.with_base(adapter.weights[path], value), bank)
        weight = matrix_of(whole)
        try:
            base = with_matrix(whole, _taken_out(weight, parts.base_of(weight)))
        except ValueError as e:
            raise value_error(
                f"{path}: {e}. Keep the base, and put adapters on it by set_adapter"
            ) from None
        return materialize_array(base) if is_implicit(base) else base

    return trees.map_parameters(unmerged, params)


def _taken_out(weight: Array, merged: jax.Array) -> jax.Array:
    """The base of an adapted weight, from the dense weight that it was merged into.

    Except for the refused types, an adapter changes every base in the same way, whatever its values.

    Args:
      weight: the adapters, on any base.
      merged: the dense weight.

    Raises:
      ValueError: if the base cannot be recovered.
    """
    match weight:
        case Adapter(keeps_base=False):
            raise value_error(f"{type(weight).__name__} does not keep what it replaces")
        case ScaledMatrix():
            if not bool(jnp.all(weight.scale)):
                raise value_error("a factor is zero, and what it was multiplied with is lost")
            scale = jnp.expand_dims(weight.scale, -1 if weight.axis == -2 else -2)
            return _taken_out(weight.matrix, merged / scale)
        case Rotated():  # the inverse of a rotation is its transpose
            return _taken_out(weight.w, materialize_array(weight.rotation).mT @ merged)
        case Adapter() | Sum():
            equal = weight.equivalent()
            # Merging has called `materialize`, so that a type's own one comes first.
            if equal is NotImplemented or type(weight).materialize is not Adapter.materialize:
                correction = weight._replace(w=jnp.zeros(weight.w.shape, weight.w.dtype))
                if free_summand(correction) == 0:
                    return _taken_out(weight.w, merged - materialize_array(correction))
            if equal is NotImplemented:
                raise value_error(f"{type(weight).__name__} is not a sum of its weight and a rest")
            return _taken_out(equal, merged)
    return merged
