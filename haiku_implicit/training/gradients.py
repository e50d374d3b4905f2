"""Trainable leaves of a parameter tree, and gradients with respect to only these.

A *slot* is the place of one array in a tree. It holds the array, or None, symbolic zeros or
`optax.MaskedNode` instead. Parameters, gradients, updates and partitions have the same slots.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_implicit.arrays.matrix_view import MatrixView
from haiku_implicit.arrays.zeros import Zeros
from haiku_implicit.core import containers
from haiku_implicit.core.array import (
    ImplicitArray,
    data_names,
    frozen_names,
    is_implicit,
    short,
    static_items,
)
from haiku_implicit.core.messages import see, shown, value_error, warn_caller
from haiku_implicit.core.predicates import Targets, is_list, no_match, predicate_of
from haiku_implicit.core.transform import materialize, use_implicit_args
from haiku_implicit.core.typing import Array, SameTree, Tree, TreeDef

# For `trainable_dense=`, by Haiku's names: tuning of only biases (Ben Zaken et al. 2021,
# arXiv:2106.10199), and of the scales and offsets of normalizing layers (Zhao et al. 2023,
# arXiv:2312.11420).
BIASES = r"(?:.*/)?(?!w_b$)(?:[^/]*_)?(?:b|(?:bias|biases|offset)(?:_\d+)?)"
LAYER_NORMS = r"(?:.*/)?(?:scale|offset)"

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Slot(NamedTuple):
    """A place for one array.

    Attributes:
      path: its keys, as text.
      value: the array, or the value that the slot holds instead.
      fields: the implicit arrays around it, outermost first, each as (type, name of the field).
      keys: its keys as a parameter of its own, such as `('linear', 'w_lora_a')`.
    """

    path: tuple[str, ...]
    value: Array
    fields: tuple[tuple[type[ImplicitArray], str], ...]
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        return "/".join(self.path)


def is_empty(x: Array) -> bool:
    """Whether a slot holds None, symbolic zeros or `optax.MaskedNode` instead of an array."""
    return x is None or isinstance(x, Zeros | optax.MaskedNode)


def slots_of(tree: Tree, path: Any = (), fields: Any = (), names: Any = ()) -> list[Slot]:
    """Finds the slots of a tree, in the order of its leaves."""
    found = []
    is_slot = lambda x: is_implicit(x) or is_empty(x)  # noqa: E731
    leaves, _ = jax.tree_util.tree_flatten_with_path(containers.opened(tree, is_slot), is_slot)
    for keys, x in leaves:
        own = [jax.tree_util.keystr((k,), simple=True) for k in keys]
        here, names_here = (*path, *own), (*names, *own)
        if is_empty(x) or not is_implicit(x):
            found.append(Slot(here, x, fields, names_here))
            continue
        if isinstance(x, MatrixView) and (is_empty(x.matrix) or not is_implicit(x.matrix)):
            found.append(Slot(here, x.matrix, fields, names_here))  # dense, as `prepare` stores it
            continue
        *module, last = names_here or ("",)
        for name in data_names(type(x)):
            own_name = f"{last}_{type(x).__name__.lower()}_{name}"
            inner = names_here if isinstance(x, MatrixView) else (*module, own_name)
            field = (*fields, (type(x), name))
            found += slots_of(getattr(x, name), (*here, name), field, inner)
    return found


def treedef_of(tree: Tree) -> TreeDef:
    """The structure of a tree with a leaf for each slot."""
    return containers.flatten(tree, is_empty)[1]


def align(treedef: TreeDef, tree: Tree, what: str) -> list[Array]:
    """Returns the value of another tree in each slot."""
    try:
        return treedef.flatten_up_to(containers.opened(tree, is_empty))
    except (ValueError, TypeError) as e:
        wanted = treedef.unflatten([_Slot()] * treedef.num_leaves)
        raise value_error(f"{what}: {_difference(wanted, tree) or e}") from e


class _Slot:
    """A placeholder for an array in a tree."""


def _difference(wanted: Any, found: TreeDef, path: tuple[str, ...] = ()) -> str:
    """Describes the first implicit array that differs between two trees; empty if none does."""
    leaves, others = (
        {
            (*path, *(jax.tree_util.keystr((k,), simple=True) for k in keys)): x
            for keys, x in jax.tree_util.tree_flatten_with_path(
                containers.opened(tree), is_leaf=lambda x: x is None or is_implicit(x)
            )[0]
        }
        for tree in (wanted, found)
    )
    for here, x in leaves.items():
        name, kind = "/".join(here), type(x).__name__
        if not any(there[: len(here)] == here for there in others):
            return f"{name}: missing"
        if not is_implicit(x) or here not in others:
            continue
        y = others[here]
        if type(x) is not type(y):
            return f"{name}: expected {kind}, got {_kind(y)}"
        for field, value in static_items(x).items():
            other = static_items(y)[field]
            if repr(value) != repr(other):
                return f"{name}: expected {kind} with {field}={value!r}, got {field}={other!r}"
        for field in data_names(type(x)):
            inner = _difference(getattr(x, field), getattr(y, field), (*here, field))
            if inner:
                return inner
    return ""


def _kind(x: Any) -> str:
    return type(x).__name__ if is_implicit(x) or not hasattr(x, "shape") else short(x)


def fill_slots(
    treedef: TreeDef, flags: Sequence[bool], values: Sequence[Array], others: Sequence[Any]
) -> Tree:
    """Makes a tree with `values` in the marked slots, and `others` in the rest."""
    triples = zip(flags, values, others, strict=True)
    return treedef.unflatten([value if flag else other for flag, value, other in triples])


def is_inexact(x: Array) -> bool:
    """Whether a value, an array or not, has a floating or complex dtype."""
    dtype = getattr(x, "dtype", None)
    dtype = jnp.result_type(x) if dtype is None else dtype
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


def zeros_like(x: Array) -> Array:
    """Returns symbolic zeros for an array, and None for random keys and JAX's own `float0`."""
    if is_empty(x):
        return x
    dtype = jnp.result_type(x)
    if dtype == jax.dtypes.float0 or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    return Zeros(shape=np.shape(x), dtype=dtype)


