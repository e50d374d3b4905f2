"""Replacement of nodes by other functions.

A new function is traced by itself, as a Haiku function of the node's inputs, and its tree replaces the
node. The rest of the model is not traced again. If the node is in the body of a loop or a branch, that
equation is traced again (`higher.py`).
"""

import collections
import dataclasses
import itertools
import posixpath
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import haiku as hk
import jax
from jax.extend.core import Literal, Var
from jax.extend.core import primitives as jex

from haiku_implicit.mox import higher, mapped
from haiku_implicit.mox.graft import Graft, init_of
from haiku_implicit.mox.interface import Interface, Path, Slot
from haiku_implicit.mox.program import ANY_KEY, Program, program_of
from haiku_implicit.mox.replacement import Replacement
from haiku_implicit.mox.sources import Place
from haiku_implicit.mox.tree import (
    Body,
    Equation,
    ModuleCall,
    Node,
    calls,
    equations_in,
    hidden,
    needed,
    read_counts,
    returning_only,
    shape_of,
    walk,
)


class Site(NamedTuple):
    """A node to replace.

    Attributes:
      node: the node.
      path: the path of the modules and parameters of the new function.
      name: the path without the number of an equation, which depends on the other replaced equations.
      place: the place of the node.
      callers: the `id`s of the calls around `top`.
    """

    node: Any
    path: str
    name: str
    place: Place
    callers: tuple[int, ...]

    @property
    def top(self) -> Any:
        """The node itself, or the outermost equation around it."""
        return self.place.around[0] if self.place.around else self.node


def replace(
    mox: Program,
    nodes: Sequence[Node],
    replacement_of: Callable[[Site], Replacement],
    path: str | Callable[[Node], str] | None,
    keep_unused: bool,
) -> Program:
    """Replaces nodes of an expression by other functions.

    Args:
      mox: the expression.
      nodes: the nodes. If one is inside another, the outermost is replaced.
      replacement_of: makes the replacement for a site.
      path: the path of new modules and parameters.
      keep_unused: whether to keep parameters and state that nothing reads any more.
    """
    params = {v: name for name, slot in mox.interface.params.items() for v in slot.atoms}
    sites = sites_of(mox.body, nodes, path, params)
    for site in sites:
        _check(site)
    replacements = {id(site.node): replacement_of(site) for site in sites}
    pieces = {id(site.node): _piece(site, replacements[id(site.node)]) for site in sites}
    changes = higher.Changes(pieces, {}, holders_of(sites))
    known = higher.from_parameters(mox.body, set(params)) if changes.holders else set()
    ended = _ended_state(mox, [site for site in sites if replacements[id(site.node)].replaces])
    ignored = {v for path in ended for v in mox.interface.new_state[path].atoms}
    grafts: dict[int, Graft] = {}
    added, salts = Added(), _salts_in(mox)
    for site in {id(site.top): site for site in sites}.values():
        top = site.top
        if id(top) in pieces:
            piece = pieces[id(top)]
        else:
            piece = higher.piece_of_equation(top, changes, known)
        salt = _new_salt(site.name, salts)
        grafts[id(top)] = grafted(mox, top, piece, salt, added, ignored, id(top) not in pieces)
    defined: set[Any] = {v for graft in grafts.values() for v in graft.node.outputs}
    defined |= {v for graft in grafts.values() for x in walk(graft.node, False) for v in x.outputs}
    added.unchanged = {
        path
        for path in ended
        if path in mox.interface.state
        and not defined.intersection(mox.interface.new_state[path].atoms)
    }
    return with_grafts(mox, sites, grafts, added, keep_unused)


def _salts_in(mox: Program) -> set[int]:
    """The numbers that the program already folds into random keys.

    They are found in the program and not stored next to it, because it may come from a file or from
    another model.
    """
    if mox.body.read.isdisjoint(mox.interface.rng.atoms):
        return set()
    found: set[int] = set()
    for eqn in equations_in(mox.body):
        if eqn.primitive is jex.random_fold_in_p and isinstance(eqn.invars[1], Literal):
            found.add(int(eqn.invars[1].val))
    return found


