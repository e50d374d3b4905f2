"""`multiply_blocks`: blocks of numbers times a Hadamard matrix, as a JAX primitive.

On CPUs a native kernel adds and subtracts. XLA's own operations are products with one or two small
matrices, which take up to five times as long.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from haiku_implicit.core.sharding import is_split
from haiku_implicit.core.typing import EqnParam
from haiku_implicit.quantized.cpu import build, native
from haiku_implicit.quantized.products.partitioned import devices_of

# The fastest sizes for XLA on a CPU, for one row and for 128.
_ONE_PRODUCT = 128
_COLUMNS = 64
_SMALLEST_NATIVE = 8

hadamard_p = Primitive("hadamard")


def multiply_blocks(x: jax.Array, block: int) -> jax.Array:
    """Multiplies blocks of the last axis by the Hadamard matrix with rows of length one.

    Args:
      x: `[..., n]`, floating.
      block: a power of two that divides `n`.
    """
    # (An explicit mesh axis that splits blocks has to follow operations of its own.)
    return _by_products(x, block=block) if is_split([x]) else hadamard_p.bind(x, block=block)


def _by_products(x: jax.Array, *, block: int) -> jax.Array:
    """Multiplies by a Hadamard matrix; by a large one as a (Kronecker) product of two."""
    columns = block if block <= _ONE_PRODUCT else _COLUMNS
    left, right = _hadamard(block // columns), _hadamard(columns)
    parts = x.reshape(*x.shape[:-1], -1, len(left), columns)
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    if len(left) > 1:
        parts = product("pr,...rq->...pq", left.astype(x.dtype), parts)
    parts = product("...pq,qs->...ps", parts, right.astype(x.dtype))
    return parts.reshape(x.shape) * (1 / math.sqrt(block))


def _hadamard(size: int) -> np.ndarray:
    """The Hadamard matrix of a power of two, of ones and minus ones."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@functools.partial(jax.jit, static_argnames="block")
def _run(x: jax.Array, *, block: int) -> jax.Array:
    """Compiles the primitive outside of any trace; under `disable_jit` it calls the function."""
    is_traced = isinstance(x, jax.core.Tracer)
    return multiply_blocks(x, block) if is_traced else _by_products(x, block=block)


def _batch(operands: Sequence[jax.Array], axes: Sequence[int], **params: EqnParam) -> Any:
    return hadamard_p.bind(jnp.moveaxis(operands[0], axes[0], 0), **params), 0


def _lower_on_cpu(ctx: Any, x: Any, *, block: int) -> Any:
    (aval,), devices = ctx.avals_in, devices_of(ctx.module_context)
    # (The partitioner would gather the operand of a foreign call on each device.)
    on_one = devices is not None and devices.number == 1 and aval.size > 0
    has_kernel = aval.dtype == jnp.float32 and block >= _SMALLEST_NATIVE
    use_it = on_one and has_kernel and build.available()
    fun = native.multiply_hadamard if use_it else _by_products
    return mlir.lower_fun(fun, multiple_results=False)(ctx, x, block=block)


hadamard_p.def_impl(_run)
hadamard_p.def_abstract_eval(lambda x, **_: x)
# The matrix is symmetric.
ad.deflinear2(hadamard_p, lambda ct, _, **params: [hadamard_p.bind(ct, **params)])
batching.primitive_batchers[hadamard_p] = _batch
mlir.register_lowering(hadamard_p, mlir.lower_fun(_by_products, multiple_results=False))
mlir.register_lowering(hadamard_p, _lower_on_cpu, platform="cpu")
