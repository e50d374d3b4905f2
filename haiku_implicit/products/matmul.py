"""`quantized_matmul`: activations times a quantized matrix, as a JAX primitive.

The primitive is linear in the activations and in the scales, and has its rules for differentiation,
batching and lowering here. On a CPU it becomes the kernel of `native_matmul`, on NVIDIA GPUs that of
`pallas_matmul`, elsewhere (and where these do not apply) `reference`, which dequantizes blocks of the
matrix.

Where the matrix says so (`activation`), rows of activations are rounded first. The derivative by them
passes that straight through, and is the product of the tangent as it is.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import compat
from haiku_implicit.core.array import is_implicit
from haiku_implicit.numerics.layout import Order, matrices, sizes
from haiku_implicit.numerics.operands import (
    QuantizedOperand,
    quantize_rows,
    rounded_rows,
    stored_operand,
)
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix
from haiku_implicit.products.bilinear import Product, multiply
from haiku_implicit.products.blocked import slices
from haiku_implicit.products.cpu import native
from haiku_implicit.products.gpu import pallas

quantized_matmul_p = Primitive("quantized_matmul")

# Of the matrix at most this part is dense at a time, scales included; and at least so many elements.
_DENSE = 1 / 9
_BLOCK = 1 << 15


def quantized_matmul(
    x: jax.Array,
    q: QuantizedMatrix,
    *,
    order: Order | None = None,
    precision: Any = None,
    dtype: Any = None,
) -> jax.Array:
    """`x @ q` for a batch of matrices, of which no dense copy is made.

    Args:
      x: `[batch, m, i]`, floating.
      q: a quantized `[batch, i, o]`. Where it has an `activation`, each row of `x` is rounded to that.
      order: where leaves of `q` have several axes for the batch, or their axes in another order: which
        of their axes are those of the batch, and then the rows and the one that is stored in groups
        (the last of them). The native kernel reads them where they are.
      precision: as for `jax.lax.dot_general`.
      dtype: of the result; that of `x` and `q` together if None.

    Returns:
      `[batch, m, o]`.
    """
    q = _with_dense_scales(q.with_row_scales())
    dtype = np.dtype(jnp.promote_types(x.dtype, q.dtype) if dtype is None else dtype)
    leaves, treedef = jax.tree.flatten(q)
    # In `shard_map`: the transpose of this sums what the devices' parts of the matrix give to `x`.
    operands = [compat.vary_like(y, (x, *leaves)) for y in (x, *leaves)]
    order = tuple(range(leaves[0].ndim)) if order is None else order
    params = dict(treedef=treedef, order=order, precision=precision, dtype=dtype)
    return quantized_matmul_p.bind(*operands, **params)


def _with_dense_scales(q: QuantizedMatrix) -> QuantizedMatrix:
    """The same with scales that are not quantized themselves."""
    dense = [s.materialize() if is_implicit(s) else s for s in (q.scale, q.offset)]
    return q._replace(scale=dense[0], offset=dense[1], dtype=q.dtype)


def _with_standard_promotion(fun: Callable[..., Any]) -> Callable[..., Any]:
    """What runs when a program is transformed or lowered; the model's promotion may be strict."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fun(*args, **kwargs)

    return run


# --- by blocks of the dequantized matrix ---------------------------------------------------------


@_with_standard_promotion
def reference(
    x: jax.Array, *leaves: jax.Array, treedef: Any, order: Order, precision: Any, dtype: Any
) -> jax.Array:
    """The product as XLA computes it, a block of rows after another."""
    run = functools.partial(_reference_2d, precision=precision, dtype=dtype)
    flat = [matrices(leaf, order) for leaf in leaves]
    if x.shape[0] > 1:
        return jax.vmap(run)(x, treedef.unflatten(flat))
    return run(x[0], treedef.unflatten([leaf[0] for leaf in flat]))[None]


def _reference_2d(x: jax.Array, q: QuantizedMatrix, precision: Any, dtype: Any) -> Any:
    along_rows = q.axis == -1
    # Sums of blocks are not rounded in between.
    wide = jnp.promote_types(dtype, jnp.float32) if along_rows else dtype
    numbers = (((1,), (0 if along_rows else 1,)), ((), ()))
    out = compat.vary_like(jnp.zeros((x.shape[0], q.shape[-1]), wide), [x, *jax.tree.leaves(q)])
    operand = None  # the rounded activations, once for all blocks
    if q.activation is not None and along_rows:
        x = rounded_rows(x, q)
    elif q.activation is not None:
        operand = quantize_rows(x, q)

    def dot(x: jax.Array, part: QuantizedMatrix) -> jax.Array:
        part = part._replace(axis=-1)  # as it is stored, so that nothing is transposed
        if operand is not None:
            return _dot_of_rounded(operand, part, numbers, precision, dtype)
        w = part.materialize()
        return jax.lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=wide)

    def block(out: jax.Array, start: Any, done: Any, part: QuantizedMatrix) -> jax.Array:
        if not along_rows:
            return jax.lax.dynamic_update_slice_in_dim(out, dot(x, part), start, 1)
        rows = part.codes.shape[-2]
        columns = jax.lax.dynamic_slice_in_dim(x, start, rows, axis=1)
        fresh = start + jnp.arange(rows) >= done
        return out + dot(jnp.where(fresh, columns, 0), part)

    return _over_blocks(block, out, q).astype(dtype)


