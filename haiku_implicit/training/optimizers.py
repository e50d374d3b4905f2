"""optax's optimizers without updates and state for frozen arrays."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core.array import ImplicitArray, data_names
from haiku_implicit.core.containers import opened
from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.predicates import Targets, predicate_of
from haiku_implicit.core.serialization import naming_lost_types
from haiku_implicit.core.typing import Array, Params, SameTree, State, Tree, TreeDef
from haiku_implicit.training.gradients import (
    Slot,
    align,
    fill_slots,
    is_empty,
    is_inexact,
    slots_of,
    trained,
    treedef_of,
    zeros_like,
)


def freeze_declared(
    optimizer: optax.GradientTransformation, *, trainable_dense: Targets = True
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to skip fields that an implicit type declares as frozen.

    Args:
      optimizer: any optax optimizer. It sees `optax.MaskedNode`, a node without leaves, instead of
        frozen arrays. So its state omits them, and so do decay, clipping and norms. Wrappers that
        compare or keep gradients or parameters belong inside, such as `optax.apply_if_finite(...)`,
        `optax.MultiSteps(...).gradient_transformation()` and `optax.contrib.schedule_free(...)`.
      trainable_dense: which dense arrays are trained, as in `partition`. Pass the same value to
        `value_and_grad`.

    Returns:
      An optimizer of all parameters. Its `update` takes gradients with symbolic zeros, None or arrays
      in the slots that types freeze, and returns updates with symbolic zeros in all frozen slots.
      `optax.apply_updates` adds them, and so does `apply_updates`.

    Raises:
      ValueError: by its `update`, if the gradient of a trainable array is missing, and if there is a
        gradient of an array that `trainable_dense` excludes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, haiku_implicit as hki
      >>> params = {'w': hki.LoRA(jnp.ones((9, 9)), jnp.ones((9, 1)), jnp.ones((1, 9)))}
      >>> optimizer = hki.freeze_declared(optax.adamw(1e-3))
      >>> state = optimizer.init(params)
      >>> sum(x.size for x in jax.tree.leaves(state))  # two moments of a and b, and a count
      37
      >>> grads = hki.grad(lambda p, x: jnp.sum(x @ p['w']))(params, jnp.ones((1, 9)))
      >>> updates, state = optimizer.update(grads, state, params)
      >>> updates['w'].w
      Zeros(float32[9,9])
      >>> params = optax.apply_updates(params, updates)
    """
    return _frozen(optimizer, lambda tree, slots, first: [True] * len(slots), trainable_dense)