def _new_salt(name: str, salts: set[int]) -> int:
    """A number for a place of this name that is not in `salts`. It is added to them."""
    numbers = (zlib.crc32(f"{name}:{i}".encode()) for i in itertools.count())
    salt = next(x for x in numbers if x not in salts)
    salts.add(salt)
    return salt


def holders_of(sites: Sequence[Site]) -> set[int]:
    """The `id`s of the equations around sites."""
    return {id(equation) for site in sites for equation in site.place.around}


def _ended_state(mox: Program, sites: Sequence[Site]) -> set[Path]:
    """The state of modules that are not called any more, and of the modules below them.

    Calls inside a replaced node count as removed, such as calls of a module's properties in `__call__`.
    """
    replaced = [site for site in sites if isinstance(site.node, ModuleCall)]
    if not mox.interface.new_state or not replaced:
        return set()
    gone = {id(x) for site in replaced for x in walk(site.node)}
    left = {call.path for call in calls(mox.body) if id(call) not in gone}
    ended = {site.path for site in replaced if site.node.path not in left}
    return {
        path
        for path in mox.interface.new_state
        if path[0] not in left and any(f"{path[0]}/".startswith(f"{x}/") for x in ended)
    }


def _check(site: Site) -> None:
    """Raises a ValueError if a node can't be replaced."""
    if any(x.is_differentiated for x in (*site.place.around, site.node)):
        raise ValueError(
            f"{site.node!r} can't be replaced: the model differentiates it (an inner jax.grad), and "
            "the equations of its derivative would stay what they are"
        )
    if getattr(getattr(site.node, "call", None), "bypassed", False):
        raise ValueError(
            f"{site.node!r} can't be replaced: it is in a loop, a branch or a traced function, "
            "and the model keeps arrays from outside in containers or attributes, and reads them there "
            "again and not of the call. Hand them through the loop, or return copies of containers"
        )


def _piece(site: Site, new: Replacement) -> higher.Piece:
    """The parameters, state and results of the function for a node."""
    made = hk.transform_with_state(new.fun)

    def apply(*args: Any) -> Any:
        return *made.apply(*args), {}

    piece = higher.Piece(new.inputs, new.outputs, made.init, apply)
    if isinstance(site.node, Equation):
        return piece
    return mapped.for_all_elements(piece, site.node)


# --- sites ----------------------------------------------------------------------------------------


def sites_of(
    root: Body,
    nodes: Sequence[Node],
    path: Any = None,
    params: Mapping[Any, Path] | None = None,
    inner: bool = False,
) -> list[Site]:
    """The sites of nodes in a tree.

    If one node is inside another, only the outermost has a site; with `inner`, all of them have one.

    All calls of a module have the same path. Each equation in a call has a path below its module's.

    Raises:
      ValueError: if a node is a body, or is not in the tree.
    """
    wanted = {id(x): x for x in nodes}
    for node in nodes:
        if isinstance(node, Body):
            raise ValueError(f"where: {node!r} is a body: choose calls of modules, or equations")
    for deep in (False, True):
        place = Place(root, params or {})
        found = list(_search(root.children, wanted, place, _Caller("", 0, ()), deep, inner))
        inside = {id(x) for node, _, _ in found for x in walk(node, into_bodies=deep)}
        if inside.issuperset(wanted):
            break
    else:
        lost = next(x for key, x in wanted.items() if key not in inside)
        raise ValueError(f"where: {lost!r} is not a node of this expression, but of another one")
    leaves: collections.Counter[Any] = collections.Counter()
    sites = []
    for node, place, caller in found:
        number = ""
        if path is not None:
            own = path if isinstance(path, str) else path(node)
        elif isinstance(node, ModuleCall):
            own = node.path or caller.module
        else:
            name = _NO_NAME.sub("_", node.name)
            own = "/".join(filter(None, [caller.module or _scope_of(place), name]))
            leaves[caller.call, own] += 1
            count = leaves[caller.call, own]
            number = f"_{count - 1}" if count > 1 else ""
        sites.append(Site(node, own + number, own, place, caller.callers))
    return sites


