"""Makes peft.npz: what PEFT computes, for tests/adapters/test_peft.py.

For each method PEFT puts an adapter with random numbers on a small layer, in float32 on the CPU. The file
holds the layer's weight, PEFT's own parameters under PEFT's own names, the inputs, the outputs and the
gradients of the sum of the outputs times `cotangent`. LoRA of convolutions is without dilation and groups:
PEFT 0.21 leaves the dilation out of its own convolution, and groups mean something else there. BOFT has
one factor, since more need PEFT's extension for CUDA; of more factors the file has the rotation, made of
PEFT's permutations and blocks.

To make it anew, in an environment of its own::

    python -m venv peft_env && peft_env/bin/pip install torch==2.13.0 peft
    peft_env/bin/python tests/data/make_peft_goldens.py
"""

import pathlib

import numpy as np
import peft
import torch

TARGET = pathlib.Path(__file__).with_name("peft.npz")
N, M = 12, 8
CONVOLUTIONS = {
    "conv1d": (torch.nn.Conv1d, dict(kernel_size=3, stride=2, padding=1), (2, 6, 9)),
    "conv2d": (torch.nn.Conv2d, dict(kernel_size=3, padding="same"), (2, 6, 7, 5)),
    "conv3d": (torch.nn.Conv3d, dict(kernel_size=(3, 1, 2), stride=(1, 2, 1)), (1, 6, 5, 4, 4)),
}
METHODS = {
    "lora": lambda: peft.LoraConfig(r=2, lora_alpha=3),
    "rslora": lambda: peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True),
    "dora": lambda: peft.LoraConfig(r=2, lora_alpha=3, use_dora=True),
    "loha": lambda: peft.LoHaConfig(r=2, alpha=3),
    "lokr": lambda: peft.LoKrConfig(r=1, alpha=3, decompose_factor=4),
    "lokr dense": lambda: peft.LoKrConfig(r=2, alpha=3, decompose_factor=4),
    "vera": lambda: peft.VeraConfig(r=2),
    "vblora": lambda: peft.VBLoRAConfig(r=2, num_vectors=5, vector_length=4),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[]),
    "ia3 inputs": lambda: peft.IA3Config(feedforward_modules=["layer"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, use_cayley_neumann=False),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=6, scaling=30.0),
    "shira": lambda: peft.ShiraConfig(r=1),
    "trained rows": lambda: peft.TrainableTokensConfig(token_indices=[3, 11]),
    "layer norm": lambda: peft.LNTuningConfig(),
}


class Model(torch.nn.Module):
    """One layer, by the name of which the methods find it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def golden(name, layer, config, x):
    """The arrays of one method, by name."""
    config.target_modules = ["layer"]
    weight = layer.weight.detach().clone()
    model = peft.get_peft_model(Model(layer), config).base_model.model
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        with torch.no_grad():
            p.add_(0.3 * torch.randn_like(p))
    if x.dtype.is_floating_point:
        x.requires_grad_()
    out = model(x)
    cotangent = torch.randn_like(out)
    (out * cotangent).sum().backward()
    buffers = {k: b for k, b in model.named_buffers() if "BufferDict" not in k}
    arrays = {"weight": weight, "x": x, "out": out, "cotangent": cotangent, **buffers}
    arrays |= {f"trained/{k}": p for k, p in trained.items()}
    arrays |= {f"grad/{k}": p.grad for k, p in trained.items()}
    if x.grad is not None:
        arrays["grad_x"] = x.grad
    adapted = model.layer
    for field in ("indices", "shira_indices", "vera_A", "vera_B"):
        if hasattr(adapted, field):
            arrays[field] = getattr(adapted, field)["default"]
    kept = {k: v.detach().numpy() for k, v in arrays.items() if "boft_P" not in k}
    return {f"{name}/{k}": v for k, v in kept.items()}


def butterfly(factors, size):
    """The rotation of BOFT, as `Linear.forward` of PEFT makes it from several factors."""
    config = peft.BOFTConfig(boft_block_size=size, target_modules=["layer"])
    layer = peft.get_peft_model(Model(torch.nn.Linear(N, M)), config).base_model.model.layer
    blocks = 0.3 * torch.randn(factors, N // size, size, size)
    rotation = torch.eye(N)
    for i, own in enumerate(blocks):
        order = layer.block_butterfly_perm(N, (N // size) // 2**i, size // 2, factors - 1)
        permute = layer.perm2mat(order)
        factor = permute @ torch.block_diag(*layer.cayley_batch(own)) @ permute.T
        rotation = factor @ rotation
    return {"blocks": blocks.numpy(), "rotation": rotation.numpy()}


def main():
    torch.manual_seed(0)
    arrays = {}
    for name, config in METHODS.items():
        x = torch.randn(5, N)
        layer = torch.nn.Linear(N, M, bias=False)
        if name == "trained rows":
            layer, x = torch.nn.Embedding(N, M), torch.tensor([[3, 0], [11, 3]])
        if name == "layer norm":
            layer = torch.nn.LayerNorm(N)
        arrays |= golden(name, layer, config(), x)
    for name, (kind, options, shape) in CONVOLUTIONS.items():
        config = peft.LoraConfig(r=2, lora_alpha=3)
        arrays |= golden(name, kind(6, 8, bias=False, **options), config, torch.randn(shape))
    for factors, size in ((2, 2), (2, 6), (1, 4)):
        found = butterfly(factors, size)
        arrays |= {f"butterfly {factors} {size}/{k}": v for k, v in found.items()}
    np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main()
