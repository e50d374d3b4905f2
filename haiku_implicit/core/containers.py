"""Trees with containers that keep their leaves flat, and so hide the implicit arrays in them.

JAX asks `is_leaf` about each node that it finds, but it does not look into such a container: Haiku's
immutable dict (`hk.data_structures.to_immutable_dict`) gives JAX all arrays inside it, and their
structure as static data. So trees whose leaves are implicit arrays are opened first.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.messages import see
from haiku_implicit.core.typing import Array, Tree, TreeDef

IsLeaf = Callable[[Any], bool]

_NOT_FLAT = (dict, list, tuple, str, int, float, complex, type(None), np.ndarray, np.generic)


class _Opened:
    """A tree node that replaces a mapping with flat leaves, and shows JAX the items of the mapping.

    Unflattening gives a mapping of the original type.
    """

    def __init__(self, kind: type, items: dict[Any, Any]):
        self.kind, self.items = kind, items


def _flatten_with_keys(x: _Opened) -> Any:
    keys = tuple(sorted(x.items))
    children = [(jax.tree_util.DictKey(key), x.items[key]) for key in keys]
    return children, (x.kind, keys)


def _rebuild(about: Any, children: Any) -> Any:
    kind, keys = about
    return kind(dict(zip(keys, children, strict=True)))


jax.tree_util.register_pytree_with_keys(_Opened, _flatten_with_keys, _rebuild)


def opened(tree: Tree, is_leaf: IsLeaf = is_implicit, as_dicts: bool = False) -> Tree:
    """Returns a tree in which JAX's functions find each leaf, for use with the same `is_leaf`.

    Args:
      tree: any tree.
      is_leaf: as in JAX's functions.
      as_dicts: whether flat mappings become dicts. By default JAX's functions return them with their
        original types.

    Raises:
      TypeError: for a container with implicit arrays that is flat and not a mapping.
    """
    leaves, treedef, found = _search(tree, is_leaf)

    def node_for(x: Any) -> Any:
        if id(x) not in found:
            return x
        items = {key: opened(y, is_leaf, as_dicts) for key, y in found[id(x)].items()}
        return items if as_dicts else _Opened(type(x), items)

    return treedef.unflatten(map(node_for, leaves)) if found else tree


def flatten(tree: Tree, is_leaf: IsLeaf = is_implicit) -> tuple[list[Array], TreeDef]:
    """`jax.tree.flatten` of `opened(tree)`."""
    leaves, treedef, found = _search(tree, is_leaf)
    if found:
        return jax.tree_util.tree_flatten(opened(tree, is_leaf), is_leaf)
    return leaves, treedef


def _search(tree: Tree, is_leaf: IsLeaf) -> tuple[list[Any], Any, dict[int, Any]]:
    """Flattens a tree with flat containers as leaves; also returns their contents, by `id`."""
    found: dict[int, Any] = {}

    def stops(x: Any) -> bool:
        if is_leaf(x):
            return True
        held = _held_flat(x)
        if held is not None:
            found[id(x)] = held
        return held is not None

    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=stops)
    return leaves, treedef, found


def _held_flat(x: Any) -> Array:
    """The contents of a flat mapping as a dict; None for anything else."""
    if isinstance(x, _NOT_FLAT) or is_implicit(x) or isinstance(x, jax.Array):
        return None
    treedef: TreeDef
    children, treedef = jax.tree_util.tree_flatten(x, is_leaf=lambda y: y is not x)
    _, static = treedef.node_data() or (None, None)
    if isinstance(x, Mapping) and isinstance(static, jax.tree_util.PyTreeDef):
        return static.unflatten(children)
    for held in static if isinstance(static, tuple) else (static,):
        if isinstance(held, jax.tree_util.PyTreeDef):
            _check_no_implicit(x, held)
    return None


def _check_no_implicit(x: Any, held: Any) -> None:
    """Raises if a container with flat leaves of the structure `held` contains implicit arrays."""
    leaves = jax.tree_util.tree_leaves(x)
    if held.num_leaves != len(leaves):
        return
    found = {type(y).__name__ for y in flatten(held.unflatten(leaves))[0] if is_implicit(y)}
    if found:
        raise TypeError(
            f"{type(x).__name__}: this container keeps its leaves flat, beside their structure, so "
            f"that the implicit arrays in it ({', '.join(sorted(found))}) cannot be told from dense "
            "ones. Give a dict, a list or a dataclass that holds the tree itself"
            f" {see('a-container-with-flat-leaves')}"
        )
