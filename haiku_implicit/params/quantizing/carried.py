"""Quantization of one weight after another: later ones make up for the errors of earlier ones."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import progress
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.typing import Array
from haiku_implicit.params.quantizing.observing import Model, order_of_use
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
    now: dict[str, Array] = {}  # dense, with what is quantized so far rounded
    stages = list(_stages(order_of_use(model, batches[0], inputs), inputs))
    with progress.bar("weights in order", len(stages)) as run:
        for paths, index in stages:
            seen = run(", ".join(paths), _seen_beside, model, batches, now, paths)
            for path in paths:
                error, moments = seen[path][(slice(None), *index)]
                w = _corrected(weights[path].value[index], error, moments, STRENGTH)
                found[path].append(quantize(weights[path]._replace(value=w), moments))
                new = materialize_array(found[path][-1])
                now[path] = jnp.asarray(now.get(path, weights[path].value)).at[index].set(new)
    return {path: _stacked(found[path], p.value.shape[:-2]) for path, p in weights.items()}


def _stages(order: Sequence[str], inputs: Mapping[str, jax.Array]) -> Iterator[Stage]:
    """The weights in their order; stacks of the same layers one layer after another."""

    def layers(path: str) -> tuple[Any, ...]:
        lead = inputs[path].shape[:-2]
        return lead, path.partition("__layer_stack")[0] if lead else ""

    for (lead, _), own in itertools.groupby(order, layers):
        groups: list[list[str]] = []
        for path in own:
            if groups and np.array_equal(inputs[groups[-1][0]], inputs[path]):
                groups[-1].append(path)
            else:
                groups.append([path])
        yield from ((group, index) for index in np.ndindex(lead) for group in groups)


def _both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inputs X̃ of the quantized model, and in this one X̃, in the dense one X − X̃."""
    dense, quantized = jax.lax.all_gather(x, _TWINS)
    is_dense = jax.lax.axis_index(_TWINS) == 0
    return quantized, jnp.where(is_dense, dense - quantized, quantized)


# `X̃ᵀ(X − X̃)` in the dense model, `X̃ᵀX̃` in the quantized one.
_BESIDE = Statistic(lambda n: (n, n), lambda x, own: x.T @ own, lambda sums: sums, _both)


def _seen_beside(
    model: Model,
    batches: Sequence[tuple[Any, ...]],
    now: Mapping[str, Array],
    paths: Collection[str],
) -> dict[str, jax.Array]:
    """`_BESIDE` of both models, `[2, ..., k, k]`, by path; `now` has weights of the second one."""
    dense = model.weights(now)
    both = {path: jnp.stack([dense[path].value, w]) for path, w in now.items()}
    statistics = dict.fromkeys(paths, _BESIDE)
    one = functools.partial(model.total, statistics)
    twins = jax.vmap(one, in_axes=(0, 0, None), axis_name=_TWINS, axis_size=2)
    step = jax.jit(jax.grad(lambda *args: twins(*args).sum()))
    zeros = {path: jnp.stack([x, x]) for path, x in model.zeros(statistics).items()}
    each = (step(zeros, both, batch) for batch in batches)
    return functools.reduce(functools.partial(jax.tree.map, operator.add), each)


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
