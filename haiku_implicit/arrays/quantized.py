"""`QuantizedMatrix`: a weight held as integer codes with scales."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from haiku_implicit._array import ImplicitArray, aux_field, frozen_field
from haiku_implicit._dispatch import primitive_handler
from haiku_implicit.quantization import formats
from haiku_implicit.quantization.dot import quantized_dot, with_dense


@dataclasses.dataclass
class QuantizedMatrix(ImplicitArray, core_ndim=2):
    """The weight `scale * decode(codes) + offset`, in groups of elements that share a scale.

    Made by `QuantizedMatrix.quantize`, or by `QuantizedMatrix.from_parts` of a weight that comes
    quantized. The groups lie along one axis of the matrix `[..., n, m]`; in storage that axis, of
    length `k`, is the last one, and the other one, the `rows`, comes before it. So the storage of a
    matrix that is grouped along axis -2 is that of its transpose, and `w.T` changes no data.

    Attributes:
      codes: `[..., rows, k]` int8 or uint8, or `[..., rows, k / 2]` uint8 for formats of 4 bits:
        within each group of g elements byte j holds element j in its low nibble and element
        j + g/2 in its high one. This is the order of GGML (Q4_0, Q4_1), whose blocks fit.
      scale: `[..., rows, k / g]`, floating; a single one per row is a scale per channel.
      offset: as `scale`, or None.
      format: 'int8', 'int4' (a nibble holds code + 8), 'uint8', 'uint4' (codes that count up from
        the offset), or 'nf4', the 4-bit format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314).
      axis: the grouped axis of the matrix, -2 or -1.
      padded: whether the last code of each row is padding (4 bits, odd length, scale per channel).
      dtype: what the values are rounded to; the dtype of `scale` unless given.
      rounded_to: a narrower dtype that the values were rounded to before, by a cast there and back;
        None unless there was one.

    Raises:
      ValueError: where codes, scales and offsets do not fit together or to the format.

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

    codes: Any = frozen_field()
    scale: Any = frozen_field()
    offset: Any = frozen_field(default=None)
    format: str = aux_field(default="int8")
    axis: int = aux_field(default=-2)
    padded: bool = aux_field(default=False)
    rounded_to: Any = aux_field(default=None)

    def __post_init__(self) -> None:
        fmt = formats.find(self.format)
        self.format, self.axis = fmt.name, _normalized(self.axis, np.ndim(self.codes))
        _check_parts(self, fmt)
        super().__post_init__()  # last, as the shape is computed by a format that exists

    @classmethod
    def quantize(
        cls,
        w: Any,
        dtype: Any,
        group_size: int | None = None,
        axis: int = -2,
        zero_point: bool = False,
    ) -> Self:
        """Rounds a weight to the nearest codes; also under `jit`, `vmap` and `eval_shape`.

        The scales are float32 (float64 for float64 weights), so that they cost no accuracy. A group
        of zeros alone stays exactly zero; with a zero point every zero does.

        Args:
          w: `[..., n, m]`, floating, finite.
          dtype: 'int8', 'int4' or 'nf4'.
          group_size: how many consecutive elements along `axis` share a scale; it divides the axis,
            and is even for 4 bits. None: all of them (a scale per channel).
          axis: the axis that scales are shared along: -2, which is contracted in `x @ w`, or -1.
          zero_point: False: the codes span ± the largest magnitude of a group. True: they span its
            smallest to its largest value, with an offset to each scale; not for 'nf4'.

        Returns:
          The quantized weight, of the dtype of `w`.

        Raises:
          ValueError: for a weight that is not finite or has less than two axes, an unknown format,
            a group size that does not fit.
          TypeError: for a weight that is not floating.

        Example:
          >>> import jax.numpy as jnp, haiku_implicit as hki
          >>> q = hki.QuantizedMatrix.quantize(jnp.array([[-1.0], [0.5]]), 'int8')
          >>> print(hki.materialize(q))
          [[-1. ]
           [ 0.503937]]
        """
        w = w if isinstance(w, jax.Array) else jnp.asarray(w)
        fmt = formats.for_quantizing(dtype, zero_point)
        _check_weight(w)
        axis = _normalized(axis, w.ndim)
        stored = w if axis == -1 else jnp.swapaxes(w, -1, -2)
        length = stored.shape[-1]
        g, padding = _fitting_group(group_size, length, fmt)
        if padding:  # by a value that changes no scale
            stored = jnp.concatenate([stored, stored[..., -1:]], axis=-1)
        codes, scale, offset = formats.encode(stored, g, fmt)
        explicit = None if w.dtype == scale.dtype else w.dtype
        parts: dict[str, Any] = dict(codes=codes, scale=scale, offset=offset)
        return cls(**parts, format=fmt.name, axis=axis, padded=padding, dtype=explicit)

    @classmethod
    def from_parts(
        cls,
        codes: Any,
        scale: Any,
        offset: Any = None,
        *,
        dtype: Any = "int4",
        axis: int = -2,
        padded: bool = False,
        out_dtype: Any = None,
    ) -> Self:
        """A weight that comes quantized, in the storage order that the class describes.

        Args:
          codes: `[..., rows, k]` int8 or uint8, `[..., rows, k / 2]` uint8 for 4 bits.
          scale: `[..., rows, groups]`, floating.
          offset: the same shape, floating, or None.
          dtype: the format of the codes: 'int8', 'uint8', 'int4', 'uint4' or 'nf4'.
          axis: the axis of the matrix that `k` is: -2 for the matrix `[..., k, rows]` (a weight
            `[in, out]` of Haiku from rows `[out, in]`), -1 for `[..., rows, k]`.
          padded: whether the last code of each row is padding.
          out_dtype: the dtype of the weight; that of `scale` if None.

        Returns:
          The quantized weight.

        Raises:
          ValueError: where the parts do not fit together.

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
        parts = dict(codes=codes, scale=scale, offset=offset)
        parts = {name: None if x is None else jnp.asarray(x) for name, x in parts.items()}
        fmt = formats.find(dtype)
        return cls(**parts, format=fmt.name, axis=axis, padded=padded, dtype=out_dtype)

    def requantize(self, w: Any) -> Self:
        """Another weight of the same shape, quantized as this one is.

        Args:
          w: a dense weight of the shape of this one.
        """
        if np.shape(w) != self.shape:
            raise ValueError(f"w: expected shape {list(self.shape)}, got {list(np.shape(w))}")
        asymmetric = self._format.name.startswith("uint")
        name = self.format.removeprefix("u") if asymmetric else self.format
        group = None if self.num_groups == 1 else self.group_size
        new = type(self).quantize(w, name, group, self.axis, zero_point=asymmetric)
        return new._replace(dtype=self.dtype)

    @property
    def num_groups(self) -> int:
        """How many groups the grouped axis has."""
        return np.shape(self.scale)[-1]

    @property
    def group_size(self) -> int:
        """How many elements share a scale (the padding counted in)."""
        return np.shape(self.codes)[-1] * self._format.per_byte // self.num_groups

    @property
    def _format(self) -> formats.Format:
        return formats.FORMATS[self.format]

    def compute_shape(self) -> tuple[int, ...]:
        *lead, rows, stored = np.shape(self.codes)
        core = rows, stored * self._format.per_byte - self.padded
        return (*lead, *(core if self.axis == -1 else core[::-1]))

    def compute_dtype(self) -> Any:
        return self.scale.dtype

    def materialize(self) -> jax.Array:
        values = formats.dequantize(self.codes, self.scale, self.offset, self._format)
        values = values[..., :-1] if self.padded else values
        values = values if self.axis == -1 else jnp.swapaxes(values, -1, -2)
        return self.rounded(values)

    def rounded(self, values: jax.Array) -> jax.Array:
        """Decoded values as this weight has them: in its dtype, after an earlier rounding if any.

        Args:
          values: of any shape, in the arithmetic dtype of the scales.
        """
        if self.rounded_to is None:
            return values.astype(self.dtype)
        values = values.astype(self.rounded_to).astype(self.dtype)
        # XLA may leave out a cast there and back (`xla_allow_excess_precision`), but not this.
        digits, exponents = jnp.finfo(self.rounded_to).nmant, jnp.finfo(self.dtype).nexp
        return jax.lax.reduce_precision(values, exponent_bits=exponents, mantissa_bits=digits)

    def partition_spec(self, spec: Any, mesh: Any) -> Any:
        """Batch axes and rows split as they are, the grouped axis between groups."""
        lead, core = _padded_spec(spec, self.ndim)
        rows, along = core if self.axis == -1 else core[::-1]
        scale_along = along
        parts = _num_parts(along, mesh)
        if parts > 1 and (self.padded or self.num_groups % parts):
            if self.num_groups > 1 or self._format.bits < 8:
                return NotImplemented
            scale_along = None  # a scale per channel belongs to all parts of the channel
        if self.shape[self._row_axis] % _num_parts(rows, mesh) or self.shape[self.axis] % parts:
            return NotImplemented
        scale = PartitionSpec(*lead, rows, scale_along)
        offset = None if self.offset is None else scale
        return self._replace(codes=PartitionSpec(*lead, rows, along), scale=scale, offset=offset)

    @property
    def _grouped_axis(self) -> int:
        return self.ndim + self.axis

    @property
    def _row_axis(self) -> int:
        return self.ndim - 3 - self.axis


# --- validation ----------------------------------------------------------------------------------


def _normalized(axis: int, ndim: int) -> int:
    if axis not in (-2, -1, ndim - 2, ndim - 1) or axis < -2:
        raise ValueError(f"axis: expected -2 or -1 (one of the matrix's two axes), got {axis!r}")
    return axis if axis < 0 else axis - ndim


def _check_weight(w: jax.Array) -> None:
    if not jnp.issubdtype(w.dtype, np.floating):
        raise TypeError(f"w: expected a floating dtype, got {w.dtype.name}")
    if w.ndim < 2 or 0 in w.shape[-2:]:
        raise ValueError(
            f"w: expected a matrix [..., n, m] with n, m > 0, got shape {list(w.shape)}; leave a "
            "parameter without two axes dense"
        )
    if not isinstance(w, jax.core.Tracer) and not jnp.isfinite(w).all():
        raise ValueError(f"w {w.dtype.name}{list(w.shape)}: it has infinite or NaN elements")


def _fitting_group(group_size: int | None, length: int, fmt: formats.Format) -> tuple[int, bool]:
    """The group size to use, and whether an element of padding makes it even."""
    if group_size is None:
        padding = length % fmt.per_byte
        return length + padding, bool(padding)
    sizes = formats.group_sizes(length, fmt)
    if group_size not in sizes:
        even = " and are even" if fmt.bits == 4 else ""
        raise ValueError(
            f"group_size: expected None or one of {sizes}, which divide the axis of length "
            f"{length}{even}, got {group_size!r}"
        )
    return int(group_size), False


def _check_parts(q: QuantizedMatrix, fmt: formats.Format) -> None:
    """Whether codes, scale and offset are what the class says."""
    scales = [q.scale] if q.offset is None else [q.scale, q.offset]
    found = ", ".join(
        f"{name} {x.dtype.name}{list(np.shape(x))}"
        for name, x in zip(("codes", "scale", "offset"), [q.codes, *scales], strict=False)
    )

    def unless(expected: str) -> dict[str, Any]:
        message = f"QuantizedMatrix of {fmt.name!r}: expected {expected}; got {found}"
        return dict(custom_message=message, exception_type=ValueError)

    chex.assert_type(q.codes, fmt.storage, **unless(f"codes in {fmt.storage.name}"))
    chex.assert_type(scales, [float] * len(scales), **unless("scale and offset floating"))
    aligned = unless("codes [..., rows, k] and scale (and offset) [..., rows, groups]")
    chex.assert_equal_rank([q.codes, *scales], **aligned)
    chex.assert_scalar_in(min(np.ndim(q.codes), 2), 2, 2, **aligned)
    chex.assert_equal_shape_prefix([q.codes, *scales], np.ndim(q.codes) - 1, **aligned)
    chex.assert_equal_shape(scales, **aligned)
    stored, groups = np.shape(q.codes)[-1], max(q.num_groups, 1)
    packed = ", two codes to a byte" if fmt.bits == 4 else ""
    chex.assert_equal(stored % groups, 0, **unless(f"groups that divide the codes{packed}"))
    if q.padded and (groups > 1 or fmt.bits == 8):
        raise ValueError("padded: only codes of 4 bits with a scale per channel are padded")
    if q.__dict__.get("_shape") not in (None, q.compute_shape()):
        raise ValueError(f"shape: the codes are those of shape {list(q.compute_shape())}")
    if not jnp.issubdtype(q.dtype, np.floating):
        raise ValueError(f"dtype: expected a floating dtype, got {q.dtype.name}")


def _padded_spec(spec: Any, ndim: int) -> tuple[list[Any], list[Any]]:
    """The entries of a partition spec for the batch axes, and for the two axes of the matrix."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return entries[:-2], entries[-2:]


