"""optax's optimizers with a quantized state."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from jax.extend.core import Literal

from haiku_implicit.core.array import flatten
from haiku_implicit.core.containers import opened
from haiku_implicit.core.interpreter import materialize_array
from haiku_implicit.core.messages import value_error
from haiku_implicit.core.serialization import register_tree_type
from haiku_implicit.core.typing import Array, DType, Params, State, Tree
from haiku_implicit.quantized.numbers.options import is_positive_integer
from haiku_implicit.quantized.types.quantized_blocks import QuantizedBlocks


class QuantizedState(NamedTuple):
    """The state of an optimizer that `quantized_state` returns.

    Attributes:
      inner: the state of the wrapped optimizer, with large arrays quantized.
    """

    inner: State


register_tree_type(QuantizedState)
export.register_namedtuple_serialization(
    QuantizedState, serialized_name=f"{__name__}.{QuantizedState.__name__}"
)


def quantized_state(
    optimizer: optax.GradientTransformation,
    dtype: DType = "int8",
    block: int = 256,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to quantize its moments between steps.

    The state is quantized in blocks, after Dettmers et al. 2021 (arXiv:2110.02861). Instead of their
    table of 8-bit values, first moments are linear here. Second moments (blocks without a negative
    number) are stored as their roots, which have the same dynamic range: see `QuantizedBlocks`.

    Arrays of the state that start from the values of the parameters (the sequence `z` of a
    schedule-free optimizer, the start `x0` of others) are not moments and are not quantized: their
    steps are finer than the rounding would be. Arrays smaller than their parameter (the row and column
    means of Adafactor) are not quantized either: they are few bytes, and each number affects a whole
    row.

    An optimizer that subtracts two moments, as RMSProp with `centered=True` does for the variance, may
    get a negative difference of the rounded moments, and its root is NaN.

    Args:
      optimizer: any optax optimizer.
      dtype: the format: 'int8', 'fp8_e4m3', 'int4', or another symmetric one.
      block: the number of elements that share a scale; they fill whole bytes.
      min_size: smaller arrays are not quantized (biases and norms: few bytes, and they matter).

    Returns:
      An optimizer of the same parameters. Floating arrays in its state are `QuantizedBlocks`, even
      within implicit parameters (like the `value` of `TrainedQuantized`).

    Raises:
      ValueError: for a format that is unknown or has an offset, a block or size below one, or a
        block that does not fill bytes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, haiku_implicit as hki
      >>> params = {'w': jnp.ones((256, 256))}
      >>> optimizer = hki.quantized_state(optax.adam(1e-3), 'int8', block=256)
      >>> state = optimizer.init(params)
      >>> sum(x.nbytes for x in jax.tree.leaves(state)) / (2 * params['w'].nbytes) < 0.26
      True
      >>> updates, state = optimizer.update({'w': jnp.ones((256, 256))}, state, params)
      >>> round(float(updates['w'][0, 0]), 6)
      -0.001
    """
    for name, value in (("block", block), ("min_size", min_size)):
        if not is_positive_integer(value):
            raise value_error(f"{name}: expected a positive number, got {value!r}")
    # An error now, not at the first step.
    jax.eval_shape(lambda x: QuantizedBlocks.quantize(x, dtype, block), jnp.zeros(block))
    inner = optax.with_extra_args_support(optimizer)

    def quantized(x: Array) -> Array:
        floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        if not floating or x.size < min_size:
            return x
        return QuantizedBlocks.quantize(x, dtype, block)

    def as_before(old: Array, new: Array) -> Array:
        return quantized(new) if _is_blocks(old) else new

    def init(params: Params) -> QuantizedState:
        state = inner.init(params)
        leaves, treedef = flatten(state)
        kept = map(operator.or_, _are_of_params(inner.init, params), _are_smaller(state, params))
        pairs = zip(leaves, kept, strict=True)
        return QuantizedState(treedef.unflatten([x if keep else quantized(x) for x, keep in pairs]))

    def update(
        updates: Tree, state: QuantizedState, params: Params = None, **extra: Any
    ) -> tuple[Any, QuantizedState]:
        stored = opened(state.inner)
        dense = jax.tree.map(_dense, stored, is_leaf=_is_blocks)
        new, dense = inner.update(updates, dense, params, **extra)
        kept = jax.tree.map(as_before, stored, opened(dense), is_leaf=_is_blocks)
        return new, QuantizedState(kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_blocks(x: Array) -> bool:
    return isinstance(x, QuantizedBlocks)


def _dense(x: Array) -> Array:
    return materialize_array(x) if _is_blocks(x) else x


def _are_smaller(state: State, params: Params) -> list[bool]:
    """For each leaf of a state, whether it is smaller than its parameter.

    The path of its parameter is the longest parameter path within its own path. (Paths in lists and
    tuples, which states are too, may be ambiguous: then it has to be smaller than all candidates.)
    """
    sizes = {path: np.size(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}

    def size_of_param(path: tuple[Any, ...]) -> int:
        ends = range(len(path) + 1)
        found = sizes.keys() & {path[i:j] for i in ends for j in ends[i:]}
        longest = max(map(len, found), default=0)
        return min((sizes[part] for part in found if len(part) == longest), default=0)

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [np.size(x) < size_of_param(path) for path, x in leaves]


def _are_of_params(init: Callable[[Any], Any], params: Params) -> list[bool]:
    """For each leaf of the initial state, whether it is computed from the values of the parameters.

    Moments start from zeros, and so depend only on the shapes.
    """
    jaxpr = jax.make_jaxpr(init)(params).jaxpr
    found = set(jaxpr.invars)

    def is_found(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in found

    for eqn in jaxpr.eqns:
        if any(map(is_found, eqn.invars)):
            found.update(eqn.outvars)
    return [is_found(v) for v in jaxpr.outvars]