# Characters that Haiku does not allow in the name of a module (`scatter-add`, `<lambda>`).
_NO_NAME = re.compile(r"\W|^(?=\d)")


def _scope_of(place: Place) -> str:
    """The prefix of the names in a body, such as the name of a stack of layers."""
    while place.outer is not None:
        inside = walk(place.body, into_bodies=False)
        scopes = {x.call.scope for x in inside if isinstance(x, ModuleCall) and x.call}
        if found := scopes - {None, ""}:
            return posixpath.commonpath(map(str, found))
        place = place.outer
    return ""


class _Caller(NamedTuple):
    """The innermost call of a module around a node.

    Attributes:
      module: the full path of the module.
      call: the `id` of the call.
      callers: the `id`s of this call and of the calls around it, up to the body of an equation.
    """

    module: str
    call: int
    callers: tuple[int, ...]


def _search(
    nodes: Sequence[Node],
    wanted: Mapping[int, Node],
    place: Place,
    caller: _Caller,
    deep: bool,
    inner: bool,
) -> Iterator[tuple[Any, Place, _Caller]]:
    """The wanted nodes, their places, and the calls of modules around them."""
    for node in nodes:
        if id(node) in wanted:
            yield node, place, caller
            if not inner:
                continue
        if isinstance(node, ModuleCall):
            if not deep and node.inside.isdisjoint(wanted):
                continue
            callers = caller.callers if place.around else (*caller.callers, id(node))
            own = _Caller(node.path or caller.module, id(node), callers)
            yield from _search(node.children, wanted, place, own, deep, inner)
        elif isinstance(node, Equation) and deep:
            for body in node.bodies:
                below = place.inside(node, body)
                yield from _search(body.children, wanted, below, caller, deep, inner)


# --- grafts ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Added:
    """The entries that grafts have added: parameters, and state with its latest values."""

    params: dict[Path, Slot] = dataclasses.field(default_factory=dict)
    state: dict[Path, Slot] = dataclasses.field(default_factory=dict)
    new_state: dict[Path, Slot] = dataclasses.field(default_factory=dict)
    unchanged: set[Path] = dataclasses.field(default_factory=set)

    def add(self, node: Node, face: Interface) -> list[tuple[Any, Any]]:
        """Adds a function's entries. Returns pairs of its variables and earlier ones, if shared."""
        given: list[tuple[Any, Any]] = []
        for path, slot in face.params.items():
            given += self._shared(node, path, slot, self.params, self.params)
        for path, slot in face.state.items():
            given += self._shared(node, path, slot, self.state, self.new_state)
        self.new_state |= face.new_state
        return given

    def _shared(self, node: Node, path: Path, slot: Slot, first: Any, last: Any) -> Any:
        if path not in first:
            first[path] = slot
            return []
        avals = [[v.aval.strip_weak_type() for v in x.atoms] for x in (first[path], slot)]
        if avals[0] != avals[1]:
            raise ValueError(
                f"{node!r}: {'/'.join(path)!r} is {avals[1]} here, and {avals[0]} for another node. "
                "Give each a path of its own (path=)"
            )
        return zip(slot.atoms, last[path].atoms, strict=True)


