"""Reads a program from JSON, by tracing its equations again.

No code from a file is run. JAX traces a function that binds an equation, whose primitive and parameters
are looked up in tables (`equations.py`, `values.py`): so its own checks of shapes and dtypes apply, and
the types in a file are compared with the types that JAX finds. Equal equations (most layers of a model
have the same ones) are traced once, and copied with other variables.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array, Aval, Json
from haiku_implicit.mox.format import equations, values
from haiku_implicit.mox.format.derivatives import (
    RULES,
    NoRule,
    has_tangent,
    struct_of,
    types_of,
    with_rules,
)
from haiku_implicit.mox.format.structures import interface_from_json, tree_from_json
from haiku_implicit.mox.format.values import of_type, one_of, require, same_shape, same_type
from haiku_implicit.mox.program import marks
from haiku_implicit.mox.program.program import Program
from haiku_implicit.mox.program.tree import body_of, without_marks

# Limits on nested bodies, and on equations, which count again each time that their body is used.
DEEPEST = 64
MOST_EQUATIONS = 10_000_000


@contextlib.contextmanager
def at(place: str) -> Iterator[None]:
    """Adds a place in the file to the errors that are raised within."""
    try:
        yield
    except Misplaced as e:
        raise Misplaced(f"{place}{e.place}", e.reason) from e
    except RecursionError:
        raise Misplaced(place, "it is nested too deeply") from None
    except Exception as e:  # JAX's checks raise errors of many kinds
        kind = "" if type(e) is ValueError else f"{type(e).__name__}: "
        raise Misplaced(place, f"{kind}{e}") from e


class Misplaced(Exception):
    """An error in a file, with its place."""

    def __init__(self, place: str, reason: str):
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


class Reader:
    """The tables of a file, as arrays, programs and functions.

    Args:
      tables: the result of `Writer.tables`.
      types: classes by name: named tuples, and modules.
    """

    def __init__(self, tables: Mapping[str, Json], types: Mapping[str, type]):
        self.types = types
        self.arrays: list[Array] = []
        self.bodies: list[ClosedJaxpr] = []
        # For each body its depth, and the number of its equations.
        self.sizes: list[tuple[int, int]] = []
        self.functions: dict[int, Callable[..., Any]] = {}
        self.listed = _list(tables, "functions")
        # Traced equations, by what the file says of them and the types of their operands.
        self.traced: dict[Any, _Traced] = {}
        # Numbers in equations, by their JSON.
        self.literals: dict[str, Any] = {}
        # The atoms of numbers, by their `id`.
        self.atoms: dict[int, Any] = {}
        self._rules: dict[tuple[int, str], Callable[..., Any]] = {}
        for i, x in enumerate(_list(tables, "arrays")):
            with at(f".arrays[{i}]"):
                self.arrays.append(values.constant_from_json(x))
        with marks.marking(), jax.threefry_partitionable(True):
            for i, x in enumerate(_list(tables, "bodies")):
                with at(f".bodies[{i}]"):
                    self._add_body(of_type(x, dict, "a body"))
        for i in range(len(self.listed)):
            with at(f".functions[{i}]"):
                self.function(i)
                self._add_rules(i)

    def program(self, x: Mapping[str, Json]) -> Program:
        """A program that `Writer.program` wrote."""
        body = body_of("model", self.body(x.get("body")))
        with at(".interface"):
            face = interface_from_json(x.get("interface"), self.types, body.invars, body.returns)
        return Program(body, face, None)

    def body(self, index: Json) -> ClosedJaxpr:
        """A body that has already been read."""
        return _entry(self.bodies, index, "body")

    def _add_body(self, x: Json) -> None:
        reading = _BodyReader(self, x)
        closed = reading.closed_jaxpr()
        depth, size = reading.depth + 1, reading.size
        require(depth <= DEEPEST, f"programs are nested more than {DEEPEST} deep")
        require(size <= MOST_EQUATIONS, f"it has more than {MOST_EQUATIONS} equations")
        self.sizes.append((depth, size))
        self.bodies.append(closed)

    # --- functions with custom derivatives ---

    def function(self, index: Json) -> tuple[Callable[..., Any], int]:
        """A function with a custom derivative, and the place of its body. Its rules may come later."""
        x = of_type(_entry(self.listed, index, "function"), dict, "a function")
        if index not in self.functions:
            names = one_of(RULES, "kind of function", x.get("kind"))
            name, closed = of_type(x.get("name"), str, "a name"), self.body(x.get("body"))
            body, rules = _named(jaxpr_as_fun(closed), name), {}
            for rule in names:
                own = of_type(x.get(f"{rule}_name", rule), str, f"{rule}_name")
                rules[rule] = _named(functools.partial(self._run_rule, index, name, rule), own)
            self.functions[index] = with_rules(body, rules, closed.in_avals, closed.out_avals)
        return self.functions[index], x["body"]

    def _run_rule(self, index: int, name: str, rule: str, *arrays: Array) -> list[Array]:
        """Runs a rule of a function, which is looked up when it is called."""
        if (index, rule) not in self._rules:
            raise NoRule(f"the file has no derivative of {name!r} of so high an order")
        return self._rules[index, rule](*arrays)

    def _add_rules(self, index: int) -> None:
        x = self.listed[index]
        names = RULES[x["kind"]]
        rules = {name: self.body(x.get(name)) for name in names if not x.keys().isdisjoint(names)}
        closed = self.body(x["body"])
        residuals = rules["fwd"].out_avals[len(closed.out_avals) :] if "fwd" in rules else []
        for name, rule in rules.items():
            takes, returns = types_of(name, closed.in_avals, closed.out_avals, residuals)
            # A cotangent may have another dtype than its argument, if this is a Python number.
            fit = _same_kind if name == "bwd" else same_shape
            equations.check_types(f"{name} takes", rule.in_avals, takes)
            equations.check_types(f"{name} returns", rule.out_avals, returns, fit)
            self._rules[index, name] = jaxpr_as_fun(without_marks(rule))


def _same_kind(x: Aval, y: Aval) -> bool:
    return x.shape == y.shape and has_tangent(x)


def _named(fun: Any, name: str) -> Any:
    def named(*arrays: Array) -> Any:
        return fun(*arrays)

    named.__name__ = name
    return named


def _list(x: Mapping[str, Json], name: str) -> list[Array]:
    return of_type(x.get(name), list, name)


def _entry(table: Sequence[Any], index: Json, what: str) -> Any:
    known = 0 <= of_type(index, int, f"the place of a {what}") < len(table)
    require(known, f"no {what} {index} yet")
    return table[index]


class _Traced(NamedTuple):
    """An equation that was traced alone.

    Attributes:
      closed: its program, whose arguments are the operands that are variables.
      depth: the depth of the bodies in it.
      size: the number of equations, with the equations in these bodies.
    """

    closed: ClosedJaxpr
    depth: int
    size: int


class _BodyReader:
    """Makes the program of one body.

    Attributes:
      depth: the depth of the bodies in it.
      size: the number of its equations, with the equations in these bodies.
    """

    def __init__(self, reader: Reader, x: Mapping[str, Json]):
        self.reader, self.x = reader, x
        self.depth = self.size = 0
        # Variables of JAX, and numbers, by the file's variables.
        self.values: dict[int, Any] = {}
        self.eqns: list[JaxprEqn] = []
        self.effects: set[Any] = set()
        self.constants: dict[int, tuple[Var, Array]] = {}
        self.readers = {"closed": self.closed, "open": self.open, "array": self.array}
        self.scoped = functools.cache(source_info_util.new_name_stack)

    def closed_jaxpr(self) -> ClosedJaxpr:
        inputs = [values.type_from_json(y) for y in _list(self.x, "inputs")]
        constants = [self.array(i) for i in _list(self.x, "constants")]
        num_results = len(_list(self.x, "outputs"))
        name = of_type(self.x.get("name"), str, "the name of a body")
        empty = jax.make_jaxpr(_named(lambda *arrays: [0] * num_results, name))(*inputs)
        self.values = dict(enumerate([*empty.jaxpr.invars, *map(self.constant, constants)]))
        self.nodes(_list(self.x, "nodes"), "")
        with at(".outputs"):
            results = self.atoms("outputs", self.x)
        parts = dict(eqns=self.eqns, outvars=results, effects=self.effects)
        return _with_parts(empty, self.constants.values(), parts)

    def nodes(self, nodes: Json, place: str) -> None:
        for i, x in enumerate(of_type(nodes, list, "nodes")):
            try:
                of_type(x, dict, "a node")
                (self.equation if "op" in x else self.call)(x)
            except Exception:
                op = x.get("op") if type(x) is dict else None
                with at(f"{place}.nodes[{i}]" + (f" ({op})" if type(op) is str else "")):
                    raise

    def read(self, x: Mapping[str, Json], name: str) -> list[Any]:
        """The variables and the numbers of a list of operands."""
        return list(map(self.value, _list(x, name)))

    def value(self, x: Json) -> Any:
        if type(x) is dict:
            text, known = repr(x), self.reader.literals
            if text not in known:
                known[text] = _literal(x)
            return known[text]
        if of_type(x, int, "a variable") not in self.values:
            raise value_error(f"variable {x} is not defined yet")
        return self.values[x]

    def atoms(self, name: str, x: Mapping[str, Json]) -> list[Any]:
        """A list of operands as JAX's equations have them."""
        return [y if isinstance(y, Var) else self.atom(y) for y in self.read(x, name)]

    def atom(self, value: Any) -> Any:
        """The literal of a number that a table of the reader keeps."""
        atoms = self.reader.atoms
        if id(value) not in atoms:
            (atoms[id(value)],) = jax.make_jaxpr(lambda: [value])().jaxpr.outvars
        return atoms[id(value)]

    def constant(self, value: Array) -> Any:
        """The variable of a constant; a number is one itself."""
        if id(value) not in self.constants:
            traced = jax.make_jaxpr(lambda: [value])().jaxpr
            if not traced.constvars:
                return value
            self.constants[id(value)] = traced.constvars[0], value
        return self.constants[id(value)][0]

    def define(self, x: Mapping[str, Json], name: str, found: Sequence[Any]) -> None:
        variables = _list(x, name)
        if len(variables) != len(found):
            raise value_error(f"{len(found)} results have {len(variables)} variables")
        for v, value in zip(variables, found, strict=True):
            if of_type(v, int, "a variable") in self.values:
                raise value_error(f"variable {v} is there already")
            self.values[v] = value

    # --- equations ---

    def equation(self, x: Json) -> None:
        operands, types = self.read(x, "in"), _list(x, "types")
        scope = of_type(x.get("scope", ""), str, "a scope")
        partitionable = of_type(
            x.get("threefry_partitionable", True), bool, "threefry_partitionable"
        )
        # (As text, since JSON's `true` would be equal to 1.)
        own = repr((x["op"], x.get("function"), x.get("params"), types, partitionable))
        key = own, *(y.aval if isinstance(y, Var) else id(y) for y in operands)
        known = self.reader.traced
        if key not in known:
            known[key] = self.traced(x, operands, types, partitionable)
        closed, depth, size = known[key]
        self.depth, self.size = max(self.depth, depth), self.size + size
        self.define(x, "out", self.copied(closed, operands, scope))

    def traced(
        self, x: Json, operands: list[Any], types: list[Any], partitionable: bool
    ) -> _Traced:
        """Traces an equation for variables and numbers as operands."""
        name = of_type(x["op"], str, "op")

        def on_arrays(*arrays: Array) -> list[Array]:
            rest = iter(arrays)
            given = [next(rest) if isinstance(y, Var) else y for y in operands]
            results = self.bind(name, x, given, len(types))
            found = list(map(jax.typeof, results))
            if str(list(map(values.shape_and_dtype, found))) != str(types):
                expected = list(map(values.aval_from_json, types))
                equations.check_types("it gives", found, expected, same_type)
            return results

        outer, self.depth, self.size = (self.depth, self.size), 0, 1
        random = contextlib.nullcontext() if partitionable else jax.threefry_partitionable(False)
        with random:
            closed = jax.make_jaxpr(on_arrays)(
                *[struct_of(y.aval) for y in operands if isinstance(y, Var)]
            )
        found = _Traced(closed, self.depth, self.size)
        self.depth, self.size = outer
        return found

    def copied(self, closed: ClosedJaxpr, operands: list[Any], scope: str) -> list[Any]:
        """Adds the equations of a program, for variables among operands; returns its results."""
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.invars, (y for y in operands if isinstance(y, Var)), strict=True))
        known |= zip(jaxpr.constvars, map(self.constant, closed.consts), strict=True)
        for eqn in jaxpr.eqns:
            invars = [y if isinstance(y, Literal) else known[y] for y in eqn.invars]
            known |= zip(eqn.outvars, self.add(eqn, invars, scope=scope), strict=True)
        self.effects |= jaxpr.effects
        return [_number(y) if isinstance(y, Literal) else known[y] for y in jaxpr.outvars]

    def add(
        self, eqn: JaxprEqn, invars: list[Any], avals: Any = None, scope: str = "", **new: Any
    ) -> list[Var]:
        """Adds a copy of an equation, and returns the variables of its results.

        Args:
          eqn: the equation.
          invars: the operands of the copy.
          avals: the types of its results; None for the types of the equation's.
          scope: the scope that it is in.
          **new: other properties that change.
        """
        outvars = [Var(v.aval) for v in eqn.outvars] if avals is None else list(map(Var, avals))
        if scope:
            stack = self.scoped(scope) + eqn.source_info.name_stack
            new["source_info"] = eqn.source_info.replace(name_stack=stack)
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, **new))
        return outvars

    def bind(self, name: str, x: Json, operands: list[Array], num_results: int) -> list[Array]:
        if name in RULES:
            fun, body = self.reader.function(x.get("function"))
            types = list(map(jax.typeof, operands))
            equations.check_takes("the function", self.closed(body), types)
            return list(fun(*operands))
        given = of_type(x.get("params"), dict, "params")
        params = {name: values.from_json(y, self.readers) for name, y in given.items()}
        return equations.from_file(name, params, operands, num_results)

    def closed(self, index: Json) -> ClosedJaxpr:
        closed = self.reader.body(index)
        depth, size = self.reader.sizes[index]
        self.depth, self.size = max(self.depth, depth), self.size + size
        return closed

    def open(self, index: Json) -> Any:
        closed = self.closed(index)
        require(not closed.consts, "a program without constants is expected here")
        return closed.jaxpr

    def array(self, index: Json) -> Array:
        return _entry(self.reader.arrays, index, "array")

    # --- calls of modules ---

    def call(self, x: Json) -> None:
        results, types = x.get("results"), self.reader.types
        config = of_type(x.get("config"), dict, "config")
        call = marks.Call(
            _class(x.get("module"), types),
            of_type(x.get("path"), str, "path"),
            of_type(x.get("method"), str, "method"),
            {name: values.from_json(y) for name, y in config.items()},
            tree_from_json(x.get("args"), types),
            None if results is None else tree_from_json(results, types),
            of_type(x.get("scope"), str, "scope"),
            of_type(x.get("bypassed", False), bool, "bypassed"),
        )
        inputs = self.atoms("in", x)
        begin, token = _mark()
        avals = [token, *(y.aval for y in inputs)]
        about = dict(call=call, kind="begin", seen=_seen(x, "seen"))
        token, *given = self.add(begin, inputs, avals, params=about)
        self.define(x, "given", given)
        self.nodes(x.get("nodes"), "")
        returns = self.atoms("returns", x)
        about = dict(call=call, kind="end", seen=_seen(x, "seen_results"))
        avals = [y.aval for y in returns]
        self.define(x, "out", self.add(begin, [token, *returns], avals, params=about))


