"""Statistics of activations, the source of static scales.

A product is deep within a model: in a scan, a checkpointed block, a stack of layers. The limits of its
activation leave the model as a gradient: the weight carries the statistics as arrays, and the gradient
with respect to these is the update to add to them. JAX sums the gradients of loops and of shared
weights. `haiku_implicit.with_quant_stats` reads the sum.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import serialization
from haiku_implicit.core.messages import see, value_error
from haiku_implicit.core.typing import Array
from haiku_implicit.quantized.numbers import ranges
from haiku_implicit.quantized.numbers.options import OperandConfig
from haiku_implicit.quantized.numbers.ranges import Limits, ScaledAxes

_WAY_OUT = (
    "wrap the model in with_quant_stats after transform_implicit, and hand on the state that it "
    "returns, or give stats= to the function. (Within hki.value_and_grad, hki.grad and "
    "hki.use_implicit_args parameters are ordinary arrays, without statistics: use jax.value_and_grad "
    "with respect to the first half that hki.partition returns, and hki.combine both in the loss)"
)


class Shapes:
    """The shapes of statistics, noted while a function is traced.

    Attributes:
      found: from the name of each weight to the shapes of its limits, by the limits' names.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, tuple[int, ...]]] = {}

    def note(self, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        known = self.found.setdefault(name, shapes)
        if known != shapes:
            raise _mismatch(name, known, shapes, "another product with the same weight has")


_STATIC = {"static": True}  # for `register_dataclass`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantStats:
    """Statistics of the activations that a weight is multiplied with.

    The limits of a range are 'absmax', or 'min' and 'max': found by the rule's calibration of
    activations, and averaged over its `act_batch_axes`. The scale comes from the limits' average.

    Attributes:
      sums: for each limit its sum over all products, float32 `[*batch, *limit]`: `batch` are the batch
        axes of the weight (stacked layers), `limit` the axes of the activation, of length one except
        axes of the activation that have scales and are not averaged over. None: without statistics.
      count: float32 `[*batch]`, the number of products.
      name: the weight's name, for errors.
      mode: 'update': the range is the average including this product, and the gradients with respect
        to `sums` and `count` are its additions to them; 'read': the average, or the activation's own
        range if `count` is zero; 'fixed': `sums` are the limits themselves.
      shapes: records the limits' shapes, in a call that finds them out.

    Example:
      >>> import jax.numpy as jnp
      >>> from haiku_implicit.quantization import QtRule, QuantStats, dot_general
      >>> rule = QtRule(weight_qtype='int8', act_qtype='int8', act_static_scale=True)
      >>> stats = QuantStats({'absmax': jnp.array([[1.0]])}, jnp.array(1.0), mode='read')
      >>> x, w, numbers = jnp.array([[2.0, 0.5]]), jnp.eye(2), (((1,), (0,)), ((), ()))
      >>> print(dot_general(x, w, numbers, rule=rule, stats=stats).round(1))  # 2.0 is beyond the range
      [[1.  0.5]]
    """

    sums: dict[str, Any] | None = None
    count: Array = None
    name: str = dataclasses.field(default="", metadata=_STATIC)
    mode: Literal["update", "read", "fixed"] = dataclasses.field(default="read", metadata=_STATIC)
    shapes: Shapes | None = dataclasses.field(default=None, metadata=_STATIC)

    def spread(self, batch: tuple[int, ...]) -> "QuantStats":
        """Repeats the first of the statistics, for a weight with other batch axes."""
        if self.sums is None or np.shape(self.count) == batch:
            return self
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *np.shape(x))), self.first())

    def first(self) -> "QuantStats":
        """Returns the statistics of the first matrix of a batch (a kernel is a batch of matrices)."""
        at = (0,) * np.ndim(self.count)
        return jax.tree.map(lambda x: x[at], self)


serialization.register_node(
    QuantStats,
    fields=lambda: (("sums", "count"), ("name", "mode", "shapes")),
    build=lambda static, children: QuantStats(*children, *static),
)


