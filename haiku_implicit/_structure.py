"""Structures of values: which implicit types two values have in common, and bringing one to the other.

The structure of a value is the value with `jax.ShapeDtypeStruct` for its leaves. Loops and branches
need one structure where several values meet: they meet at the largest one that all can be brought to,
which in the worst case is the dense array.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit import _compat, _interpreter
from haiku_implicit._array import flatten, flatten_one_level, is_implicit


def structure(x: Any) -> Any:
    """The structure of a value."""
    return jax.tree.map(lambda y: _compat.struct(np.shape(y), jnp.result_type(y), like=[y]), x)


def same(a: Any, b: Any) -> bool:
    """Whether two values (or structures) agree in type, static metadata, and shapes and dtypes."""
    (leaves_a, def_a), (leaves_b, def_b) = flatten(a), flatten(b)
    return def_a == def_b and all(
        _same_dense(x, y) and _compat.varying(x) == _compat.varying(y)
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
    return _compat.struct(a.shape, a.dtype, like=jax.tree_util.tree_leaves((a, b)))


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
        return _compat.vary_like(jnp.asarray(x, target.dtype), [target])
    if not is_implicit(target):
        reason = reason or f"it meets values of other types in {name!r}"
        x = jnp.asarray(_interpreter.densify(x, name, reason), target.dtype)
        return _compat.vary_like(x, [target])
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
    """

    def __init__(self, targets: Sequence[Any], name: str, reason: str = ""):
        self.targets, self.name, self.reason = list(targets), name, reason
        leaves, treedef = jax.tree_util.tree_flatten(self.targets)
        avals = ((x.shape, np.dtype(x.dtype).name, _compat.varying(x)) for x in leaves)
        self.key = (treedef, tuple(avals), name, reason)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        # Values beyond the targets (the stacked results of a scan) stay as they are.
        head, tail = values[: len(self.targets)], values[len(self.targets) :]
        why = self.name, self.reason
        own = [coerce(x, to, *why) for x, to in zip(head, self.targets, strict=True)]
        return [*own, *tail]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coerce) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _same_dense(a: Any, b: Any) -> bool:
    return bool(np.shape(a) == np.shape(b) and jnp.result_type(a) == jnp.result_type(b))
