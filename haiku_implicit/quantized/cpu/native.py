"""The product with a quantized matrix on CPUs: the conditions on operands, and calls of native kernels.

`QuantizedMatmul` decodes the matrix and multiplies floats, `IntegerMatmul` multiplies integer codes
with activations rounded to int8. `TrellisMatmul` decodes trellis codes and multiplies integers,
`TrellisDecode` decodes them, and `TrellisEncode` makes them. `Hadamard` rotates activations. `build`
compiles them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core import compat
from haiku_implicit.core.typing import Array, DType
from haiku_implicit.quantized import operands
from haiku_implicit.quantized.cpu import build
from haiku_implicit.quantized.layout import FLOATS, Order, matrices, readable, sizes
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

# Kinds of codes of more than four bits that are no integers with a sign, less a bias.
_TABLE, _SIGNED, _KINDS = 0, 1, {"uint8": 2, "fp8_e4m3": 3, "fp8_e5m2": 4}

# The types of numbers that the kernels read.
_NUMBERS: dict[type, Any] = {int: np.int64, float: np.float32}

# The activations that kernels multiply as integers.
_INT8 = ("int8", "int8,groups")

# Sums of more products of 8-bit integers might overflow 32 bits.
_LARGEST_GROUP = 1 << 16
# For more rows than this, smaller groups than this are multiplied by tiles, or as floats.
_FEW, _SMALLEST_GROUP_OF_MANY = 16, 512
# For more rows than this, floats and int8, trellis codes are decoded in blocks, which XLA multiplies.
_FEW_OF_TRELLIS = 32, 64


def applies(x: Array, q: Array) -> bool:
    """Whether there is a kernel for a product that `may_be_served`.

    There is for codes of one or two planes, and for trellis codes and few rows of activations.

    Args:
      x, q: as for `may_be_served`.
    """
    if not isinstance(q, QuantizedMatrix):
        return x.shape[-2] <= _FEW_OF_TRELLIS[q.activation in _INT8] and build.available()
    return len(formats.find(q.format).planes) <= 2 and build.available()


def native_matmul(x: jax.Array, q: Array, order: Order, dtype: DType, **_: Any) -> Any:
    """Computes the product with a native kernel, in float32 or integer sums.

    Args:
      x: `[batch, m, i]`.
      q: `[batch, i, o]`.
      order: as for `quantized_matmul`.
      dtype: the dtype of the result.
    """
    x = x.astype(jnp.float32)
    if not isinstance(q, QuantizedMatrix):
        return _trellis_matmul(x, q, order).astype(dtype)
    integers = _integers(q, x.shape[-2])
    if integers is not None:
        return _call("IntegerMatmul", x, q, order, **integers).astype(dtype)
    if q.activation is not None:
        x = operands.rounded_rows(x, q)
    fmt, along_rows = formats.find(q.format), q.axis == -1
    how = dict(
        along_rows=along_rows,
        table=_table(fmt),
        kind=_TABLE if fmt.bits <= 4 else _KINDS.get(fmt.name, _SIGNED),
        rounding=FLOATS[q.dtype],
        bias=int(fmt.bias) if fmt.bits > 4 else 0,
    )
    packed = (
        0 if along_rows or x.shape[1] <= 2 else -(-min(x.shape[1], 512) // 32) * 32 * x.shape[2]
    )
    return _call("QuantizedMatmul", x, q, order, packed, **how).astype(dtype)


def _integers(q: QuantizedMatrix, m: int) -> dict[str, Any] | None:
    """Returns how `IntegerMatmul` reads a matrix; None if it cannot, or is slower for `m` rows.

    With many rows, scaling the sums of small groups takes longer than multiplying integers saves,
    unless the kernel's tiles serve the codes.

    Returns:
      `table`: the unsigned integer of each code of four bits; for eight bits, the number to add to each
      code. `bias`: the number to subtract then. `unit`: the factor of the result. `in_groups`: whether
      activations have a scale for each group.
    """
    fmt = formats.find(q.format)
    group = -(-q.shape[q.axis] // q.scale.shape[-1])
    if q.activation not in _INT8 or q.axis != -2 or group > _LARGEST_GROUP:
        return None
    slow = m > _FEW and group < _SMALLEST_GROUP_OF_MANY
    in_groups = q.activation == "int8,groups"
    if fmt.name in ("int8", "uint8"):
        if slow and build.largest_tiled() < 255:
            return None
        bias = 128 if fmt.name == "int8" else 0
        return dict(table=np.asarray([bias], np.int64), bias=bias, unit=1.0, in_groups=in_groups)
    if fmt.planes != (4,):
        return None
    table = _table(fmt)
    for unit in (1.0, 0.5):
        if np.all(table % unit == 0):
            integers = (table / unit).astype(np.int64)
            bias = -int(integers.min())
            largest = int(integers.max()) + bias
            if largest > (build.largest_tiled() if slow else 255):
                return None
            return dict(table=integers + bias, bias=bias, unit=unit, in_groups=in_groups)
    return None


def _call(
    handler: str, x: jax.Array, q: QuantizedMatrix, order: Order, *memory: int, **attributes: Any
) -> Any:
    """Calls a handler with working memory of these sizes; returns the product."""
    shapes = [(*x.shape[:2], sizes(q, order)[-1]), *((size,) for size in memory)]
    like = (x, *jax.tree.leaves(q))
    results = [compat.struct(shape, jnp.float32, like=like) for shape in shapes]
    arrays = dict(planes=(*formats.find(q.format).planes, 0)[:2], order=order[:-1])
    attributes |= {name: np.asarray(array, np.int64) for name, array in arrays.items()}
    numbers = {name: _NUMBERS[type(x)](x) for name, x in attributes.items() if type(x) in _NUMBERS}
    call = jax.ffi.ffi_call(build.PREFIX + handler, results)
    offset = jnp.zeros(0, jnp.float32) if q.offset is None else readable(q.offset)
    return call(x, q.codes, readable(q.scale), offset, **attributes | numbers)[0]


def _table(fmt: formats.Format) -> np.ndarray:
    """Returns the value of each stored code, in a table of at least 16."""
    if fmt.table is not None:
        return np.resize(np.asarray(fmt.table, np.float32), 16)
    codes = np.arange(max(16, 2**fmt.bits), dtype=np.uint8).view(fmt.dtype)
    return codes.astype(np.float32) - np.float32(fmt.bias)


def multiply_hadamard(x: jax.Array, *, block: int) -> Any:
    """Multiplies blocks of float32 numbers by the Hadamard matrix with rows of length one."""
    call = jax.ffi.ffi_call(build.PREFIX + "Hadamard", compat.struct(x.shape, x.dtype, like=(x,)))
    return call(x, block=np.int64(block))


# --- trellis codes -------------------------------------------------------------------------------


def _trellis_matmul(x: jax.Array, q: Any, order: Order) -> Any:
    """Computes the product with a `TrellisMatrix`, in float32."""
    own = dict(along_rows=q.axis == -1, bits=q.bits, steps=q.steps, length=q.length)
    own["rounded"] = q.activation in _INT8
    if q.activation is not None and not own["rounded"]:
        x = operands.rounded_rows(x, q)
    shape = (*x.shape[:2], sizes(q, order)[-1])
    words = matrices(q.words, order)
    call = jax.ffi.ffi_call(
        build.PREFIX + "TrellisMatmul", compat.struct(shape, jnp.float32, like=(x, words))
    )
    return call(x, words, **{name: np.int64(n) for name, n in own.items()})


def trellis_decode(words: jax.Array, *, bits: int, steps: int) -> Any:
    """Returns the numbers of words, as `types.trellis.decode` does."""
    shape = (*words.shape[:-1], words.shape[-1] * 16 // bits)
    out = compat.struct(shape, jnp.float32, like=(words,))
    run = jax.ffi.ffi_call(build.PREFIX + "TrellisDecode", out)
    return run(words, bits=np.int64(bits), steps=np.int64(steps))


def trellis_encoder(bits: int, steps: int) -> Callable[..., Any] | None:
    """Returns the native way to call `types.trellis.encode`; None without kernels."""
    if not build.available():
        return None

    def call(w: jax.Array, factor: jax.Array) -> Any:
        shape = (*w.shape[:-1], w.shape[-1] * bits // 16)
        out = compat.struct(shape, jnp.uint16, like=(w, factor))
        run = jax.ffi.ffi_call(build.PREFIX + "TrellisEncode", out, vmap_method="broadcast_all")
        return run(w, factor, bits=np.int64(bits), steps=np.int64(steps))

    return call