def _dot_of_rounded(
    x: QuantizedOperand, w: QuantizedMatrix, numbers: Any, precision: Any, dtype: Any
) -> jax.Array:
    """The product of rounded rows, of integers or 8-bit floats where both are such."""
    options = dict(dimension_numbers=numbers, precision=precision)
    axes, summed = ((0, None), (None, 0)), ((1, 1),)
    product = Product(jax.lax.dot_general, tuple(options.items()), axes, summed)
    stored = stored_operand(w)
    other = w.materialize() if stored is None else stored
    wide = jnp.promote_types(w.dtype, x.wide)
    return multiply(product, x, other, (), wide, dtype)


def _over_blocks(block: Callable[..., jax.Array], out: jax.Array, q: QuantizedMatrix) -> jax.Array:
    """Folds `block(out, start, done, part)` over parts of the rows.

    All are of the same size; the last one may start before `done`, where the one before it stopped.
    """
    rows = q.codes.shape[-2]
    part = max(_DENSE - q.scale.size / q.size, _DENSE / 4)
    count = max(min(q.size // _BLOCK, math.ceil(1 / part), rows), 1)
    if count == 1:
        return block(out, 0, 0, q)
    size = -(-rows // count)

    def body(out: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        start = jnp.minimum(i * size, rows - size)
        return block(out, start, i * size, slices(q, start, size, axis=-2)), None

    return jax.lax.scan(body, out, jnp.arange(-(-rows // size)))[0]


# --- rules ---------------------------------------------------------------------------------------


def _abstract(x: Any, *leaves: Any, treedef: Any, order: Any, dtype: Any, **_: Any) -> Any:
    columns = sizes(treedef.unflatten(leaves), order)[-1]
    return x.update(shape=(*x.shape[:-1], columns), dtype=dtype, weak_type=False)


@functools.partial(jax.jit, static_argnames=("treedef", "order", "precision", "dtype"))
def _run(*operands: jax.Array, **params: Any) -> jax.Array:
    return quantized_matmul_p.bind(*operands, **params)


def _jvp(primals: Any, tangents: Any, *, treedef: Any, **params: Any) -> Any:
    """The product is linear in the activations, and in scale and offset together."""
    bind = functools.partial(quantized_matmul_p.bind, treedef=treedef, **params)
    x, codes, *scales = primals
    of_x, of_codes, *of_scales = tangents
    out = bind(*primals)
    terms = []
    if not isinstance(of_x, ad.Zero):
        straight = jax.tree.structure(treedef.unflatten(primals[1:])._replace(activation=None))
        terms.append(bind(of_x, codes, *scales, treedef=straight))
    if not all(isinstance(t, ad.Zero) for t in of_scales):
        terms.append(bind(x, codes, *map(ad.instantiate_zeros, of_scales)))
    if not isinstance(of_codes, ad.Zero):  # floating codes, differentiated like any number

        def by_codes(codes: jax.Array) -> jax.Array:
            return reference(x, codes, *scales, treedef=treedef, **params)

        terms.append(jax.jvp(by_codes, (codes,), (of_codes,))[1])
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(jnp.add, terms)


def _transpose(
    ct: Any, x: Any, *leaves: Any, treedef: Any, order: Any, precision: Any, dtype: Any
) -> Any:
    nothing = [None] * (1 + len(leaves))
    if isinstance(ct, ad.Zero):
        return nothing
    if not ad.is_undefined_primal(x):
        scales = _transpose_scales(ct, x, leaves, treedef, order, precision)
        return [None, None, *scales]
    q = treedef.unflatten(leaves)
    q = q._replace(axis=-3 - q.axis)
    of_x = quantized_matmul(ct, q, order=order, precision=precision, dtype=x.aval.dtype)
    return [of_x, *nothing[1:]]


@_with_standard_promotion
def _transpose_scales(
    ct: Any, x: Any, leaves: Any, treedef: Any, order: Any, precision: Any
) -> Any:
    """What scales and offsets get, a block of rows of the matrix after another."""
    codes, *undefined = leaves
    lead = np.take(codes.shape, order[:-1])
    codes = matrices(codes, order)
    zeros = [matrices(jnp.zeros(s.aval.shape, s.aval.dtype), order) for s in undefined]
    q = treedef.unflatten((codes, *zeros))
    if q.activation is not None:
        x = rounded_rows(x, q)

    def one(ct: jax.Array, x: jax.Array, codes: jax.Array, *zeros: jax.Array) -> Any:
        q = treedef.unflatten((codes, *zeros))
        rows_first = (ct, x) if q.axis == -2 else (x, ct)

        def block(out: Any, start: Any, done: Any, part: QuantizedMatrix) -> Any:
            codes, *scales = jax.tree.leaves(part)
            by_row, other = rows_first
            by_row = jax.lax.dynamic_slice_in_dim(by_row, start, codes.shape[-2], axis=1)
            of_w = jax.lax.dot(by_row.T, other, precision=precision, preferred_element_type=wide)

            def values(*scales: jax.Array) -> jax.Array:
                dense = treedef.unflatten((codes, *scales))._replace(axis=-1).materialize()
                return dense.astype(wide)

            found = jax.linear_transpose(values, *scales)(of_w)
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(whole, new, start, axis=-2)
                for whole, new in zip(out, found, strict=True)
            )

        return _over_blocks(block, _varying(tuple(zeros), ct, x, codes), q)

    wide = jnp.promote_types(jnp.promote_types(ct.dtype, x.dtype), jnp.float32)
    found = jax.vmap(one)(ct, x, codes, *zeros)
    back = tuple(map(int, np.argsort(order)))
    return [jnp.transpose(s.reshape(*lead, s.shape[-1]), back) for s in found]


def _varying(values: Any, *like: Any) -> Any:
    return tuple(compat.vary_like(v, like) for v in values)


def _batch(operands: Any, axes: Any, *, order: Any, **params: Any) -> Any:
    """Batched activations alone are more rows; batched matrices are more of them."""
    x, *leaves = operands
    size = next(y.shape[d] for y, d in zip(operands, axes, strict=True) if d is not None)
    bind = functools.partial(quantized_matmul_p.bind, **params)
    if all(d is None for d in axes[1:]):
        x = jnp.moveaxis(x, axes[0], 1)  # [batch, size, m, i]
        out = bind(x.reshape(x.shape[0], -1, x.shape[-1]), *leaves, order=order)
        return out.reshape(*x.shape[:-1], out.shape[-1]), 1
    stacked = [
        jnp.broadcast_to(y, (size, *y.shape)) if d is None else jnp.moveaxis(y, d, 0)
        for y, d in zip(operands, axes, strict=True)
    ]
    x, *leaves = stacked
    order = (0, *(i + 1 for i in order))
    out = bind(x.reshape(-1, *x.shape[2:]), *leaves, order=order)
    return out.reshape(size, -1, *out.shape[1:]), 0


def _lower_on_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lower(ctx, operands, params, native.native_matmul, native.applies)


def _lower_on_gpu(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lower(ctx, operands, params, pallas.pallas_matmul, pallas.applies)


def _lower(ctx: Any, operands: Any, params: Any, kernel: Any, applies: Any) -> Any:
    x, *leaves = ctx.avals_in
    alone = _on_one_device(ctx.module_context)
    served = alone and applies(x, leaves, **params)
    fun = _with_standard_promotion(kernel) if served else reference
    return mlir.lower_fun(fun, multiple_results=False)(ctx, *operands, **params)


def _on_one_device(context: Any) -> bool:
    """Whether a program, or a part of it within `shard_map`, runs on whole arrays in this process.

    The partitioner would bring all of the operands of a foreign call to each device.
    """
    if getattr(context.lowering_parameters, "for_export", False):
        return False  # to run elsewhere
    axes = context.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices == 1
    if hasattr(axes, "manual_axes"):
        return set(axes.mesh.axis_names) == set(axes.manual_axes)
    return hasattr(axes, "axis_env")


quantized_matmul_p.def_impl(_run)
quantized_matmul_p.def_abstract_eval(_abstract)
ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose
batching.primitive_batchers[quantized_matmul_p] = _batch
mlir.register_lowering(quantized_matmul_p, mlir.lower_fun(reference, multiple_results=False))
mlir.register_lowering(quantized_matmul_p, _lower_on_cpu, platform="cpu")
mlir.register_lowering(quantized_matmul_p, _lower_on_gpu, platform="cuda")
