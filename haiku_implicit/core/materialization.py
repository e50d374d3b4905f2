"""Implicit arrays that become dense: the policy, the warning and the report.

The interpreter *emits* a `Materialization` when it has to materialize an operand. While a sub-jaxpr
is retraced, events are only *recorded*. The trace is cached, and each use of it emits the recorded
events again, so counts, warnings and errors do not depend on caches.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax
from jax import export
from jax.extend import source_info_util

from haiku_implicit.core import containers
from haiku_implicit.core.array import flatten_one_level, is_implicit, known_struct
from haiku_implicit.core.messages import (
    JAX,
    LIBRARIES,
    see,
    shown,
    text_table,
    value_error,
    warn_caller,
)
from haiku_implicit.core.typing import Array, Tree

Policy = Literal["allow", "warn", "error"]


class MaterializationWarning(UserWarning):
    """An implicit array was materialized, because no rule handles it in a primitive."""


class MaterializationError(RuntimeError):
    """An implicit array would have been materialized under the policy `'error'`."""


@dataclasses.dataclass(frozen=True)
class Materialization:
    """One implicit array that became dense.

    Attributes:
      primitive: the name of the primitive that no rule handles.
      type_name: the name of the implicit type.
      shape: its dense shape.
      dtype: the name of its dense dtype.
      nbytes: the bytes of the dense array; a symbolic length (`jax.export`) counts as one.
      file: the file of the user's own line that led to the primitive.
      line: that line's number.
      module: the path of the Haiku module (JAX's name stack, without transformations), `''` outside
        any.
      quiet: whether the type says that it is not worth a warning.
      reason: why it had to be dense; `''` if no rule handles it.
      parameters: in a warning or an error, the paths of the parameters of its type, shape and dtype, of
        which it is probably one; None if no parameter has its type.
    """

    primitive: str
    type_name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    line: int
    module: str
    quiet: bool = False
    reason: str = ""
    parameters: tuple[str, ...] | None = None

    @property
    def place(self) -> tuple[str, str, str, int]:
        """The primitive, type, file and line, which events of one kind share."""
        return (self.primitive, self.type_name, self.file, self.line)

    @property
    def cause(self) -> str:
        """Why it had to be dense, with the line and the module if they are known."""
        where = [f"{self.file}:{self.line}"] if self.file else []
        where += [f"in module {self.module}"] if self.module else []
        reason = self.reason or f"no rule handles it in {self.primitive!r}"
        return f"{reason} ({', '.join(where)})" if where else reason

    def __str__(self) -> str:
        shape, names = ",".join(map(str, self.shape)), shown(list(self.parameters or ()), most=3)
        ways = [] if self.reason else ["add one with haiku_implicit.primitive_handler"]
        probably = ""
        if self.parameters is not None:
            only = len(self.parameters) == 1
            whose = "it" if names else "the parameter that it is made from"
            which = repr(names) if only else ""
            ways.append(f"leave {whose} dense by exclude={which} of the edit that made it implicit")
            if names:
                probably = f" (probably {'' if only else 'one of '}{names})"
        ways.append("accept it in a block `with haiku_implicit.materialization('allow'):`")
        way_out = ", or ".join(ways)
        return (
            f"{self.type_name} {self.dtype}[{shape}]{probably} was materialized "
            f"({self.nbytes:,} bytes), because {self.cause}. {way_out[0].upper()}{way_out[1:]}."
            f" {see('became-dense')}"
        )


@dataclasses.dataclass(frozen=True)
class Remark:
    """A warning of a rule about one use of an array.

    A rule that calls `warnings.warn` itself would warn only once, when it is traced.

    Attributes:
      text: the message.
      file, line, module: as in `Materialization`.
    """

    text: str
    file: str = ""
    line: int = 0
    module: str = ""


Event = Materialization | Remark


class MaterializationReport:
    """The arrays that were materialized while `materialization_report()` was active, by source line.

    Iterating gives `(event, count)` for each line; `str()` is a table, largest first.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[object, ...], tuple[Materialization, int]] = {}
        self._lock = threading.Lock()

    def add(self, event: Materialization) -> None:
        """Counts one event."""
        key = (*event.place, event.module, event.shape, event.dtype)
        with self._lock:  # threads with a copied context share the report
            _, count = self._counts.get(key, (event, 0))
            self._counts[key] = (event, count + 1)

    def __iter__(self) -> Iterator[tuple[Materialization, int]]:
        return iter(self._counts.values())

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def count(self) -> int:
        """The number of arrays that were materialized, in all lines together."""
        return sum(n for _, n in self)

    @property
    def nbytes(self) -> int:
        """The bytes of all dense arrays together."""
        return sum(event.nbytes * n for event, n in self)

    def __str__(self) -> str:
        if not self._counts:
            return "nothing was materialized"
        header = ("count", "bytes", "type", "dense", "primitive", "module", "line")
        rows = [
            (
                str(n),
                f"{e.nbytes * n:,}",
                e.type_name,
                f"{e.dtype}[{','.join(map(str, e.shape))}]",
                e.primitive,
                e.module or "-",
                f"{os.path.basename(e.file)}:{e.line}",
            )
            for e, n in sorted(self, key=lambda en: -en[0].nbytes * en[1])
        ]
        rows.append((str(self.count), f"{self.nbytes:,}", "all", "", "", "", ""))
        return text_table(header, rows, numbers=0)


