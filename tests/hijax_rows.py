"""A type of hijax: rows of 8 bits with a scale each, as JAX's documentation has them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import hijax

# JAX 0.12 has other names.
_Primitive: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", None)
_Spec: Any = getattr(hijax, "MappingSpec", object)
# Whether `vmap` maps over such values, and `jit` compiles loops over them.
MAPS = hasattr(hijax, "MappingSpec")


@dataclasses.dataclass(frozen=True)
class Leading(_Spec):
    """The mapped axis is the first one."""


@dataclasses.dataclass(frozen=True)
class Rows:
    codes: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class RowsType(hijax.HiType):
    shape: tuple[int, ...]

    def lo_ty(self):
        codes = hijax.ShapedArray(self.shape, jnp.dtype("int8"))
        return [codes, hijax.ShapedArray(self.shape[:-1], jnp.dtype("float32"))]

    def lower_val(self, rows):
        return [rows.codes, rows.scale]

    def raise_val(self, codes, scale):
        return Rows(codes, scale)

    def to_tangent_aval(self):
        return hijax.ShapedArray(self.shape, jnp.dtype("float32"))

    def str_short(self, short_dtypes=False, mesh_axis_types=False, **options):
        return f"rows{list(self.shape)}"

    def leading_axis_spec(self):
        return Leading()

    def dec_rank(self, size, spec):
        return RowsType(self.shape[1:])

    def inc_rank(self, size, spec):
        return RowsType((size, *self.shape))


hijax.register_hitype(Rows, lambda rows: RowsType(rows.codes.shape))


class _StraightThrough(_Primitive):
    """A primitive of one operand, whose derivative is that of the identity."""

    def __init__(self, operand, result):
        self.in_avals, self.out_aval, self.params = (operand,), result, {}
        super().__init__()

    def vjp_fwd(self, nonzero, x):
        return self(x), None

    def vjp_bwd_retval(self, residuals, cotangent):
        return (cotangent,)

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0]


class _Dequantize(_StraightThrough):
    def expand(self, rows):
        return rows.codes.astype(jnp.float32) * rows.scale[..., None]

    def batch(self, axis_data, operands, axes):
        return dequantize(*operands), 0


class _Quantize(_StraightThrough):
    def expand(self, x):
        scale = jnp.abs(x).max(-1) / 127
        return Rows(jnp.round(x / scale[..., None]).astype(jnp.int8), scale)

    def batch(self, axis_data, operands, axes):
        return quantize(jnp.moveaxis(operands[0], axes[0], 0)), Leading()


def dequantize(rows):
    about = jax.typeof(rows)
    return _Dequantize(about, hijax.ShapedArray(about.shape, jnp.dtype("float32")))(rows)


def quantize(x):
    about = jax.typeof(x)
    return _Quantize(about, RowsType(about.shape))(x)
