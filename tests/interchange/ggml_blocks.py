"""Random blocks of GGUF files."""

import gguf
import numpy as np

# Which bytes of a block are its float16 numbers.
KINDS = {
    "Q4_0": slice(2), "Q4_1": slice(4), "Q5_0": slice(2), "Q5_1": slice(4), "Q8_0": slice(2),
    "Q2_K": slice(80, 84), "Q3_K": slice(108, 110), "Q4_K": slice(4), "Q5_K": slice(4),
    "Q6_K": slice(208, 210), "IQ4_NL": slice(2), "IQ4_XS": slice(2), "TQ2_0": slice(64, 66),
    "MXFP4": slice(0),
}  # fmt: skip


def blocks(name, rows=3):
    """Random bytes, but for the scales, which are ordinary numbers of either sign."""
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (rows, 512 // elements, size)).astype(np.uint8)
    halves = np.random.default_rng(1).normal(size=(rows, 512 // elements, 2)).astype(np.float16)
    data[..., KINDS[name]] = halves.view(np.uint8)[..., : len(range(size)[KINDS[name]])]
    if name == "MXFP4":
        data[..., 0] = data[..., 0] // 16 + 120  # the exponent
    return kind, data.reshape(rows, -1)
