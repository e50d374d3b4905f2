"""The quantized blocks of a GGUF file as the arrays of haiku_implicit."""

import jax.numpy as jnp

import haiku_implicit as hki
import smollm


def matrix(block: smollm.Block4 | smollm.Block8, axis: int) -> hki.QuantizedMatrix:
    """The weight that stays as it is in the file, read as float32."""
    offset = getattr(block, "offset", None)
    return hki.QuantizedMatrix.from_parts(
        block.codes,
        block.scale,
        offset,
        dtype="int8" if offset is None else "uint4",
        axis=axis,
        out_dtype=jnp.float32,
    )
