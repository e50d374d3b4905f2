"""Replacements of nodes, as functions of the nodes' arrays.

Under `vmap`, a function is written for one element, and mapped over all elements.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var
from jax.interpreters import ad, batching

from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.core.transform import Static
from haiku_implicit.core.typing import Array, Aval, Params, Primitive, State, Tree
from haiku_implicit.mox.program import marks, tree
from haiku_implicit.mox.program.constants import identical, same_structure
from haiku_implicit.mox.program.interface import by_path, checked, described, is_array
from haiku_implicit.mox.program.program import Piece, Program, run, run_equation, split_signature
from haiku_implicit.mox.program.sites import Site
from haiku_implicit.mox.program.tree import Atom, Body, Equation, ModuleCall, Node


class _Site(hk.Module):
    """A module around a new function, whose modules and parameters get names below this module's."""

    def __call__(self, fun: Callable[..., Tree], *args: Any, **kwargs: Any) -> Tree:
        return fun(*args, **kwargs)


marks.UNMARKED.add(_Site)


def _piece(
    node: Equation,
    inputs: Sequence[Atom],
    outputs: Sequence[Var],
    fun: Callable[..., list[Array]],
    replaces: bool = True,
) -> Piece:
    """The piece of a Haiku function of arrays, for all elements of the `vmap`s around a node."""
    made = hk.transform_with_state(fun)

    def apply(*args: Any) -> Tree:
        return *made.apply(*args), {}

    piece = Piece(tuple(inputs), tuple(outputs), made.init, apply, replaces)
    return piece if isinstance(node, Equation) else _for_all_elements(piece, node)


def instead(site: Site, replacement: Any) -> Piece:
    """A replacement that is called with the arguments of a node.

    Args:
      site: the site of the node.
      replacement: a function, a class or a factory of modules, a module expression, a transformed
        function, or None for a function that returns its argument.
    """
    node = site.node
    method, config = getattr(node, "method", ""), getattr(node, "config", {})
    structure, _ = structures_of(node)
    args, kwargs = structure.merge([None] * structure.num_arrays)
    fun = callable_of(replacement, args, kwargs, method, config)

    def on_arrays(*arrays: Array) -> list[Array]:
        return _at_site(site, site.path, fun, arrays)

    return _piece(node, node.inputs, node.outputs, on_arrays)


def around(site: Site, function: Callable[..., Any]) -> Piece:
    """A replacement that is called with the original node, as a function, and with its arguments.

    Args:
      site: the site of the node.
      function: the function. The original takes arguments of the same structure.
    """
    node = site.node
    structure, results = structures_of(node)
    original = Original(site.region.body, node)
    avals = _element_types(node.inputs, getattr(node, "seen", ()))
    what = f"{node!r}: (args, kwargs) of the original"
    name = f"{site.path}/{getattr(function, '__name__', 'function').strip('<>')}"

    def on_arrays(*arrays: Array) -> list[Array]:
        arguments, captured = arrays[: len(node.inputs)], arrays[len(node.inputs) :]
        others: list[Array] = []

        def call_original(*args: Any, **kwargs: Any) -> Tree:
            new = checked(what, structure, avals, (args, kwargs))
            out, others[:] = original(new, captured)
            return results.merge(out)

        def fun(*args: Any, **kwargs: Any) -> Tree:
            return function(call_original, *args, **kwargs)

        out = _at_site(site, name, fun, arguments)
        return [*out, *(others or original(arguments, captured)[1])]

    inputs = (*node.inputs, *original.captured)
    outputs = (*node.outputs, *original.hidden)
    return _piece(node, inputs, outputs, on_arrays, replaces=False)


def before(site: Site, function: Any) -> Piece:
    """Calls a function with the arrays among a node's positional arguments, and then the node."""
    structure, _ = structures_of(site.node)
    args, _ = structure.merge([_ARRAY] * structure.num_arrays)
    places = [i for i, x in enumerate(args) if any(y is _ARRAY for y in jax.tree.leaves(x))]
    if not places:
        raise value_error(
            f"{site.node!r} is given no arrays by position, but {described(structure)}. Take them "
            "by their names: wrap(where, lambda original, **kwargs: original(...))"
        )
    fun = callable_of(function, places)

    def with_new_arguments(original: Any, *args: Any, **kwargs: Any) -> Tree:
        new = fun(*(args[i] for i in places))
        pairs = dict(zip(places, new if len(places) > 1 else [new], strict=True))
        return original(*(pairs.get(i, x) for i, x in enumerate(args)), **kwargs)

    return around(site, with_new_arguments)


# Stands for an array.
_ARRAY = object()


