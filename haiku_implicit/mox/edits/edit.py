"""Replacement of nodes by other functions.

A new function is traced by itself, as a Haiku function of the node's inputs, and its tree replaces the
node. The rest of the model is not traced again. If the node is in the body of a loop or a branch, that
equation is traced again (`higher.py`).
"""

import collections
import dataclasses
import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
from jax.extend.core import Literal, Var, jaxpr_as_fun
from jax.extend.core import primitives as jex

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Key, Params, State, Tree
from haiku_implicit.mox.edits.higher import Changes
from haiku_implicit.mox.program import interface, tree
from haiku_implicit.mox.program.interface import Interface, Path, Slot, as_key, by_path, unread
from haiku_implicit.mox.program.program import (
    ANY_KEY,
    Piece,
    Program,
    depends,
    init_called,
    init_of,
    program_of,
    pruned,
    run,
)
from haiku_implicit.mox.program.sites import Site, is_known, sites_of
from haiku_implicit.mox.program.tree import Atom, ModuleCall, Node


def replace(
    mox: Program,
    nodes: Sequence[Node],
    piece_of: Callable[[Site], Piece],
    path: str | Callable[[Node], str] | None,
    keep_unused: bool,
) -> Program:
    """Replaces nodes of an expression by other functions.

    Args:
      mox: the expression.
      nodes: the nodes. If one is inside another, the outermost is replaced.
      piece_of: makes the function for a site.
      path: the path of new modules and parameters.
      keep_unused: whether to keep parameters and state that nothing reads any more.
    """
    sites = sites_of(mox.body, nodes, path)
    for site in sites:
        _check(site)
    pieces = {id(site.node): piece_of(site) for site in sites}
    return Edit(Changes(mox, sites, pieces)).program(keep_unused)


def _check(site: Site) -> None:
    """Raises a ValueError if a node can't be replaced."""
    if any(x.is_differentiated for x in (*site.region.around, site.node)):
        raise value_error(
            f"{site.node!r} can't be replaced: the model differentiates it (an inner jax.grad), and "
            "the equations of its derivative would stay what they are"
        )
    if getattr(getattr(site.node, "call", None), "bypassed", False):
        raise value_error(
            f"{site.node!r} can't be replaced: it is in a loop, a branch or a traced function, "
            "and the model keeps arrays from outside in containers or attributes, and reads them there "
            "again and not of the call. Hand them through the loop, or return copies of containers"
        )


def _ended_state(changes: Changes) -> set[Path]:
    """The state of modules that are not called any more, and of the modules below them.

    Calls inside a replaced node count as removed, such as calls of a module's properties in `__call__`.
    """
    mox, pieces = changes.mox, changes.pieces
    new_state = mox.interface.new_state
    sites = [x for x in changes.sites if id(x.node) in pieces and pieces[id(x.node)].replaces]
    replaced = [site for site in sites if isinstance(site.node, ModuleCall)]
    if not new_state or not replaced:
        return set()
    gone = {id(x) for site in replaced for x in tree.walk(site.node)}
    left = {call.path for call in tree.calls(mox.body) if id(call) not in gone}
    ended = {site.path for site in replaced if site.node.path not in left}
    uncalled = (path for path in new_state if path[0] not in left)
    return {path for path in uncalled if any(tree.is_below(path[0], x) for x in ended)}


class Graft(NamedTuple):
    """A new function that replaces a node.

    Attributes:
      top: the old node.
      node: the new node.
      mox: the function's own expression.
      inputs: its arguments.
      salt: a number for the random key of its initializers.
      taps: the variables of the values that are tapped in it.
    """

    top: Node
    node: ModuleCall
    mox: Program
    inputs: tuple[Atom, ...]
    salt: int
    taps: tuple[Atom, ...]


