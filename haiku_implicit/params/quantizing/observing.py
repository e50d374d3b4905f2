"""Statistics of the inputs of a model's weights, from its gradients."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import progress
from haiku_implicit.core.messages import check_function, type_error, value_error
from haiku_implicit.core.transform import tree_leaves_with_implicit, use_implicit_args
from haiku_implicit.core.typing import Array, Params
from haiku_implicit.params.trees import trees
from haiku_implicit.params.trees.matrix_axes import MatrixAxesOf, open_matrix
from haiku_implicit.quantized.types import observed
from haiku_implicit.quantized.types.observed import Observed, Statistic

# The statistics by which methods quantize, and how two batches' are joined.
_STATISTICS: dict[str, tuple[Statistic, Callable[..., jax.Array]]] = {
    "moments": (observed.MOMENTS, jnp.add),
    "maxima": (observed.MAXIMA, jnp.maximum),
}


class Model(NamedTuple):
    """A model `apply(params, *batch)` with dense weights, and the axes of some as matrices."""

    apply: Callable[..., Any]
    params: Params
    matrix_axes: MatrixAxesOf | None = None

    def weights(self, paths: Collection[str]) -> dict[str, trees.Parameter]:
        """The parameters of these paths, with the matrices as values."""
        own = [p for p in trees.parameters_of(self.params) if p.path in paths]
        opened = [open_matrix(p.path, p.value, self.matrix_axes) for p in own]
        return {
            p.path: p._replace(value=o.matrix, is_matrix=o.axes is not None)
            for p, o in zip(own, opened, strict=True)
        }

    def zeros(self, statistics: Mapping[str, Statistic]) -> dict[str, jax.Array]:
        """The sums of the statistics of weights, by path, before the first batch."""
        shapes = {path: p.value.shape for path, p in self.weights(statistics).items()}
        return {
            path: jnp.zeros((*shape[:-2], *statistics[path].shape(shape[-2])), jnp.float32)
            for path, shape in shapes.items()
        }

    def total(
        self,
        statistics: Mapping[str, Statistic],
        sums: Mapping[str, jax.Array],
        others: Mapping[str, Array],
        batch: tuple[Any, ...],
    ) -> jax.Array:
        """A scalar of which the gradient with respect to `sums` is the statistics.

        Args:
          statistics: the statistic of each observed weight, by path.
          sums: `zeros(statistics)`.
          others: matrices that take the place of those in the parameters, by path.
          batch: the arguments of the model.
        """

        def made(parameter: trees.Parameter) -> Array:
            path = parameter.path
            value = others.get(path, parameter.value)
            return Observed(value, sums[path], statistics[path]) if path in sums else value

        params = trees.map_parameters(trees.on_matrix(made, self.matrix_axes), self.params)
        return _total(use_implicit_args(self.apply)(params, *batch))


def check_batches(argument: str, batches: Any) -> None:
    """Raises for one batch in place of several: each row of it, or key, would count as a batch."""
    is_array = isinstance(batches, jax.Array | np.ndarray)
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if is_array or isinstance(batches, Mapping) or not iterable:
        got = f"an array {list(batches.shape)}" if is_array else f"a {type(batches).__name__}"
        raise type_error(
            f"{argument}: expected batches, got {got}. Give [x] for one batch, and list(x) for a stack "
            "of batches"
        )


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """The arguments of a model for a batch: those of a tuple or a list, or the batch alone."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def inputs_of(
    needed: str, model: Model, batches: Iterable[Any], paths: Collection[str]
) -> dict[str, jax.Array]:
    """A statistic of the inputs of each weight that has inputs, joined over the batches."""
    check_function("apply", model.apply)
    check_batches("batches", batches)
    statistic, join = _STATISTICS[needed]
    statistics = dict.fromkeys(paths, statistic)
    zeros = model.zeros(statistics)

    # (Parameters are an argument: constants of a program are compiled with it.)
    @jax.jit
    def step(params: Params, zeros: Any, batch: tuple[Any, ...]) -> dict[str, jax.Array]:
        total = functools.partial(model._replace(params=params).total, statistics)
        return jax.tree.map(statistic.read, jax.grad(total)(zeros, {}, batch))

    found = None
    with progress.bar("calibration batches", operator.length_hint(batches) or None) as run:
        for batch in batches:
            new = run("", step, model.params, zeros, arguments_of(batch))
            found = new if found is None else jax.tree.map(join, found, new)
    if found is None:
        raise value_error("batches: expected at least one, got none")
    return {path: x for path, x in found.items() if bool((x != 0).any())}


def _total(outputs: Any) -> jax.Array:
    """The sum of all floating outputs, as a scalar to differentiate."""
    leaves = tree_leaves_with_implicit(outputs)
    floating = [y for y in leaves if jnp.issubdtype(y.dtype, np.inexact)]
    if not floating:
        raise value_error("apply: expected floating outputs, got none")
    return sum((jnp.sum(y).astype(jnp.float32) for y in floating), jnp.float32(0))
