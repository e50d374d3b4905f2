"""Rules of `QuantizedMatrix`: products, and elementwise functions that change only the scales."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from haiku_implicit.core.binary import BinaryCall, binary_handler, fits
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.sharding import left_to_partitioner, result_sharding
from haiku_implicit.core.typing import DType, EqnParam, Primitive, Result
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.products.convolution import convolve
from haiku_implicit.quantized.products.ragged import quantized_ragged_dot
from haiku_implicit.quantized.products.stored import in_codes, quantized_dot, with_dense

# --- products ------------------------------------------------------------------------------------


@binary_handler("dot_general")
def dot_with_codes(call: BinaryCall, x: jax.Array, w: QuantizedMatrix) -> jax.Array:
    """Multiplies with the codes, see `quantized_dot`; leaves explicit axes of a mesh to XLA."""
    sharding = result_sharding(call.primitive, call.ordered(x, w), call.params)
    if call.params.get("out_sharding") is not None:
        # Derivatives have an `out_sharding` on any mesh, even if it does not split anything.
        call = dataclasses.replace(call, params=call.params | dict(out_sharding=None))
    return _dot(call, x, w) if sharding is None else _dot_in_mesh(call, x, w, sharding)


def _dot(call: BinaryCall, x: jax.Array, w: QuantizedMatrix) -> jax.Array:
    return quantized_dot(call, x, w.with_row_scales())


# Jitted, because eager code would allocate each intermediate value.
@functools.partial(jax.jit, static_argnums=(0, 3))
def _dot_in_mesh(
    call: BinaryCall, x: jax.Array, w: QuantizedMatrix, sharding: Sharding
) -> jax.Array:
    return left_to_partitioner(functools.partial(_dot, call), sharding)(x, w)


@primitive_handler("dot_general")
def dot_of_two_quantized(
    primitive: Primitive, v: QuantizedMatrix, w: QuantizedMatrix, **params: EqnParam
) -> jax.Array:
    """Multiplies two quantized matrices, both dequantized for the product."""
    return with_dense(BinaryCall(primitive, params, w_first=False), v, w)


@binary_handler("conv_general_dilated")
def convolve_dequantized(call: BinaryCall, x: jax.Array, w: QuantizedMatrix) -> Result:
    """Convolves with the dequantized kernel: a kernel is small compared with the images."""
    if w.activation is not None:
        return in_codes(call, x, w)
    if not call.w_first and (out := convolve(x, w, call.params)) is not NotImplemented:
        return out
    return with_dense(call, x, w)


@primitive_handler("ragged_dot_general")
def ragged_dot_with_codes(
    primitive: Primitive, x: jax.Array, w: QuantizedMatrix, sizes: jax.Array, **params: EqnParam
) -> Result:
    """Multiplies rows with the matrices of their groups, see `quantized_ragged_dot`."""
    out = quantized_ragged_dot(x, w, sizes, **params)
    if out is NotImplemented and w.activation is not None:
        return in_codes(BinaryCall(primitive, params, w_first=False), x, w, sizes)
    return out


# --- elementwise ---------------------------------------------------------------------------------


@primitive_handler(["mul", "div"])
def rescale(primitive: Primitive, w: QuantizedMatrix, x: jax.Array, **params: EqnParam) -> Result:
    """Multiplies or divides the scales by factors that are constant along the grouped axis."""
    if not fits(x, w) or (x.ndim and x.shape[w.axis] != 1) or w.rounded_to is not None:
        return NotImplemented  # (a matrix that was rounded was so before, not after)
    if x.ndim:
        w = w.with_row_scales()
        x = x if w.axis == -1 else jnp.swapaxes(x, -1, -2)  # [..., rows, 1]
    # In the wider dtype, because a product of two numbers may not fit in float16 scales.
    wide = formats.arithmetic_dtype(w.scale.dtype)
    apply = jnp.multiply if primitive is jax.lax.mul_p else jnp.divide
    return w.map_scales(lambda leaf: apply(leaf.astype(wide), x.astype(wide)))


@primitive_handler("neg")
def negate(primitive: Primitive, w: QuantizedMatrix, **params: EqnParam) -> QuantizedMatrix:
    """Negates scales and offsets."""

    def negative(leaf: jax.Array) -> jax.Array:
        signed = jnp.finfo(leaf.dtype).min < 0  # powers of two (e8m0) are unsigned
        return -(leaf if signed else leaf.astype(formats.arithmetic_dtype(leaf.dtype)))

    return w.map_scales(negative)


@primitive_handler("convert_element_type")
def cast(
    primitive: Primitive,
    w: QuantizedMatrix,
    *,
    new_dtype: DType,
    sharding: EqnParam = None,
    **params: EqnParam,
) -> Result:
    """Casts to another floating dtype, which changes only the dtype of the values, not the leaves."""
    if not jnp.issubdtype(new_dtype, np.floating) or sharding is not None:
        return NotImplemented
    new = np.dtype(new_dtype)
    exact = w.dtype if w.rounded_to is None else w.rounded_to
    if _holds(new, exact):  # this cast loses nothing; one before it may have
        return w._replace(dtype=new, rounded_to=None if exact == new else exact)
    if w.rounded_to is None and _holds(w.dtype, new):
        return w._replace(dtype=new)
    return NotImplemented


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether every finite number of the narrow floating dtype is a number of the wide one."""
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp)
