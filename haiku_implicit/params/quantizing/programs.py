"""A program that runs as far as it is asked, and keeps values as long as their inputs stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from haiku_implicit.core.bind import bind, is_hashable
from haiku_implicit.core.typing import Array

# The values of a program that are known, by number.
Values = dict[int, Array]
# Calls of functions: the program has the equations of the function in their place.
_CALLS = ("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call", "core_call")


class _Step(NamedTuple):
    """An equation, with the numbers of its operands and results; an operand may be a literal."""

    eqn: JaxprEqn
    operands: list[int | Literal]
    results: list[int]


class Program:
    """The equations of a function, of which a part can be run.

    Attributes:
      inputs: the numbers of the function's arguments (leaves of the tree).
      outputs: the numbers of its results (leaves of the tree `treedef`).
      start: the values that are known before any argument.
      causes: for each number, the set of the inputs that it depends on, as bits.
      compiled: functions of the parts that ran, by their computations: equal layers share one.
    """

    def __init__(self, fun: Callable[..., Any], *args: Any) -> None:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        self.treedef = jax.tree.structure(shapes)
        self.steps: list[_Step] = []
        self.start: Values = {}
        self.made_by: dict[int, int] = {}
        self._count = 0
        self.compiled: dict[Hashable, Callable[[list[Array]], list[Array]]] = {}
        self.inputs = self._fresh(len(closed.jaxpr.invars))
        found = self._added(closed.jaxpr, closed.consts, self.inputs)
        self.outputs = [x if isinstance(x, int) else self._constant(x.val) for x in found]
        self.causes: list[int] = [0] * self._count
        for i, number in enumerate(self.inputs):
            self.causes[number] = 1 << i
        for step in self.steps:
            own = 0
            for number in numbers_of(step):
                own |= self.causes[number]
            for number in step.results:
                self.causes[number] = own

    def advance(
        self, each: Sequence[Values], wanted: Sequence[int], later: Iterable[int]
    ) -> list[list[Array]]:
        """Runs the program for some values, and keeps those that later ones need.

        Args:
          each: the known values for each set of arguments, which this changes.
          wanted: the numbers of the values to return.
          later: the numbers of the values that will be wanted.
        """
        known = set(each[0])
        steps, operands = self.needed(wanted, known)
        made = {number for step in steps for number in step.results}
        _, kept = self.needed(later, known | made)
        results = [*wanted, *sorted(kept & made)]
        ordered, key = _canonical(steps, operands, results)

        def compute(given: list[Array]) -> list[Array]:
            return evaluated(steps, dict(zip(ordered, given, strict=True)), results)

        run = self.compiled.setdefault(key, jax.jit(compute))
        found = []
        for values in each:
            new = dict(zip(results, run([values[i] for i in ordered]), strict=True))
            found.append([new[i] for i in wanted])
            old = {
                i: x for i, x in values.items() if i in kept or i in self.inputs or i in self.start
            }
            values.clear()
            values.update(old | {i: new[i] for i in kept & made})
        return found

    def change(self, values: Values, at: int, value: Array) -> None:
        """Gives an input another value, and forgets the values that depend on it."""
        for number in [i for i in values if self.causes[i] >> at & 1]:
            del values[number]
        values[self.inputs[at]] = value

    def source(self, number: int) -> int | None:
        """Returns the index of the step that makes a value, before any steps of one operand."""
        step = None
        while number in self.made_by:
            step = self.made_by[number]
            operands = numbers_of(self.steps[step])
            if len(operands) != 1:
                break
            (number,) = operands
        return step

    def needed(self, wanted: Iterable[int], known: Collection[int]) -> tuple[list[_Step], set[int]]:
        """The steps that lead from known values to wanted ones, and the known values they take."""
        left, seen, steps = list(wanted), set(), set()
        used: set[int] = set()
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            if number in known:
                used.add(number)
                continue
            steps.add(self.made_by[number])
            left += numbers_of(self.steps[self.made_by[number]])
        return [self.steps[i] for i in sorted(steps)], used

    def _added(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[int | Literal]
    ) -> list[int | Literal]:
        """Adds the equations of a jaxpr, and returns the numbers of its results."""
        names: dict[Any, int | Literal] = dict(zip(jaxpr.invars, args, strict=True))
        names.update(zip(jaxpr.constvars, map(self._constant, consts), strict=True))

        def named(atom: Any) -> int | Literal:
            return atom if isinstance(atom, Literal) else names[atom]

        for eqn in jaxpr.eqns:
            operands = [named(x) for x in eqn.invars]
            if eqn.primitive.name in _CALLS:
                inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                is_open = isinstance(inner, Jaxpr)
                body, own = (inner, ()) if is_open else (inner.jaxpr, inner.consts)
                results: Sequence[int | Literal] = self._added(body, own, operands)
            else:
                results = new = self._fresh(len(eqn.outvars))
                self.made_by.update(dict.fromkeys(new, len(self.steps)))
                self.steps.append(_Step(eqn, operands, new))
            names.update(zip(eqn.outvars, results, strict=True))
        return [named(x) for x in jaxpr.outvars]

    def _fresh(self, count: int) -> list[int]:
        self._count += count
        return list(range(self._count - count, self._count))

    def _constant(self, value: Array) -> int:
        (number,) = self._fresh(1)
        self.start[number] = value
        return number


def numbers_of(step: _Step) -> list[int]:
    """The numbers of a step's operands that are not literals."""
    return [x for x in step.operands if isinstance(x, int)]


def _canonical(
    steps: Sequence[_Step], operands: Collection[int], results: Sequence[int]
) -> tuple[list[int], Hashable]:
    """The operands in the order of their use, and a key that is equal for equal computations.

    It is never equal for parameters that can't be hashed.
    """
    every = itertools.chain(*map(numbers_of, steps), results)
    used = list(dict.fromkeys(number for number in every if number in operands))
    made = itertools.chain(*(step.results for step in steps))
    names = {number: i for i, number in enumerate((*used, *made))}

    def named(x: int | Literal) -> Hashable:
        return names[x] if isinstance(x, int) else (str(x.aval), np.asarray(x.val).tobytes())

    def described(step: _Step) -> Hashable:
        eqn = step.eqn
        kinds = (*(str(x.aval) for x in eqn.outvars), repr(eqn.ctx))
        own = tuple(map(named, step.operands))
        return eqn.primitive, tuple(sorted(eqn.params.items())), own, kinds

    key = len(used), tuple(map(described, steps)), tuple(names[number] for number in results)
    return used, key if is_hashable(key) else object()


def evaluated(steps: Sequence[_Step], values: Values, results: Sequence[int]) -> list[Array]:
    """The results of steps, in their order, from known values."""
    values = dict(values)
    for eqn, operands, numbers in steps:
        args = [values[x] if isinstance(x, int) else x.val for x in operands]
        with eqn.ctx.manager:
            new = bind(eqn.primitive, args, eqn.params)
        values.update(zip(numbers, new, strict=True))
    return [values[i] for i in results]
