"""The program of a model: its tree, with its arguments and results; how it is made and run."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import haiku as hk
import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_implicit.core import compat
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.bind import bind
from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.transform import Static, tree_leaves_with_implicit
from haiku_implicit.core.typing import Array, Params, State, Tree
from haiku_implicit.mox.program import interface, marks, tree
from haiku_implicit.mox.program.interface import WHOLE, Interface, Path, Slot, as_key, by_path
from haiku_implicit.mox.program.paths import with_full_paths
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, Node, body_of
from haiku_implicit.params.haiku.transformed import original_of, transform_implicit


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """The program of a Haiku model, as a tree of its modules' calls.

    Attributes:
      body: the tree.
      interface: the arguments and results.
      init: the model's `init`.
      implicit: whether the model makes implicit arrays itself.
    """

    body: Body
    interface: Interface
    init: Callable[..., Any] | None
    implicit: bool = False

    @property
    def has_state(self) -> bool:
        """Whether the model has state, and returns a new one."""
        return self.interface.has_state

    def with_nodes(
        self, children: Sequence[Node], face: Interface, init: Callable[..., Any] | None
    ) -> Self:
        """The program with other nodes, arguments and results, and another `init`."""
        body = dataclasses.replace(
            self.body, children=tuple(children), invars=face.invars, returns=face.returns
        )
        return dataclasses.replace(self, body=body, interface=face, init=init)

    def with_init_of(
        self, change: Callable[[dict[Path, Any], dict[Path, Any]], Any]
    ) -> Callable[..., Any] | None:
        """The `init` of a changed program: a function of the parameters and the state of `init`."""
        if self.init is None:
            return None
        return lambda *args, **kwargs: change(*self.initial(*args, **kwargs))

    def initial(self, *args: Any, **kwargs: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
        """The parameters and the state that `init` makes, by path."""
        assert self.init is not None
        made = self.init(*args, **kwargs)
        params, state = made if self.has_state else (made, {})
        return by_path(params), by_path(state)

    @functools.cached_property
    def draws_random(self) -> bool:
        """Whether a result depends on the random key."""
        keys, invars = set(self.interface.rng.atoms), self.body.invars
        # (A node that no result needs may have no rule of `jax.vmap`.)
        nodes = tree.needed(self.body.children, set(tree.variables(self.body.returns)))
        body = dataclasses.replace(self.body, children=nodes)

        def on_arrays(*arrays: Array) -> list[Array]:
            return run(body, body.consts, arrays)

        return depends(on_arrays, map(tree.shape_of, invars), [v in keys for v in invars])

    def apply(self, *args: Any, **kwargs: Any) -> Tree:
        """The results of the model's `apply`, bit for bit: see `eval_mox`."""
        leaves = tree_leaves_with_implicit((args, kwargs))
        if self.implicit or any(map(is_implicit, leaves)):
            return self._on_implicit.apply(*args, **kwargs)
        return self._run(*args, **kwargs)

    @functools.cached_property
    def _on_implicit(self) -> Any:
        kind = hk.TransformedWithState if self.has_state else hk.Transformed
        return transform_implicit(kind(init=self._run, apply=self._run))

    def _run(self, *args: Any, **kwargs: Any) -> Tree:
        arrays = self.interface.split(lambda: self.draws_random, args, kwargs)
        return self.interface.merge_results(run(self.body, self.body.consts, arrays))

    def transformed(self) -> hk.Transformed | hk.TransformedWithState:
        """The program as a transformed function: see `to_transformed`."""

        def apply(*args: Any, **kwargs: Any) -> Tree:
            return self.apply(*args, **kwargs)

        apply.__signature__ = self.interface.apply_signature  # type: ignore[attr-defined]
        kind: Any = hk.TransformedWithState if self.has_state else hk.Transformed
        return kind(init=self.init, apply=apply)

    def __deepcopy__(self, memo: Any = None) -> "Program":
        return self  # nothing in it changes

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        raise type_error(
            "a module expression can't be pickled. save(path, mox) writes it to a file, and load(path) "
            "reads it"
        )


def checked(call: str, x: Any) -> None:
    """Raises a TypeError unless an argument is a module expression.

    Args:
      call: the call that takes it, for the error: `save(path, mox)`.
      x: the argument.
    """
    if not isinstance(x, Program):
        transformed = isinstance(x, hk.Transformed | hk.TransformedWithState)
        made = ": make one with make_mox(model)(*args)" if transformed else ""
        raise type_error(f"{call}: mox has to be a module expression, got {type(x).__name__}{made}")


