"""Marks: equations of a traced program that say where a call of a Haiku module begins and ends.

While a program is traced under `marking`, an interceptor puts a `begin` in front of the equations of
each module call and an `end` behind them. Both return their operands, so they do not change any number.
`tree.py` makes a tree of such a program, without the marks.
"""

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import compat
from haiku_implicit.core.transform import Static, split_leaves
from haiku_implicit.core.typing import Array, Aval, Primitive, Tree, TreeDef
from haiku_implicit.mox.program.constants import same_structure

mark_p = Primitive("module_mark")
mark_p.multiple_results = True


class Batched(NamedTuple):
    """A `vmap` around a call: its size, and the mapped axis of each operand (None: not mapped)."""

    size: int
    axes: tuple[int | None, ...]


# Classes of modules whose calls are not marked.
UNMARKED: set[type] = set()

# The transformation that merges a call and its derivative into one call.
DIFFERENTIATED = "jvp"


def split(
    tree: Tree, is_array: Any = lambda x: isinstance(x, jax.core.Tracer)
) -> tuple[Static, list[Array]]:
    """Splits a tree into its static part and its arrays. Arrays in implicit arrays are separate."""
    try:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
    except (TypeError, ValueError):  # a dict whose keys can't be sorted, say
        leaves, treedef = [tree], None
    return split_leaves(leaves, treedef, is_array)


@dataclasses.dataclass(eq=False)
class Call:
    """The properties of one call, apart from its equations. Two calls are never equal.

    Attributes:
      cls: the class of the module; None for an inserted function.
      path: the full name of the module; for a function, its own name.
      method: the name of the method.
      config: the arguments that the module was constructed with, by their names.
      args: the structure of `(args, kwargs)`.
      results: the structure of the results.
      scope: the prefix of the names in the function that makes the call, if that function is
        transformed by itself (`hk.lift`, a stack of layers); None as long as it is not known.
      bypassed: whether the model also uses arrays that it gave to the call, or got from it, otherwise
        than through the marks of the call.
    """

    cls: type | None
    path: str
    method: str
    config: Mapping[str, Any]
    args: Static
    results: Static | None = None
    scope: str | None = ""
    bypassed: bool = False

    def __str__(self) -> str:
        return f"{self.path!r} ({self.cls.__name__ if self.cls else 'function'})"


def begin(call: Call, arrays: Sequence[Array], seen: Any = ()) -> tuple[Array, list[Array]]:
    """Marks the begin of a call with these arguments.

    Args:
      call: the call.
      arrays: its arguments.
      seen: transformations that were already applied to them.

    Returns:
      A token for the end of the call, and the arrays. The call has to use these arrays. Otherwise its
      arguments can't be told from the other values that it reads.
    """
    token, *arrays = mark_p.bind(*arrays, call=call, kind="begin", seen=seen)
    return token, list(arrays)


def end(token: Array, call: Call, arrays: Sequence[Array], seen: Any = ()) -> list[Array]:
    """Marks the end of a call with these results, and returns them.

    The program has to use these results. Otherwise an argument that a module returns can't be told from
    its result.
    """
    return mark_p.bind(token, *arrays, call=call, kind="end", seen=seen)


def _refilled(x: Tree, arrays: Iterator[Array]) -> Tree:
    """Replaces the arrays in arguments.

    Containers other than tuples stay unchanged, because a method may change its arguments.
    """
    if isinstance(x, jax.core.Tracer):
        return next(arrays)
    if isinstance(x, tuple):
        return _as_tuple(x, [_refilled(y, arrays) for y in x])
    for _ in split(x)[1]:
        next(arrays)
    return x


def _as_tuple(x: tuple[Array, ...], items: list[Array]) -> Tree:
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


class Way(enum.Enum):
    """How calls are marked if a model has the same arrays and containers several times."""

    # Others may hold a container that a call returns. It keeps its arrays, which are not results of
    # marks, and the caller gets a copy.
    COPIES = 1
    # A model may change one of these two containers and read the change in the other. So the container
    # itself gets the results of marks.
    IN_PLACE = 2
    # A mark within a loop turns a value from outside into a value of the loop. A model may keep it and
    # read it outside again. So such values bypass the mark. The rest is as in `IN_PLACE`.
    AROUND = 3


class _Held(NamedTuple):
    """A container that a call returned, and its contents at that time."""

    call: Call
    container: Any
    parts: Any

    @property
    def is_changed(self) -> bool:
        before, structure = self.parts
        try:
            (children, treedef), (again, _) = _parts(self.container), _parts(self.container)
        except (TypeError, ValueError):  # its keys can't be sorted any more
            return True
        same = len(children) == len(before) and all(map(_is_same, children, before, again))
        return not same or not same_structure(treedef, structure)


