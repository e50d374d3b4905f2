"""`ScaledMatrix`: a matrix with a factor for each row or column."""

import dataclasses
import functools
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from haiku_implicit.core import compat
from haiku_implicit.core.array import is_implicit
from haiku_implicit.core.batch_axes import cut_fields
from haiku_implicit.core.binary import BinaryCall, binary_handler, fits
from haiku_implicit.core.box import dense
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.fields import aux_field, frozen_field, product_dtype
from haiku_implicit.core.interpreter import default_handler
from haiku_implicit.core.messages import expecting, value_error
from haiku_implicit.core.sharding import in_type, padded_spec
from haiku_implicit.core.typing import Array, DType, EqnParam, EqnParams, Primitive, Result
from haiku_implicit.core.wrapper import Wrapper
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.products.ragged import row_numbers
from haiku_implicit.quantized.products.tiles import groups_of_rows


@dataclasses.dataclass
class ScaledMatrix(Wrapper, core_ndim=2, linear_in="matrix"):
    """The weight `diag(scale) @ matrix`, or `matrix @ diag(scale)`, around a matrix of any type.

    A product multiplies the other operand by the scale if the scaled axis is contracted, and its
    result otherwise; the matrix does not change. So a quantized matrix can hold a weight whose input
    channels were rescaled to be easier to quantize (AWQ, SmoothQuant). If the matrix quantizes
    activations as well, it does so after they were multiplied by the scale.

    Attributes:
      matrix: `[..., n, m]`, floating; usually itself implicit.
      scale: `[..., n]` for axis -2, `[..., m]` for axis -1; of any floating dtype: the weight has
        the matrix's dtype.
      axis: the scaled axis of the matrix, -2 or -1.

    Raises:
      ValueError: if the shapes do not fit together, or for an axis other than -1 and -2.
      TypeError: if `matrix` or `scale` is not of a floating dtype.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> w = hki.ScaledMatrix(jnp.ones((2, 3)), jnp.array([1.0, 0.5]))
      >>> print(hki.materialize(w))
      [[1.  1.  1. ]
       [0.5 0.5 0.5]]
      >>> print(hki.use_implicit_args(jnp.dot)(jnp.ones((1, 2)), w))
      [[1.5 1.5 1.5]]
    """

    matrix: Array
    scale: Array = frozen_field()
    axis: int = aux_field(default=-2)

    def __post_init__(self) -> None:
        if self.axis not in (-2, -1):
            raise value_error(f"ScaledMatrix: axis must be -2 or -1, got {self.axis!r}")
        for name in ("matrix", "scale"):
            dtype = np.dtype(getattr(getattr(self, name), "dtype", object))
            sentence = f"ScaledMatrix: {name} must be of a floating dtype, got {dtype.name}"
            with expecting(sentence, TypeError):
                chex.assert_type(np.zeros((), dtype), jnp.floating)
        matrix, scale = np.shape(self.matrix), np.shape(self.scale)
        sentence = (
            "ScaledMatrix: expected matrix [..., n, m] and scale "
            f"[..., {'n' if self.axis == -2 else 'm'}] for axis {self.axis}, got matrix "
            f"{list(matrix)}, scale {list(scale)}"
        )
        with expecting(sentence):
            chex.assert_shape(self.matrix, (..., None, None))
            chex.assert_shape(self.scale, (*matrix[:-2], matrix[self.axis]))
        super().__post_init__()

    def materialize(self) -> jax.Array:
        lead = range(self.ndim - 2)
        values = _times(dense(self.matrix), self.scale, (*lead, self._scaled_axis))
        return values.astype(self.dtype)

    @property
    def field_axes(self) -> dict[str, str]:  # type: ignore[override]
        """The scale has the scaled axis of the matrix."""
        return {"matrix": "nm", "scale": "nm"[self.axis]}

    def requantize(self, w: Array) -> Array:
        """Another weight with the scale of this one, unless the matrix needs another one for it.

        Args:
          w: a dense weight of this shape.

        Returns:
          The weight; `NotImplemented` if the matrix can't be quantized again.
        """
        if not is_implicit(self.matrix):
            return NotImplemented
        w = jnp.asarray(w)
        scale = self.matrix.new_scales(w, self.scale, self.axis)
        wide = scale.astype(formats.arithmetic_dtype(scale.dtype))
        inverse = jnp.where(wide == 0, 0, 1 / wide)
        lead = range(self.ndim - 2)
        matrix = self.matrix.requantize(_times(w, inverse, (*lead, self._scaled_axis)))
        return matrix if matrix is NotImplemented else self._replace(matrix=matrix, scale=scale)

    @property
    def _scaled_axis(self) -> int:
        return self.ndim + self.axis


