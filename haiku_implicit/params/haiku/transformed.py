"""`transform_implicit`: Haiku's transformed functions with implicit parameters and state."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import haiku as hk
import jax

from haiku_implicit.core import containers
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.eager import Facts, cached_implicit_args
from haiku_implicit.core.interpreter import densify
from haiku_implicit.core.messages import type_error
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Array, Params, State, Tree

AnyTransformed = (
    hk.Transformed | hk.TransformedWithState | hk.MultiTransformed | hk.MultiTransformedWithState
)
T = TypeVar("T", bound=AnyTransformed)


def transform_implicit(t: T, *, cache: bool = True) -> T:
    """Lets a transformed Haiku function have implicit parameters and state.

    `init` may return implicit arrays (made by a `creator`, or with `box`), and
    `apply` takes them wherever it takes arrays: in the parameters, in the state and in the inputs. A
    result that is a part of an implicit array, such as a slice of a weight, is implicit; `materialize`
    makes it dense. The new state may have implicit arrays, too, but an entry that is dense stays dense
    if the implicit array would hold more. The Haiku function itself notices nothing: it sees arrays of
    the dense shape and dtype.

    The wrapped functions are functions of pytrees like Haiku's own; `jax.jit`, `jax.grad` and
    `jax.vmap` apply to them. Called eagerly, they trace the Haiku function once for arguments of one
    structure (shapes, dtypes, implicit types, and values of arguments that are not arrays) and run this
    trace in later calls.

    Haiku's summaries (`hk.experimental.tabulate`, `eval_summary`) of the result count an implicit array
    as a dense one; its `nbytes` is the real size.

    Sharp edges, all of them as with `jax.jit`:
      - The Haiku function has to be pure. Side effects (a Python `print`, reading a global variable)
        happen only while it is traced. `cache=False` traces in every call.
      - A Python number among the arguments is a constant of the trace; every new value is traced again.
        Pass arrays for values that change often.
      - A call with an object that is compared by identity (a mutable configuration, say) is traced
        every time, because the object may have changed.
      - A change of the mixed precision policy (`hk.mixed_precision`) is noticed. A change of a method
        interceptor or a Haiku setting (`hk.config`) around `apply` is not: use `cache=False`.

    Args:
      t: the result of `hk.transform`, `hk.transform_with_state`, `hk.multi_transform`,
        `hk.multi_transform_with_state` or `hk.without_apply_rng`.
      cache: whether traces are kept for repeated eager calls.

    Returns:
      A named tuple of the same type, whose functions have the same signatures. For a multi-transform,
      every function in the tree `apply` is wrapped.

    Raises:
      TypeError: for anything but a transformed function.

    Example:
      >>> import functools, haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> def model(x):
      ...   with hk.custom_creator(hki.creator(functools.partial(hki.add_lora, rank=2))):
      ...     return hk.nets.MLP([8, 3])(x)
      >>> t = hki.transform_implicit(hk.transform(model))
      >>> x = jnp.ones((1, 4))
      >>> params = t.init(jax.random.PRNGKey(0), x)
      >>> params['mlp/~/linear_0']['w']
      LoRA(float32[4,8], w=float32[4,8], a=float32[4,2], b=float32[2,8], factor=float32[])
      >>> jax.jit(t.apply)(params, None, x).shape
      (1, 3)
    """
    check_transformed("t", t)
    wrap = _cached if cache else use_implicit_args
    has_state = isinstance(t, hk.TransformedWithState | hk.MultiTransformedWithState)

    def wrap_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
        return _keeping_state_dense(wrap(apply)) if has_state else wrap(apply)

    new: Any = t._replace(init=wrap(t.init), apply=jax.tree.map(wrap_apply, t.apply))
    for original, wrapped in zip(jax.tree.leaves(t.apply), jax.tree.leaves(new.apply), strict=True):
        _ORIGINALS[wrapped] = original
    return new


def check_transformed(argument: str, t: Any) -> None:
    """Raises for anything but a transformed Haiku function."""
    if not isinstance(t, AnyTransformed):
        raise type_error(
            f"{argument}: expected what hk.transform, hk.transform_with_state, hk.multi_transform, "
            "hk.multi_transform_with_state or hk.without_apply_rng returns, got "
            f"{type(t).__name__}. A function is transformed first, as in hk.transform(f)"
        )


# The original `apply`, by the `apply` that `transform_implicit` returned for it.
_ORIGINALS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def original_of(apply: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """The function that `transform_implicit` wrapped as `apply`, and whether there is one."""
    return _ORIGINALS.get(apply, apply), apply in _ORIGINALS


# Other functions that take implicit arrays, made from the functions of `transform_implicit`.
_IMPLICIT: weakref.WeakSet[Any] = weakref.WeakSet()


def marked_implicit(t: T) -> T:
    """Notes that a transformed function takes implicit arrays, and returns it."""
    _IMPLICIT.update(jax.tree.leaves(t.apply))
    return t


def takes_implicit(t: AnyTransformed) -> bool:
    """Whether a transformed function takes implicit arrays."""
    return all(f in _ORIGINALS or f in _IMPLICIT for f in jax.tree.leaves(t.apply))


def _keeping_state_dense(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an `apply` so that dense entries of its state stay dense, as the carry of a loop must.

    An average of a LoRA weight (`hk.EMAParamsTree`) starts dense. Its next value is the sum of a dense
    array and LoRA, which is a LoRA again and holds more. So its type would change with each step.
    """

    @functools.wraps(apply)
    def wrapped(params: Params, state: State, *args: Any, **kwargs: Any) -> Any:
        out, new = apply(params, state, *args, **kwargs)
        leaves, treedef = _leaves_by_path(new)
        if not any(map(is_implicit, leaves.values())):
            return out, new
        old, _ = _leaves_by_path(state)
        kept = (_as_dense(old.get(path), x) for path, x in leaves.items())
        return out, treedef.unflatten(kept)

    return wrapped


def _leaves_by_path(tree: Tree) -> tuple[dict[Any, Any], Any]:
    opened = containers.opened(tree)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(opened, is_leaf=is_implicit)
    return dict(leaves), treedef


def _as_dense(old: Array, new: Array) -> Array:
    """A new entry of the state, made dense if the old entry is dense and holds less."""
    if not isinstance(old, jax.Array) or not is_implicit(new) or new.nbytes <= old.nbytes:
        return new
    return densify(new, "set_state", "the state has a dense array in its place, which holds less")


def _cached(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`use_implicit_args` with cached traces, except for calls within another Haiku function.

    The creators, getters and setters of the outer function act on the inner one, too, and may differ
    between calls.
    """
    cached, plain = cached_implicit_args(fun, _watch_policies), use_implicit_args(fun)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return (plain if _inside_transform() else cached)(*args, **kwargs)

    return wrapped


def _inside_transform() -> bool:
    try:
        hk.running_init()
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _watch_policies() -> Iterator[Facts]:
    """Notes the mixed precision policy of each class of modules that is used."""
    facts: Facts = []
    seen = set()

    def note(next_f: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        cls = type(context.module)
        if cls not in seen:
            seen.add(cls)
            probe = functools.partial(hk.mixed_precision.get_policy, cls)
            facts.append((probe, probe()))
        return next_f(*args, **kwargs)

    with hk.intercept_methods(note):
        yield facts
