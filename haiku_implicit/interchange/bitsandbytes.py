"""Reads weights that bitsandbytes quantized from a checkpoint of transformers.

Formats: bitsandbytes 0.50 (`functional.QuantState.as_dict`, `nn.modules.Linear8bitLt`). With 4 bits
(nf4, fp4), `X.weight` has two codes per byte, the first in the high bits, in the order of the dense
weight `[outputs, inputs]`; each block of codes has a scale in `X.weight.absmax`. Double quantization
stores these scales as codes. With 8 bits (LLM.int8), `X.SCB` has the largest magnitude of each row of
`X.weight`.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.files.container import expect, is_shape, parse_json
from haiku_implicit.interchange.grouped_codes import grouped
from haiku_implicit.interchange.safetensors_files import Module, Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

_STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<kind>nf4|fp4)")
_FORMATS = {"nf4": "nf4", "fp4": "fp4_bnb"}
_PARTS_OF_4 = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def quantized(tensors: Tensors) -> list[Stored]:
    """Finds the weights that bitsandbytes quantized."""
    found = []
    for name in tensors.files:
        if match := _STATE.fullmatch(name):
            found.append(_four_bits(tensors, match["weight"], name, _FORMATS[match["kind"]]))
        elif name.endswith(".SCB"):
            found.append(_eight_bits(Module(tensors, name.removesuffix(".SCB"))))
    return found


# --- 4 bits --------------------------------------------------------------------------------------


def _four_bits(tensors: Tensors, name: str, state_name: str, format_name: str) -> Stored:
    state_of = functools.cache(lambda: _state_of(tensors, state_name))

    def shape_of() -> tuple[int, ...]:
        return tuple(state_of()["shape"])

    def read(dense: bool) -> np.ndarray | QuantizedMatrix:
        state, shape = state_of(), shape_of()
        packed = tensors.array(name).reshape(-1).view(np.uint8)
        count = math.prod(shape)
        if packed.size != (count + 1) // 2:
            raise value_error(f"{packed.size} bytes of codes, expected those of {list(shape)}")
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[:count]
        scales = _scales(tensors, name, state, -(-count // state["blocksize"]))
        table = tensors.array(f"{name}.quant_map", "F32", (16,))
        if dense:
            return _values(codes, table, scales, state["blocksize"]).reshape(shape)
        known = np.asarray(formats.FORMATS[format_name].table, np.float32)
        if not np.array_equal(table, known):
            raise value_error(f"quant_map: not that of {format_name}. `dequantize` makes it dense")
        return _matrix(codes.reshape(shape), scales, state, format_name)

    uses = (name, state_name, *(f"{name}.{part}" for part in _PARTS_OF_4))
    return Stored(name, shape_of, read, uses)


def _state_of(tensors: Tensors, name: str) -> dict[str, Any]:
    where = f"{tensors.where}: {name}"
    state = parse_json(where, tensors.array(name, "U8").tobytes())
    expect(isinstance(state, dict), where, "a JSON object", state)
    shape, dtype = state.get("shape"), state.get("dtype")
    right = isinstance(shape, list) and is_shape(shape) and len(shape) >= 2
    expect(right, f"{where}: shape", "[outputs, inputs], after any other axes", shape)
    right = dtype in ("float32", "float16", "bfloat16")
    expect(right, f"{where}: dtype", "a floating one", dtype)
    for key, default in (("blocksize", 0), ("nested_blocksize", 256)):
        size = state.setdefault(key, default)
        expect(type(size) is int and size > 0, f"{where}: {key}", "a positive integer", size)
    offset = state.setdefault("nested_offset", 0.0)
    expect(isinstance(offset, float), f"{where}: nested_offset", "a number", offset)
    return state


def _scales(tensors: Tensors, name: str, state: Mapping[str, Any], blocks: int) -> np.ndarray:
    """Reads a float32 scale for each block."""
    if f"{name}.nested_absmax" not in tensors.files:
        return tensors.array(f"{name}.absmax", "F32", (blocks,))
    codes = tensors.array(f"{name}.absmax", "U8", (blocks,))
    nested = -(-blocks // state["nested_blocksize"])
    table = tensors.array(f"{name}.nested_quant_map", "F32", (256,))
    absmax = tensors.array(f"{name}.nested_absmax", "F32", (nested,))
    values = _values(codes, table, absmax, state["nested_blocksize"])
    return values + np.float32(state["nested_offset"])


def _values(codes: np.ndarray, table: np.ndarray, scales: np.ndarray, block: int) -> np.ndarray:
    """The table's values for codes, times the scales of their blocks; the last block may be short."""
    return table[codes] * np.repeat(scales, block)[: codes.size]


def _matrix(
    codes: np.ndarray, scales: np.ndarray, state: Mapping[str, Any], format_name: str
) -> QuantizedMatrix:
    """A `QuantizedMatrix` of codes `[..., rows, k]`, if a block is a part of a row or several rows."""
    (*lead, rows, k), block = codes.shape, state["blocksize"]
    if k % block and (block % k or rows * k % block):
        raise value_error(
            f"blocks of {block} numbers do not begin where the rows of {[*lead, rows, k]} do, which a "
            "QuantizedMatrix can't hold. `dequantize` makes it dense"
        )
    groups = codes.reshape(*lead, rows, -1, min(block, k))
    scales = scales.reshape(*lead, -1, groups.shape[-2])
    return grouped(groups, scales, None, formats.FORMATS[format_name], state["dtype"])


# --- 8 bits --------------------------------------------------------------------------------------


def _eight_bits(own: Module) -> Stored:
    def read(dense: bool) -> QuantizedMatrix:
        order = own.array("weight_format").item() if own.has("weight_format") else 0
        own.expect(order == 0, "weight_format", "0 (rows)", order)
        codes = own.array("weight", "I8")
        scale = own.array("SCB", "F32", codes.shape[:1])[:, None] / np.float32(127)
        return QuantizedMatrix.from_parts(codes, scale, dtype="int8", axis=-1)

    parts = "weight", "SCB", "weight_format"
    return own.stored(lambda: own.sizes("weight"), read, parts)
