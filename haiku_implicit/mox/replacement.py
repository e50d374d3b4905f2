"""What may be put in the place of a node, as a function of the node's arrays."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_implicit.mox import marks
from haiku_implicit.mox.interface import is_array
from haiku_implicit.mox.program import Program
from haiku_implicit.mox.tree import Equation, ModuleCall


class _Site(hk.Module):
    """Where a new function is: its modules and parameters have names below this one's."""

    def __call__(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)


marks.UNMARKED.add(_Site)


def function_for(node: Any, replacement: Any, path: str) -> Callable[..., list[Any]]:
    """The Haiku function that a replacement stands for.

    Args:
      node: the node that it replaces.
      replacement: a function of the node's arguments, a class or a factory of modules, a module
        expression, a transformed function, or None for what returns its argument.
      path: where its modules and parameters are.

    Returns:
      A function of the node's input arrays. It gives a list of arrays like those that the node defines.
    """
    structure, results = _structures(node)
    fun = _callable(node, replacement)

    def on_arrays(*arrays: Any) -> list[Any]:
        call = marks.Call(None, path, "", {}, structure, results)
        token = None
        if marks.active():
            token, arrays = marks.begin(call, arrays)
        args, kwargs = structure.merge(arrays)
        out = _Site(name=hk.force_name(path))(fun, *args, **kwargs)
        new = _checked(node, results, out)
        return marks.end(token, call, new) if marks.active() else new

    return on_arrays


def _structures(node: Any) -> tuple[marks.Tree, marks.Tree]:
    """The structures of a node's arguments `(args, kwargs)` and of its results."""
    if isinstance(node, ModuleCall) and node.call and node.call.results:
        return node.call.args, node.call.results
    if not isinstance(node, Equation):
        raise ValueError(
            f"where: {node!r} can't be replaced: choose calls of modules, or equations"
        )
    outputs: Any = [v.aval for v in node.outputs]
    if len(outputs) == 1:
        (outputs,) = outputs
    every: Any = ((tuple(node.inputs), {}), outputs)
    args, results = (marks.split(x, lambda leaf: True)[0] for x in every)
    return args, results


def _callable(node: Any, replacement: Any) -> Callable[..., Any]:
    """A replacement as a function of the node's arguments."""
    method = getattr(node, "method", "") or "__call__"
    if replacement is None:
        return _same
    if isinstance(replacement, Program):
        replacement = replacement.transformed()
    if isinstance(replacement, hk.Transformed | hk.TransformedWithState):
        return functools.partial(_lifted, replacement)
    if isinstance(replacement, type) and issubclass(replacement, hk.Module):
        config = _config_for(replacement, getattr(node, "config", {}))
        replacement = functools.partial(replacement, **config)
    if not callable(replacement):
        raise TypeError(
            "replacement: expected a function, a class or a factory of modules, a module expression, "
            f"a transformed function or None, got {type(replacement).__name__}"
        )
    if _is_factory(replacement, node):
        return lambda *args, **kwargs: getattr(replacement(), method)(*args, **kwargs)
    return replacement


def _same(*args: Any, **kwargs: Any) -> Any:
    """What comes in: the one argument, or all of them."""
    arrays = jax.tree.leaves((args, kwargs))
    return arrays[0] if len(arrays) == 1 else arrays


def _lifted(transformed: Any, *args: Any, **kwargs: Any) -> Any:
    """A transformed function as a part of another Haiku function."""
    parameters = list(inspect.signature(transformed.apply).parameters)
    key = hk.maybe_next_rng_key()
    if isinstance(transformed, hk.TransformedWithState):
        init, updater = hk.transparent_lift_with_state(transformed.init)
        params, state = init(key, *args, **kwargs)
        keys = [key] if parameters[2:3] != ["args"] and parameters[2:3] == ["rng"] else []
        out, state = transformed.apply(params, state, *keys, *args, **kwargs)
        updater.update(state)
        return out
    params = hk.transparent_lift(transformed.init)(key, *args, **kwargs)
    keys = [key] if parameters[1:2] == ["rng"] else []
    return transformed.apply(params, *keys, *args, **kwargs)


def _config_for(cls: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a module's constructor arguments, those that another class takes."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: x for name, x in config.items() if name in parameters and name != "name"}


def _is_factory(fun: Any, node: Any) -> bool:
    """Whether a function makes a module, rather than takes the node's arguments."""
    if isinstance(fun, functools.partial) and isinstance(fun.func, type):
        return issubclass(fun.func, hk.Module)
    structure, _ = _structures(node)
    args, kwargs = structure.merge([None] * structure.num_arrays)
    return not _takes(fun, args, kwargs) and _takes(fun, (), {})


def _takes(fun: Any, args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _checked(node: Any, results: marks.Tree, out: Any) -> list[Any]:
    """The arrays that a new function gave, which have to be as those of the node."""
    structure, arrays = marks.split(out, is_array)
    if structure.treedef != results.treedef or structure.num_arrays != results.num_arrays:
        raise ValueError(
            f"{node!r}: the replacement has to return {results.describe()}, and returned "
            f"{structure.describe()}"
        )
    return [
        _as(f"{node!r}: result {i}", v.aval, x)
        for i, (v, x) in enumerate(zip(node.outputs, arrays, strict=True))
    ]


def _as(what: str, aval: Any, x: Any) -> Any:
    x = jnp.asarray(x)
    if x.shape != aval.shape or x.dtype != aval.dtype:
        found = f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
        raise ValueError(f"{what} of the replacement has to be {aval.str_short()}, and is {found}")
    weak = jax.typeof(x).weak_type and not aval.weak_type
    return jax.lax.convert_element_type(x, aval.dtype) if weak else x
