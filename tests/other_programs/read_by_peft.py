"""Adapters that `save_peft` writes, read by PEFT: the outputs of the same model in PyTorch.

`bash tests/run_other_programs.sh peft` runs it. What PEFT then saves is read here again.
"""

import pathlib
import tempfile
import warnings
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch

import haiku_implicit as hki

VOCABULARY, WIDTH, HIDDEN, OUTPUTS = 11, 12, 16, 5
# (`head` is the end of another name.)
NAMES = {
    "embed/embeddings": "embed",
    "block_up/w": "block.up",
    "block_head/w": "block.head",
    "head/w": "head",
}
BIASES = {path[:-1] + "b": f"{m}.bias" for path, m in NAMES.items() if path.endswith("/w")}
LINEAR = ".*/w"
CASES = {
    "LoRA": lambda p: hki.add_lora(p, 0, rank=4, alpha=6.0, targets=LINEAR),
    "LoRA on one weight": lambda p: hki.add_lora(p, 0, rank=4, alpha=6.0, targets="block_head/w"),
    "LoRA, ranks and alphas by weight": lambda p: hki.add_lora(
        hki.add_lora(
            hki.add_lora(p, 0, rank=2, targets="head/w"), 1, rank=3, alpha=1.5, targets="block_head/w"
        ), 2, rank=4, alpha=8.0, targets="block_up/w"
    ),
    "rsLoRA": lambda p: hki.add_lora(
        p, 0, rank=4, alpha=6.0, rank_stabilized=True, targets=LINEAR
    ),
    "LoRA, embedding too": lambda p: hki.add_lora(p, 0, rank=4, alpha=6.0, targets=list(NAMES)),
    "PiSSA": lambda p: hki.add_lora(p, 0, rank=4, alpha=6.0, init="pissa", targets=LINEAR),
    "OLoRA, rsLoRA": lambda p: hki.add_lora(
        p, 0, rank=3, alpha=2.0, rank_stabilized=True, init="olora", targets=LINEAR
    ),
    "DoRA": lambda p: hki.add_adapter(p, 0, "dora", rank=4, alpha=6.0, targets=LINEAR),
    "DoRA, embedding too": lambda p: hki.add_adapter(
        p, 0, "dora", rank=4, alpha=6.0, targets=list(NAMES)
    ),
    "LoRA and trained rows": lambda p: hki.add_adapter(
        hki.add_lora(p, 0, rank=4, alpha=6.0, targets="block_up/w"), 0, "trained_rows",
        ids=[7, 2], targets="embed/embeddings",
    ),
}  # fmt: skip
# Parameters that are trained as a whole beside an adapter.
UP = "block_up/w"
WHOLE: dict[str, tuple[str, list[str]]] = {
    "biases": (LINEAR, ["block_up/b", "head/b"]),
    "modules": (UP, ["head/w", "head/b", "block_head/w", "block_head/b"]),
    "an embedding and a bias": (UP, ["embed/embeddings", "head/b"]),
}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.head(torch.tanh(self.up(x)))


class Twin(torch.nn.Module):
    """The model in PyTorch."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = torch.nn.Linear(WIDTH, OUTPUTS)

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def model(ids: jax.Array) -> jax.Array:
    """The model in Haiku."""
    x = hk.Embed(VOCABULARY, WIDTH, name="embed")(ids)
    y = jnp.tanh(hk.Linear(HIDDEN, name="block_up")(x))
    return hk.Linear(OUTPUTS, name="head")(x + hk.Linear(WIDTH, name="block_head")(y))


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    transformed = hki.transform_implicit(hk.without_apply_rng(hk.transform(model)))
    ids = np.arange(10).reshape(2, 5)
    cases = {name: (add, []) for name, add in CASES.items()}
    for name, (targets, whole) in WHOLE.items():
        add = lambda p, targets=targets: hki.add_lora(p, 0, rank=4, targets=targets)  # noqa: E731
        cases[f"LoRA and {name}"] = (add, whole)
    for name, (add, whole) in cases.items():
        began = add(params_of(Twin()))
        params = trained(began, whole)
        want = np.asarray(transformed.apply(params, ids))
        base = np.asarray(transformed.apply(params_of(Twin()), ids))
        with tempfile.TemporaryDirectory() as folder:
            own, theirs = pathlib.Path(folder) / "own", pathlib.Path(folder) / "theirs"
            adapter = hki.get_adapter(params, trainable_dense=whole or None)
            hki.save_peft(own, adapter, NAMES | BIASES, initial=hki.get_adapter(began))
            read = read_by_peft(own)
            got = read(torch.from_numpy(ids)).numpy()
            read.save_pretrained(theirs)
            modules = {module: path for path, module in (NAMES | BIASES).items()}
            again = hki.load_peft(theirs, modules)
        back = hki.set_adapter(params_of(Twin()), again)
        difference = np.abs(got - want).max()
        assert np.abs(want - base).max() > 0.05, name  # the adapter does something
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(transformed.apply(back, ids), want, rtol=1e-5, atol=1e-5)
        print(f"{name}: {difference:.1e} apart, outputs up to {np.abs(want).max():.2f}")
    check_what_is_not_exchanged()


def params_of(twin: Twin) -> Any:
    """The parameters of the twin, always the same ones."""
    rng = np.random.default_rng(0)
    params: dict[str, dict[str, Any]] = {}
    for path, module in NAMES.items():
        own, key = path.rsplit("/", 1)
        shape = twin.get_submodule(module).weight.shape
        w = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[-1])
        params[own] = {key: jnp.asarray(w.T if key == "w" else w)}
        if key == "w":
            params[own]["b"] = jnp.asarray(rng.normal(size=shape[0]), jnp.float32)
    return params


def trained(params: Any, whole: list[str]) -> Any:
    """Random numbers in place of the zeros that corrections begin with, and in dense parameters."""
    trainable, frozen = hki.partition(params, trainable_dense=whole or False)
    rng = np.random.default_rng(1)
    moved = lambda x: x + 0.3 * rng.normal(size=np.shape(x)).astype(np.float32)  # noqa: E731
    return hki.combine(jax.tree.map(moved, trainable), frozen)


def read_by_peft(folder: pathlib.Path) -> Any:
    """The twin with the adapter of a folder; a warning, of missing tensors say, is an error."""
    twin, params = Twin(), params_of(Twin())
    for path, module in NAMES.items():
        own, key = path.rsplit("/", 1)
        layer, w = twin.get_submodule(module), np.asarray(params[own][key])
        layer.weight.copy_(torch.tensor(w.T if key == "w" else w))
        if key == "w":
            layer.bias.copy_(torch.tensor(np.asarray(params[own]["b"])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return peft.PeftModel.from_pretrained(twin, folder).eval()


def check_what_is_not_exchanged() -> None:
    """Biases of the corrections are not read."""
    with tempfile.TemporaryDirectory() as folder:
        config = peft.LoraConfig(r=2, lora_bias=True, target_modules=["up"])
        peft.get_peft_model(Twin(), config).save_pretrained(folder)
        refused("lora_bias: True is not read", lambda: hki.load_peft(folder, lambda module: module))


def refused(message: str, fun: Any) -> None:
    try:
        fun()
    except ValueError as e:
        assert message in str(e), e
        print(f"refused: {str(e).rpartition('/')[2]}")
    else:
        raise AssertionError(f"no error: {message}")


if __name__ == "__main__":
    main()
