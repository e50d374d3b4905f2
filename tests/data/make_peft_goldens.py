"""Makes peft.npz, peft_adapters.npz, peft_parts.npz, peft_starts.npz, peft_steps.npz and peft_config.json.

In peft.npz, for tests/adapters/test_peft.py: for each method PEFT puts an adapter with random numbers on a small layer, in float32 on the CPU. The file
holds the layer's weight, PEFT's own parameters under PEFT's own names, the inputs, the outputs and the
gradients of the sum of the outputs times `cotangent`. LoRA of convolutions is without dilation and groups:
PEFT 0.21 leaves the dilation out of its own convolution, and groups mean something else there. BOFT has
one factor, since more need PEFT's extension for CUDA; of more factors the file has the rotation, made of
PEFT's permutations and blocks.

In peft_adapters.npz, for tests/interchange/test_peft.py: a small model, and for each configuration of LoRA
the files that PEFT saves, and the outputs of a model into which PEFT loads them again.

In peft_parts.npz: the same for a model with biases and a head, and configurations that train more than
LoRA's factors.

In peft_starts.npz, for tests/adapters/test_lora_init.py: the factors and the rest of a weight as CorDA and
LoRA-GA begin.

In peft_steps.npz, for tests/test_factors.py: the parameters after each of some steps with PEFT's
optimizers for LoRA+ and LoRA-FA. PEFT multiplies LoRA-FA's gradients in bfloat16; here it does so in
float32, and with a small epsilon, which its Adam adds in another place than torch's and optax's.

In peft_config.json: the keys of a configuration of LoRA, with the values that PEFT writes by default.

To make them anew, in an environment of its own::

    python -m venv peft_env && peft_env/bin/pip install torch==2.13.0 peft attrs
    peft_env/bin/python tests/data/make_peft_goldens.py
"""

import copy
import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
import peft
import peft.optimizers
import safetensors.torch
import torch
from peft.tuners.lora.config import CordaConfig, LoraGAConfig, MontecloraConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga

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
    "miss": lambda: peft.MissConfig(r=3),
    "miss with a rest": lambda: peft.MissConfig(r=5),
    "hira": lambda: peft.HiraConfig(r=2),
    "c3a": lambda: peft.C3AConfig(block_size=4),
    "gralora": lambda: peft.GraloraConfig(r=4, alpha=3, gralora_k=2),
    "randlora": lambda: peft.RandLoraConfig(r=3, randlora_alpha=4),
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
    # (PEFT 0.21 writes C3A's gradient of the inputs by hand, and torch's own is another one.)
    if x.grad is not None and name != "c3a":
        arrays["grad_x"] = x.grad
    adapted = model.layer
    for field in ("indices", "shira_indices", "vera_A", "vera_B", "randlora_A", "randlora_B"):
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


# Configurations of LoRA that are read here. `initial` is how a PiSSA adapter becomes a plain one.
CONFIGURATIONS = {
    "plain": {},
    "dropout": dict(lora_dropout=0.5),
    "no zeros": dict(init_lora_weights=False),
    "gaussian": dict(init_lora_weights="gaussian"),
    "orthogonal": dict(init_lora_weights="orthogonal"),
    "eva": dict(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0)),
    "mica": dict(init_lora_weights="mica"),
    "ranks and alphas": dict(
        rank_pattern={r"layers\.1\.up": 1, "^model.layers.0.down": 3}, alpha_pattern={"up": 5}
    ),
    "rslora": dict(use_rslora=True, rank_pattern={"down": 3}, alpha_pattern={"^up": 5}),
    "excluded": dict(exclude_modules=["1.down"]),
    "excluded by a pattern": dict(exclude_modules=r".*\.1\.up"),
    "pattern of modules": dict(target_modules=r".*layers\.1\.(up|down)"),
    "one layer": dict(layers_to_transform=1),
    "layers": dict(layers_to_transform=[0], layers_pattern="layers"),
    "embedding": dict(target_modules=["embed", "up"]),
    "dora": dict(use_dora=True),
    "dora of an embedding": dict(use_dora=True, target_modules=["embed", "up"]),
    "velora": dict(velora_config=peft.VeloraConfig(num_groups=2)),
    "monteclora": dict(monteclora_config=MontecloraConfig(num_samples=2)),
    "groups of qalora": dict(qalora_group_size=2),
    "pissa": dict(init_lora_weights="pissa"),
    "pissa, rslora": dict(init_lora_weights="pissa", use_rslora=True, rank_pattern={"up": 3}),
    "pissa, dora": dict(init_lora_weights="pissa", use_dora=True),
    "pissa, embedding": dict(init_lora_weights="pissa", target_modules=["embed", "up"]),
    "pissa, converted": dict(init_lora_weights="pissa"),
    "olora": dict(init_lora_weights="olora"),
    "olora, dora": dict(init_lora_weights="olora", use_dora=True),
    "olora, converted": dict(init_lora_weights="olora", use_rslora=True),
    "pissa, no higher rank": dict(init_lora_weights="pissa", rank_pattern={"up": 7}),
    "olora, no higher rank": dict(
        init_lora_weights="olora", rank_pattern={"up": 9}, use_rslora=True, use_dora=True
    ),
}


