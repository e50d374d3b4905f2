"""`Observed`: a weight that collects statistics of its inputs, as gradients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_implicit.core.binary import BinaryCall, binary_handler
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.typing import Array, EqnParam, Primitive, Result
from haiku_implicit.core.wrapper import Wrapper
from haiku_implicit.quantized.numbers.extremes import largest


class Statistic(NamedTuple):
    """A statistic of the inputs of a weight: a sum over its uses, and a function of the sum.

    Attributes:
      shape: from the number of inputs `n` to the shape of the sum.
      of: from the inputs `[b, n]` of one use, or arrays made of them, float32, to a term of the sum.
      read: from the sum `[..., *shape]` to the statistic.
      made: from the inputs to the arrays that `of` takes, each of their shape. It runs where the model
        does, and may use the names of mapped axes.
    """

    shape: Callable[[int], tuple[int, ...]]
    of: Callable[..., jax.Array]
    read: Callable[[jax.Array], jax.Array]
    made: Callable[[jax.Array], tuple[jax.Array, ...]] = lambda x: (x,)


@dataclasses.dataclass
class Observed(Wrapper, core_ndim=2, warn_on_materialize=False):
    """A dense weight whose gradient with respect to `sums` is a statistic of its inputs.

    So the statistics come from a pure function: differentiation collects them, through loops, branches,
    checkpoints and stacks of layers. The cotangent's value does not matter, only its presence.
    Becoming dense costs nothing here and does not give a warning: `input_moments` reports the weights
    whose inputs were not seen.

    Attributes:
      w: `[..., n, m]`.
      sums: `[..., *statistic.shape(n)]`, zeros. Their gradient is the sum of `statistic.of` over the
        inputs of all products `x @ w`.
      statistic: the statistic.
    """

    w: Array = frozen_field()
    sums: Array = frozen_field()
    statistic: Statistic = aux_field()


@binary_handler("dot_general")
def observe_inputs(call: BinaryCall, x: jax.Array, w: Observed) -> Result:
    """Observes the inputs in `x @ w`: the operand contracted with the first axis of the weight."""
    if w.ndim != 2 or tuple(call.contracted[1]) != (0,) or call.batch[1]:
        return NotImplemented
    (axis,) = call.contracted[0]
    made = jax.lax.stop_gradient(w.statistic.made(x))
    return call(_observed(w.statistic, axis, x, made, w.sums), w.w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _observed(
    statistic: Statistic, axis: int, x: jax.Array, made: tuple[jax.Array, ...], sums: jax.Array
) -> jax.Array:
    """Returns `x`; the gradient with respect to `sums` is the statistic of `x` along `axis`."""
    return x


def _give_statistic(
    statistic: Statistic, axis: int, made: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[Any, ...]:
    rows = [jnp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]) for x in made]
    term = statistic.of(*(x.astype(jnp.float32) for x in rows))
    # Zeros keep the way back to earlier weights, whose statistics do not depend on later weights.
    return jnp.zeros_like(cotangent), tuple(map(jnp.zeros_like, made)), term


_observed.defvjp(lambda statistic, axis, x, made, sums: (x, made), _give_statistic)


@primitive_handler(["convert_element_type", "split", "slice"])
def keep_inputs(primitive: Primitive, w: Observed, **params: EqnParam) -> Result:
    """Observes a cast weight, or columns of it (a recurrent gate's), which have the same inputs."""
    out = primitive.bind(w.w, **params)
    if any(part.shape[:-1] != w.shape[:-1] for part in jax.tree.leaves(out)):
        return NotImplemented
    return jax.tree.map(lambda part: w._replace(w=part), out)


@primitive_handler(["mul", "div"])
def rescale_columns(primitive: Primitive, w: Observed, x: jax.Array, **params: EqnParam) -> Result:
    """Observes a weight scaled by a number, or by one per column, which has the same inputs."""
    if x.ndim and x.shape[-2] == w.shape[-2]:
        return NotImplemented
    return w._replace(w=primitive.bind(w.w, x, **params))


@primitive_handler("transpose")
def transpose_dense(primitive: Primitive, w: Observed, **params: EqnParam) -> jax.Array:
    """Makes a transposed weight dense: a product that contracts the other axis is not observed."""
    return primitive.bind(w.w, **params)


# --- statistics ----------------------------------------------------------------------------------

MOMENTS = Statistic(lambda n: (n, n), lambda x: x.T @ x, lambda sums: sums)

# Gradients add up, but a maximum is not a sum. So the largest magnitude of each use goes into one of
# many classes, and each class counts and sums its members. The mean of the highest class with a member
# is the maximum: exactly, if it has one member.
_PER_OCTAVE = 8
_CLASSES = 2 * 32 * _PER_OCTAVE  # from 2⁻³² to 2³²; the first and the last take values beyond


def _sorted_maxima(x: jax.Array) -> jax.Array:
    """`[2, classes, n]`: for each input, 1 and its largest magnitude in the class of the magnitude."""
    highest = largest(jnp.abs(x), 0, initial=0.0)  # (NaN and infinity are in the last class)
    octave = jnp.log2(jnp.where(highest > 0, jnp.nan_to_num(highest, nan=jnp.inf), 1.0))
    where = jnp.clip(jnp.floor(octave * _PER_OCTAVE) + _CLASSES // 2, 0, _CLASSES - 1)
    classes = jnp.arange(_CLASSES, dtype=where.dtype)[:, None]
    hit = (where[None] == classes) & (highest != 0)[None]
    return jnp.stack([hit.astype(x.dtype), jnp.where(hit, highest, 0.0)])


def _largest(sums: jax.Array) -> jax.Array:
    """The largest magnitude of each input, `[..., n]`; zero for an unused input."""
    count, total = sums[..., 0, :, :], sums[..., 1, :, :]
    top = _CLASSES - 1 - jnp.argmax(count[..., ::-1, :] > 0, axis=-2)[..., None, :]
    count, total = (jnp.take_along_axis(y, top, axis=-2)[..., 0, :] for y in (count, total))
    return total / jnp.maximum(count, 1)


MAXIMA = Statistic(lambda n: (2, _CLASSES, n), _sorted_maxima, _largest)
