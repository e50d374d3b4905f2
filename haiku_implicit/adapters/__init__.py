"""Adapters: weights that hold a frozen one, and little beside it that is trained. A file each."""

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.adapters.dora import DoRA
from haiku_implicit.adapters.ia3 import IA3
from haiku_implicit.adapters.loha import LoHa
from haiku_implicit.adapters.lokr import LoKr
from haiku_implicit.adapters.oft import OFT
from haiku_implicit.adapters.operators import BlockDiagonal, Diagonal, Kronecker, Operator, Sparse
from haiku_implicit.adapters.rotated import Rotated
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.adapters.vera import VeRA

__all__ = [
    "Adapter",
    "BlockDiagonal",
    "Diagonal",
    "DoRA",
    "IA3",
    "Kronecker",
    "LoHa",
    "LoKr",
    "OFT",
    "Operator",
    "Rotated",
    "Sparse",
    "Sum",
    "VeRA",
]
