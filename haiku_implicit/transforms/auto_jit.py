"""`auto_jit`: `jax.jit` that finds the static leaves of its arguments itself."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, Self, TypeVar, overload

import jax

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.bind import is_hashable
from haiku_implicit.core.eager import BY_IDENTITY
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.transform import is_value, tree_flatten_with_implicit
from haiku_implicit.core.typing import Array, Tree

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Jitted(Protocol[P, R]):
    """What `auto_jit` returns, for type checkers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]: ...

    def cache_info(self) -> Any: ...


@overload
def auto_jit(fun: Callable[P, R], *, cache_size: int = 128) -> Jitted[P, R]: ...


@overload
def auto_jit(*, cache_size: int = 128) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def auto_jit(fun: Any = None, *, cache_size: int = 128) -> Any:
    """`jax.jit` that traces all arrays at any depth of the arguments; all other leaves are static.

    Arrays are JAX's and NumPy's arrays, tracers, and implicit arrays. The function gets all other
    leaves of the arguments (flags, strings, functions, *Python numbers*) unchanged, and is compiled
    once for each combination of them. Give a number that changes often as an array. If `fun` cannot
    take implicit arrays, use `auto_jit(hki.use_implicit_args(fun))`, as with `jax.jit`.

    Static leaves are compared by their type, `==` and hash (floats by their digits, so that 0.0 is
    not -0.0). Functions, and objects whose class does not define `==`, are compared by identity, and
    are not kept alive.

    Methods work, whether the decorator is in the class or the method is bound. An object that is
    an argument, such as `self`, and is neither a pytree nor hashable by its contents, is taken apart:
    arrays in its attributes (or in trees there) are traced, the other attributes are static, and
    changes in both take effect. The function gets a copy of the object. Objects within its attributes
    count by identity; make them pytrees (`jax.tree_util.register_dataclass`) if they change.

    This is like the `AutoJIT` of Dyro and Richards' JAX tutorial. But `AutoJIT` decides about static
    arguments at its first call; it treats trees, NumPy arrays and implicit arrays as static; and its
    variant for trees drops the keyword arguments of calls and keeps all compiled functions.

    Args:
      fun: a function or method that JAX can trace, given the static leaves. Without it, a decorator
        is returned, as in `@auto_jit(cache_size=8)`.
      cache_size: the number of combinations of structures and static leaves whose compiled functions
        are kept. The least recently used are dropped.

    Returns:
      The compiled function, with the same signature. Its `cache_info()` is as in
      `functools.lru_cache`.

    Raises:
      TypeError: in a call, for a leaf that is neither an array nor hashable (with its path in the
        arguments), and if the function sets attributes of an argument, which would be lost.
      ValueError: if `cache_size` is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> class Solver:
      ...   def __init__(self, A, kind):
      ...     self.A, self.kind = A, kind
      ...   @hki.auto_jit
      ...   def residual(self, x, options):
      ...     out = hki.use_implicit_args(jnp.matmul)(self.A, x)
      ...     norm = jnp.sum if self.kind == 'l1' else jnp.max
      ...     return norm(jnp.abs(out)) if options['reduce'] else out
      >>> solver = Solver(hki.LoRA(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2))), 'l1')
      >>> print(solver.residual(jnp.arange(2.0), {'reduce': True}))
      3.0
      >>> solver.kind = 'max'
      >>> print(solver.residual(jnp.arange(2.0), options={'reduce': True}))
      2.0
      >>> Solver.residual.cache_info().currsize
      2
    """
    if fun is None:
        return functools.partial(auto_jit, cache_size=cache_size)
    if not isinstance(cache_size, int) or cache_size < 1:
        raise value_error(
            f"auto_jit: cache_size must be an integer of 1 or more, got {cache_size!r}"
        )

    @functools.lru_cache(maxsize=cache_size)
    def compiled(static: _Part) -> Callable[[list[Any]], Any]:
        def run(values: list[Array]) -> Tree:
            made = _Rebuilt(iter(values))
            fun, args, kwargs = static.rebuild(made)
            out = fun(*args, **kwargs)
            made.check_unchanged()
            return out

        run.__name__ = getattr(fun, "__name__", type(fun).__name__)
        return jax.jit(run)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        values: list[Array] = []
        try:
            static = _tree((fun, args, kwargs), values, _argument)
            program = compiled(static)
        except _NotHashable as e:
            raise _named(fun, args, kwargs, e) from None
        return program(values)

    wrapped.cache_info = compiled.cache_info  # type: ignore[attr-defined]
    return wrapped


# --- the static part of the arguments ----------------------------------------------------------------


