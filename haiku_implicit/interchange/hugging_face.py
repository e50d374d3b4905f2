"""Parameters from checkpoints of the Hugging Face hub: dense, or quantized by other libraries."""

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from haiku_implicit.core.predicates import Targets
from haiku_implicit.files.container import CheckpointError, brief
from haiku_implicit.interchange import bitsandbytes, gptq_awq
from haiku_implicit.interchange.names import Names
from haiku_implicit.interchange.safetensors_files import CONFIG, Tensors, open_tensors, read_config
from haiku_implicit.interchange.trees import Stored, tree_of

# By the `quant_method` of a configuration: what finds the quantized weights.
_METHODS = {
    "awq": gptq_awq.awq,
    "bitsandbytes": bitsandbytes.quantized,
    "gptq": gptq_awq.gptq,
}
# Ends of the names that only tensors of such weights have.
_SIGNS = (".qweight", ".SCB", ".bitsandbytes__nf4", ".bitsandbytes__fp4")


def load_hugging_face(
    path: str | os.PathLike[str],
    names: Names,
    *,
    dtype: Any = jnp.float32,
    like: Any = None,
    dequantize: Targets | None = None,
) -> dict[str, dict[str, Any]]:
    """Reads a checkpoint in safetensors, as transformers writes it, as a Haiku model's parameters.

    Dense weights are read as they are; those that bitsandbytes (nf4, fp4, with double quantization too,
    and int8), GPTQ or AWQ quantized keep their codes. `config.json` says which it was. Files are mapped
    into memory and read tensor by tensor, with a progress bar. Nothing in them is run.

    Args:
      path: a folder with `config.json`, and `model.safetensors` or the files that
        `model.safetensors.index.json` lists; or one such file.
      names: where each tensor goes: a mapping or a function from its name in the file to
        'module/name', to a `Place`, or to None for what the model does not have; see
        `names_by_pattern`. A quantized weight has the name that the dense one would have, such as
        `model.layers.0.self_attn.q_proj.weight`, and is `[outputs, inputs]`.
      dtype: of the parameters' values. None: that of dense tensors in the file, and what the file
        says for quantized ones. Integers stay what they are.
      like: `{module: {name: array or shape}}`, such as `jax.eval_shape(model.init, ...)` gives: if the
        parameters are others, or have other shapes, this is an error. By default there is no check.
      dequantize: quantized weights that become dense: a regular expression over 'module/name', a list
        of such names, a predicate, or True for all.

    Returns:
      `{module: {name: array}}`, with dense arrays, `QuantizedMatrix`, and `MatrixView` around that
      where a place gives a quantized weight another shape.

    Raises:
      haiku_implicit.CheckpointError: a `ValueError`: for files that are missing, truncated, damaged or
        quantized in a way that is not read, and for other parameters than those of `like`.
      ValueError: for a tensor without a place, two tensors at one place, a place that does not fit, or
        a weight that a `QuantizedMatrix` can't hold and `dequantize` does not choose.
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
    found, used = _quantized(tensors, read_config(path))
    found += [tensors.dense(name) for name in tensors.files if name not in used]
    return tree_of(found, names, tensors.where, dtype=dtype, like=like, dequantize=dequantize)


def _quantized(tensors: Tensors, config: Mapping[str, Any]) -> tuple[list[Stored], set[str]]:
    """The quantized weights, and the names of all tensors that they are made of."""
    own = config.get("quantization_config")
    if own is None:
        for name in tensors.files:
            if name.endswith(_SIGNS):
                raise CheckpointError(
                    f"{tensors.where}: {name}: of a quantized weight, and there is no {CONFIG} with a "
                    "quantization_config that says how it was quantized"
                )
        return [], set()
    if not isinstance(own, dict):
        raise CheckpointError(f"{tensors.where}: {CONFIG}: quantization_config: not an object")
    method = own.get("quant_method")
    if method is None and ("load_in_4bit" in own or "load_in_8bit" in own):  # of older versions
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"{tensors.where}: {CONFIG}: quant_method: expected one of {', '.join(_METHODS)}, got "
            f"{brief(method)}"
        )
    return _METHODS[method](tensors, own)
