"""Quantized products with quantized gradients: `dot_general` and its relatives, one mechanism for all.

A product is linear in each of two operands. Which axis of its result comes from which axis of an
operand is all that has to be known of it: along those axes an operand may have scales, which the
result is multiplied with. The gradient by an operand is a product as well, of the incoming gradient
with the other operand, and JAX's own transposition of the dense product says which.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from haiku_implicit.core import compat
from haiku_implicit.numerics.operands import (
    Limits,
    OperandSpec,
    QuantizedOperand,
    dequantize,
    quantize,
)
from haiku_implicit.products.product_config import GradientConfig, OperandConfig, ProductConfig

Axes = tuple[int | None, ...]

# Tiles of fewer elements are multiplied by their scales before the product, and not after it: so many
# small integer products take longer than the one product of floating numbers that they stand for.
_SMALLEST_INTEGER_TILE = 128


@dataclasses.dataclass(frozen=True)
class Product:
    """A function that is linear in each of two arrays; hashable.

    Attributes:
      fun: called as `fun(lhs, rhs, *others, preferred_element_type=..., **options)`.
      options: keyword arguments, as pairs.
      axes: for `lhs` and for `rhs`: which of its axes each axis of the result comes from.
      summed: the pairs of axes (of `lhs`, of `rhs`) that are summed over; the last one is tiled.
      separable: whether products of pieces along such a pair add up to the product.
    """

    fun: Callable[..., jax.Array]
    options: tuple[tuple[str, Any], ...]
    axes: tuple[Axes, Axes]
    summed: tuple[tuple[int, int], ...]
    separable: bool = True

    def __call__(self, lhs: Any, rhs: Any, others: Any, dtype: Any) -> jax.Array:
        """The product of arrays, accumulated in a dtype."""
        options = {k: v for k, v in self.options if k != "precision" or not _is_code(lhs)}
        return self.fun(lhs, rhs, *others, preferred_element_type=dtype, **options)


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The product of an incoming gradient and one operand that is the gradient by the other one.

    Attributes:
      product: the forward product.
      side: the operand that it is the gradient by: 0 or 1.
      struct: the shape, and the sharding if any, of that operand.
    """

    product: Product
    side: int
    struct: jax.ShapeDtypeStruct

    @property
    def separable(self) -> bool:
        return self.product.separable

    @property
    def axes(self) -> tuple[Axes, Axes]:
        """As of `Product`: its operands are the incoming gradient and the other operand."""
        own, other = self.product.axes[self.side], self.product.axes[1 - self.side]
        of_gradient = {axis: i for i, axis in enumerate(own) if axis is not None}
        of_other = {a: b for a, b in zip(own, other, strict=True) if a is not None}
        if self.separable:
            of_other |= {pair[self.side]: pair[1 - self.side] for pair in self.product.summed}
        every = range(len(self.struct.shape))
        return tuple(of_gradient.get(i) for i in every), tuple(of_other.get(i) for i in every)

    @property
    def summed(self) -> tuple[tuple[int, int], ...]:
        own, other = self.product.axes[self.side], self.product.axes[1 - self.side]
        pairs = enumerate(zip(own, other, strict=True))
        return tuple((i, b) for i, (a, b) in pairs if a is None and b is not None)

    def __call__(self, gradient: Any, other: Any, others: Any, dtype: Any) -> jax.Array:
        structs = [_struct(x) for x in (gradient, other)]

        def dense(gradient: Any, other: Any, others: Any) -> Any:
            def forward(x: Any) -> jax.Array:
                pair = (x, other) if self.side == 0 else (other, x)
                return self.product(*pair, others, jnp.float32)

            return jax.linear_transpose(forward, self.struct)(gradient)

        jaxpr = jax.make_jaxpr(dense)(*structs, others)
        return _rerun(jaxpr, [gradient, other, *others], dtype)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=_sharding(x))


