"""Makes the folders fp8 and fp8_powers of compressed/: models in float8 with scales of blocks.

Each has `config.json` and `model.safetensors` of a tiny random Llama, whose weights transformers' own
operation for float8 (`Fp8Quantize`) quantized, and `expected.npz` with the dense weights that
transformers makes of them (`dequantize=True`), in float32. In `fp8_powers` scales are powers of two.
(`from_pretrained` calls that operation too, but only on a machine with a GPU.)

To make them anew, in an environment of its own::

    python -m venv fp8_env && fp8_env/bin/pip install torch==2.13.0 transformers==5.17.0 accelerate
    fp8_env/bin/python tests/data/make_fp8_goldens.py
"""

import json
import pathlib
import types

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Quantize

TARGET = pathlib.Path(__file__).with_name("compressed")
CASES = {"fp8": "float", "fp8_powers": "ue8m0"}


def save(folder, scales):
    torch.manual_seed(0)
    sizes = dict(vocab_size=8, hidden_size=32, num_hidden_layers=1, intermediate_size=64)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    how = transformers.FineGrainedFP8Config(
        weight_block_size=(16, 32), scale_fmt=scales, modules_to_not_convert=["lm_head"]
    )
    operation = Fp8Quantize(types.SimpleNamespace(quantization_config=how))
    tensors = {}
    for name, x in model.state_dict().items():
        chosen = name.endswith("proj.weight")
        tensors |= operation.convert({name: x}) if chosen else {name: x}
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    text = json.loads(path.read_text()) | {"quantization_config": how.to_dict()}
    path.write_text(json.dumps(text, indent=2) + "\n")
    how = transformers.FineGrainedFP8Config(dequantize=True)
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)
    arrays = {
        name: x.float().numpy()
        for name, x in dense.state_dict().items()
        if name.endswith("proj.weight")
    }
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    made_by = json.dumps({"script": "tests/data/make_fp8_goldens.py", **versions})
    np.savez_compressed(folder / "expected.npz", made_by=made_by, **arrays)


def main():
    for name, scales in CASES.items():
        save(TARGET / name, scales)


if __name__ == "__main__":
    main()
