"""Number formats: the codes, their packing, and their values.

Everything here works along the last axis, in *groups*: `g` consecutive elements that share a scale
(and an offset). A value is `scale * decode(code) + offset`. `calibration` finds the scales.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from haiku_implicit.core import compat
from haiku_implicit.core.messages import see, value_error
from haiku_implicit.core.typing import Array, DType


@dataclasses.dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
      name: the name in options.
      planes: how the bits of a code are stored, lowest first. Codes of 3 bits are a plane of 2 bits,
        four codes to a byte, and a plane of 1 bit, eight to a byte; codes of 7 bits have three planes.
      lowest, largest: the range of the codes' values.
      bias: the number to subtract from a stored code to get its value.
      table: the value of each stored code, if it is not the code less the bias; else None.
      dtype: the dtype of the stored codes.
      offset: whether the codes count up from an offset, the smallest value of a group.
    """

    name: str
    planes: tuple[int, ...]
    lowest: float
    largest: float
    bias: float = 0
    table: tuple[float, ...] | None = None
    dtype: Any = np.dtype(np.uint8)
    offset: bool = False

    @property
    def bits(self) -> int:
        """The bits of one code."""
        return sum(self.planes)

    @property
    def multiple(self) -> int:
        """Group sizes are multiples of this number, so that the codes of a group fill whole bytes."""
        return 8 // min(self.planes)

    @property
    def is_float(self) -> bool:
        """Whether the codes are floating numbers of 8 bits themselves."""
        return self.dtype.kind not in "iu"

    @property
    def is_integer(self) -> bool:
        """Whether a value is its code less the bias."""
        return not self.is_float and self.table is None

    @property
    def one_sided(self) -> bool:
        """Whether the values change with the sign of the scale, because they are not symmetric."""
        values = set(self.table or (self.lowest, self.largest))
        return values != {-x for x in values}

    def stored(self, length: int) -> int:
        """Returns the number of stored elements that hold `length` codes."""
        return length * self.bits // 8


# The quantiles of a normal distribution, with an exact zero: Dettmers et al. 2023 (QLoRA,
# arXiv:2305.14314), appendix E.
NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# GGML's `kvalues_iq4nl`: finer near zero, which is not one of them.
IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# E2M1 of the OCP Microscaling Formats Specification 1.0: sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_TABLE = (*_E2M1, *(-x for x in _E2M1))

# bitsandbytes' own four bits: E2M1 in units of its largest number, with 1/192 instead of 1/12.
FP4_BNB_TABLE = tuple(x / 192 for x in (0, 1, 128, 192, 64, 96, 32, 48))

_INT8 = np.dtype(np.int8)
_E4M3, _E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)

FORMATS = {
    f.name: f
    for f in (
        Format("int8", (8,), -128, 127, dtype=_INT8),
        Format("int7", (4, 2, 1), -64, 63, bias=64),
        Format("int6", (4, 2), -32, 31, bias=32),
        Format("int5", (4, 1), -16, 15, bias=16),
        Format("int4", (4,), -8, 7, bias=8),  # a nibble holds code + 8, as in GGML's Q4_0
        Format("int3", (2, 1), -4, 3, bias=4),
        Format("int2", (2,), -2, 1, bias=2),
        Format("ternary", (2,), -1, 1, bias=1),
        Format("binary", (1,), -0.5, 0.5, bias=0.5),
        Format("uint8", (8,), 0, 255, offset=True),
        Format("uint7", (4, 2, 1), 0, 127, offset=True),
        Format("uint6", (4, 2), 0, 63, offset=True),
        Format("uint5", (4, 1), 0, 31, offset=True),
        Format("uint4", (4,), 0, 15, offset=True),
        Format("uint3", (2, 1), 0, 7, offset=True),
        Format("uint2", (2,), 0, 3, offset=True),
        Format("uint1", (1,), 0, 1, offset=True),
        Format("nf4", (4,), -1, 1, table=NF4_TABLE),
        Format("iq4_nl", (4,), -127, 113, table=IQ4_NL_TABLE),
        Format("fp4", (4,), -6, 6, table=FP4_TABLE),
        Format("fp4_bnb", (4,), -1, 1, table=(*FP4_BNB_TABLE, *(-x for x in FP4_BNB_TABLE))),
        Format("fp8_e4m3", (8,), -448, 448, dtype=_E4M3),
        Format("fp8_e5m2", (8,), -57344, 57344, dtype=_E5M2),
    )
}