ANY_KEY = "any key"


# --- making ---------------------------------------------------------------------------------------


class Init:
    """The `init` of a model. Its program for the model's arguments is traced once, when it is needed.

    Args:
      function: the `init`.
      face: an interface with the arguments of the model, which may be arrays or variables.
    """

    def __init__(self, function: Callable[..., Any], face: Interface):
        self.function = function
        self.face = face.with_atoms(interface.ARGUMENTS, map(interface.type_of, face.invars))
        self._known: tuple[ClosedJaxpr, Interface, Tree] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        return self.function(*args, **kwargs)

    def is_for(self, face: Interface) -> bool:
        """Whether an interface has the same arguments."""
        own = self.face
        slots = (own.rng, face.rng), (own.args, face.args)
        return own.signature is face.signature and all(x.tree is y.tree for x, y in slots)

    def _traced(self) -> tuple[ClosedJaxpr, Interface, Tree]:
        """The program of `init`, its interface, and the shapes of its results.

        The model's results, which `init` drops, are not in it.
        """
        # (A cached property would lock all models until this one is traced.)
        if self._known is None:
            self._known = self._trace()
        return self._known

    def _trace(self) -> tuple[ClosedJaxpr, Interface, Tree]:
        # An initializer may need a key even if the model gets none.
        key = self.face.rng
        key = key if key.tree.num_arrays else interface.slot_of(usual_key())
        none: Any = dict(params={}, state={}, new_state={})
        face = dataclasses.replace(self.face, leading=("rng",), rng=key, **none)
        trees: list[Static] = []

        def on_arrays(*arrays: Array) -> list[Array]:
            args, kwargs = face.arguments(arrays)
            structure, out = marks.split(self(*args, **kwargs), interface.is_array)
            trees.append(structure)
            return out

        closed, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(*face.invars)
        face = dataclasses.replace(face, results=Slot(trees[-1], ()))
        return pruned(closed), face, trees[-1].merge(shapes)

    def entries(self, params: Params = None, state: State = None) -> tuple[Params, State]:
        """The given parameters and state; shapes from `init` replace missing ones."""
        has_state = self.face.has_state
        if params is None or (has_state and state is None):
            made = self._traced()[-1]
            made = made if has_state else (made, None)
            params, state = (
                y if x is None else x for x, y in zip((params, state), made, strict=True)
            )
        return params, state

    @property
    def program(self) -> Program:
        """The program of `init`."""
        closed, face, _ = self._traced()
        body = body_of("init", closed)
        face = face.with_atoms(interface.ARGUMENTS, body.invars)
        face = face.with_atoms(interface.RESULTS, body.returns)
        return Program(body, face, None)


def init_of(transformed: Any, args: Any, kwargs: Any, rng: Any) -> Init:
    """The `init` of a model, for these arguments of its Haiku function.

    Args:
      transformed: a transformed function, or a multi-transform.
      args: the arguments: arrays, `jax.ShapeDtypeStruct`s and constants.
      kwargs: the keyword arguments.
      rng: the random key: None for no key, `ANY_KEY` for a key of the usual kind.
    """
    has_state = isinstance(transformed, hk.TransformedWithState | hk.MultiTransformedWithState)
    leading: tuple[str, ...] = ("params", "state", "rng") if has_state else ("params", "rng")
    signature = interface.ANY_ARGUMENTS
    if isinstance(transformed, hk.Transformed | hk.TransformedWithState):
        leading, known = split_signature(original_of(transformed.apply)[0], has_state)
        # It may lack arguments whose names Haiku also adds (an RNN's `state`).
        with contextlib.suppress(TypeError):
            known.bind(*args, **kwargs)
            signature = known
    named = interface.named_arguments(signature, args, kwargs)
    key = usual_key() if rng is ANY_KEY else as_key(rng)
    key, own, nothing = map(interface.slot_of, (key, named, None))
    return Init(transformed.init, Interface(leading, signature, {}, {}, key, own, nothing, {}))


