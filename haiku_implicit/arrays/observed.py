"""`Observed`: a weight that sees what it is multiplied by."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_implicit.core.array import ImplicitArray, aux_field, frozen_field
from haiku_implicit.core.dispatch import primitive_handler


class Statistic(NamedTuple):
    """What is summed up over the uses of a weight.

    Attributes:
      shape: from the number of inputs `n` to the shape of the sum.
      of: from the inputs `[b, n]` of one use, float32, to what is added.
      read: from the sum `[..., *shape]` to the statistic.
    """

    shape: Callable[[int], tuple[int, ...]]
    of: Callable[[jax.Array], jax.Array]
    read: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass
class Observed(ImplicitArray, core_ndim=2, warn_on_materialize=False):
    """A dense weight, of whose inputs the gradient by `sums` is a statistic.

    That makes statistics of a pure function: differentiation collects them, through loops, branches,
    checkpoints and stacks of layers. The gradient that arrives does not matter, only that one does.
    Becoming dense costs nothing here, so it is no warning: `input_moments` says what was not seen.

    Attributes:
      w: `[..., n, m]`.
      sums: `[..., *statistic.shape(n)]`, zeros, whose gradient is the sum of `statistic.of` of the
        inputs of all products `x @ w`.
      statistic: which one.
    """

    w: Any = frozen_field()
    sums: Any = frozen_field()
    statistic: Statistic = aux_field()

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def compute_dtype(self) -> Any:
        return self.w.dtype

    def materialize(self) -> jax.Array:
        return self.w


@primitive_handler("dot_general")
def dot_with_observed(
    primitive: Any, x: jax.Array, w: Observed, *, dimension_numbers: Any, **params: Any
) -> Any:
    """`x @ w`: what is contracted with the first axis of the weight is seen."""
    return _observed_dot(primitive, x, w, dimension_numbers, False, params)


@primitive_handler("dot_general")
def dot_of_observed(
    primitive: Any, w: Observed, x: jax.Array, *, dimension_numbers: Any, **params: Any
) -> Any:
    """The same with the weight first."""
    return _observed_dot(primitive, x, w, dimension_numbers, True, params)


def _observed_dot(
    primitive: Any, x: jax.Array, w: Observed, numbers: Any, first: bool, params: Any
) -> Any:
    contract, batch = (pair[::-1] if first else pair for pair in numbers)
    if w.ndim != 2 or tuple(contract[1]) != (0,) or batch[1]:
        return NotImplemented
    x = _seen(x, w.sums, contract[0][0], w.statistic)
    operands = (w.w, x) if first else (x, w.w)
    return primitive.bind(*operands, dimension_numbers=numbers, **params)


def _seen(x: jax.Array, sums: jax.Array, axis: int, statistic: Statistic) -> jax.Array:
    """`x`, with a gradient by `sums`."""

    @jax.custom_vjp
    def identity(x: jax.Array, sums: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array, sums: jax.Array) -> Any:
        return x, x

    def backward(x: jax.Array, cotangent: jax.Array) -> Any:
        rows = jnp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]).astype(jnp.float32)
        return cotangent, statistic.of(rows)

    identity.defvjp(forward, backward)
    return identity(x, sums)


@primitive_handler("convert_element_type")
def cast_observed(primitive: Any, w: Observed, **params: Any) -> Observed:
    """A cast weight sees its inputs as well."""
    return w._replace(w=primitive.bind(w.w, **params))


@primitive_handler(["split", "slice"])
def columns_observed(primitive: Any, w: Observed, **params: Any) -> Any:
    """Columns of a weight have the same inputs: a gate's, of a recurrent one."""
    out = primitive.bind(w.w, **params)
    if any(part.shape[:-1] != w.shape[:-1] for part in jax.tree.leaves(out)):
        return NotImplemented
    return jax.tree.map(lambda part: w._replace(w=part), out)


@primitive_handler(["mul", "div"])
def rescale_observed(primitive: Any, w: Observed, x: jax.Array, **params: Any) -> Any:
    """Times, or by, a number or one for each column: the inputs are the same."""
    if x.ndim and x.shape[-2] == w.shape[-2]:
        return NotImplemented
    return w._replace(w=primitive.bind(w.w, x, **params))


@primitive_handler("transpose")
def transposed_observed(primitive: Any, w: Observed, **params: Any) -> Any:
    """What contracts the other axis sees nothing; the values are dense."""
    return primitive.bind(w.w, **params)


# --- statistics ----------------------------------------------------------------------------------

MOMENTS = Statistic(lambda n: (n, n), lambda x: x.T @ x, lambda sums: sums)

# Gradients add up, and a maximum is no sum. So the largest magnitudes of the uses are sorted into
# classes, for each of which their number and their sum are counted. The mean of the highest class
# that has any is the maximum, exactly so where a single use is in it.
_PER_OCTAVE = 8
_CLASSES = 2 * 32 * _PER_OCTAVE  # of 2⁻³² to 2³²; the first and the last take what is beyond


def _sorted_maxima(x: jax.Array) -> jax.Array:
    """`[2, classes, n]`: for each input 1 in the class of its largest magnitude, and the magnitude."""
    largest = jnp.abs(x).max(axis=0, initial=0.0)  # (NaN and infinity are in the last class)
    octave = jnp.log2(jnp.where(largest > 0, jnp.nan_to_num(largest, nan=jnp.inf), 1.0))
    where = jnp.clip(jnp.floor(octave * _PER_OCTAVE) + _CLASSES // 2, 0, _CLASSES - 1)
    hit = (where == jnp.arange(_CLASSES, dtype=where.dtype)[:, None]) & (largest != 0)
    return jnp.stack([hit.astype(x.dtype), jnp.where(hit, largest, 0.0)])


def _largest(sums: jax.Array) -> jax.Array:
    """`[..., n]`, zero for what was never used."""
    count, total = sums[..., 0, :, :], sums[..., 1, :, :]
    top = _CLASSES - 1 - jnp.argmax(count[..., ::-1, :] > 0, axis=-2)[..., None, :]
    count, total = (jnp.take_along_axis(y, top, axis=-2)[..., 0, :] for y in (count, total))
    return total / jnp.maximum(count, 1)


MAXIMA = Statistic(lambda n: (2, _CLASSES, n), _sorted_maxima, _largest)
