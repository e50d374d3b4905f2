"""`VeRA`: LoRA with random factors that all weights share, and trained scales (Kopiczko et al. 2023, arXiv:2310.11454)."""

import dataclasses
from typing import Any

from haiku_implicit.adapters.adapter import Adapter
from haiku_implicit.arrays.lora import LoRA
from haiku_implicit.core.fields import FROZEN


@dataclasses.dataclass
class VeRA(Adapter):
    """The weight `w + (a * d) @ (b * e)`, of which only the vectors `d` and `e` are trained.

    Attributes:
      w: `[..., n, m]`, the frozen weight.
      a: `[..., n, r]`, and
      b: `[..., r, m]`: random, and frozen; one array may serve many weights.
      d: `[..., r]`.
      e: `[..., m]`, zeros at first.
    """

    a: Any = dataclasses.field(metadata=FROZEN)
    b: Any = dataclasses.field(metadata=FROZEN)
    d: Any
    e: Any

    def equivalent(self) -> LoRA:
        return LoRA(self.w, self.a * self.d[..., None, :], self.b * self.e[..., None, :])
