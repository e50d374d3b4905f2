"""Reads weights that llm-compressor quantized, in the formats of compressed-tensors.

A module `X` has scales `X.weight_scale` and, if it is not symmetric, zero points `X.weight_zero_point`
(compressed-tensors 0.19, `compressors`). The codes are

- `X.weight_packed` int32: each row is one run of bits, lowest first, of codes plus 2^(bits - 1)
  ('pack-quantized'); zero points are packed likewise, along the outputs;
- `X.weight` int8 or float8 ('int-quantized', 'float-quantized', 'naive-quantized', 'mxfp8-quantized');
- `X.weight_packed` uint8: two e2m1 numbers to a byte ('nvfp4-pack-quantized', 'mxfp4-pack-quantized').
  With `X.weight_global_scale` a scale is `weight_scale / weight_global_scale`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from haiku_implicit.files.container import CheckpointError, expect, expect_one_of
from haiku_implicit.interchange.grouped_codes import (
    IntegerCodes,
    blocks_of_floats,
    fours_of_floats,
    is_pair,
)
from haiku_implicit.interchange.quantization_config import check_keys
from haiku_implicit.interchange.runs_of_bits import unpacked
from haiku_implicit.interchange.safetensors_files import FLOATS, Module, Tensors
from haiku_implicit.interchange.trees import Stored
from haiku_implicit.quantized.matrix import QuantizedMatrix

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "dense"),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
# Keys of a configuration: those that are read, and those that do not change the weights.
_READ = {"config_groups", "format", "sparsity_config", "transform_config", "quantization_status"}
_READ |= {"version"}
_FREE = {"quant_method", "ignore", "kv_cache_scheme", "global_compression_ratio"}
_FREE |= {"run_compressed", "dequantize"}
_READ_OF_GROUP = {"targets", "weights", "format", "input_activations", "output_activations"}
_READ_OF_WEIGHTS = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure"}
_FREE_OF_WEIGHTS = {"dynamic", "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_INDICES = "I32 I64"
_POWERS = "U8 F8_E8M0"  # scales that are powers of two
_PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale"),
    *("weight_shape", "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale"),
    *("output_scale", "output_zero_point"),
)


class _Scheme(NamedTuple):
    """The storage settings of a weight.

    Attributes:
      kind: 'int' or 'float'.
      bits: the bits of a code.
      symmetric: whether there are no zero points.
      strategy: a name of `_STRATEGIES`.
      group_size: the number of inputs that share a scale, for groups.
      block: the rows and columns that share a scale, for blocks.
    """

    kind: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None


def quantized(tensors: Tensors, where: str, own: Mapping[str, Any]) -> list[Stored]:
    """Finds the weights that llm-compressor quantized.

    Args:
      tensors: the tensors of the checkpoint.
      where: the file of the configuration, for errors.
      own: the configuration.
    """
    check_keys(where, own, _READ | _FREE)
    for key in ("transform_config", "sparsity_config"):
        given = own.get(key)
        none = not given or given == {"config_groups": {}}
        none = none or (isinstance(given, dict) and given.get("format") == "dense")
        expect(none, f"{where}: {key}", "none, or one that does nothing", given)
    _check_format(where, own)
    status = own.get("quantization_status") or "compressed"
    # Weights that are only frozen are stored as codes, too, if the format is one of codes.
    stored = status == "frozen" and own.get("format") not in (None, "dense")
    right = status == "compressed" or stored
    expect(right, f"{where}: quantization_status (with this format)", "'compressed'", status)
    groups = own.get("config_groups")
    expect(isinstance(groups, dict) and bool(groups), f"{where}: config_groups", "groups", groups)
    modules = [Module(tensors, x) for x in tensors.modules("weight_scale")]
    return [_stored(x, where, dict(groups or {}), own.get("version")) for x in modules]


def _stored(own: Module, where: str, groups: Mapping[str, Any], version: Any) -> Stored:
    def opened() -> _Weight:
        name, group = _group_of(where, groups, own.module)
        scheme = _scheme(f"{where}: config_groups: {name}", group)
        if scheme.kind == "int" and 32 % scheme.bits:
            _check_version(where, scheme.bits, version)
        return _Weight(own.tensors, own.module, scheme)

    return own.stored(lambda: opened().shape, lambda dense: opened().read(dense), _PARTS)


# --- configuration -------------------------------------------------------------------------------


def _check_format(where: str, own: Mapping[str, Any]) -> None:
    if own.get("format") is not None:
        expect_one_of(_FORMATS, f"{where}: format", own["format"])


def _check_version(where: str, bits: int, version: Any) -> None:
    """Raises if codes of these bits may be packed in the way of older versions."""
    found = re.match(r"(\d+)\.(\d+)", str(version))
    dense = found is not None and (int(found[1]), int(found[2])) >= (0, 18)
    way_out = "0.18 or later, which packs codes of 3, 5, 6 and 7 bits densely; write the model anew"
    expect(dense, f"{where}: version (with {bits} bits)", way_out, version)


def _group_of(where: str, groups: Mapping[str, Any], module: str) -> tuple[str, Any]:
    """The group of a module: by its name, by a pattern ('re:...'), or by the class of its layer.

    The class of a layer is not in the file, so that all groups for classes have to be alike.
    """
    named: list[tuple[bool, str, str]] = []  # exact names come first, as in `match_targets`
    classes = []
    for key, group in groups.items():
        expect(isinstance(group, dict), f"{where}: config_groups: {key}", "an object", group)
        targets = group.get("targets")
        right = isinstance(targets, list) and all(isinstance(x, str) for x in targets)
        expect(right, f"{where}: config_groups: {key}: targets", "a list of names", targets)
        if group.get("weights") is None:  # of activations only, as in attention
            continue
        for target in targets:
            if target == module or _matches(where, target, module):
                named.append((target.startswith("re:"), target, key))
            elif "." not in target and not target.startswith("re:"):
                classes.append(key)
    found = [min(named)[2]] if named else classes
    if not found or any(groups[x].get("weights") != groups[found[0]].get("weights") for x in found):
        raise CheckpointError(
            f"{where}: config_groups: {module}: expected one group of this weight, by its name or by "
            f"the class of its layer, got {', '.join(found) or 'none'}. Name the weight in targets"
        )
    return found[0], groups[found[0]]


def _matches(where: str, target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as e:
        raise CheckpointError(f"{where}: targets: {target!r}: {e}") from None


def _scheme(where: str, group: Mapping[str, Any]) -> _Scheme:
    check_keys(where, group, _READ_OF_GROUP)
    _check_format(where, group)
    where, own = f"{where}: weights", group.get("weights")
    expect(isinstance(own, dict), where, "settings, as there are scales", own)
    own = {key: value for key, value in (own or {}).items() if value is not None}
    check_keys(where, own, _READ_OF_WEIGHTS | _FREE_OF_WEIGHTS)
    kind, bits = own.get("type", "int"), own.get("num_bits", 8)
    known = (kind == "int" and bits in range(2, 9)) or (kind == "float" and bits in (4, 8))
    right = known and type(bits) is int
    expect(right, f"{where}: type, num_bits", "int and 2 to 8, or float and 4 or 8", (kind, bits))
    symmetric = own.get("symmetric", True)
    expect(isinstance(symmetric, bool), f"{where}: symmetric", "true or false", symmetric)
    expect(symmetric or kind == "int", f"{where}: symmetric", "true, of floats", symmetric)
    size, block = own.get("group_size"), own.get("block_structure")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = own.get("strategy") or by_size
    expect_one_of(_STRATEGIES, f"{where}: strategy", strategy)
    if strategy in ("group", "tensor_group"):
        right = type(size) is int and size > 0
        expect(right, f"{where}: group_size", "a positive integer", size)
    if strategy == "block":
        if isinstance(block, str):  # of older versions
            block = [int(x) for x in block.split("x") if x.isdigit()]
        expect(is_pair(block), f"{where}: block_structure", "two positive integers", block)
    return _Scheme(kind, bits, symmetric, strategy, size, tuple(block) if block else None)


# --- tensors -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Weight(Module):
    """A weight in the tensors of a module."""

    scheme: _Scheme

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., outputs, inputs]`"""
        if not self.has("weight_packed"):
            return self.sizes("weight")
        if self.has("weight"):
            raise CheckpointError(
                f"{self.tensors.where}: {self.path('weight_packed')}: expected either this or "
                f"{self.path('weight')}, got both, which may differ. Leave one out of the files"
            )
        if self.scheme.kind == "float":
            *lead, half = self.sizes("weight_packed")
            return *lead, 2 * half
        sizes = self.array("weight_shape", "I64 I32").reshape(-1)
        return tuple(int(n) for n in sizes)

    def read(self, dense: bool) -> np.ndarray | QuantizedMatrix:
        """Reads the weight, as `Stored` says."""
        shape = self.shape
        self._check_symmetric(shape)
        if self.scheme.kind == "float":
            return self._fours(shape) if self.scheme.bits == 4 else self._eights(shape, dense)
        return self._integers(shape).read(dense)

    def _integers(self, shape: tuple[int, ...]) -> IntegerCodes:
        (*lead, outputs, inputs), bits = shape, self.scheme.bits
        size = self.scheme.group_size if self.scheme.strategy == "group" else inputs
        scales = self._scales(shape)
        packed = self.has("weight_packed")
        if packed:
            codes = self._unpacked("weight_packed", (*lead, outputs, inputs))
        else:
            codes = self._unsigned(self.array("weight", "I8", shape))
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.int16)
        if not self.scheme.symmetric:
            zeros = self._zeros(scales.shape, outputs)
        group = self._groups(inputs, size or inputs, scales.shape[-1])
        return IntegerCodes(codes, scales, zeros, group, bits)

    def _zeros(self, shape: tuple[int, ...], outputs: int) -> np.ndarray:
        """The zero points, of the shape of the scales; the middle code is a zero point of 0."""
        if self.has("weight_packed") and self.scheme.strategy != "tensor":
            sizes = (*shape[:-2], shape[-1], outputs)
            columns = self._unpacked("weight_zero_point", sizes, True)
            return np.swapaxes(columns, -1, -2).astype(np.int16)
        stored = self.array("weight_zero_point", "I8")
        return self._unsigned(stored.reshape(shape)).astype(np.int16)

    def _check_symmetric(self, shape: tuple[int, ...]) -> None:
        """Raises for zero points other than 0 if the configuration says that there are none."""
        if not self.scheme.symmetric or not self.has("weight_zero_point"):
            return
        if self.scheme.kind == "int" and self.kind("weight_zero_point") == "I32":
            middle = 2 ** (self.scheme.bits - 1)
            found = self._zeros(self._scales(shape).shape, shape[-2]) - middle
        else:
            found = self.array("weight_zero_point").astype(np.float32)
        if found.any():
            raise CheckpointError(
                f"{self.tensors.where}: {self.path('weight_zero_point')}: the configuration says that "
                "the weight is symmetric, by which all zero points are 0; got "
                f"{found.min():g} ... {found.max():g}"
            )

    def _unpacked(self, part: str, shape: tuple[int, ...], transposed: bool = False) -> np.ndarray:
        """Codes in runs of bits, each one a row of `shape`."""
        bits, (*lead, rows, count) = self.scheme.bits, shape
        words = -(-count * bits // 32)
        sizes = (*lead, words, rows) if transposed else (*lead, rows, words)
        found = self.array(part, "I32", sizes)
        found = np.swapaxes(found, -1, -2) if transposed else found
        whole = -(-words // bits) * bits  # a code of 3 bits may be in two integers
        room = [(0, 0)] * (found.ndim - 1) + [(0, whole - words)]
        return unpacked(np.pad(found, room), bits)[..., :count]

    def _unsigned(self, codes: np.ndarray) -> np.ndarray:
        """Signed codes, counted from the lowest one on."""
        return (codes.astype(np.int16) + 2 ** (self.scheme.bits - 1)).astype(np.uint8)

    def _groups(self, inputs: int, size: int, count: int) -> np.ndarray:
        """The group of each input; `weight_g_idx` has it if the inputs were ordered (`actorder`)."""
        if not self.has("weight_g_idx") or -1 in self.array("weight_g_idx", _INDICES, (inputs,)):
            return np.arange(inputs) // size
        return self.indices("weight_g_idx", _INDICES, inputs, count)

    def _eights(self, shape: tuple[int, ...], dense: bool) -> QuantizedMatrix:
        codes = self.array("weight", "F8_E4M3", shape)
        powers = self.kind("weight_scale") in _POWERS.split()  # of mxfp8
        scales = self._scales(shape, _POWERS) if powers else self._scales(shape)
        dtype = jnp.bfloat16 if powers else None
        return blocks_of_floats(codes, scales, self._block(shape), dtype, dense)

    def _fours(self, shape: tuple[int, ...]) -> QuantizedMatrix:
        data = self.array("weight_packed", "U8")
        rows, columns = self._block(shape)
        whole = shape[-2] % rows == 0 and (shape[-1] % columns == 0 or columns > shape[-1])
        self.expect(whole, "weight_packed", f"whole blocks of {[rows, columns]}", list(shape))
        if not self.has("weight_global_scale"):
            return fours_of_floats(data, self._scales(shape, _POWERS), jnp.bfloat16)
        scale = self.array("weight_global_scale", "F32").reshape(-1)
        right = scale.size == 1 and bool(scale[0])
        self.expect(right, "weight_global_scale", "one number, not 0", scale.tolist())
        of_all = np.broadcast_to(1 / scale, (*shape[:-2], 1, 1))
        codes = self._scales(shape, "F8_E4M3")
        scales = QuantizedMatrix.from_parts(codes, of_all, dtype="fp8_e4m3", axis=-1)
        return fours_of_floats(data, scales, jnp.bfloat16)

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        """The rows and columns that share a scale."""
        strategy, size = self.scheme.strategy, self.scheme.group_size
        if strategy == "block" and self.scheme.block is not None:
            return self.scheme.block
        rows = shape[-2] if strategy == "tensor" else 1
        return rows, size if size and strategy in ("group", "tensor_group") else shape[-1]

    def _scales(self, shape: Sequence[int], kinds: str = FLOATS) -> np.ndarray:
        """The scales `[..., outputs or 1, groups]`."""
        rows, columns = self._block(shape)
        *lead, outputs, inputs = shape
        wanted = (*lead, -(-outputs // rows), -(-inputs // columns))
        stored = self.sizes("weight_scale")
        one = self.scheme.strategy == "tensor" and math.prod(stored) == math.prod(wanted)
        sizes = stored if one else wanted
        found = self.array("weight_scale", kinds, sizes).reshape(wanted)
        return found.view(jnp.float8_e8m0fnu) if kinds == _POWERS else found