def _num_parts(entry: Any, mesh: Any) -> int:
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


# --- products ------------------------------------------------------------------------------------


@primitive_handler("dot_general")
def dot_with_quantized(
    primitive: Any, x: jax.Array, w: QuantizedMatrix, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """A product with the codes, see `quantized_dot`."""
    return quantized_dot(x, w, dimension_numbers, **params)


@primitive_handler("dot_general")
def dot_of_quantized(
    primitive: Any, w: QuantizedMatrix, x: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """A product with the codes, see `quantized_dot`."""
    return quantized_dot(x, w, dimension_numbers, q_first=True, **params)


@primitive_handler("dot_general")
def dot_of_two_quantized(
    primitive: Any, v: QuantizedMatrix, w: QuantizedMatrix, **params: Any
) -> jax.Array:
    """Both are dequantized for the one product."""
    return with_dense(primitive, v, w, **params)


@primitive_handler("conv_general_dilated")
def convolve_with_quantized(
    primitive: Any, x: jax.Array, w: QuantizedMatrix, **params: Any
) -> jax.Array:
    """A convolution with the kernel, dequantized for it: a kernel is small beside the images."""
    return with_dense(primitive, x, w, **params)


@primitive_handler("conv_general_dilated")
def convolve_quantized(
    primitive: Any, w: QuantizedMatrix, x: jax.Array, **params: Any
) -> jax.Array:
    """The same with the quantized operand first."""
    return with_dense(primitive, w, x, **params)


# --- elementwise ---------------------------------------------------------------------------------


@primitive_handler(["mul", "div"])
def rescale(primitive: Any, w: QuantizedMatrix, x: jax.Array, **params: Any) -> Any:
    """Times, or by, what is one number along the grouped axis: the scales take it."""
    if w.rounded_to is not None:
        return NotImplemented  # it was rounded before, not after
    if x.ndim:
        if x.ndim != w.ndim or x.shape[w.axis] != 1:
            return NotImplemented
        if any(i not in (1, j) for i, j in zip(x.shape, w.shape, strict=True)):
            return NotImplemented
        x = x if w.axis == -1 else jnp.swapaxes(x, -1, -2)  # [..., rows, 1]
    # In the wider dtype, because a product of two numbers may not fit into float16 scales.
    wide = formats.arithmetic_dtype(w.scale.dtype)
    apply = jnp.multiply if primitive is jax.lax.mul_p else jnp.divide
    return _map_scales(w, lambda leaf: apply(leaf.astype(wide), x.astype(wide)))


@primitive_handler("neg")
def negate(primitive: Any, w: QuantizedMatrix, **params: Any) -> QuantizedMatrix:
    """The negative of scales and offsets."""
    return _map_scales(w, lambda leaf: -leaf)


@primitive_handler("convert_element_type")
def cast(
    primitive: Any, w: QuantizedMatrix, *, new_dtype: Any, sharding: Any = None, **params: Any
) -> Any:
    """To another floating dtype: that of the values alone, codes and scales stay as they are."""
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
    """Whether every finite number of one floating dtype is one of the other."""
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp)


def _map_scales(w: QuantizedMatrix, fun: Callable[[jax.Array], jax.Array]) -> QuantizedMatrix:
    offset = None if w.offset is None else fun(w.offset)
    return w._replace(scale=fun(w.scale), offset=offset, dtype=w.dtype)


# --- axes ----------------------------------------------------------------------------------------
# Of the axes of the leaves, batch axes are the same as those of the matrix, the last but one is the
# rows, and the last one the grouped axis. `batch_axes` has the rules for batch axes alone.


@primitive_handler("transpose")
def transpose_matrix(primitive: Any, w: QuantizedMatrix, *, permutation: Any, **params: Any) -> Any:
    """The two axes of the matrix change places by name alone; batch axes in any order."""
    core = (w.ndim - 2, w.ndim - 1)
    if tuple(sorted(permutation[-2:])) != core:
        return NotImplemented
    order = (*permutation[:-2], *core)
    out = w
    if order != tuple(range(w.ndim)):
        out = jax.tree.map(lambda leaf: primitive.bind(leaf, permutation=order, **params), w)
    return out if permutation[-1] == core[1] else out._replace(axis=-3 - w.axis)


@primitive_handler("split")
def split_matrix(
    primitive: Any, w: QuantizedMatrix, *, sizes: Sequence[int], axis: int, **params: Any
) -> Any:
    """Parts of the rows, or of the grouped axis between groups."""
    if axis < w.ndim - 2:
        return NotImplemented
    limits = np.cumsum(sizes).tolist()
    parts = [part_of(w, axis, b - n, b) for b, n in zip(limits, sizes, strict=True)]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


@primitive_handler("concatenate")
def concatenate_matrices(primitive: Any, *operands: QuantizedMatrix, dimension: int) -> Any:
    """Along the rows, or group after group, where the operands are of one kind."""
    operands = tuple(w._replace(dtype=w.dtype) for w in operands)
    first = operands[0]
    if dimension < first.ndim - 2 or len({_kind(w) for w in operands}) > 1:
        return NotImplemented
    if dimension == first._row_axis:
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=-2), *operands)
    if len({w.group_size for w in operands}) > 1 or any(w.padded for w in operands):
        return NotImplemented
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *operands)


