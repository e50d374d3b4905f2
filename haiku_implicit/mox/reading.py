"""Reads a program from JSON, by tracing it again.

No code from a file is run. Each body becomes a function that binds its equations, whose primitives and
parameters are looked up in tables (`equations.py`, `plain.py`). JAX traces this function: so its own
checks of shapes and dtypes apply, and the types in a file are compared with the types that JAX finds.
"""

import collections
import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from haiku_implicit.core.transform import Static
from haiku_implicit.mox import derivatives, equations, marks, plain
from haiku_implicit.mox.interface import Interface, Path, Slot, slots_with
from haiku_implicit.mox.plain import of_type, require
from haiku_implicit.mox.program import Program
from haiku_implicit.mox.tree import body_of, without_marks

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

    def __init__(self, tables: Mapping[str, Any], types: Mapping[str, type]):
        self.types = types
        self.arrays: list[Any] = []
        self.bodies: list[ClosedJaxpr] = []
        self._sizes: list[tuple[int, int]] = []
        for i, x in enumerate(_list(tables, "arrays")):
            with at(f".arrays[{i}]"):
                self.arrays.append(plain.constant_from_json(x))
        self._listed = [of_type(x, dict, "a function") for x in _list(tables, "functions")]
        self._functions: dict[int, Callable[..., Any]] = {}
        self._holders: dict[tuple[int, str], Any] = collections.defaultdict(list)
        with marks.marking(), jax.threefry_partitionable(True):
            for i, x in enumerate(_list(tables, "bodies")):
                with at(f".bodies[{i}]"):
                    self._add_body(of_type(x, dict, "a body"))
        for i in range(len(self._listed)):
            with at(f".functions[{i}]"):
                self._add_rules(i)

    def program(self, x: Any, init: Any, implicit: bool) -> Program:
        """A program that `Writer.program` wrote."""
        body = body_of("model", self.body(of_type(x, dict, "a program").get("body")))
        with at(".interface"):
            face = interface_from_json(x.get("interface"), self.types)
            slots = [*face.params.values(), *face.state.values(), face.rng, face.args]
            _fits("arguments", slots, body.invars)
            face = face.with_variables(body.invars)
            results = [face.results, *face.new_state.values()]
            _fits("results", results, body.returns)
            results = slots_with([slot.tree for slot in results], body.returns)
            new_state = dict(zip(face.new_state, results[1:], strict=True))
            face = _with_results(face, results[0], new_state)
        return Program(body, face, init, implicit)

    # --- bodies ---

    def body(self, index: Any) -> ClosedJaxpr:
        """A body that has already been read."""
        return self.bodies[_place(index, self.bodies, "body")]

    def _add_body(self, x: Any) -> None:
        inputs = [plain.type_from_json(y) for y in _list(x, "inputs")]
        reading = _BodyReader(self, x)

        def fun(*arrays: Any) -> list[Any]:
            return reading.trace(arrays)

        fun.__name__ = of_type(x.get("name"), str, "the name of a body")
        closed = jax.make_jaxpr(fun)(*inputs)
        depth, size = reading.depth + 1, reading.size
        require(depth <= DEEPEST, f"programs are nested more than {DEEPEST} deep")
        require(size <= MOST_EQUATIONS, f"it has more than {MOST_EQUATIONS} equations")
        self._sizes.append((depth, size))
        self.bodies.append(closed)

    def size_of(self, index: int) -> tuple[int, int]:
        """The depth of a body, and the number of its equations."""
        return self._sizes[index]

    # --- functions with custom derivatives ---

    def function(self, index: Any) -> tuple[Callable[..., Any], int]:
        """A function with a custom derivative, and the place of its body. Its rule may come later."""
        x = self._listed[_place(index, self._listed, "function")]
        body = x.get("body")
        if index not in self._functions:
            self._functions[index] = self._function(index, x, self.body(body))
        return self._functions[index], body

    def _function(self, index: int, x: Any, closed: ClosedJaxpr) -> Callable[..., Any]:
        body = _named(jaxpr_as_fun(closed), of_type(x.get("name"), str, "the name of a function"))
        kind, avals, outs = x.get("kind"), closed.in_avals, closed.out_avals
        require(kind in equations.WITH_RULES, f"there is no kind of function {kind!r}")

        def rule(name: str) -> Callable[..., Any]:
            holder = self._holders[index, name]

            def run(*arrays: Any) -> Any:
                if not holder:
                    raise derivatives.NoRule(
                        f"the file has no derivative of {x.get('name')!r} of so high an order"
                    )
                return holder[0](*arrays)

            return run

        if kind == "custom_jvp_call":
            return derivatives.with_jvp(body, rule("jvp"), avals, outs)
        bwd = _named(rule("bwd"), of_type(x.get("bwd_name"), str, "bwd_name"))
        return derivatives.with_vjp(body, rule("fwd"), bwd, avals, outs)

    def _add_rules(self, index: int) -> None:
        x = self._listed[index]
        self.function(index)
        closed = self.body(x["body"])
        avals, outs = list(closed.in_avals), list(closed.out_avals)
        tangents, out_tangents = (derivatives.without_zeros(y, y) for y in (avals, outs))
        if not {"jvp", "fwd", "bwd"}.intersection(x):
            return
        if x["kind"] == "custom_jvp_call":
            self._add_rule(index, "jvp", [*avals, *tangents], [*outs, *out_tangents])
            return
        forward = self.body(x.get("fwd"))
        residuals = list(forward.out_avals[len(outs) :])
        self._add_rule(index, "fwd", avals, [*outs, *residuals])
        self._add_rule(index, "bwd", [*residuals, *out_tangents], tangents)

    def _add_rule(self, index: int, name: str, inputs: Any, outputs: Any) -> None:
        closed = self.body(self._listed[index].get(name))
        for what, found, expected in (
            ("takes", closed.in_avals, inputs),
            ("returns", closed.out_avals, outputs),
        ):
            # A cotangent may have another dtype than its argument, if this is a Python number.
            fit = _same_kind if (name, what) == ("bwd", "returns") else equations.same_shape
            fits = len(found) == len(expected) and all(map(fit, found, expected))
            require(fits, f"{name} {what} {list(map(str, found))}, not {list(map(str, expected))}")
        self._holders[index, name].append(jaxpr_as_fun(_without_marks(closed)))