_policy: contextvars.ContextVar[Policy] = contextvars.ContextVar("policy", default="warn")
# The reports whose blocks are active.
_reports: contextvars.ContextVar[tuple[MaterializationReport, ...]]
_reports = contextvars.ContextVar("reports", default=())
# Makes the tree of the arguments of the innermost wrapped function that is running.
_arguments: contextvars.ContextVar[Callable[[], Tree]]
_arguments = contextvars.ContextVar("arguments", default=lambda: ())


class _Retrace(threading.local):
    """The log of the current retrace, per thread."""

    log: list[Event] | None = None


_retrace = _Retrace()


@contextlib.contextmanager
def materialization(policy: Policy) -> Iterator[None]:
    """Sets the policy for implicit arrays that are materialized in a `with` block.

    It acts when a function is *traced*. A jitted function that was traced before is not affected. A
    call without `with` does nothing.

    A thread that is started in the block begins with the default, as JAX's own settings do. To pass the
    policy on, start it with `contextvars.copy_context().run` as its target and the function as the
    first of its `args`; for a pool, `pool.submit(contextvars.copy_context().run, fun, ...)`.
    (`asyncio.to_thread` does so by itself.)

    Args:
      policy: `'allow'` says nothing; `'warn'` (the default outside any block) gives a
        `MaterializationWarning`, once for each primitive, type and source line; `'error'` raises
        `MaterializationError`.

    Raises:
      ValueError: for a policy other than these three.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
      >>> with hki.materialization('error'):
      ...   hki.use_implicit_args(jnp.sin)(w)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      haiku_implicit.core.materialization.MaterializationError: LoRA float32[2,3] was materialized ...
    """
    if policy not in get_args(Policy):
        raise value_error(f"policy: expected one of {', '.join(get_args(Policy))}, got {policy!r}")
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


@contextlib.contextmanager
def materialization_report() -> Iterator[MaterializationReport]:
    """Collects the arrays that are materialized within a `with` block, under any policy.

    It counts only functions that this thread traces; for other threads see `materialization`.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.LoRA(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)))
      >>> with hki.materialization('allow'), hki.materialization_report() as report:
      ...   _ = hki.use_implicit_args(jnp.sin)(w)
      >>> report.count, report.nbytes
      (1, 24)
    """
    report = MaterializationReport()
    _reports.set((*_reports.get(), report))
    try:
        yield report
    finally:
        _reports.set(tuple(other for other in _reports.get() if other is not report))


