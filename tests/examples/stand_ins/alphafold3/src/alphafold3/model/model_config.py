"""Settings, under the names of AlphaFold 3's."""

import dataclasses


@dataclasses.dataclass
class GlobalConfig:
    bfloat16: str = "all"
    flash_attention_implementation: str = "triton"


@dataclasses.dataclass
class Stack:
    num_head: int = 2
    num_layer: int = 4
    num_blocks: int = 4
    super_block_size: int = 2
    num_intermediate_factor: int = 2