@functools.cache
def _mark() -> tuple[JaxprEqn, Aval]:
    """A mark of a call without arguments, and the type of its token."""
    jaxpr = jax.make_jaxpr(lambda: marks.begin(None, ()))().jaxpr  # type: ignore[arg-type]
    return jaxpr.eqns[0], jaxpr.eqns[0].outvars[0].aval


def _with_parts(closed: ClosedJaxpr, constants: Any, parts: dict[str, Any]) -> ClosedJaxpr:
    """A program with other constants, `(variable, value)`, equations and results."""
    constvars, consts = [v for v, _ in constants], [x for _, x in constants]
    parts |= dict(constvars=constvars, debug_info=closed.jaxpr.debug_info)
    # From JAX 0.12 on, closed and open jaxprs are one class, whose `jaxpr` is the object itself.
    if closed.jaxpr is closed:
        return closed.replace(**parts, consts=consts)
    return closed.replace(jaxpr=closed.jaxpr.replace(**parts), consts=consts)


def _class(name: Json, types: Mapping[str, type]) -> type | None:
    """The class of this name in `types`, or else an empty class of this name."""
    if name is None:
        return None
    of_type(name, str, "the class of a module")
    return types.get(name) or type(name, (), {"__doc__": "A class that only a file names."})


def _literal(x: Json) -> Array:
    struct = values.type_from_json(x.get("type"))
    if "bits" in x:
        array = values.array_from_json(x["bits"])
        require(same_shape(array, struct), "the bits of a literal have another type")
        return array.item() if struct.weak_type else array
    value = values.from_json(x.get("value"))
    require(type(value) in (bool, int, float, complex), "a literal has to be a number")
    if struct.weak_type:
        require(same_type(jax.typeof(value), struct), f"{value} is not {struct}")
        return value
    require(isinstance(struct.dtype, np.dtype), "a number has to have a dtype of numbers")
    array = np.asarray(value, struct.dtype)
    exact = value != value or array.item() == value
    require(struct.shape == () and exact, f"{value} is not a number of the dtype {struct.dtype}")
    return array


def _number(x: Literal) -> Array:
    """The number that a literal stands for, as `_literal` returns it."""
    struct: Any = x.aval
    return x.val if struct.weak_type else np.asarray(x.val, struct.dtype)


def _seen(x: Json, name: str) -> tuple[Any, ...]:
    return tuple(map(_transformation, _list(x, name)))


def _transformation(x: Json) -> Any:
    if x == marks.DIFFERENTIATED:
        return x
    axes = _list(of_type(x, dict, "a transformation"), "axes")
    for axis in axes:
        require(axis is None or type(axis) is int, "an axis has to be a whole number or null")
    return marks.Batched(of_type(x.get("size"), int, "size"), tuple(axes))
