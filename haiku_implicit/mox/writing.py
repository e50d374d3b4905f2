"""Writes a program as JSON.

A file has tables of arrays, of bodies (programs) and of functions with custom derivatives. They refer
to each other by their places in these tables. A body refers only to bodies in front of it; the rule of
a function may call the function itself.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from haiku_implicit.core.transform import Static
from haiku_implicit.mox import equations, plain
from haiku_implicit.mox.derivatives import NoRule, Rules, rules_of
from haiku_implicit.mox.interface import Interface
from haiku_implicit.mox.marks import Batched, Call
from haiku_implicit.mox.plain import Unsaveable
from haiku_implicit.mox.program import Program
from haiku_implicit.mox.tree import Body, Equation, ModuleCall, body_of, function_name


class Writer:
    """The tables of a file.

    Args:
      depth: for `_signature`, how many levels of derivative rules are compared. None for a file, which
        has all functions in its table.
    """

    def __init__(self, depth: int | None = None):
        self.arrays: list[Any] = []
        self.bodies: list[Any] = []
        self.functions: list[Any] = []
        self._depth = depth
        self._known: dict[Any, int] = {}
        # Objects that are looked up by `id`. While one is kept, no other object gets its `id`.
        self._kept: dict[int, Any] = {}
        self._rules: dict[Any, Any] = {}
        # The depth in rules. Some rules call a new function, whose rule calls another, without end.
        self._order = 0
        self._without_rule: set[int] = set()

    def tables(self) -> dict[str, Any]:
        """The tables as JSON."""
        return dict(arrays=self.arrays, bodies=self.bodies, functions=self.functions)

    def program(self, program: Program) -> dict[str, Any]:
        """The JSON of a program: its body, and its arguments and results."""
        body = self.body(program.body, "model", "")
        return {"body": body, "interface": interface_to_json(program.interface)}

    def body(self, body: Body, name: str, module: str, scopes: bool = True) -> int:
        """Adds a body to the table, and returns its place.

        Args:
          body: the body.
          name: the name of its function.
          module: the path of the module around it.
          scopes: whether to write the names of the scopes around equations. In a rule, they come from
            JAX's differentiation, which adds them again.
        """
        new = _BodyWriter(self, module, scopes).write(body, name)
        self.bodies.append(new)
        return len(self.bodies) - 1

    def jaxpr(self, jaxpr: Any, module: str, scopes: bool = True) -> int:
        """The place of a jaxpr in the table. Each jaxpr has one place."""
        key = id(jaxpr)
        if key not in self._known:
            self._kept[key] = jaxpr
            inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
            self._known[key] = self.body(
                body_of("", jaxpr), inner.debug_info.func_name, module, scopes
            )
        return self._known[key]

    def array(self, x: Any) -> int:
        """The place of an array in the table. Arrays with the same bits have one place."""
        written = plain.array_to_json(x)
        return self._place(("array", _digest(written)), self.arrays, written)

    def _place(self, key: Any, table: list[Any], new: Any) -> int:
        if key not in self._known:
            self._known[key] = len(table)
            table.append(new)
        return self._known[key]

    def function(self, node: Equation, module: str) -> Any:
        """The place in the table of the function with a custom derivative that an equation calls.

        Each function has one place. JAX does not identify functions, and a rule may call its function.
        So two functions are the same if they, their rules, and the functions in these rules are.
        """
        if self._depth is not None:
            return self._signature(node, self._depth, module)
        key = self._signature(node, 2, module)
        known = key in self._known
        place = self._place(key, self.functions, None)
        if not known or (place in self._without_rule and self._order <= HIGHEST_ORDER):
            self._order += 1
            self._without_rule.discard(place)
            self.functions[place] = self._function(node, module, self._order <= HIGHEST_ORDER)
            if self._order > HIGHEST_ORDER:
                self._without_rule.add(place)
            self._order -= 1
        return place

    def _function(self, node: Equation, module: str, deep: bool) -> dict[str, Any]:
        params = node.eqn.params if node.marked is None else node.marked
        new = {
            "kind": node.primitive.name,
            "name": function_name(node.eqn),
            "body": self.jaxpr(params["call_jaxpr"], module),
        }
        if "bwd" in params:  # a query can see it
            new["bwd_name"] = getattr(params["bwd"], "__name__", "")
        if deep:
            rules = self._rules_of(node)._asdict()
            new |= {
                k: self.jaxpr(x, module, scopes=False) for k, x in rules.items() if x is not None
            }
        return new

    def _signature(self, node: Equation, depth: int, module: str) -> str:
        """A digest that is equal for functions that are the same."""
        key = "signature", id(node.eqn), depth
        if key not in self._rules:
            self._kept[id(node.eqn)] = node.eqn
            inner = Writer(depth - 1)
            inner._kept, inner._rules = self._kept, self._rules
            function = inner._function(node, module, deep=depth > 0)
            self._rules[key] = _digest([function, inner.tables()])
        return self._rules[key]

    def _rules_of(self, node: Equation) -> Any:
        key = "rules", id(node.eqn)
        if key not in self._rules:
            self._kept[id(node.eqn)] = node.eqn
            try:
                self._rules[key] = rules_of(node.eqn)
            except NoRule:
                self._rules[key] = Rules()
            except Exception as e:  # from the user's rule
                raise Unsaveable(f"its rule can't be traced: {type(e).__name__}: {e}") from e
        return self._rules[key]


# The highest order of derivatives in a file, for functions whose derivatives are ever new functions.
HIGHEST_ORDER = 6


def _digest(x: Any) -> str:
    return hashlib.sha256(json.dumps(x).encode()).hexdigest()


class _BodyWriter:
    """Writes one body: its variables are numbers, in the order in which they are defined."""

    def __init__(self, writer: Writer, module: str, scopes: bool):
        self.writer = writer
        self.module = module
        self.scopes = scopes
        self.numbers: dict[Any, int] = {}
        # A variable may be defined twice: an extracted call has its own variables for its arguments.
        self.count = 0
        self.same: dict[Any, Any] = {}

    def write(self, body: Body, name: str) -> dict[str, Any]:
        if len(body.consts) != len(body.constvars):
            raise Unsaveable(f"the program in it ({name}) has constants without values")
        new: dict[str, Any] = {"name": name}
        new["inputs"] = [plain.type_to_json(v.aval) for v in body.invars]
        self.define(body.invars)
        new["constants"] = [self.writer.array(x) for x in body.consts]
        self.define(body.constvars)
        new["nodes"] = self.nodes(body.children)
        new["outputs"] = self.atoms(body.returns)
        return new

    def define(self, variables: Sequence[Var]) -> list[int]:
        for v in variables:
            self.numbers[v] = self.count
            self.count += 1
        return [self.numbers[v] for v in variables]

    def atoms(self, atoms: Sequence[Any]) -> list[Any]:
        return [self.atom(x) for x in atoms]

    def atom(self, x: Any) -> Any:
        while not isinstance(x, Literal) and x in self.same:
            x = self.same[x]
        return _literal(x) if isinstance(x, Literal) else self.numbers[x]

    def nodes(self, nodes: Sequence[Any]) -> list[Any]:
        new: list[Any] = []
        for node in nodes:
            if isinstance(node, Equation):
                new.append(self.equation(node))
                continue
            if node.call is None:
                self.same |= dict(node.given)
                new += self.nodes(node.children)
                self.same |= zip(node.outputs, node.returns, strict=True)
            else:
                new.append(self.call(node, node.call))
        return new

    def call(self, node: ModuleCall, call: Call) -> dict[str, Any]:
        outer, self.module = self.module, node.path or self.module
        results = None if call.results is None else tree_to_json(call.results, plain.shown)
        new = {
            "module": None if call.cls is None else call.cls.__name__,
            "path": call.path,
            "scope": call.scope or "",
            "method": call.method,
            "config": {name: plain.to_json(x, plain.shown) for name, x in call.config.items()},
            "args": tree_to_json(call.args, plain.shown),
            "results": results,
            "in": self.atoms(node.inputs),
            "given": self.define([v for v, _ in node.given]),
            "seen": list(map(_seen, node.seen)),
            "nodes": self.nodes(node.children),
            "returns": self.atoms(node.returns),
            "out": self.define(node.outputs),
            "seen_results": list(map(_seen, node.seen_results)),
        }
        self.module = outer
        return new | ({"bypassed": True} if call.bypassed else {})

    def equation(self, node: Equation) -> dict[str, Any]:
        try:
            return self._equation(node)
        except Unsaveable as e:
            where = (
                f"module {self.module!r}" if self.module else "the model, outside of its modules"
            )
            raise ValueError(f"save: {node!r} in {where} can't be saved: {e}") from e

    def _equation(self, node: Equation) -> dict[str, Any]:
        eqn = node.eqn
        new: dict[str, Any] = {"op": node.primitive.name, "in": self.atoms(node.inputs)}
        if node.primitive.name in equations.WITH_RULES:
            new["function"] = self.writer.function(node, self.module)
        else:
            params = equations.to_file(node.primitive, node.params_to_bind(True), node.inputs)
            new["params"] = {k: plain.to_json(x, self.other) for k, x in params.items()}
        new["types"] = [plain.type_to_json(v.aval) for v in eqn.outvars]
        new["out"] = self.define(eqn.outvars)
        return new | _context(eqn, self.scopes)

    def other(self, x: Any) -> Any:
        """The `Other` for parameters of equations: writes programs and arrays."""
        if isinstance(x, ClosedJaxpr):
            return {"closed": self.writer.jaxpr(x, self.module)}
        if isinstance(x, Jaxpr):
            return {"open": self.writer.jaxpr(x, self.module)}
        if isinstance(x, np.ndarray | jax.Array):
            return {"array": self.writer.array(x)}
        return plain.refuse(x)


def _literal(x: Literal) -> dict[str, Any]:
    """A literal with its exact bits; as a number, if this has the same bits."""
    aval: Any = x.aval
    type_, value = plain.type_to_json(aval), np.asarray(x.val, aval.dtype)
    if aval.shape == ():
        number: Any = _number(x.val) if aval.weak_type else value.item()
        is_plain = type(number) in (bool, int, float, complex)
        if is_plain and np.asarray(number, aval.dtype).tobytes() == value.tobytes():
            return {"value": plain.to_json(number), "type": type_}
    return {"bits": plain.array_to_json(value), "type": type_}


def _number(x: Any) -> Any:
    """A weakly typed literal as a Python number."""
    kinds: tuple[Any, ...] = (bool, int, float, complex)
    kind = next((kind for kind in kinds if isinstance(x, kind)), None)
    return np.asarray(x).item() if kind is None else kind(x)


def _context(eqn: Any, scopes: bool) -> dict[str, Any]:
    """The context of an equation: the names of scopes, and settings that change numbers."""
    ctx: Any = eqn.ctx
    new: dict[str, Any] = {}
    for name in ("compute_type", "xla_metadata"):
        if getattr(ctx, name, None):
            raise Unsaveable(f"it has {name} {getattr(ctx, name)}")
    if not getattr(ctx.cur_abstract_mesh, "empty", True):
        raise Unsaveable(f"it runs on a mesh: {ctx.cur_abstract_mesh}")
    scope = str(eqn.source_info.name_stack)
    if scope and scopes:
        new["scope"] = scope
    if not ctx.threefry_partitionable:
        new["threefry_partitionable"] = False
    return new


def _seen(transformation: Any) -> Any:
    """A transformation around a call: JSON for `Batched` or a name."""
    if isinstance(transformation, Batched):
        return {"size": transformation.size, "axes": list(transformation.axes)}
    return transformation


# --- structures ------------------------------------------------------------------------------------


class _Leaf:
    """A leaf of a structure."""

    def __init__(self, x: Any):
        self.x = x


def tree_to_json(tree: Static, other: plain.Other) -> Any:
    """A structure as JSON: "array" for an array, and containers as objects with one key.

    Args:
      tree: the structure.
      other: writes a value that is not plain. With `plain.constant`, an unknown container is refused,
        too; otherwise it is written as a tuple.
    """
    if tree.treedef is None:
        return {"value": plain.to_json(tree.leaves[0][0], other)}  # type: ignore[index]
    return _node(tree.treedef.unflatten(map(_Leaf, tree.leaves)), other)


def _node(x: Any, other: plain.Other) -> Any:
    if isinstance(x, _Leaf):
        return "array" if x.x is None else {"value": plain.to_json(x.x[0], other)}
    if x is None:
        return None
    if type(x) in (tuple, list):
        return {type(x).__name__: [_node(y, other) for y in x]}
    if type(x) is dict:
        return {"dict": [[plain.to_json(k), _node(y, other)] for k, y in x.items()]}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        parts = [[name, _node(y, other)] for name, y in zip(x._fields, x, strict=True)]
        return {"namedtuple": [type(x).__name__, *parts]}
    if other is plain.constant:
        raise Unsaveable(
            f"it has a {type(x).__name__}. A file can have dicts, lists, tuples, named tuples and None"
        )
    children, _ = jax.tree_util.tree_flatten(x, is_leaf=lambda y: y is not x)
    return {"tuple": [_node(y, other) for y in children]}


def interface_to_json(face: Interface) -> dict[str, Any]:
    """The arguments and results of a program, as JSON."""
    new: dict[str, Any] = {"leading": list(face.leading), "signature": []}
    for name, parameter in face.signature.parameters.items():
        written = [name, parameter.kind.name]
        if parameter.default is not inspect.Parameter.empty:
            written.append(_named(f"the default of {name}", plain.to_json, parameter.default))
        new["signature"].append(written)
    for kind in ("params", "state", "new_state"):
        slots: Mapping[Any, Any] = getattr(face, kind)
        new[kind] = [
            [*path, _named("/".join(path), tree_to_json, slot.tree)] for path, slot in slots.items()
        ]
    new["rng"] = _named("rng", tree_to_json, face.rng.tree)
    new["args"] = _named("the arguments", tree_to_json, face.args.tree)
    new["results"] = _named("the results", tree_to_json, face.results.tree)
    return new


def _named(what: str, write: Any, x: Any) -> Any:
    try:
        return write(x, plain.constant)
    except Unsaveable as e:
        raise ValueError(f"save: {what} can't be saved: {e}") from e