def _times(x: jax.Array, scale: jax.Array, places: Sequence[int]) -> jax.Array:
    """Multiplies `x` by a scale along the axes `places` of `x`; in the dtype of `x`."""
    shape = [1] * x.ndim
    for i, size in zip(places, scale.shape, strict=True):
        shape[i] = size
    factor = jnp.transpose(scale, np.argsort(places).tolist()).reshape(shape)
    if (own := compat.explicit_sharding(x)) is not None:
        # The product has the type of `x`; a weight's scale may be split like another axis of `x`.
        pairs = zip(padded_spec(own.spec, x.ndim), shape, strict=True)
        entries = (entry if size > 1 else None for entry, size in pairs)
        factor = in_type(factor, NamedSharding(own.mesh, PartitionSpec(*entries)))
    with jax.numpy_dtype_promotion("standard"):  # whatever the model chose
        wide = jnp.result_type(x.dtype, scale.dtype)
    return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)


# --- products ------------------------------------------------------------------------------------


@binary_handler("dot_general")
def dot_with_scaled(call: BinaryCall, x: jax.Array, w: ScaledMatrix) -> Result:
    """Computes `x · diag(s) · m` as `(x · diag(s)) · m`, `x · m · diag(s)` as `(x · m) · diag(s)`."""
    if _too_coarse(x, call.params):
        return NotImplemented
    contract, batch = call.contracted, call.batch
    of_scale = (*range(w.ndim - 2), w._scaled_axis)
    in_x = dict(zip((*contract[1], *batch[1]), (*contract[0], *batch[0]), strict=True))
    if set(of_scale) <= in_x.keys():
        x = x.astype(product_dtype(x.dtype, w.dtype))  # as the product would have cast it
        return call(_times(x, w.scale, [in_x[i] for i in of_scale]), w.matrix)
    if set(of_scale) & set(contract[1]) or call.params.get("out_sharding") is not None:
        return NotImplemented  # a stack of scales for one `x`, or a result that is split
    out = call(x, w.matrix)
    in_out = call.in_result(x, w)[1]
    return _times(out, w.scale, [in_out[i] for i in of_scale])


def _too_coarse(x: jax.Array, params: EqnParams) -> bool:
    """Whether the other operand of a product, or its result, is too coarse to be scaled."""
    dtypes = x.dtype, params.get("preferred_element_type") or x.dtype
    return any(not jnp.issubdtype(d, np.inexact) or np.dtype(d).itemsize == 1 for d in dtypes)


@primitive_handler("ragged_dot_general")
def ragged_dot_with_scaled(
    primitive: Primitive, x: jax.Array, w: ScaledMatrix, sizes: jax.Array, **params: EqnParam
) -> Result:
    """Multiplies rows, or their products, by the scales of their groups."""
    numbers = row_numbers(x, w, **params)
    if numbers is None or _too_coarse(x, params):
        return NotImplemented
    scale = _scales_of_rows(w.scale, sizes, numbers.w_batch, x.shape[numbers.x_rows])
    if w._scaled_axis == numbers.w_contracted:
        of_scale = (*numbers.x_batch, numbers.x_rows, numbers.x_contracted)
        return default_handler(primitive, _times(x, scale, of_scale), w.matrix, sizes, **params)
    out = default_handler(primitive, x, w.matrix, sizes, **params)
    return _times(out, scale, range(out.ndim))