# Formats with so few values that a mean magnitude is the better scale.
BY_MEAN = ("binary", "ternary")

# Other names of the same codes, among them names of dtypes.
_ALIASES = {
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float4_e2m1fn": "fp4",
    "fp4_e2m1": "fp4",
    "int1": "binary",
    "ubinary": "uint1",
}


class Recipe(NamedTuple):
    """A format whose definition includes its groups and scales.

    Attributes:
      format: the format of the codes.
      group_size: how many elements share a scale.
      scale_dtype: the storage of the scales, see `QuantizedMatrix.quantize`.
    """

    format: str
    group_size: int
    scale_dtype: str

    @property
    def multiple(self) -> int:
        """The length of the grouped axis is a multiple of this number."""
        return self.group_size * int(self.scale_dtype.partition(",")[2] or 1)


# OCP Microscaling Formats (MX) Specification 1.0; NVIDIA's NVFP4, which also has a scale of the tensor;
# the blocks of GGML (`ggml-common.h`).
RECIPES = {
    "mxfp8": Recipe("fp8_e4m3", 32, "e8m0"),
    "mxfp4": Recipe("fp4", 32, "e8m0"),
    "nvfp4": Recipe("fp4", 16, "e4m3"),
    "q4_0": Recipe("int4", 32, "float16"),
    "q4_1": Recipe("uint4", 32, "float16"),
    "q5_0": Recipe("int5", 32, "float16"),
    "q5_1": Recipe("uint5", 32, "float16"),
    "q8_0": Recipe("int8", 32, "float16"),
    "q2_k": Recipe("uint2", 16, "uint4,16"),
    "q3_k": Recipe("int3", 16, "int6,16"),
    "q4_k": Recipe("uint4", 32, "uint6,8"),
    "q5_k": Recipe("uint5", 32, "uint6,8"),
    "q6_k": Recipe("int6", 16, "int8,16"),
    "iq4_xs": Recipe("iq4_nl", 32, "int6,8"),
}

# The recipes with a scale of 8 bits, a float, for each group: operands of products have them, too.
MICROSCALED = {name: RECIPES[name] for name in ("mxfp8", "mxfp4", "nvfp4")}


def _is_dtype(name: str) -> bool:
    return bool(dtype_name(name)) or isinstance(getattr(jnp, name, None), type(jnp.bfloat16))


_PLANES = {2: (1,), 4: (2,), 8: (2, 1), 16: (4,)}


def register_format(name: str, table: Sequence[float]) -> Format:
    """Adds a format of your own: codes of one to four bits that stand for given values.

    Its name is then a `dtype` of `quantize_params` and of rules, and files of such weights can be read
    by programs that register it, too. Kernels read the values from the table.

    Args:
      name: the name, in lower case.
      table: the value of each code, in units of the scale: 2, 4, 8 or 16 different numbers, some
        negative and some positive.

    Returns:
      The format.

    Raises:
      ValueError: for a name that has another meaning already, or values that do not make a table.

    Example:
      >>> import jax.numpy as jnp, haiku_implicit as hki
      >>> hki.quantization.register_format('powers', (-4, -2, -1, 0, 1, 2, 4, 8)).bits
      3
      >>> w = hki.QuantizedMatrix.quantize(jnp.array([[1.0], [0.3], [4.0], [-2.0]] * 2), 'powers')
      >>> w.materialize()[:4, 0].tolist()
      [1.0, 0.5, 4.0, -2.0]
      >>> del hki.quantization.formats.FORMATS['powers']  # other examples list all formats
    """
    with np.errstate(over="ignore"):
        values = tuple(map(float, np.asarray(table, np.float32)))
    right = len(set(values)) == len(values) in _PLANES and np.isfinite(values).all()
    if not right or not min(values) < 0 < max(values):
        raise value_error(
            "table: expected 2, 4, 8 or 16 different numbers, some negative and some positive, got "
            f"{list(table)}"
        )
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise value_error(f"name: expected lower-case letters, digits and _, got {name!r}")
    fmt = Format(name, _PLANES[len(values)], min(values), max(values), table=values)
    taken = {*RECIPES, *_ALIASES, *(f"u{other}" for other in FORMATS)}
    if name in taken or _is_dtype(name) or FORMATS.get(name, fmt) != fmt:
        raise value_error(f"name: {name!r} has another meaning already; give another one")
    return FORMATS.setdefault(name, fmt)


