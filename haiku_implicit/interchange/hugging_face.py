"""Reads checkpoints of the Hugging Face hub, dense or quantized by other libraries."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from haiku_implicit.core.messages import shown
from haiku_implicit.core.predicates import Targets
from haiku_implicit.core.typing import DType, Json, Tree
from haiku_implicit.files.container import CheckpointError, expect_one_of
from haiku_implicit.interchange import (
    bitsandbytes,
    compressed_tensors,
    fp8_blocks,
    gptq_awq,
    hqq,
    mlx,
    torchao,
)
from haiku_implicit.interchange.names import Names, places_of
from haiku_implicit.interchange.quantization_config import METHOD
from haiku_implicit.interchange.safetensors_files import CONFIG, Tensors, open_tensors, read_config
from haiku_implicit.interchange.trees import Stored, tree_of

# The functions that find weights whose tensors or metadata contain their format.
_OF_THEMSELVES = (bitsandbytes.quantized, hqq.quantized, torchao.quantized)
# The functions that find quantized weights, by the `quant_method` of a configuration.
_METHODS: dict[str, Callable[[Tensors, str, dict[str, Any]], list[Stored]]] = {
    "awq": functools.partial(gptq_awq.quantized, "awq"),
    # (For some the file suffices, whatever keys there are.)
    "bitsandbytes": lambda tensors, where, own: bitsandbytes.quantized(tensors),
    "compressed-tensors": compressed_tensors.quantized,
    "fp8": fp8_blocks.quantized,
    "gptq": functools.partial(gptq_awq.quantized, "gptq"),
    "hqq": lambda tensors, where, own: hqq.quantized(tensors),
    "torchao": lambda tensors, where, own: torchao.quantized(tensors),
}
# Keys of `config.json`: from transformers, from transformers for compressed-tensors, and from MLX.
_CONFIG, _COMPRESSION, _MLX = "quantization_config", "compression_config", "quantization"
_KEYS = _CONFIG, _COMPRESSION, _MLX


def load_hugging_face(
    path: str | os.PathLike[str],
    names: Names,
    *,
    dtype: DType | None = jnp.float32,
    like: Tree = None,
    dequantize: Targets | None = None,
) -> dict[str, dict[str, jax.Array]]:
    """Reads a transformers checkpoint in safetensors as a Haiku model's parameters.

    Dense weights are read unchanged. Weights that bitsandbytes (nf4, fp4, also with double
    quantization, and int8), GPTQ, AWQ, HQQ, MLX or TorchAO quantized keep their codes. `config.json`
    says which method it was. Files are mapped into memory and read tensor by tensor, with a progress
    bar. This does not run anything in them.

    Args:
      path: a folder with `config.json`, and `model.safetensors` or the files that
        `model.safetensors.index.json` lists; or a safetensors file. If the model is divided into
        several files, all are read, whichever of them is given.
      names: the place of each tensor: a mapping or a function from its name in the file to
        'module/name', to a `Place`, to a list of places that all get it, or to None for a tensor that
        the model does not have; see `names_by_pattern`. A quantized weight has the name of the dense
        one, such as `model.layers.0.self_attn.q_proj.weight`, and is `[outputs, inputs]`.
      dtype: the dtype of the parameters' values. None keeps the dtype of dense tensors, and takes the
        file's for quantized ones. Integers are not converted.
      like: `{module: {name: array or shape}}`, such as `jax.eval_shape(model.init, ...)` gives: other
        parameters or other shapes are an error. The default does not check.
      dequantize: quantized weights that become dense: a regular expression over 'module/name', a list
        of such names, a predicate, or True for all.

    Returns:
      `{module: {name: array}}`, with dense arrays and `QuantizedMatrix`, in a `MatrixView` if a place
      gives a quantized weight another shape.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError`: for files that are missing, truncated, damaged or
        quantized in an unsupported way, and for parameters that differ from `like`.
      ValueError: for a tensor that `names` does not know, two tensors for one parameter, a place that
        does not fit, or a weight that a `QuantizedMatrix` can't hold and `dequantize` does not choose.
      OSError: if a file can't be read.

    Example:
      >>> import os, tempfile, numpy as np, haiku_implicit as hki
      >>> path = os.path.join(tempfile.mkdtemp(), 'model.safetensors')
      >>> hki.save(path, {'up.weight': np.ones((8, 64)), 'up.bias': np.zeros(8)})
      >>> names = hki.names_by_pattern({r'(.*)\\.weight': r'\\1/w', r'(.*)\\.bias': r'\\1/b'})
      >>> hki.load_hugging_face(path, names)['up']['w'].shape
      (64, 8)
    """
    tensors = open_tensors(path)
    key, own = _quantization_of(tensors, read_config(path))
    found = _quantized(tensors, key, own)
    used = {name for stored in found for name in stored.uses}
    _check_codes(tensors, used, names, key, own)
    found += [tensors.dense(name) for name in tensors.files if name not in used]
    return tree_of(found, names, tensors.where, dtype=dtype, like=like, dequantize=dequantize)


def _quantized(tensors: Tensors, key: str, own: Any) -> list[Stored]:
    """Finds the quantized weights."""
    where = f"{tensors.where}: {CONFIG}: {key}"
    if own is None:
        return [stored for find in _OF_THEMSELVES for stored in find(tensors)]
    if not isinstance(own, dict):
        raise CheckpointError(f"{where}: not an object")
    if key == _MLX:
        return mlx.quantized(tensors, where, own)
    if key == _COMPRESSION:
        return compressed_tensors.quantized(tensors, where, own)
    return _METHODS[_method_of(where, own)](tensors, where, own)


def _check_codes(tensors: Tensors, used: set[str], names: Names, key: str, own: Any) -> None:
    """Raises for codes without a known method of quantization or scales, unless they are left out."""
    missing = []
    for name, file in tensors.files.items():
        scales = _scales_of(name, file.tensors[name].dtype, key, own)
        if name in used or not scales or _left_out(names, name):
            continue
        if own is None or scales in tensors.files:
            raise CheckpointError(
                f"{tensors.where}: {name}: of a quantized weight, and no quantization_config in "
                f"{CONFIG} says how it was quantized. A place of None leaves it out"
            )
        missing.append(scales)
    if missing:
        raise CheckpointError(
            f"{tensors.where}: {shown(missing)}: missing, and the weights are codes ({key} in "
            f"{CONFIG}). Copy the files of the model anew; a place of None leaves a weight out"
        )


def _scales_of(name: str, kind: str, key: str, own: Any) -> str:
    """The name of the scales of a tensor of codes; empty for other tensors."""
    if name.endswith(".weight_packed"):
        return name.removesuffix("_packed") + "_scale"
    if name.endswith(".qweight") or (key == _MLX and name.endswith(".weight") and kind == "U32"):
        return name.rpartition(".")[0] + ".scales"
    own = {} if own is None else own
    method = next((own[x] for x in METHOD if own.get(x) is not None), None)
    if key == _COMPRESSION or method == "compressed-tensors":
        return f"{name}_scale" if kind in ("I8", "F8_E4M3") and name.endswith(".weight") else ""
    end = "_scale_inv" if own.get("weight_block_size") else "_scale"
    return f"{name}{end}" if method == "fp8" and kind == "F8_E4M3" else ""


def _left_out(names: Names, name: str) -> bool:
    try:
        return not places_of(names, name, "names")
    except ValueError:
        return False


def _quantization_of(tensors: Tensors, config: Mapping[str, Json]) -> tuple[str, Any]:
    """The key and value for quantized weights in `config.json`; the value is None if there is none."""
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    found = {key: place[key] for place in places for key in _KEYS if place.get(key)}
    if not found:
        found = _further_in(tensors, config)
    if _MLX in found and found.get(_CONFIG) == found[_MLX]:  # it writes both
        del found[_CONFIG]
    if len(found) > 1:
        raise CheckpointError(
            f"{tensors.where}: {CONFIG}: has {' and '.join(found)}, expected one of them"
        )
    return next(iter(found.items()), (_CONFIG, None))


def _further_in(tensors: Tensors, config: Mapping[str, Json]) -> dict[str, Any]:
    """Finds the keys for quantized weights in models within a model (`thinker_config.text_config`)."""
    found: dict[str, tuple[str, Any]] = {}
    inner = [(key, x) for key, x in config.items() if isinstance(x, dict)]
    for path, place in inner:  # the list grows
        for key, value in place.items():
            if not isinstance(value, dict):
                continue
            if key not in _KEYS or (key == _MLX and "bits" not in value):
                inner.append((f"{path}.{key}", value))
            elif found.setdefault(key, (path, value))[1] != value:
                raise CheckpointError(
                    f"{tensors.where}: {CONFIG}: expected one {key}, got those of {found[key][0]} "
                    f"and {path}, which differ. Load the two models from files of their own"
                )
    return {key: value for key, (_, value) in found.items()}


def _method_of(where: str, own: Mapping[str, Any]) -> str:
    methods = [own[key] for key in METHOD if own.get(key) is not None]
    if not methods and ("load_in_4bit" in own or "load_in_8bit" in own):  # of older versions
        return "bitsandbytes"
    method = methods[0] if methods else None
    expect_one_of(_METHODS, f"{where}: quant_method", method)
    return str(method)
