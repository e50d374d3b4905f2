"""Structures of values: which implicit types two values have in common, and bringing one to the other.

The structure of a value is the value with `jax.ShapeDtypeStruct` for its leaves. Loops and branches
need one structure where several values meet: they meet at the largest one that all can be brought to,
which in the worst case is the dense array.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from haiku_implicit.core import compat, interpreter
from haiku_implicit.core.array import flatten, flatten_one_level, is_implicit


def structure(x: Any) -> Any:
    """The structure of a value."""

    def of_leaf(y: Any) -> jax.ShapeDtypeStruct:
        sharding = compat.explicit_sharding(y)
        return compat.struct(np.shape(y), jnp.result_type(y), like=[y], sharding=sharding)

    return jax.tree.map(of_leaf, x)


def same(a: Any, b: Any) -> bool:
    """Whether two values (or structures) agree in type, static metadata, and shapes and dtypes."""
    (leaves_a, def_a), (leaves_b, def_b) = flatten(a), flatten(b)
    return def_a == def_b and all(
        _same_dense(x, y) and compat.varying(x) == compat.varying(y)
        for x, y in zip(leaves_a, leaves_b, strict=True)
    )


def join(a: Any, b: Any) -> Any:
    """The largest structure that both structures can be brought to by materializing parts."""
    if same(a, b):
        return a
    if is_implicit(a) and type(a) is type(b):
        (parts_a, def_a), (parts_b, def_b) = flatten_one_level(a), flatten_one_level(b)
        if def_a == def_b and all(map(_same_dense, parts_a, parts_b)):
            return def_a.unflatten(map(join, parts_a, parts_b))
    return compat.struct(a.shape, a.dtype, like=jax.tree_util.tree_leaves((a, b)))


def coerce(x: Any, target: Any, name: str, reason: str = "") -> Any:
    """`x` brought to the structure `target`, which some `join` of its own structure gave.

    Args:
      x: a value.
      target: the structure.
      name: the primitive that this is for, and
      reason: why it has to be so; that values of different types meet there, if not given.
    """
    if not is_implicit(x):
        # A dense value may only differ in being weakly typed, which loop carries must agree in.
        return compat.vary_like(jnp.asarray(x, target.dtype), [target])
    if not is_implicit(target):
        reason = reason or f"it meets values of other types in {name!r}"
        x = jnp.asarray(interpreter.densify(x, name, reason), target.dtype)
        return compat.vary_like(x, [target])
    if same(x, target):
        return x
    parts, treedef = flatten_one_level(x)
    targets, _ = flatten_one_level(target)
    return treedef.unflatten(
        [coerce(part, to, name, reason) for part, to in zip(parts, targets, strict=True)]
    )


class Coerce:
    """A hashable function that brings a list of values to given structures (for `retrace`).

    Args:
      targets, name, reason: as for `coerce`.
      meet: whether a value that has less implicit parts than its target keeps what it has, where
        otherwise that is an error.
    """

    def __init__(self, targets: Sequence[Any], name: str, reason: str = "", meet: bool = False):
        self.targets, self.name, self.reason, self.meet = list(targets), name, reason, meet
        leaves, treedef = jax.tree_util.tree_flatten(self.targets)
        avals = ((x.shape, x.dtype, compat.varying(x)) for x in leaves)
        self.key = (treedef, tuple(avals), name, reason, meet)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        # Values beyond the targets (the stacked results of a scan) stay as they are.
        head, tail = values[: len(self.targets)], values[len(self.targets) :]
        targets = map(join, self.targets, map(structure, head)) if self.meet else self.targets
        why = self.name, self.reason
        return [*(coerce(x, to, *why) for x, to in zip(head, targets, strict=True)), *tail]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coerce) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def free_summand(x: Any) -> int | None:
    """Which leaf of an implicit array its dense value is a sum of, with any other terms.

    The dense value moves as that leaf does, if nothing else moves: so every dense tangent is the
    tangent of some leaves. `LoRA` has such a leaf (`w`, if that is dense), and every type that wraps
    a dense array; integer codes are none.

    Args:
      x: an implicit array, or its structure.

    Returns:
      The index of the leaf among all leaves, or None.
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


def tangent_leaves(x: Any, tangent: jax.Array, place: int) -> list[Any]:
    """Tangents of the leaves of a value, of which the dense value has a given tangent.

    Args:
      x: the value.
      tangent: what its dense value moves by.
      place: what `free_summand` says.
    """
    leaves = jax.tree_util.tree_leaves(x)
    dots = [_no_tangent(leaf) for leaf in leaves]
    dots[place] = tangent
    return dots


def _no_tangent(leaf: jax.Array) -> Any:
    if jnp.issubdtype(leaf.dtype, np.inexact):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _same_dense(a: Any, b: Any) -> bool:
    return bool(np.shape(a) == np.shape(b) and jnp.result_type(a) == jnp.result_type(b))
