"""The kinds of adapters that `benchmarks.adapters` trains, and the size of each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax

import haiku_implicit as hki


@dataclasses.dataclass(frozen=True)
class Kind:
    """A row of the comparison.

    Attributes:
      method: the name for `add_adapter`; '' trains the scales of normalization layers.
      options: its options for SmolLM2; `alpha` is twice the rank if the method has one, as in the main
        job.
      protein: the options that differ for ProteinMPNN.
      data: 'moments' or 'gradients' if the initialization `init(data)` takes these.
      optimizer: 'adam', 'lora+' or 'lora-fa'.
      draws: whether the parameters at the start depend on the seed.
      first: the first learning rate to try is `10^(first / 2)`.
    """

    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    protein: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""
    init: Any = None
    optimizer: str = "adam"
    draws: bool = True
    first: int = -5


ALPHA = 2  # alpha / rank of all kinds that have both
LORA = dict(rank=8, alpha=16.0)
FA = dict(rank=16, alpha=32.0), dict(rank=19, alpha=38.0)
RAND = dict(rank=22, alpha=44.0), dict(rank=5, alpha=10.0)
LOKR = dict(rank=47, alpha=94.0, factor=6), dict(rank=16, alpha=32.0, factor=2)
BOFT = dict(block_size=16, factors=2), dict(block_size=8, factors=4)
VB = (
    dict(rank=6, num_vectors=256, vector_length=192),
    dict(rank=2, num_vectors=128, vector_length=32),
)
FOURIER = dict(coefficients=11_630), dict(coefficients=3_545)

KINDS = {
    "LoRA": Kind("lora", LORA),
    "DoRA": Kind("dora", LORA),
    "MiSS": Kind("miss", dict(rank=16), dict(rank=19)),
    "HiRA": Kind("hira", dict(rank=8), first=-4),
    "GraLoRA": Kind("gralora", dict(rank=8, blocks=2, alpha=16.0)),
    "RandLoRA": Kind("randlora", *RAND, first=-4),
    "C3A": Kind("c3a", dict(block_size=48), dict(block_size=16), first=-2),
    "LoRA+": Kind("lora", LORA, optimizer="lora+", first=-7),
    "LoRA-FA": Kind("lora", *FA, optimizer="lora-fa"),
    "VeRA": Kind("vera", dict(rank=256), first=-3),
    "IA3": Kind("ia3", first=-3),
    "norms alone": Kind("", first=-4),
    "OFT": Kind("oft", dict(block_size=32)),
    "SHiRA": Kind("shira", dict(entries=11_630), dict(entries=3_545)),
    "LoRA, PiSSA": Kind("lora", LORA | dict(init="pissa"), draws=False, first=-6),
    "LoRA, EVA": Kind("lora", LORA, data="moments", init=hki.EVA, draws=False),
    "LoRA, CorDA": Kind("lora", LORA, data="moments", init=hki.CorDA, draws=False, first=-6),
    "LoRA, LoRA-GA": Kind("lora", LORA, data="gradients", init=hki.LoRAGA, draws=False, first=-6),
    "rsLoRA": Kind("lora", LORA | dict(rank_stabilized=True), first=-6),
    "LoHa": Kind("loha", dict(rank=4, alpha=8.0), first=-4),
    "LoKr": Kind("lokr", *LOKR),
    "BOFT": Kind("boft", *BOFT),
    "LoRA and diagonal": Kind("low_rank_diagonal", LORA),
    "LoRA, orthogonal": Kind("lora", LORA | dict(init="orthogonal")),
    "LoRA, OLoRA": Kind("lora", LORA | dict(init="olora"), draws=False, first=-6),
    "VB-LoRA": Kind("vblora", *VB, first=-3),
    "FourierFT": Kind("fourierft", *FOURIER, first=-2),
}
PLUS = 16  # LoRA+'s ratio of the learning rates of `b` and `a`


def optimizer_of(kind: Kind) -> optax.GradientTransformation:
    """Adam without its learning rate, as the kind varies it."""
    adam = optax.scale_by_adam()
    if kind.optimizer == "adam":
        return adam
    if kind.optimizer == "lora+":
        return optax.chain(adam, hki.scale_by_lora_plus(PLUS))
    return hki.lora_fa(adam, scale=ALPHA)


def factor_of(path: Any) -> str:
    """'a' or 'b': the factor of a LoRA that a path in the trained half leads to."""
    return jax.tree_util.keystr(path)[-1]


def trained_size(kind: Kind, trained: Any) -> int:
    """How many numbers the optimizer changes."""
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    fixed = "a" if kind.optimizer == "lora-fa" else ""
    return sum(x.size for path, x in leaves if not fixed or factor_of(path) != fixed)
