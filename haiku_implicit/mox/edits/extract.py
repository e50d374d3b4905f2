"""Extracts one module of a model as a separate expression."""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Var
from jax.extend.core import primitives as jex

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Tree
from haiku_implicit.mox.edits.parts import Variable, pruned
from haiku_implicit.mox.edits.replacement import Original, structures_of
from haiku_implicit.mox.program import marks
from haiku_implicit.mox.program.interface import Interface, Slot
from haiku_implicit.mox.program.program import Program
from haiku_implicit.mox.program.sites import Site, sites_of
from haiku_implicit.mox.program.sources import arguments_of
from haiku_implicit.mox.program.tree import (
    Atom,
    Body,
    Equation,
    ModuleCall,
    Node,
    body_of,
    needed,
    setting,
    shape_of,
    steps,
    uses,
)


def extracted(mox: Program, node: Any, layer: int | Sequence[int] | None = None) -> Program:
    """Extracts one call of a module as a separate expression, a function of the call's arguments.

    Args:
      mox: the expression of the model.
      node: the call.
      layer: the layer of the stack around the call; for nested stacks, one layer for each.
    """
    if not isinstance(node, ModuleCall) or node.call is None:
        raise ValueError(f"where: expected the call of a module, got {node!r}")
    (site,) = sites_of(mox.body, [node])
    scope = _scope_of(mox.body, site, layer)
    original, face = Original(site.place.body, node), mox.interface
    # As single steps: a whole call would need all of its arguments, even for one of its results.
    single = [node or setting((v[0], x[0])) for v, x, node in steps(scope.children)]
    children = needed(single, set(original.captured))
    read = uses(children, original.captured)
    for v, reason in [*((v, _ARGUMENTS) for v in face.args.atoms), *scope.unknown.items()]:
        if read[v]:
            raise ValueError(f"{node!r} can't be extracted: {reason}")
    own = _interface(face, node, original, read)
    whole = dataclasses.replace(mox, body=scope.body)
    part = pruned(whole, own, (*children, original.call))
    return dataclasses.replace(part, init=_init_on_zeros(mox, part.interface))


def _interface(
    face: Interface, node: ModuleCall, original: Original, read: Mapping[Var, int]
) -> Interface:
    """The arguments and results of a call, with the parameters and state of the whole model.

    Args:
      face: the arguments and results of the model.
      node: the call.
      original: the call, as a function.
      read: how often each variable of the model is read for the call.
    """
    structure, results = structures_of(node)
    args, kwargs = structure.merge([Variable(v) for v in original.arguments])
    named = dict(args=args, kwargs=kwargs)
    tree, variables = marks.split(named, lambda x: isinstance(x, Variable))
    changed = {*original.hidden, *node.outputs}
    uses_state = any(changed.intersection(slot.atoms) for slot in face.new_state.values()) or any(
        read[v] for slot in face.state.values() for v in slot.atoms
    )
    return dataclasses.replace(
        face,
        leading=tuple(name for name in face.leading if name != "state" or uses_state),
        signature=inspect.Signature(_ANY),
        args=Slot(tree, tuple(x.atom for x in variables)),
        results=Slot(results, tuple(node.outputs)),
        new_state=face.state_after(changed) if uses_state else {},
        state=face.state if uses_state else {},
    )


_ANY = [
    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
]


# --- the scope of a call -----------------------------------------------------------------------------

_ARGUMENTS = "beside its arguments it reads what is computed from the model's arguments"
_CARRIED = "beside its arguments it reads what a loop around it computes from step to step"


class _Scope(NamedTuple):
    """The nodes in reach of a call, with the nodes of the bodies around it.

    Attributes:
      body: the whole program, with the constants of all bodies.
      children: the nodes.
      unknown: variables without a value outside the loops around the call, each with the reason.
    """

    body: Body
    children: tuple[Node, ...]
    unknown: dict[Var, str]


