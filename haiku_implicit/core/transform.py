"""`use_implicit_args`: flattens, traces, interprets and unflattens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np

from haiku_implicit.core import containers
from haiku_implicit.core.array import ImplicitArray, has_symbolic_shape, is_implicit
from haiku_implicit.core.interpreter import call_interpreted, densify, materialize_array
from haiku_implicit.core.materialization import of_arguments
from haiku_implicit.core.messages import check_function
from haiku_implicit.core.serialization import naming_lost_types
from haiku_implicit.core.typing import Array, SameTree, Tree, TreeDef

R = TypeVar("R")


def use_implicit_args(fun: Callable[..., R]) -> Callable[..., R]:
    """Lets a function of arrays take and return implicit arrays instead.

    The function is traced with dense abstract values, so it needs no change. Its program then runs on
    the given arguments. The wrapped function is an ordinary function of pytrees. `jax.jit`, `grad`,
    `vmap`, `checkpoint` and `eval_shape` apply to it, and act on the leaves of the implicit arrays. The
    function may also use these transformations inside.

    Args:
      fun: any function that JAX can trace. Any of its arguments, or of the leaves in them, may be
        implicit. Anything that is not an array (a Python number, flag, string, function) is passed
        on unchanged. A function that is itself a tree (a callable pytree, a `functools.partial`) may
        hold implicit arrays, too.

    Returns:
      The wrapped function, with the same signature.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)))
      >>> f = hki.use_implicit_args(lambda w, x: x @ w)
      >>> print(f(w, jnp.arange(2.0)))
      [1. 2.]
      >>> jax.tree.map(jnp.shape, jax.grad(lambda w, x: f(w, x).sum())(w, jnp.arange(2.0))).a
      (2, 1)
    """

    check_function("fun", fun)
    tree = _partial_as_tree(fun)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> R:
        # If the function holds implicit arrays, all values in it are traced. Otherwise none is, since
        # the function may branch on concrete values in it.
        if any(map(is_implicit, tree_leaves_with_implicit(tree))):
            return call(_apply, *split(((tree, *args), kwargs)))
        return call(fun, *split((args, kwargs)))

    return wrapped


def _partial_as_tree(fun: Any) -> Any:
    """Converts a `functools.partial` to JAX's pytree; any other function stays unchanged."""
    if isinstance(fun, functools.partial):
        return jax.tree_util.Partial(fun.func, *fun.args, **fun.keywords)
    return fun


def _apply(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tree:
    return fun(*args, **kwargs)


class Static(NamedTuple):
    """A tree without its values: its structure, and the leaves that are not traced.

    Attributes:
      treedef: the structure; None if JAX can't flatten the tree, which is then the only leaf.
      leaves: for each leaf, a tuple of only this leaf if it is passed on unchanged; None for a value.
    """

    treedef: TreeDef
    leaves: tuple[tuple[Any] | None, ...]

    @property
    def num_arrays(self) -> int:
        """The number of values."""
        return self.leaves.count(None)

    def merge(self, values: Iterable[Array]) -> Tree:
        """Returns the tree with these values in it."""
        rest = iter(values)
        leaves = [next(rest) if x is None else x[0] for x in self.leaves]
        return leaves[0] if self.treedef is None else self.treedef.unflatten(leaves)


def split(tree: Tree) -> tuple[Static, list[Any]]:
    """Splits a tree into its static part and its values, dense or implicit."""
    return split_leaves(*tree_flatten_with_implicit(tree), is_value)


def split_leaves(
    leaves: Sequence[Array], treedef: TreeDef, is_array: Callable[[Any], bool]
) -> tuple[Static, list[Any]]:
    """Splits a flat tree into its static part and the leaves for which `is_array` is true."""
    static = tuple(None if is_array(x) else (x,) for x in leaves)
    return Static(treedef, static), [x for x in leaves if is_array(x)]


def call(fun: Callable[..., Any], static: Static, values: Sequence[Array]) -> Tree:
    """Traces a function, interprets it on the values, and returns its results.

    Args:
      fun: a function.
      static: the static part of its arguments, from `split((args, kwargs))`.
      values: the values among its arguments.
    """
    static_out: Any = None

    def on_values(*values: Array) -> list[Array]:
        nonlocal static_out
        args, kwargs = static.merge(values)
        with naming_lost_types(*args, *kwargs.values()):
            static_out, results = split(fun(*args, **kwargs))
        return results

    with of_arguments(lambda: static.merge(values)):
        results = call_interpreted(on_values, values)
    return static_out.merge(map(_with_known_shape, results))


def _with_known_shape(x: Array) -> Array:
    """Makes a result dense if its static metadata contains a symbolic length (`jax.export`).

    Callers of the exported function have arrays of other lengths, but static metadata cannot change.
    """
    return densify(x, "export", "its shape is symbolic") if has_symbolic_shape(x) else x


def is_value(x: Any) -> bool:
    """Whether a leaf is traced (an array, dense or implicit) rather than passed on unchanged."""
    if isinstance(x, np.ndarray | np.generic):  # but not one of strings, dates or objects
        return x.dtype == np.bool_ or bool(jax.dtypes.issubdtype(x.dtype, np.number))
    return is_implicit(x) or isinstance(x, jax.Array)


@overload
def materialize(tree: ImplicitArray) -> jax.Array: ...


@overload
def materialize(tree: SameTree) -> SameTree: ...


def materialize(tree: Tree) -> Tree:
    """Replaces every implicit array in a tree by its dense array.

    Reports do not count these arrays, and nothing warns of them, since the call is explicit.

    Args:
      tree: a tree of arrays and implicit arrays.

    Returns:
      The same tree with dense arrays.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> print(hki.materialize({'b': hki.Zeros(shape=(3,), dtype=jnp.float32)}))
      {'b': Array([0., 0., 0.], dtype=float32)}
    """
    return tree_map_with_implicit(lambda x: materialize_array(x) if is_implicit(x) else x, tree)


def tree_map_with_implicit(fun: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`jax.tree.map` that treats each implicit array as one leaf."""
    return jax.tree.map(fun, *map(containers.opened, (tree, *rest)), is_leaf=is_implicit)


def tree_leaves_with_implicit(tree: Tree) -> list[Array]:
    """`jax.tree.leaves` that treats each implicit array as one leaf."""
    return containers.flatten(tree)[0]


def tree_flatten_with_implicit(tree: Tree) -> tuple[list[Array], TreeDef]:
    """`jax.tree.flatten` that treats each implicit array as one leaf."""
    return containers.flatten(tree)


def tree_structure_with_implicit(tree: Tree) -> TreeDef:
    """`jax.tree.structure` that treats each implicit array as one leaf."""
    return containers.flatten(tree)[1]