def static_limits(
    x: jax.Array, config: OperandConfig, axes: ScaledAxes, stats: QuantStats | None
) -> tuple[Limits, Callable[[jax.Array], jax.Array]]:
    """Returns the static range of an activation, and a function that adds the gradients of statistics.

    Args:
      x: the activation.
      config: how it is quantized; its limits are averaged over `static_axes`.
      axes: the axes along which scales differ.
      stats: the statistics of the activation.

    Returns:
      The range, and a function for the result of the product: the identity, except for gradients with
      respect to the statistics.

    Raises:
      ValueError: for missing statistics, statistics of other shapes, or axes that `x` does not have.
    """
    if stats is None or (stats.sums is None and stats.shapes is None):
        of = f" of {stats.name!r}" if stats is not None and stats.name else ""
        raise ValueError(
            f"act_static_scale: there are no statistics{of} in quant_stats; {_WAY_OUT}"
            f" {see('ordinary-arrays-inside')}"
        )
    limits_of = functools.partial(_limits_of, config=config, axes=axes)
    if stats.mode == "fixed":
        known = _checked(stats, jax.eval_shape(limits_of, x))
        return _as_range(known.sums), _unchanged
    limits = limits_of(x)
    if stats.shapes is not None:
        stats.shapes.note(stats.name, _shapes(limits))
        return _as_range(limits), _unchanged
    known = _checked(stats, limits)
    finite = jnp.stack([jnp.isfinite(y).all() for y in limits.values()]).all()
    count = finite.astype(jnp.float32)
    added = {name: jnp.where(finite, y, 0) for name, y in limits.items()}, count
    sums: Array
    sums, total = jax.lax.stop_gradient((known.sums, known.count))
    if stats.mode == "update":
        sums, total = jax.tree.map(jnp.add, (sums, total), added)
    mean = {name: jnp.where(total > 0, sums[name] / total, y) for name, y in limits.items()}
    if stats.mode == "read":
        return _as_range(mean), _unchanged
    totals = known.sums, known.count
    return _as_range(mean), lambda out: _remember(out, totals, added)


def _unchanged(out: jax.Array) -> jax.Array:
    return out


@jax.custom_vjp
def _remember(out: jax.Array, totals: Array, added: Any) -> jax.Array:
    """Returns `out`; the gradients with respect to `totals` are `added`."""
    return out


_remember.defvjp(
    lambda out, totals, added: (out, added),
    lambda added, gradient: (gradient, added, None),
)


def _limits_of(x: jax.Array, config: OperandConfig, axes: ScaledAxes) -> dict[str, jax.Array]:
    """Returns the limits of one activation by their names, averaged over axes."""
    batch_axes = config.static_axes or ()
    if outside := [i for i in batch_axes if not -x.ndim <= i < x.ndim]:
        raise value_error(
            f"act_batch_axes: expected axes of the activation, which has {x.ndim} (its shape is "
            f"{list(x.shape)}), got {outside[0]}"
        )
    low, high = ranges.of_operand(jax.lax.stop_gradient(x), config, axes)
    limits = {"absmax": high} if low is None else {"min": low, "max": high}
    averaged = tuple({i % x.ndim for i in batch_axes})
    return {
        name: jnp.mean(y.astype(jnp.float32), axis=averaged, keepdims=True)
        for name, y in limits.items()
    }


def _as_range(limits: Any) -> Limits:
    return limits.get("min"), limits["max" if "max" in limits else "absmax"]


def _shapes(limits: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(np.shape(x)) for name, x in limits.items()}


def _checked(stats: QuantStats, limits: Any) -> QuantStats:
    """Returns the statistics for one product; raises unless their limits have the shapes of these."""
    found = stats.first()
    if _shapes(found.sums) != _shapes(limits):
        raise _mismatch(stats.name, _shapes(found.sums), _shapes(limits), "the statistics have")
    return found


def _mismatch(name: str, known: Any, new: Any, whose: str) -> ValueError:
    def shown(shapes: dict[str, tuple[int, ...]]) -> str:
        return ", ".join(f"{limit} {list(shape)}" for limit, shape in shapes.items())

    of = f" of {name!r}" if name else ""
    return value_error(
        f"quant_stats{of}: this product's activation has the limits {shown(new)}, but {whose} "
        f"{shown(known)}; name all axes whose length varies in act_batch_axes of the rule, or, if the "
        "rule has changed, leave these statistics out of the state, so that they start anew"
    )
