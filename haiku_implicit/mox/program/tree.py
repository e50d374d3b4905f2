"""The tree of a program: calls of modules, their equations, and the bodies of equations."""

import collections
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from haiku_implicit.core.interpreter import jaxprs_of
from haiku_implicit.core.typing import Array, EqnParams
from haiku_implicit.mox.program.marks import DIFFERENTIATED, Call, mark_p

Atom = Union[Var, Literal]  # noqa: UP007


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Equation:
    """One equation of the program: a leaf or, for a loop, a branch or a call, the parent of its bodies.

    Attributes:
      eqn: JAX's equation, without marks.
      marked: its parameters with marks in their jaxprs; None without marks.
    """

    eqn: JaxprEqn
    marked: Mapping[str, Any] | None = None

    @property
    def primitive(self) -> Any:
        """The primitive that the equation binds."""
        return self.eqn.primitive

    @property
    def inputs(self) -> Sequence[Atom]:
        """The operands of the equation."""
        return self.eqn.invars

    @property
    def outputs(self) -> Sequence[Var]:
        """The variables of the equation's results."""
        return self.eqn.outvars

    @property
    def name(self) -> str:
        """The name of the function that the equation calls, or else of its primitive."""
        return function_name(self.eqn) or self.primitive.name

    @property
    def label(self) -> str:
        """The names of its primitive and of the function that it calls."""
        return f"{self.primitive.name} {function_name(self.eqn)}".strip()

    @property
    def is_differentiated(self) -> bool:
        """Whether an inner `jax.grad` differentiates the equation, or it is part of a derivative.

        Equations in the body of such an equation do not know this.
        """
        return "jvp(" in str(self.eqn.source_info.name_stack)

    @functools.cached_property
    def bodies(self) -> tuple["Body", ...]:
        """The programs in its parameters: the body of a loop, the branches of a condition."""
        from_params = self.eqn.params if self.marked is None else self.marked
        return tuple(body_of(name, jaxpr) for name, jaxpr in jaxprs_of(from_params))

    def params_to_bind(self, marked: bool) -> Mapping[str, Any]:
        """The parameters, with or without marks in their jaxprs."""
        return self.eqn.params if self.marked is None or not marked else self.marked

    @property
    def children(self) -> tuple["Node", ...]:
        """The bodies of the equation."""
        return self.bodies

    def __repr__(self) -> str:
        return f"<{self.label}: {_avals(self.inputs)} -> {_avals(self.outputs)}>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModuleCall:
    """One call of a method of a Haiku module, or of an inserted function.

    Attributes:
      call: its module, arguments and results; None for a group of nodes that is not shown as a call.
      given: the variables of its array arguments, each with the value that it is set to.
      children: the nodes in it.
      returns: its results, as variables of the call.
      outputs: its results, as variables of the rest of the program.
      seen: the transformations of JAX that were applied to its arguments, the first one first.
      seen_results: the transformations that were applied to its results.
    """

    call: Call | None
    given: tuple[tuple[Var, Atom], ...]
    children: tuple["Node", ...]
    returns: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    seen: tuple[Any, ...] = ()
    seen_results: tuple[Any, ...] = ()

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """The arrays among its arguments."""
        return tuple(atom for _, atom in self.given)

    @property
    def path(self) -> str:
        """The full name of the module, as in the parameters."""
        return self.call.path if self.call else ""

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.path.rpartition("/")[2]

    @property
    def cls(self) -> type | None:
        """The class of the module; None for a function."""
        return self.call.cls if self.call else None

    @property
    def type_name(self) -> str:
        """The name of the module's class; empty for a function."""
        return self.cls.__name__ if self.cls is not None else ""

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.call.method if self.call else ""

    @property
    def kind(self) -> str:
        """The class of the module, and the method unless it is `__call__`."""
        method = "" if self.method in ("", "__call__") else f".{self.method}"
        return f"{self.type_name or 'function'}{method}"

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments that the module was constructed with, by their names."""
        return self.call.config if self.call else {}

    @functools.cached_property
    def inside(self) -> frozenset[int]:
        """The `id`s of the nodes in it, without those in the bodies of equations."""
        deeper = (child.inside for child in self.children if isinstance(child, ModuleCall))
        return frozenset(map(id, self.children)).union(*deeper)

    @functools.cached_property
    def captured(self) -> tuple[Var, ...]:
        """The variables that it reads, but not as arguments: parameters, state, closures' values."""
        own = defined_in(self)
        return tuple(v for v in uses(self.children, self.returns) if v not in own)

    @property
    def is_differentiated(self) -> bool:
        """Whether the call and its derivative are one call."""
        return DIFFERENTIATED in (*self.seen, *self.seen_results)

    def __repr__(self) -> str:
        method = "" if self.method in ("", "__call__") else f".{self.method}"
        label = f"{self.path}{method}: {self.type_name or 'function'}"
        return f"<{label}: {_avals(self.inputs)} -> {_avals(self.outputs)}>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Body:
    """A program: the whole model, or a program in the parameters of an equation.

    Attributes:
      name: the name of this parameter, such as `branches[0]`.
      constvars: the variables of its constants.
      consts: their values; empty if an equation passes them.
      invars: the variables of its arguments.
      children: the nodes in it.
      returns: its results.
    """

    name: str
    constvars: tuple[Var, ...]
    consts: tuple[Array, ...]
    invars: tuple[Var, ...]
    children: tuple["Node", ...]
    returns: tuple[Atom, ...]

    @property
    def inputs(self) -> tuple[Var, ...]:
        """The arguments of the program."""
        return self.invars

    @property
    def outputs(self) -> tuple[Atom, ...]:
        """The results of the program."""
        return self.returns

    @functools.cached_property
    def uses(self) -> collections.Counter[Var]:
        """How often its nodes read each variable, or it returns it."""
        return uses(self.children, self.returns)

    @functools.cached_property
    def last_uses(self) -> dict[int, list[Var]]:
        """The variables that no later node reads, by the `id` of a node: their values can be freed."""
        alive = {*variables(self.returns), *self.constvars, *self.invars}
        found: dict[int, list[Var]] = {}

        def visit(nodes: Sequence[Any]) -> None:
            for node in reversed(nodes):
                if isinstance(node, Equation):
                    last(node, (*node.inputs, *node.outputs))
                else:
                    given = [atom for pair in node.given for atom in pair]
                    last(node, (*node.returns, *node.outputs, *given))
                    visit(node.children)

        def last(node: Node, atoms: Sequence[Atom]) -> None:
            new = set(variables(atoms)) - alive
            alive.update(new)
            found[id(node)] = list(new)

        visit(self.children)
        return found

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.children)} nodes>"


