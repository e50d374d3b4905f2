"""`quantized_matmul`: activations times a batch of quantized matrices, as a JAX primitive.

The primitive is linear in the activations and in the scales; its rules for differentiation, batching
and lowering are here. It is lowered to the kernels of `cpu.native` on CPUs, to the kernels of
`gpu.pallas` on NVIDIA GPUs if these are enabled, and to `reference.product` on other devices and for
operands that a kernel does not serve.

If a matrix has an `activation`, the activations are first rounded to that format. The rounding has the
gradient one: the derivative with respect to the activations is the product of their tangent, not
rounded, and the matrix.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core import compat
from haiku_implicit.core.sharding import mapped_first
from haiku_implicit.core.typing import Array, Aval, DType, EqnParam, Precision, TreeDef
from haiku_implicit.quantized.cpu import native
from haiku_implicit.quantized.gpu import pallas
from haiku_implicit.quantized.layout import Order, matrices, may_be_served, sizes
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.products import reference
from haiku_implicit.quantized.products.by_parts import Fixed, by_parts, is_wanted
from haiku_implicit.quantized.products.partitioned import (
    WHOLE,
    Axes,
    Names,
    Parts,
    devices_of,
    needs_devices,
    partitioned,
)

quantized_matmul_p = Primitive("quantized_matmul")


def quantized_matmul(
    x: jax.Array, q: QuantizedMatrix, *, order: Order, precision: Precision, dtype: DType
) -> jax.Array:
    """Computes `x @ q` for a batch of matrices, without a dense copy of them.

    Args:
      x: `[batch..., m..., i]`, floating.
      q: a quantized `[batch..., i, o]` with dense scales for each row. If it has an `activation`, each
        row of `x` is rounded to that format.
      order: the axes of the leaves of `q`: first the batch axes, then the axis of the rows, then the
        last axis, which is stored in groups. Kernels read the leaves without a transposition.
      precision: as for `jax.lax.dot_general`.
      dtype: the dtype of the result.

    Returns:
      `[batch..., m..., o]`. (Only kernels merge these axes: the primitive knows how each one is split
      over devices.)
    """
    leaves, treedef = jax.tree.flatten(q)
    # In `shard_map`, the transpose of this sums the gradients of `x` over the devices' parts of q.
    operands = [compat.vary_like(y, (x, *leaves)) for y in (x, *leaves)]
    params = dict(treedef=treedef, order=order, precision=precision, dtype=np.dtype(dtype))
    return quantized_matmul_p.bind(*operands, mesh=needs_devices(), **params)


def _abstract(x: Aval, *leaves: Aval, treedef: TreeDef, order: Any, dtype: DType, **_: Any) -> Any:
    columns = sizes(treedef.unflatten(leaves), order)[-1]
    return x.update(shape=(*x.shape[:-1], columns), dtype=dtype, weak_type=False)


def _with_standard_promotion(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps code that runs during transformations or lowering; the model's promotion may be strict."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fun(*args, **kwargs)

    return run


def _of_matrices(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Extends a product of `[batch, m, i]` to any number of axes instead of `batch` and `m`."""

    @_with_standard_promotion
    def run(
        x: jax.Array, *leaves: jax.Array, treedef: TreeDef, order: Order, **params: EqnParam
    ) -> Any:
        flat = x.reshape(_flat(x.shape, order))
        out = fun(flat, treedef.unflatten(leaves), order=order, **params)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    return run


