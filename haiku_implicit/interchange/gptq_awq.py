"""Weights of 2, 3, 4 and 8 bits with zero points, in checkpoints that GPTQ and AWQ made.

Both have, for a module `X` `[inputs, outputs]`, codes `X.qweight`, zero points `X.qzeros` and scales
`X.scales` `[groups, outputs]`; a value is `scale * (code - zero point)`.

In GPTQ's (AutoGPTQ's `qlinear_cuda_old.py`, GPTQModel) 32 bits hold consecutive inputs, the first
lowest; zero points are stored less one, but for `checkpoint_format: gptq_v2`; `X.g_idx` has the group
of each input. In AWQ's (AutoAWQ's `packing_utils.py`, version 'gemm') 32 bits hold eight outputs in the
order 0, 2, 4, 6, 1, 3, 5, 7.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from haiku_implicit.files.container import CheckpointError, brief
from haiku_implicit.interchange.safetensors_files import CONFIG, Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.numerics import formats
from haiku_implicit.numerics.quantized_matrix import QuantizedMatrix

_SCALES = "F16 BF16 F32"
# Of AWQ's eight outputs in 32 bits: where the first, the second, ... is.
_AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


class _Settings(NamedTuple):
    """What a configuration says.

    Attributes:
      bits: of a code.
      group_size: how many inputs share a scale; None for all.
      minus_one: whether zero points are stored less one.
    """

    bits: int
    group_size: int | None
    minus_one: bool = False


class _Parts(NamedTuple):
    """Codes `[outputs, inputs]`, scales and zero points `[outputs, groups]`, groups `[inputs]`."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: np.ndarray


def gptq(tensors: Tensors, config: Mapping[str, Any]) -> tuple[list[Stored], set[str]]:
    """The weights that GPTQ quantized, and the names of all tensors that they are made of."""
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _wrong(tensors, "checkpoint_format", "'gptq' or 'gptq_v2'", form)
    settings = _settings(tensors, config, (2, 3, 4, 8), minus_one=form == "gptq")
    return _found(tensors, settings, _gptq_shape, _gptq_parts)


def awq(tensors: Tensors, config: Mapping[str, Any]) -> tuple[list[Stored], set[str]]:
    """The weights that AWQ quantized, and the names of all tensors that they are made of."""
    version = config.get("version", config.get("checkpoint_format", "gemm"))
    if str(version).lower() != "gemm":
        raise _wrong(tensors, "version", "'gemm'", version)
    if config.get("zero_point", True) is not True:
        raise _wrong(tensors, "zero_point", "true", config["zero_point"])
    return _found(tensors, _settings(tensors, config, (4,)), _awq_shape, _awq_parts)


def _settings(
    tensors: Tensors, config: Mapping[str, Any], known: tuple[int, ...], minus_one: bool = False
) -> _Settings:
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size"))
    if bits not in known:
        raise _wrong(tensors, "bits", f"one of {', '.join(map(str, known))}", bits)
    if type(size) is not int or (size <= 0 and size != -1):
        raise _wrong(tensors, "group_size", "a positive integer or -1", size)
    return _Settings(bits, None if size == -1 else size, minus_one)


def _wrong(tensors: Tensors, key: str, expected: str, found: Any) -> CheckpointError:
    return CheckpointError(
        f"{tensors.where}: {CONFIG}: quantization_config: {key}: expected {expected}, got "
        f"{brief(found)}"
    )


def _found(
    tensors: Tensors,
    settings: _Settings,
    shape_of: Callable[[Tensors, str, _Settings], tuple[int, ...]],
    parts_of: Callable[[Tensors, str, _Settings, tuple[int, ...]], _Parts],
) -> tuple[list[Stored], set[str]]:
    """All weights, and the names of their tensors."""
    found: list[Stored] = []
    used: set[str] = set()
    for name in tensors.files:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            found.append(_stored(tensors, module, settings, shape_of, parts_of))
            used |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    return found, used


def _stored(
    tensors: Tensors, module: str, settings: _Settings, shape_of: Any, parts_of: Any
) -> Stored:
    shape = shape_of(tensors, module, settings)

    def read(dense: bool) -> np.ndarray | QuantizedMatrix:
        parts = parts_of(tensors, module, settings, shape)
        return _values(parts) if dense else _matrix(parts, settings.bits)

    return Stored(f"{module}.weight", shape, read)