def after(site: Site, function: Any) -> Piece:
    """Calls a node, and then a function with the node's result."""
    fun = callable_of(function, ["the result"])

    def with_new_results(original: Any, *args: Any, **kwargs: Any) -> Tree:
        return fun(original(*args, **kwargs))

    return around(site, with_new_results)


class Original:
    """A node as a function of other arguments than its own.

    Attributes:
      captured: the variables that it reads otherwise than through its arguments.
      hidden: the variables that it defines and does not return, but other nodes read.
      arguments: the variables that are set to its arguments.
      call: the node, with these variables.
    """

    def __init__(self, body: Body, node: Any):
        self.captured: tuple[Var, ...] = ()
        self.hidden: tuple[Var, ...] = ()
        self.arguments: tuple[Atom, ...] = tuple(node.inputs)
        self.call, self._body = node, None
        if isinstance(node, Equation):
            return
        read = tree.uses(node.children, node.returns)
        # Within the call, an array in a list or a dict has the outer variable.
        own = [v if v in read or isinstance(x, Literal) else x for v, x in node.given]
        self.captured = tuple(v for v in node.captured if v not in own)
        self.hidden = tree.hidden_outputs(body, node)
        self.arguments = tuple(own)
        given = tuple(zip((v for v, _ in node.given), own, strict=True))
        self.call = dataclasses.replace(node, given=given)
        invars: Any = (*own, *self.captured)
        self._body = Body("", (), (), invars, (self.call,), (*node.outputs, *self.hidden))

    def __call__(
        self, arguments: Sequence[Array], captured: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The results for these arguments, and the values of `hidden`."""
        if self._body is None:
            return run_equation(self.call, arguments), []
        body, arrays = self._body, (*arguments, *captured)

        def whole(*arrays: Array) -> list[Array]:
            return run(body, (), arrays)

        if self.call.seen_results:
            out = _of_one_element(self.call, whole, arrays, self.hidden)
        else:
            out = whole(*arrays)
        return out[: len(self.call.outputs)], out[len(self.call.outputs) :]


def _at_site(site: Site, name: str, fun: Any, arrays: Sequence[Array]) -> list[Array]:
    """Calls a function of this name inside the `_Site` of a path, with marks around it."""
    token, call = None, marks.Call(None, name, "", {}, *structures_of(site.node))
    if marks.active():
        token, arrays = marks.begin(call, arrays)
    args, kwargs = call.args.merge(arrays)
    try:
        out = _Site(name=hk.force_name(site.path))(fun, *args, **kwargs)
    except Exception as error:
        error.add_note(f"This was in the replacement at {site.path!r}.")
        raise
    new = _checked(site.node, out)
    return marks.end(token, call, new) if marks.active() else new


def structures_of(node: Node) -> tuple[Static, Static]:
    """The structures of a node's arguments `(args, kwargs)` and of its results.

    Raises:
      ValueError: if JAX can't flatten the results, so that the arrays in them are not known.
    """
    if isinstance(node, ModuleCall) and node.call and node.call.results:
        if node.call.results.treedef is None:
            raise value_error(
                f"{node!r} returns something that is no tree to JAX, such as a dict whose keys can't "
                "be sorted. Choose another node"
            )
        return node.call.args, node.call.results
    outputs: Any = [v.aval for v in node.outputs]
    if len(outputs) == 1:
        (outputs,) = outputs
    every: Any = ((tuple(node.inputs), {}), outputs)
    args, results = (marks.split(x, lambda leaf: True)[0] for x in every)
    return args, results


def callable_of(
    replacement: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = {},
    method: str = "",
    config: Mapping[str, Any] = {},
) -> Callable[..., Any]:
    """Converts a replacement to a function.

    Args:
      replacement: as for `instead`.
      args: stand-ins for the arguments of the function, of which only the number matters.
      kwargs: stand-ins for its keyword arguments.
      method: the method to call if the replacement makes a module.
      config: the constructor arguments of the old module.
    """
    method = method or "__call__"
    if replacement is None:
        return _same
    if isinstance(replacement, Program):
        replacement = replacement.transformed()
    if isinstance(replacement, hk.Transformed | hk.TransformedWithState):
        return functools.partial(_lifted, replacement)
    if isinstance(replacement, type) and issubclass(replacement, hk.Module):
        replacement = functools.partial(replacement, **_config_for(replacement, config))
    if not callable(replacement):
        raise type_error(
            "replacement: expected a function, a class or a factory of modules, a module expression, "
            f"a transformed function or None, got {type(replacement).__name__}"
        )
    if _is_factory(replacement, args, kwargs):
        return lambda *args, **kwargs: getattr(replacement(), method)(*args, **kwargs)
    return replacement


def _same(*args: Any, **kwargs: Any) -> Tree:
    """Returns the arrays among its arguments: one array, or a list of arrays."""
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
    return arrays[0] if len(arrays) == 1 else arrays


def _lifted(transformed: Any, *args: Any, **kwargs: Any) -> Tree:
    """Runs a transformed function as a part of another Haiku function."""
    has_state = isinstance(transformed, hk.TransformedWithState)
    key = hk.maybe_next_rng_key()
    keys = [key] if "rng" in split_signature(transformed.apply, has_state)[0] else []
    if not has_state:
        params = hk.transparent_lift(transformed.init)(key, *args, **kwargs)
        return transformed.apply(params, *keys, *args, **kwargs)
    init, updater = hk.transparent_lift_with_state(transformed.init)
    params, state = init(key, *args, **kwargs)
    out, state = transformed.apply(params, state, *keys, *args, **kwargs)
    updater.update(state)
    return out


def _config_for(cls: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor arguments of a module that another class also takes."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: x for name, x in config.items() if name in parameters and name != "name"}


def _is_factory(fun: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function makes a module, rather than takes these arguments."""
    if isinstance(fun, functools.partial) and isinstance(fun.func, type):
        return issubclass(fun.func, hk.Module)
    return not _takes(fun, args, kwargs) and _takes(fun, (), {})


def _takes(fun: Any, args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _checked(node: Node, out: Tree) -> list[Array]:
    """The arrays in the results of a new function, after checking them against the node's results.

    Other leaves of the results are fixed in the program around the node, and have to be the same.
    """
    _, results = structures_of(node)
    kept = _constants_in(out, results)
    structure, arrays = marks.split(out, lambda x: is_array(x) and id(x) not in kept)
    taken = [[x is None for x in tree.leaves] for tree in (structure, results)]
    if not same_structure(structure.treedef, results.treedef) or taken[0] != taken[1]:
        raise value_error(
            f"{node!r}: the replacement has to return {described(results)}, and returned "
            f"{described(structure)}"
        )
    for old, new in zip(results.leaves, structure.leaves, strict=True):
        if old and new and not identical(old[0], new[0]):
            raise value_error(
                f"{node!r}: the replacement has to return {old[0]!r}, which the rest of the model was "
                f"traced with, and returned {new[0]!r}. To change it, change the model and make its "
                "expression again"
            )
    avals = _element_types(node.outputs, getattr(node, "seen_results", ()))
    pairs = zip(avals, arrays, strict=True)
    return [_as(f"{node!r}: result {i}", aval, x) for i, (aval, x) in enumerate(pairs)]


def _constants_in(out: Tree, results: Static) -> set[int]:
    """The `id`s of leaves that equal constants of the results. A constant can be an array, too."""
    every, _ = marks.split(out, lambda x: False)
    pairs = zip(every.leaves, results.leaves, strict=False)
    return {id(x[0]) for x, old in pairs if x and old and identical(x[0], old[0])}


def _as(what: str, aval: Aval, x: Array) -> Array:
    x = jnp.asarray(x)
    if x.shape != aval.shape or x.dtype != aval.dtype:
        found = f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
        raise value_error(f"{what} of the replacement has to be {aval.str_short()}, and is {found}")
    weak = jax.typeof(x).weak_type and not aval.weak_type
    return jax.lax.convert_element_type(x, aval.dtype) if weak else x


# --- under vmap -----------------------------------------------------------------------------------


class _Level(NamedTuple):
    """One `vmap` around a call.

    Attributes:
      name: the name of its axis.
      size: the number of elements.
      axes: the mapped axis of each argument; None if the argument is the same for all elements.
      out_axes: the mapped axis of each result.
    """

    name: str
    size: int
    axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]


def _levels_of(node: ModuleCall) -> tuple[_Level, ...]:
    """The `vmap`s around a call, the innermost first.

    Raises:
      ValueError: if JAX transformed its arguments and results in different ways.
    """
    inner: list[Any] = [None] * len(node.seen_results)
    seen, seen_results = node.seen or inner, node.seen_results
    if len(seen) != len(seen_results):
        raise value_error(f"{node!r} can't be replaced: it is under vmap in parts")
    levels = []
    for i, (given, results) in enumerate(zip(seen, seen_results, strict=True)):
        axes = given.axes if given else (None,) * len(node.inputs)
        levels.append(_Level(f"elements {i} of {node!r}", results.size, axes, results.axes))
    return tuple(levels)


def _element_types(atoms: Sequence[Atom], seen: Sequence[Any]) -> list[Aval]:
    """The types of a node's arrays, without the axes of the `vmap`s around it: see `ModuleCall`."""
    avals: list[Aval] = [x.aval for x in atoms]
    for level in reversed(seen):
        avals = [
            x if i is None else x.update(shape=(*x.shape[:i], *x.shape[i + 1 :]))
            for x, i in zip(avals, level.axes, strict=True)
        ]
    return avals


def _for_all_elements(piece: Piece, node: ModuleCall) -> Piece:
    """Maps a piece for one element over the `vmap`s around a node.

    Additional inputs and outputs of the piece, which the node does not have, are the same for all
    elements.
    """
    for level in _levels_of(node):
        piece = _mapped(piece, repr(node), level)
    return piece


def _mapped(piece: Piece, what: str, level: _Level) -> Piece:
    same = len(piece.inputs) - len(level.axes), len(piece.outputs) - len(level.out_axes)
    axes, out_axes = (*level.axes, *[None] * same[0]), [*level.out_axes, *[None] * same[1]]
    options: Any = dict(axis_size=level.size, axis_name=level.name)

    def init(rng: jax.Array, *arrays: Array) -> Tree:
        def one(*arrays: Array) -> Tree:
            return piece.init(rng, *arrays)

        params, state = jax.vmap(one, in_axes=axes, out_axes=None, **options)(*arrays)
        if by_path(state):
            raise value_error(f"{what}: the replacement has state, and is under vmap")
        return params, state

    def apply(params: Params, state: State, rng: jax.Array, *arrays: Array) -> Tree:
        keys = None if rng is None else jax.random.split(rng, level.size)

        def one(key: jax.Array, *arrays: Array) -> Tree:
            return piece.apply(params, state, key, *arrays)[0]

        mapped = jax.vmap(one, in_axes=(0, *axes), out_axes=out_axes, **options)
        return mapped(keys, *arrays), state, {}

    return dataclasses.replace(piece, init=init, apply=apply)


# --- the node itself, as a function of one element --------------------------------------------------


def _of_one_element(
    node: ModuleCall, fun: Callable[..., Any], arrays: Sequence[Array], hidden: Sequence[Array]
) -> list[Array]:
    """Calls a function of all elements from code that is written for one element.

    `_for_all_elements` maps this code, and so gives the function the arrays of all elements.

    Args:
      node: a call with `vmap`s around it.
      fun: maps the call's arrays, and further ones, to a list of arrays.
      arrays: the arguments of one element, and the further arrays.
      hidden: the variables of further results, which the call does not return.
    """
    levels = _levels_of(node)
    # Because of these, JAX maps the primitive at each level, even if no argument is mapped.
    indices = [jax.lax.axis_index(level.name) for level in levels]
    own = _element_types(node.outputs, node.seen_results)
    out = (*own, *(v.aval for v in hidden))
    return _element_p.bind(*indices, *arrays, fun=fun, levels=levels, out=out)


_element_p = Primitive("call_of_one_element")
_element_p.multiple_results = True


@_element_p.def_abstract_eval
def _abstract(*operands: Aval, fun: Any, levels: Any, out: Sequence[Array]) -> list[Aval]:
    return list(out)


def _batch(
    operands: Sequence[Array], axes: Any, *, fun: Any, levels: Any, out: Sequence[Aval]
) -> Any:
    """Maps one level, the innermost first, and runs the call when all levels are mapped."""
    level, *rest = levels
    indices, arrays = operands[1 : len(levels)], operands[len(levels) :]
    wanted = (*level.axes, *[None] * (len(arrays) - len(level.axes)))
    axes = zip(arrays, axes[len(levels) :], wanted, strict=True)
    moved = [_moved(level, x, has, want) for x, has, want in axes]
    out_axes = [*level.out_axes, *[None] * (len(out) - len(level.out_axes))]
    if not rest:
        return fun(*moved), out_axes
    out = tuple(
        x if i is None else x.update(shape=(*x.shape[:i], level.size, *x.shape[i:]))
        for x, i in zip(out, out_axes, strict=True)
    )
    return _element_p.bind(*indices, *moved, fun=fun, levels=tuple(rest), out=out), out_axes


def _moved(level: _Level, x: Array, has: int | None, wanted: int | None) -> Array:
    """Moves the mapped axis of an array to its position in the call."""
    if wanted is None:
        if has is None:
            return x
        raise value_error(
            f"{level.name}: the original takes one array for all elements here, and was given one for "
            "each. Give another function in its place (sub)"
        )
    if has is None:
        x, has = jnp.broadcast_to(x, (level.size, *x.shape)), 0
    return jnp.moveaxis(x, has, wanted)


def _differentiate(*_: Any, levels: Any, **__: Any) -> Any:
    raise value_error(
        f"{levels[0].name}: the original can't be differentiated within the function, under vmap"
    )


batching.primitive_batchers[_element_p] = _batch
ad.primitive_jvps[_element_p] = _differentiate