def grafted(
    mox: Program,
    node: Any,
    piece: higher.Piece,
    salt: int,
    added: Added,
    ignored: Container[Any],
    prune: bool,
) -> Graft:
    """Traces a function for the inputs of a node.

    Args:
      mox: the expression that the node is in.
      node: the node.
      piece: the function, with its parameters and state.
      salt: a number for its random key at run time, different from the numbers of other functions.
      added: the entries of the grafts before this one. Entries with the same path are shared.
      ignored: results of the model that are not needed any more.
      prune: whether to drop unneeded equations, also from loops that carry their values.
    """
    wanted = hidden(mox.body, node, ignored)
    used = [i for i, v in enumerate(piece.outputs) if v in wanted]

    def apply(params: Any, state: Any, rng: Any, *arrays: Any) -> Any:
        key = jax.random.fold_in(rng, salt)
        out, state, taps = piece.apply(params, state, key, *arrays)
        return [out[i] for i in used] + jax.tree.leaves(taps), state

    key = mox.interface.rng.atoms if "rng" in mox.interface.leading else ()
    rng = shape_of(key[0]) if key else ANY_KEY
    inputs = [shape_of(x) for x in piece.inputs]
    program = hk.TransformedWithState(piece.init, apply)
    own = program_of(program, inputs, {}, params=None, state=None, rng=rng, prune=prune)
    face = own.interface
    returned = {v for v in face.returns if isinstance(v, Var)}
    children = needed(own.body.children, returned, effects=True)
    read = {*read_counts(children), *(v for v in face.returns if isinstance(v, Var))}
    pairs = [*zip(face.args.atoms, piece.inputs, strict=True), *added.add(node, face)]
    given = [pair for pair in pairs if pair[0] in read]
    (own_key,) = face.rng.atoms
    if own_key in read:
        if not key:
            raise ValueError(
                f"{node!r}: the replacement draws random numbers, and the model has no key"
            )
        given.append((own_key, key[0]))
    rest = needed(node.children, wanted.difference(piece.outputs))
    if rest and isinstance(node, ModuleCall):
        given += node.given
    results, taps = face.results.atoms[: len(used)], face.results.atoms[len(used) :]
    group = ModuleCall(
        call=None,
        children=(*rest, *children),
        returns=results,
        outputs=tuple(piece.outputs[i] for i in used),
        given=tuple(given),
    )
    # The values of new parameters depend only on their names, not on the order of changes.
    names = sorted(map("/".join, (*face.params, *face.state)))
    return Graft(group, own, piece.inputs, zlib.crc32(repr(names).encode()), taps)


# --- the whole expression -------------------------------------------------------------------------


def with_grafts(
    mox: Program,
    sites: Sequence[Site],
    grafts: Mapping[int, Graft],
    added: Added,
    keep_unused: bool,
) -> Program:
    """The expression in which grafts replace the top nodes of sites."""
    body = mox.body
    face = _joined(mox.interface, added)
    bodies = [body, *(graft.mox.body for graft in grafts.values())]
    new = Body(
        body.name,
        constvars=tuple(v for x in bodies for v in x.constvars),
        consts=tuple(c for x in bodies for c in x.consts),
        invars=(),
        children=_exchanged(body.children, grafts, {x for site in sites for x in site.callers}),
        returns=(),
    )
    tops = list({id(site.top): site.top for site in sites}.values())
    counts = body.counts_with(tops, [graft.node for graft in grafts.values()])
    if not keep_unused:
        lost = {v for path in added.unchanged for v in face.state[path].atoms}
        lost |= _read_only_by(tops, body, counts)
        dead = _handed_on(body, lost, counts, face.returns)
        new = dataclasses.replace(new, children=_without_outputs(new.children, dead))
        face = _without_unused(face, body.read_counts, +counts, added.unchanged)
    new = dataclasses.replace(new, invars=face.invars, returns=face.returns)
    vars(new)["read_counts"] = counts  # the value of the cached property
    init = init_of(mox, new, face, list(grafts.values()))
    return dataclasses.replace(mox, body=new, interface=face, init=init)


