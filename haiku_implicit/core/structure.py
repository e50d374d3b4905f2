"""Structures of values, and the common structure of several values.

The structure of a value is the value with `jax.ShapeDtypeStruct` for its leaves, or with the type of a
leaf that is a value of hijax. A loop's carry and the result of a `cond` need a common structure for
several values. It is the one with the most implicit arrays that all of them reach by materializing
others. At worst it is the dense array.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from haiku_implicit.core import compat, interpreter
from haiku_implicit.core.array import dense_struct, flatten, flatten_one_level, is_implicit
from haiku_implicit.core.sharding import in_type
from haiku_implicit.core.typing import Array


def structure(x: Array) -> Array:
    """Returns the structure of a value."""

    def of_leaf(y: Array) -> Any:
        about = compat.hi_type(y)
        if about is not None:
            return about
        sharding = compat.explicit_sharding(y)
        return compat.struct(np.shape(y), jnp.result_type(y), like=[y], sharding=sharding)

    return jax.tree.map(of_leaf, x)


def same(a: Array, b: Array) -> bool:
    """Whether two values (or structures) agree in type, static metadata, and shapes and dtypes."""
    (leaves_a, def_a), (leaves_b, def_b) = flatten(a), flatten(b)
    return def_a == def_b and all(
        same_dense(x, y) and compat.varying(x) == compat.varying(y)
        for x, y in zip(leaves_a, leaves_b, strict=True)
    )


def join(a: Array, b: Array) -> Array:
    """Returns the structure with the most implicit arrays that both reach by materializing others."""
    if same(a, b):
        return a
    if is_implicit(a) and type(a) is type(b):
        (parts_a, def_a), (parts_b, def_b) = flatten_one_level(a), flatten_one_level(b)
        if def_a == def_b and all(map(same_dense, parts_a, parts_b)):
            return def_a.unflatten(map(join, parts_a, parts_b))
    # A constant is not in a mesh: it takes the sharding of the other value.
    sharding = next(filter(None, map(compat.explicit_sharding, map(dense_struct, (a, b)))), None)
    leaves = jax.tree_util.tree_leaves((a, b))
    return compat.struct(a.shape, a.dtype, like=leaves, sharding=sharding)


def passed_on(jaxpr: Jaxpr, num_consts: int, count: int) -> list[tuple[int, int]]:
    """Finds the values of a carry that a loop's body passes on unchanged.

    Args:
      jaxpr: the body.
      num_consts: the number of its arguments before the carry.
      count: the number of values in the carry.

    Returns:
      Pairs of positions in the carry: the value at the first one is at the second one in the next step.
    """
    places = {v: i for i, v in enumerate(jaxpr.invars[num_consts:][:count])}
    outs = enumerate(jaxpr.outvars[:count])
    return [(places[v], i) for i, v in outs if not isinstance(v, Literal) and v in places]


def spread(carry: Sequence[Array], passes: Sequence[tuple[int, int]]) -> list[Array]:
    """Joins the structure of each value of a carry with the structure of the value that replaces it.

    Each trace of the loop's body would move a change only one position further: if one of `n` values
    that move on becomes dense, the body would be traced `n` times.

    Args:
      carry: structures.
      passes: the result of `passed_on`.
    """
    carry, takers = list(carry), collections.defaultdict(list)
    for source, place in passes:
        takers[source].append(place)
    changed = list(takers)
    while changed:  # structures only lose implicit parts, so this ends
        source = changed.pop()
        for place in takers.get(source, ()):
            joined = join(carry[place], carry[source])
            if not same(joined, carry[place]):
                carry[place] = joined
                changed.append(place)
    return carry


def coerce(x: Array, target: Any, name: str, reason: str = "") -> Array:
    """Brings a value to a structure, by materializing arrays in it.

    Args:
      x: a value.
      target: the structure, a `join` of the structure of `x` and others.
      name: the primitive that needs this structure.
      reason: why it needs it; by default, because values of other types meet there.
    """
    if not is_implicit(x):
        # Carries of a loop must also agree in their weak types: here none is weakly typed.
        return _like(x, target)
    if not is_implicit(target):
        reason = reason or f"it meets values of other types in {name!r}"
        return _like(interpreter.densify(x, name, reason), target)
    if same(x, target):
        return x
    parts, treedef = flatten_one_level(x)
    targets, _ = flatten_one_level(target)
    return treedef.unflatten(
        [coerce(part, to, name, reason) for part, to in zip(parts, targets, strict=True)]
    )


def _like(x: Array, target: Any) -> jax.Array:
    """Returns a dense value with the dtype and the sharding of a struct."""
    if compat.hi_type(target) is not None:
        return x
    x = in_type(jnp.asarray(x, target.dtype), target.sharding)
    return compat.vary_like(x, [target])


class Coerce:
    """A hashable function that brings a list of values to given structures (for `retrace`).

    Args:
      targets, name, reason: as for `coerce`. Values beyond the targets stay unchanged.
      meet: whether a value is brought to the `join` of its own structure and the target, and so may
        have fewer implicit arrays than the target.
    """

    def __init__(self, targets: Sequence[Array], name: str, reason: str = "", meet: bool = False):
        self.targets, self.name, self.reason, self.meet = list(targets), name, reason, meet
        leaves, treedef = jax.tree_util.tree_flatten(self.targets)
        avals = (compat.hi_type(x) or (x.shape, x.dtype, compat.varying(x)) for x in leaves)
        self.key = (treedef, tuple(avals), name, reason, meet)

    def __call__(self, values: Sequence[Array]) -> list[Array]:
        head, tail = values[: len(self.targets)], values[len(self.targets) :]
        targets = map(join, self.targets, map(structure, head)) if self.meet else self.targets
        why = self.name, self.reason
        return [*(coerce(x, to, *why) for x, to in zip(head, targets, strict=True)), *tail]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coerce) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def free_summand(x: Array) -> int | None:
    """Finds a leaf that is one term of the sum that makes the dense value.

    The dense value of `LoRA` is `w + a @ b`. If only `w` changes, by some amount, the dense value
    changes by the same amount. So any dense tangent is also a tangent of `w`, with zeros for the other
    leaves. Integer codes are not such a leaf.

    Args:
      x: an implicit array, or its structure.

    Returns:
      The index among all leaves, or None if no leaf is such a term.
    """
    leaves, treedef = flatten(x)
    dense = jax.make_jaxpr(lambda xs: interpreter.materialize_array(treedef.unflatten(xs)))
    jaxpr = dense(leaves).jaxpr
    read = [v for eqn in jaxpr.eqns for v in eqn.invars] + jaxpr.outvars
    uses = collections.Counter(v for v in read if not isinstance(v, Literal))
    once = {v for v, count in uses.items() if count == 1}
    summands = once.intersection(v for v in jaxpr.outvars if not isinstance(v, Literal))
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive is jax.lax.add_p and eqn.outvars[0] in summands:
            summands |= once.intersection(v for v in eqn.invars if not isinstance(v, Literal))
    return next((i for i, v in enumerate(jaxpr.invars) if v in summands), None)


def same_dense(a: Array, b: Array) -> bool:
    """Whether two dense values agree in shape and dtype, or in their type if it is one of hijax."""
    about = compat.hi_type(a)
    if about is not None or compat.hi_type(b) is not None:
        return bool(about == compat.hi_type(b))
    return bool(np.shape(a) == np.shape(b) and jnp.result_type(a) == jnp.result_type(b))
