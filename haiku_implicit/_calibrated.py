"""Quantization from a calibration batch: weights rounded for the inputs that they have in a model."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit import _params, _targets
from haiku_implicit._array import is_implicit
from haiku_implicit._targets import Targets
from haiku_implicit._transform import use_implicit_args
from haiku_implicit.arrays.observed import Observed
from haiku_implicit.arrays.quantized import QuantizedMatrix


def input_moments(
    apply: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    targets: Targets | None = None,
) -> dict[str, jax.Array]:
    """The second moments of what weights are multiplied by in a model.

    The model is run and differentiated as it is, wherever its weights are used: in scans, stacks of
    layers, checkpointed blocks. Its outputs have to depend on a weight by a path that has a gradient.

    Args:
      apply: the model, `apply(params, batch)`, with floating outputs of any structure.
      params: its parameters, with dense weights.
      batches: calibration data.
      targets: which parameters, as for `add_lora`. None: all dense weights.

    Returns:
      For each target that is multiplied as `x @ w` its path (`module/name`) and, for all inputs x
      `[n, k]` of all batches, the sum of xᵀx: `[k, k]` float32, or `[layers, k, k]` where layers are
      stacked.

    Raises:
      ValueError: for targets that match nothing, no batches, or outputs that are not floating.

    Example:
      >>> import haiku as hk, jax.numpy as jnp, haiku_implicit as hki
      >>> model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
      >>> params = {'linear': {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}}
      >>> print(hki.input_moments(model.apply, params, [jnp.array([[1.0, 2.0]])])['linear/w'])
      [[1. 2.]
       [2. 4.]]
    """
    looked_for = "a dense weight"
    default = _targets.takes_quantization(dict(group_size=None, axis=-2, dtype="int8")), looked_for
    shapes: dict[str, tuple[int, ...]] = {}

    def note(path: str, value: Any) -> Any:
        shapes[path] = tuple(value.shape)
        return value

    params = _params._replace(params, targets, default, note)

    def total(moments: dict[str, jax.Array], batch: Any) -> jax.Array:
        def observed(module_name: str, name: str, value: Any) -> Any:
            path = _targets.path(module_name, name)
            return Observed(value, moments[path]) if path in moments else value

        out = use_implicit_args(apply)(_params._map(observed, params), batch)
        floating = [
            y for y in jax.tree.leaves(out, is_leaf=is_implicit)
            if jnp.issubdtype(y.dtype, np.inexact)
        ]  # fmt: skip
        if not floating:
            raise ValueError("apply: expected floating outputs, got none")
        return sum((jnp.sum(y).astype(jnp.float32) for y in floating), jnp.zeros(()))

    zeros = {
        path: jnp.zeros((*shape[:-1], shape[-2]), jnp.float32) for path, shape in shapes.items()
    }
    step = jax.jit(jax.grad(total))
    sums = None
    for batch in batches:
        new = step(zeros, batch)
        sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
    if sums is None:
        raise ValueError("batches: expected at least one, got none")
    return {path: x for path, x in sums.items() if bool((x != 0).any())}


def quantize_with_inputs(
    params: Any,
    moments: dict[str, jax.Array],
    *,
    dtype: str = "int4",
    group_size: Any = None,
    zero_point: bool = False,
    calibration: str | None = "mse",
    scale_dtype: Any = None,
) -> Any:
    """Quantizes weights by GPTQ, for the least error of their products (arXiv:2210.17323).

    Args:
      params: parameters with dense weights.
      moments: what `input_moments` says of some of them: these are quantized.
      dtype, group_size, zero_point, calibration, scale_dtype: as for `QuantizedMatrix.quantize`. With
        'mse' the search for scales weighs errors by the inputs as well.

    Returns:
      The parameters with `QuantizedMatrix` in place of these weights, grouped along their axis -2.

    Raises:
      ValueError: for a path that `params` have no dense weight at, or options that do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w, x = jax.random.normal(jax.random.key(0), (2, 64, 64)) @ jnp.diag(jnp.arange(64.0))
      >>> errors = [
      ...     float(jnp.linalg.norm(x @ (hki.materialize(new['linear']['w']) - w)))
      ...     for new in (
      ...         hki.quantize_with_inputs({'linear': {'w': w}}, {'linear/w': x.T @ x}),
      ...         hki.quantize_params({'linear': {'w': w}}, dtype='int4', calibration='mse'),
      ...     )]
      >>> errors[0] < 0.8 * errors[1]
      True
    """
    found: set[str] = set()

    def quantized(module_name: str, name: str, value: Any) -> Any:
        path = _targets.path(module_name, name)
        if path not in moments:
            return value
        found.add(path)
        if is_implicit(value) or value.shape[-2] != moments[path].shape[-1]:
            raise ValueError(
                f"{path}: expected a dense weight [..., {moments[path].shape[-1]}, m] for these "
                f"moments, got {_targets.describe(value)}"
            )
        try:
            return QuantizedMatrix.quantize(
                value, dtype, group_size, zero_point=zero_point, calibration=calibration,
                scale_dtype=scale_dtype, moments=moments[path],
            )  # fmt: skip
        except (TypeError, ValueError) as e:
            raise type(e)(f"{path} ({_targets.describe(value)}): {e}") from e

    new = _params._map(quantized, params)
    if missing := sorted(moments.keys() - found):
        raise ValueError(f"moments: the parameters have no {', '.join(missing)}")
    return new
