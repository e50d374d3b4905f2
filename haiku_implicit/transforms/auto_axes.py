"""`auto_in_axes`: the arrays of a tree that `jax.vmap` maps over, found by their leading axes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from haiku_implicit.core import containers
from haiku_implicit.core.array import flatten, is_implicit, num_batch_axes, short
from haiku_implicit.core.messages import see
from haiku_implicit.core.predicates import Targets, check_list, no_match, path_of, predicate_of
from haiku_implicit.core.typing import Tree, TreeDef


def auto_in_axes(tree: Tree, size: int, *, exclude: Targets | None = None) -> Tree:
    """Returns the `in_axes` of `jax.vmap` for a tree: 0 for arrays whose first axis has length `size`.

    All other leaves get None: arrays without axes, and leaves that are not arrays (strings, flags,
    functions). An implicit array is one array with the axes of the tensor that it stands for.

    A parameter with as many rows as there are examples is mistaken for a batch. If the vmapped function
    also takes parameters, name them in `exclude`.

    Around a wrapped function, `jax.vmap` slices the leaves of an implicit array, and so can map only
    over its batch axes, as in a stack of LoRA weights. An implicit array whose leading axis is not a
    batch axis is an error (a `Zeros` does not have leaves; the rows of a matrix are not the rows of its
    factors). Within a wrapped function it is an ordinary array, so that this maps over anything:

        hki.use_implicit_args(lambda *args: jax.vmap(f, hki.auto_in_axes(args, 8))(*args))(*args)

    Args:
      tree: the tuple of a function's arguments, or any tree.
      size: the number of examples.
      exclude: the names of leaves that are not mapped over, although their leading axis has this
        length: a regular expression that the whole of a path `key/key/...` has to match, a list of
        such paths, or a predicate of the path without its last key, the last key, and the array.

    Returns:
      A tree like the given one with 0 or None for each leaf; an implicit array is one leaf. The result
      for a tuple of arguments is a complete `in_axes`; the result for a single argument goes into a
      tuple, as `in_axes=(axes,)`.

    Raises:
      ValueError: if no leading axis has this length, if `jax.vmap` cannot slice an implicit array with
        such an axis, and if `exclude` matches nothing or is not a regular expression.
      TypeError: for a container whose leaves cannot have different axes (Haiku's immutable dict), and
        for an `exclude` of another type.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = jax.random.normal(jax.random.key(0), (8, 4))
      >>> problem = {'A': hki.QuantizedMatrix.quantize(w, 'int8'), 'x': jnp.ones((5, 4)),
      ...            'offset': hki.Zeros(shape=(8,)), 'solver': 'newton'}
      >>> axes = hki.auto_in_axes(problem, 5)
      >>> axes
      {'A': None, 'offset': None, 'solver': None, 'x': 0}
      >>> f = hki.use_implicit_args(lambda p: p['A'] @ p['x'] + p['offset'])
      >>> jax.vmap(f, (axes,))(problem).shape
      (5, 8)
    """
    size = operator.index(size)
    if containers.opened(tree) is not tree:
        raise TypeError(
            "auto_in_axes: the tree has a mapping that keeps its leaves flat, which cannot have an "
            "axis for some of them alone. Give a dict (hk.data_structures.to_mutable_dict)"
            f" {see('a-container-with-flat-leaves')}"
        )
    treedef: TreeDef
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_implicit)
    leaves = [(*_names(path), x) for path, x in found]
    fitting = [np.ndim(x) > 0 and np.shape(x)[0] == size for *_, x in leaves]
    if not any(fitting):
        shapes = sorted({short(x) for *_, x in leaves if np.ndim(x) > 0})
        raise ValueError(
            f"auto_in_axes: no array has a leading axis of length {size}. There are: "
            f"{', '.join(shapes) or 'no arrays with axes'}"
            f" {see('no-leading-axis')}"
        )
    excluded = _excluded(leaves, exclude)
    axes = [0 if fits and not out else None for fits, out in zip(fitting, excluded, strict=True)]
    for (module_name, name, x), axis in zip(leaves, axes, strict=True):
        if axis == 0 and is_implicit(x):
            _check_sliceable(path_of(module_name, name), x)
    return treedef.unflatten(axes)


def _names(path: Any) -> tuple[str, str]:
    """Returns the keys of a path before the last one, joined, and the last one."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path] or [""]
    return "/".join(keys[:-1]), keys[-1]


def _excluded(leaves: list[tuple[str, str, Any]], exclude: Targets | None) -> list[bool]:
    """Whether `exclude` selects each of the leaves."""
    if exclude is None:
        return [False] * len(leaves)
    predicate = predicate_of("exclude", exclude)
    paths = [path_of(module_name, name) for module_name, name, _ in leaves]
    check_list("exclude", exclude, paths)
    chosen = [bool(predicate(*leaf)) for leaf in leaves]
    if not any(chosen) and not isinstance(exclude, bool):
        raise no_match("exclude", exclude, paths, kind="leaves")
    return chosen


def _check_sliceable(path: str, x: Any) -> None:
    """Raises unless slices of the leaves of `x` make a slice of the tensor."""
    leaves, treedef = flatten(x)
    if leaves and num_batch_axes(x) > 0 and all(np.shape(y)[:1] == x.shape[:1] for y in leaves):
        shapes = [jax.ShapeDtypeStruct(np.shape(y)[1:], y.dtype) for y in leaves]
        sliced = treedef.unflatten(shapes)
        # `jax.vmap` does not change static metadata, but a slice may have to.
        if flatten(sliced.with_leading_axis(None))[1] == treedef:
            return
    raise ValueError(
        f"auto_in_axes: {path or 'the tree'} is a {type(x).__name__} {short(x)}, whose leading axis "
        "jax.vmap cannot slice: it is not a batch axis that each of its leaves has. If it is a "
        "parameter, name it in exclude=. If it is a batch, use jax.vmap within the wrapped function "
        "(use_implicit_args(lambda *args: jax.vmap(f, auto_in_axes(args, size))(*args))), or make it "
        "dense by haiku_implicit.materialize"
        f" {see('no-leading-axis')}"
    )
