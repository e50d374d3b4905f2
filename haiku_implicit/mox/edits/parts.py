"""Parts of a model: values in it, the model up to a node, one module; shared and renamed modules."""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var
from jax.extend.core import primitives as jex

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Key, Tree
from haiku_implicit.mox.edits.edit import Edit
from haiku_implicit.mox.edits.higher import Changes
from haiku_implicit.mox.edits.replacement import Original, structures_of
from haiku_implicit.mox.program import interface, marks, tree
from haiku_implicit.mox.program.interface import ENTRIES, Interface, Path, Slot, unread
from haiku_implicit.mox.program.paths import with_new_paths
from haiku_implicit.mox.program.program import Program
from haiku_implicit.mox.program.sites import Region, Site, arity_of, given_to, read_by, sites_of
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, Node


def read_of(mox: Program, slots: Mapping[Path, Slot], nodes: Sequence[Node]) -> list[str]:
    """The parameters or state that nodes read, each as `module/name`, in the model's order."""
    found = set()
    for site in sites_of(mox.body, nodes, inner=True, params=interface.by_variable(slots)):
        found |= set(read_by(site.node, site.region.known))
    return ["/".join(path) for path in slots if path in found]


def states_of(mox: Program, nodes: Sequence[Node]) -> list[str]:
    """The state that nodes read or, at the top of the model, write."""
    defined = set().union(*map(tree.defined_in, nodes))
    new_state = mox.interface.new_state.items()
    written = {"/".join(path) for path, slot in new_state if defined.intersection(slot.atoms)}
    return sorted(written.union(read_of(mox, mox.interface.state, nodes)))


def hidden_outputs_of(mox: Program, node: Node) -> tuple[Var, ...]:
    """The variables that a node defines and does not return, but that nodes outside of it read."""
    (site,) = sites_of(mox.body, [node])
    return tree.hidden_outputs(site.region.body, node)


# --- values ---------------------------------------------------------------------------------------


def tapped(mox: Program, nodes: Sequence[Node]) -> tuple[Program, dict[str, Slot]]:
    """The expression with the values of nodes at its top level, and the slots of these values.

    A value in a loop has one more axis in front, for the steps of the loop.
    """
    names = _names(sites_of(mox.body, nodes, inner=True))
    looped = [site for site in names.values() if site.region.around]
    taps: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    for name, site in names.items():
        if site.region.around:
            taps[id(site.region.body)][name] = site.node.outputs
    edit = Edit(Changes(mox, looped, {}, taps))
    rest = {key: iter(graft.taps) for key, graft in edit.grafts.items()}
    slots = {}
    for name, site in sorted(names.items()):
        atoms = site.node.outputs
        if site.region.around:
            atoms = tuple(next(rest[id(site.top)]) for _ in atoms)
        slots[name] = Slot(structures_of(site.node)[1], atoms)
    return edit.program(), slots


def _names(sites: Sequence[Site]) -> dict[str, Site]:
    """Sites by their names: path and method, with `:1` and so on for further calls."""
    counts: collections.Counter[str] = collections.Counter()
    names = {}
    for site in sites:
        method = getattr(site.node, "method", "")
        name = site.path if method in ("", "__call__") else f"{site.path}.{method}"
        number = counts[name]
        counts[name] += 1
        names[f"{name}:{number}" if number else name] = site
    return names


def with_taps(mox: Program, nodes: Sequence[Node]) -> Program:
    """The expression that returns its results and the values of nodes, by path."""
    new, slots = tapped(mox, nodes)
    filled = new.interface.results.filled, {name: slot.filled for name, slot in slots.items()}
    face = dataclasses.replace(new.interface, results=_slot_of(filled))
    return new.with_nodes(new.body.children, face, new.init)


def _slot_of(filled: Tree) -> Slot:
    """The slot of a tree with variables and literals in it."""
    structure, atoms = marks.split(filled, lambda x: isinstance(x, Var | Literal))
    return Slot(structure, tuple(atoms))