# Configurations that train more than factors, for a model with biases.
PARTS = {
    "all biases": dict(bias="all"),
    "biases of lora": dict(bias="lora_only"),
    "biases and dora": dict(bias="all", use_dora=True),
    "modules": dict(modules_to_save=["head", "norm"]),
    "embedding": dict(modules_to_save=["embed"]),
    "block": dict(modules_to_save=["layers.0"], layers_to_transform=1),
    "tokens": dict(trainable_token_indices=[7, 2]),
    "tokens by name": dict(trainable_token_indices={"embed": [3]}, modules_to_save=["head"]),
    "biases and modules": dict(bias="all", modules_to_save=["head", "norm"]),
    "biases and a block": dict(bias="all", modules_to_save=["layers.0"], layers_to_transform=1),
}


class Block(torch.nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8, bias=bias), torch.nn.Linear(8, 6, bias=bias)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(torch.nn.Module):
    """Layers by the names that PEFT's patterns are for: `model.layers.0.up`."""

    def __init__(self, bias=False):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed = torch.nn.Embedding(9, 6)
        self.model.layers = torch.nn.ModuleList([Block(bias), Block(bias)])

    def get_input_embeddings(self):
        return self.model.embed

    def forward(self, ids):
        x = self.model.embed(ids)
        for layer in self.model.layers:
            x = layer(x)
        return x


class WithHead(Blocks):
    """The same with biases, a norm and a head."""

    def __init__(self):
        super().__init__(bias=True)
        self.norm, self.head = torch.nn.LayerNorm(6), torch.nn.Linear(6, 5)

    def forward(self, ids):
        return self.head(self.norm(super().forward(ids)))


def saved_adapter(name, options, base, kind=Blocks):
    """The files of one configuration, and the outputs with them."""

    def fresh():
        model = kind()
        model.load_state_dict(base)
        return model

    options = dict(target_modules=["up", "down"]) | options
    model = peft.get_peft_model(fresh(), peft.LoraConfig(r=2, lora_alpha=3, **options))
    with tempfile.TemporaryDirectory() as folder:
        initial = pathlib.Path(folder) / "initial"
        model.save_pretrained(initial)
        for key, p in model.named_parameters():
            if "lora_" in key or (kind is WithHead and p.requires_grad):
                p.add_(0.3 * torch.randn_like(p))
        convert = dict(path_initial_model_for_weight_conversion=str(initial))
        model.save_pretrained(folder, **(convert if "converted" in name else {}))
        config = (pathlib.Path(folder) / "adapter_config.json").read_text()
        tensors = safetensors.torch.load_file(pathlib.Path(folder) / "adapter_model.safetensors")
        loaded = peft.PeftModel.from_pretrained(fresh(), folder).eval()
    out = loaded(IDS).numpy()
    np.testing.assert_allclose(out, model.eval()(IDS), rtol=1e-4, atol=1e-5)
    arrays = {f"{name}/tensors/{key}": x.numpy() for key, x in tensors.items()}
    return {f"{name}/config": np.array(config), f"{name}/out": out, **arrays}


IDS = torch.arange(8).reshape(2, 4)


@torch.no_grad()
def adapters():
    torch.manual_seed(0)
    base = Blocks().state_dict()
    arrays = {f"base/{key}": x.numpy() for key, x in base.items()} | {"ids": IDS.numpy()}
    for name, options in CONFIGURATIONS.items():
        arrays |= saved_adapter(name, options, base)
    return arrays


