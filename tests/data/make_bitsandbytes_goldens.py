"""Makes bitsandbytes.npz: weights that bitsandbytes quantized, for tests/interchange/test_hugging_face.py.

For each case bitsandbytes quantizes a small layer on the CPU. The file has the layer's tensors under
`CASE/NAME`, as they are in a checkpoint of transformers, and the weight that bitsandbytes itself makes
of them, in float32, under `CASE`.

To make it anew, in an environment of its own::

    python -m venv bnb_env && bnb_env/bin/pip install bitsandbytes==0.50.2
    bnb_env/bin/python tests/data/make_bitsandbytes_goldens.py
"""

import pathlib

import bitsandbytes as bnb
import numpy as np
import torch
from bitsandbytes import functional

TARGET = pathlib.Path(__file__).with_name("bitsandbytes.npz")
# The type, whether scales are quantized again, the shape [outputs, inputs], and the dtype of the layer.
# A block is 64 numbers in the order of the file: of [6, 32] it has two rows, of [4, 48] 1 1/3.
CASES = {
    "nf4": ("nf4", False, (6, 128), torch.float32),
    "nf4 double": ("nf4", True, (40, 512), torch.bfloat16),
    "nf4 rows": ("nf4", False, (6, 32), torch.float16),
    "nf4 across rows": ("nf4", False, (4, 48), torch.float32),
    "fp4": ("fp4", False, (6, 128), torch.float32),
    "fp4 double": ("fp4", True, (6, 128), torch.float16),
}


def four_bits(kind, double, shape, dtype):
    layer = bnb.nn.Linear4bit(
        shape[1], shape[0], quant_type=kind, compress_statistics=double, compute_dtype=dtype
    )
    layer = layer.to(dtype).to("cpu")
    tensors = layer.state_dict()
    state = layer.weight.quant_state
    # As rows of one block each: the kernel for CPUs takes the scales of others for rows that are not
    # whole blocks, which its own quantization does not (errors of 0.28 in place of 0.07).
    state.dtype, state.shape = torch.float32, torch.Size((-(-shape[0] * shape[1] // 64), 64))
    return tensors, functional.dequantize_4bit(layer.weight.data, state).reshape(shape)


def eight_bits(shape):
    layer = bnb.nn.Linear8bitLt(shape[1], shape[0], has_fp16_weights=False)
    with torch.no_grad():
        layer.weight[:, 3] *= 20  # an outlier of each row
    tensors = layer.to("cpu").state_dict()
    return tensors, functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])


def as_numpy(tensor):
    """bfloat16 does not exist in NumPy, nor does it in what is stored."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


def main():
    torch.manual_seed(0)
    found = {"versions": f"bitsandbytes {bnb.__version__}, torch {torch.__version__}"}
    made = {name: four_bits(*case) for name, case in CASES.items()} | {"int8": eight_bits((6, 128))}
    for name, (tensors, dense) in made.items():
        found[name] = as_numpy(dense)
        for key, tensor in tensors.items():
            found[f"{name}/{key}"] = as_numpy(tensor)
    np.savez_compressed(TARGET, **found)


if __name__ == "__main__":
    main()