Node = Union[ModuleCall, Equation, Body]  # noqa: UP007


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """The variables among variables and literals."""
    return (x for x in atoms if isinstance(x, Var))


def uses(nodes: Iterable[Node], returns: Iterable[Atom] = ()) -> collections.Counter[Var]:
    """How often nodes, and the nodes in them, read each variable; with results of their program."""
    found: list[Atom] = []
    rest = list(nodes)
    while rest:  # a generator like `walk` takes three times as long, for a whole model
        node = rest.pop()
        found += reads(node)
        if not isinstance(node, Equation):
            rest += node.children
    return collections.Counter(variables([*found, *returns]))


def defined_in(node: "Node") -> set[Var]:
    """The variables that a node, and the nodes in it, define."""
    found: set[Any] = set()
    for x in walk(node, into_bodies=False):
        found.update(x.outputs)
        if isinstance(x, ModuleCall):
            found.update(v for v, _ in x.given)
    return found


def reads(node: Node) -> Sequence[Atom]:
    """The variables and literals that a node itself reads, without the nodes in it."""
    if isinstance(node, Equation):
        return node.inputs
    return [*node.inputs, *node.returns]


def needed(nodes: Sequence[Node], wanted: set[Var], effects: bool = False) -> tuple[Node, ...]:
    """Keeps the nodes that variables depend on.

    Args:
      nodes: the nodes.
      wanted: the variables. The variables that the kept nodes read are added.
      effects: whether to keep equations with side effects, too (`jax.debug.print`).
    """
    kept: list[Node] = []
    for node in reversed(nodes):
        if isinstance(node, ModuleCall):
            node = returning_only(node, wanted)
            wanted.update(variables(node.returns))
            children = needed(node.children, wanted, effects)
            # A module may read the arguments of its constructor later on.
            given = any(v in wanted for v, _ in node.given)
            if not node.outputs and not children and not given:
                continue
            if len(children) < len(node.children):
                node = dataclasses.replace(node, children=children)
        elif isinstance(node, Body) or not (
            wanted.intersection(node.outputs) or (effects and node.eqn.effects)
        ):
            continue
        wanted.update(variables(reads(node)))
        kept.append(node)
    return tuple(reversed(kept))


def returning_only(node: ModuleCall, wanted: Container[Any]) -> ModuleCall:
    """A call that returns only its wanted outputs, and None for the rest."""
    pairs = list(zip(node.outputs, node.returns, strict=True))
    kept = [(v, x) for v, x in pairs if v in wanted]
    if len(kept) == len(pairs):
        return node
    call = node.call
    if call is not None and call.results is not None:
        flags = iter([v in wanted for v in node.outputs])
        leaves = (x if x is not None or next(flags, True) else (None,) for x in call.results.leaves)
        results = call.results._replace(leaves=tuple(leaves))
        call = dataclasses.replace(call, results=results)
    outputs = tuple(v for v, _ in kept)
    return dataclasses.replace(node, call=call, outputs=outputs, returns=tuple(x for _, x in kept))