def starts():
    """LoRA as CorDA and LoRA-GA begin it: from inputs, and from a gradient."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(N, M, bias=False)
    x, target = torch.randn(40, N) @ torch.randn(N, N), torch.randn(40, M)
    arrays = {"weight": layer.weight.detach().numpy().copy(), "x": x.numpy()}
    for name, own in {
        "ipm": dict(init_lora_weights="corda", corda_config=CordaConfig(corda_method="ipm")),
        "kpm": dict(init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm")),
        "lora_ga": dict(init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig(scale="unit")),
    }.items():
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["layer"], **own)
        model = Model(copy.deepcopy(layer))

        def train_step(model=model):
            (model(x) * target).sum().backward()

        if name == "lora_ga":
            preprocess_loraga(model, config, train_step)
            arrays["gradient"] = model.layer._peft_loraga_grad.numpy().copy()
        else:
            preprocess_corda(model, config, run_model=lambda model=model: model(x))
        new = peft.get_peft_model(model, config).base_model.model.layer
        factors = new.lora_A["default"].weight, new.lora_B["default"].weight
        found = dict(zip("ab", factors, strict=True)) | {"rest": new.base_layer.weight}
        arrays |= {f"{name}/{k}": v.detach().numpy() for k, v in found.items()}
    return arrays


# An optimizer and a configuration for each; the options are those of PEFT's functions.
STEPS = {
    "plus": ("plus", dict(loraplus_lr_ratio=8.0), dict(bias="lora_only")),
    "plus, dora": (
        "plus",
        dict(loraplus_lr_ratio=4.0, loraplus_weight_decay=0.3),
        dict(use_dora=True),
    ),
    "fa": ("fa", dict(r=2, lora_alpha=3), {}),
    "fa, rslora": ("fa", dict(r=2, lora_alpha=3), dict(use_rslora=True)),
}


def steps():
    torch.manual_seed(0)
    base, (x, target) = Block(bias=True).state_dict(), torch.randn(2, 10, 6)
    arrays = {f"base/{key}": v.numpy() for key, v in base.items()}
    arrays |= {"x": x.numpy(), "target": target.numpy()}
    for name, (kind, options, own) in STEPS.items():
        block = Block(bias=True)
        block.load_state_dict(base)
        config = peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=["up", "down"], rank_pattern={"down": 3}, **own
        )
        model = peft.get_peft_model(block, config)
        if kind == "plus":
            optimizer = peft.optimizers.create_loraplus_optimizer(
                model, torch.optim.AdamW, lr=0.01, **options
            )
        else:
            optimizer = peft.optimizers.create_lorafa_optimizer(model, lr=0.01, **options)
            optimizer.param_groups[0]["eps"] = 1e-12
        found = {k: [] for k, p in model.named_parameters() if p.requires_grad or "lora" in k}
        for _ in range(5):
            for k, p in model.named_parameters():
                if k in found:
                    found[k].append(p.detach().numpy().copy())
            optimizer.zero_grad()
            ((model(x) - target) ** 2).sum().backward()
            with mock.patch("peft.optimizers.lorafa.is_bf16_available", lambda: False):
                optimizer.step()
        arrays |= {
            f"{name}/{k.removeprefix('base_model.model.')}": np.stack(v) for k, v in found.items()
        }
    return arrays


@torch.no_grad()
def parts():
    torch.manual_seed(0)
    base = WithHead().state_dict()
    arrays = {f"base/{key}": x.numpy() for key, x in base.items()} | {"ids": IDS.numpy()}
    for name, options in PARTS.items():
        arrays |= saved_adapter(name, options, base, WithHead)
    return arrays


def keys():
    config = peft.LoraConfig()
    written = json.loads(json.dumps(config.to_dict(), default=list))
    return {f.name: written.get(f.name) for f in dataclasses.fields(config)}


def main():
    np.savez_compressed(TARGET.with_name("peft_adapters.npz"), **adapters())
    np.savez_compressed(TARGET.with_name("peft_starts.npz"), **starts())
    np.savez_compressed(TARGET.with_name("peft_parts.npz"), **parts())
    np.savez_compressed(TARGET.with_name("peft_steps.npz"), **steps())
    text = json.dumps(keys(), indent=2)
    TARGET.with_name("peft_config.json").write_text(text + "\n", encoding="utf-8")
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
