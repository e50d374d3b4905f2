"""`Graft`, a new function in a model, and the `init` of a model with such functions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Var

from haiku_implicit.mox.interface import Interface, by_path, key_like, nested
from haiku_implicit.mox.program import Program, init_called
from haiku_implicit.mox.run import run
from haiku_implicit.mox.sources import depends
from haiku_implicit.mox.tree import Atom, Body, ModuleCall, body_of, needed, shape_of


class Graft(NamedTuple):
    """A new function that replaces a node.

    Attributes:
      node: the new node.
      mox: the function's own expression.
      inputs: its arguments.
      salt: a number for the random key of its initializers.
      taps: the variables of the values that are tapped in it.
    """

    node: ModuleCall
    mox: Program
    inputs: tuple[Atom, ...]
    salt: int
    taps: tuple[Atom, ...]


def init_of(
    old: Program, body: Body, face: Interface, grafts: Sequence[Graft]
) -> Callable[..., Any] | None:
    """The `init` of a model with grafts: calls the old model's `init` and the grafts'.

    Args:
      old: the model without the grafts.
      body: the tree with the grafts.
      face: the arguments and results of this tree.
      grafts: the grafts, in the order in which they run.
    """
    if old.init is None:
        return None
    old_init = old.init

    def init(rng: Any, *args: Any, **kwargs: Any) -> Any:
        with init_called("init of the changed model called that of the model before", _WAY_OUT):
            made = old_init(rng, *args, **kwargs)
        params, state = made if old.has_state else (made, {})
        entries = dict(params=by_path(params), state=by_path(state))
        for graft in grafts:
            key = None if rng is None else jax.random.fold_in(_as_key(rng), graft.salt)
            new = _initial(graft, key)
            if new is None:
                given = _arguments(face, entries, rng, args, kwargs)
                values = run(_only(body, graft.inputs), body.consts, given)
                new = _init_of(graft)(key, *values)
            for kind, x in zip(entries, new, strict=True):
                entries[kind] = {**by_path(x), **entries[kind]}
        params, state = (
            nested({path: entries[kind][path] for path in getattr(face, kind)}) for kind in entries
        )
        return (params, state) if face.has_state else params

    return init


_WAY_OUT = "Call it with the arguments that this one takes (is_training=True, say)"


def _as_key(rng: Any) -> Any:
    return jax.random.PRNGKey(rng) if isinstance(rng, int) else rng


def _initial(graft: Graft, key: Any) -> Any:
    """The parameters and the state of a graft; None if they depend on its inputs."""
    mox = graft.mox
    if not mox.interface.params and not mox.interface.state:
        return {}, {}
    avals = list(map(shape_of, graft.inputs))
    closed, shapes = jax.make_jaxpr(_init_of(graft), return_shape=True)(key, *avals)
    body = body_of("init", closed)
    num_keys = len(body.invars) - len(avals)
    if any(depends(body, [False] * num_keys + [True] * len(avals))):
        return None
    zeros = [np.zeros(x.shape, x.dtype) for x in avals]
    leaves = run(_only(body, body.returns), body.consts, [*jax.tree.leaves(key), *zeros])
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _init_of(graft: Graft) -> Callable[..., Any]:
    assert graft.mox.init is not None
    return graft.mox.init


def _only(body: Body, returns: Sequence[Any]) -> Body:
    """A program that computes some of its variables."""
    children = needed(body.children, {v for v in returns if isinstance(v, Var)})
    return dataclasses.replace(body, children=children, returns=tuple(returns))


def _arguments(face: Interface, entries: Any, rng: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a model's program during its `init`: None for entries not yet made."""
    arrays: list[Any] = []
    for kind in ("params", "state"):
        for path, slot in getattr(face, kind).items():
            arrays += jax.tree.leaves(entries[kind].get(path)) or [None] * len(slot.atoms)
    if face.rng.atoms:
        arrays.append(key_like(rng, face.rng.atoms, lambda: True))
    return arrays + face.arrays_of_arguments(args, kwargs)