class Edit:
    """A change of an expression: traces a graft for each changed node at the top of the program.

    Args:
      changes: the changes.

    Attributes:
      grafts: the grafts, by the `id` of the node that each replaces.
    """

    def __init__(self, changes: Changes):
        self.mox, self.changes, self.ended = changes.mox, changes, _ended_state(changes)
        self.face = self.mox.interface
        self.key = self.face.rng.atoms if "rng" in self.face.leading else ()
        self.added: dict[str, dict[Path, Slot]] = {"params": {}, "state": {}, "new_state": {}}
        self.grafts: dict[int, Graft] = {}
        for site in {id(site.top): site for site in changes.sites}.values():
            self._graft(site, changes.piece_of(site.top))

    def _graft(self, site: Site, piece: Piece) -> None:
        """Traces a piece for the inputs of a site's top node."""
        node = site.top
        ignored = [v for path in self.ended for v in self.face.new_state[path].atoms]
        wanted = tree.hidden(self.mox.body, node, ignored)
        used = [i for i, v in enumerate(piece.outputs) if v in wanted]
        own = self._traced(site, piece, used)
        face = own.interface
        shared = self._shared(node, face)
        children = tree.needed(own.body.children, set(tree.variables(face.returns)), effects=True)
        read = tree.uses(children, face.returns)
        if not self.key and read[face.rng.atoms[0]]:
            raise value_error(
                f"{node!r}: the replacement draws random numbers, and the model has no key"
            )
        pairs = [*zip(face.args.atoms, piece.inputs, strict=True), *shared]
        given = [x for x in (*pairs, *zip(face.rng.atoms, self.key, strict=False)) if read[x[0]]]
        rest = tree.needed(node.children, wanted.difference(piece.outputs))
        if rest and isinstance(node, ModuleCall):
            given += node.given
        results = face.results.atoms
        returns, outputs = results[: len(used)], tuple(piece.outputs[i] for i in used)
        new = ModuleCall(None, tuple(given), (*rest, *children), returns, outputs)
        # The values of new parameters depend only on their names, not on the order of changes.
        names = sorted(map("/".join, (*face.params, *face.state)))
        salt = zlib.crc32(repr(names).encode())
        self.grafts[id(node)] = Graft(node, new, own, piece.inputs, salt, results[len(used) :])

    def _traced(self, site: Site, piece: Piece, used: Sequence[int]) -> Program:
        """The expression of a piece: of its used results, and of the values that are tapped in it."""
        numbers = (zlib.crc32(f"{site.name}:{i}".encode()) for i in itertools.count())
        salt = next(x for x in numbers if x not in self._salts)
        self._salts.add(salt)

        def apply(params: Params, state: State, rng: jax.Array, *arrays: Array) -> Tree:
            key = jax.random.fold_in(rng, salt)
            out, state, taps = piece.apply(params, state, key, *arrays)
            return [out[i] for i in used] + jax.tree.leaves(taps), state

        rng = tree.shape_of(self.key[0]) if self.key else ANY_KEY
        inputs = [tree.shape_of(x) for x in piece.inputs]
        # An equation that is traced again may have lost the need for values that a loop carries.
        prune = id(site.top) not in self.changes.pieces
        program = hk.TransformedWithState(piece.init, apply)
        init = init_of(program, inputs, {}, rng)
        return program_of(program, init, *init.entries(), prune=prune)

    @functools.cached_property
    def _salts(self) -> set[int]:
        """The numbers that the program folds into random keys.

        They are found in the program and not stored next to it, because it may come from a file or from
        another model.
        """
        if not any(self.mox.body.uses[v] for v in self.face.rng.atoms):
            return set()
        found = (x for x in tree.walk(self.mox.body) if isinstance(x, tree.Equation))
        numbers = (x.inputs[1] for x in found if x.primitive is jex.random_fold_in_p)
        return {int(number.val) for number in numbers if isinstance(number, Literal)}

    def _shared(self, node: Node, face: Interface) -> list[tuple[Any, Any]]:
        """Adds the entries of a function. Pairs its variables with earlier ones if shared."""
        params, state, new_state = self.added.values()
        given: list[tuple[Any, Any]] = []
        for slots, first, last in ((face.params, params, params), (face.state, state, new_state)):
            for path, slot in slots.items():
                if first.setdefault(path, slot) is slot:
                    continue
                avals = [[v.aval.strip_weak_type() for v in x.atoms] for x in (first[path], slot)]
                if avals[0] != avals[1]:
                    raise value_error(
                        f"{node!r}: {'/'.join(path)!r} is {avals[1]} here, and {avals[0]} for another "
                        "node. Give each a path of its own (path=)"
                    )
                given += zip(slot.atoms, last[path].atoms, strict=True)
        new_state |= face.new_state
        return given

    def program(self, keep_unused: bool = True) -> Program:
        """The expression in which the grafts replace their nodes."""
        mox, grafts = self.mox, self.grafts.values()
        unchanged, body = self._unchanged(), mox.body
        face = self._joined(unchanged)
        read = body.uses.copy()
        read.subtract(tree.uses((graft.top for graft in grafts), body.returns))
        read.update(tree.uses((graft.node for graft in grafts), face.returns))
        before = collections.Counter[Var]() if keep_unused else body.uses
        ended = {v for path in unchanged for v in face.state[path].atoms if not keep_unused}
        children = _exchanged(body.children, self.grafts, before, read, ended)
        if not keep_unused:
            face = _without_unused(face, before, read, unchanged)
        whole = tree.with_constants(body, (graft.mox.body for graft in grafts))
        new = dataclasses.replace(mox, body=whole).with_nodes(children, face, None)
        vars(new.body)["uses"] = read  # the value of the cached property
        return dataclasses.replace(new, init=mox.init and _init_of(mox, new, list(grafts)))

    def _unchanged(self) -> set[Path]:
        """The state that was changed only by replaced nodes."""
        new_nodes = (graft.node for graft in self.grafts.values())
        nodes = (x for node in new_nodes for x in tree.walk(node, into_bodies=False))
        defined = {v for x in nodes for v in x.outputs}
        state, new = self.face.state, self.face.new_state
        return {p for p in self.ended if p in state and defined.isdisjoint(new[p].atoms)}

    def _joined(self, unchanged: Collection[Path]) -> Interface:
        """The interface with the parameters and state of grafts.

        Raises:
          ValueError: if the model already has a parameter or state of the same path.
        """
        face = self.face
        for kind in ("params", "state"):
            for path in self.added[kind]:
                if path in getattr(face, kind):
                    raise value_error(
                        f"{kind}: the model has {'/'.join(path)!r}, and a replacement makes another "
                        "one. Give it another place: path="
                    )
        new_state = {**face.new_state, **{path: face.state[path] for path in unchanged}}
        old = dict(params=face.params, state=face.state, new_state=new_state)
        slots: Any = {kind: {**old[kind], **new} for kind, new in self.added.items()}
        leading = face.leading
        if self.added["state"] and not face.has_state:
            leading = ("params", "state", *leading[1:])
        return dataclasses.replace(face, leading=leading, **slots)