# --- trainable slots -----------------------------------------------------------------------------


def trained(
    slots: Sequence[Slot],
    trainable_dense: Targets,
    must_match: bool = True,
) -> list[bool]:
    """For each slot, whether its array is trained: as the types declare, or by `trainable_dense`.

    Raises:
      ValueError: with `must_match`, for an expression, or an item of a list, that matches no dense
        array. (If it also matches implicit ones, this is a warning.)
    """
    chosen = predicate_of("trainable_dense", trainable_dense)
    flags, dense = [], []
    for slot in slots:
        if is_empty(slot.value) or not is_inexact(slot.value):
            flag = False
        elif slot.fields:
            flag = not any(name in frozen_names(cls) for cls, name in slot.fields)
        else:
            flag = bool(chosen("/".join(slot.path[:-1]), "".join(slot.path[-1:]), slot.value))
            dense.append(slot.name)
        flags.append(flag)
    if must_match and dense:
        others = {"/".join(s.path[: -len(s.fields)]): s.fields[0][0] for s in slots if s.fields}
        _check_named(trainable_dense, dense, others)
    return flags


def _check_named(
    trainable_dense: Any,
    dense: Sequence[str],
    others: Mapping[str, type[ImplicitArray]],
) -> None:
    """Raises for a name that matches no dense array; warns if it matches implicit ones, too.

    Args:
      trainable_dense: the argument of that name. Only expressions and items of lists are names.
      dense: the paths of the dense arrays.
      others: the types of the implicit arrays by their paths.
    """
    items: list[tuple[Any, Any]] = []
    if is_list(trainable_dense):
        items = [(item, [item]) for item in trainable_dense]
    elif isinstance(trainable_dense, str | re.Pattern):
        items = [(trainable_dense, trainable_dense)]
    for item, targets in items:
        chosen = predicate_of("trainable_dense", targets)
        found, meant = (
            [path for path in paths if chosen(*path.rpartition("/")[::2], None)]
            for paths in (dense, others)
        )
        told = shown([f"{path}, a {others[path].__name__}" for path in meant])
        way_out = "exclude= of quantize_params and add_lora leaves it dense"
        if not found:
            kind = "dense parameters" + (f", but {told} ({way_out})" if meant else "")
            raise no_match("trainable_dense", item, dense, kind=kind)
        if meant and len(found) + len(meant) < len(dense) + len(others):  # `.*` is meant so
            warn_caller(
                f"trainable_dense: {item!r} trains {shown(found, most=2)}, but not the whole of "
                f"{told}. To train it whole, {way_out}; else give an expression that does not match it"
                f" {see('nothing-matches')}"
            )


