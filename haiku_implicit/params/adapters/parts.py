"""Adapters apart from their base: taken out of a tree of parameters, and put into another."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from haiku_implicit.adapters.vblora import VectorBank
from haiku_implicit.arrays.adapter import Adapter
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.arrays.matrix_view import matrix_in, matrix_of, tensor_of, with_matrix
from haiku_implicit.core.array import (
    ImplicitArray,
    a_half,
    check_values,
    is_implicit,
)
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.predicates import Targets, predicate_of
from haiku_implicit.core.serialization import register_tree_type
from haiku_implicit.core.typing import Array, Params, SameTree
from haiku_implicit.params.adapters import vector_bank
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.digests import digest
from haiku_implicit.params.trees.selection import describe


@register_tree_type
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterParts:
    """An adapter without its base, as `get_adapter` takes it out and `set_adapter` puts it in.

    A pytree. Adapters of one shape for one base have one structure, whatever their `alpha`s are, so
    that a compiled function takes any of them.

    Attributes:
      weights: by `module/name`, the weight with its adapter and None for its base.
      dense: by `module/name`, dense parameters that were trained.
      bases: `(module/name, digest)` of the base of each weight, and of each other parameter of the
        model, which `set_adapter` compares; empty for an adapter of unknown base.
    """

    weights: dict[str, ImplicitArray]
    dense: dict[str, Any] = dataclasses.field(default_factory=dict)
    bases: tuple[tuple[str, str], ...] = dataclasses.field(default=(), metadata={"static": True})


def get_adapter(params: Params, *, trainable_dense: Targets | None = None) -> AdapterParts:
    """Takes the adapter out of a tree of parameters.

    Args:
      params: parameters with `LoRA` or types of `haiku_implicit.adapters` in them, in any nesting of
        mappings.
      trainable_dense: the dense parameters that were trained, too, and belong to the adapter. None for
        none, as `partition(params, trainable_dense=False)` trains them. By default `partition`,
        `value_and_grad` and `freeze_declared` train all dense parameters: give `True` for these.

    Returns:
      The adapter, without the base and without Haiku's state (averages of `BatchNorm`); keep the state
      with it if training changed it. It holds digests of the bytes of the base, and of all parameters
      that are not in it, so that `set_adapter` names trained parameters that are missing.

    Raises:
      ValueError: if no parameter has an adapter or is chosen by `trainable_dense`; for one of the
        halves that `partition` returns.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> base = {'linear': {'w': jnp.ones((4, 3)), 'b': jnp.zeros(3)}}
      >>> adapter = hki.get_adapter(hki.add_lora(base, 0, rank=1))
      >>> sorted(adapter.weights), adapter.weights['linear/w'].w
      (['linear/w'], None)
      >>> hki.set_adapter(base, adapter)['linear']['w']
      LoRA(float32[4,3], w=float32[4,3], a=float32[4,1], b=float32[1,3], factor=float32[])
      >>> hki.set_adapter({'linear': {'w': jnp.zeros((4, 3))}}, adapter)
      Traceback (most recent call last):
      ...
      ValueError: linear/w: the adapter was made for another base than this float32[4,3], with ...
    """
    chosen = predicate_of("trainable_dense", trainable_dense, lambda *_: False)
    weights, dense, bases = {}, {}, []
    for parameter in trees.parameters_of(params):
        path, value = parameter.path, parameter.value
        check_whole(path, value)
        check_values(path, value)
        if has_adapter(value):
            weights[path] = with_base(value, None)
            bases.append((path, digest(base_of(value))))
        elif chosen(*parameter[:3]) or isinstance(value, VectorBank):
            dense[path] = tensor_of(value)
        else:
            bases.append((path, digest(base_of(value))))
    if not weights and not dense:
        trees.check_whole_tree(trees.parameters_of(params))
        raise value_error(
            "params: expected weights with adapters, as add_lora makes them; there are none"
        )
    return AdapterParts(weights, dense, tuple(bases))


def set_adapter(
    params: SameTree, adapter: AdapterParts | None, *, check_base: bool = True
) -> SameTree:
    """Puts an adapter into a tree of parameters, and removes an adapter that is there.

    Args:
      params: parameters, with or without an adapter, in any nesting of mappings.
      adapter: the result of `get_adapter` or `load`; None to remove the adapter. (Dense parameters that
        were trained do not change back.)
      check_base: whether all parameters have to be those that the adapter was made for. Within
        `jax.jit` they cannot be compared, and are not.

    Returns:
      The tree with the adapter, and mappings as dicts.

    Raises:
      ValueError: for a weight that is missing from the tree, has another shape, or is not the weight
        that the adapter was made for.
      TypeError: for another kind of adapter.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> params = hki.add_lora({'linear': {'w': jnp.ones((4, 3))}}, 0, rank=1)
      >>> type(hki.set_adapter(params, None)['linear']['w']).__name__
      'ArrayImpl'
    """
    adapter = AdapterParts({}) if adapter is None else checked_parts("adapter", adapter)
    params, bank = vector_bank.without(params), adapter.dense.get(vector_bank.PATH)
    dense = {path: x for path, x in adapter.dense.items() if path != vector_bank.PATH}
    parameters = trees.values_of(params)
    check_paths_of(parameters, (*adapter.weights, *dense))
    if check_base:
        check_bases(parameters, adapter)
    for path, new in {**adapter.weights, **dense}.items():
        base = base_of(parameters[path])
        whole = with_base(new, base) if path in adapter.weights else new
        _check_shapes(path, base, vector_bank.put_into(whole, bank))

    def replaced(parameter: trees.Parameter) -> Array:
        path, base = parameter.path, base_of(parameter.value)
        if path in adapter.weights:
            return with_base(adapter.weights[path], base)
        return dense.get(path, base)

    return vector_bank.beside(trees.map_parameters(replaced, params), bank)


def has_adapter(value: Array) -> bool:
    """Whether a parameter is a weight with an adapter, or a view of one."""
    return isinstance(matrix_of(value), Adapter)


def lora_of(path: str, value: Array, purpose: str) -> LoRA:
    """The LoRA of a weight, on a base without adapters; raises for adapters of other types."""
    lora = matrix_of(value)
    if not isinstance(lora, LoRA) or is_implicit(lora.w):
        raise value_error(f"{path}: {purpose}, got {type(lora).__name__}")
    return lora


def check_whole(path: str, value: Array) -> None:
    """Raises for an adapter without its arrays, as in the frozen half that `partition` returns."""
    if not has_adapter(value):
        return
    weight = matrix_of(value)
    none = dataclasses.MISSING
    needed = [f for f in dataclasses.fields(weight) if f.default is none is f.default_factory]
    if any(getattr(weight, f.name) is None for f in needed):
        raise a_half(path, weight)


def base_of(value: Array) -> Array:
    """The weight without its adapters; for a view of a dense matrix, the dense tensor."""
    if not has_adapter(value):
        return tensor_of(value)
    matrix = matrix_of(value)
    while isinstance(matrix, Adapter):
        matrix = matrix.w
    base = with_matrix(value, matrix)
    return base if base is matrix or is_implicit(matrix) else materialize_array(base)


def with_base(value: Array, base: Array) -> Array:
    """The adapters of a weight, on another base. Each may be a view: adapters are for the matrix."""
    weight, matrix = matrix_of(value), matrix_of(base)
    if weight is not value and base is not None and not is_implicit(base):
        matrix = matrix_in(base, value.axes)
    view = base if weight is value else value
    if isinstance(weight.w, Adapter):
        matrix = with_base(weight.w, matrix)
    return with_matrix(view, weight.completed()._replace(w=matrix))


def checked_parts(argument: str, adapter: Any, of_dense: str = "") -> AdapterParts:
    """The adapter unchanged; raises for anything but `AdapterParts`, such as whole parameters.

    Args:
      argument: its name, for errors.
      adapter: the adapter.
      of_dense: the error for an adapter with parameters that were trained as a whole; empty if the
        caller takes them.
    """
    if not isinstance(adapter, AdapterParts):
        raise type_error(
            f"{argument}: expected an adapter apart from its base, as get_adapter(params) returns it "
            "(of whole parameters: combine the halves of partition first), got "
            f"{type(adapter).__name__}"
        )
    if of_dense and adapter.dense:
        raise value_error(f"{next(iter(adapter.dense))}: {of_dense}")
    return adapter


def check_paths_of(parameters: Mapping[str, Array], paths: Iterable[str]) -> None:
    """Raises unless the parameters have all paths of an adapter."""
    for path in paths:
        if path not in parameters:
            nearest = difflib.get_close_matches(path, parameters, n=5, cutoff=0.0)
            raise ValueError(
                f"{path}: the adapter is for this weight, which is not there. Nearest: "
                f"{', '.join(nearest)}"
                f" {see('another-base')}"
            )


def check_bases(parameters: Mapping[str, Array], adapter: AdapterParts) -> None:
    """Raises unless an adapter was made for these parameters (by path); traced ones pass."""
    # The adapter's own weights come first: if several parameters differ, they tell the most.
    for path, wanted in sorted(adapter.bases, key=lambda own: own[0] not in adapter.weights):
        if path not in parameters:
            raise ValueError(
                f"{path}: the model that the adapter was made for has this parameter, which is not "
                "there. check_base=False puts it there all the same"
                f" {see('another-base')}"
            )
        base = base_of(parameters[path])
        if not is_traced(base) and digest(base) != wanted:
            raise ValueError(
                f"{path}: the adapter was made for another base than this {describe(base)}, with other "
                "numbers or other options (such as activation=). Give it that base, or check_base=False"
                f" {see('another-base')}"
                if path in adapter.weights
                else f"{path}: this parameter was another one where the adapter was taken out, and the "
                "adapter does not hold it. If it was trained, too, give get_adapter trainable_dense=; "
                "if the model is another one on purpose, check_base=False"
                f" {see('another-base')}"
            )


def is_traced(value: Array) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree_util.tree_leaves(value))


def _check_shapes(path: str, base: Array, whole: Any) -> None:
    try:
        shape = jax.eval_shape(lambda x: x.materialize() if has_adapter(x) else x, whole).shape
    except Exception as e:
        raise ValueError(
            f"{path}: the adapter does not fit {describe(base)}: {e} {see('another-base')}"
        ) from e
    if tuple(shape) != tuple(base.shape):
        raise ValueError(
            f"{path}: the adapter is for shape {list(shape)}, the base is {describe(base)}"
            f" {see('another-base')}"
        )