@contextlib.contextmanager
def of_arguments(tree: Callable[[], Tree]) -> Iterator[None]:
    """Lets the messages of a `with` block name the parameters among the arguments of a function.

    Args:
      tree: makes `(args, kwargs)`, if a message is given.
    """
    token = _arguments.set(tree)
    try:
        yield
    finally:
        _arguments.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[Event]]:
    """Collects events instead of delivering them, while a sub-jaxpr is retraced."""
    outer, _retrace.log = _retrace.log, []
    try:
        yield _retrace.log
    finally:
        _retrace.log = outer


def emit(event: Event) -> None:
    """Records an event, or, outside any retrace, delivers it: report, then warning or error."""
    if _retrace.log is not None:
        _retrace.log.append(event)
        return
    if isinstance(event, Remark):
        warn_caller(event.text)
        return
    if not event.file:  # a library's own function was wrapped: name the line that calls it
        file, line = _first_own((f.f_code.co_filename, n) for f, n in traceback.walk_stack(None))
        event = dataclasses.replace(event, file=file, line=line)
    for report in _reports.get():
        report.add(event)
    policy = _policy.get()
    if policy == "allow" or (event.quiet and policy == "warn"):
        return
    if policy == "error":
        raise MaterializationError(str(_with_parameters(event)))
    _warn_once(event)


def replay(events: Sequence[Event], of_library: bool = False) -> None:
    """Emits the events that were recorded when the current equation's sub-jaxpr was retraced.

    Args:
      events: the recorded events.
      of_library: whether the sub-jaxpr belongs to a library (`jnp.clip`, a rule), which all callers
        share. Its tracebacks name the first caller, so the events get the line of the current
        equation.
    """
    if not events:
        return
    file, line, module = _here()
    for e in events:
        path = "/".join(p for p in (module, e.module) if p)
        at = (file, line) if of_library or not e.file else (e.file, e.line)
        emit(dataclasses.replace(e, module=path, file=at[0], line=at[1]))


def is_of_jax(jaxpr: Any) -> bool:
    """Whether the function that was traced to this jaxpr is JAX's own."""
    _, _, place = (jaxpr.debug_info.func_src_info or "").partition(" at ")
    return place.startswith(JAX)


def describe(primitive_name: str, x: Array, reason: str = "") -> Materialization:
    """Returns the event for an implicit operand `x` of a primitive, at the current equation."""
    file, line, module = _here()
    return Materialization(
        primitive=primitive_name,
        type_name=type(x).__name__,
        shape=tuple(x.shape),
        dtype=x.dtype.name,
        nbytes=math.prod(1 if export.is_symbolic_dim(n) else n for n in x.shape) * x.dtype.itemsize,
        file=file,
        line=line,
        module=module,
        quiet=not type(x).warn_on_materialize,
        reason=reason,
    )


class _Where(str):
    """A note on an error; `of` holds the equation's primitive, file, line and module."""

    of: tuple[str, str, int, str]


def say_where(error: Exception, primitive_name: str, of_library: bool = False) -> None:
    """Adds a note to the error of a rule: the module and the line of the current equation.

    The innermost equation raises the error. Each one around it knows more of the module's path, and
    the user's line if the sub-jaxpr belongs to a library (`of_library`, as for `replay`).
    """
    file, line, module = _here()
    notes = list(getattr(error, "__notes__", ()))
    for inner in [note for note in notes if isinstance(note, _Where)]:
        notes.remove(inner)
        primitive_name, its_file, its_line, its_module = inner.of
        module = "/".join(filter(None, (module, its_module)))
        if its_file and not of_library:
            file, line = its_file, its_line
    at = f", {file}:{line}" if file else ""
    within = f", in module {module}" if module else ""
    note = _Where(f"This was in the model's {primitive_name!r}{at}{within}")
    note.of = primitive_name, file, line, module
    error.__notes__ = [*notes, note]