# --- parts ----------------------------------------------------------------------------------------


def truncated(mox: Program, node: Node) -> Program:
    """The expression up to a node, whose value is the result."""
    new, slots = tapped(mox, [node])
    ((_, result),) = slots.items()
    defined = _defined_before(new.body, set(result.atoms))
    face = new.interface
    face = dataclasses.replace(face, results=result, new_state=face.state_after(defined))
    return pruned(new, face, new.body.children)


def _defined_before(body: Body, wanted: set[Any]) -> set[Var]:
    """The variables that are defined by the time that these have been computed."""
    defined: set[Any] = {*body.invars, *body.constvars}
    for step in tree.steps(body.children):
        if defined.issuperset(x for x in wanted if not isinstance(x, Literal)):
            break
        defined.update(step.outputs)
    return defined


def pruned(mox: Program, face: Interface, children: Sequence[Node]) -> Program:
    """The expression with other results, without the nodes and parameters that they don't need."""
    children = tree.needed(children, set(tree.variables(face.returns)))
    read = tree.uses(children, face.results.atoms)
    old, new = face.state, face.new_state
    unchanged = {path for path, x in old.items() if new.get(path, x).atoms == x.atoms}
    params, state = unread(face.params, read), unread(old, read) & unchanged
    face = face.without(params, state)
    return mox.with_nodes(children, face, mox.with_init_of(face.of_init))


# --- one module -----------------------------------------------------------------------------------


def extracted(mox: Program, node: Any, layer: int | Sequence[int] | None = None) -> Program:
    """Extracts one call of a module as a separate expression, a function of the call's arguments.

    Args:
      mox: the expression of the model.
      node: the call.
      layer: the layer of the stack around the call; for nested stacks, one layer for each.
    """
    if not isinstance(node, ModuleCall) or node.call is None:
        raise value_error(f"where: expected the call of a module, got {node!r}")
    (site,) = sites_of(mox.body, [node])
    body, nodes, unknown = _scope_of(mox.body, site, layer)
    original, face = Original(site.region.body, node), mox.interface
    # As single steps: a whole call would need all of its arguments, even for one of its results.
    single = [node or tree.setting((v[0], x[0])) for v, x, node in tree.steps(nodes)]
    children = tree.needed(single, set(original.captured))
    read = tree.uses(children, original.captured)
    for v, reason in [*((v, _ARGUMENTS) for v in face.args.atoms), *unknown.items()]:
        if read[v]:
            raise value_error(f"{node!r} can't be extracted: {reason}")
    own = _interface(face, node, original, read)
    whole = dataclasses.replace(mox, body=body)
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
    args, kwargs = structure.merge(original.arguments)
    changed = {*original.hidden, *node.outputs}
    uses_state = any(changed.intersection(slot.atoms) for slot in face.new_state.values()) or any(
        read[v] for slot in face.state.values() for v in slot.atoms
    )
    return dataclasses.replace(
        face,
        leading=tuple(name for name in face.leading if name != "state" or uses_state),
        signature=interface.ANY_ARGUMENTS,
        args=_slot_of(dict(args=args, kwargs=kwargs)),
        results=Slot(results, tuple(node.outputs)),
        new_state=face.state_after(changed) if uses_state else {},
        state=face.state if uses_state else {},
    )


# --- the scope of a call -----------------------------------------------------------------------------

_ARGUMENTS = "beside its arguments it reads what is computed from the model's arguments"
_CARRIED = "beside its arguments it reads what a loop around it computes from step to step"