def _scales_of_rows(
    scale: jax.Array, sizes: jax.Array, batch: Sequence[int], num_rows: int
) -> jax.Array:
    """The scales `[batch..., rows, n]` of each row's group, from `[groups, n]` with axes `batch`.

    They are zero for a row without a group, like its product.
    """
    if batch:
        rest = [i - (i > batch[0]) for i in batch[1:]]
        one = functools.partial(_scales_of_rows, batch=rest, num_rows=num_rows)
        return jax.vmap(one, (batch[0], 0 if sizes.ndim > 1 else None))(scale, sizes)
    return scale.at[groups_of_rows(sizes, num_rows)].get(mode="fill", fill_value=0)


@binary_handler("conv_general_dilated")
def convolve_scaled(call: BinaryCall, x: jax.Array, w: ScaledMatrix) -> jax.Array:
    """Convolves with the dense kernel: a kernel is small compared with the images."""
    return jax.checkpoint(lambda x, w: call(x, dense(w)))(x, w)


@primitive_handler("gather")
def gather_rows(
    primitive: Primitive, w: ScaledMatrix, ids: jax.Array, **params: EqnParam
) -> Result:
    """Gathers rows of an embedding table, times their factors or the factors of the columns."""
    d, sizes = params["dimension_numbers"], params["slice_sizes"]
    if w.ndim != 2 or sizes[1] != w.shape[1] or 1 in d.collapsed_slice_dims:
        return NotImplemented
    filling = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if filling and params["fill_value"] is not None:
        return NotImplemented  # the fill value would be scaled (the default, NaN, may be)
    rows = primitive.bind(w.matrix, ids, **params)
    if w.axis == -1:
        return _times(rows, w.scale, [int(d.offset_dims[-1])])
    factors = primitive.bind(w.scale[:, None], ids, **params | dict(slice_sizes=(sizes[0], 1)))
    return (rows * factors.astype(rows.dtype)).astype(rows.dtype)


# --- the rest ------------------------------------------------------------------------------------


@primitive_handler(["slice", "dynamic_slice", "split"])
def cut_scaled(
    primitive: Primitive, w: ScaledMatrix, *starts: jax.Array, **params: EqnParam
) -> Result:
    """Slices or splits any axes of the matrix, and the scale along its axes."""
    return cut_fields(primitive, w, starts, params)


@primitive_handler("transpose")
def transpose_scaled(
    primitive: Primitive, w: ScaledMatrix, *, permutation: tuple[int, ...], **params: EqnParam
) -> Result:
    """Transposes the matrix and the scale's axis."""
    core = (w.ndim - 2, w.ndim - 1)
    if tuple(sorted(permutation[-2:])) != core:
        return NotImplemented
    matrix = primitive.bind(w.matrix, permutation=permutation, **params)
    scale = jnp.transpose(w.scale, (*permutation[:-2], w.ndim - 2))
    axis = w.axis if permutation[-1] == core[1] else -3 - w.axis
    return w._replace(matrix=matrix, scale=scale, axis=axis, shape=None, dtype=None)


@primitive_handler(["mul", "div"])
def rescale(primitive: Primitive, w: ScaledMatrix, x: jax.Array, **params: EqnParam) -> Result:
    """Multiplies or divides the scale by a number or factors along its axis, else the matrix."""
    if not fits(x, w):
        return NotImplemented
    other = w.ndim - 3 - w.axis  # the axis of the matrix without a scale
    if x.ndim and x.shape[other] > 1:
        return w._replace(matrix=primitive.bind(w.matrix, x, **params))
    apply = jnp.multiply if primitive is jax.lax.mul_p else jnp.divide
    return w._replace(scale=apply(w.scale, x if x.ndim == 0 else jnp.squeeze(x, other)))


@primitive_handler("neg")
def negate_scaled(_: Primitive, w: ScaledMatrix, **params: EqnParam) -> ScaledMatrix:
    """Negates the scale: codes of the matrix may have no negative ones."""
    return w._replace(scale=-w.scale)


@primitive_handler("convert_element_type")
def cast_scaled(
    primitive: Primitive, w: ScaledMatrix, *, new_dtype: DType, **params: EqnParam
) -> Result:
    """Casts the matrix to another floating dtype; the scale keeps its digits."""
    if not jnp.issubdtype(new_dtype, np.floating):
        return NotImplemented
    matrix = primitive.bind(w.matrix, new_dtype=new_dtype, **params)
    return w._replace(matrix=matrix, shape=None, dtype=None)
