"""New functions for nodes under `vmap`: written for one element, and mapped over all elements."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from haiku_implicit.core.typing import Array, Aval, Params, Primitive, State, Tree
from haiku_implicit.mox.program.interface import by_path
from haiku_implicit.mox.program.program import Piece
from haiku_implicit.mox.program.tree import ModuleCall, Node


class Level(NamedTuple):
    """One `vmap` around a call.

    Attributes:
      name: the name of its axis.
      size: the number of elements.
      axes: the mapped axis of each argument; None if the argument is the same for all elements.
      out_axes: the mapped axis of each result.
    """

    name: str
    size: int
    axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]


def levels_of(node: ModuleCall) -> tuple[Level, ...]:
    """The `vmap`s around a call, the innermost first.

    Raises:
      ValueError: if JAX transformed its arguments and results in different ways.
    """
    inner: list[Any] = [None] * len(node.seen_results)
    seen, seen_results = node.seen or inner, node.seen_results
    if len(seen) != len(seen_results):
        raise ValueError(f"{node!r} can't be replaced: it is under vmap in parts")
    unmapped = (None,) * len(node.inputs)
    return tuple(
        Level(
            f"elements {i} of {node!r}",
            results.size,
            given.axes if given else unmapped,
            results.axes,
        )
        for i, (given, results) in enumerate(zip(seen, seen_results, strict=True))
    )


def element_results(node: Node) -> list[Aval]:
    """The shapes and dtypes of a node's results, without the axes of the `vmap`s around it."""
    seen = getattr(node, "seen_results", ())
    return _elements([v.aval for v in node.outputs], [x.axes for x in seen])


def element_arguments(node: Node) -> list[Any]:
    """The shapes and dtypes of a node's array arguments, without the axes of `vmap`s around it."""
    seen = getattr(node, "seen", ())
    return _elements([v.aval for v in node.inputs], [x.axes for x in seen])


def _elements(avals: list[Aval], axes: Sequence[tuple[int | None, ...]]) -> list[Aval]:
    for own in reversed(axes):
        avals = [
            x if i is None else x.update(shape=(*x.shape[:i], *x.shape[i + 1 :]))
            for x, i in zip(avals, own, strict=True)
        ]
    return avals


def for_all_elements(piece: Piece, node: ModuleCall) -> Piece:
    """Maps a piece for one element over the `vmap`s around a node.

    Additional inputs and outputs of the piece, which the node does not have, are the same for all
    elements.
    """
    for level in levels_of(node):
        piece = _mapped(piece, repr(node), level)
    return piece


def _mapped(piece: Piece, what: str, level: Level) -> Piece:
    same = len(piece.inputs) - len(level.axes), len(piece.outputs) - len(level.out_axes)
    axes, out_axes = (*level.axes, *[None] * same[0]), [*level.out_axes, *[None] * same[1]]
    options: Any = dict(axis_size=level.size, axis_name=level.name)

    def init(rng: jax.Array, *arrays: Array) -> Tree:
        def one(*arrays: Array) -> Tree:
            return piece.init(rng, *arrays)

        params, state = jax.vmap(one, in_axes=axes, out_axes=None, **options)(*arrays)
        if by_path(state):
            raise ValueError(f"{what}: the replacement has state, and is under vmap")
        return params, state

    def apply(params: Params, state: State, rng: jax.Array, *arrays: Array) -> Tree:
        keys = None if rng is None else jax.random.split(rng, level.size)

        def one(key: jax.Array, *arrays: Array) -> Tree:
            return piece.apply(params, state, key, *arrays)[0]

        mapped = jax.vmap(one, in_axes=(0, *axes), out_axes=out_axes, **options)
        return mapped(keys, *arrays), state, {}

    return dataclasses.replace(piece, init=init, apply=apply)


# --- the node itself, as a function of one element --------------------------------------------------


def of_one_element(
    node: ModuleCall, fun: Callable[..., Any], arrays: Sequence[Array], hidden: Sequence[Array]
) -> list[Array]:
    """Calls a function of all elements from code that is written for one element.

    `for_all_elements` maps this code, and so gives the function the arrays of all elements.

    Args:
      node: a call with `vmap`s around it.
      fun: maps the call's arrays, and further ones, to a list of arrays.
      arrays: the arguments of one element, and the further arrays.
      hidden: the variables of further results, which the call does not return.
    """
    levels = levels_of(node)
    # Because of these, JAX maps the primitive at each level, even if no argument is mapped.
    indices = [jax.lax.axis_index(level.name) for level in levels]
    out = (*element_results(node), *(v.aval for v in hidden))
    return element_p.bind(*indices, *arrays, fun=fun, levels=levels, out=out)


element_p = Primitive("call_of_one_element")
element_p.multiple_results = True


@element_p.def_abstract_eval
def _abstract(*operands: Aval, fun: Any, levels: Any, out: Sequence[Array]) -> list[Aval]:
    return list(out)


def _batch(operands: Sequence[Array], axes: Any, *, fun: Any, levels: Any, out: Any) -> Any:
    """Maps one level, the innermost first, and runs the call when all levels are mapped."""
    level, *rest = levels
    indices, arrays = operands[1 : len(levels)], operands[len(levels) :]
    wanted = (*level.axes, *[None] * (len(arrays) - len(level.axes)))
    moved = [
        _moved(level, x, has, want)
        for x, has, want in zip(arrays, axes[len(levels) :], wanted, strict=True)
    ]
    out_axes = [*level.out_axes, *[None] * (len(out) - len(level.out_axes))]
    if not rest:
        return fun(*moved), out_axes
    out = tuple(
        x if i is None else x.update(shape=(*x.shape[:i], level.size, *x.shape[i:]))
        for x, i in zip(out, out_axes, strict=True)
    )
    return element_p.bind(*indices, *moved, fun=fun, levels=tuple(rest), out=out), out_axes


def _moved(level: Level, x: Any, has: int | None, wanted: int | None) -> Array:
    """Moves the mapped axis of an array to its place in the call."""
    if wanted is None:
        if has is None:
            return x
        raise ValueError(
            f"{level.name}: the original takes one array for all elements here, and was given one for "
            "each. Give another function in its place (sub)"
        )
    if has is None:
        x, has = jnp.broadcast_to(x, (level.size, *x.shape)), 0
    return jnp.moveaxis(x, has, wanted)


def _differentiate(*_: Any, levels: Any, **__: Any) -> Any:
    raise ValueError(
        f"{levels[0].name}: the original can't be differentiated within the function, under vmap"
    )


batching.primitive_batchers[element_p] = _batch
ad.primitive_jvps[element_p] = _differentiate
