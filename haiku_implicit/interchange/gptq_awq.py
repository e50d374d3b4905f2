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

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from haiku_implicit.core.messages import value_error
from haiku_implicit.files.container import CheckpointError
from haiku_implicit.interchange.grouped_codes import IntegerCodes
from haiku_implicit.interchange.quantization_config import Config, Settings
from haiku_implicit.interchange.runs_of_bits import unpacked
from haiku_implicit.interchange.safetensors_files import FLOATS, Module, Tensors
from haiku_implicit.interchange.trees import Stored


class _Layout(NamedTuple):
    """The layout of a weight in its tensors.

    Attributes:
      transposed: whether tensors are `[inputs, outputs]` and `[groups, outputs]`.
      packed: the axis of a weight `[outputs, inputs]` along which an integer holds several codes.
      positions: the positions of the first, second, ... of eight codes in 32 bits, if not in order.
    """

    transposed: bool
    packed: int
    positions: tuple[int, ...] = ()


class _Method(NamedTuple):
    """The layouts of a method, and the supported bits of codes and of integers that hold them."""

    layouts: Mapping[str, _Layout]
    bits: tuple[int, ...]
    words: tuple[int, ...]

    def settings(self, config: Config) -> Settings:
        return config.settings(self.bits, tuple(self.layouts), self.words)


_GPTQ = _Layout(transposed=True, packed=1)
_GEMM = _Layout(transposed=True, packed=0, positions=(0, 4, 1, 5, 2, 6, 3, 7))
_GEMV = _Layout(transposed=False, packed=1)
METHODS = {
    "gptq": _Method({"gptq": _GPTQ, "gptq_v2": _GPTQ}, bits=(2, 3, 4, 8), words=(8, 16, 32, 64)),
    "awq": _Method({"gemm": _GEMM, "gemv": _GEMV}, bits=(4,), words=(32,)),
}


def quantized(name: str, tensors: Tensors, where: str, own: Mapping[str, Any]) -> list[Stored]:
    """Finds the weights that a method of `METHODS` quantized.

    Args:
      name: the name of the method.
      tensors: the tensors of the checkpoint.
      where: the file of the configuration, for errors.
      own: the configuration.
    """
    config, method = Config(where, own), METHODS[name]
    method.settings(config)
    return [_stored(Module(tensors, x), config, method) for x in tensors.modules("qweight")]


def _stored(own: Module, config: Config, method: _Method) -> Stored:
    def opened() -> _Weight:
        settings = method.settings(config.of_module(own.module))
        return _Weight(own.tensors, own.module, settings, method.layouts[settings.format])

    parts = "qweight", "qzeros", "scales", "g_idx"
    return own.stored(lambda: opened().shape, lambda dense: opened().codes().read(dense), parts)


# --- tensors -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Weight(Module):
    """A weight in the tensors of a module."""

    settings: Settings
    layout: _Layout

    @property
    def shape(self) -> tuple[int, int]:
        """`[outputs, inputs]`"""
        sizes = self._two_sizes("qweight")
        packed = sizes[self.layout.packed]
        sizes[self.layout.packed] = packed * self.settings.word // self.settings.bits
        return sizes[0], sizes[1]

    def codes(self) -> IntegerCodes:
        """Reads the weight."""
        (outputs, inputs), size = self.shape, self.settings.group_size
        groups = stored = 1 if size is None else -(-inputs // size)
        if not self.layout.transposed:  # there may be room for more groups
            words = max(self._two_sizes("qzeros")[1], -(-groups * self.settings.bits // 32))
            stored = words * 32 // self.settings.bits
        codes = self._codes("qweight", (outputs, inputs), self.layout.packed)
        packed = 0 if self.layout.transposed else 1
        zeros = self._codes("qzeros", (outputs, stored), packed)[:, :groups].astype(np.int16)
        scales = self._array("scales", FLOATS, (outputs, stored))[:, :groups]
        group = np.arange(inputs) // (size or inputs)
        if self.layout is _GPTQ:
            group = self._groups(group, groups)
        zeros = _zero_points(f"{self.tensors.where}: {self.path('qzeros')}", zeros, self.settings)
        return IntegerCodes(codes, scales, zeros, group, self.settings.bits)

    def _two_sizes(self, part: str) -> list[int]:
        """The two sizes of a tensor `[outputs, ...]`."""
        shape = self.sizes(part)
        right = len(shape) == 2 and all(shape)
        self.expect(right, part, "two axes, none of them empty", list(shape))
        return list(shape[::-1] if self.layout.transposed else shape)

    def _array(self, part: str, kinds: str, shape: tuple[int, ...]) -> np.ndarray:
        """Reads a tensor `[outputs, ...]`."""
        if self.layout.transposed:
            return self.array(part, kinds, shape[::-1]).T
        return self.array(part, kinds, shape)

    def _codes(self, part: str, shape: tuple[int, int], packed: int) -> np.ndarray:
        """Reads codes `[outputs, ...]`, of which integers hold several along one axis."""
        bits, word = self.settings.bits, self.settings.word
        sizes = tuple(n * bits // word if axis == packed else n for axis, n in enumerate(shape))
        words = self._array(part, f"I{word}", sizes)
        codes = unpacked(words if packed else words.T, bits)
        if self.layout.positions:
            codes = codes.reshape(-1, 8)[:, self.layout.positions].reshape(codes.shape)
        return codes if packed else codes.T

    def _groups(self, in_order: np.ndarray, count: int) -> np.ndarray:
        """The group of each input."""
        if self.has("g_idx"):
            return self.indices("g_idx", "I32", len(in_order), count)
        if self.settings.ordered and self.settings.group_size is not None:
            raise CheckpointError(
                f"{self.tensors.where}: {self.path('g_idx')}: missing, and by desc_act it has the "
                "group of each input"
            )
        return in_order


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
        keys = "sym" if settings.format.startswith("gptq") else "zero_point, sym"
        raise CheckpointError(
            f"{where}: the configuration says that the weight is symmetric ({keys}) and its format "
            f"{settings.format}, by which all are stored as {middle - less_one}; got "
            f"{stored.min()} ... {stored.max()}"
        )
    if less_one and (stored == last).any():
        raise value_error(
            f"{where}: a zero point that is stored as {last}, which programs read as 0 or as "
            f"{last + 1}. Convert the checkpoint to the format gptq_v2 with GPTQModel"
        )
    return stored + less_one
