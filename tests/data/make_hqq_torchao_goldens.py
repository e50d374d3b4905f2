"""Makes the folders of hqq_torchao/: models that HQQ and TorchAO quantized, and the weights they read.

Each has `model.safetensors` and `expected.npz`, the weights that the writer itself makes dense, in
float32; `torchao` also has a `config.json`. Each weight has a scheme of its own. `torchao` is a tiny
random Llama that transformers quantized by TorchAO and saved. `hqq` has the tensors of HQQ's `HQQLinear`,
with `compute_dtype` float32, so that its own values have one rounding; `hqq_half` has the same in float16.

To make them anew, in an environment of its own::

    python -m venv new && new/bin/pip install torch==2.13.0 torchao==0.18.0 transformers==5.24.0 hqq==0.2.8.post1
    new/bin/python tests/data/make_hqq_torchao_goldens.py
"""

import importlib.metadata
import pathlib
import tempfile

import hqq.core.quantize
import numpy as np
import safetensors.torch
import torch
import torchao.quantization as ao
import transformers

TARGET = pathlib.Path(__file__).with_name("hqq_torchao")
GROUPS, ROWS, ALL = ao.PerGroup(32), ao.PerRow(), ao.PerTensor()
TORCHAO = {
    "q_proj": ao.Int8WeightOnlyConfig(granularity=ROWS),
    "k_proj": ao.Int8WeightOnlyConfig(granularity=ALL),
    "v_proj": ao.Float8WeightOnlyConfig(),
    "o_proj": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=GROUPS),
    "gate_proj": ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int3, granularity=GROUPS, mapping_type=ao.MappingType.ASYMMETRIC
    ),
    "up_proj": ao.Int8DynamicActivationInt8WeightConfig(),
    "down_proj": ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerAxis(0)),
}
HQQ = {
    "q": dict(nbits=4, group_size=16),
    "k": dict(nbits=8, group_size=32),
    "v": dict(nbits=3, group_size=16),
    "o": dict(nbits=2, group_size=32),
    "gate": dict(nbits=1, group_size=32),
    "up": dict(nbits=4, group_size=16, view_as_float=True),
    "down": dict(nbits=5, group_size=32),
    "columns": dict(nbits=4, group_size=16, axis=0),
    "columns of 3": dict(nbits=3, group_size=16, axis=0),
    "across rows": dict(nbits=4, group_size=48),
    "all": dict(nbits=8, group_size=32, channel_wise=False),
    "rounded": dict(nbits=4, group_size=32, round_zero=True),
}
HALF = "q", "v", "up"


def save(folder, tensors, expected, **metadata):
    folder.mkdir(parents=True, exist_ok=True)
    if tensors:
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata)
    for path in folder.iterdir():
        path.chmod(0o644)
    versions = {
        x: importlib.metadata.version(x) for x in ("torch", "torchao", "transformers", "hqq")
    }
    arrays = {name: x.detach().float().numpy() for name, x in expected.items()}
    np.savez_compressed(folder / "expected.npz", made_by=str(versions), **arrays)


def save_torchao(folder):
    torch.manual_seed(0)
    sizes = dict(vocab_size=8, hidden_size=32, num_hidden_layers=1, intermediate_size=64)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    blocks = {name: "self_attn" if name[0] in "qkvo" else "mlp" for name in TORCHAO}
    kinds = {f"model.layers.0.{blocks[name]}.{name}": x for name, x in TORCHAO.items()}
    how = transformers.TorchAoConfig(ao.FqnToConfig(kinds))
    with tempfile.TemporaryDirectory() as dense:
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(dense)
        model = transformers.LlamaForCausalLM.from_pretrained(
            dense, dtype=torch.bfloat16, quantization_config=how
        )
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights = {k: x for k, x in model.state_dict().items() if k.endswith("proj.weight")}
    save(folder, {}, {k: x.dequantize() for k, x in weights.items()})


def save_hqq(folder, dtype, names):
    torch.manual_seed(0)
    tensors, expected = {}, {}
    for name in names:
        options = {"axis": 1, **HQQ[name]}
        config = hqq.core.quantize.BaseQuantizeConfig()
        config["weight_quant_params"] |= options
        layer = hqq.core.quantize.HQQLinear.from_weights(
            torch.randn(24, 32), None, config, compute_dtype=dtype, device="cpu"
        )
        expected[f"{name}.weight"] = layer.dequantize()
        tensors |= {f"{name}.{k}": x.clone().contiguous() for k, x in layer.state_dict().items()}
    save(folder, tensors, expected)


def main():
    save_torchao(TARGET / "torchao")
    save_hqq(TARGET / "hqq", torch.float32, HQQ)
    save_hqq(TARGET / "hqq_half", torch.float16, HALF)


if __name__ == "__main__":
    main()