def _scope_of(
    root: Body, site: Site, layer: int | Sequence[int] | None
) -> tuple[Body, list[Node], dict[Var, str]]:
    """The nodes in reach of a call, in a given layer of each stack around it.

    Returns:
      The whole program, with the constants of all bodies around the call; the nodes of these bodies;
      and variables without a value outside the loops around the call, each with the reason.
    """
    layers = iter(_checked_layers(site, layer))
    children, unknown = [*root.children], {}
    for region in _inwards(site.region):
        equation = region.around[-1]
        number = next(layers) if equation.primitive is jex.scan_p else None
        for v, outer in _arguments(equation, region.body, number):
            if isinstance(outer, str):
                unknown[v] = outer
            else:
                children.append(outer)
        children += region.body.children
    whole = tree.with_constants(root, (region.body for region in _inwards(site.region)))
    return whole, children, unknown


def _inwards(region: Region) -> list[Region]:
    """The regions from the outermost equation around a region to the region itself."""
    return [*_inwards(region.outer), region] if region.outer else []


def _checked_layers(site: Site, layer: int | Sequence[int] | None) -> Sequence[int | None]:
    """The layer of each stack around a call; None for each if no layer is given."""
    lengths = [x.eqn.params["length"] for x in site.region.around if x.primitive is jex.scan_p]
    if layer is None:
        return [None] * len(lengths)
    given = list(layer) if isinstance(layer, Sequence) else [layer]
    pairs = zip(given, lengths, strict=False)
    if len(given) != len(lengths) or not all(0 <= i < n for i, n in pairs):
        raise value_error(f"layer: {site.node!r} is {_described(lengths)}, got {layer!r}")
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
    constants, num_carry = arity_of(equation, body)
    for i, (v, outer) in enumerate(given_to(equation, body)):
        if i < constants:
            yield v, tree.setting((v, outer))
        elif i < constants + num_carry:
            yield v, _CARRIED
        elif layer is None:
            length = equation.eqn.params["length"]
            reason = (
                f"it is in a stack of {length} layers. Say which one is meant, from 0 on: layer="
            )
            yield v, reason
        else:
            yield v, _element(v, outer, layer)


def _element(v: Var, stacked: Atom, index: int) -> ModuleCall:
    """A node that sets a variable to an element of an array."""
    closed = jax.make_jaxpr(lambda x: jax.lax.index_in_dim(x, index, keepdims=False))(
        tree.shape_of(stacked)
    )
    body = tree.body_of("", closed)
    return ModuleCall(None, ((body.invars[0], stacked),), body.children, body.returns, (v,))


# --- the module's parameters -------------------------------------------------------------------------


def _init_on_zeros(mox: Program, face: Interface) -> Callable[..., Any] | None:
    """The `init` of an extracted module: calls the model's `init` on zeros."""

    def init(rng: Key | None, *args: Any, **kwargs: Any) -> Tree:
        slot = mox.interface.args
        zeros = [np.zeros(v.aval.shape, v.aval.dtype) for v in slot.atoms]
        named = collections.OrderedDict(slot.tree.merge(zeros))
        given = inspect.BoundArguments(mox.interface.signature, named)
        return face.of_init(*mox.initial(rng, *given.args, **given.kwargs))

    return mox.init and init


# --- names ----------------------------------------------------------------------------------------


def shared(mox: Program, taking: Mapping[str, str]) -> Program:
    """The expression in which some modules use the parameters of others.

    Args:
      mox: the expression.
      taking: maps the path of a module to the path of the module whose parameters it takes.

    Raises:
      ValueError: if a module does not exist, or its parameters have other names, shapes or dtypes; if a
        module would take its own parameters, directly or through others, or the ones of two modules.
    """
    old: Mapping[Path, Slot] = mox.interface.params
    sources: dict[Path, Path] = {}
    for module, of in taking.items():
        for path, source in _pairs(old, module, of):
            if sources.setdefault(path, source) != source:
                raise value_error(
                    f"share: {'/'.join(path)!r} would take those of {'/'.join(sources[path])!r} and of "
                    f"{'/'.join(source)!r}: give each module one other"
                )
    last = {path: _last_source(path, sources) for path in sources}
    pairs = ((old[path].atoms, old[source].atoms) for path, source in last.items())
    given = [pair for atoms in pairs for pair in zip(*atoms, strict=True)]
    params = {path: slot for path, slot in old.items() if path not in sources}
    face = dataclasses.replace(mox.interface, params=params)
    children = (tree.setting(*given), *mox.body.children)
    return mox.with_nodes(children, face, mox.with_init_of(face.of_init))


