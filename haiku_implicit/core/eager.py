"""Repeated eager calls: a function is traced and interpreted once per structure of its arguments.

The interpreted program is cached. It does not contain implicit arrays, so running it eagerly is one
loop over ordinary primitives. `jax.jit` caches the traces by most of their dependencies: structure
(with the static metadata of implicit types), shapes, dtypes, weak types, and JAX's settings (x64,
matmul precision, mesh, ...). This module adds the dependencies that JAX does not know.
"""

import collections
import contextlib
import enum
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from haiku_implicit.core import containers, dispatch
from haiku_implicit.core import materialization as events
from haiku_implicit.core.bind import is_hashable
from haiku_implicit.core.caches import Carried
from haiku_implicit.core.transform import (
    Static,
    call,
    is_value,
    split,
    tree_map_with_implicit,
)
from haiku_implicit.core.typing import Array, Tree

# Facts that a trace depends on: for each a function, and its result at the time of the trace.
Facts = list[tuple[Callable[[], Any], Any]]
Watch = Callable[[], contextlib.AbstractContextManager[Facts]]

# The most combinations of static arguments, and of structures for each, with a cached program.
_MAX_ENTRIES = 128


@contextlib.contextmanager
def watch_nothing() -> Iterator[Facts]:
    """Watches no facts, for functions that depend only on state that JAX tracks."""
    yield []


class _Program(NamedTuple):
    """An interpreted function: a program on leaves, and the structure of its results.

    Attributes:
      run: maps the leaves of the arguments to the leaves of the results.
      takes: the number of leaves of arguments that it expects.
      static: the results without their arrays.
      events: the materializations in it.
      facts: its other dependencies.
    """

    run: Callable[..., list[Array]]
    takes: int
    static: Static
    events: list[events.Event]
    facts: Facts

    def holds(self) -> bool:
        """Whether all facts have the values that they had during the trace."""
        return all(probe() == seen for probe, seen in self.facts)

    def __call__(self, leaves: Sequence[Array]) -> Tree:
        for event in self.events:  # without `replay`: no equation surrounds this call
            events.emit(event)
        arrays = list(map(_as_array, leaves))
        # The program's own numbers do not count as transfers, as in a jitted function.
        with jax.transfer_guard_host_to_device("allow"):
            return self.static.merge(map(_as_array, self.run(*arrays)))


def cached_implicit_args(
    fun: Callable[..., Any], watch: Watch = watch_nothing
) -> Callable[..., Any]:
    """`use_implicit_args` that traces once for all eager calls with arguments of one structure.

    Args:
      fun: a pure function, as `jax.jit` requires it.
      watch: a context manager, entered while `fun` is traced, that yields a list and fills it with
        facts that the trace depends on.
    """
    cache = _ProgramCache(functools.partial(call, fun), watch)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        static, values = split((args, kwargs))
        key = None if _is_traced(values) else _key(static)
        return call(fun, static, values) if key is None else cache(key, static, values)

    return wrapped


def _is_traced(values: list[Array]) -> bool:
    leaves = jax.tree_util.tree_leaves(values)
    disabled = jax.config.jax_disable_jit  # type: ignore[attr-defined]
    return disabled or any(isinstance(x, jax.core.Tracer) for x in leaves)


class _Entry(NamedTuple):
    """The cache for one combination of static arguments: a jitted function and its programs."""

    jitted: Any
    programs: dict[Any, _Program]


class _ProgramCache:
    """The programs of one function, by its static arguments and its traces.

    Attributes:
      call: interprets the function on the static part of its arguments and the values.
      watch: see `cached_implicit_args`.
    """

    def __init__(self, call: Callable[[Static, list[Any]], Any], watch: Watch):
        self.call, self.watch = call, watch
        # For each key, the function that traces, and the programs made from its traces.
        self._entries: collections.OrderedDict[Any, _Entry] = collections.OrderedDict()

    def __reduce__(self) -> Any:
        """A pickled model has no programs: jaxprs do not pickle."""
        return type(self), (self.call, self.watch)

    def __call__(self, key: Any, static: Static, values: list[Array]) -> Tree:
        """Runs the function, by a cached program if there is one.

        Args:
          key: a hashable value that is equal only for equal `static`.
          static: the arguments without their arrays.
          values: the arrays, dense or implicit. None of them may be a tracer.
        """
        key = (key, dispatch.generation())
        program = self._find(key, static, values)
        if not program.holds():
            self._entries.pop(key, None)
            program = self._find(key, static, values)
        leaves = jax.tree_util.tree_leaves(values)
        if program.takes != len(leaves):
            # The function closes over tracers of an outer transformation, which became operands.
            return self.call(static, values)
        with events.of_arguments(lambda: static.merge(values)):
            return program(leaves)

    def _find(self, key: Any, static: Static, values: list[Array]) -> _Program:
        entry = self._entries.pop(key, None) or _Entry(self._jit(static), {})
        self._entries[key] = entry
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)
        traced = entry.jitted.trace(values)
        if len(entry.programs) > _MAX_ENTRIES:
            entry.programs.clear()
        program = entry.programs.get(traced.jaxpr)
        if program is None:
            program = entry.programs[traced.jaxpr] = _program_of(traced)
        return program

    def _jit(self, static: Static) -> Any:
        def run(values: list[Array]) -> Tree:
            with events.recording() as log, self.watch() as facts:
                out = self.call(static, values)
            out = tree_map_with_implicit(lambda x: x if is_value(x) else Carried([x]), out)
            return out, Carried([log, facts])

        return jax.jit(run)


def _program_of(traced: Any) -> _Program:
    out, about = traced.out_info
    log, facts = about.value
    places, treedef = containers.flatten(out, is_leaf=lambda x: isinstance(x, Carried))
    leaves = tuple(tuple(x.value) if isinstance(x, Carried) else None for x in places)
    takes = len(traced.jaxpr.jaxpr.invars)
    return _Program(jaxpr_as_fun(traced.jaxpr), takes, Static(treedef, leaves), log, facts)


def _as_array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


# Types whose equal values are interchangeable, so that they can be a part of a key.
_BY_VALUE = (bool, int, str, bytes, enum.Enum, np.dtype, range)
BY_IDENTITY = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    np.ufunc,
    jax.custom_jvp,
    jax.custom_vjp,
    type(jax.jit(lambda: None)),
)


def _key(static: Static) -> Any:
    """Returns a hashable key for the static part of a call, or None.

    It is None if an argument is not hashable, or if its hash is its identity: its contents may change.
    """
    key: list[Any] = [static.treedef]
    for leaf in static.leaves:
        x = None if leaf is None else leaf[0]
        if isinstance(x, float | complex):
            key.append((type(x), repr(x)))  # tells 0. from -0., and nan is equal to itself
        elif leaf is None or isinstance(x, _BY_VALUE + BY_IDENTITY) or _hashes_contents(x):
            key.append(leaf and (type(x), x))
        else:
            return None
    return tuple(key) if is_hashable(tuple(key)) else None


def _hashes_contents(x: Any) -> bool:
    found: Any = type(x).__hash__
    return found is not None and found is not object.__hash__