# --- unused values --------------------------------------------------------------------------------


def _exchanged(
    nodes: Sequence[Node],
    grafts: Mapping[int, Graft],
    before: Mapping[Var, int],
    read: collections.Counter[Var],
    ended: Container[Var],
) -> tuple[Node, ...]:
    """Puts grafts into nodes, and drops the outputs of calls whose last use is gone.

    Such an output only passed a value on to removed nodes (`hk.lift`). Nodes are visited from the last
    to the first, since a dropped output does not use the output of an earlier call any more.

    Args:
      nodes: the nodes. Unchanged ones stay the same objects.
      grafts: the grafts, by the `id` of the node that each replaces.
      before: how often each variable was read before.
      read: how often it is read now. The uses by dropped outputs are subtracted.
      ended: the variables of state that nothing changes any more. Unread outputs with it are dropped.
    """
    new: list[Node] = []
    for node in reversed(nodes):
        if id(node) in grafts:
            node = grafts[id(node)].node
        elif isinstance(node, ModuleCall):
            pairs = list(zip(node.outputs, node.returns, strict=True))
            kept = {v for v, x in pairs if read[v] or not (before[v] or is_known(x, ended))}
            read.subtract(tree.variables(x for v, x in pairs if v not in kept))
            node = tree.returning_only(node, kept)
            children = _exchanged(node.children, grafts, before, read, ended)
            if any(map(operator.is_not, children, node.children)):
                node = dataclasses.replace(node, children=children)
        new.append(node)
    return tuple(reversed(new))