def _is_same(x: Any, before: Any, again: Any) -> bool:
    """Whether a part of a container has not changed.

    Some nodes of pytrees make new parts whenever they are flattened. Then the leaves are compared.
    """
    if x is before or x is again:
        return x is before
    leaves, *others = map(jax.tree.leaves, (x, before, again))
    if any(len(leaves) != len(y) for y in others):
        return False
    return all(x is y or x is not z for x, y, z in zip(leaves, *others, strict=True))


class Results:
    """The results of calls, with marks in them.

    Args:
      way: how calls are marked.
    """

    def __init__(self, way: Way = Way.COPIES):
        self._way = way
        self._held: list[_Held] = []
        self._moved: list[weakref.ref[Any]] = []

    def marked(self, call: Call, arrays: Sequence[Array], marked: Sequence[Array]) -> list[Array]:
        """The arrays that the model continues with: results of marks, or its own."""
        pairs = list(zip(arrays, marked, strict=True))
        moved = [compat.trace_of(x) is not compat.trace_of(y) for x, y in pairs]
        if self._way is Way.AROUND:
            call.bypassed |= any(moved)
            return [x if flag else y for (x, y), flag in zip(pairs, moved, strict=True)]
        self._moved += [weakref.ref(y) for y, flag in zip(marked, moved, strict=True) if flag]
        return list(marked)

    def filled(self, call: Call, x: Tree, arrays: Iterator[Array], is_new: bool = False) -> Tree:
        """Replaces the arrays in the results of a call.

        Args:
          call: the call.
          x: its results.
          arrays: the new arrays.
          is_new: whether nothing else holds this container.
        """
        if isinstance(x, jax.core.Tracer):
            return next(arrays)
        if isinstance(x, tuple):
            return _as_tuple(x, [self.filled(call, y, arrays) for y in x])
        if not split(x)[1]:
            return x
        parts = _parts(x)
        children = [self.filled(call, y, arrays) for y in parts[0]]
        if (is_new or self._way is not Way.COPIES) and _fill(x, children, parts[1]):
            return x
        new = x.copy() if type(x) in _BUILT_IN else None
        if not _fill(new, children, parts[1]):
            new = parts[1].unflatten(children)
        if not is_new:
            self._held += [_Held(call, x, parts), _Held(call, new, _parts(new))]
        return new

    @property
    def changed(self) -> _Held | None:
        """A container that was changed after the caller got its copy; None without one."""
        return next((x for x in self._held if x.is_changed), None)

    def has_moved(self, array: Array) -> bool:
        """Whether a mark within a trace made this array from one outside of the trace."""
        return any(x() is array for x in self._moved)


# Containers whose items can be set.
_BUILT_IN = (list, dict, collections.OrderedDict, collections.defaultdict)


def _parts(x: Any) -> tuple[list[Any], Any]:
    """The direct children of a container, and its structure."""
    return jax.tree_util.tree_flatten(x, is_leaf=lambda y: y is not x)


def _fill(x: Any, children: Sequence[Any], treedef: TreeDef) -> bool:
    """Replaces the children of a container in place; returns whether that is possible."""
    if type(x) in _BUILT_IN:
        in_order = isinstance(x, list | collections.OrderedDict)
        keys = range(len(x)) if isinstance(x, list) else x if in_order else sorted(x)
        for key, child in zip(list(keys), children, strict=True):
            x[key] = child
        return True
    if x is None:
        return False
    new = treedef.unflatten(children)
    fields = dataclasses.fields(new) if dataclasses.is_dataclass(new) else ()
    try:
        for name in dict.fromkeys([*getattr(new, "__dict__", ()), *(y.name for y in fields)]):
            setattr(x, name, getattr(new, name))
    except (AttributeError, TypeError):  # frozen
        return False
    filled, wanted = map(jax.tree.leaves, (x, children))
    return len(filled) == len(wanted) and all(map(operator.is_, filled, wanted))


# The constructor's arguments of modules, by `id`; with the modules, so that no others get these `id`s.
_Configs = dict[int, tuple[Any, dict[str, Any]]]
# The entries of the program that is being marked; None if none is.
_active: contextvars.ContextVar[_Configs | None] = contextvars.ContextVar("marking", default=None)


@contextlib.contextmanager
def marking(way: Way = Way.COPIES) -> Iterator[Results]:
    """A context in which traced programs get marks for calls of Haiku modules.

    If such contexts are nested, only the innermost one marks.

    Args:
      way: how calls are marked.

    Yields:
      The `Results` of the calls.
    """
    configs: _Configs = {}
    results = Results(way)
    before = _active.set(configs)
    mark_call = functools.partial(_mark_call, configs, results)
    try:
        with compat.own_traces(way.value), hk.intercept_methods(mark_call):
            yield results
    finally:
        _active.reset(before)