def program_of(
    transformed: Any, init: Init, params: Params, state: State, *, prune: bool = False
) -> Program:
    """Traces a transformed function.

    Args:
      transformed: the result of Haiku's `transform` or `transform_with_state`.
      init: its `init`, with the arguments.
      params: the parameters, or their shapes.
      state: the state, or its shapes.
      prune: whether to leave out equations that no result depends on.
    """
    apply, implicit = original_of(transformed.apply)
    entries: Any = dict(params=interface.slots_of(params), state=interface.slots_of(state))
    face = dataclasses.replace(init.face, **entries)
    returned: dict[Any, Static] = {}

    def on_arrays(*arrays: Array) -> list[Array]:
        args, kwargs = face.arguments(arrays)
        out = apply(*args, **kwargs)
        out, state = out if face.has_state else (out, None)
        parts = {path: marks.split(x) for path, x in {WHOLE: out, **by_path(state)}.items()}
        returned.update({path: tree for path, (tree, _) in parts.items()})
        return [x for _, arrays in parts.values() for x in arrays]

    closed = _marked(on_arrays, face.invars)
    body = body_of("model", pruned(closed) if prune else closed)
    slots = {path: Slot(tree, ()) for path, tree in returned.items()}
    face = dataclasses.replace(face, results=slots.pop(WHOLE), new_state=slots)
    face = face.with_atoms(interface.ARGUMENTS, body.invars)
    face = face.with_atoms(interface.RESULTS, body.returns)
    paths = interface.by_variable(face.params) | interface.by_variable(face.state)
    body = with_full_paths(body, paths)
    return Program(body, face, init, implicit)