def hidden(body: Body, node: Node, ignored: Iterable[Atom] = ()) -> set[Var]:
    """The variables that are defined in a node and read outside it.

    They may be more than its results: the first dropout of a model draws the block of random keys that
    the next ones use, and a normalization writes state.

    Args:
      body: the program around the node.
      node: the node.
      ignored: results of the program that do not count.
    """
    own = uses([node], ignored)
    return {v for v in defined_in(node) if body.uses[v] > own[v]}


def hidden_outputs(body: Body, node: Node) -> tuple[Var, ...]:
    """The variables that a node defines and does not return, but that are read outside it."""
    others = hidden(body, node).difference(node.outputs)
    inside = (v for x in walk(node, into_bodies=False) for v in x.outputs)
    return tuple(dict.fromkeys(v for v in inside if v in others))


class Step(NamedTuple):
    """A step of a program: an equation, or a variable that is set to another atom.

    Attributes:
      outputs: the variables that it defines.
      inputs: the atoms that it reads.
      equation: the equation; None for a variable that is set.
    """

    outputs: Sequence[Var]
    inputs: Sequence[Atom]
    equation: Equation | None = None


def steps(nodes: Sequence[Node]) -> Iterator[Step]:
    """The steps of nodes, in order."""
    for node in nodes:
        if isinstance(node, Equation):
            yield Step(node.outputs, node.inputs, node)
        elif isinstance(node, ModuleCall):
            yield from (Step((v,), (x,)) for v, x in node.given)
            yield from steps(node.children)
            pairs = zip(node.outputs, node.returns, strict=True)
            yield from (Step((v,), (x,)) for v, x in pairs)


def with_constants(body: Body, others: Iterable[Body]) -> Body:
    """A program that has the constants of other programs, too."""
    bodies = (body, *others)
    constvars = tuple(v for x in bodies for v in x.constvars)
    consts = tuple(c for x in bodies for c in x.consts)
    return dataclasses.replace(body, constvars=constvars, consts=consts)


def setting(*given: tuple[Var, Atom]) -> ModuleCall:
    """A node that sets variables to other atoms."""
    return ModuleCall(None, given, (), (), ())


def is_below(path: str, above: str) -> bool:
    """Whether a path is the path of a module, or of a module or parameter below it."""
    return f"{path}/".startswith(f"{above}/")


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a variable."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def walk(node: Node, into_bodies: bool = True) -> Iterator[Node]:
    """A node and all nodes in it, in the order in which they run."""
    yield node
    if into_bodies or not isinstance(node, Equation):
        for child in node.children:
            yield from walk(child, into_bodies)


def calls(root: Any) -> Iterator[ModuleCall]:
    """The calls of modules (without constructors) and of inserted functions in a tree."""
    for node in root.children:
        if isinstance(node, ModuleCall) and node.call and node.method != "__init__":
            yield node
        if not isinstance(node, Equation) or node.marked is not None:
            yield from calls(node)


def function_name(eqn: JaxprEqn) -> str:
    """The name of the function that an equation calls; empty if it calls none.

    It is the parameter `name` if there is one (`jit`), or the name of a function with a custom
    derivative rule.
    """
    name = eqn.params.get("name")
    if isinstance(name, str):
        return name
    called = eqn.params.get("call_jaxpr")
    jaxpr = getattr(called, "jaxpr", called)
    return jaxpr.debug_info.func_name if isinstance(jaxpr, Jaxpr) else ""


def _avals(atoms: Sequence[Atom]) -> str:
    return ", ".join(atom.aval.str_short(short_dtypes=True) for atom in atoms) or "()"


# --- from a jaxpr ----------------------------------------------------------------------------------


def body_of(name: str, jaxpr: Any) -> Body:
    """The tree of a jaxpr, whose marks become calls of modules."""
    consts: tuple[Array, ...] = ()
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr, consts = jaxpr.jaxpr, tuple(jaxpr.consts)
    returns = tuple(jaxpr.outvars)
    return Body(name, tuple(jaxpr.constvars), consts, tuple(jaxpr.invars), _nodes(jaxpr), returns)