def _flat(shape: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """Merges the axes of activations: returns the shape `[batch, m, i]`."""
    batch, rows = shape[: len(order) - 2], shape[len(order) - 2 : -1]
    return math.prod(batch), math.prod(rows), shape[-1]


_reference = _of_matrices(reference.product)


@functools.partial(jax.jit, static_argnames=("treedef", "order", "precision", "dtype", "mesh"))
def _run(*operands: jax.Array, mesh: EqnParam, **params: EqnParam) -> jax.Array:
    """Computes the product outside of any trace: compiles the primitive.

    If the operands are not tracers, JAX wants the operations one by one: under `jax.disable_jit()`, or
    under `jax_debug_nans` to find the operation that gave the first NaN.
    """
    if isinstance(operands[0], jax.core.Tracer):
        return quantized_matmul_p.bind(*operands, mesh=mesh, **params)
    return _reference(*operands, **params)


# --- differentiation -----------------------------------------------------------------------------


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, mesh: EqnParam, **params: EqnParam
) -> tuple[Array, Array]:
    """Differentiates the product: linear in the activations, and in scale and offset together."""
    bind = functools.partial(quantized_matmul_p.bind, mesh=mesh)
    x, codes, *scales = primals
    of_x, of_codes, *of_scales = tangents
    out = bind(*primals, **params)
    terms = []
    if not isinstance(of_x, ad.Zero):
        q = params["treedef"].unflatten(primals[1:])
        straight = params | dict(treedef=jax.tree.structure(q._replace(activation=None)))
        terms.append(bind(of_x, codes, *scales, **straight))
    if not all(isinstance(t, ad.Zero) for t in of_scales):
        terms.append(bind(x, codes, *map(ad.instantiate_zeros, of_scales), **params))
    if not isinstance(of_codes, ad.Zero):  # floating codes, differentiated like any number

        def by_codes(codes: jax.Array) -> jax.Array:
            return _reference(x, codes, *scales, **params)

        terms.append(jax.jvp(by_codes, (codes,), (of_codes,))[1])
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(jnp.add, terms)


def _transpose(
    ct: Array,
    x: Array,
    *leaves: Array,
    treedef: TreeDef,
    order: Any,
    precision: Precision,
    **_: Any,
) -> Any:
    if isinstance(ct, ad.Zero):
        return [None, *[None] * len(leaves)]
    if ad.is_undefined_primal(x):
        q = treedef.unflatten(leaves)
        q = q._replace(axis=-3 - q.axis)
        of_x = quantized_matmul(ct, q, order=order, precision=precision, dtype=x.aval.dtype)
        return [of_x, *[None] * len(leaves)]
    codes, *undefined = leaves
    structs = [jax.ShapeDtypeStruct(s.aval.shape, s.aval.dtype) for s in undefined]
    q = treedef.unflatten((codes, *structs))
    (of_x, of_codes, of_scale, *_), of_ct, pieces = dataclasses.astuple(_axes(ct.ndim, q, order))
    axes = Axes((of_ct, of_x, of_codes), (None, *of_scale), pieces)
    shapes = tuple((s.shape, s.dtype) for s in structs)
    fun = Fixed(_gradients_of_scales, (treedef, order, precision, shapes, of_scale))
    if is_wanted(ct, x, codes):
        found = by_parts(fun, axes, ct, x, codes)
    else:
        found = fun(ct, x, codes, parts=WHOLE)
    scales = (y.astype(s.dtype) for y, s in zip(found, structs, strict=True))
    return [None, None, *scales]