def pruned(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program without the equations that neither a result nor an effect depends on."""
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


def _marked(fun: Callable[..., Any], arrays: Array) -> ClosedJaxpr:
    """The program of a function, with marks set in the first way that does not change its numbers."""
    for way in marks.Way:
        closed, error, results = _traced(fun, arrays, way)
        changed = results.changed
        if changed and way is not marks.Way.COPIES:
            raise value_error(
                f"make_mox: {changed.call} returns a {type(changed.container).__name__} that others "
                "hold, too, and the model changes it afterwards. That can be followed in lists, "
                "dictionaries and objects whose attributes can be set: return one of these, or a copy"
            ) from error
        if not changed and not isinstance(error, jax.errors.UnexpectedTracerError):
            break
    if error is not None:
        raise error
    return closed


def _traced(
    fun: Callable[..., Any], arrays: Array, way: marks.Way
) -> tuple[Any, Any, marks.Results]:
    """Traces a function: its program, the error if there is one, and the results of calls."""
    closed = error = None
    with marks.marking(way) as results:
        try:
            closed = jax.make_jaxpr(fun)(*arrays)
        except Exception as e:
            error = e
    for x in closed.consts if closed else ():
        if isinstance(x, jax.core.Tracer) and (results.has_moved(x) or not compat.is_traced()):
            error = jax.errors.UnexpectedTracerError(
                "make_mox: the model keeps a value of a loop, a branch or a function that JAX traces, "
                f"and uses it outside: {x}. Return it from there"
            )
    return closed, error, results


def split_signature(apply: Any, has_state: bool) -> tuple[tuple[str, ...], inspect.Signature]:
    """The first arguments of an `apply`, and the signature of the Haiku function.

    If an `apply` has only `*args`, its first arguments are the same as for Haiku's.
    """
    parameters = list(inspect.signature(apply).parameters.values())
    leading: tuple[str, ...] = ("params", "state") if has_state else ("params",)
    following = parameters[len(leading) : len(leading) + 1]
    unknown = not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
    if unknown or (following and following[0].name == "rng"):
        leading = (*leading, "rng")
    skipped = 0 if unknown else len(leading)
    return leading, inspect.Signature(parameters[skipped:])


@contextlib.contextmanager
def init_called(what: str, way_out: str) -> Iterator[None]:
    """Adds to the errors of a model's `init` that it was called, and the way out.

    Haiku raises a ValueError if `init` lacks a parameter or state. A complete error replaces it. Other
    errors stay the same, with a note.
    """
    try:
        yield
    except ValueError as e:
        if what in str(e):  # of a model that was changed twice
            raise
        raise value_error(f"{what}: {e}\n{way_out}") from e
    except Exception as e:
        e.add_note(f"{what}. {way_out}")
        raise


def depends(fun: Callable[..., Any], avals: Iterable[Any], flags: Sequence[bool]) -> bool:
    """Whether a result of a function depends on some of its arguments, without running it.

    `jax.vmap` finds out: with these arguments mapped, no result may be mapped.

    Args:
      fun: the function, which takes arrays.
      avals: its arguments, or their shapes and dtypes.
      flags: for each argument, whether it is one of them.
    """
    in_axes = [0 if flag else None for flag in flags]
    pairs = zip(avals, flags, strict=True)
    avals = [x.update(shape=(1, *x.shape)) if flag else x for x, flag in pairs]
    try:
        jax.eval_shape(jax.vmap(fun, in_axes, out_axes=None, axis_size=1), *avals)
    except (ValueError, NotImplementedError):
        return True
    return False


def usual_key() -> Array:
    """The shape and dtype of a key of the usual kind."""
    return jax.eval_shape(lambda: jax.random.PRNGKey(0))


# --- running --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """A pair of functions that replaces a node.

    Attributes:
      inputs: the arguments.
      outputs: the variables of the results.
      init: maps a random key and arrays to parameters and state.
      apply: maps parameters, state, a random key and arrays to results, new state, and tapped values by
        name.
      replaces: whether the node itself does not run any more.
    """

    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    init: Callable[..., Any]
    apply: Callable[..., Any]
    replaces: bool = True


def run(
    body: Body,
    consts: Sequence[Array],
    args: Sequence[Array],
    pieces: Mapping[int, Piece] | None = None,
    run_piece: Callable[..., Sequence[Array]] | None = None,
) -> list[Array]:
    """Binds the equations of a program, in their order, to these values.

    Under `marks.marking` the calls in it are marked again.

    Args:
      body: the program.
      consts: values of its `constvars`.
      args: values of its `invars`.
      pieces: the pieces that run instead of nodes, by the `id` of the node.
      run_piece: runs a piece on its arrays.

    Returns:
      The results of the program.
    """
    variables: Sequence[Var] = (*body.constvars, *body.invars)
    running = _Run(body, dict(zip(variables, (*consts, *args), strict=True)), pieces, run_piece)
    running.visit(body.children)
    return running.read(body.returns)


class _Run:
    """One run of a program: `env` has the values of the variables that are still needed."""

    def __init__(self, body: Body, env: dict[Var, Array], pieces: Any, run_piece: Any):
        self.body, self.env, self.pieces, self.run_piece = body, env, pieces or {}, run_piece
        self.outer, self.marked = source_info_util.current_name_stack(), marks.active()

    def read(self, atoms: Iterable[Atom]) -> list[Array]:
        env = self.env
        return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

    def define(self, variables: Iterable[Var], values: Sequence[Array]) -> None:
        self.env.update(zip(variables, values, strict=True))

    def visit(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            if id(node) in self.pieces:
                self.substitute(node, self.pieces[id(node)])
            elif isinstance(node, Equation):
                results = run_equation(node, self.read(node.inputs), self.outer)
                self.define(node.outputs, results)
            else:
                self.call(node)
            for var in self.body.last_uses.get(id(node), ()):
                self.env.pop(var, None)

    def call(self, node: ModuleCall) -> None:
        marked, values = self.marked and node.call, self.read(node.inputs)
        if marked:
            token, values = marks.begin(marked, values, node.seen)
        self.define((var for var, _ in node.given), values)
        self.visit(node.children)
        results = self.read(node.returns)
        if marked:
            results = marks.end(token, marked, results, node.seen_results)
        self.define(node.outputs, results)

    def substitute(self, node: ModuleCall, new: Piece) -> None:
        """Runs a piece instead of a node, and what the rest of the program reads in the node."""
        results = self.run_piece(new, *self.read(new.inputs))
        hidden = tree.hidden(self.body, node).difference(new.outputs)
        if others := tree.needed(node.children, hidden):
            self.define((var for var, _ in node.given), self.read(x for _, x in node.given))
            self.visit(others)
        self.define(new.outputs, results)


def run_equation(node: Equation, operands: Sequence[Array], outer: Any = None) -> list[Array]:
    """Binds the primitive of an equation, with the name stack and the settings it was traced with.

    Args:
      node: the equation.
      operands: its operands.
      outer: the name stack around it; by default the current one.
    """
    eqn = node.eqn
    info = eqn.source_info
    stack = (source_info_util.current_name_stack() if outer is None else outer) + info.name_stack
    params = dict(node.params_to_bind(marks.active()))
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        return bind(eqn.primitive, list(operands), params)
