"""The family of implicit types as one table: how to make an array of each, and its dense twin.

A newcomer to the family is a line in `CASES`; `test_contract.py` then runs it through every primitive.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import haiku_implicit as hki
from haiku_implicit.adapters import Rotated
from haiku_implicit.arrays.deferred import Deferred

SHAPE = (4, 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """One member of the table.

    Attributes:
      make: `(key, shape)` to an implicit array of that shape, whose last two axes are the matrix.
      dense: what the array stands for, by other means than its own `materialize` where there are any.
      batched: whether leading axes of `shape` may be batch axes (`core_ndim`, or a static shape).
      dtype: the dtype of the dense array.
      singular: whether the dense array is a singular matrix.
    """

    make: Callable[..., hki.ImplicitArray]
    dense: Callable[[Any], Any] = hki.materialize
    batched: bool = True
    dtype: Any = jnp.float32
    singular: bool = False

    def __call__(self, seed: int = 0, batch: tuple[int, ...] = ()) -> hki.ImplicitArray:
        """An array of this case: a 4 x 4 matrix, or a batch of them."""
        return made(self, seed, (*batch, *SHAPE))

    @property
    def core_ndim(self) -> int | None:
        """That of the type, for which nothing has to be computed."""
        made = jax.eval_shape(lambda key: self.make(key, SHAPE), jax.random.key(0))
        return made.core_ndim

    def stacked(self, seed: int, length: int) -> hki.ImplicitArray:
        """Arrays of this case whose leaves are stacked from outside, as `jax.vmap` expects them."""
        arrays = [self(seed + i) for i in range(length)]
        return jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), *arrays)


@functools.cache
def made(case: Case, seed: int, shape: tuple[int, ...]) -> hki.ImplicitArray:
    """An array of a case, by one program and not one for each operation, once for all tests."""
    return jax.jit(lambda key: case.make(key, shape))(jax.random.key(seed))


# --- types that a user might write --------------------------------------------------------------


@dataclasses.dataclass
class Outer(hki.ImplicitArray, core_ndim=2):
    """The matrix `u vᵀ`: batch axes, a shape that only `materialize` tells, a few rules."""

    u: hki.ArrayValue
    v: hki.ArrayValue

    def materialize(self):
        return self.u[..., :, None] * self.v[..., None, :]


@hki.primitive_handler("neg")
def negate_outer(primitive, x: Outer, **params):
    return Outer(-x.u, x.v)


@hki.primitive_handler("mul")
def multiply_outers(primitive, x: Outer, y: Outer, **params):
    return Outer(x.u * y.u, x.v * y.v)


@hki.primitive_handler("transpose")
def transpose_outer(primitive, x: Outer, *, permutation):
    return Outer(x.v, x.u) if permutation == (1, 0) else NotImplemented


@dataclasses.dataclass
class Diagonal(hki.ImplicitArray):
    """The diagonal matrix of `d`: no batch axes and no rule at all."""

    d: hki.ArrayValue

    def compute_shape(self):
        return self.d.shape * 2

    def compute_dtype(self):
        return self.d.dtype

    def materialize(self):
        return jnp.diag(self.d)


class Nought(hki.ImplicitArray):
    """Zeros as the README of qax has them: no decorator, no fields, an explicit shape."""

    default_dtype = jnp.float32

    def materialize(self):
        return jnp.zeros(self.shape, self.dtype)


@hki.primitive_handler("mul")
def multiply_nought(primitive, x: Nought, y: hki.ArrayValue, **params):
    out = jax.eval_shape(
        lambda a, b: primitive.bind(a, b, **params),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(y.shape, y.dtype),
    )
    return Nought(shape=out.shape, dtype=out.dtype)


# --- values --------------------------------------------------------------------------------------
# All values are multiples of 1/256 of a few bits, so that sums and products of the factors are exact
# in float32, in whatever order XLA takes them: rounding, sorting and comparing then agree to the bit.


def fractions(key, shape, low, high, denominator):
    """Random multiples of `1 / denominator` in `[low / denominator, high / denominator)`."""
    return jax.random.randint(key, shape, low, high).astype(jnp.float32) / denominator


def matrix(key, shape):
    """Values in (0, 1), a heavy diagonal: positive definite, in the domain of most functions."""
    n, m = shape[-2:]
    return fractions(key, shape, 1, 8, 128) + jnp.eye(n, m) / 2


def make_lora(key, shape, w=matrix, alpha=4.0, rank=2):
    *batch, n, m = shape
    keys = jax.random.split(key, 3)
    a = fractions(keys[1], (*batch, n, rank), 1, 3, 16)
    b = fractions(keys[2], (*batch, rank, m), 1, 3, 16)
    return hki.LoRA(w(keys[0], shape), a, b, alpha=alpha)


def dense_lora(x):
    w = dense_lora(x.w) if isinstance(x.w, hki.LoRA) else hki.materialize(x.w)
    scale = 1.0 if x.alpha is None else jnp.asarray(x.alpha)[..., None, None] / x.a.shape[-1]
    return w + np.einsum("...nr,...rm->...nm", x.a * scale, x.b)


def make_outer(key, shape, dtype=jnp.float32):
    *batch, n, m = shape
    keys = jax.random.split(key)
    scale = 16 if jnp.issubdtype(dtype, jnp.inexact) else 1
    u = fractions(keys[0], (*batch, n), 1, 8, scale).astype(dtype)
    return Outer(u, fractions(keys[1], (*batch, m), 1, 8, scale).astype(dtype))


def make_complex_outer(key, shape):
    *batch, n, m = shape
    keys = jax.random.split(key, 4)
    parts = [
        fractions(k, (*batch, size), 1, 8, 16) for k, size in zip(keys, (n, n, m, m), strict=True)
    ]
    return Outer(parts[0] + 1j * parts[1], parts[2] - 1j * parts[3])


def make_diagonal(key, shape):
    return Diagonal(fractions(key, shape[-1:], 4, 12, 16))


def make_quantized(key, shape, dtype, **options):
    """Scales that are powers of two (and offsets of a few bits) make the dense values exact."""
    q = hki.QuantizedMatrix.quantize(matrix(key, shape), dtype, **options)
    offset = None if q.offset is None else jnp.round(q.offset * 256) / 256
    return q._replace(scale=2.0 ** jnp.round(jnp.log2(q.scale)), offset=offset)


def quantized(dtype, **options):
    return Case(lambda k, s: make_quantized(k, s, dtype, **options))


def int4(key, shape):
    return make_quantized(key, shape, "int4", group_size=2, zero_point=True)


def make_scaled(key, shape):
    keys = jax.random.split(key)
    matrix = make_quantized(keys[0], shape, "int8")
    return hki.ScaledMatrix(matrix, 2.0 ** jax.random.randint(keys[1], shape[:-1], -1, 2))


def make_trellis(key, shape):
    """Numbers of 4 bits, not near zero: the codes have errors of some 0.1."""
    return hki.TrellisMatrix.encode(0.4 + matrix(key, shape) + jnp.eye(*shape[-2:]) / 2, 4)


def make_rotated(key, shape):
    w = 0.4 + matrix(key, shape) + jnp.eye(*shape[-2:])
    return Rotated.quantize(w, lambda w, _: hki.TrellisMatrix.encode(w, 4))


def make_fake(key, shape):
    """Values that are codes times 1/128, the largest code in each column: rounding changes none."""
    diagonal = jnp.eye(*shape[-2:], dtype=bool)
    value = jnp.where(diagonal, 127 / 128, fractions(key, shape, 1, 8, 128))
    return hki.FakeQuantized(value, (("dtype", "int8"),))


def make_cache(key, shape):
    q = make_quantized(key, shape, "int8")  # along axis -2: what is written to it is not rounded
    return hki.QuantizedCache(codes=q.codes, scale=q.scale, format=q.format)


def make_view(key, shape):
    """A tensor `[m, n]` that is held as LoRA of `[n, m]`."""
    *batch, m, n = shape
    lora = make_lora(key, (*batch, n, m))
    return hki.MatrixView(lora, (((m, 1, 1),), ((n, 1, 0),)))


def make_repeated(key, shape):
    """LoRA of which each row is there twice."""
    *batch, n, m = shape
    return hki.Repeated(make_lora(key, (*batch, n // 2, m)), -2, 2)


def make_concatenated(key, shape):
    """LoRA beside a dense array."""
    w = matrix(key, shape)
    left = make_lora(key, (*shape[:-1], 3), w=lambda *_: w[..., :3])
    return hki.Concatenated((left, w[..., 3:]), -1)


def make_deferred(key, shape):
    return Deferred(make_lora(key, shape), (("square", ()),))


def dense_scaled(x):
    return np.asarray(hki.materialize(x.matrix)) * np.asarray(x.scale)[..., None]


def dense_rotated(x):
    return np.asarray(hki.materialize(x.rotation)) @ np.asarray(hki.materialize(x.w))


def dense_concatenated(x):
    return np.concatenate([dense_lora(x.parts[0]), x.parts[1]], -1)


def dense_outer(x):
    return np.asarray(x.u)[..., :, None] * np.asarray(x.v)[..., None, :]


def full(x):
    return jnp.full(x.shape, x.value)


def outer(dtype):
    return Case(lambda k, s: make_outer(k, s, dtype), dense_outer, dtype=dtype, singular=True)


def zeros(dtype):
    return Case(lambda k, s: hki.Zeros(shape=s, dtype=dtype), full, dtype=dtype, singular=True)


def constant(value, dtype):
    return Case(
        lambda k, s: hki.SymbolicConstant(value, shape=s, dtype=dtype),
        full,
        dtype=dtype,
        singular=True,
    )


CASES = {
    "lora": Case(make_lora, dense_lora),
    "lora of lora": Case(lambda k, s: make_lora(k, s, w=make_lora, alpha=1.0), dense_lora),
    "lora of int4": Case(lambda k, s: make_lora(k, s, w=int4), dense_lora),
    "int8": quantized("int8"),
    "int4 groups offset": Case(int4),
    "nf4 groups last axis": quantized("nf4", group_size=2, axis=-1),
    "scaled int8": Case(make_scaled, dense_scaled),
    "trellis": Case(make_trellis),
    "rotated trellis": Case(make_rotated, dense_rotated),
    "view of lora": Case(make_view, lambda x: np.swapaxes(dense_lora(x.matrix), -1, -2)),
    "lora, repeated": Case(
        make_repeated, lambda x: np.repeat(dense_lora(x.array), 2, -2), singular=True
    ),
    "lora beside dense": Case(make_concatenated, dense_concatenated),
    "fake int8": Case(make_fake, lambda x: x.value),
    "cache int8": Case(make_cache),
    "deferred": Case(make_deferred, lambda x: dense_lora(x.w) ** 2),
    "trained": Case(lambda k, s: hki.TrainedQuantized(matrix(k, s)), lambda x: x.value),
    "zeros": zeros(jnp.float32),
    "constant": constant(0.5, jnp.float32),
    "outer": outer(jnp.float32),
    "diagonal": Case(make_diagonal, lambda x: jnp.eye(4) * x.d, batched=False),
    "nought": Case(lambda k, s: Nought(shape=s), lambda x: jnp.zeros(x.shape), singular=True),
    "zeros int": zeros(jnp.int32),
    "constant int": constant(3, jnp.int32),
    "constant uint": constant(5, jnp.uint32),
    "constant complex": constant(0.5 - 0.25j, jnp.complex64),
    "outer int": outer(jnp.int32),
    "outer uint": outer(jnp.uint32),
    "outer complex": Case(make_complex_outer, dense_outer, dtype=jnp.complex64, singular=True),
}