def find(name: Any, option: str = "dtype", also: Iterable[str] = ()) -> Format:
    """Finds a format by its name, or by a dtype of that name.

    Args:
      name: the name or the dtype.
      option: the name of the option, for errors.
      also: other names that the option takes, for errors.

    Raises:
      ValueError: for an unknown format.
    """
    key = name if isinstance(name, str) else dtype_name(name)
    key = _ALIASES.get(key, key)
    if key not in FORMATS:
        raise value_error(f"{option}: expected one of {', '.join([*FORMATS, *also])}, got {name!r}")
    return FORMATS[key]


def dtype_name(dtype: DType) -> str:
    """Returns the name of a dtype; an empty text for anything else."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        return ""


def for_quantizing(name: Any, zero_point: bool) -> tuple[Format, Recipe | None]:
    """Returns the format that weights are quantized to, and the recipe of this name, if any.

    Raises:
      ValueError: for an unknown format; with `zero_point`, for a format without one.
    """
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    fmt = find(name, also=RECIPES) if recipe is None else FORMATS[recipe.format]
    if zero_point and not fmt.offset:
        with_offset = _with_offset(fmt)
        if with_offset is None or recipe is not None:
            names = ", ".join(f.name for f in FORMATS.values() if _with_offset(f))
            raise value_error(
                f"dtype: expected one of {names} with a zero point (zero_point=True, "
                f"calibration='minmax'), got {name!r}"
            )
        return with_offset, None
    return fmt, recipe


def _with_offset(fmt: Format) -> Format | None:
    """Returns the format of as many bits whose codes count up from an offset; None if there is none."""
    name = f"u{fmt.name}"
    return FORMATS.get(_ALIASES.get(name, name))


def group_sizes(length: int, fmt: Format) -> list[int]:
    """Returns the group sizes that divide an axis of this length and fill whole bytes."""
    return [g for g in range(fmt.multiple, length + 1, fmt.multiple) if length % g == 0]


# --- packing -----------------------------------------------------------------------------------


def pack(codes: Array, fmt: Format) -> Array:
    """Packs codes for storage: `[..., groups, g]` to `[..., groups * fmt.stored(g)]`.

    Within a group the planes come one after another. A plane of p bits has g·p/8 bytes; byte j holds
    element j in its lowest p bits, element j + g·p/8 in the next, and so on, so that it unpacks into
    contiguous parts. (With 4 bits this is the order of GGML's blocks.) NumPy packs arrays of NumPy,
    such as a file's, for which JAX would compile programs for each shape.
    """
    *lead, groups, g = codes.shape
    if fmt.bits == 8:
        return codes.reshape(*lead, groups * g)
    library: Any = np if isinstance(codes, np.ndarray) else jnp
    parts, below = [], 0
    for bits in fmt.planes:
        plane = (codes >> below) & (2**bits - 1)
        first, *pieces = library.split(plane, 8 // bits, axis=-1)
        shifted = (piece << (i * bits) for i, piece in enumerate(pieces, 1))
        parts.append(functools.reduce(operator.or_, shifted, first))
        below += bits
    stored = library.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    return stored.reshape(*lead, groups * fmt.stored(g))


def cast_error(name: str, wanted: Any, found: Any) -> TypeError:
    """The error for codes whose dtype a cast of a whole tree changed."""
    kind, got = np.dtype(wanted).name, np.dtype(found).name
    return TypeError(
        f"codes of {name!r} are {kind}, and cannot be read as {got}, to which they were cast. Cast "
        "dense values instead: hki.use_implicit_args(lambda params: "
        "jax.tree.map(lambda x: x.astype(dtype), params))(params)"
        f" {see('cast-codes')}"
    )


def restored(codes: jax.Array, fmt: Format) -> jax.Array:
    """Casts codes back to the dtype of their format, after a cast of a whole tree.

    `jax.tree.map(lambda x: x.astype(dtype), params)` casts codes as well; `jmp` casts floating codes.
    Dtypes of 16 bits and more hold all codes. `optax.incremental_update` averages codes, which are
    equal in all steps.

    Raises:
      TypeError: for a dtype that does not hold all codes.
    """
    if codes.dtype == fmt.dtype:
        return codes
    kinds: Any = (np.floating,) if fmt.is_float else (np.floating, np.integer)
    if codes.dtype.itemsize == 1 or not any(jax.dtypes.issubdtype(codes.dtype, k) for k in kinds):
        raise cast_error(fmt.name, fmt.dtype, codes.dtype)
    if not fmt.is_float and jax.dtypes.issubdtype(codes.dtype, np.floating):
        codes = jnp.round(codes)  # an average of equal codes may be a little less
    return codes.astype(fmt.dtype)


# Jitted, as eager code would compile each operation for each shape.
@functools.partial(jax.jit, static_argnames=("groups", "fmt"), inline=compat.INLINE)
def unpack(codes: jax.Array, groups: int, fmt: Format) -> jax.Array:
    """Unpacks codes to `[..., groups, g]`, the inverse of `pack`."""
    *lead, stored = codes.shape
    codes = codes.reshape(*lead, groups, stored // groups)
    if fmt.bits == 8:
        return codes
    planes, below, start = [], 0, 0
    for bits in fmt.planes:
        stop = start + codes.shape[-1] * bits // fmt.bits
        packed = codes[..., start:stop]
        shifted = [packed >> i for i in range(0, 8, bits)]
        plane = jnp.concatenate(shifted, axis=-1) & (2**bits - 1)
        planes.append(plane << below)
        below, start = below + bits, stop
    return functools.reduce(jnp.bitwise_or, planes)


def codes_at(
    group: jax.Array,
    within: jax.Array,
    g: int,
    fmt: Format,
    take: Callable[[jax.Array], jax.Array],
    expand: Callable[[jax.Array], jax.Array] = lambda shift: shift,
) -> jax.Array:
    """Returns the unpacked codes of some elements.

    Args:
      group: the index of each element's group.
      within: its position in the group.
      g: the group size.
      fmt: the format.
      take: returns the stored elements at positions of the last axis.
      expand: reshapes an array of the shape of `within` so that it broadcasts with these elements.
    """
    planes, start, below = [], 0, 0
    for bits in fmt.planes:
        size = g * bits // 8
        plane = take(group * fmt.stored(g) + start + within % size)
        if fmt.bits < 8:
            shift = expand(within // size * bits)
            plane = plane >> jnp.broadcast_to(shift, plane.shape).astype(plane.dtype)
            plane = (plane & (2**bits - 1)) << below
        planes.append(plane)
        start, below = start + size, below + bits
    return functools.reduce(jnp.bitwise_or, planes)


# --- values ------------------------------------------------------------------------------------


def arithmetic_dtype(dtype: DType) -> np.dtype:
    """Returns the dtype to compute values in: float64 for float64 scales, else float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def decode(codes: jax.Array, dtype: DType, fmt: Format) -> jax.Array:
    """Returns the values of unpacked codes, before scale and offset."""
    if fmt.table is not None:
        return jnp.asarray(fmt.table, dtype).at[codes].get(mode="promise_in_bounds")
    values = codes.astype(dtype)
    return values - fmt.bias if fmt.bias else values


def scaled(codes: jax.Array, scale: jax.Array, offset: jax.Array | None, fmt: Format) -> jax.Array:
    """`scale * decode(code) + offset` for unpacked codes and operands that broadcast with them."""
    return scaled_values(decode(codes, arithmetic_dtype(scale.dtype), fmt), scale, offset)


def scaled_values(values: jax.Array, scale: jax.Array, offset: jax.Array | None) -> jax.Array:
    """`scale * value + offset` in the arithmetic dtype of the scale."""
    dtype = arithmetic_dtype(scale.dtype)
    values = values.astype(dtype) * scale.astype(dtype)
    return values if offset is None else values + offset.astype(dtype)


def dequantize(
    codes: jax.Array, scale: jax.Array, offset: jax.Array | None, fmt: Format
) -> jax.Array:
    """Returns the values of stored codes.

    Args:
      codes: `[..., rows, fmt.stored(k)]`.
      scale: `[..., tiles, groups]`, floating; the number of tiles divides the number of rows.
      offset: as `scale`, or None.
      fmt: the format.

    Returns:
      `[..., rows, k]`, in the arithmetic dtype of `scale`.
    """
    values = _times_scale(codes, scale, fmt)
    if offset is not None:  # alone: in one program it might be rounded together with the product
        values = values + by_rows(offset, codes.shape[-2])[..., None].astype(values.dtype)
    return values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])


