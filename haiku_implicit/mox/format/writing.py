"""Writes a program as JSON.

A file has tables of arrays, of bodies (programs) and of functions with custom derivatives. They refer
to each other by their places in these tables. A body refers only to bodies in front of it; the rule of
a function may call the function itself.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from haiku_implicit.core.messages import see
from haiku_implicit.core.typing import Array, Aval, Json, JsonObject
from haiku_implicit.mox.format import equations, values
from haiku_implicit.mox.format.derivatives import RULES, NoRule, rules_of
from haiku_implicit.mox.format.structures import interface_to_json, tree_to_json
from haiku_implicit.mox.format.values import SHOWN, Kind, Unsaveable
from haiku_implicit.mox.program.marks import Batched, Call
from haiku_implicit.mox.program.program import Program
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, body_of, function_name


class Writer:
    """The tables of a file.

    Args:
      depth: for `_signature`, how many levels of derivative rules are compared. None for a file, which
        has all functions in its table.
    """

    def __init__(self, depth: int | None = None):
        self.arrays: list[Array] = []
        self.bodies: list[Json] = []
        self.functions: list[Json] = []
        # The path of the module that is being written.
        self.module = ""
        self._depth = depth
        self._places: dict[Any, int] = {}
        # Rules and signatures of functions.
        self._made: dict[Any, Any] = {}
        # Objects that are looked up by `id`. While one is kept, no other object gets its `id`.
        self._kept: dict[int, Any] = {}
        # The depth in rules. Some rules call a new function, whose rule calls another, without end.
        self._order = 0
        self._without_rule: set[int] = set()

    def tables(self) -> JsonObject:
        """The tables as JSON."""
        return dict(arrays=self.arrays, bodies=self.bodies, functions=self.functions)

    def program(self, program: Program) -> JsonObject:
        """The JSON of a program: its body, and its arguments and results."""
        body = self.body(program.body, "model")
        return {"body": body, "interface": interface_to_json(program.interface)}

    def body(self, body: Body, name: str, scopes: bool = True) -> int:
        """Adds a body to the table, and returns its place.

        Args:
          body: the body.
          name: the name of its function.
          scopes: whether to write the names of the scopes around equations. In a rule, they come from
            JAX's differentiation, which adds them again.
        """
        self.bodies.append(_BodyWriter(self, scopes).write(body, name))
        return len(self.bodies) - 1

    def jaxpr(self, jaxpr: Any, scopes: bool = True) -> int:
        """The place of a jaxpr in the table. Each jaxpr has one place."""

        def add() -> int:
            inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
            return self.body(body_of("", jaxpr), inner.debug_info.func_name, scopes)

        return self._once(self._places, "jaxpr", jaxpr, add)

    def array(self, x: Any) -> int:
        """The place of an array in the table. Arrays with the same bits have one place."""
        if isinstance(x, np.ndarray):  # a constant as the model made it, before JAX 0.9
            x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
        written = values.array_to_json(x)
        place = self._places.setdefault(("array", _digest(written)), len(self.arrays))
        self.arrays += [written] if place == len(self.arrays) else []
        return place

    def _once(self, results: dict[Any, Any], kind: Any, x: Any, make: Callable[[], Any]) -> Json:
        """The result of a function for an object, which is called for it only once."""
        key = kind, id(x)
        if key not in results:
            self._kept[id(x)] = x
            results[key] = make()
        return results[key]

    # --- functions with custom derivatives ---

    def function(self, node: Equation) -> Json:
        """The place in the table of the function with a custom derivative that an equation calls.

        Each function has one place. JAX does not identify functions, and a rule may call its function.
        So two functions are the same if they, their rules, and the functions in these rules are.
        """
        if self._depth is not None:
            return self._signature(node, self._depth)
        key = "function", self._signature(node, 2)
        is_new = key not in self._places
        place = self._places.setdefault(key, len(self.functions))
        self.functions += [None] if is_new else []
        if is_new or (place in self._without_rule and self._order <= HIGHEST_ORDER):
            self._order += 1
            deep = self._order <= HIGHEST_ORDER
            (self._without_rule.discard if deep else self._without_rule.add)(place)
            self.functions[place] = self._function(node, deep)
            self._order -= 1
        return place

    def _function(self, node: Equation, deep: bool) -> JsonObject:
        params = node.params_to_bind(True)
        new = {
            "kind": node.primitive.name,
            "name": function_name(node.eqn),
            "body": self.jaxpr(params["call_jaxpr"]),
        }
        if "bwd" in params:  # a query can see it
            new["bwd_name"] = getattr(params["bwd"], "__name__", "")
        rules = self._once(self._made, "rules", node.eqn, lambda: _rules_of(node)) if deep else {}
        return new | {k: self.jaxpr(x, scopes=False) for k, x in rules.items()}

    def _signature(self, node: Equation, depth: int) -> str:
        """A digest that is equal for functions that are the same."""

        def make() -> str:
            inner = Writer(depth - 1)
            inner.module, inner._kept, inner._made = self.module, self._kept, self._made
            return _digest([inner._function(node, deep=depth > 0), inner.tables()])

        return self._once(self._made, ("signature", depth), node.eqn, make)


def _rules_of(node: Equation) -> dict[str, ClosedJaxpr]:
    try:
        return rules_of(node.eqn)
    except NoRule:
        return {}
    except Exception as e:  # from the user's rule
        raise Unsaveable(f"its rule can't be traced: {type(e).__name__}: {e}") from e


# The highest order of derivatives in a file, for functions whose derivatives are ever new functions.
HIGHEST_ORDER = 6


def _digest(x: Any) -> str:
    return hashlib.sha256(json.dumps(x).encode()).hexdigest()


class _BodyWriter:
    """Writes one body: its variables are numbers, in the order in which they are defined."""

    def __init__(self, writer: Writer, scopes: bool):
        self.writer, self.scopes = writer, scopes
        self.numbers: dict[Any, int] = {}
        # A variable may be defined twice: an extracted call has its own variables for its arguments.
        self.count = itertools.count()
        self.same: dict[Any, Any] = {}
        self.kinds = {
            "closed": Kind(lambda x: isinstance(x, ClosedJaxpr), writer.jaxpr),
            "open": Kind(lambda x: isinstance(x, Jaxpr), writer.jaxpr),
            "array": Kind(lambda x: isinstance(x, np.ndarray | jax.Array), writer.array),
        }

    def write(self, body: Body, name: str) -> JsonObject:
        if len(body.consts) != len(body.constvars):
            raise Unsaveable(f"the program in it ({name}) has constants without values")
        self.define((*body.invars, *body.constvars))
        return {
            "name": name,
            "inputs": [values.type_to_json(v.aval) for v in body.invars],
            "constants": list(map(self.writer.array, body.consts)),
            "nodes": self.nodes(body.children),
            "outputs": self.atoms(body.returns),
        }

    def define(self, variables: Sequence[Var]) -> list[int]:
        self.numbers |= zip(variables, self.count, strict=False)
        return [self.numbers[v] for v in variables]

    def atoms(self, atoms: Sequence[Atom]) -> list[Json]:
        return [self.atom(x) for x in atoms]

    def atom(self, x: Any) -> Json:
        while not isinstance(x, Literal) and x in self.same:
            x = self.same[x]
        return _literal(x) if isinstance(x, Literal) else self.numbers[x]

    def nodes(self, nodes: Sequence[Any]) -> list[Json]:
        new: list[Json] = []
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

    def call(self, node: ModuleCall, call: Call) -> JsonObject:
        outer, self.writer.module = self.writer.module, node.path or self.writer.module
        results = None if call.results is None else tree_to_json(call.results, SHOWN)
        new = {
            "module": None if call.cls is None else call.cls.__name__,
            "path": call.path,
            "scope": call.scope or "",
            "method": call.method,
            "config": {name: values.to_json(x, SHOWN) for name, x in call.config.items()},
            "args": tree_to_json(call.args, SHOWN),
            "results": results,
            "in": self.atoms(node.inputs),
            "given": self.define([v for v, _ in node.given]),
            "seen": list(map(_seen, node.seen)),
            "nodes": self.nodes(node.children),
            "returns": self.atoms(node.returns),
            "out": self.define(node.outputs),
            "seen_results": list(map(_seen, node.seen_results)),
        }
        self.writer.module = outer
        return new | ({"bypassed": True} if call.bypassed else {})

    def equation(self, node: Equation) -> JsonObject:
        try:
            return self._equation(node)
        except Unsaveable as e:
            module = self.writer.module
            where = f"module {module!r}" if module else "the model, outside of its modules"
            raise ValueError(
                f"save: {node!r} in {where} can't be saved: {e} {see('not-for-files')}"
            ) from e

    def _equation(self, node: Equation) -> JsonObject:
        eqn = node.eqn
        new: JsonObject = {"op": node.primitive.name, "in": self.atoms(node.inputs)}
        if node.primitive.name in RULES:
            new["function"] = self.writer.function(node)
        else:
            params = equations.to_file(node.primitive, node.params_to_bind(True), node.inputs)
            new["params"] = {k: values.to_json(x, self.kinds) for k, x in params.items()}
        new["types"] = [values.type_to_json(v.aval) for v in eqn.outvars]
        new["out"] = self.define(eqn.outvars)
        return new | _context(eqn, self.scopes)


def _literal(x: Literal) -> JsonObject:
    """A literal with its exact bits; as a number, if this has the same bits."""
    aval: Aval = x.aval
    type_, value = values.type_to_json(aval), np.asarray(x.val, aval.dtype)
    if aval.shape == ():
        number: Any = np.asarray(x.val).item() if aval.weak_type else value.item()
        is_plain = type(number) in (bool, int, float, complex)
        if is_plain and np.asarray(number, aval.dtype).tobytes() == value.tobytes():
            return {"value": values.to_json(number), "type": type_}
    return {"bits": values.array_to_json(value), "type": type_}


def _context(eqn: JaxprEqn, scopes: bool) -> JsonObject:
    """The context of an equation: the names of scopes, and settings that change numbers."""
    ctx: Any = eqn.ctx
    new: JsonObject = {}
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


def _seen(transformation: Any) -> Json:
    """A transformation around a call: JSON for `Batched` or a name."""
    if isinstance(transformation, Batched):
        return {"size": transformation.size, "axes": list(transformation.axes)}
    return transformation