def _same_kind(x: Any, y: Any) -> bool:
    return x.shape == y.shape and derivatives.has_tangent(x)


def _without_marks(closed: ClosedJaxpr) -> ClosedJaxpr:
    return closed.replace(jaxpr=without_marks(closed.jaxpr))


def _named(fun: Any, name: str) -> Any:
    def named(*arrays: Any) -> Any:
        return fun(*arrays)

    named.__name__ = name
    return named


def _list(x: Mapping[str, Any], name: str) -> list[Any]:
    return of_type(x.get(name), list, name)


def _place(index: Any, table: Sequence[Any], what: str) -> int:
    require(
        0 <= of_type(index, int, f"the place of a {what}") < len(table), f"no {what} {index} yet"
    )
    return index


def _fits(what: str, slots: Sequence[Slot], atoms: Sequence[Any]) -> None:
    count = sum(slot.tree.num_arrays for slot in slots)
    require(
        count == len(atoms), f"there are {count} arrays in the {what}, and {len(atoms)} in the body"
    )


class _BodyReader:
    """Binds the equations of one body while JAX traces.

    Attributes:
      depth: the depth of the bodies in it.
      size: the number of its equations, with the equations in these bodies.
    """

    def __init__(self, reader: Reader, x: Mapping[str, Any]):
        self.reader, self.x = reader, x
        self.depth = self.size = 0
        self.values: dict[int, Any] = {}

    def trace(self, arrays: Sequence[Any]) -> list[Any]:
        constants = [self.array(i) for i in _list(self.x, "constants")]
        self.values = dict(enumerate([*arrays, *constants]))
        try:
            self.nodes(_list(self.x, "nodes"), "")
            with at(".outputs"):
                return self.read(self.x.get("outputs"))
        finally:
            self.values = {}  # tracers, which must not outlive the trace

    def nodes(self, nodes: Any, place: str) -> None:
        for i, x in enumerate(of_type(nodes, list, "nodes")):
            op = x.get("op") if type(x) is dict else None
            with at(f"{place}.nodes[{i}]" + (f" ({op})" if type(op) is str else "")):
                of_type(x, dict, "a node")
                (self.equation if "op" in x else self.call)(x)

    def read(self, atoms: Any) -> list[Any]:
        return [self.atom(x) for x in of_type(atoms, list, "a list of variables")]

    def atom(self, x: Any) -> Any:
        if type(x) is dict:
            return _literal(x)
        require(of_type(x, int, "a variable") in self.values, f"variable {x} is not defined yet")
        return self.values[x]

    def define(self, variables: Any, values: Sequence[Any]) -> None:
        of_type(variables, list, "a list of variables")
        require(
            len(variables) == len(values), f"{len(values)} results have {len(variables)} variables"
        )
        for v, value in zip(variables, values, strict=True):
            require(
                of_type(v, int, "a variable") not in self.values, f"variable {v} is there already"
            )
            self.values[v] = value

    def array(self, index: Any) -> Any:
        return self.reader.arrays[_place(index, self.reader.arrays, "array")]

    def use(self, index: int) -> None:
        depth, size = self.reader.size_of(index)
        self.depth, self.size = max(self.depth, depth), self.size + size

    # --- equations ---

    def equation(self, x: Any) -> None:
        self.size += 1
        operands = self.read(x.get("in"))
        types = [plain.type_from_json(y) for y in _list(x, "types")]
        name, partitionable = x["op"], x.get("threefry_partitionable", True)
        scope = of_type(x.get("scope", ""), str, "a scope")
        of_type(name, str, "op")
        of_type(partitionable, bool, "threefry_partitionable")
        stack = source_info_util.current_name_stack() + source_info_util.new_name_stack(scope)
        around = jax.threefry_partitionable(partitionable)
        with around, source_info_util.set_name_stack(stack):
            results = self.bind(name, x, operands, len(types))
        found = list(map(jax.typeof, results))
        require(len(found) == len(types), f"it has {len(found)} results, not {len(types)}")
        for result, expected in zip(found, types, strict=True):
            require(plain.same_type(result, expected), f"it gives {result}, not {expected}")
        self.define(x.get("out"), results)

    def bind(self, name: str, x: Any, operands: list[Any], num_results: int) -> list[Any]:
        if name in equations.WITH_RULES:
            fun, body = self.reader.function(x.get("function"))
            equations.check_operands("the function", self.reader.body(body), operands)
            self.use(body)
            return list(fun(*operands))
        params = of_type(x.get("params"), dict, "params")
        read = {k: plain.from_json(y, self.others) for k, y in params.items()}
        return equations.from_file(name, read, operands, num_results)

    @property
    def others(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"closed": self.closed, "open": self.open, "array": self.array}

    def closed(self, index: Any) -> ClosedJaxpr:
        closed = self.reader.body(index)
        self.use(index)
        return closed

    def open(self, index: Any) -> Any:
        closed = self.closed(index)
        require(not closed.consts, "a program without constants is expected here")
        return closed.jaxpr

    # --- calls of modules ---

    def call(self, x: Any) -> None:
        results, types = x.get("results"), self.reader.types
        call = marks.Call(
            _class(x.get("module"), types),
            of_type(x.get("path"), str, "path"),
            of_type(x.get("method"), str, "method"),
            {
                k: plain.from_json(y, {})
                for k, y in of_type(x.get("config"), dict, "config").items()
            },
            tree_from_json(x.get("args"), types),
            None if results is None else tree_from_json(results, types),
            of_type(x.get("scope"), str, "scope"),
            of_type(x.get("bypassed", False), bool, "bypassed"),
        )
        inputs, seen = self.read(x.get("in")), _seen(x, "seen")
        token, *inputs = marks.mark_p.bind(*inputs, call=call, kind="begin", seen=seen)
        self.define(x.get("given"), inputs)
        self.nodes(x.get("nodes"), "")
        returns, seen = self.read(x.get("returns")), _seen(x, "seen_results")
        self.define(
            x.get("out"), marks.mark_p.bind(token, *returns, call=call, kind="end", seen=seen)
        )


