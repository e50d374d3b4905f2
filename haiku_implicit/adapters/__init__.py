"""Adapters: weights made of a frozen weight and a few trained numbers, one file per type."""

from haiku_implicit.adapters.c3a import C3A, Circulant
from haiku_implicit.adapters.dora import DoRA
from haiku_implicit.adapters.dropout import InputDropout
from haiku_implicit.adapters.gralora import BlockLowRank, GraLoRA
from haiku_implicit.adapters.hira import HiRA
from haiku_implicit.adapters.ia3 import IA3
from haiku_implicit.adapters.locon import LoCon
from haiku_implicit.adapters.loha import LoHa
from haiku_implicit.adapters.lokr import LoKr
from haiku_implicit.adapters.low_rank_diagonal import LowRankDiagonal
from haiku_implicit.adapters.miss import MiSS
from haiku_implicit.adapters.oft import BOFT, OFT
from haiku_implicit.adapters.operators import (
    BlockDiagonal,
    Diagonal,
    Hadamard,
    Kronecker,
    Operator,
)
from haiku_implicit.adapters.places import Fourier, FourierFT, SHiRA, Sparse
from haiku_implicit.adapters.randlora import RandLoRA
from haiku_implicit.adapters.rotated import Rotated
from haiku_implicit.adapters.sums import Sum
from haiku_implicit.adapters.trained_rows import TrainedRows
from haiku_implicit.adapters.vblora import VBLoRA, VectorBank
from haiku_implicit.adapters.vera import RandomMatrix, VeRA
from haiku_implicit.arrays.adapter import Adapter

__all__ = [
    "BOFT",
    "IA3",
    "OFT",
    "Adapter",
    "BlockDiagonal",
    "Diagonal",
    "DoRA",
    "Fourier",
    "FourierFT",
    "Hadamard",
    "InputDropout",
    "Kronecker",
    "LoCon",
    "LoHa",
    "LoKr",
    "LowRankDiagonal",
    "Operator",
    "RandomMatrix",
    "Rotated",
    "SHiRA",
    "Sparse",
    "Sum",
    "TrainedRows",
    "VBLoRA",
    "VeRA",
    "VectorBank",
    "C3A",
    "Circulant",
    "BlockLowRank",
    "GraLoRA",
    "HiRA",
    "MiSS",
    "RandLoRA",
]
