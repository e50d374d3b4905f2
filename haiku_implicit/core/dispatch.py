"""The table of rules: the functions that run primitives on operands of given types.

This module holds the table. Plum says which of several rules for the same operands is more specific.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, ForwardRef, NamedTuple, Union, get_args, get_origin

import jax
from jax.extend.core import primitives as jex_primitives

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.typing import Primitive, Result

Rule = Callable[..., Result]


class Method(NamedTuple):
    """A rule, and the types that it is for; `varargs` is None without a parameter `*operands`."""

    rule: Rule
    types: tuple[Any, ...]
    varargs: Any
    precedence: int


# The rules of each primitive, and those that nothing has looked up yet: functions that read them.
_rules: dict[Primitive, list[Method]] = {}
_unread: dict[Primitive, list[Callable[[], Method]]] = {}
_reading = threading.RLock()

# Counts the calls of `primitive_handler`: traces from before the last call must not be used again.
_registrations = 0

COMMUTATIVE = frozenset(
    getattr(jax.lax, f"{name}_p")
    for name in ("add", "mul", "max", "min", "and", "or", "xor", "eq", "ne")
) | {compat.add_any_p}


def primitive_handler(
    primitives: Primitive | str | Iterable[Primitive | str], precedence: int = 0
) -> Callable[[Rule], Rule]:
    """Registers a rule, which runs primitives on operands of the annotated types.

    The rule is called as `rule(primitive, *operands, **params)`, with the parameters of the primitive
    by keyword. It returns an array, an implicit array, a list of them if the primitive has several
    results, or `NotImplemented` to leave the case to the next rule. A parameter whose value is None
    may be missing in the rule's signature, since JAX adds such parameters in new versions.
    An operand that is not annotated, or annotated with `ArrayValue`, may be dense or
    implicit; `jax.Array` means dense; an implicit type means that type and its subclasses. In a rule
    a field of an implicit operand always reads as a dense array, even if it holds another implicit
    array: operations on it are dispatched in turn.
    Operands that are one array in the program are one object in the rule: `x is y` in `x * x`.

    The order in which rules are tried:

    1. rules whose annotations match the operands in their order, the most specific first. If rules
       are equally specific, or cannot be compared, the higher `precedence` comes first, then the
       earlier registration;
    2. a rule that returns `NotImplemented` passes on to the next one;
    3. for a commutative primitive of two operands, unless the class of the implicit one sets
       `commute_ops=False`: the rules for swapped operands. If only the second operand is implicit,
       the swapped order, implicit one first, comes before the given order;
    4. a primitive that carries a jaxpr is retraced (see `docs/architecture.md`);
    5. operands whose types define `ImplicitArray.equivalent` are replaced by their equivalents, and
       the search begins again;
    6. the implicit operands are materialized, visibly, and the primitive itself runs.

    Args:
      primitives: one primitive or several; a string is looked up once, as `jax.lax.<name>_p` or
        `jax.extend.core.primitives.<name>_p`.
      precedence: see step 1.

    Returns:
      The decorator; it returns the rule unchanged.

    Raises:
      ValueError: for a name that no primitive has.
      TypeError: for anything other than primitives and names.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, haiku_implicit as hki
      >>> @dataclasses.dataclass
      ... class Diagonal(hki.ImplicitArray):
      ...   d: jax.Array
      ...   def materialize(self):
      ...     return jnp.diag(self.d)
      >>> @hki.primitive_handler('dot_general')
      ... def dot_diagonal(primitive, x: jax.Array, w: Diagonal, *, dimension_numbers, **params):
      ...   if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
      ...     return NotImplemented
      ...   return x * w.d
      >>> print(hki.use_implicit_args(jnp.matmul)(jnp.ones((1, 2)), Diagonal(jnp.array([2., 3.]))))
      [[2. 3.]]
    """
    resolved = as_primitives(primitives)

    def register(rule: Rule) -> Rule:
        global _registrations
        read = functools.cache(functools.partial(_read, rule, precedence))
        if not _can_wait(rule):
            read()
        for primitive in resolved:
            _unread.setdefault(primitive, []).append(read)
        _registrations += 1
        rules_for.cache_clear()
        return rule

    return register


def _can_wait(rule: Rule) -> bool:
    """Whether the types of a rule are the same whenever they are read, and cannot be wrong.

    A text may name a type of the function around the rule; Plum checks a default value.
    """
    if not isinstance(rule, types.FunctionType) or rule.__defaults__:
        return False
    return not any(map(_has_text, rule.__annotations__.values()))


def _has_text(annotation: Any) -> bool:
    """Whether an annotation is a text, or a union with one."""
    return isinstance(annotation, str | ForwardRef) or any(map(_has_text, get_args(annotation)))


def _read(rule: Rule, precedence: int) -> Method:
    if _can_wait(rule):
        parameters = inspect.signature(rule).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = tuple(p.annotation for p in parameters if p.kind in kinds)
        varargs = next((p.annotation for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    else:
        import plum

        full = plum.Signature.from_callable(rule)
        found, varargs = full.types, full.varargs if full.has_varargs else None
    # The first parameter is the primitive, the key of the table.
    types = tuple(map(_any_is_object, found[1:]))
    return Method(rule, types, _any_is_object(varargs), precedence)


def _any_is_object(annotation: Any) -> Any:
    """The annotation, or `object` if it is missing: older Plums do not order `Any` last."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    anything = (Any, inspect.Parameter.empty)
    found = get_args(annotation) if is_union else (annotation,)
    return object if any(t in anything for t in found) else annotation


