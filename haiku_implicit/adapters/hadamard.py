"""`multiply_blocks`: blocks of numbers times a Hadamard matrix, as a JAX primitive.

On CPUs a native kernel adds and subtracts. XLA's own operations are products with one or two small
matrices, which take up to five times as long.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from haiku_implicit.core.array import ImplicitArray
from haiku_implicit.core.dispatch import primitive_handler
from haiku_implicit.core.sharding import is_split
from haiku_implicit.core.transform import use_implicit_args
from haiku_implicit.core.typing import Aval, Primitive, Result
from haiku_implicit.quantized.cpu import native
from haiku_implicit.quantized.products.kernel_primitive import kernel_primitive

# The fastest sizes for XLA on a CPU, for one row and for 128.
_ONE_PRODUCT = 128
_COLUMNS = 64
_SMALLEST_NATIVE = 8


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
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // block, len(left), columns)
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


def _serves(aval: Aval, *, block: int) -> bool:
    return aval.dtype == jnp.float32 and block >= _SMALLEST_NATIVE


hadamard_p = kernel_primitive(
    "hadamard", _by_products, native.multiply_hadamard, params=["block"], serves=_serves
)
hadamard_p.def_abstract_eval(lambda x, **_: x)
# The matrix is symmetric.
ad.deflinear2(hadamard_p, lambda ct, _, **params: [hadamard_p.bind(ct, **params)])


@primitive_handler(hadamard_p)
def multiply_implicit_blocks(primitive: Primitive, x: ImplicitArray, *, block: int) -> Result:
    """Multiplies implicit inputs by XLA's operations, which have rules: zeros stay zeros."""
    return use_implicit_args(functools.partial(_by_products, block=block))(x)