# --- the two layouts -----------------------------------------------------------------------------


def _gptq_shape(tensors: Tensors, module: str, settings: _Settings) -> tuple[int, ...]:
    words, outputs = _two(tensors, f"{module}.qweight")
    return outputs, words * 32 // settings.bits


def _gptq_parts(
    tensors: Tensors, module: str, settings: _Settings, shape: tuple[int, ...]
) -> _Parts:
    (outputs, inputs), bits = shape, settings.bits
    groups = _num_groups(inputs, settings)
    words = tensors.array(f"{module}.qweight", "I32", (inputs * bits // 32, outputs))
    of_zeros = tensors.array(f"{module}.qzeros", "I32", (groups, outputs * bits // 32))
    scales = tensors.array(f"{module}.scales", _SCALES, (groups, outputs))
    group = np.arange(inputs) // (settings.group_size or inputs)
    if f"{module}.g_idx" in tensors.files:
        group = tensors.array(f"{module}.g_idx", "I32", (inputs,))
        if group.min() < 0 or group.max() >= groups:
            raise CheckpointError(
                f"{tensors.where}: {module}.g_idx: expected groups 0 ... {groups - 1}, got "
                f"{group.min()} ... {group.max()}"
            )
    zeros = _unpacked(of_zeros, bits).astype(np.int16)
    if settings.minus_one:
        if (zeros == 2**bits - 1).any():
            raise ValueError(
                f"{module}.qzeros: a zero point that is stored as {2**bits - 1}, which programs read "
                f"as 0 or as {2**bits}. Convert the checkpoint to the format gptq_v2 with GPTQModel"
            )
        zeros += 1
    return _Parts(_unpacked(words.T, bits), scales.T, zeros.T, group)


def _awq_shape(tensors: Tensors, module: str, settings: _Settings) -> tuple[int, ...]:
    inputs, words = _two(tensors, f"{module}.qweight")
    return words * 32 // settings.bits, inputs


def _awq_parts(
    tensors: Tensors, module: str, settings: _Settings, shape: tuple[int, ...]
) -> _Parts:
    (outputs, inputs), bits = shape, settings.bits
    groups = _num_groups(inputs, settings)
    words = tensors.array(f"{module}.qweight", "I32", (inputs, outputs * bits // 32))
    of_zeros = tensors.array(f"{module}.qzeros", "I32", (groups, outputs * bits // 32))
    scales = tensors.array(f"{module}.scales", _SCALES, (groups, outputs))

    def in_order(words: np.ndarray) -> np.ndarray:
        eights = _unpacked(words, bits).reshape(len(words), -1, 8)
        return eights[..., _AWQ_POSITIONS].reshape(len(words), -1).T

    group = np.arange(inputs) // (settings.group_size or inputs)
    return _Parts(in_order(words), scales.T, in_order(of_zeros).astype(np.int16), group)


def _two(tensors: Tensors, name: str) -> tuple[int, int]:
    shape = tensors.shape(name)
    if len(shape) != 2:
        raise CheckpointError(f"{tensors.where}: {name}: expected two axes, got {list(shape)}")
    return shape[0], shape[1]


def _num_groups(inputs: int, settings: _Settings) -> int:
    return 1 if settings.group_size is None else -(-inputs // settings.group_size)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[rows, n * 32 / bits]` uint8 of int32 `[rows, n]`: each row is one run of bits."""
    words = np.ascontiguousarray(words)
    data = (words.byteswap() if sys.byteorder == "big" else words).view(np.uint8)
    if bits == 3:  # a code may lie across two bytes
        ones = np.unpackbits(data, axis=-1, bitorder="little").reshape(len(data), -1, 3)
        return ones[..., 0] | ones[..., 1] << 1 | ones[..., 2] << 2
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data[..., None] >> shifts & (2**bits - 1)).reshape(len(data), -1)


# --- values --------------------------------------------------------------------------------------


def _values(parts: _Parts) -> np.ndarray:
    """`scale * (code - zero point)` `[outputs, inputs]`, in float32, which holds it exactly."""
    codes, scales, zeros, group = parts
    return scales.astype(np.float32)[:, group] * (codes - zeros[:, group]).astype(np.float32)


def _matrix(parts: _Parts, bits: int) -> QuantizedMatrix:
    """The same. Where all zero points are the middle code, it needs no offsets."""
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
        codes = (codes ^ 128).view(np.int8)  # less 128
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