class _Rebuilt:
    """The state of a rebuild: the values to insert, and the rebuilt objects with their attributes."""

    def __init__(self, values: Iterator[Any]):
        self.values = values
        self.objects: list[tuple[Any, dict[str, Any]]] = []

    def check_unchanged(self) -> None:
        """Raises if attributes of an object have changed since it was rebuilt."""
        for x, before in self.objects:
            for name, (old_leaves, old_treedef) in before.items():
                leaves, treedef = tree_flatten_with_implicit(vars(x).get(name))
                if treedef != old_treedef or any(
                    a is not b for a, b in zip(leaves, old_leaves, strict=True)
                ):
                    raise type_error(
                        f"auto_jit: the function sets the attribute {name!r} of a "
                        f"{type(x).__name__}, which would be lost: it has a copy of the object. "
                        "Return the new value, and set the attribute outside"
                    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of the arguments without its values, hashable.

    Attributes:
      key: by which parts are compared.
      rebuild: makes the part with values in it, which it takes in order.
    """

    key: Any
    rebuild: Callable[[_Rebuilt], Any] = dataclasses.field(compare=False)


_VALUE = _Part("value", lambda made: next(made.values))  # an array, dense or implicit


class _Identity:
    """Compares an object by identity, and does not keep it alive if weak references to it work."""

    def __init__(self, x: Any):
        self.id = id(x)
        try:
            self.get: Callable[[], Any] = weakref.ref(x)
        except TypeError:
            self.get = lambda: x

    def __hash__(self) -> int:
        return self.id

    def __eq__(self, other: Any) -> bool:
        # Python may reuse the id of a deleted object; `get` then returns None.
        return isinstance(other, _Identity) and self.get() is other.get() is not None


def _constant(x: Any, contents: Any) -> _Part:
    """A static leaf that is compared by its contents."""
    return _Part((type(x), contents), lambda made: x)


def _same(x: Any) -> _Part:
    """A static leaf that is compared by identity."""
    itself = _Identity(x)
    return _Part(itself, lambda made: itself.get())


def _method(x: types.MethodType, of: _Part) -> _Part:
    """A bound method."""
    fun = _Identity(x.__func__)
    return _Part((fun, of), lambda made: types.MethodType(fun.get(), of.rebuild(made)))


def _object(x: Any, attributes: dict[str, _Part]) -> _Part:
    """An object that is taken apart into its attributes."""
    itself = _Identity(x)

    def rebuild(made: _Rebuilt) -> Any:
        new = _copy(itself.get())
        vars(new).update({name: part.rebuild(made) for name, part in attributes.items()})
        before = {name: tree_flatten_with_implicit(vars(new)[name]) for name in attributes}
        made.objects.append((new, before))
        return new

    return _Part((itself, tuple(attributes.items())), rebuild)


def _copy(x: Any) -> Any:
    """Returns another object with the attributes of `x`, even if `copy.copy` returns `x` itself."""
    other = copy.copy(x)
    if other is x:
        other = object.__new__(type(x))
        vars(other).update(vars(x))
    return other


def _tree(tree: Tree, values: list[Array], leaf: Callable[[Any, list[Array]], _Part]) -> _Part:
    """A tree without its values, which it adds to `values`; an implicit array is one leaf of it."""
    leaves, treedef = tree_flatten_with_implicit(tree)
    parts = tuple([leaf(x, values) for x in leaves])
    return _Part((treedef, parts), lambda made: treedef.unflatten([x.rebuild(made) for x in parts]))


class _NotHashable(Exception):
    """A leaf that cannot be static.

    Attributes:
      x: the value.
      leaf: the leaf of the arguments that is `x`, or has it in an attribute.
      path: the path from `leaf` to `x`.
    """

    def __init__(self, x: Any, leaf: Any, path: str = ""):
        self.x, self.leaf, self.path = x, leaf, path


# Functions, and objects made from them, do not compute with attributes.
_FUNCTIONS = (*BY_IDENTITY, types.ModuleType, functools.partial)


def _argument(x: Any, values: list[Array]) -> _Part:
    """Converts a leaf of the arguments. Objects and the `self` of bound methods are taken apart."""
    if isinstance(x, types.MethodType):
        return _method(x, _argument(x.__self__, values))
    if isinstance(x, _FUNCTIONS) or not hasattr(x, "__dict__") or is_value(x) or _has_contents(x):
        return _leaf(x, values)
    attributes = {}
    for name in sorted(vars(x)):
        try:
            attributes[name] = _tree(vars(x)[name], values, _leaf)
        except _NotHashable as e:
            path = "/".join((name, *_path_to(e.leaf, vars(x)[name])))
            raise _NotHashable(e.x, x, f".{path}") from None
    return _object(x, attributes)


def _leaf(x: Any, values: list[Array]) -> _Part:
    """Converts a leaf to a value or a static part, without taking it apart."""
    if is_value(x):
        values.append(x)
        return _VALUE
    if isinstance(x, types.MethodType):
        return _method(x, _same(x.__self__))
    if isinstance(x, float | complex):
        return _constant(x, repr(x))
    if _has_contents(x):
        return _constant(x, x)
    if _has_identity(x):
        return _same(x)
    raise _NotHashable(x, x)


def _has_identity(x: Any) -> bool:
    """Whether `x` is hashed by its identity."""
    kind: Any = type(x)
    return kind.__hash__ is object.__hash__


def _has_contents(x: Any) -> bool:
    """Whether the hash of `x` depends on its contents."""
    return not _has_identity(x) and is_hashable(x)


def _path_to(leaf: Any, tree: Tree) -> list[str]:
    """The keys on the path to a leaf."""
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_implicit)[0]:
        if x is leaf:
            return [jax.tree_util.keystr((key,), simple=True) for key in path]
    return []


def _named(fun: Any, args: Any, kwargs: Any, e: _NotHashable) -> TypeError:
    """Returns the error for a leaf that cannot be static, with its path in the arguments."""
    arguments = {"self": getattr(fun, "__self__", fun)}
    try:
        arguments |= inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # without a signature, or for a call that does not fit it
        arguments |= dict(args=args, **kwargs)
    name = "/".join(_path_to(e.leaf, arguments))
    return type_error(
        f"auto_jit: {name}{e.path} is neither an array nor hashable, so that it can be neither traced "
        f"nor static: a {type(e.x).__name__}, {e.x!r:.60}. Make it a tuple, a frozenset or a frozen "
        "dataclass, or register its class as a pytree (jax.tree_util.register_dataclass)"
    )