def _scope_of(root: Body, site: Site, layer: int | Sequence[int] | None) -> _Scope:
    """The scope of a call, in a given layer of each stack around it."""
    layers = iter(_checked_layers(site, layer))
    places = []
    place: Any = site.place
    while place.outer is not None:
        places.append(place)
        place = place.outer
    children, unknown = [*root.children], {}
    bodies = [root, *(place.body for place in reversed(places))]
    for place in reversed(places):
        equation = place.around[-1]
        number = next(layers) if equation.primitive is jex.scan_p else None
        for v, outer in _arguments(equation, place.body, number):
            if isinstance(outer, str):
                unknown[v] = outer
            else:
                children.append(outer)
        children += place.body.children
    whole = dataclasses.replace(
        root,
        constvars=tuple(v for body in bodies for v in body.constvars),
        consts=tuple(x for body in bodies for x in body.consts),
    )
    return _Scope(whole, tuple(children), unknown)


def _checked_layers(site: Site, layer: int | Sequence[int] | None) -> Sequence[int | None]:
    """The layer of each stack around a call; None for each if no layer is given."""
    lengths = [x.eqn.params["length"] for x in site.place.around if x.primitive is jex.scan_p]
    if layer is None:
        return [None] * len(lengths)
    given = list(layer) if isinstance(layer, Sequence) else [layer]
    if len(given) != len(lengths) or not all(
        0 <= i < n for i, n in zip(given, lengths, strict=True)
    ):
        raise ValueError(f"layer: {site.node!r} is {_described(lengths)}, got {layer!r}")
    return given


def _described(lengths: Sequence[int]) -> str:
    """Describes the stacks around a call, and the expected layer numbers, for an error message."""
    if not lengths:
        return "not in a stack: expected None"
    if len(lengths) == 1:
        return f"in a stack of {lengths[0]} layers: expected a number from 0 to {lengths[0] - 1}"
    counts = " and ".join(map(str, lengths))
    return (
        f"in stacks of {counts} layers, the outermost first: expected a number from 0 on for each"
    )


def _arguments(
    equation: Equation, body: Body, layer: int | None
) -> Iterator[tuple[Var, ModuleCall | str]]:
    """The variables of a body, each with a node that sets it, or with the reason if none can."""
    given = list(zip(body.invars, arguments_of(equation, body), strict=True))
    constants = carried = len(given)
    if equation.primitive is jex.scan_p:
        constants, num_carry = compat.scan_arity(equation.eqn.params, list(equation.inputs))
        carried = constants + num_carry
    elif equation.primitive is jex.while_p:
        constants -= len(equation.outputs)
    for i, (v, outer) in enumerate(given):
        if i < constants:
            yield v, setting((v, outer))
        elif i < carried:
            yield v, _CARRIED
        elif layer is None:
            length = equation.eqn.params["length"]
            yield (
                v,
                f"it is in a stack of {length} layers. Say which one is meant, from 0 on: layer=",
            )
        else:
            yield v, _element(v, outer, layer)


def _element(v: Var, stacked: Atom, index: int) -> ModuleCall:
    """A node that sets a variable to an element of an array."""
    closed = jax.make_jaxpr(lambda x: jax.lax.index_in_dim(x, index, keepdims=False))(
        shape_of(stacked)
    )
    body = body_of("", closed)
    return ModuleCall(None, ((body.invars[0], stacked),), body.children, body.returns, (v,))


# --- the module's parameters -------------------------------------------------------------------------


def _init_on_zeros(mox: Program, face: Interface) -> Callable[..., Any] | None:
    """The `init` of an extracted module: calls the model's `init` on zeros."""

    def init(rng: Any, *args: Any, **kwargs: Any) -> Tree:
        slot = mox.interface.args
        zeros = [np.zeros(v.aval.shape, v.aval.dtype) for v in slot.atoms]
        named = collections.OrderedDict(slot.tree.merge(zeros))
        given = inspect.BoundArguments(mox.interface.signature, named)
        return face.of_init(*mox.initial(rng, *given.args, **given.kwargs))

    return mox.init and init