def _rules_of(primitive: Primitive) -> list[Method]:
    """The rules of a primitive. A later rule replaces an earlier one for the same types."""
    with _reading:
        methods, unread = _rules.setdefault(primitive, []), _unread.get(primitive, [])
        while unread:
            new = unread[0]()
            methods[:] = [m for m in methods if m[1:] != new[1:]] + [new]
            del unread[0]
        return list(methods)


@functools.lru_cache(maxsize=4096)
def keywords_of(rule: Rule) -> frozenset[str] | None:
    """The names of the parameters that a rule takes by keyword, or None if it has `**params`."""
    parameters = inspect.signature(rule).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def generation() -> int:
    """A number that changes with every new rule."""
    return _registrations


def as_primitives(
    primitives: Primitive | str | Iterable[Primitive | str],
) -> list[Primitive]:
    """The primitives that a handler is for: one or several, or their names."""
    if isinstance(primitives, str) or not isinstance(primitives, Iterable):
        primitives = [primitives]
    return list(map(_as_primitive, primitives))


def _as_primitive(primitive: Primitive | str) -> Primitive:
    if isinstance(primitive, Primitive):
        return primitive
    if not isinstance(primitive, str):
        raise type_error(f"primitives: expected primitives or their names, got {primitive!r}")
    if found := _find(primitive.removesuffix("_p")):
        return found
    raise value_error(
        f"primitives: no primitive is called {primitive!r} in jax.lax or "
        "jax.extend.core.primitives; pass the primitive object itself"
    )


_NOT_IN_LAX = {
    "remat": compat.remat_p,
    "checkpoint": compat.remat_p,
    "ragged_dot_general": compat.ragged_dot_general_p,
    "shard_map": compat.shard_map_p,
    "pjit": jex_primitives.jit_p,
}


def _find(name: str) -> Primitive | None:
    places = (getattr(place, f"{name}_p", None) for place in (jax.lax, jex_primitives))
    found = (*places, _NOT_IN_LAX.get(name))
    return next((p for p in found if isinstance(p, Primitive)), None)


def named(names: str) -> list[Primitive]:
    """The primitives with these names, separated by spaces, that the installed JAX has."""
    return [p for p in map(_find, names.split()) if p is not None]


def rules() -> dict[Primitive, tuple[Method, ...]]:
    """All rules, by their primitives."""
    return {primitive: tuple(_rules_of(primitive)) for primitive in list(_unread)}


@functools.cache
def rules_for(
    primitive: Primitive, kinds: tuple[type, ...]
) -> tuple[tuple[Rule, tuple[int, ...]], ...]:
    """The rules to try for operands of these types, each with the order of its operands.

    Args:
      primitive: the primitive.
      kinds: the class of each operand; `jax.Array` stands for all dense values.
    """
    straight = tuple(range(len(kinds)))
    orders = [straight]
    may_swap = all(t.commute_ops for t in kinds if issubclass(t, ImplicitArray))
    if primitive in COMMUTATIVE and len(kinds) == 2 and may_swap:
        first_is_dense = not issubclass(kinds[0], ImplicitArray)
        orders = [(1, 0), straight] if first_is_dense else [straight, (1, 0)]
    return tuple(
        (rule, order)
        for order in orders
        for rule in _most_specific_first(primitive, [kinds[i] for i in order])
    )


def _most_specific_first(primitive: Primitive, kinds: list[type]) -> list[Rule]:
    left = [m for m in _rules_of(primitive) if _accepts(m, kinds)]
    if len(left) < 2:
        return [m.rule for m in left]  # most products, which need not wait for Plum's import
    signatures = {id(m): _signature(m) for m in left}
    # A later rule also replaces an earlier one for types that are equal, but written in another way.
    left = [
        m
        for i, m in enumerate(left)
        if not any(
            (signatures[id(m)], m.precedence) == (signatures[id(n)], n.precedence)
            for n in left[i + 1 :]
        )
    ]

    def more_specific(a: Method, b: Method) -> bool:
        first, second = signatures[id(a)], signatures[id(b)]
        return bool(first <= second and not second <= first)

    ordered = []
    while left:
        best = [m for m in left if not any(more_specific(n, m) for n in left)]
        chosen = max(best, key=lambda m: m.precedence)  # the first of equals
        ordered.append(chosen.rule)
        left.remove(chosen)
    return ordered


def _accepts(method: Method, kinds: list[type]) -> bool:
    """Whether a rule is for operands of these types."""
    more = len(kinds) - len(method.types)
    if more < 0 or (more and method.varargs is None):
        return False
    try:
        return all(map(issubclass, kinds, (*method.types, *[method.varargs] * more)))
    except TypeError:  # an annotation that is neither a class nor a union of classes
        return bool(_signature(Method(method.rule, tuple(kinds), None, 0)) <= _signature(method))


def _signature(method: Method) -> Any:
    # Imported here, as Plum takes as long to import as the types of this package.
    import plum

    varargs = {} if method.varargs is None else {"varargs": method.varargs}
    return plum.Signature(*method.types, **varargs)