def freeze_keys(
    optimizer: optax.GradientTransformation,
    arr_type: type[ImplicitArray],
    keys: Iterable[str],
    *,
    trainable_dense: Targets = True,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to skip named fields of an implicit type, as well as fields declared frozen.

    Args:
      optimizer: any optax optimizer.
      arr_type: an implicit type; its subclasses are included.
      keys: names of its fields.
      trainable_dense: which dense arrays are trained, as in `partition`.

    Returns:
      An optimizer as in `freeze_declared`.

    Raises:
      TypeError: if `arr_type` is not an implicit type.
      ValueError: if a key is not a field of `arr_type`; by `init`, if `arr_type` does not occur in
        the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax, haiku_implicit as hki
      >>> params = {'w': hki.LoRA(jnp.ones((9, 9)), jnp.ones((9, 1)), jnp.ones((1, 9)))}
      >>> optimizer = hki.freeze_keys(optax.sgd(0.1, momentum=0.9), hki.LoRA, ['w', 'a'])
      >>> sum(x.size for x in jax.tree.leaves(optimizer.init(params)))
      9
    """
    if not (isinstance(arr_type, type) and issubclass(arr_type, ImplicitArray)):
        raise type_error(f"arr_type: expected a subclass of ImplicitArray, got {arr_type!r}")
    names = {keys} if isinstance(keys, str) else set(keys)
    unknown = sorted(names - set(data_names(arr_type)))
    if unknown:
        raise value_error(
            f"keys: {arr_type.__name__} has no field {', '.join(map(repr, unknown))} that holds "
            f"arrays; it has {', '.join(map(repr, data_names(arr_type)))}"
        )

    def select(tree: Tree, slots: Sequence[Slot], first: bool) -> list[bool]:
        types = {cls for slot in slots for cls, _ in slot.fields}
        if first and not any(issubclass(cls, arr_type) for cls in types):
            there = ", ".join(sorted(cls.__name__ for cls in types)) or "none"
            raise value_error(
                f"arr_type: no {arr_type.__name__} in the parameters; the implicit types in them: "
                f"{there}"
            )
        return [
            not any(issubclass(cls, arr_type) and name in names for cls, name in slot.fields)
            for slot in slots
        ]

    return _frozen(optimizer, select, trainable_dense)


def freeze_subtrees(
    optimizer: optax.GradientTransformation, label_fn: Any, *, trainable_dense: Targets = True
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to skip parts of the parameters, as well as fields declared frozen.

    Args:
      optimizer: any optax optimizer.
      label_fn: a tree of `'freeze'` and `'train'`, or a function that returns it for the parameters
        (for the gradients, if `update` gets no parameters). A label counts for the whole subtree at
        its path.
      trainable_dense: which dense arrays are trained, as in `partition`.

    Returns:
      An optimizer as in `freeze_declared`.

    Raises:
      ValueError: by `init` and `update`, for any other label, or a tree that does not fit.

    Example:
      >>> import jax, jax.numpy as jnp, optax, haiku_implicit as hki
      >>> params = {'body': {'w': jnp.ones(5)}, 'head': {'w': jnp.ones(2), 'b': jnp.ones(1)}}
      >>> labels = lambda params: {k: 'train' if k == 'head' else 'freeze' for k in params}
      >>> optimizer = hki.freeze_subtrees(optax.sgd(0.1, momentum=0.9), labels)
      >>> sum(x.size for x in jax.tree.leaves(optimizer.init(params)))
      3
    """

    def select(tree: Tree, slots: Sequence[Slot], first: bool) -> list[bool]:
        labels = label_fn(tree) if callable(label_fn) else label_fn
        # Labels are often a dict, even if the parameters are another mapping.
        labels, tree = (opened(x, is_empty, as_dicts=True) for x in (labels, tree))
        flags = []
        parts = align(treedef_of(labels), tree, "label_fn")
        for label, part in zip(slots_of(labels), parts, strict=True):
            known = isinstance(label.value, str) and label.value in ("freeze", "train")
            if not known and not is_empty(label.value):
                raise value_error(
                    f"label_fn: expected 'freeze' or 'train' at {label.name!r}, got {label.value!r}"
                )
            flags += [known and label.value == "train"] * len(slots_of(part))
        return flags

    return _frozen(optimizer, select, trainable_dense)


def _frozen(
    optimizer: optax.GradientTransformation,
    select: Callable[[Any, Sequence[Slot], bool], list[bool]],
    trainable_dense: Targets,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to update only slots that are trainable by declaration and by `select`."""
    inner = optax.with_extra_args_support(optimizer)
    predicate_of("trainable_dense", trainable_dense)

    def marks_of(tree: Tree, slots: Sequence[Slot], first: bool) -> list[tuple[bool, bool]]:
        """For each slot, whether it is trained, and whether `select` marks it."""
        # A regular expression has to match something in `init`; an update may lack dense arrays.
        # (Unless `optax.partition` shows one group of the parameters.)
        whole = first and not _is_group(tree)
        own = trained(slots, trainable_dense, whole)
        return list(zip(own, select(tree, slots, whole), strict=True))

    def init(params: Params) -> State:
        slots = slots_of(params)
        flags = list(map(all, marks_of(params, slots, True)))
        return inner.init(_Mask(treedef_of(params), flags, []).of(params, "params"))

    def update(updates: Tree, state: State, params: Params = None, **extra: Any) -> tuple[Any, Any]:
        like = updates if params is None else params
        slots = slots_of(like)
        marks = marks_of(like, slots, False)
        mask = _Mask(treedef_of(like), list(map(all, marks)), [slot.value for slot in slots])
        gradients = align(mask.treedef, updates, "updates")
        _check_gradients(slots, marks, gradients)
        # Some optimizers take another gradient, and functions of the parameters.
        if "grad" in extra:
            extra["grad"] = mask.of(extra["grad"], "grad")
        for name in ("value_fn", "obj_fn"):
            if extra.get(name) is not None:
                extra[name] = mask.unmasking(extra[name])
        if extra.get("grad_fn") is not None:
            gradient = mask.unmasking(extra["grad_fn"])
            extra["grad_fn"] = lambda *args, **kw: mask.of(gradient(*args, **kw), "grad_fn")
        own = None if params is None else mask.of(params, "params")
        with naming_lost_types(state):
            new, new_state = _updated(inner, mask.of(updates, "updates"), state, own, extra)
        rest = [x if params is not None and is_empty(x) else _no_update(x) for x in mask.values]
        new = mask.filled(new, "updates", rest)
        changes = align(mask.treedef, new, "updates")
        _check_state_shapes(slots, gradients, changes, state, new_state)
        if params is not None:
            for slot, change in zip(slots, changes, strict=True):
                if not is_empty(change) and not is_empty(slot.value):
                    _check_shape(slot, change, "an update")
        return new, new_state

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(init=False, eq=False, repr=False)
class _NoUpdate(Zeros):  # type: ignore[metaclass]
    """The update of a frozen array: `array + update` is the array, as `optax.apply_updates` adds."""

    __repr__ = Zeros.__repr__
    # JAX and numpy leave the sum to `__radd__` only if they can't convert this to an array.
    __array_ufunc__ = None

    @property
    def __jax_array__(self) -> Any:
        raise AttributeError("__jax_array__")

    def __radd__(self, array: Array) -> Array:
        # Such a wrapper computes parameters from its copies: their rounding would change frozen ones.
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("optax.contrib"):
            raise value_error(
                "optimizer: a wrapper that keeps parameters belongs inside, as in "
                "freeze_declared(optax.contrib.schedule_free(...))"
            )
        return array


def _is_group(tree: Tree) -> bool:
    """Whether parameters are left out of a tree, as optax does."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return any(isinstance(x, optax.MaskedNode) for x in leaves)


def _no_update(x: Array) -> Array:
    zeros = zeros_like(x)
    return _NoUpdate(shape=zeros.shape, dtype=zeros.dtype) if isinstance(zeros, Zeros) else zeros


def _updated(
    inner: optax.GradientTransformationExtraArgs,
    updates: Tree,
    state: State,
    params: Params,
    extra: dict[str, Any],
) -> tuple[Any, Any]:
    """Runs the update of an optimizer, with errors that explain mismatched trees."""
    try:
        return inner.update(updates, state, params, **extra)
    except (TypeError, ValueError) as e:
        if params is not None:
            _check_state(state, jax.eval_shape(inner.init, params))
            raise
        raise ValueError(  # without parameters, no earlier check finds a missing gradient
            f"updates: the optimizer can't take these gradients ({e}). If its state is for other "
            "arrays, give value_and_grad and the optimizer the same trainable_dense=; give update "
            "the parameters, and the error names the first such array"
            f" {see('another-optimizer-state')}"
        ) from e


def _check_state(state: State, wanted: Any) -> None:
    """Raises if a state is for other arrays, for example after a change of `trainable_dense`."""
    there, expected = (
        {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (state, wanted)
    )
    if there == expected:
        return
    missing, other = sorted(expected - there), sorted(there - expected)
    found = f"has nothing at {missing[0]}" if missing else f"has an array at {other[0]}"
    trained = "trains" if missing else "does not train"
    raise ValueError(
        f"state: {found}, which the optimizer {trained}. A state goes with the parameters and the "
        "trainable_dense= that it was made with: give those, or make a new one by init(params)"
        f" {see('another-optimizer-state')}"
    ) from None


def _check_gradients(
    slots: Sequence[Slot], marks: Sequence[tuple[bool, bool]], gradients: list[Array]
) -> None:
    """Raises if a gradient is missing, or would be lost because `trainable_dense` excludes it."""
    for slot, (is_trained, is_marked), gradient in zip(slots, marks, gradients, strict=True):
        if is_trained and is_marked and is_empty(gradient):
            raise ValueError(
                f"{slot.name}: the optimizer trains this, but its gradient is {gradient!r}. Give the "
                "optimizer the same trainable_dense= as value_and_grad, or leave this out by "
                "freeze_subtrees"
                f" {see('gradients-of-other-arrays')}"
            )
        if is_trained and not is_empty(gradient) and not is_empty(slot.value):
            # Optimizers such as `optax.contrib.dpsgd` take a gradient for each example.
            own, found = np.shape(slot.value), np.shape(gradient)
            if found[1:] != own:
                _check_shape(slot, gradient, "a gradient")
        is_dense = not slot.fields and not is_empty(slot.value) and is_inexact(slot.value)
        if is_dense and is_marked and not is_trained and not is_empty(gradient):
            raise ValueError(
                f"{slot.name}: there is a gradient, but trainable_dense= of the optimizer leaves this "
                "out. Give value_and_grad the same trainable_dense= as the optimizer, or None or Zeros "
                "in place of this gradient"
                f" {see('gradients-of-other-arrays')}"
            )


def _check_shape(slot: Slot, x: Array, kind: str) -> None:
    """Raises for a gradient or an update of another shape, which would be broadcast; numbers may be."""
    if np.shape(x) not in ((), np.shape(slot.value)):
        raise ValueError(
            f"{slot.name}: expected {kind} in the shape {list(np.shape(slot.value))}, got "
            f"{list(np.shape(x))}. It is of other parameters, such as LoRA of another rank"
            f" {see('gradients-of-other-arrays')}"
        )


def _check_state_shapes(
    slots: Sequence[Slot], gradients: list[Array], updates: list[Array], old: State, new: State
) -> None:
    """Raises if a state was broadcast to gradients of another rank of LoRA, or they to it."""
    triples = zip(slots, gradients, updates, strict=True)
    pairs = [(s.name, g, u) for s, g, u in triples if not is_empty(g) and not is_empty(u)]
    of_new = dict(jax.tree_util.tree_leaves_with_path(new))
    for path, x in jax.tree_util.tree_leaves_with_path(old):
        pairs.append((jax.tree_util.keystr(path), x, of_new.get(path, x)))
    for name, was, becomes in pairs:
        before, after = np.shape(was), np.shape(becomes)
        # Factors have two axes or more. An optimizer's own history, of one, may grow.
        if before != after and len(before) == len(after) > 1:
            raise ValueError(
                f"state: it is for other shapes than the gradients: {name} would go from "
                f"{list(before)} to {list(after)}. A state goes with the "
                "parameters that it was made with: give those, or make a new one by init(params)"
                f" {see('another-optimizer-state')}"
            )


class _Mask(NamedTuple):
    """The slots of parameters: their structure, whether each is trained, and their values."""

    treedef: TreeDef
    flags: Sequence[bool]
    values: Sequence[Array]

    def filled(self, tree: Tree, what: str, others: Sequence[Any]) -> Tree:
        """A tree with other values in the slots that are not trained."""
        return fill_slots(self.treedef, self.flags, align(self.treedef, tree, what), others)

    def of(self, tree: Tree, what: str) -> Tree:
        """A masked tree, as the optimizer sees it."""
        return self.filled(tree, what, [optax.MaskedNode()] * len(self.flags))

    def unmasking(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Converts a function of parameters to a function of masked parameters."""

        @functools.wraps(fun)  # optax reads the names of its arguments
        def unmasked(tree: Tree, *args: Any, **kwargs: Any) -> Any:
            return fun(self.filled(tree, "params", self.values), *args, **kwargs)

        return unmasked


def apply_updates(params: SameTree, updates: Tree) -> SameTree:
    """`optax.apply_updates` for parameters with implicit arrays.

    Args:
      params: a tree of arrays and implicit arrays.
      updates: a tree like `params`. A parameter does not change if its update is symbolic zeros, None
        or `optax.MaskedNode`, or if its dtype is not floating or complex.

    Returns:
      The new parameters, in the dtypes of the old ones.

    Raises:
      ValueError: if the structures or the shapes differ.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'w': jnp.ones(2), 'b': jnp.ones(2)}
      >>> updates = {'w': hki.Zeros(shape=(2,), dtype=jnp.float32), 'b': jnp.ones(2)}
      >>> hki.apply_updates(params, updates)
      {'b': Array([2., 2.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    treedef = treedef_of(params)
    pairs = zip(slots_of(params), align(treedef, updates, "updates"), strict=True)
    return treedef.unflatten([_added(slot, u) for slot, u in pairs])


def _added(slot: Slot, u: Array) -> Array:
    p = slot.value
    if is_empty(p) or is_empty(u) or not is_inexact(p):
        return p
    _check_shape(slot, u, "an update")
    return jnp.asarray(p + u).astype(jnp.result_type(p))
