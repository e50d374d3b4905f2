"""Makes the folders of compressed/: models that llm-compressor wrote, and the weights that it reads.

Each has `config.json` and `model.safetensors` of a tiny random Llama, as llm-compressor saves them in the
formats of compressed-tensors, and `expected.npz` with the dense weights that transformers makes of them
by compressed-tensors' own decompression, in float32. In `integers` and `floats` each weight of a layer has
a scheme of its own; `linear` has one scheme for all. `order` is a weight with `actorder="group"`
(`weight_g_idx`), as compressed-tensors before 0.19 wrote it, and the values that it reads.

To make them anew, in environments of their own::

    python -m venv new && new/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    new/bin/python tests/data/make_compressed_tensors_goldens.py
    python -m venv old && old/bin/pip install torch==2.13.0 compressed-tensors==0.12.2 'transformers<5'
    old/bin/python tests/data/make_compressed_tensors_goldens.py order
"""

import json
import pathlib
import sys
import tempfile

import compressed_tensors
import numpy as np
import safetensors.torch
import torch
import transformers

TARGET = pathlib.Path(__file__).with_name("compressed")
INT4 = dict(num_bits=4, type="int", strategy="group", group_size=16, symmetric=True)
FP8 = dict(num_bits=8, type="float", symmetric=True)
FP4 = dict(num_bits=4, type="float", symmetric=True)
TOKEN = dict(strategy="token", dynamic=True, symmetric=True, num_bits=8)
INTEGERS = {
    "q_proj": dict(weights=INT4),
    "k_proj": dict(weights=INT4 | dict(symmetric=False)),
    "v_proj": dict(weights=dict(num_bits=4, type="int", strategy="channel")),
    "o_proj": dict(
        weights=dict(num_bits=8, type="int", strategy="channel"),
        input_activations=TOKEN | dict(type="int"),
    ),
    "gate_proj": dict(weights=dict(num_bits=8, type="int", strategy="channel", symmetric=False)),
    "up_proj": dict(weights=INT4 | dict(num_bits=3, group_size=32)),
    "down_proj": dict(weights=INT4 | dict(num_bits=7)),
}
FLOATS = {
    "q_proj": dict(weights=FP8 | dict(strategy="tensor"), input_activations=FP8 | dict(strategy="tensor", dynamic=True)),
    "k_proj": dict(weights=FP8 | dict(strategy="channel"), input_activations=TOKEN | dict(type="float")),
    "v_proj": dict(weights=FP8 | dict(strategy="block", block_structure=[16, 16])),
    "gate_proj": dict(weights=FP8 | dict(strategy="block", block_structure=[24, 32])),
    "o_proj": dict(weights=FP4 | dict(strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")),
    "up_proj": dict(weights=FP4 | dict(strategy="group", group_size=32, scale_dtype="torch.uint8")),
    "down_proj": dict(weights=FP8 | dict(strategy="group", group_size=32, scale_dtype="torch.uint8")),
}  # fmt: skip
CASES = {"integers": (INTEGERS, torch.bfloat16), "floats": (FLOATS, torch.bfloat16)}
CASES["linear"] = ({"Linear": dict(weights=INT4)}, torch.float32)


def model(folder, dtype):
    """A model that lies in a folder, as llm-compressor wants it."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=8, hidden_size=32, num_hidden_layers=1, intermediate_size=64)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)


def made_by(**versions):
    return json.dumps({"script": "tests/data/make_compressed_tensors_goldens.py", **versions})


def save(folder, schemes, dtype):
    import llmcompressor
    from llmcompressor.modifiers.quantization import QuantizationModifier

    def target(name):
        return name if name == "Linear" else f"re:.*{name}"

    groups = {
        f"group_{i}": dict(s, targets=[target(n)]) for i, (n, s) in enumerate(schemes.items())
    }
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    with tempfile.TemporaryDirectory() as dense:
        new = model(dense, dtype)
        llmcompressor.oneshot(model=new, recipe=recipe)
        new.save_pretrained(folder, save_compressed=True)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    how = transformers.CompressedTensorsConfig(run_compressed=False)
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)
    arrays = {
        name: x.float().numpy()
        for name, x in dense.state_dict().items()
        if name.endswith("proj.weight")
    }
    versions = made_by(
        llmcompressor=llmcompressor.__version__,
        compressed_tensors=compressed_tensors.__version__,
        transformers=transformers.__version__,
        torch=torch.__version__,
    )
    np.savez_compressed(folder / "expected.npz", made_by=versions, **arrays)


def save_in_order(folder):
    """One weight whose groups are of inputs in the order of their activations."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    name = "model.layers.0.self_attn.q_proj"
    weights = INT4 | dict(actorder="group")
    config = QuantizationConfig(
        config_groups={"group_0": dict(targets=["Linear"], weights=weights)},
        format="pack-quantized",
        quantization_status="compressed",
    )
    args = config.config_groups["group_0"].weights
    weight = torch.randn(32, 64, dtype=torch.float16)
    g_idx = torch.randperm(64) // 16
    groups = weight[:, torch.argsort(g_idx)].unflatten(1, (-1, 16))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    compressor = PackedQuantizationCompressor(config)
    own = {"weight_scale": scale, "weight_g_idx": g_idx.int()}
    own |= compressor.compress_weight(weight, scale, args, zero, g_idx)
    dense = compressor.decompress_weight(own, args)
    folder.mkdir(exist_ok=True)
    tensors = {f"{name}.{part}": x.contiguous() for part, x in own.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.dumps({"quantization_config": config.model_dump(mode="json")}, indent=2)
    (folder / "config.json").write_text(text + "\n")
    versions = made_by(compressed_tensors=compressed_tensors.__version__, torch=torch.__version__)
    arrays = {f"{name}.weight": dense.float().numpy()}
    np.savez_compressed(folder / "expected.npz", made_by=versions, **arrays)


def main():
    for name in sys.argv[1:] or CASES:
        if name == "order":
            save_in_order(TARGET / name)
        else:
            save(TARGET / name, *CASES[name])


if __name__ == "__main__":
    main()
