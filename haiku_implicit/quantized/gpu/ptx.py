"""Decodes integers and 8-bit floats in NVIDIA's assembly, PTX, four codes at a time.

Triton widens each byte by itself, and rounds each value to bfloat16 by an instruction that runs at an
eighth of the speed of others. Here one instruction rounds two values.
"""

import jax
import jax.numpy as jnp
import numpy as np

from haiku_implicit.core.typing import DType
from haiku_implicit.quantized.numbers import formats

_PACK = 4  # codes in a register: one digit of four bytes
_ROUNDED = {"bfloat16": "cvt.rn.bf16x2.f32", "float16": "cvt.rn.f16x2.f32"}


def decodes(fmt: formats.Format, capability: float) -> bool:
    """Whether `decoded` knows a format on GPUs of this compute capability, 0 if there is no GPU."""
    if fmt.table is not None:
        return False
    return capability >= (8.9 if fmt.name == "fp8_e4m3" else 8.0)


def decoded(
    codes: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    fmt: formats.Format,
    digit: int,
    dtype: DType,
    wide: bool,
) -> jax.Array:
    """Returns the weights that one digit of each byte stands for.

    Args:
      codes: bytes.
      scale: float32, of the shape of the codes.
      offset: as the scale, or None.
      fmt: the format of the codes.
      digit: which part of the bytes.
      dtype: the dtype that values are rounded to.
      wide: whether they are float32 in spite of it.
    """
    from jax.experimental.pallas import triton

    given = [scale] if offset is None else [scale, offset]
    wide = wide or np.dtype(dtype).name not in _ROUNDED
    results = ["=f"] * _PACK if wide else ["=r"] * (_PACK // 2)
    (values,) = triton.elementwise_inline_asm(
        _program(fmt, digit, np.dtype(dtype).name, offset is not None, wide),
        args=[jax.lax.bitcast_convert_type(codes, jnp.uint8), *given],
        constraints=",".join([*results, "r", *["f"] * (_PACK * len(given))]),
        pack=_PACK,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float32 if wide else dtype)],
    )
    return values


def rounded(values: jax.Array, dtype: DType) -> jax.Array:
    """Rounds float32 values to a dtype, two at a time; the result is float32."""
    from jax.experimental.pallas import triton

    name = np.dtype(dtype).name
    if name not in _ROUNDED:
        return values
    registers = ".reg .b32 w; .reg .f32 v0, v1; mov.f32 v0, $2; mov.f32 v1, $3;"
    (result,) = triton.elementwise_inline_asm(
        "\n".join(["{", registers, *_round_pair(name, 0, wide=True), "}"]),
        args=[values],
        constraints="=f,=f,f,f",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, jnp.float32)],
    )
    return result


def _program(fmt: formats.Format, digit: int, dtype: str, has_offset: bool, wide: bool) -> str:
    """Returns the assembly; its operands are the results, the codes, four scales and four offsets."""
    codes = _PACK if wide else _PACK // 2  # the number of results
    scales, offsets = codes + 1, codes + 1 + _PACK
    lines = [".reg .b32 c, w;", ".reg .b16 l, h;", ".reg .f32 v0, v1, v2, v3;"]
    lines += _floats(fmt, codes) if fmt.is_float else _integers(fmt, digit, codes)
    for i in range(_PACK):
        if has_offset:
            lines.append(f"fma.rn.f32 v{i}, v{i}, ${scales + i}, ${offsets + i};")
        else:
            lines.append(f"mul.rn.f32 v{i}, v{i}, ${scales + i};")
    for i in range(0, _PACK, 2):
        if dtype in _ROUNDED:
            lines += _round_pair(dtype, i, wide)
        else:
            lines += [f"mov.f32 ${j}, v{j};" for j in (i, i + 1)]
    return "\n".join(["{", *lines, "}"])


def _integers(fmt: formats.Format, digit: int, codes: int) -> list[str]:
    """Returns the instructions that make floats of one digit of four bytes."""
    if fmt.dtype == np.int8:
        lines = [f"xor.b32 c, ${codes}, 0x80808080;"]
    elif fmt.bits == 8:
        lines = [f"mov.b32 c, ${codes};"]
    else:
        mask = (2**fmt.bits - 1) * 0x01010101
        lines = [f"shr.u32 c, ${codes}, {digit * fmt.bits};", f"and.b32 c, c, {mask:#010x};"]
    # The bits of 2^23 + code: GPUs convert integers more slowly than they subtract floats.
    bias = 128 if fmt.dtype == np.int8 else fmt.bias
    for i in range(_PACK):
        lines += [
            f"prmt.b32 w, c, 0x4B000000, 0x744{i};",
            f"mov.b32 v{i}, w;",
            f"sub.rn.f32 v{i}, v{i}, {_float(2.0**23 + int(bias))};",
        ]
        if bias % 1:
            lines.append(f"sub.rn.f32 v{i}, v{i}, {_float(bias % 1)};")
    return lines


def _floats(fmt: formats.Format, codes: int) -> list[str]:
    """Returns the instructions that widen four floats of 8 bits, in pairs."""
    lines = []
    for i in range(0, _PACK, 2):
        if fmt.name == "fp8_e4m3":
            lines.append(f"mov.b32 {{l, h}}, ${codes};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 w, {'h' if i else 'l'};")
        else:  # the upper bytes of float16
            lines.append(f"prmt.b32 w, ${codes}, 0, {'0x3424' if i else '0x1404'};")
        lines.append("mov.b32 {l, h}, w;")
        lines.append(f"cvt.f32.f16 v{i}, l; cvt.f32.f16 v{i + 1}, h;")
    return lines


def _round_pair(dtype: str, i: int, wide: bool) -> list[str]:
    """Returns the instructions that round values i and i + 1 at once, and widen them if `wide`."""
    lines = [f"{_ROUNDED[dtype]} {'w' if wide else f'${i // 2}'}, v{i + 1}, v{i};"]
    if wide and dtype == "bfloat16":
        lines += [f"shl.b32 ${i}, w, 16;", f"and.b32 ${i + 1}, w, 0xFFFF0000;"]
    elif wide:
        lines.append("{.reg .b16 a, b; mov.b32 {a, b}, w;")
        lines.append(f"cvt.f32.f16 ${i}, a; cvt.f32.f16 ${i + 1}, b;}}")
    return lines


def _float(x: float) -> str:
    return f"0f{np.float32(x).view(np.uint32):08X}"