def partition(params: SameTree, trainable_dense: Targets = True) -> tuple[SameTree, SameTree]:
    """Splits parameters into a trainable and a frozen part.

    The type of an implicit array decides about its fields: those that it declares with `frozen_field`
    (like the `w` of `LoRA`) are frozen, with everything in them. Arrays of integers and booleans are
    always frozen.

    Args:
      params: a tree of arrays and implicit arrays.
      trainable_dense: which of the floating-point arrays outside of implicit ones are trained: True
        for all of them, False for none, a predicate of `(module_name, name, value)`, or a regular
        expression that the whole of `module/name` has to match, such as `BIASES` (biases and offsets)
        and `LAYER_NORMS` (the scales and offsets of normalizing layers).

    Returns:
      Two trees like `params`, `(trainable, frozen)`, each with None instead of the arrays of the
      other. None is not a leaf, so that `jax.grad`, optimizers and checkpoints of the first tree deal
      only with trainable arrays.

    Raises:
      TypeError: for a `trainable_dense` of another type.
      ValueError: for a string that is not a regular expression, or matches nothing.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
      >>> params = {'linear': {'w': w, 'b': jnp.zeros(3)}}
      >>> trainable, frozen = hki.partition(params, trainable_dense=False)
      >>> jax.tree.map(jnp.shape, trainable)['linear']['w'].a, trainable['linear']['b']
      ((2, 1), None)
      >>> frozen['linear']['w']
      LoRA(float32[2,3], w=float32[2,3])
    """
    slots, treedef = slots_of(params), treedef_of(params)
    return _part(slots, treedef, trained(slots, trainable_dense))


def _part(slots: Sequence[Slot], treedef: TreeDef, flags: Sequence[bool]) -> tuple[Any, Any]:
    values, nothing = [slot.value for slot in slots], [None] * len(slots)
    trainable = fill_slots(treedef, flags, values, nothing)
    return trainable, fill_slots(treedef, flags, nothing, values)


def combine(trainable: SameTree, frozen: SameTree) -> SameTree:
    """Combines the two parts that `partition` returns.

    Args:
      trainable: a tree with None instead of the arrays of `frozen`.
      frozen: a tree with None instead of the arrays of `trainable`.

    Returns:
      The tree with the arrays of both.

    Raises:
      ValueError: if the structures differ, or both have a value in one place.

    Example:
      >>> import haiku_implicit as hki
      >>> hki.combine({'w': None, 'b': 2.0}, {'w': 1.0, 'b': None})
      {'b': 2.0, 'w': 1.0}
    """
    treedef = treedef_of(trainable)
    values = []
    for slot, other in zip(slots_of(trainable), align(treedef, frozen, "frozen"), strict=True):
        if slot.value is not None and other is not None:
            raise value_error(f"{slot.name}: both trainable and frozen have a value here")
        values.append(other if slot.value is None else slot.value)
    return treedef.unflatten(values)


# --- gradients -----------------------------------------------------------------------------------


class ValueAndGrad(Protocol[R_co]):
    """The type of the result of `value_and_grad`: the gradient is a tree like the first argument."""

    @overload
    def __call__(self, params: SameTree, /, *args: Any, **kwargs: Any) -> tuple[R_co, SameTree]: ...

    @overload
    def __call__(self, **kwargs: Any) -> tuple[R_co, Any]: ...


@overload
def value_and_grad(
    fun: Callable[..., R],
    argnums: Literal[0] = 0,
    has_aux: bool = False,
    *,
    trainable_dense: Targets = True,
    **kwargs: Any,
) -> ValueAndGrad[R]: ...


@overload
def value_and_grad(
    fun: Callable[..., R],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    *,
    trainable_dense: Targets = True,
    **kwargs: Any,
) -> Callable[..., tuple[R, Any]]: ...


