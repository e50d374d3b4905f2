"""The table of rules: the functions that run primitives on operands of given types.

Plum compares types with annotations. This module holds the table, and orders the rules.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import plum
from jax.extend.core import primitives as jex_primitives

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.typing import Primitive, Result

Rule = Callable[..., Result]

_rules: dict[Primitive, list[plum.Method]] = {}

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
    if isinstance(primitives, str) or not isinstance(primitives, Iterable):
        primitives = [primitives]
    resolved = [_as_primitive(p) for p in primitives]

    def register(rule: Rule) -> Rule:
        global _registrations
        full = plum.Signature.from_callable(rule, precedence=precedence)
        # The first parameter is the primitive, the key of the table. Plum reads a missing annotation as
        # `Any`, which its older versions do not treat as the least specific type.
        types = [object if t is Any else t for t in full.types[1:]]
        varargs = object if full.varargs is Any else full.varargs
        signature = plum.Signature(*types, varargs=varargs, precedence=precedence)
        method = plum.Method(rule, signature, function_name=getattr(rule, "__name__", "rule"))
        for primitive in resolved:
            methods = _rules.setdefault(primitive, [])
            methods[:] = [m for m in methods if m.signature != signature] + [method]
        _registrations += 1
        rules_for.cache_clear()
        return rule

    return register


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


def _as_primitive(primitive: Primitive | str) -> Primitive:
    if isinstance(primitive, Primitive):
        return primitive
    if not isinstance(primitive, str):
        raise TypeError(f"primitives: expected primitives or their names, got {primitive!r}")
    if found := _find(primitive.removesuffix("_p")):
        return found
    raise ValueError(
        f"primitives: no primitive is called {primitive!r} in jax.lax or "
        "jax.extend.core.primitives; pass the primitive object itself"
    )


_NOT_IN_LAX = {
    "remat": compat.remat_p,
    "checkpoint": compat.remat_p,
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


def rules() -> dict[Primitive, tuple[plum.Method, ...]]:
    """All rules, by their primitives."""
    return {primitive: tuple(methods) for primitive, methods in _rules.items()}


@functools.cache
def rules_for(
    primitive: Primitive, types: tuple[type, ...]
) -> tuple[tuple[Rule, tuple[int, ...]], ...]:
    """The rules to try for operands of these types, each with the order of its operands.

    Args:
      primitive: the primitive.
      types: the class of each operand; `jax.Array` stands for all dense values.
    """
    straight = tuple(range(len(types)))
    orders = [straight]
    may_swap = all(t.commute_ops for t in types if issubclass(t, ImplicitArray))
    if primitive in COMMUTATIVE and len(types) == 2 and may_swap:
        first_is_dense = not issubclass(types[0], ImplicitArray)
        orders = [(1, 0), straight] if first_is_dense else [straight, (1, 0)]
    found = []
    for order in orders:
        target = plum.Signature(*(types[i] for i in order))
        found += [(rule, order) for rule in _most_specific_first(primitive, target)]
    return tuple(found)


def _most_specific_first(primitive: Primitive, target: plum.Signature) -> list[Rule]:
    left = [m for m in _rules.get(primitive, ()) if target <= m.signature]
    ordered = []
    while left:
        best = [m for m in left if not any(_more_specific(n, m) for n in left)]
        chosen = max(best, key=lambda m: m.signature.precedence)  # the first of equals
        ordered.append(chosen.implementation)
        left.remove(chosen)
    return ordered


def _more_specific(a: plum.Method, b: plum.Method) -> bool:
    return bool(a.signature <= b.signature and not b.signature <= a.signature)
