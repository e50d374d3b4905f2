"""Reads weights of 2, 3, 4 and 8 bits with zero points from checkpoints of GPTQ and AWQ.

A module `X` `[inputs, outputs]` has codes `X.qweight`, zero points `X.qzeros` and scales `X.scales`; a
value is `scale * (code - zero point)`.

- GPTQ (AutoGPTQ's `qlinear_cuda_old.py`, GPTQModel): an integer of 32 bits holds codes of consecutive
  inputs, the first in the lowest bits; scales are `[groups, outputs]`; `X.g_idx` has the group of each
  input. The format 'gptq' stores zero points minus one, 'gptq_v2' stores them unchanged.
- AWQ (AutoAWQ's `packing_utils.py`), 'gemm': 32 bits hold eight outputs in the order 0, 2, 4, 6, 1, 3,
  5, 7; scales are `[groups, outputs]`.
- AWQ, 'gemv': 32 bits hold eight consecutive inputs, the first in the lowest bits; scales are
  `[outputs, groups]`, padded with zeros.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from haiku_implicit.files.container import CheckpointError
from haiku_implicit.interchange.quantization_config import Config, Settings
from haiku_implicit.interchange.runs_of_bits import unpacked
from haiku_implicit.interchange.safetensors_files import Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

_SCALES = "F16 BF16 F32"
# The positions of the first, second, ... of AWQ's eight outputs in 32 bits.
_AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


class _Parts(NamedTuple):
    """Codes `[outputs, inputs]`, scales and zero points `[outputs, groups]`, groups `[inputs]`."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: np.ndarray


def gptq(tensors: Tensors, config: Config) -> tuple[list[Stored], set[str]]:
    """Finds the weights that GPTQ quantized, and the names of all their tensors."""
    layouts = {"gptq": _GPTQ, "gptq_v2": _GPTQ}
    return _found(tensors, config, layouts, bits=(2, 3, 4, 8), words=(8, 16, 32, 64))


def awq(tensors: Tensors, config: Config) -> tuple[list[Stored], set[str]]:
    """Finds the weights that AWQ quantized, and the names of all their tensors."""
    return _found(tensors, config, {"gemm": _GEMM, "gemv": _GEMV}, bits=(4,), words=(32,))


def _found(
    tensors: Tensors, config: Config, layouts: Mapping[str, "_Layout"], **known: tuple[int, ...]
) -> tuple[list[Stored], set[str]]:
    """Finds all quantized weights, and the names of their tensors."""
    found: list[Stored] = []
    used: set[str] = set()
    settings_of = lambda config: config.settings(formats=tuple(layouts), **known)  # noqa: E731
    settings_of(config)
    for name in tensors.files:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            found.append(_stored(tensors, module, config, layouts, settings_of))
            used |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    return found, used


def _stored(
    tensors: Tensors,
    module: str,
    config: Config,
    layouts: Mapping[str, "_Layout"],
    settings_of: Callable[[Config], Settings],
) -> Stored:
    def opened() -> tuple[Settings, "_Layout", tuple[int, int]]:
        settings = settings_of(config.of_module(module))
        layout = layouts[settings.format]
        return settings, layout, layout.shape(tensors, module, settings)

    def read(dense: bool) -> np.ndarray | QuantizedMatrix:
        settings, layout, shape = opened()
        parts = layout.parts(tensors, module, settings, shape)
        return _values(parts) if dense else _matrix(parts, settings.bits)

    return Stored(f"{module}.weight", lambda: opened()[2], read)


