"""Functions for attention layers, under the names that EasyDeL uses.

Heads and positions (`attention`), meshes (`meshes`), checkpoint policies and quantized products
(`policies`), and dtypes and docstrings (`functions`). Docstrings say if EasyDeL's code fails, or does
something other than it says.
"""

from haiku_implicit.layers.attention import (
    apply_rotary_pos_emb,
    repeat_kv_bnsh,
    repeat_kv_bsnh,
    rotate_half,
)
from haiku_implicit.layers.functions import add_start_docstrings, canonicalize_dtype
from haiku_implicit.layers.meshes import (
    create_mesh,
    get_names_from_partition_spec,
    get_ranks_and_size,
    names_in_mesh,
    with_sharding_constraint,
)
from haiku_implicit.layers.policies import get_dot_general_by_bits, get_gradient_checkpoint_policy

__all__ = [
    "add_start_docstrings",
    "apply_rotary_pos_emb",
    "canonicalize_dtype",
    "create_mesh",
    "get_dot_general_by_bits",
    "get_gradient_checkpoint_policy",
    "get_names_from_partition_spec",
    "get_ranks_and_size",
    "names_in_mesh",
    "repeat_kv_bnsh",
    "repeat_kv_bsnh",
    "rotate_half",
    "with_sharding_constraint",
]