def _sharding(x: Any) -> Any:
    """The sharding that is a part of an array's type, if any (explicit mesh axes)."""
    sharding: Any = getattr(jax.typeof(x), "sharding", None)
    explicit = sharding is not None and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding if explicit else None


def _rerun(closed: Any, operands: Sequence[Any], dtype: Any) -> jax.Array:
    """The result of a jaxpr of one product and rearrangements, for operands of other dtypes."""
    env = dict(zip(closed.jaxpr.invars, operands, strict=True))
    env |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        params = dict(eqn.params)
        if "preferred_element_type" in params:
            params["preferred_element_type"] = np.dtype(dtype)
            params["precision"] = None if _is_code(values[0]) else params["precision"]
        env |= dict(zip(eqn.outvars, compat.bind(eqn.primitive, values, params), strict=True))
    return env[closed.jaxpr.outvars[0]]


def _is_code(x: Any) -> bool:
    """Whether products of an array are exact: precisions and algorithms are for wider dtypes."""
    return np.dtype(x.dtype).itemsize == 1


def _is_integer(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.integer))


# The longest sum of products of 8-bit integers that int32 holds, all of them at the largest magnitude.
_LONGEST_SUM = (2**31 - 1) // 128**2


# --- products of quantized operands --------------------------------------------------------------


def multiply(product: Any, a: Any, b: Any, others: Any, dtype: Any, out_dtype: Any) -> jax.Array:
    """A product of which either operand may be quantized.

    Args:
      product: a `Product`, or a `Transposed` one.
      a, b: arrays, or `QuantizedOperand`s.
      others: what else it takes.
      dtype: what dequantized operands are cast to.
      out_dtype: of the result.
    """
    operands = (a, b)
    if all(isinstance(x, QuantizedOperand) and x.multiplies for x in operands):
        tiled = [_tiled_axis(x, axes) for x, axes in zip(operands, product.axes, strict=True)]
        longest = _longest_sum(product, operands)
        if tiled == [None, None] and longest <= _LONGEST_SUM:
            return _product_of_codes(product, a, b, others).astype(out_dtype)
        cut = None if tiled == [None, None] else _cut(product, operands, tiled)
        if cut is not None and longest <= _LONGEST_SUM * cut[2]:
            return _in_tiles(product, a, b, others, *cut).astype(out_dtype)
    dense = [
        dequantize(x, dtype) if isinstance(x, QuantizedOperand) else x.astype(dtype)
        for x in operands
    ]
    return product(*dense, others, out_dtype).astype(out_dtype)


def _product_of_codes(
    product: Any, a: QuantizedOperand, b: QuantizedOperand, others: Any
) -> jax.Array:
    """Integers are summed as integers, exactly; all others in float32."""
    codes = [a.codes, b.codes]
    dtype = np.dtype(np.int32 if all(map(_is_integer, codes)) else np.float32)
    if dtype == np.float32 and a.codes.dtype != b.codes.dtype:
        codes = [x.astype(dtype) for x in codes]  # not all products take two dtypes
    out = product(*codes, others, dtype)
    for x, axes in zip((a, b), product.axes, strict=True):
        out = _scaled(out, x.scale, axes)
    return out


def _longest_sum(product: Any, operands: Any) -> int:
    """How many products an element of the result is the sum of, at most; zero where none overflow.

    An element of either operand is a factor of one of them, so that those that the result has no
    axes for are a bound.
    """
    if not all(_is_integer(x.codes) for x in operands):
        return 0
    return min(
        math.prod(n for i, n in enumerate(x.codes.shape) if i not in axes)
        for x, axes in zip(operands, product.axes, strict=True)
    )


def _scaled(x: jax.Array, scale: jax.Array | None, axes: Axes) -> jax.Array:
    """The result of a product, times the scale of an operand if it has one; sharded as it is."""
    if scale is None:
        return x
    scale, sharding = lay_out(scale, axes), _sharding(x)
    if sharding is not None:
        entries = zip(scale.shape, sharding.spec, strict=True)
        spec = jax.sharding.PartitionSpec(*(None if n == 1 else name for n, name in entries))
        scale = jax.sharding.reshard(scale, jax.sharding.NamedSharding(sharding.mesh, spec))
    wide = np.float64 if np.float64 in (x.dtype, scale.dtype) else np.float32
    return x.astype(wide) * scale.astype(wide)