def active() -> bool:
    """Whether calls of Haiku modules are being marked."""
    return _active.get() is not None


def _mark_call(
    configs: _Configs,
    results: Results,
    next_f: Any,
    args: Any,
    kwargs: Any,
    about: hk.MethodContext,
) -> Any:
    module, method = about.module, about.method_name
    if type(module) in UNMARKED or _active.get() is not configs:
        return next_f(*args, **kwargs)
    if method == "__init__":
        if id(module) in configs:  # a constructor of a base class
            return next_f(*args, **kwargs)
        configs[id(module)] = module, _constructor_arguments(type(module), args, kwargs)
    structure, arrays = split((args, kwargs))
    config = configs.get(id(module), (None, {}))[1]
    call = Call(type(module), "", method, config, structure, scope=None)
    # Half of all calls are of constructors. Most take no arrays and run nothing: one mark is enough.
    token: Any = 0
    if arrays or method != "__init__":
        token, marked = begin(call, arrays)
        arrays = results.marked(call, arrays, marked)
    if structure.treedef is not None:
        rest = iter(arrays)
        args = _refilled(args, rest)
        kwargs = {name: _refilled(kwargs[name], rest) for name in sorted(kwargs)}
    out = next_f(*args, **kwargs)
    is_new = sys.getrefcount(out) <= _OF_ONE_NAME
    call.path = getattr(module, "module_name", "")
    call.results, arrays = split(out)
    arrays = results.marked(call, arrays, end(token, call, arrays))
    return out if call.results.treedef is None else results.filled(call, out, iter(arrays), is_new)


def _references_of_one_name() -> int:
    x: Any = {}
    return sys.getrefcount(x)


# Python's reference count of an object that only one variable has.
_OF_ONE_NAME = _references_of_one_name()


def _constructor_arguments(cls: type, args: Any, kwargs: Any) -> dict[str, Any]:
    """A constructor's arguments by name, with defaults. Shapes and dtypes replace traced arrays."""
    signature = _signature(cls)
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError:  # the constructor is about to raise it
        return {}
    bound.apply_defaults()
    named = dict(list(bound.arguments.items())[1:])
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return {name: _without_arrays(x) for name, x in named.items()}


@functools.lru_cache(maxsize=4096)
def _signature(cls: Any) -> inspect.Signature:
    return inspect.signature(cls.__init__)


def _without_arrays(x: Tree) -> Tree:
    if isinstance(x, jax.core.Tracer):  # it would outlive its trace
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    if isinstance(x, list | tuple | dict):
        return jax.tree.map(_without_arrays, x) if jax.tree.leaves(x) else x
    return x


# --- the primitive ---------------------------------------------------------------------------------


def _results(*operands: Array, kind: str, make_token: Any) -> list[Array]:
    return [make_token(), *operands] if kind == "begin" else list(operands[1:])


_TOKEN = jax.core.ShapedArray((), jax.numpy.int32)


@mark_p.def_abstract_eval
def _abstract(*operands: Aval, call: Call, kind: str, seen: Any) -> list[Aval]:
    return _results(*operands, kind=kind, make_token=lambda: _TOKEN)


def _run(*operands: Array, call: Call, kind: str, seen: Any) -> list[Array]:
    return _results(*operands, kind=kind, make_token=lambda: jax.numpy.zeros((), jax.numpy.int32))


mark_p.def_impl(_run)
mlir.register_lowering(mark_p, mlir.lower_fun(_run, multiple_results=True))


def _differentiate(
    primals: Sequence[Array], tangents: Sequence[Array], *, call: Call, kind: str, seen: Any
) -> Any:
    out = mark_p.bind(*primals, call=call, kind=kind, seen=(*seen, DIFFERENTIATED))
    if kind == "begin":
        zero = ad.Zero(jax.typeof(out[0]).to_tangent_aval())
        return out, [zero, *tangents]
    return out, list(tangents[1:])


def _batch(operands: Sequence[Array], axes: Any, *, call: Call, kind: str, seen: Any) -> Any:
    sizes = {x.shape[i] for x, i in zip(operands, axes, strict=True) if i is not None}
    own = Batched(sizes.pop(), tuple(axes if kind == "begin" else axes[1:]))
    out = mark_p.bind(*operands, call=call, kind=kind, seen=(*seen, own))
    return out, ([None, *axes] if kind == "begin" else list(axes[1:]))


ad.primitive_jvps[mark_p] = _differentiate
batching.primitive_batchers[mark_p] = _batch