def _without_unused(
    face: Interface,
    before: Mapping[Var, int],
    read: collections.Counter[Var],
    unchanged: Collection[Path],
) -> Interface:
    """Drops the parameters that only replaced nodes read, and the state that only they changed."""
    params = unread(face.params, read) - unread(face.params, before)
    # Unchanged state is returned, which is one use.
    state = [path for path in unchanged if all(read[v] == 1 for v in face.state[path].atoms)]
    read.subtract(v for path in state for v in face.state[path].atoms)
    return face.without(params, state)


# --- init -----------------------------------------------------------------------------------------


def _init_of(old: Program, new: Program, grafts: Sequence[Graft]) -> Callable[..., Tree]:
    """The `init` of a model with grafts: calls the old model's `init` and the grafts'.

    Args:
      old: the model without the grafts.
      new: the model with the grafts, without `init`.
      grafts: the grafts, in the order in which they run.
    """

    def init(rng: Key | None, *args: Any, **kwargs: Any) -> Tree:
        with init_called("init of the changed model called that of the model before", _WAY_OUT):
            made = old.initial(rng, *args, **kwargs)
        entries = dict(zip(("params", "state"), made, strict=True))
        for graft in grafts:
            key = None if rng is None else jax.random.fold_in(as_key(rng), graft.salt)
            own = _initial(graft, key)
            if own is None:
                given = _arguments(new.interface, entries, rng, args, kwargs)
                needed = tree.needed(new.body.children, set(tree.variables(graft.inputs)))
                only = dataclasses.replace(new.body, children=needed, returns=graft.inputs)
                inputs = run(only, only.consts, given)
                own = graft.mox.initial(key, *inputs)
            for kind, x in zip(entries, own, strict=True):
                entries[kind] = {**x, **entries[kind]}
        return new.interface.of_init(*entries.values())

    return init


def _arguments(face: Interface, entries: Params, rng: Any, args: Any, kwargs: Any) -> list[Array]:
    """The arguments of a program: None for entries not yet made."""
    arrays: list[Array] = []
    for kind in ("params", "state"):
        for path, slot in face.slots(kind).items():
            arrays += jax.tree.leaves(entries[kind].get(path)) or [None] * len(slot.atoms)
    if face.rng.atoms:
        arrays.append(interface.key_like(rng, face.rng.atoms, lambda: True))
    return arrays + face.args.arrays_of(interface.named_arguments(face.signature, args, kwargs))


_WAY_OUT = "Call it with the arguments that this one takes (is_training=True, say)"


def _initial(graft: Graft, key: Key | None) -> Any:
    """The parameters and the state of a graft; None if they depend on its inputs."""
    face = graft.mox.interface
    if not face.params and not face.state:
        return {}, {}
    init: Any = graft.mox.init
    avals = list(map(tree.shape_of, graft.inputs))
    closed, shapes = jax.make_jaxpr(init, return_shape=True)(key, *avals)
    made, keys = jaxpr_as_fun(pruned(closed)), jax.tree.leaves(key)
    if depends(made, [*keys, *avals], [False] * len(keys) + [True] * len(avals)):
        return None
    zeros = [np.zeros(x.shape, x.dtype) for x in avals]
    return map(by_path, jax.tree.unflatten(jax.tree.structure(shapes), made(*keys, *zeros)))