_texts: dict[tuple[object, ...], str] = {}
_registry: dict[Any, int] = {}
# Beyond this number (of new shapes, for example) warnings are given again.
_MOST_TEXTS = 10_000


def _warn_once(event: Materialization) -> None:
    # Python warns once for each text and line. The text names the Haiku module, which differs from
    # call to call, so all events of one line use the text of the first one.
    if len(_texts) > _MOST_TEXTS:
        _texts.clear()
        _registry.clear()
    text = _texts.get((*event.place, event.shape))
    if text is None:
        text = _texts[*event.place, event.shape] = str(_with_parameters(event))
    warnings.warn_explicit(text, MaterializationWarning, event.file, event.line, registry=_registry)


def _with_parameters(event: Materialization) -> Materialization:
    """The event with the parameters that are, or hold, arrays of its type, shape and dtype.

    These are the parameters of its module, or else of any.

    The event itself, which caches keep, does not know which array it is from.
    """
    tree = containers.opened(_arguments.get()())
    of_type, found = False, []
    for keys, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_implicit):
        # The first two keys say which argument it is.
        held = _held(x) if len(keys) > 2 else ()
        parts = [y for y in held if type(y).__name__ == event.type_name]
        of_type = of_type or bool(parts)
        if any(_may_be(event, y) for y in parts):
            found.append(jax.tree_util.keystr(keys[2:], simple=True, separator="/"))
    shared = {path: _shared_names(_module_of(path), event.module) for path in found}
    most = max([1, *shared.values()])
    here = [path for path in found if shared[path] == most]
    return dataclasses.replace(event, parameters=tuple(here or found) if of_type else None)


def _held(x: Array) -> Iterator[Array]:
    """An implicit array, and the implicit arrays in it, as a rotated weight holds trellis codes."""
    if is_implicit(x):
        yield x
        for part in flatten_one_level(x)[0]:
            yield from _held(part)


def _may_be(event: Materialization, x: Array) -> bool:
    """Whether an array, which may be a half without a shape, has the shape and dtype of an event."""
    struct, axes = known_struct(x), len(event.shape)
    if struct is None or struct.dtype.name != event.dtype:
        return False
    # A loop over layers takes the first axis from their stacked weights.
    return struct.shape[struct.ndim - axes :] == event.shape


def _module_of(path: str) -> str:
    """The module of a parameter, as JAX's name stack names it: `mlp/linear` of `mlp/~/linear/w`."""
    return "/".join(name for name in path.split("/")[:-1] if name != "~")


def _shared_names(module: str, used: str) -> int:
    """The number of names of a parameter's module, if it may be the module `used`; else 0.

    A module that the constructor makes, as `out/linear`, is `out/embed/linear` in the method `embed`.
    """
    names, rest = module.split("/"), iter(used.split("/"))
    is_part = names[-1] == used.split("/")[-1] and all(name in rest for name in names)
    return len(names) if is_part else 0


def _here() -> tuple[str, int, str]:
    """The user's file and line (`''` and 0 if the traceback has neither), and the module path."""
    info = source_info_util.current()
    frames: list[Any] = [] if info.traceback is None else info.traceback.frames
    file, line = _first_own((f.file_name, f.line_num) for f in frames)
    return file, line, _module_path(str(info.name_stack))


def _module_path(names: str) -> str:
    """The names of modules in a name stack: `gpt/mlp` of `jit(step)/transpose(jvp(gpt))/mlp`."""
    names, found = _FUNCTION.sub("", names), 1
    while found:
        names, found = _TRANSFORMED.subn(r"\1", names)
    return "/".join(filter(None, names.split("/")))


# JAX's notation for a jitted function, and for the name of a transformed function.
_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORMED = re.compile(r"\w+\(([^()]*)\)")


def _first_own(places: Iterable[tuple[str, int]]) -> tuple[str, int]:
    return next((at for at in places if not at[0].startswith(LIBRARIES)), ("", 0))