def _joined(face: Interface, added: Added) -> Interface:
    """The interface with the parameters and state of grafts.

    Raises:
      ValueError: if the model already has a parameter or state of the same path.
    """
    for kind in ("params", "state"):
        for path in getattr(added, kind):
            if path in getattr(face, kind):
                raise ValueError(
                    f"{kind}: the model has {'/'.join(path)!r}, and a replacement makes another one. "
                    "Give it another place: path="
                )
    leading = face.leading
    if added.state and not face.has_state:
        leading = ("params", "state", *face.leading[1:])
    return dataclasses.replace(
        face,
        leading=leading,
        params={**face.params, **added.params},
        state={**face.state, **added.state},
        new_state={
            **face.new_state,
            **{path: face.state[path] for path in added.unchanged},
            **added.new_state,
        },
    )


def _read_only_by(nodes: Sequence[Node], body: Body, counts: collections.Counter[Var]) -> set[Var]:
    """The variables of other nodes that only the removed nodes read.

    Args:
      nodes: the removed nodes.
      body: the program before their removal.
      counts: how often variables are read without them.
    """
    gone = [x for node in nodes for x in walk(node, into_bodies=False)]
    inside = {v for x in gone for v in x.outputs}
    inside |= {v for x in gone if isinstance(x, ModuleCall) for v, _ in x.given}
    return {v for v in read_counts(nodes) if not counts[v]}.difference(inside, body.invars)


def _exchanged(
    nodes: Sequence[Node], grafts: Mapping[int, Graft], callers: Container[int]
) -> tuple[Node, ...]:
    """Puts grafts into nodes. Nodes outside of `callers`, the calls around grafts, do not change."""
    new: list[Node] = []
    for node in nodes:
        if id(node) in grafts:
            node = grafts[id(node)].node
        elif id(node) in callers:
            children = _exchanged(node.children, grafts, callers)
            node = dataclasses.replace(cast(ModuleCall, node), children=children)
        new.append(node)
    return tuple(new)


def _without_outputs(nodes: Sequence[Node], dead: set[Var]) -> tuple[Node, ...]:
    """Drops the dead outputs of calls. Other nodes stay the same objects."""
    if not dead:
        return tuple(nodes)
    new: list[Node] = []
    for node in nodes:
        if isinstance(node, ModuleCall):
            node = returning_only(node, set(node.outputs) - dead)
            children = _without_outputs(node.children, dead)
            if any(x is not y for x, y in zip(children, node.children, strict=True)):
                node = dataclasses.replace(node, children=children)
        new.append(node)
    return tuple(new)


def _handed_on(
    body: Body, lost: set[Var], read: collections.Counter[Var], returned: Container[Any]
) -> set[Var]:
    """The outputs of calls that only pass values on to removed nodes (`hk.lift`).

    Args:
      body: the program before the removal.
      lost: variables that nothing reads any more, or that only such calls read.
      read: how often variables are read now. The reads of such calls are subtracted.
      returned: the results of the new program.
    """
    if not lost:
        return set()
    handed: dict[Any, Any] = {}
    nodes = list(body.children)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ModuleCall):
            handed.update(zip(node.outputs, node.returns, strict=True))
            nodes += node.children
    rest, found = (
        [v for v, x in handed.items() if v in lost or (isinstance(x, Var) and x in lost)],
        set[Var](),
    )
    while rest:
        v = rest.pop()
        if v in handed and v not in found and not read[v] and v not in returned:
            found.add(v)
            if isinstance(x := handed[v], Var):
                read[x] -= 1
                rest.append(x)
    return found


def _without_unused(
    face: Interface, old: Container[Any], new: Container[Any], unchanged: set[Path]
) -> Interface:
    """Drops the parameters that only replaced nodes read, and the state that only they changed."""

    def is_read(counts: Container[Any], slot: Slot) -> bool:
        return any(v in counts for v in slot.atoms)

    params = {
        path: slot
        for path, slot in face.params.items()
        if is_read(new, slot) or not is_read(old, slot)
    }
    gone = {path for path in unchanged if not is_read(new, face.state[path])}
    return dataclasses.replace(
        face,
        params=params,
        state={path: slot for path, slot in face.state.items() if path not in gone},
        new_state={path: slot for path, slot in face.new_state.items() if path not in gone},
    )