@functools.partial(jax.jit, static_argnames="fmt", inline=compat.INLINE)
def _times_scale(codes: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    """Returns the values of stored codes before the offset, `[..., rows, groups, g]`."""
    by_row = by_rows(scale, codes.shape[-2])[..., None]
    return scaled(unpack(codes, scale.shape[-1], fmt), by_row, None, fmt)


def by_rows(scale: jax.Array, rows: int) -> jax.Array:
    """Repeats the scale of each tile of rows, to one for each row."""
    tiles = scale.shape[-2]
    return scale if tiles == rows else repeated(scale, rows // tiles, scale.ndim - 2)


def repeated(x: jax.Array, count: int, axis: int) -> jax.Array:
    """Repeats each element of an axis, also if the axis is split over a mesh.

    (Then `jnp.repeat` needs `out_sharding`, which not all versions of JAX have.)
    """
    before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
    x = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*before, count, *after))
    return x.reshape(*before[:-1], before[-1] * count, *after)


def nearest(relative: jax.Array, fmt: Format) -> jax.Array:
    """Returns the stored code nearest to each value, which is in units of its scale.

    Ties go to the even code if codes are numbers, and to the even mantissa in fp4, as in IEEE 754.
    """
    if fmt.table is not None:
        order, middles = _thresholds(fmt)
        middle = jnp.asarray(middles, relative.dtype)
        at = (relative[..., None] > lax.broadcast_to_rank(middle, relative.ndim + 1)).sum(-1)
        return jnp.asarray(order, fmt.dtype)[at]
    values = nearest_values(relative, fmt)
    return (values + fmt.bias if fmt.bias else values).astype(fmt.dtype)  # (-0 + 0 would be 0)