def _kind(w: QuantizedMatrix) -> Any:
    """What two matrices have to have in common for their leaves to be put together."""
    return jax.tree_util.tree_structure(w), *(leaf.dtype for leaf in jax.tree.leaves(w))


def part_of(w: QuantizedMatrix, axis: int, start: int, limit: int) -> Any:
    """A quantized part of one axis; `NotImplemented` where it would cut a group."""

    def cut(leaf: jax.Array, start: int, limit: int, axis: int) -> jax.Array:
        return jax.lax.slice_in_dim(leaf, start, limit, axis=axis)

    if (start, limit) == (0, w.shape[axis]):
        return w
    if axis != w._grouped_axis:
        return jax.tree.map(lambda leaf: cut(leaf, start, limit, min(axis, w.ndim - 2)), w)
    g, fmt = w.group_size, w._format
    codes = cut(w.codes, start // fmt.per_byte, limit // fmt.per_byte, axis=w.ndim - 1)
    if w.num_groups == 1 and fmt.bits == 8:  # a scale per channel is that of each part
        return w._replace(codes=codes)
    if w.padded or start % g or limit % g:
        return NotImplemented
    out = _map_scales(w, lambda leaf: cut(leaf, start // g, limit // g, axis=w.ndim - 1))
    return out._replace(codes=codes)