@_with_standard_promotion
def _gradients_of_scales(
    treedef: TreeDef,
    order: Order,
    precision: Precision,
    structs: Sequence[tuple[tuple[int, ...], Any]],
    names: Names,
    *operands: jax.Array,
    parts: Parts,
) -> Any:
    """Returns the gradients with respect to scales and offsets, stacked.

    Args:
      treedef: the structure of the matrix.
      order, precision: as for `quantized_matmul`.
      structs: shapes and dtypes of scale (and offset).
      names: the names of their axes.
      *operands: the gradient with respect to the product, the activations, and the codes.
      parts: the parts that these are.
    """
    ct, x, codes = operands
    # If the operands vary over a mesh, these do, too. Else JAX would sum gradients of scales over
    # the devices twice: here, and where `quantized_matmul` made the scales vary.
    zeros = [
        compat.vary_like(
            jnp.zeros([n // parts.count(a) for n, a in zip(shape, names, strict=True)], dtype),
            operands,
        )
        for shape, dtype in structs
    ]
    q = matrices(treedef.unflatten((codes, *zeros)), order)
    ct, x = (y.reshape(_flat(y.shape, order)) for y in (ct, x))
    found = reference.gradients_of_scales(ct, x, q, precision)
    lead, back = np.take(codes.shape, order[:-1]), tuple(map(int, np.argsort(order)))
    return jnp.stack([jnp.transpose(s.reshape(*lead, s.shape[-1]), back) for s in found])


# --- batching ------------------------------------------------------------------------------------


def _batch(operands: Sequence[Array], axes: Any, *, order: Any, **params: EqnParam) -> Any:
    """Batches the product: if only activations are batched, as more rows; else as more matrices."""
    x, *leaves = operands
    bind = functools.partial(quantized_matmul_p.bind, **params)
    if all(d is None for d in axes[1:]):
        first_row = len(order) - 2
        return bind(jnp.moveaxis(x, axes[0], first_row), *leaves, order=order), first_row
    return bind(*mapped_first(operands, axes), order=(0, *(i + 1 for i in order))), 0


# --- lowering ------------------------------------------------------------------------------------


def _lower_on_cpu(ctx: Any, *operands: Array, **params: EqnParam) -> Any:
    kernel = native.native_matmul
    return _lower(ctx, *operands, kernel=kernel, applies=native.applies, **params)


def _lower_on_gpu(ctx: Any, *operands: Array, **params: EqnParam) -> Any:
    kernel = pallas.pallas_matmul
    return _lower(ctx, *operands, kernel=kernel, applies=pallas.applies, **params)


def _lower(
    ctx: Any,
    *operands: Array,
    kernel: Callable[..., Any],
    applies: Callable[..., bool],
    mesh: EqnParam,
    **params: EqnParam,
) -> Any:
    """Lowers the product to a kernel if it applies, or to products of shards on several devices."""
    x, *leaves = ctx.avals_in
    q: QuantizedMatrix = params["treedef"].unflatten(leaves)
    devices = devices_of(ctx.module_context)
    if mesh is not None and devices is not None and devices.number > 1:

        def part(*operands: jax.Array, parts: Parts) -> jax.Array:
            return quantized_matmul_p.bind(*operands, mesh=mesh, **params)

        fun = partitioned(part, _axes(len(x.shape), q, params["order"]), devices)
        return mlir.lower_fun(fun, multiple_results=False)(ctx, *operands)
    flat = jax.ShapeDtypeStruct(_flat(x.shape, params["order"]), x.dtype)
    # (The partitioner would gather all operands of a foreign call on each device.)
    on_one = devices is not None and devices.number == 1
    known = may_be_served(flat, q, params["precision"], params["dtype"])
    fun = _of_matrices(kernel) if on_one and known and applies(flat, q) else _reference
    return mlir.lower_fun(fun, multiple_results=False)(ctx, *operands, **params)


def _axes(ndim: int, q: QuantizedMatrix, order: Order) -> Axes:
    """Names the axes of `x`, codes, scale and offset (if there are), and the result."""
    batch = [f"batch{i}" for i in range(len(order) - 2)]
    rows = [f"row{i}" for i in range(ndim - 1 - len(batch))]
    inputs, outputs = ("along", "across") if q.axis == -2 else ("across", "along")

    def stored(last: str | None) -> tuple[str | None, ...]:
        at = dict(zip(order, (*batch, "across", last), strict=True))
        return tuple(at[i] for i in range(len(order)))

    # A scale per channel belongs to all parts of the channel.
    of_scale = stored("along" if q.num_groups > 1 else None)
    scales = len(jax.tree.leaves(q)) - 1
    operands = (*batch, *rows, inputs), stored("along"), *[of_scale] * scales
    pieces = dict(across=q.codes.shape[order[-2]], along=_pieces(q))
    # A rounding of activations needs whole rows, or the whole part of a row that meets a group.
    by_groups = q.axis == -2 and q.num_groups > 1 and q.activation_config.tile_size is not None
    if q.activation is not None and not by_groups:
        pieces[inputs] = 1
    return Axes(operands, (*batch, *rows, outputs), tuple(pieces.items()))


def _pieces(q: QuantizedMatrix) -> int:
    """Returns the number of pieces of the grouped axis: groups, or the codes of one group of bytes."""
    if q.num_groups > 1 or not isinstance(q, QuantizedMatrix):
        return q.num_groups
    one_byte = formats.find(q.format).bits == 8 and not q.padding
    return q.codes.shape[-1] if one_byte else 1


quantized_matmul_p.def_impl(_run)
quantized_matmul_p.def_abstract_eval(_abstract)
ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose
batching.primitive_batchers[quantized_matmul_p] = _batch
mlir.register_lowering(
    quantized_matmul_p,
    mlir.lower_fun(lambda *x, mesh, **params: _reference(*x, **params), multiple_results=False),
)
mlir.register_lowering(quantized_matmul_p, _lower_on_cpu, platform="cpu")
mlir.register_lowering(quantized_matmul_p, _lower_on_gpu, platform="cuda")
