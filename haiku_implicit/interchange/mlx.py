"""Reads weights that MLX quantized ('affine', 2 to 8 bits) from checkpoints of mlx-lm.

A weight `X.weight` `[..., outputs, inputs]` is uint32; each row is one run of bits, the first code in
the lowest. A group of inputs has a scale in `X.scales` and an offset in `X.biases`; a value is
`scale * code + offset` (MLX's `affine_quantize`).
"""

from collections.abc import Mapping
from typing import Any

from haiku_implicit.files.container import CheckpointError, expect, expect_one_of
from haiku_implicit.interchange.grouped_codes import grouped
from haiku_implicit.interchange.runs_of_bits import unpacked
from haiku_implicit.interchange.safetensors_files import FLOATS, Module, Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

_BITS = (2, 3, 4, 5, 6, 8)


def quantized(tensors: Tensors, where: str, config: Mapping[str, Any]) -> list[Stored]:
    """Finds the weights that MLX quantized.

    Args:
      tensors: the tensors of the checkpoint.
      where: the file of the configuration, for errors.
      config: `group_size`, `bits`, `mode`, and the same keys for single modules under their names.
    """
    modules = (Module(tensors, x) for x in tensors.modules("scales"))
    return [_stored(own, where, config) for own in modules if own.has("weight")]


def _settings(where: str, config: Mapping[str, Any], module: str) -> tuple[int, int]:
    """The bits of a code, and the number of codes that share a scale."""
    own = config.get(module, {})
    if own is False:
        raise CheckpointError(f"{where}: {module}: false, and there are scales of it")
    both: dict[str, Any] = {"mode": "affine", "bits": None, "group_size": None, **config}
    both |= own if isinstance(own, dict) else {}
    mode, bits, size = both["mode"], both["bits"], both["group_size"]
    expect(mode == "affine", f"{where}: mode", "'affine'", mode)
    expect_one_of(_BITS, f"{where}: bits", bits)
    whole = type(size) is int and size > 0 and size % 8 == 0
    expect(whole, f"{where}: group_size", "a multiple of 8", size)
    return bits, size


def _stored(own: Module, where: str, config: Mapping[str, Any]) -> Stored:
    def shape() -> tuple[int, ...]:
        bits, _ = _settings(where, config, own.module)
        *lead, words = own.sizes("weight")
        return *lead, words * 32 // bits

    def read(dense: bool) -> QuantizedMatrix:
        bits, size = _settings(where, config, own.module)
        *lead, inputs = shape()
        groups = (*lead, -(-inputs // size))
        words = own.array("weight", "U32", (*lead, inputs * bits // 32))
        scales, biases = (own.array(part, FLOATS, groups) for part in ("scales", "biases"))
        codes = unpacked(words, bits).reshape(*groups, -1)
        return grouped(codes, scales, biases, formats.FORMATS[f"uint{bits}"], None)

    return own.stored(shape, read, ("weight", "scales", "biases"))