def _pairs(entries: Mapping[Path, Slot], module: str, of: str) -> Iterator[tuple[Path, Path]]:
    """Pairs of a module's parameters and the parameters of another module that replace them."""
    own, other = (_below(entries, path) for path in (module, of))
    for name, found in ((module, own), (of, other)):
        if not found:
            raise value_error(f"share: no parameter of the model is below {name!r}")
    for (rest, name), slot in own.items():
        source = other.get((rest, name))
        there, here = ([v.aval.str_short() for v in x.atoms] for x in (source or slot, slot))
        if source is None or there != here:
            raise value_error(
                f"share: {module!r} can't have the parameters of {of!r}: "
                f"{f'{rest}/{name}'.lstrip('/')!r} is {', '.join(here)}, and there it is "
                f"{'missing' if source is None else ', '.join(there)}"
            )
        yield (f"{module}{rest}", name), (f"{of}{rest}", name)


def _last_source(path: Path, sources: Mapping[Path, Path]) -> Path:
    """The parameter at the end of a chain of modules that take parameters of each other."""
    way = [path]
    while way[-1] in sources:
        way.append(sources[way[-1]])
        if way[-1] in way[:-1]:
            circle = ", ".join(module for module, _ in way[way.index(way[-1]) :])
            raise value_error(
                "share: each of these modules takes the parameters of the next one, in a circle: "
                f"{circle}. Leave one out; to exchange their parameters, rename them"
            )
    return way[-1]


def _below(entries: Mapping[Path, Slot], module: str) -> dict[Path, Slot]:
    """The entries of a module and of the modules below it, by the rest of their path."""
    below = ((path, x) for path, x in entries.items() if tree.is_below(path[0], module))
    return {(path[0][len(module) :], path[1]): slot for path, slot in below}


def renamed(mox: Program, nodes: Sequence[Node], name: str | Callable[[str], str]) -> Program:
    """The expression with new names for modules, and for their parameters and state.

    Args:
      mox: the expression.
      nodes: calls of modules.
      name: the new last name of the path, the whole new path, or a function of the old one.

    Raises:
      ValueError: if two modules would have the same name.
    """
    sites = sites_of(mox.body, nodes, inner=True)
    names = {}
    for site in sites:
        old = getattr(site.node, "path", "")
        if not old:
            raise value_error(f"where: {site.node!r} has no name: choose calls of modules")
        new = name(old) if callable(name) else name
        new = new if "/" in new or callable(name) else "/".join([*old.split("/")[:-1], new])
        names[old] = new
    if len(names) > 1 and not callable(name):
        raise value_error(
            f"{name!r} can't be the name of {', '.join(names)}: give a function of the path"
        )
    face = mox.interface
    renamed: Any = {field: _with_names(face.slots(field), names) for field in ENTRIES}
    face = dataclasses.replace(face, **renamed)
    children = with_new_paths(mox.body.children, lambda path: _new_name(path, names))

    def of_init(*entries: Mapping[Path, Any]) -> Tree:
        return face.of_init(*(_with_names(x, names) for x in entries))

    return mox.with_nodes(children, face, mox.with_init_of(of_init))


def _new_name(path: str, names: Mapping[str, str]) -> str:
    for old in sorted(names, key=len, reverse=True):
        if tree.is_below(path, old):
            return names[old] + path[len(old) :]
    return path


def _with_names(entries: Mapping[Path, Array], names: Mapping[str, str]) -> dict[Path, Array]:
    new: dict[Path, Array] = {}
    for (module, name), x in entries.items():
        path = _new_name(module, names), name
        if path in new:
            raise value_error(
                f"there would be two {'/'.join(path)!r}: give the module another name"
            )
        new[path] = x
    return new
