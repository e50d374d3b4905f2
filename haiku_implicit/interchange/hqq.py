"""Reads weights that HQQ quantized, from safetensors.

A module `X` has codes `X.W_q` and, as tensors of their own, the settings that they need: `X.nbits`,
`X.shape`, `X.axis`, ... (HQQ 0.2.8, `HQQLinear.state_dict`). A value is `scale * (code - zero)`. The
weight is cut into rows of `group_size` numbers (`axis` 1) or into columns of them (`axis` 0), with a
`scale` and a `zero` for each; an integer holds codes of rows far apart, the first in its highest bits.
"""

import math
from typing import Any

import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.files.container import is_shape
from haiku_implicit.interchange.grouped_codes import IntegerCodes
from haiku_implicit.interchange.safetensors_files import FLOATS, Module, Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.quantized.matrix import QuantizedMatrix

# The bits of a code, and the number of codes in an integer of so many bits.
_PACKINGS = {
    "8bit_u8": (8, 1, 8),
    "4bit_u8": (4, 2, 8),
    "3bit_32": (3, 10, 32),
    "2bit_u8": (2, 4, 8),
    "1bit_u8": (1, 8, 8),
}
_PARTS = (
    *("W_q", "scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "view_as_float"),
    *("unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
# Parts that say how a weight was quantized.
_SETTINGS = "nbits", "packing", "encoded_state_dict"


def quantized(tensors: Tensors) -> list[Stored]:
    """Finds the weights that HQQ quantized."""
    weights = (_Weight(tensors, x) for x in tensors.modules("W_q"))
    # (`W_q` alone may be a parameter of any attention.)
    own = [weight for weight in weights if any(map(weight.has, _SETTINGS))]
    return [weight.stored(weight.shape, weight.read, _PARTS) for weight in own]


class _Weight(Module):
    """A weight in the tensors of a module."""

    def read(self, dense: bool) -> np.ndarray | QuantizedMatrix:
        """Reads the weight, as `Stored` says."""
        codes, scales, zeros = self.codes(), self.floats("scale"), self.floats("zero")
        if not dense:
            return self.in_groups(codes, scales, zeros).matrix()
        values = scales.astype(np.float32) * (codes - zeros.astype(np.float32))
        return values.reshape(self.shape())

    def shape(self) -> tuple[int, ...]:
        """`[outputs, inputs]`"""
        sizes = self.array("shape", "I64 I32").reshape(-1).tolist()
        right = is_shape(sizes) and len(sizes) == 2
        self.expect(right, "shape", "[outputs, inputs]", sizes)
        return tuple(sizes)

    def codes(self) -> np.ndarray:
        """The codes in the rows or columns of the file."""
        packing = self.array("packing", "U8").tobytes().decode("latin-1")
        self.expect(packing in _PACKINGS, "packing", f"one of {[*_PACKINGS]}", packing)
        own, count, word = _PACKINGS[packing]
        words = self.array("W_q")
        words = np.ascontiguousarray(words).view(f"u{word // 8}")  # (`view_as_float`)
        found = [(words >> (own * i)) & (2**own - 1) for i in reversed(range(count))]
        size, wanted = words.size * count, math.prod(self.shape())
        spare = count * words.shape[-1] if own == 3 else 1
        right = words.ndim == 2 and wanted <= size < wanted + spare
        right = right and wanted % words.shape[-1] == 0
        self.expect(right, "W_q", f"{wanted} codes of {own} bits", list(words.shape))
        codes = np.concatenate(found)[: wanted // words.shape[-1]].astype(np.uint8)
        most = 2**self.bits - 1
        self.expect(codes.max() <= most, "W_q", f"codes up to {most}", int(codes.max()))
        return codes

    @property
    def bits(self) -> int:
        """The bits of a code; 1.58 counts as two."""
        bits = math.ceil(self.number("nbits"))
        self.expect(bits in range(1, 9), "nbits", "1 to 8", bits)
        return bits

    def floats(self, part: str) -> np.ndarray:
        """The scales or the zeros: one for each row or column, or for all."""
        for key in ("quant_scale", "quant_zero"):
            if self.has(key):
                self.expect(not self.number(key), key, "0", self.number(key))
        found = self.array(part, FLOATS)
        rows = math.prod(self.shape()) // self.group_size
        axis = self.number("axis")
        self.expect(axis in (0, 1), "axis", "0 or 1", axis)
        if found.size == 1:
            return found.reshape(1, 1)
        self.expect(found.size == rows, part, f"{rows} numbers", list(found.shape))
        return found.reshape((1, rows) if axis == 0 else (rows, 1))

    @property
    def group_size(self) -> int:
        """The numbers that share a scale."""
        size = int(self.number("group_size"))
        right = size > 0 and math.prod(self.shape()) % size == 0
        self.expect(right, "group_size", "a divisor of the weight's size", size)
        return size

    def in_groups(self, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> IntegerCodes:
        """The weight with groups along its inputs.

        Raises:
          ValueError: if its groups are others.
        """
        outputs, inputs = self.shape()
        size = inputs if scales.size == 1 else self.group_size
        if scales.shape[0] == 1 < scales.size or inputs % size:
            raise value_error(
                f"groups of {size} are not runs of inputs (axis {int(self.number('axis'))}, "
                f"{inputs} inputs), as a QuantizedMatrix has them. `dequantize` makes it dense"
            )
        grid = (-1 if scales.size == 1 else outputs, inputs // size)
        scales, zeros = scales.reshape(grid), zeros.reshape(grid)
        group = np.arange(inputs) // size
        return IntegerCodes(codes.reshape(self.shape()), scales, zeros, group, self.bits)

    def number(self, part: str) -> Any:
        """A setting."""
        return self.array(part).reshape(-1)[0].item()