# --- the layouts ---------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The layout of a weight in its tensors.

    Attributes:
      shape: returns `[outputs, inputs]`.
      parts: reads the weight.
    """

    shape: Callable[[Tensors, str, Settings], tuple[int, int]]
    parts: Callable[[Tensors, str, Settings, tuple[int, int]], _Parts]


def _gptq_shape(tensors: Tensors, module: str, settings: Settings) -> tuple[int, int]:
    words, outputs = _two(tensors, f"{module}.qweight")
    return outputs, words * settings.word // settings.bits


def _gptq_parts(
    tensors: Tensors, module: str, settings: Settings, shape: tuple[int, int]
) -> _Parts:
    (outputs, inputs), (bits, size, _, _, ordered, word) = shape, settings
    groups = _num_groups(inputs, settings)
    kind = f"I{word}"
    words = tensors.array(f"{module}.qweight", kind, (inputs * bits // word, outputs))
    of_zeros = tensors.array(f"{module}.qzeros", kind, (groups, outputs * bits // word))
    scales = tensors.array(f"{module}.scales", _SCALES, (groups, outputs))
    group = np.arange(inputs) // (size or inputs)
    if f"{module}.g_idx" in tensors.files:
        group = tensors.array(f"{module}.g_idx", "I32", (inputs,))
        if group.min() < 0 or group.max() >= groups:
            raise CheckpointError(
                f"{tensors.where}: {module}.g_idx: expected groups 0 ... {groups - 1}, got "
                f"{group.min()} ... {group.max()}"
            )
    elif ordered and size is not None:
        raise CheckpointError(
            f"{tensors.where}: {module}.g_idx: missing, and by desc_act it has the group of each input"
        )
    zeros = unpacked(of_zeros, bits).astype(np.int16)
    zeros = _zero_points(f"{tensors.where}: {module}.qzeros", zeros, settings)
    return _Parts(unpacked(words.T, bits), scales.T, zeros.T, group)


def _zero_points(where: str, stored: np.ndarray, settings: Settings) -> np.ndarray:
    """The zero points, all equal to the middle code if the weight is symmetric.

    Some programs (GPTQModel since version 5) write symmetric weights with zero points as in 'gptq_v2',
    but call the format 'gptq'. Programs that multiply by such weights ignore their zero points; others
    would be off by one scale. The middle code tells the formats apart.
    """
    middle, last = 2 ** (settings.bits - 1), 2**settings.bits - 1
    less_one = settings.format == "gptq"
    if settings.symmetric is not False and (stored == middle).all():
        return stored
    if settings.symmetric and (stored != middle - less_one).any():
        raise CheckpointError(
            f"{where}: the configuration says that the weight is symmetric (sym) and its format "
            f"{settings.format}, by which all are stored as {middle - less_one}; got "
            f"{stored.min()} ... {stored.max()}"
        )
    if less_one and (stored == last).any():
        raise ValueError(
            f"{where}: a zero point that is stored as {last}, which programs read as 0 or as "
            f"{last + 1}. Convert the checkpoint to the format gptq_v2 with GPTQModel"
        )
    return stored + less_one


def _gemm_shape(tensors: Tensors, module: str, settings: Settings) -> tuple[int, int]:
    inputs, words = _two(tensors, f"{module}.qweight")
    return words * 32 // settings.bits, inputs


def _gemm_parts(
    tensors: Tensors, module: str, settings: Settings, shape: tuple[int, int]
) -> _Parts:
    (outputs, inputs), bits = shape, settings.bits
    groups = _num_groups(inputs, settings)
    words = tensors.array(f"{module}.qweight", "I32", (inputs, outputs * bits // 32))
    of_zeros = tensors.array(f"{module}.qzeros", "I32", (groups, outputs * bits // 32))
    scales = tensors.array(f"{module}.scales", _SCALES, (groups, outputs))

    def in_order(words: np.ndarray) -> np.ndarray:
        eights = unpacked(words, bits).reshape(len(words), -1, 8)
        return eights[..., _AWQ_POSITIONS].reshape(len(words), -1).T

    return _awq_parts(tensors, module, settings, in_order(words), scales.T, in_order(of_zeros))


def _gemv_shape(tensors: Tensors, module: str, settings: Settings) -> tuple[int, int]:
    outputs, words = _two(tensors, f"{module}.qweight")
    return outputs, words * 32 // settings.bits


def _gemv_parts(
    tensors: Tensors, module: str, settings: Settings, shape: tuple[int, int]
) -> _Parts:
    (outputs, inputs), bits = shape, settings.bits
    groups = _num_groups(inputs, settings)
    _, width = _two(tensors, f"{module}.qzeros")  # it may have room for more groups
    width = max(width, -(-groups * bits // 32))
    words = tensors.array(f"{module}.qweight", "I32", (outputs, inputs * bits // 32))
    of_zeros = tensors.array(f"{module}.qzeros", "I32", (outputs, width))
    scales = tensors.array(f"{module}.scales", _SCALES, (outputs, width * 32 // bits))
    zeros = unpacked(of_zeros, bits)[:, :groups]
    return _awq_parts(tensors, module, settings, unpacked(words, bits), scales[:, :groups], zeros)


def _awq_parts(
    tensors: Tensors,
    module: str,
    settings: Settings,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
) -> _Parts:
    middle = 2 ** (settings.bits - 1)
    if settings.symmetric and (zeros != middle).any():
        raise CheckpointError(
            f"{tensors.where}: {module}.qzeros: the configuration says that the weight is symmetric "
            f"(zero_point, sym), by which all are {middle}; got {zeros.min()} ... {zeros.max()}"
        )
    inputs = codes.shape[1]
    group = np.arange(inputs) // (settings.group_size or inputs)
    return _Parts(codes, scales, zeros.astype(np.int16), group)


_GPTQ = _Layout(_gptq_shape, _gptq_parts)
_GEMM = _Layout(_gemm_shape, _gemm_parts)
_GEMV = _Layout(_gemv_shape, _gemv_parts)


def _two(tensors: Tensors, name: str) -> tuple[int, int]:
    shape = tensors.shape(name)
    if len(shape) != 2:
        raise CheckpointError(f"{tensors.where}: {name}: expected two axes, got {list(shape)}")
    return shape[0], shape[1]


def _num_groups(inputs: int, settings: Settings) -> int:
    return 1 if settings.group_size is None else -(-inputs // settings.group_size)


# --- values --------------------------------------------------------------------------------------


def _values(parts: _Parts) -> np.ndarray:
    """`scale * (code - zero point)` `[outputs, inputs]`, in float32, which holds it exactly."""
    codes, scales, zeros, group = parts
    return scales.astype(np.float32)[:, group] * (codes - zeros[:, group]).astype(np.float32)


def _matrix(parts: _Parts, bits: int) -> QuantizedMatrix:
    """A `QuantizedMatrix` of the values, without offsets if all zero points are the middle code."""
    codes, scales, zeros, group = parts
    outputs, inputs = codes.shape
    groups = scales.shape[1]
    size = inputs // groups
    if inputs % groups or (group != np.arange(inputs) // size).any():
        raise ValueError(
            "the groups are not runs of inputs that follow each other (desc_act, g_idx), which a "
            "QuantizedMatrix can't hold. `dequantize` makes it dense"
        )
    symmetric = (zeros == 2 ** (bits - 1)).all()
    fmt = formats.FORMATS[f"int{bits}" if symmetric else f"uint{bits}"]
    if size % fmt.multiple:
        raise ValueError(
            f"groups of {size} codes of {bits} bits do not fill whole bytes, as they have to in a "
            "QuantizedMatrix. `dequantize` makes it dense"
        )
    if fmt.name == "int8":
        codes = (codes ^ 128).view(np.int8)  # minus 128
    # A float16 scale has 11 digits and a zero point 8: float32 holds the offset exactly.
    offset = None if symmetric else -scales.astype(np.float32) * zeros.astype(np.float32)
    packed = formats.pack(jnp.asarray(codes.reshape(outputs, groups, size)), fmt)
    return QuantizedMatrix.from_parts(
        packed,
        np.ascontiguousarray(scales),
        offset,
        dtype=fmt.name,
        axis=-1,
        out_dtype=scales.dtype,
    )
