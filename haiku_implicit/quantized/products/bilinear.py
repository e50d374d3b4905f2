"""Products of quantized arrays: integer codes are multiplied as integers, and scaled afterwards.

A product is linear in each of two operands. This code only needs to know which axis of the result comes
from which axis of an operand: along those axes an operand may have scales, and the result is multiplied
by them. The gradient with respect to an operand is also such a product, of the incoming gradient and
the other operand; JAX's transposition of the dense product finds it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from haiku_implicit.core import compat
from haiku_implicit.core.interpreter import interpret
from haiku_implicit.core.sharding import in_type
from haiku_implicit.core.typing import Array, DType, EqnParam, EqnParams, Precision, Primitive
from haiku_implicit.quantized.numbers.options import OperandConfig
from haiku_implicit.quantized.numbers.ranges import ScaledAxes
from haiku_implicit.quantized.operands import QuantizedOperand, dequantize
from haiku_implicit.quantized.products.tiles import groups_of_rows

Axes = tuple[int | None, ...]
Operand = jax.Array | QuantizedOperand
Others = tuple[jax.Array, ...]
Shape = tuple[int, ...]

# Tiles of fewer elements are multiplied by their scales before the product, and not after it: many
# small integer products take longer than one product of floating numbers.
_SMALLEST_INTEGER_TILE = 128

# The largest sum of products of integers.
_LARGEST_SUM = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Bilinear:
    """A function that is linear in each of two arrays.

    Attributes:
      fun: called as `fun(a, b, dtype)`, with the dtype to accumulate in.
      axes: for `a` and for `b`, the source of each axis of the result: an axis of the operand, or None.
      summed: the pairs of axes (of `a`, of `b`) that are summed over; the last one is tiled.
      separable: whether products of pieces along such a pair add up to the product.
      group_sizes: in a ragged product, the number of rows of the result (and of `a`) for each index of
        the first axis of `b`.
    """

    fun: Callable[[Any, Any, Any], jax.Array]
    axes: tuple[Axes, Axes]
    summed: tuple[tuple[int, int], ...]
    separable: bool
    group_sizes: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Product:
    """One of JAX's products with all of its options.

    Attributes:
      primal: called as `primal(lhs, rhs, *others, precision=..., preferred_element_type=...)`.
      precision: the precision of products of values; products of codes are exact.
      axes, summed, separable: as for `Bilinear`.
      ragged: whether the first one of the others is its `group_sizes`.
    """

    primal: Callable[..., jax.Array]
    precision: Precision
    axes: tuple[Axes, Axes]
    summed: tuple[tuple[int, int], ...]
    separable: bool
    ragged: bool = False

    def group_sizes(self, others: Others) -> jax.Array | None:
        """Returns the `group_sizes` of `Bilinear`."""
        return others[0] if self.ragged else None

    def forward(self, others: Others) -> Bilinear:
        """Returns the product of `lhs` and `rhs`, given its other arguments."""

        def fun(lhs: Array, rhs: Array, dtype: DType) -> jax.Array:
            precision = None if _is_code(lhs) else self.precision
            return self.primal(lhs, rhs, *others, precision=precision, preferred_element_type=dtype)

        return Bilinear(fun, self.axes, self.summed, self.separable, self.group_sizes(others))

    def plain(
        self, lhs: Array, rhs: Array, *others: Array, dtype: DType | None = None
    ) -> jax.Array:
        """Computes the product of dense arrays."""
        return self.forward(others).fun(lhs, rhs, dtype)

    def transposed(self, side: int, operand: jax.Array, others: Others) -> Bilinear:
        """Returns the product of the incoming gradient and an operand: the other operand's gradient.

        Args:
          side: the operand to return the gradient of: 0 or 1.
          operand: an array with the shape of this operand.
          others: the product's other arguments.
        """
        own, other = self.axes[side], self.axes[1 - side]
        pairs = list(zip(own, other, strict=True))
        of_gradient = {a: i for i, a in enumerate(own) if a is not None}
        of_other = {a: b for a, b in pairs if a is not None}
        if self.separable:
            of_other |= {pair[side]: pair[1 - side] for pair in self.summed}
        every = range(operand.ndim)
        struct = _struct(operand)

        def dense(gradient: Array, other: Any, *others: Array) -> Any:
            def forward(x: Array) -> jax.Array:
                pair = (x, other) if side == 0 else (other, x)
                return self.forward(others).fun(*pair, jnp.float32)

            return jax.linear_transpose(forward, struct)(gradient)

        def fun(gradient: Array, other: Any, dtype: DType) -> jax.Array:
            return _summed_in(dtype, dense, gradient, other, *others)

        return Bilinear(
            fun,
            axes=(tuple(map(of_gradient.get, every)), tuple(map(of_other.get, every))),
            summed=tuple((i, b) for i, (a, b) in enumerate(pairs) if a is None and b is not None),
            separable=self.separable,
        )


def scaled_axes(product: Product | Bilinear, side: int, config: OperandConfig) -> ScaledAxes:
    """Returns the axes along which the scales of an operand differ in a product.

    Args:
      product: the product.
      side: the operand, 0 or 1.
      config: how it is quantized.
    """
    shared = config.disable_channelwise_axes
    channels = () if shared else tuple(a for a in product.axes[side] if a is not None)
    return ScaledAxes(channels, product.summed[-1][side] if product.summed else None)


def dot_product(
    ndims: tuple[int, int],
    numbers: EqnParam,
    precision: Precision = None,
    out_sharding: Sharding | None = None,
) -> Product:
    """Returns the product `jax.lax.dot_general` of operands with `ndims` axes."""
    numbers = tuple(tuple(tuple(map(int, axes)) for axes in pair) for pair in numbers)
    summed, batch = numbers
    lhs, rhs = (
        [i for i in range(n) if i not in (*s, *b)]
        for n, s, b in zip(ndims, summed, batch, strict=True)
    )
    return Product(
        functools.partial(jax.lax.dot_general, dimension_numbers=numbers, **_sharded(out_sharding)),
        precision,
        axes=((*batch[0], *lhs, *[None] * len(rhs)), (*batch[1], *[None] * len(lhs), *rhs)),
        summed=tuple(zip(*summed, strict=True)),
        separable=out_sharding is None,
    )


def conv_product(
    shapes: tuple[Shape, Shape],
    *,
    dimension_numbers: EqnParam = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Precision = None,
    out_sharding: Sharding | None = None,
    **window: Any,
) -> Product:
    """Returns the product `jax.lax.conv_general_dilated`; `window` has its other options."""
    numbers = lhs_at, rhs_at, out_at = jax.lax.conv_dimension_numbers(*shapes, dimension_numbers)
    every = range(len(out_at))
    batched = batch_group_count == 1  # else the result's batch axis is a part of lhs's
    lhs_axes = tuple(lhs_at[0] if i == out_at[0] and batched else None for i in every)
    rhs_axes = tuple(rhs_at[0] if i == out_at[1] else None for i in every)
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        dimension_numbers=jax.lax.ConvDimensionNumbers(*numbers),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        **window,
        **_sharded(out_sharding),
    )
    return Product(
        convolve,
        precision,
        axes=(lhs_axes, rhs_axes),
        summed=((lhs_at[1], rhs_at[1]),),
        separable=feature_group_count == batch_group_count == 1 and out_sharding is None,
    )


def ragged_product(precision: Precision = None, group_offset: Array = None) -> Product:
    """Returns the product `jax.lax.ragged_dot`, whose third operand has the sizes of the groups."""
    return Product(
        functools.partial(jax.lax.ragged_dot, group_offset=group_offset),
        precision,
        axes=((0, None), (None, 2)),
        summed=((1, 1),),
        separable=False,
        ragged=group_offset is None,
    )


# The case of `jax.lax.ragged_dot`; its primitive is more general.
_RAGGED_DOT = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def product_of(
    primitive: Primitive, operands: tuple[Any, Any], params: EqnParams
) -> Product | None:
    """Returns the product that a primitive computes with these parameters; None for an unknown one."""
    options = {name: x for name, x in params.items() if name != "preferred_element_type"}
    lhs, rhs = operands
    if primitive is jax.lax.dot_general_p:
        return dot_product((lhs.ndim, rhs.ndim), options.pop("dimension_numbers"), **options)
    if primitive is jax.lax.conv_general_dilated_p:
        return conv_product((lhs.shape, rhs.shape), **options)
    numbers = options.pop("ragged_dot_dimension_numbers", None)
    if numbers != _RAGGED_DOT or options.pop("out_sharding", None) is not None:
        return None
    return ragged_product(**options)


def _sharded(out_sharding: Sharding | None) -> dict[str, Any]:
    """Returns the parameter if it is set: in some versions of JAX, not all products have it."""
    return {} if out_sharding is None else dict(out_sharding=out_sharding)


def _summed_in(
    dtype: DType, fun: Callable[..., Any], a: Array, b: Array, *others: Array
) -> jax.Array:
    """Calls a function of two float32 arrays, one product, for other dtypes; it sums in `dtype`.

    (JAX does not transpose products of integers. So the function is traced for float32.)
    """
    closed = jax.make_jaxpr(fun)(_struct(a), _struct(b), *others)
    changes: dict[str, Any] = dict(preferred_element_type=np.dtype(dtype))
    if _is_code(a):
        changes["precision"] = None
    eqns = [
        eqn.replace(params=eqn.params | changes) if changes.keys() <= eqn.params.keys() else eqn
        for eqn in closed.jaxpr.eqns
    ]
    out: list[jax.Array] = interpret(
        closed.jaxpr.replace(eqns=eqns), closed.consts, [a, b, *others]
    )
    return out[0]


def _struct(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=compat.explicit_sharding(x))


def _is_code(x: Array) -> bool:
    """Whether an array has codes: products of codes are exact, without precisions and algorithms."""
    return np.dtype(x.dtype).itemsize == 1 or _is_integer(x)


def _is_integer(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.integer))


# --- products of quantized operands --------------------------------------------------------------


def multiply(
    product: Bilinear, a: Operand, b: Operand, dtype: DType, out_dtype: DType
) -> jax.Array:
    """Computes a product of operands that may be quantized.

    Args:
      product: the product.
      a, b: its operands.
      dtype: the dtype that dequantized operands are cast to.
      out_dtype: the dtype of the result.
    """

    def of_values() -> jax.Array:
        left, right = (
            dequantize(x, dtype) if isinstance(x, QuantizedOperand) else x.astype(dtype)
            for x in (a, b)
        )
        return product.fun(left, right, out_dtype).astype(out_dtype)

    if not isinstance(a, QuantizedOperand) or not isinstance(b, QuantizedOperand):
        return of_values()
    of_codes = _product_of_codes(product, a, b, out_dtype)
    if of_codes is not None:
        return of_codes()
    first_a, first_b = (_first_scales(product, i, x) for i, x in enumerate((a, b)))
    of_codes = _product_of_codes(product, first_a, first_b, out_dtype)
    if of_codes is None or (first_a is a and first_b is b):
        return of_values()
    # A stored kernel is a stack of matrices, each with its scales. Kernels from training share scales:
    # then this product equals the product in training.
    pairs = [(x.scale, y.scale) for x, y in ((a, first_a), (b, first_b)) if x is not y]
    shared = jnp.all(jnp.stack([jnp.all(x == y) for x, y in pairs]))
    return jax.lax.cond(shared, of_codes, of_values)


def _product_of_codes(
    product: Bilinear, a: QuantizedOperand, b: QuantizedOperand, out_dtype: DType
) -> Callable[[], jax.Array] | None:
    """Returns a function that multiplies codes and scales the sums; None if the scales prevent it."""
    tiles = _tiles(product, a, b) if a.multiplies and b.multiplies else None
    if tiles is None:
        return None
    run = functools.partial(_in_tiles, tiles=tiles) if tiles.number > 1 else _codes
    return lambda: run(product, a, b).astype(out_dtype)


def _first_scales(product: Bilinear, side: int, x: QuantizedOperand) -> QuantizedOperand:
    """Gives all positions of a kernel the scale of the first; an operand without positions stays.

    (Positions are axes that the result does not have, and that are not summed like inputs.)
    """
    if x.scale is None:
        return x
    known = {*product.axes[side], *(pair[side] for pair in product.summed)}
    positions = [i for i, n in enumerate(x.scale.shape) if i not in known and n > 1]
    scale = x.scale
    for i in positions:
        scale = jax.lax.slice_in_dim(scale, 0, 1, axis=i)
    return x._replace(scale=scale) if positions else x


class _Tiles(NamedTuple):
    """How two operands are cut into tiles: the axis of each, and the number of tiles."""

    axes: tuple[int, int]
    number: int


def _tiles(product: Bilinear, a: QuantizedOperand, b: QuantizedOperand) -> _Tiles | None:
    """Returns the tiles that have one scale for each index of the result's axes.

    None if the products of such tiles do not add up to the product, as within groups of a convolution;
    if sums of integers may overflow; or if products of codes would be slower.
    """
    has_groups = (False, product.group_sizes is not None)
    tiled = [_tiled_axis(*own) for own in zip((a, b), product.axes, has_groups, strict=True)]
    longest = _largest_sum(product, a, b)
    if tiled == [None, None]:
        return _Tiles((0, 0), 1) if longest <= _LARGEST_SUM else None
    for pair in product.summed if product.separable else ():
        if any(t not in (None, i) for t, i in zip(tiled, pair, strict=True)):
            continue
        counts = {
            x.scale.shape[i] for x, i in zip((a, b), pair, strict=True) if x.scale is not None
        }
        counts -= {1}
        size = a.codes.shape[pair[0]] // max(counts)
        if len(counts) == 1 and size >= _SMALLEST_INTEGER_TILE:
            count = counts.pop()
            return _Tiles(pair, count) if longest <= _LARGEST_SUM * count else None
    return None


def _tiled_axis(x: QuantizedOperand, axes: Axes, has_groups: bool) -> int | None:
    """Returns an axis with several scales that is neither an axis of the result nor of its groups."""
    shape = () if x.scale is None else x.scale.shape
    known = (0, *axes) if has_groups else axes
    return next((i for i, n in enumerate(shape) if i not in known and n > 1), None)


def _largest_sum(product: Bilinear, *operands: QuantizedOperand) -> float:
    """Returns a bound on a sum of products of codes; zero for floats, which do not overflow.

    It is infinite if a length is symbolic (`jax.export`).

    Each element of an operand is a factor of at most one product in a sum. So the sizes of the axes
    that the operand has, but the result does not have, give a bound.
    """
    if not all(_is_integer(x.codes) for x in operands):
        return 0
    bounds = [
        math.prod(n for i, n in enumerate(x.codes.shape) if i not in axes)
        for x, axes in zip(operands, product.axes, strict=True)
    ]
    most = math.prod(255 if x.codes.dtype == np.uint8 else 128 for x in operands)
    return most * min(math.inf if export.is_symbolic_dim(n) else n for n in bounds)


def _in_tiles(
    product: Bilinear, a: QuantizedOperand, b: QuantizedOperand, tiles: _Tiles
) -> jax.Array:
    """Sums the products of tiles, each with its own scales."""

    def stacked(axis: int, x: jax.Array) -> jax.Array:
        if x.shape[axis] == 1:  # one scale for all tiles
            return jnp.broadcast_to(x, (tiles.number, *x.shape))
        size = x.shape[axis] // tiles.number
        x = x.reshape(*x.shape[:axis], tiles.number, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    a, b = (
        jax.tree.map(functools.partial(stacked, axis), x._replace(inside=None))
        for x, axis in zip((a, b), tiles.axes, strict=True)
    )
    return jnp.sum(jax.vmap(functools.partial(_codes, product))(a, b), axis=0)


def _codes(product: Bilinear, a: QuantizedOperand, b: QuantizedOperand) -> jax.Array:
    """Multiplies codes and scales the result; sums of integers are exact, all others float32."""
    left, right = a.codes, b.codes
    dtype = np.int32 if _is_integer(left) and _is_integer(right) else np.float32
    if left.dtype != right.dtype:  # not all products take two dtypes
        left, right = left.astype(dtype), right.astype(dtype)
    out = product.fun(left, right, np.dtype(dtype))
    sizes = (None, product.group_sizes)
    for x, axes, group_sizes in zip((a, b), product.axes, sizes, strict=True):
        out = scaled(out, x.scale, axes, group_sizes)
    return out


def scaled(
    x: jax.Array, scale: jax.Array | None, axes: Axes, group_sizes: jax.Array | None = None
) -> jax.Array:
    """Multiplies the result of a product by the scale of an operand, if any; keeps its sharding.

    Args:
      x: the result.
      scale: the scale of an operand, with that operand's axes.
      axes: for each axis of `x`, the operand's axis that it comes from, or None.
      group_sizes: if the operand has the groups of a ragged product along its first axis: the number
        of rows of `x` in each.
    """
    if scale is None:
        return x
    if group_sizes is not None and scale.shape[0] > 1:
        rows = groups_of_rows(group_sizes, len(x))
        scale, axes = scale.at[rows].get(mode="fill", fill_value=0), (0, *axes[1:])
    used = [i for i in axes if i is not None]
    rest = [i for i in range(scale.ndim) if i not in used]
    shape = [1 if i is None else scale.shape[i] for i in axes]
    scale = jnp.transpose(scale, (*used, *rest)).reshape(shape)
    sharding = compat.explicit_sharding(x)
    if sharding is not None:
        entries = zip(scale.shape, sharding.spec, strict=True)
        spec = PartitionSpec(*(None if n == 1 else name for n, name in entries))
        scale = in_type(scale, NamedSharding(sharding.mesh, spec))
    wide = np.float64 if np.float64 in (x.dtype, scale.dtype) else np.float32
    return x.astype(wide) * scale.astype(wide)
