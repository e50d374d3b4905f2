"""Reads weights that TorchAO quantized, from safetensors.

The metadata of a file have the class of each tensor `X.weight` and its attributes; the tensors
`X._weight_qdata`, `X._weight_scale`, ... are its parts (torchao 0.18, `flatten_tensor_state_dict`).

- `Int8Tensor` and `IntxUnpackedToInt8Tensor`: a value is `scale * (code - zero point)`, for blocks.
- `Int4Tensor`: two codes to a byte, the first in the low bits, and scales and zeros `[groups,
  outputs]`; a value is `scale * code + zero`.
- `Float8Tensor`: a value is `scale * code`, for blocks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from haiku_implicit.files.container import CheckpointError, expect, expect_one_of, parse_json
from haiku_implicit.interchange.grouped_codes import IntegerCodes, blocks_of_floats, grouped
from haiku_implicit.interchange.safetensors_files import FLOATS, Module, Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.quantized.matrix import QuantizedMatrix
from haiku_implicit.quantized.numbers import formats

_DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}
_DENSE = "Tensor"


def quantized(tensors: Tensors) -> list[Stored]:
    """Finds the weights that TorchAO quantized."""
    texts: dict[str, str] = {}
    for file in {id(x): x for x in tensors.files.values()}.values():
        texts |= file.metadata if "tensor_names" in file.metadata else {}
    found = []
    for name, text in texts.items():
        state = (
            parse_json(f"{tensors.where}: metadata: {name}", text.encode()) if "." in name else {}
        )
        if isinstance(state, dict) and state.get("_type", _DENSE) != _DENSE:
            weight = _Weight(tensors, name.rpartition(".")[0], name, state)
            if any(x in tensors.files for x in weight.uses):
                found.append(Stored(name, weight.shape, weight.read, weight.uses))
    return found


@dataclasses.dataclass(frozen=True)
class _Weight(Module):
    """A weight in the tensors of a file, and the metadata about it."""

    name: str
    state: Mapping[str, Any]

    def path(self, part: str) -> str:
        return f"{self.module}._{self.name.rpartition('.')[2]}_{part}"

    @property
    def uses(self) -> tuple[str, ...]:
        """The names of its parts."""
        parts = self.state.get("_tensor_data_names")
        right = isinstance(parts, list) and all(isinstance(x, str) for x in parts)
        expect(right, f"{self._where}: _tensor_data_names", "names", parts)
        return tuple(map(self.path, parts or ()))

    def shape(self) -> tuple[int, ...]:
        """`[..., outputs, inputs]`"""
        kind = self.state["_type"]
        expect_one_of(_KINDS, f"{self._where}: _type", kind)
        shape = self.sizes("qdata")
        return (*shape[:-1], 2 * shape[-1]) if kind == "Int4Tensor" else shape

    def read(self, dense: bool) -> np.ndarray | QuantizedMatrix:
        """Reads the weight, as `Stored` says."""
        shape = self.shape()
        if self.path("act_pre_scale") in self.uses:
            raise CheckpointError(
                f"{self._where}: act_pre_scale: the model has to multiply its activations by it, which "
                "no weight can do"
            )
        return _KINDS[self.state["_type"]](self, shape, dense)

    def integers(self, shape: tuple[int, ...], dense: bool) -> np.ndarray | QuantizedMatrix:
        """Codes of 8 bits or fewer, each in a byte."""
        bits = 8
        if self.state["_type"] != "Int8Tensor":
            target = self._dtype("target_dtype")
            known = [f"int{n}" for n in range(2, 9)]
            expect(target in known, f"{self._where}: target_dtype", ", ".join(known), target)
            bits = int(target.removeprefix("int"))
        middle = 2 ** (bits - 1)
        codes = self.array("qdata", "I8", shape).astype(np.int16) + middle
        expect(not (codes >> bits).any(), self._where, f"codes of {bits} bits", "larger ones")
        scales, (rows, size) = self._in_blocks("scale", FLOATS, shape)
        zeros = np.full(scales.shape, middle, np.float32)
        if self.path("zero_point") in self.uses:
            zeros = zeros + self._in_blocks("zero_point", f"I8 {FLOATS}", shape)[0]
        if scales.shape[-2] > 1:
            scales, zeros = np.repeat(scales, rows, -2), np.repeat(zeros, rows, -2)
        group = np.arange(shape[-1]) // size
        found = IntegerCodes(codes.astype(np.uint8), scales, zeros, group, bits)
        return found.values() if dense else found.matrix()._replace(dtype=self._out_dtype())

    def nibbles(self, shape: tuple[int, ...], dense: bool) -> QuantizedMatrix:
        """Two codes of 4 bits to a byte; `dense` makes no difference."""
        *lead, outputs, inputs = shape
        data = self.array("qdata", "I8 U8").view(np.uint8)
        _, size = self._block(shape)
        wanted = (*lead, inputs // size, outputs)
        scales, zeros = (
            np.swapaxes(self.array(x, FLOATS, wanted), -1, -2) for x in ("scale", "zero_point")
        )
        codes = np.stack([data & 15, data >> 4], -1).reshape(shape) ^ 8  # plus 8
        symmetric = not zeros.any()
        fmt = formats.FORMATS["int4" if symmetric else "uint4"]
        offset = zeros.astype(np.float32) - 8 * scales.astype(np.float32)
        groups = codes.reshape(*scales.shape, size)
        return grouped(groups, scales, None if symmetric else offset, fmt, scales.dtype)

    def floats(self, shape: tuple[int, ...], dense: bool) -> QuantizedMatrix:
        """Codes in float8."""
        codes = self.array("qdata", "F8_E4M3 F8_E5M2", shape)
        scales, block = self._in_blocks("scale", FLOATS, shape)
        return blocks_of_floats(codes, scales, block, self._out_dtype(), dense)

    def _in_blocks(
        self, part: str, kinds: str, shape: Sequence[int]
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """A part `[..., tiles, groups]` with a number for each block, and the sizes of a block."""
        rows, columns = self._block(shape)
        grid = (*shape[:-2], shape[-2] // rows, shape[-1] // columns)
        found = self.array(part, kinds)
        right = found.size == int(np.prod(grid))
        expect(right, f"{self._where}: {part}", f"a number for each block, {grid}", found.shape)
        return found.reshape(grid), (rows, columns)

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        """The rows and columns that share a scale."""
        block = self._data.get("block_size") or list(shape)
        right = isinstance(block, list) and len(block) == len(shape) and set(block[:-2]) <= {1}
        pairs = zip(block, shape, strict=True) if right else ()
        right = right and all(type(b) is int and b > 0 and n % b == 0 for b, n in pairs)
        expect(right, f"{self._where}: block_size", f"sizes that divide {list(shape)}", block)
        return block[-2], block[-1]

    def _out_dtype(self) -> Any:
        name = self._dtype("dtype")
        expect_one_of(_DTYPES, f"{self._where}: dtype", name)
        return np.dtype(_DTYPES[name])

    def _dtype(self, key: str) -> Any:
        """The name of a dtype among the attributes."""
        value = self._data.get(key)
        return value.get("_data") if isinstance(value, dict) else value

    @property
    def _data(self) -> Mapping[str, Any]:
        data = self.state.get("_data")
        expect(isinstance(data, dict), f"{self._where}: _data", "attributes", data)
        return data or {}

    @property
    def _where(self) -> str:
        return f"{self.tensors.where}: metadata: {self.name}"


_KINDS = {
    "Int8Tensor": _Weight.integers,
    "IntxUnpackedToInt8Tensor": _Weight.integers,
    "Int4Tensor": _Weight.nibbles,
    "Float8Tensor": _Weight.floats,
}