def lay_out(scale: jax.Array, axes: Axes) -> jax.Array:
    """A scale of an operand, with its axes where the result of the product has them."""
    used = [i for i in axes if i is not None]
    rest = [i for i in range(scale.ndim) if i not in used]
    shape = [1 if i is None else scale.shape[i] for i in axes]
    return jnp.transpose(scale, (*used, *rest)).reshape(shape)


def _tiled_axis(x: QuantizedOperand, axes: Axes) -> int | None:
    """The axis along which scales differ though the result has no such axis."""
    shape = () if x.scale is None else x.scale.shape
    return next((i for i, n in enumerate(shape) if n > 1 and i not in axes), None)


def _cut(product: Any, operands: Any, tiled: list[int | None]) -> tuple[int, int, int] | None:
    """The axes along which to cut both operands, and in how many tiles.

    None where that does not give the product, as within groups of a convolution, or does not pay.
    """
    for pair in product.summed if product.separable else ():
        if all(t in (None, i) for t, i in zip(tiled, pair, strict=True)):
            ends = list(zip(operands, pair, strict=True))
            counts = {x.scale.shape[i] for x, i in ends if x.scale is not None} - {1}
            size = ends[0][0].codes.shape[pair[0]] // max(counts)
            if len(counts) == 1 and size >= _SMALLEST_INTEGER_TILE:
                return *pair, counts.pop()
    return None


def _in_tiles(
    product: Any,
    a: QuantizedOperand,
    b: QuantizedOperand,
    others: Any,
    a_axis: int,
    b_axis: int,
    count: int,
) -> jax.Array:
    """The sum of the products of tiles, each with its own scales."""

    def tiles(axis: int, x: jax.Array) -> jax.Array:
        if x.shape[axis] == 1:  # one scale for all tiles
            return jnp.broadcast_to(x, (count, *x.shape))
        x = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    a, b = (
        jax.tree.map(functools.partial(tiles, axis), x._replace(inside=None))
        for x, axis in ((a, a_axis), (b, b_axis))
    )
    each = jax.vmap(lambda a, b: _product_of_codes(product, a, b, others))
    return jnp.sum(each(a, b), axis=0)


# --- with gradients ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def quantized_product(
    product: Product,
    config: ProductConfig,
    dtypes: Any,
    operands: Any,
    others: Any,
    key: Any,
    limits: tuple[Limits | None, Limits | None] = (None, None),
) -> jax.Array:
    """A product that quantizes its operands, and its gradients in the backward pass.

    Args:
      product: the product.
      config: how.
      dtypes: of `lhs`, of `rhs` (None for those that get no gradient), and of the result.
      operands: `lhs` and `rhs`: arrays, or `QuantizedOperand`s, which are quantized already and get no
        gradient.
      others: what else the product takes, a tuple of arrays: no gradients by them.
      key: a random key for stochastic rounding, or None.
      limits: of `lhs` and of `rhs` the range, where it is not that of the operand itself.
    """
    return _forward(product, config, dtypes, operands, others, key, limits)[0]


def _forward(
    product: Product,
    config: ProductConfig,
    dtypes: Any,
    operands: Any,
    others: Any,
    key: Any,
    limits: Any,
) -> tuple[jax.Array, Any]:
    lhs, rhs = (_quantized_side(product, config, i, operands[i], limits[i]) for i in (0, 1))
    # (In integers, a stored matrix that is multiplied by some would lose its fractions.)
    known = [d for d in dtypes[:2] if d is not None and jnp.issubdtype(d, np.inexact)]
    dtype = jnp.result_type(*(known or dtypes[2:]))
    out = multiply(product, lhs, rhs, others, dtype, dtypes[2])
    kept, inside = [], []
    for x, q in zip(operands, (lhs, rhs), strict=True):
        changed = isinstance(q, QuantizedOperand) and not isinstance(x, QuantizedOperand)
        clipped = changed and q.inside is not None and not config.disable_gradient_clipping
        inside.append(q.inside if clipped else None)
        if changed and (config.use_original_residuals or _is_tiled(q)):
            q = x
        kept.append(q._replace(inside=None) if isinstance(q, QuantizedOperand) else q)
    return out, (kept, inside, others, key)


