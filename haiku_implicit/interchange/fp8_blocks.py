"""Reads weights in float8 with scales of blocks, as DeepSeek's models and transformers have them.

A weight `X` `[..., outputs, inputs]` is float8 (e4m3). It has a scale for each block of
`weight_block_size` in `X_scale_inv`, or one for each output or for all in `X_scale`; in both a value is
the code times the scale (transformers' `FineGrainedFP8Config`, DeepSeek-V3's `weight_dequant`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from haiku_implicit.files.container import CheckpointError, expect
from haiku_implicit.interchange.grouped_codes import blocks_of_floats, is_pair
from haiku_implicit.interchange.quantization_config import check_keys
from haiku_implicit.interchange.safetensors_files import Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.quantized.matrix import QuantizedMatrix

_ENDINGS = "_scale_inv", "_scale"
# Keys that do not change what the weights are.
_FREE = {"quant_method", "activation_scheme", "dequantize", "modules_to_not_convert", "scale_fmt"}
_FREE |= {"modules_to_convert", "ignored_layers", "kv_cache_scheme", "kv_cache_quant_method"}
_KINDS = "F16 BF16 F32 F8_E8M0"


def quantized(tensors: Tensors, where: str, own: Mapping[str, Any]) -> list[Stored]:
    """Finds the weights in float8.

    Args:
      tensors: the tensors of the checkpoint.
      where: the file of the configuration, for errors.
      own: the configuration.
    """
    check_keys(where, own, _FREE | {"weight_block_size", "fmt"})
    form, block = own.get("fmt", "e4m3"), own.get("weight_block_size")
    expect(form == "e4m3", f"{where}: fmt", "'e4m3'", form)
    right = block is None or is_pair(block)
    expect(right, f"{where}: weight_block_size", "two positive integers", block)
    found = []
    for name in tensors.files:
        ending = next((x for x in _ENDINGS if name.endswith(x)), "")
        weight = name.removesuffix(ending)
        if ending and weight != name and weight in tensors.files:
            found.append(_stored(tensors, weight, ending, block))
    return found


def _stored(tensors: Tensors, name: str, ending: str, block: list[int] | None) -> Stored:
    def read(dense: bool) -> QuantizedMatrix:
        codes = tensors.array(name, "F8_E4M3")
        scales = tensors.array(f"{name}{ending}", _KINDS)
        scales, own = _grid(codes.shape, scales, block)
        # (transformers computes values in bfloat16 if the scales are only exponents.)
        narrow = scales.dtype == jnp.float8_e8m0fnu
        return blocks_of_floats(codes, scales, own, jnp.bfloat16 if narrow else None, dense)

    module = name.rpartition(".")[0]
    uses = (name, f"{name}{ending}", f"{module}.input_scale", f"{module}.activation_scale")
    return Stored(name, lambda: tensors.shape(name), read, uses)


def _grid(
    shape: tuple[int, ...], scales: np.ndarray, block: list[int] | None
) -> tuple[np.ndarray, tuple[int, int]]:
    """The scales `[..., tiles, groups]`, and the rows and columns of a block."""
    *lead, rows, columns = shape
    ways = [(rows, columns), (1, columns)]
    for across, along in [*([(block[0], block[1])] if block else []), *ways]:
        grid = (*lead, -(-rows // across), -(-columns // along))
        one = across == rows and scales.size == math.prod(grid)
        if scales.shape == grid or one:
            return scales.reshape(grid), (across, along)
    raise CheckpointError(
        f"scales {list(scales.shape)} for {list(shape)}: expected one for each block of {block} "
        "(weight_block_size), for each output, or for all"
    )
