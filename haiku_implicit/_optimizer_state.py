"""Optimizers of optax whose state is held in few bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_implicit._array import is_implicit
from haiku_implicit._interpreter import materialize_array
from haiku_implicit.arrays.quantized_blocks import QuantizedBlocks

# What optax calls the moving averages, or sums, of squares: Adam and its kin, RMSProp, Adagrad,
# Adafactor.
SECOND_MOMENTS = frozenset({"nu", "nu_max", "sum_of_squares", "v", "v_row", "v_col"})


class QuantizedState(NamedTuple):
    """The state of an optimizer.

    Attributes:
      inner: that of the optimizer itself, large arrays in it quantized.
    """

    inner: Any


def quantized_state(
    optimizer: optax.GradientTransformation,
    dtype: Any = "int8",
    block: int = 256,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that keeps its moments in few bits between steps.

    Blockwise quantization of optimizer states is that of Dettmers et al. 2021 (arXiv:2110.02861); in
    place of their table of 8-bit values, first moments are linear here, and second moments are held
    as their roots (see `QuantizedBlocks`), which have the same dynamic range.

    Args:
      optimizer: any optax optimizer.
      dtype: the format: 'int8', 'fp8_e4m3', 'int4', or another symmetric one.
      block: how many elements share a scale.
      min_size: smaller arrays stay as they are (biases and norms: few bytes, and they matter).

    Returns:
      An optimizer of the same parameters; floating arrays in its state are `QuantizedBlocks`.

    Raises:
      ValueError: for a format that is unknown or has an offset, or a block or size below one.

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
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}: expected a positive number, got {value!r}")
    QuantizedBlocks.quantize(jnp.zeros(block), dtype, block)  # an error now, not at the first step
    inner = optax.with_extra_args_support(optimizer)

    def quantized(path: Any, x: Any) -> Any:
        floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        if is_implicit(x) or not floating or x.size < min_size:
            return x
        return QuantizedBlocks.quantize(x, dtype, block, squared=_is_second_moment(path))

    def init(params: Any) -> QuantizedState:
        state = inner.init(params)
        return QuantizedState(
            jax.tree_util.tree_map_with_path(quantized, state, is_leaf=is_implicit)
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        dense = jax.tree.map(_dense, state.inner, is_leaf=is_implicit)
        new, dense = inner.update(updates, dense, params, **extra)
        own = jax.tree_util.tree_map_with_path(quantized, dense, is_leaf=is_implicit)
        return new, QuantizedState(own)

    return optax.GradientTransformationExtraArgs(init, update)


def _dense(x: Any) -> Any:
    return materialize_array(x) if isinstance(x, QuantizedBlocks) else x


def _is_second_moment(path: Any) -> bool:
    return any(getattr(key, "name", None) in SECOND_MOMENTS for key in path)