def nearest_values(relative: jax.Array, fmt: Format) -> jax.Array:
    """`decode(nearest(relative))`, but for zeros' signs, without the codes: these take longer."""
    if fmt.table is not None:
        return decode(nearest(relative, fmt), relative.dtype, fmt)
    # Floats of 8 bits do not saturate: numbers out of the range would become infinity or NaN.
    clipped = jnp.clip(relative, fmt.lowest, fmt.largest)
    if fmt.is_float:
        return _rounded_to_float8(clipped, fmt.dtype)
    # The bias is 1/2 if codes stand for ±1/2 (binary).
    return jnp.floor(clipped) + 0.5 if fmt.bias == 0.5 else jnp.round(clipped)


def _rounded_to_float8(x: jax.Array, dtype: DType) -> jax.Array:
    """The nearest 8-bit floats; casts of some XLA versions round twice, through float16."""
    info = jnp.finfo(dtype)
    exponent = jnp.maximum(jnp.frexp(x)[1] - 1, int(info.minexp))
    step = jnp.ldexp(jnp.ones_like(x), exponent - info.nmant)
    return jnp.round(x / step) * step


def _thresholds(fmt: Format) -> tuple[list[int], list[float]]:
    """Returns the codes in the order of their values, and the thresholds between them."""
    # Only the positive zero is kept, whose code comes before the negative zero's.
    values = {v: code for code, v in reversed(list(enumerate(fmt.table or ())))}
    order = [values[v] for v in sorted(values)]
    table = np.asarray(sorted(values), np.float32)
    middles = (table[1:] + table[:-1]) / 2
    if fmt.name == "fp4":  # a tie goes up if the upper code is even
        up = np.asarray([code % 2 == 0 for code in order[1:]])
        middles = np.where(up, np.nextafter(middles, np.float32(-np.inf)), middles)
    return order, middles.tolist()
