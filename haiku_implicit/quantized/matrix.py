"""`QuantizedMatrix`: a weight held as integer codes with scales."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypedDict

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from haiku_implicit.core import compat
from haiku_implicit.core.array import ImplicitArray, is_implicit
from haiku_implicit.core.box import dense
from haiku_implicit.core.fields import aux_field, frozen_field
from haiku_implicit.core.messages import expecting, value_error
from haiku_implicit.core.sharding import is_split, left_to_partitioner, padded_spec
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized.numbers import formats
from haiku_implicit.quantized.numbers.encoding import Encoded, encode_rows
from haiku_implicit.quantized.numbers.options import (
    OperandConfig,
    checked_activation,
    is_integer,
    parse_activation,
)


class QuantizeArguments(TypedDict, total=False):
    """The `**options` of functions that quantize weights: `QuantizedMatrix.quantize` documents most."""

    dtype: Any
    group_size: int | tuple[int, int] | str | None
    axis: int
    zero_point: bool
    calibration: str | None
    scale_dtype: DType
    activation: str | None
    rotate: bool


@dataclasses.dataclass
class QuantizedMatrix(ImplicitArray, core_ndim=2):
    """The weight `scale * decode(codes) + offset`, in groups of elements that share a scale.

    `QuantizedMatrix.quantize` makes one from a dense weight, `QuantizedMatrix.from_parts` from a weight
    that comes quantized. The groups run along one axis of the matrix `[..., n, m]`. In storage that
    axis, of length `k`, is the last one, and the other one, the `rows`, comes before it. So a matrix
    that is grouped along axis -2 is stored like its transpose, and `w.T` changes no data.

    Attributes:
      codes: `[..., rows, k * bits / 8]`: int8, uint8, or a float8 dtype, as the format says. Codes of
        less than 8 bits are packed within each group (`quantization.formats.pack`); with 4 bits byte
        j of a group of g elements holds element j in its low nibble and element j + g/2 in its high
        one. This is the order of GGML (Q4_0, Q4_1), so that GGML's blocks fit.
      scale: `[..., tiles, k / g]`, floating. The number of tiles divides the number of rows: it is
        the same for groups, and for scales per channel (one per row); it is one for a scale per
        tensor. May be quantized itself (a `QuantizedMatrix` of this shape): nvfp4, QLoRA's double
        quantization, GGUF's K-quants.
      offset: as `scale`, or None.
      format: the format of the codes, a name of `quantization.formats.FORMATS`.
      axis: the grouped axis of the matrix, -2 or -1.
      padding: how many codes at the end of each row are padding (only with one group in a row).
      dtype: the dtype that values are rounded to; the dtype of `scale` unless given.
      rounded_to: a narrower dtype that the values were rounded to before, by a cast there and back;
        None unless there was one.
      activation: the format that activations are quantized to in products, each row (in a convolution,
        each image) by its largest magnitude, or, as in 'int8,groups', each part of a row that meets
        one of the matrix's groups; None: no quantization. The gradient with respect to activations
        passes the rounding straight through.

    Raises:
      ValueError: if codes, scales and offsets do not fit together or to the format.

    Example:
      >>> import jax, jax.numpy as jnp, haiku_implicit as hki
      >>> w = jax.random.normal(jax.random.key(0), (256, 64))
      >>> q = hki.QuantizedMatrix.quantize(w, 'int4', group_size=32)
      >>> q.shape, q.nbytes, w.nbytes
      ((256, 64), 10240, 65536)
      >>> bool(jnp.abs(hki.materialize(q) - w).max() < 0.3)
      True
      >>> hki.use_implicit_args(jnp.dot)(jnp.ones((8, 256)), q).shape
      (8, 64)
    """

    codes: jax.Array = frozen_field()
    scale: Array = frozen_field()
    offset: Array = frozen_field(default=None)
    format: str = aux_field(default="int8")
    axis: int = aux_field(default=-2)
    padding: int = aux_field(default=0)
    rounded_to: Any = aux_field(default=None)
    activation: str | None = aux_field(default=None)

    def __post_init__(self) -> None:
        fmt = formats.find(self.format)
        self.format, self.axis = fmt.name, _normalized(self.axis, np.ndim(self.codes))
        _check_parts(self, fmt)
        super().__post_init__()  # last, as the shape is computed by a format that exists

    @classmethod
    def quantize(
        cls,
        w: Array,
        dtype: DType,
        group_size: int | tuple[int, int] | str | None = None,
        axis: int = -2,
        zero_point: bool = False,
        calibration: str | None = None,
        scale_dtype: DType | None = None,
        moments: Array = None,
        activation: str | None = None,
    ) -> Self:
        """Rounds a weight to the nearest codes; also under `jit`, `vmap` and `eval_shape`.

        A group of only zeros stays exactly zero; with a zero point (and float32 scales) every zero
        does. An element that is not finite raises an error. Under `jit`, values are not known: there,
        such an element makes its group NaN, and with scales that are quantized themselves all groups
        whose scales share a scale.

        Args:
          w: `[..., n, m]`, floating, finite.
          dtype: a format: 'int8', 'int7', ... 'int2', 'int1' (another name of 'binary': minus and
            plus half a scale), 'uint8', ... 'uint1' (codes from an offset on), 'ternary' (in 2 bits),
            'nf4' (QLoRA, arXiv:2305.14314), 'iq4_nl' (GGML's, for 'mse'), 'fp4' (e2m1), 'fp4_bnb'
            (bitsandbytes' fp4), 'fp8_e4m3', 'fp8_e5m2'; or one with its own groups and scales: 'mxfp8',
            'mxfp4' (OCP Microscaling 1.0: groups of 32, scales e8m0), 'nvfp4' (16, e4m3, and a scale
            of the tensor), and the blocks of GGUF files: 'q4_0', 'q4_1', 'q5_0', 'q5_1', 'q8_0',
            'q2_k', 'q3_k', 'q4_k', 'q5_k', 'q6_k', 'iq4_xs'.
          group_size: how many consecutive elements along `axis` share a scale; it divides the axis,
            and fills whole bytes. None: all of them (a scale per channel). A pair: the rows (along the
            other axis) and elements of a tile. 'tensor': all elements.
          axis: the axis that scales are shared along: -2, which is contracted in `x @ w`, or -1.
          zero_point: True is short for the format with an offset ('uint4' for 'int4').
          calibration: the method to find scales: 'absmax', 'minmax' (from the least to the largest
            number, in the format with an offset; both also with a factor: 'absmax,0.8'), 'absmean',
            'mse' (the least squared error), 'hqq', 'rms,3', 'percentile,99.5', 'fixed,LOW,HIGH'.
            None: absmean for binary and ternary, minmax with an offset, else absmax.
          scale_dtype: the storage of scales and offsets: 'float32', 'bfloat16', 'float16'; 'e8m0'
            (powers of two); 'e4m3' (with a float32 scale of the tensor); 'double' (8 bits in blocks
            of 256 with a float32 scale each: QLoRA's double quantization); 'uint6,8' (6 bits, and a
            float16 scale for 8 groups: Q4_K; also with other numbers). None: float32 (float64
            for float64 weights), or the storage that the format prescribes.
          moments: `[..., k, k]` for `axis` of length k: xᵀx of the product's inputs x `[n, k]`, to
            round for the product's least error (GPTQ), see `input_moments`; or its diagonal
            `[..., k]`, only to weigh errors in a search for scales.
          activation: 'int8', 'int4', 'fp8_e4m3', ...: activations are quantized in each product
            (dynamic quantization), so that integers multiply integers, with a scale for each row.
            'int8,groups' gives each row a scale for each group of the weight, as llama.cpp does;
            'int8,tensor' one scale for all rows. A method may follow, as in 'int8,rms,7' or
            'int8,minmax'; the default is 'absmax'. None: weight-only.

        Returns:
          The quantized weight, of the dtype of `w`.

        Raises:
          ValueError: for a weight that is not finite or has less than two axes, an unknown format,
            calibration or scale_dtype, or a group size that does not fit.
          TypeError: for a weight that is not floating.

        Example:
          >>> import jax.numpy as jnp, haiku_implicit as hki
          >>> q = hki.QuantizedMatrix.quantize(jnp.array([[-1.0], [0.5]]), 'int8')
          >>> print(hki.materialize(q))
          [[-1. ]
           [ 0.503937]]
        """
        w = w if isinstance(w, jax.Array) else jnp.asarray(w)
        _check_weight(w)
        axis = _normalized(axis, w.ndim)
        how = dtype, group_size, zero_point, calibration, scale_dtype, moments
        encoded = encode_rows(w, *how, transposed=axis == -2)
        new = cls._of(encoded, axis, activation=checked_activation(activation))
        return new if new.dtype == w.dtype else new._replace(dtype=w.dtype)

    @classmethod
    def _of(cls, encoded: Encoded, axis: int, **fields: Any) -> Self:
        """Makes a matrix from codes; scales that are codes themselves become a matrix, too."""
        parts: dict[str, Any] = {
            name: QuantizedMatrix._of(x, -1, dtype=formats.arithmetic_dtype(x.scale.dtype))
            if isinstance(x, Encoded)
            else x
            for name, x in vars(encoded).items()
        }
        return cls(**parts, axis=axis, **fields)

    @classmethod
    def from_parts(
        cls,
        codes: Array,
        scale: Array,
        offset: Array = None,
        *,
        dtype: DType = "int4",
        axis: int = -2,
        padding: int = 0,
        out_dtype: DType | None = None,
    ) -> Self:
        """Makes a matrix from a weight that comes quantized, in the storage order of the class.

        Args:
          codes: `[..., rows, k * bits / 8]`, packed.
          scale: `[..., rows, groups]`, or `[..., tiles, groups]`, floating; may be quantized.
          offset: with the shape of `scale`, floating, or None.
          dtype: the format of the codes, see `quantize`.
          axis: the axis of the matrix with length `k`: -2 for the matrix `[..., k, rows]` (a weight
            `[in, out]` of Haiku from rows `[out, in]`), -1 for `[..., rows, k]`.
          padding: how many codes at the end of each row are padding.
          out_dtype: the dtype of the weight; None: the dtype of `scale`.

        Returns:
          The quantized weight.

        Raises:
          ValueError: if the parts do not fit together.

        Example:
          GGUF's Q4_1, blocks of 32 codes with a scale and a minimum:

          >>> import jax.numpy as jnp, haiku_implicit as hki
          >>> codes = jnp.full((3, 32), 0x21, jnp.uint8)
          >>> scale = jnp.full((3, 2), 0.5, jnp.float16)
          >>> w = hki.QuantizedMatrix.from_parts(
          ...     codes, scale, -scale, dtype='uint4', out_dtype=jnp.float32)
          >>> w.shape, hki.materialize(w)[:, 0][::16].tolist()
          ((64, 3), [0.0, 0.5, 0.0, 0.5])
        """
        codes, scale, offset = (
            x if x is None or is_implicit(x) else jnp.asarray(x) for x in (codes, scale, offset)
        )
        name = formats.find(dtype).name
        return cls(codes, scale, offset, name, axis, padding, dtype=out_dtype)

    def with_activation(self, activation: str | None) -> "QuantizedMatrix":
        """Returns this matrix with another format for the activations of its products, or None.

        Args:
          activation: as for `quantize`.

        Raises:
          ValueError: for a format that activations can't have.
        """
        return self._replace(activation=checked_activation(activation))

    def requantize(self, w: Array) -> Self:
        """Quantizes another weight of the same shape in the same way.

        Args:
          w: a dense weight of this shape.
        """
        if np.shape(w) != self.shape:
            raise value_error(f"w: expected shape {list(self.shape)}, got {list(np.shape(w))}")
        return self.like(jnp.asarray(w))

    def like(self, w: jax.Array) -> Self:
        """Quantizes any weight in the same way: with this format, groups, and storage of scales.

        Args:
          w: `[..., n, m]`, floating; the groups have to fit.
        """
        group = None if self.num_groups == 1 and self._tile[0] == 1 else self._tile
        new = self.quantize(
            w, self.format, group, self.axis, scale_dtype=self.scale_dtype,
            activation=self.activation,
        )  # fmt: skip
        return new._replace(dtype=self.dtype)

    @property
    def activation_config(self) -> OperandConfig:
        """How products quantize activations; 'groups' are tiles of this matrix's group size."""
        return parse_activation(self.activation, self.group_size - self.padding)

    @property
    def num_groups(self) -> int:
        """The number of groups along the grouped axis."""
        return np.shape(self.scale)[-1]

    @property
    def group_size(self) -> int:
        """The number of elements along the grouped axis that share a scale, padding included."""
        return np.shape(self.codes)[-1] * 8 // self._format.bits // self.num_groups

    @property
    def scale_dtype(self) -> str:
        """The storage of the scales, as for `quantize`: 'float32', 'double', 'uint6,8', ..."""
        if is_implicit(self.scale):
            if self.scale.scale.dtype == np.float16:
                return f"{self.scale.format},{self.scale.group_size}"
            return "e4m3" if self.scale.format == "fp8_e4m3" else "double"
        return "e8m0" if self.scale.dtype.name == "float8_e8m0fnu" else self.scale.dtype.name

    @property
    def _tile(self) -> tuple[int, int]:
        rows, tiles = np.shape(self.codes)[-2], np.shape(self.scale)[-2]
        return rows // tiles, self.group_size - self.padding

    @property
    def _format(self) -> formats.Format:
        return formats.FORMATS[self.format]

    def with_row_scales(self) -> Self:
        """Returns this weight with dense scales for each row, for rules that read them."""
        rows = np.shape(self.codes)[-2]
        return self.map_scales(lambda leaf: formats.by_rows(dense(leaf), rows))

    def map_scales(self, fun: Callable[[Any], Any]) -> Self:
        """Applies a function to the scale and to the offset; codes and dtype stay."""
        offset = None if self.offset is None else fun(self.offset)
        new = self._replace(scale=fun(self.scale), offset=offset)
        # The dtype is stored only if the scales no longer tell it: then a loop's carry keeps its
        # structure. (Specs do not have a dtype.)
        told = hasattr(new.scale, "dtype") and new.dtype == self.dtype
        return new if told else new._replace(dtype=self.dtype)

    def restored(self) -> Self:
        """Casts codes back to the dtype of the format, after a cast of a whole tree.

        Raises:
          TypeError: for a dtype that does not hold all codes.
        """
        codes = formats.restored(self.codes, self._format)
        return self if codes is self.codes else self._replace(codes=codes)

    def compute_shape(self) -> tuple[int, ...]:
        *lead, rows, stored = np.shape(self.codes)
        core = rows, stored * 8 // self._format.bits - self.padding
        return (*lead, *(core if self.axis == -1 else core[::-1]))

    def compute_dtype(self) -> np.dtype:
        dtype = self.scale.dtype
        return dtype if dtype.itemsize > 1 else formats.arithmetic_dtype(dtype)

    def materialize(self) -> jax.Array:
        of_codes = compat.explicit_sharding(self.codes)
        if of_codes is None or not is_split(self):
            return self._decoded()
        spec = list(padded_spec(of_codes.spec, self.ndim))
        if self.axis == -2:  # the codes of `[..., n, m]` are `[..., m, n]`
            spec[-2:] = spec[:-3:-1]
        sharding = NamedSharding(of_codes.mesh, PartitionSpec(*spec))
        return left_to_partitioner(type(self)._decoded, sharding)(self)

    def _decoded(self) -> jax.Array:
        values = formats.dequantize(self.codes, self.scale, self.offset, self._format)
        values = values[..., : values.shape[-1] - self.padding]
        values = values if self.axis == -1 else jnp.swapaxes(values, -1, -2)
        return self.rounded(values)

    def rounded(self, values: jax.Array) -> jax.Array:
        """Rounds decoded values to `rounded_to`, if it is set, and to the dtype of this weight.

        Args:
          values: of any shape, in the arithmetic dtype of the scales.
        """
        if self.rounded_to is None:
            return values.astype(self.dtype)
        values = values.astype(self.rounded_to).astype(self.dtype)
        # XLA may drop a cast there and back (`xla_allow_excess_precision`), but not this operation.
        digits, exponents = jnp.finfo(self.rounded_to).nmant, jnp.finfo(self.dtype).nexp
        return jax.lax.reduce_precision(values, exponent_bits=exponents, mantissa_bits=digits)

    @property
    def field_axes(self) -> dict[str, str]:  # type: ignore[override]
        """Codes and scales in their order of storage: rows, then the grouped axis.

        One scale for all rows is whole. One for a channel belongs to all parts of the channel, unless
        codes share bytes, which are packed by groups.
        """
        rows, along = "nm" if self.axis == -1 else "mn"
        scale_rows = rows if np.shape(self.scale)[-2] > 1 else "."
        scale = scale_rows + (along.upper() if self._format.bits >= 8 else along)
        return {"codes": rows + along, "scale": scale, "offset": scale}

    def divided(self, counts: Sequence[int]) -> Self:
        """Returns this weight with groups so small that none is cut, if values stay."""
        rows, parts = counts[self._row_axis], counts[self._grouped_axis]
        tiles = np.shape(self.scale)[-2]
        new = self.with_row_scales() if tiles > 1 and tiles % rows else self
        if parts > 1 and self.num_groups % parts:
            new = new.regrouped(math.gcd(self.group_size, self.shape[self.axis] // parts))
        return new

    def regrouped(self, group_size: int) -> Self:
        """Returns this weight with smaller groups: codes and values stay, scales are repeated.

        Args:
          group_size: a divisor of the present group size.

        Returns:
          The weight, with dense scales; itself if groups of this size don't fill whole bytes, or if
          activations are rounded by groups, so that products would change.
        """
        fmt, size = self._format, self.group_size
        by_groups = self.activation_config.tile_size is not None
        whole = group_size and size % group_size == 0 and group_size % fmt.multiple == 0
        if group_size == size or not whole or self.padding or by_groups:
            return self
        codes = formats.unpack(self.codes, self.num_groups, fmt)
        codes = codes.reshape(*codes.shape[:-2], -1, group_size)
        last = self.ndim - 1
        new = self.map_scales(lambda y: formats.repeated(dense(y), size // group_size, last))
        new = new._replace(codes=formats.pack(codes, fmt))
        inferred = new._replace(dtype=self.__dict__.get("_dtype"))  # keeps the tree structure
        return inferred if inferred.dtype == self.dtype else new

    @property
    def _grouped_axis(self) -> int:
        return self.ndim + self.axis

    @property
    def _row_axis(self) -> int:
        return self.ndim - 3 - self.axis


# --- validation ----------------------------------------------------------------------------------


def _normalized(axis: int, ndim: int) -> int:
    known = (-2, -1, ndim - 2, ndim - 1)
    if not is_integer(axis) or axis not in known or axis < -2:
        raise value_error(f"axis: expected -2 or -1 (one of the matrix's two axes), got {axis!r}")
    return axis if axis < 0 else axis - ndim


def _check_weight(w: jax.Array) -> None:
    with expecting(f"w: expected a floating dtype, got {w.dtype.name}", TypeError):
        chex.assert_type(w, float)
    with expecting(
        f"w: expected a matrix [..., n, m] with n, m > 0, got shape {list(w.shape)}; leave a parameter "
        "without two axes, or without numbers, dense"
    ):
        chex.assert_shape(w, (..., None, None))
        chex.assert_scalar_positive(min(w.shape[-2:]))


def _check_parts(q: QuantizedMatrix, fmt: formats.Format) -> None:
    """Raises unless codes, scale and offset have the shapes and dtypes that the class prescribes."""
    parts = dict(codes=q.codes, scale=q.scale, offset=q.offset)
    parts = {name: x for name, x in parts.items() if x is not None}
    found = ", ".join(f"{name} {x.dtype.name}{list(x.shape)}" for name, x in parts.items())

    def expected(what: str) -> AbstractContextManager[None]:
        return expecting(f"QuantizedMatrix of {fmt.name!r}: expected {what}; got {found}")

    codes, *scales = parts.values()
    with expected(f"codes in {fmt.dtype.name}"):
        chex.assert_type(codes, fmt.dtype)
    with expected("scale and offset floating"):
        chex.assert_type(scales, float)
    with expected("codes [..., rows, k] and scale (and offset) [..., rows, groups]"):
        chex.assert_shape(codes, (..., None, None))
        chex.assert_shape(scales, (*codes.shape[:-2], None, None))
        chex.assert_equal_shape(scales)
        chex.assert_scalar_positive(q.scale.shape[-2])
        chex.assert_is_divisible(codes.shape[-2], q.scale.shape[-2])
    groups, packed = max(q.num_groups, 1), ", packed" if fmt.bits < 8 else ""
    with expected(f"groups that divide the codes{packed}"):
        chex.assert_is_divisible(codes.shape[-1], groups)
        chex.assert_is_divisible(codes.shape[-1] // groups * 8, fmt.bits * fmt.multiple)
    with expecting(
        f"padding: expected less than {fmt.multiple} codes, and that only with one group in a row, got "
        f"{q.padding!r}"
    ):
        chex.assert_scalar_in(q.padding, 0, fmt.multiple - 1 if groups == 1 else 0)
    with expecting(f"shape: the codes are those of shape {list(q.compute_shape())}"):
        chex.assert_shape(q, q.compute_shape())
    with expecting(f"dtype: expected a floating dtype, got {q.dtype.name}"):
        chex.assert_type(q, float)
