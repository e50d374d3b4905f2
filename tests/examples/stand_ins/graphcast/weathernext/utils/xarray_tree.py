"""Trees of named arrays."""

import jax

map_structure = jax.tree.map
