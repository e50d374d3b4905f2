"""Computations on parameters alone, made once: their results become the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Params
from haiku_implicit.params.quantizing.programs import Program, evaluated, numbers_of
from haiku_implicit.params.trees import trees

R = TypeVar("R")

# Primitives that only move or cast numbers: a model runs them on parameters as before.
_MOVES = frozenset(
    "broadcast_in_dim concatenate convert_element_type copy dynamic_slice expand_dims gather iota pad "
    "reshape rev select_n slice split squeeze stop_gradient transpose".split()
)


def fold_parameters(
    apply: Callable[..., R], params: Params, *args: Any
) -> tuple[Callable[..., R], dict[str, dict[str, jax.Array]]]:
    """Computes what a model computes of its parameters alone, such as standardized weights, once.

    The new parameters can be quantized: then the standardized weight is what is rounded, and the model
    uses it as it is stored. They are for inference: training them trains another model.

    Args:
      apply: the model, `apply(params, *args)`.
      params: its parameters, dense.
      *args: arguments like those it will get, or their structs. (Give flags by `functools.partial`.)

    Returns:
      The new `apply(params, *args)`, for arguments of any shapes, and its parameters. Results of
      computations on parameters replace these, as `module/name_folded`, unless they are larger or only
      move or cast numbers. A parameter that is also used as it is stays beside. What loops (scans of
      stacked layers) compute stays in the loops.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> def apply(params, x):
      ...     w = params['linear']['w']
      ...     return x @ ((w - w.mean(0)) / w.std(0)) + params['linear']['b']
      >>> params = {'linear': {'w': jax.random.normal(jax.random.key(0), (8, 4)), 'b': jnp.ones(4)}}
      >>> folded, new = hki.fold_parameters(apply, params, jnp.ones((1, 8)))
      >>> jax.tree.map(jnp.shape, new)
      {'linear': {'b': (4,), 'w_folded': (8, 4)}}
      >>> small = hki.quantize_params(new, dtype='int8')
      >>> x = jnp.ones((3, 8))
      >>> bool(jnp.allclose(folded(small, x), apply(params, x), atol=0.05))
      True
    """
    structs = jax.eval_shape(lambda: params)
    parts = _split(apply, structs, args)
    leaves = jax.tree.leaves(params)
    values = parts.program.start | dict(zip(parts.program.inputs, leaves, strict=False))
    kept = list(parts.names)
    found = jax.jit(lambda values: evaluated(parts.early, values, kept))(values)
    new: dict[str, dict[str, Any]] = {}
    for number, value in zip(kept, found, strict=True):
        module, name = parts.names[number]
        new.setdefault(module, {})[name] = value

    @use_implicit_args
    def folded(params: Params, *args: Any) -> Any:
        return _late(apply, structs, params, args)

    return folded, new


class _Parts(NamedTuple):
    """A program in two parts, before and after the arguments are known.

    Attributes:
      program: the program.
      early, late: the steps of the parts.
      names: the module and name of each value that the second part takes from parameters, by number.
    """

    program: Program
    early: list[Any]
    late: list[Any]
    names: dict[int, tuple[str, str]]


def _late(apply: Callable[..., Any], structs: Params, params: Params, args: tuple[Any, ...]) -> Any:
    """The outputs of the model, from the values that the second part takes."""
    parts = _split(apply, structs, args)
    values = dict(parts.program.start)
    values.update((number, params[m][n]) for number, (m, n) in parts.names.items())
    given = jax.tree.leaves(args)
    values.update(zip(parts.program.inputs[-len(given) :] if given else [], given, strict=True))
    outputs = evaluated(parts.late, values, parts.program.outputs)
    return jax.tree.unflatten(parts.program.treedef, outputs)


def _split(apply: Callable[..., Any], structs: Params, args: tuple[Any, ...]) -> _Parts:
    program = Program(apply, structs, *args)
    parameters = trees.parameters_of(structs)
    mask = (1 << len(parameters)) - 1
    sizes = [math.prod(p.value.shape) for p in parameters]

    def is_worth(step: Any) -> bool:
        """Whether a step reads parameters alone, and its results are not larger than they are."""
        causes = program.causes[step.results[0]]
        room = sum(size for i, size in enumerate(sizes) if causes >> i & 1)
        size = sum(math.prod(var.aval.shape) for var in step.eqn.outvars)
        return step.eqn.primitive.name not in _MOVES and 0 < size <= room

    wanted, late = set(program.outputs), []  # `wanted`: numbers that the second part uses
    for step in reversed(program.steps):
        if wanted.isdisjoint(step.results) and not step.eqn.effects:
            continue
        causes = 0 if step.eqn.effects else program.causes[step.results[0]]
        if causes == 0 or causes & ~mask or not is_worth(step):
            late.append(step)
            wanted.update(numbers_of(step))
    done = {number for step in late for number in step.results}
    names = _names(program, parameters, sizes, wanted - done - set(program.start))
    early, _ = program.needed(names, {*program.inputs, *program.start})
    return _Parts(program, early, late[::-1], names)


def _names(
    program: Program, parameters: trees.Parameters, sizes: list[int], numbers: set[int]
) -> dict[int, tuple[str, str]]:
    """The module and name of each of these values, after the largest parameter behind it."""
    inputs = {number: i for i, number in enumerate(program.inputs)}
    names: dict[int, tuple[str, str]] = {}
    for number in sorted(numbers):
        if inputs.get(number, 0) >= len(parameters):
            continue  # an argument
        causes = program.causes[number]
        own = max((i for i in range(len(sizes)) if causes >> i & 1), key=sizes.__getitem__)
        module, name = parameters[own].module_name, parameters[own].name
        if number not in inputs:
            name += "_folded"
            same = sum(m == module and n.startswith(name) for m, n in names.values())
            name += f"_{same}" if same else ""
        names[number] = module, name
    return names
