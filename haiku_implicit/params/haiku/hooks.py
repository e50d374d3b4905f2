"""Creators and getters: edits of parameters inside an unmodified Haiku function.

A *creator* (`hk.custom_creator`) decides which arrays `init` makes and stores. A *getter*
(`hk.custom_getter`) decides which array the model sees for a stored array. Both make their arrays with
`box`, so that the same model without `transform_implicit` computes the same numbers with dense arrays.

Creators see the final names of parameters. Getters within `hk.lift`, `hk.transparent_lift` or
`hk.experimental.layer_stack` see the names within the lifted function, since Haiku does not provide
others when it applies the function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_implicit.core.box import box
from haiku_implicit.core.keys import KeySource
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.predicates import path_of
from haiku_implicit.core.typing import Array, DType, Tree
from haiku_implicit.params.trees.one_by_one import editing_one_by_one, is_one_of_many
from haiku_implicit.training.gradients import Slot, is_empty, slots_of, trained, treedef_of

Creator = Callable[..., jax.Array]
Getter = Callable[..., jax.Array]
Edit = Callable[..., Any]


def creator(edit: Edit) -> Creator:
    """A creator that edits each parameter when `init` creates it, for `hk.custom_creator`.

    Nested creators act from the inside out: `add_lora` around `quantize_params` puts LoRA on quantized
    weights.

    Args:
      edit: a function from a tree of parameters to a tree with the same parameters, such as
        `functools.partial(hki.add_lora, rank=8)`, `hki.quantize_params`, or a function of your own. It
        gets a tree of one parameter, `{module_name: {name: value}}`. In such a tree, `targets=` and
        other patterns may match nothing, and each warning is given once. If the edit has an argument
        `key` without a value, it gets the function `hk.next_rng_key`, which this library's functions
        call once for each weight that needs a key. (With another key, all layers of a `layer_stack`
        draw the same numbers.)

    Returns:
      A creator: `init` stores the result of the edit. With `params=False, state=True`, `custom_creator`
      applies it to state.

    Raises:
      TypeError: for anything but a function.
      ValueError: from the creator, for an edit that returns other parameters, or another shape. Errors
        of the edit have a note that names the parameter.

    Example:
      >>> import functools, haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_creator(hki.creator(functools.partial(hki.add_lora, rank=2))):
      ...     return hk.nets.MLP([8, 4])(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> t.init(0, jnp.ones((1, 2)))['mlp/~/linear_1']['w']
      LoRA(float32[8,4], w=float32[8,4], a=float32[8,2], b=float32[2,4], factor=float32[])
    """
    edited = edited_alone(edit)

    def create(
        next_creator: Any, shape: Sequence[int], dtype: DType, init: Any, context: Any
    ) -> jax.Array:
        value = next_creator(shape, dtype, init)
        return value if is_one_of_many() else box(edited(*final_name(context), value))

    return create


def getter(edit: Edit) -> Getter:
    """A getter that edits each parameter when the model reads it, for `hk.custom_getter`.

    Stored parameters stay dense arrays. Trained arrays that the edit adds are dense parameters of the
    same module, such as the factors of LoRA, `w_lora_a` and `w_lora_b` for a weight `w`. All others
    are made at each use. If the other parameters exist already, take the new ones from `init`:
    `hk.data_structures.merge(t.init(...), params)`.

    Args:
      edit: as for `creator`. A `key` from Haiku makes the initial values of parameters that the edit
        adds; if it adds none, each use of a parameter gets another key.

    Returns:
      A getter: the model sees the result of the edit.

    Raises:
      TypeError: as for `creator`.
      ValueError: from the getter, as for `creator`; and if arrays that do not become parameters depend
        on a `key` from Haiku, which `apply` does not have: give the edit a `key`.

    Example:
      >>> import functools, haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_getter(hki.getter(functools.partial(hki.add_lora, rank=1))):
      ...     return hk.Linear(3)(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> jax.tree.map(jnp.shape, t.init(0, jnp.ones((1, 2))))
      {'linear': {'b': (3,), 'w': (2, 3), 'w_lora_a': (2, 1), 'w_lora_b': (1, 3)}}
    """
    edited = edited_alone(edit)

    def get(next_getter: Any, value: jax.Array, context: Any) -> jax.Array:
        if not is_one_of_many():
            own = functools.partial(edited, context.module_name, context.name)
            value = box(_with_parameters(own, value, context))
        return next_getter(value)

    return get


# --- one parameter at a time ---------------------------------------------------------------------


def edited_alone(edit: Edit) -> Callable[..., Any]:
    """A function `(module_name, name, value, key=hk.next_rng_key)` that edits one parameter."""
    if not callable(edit):
        raise type_error(f"edit: expected a function of a tree of parameters, got {edit!r}")
    said: set[str] = set()

    def edited(
        module_name: str, name: str, value: Array, key: KeySource = hk.next_rng_key
    ) -> Array:
        try:
            with editing_one_by_one(said):
                new = _with_key(edit, key)({module_name: {name: value}})
            return _only(new, module_name, name, value)
        except Exception as error:
            error.add_note(
                f"A creator or getter gave the edit {path_of(module_name, name)} alone. An edit that "
                "needs the whole tree is for the parameters that init returns."
            )
            raise

    return edited


def _with_key(edit: Edit, key: KeySource) -> Edit:
    """The edit with a key if it has an argument `key` without a value."""
    try:
        own = inspect.signature(edit).parameters.get("key")
    except ValueError:  # a builtin function without a signature
        return edit
    return functools.partial(edit, key=key) if own and own.default is own.empty else edit


def _only(tree: Tree, module_name: str, name: str, value: Array) -> Array:
    """The one array of an edited tree, after a check that it can replace `value`."""
    path = path_of(module_name, name)
    if not isinstance(tree, Mapping):
        raise value_error(
            f"edit: expected a function that returns a tree with {path}, got {tree!r}"
        )
    found = [(module, *own) for module, own in tree.items()]
    if found != [(module_name, name)]:
        raise value_error(f"edit: expected the parameter {path} alone, got {found}")
    new = tree[module_name][name]
    if np.shape(new) != np.shape(value):
        raise value_error(
            f"edit: expected {path} in the shape {list(np.shape(value))}, got {list(np.shape(new))}"
        )
    return new


def final_name(context: Any) -> tuple[str, str]:
    """The module and the name under which the outermost function stores a parameter."""
    return (context.lifted_prefix_name or "") + context.module_name, context.name


# --- parameters that a getter adds to a module ---------------------------------------------------


def _with_parameters(edited: Callable[..., Any], value: Array, context: Any) -> Array:
    """An edited value, with the trained arrays that it adds as parameters of its module.

    One run of the edit gives the structure and the frozen arrays. Another run gives the initial values
    of the new parameters, if Haiku needs them.
    """
    keys: list[jax.Array] = []

    def any_key() -> jax.Array:
        keys.append(jax.random.key(0))
        return keys[-1]

    # The model's keys stay as they are, and apply may have none. Keys that the edit takes from Haiku by
    # itself are noticed, as the sequence has another key then.
    own_key = jax.random.PRNGKey(0)
    with hk.with_rng(own_key):
        new = edited(value, any_key)
        sequence = hk.maybe_get_rng_sequence_state()
    drawn = bool(keys) or sequence is None or sequence[0] is not own_key
    slots = slots_of(new)
    added, sources = _added(edited, value, slots)
    if not added:
        return edited(value) if drawn else new
    if any(_KEY in own for i, own in enumerate(sources) if i not in added):
        raise value_error(
            "edit: arrays that do not become parameters depend on a random key from Haiku, which "
            "apply does not have; give the edit a key, as in functools.partial(edit, key=0)"
        )
    # The dtype that the module requested, so that a getter that casts the value casts the others, too.
    dtype = context.original_dtype or value.dtype
    initial = functools.cache(lambda: slots_of(edited(value.astype(dtype))))
    arrays = [slot.value for slot in slots]
    with editing_one_by_one(set()):  # without edits of the new parameters
        for i in added:
            shape, own = arrays[i].shape, arrays[i].dtype
            own = dtype if own == value.dtype else own
            init = functools.partial(lambda i, *_: initial()[i].value, i)
            arrays[i] = hk.get_parameter(context.name + slots[i].keys[-1], shape, own, init)
    return treedef_of(new).unflatten(arrays)


def _added(
    edited: Callable[..., Any], value: Array, slots: Sequence[Slot]
) -> tuple[list[int], list[set[int]]]:
    """Which arrays of an edited value become parameters, and the sources of each array.

    A trained array of the value's size that is made from it is the value in another form.
    """
    flags = zip(slots, trained(slots, False), strict=True)
    others = [i for i, (slot, flag) in enumerate(flags) if flag and slot.value is not value]
    sources = _sources(edited, value) if others else []
    same = [i for i in others if _VALUE in sources[i] and slots[i].value.size == value.size]
    return [i for i in others if i not in same], sources


_VALUE, _KEY = 0, 1


def _sources(edited: Callable[..., Any], value: Array) -> list[set[int]]:
    """For each array of an edited value, its sources: the value, the key, or both."""

    def arrays(value: Array, key: jax.Array) -> list[Array]:
        with hk.with_rng(key):
            slots = slots_of(edited(value, lambda: key))
        return [0 if is_empty(slot.value) else slot.value for slot in slots]

    jaxpr = jax.make_jaxpr(arrays)(value, jax.random.key(0)).jaxpr
    each = range(len(jaxpr.outvars))
    used = (dce_jaxpr(jaxpr, [i == own for i in each])[1] for own in each)
    return [{i for i, flag in enumerate(flags) if flag} for flags in used]


# --- creators and getters of one edit ------------------------------------------------------------


def checked(edit: Edit) -> Edit:
    """The edit itself; its options are checked now, on a tree without parameters."""
    with editing_one_by_one(set()):
        _with_key(edit, hk.next_rng_key)({})
    return edit