def _literal(x: Any) -> Any:
    struct = plain.type_from_json(x.get("type"))
    if "bits" in x:
        array = plain.array_from_json(x["bits"])
        require(plain.same_type(array, _strong(struct)), "the bits of a literal have another type")
        return array.item() if struct.weak_type else array
    value = plain.from_json(x.get("value"), {})
    require(type(value) in (bool, int, float, complex), "a literal has to be a number")
    if struct.weak_type:
        require(plain.same_type(jax.typeof(value), struct), f"{value} is not {struct}")
        return value
    require(struct.shape == (), "a literal number has no axes")
    return plain.number_of(value, struct.dtype)


def _strong(struct: Any) -> Any:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype)


def _seen(x: Any, name: str) -> tuple[Any, ...]:
    return tuple(map(_transformation, _list(x, name)))


def _transformation(x: Any) -> Any:
    if x == marks.DIFFERENTIATED:
        return x
    axes = _list(of_type(x, dict, "a transformation"), "axes")
    for axis in axes:
        require(axis is None or type(axis) is int, "an axis has to be a whole number or null")
    return marks.Batched(of_type(x.get("size"), int, "size"), tuple(axes))


# --- structures ------------------------------------------------------------------------------------


class _Array:
    """Stands for an array in a structure."""