def _is_tiled(q: QuantizedOperand) -> bool:
    """Whether an operand has scales that the backward product would mix: it is kept dense then."""
    shapes = () if q.scale is None else zip(q.scale.shape, q.codes.shape, strict=True)
    return any(n not in (1, m) for n, m in shapes)


def _quantized_side(product: Product, config: ProductConfig, i: int, x: Any, limits: Any) -> Any:
    spec = spec_of_side(product, config, i, x)
    return x if spec is None else quantize(x, spec, limits=limits)


def spec_of_side(product: Product, config: ProductConfig, i: int, x: Any) -> OperandSpec | None:
    """How the forward pass quantizes an operand; None where it does not."""
    own = (config.lhs, config.rhs)[i]
    if (
        own.qtype is None
        or isinstance(x, QuantizedOperand)
        or not jnp.issubdtype(x.dtype, np.floating)
    ):
        return None
    return _spec(product, i, own)


def _spec(product: Any, i: int, config: OperandConfig) -> OperandSpec:
    """How an operand of a product is quantized: its configuration, and which of its axes are which."""
    shared = config.disable_channelwise_axes
    channels = () if shared else tuple(a for a in product.axes[i] if a is not None)
    tile = None
    if config.tile_size is not None and product.summed:
        tile = product.summed[-1][i], config.tile_size
    rounding = None
    if isinstance(config, GradientConfig) and config.stochastic_rounding is not None:
        rounding = config.stochastic_rounding, tuple(config.channelwise_noise_axes)
    return OperandSpec(config.qtype, config.calibration_method, channels, tile, rounding)


def _backward(
    product: Product, config: ProductConfig, dtypes: Any, residuals: Any, gradient: jax.Array
) -> Any:
    kept, inside, others, key = residuals
    found: list[jax.Array | None] = []
    for i in (0, 1):
        if dtypes[i] is None or not jnp.issubdtype(dtypes[i], np.inexact):
            found.append(None)
            continue
        own = kept[i].codes if isinstance(kept[i], QuantizedOperand) else kept[i]
        transposed = Transposed(product, i, _struct(own))
        out = _gradient(transposed, config, gradient, kept[1 - i], others, key, dtypes[i])
        found.append(out if inside[i] is None else jnp.where(inside[i], out, 0))
    return tuple(found), None, None, None


def _gradient(
    product: Transposed, config: ProductConfig, g: Any, y: Any, others: Any, key: Any, dtype: Any
) -> jax.Array:
    """The gradient by one operand: the product of the incoming one and the other operand `y`."""
    of_gradient = (config.dlhs_grad, config.drhs_grad)[product.side]
    of_residual = (config.dlhs_residual, config.drhs_residual)[product.side]
    wide = jnp.promote_types(g.dtype, dtype)
    if of_gradient.qtype is not None:
        if isinstance(y, QuantizedOperand) and y.multiplies and not _is_tiled(y):
            # The scales of y lie along axes that are summed here, so the gradient takes them.
            g = _scaled(g, y.scale, product.product.axes[1 - product.side])
            y = y._replace(scale=None)
        g = quantize(g, _spec(product, 0, of_gradient), key)
    if of_residual.qtype is not None and not isinstance(y, QuantizedOperand):
        y = quantize(y, _spec(product, 1, of_residual))
    return multiply(product, g, y, others, wide, dtype)


quantized_product.defvjp(_forward, _backward)
