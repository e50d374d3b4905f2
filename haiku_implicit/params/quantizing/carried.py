"""Quantization of one weight after another: later ones make up for the errors of earlier ones."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import progress
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.typing import Array
from haiku_implicit.params.quantizing.observing import Model
from haiku_implicit.params.quantizing.programs import Program, Values
from haiku_implicit.params.trees import trees
from haiku_implicit.quantized.numbers import gptq
from haiku_implicit.quantized.types.observed import Statistic

# A function of a weight, or a matrix of a stack, and the moments of its inputs that quantizes it.
Quantize = Callable[[trees.Parameter, jax.Array], Array]
# Weights with the same inputs, and the index of the matrix in stacks of them.
Stage = tuple[list[str], tuple[int, ...]]

STRENGTH = 0.5
_TWINS = "twins"  # the axis of two models: the dense one, and the one that is quantized so far


def quantized_in_order(
    quantize: Quantize,
    model: Model,
    batches: Sequence[tuple[Any, ...]],
    inputs: Mapping[str, jax.Array],
) -> dict[str, Array]:
    """Quantizes weights in the order of their use, each for the inputs that the earlier ones give.

    Args:
      quantize: quantizes a weight, or a matrix of a stack, by the moments of its inputs.
      model: the model with dense weights.
      batches: the arguments of the model.
      inputs: the moments of the inputs in the dense model, of the weights to quantize.

    Returns:
      The quantized matrices, by path.
    """
    weights = model.weights(inputs)
    found: dict[str, list[Array]] = {path: [] for path in weights}
    twins = _Twins(model, {path: p.value for path, p in weights.items()}, batches)
    stages = twins.stages()
    with progress.bar("weights in order", len(stages)) as run:
        for i, (paths, index) in enumerate(stages):
            later = {path for own, _ in stages[i + 1 :] for path in own}
            seen = run(", ".join(paths), twins.seen, paths, later)
            for path in paths:
                error, moments = seen[path][(slice(None), *index)]
                w = _corrected(weights[path].value[index], error, moments, STRENGTH)
                found[path].append(quantize(weights[path]._replace(value=w), moments))
                twins.change(path, index, materialize_array(found[path][-1]))
    return {path: _stacked(found[path], p.value.shape[:-2]) for path, p in weights.items()}


class _Twins:
    """A dense model and the same model with the weights that are quantized so far.

    Each part of the models runs once, when the weights before it are quantized.
    """

    def __init__(
        self, model: Model, dense: Mapping[str, Array], batches: Sequence[tuple[Any, ...]]
    ) -> None:
        self.dense, self.now = dense, {path: jnp.asarray(w) for path, w in dense.items()}
        self.paths = sorted(dense)  # as the leaves of a dictionary
        self.used: list[str] = []  # by each use, the last one first: so differentiation goes

        def noted(path: str, x: jax.Array, own: jax.Array) -> jax.Array:
            self.used.append(path)
            return x.T @ own

        statistics = {path: _BESIDE._replace(of=functools.partial(noted, path)) for path in dense}
        one = functools.partial(model.total, statistics)
        twins = jax.vmap(one, in_axes=(0, 0, None), axis_name=_TWINS, axis_size=2)

        def seen(now: dict[str, Array], batch: tuple[Any, ...]) -> dict[str, jax.Array]:
            zeros = {path: jnp.stack([x, x]) for path, x in model.zeros(statistics).items()}
            both = {path: jnp.stack([dense[path], w]) for path, w in now.items()}
            return jax.grad(lambda sums: twins(sums, both, batch).sum())(zeros)

        self.runs: list[tuple[Program, list[Values]]] = []
        for _, alike in itertools.groupby(batches, _kind):
            own = list(alike)
            program = Program(seen, self.now, own[0])
            args = [jax.tree.leaves((self.now, batch)) for batch in own]
            values = [program.start | dict(zip(program.inputs, x, strict=True)) for x in args]
            self.runs.append((program, values))

    def stages(self) -> list[Stage]:
        """The weights in their order; stacks of the same layers one layer after another."""
        program, _ = self.runs[0]
        of_weights = (1 << len(self.paths)) - 1
        causes = {
            path: program.causes[number] & of_weights
            for path, number in zip(self.paths, program.outputs, strict=True)
        }
        if unused := sorted(set(self.paths) - set(self.used)):
            raise value_error(
                f"carry: the model does not use as x @ w, as it did in inputs: {', '.join(unused)}"
            )

        sources = dict(zip(self.paths, map(program.source, program.outputs), strict=True))

        def alike(path: str) -> tuple[int, tuple[int, ...], int | None]:
            """The causes, the stacked axes, and the loop, of which the weight is a cause of its own."""
            is_own = causes[path] >> self.paths.index(path) & 1
            return causes[path], self.dense[path].shape[:-2], sources[path] if is_own else None

        found: list[Stage] = []
        order = dict.fromkeys(reversed(self.used))  # of the first uses
        for (_, lead, loop), own in itertools.groupby(order, alike):
            paths = list(own)
            groups = [paths] if loop is None else [[path] for path in paths]
            found += [(group, index) for index in np.ndindex(lead) for group in groups]
        return found

    def seen(self, paths: Sequence[str], later: Collection[str]) -> dict[str, jax.Array]:
        """`_BESIDE` of both models, `[2, ..., k, k]`, by path."""
        totals = []
        for program, values in self.runs:
            numbers = dict(zip(self.paths, program.outputs, strict=True))
            each = program.advance(values, [numbers[p] for p in paths], [numbers[p] for p in later])
            totals += [dict(zip(paths, x, strict=True)) for x in each]
        return functools.reduce(functools.partial(jax.tree.map, operator.add), totals)

    def change(self, path: str, index: tuple[int, ...], w: Array) -> None:
        """Gives the second model a quantized weight, or a matrix of a stack."""
        self.now[path] = self.now[path].at[index].set(w)
        for program, each in self.runs:
            for values in each:
                program.change(values, self.paths.index(path), self.now[path])


def _kind(batch: Any) -> Any:
    shapes = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(batch)]
    return jax.tree.structure(batch), shapes


def _both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inputs X̃ of the quantized model, and in this one X̃, in the dense one X − X̃."""
    dense, quantized = jax.lax.all_gather(x, _TWINS)
    is_dense = jax.lax.axis_index(_TWINS) == 0
    return quantized, jnp.where(is_dense, dense - quantized, quantized)


# `X̃ᵀ(X − X̃)` in the dense model, `X̃ᵀX̃` in the quantized one.
_BESIDE = Statistic(lambda n: (n, n), jnp.matmul, lambda sums: sums, _both)


@jax.jit
def _corrected(w: jax.Array, error: jax.Array, moments: jax.Array, strength: float) -> jax.Array:
    """`w` plus the least-squares solution of `X̃ δ = (X − X̃) w`, times the strength.

    Arai & Ichikawa 2025, arXiv:2504.09629.
    """
    wide = w.astype(moments.dtype)
    scale = jnp.trace(moments) / len(moments)
    error = error @ wide / jnp.where(scale > 0, scale, 1)
    made_up = jax.scipy.linalg.solve(gptq.damped(moments), error, assume_a="pos")
    return (wide + strength * made_up).astype(w.dtype)


def _stacked(matrices: Sequence[Array], lead: tuple[int, ...]) -> Array:
    """A stack of quantized matrices, with the axes `lead`."""
    if not lead:
        return matrices[0]
    return jax.tree.map(lambda *x: jnp.stack(x).reshape(*lead, *x[0].shape), *matrices)