def _class(name: Any, types: Mapping[str, type]) -> type | None:
    """The class of this name in `types`, or else an empty class of this name."""
    if name is None:
        return None
    of_type(name, str, "the class of a module")
    return types.get(name) or type(name, (), {"__doc__": "A class that only a file names."})


def tree_from_json(x: Any, types: Mapping[str, type]) -> Static:
    """A structure that `tree_to_json` wrote."""
    tree, _ = marks.split(_node(x, types), lambda leaf: isinstance(leaf, _Array))
    return tree


def _node(x: Any, types: Mapping[str, type]) -> Any:
    if x is None:
        return None
    if x == "array":
        return _Array()
    require(len(of_type(x, dict, "a structure")) == 1, "a structure has to have one key")
    ((kind, parts),) = x.items()
    if kind == "value":
        return plain.from_json(parts, {})
    of_type(parts, list, kind)
    if kind in ("tuple", "list"):
        nodes = [_node(y, types) for y in parts]
        return tuple(nodes) if kind == "tuple" else nodes
    if kind == "dict":
        require(all(type(y) is list and len(y) == 2 for y in parts), "a dict has to be pairs")
        pairs = [(plain.from_json(k, {}), _node(y, types)) for k, y in parts]
        require(len(dict(pairs)) == len(pairs), "a dict has a key twice")
        return dict(pairs)
    require(kind == "namedtuple" and parts, f"there is no structure {kind!r}")
    name, *fields = parts
    require(all(type(y) is list and len(y) == 2 for y in fields), "fields have to be pairs")
    names = tuple(of_type(y[0], str, "a field") for y in fields)
    cls: Any = types.get(of_type(name, str, "the name of a class"))
    if cls is None:
        cls = _new_namedtuple(name, names)
    require(getattr(cls, "_fields", None) == names, f"{name} has other fields than {list(names)}")
    return cls(*(_node(y[1], types) for y in fields))


# `Any`, because a type checker only accepts literal arguments. Python checks them.
_new_namedtuple: Any = collections.namedtuple


def interface_from_json(x: Any, types: Mapping[str, type]) -> Interface:
    """The arguments and results of a program, without variables."""
    of_type(x, dict, "an interface")
    leading = tuple(_list(x, "leading"))
    every = ("params", "state", "rng")
    some = [c for n in range(4) for c in itertools.combinations(every, n)]
    require(leading in some, f"the first arguments have to be some of {every}")
    signature = inspect.Signature([_parameter(y) for y in _list(x, "signature")])
    args = Slot(tree_from_json(x.get("args"), types), ())
    named = args.tree.merge([None] * args.tree.num_arrays)
    require(type(named) is dict, "args has to be a dict")
    require(
        list(named) == list(signature.parameters) or set(named) == set(signature.parameters),
        "args has to have the names of the signature",
    )
    return Interface(
        leading,
        signature,
        params=_slots(x, "params", types),
        state=_slots(x, "state", types),
        rng=Slot(tree_from_json(x.get("rng"), types), ()),
        args=args,
        results=Slot(tree_from_json(x.get("results"), types), ()),
        new_state=_slots(x, "new_state", types),
    )


_PARAMETER_KINDS: Any = type(inspect.Parameter.VAR_KEYWORD)


def _parameter(x: Any) -> inspect.Parameter:
    require(len(of_type(x, list, "a parameter")) in (2, 3), "a parameter has to be [name, kind]")
    kinds: dict[str, Any] = {kind.name: kind for kind in _PARAMETER_KINDS}
    require(type(x[1]) is str and x[1] in kinds, f"there is no kind of parameter {x[1]!r}")
    default = plain.from_json(x[2], {}) if len(x) == 3 else inspect.Parameter.empty
    return inspect.Parameter(of_type(x[0], str, "a name"), kinds[x[1]], default=default)


def _slots(x: Any, name: str, types: Mapping[str, type]) -> dict[Path, Slot]:
    found: dict[Path, Slot] = {}
    for entry in _list(x, name):
        require(
            len(of_type(entry, list, "an entry")) == 3,
            "an entry has to be [module, name, structure]",
        )
        path = of_type(entry[0], str, "a module"), of_type(entry[1], str, "a name")
        require(path not in found, f"{name} has {'/'.join(path)!r} twice")
        found[path] = Slot(tree_from_json(entry[2], types), ())
    return found


def _with_results(face: Interface, results: Slot, new_state: Mapping[Path, Slot]) -> Interface:
    return dataclasses.replace(face, results=results, new_state=new_state)