def _nodes(jaxpr: Jaxpr) -> tuple[Node, ...]:
    """The nodes of a program's equations.

    An inner derivative may leave a `begin` without its `end`, or the other way round, and constructors
    have only an `end`. Then the equations are the same, and the call has fewer of them, or none.
    """
    open_calls: list[tuple[Any, list[Node]]] = [(None, [])]
    known: dict[int, EqnParams] = {}  # by the `id` of parameters, which equations may share
    for eqn in jaxpr.eqns:
        if eqn.primitive is not mark_p:
            params = known.get(id(eqn.params))
            if params is None:
                params = known[id(eqn.params)] = _without_marks_in(eqn.params)
            open_calls[-1][1].append(_leaf(eqn, params))
        elif eqn.params["kind"] == "begin":
            open_calls.append((eqn, []))
        else:
            started, children = _close(open_calls, eqn.params["call"])
            open_calls[-1][1].append(_module_call(started, eqn, children))
    while len(open_calls) > 1:
        _merge_last(open_calls)
    return tuple(open_calls[0][1])


def _close(open_calls: list[tuple[Any, list[Node]]], call: Call) -> tuple[Any, list[Node]]:
    """Removes a call from the open ones. Returns its begin mark and the nodes after it."""
    if not any(eqn is not None and eqn.params["call"] is call for eqn, _ in open_calls):
        return None, []
    while open_calls[-1][0].params["call"] is not call:
        _merge_last(open_calls)
    return open_calls.pop()


def _merge_last(open_calls: list[tuple[Any, list[Node]]]) -> None:
    begin, children = open_calls.pop()
    given = zip(begin.outvars[1:], begin.invars, strict=True)
    open_calls[-1][1].extend([setting(*given), *children])


def _module_call(begin: Any, end: JaxprEqn, children: Sequence[Node]) -> ModuleCall:
    given: Any = ()
    seen: Any = ()
    if begin is not None:
        given, seen = tuple(zip(begin.outvars[1:], begin.invars, strict=True)), begin.params["seen"]
    call, returns, outputs = end.params["call"], tuple(end.invars[1:]), tuple(end.outvars)
    return ModuleCall(call, given, tuple(children), returns, outputs, seen, end.params["seen"])


def _leaf(eqn: JaxprEqn, params: EqnParams) -> Equation:
    if params is eqn.params:
        return Equation(eqn)
    return Equation(eqn.replace(params=params), eqn.params)


def _without_marks_in(params: EqnParams) -> Any:
    """Removes marks from the jaxprs in an equation's parameters; without marks, the same object."""
    new = dict(params)
    for name, value in params.items():
        if isinstance(value, _MAY_HAVE_JAXPRS):
            new[name] = with_jaxprs(value, without_marks)
    return new if any(map(operator.is_not, new.values(), params.values())) else params


_MAY_HAVE_JAXPRS = (Jaxpr, ClosedJaxpr, tuple, list)


def with_jaxprs(value: Any, fun: Callable[[Any], Any]) -> Any:
    """Applies a function to the jaxprs in a parameter of an equation.

    The result is the same object if the function does not change them.
    """
    if isinstance(value, Jaxpr | ClosedJaxpr):
        return fun(value)
    if isinstance(value, tuple | list):
        new = [with_jaxprs(x, fun) for x in value]
        if any(x is not y for x, y in zip(new, value, strict=True)):
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value


def without_marks(jaxpr: Any) -> Any:
    """Removes the marks of a program: their operands replace their results.

    Without marks, the result is the same object. For one program there is always one result: JAX
    compiles a function that is called several times only once if its program is one object.
    """
    if jaxpr not in _WITHOUT_MARKS:
        new = _remove_marks(jaxpr)
        _WITHOUT_MARKS[jaxpr] = None if new is jaxpr else new
    return _WITHOUT_MARKS[jaxpr] or jaxpr


# The results, by program; None for programs without marks.
_WITHOUT_MARKS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _remove_marks(jaxpr: Any) -> Any:
    # From JAX 0.12 on, closed and open jaxprs are one class, whose `jaxpr` is the object itself.
    if isinstance(jaxpr, ClosedJaxpr) and jaxpr.jaxpr is not jaxpr:
        new = without_marks(jaxpr.jaxpr)
        return jaxpr if new is jaxpr.jaxpr else jaxpr.replace(jaxpr=new)
    known: dict[Any, Atom] = {}

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else known.get(atom, atom)

    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p:
            if eqn.params["kind"] == "end":
                known |= zip(eqn.outvars, map(read, eqn.invars[1:]), strict=True)
            else:
                known |= zip(eqn.outvars[1:], map(read, eqn.invars), strict=True)
            continue
        invars, params = list(map(read, eqn.invars)), _without_marks_in(eqn.params)
        changed = params is not eqn.params or invars != eqn.invars
        eqns.append(eqn.replace(invars=invars, params=params) if changed else eqn)
    if len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=list(map(read, jaxpr.outvars)))