def value_and_grad(
    fun: Callable[..., R],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    trainable_dense: Targets = True,
    **kwargs: Any,
) -> Callable[..., tuple[R, Any]]:
    """`jax.value_and_grad` with respect to the trainable arrays of parameters with implicit arrays.

    Args:
      fun: a function that returns a scalar. It is wrapped in `use_implicit_args` (wrapping it twice
        is harmless).
      argnums: the position of the parameters among the arguments, or several positions. In a call
        they may also be given by keyword, unlike with `jax.value_and_grad`.
      has_aux: whether `fun` returns a pair of the scalar and auxiliary data.
      trainable_dense: which dense arrays are trained, as in `partition`.
      **kwargs: other options of `jax.value_and_grad` (`holomorphic`, ...).

    Returns:
      A function like the result of `jax.value_and_grad`. The gradient is a tree like the parameters.
      Instead of frozen arrays and integers it holds `Zeros` of the same shape and dtype: symbolic
      zeros, which take no memory.

    Raises:
      ValueError: for an `argnums` that no argument has, or a `trainable_dense` that matches nothing.
      TypeError: for a `trainable_dense` of another type.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
      >>> loss = lambda w, x: jnp.sum(x @ w)
      >>> value, grads = jax.jit(hki.value_and_grad(loss))(w, jnp.ones((4, 2)))
      >>> float(value), grads.w, grads.a.shape
      (48.0, Zeros(float32[2,3]), (2, 1))
    """
    implicit: Callable[..., Any] = use_implicit_args(fun)
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    predicate_of("trainable_dense", trainable_dense)  # raises early for an invalid one

    @functools.wraps(fun)
    def wrapped(*args: Any, **fun_kwargs: Any) -> Any:
        args, fun_kwargs = _by_position(fun, positions, args, fun_kwargs)
        slots = [slots_of(args[i]) for i in positions]
        every = [slot for own in slots for slot in own]
        flags = iter(trained(every, trainable_dense))
        parts = [
            _part(own, treedef_of(args[i]), [next(flags) for _ in own])
            for i, own in zip(positions, slots, strict=True)
        ]

        def of_trainable(trainable: list[Any]) -> Any:
            full = list(args)
            for i, own, (_, frozen) in zip(positions, trainable, parts, strict=True):
                full[i] = combine(own, frozen)
            out = implicit(*full, **fun_kwargs)
            value, aux = out if has_aux else (out, None)
            return materialize(value), aux

        differentiated = jax.value_and_grad(of_trainable, has_aux=True, **kwargs)
        (value, aux), found = differentiated([trainable for trainable, _ in parts])
        grads = [_fill(own, frozen) for own, (_, frozen) in zip(found, parts, strict=True)]
        out = grads[0] if isinstance(argnums, int) else tuple(grads)
        return ((value, aux) if has_aux else value), out

    return wrapped


def _by_position(
    fun: Callable[..., Any], positions: Sequence[int], args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call, by position if one of `positions` was given by keyword."""
    if max(positions, default=-1) >= len(args):
        # (A function without a signature, or a call that does not fit it, stays as it is.)
        with contextlib.suppress(TypeError, ValueError):
            bound = inspect.signature(fun).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
    for i in positions:
        if not -len(args) <= i < len(args):
            raise value_error(
                f"argnums: {i} is not among the {len(args)} positional arguments, nor a parameter of "
                f"the function that is given by keyword ({', '.join(kwargs) or 'none is'}). Give it by "
                "its position"
            )
    return args, kwargs


def _fill(grads: Tree, frozen: Tree) -> Tree:
    """Puts symbolic zeros into the slots of gradients that are in the frozen part."""
    treedef = treedef_of(frozen)
    pairs = zip(align(treedef, grads, "gradients"), slots_of(frozen), strict=True)
    return treedef.unflatten([zeros_like(s.value) if g is None else g for g, s in pairs])


class Gradient(Protocol):
    """The type of the result of `grad`: a tree like the first argument."""

    @overload
    def __call__(self, params: SameTree, /, *args: Any, **kwargs: Any) -> SameTree: ...

    @overload
    def __call__(self, **kwargs: Any) -> Any: ...


@overload
def grad(
    fun: Callable[..., Any],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    trainable_dense: Targets = True,
    **kwargs: Any,
) -> Gradient: ...


@overload
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    trainable_dense: Targets = True,
    **kwargs: Any,
) -> Callable[..., Any]: ...


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    trainable_dense: Targets = True,
    **kwargs: Any,
) -> Callable[..., Any]:
    """`jax.grad` for parameters with implicit arrays; see `value_and_grad`.

    Returns:
      A function that returns the gradient; with `has_aux`, a pair of the gradient and the auxiliary
      data of `fun`.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> params = {'w': hki.Zeros(shape=(2, 3), dtype=jnp.float32), 'b': jnp.zeros(3)}
      >>> hki.grad(lambda p, x: jnp.sum(x @ p['w'] + p['b']))(params, jnp.ones((4, 2)))
      {'b': Array([4., 4., 4.], dtype=float32), 'w': Zeros(float32[2,3])}
    """
    both = value_and_grad(fun, argnums, has_aux, trainable_dense=trainable_dense, **kwargs)

    @functools.wraps(fun)
    def wrapped(*args: Any, **fun_kwargs: Any) -> Any:
        value, grads = both(*args, **fun_kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped
